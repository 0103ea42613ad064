"""Laws of the divergence: which gradient each estimator has, by exact enumeration, and nothing from under the mask."""
import math

import pytest
import torch
from torch.testing import assert_close

from rlblocks.arithmetic.kl import (adaptive_kl_coef, full_kl, kl_k1, kl_k2, kl_k3, ratio_corrected,
                                    straight_through)
from rlblocks.arithmetic.masked import Mean, aggregate, mean_of
from rlblocks.losses.policy import ppo_loss
from rlblocks.testing.laws import check_estimator, check_loss

KS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
each = pytest.mark.parametrize("k", KS.values(), ids=KS)

# LAWS 17: five tokens, the expectation is a sum of five terms

G = torch.Generator().manual_seed(0)
THETA, REF_THETA = torch.randn(2, 5, generator=G, dtype=torch.float64)
P, REF = THETA.softmax(0), REF_THETA.log_softmax(0)


def gradient(f):
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(f(theta), theta)[0]

def reverse_kl(theta): return (theta.softmax(0)*(theta.log_softmax(0) - REF)).sum() # KL(π‖ref)
def forward_kl(theta): return (REF.exp()*(REF - theta.log_softmax(0))).sum()        # KL(ref‖π)
def in_loss(k): return gradient(lambda theta: (P*k(theta.log_softmax(0), REF)).sum())
def in_reward(): return gradient(lambda theta: (P*kl_k1(theta.log_softmax(0), REF).detach()*theta.log_softmax(0)).sum())


def test_k1_in_the_loss_has_no_gradient():
    assert_close(in_loss(kl_k1), torch.zeros(5, dtype=torch.float64), atol=1e-15, rtol=0)


def test_k2_in_the_loss_has_that_of_the_reverse_kl():
    assert_close(in_loss(kl_k2), gradient(reverse_kl), atol=1e-12, rtol=0)


def test_k3_in_the_loss_has_that_of_the_forward_kl():
    assert_close(in_loss(kl_k3), gradient(forward_kl), atol=1e-12, rtol=0)
    assert (in_loss(kl_k3) - gradient(reverse_kl)).abs().max() > .01


def test_k1_in_the_reward_has_that_of_the_reverse_kl():
    assert_close(in_reward(), gradient(reverse_kl), atol=1e-12, rtol=0)


def test_full_kl_has_that_of_the_reverse_kl():
    assert_close(gradient(lambda theta: full_kl(theta, REF_THETA)), gradient(reverse_kl), atol=1e-12, rtol=0)


# every (value, place, gradient) of the notebook's table; `old` sampled the tokens

R, OLD = gradient(reverse_kl), torch.randn(5, generator=G, dtype=torch.float64).log_softmax(0)
NAMED = {
    "0": torch.zeros(5, dtype=torch.float64), "reverse": R, "forward": gradient(forward_kl),
    "difference": R - gradient(forward_kl),
    "from old": -gradient(lambda t: (OLD.exp()*(OLD - t.log_softmax(0))).sum()),
    "not old": R - gradient(lambda t: (t.softmax(0)*(t.log_softmax(0) - OLD)).sum()),
    "l1": gradient(lambda t: (t.softmax(0) - REF.exp()).abs().sum()),
    "mean k2": gradient(lambda t: (t.softmax(0)*(t.log_softmax(0) - REF)**2/2).sum()),
}
FORMS = {
    "k1": (lambda lp, old: kl_k1(lp, REF), "0", "from old"),
    "abs": (lambda lp, old: kl_k1(lp, REF).abs(), "l1", None),
    "k2": (lambda lp, old: kl_k2(lp, REF), "reverse", None),
    "k3": (lambda lp, old: kl_k3(lp, REF), "forward", None),
    "k1+": (lambda lp, old: straight_through(kl_k1(lp, REF), kl_k2(lp, REF)), "reverse", None),
    "k3+": (lambda lp, old: straight_through(kl_k3(lp, REF), kl_k2(lp, REF)), "reverse", None),
    "ratio k1": (lambda lp, old: ratio_corrected(kl_k1(lp, REF), lp, old), "reverse", "reverse"),
    "ratio k2": (lambda lp, old: ratio_corrected(kl_k2(lp, REF), lp, old), "mean k2", "mean k2"),
    "ratio k3": (lambda lp, old: ratio_corrected(kl_k3(lp, REF), lp, old), "reverse", "reverse"),
    "weighted k2": (lambda lp, old: ratio_corrected(kl_k2(lp, REF), lp.detach(), old), "reverse", "reverse"),
    "weighted k3": (lambda lp, old: ratio_corrected(kl_k3(lp, REF), lp.detach(), old), "forward", "forward"),
    "exact": (lambda lp, old: full_kl(lp, REF).expand(5), "reverse", "reverse"),
    "k1 in reward": (lambda lp, old: kl_k1(lp, old).exp()*kl_k1(old, REF), "reverse", "not old"),
    "k3 in reward": (lambda lp, old: kl_k1(lp, old).exp()*kl_k3(old, REF), "difference", None),
    "exact in reward": (lambda lp, old: kl_k1(lp, old).exp()*full_kl(old, REF), "0", "0"),
}

