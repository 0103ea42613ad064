"""Statistics of an evaluation: numbers of inspect-ai, lm-eval, scipy, statsmodels, scikit-learn, Chatbot Arena,
AlpacaEval and RewardBench 2, all subsets visited, and intervals that contain the truth in 95 % of simulated
evaluations."""
import itertools
import math
from collections import Counter

import pytest
import torch
from torch.testing import assert_close

import rlblocks as rl
from rlblocks.statistics.intervals import Interval, t_quantile, t_tails

nan, inf = math.nan, math.inf
tensor = torch.tensor


def exactly(found, wanted, tol=1e-6):
    assert_close(*(tensor([float(v) for v in x], dtype=torch.float64) for x in (found, wanted)), atol=tol, rtol=tol)


# -- pass@k and its relatives

@pytest.mark.parametrize("k, at, hat", [(1, .375, .375), (2, .6428571428571428, .10714285714285714),
                                        (3, .8214285714285714, .017857142857142856), (5, .9821428571428572, 0.),
                                        (8, 1., 0.)])
def test_pass_at_k_is_that_of_inspect_ai(k, at, hat):
    "inspect-ai 0.3.285: pass_at(k)(scores).value, pass_k(k)(scores).value of [Score(value=x) for x in right]."
    right, one = tensor([1., 0., 0., 1., 0., 1., 0., 0.], dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    exactly(rl.pass_at_k(right, one, k=k), [at], 1e-12)
    exactly(rl.pass_hat_k(right, one, k=k), [hat], 1e-12)


def test_ungraded_answers_are_left_out_and_too_few_are_nan():
    "inspect-ai 0.3.285: pass_at(2), pass_at(3), pass_at(4) of 1, 0, NaN, 0 are 2/3, 1, NaN."
    s, one = tensor([1., 0., nan, 0.]), torch.zeros(4, dtype=torch.long)
    for k, want in ((2, 2/3), (3, 1.), (4, nan)):
        assert_close(rl.pass_at_k(s, one, k=k), tensor([want]), equal_nan=True)
        assert_close(rl.majority_at_k(s, one, ["a", "b", "c", "d"], k=k).isnan(), tensor([k == 4]))
    for f in (rl.pass_at_k, rl.pass_hat_k, rl.best_of_k):
        assert f(tensor([nan, nan, 1.]), tensor([5, 5, 2]), k=1).isnan().tolist() == [False, True]
        assert f(torch.zeros(0), torch.zeros(0, dtype=torch.long), k=1).shape == (0,)


def test_a_large_group_does_not_overflow():
    right = (torch.arange(2000) < 3).double()
    want = 1 - math.comb(1997, 1000)/math.comb(2000, 1000)
    exactly(rl.pass_at_k(right, torch.zeros(2000, dtype=torch.long), k=1000), [want], 1e-12)


def ragged(seed):
    "Scores with ties and NaN, selecting scores with ties, answers (some of them None) and ids in any order."
    rng = torch.Generator().manual_seed(seed)
    ids = tensor([9, -4, 30])[torch.randint(3, (19,), generator=rng)]
    s = torch.randint(5, (19,), generator=rng).double()/2
    s[torch.rand(19, generator=rng) < .15] = nan
    words = [None if x == 0 else str(x) for x in torch.randint(4, (19,), generator=rng).tolist()]
    return s, ids, torch.randint(3, (19,), generator=rng).double(), words, torch.randperm(19, generator=rng)


def over_subsets(s, ids, k, worth):
    "Mean of `worth(rows, graded rows of the prompt)` over all k-subsets, for each prompt."
    found = []
    for i in ids.unique():
        graded = [j for j in range(len(s)) if ids[j] == i and not s[j].isnan()]
        values = [worth(rows, graded) for rows in itertools.combinations(graded, k)]
        found.append(math.fsum(values)/len(values) if values else nan)
    return tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_subset_visited(seed, k):
    s, ids, by, words, order = ragged(seed)
    def mean(xs): return math.fsum(xs)/len(xs)
    def elected(rows, graded):
        votes = Counter(words[j] for j in rows if words[j] is not None) or {None: 1}
        leaders = [a for a in votes if votes[a] == max(votes.values())]
        return mean([mean([float(s[j]) for j in graded if words[j] == a]) for a in leaders])
    def selected(rows, _): return mean([float(s[j]) for j in rows if by[j] == max(by[i] for i in rows)])
    cases = [(lambda *a: rl.pass_at_k(*a[:2], k=k), lambda rows, _: any(s[j] >= 1 for j in rows)),
             (lambda *a: rl.pass_hat_k(*a[:2], k=k, threshold=1.5), lambda rows, _: all(s[j] >= 1.5 for j in rows)),
             (lambda *a: rl.best_of_k(*a[:2], k=k), lambda rows, _: max(float(s[j]) for j in rows)),
             (lambda *a: rl.best_of_k(*a[:2], k=k, by=a[2]), selected),
             (lambda *a: rl.majority_at_k(*a[:2], a[3], k=k, draws=10**6), elected)]
    for f, worth in cases:
        want = over_subsets(s, ids, k, worth)
        assert_close(f(s, ids, by, words), want, equal_nan=True)
        shuffled = f(s[order], ids[order], by[order], [words[j] for j in order])
        assert_close(shuffled, want, equal_nan=True)


def test_a_drawn_majority_is_close_to_the_exact_one_and_repeats():
    s, one = (torch.arange(16) % 3 == 0).double(), torch.zeros(16, dtype=torch.long)
    words = [str(i) if i % 3 else "0" for i in range(16)]
    exact = rl.majority_at_k(s, one, words, k=4, draws=10**5)
    drawn = [rl.majority_at_k(s, one, words, k=4, draws=1000, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and (drawn[0] - exact).abs() < .06
    # lm-eval 0.4.13: MajorityVoteFilter().apply([["7", "1", "7", "2", "3"]], None) is ["7"], which is right
    assert rl.majority_at_k(tensor([1., 0., 1., 0., 0.]), one[:5], ["7", "1", "7", "2", "3"], k=5) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_right_and_wrong_may_come_as_one_and_zero(dtype):
    s, g = tensor([1, 0, 0, 1, 1]).to(dtype), tensor([0, 0, 0, 1, 1])
    for f in (lambda s: rl.pass_at_k(s, g, k=2), lambda s: rl.best_of_k(s, g, k=2),
              lambda s: tensor(rl.wilson_interval(s, group=g)), lambda s: tensor(rl.mean_interval(s, group=g)),
              lambda s: tensor(rl.win_rate(s, g))):
        assert_close(f(s), f(s.float()))


# -- intervals

X = tensor([.1, .9, .4, .4, .8, 1., .3, 0., .2, .5, .7, .6], dtype=torch.float64)
Y = tensor([.2, .7, .4, .1, .9, .6, .3, .2, 0., .5, .4, .6], dtype=torch.float64)
THREES, UNLIKE = tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]), tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3])


