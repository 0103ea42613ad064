"""Log-probs (and entropy) from hidden states: seconds and peak memory of `linear_logprobs`, of logits in full, and of
the peers that are installed.

    .venv/bin/python benchmarks/logprobs.py [--threads 1] [--rounds 2] [--memory-shape 8192x16x151936]
        [--shapes 2048x512x50000] [--mode …] [--chunk 1024] [--busy] [--out benchmarks/results]

Minutes on one thread, for the shape at which peers were measured (every mode and way) and the memory of
`linear_logprobs` at T = 8192 and the vocabulary of Qwen. The last lines hold the numbers against LIMITS.

With `--threads 2 --busy` another process keeps one core busy: the ratio to logits in full, turn by turn, and nothing
else is measured or written.

Forward and backward for hidden states and head ("trains"), with the head frozen, with LoRA (rank 16) on a frozen head,
and without gradient. Each way runs in a process of its own for its memory (the kernel's high-water mark of resident
memory, reset before the call, less what inputs and gradients take); times are then taken in turn in one process, so
that other work on the machine meets all alike, and with one thread they are CPU seconds. Peers: TRL's functions on
logits, which its GRPO calls ("trl"), TRL's chunked head ("trl-chunk"), Liger's chunked GRPO loss with the advantages as
weights ("liger": no entropy, no adapter). Where a peer is absent, cannot do it, or would hold logits that do not fit,
its row says so.

"forward KL" and "reverse KL" are distillation from a teacher twice as wide, its hidden states and head given:
`linear_measured` with `jsd`, against log-softmax of both models' logits, TRL's GKD loss on them, and Liger's fused JSD
in its own chunks of 1,024 ("liger") and in ours ("liger-512"). Ours computes both models' logits twice where the head
learns, Liger once."""
import argparse
import json
import os
import statistics
import platform
import subprocess
import sys
import time
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rlblocks.losses.distill import jsd
from rlblocks.arithmetic.head import CHUNKS as DEFAULT, linear_logprobs, linear_measured

# what learns: hidden states, head, an adapter on the head; and whether the entropy is asked
MODES = {"trains, entropy": (True, True, False, True), "trains": (True, True, False, False),
         "frozen, entropy": (True, False, False, True), "frozen": (True, False, False, False),
         "LoRA, entropy": (True, False, True, True), "LoRA": (True, False, True, False),
         "no gradient": (False, False, False, False)}
# distillation: what learns, and the share of the teacher in the mixture (0 forward KL, 1 reverse)
DISTILL = {"forward KL": (True, True, 0.), "forward KL, frozen": (True, False, 0.), "reverse KL": (True, True, 1.),
           "reverse KL, frozen": (True, False, 1.)}
# at most: seconds over those of logits in full, by mode; chunks of logits beyond inputs and gradients, without and with
# entropy. And no peer faster or smaller
SLOWER = {mode: 1.2 if learns else 1.05 for mode,(_, learns, *_) in MODES.items()}
CHUNKS = {mode: 2.25 if entropy else 1.25 for mode,(*_, entropy) in MODES.items()}
# six products instead of four; three as before
SLOWER |= {mode: 1.5 if learns else 1.05 for mode,(_, learns, _) in DISTILL.items()}
# two models' logits and a gradient, and room
CHUNKS |= {mode: 6. for mode in DISTILL}
PEERS = "trl", "trl-chunk", "liger", "liger-512"
RANK, SCALE = 16, 2.
CHUNK = None # positions of a chunk; None: the default


def logits(h, W, AB):
    "As a model gives them; with an adapter, as peft does."
    z = h @ W.T
    return z + (h @ AB[0].T) @ AB[1].T * SCALE if AB else z


def plain(h, W, AB, ids, entropy):
    logp = logits(h, W, AB).log_softmax(-1)
    return logp.gather(-1, ids[:, None])[:, 0], -(logp.exp()*logp).sum(-1) if entropy else None


def ours(h, W, AB, ids, entropy):
    found = linear_logprobs(h, W, ids, chunk=CHUNK, low_rank=(h @ AB[0].T * SCALE, AB[1]) if AB else None,
                            entropy=entropy)
    return found if entropy else (found, None)


