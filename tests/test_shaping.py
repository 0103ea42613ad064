"Reward shaping: goldens, laws, running moments, compilation and errors (LAWS 5, 6, 21)."
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.advantages import (discounted_returns, gae, n_step_returns, reinforce_pp_advantages,
                                         remax_advantages, vtrace)
from rlblocks.signals.groups import optimal_token_baseline
from rlblocks.arithmetic.kl import kl_k1
from rlblocks.arithmetic.masked import whiten
from rlblocks.signals.shaping import (
    at_last_token, clip_rewards, cosine_length_reward, kl_shaped, overlong_penalty, repeated_tokens, repetition_penalty,
    standardized, step_rewards, truncation_penalty, truncation_score, update_moments, weighted_scores,
    without_truncated, without_unscored,
)
from rlblocks.testing.laws import check_estimator
from rlblocks.testing.oracles import sample_columns

nan, inf = math.nan, math.inf


def bools(*rows): return torch.tensor(rows).bool()  # of rows, or of flags


# -- at_last_token

def test_pays_the_last_chosen_token():
    # padding, a tool in between, nothing, the first
    mask = bools([0, 1, 1, 0, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0])
    assert at_last_token(torch.tensor([1., 2., 3., 4.]),
                         mask).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0]*5, [4, 0, 0, 0, 0]]


def test_a_verdict_on_nothing_is_not_paid():
    scores = torch.tensor([nan, 1.], requires_grad=True)
    rewards = at_last_token(scores, bools([0, 0], [1, 0]))
    rewards.sum().backward()
    assert rewards.tolist() == [[0, 0], [1, 0]] and scores.grad.tolist() == [0, 1]


def test_an_unscorable_answer_stays_visible():
    assert at_last_token(torch.tensor([nan]), bools([1, 1])).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_pay(shape): assert at_last_token(torch.zeros(shape[0]), torch.zeros(shape).bool()).shape == shape


@pytest.mark.parametrize("f", [lambda r, x, m: at_last_token(r[:, 0], m), lambda r, x, m: kl_shaped(
    r, x, 2*x, m, kl_coef=.1), lambda r, x, m: clip_rewards(r, limit=.7),
                               lambda r, x, m: standardized(r, torch.tensor([4., 3.25, 14.75], dtype=torch.float64))],
                         ids=["at_last_token", "kl_shaped", "clip_rewards", "standardized"])
def test_the_gradient_of_scores_and_rewards_is_right(f):
    g = torch.Generator().manual_seed(0)
    r, x = torch.randn(2, 3, 6, generator=g, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda r: f(r, x, torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) < .7), r.requires_grad_())


TOKEN = {  # every estimator on token rewards as one function of (rewards, another column, group, mask)
    "gae": lambda r, x, g, m: gae(r, x, m, gamma=.9), "returns": lambda r, x, g, m: discounted_returns(r, m),
    "gae, a lam a row": lambda r, x, g, m: gae(r, x, m, lam=x[:, 0].sigmoid()),
    "n step": lambda r, x, g, m: n_step_returns(r, x, m, n=3),
    "vtrace": lambda r, x, g, m: vtrace(r, x, m, log_ratios=x, lam=.9),
    "reinforce++": lambda r, x, g, m: reinforce_pp_advantages(r, m),
    "remax": lambda r, x, g, m: remax_advantages(r, x[:, 0], m),
    "kl": lambda r, x, g, m: kl_shaped(r, x, 2*x, m, kl_coef=.1),
    "otb": lambda r, x, g, m: optimal_token_baseline(r, -x.abs(), g, m, sum_pi_squared=x.sigmoid()),
}