@pytest.mark.parametrize("level, df, want", [   # scipy 1.17.1: stats.t.ppf((1 + level)/2, df)
    (.95, 1, 12.706204736174694), (.95, 2.5, 3.5746548420036817), (.95, 9, 2.262157162798205),
    (.99, 3, 5.840909309733355), (.8, 40, 1.3030770526071949), (.95, 1e5, 1.9599877075346095)])
def test_quantiles_of_t_are_scipys(level, df, want): assert abs(t_quantile(level, df) - want) < 1e-8*want


@pytest.mark.parametrize("t, df, want", [       # scipy 1.17.1: 2*stats.t.sf(t, df)
    (.5, 1, .7048327646991335), (2., 3, .13932596855884305), (5., 7.5, .0012762228035169815),
    (1.3, 200, .19509718930885628), (8., 30, 6.265822475700759e-09), (3., 1e6, .0026998625414218), (0., 4, 1.)])
def test_tails_of_t_are_scipys(t, df, want): assert abs(t_tails(t, df) - want) < 1e-9*want


@pytest.mark.parametrize("right, n, level, low, high", [    # scipy: binomtest(right, n).proportion_ci(level, "wilson")
    (8, 10, .95, .4901624715366418, .9433178485456248), (0, 7, .95, 0., .35433043506668743),
    (20, 20, .95, .8388748419471808, 1.), (1, 3, .95, .06149194472039626, .7923403991979523),
    (8, 10, .8, .6015960115342781, .9137627792113973)])
