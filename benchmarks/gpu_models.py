"""Parts of `gpu.py` on whole models: an update, a GRPO step, the hf sampler, the longest row that trains.

The models are Qwen3's shapes (`SHAPES`) with random weights, made on the card. Each part is a generator without
arguments that gives a row as soon as it is measured, the most valuable first; somebody else's way that fails becomes a
row that says why. Without CUDA the shapes are tiny: every line runs, and no number means anything.

MFU is model FLOPs ÷ seconds ÷ 989·10¹², the dense bf16 FLOPs a second of an H100 or H200 SXM. A weight takes part in
one multiplication and one addition a token, so a forward pass takes 2 FLOPs a weight, a backward pass twice as many:
6·body for every token, where body counts the matrices of all layers, and 6·V·H for every token whose log-probability
is read, once, whether or not the matrix is also the table of embeddings (reading that is no product). Attention of one
token to k keys takes 2·k·(heads·head_dim) FLOPs for the scores and as many for the sum, a layer; three times that with
the backward pass; a row of n tokens has n(n+1)/2 pairs: 6·layers·heads·head_dim·n(n+1) a row. What is computed again
in the backward pass, padding, norms, softmax and the optimizer do not count."""
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from gpu_kernels import copy_rate
from gpu_measuring import DEVICE, DRY, absent, captured, goal, milliseconds, row, seconds, settle, size
from update import in_their_order, lengths_of

from rlblocks import Batch, Grader, Policy, Rollout, at_tokens, group_advantages, plain, ppo_loss

transformers.logging.set_verbosity_error()

SHAPES = {"0.6B": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
          "1.7B": dict(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144),
          "8B": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288)}
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
V, KV_HEADS, HEAD_DIM = size(151_936, 300), size(8, 2), size(128, 16)
FLOPS = 989e12             # a second, dense bf16, of an H100 or H200 SXM
HALF = torch.bfloat16
GIB = 2**30


# -- models
def config_of(name, **more):
    "Its end is never drawn: there is none."
    return transformers.Qwen3Config(
        vocab_size=V, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, tie_word_embeddings=name != "8B",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **(TINY if DRY else SHAPES[name]) | dict(max_position_embeddings=4096) | more)


def made(config, dtype=torch.float32):
    "A model with random weights, made where it will run."
    torch.manual_seed(0)
    with DEVICE: return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


def flops(config, lengths, chosen):
    "Model FLOPs of a forward and a backward pass of these rows, `chosen` of whose tokens are read."
    c, (q, kv) = config, (n*HEAD_DIM for n in (config.num_attention_heads, KV_HEADS))
    body = c.num_hidden_layers*c.hidden_size*(2*q + 2*kv + 3*c.intermediate_size)
    pairs = sum(n*(n+1) for n in lengths)
    return 6*body*sum(lengths) + 6*V*c.hidden_size*chosen + 6*c.num_hidden_layers*q*pairs


# -- what somebody tries, and what is left of it
def tried(case, way, f, *args, **how):
    "The rows that `f(case, way, …)` gives; one that says why where it fails. Nothing of it stays on the card."
    lost, found = None, iter(f(case, way, *args, **how))
    while lost is None:
        try: one = next(found, None)
        except Exception as e: one = lost = absent(case, way, e)     # the error itself holds tensors
        if one is None: break
        yield one
    del found
    settle()


def begin_peak():
    settle()
    if not DRY: torch.cuda.reset_peak_memory_stats()


def peaks():
    "GiB at the worst moment since `begin_peak`, all that was there before included; what torch had taken for it."
    if DRY: return dict(GiB=0., reserved_GiB=0.)
    torch.cuda.synchronize()
    return dict(GiB=round(torch.cuda.max_memory_allocated()/GIB, 2),
                reserved_GiB=round(torch.cuda.max_memory_reserved()/GIB, 2))


