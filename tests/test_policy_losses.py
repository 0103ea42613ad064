"""Policy losses beyond PPO, ratio losses, selections: goldens, identities, peers' formulas, extremes, errors
(LAWS 1, 5, 13, 29). The laws, for these hyper-parameters too, are in test_laws."""
import inspect
import itertools
import math
import re
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.losses import answer_ratio, policy as policy_losses, ratio as ratio_losses, selections
from rlblocks.signals.advantages import at_tokens
from rlblocks.data.batch import Batch
from rlblocks.arithmetic.kl import kl_k1
from rlblocks.arithmetic.masked import aggregate, masked_mean, merge
from rlblocks.losses.policy import adaptive_clip, clipped_surrogate, dapo_loss, dr_grpo_loss, log_ratio, ppo_loss
from rlblocks.losses.answer_ratio import (
    gmpo_loss, gspo_loss, gspo_token_loss, luspo_loss, sequence_ratio, topr_loss, vespo_loss,
)
from rlblocks.losses.ratio import (
    asymre_loss, cispo_loss, cpgd_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, gppo_loss, reinforce_loss, sapo_loss,
)
from rlblocks.losses.selections import (
    adaptive_entropy_coef, clip_cov_loss, clip_cov_mask, entropy_loss, expert_load, high_entropy_mask, kl_cov_loss,
    kl_cov_mask, moe_balance_loss, router_z_loss, token_covariance,
)
from rlblocks.testing.laws import check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.value import value_loss

nan, inf = math.nan, math.inf


def columns(seed=0):
    cols = sample_columns(seed=seed)
    g = torch.Generator().manual_seed(seed)
    cols["row_advantages"] = at_tokens(cols["scores"], cols["mask"])
    cols["selected"], cols["uniform"] = torch.rand(16, 16, generator=g) < .3, torch.rand(16, 16, generator=g,
                                                                                         dtype=torch.float64)
    cols["router_logits"] = torch.randn(16, 16, 5, generator=g, dtype=torch.float64)
    return cols | dict(load=expert_load(cols["router_logits"], cols["mask"], top_k=2))


COLS = columns()
# a sequence ratio: one advantage for the row
ROWS = dict(inputs=dict(advantages=COLS["row_advantages"]), denom="n_rows")
SELECTED, ROUTER = dict(inputs=dict(selected=COLS["selected"]),
                        policy=False), dict(inputs={k: COLS[k] for k in ("router_logits", "load")}, denom="n_tokens")


def of_selected(loss):
    "With `selected` by position, before the mask, like the columns of other losses."
    def by_position(logprobs, old_logprobs, advantages, selected, mask, *, denom=None, **hyper):
        return loss(logprobs, old_logprobs, advantages, mask, selected=selected, denom=denom, **hyper)
    return by_position


# name → (loss, options of check_loss); the name's first word is the function's
SUBJECTS = {
    "dapo": (dapo_loss, {}), "dr_grpo": (partial(dr_grpo_loss, max_tokens=16), dict(denom="n_rows", policy=False)),
    "reinforce": (reinforce_loss, {}), "reinforce rows": (partial(reinforce_loss, over="rows"), {}),
    "cispo": (cispo_loss, {}), "cispo two-sided": (partial(cispo_loss, clip_low=.2, clip_high=.28, over="rows"), {}),
    "gppo": (gppo_loss, {}), "dppo_tv": (partial(dppo_tv_loss, shift_high=.05), {}),
    "dppo_kl": (partial(dppo_kl_loss, nats_low=.02, nats_high=.01, cap=1.1, over="rows"), {}),
    "dro": (partial(dro_loss, beta=.5), dict(policy=False)),
    "sapo": (sapo_loss, {}), "sapo tokens": (partial(sapo_loss, over="tokens", tau_pos=.5, tau_neg=3.), {}),
    "cpgd": (cpgd_loss, {}), "cpgd rows": (partial(cpgd_loss, over="rows", clip_low=.1, clip_high=.3), {}),
    "gspo": (gspo_loss, ROWS), "gspo wide": (partial(gspo_loss, clip_low=.1, clip_high=.1), ROWS),
    "gspo_token": (partial(gspo_token_loss, clip_low=.1), dict(denom="n_rows")),
    "luspo": (partial(luspo_loss, clip_high=.1), ROWS | dict(policy=False)),
    "gmpo": (gmpo_loss, ROWS), "gmpo narrow": (partial(gmpo_loss, nats_low=.1, nats_high=.2), ROWS),
    "vespo": (vespo_loss, {}), "vespo rows": (partial(vespo_loss, over="rows", k_pos=1., lam_neg=.5), {}),
    "topr": (topr_loss, {}), "topr rows": (partial(topr_loss, over="rows"), {}),
    "asymre": (asymre_loss, dict(policy=False)),
    "clip_cov": (of_selected(clip_cov_loss), SELECTED), "kl_cov": (of_selected(kl_cov_loss), SELECTED),
    "kl_cov rows": (partial(of_selected(kl_cov_loss), over="rows", kl_coef=.1), SELECTED),
    "entropy": (entropy_loss, {}), "entropy rows": (partial(entropy_loss, over="rows"), {}),
    "moe_balance": (moe_balance_loss, ROUTER), "router_z": (router_z_loss, ROUTER),
}
every_loss = pytest.mark.parametrize("name", SUBJECTS)
with_ratio = pytest.mark.parametrize("name", [n for n in SUBJECTS if n.split()[0] not in (
    "reinforce", "asymre", "on_policy", "entropy", "moe_balance", "router_z")])
PURE = {n for n in SUBJECTS if n.split()[0] in ("dapo", "reinforce", "on_policy", "cispo", "dppo_tv", "dppo_kl", "sapo",
                                                "cpgd", "gspo", "gspo_token", "gmpo", "vespo", "topr")}


def arguments(name, cols=COLS, dtype=torch.float64):
    "The columns that a subject takes, in order."
    fn, options = SUBJECTS[name]
    cols = cols | (dict(advantages=cols["row_advantages"]) if options is ROWS else {})
    wanted = [k for k in inspect.signature(fn).parameters if k in cols]
    return [cols[k].to(dtype) if cols[k].is_floating_point() else cols[k] for k in wanted]


def slope(loss, *cols, **kw):
    x = cols[0].clone().requires_grad_()
    return torch.autograd.grad(loss(x, *cols[1:], **kw)[0], x)[0]


