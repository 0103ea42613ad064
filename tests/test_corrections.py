"Corrections: hand numbers, oracle, exact unbiasedness, laws (LAWS 1, 2, 5, 13). Their metrics are in test_mismatch."
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.corrections import (
    binary_kl, binary_tv, fresh_mask, geometric_mask, geometric_weights, icepop_weights, k3_mask,
    off_policy_sequence_mask, proximal_logprobs, row_max, row_mean, row_sum, sequence_mask, sequence_weights,
    staleness_weights, token_mask, truncated_weights, veto_mask, within,
)
from rlblocks.arithmetic.kl import full_kl, kl_k1, kl_k2, kl_k3
from rlblocks.arithmetic.masked import aggregate, masked_mean
from rlblocks.signals.mismatch import mismatch_metrics
from rlblocks.losses.policy import clipped_surrogate, log_ratio, ppo_loss
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns

inf, nan = math.inf, math.nan
FREE = {"token": partial(truncated_weights, high=inf), "sequence": partial(sequence_weights, high=inf),
        "geometric": partial(geometric_weights, high=inf)}
WEIGHTS = FREE | {"tis": truncated_weights, "tis two-sided": partial(truncated_weights, low=.8, high=1.2),
                  "icepop": partial(icepop_weights, low=.8, high=1.2),
                  "sequence tis": partial(sequence_weights, low=.8, high=1.2),
                  "geometric tis": partial(geometric_weights, low=.9, high=1.1)}
MASKS = {"token": partial(token_mask, low=.8, high=1.2), "k3": partial(k3_mask, nats_high=.05),
         "sequence": partial(sequence_mask, low=.5, high=1.5), "geometric": partial(geometric_mask, low=.9, high=1.1),
         "veto": partial(veto_mask, least=.6),
         "token k2": lambda old, rollout, mask: within(kl_k2(rollout, old, mask), mask, high=.05),
         "mean k3": lambda old, rollout, mask: within(row_mean(kl_k3(rollout, old, mask), mask), mask, high=.05),
         "mean binary kl": lambda old, rollout, mask: within(row_mean(binary_kl(old, rollout, mask), mask), mask,
                                                             high=.03),
         "max tv": lambda old, rollout, mask: within(row_max(binary_tv(old, rollout, mask), mask), mask, high=.2),
         "max k1": lambda old, rollout, mask: within(row_max(kl_k1(rollout, old, mask), mask), mask, low=-1., high=.5)}
every_weight = pytest.mark.parametrize("f", WEIGHTS.values(), ids=WEIGHTS)
every_mask = pytest.mark.parametrize("f", MASKS.values(), ids=MASKS)
every = pytest.mark.parametrize("f", [*WEIGHTS.values(), *MASKS.values()],
                                ids=[*WEIGHTS, *(f"mask {k}" for k in MASKS)])


def columns(seed=0, dtype=torch.float64):
    cols = sample_columns(seed=seed)
    return cols["old_logprobs"].to(dtype), cols["rollout_logprobs"].to(dtype), cols["mask"]

def rows(*ratios, rollout=0.):
    "(old, rollout, mask) of rows with these ratios; nan = not chosen."
    ratio = torch.tensor(ratios)
    return ratio.log() + rollout, torch.full_like(ratio, rollout), ~ratio.isnan()

def naive(old, rollout, mask):
    "{name: its ratio at each token} in Python floats."
    out = {k: torch.zeros(mask.shape, dtype=torch.float64) for k in FREE}
    for b, row in enumerate(mask.tolist()):
        ratios = {t: math.exp(old[b, t].item() - rollout[b, t].item()) for t, on in enumerate(row) if on}
        for t, r in ratios.items():
            out["token"][b, t], out["sequence"][b, t] = r, math.prod(ratios.values())
            out["geometric"][b, t] = math.prod(ratios.values())**(1/len(ratios))
    return out


# -- laws

@every_weight
def test_weights_obey_every_law(f):
    check_estimator(lambda old_logprobs, rollout_logprobs, mask: f(old_logprobs, rollout_logprobs, mask))


