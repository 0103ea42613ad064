"Policy, value and SFT losses: goldens, oracles, laws, compilation, derivatives and errors (LAWS 1, 5, 8, 13, 29)."
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.losses.distill import sft_loss
from rlblocks.arithmetic.kl import kl_k2, kl_k3
from rlblocks.arithmetic.masked import aggregate, masked_mean, mean_of, merge
from rlblocks.losses.policy import assert_on_policy, grpo_loss, ppo_loss
from rlblocks.testing.oracles import naive_aggregate, naive_ppo_loss, naive_value_loss
from rlblocks.testing.laws import check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.value import explained_variance, value_loss

LOSSES = {
    "ppo": ppo_loss,
    "ppo rows": partial(ppo_loss, over="rows"),
    "ppo asymmetric dual": partial(ppo_loss, clip_low=.1, clip_high=.28, dual_clip=1.5),
    "grpo": grpo_loss,
    "grpo tokens": partial(grpo_loss, over="tokens", kl_coef=.5),
    "value": value_loss,
    "value free": partial(value_loss, clip=None),
    "sft": sft_loss,
    "sft rows": partial(sft_loss, over="rows"),
}
COLUMNS = dict(ppo=("logprobs", "old_logprobs", "advantages", "mask"),
               grpo=("logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask"),
               value=("values", "old_values", "returns", "mask"), sft=("logprobs", "mask"))
every_loss = pytest.mark.parametrize("name", LOSSES)


def columns(name, seed=0, dtype=torch.float64):
    cols = sample_columns(seed=seed)
    return [cols[k].to(dtype) if cols[k].is_floating_point() else cols[k] for k in COLUMNS[name.split()[0]]]


# -- laws


def test_closures_obey_every_law():
    def grpo(out, b):
        pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, clip_high=.28, denom=b.n_tokens)
        kl = kl_k3(out.logprobs, b.ref_logprobs, b.mask)
        return pg + .01*masked_mean(kl, b.mask, denom=b.n_tokens), metrics | dict(kl=mean_of(kl, b.mask))

    def shared_trunk(out, b):
        pg, m = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, over="rows", denom=b)
        vf, n = value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens)
        return pg + .5*vf - .01*masked_mean(out.entropy, b.mask, denom=b.n_tokens), merge(m, n)

    # a KL term, a value loss and an entropy bonus hide nothing
    assert "reinforce" in check_loss(grpo) and "reinforce" in check_loss(shared_trunk)


# -- numbers

def test_mean_of_means_golden(): # LAWS 1: lengths 2 and 6, loss 1 on the short row, 0 on the long
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    A, zero = torch.tensor([[-1.], [0.]]).expand(2, 6).double(), torch.zeros(2, 6).double()
    assert ppo_loss(zero, zero, A, mask)[0] == .25
    assert sum(ppo_loss(zero[i:i+1], zero[i:i+1], A[i:i+1], mask[i:i+1], denom=8)[0] for i in (0, 1)) == .25
    assert ppo_loss(zero, zero, A, mask, over="rows")[0] == .5


@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_filtered_row_leaves_numerator_and_denominator(over): # LAWS 13: 4 + 4 kept tokens, 8 truncated, loss 1 a token
    mask = (torch.arange(8) < 4) & torch.tensor([[True], [True], [False]])
    zero = torch.zeros(3, 8)
    loss, metrics = ppo_loss(zero, zero, zero-1, mask, over=over)
    assert loss == 1 and metrics["clip_frac"].count == 8


@every_loss
def test_nothing_chosen_is_zero_with_finite_gradient(name):
    first, *rest, mask = columns(name)
    for denom in (None, 0., 12., torch.tensor(0)):
        x = first.clone().requires_grad_()
        loss, metrics = LOSSES[name](x, *rest, torch.zeros_like(mask), denom=denom)
        loss.backward()
        assert loss == 0 and not x.grad.any()
        assert all(math.isnan(float(m)) for k, m in metrics.items() if k != "ratio_max")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kw", [{}, dict(over="rows"), dict(denom=37.), dict(denom=torch.tensor(5), over="rows"),
                                dict(clip_low=.1, clip_high=.28, dual_clip=1.2)], ids=str)