def kernels(f, most=5):
    "Milliseconds that kernels ran, how many there were, and the most expensive ones in words."
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU if DRY else ProfilerActivity.CUDA]) as p: seconds(f)
    took = lambda e: e.self_cpu_time_total if DRY else e.self_device_time_total
    events = [e for e in p.key_averages() if DRY or e.device_type == DeviceType.CUDA]
    events.sort(key=took, reverse=True)
    total = sum(map(took, events))
    words = "; ".join(f"{took(e)/1e3:.1f} ms ({took(e)/max(total, 1e-9):.0%}) ×{e.count} {e.key[:70]}"
                      for e in events[:most])
    return total/1e3, sum(e.count for e in events), words


# -- an update
def rows_of(lengths):
    "Rows of (prompt, answer) tokens with what a clipped loss wants."
    g = torch.Generator().manual_seed(0)
    start, n = torch.tensor([p for p, _ in lengths]), torch.tensor([p + a for p, a in lengths])
    at = torch.arange(int(n.max()))
    exists, mask = at < n[:, None], (at >= start[:, None]) & (at < n[:, None])
    tokens = torch.where(exists, torch.randint(2, V, exists.shape, generator=g), 0)
    advantages = torch.where(mask, torch.randn(len(n), 1, generator=g), 0.)
    old = torch.where(mask, -math.log(V) + .1*torch.randn(mask.shape, generator=g), 0.)
    return Batch(tokens=tokens, lengths=n, mask=mask, advantages=advantages, old_logprobs=old)


def equal_rows():
    "32,768 tokens in rows of 512, of which 128 are the prompt's."
    return rows_of([size((128, 384), (4, 12))]*size(64, 6))


def unequal_rows():
    "About 32,768 tokens in rows whose lengths are like GSM8K's."
    questions, answers = lengths_of(None)
    pairs, tokens = [], 0
    for p, a in zip(questions, answers, strict=True):
        if tokens + p + a > size(32_768, 600): break
        pairs.append((p, a))
        tokens += p + a
    return rows_of(pairs)


def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b)


def our_update(config, b, *, micro_tokens, checkpointing):
    "fp32 weights, gradients and states, bf16 products."
    return Policy(partial(made, config), engine=plain(dtype=HALF, checkpointing=checkpointing), lr=1e-6,
                  micro_tokens=micro_tokens, device=DEVICE)


def timed(case, way, config, b, update, rounds=3, warm=2):
    "A row about an update: median of a few after two that do not count (states are made, kernels compiled)."
    for _ in range(size(warm, 1)): update()
    begin_peak()
    took = statistics.median(seconds(update) for _ in range(size(rounds, 1)))
    n = int(b.lengths.sum())
    needed = flops(config, b.lengths.tolist(), int(b.mask.sum()))
    return row(case, way, ms=round(1e3*took, 1), tokens_per_s=round(n/took), MFU=round(needed/took/FLOPS, 4), **peaks())


class Phases:
    "Milliseconds on the card between marks around parts of a policy's step."
    def __init__(self, policy):
        self.policy, self.marks = policy, defaultdict(list)

    def mark(self, part, end):
        if DRY: self.marks[part, end].append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[part, end].append(event)

    @contextmanager
    def watching(self):
        model, module = self.policy._run.model, self.policy._run.module
        hooks = [module.register_forward_pre_hook(lambda *_: self.mark("forward", False)),
                 module.register_forward_hook(lambda *_: self.mark("forward", True))]
        names = dict(backward=model.backward, apply=model.apply)
        for name, inner in names.items(): setattr(model, name, partial(self.around, name, inner))
        try: yield
        finally:
            for hook in hooks: hook.remove()
            for name in names: delattr(model, name)

    def around(self, part, inner, *args, **kwargs):
        self.mark(part, False)
        found = inner(*args, **kwargs)
        self.mark(part, True)
        return found

    def milliseconds(self, part):
        pairs = zip(self.marks[part, False], self.marks[part, True], strict=True)
        return sum(1e3*(b - a) if DRY else a.elapsed_time(b) for a, b in pairs)