@pytest.mark.parametrize("estimate", TOKEN.values(), ids=TOKEN)
def test_an_unscorable_row_stays_visible_and_alone(estimate):  # one rule for all estimators on tokens
    c = sample_columns()
    m, group = c["mask"].clone(), torch.arange(16) % 3
    m[2, 3:9] = True
    bad = torch.arange(16) == 2
    scores = torch.where(bad, nan, c["scores"])
    def run(r, x, g, m): return (out if isinstance(out := estimate(r, x, g, m), tuple) else (out,))
    cleared = without_unscored(m, scores)
    assert torch.equal(cleared, m & ~bad[:, None])
    for raw, clean, alone in zip(run(at_last_token(scores, m), c["values"], group, m),
                                 run(at_last_token(scores, cleared), c["values"], group, cleared),
                                 run(at_last_token(scores, m)[~bad], c["values"][~bad], group[~bad], m[~bad]),
                                 strict=True):
        # visible, exactly 0 where nothing was chosen
        assert raw[bad][m[bad]].isnan().any() and raw[bad][m[bad]][-1].isnan() and not raw[bad][~m[bad]].any()
        assert raw[~bad].isfinite().all() and not clean[bad].any()
        assert_close(raw[~bad], alone), assert_close(clean[~bad], alone)


def test_whitened_advantages_without_the_unscorable_row():
    c = sample_columns()
    scores, keep = torch.where(torch.arange(16) == 5, nan, c["scores"]), torch.arange(16) != 5
    def advantages(scores, values, mask): return whiten(gae(at_last_token(scores, mask), values, mask)[0], mask)
    assert not advantages(scores, c["values"], c["mask"])[c["mask"]].isfinite().any()
    got = advantages(scores, c["values"], without_unscored(c["mask"], scores))
    assert_close(got[keep], advantages(scores[keep], c["values"][keep],
                                       c["mask"][keep])), assert_close(got[5], torch.zeros(16).double())


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
    assert_close(clip_rewards(torch.tensor([-50., -.3, 7., inf, nan]), limit=5.), torch.tensor([-5., -.3, 5., 5., nan]),
                 equal_nan=True)


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
    assert_close(moments, torch.stack([torch.tensor(float(len(x))), x.mean(), ((x - x.mean())**2).sum()]).double(),
                 atol=0, rtol=1e-12)


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
    assert standardized(torch.tensor([3.]),
                        update_moments(None, torch.tensor([1.]))).item() == pytest.approx(2, abs=1e-5)
    assert standardized(torch.tensor([3.]), update_moments(None, torch.zeros(0))).item() == pytest.approx(3, abs=1e-5)


# -- step_rewards

def test_pays_each_step_where_it_ends():
    mask = bools([0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0], [0]*7)
    # a step without tokens, a tool in between; steps interleaved, a token of none
    step = torch.tensor([[0, 0, 0, 0, 2, 2, 2], [1, 0, 1, -1, 9, 9, 9], [0]*7])
    rewards = step_rewards(torch.tensor([[1., nan, 3.], [4., 5., nan], [nan]*3]), step, mask)
    assert rewards.tolist() == [[0, 0, 1, 0, 0, 3, 0], [0, 4, 5, 0, 0, 0, 0], [0]*7]


def test_steps_equal_a_search():
    g = torch.Generator().manual_seed(0)
    scores, step, mask = (torch.randn(20, 4, generator=g), torch.randint(-1, 5, (20, 15), generator=g),
                          torch.rand(20, 15, generator=g) < .6)
    want = torch.zeros(20, 15)
    for b in range(20):
        for s in range(4):
            at = [t for t in range(15) if mask[b, t] and step[b, t] == s]
            if at: want[b, at[-1]] = scores[b, s]
    assert torch.equal(step_rewards(scores, step, mask), want)
    assert torch.equal(step_rewards(scores, step.to(torch.int8), mask), want)


def test_one_step_is_the_answer():
    c = sample_columns()
    assert torch.equal(step_rewards(c["scores"][:, None], torch.zeros_like(c["tokens"]), c["mask"]),
                       at_last_token(c["scores"], c["mask"]))