def test_ppo_equals_oracle(seed, kw):
    args = columns("ppo", seed)
    loss = ppo_loss(*args, **kw)[0]
    assert abs(loss) > 1e-4 # parity of zeros proves nothing
    assert_close(loss, naive_ppo_loss(*args, **kw), rtol=1e-12, atol=0)
    assert_close(ppo_loss(*columns("ppo", seed, torch.float32), **kw)[0].double(), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_grpo_is_surrogate_plus_k3(over):
    lp, old, ref, A, mask = columns("grpo")
    k3 = torch.tensor([[math.exp(r-p) - (r-p) - 1 for p, r in zip(ps, rs, strict=True)]
                       for ps, rs in zip(lp.tolist(), ref.tolist(), strict=True)]).double()
    loss, metrics = grpo_loss(lp, old, ref, A, mask, kl_coef=.5, over=over, denom=7.)
    assert_close(loss, naive_ppo_loss(lp, old, A, mask, over=over,
                                      denom=7) + .5*naive_aggregate(k3, mask, over=over, denom=7.), rtol=1e-6, atol=0)
    assert_close(float(metrics["kl"]), naive_aggregate(k3, mask).item(), rtol=1e-6, atol=0)
    assert_close(grpo_loss(lp, old, ref, A, mask, kl_coef=0.)[0], ppo_loss(lp, old, A, mask, over="rows")[0], rtol=0,
                 atol=0)


@pytest.mark.parametrize("kw", [{}, dict(clip=None), dict(clip=.5, denom=9.)], ids=str)
def test_value_equals_oracle(kw):
    for seed in range(5):
        assert_close(value_loss(*columns("value", seed), **kw)[0], naive_value_loss(*columns("value", seed), **kw),
                     rtol=1e-12, atol=0)


@pytest.mark.parametrize("kw", [{}, dict(over="rows"), dict(denom=9.)], ids=str)
def test_sft_equals_oracle(kw):
    lp, mask = columns("sft")
    loss, metrics = sft_loss(lp, mask, **kw)
    assert_close(loss, naive_aggregate(-lp, mask, **kw))
    assert_close(float(metrics["nll"]), -lp[mask].mean().item())


def test_ppo_metrics_by_hand():
    ratio = torch.tensor([[2., .5, .5, 2., 4., 1., 1., math.nan]])
    A = torch.tensor([[1., 1., -1., -1., -1., 1., 0., math.nan]])
    mask = torch.tensor([[True]*7 + [False]])
    metrics = ppo_loss(ratio.log(), torch.zeros(1, 8), A, mask, dual_clip=3.)[1]
    expected = dict(clip_frac_high=1/7, clip_frac_low=1/7, clip_frac_dual=1/7, clip_frac=3/7, ratio=11/7, ratio_max=4.,
                    approx_kl=sum(r-1-math.log(r) for r in (2, .5, .5, 2, 4))/7)
    assert metrics.keys() == expected.keys()
    for k, x in expected.items(): assert_close(float(metrics[k]), x, rtol=1e-6, atol=0, msg=k)


def test_share_without_gradient_is_clip_frac():
    lp, old, A, mask = columns("ppo")
    lp.requires_grad_()
    loss, metrics = ppo_loss(lp, old, A, mask, dual_clip=1.2)
    loss.backward()
    assert float(metrics["clip_frac"]) == float((lp.grad[mask] == 0).double().mean()) > 0


def test_the_log_ratio_is_clamped_and_the_loss_is_not():
    lp = torch.tensor([[1000., -1000., 19.9, -math.inf]], requires_grad=True)
    loss, metrics = ppo_loss(lp, torch.zeros(1, 4), -torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))
    loss.backward()
    assert loss > math.exp(20)/4 and loss.isfinite() and lp.grad.isfinite().all() and lp.grad[0, 2] > 1e7
    assert all(math.isfinite(float(m)) for m in metrics.values())


# -- metrics of both losses travel in one dict

def test_metric_names_do_not_collide():
    assert not ppo_loss(*columns("ppo"))[1].keys() & value_loss(*columns("value"))[1].keys()


def test_explained_variance_merges_exactly():
    args = columns("value")
    R, V = args[2][args[3]], args[0][args[3]]
    expected = 1 - float((R-V).var()/R.var())
    for rows in (1, 3, 16):
        parts = [value_loss(*part)[1] for part in zip(*(x.split(rows) for x in args), strict=True)]
        assert_close(explained_variance(merge(*parts)), expected, rtol=1e-9, atol=0)
    still = torch.ones(1, 3)
    assert math.isnan(explained_variance(value_loss(still, still, still, still > 0)[1]))



