"""Packing: there and back with gradients, a cap that holds over thousands of random cases, equal steps on every rank
(LAWS 24, 26)."""
import random
import re

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rlblocks.data.balancing import balance, balance_families
from rlblocks.engines.optimizers import constant, cosine, in_turn, linear, wsd
from rlblocks.data.columns import pad
from rlblocks.data.packing import (
    bin_pack, drop_long, micro_batch_count, pack, plan_micro_batches, shared_prefix, split_long, unpack,
)


def ragged(seed, B=6, T=9):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, T + 1, (B,), generator=g)
    return torch.randint(1, 99, (B, T), generator=g), lengths, torch.arange(T) < lengths[:, None]


@pytest.mark.parametrize("seed", range(20))
def test_unpack_undoes_pack(seed):
    tokens, lengths, real = ragged(seed)
    p = pack(tokens, lengths)
    assert unpack(p.tokens, p).equal(torch.where(real, tokens, 0))
    assert unpack(p.take(real), p).equal(real)
    assert p.cu_seqlens.dtype == torch.int32 and p.cu_seqlens.diff().tolist() == lengths.tolist()
    assert p.max_length == lengths.max() and (p.B, p.T) == tokens.shape
    assert p.tokens.equal(tokens[real]) and p.row_ids.equal(real.nonzero()[:, 0])
    assert p.position_ids.equal(real.nonzero()[:, 1])
    rows = [t[:n] for t, n in zip(tokens, lengths.tolist(), strict=True)]
    padded, again = pad(rows, length=tokens.shape[1])
    assert padded.equal(torch.where(real, tokens, 0)) and again.equal(lengths)


def test_gradients_reach_real_tokens_and_no_others():
    tokens, lengths, real = ragged(1)
    x = torch.randn(*tokens.shape, 2, dtype=torch.float64, requires_grad=True)
    p = pack(tokens, lengths)
    assert torch.autograd.gradcheck(lambda x: unpack(p.take(x).sin(), p), x)
    g, = torch.autograd.grad(p.take(x).sum(), x)
    assert_close(g, real[..., None].double().expand_as(x))


def test_padding_may_hold_anything():
    tokens, lengths, real = ragged(2)
    x = torch.where(real, 1., float("nan")).requires_grad_()
    p = pack(tokens, lengths)
    out = unpack(p.take(x), p)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.equal(real.float())


@pytest.mark.parametrize("sizes", [[], [0, 0], [0, 3, 0]])
def test_empty_rows(sizes):
    tokens = torch.ones(len(sizes), 3, dtype=torch.long)
    p = pack(tokens, torch.tensor(sizes, dtype=torch.long))
    assert len(p.tokens) == sum(sizes) and p.max_length == max(sizes, default=0) and len(p.cu_seqlens) == len(sizes) + 1
    assert unpack(p.tokens, p).sum(1).tolist() == sizes


def test_attention_by_row_ids_keeps_rows_apart():
    "LAWS 26: packed equals each row alone; a change in row A never reaches row B."
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 0, 7, 1])
    x = torch.randn(4, 7, 8, generator=g, dtype=torch.float64)
    p = pack(torch.zeros(4, 7, dtype=torch.long), lengths)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    def packed(x):
        q = p.take(x)[None]
        see = (p.row_ids[:, None] == p.row_ids) & (p.position_ids[:, None] >= p.position_ids)
        return unpack(sdpa(q, q, q, attn_mask=see)[0], p)
    alone = torch.zeros_like(x)
    for i, n in enumerate(lengths.tolist()):
        if n: alone[i, :n] = sdpa(*[x[None, i, :n]]*3, is_causal=True)[0]
    assert_close(packed(x), alone)
    y = x.clone()
    y[0] += 1
    assert packed(x)[1:].equal(packed(y)[1:])


def cost(bin, lengths, padded): return len(bin)*max(lengths[i] for i in bin) if padded else sum(lengths[i] for i in bin)


