"""Every engine is the plain process (LAWS 1, 22, 24, 29, 30, 40): one launch per engine and world size holds all cases;
gloo, CPU.

`make test` has all cases in FSDP2, those of MOST and of SOME in ZeRO, and few steps of each; the others are long. The
whole matrix: `pytest -m "" tests/test_engines.py` (benchmarks/engines.py runs it and keeps the figures)."""
import ctypes
import gc
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import ROOT, rarely, skip_without
from forked import forked, on_ranks
from resident import export_extra, give_back
from rlblocks import (Critic, Policy, Scorer, bradley_terry_loss, dpo_loss, kl_k3, masked_mean, masked_sum, merge,
                      pairs, ppo_loss, sft_loss, value_loss)
from rlblocks.arithmetic.masked import Max
from rlblocks.engines.sharded_model import ShardedModel
from rlblocks.engines.engine import engine_of
from rlblocks.engines.optimizers import OptimizerSpec, adamw
from tiny import NEAR, model, reach, rows, steady, tokenizer
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

LR = 1e-4
HOW = dict(optimizer=steady(LR, weight_decay=.1, max_norm=.5), device="cpu", micro_rows=2)
# of a case; `make test` takes few: the second begins with the moments of the gradients of other weights
STEPS, FEW = 5, 2
# of losses and gradient norms; weights, in steps of at most 1e-3, agree to NEAR·1e-3, which is less
FAR = reach(torch.ones(1))
QUICK = [("fsdp2", 2, None), ("zero3", 2, "most")]
ALL = [(engine, world, None) for engine in ("fsdp2", "zero1", "zero2", "zero3") for world in (1, 2, 4)]
MATRIX = [(*x, FEW) for x in QUICK] + rarely(*((*x, STEPS) for x in ALL))


# -- losses and batches
def ppo(out, b):
    pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    return pg - .01*masked_mean(out.entropy, b.mask, denom=b.n_tokens), metrics


def grpo(out, b):
    pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, over="rows", denom=b)
    return pg + .05*masked_mean(kl_k3(out.logprobs, b.ref_logprobs, b.mask), b.mask, denom=b.n_tokens), metrics


def sft(out, b): return sft_loss(out.logprobs, b.mask, denom=b.n_tokens)


def dpo(out, b):
    mine, ref = (masked_sum(x, b.mask, dim=-1) for x in (out.logprobs, b.ref_logprobs))
    return dpo_loss(*pairs(mine, b), *pairs(ref, b), beta=.1, denom=b)


def actor_critic(out, b):
    pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    v, more = value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens)
    return pg + .5*v, metrics | more


def value(out, b): return value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens)
def verdict(out, b): return bradley_terry_loss(*pairs(out.scores, b), denom=b)


def batch(B=13, seed=0):
    b = rows(B=B, seed=seed, dtype=torch.float32)
    b["old_logprobs"], b["old_values"] = b.ref_logprobs.clone(), b.returns + .1
    return b


def preferences(n=5):
    b = batch(2*n, seed=3)
    b["unit"], b["chosen"] = torch.arange(n).repeat_interleave(2), torch.arange(2*n) % 2 == 0
    return b


def uneven(b, world, rank):
    "Parts of unlike sizes: the first rank has one row, the last all that are left."
    cuts = [[0], *[[i] for i in range(1, world-1)],
            list(range(world-1, len(b)))] if world > 1 else [list(range(len(b)))]
    return b.part(cuts[rank], len(cuts))


class Experts(nn.Module):
    "Three tables; rows with an even first token use the second one too, and nobody uses the third."

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Linear(8, 32) for _ in range(3)])

    def forward(self, h, second):
        out = self.tables[0](h)
        return out + torch.where(second[:, None, None], self.tables[1](h), 0.) if second.any() else out


