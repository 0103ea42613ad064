"""Best of k: goldens, every subset visited, exact permutation, zeros, draws by weight, compilation and errors (LAWS
5, 21, 25)."""
import itertools
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.best_of import (
    best_of_n_advantages, best_worst_weights, group_pass_at_k_advantages, pass_at_k_advantages,
    resampled_rows,
)
from rlblocks.signals.groups import group_advantages
from rlblocks.testing.laws import check_estimator

nan, inf = math.nan, math.inf
ADVANTAGES = {"best of n": best_of_n_advantages, "scaled": partial(best_of_n_advantages, scale=True),
              "pass at 2": partial(pass_at_k_advantages, k=2), "pass at 4": partial(pass_at_k_advantages, k=4),
              "group pass at 1": partial(group_pass_at_k_advantages, k=1),
              "group pass at 3": partial(group_pass_at_k_advantages, k=3),}
WEIGHTS = {"best worst": best_worst_weights}
advantages = pytest.mark.parametrize("estimate", ADVANTAGES.values(), ids=ADVANTAGES)
everything = pytest.mark.parametrize("f", (ADVANTAGES | WEIGHTS).values(), ids=ADVANTAGES | WEIGHTS)
S, G = torch.tensor([1., .5, -2., .25, 3., .9, .4, .5, nan]), torch.tensor([3, 1, 3, 3, 1, 0, 0, 1, 3])


@everything
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_right_and_wrong_may_come_as_one_and_zero(f, dtype):
    s, g = torch.tensor([1, 0, 0, 0, 0, 1, 0]), torch.tensor([0, 0, 0, 0, 0, 3, 3])
    got, want = f(s.to(dtype), g), f(s.float(), g)
    assert got.dtype == torch.float32 and torch.equal(got, want) and want.abs().max() > .1


def ragged(seed, dtype=torch.float64, sizes=(1, 3, 6)):
    "Scores with ties and NaN, ids of groups of unlike sizes, and another order of the rows."
    rng = torch.Generator().manual_seed(seed)
    group = torch.arange(12).repeat_interleave(
        torch.tensor(sizes)[torch.randint(len(sizes), (12,), generator=rng)])*7 - 20
    scores = torch.randn(len(group), generator=rng, dtype=dtype).mul(3).round()/3
    scores[torch.rand(len(group), generator=rng) < .1] = nan
    return scores, group, torch.randperm(len(group), generator=rng)


def mates_of(s, g, i): return [j for j in range(len(s)) if g[j] == g[i] and not s[j].isnan()]


def naive_pass_at_k(s, g, k):
    "(mean gain, mean z-score) over all k-subsets that an answer is in."
    gains, zs = torch.zeros(len(s), dtype=torch.float64), torch.zeros(len(s), dtype=torch.float64)
    for i in range(len(s)):
        mates = mates_of(s, g, i)
        if i not in mates: continue
        subsets = list(itertools.combinations(mates, min(k, len(mates))))
        best = [max(float(s[j]) for j in x) for x in subsets]
        mine = [n for n, x in enumerate(subsets) if i in x]
        if min(k, len(mates)) > 1:
            gains[i] = math.fsum(best[n] - max(float(s[j]) for j in subsets[n] if j != i) for n in mine)/len(mine)
        mean = math.fsum(best)/len(best)
        std = math.sqrt(math.fsum((b-mean)**2 for b in best)/len(best))
        if std > 1e-12: zs[i] = (math.fsum(best[n] for n in mine)/len(mine) - mean)/(std + 1e-6)
    return gains, zs


# -- goldens