@pytest.mark.parametrize("form,on,off", FORMS.values(), ids=FORMS)
def test_which_gradient_each_form_has(form, on, off):
    for old,wanted in ((P.log(), on), (OLD, off)):
        g = gradient(lambda theta, old=old: (old.exp()*form(theta.log_softmax(0), old)).sum())
        fits = [k for k,x in NAMED.items() if (g - x).abs().max() < 1e-12 and not (k == "not old" and old is not OLD)]
        assert fits == ([wanted] if wanted else []), fits


@pytest.mark.parametrize("k", [kl_k1, kl_k3])
def test_ratio_corrected_value_is_unbiased_off_policy(k):
    lp = P.log()
    assert_close((OLD.exp()*ratio_corrected(k(lp, REF), lp, OLD)).sum(), full_kl(THETA, REF_THETA))
    assert ((OLD.exp()*k(lp, REF)).sum() - full_kl(THETA, REF_THETA)).abs() > .01


def test_of_a_whole_answer_only_the_return_or_the_whole_ratio_has_the_full_gradient():
    g = torch.Generator().manual_seed(1)
    logits = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((3,), (3, 3))]
    a, b = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    def answers(first, then): return torch.stack([first.log_softmax(0)[a], then.log_softmax(1)[a, b]], 1)
    def grad(f):
        leaves = [x.clone().requires_grad_() for x in logits]
        return torch.autograd.grad(f(answers(*leaves)), leaves)
    ref, chance = answers(*(torch.randn(s, generator=g, dtype=torch.float64)
                            for s in ((3,), (3, 3)))), answers(*logits).sum(1).exp()
    wanted = grad(lambda lp: (lp.sum(1).exp()*(lp - ref).sum(1)).sum())
    assert_close(grad(lambda lp: (chance*(lp*kl_k1(lp, ref).flip(1).cumsum(1).flip(1).detach()).sum(1)).sum()), wanted)
    assert_close(grad(lambda lp: (chance*ratio_corrected(kl_k3(lp, ref).sum(1), lp.sum(1), lp.sum(1).detach())).sum()),
                 wanted)
    part = grad(lambda lp: (chance*kl_k2(lp, ref).sum(1)).sum())
    assert_close(part[1], wanted[1])
    assert (part[0] - wanted[0]).abs().max() > .05


@pytest.mark.parametrize("step", [lambda: in_loss(kl_k2), lambda: in_loss(kl_k3), in_reward],
                         ids=["k2 in loss", "k3 in loss", "k1 in reward"])
def test_one_step_down_lowers_kl(step):
    assert full_kl(THETA - .1*step(), REF_THETA) < full_kl(THETA, REF_THETA) - .01


@pytest.mark.parametrize("k", [kl_k2, kl_k3])
def test_a_coefficient_changes_the_gradient(k):
    lp, mask = THETA.log_softmax(0)[None], torch.ones(1, 5, dtype=torch.bool)
    def grad(coef):
        x = lp.clone().requires_grad_()
        return torch.autograd.grad(aggregate(-x.exp(), mask) + coef*aggregate(k(x, REF[None], mask), mask), x)[0]
    assert (grad(.1) - grad(0.)).abs().max() > 1e-3
    assert_close(grad(.2) - grad(0.), 2*(grad(.1) - grad(0.)))


