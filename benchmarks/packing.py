"""Packing and balancing against TRL's best-fit-decreasing plan and verl's balancing: fill, spread and speed on real
lengths.

    .venv/bin/python benchmarks/packing.py [--data ../shared/data] [--peers FOLDER] [--rounds 7]
        [--out benchmarks/results]

Lengths are those of GSM8K's training rows (question and answer) under Qwen2.5's tokenizer, drawn with replacement;
without --data, log-normal ones of the same shape (median 168, 64 to 536). --peers is a folder with the wheels trl-*.whl
and verl-*.whl; their sources are read from there, nothing is installed. Without it TRL's is read from where it is
installed, and verl is left out.

Only plans are timed. TRL plans inside a function that also rewrites an Arrow table (2 to 5 times as long as the plan):
what runs here is the part of its body from the sorting of the lengths to the end of the loop that fills bins. verl's is
whole: get_seqlen_balanced_partitions. The functions are called in turn in every round, and processor time is taken, so
that other work on the machine meets all alike; medians are shown.

A promise that is not kept is printed as MISSED, and the exit code is 1.
"""
import argparse
import ast
import gzip
import heapq
import json
import os
import platform
import random
import subprocess
import sys
import time
import zipfile
from collections import defaultdict, deque
from datetime import datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rlblocks.data.balancing import balance
from rlblocks.data.packing import bin_pack, plan_micro_batches

CAP, N, ROWS, PARTS = 2048, 100_000, 4096, 256
PROMISED = dict(pack=2., balance=5.)


