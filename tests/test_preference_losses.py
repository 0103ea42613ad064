"""Pair losses: hand numbers, oracles, laws, weights, identities, extremes, compilation, derivatives, errors (LAWS 1,
5, 25)."""
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from rlblocks.data.batch import pairs
from rlblocks.losses.distill import sft_loss
from rlblocks.arithmetic.logprobs import sequence_logprobs
from rlblocks.arithmetic.masked import masked_mean, merge
from rlblocks.losses.pairs import (
    answer_log_ratios, over_pairs, over_rows, pair_log_ratios, pair_metrics, preference_margin,
)
from rlblocks.losses.preference import (
    apo_down_loss, apo_zero_loss, bco_pair_loss, discopop_loss, dpo_loss, dpop_loss, exo_loss, hinge_loss, ipo_loss,
    nca_loss, robust_dpo_loss, sppo_loss,
)
from rlblocks.models.policy import Policy
from rlblocks.testing.laws import check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.unpaired import kto_loss
from rlblocks.models.step import micro_batches
from rlblocks.engines.optimizers import adamw
from tiny import apart, gradients, model, rows

FOUR = ("chosen", "rejected", "ref_chosen", "ref_rejected")


def sig(x): return 1/(1 + math.exp(-x)) if x > 0 else math.exp(x)/(1 + math.exp(x))
def ell(x): return max(0, -x) + math.log1p(math.exp(-abs(x)))


# name → (loss, the paper's formula of the two rewards c = β·log-ratio of the chosen, r of the rejected, and β)
LOSSES = {
    "dpo": (partial(dpo_loss, beta=.3), lambda c, r, b: ell(c-r)),
    "cdpo": (partial(dpo_loss, beta=.3, label_smoothing=.2), lambda c, r, b: .8*ell(c-r) + .2*ell(r-c)),
    "robust": (partial(robust_dpo_loss, beta=.3, label_smoothing=.2), lambda c, r, b: (.8*ell(c-r) - .2*ell(r-c))/.6),
    "ipo": (partial(ipo_loss, beta=.3), lambda c, r, b: ((c-r)/b - 1/(2*b))**2),
    "hinge": (partial(hinge_loss, beta=.3), lambda c, r, b: max(0., 1-(c-r))),
    "exo": (partial(exo_loss, beta=.3, label_smoothing=.1),
            lambda c, r, b: sig(c-r)*math.log(sig(c-r)/.9) + sig(r-c)*math.log(sig(r-c)/.1)),
    "discopop": (partial(discopop_loss, beta=.3, tau=.4),
                 lambda c, r, b: sig((r-c)/.4)*ell(c-r) + sig((c-r)/.4)*math.exp(r-c)),
    "dpop": (partial(dpop_loss, beta=.3, penalty=1.5), lambda c, r, b: ell(c - r - 1.5*max(0., -c))),
    "nca": (partial(nca_loss, beta=.3), lambda c, r, b: ell(c) + ell(-c)/2 + ell(-r)/2),
    "bco": (partial(bco_pair_loss, beta=.3), lambda c, r, b: ell(c) + ell(-r)),
    "sppo": (partial(sppo_loss, beta=.3), lambda c, r, b: (c/b - 1/(2*b))**2 + (r/b + 1/(2*b))**2),
    "apo_zero": (partial(apo_zero_loss, beta=.3), lambda c, r, b: 1 - sig(c) + sig(r)),
    "apo_down": (partial(apo_down_loss, beta=.3), lambda c, r, b: sig(c) + 1 - sig(c-r)),
}
OF_THE_MARGIN = ("dpo", "cdpo", "robust", "ipo", "hinge", "exo", "discopop")
every_loss = pytest.mark.parametrize("name", LOSSES)


def columns(seed=0, dtype=torch.float64): return [sample_columns(seed=seed)[k].to(dtype) for k in FOUR]
def some_weights(): return sample_columns(seed=3)["scores"].clone().index_fill(0, torch.tensor([3, 8]), 0.)
def pair(c, r): return torch.tensor([c]), torch.tensor([r]), torch.zeros(1), torch.zeros(1)


# -- laws


@every_loss
def test_as_a_closure_over_rows(name): # units joined by id, wherever their rows lie; a filler is no pair
    def closure(out, b):
        c, r = pairs(sequence_logprobs(out.logprobs, b.mask), b)
        rc, rr = pairs(sequence_logprobs(b.ref_logprobs, b.mask), b)
        return LOSSES[name][0](c, r, rc, rr, denom=b)
    assert {"split", "mask", "empty", "padding", "empty_rows"} <= set(check_loss(closure))