def test_values_k1_and_k3_are_unbiased():
    for k in (kl_k1, kl_k3): assert_close((P*k(P.log(), REF)).sum(), full_kl(THETA, REF_THETA))
    assert ((P*kl_k2(P.log(), REF)).sum() - full_kl(THETA, REF_THETA)).abs() > .01


def test_golden():
    lp, ref = torch.tensor([.5]).log(), torch.tensor([.25]).log()
    for k,wanted in zip(KS.values(), (math.log(2), math.log(2)**2/2, math.log(2) - .5), strict=True):
        assert_close(k(lp, ref).item(), wanted, atol=1e-6, rtol=0)
    assert_close(full_kl(torch.tensor([2., 1., 1.]).log(), torch.tensor([1., 1., 2.]).log()).item(), math.log(2)/4,
                 atol=1e-6, rtol=0)


# LAWS 5

@each
@pytest.mark.parametrize("junk", [0., 100., float("nan"), float("inf"), float("-inf")])
def test_what_is_masked_reaches_neither_value_nor_gradient(k, junk):
    lp, ref = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]) > 0
    runs = []
    for fill in (0., junk):
        x, r = (torch.where(mask, y, fill).requires_grad_() for y in (lp, ref))
        y = k(x, r, mask)
        runs.append((y, torch.autograd.grad(y.sin().sum(), x)[0]))
    for a,b in zip(*runs, strict=True): assert torch.equal(a, b) and (b[~mask] == 0).all()
    assert torch.equal(runs[1][0][mask], k(lp, ref)[mask])


@each
def test_gradient_only_to_the_policy(k):
    lp, ref = torch.randn(2, 3, 4, requires_grad=True)
    x, r = lp.detach().requires_grad_(), ref.detach().requires_grad_()
    grads = torch.autograd.grad(k(x, r).sum(), (x, r), allow_unused=True)
    assert grads[0] is not None and grads[1] is None
    logits, ref_logits = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    assert torch.autograd.grad(full_kl(logits, ref_logits).sum(), (logits, ref_logits), allow_unused=True)[1] is None


@pytest.mark.parametrize("junk", [100., float("nan"), float("inf"), float("-inf")])
def test_what_is_masked_reaches_neither_ratio_nor_exact_kl(junk):
    g = torch.Generator().manual_seed(1)
    columns, mask = torch.randn(3, 3, 4, generator=g,
                                dtype=torch.float64), torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]) > 0
    logits, runs = torch.randn(2, 3, 4, 5, generator=g, dtype=torch.float64), []
    for fill in (0., junk):
        lp, ref, old = (torch.where(mask, y, fill).requires_grad_() for y in columns)
        z, ref_z = (torch.where(mask[..., None], y, fill).requires_grad_() for y in logits)
        for y,x in ((ratio_corrected(kl_k3(lp, ref, mask), lp, old, mask), lp),
                    (ratio_corrected(lp, lp.detach(), old, mask), lp), (full_kl(z, ref_z, mask), z)):
            runs.append((y, torch.autograd.grad(y.sin().sum(), x)[0]))
    for a,b in zip(runs[:3], runs[3:], strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and (b[0][~mask] == 0).all()
        assert (b[1][~mask] == 0).all()
    assert_close(full_kl(*logits, mask)[mask], full_kl(*logits)[mask], atol=0, rtol=0)


def test_gradient_of_the_forms():
    x, y = (z.requires_grad_() for z in torch.randn(2, 3, 4, dtype=torch.float64))
    both = straight_through(x, y)
    assert torch.equal(both, x) and both.requires_grad
    grads = torch.autograd.grad(both.sin().sum(), (x, y), allow_unused=True)
    assert grads[0] is None
    assert_close(grads[1], x.detach().cos())
    old = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(ratio_corrected(kl_k3(x, y.detach()), x, old).sum(), old, allow_unused=True)[0] is None
    assert torch.autograd.gradcheck(lambda k, lp: ratio_corrected(k, lp, old.detach()), (x, y))
    assert torch.autograd.gradcheck(lambda z: full_kl(z, y.detach(), torch.tensor([True, False, True])), (x,))


def test_the_estimators_obey_every_law():
    for k in KS.values(): check_estimator(lambda logprobs, ref_logprobs, mask, k=k: k(logprobs, ref_logprobs, mask))
    check_estimator(lambda logprobs, old_logprobs, mask: ratio_corrected(logprobs, logprobs, old_logprobs, mask))
    check_estimator(lambda logprobs, ref_logprobs, mask: straight_through(kl_k3(logprobs, ref_logprobs, mask),
                                                                          kl_k2(logprobs, ref_logprobs, mask)))
    logits = dict(zip(("logits", "ref_logits"), torch.randn(2, 16, 16, 5, generator=torch.Generator().manual_seed(0),
                                                            dtype=torch.float64), strict=True))
    check_estimator(full_kl, logits)


@pytest.mark.parametrize("form", [lambda lp, old, ref, mask: ratio_corrected(kl_k3(lp, ref, mask), lp, old, mask),
                                  lambda lp, old, ref, mask: straight_through(
    kl_k3(lp, ref, mask), ratio_corrected(kl_k2(lp, ref, mask), lp.detach(), old, mask))])
def test_a_loss_with_any_form_can_be_cut(form):
    def loss(out, b):
        pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
        kl = form(out.logprobs, b.old_logprobs, b.ref_logprobs, b.mask)
        return pg + .1*aggregate(kl, b.mask, denom=b.n_tokens), metrics | dict(kl=mean_of(kl, b.mask))
    assert {"split", "mask", "metrics"} <= set(check_loss(loss))


# edges

@pytest.mark.parametrize("nats", [3., 5., 12., 19.])
def test_tokens_that_drifted_far_are_still_pulled_back(nats):
    lp = torch.tensor([-1. - nats], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.], dtype=torch.float64)
    for k,wanted in ((kl_k1, 1.), (kl_k2, -nats), (kl_k3, 1 - math.exp(nats))):
        assert_close(torch.autograd.grad(k(lp, ref).sum(), lp)[0].item(), wanted, rtol=1e-9, atol=0)


