"What `gpu.py`'s parts measure with: milliseconds and peak memory on a card, and on a CPU that stands in for one."
import gc
import statistics
import time
from collections.abc import Callable

import torch

DRY = not torch.cuda.is_available()     # tiny shapes on the CPU: every line runs, and no number means anything
DEVICE = torch.device("cpu" if DRY else "cuda")


def size(real, tiny): return tiny if DRY else real


def settle():
    "Wait for the card, and give back what nobody holds."
    if DRY: return
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def seconds(f:Callable)->float:
    "Of one call, the card's work included."
    if not DRY: torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    if not DRY: torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(f:Callable, *, repeats:int=10, warm:int=3, budget:float=4.)->float:
    "Median of several calls after a few that do not count; fewer where they would take more than `budget` seconds."
    for _ in range(size(warm, 1)): took = seconds(f)
    if DRY: return 1e3*took
    times = []
    for _ in range(max(2, min(repeats, int(budget/max(took, 1e-6))))):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(f:Callable)->tuple:
    "(what `f` gives, a CUDA graph that computes it anew, in place): the graph has not run yet."
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3): f()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = f()
    return out, graph


def peak(f:Callable)->float:
    "GiB that one call takes beyond what is there when it begins, at the worst moment."
    if DRY:
        f()
        return 0.
    settle()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before)/2**30


OURS = "ours", "kernels", "first kernel"


def row(case:str, way:str, **numbers)->dict:
    "A figure: what was done, by whom, and numbers whose names end in their unit (`ms`, `GiB`, `tokens_per_s`)."
    return dict(case=case, way=way, **numbers)


def goal(what:str, wanted:str, got:float, reached:bool)->dict:
    "What was hoped for and what came."
    return dict(goal=what, wanted=wanted, got=got, reached=bool(reached))


def absent(case:str, way:str, error:Exception)->dict:
    "Why there is no figure: memory or a package that is not there, or something that failed; others may fail."
    missing = isinstance(error, ImportError | NotImplementedError | torch.cuda.OutOfMemoryError)
    word = "absent" if missing or not way.startswith(OURS) else "failed"
    said = str(error).strip().splitlines() or [""]
    return row(case, way, **{word: f"{type(error).__name__}: {said[0][:160]}"})