def test_mixtures_are_sums(): # MPO: each term with its own count of the whole
    def mpo(out, b):
        c, r = pairs(sequence_logprobs(out.logprobs, b.mask), b)
        rc, rr = pairs(sequence_logprobs(b.ref_logprobs, b.mask), b)
        (dpo, m), (bco, _) = (f(c, r, rc, rr, denom=b) for f in (dpo_loss, bco_pair_loss))
        nll, n = sft_loss(out.logprobs, b.mask & b.chosen[:, None], denom=b.n_tokens)
        return .8*dpo + .2*bco + nll, merge(m, n)
    check_loss(mpo)


# -- numbers

@every_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_oracle(name, weighted):
    f, formula = LOSSES[name]
    for seed in range(3):
        lps, w = columns(seed), some_weights() if weighted else torch.ones(16).double()
        rows = [(.3*(c-rc), .3*(r-rr), x) for c, r, rc, rr, x in zip(*(x.tolist() for x in (*lps, w)), strict=True)]
        total = sum(x*formula(c, r, .3) for c, r, x in rows)
        f = partial(f, weights=w) if weighted else f
        assert_close(f(*lps)[0].item(), total/sum(x != 0 for *_, x in rows), rtol=1e-10, atol=0)
        assert_close(f(*lps, denom=7.)[0].item(), total/7, rtol=1e-10, atol=0)
        metrics = {k: sum(m(c, r) for c, r, x in rows if x)/sum(x != 0 for *_, x in rows)
                   for k, m in dict(margin=lambda c, r: c-r, accuracy=lambda c, r: c > r, chosen_reward=lambda c, r: c,
                                    rejected_reward=lambda c, r: r).items()}
        if name == "dpop": metrics["chosen_fell"] = sum(c < 0 for c, _, x in rows if x)/sum(x != 0 for *_, x in rows)
        assert {k: float(m) for k, m in f(*lps)[1].items()} == pytest.approx(metrics, rel=1e-6)


def test_dpo_golden(): # margins 3 and 0
    four = [torch.tensor(x) for x in ([-4., -1.], [-5., -1.], [-5., -2.], [-3., -2.])]
    assert_close(preference_margin(*four), torch.tensor([3., 0.]))
    loss, metrics = dpo_loss(*four, beta=1.)
    assert_close(loss, torch.tensor((.04858735 + .69314718)/2))
    assert {k: float(m)
            for k, m in metrics.items()} == dict(margin=1.5, accuracy=.5, chosen_reward=1., rejected_reward=-.5)


def test_defaults_are_those_of_the_papers():
    lps = columns()
    for f, beta in ((dpo_loss, .1), (robust_dpo_loss, .1), (ipo_loss, .1), (hinge_loss, .1), (exo_loss, .1),
                    (discopop_loss, .05), (nca_loss, .01),
                    (dpop_loss, .3), (bco_pair_loss, .1), (sppo_loss, .001), (apo_zero_loss, .1), (apo_down_loss, .1)):
        assert_close(f(*lps)[0], f(*lps, beta=beta)[0], rtol=0, atol=0)
    assert_close(dpo_loss(*lps)[0], dpo_loss(*lps, label_smoothing=0.)[0], rtol=0, atol=0)
    assert_close(robust_dpo_loss(*lps)[0], robust_dpo_loss(*lps, label_smoothing=.1)[0], rtol=0, atol=0)
    assert_close(exo_loss(*lps)[0], exo_loss(*lps, label_smoothing=.001)[0], rtol=0, atol=0)
    assert_close(discopop_loss(*lps)[0], discopop_loss(*lps, tau=.05)[0], rtol=0, atol=0)
    assert_close(dpop_loss(*lps)[0], dpop_loss(*lps, penalty=50.)[0], rtol=0, atol=0)


# -- relatives

# cDPO adds εx, robust DPO takes ε/(1−2ε)·x away; the mean of robust over the flips is DPO
def test_label_noise_is_a_straight_line():
    lps, swapped = columns(), [columns()[i] for i in (1, 0, 3, 2)]
    x = .1*preference_margin(*lps).mean()
    assert_close(dpo_loss(*lps, label_smoothing=.2)[0] - dpo_loss(*lps)[0], .2*x)
    assert_close(robust_dpo_loss(*lps, label_smoothing=.2)[0] - dpo_loss(*lps)[0], -.2/.6*x)
    assert_close(.8*robust_dpo_loss(*lps, label_smoothing=.2)[0] + .2*robust_dpo_loss(*swapped, label_smoothing=.2)[0],
                 dpo_loss(*lps)[0])
    assert_close(robust_dpo_loss(*lps, label_smoothing=0.)[0], dpo_loss(*lps)[0])
    assert_close(dpo_loss(*swapped)[0] - dpo_loss(*lps)[0], x)


