"""Real text, real weights: SFT, GRPO and PPO on stories; GSM8K's questions through the whole pipeline.

    .venv/bin/python benchmarks/real_run.py --data ../shared/data [--seeds 1] [--steps 30] [--threads 1]
        [--out benchmarks/results]

**Stories.** `models/stories260K` was trained on TinyStories and tells tales of 350 tokens. The SFT loop teaches it to
tell short ones (real stories, cut after the last sentence within 140 characters) and to stop; then GRPO and PPO raise a
reward on what was written:

    min(happy words, 3)/3  +  1/2 if the story ended: the model stopped by itself, behind . ! or ? and after at least
                                  15 words

Happy words are counted with repetition, on purpose: "loved loved loved" earns what a story with three happy moments
earns, and a policy without KL finds that out. The 15 words are there because PPO pays KL by the token: without them,
saying little is the cheapest way to stay close. So each run shows, on openings that no training saw, how far the policy
went (KL), how often it repeats itself and what real stories cost it now (nats a token).

**GSM8K.** A random Llama with the real Qwen2.5 tokenizer and chat template; it solves nothing. The gold solution joins
each group as one more row, so that math-verify finds right and wrong in it and the update has a gradient: the same one
for padded and packed rows, here in float64.

The loops are those of the tutorials, taken from their notebooks as they stand.
"""
import argparse
import gzip
import json
import os
import platform
import re
import tempfile
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")          # nothing is downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from rlblocks import (Batch, Demonstrations, Grader, OptimizerSpec, Policy, Prompts, Rollout, at_tokens, bin_pack,
                      group_advantages, grpo_loss, here, kl_k1, loop_from, masked_mean,
                      math_reward, plan_micro_batches,)