@every_mask
def test_masks_obey_every_law(f): # as numbers: the laws subtract
    def number(old_logprobs, rollout_logprobs, mask):
        return f(old_logprobs, rollout_logprobs, mask).to(torch.promote_types(old_logprobs.dtype, torch.float32))
    check_estimator(number)


def test_the_others_obey_every_law():
    for f in (row_sum, row_mean, row_max): check_estimator(lambda values, mask, f=f: f(values, mask))
    for f in (binary_kl, binary_tv): check_estimator(f)
    wide = lambda x: torch.promote_types(x.dtype, torch.float32)
    check_estimator(lambda logprobs, rollout_logprobs, advantages, mask: off_policy_sequence_mask(
        logprobs, rollout_logprobs, advantages, mask, threshold=.02).to(wide(logprobs)))
    for shape in ((16,), (16, 16)):
        cols = dict(policy_version=torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(0)))
        check_estimator(lambda policy_version, values, mask: staleness_weights(policy_version, mask,
                                                                               now=7).to(wide(values)), cols)
        check_estimator(lambda policy_version, values, mask: fresh_mask(policy_version, mask, now=7).to(wide(values)),
                        cols)


@every
def test_nothing_has_a_gradient(f):
    old, rollout, mask = columns()
    assert not f(old.requires_grad_(), rollout.requires_grad_(), mask).requires_grad
    assert not off_policy_sequence_mask(old, rollout, old, mask, threshold=.1).requires_grad
    assert not proximal_logprobs(old, rollout, torch.arange(16), mask, now=9).requires_grad


@pytest.mark.parametrize("f", [row_sum, row_mean, row_max])
def test_reducers_are_differentiable(f): # they may stand in a loss of whole answers
    x, mask = sample_columns(B=4, T=5)["values"].requires_grad_(), sample_columns(B=4, T=5)["mask"]
    assert torch.autograd.gradcheck(lambda x: f(x, mask), (x,))
    assert torch.autograd.grad(f(x, mask).sum(), x)[0][mask].any()


def by_weight(f):
    def loss(out, b):
        pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, f(b.old_logprobs, b.rollout_logprobs, b.mask)*b.advantages,
                               b.mask, denom=b.n_tokens)
        return pg, metrics | mismatch_metrics(b.old_logprobs, b.rollout_logprobs, b.mask)
    return loss

def by_mask(f):
    def loss(out, b):
        keep = f(b.old_logprobs, b.rollout_logprobs, b.mask) & off_policy_sequence_mask(
            out.logprobs, b.rollout_logprobs, b.advantages, b.mask, threshold=.05)
        pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, keep, denom=b.n_tokens)
        return pg, metrics | mismatch_metrics(b.old_logprobs, b.rollout_logprobs, b.mask, keep=keep)
    return loss

@pytest.mark.parametrize("loss", [by_weight(WEIGHTS[k]) for k in ("tis", "icepop", "sequence tis")]
                         + [by_mask(MASKS[k]) for k in ("geometric", "mean k3")])
def test_corrected_losses_obey_every_law(loss):
    assert {"split", "metrics", "mask", "empty", "empty_rows"} <= set(check_loss(loss, policy=False))


@every
def test_a_row_knows_only_itself(f): # so it may stand before the step, inside the loss, on any piece
    old, rollout, mask = columns()
    whole = f(old, rollout, mask)
    for i in range(len(old)): assert torch.equal(f(old[i:i+1], rollout[i:i+1], mask[i:i+1])[0], whole[i])


# -- numbers