def test_wilson_is_scipys(right, n, level, low, high):
    s = tensor([1.]*right + [0.]*(n - right) + [nan, nan])
    exactly(rl.wilson_interval(s, level=level), [right/n, low, high, n, 2], 1e-9)


def test_means_have_the_intervals_of_inspect_ai():
    """inspect-ai 0.3.285: ci()(scores), ci(cluster="p")(scores) where all prompts have three rows; lm-eval 0.4.13:
    mean_stderr(X) = .09166666666666667."""
    exactly(rl.mean_interval(X), [5.9/12, .28990969365826647, .6934236396750669, 12, 0])
    assert abs(rl.mean_interval(X).high - 5.9/12 - t_quantile(.95, 11)*.09166666666666667) < 1e-12
    exactly(rl.mean_interval(X, group=THREES), [5.9/12, .10582771036558258, .8775056229677508, 4, 0])


def test_unlike_prompts_make_the_interval_wider_than_inspect_ais():
    "inspect-ai 0.3.285, five, two, three and two rows: ci(cluster='p') is [.2142, .7692], without jackknife."
    found = rl.mean_interval(X, group=UNLIKE)
    assert found.low < .21415138790578347 and found.high > .7691819454275499
    means = [X[UNLIKE != g].mean() for g in range(4)]               # the jackknife, as one would do it by hand
    var = 3/4*sum(float(m - X.mean())**2 for m in means)
    half = t_quantile(.95, 12**2/(25 + 4 + 9 + 4) - 1)*math.sqrt(var)
    exactly(found, [5.9/12, 5.9/12 - half, 5.9/12 + half, 4, 0], 1e-12)


def test_intervals_of_nothing_are_nan_and_an_ungraded_row_changes_nothing():
    for f in (rl.mean_interval, rl.wilson_interval):
        assert all(math.isnan(x) for x in f(tensor([nan, nan]))[:3]) and f(tensor([nan, nan]))[3:] == (0, 2)
        assert all(math.isnan(x) for x in f(torch.zeros(0))[:3])
        one = f(tensor([1., 0., nan]), group=tensor([3, 3, 3]))     # one prompt: nothing is known of the others
        assert one.value == .5 and math.isnan(one.low) and math.isnan(one.high) and one[3:] == (1, 1)
        with_nan = f(torch.cat([X, tensor([nan, nan])]), group=torch.cat([THREES, tensor([1, 7])]))
        exactly(with_nan, [*f(X, group=THREES)[:4], 2], 1e-12)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        exactly(f(X[order], group=-THREES[order]), [*f(X, group=THREES)], 1e-12)
    all_right = rl.wilson_interval(torch.ones(80), group=torch.arange(10).repeat_interleave(8))
    assert all_right.high == 1 and .6 < all_right.low < .75         # ten prompts, not eighty rows
    assert str(Interval(.5, .25, .75, 4)) == "0.5 [0.25, 0.75]"


# -- comparisons

def test_a_paired_difference_is_scipys_paired_t_test():
    "scipy 1.17.1: ttest_rel(X, Y), its pvalue and confidence_interval()."
    one = torch.arange(12)
    found, p = rl.paired_difference(X, one, Y.flip(0), one.flip(0))
    exactly(found, [1/12, -.03732102160930227, .20398768827596891, 12, 0])
    assert abs(p - .15667702201325032) < 1e-9
    swapped, q = rl.paired_difference(Y, one, X, one)
    exactly(swapped[:3], [-1/12, -.20398768827596891, .03732102160930227])
    assert abs(q - p) < 1e-12


