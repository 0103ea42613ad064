"""Groups: goldens, oracles, equals exactly 0, exact permutation, ragged ids, gradients, compilation and errors (LAWS
5, 21, 25)."""
import itertools
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.advantages import at_tokens
from rlblocks.signals.best_of import best_of_n_advantages
from rlblocks.signals.groups import (
    bnpo_advantages, gdpo_advantages, gpg_advantages, group_advantages, leave_one_out,
    lite_ppo_advantages, maxrl_advantages, opo_advantages, optimal_token_baseline, reinforce_pp_baseline, soft_values,
)
from rlblocks.arithmetic.masked import promoted, whiten
from rlblocks.signals.shaping import at_last_token, without_unscored
from rlblocks.testing.oracles import naive_group_advantages, naive_leave_one_out
from rlblocks.testing.laws import check_estimator
from rlblocks.testing.oracles import sample_columns

nan, inf = math.nan, math.inf


# any, but they go with the row
def lengths_of(scores): return (scores.detach().float().nan_to_num(0.).abs()*7 + .3).long() % 11 + 1


# every estimator as one function of (scores, group)
GROUPED = {
    "scaled": group_advantages, "unscaled": partial(group_advantages, scale=False), "leave one out": leave_one_out,
    "opo": lambda s, g: opo_advantages(s, g, lengths=lengths_of(s)), "lite": lite_ppo_advantages,
    "maxrl": lambda s, g: maxrl_advantages(promoted(s).abs(), g),
    "bnpo": lambda s, g: bnpo_advantages((promoted(s)/8 + .5).clamp(0, 1), g), "gpg": gpg_advantages,
    "gdpo": lambda s, g: gdpo_advantages(torch.stack([promoted(s), promoted(s).abs() + 2*s], 1), g, weights=(1., .5)),
    "otb": lambda s, g: optimal_token_baseline(s[:, None], -(lengths_of(s)[:, None]/9).to(promoted(s).dtype), g,
                                               without_unscored(torch.ones_like(s, dtype=torch.bool)[:, None], s),
                                               sum_pi_squared=torch.full_like(promoted(s).detach(), .9)[:, None])[:, 0],
}
# whitening adds in the order of rows
ROUNDED = GROUPED | {
    "reinforce++": lambda s, g: reinforce_pp_baseline(s, g, torch.ones_like(s, dtype=torch.bool)[:, None])[:, 0]}
grouped = pytest.mark.parametrize("estimate", GROUPED.values(), ids=GROUPED)
rounded = pytest.mark.parametrize("estimate", ROUNDED.values(), ids=ROUNDED)
# the others scale by the batch
of_one = pytest.mark.parametrize("estimate",
                                 [GROUPED[k] for k in ("scaled", "unscaled", "leave one out", "opo", "maxrl", "otb")])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


# -- goldens

def test_groups_by_hand():
    s, g = torch.tensor([1., 0., 3., 0., 3.]), torch.tensor([7, 4, 4, 4, 7])
    r2, r3 = 2**-.5, 3**-.5
    assert_close(group_advantages(s, g), torch.tensor([-r2, -r3, 2*r3, -r3, r2]), atol=1e-5, rtol=0)
    assert_close(group_advantages(s, g, scale=False), torch.tensor([-1., -1, 2, -1, 1]))
    assert_close(leave_one_out(s, g), torch.tensor([-2., -1.5, 3, -1.5, 2]))
    assert_close(leave_one_out(torch.tensor([0.] + [.95]*7), torch.zeros(8, dtype=torch.long)),
                 torch.tensor([-.95] + [.95/7]*7))


