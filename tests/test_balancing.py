"Balancing: never worse than longest first alone, equal counts, no part empty; costs found from measurements."
import random
import time

import pytest
import torch
from torch.testing import assert_close

from rlblocks.data.balancing import balance, balance_families, fit_row_costs, row_costs


def spread(parts, costs):
    loads = [sum(costs[i] for i in p) for p in parts]
    return max(loads) - min(loads)


def longest_first(costs, n):
    parts = [[] for _ in range(n)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(parts, key=lambda p: (sum(costs[j] for j in p), len(p))).append(i)
    return parts


def heaviest(parts, costs): return max(sum(costs[i] for i in p) for p in parts)


def cases(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randint(1, 9), [rng.choice([0, 0.5, rng.randint(0, 100), int(rng.lognormvariate(4, 1))])
                                  for _ in range(rng.randint(0, 40))]


@pytest.mark.parametrize("equal", [False, True])
def test_every_item_once_no_part_empty_counts_equal(equal):
    for n, costs in cases(2, 500):
        parts = balance(costs, n, equal=equal)
        assert len(parts) == n and sorted(i for p in parts for i in p) == list(range(len(costs)))
        assert all(p == sorted(p) for p in parts)
        assert len(costs) < n or all(parts)
        loads = [sum(costs[i] for i in p) for p in parts]
        assert loads == sorted(loads, reverse=True)
        if equal: assert max(map(len, parts)) - min(map(len, parts)) <= 1
        else: assert max(loads) - min(loads) <= max(costs, default=0)


def test_never_worse_than_longest_first_and_much_better_with_few_rows_a_part():
    "What swaps are for: 8 rows a part leave longest first 2 % above the mean, and a step waits for it."
    for n, costs in cases(4, 300):
        if costs:
            assert heaviest(balance(costs, n, within=0), costs) <= heaviest(longest_first(costs, n), costs)*(1 + 1e-12)
    rng, ours, theirs = random.Random(6), 0, 0
    for _ in range(40):
        n, lengths = rng.randint(3, 20), [rng.randint(64, 536) for _ in range(120)]
        ours, theirs = ours + spread(balance(lengths, n, within=0),
                                     lengths), theirs + spread(longest_first(lengths, n), lengths)
    assert ours < .1*theirs


def test_at_most_a_third_above_the_best_there_is():
    "Graham 1969: 4/3 − 1/(3n), here against every partition."
    rng = random.Random(5)
    for _ in range(200):
        n, costs = rng.randint(1, 4), [rng.randint(0, 30) for _ in range(rng.randint(1, 8))]
        plans = {(0,)*n}
        for c in costs:
            plans = {tuple(sorted(x + c*(k == at) for k, x in enumerate(plan))) for plan in plans for at in range(n)}
        assert heaviest(balance(costs, n, within=0), costs) <= (4/3 - 1/(3*n))*min(map(max, plans)) + 1e-9


def test_swaps_find_what_longest_first_misses():
    assert balance([8, 7, 6, 5, 4], 2) == [[0, 1], [2, 3, 4]]
    assert spread(longest_first([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4]) == 4
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4096, generator=g)*.36 + 5.14).exp().long().clamp(64, 536).tolist()
    for equal in (False, True):
        # of 2,850 each
        assert spread(balance(lengths, 256, equal=equal), lengths) <= 8
        assert spread(balance(lengths, 256, equal=equal, within=0), lengths) <= 4
        assert {len(p) for p in balance(lengths, 256, equal=True)} == {16}


@pytest.mark.parametrize("equal", [False, True])
def test_within_is_reached_and_costs_no_more_than_asked(equal):
    g = torch.Generator().manual_seed(1)
    lengths = (torch.randn(4096, generator=g)*.36 + 5.14).exp().long().clamp(64, 536).tolist()
    mean, above = sum(lengths)/256, []
    for within in (.05, .01, .003, .001):
        above.append(sum(lengths[i] for i in balance(lengths, 256, equal=equal, within=within)[0])/mean - 1)
    assert all(a <= w for a, w in zip(above, (.05, .01, .003, .001), strict=True))
    assert above == sorted(above, reverse=True) and above[0] > above[-1]


def test_counts_stay_equal_where_they_do_not_divide():
    """Parts that are one item short take one of another only for one of theirs; zero costs, which look like what is
    missing, too."""
    rng = random.Random(7)
    for _ in range(300):
        n, count = rng.randint(2, 7), rng.randint(1, 40)
        costs = [rng.choice([0, 0, 1, rng.randint(1, 1000)]) for _ in range(count)]
        parts = balance(costs, n, equal=True, within=0)
        assert sorted(map(len, parts)) == sorted([count//n + (k < count % n) for k in range(n)])
        assert sorted(i for p in parts for i in p) == list(range(count))


def test_one_giant_is_left_alone():
    assert balance([100, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert [len(p) for p in balance([100, 1, 1, 1], 2, equal=True)] == [2, 2]
    assert balance([5.], 3) == [[0], [], []] and balance([], 2) == [[], []] and balance([0], 2) == [[0], []]
    assert balance([0]*5, 5) == [[0], [1], [2], [3], [4]] # nothing costs anything: still one each


def test_tensors_and_lists_alike():
    costs = torch.rand(40, generator=torch.Generator().manual_seed(0))
    assert balance(costs, 7) == balance(costs.tolist(), 7)


def test_many_items_in_few_parts_take_no_minutes():
    rng, start = random.Random(0), time.process_time()
    costs = [rng.random() for _ in range(20_000)]
    assert spread(balance(costs, 3), costs) < .01 and spread(balance([1.]*20_000, 7), [1.]*20_000) == 1
    assert time.process_time() - start < 20


def test_a_row_costs_its_tokens_and_their_pairs():
    assert row_costs([0, 10, 100]).tolist() == [0, 10, 100]
    assert row_costs(torch.tensor([10, 100]), linear=2, quadratic=.1).tolist() == [30, 1200]
    long = [8000] + [1000]*8
    # by tokens 8,000 | 8,000, with every pair counted the long row costs three times as much
    assert balance(row_costs(long), 2)[0] == [0]
    assert sum(len(p) for p in balance(row_costs(long, quadratic=1/4000), 2)[1:]) == 8


@pytest.mark.parametrize("linear, quadratic", [(2e-6, 1e-9), (2e-6, 0.), (0., 1e-9)])
def test_costs_are_found_from_noisy_runs(linear, quadratic):
    rng = random.Random(0)
    runs = [[rng.randint(50, 4000) for _ in range(rng.randint(1, 30))] for _ in range(40)]
    times = [3e-3 + sum(row_costs(r, linear=linear, quadratic=quadratic).tolist())*rng.uniform(.99, 1.01) for r in runs]
    a, b = fit_row_costs(runs, times)
    assert_close(torch.tensor([a, b]), torch.tensor([linear, quadratic]), rtol=.1, atol=1e-10 if linear else 1e-7)
    assert a >= 0 and b >= 0


def test_what_grows_slower_than_its_tokens_has_no_negative_part():
    runs = [[100], [400], [1600]]
    a, b = fit_row_costs(runs, [1., 2., 4.])
    assert a > 0 and b == 0
    assert fit_row_costs(runs, [4., 2., 1.]) == (0., 0.) # the longer the faster: nothing to learn from


@pytest.mark.parametrize("call, text", [
    (lambda: balance([1, 2], 0), "balance: n=0; a whole number, at least 1, is wanted"),
    (lambda: balance([1, 2], 2, within=-1), "balance: within is -1; a share of the mean, 0 or more, is wanted"),
    (lambda: balance([1, -2], 2), "balance: the cost of item 1 is -2"),
    (lambda: balance([1, float("nan")], 2), "balance: the cost of item 1 is nan"),
    (lambda: balance([float("inf")], 2), "balance: the cost of item 0 is inf"),
    (lambda: balance(torch.ones(3, 1), 2), "balance: costs are [3, 1]; one number an item is wanted"),
    (lambda: row_costs([[1, 2]]), "row_costs: lengths are [1, 2]; one number a row"),
    (lambda: fit_row_costs([[1], [2], [3]], [1., float("nan"), 3.]), "fit_row_costs: run 1 took nan seconds"),
    (lambda: fit_row_costs([[1], [2]], [1., 2.]), "fit_row_costs: 2 runs, 2 times"),
    (lambda: fit_row_costs([[1], [2], [3]], [1., 2.]), "fit_row_costs: 3 runs, 2 times"),])
def test_errors_say_what_came(call, text):
    with pytest.raises(ValueError) as e: call()
    assert text in str(e.value)


def test_costs_that_are_no_numbers():
    for odd in (["a"], [10**400], [None]):
        with pytest.raises(TypeError, match="balance: the costs are no numbers"): balance(odd, 2)
    assert fit_row_costs([[], [0], []], [1., 1., 1.]) == (0., 0.)     # runs of nothing say nothing


# -- families
def paid(part, own, family, once): return sum(own[i] for i in part) + sum(once[f] for f in {family[i] for i in part})


def families(seed, count):
    "(own cost of each item, its family, what each family has in common, parts)"
    rng = random.Random(seed)
    for _ in range(count):
        once = {f: rng.choice([0, rng.randint(1, 40), rng.randint(1, 400)]) for f in range(rng.randint(1, 9))}
        family = [rng.randrange(len(once)) for _ in range(rng.randint(1, 40))]
        yield [rng.choice([0, rng.randint(1, 100)]) for _ in family], family, once, rng.randint(1, 12)


def test_families_every_item_once_and_never_heavier_than_one_by_one():
    lighter = 0
    for own, family, once, n in families(0, 200):
        costs, common = [x + once[f] for x, f in zip(own, family, strict=True)], [once[f] for f in family]
        parts = balance_families(costs, family, common, n)
        assert len(parts) == n and sorted(i for p in parts for i in p) == list(range(len(own)))
        assert all(p == sorted(p) for p in parts)
        loads, others = ([paid(p, own, family, once) for p in plan] for plan in (parts, balance(costs, n)))
        assert loads == sorted(loads, reverse=True) and max(loads) <= max(others)
        lighter += max(loads) < .95*max(others)
    assert lighter > 40     # the others have one part, little in common, or a part for every item


def test_families_stay_whole_where_that_is_good_enough_and_only_then():
    """16 families like GSM8K's groups of 8: whole in 2 and 4 parts and nothing paid twice; in 16 parts some in
    pieces, and the step shorter for it."""
    g = torch.Generator().manual_seed(0)
    once, own = torch.randint(40, 160, (16,), generator=g), torch.randint(30, 300, (128,), generator=g).tolist()
    family = torch.arange(16).repeat_interleave(8)
    costs, least = [x + int(once[f]) for x, f in zip(own, family, strict=True)], sum(own) + int(once.sum())
    plans = {n: balance_families(costs, family, once[family], n) for n in (2, 4, 16)}
    load = lambda p: paid(p, own, family.tolist(), once.tolist())
    for n in (2, 4):
        assert sum(map(load, plans[n])) == least and max(map(load, plans[n])) <= 1.01*least/n
        assert all(len(set(family[p].tolist())) == 16//n for p in plans[n])
    whole = max(map(load, [[i for i in range(128) if family[i] == f] for f in range(16)]))       # one family a part
    one_by_one = max(map(load, balance(costs, 16)))
    assert max(map(load, plans[16])) < .95*min(whole, one_by_one) and sum(map(load, plans[16])) < 1.15*least


def test_families_by_hand():
    assert balance_families([5]*8, [7]*4 + [3]*4, [4]*8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # one family, two parts: in halves
    assert [len(p) for p in balance_families([5]*8, [7]*8, [4]*8, 2)] == [4, 4]
    assert balance_families([5, 1, 1], [0, 0, 1], [1, 1, 1], 5) == [[0], [1], [2], [], []]
    assert balance_families([], [], [], 2) == [[], []] and balance_families([0, 0], [0, 0], [0, 0], 2) == [[0], [1]]
    assert balance_families([8, 7, 6, 5, 4], range(5), [0]*5, 2) == balance([8, 7, 6, 5, 4], 2)
    # the least of a family counts: 2
    assert balance_families([9, 9, 5, 5], [0, 0, 0, 0], [8, 2, 5, 2], 1) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("args, says", [
    (([1, 2], [0], [1, 2], 2), "2 costs, 1 families, 2 common"),
    (([1, 2], [0, 0], [1, 3], 2), "of item 1, which costs 2, 3 is in common"),
    (([1, 2], [0, 0], [-1, 1], 2), "of item 0, which costs 1, -1 is in common"),
    (([1, -2], [0, 0], [0, 0], 2), "of item 1, which costs -2"),
    (([1, float("nan")], [0, 0], [0, 0], 2), "of item 1, which costs nan"),
    (([1, 2], [0, 0], [0, 0], 0), "balance_families: n=0; a whole number"),
])
def test_families_errors(args, says):
    with pytest.raises(ValueError, match=says): balance_families(*args)
