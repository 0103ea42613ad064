"""f-divergences, LD-DPO, WPO, AOT and the reference-free losses: hand numbers, oracles, laws, identities, extremes,
compilation, derivatives, errors."""
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from rlblocks.data.batch import pairs
from rlblocks.losses.distill import sft_loss
from rlblocks.arithmetic.logprobs import sequence_logprobs
from rlblocks.losses.margins import (
    alpha_reward, alphapo_loss, aot_loss, aot_matched, chi_reward, chipo_loss, cpo_loss, f_dpo_loss,
    js_reward, ld_logprobs, orpo_loss, simpo_loss, tpo_loss, wpo_weights,
)
from rlblocks.arithmetic.masked import masked_mean
from rlblocks.losses.preference import dpo_loss, hinge_loss
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns

COLS = {k: x for k, x in sample_columns(seed=0).items()}
FOUR = [COLS[k] for k in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
FREE = dict(chosen=-COLS["chosen"].abs()-.01, rejected=-COLS["rejected"].abs()-.01) # log-probs of answers: not above 0
FORWARD = partial(alpha_reward, alpha=1.)
KL = partial(alpha_reward, alpha=0.) # the reward of reverse KL, log u
GOLD = dict(gold=-COLS["ref_chosen"].abs()-.01)
WEIGHTS = sample_columns(seed=3)["scores"].clone().index_fill(0, torch.tensor([3, 8]), 0.)


def nls(x): return max(0, -x) + math.log1p(math.exp(-abs(x))) # −log σ


# name → (loss, its inputs, the paper's formula of one pair, on probabilities where it is about them)
LOSSES = {
    "f forward": (partial(f_dpo_loss, divergence=FORWARD, beta=.3), FOUR,
                  lambda c, r, a, b: nls(.3*((1-math.exp(a-c)) - (1-math.exp(b-r))))),
    "f js": (partial(f_dpo_loss, divergence=js_reward, beta=.3), FOUR, lambda c, r, a, b: nls(
        .3*(math.log(2*math.exp(c-a)/(1+math.exp(c-a))) - math.log(2*math.exp(r-b)/(1+math.exp(r-b)))))),
    "f alpha": (partial(f_dpo_loss, divergence=partial(alpha_reward, alpha=.3), beta=.3), FOUR,
                lambda c, r, a, b: nls(.3*((1-math.exp(c-a)**-.3)/.3 - (1-math.exp(r-b)**-.3)/.3))),
    "f chi": (partial(f_dpo_loss, divergence=chi_reward, beta=.01), FOUR,
              lambda c, r, a, b: nls(.01*(math.exp(c-a) + c-a - math.exp(r-b) - (r-b)))),
    "f chipo": (partial(chipo_loss, max_reward=.4, beta=.1), FOUR,
                lambda c, r, a, b: nls(max(-.8, min(.8, .1*(math.exp(c-a) + c-a - math.exp(r-b) - (r-b)))))),
    "aot": (partial(aot_loss, beta=.3, label_smoothing=.1), [FOUR[0], FOUR[1], FOUR[2]-FOUR[3]],
            lambda c, r, m: .9*nls(.3*(c-r-m)) + .1*nls(-.3*(c-r-m))),
    "simpo": (simpo_loss, [*FREE.values()], lambda c, r: nls(2*c - 2*r - 1)),
    "alphapo": (partial(alphapo_loss, alpha=.5, gamma=.3), [*FREE.values()],
                lambda c, r: nls(2*(math.exp(r)**-.5 - math.exp(c)**-.5)/.5 - .3)),
    "orpo": (orpo_loss, [*FREE.values()],
             lambda c, r: -c + .1*nls(math.log(math.exp(c)/(1-math.exp(c)) / (math.exp(r)/(1-math.exp(r)))))),
    "cpo": (cpo_loss, [*FREE.values()], lambda c, r: nls(.1*(c-r)) - c),
    "tpo": (partial(tpo_loss, gamma=.5), [*FREE.values(), *GOLD.values()], lambda c, r, g: nls(.01*(c-r) - .5) - g),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def named(name):
    "Inputs by parameter."
    return dict(zip(("chosen", "rejected", *dict(f=("ref_chosen", "ref_rejected"), aot=("ref_margin",), tpo=(
        "gold",)).get(name.split()[0], ())), LOSSES[name][1], strict=True))


# -- oracle


@every_loss
def test_equals_oracle(name):
    f, args, formula = LOSSES[name]
    rows = list(zip(*(x.tolist() for x in args), WEIGHTS.tolist(), strict=True))
    assert_close(f(*args)[0].item(), sum(formula(*x) for *x, _ in rows)/16, rtol=1e-10, atol=0)
    assert_close(f(*args, weights=WEIGHTS)[0].item(), sum(w*formula(*x) for *x, w in rows)/14, rtol=1e-10, atol=0)
    assert_close(f(*args, denom=7.)[0].item(), sum(formula(*x) for *x, _ in rows)/7, rtol=1e-10, atol=0)


def test_as_closures_over_rows():
    def simpo(out, b): return simpo_loss(*pairs(masked_mean(out.logprobs, b.mask, dim=-1), b), denom=b)
    def ld_dpo(out, b):
        (c_mask, r_mask), shared = pairs(b.mask, b), torch.minimum(*pairs(b.mask.sum(1), b))
        (c, r), (rc, rr) = ([ld_logprobs(x, m, shared) for x, m in zip(pairs(lp, b), (c_mask, r_mask), strict=True)]
                            for lp in (out.logprobs, b.ref_logprobs))
        return dpo_loss(c, r, rc, rr, denom=b)
    def wpo(out, b):
        w = wpo_weights(out.logprobs, (-b.entropies).exp(), b.mask)
        c, r = pairs(sequence_logprobs(out.logprobs, b.mask), b)
        rc, rr = pairs(sequence_logprobs(b.ref_logprobs, b.mask), b)
        w_c, w_r = pairs(w, b)
        return dpo_loss(c, r, rc, rr, weights=w_c*w_r, denom=b)
    check_loss(simpo)
    check_loss(ld_dpo, mean=False)
    laws = check_loss(lambda out, b: (wpo(out, b)[0], {}), dict(entropies=COLS["entropy"]), mean=False)
    assert "empty_rows" in laws


# -- divergences

def test_rewards_golden():
    u = torch.tensor([2., .5]).log()
    rewards = torch.stack([f(u) for f in (KL, FORWARD, alpha_reward, js_reward, chi_reward)])
    want = [[math.log(2), -math.log(2)], [.5, -1.], [2-2**.5, 2-8**.5], [math.log(4/3), math.log(2/3)],
            [2+math.log(2), .5-math.log(2)]]
    assert_close(rewards, torch.tensor(want))


def test_divergences_meet():
    x = torch.linspace(-6, 6, 50, dtype=torch.float64)
    assert_close(alpha_reward(x, alpha=1e-10), KL(x), rtol=1e-8, atol=0)
    assert_close(f_dpo_loss(*FOUR, divergence=KL)[0], dpo_loss(*FOUR)[0])
    # any function will do
    assert_close(f_dpo_loss(*FOUR, divergence=torch.clone, beta=.4)[0], dpo_loss(*FOUR, beta=.4)[0])
    assert_close(f_dpo_loss(*FOUR, divergence=partial(alpha_reward, alpha=.25))[0],  # TRL's coefficient is 1 − α
                 -F.logsigmoid(.1*((torch.exp(-.25*(FOUR[0]-FOUR[2]))-1)/-.25
                                   - (torch.exp(-.25*(FOUR[1]-FOUR[3]))-1)/-.25)).mean())


@pytest.mark.parametrize("reward",
                         [KL, FORWARD, alpha_reward, js_reward, chi_reward, partial(alpha_reward, alpha=-.5)])
def test_rewards_are_finite_and_rise(reward):
    x = torch.tensor([-1e4, -100., -41., -39., -21., -19., -1., 0., 1., 20., 39., 41., 1e4], requires_grad=True)
    y = reward(x)
    slope, = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and (y.diff() >= 0).all() and (slope >= 0).all() and slope.isfinite().all()
    check_estimator(lambda ref_logprobs: reward(ref_logprobs))


def test_the_tangent_is_smooth():
    x = torch.tensor([-19.999, -20.001], dtype=torch.float64, requires_grad=True)
    y = FORWARD(x)
    slope, = torch.autograd.grad(y.sum(), x)
    assert_close(slope[0], slope[1], rtol=2e-3, atol=0)
    assert_close(y[0], y[1], rtol=3e-3, atol=0)
    assert_close(slope[1], torch.tensor(math.exp(20)).double())


def test_chipo_by_hand():
    u = torch.tensor([2., .5]).log()
    def at(R): return chipo_loss(x, u[1:], *torch.zeros(2, 1), beta=1., max_reward=R)
    x = u[:1].clone().requires_grad_()
    (free, m), (clipped, n) = at(math.inf), at(1.)
    gap = 1.5 + 2*math.log(2)
    assert_close([free.item(), clipped.item()], [math.log1p(math.exp(-gap)), math.log1p(math.exp(-2))], rtol=1e-6,
                 atol=0)
    assert_close(torch.autograd.grad(free, x)[0].item(), -3/(1 + math.exp(gap)), rtol=1e-5, atol=0) # dφ/dlog u = u + 1
    assert torch.autograd.grad(clipped, x)[0] == 0 and (float(m["clip_frac"]), float(n["clip_frac"])) == (0, 1)
    assert_close(chipo_loss(*FOUR, max_reward=math.inf)[0], f_dpo_loss(*FOUR, divergence=chi_reward)[0])
    with pytest.raises(ValueError, match="max_reward is -1; it is above 0, math.inf for no clipping"):
        chipo_loss(*FOUR, max_reward=-1)


def test_chi_is_the_derivative_of_its_divergence(): # f(u) = ½(u − 1)² + u·log u, up to a constant
    u = torch.linspace(.1, 5, 20, dtype=torch.float64, requires_grad=True)
    slope, = torch.autograd.grad(((u-1).square()/2 + u*u.log()).sum(), u)
    assert_close(chi_reward(u.log()), slope)


# -- lengths, weights, ranks

def test_ld_logprobs():
    lp, mask = COLS["logprobs"], COLS["mask"]
    shared = mask.sum(1)//2
    for alpha in (0., .3, 1.):
        want = [sum((1. if i < s else alpha)*x for i, x in enumerate([x for x, m in zip(row, on, strict=True) if m]))
                for row, on, s in zip(lp.tolist(), mask.tolist(), shared.tolist(), strict=True)]
        assert_close(ld_logprobs(lp, mask, shared, alpha=alpha), torch.tensor(want, dtype=torch.float64))
    assert_close(ld_logprobs(lp, mask, shared), ld_logprobs(lp, mask, shared, alpha=.5), rtol=0, atol=0)
    assert_close(ld_logprobs(lp, mask, mask.sum(1), alpha=.1), sequence_logprobs(lp, mask))
    assert {"mask", "padding", "empty_rows", "empty"} <= set(check_estimator(ld_logprobs, dict(shared=shared)))
    with pytest.raises(ValueError, match=r"ld_logprobs: shared is \[1\], mask\[:, 0\] is \[16\]"):
        ld_logprobs(lp, mask, shared[:1])


def test_wpo_weights():
    z = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ids, mask = torch.arange(15).reshape(3,
                                         5) % 11, torch.tensor([[True, True, False, False, True], [False]*5, [True]*5])
    lp, squares = z.log_softmax(-1).gather(-1, ids[..., None])[..., 0], z.softmax(-1).square().sum(-1)
    w, p = wpo_weights(lp, squares, mask), z.softmax(-1).detach()
    assert not w.requires_grad
    for b in (0, 2):
        on = [t for t in range(5) if mask[b, t]]
        assert_close(w[b].item(),
                     math.exp(sum(math.log(p[b, t, ids[b, t]]/p[b, t].square().sum()) for t in on)/len(on)))
    assert w[1] == 0
    assert "empty" in check_estimator(wpo_weights, dict(sum_pi_squared=(-COLS["entropy"]).exp()))


def test_a_policy_weighs_its_own_answers_about_one():
    g = torch.Generator().manual_seed(0)
    z = 2*torch.randn(50, generator=g).expand(64, 200, 50)
    ids = torch.multinomial(z[0, 0].softmax(0), 64*200, replacement=True, generator=g).reshape(64, 200)
    lp = z.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    squares, everywhere = z.softmax(-1).square().sum(-1), torch.ones(64, 200, dtype=torch.bool)
    assert .3 < wpo_weights(lp, squares, everywhere).mean() < 1.2 and wpo_weights(lp-2, squares, everywhere).mean() < .2


def test_aot_is_the_published_one():
    c, r = (x.clone().requires_grad_() for x in FOUR[:2])
    published = -F.logsigmoid(.3*((c-r).sort().values - (FOUR[2]-FOUR[3]).sort().values)).mean()
    ours = aot_loss(c, r, aot_matched(*FOUR), beta=.3)[0]
    assert_close(ours, published)
    assert_close(torch.autograd.grad(ours, (c, r)), torch.autograd.grad(published, (c, r)))


def test_aot_goldens_and_identities():
    matched = aot_matched(*(torch.tensor(x) for x in ([2., 0.], [0., 0.], [-1., 1.], [0., 0.])))
    assert_close(matched, torch.tensor([1., -1.]))
    one = [x[:1] for x in FOUR] # of one pair: DPO, as TRL's is with a micro-batch of one
    assert_close(aot_loss(*one[:2], aot_matched(*one))[0], dpo_loss(*one, beta=.01)[0])
    assert_close(aot_matched(*FOUR[:2], *FOUR[:2]), FOUR[0]-FOUR[1])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert_close(aot_matched(*(x[order] for x in FOUR)), aot_matched(*FOUR)[order])
    assert not aot_matched(FOUR[0].clone().requires_grad_(), *FOUR[1:]).requires_grad
    check_estimator(aot_matched)


# -- without a reference

def test_reference_free_goldens():
    one = lambda *p: [torch.tensor([math.log(x)]) for x in p]
    assert_close(simpo_loss(*(torch.tensor([x]) for x in (-.5, -1.)))[0], torch.tensor(math.log(2)))
    assert_close(alphapo_loss(*one(1/4, 1/16), alpha=.5, beta=1., gamma=0.)[0], torch.tensor(math.log1p(math.exp(-4))))
    assert_close(orpo_loss(*one(.5, .25), odds_coef=1.)[0], torch.tensor(math.log(8/3)))
    assert_close(cpo_loss(*one(.75, .25), beta=1.)[0], torch.tensor(2*math.log(4/3)))
    assert_close(tpo_loss(*one(.75, .25, .5), beta=1., nll_coef=2.)[0], torch.tensor(math.log(4/3) + 2*math.log(2)))


def test_reference_free_relatives():
    c, r = FREE.values()
    zero = torch.zeros_like(c)
    assert_close(simpo_loss(c, r, gamma=0.)[0], dpo_loss(c, r, zero, zero, beta=2.)[0])
    assert_close(cpo_loss(c, r, nll_coef=0.)[0], dpo_loss(c, r, zero, zero)[0])
    assert_close(cpo_loss(c, r, nll_coef=.3)[0], dpo_loss(c, r, zero, zero)[0] - .3*c.mean())
    assert_close(alphapo_loss(c, r, alpha=0.)[0], simpo_loss(c, r)[0])
    assert_close(alphapo_loss(c, r, gamma=0., alpha=.7)[0],
                 f_dpo_loss(c, r, zero, zero, divergence=partial(alpha_reward, alpha=.7), beta=2.)[0])
    assert_close(tpo_loss(c, r, c, beta=.1)[0], cpo_loss(c, r)[0])
    assert_close(tpo_loss(c, r, zero, beta=2., gamma=1.)[0], simpo_loss(c, r)[0])
    assert_close(orpo_loss(c, r, odds_coef=0.)[0], -c.mean())
    # odds of the unlikely are probabilities
    assert_close(orpo_loss(c-30, r-30)[0], 30 - c.mean() + .1*dpo_loss(c, r, zero, zero, beta=1.)[0], rtol=1e-9, atol=0)
    assert_close(hinge_loss(c, r, zero, zero)[0], torch.relu(1-.1*(c-r)).mean())


def test_the_nll_is_that_of_the_whole_answer_and_trls_a_composition():
    "One pair of 100 tokens: the paper's NLL pulls by 1 a nat, TRL's (a token mean) by a hundredth."
    tokens, mask = (torch.stack([torch.full((101,), -1.), torch.full((101,), -1.02)]).double().requires_grad_(),
                    torch.ones(2, 101, dtype=torch.bool))
    mask[:, 0] = False
    c, r = sequence_logprobs(tokens, mask).split(1)
    def pull(loss): return -torch.autograd.grad(loss, tokens, retain_graph=True)[0][0, 1:].mean().item()
    contrast = .1/(1 + math.exp(.2))
    trl = sft_loss(tokens[:1], mask[:1])[0]
    for f, gold in ((cpo_loss, ()), (partial(tpo_loss, beta=.1), (c,))):
        assert pull(f(c, r, *gold)[0]) == pytest.approx(contrast + 1)
        assert pull(f(c, r, *gold, nll_coef=0.)[0] + trl) == pytest.approx(contrast + .01)
        assert_close(f(c, r, *gold, nll_coef=.01)[0], f(c, r, *gold, nll_coef=0.)[0] + trl)


@pytest.mark.parametrize("name", ["simpo", "alphapo", "orpo"])
def test_means_are_said_first(name):
    import inspect
    source = inspect.getsource(getattr(LOSSES[name][0], "func", LOSSES[name][0]))
    for what in ("chosen", "rejected"):
        line = next(x for x in source.splitlines() if x.strip().startswith(f"{what}:"))
        assert line.split("# ")[1].startswith(
            "mean log-prob per token, masked_mean(logprobs, mask, dim=-1); not the sum"), line


@every_loss
def test_a_rejected_answer_of_log_prob_minus_infinity_is_settled(name):
    f, args, _ = LOSSES[name]
    if name == "aot": f = partial(f, label_smoothing=0.)
    def at(x, dtype=torch.float64):
        xs = [torch.tensor([-1.]).to(dtype).requires_grad_(), torch.tensor([x]).to(dtype).requires_grad_(),
              *(torch.tensor([-1.2]).to(dtype) for _ in args[2:])]
        loss = f(*xs)[0]
        return loss.detach(), torch.autograd.grad(loss, xs[:2])
    for dtype in (torch.float32, torch.float64):
        (loss, grads), (limit, flat) = at(-math.inf, dtype), at(-1e6, dtype)
        assert_close(loss, limit)
        assert_close(grads, flat)


def test_an_absent_nll_of_an_unsayable_answer_is_nothing():
    c, r = torch.tensor([-1.]), torch.tensor([-2.])
    assert tpo_loss(c, r, torch.tensor([-math.inf]), nll_coef=0.)[0] == tpo_loss(c, r, r, nll_coef=0.)[0]


def test_ld_logprobs_of_an_unsayable_token():
    lp, mask = torch.tensor([[-1., -2., -math.inf]], requires_grad=True), torch.ones(1, 3, dtype=torch.bool)
    out = ld_logprobs(lp, mask, torch.tensor([2]), alpha=0.) # α = 0 compares prefixes
    assert out == -3 and torch.autograd.grad(out.sum(), lp)[0].tolist() == [[1., 1., 0.]]
    for x in (lp, lp.flip(1)): assert_close(ld_logprobs(x, mask, torch.tensor([2]), alpha=1.), torch.tensor([-1e15]))


def test_certain_answers_have_a_gradient(): # TRL's two branches of log1mexp give NaN here
    for at in (0., -1e-8, -1e-7, -1e-4):
        x = [torch.tensor([at], requires_grad=True), torch.tensor([-1.], requires_grad=True)]
        for order in (x, x[::-1]):
            loss = orpo_loss(*order)[0]
            assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, x))