def test_golden_weights():
    args = rows([.5, 1., 2., 3.6, nan], [6., nan, nan, nan, nan], rollout=-2.)
    assert_close(truncated_weights(*args), torch.tensor([[.5, 1., 2., 2., 0.], [2., 0., 0., 0., 0.]]))
    assert_close(truncated_weights(*args, low=.8, high=5.), torch.tensor([[.8, 1., 2., 3.6, 0.], [5., 0., 0., 0., 0.]]))
    assert_close(icepop_weights(*args), torch.tensor([[.5, 1., 2., 3.6, 0.], [0.]*5]))
    assert_close(icepop_weights(*args, low=.6, high=3.), torch.tensor([[0., 1., 2., 0., 0.], [0.]*5]))
    assert_close(sequence_weights(*args, high=inf), torch.tensor([[3.6]*4 + [0.], [6., 0., 0., 0., 0.]]))
    assert_close(sequence_weights(*args), torch.tensor([[2.]*4 + [0.], [2., 0., 0., 0., 0.]]))
    assert_close(geometric_weights(*args), torch.tensor([[3.6**.25]*4 + [0.], [2., 0., 0., 0., 0.]]))


def test_golden_masks():
    args = rows([2., nan, 2.], [1.2, .9, nan], [1., 1e-5, 1.])
    on = args[2]
    assert torch.equal(sequence_mask(*args), on & torch.tensor([[0], [1], [1]]).bool())
    assert torch.equal(sequence_mask(*args, low=.5), on & torch.tensor([[0], [1], [0]]).bool())
    assert torch.equal(geometric_mask(*args), on & torch.tensor([[1], [1], [0]]).bool())
    assert torch.equal(geometric_mask(*args, high=1.5), on & torch.tensor([[0], [1], [0]]).bool())
    assert torch.equal(veto_mask(*args), on & torch.tensor([[1], [1], [0]]).bool())
    assert veto_mask(*args, least=1e-6).equal(on)
    # bounds are inside: 2 is kept
    assert torch.equal(token_mask(*args), on & torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]]).bool())
    assert torch.equal(token_mask(*args, low=1., high=1.9), on & torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1]]).bool())
    k3 = [1 - math.log(2), (.2 - math.log(1.2) - .1 - math.log(.9))/2, (1e-5 - 1 - math.log(1e-5))/3]
    for i, x in enumerate(k3):
        kept = k3_mask(*args, nats_high=x*(1 + 1e-4)).any(1), k3_mask(*args, nats_high=x*(1 - 1e-4)).any(1)
        assert [k[i].item() for k in kept] == [True, False]
    x, on = torch.tensor([[1., 2., 3., nan]]), torch.tensor([[True, True, False, True]])
    assert within(x, on, low=1., high=2.).tolist() == [[True, True, False, False]]
    assert within(x, on, low=1.5).tolist() == [[False, True, False, False]]


def test_golden_binary_divergences():
    p, q, on = torch.tensor([[.001, .99, .5,
                              nan]]), torch.tensor([[.01, .8, .25, 1.]]), torch.tensor([[True, True, True, False]])
    two = [a*math.log(a/b) + (1-a)*math.log((1-a)/(1-b)) for a, b in ((.001, .01), (.99, .8), (.5, .25))]
    assert_close(binary_kl(q.log(), p.log(), on), torch.tensor([[*two, 0.]]), atol=1e-6, rtol=1e-4)
    assert_close(binary_tv(q.log(), p.log(), on), torch.tensor([[.009, .19, .25, 0.]]))
    sure, gone = torch.zeros(1, 1), torch.full((1, 1), -inf)
    # bounded: −log 10⁻⁶
    for a, b in ((sure, gone), (gone, sure)):
        assert_close(binary_kl(a, b, on[:, :1]).item(), 13.8155, atol=2e-2, rtol=0)
    assert binary_kl(sure, sure, on[:, :1]) == 0 == binary_tv(gone, gone, on[:, :1])
    assert binary_tv(sure, gone, on[:, :1]) == 1
    assert not binary_kl(p.requires_grad_(), q, on).requires_grad


