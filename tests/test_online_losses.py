"""Best-worst pairs, XPO, Nash-MD, A*-PO: hand numbers, oracles, exact enumeration, laws, compilation, derivatives,
errors (LAWS 17, 25)."""
import itertools
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.data.batch import Batch, pairs
from rlblocks.arithmetic.logprobs import sequence_logprobs
from rlblocks.losses.online import (
    a2po_loss, best_worst_pairs, geometric_mixture, nash_md_loss, qrpo_loss, quantile_rewards, rebel_loss, xpo_loss,
)
from rlblocks.losses.preference import dpo_loss, ipo_loss, sppo_loss
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns

COLS = sample_columns(seed=0)
FOUR = [COLS[k] for k in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
WINS, WEIGHTS = COLS["desirable"], sample_columns(seed=3)["scores"].clone().index_fill(0, torch.tensor([3, 8]), 0.)
LOSSES = { # name → (loss, inputs, formula)
    "xpo": (partial(xpo_loss, alpha=.2),
            dict(zip(("chosen", "rejected", "ref_chosen", "ref_rejected", "ref_wins"), (*FOUR, WINS), strict=True)),
            lambda c, r, a, b, w: math.log1p(math.exp(-.1*((c-a)-(r-b)))) + .2*(c if w else r)),
    "nash": (nash_md_loss, dict(logprobs=FOUR[0], ref_logprobs=FOUR[2], win_prob=COLS["scores"].sigmoid()),
             lambda x, y, p: (.1*(x-y) - (p-.5))*x),
    "rebel": (partial(rebel_loss, beta=.3), dict(zip(("first", "second", "ref_first", "ref_second", "score_gap"),
                                                     (*FOUR, COLS["scores"]), strict=True)),
              lambda c, r, a, b, gap: (.3*((c-a) - (r-b)) - gap)**2),
    "qrpo": (partial(qrpo_loss, beta=.3),
             dict(logprobs=FOUR[0], ref_logprobs=FOUR[2], quantiles=COLS["scores"].sigmoid()),
             lambda x, y, q: (q - .3*math.log(.3*(math.exp(1/.3) - 1)) - .3*(x-y))**2),
    "a2po": (partial(a2po_loss, beta=.3), dict(logprobs=FOUR[0], ref_logprobs=FOUR[2], advantages=COLS["scores"]),
             lambda x, y, A: (.3*(x-y) - A)**2),
}
PAIRS = "xpo", "rebel"
every_loss = pytest.mark.parametrize("name", LOSSES)


# -- pairs

def test_best_worst_golden():
    scores, group = torch.tensor([1., .5, 3., .5, 2., 9., 1., math.nan]), torch.tensor([7, 4, 7, 4, 7, 5, 9, 9])
    chosen, rejected = best_worst_pairs(scores, group)
    assert chosen.tolist() == [i == 2 for i in range(8)] and rejected.tolist() == [i == 0 for i in range(8)]


@pytest.mark.parametrize("seed", range(20))
def test_best_worst_equals_a_loop(seed):
    g = torch.Generator().manual_seed(seed)
    scores, group = torch.randint(0, 4, (30,), generator=g).double(), torch.randint(-5, 5, (30,), generator=g)
    scores[torch.rand(30, generator=g) < .2] = math.nan
    chosen, rejected = best_worst_pairs(scores, group)
    made = 0
    for i in group.unique():
        s = scores[group == i]
        s, rows = s[~s.isnan()], group == i
        if len(s) and s.min() < s.max():
            made += 1
            assert scores[chosen & rows].tolist() == [s.max()] and scores[rejected & rows].tolist() == [s.min()]
        else: assert not (chosen & rows).any() and not (rejected & rows).any()
    assert chosen.sum() == rejected.sum() == made


def test_pairs_follow_their_rows(): # LAWS 25: groups by id, not by place
    scores, group = torch.randn(24, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 7
    p = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for moved, still in zip(best_worst_pairs(scores[p], group[p]), best_worst_pairs(scores, group), strict=True):
        assert moved.equal(still[p])


def test_a_batch_of_fresh_pairs():
    scores, group = torch.tensor([1., 5., 3., 2., 2.]), torch.tensor([7, 4, 7, 4, 9])
    chosen, rejected = best_worst_pairs(scores, group)
    rows = chosen | rejected
    b = Batch(mask=torch.tensor([[False, True]]*5), lengths=torch.tensor([2]*5), group=group, scores=scores)[rows]
    b["unit"], b["chosen"] = b.group, chosen[rows]
    assert [x.tolist() for x in pairs(b.scores, b)] == [[5., 3.], [2., 1.]] and b.n_units == 2


# -- oracle


def test_as_closures_over_rows():
    def nash(out, b):
        lp, ref = (sequence_logprobs(x, b.mask) for x in (out.logprobs, b.ref_logprobs))
        return nash_md_loss(lp, ref, b.scores.sigmoid(), weights=b.mask.any(1).float(), denom=b)
    def a2po(out, b):
        lp, ref = (sequence_logprobs(x, b.mask) for x in (out.logprobs, b.ref_logprobs))
        return a2po_loss(lp, ref, b.scores, weights=b.mask.any(1).float(), denom=b)
    # sums: a longer answer weighs more
    for f in (nash, a2po): assert {"split", "empty_rows", "mask", "empty"} <= set(check_loss(f, mean=False))


@every_loss
def test_equals_oracle(name):
    f, inputs, formula = LOSSES[name]
    rows = list(zip(*(x.tolist() for x in inputs.values()), WEIGHTS.tolist(), strict=True))
    assert_close(f(**inputs)[0].item(), sum(formula(*x) for *x, _ in rows)/16, rtol=1e-10, atol=0)
    assert_close(f(**inputs, weights=WEIGHTS)[0].item(), sum(w*formula(*x) for *x, w in rows)/14, rtol=1e-10, atol=0)
    assert_close(f(**inputs, denom=7.)[0].item(), sum(formula(*x) for *x, _ in rows)/7, rtol=1e-10, atol=0)


def test_metrics():
    _, m = LOSSES["xpo"][0](**LOSSES["xpo"][1])
    assert_close(float(m["ref_answer_logprob"]), float(torch.where(WINS, *FOUR[:2]).mean()))
    _, m = nash_md_loss(*LOSSES["nash"][1].values())
    assert_close([float(x) for x in m.values()],
                 [float(COLS["scores"].sigmoid().mean()), float((FOUR[0]-FOUR[2]).mean())])
    _, m = a2po_loss(*LOSSES["a2po"][1].values(), beta=.3)
    assert_close([float(x) for x in m.values()], [float(.3*(FOUR[0]-FOUR[2]).mean()), float(COLS["scores"].mean())])


# -- what they are for

def test_xpo_without_exploration_is_dpo():
    assert_close(xpo_loss(*FOUR, WINS, alpha=0.)[0], dpo_loss(*FOUR)[0])
    x = [y.clone().requires_grad_() for y in FOUR[:2]]
    up, down = torch.autograd.grad(xpo_loss(*x, *FOUR[2:], WINS, alpha=1.)[0] - dpo_loss(*x, *FOUR[2:])[0], x)
    # it lowers the reference's answer, win or lose
    assert_close(up, WINS.double()/16), assert_close(down, (~WINS).double()/16)


def test_nash_md_follows_its_objective(): # exact enumeration of two tokens
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        theta, ref = (1.5*torch.randn(3, 2, generator=g, dtype=torch.float64) for _ in range(2))
        P = torch.rand(4, generator=g, dtype=torch.float64)
        def answers(theta):
            return torch.stack([theta.log_softmax(-1)[0, a] + theta.log_softmax(-1)[1+a, b]
                                for a, b in itertools.product((0, 1), repeat=2)])
        theta.requires_grad_()
        lp, ref_lp = answers(theta), answers(ref)
        objective = -(lp.exp()*P).sum() + .3*(lp.exp()*(lp-ref_lp)).sum()
        want, got = (torch.autograd.grad(x, theta, retain_graph=True)[0]
                     for x in (objective, nash_md_loss(lp, ref_lp, P, weights=lp.exp(), beta=.3, denom=1.)[0]))
        assert_close(got, want)


def test_nash_md_settles_where_nothing_is_to_be_gained():
    game, ref, theta = (torch.tensor([[.5, .9, .2], [.1, .5, .7], [.8, .3, .5]]).double(),
                        torch.full((3,), -math.log(3)).double(), torch.zeros(3).double())
    for _ in range(2000):
        theta.requires_grad_()
        lp, opponent = theta.log_softmax(0), geometric_mixture(theta, ref, coef=.125).exp()
        theta = (theta - .5*torch.autograd.grad(nash_md_loss(lp, ref, game @ opponent, weights=lp.exp().detach(),
                                                             beta=.05, denom=1.)[0], theta)[0]).detach()
    left = game @ geometric_mixture(theta, ref, coef=.125).exp() - .05*(theta.log_softmax(0)-ref)
    assert left.std() < 1e-3 and theta.softmax(0).max() < .6


def test_geometric_mixture():
    mix = geometric_mixture(torch.tensor([[0., 0.]]), torch.tensor([[.9, .1]]).log())
    assert_close(mix.exp(), torch.tensor([[.75, .25]]))
    a, b = COLS["values"], COLS["old_values"]
    assert_close(geometric_mixture(a, b, coef=0.),
                 a.log_softmax(-1)), assert_close(geometric_mixture(a, b, coef=1.), b.log_softmax(-1))
    assert_close(geometric_mixture(a+3, b-5), geometric_mixture(a, b))
    assert not geometric_mixture(a.clone().requires_grad_(), b).requires_grad
    check_estimator(geometric_mixture, dict(logits=a, ref_logits=b))


def test_a2po_is_zero_at_the_optimum_and_sppo_at_win_probabilities():
    r, ref, beta = torch.tensor([0., 1., 2.]).double(), torch.tensor([.5, .3, .2]).double().log(), .7
    V = beta*(ref + r/beta).logsumexp(0)
    assert a2po_loss(ref + (r-V)/beta, ref, r-V, beta=beta)[0] < 1e-20
    c, lose, rc, rr = FOUR
    half = torch.full_like(c, .5)
    assert_close(sppo_loss(*FOUR, beta=.1)[0],
                 100*(a2po_loss(c, rc, half, beta=.1)[0] + a2po_loss(lose, rr, -half, beta=.1)[0]))
    assert_close(a2po_loss(c, rc, half)[0], a2po_loss(c, rc, half, beta=.001)[0], rtol=0, atol=0)


def test_rebel_is_zero_at_the_optimum_and_ipo_at_a_gap_of_half():
    r, ref, beta = torch.tensor([0., 1., 2.]).double(), torch.tensor([.5, .3, .2]).double().log(), .7
    best, i, j = (ref + r/beta).log_softmax(0), torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    assert rebel_loss(best[i], best[j], ref[i], ref[j], r[i]-r[j], beta=beta)[0] < 1e-20
    half = torch.full((16,), .5, dtype=torch.float64)
    assert_close(rebel_loss(*FOUR, half, beta=.3)[0], .09*ipo_loss(*FOUR, beta=.3)[0])
    assert_close(rebel_loss(*FOUR, half)[0], rebel_loss(*FOUR, half, beta=1.)[0], rtol=0, atol=0)
    c, lose, rc, rr = FOUR
    # no order within a pair
    assert_close(rebel_loss(lose, c, rr, rc, -COLS["scores"])[0], rebel_loss(*FOUR, COLS["scores"])[0])
    V, s, t = 3.7, COLS["scores"], COLS["values"][:, 0] # V* cancels: the difference of two A*-PO errors
    gap = (.2*(c-rc) - (s-V)) - (.2*(lose-rr) - (t-V))
    assert_close(rebel_loss(*FOUR, s-t, beta=.2)[0], gap.square().mean())


def test_quantile_rewards():
    assert quantile_rewards(torch.tensor([2., 0., 9.]), torch.tensor([[1., 2., 2., 4.]]*3)).tolist() == [.75, 0., 1.]
    some = torch.tensor([[True, True, False, True], [False]*4])
    refs = torch.tensor([[1., 2., math.nan, 4.], [1., 2., 2., 4.]])
    assert_close(quantile_rewards(torch.tensor([2., 9.]), refs, mask=some), torch.tensor([2/3, 0.]))
    assert not quantile_rewards(COLS["scores"].clone().requires_grad_(), COLS["values"]).requires_grad
    assert {"mask", "padding", "empty_rows"} <= set(check_estimator(quantile_rewards, dict(ref_scores=COLS["values"])))
    for refs in (torch.zeros(3), torch.zeros(4, 2)):
        with pytest.raises(
                ValueError,
                match=r"quantile_rewards: ref_scores is \[.*\], scores is \[3\]; \[B, N\] and \[B\] are wanted"):
            quantile_rewards(torch.zeros(3), refs)


@pytest.mark.parametrize("beta", [.002, .1, 1., 30.])
def test_qrpo_knows_its_partition_function(beta):
    "Uniform quantiles in place of rewards: V* is β·log Z, and the policy that it aims at has total probability 1."
    n = 4000
    q = (torch.arange(n, dtype=torch.float64) + .5)/n # midpoints: ∫ e^(q/β) dq up to 1/(24(nβ)²) of it
    log_z = torch.logsumexp(q/beta, 0) - math.log(n)
    ref = torch.full((n,), -math.log(n), dtype=torch.float64)
    assert qrpo_loss(ref + q/beta - log_z, ref, q, beta=beta)[0].sqrt() < beta/(20*(n*beta)**2) + 1e-12
    exact = beta*(math.log(beta) + 1/beta + math.log1p(-math.exp(-1/beta)))
    assert_close(qrpo_loss(FOUR[0], FOUR[2], COLS["scores"].sigmoid(), beta=beta)[0],
                 a2po_loss(FOUR[0], FOUR[2], COLS["scores"].sigmoid() - exact, beta=beta)[0])


def test_qrpo_wants_a_positive_beta():
    with pytest.raises(ValueError, match="qrpo_loss: beta is 0; it is above 0"):
        qrpo_loss(FOUR[0], FOUR[2], COLS["scores"], beta=0)


# -- a gradient that is not that of the value


def test_nash_md_holds_its_coefficient(): # its value is no objective
    x, ref, p = (y[:6] for y in LOSSES["nash"][1].values())
    x = x.clone().requires_grad_()
    got, = torch.autograd.grad(nash_md_loss(x, ref, p)[0], x)
    assert_close(got, (.1*(x.detach()-ref) - p + .5)/6)


# -- errors

@every_loss
def test_shapes_are_not_broadcast(name):
    f, inputs, _ = LOSSES[name]
    *args, last = inputs.values()
    who = getattr(f, "func", f).__name__
    with pytest.raises(ValueError, match=rf"{who}: \w+ is \[15\], \w+ is \[16\]"): f(*args, last[1:])
    with pytest.raises(TypeError): f(*args, last, WEIGHTS)
    with pytest.raises(ValueError, match=r": \w+ is \[4, 4\]; one number per"):
        f(*(x.reshape(4, 4) for x in inputs.values()))


def test_pairs_want_one_score_a_row():
    with pytest.raises(TypeError, match="best_worst_pairs: group is float32; ids are integers"):
        best_worst_pairs(torch.zeros(3).long(), torch.zeros(3))
    with pytest.raises(ValueError,
                       match=r"best_worst_pairs: scores is \[3\], group is \[2\]; one score and one id per row"):
        best_worst_pairs(torch.zeros(3), torch.zeros(2).long())


def test_an_absent_exploration_of_an_unsayable_answer_is_nothing():
    lps = [torch.tensor([x]) for x in (-1., -math.inf, 0., 0.)]
    assert xpo_loss(*lps, torch.tensor([False]), alpha=0.)[0] == dpo_loss(*lps)[0] == 0


def test_a_round_of_online_dpo():
    "scores → best_worst_pairs → rows → unit and chosen → dpo_loss, in one piece and cut; ties neither cost nor count."
    b = Batch(mask=torch.tensor([[False, True]]*9), lengths=torch.tensor([2]*9), group=torch.tensor([7, 4, 9]*3),
              scores=torch.tensor([1., 5., 2., 3., 5., 2., 2., 0., 2.]))
    b["lp"] = torch.where((b.group == 4) & (b.scores == 5), math.log(3), 0.)
    best, worst = best_worst_pairs(b.scores, b.group)
    fresh = b[best | worst]
    fresh["unit"], fresh["chosen"] = fresh.group, best[best | worst]
    def loss(b): return dpo_loss(*pairs(b.lp, b), *(0*x for x in pairs(b.lp, b)), beta=1., denom=b)[0]
    assert fresh.n_units == 2
    for parts in ([fresh], fresh.parts(2)):
        assert_close(sum(map(loss, parts)), torch.tensor((math.log(2) + math.log(4/3))/2))