def trl(h, W, AB, ids, entropy):
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy
    if entropy: return selective_log_softmax_and_entropy(logits(h, W, AB), ids)
    return selective_log_softmax(logits(h, W, AB), ids), None


def trl_chunk(h, W, AB, ids, entropy):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
    if AB: raise NotImplementedError("takes no adapter")
    return ChunkedLogProbFunction.apply(h, W, None, ids, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
                                        ("entropy",) if entropy else ())[:2]


def liger(h, W, AB, ids, entropy):
    "A GRPO loss whose gradient is that of Σ log-probs: no clipping is reached, the ratio is 1."
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    if AB or entropy or not h.requires_grad:
        raise NotImplementedError("takes no adapter" if AB else "has no entropy" if entropy
                                  else "a loss: always makes gradients")
    rows = 16
    loss = LigerFusedLinearGRPOLoss(beta=0., compiled=False, use_ref_model=False, loss_type="grpo")
    each, weights = ids.view(rows, -1), torch.full((rows,), -float(len(ids)), device=h.device)
    return loss(h.view(rows, -1, h.shape[1]), W, each, torch.ones_like(each), weights)[0], None


WAYS = {"plain": plain, "ours": ours, "trl": trl, "trl-chunk": trl_chunk, "liger": liger}


def plain_kl(h, W, ht, Wt, beta):
    s, t = (h @ W.T).log_softmax(-1), (ht @ Wt.T).log_softmax(-1)
    one, other = (t, s) if beta == 0 else (s, t)
    return (one.exp()*(one - other)).sum()


def ours_kl(h, W, ht, Wt, beta):
    return linear_measured(h, W, lambda z, ht: jsd(z, ht @ Wt.T, beta=beta), ht, chunk=CHUNK).sum()


def trl_kl(h, W, ht, Wt, beta):
    from trl.experimental.gkd import GKDTrainer
    return GKDTrainer.generalized_jsd_loss((h @ W.T)[None], (ht @ Wt.T)[None], beta=beta, reduction="sum")


def liger_kl(h, W, ht, Wt, beta, chunk=1024):
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction
    ids = torch.zeros(len(h), dtype=torch.long)
    # it is a mean
    return LigerFusedLinearJSDFunction.apply(h, W, ht, Wt, ids, None, None, 0., 1., beta, -100, 1., False, chunk)*len(h)


DIVERGENCES = {"plain": plain_kl, "ours": ours_kl, "trl": trl_kl, "liger": liger_kl,
               "liger-512": lambda *a: liger_kl(*a, chunk=512)}


def ways(mode): return DIVERGENCES if mode in DISTILL else WAYS
LOGITS_HELD = {"plain": 6, "trl": 6, "trl-chunk": 7} # times N × V × 4 bytes, at the worst moment


def inputs(shape, mode):
    "Hidden states, head, the adapter's two matrices or the teacher's hidden states and head, and token ids."
    (N, H, V), (grad, head, adapter, _) = shape, MODES.get(mode) or (*DISTILL[mode][:2], False, None)
    g = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=g)
    if mode in DISTILL:
        return draw(N, H).requires_grad_(grad), (draw(V, H)/H**.5).requires_grad_(head), (draw(N, 2*H),
                                                                                          draw(V, 2*H)/(2*H)**.5), None
    AB = ((draw(RANK, H)/H**.5).requires_grad_(), draw(V, RANK).requires_grad_()) if adapter else ()
    return (draw(N, H).requires_grad_(grad), (draw(V, H)/H**.5).requires_grad_(head), AB,
            torch.randint(V, (N,), generator=g))


def clock(): return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def once(way, h, W, AB, ids, mode):
    h.grad = W.grad = None
    for x in AB: x.grad = None
    begin = clock()
    if mode in DISTILL:
        DIVERGENCES[way](h, W, *AB, DISTILL[mode][-1]).backward()
        return clock() - begin
    lp, ent = WAYS[way](h, W, AB, ids, MODES[mode][-1])
    if lp.requires_grad: (lp.sum() + (.1*ent.sum() if ent is not None else 0)).backward()
    return clock() - begin


def resident(key):
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines()
                    if line.startswith(key)).split()[1])/1024