def test_binary_divergences_are_lower_bounds():
    a, b = torch.randn(2, 200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    for v in range(6):
        token = b[:, v:v+1], a[:, v:v+1], torch.ones(200, 1).bool() # a sampled
        assert (binary_kl(*token)[:, 0] <= full_kl(a, b) + 1e-12).all()
        assert (binary_tv(*token)[:, 0] <= (a.exp() - b.exp()).abs().sum(-1)/2 + 1e-12).all()
        assert (binary_kl(*token) >= 2*binary_tv(*token)**2 - 1e-12).all() # Pinsker


# far and bad is dropped; far and good, near, and likelier than it was are kept
def test_golden_off_policy_sequence_mask():
    rollout, on = torch.full((5, 2), -2.), torch.ones(5, 2).bool()
    now = rollout - torch.tensor([[1., 1.], [0., 0.], [.4, 1.4], [.2, .6], [-1., -1.]])
    A = torch.tensor([1., -1., -1., -1., -1.])[:, None].expand(5, 2)
    assert off_policy_sequence_mask(now, rollout, A, on,
                                    threshold=.5).tolist() == [[True]*2, [True]*2, [False]*2, [True]*2, [True]*2]
    mixed = torch.tensor([[1., -1.]]).expand(5, 2) # advantages of tokens: only the negative ones of a far row
    assert off_policy_sequence_mask(now, rollout, mixed, on, threshold=.5)[2].tolist() == [True, False]
    assert off_policy_sequence_mask(now, rollout, 0*A, on, threshold=0.).all()


def test_golden_staleness():
    on = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool()
    version = torch.tensor([7, 6, 2, 9]) # the last from the future: fresh
    for now in (7, torch.tensor(7)):
        assert_close(staleness_weights(version, on, now=now), torch.tensor([[1., 1.], [.5, 0.], [1/6, 1/6], [1., 1.]]))
        assert_close(staleness_weights(version, on, now=now, power=.5)[2], torch.tensor([6**-.5]*2))
        assert staleness_weights(version, on, now=now, power=0.).equal(on.float())
        assert fresh_mask(version, on, now=now).equal(on & torch.tensor([[1], [1], [0], [1]]).bool())
        assert fresh_mask(version, on, now=now, max_age=5).equal(on)
        assert fresh_mask(version, on, now=now, max_age=0).any(1).tolist() == [True, False, False, True]
    in_flight = torch.tensor([[7, 7], [5, 6], [2, 3], [7, 0]])
    assert_close(staleness_weights(in_flight, on, now=7), torch.tensor([[1., 1.], [1/3, 0.], [1/6, 1/5], [1., 1/8]]))
    assert fresh_mask(in_flight, on, now=7)[3].tolist() == [True, False]


def test_golden_proximal_logprobs(): # half, none, none and three quarters of the way from 1/8 to 1/2, in logs
    now, rollout, on = (torch.tensor([[.5, .5]]*4).log(), torch.tensor([[.125, .125]]*4).log(),
                        torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool())
    half, quarters = .25, .125*4**.75
    for t in (7, torch.tensor(7)):
        got = proximal_logprobs(now, rollout, torch.tensor([5, 6, 9, 3]), on, now=t)
        assert_close(got[on].exp(), torch.tensor([half, half, .125, .125, .125, quarters, quarters]))
        assert got[1, 1] == 0
        in_flight = proximal_logprobs(now, rollout, torch.tensor([[5, 3], [5, 0], [7, 6], [3, 5]]), on, now=t)
        assert_close(in_flight[on].exp(), torch.tensor([half, quarters, half, .125, .125, quarters, half]))
    assert torch.equal(proximal_logprobs(now.bfloat16(), rollout.bfloat16(), torch.tensor([6]*4), on, now=7)[on],
                       rollout.bfloat16().float()[on])


@pytest.mark.parametrize("seed", range(3))
# AReaL's rule, α = (v_prox − v)/(v_now − v) where v < v_now, else 0, in Python floats
def test_proximal_logprobs_equal_oracle(seed):
    old, rollout, mask = columns(seed)
    version = torch.randint(0, 9, mask.shape, generator=torch.Generator().manual_seed(seed))
    got = proximal_logprobs(old, rollout, version, mask, now=6)
    for b, row in enumerate(mask.tolist()):
        for t, chosen in enumerate(row):
            v = version[b, t].item()
            alpha = min(max((5 - v)/(6 - v), 0.), 1.) if v < 6 else 0.
            assert_close(got[b, t].item(), rollout[b, t].item()*(1 - alpha) + alpha*old[b, t].item() if chosen else 0.)


def test_proximal_logprobs_are_exact_on_a_straight_line():
    start, slope, mask = *columns()[:2], columns()[2]
    for age in range(1, 6):
        got = proximal_logprobs(start + age*slope, start, torch.zeros(16).long(), mask, now=age)
        assert_close(got, torch.where(mask, start + (age - 1)*slope, 0.))


@pytest.mark.parametrize("seed", range(3))
def test_equals_oracle(seed):
    old, rollout, mask = columns(seed)
    wanted = naive(old, rollout, mask)
    for k, f in FREE.items():
        assert_close(f(old, rollout, mask), wanted[k])
        assert_close(f.func(old, rollout, mask, low=.8, high=1.2), torch.where(mask, wanted[k].clamp(.8, 1.2), 0.))
        assert_close(f(*columns(seed, torch.float32)).double(), wanted[k], rtol=1e-4, atol=1e-6)
    r, s, g = wanted.values()
    assert_close(icepop_weights(old, rollout, mask, low=.8, high=1.2), torch.where((r >= .8) & (r <= 1.2), r, 0.))
    assert torch.equal(token_mask(old, rollout, mask, low=.8, high=1.2), mask & (r >= .8) & (r <= 1.2))
    k3 = torch.where(mask, r - 1 - torch.where(mask, r, 1.).log(), 0.).sum(1, keepdim=True)/mask.sum(1, keepdim=True)
    assert torch.equal(k3_mask(old, rollout, mask, nats_high=.03), mask & (k3 <= .03))
    assert torch.equal(sequence_mask(old, rollout, mask, low=.5, high=1.5), mask & (s >= .5) & (s <= 1.5))
    assert torch.equal(geometric_mask(old, rollout, mask, low=.9, high=1.1), mask & (g >= .9) & (g <= 1.1))
    assert torch.equal(veto_mask(old, rollout, mask, least=.6), mask & ~((r < .6) & mask).any(1, keepdim=True))


@pytest.mark.parametrize("k", [kl_k1, kl_k2, kl_k3])
def test_rejection_is_reducer_times_divergence(k):
    old, rollout, mask = columns()
    x = torch.where(mask, {kl_k1: lambda x: x, kl_k2: lambda x: x**2/2,
                           kl_k3: lambda x: (-x).exp() - 1 + x}[k](rollout - old), nan)
    for reducer, of_row in ((row_sum, torch.nansum), (row_mean, torch.nanmean),
                            (row_max, lambda x, dim: x.nan_to_num(-inf).amax(dim))):
        wanted = torch.where(mask, of_row(x, 1)[:, None], 0.)
        assert_close(reducer(k(rollout, old, mask), mask), wanted)
        keep = within(reducer(k(rollout, old, mask), mask), mask, low=-.1, high=.1)
        assert torch.equal(keep, mask & (wanted >= -.1) & (wanted <= .1)) and 0 < keep.sum() < mask.sum()


# -- identities

def test_equal_log_probs_change_nothing():
    old, _, mask = columns()
    for f in WEIGHTS.values(): assert_close(f(old, old, mask), mask.double())
    for f in MASKS.values(): assert torch.equal(f(old, old, mask), mask)
    assert torch.equal(off_policy_sequence_mask(old, old, -old.abs(), mask, threshold=0.), mask)


def test_special_cases():
    old, rollout, mask = columns()
    one = mask & (mask.cumsum(1) == 1)
    for f in (sequence_weights, geometric_weights):
        assert_close(f(old, rollout, one), truncated_weights(old, rollout, one))
    inside = within(FREE["token"](old, rollout, mask), mask, low=.8, high=1.2)
    assert torch.equal(inside, token_mask(old, rollout, mask, low=.8, high=1.2))
    assert torch.equal(icepop_weights(old, rollout, mask, low=.8, high=1.2), FREE["token"](old, rollout, inside))
    whole = sequence_mask(old, rollout, mask, low=.8, high=1.2) # IcePop of whole answers
    product = FREE["sequence"](old, rollout, mask)
    assert torch.equal(FREE["sequence"](old, rollout, whole),
                       torch.where((product >= .8) & (product <= 1.2), product, 0.))
    assert torch.equal(k3_mask(old, rollout, one, nats_high=.03), within(kl_k3(rollout, old, one), one, high=.03))
    assert torch.equal(icepop_weights(old, rollout, mask, low=.8, high=1.2),
                       torch.where(inside, truncated_weights(old, rollout, mask, low=.8, high=1.2), 0.))
    assert_close(torch.where(mask, FREE["geometric"](old, rollout, mask)**mask.sum(1, keepdim=True), 0.),
                 FREE["sequence"](old, rollout, mask))
    assert_close(FREE["token"](old, rollout, mask)*FREE["token"](rollout, old, mask), mask.double())


def test_tool_tokens_and_padding_do_not_count():
    a, b = rows([2., .5, 3.]), rows([nan, 2., nan, .5, 3., nan])
    on = b[2][0]
    for f in [*WEIGHTS.values(), *MASKS.values()]: assert torch.equal(f(*b)[0][on], f(*a)[0])


def test_weighting_the_advantage_is_weighting_the_loss():
    cols = sample_columns()
    lp, old, rollout, A, mask = (cols[k]
                                 for k in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"))
    for f in WEIGHTS.values():
        for kw in ({}, dict(dual_clip=1.5)):
            w = f(old, rollout, mask)
            assert_close(ppo_loss(lp, old, w*A, mask, **kw)[0],
                         aggregate(w*clipped_surrogate(log_ratio(lp, old, mask).exp(), A, mask, **kw), mask))


def test_bypass_is_exact_weights_at_the_first_step_and_replacing_old_is_inert():
    cols = sample_columns()
    old, rollout, A, mask = (cols[k] for k in ("old_logprobs", "rollout_logprobs", "advantages", "mask"))
    lp = old.clone().requires_grad_()
    def grad(loss): return torch.autograd.grad(loss, lp)[0]
    w = FREE["token"](old, rollout, mask)
    bypass = grad(ppo_loss(lp, rollout, A, mask, clip_low=1., clip_high=inf)[0])
    assert_close(bypass, grad(ppo_loss(lp, old, w*A, mask)[0]))
    assert_close(bypass, -w*torch.where(mask, A, 0.)/mask.sum())
    inert = grad(ppo_loss(lp, lp.detach(), truncated_weights(rollout, rollout, mask)*A, mask)[0])
    assert_close(inert, -torch.where(mask, A, 0.)/mask.sum())


def test_dropping_before_or_after_the_count(): # LAWS 13
    args = rows([1., 1., 1., 10.])
    zero, A, on = torch.zeros(1, 4), -torch.ones(1, 4), args[2]
    keep = within(icepop_weights(*args), on, low=.5)
    assert ppo_loss(zero, zero, icepop_weights(*args)*A, on)[0] == .75 == ppo_loss(zero, zero, A, keep, denom=4)[0]
    assert ppo_loss(zero, zero, A, keep)[0] == 1 == ppo_loss(zero, zero, A, keep, denom=int(keep.sum()))[0]


# -- exact expectations: all nine answers of two tokens out of three

def enumerated(seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    def answers():
        return torch.stack([torch.randn(3, generator=g, dtype=torch.float64).log_softmax(0)[a],
                            torch.randn(3, 3, generator=g, dtype=torch.float64).log_softmax(1)[a, b]], 1)
    return answers(), answers(), torch.randn(9, generator=g, dtype=torch.float64)

@pytest.mark.parametrize("seed", range(5))
def test_the_product_is_unbiased_for_answers_and_a_ratio_for_its_choice(seed):
    old, rollout, f = enumerated(seed)
    p, q, on = old.sum(1).exp(), rollout.sum(1).exp(), torch.ones(9, 2).bool()
    assert_close((q*FREE["sequence"](old, rollout, on)[:, 0]*f).sum(), (p*f).sum())
    assert_close((q*FREE["sequence"](old, rollout, on)[:, 0]).sum().item(), 1.)
    token = FREE["token"](old, rollout, on)
    assert_close((q*token[:, 1]*f).sum(), (rollout[:, 0].exp()*old[:, 1].exp()*f).sum())
    assert ((q*token[:, 1]*f).sum() - (p*f).sum()).abs() > 1e-3
    for w in (sequence_weights(old, rollout, on, high=1.1), FREE["geometric"](old, rollout, on)):
        assert ((q*w[:, 0]*f).sum() - (p*f).sum()).abs() > 1e-4
    kl = (q[:, None]*kl_k1(rollout, old)).sum(), (q[:, None]*kl_k3(rollout, old)).sum() # both estimate KL(rollout‖old)
    assert_close(kl[0], (q*(rollout - old).sum(1)).sum())


def test_self_normalised_on_the_whole():
    old, rollout, mask = columns()
    w = truncated_weights(old, rollout, mask)
    assert_close(masked_mean(w/masked_mean(w, mask), mask).item(), 1.)


# -- edges

@every
def test_half_precision_is_widened(f):
    for dtype in (torch.bfloat16, torch.float16):
        old, rollout, mask = columns(dtype=dtype)
        x = f(old, rollout, mask)
        assert x.dtype in (torch.float32, torch.bool) and torch.equal(x, f(old.float(), rollout.float(), mask))
    assert f(*columns()).dtype in (torch.float64, torch.bool)


def test_extremes():
    old, rollout, on = (torch.tensor([[-inf, -1.], [-1e6, -1.], [0., -1.], [nan, -1.]]),
                        torch.tensor([[-1., -1.], [-1., -1.], [-1e6, -1.], [-1., -1.]]), torch.ones(4, 2).bool())
    assert_close(FREE["token"](old, rollout, on)[:3, 0], torch.tensor([math.exp(-20)]*2 + [math.exp(20)]))
    assert_close(FREE["sequence"](old.expand(2, 4, 2).transpose(0, 1).flatten(1), rollout.expand(2, 4, 2).transpose(
        0, 1).flatten(1), torch.ones(4, 4).bool())[2, 0].item(), math.exp(20), rtol=1e-5, atol=0)
    assert veto_mask(old, rollout, on).any(1).tolist() == [False, False, True, False]
    # an engine's nan stays visible in a weight
    assert [f(old, rollout, on)[3].isnan().any().item() for f in WEIGHTS.values()] == [True]*len(WEIGHTS)
    # and is not kept by a mask
    assert not any(f(old, rollout, on)[3, 0] for f in MASKS.values())


def test_a_long_row_is_decided_by_noise():
    g = torch.Generator().manual_seed(0)
    log_rho = .03*torch.randn(256, 8192, generator=g) - .03**2/2
    args = log_rho, 0*log_rho, torch.ones_like(log_rho).bool()
    product, mean = FREE["sequence"](*args)[:, 0], FREE["geometric"](*args)[:, 0]
    dropped = ~sequence_mask(*args)[:, 0]
    assert product.median() < .05 and (mean - 1).abs().max() < .003
    assert .01 < dropped.float().mean() < .1 and product[dropped].sum() > .5*product.sum()
    assert geometric_mask(*args, low=.99, high=1.01).all()


# -- the device and the compiler

CALLS = {**WEIGHTS, **{f"mask {k}": f for k, f in MASKS.items()},
         "opsm": lambda old, rollout, mask: off_policy_sequence_mask(old, rollout, old, mask, threshold=.1),
         "proximal": lambda old, rollout, mask: proximal_logprobs(old, rollout, old[:, 0].abs().long(), mask,
                                                                  now=mask.sum()),
         "fresh": lambda old, rollout, mask: fresh_mask(rollout.long(), mask, now=3),
         "stale": lambda old, rollout, mask: staleness_weights(rollout[:, 0].long(), mask, now=mask.sum())}

@pytest.mark.parametrize("f", CALLS.values(), ids=CALLS)
def test_compiles_in_one_graph_and_never_waits(f):
    torch.compiler.reset() # partials share a frame, whose recompilations are counted
    args = columns(dtype=torch.float32)
    assert_close(torch.compile(f, fullgraph=True, backend="eager")(*args), f(*args), rtol=0, atol=0)
    meta = f(*(x.to("meta") for x in args)) # a tensor without values cannot be looked at
    assert meta.is_meta and meta.shape == args[0].shape


# -- errors

def errors():
    x, m = torch.zeros(4, 7), torch.ones(4, 7).bool()
    same = "they must be equal, nothing is broadcast"
    for f in (truncated_weights, icepop_weights, sequence_weights, geometric_weights, sequence_mask, geometric_mask,
              token_mask, k3_mask, veto_mask):
        yield lambda f=f: f(x, x[:, :1],
                            m), ValueError, f"{f.__name__}: rollout_logprobs is [4, 1], old_logprobs is [4, 7]; {same}"
        yield (lambda f=f: f(x, x, m.int()), TypeError,
               f"{f.__name__}: mask is int32; masks are Bool (mask.bool(), or mask > 0)")
    for f in (truncated_weights, icepop_weights, sequence_weights, geometric_weights, token_mask, sequence_mask,
              geometric_mask):
        yield (lambda f=f: f(x, x, m, low=3., high=2.), ValueError,
               f"{f.__name__}: low is 3.0, high is 2.0; they are bounds of a ratio, 0 ≤ low ≤ high")
        yield (lambda f=f: f(x, x, m, low=-1.), ValueError,
               f"{f.__name__}: low is -1.0, high is {f.__kwdefaults__['high']}; they are bounds of a ratio, 0 ≤ low ≤ "
               "high")
        yield (
            lambda f=f: f(x, x, m, high=nan), ValueError,
            f"{f.__name__}: low is {f.__kwdefaults__['low']}, high is nan; they are bounds of a ratio, 0 ≤ low ≤ high")
    for f in (binary_kl, binary_tv):
        yield (lambda f=f: f(x, x[:, 0], m), ValueError,
               f"{f.__name__}: rollout_logprobs is [4], old_logprobs is [4, 7]; spread row values with "
               "at_tokens(rollout_logprobs, mask)")
    for f in (row_sum, row_mean, row_max, within):
        yield (lambda f=f: f(x[:, 0], m), ValueError,
               f"{f.__name__}: x is [4], mask is [4, 7]; spread row values with at_tokens(x, mask)")
    yield (lambda: within(x, m, low=1., high=0.), ValueError,
           "within: low is 1.0, high is 0.0; nothing lies between them, low ≤ high is wanted")
    yield (lambda: off_policy_sequence_mask(x, x, x[:, 0], m, threshold=1.), ValueError,
           "off_policy_sequence_mask: advantages is [4], logprobs is [4, 7]; spread row values with "
           "at_tokens(advantages, mask)")
    v = torch.zeros(4).long()
    for f in (staleness_weights, fresh_mask):
        yield (lambda f=f: f(v[1:], m, now=1), ValueError,
               f"{f.__name__}: policy_version is [3], mask is [4, 7]; one version per row, or per token, is wanted")
        yield lambda f=f: f(v, m.int(),
                            now=1), TypeError, f"{f.__name__}: mask is int32; masks are Bool (mask.bool(), or mask > 0)"
    yield (lambda: proximal_logprobs(x, x, v[1:], m, now=1), ValueError,
           "proximal_logprobs: policy_version is [3], mask is [4, 7]; one version per row, or per token, is wanted")
    yield (lambda: proximal_logprobs(x, x[:, 1:], v, m, now=1), ValueError,
           f"proximal_logprobs: rollout_logprobs is [4, 6], logprobs is [4, 7]; {same}; column t is token t, also of "
           "log-probs, whose column 0 is 0 (token_logprobs)")
    yield (lambda: staleness_weights(v, m, now=1, power=-1.), ValueError,
           "staleness_weights: power is -1.0; older tokens count less for power > 0, as much for 0")


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