def same(a, b, *cols, scale=1., **tol):
    "Two losses agree in value and gradient."
    assert_close(a(*cols)[0], scale*b(*cols)[0], **tol)
    assert_close(slope(a, *cols), scale*slope(b, *cols), **tol)
    assert slope(a, *cols).any()


# -- laws


@pytest.mark.parametrize("loss,inputs", [
    (lambda out, b: dr_grpo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, max_tokens=16, denom=b),
     {}), (lambda out, b: luspo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b),
           ROWS["inputs"])], ids=["dr_grpo", "luspo"])
def test_closures_of_those_whose_weights_do_not_sum_to_one(loss, inputs):
    assert "reinforce" in check_loss(loss, inputs, policy=True, mean=False)


# -- the pieces under all of them

def test_log_ratio_is_k1():
    lp, old, mask = (COLS[k] for k in ("logprobs", "old_logprobs", "mask"))
    far = torch.where(mask, lp + 15*torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), nan)
    for x in (lp, far): assert_close(log_ratio(x, old, mask), kl_k1(x, old, mask), rtol=0, atol=0)
    x, y = (far.clone().requires_grad_() for _ in range(2))
    log_ratio(x, old, mask).sum().backward()
    kl_k1(y, old, mask).sum().backward()
    assert_close(x.grad, y.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dual", [None, 1.5, 3.])
# Schulman's and Ye's formulas, with the gradient of the textbook's operations
def test_surrogate_by_cases_is_the_maximum(dual):
    ratio, A, mask = (COLS["logprobs"]-COLS["old_logprobs"]).mul(4).exp(), COLS["advantages"], COLS["mask"]
    def textbook(r):
        loss = torch.maximum(-r*A, -r.clamp(.9, 1.3)*A)
        return torch.where(mask, loss if dual is None else torch.where(A < 0, torch.minimum(loss, -dual*A), loss), 0.)
    grads = []
    for f in (textbook, lambda r: clipped_surrogate(r, A, mask, clip_low=.1, clip_high=.3, dual_clip=dual)):
        r = ratio.clone().requires_grad_()
        f(r).sum().backward()
        grads.append(r.grad)
    assert_close(textbook(ratio), clipped_surrogate(ratio, A, mask, clip_low=.1, clip_high=.3, dual_clip=dual), rtol=0,
                 atol=0)
    assert_close(*grads, rtol=0, atol=0)


def test_an_infinite_ratio_is_capped():
    ratio, on = torch.tensor([[inf, inf]], requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    assert clipped_surrogate(ratio, torch.tensor([[1., -1.]]), on, dual_clip=3.).tolist() == [[pytest.approx(-1.2), 3.]]


# -- numbers by hand

def row(*x): return torch.tensor([x], dtype=torch.float64)


HALF, TWO, ON1, ON2 = row(.5).log(), row(2., .5), torch.tensor([[True]]), torch.tensor([[True, True]])
HAND = { # (loss of log ratios, against old log-probs 0) → value, gradient
    "dapo caps at 1.28": (dapo_loss, TWO, row(1., 1.), ON2, {}, -(1.28+.5)/2, (0., -.25)),
    "dr_grpo": (dr_grpo_loss, TWO, row(1., 1.), ON2, dict(max_tokens=5), -(1.2+.5)/5, (0., -.1)),
    "cispo": (cispo_loss, TWO, row(1., -1.), ON2, dict(clip_high=.5), -(1.5*math.log(2)+.5*math.log(2))/2, (-.75, .25)),
    "dro": (dro_loss, TWO, row(1., -1.), ON2, dict(beta=2.), (-2*math.log(2) + 2*math.log(2)**2)/2,
            (-.5+math.log(2), .5-math.log(2))),
    "sapo": (sapo_loss, row(1.), row(-1.), ON1, {}, 2/1.05, (1.,)),
    "cpgd": (cpgd_loss, TWO, row(1., -1.), ON2, {}, (-math.log(1.2) + math.log(.8))/2, (0., 0.)),
    "gspo": (gspo_loss, row(1., 4.), row(-1., -1.), ON2, {}, 2., (1., 1.)),
    "gspo_token": (gspo_token_loss, row(1., 4.), row(-3., 0.), ON2, {}, 3., (3., 0.)),
    "luspo": (luspo_loss, row(1., 4.), row(1., 1.), ON2, dict(clip_high=9.), -4., (-2., -2.)),
    "gmpo": (gmpo_loss, row(1., .25), row(-1., -1.), ON2, {}, math.exp(-.2), (math.exp(-.2)/2, 0.)),
    "vespo": (vespo_loss, row(2.), row(1.), ON1, {}, -4*math.exp(-3)*math.log(2), (-4*math.exp(-3),)),
}


@pytest.mark.parametrize("case", HAND)
def test_by_hand(case):
    loss, ratio, A, mask, kw, value, grad = HAND[case]
    assert_close(loss(ratio.log(), 0*ratio, A, mask, **kw)[0], torch.tensor(value, dtype=torch.float64))
    assert_close(slope(loss, ratio.log(), 0*ratio, A, mask, **kw), row(*grad))


def test_four_meanings_of_token_mean(): # LAWS 1, FEATURES B2: 2.00 by the mean of micro-batch means, 2.98 in truth
    batches = [(torch.zeros(1, n), torch.full((1, n), -cost), torch.ones(1, n).bool())
               for n, cost in ((10, 1.), (1000, 3.))]
    assert sum(dapo_loss(o, o, a, m)[0] for o, a, m in batches)/2 == 2
    assert_close(sum(dapo_loss(o, o, a, m, denom=1010)[0] for o, a, m in batches), torch.tensor(2.9801980))
    assert_close(sum(dr_grpo_loss(o, o, a, m, max_tokens=1000, denom=2.)[0] for o, a, m in batches),
                 torch.tensor(3010/2000))


def test_filtered_row_leaves_numerator_and_denominator(): # LAWS 13
    mask = (torch.arange(8) < 4) & torch.tensor([[True], [True], [False]])
    zero = torch.zeros(3, 8)
    for loss in (dapo_loss, gspo_loss, gspo_token_loss, gmpo_loss): assert loss(zero, zero, zero-1, mask)[0] == 1
    assert luspo_loss(zero, zero, zero-1, mask)[0] == 4
    assert dr_grpo_loss(zero, zero, zero-1, mask, max_tokens=8)[0] == .5
    assert reinforce_loss(zero-1, zero-1, mask)[0] == -1 and entropy_loss(zero+1, mask)[0] == -1


# -- identities

LP, OLD, A, AROW, MASK = (COLS[k] for k in ("logprobs", "old_logprobs", "advantages", "row_advantages", "mask"))
ONE = MASK & (MASK.cumsum(1) == 1)
FREE = dict(clip_low=1., clip_high=inf)


@pytest.mark.parametrize("name", sorted(PURE))
def test_unmoved_all_are_reinforce(name):
    loss, options = SUBJECTS[name]
    if "old_logprobs" not in inspect.signature(loss).parameters: pytest.skip("takes no old log-probs")
    advantages = AROW if options is ROWS else A
    default = inspect.signature(loss).parameters.get("over")
    over = "rows" if options.get("denom") == "n_rows" or default and default.default == "rows" else "tokens"
    assert_close(slope(loss, LP, LP, advantages, MASK), slope(reinforce_loss, LP, advantages, MASK, over=over))


def test_one_loss_under_several_denominators():
    tokens, rows = int(MASK.sum()), int(MASK.any(1).sum())
    for loss, scale in ((partial(dapo_loss, clip_high=.2), 1), (partial(dr_grpo_loss, max_tokens=16), tokens/rows/16)):
        same(loss, ppo_loss, LP, OLD, A, MASK, scale=scale)


def test_special_cases_of_the_ratio():
    same(gspo_loss, gspo_token_loss, LP, OLD, AROW, MASK)
    wide = dict(clip_low=.2, clip_high=.2)
    for loss in (gspo_loss, gspo_token_loss):
        same(partial(loss, **wide), partial(ppo_loss, over="rows"), LP, OLD, A, ONE)
    even = OLD + at_tokens(COLS["scores"]/9, MASK)
    same(partial(gspo_token_loss, **wide), partial(ppo_loss, over="rows"), even, OLD, A, MASK)
    same(partial(gmpo_loss, nats_low=.2, nats_high=.3),
         partial(ppo_loss, clip_low=1-math.exp(-.2), clip_high=math.exp(.3)-1, over="rows"), LP, OLD, A, ONE)
    same(partial(gmpo_loss, nats_low=99., nats_high=99.), partial(gspo_loss, **FREE), LP, OLD, AROW, MASK)
    same(luspo_loss, gspo_loss, LP, OLD, at_tokens(COLS["scores"], ONE), ONE)
    assert_close(slope(cispo_loss, LP, OLD, A, MASK, clip_high=inf), slope(ppo_loss, LP, OLD, A, MASK, **FREE))
    # φ(W) = W
    assert_close(slope(vespo_loss, LP, OLD, A, ONE, k_pos=1., k_neg=1., lam_pos=0., lam_neg=0.),
                 slope(ppo_loss, LP, OLD, A, ONE, **FREE))
    assert_close(slope(cpgd_loss, LP, OLD, A, MASK, clip_low=1-1e-9, clip_high=inf), slope(reinforce_loss, LP, A, MASK))


def test_selected_tokens():
    none, kept = torch.zeros_like(MASK), torch.where(COLS["selected"], 0., A)
    same(lambda *x: clip_cov_loss(*x, selected=none), ppo_loss, LP, OLD, A, MASK)
    same(lambda *x: clip_cov_loss(*x, selected=COLS["selected"]), lambda *x: ppo_loss(x[0], x[1], kept, x[3]), LP, OLD,
         A, MASK)
    assert_close(kl_cov_loss(LP, OLD, A, MASK, selected=none)[0], ppo_loss(LP, OLD, A, MASK, **FREE)[0])
    extra = kl_cov_loss(LP, OLD, A, MASK, selected=COLS["selected"], kl_coef=.5,
                        denom=7)[0] - ppo_loss(LP, OLD, A, MASK, **FREE, denom=7)[0]
    assert_close(extra, .5*(LP-OLD).abs()[COLS["selected"] & MASK].sum()/7)


def test_weights_multiply_advantages(): # truncated weights are no parameter of a loss
    w = COLS["rollout_logprobs"].exp()
    for surrogate in (clipped_surrogate, partial(clipped_surrogate, dual_clip=1.5)):
        ratio = (LP-OLD).exp()
        assert_close(surrogate(ratio, w*A, MASK), w*surrogate(ratio, A, MASK))


# -- peers' formulas, retold in a line or two (their own functions run in tests/parity)

def rowmean(x): return masked_mean(x, MASK, dim=-1)[:, None]
def seqmean(x): return aggregate(x.expand_as(LP), MASK, over="rows"), {}
def sequence(lp): return rowmean(lp-OLD).exp()
TAU = 1 + .05*(A <= 0).double()


PEERS = {
    "verl gspo": (gspo_token_loss, lambda s: torch.maximum(-s*AROW, -s.clamp(1-3e-4, 1+4e-4)*AROW),
                  lambda lp: (lp - lp.detach() + rowmean(lp-OLD).detach()).exp(), AROW),
    "openrlhf gspo": (gspo_loss, lambda s: -torch.min(s*AROW, s.clamp(1-3e-4, 1+4e-4)*AROW), sequence, AROW),
    "trl sapo": (sapo_loss, lambda r: -torch.sigmoid(TAU*(r-1))*4/TAU*A, lambda lp: (lp-OLD).exp(), A),
    "trl gmpo": (gmpo_loss, lambda x: -AROW*rowmean(torch.where(AROW > 0, x.clamp(max=.4), x.clamp(min=-.4))).exp(),
                 lambda lp: lp-OLD, AROW),
}


def test_dppo_weighs_at_most_its_cap():
    p, q = row(1e-4, .6), row(1e-5, .5)
    for loss in (dppo_tv_loss, dppo_kl_loss):
        assert_close(slope(loss, p.log(), q.log(), row(1., 1.), ON2, cap=3.), -row(3., 1.2)/2)


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_dppo_is_verls(name): # the valid masks of its compute_policy_loss_dppo_tv and _kl
    p, q = LP.exp(), OLD.exp().clamp(max=1.) # the samples have a few above 1
    far = p-q if name == "tv" else q*(OLD-LP) + (1-q)*torch.log((1-q+1e-8)/(1-p+1e-8))
    up, down = ((far <= .05), (far >= -.03)) if name == "tv" else ((far <= .05) | (p <= q), (far <= .03) | (p >= q))
    valid = torch.where(A > 0, up, down)
    loss, kw = (dppo_tv_loss, dict(shift_low=.03, shift_high=.05)) if name == "tv" else (
        dppo_kl_loss, dict(nats_low=.03, nats_high=.05))
    same(partial(loss, **kw), lambda lp, *_: (-aggregate(A*(LP-OLD).exp()*lp*valid, MASK), {}), LP, OLD, A, MASK)
    assert float(loss(LP, OLD, A, MASK,
                      **kw)[1]["clip_frac"]) == pytest.approx(float((~valid[MASK]).double().mean())) != 0


@pytest.mark.parametrize("name", PEERS)
def test_peers_with_rows_weighing_the_same(name):
    loss, formula, of, advantages = PEERS[name]
    same(loss, lambda lp, *_: seqmean(formula(of(lp))), LP, OLD, advantages, MASK, rtol=1e-9, atol=1e-12)


def test_trl_defaults_of_gspo_and_cispo(): # FEATURES B2: (−.18, .17) for (−.27, .13); .2 at ratio 1
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    lp, advantages = torch.tensor([[1.08], [1.04]]).log().expand(2, 4), at_tokens(torch.tensor([1., -1.]), mask)
    kw = dict(clip_low=.2, clip_high=.2)
    assert_close(slope(gspo_loss, lp, 0*lp, advantages, mask, **kw)[:, 0], torch.tensor([-.27, .13]))
    assert_close(slope(luspo_loss, lp, 0*lp, advantages, mask, **kw, denom=6.)[:, 0], torch.tensor([-.18, 1.04/6]))
    assert_close(slope(cispo_loss, lp, lp, advantages, mask, clip_high=-.8),
                 .2*slope(reinforce_loss, lp, advantages, mask))


def test_vespo_holds_the_weight_of_long_answers(): # log W within [log 1e-8, 20], or λ = 0 would give inf
    ones, on = torch.ones(1, 50), torch.ones(1, 50, dtype=torch.bool)
    plain = dict(k_pos=1., lam_pos=0.)
    for x, w in ((5., math.exp(20)), (-5., 1e-8)):
        assert_close(-slope(vespo_loss, x*ones, 0*ones, ones, on, **plain, denom=1), torch.full((1, 50), w))
        assert float(vespo_loss(x*ones, 0*ones, ones, on, **plain)[1]["weight"]) == pytest.approx(w)


# -- metrics

@with_ratio
def test_metrics_of_all_ratio_losses(name):
    loss, _ = SUBJECTS[name]
    metrics, x = loss(*arguments(name))[1], (LP-OLD)[MASK]
    assert_close(float(metrics["approx_kl"]), float((x.expm1()-x).mean()))
    ratio = x.exp() if name.split()[0] not in ("gspo", "gspo_token", "luspo") else sequence(LP)[MASK.any(1)]
    assert_close([float(metrics["ratio"]), float(metrics["ratio_max"])], [float(ratio.mean()), float(ratio.max())])
    if "clip_frac" in metrics:
        assert float(metrics["clip_frac"]) == pytest.approx(float(metrics["clip_frac_low"])
                                                            + float(metrics["clip_frac_high"]))
    if "clip_frac" in metrics: assert float(metrics["clip_frac"]) > 0 or name == "cispo" # a cap of 5 is far away


@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss])
def test_a_batch_of_many_blocks(loss): # more tokens than are swept at a time, the last block smaller than the others
    g = torch.Generator().manual_seed(0)
    old, A, mask = (torch.randn(140, 1000, generator=g), torch.randn(140, 1000, generator=g),
                    torch.rand(140, 1000, generator=g) < .7)
    lp = (old + .5*torch.randn(140, 1000, generator=g)).requires_grad_()
    def found(denom, *cols):
        value, metrics = loss(*cols, clip_high=.3, denom=denom)
        return value.detach(), torch.autograd.grad(value, lp)[0], metrics
    whole, rows = found(9., lp, old, A, mask), [found(9., *(x[i:i+1] for x in (lp, old, A, mask))) for i in range(140)]
    assert_close(whole[:2], tuple(sum(row[k] for row in rows) for k in range(2)), rtol=1e-5, atol=1e-5)
    x = (lp.detach()-old)[mask].double()
    wanted = dict(approx_kl=(x.expm1()-x).mean(), ratio=x.exp().mean(), ratio_max=x.exp().max(),
                  clip_frac_high=(x.exp() > 1.3).logical_and((A[mask] > 0) | (loss is cispo_loss)).double().mean())
    merged = merge(*(row[2] for row in rows))
    for metrics in (whole[2], merged):
        assert_close([float(metrics[k]) for k in wanted], [float(y) for y in wanted.values()])
    assert {k: float(m)
            for k, m in whole[2].items()} == pytest.approx({k: float(m) for k, m in merged.items()}, rel=1e-5)


