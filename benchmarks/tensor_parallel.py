"""Layers cut over ranks: rlblocks' own tensor parallelism beside transformers' (`DistributedConfig`), in one run.

    .venv/bin/python benchmarks/tensor_parallel.py [--only gradients|laws|step] [--out benchmarks/results]

Gradients of every weight against one process, as the largest difference over a weight's largest entry, the worst weight
named; what each side does where a plan cannot be carried out or does not say all that the code needs; seconds of a step
and bytes that a rank keeps. gloo, CPU, one thread a rank.
"""
import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from forked import forked
from rlblocks import OptimizerSpec, Policy, plain
from rlblocks.engines.tensor_parallel import TensorParallel
from test_tensor import OTHERS, other, untrue
from tiny import model, rows

CPU = torch.device("cpu")
KINDS = ("llama", "qwen3", "qwen3_moe", "mixtral", "gemma2", "deepseek_v3", "glm4_moe", "phi")


# -- one model, one loss
def made(kind:str, dtype=torch.float32, **more)->nn.Module:
    "A tiny random model, the same on every rank."
    net = other(kind) if kind in OTHERS else model(kind, **more)
    net.config._experts_implementation = "eager"        # the fast kernel knows no float64
    return net.to(dtype).eval()


def ids(vocab=32, tokens=16)->torch.Tensor:
    return torch.randint(2, vocab, (2, tokens), generator=torch.Generator().manual_seed(1))


def loss_of(net, tokens)->torch.Tensor:
    "A weighted sum of log-probs."
    logits = net(input_ids=tokens[:, :-1], use_cache=False).logits
    chosen = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
    weights = torch.linspace(-1, 1, tokens[:, 1:].numel(), dtype=chosen.dtype).view(tokens[:, 1:].shape)
    return (chosen.gather(-1, tokens[:, 1:, None])[..., 0]*weights).sum()


def micro_batches(n:int)->list[torch.Tensor]: return list(ids().chunk(n))
def whole(x): return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def gradients(net, parts)->dict[str, torch.Tensor]:
    "Of one process."
    for tokens in parts: loss_of(net, tokens).backward()
    return {n: whole(p.grad) for n, p in net.named_parameters() if p.grad is not None}


# -- the two sides
def ours(net, *, size=2, fsdp=1, optimizer:Callable|None=None):
    optimizer = optimizer or (lambda ps: torch.optim.SGD([p for _, p in ps], lr=float(1 << 20)))
    engine = "fsdp2" if fsdp > 1 else None
    return TensorParallel(net, CPU, size=size, engine=engine, optimizer=optimizer)


def our_gradients(net, parts, **how)->dict[str, torch.Tensor]:
    "What a large step of plain gradient descent has moved, over its size."
    engine = ours(net, **how)
    before = {n: x.detach().clone() for n, x in engine.weights()}
    replicas = how.get("fsdp", 1)                       # that all have these rows
    for i, tokens in enumerate(parts):
        engine.backward(loss_of(engine, tokens)/replicas, last=i == len(parts)-1, shared=True)
    engine.step(True)
    return {n: (before[n]-x.detach())/(1 << 20) for n, x in engine.weights() if not torch.equal(before[n], x)}


def theirs(net, folder:Path, *, size=2, fsdp=1)->nn.Module:
    "By `from_pretrained`, from a folder that every rank can read."
    if dist.get_rank() == 0: net.save_pretrained(folder)
    dist.barrier()
    how = DistributedConfig(tp_size=size, fsdp_size=fsdp)
    eager = dict(experts_implementation="eager") if hasattr(net.config, "_experts_implementation") else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=net.dtype, distributed_config=how, **eager).eval()


def their_gradients(net, parts, folder, **how): return gradients(theirs(net, folder, **how), parts)


def distance(found, want)->dict:
    "The worst weight, and weights that have no gradient though one process finds one."
    far = {k: ((found[k].to(x)-x).abs().max()/x.abs().max()).item() for k, x in want.items() if k in found and x.any()}
    worst = max(far, key=lambda k: far[k])
    missing = sorted(k for k, x in want.items() if x.any() and k not in found)
    return dict(far=float(f"{far[worst]:.2g}"), worst=worst) | (dict(missing=missing) if missing else {})


def tried(f:Callable):
    "What it finds, or the error that it raises."
    try: return f()
    except BaseException as e:           # torch's CheckpointException is no Exception
        said = [x for x in str(e).splitlines() if "Error" in x] or str(e).splitlines() or [""]
        return f"{type(e).__name__}: {said[-1][:200]}"


def gradient_cases(world:int):
    "(title, kind, dtype, micro-batches, how)"
    fsdp = world//2
    for kind in KINDS:
        for dtype in (torch.float64, torch.float32) if world == 2 else (torch.float64,):
            how = dict(fsdp=fsdp)
            yield kind, kind, dtype, 1, how
            if world == 2 and dtype == torch.float64: yield f"{kind}, two micro-batches", kind, dtype, 2, how
    if world == 2: yield "gemma, tied table", "gemma", torch.float64, 1, {}