# -- errors: who, what came, what was wanted, how to fix

@every_loss
def test_row_values_are_not_broadcast(name):
    *args, mask = columns(name)
    who = name.split()[0] + "_loss"
    with pytest.raises(ValueError,
                       match=who + r": \w+ is \[16\], .* is \[16, 16\]; spread row values with at_tokens\(\w+, mask\)"):
        LOSSES[name](*args[:-1], args[-1][:, 0], mask)
    with pytest.raises(ValueError, match=who): LOSSES[name](*(x[:, 1:] for x in args), mask)


@every_loss
def test_an_int_mask_is_refused(name):
    *args, mask = columns(name)
    with pytest.raises(TypeError, match=f"{name.split()[0]}_loss: mask is int64; masks are Bool"):
        LOSSES[name](*args, mask.long())


def test_hyper_parameters_out_of_range():
    args = columns("ppo")
    with pytest.raises(ValueError, match=r"clip_low is 1.2, clip_high is 0.2; they are distances from ratio 1"):
        ppo_loss(*args, clip_low=1.2)
    with pytest.raises(ValueError, match=r"clip_high is -0.1"): ppo_loss(*args, clip_high=-.1)
    with pytest.raises(ValueError, match=r"dual_clip is 0.5; .* above 1"): ppo_loss(*args, dual_clip=.5)
    with pytest.raises(ValueError, match="aggregate: over is 'batch'"): ppo_loss(*args, over="batch")
    with pytest.raises(TypeError): ppo_loss(*args, .2) # numbers are keywords


# -- LAWS 29

def scored(model, tokens, dtype):
    logits = model(tokens).to(dtype).float().log_softmax(-1)
    lp = logits[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(lp, (1, 0))


@pytest.fixture
def model_and_tokens():
    g = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Dropout(.1), torch.nn.Linear(32, 50))
    for p in model.parameters(): torch.nn.init.normal_(p, generator=g)
    return model, torch.randint(0, 50, (8, 20), generator=g)


def test_on_policy_model_passes(model_and_tokens):
    model, tokens = model_and_tokens
    mask = (torch.arange(20) > 4).expand(8, 20)
    model.eval()
    lp = scored(model, tokens, torch.float32)
    # other micro-batches
    assert assert_on_policy(lp, torch.cat([scored(model, x, torch.float32) for x in tokens.split(3)]), mask) < 1e-4
    low = scored(model, tokens, torch.bfloat16)
    off = assert_on_policy(low, lp, mask, tol=.1, share=.95)
    assert 0 < off < .1
    with pytest.raises(AssertionError, match="use tol=0.02, share=0.95"): assert_on_policy(low, lp, mask)


def test_dropout_trips_the_guard(model_and_tokens):
    model, tokens = model_and_tokens
    mask = (torch.arange(20) > 4).expand(8, 20)
    old = scored(model.eval(), tokens, torch.float32)
    new = scored(model.train(), tokens, torch.float32)
    with pytest.raises(AssertionError) as e: assert_on_policy(new, old, mask)
    for cause in ("dropout", "sampler's", "temperature", "attention kernel", "padding", "optimizer step"):
        assert cause in str(e.value)
    worst = torch.where(mask, (new-old).expm1().abs(), 0.).argmax().item()
    assert f"worst at row {worst // 20}, token {worst % 20}" in str(e.value)


def test_on_policy_share_is_a_quantile():
    old, mask = torch.zeros(1, 100), torch.ones(1, 100, dtype=torch.bool)
    new = torch.linspace(.001, .1, 100).log1p()[None]
    assert assert_on_policy(new, old, mask, tol=.0951, share=.95) == pytest.approx(.095, rel=1e-4)
    with pytest.raises(AssertionError, match="95% of 100 counted tokens is up to 0.095"):
        assert_on_policy(new, old, mask, tol=.094, share=.95)


def test_k2_in_the_loss_is_one_line(): # the line that the text of grpo_loss recommends
    lp, old, ref, A, mask = columns("grpo")
    loss = ppo_loss(lp, old, A, mask, over="rows")[0] + .04*aggregate(kl_k2(lp, ref, mask), mask, over="rows")
    assert loss.isfinite()
