"""PRIME's implicit process rewards: hand numbers, the published value, the oracle, neighbours, and why the terms are
rewards of steps."""
import math

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from rlblocks.losses.implicit_rewards import implicit_process_rewards, implicit_reward_loss
from rlblocks.arithmetic.kl import kl_k1
from rlblocks.arithmetic.masked import merge
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.unpaired import bco_loss

nan, inf = math.nan, math.inf


def columns(seed=0, soft=False):
    c = sample_columns(seed=seed)
    return c["logprobs"], c["ref_logprobs"], c["scores"].sigmoid() if soft else (c["scores"] > 0).double(), c["mask"]


def naive(lp, ref, scores, mask, beta):
    "(loss, accuracy, mean reward of the right, of the wrong) in Python floats, rows without a chosen token left out."
    found = []
    for b, row in enumerate(mask.tolist()):
        if any(row):
            found.append((beta*sum(lp[b, t].item() - ref[b, t].item() for t, on in enumerate(row) if on),
                          scores[b].item()))
    def ce(r, s): return s*math.log1p(math.exp(-r)) + (1 - s)*math.log1p(math.exp(r))
    def mean(x): return sum(x)/len(x)
    right, wrong = [r for r, s in found if s > .5], [r for r, s in found if s <= .5]
    return mean([ce(r, s)
                 for r, s in found]), mean([float((r > 0) == (s > .5)) for r, s in found]), mean(right), mean(wrong)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("soft", [False, True])
def test_equals_oracle(seed, soft):
    args = columns(seed, soft)
    loss, metrics = implicit_reward_loss(*args, beta=.3)
    assert_close([loss.item(), *(float(m) for m in metrics.values())], list(naive(*args, .3)))
    assert list(metrics) == ["implicit_accuracy", "implicit_right", "implicit_wrong"]


def test_by_hand(): # log 3 and 0 nats for a right and a wrong answer
    ratio = torch.tensor([[2., 1.5, 7.], [1., nan, nan], [nan]*3])
    on = torch.tensor([[True, True, False], [True, False, False], [False]*3])
    lp = ratio.log().requires_grad_()
    loss, metrics = implicit_reward_loss(lp, torch.zeros(3, 3), torch.tensor([1., 0., nan]), on, beta=1.)
    assert_close(loss.item(), (math.log(4/3) + math.log(2))/2, atol=1e-6, rtol=0)
    loss.backward()
    assert_close(lp.grad, torch.tensor([[-1/8, -1/8, 0.], [1/4, 0., 0.], [0.]*3]))
    assert_close([float(m) for m in metrics.values()], [1., math.log(3), 0.], atol=1e-6, rtol=0)
    assert_close(implicit_process_rewards(ratio.log(), torch.zeros(3, 3), on, beta=.5),
                 torch.where(on, ratio.log()/2, 0.))


def test_the_published_value(): # tests of PRIME's compute_ce_dpo_loss_rm: log-ratios of tokens, soft outcomes, β = .1
    d = torch.tensor([[.1, .3, .6, -.1, .2, .5, .1, .3, .6, -.1], [.1, .3, .6, -.4, .9, -.1, .2, .5, .1, .3],
                      [.1, .3, .6, -.1, .2, .7, 1., .2, .5, .1], [.1, .3, .6, -.1, .2, .5, .1, .5, .1, .3]])
    loss, _ = implicit_reward_loss(d, torch.zeros(4, 10), torch.tensor([.8, .3, 1., 0.]), torch.ones(4, 10).bool(),
                                   beta=.1)
    assert_close(loss.item(), 0.684428155422210693359375, atol=2e-7, rtol=0) # printed from single precision


def test_neighbours():
    lp, ref, s, mask = columns()
    there = mask.any(1)
    answers = [torch.where(mask, x, 0.).sum(1)[there] for x in (lp, ref)]
    ours = implicit_reward_loss(lp, ref, s, mask, beta=.3)[0]
    assert_close(ours, bco_loss(*answers, s[there] > .5, delta=0., beta=.3)[0]) # δ = 0
    assert_close(ours, binary_cross_entropy_with_logits(.3*(answers[0] - answers[1]), s[there]))
    assert torch.equal(implicit_process_rewards(lp, ref, mask, beta=.3), .3*kl_k1(lp, ref, mask))
    assert_close(implicit_reward_loss(ref, ref, s, mask)[0].item(), math.log(2)) # a copy of the reference knows nothing


