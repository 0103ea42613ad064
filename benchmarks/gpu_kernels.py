"""Parts of `gpu.py` on pure functions: what the card can do (`card`), the head of a model (`head`), every loss and
estimator at a million tokens (`losses`). Each yields a row as soon as it is measured, what is worth most first.

Time is CUDA's events, the median of several calls, on random data. `GiB` is the most that a call takes beyond its
inputs and their gradients: those of the call before are still there when the count begins."""
import os
import time
from types import SimpleNamespace

import torch
from gpu_measuring import DEVICE, DRY, absent, goal, milliseconds, peak, row, seconds, settle, size

BACKEND = "aot_eager" if DRY else "inductor"


class Until:
    "Seconds that are left of a part's own, or of its process."
    def __init__(self, allowed):
        ends = float(os.environ.get("RLBLOCKS_GPU_UNTIL", "inf"))
        self.end = time.perf_counter() + min(allowed, ends - time.time())

    def left(self): return self.end - time.perf_counter()


def attempt(case, way, measured):
    "The row of what `measured` finds, or why there is none: somebody else's failure, or memory that is not there."
    try: return row(case, way, **measured())
    except Exception as e: found = absent(case, way, e)
    settle() # what an error held
    return found


# -- the card

def copy_rate():
    "GB/s of a copy on the card, what is read and what is written counted."
    x = torch.randn(size(2**30, 2**10), device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 4*x.numel()/milliseconds(lambda: y.copy_(x), repeats=20)/1e6


def product_rate(dtype, precision="highest"):
    "TFLOP/s of a product of two square matrices."
    n, before = size(8192, 64), torch.get_float32_matmul_precision()
    a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.set_float32_matmul_precision(precision)
    try: return 2*n**3/milliseconds(lambda: torch.mm(a, b, out=out), repeats=20, warm=5, budget=1.)/1e9
    finally: torch.set_float32_matmul_precision(before)


def launch():
    "Microseconds from one small kernel to the next, where the host is all that they wait for."
    x, many = torch.zeros(8, device=DEVICE), size(1000, 10)
    def add():
        for _ in range(many): x.add_(1.)
    return 1e3*milliseconds(add, repeats=5)/many


def first_kernel():
    "Seconds until a kernel of ours has run: Triton compiles it, and needs a C compiler for that."
    from rlblocks.arithmetic.kernels import swept
    logits = torch.randn(2, 64, device=DEVICE)
    c = empty_columns(logits)
    return dict(seconds=seconds(lambda: swept(logits, None, None, 1., None, c.tokens, c.lse, c.chosen, c.entropies,
                                              False, None, None, None)))


def card():
    "The ceilings that other figures are held against."
    yield attempt("card", "copy on the card", lambda: dict(GB_per_s=copy_rate()))
    for way, *of in (("bf16", torch.bfloat16), ("fp32 as TF32", torch.float32, "high"), ("fp32", torch.float32)):
        yield attempt("card", f"product of 8,192 × 8,192, {way}", lambda of=of: dict(TFLOP_per_s=product_rate(*of)))
    yield attempt("card", "launch of a small kernel", lambda: dict(us=launch()))
    yield attempt("card", "first kernel through Triton", first_kernel)


# -- the head: ways from (hidden, head, (), ids, entropy) to log-probs and entropy, as in benchmarks/logprobs.py

def eager(h, W, _, ids, entropy):
    "Logits in full, their log-softmax in fp32."
    logp = (h @ W.T).log_softmax(-1, dtype=torch.float32)
    return logp.gather(-1, ids[:, None])[:, 0], -(logp.exp()*logp).sum(-1) if entropy else None


def eager_half(h, W, _, ids, entropy):
    """The formula of TRL's `selective_log_softmax_and_entropy` where no kernel is: in the logits' precision, a row of
    the batch after the other, the entropy of 128 positions at a time."""
    logits, rows = h @ W.T, size(1024, 4)
    pairs = zip(logits.split(rows), ids.split(rows), strict=True)
    found = torch.cat([z.log_softmax(-1).gather(-1, at[:, None])[:, 0] for z, at in pairs])
    if not entropy: return found, None
    logps = (z.log_softmax(-1) for z in logits.split(128))
    return found, torch.cat([-(logp.exp()*logp).sum(-1) for logp in logps])


def trl_kernel(h, W, _, ids, entropy):
    "Logits in full, and TRL's kernel on them."
    from trl.kernels import selective_log_softmax_and_entropy
    found, H = selective_log_softmax_and_entropy(h @ W.T, ids)
    return found, H if entropy else None


def liger_cross_entropy(h, W, _, ids, entropy):
    "A loss for each token: minus its log-prob."
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    if entropy: raise NotImplementedError("has no entropy")
    return -LigerFusedLinearCrossEntropyFunction.apply(h, W, ids, None, None, -100, 0., 0., "none")[0], None


def head_ways():
    "{name: (how, products of N × H × V where the head learns, and where it is frozen)}."
    import logprobs
    logprobs.CHUNK = size(None, 4)
    return {"ours": (logprobs.ours, 4, 3), "eager logits": (eager, 3, 2),
            "eager logits in bf16": (eager_half, 3, 2),
            "compiled logits": (torch.compile(eager, dynamic=False, backend=BACKEND), 3, 2),
            "trl, its kernel on logits": (trl_kernel, 3, 2), "trl, its chunked head": (logprobs.trl_chunk, 4, 3),
            "liger, cross entropy": (liger_cross_entropy, 4, 3), "liger, GRPO loss": (logprobs.liger, 3, 2)}


H, V = size(4096, 8), size(151_936, 97)
SHORT, LONG = size(8_192, 16), size(32_768, 32)


class Head:
    "Hidden states and a head, and what each way makes of them."
    def __init__(self):
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        self.weight, self.ways = self.drawn(V, H).div_(H**.5), head_ways()

    def drawn(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=DEVICE, dtype=torch.bfloat16)

    def columns(self, N):
        hidden = self.drawn(N, H).requires_grad_()
        return hidden, torch.randint(V, (N,), generator=self.generator, device=DEVICE)

    def measure(self, N, way, learns=True, entropy=True):
        "Milliseconds and memory, forward and backward; 2·N·H·V operations a product are what TFLOP/s counts."
        how, *products = self.ways[way]
        case = f"head, N {N:,}: {'learns' if learns else 'frozen'}{', entropy' if entropy else ''}"
        products = 2 if way == "ours" and not (learns or entropy) else products[0 if learns else 1]
        def measured():
            hidden, ids = self.columns(N)
            weight = self.weight.detach().requires_grad_(learns)
            def call():
                hidden.grad = weight.grad = None
                logp, entropies = how(hidden, weight, (), ids, entropy)
                total = logp.sum() if entropies is None else logp.sum() + .1*entropies.sum()
                total.backward()
            first = seconds(call)
            extra, ms = peak(call), milliseconds(call, repeats=5, warm=1, budget=1.)
            return dict(ms=ms, GiB=extra, TFLOP_per_s=2*N*H*V*products/ms/1e9, products=products, first_s=first)
        return attempt(case, way, measured)


def head_goals(N, found):
    "Ours against logits in full, in fp32 where they fit and else in bf16."
    ours = found["ours"]
    base = next((w for w in ("eager logits", "eager logits in bf16") if "ms" in found[w]), None)
    if base is None or "ms" not in ours: return
    slower, larger = ours["ms"]/found[base]["ms"], ours["GiB"]/max(found[base]["GiB"], 1e-9)
    yield goal(f"head with entropy, N {N:,}: time against {base}", "≤ 1.1 ×", slower, slower <= 1.1)
    yield goal(f"head with entropy, N {N:,}: memory against {base}", "≤ 5 %", 100*larger, larger <= .05)


def differences(head, N):
    "How far each way's numbers and gradients are from logits that are computed and kept in fp32."
    hidden, ids = head.columns(N)
    def run(how, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, head.weight)]
        logp, entropies = how(*leaves, (), ids, True)
        (logp.sum() + .1*entropies.sum()).backward()
        return [x.detach().float() for x in (logp, entropies, *(leaf.grad for leaf in leaves))]
    def measured(way):
        exact, found = run(eager, torch.float32), run(head.ways[way][0], torch.bfloat16)
        nats = [float((a - b).abs().max()) for a, b in zip(found[:2], exact[:2], strict=True)]
        off = [float((a - b).norm()/b.norm()) for a, b in zip(found[2:], exact[2:], strict=True)]
        return dict(logprob_nats=nats[0], entropy_nats=nats[1], hidden_gradient_relative=off[0],
                    weight_gradient_relative=off[1])
    for way in ("ours", "eager logits"):
        yield attempt(f"head, {N:,} rows in bf16: largest difference from fp32", way, lambda way=way: measured(way))


