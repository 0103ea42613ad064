"""On a card: kernels are the torch passes, the head holds no N × V logits, no block waits, a compiler and a graph give
eager's numbers. Models: tests/test_gpu_models.py; without a card: tests/card.py."""
import os

import pytest
import torch
from card import CARD, graphed, most_bytes, no_waiting
from rlblocks import entropy, linear_logprobs
from rlblocks.arithmetic import kernels, passes
from rlblocks.arithmetic.head import CHUNKS
from test_laws import BLOCKS, CASES, LOSSES, arguments, block, differentiable, numbers
from torch.testing import assert_close

pytestmark = pytest.mark.gpu
needs_triton = pytest.mark.skipif(
    not kernels.find_triton() or not CARD and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton; on a CPU also TRITON_INTERPRET=1")

# of Qwen3, and one that is no multiple of a block
IDS = dict(real=151_936, odd=50_257) if CARD else dict(real=32, odd=19)
N, H, CHUNK, BLOCK = (300, 64, 128, 4096) if CARD else (9, 4, 4, 8)
HALF = (torch.bfloat16, torch.float16)


def by_kernels(monkeypatch, use):
    "Let passes over logits go by the kernels, or not; the list grows by each that does."
    calls = []
    def swept(*args): calls.append(1); return kernels.swept(*args, block=BLOCK)
    monkeypatch.setattr(passes, "swept", swept)
    monkeypatch.setattr(passes, "fits", lambda _: use)
    return calls


def both(monkeypatch, f):
    "What `f` gives by the torch passes and by the kernels."
    found = []
    for use in (False, True):
        calls = by_kernels(monkeypatch, use)
        found.append(f())
        assert bool(calls) == use
    return found


def near(found, wanted, rel):
    "Relative to the largest entry; what is −inf in one is in the other."
    assert found.shape == wanted.shape and torch.equal(found.isfinite(), wanted.isfinite())
    found, wanted = (torch.where(x.isfinite(), x.double(), 0.) for x in (found, wanted))
    off, scale = float((found - wanted).abs().max()), max(1., float(wanted.abs().max()))
    assert off <= rel*scale, f"off by {off:.3g}, the largest is {scale:.3g}, {rel:.3g} of that is allowed"


# -- the head
def problem(dtype, V, device, confined):
    "(floats, ids, support) of a head with logits of about ±10."
    g = torch.Generator().manual_seed(0)
    draw = lambda *s, by=1.: (by*torch.randn(*s, generator=g)).to(device, dtype)
    floats = draw(N, H), draw(V, H, by=2/H**.5), draw(V), draw(N, 2), draw(V, 2, by=.3)
    ids = torch.randint(V, (N,), generator=g).to(device)
    support = torch.stack([ids, (ids + 1) % V, (ids + 5) % V, torch.full_like(ids, -1)], 1)
    support[::3, 0] = -1        # the token itself is out: −inf
    support[1::4] = -1          # no support at all
    return floats, ids, support if confined else None


def exactly(floats, ids, support, softcap, tau):
    "Log-probs and entropy as they are written down."
    h, W, b, x, B = floats
    z = h @ W.T + b + x @ B.T
    if softcap: z = softcap*(z/softcap).tanh()
    z = z/(tau.double()[:, None] if isinstance(tau, torch.Tensor) else tau)
    if support is not None: z = z.masked_fill(passes.outside(support, z.shape[1]), -torch.inf)
    logp = z.log_softmax(-1)
    return logp.gather(1, ids[:, None])[:, 0], -(logp.exp()*logp.clamp(min=-1e9)).sum(-1)


def differentiated(f, floats, learns):
    "Log-probs, entropy, and gradients by hidden states and adapter, or by all."
    leaves = [t.clone().requires_grad_(learns or i in (0, 3)) for i, t in enumerate(floats)]
    lp, H = f(leaves)
    loss = torch.where(lp.isfinite(), lp, 0.).square().sum() + (0. if H is None else H.square().sum())
    grads = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    return [lp.detach(), *([] if H is None else [H.detach()]), *grads]


@needs_triton
@pytest.mark.parametrize("dtype, V, wants_entropy, softcap, tau, confined", [
    (torch.float32, "odd", False, None, 1., False), (torch.float32, "real", True, 30., "rows", True),
    (torch.bfloat16, "real", True, None, .7, False), (torch.bfloat16, "odd", True, 3., "rows", True),
    (torch.float16, "odd", False, 30., "rows", False), (torch.float16, "real", True, None, 1., True)])
def test_kernels_are_the_torch_passes_and_the_formula(monkeypatch, device, dtype, V, wants_entropy, softcap, tau,
                                                      confined):
    floats, ids, support = problem(dtype, IDS[V], device, confined)
    if tau == "rows": tau = torch.linspace(.5, 2, N, device=device)
    def ours(leaves):
        h, W, b, x, B = leaves
        found = linear_logprobs(h, W, ids, bias=b, low_rank=(x, B), softcap=softcap, temperature=tau, support=support,
                                entropy=wants_entropy, chunk=CHUNK)
        return found if wants_entropy else (found, None)
    def formula(leaves):
        lp, H = exactly(leaves, ids, support, softcap, tau)
        return lp, H if wants_entropy else None
    largest = float((floats[0].double() @ floats[1].double().T).abs().max()) + 3
    # half logits are rounded twice, with the bias and with the adapter; the rest is in fp32
    rounded = 4*torch.finfo(dtype).eps*largest if dtype in HALF else 2e-5     # τ is at least .5
    for learns in (True, False):
        plain, fast = both(monkeypatch, lambda learns=learns: differentiated(ours, floats, learns))
        exact = differentiated(formula, [t.double() for t in floats], learns)
        values = 1 + wants_entropy
        for i, (p, f, e) in enumerate(zip(plain, fast, exact, strict=True)):
            near(f, p, 2e-5 if i < values else 2e-2 if dtype in HALF else 1e-4)
            for x in (p, f): near(x, e, rounded if i < values else 6e-2 if dtype in HALF else 2e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_of_logits_by_kernels(monkeypatch, device, dtype):
    z = (3*torch.randn(2, 3, IDS["odd"], generator=torch.Generator().manual_seed(0))).to(device, dtype)
    z[0, 0, :BLOCK + 1] = -torch.inf    # a whole block is excluded
    tau = torch.linspace(.5, 2, 6, device=device).view(2, 3)
    def run():
        leaf = z.clone().requires_grad_()
        H = entropy(leaf, temperature=tau)
        return [H.detach(), *torch.autograd.grad(H.square().sum(), leaf), leaf.detach()]
    plain, fast = both(monkeypatch, run)
    p = (z.double()/tau.double()[..., None]).softmax(-1)
    near(fast[0], -torch.special.xlogy(p, p).sum(-1), 2e-5)
    near(fast[0], plain[0], 2e-5)
    assert plain[1].abs().max() > 0 and fast[1].shape == plain[1].shape
    assert (fast[1] - plain[1]).abs().max() <= (1e-2 if dtype in HALF else 1e-4)*plain[1].abs().max()
    assert torch.equal(fast[2], z)      # logits of the caller's are read only


@needs_triton
def test_an_id_outside_the_vocabulary_reads_nan(device):
    "No error of the device, which would end the process's use of it; the torch passes raise on a CPU."
    V, ids = 19, torch.tensor([-1, -100, 3, 19, 10**12], device=device)
    logits = torch.randn(5, V, device=device)
    lse, chosen = torch.empty(5, device=device), torch.empty(5, device=device)
    kernels.swept(logits, None, None, 1., None, ids, lse, chosen, None, False, None, None, None, block=BLOCK)
    assert chosen.isnan().tolist() == [True, True, False, True, True] and chosen[2] == logits[2, 3]
    assert_close(lse, logits.logsumexp(-1))


@pytest.mark.parametrize("use", [pytest.param(True, marks=needs_triton, id="kernels"),
                                 pytest.param(False, id="torch passes")])
def test_the_head_never_holds_all_logits(monkeypatch, device, record_property, use):
    "With entropy, forward and back: the gradients, the sum of the weight's in fp32, and two chunks of logits."
    V, width, n, chunk = (IDS["real"], 256, 16_384, CHUNKS["cuda"]) if CARD else (1024, 1, 64, 4)
    monkeypatch.setitem(globals(), "BLOCK", BLOCK if CARD else 1024)
    by_kernels(monkeypatch, use)
    h = torch.randn(n, width, device=device).bfloat16().requires_grad_()
    W = torch.randn(V, width, device=device).mul(width**-.5).bfloat16().requires_grad_()
    ids = torch.randint(V, (n,), device=device)
    def run(n=n):
        lp, H = linear_logprobs(h[:n], W, ids[:n], entropy=True, chunk=chunk)
        found = torch.autograd.grad((lp + .1*H).sum(), [h, W])
        assert all(x.isfinite().all() for x in found)
    run(2*chunk)        # kernels are built, and cuBLAS has what it works in
    held, whole = most_bytes(run), n*V*2
    allowed = h.nbytes + 3*W.nbytes + 2*chunk*V*2 + 64*n
    record_property("held", held), record_property("logits", whole)
    assert held <= allowed < whole/4


# -- blocks
def on(device, x):
    "Floats in fp32, as the kernels take them."
    if not isinstance(x, torch.Tensor): return x
    return x.to(device, torch.float32 if x.is_floating_point() else x.dtype)


def called(case, given, wrt):
    "All that a block gives, and of a loss its gradient."
    leaves = [given[k].clone().requires_grad_() for k in wrt]
    found = numbers(block(case)(**given | dict(zip(wrt, leaves, strict=True))))
    return found, torch.autograd.grad(found[0], leaves, allow_unused=True) if wrt else ()


def test_no_block_waits_for_the_card(device):
    "Every loss with its gradient and metrics, every estimator, as tests/test_laws.py calls them."
    waited, x = [], torch.ones(3, device=device)
    for wait in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.nonzero()):
        with pytest.raises(RuntimeError, match="wait|synchroniz"), no_waiting(): wait()
    for case, (name, _) in CASES.items():
        columns, hyper = arguments(case)
        given = {k: on(device, x) for k, x in (columns | hyper).items()}
        wrt = differentiable(case, columns) if name in LOSSES else []
        called(case, given, wrt)        # kernels are built
        try:
            with no_waiting(): found, _ = called(case, given, wrt)
            assert found
        except RuntimeError as e: waited.append(f"{case}: {e}")
    assert not waited, "\n".join(waited)


# -- compilers
def with_gradient(name):
    "(columns of a block, a function of them: gradient, value and what its metrics are made of)."
    columns, hyper = arguments(name)
    first, *_ = columns
    def value(x, rest):
        found = BLOCKS[name](**{first: x}, **rest, **hyper)
        out, metrics = found if isinstance(found, tuple) else (found, {})
        parts = (x for m in metrics.values() for x in m.numbers().values())
        return out.sin().sum(), (out, *(x for x in parts if isinstance(x, torch.Tensor)))
    slope = torch.func.grad_and_value(value, has_aux=True)
    def f(columns):
        grad, (_, more) = slope(columns[first], {k: x for k, x in columns.items() if k != first})
        return [grad, *more]
    return columns, f


def test_a_compiled_loss_is_the_eager_one(device):
    columns, f = with_gradient("ppo_loss")
    compiled = torch.compile(f, fullgraph=True, backend="inductor" if CARD else "aot_eager")
    for shift in (0, 5):
        given = {k: on(device, x.roll(shift, 0)) for k, x in columns.items()}
        wanted = f(given)
        assert wanted[0].abs().max() > 1e-3
        assert_close(compiled(given), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["ppo_loss", "gspo_loss", "dpo_loss", "value_loss", "group_advantages"])
def test_a_graph_of_a_block_is_the_block(device, name):
    "It is captured with its gradient, given other numbers in place, and replayed."
    columns, f = with_gradient(name)
    given = {k: on(device, x) for k, x in columns.items()}
    found, again = graphed(lambda: f(given))
    before = found[0].clone()
    for x in given.values():
        if x.is_floating_point(): x.copy_(x.roll(5, 0)*1.1)
    again()
    assert_close(found, f(given), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found[0], before)