def test_what_a_penalty_is_written_with_has_two_derivatives(): # what the refusal sends its reader to
    on = MASK & (A.abs() < 1)
    def plain(lp): return aggregate(clipped_surrogate(log_ratio(lp, OLD, on).exp(), A, on), on)
    lp = LP.clone().requires_grad_()
    assert_close(slope(lambda x: (plain(x), {}), lp), slope(ppo_loss, lp, OLD, A, on))
    assert torch.autograd.gradgradcheck(plain, lp, fast_mode=True)


@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss])
@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5])
def test_approx_kl_keeps_its_digits(loss, size): # x²/2 of small x, in float32: Σ(ρ−1) − Σx would have none of them
    g = torch.Generator().manual_seed(0)
    x, A, mask = (size*torch.randn(70, 1000, generator=g), torch.randn(70, 1000, generator=g),
                  torch.rand(70, 1000, generator=g) < .7)
    exact = x[mask].double()
    assert float(loss(x, torch.zeros_like(x), A,
                      mask)[1]["approx_kl"]) == pytest.approx(float((exact.expm1()-exact).mean()), rel=1e-3)


def test_topr_tapers_bad_answers_only():
    w = torch.where(MASK, LP-OLD, 0.).sum(1, keepdim=True).exp()
    weight = torch.where(A < 0, w.clamp(max=1), 1.)
    assert 0 < (w < 1)[MASK.any(1)].double().mean() < 1 # both kinds are there
    same(topr_loss, lambda lp, *_: (-aggregate(weight*A*lp, MASK), {}), LP, OLD, A, MASK)
    assert float(topr_loss(LP, OLD, A, MASK)[1]["weight"]) == pytest.approx(float(weight[MASK].mean()))
    same(lambda *x: topr_loss(*x), lambda lp, old, a, m: reinforce_loss(lp, a, m), LP, OLD, A.abs(), MASK)
    same(topr_loss, lambda lp, old, a, m: reinforce_loss(lp, a, m), LP, LP - 1, A, MASK) # likelier answers: W > 1
    far, bound = topr_loss(LP - 300, OLD, -A.abs(), MASK)[0], math.exp(-20)*aggregate(A.abs()*(LP - 300).abs(), MASK)
    assert 0 < abs(far) < 1.001*bound # a log ratio is at least −20, and W underflows to 0 in long answers, not to nan