def test_pairs_are_prompts_that_both_have_answered():
    x, gx = tensor([1., 0., 1., 1., nan, .5]), tensor([0, 0, 1, 2, 3, 7])
    y, gy = tensor([0., 0., 1., 1.]), tensor([2, 1, 0, 3])
    found, _ = rl.paired_difference(x, gx, y, gy)
    assert found.n == 3 and found.missing == 2
    assert abs(found.value - (-.5 + 1 + 1)/3) < 1e-12
    same, p = rl.paired_difference(x, gx, x, gx)
    assert same.value == 0 and math.isnan(same.low) and math.isnan(same.high) and p == 1     # no spread was seen
    sure, p = rl.paired_difference(tensor([1., 1.]), gy[:2], tensor([0., 0.]), gy[:2])
    assert sure.value == 1 and math.isnan(sure.low) and math.isnan(p)
    nothing, p = rl.paired_difference(x, gx, y, gy + 100)
    assert math.isnan(nothing.value) and math.isnan(p) and nothing[3:] == (0, 9)


def test_win_rates_average_both_orders_and_leave_out_prompts_with_one():
    ids, first = tensor([0, 0, 1, 1, 2, 2, 3, 3]), tensor([True, False]*4)
    wins = tensor([1., 1., 1., 0., .5, 0., 1., nan])
    found = rl.win_rate(wins, ids, shown_first=first)
    exactly(found[3:], (3, 1)), exactly(found[:1], [(1 + .5 + .25)/3])
    three_first = torch.cat([wins[:6], tensor([1., 1.])]), torch.cat([ids[:6], tensor([1, 1])])
    again = rl.win_rate(*three_first, shown_first=torch.cat([first[:6], tensor([True, True])]))
    exactly(again[:1], [(1 + .5 + .25)/3])                          # an order asked more often has no more weight


D = tensor([30, -12, 55, 80, -40, 10, 5, 90, -70, 33, 21, -5, 44, 62, -18, 7, 25, -33, 12, 50.], dtype=torch.float64)
W = tensor([1, 0, 1, 1, 0, .5, 1, 1, 0, .5, 0, 1, 1, 1, 0, 0, 1, .5, 0, 1], dtype=torch.float64)


def test_length_control_is_alpaca_evals_and_its_error_statsmodels():
    """AlpacaEval (cd543a14): fit_LogisticRegressionCV(data, "preference", n_splits=0, C=1e8) on tanh(Δ/std) and 1 has
    the coefficients 2.75541, -.400048. statsmodels 0.15: GLM(W, x, Binomial()).fit(cov_type="cluster",
    cov_kwds=dict(groups=prompts, use_correction=False)).bse[0] = .5767396."""
    prompts = torch.arange(10).repeat_interleave(2)
    found = rl.length_controlled_win_rate(W, prompts, D)
    half = t_quantile(.95, 9)*.5767396*math.sqrt(10/9)
    low, high = (1/(1 + math.exp(.40004843 - x)) for x in (-half, half))
    exactly(found, [.40130070369806553, low, high, 10, 0])
    exactly(rl.length_controlled_win_rate(W, prompts, -D/7)[:3], [*found[:3]])      # any unit, either sign
    more = (torch.cat([W, tensor([nan])]), torch.cat([prompts, tensor([3])]), torch.cat([D, tensor([1e6])]))
    exactly(rl.length_controlled_win_rate(*more), [*found[:4], 1])


A, B = tensor([0, 0, 0, 1, 1, 2, 0, 1, 2, 0, 3, 3, 3, 2]), tensor([1, 2, 3, 2, 3, 3, 1, 2, 3, 2, 0, 1, 2, 0])
V = tensor([1, 0, .5, 1, 1, 0, 0, 1, 1, 1, 0, .5, 1, 0])