class Routed(nn.Module):
    "Ranks do not use the same weights of a layer, or (without routing) all leave the same ones out."

    def __init__(self, routed):
        super().__init__()
        self.routed = routed
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.layers = nn.Embedding(32, 8), nn.ModuleList([Experts()])

    def forward(self, input_ids): return self.layers[0](self.embed(input_ids), (input_ids[:, 0] % 2 == 0) & self.routed)


def cases():
    "name → (make, batch, how to cut, step)"
    ppo_b, small = batch(), batch(3, seed=5)
    even = lambda b, world, rank: b.parts(world)[rank] if world > 1 else b
    same = lambda b, world, rank: b
    llama = lambda checkpointing=False, **k: lambda **e: Policy(
        model(), **HOW | k | e | dict(engine=replace(engine_of(e.get("engine")), checkpointing=checkpointing)))
    return {"ppo, uneven rows": (llama(), ppo_b, uneven, lambda m, b: m.step(b, ppo, entropy=True)),
            "grpo": (llama(checkpointing=True), ppo_b, even, lambda m, b: m.step(b, grpo)),
            "dpo pairs": (llama(), preferences(), even, lambda m, b: m.step(b, dpo)),
            "sft, fewer rows than ranks": (llama(), small, even, lambda m, b: m.step(b, sft)),
            "ppo and ptx": (llama(), ppo_b, even, lambda m, b: m.step(b, grpo, (b, sft))),
            "value head": (llama(value_head=True), ppo_b, even, lambda m, b: m.step(b, actor_critic)),
            "tied weights, whole on every rank": (lambda **e: Policy(model("gemma"), **HOW | e), small, same,
                                                  lambda m, b: m.step(b, grpo)),
            "schedule, sgd": (lambda **e: Policy(model("qwen3"), **HOW | dict(
        optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9), schedule=lambda v: 1/(1+v))) | e),
                              small, even, lambda m, b: m.step(b, sft)),
            "critic": (lambda **e: Critic(model(), **HOW | e), ppo_b, even, lambda m, b: m.step(b, value)),
            "scorer": (lambda **e: Scorer(model(), **HOW | e), preferences(), even, lambda m, b: m.step(b, verdict)),
            "unused weights": (lambda **e: Policy(lambda: Routed(False), **HOW | e), ppo_b, even,
                               lambda m, b: m.step(b, sft)),
            "ranks use unlike weights": (lambda **e: Policy(lambda: Routed(True), **HOW | e), ppo_b, even,
                                         lambda m, b: m.step(b, sft)),}


def skipped(engine, name):
    "DeepSpeed reduces gradients in the order they come: it must be the same on all ranks."
    return engine.startswith("zero") and name == "ranks use unlike weights"


# one of each way through an engine: parts of unlike sizes, recomputation, two losses, a head of its own, no row at all
MOST = ("ppo, uneven rows", "grpo", "sft, fewer rows than ranks", "ppo and ptx", "value head",
        "tied weights, whole on every rank", "schedule, sgd", "unused weights")
SOME = ("ppo, uneven rows", "sft, fewer rows than ranks", "ppo and ptx", "schedule, sgd")


def wanted(which):
    "Cases and checks of a launch: all (None), most or some."
    names, few = dict(some=SOME, most=MOST).get(which, tuple(cases())), (on_policy, poison, resumes, failing, offloaded)
    return {k: c for k, c in cases().items() if k in names}, few if which == "some" else CHECKS


def run(case, world=1, rank=0, steps=STEPS, **engine):
    "Metrics of each step, and the weights at the end."
    make, b, cut, step = case
    m = make(**engine)
    metrics = [{k: x.to("cpu") for k, x in step(m, cut(b, world, rank)).items()} for _ in range(steps)]
    return m, metrics, {k: x for bucket in m._run.model.iter_full_params() for k, x in bucket.items()}