def test_what_clamping_the_value_costs(): # 2.611 nats: e^u − 1 − u = 10
    ref = torch.zeros(3, dtype=torch.float64)
    lp = torch.tensor([-2.6, -2.62, -5.], dtype=torch.float64, requires_grad=True)
    assert_close(torch.autograd.grad(kl_k3(lp, ref).clamp(max=10).sum(), lp)[0],
                 torch.tensor([1 - math.exp(2.6), 0., 0.], dtype=torch.float64))
    assert_close(torch.autograd.grad(kl_k3(lp, ref).sum(), lp)[0], 1 - (-lp.detach()).exp())
    # a bounded number to look at, the whole pull to train with
    kept = straight_through(kl_k3(lp, ref).clamp(max=10), kl_k3(lp, ref))
    assert_close(torch.autograd.grad(kept.sum(), lp)[0], 1 - (-lp.detach()).exp())


@each
@pytest.mark.parametrize("lp", [-1e6, float("-inf")])
def test_the_log_ratio_is_bounded(k, lp):
    x = torch.tensor([lp], requires_grad=True)
    value = k(x, torch.tensor([-1.]))
    assert_close(value, k(torch.tensor([-21.]), torch.tensor([-1.])))
    assert value.isfinite() and torch.autograd.grad(value.sum(), x)[0] == 0


def test_k3_keeps_its_digits_near_zero():
    x = torch.logspace(-7, -2, 50)
    assert_close(kl_k3(x, torch.zeros(50)).double(), torch.expm1(-x.double()) + x.double(), atol=1e-12, rtol=5e-3)
    assert (kl_k3(torch.randn(100_000)*1e-4, torch.zeros(100_000)) >= 0).all()


def test_full_kl_with_excluded_ids():
    hole, full = torch.tensor([[0., 1., -torch.inf]], requires_grad=True), torch.tensor([[1., 0., 2.]])
    kl = full_kl(hole, full)
    assert kl.isfinite() and torch.autograd.grad(kl.sum(), hole)[0].isfinite().all()
    assert_close(full_kl(full, hole), 1e15*full.softmax(-1)[:, 2]) # infinite: log 0 counts as −10¹⁵
    assert full_kl(hole, hole) == 0


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_single_precision(k, dtype):
    lp, ref = torch.randn(2, 3, 4)
    wide = torch.promote_types(dtype, torch.float32)
    for f in (k, full_kl, straight_through, lambda x, y: ratio_corrected(x, y, x)):
        assert f(lp.to(dtype), ref.to(dtype)).dtype is wide
        assert_close(f(lp.to(dtype), ref.to(dtype)), f(lp.to(dtype).to(wide), ref.to(dtype).to(wide)))