def test_an_unscorable_step_stays_visible_and_a_missing_one_leaves_no_trace():
    scores = torch.tensor([[nan, 2., nan]], requires_grad=True)
    rewards = step_rewards(scores, torch.tensor([[0, 0, 1]]), bools([1, 1, 1]))
    assert rewards.isnan().tolist() == [[False, True, False]]
    rewards[0, 2].backward()
    assert scores.grad.tolist() == [[0, 1, 0]]


# -- truncation

def test_what_an_unfinished_answer_pays():
    s, cut = torch.tensor([1., 1., -1., nan]), bools(0, 1, 1, 1)
    assert_close(truncation_penalty(s, cut, penalty=1.), torch.tensor([1., 0., -2., nan]), equal_nan=True)
    assert_close(truncation_penalty(s, cut, keep=.5), torch.tensor([1., .5, -.5, nan]), equal_nan=True)
    assert_close(truncation_penalty(s, cut, keep=0., penalty=.5), torch.tensor([1., -.5, -.5, nan]), equal_nan=True)
    assert_close(truncation_penalty(s, cut), s, equal_nan=True)  # both off by default


def test_what_an_unfinished_answer_is_worth_is_replaced_not_lowered(): # Huang et al. 2024; TRL subtracts
    s, cut = torch.tensor([1., 5., -1., nan, nan]), bools(0, 1, 1, 1, 0)
    assert_close(truncation_score(s, cut), torch.tensor([1., -1., -1., -1., nan]), equal_nan=True)
    assert_close(truncation_score(s, cut, value=0.), torch.tensor([1., 0., 0., 0., nan]), equal_nan=True)
    assert truncation_penalty(s, cut, penalty=1.)[1] == 4 > truncation_score(s, cut)[0] == s[0]


def test_a_replaced_score_has_no_gradient():
    s = torch.tensor([1., nan, 2.], requires_grad=True)
    truncation_score(s, bools(0, 1, 1)).sum().backward()
    assert s.grad.tolist() == [1, 0, 0]


def test_without_truncated_clears_rows():
    mask = bools([1, 1, 0], [0, 1, 1])
    assert without_truncated(mask, bools(0, 1)).tolist() == [[True, True, False], [False]*3] and mask.sum() == 4


# -- repetition

def grams_of(tokens, mask, b, n):
    at = [t for t, m in enumerate(mask[b].tolist()) if m]
    return at, [tuple(tokens[b, at[i:i+n]].tolist()) for i in range(len(at)-n+1)]


def test_repetition_by_hand():
    tokens = torch.tensor([[5, 5, 5, 5, 5, 0], [1, 2, 3, 1, 2, 0], [1, 2, 3, 9, 1, 2], [1, 2, 3, 4, 5, 6]])
    mask = bools([1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1], [1]*6)
    assert_close(repetition_penalty(tokens, mask, n=2), torch.tensor([-.75, -.25, -.25, 0.]))
    assert repeated_tokens(tokens, mask,
                           n=2).int().tolist() == [[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1], [0]*6]
    assert_close(repetition_penalty(tokens, mask), torch.tensor([-2/3, 0., 0., 0.]))  # n = 3


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40, 10**9])
@pytest.mark.parametrize("scale", [1, 2**61])
def test_repetition_equals_sets(n, scale):
    g = torch.Generator().manual_seed(n)
    tokens, mask = torch.randint(2, (6, 300), generator=g)*scale, torch.rand(6, 300, generator=g) < .8
    tokens[0], mask[1] = torch.arange(300) % 7, False
    tokens[2] = torch.where(mask[2], 3, torch.arange(300))  # what is under the mask differs, what was chosen does not
    p, again = repetition_penalty(tokens, mask, n=n), repeated_tokens(tokens, mask, n=n)
    for b in range(6):
        at, grams = grams_of(tokens, mask, b, n)
        assert p[b].item() == pytest.approx(len(set(grams))/len(grams) - 1 if grams else 0.)
        seen, marked = set(), set()
        for i, x in enumerate(grams):
            if x in seen: marked |= set(at[i:i+n])
            seen.add(x)
        assert set(again[b].nonzero().flatten().tolist()) == marked


