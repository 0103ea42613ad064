"""One GRPO update on CPU: packed with shared prompts, packed, padded, and TRL's, on the same rows; tokens a second,
gradients and peak memory.

    .venv/bin/python benchmarks/update.py [--data ../shared/data] [--questions 16] [--rounds 3] [--threads 1]
        [--out benchmarks/results]

The work: a Llama of 5.2M parameters with random weights (hidden 256, 4 layers, vocabulary 4,096, tied head, fp32); a
whole GRPO step of 16 questions with 8 answers each, clipped loss with old log-probs given, mean over the tokens of all
answers, no reference, one AdamW step. Lengths are GSM8K's under Qwen2.5's tokenizer: the questions' are those of
training questions, an answer's is drawn from all training answers; the ids are random ones of the small vocabulary, a
group's prompt the same in all its rows. Without --data, log-normal lengths of the same shape.

* shared, packed: `policy.step` with defaults (micro-batches of 8,192 tokens); and the same rows without the column
  `group`, so that none is shared.
* padded: the usual way, rows in their order, as many a micro-batch as fit the same 8,192 places when each is padded to
  the longest among them. sorted: `pack=False` alone, where micro-batches hold rows of like length and little is
  padding.
* TRL's: `GRPOTrainer._compute_loss` of the trainer itself (`loss_type="dapo"`, no activation checkpointing, which is
  faster than its default), on micro-batches of 16 rows in their order. As its data collation does, prompts are padded
  on the left to the longest of the batch and answers on the right; then clipping and AdamW as the trainer has them. It
  also takes the entropy for its log, always.

Dealt out, a group's prompt is computed once in every optimizer step and on every rank that has a row of it. Below the
cases stand the tokens that the forward passes lay on the line, of all and of the fullest rank, when the rows are dealt
to 4 minibatches, 2 or 8 ranks, or both: groups kept together (`minibatches(keep_groups=True)`, `cut` by itself), and
rows dealt one by one (`minibatches` by itself, no column `group` at the cut); and the processor time of the 4 optimizer
steps both ways.

A token is one that exists: of the rows as they are, prompts counted in each. All cases take turns in one process;
medians of processor time are shown (one thread: other work on the machine does not count). The gradient of every case
is compared with that of the padded one, before clipping. Peak memory is the kernel's high-water mark of a process that
takes one update of one case, libraries included.

Promised: twice the tokens a second of the padded update, and no less than TRL's. A promise that is not kept is printed
as MISSED, and the exit code is 1."""
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
from contextlib import nullcontext
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from rlblocks.models import step
from rlblocks import (Batch, Policy, adamw, at_tokens, group_advantages, pack, pad, plan_micro_batches, ppo_loss,
                      shared_prefix)

V, GROUP, LR, TRL_ROWS = 4096, 8, 1e-6, 16
CASES = {"shared": None, "packed": None, "sorted": False, "padded": False, "trl": None} # packed?
PROMISED = dict(padded=2., trl=1.)     # times their tokens a second


# -- the work
def lengths_of(data):
    "(questions', answers') lengths."
    if data is None:
        g = torch.Generator().manual_seed(0)
        return [(torch.randn(5000, generator=g)*s + m).exp().long().clamp(lo, hi).tolist()
                for m, s, lo, hi in ((4.05, .38, 20, 230), (4.7, .45, 20, 400))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(data/"tokenizers/qwen2.5")
    with gzip.open(data/"gsm8k/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [[len(i) for i in tokenizer([r[k] for r in rows])["input_ids"]] for k in ("question", "answer")]


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=V, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0))


