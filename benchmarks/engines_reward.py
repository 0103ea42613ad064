"""GRPO with each engine behind `Rollout`: the tutorial's loop as it stands, `rollout_engine` changed and nothing else.

The model has heads of 32, the least that vLLM for CPU runs. Both engines start from one warmed-up model.
    python benchmarks/engines_reward.py --seeds 0 1 2 3
"""
import argparse
import json
import os
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT/"tutorials"
RESULTS = ROOT/"benchmarks"/"results"/"engines_reward_cpu.json"
SIZES = dict(lr=1e-3, prompts=24, group_size=8, minibatches=4, max_tokens=6)


def warmed(folder, steps):
    "Train the model that every run starts from; its data, tokenizer and folder."
    from rlblocks import Demonstrations, here, loop_from
    from word_problems import problems, tokenizer, transformer
    train = problems(2000)
    tok = tokenizer(r["prompt"] + r["completion"] for r in train)
    sft = loop_from(f"{TUTORIALS}/sft.ipynb:sft")
    net = transformer(tok, heads=2)
    list(sft(here, Demonstrations(train, tok), model=net, tokenizer=tok, steps=steps, save=folder))
    return train, tok


def run(engine, seed, steps, train, tok, folder):
    "Rewards and KL of one run, and what it took."
    from rlblocks import Prompts, here, loop_from
    from word_problems import questions, right
    grpo = loop_from(f"{TUTORIALS}/grpo.ipynb:grpo")
    start, cpu = time.time(), time.process_time()
    rows = list(grpo(here, Prompts(questions(train), tok), right, model=folder, steps=steps, seed=seed,
                     rollout_engine=engine, **SIZES))
    rewards = [r["reward"] for r in rows]
    return dict(first=round(sum(rewards[:5])/5, 4), last=round(sum(rewards[-5:])/5, 4),
                kl=round(float(rows[-1]["kl"]), 4), seconds=round(time.time() - start),
                own_cpu_seconds=round(time.process_time() - cpu))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(TUTORIALS))
    found = dict(steps=args.steps, warm_up=args.warm_up, sizes=SIZES, runs={})
    with tempfile.TemporaryDirectory() as folder:
        train, tok = warmed(folder := f"{folder}/warm", args.warm_up)
        for seed in args.seeds:
            for engine in args.engines:
                made = run(engine, seed, args.steps, train, tok, folder)
                found["runs"].setdefault(engine, {})[str(seed)] = made
                print(f"seed {seed}, {engine}: {made}", flush=True)
                found["mean_last"] = {k: round(sum(r["last"] for r in v.values())/len(v), 4)
                                      for k, v in found["runs"].items()}
                found["versions"] = dict(torch=version("torch"), transformers=version("transformers"),
                                         date=str(date.today()))
                args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__": main()