def test_relations():
    lps = columns()
    c, r, rc, rr = lps
    assert bco_pair_loss(*lps, beta=.1)[0] > dpo_loss(*lps)[0]
    assert_close(nca_loss(*lps, beta=.1)[0],
                 bco_pair_loss(*lps, beta=.1)[0] + (F.softplus(.1*(c-rc)) - F.softplus(.1*(r-rr))).mean()/2)
    assert_close(2*sppo_loss(*lps, beta=.1)[0], ipo_loss(*lps, beta=.05)[0] + (c-rc+r-rr).square().mean())
    assert_close(discopop_loss(*lps, beta=.3, tau=1e9)[0],
                 (dpo_loss(*lps, beta=.3)[0] + torch.exp(-.3*preference_margin(*lps)).mean())/2)
    at = torch.tensor([math.log(9)], dtype=torch.float64, requires_grad=True)
    for f in (dpo_loss, exo_loss): # both rest at σ(x) = 1 − ε
        assert torch.autograd.grad(f(at, *torch.zeros(3, 1).double(), beta=1., label_smoothing=.1)[0],
                                   at)[0].abs() < 1e-12


def test_ipo_by_sums_and_by_means_differ(): # TRL and OpenRLHF, one flag: lengths 2 and 4
    lp, ref, mask = torch.tensor([[-.5]*4, [-1.]*4]), -torch.ones(2, 4), torch.arange(4) < torch.tensor([[2], [4]])
    sums, means = ([f(x, mask) for x in (lp, ref)] for f in (sequence_logprobs, partial(masked_mean, dim=-1)))
    sums, means = (ipo_loss(a[:1], a[1:], b[:1], b[1:], beta=.5)[0] for a, b in (sums, means))
    assert (sums.item(), means.item()) == (0., .25)


@every_loss
def test_what_cancels(name):
    f, (c, r, rc, rr) = LOSSES[name][0], columns()
    assert_close(f(c+50, r, rc+50, rr)[0], f(c, r, rc, rr)[0], rtol=1e-9, atol=1e-9)
    shifted = f(c+2, r+2, rc, rr)[0]
    assert torch.allclose(shifted, f(c, r, rc, rr)[0], rtol=1e-9) is (name in OF_THE_MARGIN)


def test_dpop_is_dpo_until_the_chosen_answer_falls():
    c, r, rc, rr = columns()
    up = rc + (c-rc).abs()
    assert_close(dpop_loss(up, r, rc, rr)[0], dpo_loss(up, r, rc, rr, beta=.3)[0])
    assert_close(dpop_loss(c, r, rc, rr, penalty=0.)[0], dpo_loss(c, r, rc, rr, beta=.3)[0])
    x = [y.requires_grad_() for y in pair(-.1, -2.1)[:2]]
    loss, metrics = dpop_loss(*x, *torch.zeros(2, 1), beta=1., penalty=10.)
    assert_close(loss.item(), math.log1p(math.exp(-1)), rtol=1e-6, atol=0) # 2 nats apart, less 10·.1
    assert_close(torch.stack(torch.autograd.grad(loss, x)).flatten().tolist(), [-11*sig(-1), sig(-1)], rtol=1e-5,
                 atol=0)
    assert float(metrics["chosen_fell"]) == 1


def test_the_pieces_make_the_losses():
    c, r, rc, rr = columns()
    w, there = some_weights(), some_weights() != 0
    mine, other = pair_log_ratios(c, r, rc, rr, weights=w)
    assert mine.equal(answer_log_ratios(c, rc, weights=w)) and mine.equal(torch.where(there, c-rc, 0.))
    assert other.equal(torch.where(there, r-rr, 0.))
    assert_close(over_pairs((mine-other).square(), weights=w), (w*(c-rc-r+rr).square()).sum()/14)
    assert over_rows(mine)/4 == over_rows(mine, denom=64.) == over_pairs(mine, denom=64.)
    assert {k: float(m) for k, m in pair_metrics(mine, other, weights=w).items()} == {
        k: float(m) for k, m in dpo_loss(c, r, rc, rr, weights=w, beta=1.)[1].items()}