def test_a_token_raises_the_soft_value_by_its_reward(): # Yuan et al. 2024: any reward of answers, fitted exactly
    g = torch.Generator().manual_seed(1)
    ref, r = torch.randn(2, 4, 4, 4, generator=g, dtype=torch.float64)
    beta, ref = .3, ref.flatten().log_softmax(0).view(4, 4, 4)
    fit = (ref + r/beta).flatten().log_softmax(0).view(4, 4, 4) # log π_φ of answers of three tokens
    def steps(joint): # log-probs of each token given those before it
        one, two = joint.logsumexp((1, 2)), joint.logsumexp(2)
        return one, two - one[:, None], joint - two[:, :, None]
    def value(dims): return beta*((ref + r/beta).logsumexp(dims) - ref.logsumexp(dims))
    q = [value((0, 1, 2)), value((1, 2)), value((2,)), r]
    for t, (a, b) in enumerate(zip(steps(fit), steps(ref), strict=True)):
        rewards = implicit_process_rewards(a.reshape(1, -1), b.reshape(1, -1), torch.ones(1, a.numel()).bool(),
                                           beta=beta).view_as(a)
        assert_close(rewards, q[t+1] - (q[t] if t == 0 else q[t][..., None]))


def test_laws():
    *_, mask = args = columns()
    check_estimator(implicit_process_rewards, beta=.2)
    for soft in (False, True):
        laws = check_loss(implicit_reward_loss, dict(scores=columns(soft=soft)[2]), denom="n_rows", beta=.2)
        assert {"split", "mask", "empty", "empty_rows", "metrics", "precision", "gradient"} <= set(laws)
    whole = implicit_reward_loss(*args)
    parts = [implicit_reward_loss(*x, denom=mask.any(1).sum()) for x in zip(*(c.split(3) for c in args), strict=True)]
    assert_close(sum(p[0] for p in parts), whole[0])
    assert_close({k: float(m) for k, m in merge(*(p[1] for p in parts)).items()},
                 {k: float(m) for k, m in whole[1].items()})


class Counts: n_tokens, n_rows, n_units = 1000, 64, 500

def test_denom_takes_a_batch():
    *_, mask = args = columns()
    assert_close(implicit_reward_loss(*args, denom=Counts())[0]*64, implicit_reward_loss(*args)[0]*mask.any(1).sum())
    assert_close(implicit_reward_loss(*args, denom=64.)[0], implicit_reward_loss(*args, denom=Counts())[0])


def test_transforms_and_second_derivatives():
    lp, ref, s, mask = columns()
    lp, ref, s, mask = lp[:3, :6], ref[:3, :6], s[:3], mask[:3, :6]
    def f(x): return implicit_reward_loss(x, ref, s, mask, beta=.7)[0]
    x, v = lp.clone().requires_grad_(), torch.linspace(-1, 1, lp.numel(), dtype=lp.dtype).view_as(lp)
    first, = torch.autograd.grad(f(x), x, create_graph=True)
    assert_close(grad(f)(lp), first.detach())
    assert_close(jvp(f, (lp,), (v,))[1], (first*v).sum().detach())
    second, = torch.autograd.grad((first*v).sum(), x)
    assert second.abs().max() > 1e-3
    assert_close(second, torch.einsum("btcu,cu->bt", hessian(f)(lp), v))
    assert_close(vmap(grad(f))(torch.stack([lp, ref]))[0], first.detach())
    assert torch.autograd.gradgradcheck(f, x)
    assert_close(torch.compile(f, fullgraph=True, backend="eager")(lp), f(lp))


def test_extremes_stay_finite_and_a_nan_stays_visible():
    on = torch.ones(2, 3).bool()
    lp = torch.tensor([[-inf, -1., -1.], [-1., -1., -1.]], requires_grad=True)
    loss, _ = implicit_reward_loss(lp, torch.full((2, 3), -1.), torch.tensor([1., 0.]), on, beta=100.)
    loss.backward()
    assert_close(loss.item(), (2000 + math.log(2))/2, rtol=1e-6, atol=0)
    assert lp.grad[0, 0] == 0 and lp.grad.isfinite().all()
    zero = torch.zeros(2, 3)
    assert implicit_reward_loss(zero, zero, torch.tensor([nan, 0.]), on)[0].isnan()
    assert implicit_reward_loss(zero + nan, zero, torch.tensor([1., 0.]), on)[0].isnan()


def test_errors():
    x, m = torch.zeros(4, 7), torch.ones(4, 7).bool()
    with pytest.raises(ValueError) as e: implicit_reward_loss(x, x, torch.zeros(3), m)
    assert str(e.value) == "implicit_reward_loss: scores is [3], mask is [4, 7]; one score per row is wanted"
    with pytest.raises(ValueError) as e: implicit_process_rewards(x, x[:, 1:], m)
    assert (str(e.value)
            == "implicit_process_rewards: ref_logprobs is [4, 6], logprobs is [4, 7]; they must be equal, nothing is "
            "broadcast; column t is token t, also of log-probs, whose column 0 is 0 (token_logprobs)")
    with pytest.raises(TypeError, match="mask is int32"): implicit_reward_loss(x, x, torch.zeros(4), m.int())
