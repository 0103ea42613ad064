"""Laws of the log-probabilities: one distribution on both sides, the fused head equal to the plain one, in the
memory of one chunk."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tiny import bound
from rlblocks.arithmetic.head import linear_logprobs, linear_measured
from rlblocks.arithmetic.logprobs import entropy, gather_logprobs, sequence_logprobs, token_logprobs


def sample(*shape, V=7, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return 3*torch.randn(*shape, V, generator=g, dtype=dtype), torch.randint(V, shape, generator=g)


# plain

def test_gather_is_log_softmax():
    z, ids = sample(3, 5)
    for tau in (.5, 1., 2, torch.rand(3, 5, dtype=torch.float64) + .5):
        per_id = tau.unsqueeze(-1) if isinstance(tau, torch.Tensor) else tau
        assert_close(gather_logprobs(z, ids, temperature=tau),
                     (z/per_id).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1))
        assert_close(entropy(z, temperature=tau), torch.distributions.Categorical(logits=z/per_id).entropy())


def test_gradients_are_those_of_the_definition():
    z, ids = sample(2, 3)
    support = torch.tensor([[0, 1, 2], [3, 4, -1], [-1, -1, -1]]).expand(2, 3, 3)
    reachable = torch.tensor([0, 3, 6]).expand(2, 3)
    for kw in ({}, dict(temperature=.7), dict(support=support)):
        assert torch.autograd.gradcheck(lambda z, kw=kw: (gather_logprobs(z, reachable, **kw), entropy(z, **kw)),
                                        z.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids), z.clone().requires_grad_())


def test_tokens_keep_their_columns():
    z, ids = sample(2, 4)
    lp = token_logprobs(z, ids, temperature=torch.tensor([.5, 2.], dtype=torch.float64))
    for b,tau in enumerate((.5, 2.)):
        assert lp[b, 0] == 0
        for t in range(1, 4): assert_close(lp[b, t], (z[b, t-1]/tau).log_softmax(0)[ids[b, t]])
    assert token_logprobs(z[:, :1], ids[:, :1]).tolist() == [[0.], [0.]]


def test_support_is_everything_else_at_minus_infinity():
    z, ids = sample(4)
    support = torch.tensor([[0, 3, 5], [1, -1, -1], [-1, -1, -1], [-1, 6, 2]])
    allowed = (support.unsqueeze(-1) == torch.arange(7)).any(1) | (support < 0).all(1, keepdim=True)
    confined = z.masked_fill(~allowed, -torch.inf)
    assert_close(gather_logprobs(z, ids, support=support), confined.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
    assert_close(entropy(z, support=support), torch.distributions.Categorical(logits=confined).entropy())
    shifted = token_logprobs(z[None], ids[None], support=support[None])
    assert_close(shifted[0, 1:], gather_logprobs(z[:-1], ids[1:], support=support[1:]))


# LAWS 2: the ratio of a policy to itself

@pytest.mark.parametrize("tau,top_p", list(itertools.product([.6, 1., 1.3], [1., .8])))
def test_a_policy_agrees_with_itself(tau, top_p):
    z = torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)*3
    p, order = (z/tau).softmax(0).sort(descending=True)
    kept = order[p.cumsum(0) - p < top_p]
    sampled = p[:len(kept)]/p[:len(kept)].sum()
    again = gather_logprobs(z.expand(len(kept), -1), kept, temperature=tau, support=kept.expand(len(kept), -1)).exp()
    assert_close(again, sampled)
    full = gather_logprobs(z.expand(len(kept), -1), kept, temperature=tau).exp()
    assert_close((sampled*full/sampled).sum(), p[:len(kept)].sum()) # without the support: the kept mass
    if tau != 1: assert (gather_logprobs(z.expand(len(kept), -1), kept).exp() - sampled).abs().max() > .01


# edges

@pytest.mark.parametrize("junk", [0., 100., float("nan"), float("inf"), float("-inf")])
def test_positions_are_independent(junk):
    z, ids = sample(2, 4)
    good = torch.tensor([[True, False, True, True], [True, True, False, False]])
    support = torch.tensor([0, 1, 2, 3, 4, 5, 6]).expand(2, 4, 7)
    for f in (gather_logprobs, lambda z, _: entropy(z), lambda z, t: gather_logprobs(z, t, support=support),
              lambda z, t: gather_logprobs(z, t, temperature=.5)):
        runs = []
        for fill in (0., junk):
            x = torch.where(good.unsqueeze(-1), z, fill).requires_grad_()
            y = torch.where(good, f(x, ids), 0.)
            runs.append((y, torch.autograd.grad(y.sum(), x)[0][good]))
        assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("junk", [0., 100., float("nan"), float("inf"), float("-inf")])
def test_sequence_logprobs_see_only_the_mask(junk):
    lp, mask = sample(3, V=4)[0], torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]) > 0
    x = torch.where(mask, lp, junk).requires_grad_()
    out = sequence_logprobs(x, mask)
    assert torch.equal(out, torch.where(mask, lp, 0.).sum(1)) and out[2] == 0
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], mask.double())


def test_a_greedy_row_leaves_no_nan():
    z, ids = sample(2, 3)
    W = torch.randn(5, 7, dtype=torch.float64)
    tau, mask = torch.tensor([0., 1.], dtype=torch.float64), torch.tensor([[False]*3, [True]*3])
    for f in (lambda z: token_logprobs(z, ids, temperature=tau),
              lambda z: entropy(z, temperature=tau[:, None].expand(2, 3)),
              lambda h: linear_logprobs(h.flatten(0, 1), W, ids.flatten() % 5,
                                        temperature=tau.repeat_interleave(3)).view(2, 3)):
        x = z.clone().requires_grad_()
        assert torch.autograd.grad(torch.where(mask, f(x), 0.).sum(), x)[0].isfinite().all()
    assert_close(token_logprobs(z, ids, temperature=tau)[0], token_logprobs(z, ids)[0])


def test_excluded_ids_leave_entropy_finite():
    z = torch.tensor([1., 2., -torch.inf], requires_grad=True)
    h = entropy(z)
    assert_close(h, entropy(z[:2].detach()))
    assert torch.autograd.grad(h, z)[0].isfinite().all() and entropy(torch.tensor([0., -torch.inf])) == 0


def test_outside_its_support_a_target_has_no_probability():
    z = torch.zeros(1, 3, requires_grad=True)
    lp = gather_logprobs(z, torch.tensor([2]), support=torch.tensor([[0, 1]]))
    assert lp == -torch.inf and torch.autograd.grad(lp.sum(), z)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_single_precision(dtype):
    z, ids = sample(3, 5, dtype=torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    for f in (lambda z: gather_logprobs(z, ids), lambda z: token_logprobs(z, ids), entropy,
              lambda z: entropy(z, temperature=.5)):
        assert f(z.to(dtype)).dtype is wide
        assert_close(f(z.to(dtype)), f(z.to(dtype).to(wide)))
    lp, h = linear_logprobs(z[0].to(dtype), torch.randn(4, 7).to(dtype), ids[0] % 4, entropy=True)
    assert lp.dtype is h.dtype is wide


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_any_integer_type(dtype):
    z, ids = sample(3, 5)
    for support in (None, torch.arange(7, dtype=dtype).expand(3, 5, 7)):
        assert_close(gather_logprobs(z, ids.to(dtype), support=support), gather_logprobs(z, ids))
    h = z[0].clone().requires_grad_()
    lp = linear_logprobs(h, torch.eye(7).double(), ids[0].to(dtype))
    lp.sum().backward()
    assert_close(lp, gather_logprobs(z[0], ids[0]))


# the fused head

def head(n=11, H=4, V=9, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return *(torch.randn(*s, generator=g, dtype=dtype)
             for s in ((n, H), (V, H), (V,))), torch.randint(V, (n,), generator=g)


def value_and_gradients(f, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    lp, h = f(*inputs)
    mix = torch.linspace(-1, 2, len(lp), dtype=lp.dtype)
    return lp, h, *torch.autograd.grad((mix*lp + mix.flip(0)*h).sum(), inputs)


def plain(ids, tau=1.):
    return lambda h, W, b: (gather_logprobs(F.linear(h, W, b), ids, temperature=tau),
                            entropy(F.linear(h, W, b), temperature=tau))
def fused(ids, tau=1., chunk=None):
    return lambda h, W, b: linear_logprobs(h, W, ids, bias=b, temperature=tau, entropy=True, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3, 11, 64, None])
@pytest.mark.parametrize("tau", [1., .7, 2, "rows"])
def test_fused_is_plain(chunk, tau):
    h, W, b, ids = head()
    if tau == "rows": tau = torch.linspace(0, 2, 11, dtype=torch.float64)
    for x,y in zip(value_and_gradients(fused(ids, tau, chunk), h, W, b), value_and_gradients(plain(ids, tau), h, W, b),
                   strict=True):
        assert_close(x, y, atol=1e-10, rtol=1e-10)
        assert y.abs().max() > .1 # a common factor of 0 would hide everything


@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fused_is_plain_in_lower_precision(dtype, tol):
    *inputs, ids = head(64, 32, 50, dtype=torch.float32)
    for x,y in zip(value_and_gradients(fused(ids, .7, 64), *(x.to(dtype) for x in inputs)),
                   value_and_gradients(plain(ids, .7), *(x.to(dtype) for x in inputs)), strict=True):
        assert (x - y).abs().max() <= tol*y.abs().max()


def test_fused_golden():
    W = torch.tensor([[1.], [2.], [5.]]).log().requires_grad_()
    lp = linear_logprobs(torch.ones(1, 1), W, torch.tensor([1]))
    assert_close(lp.exp(), torch.tensor([.25]))
    assert_close(torch.autograd.grad(lp.sum(), W)[0], torch.tensor([[-.125], [.75], [-.625]]))


def test_each_output_alone_and_each_input_alone():
    h, W, b, ids = head()
    whole = value_and_gradients(plain(ids), h, W, b)
    for i,(f,wanted) in enumerate(zip((fused(ids), fused(ids)), whole, strict=False)):
        leaf = h.clone().requires_grad_()
        out = f(leaf, W, b)[i]
        assert_close(out, wanted)
        twin = h.clone().requires_grad_()
        assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y,x in ((out, leaf), (plain(ids)(twin, W, b)[i], twin))))
    for k in range(3):
        inputs = [x.clone().requires_grad_(j == k) for j,x in enumerate((h, W, b))]
        linear_logprobs(inputs[0], inputs[1], ids, bias=inputs[2], chunk=4).sum().backward()
        assert [x.grad is not None for x in inputs] == [j == k for j in range(3)]
    assert not any(x.requires_grad for x in (h, W, b))


def test_fused_without_gradient_without_rows_and_under_autocast():
    h, W, b, ids = head(dtype=torch.float32)
    with torch.no_grad(): assert_close(linear_logprobs(h, W, ids, bias=b), gather_logprobs(F.linear(h, W, b), ids))
    assert linear_logprobs(h[:0].requires_grad_(), W, ids[:0]).sum().backward() is None
    runs = []
    for f in (fused(ids, chunk=4), plain(ids)):
        leaves = [x.clone().requires_grad_() for x in (h, W, b)]
        # bf16 from the body, fp32 in the head
        with torch.autocast("cpu", torch.bfloat16): lp, ent = f(leaves[0] @ torch.eye(4), *leaves[1:])
        (lp + ent).sum().backward() # outside of autocast, as always
        runs.append([lp, ent, *(x.grad for x in leaves)])
    for x,y in zip(*runs, strict=True):
        assert x.dtype is y.dtype is torch.float32
        assert_close(x, y, atol=.05, rtol=.05)


def test_padded_vocabulary():
    h, W, b, ids = head()
    b[-1] = -torch.inf
    for chunk in (2, None):
        for x,y in zip(value_and_gradients(fused(ids % 8, chunk=chunk), h, W, b),
                       value_and_gradients(fused(ids % 8), h, W[:8], b[:8]), strict=True):
            assert x.isnan().sum() == 0
            assert_close(x[:len(y)], y)


class Live(TorchDispatchMode):
    "Most bytes alive at one time of what was made inside."
    def __init__(self): super().__init__(); self.storages, self.peak = {}, 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and (s := x.untyped_storage())._cdata not in before:
                self.storages[s._cdata] = StorageWeakRef(s), s.nbytes()
        self.storages = {k: v for k,v in self.storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _,size in self.storages.values()))
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_of_logits_at_a_time(dtype, with_entropy):
    "LAWS 12: extra peak of both passes ≤ 1.25 × chunk × V × 4 bytes, whatever the number of positions."
    h, W, ids = (torch.randn(512, 2, dtype=dtype, requires_grad=True),
                 torch.randn(4000, 2, dtype=dtype, requires_grad=True), torch.zeros(512, dtype=torch.long))
    with Live() as live:
        out = linear_logprobs(h, W, ids, entropy=with_entropy, chunk=128)
        (sum(out) if with_entropy else out).sum().backward()
    assert live.peak <= 1.25*128*4000*4
    with Live() as live: gather_logprobs(F.linear(h, W), ids).sum().backward()
    assert live.peak > 2*512*4000*4 # the measure sees what the plain path does


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("softcap,tau,low,confined", [(2., 1., False, False), (None, .7, True, False),
                                                      (.5, "rows", False, True), (3., .5, True, True)])
def test_heads_of_every_shape(chunk, softcap, tau, low, confined):
    h, W, b, ids = head()
    g = torch.Generator().manual_seed(1)
    A, B = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 4), (9, 3)))
    if tau == "rows": tau = torch.linspace(.5, 2, 11, dtype=torch.float64)
    # some targets are outside, some slots empty
    support = torch.stack([torch.randperm(10, generator=g)[:4] - 1 for _ in ids]) if confined else None
    if confined: support[:2] = -1; support[1, 2] = ids[1]
    def new(h, W, b, A, B):
        return linear_logprobs(h, W, ids, bias=b, low_rank=(h@A.T, B) if low else None, softcap=softcap,
                               temperature=tau, support=support, entropy=True, chunk=chunk)
    def old(h, W, b, A, B):
        z = F.linear(h, W, b) + (h@A.T@B.T if low else 0*A.sum()*B.sum())
        if softcap: z = softcap*torch.tanh(z/softcap)
        return gather_logprobs(z, ids, temperature=tau, support=support), entropy(z, temperature=tau, support=support)
    runs = []
    for f in (new, old):
        inputs = [x.clone().requires_grad_() for x in (h, W, b, A, B)]
        lp, H = f(*inputs)
        finite = lp.isfinite()
        runs.append([lp, H, *torch.autograd.grad(torch.where(finite, lp, 0.).cos().sum() + H.sin().sum(), inputs,
                                                 allow_unused=True)])
    for x,y in zip(*runs, strict=True):
        if x is not None: assert_close(x, y, atol=1e-10, rtol=1e-10)
    assert (runs[0][5] is not None) == low and runs[0][0].isfinite().any()


@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("softcap,tau,low,confined",
                         [(None, 1., False, False), (2., 1., True, False), (None, .7, True, False),
                          (.5, "rows", False, True), (3., .5, True, True)])
def test_a_frozen_head_gives_the_gradients_of_one_that_learns(chunk, softcap, tau, low, confined, dtype, tol):
    """They come from the forward pass, where the logits are; with the entropy, and for a head that learns, from the
    backward pass."""
    h, W, b, ids = head()
    h, W, b = (x.to(dtype) for x in (h, W, b))
    g = torch.Generator().manual_seed(1)
    low = tuple(torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((11, 3), (9, 3))) if low else None
    if tau == "rows": tau = torch.linspace(0, 2, 11)
    support = torch.stack([torch.randperm(10, generator=g)[:4] - 1 for _ in ids]) if confined else None
    runs = []
    for learns in (False, True):
        leaves = [x.clone().requires_grad_(k == 0 or learns) for k,x in enumerate((h, W, b))]
        thin = tuple(x.clone().requires_grad_(k == 0 or learns) for k,x in enumerate(low)) if low else None
        lp = linear_logprobs(leaves[0], leaves[1], ids, bias=leaves[2], low_rank=thin, softcap=softcap, temperature=tau,
                             support=support, chunk=chunk)
        loss = torch.where(lp.isfinite(), lp, 0.).square().sum()
        assert loss > .1
        runs.append([lp, *torch.autograd.grad(loss, [leaves[0], *(thin or ())[:1]])])
    for x,y in zip(*runs, strict=True):
        assert x.dtype == y.dtype and (x - y)[y.isfinite()].abs().max() <= tol*y[y.isfinite()].abs().max()
    only = low[0].clone().requires_grad_() if low else None # an adapter's input alone wants a gradient
    if low:
        assert torch.autograd.grad(linear_logprobs(h, W, ids, low_rank=(only, low[1]), chunk=chunk).sum(),
                                   only)[0].abs().max() > 0


def test_golden_gradients_of_hidden_states():
    "Rows log 1, log 2, log 5 at h = 1: p = ⅛, ¼, ⅝; ∂log p(1)/∂h = log 2 − Σ p·w, ∂H/∂h = −variance of w under p."
    w, one = torch.tensor([1., 2., 5.]).log(), torch.tensor([1])
    mean = .25*math.log(2) + .625*math.log(5)
    variance = .25*math.log(2)**2 + .625*math.log(5)**2 - mean**2
    for learns in (False, True):
        for with_entropy in (False, True):
            h = torch.ones(1, 1, requires_grad=True)
            found = linear_logprobs(h, w[:, None].clone().requires_grad_(learns), one, entropy=with_entropy)
            lp, H = found if with_entropy else (found, None)
            assert_close(torch.autograd.grad(lp.sum(), h, retain_graph=True)[0].item(), math.log(2) - mean, atol=1e-6,
                         rtol=0)
            if with_entropy: assert_close(torch.autograd.grad(H.sum(), h)[0].item(), -variance, atol=1e-6, rtol=0)


def test_a_frozen_head_in_the_memory_of_a_chunk():
    h, W, ids = torch.randn(512, 2, requires_grad=True), torch.randn(4000, 2), torch.zeros(512, dtype=torch.long)
    with Live() as live: linear_logprobs(h, W, ids, chunk=128).sum().backward()
    assert live.peak <= 1.25*128*4000*4


class Products(TorchDispatchMode):
    "How often logits were made, of a vocabulary of 11."
    count = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and out.shape[-1] == 11
        return out


@pytest.mark.parametrize("softcap,tau,confined,dtype", [(None, 1., False, torch.float64), (2., .7, True, torch.float64),
                                                        (None, 1., False, torch.bfloat16)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_last_chunk_is_made_once(with_entropy, softcap, tau, confined, dtype):
    """Its logits stand where the forward pass made them, and a second backward pass, which finds them used up, gives
    the same."""
    h, W, bias = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((10, 3), (11, 3), (11,)))
    ids, support = torch.randint(11,
                                 (10,)), torch.stack([torch.randperm(11)[:5] for _ in range(10)]) if confined else None
    for chunk,chunks in ((10, 1), (4, 3), (3, 4)):
        with Products() as made:
            out = linear_logprobs(h, W, ids, bias=bias, softcap=softcap, temperature=tau, support=support,
                                  entropy=with_entropy, chunk=chunk)
            out = out[0] + .3*out[1] if with_entropy else out
            loss = out[out.isfinite()].sum()
            first = torch.autograd.grad(loss, (h, W, bias), retain_graph=True)
        assert made.count == 2*chunks - 1
        with Products() as made: second = torch.autograd.grad(loss, (h, W, bias))
        assert made.count == chunks
        assert_close(second, first, rtol=0, atol=0)


def test_calls_that_wait_hold_one_chunk_together():
    "Only the newest keeps its logits; the gradients of all are right, in any order."
    h, W, ids = [torch.randn(8, 4, requires_grad=True)
                 for _ in range(6)], torch.randn(5000, 4, requires_grad=True), torch.zeros(8, dtype=torch.long)
    with Live() as live:
        waiting = [linear_logprobs(x, W, ids) for x in h]
        assert live.peak <= 2.2*8*5000*4 # one that stands, one in the making
        found = [torch.autograd.grad(out.sum(), (x, W))
                 for out, x in zip(waiting[::2] + waiting[1::2], h[::2] + h[1::2], strict=True)]
    for (dx, dW), x in zip(found, h[::2] + h[1::2], strict=True):
        assert_close((dx, dW), torch.autograd.grad(gather_logprobs(F.linear(x, W), ids).sum(), (x, W)))


def test_what_backward_reads_again_may_not_change_in_between():
    h, W, ids, support = (torch.randn(4, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True), torch.arange(4),
                          torch.randint(7, (4, 3)))
    for f in (lambda: linear_logprobs(h, W, ids, support=support),
              lambda: linear_measured(h, W, lambda z: z.logsumexp(-1), support=support)):
        loss = f().nan_to_num(neginf=0.).sum()
        support.add_(1).remainder_(7)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"): loss.backward()


def test_autocast_leaves_double_precision_alone():
    h, W, ids = torch.randn(4, 3).double(), torch.randn(7, 3).double(), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_logprobs(h, W, ids), linear_logprobs(h, W, ids).double())
        assert linear_logprobs(h, W, ids).dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 70_000), (0, 7)])
def test_entropy_in_passes_is_the_equation(dtype, shape):
    z = 3*torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    before, wide = z.clone(), torch.promote_types(dtype, torch.float32)
    for tau in (1., .5, torch.full(shape[:-1], .5)):
        leaf, twin = z.clone().requires_grad_(), z.clone().requires_grad_()
        H = entropy(leaf, temperature=tau)
        logp = (twin.double()/(tau if isinstance(tau, float) else .5)).log_softmax(-1)
        want = -(logp.exp()*logp).sum(-1)
        weights, most = (torch.linspace(.5, 1, want.numel(), dtype=torch.float64).view(want.shape),
                         float(want.detach().amax() if want.numel() else 0) + 1)
        # log-sum-exp, and so every log-probability, is off by bound(V, 1): p·log p by that times 1 + |log p|, on
        # average
        off = 2*bound(shape[-1], most, wide)
        assert_close(H.double(), want, rtol=0, atol=off)
        got, wanted = (torch.autograd.grad((x*weights).sum(), y)[0] for x,y in ((H, leaf), (want, twin)))
        assert got.dtype == dtype and got.shape == z.shape
        if not wanted.numel(): continue
        # w·p·(H + log p)/τ, w ≤ 1: the bracket cancels, so it is off by `off` for each of its terms, on both sides;
        # then a rounding to the leaf's dtype
        steep = float(logp.detach().exp().amax()) / (tau if isinstance(tau, float) else .5)
        assert_close(got, wanted, rtol=0, atol=4*off*steep + 2*torch.finfo(dtype).eps*float(wanted.abs().amax()))
        assert torch.equal(leaf.detach(), before)
    across = z.movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_() # strides of another layout
    assert_close(torch.autograd.grad(entropy(across).sum(), across)[0],
                 torch.autograd.grad(entropy(leaf).sum(), leaf)[0])


def test_half_weights_are_summed_in_single_precision():
    h, W, ids = (torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True),
                 torch.zeros(4096, dtype=torch.long))
    linear_logprobs(h, W, ids, chunk=8).sum().backward()
    assert W.grad.flatten().tolist() == [2048., -2048.] # in bfloat16 the sum of fours would stop at 1024


# compile, purity, errors

@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("what, says",
                         [(lambda h, W, t: entropy(h @ W.T), "entropy has"),
                          (lambda h, W, t: linear_logprobs(h, W, t), "linear_logprobs has"),
                          (lambda h, W, t: linear_logprobs(h, W, t, entropy=True)[1], "linear_logprobs has"),
                          (lambda h, W, t: linear_measured(h, W, lambda z: z.logsumexp(-1)), "linear_measured has")])
# through a network: for autograd, what is written in `backward` is a constant
def test_a_second_derivative_is_refused(what, says, learns):
    h, W, _, ids = (x.detach() for x in head())
    A = torch.eye(h.shape[1], dtype=h.dtype, requires_grad=True)
    value = what(h @ A, W.requires_grad_(learns), ids).square().sum()
    torch.autograd.grad(value, A, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"{says} no second derivative.*; take"):
        torch.autograd.grad(value, A, create_graph=True)


def test_logits_that_are_held_have_two_derivatives(): # what the refusal sends its reader to
    z, ids = sample(2, 3)
    assert torch.autograd.gradgradcheck(lambda z: (gather_logprobs(z, ids), torch.special.entr(z.softmax(-1)).sum(-1)),
                                        z.requires_grad_())


def test_compile_in_one_graph():
    z, ids = sample(2, 5)
    support, tau = torch.randint(-1, 7, (2, 5, 3)), torch.tensor([.5, 0.], dtype=torch.float64)
    for f in (gather_logprobs, token_logprobs, lambda z, t: entropy(z),
              lambda z, t: token_logprobs(z, t, temperature=tau, support=support),
              lambda z, t: entropy(z, support=support), lambda z, t: sequence_logprobs(token_logprobs(z, t), t > 2)):
        runs = []
        for g in (f, torch.compile(f, fullgraph=True, backend="eager")):
            x = z.clone().requires_grad_()
            y = torch.where((y := g(x, ids)).isfinite(), y, 0.)
            runs.append((y, torch.autograd.grad(y.sum(), x)[0]))
        assert_close(*runs)
    h, W, b, ids = head()
    for tau in (.7, torch.linspace(.5, 2, 11).double()):
        assert_close(value_and_gradients(torch.compile(fused(ids, tau, 4), fullgraph=True, backend="eager"), h, W, b),
                     value_and_gradients(plain(ids, tau), h, W, b))


def test_no_host_sync():
    # reading raises
    z, ids, row = torch.zeros(2, 5, 7, device="meta"), torch.zeros(2, 5, dtype=torch.long,
                                                                   device="meta"), torch.ones(2, device="meta")
    assert token_logprobs(z, ids, temperature=row,
                          support=ids.unsqueeze(-1)).shape == entropy(z, support=ids.unsqueeze(-1)).shape == (2, 5)


def test_nothing_is_mutated():
    h, W, b, ids = head()
    z = F.linear(h, W, b)
    before = [x.clone() for x in (h, W, b, ids, z)]
    value_and_gradients(fused(ids, .7, 3), h, W, b), gather_logprobs(z, ids, temperature=.7), entropy(z, temperature=.7)
    assert all(map(torch.equal, before, (h, W, b, ids, z)))


def test_errors_say_who_and_what():
    z, ids = sample(2, 4)
    h, W, b, t = head()
    for call,text in [
        (lambda: gather_logprobs(z, ids[:, 1:]),
         "gather_logprobs: logits[..., 0] is [2, 4], targets is [2, 3]; they must be equal, nothing is broadcast"),
        (lambda: token_logprobs(z[:, 1:], ids),
         "token_logprobs: logits[..., 0] is [2, 3], tokens is [2, 4]; they must be equal, nothing is broadcast"),
        (lambda: token_logprobs(z, ids, temperature=torch.ones(3)),
         "token_logprobs: temperature is [3], tokens[:, 0] is [2]; they must be equal, nothing is broadcast"),
        (lambda: gather_logprobs(z, ids, temperature=torch.ones(2)),
         "gather_logprobs: temperature is [2], targets is [2, 4]; spread row values with at_tokens(temperature, mask)"),
        (lambda: gather_logprobs(z, ids, support=torch.zeros(2, 3, 1, dtype=torch.long)),
         "gather_logprobs: support[..., 0] is [2, 3], targets is [2, 4]; they must be equal, nothing is broadcast"),
        (lambda: entropy(z, temperature=torch.ones(2)),
         "entropy: temperature is [2], logits[..., 0] is [2, 4]; spread row values with at_tokens(temperature, mask)"),
        (lambda: gather_logprobs(z, ids, temperature=0.),
         "gather_logprobs: temperature is 0.0, it must be positive; greedy rows are not trained on, clear their mask"),
        (lambda: entropy(z, temperature=-1),
         "entropy: temperature is -1, it must be positive; greedy rows are not trained on, clear their mask"),
        (lambda: linear_logprobs(h, W.half(), t), f"linear_logprobs: hidden is {h.dtype}, weight is torch.float16"),
        (lambda: linear_logprobs(h, W, t, bias=b[:1]),
         f"linear_logprobs: bias is [1], weight is {list(W.shape)}; one number for each id is wanted"),
        (lambda: linear_logprobs(h, W, t, low_rank=(h[:, :2], W[:, :1])),
         f"linear_logprobs: low_rank is [11, 2] and [{len(W)}, 1]; [N, R] and [V, R] are wanted"),
        (lambda: linear_logprobs(h, W, t, temperature=0),
         "linear_logprobs: temperature is 0, it must be positive; greedy rows are not trained on, clear their mask"),
        (lambda: linear_logprobs(h, W, t, temperature=torch.ones(1)),
         "linear_logprobs: temperature is [1], tokens is [11]; they must be equal, nothing is broadcast"),
        (lambda: linear_logprobs(h, W, t[1:]),
         "linear_logprobs: hidden[..., 0] is [11], tokens is [10]; they must be equal, nothing is broadcast"),
        (lambda: linear_logprobs(h, W, t, softcap=0.),
         "linear_logprobs: softcap is 0.0; it is the largest size of a logit and must be positive"),
        (lambda: linear_logprobs(h, W, t, chunk=0), "linear_logprobs: chunk is 0; it counts positions, 1 or more"),
        (lambda: sequence_logprobs(z[..., 0], ids[0] > 0), "sequence_logprobs: "),
    ]:
        with pytest.raises(ValueError) as e: call()
        assert str(e.value).startswith(text)
    with pytest.raises(TypeError, match="sequence_logprobs: mask is int64"): sequence_logprobs(z[..., 0], ids)


@pytest.mark.parametrize("support", [None, torch.arange(40).expand(3, 5, 40)])
def test_an_offset_that_all_logits_share_costs_no_digits(support):
    "Against float64 of the same fp32 logits: V·eps of a sum, and some eps of a log-probability."
    z = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(0)) + 1e4
    ids = torch.arange(15).view(3, 5)
    wide = z.double() if support is None else z.double()[..., :40]
    want, atol = wide.log_softmax(-1), 100*torch.finfo(z.dtype).eps
    assert_close(gather_logprobs(z, ids, support=support).double(), want.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
                 rtol=0, atol=atol)
    assert_close(entropy(z, support=support).double(), -(want.exp()*want).sum(-1), rtol=0, atol=atol)


class Operations(TorchDispatchMode):
    "How many operations are asked for."
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.split,
                                              torch.ops.aten.unsqueeze, torch.ops.aten.squeeze, torch.ops.aten.t)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("learns", [True, False])
def test_threads_meet_seldom(learns):
    """Each operation waits for its slowest thread: with two of them a chunk is a few large operations, forward and
    backward."""
    h, W, ids = torch.randn(512, 4).requires_grad_(), torch.randn(2000, 4).requires_grad_(learns), torch.arange(512)
    threads, counted = torch.get_num_threads(), Operations()
    try:
        torch.set_num_threads(2)
        with counted: linear_logprobs(h, W, ids, chunk=256).sum().backward()
    finally: torch.set_num_threads(threads)
    assert counted.n <= 2*8*12 # chunks, pieces, operations on each