def where_it_goes(case, way, policy, b):
    "Rows: milliseconds by phase, and the most expensive kernels."
    step, phases = partial(policy.step, b, loss), Phases(policy)
    with phases.watching(): took = 1e3*seconds(step)
    parts = {part: phases.milliseconds(part) for part in ("forward", "backward", "apply")}
    yield row(case, f"{way}: phases", forward_ms=round(parts["forward"], 1), backward_ms=round(parts["backward"], 1),
              optimizer_ms=round(parts["apply"], 1), rest_ms=round(took - sum(parts.values()), 1))
    busy, count, words = kernels(step)
    yield row(case, f"{way}: kernels", busy_ms=round(busy, 1), kernels=count, text=words)


def attention_of_lines():
    "How rows on a line attend here: all in one kernel, or one after another."
    from rlblocks.models.attention import _has_kernel
    q = torch.empty(1, 2, 4, 128, device=DEVICE, dtype=HALF)
    return "varlen_attn" if _has_kernel(q, q, 0.) else "sdpa, row by row"


def ours(case, way, config, b, *, closer=False, **how):
    "Rows about our update; with `closer`, where its time goes."
    policy = our_update(config, b, **how)
    yield timed(case, way, config, b, partial(policy.step, b, loss)) | dict(
        attention=attention_of_lines())
    if closer: yield from where_it_goes(case, way, policy, b)


def selected(logits, ids):
    "Log-probs of ids, row by row, as trainers write it."
    pairs = zip(logits, ids, strict=True)
    return torch.stack([x.float().log_softmax(-1).gather(-1, i[:, None])[:, 0] for x, i in pairs])


def plain_loop(config, b, *, places, checkpointing):
    """What one writes with transformers alone: padded rows, logits of the answers in full, autocast, fused AdamW.

    `places`: most cells of a micro-batch. Result: a function that takes one update."""
    net = made(config).train()
    if checkpointing: net.gradient_checkpointing_enable(dict(use_reentrant=False))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, weight_decay=0., fused=True)
    plan, total = in_their_order(b.lengths, places), float(b.mask.sum())
    def update():
        for at in plan:
            n, first = int(b.lengths[at].max()), int(b.mask[at].int().argmax(1).min())
            columns = b.tokens, b.mask, b.old_logprobs, b.advantages
            ids, mask, old, advantages = (x[at, :n].to(DEVICE) for x in columns)
            exists = None
            if int(b.lengths[at].min()) < n: exists = (torch.arange(n) < b.lengths[at, None]).long().to(DEVICE)
            with torch.autocast(DEVICE.type, dtype=HALF):
                out = net(input_ids=ids, attention_mask=exists, use_cache=False, logits_to_keep=n - first + 1)
            logp = selected(out.logits[:, :-1], ids[:, first:])
            ratio = (logp - old[:, first:]).exp()
            gain = torch.minimum(ratio*advantages[:, first:], ratio.clamp(.8, 1.2)*advantages[:, first:])
            (-(gain*mask[:, first:]).sum()/total).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
    return update


def fitting(case, way, make, config, b, *, checkpointing):
    "A row about somebody else's update, in the largest micro-batches that fit the card."
    refused = {}
    for places in size((8192, 4096, 2048), (512,)):
        try:
            update = make(config, b, places=places, checkpointing=checkpointing)
            yield timed(case, way, config, b, update) | dict(places=places) | refused
            return
        except torch.cuda.OutOfMemoryError: refused = dict(refused=f"out of memory with {places} cells")
        update = None
        settle()
    yield row(case, way, absent=refused["refused"])


