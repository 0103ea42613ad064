"""What the tutorials claim of learning, over seeds, thread counts and kernels: their code cells run as they stand, with
another `seed`.

With `--rollout vllm` those that sample do it with vLLM: the same loop, another engine.

A tutorial asserts only what held in all of these runs with room to spare; the last numbers are in
results/seeds_cpu.json. The SFT model that several tutorials start from is the same in all of them, and is trained once
a seed. Cells on real data are left out.
    python benchmarks/seeds.py --seeds 0 1 2 3 4 --threads 1 2 --only grpo ppo
"""
import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT/"tutorials"
RESULTS = ROOT/"benchmarks"/"results"/"seeds_cpu.json"
CLAIMS = dict(       # tutorial → name → expression in its variables, read after the last cell
    sft=dict(loss_first="curve[0]", loss_last="curve[-1]", right="share"),
    grpo=dict(first="first", last="last"), agent_endpoint=dict(first="first", last="last"),
    **{"async": dict(first="first", last="last", stalest="max(r['staleness'] for r in runs[1])",
                     synchronous="mean(runs[0][-5:])", two_ahead="mean(run(2)[-5:])")},
    offline=dict(before="before", after="after"),
    ppo=dict(first="first", last="last"),
    tools=dict(first="first", last="last", calls_first="calls[0]", calls_last="calls[1]"),
    dpo=dict(pairs="runs['sft_coef=0.2'][-1]['held_out']", before="before[0]", after="after[0]", bare="bare[0]"),
    kto=dict(auc="looks[-1]['held_out']", before="before[0]", after="after[0]"),
    reward_model=dict(start="exams[0][1]", pairs="exams[-1][1]", first="first", one="best[0]", of_eight="best[-1]"),
    rlhf=dict(judge="judged[-1][1]", right_before="before['right']", right_after="after['right']",
              score_before="before['score']", score_after="after['score']", kl_most="max(r['kl'] for r in rows)",
              kl_after="after['kl']", hacked_reward="mean(hacked[-5:], 'reward') - mean(hacked[:5], 'reward')",
              hacked_truth="mean(hacked[-5:], 'truth') - mean(hacked[:5], 'truth')",
              hacked_kl="mean(hacked[-5:], 'kl')"))


class Unasserted(ast.NodeTransformer):
    "A cell whose assertions do not stop the run."
    def visit_Assert(self, node): return ast.copy_location(ast.Pass(), node)


def compiled(code): return compile(ast.fix_missing_locations(Unasserted().visit(ast.parse(code))), "cell", "exec")


def kept(sft, folder):
    "The SFT loop, of which a second run with the same steps takes what the first has left."
    def loop(pool, data, *, steps=300, save, **how):
        there = folder/f"warm-{steps}"
        if not there.exists():
            rows = list(sft(pool, data, steps=steps, save=str(there), **how))
            (there/"rows.json").write_text(json.dumps([float(m["loss"]) for m in rows]))
        shutil.copytree(there, save)
        return [dict(loss=x) for x in json.loads((there/"rows.json").read_text())]
    return loop


def run(name, seed, folder, rollout):
    "The claims' numbers of one tutorial with one seed, its answers sampled by this engine."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from rlblocks import loops
    os.chdir(TUTORIALS)
    sys.path.insert(0, str(TUTORIALS))
    loops.sft = kept(loops.sft, folder)
    cells = ["".join(c["source"])
             for c in json.loads(Path(f"{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    if sum("seed = 0\n" in c for c in cells) != 1: raise SystemExit(f"{name}: one line `seed = 0` is wanted")
    space = {}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for code in cells:
            if "from real_pairs" in code: continue
            code = code.replace("seed = 0\n", f"seed = {seed}\n").replace("_proc/", f"{own}/")
            exec(compiled(code.replace('rollout_engine="hf"', f'rollout_engine="{rollout}"')), space)
            plt.close("all")
        return {k: round(float(eval(text, space)), 4) for k, text in CLAIMS[name].items()}


def versions():
    import torch
    import transformers
    return dict(torch=torch.__version__, transformers=transformers.__version__, date=str(date.today()))


def kernels_of(name):
    "What a run with these kernels says of itself."
    if name != "native": return name
    import torch
    return torch.backends.cpu.get_cpu_capability()


def measure(name, seed, threads, kernels, folder, rollout):
    "One tutorial in a process of its own."
    env = os.environ | dict(OMP_NUM_THREADS=str(threads)) | ({} if kernels == "native"
                                                             else dict(ATEN_CPU_CAPABILITY=kernels))
    done = subprocess.run([sys.executable, __file__, "--one", name, str(seed), str(folder), rollout], env=env,
                          capture_output=True, text=True)
    line = next((x for x in done.stdout.splitlines() if x.startswith("CLAIMS ")), None)
    if line is None: raise SystemExit(f"{name}, seed {seed}, {threads} thread(s): {done.stderr[-2000:]}")
    return json.loads(line.removeprefix("CLAIMS "))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", default="native",
                        help="ATEN_CPU_CAPABILITY: native, default, avx2: other CPUs, simulated")
    parser.add_argument("--only", nargs="+", default=list(CLAIMS), choices=list(CLAIMS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file of results, to be added to")
    parser.add_argument("--rollout", default="hf", choices=["hf", "vllm"], help="what samples the answers")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, seed, folder, rollout = args.one
        return print("CLAIMS " + json.dumps(run(name, int(seed), Path(folder), rollout)))
    for threads in args.threads:
        setting = f"{threads} thread{'s' if threads > 1 else ''}, {kernels_of(args.kernels)}"
        if args.rollout != "hf": setting += f", {args.rollout}"
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                for name in args.only:
                    start = time.time()
                    numbers = measure(name, seed, threads, args.kernels, folder, args.rollout)
                    found = json.loads(args.out.read_text()) if args.out.exists() else {}
                    found.setdefault(name, {}).setdefault(setting, {})[str(seed)] = numbers
                    args.out.write_text(json.dumps(found | dict(versions=versions()), indent=1) + "\n")
                    print(f"{name:13} seed {seed}, {setting}: {numbers} ({time.time()-start:.0f} s)", flush=True)


if __name__ == "__main__": main()