def test_long_n_grams_over_a_long_row_do_not_overflow():
    tokens = torch.arange(5000)[None] % 2500
    assert_close(repetition_penalty(tokens, torch.ones_like(tokens).bool(), n=64), torch.tensor([2500/4937 - 1]))


def test_n_grams_that_differ_only_in_their_first_tokens_differ():
    # 256 ids: in int64 the powers of 256 vanish after eight tokens
    first, last = torch.arange(12), torch.arange(12, 20)
    tokens = torch.cat([first, last, first.flip(0), last, torch.arange(20, 236)])[None]
    assert tokens.shape == (1, 256) and repetition_penalty(tokens, torch.ones_like(tokens).bool(), n=20).item() == 0
    assert repetition_penalty(tokens, torch.ones_like(tokens).bool(), n=8).item() == pytest.approx(-1/249)
    all_unlike = torch.tensor([[1, 0, 4, 2, 3]])  # 0 before 4 is not 1 before 0, though 0·4 + 4 = 1·4 + 0
    assert repetition_penalty(all_unlike, all_unlike >= 0, n=2).item() == 0


def test_repetition_is_blind_to_tools_and_padding():
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.randint(3, (4, 30), generator=g), torch.rand(4, 30, generator=g) < .8
    def insert(x, fill): return torch.cat([x[:, :9], torch.full((4, 50), fill).to(x.dtype), x[:, 9:]], 1)
    assert torch.equal(repetition_penalty(insert(tokens, 1), insert(mask, False), n=3),
                       repetition_penalty(tokens, mask, n=3))
    assert torch.equal(repeated_tokens(insert(tokens, 1), insert(mask, False), n=3),
                       insert(repeated_tokens(tokens, mask, n=3), False))


# -- cosine_length_reward, weighted_scores

def test_cosine_by_hand():
    right, n = bools(1, 0, 1, 0, 1, 0, 1), torch.tensor([0, 0, 50, 50, 100, 100, 250])
    assert_close(cosine_length_reward(right, n, max_length=100), torch.tensor([2., -10., 1.5, -5., -10., -10., -10.]))
    assert_close(cosine_length_reward(right, n, max_length=100, right=(1., .5), wrong=(-1., -.5), exceeded=None),
                 torch.tensor([1., -1., .75, -.75, .5, -.5, .5]))
    assert_close(cosine_length_reward(bools(1), torch.tensor([25]), max_length=100),
                 torch.tensor([1.5 + .5*math.cos(math.pi/4)]))


def test_weighted_by_hand():
    s = torch.tensor([[2., 4.], [2., nan], [nan, 4.], [nan, nan]])
    assert_close(weighted_scores(s, weights=(1., .5)), torch.tensor([4., 2., 2., nan]), equal_nan=True)
    assert_close(weighted_scores(s), torch.tensor([6., 2., 4., nan]), equal_nan=True)
    assert_close(weighted_scores(s, weights=[0., 0.]), torch.tensor([0., 0., 0., nan]), equal_nan=True)


def test_a_missing_verdict_has_no_gradient():
    s = torch.tensor([[2., nan], [nan, nan]], requires_grad=True)
    weighted_scores(s, weights=(3., .5))[0].backward()
    assert s.grad.tolist() == [[3, 0], [0, 0]]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: weighted_scores(x, weights=(1., 2., -1.)), x)
    assert torch.autograd.gradcheck(lambda x: step_rewards(x, torch.tensor([[0, 2, 2]]*4), torch.ones(4, 3).bool()), x)
    assert torch.autograd.gradcheck(lambda x: truncation_penalty(x[:, 0], bools(0, 1, 1, 0), keep=.5, penalty=1.), x)