TUTORIALS = Path(__file__).resolve().parents[1]/"tutorials"
MODEL, TOKENIZER = "models/stories260K", "tokenizers/qwen2.5"
NEEDED = [*(f"stories/tinystories_{part}.jsonl.gz" for part in ("train", "test")),
          *(f"gsm8k/{part}.jsonl.gz" for part in ("train", "test")),
          *(f"{MODEL}/{name}"
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")),
          *(f"{TOKENIZER}/{name}" for name in ("vocab.json", "merges.txt", "tokenizer_config.json"))]


def loop(name): return loop_from(f"{TUTORIALS/name}.ipynb:{name}")


def complete(data):
    "The folder, if it holds everything a run reads."
    missing = [name for name in NEEDED if not (data/name).is_file()]
    if not data.is_dir():
        raise SystemExit(
            f"real_run: --data {data}: there is no such folder; a folder with {', '.join(NEEDED)} is wanted")
    if missing: raise SystemExit(f"real_run: --data {data}: the folder lacks {', '.join(missing)}")
    return data


def read(file):
    with gzip.open(f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines: return [json.loads(line) for line in lines]


# -- stories

MAX_TOKENS, LEAST_WORDS = 80, 15
HAPPY = set("happy happily smile smiles smiled smiling laugh laughed love loves loved fun glad joy hug hugged "
            "proud excited".split())


def words(text): return re.findall(r"[a-z']+", text.lower())
def happy(text): return sum(w in HAPPY for w in words(text))
def ended(text, reason):
    return reason == "completed" and text.rstrip(" \n\"'").endswith((".", "!", "?")) and len(words(text)) >= LEAST_WORDS


def tale_reward(completions, finish_reason, **_):
    "Happy words, three at most, and an ending."
    return [min(happy(c), 3)/3 + ended(c, r)/2 for c, r in zip(completions, finish_reason, strict=True)]


def tales(file, most=140):
    "Real stories as prompt (their first sentence) and completion: whole sentences, `most` characters or one sentence."
    def short(text):
        told = ""
        for sentence in re.findall(r"[^.!?]*[.!?]+[\"']*", text):
            if told and len(told + sentence) > most: break
            told += sentence
        return told
    return [dict(prompt=row["prompt"], completion=short(row["completion"])) for row in read(file)]


def look(model, ref, rows, group_size=2):
    "What a model does on openings it has not seen (temperature 1, a fixed seed), and what real stories cost it."
    policy, ref, rollout = Policy(model, frozen=True), Policy(ref, frozen=True), Rollout(model, max_tokens=MAX_TOKENS)
    tok = policy.tokenizer
    b = rollout.generate(Prompts([dict(prompt=row["prompt"]) for row in rows], tok, shuffle=False).take(len(rows)),
                         group_size=group_size, seed="held out")
    said = [words(c) for c in b.completion]
    triples = [tuple(ws[i:i+3]) for ws in said for i in range(len(ws) - 2)]
    real = Demonstrations(rows, tok, max_tokens=200, truncate="end", shuffle=False).take(len(rows))
    mean = lambda xs: sum(xs)/max(len(xs), 1)
    return {"reward": mean(tale_reward(b.completion, b.finish_reason)),
            "happy words": mean([happy(c) for c in b.completion]),
            "ended": mean([ended(*x) for x in zip(b.completion, b.finish_reason, strict=True)]),
            "words": mean([len(ws) for ws in said]),
            "distinct words": mean([len(set(ws))/max(len(ws), 1) for ws in said]),
            "distinct triples": len(set(triples))/max(len(triples), 1),
            "KL": masked_mean(kl_k1(policy.logprobs(b), ref.logprobs(b), b.mask), b.mask).item(),
            "real text": -masked_mean(policy.logprobs(real), real.mask).item(),
            "tale": f"{b.prompt[0]} …{b.completion[0]}"}


def stories(data, folder, *, sft_steps=40, steps=30, rows=128, seed=0, without_kl=True, held_out=100, group_size=2):
    """SFT, then GRPO and PPO, each from the SFT model: yields (stage, its curves, its seconds and what it does held
    out), in order."""
    train, test = tales(data/"stories/tinystories_train"), tales(data/"stories/tinystories_test")[:held_out]
    start, warm = str(data/MODEL), str(folder/"sft")
    tok = transformers.AutoTokenizer.from_pretrained(start)
    real = Demonstrations(train, tok, max_tokens=160, truncate="end", seed=seed)
    openings = lambda: Prompts([dict(prompt=row["prompt"]) for row in train], tok, max_tokens=512-MAX_TOKENS, seed=seed)

    def stage(name, run, args, model, save, **kwargs):
        clock = time.perf_counter()
        logged = list(run(here, *args, model=model, save=str(folder/save), **kwargs))
        seconds = time.perf_counter() - clock
        curves = {k: [float(m[k]) for m in logged] for k in ("loss", "reward", "kl", "length") if k in logged[0]}
        return name, dict(curves=curves, seconds=seconds, held_out=look(str(folder/save), warm, test, group_size))

    yield "pretrained", dict(curves={}, seconds=0., held_out=look(start, start, test, group_size))
    yield stage("sft", loop("sft"), [real], start, "sft", tokenizer=tok, lr=1e-3, warmup=5, steps=sft_steps)
    common = dict(steps=steps, max_tokens=MAX_TOKENS, seed=seed, lr=5e-4)
    for name, kl_coef in [("grpo", .3), ("grpo without KL", 0.)][:1 + without_kl]:
        yield stage(name, loop("grpo"), [openings(), tale_reward], warm, "grpo", **common, prompts=rows//8,
                    group_size=8, minibatches=1, kl_coef=kl_coef)
    yield stage("ppo", loop("ppo"), [openings(), tale_reward], warm, "ppo", **common, prompts=rows, epochs=1,
                minibatches=2, critic_lr=2e-3, lam=1., kl_coef=.1, kl_target=.2, horizon=3000)


def ends(curve, n=5):
    "Mean of the first and of the last steps."
    n = min(n, len(curve)//2)
    return sum(curve[:n])/n, sum(curve[-n:])/n


# -- GSM8K

def chat(row): return [dict(role="user", content=row["question"])]


def random_llama(tok, seed=0, width=32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tok), hidden_size=width, intermediate_size=2*width, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=1024,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id))


def gold(data, part):
    "How many of GSM8K's own solutions `math_reward` calls right: as they were written, and with the answer in a box."
    answers = [row["answer"] for row in read(data/f"gsm8k/{part}")]
    boxed = [f"{a.rpartition('####')[0]}\\boxed{{{a.rpartition('####')[2].strip()}}}" for a in answers]
    as_written, in_box = math_reward(answers, answers), math_reward(boxed, answers)
    return dict(rows=len(answers), as_written=sum(x == 1 for x in as_written), in_box=sum(x == 1 for x in in_box),
                missed=[a[-120:] for a, x in zip(answers, as_written, strict=True) if x != 1])


def gradient(model, batch, loss, **layout):
    "The gradient of one `Policy.step`, by name: what plain descent with step 1 takes from the weights."
    policy = Policy(model, optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=1.), max_norm=float("inf")),
                    **layout)
    weights = lambda: {k: v.clone() for k, v in policy.state_dict()["module"].items()}
    before, clock = weights(), time.perf_counter()
    metrics, seconds = policy.step(batch, loss), time.perf_counter() - clock
    after = weights()
    return {k: before[k] - after[k] for k in before}, metrics, seconds