def gradients_(world, folder)->list[dict]:
    return [gradient_row(world, folder/f"{world}-{i}", *case) for i, case in enumerate(gradient_cases(world))]


def gradient_row(world, folder, title, kind, dtype, parts, how)->dict:
    "One case, both sides."
    new, batches = lambda: made(kind, dtype), micro_batches(parts)
    want = gradients(new(), batches)
    found = dict(rlblocks=tried(lambda: distance(our_gradients(new(), batches, **how), want)),
                 transformers=tried(lambda: distance(their_gradients(new(), batches, folder, **how), want)))
    return dict(ranks=world, case=title, dtype=str(dtype).split(".")[1]) | found


# -- what cannot be carried out, and what else a run needs
def logits_far(net, want)->dict:
    far = (whole(net(input_ids=ids()).logits)-want).abs().max()/want.abs().max()
    return dict(logits_far=float(f"{far:.2g}"))


def uneven(**sizes):
    "A model whose heads or features two ranks cannot share, and what its logits are."
    def run(folder):
        want = made("llama", **sizes)(input_ids=ids()).logits
        new = lambda: made("llama", **sizes)
        return (lambda: logits_far(ours(new()), want)), (lambda: logits_far(theirs(new(), folder), want))
    return run


def planless(folder):
    want = made("gpt2")(input_ids=ids()).logits
    cut = lambda net: sum(p.numel()*2 for p in net.parameters() if isinstance(p, DTensor))
    def yours():
        net = theirs(made("gpt2"), folder)
        return logits_far(net, want) | dict(entries_cut=cut(net))
    return (lambda: logits_far(ours(made("gpt2")), want)), yours


def applied(net)->nn.Module:
    "transformers' own cutting, of a module that is there already (its documented way reads a folder)."
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    return apply_tensor_parallelism(net, init_device_mesh("cpu", (2,)))


def given(kind):
    "A module of the user's, in place of a folder."
    def run(folder):
        want = gradients(made(kind, torch.float64), micro_batches(1))
        return (lambda: distance(our_gradients(made(kind, torch.float64), micro_batches(1)), want)), \
               (lambda: distance(gradients(applied(made(kind, torch.float64)), micro_batches(1)), want))
    return run


def untrue_plan(folder):
    "A plan that leaves out the sum which ends the experts."
    want = made("mixtral")(input_ids=ids()).logits
    return (lambda: logits_far(ours(untrue()), want)), (lambda: logits_far(applied(untrue()), want))


def clipped(folder):
    "Clip the norm of the whole gradient, then AdamW."
    def norm(net):
        loss_of(net, ids()).backward()
        return float(whole(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.)))
    want = norm(made("qwen3", torch.float64))
    def mine():
        engine = ours(made("qwen3", torch.float64))
        engine.backward(loss_of(engine, ids()), last=True, shared=True)
        return dict(far=abs(float(engine.step(True))-want)/want)
    return mine, (lambda: dict(far=abs(norm(theirs(made("qwen3", torch.float64), folder))-want)/want))


def adapter(kind):
    "LoRA by peft: the gradients of A and B against one process."
    def run(folder):
        from peft import LoraConfig, inject_adapter_in_model
        def adapted(net):
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
            return inject_adapter_in_model(config, net)
        want = {k: g for k, g in gradients(adapted(made(kind, torch.float64)), micro_batches(1)).items() if "lora" in k}
        def mine():
            how = dict(lora=dict(r=4), optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=1.), max_norm=None),
                       device="cpu")
            moved = []
            for more in (dict(engine=plain(tensor_parallel=2)), {}):
                policy = Policy(made(kind, torch.float64), **how | more)
                before = {k: x.clone() for k, x in policy.state_dict()["module"].items()}
                for _ in range(2): policy.step(rows(B=4, T=8), lambda out, b: (out.logprobs.sum()/b.n_tokens, {}))
                moved.append({k: x - before[k] for k, x in policy.state_dict()["module"].items()})
            return distance(*moved)
        def yours():
            net = adapted(theirs(made(kind, torch.float64), folder))
            there = dict(net.named_parameters())
            for n, p in adapted(made(kind, torch.float64)).named_parameters():
                if "lora" not in n: continue
                to, x = there[n], p.detach()
                if isinstance(to, DTensor): x = distribute_tensor(x, to.device_mesh, to.placements, src_data_rank=None)
                with torch.no_grad(): to.copy_(x)
            return distance(gradients(net, micro_batches(1)), want)
        return mine, yours
    return run