def empty_columns(logits):
    "What a sweep fills in and reads, one number a row."
    lse, chosen, entropies = (torch.zeros(len(logits), device=DEVICE) for _ in range(3))
    return SimpleNamespace(tokens=torch.zeros(len(logits), dtype=torch.long, device=DEVICE), lse=lse, chosen=chosen,
                           entropies=entropies, one=torch.ones_like(lse))


def sweeps(logits, use):
    """GB/s of each pass over a chunk of logits, by kernels or by torch: the forward pass reads it once, the backward
    pass reads it and writes its gradient. Ten calls at a time, so that no launch is waited for."""
    from rlblocks.arithmetic import head, passes
    into, c, fits = torch.empty_like(logits), empty_columns(logits), passes.fits
    rows, many = head._few(logits, entropy=True), size(10, 1)
    def forward():
        for _ in range(many):
            passes.sweep(logits, rows=rows, tokens=c.tokens, lse=c.lse, chosen=c.chosen, entropies=c.entropies)
    def backward():
        for _ in range(many):
            passes.sweep(logits, into, rows=rows, tokens=c.tokens, lse=c.lse, entropies=c.entropies, known=True,
                         g=c.one, u=c.one, hot=c.one)
    if use and not DRY and not fits(logits): raise NotImplementedError("the kernels do not take these logits")
    passes.fits = lambda _: use
    try: ms = [milliseconds(f, repeats=5, warm=2, budget=.5)/many for f in (forward, backward)]
    finally: passes.fits = fits
    read = logits.numel()*logits.element_size()/1e6
    return dict(forward_ms=ms[0], forward_GB_per_s=read/ms[0], backward_ms=ms[1], backward_GB_per_s=2*read/ms[1])


