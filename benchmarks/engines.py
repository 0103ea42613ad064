"""Every engine on 1, 2 and 4 processes against the plain process: largest differences, processor time, memory.

    RLBLOCKS_ENGINES=all .venv/bin/python benchmarks/engines.py [--only fsdp2,zero2] [--worlds 1,2,4] [--out benchmarks/results]

The cases and checks are those of tests/test_engines.py (PPO with uneven rows, GRPO, DPO pairs, SFT with fewer rows than ranks, PPO and PTX in one step, a value head, tied weights, SGD under a schedule,
a critic, a reward model, weights that are not used; five steps each in fp32), which CI runs on fewer worlds. Differences are the largest over cases: weights absolute, losses and gradient norms relative.
Memory is the sum over processes of each one's peak resident set; time is processor time of the slowest rank. gloo, CPU.
"""
import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import test_engines as t

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def measure(engine, world, plain):
    "One launch."
    with tempfile.TemporaryDirectory() as folder: ranks = t.launch(engine, world, Path(folder))
    far = t.compare(ranks, plain)
    worst = lambda what: max(x for (_, k), x in far.items() if k == what)
    return dict(engine=engine, world=world, weights=worst("weights"), loss=worst("loss"), grad_norm=worst("grad_norm"), gib=round(sum(r["rss"] for r in ranks)/2**30, 2),
                cpu_s=round(max(sum(r["times"].values()) for r in ranks), 1), cases=len(ranks[0]["found"]), checks=len(t.CHECKS))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--only", default="fsdp2,zero1,zero2,zero3")
    args.add_argument("--worlds", default="1,2,4")
    args.add_argument("--out", default=str(Path(__file__).parent/"results"))
    a = args.parse_args()
    plain = {name: t.run(case)[1:] for name, case in t.cases().items()}
    rows = []
    for engine in a.only.split(","):
        for world in map(int, a.worlds.split(",")):
            rows.append(measure(engine, world, plain))
            print("{engine:6} on {world}: weights {weights:.1e}, loss {loss:.1e}, gradient norm {grad_norm:.1e}; {gib} GiB, {cpu_s} s; {cases} cases, {checks} checks".format(**rows[-1]), flush=True)
            keep(rows, Path(a.out))


def keep(rows, out):
    "JSON and plot of what has been measured so far."
    about = dict(date=datetime.now().isoformat(timespec="minutes"), python=platform.python_version(), machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
                 **{p: version(p) for p in ("torch", "transformers", "deepspeed")})
    (out/"engines_cpu.json").write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")
    fig, axes = plt.subplots(1, 2, figsize=(9, 3))
    for engine in dict.fromkeys(r["engine"] for r in rows):
        mine = [r for r in rows if r["engine"] == engine]
        axes[0].plot([r["world"] for r in mine], [max(r["weights"], 1e-9) for r in mine], "o-", label=engine)
        axes[1].plot([r["world"] for r in mine], [r["gib"] for r in mine], "o-", label=engine)
    axes[0].axhline(1e-5, color="gray", lw=.8); axes[0].set_yscale("log"); axes[0].set_ylabel("largest weight difference"); axes[1].axhline(8, color="gray", lw=.8); axes[1].set_ylabel("GiB, all processes")
    for ax in axes: ax.set_xlabel("processes"); ax.legend()
    fig.tight_layout()
    fig.savefig(out/"engines_cpu.png", dpi=90)
    plt.close(fig)


if __name__ == "__main__": main()