def trl_update(config, b, *, places, checkpointing):
    "`GRPOTrainer._compute_loss` of the trainer itself, under autocast, on micro-batches of padded rows in their order."
    import datasets
    from tokenizers import Tokenizer, models
    from trl import GRPOConfig, GRPOTrainer
    rows = min(max(places//int(b.lengths.max()), 1), len(b))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(
        models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>")
    folder = tempfile.TemporaryDirectory()
    settings = GRPOConfig(output_dir=folder.name, per_device_train_batch_size=rows, num_generations=rows,
                          gradient_accumulation_steps=len(b)//rows, num_iterations=2, max_completion_length=512,
                          temperature=1., beta=0., loss_type="dapo", learning_rate=1e-6, max_steps=1, use_cpu=DRY,
                          lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=False, fp16=False,
                          gradient_checkpointing=checkpointing, logging_strategy="no", save_strategy="no",
                          report_to="none", disable_tqdm=True)
    trainer = GRPOTrainer(model=made(config), reward_funcs=lambda completions, **_: [0.]*len(completions),
                          args=settings, processing_class=tokenizer,
                          train_dataset=datasets.Dataset.from_dict(dict(prompt=["a"]*8)))
    trainer.create_optimizer_and_scheduler(1)
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    trainer.folder = folder                                  # as long as the trainer
    net, optimizer = trainer.model.train(), trainer.optimizer
    if checkpointing: net.gradient_checkpointing_enable(dict(use_reentrant=False))   # as `train` would
    start = int(b.mask.int().argmax(1)[0])                   # of all rows: these are equally long
    whole = dict(prompt_ids=b.tokens[:, :start], prompt_mask=torch.ones_like(b.tokens[:, :start]),
                 completion_ids=b.tokens[:, start:], completion_mask=b.mask[:, start:].long(),
                 old_per_token_logps=b.old_logprobs[:, start:], advantages=b.advantages[:, start])
    total = b.mask.sum().to(DEVICE)
    def update():
        for at in torch.arange(len(b)).split(rows):
            part = {k: x[at].to(DEVICE) for k, x in whole.items()} | dict(num_items_in_batch=total)
            with torch.autocast(DEVICE.type, dtype=HALF): value = trainer._compute_loss(net, part)
            trainer.accelerator.backward(value)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
    return update


def update():
    "Figure (b): an update of 1.7B, 32,768 tokens, packed, beside a loop on transformers alone and TRL's loss."
    config, even, micro, most = config_of("1.7B"), equal_rows(), size(8192, 512), size(32_768, 512)
    case, what, mfu = "update 1.7B, 64 rows of 512", "update of 1.7B in bf16", []
    for way, tokens, again in (("ours", micro, False), ("ours, checkpointing, all in one pass", most, True),
                               ("ours, checkpointing", micro, True)):
        for found in tried(case, way, ours, config, even, closer=not again, micro_tokens=tokens, checkpointing=again):
            yield found
            if "MFU" in found: mfu.append(found["MFU"])
            if "MFU" in found and not again: yield goal(what, "MFU ≥ 0.50", mfu[0], mfu[0] >= .5)
    best = max(mfu, default=0.)
    yield goal(f"{what}, the best of our settings", "MFU ≥ 0.50", best, best >= .5)
    for again in (False, True):
        way = "transformers" + (", checkpointing" if again else "")
        yield from tried(case, way, fitting, plain_loop, config, even, checkpointing=again)
    uneven, other = unequal_rows(), "update 1.7B, lengths like GSM8K's"
    yield from tried(other, "ours", ours, config, uneven, micro_tokens=micro, checkpointing=False)
    yield from tried(other, "transformers", fitting, plain_loop, config, uneven, checkpointing=False)
    for again in (False, True):
        way = "TRL's loss" + (", checkpointing" if again else "")
        yield from tried(case, way, fitting, trl_update, config, even, checkpointing=again)


# -- sampling
def prompts_of(n, prompt):
    "Prompts of equal length, each a group."
    g = torch.Generator().manual_seed(0)
    return Batch(tokens=torch.randint(2, V, (n, prompt), generator=g), lengths=torch.full((n,), prompt),
                 group=torch.arange(n))


def generated(net, prompts, repeats, new):
    "transformers' own generation, as trainers call it."
    ids = prompts.tokens.repeat_interleave(repeats, 0).to(DEVICE)
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=True, temperature=1., top_k=0, top_p=1.,
                                        pad_token_id=0)
    with torch.no_grad():
        return net.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how, use_cache=True)


def bound(config, rows, prompt, new):
    "Bytes that a decoding step must read: every weight in bf16, and the keys and values of all rows, half grown."
    c, (q, kv) = config, (n*HEAD_DIM for n in (config.num_attention_heads, KV_HEADS))
    weights = c.num_hidden_layers*c.hidden_size*(2*q + 2*kv + 3*c.intermediate_size) + V*c.hidden_size
    cache = c.num_hidden_layers*2*kv*rows*(prompt + new/2)
    return 2*(weights + cache)


