"""ZeRO-Infinity: states on a disk, really swapped. Needs libaio with its headers (apt install libaio-dev) and some
minutes of compiling, once."""
import os

import pytest
import torch
from forked import on_ranks
from rlblocks import Policy, masked_mean
from rlblocks.engines.engine import zero
from rlblocks.engines.optimizers import adamw
from tiny import APART, NEAR, model, rows


def absent():
    "What stands in the way of running this here, or ''."
    try: import deepspeed  # noqa: F401
    except ImportError: return "DeepSpeed is not installed"
    import shutil

    from deepspeed.ops.op_builder import AsyncIOBuilder
    if shutil.which(os.environ.get("CXX", "c++")) is None: return "no C++ compiler"
    if AsyncIOBuilder().is_compatible(): return ""
    return ("libaio and its headers are not there: apt install libaio-dev, or set CFLAGS, LDFLAGS, CPATH, LIBRARY_PATH "
            "and LD_LIBRARY_PATH")


LR = 1e-4
HOW = dict(optimizer=adamw(lr=LR, weight_decay=.1, max_norm=.5), device="cpu", micro_rows=4)
# 1.4 MiB of weights a rank: less than 1 MiB DeepSpeed does not swap
def net(seed=0): return model(hidden_size=128, intermediate_size=512, num_hidden_layers=3, seed=seed)
def loss(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
def weights(policy): return {k: x for bucket in policy._run.model.iter_full_params() for k, x in bucket.items()}


def one_rank(rank, world, folder):
    nvme, plain = Policy(net(), engine=zero(3, offload="nvme", nvme=str(folder)), **HOW), Policy(net(), **HOW)
    for step in range(4):
        b = rows(B=9, seed=step, dtype=torch.float32)
        a, c = nvme.step(b.parts(world)[rank], loss), plain.step(b, loss)
        assert step or abs(float(a["grad_norm"])/float(c["grad_norm"]) - 1) < APART
    want = weights(plain)
    # DeepSpeed's own AdamW, eps 1e-8: rounding may decide a whole step of a weight whose gradient is next to 0
    far = torch.cat([(x-want[k]).abs().flatten() for k, x in weights(nvme).items()])
    # no bound on the largest: four steps of Adam end within 8·lr of any other four
    assert (far > NEAR*LR).double().mean() < .01
    mine = [f for f in folder.rglob("*.swp") if f"rank{rank}" in str(f)]
    assert sum(f.stat().st_size for f in mine) > 3 << 20, mine             # fp32 weights and both moments


def test_states_on_a_disk_are_those_in_memory(tmp_path):
    if why := absent(): pytest.skip(why)
    from rlblocks.engines.zero import build_ops
    build_ops(torch.device("cpu"), "nvme")
    on_ranks(one_rank, (tmp_path,), 2)