def test_a_batch_as_denom_counts_pairs():
    b = preferred()
    b["scores"] = sample_columns(seed=5)["scores"]
    def loss(b, denom): return over_pairs(pairs(b.scores, b)[0].square(), denom=denom)
    assert b.n_units == 7 and loss(b, b) == loss(b, 7.) == loss(b, None)
    assert_close(sum(loss(part, part) for part in b.parts(3)), loss(b, b))
    with pytest.raises(TypeError, match="which has no n_units"): over_pairs(torch.zeros(3), denom=[3])


def test_apo_down_lowers_both_and_the_rejected_more():
    x = [y.requires_grad_() for y in pair(0., -1.)[:2]]
    up, down = torch.autograd.grad(apo_down_loss(*x, *torch.zeros(2, 1), beta=1.)[0], x)
    assert 0 < up < down
    x = [y.requires_grad_() for y in pair(0., -1.)[:2]]
    up, down = torch.autograd.grad(apo_zero_loss(*x, *torch.zeros(2, 1), beta=1.)[0], x)
    assert up < 0 < down


# -- nothing at all


@every_loss
def test_no_pairs_is_zero_with_a_graph(name):
    for lps, w in (([x[:0] for x in columns()], None), (columns(), torch.zeros(16).double())):
        for denom in (None, 0., 5.):
            x = lps[0].clone().requires_grad_()
            loss, metrics = LOSSES[name][0](x, *lps[1:], weights=w, denom=denom)
            loss.backward()
            assert loss == 0 and not x.grad.any() and all(math.isnan(float(m)) for m in metrics.values())


def test_weights_carry_no_gradient():
    w = some_weights().requires_grad_()
    x = columns()[0].requires_grad_()
    dpo_loss(x, *columns()[1:], weights=w)[0].backward()
    assert w.grad is None and x.grad.any()


# -- extremes

@every_loss
def test_far_margins_stay_finite(name):
    for c, r in ((1e4, -1e4), (-1e4, 1e4), (0., 0.)):
        x = [y.requires_grad_() for y in pair(c, r)[:2]]
        loss = LOSSES[name][0](*x, *torch.zeros(2, 1))[0]
        assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, x))


@every_loss
@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("smoothed", [True, False])
# a replayed support, LAWS 13
def test_an_answer_of_log_prob_minus_infinity_has_the_loss_of_its_limit(name, which, smoothed):
    f = LOSSES[name][0]
    if not smoothed and name not in ("cdpo", "robust"): return
    if not smoothed: f = partial(f, label_smoothing=0.)
    def at(x, dtype=torch.float64):
        lps = [torch.tensor([v, -1.5], dtype=dtype) for v in (-1., -2., -1.2, -1.1)]
        lps[which][0] = x
        for y in lps[:2]: y.requires_grad_()
        loss = f(*lps)[0]
        return loss.detach(), torch.autograd.grad(loss, lps[:2])
    far, further = at(-1e5), at(-1e7)
    if abs(further[0]) < 2*abs(far[0]) + 1: # the limit is finite
        for dtype in (torch.float32, torch.float64):
            loss, grads = at(-math.inf, dtype)
            assert_close(loss, further[0].to(dtype))
            assert_close(grads, tuple(g.to(dtype) for g in further[1]))
    else: assert not at(-math.inf)[0].isnan() # an infinite loss


def test_which_limits_are_finite():
    "Rejected answer at −∞: 0 for a likelihood of the margin alone, finite where the shape saturates."
    lps = pair(-1., -math.inf)
    values = {name: f(*lps)[0].item() for name, (f, _) in LOSSES.items()}
    assert values["dpo"] == values["hinge"] == values["discopop"] == 0
    assert_close(values["exo"], -math.log(.9))
    assert values["dpop"] == 0 and all(math.isfinite(values[k]) for k in ("nca", "bco", "apo_zero", "apo_down"))
    # an infinite limit, finite here
    assert all(1e12 < sign*values[k] < 1e31 for k, sign in dict(cdpo=1, ipo=1, sppo=1, robust=-1).items())
    assert robust_dpo_loss(*lps, label_smoothing=0.)[0] == 0


def test_discopop_far_on_the_wrong_side_is_dpo(): # as a product of two factors it is 0·inf
    assert_close(discopop_loss(*pair(-4000., 0.))[0], torch.tensor(200.))


@pytest.mark.parametrize("tau", [.05, 1., 3.])
def test_discopop_of_an_impossible_chosen_answer(tau):
    for dtype in (torch.float32, torch.float64):
        c, r, rc, rr = (x.to(dtype) for x in pair(-math.inf, 0.))
        c.requires_grad_(), r.requires_grad_()
        loss = discopop_loss(c, r, rc, rr, beta=.05, tau=tau)[0]
        if tau > 1: # e⁻ˣ beats σ(x/τ): no float holds it
            assert loss == math.inf
            continue
        assert_close(loss.detach(), torch.tensor(5e13, dtype=dtype)) # the limit is DPO's
        assert_close(torch.autograd.grad(loss, (c, r)),
                     (torch.tensor([0.], dtype=dtype), torch.tensor([.05], dtype=dtype)))


