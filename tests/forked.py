"""Processes of a test, forked from one that has imported the libraries.

A rank or a notebook then starts in a tenth of a second instead of seven. A fork is safe there because that process only
imports: it has computed nothing and opened no group, and its one thread is numpy's, which knows of forks. It has the
rooms of rlblocks that ranks use, too; where rlblocks is imported under a type checker, `forget` it first."""
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

LIBRARIES = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel",
             "torch.distributed.run", "torch._dynamo",
             "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft", "deepspeed",
             "jaxtyping", "beartype", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "nbdev.test", "pytest",
             "hypothesis.strategies",
             "torch._decomp.decompositions_for_jvp"]    # what the first check_loss of a process would import, .6 s
ROOMS = "arithmetic signals losses data engines models checkpoint rollout samplers graders placement".split()
OURS = [f"rlblocks.{room}.{file.stem}" for room in ROOMS
        for file in sorted((Path(__file__).resolve().parents[1]/"rlblocks"/room).glob("[a-z]*.py"))]

RESIDENT = []       # ids of processes that stay, and fork others themselves


def context():
    "Where processes are forked from one that has the libraries; it starts when it is first needed."
    multiprocessing.set_forkserver_preload(LIBRARIES + OURS)
    # DeepSpeed looks for devices when it is imported: not before a fork
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"): forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def forget():
    "rlblocks is as if it had never been imported."
    for name in [x for x in sys.modules if x.partition(".")[0] == "rlblocks"]: del sys.modules[name]


def forked(run, args, ranks, limit=900):
    """run(rank, *args) in so many processes; an error in one ends all of them and is raised here, as is a limit in
    seconds that passes."""
    context()
    group = start_processes(begin, (run, *args), nprocs=ranks, join=False, start_method="forkserver")
    end = time.monotonic() + limit
    while not group.join(timeout=max(.1, end - time.monotonic())):
        if time.monotonic() < end: continue
        alive = [r for r, p in enumerate(group.processes) if p.is_alive()]
        # faulthandler says where they are
        for p in group.processes: os.kill(p.pid, signal.SIGABRT) if p.is_alive() else None
        for p in group.processes: p.join(10) or p.kill()
        raise TimeoutError(f"{run.__module__}.{run.__name__}: ranks {alive} of {ranks} were not done after {limit} s")


def begin(rank, run, *args):
    """What the libraries have made stays: a garbage collection looks at a test's own objects. It takes half a second
    for all those of the libraries, and DeepSpeed collects whenever it makes an engine."""
    gc.freeze()
    run(rank, *args)


def on_ranks(run, args, ranks, limit=900, group=True):
    """run(rank, ranks, *args) in so many processes that form a world: gloo, one thread each, their environment as
    torchrun sets it; without `group` they form it themselves."""
    with socket.socket() as s:
        # bound until they are done: nobody else is given the port before rank 0 listens there
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        forked(member, (ranks, s.getsockname()[1], run, args, group), ranks, limit)


def member(rank, ranks, port, run, args, group):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(ranks))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    if group: dist.init_process_group("gloo", rank=rank, world_size=ranks)
    run(rank, ranks, *args)
    if group: dist.barrier()
    sys.stdout.flush()
    # all is checked and written; a gloo thread that still lets go of a tensor while the interpreter ends would abort it
    # (nbs/placement/01_spmd, Leaving)
    os._exit(0)
