"""A card for the tests that are marked `gpu`, and what stands for it where there is none.

RLBLOCKS_GPU_DRY=1 runs these tests on a CPU, small: what only a card has (memory statistics, a mode in which it says
that somebody waits for it, CUDA graphs) is then played by what torch dispatches, so that every line of a test runs."""
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

sys.path.append(str(Path(__file__).resolve().parents[1]/"benchmarks"))
from gpu_measuring import captured

DRY = bool(os.environ.get("RLBLOCKS_GPU_DRY"))
CARD = torch.cuda.is_available() and not DRY
DEVICE = torch.device("cuda" if CARD else "cpu")
REASON = "needs a CUDA device (RLBLOCKS_GPU_DRY=1 TRITON_INTERPRET=1 run it on a CPU, small)"


# -- waiting
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique, aten._unique2, aten.unique_dim,
           aten.unique_consecutive, aten.equal, aten.bincount, aten.repeat_interleave}


def tensors(*x): return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def is_waiting(func, args):
    "Whether the host would wait for a card: for a number, or for how many are True."
    packet = func.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_):
        one = packet is not aten.index and args[2].numel() == 1
        return not one and any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1]))
    return packet in WAITING and func is not aten.repeat_interleave.self_int


class Waits(TorchDispatchMode):
    "Counts such operations on all tensors, or on those that come from `roots`."
    def __init__(self, roots=None, *, error=False):
        super().__init__()
        self.error, self.count, self.known = error, 0, None
        if roots is not None:
            self.known = WeakIdKeyDictionary()
            for x in roots: self.known[x] = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if self.known is not None:
            if not any(x in self.known for x in tensors(args, kwargs)): return out
            for x in tensors(out): self.known[x] = True
        if is_waiting(func, args):
            self.count += 1
            if self.error: raise RuntimeError(f"{func} waits for the device")
        return out


@contextmanager
def no_waiting():
    "RuntimeError where the host waits for the card."
    if not CARD:
        with Waits(error=True): yield
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try: yield
    finally: torch.cuda.set_sync_debug_mode(before)


def waits(call, roots):
    "How often the host waits for the card in a call; on a CPU, for a number that comes from the tensors `roots`."
    if not CARD:
        with Waits(roots) as seen: call()
        return seen.count
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try: call()
        finally: torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(w.message) for w in said)


# -- memory
class Largest(TorchDispatchMode):
    "Bytes of the largest result of any operation."
    bytes = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.bytes = max(self.bytes, *(x.nbytes for x in tensors(out)), 0)
        return out


def most_bytes(call):
    "The most that a call allocates beside what is there; on a CPU the largest of its tensors, which is no more."
    if not CARD:
        with Largest() as seen: call()
        return seen.bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- graphs
def graphed(f):
    "(what `f` gives, a function that computes it anew, in place): a CUDA graph, on a CPU the call itself."
    if not CARD:
        out = f()
        def again(): [x.copy_(y) for x, y in zip(out, f(), strict=True)]
        return out, again
    out, graph = captured(f)
    graph.replay()      # while it is captured nothing runs
    return out, graph.replay
