"""What `plan` says against what a real policy holds, by kind, for models of 100 million parameters, engine by engine.

Weights, gradients and optimizer states are the bytes of the storages that a rank really keeps; activations and logits are the peak of the allocator's own log of a real pass (torch's
profiler), which also sees what operations take and give back inside. Resident memory of the process is reported beside it.

    python benchmarks/planning.py [--engines none fsdp2 zero1 zero2 zero3] [--worlds 1 2]
"""
import argparse
import datetime
import json
import os
import resource
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.profiler import ProfilerActivity, profile

from rlblocks import Batch, Policy
from rlblocks.planning import appetite, plan
from rlblocks.sharded import checkpoint_layers_

RESULTS = Path(__file__).parent/"results"
TOKENS, ROW = 512, 128
LLAMA = transformers.LlamaConfig(vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True)
QWEN = transformers.Qwen3Config(vocab_size=48_000, hidden_size=768, intermediate_size=2304, num_hidden_layers=10, num_attention_heads=12, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
MODELS = dict(llama=LLAMA, qwen3=QWEN)


def make(config, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def peak(f):
    "Bytes at most beyond those at the start, by the allocator's own log."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log: f()
    now = most = 0
    for e in sorted((e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    return most


def storages(tensors):
    "Bytes of the storages behind tensors (a DTensor's own shard), each once."
    own = (x.to_local() if hasattr(x, "to_local") else x for x in tensors if isinstance(x, torch.Tensor))
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in own)}.values())


def rows():
    n = TOKENS//ROW
    return Batch(tokens=torch.randint(2, 1000, (n, ROW), generator=torch.Generator().manual_seed(0)), lengths=torch.full((n,), ROW), mask=(torch.arange(ROW) > 0).expand(n, -1).clone())


def held(policy):
    "Bytes of weights, gradients (just before the step) and optimizer states on this rank, after one step."
    model, seen = policy._run.model, {}
    step = model.engine.step
    def before(shared):
        seen["gradients"] = gradients(model)
        return step(shared)
    model.engine.step = before
    policy.step(rows(), lambda out, b: (-torch.where(b.mask, out.logprobs, 0.).sum()/b.n_tokens, {}))
    zero = getattr(model.engine, "zero", None)
    flats = model.engine._flats() if zero is not None else []
    weights = [*model.module.parameters(), *model.module.buffers(), *flats, *(getattr(p, "ds_tensor", None) for p in model.module.parameters())]
    return dict(weights=storages(weights), gradients=seen["gradients"], states=storages(x for s in model.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()))


def gradients(model):
    zero = getattr(model.engine, "zero", None)
    if zero is None: return storages(p.grad for p in model.module.parameters())
    kept = [p.grad for p in model.module.parameters()]
    for name in ("averaged_gradients", "all_grad_tensors"):
        for found in getattr(zero, name, {}).values(): kept += list(found or [])
    flat = getattr(zero, "_ZeROOptimizer__param_id_to_grad_partition", None) or getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
    return storages([*kept, *flat.values()])


def one_rank(rank, world, port, engine, name, dtype, out):
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    policy = Policy(lambda: make(MODELS[name]), engine=engine, dtype=dtype, lr=1e-4, device="cpu", micro_tokens=TOKENS)
    found = held(policy) | dict(rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024)
    if rank == 0: torch.save(found, out)
    if world > 1: dist.barrier()
    os._exit(0)


def engine_case(engine, world, name, dtype):
    "Planned and held bytes by kind, of one rank."
    out = Path("/tmp")/f"planning-{os.getpid()}.pt" if os.name == "posix" else Path(f"planning-{os.getpid()}.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(one_rank, (world, port, engine, name, dtype, out), nprocs=world)
    real = torch.load(out)
    out.unlink()
    planned = plan(MODELS[name], engine=engine, devices=world, dtype=dtype, micro_tokens=TOKENS, row=ROW).bytes()
    return {k: (planned[k], real[k]) for k in ("weights", "gradients", "states")} | dict(rss=real["rss"])


def pass_case(name, checkpointing, entropy):
    "Planned and allocated bytes of a pass."
    planned = plan(MODELS[name], micro_tokens=TOKENS, row=ROW, checkpointing=checkpointing, entropy=entropy).bytes()
    model = make(MODELS[name])
    if checkpointing: checkpoint_layers_(model)
    most = peak(lambda: appetite(model, TOKENS, row=ROW, entropy=entropy))
    return dict(activations=(planned["activations"], most))


def line(title, found):
    pairs = {k: x for k, x in found.items() if isinstance(x, tuple)}
    return f"{title:<22}" + "".join(f" | {k} {a/2**20:.1f} planned, {b/2**20:.1f} held ({a/max(b, 1)-1:+.1%})" for k, (a, b) in pairs.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["none", "fsdp2", "zero1", "zero2", "zero3"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name in args.models:
        n = sum(p.numel() for p in make(MODELS[name]).parameters())
        print(f"{name}: {n:,} parameters, {TOKENS} tokens in rows of {ROW}; MiB", flush=True)
        for checkpointing in (False, True):
            found = pass_case(name, checkpointing, False)
            table.append(dict(model=name, parameters=n, what="pass, checkpointing" if checkpointing else "pass", **found))
            print(line(table[-1]["what"], found), flush=True)
        for engine in args.engines:
            for world in args.worlds if engine != "none" else [1]:
                for dtype in (None, torch.bfloat16) if engine.startswith("zero") else (None,):
                    found = engine_case(None if engine == "none" else engine, world, name, dtype)
                    table.append(dict(model=name, parameters=n, what=f"{engine} on {world}" + (", bf16" if dtype else ""), **found))
                    print(line(table[-1]["what"], found) + f"  process {found['rss']/2**20:.0f}", flush=True)
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS/"planning_cpu.json").write_text(json.dumps(dict(date=datetime.date.today().isoformat(), versions=versions, tokens=TOKENS, row=ROW, bytes_planned_and_held=table), indent=1) + "\n")
    far = [(r["model"], r["what"], k, round(a/b-1, 3)) for r in table for k, x in r.items() if isinstance(x, tuple) for a, b in [x] if abs(a-b) > .1*b]
    print("beyond 10 %:", far or "none")


if __name__ == "__main__": main()