# -- on every rank
def one_rank(rank, world, engine, folder, which=None, steps=STEPS):
    give_back()
    found, times = {}, {}
    chosen, checks = wanted(which)
    for name, case in chosen.items():
        if skipped(engine, name): continue
        start = time.process_time()
        _, metrics, weights = run(case, world, rank, steps, engine=engine)
        found[name] = dict(metrics=metrics, weights=weights if rank == 0 else None)
        times[name] = round(time.process_time()-start, 2)
        gc.collect()
    for check in checks:
        start = time.process_time()
        check(engine, world, rank, folder)
        times[check.__name__] = round(time.process_time()-start, 2)
    torch.save(dict(found=found, times=times, rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10),
               folder/f"{rank}.pt")


def whole_weights(m): return {k: x for bucket in m._run.model.iter_full_params() for k, x in bucket.items()}


def on_policy(engine, world, rank, folder):
    "LAWS 29: the ratio of the first micro-batch is 1."
    b = batch()
    policy = Policy(model(), **HOW, engine=engine)
    b["old_logprobs"] = policy.logprobs(b)
    def loss(out, b):
        far = torch.where(b.mask, (out.logprobs-b.old_logprobs).detach().exp().sub(1).abs(), 0.)
        return ppo(out, b)[0], dict(far=Max(far.max()))
    metrics = policy.step(b.parts(world)[rank] if world > 1 else b, loss, entropy=True)
    assert float(metrics["far"]) < 1e-4


def reference(engine, world, rank, folder):
    "A frozen model is the plain one, holds no gradient, and cannot step."
    b, ref = batch(), Policy(model(), frozen=True, **HOW, engine=engine)
    assert (ref.logprobs(b)-Policy(model(), frozen=True, **HOW).logprobs(b)).abs().max() < reach(b.ref_logprobs)
    with pytest.raises(RuntimeError, match="frozen"): ref.step(b, sft)
    assert whole_weights(ref).keys() == whole_weights(Policy(model(), frozen=True, **HOW)).keys()


def half_precision(engine, world, rank, folder):
    "LAWS 30: a bf16 checkpoint is trained in fp32, states too, and computes in bf16."
    b, policy = batch(), Policy(model(dtype=torch.bfloat16), **HOW, engine=engine)
    before = whole_weights(policy)
    metrics = policy.step(b.parts(world)[rank] if world > 1 else b, sft)
    state = policy.state_dict()
    moments = [x for s in state["optimizer"]["state"].values() for k, x in s.items() if k.startswith("exp_avg")]
    assert moments and all(x.dtype == torch.float32 for x in moments)
    after = whole_weights(policy)
    assert all(x.dtype == torch.float32 for x in after.values())
    moved = torch.cat([(after[k]-before[k]).abs().flatten() for k in after])
    # lr is 1e-4; in bf16 most weights would stand still
    assert (moved > 0).double().mean() > .8 and moved.max() < 3e-4
    plain = Policy(model(dtype=torch.bfloat16), **HOW).step(b, sft)
    assert abs(float(metrics["grad_norm"]) / float(plain["grad_norm"]) - 1) < .05


def poison(engine, world, rank, folder):
    """Every weight exactly once, the same as a plain model's; what a receiver does to its copies, and what becomes
    of gathered memory, reaches nobody."""
    # M_PERTURB: every byte that is freed becomes 0xff, and four of those are a NaN
    ctypes.CDLL(None).mallopt(-6, 255)
    policy = Policy(model("gemma"), **HOW, engine=engine)
    want, got = {k: x.clone() for k, x in whole_weights(Policy(model("gemma"), **HOW)).items()}, {}
    for bucket in policy._run.model.iter_full_params(bucket_bytes=3000):
        for name, x in bucket.items():
            assert name not in got
            got[name] = x.clone()
            x.fill_(float("nan"))
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    assert all(x.isfinite().all() for x in whole_weights(policy).values())
    assert policy.logprobs(batch(3)).isfinite().all()
    ctypes.CDLL(None).mallopt(-6, 0)