def waits(f):
    "How often the host waits for the card in a call: torch's own count."
    if DRY:
        f()
        return 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try: f()
        finally: torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def a_token(f, few=2, more=7):
    "What a function of a number of tokens counts for one of them."
    return (f(more) - f(few))/(more - few)


def closer_look(case, way, generate):
    "A row: kernels, milliseconds of the card and waits of the host for a decoding step, away from its first ones."
    found = {n: kernels(partial(generate, n)) for n in (2, 7)}
    each = lambda i: (found[7][i] - found[2][i])/5
    return row(case, f"{way}: a decoding step", busy_ms=round(each(0), 2), kernels=round(each(1)),
               waits=round(a_token(lambda n: waits(partial(generate, n))), 1), text=found[7][2])


def decoding_graph(case, way, config, rows, prompt, new):
    """Rows: one decoding step of the model alone, nothing drawn, on transformers' static cache of the average length;
    as it is launched, and as a CUDA graph."""
    net, keys = made(config, HALF).eval(), prompt + new//2
    cache = transformers.StaticCache(config=net.config, max_cache_len=keys)
    ids = torch.full((rows, 1), 2, device=DEVICE)
    at = torch.full((rows, 1), keys - 1, device=DEVICE)
    mask = torch.ones(rows, 1, 1, keys, dtype=torch.bool, device=DEVICE)
    @torch.no_grad()
    def step():
        for layer in cache.layers:                            # always the same place: it never runs out
            if layer.is_initialized: layer.cumulative_length.fill_(keys - 1)
        return net(input_ids=ids, attention_mask=mask, position_ids=at, past_key_values=cache, use_cache=True).logits
    yield row(case, "the model, kernel by kernel", ms=round(milliseconds(step), 3))
    if DRY: return
    yield row(case, way, ms=round(milliseconds(captured(step)[1].replay), 3))


def sampled(case, way, config, rows, prompt, new, speed, *, closer):
    "Rows about the hf sampler, with its goal."
    rollout = Rollout(partial(made, config, HALF), dtype=HALF, max_tokens=new, device=DEVICE)
    prompts = prompts_of(rows, prompt)
    generate = lambda n: rollout.generate(prompts, max_tokens=n, seed=0)
    generate(size(8, 2))
    begin_peak()
    took = seconds(lambda: generate(new))
    least = bound(config, rows, prompt, new)/speed
    ms = 1e3*took/new
    yield row(case, way, tokens_per_s=round(rows*new/took), ms_a_step=round(ms, 2), bound_ms=round(1e3*least, 3),
              times_the_bound=round(ms/1e3/least, 1), **peaks())
    yield goal(f"hf sampler, {case}", "≤ 2 × the bound by memory bandwidth", round(ms/1e3/least, 2), ms/1e3 <= 2*least)
    if closer: yield closer_look(case, way, generate)


def theirs(case, way, config, rows, prompt, new):
    "A row about transformers' generate."
    net, prompts = made(config, HALF).eval(), prompts_of(rows, prompt)
    generated(net, prompts, 1, size(8, 2))
    begin_peak()
    took = seconds(lambda: generated(net, prompts, 1, new))
    yield row(case, way, tokens_per_s=round(rows*new/took), ms_a_step=round(1e3*took/new, 2), **peaks())


def sampler():
    "Figure (f): tokens a second of the hf sampler at 64 × 256, beside transformers' generate and the bound."
    rows, prompt, new = size((64, 128, 256), (4, 6, 8))
    speed = 1e9*copy_rate()
    settle()
    yield row("copy of 2 GiB", "the card", TB_per_s=round(speed/1e12, 3))
    for name in ("0.6B", "1.7B"):
        config, case = config_of(name), f"{name}, {rows} rows of {prompt} + {new} tokens"
        yield from tried(case, "ours", sampled, config, rows, prompt, new, speed, closer=name == "0.6B")
        yield from tried(case, "transformers' generate", theirs, config, rows, prompt, new)
    for name in ("0.6B", "1.7B"):
        case = f"{name}, {rows} rows, one decoding step without drawing"
        yield from tried(case, "the model, as a CUDA graph", decoding_graph, config_of(name), rows, prompt, new)


