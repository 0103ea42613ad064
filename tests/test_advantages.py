"Advantages: goldens, oracles, bitwise laws, gradients, compilation, cost and errors (LAWS 5, 6, 21, 25, 42)."
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rlblocks.signals.advantages import (
    at_tokens, discounted_returns, gae, length_adaptive_lam, linear_scan, n_step_returns, reinforce_pp_advantages,
    remax_advantages, vtrace,
)
from rlblocks.arithmetic.masked import whiten
from rlblocks.testing.oracles import naive_gae, naive_returns
from rlblocks.testing.laws import check_estimator
from rlblocks.testing.oracles import sample_columns

nan, inf = math.nan, math.inf
DISCOUNTS = [(1., .95), (1., 1.), (.99, .95), (.9999, .9999), (.9, .5), (.1, .5), (1., 0.), (0., 1.)]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def row(*x): return torch.tensor([x], dtype=torch.float32)
def bools(*x): return torch.tensor([x]).bool()


def noise(B, T, dtype=torch.float32, seed=0, share=.7):
    "Rewards, values, and a mask with holes anywhere."
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, generator=g,
                       dtype=dtype), torch.randn(B, T, generator=g, dtype=dtype), torch.rand(B, T, generator=g) < share


def loop_gae(r, v, mask, *, gamma, lam):
    "Step by step in float64, for rows that are too long for naive_gae."
    r, v = r.double(), v.double()
    after_v = after_a = torch.zeros(len(r), dtype=torch.float64)
    out = torch.zeros_like(r)
    for t in reversed(range(r.shape[1])):
        m, a = mask[:, t], r[:, t] + gamma*after_v - v[:, t] + gamma*lam*after_a
        out[:, t] = torch.where(m, a, 0.)
        after_v, after_a = torch.where(m, v[:, t], after_v), torch.where(m, a, after_a)
    return out, torch.where(mask, out + v, 0.)


# -- time: goldens

def test_gae_by_hand():
    advantages, returns = gae(row(0, 0, 1), row(.5, .6, .8), bools(1, 1, 1), gamma=.9, lam=.5)
    assert_close(advantages, row(.1345, .21, .2))
    assert_close(returns, row(.6345, .81, 1.))


def test_gae_skips_a_tool():
    assert_close(gae(row(0, 7, 1), row(.5, 9, .8), bools(1, 0, 1), gamma=.9, lam=.5)[0], row(.31, 0, .2))
    assert_close(gae(row(0, 0, 0, 0, 0, 1), torch.full((1, 6), .5), bools(1, 1, 0, 0, 1, 1))[0],
                 row(.428687, .45125, 0, 0, .475, .5))


def test_gae_never_bootstraps_from_padding():
    assert_close(gae(row(0, 1, 0), row(0, 0, 100), bools(1, 1, 0))[0], row(.95, 1, 0))


def test_returns_by_hand():
    assert_close(discounted_returns(row(0, 0, 1), bools(1, 0, 1), gamma=.5), row(.5, 0, 1))
    assert_close(discounted_returns(row(1.5, 1, 2, 2), bools(1, 1, 0, 0)), row(2.5, 1, 0, 0))


def test_defaults():
    r, v, m = noise(2, 9)
    for got, want in zip(gae(r, v, m), naive_gae(r, v, m, gamma=1., lam=.95), strict=True):
        assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    assert_close(discounted_returns(r, m).double(), naive_returns(r, m, gamma=1.), atol=1e-6, rtol=1e-6)


# -- time: oracles

@pytest.mark.parametrize("gamma,lam", DISCOUNTS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 7), (16, 16), (2, 63), (2, 64), (2, 65)])
def test_equals_the_sum_it_abbreviates(shape, gamma, lam):
    r, v, m = noise(*shape, torch.float64)
    assert_close(gae(r, v, m, gamma=gamma, lam=lam), naive_gae(r, v, m, gamma=gamma, lam=lam), atol=1e-12, rtol=1e-12)
    assert_close(discounted_returns(r, m, gamma=gamma*lam), naive_returns(r, m, gamma=gamma*lam), atol=1e-12,
                 rtol=1e-12)