def test_alphapo_of_sums_is_finite(): # exp(−400) is 0 in float32, and 0 to the power −¼ infinite
    x = [torch.tensor([-400.], requires_grad=True), torch.tensor([-380.], requires_grad=True)]
    loss = alphapo_loss(*x)[0]
    up, down = torch.autograd.grad(loss, x)
    assert loss.isfinite() and up < 0 < down and up.isfinite()



def test_the_gold_answer_is_widened_before_it_is_scaled():
    args = [x.bfloat16() for x in LOSSES["tpo"][1]]
    assert_close(tpo_loss(*args, nll_coef=.3)[0], tpo_loss(*(x.float() for x in args), nll_coef=.3)[0], rtol=1e-6,
                 atol=0)


# -- errors

@every_loss
def test_shapes_are_not_broadcast(name):
    f, args, _ = LOSSES[name]
    who = getattr(f, "func", f).__name__
    with pytest.raises(ValueError, match=rf"{who}: \w+ is \[15\], \w+ is \[16\]"): f(*args[:-1], args[-1][1:])
    if name != "aot": # whose error is DPO's
        with pytest.raises(TypeError): f(*args, WEIGHTS)
    with pytest.raises(ValueError, match=r"\w+o\w*_loss: chosen is \[4, 4\]; one (number|mean log-prob) per pair"):
        f(*(x.reshape(4, 4) for x in args))


@pytest.mark.parametrize("f", [simpo_loss, alphapo_loss, orpo_loss])
def test_a_loss_of_means_advises_means(f):
    "Not the sum, which passes and gives another loss; its advice, followed, gives the loss of the signature."
    cols = sample_columns()
    from rlblocks import Batch
    b = Batch(mask=cols["mask"], lengths=cols["lengths"], unit=torch.arange(16)//2, chosen=torch.arange(16) % 2 == 0,
              lp=-cols["logprobs"].abs())
    with pytest.raises(ValueError, match=r"pairs\(masked_mean\(logprobs, mask, dim=-1\), batch\), not the sum"):
        f(b.lp, b.lp)
    means = pairs(masked_mean(b.lp, b.mask, dim=-1), b)
    assert f(*means)[0] != f(*pairs(sequence_logprobs(b.lp, b.mask), b))[0]
