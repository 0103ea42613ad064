"Reward shaping: goldens, laws, running moments, compilation and errors (LAWS 5, 6, 21)."
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.kl import kl_k1
from rlblocks.shaping import at_last_token, clip_rewards, kl_shaped, overlong_penalty, standardized, update_moments
from rlblocks.testing import check_estimator, sample_columns

nan, inf = math.nan, math.inf


def bools(*rows): return torch.tensor(rows).bool()


# -- at_last_token

def test_pays_the_last_chosen_token():
    mask = bools([0, 1, 1, 0, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0])  # padding, a tool in between, nothing, the first
    assert at_last_token(torch.tensor([1., 2., 3., 4.]), mask).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0]*5, [4, 0, 0, 0, 0]]


def test_a_verdict_on_nothing_is_not_paid():
    scores = torch.tensor([nan, 1.], requires_grad=True)
    rewards = at_last_token(scores, bools([0, 0], [1, 0]))
    rewards.sum().backward()
    assert rewards.tolist() == [[0, 0], [1, 0]] and scores.grad.tolist() == [0, 1]


def test_an_unscorable_answer_stays_visible(): assert at_last_token(torch.tensor([nan]), bools([1, 1])).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_pay(shape): assert at_last_token(torch.zeros(shape[0]), torch.zeros(shape).bool()).shape == shape


# -- kl_shaped

def test_charges_each_chosen_token():
    ref = torch.full((1, 4), -2.)
    logprobs = ref + torch.tensor([[.1, -.2, .3, 9.]])
    rewards = kl_shaped(torch.tensor([[0., 0., 1., 5.]]), logprobs, ref, bools([1, 1, 1, 0]), kl_coef=.5)
    assert_close(rewards, torch.tensor([[-.05, .1, .85, 0.]]))


def test_is_the_rewards_less_k1():
    c = sample_columns()
    got = kl_shaped(c["rewards"], c["logprobs"], c["ref_logprobs"], c["mask"], kl_coef=.3)
    assert_close(got, torch.where(c["mask"], c["rewards"], 0.) - .3*kl_k1(c["logprobs"], c["ref_logprobs"], c["mask"]))


def test_one_impossible_token_costs_twenty_nats():
    z = torch.zeros(1, 1)
    assert kl_shaped(z, z, torch.full((1, 1), -inf), bools([1]), kl_coef=.1).item() == pytest.approx(-2)


def test_log_probs_are_data():
    r, lp, ref = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    kl_shaped(r, lp, ref, bools([1, 1, 0], [0, 1, 1]), kl_coef=.1).sum().backward()
    assert lp.grad is None and ref.grad is None and r.grad.tolist() == [[1, 1, 0], [0, 1, 1]]


# -- overlong_penalty

def test_ramp_by_hand():
    cost = overlong_penalty(torch.tensor([0, 80, 81, 85, 100, 101, 500]), max_length=100, buffer=20)
    assert_close(cost, torch.tensor([0., 0, -.05, -.25, -1, -1, -1]))


# -- clip_rewards

def test_caps_both_sides_and_keeps_nan():
    assert_close(clip_rewards(torch.tensor([-50., -.3, 7., inf, nan]), limit=5.), torch.tensor([-5., -.3, 5., 5., nan]), equal_nan=True)


# -- moments

def test_moments_by_hand():
    moments = update_moments(None, torch.tensor([1., nan, 2.]))
    assert moments.tolist() == [2, 1.5, .5]
    moments = update_moments(moments, torch.tensor([[4.], [6.]]))
    assert_close(moments, torch.tensor([4., 3.25, 14.75], dtype=torch.float64))
    assert_close(standardized(torch.tensor([4., nan]), moments), torch.tensor([.75/(14.75/3)**.5, nan]), equal_nan=True)


@pytest.mark.parametrize("seed", range(10))
def test_any_cut_gives_the_moments_of_the_whole(seed):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 9, (12,), generator=g).tolist()
    x = torch.randn(sum(sizes), generator=g, dtype=torch.float64) * 3 + 1000
    moments = None
    for part in x.split(sizes): moments = update_moments(moments, part)
    assert_close(moments, torch.stack([torch.tensor(float(len(x))), x.mean(), ((x - x.mean())**2).sum()]).double(), atol=0, rtol=1e-12)


@pytest.mark.parametrize("nothing", [torch.zeros(0), torch.tensor([nan, nan])])
def test_nothing_scored_changes_nothing(nothing):
    moments = update_moments(None, torch.tensor([1., 2.]))
    assert torch.equal(update_moments(moments, nothing), moments)
    assert update_moments(None, nothing).tolist() == [0, 0, 0]