# -- all of them

CALLS = {"at_last_token": at_last_token, "kl_shaped": partial(kl_shaped, kl_coef=.3),
         "clip_rewards": partial(clip_rewards, limit=.5),
         "standardized": partial(standardized, moments=torch.tensor([4., 3.25, 14.75], dtype=torch.float64)),}


@pytest.mark.parametrize("name", CALLS)
def test_obeys_every_law(name):
    inputs = dict(x=sample_columns()["scores"]) if name in ("clip_rewards", "standardized") else {}
    laws = check_estimator(CALLS[name], inputs)
    assert {"purity", "gradient", "permutation", "precision"} <= set(laws)
    assert ("mask" in laws) == (not inputs)


WIDER = {
    "step_rewards": (step_rewards, lambda c: dict(step=c["tokens"] % 6, scores=c["rewards"][:, :5]),
                     dict(per_row=("scores",))),
    "truncation_penalty": (truncation_penalty, lambda c: dict(truncated=c["scores"] > 0), dict(penalty=1., keep=.5)),
    "truncation_score": (truncation_score, lambda c: dict(truncated=c["scores"] > 0), dict(value=-.5)),
    "weighted_scores": (weighted_scores, lambda c: dict(scores=c["rewards"][:, :3]), dict(weights=(1., .5, -2.))),
}


@pytest.mark.parametrize("f,columns,hyper", WIDER.values(), ids=WIDER)
def test_the_wider_family_obeys_every_law(f, columns, hyper):
    laws = check_estimator(f, columns(sample_columns()), **hyper)
    assert {"purity", "gradient", "permutation", "precision"} <= set(laws) and ("mask" in laws) == (f is step_rewards)


def test_nothing_to_shape():
    none, mask = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0).bool()
    assert repetition_penalty(none, mask).tolist() == [0, 0] and repeated_tokens(none, mask).shape == (2, 0)
    assert step_rewards(torch.ones(2, 3), none, mask).shape == (2, 0)
    assert repetition_penalty(none[:0], mask[:0]).shape == (0,) and weighted_scores(torch.zeros(0, 2)).shape == (0,)
    assert cosine_length_reward(bools(), torch.zeros(0, dtype=torch.long), max_length=9).shape == (0,)


def test_static_shapes_and_no_look_at_the_data():
    c = sample_columns()
    def everything(scores, rewards, logprobs, ref_logprobs, mask, tokens):
        moments = update_moments(None, scores)
        return (at_last_token(scores, mask), kl_shaped(rewards, logprobs, ref_logprobs, mask, kl_coef=.1),
                clip_rewards(scores, limit=1.), overlong_penalty(mask.sum(1), max_length=9, buffer=3), moments,
                update_moments(moments, scores), standardized(scores, moments),
                step_rewards(rewards[:, :3], tokens % 4, mask), truncation_penalty(scores, mask[:, 5], penalty=1.),
                truncation_score(scores, mask[:, 5]), without_truncated(mask, mask[:, 5]),
                without_unscored(mask, scores), repetition_penalty(tokens, mask, n=2),
                repeated_tokens(tokens, mask, n=20), weighted_scores(rewards[:, :3], weights=(1., .5, 2.)),
                cosine_length_reward(mask[:, 5], mask.sum(1), max_length=9))
    args = [c[k] for k in ("scores", "rewards", "logprobs", "ref_logprobs", "mask", "tokens")]
    want, meta = everything(*args), everything(*(x.to("meta") for x in args))
    compiled = torch.compile(everything, fullgraph=True, backend="eager")(*args)
    for w, m, x in zip(want, meta, compiled, strict=True):
        assert m.shape == w.shape and m.dtype == w.dtype and torch.equal(w, x)


