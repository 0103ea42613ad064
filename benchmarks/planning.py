"""What `plan` says against what a real policy holds, by kind, for models of 100 million parameters, engine by engine.

Weights, gradients and optimizer states are the bytes of the storages that a rank really keeps; activations and logits are peaks of the allocator's own log (torch's profiler), which also
sees what operations take and give back inside: of a pass alone, and of a real `Policy.step` of two micro-batches, forward and backward. There the second is looked at, which finds all
gradients; what rises inside the output layer's pass is "logits", the most outside of it "activations", and "peak" is all of it against the plan's sum, which is never less than what a
moment wants. Resident memory of the process (its peak, loading included) is reported beside it. Results are written after each case.

    python benchmarks/planning.py [--all]
"""
import argparse
import copy
import datetime
import json
import os
import resource
import socket
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from rlblocks import Batch, Policy
from rlblocks.appetites import appetite
from rlblocks.planning import plan
from rlblocks.sharded import checkpoint_layers_

RESULTS = Path(__file__).parent/"results"
TOKENS, ROW = 512, 128
LLAMA = transformers.LlamaConfig(vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True)
QWEN = transformers.Qwen3Config(vocab_size=48_000, hidden_size=768, intermediate_size=2304, num_hidden_layers=10, num_attention_heads=12, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
WIDE = transformers.LlamaConfig(vocab_size=128_000, hidden_size=512, intermediate_size=1376, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
MODELS = dict(llama=LLAMA, qwen3=QWEN, wide=WIDE)
KINDS = ("weights", "gradients", "states", "activations", "logits")


def make(config, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def logged(f):
    "The allocator's log of a call, [(ns, bytes since the start)], and the spans of what ran, [(name, ns, ns)]."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log: f()
    events, now, taken = log.profiler.kineto_results.events(), 0, [(0, 0)]
    for e in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()): taken.append((e.start_ns(), now := now + e.nbytes()))
    return taken, [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in SPANS]


SPANS = ("a backward pass", "_LinearLogprobs", "_LinearLogprobsBackward", "torch::autograd::AccumulateGrad")


def peak(f):
    "Bytes at most beyond those at the start, by the allocator's own log."
    return max(now for _, now in logged(f)[0])


def storages(tensors):
    "Bytes of the storages behind tensors (a DTensor's own shard), each once."
    own = (x.to_local() if hasattr(x, "to_local") else x for x in tensors if isinstance(x, torch.Tensor))
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in own)}.values())


def rows(tokens=TOKENS):
    n = tokens//ROW
    return Batch(tokens=torch.randint(2, 1000, (n, ROW), generator=torch.Generator().manual_seed(0)), lengths=torch.full((n,), ROW), mask=(torch.arange(ROW) > 0).expand(n, -1).clone())


def loss(out, b):
    each = out.logprobs + .1*out.entropy if "entropy" in vars(out) else out.logprobs
    return -torch.where(b.mask, each, 0.).sum()/b.n_tokens, {}


def held(policy):
    "Bytes of weights, gradients (just before the step) and optimizer states on this rank, after one step."
    model, seen = policy._run.model, {}
    step = model.engine.step
    def before(shared):
        seen["gradients"] = gradients(model)
        return step(shared)
    model.engine.step = before
    policy.step(rows(), loss)
    zero, base = getattr(model.engine, "zero", None), getattr(model.engine, "base", None)
    flats = model.engine._flats() if zero is not None else []
    modules = [model.module] if base is None else [model.module, base.trunk]
    weights = [*flats, *(x for m in modules for p in (*m.parameters(), *m.buffers()) for x in (p, getattr(p, "ds_tensor", None), *tables(p)))]
    return dict(weights=storages(weights), gradients=seen["gradients"], states=storages(x for s in model.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()))


def tables(p):
    "What bitsandbytes keeps beside a packed weight."
    kept, found = [getattr(p, "quant_state", None), getattr(getattr(p, "quant_state", None), "state2", None)], [getattr(p, "SCB", None)]
    return found + [x for state in kept if state is not None for x in (state.absmax, state.offset)]


def gradients(model):
    zero = getattr(model.engine, "zero", None)
    if zero is None: return storages(p.grad for p in model.module.parameters())
    kept = [p.grad for p in model.module.parameters()]
    for name in ("averaged_gradients", "all_grad_tensors"):
        for found in getattr(zero, name, {}).values(): kept += list(found or [])
    flat = getattr(zero, "_ZeROOptimizer__param_id_to_grad_partition", None) or getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
    return storages([*kept, *flat.values()])