def test_by_hand():
    s, g = torch.tensor([1., 7., 3., 5.]), torch.tensor([0, 0, 0, 4])
    assert_close(best_of_n_advantages(s, g), torch.tensor([0., 4., 0., 0.]))
    assert_close(best_of_n_advantages(s, g, scale=True), torch.tensor([0., 4/(28/3)**.5, 0., 0.]), atol=1e-5, rtol=0)
    assert_close(pass_at_k_advantages(s, g, k=2), torch.tensor([0., 5., 1., 0.]))
    assert_close(pass_at_k_advantages(s, g, k=3), torch.tensor([0., 4., 0., 0.]))
    assert_close(group_pass_at_k_advantages(torch.tensor([0., 1., 0., 0.]), torch.zeros(4, dtype=torch.long), k=2),
                 torch.tensor([-1., 3., -1., -1.])/3, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n,right,k", [(8, 1, 2), (8, 3, 4), (16, 2, 8), (5, 4, 2)])
def test_right_and_wrong_as_published(n, right, k):
    "Chen et al. 2025, eq. 14 and 15, with binomials."
    rho = 1 - math.comb(n-right, k)/math.comb(n, k)
    sigma = math.sqrt(rho*(1-rho))
    want = [(1-rho)/(sigma+1e-6), (1 - rho - math.comb(n-right-1, k-1)/math.comb(n-1, k-1))/(sigma+1e-6)]
    s = (torch.arange(n) < right).double()
    if sigma == 0: want = [0., 0.]
    assert_close(group_pass_at_k_advantages(s, torch.zeros(n, dtype=torch.long), k=k),
                 torch.tensor(want, dtype=torch.float64)[1-s.long()])


def test_two_share_the_first_place():
    assert not best_of_n_advantages(torch.tensor([7., 7., 3.]), torch.zeros(3, dtype=torch.long)).any()
    assert_close(pass_at_k_advantages(torch.tensor([7., 7., 3.]), torch.zeros(3, dtype=torch.long), k=2),
                 torch.tensor([2., 2., 0.]))


# -- oracles

@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 99])
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_visit_to_every_subset(seed, k):
    s, g, _ = ragged(seed)
    gains, zs = naive_pass_at_k(s, g, k)
    assert_close(group_pass_at_k_advantages(s, g, k=k), zs, atol=1e-9, rtol=0)
    if k > 1: assert_close(pass_at_k_advantages(s, g, k=k), gains, atol=1e-9, rtol=0)
    if k == 99: assert_close(best_of_n_advantages(s, g), gains, atol=1e-12, rtol=0)


def test_relatives():
    s, g, _ = ragged(0)
    assert_close(pass_at_k_advantages(s, g, k=6), best_of_n_advantages(s, g))
    biased = torch.stack([((x := s[mates_of(s, g, i)]) - x.mean()).square().mean().sqrt().nan_to_num(0.)
                          for i in range(len(s))])
    assert_close(group_pass_at_k_advantages(s, g, k=1),
                 group_advantages(s, g, scale=False)/(torch.where(biased > 0, biased, 1.) + 1e-6))


def test_the_gradient_of_the_best_of_k_is_estimated_without_bias():
    theta, worth = torch.tensor([.3, -.5, .1], dtype=torch.float64,
                                requires_grad=True), torch.tensor([0., 1., .3], dtype=torch.float64)
    for n, k in ((3, 2), (4, 2), (4, 3), (3, 3)):
        exact, = torch.autograd.grad(sum(theta.softmax(0)[list(ys)].prod()*worth[list(ys)].max()
                                         for ys in itertools.product(range(3), repeat=k)), theta)
        estimate = torch.zeros(3, dtype=torch.float64)
        for ys in itertools.product(range(3), repeat=n):
            p = theta.log_softmax(0)[list(ys)]
            A = pass_at_k_advantages(worth[list(ys)], torch.zeros(n, dtype=torch.long), k=k) * k/n
            estimate += p.sum().exp().detach()*torch.autograd.grad((A*p).sum(), theta)[0]
        assert_close(estimate, exact)


def test_many_answers_keep_their_digits():
    s, g = torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.zeros(1000, dtype=torch.long)
    for f in (partial(pass_at_k_advantages, k=300), partial(group_pass_at_k_advantages, k=5)):
        want = f(s.double(), g)
        assert (f(s, g) - want).abs().max() <= 1e-5*want.abs().max()


# -- laws

@advantages
@pytest.mark.parametrize("offset", [0., 1e8])
def test_equals_one_alone_and_nan_are_exactly_zero(estimate, offset):
    s, g = (torch.cat([torch.full((n,), c/100 + offset) for n in (1, 2, 3, 7, 8) for c in range(1, 100)]),
            torch.arange(5*99).repeat_interleave(torch.tensor([1, 2, 3, 7, 8]).repeat_interleave(99)))
    for dtype in (torch.float32, torch.float64): assert not estimate(s.to(dtype), g).any()
    unscored = estimate(torch.tensor([1., nan, 3., nan, 9., nan]), torch.tensor([0, 0, 0, 1, 2, 2]))
    assert unscored.isfinite().all() and not unscored[[1, 3, 4, 5]].any()
    assert torch.equal(unscored[[0, 2]], estimate(torch.tensor([1., 3.]), torch.tensor([0, 0])))


@everything
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_permutation_is_exact(f, dtype):
    s, g, order = ragged(0, dtype, (1, 3, 8))
    assert torch.equal(f(s[order], g[order]), f(s, g)[order])


@everything
def test_groups_do_not_know_each_other(f):
    s, g, _ = ragged(0)
    other = g == g[-1]
    assert torch.equal(f(torch.where(other, 100*s - 3, s), g)[~other], f(s, g)[~other])
    assert_close(f(s[other], g[other]), f(s, g)[other])