def test_asymre_shifts_the_baseline():
    same(asymre_loss, lambda lp, a, m: reinforce_loss(lp, a + .1, m), LP, A, MASK)
    same(partial(asymre_loss, delta_v=0.), reinforce_loss, LP, A, MASK)
    assert_close(asymre_loss(row(.5).log(), row(.5), ON1)[0], torch.tensor(.6*math.log(2)).double())


def naive_adaptive_clip(lp, old, A, mask, share, lows, highs, step):
    pairs = [(math.exp(p-q), a)
             for p, q, a, m in zip(*(x.flatten().tolist() for x in (lp, old, A, mask)), strict=True) if m]
    (low, least), (high, most) = lows, highs
    def reached():
        good, bad = sum(min(r, 1+high)*a for r, a in pairs if a > 0), sum(max(r, 1-low)*-a for r, a in pairs if a < 0)
        return good >= share*(good+bad)
    while not reached() and low > least + 1e-9: low = max(low-step, least)
    while not reached() and high < most - 1e-9: high = min(high+step, most)
    return low, high


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0., .47, .5, .53, .57, .6123, 1.])
def test_adaptive_clip_is_the_published_search(seed, share):
    cols = columns(seed)
    args = [cols[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")]
    for bounds in (((.4, .1), (.2, 2.), .05), ((.5, .5), (.1, .6), .07), ((.3, .0), (.2, .2), 1.)):
        got = adaptive_clip(*args, share=share, clip_low=bounds[0], clip_high=bounds[1], step=bounds[2])
        assert got == pytest.approx(naive_adaptive_clip(*args, share, *bounds))


def test_adaptive_clip_ends_at_its_bounds():
    bad, nothing = (LP, OLD, -A.abs(), MASK), (LP, OLD, A, MASK & False)
    assert adaptive_clip(*bad) == pytest.approx((.1, 2.)) and adaptive_clip(*nothing) == (.4, .2)
    assert adaptive_clip(LP, OLD, A.abs(), MASK, share=1.) == (.4, .2)
    for i in range(3): # a NaN compares as False: the widest interval, and no word
        broken = [x.clone() for x in (LP, OLD, A)]
        broken[i][MASK] = nan
        with pytest.raises(ValueError,
                           match="adaptive_clip: logprobs, old_logprobs or advantages are NaN at a counted token"):
            adaptive_clip(*broken, MASK)
        broken = [torch.where(MASK, x, nan) for x in (LP, OLD, A)]
        assert adaptive_clip(*broken, MASK) == adaptive_clip(LP, OLD, A, MASK)
    with pytest.raises(ValueError, match="adaptive_clip: clip_low is .*clip_low goes down to its second number"):
        adaptive_clip(LP, OLD, A, MASK, clip_low=(.1, .4))


# the paper's formula, read literally, bounds both with the upper one
def test_gmpo_bounds_each_sign_with_its_own_number():
    x = row(-1., -1.)
    assert_close(gmpo_loss(x, 0*x, row(-1., -1.), ON2, nats_low=.1, nats_high=.4)[0],
                 torch.tensor(math.exp(-.1)).double())
    assert_close(gmpo_loss(-x, 0*x, row(1., 1.), ON2, nats_low=.1, nats_high=.4)[0],
                 -torch.tensor(math.exp(.4)).double())


def test_sequence_ratio_is_the_root_of_the_product():
    wanted = [math.exp(float(x[m].sum()))**(1/int(m.sum())) if m.any() else 0.
              for x, m in zip(LP-OLD, MASK, strict=True)]
    assert_close(sequence_ratio(LP, OLD, MASK), torch.tensor(wanted).double())


def test_published_thresholds_of_dppo():
    defaults = {f: {k: p.default for k, p in inspect.signature(f).parameters.items()}
                for f in (dppo_tv_loss, dppo_kl_loss)}
    assert defaults[dppo_tv_loss]["shift_low"] == defaults[dppo_tv_loss]["shift_high"] == .15
    assert defaults[dppo_kl_loss]["nats_low"] == defaults[dppo_kl_loss]["nats_high"] == .05


DIFFERENTIABLE = [n
                  for n in SUBJECTS if n.split()[0] not in ("clip_cov", "kl_cov", "entropy", "moe_balance", "router_z")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_of_torch_func(name): # grad, vmap over a batch of batches, jvp, hessian, create_graph
    loss, _ = SUBJECTS[name]
    first, *rest = [x[:3] for x in arguments(name)]
    def value(x): return loss(x, *rest)[0]
    def by_autograd(x, **how):
        x = x.clone().requires_grad_()
        return x, torch.autograd.grad(value(x), x, **how)[0]
    g = torch.func.grad(value)(first)
    assert_close(g, by_autograd(first)[1])
    batches = torch.stack([first, first+.1, first-.2])
    assert_close(torch.func.vmap(torch.func.grad(value))(batches), torch.stack([by_autograd(x)[1] for x in batches]))
    v = torch.randn(first.shape, generator=torch.Generator().manual_seed(0), dtype=first.dtype)
    _, along = torch.func.jvp(torch.func.grad(value), (first,), (v,))
    curve = torch.func.hessian(value)(first).reshape(first.numel(), -1)
    assert_close(along.flatten(), curve @ v.flatten())
    x, again = by_autograd(first, create_graph=True)
    second = torch.autograd.grad((again*v).sum(), x,
                                 materialize_grads=True)[0] if again.requires_grad else torch.zeros_like(v)
    assert_close(second, along) # a Hessian is symmetric


def test_vespo_reports_its_weight():
    w = torch.where(MASK, LP-OLD, 0.).sum(1, keepdim=True)
    phi = torch.where(A > 0, 2*w + 3*(1-w.exp()), 3*w + 2*(1-w.exp())).exp()
    loss, metrics = vespo_loss(LP, OLD, A, MASK)
    assert float(metrics["weight"]) == pytest.approx(float(phi[MASK].mean()))
    assert_close(loss, -aggregate(phi*A*LP, MASK))


@pytest.mark.parametrize("name", ["dapo", "cpgd", "cpgd rows", "dppo_tv", "dppo_kl", "gspo", "gspo wide", "gmpo",
                                  "gmpo narrow"])
def test_clip_frac_is_the_share_without_gradient(name):
    loss, _ = SUBJECTS[name]
    args = arguments(name)
    silent = slope(loss, *args) == 0
    # of rows, where a row is in or out as a whole
    share = silent.all(1)[MASK.any(1)] if name.startswith("gspo") else silent[MASK]
    assert 0 < float(loss(*args)[1]["clip_frac"]) == pytest.approx(float(share.double().mean()))


# -- selections

def test_covariance_by_hand():
    lp, advantages, mask = row(-1., -3., 5.), row(2., 0., nan), torch.tensor([[True, True, False]])
    assert token_covariance(lp, advantages, mask).tolist() == [[1., 1., 0.]]
    assert_close(token_covariance(LP, A, MASK)[MASK].mean(),
                 torch.cov(torch.stack([LP[MASK], A[MASK]]), correction=0)[0, 1])
    # verl's, with the whole's means
    assert_close(token_covariance(LP, A, MASK)[MASK], (A[MASK]-A[MASK].mean())*(LP[MASK]-LP[MASK].mean()))


@pytest.mark.parametrize("share", [0., 1e-9, .04, .3, 1.])
def test_number_of_selected_tokens(share):
    n, cov = int(MASK.sum()), token_covariance(LP, A, MASK)
    k = max(1, int(n*share))
    top = kl_cov_mask(LP, A, MASK, share=share)
    assert top.sum() == k and set(cov[top].tolist()) == set(cov[MASK].topk(k).values.tolist())
    assert not (top & ~MASK).any()
    band = (cov > .1) & (cov < 2) & MASK
    some = clip_cov_mask(LP, A, MASK, uniform=COLS["uniform"], share=share, least=.1, most=2.)
    assert some.sum() == min(k, int(band.sum())) and not (some & ~band).any()
    assert set(COLS["uniform"][some].tolist()) == set(COLS["uniform"][band].sort().values[:k].tolist())
    assert not clip_cov_mask(LP, A, MASK, uniform=COLS["uniform"], least=98., most=99.).any()
    for nothing in (kl_cov_mask(LP, A, MASK & False),
                    clip_cov_mask(LP, A, MASK & False, uniform=COLS["uniform"], least=-9.),
                    high_entropy_mask(COLS["entropy"], MASK & False)):
        assert not nothing.any()


def test_ties_select_no_more_than_asked():
    ones = torch.ones(4, 4)
    assert kl_cov_mask(-ones, ones, ones > 0, share=.25).sum() == 4
    assert clip_cov_mask(-ones, ones, ones > 0, uniform=0*ones, share=.25, least=-1.).sum() == 4


@pytest.mark.parametrize("share", [0., .1, .2, 1/3, .999, 1.])
def test_high_entropy_is_the_quantile_of_the_whole(share):
    for seed in range(5):
        H, mask = columns(seed)["entropy"], columns(seed)["mask"]
        assert torch.equal(high_entropy_mask(H, mask, share=share), mask & (H >= torch.quantile(H[mask], 1-share)))
    same_everywhere = torch.zeros(3, 4)
    assert high_entropy_mask(same_everywhere, same_everywhere == 0, share=share).all() # ties are kept


def test_high_entropy_is_not_per_sequence(): # LightRFT's error
    H = torch.stack([torch.linspace(0, 1, 10), torch.linspace(2, 3, 10)])
    assert high_entropy_mask(H, H >= 0).sum(1).tolist() == [0, 4]


def test_high_entropy_tokens_in_the_loss(): # Wang et al. 2025: masked tokens leave the numerator, not the count
    picked = high_entropy_mask(COLS["entropy"], MASK)
    n = MASK.sum()
    same(lambda *x: ppo_loss(x[0], x[1], torch.where(picked, A, 0.), MASK),
         lambda *x: ppo_loss(x[0], x[1], A, picked, denom=n), LP, OLD, A, MASK)


def test_entropy_controller():
    c, seen = 0., []
    for H in (.1, .1, .2, .3, .3, .3, .3):
        c, used = adaptive_entropy_coef(c, H)
        seen.append((round(c, 6), round(used, 6)))
    # above the target no bonus is paid, whatever is left of c
    assert seen == [(.005, .005), (.01, .01), (.015, .015), (.01, 0.), (.005, 0.), (0., 0.), (0., 0.)]
    assert adaptive_entropy_coef(.5, nan) == (.5, 0.) and adaptive_entropy_coef(.999, .1, most=1.) == (1., 1.)
    assert adaptive_entropy_coef(.2, 9., target=1., step=.05, least=.18) == (.18, 0.)
    entropy = entropy_loss(COLS["entropy"], MASK)[1]["entropy"]
    assert [x for t in (9., .01)
            for x in adaptive_entropy_coef(.1, entropy, target=t)] == pytest.approx([.105, .105, .095, 0.])


def test_load_and_balance():
    logits, load = COLS["router_logits"], COLS["load"]
    hits = torch.nn.functional.one_hot(logits.topk(2).indices, 5).sum(2)[MASK].double().mean(0)
    assert_close(load, hits.expand(16, 5))
    loss, metrics = moe_balance_loss(logits, load, MASK)
    assert_close(loss, 5*(hits*logits[MASK].softmax(-1).mean(0)).sum())
    # any spread at uniform p gives k
    assert_close(moe_balance_loss(0*logits, expert_load(0*logits, MASK, top_k=2), MASK)[0], torch.tensor(2.).double())
    assert float(metrics["moe_balance"]) == pytest.approx(float(loss))
    assert_close(router_z_loss(logits, MASK)[0], logits[MASK].logsumexp(-1).square().mean())


@pytest.mark.parametrize("masked", [False, True])
def test_balance_is_transformers(masked):
    f = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers, mask = [torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(i))
                    for i in range(3)], torch.ones(3, 4, dtype=torch.bool)
    if masked: mask = torch.arange(4) < torch.tensor([[4], [2], [1]])
    load = torch.stack([expert_load(x, mask, top_k=2) for x in layers]).mean(0)
    ours = torch.stack([moe_balance_loss(x, load, mask)[0] for x in layers]).mean()
    assert_close(ours, f(tuple(x.reshape(-1, 6) for x in layers), 6, 2, attention_mask=mask.int() if masked else None))


# 5: as many tokens as experts, where only a declared column of rows is not cut like a column of tokens
@pytest.mark.parametrize("T", [5, 16])
def test_the_load_travels_with_the_batch(T):
    B, layers = 16, [torch.randn(16, T, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                     for i in range(2)]
    lengths = torch.arange(B) % (T - 1) + 2
    exists = torch.arange(T) < lengths[:, None]
    mask = exists & (torch.arange(T) > 0)
    batch = Batch(tokens=torch.zeros(B, T).long(), lengths=lengths, mask=mask, row=torch.arange(B))
    batch.set("load", torch.stack([expert_load(x, mask, top_k=2) for x in layers], 1), per="row")  # [B, L, E]
    assert not batch.is_per_token("load")
    for i, x in enumerate(layers):
        whole = moe_balance_loss(x, batch.load[:, i], mask)[0]
        parts = [moe_balance_loss(x[b.row], b.load[:, i], b.mask, denom=b.n_tokens)[0] for b in batch.parts(2)]
        trimmed = [moe_balance_loss(x[b.row][:, :b.width], b.load[:, i], b.mask, denom=b.n_tokens)[0]
                   for b in (p.trim() for p in batch.parts(2))]
        assert_close(sum(parts), whole), assert_close(sum(trimmed), whole)


@pytest.mark.parametrize("loss", [lambda x, b, on, n: moe_balance_loss(x, b.load, on, denom=n),
                                  lambda x, b, on, n: router_z_loss(x, on, denom=n)],
                         ids=["moe_balance_loss", "router_z_loss"])
def test_router_losses_count_prompts_and_refuse_a_batch(loss, request):
    lengths, at = torch.arange(16) % 15 + 2, torch.arange(16)
    exists, x = at < lengths[:, None], COLS["router_logits"]
    b = Batch(per_row=["load"], tokens=torch.zeros(16, 16).long(), lengths=lengths,
              mask=exists & (at >= lengths[:, None]//2), row=torch.arange(16), load=expert_load(x, exists, top_k=2))
    assert_close(sum(loss(x[p.row], p, exists[p.row], int(lengths.sum()))[0] for p in b.parts(2)),
                 loss(x, b, exists, None)[0])
    for counts in (b, b.parts(2)[0]):
        with pytest.raises(
                TypeError, match=request.node.callspec.id
                + r": denom is a \w+, which counts the tokens that the policy chose.* True in `mask` over the "
                "optimizer step"):
            loss(x, b, exists, counts)


def naive_selections(lp, A, uniform, H, mask, *, share, least, most):
    "Which (row, token) clip_cov, kl_cov and high_entropy select, in Python floats."
    at = [(b, t) for b, row_ in enumerate(mask.tolist()) for t, m in enumerate(row_) if m]
    mean = lambda x: sum(x[i].item() for i in at)/len(at)
    cov = {i: (A[i].item() - mean(A))*(lp[i].item() - mean(lp)) for i in at}
    k, h = max(1, int(share*len(at))), sorted(H[i].item() for i in at)
    below, frac = divmod((1 - share)*(len(at) - 1), 1)
    least_h = h[int(below)] + frac*(h[min(int(below) + 1, len(h) - 1)] - h[int(below)])
    return (set(sorted((i for i in at if least < cov[i] < most), key=lambda i: uniform[i].item())[:k]),
            set(sorted(at, key=lambda i: -cov[i])[:k]), {i for i in at if H[i].item() >= least_h})


@pytest.mark.parametrize("share", [1e-9, .07, .5, .93])
def test_selections_equal_python(share):
    for seed in range(4):
        c = columns(seed)
        x = [c[k] for k in ("logprobs", "advantages", "uniform", "entropy", "mask")]
        got = clip_cov_mask(*x[:2], x[4], uniform=x[2], share=share, least=.05,
                            most=2.), kl_cov_mask(*x[:2], x[4], share=share), high_entropy_mask(*x[3:], share=share)
        for mine, want in zip(got, naive_selections(*x, share=share, least=.05, most=2.), strict=True):
            assert set(map(tuple, mine.nonzero().tolist())) == want


# -- nothing chosen, far away, NaN


@every_loss
def test_nothing_chosen_is_zero_with_finite_gradient(name):
    first, *rest, mask = arguments(name)
    for denom in (None, 0., 12., torch.tensor(0)):
        x = first.clone().requires_grad_()
        loss, metrics = SUBJECTS[name][0](x, *rest, torch.zeros_like(mask), denom=denom)
        loss.backward()
        assert loss == 0 and not x.grad.any()
        assert all(math.isnan(float(m)) for k, m in metrics.items() if k != "ratio_max")


@with_ratio
def test_a_token_far_away_stays_finite(name): # the log-ratio is clamped, the loss is not
    args = arguments(name)
    far = args[0].clone()
    far[MASK.nonzero()[:3].unbind(1)] = torch.tensor([1000., -1000., -90.], dtype=torch.float64)
    x = far.requires_grad_()
    loss, metrics = SUBJECTS[name][0](x, *args[1:])
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and all(math.isfinite(float(m)) for m in metrics.values())


@with_ratio
def test_a_nan_that_counts_is_seen(name):
    args = arguments(name)
    broken = args[0].clone()
    at = (MASK & ~COLS["selected"]).nonzero()[0]
    broken[tuple(at)] = nan
    loss, metrics = SUBJECTS[name][0](broken, *args[1:])
    assert loss.isnan() and math.isnan(float(metrics["approx_kl"]))


# -- errors: who, what came, what was wanted, how to fix

@every_loss
def test_row_values_are_not_broadcast(name):
    *args, mask = arguments(name)
    with pytest.raises(ValueError, match=r"_loss: \w+ is \["): SUBJECTS[name][0](*(x[:, 1:] for x in args), mask)
    with pytest.raises(TypeError, match="_loss: mask is int64; masks are Bool"): SUBJECTS[name][0](*args, mask.long())


def errors():
    four = LP, OLD, A, MASK
    yield (lambda: dapo_loss(*four, clip_low=1.2),
           "dapo_loss: clip_low is 1.2, clip_high is 0.28; they are distances from ratio 1")
    yield (lambda: cpgd_loss(*four, clip_low=1.),
           "cpgd_loss: clip_low is 1.0, clip_high is 0.2; they are distances from ratio 1, the first below 1: its log "
           "is taken")
    yield (lambda: gmpo_loss(*four, nats_high=-.1),
           "gmpo_loss: nats_low is 0.4, nats_high is -0.1; they are distances from log ratio 0, in nats")
    yield (lambda: high_entropy_mask(LP, MASK, share=20.),
           "high_entropy_mask: share is 20.0; it is a part of the counted tokens, within [0, 1]")
    yield (lambda: adaptive_entropy_coef(.1, .1, step=0.),
           "adaptive_entropy_coef: step is 0.0, least is 0.0, most is 1.0; step is positive")
    yield lambda: expert_load(COLS["router_logits"], MASK, top_k=6), "expert_load: top_k is 6, there are 5 experts"
    yield (lambda: moe_balance_loss(COLS["router_logits"], COLS["load"][0], MASK),
           "moe_balance_loss: load is [5], wanted [16, 5]; expert_load(router_logits, mask, top_k=…)")
    yield lambda: kl_cov_loss(LP, OLD, A, MASK, selected=MASK[:, 1:]), "kl_cov_loss: selected is [16, 15]"


@pytest.mark.parametrize("call,text", list(errors()))
def test_errors_say_who_what_and_how(call, text):
    with pytest.raises(ValueError) as e: call()
    assert text in str(e.value)


def test_every_loss_is_under_test():
    there = {n for m in (policy_losses, ratio_losses, answer_ratio, selections)
             for n in m.__all__ if n.endswith("_loss")} - {"ppo_loss", "grpo_loss"}
    assert there == {n.split()[0] + "_loss" for n in SUBJECTS}


@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.float64, torch.bfloat16), repeat=3)),
                         ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_columns_of_unlike_precision(dtypes):
    from rlblocks import cispo_loss, grpo_loss, sapo_loss
    g, mask = torch.Generator().manual_seed(0), torch.ones(3, 4, dtype=torch.bool)
    lp, old, A = (x.to(d) for x, d in zip((-torch.rand(3, 4, generator=g), -torch.rand(3, 4, generator=g),
                                           torch.randn(3, 4, generator=g)), dtypes, strict=True))
    def run(f, lp, *columns):
        lp.requires_grad_()
        value = f(lp, *columns, mask)[0]
        return value.double(), torch.autograd.grad(value, lp)[0].double()
    tol = 1e-2 if dtypes[0] == torch.bfloat16 else 1e-5
    for f in (ppo_loss, cispo_loss, sapo_loss, lambda *x: grpo_loss(x[0], x[1], x[1], *x[2:])):
        (value, gradient), (want, by) = run(f,
                                            lp.clone(), old, A), run(f, lp.double().clone(), old.double(), A.double())
        assert_close(value, want, atol=1e-5, rtol=1e-5)
        assert_close(gradient, by, atol=tol, rtol=tol)


@pytest.mark.parametrize("bounds", [dict(clip_high=-.8), dict(clip_low=-.5), dict(clip_low=.3, clip_high=-.1)])
def test_cispo_counts_tokens_whose_ratio_is_cut_and_no_padding(bounds):
    "Bounds that exclude ratio 1, which is what stands under the mask."
    _, metrics = cispo_loss(LP, OLD, A, MASK, **bounds)
    ratio = (LP - OLD)[MASK].exp()
    low, high = 1 - bounds.get("clip_low", 1.), 1 + bounds.get("clip_high", 4.)
    assert_close(float(metrics["clip_frac"]), float(((ratio < low) | (ratio > high)).double().mean()))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss, sapo_loss, gspo_loss, gmpo_loss, vespo_loss, luspo_loss,
                                  reinforce_loss, value_loss])
