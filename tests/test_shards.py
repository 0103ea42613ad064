"States that no process holds whole: saved in shards by one number of ranks, read by another, by another stage of ZeRO, and by one process that has no ranks at all."
import os
import shutil
import socket
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rlblocks import Checkpoint, Policy, masked_mean
from tiny import model, rows

pytest.importorskip("deepspeed")
HOW = dict(lr=1e-2, weight_decay=.1, max_norm=.5, device="cpu", micro_rows=4)
STEPS = 4
SAVED = dict(fsdp2=["fsdp2"], zero1=["zero1", "zero3"], zero2=["zero2"], zero3=["zero3", "zero1"])     # engine that saved → engines that go on


def net():
    "Tied weights, and frozen ones: a norm and a projection."
    m = model("gemma")
    for name, p in m.named_parameters(): p.requires_grad_("layers.0.mlp.up_proj" not in name and "layers.1.input_layernorm" not in name)
    return m


def moved():
    "The same with other weights, frozen ones too."
    m = net()
    with torch.no_grad():
        for p in m.parameters(): p.add_(.1)
    return m


def loss(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
def weights(policy): return {k: x for bucket in policy._run.model.iter_full_params() for k, x in bucket.items()}


def trained(policy, steps, world=1, rank=0, checkpoint=Checkpoint()):
    for step in checkpoint(steps, policy=policy):
        b = rows(B=9, seed=step, dtype=torch.float32)
        policy.step(b.parts(world)[rank] if world > 1 else b, loss)
    return weights(policy)


def save(world, rank, folder):
    "Two steps with each engine, a save after each, in the background or not."
    for engine in SAVED: trained(Policy(net(), engine=engine, **HOW), 2, world, rank, Checkpoint(folder/f"{world}-{engine}", every=1, background=engine == "zero2"))


def go_on(world, rank, folder, *, saved_by):
    "To the end, from what another number of ranks saved, into a model with other weights."
    found = {}
    for engine, others in SAVED.items():
        for other in others:
            mine = folder/f"{saved_by}-{engine}-on-{world}-{other}"
            if rank == 0: shutil.copytree(folder/f"{saved_by}-{engine}", mine)
            dist.barrier()
            policy = Policy(moved(), engine=other, **HOW)
            found[engine, other] = trained(policy, STEPS, world, rank, Checkpoint(mine)), policy.version
    return found


def before_the_first_step(world, rank, folder):
    "A state that is looked at changes nothing; loaded, it is that of an optimizer that has not stepped."
    found = {}
    for engine in SAVED:
        looked, again = Policy(net(), engine=engine, **HOW), Policy(moved(), engine=engine, **HOW)
        again.load_state_dict(looked.state_dict(full=False))
        found[engine] = trained(looked, 2, world, rank), trained(again, 2, world, rank)
    return found


def one_rank(rank, world, port, jobs, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = [job(world, rank, folder) for job in jobs]
    if rank == 0: torch.save(found, folder/"found.pt")
    dist.barrier()
    os._exit(0)         # all is checked and written; gloo's threads abort now and then when peers take their connections down at different times


def launch(world, jobs, folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(one_rank, (world, port, jobs, folder), nprocs=world, join=True)
    return torch.load(folder/"found.pt", weights_only=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Two ranks have saved, then one."
    folder = tmp_path_factory.mktemp("shards")
    folder.fresh = None
    return folder


@pytest.fixture(scope="module")
def plain(): return trained(Policy(net(), **HOW), STEPS)


def far(a, b):
    assert a.keys() == b.keys()
    return max((a[k]-x).abs().max().item() for k, x in b.items())


def test_another_number_of_ranks_goes_on(tmp_path_factory, plain):
    "ZeRO-1 on two ranks goes on as ZeRO-3 on one, and so on: weights after four steps are those of one plain process."
    folder = tmp_path_factory.mktemp("shards")
    fresh, _ = launch(2, [before_the_first_step, save], folder)
    _, on_one = launch(1, [save, partial(go_on, saved_by=2)], folder)
    on_two, = launch(2, [partial(go_on, saved_by=1)], folder)
    half = trained(Policy(net(), **HOW), 2)
    for engine, found in fresh.items():
        for x in found: assert far(x, half) < 1e-5, engine
    for found in (on_one, on_two):
        assert len(found) == 6
        for case, (x, version) in found.items(): assert version == STEPS and far(x, plain) < 1e-5, case
    save_of = lambda engine: next((folder/f"2-{engine}").glob("step-00000002"))
    for engine in SAVED:
        parts = sorted(f.stat().st_size for f in (save_of(engine)/"shards").glob("__*"))
        assert len(parts) == 2 and parts[0] > .4*parts[1] and (save_of(engine)/"policy.pt").stat().st_size < 60_000, engine      # each rank wrote about half