def memory(way, shape, mode):
    "MiB beyond inputs and gradients, at the worst moment."
    h, W, AB, ids = inputs(shape, mode)
    once(way, *inputs((64, shape[1], 64), mode), mode) # what a first call loads
    # the room that gradients will take, touched once
    grads = [torch.ones_like(x) for x in (h, W, *AB) if x.requires_grad]
    before = resident("VmRSS")
    del grads
    Path("/proc/self/clear_refs").write_text("5")
    once(way, h, W, AB, ids, mode)
    return resident("VmHWM") - before


def free():
    "GiB that this machine could still give."
    return int(next(line for line in Path("/proc/meminfo").read_text().splitlines()
                    if line.startswith("MemAvailable")).split()[1])/2**20


def absent(way, shape, mode):
    "Why there is no number."
    try: once(way, *inputs((64, 8, 100), mode), mode)
    except ImportError as e: return f"not installed ({e.name})"
    except NotImplementedError as e: return str(e)
    wants = LOGITS_HELD.get(way, 0)*shape[0]*shape[2]*4/2**30
    return f"wants {wants:.0f} GiB" if wants > .6*free() else None


def memory_of(way, shape, mode):
    "`memory` in a process of its own."
    said = subprocess.run([sys.executable, __file__, "--memory", way, "--shapes", "x".join(map(str, shape)), "--mode",
                           mode, *(["--chunk", str(CHUNK)] if CHUNK else []), "--threads",
                           str(torch.get_num_threads())], capture_output=True, text=True, check=True).stdout
    return float(said.split()[-1])


def verdicts(found):
    "(what was wanted, what came, whether it holds) of each limit."
    said, ours_ = [], [r for r in found if r["way"] == "ours"]
    for r in ours_:
        where, others = f"{r['mode']} at {'x'.join(map(str, r['shape']))}", [
            x for x in found if x["way"] in PEERS and (x["shape"], x["mode"]) == (r["shape"], r["mode"]) and "MiB" in x]
        said.append((f"{where}: at most {CHUNKS[r['mode']]} chunks of memory", f"{r['chunks']:.2f}",
                     r["chunks"] <= CHUNKS[r["mode"]]))
        if "ratio" in r:
            said.append((f"{where}: at most {SLOWER[r['mode']]} x the time of logits in full", f"{r['ratio']:.2f} x",
                         r["ratio"] <= SLOWER[r["mode"]]))
        for x in others:
            if "seconds" in r and not (x["way"] == "trl" and r["mode"] in DISTILL):
                said.append((f"{where}: faster than {x['way']}", f"{r['seconds']:.2f} s against {x['seconds']:.2f}",
                             r["seconds"] < x["seconds"]))
            said.append((f"{where}: smaller than {x['way']}", f"{r['MiB']:.0f} MiB against {x['MiB']:.0f}",
                         r["MiB"] < x["MiB"]))
    return said


