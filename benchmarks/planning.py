"""What `plan` says against what a real policy holds, by kind, for models of 100 million parameters, engine by engine.

Weights, gradients and optimizer states are the bytes of the storages that a rank really keeps; "stays" is all three
against every storage of the process that was not there before the policy, whoever holds it, just before a second step's
optimizer (where ZeRO-1, which reduces last, has its bucket yet); for engines "peak" is the plan's total against what is
held at that step's worst moment, by the allocator's log. Activations and logits are peaks of the allocator's own log
(torch's profiler), which also sees what operations take and give back inside: of a pass alone, and of a real
`Policy.step` of two micro-batches, forward and backward. There the second is looked at, which finds all gradients; what
rises inside the output layer's pass is "logits", the most outside of it "activations", and "peak" is all of it against
the plan's sum, which is never less than what a moment wants. "cache" is the key-value cache of a real rollout before
its last token, rows of unlike prompts side by side, and "all" every storage then. Resident memory of the process (its
own peak, loading included, before anything is logged) is reported beside it. Results are written after each case; those
that are not measured this time stay. It fails when a kind is off by more than 10 %.

    python benchmarks/planning.py [--all] [--only WORDS]
"""
import argparse
import copy
import datetime
import gc
import json
import os
import socket
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from rlblocks import Batch, Policy, Rollout, pretrained
from rlblocks.engines.engine import EngineSpec
from rlblocks.placement.memory import pass_bytes
from rlblocks.samplers.kv_cache import CachedDecoder
from rlblocks.engines.engine import output_layer
from rlblocks.engines.process_group import HALF
from rlblocks.placement.plan import plan, plan_rollout
from rlblocks.engines.sharded_model import checkpoint_layers_

RESULTS = Path(__file__).parent/"results"
TOKENS, ROW = 512, 128
LLAMA = transformers.LlamaConfig(vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                 num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True)
QWEN = transformers.Qwen3Config(vocab_size=48_000, hidden_size=768, intermediate_size=2304, num_hidden_layers=10,
                                num_attention_heads=12, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
WIDE = transformers.LlamaConfig(vocab_size=128_000, hidden_size=512, intermediate_size=1376, num_hidden_layers=2,
                                num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
MODELS = dict(llama=LLAMA, qwen3=QWEN, wide=WIDE)
STAYS = ("weights", "gradients", "states")
KINDS = (*STAYS, "stays", "activations", "logits", "cache")


def make(config, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def logged(f):
    "The allocator's log of a call, [(ns, bytes since the start)], and the spans of what ran, [(name, ns, ns)]."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log: f()
    events, now, taken = log.profiler.kineto_results.events(), 0, [(0, 0)]
    for e in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        taken.append((e.start_ns(), now := now + e.nbytes()))
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
    return Batch(tokens=torch.randint(2, 1000, (n, ROW), generator=torch.Generator().manual_seed(0)),
                 lengths=torch.full((n,), ROW), mask=(torch.arange(ROW) > 0).expand(n, -1).clone())


def loss(out, b):
    each = out.logprobs + .1*out.entropy if "entropy" in vars(out) else out.logprobs
    return -torch.where(b.mask, each, 0.).sum()/b.n_tokens, {}


def live():
    "Every storage on the CPU that some tensor of this process has, as pointer → bytes: whoever holds it."
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    own = [x.to_local() if hasattr(x, "to_local") else x for t in found
           for x in (t, t.grad if t.is_leaf else None) if x is not None]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in own if x.device.type == "cpu" and x.layout == torch.strided and not hasattr(x, "fake_mode")}


def since(known): return sum(n for at, n in live().items() if known.get(at) != n)


def resident():
    "This process's own peak; ru_maxrss would begin with its parent's."
    return 1024*int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])


