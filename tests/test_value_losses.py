"""Critics that regress, with Huber's error too, and critics that classify: numbers, oracles, laws, compilation,
derivatives and errors."""
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.arithmetic.masked import merge
from rlblocks.testing.oracles import naive_aggregate
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.value import (classification_value_loss, expected_value, explained_variance, hl_gauss, two_hot,
                                   value_loss, value_metrics)

BINS = torch.linspace(-3, 3, 7, dtype=torch.float64)
TARGETS = dict(two_hot=two_hot, hl_gauss=hl_gauss, narrow=partial(hl_gauss, sigma=.3))
every_target = pytest.mark.parametrize("target", TARGETS)
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])


def columns(seed=0, dtype=torch.float64):
    cols, g = sample_columns(seed=seed), torch.Generator().manual_seed(seed)
    z = torch.randn(16, 16, 7, generator=g, dtype=torch.float64)
    return [x.to(dtype) if x.is_floating_point() else x for x in (z, hl_gauss(cols["returns"], BINS), cols["mask"])]


def value_columns(dtype=torch.float64):
    cols = sample_columns()
    return [cols[k].to(dtype) if k != "mask" else cols[k] for k in ("values", "old_values", "returns", "mask")]


# -- Huber

def test_huber_by_hand():
    "Errors ½, −3 and 1 with δ = 1: ⅛, 2½ and ½; the gradient is the error, held within ±δ."
    V, on = torch.tensor([[.5, -3., 1.]]).requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
    loss, _ = value_loss(V, torch.zeros(1, 3), torch.zeros(1, 3), on, clip=None, huber=1.)
    loss.backward()
    assert_close(loss.item(), 3.125/3)
    assert_close(V.grad, torch.tensor([[.5, -1., 1.]])/3)


def test_huber_inside_the_clip():
    """V_old 0, target 2, ε = .2, δ = ½: V = 1 is held at .2, whose error 1.8 costs ½·(1.8 − ¼); V = −1 has error 3
    and costs ½·(3 − ¼)."""
    V, on = torch.tensor([[1., -1.]]).requires_grad_(), torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = value_loss(V, torch.zeros(1, 2), torch.full((1, 2), 2.), on, huber=.5)
    loss.backward()
    assert_close(loss.item(), (.775 + 1.375)/2)
    assert_close(V.grad, torch.tensor([[0., -.25]]))
    assert float(metrics["value_clip_frac"]) == .5 and float(metrics["value_error"]) == 5


def test_rounding_is_no_clipping():
    """(V − V_old) + (V_old − R) is V − R but for rounding: values that stay in the region are not counted, those
    that leave it for the worse are."""
    g = torch.Generator().manual_seed(0)
    V, R, mask = torch.randn(8, 20, generator=g), torch.randn(8, 20, generator=g), torch.ones(8, 20, dtype=torch.bool)
    old = V + .01*torch.randn(8, 20, generator=g)
    assert float(value_loss(V, old, R, mask)[1]["value_clip_frac"]) == 0 == float(
        value_loss(V, old, R, mask, clip=None)[1]["value_clip_frac"])
    far = torch.arange(160).view(8, 20) % 4 == 0
    moved = torch.where(far, old + .3*(R - old).sign(), V)       # three tenths towards R, of which two count
    assert float(value_loss(moved, old, torch.where(far, R + 2*(R - old).sign(), R), mask)[1]["value_clip_frac"]) == .25


def test_a_large_delta_is_the_square():
    for clip in (None, .2):
        assert value_loss(*value_columns(), clip=clip, huber=1e6)[0] == value_loss(*value_columns(), clip=clip)[0]


def test_delta_is_positive():
    for huber in (0., -1.):
        with pytest.raises(ValueError, match=rf"value_loss: huber is {huber}; .*None = all"):
            value_loss(*value_columns(), huber=huber)


# -- metrics of any critic

def test_metrics_of_a_classifying_critic_merge_to_its_explained_variance():
    z, _, mask = columns()
    R = sample_columns()["returns"]
    told = expected_value(z, BINS)
    parts = merge(*(value_metrics(*x) for x in zip(told.split(3), R.split(3), mask.split(3), strict=True)))
    assert_close(explained_variance(parts), 1 - float((R-told)[mask].var()/R[mask].var()), rtol=1e-9, atol=0)
    masked = value_metrics(told.masked_fill(~mask, math.nan), R.masked_fill(~mask, math.inf), mask)
    assert {k: float(x) for k, x in masked.items()} == {k: float(x) for k, x in value_metrics(told, R, mask).items()}
    assert not any(x.total.requires_grad for x in value_metrics(told.requires_grad_(), R, mask).values())


# -- targets

def test_two_hot_by_hand():
    assert_close(two_hot(torch.tensor([1.5, 1., 0., 3., 7., -2., .25]), torch.tensor([0., 1., 3.])), torch.tensor(
        [[0., .75, .25], [0., 1., 0.], [1., 0., 0.], [0., 0., 1.], [0., 0., 1.], [1., 0., 0.], [.75, .25, 0.]]))


def naive_two_hot(R, bins):
    R, p = min(max(R, bins[0]), bins[-1]), [0.]*len(bins)
    for k in range(len(bins)-1):
        if bins[k] <= R <= bins[k+1]:
            p = [0.]*len(bins)
            p[k+1] = (R-bins[k])/(bins[k+1]-bins[k])
            p[k] = 1-p[k+1]
    return p