# -- a whole step
def reward(completion_ids, **_): return [sum(i % 2 for i in ids)/len(ids) for ids in completion_ids]


def grpo_steps(config, prompts, group, news):
    "Seconds by phase of GRPO steps, whose completions have so many tokens each."
    policy = Policy(partial(made, config), engine=plain(dtype=HALF), lr=1e-6, device=DEVICE)
    rollout, grader = Rollout(partial(made, config, HALF), dtype=HALF, device=DEVICE), Grader(reward)
    for step, new in enumerate(news):
        took, kept = {}, {}
        def phase(name, f, took=took, kept=kept): took[name] = seconds(lambda: kept.update({name: f()}))
        phase("load", lambda: rollout.load(policy.weights()))
        phase("generate", lambda new=new, step=step: rollout.generate(prompts, group_size=group, max_tokens=new,
                                                                      seed=step))
        batch = kept["generate"]
        phase("reward", lambda batch=batch: grader.score(batch))
        batch["scores"] = kept["reward"]
        batch["advantages"] = at_tokens(group_advantages(batch.scores, batch.group), batch.mask)
        phase("logprobs", lambda batch=batch: policy.logprobs(batch))
        batch["old_logprobs"] = kept["logprobs"]
        gap = (batch.old_logprobs - batch.rollout_logprobs)[batch.mask].abs()
        def learn(batch=batch, step=step):
            for mini in batch.minibatches(4, seed=step, keep_groups=True): policy.step(mini, loss)
        phase("update", learn)
        yield took, dict(gap_mean_nats=round(gap.mean().item(), 4), gap_max_nats=round(gap.max().item(), 3))


def our_steps(case, way, config, prompts, group, new, counted):
    "A row for each step that counts, after one of few tokens."
    begin_peak()
    for i, (took, gap) in enumerate(grpo_steps(config, prompts, group, [size(8, 2)] + [new]*counted)):
        if not i: continue
        yield row(case, f"{way}, step {i}", s=round(sum(took.values()), 2),
                  **{f"{k}_s": round(v, 3) for k, v in took.items()}, **peaks(), **gap)


def their_generation(case, way, config, prompts, group, new):
    "A row: transformers' generate for the same rows; for fewer prompts where all do not fit the card."
    net = made(config, HALF).eval()
    generated(net, prompts, group, size(4, 2))
    settle()
    for n in dict.fromkeys((len(prompts), len(prompts)//4)):
        took = None
        try: took = seconds(lambda n=n: generated(net, prompts[torch.arange(n)], group, new))
        except torch.cuda.OutOfMemoryError: pass
        settle()
        if took is None: continue
        scaled = {} if n == len(prompts) else dict(scaled=f"from {n*group} rows")
        yield row(case, way, generate_s=round(took*len(prompts)/n, 3)) | scaled
        return
    yield row(case, way, absent="out of memory")


def step():
    "Figure (c): a GRPO step on the shape of 0.6B, 64 prompts × 8 answers of 256 tokens, the sampler in this process."
    n, group, prompt, new = size((64, 8, 128, 256), (4, 4, 6, 8))
    case, config, prompts = f"GRPO step 0.6B, {n} × {group} × {new}", config_of("0.6B"), prompts_of(n, prompt)
    yield from tried(case, "ours", our_steps, config, prompts, group, new, counted=1)
    yield from tried(case, "transformers' generate", their_generation, config, prompts, group, new)


# -- the longest row
LONGEST = {"1.7B": None, "8B": dict(r=16)} | size({"0.6B": None}, {})      # name → adapter
SIZES = size([8192 << i for i in range(6)], [16, 32])
SLOW, A_MODEL = 12., 24.                                      # seconds: most of a step, most of a model's steps


def long_config(name): return config_of(name, max_position_embeddings=1 << 20, dtype=HALF if LONGEST[name] else None)


def long_engine(name): return plain(dtype=None if LONGEST[name] else HALF, checkpointing=True)


def planned(names):
    "Print what `plan` says of each size, a line each: run as a process, beside the card's work."
    from rlblocks import plan
    for name in names:
        for n in SIZES[:size(None, 1)]:
            found = plan(long_config(name), lora=LONGEST[name], engine=long_engine(name), micro_tokens=n, row=n)
            print(json.dumps([name, n, found.total/GIB]), flush=True)


class Planner:
    "Asks `plan` in a process of its own: it takes seconds of a CPU for each size."
    def __init__(self, names):
        self.out = tempfile.TemporaryFile("w+")
        paths = os.pathsep.join([p or "." for p in sys.path])
        env = os.environ | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=paths)
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), *names], stdout=self.out,
                                        stderr=subprocess.STDOUT, env=env)

    def said(self, name, sizes, patience):
        "What is known of a model's sizes after at most so many seconds: {size: GiB}; and why there is no more."
        until = time.monotonic() + patience
        while True:
            ended = self.process.poll() is not None
            self.out.seek(0)
            lines = self.out.read().splitlines()
            told = [json.loads(x) for x in lines if x.startswith("[\"") and x.endswith("]")]
            found = {n: gib for model, n, gib in told if model == name}
            if ended or time.monotonic() > until or set(sizes) <= set(found): break
            time.sleep(.2)
        return found, (lines or ["no answer"])[-1] if ended else "no answer yet"

    def close(self):
        self.process.kill()
        self.process.wait()
        self.out.close()