def kernels(head):
    "The passes over one chunk by themselves, against what a copy reaches."
    logits = head.drawn(size(1024, 3), V)
    case = f"passes over a chunk of {len(logits):,} × {V:,} in bf16"
    yield attempt(case, "kernels", lambda: sweeps(logits, True))
    yield attempt(case, "torch", lambda: sweeps(logits, False))
    yield attempt(case, "a copy", lambda: dict(GB_per_s=copy_rate()))


PEERS = "trl, its kernel on logits", "trl, its chunked head", "liger, cross entropy", "liger, GRPO loss"


def head_plan():
    "(N, way, the head learns, entropy) in order of worth, after ours and eager logits have met at both lengths."
    yield SHORT, "compiled logits", True, True
    yield from ((SHORT, way, True, True) for way in PEERS[:2])
    for learns, entropy in ((True, False), (False, True), (False, False)):
        yield from ((SHORT, way, learns, entropy) for way in ("ours", "eager logits"))
    yield from ((SHORT, way, True, False) for way in PEERS)
    yield from ((LONG, way, True, True) for way in (*PEERS[:2], "compiled logits"))
    yield from ((LONG, way, True, False) for way in ("ours", *PEERS[2:]))
    yield from ((LONG, way, False, True) for way in ("ours", PEERS[1]))


def head():
    "Log-probs with entropy from hidden states, forward and backward, beside every other way that is at hand."
    until, model = Until(40), Head()
    for N in (SHORT, LONG):
        found = {way: model.measure(N, way) for way in ("ours", "eager logits", "eager logits in bf16")}
        yield from found.values()
        yield from head_goals(N, found)
        if N == SHORT: yield from differences(model, size(1_280, 12))
    yield from kernels(model)
    settle()
    gone = set()
    for i, (N, way, *options) in enumerate(plan := list(head_plan())):
        if way in gone: continue # a peer that failed once: reading it again takes seconds
        if until.left() < (12 if way.startswith("compiled") else 3):
            yield row("head", "left out for want of time", count=len(plan) - i)
            return
        found = model.measure(N, way, *options)
        if way in PEERS and "absent" in found: gone.add(way)
        yield found


# -- losses and estimators

USED = ("ppo_loss", "grpo_loss", "gspo_loss", "dpo_loss", "sft_loss", "value_loss", "kto_loss", "gae",
        "group_advantages, ragged ids", "kl_k3, aggregated", "cispo_loss", "bradley_terry_loss")
FIRST_COMPILED = size(len(USED), 2)


def ordered(tasks):
    "The most used first."
    return sorted(tasks, key=lambda t: USED.index(t.name) if t.name in USED else len(USED))


class Columns:
    "What tasks read, drawn once for all that read the same."
    def __init__(self): self.drawn = {}

    def __call__(self, t):
        import algorithms
        shape = {algorithms.tokens: size((1_024, 1_024), (16, 32)), algorithms.pairs: size((1_048_576, 1), (64, 1)),
                 algorithms.vocabulary: size((8, 512), (1, 8))}[t.make]
        if shape not in self.drawn: self.drawn[shape] = t.make(*shape, DEVICE.type)
        c = SimpleNamespace(**vars(self.drawn[shape]))
        for name in t.wrt: setattr(c, name, getattr(c, name).detach().clone().requires_grad_())
        return c, f"{shape[0]*shape[1]:,} {'pairs' if t.make is algorithms.pairs else 'tokens'}"