def copied(state): return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def spoil(state):
    "What becomes of a state after it was loaded is nobody's business."
    for x in tree_leaves(state["optimizer"]["state"]):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            (x.to_local() if hasattr(x, "to_local") else getattr(x, "local", x)).fill_(float("nan"))


def resumes(engine, world, rank, folder):
    "A full state goes into any engine, and the run goes on as if nothing had happened."
    b = batch()
    part = b.parts(world)[rank] if world > 1 else b
    policy = Policy(model(), **HOW, engine=engine)
    for _ in range(2): policy.step(part, sft)
    states = [copied(s) for s in (policy.state_dict(), policy._run.model.state_dict(full=False), policy.state_dict())]
    policy.step(part, sft)
    want = whole_weights(policy)
    for state in states[:2]:
        again = Policy(model(seed=1), **HOW, engine=engine)
        again.load_state_dict(state)
        assert again.version == 2
        spoil(state)
        again.step(part, sft)
        far = max((x-want[k]).abs().max().item() for k, x in whole_weights(again).items())
        assert far == 0, far
    plain = Policy(model(seed=1), **HOW)
    plain.load_state_dict(states[2])
    plain.step(b, sft)
    assert all((x-want[k]).abs().max() < NEAR*LR for k, x in whole_weights(plain).items())
    other = Policy(model(), **HOW)
    for _ in range(2): other.step(b, sft)
    again.load_state_dict(other.state_dict())
    again.step(part, sft)
    assert all((x-want[k]).abs().max() < NEAR*LR for k, x in whole_weights(again).items())


def failing(engine, world, rank, folder):
    """A loss that raises on one rank, or is NaN, raises on all; nothing changed, and the next step is as if it had
    never been."""
    b = batch()
    part = b.parts(world)[rank] if world > 1 else b
    policy, clean = (Policy(model(), **HOW, engine=engine) for _ in range(2))
    before = whole_weights(policy)
    seen = []
    def broken(out, b):
        seen.append(1)
        if rank == world-1 and len(seen) == 2: raise KeyError("mine")
        return sft(out, b)
    with pytest.raises(Exception, match="mine"): policy.step(part, broken)
    def nan(out, b): return sft(out, b)[0]*float("nan"), {}
    with pytest.raises((FloatingPointError, RuntimeError)): policy.step(part, nan)
    b.columns["advantages"] = torch.full_like(b.advantages, 1e30)
    def inf(out, b):
        return (out.logprobs*1e30).sum()*1e30*0 + masked_mean(out.logprobs.exp()*1e25, b.mask,
                                                              denom=b.n_tokens)*1e15, {}
    with pytest.raises((FloatingPointError, RuntimeError)): policy.step(part, inf)
    assert policy.version == 0 and all(torch.equal(x, before[k]) for k, x in whole_weights(policy).items())
    for p in (policy, clean): p.step(part, sft)
    after = whole_weights(clean)
    assert all((x-after[k]).abs().max() < NEAR*LR for k, x in whole_weights(policy).items())


def saved(engine, world, rank, folder):
    "LAWS 40: a folder that plain transformers loads."
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
    b, net = batch(4), model("gemma")
    net.generation_config = GenerationConfig(do_sample=True, temperature=.6, top_p=.9, eos_token_id=[1, 7],
                                             pad_token_id=0, max_new_tokens=11)
    policy, scorer = Policy(net, tokenizer=tokenizer(), **HOW, engine=engine), Scorer(model(), **HOW, engine=engine)
    policy.step(b, sft)
    policy.save_pretrained(folder/"policy")
    scorer.save_pretrained(folder/"scorer")
    lp = policy.logprobs(b)
    plain = AutoModelForCausalLM.from_pretrained(folder/"policy")
    assert (Policy(plain, **HOW).logprobs(b)-lp).abs().max() < reach(lp)
    assert AutoTokenizer.from_pretrained(folder/"policy").apply_chat_template([dict(content="w3 w5")],
                                                                              tokenize=False) == "w3 w5"
    assert {k: getattr(plain.generation_config, k)
            for k in ("do_sample", "temperature", "top_p", "eos_token_id", "pad_token_id", "max_new_tokens")} == dict(
        do_sample=True, temperature=.6, top_p=.9, eos_token_id=[1, 7], pad_token_id=0, max_new_tokens=11)
    reward, info = AutoModelForSequenceClassification.from_pretrained(folder/"scorer", output_loading_info=True)
    assert not info["missing_keys"] and reward.num_labels == 1