def test_the_cap_holds_over_10_000_random_cases():
    rng = random.Random(0)
    for case in range(10_000):
        cap = rng.choice([1, 7, 64, 2048])
        lengths = [rng.choice([0, cap, rng.randint(0, cap), rng.randint(0, cap//3)]) for _ in range(rng.randint(0, 30))]
        for bins in (bin_pack(lengths, cap), plan_micro_batches(lengths, max_tokens=cap, padded=case % 2 == 0)):
            assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
            assert all(b == sorted(b) and cost(b, lengths, False) <= cap for b in bins)


def test_units_and_limits_hold_over_10_000_random_cases():
    rng = random.Random(1)
    for case in range(10_000):
        padded = case % 2 == 0
        lengths = [rng.randint(0, 40) for _ in range(rng.randint(1, 24))]
        unit = [rng.randrange(12) for _ in lengths]
        of = {u: [i for i, v in enumerate(unit) if v == u] for u in unit}
        max_tokens = max(cost(b, lengths, padded) for b in of.values()) + rng.choice([0, 1, 30, 200])
        max_rows = max(map(len, of.values())) + rng.choice([0, 1, 5]) if case % 3 else None
        plan = plan_micro_batches(lengths, max_tokens=max_tokens, unit=unit, max_rows=max_rows, padded=padded)
        assert sorted(i for b in plan for i in b) == list(range(len(lengths)))
        assert all(cost(b, lengths, padded) <= max_tokens and len(b) <= (max_rows or len(lengths)) for b in plan)
        assert sum(len({unit[i] for i in b}) for b in plan) == len(of) # a parted unit is counted twice


def test_tensors_and_lists_plan_alike():
    g = torch.Generator().manual_seed(0)
    lengths, unit = torch.randint(0, 50, (40,), generator=g), torch.randint(0, 25, (40,), generator=g)
    for kw in (dict(), dict(padded=True), dict(max_rows=6)):
        assert plan_micro_batches(lengths, max_tokens=400, unit=unit, **kw) == plan_micro_batches(
            lengths.tolist(), max_tokens=400, unit=unit.tolist(), **kw)
    assert bin_pack(lengths, 60) == bin_pack(lengths.tolist(), 60)


def families(rng, B):
    "Rows of groups that begin alike for a while, on a small alphabet; some ids lie."
    prompts = [[rng.randint(1, 3) for _ in range(rng.randint(0, 20))] for _ in range(5)]
    group = [rng.randrange(5) for _ in range(B)]
    rows = [(prompts[k] if rng.random() < .9 else []) + [rng.randint(1, 3) for _ in range(rng.randint(0, 12))]
            for k in group]
    return *pad([torch.tensor(r, dtype=torch.long) for r in rows]), torch.tensor(group)


def test_shared_prefixes_are_true_and_as_long_as_they_can_be():
    rng = random.Random(6)
    for _ in range(200):
        tokens, lengths, group = families(rng, rng.randint(1, 12))
        holder, n = shared_prefix(tokens, lengths, group, least=4)
        rows = [t[:k].tolist() for t, k in zip(tokens, lengths.tolist(), strict=True)]
        for i, (h, k) in enumerate(zip(holder.tolist(), n.tolist(), strict=True)):
            first = next(j for j, row in enumerate(rows) if j == i
                         or (group[j] == group[i] and row[:4] == rows[i][:4] and len(row) >= 4))
            common = next((t for t, (a, c) in enumerate(zip(rows[i], rows[first], strict=False)) if a != c),
                          min(len(rows[i]), len(rows[first])))
            assert (h, k) == ((first, common) if i != first else (i, 0))


@pytest.mark.parametrize("n", [7, 8, 255, 256, 257, 511, 512, 513, 700])
def test_prefixes_are_found_however_long(n):
    """Columns are compared in blocks: a difference at, before or behind their edges, a row that ends there, and one
    that is a copy."""
    first = torch.randint(2, 9, (700,), generator=torch.Generator().manual_seed(n))
    rows = first.repeat(4, 1)
    if n < 700: rows[1, n] = 1
    lengths = torch.tensor([700, 700, max(n, 1), 700])
    holder, shared = shared_prefix(rows, lengths, torch.zeros(4, dtype=torch.long))
    assert shared.tolist() == ([0, n, n, 700] if n >= 8 else [0, 0, 0, 700])
    assert holder.tolist() == ([0]*4 if n >= 8 else [0, 1, 2, 0])


def test_what_is_shared_comes_back_to_every_row_with_its_gradient():
    rng = random.Random(7)
    for _ in range(50):
        tokens, lengths, group = families(rng, 8)
        p = pack(tokens, lengths, group)
        assert unpack(p.tokens, p).equal(tokens)
        assert sum(p.sizes) == len(p.tokens) == int(lengths.sum() - p.shared.sum())
        x = torch.randn(len(p.tokens), 2, dtype=torch.float64, requires_grad=True)
        g, = torch.autograd.grad(unpack(x, p).sum(), x)
        readers = torch.ones(len(p.tokens), dtype=torch.float64)
        for i, (h, k) in enumerate(p.prefixes):
            if h != i: readers[int(p.cu_seqlens[h]):int(p.cu_seqlens[h]) + k] += 1
        assert_close(g, readers[:, None].expand_as(g))


def test_plans_that_share_hold_the_limits_when_they_are_packed():
    rng, fewer = random.Random(8), 0
    for case in range(300):
        tokens, lengths, group = families(rng, rng.randint(1, 40))
        unit = torch.tensor([rng.randrange(12) for _ in lengths]) if case % 3 == 0 else torch.arange(
            len(lengths)) if case % 3 == 1 else group
        cap = int(max(lengths[unit == u].sum() for u in unit.unique()).clamp(min=1)) + rng.choice([0, 7, 60])
        max_rows = int(unit.bincount().max()) + rng.randint(0, 9) if case % 2 else None
        how = dict(max_tokens=cap, max_rows=max_rows, unit=unit)
        plan = plan_micro_batches(lengths, shared=shared_prefix(tokens, lengths, group), **how)
        assert sorted(i for b in plan for i in b) == list(range(len(lengths)))
        assert all(len(pack(tokens[b], lengths[b], group[b]).tokens) <= cap and len(b) <= (max_rows or len(b))
                   for b in plan)
        assert sum(len(set(unit[b].tolist())) for b in plan) == len(unit.unique())
        fewer += len(plan_micro_batches(lengths, **how)) - len(plan)
    assert fewer > 100


def test_a_unit_that_fits_with_its_prefix_counted_once_is_taken():
    tokens = torch.cat([torch.ones(8, 20, dtype=torch.long), torch.arange(160).view(8, 20)], 1)
    lengths, group, unit = torch.full((8,), 40), torch.zeros(8, dtype=torch.long), torch.arange(8)//4
    how = dict(shared=shared_prefix(tokens, lengths, group), unit=unit)
    assert plan_micro_batches(lengths, max_tokens=100, **how) == [[0, 1, 2, 3], [4, 5, 6, 7]]     # 20 + 4·20
    assert plan_micro_batches(lengths, max_tokens=180, **how) == [list(range(8))]                 # 20 + 8·20
    with pytest.raises(ValueError, match="unit 0 .* takes 100 tokens and 4 rows, the limits are max_tokens=99"):
        plan_micro_batches(lengths, max_tokens=99, **how)
    tokens[4:, 9:20] = 2        # the second unit has 20 in common, but 9 with the first: it fits by itself alone
    how["shared"] = shared_prefix(tokens, lengths, group)
    # 9 + 4·31 = 133
    assert sorted(plan_micro_batches(lengths, max_tokens=133, **how)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def takes(unit, lengths, holder, common):
    "Tokens of a unit as the notebook counts them: of the rows of one holder, what all have in common once."
    kinds = {}
    for i in unit: kinds.setdefault(holder[i], []).append(i)
    return sum(sum(lengths[i] for i in at) - (len(at)-1)*min((common[i] for i in at if i != h), default=0)
               for h, at in kinds.items())


def test_random_units_are_taken_by_what_they_share():
    rng, taken = random.Random(9), 0
    for _ in range(300):
        tokens, lengths, group = families(rng, rng.randint(2, 40))
        unit, shared = (torch.tensor([rng.randrange(8) for _ in lengths]) if rng.random() < .5 else group,
                        shared_prefix(tokens, lengths, group))
        units = [(unit == u).nonzero()[:, 0].tolist() for u in unit.unique()]
        cap = max(1, *(takes(u, lengths.tolist(), shared[0].tolist(), shared[1].tolist()) for u in units))
        taken += cap < max(int(lengths[u].sum()) for u in units)
        plan = plan_micro_batches(lengths, max_tokens=cap, unit=unit, shared=shared)
        assert sorted(i for b in plan for i in b) == list(range(len(lengths)))
        assert all(len(pack(tokens[b], lengths[b], group[b]).tokens) <= cap for b in plan)
        assert sum(len(set(unit[b].tolist())) for b in plan) == len(units)
        if cap > 1: # and no less
            with pytest.raises(ValueError, match="never parted"):
                plan_micro_batches(lengths, max_tokens=cap-1, unit=unit, shared=shared)
    assert taken > 100


def test_every_rank_counts_the_same_steps():
    "LAWS 24: local bins 1, 5, 2, 3 → every rank runs 5."
    ranks = [[4, 6], [7, 8, 6, 9, 10], [5, 5, 10], [9, 9, 9]]
    assert [len(plan_micro_batches(n, max_tokens=10)) for n in ranks] == [1, 5, 2, 3]
    assert micro_batch_count(ranks, max_tokens=10) == 5
    assert micro_batch_count([torch.tensor(n) for n in ranks], max_tokens=10) == 5
    assert micro_batch_count([[3, 3], []], max_tokens=10, unit=[[0, 1], []], max_rows=1) == 2
    assert micro_batch_count([[], []], max_tokens=10) == 0
    shared = (torch.tensor([0, 0, 0]), torch.tensor([0, 8, 8]))
    assert micro_batch_count([[9, 9, 9], [9, 9]], max_tokens=11, shared=[shared, None]) == 2


def one_by_one(lengths, cap):
    "Best fit decreasing as it is written down: one row, one bin at a time. → tokens in each bin"
    bins = []
    for n in sorted(lengths, reverse=True):
        room = [k for k, b in enumerate(bins) if b + n <= cap]
        if room: bins[max(room, key=lambda k: bins[k])] += n
        else: bins.append(n)
    return sorted(bins)


def test_kinds_at_once_fill_bins_as_rows_one_by_one_do():
    rng = random.Random(3)
    for _ in range(300):
        cap = rng.choice([10, 50, 2048])
        lengths = [rng.randint(0, rng.choice([cap, cap//3, 5])) for _ in range(rng.randint(1, 80))]
        assert sorted(sum(lengths[i] for i in b) for b in bin_pack(lengths, cap)) == one_by_one(lengths, cap)


def test_a_hundred_thousand_rows_are_few_kinds():
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(100_000, generator=g)*.36 + 5.14).exp().long().clamp(64, 536) # as GSM8K
    bins = bin_pack(lengths, 2048)
    fill = torch.zeros(len(bins), dtype=torch.long).index_add(
        0, torch.tensor([k for k, b in enumerate(bins) for _ in b]), lengths[[i for b in bins for i in b]])
    assert fill.max() <= 2048 and int(lengths.sum())/(2048*len(bins)) > .99


@pytest.mark.parametrize("multiple", [1, 2, 3, 8, 64])
def test_bins_are_rounded_up_and_never_down(multiple):
    rng = random.Random(multiple)
    for _ in range(200):
        lengths, cap = [rng.randint(0, 40) for _ in range(rng.randint(0, 60))], rng.choice([40, 100])
        unit = [rng.randrange(30) for _ in lengths] if cap == 100 else None
        if unit: lengths = [n//8 for n in lengths]
        bins = plan_micro_batches(lengths, max_tokens=cap, unit=unit, multiple=multiple)
        plain = plan_micro_batches(lengths, max_tokens=cap, unit=unit)
        assert len(bins) == -(-len(plain)//multiple)*multiple
        assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in b) <= cap for b in bins)
        units = len(lengths) if unit is None else len(set(unit))
        # none empty while anything can be parted
        assert sum(map(bool, bins)) == (len(bins) if units >= len(bins) else units)
        if unit: assert sum(len({unit[i] for i in b}) for b in bins) == units
        else: assert bins == bin_pack(lengths, cap, multiple=multiple)


def test_the_case_in_which_a_count_rounded_down_overflows():
    "FEATURES C-O4: 21 × 5,000 tokens at 16,384 on 4 ranks need 7 bins, so 8; four of them would hold 30,000."
    assert sorted(map(len, bin_pack([5000]*21, 16384, multiple=4))) == [1, 2, 3, 3, 3, 3, 3, 3]


def test_long_rows_are_dropped_and_counted_or_split():
    lengths = torch.tensor([100, 5000, 0, 2048, 2049])
    assert drop_long(lengths, 2048) == ([0, 2, 3], [1, 4]) == drop_long(lengths.tolist(), 2048)
    pieces = split_long(lengths, 2048)
    assert pieces == [(0, 0, 100), (1, 0, 2048), (1, 2048, 4096), (1, 4096, 5000), (2, 0, 0), (3, 0, 2048),
                      (4, 0, 2048), (4, 2048, 2049)]
    assert split_long([], 3) == [] and drop_long([], 3) == ([], [])


@pytest.mark.parametrize("call, text", [
    (lambda: pad([]), "pad: there are no rows"),
    (lambda: pad([[1], [1, 2, 3]], length=2),
     "pad: row 1 has 3 elements, length is 2; cut the row to 2 or raise length to 3"),
    (lambda: pad([torch.ones(2, 3), torch.ones(2, 4)]), "pad: row 1 has elements of shape [4], others [3]"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([5, 1])),
     "pack: the length of row 0 is 5, tokens are 4 wide"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, -1])), "pack: the length of row 1 is -1"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1])), "pack: lengths has 1 rows, tokens is [2, 4]"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, 2])).take(torch.ones(2)),
     "row values [B] go by x[packed.row_ids]"),
    (lambda: unpack(torch.ones(1, 3), pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, 2]))),
     "unpack: flat has 1 values for 3 packed tokens"),
    (lambda: bin_pack([100, 5000], 2048), "bin_pack: the length of row 1 is 5000, cap is 2048; cut or drop the row "
     "(drop_long, split_long), or raise cap to 5000"),
    (lambda: bin_pack([-1], 2048), "bin_pack: the length of row 0 is -1"),
    (lambda: plan_micro_batches([3, 12], max_tokens=10), "plan_micro_batches: row 1 takes 12 tokens"),
    (lambda: plan_micro_batches([3, -2], max_tokens=10), "plan_micro_batches: the length of row 1 is -2"),
    (lambda: plan_micro_batches([4, 6], max_tokens=10, unit=[7, 7], padded=True),
     "unit 7 (rows 0, 1) takes 12 tokens and 2 rows"),
    (lambda: plan_micro_batches([4, 5], max_tokens=20, unit=[7, 7], max_rows=1),
     "the limits are max_tokens=20 and max_rows=1"),
    (lambda: plan_micro_batches([4, 5], max_tokens=20, unit=[7]), "unit has 1 rows, lengths has 2"),
    (lambda: micro_batch_count([[4], [1]], max_tokens=20, unit=[[7]]), "unit is given for 1 ranks, lengths for 2"),
    (lambda: micro_batch_count([[4], [1]], max_tokens=20, shared=[None]), "shared is given for 1 ranks, lengths for 2"),
    (lambda: plan_micro_batches([4], max_tokens=20, padded=True, shared=(torch.zeros(1).long(),)*2),
     "padded rows share nothing"),
    (lambda: shared_prefix(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, 2]), torch.tensor([1])),
     "shared_prefix: group is [1], lengths is [2]; they must be equal"),
    (lambda: bin_pack([1], 2048, multiple=0), "bin_pack: multiple=0; a whole number, at least 1"),
    (lambda: plan_micro_batches([1], max_tokens=2048, multiple=0), "plan_micro_batches: multiple=0"),
    (lambda: split_long([1], 0), "split_long: cap=0"),])