@pytest.mark.parametrize("eps,last", [(1e-9, 1.5), (1e-6, 1.497006), (1e-4, 1.25)])
def test_eps_is_added_to_the_deviation(eps, last):
    s, one = torch.tensor([0., 0., 0., .001], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    assert_close(group_advantages(s, one, eps=eps)[3], torch.tensor(last, dtype=torch.float64), atol=1e-5, rtol=0)
    if eps == 1e-6: assert torch.equal(group_advantages(s, one), group_advantages(s, one, eps=eps))


@rounded
@pytest.mark.parametrize("offset", [0., 1e8, -1e8])
def test_equals_are_exactly_zero(estimate, offset):
    scores = torch.cat([torch.full((n,), c/100 + offset) for n in (1, 2, 3, 7, 8, 33) for c in range(1, 100)])
    group = torch.arange(6*99).repeat_interleave(torch.tensor([1, 2, 3, 7, 8, 33]).repeat_interleave(99))
    for dtype in (torch.float32, torch.float64): assert not estimate(scores.to(dtype), group).any()


def test_equals_are_zero_without_eps():
    assert not group_advantages(torch.full((7,), .95), torch.zeros(7, dtype=torch.long), eps=0.).any()


@rounded
def test_a_group_of_one_is_zero(estimate):
    assert estimate(torch.tensor([5., .1, 3.]), torch.tensor([1, 2, 3])).tolist() == [0, 0, 0]


@rounded
def test_nan_is_unscorable(estimate):
    s, g = torch.tensor([1., 2., nan, 4., 9., nan, nan, 7., nan]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3])
    out, kept = estimate(s, g), ~s.isnan()
    assert_close(out[kept], estimate(s[kept], g[kept]), atol=1e-6, rtol=1e-6)
    assert not out[~kept].any()
    assert out[4] == 0 and out[7] == 0


@rounded
def test_gradient_is_finite_where_there_is_nothing_to_learn(estimate):
    s = torch.tensor([.95, .95, .95, 2., nan, 1., nan], requires_grad=True)
    estimate(s, torch.tensor([0, 0, 0, 1, 1, 2, 3])).sum().backward()
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("offset", [0., 1000., 1e8])
def test_bounded_at_any_offset(n, offset):
    g, one = torch.Generator().manual_seed(n), torch.zeros(n, dtype=torch.long)
    for kind in (torch.randn(n, generator=g)*32, (torch.arange(n) == 1).float()*8,
                 torch.randint(2, (n,), generator=g)*16.):
        advantages = group_advantages(kind + offset, one)
        assert advantages.isfinite().all() and advantages.abs().max() <= (n-1)/n**.5 * (1 + 1e-6)
        assert_close(advantages.double(), naive_group_advantages(kind + offset, one), atol=1e-5, rtol=1e-5)


def test_scores_near_1000_keep_their_spread():
    s, one = 1000 + torch.tensor([0., .1, .2, .3]), torch.zeros(4, dtype=torch.long)
    assert_close(group_advantages(s, one).double(), naive_group_advantages(s, one), atol=1e-5, rtol=1e-5)


# -- laws

@pytest.mark.parametrize("name", [k for k in ROUNDED if k not in ("gdpo", "otb", "bnpo")])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_right_and_wrong_may_come_as_one_and_zero(name, dtype):
    s, g = torch.tensor([1, 0, 1, 0, 1, 1, 0]), torch.tensor([0, 0, 0, 0, 3, 3, 3])
    got, want = ROUNDED[name](s.to(dtype), g), ROUNDED[name](s.float(), g)
    assert got.dtype == torch.float32 and torch.equal(got, want) and want.abs().max() > .3