def saved_in_half(engine, world, rank, folder):
    "A bf16 checkpoint comes back as bf16, its fp32 masters rounded once, tied weights once; in several files."
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    b = batch(4)
    policy, scorer = (kind(model("gemma", dtype=torch.bfloat16), **HOW, engine=engine) for kind in (Policy, Scorer))
    policy.step(b, sft)
    (policy.save_pretrained(folder/"half", max_shard_bytes=20_000),
     policy.save_pretrained(folder/"whole", dtype=torch.float32), scorer.save_pretrained(folder/"judge"))
    masters = {k.removeprefix("trunk."): x for k, x in whole_weights(policy).items()}
    assert any((x != x.bfloat16()).any() for x in masters.values())
    for name, dtype in (("half", torch.bfloat16), ("whole", torch.float32)):
        plain = AutoModelForCausalLM.from_pretrained(folder/name)
        found = {}
        for file in (folder/name).glob("*.safetensors"):
            with safe_open(file, "pt") as f: found |= {k: f.get_tensor(k) for k in f.keys()}
        assert plain.dtype == plain.config.dtype == dtype and plain.lm_head.weight is plain.model.embed_tokens.weight
        assert found.keys() == masters.keys() and all(torch.equal(found[k], x.to(dtype)) for k, x in masters.items())
        assert all(torch.equal(plain.state_dict()[k], x.to(dtype)) for k, x in masters.items())
    assert len(list((folder/"half").glob("model-*.safetensors"))) > 2
    assert len(list((folder/"whole").glob("*.safetensors"))) == 1
    assert AutoModelForSequenceClassification.from_pretrained(folder/"judge").dtype == torch.bfloat16
    assert policy._run.module.trunk.config.dtype != torch.float32


def saved_in_pieces(engine, world, rank, folder):
    "LAWS 22, to disk: beside the shards rank 0 holds a file, a bucket and a tensor, the others a bucket and a tensor."
    if world > 2: return
    policy = Policy(model(hidden_size=512, intermediate_size=1365, num_hidden_layers=4), **HOW, engine=engine)
    mb, most = 512*1365*4/2**20, 8         # of the largest of 36 tensors; all of them are 49 MiB
    extra = export_extra(lambda size: policy.save_pretrained(folder/"pieces", max_shard_bytes=size) or (), most << 20)
    print(f"saving {engine} {world} {rank}: {extra:.1f} MiB")
    assert extra < most*(1 + (
        rank == 0)) + 2*mb, f"{extra:.1f} MiB beside the shards; a file and a bucket are {most} each, a tensor {mb:.1f}"


def peak(engine, world, rank, folder):
    "LAWS 22: beside the shards an export holds one bucket and one tensor."
    torch.manual_seed(0)
    m = ShardedModel(nn.Sequential(*[nn.Linear(1500, 1401, bias=False) for _ in range(8)]), engine=engine,
                     device="cpu", optimizer=lambda ps: torch.optim.SGD(ps, lr=.1))
    mb = 1500*1401*4/2**20          # 8.0 MiB each, 1401 rows do not divide by 2 or 4
    extra = export_extra(m.iter_full_params, 3*1500*1401*4)
    print(f"peak {engine} {world} {rank}: {extra:.1f} MiB")
    assert extra < 3*mb + mb + mb/2, f"{extra:.1f} MiB beside the shards; a bucket is {3*mb:.1f}, a tensor {mb:.1f}"


