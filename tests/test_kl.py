"""Laws of the divergence: which gradient each estimator has, by exact enumeration, and nothing from under the mask."""
import math

import pytest
import torch
from torch.testing import assert_close

from rlblocks.kl import adaptive_kl_coef, full_kl, kl_k1, kl_k2, kl_k3
from rlblocks.masked import Mean, aggregate, mean_of

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


@pytest.mark.parametrize("step", [lambda: in_loss(kl_k2), lambda: in_loss(kl_k3), in_reward], ids=["k2 in loss", "k3 in loss", "k1 in reward"])
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
    for k,wanted in zip(KS.values(), (math.log(2), math.log(2)**2/2, math.log(2) - .5), strict=True): assert_close(k(lp, ref).item(), wanted, atol=1e-6, rtol=0)
    assert_close(full_kl(torch.tensor([2., 1., 1.]).log(), torch.tensor([1., 1., 2.]).log()).item(), math.log(2)/4, atol=1e-6, rtol=0)


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


# edges

@pytest.mark.parametrize("nats", [3., 5., 12., 19.])
def test_tokens_that_drifted_far_are_still_pulled_back(nats):
    lp = torch.tensor([-1. - nats], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.], dtype=torch.float64)
    for k,wanted in ((kl_k1, 1.), (kl_k2, -nats), (kl_k3, 1 - math.exp(nats))):
        assert_close(torch.autograd.grad(k(lp, ref).sum(), lp)[0].item(), wanted, rtol=1e-9, atol=0)


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
    assert full_kl(full, hole) == torch.inf and full_kl(hole, hole) == 0


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_single_precision(k, dtype):
    lp, ref = torch.randn(2, 3, 4)
    wide = torch.promote_types(dtype, torch.float32)
    for f in (k, full_kl):
        assert f(lp.to(dtype), ref.to(dtype)).dtype is wide
        assert_close(f(lp.to(dtype), ref.to(dtype)), f(lp.to(dtype).to(wide), ref.to(dtype).to(wide)))


@each
def test_compile_in_one_graph(k):
    lp, ref = torch.randn(2, 3, 4)
    mask = lp > 0
    for f,args in ((k, (lp, ref)), (k, (lp, ref, mask)), (full_kl, (lp, ref))):
        assert_close(torch.compile(f, fullgraph=True, backend="eager")(*args), f(*args))


@each
def test_no_host_sync(k):
    lp, mask = torch.zeros(3, 4, device="meta"), torch.ones(3, 4, dtype=torch.bool, device="meta") # reading a meta tensor raises
    assert k(lp, lp, mask).shape == (3, 4) and full_kl(lp, lp).shape == (3,)


@each
def test_errors_say_who_and_what(k):
    lp, mask = torch.zeros(4, 7), torch.ones(4, 7, dtype=torch.bool)
    with pytest.raises(ValueError) as e: k(lp, lp[:, 0], mask)
    assert str(e.value) == f"{k.__name__}: ref_logprobs is [4], logprobs is [4, 7]; spread row values with at_tokens(ref_logprobs, mask)"
    with pytest.raises(ValueError, match=f"{k.__name__}: logprobs is \\[4, 7\\], mask is \\[4, 6\\]"): k(lp, lp, mask[:, 1:])
    with pytest.raises(TypeError, match=f"{k.__name__}: mask is int64; masks are Bool"): k(lp, lp, mask.long())
    with pytest.raises(ValueError, match="full_kl: ref_logits is"): full_kl(lp, lp[:, 1:])


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
    with pytest.raises(ValueError, match="adaptive_kl_coef: target is .*both must be positive"): adaptive_kl_coef(.1, 1., n_rows=1, **kw)