def rows_of(lengths, questions, seed=0):
    "Rows as a rollout returns them, with advantages and old log-probs near the model's."
    g = torch.Generator().manual_seed(seed)
    draw = lambda xs, n: [xs[i] for i in torch.randint(len(xs), (n,), generator=g).tolist()]
    ids = lambda n: torch.randint(2, V, (n,), generator=g).tolist()
    rows, masks = [], []
    for p in draw(lengths[0], questions):
        prompt = ids(p)
        for c in draw(lengths[1], GROUP):
            rows.append(prompt + ids(c))
            masks.append([False]*p + [True]*c)
    tokens, n = pad(rows)
    b = Batch(tokens=tokens, lengths=n, mask=pad(masks)[0].bool(),
              group=torch.arange(questions).repeat_interleave(GROUP), scores=torch.randn(len(rows), generator=g))
    b["advantages"] = at_tokens(group_advantages(b.scores, b.group), b.mask)
    b["old_logprobs"] = torch.where(b.mask, Policy(llama(), frozen=True, device="cpu").logprobs(b)
                                    + .1*torch.randn(tokens.shape, generator=g), 0.)
    return b


# -- the cases: each gives a function that takes one update, and the gradient before clipping of its last one
def ours(b, pack, in_order=None, **how):
    # the norm is taken, and far from clipped: gradients are compared
    policy, grads = Policy(llama(), optimizer=adamw(lr=LR, max_norm=1e9), device="cpu", pack=pack, **how), {}
    def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    planned = mock.patch.object(step, "micro_batches",
                                lambda run, b: in_their_order(b.lengths, in_order)) if in_order else nullcontext()
    names = {id(p): n.removeprefix("trunk.") for n, p in policy._run.module.named_parameters()}
    def keep(*_): grads.update({names[id(p)]: p.grad.clone() for p in policy._run.module.parameters()})
    hook = policy._run.model.optimizer.register_step_pre_hook(keep)
    def update():
        with planned: return policy.step(b, loss)
    def gradient():
        update()
        hook.remove()
        return grads
    return update, gradient


