"""Every engine on 1, 2 and 4 processes against the plain process: largest differences, processor time, memory.

    .venv/bin/python benchmarks/engines.py [--only fsdp2,zero2,tensor] [--worlds 1,2,4] [--out benchmarks/results]

`tensor` are layers cut over two ranks (tests/test_tensor.py): alone, with FSDP2 over two replicas, with rows shared by
two more ranks; `held` is what a process keeps of a model of 21 million weights, with gradients and AdamW's states,
beside what one process keeps. Rows of engines that are left out stay as they were measured.

The cases and checks are those of tests/test_engines.py (PPO with uneven rows, GRPO, DPO pairs, SFT with fewer rows than
ranks, PPO and PTX in one step, a value head, tied weights, SGD under a schedule, a critic, a reward model, weights that
are not used; five steps each in fp32), which CI runs on fewer worlds. Differences are the largest over cases: weights
absolute, losses and gradient norms relative. Memory is the sum over processes of each one's peak resident set; time is
processor time of the slowest rank. gloo, CPU."""
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
import test_tensor
import torch
import torch.multiprocessing as mp
from rlblocks import Policy
from tiny import model

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def measure(engine, world, plain):
    "One launch."
    with tempfile.TemporaryDirectory() as folder: ranks = t.launch(engine, world, Path(folder))
    far = t.compare(ranks, plain)
    worst = lambda what: max(x for (_, k), x in far.items() if k == what)
    return dict(engine=engine, world=world, weights=worst("weights"), loss=worst("loss"), grad_norm=worst("grad_norm"),
                gib=round(sum(r["rss"] for r in ranks)/2**30, 2),
                cpu_s=round(max(sum(r["times"].values()) for r in ranks), 1), cases=len(ranks[0]["found"]),
                checks=len(t.CHECKS))


def tensor(world, plain):
    "One launch of all ways that layers are cut."
    with tempfile.TemporaryDirectory() as folder: ranks = test_tensor.launch(world, Path(folder), every=True)
    for way in test_tensor.WORLDS[world]:
        mine = test_tensor.answering(ranks, way)
        far = t.compare(mine, plain)
        worst = {what: max(x for (_, k), x in far.items() if k == what) for what in ("weights", "loss", "grad_norm")}
        yield dict(engine=way, world=world, **worst, gib=round(sum(r["rss"] for r in ranks)/2**30, 2),
                   held_mib=held(world, test_tensor.WAYS[way]),
                   cpu_s=round(max(sum(s for (w, _), s in r["times"].items() if w == way) for r in ranks), 1),
                   cases=len(mine[0]["found"]),
                   checks=len([k for w, k in ranks[0]["times"] if w == way])-len(mine[0]["found"]))


def held(world, how):
    "MiB of weights, gradients and states that the fullest process keeps after a step."
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_held, (world, folder, how), nprocs=world, join=True)
        return max(torch.load(f"{folder}/{r}.pt") for r in range(world))


def one_held(rank, world, folder, how):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    policy = Policy(model(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
                          num_key_value_heads=4, vocab_size=8192), **t.HOW, **how)
    policy.step(t.batch(2), t.sft)
    states = [x for s in policy._run.model.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    weights = list(policy._run.module.parameters())
    # a gradient is as large as its weight
    size = sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in weights + weights + states)
    torch.save(round(size/2**20, 1), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--only", default="fsdp2,zero1,zero2,zero3,tensor")
    args.add_argument("--worlds", default="1,2,4")
    args.add_argument("--out", default=str(Path(__file__).parent/"results"))
    a = args.parse_args()
    plain = {name: t.run(case)[1:] for name, case in (t.cases() | test_tensor.cases()).items()}
    print(f"one process keeps {held(1, {})} MiB")
    for engine in a.only.split(","):
        for world in map(int, a.worlds.split(",")):
            for row in tensor(world, plain) if engine == "tensor" and world in test_tensor.WORLDS else [
                    measure(engine, world, plain)] if engine != "tensor" else []:
                print(
                    "{engine:16} on {world}: weights {weights:.1e}, loss {loss:.1e}, gradient norm "
                    "{grad_norm:.1e}; {gib} GiB, {cpu_s} s; {cases} cases, {checks} checks; {held_mib} MiB held".format(
                    **dict(held_mib="-") | row), flush=True)
                keep(row | dict(date=datetime.now().isoformat(timespec="minutes")), Path(a.out))


def keep(row, out):
    "JSON and plot of what has been measured so far: this row in the place of an earlier one."
    file = out/"engines_cpu.json"
    before = json.loads(file.read_text()) if file.exists() else dict(rows=[], about={})
    rows = [dict(date=before["about"].get("date")) | r for r in before["rows"]]
    at = next((i for i, r in enumerate(rows) if (r["engine"], r["world"]) == (row["engine"], row["world"])), len(rows))
    rows[at:at+1] = [row]
    about = dict(date=datetime.now().isoformat(timespec="minutes"), python=platform.python_version(),
                 machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
                 **{p: version(p) for p in ("torch", "transformers", "deepspeed")})
    file.write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")
    fig, axes = plt.subplots(1, 2, figsize=(9, 3))
    for engine in dict.fromkeys(r["engine"] for r in rows):
        mine = [r for r in rows if r["engine"] == engine]
        axes[0].plot([r["world"] for r in mine], [max(r["weights"], 1e-9) for r in mine], "o-", label=engine)
        axes[1].plot([r["world"] for r in mine], [r["gib"] for r in mine], "o-", label=engine)
    axes[0].axhline(1e-5, color="gray", lw=.8); axes[0].set_yscale("log")
    axes[0].set_ylabel("largest weight difference")
    axes[1].axhline(8, color="gray", lw=.8)
    axes[1].set_ylabel("GiB, all processes")
    for ax in axes: ax.set_xlabel("processes")
    axes[1].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(out/"engines_cpu.png", dpi=90)
    plt.close(fig)


if __name__ == "__main__": main()