def lengthened(case, way, name, measured):
    "Rows: a step with a row of each size, doubled until it is out of memory or too slow; fills in `measured`."
    config, lora = long_config(name), LONGEST[name]
    policy = Policy(partial(made, config, HALF if lora else torch.float32), lora=lora, engine=long_engine(name),
                    lr=1e-6, micro_tokens=1 << 20, device=DEVICE)
    short, spent, rate = rows_of([(2, 14)]), 0., 0.
    for _ in range(2): policy.step(short, loss)
    for n in SIZES:
        guess = rate*flops(config, [n], n)
        if guess > SLOW or spent + guess > A_MODEL:
            yield row(case, f"{n:,} tokens", not_tried=f"would take about {guess:.0f} s")
            return
        b = rows_of([(n//2, n - n//2)])
        begin_peak()
        # the short row comes first: the long one finds all gradients there, as in a step of several micro-batches
        took = seconds(lambda b=b: policy.step(short, loss, (b, loss)))
        rate, spent = took/flops(config, [n], n), spent + took
        found = peaks()
        measured[n] = found["GiB"]
        yield row(case, f"{n:,} tokens", s=round(took, 2), **found)


def longest():
    "Figure (d): the longest row that trains on the card, by doubling, beside what `plan` says of each size."
    card = 0. if DRY else torch.cuda.get_device_properties(0).total_memory/GIB
    together = size([[name] for name in LONGEST], [list(LONGEST)])
    planners = {tuple(names): Planner(names) for names in together}
    try:
        for name, lora in LONGEST.items():
            case = f"longest row {name}" + (", LoRA of rank 16" if lora else ", all weights, AdamW")
            measured = {}
            yield from tried(case, "the next size", lengthened, name, measured)
            if not measured: continue
            wanted = [n for n in SIZES[:size(None, 1)] if n <= 2*max(measured)]
            planner = next(p for names, p in planners.items() if name in names)
            plans, why = planner.said(name, wanted, patience=size(15., 60.))
            yield row(case, "the longest that trained", tokens=max(measured), card_GiB=round(card, 1))
            for n in wanted:
                if n not in plans:
                    yield row(case, f"{n:,} tokens: plan", absent=why[:160])
                    continue
                both = dict(measured_GiB=measured[n], planned_over_measured=round(plans[n]/max(measured[n], 1e-9), 3)
                            ) if n in measured else dict(fits=plans[n] < .97*card)
                yield row(case, f"{n:,} tokens: plan", planned_GiB=round(plans[n], 2), **both)
    finally:
        for planner in planners.values(): planner.close()


if __name__ == "__main__": planned(sys.argv[1:])