def gsm8k(data, *, questions=8, group_size=4, max_tokens=24, cap=1024, seed=0):
    "Tokenise, sample, group, check, pack and update, on real questions; the counts."
    tok = transformers.AutoTokenizer.from_pretrained(data/TOKENIZER)
    rows = [dict(question=row["question"], answer=row["answer"]) for row in read(data/"gsm8k/train")]
    clock = time.perf_counter()
    prompts = Prompts(rows, tok, template=chat, max_tokens=512, shuffle=False)
    seconds = time.perf_counter() - clock
    everything = prompts.take(len(prompts)).lengths
    prompts = Prompts(rows[:questions], tok, template=chat, shuffle=False)

    model = random_llama(tok, seed).double()          # float64, so that equal means equal
    sampled = Rollout(model, tokenizer=tok,
                      max_tokens=max_tokens).generate(prompts.take(questions), group_size=group_size, seed=(seed, 0))
    policy, ref = (Policy(model, frozen=True, micro_tokens=cap) for _ in range(2))
    apart = (policy.logprobs(sampled) - sampled.rollout_logprobs)[sampled.mask].abs().max().item()

    # the gold solution is one more row of each group: same questions, so the same group ids
    solved = Demonstrations([row | dict(completion=row["answer"]) for row in rows[:questions]], tok, template=chat,
                            shuffle=False).take(questions)
    batch = Batch.cat([sampled.drop(*(set(sampled.columns) - set(solved.columns))), solved])
    batch["scores"] = Grader(math_reward).score(batch)
    batch["advantages"] = at_tokens(group_advantages(batch.scores, batch.group), batch.mask)
    batch["old_logprobs"], batch["ref_logprobs"] = policy.logprobs(batch), ref.logprobs(batch)
    loss = lambda out, b: grpo_loss(out.logprobs, b.old_logprobs, b.ref_logprobs, b.advantages, b.mask, denom=b)

    lengths, bins = batch.lengths, bin_pack(batch.lengths, cap)
    padded, m, padded_s = gradient(model, batch, loss, micro_tokens=cap)
    packed, _, packed_s = gradient(model, batch, loss, micro_tokens=cap, pack=True)
    largest = max(g.abs().max().item() for g in padded.values())
    return dict(
        questions=len(everything), prompt_tokens=int(everything.sum()), longest_prompt=int(everything.max()),
        tokenise_seconds=seconds,
        groups=batch.group.unique().numel(), rows=len(batch), tokens=int(lengths.sum()), chosen_tokens=batch.n_tokens,
        graded=(~batch.scores.isnan()).float().mean().item(), right_sampled=batch.scores[:len(sampled)].mean().item(),
        right_gold=batch.scores[len(sampled):].mean().item(), sampler_apart=apart, cap=cap, bins=len(bins),
        fill=lengths.sum().item()/(len(bins)*cap), fill_padded=lengths.sum().item()/(len(lengths)*lengths.max().item()),
        micro_batches_padded=len(plan_micro_batches(lengths, max_tokens=cap, padded=True)),
        micro_batches_packed=len(plan_micro_batches(lengths, max_tokens=cap)),
        loss=float(m["loss"]), grad_norm=float(m["grad_norm"]), largest_gradient=largest,
        gradient_apart=max((padded[k]-packed[k]).abs().max().item() for k in padded)/largest,
        padded_seconds=padded_s, packed_seconds=packed_s)


# -- report

COLUMNS = ("reward", "happy words", "ended", "words", "distinct words", "distinct triples", "KL", "real text")