@pytest.mark.parametrize("gamma,lam", DISCOUNTS)
@pytest.mark.parametrize("shape,share",
                         [((128, 50), .7), ((3, 4097), .7), ((2, 5000), .02), ((2, 3000), 1.), ((2, 100), 0.)])
def test_float32_agrees_with_a_float64_loop(shape, share, gamma, lam):
    r, v, m = noise(*shape, share=share)
    for got, want in zip(gae(r, v, m, gamma=gamma, lam=lam), loop_gae(r, v, m, gamma=gamma, lam=lam), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_an_offset_costs_no_digits():
    r, v, m = noise(4, 2000)
    last = m & (m.cumsum(1) == m.sum(1, keepdim=True))
    r, v = r + 1000*last, v + 1000
    want, _ = loop_gae(r, v, m, gamma=1., lam=.95)
    assert (gae(r, v, m)[0] - want).abs().max() <= 1e-6 * want.abs().max()


# -- a λ for each row

@both_dtypes
@pytest.mark.parametrize("gamma", [1., .9, .1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (4, 65), (3, 1000), (5, 2**17 - 1)])
def test_a_lam_for_each_row_is_a_call_for_each_row(shape, gamma, dtype):
    r, v, m = noise(*shape, dtype)
    lam, x = torch.linspace(0, 1, len(r), dtype=torch.float64), noise(*shape, dtype, seed=1)[0]/3
    for f in (gae, partial(vtrace, log_ratios=x)):
        got = f(r, v, m, gamma=gamma, lam=lam)
        for i in range(len(r)):
            row_of = {k: c[i:i+1] for k, c in f.keywords.items()} if isinstance(f, partial) else {}
            want = getattr(f, "func", f)(r[i:i+1].double(), v[i:i+1].double(), m[i:i+1], gamma=gamma, lam=float(lam[i]),
                                         **{k: c.double() for k, c in row_of.items()})
            for a, b in zip(got, want, strict=True):
                assert a.dtype == dtype
                assert (a[i] - b[0]).abs().max() <= 64*torch.finfo(dtype).eps * max(1, b.abs().max())


def test_equal_lams_are_one_lam_and_laws_hold_to_the_bit():
    r, v, m = noise(4, 200, torch.float64)
    for a, b in zip(gae(r, v, m, gamma=.99, lam=torch.full((4,), .95)),
                    gae(r, v, m, gamma=.99, lam=float(torch.tensor(.95))), strict=True):
        assert_close(a, b, atol=1e-13, rtol=1e-13)
    for f in (gae, partial(vtrace, log_ratios=torch.zeros_like(r))):
        assert_close(f(r, v, m, lam=torch.full((4,), .5)), f(r, v, m, lam=.5))
    lam = torch.full((4,), .5, requires_grad=True)
    assert not gae(r, v, m, lam=lam)[0].requires_grad


def test_length_adaptive_lam_by_hand():
    m = torch.arange(100) < torch.tensor([[0], [10], [20], [40], [100]])
    assert_close(length_adaptive_lam(m), torch.tensor([0., 0., 0., .5, .8]))
    assert_close(length_adaptive_lam(m, alpha=.5), torch.tensor([0., .8, .9, .95, .98]))
    spread = torch.zeros(1, 300).bool()
    spread[:, ::3] = True  # chosen tokens count, a tool's do not
    assert_close(length_adaptive_lam(spread), torch.tensor([.8]))


def test_special_cases():
    r, v, m = noise(5, 70, torch.float64)
    none = torch.zeros_like(v)
    assert_close(discounted_returns(r, m, gamma=.9), gae(r, none, m, gamma=.9, lam=1.)[1])
    assert_close(gae(r, v, m, lam=1.)[0], torch.where(m, discounted_returns(r, m) - v, 0.))
    assert_close(gae(r, v, m, gamma=0.)[0], torch.where(m, r - v, 0.))


# -- time: laws

@pytest.mark.parametrize("estimate", [gae, partial(gae, gamma=.9, lam=1.), discounted_returns,
                                      partial(discounted_returns, gamma=.5)])
def test_time_estimators_obey_every_law(estimate):
    assert {"purity", "gradient", "mask", "empty", "permutation", "padding", "empty_rows",
            "precision"} <= set(check_estimator(estimate))


@both_dtypes
@pytest.mark.parametrize("junk", [0., 100., nan, inf, -inf])
def test_what_is_under_the_mask_changes_no_bit(junk, dtype):
    r, v, m = noise(4, 100, dtype)
    outs = []
    for fill in (0., junk):
        x = torch.where(m, r, fill).requires_grad_()
        out = (*gae(x, torch.where(m, v, fill), m, gamma=.99), discounted_returns(x, m, gamma=.9))
        grad, = torch.autograd.grad(sum(o.sin().sum() for o in out), x)
        outs.append((*out, grad))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert all(not x[~m].any() for x in outs[0])


@both_dtypes
@pytest.mark.parametrize("T", [1, 3, 60, 130])
def test_observations_change_no_bit(T, dtype):
    r, v, m = noise(3, T, dtype)
    want = *gae(r, v, m, gamma=.99), discounted_returns(r, m, gamma=.9)
    for k in range(51):
        at = k*T//50
        def insert(x, fill, at=at, k=k):
            return torch.cat([x[:, :at], torch.full((3, k), fill, dtype=x.dtype), x[:, at:]], 1)
        longer = insert(r, 5.), insert(v, nan), insert(m, False)
        got = *gae(*longer, gamma=.99), discounted_returns(longer[0], longer[2], gamma=.9)
        assert all(torch.equal(a, insert(b, 0.)) for a, b in zip(got, want, strict=True))


@both_dtypes
def test_rows_do_not_know_each_other(dtype):
    r, v, m = noise(9, 77, dtype)
    whole = gae(r, v, m)
    for i in range(9):
        alone = gae(r[i:i+1], v[i:i+1], m[i:i+1])
        assert all(torch.equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))