def moved(kind):
    "A state saved in pieces and read by one process through torch.distributed.checkpoint."
    def run(folder):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        want = made(kind)
        def read(state, names):
            dcp.save(state, checkpoint_id=folder)
            own = {names(k): torch.zeros_like(x) for k, x in want.state_dict().items()}
            dcp.load(own, checkpoint_id=folder)
            return dict(equal=all(torch.equal(x, want.state_dict()[k]) for k, x in own.items()))
        return (lambda: read(ours(made(kind)).state(False)["module"], str)), \
               (lambda: read(get_model_state_dict(theirs(made(kind), folder/"model")), str))
    return run


LAWS = {"one key-value head on two ranks": uneven(num_key_value_heads=1),
        "63 features on two ranks": uneven(intermediate_size=63), "33 ids on two ranks": uneven(vocab_size=33),
        "a model without a plan (gpt2)": planless, "a plan that misses a sum": untrue_plan,
        "a module given, llama": given("llama"), "a module given, tied table (gemma)": given("gemma"),
        "norm of the gradient, qwen3": clipped, "LoRA, llama": adapter("llama"), "LoRA, qwen2": adapter("qwen2"),
        "a state moves to one process, llama": moved("llama"),
        "a state moves to one process, mixtral": moved("mixtral")}


def laws_(world, folder)->list[dict]:
    rows = []
    for i, (title, law) in enumerate(LAWS.items()):
        mine, yours = law(folder/f"law{i}")
        rows.append(dict(case=title, rlblocks=tried(mine), transformers=tried(yours)))
    return rows


# -- time and memory
SIZES = dict(vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
             tie_word_embeddings=False)
LARGER = dict(llama=lambda: LlamaConfig(**SIZES, intermediate_size=1408),
              qwen3_moe=lambda: Qwen3MoeConfig(**SIZES, head_dim=64, intermediate_size=1408, num_experts=8,
                                               num_experts_per_tok=2, moe_intermediate_size=352, decoder_sparse_step=1))


def larger(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(LARGER[kind]()).eval()


def local(x): return x.to_local() if isinstance(x, DTensor) else x


def kept(net, optimizer)->float:
    "MiB of weights, gradients and states that this rank keeps."
    ps = list({id(p): p for p in net.parameters()}.values())
    states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()]
    return sum(local(x).nbytes for x in (*ps, *(p.grad for p in ps if p.grad is not None), *states))/2**20


def step_(world, folder)->list[dict]: return [step_row(world, folder/kind, kind) for kind in LARGER]


def step_row(world, folder, kind)->dict:
    "Medians of seven steps, the two sides in turn."
    tokens, kept_mib, times = ids(8192, 257), {}, dict(rlblocks=[], transformers=[])
    engine = ours(larger(kind), fsdp=world//2, optimizer=lambda ps: torch.optim.AdamW([p for _, p in ps], lr=1e-4))
    net = theirs(larger(kind), folder, fsdp=world//2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
    def mine():
        engine.backward(loss_of(engine, tokens), last=True, shared=True)
        kept_mib["rlblocks"] = kept(engine.module, engine.optimizer)
        engine.step(True)
    def yours():
        loss_of(net, tokens).backward()
        kept_mib["transformers"] = kept(net, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    mine(), yours()                                    # from the second on states are there
    for _ in range(7):
        for name, f in (("rlblocks", mine), ("transformers", yours)):
            dist.barrier()
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter()-start)
    return dict(ranks=world, model=kind, parameters=sum(p.numel() for p in larger(kind).parameters()),
                tokens=tokens[:, 1:].numel(), seconds={k: round(statistics.median(x), 3) for k, x in times.items()},
                fastest={k: round(min(x), 3) for k, x in times.items()},
                kept_mib={k: round(x, 1) for k, x in kept_mib.items()})


PARTS = {2: dict(gradients=gradients_, laws=laws_, step=step_), 4: dict(gradients=gradients_, step=step_)}


def one_rank(rank, world, port, folder, only):
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    found = {name: part(world, folder) for name, part in PARTS[world].items() if only in ("", name)}
    if rank == 0: (folder/"found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def launched(world, only)->dict:
    with tempfile.TemporaryDirectory() as there, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        forked(one_rank, (world, port, Path(there), only), world)
        return json.loads((Path(there)/"found.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", *PARTS[2]])
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    args = parser.parse_args()
    path = args.out/"tensor_parallel_spike.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for world in map(int, args.worlds.split(",")):
        for name, table in launched(world, args.only).items():
            found[name] = [r for r in found.get(name, []) if r.get("ranks", world) != world] + table
            for row in table: print(json.dumps(row), flush=True)
        about = dict(date=datetime.now().date().isoformat(), cpu=platform.processor() or platform.machine(),
                     versions={k: version(k) for k in ("torch", "transformers", "peft")})
        path.write_text(json.dumps(about | {k: found[k] for k in PARTS[2] if k in found}, indent=1) + "\n")


if __name__ == "__main__": main()