def test_ratings_are_chatbot_arenas_and_their_errors_statsmodels():
    """FastChat's rating_systems.compute_bt(battles, tol=1e-12), mean at 1000. statsmodels 0.15: GLM(V, x[:, 1:],
    Binomial()).fit(cov_type="cluster", cov_kwds=dict(groups=prompts, use_correction=False)).bse*400/log(10)."""
    prompts = tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4])
    found = rl.bradley_terry_ratings(A, B, V, group=prompts)
    exactly([r.value for r in found], [1069.957781763, 1152.5938593003, 839.6403765683, 937.8079823685], 1e-5)
    anchored = rl.bradley_terry_ratings(A, B, V, group=prompts, anchor=0)
    assert anchored[0][:3] == (1000, 1000, 1000)
    errors = tensor([131.68251055, 125.73686182, 111.19216869]).double()*math.sqrt(5/4)*t_quantile(.95, 4)
    exactly([r.high - r.value for r in anchored[1:]], errors.tolist())
    exactly([r.value for r in rl.bradley_terry_ratings(B, A, 1 - V)], [r.value for r in found])


def test_ratings_that_nothing_determines_are_nan():
    def rated(a, b, w): return [r.value for r in rl.bradley_terry_ratings(tensor(a), tensor(b), tensor(w))]
    assert all(map(math.isnan, rated([0, 0, 2, 2], [1, 1, 3, 3], [1., 0., 1., 0.])))         # two islands
    others = rated([1, 1], [2, 2], [1., 0.])[1:]
    assert all(map(math.isnan, rated([0, 0], [1, 1], [1., 1.])))
    for w in (1., 0.):                                                                        # 0 always wins, or loses
        assert math.isnan(rated([0, 0, 1, 1], [1, 2, 2, 2], [w, w, 1., 0.])[0])
        assert rated([0, 0, 1, 1], [1, 2, 2, 2], [w, w, 1., 0.])[1:] == others == [1000, 1000]
    assert all(map(math.isnan, rated([0, 1, 2], [1, 2, 3], [1., 1., 1.])))                    # one below the other
    assert rated([0, 0, 0], [1, 1, 1], [nan, nan, .5]) == [1000, 1000]                        # one prompt has a verdict
    assert rl.bradley_terry_ratings(*[torch.zeros(0).long()]*2, torch.zeros(0)) == []
    assert math.isnan(rl.length_controlled_win_rate(torch.ones(1), torch.zeros(1).long(), torch.ones(1)).value)
    gap = rated([0, 0, 0, 2, 2], [2, 2, 4, 4, 4], [1., 0., .5, 1., 0.])                      # 1 and 3 never played
    exactly([gap[0], gap[2], gap[4]], [1000.]*3, 1e-6)
    assert math.isnan(gap[1]) and math.isnan(gap[3])
    assert math.isnan(rl.length_controlled_win_rate(torch.ones(20), torch.arange(20), D).value)
    assert math.isnan(rl.length_controlled_win_rate(W, torch.arange(20), torch.full((20,), 5.)).value)
    same = rl.length_controlled_win_rate(W, torch.arange(20), torch.zeros(20))
    exactly(same[:1], [float(W.mean())])


# -- reward models

def test_pairs_and_best_of_n_share_a_point_among_the_highest():
    c, r = tensor([2., 0., 1., nan, inf]), tensor([1., 3., 1., 0., 1.])
    assert_close(rl.pair_accuracy(c, r), tensor([1., 0., .5, nan, 1.]), equal_nan=True)
    ids = tensor([4, 4, 4, 4, -1, -1, -1, 8, 8, 3, 3])
    s = tensor([2., 2., 2., 1., 5., 1., 5., nan, 1., 1., 2.])
    right = tensor([True, False, True, False, False, True, False, True, False, True, True])
    # prompt 3: all are right; 8: a score is missing
    assert_close(rl.best_of_n_accuracy(s, right, ids), tensor([0., nan, 2/3, nan]), equal_nan=True)


TIED = {0: ([5., 6., 5.5, 2., 1.], 3), 1: ([5., 1., 4., 2., 0.], 3), 4: ([2., 2., 1.], 2), 9: ([7., 3., 1.], 2)}
REF = {0: ([3., 2.5, 0.], 1), 1: ([4., 1., 1.], 1), 4: ([3., 2., 0.], 1), 7: ([0., 2., 0.], 1)}