def one_rank(rank, world, port, engine, name, more, out):
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    how = dict(more)
    base, folder = how.pop("base", torch.float32), how.pop("folder", None)
    policy = Policy(folder or (lambda: make(MODELS[name], base)), engine=engine, lr=1e-4, device="cpu", micro_tokens=TOKENS, **how)
    found = held(policy)
    if "lora" in how:
        stood = policy._run.model.engine.base
        with stood.using(policy._run.model.engine.name): found["activations"] = peak(lambda: appetite(stood.trunk, TOKENS, row=ROW, dtype=policy._run.model.dtype or stood.model.dtype))
    found["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024
    if rank == 0: torch.save(found, out)
    if world > 1: dist.barrier()
    os._exit(0)


def engine_case(engine, world, name, **more):
    "Planned and held bytes by kind, of one rank."
    with socket.socket() as s, tempfile.TemporaryDirectory() as there:
        s.bind(("127.0.0.1", 0))
        port, out = s.getsockname()[1], Path(there)/"held.pt"
        if "quantization" in more:
            make(MODELS[name]).save_pretrained(Path(there)/"model")
            more["folder"] = str(Path(there)/"model")
        s.close()
        mp.spawn(one_rank, (world, port, engine, name, more, out), nprocs=world)
        real = torch.load(out)
    config = copy.deepcopy(MODELS[name])
    config.dtype = more.get("base")
    planned = plan(config, engine=engine, devices=world, micro_tokens=TOKENS, row=ROW, device="cpu", **{k: x for k, x in more.items() if k not in ("base", "folder")}).bytes()
    return {k: (planned[k], real[k]) for k in ("weights", "gradients", "states", "activations") if k in real} | dict(rss=real["rss"])


def pass_case(name, checkpointing, entropy):
    "Planned and allocated bytes of a pass."
    planned = plan(MODELS[name], micro_tokens=TOKENS, row=ROW, checkpointing=checkpointing, entropy=entropy, device="cpu").bytes()
    model = make(MODELS[name])
    if checkpointing: checkpoint_layers_(model)
    most = peak(lambda: appetite(model, TOKENS, row=ROW, entropy=entropy))
    return dict(activations=(planned["activations"], most))


class Learnt(Exception): "Both micro-batches have gone back."


def step_case(name, entropy=False, **how):
    "Planned and allocated bytes of the second micro-batch of a step, up to the optimizer."
    policy = Policy(lambda: make(MODELS[name]), lr=1e-4, device="cpu", micro_tokens=TOKENS, **how)
    model, back = policy._run.model, policy._run.model.backward
    def backward(*args, **kwargs):
        with record_function(SPANS[0]): return back(*args, **kwargs)
    def stop(*_, **__): raise Learnt
    model.backward, model.apply = backward, stop
    def learn():
        for p in model.module.parameters(): p.grad = None
        try: policy.step(rows(2*TOKENS), loss, entropy=entropy)
        except Learnt: pass
    learn()                                     # what is made once and kept is there
    for p in model.module.parameters(): p.grad = None
    taken, spans = logged(learn)
    (_, _, begin), (_, _, end) = sorted(x for x in spans if x[0] == SPANS[0])
    inside = [(a, b) for name_, a, b in spans if name_ in SPANS[1:3] and begin < a < end]
    assert len(inside) == 2, inside
    (forth, back_) = sorted(inside)             # the matrix's gradient is the layer's until it has been added to the sum, which comes next
    inside = [forth, (back_[0], min(b for name_, a, b in spans if name_ == SPANS[3] and a >= back_[1]))]
    def at(ns): return [now for t, now in taken if t <= ns][-1]
    gradients = at(begin)
    second = [(t, now) for t, now in taken if begin < t <= end]
    logits = max(now - at(a) for a, b in inside for t, now in second if a <= t <= b)
    activations = max(now for t, now in second if not any(a <= t <= b for a, b in inside)) - gradients
    planned = plan(MODELS[name], micro_tokens=TOKENS, row=ROW, entropy=entropy, device="cpu", **how).bytes()
    real = dict(gradients=gradients, activations=activations, logits=logits)
    return {k: (planned[k], x) for k, x in real.items()} | dict(peak=(sum(planned[k] for k in real), max(now for _, now in taken)))


def short_cases():
    "One of each kind: minutes on one core."
    half = dict(dtype=torch.bfloat16)
    for engine, world, more in ((None, 1, {}), ("fsdp2", 2, {}), ("zero2", 2, {}), ("zero3", 2, {}), ("fsdp2", 2, half)): yield f"{engine or 'none'} on {world}" + (", bf16" if more else ""), engine, world, more
    yield "LoRA", None, 1, dict(lora=dict(r=16))


def cases(engines=("none", "fsdp2", "zero1", "zero2", "zero3"), worlds=(1, 2)):
    "(title, engine, ranks, what else the policy is told)"
    half = dict(dtype=torch.bfloat16)
    for engine in engines:
        for world in worlds if engine != "none" else [1]:
            for more in ({}, half) if engine != "none" else ({},): yield f"{engine} on {world}" + (", bf16" if more else ""), None if engine == "none" else engine, world, more
    yield "tensor parallel on 2", None, 2, dict(tensor_parallel=2)
    yield "tensor parallel on 2, LoRA", None, 2, dict(tensor_parallel=2, lora=dict(r=16))
    lora = dict(lora=dict(r=16))
    yield "LoRA", None, 1, lora
    yield "LoRA, bf16 base", None, 1, lora | dict(base=torch.bfloat16)
    yield "LoRA, fsdp2 on 2", "fsdp2", 2, lora
    yield "DoRA, value head", None, 1, dict(lora=dict(r=16, use_dora=True), value_head=True)
    yield "QLoRA, 4 bits", None, 1, lora | dict(quantization="4bit")
    yield "QLoRA, 8 bits", None, 1, lora | dict(quantization="8bit")


def line(title, found):
    pairs = {k: x for k, x in found.items() if isinstance(x, tuple)}
    return f"{title:<22}" + "".join(f" | {k} {a/2**20:.1f} planned, {b/2**20:.1f} held ({a/max(b, 1)-1:+.1%})" for k, (a, b) in pairs.items())


def measurements(everything):
    "(model, title, call that measures) of each case, the quickest first."
    for name in ("llama", "qwen3") if everything else ("llama",):
        for checkpointing in (False, True): yield name, "pass, checkpointing" if checkpointing else "pass", partial(pass_case, name, checkpointing, False)
        yield name, "step", partial(step_case, name)
        if name == "llama": yield "wide", "step, entropy", partial(step_case, "wide", entropy=True)
        if everything:
            yield name, "step, entropy", partial(step_case, name, entropy=True)
            yield name, "step, bf16", partial(step_case, name, dtype=torch.bfloat16)
        for title, engine, world, more in cases() if everything else short_cases(): yield name, title, partial(engine_case, engine, world, name, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="both models, every engine on 1 and 2 ranks, every kind of adapter")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts, table = {}, []
    for name, what, measure in measurements(args.all):
        if name not in counts:
            counts[name] = sum(p.numel() for p in make(MODELS[name]).parameters())
            print(f"{name}: {counts[name]:,} parameters, {TOKENS} tokens in rows of {ROW}; MiB", flush=True)
        table.append(dict(model=name, parameters=counts[name], what=what, **measure()))
        print(line(what, table[-1]) + (f" | process {table[-1]['rss']/2**20:.0f}" if "rss" in table[-1] else ""), flush=True)
        save(table)
    far = [(r["model"], r["what"], k, round(a/b-1, 3)) for r in table for k, x in r.items() if k in KINDS for a, b in [x] if abs(a-b) > .1*b]
    print("beyond 10 %:", far or "none")
    return 1 if far else 0


def save(table):
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS/"planning_cpu.json").write_text(json.dumps(dict(date=datetime.date.today().isoformat(), versions=versions, tokens=TOKENS, row=ROW, bytes_planned_and_held=table), indent=1) + "\n")
    draw(table)


def draw(table):
    "How far each kind is from what is held, case by case."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 1.5 + .3*len(table)))
    for kind in KINDS:
        at = [(100*(r[kind][0]/r[kind][1]-1), i) for i, r in enumerate(table) if kind in r]
        ax.plot(*zip(*at, strict=True), "o", label=kind, alpha=.7) if at else None
    ax.axvspan(-10, 10, alpha=.1)
    ax.set(xlabel="planned against held, %", yticks=range(len(table)), yticklabels=[f"{r['model']} {r['parameters']/1e6:.0f}M: {r['what']}" for r in table])
    ax.invert_yaxis()
    ax.legend()
    fig.savefig(RESULTS/"planning_cpu.png", dpi=90, bbox_inches="tight")
    plt.close(fig)


if __name__ == "__main__": raise SystemExit(main())
