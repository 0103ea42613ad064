"All ranks go on, or all raise: `all_or_raise` and the three checks that are one exchange each, on two ranks."
import os
import time

import pytest
import torch
import torch.distributed as dist
from forked import forked
from rlblocks.engines.process_group import (
    agree, all_or_raise, exchange, first_error, join_world,
    leave_world, same_rows, same_weights,
)
from torch import nn


def raised(f):
    "Type and words of what `f` raises."
    try: f()
    except Exception as e: return f"{type(e).__name__}: {e}"
    return "nothing"


def each_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    bad = OSError("no space") if rank == 1 else None
    torch.manual_seed(rank)
    linear, said = nn.Linear(2, 2), {}
    said["values"] = str(all_or_raise("save", value=rank*10))
    said["other's"] = raised(lambda: all_or_raise("save", bad))
    said["kind"] = raised(lambda: all_or_raise("save", bad, kind=OSError))
    said["agree"] = raised(lambda: agree(None, "step", same=3))
    said["disagree"] = raised(lambda: agree(None, "step", same=rank))
    said["rows"] = raised(lambda: same_rows(rank, 2, "Policy"))
    said["replicas"] = raised(lambda: same_rows(rank, 1, "Policy"))
    said["weights"] = raised(lambda: same_weights(linear))
    said["in time"] = str(exchange(rank, timeout=20.))
    for r in range(2):                               # one after the other: the first stays
        dist.barrier()
        if r == rank: first_error("call/1", f"rank {rank} broke")
    dist.barrier()
    said["first"] = str(first_error("call/1"))
    said["no error"] = str(first_error("call/2"))
    torch.save(said, f"{folder}/{rank}")
    dist.barrier()
    leave_world()


def lonely(rank, folder):
    "Rank 1 leaves its error in the store and never answers; rank 0 waits no longer than it says, and has the cause."
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1:
        first_error("call/1", "rank 1 failed: no space")
        while not os.path.exists(f"{folder}/0"): time.sleep(.1)
        os._exit(0)
    started = time.monotonic()
    while not first_error("call/1"): time.sleep(.1)
    said = [raised(lambda key=key: all_or_raise("save", timeout=2., key=key)) for key in ("call/1", None)]
    torch.save((*said, time.monotonic()-started), f"{folder}/0")
    os._exit(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_go_on_or_all_raise(rank, told):
    said = told[rank]
    assert said["values"] == "[0, 10]" and said["agree"] == "nothing" and said["replicas"] == "nothing"
    assert said["in time"] == "[0, 1]"
    assert said["other's"] == ("OSError: no space" if rank else "RuntimeError: save: rank 1 failed: OSError: no space")
    assert said["kind"] == ("OSError: no space" if rank else "OSError: save: rank 1 failed: OSError: no space")
    assert "step: the ranks disagree: [0, 1]" in said["disagree"]
    assert "Policy: ranks 0 and 1 share rows, and were given unlike ones" in said["rows"]
    assert "ranks 0 and 1 built different models (weight)" in said["weights"]
    assert said["first"] == "rank 0 broke" and said["no error"] == "None"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    forked(each_rank, (str(folder),), 2)
    return [torch.load(folder/str(rank)) for rank in range(2)]


def test_a_rank_that_never_answers_is_an_error_in_time_and_the_first_error_its_cause(tmp_path):
    forked(lonely, (str(tmp_path),), 2)
    cause, unknown, seconds = torch.load(tmp_path/"0")
    assert cause == "RankLost: rank 1 failed: no space"
    assert "RankLost: save: rank 0 of 2 waits for a rank that is gone or does not answer" in unknown and seconds < 20


def test_one_process_raises_its_own():
    assert all_or_raise("save", value=7) == [7]
    with pytest.raises(OSError, match="^no space$"): all_or_raise("save", OSError("no space"))
    join_world(torch.device("cpu"))
    try: assert exchange(7) == [7]
    finally: leave_world()