def test_many_rows_are_taken_few_at_a_time():
    r, v, m = noise(5, 2**17 - 1)
    whole = *gae(r, v, m, gamma=.99), discounted_returns(r, m, gamma=.99)
    for i in range(5):
        rows = slice(i, i+1)
        assert all(torch.equal(a[0], w[i])
                   for a, w in zip((*gae(r[rows], v[rows], m[rows], gamma=.99),
                                    discounted_returns(r[rows], m[rows], gamma=.99)), whole, strict=True))


def test_gradient_reaches_rewards_only():
    r, v, m = (x.requires_grad_() if x.is_floating_point() else x for x in noise(2, 10, torch.float64))
    gae(r, v, m)[0].sum().backward()
    assert v.grad is None and r.grad[m].all() and not r.grad[~m].any()
    assert torch.autograd.gradcheck(lambda r: gae(r, v.detach(), m, gamma=.9), r)
    assert torch.autograd.gradcheck(lambda r: discounted_returns(r, m, gamma=.9), r)


def test_precision():
    r, v, m = noise(2, 10)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                          (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert {x.dtype for x in (*gae(r.to(dtype), v.to(dtype), m), discounted_returns(r.to(dtype), m))} == {wanted}
    assert gae(r, v.double(), m)[0].dtype == gae(r.double(), v, m)[0].dtype == torch.float64


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (1, 1)])
def test_nothing_to_do(shape):
    none, mask = torch.zeros(shape), torch.zeros(shape).bool()
    for x in (*gae(none, none, mask), discounted_returns(none, mask)): assert x.shape == shape and not x.any()


# -- cost

class Work(TorchDispatchMode):
    "Kernels launched and numbers written."
    ops = written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops += 1
        if isinstance(out, torch.Tensor) and not out._is_view(): self.written += out.numel()
        return out


def work(T):
    with Work() as w: gae(*noise(4, T))
    return w


def test_work_is_linear_in_tokens_and_launches_are_logarithmic():
    small, large = work(2**12), work(2**15)
    assert large.written < 8.2*small.written < 8.2 * 40*4*2**12
    assert large.ops - small.ops < 3*25