def columns(prompts):
    scores = tensor([x for s, _ in prompts.values() for x in s])
    right = tensor([i < n for s, n in prompts.values() for i in range(len(s))])
    return scores, right, tensor([i for i, (s, _) in prompts.items() for _ in s])


def test_ties_are_reward_bench_2s():
    "reward-bench 05a9005e: rewardbench/utils.py, process_single_model of rows with ids 'tied:0', 'ref:0' …"
    found = rl.ties_score(*columns(TIED), *columns(REF))
    exactly(found.values(), [.6489653306759415, .75, .75, 2/3, 1/3, -.10346693240584089, 0], 1e-7)
    broken = {**TIED, 12: ([1., nan, 0.], 2)}
    assert rl.ties_score(*columns(broken), *columns(REF)) == {**found, "missing": 1}


def test_reliability_is_scikit_learns():
    "scikit-learn 1.9.1: calibration_curve(outcome, probability, n_bins=5), which leaves empty bins out."
    p = tensor([.05, .1, .35, .4, .62, .61, .9, .99, 1., .3, nan, .5], dtype=torch.float64)
    y = tensor([0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, nan], dtype=torch.float64)
    edge = p == .4                      # scikit-learn's bins are closed above, ours below
    p = p.masked_fill(edge, .39999)
    confidence, accuracy, count = rl.reliability_curve(p, y, bins=5)
    exactly(confidence[count > 0], [.075, .35, .615, .9633333], 1e-5)
    exactly(accuracy[count > 0], [.5, 1/3, .5, 1.])
    assert count.tolist() == [2, 3, 0, 2, 3] and confidence[2].isnan() and accuracy[2].isnan()
    ece = sum(int(n)*abs(float(a - c)) for c, a, n in zip(confidence, accuracy, count, strict=True) if n)/10
    assert_close(rl.calibration_error(p, y, bins=5), tensor(ece, dtype=torch.float64))


# -- diversity

def test_distinct_n_counts_within_prompts_and_not_across_rows():
    rng = torch.Generator().manual_seed(0)
    for n in (1, 2, 3, 9):
        tokens, mask = torch.randint(4, (8, 10), generator=rng), torch.rand(8, 10, generator=rng) < .6
        mask[3] = False
        ids, want = tensor([7, 7, 2, 5, 2, 7, -3, 2]), []
        for i in ids.unique():
            rows = [tokens[j][mask[j]].tolist() for j in range(8) if ids[j] == i]
            grams = [tuple(row[t:t+n]) for row in rows for t in range(len(row) - n + 1)]
            want.append(len(set(grams))/len(grams) if grams else nan)
        assert_close(rl.distinct_n(tokens, mask, ids, n=n), tensor(want), equal_nan=True)