# -- through a real policy: one gradient for every cut

def preferred():
    "Eight pairs, mixed up; the first pair has nothing chosen in either row, the second in one of them."
    b = rows(holes=False)
    b["mask"] = b.mask & ~(torch.arange(16)[:, None] < 3)
    b["unit"], b["chosen"] = torch.arange(16)//2, torch.arange(16) % 2 == 0
    return b[torch.randperm(16, generator=torch.Generator().manual_seed(0))]


def dpo(out, b):
    c, r = pairs(sequence_logprobs(out.logprobs, b.mask), b)
    rc, rr = pairs(sequence_logprobs(b.ref_logprobs, b.mask), b)
    return dpo_loss(c, r, rc, rr, denom=b)


def kto(out, b): # a row without a chosen token has no weight
    lp, ref = (sequence_logprobs(x, b.mask) for x in (out.logprobs, b.ref_logprobs))
    return kto_loss(lp, ref, b.chosen, weights=b.mask.any(1).float(), kl=.3, denom=b)


@pytest.mark.parametrize("loss", [dpo, kto])
def test_a_step_of_a_policy_is_one_gradient_however_cut(loss):
    net, b = model(dtype=torch.float64), preferred()
    assert (b.n_units, b.n_rows) == (7, 13)
    def step(micro_rows, b=b):
        policy = Policy(net, optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu", micro_rows=micro_rows)
        found = gradients(policy)
        return found, policy.step(b, loss), len(micro_batches(policy._run, b))
    whole, metrics, one = step(16)
    assert one == 1 and math.isfinite(float(metrics["loss"]))
    for micro_rows in (8, 2):
        found, others, cuts = step(micro_rows)
        assert cuts == 16//micro_rows and apart(found, whole) < 1e-10
        for k in metrics: assert float(others[k]) == pytest.approx(float(metrics[k]), rel=1e-9, abs=1e-12), k
    if loss is kto: # rows without a chosen token are not there
        found, others, _ = step(16, b.drop("unit")[b.mask.any(1)])
        assert apart(found, whole) < 1e-10 and float(others["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-9)
    if loss is dpo: # −β·σ(−βΔ)/7 on the log-prob of each chosen answer: against autograd without a Policy, LAWS 21
        policy = Policy(net, optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu")
        found = gradients(policy)
        c, r = pairs(sequence_logprobs(policy.logprobs(b), b.mask), b)
        rc, rr = pairs(sequence_logprobs(b.ref_logprobs, b.mask), b)
        pull = torch.zeros(8, dtype=torch.float64)
        pull[b.unit[b.mask.any(1)].unique()] = -.1*torch.sigmoid(-.1*(c-rc-r+rr)).to(torch.float64)/7
        b["pull"] = torch.where(b.chosen, 1., -1.)*pull[b.unit]
        policy.step(b, lambda out, p: ((sequence_logprobs(out.logprobs, p.mask)*p.pull).sum(), {}))
        assert apart(found, whole) < 1e-6



# -- errors: who, what came, what was wanted, how to fix

@every_loss
def test_shapes_are_not_broadcast(name):
    f, lps = LOSSES[name][0], columns()
    who = f.func.__name__
    with pytest.raises(ValueError, match=rf"{who}: ref_rejected is \[15\], chosen is \[16\]"): f(*lps[:3], lps[3][1:])
    with pytest.raises(ValueError, match=rf"{who}: weights is \[1\], chosen is \[16\]"): f(*lps, weights=torch.ones(1))
    with pytest.raises(
            ValueError,
            match=rf"{who}: chosen is \[4, 4\]; one number per pair is wanted, pairs\(x, batch\) with "
            r"x = sequence_logprobs\(logprobs, mask\), the sum "):
        f(*(x.reshape(4, 4) for x in lps))
    with pytest.raises(TypeError): f(*lps, torch.ones(16)) # weights and numbers are keywords


@pytest.mark.parametrize("f", [dpo_loss, robust_dpo_loss, exo_loss])
def test_label_smoothing_out_of_range(f):
    for bad in (-.1, .5, 1., *([0.] if f is exo_loss else [])):
        with pytest.raises(ValueError, match=rf"{f.__name__}: label_smoothing is {bad}"):
            f(*columns(), label_smoothing=bad)
