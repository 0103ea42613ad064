"""`make demo`: a small transformer learns word problems from a sloppy teacher, then from a checked answer.

Data, tokenizer and model are made here from a seed; the two loops are those of the SFT and the GRPO tutorial, taken
from their notebooks as they stand. Prints held-out accuracy before and after, saves demo.png and the models under
demo/."""
import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")          # nothing is downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tqdm import tqdm
from transformers.utils import logging
from word_problems import problems, questions, right, tokenizer, transformer

from rlblocks import Demonstrations, Prompts, Rollout, here, loops

HERE = Path(__file__).resolve().parent
COLUMNS = ("step", "reward", "kl", "clip_frac", "grad_norm", "length")


def accuracy(model, rows):
    "Share of held-out problems answered right, drawn at temperature 1 and greedily."
    rollout = Rollout(model, max_tokens=6)
    prompts = Prompts(questions(rows), rollout.tokenizer, shuffle=False).take(len(rows))
    for temperature in (1., 0.):
        b = rollout.generate(prompts, seed="held out", temperature=temperature)
        yield sum(right(b.completion, b.answer))/len(b)


def run(out, seed, *, sft_steps=500, steps=100, held_out=400):
    "One whole demo; the curves and the accuracies (sampled, greedy) before and after."
    train, test = problems(4000, seed=seed), problems(held_out, seed=seed, held_out=True)
    tok = tokenizer(r["prompt"] + r["completion"] for r in train)
    warm, tuned = str(out/f"sft-{seed}"), str(out/f"grpo-{seed}")

    sft = loops.sft(here, Demonstrations(train, tok, seed=seed),
                    model=transformer(tok, seed=seed), tokenizer=tok, lr=4e-3, steps=sft_steps, save=warm)
    print(f"SFT, {sft_steps} steps; then GRPO, {steps} steps", flush=True)
    losses = [float(m["loss"]) for m in tqdm(sft, total=sft_steps, desc=f"SFT, seed {seed}", unit="step", disable=None)]
    before = tuple(accuracy(warm, test))

    data = Prompts(questions(train), tok, seed=seed)
    grpo = loops.grpo(here, data, right, model=warm, lr=1e-3, steps=steps, prompts=64,
                      group_size=8, minibatches=4, max_tokens=6, seed=seed, save=tuned)
    print("  ".join(f"{c:>9}" for c in COLUMNS))
    rewards = []
    for m in tqdm(grpo, total=steps, desc=f"GRPO, seed {seed}", unit="step", disable=None):
        tqdm.write("  ".join(f"{float(m[c]):9.4g}" for c in COLUMNS))
        rewards.append(m["reward"])
    return losses, rewards, before, tuple(accuracy(tuned, test))


def draw(results, file):
    "SFT loss, GRPO reward and held-out accuracy of every seed."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, (left, mid, bars) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for seed, (losses, rewards, before, after) in results.items():
        left.plot(losses, lw=.8, label=f"seed {seed}")
        mid.plot(rewards, lw=.8)
        bars.plot([0, 1], [before[0], after[0]], "o-", label=f"seed {seed}")
    left.set(title="SFT on a sloppy teacher", xlabel="step", ylabel="nats per answer token")
    mid.set(title="GRPO on checked answers", xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    bars.set(title="held-out problems", xticks=[0, 1], xticklabels=["before", "after"], ylabel="share of right answers",
             ylim=(0, 1), xlim=(-.3, 1.3))
    bars.legend()
    fig.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one whole run for each")
    parser.add_argument("--out", type=Path, default=HERE.parent/"demo", help="folder for the models")
    args = parser.parse_args()
    try: import matplotlib  # noqa: F401
    except ImportError as e:
        raise SystemExit("demo: matplotlib, which draws the curves, is not installed: pip install matplotlib, or make "
                         "demo") from e
    try: args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e: raise SystemExit(f"demo: cannot write to {args.out}: {e}") from e
    logging.disable_progress_bar()
    # a model this small gains nothing from more, and the numbers do not depend on the machine's cores
    torch.set_num_threads(1)
    start, results = time.time(), {}
    for seed in args.seeds:
        results[seed] = run(args.out, seed)
    draw(results, HERE.parent/"demo.png")
    print(f"\nheld-out accuracy           before   after     ({time.time()-start:.0f} s on one core)")
    for seed, (_, _, before, after) in results.items():
        print(f"  seed {seed}  sampled (T=1)     {before[0]:6.1%}  {after[0]:6.1%}\n          greedy            "
              f"{before[1]:6.1%}  {after[1]:6.1%}")
    print(f"models in {os.path.relpath(args.out)}/, curves in demo.png")


if __name__ == "__main__": main()