@grouped
@both_dtypes
def test_permutation_is_exact(estimate, dtype):
    rng = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1, 3, 8])[torch.randint(3, (40,), generator=rng)]
    group = torch.arange(40).repeat_interleave(sizes)*7 - 100
    scores = torch.randn(len(group), generator=rng, dtype=dtype).round(decimals=1) + .05  # with ties
    scores[torch.rand(len(group), generator=rng) < .1] = nan
    order = torch.randperm(len(group), generator=rng)
    got, want = estimate(scores[order], group[order]), estimate(scores, group)[order]
    if dtype == torch.float32: assert torch.equal(got, want)
    # sums are in double: their own last digits know the order of rows
    assert_close(got, want, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ragged_groups_equal_one_at_a_time(dtype):
    scores, group = torch.randn(12, generator=torch.Generator().manual_seed(0),
                                dtype=torch.float64), torch.tensor([9, 2, 9, 4, 2, 9, 9, 9, 9, 2, 9, 9]).to(dtype)
    assert_close(group_advantages(scores, group), naive_group_advantages(scores, group))
    assert_close(group_advantages(scores, group, scale=False), naive_group_advantages(scores, group, scale=False))
    assert_close(leave_one_out(scores, group), naive_leave_one_out(scores, group))


@pytest.mark.parametrize("name", ["scaled", "unscaled", "leave one out", "opo", "maxrl"])
def test_an_infinite_score_is_not_hidden_and_stays_in_its_group(name):
    estimate = GROUPED[name]
    s, g = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    for x in (torch.inf, -torch.inf):
        broken = estimate(torch.where(torch.arange(12) == 4, x, s), g)
        assert not broken[g == 1].isfinite().any()
        assert torch.equal(broken[g != 1], estimate(torch.where(torch.arange(12) == 4, 0., s), g)[g != 1])


def test_an_infinite_score_is_seen_by_who_divides_the_whole_batch():
    s, g, on = torch.tensor([1., 0., torch.inf, 1., 0., 2.,
                             2.]), torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.ones(7, 2, dtype=torch.bool)
    assert reinforce_pp_baseline(s, g, on)[:, 0].isnan().tolist() == [True]*5 + [False]*2 # a group of equals is 0


@of_one
def test_groups_do_not_know_each_other(estimate):
    s, g = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    changed = torch.where(g == 1, s*100 - 3, s)
    assert torch.equal(estimate(changed, g)[g != 1], estimate(s, g)[g != 1])
    assert torch.equal(estimate(s[g == 2], g[g == 2]), estimate(s, g)[g == 2])


@rounded
def test_group_estimators_obey_every_law(estimate):
    def block(scores, group): return estimate(scores, group)  # a name and a signature for lambdas
    assert {"purity", "gradient", "permutation", "precision"} <= set(check_estimator(block))
    assert estimate(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


# -- the family by hand

def test_reinforce_pp_baseline_by_hand():
    s, g, on = torch.tensor([1., 0., .5,
                             .5]), torch.tensor([0, 0, 1, 1]), torch.arange(3) < torch.tensor([[1], [3], [2], [2]])
    assert_close(reinforce_pp_baseline(s, g, on), at_tokens(torch.tensor([5., -3., 0., 0.])/8**.5, on))
    silent = torch.cat([on, torch.zeros(1, 3).bool()])  # a greedy answer, or a filler: no part in any mean
    assert torch.equal(reinforce_pp_baseline(torch.cat([s, torch.tensor([9.])]), torch.cat([g, g[:1]]), silent)[:4],
                       reinforce_pp_baseline(s, g, on))


def test_reinforce_pp_baseline_is_whitened_group_advantages():
    s, g = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(12) % 3
    on = torch.rand(12, 9, generator=torch.Generator().manual_seed(1)) < .7
    assert_close(reinforce_pp_baseline(s, g, on), whiten(at_tokens(group_advantages(s, g, scale=False), on), on))


def test_opo_by_hand():
    assert_close(opo_advantages(torch.tensor([1., 0., 4.]), torch.tensor([7, 7, 2]), lengths=torch.tensor([1, 3, 9])),
                 torch.tensor([.75, -.25, 0]))
    assert_close(opo_advantages(torch.tensor([1., 0., nan]), torch.tensor([7, 7, 7]), lengths=torch.tensor([1, 3, 9])),
                 torch.tensor([.75, -.25, 0]))
    # nobody said a word: above the lowest
    assert_close(opo_advantages(torch.tensor([1., 0.]), torch.tensor([7, 7]), lengths=torch.tensor([0, 0])),
                 torch.tensor([1., 0.]))


def test_opo_ties_with_unlike_lengths_are_added_in_one_order():
    s, n, g = torch.tensor([.1]*6 + [.7]*6), torch.tensor([3, 1000, 7, 11, 13, 10**6, 17, 5, 2, 9, 10**5,
                                                           4]), torch.zeros(12, dtype=torch.long)
    want = opo_advantages(s, g, lengths=n)
    for seed in range(30):
        p = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(opo_advantages(s[p], g, lengths=n[p]), want[p])


def test_settled_prompts_are_made_up_for():
    s, g = torch.tensor([1., 0., 1., 1., 0., 0., 0., nan]), torch.arange(8)//2
    # 7 rows scored, 2 of them in an open group
    assert_close(gpg_advantages(s, g), torch.tensor([1.75, -1.75, 0, 0, 0, 0, 0, 0]))
    unscored = torch.tensor([1., 0., nan, nan]), torch.tensor([0, 0, 1, 1])  # a group without any score is no group
    assert_close(gpg_advantages(*unscored), torch.tensor([.5, -.5, 0, 0]))
    s, g = torch.tensor([1., 0., .5, 7., 7., 7., 7.], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    # 7/3 in float32 would show
    assert_close(gpg_advantages(s, g), torch.tensor([7/6, -7/6, 0, 0, 0, 0, 0], dtype=torch.float64), atol=1e-15,
                 rtol=0)


def test_gdpo_by_hand():
    s, g = torch.tensor([[1., 0.], [0., 10.]]), torch.tensor([0, 0])
    assert_close(gdpo_advantages(s, g, weights=(2., 1.)), torch.tensor([.5**.5, -.5**.5]), atol=1e-5, rtol=0)
    assert_close(gdpo_advantages(torch.tensor([[1., nan], [0., nan], [nan, nan]]), torch.tensor([0, 0, 0])),
                 torch.tensor([.5**.5, -.5**.5, 0]), atol=1e-5, rtol=0)


def test_gdpo_equals_each_reward_for_itself():
    rng = torch.Generator().manual_seed(0)
    s, g, w = (torch.randn(20, 3, generator=rng, dtype=torch.float64)*torch.tensor([1., 50., .01]),
               torch.randint(5, (20,), generator=rng), (1., .5, 2.))
    s[torch.rand(20, 3, generator=rng) < .1] = nan
    x = sum(weight*naive_group_advantages(column, g) for weight, column in zip(w, s.unbind(1), strict=True))
    n = (~s.isnan().all(1)).sum()
    assert_close(gdpo_advantages(s, g, weights=w), x/((x.square().sum()/(n-1)).sqrt() + 1e-6))


# -- the batch's spread, the mean, a Beta

def test_lite_ppo_by_hand():
    # all scores: mean 1.4, squares 9.2 above it
    s, g = torch.tensor([1., 0., 3., 0., 3., nan]), torch.tensor([7, 4, 4, 4, 7, 7])
    assert_close(lite_ppo_advantages(s, g), torch.tensor([-1., -1, 2, -1, 1, 0])/2.3**.5, atol=1e-5, rtol=0)
    assert_close(lite_ppo_advantages(s, g, eps=1.), torch.tensor([-1., -1, 2, -1, 1, 0])/(2.3**.5 + 1))


def test_maxrl_by_hand():
    s, g = torch.tensor([0., 1, 0, 0, 1, 1, 0, 0, nan, 1, 5, -3,
                         1]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 0, 3, 4, 4, 5])
    assert maxrl_advantages(s, g).tolist() == [-1, 3, -1, -1, 0, 0, 0, 0, 0, 0, 4, -4, 0]
    # a mean that is not positive
    assert not maxrl_advantages(torch.tensor([-1., -2, 1, -1]), torch.tensor([0, 0, 1, 1])).any()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_maxrl_estimates_the_likelihood_to_order_n_less_1(n):
    theta, right = torch.tensor([.3, -.5, .1], dtype=torch.float64,
                                requires_grad=True), torch.tensor([0., 1., 0.], dtype=torch.float64)
    p = theta.softmax(0) @ right
    want, = torch.autograd.grad(sum((1 - (1-p)**k)/k for k in range(1, n)), theta)
    got = torch.zeros(3, dtype=torch.float64)
    for ys in map(list, itertools.product(range(3), repeat=n)):
        lp = theta.log_softmax(0)[ys]
        A = maxrl_advantages(right[ys], torch.zeros(n, dtype=torch.long))
        got += lp.sum().exp().detach()*torch.autograd.grad((A*lp).mean(), theta)[0]
    assert_close(got, want, atol=1e-13, rtol=1e-13)


def naive_bnpo(s, g):
    p = {i: s[g == i].mean() for i in g.tolist()}
    rates = torch.stack(list(p.values()))
    m, v = rates.mean(), rates.var()
    f = torch.distributions.Beta((1 + (m*(1-m)/v - 1)*m/3).clamp(1), (1 + (m*(1-m)/v - 1)*(1-m)/3).clamp(1))
    return torch.stack([(x - p[i])/f.log_prob(p[i]).exp() for x, i in zip(s, g.tolist(), strict=True)])


def test_bnpo_by_hand():
    s, g = torch.tensor([1., 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0],
                        dtype=torch.float64), torch.arange(3).repeat_interleave(4)
    want = (torch.tensor([3., -1, -1, -1], dtype=torch.float64)/3**.5,
            torch.tensor([1., 1, -1, -1], dtype=torch.float64), torch.tensor([1., 1, 1, -3], dtype=torch.float64)/3**.5)
    assert_close(bnpo_advantages(s, g), torch.cat(want)*math.pi/8)
    assert_close(bnpo_advantages(s, 0*g), group_advantages(s, 0*g, scale=False))  # one prompt: no spread to fit
    assert torch.equal(bnpo_advantages(s.long(), g), bnpo_advantages(s.float(), g))
    assert torch.equal(bnpo_advantages(s.bool(), g), bnpo_advantages(s.float(), g))
    with_solved = bnpo_advantages(torch.cat([s, torch.ones(4, dtype=torch.float64)]),
                                  torch.cat([g, torch.full((4,), 9)]))
    assert with_solved[:12].isfinite().all() and not with_solved[12:].any()


@pytest.mark.parametrize("seed", range(5))
def test_bnpo_equals_pytorchs_beta(seed):
    rng = torch.Generator().manual_seed(seed)
    s, g = torch.rand(40, generator=rng, dtype=torch.float64), torch.randint(6, (40,), generator=rng)
    assert_close(bnpo_advantages(s, g), naive_bnpo(s, g), atol=1e-9, rtol=1e-9)
    assert bnpo_advantages(s + 5, g).isnan().all()


def test_bnpo_weighs_at_most_so_much():
    s, g = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(40) % 6
    weight = bnpo_advantages(s, g)/group_advantages(s, g, scale=False)
    assert_close(bnpo_advantages(s, g, limit=.3), group_advantages(s, g, scale=False)*weight.clamp(max=.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n,right", [(8, 4), (7, 3), (3, 1), (10, 9)])
@pytest.mark.parametrize("groups", [1, 2, 3, 50])
def test_bnpo_is_flat_where_pass_rates_agree(groups, n, right, dtype):  # variance 0: published, a division by it
    s, g = (torch.arange(n) < right).to(dtype).repeat(groups), torch.arange(groups).repeat_interleave(n)
    assert_close(bnpo_advantages(s, g), group_advantages(s, g, scale=False))
    assert_close(bnpo_advantages(.3*s, g), group_advantages(.3*s, g, scale=False))


def test_bnpo_fits_a_spread_however_small():
    s, g = torch.tensor([1., 0, 1, 1e-6], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert bnpo_advantages(s, g).abs().max() < 1e-3 < group_advantages(s, g, scale=False).abs().min()


# -- soft values

def test_soft_values_by_hand():
    s, g = torch.tensor([0., 5., nan, math.log(3), nan]), torch.tensor([1, 2, 1, 1, 3])
    assert_close(soft_values(s, g, beta=1.), torch.tensor([math.log(2), 5., math.log(2), math.log(2), nan]),
                 equal_nan=True)


@pytest.mark.parametrize("beta", [1e-3, .1, 1., 100.])
def test_soft_values_equal_their_definition(beta):
    rng = torch.Generator().manual_seed(0)
    s, g = torch.randn(30, generator=rng, dtype=torch.float64)*3 + 1e3, torch.randint(6, (30,), generator=rng)
    want = torch.stack([beta*((s[g == i]/beta).logsumexp(0) - math.log(int((g == i).sum()))) for i in g])
    assert_close(soft_values(s, g, beta=beta), want, atol=1e-9, rtol=1e-9)
    p = torch.randperm(30, generator=rng)
    assert_close(soft_values(s[p], g[p], beta=beta), soft_values(s, g, beta=beta)[p], atol=0, rtol=1e-15)
    assert torch.equal(soft_values(s[p].float(), g[p], beta=beta), soft_values(s.float(), g, beta=beta)[p])


def test_soft_values_of_equals_are_exact_and_their_gradient_finite():
    s = torch.tensor([.95, .95, .95, nan, nan, 7.], requires_grad=True)
    V = soft_values(s, torch.tensor([0, 0, 0, 0, 1, 2]), beta=.01)
    assert torch.equal(V[:4], torch.full((4,), .95)) and V[4].isnan() and V[5] == 7
    V[[0, 5]].sum().backward()
    assert s.grad.isfinite().all() and assert_close(s.grad, torch.tensor([1/3, 1/3, 1/3, 0, 0, 1])) is None


# -- optimal token baseline

def energies(share):
    "log π and Σπ² of tokens, of two to choose from, with this squared gradient."
    π = 1 - (share/2).sqrt()
    return π.log(), π.square() + (1 - π).square()


def naive_otb(r, lp, sq, g, on, ρ=None, tail=False):
    ρ = torch.ones_like(r) if ρ is None else ρ
    at = [[t for t, m in enumerate(row) if m] for row in on.tolist()]
    W = [list(itertools.accumulate(float((1 - 2*lp[b, t].exp() + sq[b, t])*ρ[b, t]**2) for t in row))
         for b, row in enumerate(at)]
    out = torch.zeros(on.shape, dtype=torch.float64)
    for b, row in enumerate(at):
        for i, t in enumerate(row):
            mates = [(W[c][i], sum(float(r[c, u]) for u in at[c][i:]))
                     for c in range(len(at)) if g[c] == g[b] and len(at[c]) > i]
            G = sum(float(r[b, u]) for u in row[i:])
            out[b, t] = G if tail and len(mates) == 1 else G - sum(w*x for w, x in mates)/sum(w for w, _ in mates)
    return out


def test_otb_by_hand():
    lp, sq = energies(torch.tensor([[.5, .5], [1.5, .5]]))
    on, one = torch.ones(2, 2).bool(), torch.zeros(2, dtype=torch.long)
    assert_close(optimal_token_baseline(torch.tensor([[0., 1.], [0., 0.]]), lp, one, on, sum_pi_squared=sq),
                 torch.tensor([[3/4, 2/3], [-1/4, -1/3]]))
    assert_close(optimal_token_baseline(torch.tensor([[0., 1.], [0., 0.]]), lp, one, on, sum_pi_squared=sq,
                                        weights=torch.tensor([[1., 1.], [0., 1.]])),
                 torch.tensor([[0., 1/3], [-1., -2/3]]))


@pytest.mark.parametrize("tail", [False, True])
def test_otb_equals_place_by_place(tail):
    c, rng = sample_columns(), torch.Generator().manual_seed(0)
    lp, sq = energies(torch.rand(16, 16, generator=rng, dtype=torch.float64) + .1)
    ρ = torch.rand(16, 16, generator=rng, dtype=torch.float64) + .5
    for weights in (None, ρ):
        got = optimal_token_baseline(c["rewards"], lp, c["group"], c["mask"], sum_pi_squared=sq, weights=weights,
                                     tail=tail)
        assert_close(got, naive_otb(c["rewards"], lp, sq, c["group"], c["mask"], weights, tail), atol=1e-6, rtol=0)


def test_otb_relatives():
    s, g, on = torch.randn(12, generator=torch.Generator().manual_seed(0),
                           dtype=torch.float64), torch.arange(12) % 3, torch.ones(12, 5).bool()
    lp, sq = energies(torch.full((12, 5), .5, dtype=torch.float64))
    r = at_last_token(s, on)
    assert_close(optimal_token_baseline(r, lp, g, on, sum_pi_squared=sq),
                 at_tokens(group_advantages(s, g, scale=False), on))
    sure = torch.zeros_like(lp), torch.ones_like(sq)  # no gradient anywhere: the plain mean
    assert_close(optimal_token_baseline(r, sure[0], g, on, sum_pi_squared=sure[1]),
                 at_tokens(group_advantages(s, g, scale=False), on))
    # no weight is negative, whatever half precision made of Σπ²
    rounded_down = torch.zeros_like(lp), torch.full_like(sq, .996) - .1*(torch.arange(12) % 5)[:, None]
    assert_close(optimal_token_baseline(r, rounded_down[0], g, on, sum_pi_squared=rounded_down[1]),
                 at_tokens(group_advantages(s, g, scale=False), on))


def test_otb_of_one_place_each_is_opo_of_energies():
    lp, sq = energies(torch.tensor([[.5], [1.5], [1.]], dtype=torch.float64))
    s, one = torch.tensor([1., 0., 3.], dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    assert_close(optimal_token_baseline(s[:, None], lp, one, torch.ones(3, 1).bool(), sum_pi_squared=sq)[:, 0],
                 opo_advantages(s, one, lengths=torch.tensor([1, 3, 2])), atol=1e-6, rtol=0)


@pytest.mark.parametrize("junk", [0., 100., nan, inf, -inf])
def test_otb_is_blind_to_tools_and_padding(junk):
    c, (lp, sq) = sample_columns(), energies(torch.rand(16, 16, generator=torch.Generator().manual_seed(0),
                                                        dtype=torch.float64) + .1)
    args, want = (c["rewards"], lp,
                  sq, c["mask"]), optimal_token_baseline(c["rewards"], lp, c["group"], c["mask"], sum_pi_squared=sq)
    def insert(x, k):
        return torch.cat([x[:, :5], torch.full((16, k), junk if x.is_floating_point() else 0.).to(x.dtype), x[:, 5:]],
                         1)
    for k in (0, 1, 50):
        r, lp, sq, on = (insert(x if x.dtype == torch.bool else torch.where(c["mask"], x, junk), k) for x in args)
        got = optimal_token_baseline(r, lp, c["group"], on, sum_pi_squared=sq)
        assert_close(got, insert(want, k).nan_to_num(0., 0., 0.) * on, atol=1e-12, rtol=0)
        assert not got[~on].any()


@pytest.mark.parametrize("tail", [False, True])
def test_token_rewards_carry_the_gradient(tail):
    c, rng = sample_columns(), torch.Generator().manual_seed(0)
    lp, sq = energies(torch.rand(16, 16, generator=rng, dtype=torch.float64) + .1)
    r, w, on, g = (c["rewards"][:6, :6].clone().requires_grad_(), c["entropy"][:6, :6],
                   torch.rand(6, 6, generator=rng) < .7, torch.arange(6) % 2)
    assert torch.autograd.gradcheck(lambda r: optimal_token_baseline(r, lp[:6, :6], g, on, sum_pi_squared=sq[:6, :6],
                                                                     weights=w, tail=tail), r)
    assert torch.autograd.gradcheck(lambda r: reinforce_pp_baseline(r[:, 0], g, on), r)


def test_otb_zeros():
    lp, sq = energies(torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + .1)
    on = torch.arange(4) < torch.tensor([[1], [2], [4], [4], [3], [0]])
    g = torch.tensor([0, 0, 0, 1, 2, 2])
    # equals, one alone, one without words
    assert not optimal_token_baseline(at_last_token(torch.full((6,), .95), on), lp, g, on, sum_pi_squared=sq).any()
    unscored = at_last_token(torch.tensor([1., 0., nan, 5., 1., nan]), on)
    got = optimal_token_baseline(unscored, lp, g, on, sum_pi_squared=sq)
    assert got[2].isnan().all() and not got[3:].any()
    assert torch.equal(got[:2], optimal_token_baseline(unscored[:2], lp[:2], g[:2], on[:2], sum_pi_squared=sq[:2]))


# -- all of them

def tokens_of(f):
    return lambda s, g: f(s, g,
                          torch.arange(4, device=s.device) < (1 + torch.arange(len(s), device=s.device)[:, None] % 4))
CALLS = ROUNDED | {"soft values": lambda s, g: soft_values(s, g, beta=.5),
                   "reinforce++ tokens": tokens_of(reinforce_pp_baseline)}
calls = pytest.mark.parametrize("estimate", CALLS.values(), ids=CALLS)


@calls
def test_static_shapes_and_no_look_at_the_data(estimate):
    s, g = torch.tensor([1., .5, -2., .25, 3., .5, .5]), torch.tensor([3, 1, 3, 3, 1, 0, 0])
    want, meta = estimate(s, g), estimate(s.to("meta"), g.to("meta"))
    compiled = torch.compile(estimate, fullgraph=True, backend="eager")(s, g)
    assert meta.shape == want.shape and meta.dtype == want.dtype and torch.equal(want, compiled)


@calls
def test_gradients_are_right(estimate):
    s = torch.tensor([1., .5, -2., .25, 3., .9, .4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: estimate(s, torch.tensor([3, 1, 3, 3, 1, 0, 0])), s)


@calls
def test_half_precision_is_computed_in_single(estimate):
    s, g = torch.tensor([1., .5, -2., .25, 3., .9, .4]), torch.tensor([3, 1, 3, 3, 1, 0, 0])
    for half in (torch.bfloat16, torch.float16):
        got = estimate(s.to(half), g)
        assert got.dtype == torch.float32 and torch.equal(got, estimate(s.to(half).float(), g))
    assert estimate(s.double(), g).dtype == torch.float64


def test_blocks_with_columns_of_their_own_obey_every_law():
    c = sample_columns()
    sq = c["logprobs"].exp().square()*1.3
    every = {"purity", "gradient", "mask", "empty", "permutation", "padding", "empty_rows", "precision"}
    assert every <= set(check_estimator(reinforce_pp_baseline))
    for tail in (False, True):
        assert every <= set(check_estimator(optimal_token_baseline, dict(sum_pi_squared=sq, weights=c["entropy"]),
                                            tail=tail))
    for f, inputs, hyper in ((opo_advantages, dict(lengths=c["lengths"]), {}),
                             (bnpo_advantages, dict(scores=c["scores"].sigmoid()), {}),
                             (gdpo_advantages, dict(scores=c["rewards"][:, :3]), {}), (soft_values, {}, dict(beta=1.))):
        assert {"purity", "gradient", "permutation", "precision"} <= set(check_estimator(f, inputs, **hyper))


# -- errors

def errors():
    r, m, s, g = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4), torch.zeros(4, dtype=torch.long)
    for f in (group_advantages, leave_one_out, lite_ppo_advantages, maxrl_advantages, bnpo_advantages, gpg_advantages,
              partial(soft_values, beta=1.)):
        name = getattr(f, "func", f).__name__
        yield (lambda f=f: f(s, g[1:]), ValueError,
               f"{name}: scores is [4], group is [3]; one score and one id per row are wanted, sum token rewards first")
        yield lambda f=f: f(s, g.float()), TypeError, f"{name}: group is float32; ids are integers"
        yield (
            lambda f=f: f(r, g), ValueError,
            f"{name}: scores is [4, 7], group is [4]; one score and one id per row are wanted, sum token rewards first")
        yield (lambda f=f: f(r, r.long()), ValueError,
               f"{name}: scores is [4, 7], group is [4, 7]; one score and one id per row are wanted, sum token "
               "rewards first")
        yield (lambda f=f: f(s, 4), TypeError,
               f"{name}: group is an int; integer ids [B] are wanted, one per row: torch.arange(len(scores)) // 4 for "
               "groups of 4")
        yield (lambda f=f: f(s, list("abab")), TypeError,
               f"{name}: group is a list of str; integer ids [B] are wanted, one per row: "
               "torch.tensor([group.index(g) for g in group])")
        yield lambda f=f: f(s.tolist(),
                            g), TypeError, f"{name}: scores is a list; a tensor is wanted (torch.as_tensor(scores))"
    ids = "group is a list; integer ids [B] are wanted, one per row: torch.as_tensor(group)"
    for name, f in dict(reinforce_pp_baseline=lambda ids: reinforce_pp_baseline(s, ids, m),
                        opo_advantages=lambda ids: opo_advantages(s, ids, lengths=g),
                        gdpo_advantages=lambda ids: gdpo_advantages(r, ids),
                        optimal_token_baseline=lambda ids: optimal_token_baseline(r, r, ids, m, sum_pi_squared=r),
                        best_of_n_advantages=lambda ids: best_of_n_advantages(s, ids)).items():
        yield lambda f=f: f([0, 0, 1, 1]), TypeError, f"{name}: {ids}"
    yield (lambda: opo_advantages(s, g, lengths=[1, 2, 3, 4]), TypeError,
           "opo_advantages: lengths is a list; a tensor is wanted (torch.as_tensor(lengths))")
    yield (lambda: reinforce_pp_baseline(s[1:], g[1:], m), ValueError,
           "reinforce_pp_baseline: scores is [3], mask is [4, 7]; one score per row is wanted")
    yield (lambda: reinforce_pp_baseline(s, g, m.int()), TypeError,
           "reinforce_pp_baseline: mask is int32; masks are Bool (mask.bool(), or mask > 0)")
    yield (lambda: opo_advantages(s, g, lengths=g[1:]), ValueError,
           "opo_advantages: lengths is [3], scores is [4]; one length per row is wanted")
    yield (lambda: gdpo_advantages(s, g), ValueError,
           "gdpo_advantages: scores is [4]; [B, R] is wanted, a column for each reward")
    yield (lambda: gdpo_advantages(r, g, weights=(1.,)), ValueError,
           "gdpo_advantages: scores is [4, 7], there are 1 weights; one for each column is wanted")
    yield lambda: soft_values(s, g, beta=0.), ValueError, "soft_values: beta is 0.0; a price per nat is positive"
    yield (lambda: optimal_token_baseline(r, r[1:], g, m, sum_pi_squared=r), ValueError,
           "optimal_token_baseline: logprobs is [3, 7], rewards is [4, 7]; they must be equal, nothing is broadcast")
    yield (lambda: optimal_token_baseline(r, r, g, m, sum_pi_squared=r, weights=s), ValueError,
           "optimal_token_baseline: weights is [4], rewards is [4, 7]; spread row values with at_tokens(weights, mask)")
    yield (lambda: optimal_token_baseline(r, r, g[1:], m, sum_pi_squared=r), ValueError,
           "optimal_token_baseline: group is [3], mask is [4, 7]; one id per row is wanted")


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