def real_lengths(data):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(data/"tokenizers/qwen2.5")
    with gzip.open(data/"gsm8k/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    count = lambda texts: torch.tensor([len(i) for i in tokenizer(texts)["input_ids"]])
    return dict(rows=count([r["question"] + "\n" + r["answer"] for r in rows]),
                answers=count([r["answer"] for r in rows]))


def like_lengths():
    g = torch.Generator().manual_seed(0)
    return dict(rows=(torch.randn(7473, generator=g)*.36 + 5.14).exp().long().clamp(64, 536),
                answers=(torch.randn(7473, generator=g)*.45 + 4.7).exp().long().clamp(20, 400))


def source(folder, package, path):
    "(text of a file, its package's version): from a wheel, or as it is installed"
    if folder is None: return distribution(package).locate_file(path).read_text(), version(package)
    wheel = max(folder.glob(f"{package}-*.whl"), default=None)
    if wheel is None: raise SystemExit(f"packing: --peers {folder}: there is no {package}-*.whl in it")
    with zipfile.ZipFile(wheel) as z: return z.read(path).decode(), wheel.name.split("-")[1]


def trl_plan(folder):
    "TRL's plan alone, lengths → bins, and its version."
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    text, of = source(folder, "trl", "trl/data_utils.py")
    tree = ast.parse(text)
    tree.body = [n for n in tree.body if getattr(n, "name", None) in ("_SegmentTree", "_pack_bfd")]
    f = next(n for n in tree.body if n.name == "_pack_bfd")
    begin = next(i for i, s in enumerate(f.body) if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "ids")
    end = next(i for i, s in enumerate(f.body) if isinstance(s, ast.For))
    f.args, f.returns = ast.parse("def f(examples, lengths, seq_length): pass").body[0].args, None
    f.body = [*f.body[begin:end+1], ast.parse("def f(): return bins").body[0].body[0]]
    space = dict(np=np, pa=pa, pc=pc, defaultdict=defaultdict, deque=deque)
    exec(compile(ast.fix_missing_locations(tree), "trl/data_utils.py", "exec"), space)
    def plan(lengths):
        x = pa.array(lengths.tolist(), pa.int32()) # not timed: TRL's lengths are in Arrow from the start
        start = time.process_time()
        bins = space["_pack_bfd"](range(len(x)), x, CAP)
        return time.process_time() - start, [b["ids"] for b in bins]
    return plan, of


def verl_balance(folder):
    text, of = source(folder, "verl", "verl/utils/seqlen_balancing.py")
    tree, wanted = ast.parse(text), ("karmarkar_karp", "get_seqlen_balanced_partitions")
    tree.body, space = [n for n in tree.body if getattr(n, "name", None) in wanted], dict(heapq=heapq)
    exec(compile(tree, "verl/utils/seqlen_balancing.py", "exec"), space)
    return space[wanted[1]], of


def before(commit):
    "`balance` and `bin_pack` as they were at a commit, in modules of their own."
    found = {}
    for name, imports in dict(balancing={}, packing={
            "from .balancing import _ints, whole_number": "from rlblocks.data.columns import integers as _ints, "
            "whole_number"}).items():
        text = subprocess.run(["git", "show", f"{commit}:rlblocks/data/{name}.py"], cwd=Path(__file__).parent,
                              capture_output=True, text=True, check=True).stdout
        for old, new in imports.items(): text = text.replace(old, new)
        space = dict(__name__=f"before_{name}")
        sys.modules[space["__name__"]] = type(sys)(space["__name__"])
        exec(compile(text.replace("from ..", "from rlblocks."), f"{commit}:{name}", "exec"),
             vars(sys.modules[space["__name__"]]))
        found |= vars(sys.modules[space["__name__"]])
    return found["balance"], found["bin_pack"]


def longest_first(costs, n):
    "Without swaps."
    heap, parts = [(0, k) for k in range(n)], [[] for _ in range(n)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, k = heap[0]
        parts[k].append(i)
        heapq.heapreplace(heap, (load + costs[i], k))
    return parts


STEPS = ((64, 8), (512, 8), (512, 64), (4096, 256))     # rows of a step, replicas


def steps(pool, rounds, commit):
    """What a plan takes, and how much longer than the mean the heaviest replica works: longest first, with swaps,
    and (with --before) differencing."""
    g, plans, found = torch.Generator().manual_seed(1), dict(longest_first=longest_first, ours=balance), {}
    if commit: plans["before"] = before(commit)[0]
    for rows, n in STEPS:
        taken, above = {k: [] for k in plans}, {k: [] for k in plans}
        for _ in range(rounds):
            x = pool[torch.randint(len(pool), (rows,), generator=g)].tolist()
            for name, f in plans.items():
                seconds, parts = timed(lambda f=f, x=x, n=n: f(x, n))
                taken[name].append(1e3*seconds)
                above[name].append(max(loads(parts, x))*n/sum(x) - 1)
        found[f"{rows} rows, {n} replicas"] = {k: dict(median_ms=median(taken[k]), above_mean=median(above[k]))
                                               for k in plans}
    return found


def bins(pool, rounds, commit):
    "Best fit, one row at a time, and (with --before) by kinds of rows: milliseconds and bins."
    g, plans, found = torch.Generator().manual_seed(2), dict(ours=bin_pack), {}
    if commit: plans["before"] = before(commit)[1]
    for rows in (512, 4096, 32_768, 100_000):
        x = pool[torch.randint(len(pool), (rows,), generator=g)]
        taken, made = {k: [] for k in plans}, {}
        for _ in range(rounds):
            for name, f in plans.items():
                seconds, parts = timed(lambda f=f, x=x: f(x, CAP))
                taken[name].append(1e3*seconds)
                made[name] = len(parts)
        found[rows] = {k: dict(median_ms=median(taken[k]), bins=made[k]) for k in plans}
    return found


def timed(f):
    start = time.process_time()
    out = f()
    return time.process_time() - start, out


def median(x): return sorted(x)[len(x)//2]
def loads(parts, lengths): return [sum(lengths[int(i)] for i in p) for p in parts]


def packing(lengths, trl, rounds):
    plans = dict(ours=lambda: timed(lambda: bin_pack(lengths, CAP)))
    if trl: plans["trl"] = lambda: trl(lengths)
    taken, made, x = {k: [] for k in plans}, {}, lengths.tolist()
    for _ in range(rounds):
        for name, f in plans.items():
            seconds, made[name] = f()
            taken[name].append(seconds)
    return {name: dict(median_ms=1e3*median(s), best_ms=1e3*min(s), bins=len(made[name]),
                       fill=sum(x)/(CAP*len(made[name])), fullest=max(loads(made[name], x)))
            for name, s in taken.items()}


def balancing(batches, verl, equal):
    plans = dict(ours=lambda x: balance(x, PARTS, equal=equal))
    if verl: plans["verl"] = lambda x: verl(x, PARTS, equal)
    taken, spread = {k: [] for k in plans}, {k: [] for k in plans}
    for x in batches:
        for name, f in plans.items():
            seconds, parts = timed(lambda f=f, x=x: f(x))
            taken[name].append(seconds)
            each = loads(parts, x)
            spread[name].append(max(each) - min(each))
    return {name: dict(median_ms=1e3*median(taken[name]), best_ms=1e3*min(taken[name]), spread=spread[name])
            for name in plans}


def violations(cases):
    "Random cases in which a bin holds more than the cap, or a row is lost or doubled."
    rng, bad = random.Random(0), 0
    for _ in range(cases):
        cap = rng.choice([1, 7, 64, 2048])
        x = [rng.choice([0, cap, rng.randint(0, cap), rng.randint(0, cap//3)]) for _ in range(rng.randint(0, 40))]
        for bins in (bin_pack(x, cap, multiple=rng.choice([1, 2, 8])), plan_micro_batches(x, max_tokens=cap)):
            bad += sorted(i for b in bins
                          for i in b) != list(range(len(x))) or any(sum(x[i] for i in b) > cap for b in bins)
    return bad


def machine():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
               platform.processor()) if os.path.exists("/proc/cpuinfo") else platform.processor()
    return dict(date=datetime.now().isoformat(timespec="seconds"), torch=torch.__version__,
                python=platform.python_version(), cpu=cpu, cores=os.cpu_count(),
                threads=torch.get_num_threads(), load=os.getloadavg())


def verdicts(result):
    "What was promised, what came, and whether it is met; without a peer, nothing is said of it."
    out = [dict(wanted=f"no cap broken over {result['violations']['cases']:,} random cases",
                got=result["violations"]["broken"], met=not result["violations"]["broken"])]
    for kind, x in result["packing"].items():
        if "trl" not in x: continue
        faster = x["trl"]["median_ms"]/x["ours"]["median_ms"]
        out += [dict(wanted=f"{PROMISED['pack']:g} times as fast as TRL's plan of {kind}", got=f"{faster:.1f}",
                     met=faster >= PROMISED["pack"]), dict(wanted=f"fill of {kind} no lower than TRL's",
                                                           got=f"{x['ours']['fill']:.4%} and {x['trl']['fill']:.4%}",
                                                           met=x["ours"]["fill"] >= x["trl"]["fill"])]
    free = result["balancing"]["free"]
    if "verl" in free:
        faster, spread = free["verl"]["median_ms"]/free["ours"]["median_ms"], {name: max(r["spread"])
                                                                               for name, r in free.items()}
        out += [dict(wanted=f"{PROMISED['balance']:g} times as fast as verl's balancing", got=f"{faster:.1f}",
                     met=faster >= PROMISED["balance"]),
                dict(wanted="spread no larger than verl's", got=f"{spread['ours']} and {spread['verl']} tokens at most",
                     met=spread["ours"] <= spread["verl"])]
    return out


def draw(result, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
    jobs = dict(result["packing"]) | {f"balance {k}": v for k, v in result["balancing"].items()}
    for name, color in dict(ours="C0", trl="C1", verl="C2").items():
        at = [k for k, v in enumerate(jobs.values()) if name in v]
        if at:
            left.bar([k + .2*(name != "ours") - .2*(name == "ours") for k in at],
                     [v[name]["median_ms"] for v in jobs.values() if name in v], .4, label=name, color=color)
    left.set(yscale="log", ylabel="milliseconds", xticks=range(len(jobs)))
    left.set_xticklabels([k if "balance" in k else f"pack {k}" for k in jobs], fontsize=8)
    left.legend()
    for kind, mark in zip(result["balancing"], "os", strict=True):
        for name, x in result["balancing"][kind].items():
            right.plot(sorted(x["spread"]), mark + "-", label=f"{name}, {kind}", ms=4)
    right.set(ylabel="fullest − emptiest part, tokens", xlabel="batch, sorted")
    right.set_yscale("symlog", linthresh=1)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, help="folder with gsm8k and tokenizers/qwen2.5")
    p.add_argument("--peers", type=Path, help="folder with the wheels of trl and verl")
    p.add_argument("--before", help="a commit whose plans are timed beside ours")
    p.add_argument("--rounds", type=int, default=7,
                   help="calls of each plan; also the number of batches that are balanced")
    p.add_argument("--cases", type=int, default=10_000, help="random cases searched for a broken cap")
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results",
                   help="folder for packing_cpu.json and packing_cpu.png")
    a = p.parse_args()
    torch.set_num_threads(1)        # the plans are of one thread: a second would spin beside them, and count
    try: trl, trl_version = trl_plan(a.peers)
    except PackageNotFoundError: trl, trl_version = None, None
    verl, verl_version = verl_balance(a.peers) if a.peers else (None, None)
    pool, g = real_lengths(a.data) if a.data else like_lengths(), torch.Generator().manual_seed(0)
    result = dict(machine=machine() | dict(trl=trl_version, verl=verl_version),
                  lengths="GSM8K, Qwen2.5's tokenizer" if a.data else "made up", cap=CAP, packing={}, balancing={})
    print("{cpu}, {threads} threads, torch {torch}, trl {trl}, verl {verl}, load {load[0]:.1f}".format(
        **result["machine"]))
    print(f"\n{N:,} lengths into bins of {CAP:,}\n{'lengths':>8} {'':>5} | {'ms':>8} {'(best)':>9} | {'bins':>7} "
          f"{'fill':>8} {'fullest':>8} | times faster (promised {PROMISED['pack']:.0f}) | fill beyond TRL's "
          "(promised: no lower)")
    for kind, x in pool.items():
        found = result["packing"][kind] = packing(x[torch.randint(len(x), (N,), generator=g)], trl, a.rounds)
        for name, r in found.items():
            ratio = (f"{found['trl']['median_ms']/r['median_ms']:>32.1f} | {r['fill'] - found['trl']['fill']:+.4%}, "
                     f"{r['bins'] - found['trl']['bins']:+} bins" if name == "ours" and trl else "")
            print(f"{kind:>8} {name:>5} | {r['median_ms']:>8.1f} {r['best_ms']:>9.1f} | {r['bins']:>7,} "
                  f"{r['fill']:>8.4%} {r['fullest']:>8,} | {ratio}", flush=True)
    print(f"\n{ROWS:,} rows into {PARTS} parts, {a.rounds} batches\n{'counts':>8} {'':>5} | {'ms':>8} {'(best)':>9} "
          f"| {'spread: median':>14} {'largest':>8} | times faster (promised {PROMISED['balance']:.0f})")
    batches = [pool["rows"][torch.randint(len(pool["rows"]), (ROWS,), generator=g)].tolist() for _ in range(a.rounds)]
    for kind, equal in dict(free=False, equal=True).items():
        found = result["balancing"][kind] = balancing(batches, verl, equal)
        for name, r in found.items():
            ratio = f"{found['verl']['median_ms']/r['median_ms']:.1f}" if name == "ours" and verl else ""
            print(f"{kind:>8} {name:>5} | {r['median_ms']:>8.1f} {r['best_ms']:>9.1f} | {median(r['spread']):>14} "
                  f"{max(r['spread']):>8} | {ratio}", flush=True)
    result["steps"], result["bins"] = steps(pool["answers"], a.rounds, a.before), bins(pool["rows"], a.rounds, a.before)
    print(f"\n{'a step':>24} {'':>14} | {'ms':>8} | heaviest replica above the mean")
    for kind, x in result["steps"].items():
        for name, r in x.items(): print(f"{kind:>24} {name:>14} | {r['median_ms']:>8.2f} | {r['above_mean']:.3%}")
    print(f"\n{'bins of rows':>24} {'':>14} | {'ms':>8} | bins")
    for kind, x in result["bins"].items():
        for name, r in x.items(): print(f"{kind:>24,} {name:>14} | {r['median_ms']:>8.2f} | {r['bins']:,}")
    result["violations"] = dict(cases=a.cases, broken=violations(a.cases))
    print("\n{broken} of {cases:,} random cases break the cap or lose a row\n".format(**result["violations"]))
    result["verdicts"] = verdicts(result)
    for v in result["verdicts"]: print(f"{'met   ' if v['met'] else 'MISSED'}  {v['wanted']}: {v['got']}")
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out/"packing_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, a.out/"packing_cpu.png")
    return not all(v["met"] for v in result["verdicts"])


if __name__ == "__main__": sys.exit(main())