def naive_hl_gauss(R, bins, sigma):
    R, half_step = min(max(R, bins[0]), bins[-1]), (bins[1]-bins[0])/2
    p = [(math.erf((b+half_step-R)/sigma/2**.5) - math.erf((b-half_step-R)/sigma/2**.5))/2 for b in bins]
    return [x/math.fsum(p) for x in p]


@pytest.mark.parametrize("seed", range(3))
def test_targets_equal_oracles(seed):
    g = torch.Generator().manual_seed(seed)
    R, uneven = 2.5*torch.randn(40, generator=g,
                                dtype=torch.float64), torch.randn(9, generator=g, dtype=torch.float64).sort().values
    assert (R.abs() > 3).any()
    assert_close(two_hot(R, uneven),
                 torch.tensor([naive_two_hot(r, uneven.tolist()) for r in R.tolist()], dtype=torch.float64))
    assert_close(hl_gauss(R, BINS),
                 torch.tensor([naive_hl_gauss(r, BINS.tolist(), .75) for r in R.tolist()], dtype=torch.float64))
    assert_close(hl_gauss(R, BINS, sigma=2.),
                 torch.tensor([naive_hl_gauss(r, BINS.tolist(), 2.) for r in R.tolist()], dtype=torch.float64))


@every_target
@half
def test_targets_are_distributions_in_at_least_single_precision(target, dtype):
    R = sample_columns()["returns"].to(dtype)
    p = TARGETS[target](R, BINS)
    assert p.shape == (16, 16, 7) and p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (p >= 0).all()
    assert_close(p.sum(-1), torch.ones_like(R, dtype=p.dtype))
    assert not TARGETS[target](R.requires_grad_(), BINS).requires_grad # targets are data


def test_the_mean_is_exact_within_the_support():
    R = torch.linspace(-3, 3, 301, dtype=torch.float64)
    assert_close(expected_value(two_hot(R, BINS).log(), BINS), R)
    assert_close(expected_value(two_hot(3*R, BINS).log(), BINS), (3*R).clamp(-3, 3))
    wide = torch.linspace(-10, 10, 21, dtype=torch.float64)
    assert (expected_value(hl_gauss(R, wide).log(), wide) - R).abs().max() < 2e-5 # π⁻¹e^{−2π²σ²} of a bin


def test_bins_come_in_twos_and_sigma_is_positive():
    R = torch.zeros(3)
    for f in (two_hot, hl_gauss):
        with pytest.raises(ValueError, match=f"{f.__name__}: bins has 1 value; at least two"): f(R, torch.zeros(1))
    with pytest.raises(ValueError, match="hl_gauss: sigma is 0.0"): hl_gauss(R, torch.arange(3.), sigma=0.)


# -- the classifying critic

def test_classification_by_hand():
    z, on = torch.tensor([[[0., math.log(3)], [5., 5.]]]).requires_grad_(), torch.tensor([[True, False]])
    loss, metrics = classification_value_loss(z, torch.tensor([[[1., 0.], [math.nan, 0.]]]), on)
    loss.backward()
    assert_close([loss.item(), float(metrics["value_ce"]), float(metrics["value_kl"])], [math.log(4)]*3)
    assert_close(z.grad, torch.tensor([[[-.75, .75], [0., 0.]]]))


@pytest.mark.parametrize("kw", [{}, dict(denom=37.)], ids=str)
def test_classification_equals_oracle(kw):
    z, p, mask = columns()
    slow = torch.zeros(16, 16, dtype=torch.float64)
    for b in range(16):
        for t in range(16):
            log_Z = math.log(math.fsum(math.exp(x) for x in z[b, t].tolist()))
            slow[b, t] = -math.fsum(q*(x-log_Z) for q, x in zip(p[b, t].tolist(), z[b, t].tolist(), strict=True))
    assert_close(classification_value_loss(z, p, mask, **kw)[0], naive_aggregate(slow, mask, **kw), rtol=1e-12, atol=0)


def test_the_learnt_critic_has_no_divergence_left():
    _, p, mask = columns()
    z = p.log().requires_grad_()
    loss, metrics = classification_value_loss(z, p, mask)
    loss.backward()
    assert loss > .5 and abs(float(metrics["value_kl"])) < 1e-12 and z.grad.abs().max() < 1e-12


def test_a_bin_that_cannot_be_said_costs_only_if_wanted():
    z, on = torch.tensor([[[0., 0., -math.inf]]]), torch.tensor([[True]])
    assert_close(classification_value_loss(z, torch.tensor([[[1., 0., 0.]]]), on)[0].item(), math.log(2))
    # infinite: log 0 counts as −10¹⁵
    assert_close(classification_value_loss(z, torch.tensor([[[.5, 0., .5]]]), on)[0], torch.tensor(5e14))


def test_errors_name_the_odd_one():
    z, p, mask = columns()
    with pytest.raises(ValueError,
                       match=r"classification_value_loss: targets is \[16, 16, 6\], logits is \[16, 16, 7\]"):
        classification_value_loss(z, p[..., 1:], mask)
    with pytest.raises(ValueError,
                       match=r"classification_value_loss: logits\[..., 0\] is \[16, 16\], mask is \[16, 15\]"):
        classification_value_loss(z, p, mask[:, 1:])
    with pytest.raises(TypeError, match="classification_value_loss: mask is int64"):
        classification_value_loss(z, p, mask.long())