def held(policy, known):
    """Bytes of weights, gradients (just before the optimizer) and its states on this rank after one step; all that
    is new in the process at the second, and at its worst moment."""
    model, seen = policy._run.model, {}
    step = model.engine.step
    def before(shared):
        seen.update(gradients=gradients(model), stays=since(known))
        return step(shared)
    model.engine.step = before
    policy.step(rows(), loss)
    zero, base = getattr(model.engine, "zero", None), getattr(model.engine, "base", None)
    flats = model.engine.parts.flats() if zero is not None else []
    modules = [model.module] if base is None else [model.module, base.trunk]
    weights = [*flats, *(x for m in modules for p in (*m.parameters(), *m.buffers())
                         for x in (p, getattr(p, "ds_tensor", None), *tables(p)))]
    found = dict(rss=resident(), weights=storages(weights), states=storages(
        x for s in model.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()))
    at_rest = since(known)
    rise = peak(lambda: policy.step(rows(2*TOKENS), loss))
    # DeepSpeed has them on the way to the host under many names: what is left of all that stays
    if getattr(model.engine, "offload", None): seen["gradients"] = seen["stays"] - found["weights"] - found["states"]
    return found | dict(gradients=seen["gradients"], stays=seen["stays"], peak=at_rest + rise)


def tables(p):
    "What bitsandbytes keeps beside a packed weight."
    kept, found = [getattr(p, "quant_state", None),
                   getattr(getattr(p, "quant_state", None), "state2", None)], [getattr(p, "SCB", None)]
    return found + [x for state in kept if state is not None for x in (state.absmax, state.offset)]


def gradients(model):
    zero = getattr(model.engine, "zero", None)
    if zero is None: return storages(p.grad for p in model.module.parameters())
    kept = [p.grad for p in model.module.parameters()] + [bucket.buffer for bucket in zero.ipg_buckets.values()] + [
        flat.grad for flat in model.engine.parts.flats()]
    kept += [*getattr(zero, "accumulated_grads_in_cpu", {}).values(), *(
        x for end in ("cpu", "gpu") if (x := getattr(zero, f"temp_grad_buffer_for_{end}_offload", None)) is not None)]
    for name in ("averaged_gradients", "all_grad_tensors"):
        for found in getattr(zero, name, {}).values(): kept += list(found or [])
    flat = getattr(zero, "_ZeROOptimizer__param_id_to_grad_partition",
                   None) or getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
    return storages([*kept, *flat.values()])


def one_rank(rank, world, port, engine, name, more, out):
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
                          LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    how = dict(more)
    base, folder = how.pop("base", torch.float32), how.pop("folder", None)
    known = live()
    spec = EngineSpec(engine, **{k: how.pop(k) for k in ("offload", "dtype", "tensor_parallel") if k in how})
    given = pretrained(folder, quantization=how.pop("quantization")) if folder else lambda: make(MODELS[name], base)
    policy = Policy(given, engine=spec, lr=1e-4, device="cpu", micro_tokens=TOKENS, **how)
    found = held(policy, known)
    if "lora" in how and engine is None:            # pass_bytes runs whole weights
        stood = policy._run.model.engine.base
        with stood.using(policy._run.model.engine.name):
            found["activations"] = peak(lambda: pass_bytes(stood.trunk, TOKENS, row=ROW,
                                                           dtype=policy._run.model.dtype or stood.model.dtype))
    if rank == 0: torch.save(found, out)
    if world > 1: dist.barrier()
    os._exit(0)


def in_a_value(engine=None, **how):
    "The arguments of a Policy as `plan` takes them: settings of the engine in its value."
    settings = {k: how.pop(k) for k in [*how] if k in EngineSpec.__dataclass_fields__}
    return dict(engine=EngineSpec(engine, **settings), **how)


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
    how = {k: x for k, x in more.items() if k not in ("base", "folder")}
    made = plan(config, **in_a_value(engine, **how), devices=world, micro_tokens=TOKENS, row=ROW, device="cpu")
    planned = {k: n + made.bytes(host=True)[k] for k, n in made.bytes().items()}           # here the device is a host
    planned |= dict(stays=sum(planned[k] for k in STAYS) + planned["gathered"]*(engine == "zero1"),
                    peak=made.total + sum(made.bytes(host=True).values()))
    return {k: (planned[k], real[k])
            for k in (*STAYS, "stays", "activations", "peak") if k in real} | dict(rss=real["rss"])