def test_errors_say_what_came_and_how_to_mend_it(call, text):
    with pytest.raises(ValueError) as e: call()
    assert text in str(e.value)


def test_lengths_are_whole_numbers():
    with pytest.raises(TypeError, match="bin_pack: lengths are float32; whole numbers are wanted"):
        bin_pack([1.5, 2.], 4)


WHOLE = [   # (its name, a function of it)
    ("balance: n", lambda n: balance([1, 2, 3], n)),
    ("balance_families: n", lambda n: balance_families([1, 2, 3], [0, 0, 1], [1, 1, 1], n)),
    ("bin_pack: cap", lambda n: bin_pack([1, 2], n)),
    ("bin_pack: multiple", lambda n: bin_pack([1, 2], 4, multiple=n)),
    ("drop_long: cap", lambda n: drop_long([1, 9], n)), ("split_long: cap", lambda n: split_long([1, 9], n)),
    ("plan_micro_batches: max_tokens", lambda n: plan_micro_batches([1, 2], max_tokens=n)),
    ("plan_micro_batches: max_rows", lambda n: plan_micro_batches([1, 2], max_tokens=9, max_rows=n)),
    ("plan_micro_batches: multiple", lambda n: plan_micro_batches([1, 2], max_tokens=9, multiple=n)),
    ("micro_batch_count: rank 0: plan_micro_batches: max_tokens", lambda n: micro_batch_count([[1, 2]], max_tokens=n)),
    ("pad: length", lambda n: pad([[1], [2]], length=n)[0].tolist()),
    ("shared_prefix: least", lambda n: [x.tolist() for x in shared_prefix(
        torch.ones(2, 4, dtype=torch.long), torch.tensor([4, 3]), torch.tensor([0, 0]), least=n)]),
    ("in_turn: steps of a stage", lambda n: in_turn((n, lambda v: 0.), (0, lambda v: 1.))(2)),
    ("cosine: steps", lambda n: cosine(n)(2)), ("linear: warmup", lambda n: linear(9, warmup=n)(2)),
    ("constant: warmup", lambda n: constant(warmup=n)(2)),
    ("wsd: decay", lambda n: wsd(9, decay=n)(7)), ("wsd: warmup", lambda n: wsd(9, decay=1, warmup=n)(2)),
]


@pytest.mark.parametrize("name, call", WHOLE, ids=[name for name, _ in WHOLE])
def test_numbers_of_numpy_are_numbers_and_bools_are_none(name, call):
    assert call(np.int64(3)) == call(np.uint8(3)) == call(3)
    for odd in (True, 3., np.float32(3), "3"):
        with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(odd))}; a whole number, .* is wanted$"):
            call(odd)