# every time estimator as one function of (rewards, values, log-ratios, mask)
TIMED = {
    "gae": lambda r, v, x, m: gae(r, v, m, gamma=.99), "returns": lambda r, v, x, m: discounted_returns(r, m, gamma=.9),
    "gae, a lam a row": lambda r, v, x, m: gae(r, v, m, gamma=.9, lam=torch.full((len(r),), .8, device=r.device)),
    "n step": lambda r, v, x, m: n_step_returns(r, v, m, gamma=.9, n=5),
    "n beyond": lambda r, v, x, m: n_step_returns(r, v, m, gamma=.9, n=100),
    "vtrace": lambda r, v, x, m: vtrace(r, v, m, log_ratios=x, gamma=.9, lam=.9),
    "vtrace uncapped": lambda r, v, x, m: vtrace(r, v, m, log_ratios=x, rho_clip=inf, c_clip=inf),
}
timed = pytest.mark.parametrize("estimate", TIMED.values(), ids=TIMED)
CALLS = TIMED | {"at tokens": lambda r, v, x, m: at_tokens(r[:, 0], m),
                 "reinforce++": lambda r, v, x, m: reinforce_pp_advantages(r, m, gamma=.9),
                 "remax": lambda r, v, x, m: remax_advantages(r, v[:, 0], m),}


def tuples(x): return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_static_shapes_and_no_look_at_the_data(call):
    r, v, m = noise(6, 70)
    args = r, v, noise(6, 70, seed=1)[0], m
    want = call(*args)
    # a tensor without data cannot be looked at: item, nonzero, unique, if x > 0 all raise
    meta = call(*(x.to("meta") for x in args))
    compiled = torch.compile(call, fullgraph=True, backend="eager")(*args)
    for w, m, c in zip(*map(tuples, (want, meta, compiled)), strict=True):
        assert m.shape == w.shape and m.dtype == w.dtype and torch.equal(w, c)


# -- time: the wider family

def loop_vtrace(r, v, x, mask, *, gamma=1., lam=1., rho_clip=1., c_clip=1., pg_clip=1.):
    "Step by step in float64."
    r, v, w = r.double(), v.double(), x.double().clamp(-20, 20).exp()
    later_v = later_target = torch.zeros(len(r), dtype=torch.float64)
    advantages, targets = torch.zeros_like(r), torch.zeros_like(r)
    for t in reversed(range(r.shape[1])):
        m, rho, c = mask[:, t], w[:, t].clamp(max=rho_clip), lam*w[:, t].clamp(max=c_clip)
        target = v[:, t] + rho*(r[:, t] + gamma*later_v - v[:, t]) + gamma*c*(later_target - later_v)
        advantages[:, t] = torch.where(
            m, w[:, t].clamp(max=pg_clip)*(r[:, t] + gamma*(lam*later_target + (1 - lam)*later_v) - v[:, t]), 0.)
        targets[:, t] = torch.where(m, target, 0.)
        later_v, later_target = torch.where(m, v[:, t], later_v), torch.where(m, target, later_target)
    return advantages, targets


def loop_n_step(r, v, mask, *, gamma, n):
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for b, row_ in enumerate(mask.tolist()):
        at = [t for t, m in enumerate(row_) if m]
        for i, t in enumerate(at):
            out[b, t] = sum(gamma**k*float(r[b, u])
                            for k, u in enumerate(at[i:i+n])) + (gamma**n*float(v[b, at[i+n]]) if i+n < len(at) else 0.)
    return out


def test_targets_by_hand():
    r, v, every = row(0, 0, 1), row(.5, .6, .8), bools(1, 1, 1)
    assert_close(gae(r, v, every, gamma=.9, lam=.5)[1], row(.6345, .81, 1))
    assert_close(n_step_returns(r, v, every, gamma=.9, n=2), row(.648, .9, 1))
    assert_close(n_step_returns(row(0, 5, 0, 1), row(.5, 9, .6, .8), bools(1, 0, 1, 1), gamma=.9, n=2),
                 row(.648, 0, .9, 1))


