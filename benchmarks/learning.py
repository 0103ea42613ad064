"""Does it learn as well as TRL, and how fast? Seven algorithms, the same model, data, seeds and hyperparameters.

    pip install --no-deps --target /tmp/trl_ppo trl==1.12.0       # the last with PPO; beside the environment, not in it
    .venv/bin/python benchmarks/learning.py --data ../shared/data --trl-ppo /tmp/trl_ppo [--only grpo sft]
        [--seeds 0 1 2 3 4] [--out benchmarks/results]

Ours are the loops of the library as they stand (`rlblocks.loops`); RLOO is GRPO's loop with two lines changed, as
tutorials/relatives.ipynb has it. Theirs are TRL's trainers. Both begin from `models/stories260K`, a pretrained Llama,
and see the same token ids: TRL's own preparation of datasets is left out, so a difference is one of learning. Both have
AdamW with the same rates, schedule and clipping. Given one batch again and again, SFT, DPO, KTO and the reward model
take the same steps on both sides (tests/test_learning.py); with seeds they differ in the order of rows, and in what is
sampled.

Every few steps the model is measured by the same function, whose time counts for neither: sampling algorithms by the
mean reward of stories that they write to openings not trained on (happy words, three at most); SFT by the loss, and the
others by the accuracy, on pairs kept out. Seconds are of the processor, on one thread. Other work on the machine moves
them, by a third where two more processes share its cores; so the sides take turns, seed by seed.

Each run is a process of its own, and a run that is in the results is not run again: a benchmark that was stopped goes
on.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")          # nothing is downloaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT/"tutorials"), str(ROOT/"benchmarks")]
from machine import machine  # noqa: E402
PPO_TRL = "1.12.0"      # 1.13 and later have no PPO
MODEL, EVERY, KEPT = "models/stories260K", 5, 128
WORDS = set("happy happily smile smiles smiled smiling laugh laughed love loves loved fun glad joy hug hugged proud "
            "excited".split())


@dataclass
class Settings:
    "What both sides are given."
    steps:int
    lr:float
    rows:int = 32           # pairs, answers or prompts a step
    group_size:int = 8      # answers to a prompt
    max_tokens:int = 40
    kl_coef:float = .02
    epochs:int = 1          # passes over the answers, of PPO
    beta:float = .1
    warmup:int = 5

    def factor(self, version): return min((version + 1)/self.warmup, (self.steps - version)/self.steps)


SETTINGS = dict(grpo=Settings(25, 3e-4, rows=8), rloo=Settings(25, 3e-4, rows=8),
                ppo=Settings(25, 3e-4, rows=64, group_size=1, epochs=2),
                sft=Settings(60, 2e-3), dpo=Settings(60, 3e-4), kto=Settings(60, 3e-4),
                reward_model=Settings(60, 1e-3))
SAMPLED = "grpo", "rloo", "ppo"      # the others learn from rows


# -- data: equal for both, in token ids
def read(file):
    import gzip
    with gzip.open(file, "rt", encoding="utf-8") as lines: return [json.loads(line) for line in lines]


def tokenizer_of(data):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(data/MODEL)


def judged(data):
    "(train, held out) of polite and rude answers, shuffled once: which are kept out is the same for every seed."
    from real_pairs import question
    from random import Random
    rows = [dict(prompt=question(row), chosen=row["chosen"], rejected=row["rejected"])
            for row in read(data/"preferences/polite_instruction_pairs.jsonl.gz")]
    Random(0).shuffle(rows)
    tok = tokenizer_of(data)
    rows = [row for row in rows if max(len(tok(row["prompt"] + row[side]).input_ids)
                                       for side in ("chosen", "rejected")) < 120]
    return rows[KEPT:], rows[:KEPT]


def openings(data):
    "(train, held out) first sentences of stories."
    return ([dict(prompt=row["prompt"]) for row in read(data/f"stories/tinystories_{part}.jsonl.gz")]
            for part in ("train", "test"))


def happy(completions, **_): return [min(sum(w.strip(".,!?\"'") in WORDS for w in text.lower().split()), 3)/3
                                     for text in completions]


# -- measuring, the same for both
def padded(rows, fill=0):
    import torch
    width = max(map(len, rows))
    return torch.tensor([row + [fill]*(width - len(row)) for row in rows])


def answer_logprobs(net, rows):
    "The log-probabilities of answers, and their lengths. rows: (ids, mask) each."
    import torch
    ids, mask = padded([ids for ids, _ in rows]), padded([m for _, m in rows]).bool()
    there = padded([[1]*len(ids) for ids, _ in rows])
    with torch.no_grad(): logits = net(input_ids=ids, attention_mask=there).logits[:, :-1].log_softmax(-1)
    found = logits.gather(-1, ids[:, 1:, None])[..., 0]
    return (found*mask[:, 1:]).sum(1), mask[:, 1:].sum(1)


def batch_rows(batch):
    "(ids, mask) of each row of a Batch."
    return [(batch.tokens[i, :n].tolist(), [int(x) for x in batch.mask[i, :n]])
            for i, n in enumerate(batch.lengths.tolist())]


class Exam:
    "Measures a module: `exam(net)` is a number, and leaves its mode, and random numbers, as they were."

    def __init__(self, name, data, net):
        self.name, self.tok, self.rows, self.prompts = name, tokenizer_of(data), [], []
        if name in SAMPLED: self.prompts = [row["prompt"] for row in [*openings(data)][1]][:64]
        else: self.rows = batch_rows(pairs_of(judged(data)[1], self.tok).take(KEPT))
        self.before = answer_logprobs(net, self.rows)[0] if name in ("dpo", "kto") else 0.

    def __call__(self, net):
        import torch
        training = net.training
        net.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]): found = self.number(net)
        net.train(training)
        return float(found)

    def number(self, net):
        import torch
        if self.prompts:
            torch.manual_seed(0)
            made = self.tok(self.prompts, return_tensors="pt", padding=True, padding_side="left")
            said = net.generate(input_ids=made.input_ids, attention_mask=made.attention_mask, max_new_tokens=40,
                                do_sample=True, top_k=0, num_return_sequences=4, pad_token_id=self.tok.pad_token_id)
            texts = self.tok.batch_decode(said[:, made.input_ids.shape[1]:], skip_special_tokens=True)
            return sum(happy(texts))/len(texts)
        if self.name == "reward_model":
            ids, there = padded([ids for ids, _ in self.rows]), padded([[1]*len(ids) for ids, _ in self.rows])
            score = net(input_ids=ids, attention_mask=there).logits[:, 0]
        else: score, lengths = answer_logprobs(net, self.rows)
        if self.name == "sft": return -score[::2].sum()/lengths[::2].sum()
        score = score - self.before
        return ((score[::2] > score[1::2]).float() + (score[::2] == score[1::2]).float()/2).mean()


def pairs_of(rows, tok, **how):
    from rlblocks import Preferences
    return Preferences(rows, tok, shuffle=False, **how)


def model_of(name, data):
    "The model that both begin from."
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    torch.manual_seed(0)
    if name != "reward_model": return AutoModelForCausalLM.from_pretrained(data/MODEL, dtype=torch.float32)
    net = AutoModelForSequenceClassification.from_pretrained(data/MODEL, num_labels=1, dtype=torch.float32)
    net.config.pad_token_id = 0
    return net


class Clock:
    "Seconds of the processor, without those of `measure`; what was measured after how many samples."

    def __init__(self, exam, net, each):
        self.exam, self.net, self.each, self.points, self.out, self.start = exam, net, each, [], 0., 0.

    def begin(self): self.start, self.out = time.process_time(), 0.

    def after(self, step):
        "Measure what is to be measured after a number of steps."
        if step % EVERY: return
        began = time.process_time()
        value = self.exam(self.net)
        self.out += time.process_time() - began
        took = time.process_time() - self.start - self.out if step else 0.
        self.points.append((step*self.each, round(took, 3), round(value, 5)))


# -- ours
class Seen:
    "`here`, which remembers what it has placed."

    def __init__(self): self.placed = []

    def place(self, make, *args, **kwargs):
        self.placed.append(make(*args, **kwargs))
        return self.placed[-1]


def ours(name, data, seed, s, clock_of):
    from rlblocks import Demonstrations, Feedback, Preferences, Prompts, as_feedback, loops
    tok, net, pool = tokenizer_of(data), model_of(name, data), Seen()
    train, kept = openings(data) if name in SAMPLED else judged(data)
    how = dict(model=net, tokenizer=tok, lr=s.lr, steps=s.steps)
    if name == "grpo":
        loop = loops.grpo(pool, Prompts(train, tok, seed=seed), happy, **how, prompts=s.rows, group_size=s.group_size,
                          minibatches=1, clip_low=.2, clip_high=.2, kl_coef=s.kl_coef, max_tokens=s.max_tokens,
                          seed=seed)
    elif name == "rloo": loop = rloo(pool, Prompts(train, tok, seed=seed), happy, s, seed=seed, **how)
    elif name == "ppo":
        loop = loops.ppo(pool, Prompts(train, tok, seed=seed), happy, **how, critic_lr=s.lr, prompts=s.rows,
                         group_size=s.group_size, epochs=s.epochs, minibatches=1, clip=.2, value_clip=.2,
                         kl_coef=s.kl_coef, horizon=10**12, max_tokens=s.max_tokens, seed=seed)  # a constant price
    elif name == "sft":
        rows = [dict(prompt=row["prompt"], completion=row["chosen"]) for row in train]
        loop = loops.sft(pool, Demonstrations(rows, tok, seed=seed), **how, rows=s.rows, warmup=s.warmup)
    elif name == "kto":
        looked_at = Feedback(as_feedback(kept[:2]), tok)
        loop = loops.kto(pool, Feedback(as_feedback(train), tok, seed=seed), looked_at, **how,
                         rows=s.rows, beta=s.beta, warmup=s.warmup, every=10**9)
    elif name == "dpo":
        loop = loops.dpo(pool, Preferences(train, tok, seed=seed), Preferences(kept[:2], tok), **how, n_pairs=s.rows,
                         beta=s.beta, sft_coef=0., warmup=s.warmup, every=10**9)
    else:
        loop = loops.reward_model(pool, Preferences(train, tok, seed=seed), Preferences(kept[:2], tok), **how,
                                  n_pairs=s.rows, warmup=s.warmup, every=10**9)
    clock = clock_of(net)
    clock.after(0)
    clock.begin()
    for row in loop:
        clock.net = plain(pool.placed[0].engine.module)
        clock.after(row["step"] + 1)
    return clock.points


def plain(ours):
    "A transformers' module again: the weights of ours are the trunk's and, of a reward model, the head's."
    if ours.head is None: return ours.trunk
    from types import SimpleNamespace
    def scores(input_ids, attention_mask):
        hidden = ours.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return SimpleNamespace(logits=ours.head(hidden[range(len(last)), last].float()))
    scores.training, scores.eval, scores.train = ours.training, ours.eval, ours.train
    return scores


def rloo(pool, data, reward, s, *, model, tokenizer, lr, steps, seed):
    "GRPO's loop with RLOO's advantages (Ahmadian et al. 2024): the KL is a part of the reward, and of whole answers."
    from rlblocks import Grader, Policy, Rollout, at_tokens, kl_k1, leave_one_out, reinforce_loss
    policy  = pool.place(Policy, model, tokenizer=tokenizer, lr=lr)
    ref     = pool.place(Policy, model, frozen=True)
    rollout = pool.place(Rollout, model, tokenizer=tokenizer, max_tokens=s.max_tokens)
    grader  = pool.place(Grader, reward)

    def loss(out, b): return reinforce_loss(out.logprobs, b.advantages, b.mask, denom=float(b.n_rows))

    for step in range(steps):
        rollout.load(policy.weights())
        batch = rollout.generate(data.take(s.rows), group_size=s.group_size, seed=(seed, step))
        batch["scores"] = grader.score(batch)
        kl = kl_k1(policy.logprobs(batch), ref.logprobs(batch), batch.mask).sum(1)
        batch["advantages"] = at_tokens(leave_one_out(batch.scores - s.kl_coef*kl, batch.group), batch.mask)
        yield dict(step=step, **policy.step(batch, loss))


# -- theirs
def theirs(name, data, seed, s, clock_of):
    import datasets
    import transformers
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR
    tok, net = tokenizer_of(data), model_of(name, data)
    train = [*openings(data)][0] if name in SAMPLED else judged(data)[0]
    clock = clock_of(net)
    clock.after(0)
    folder = tempfile.TemporaryDirectory()
    usual = dict(output_dir=folder.name, max_steps=s.steps, seed=seed, use_cpu=True, bf16=False, fp16=False,
                 gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none",
                 disable_tqdm=True, max_grad_norm=1., learning_rate=s.lr, lr_scheduler_type="constant", weight_decay=0.)
    factor = (lambda _: 1.) if name in SAMPLED else s.factor

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__): clock.begin()
        def on_step_end(self, args, state, control, **__): clock.after(state.global_step)

    if name == "ppo": kind, config, rows, given = ppo_trainer_of(train, tok, data)
    else: kind, config, rows, given = trainer_of(name, train, tok, s, seed)
    learn = [net, given["value_model"]] if name == "ppo" else [net]
    optimizer = (Clipped if name == "ppo" else AdamW)([dict(params=[*x.parameters()]) for x in learn], lr=s.lr,
                                                      betas=(.9, .999), eps=1e-8, weight_decay=0.)
    trainer = kind(model=net, args=config(**args_of(name, s), **usual), train_dataset=datasets.Dataset.from_list(rows),
                   processing_class=tok, callbacks=[Watch()], optimizers=(optimizer, LambdaLR(optimizer, factor)),
                   **given)
    trainer.train()
    folder.cleanup()
    return clock.points


def args_of(name, s):
    "What the trainers do not share."
    if name in ("grpo", "rloo"):
        how = dict(per_device_train_batch_size=s.rows*s.group_size, num_generations=s.group_size, beta=s.kl_coef,
                   gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1, temperature=1., top_k=0,
                   top_p=1., max_completion_length=s.max_tokens, use_vllm=False, epsilon=.2)
        return how | (dict(loss_type="dapo", scale_rewards="group") if name == "grpo" else {})
    if name == "ppo":       # one minibatch: with four, too, TRL 1.12 takes one optimizer step a pass
        return dict(per_device_train_batch_size=s.rows, gradient_accumulation_steps=1, num_mini_batches=1,
                    num_ppo_epochs=s.epochs, total_episodes=s.steps*s.rows, response_length=s.max_tokens,
                    local_rollout_forward_batch_size=s.rows, num_sample_generations=0, stop_token="eos",
                    temperature=1., kl_coef=s.kl_coef, cliprange=.2, cliprange_value=.2, vf_coef=1., gamma=1., lam=.95)
    how = dict(per_device_train_batch_size=s.rows, gradient_accumulation_steps=1, max_length=None)
    if name == "dpo": how |= dict(beta=s.beta, loss_type="sigmoid", precompute_ref_log_probs=False)
    if name == "kto": how |= dict(beta=s.beta)
    return how


def trainer_of(name, train, tok, s, seed):
    "(trainer without its own preparation of data, config, rows in token ids, more arguments)"
    import trl
    from rlblocks import Demonstrations
    if name in ("grpo", "rloo"):
        kind = dict(grpo=trl.GRPOTrainer, rloo=trl.RLOOTrainer)[name]
        return kind, dict(grpo=trl.GRPOConfig, rloo=trl.RLOOConfig)[name], train, dict(reward_funcs=happy)
    kind, config = dict(sft=(trl.SFTTrainer, trl.SFTConfig), dpo=(trl.DPOTrainer, trl.DPOConfig),
                        kto=(trl.KTOTrainer, trl.KTOConfig),
                        reward_model=(trl.RewardTrainer, trl.RewardConfig))[name]
    prepared = type(kind.__name__, (kind,), dict(_prepare_dataset=lambda self, dataset, *_, **__: dataset))
    def split(row):
        ids, mask = row
        return ids[:mask.index(1)], ids[mask.index(1):]
    if name == "sft":
        good = [dict(prompt=row["prompt"], completion=row["chosen"]) for row in train]
        data = Demonstrations(good, tok, shuffle=False)
        rows = [dict(input_ids=ids, labels=[x if there else -100 for x, there in zip(ids, mask, strict=True)])
                for ids, mask in batch_rows(data.take(len(data)))]      # a mask alone TRL reads in its preparation
        return prepared, config, rows, {}
    found = batch_rows(pairs_of(train, tok).take(len(train)))
    pairs = [(*split(a), split(b)[1]) for a, b in zip(found[::2], found[1::2], strict=True)]
    if name == "dpo":
        return prepared, config, [dict(prompt_ids=p, chosen_ids=a, rejected_ids=b) for p, a, b in pairs], {}
    if name == "reward_model":
        return prepared, config, [dict(chosen_ids=p + a, rejected_ids=p + b) for p, a, b in pairs], {}
    single = [dict(prompt_ids=p, completion_ids=x, label=good)
              for p, a, b in pairs for x, good in ((a, True), (b, False))]
    from random import Random
    Random(seed).shuffle(single)        # whose completion is the mismatched one is TRL's choice: that of the row before
    for start in range(0, len(single), s.rows):
        part = single[start:start + s.rows]
        for row, before in zip(part, part[-1:] + part[:-1], strict=True):
            row["KL_completion_ids"] = before["completion_ids"]
    return prepared, config, single, {}


def Clipped(groups, **how):
    "AdamW that clips each group: TRL's PPO clips nothing, ours the gradients of policy and critic, each to norm 1."
    import torch
    class Optimizer(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups: torch.nn.utils.clip_grad_norm_(group["params"], 1.)
            return super().step(closure)
    return Optimizer(groups, **how)


def ppo_trainer_of(train, tok, data):
    "As `trainer_of`. The critic's head starts at zero, as ours; what stands for a reward model counts words."
    import datasets
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    tok.padding_side = "left"
    rows = [dict(input_ids=tok(row["prompt"]).input_ids) for row in train]
    prompts = {tuple(row["input_ids"]) for row in rows}
    critic = AutoModelForSequenceClassification.from_pretrained(data/MODEL, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(critic.score.weight)

    class Words(torch.nn.Module):
        "TRL asks for hidden states of `backbone` and a `score` of each: here both are the reward of the whole answer."
        base_model_prefix, score = "backbone", torch.nn.Identity()
        def backbone(self, input_ids, attention_mask, **_):
            from types import SimpleNamespace
            read = [ids[there].tolist() for ids, there in zip(input_ids, attention_mask.bool(), strict=True)]
            said = [ids[max(n for n in range(len(ids) + 1) if tuple(ids[:n]) in prompts):] for ids in read]
            rewards = torch.tensor(happy(tok.batch_decode(said, skip_special_tokens=True)))
            return SimpleNamespace(hidden_states=[rewards[:, None, None].expand(*input_ids.shape, 1)])

    return PPOTrainer, PPOConfig, rows, dict(ref_model=None, reward_model=Words(), value_model=critic,
                                             eval_dataset=datasets.Dataset.from_list(rows[:64]))


# -- all runs
def run(name, side, seed, data):
    "One run, in this process: its points."
    import torch
    import transformers
    torch.set_num_threads(1)
    transformers.set_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    s = SETTINGS[name]
    exam = Exam(name, data, model_of(name, data))
    each = s.rows*(s.group_size if name in SAMPLED else 1)
    work = dict(ours=ours, trl=theirs)[side]
    return work(name, data, seed, s, lambda net: Clock(exam, net, each))


# -- what they showed
TITLES = dict(sft=("SFT", "loss, held out"), reward_model=("Reward model", "accuracy, held out"),
              dpo=("DPO", "accuracy, held out"), kto=("KTO", "accuracy, held out"), grpo=("GRPO", "reward, held out"),
              rloo=("RLOO", "reward, held out"), ppo=("PPO", "reward, held out"))
SIDES = dict(ours="rlblocks", trl="TRL")


def results(folder=ROOT/"benchmarks"/"results"): return json.loads((folder/"learning.json").read_text(encoding="utf-8"))


def runs_of(found, name, side, seeds):
    "[run, point, (samples, seconds, quality)] of the seeds that both sides have."
    import torch
    both = [str(seed) for seed in seeds if all(str(seed) in found["runs"].get(name, {}).get(x, {}) for x in SIDES)]
    return torch.tensor([found["runs"][name][side][seed] for seed in both])


def within(interval, digits):
    "An interval as `value ± half its width`."
    return f"{interval.value:+.{digits}f} ± {interval.high - interval.value:.{digits}f}"


def table(found, seeds=range(5)):
    """The ends of the curves, in Markdown: means over seeds, and the 95 % interval of the difference between the sides,
    in which the loss of SFT has its sign changed: more is better everywhere."""
    from rlblocks import mean_interval
    lines = ["| | at the end | rlblocks | TRL | rlblocks better by | seconds, rlblocks | seconds, TRL | times faster |",
             "|---|---|---|---|---|---|---|---|"]
    for name, (title, what) in TITLES.items():
        ours, theirs = (runs_of(found, name, side, seeds) for side in SIDES)
        if len(ours) < 2: continue      # one run has no interval
        (a, b), (s, t) = ((x[:, -1, 2] for x in (ours, theirs)), (x[:, -1, 1].mean() for x in (ours, theirs)))
        better = mean_interval(b - a if name == "sft" else a - b)
        lines.append(f"| {title} | {what}, {len(a)} seeds | {a.mean():.3f} | {b.mean():.3f} | {within(better, 3)} | "
                     f"{s:.0f} | {t:.0f} | {t/s:.1f} |")
    return "\n".join(lines)


def curves(found, seeds=range(5)):
    "Quality against samples and against seconds, an algorithm a row: the mean over seeds, in its 95 % interval."
    import matplotlib.pyplot as plt
    import torch
    from rlblocks import mean_interval
    names = [name for name in TITLES if len(runs_of(found, name, "ours", seeds)) > 1]
    figure, grid = plt.subplots(len(names), 2, figsize=(7.5, 2.1*len(names)), sharey="row", squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for side, color in zip(SIDES, ("C0", "C1"), strict=True):
            points = runs_of(found, name, side, seeds)
            mean, low, high = torch.tensor([mean_interval(x)[:3] for x in points[..., 2].T]).T
            for axes, x in zip(row, (points[0, :, 0], points[..., 1].mean(0)), strict=True):
                axes.plot(x, mean, color=color, label=SIDES[side])
                axes.fill_between(x, low, high, color=color, alpha=.2, linewidth=0)
        row[0].set_ylabel(TITLES[name][1])
        row[0].set_title(TITLES[name][0])
    grid[0, 0].legend()
    for axes, label in zip(grid[-1], ("samples", "seconds of the processor"), strict=True): axes.set_xlabel(label)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trl-ppo", type=Path, help=f"a folder with TRL {PPO_TRL}, as above")
    parser.add_argument("--only", nargs="*", default=[*SETTINGS], choices=[*SETTINGS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[*range(5)])
    parser.add_argument("--out", type=Path, default=ROOT/"benchmarks"/"results")
    parser.add_argument("--run", nargs=3, metavar=("NAME", "SIDE", "SEED"), help="one run alone, printed")
    args = parser.parse_args()
    if args.run:
        name, side, seed = args.run
        print(json.dumps(run(name, side, int(seed), args.data)))
        return
    if "ppo" in args.only and not args.trl_ppo:
        parser.error(f"ppo needs --trl-ppo FOLDER, with TRL {PPO_TRL}: "
                     f"pip install --no-deps --target FOLDER trl=={PPO_TRL}")
    file = args.out/"learning.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else dict(runs={})
    for name in args.only:
        for seed in args.seeds:
            for side in ("ours", "trl"):
                runs = found["runs"].setdefault(name, {}).setdefault(side, {})
                if str(seed) in runs: continue
                command = [sys.executable, __file__, "--data", str(args.data), "--run", name, side, str(seed)]
                env = os.environ | dict(OMP_NUM_THREADS="1")
                if (name, side) == ("ppo", "trl"): env["PYTHONPATH"] = str(args.trl_ppo)
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                if done.returncode: raise SystemExit(f"learning: {name}, {side}, seed {seed}:\n{done.stderr[-3000:]}")
                runs[str(seed)] = json.loads(done.stdout.splitlines()[-1])
                found |= dict(date=f"{datetime.now():%Y-%m-%d}", python=platform.python_version(), cpu=machine()["cpu"],
                              versions={x: version(x) for x in ("torch", "transformers", "trl")} |
                                       {"trl, PPO": PPO_TRL},
                              settings={k: vars(x) for k, x in SETTINGS.items()})
                file.write_text(json.dumps(found) + "\n", encoding="utf-8")
                print(name, side, seed, runs[str(seed)][0], runs[str(seed)][-1], flush=True)


if __name__ == "__main__": main()