def offloaded(engine, world, rank, folder):
    """States (and shards) in host memory: the same numbers, and a state that goes on. ZeRO's Adam is compiled once,
    before the tests (tests/conftest.py)."""
    b = batch()
    part = b.parts(world)[rank] if world > 1 else b
    how, near = HOW, NEAR*LR
    # DeepSpeed's own AdamW, eps 1e-8: rounding may decide a whole step
    if engine.startswith("zero"): how, near = HOW | dict(optimizer=adamw(lr=LR, weight_decay=.1, max_norm=.5)), 3*2*LR
    policy, plain = Policy(model(), **how, engine=replace(engine_of(engine), offload="cpu")), Policy(model(), **how)
    for _ in range(2): policy.step(part, sft), plain.step(b, sft)
    again = Policy(model(seed=1), **how, engine=replace(engine_of(engine), offload="cpu"))
    again.load_state_dict(copied(policy.state_dict()))
    for p in (policy, again): p.step(part, sft)
    plain.step(b, sft)
    want = whole_weights(plain)
    for p in (policy, again):
        far = torch.cat([(x-want[k]).abs().flatten() for k, x in whole_weights(p).items()])
        assert far.max() < near and (far > NEAR*LR).double().mean() < .01


def unlike(engine, world, rank, folder):
    "Ranks that built different models are told so."
    if world == 1: return
    with pytest.raises(ValueError, match="ranks 0 and 1 built different models"):
        Policy(model(seed=min(rank, 1)), **HOW, engine=engine)


def interrupted(engine, world, rank, folder):
    """Ctrl-C in the middle of a step, on every rank: the whole step has happened, version included, and the next one
    is as if nothing had been."""
    b = batch()
    part = b.parts(world)[rank] if world > 1 else b
    # a run that was started in the background ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    policy, calm = (Policy(model(), **HOW, engine=engine) for _ in range(2))
    pressed = []                     # once: ZeRO's optimizer makes a step of several
    hook = policy._run.model.optimizer.register_step_post_hook(
        lambda *_: pressed or (pressed.append(1), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt): policy.step(part, sft)
    hook.remove()
    calm.step(part, sft)
    assert policy.version == policy.weights().version == 1
    for _ in range(2):
        want = whole_weights(calm)
        assert all(torch.equal(x, want[k]) for k, x in whole_weights(policy).items())
        for p in (policy, calm): p.step(part, sft)


def nested(engine, world, rank, folder):
    """Layers inside layers (Mamba's mixer in its block) are sharded, and the gradient is the plain process's: SGD
    with lr 1 takes it off the weights."""
    if engine != "fsdp2": return
    import transformers as tf
    b, size = batch(6), dict(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2, conv_kernel=4,
                             time_step_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    how = HOW | dict(optimizer=OptimizerSpec(lambda ps: torch.optim.SGD([p for _, p in ps], lr=1.), max_norm=None))
    for kind in ("Mamba", "FalconMamba"):
        torch.manual_seed(0)
        net = getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**size))
        before, steps = dict(net.named_parameters()), []
        for how_held in (dict(engine=engine), {}):
            policy = Policy(net, **how, **how_held)
            policy.step(b.parts(world)[rank] if world > 1 and how_held else b, sft)
            steps.append({k: x - before[k.removeprefix("trunk.")].detach() for k, x in whole_weights(policy).items()})
        scale = max(x.abs().max() for x in steps[1].values())
        eps = torch.finfo(torch.float32).eps
        # a sum over tokens, and what a weight is rounded to
        far, most = (max((x - steps[1][k]).abs().max() for k, x in steps[0].items()),
                     eps*(int(b.mask.sum())*scale + 2*max(x.abs().max() for x in before.values())))
        assert scale > 1e-3 and far < most, (kind, float(far), float(most))


CHECKS = [on_policy, reference, half_precision, poison, resumes, failing, interrupted, nested, saved, saved_in_half,
          saved_in_pieces, peak, offloaded, unlike]