def test_vtrace_by_hand():
    advantages, targets = vtrace(row(0, 1), row(.5, .6), bools(1, 1), log_ratios=row(2, .5).log())
    assert_close(advantages, row(.3, .2)), assert_close(targets, row(.8, .8))
    advantages, targets = vtrace(row(0, 1), row(.5, .6), bools(1, 1), log_ratios=row(2, .5).log(), rho_clip=2.,
                                 c_clip=1.5, gamma=.5, lam=.5)
    # .5·.6 − .5 = −.2, twice; and γ·λ·1.5 of the .2 that comes later
    assert_close(targets, row(.5 + 2*(.3 - .5) + .5*.75*.2, .8))
    # λ of what the next token's target says, 1 − λ of its value; the weight is 1 here, not 2
    assert_close(advantages, row(.5*(.5*.8 + .5*.6) - .5, .2))
    assert_close(vtrace(row(0, 1), row(.5, .6), bools(1, 1), log_ratios=row(2, .5).log(), gamma=.5, lam=.5, rho_clip=2.,
                        c_clip=1.5, pg_clip=2.)[0], row(-.3, .2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64, 100, 10**9])
def test_n_steps_equal_a_loop(n):
    r, v, m = noise(3, 90, torch.float64)
    assert_close(n_step_returns(r, v, m, gamma=.97, n=n), loop_n_step(r, v, m, gamma=.97, n=min(n, 90)), atol=1e-12,
                 rtol=1e-12)


def test_what_is_beyond_n_leaves_no_trace():
    r, v, m = noise(1, 200, share=1.)
    r[0, -1] = 1e8
    assert_close(n_step_returns(r, v, m, n=10)[:, :180].double(), loop_n_step(r, v, m, gamma=1., n=10)[:, :180],
                 atol=1e-5, rtol=0)


@pytest.mark.parametrize("caps", [{}, dict(gamma=.9, lam=.7), dict(rho_clip=inf, c_clip=.5), dict(
    rho_clip=.3, c_clip=inf, gamma=.99), dict(gamma=.9, lam=.4, pg_clip=.6), dict(lam=.8, rho_clip=.7, pg_clip=inf)])
@pytest.mark.parametrize("shape,share", [((1, 1), 1.), ((3, 64), .7), ((2, 65), .7), ((2, 1000), .9), ((2, 100), 0.)])
def test_vtrace_equals_a_loop(shape, share, caps):
    r, v, m = noise(*shape, torch.float64, share=share)
    x = noise(*shape, torch.float64, seed=1)[0]/2
    for got, want in zip(vtrace(r, v, m, log_ratios=x, **caps), loop_vtrace(r, v, x, m, **caps), strict=True):
        assert_close(got, want, atol=1e-10, rtol=1e-10)
    for got, want in zip(vtrace(r.float(), v.float(), m, log_ratios=x.float(), **caps), loop_vtrace(r, v, x, m, **caps),
                         strict=True):
        assert (got - want).abs().max() <= 1e-5*want.abs().max()


def test_relatives():
    r, v, m = noise(5, 70, torch.float64)
    none = torch.zeros_like(r)
    assert_close(n_step_returns(r, v, m, gamma=.9, n=1), gae(r, v, m, gamma=.9, lam=0.)[1])
    assert_close(n_step_returns(r, v, m, gamma=.9, n=70), discounted_returns(r, m, gamma=.9))
    for lam in (0., .5, .95, 1.):
        assert_close(vtrace(r, v, m, log_ratios=none, gamma=.9, lam=lam), gae(r, v, m, gamma=.9, lam=lam))
    assert_close(vtrace(r, v, m, log_ratios=none + 9, gamma=.9, lam=.6), gae(r, v, m, gamma=.9, lam=.6))
    assert_close(reinforce_pp_advantages(r, m, gamma=.9), whiten(discounted_returns(r, m, gamma=.9), m))
    assert_close(remax_advantages(r, none[:, 0], m), discounted_returns(r, m))


def test_an_impossible_token_stops_the_credit():
    r, v, m = row(0, 0, 1), row(0, 0, 0), bools(1, 1, 1)
    for extreme in (-inf, -1e4): assert vtrace(r, v, m, log_ratios=row(0, extreme, 0))[1][0, 0] < 1e-8
    for extreme in (inf, 1e4): assert_close(vtrace(r, v, m, log_ratios=row(0, extreme, 0))[1], row(1, 1, 1))
    assert vtrace(r, v, m, log_ratios=row(0, inf, 0), rho_clip=inf, c_clip=inf)[1].isfinite().all()


