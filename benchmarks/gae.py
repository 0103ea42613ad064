"""`gae` against the loops over time steps that other systems run: milliseconds, error against float64, growth with B·T.

    .venv/bin/python benchmarks/gae.py [--rounds 15] [--threads N] [--out benchmarks/results]

The peers are written here from their formulas: one blends the mask into every step and so skips a tool's tokens (verl's recurrence, without the
whitening that follows it there), the other clears rewards and values first and runs through all columns (OpenRLHF's). Whole function against whole
function, called in turn, so that other work on the machine meets all alike. Best and median are shown; a quiet machine has them close together.
On a busy one use --threads 1: several threads wait for each other in every operation, which the loops, too small to be split, do not notice.
"""
import argparse
import json
import os
import platform
import time
from datetime import datetime
from pathlib import Path

import torch

from rlblocks.advantages import gae

SHAPES = {(8, 131_072): 120, (128, 8_192): 12, (1_024, 1_024): 3}  # (B, T): how many times faster than the blending loop we promise to be
GROWTH = {"T, 8 rows": [(8, 2**k) for k in range(10, 21)], "B, 8,192 tokens": [(2**k, 8_192) for k in range(11)]}
GAMMA, LAM = .99, .95


def blending_loop(rewards, values, mask):
    "A and V are carried through the tokens that do not count."
    m, advantages, later_value, later_advantage = mask.to(rewards.dtype), [], 0., 0.
    for t in reversed(range(rewards.shape[1])):
        advantage = rewards[:, t] + GAMMA*later_value - values[:, t] + GAMMA*LAM*later_advantage
        later_value = m[:, t]*values[:, t] + (1 - m[:, t])*later_value
        later_advantage = m[:, t]*advantage + (1 - m[:, t])*later_advantage
        advantages.append(later_advantage)
    advantages = torch.stack(advantages[::-1], 1) * m
    return advantages, (advantages + values) * m


def clearing_loop(rewards, values, mask):
    "Another estimate where the mask has holes: λ decays through them. It stands here for its time only."
    m = mask.to(rewards.dtype)
    rewards, values, advantages, later = rewards*m, values*m, [], 0.
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t+1] if t + 1 < rewards.shape[1] else 0.
        later = rewards[:, t] + GAMMA*next_value - values[:, t] + GAMMA*LAM*later
        advantages.append(later)
    advantages = torch.stack(advantages[::-1], 1)
    return advantages, advantages + values


def ours(rewards, values, mask): return gae(rewards, values, mask, gamma=GAMMA, lam=LAM)


def sample(B, T, seed=0):
    "Rewards, values, and a mask with holes at random places."
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, generator=g), torch.randn(B, T, generator=g), torch.rand(B, T, generator=g) < .7


def timed(fns, args, rounds):
    "{name: milliseconds of each round}, one call of each in turn."
    ms = {name: [] for name in fns}
    for f in fns.values(): f(*args)
    for _ in range(rounds):
        for name, f in fns.items():
            start = time.perf_counter()
            f(*args)
            ms[name].append(1e3*(time.perf_counter() - start))
    return ms


def median(x): return sorted(x)[len(x)//2]


def error(args):
    "Largest deviation of `ours` from the loop in float64, as a share of the largest advantage."
    r, v, m = args
    want, _ = blending_loop(r.double(), v.double(), m)
    return float((ours(*args)[0] - want).abs().max() / want.abs().max())


def compare(rounds):
    for (B, T), promised in SHAPES.items():
        args, few = sample(B, T), max(3, rounds*8_192//max(T, 8_192))
        ms = timed(dict(ours=ours, blending=blending_loop, clearing=clearing_loop), args, few)
        ms["ours"] += timed(dict(ours=ours), args, rounds - few)["ours"]  # the loops over long rows take seconds: fewer rounds of those
        best, mid = ({k: f(x) for k, x in ms.items()} for f in (min, median))
        yield dict(B=B, T=T, best_ms=best, median_ms=mid, times_faster=best["blending"]/best["ours"], times_faster_median=mid["blending"]/mid["ours"],
                   times_faster_than_clearing=best["clearing"]/best["ours"], promised=promised, error=error(args))


def growth(rounds):
    for along, shapes in GROWTH.items():
        for B, T in shapes:
            args = sample(B, T)
            best = min(timed(dict(ours=ours), args, rounds)["ours"])
            loop = min(timed(dict(loop=blending_loop), args, 2)["loop"]) if along.startswith("T") and T <= 2**17 else None
            yield dict(along=along, B=B, T=T, best_ms=best, ns_per_token=1e6*best/(B*T), loop_ms=loop)


def machine():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor()) if os.path.exists("/proc/cpuinfo") else platform.processor()
    return dict(date=datetime.now().isoformat(timespec="seconds"), torch=torch.__version__, python=platform.python_version(), cpu=cpu, cores=os.cpu_count(),
                threads=torch.get_num_threads(), load=os.getloadavg())


def draw(shapes, grown, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    for along, mark in zip(GROWTH, "os", strict=True):
        points = [x for x in grown if x["along"] == along]
        left.loglog([x["B"]*x["T"] for x in points], [x["best_ms"] for x in points], mark + "-", label=f"gae, along {along}")
    loops = [x for x in grown if x["loop_ms"]]
    left.loglog([x["B"]*x["T"] for x in loops], [x["loop_ms"] for x in loops], "^-", label="loop, along T, 8 rows")
    ends = [2**13, 2**23]
    left.loglog(ends, [1e-5*n for n in ends], "k:", label="10 ns a token")
    left.set(xlabel="tokens, B·T", ylabel="milliseconds")
    left.legend(fontsize=8)
    names = [f"{x['B']:,} × {x['T']:,}" for x in shapes]
    right.bar(names, [x["times_faster"] for x in shapes], label="measured")
    right.plot(names, [x["promised"] for x in shapes], "k_", ms=60, label="promised")
    right.set(yscale="log", ylabel="times faster than the loop")
    right.legend(markerscale=.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=15, help="calls of each function at 128 × 8,192; longer rows get fewer of the loops")
    p.add_argument("--threads", type=int, help="of torch; default: its own choice")
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results", help="folder for gae_cpu.json and gae_cpu.png")
    a = p.parse_args()
    if a.threads: torch.set_num_threads(a.threads)
    result = dict(machine=machine())
    print("{cpu}, {threads} threads, torch {torch}, load {load[0]:.1f}".format(**result["machine"]))
    print(f"{'B':>6} {'T':>9} | {'ours':>15} {'blending loop':>17} {'clearing loop':>17} | {'faster':>15} {'promised':>8} | error/max|Â|")
    result["shapes"] = []
    for x in compare(a.rounds):
        result["shapes"].append(x)
        times = " ".join(f"{x['best_ms'][k]:>{w}.1f} ({x['median_ms'][k]:.1f})" for k, w in (("ours", 7), ("blending", 8), ("clearing", 8)))
        print(f"{x['B']:>6,} {x['T']:>9,} | {times} | {x['times_faster']:>6.0f} ({x['times_faster_median']:.0f}) {x['promised']:>8} | {x['error']:.1e}", flush=True)
    print("best (median), milliseconds\n")
    result["growth"] = list(growth(a.rounds))
    for x in result["growth"]: print(f"{x['B']:>6,} {x['T']:>9,} | {x['best_ms']:>8.2f} ms {x['ns_per_token']:>6.1f} ns a token")
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out/"gae_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result["shapes"], result["growth"], a.out/"gae_cpu.png")


if __name__ == "__main__": main()