# -- in the parent
@pytest.fixture(scope="module")
def plain():
    "The plain process, each case once, of so many steps."
    return cache(lambda steps: {name: run(case, steps=steps)[1:] for name, case in cases().items()})


@pytest.mark.ranks
@pytest.mark.parametrize("engine, world, which, steps", MATRIX)
def test_engine_equals_the_plain_process(tmp_path, plain, engine, world, which, steps):
    if engine.startswith("zero"): skip_without("deepspeed")
    ranks = launch(engine, world, tmp_path, which, steps)
    far = compare(ranks, plain(steps))
    ran = {name for name in wanted(which)[0] if not skipped(engine, name)}
    assert max(far.values()) < FAR and {name for name, _ in far} == ran, far
    assert sum(r["rss"] for r in ranks) < 8 << 30


def saves(rank, folder):
    give_back()
    torch.set_num_threads(1)
    for check in (saved, saved_in_half, saved_in_pieces): check(None, 1, 0, folder)


def test_the_plain_process_saves(tmp_path): forked(saves, (tmp_path,), 1)


def launch(engine, world, folder, which=None, steps=STEPS):
    "What every rank found."
    on_ranks(one_rank, (engine, folder, which, steps), world)
    return [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(world)]


def compare(ranks, plain):
    """Largest difference by case of weights (absolute), and of losses and gradient norms (relative, or to 1 where
    they cancel to less); all other metrics are checked here."""
    far = {}
    for name, (want, weights) in plain.items():
        if name not in ranks[0]["found"]: continue
        found = [r["found"][name] for r in ranks]
        assert found[0]["weights"].keys() == weights.keys(), name
        far[name, "weights"] = max((found[0]["weights"][k]-x).abs().max().item() for k, x in weights.items())
        for step, metrics in enumerate(want):
            shared = name != "tied weights, whole on every rank"
            joined = merge(*(f["metrics"][step] for f in found)) if shared else found[0]["metrics"][step]
            assert joined.keys() == metrics.keys()
            for k, x in metrics.items():
                if k in ("loss", "grad_norm"):
                    far[name, k] = max(far.get((name, k), 0.), abs(float(joined[k])-float(x))/max(abs(float(x)), 1.))
                # one token at a clip's edge
                else:
                    assert float(joined[k]) == pytest.approx(float(x), rel=1e-4,
                                                             abs=.03 if "frac" in k else 1e-5), (name, step, k)
    return far


HELD = """
import sys, time
from pathlib import Path
from rlblocks.engines.zero import _build_folder
with _build_folder(9.) as folder:
    (folder/"cpu_adam").mkdir(exist_ok=True)
    (folder/"cpu_adam"/"lock").touch()                # as torch does while it builds
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_killed_build_holds_nobody_up(tmp_path, monkeypatch):
    "While a process builds, another one waits; once it is killed, what it left is removed."
    from rlblocks.engines.zero import _build_folder
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builder = subprocess.Popen([sys.executable, "-c", HELD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        lock = Path(builder.stdout.readline().strip())/"cpu_adam"/"lock"
        with pytest.raises(RuntimeError, match="another process has been building in"), _build_folder(.3): pass
        assert lock.exists()
    finally:
        builder.kill()
        builder.wait()
    assert lock.exists()
    with _build_folder(9.) as folder: assert folder == lock.parent.parent and not lock.exists()


def test_a_missing_libaio_is_named_before_anything_is_built(monkeypatch, tmp_path):
    skip_without("deepspeed")
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from rlblocks.engines.zero import build_ops
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    # it is there: look away
    if AsyncIOBuilder().is_compatible():
        monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(ImportError, match="libaio .*apt install libaio-dev"): build_ops(torch.device("cpu"), "nvme")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(monkeypatch):
    from rlblocks.engines.zero import build_ops
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install -e .\.\[deepspeed\]"): build_ops(torch.device("cpu"))