@pytest.mark.parametrize("copies, period", [(2, 3), (3, 64), (4, 1)])
def test_the_longest_loop_is_that_of_all_starts_and_periods(copies, period):
    rng = torch.Generator().manual_seed(copies)
    tokens, mask = torch.randint(2, (60, 20), generator=rng), torch.rand(60, 20, generator=rng) < .8
    def naive(row):
        best = 0
        for p, start in itertools.product(range(1, period + 1), range(len(row))):
            end = start + p
            while end < len(row) and row[end] == row[end - p]: end += 1
            if end <= len(row) and end - start >= copies*p: best = max(best, end - start)
        return best
    found = rl.longest_loop(tokens, mask, copies=copies, period=period)
    assert found.tolist() == [naive(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
    assert rl.longest_loop(tokens, torch.zeros_like(mask)).tolist() == [0]*60


# -- do they contain the truth?

RUNS = 2000


def difficulties(prompts, mean, spread):
    "Chances of a right answer, [RUNS, prompts]: prompts are of unlike difficulty."
    return torch.distributions.Beta(mean*spread, (1-mean)*spread).sample((RUNS, prompts))


def sampled(chance, answers=1): return (torch.rand(*chance.shape, answers) < chance[..., None]).double().flatten(1)


def repeated(chance):
    "Two verdicts on each thing, the second mostly the first again: rows that resemble each other, with the same mean."
    first = torch.rand(chance.shape) < chance
    again = torch.where(torch.rand(chance.shape) < .7, first, torch.rand(chance.shape) < chance)
    return torch.cat([first, again], 1).double()


def alone(prompts, mean):
    return map(rl.wilson_interval, sampled(torch.full((RUNS, prompts), mean))), mean


def clustered(f, prompts, mean):
    ids = torch.arange(prompts).repeat_interleave(8)
    return (f(s, group=ids) for s in sampled(difficulties(prompts, mean, 2.), 8)), mean


def unlike(prompts):
    sizes = tensor([2, 4, 8, 8, 16]).repeat(prompts//5)
    ids = torch.arange(prompts).repeat_interleave(sizes)
    s = torch.randn(RUNS, prompts).repeat_interleave(sizes, 1) + torch.randn(RUNS, len(ids))
    return (rl.mean_interval(x, group=ids) for x in s), 0.


def passing(prompts, k=4, mean=.3, spread=2.):
    ids, wrong = torch.arange(prompts).repeat_interleave(8), (1-mean)*spread
    truth = 1 - math.prod((wrong + i)/(spread + i) for i in range(k))   # E[1 − (1 − p)ᵏ] of a Beta distribution
    s = sampled(difficulties(prompts, mean, spread), 8)
    return (rl.wilson_interval(rl.pass_at_k(x, ids, k=k), group=torch.arange(prompts)) for x in s), truth


def paired(prompts, answers):
    p, ids = difficulties(prompts, .55, 1.5), torch.arange(prompts).repeat_interleave(answers)
    runs = zip(sampled(p, answers), sampled(.9*p, answers), strict=True)
    return (rl.paired_difference(x, ids, y, ids)[0] for x, y in runs), .055


def winning(prompts):
    "A judge that favours what it sees first, calls a tenth of the pairs ties, and prompts that favour one model."
    chance = (difficulties(prompts, .65, 2.3)*.8 + .1)[..., None] + tensor([.1, -.1])
    wins = torch.where(torch.rand(chance.shape) < .1, .5, (torch.rand(chance.shape) < chance).double()).flatten(1)
    ids, first = torch.arange(prompts).repeat_interleave(2), tensor([True, False]*prompts)
    return (rl.win_rate(w, ids, shown_first=first) for w in wins), .9*(.65*.8 + .1) + .05


def controlled(prompts):
    longer = .5 + torch.randn(RUNS, prompts)
    wins, ids = repeated((.4 + .9*longer.tanh()).sigmoid()), torch.arange(prompts).repeat(2)
    runs = zip(wins, longer.repeat(1, 2), strict=True)
    return (rl.length_controlled_win_rate(w, ids, x) for w, x in runs), 1/(1 + math.exp(-.4))


def rated(prompts):
    true, pairs = tensor([-.5, -.1, .2, .4]), torch.combinations(torch.arange(4)).repeat(prompts, 1).repeat(2, 1)
    wins = repeated((true[pairs[:6*prompts, 0]] - true[pairs[:6*prompts, 1]]).sigmoid().expand(RUNS, -1))
    ids = torch.arange(prompts).repeat_interleave(6).repeat(2)
    return (rl.bradley_terry_ratings(*pairs.T, w, group=ids)[0] for w in wins), 1000 - .5*400/math.log(10)


COVER = {"wilson": lambda: alone(200, .6), "wilson, 20 draws": lambda: alone(20, .8),
         "mean": lambda: clustered(rl.mean_interval, 50, .7),
         "mean, 10 prompts": lambda: clustered(rl.mean_interval, 10, .5),
         "clustered wilson": lambda: clustered(rl.wilson_interval, 50, .8), "mean, unlike prompts": lambda: unlike(20),
         "pass@4": lambda: passing(100), "paired": lambda: paired(50, 4), "paired, 10 prompts": lambda: paired(10, 4),
         "paired, one answer": lambda: paired(100, 1), "win rate": lambda: winning(100),
         "length control": lambda: controlled(100), "ratings": lambda: rated(50)}


@pytest.mark.parametrize("kind", COVER)
def test_intervals_of_95_percent_contain_the_truth_in_95_percent_of_evaluations(kind):
    torch.manual_seed(0)
    found, truth = COVER[kind]()
    share = sum(x.low <= truth <= x.high for x in found)/RUNS
    assert abs(share - .95) <= .015, share


def test_models_that_rarely_differ_are_not_told_apart_for_sure():
    "Shares .03 and .01 of 50 prompts, on which one of two models alone is right: in 13 % none or equal ones are seen."
    torch.manual_seed(0)
    u, ids = torch.rand(RUNS, 50), torch.arange(50)
    runs = zip((u < .03).double(), ((u >= .03) & (u < .04)).double(), strict=True)
    found = [rl.paired_difference(x, ids, y, ids)[0] for x, y in runs]
    known = [x for x in found if not math.isnan(x.low)]
    assert .1 < 1 - len(known)/RUNS < .17 and sum(x.low <= .02 <= x.high for x in known)/len(known) >= .935


def test_intervals_that_take_rows_for_draws_do_not():
    "The simulation sees the mistake: eight answers to each of 50 prompts."
    torch.manual_seed(0)
    share = sum(x.low <= .7 <= x.high for x in map(rl.mean_interval, sampled(difficulties(50, .7, 2.), 8)))/RUNS
    assert share < .8


@pytest.mark.parametrize("prompts, mean", [(10, .9), (20, .95)])
def test_near_1_wilsons_interval_covers_more_than_the_mean_plus_and_minus(prompts, mean):
    "Both are too narrow there, as their lesson says; this one is the one to use."
    shares = {}
    for f in (rl.mean_interval, rl.wilson_interval):
        torch.manual_seed(0)
        found, truth = clustered(f, prompts, mean)
        shares[f] = sum(x.low <= truth <= x.high for x in found)/RUNS
    assert shares[rl.mean_interval] < shares[rl.wilson_interval] - .05 and shares[rl.wilson_interval] > .85


# -- what comes and is wrong

@pytest.mark.parametrize("call, words", [
    (lambda: rl.pass_at_k([1., 0.], tensor([0, 0]), k=1), "pass_at_k: scores is a list; a tensor is wanted"),
    (lambda: rl.pass_at_k(X, 4, k=1), "pass_at_k: group is an int; integer ids"),
    (lambda: rl.best_of_k(X, THREES, k=0), "best_of_k: k is 0; a number of answers is wanted, at least 1"),
    (lambda: rl.majority_at_k(X, THREES, ["a"], k=1), "majority_at_k: there are 1 answers for 12 scores"),
    (lambda: rl.wilson_interval(10*X), "wilson_interval: scores reach from 0 to 10; shares lie within"),
    (lambda: rl.mean_interval(X, level=95), "level is 95; a share is wanted"),
    (lambda: rl.win_rate(2*X - 1, THREES), "win_rate: wins reach from -1 to 1; 1 for ours"),
    (lambda: rl.mean_interval(X, group=THREES[1:]), "mean_interval: scores is .12., group is .11."),
    (lambda: rl.paired_difference(X, THREES, Y, THREES[1:]), "paired_difference: .*baseline_scores"),
    (lambda: rl.win_rate(X, THREES, shown_first=X), "win_rate: shown_first is float64; a Bool is wanted"),
    (lambda: rl.best_of_n_accuracy(X, X, THREES), "best_of_n_accuracy: correct is float64; a Bool is wanted"),
    (lambda: rl.reliability_curve(10*X, X), "reliability_curve: probability reaches from 0 to 10"),
    (lambda: rl.distinct_n(THREES[None], THREES[None] > 0, tensor([0]), n=0), "distinct_n: n is 0"),
    (lambda: rl.longest_loop(THREES[None], THREES[None] > 0, copies=1), "longest_loop: copies is 1"),
])
def test_errors_say_what_came_and_what_was_wanted(call, words):
    with pytest.raises((TypeError, ValueError), match=words): call()