def cache_case(name, prompts=4, prompt=100, new=156, each=1):
    "Planned and held bytes of a rollout before it draws its last token."
    known, seen, push = live(), {}, CachedDecoder.push
    rollout = Rollout(lambda: make(MODELS[name]), max_tokens=new, stop=[], device="cpu")
    def pushed(self, tokens):
        push(self, tokens)
        if int(self.lengths.max()) < prompt + new - 1: return
        seen.update(cache=storages(x for layer in self.cache.layers
                                   for x in (layer.keys, layer.values, *getattr(layer, "buffers", ()))),
                    all=since(known))
    CachedDecoder.push = pushed
    lengths = torch.arange(prompts)*5 % 40 + prompt - 39
    lengths[0] = prompt
    ids = torch.randint(2, 1000, (prompts, prompt),
                        generator=torch.Generator().manual_seed(0))*(torch.arange(prompt) < lengths[:, None])
    try:
        rollout.generate(Batch(tokens=ids, lengths=lengths, mask=torch.zeros(prompts, prompt, dtype=torch.bool),
                               group=torch.arange(prompts)), group_size=each)
    finally: CachedDecoder.push = push
    made = plan_rollout(MODELS[name], rows=prompts*each, tokens=prompt + new, prompt=prompt).bytes()
    return dict(weights=(made["weights"], seen["all"] - seen["cache"]), cache=(made["cache"], seen["cache"]),
                peak=(sum(made.values()), seen["all"]))


def pass_case(name, checkpointing, entropy):
    "Planned and allocated bytes of a pass."
    planned = plan(MODELS[name], engine=EngineSpec(checkpointing=checkpointing), micro_tokens=TOKENS, row=ROW,
                   entropy=entropy, device="cpu").bytes()
    model = make(MODELS[name])
    if checkpointing: checkpoint_layers_(model)
    most = peak(lambda: pass_bytes(model, TOKENS, row=ROW, entropy=entropy))
    return dict(activations=(planned["activations"], most))


class Learnt(Exception): "Both micro-batches have gone back."


def step_case(name, entropy=False, **how):
    "Planned and allocated bytes of the second micro-batch of a step, up to the optimizer."
    policy = Policy(lambda: make(MODELS[name]), lr=1e-4, device="cpu", micro_tokens=TOKENS, engine=EngineSpec(**how))
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
    # the matrix's gradient is the layer's until it has been added to the sum, which comes next
    (forth, back_) = sorted(inside)
    inside = [forth, (back_[0], min(b for name_, a, b in spans if name_ == SPANS[3] and a >= back_[1]))]
    def at(ns): return [now for t, now in taken if t <= ns][-1]
    gradients = at(begin)
    second = [(t, now) for t, now in taken if begin < t <= end]
    # its room stands in between
    logits = max(now for a, b in inside for t, now in second if a <= t <= b) - at(forth[0])
    # the matrix as it is multiplied: cast before the first of the two, gone after the second
    if how.get("dtype") in HALF: logits += output_layer(model.module.trunk).weight.numel()*how["dtype"].itemsize
    activations = max(now for t, now in second if not any(a <= t <= b for a, b in inside)) - gradients
    made = plan(MODELS[name], micro_tokens=TOKENS, row=ROW, entropy=entropy, device="cpu", **in_a_value(**how))
    planned = made.bytes()
    real = dict(gradients=gradients, activations=activations, logits=logits)
    return {k: (planned[k], x) for k, x in real.items()} | dict(
        peak=(made.total - planned["weights"] - planned["states"], max(now for _, now in taken)))


def short_cases():
    "One of each kind: minutes on one core."
    half = dict(dtype=torch.bfloat16)
    for engine, world, more in ((None, 1, {}), ("fsdp2", 2, {}), ("zero2", 2, {}), ("zero3", 2, {}),
                                ("fsdp2", 2, half)):
        yield f"{engine or 'none'} on {world}" + (", bf16" if more else ""), engine, world, more
    yield "LoRA", None, 1, dict(lora=dict(r=16))


