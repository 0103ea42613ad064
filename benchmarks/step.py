"""One whole GRPO step on CPU against TRL's `GRPOTrainer`: generation, rewards, advantages, log-probs, backward, AdamW;
seconds by part and peak memory.

    .venv/bin/python benchmarks/step.py [--data ../shared/data] [--rounds 5] [--threads 2] [--out benchmarks/results]

The work: a Llama of 5.2M parameters with random weights (hidden 256, 4 layers, vocabulary 4,096, tied head, fp32), 16
of GSM8K's training questions a step, 8 completions each of 64 new tokens at temperature 1, a reward on the completions'
ids, group advantages, one AdamW update on the mean over tokens, no reference. The questions are tokenised by a
byte-level BPE of 4,096 ids that is trained here on all of them (16 to 176 ids a question); without --data, made prompts
of like lengths. Both sides start from the same weights and meet the same questions in the same order. They draw their
own completions; the end-of-sequence id lies outside the model's vocabulary, so that on both sides every row has its 64
tokens.

TRL's trainer runs as it is (transformers' `generate`, reward function, `loss_type="dapo"`, one update a generation);
timers stand around its methods. It takes old log-probs from the update's own forward pass when there is one update
(ratio 1), so ours does: `out.logprobs.detach()`. It always takes the entropy along for its log, ours on request (none
here). Its default recomputes activations in the backward pass ("trl, as it comes"); "trl" does not, which is faster and
takes more memory. Ours is the plain loop below, with defaults. The two take turns in one process, step by step, so that
other work on the machine meets both alike; medians are shown, of wall and of processor time. The first step of each
warms up and is not counted. Peak memory is the kernel's high-water mark of a process in which one side alone takes two
steps."""
import argparse
import copy
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")          # nothing is downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

V, QUESTIONS, GROUP, NEW, LR = 4096, 16, 8, 64, 1e-5
SIDES = {"ours": None, "trl": False, "trl, as it comes": True} # does it recompute activations
PROMISED = dict(step=2., generation=2., GiB=2.)


# -- the work
def questions(data):
    "GSM8K's training questions, or made ones whose lengths look like theirs."
    if data is not None:
        with gzip.open(data/"gsm8k/train.jsonl.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line)["question"] for line in lines]
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(2000, generator=g)*.38 + 3.75).exp().long().clamp(12, 140)
    return [" ".join(f"w{i}" for i in torch.randint(3000, (n,), generator=g).tolist()) for n in lengths.tolist()]