def test_scan_with_a_decay_for_each():
    x, d = noise(2, 37, torch.float64)[:2]
    y = [x[:, 0]]
    for k in range(1, 37): y.append(x[:, k] + d[:, k]*y[-1])
    assert_close(linear_scan(x, d), torch.stack(y, 1))
    assert_close(linear_scan(x, torch.full_like(x, .9)), linear_scan(x, .9))


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 64, 65, 513, 4097])
def test_scan_at_every_seam(n):
    """Blocks, blocks of blocks, and one entry more or less; what follows in the row changes no bit, a NaN reaches
    nothing before it."""
    x, d = noise(2, n, torch.float64, share=1.)[:2]
    d = d.sigmoid()
    for decay in (d, .9, 0., 1.):
        y, want = torch.zeros(2, dtype=torch.float64), []
        for k in range(n): want.append(y := x[:, k] + (decay[:, k] if isinstance(decay, torch.Tensor) else decay)*y)
        got, longer = linear_scan(x, decay), linear_scan(torch.cat([x, torch.full((2, 70), nan)], 1), torch.cat(
            [decay, decay.new_ones(2, 70)], 1) if isinstance(decay, torch.Tensor) else decay)
        assert_close(got, torch.stack(want, 1))
        assert torch.equal(longer[:, :n], got) and longer[:, n:].isnan().all()


def test_ratios_without_a_cap_multiply_to_infinity_not_to_nan():
    r, v, x, m = row(*[0]*39, 1), row(*[0]*40), row(*[15]*40), bools(*[1]*40)
    returns = vtrace(r, v, m, log_ratios=x, rho_clip=1., c_clip=inf)[1]
    assert not returns.isnan().any() and returns[0, 0] == inf and returns[0, -1] == 1


def test_reinforce_pp_by_hand():
    on = torch.ones(2, 2).bool()
    assert_close(reinforce_pp_advantages(torch.tensor([[0., 1.], [0., -1.]]), on),
                 torch.tensor([[1., 1.], [-1., -1.]])*.75**.5)
    with_nan = reinforce_pp_advantages(torch.tensor([[0., 1.], [0., -1.], [0., nan]]), torch.ones(3, 2).bool())
    assert torch.equal(with_nan[:2], reinforce_pp_advantages(torch.tensor([[0., 1.], [0., -1.]]), on))
    assert with_nan[2].isnan().all()
    assert not reinforce_pp_advantages(torch.tensor([[0., .95], [.95, 0.]]).flip(1),
                                       torch.tensor([[True, False], [False, True]])).any()


def test_remax_by_hand():
    r, greedy, m = torch.tensor([[0., 1., 0.], [.5, 0., 2.], [0., 1., 0.],
                                 [0., nan, 0.]]), torch.tensor([1., 2., nan, 0.]), bools(1, 1, 0).expand(4, 3).clone()
    m[1, 2] = True
    # no baseline is 0, no reward is NaN
    assert_close(remax_advantages(r, greedy, m), torch.tensor([[0., 0, 0], [.5, 0, 0], [0, 0, 0], [nan, nan, 0]]),
                 equal_nan=True)
    r.requires_grad_(), greedy.requires_grad_()
    remax_advantages(r, greedy, m)[:3].sum().backward()
    assert greedy.grad is None and r.grad.isfinite().all() and not r.grad[2].any()


@both_dtypes
@timed
def test_all_of_them_are_blind_to_tools_and_padding(estimate, dtype):
    (r, v, m), x = noise(3, 60, dtype), noise(3, 60, dtype, seed=1)[0]
    want = tuples(estimate(r, v, x, m))
    for junk in (100., nan, inf, -inf):
        filled = [torch.where(m, c, junk) for c in (r, v, x)]
        assert all(torch.equal(a, b) for a, b in zip(tuples(estimate(*filled, m)), want, strict=True))
    for k in (1, 5, 50):
        def insert(c, fill, k=k): return torch.cat([c[:, :30], torch.full((3, k), fill).to(c.dtype), c[:, 30:]], 1)
        got = tuples(estimate(*(insert(c, nan) for c in (r, v, x)), insert(m, False)))
        assert all(torch.equal(a, insert(b, 0.)) for a, b in zip(got, want, strict=True))
        assert all(y.dtype == dtype for y in got)