def heads():
    return f"{'':>15} |   first  last 5  seconds |" + "".join(f"{c:>{len(c) + 3}}"
                                                              for c in COLUMNS) + "   (held-out openings)"


def line(name, x):
    "A row of the table: loss (SFT) or reward of the first and last steps, and the held-out numbers."
    curve = x["curves"].get("reward") or x["curves"].get("loss")
    trained = "{:8.3f}{:8.3f}{:9.0f}".format(*ends(curve), x["seconds"]) if curve else " "*25
    return f"{name:>15} |{trained} |" + "".join(f"{x['held_out'][c]:>{len(c) + 3}.{3 if len(c) > 2 else 2}f}"
                                                for c in COLUMNS)


def draw(seeds, file):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    stages = [s for s in seeds[0] if "reward" in seeds[0][s]["curves"]]
    for k, stage in enumerate(stages):
        for i, found in enumerate(seeds):
            for ax, name in zip(axes, ("reward", "kl"), strict=False):
                ax.plot(found[stage]["curves"][name], f"C{k}", lw=1, label=stage if not i else None)
    axes[0].set(title="reward: happy words and an ending", xlabel="step", ylim=(0, 1.55))
    axes[1].set(title="KL to the SFT model, nats a token", xlabel="step")
    names = list(seeds[0])
    for k, name in enumerate(("reward", "distinct words", "distinct triples")):
        axes[2].bar([x + .27*(k-1) for x in range(len(names))],
                    [sum(f[n]["held_out"][name] for f in seeds)/len(seeds) for n in names], .25, label=name)
    axes[2].set(title="openings that no training saw", xticks=range(len(names)),
                xticklabels=[n.replace(" ", "\n", 1) for n in names])
    axes[0].legend(), axes[2].legend()
    fig.savefig(file, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, required=True, help="folder with stories/, gsm8k/, models/ and tokenizers/")
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results",
                   help="folder for real_run.json and real_run.png")
    p.add_argument("--seeds", type=int, default=1, help="how many times the stories are run")
    p.add_argument("--steps", type=int, default=30, help="of GRPO and of PPO")
    p.add_argument("--threads", type=int, default=1, help="of torch; models this small are no faster on more")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    complete(a.data)
    try: a.out.mkdir(parents=True, exist_ok=True)
    except OSError as e: raise SystemExit(f"real_run: cannot write to {a.out}: {e}") from e
    transformers.utils.logging.disable_progress_bar()

    clock = time.perf_counter()
    result = dict(machine=dict(date=datetime.now().isoformat(timespec="seconds"), cores=os.cpu_count(),
                               threads=torch.get_num_threads(), load=os.getloadavg(), python=platform.python_version(),
                               **{name: version(name) for name in ("torch", "transformers", "rlblocks",
                                                                   "math-verify")}), steps=a.steps, stories=[])
    for seed in range(a.seeds):
        print(f"stories, seed {seed}\n{heads()}", flush=True)
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, x in stories(a.data, Path(folder), steps=a.steps, seed=seed):
                found[name] = x
                print(line(name, x), flush=True)
        print(*(f"{name:>15}: {x['held_out']['tale']!r}" for name, x in found.items()), "", sep="\n", flush=True)
        result["stories"].append(found)

    result["gsm8k"] = gsm8k(a.data)
    print("GSM8K through the pipeline",
          *(f"{k.replace('_', ' '):>24}  {v:,.4g}" if isinstance(v, float) else f"{k.replace('_', ' '):>24}  {v:,}"
            for k, v in result["gsm8k"].items()), sep="\n", flush=True)
    result["gold"] = {part: gold(a.data, part) for part in ("train", "test")}
    for part, x in result["gold"].items():
        print(f"gold solutions of {part}: {x['as_written']} of {x['rows']} right as written, {x['in_box']} with the "
              "answer in a box")
    result["machine"] |= dict(seconds=time.perf_counter() - clock, cpu_seconds=time.process_time())
    (a.out/"real_run.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw(result["stories"], a.out/"real_run.png")
    print(f"{result['machine']['seconds']:.0f} s ({result['machine']['cpu_seconds']:.0f} CPU seconds); numbers and "
          f"curves in {os.path.relpath(a.out)}/real_run.json and .png")


if __name__ == "__main__": main()