def tokenizer_of(texts):
    "A byte-level BPE with V ids, padding among them; the id that ends a row is the first one beyond."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=V, special_tokens=[
        "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens(["<end>"] if t.get_vocab_size() == V
                         else [f"<spare{i}>" for i in range(V - t.get_vocab_size())] + ["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<end>",
                                                padding_side="left")


def llama(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
                                      num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
                                      bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                                      pad_token_id=tokenizer.pad_token_id)
    return transformers.LlamaForCausalLM(config)


def reward(completion_ids, **_): return [sum(i % 2 for i in ids)/len(ids) for ids in completion_ids]


# -- measuring
class Timer:
    "Wall and processor seconds by part, a list of dicts: one a step."
    def __init__(self): self.steps = []

    def begin(self): self.steps.append({})

    @contextmanager
    def __call__(self, part):
        wall, cpu = time.perf_counter(), time.process_time()
        try: yield
        finally:
            old = self.steps[-1].get(part, (0., 0.))
            self.steps[-1][part] = (old[0] + time.perf_counter() - wall, old[1] + time.process_time() - cpu)

    def around(self, owner, name, part):
        "Time every call of a method of this one object."
        inner = getattr(owner, name)
        def timed(*args, **kwargs):
            with self(part): return inner(*args, **kwargs)
        setattr(owner, name, timed)

    def median(self, part):
        taken = [s.get(part, (0., 0.)) for s in self.steps[1:] or self.steps]
        return [sorted(t[k] for t in taken)[len(taken)//2] for k in (0, 1)]


# -- ours
def ours(net, tokenizer, texts, timer):
    "A generator that takes one GRPO step each time it is asked, and yields its tokens."
    from rlblocks import Grader, Policy, Prompts, Rollout, at_tokens, group_advantages, ppo_loss
    data = Prompts(texts, tokenizer, shuffle=False)
    policy, rollout, grader = Policy(net, lr=LR, device="cpu"), Rollout(net, max_tokens=NEW, tokenizer=tokenizer,
                                                                        device="cpu"), Grader(reward)
    timer.around(policy._run.model, "backward", "backward")       # the rest of a step is its forward passes and AdamW
    timer.around(policy._run.model, "apply", "optimizer")

    def loss(out, b): return ppo_loss(out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b.n_tokens)

    for step in range(10**9):
        timer.begin()
        with timer("step"):
            with timer("generation"):
                rollout.load(policy.weights())
                batch = rollout.generate(data.take(QUESTIONS), group_size=GROUP, seed=step)
            with timer("rewards"):
                batch["scores"] = grader.score(batch)
                batch["advantages"] = at_tokens(group_advantages(batch.scores, batch.group), batch.mask)
            with timer("update"): policy.step(batch, loss)
        took = timer.steps[-1]
        took["log-probs"] = tuple(u - b - o
                                  for u, b, o in zip(took["update"], took["backward"], took["optimizer"], strict=True))
        yield batch.n_tokens


# -- theirs
def trl(net, tokenizer, texts, timer, steps, between, checkpointing):
    "Take TRL's steps; `between` is called after each with its tokens."
    import datasets
    from trl import GRPOConfig, GRPOTrainer
    folder = tempfile.TemporaryDirectory()
    config = GRPOConfig(output_dir=folder.name, per_device_train_batch_size=QUESTIONS*GROUP, num_generations=GROUP,
                        gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1,
                        max_completion_length=NEW, temperature=1., top_k=0, beta=0., loss_type="dapo", learning_rate=LR,
                        lr_scheduler_type="constant", max_steps=steps, use_vllm=False, use_cpu=True,
                        bf16=False, fp16=False, gradient_checkpointing=checkpointing, shuffle_dataset=False,
                        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            timer.begin()
            self.step = timer("step")
            self.step.__enter__()

        def on_step_end(self, *_, **__):
            self.step.__exit__(None, None, None)
            took = timer.steps[-1]
            took["optimizer"] = tuple(s - t for s, t in zip(took["step"], took["inside"], strict=True))
            between(trainer.tokens)

    trainer = GRPOTrainer(net, reward_funcs=reward, args=config, processing_class=tokenizer,
                          train_dataset=datasets.Dataset.from_dict(dict(prompt=texts)), callbacks=[Watch()])
    trainer.tokens = 0
    made = trainer._generate_single_turn
    def counted(*args, **kwargs):
        out = made(*args, **kwargs)
        trainer.tokens = sum(len(ids) for ids in out[0])
        return out
    trainer._generate_single_turn = counted
    for owner, name, part in ((trainer, "_generate_single_turn", "generation"),
                              (trainer, "_get_per_token_logps_and_entropies", "log-probs"),
                              (trainer.accelerator, "backward", "backward"), (trainer, "_calculate_rewards", "rewards"),
                              (trainer, "training_step", "inside")): timer.around(owner, name, part)
    trainer.train()
    folder.cleanup()


# -- one run
def setting(data):
    texts = questions(data)
    tokenizer = tokenizer_of(texts)
    return llama(tokenizer), tokenizer, texts


def alternate(side, work, rounds):
    "Times of one of TRL's ways and of ours, step by step in turn; tokens drawn by each."
    net, tokenizer, texts = work
    theirs, own, tokens = Timer(), Timer(), {side: [], "ours": []}
    loop = ours(net, tokenizer, texts, own)
    def between(n):
        tokens[side].append(n)
        tokens["ours"].append(next(loop))
    trl(copy.deepcopy(net), tokenizer, texts, theirs, rounds + 1, between, SIDES[side])
    return theirs, own, tokens


def peak(side, data, threads):
    "GiB: high-water mark of a process in which one side alone takes two steps, and what it held before the first."
    how = [*(["--data", str(data)] if data else ["--made"]), "--threads", str(threads)]
    said = subprocess.run([sys.executable, __file__, "--alone", side, *how], capture_output=True, text=True)
    if said.returncode: raise SystemExit(f"step: {side} alone failed:\n{said.stderr[-2000:]}")
    return json.loads(said.stdout.splitlines()[-1])


def alone(side, work):
    net, tokenizer, texts = work
    resident = lambda key: int(next(line for line in Path("/proc/self/status").read_text().splitlines()
                                    if line.startswith(key)).split()[1])/2**20
    if side == "ours":
        loop = ours(net, tokenizer, texts, Timer())
        before = resident("VmRSS")
        for _ in range(2): next(loop)
    else:
        import_module("trl")
        before = resident("VmRSS")
        trl(net, tokenizer, texts, Timer(), 2, lambda n: None, SIDES[side])
    print(json.dumps(dict(GiB=resident("VmHWM"), before=before)))


# -- report
PARTS = ("generation", "rewards", "log-probs", "backward", "optimizer", "step")


def measure(data, rounds, threads):
    work = setting(data)
    net, tokenizer, texts = work
    lengths = [len(x) for x in tokenizer(texts[:QUESTIONS*(rounds + 1)])["input_ids"]]
    found = dict(parameters=sum(p.numel() for p in net.parameters()),
                 prompt_tokens=dict(fewest=min(lengths), mean=sum(lengths)/len(lengths), most=max(lengths)), sides={})
    own = Timer()
    for side in [s for s in SIDES if s != "ours"]:
        theirs, mine, tokens = alternate(side, work, rounds)
        if set(tokens[side]) | set(tokens["ours"]) != {QUESTIONS*GROUP*NEW}:
            raise SystemExit(f"step: the two did not draw equally many tokens: {tokens}")
        found["sides"][side] = {part: theirs.median(part) for part in PARTS}
        found["sides"][side]["ours meanwhile"] = mine.median("step")
        own.steps += mine.steps if not own.steps else mine.steps[1:]
    found["sides"]["ours"] = {part: own.median(part) for part in PARTS}
    for side in SIDES: found["sides"][side]["memory"] = peak(side, data, threads)
    return found


def table(found):
    sides = found["sides"]
    own = sides["ours"]
    lines = [f"{found['parameters']:,} parameters; prompts of {found['prompt_tokens']['fewest']} to "
             f"{found['prompt_tokens']['most']} ids, mean {found['prompt_tokens']['mean']:.0f}; wall s (processor s)",
             f"{'':18}" + "".join(f"{p:>18}" for p in PARTS) + f"{'peak GiB':>12}"]
    for side, r in sides.items():
        lines.append(f"{side:18}" + "".join(f"{f'{r[p][0]:.2f} ({r[p][1]:.2f})':>18}" for p in PARTS)
                     + f"{r['memory']['GiB']:12.2f}")
        if side != "ours":
            lines.append(f"{'  ÷ ours':18}"
                         + "".join(f"{f'{r[p][0]/max(own[p][0], 1e-9):.2f} ({r[p][1]/max(own[p][1], 1e-9):.2f})':>18}"
                                   for p in PARTS) + f"{r['memory']['GiB']/own['memory']['GiB']:12.2f}")
    base = sides["trl"]
    # the worse of wall and processor time
    got = {part: min(base[part][k]/own[part][k] for k in (0, 1))
           for part in ("step", "generation")} | dict(GiB=own["memory"]["GiB"])
    found["promised"] = {name: dict(wanted=p, got=got[name], met=got[name] <= p if name == "GiB" else got[name] >= p)
                         for name, p in PROMISED.items()}
    return lines + [f"{name}: {v['got']:.2f}, {'at most' if name == 'GiB' else 'at least'} {v['wanted']:g}: "
                    f"{'met' if v['met'] else 'MISSED'}" for name, v in found["promised"].items()]


def plot(found, path):
    try: import matplotlib.pyplot as plt
    except ImportError: return
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), width_ratios=(2.4, 1))
    names = list(found["sides"])
    start = [0.]*len(names)
    for part in PARTS[:-1]:
        width = [found["sides"][s][part][0] for s in names]
        left.barh(names, width, left=start, label=part)
        start = [a + w for a, w in zip(start, width, strict=True)]
    left.set(xlabel="seconds a step"); left.legend(fontsize=7, ncols=2)
    right.barh(names, [found["sides"][s]["memory"]["GiB"] for s in names], color="gray")
    right.axvline(PROMISED["GiB"], color="k", lw=.8)
    right.set(xlabel="peak GiB", yticks=[])
    fig.tight_layout(); fig.savefig(path, dpi=100)


def main():
    default = Path(__file__).resolve().parents[1].parent/"shared/data"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default if (default/"gsm8k/train.jsonl.gz").is_file() else None)
    parser.add_argument("--made", action="store_true", help="made prompts, whatever data there is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", choices=SIDES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    a = parser.parse_args()
    data = None if a.made else a.data
    if data is not None and not (data/"gsm8k/train.jsonl.gz").is_file():
        raise SystemExit(f"step: --data {data}: gsm8k/train.jsonl.gz is not there; leave --data out for made prompts")
    torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    if a.alone: return alone(a.alone, setting(data))
    load = os.getloadavg()[0]
    found = measure(data, a.rounds, a.threads)
    lines = table(found)
    print("\n".join(lines))
    a.out.mkdir(parents=True, exist_ok=True)
    where = dict(date=datetime.now().date().isoformat(), machine=platform.machine(), cpus=os.cpu_count(),
                 load=[load, os.getloadavg()[0]], threads=a.threads, rounds=a.rounds, python=platform.python_version(),
                 questions="gsm8k" if data else "made",
                 **{name: version(name) for name in ("torch", "transformers", "trl")})
    (a.out/"step_cpu.json").write_text(json.dumps(where | found, indent=1) + "\n")
    plot(found, a.out/"step_cpu.png")
    return not all(v["met"] for v in found["promised"].values())


if __name__ == "__main__": sys.exit(main())