@everything
def test_laws_precision_and_gradient(f):
    def block(scores, group): return f(scores, group)
    assert {"purity", "gradient", "permutation", "precision"} <= set(check_estimator(block))
    s = torch.tensor([1., .5, -2., .25, 3., .9, .4, .7], dtype=torch.float64, requires_grad=True)
    if f in WEIGHTS.values(): assert not f(s, G[:8]).requires_grad
    else: assert torch.autograd.gradcheck(lambda s: f(s, G[:8]), s)
    x = S.clone().requires_grad_()
    out = f(x, G)
    if out.requires_grad:
        out.sum().backward()
        assert x.grad.isfinite().all()
    assert f(S.to(torch.bfloat16), G).dtype == torch.float32 and f(S[:0], G[:0]).shape == (0,)


@everything
def test_static_shapes_and_no_look_at_the_data(f):
    want, meta = f(S, G), f(S.to("meta"), G.to("meta"))
    assert meta.shape == want.shape and meta.dtype == want.dtype
    assert torch.equal(torch.compile(f, fullgraph=True, backend="eager")(S, G), want)


# -- draws

def test_weights_by_hand():
    s, g = torch.tensor([-2., .5, 3., 1., nan, 3.]), torch.tensor([0, 0, 0, 1, 1, 0])
    assert best_worst_weights(s, g).tolist() == [1, 0, 1, 1, 0, 1]
    assert best_worst_weights(s, torch.zeros_like(g)).tolist() == [1, 0, 1, 0, 0, 1]  # verl: of the batch
    assert not best_worst_weights(torch.tensor([nan, nan]), torch.tensor([0, 0])).any()


def test_rows_by_hand():
    w, u = torch.tensor([4., 0., 9., 3., nan, -5.]), torch.tensor([0., .2, .25, .5, .8125, .99, 1.])
    assert resampled_rows(w, uniform=u).tolist() == [0, 0, 2, 2, 3, 3, 3]
    assert resampled_rows(torch.tensor([0., 0., 0.]), uniform=torch.tensor([0., .34, .99])).tolist() == [0, 1, 2]
    assert resampled_rows(torch.tensor([0., 1.]), uniform=torch.zeros(0)).tolist() == []


def test_rows_come_as_often_as_they_weigh():
    rng = torch.Generator().manual_seed(0)
    w = torch.rand(50, generator=rng)*(torch.rand(50, generator=rng) < .5)
    rows = resampled_rows(w, uniform=torch.rand(100_000, generator=rng))
    share = rows.bincount(minlength=50)/100_000
    assert not share[w == 0].any() and (share - w/w.sum()).abs().max() < 5*(.03/100_000)**.5 + 1e-3


def test_a_light_row_beside_a_heavy_one_is_not_lost():
    # in float32 1e8 + 1 is 1e8
    assert resampled_rows(torch.tensor([1e8, 1.]),
                          uniform=torch.tensor([1 - .5e-8], dtype=torch.float64)).tolist() == [1]


def test_rows_compile_without_a_look_at_the_data():
    w, u = torch.tensor([4., 0., 9.]), torch.rand(5, generator=torch.Generator().manual_seed(0))
    meta = resampled_rows(w.to("meta"), uniform=u.to("meta"))
    assert meta.shape == (5,) and meta.dtype == torch.int64
    assert torch.equal(torch.compile(resampled_rows, fullgraph=True, backend="eager")(w, uniform=u),
                       resampled_rows(w, uniform=u))


# -- errors

def errors():
    s, g = torch.zeros(4), torch.zeros(4, dtype=torch.long)
    for f in (best_of_n_advantages, partial(pass_at_k_advantages, k=2), partial(group_pass_at_k_advantages, k=2),
              best_worst_weights):
        name = getattr(f, "func", f).__name__
        yield (lambda f=f: f(s, g[1:]), ValueError,
               f"{name}: scores is [4], group is [3]; one score and one id per row are wanted, sum token rewards first")
        yield lambda f=f: f(s, s), TypeError, f"{name}: group is float32; ids are integers"
    yield (lambda: pass_at_k_advantages(s, g, k=1), ValueError,
           "pass_at_k_advantages: k is 1; at least 2 are wanted, the objective of one draw is leave_one_out's")
    yield (lambda: group_pass_at_k_advantages(s, g, k=0), ValueError,
           "group_pass_at_k_advantages: k is 0; at least 1 is wanted")
    yield (lambda: resampled_rows(s[None], uniform=s), ValueError,
           "resampled_rows: weights is [1, 4]; one weight for each of at least one row is wanted")
    yield (lambda: resampled_rows(s[:0], uniform=s), ValueError,
           "resampled_rows: weights is [0]; one weight for each of at least one row is wanted")


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