@timed
def test_all_of_them_know_one_row_at_a_time(estimate):
    (r, v, m), x = noise(5, 77), noise(5, 77, seed=1)[0]
    whole = tuples(estimate(r, v, x, m))
    for i in range(5):
        assert all(torch.equal(a[0], w[i])
                   for a, w in zip(tuples(estimate(*(c[i:i+1] for c in (r, v, x, m)))), whole, strict=True))


@pytest.mark.parametrize("estimate", CALLS.values(), ids=CALLS)
def test_gradients_are_right_and_only_of_rewards(estimate):
    r, v, m = noise(2, 9, torch.float64)
    r, v, x = (c.requires_grad_() for c in (r, v, noise(2, 9, torch.float64, seed=1)[0]))
    out = torch.cat([y.flatten() for y in tuples(estimate(r, v, x, m))])
    out.sin().sum().backward()
    assert v.grad is None and x.grad is None and r.grad.isfinite().all()
    assert torch.autograd.gradcheck(lambda r: tuples(estimate(r, v.detach(), x.detach(), m)), r)


@pytest.mark.parametrize("estimate", CALLS.values(), ids=CALLS)
def test_half_precision_is_computed_in_single(estimate):
    r, v, m = noise(2, 10)
    x = noise(2, 10, seed=1)[0]
    for half in (torch.bfloat16, torch.float16):
        narrow = [c.to(half) for c in (r, v, x)]
        for got, want in zip(tuples(estimate(*narrow, m)), tuples(estimate(*(c.float() for c in narrow), m)),
                             strict=True):
            assert got.dtype == torch.float32 and torch.equal(got, want)
    for c in tuples(estimate(*(c[:, :0] for c in (r, v, x)),
                             m[:, :0])) if estimate not in (CALLS["at tokens"], CALLS["remax"]) else ():
        assert c.shape == (2, 0)


LAWFUL = {"gae, a lam a row": (gae, dict(lam="chance"), dict(gamma=.9)), "n step": (n_step_returns, {}, dict(n=3)),
          "reinforce++": (reinforce_pp_advantages, {}, dict(gamma=.9)),
          "vtrace": (vtrace, dict(log_ratios="entropy"), dict(gamma=.9, lam=.9)),
          "remax": (remax_advantages, dict(greedy_scores="scores"), {}),}


@pytest.mark.parametrize("f,columns,hyper", LAWFUL.values(), ids=LAWFUL)
def test_the_wider_family_obeys_every_law(f, columns, hyper):
    cols = sample_columns()
    cols["chance"] = cols["scores"].sigmoid()
    laws = check_estimator(f, {name: cols[column] for name, column in columns.items()}, **hyper)
    assert {"purity", "gradient", "mask", "empty", "permutation", "padding", "empty_rows", "precision"} <= set(laws)


def test_vtrace_takes_many_rows_few_at_a_time():
    (r, v, m), x = noise(5, 2**17 - 1), noise(5, 2**17 - 1, seed=1)[0]
    for whole, *parts in zip(TIMED["vtrace"](r, v, x, m),
                             *(TIMED["vtrace"](*(c[i:i+1] for c in (r, v, x, m))) for i in range(5)), strict=True):
        assert torch.equal(whole, torch.cat(parts))


# -- at_tokens

def test_at_tokens_names_the_axis():
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]]).bool()
    assert at_tokens(torch.tensor([1., 2., 3.]), mask).tolist() == [[0, 1, 1], [0, 2, 0], [0, 3, 3]]
    check_estimator(at_tokens, dict(x=sample_columns()["scores"]))
    assert not at_tokens(torch.tensor([nan]), bools(0, 0)).any()


# -- errors