def cases(engines=("none", "fsdp2", "zero1", "zero2", "zero3"), worlds=(1, 2)):
    "(title, engine, ranks, what else the policy is told)"
    half = dict(dtype=torch.bfloat16)
    for engine in engines:
        for world in worlds if engine != "none" else [1]:
            for more in ({}, half) if engine != "none" else ({},):
                yield f"{engine} on {world}" + (", bf16" if more
                                                else ""), None if engine == "none" else engine, world, more
    yield "fsdp2 on 2, offload", "fsdp2", 2, dict(offload="cpu")
    for engine in ("zero2", "zero3"): yield f"{engine} on 2, offload", engine, 2, dict(offload="cpu")
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
    return f"{title:<22}" + "".join(f" | {k} {a/2**20:.1f} planned, {b/2**20:.1f} held ({a/max(b, 1)-1:+.1%})"
                                    for k, (a, b) in pairs.items())


def measurements(everything):
    "(model, title, call that measures) of each case, the quickest first."
    for name in ("llama", "qwen3") if everything else ("llama",):
        for checkpointing in (False, True):
            yield name, "pass, checkpointing" if checkpointing else "pass", partial(pass_case, name, checkpointing,
                                                                                    False)
        yield name, "step", partial(step_case, name)
        if name == "llama": yield "wide", "step, entropy", partial(step_case, "wide", entropy=True)
        yield name, "rollout", partial(cache_case, name)
        if everything:
            yield name, "step, entropy", partial(step_case, name, entropy=True)
            yield name, "step, bf16", partial(step_case, name, dtype=torch.bfloat16)
        for title, engine, world, more in cases() if everything and name == "llama" else short_cases():
            yield name, title, partial(engine_case, engine, world, name, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true",
                        help="both models, every engine on 1 and 2 ranks, every kind of adapter")
    parser.add_argument("--only", default="", help="cases whose model and title hold one of these words, divided by |")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path, counts = RESULTS/"planning_cpu.json", {}
    cases_ = [x for x in measurements(args.all) if any(word in f"{x[0]} {x[1]}" for word in args.only.split("|"))]
    order = {x[:2]: i for i, x in enumerate(measurements(True))}
    table = [r for r in json.loads(path.read_text())["bytes_planned_and_held"]
             if (r["model"], r["what"]) in order] if args.only and path.exists() else []
    for name, what, measure in cases_:
        if name not in counts:
            counts[name] = sum(p.numel() for p in make(MODELS[name]).parameters())
            print(f"{name}: {counts[name]:,} parameters, {TOKENS} tokens in rows of {ROW}; MiB", flush=True)
        found = dict(model=name, parameters=counts[name], what=what, **measure())
        table = sorted([r for r in table if (r["model"], r["what"]) != (name, what)] + [found],
                       key=lambda r: order[r["model"], r["what"]])
        print(line(what, found) + (f" | process {found['rss']/2**20:.0f}" if "rss" in found else ""), flush=True)
        save(path, table)
    done = {x[:2] for x in cases_}
    far = [(r["model"], r["what"], k, round(r[k][0]/max(r[k][1], 1)-1, 3)) for r in table
           if (r["model"], r["what"]) in done for k in KINDS if k in r and abs(r[k][0]-r[k][1]) > .1*r[k][1]]
    print("beyond 10 %:", far or "none")
    return 1 if far else 0


def save(path, table):
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(date=datetime.date.today().isoformat(), versions=versions, tokens=TOKENS, row=ROW,
                                    bytes_planned_and_held=table), indent=1) + "\n")
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
    ax.set(xlabel="planned against held, %", yticks=range(len(table)),
           yticklabels=[f"{r['model']} {r['parameters']/1e6:.0f}M: {r['what']}" for r in table])
    ax.invert_yaxis()
    ax.legend()
    fig.savefig(RESULTS/"planning_cpu.png", dpi=90, bbox_inches="tight")
    plt.close(fig)


if __name__ == "__main__": raise SystemExit(main())