def trl(b):
    import datasets
    from trl import GRPOConfig, GRPOTrainer
    from tokenizers import Tokenizer, models
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(
        models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>")
    folder = tempfile.TemporaryDirectory()
    config = GRPOConfig(output_dir=folder.name, per_device_train_batch_size=TRL_ROWS, num_generations=GROUP,
                        gradient_accumulation_steps=len(b)//TRL_ROWS, num_iterations=2, max_completion_length=512,
                        temperature=1., beta=0., loss_type="dapo", learning_rate=LR, lr_scheduler_type="constant",
                        max_steps=1, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
                        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)
    trainer = GRPOTrainer(model=llama(), reward_funcs=lambda completions, **_: [0.]*len(completions), args=config,
                          processing_class=tokenizer, train_dataset=datasets.Dataset.from_dict(dict(prompt=["a"]*8)))
    trainer.create_optimizer_and_scheduler(1)
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    net, optimizer = trainer.model.train(), trainer.optimizer
    start = b.mask.int().argmax(1).tolist()
    ends = b.lengths.tolist()
    P, C = max(start), max(n-p for p, n in zip(start, ends, strict=True))
    def cut(x, side):
        out = x.new_zeros(len(b), P if side == "prompt" else C)
        for i, (p, n) in enumerate(zip(start, ends, strict=True)):
            if side == "prompt": out[i, P-p:] = x[i, :p]
            else: out[i, :n-p] = x[i, p:n]
        return out
    exist = (torch.arange(b.width) < b.lengths[:, None]).long()
    whole = dict(prompt_ids=cut(b.tokens, "prompt"), prompt_mask=cut(exist, "prompt"),
                 completion_ids=cut(b.tokens, "answer"), completion_mask=cut(exist, "answer"),
                 old_per_token_logps=cut(b.old_logprobs, "answer"),
                 advantages=(b.advantages*b.mask).sum(1)/b.mask.sum(1))
    grads = {}
    def update():
        for at in torch.arange(len(b)).split(TRL_ROWS):
            part = {k: v[at] for k, v in whole.items()} | dict(num_items_in_batch=torch.tensor(b.n_tokens))
            trainer.accelerator.backward(trainer._compute_loss(net, part))
        if not grads: grads.update({n: p.grad.clone() for n, p in net.named_parameters()})
        torch.nn.utils.clip_grad_norm_(net.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    def gradient():
        update()
        return grads
    trainer.keep = folder
    return update, gradient


def in_their_order(lengths, places):
    "Row numbers of micro-batches: rows as they come, as many as fit when each is padded to the longest among them."
    bins, longest = [[]], 0
    for i, n in enumerate(lengths.tolist()):
        if max(longest, n)*(len(bins[-1])+1) > places:
            bins.append([])
            longest = 0
        bins[-1].append(i)
        longest = max(longest, n)
    return bins


def made(case, b, micro_tokens):
    if case == "trl": return trl(b)
    how = dict(micro_tokens=micro_tokens)
    if case != "shared": b = b.drop("group")
    if case == "padded":
        return ours(b, CASES[case], in_order=micro_tokens)
    return ours(b, CASES[case], **how)


# -- dealt to optimizer steps and ranks
DEALS = ((4, 1), (1, 2), (4, 2), (1, 8)) # (minibatches, ranks)


def dealt(b, steps, ranks, kept, micro_tokens):
    """(tokens laid on all lines, in the fullest rank of each step) when rows are dealt with groups kept together, or
    one by one."""
    laid, fullest = 0, 0
    for mini in b.minibatches(steps, seed=0, keep_groups=kept) if steps > 1 else [b]:
        each = []
        for rows in (mini if kept else mini.drop("group")).cut(ranks):
            some = mini[rows]
            plan = plan_micro_batches(some.lengths, max_tokens=micro_tokens,
                                      shared=shared_prefix(some.tokens, some.lengths, some.group))
            each.append(sum(sum(pack(some.tokens[at], some.lengths[at], some.group[at]).sizes) for at in plan))
        laid, fullest = laid + sum(each), fullest + max(each)
    return dict(laid=laid, fullest=fullest)


def epochs(b, a):
    "Processor seconds of 4 optimizer steps on `b`, groups kept and rows dealt one by one, in turn."
    policy, taken = Policy(llama(), lr=LR, device="cpu", micro_tokens=a.micro_tokens), {True: [], False: []}
    def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    for k in range(a.rounds + 1):
        for kept, times in taken.items():
            start = time.process_time()
            for mini in b.minibatches(4, seed=k, keep_groups=kept): policy.step(mini, loss)
            times.append(time.process_time() - start)
    return {"kept" if kept else "by rows": median(times[1:]) for kept, times in taken.items()}


# -- measuring
def apart(a, b): return max((a[n]-b[n]).abs().max() for n in b).item()/max(g.abs().max() for g in b.values()).item()


def peak(case, a):
    "MiB: high-water mark of a process that takes one update of this case."
    out = subprocess.run([sys.executable, __file__, "--only", case, "--questions", str(a.questions), "--threads",
                          str(a.threads), "--micro-tokens", str(a.micro_tokens),
                          *(["--data", str(a.data)] if a.data else [])], capture_output=True, text=True, check=True)
    return float(out.stdout.split()[-1])


def median(x): return sorted(x)[len(x)//2]


def machine():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
               platform.processor()) if os.path.exists("/proc/cpuinfo") else platform.processor()
    return dict(date=datetime.now().isoformat(timespec="seconds"), torch=torch.__version__,
                transformers=transformers.__version__, python=platform.python_version(), cpu=cpu, cores=os.cpu_count(),
                threads=torch.get_num_threads(), load=os.getloadavg())


def draw(result, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    cases = result["cases"]
    left.bar(list(cases), [c["tokens_per_second"] for c in cases.values()], color=[f"C{i}" for i in range(len(cases))])
    left.set(ylabel="tokens of the rows a second")
    right.bar(list(cases), [c["peak_MiB"] for c in cases.values()], color=[f"C{i}" for i in range(len(cases))])
    right.set(ylabel="peak memory of the process, MiB")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, help="folder with gsm8k and tokenizers/qwen2.5")
    p.add_argument("--questions", type=int, default=16, help="groups of 8 rows in the update; a multiple of 2")
    p.add_argument("--rounds", type=int, default=3, help="updates of each case, after one that is not counted")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--micro-tokens", type=int, default=8192, help="most tokens of a micro-batch (ours)")
    p.add_argument("--only", choices=list(CASES),
                   help="take one update of this case and print the peak memory of the process in MiB")
    p.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results",
                   help="folder for update_cpu.json and update_cpu.png")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    b = rows_of(lengths_of(a.data), a.questions)
    if a.only:
        update, _ = made(a.only, b, a.micro_tokens)
        update()
        print(next(int(line.split()[1])/1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
        return
    tokens = int(b.lengths.sum())
    cases = {c: made(c, b, a.micro_tokens) for c in a.cases}
    grads = {c: copy.deepcopy(gradient()) for c, (_, gradient) in cases.items()}
    taken = {c: [] for c in cases}
    for _ in range(a.rounds):
        for c, (update, _) in cases.items():
            start = time.process_time()
            update()
            taken[c].append(time.process_time() - start)
    versions = dict(trl=version("trl")) if "trl" in cases else {}
    result = dict(machine=machine() | versions, lengths="GSM8K, Qwen2.5's tokenizer" if a.data else "made up",
                  rows=len(b), tokens=tokens, chosen=b.n_tokens, longest=int(b.lengths.max()),
                  micro_tokens=a.micro_tokens, cases={})
    first = "padded" if "padded" in cases else a.cases[0]
    for c in cases:
        result["cases"][c] = dict(seconds=median(taken[c]), best_seconds=min(taken[c]),
                                  tokens_per_second=tokens/median(taken[c]),
                                  gradient_apart=apart(grads[c], grads[first]), peak_MiB=peak(c, a))
    print("{cpu}, {threads} thread(s), torch {torch}, load {load[0]:.1f}".format(**result["machine"]))
    print(f"{len(b)} rows, {tokens:,} tokens, {b.n_tokens:,} chosen, longest row {int(b.lengths.max())}; lengths: "
          f"{result['lengths']}\n")
    print(f"{'':>7} | {'seconds':>8} {'(best)':>8} | {'tokens/s':>9} | {'shared is … times it':>21} | "
          f"{'gradient apart':>14} | {'peak MiB':>8}")
    for c, r in result["cases"].items():
        ratio = r["seconds"]/result["cases"][a.cases[0]]["seconds"]
        print(f"{c:>7} | {r['seconds']:>8.2f} {r['best_seconds']:>8.2f} | {r['tokens_per_second']:>9,.0f} | "
              f"{ratio:>21.2f} | {r['gradient_apart']:>14.1e} | {r['peak_MiB']:>8,.0f}")
    if "shared" in result["cases"]:
        result["dealt"] = {f"{steps} x {ranks}": {name: dealt(b, steps, ranks, kept, a.micro_tokens)
                                                  for name, kept in (("kept", True), ("by rows", False))}
                           for steps, ranks in DEALS}
        result["four_steps"] = epochs(b, a)
        print(f"\n{'steps x ranks':>15} | {'tokens computed, kept':>21} {'by rows':>9} {'ratio':>6} | "
              f"{'fullest rank, kept':>18} {'by rows':>9} {'ratio':>6}")
        for name, x in result["dealt"].items():
            print(f"{name:>15} | {x['kept']['laid']:>21,} {x['by rows']['laid']:>9,} "
                  f"{x['by rows']['laid']/x['kept']['laid']:>6.2f} | {x['kept']['fullest']:>18,} "
                  f"{x['by rows']['fullest']:>9,} {x['by rows']['fullest']/x['kept']['fullest']:>6.2f}")
        print("4 optimizer steps: {kept:.2f} s with groups kept, {by rows:.2f} s by rows ({ratio:.2f} times as "
              "long)".format(**result["four_steps"],
                             ratio=result["four_steps"]["by rows"]/result["four_steps"]["kept"]))
    verdicts = result["promised"] = {k: dict(wanted=v,
                                             got=result["cases"][k]["seconds"]/result["cases"]["shared"]["seconds"])
                                     for k, v in PROMISED.items() if {k, "shared"} <= set(result["cases"])}
    missed = [k for k, v in verdicts.items() if v["got"] < v["wanted"]]
    print()
    for k, v in verdicts.items():
        print(f"{v['got']:.2f} times the tokens a second of {k}, {v['wanted']:g} promised: "
              f"{'MISSED' if k in missed else 'as promised'}")
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out/"update_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, a.out/"update_cpu.png")
    return bool(missed)


if __name__ == "__main__": sys.exit(main())