def errors():
    r, m, s = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4)
    yield (lambda: at_last_token(s[1:], m), ValueError,
           "at_last_token: scores is [3], mask is [4, 7]; one score per row is wanted")
    yield (lambda: at_last_token(r, m), ValueError,
           "at_last_token: scores is [4, 7], mask is [4, 7]; one score per row is wanted")
    yield (lambda: at_last_token(s, m.int()), TypeError,
           "at_last_token: mask is int32; masks are Bool (mask.bool(), or mask > 0)")
    yield (lambda: kl_shaped(s, r, r, m, kl_coef=.1), ValueError,
           "kl_shaped: rewards is [4], logprobs is [4, 7]; spread row values with at_tokens(rewards, mask)")
    yield (lambda: kl_shaped(r, r, r, m.long(), kl_coef=.1), TypeError,
           "kl_shaped: mask is int64; masks are Bool (mask.bool(), or mask > 0)")
    yield (lambda: overlong_penalty(m.sum(1), max_length=5, buffer=6), ValueError,
           "overlong_penalty: buffer is 6, max_length is 5; the buffer is the last part of the length, 0 < buffer <= "
           "max_length")
    yield (lambda: overlong_penalty(m.sum(1), max_length=5, buffer=0), ValueError,
           "overlong_penalty: buffer is 0, max_length is 5; the buffer is the last part of the length, 0 < buffer <= "
           "max_length")
    yield (lambda: clip_rewards(s, limit=-1.), ValueError,
           "clip_rewards: limit is -1.0; it is the largest size that passes and must be positive")
    yield (lambda: clip_rewards(s, limit=nan), ValueError,
           "clip_rewards: limit is nan; it is the largest size that passes and must be positive")


def wider_errors():
    r, m, s, n = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4), torch.zeros(4, dtype=torch.long)
    yield (lambda: step_rewards(s, r.long(), m), ValueError,
           "step_rewards: scores is [4], mask is [4, 7]; [B, S] is wanted, a score for each step of each row")
    yield (lambda: step_rewards(r, n, m), ValueError,
           "step_rewards: step is [4], mask is [4, 7]; spread row values with at_tokens(step, mask)")
    yield (lambda: truncation_penalty(s, m[:3, 0]), ValueError,
           "truncation_penalty: truncated is [3], scores is [4]; they must be equal, nothing is broadcast")
    yield (lambda: truncation_score(s, m[:3, 0]), ValueError,
           "truncation_score: truncated is [3], scores is [4]; they must be equal, nothing is broadcast")
    yield (lambda: without_unscored(m, s[:3]), ValueError,
           "without_unscored: scores is [3], mask is [4, 7]; one score per row is wanted")
    yield (lambda: without_truncated(m, m[:3, 0]), ValueError,
           "without_truncated: truncated is [3], mask is [4, 7]; one flag per row is wanted")
    yield lambda: repetition_penalty(r.long(), m,
                                     n=0), ValueError, "repetition_penalty: n is 0; an n-gram has at least one token"
    yield (lambda: repeated_tokens(r.long(), m[:, 1:]), ValueError,
           "repeated_tokens: tokens is [4, 7], mask is [4, 6]; they must be equal, nothing is broadcast")
    yield (lambda: cosine_length_reward(m[:, 0], n[1:], max_length=9), ValueError,
           "cosine_length_reward: correct is [4], lengths is [3]; one of each per row is wanted")
    yield (lambda: cosine_length_reward(m[:, 0], n, max_length=0), ValueError,
           "cosine_length_reward: max_length is 0; it is the number of tokens an answer may have, at least 1")
    yield (lambda: weighted_scores(s), ValueError,
           "weighted_scores: scores is [4]; [B, R] is wanted, a column for each reward")
    yield (lambda: weighted_scores(r, weights=(1.,)), ValueError,
           "weighted_scores: scores is [4, 7], there are 1 weights; one for each column is wanted")


@pytest.mark.parametrize("call,kind,text", [*errors(), *wider_errors()])
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