def test_state_in_state_out():
    before = torch.tensor([2., 1.5, .5], dtype=torch.float64)
    kept = before.clone()
    after = update_moments(before, torch.tensor([9.], requires_grad=True))
    assert torch.equal(before, kept) and not after.requires_grad and after.dtype == torch.float64


@pytest.mark.parametrize("offset", [0., 1e8])
def test_equals_have_no_spread(offset):
    moments, x = None, torch.full((7,), .95 + offset)
    for _ in range(9): moments = update_moments(moments, x)
    assert standardized(x, moments).abs().max() < 1e-6


def test_an_offset_is_not_spread():
    moments = update_moments(None, torch.tensor([1e8, 1e8+8, 1e8+16]))
    assert moments.tolist() == [3, 1e8+8, 128]
    assert_close(standardized(torch.tensor([1e8+16]), moments), torch.ones(1))


def test_few_scores_are_centred_only():
    assert standardized(torch.tensor([3.]), update_moments(None, torch.tensor([1.]))).item() == pytest.approx(2, abs=1e-5)
    assert standardized(torch.tensor([3.]), update_moments(None, torch.zeros(0))).item() == pytest.approx(3, abs=1e-5)


# -- all of them

CALLS = {
    "at_last_token": at_last_token, "kl_shaped": partial(kl_shaped, kl_coef=.3),
    "clip_rewards": partial(clip_rewards, limit=.5), "standardized": partial(standardized, moments=torch.tensor([4., 3.25, 14.75], dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_obeys_every_law(name):
    inputs = dict(x=sample_columns()["scores"]) if name in ("clip_rewards", "standardized") else {}
    laws = check_estimator(CALLS[name], inputs)
    assert {"purity", "gradient", "permutation", "precision"} <= set(laws)
    assert ("mask" in laws) == (not inputs)


def test_static_shapes_and_no_look_at_the_data():
    c = sample_columns()
    def everything(scores, rewards, logprobs, ref_logprobs, mask):
        moments = update_moments(None, scores)
        return (at_last_token(scores, mask), kl_shaped(rewards, logprobs, ref_logprobs, mask, kl_coef=.1), clip_rewards(scores, limit=1.),
                overlong_penalty(mask.sum(1), max_length=9, buffer=3), moments, update_moments(moments, scores), standardized(scores, moments))
    args = [c[k] for k in ("scores", "rewards", "logprobs", "ref_logprobs", "mask")]
    want, meta = everything(*args), everything(*(x.to("meta") for x in args))
    compiled = torch.compile(everything, fullgraph=True, backend="eager")(*args)
    for w, m, x in zip(want, meta, compiled, strict=True): assert m.shape == w.shape and m.dtype == w.dtype and torch.equal(w, x)


def errors():
    r, m, s = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4)
    yield lambda: at_last_token(s[1:], m), ValueError, "at_last_token: scores is [3], mask is [4, 7]; one score per row is wanted"
    yield lambda: at_last_token(r, m), ValueError, "at_last_token: scores is [4, 7], mask is [4, 7]; one score per row is wanted"
    yield lambda: at_last_token(s, m.int()), TypeError, "at_last_token: mask is int32; masks are Bool (mask.bool(), or mask > 0)"
    yield lambda: kl_shaped(s, r, r, m, kl_coef=.1), ValueError, "kl_shaped: rewards is [4], logprobs is [4, 7]; spread row values with at_tokens(rewards, mask)"
    yield lambda: kl_shaped(r, r, r, m.long(), kl_coef=.1), TypeError, "kl_shaped: mask is int64; masks are Bool (mask.bool(), or mask > 0)"
    yield (lambda: overlong_penalty(m.sum(1), max_length=5, buffer=6), ValueError,
           "overlong_penalty: buffer is 6, max_length is 5; the buffer is the last part of the length, 0 < buffer <= max_length")
    yield (lambda: overlong_penalty(m.sum(1), max_length=5, buffer=0), ValueError,
           "overlong_penalty: buffer is 0, max_length is 5; the buffer is the last part of the length, 0 < buffer <= max_length")
    yield lambda: clip_rewards(s, limit=-1.), ValueError, "clip_rewards: limit is -1.0; it is the largest size that passes and must be positive"
    yield lambda: clip_rewards(s, limit=nan), ValueError, "clip_rewards: limit is nan; it is the largest size that passes and must be positive"


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