@each
def test_compile_in_one_graph(k):
    lp, ref = torch.randn(2, 3, 4)
    mask = lp > 0
    for f,args in ((k, (lp, ref)), (k, (lp, ref, mask)), (full_kl, (lp, ref)), (full_kl, (lp, ref, mask[:, 0])),
                   (straight_through, (lp, ref)),
                   (ratio_corrected, (lp, ref, lp)), (ratio_corrected, (lp, ref, lp, mask))):
        assert_close(torch.compile(f, fullgraph=True, backend="eager")(*args), f(*args))


@each
def test_no_host_sync(k):
    # reading a meta tensor raises
    lp, mask = torch.zeros(3, 4, device="meta"), torch.ones(3, 4, dtype=torch.bool, device="meta")
    assert k(lp, lp, mask).shape == (3, 4) and full_kl(lp, lp).shape == full_kl(lp, lp, mask[:, 0]).shape == (3,)
    assert straight_through(lp, lp).shape == ratio_corrected(lp, lp, lp, mask).shape == (3, 4)


@each
def test_errors_say_who_and_what(k):
    lp, mask = torch.zeros(4, 7), torch.ones(4, 7, dtype=torch.bool)
    with pytest.raises(ValueError) as e: k(lp, lp[:, 0], mask)
    assert (str(e.value)
            == f"{k.__name__}: ref_logprobs is [4], logprobs is [4, 7]; spread row values with at_tokens(ref_logprobs, "
            "mask)")
    with pytest.raises(ValueError, match=f"{k.__name__}: logprobs is \\[4, 7\\], mask is \\[4, 6\\]"):
        k(lp, lp, mask[:, 1:])
    with pytest.raises(TypeError, match=f"{k.__name__}: mask is int64; masks are Bool"): k(lp, lp, mask.long())
    with pytest.raises(ValueError, match="full_kl: ref_logits is"): full_kl(lp, lp[:, 1:])
    with pytest.raises(ValueError, match="full_kl: logits.*is \\[4\\], mask is \\[4, 7\\]"): full_kl(lp, lp, mask)
    with pytest.raises(ValueError, match="straight_through: gradient is \\[4\\], value is \\[4, 7\\]"):
        straight_through(lp, lp[:, 0])
    with pytest.raises(ValueError,
                       match="ratio_corrected: old_logprobs is \\[4\\], kl is \\[4, 7\\]; spread row values"):
        ratio_corrected(lp, lp, lp[:, 0])
    with pytest.raises(TypeError, match="ratio_corrected: mask is int64"): ratio_corrected(lp, lp, lp, mask.long())


# the controller

def test_adaptive_kl_coef():
    kw = dict(target=1., horizon=1000)
    assert_close(adaptive_kl_coef(.1, 2., n_rows=1000, **kw), .12)
    assert_close(adaptive_kl_coef(.1, 2., n_rows=100, **kw), .102)
    assert_close(adaptive_kl_coef(.1, -5., n_rows=1000, **kw), .08)
    assert_close(adaptive_kl_coef(.1, .9, n_rows=1000, **kw), .09)
    assert_close(adaptive_kl_coef(.1, 2.2, target=2., horizon=1000, n_rows=1000), .11)
    assert adaptive_kl_coef(.1, 1., n_rows=1000, **kw) == .1


def test_adaptive_kl_coef_reads_metrics_and_survives_an_empty_step():
    x, mask = torch.full((2, 3), 2.), torch.ones(2, 3, dtype=torch.bool)
    assert_close(adaptive_kl_coef(.1, mean_of(x, mask), target=1., horizon=10, n_rows=10), .12)
    assert adaptive_kl_coef(.1, mean_of(x, mask & False), target=1., horizon=10, n_rows=10) == .1
    assert type(adaptive_kl_coef(.1, Mean(torch.tensor(3.), 2), target=1., horizon=10, n_rows=1)) is float


@pytest.mark.parametrize("kw", [dict(target=0., horizon=10), dict(target=-1., horizon=10), dict(target=1., horizon=0)])
def test_adaptive_kl_coef_refuses(kw):
    with pytest.raises(ValueError, match="adaptive_kl_coef: target is .*both must be positive"):
        adaptive_kl_coef(.1, 1., n_rows=1, **kw)