def errors():
    r, m, s = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4)
    yield (lambda: gae(r, r[:, :1], m), ValueError,
           "gae: values is [4, 1], rewards is [4, 7]; they must be equal, nothing is broadcast")
    yield (lambda: gae(r, s, m), ValueError,
           "gae: values is [4], rewards is [4, 7]; spread row values with at_tokens(values, mask)")
    yield lambda: gae(r, r, m.int()), TypeError, "gae: mask is int32; masks are Bool (mask.bool(), or mask > 0)"
    yield lambda: gae(r, r, m, gamma=1.1), ValueError, "gae: gamma is 1.1, lam is 0.95; both lie within [0, 1]"
    yield lambda: gae(r, r, m, lam=nan), ValueError, "gae: gamma is 1.0, lam is nan; both lie within [0, 1]"
    yield (lambda: discounted_returns(r, m[:, 1:]), ValueError,
           "discounted_returns: rewards is [4, 7], mask is [4, 6]; they must be equal, nothing is broadcast")
    yield lambda: discounted_returns(r, m,
                                     gamma=-1), ValueError, "discounted_returns: gamma is -1; it lies within [0, 1]"
    yield (lambda: discounted_returns(r, m.long()), TypeError,
           "discounted_returns: mask is int64; masks are Bool (mask.bool(), or mask > 0)")
    yield lambda: gae(r, r, m,
                      lam=s[1:]), ValueError, "gae: lam is [3], mask is [4, 7]; a number is wanted, or one per row"
    yield lambda: gae(r, r, m, lam=s,
                      gamma=2.), ValueError, "gae: gamma is 2.0, lam is one per row; both lie within [0, 1]"
    yield (lambda: vtrace(r, r, m, log_ratios=r, lam=s.sum()), ValueError,
           "vtrace: lam is [], mask is [4, 7]; a number is wanted, or one per row")
    yield (lambda: length_adaptive_lam(m, alpha=0.), ValueError,
           "length_adaptive_lam: alpha is 0.0; a share of the answer is positive")
    yield (lambda: length_adaptive_lam(m.int()), TypeError,
           "length_adaptive_lam: mask is int32; masks are Bool (mask.bool(), or mask > 0)")
    yield (lambda: n_step_returns(r, r, m, n=0), ValueError,
           "n_step_returns: n is 0, gamma is 1.0; n is at least 1, gamma lies within [0, 1]")
    yield (lambda: n_step_returns(r, r, m, n=1, gamma=2.), ValueError,
           "n_step_returns: n is 1, gamma is 2.0; n is at least 1, gamma lies within [0, 1]")
    yield (lambda: vtrace(r, r, m, log_ratios=s), ValueError,
           "vtrace: log_ratios is [4], rewards is [4, 7]; spread row values with at_tokens(log_ratios, mask)")
    yield lambda: vtrace(r, r, m, log_ratios=r,
                         gamma=nan), ValueError, "vtrace: gamma is nan, lam is 1.0; both lie within [0, 1]"
    yield (lambda: vtrace(r, r, m, log_ratios=r, c_clip=0.), ValueError,
           "vtrace: rho_clip is 1.0, c_clip is 0.0, pg_clip is 1.0; a cap is positive, inf = none")
    yield (lambda: vtrace(r, r, m, log_ratios=r, pg_clip=nan), ValueError,
           "vtrace: rho_clip is 1.0, c_clip is 1.0, pg_clip is nan; a cap is positive, inf = none")
    yield (lambda: reinforce_pp_advantages(r, m.int()), TypeError,
           "reinforce_pp_advantages: mask is int32; masks are Bool (mask.bool(), or mask > 0)")
    yield (lambda: reinforce_pp_advantages(r, m, gamma=-1.), ValueError,
           "reinforce_pp_advantages: gamma is -1.0; it lies within [0, 1]")
    yield (lambda: remax_advantages(r, s[1:], m), ValueError,
           "remax_advantages: greedy_scores is [3], mask is [4, 7]; one score per row is wanted")
    yield lambda: at_tokens(s[1:], m), ValueError, "at_tokens: x is [3], mask is [4, 7]; one value per row is wanted"
    yield lambda: at_tokens(r, m), ValueError, "at_tokens: x is [4, 7], mask is [4, 7]; one value per row is wanted"
    yield lambda: at_tokens(s,
                            m.int()), TypeError, "at_tokens: mask is int32; masks are Bool (mask.bool(), or mask > 0)"


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