def test_no_rows_and_no_tokens_cost_nothing(loss, shape):
    x, mask = torch.zeros(shape, requires_grad=True), torch.zeros(shape, dtype=torch.bool)
    rest = [torch.zeros(shape)]*(1 if loss is reinforce_loss else 2)
    value, metrics = loss(x, *rest, mask, **dict(clip_low=.2, clip_high=.2)) if loss in (
        gspo_loss, luspo_loss) else loss(x, *rest, mask)
    assert value == 0 and torch.autograd.grad(value, x)[0].shape == shape
    assert all(isinstance(float(m), float) for m in metrics.values())


@pytest.mark.parametrize("call, says", [
    (lambda: cispo_loss(LP, OLD, A, MASK, clip_high=-2.), "cispo_loss: clip_low is 1.0, clip_high is -2.0"),
    (lambda: cispo_loss(LP, OLD, A, MASK, clip_low=1.5), "cispo_loss: clip_low is 1.5"),
    (lambda: sapo_loss(LP, OLD, A, MASK, tau_neg=0.), "sapo_loss: tau_pos is 1.0, tau_neg is 0.0"),
    (lambda: dppo_kl_loss(LP, OLD, A, MASK, cap=-1.), "dppo_kl_loss: cap is -1.0"),
    (lambda: dr_grpo_loss(LP, OLD, A, MASK, max_tokens=0), "dr_grpo_loss: max_tokens is 0"),
    (lambda: value_loss(LP, OLD, A, MASK, clip=-.2), "value_loss: clip is -0.2"),
    (lambda: value_loss(LP, OLD, A, MASK, huber=float("nan")), "value_loss: huber is nan")])
