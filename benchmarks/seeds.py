"""What the tutorials claim of learning, over seeds, thread counts and kernels: every code cell runs as it stands, with another `seed`.

A tutorial asserts only what held in all of these runs with room to spare; the last results are in results/seeds_cpu.json.
    python benchmarks/seeds.py --seeds 0 1 2 3 4 --threads 1 2 --only grpo ppo
"""
import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT/"benchmarks"/"results"/"seeds_cpu.json"
CLAIMS = dict(       # tutorial → name → expression in its variables, read after the last cell
    sft=dict(loss_first="curve[0]", loss_last="curve[-1]", right="share"),
    grpo=dict(first="first", last="last"),
    ppo=dict(first="first", last="last"),
    dpo=dict(pairs="runs['sft_coef=0.2'][-1]['held_out']", before="before[0]", after="after[0]", bare="bare[0]", real_pairs="looks[-1]['held_out']"),
    kto=dict(auc="synthetic_auc", before="before[0]", after="after[0]", real_auc="looks[-1]['held_out']"),
    reward_model=dict(pairs="synthetic_pairs", first="first", one="best[0]", of_eight="best[-1]", real_pairs="exams[-1][1]"),
    rlhf=dict(judge="judged[-1][1]", right_before="before['right']", right_after="after['right']", score_before="before['score']", score_after="after['score']",
              kl_most="max(r['kl'] for r in rows)", kl_after="after['kl']", hacked_reward="mean(hacked[-5:], 'reward') - mean(hacked[:5], 'reward')",
              hacked_truth="mean(hacked[-5:], 'truth') - mean(hacked[:5], 'truth')", hacked_kl="mean(hacked[-5:], 'kl')"))
KEEP = dict(kto=dict(synthetic_auc="looks[-1]['held_out']"), reward_model=dict(synthetic_pairs="exams[-1][1]"))     # read when first there: a later cell takes the name again


def without_asserts(code):
    "A cell whose assertions do not stop the run."
    tree = ast.parse(code)
    class Drop(ast.NodeTransformer):
        def visit_Assert(self, node): return ast.copy_location(ast.Pass(), node)
    return compile(ast.fix_missing_locations(Drop().visit(tree)), "cell", "exec")


def run(name, seed):
    "The claims' numbers of one tutorial with one seed."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    os.chdir(ROOT/"tutorials")
    sys.path.insert(0, str(ROOT/"tutorials"))
    cells = ["".join(c["source"]) for c in json.loads(Path(f"{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    if sum("seed = 0\n" in c for c in cells) != 1: raise SystemExit(f"{name}: one line `seed = 0` is wanted")
    space = {}
    with tempfile.TemporaryDirectory() as folder:
        for code in cells:
            exec(without_asserts(code.replace("seed = 0\n", f"seed = {seed}\n").replace("_proc/", f"{folder}/")), space)
            plt.close("all")
            for key, text in KEEP.get(name, {}).items():
                try: space.setdefault(key, eval(text, space))
                except NameError: pass
    return {k: round(float(eval(text, space)), 4) for k, text in CLAIMS[name].items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=["native"], help="ATEN_CPU_CAPABILITY: native, default, avx2: other CPUs, simulated")
    parser.add_argument("--only", nargs="+", default=list(CLAIMS), choices=list(CLAIMS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)        # a run in a process of its own
    args = parser.parse_args()
    if args.one:
        print("CLAIMS " + json.dumps(run(args.one[0], int(args.one[1]))))
        return
    import torch
    import transformers
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.only:
        for kernels in args.kernels:
            for threads in args.threads:
                for seed in args.seeds:
                    env = os.environ | dict(OMP_NUM_THREADS=str(threads)) | ({} if kernels == "native" else dict(ATEN_CPU_CAPABILITY=kernels))
                    start = time.time()
                    done = subprocess.run([sys.executable, __file__, "--one", name, str(seed)], env=env, capture_output=True, text=True)
                    line = next((x for x in done.stdout.splitlines() if x.startswith("CLAIMS ")), None)
                    if line is None: raise SystemExit(f"{name}, seed {seed}, {threads} thread(s): {done.stderr[-2000:]}")
                    key = f"{threads} thread{'s' if threads > 1 else ''}, {kernels if kernels != 'native' else torch.backends.cpu.get_cpu_capability()}"
                    numbers = found.setdefault(name, {}).setdefault(key, {})[str(seed)] = json.loads(line.removeprefix("CLAIMS "))
                    found["versions"] = dict(torch=torch.__version__, transformers=transformers.__version__, date=str(date.today()))
                    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                    print(f"{name:13} seed {seed}, {key}: {numbers} ({time.time()-start:.0f} s)", flush=True)


if __name__ == "__main__": main()