def measure(shape, mode, rounds):
    why = {way: absent(way, shape, mode) for way in ways(mode)}
    there = [way for way in ways(mode) if not why[way]]
    held = {way: memory_of(way, shape, mode) for way in there}
    given = inputs(shape, mode)
    times = {way: [] for way in there}
    for _ in range(rounds):
        for way in there: times[way].append(once(way, *given, mode))
    return {way: dict(seconds=sorted(t)[(len(t)-1)//2], best=min(t), MiB=held[way])
            for way, t in times.items()} | {way: dict(absent=w) for way, w in why.items() if w}


def beside_a_busy_core(shape, mode, rounds):
    """Median ratio of `linear_logprobs` to logits in full, each pair measured in turn, while a process that never
    rests is pinned to one of this process's cores."""
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        given = inputs(shape, mode)
        pairs = [(once("ours", *given, mode), once("plain", *given, mode)) for _ in range(rounds)]
    finally:
        busy.kill()
        busy.wait()
    return statistics.median(a/b for a, b in pairs), pairs


def installed(name):
    try: return version(name)
    except PackageNotFoundError: return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["2048x512x50000"])
    parser.add_argument("--memory-shape", help="where only the memory of linear_logprobs is measured",
                        default="8192x16x151936")
    parser.add_argument("--mode", choices=[*MODES, *DISTILL], nargs="+")
    parser.add_argument("--memory", choices=[*WAYS, "liger-512"])
    parser.add_argument("--chunk", type=int, help="of linear_logprobs; without it, its default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    global CHUNK
    CHUNK = a.chunk
    shapes = [tuple(map(int, s.split("x"))) for s in a.shapes]
    if a.memory: return print(memory(a.memory, shapes[0], *a.mode))
    if a.busy:
        for shape in shapes:
            for mode in a.mode or MODES:
                ratio, pairs = beside_a_busy_core(shape, mode, a.rounds)
                print(f"{mode:18} at {shape}, {a.threads} threads, one core busy: {ratio:.2f} x logits in full; "
                      + ", ".join(f"{x:.1f} s/{y:.1f} s" for x, y in pairs), flush=True)
        return
    found = []
    for shape in shapes:
        unit = (a.chunk or DEFAULT["cpu"])*shape[2]*4/2**20
        print(f"\nN, H, V = {shape}; one chunk of logits is {unit:.0f} MiB; "
              f"{'CPU ' if a.threads == 1 else ''}seconds, median (best)", flush=True)
        for mode in a.mode or [*MODES, *DISTILL]:
            result = measure(shape, mode, a.rounds)
            base = result["plain"].get("seconds")
            for way in ways(mode):
                r, row = result[way], dict(shape=shape, mode=mode, way=way) | result[way]
                if "absent" not in r:
                    row |= dict(chunks=r["MiB"]/unit) | (dict(ratio=r["seconds"]/base) if base else {})
                    share = f"{row['ratio']:5.2f} x" if base else "       "
                    print(f"{mode:18} {way:9} {r['seconds']:7.2f} s ({r['best']:.2f})  {share}   {r['MiB']:8.0f} MiB "
                          f"= {row['chunks']:5.2f} chunks", flush=True)
                else: print(f"{mode:18} {way:9} {r['absent']}", flush=True)
                found.append(row)
    large = tuple(map(int, a.memory_shape.split("x")))
    unit = (a.chunk or DEFAULT["cpu"])*large[2]*4/2**20
    print(f"\nN, H, V = {large}; one chunk of logits is {unit:.0f} MiB", flush=True)
    for mode in [m for m in ("trains, entropy", "trains", "reverse KL") if m in (a.mode or [*MODES, *DISTILL])]:
        used = memory_of("ours", large, mode)
        found.append(dict(shape=large, mode=mode, way="ours", MiB=used, chunks=used/unit))
        print(f"{mode:16} ours      {used:8.0f} MiB = {used/unit:5.2f} chunks", flush=True)
    held = verdicts(found)
    print()
    for wanted, came, holds in held: print(f"{'holds ' if holds else 'MISSED'}  {wanted}: {came}")
    a.out.mkdir(parents=True, exist_ok=True)
    where = dict(date=datetime.now().date().isoformat(), machine=platform.machine(), cpus=os.cpu_count(),
                 load=os.getloadavg()[0], threads=a.threads, torch=torch.__version__, python=platform.python_version(),
                 trl=installed("trl"), liger=installed("liger-kernel"), rounds=a.rounds)
    (a.out/"logprobs_cpu.json").write_text(json.dumps(
        where | dict(runs=found, verdicts=[dict(wanted=w, came=c, holds=h) for w,c,h in held]), indent=1) + "\n")
    try: import matplotlib.pyplot as plt
    except ImportError: return
    fig, axes = plt.subplots(1, len(shapes), figsize=(5*len(shapes), 3), squeeze=False)
    for ax, shape in zip(axes[0], shapes, strict=True):
        for way in [*WAYS, "liger-512"]:
            runs = [r for r in found if r["way"] == way and r["shape"] == shape and "seconds" in r and "MiB" in r]
            if not runs: continue
            ax.scatter([r["MiB"] for r in runs], [r["seconds"] for r in runs], label=way)
            for r in runs: ax.annotate(r["mode"], (r["MiB"], r["seconds"]), fontsize=6)
        ax.set(title=f"N, H, V = {shape}", xlabel="MiB beyond inputs and gradients", ylabel="seconds", xscale="log")
        ax.legend(fontsize=8)
    fig.tight_layout(); fig.savefig(a.out/"logprobs_cpu.png", dpi=100)


if __name__ == "__main__": main()