def test_numbers_that_turn_a_loss_round_are_refused(call, says):
    with pytest.raises(ValueError, match=re.escape(says)): call()


# -- a copy of a loss with one line more

def ppo_with(line):
    "The source of `ppo_loss` with this line before its metrics, run beside the imports of its module."
    source = inspect.getsource(ppo_loss)
    at = "    cut = clip_metrics("
    assert source.count(at) == 1
    names = dict(vars(policy_losses))
    exec(source.replace(at, f"    {line}\n{at}"), names)
    return names["ppo_loss"]


PENALTY = "loss = loss + (ratio - ratio.clamp(1-clip_low, 1+clip_high)).square()"


def test_a_quadratic_penalty_beyond_the_clip_is_one_line():
    "The surrogate is −1.2 at ratio 2 with Â = 1, the penalty .8². The laws hold; PPO's oracle is another loss by then."
    loss, one = ppo_with(PENALTY), torch.ones(1, 1).double()
    check_loss(loss)
    x = (2*one).log().requires_grad_()
    value = loss(x, 0*x, one, one > 0)[0]
    assert_close([value, *torch.autograd.grad(value, x)], [torch.tensor(-.56).double(), 3.2*one])


def test_a_line_that_is_wrong_is_found():
    "A penalty on the mean ratio of the call counts padding too, which a law finds."
    with pytest.raises(AssertionError, match="padding law"): check_loss(ppo_with("loss = loss + ratio.mean().square()"))