def waits(f):
    "Whether the host waits for the card somewhere in a call."
    torch.cuda.set_sync_debug_mode("error")
    try: f()
    except RuntimeError as e:
        if "synchronizing" not in str(e): raise
        return True
    finally: torch.cuda.set_sync_debug_mode("default")
    return False


def busy(f, ms):
    "Milliseconds of the card alone: the kernels of a call are queued behind a pause that lasts longer than to launch."
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e6*(2*ms + 1))) # cycles, at most 2 GHz
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[1]


def timed(call):
    "Microseconds of a call, launches included, those of the card alone, memory, and whether the host waits."
    first = seconds(call) # compiles, loads kernels
    took = seconds(call)
    if DRY or took > .3: return dict(us=1e6*took, first_s=first)
    ms = milliseconds(call, repeats=10, warm=1, budget=.2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    found = dict(us=1e3*ms, MiB=(torch.cuda.max_memory_allocated() - before)/2**20, first_s=first, waits=waits(call))
    return found if found["waits"] or ms > 10 else found | dict(card_us=1e3*busy(call, ms))


def missing_peers():
    "{name: why it cannot be asked}; each is read once, for a failure can take as long as a success."
    import importlib

    import peers
    def read(name): return importlib.import_module("trl").GRPOTrainer if name == "trl" else getattr(peers, name)()
    gone = {}
    for name in peers.VERSIONS:
        if peers.folder(name) is None: gone[name] = ModuleNotFoundError(f"no wheel of {name} was carried")
        else:
            try: read(name)
            except Exception as e: gone[name] = e
    return gone


def one_eager(t, way, call, columns):
    "The row of a function and, where it is a loss, its gradient."
    import algorithms
    c, many = columns(t)
    call = algorithms.differentiated(call, t.wrt)
    return attempt(t.name, way, lambda: dict(of=many) | timed(lambda: call(c)))


def every_peer(tasks, columns, until):
    "Rows of what TRL, verl and OpenRLHF have for each task, and of the formula where they have nothing."
    gone = missing_peers()
    for name, why in gone.items(): yield absent("losses", name, why)
    plan = [(t, way) for t in tasks for way in t.theirs if way.split()[0].rstrip(",") not in gone]
    for i, (t, way) in enumerate(plan):
        if until.left() < 45:
            yield row("losses", "peers left out for want of time", count=len(plan) - i)
            return
        yield one_eager(t, way, t.theirs[way], columns)


def every_compiled(tasks, columns, until):
    "Rows of ours through torch.compile; the most used also with the gradient in one graph."
    import algorithms
    algorithms.BACKEND = BACKEND
    plan = [(t, algorithms.COMPILED) for t in tasks[:FIRST_COMPILED]]
    plan += [(t, algorithms.ONE_GRAPH) for t in tasks[:size(4, 1)] if t.wrt]
    plan += [(t, algorithms.COMPILED) for t in tasks[FIRST_COMPILED:size(None, 0)]]
    for i, (t, way) in enumerate(plan):
        if until.left() < 6:
            yield row("losses", "left uncompiled for want of time", count=len(plan) - i)
            return
        c, many = columns(t)
        torch.compiler.reset()
        def measured(t=t, way=way, c=c, many=many):
            call = algorithms.WAYS[way](t)
            return dict(of=many) | timed(lambda: call(c))
        yield attempt(t.name, way, measured)


def losses():
    "Every loss and estimator on a million tokens or pairs: ours and the peers' eager, then ours compiled."
    import algorithms
    until, columns, tasks = Until(75), Columns(), ordered(algorithms.TASKS)
    if DRY: tasks = [t for t in tasks if t.name in USED or t.make is algorithms.vocabulary]
    waiting = []
    for t in tasks:
        found = one_eager(t, "ours", t.ours, columns)
        if found.get("waits"): waiting.append(t)
        yield found
    yield row("losses", "ours that wait for the card, eager", cases=[t.name for t in waiting])
    blocked = sum(bool(t.wrt) for t in waiting)
    yield goal("no loss waits for the card", "0", blocked, blocked == 0)
    yield from every_peer(tasks, columns, until)
    yield from every_compiled(tasks, columns, until)
