"""One loop, three pools: under torchrun the tutorials' loops give the numbers of one process, and no rank waits for
another that has failed (LAWS 24)."""
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache

import pytest
import spmd_loops
import torch
from conftest import ROOT, rarely, resident, skip_without
from forked import forked, on_ranks
from ready import RANK, Ready
from rlblocks import here

pytestmark = pytest.mark.ranks
ENV = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT/'tests'}{os.pathsep}{ROOT}")


ENV |= dict(TORCH_NCCL_ASYNC_ERROR_HANDLING="1")       # as torchrun sets it


@cache
def ready():
    "An interpreter that has torch and the pool: where the end of a process is not what a test is about."
    return resident(Ready(sys.executable, RANK + ["torch.distributed.run"], ENV)).command


def torchrun(ranks, *script, limit=900, python=None):
    program = ["--no-python", python] if python else []
    return subprocess.run([python or sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(ranks), *map(str, [*program, *script])], env=ENV, capture_output=True, text=True,
                          timeout=limit)


@pytest.fixture(scope="module")
def alone(): return {loops.__name__: spmd_loops.alone(loops) for loops in (spmd_loops.tutorials, spmd_loops.dispatch)}


@pytest.fixture(scope="module", params=[2, *rarely("torchrun", 1, 4)])
def ranks(request, tmp_path_factory):
    """What each rank of one launch saw: of two under torchrun, else of processes like those, which start at once. Under
    torchrun itself `make test` has the loops below that fail and that end."""
    folder, n = tmp_path_factory.mktemp("spmd"), 2 if request.param == "torchrun" else request.param
    if request.param != "torchrun": on_ranks(spmd_loops.on_rank, (folder,), n, group=False)
    else:
        run = torchrun(n, ROOT/"tests"/"spmd_loops.py", folder)
        assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(n)]


def same(a, b, path, tol):
    "Equal structures; floats within `tol`, everything else exactly."
    if isinstance(b, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        if b.is_floating_point():
            assert torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True), (path, (a-b).abs().max())
        else: assert torch.equal(a, b), path
    elif isinstance(b, dict):
        assert a.keys() == b.keys(), (path, a.keys() ^ b.keys())
        for k in b: same(a[k], b[k], f"{path}.{k}", tol)
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)): same(x, y, f"{path}[{i}]", tol)
    elif isinstance(b, float): assert a == pytest.approx(b, rel=tol, abs=tol, nan_ok=True), path
    else: assert a == b, path


@pytest.mark.parametrize("loop", ["grpo", "one_prompt", "ppo", "dpo"])
def test_the_tutorials_loops_give_the_numbers_of_one_process(alone, ranks, loop):
    "Metrics of every step, positions in the data and final weights, in float64; prompts and rewards to the bit."
    want = alone["tutorials"][loop]
    # the loop does something
    assert len({round(row["loss"], 6) for row in want["shown"]}) > 1 and want["shown"][-1]["version"] > 1
    for rank in ranks:
        got = rank["tutorials"][loop]
        same(got, want, loop, 1e-9)
        assert [row.get("reward") for row in got["shown"]] == [row.get("reward") for row in want["shown"]]
        assert got["taken"] == want["taken"]


def test_every_kind_of_call_is_answered_as_in_one_process(alone, ranks):
    # Adam, eps 1e-8: an error of 1e-15 of a gradient moves a weight by up to 2·lr·1e-7 a step
    for rank in ranks: same(rank["dispatch"], alone["dispatch"], "dispatch", 1e-7)
    drawn = [rank["dispatch"]["generated"] for rank in ranks]
    for x in drawn:
        for name in ("tokens", "completion", "group", "sample", "mask"):
            assert str(x[name]) == str(alone["dispatch"]["generated"][name]), name


def test_ranks_hold_equal_weights(ranks):
    for rank in ranks[1:]:
        for name, w in rank["dispatch"]["state"].items():
            assert torch.equal(w, ranks[0]["dispatch"]["state"][name]), name


def test_a_failure_on_one_rank_is_heard_on_all(ranks):
    "With rank, method, class and text; and the pool goes on."
    if len(ranks) == 1: pytest.skip("needs two ranks")
    for r, rank in enumerate(ranks):
        said = rank["failures"]
        assert "KeyError: 'no such thing as" in said["raised"]
        assert said["private"].startswith("AttributeError: Echo._n is private")
        other = "" if r == 1 else f"RuntimeError: place(Broken) failed on rank 1 of {len(ranks)}: "
        assert f"{other}OSError: disk on fire" in said["place"]
        unlike = "unlike arguments to Echo.add (argument 0, column 'tokens'): rank 0: [4, 7] int64"
        for what, words in dict(unlike_batch=unlike, unlike_list="column 'answer'): rank 0: ['50'",
                                unlike_number="(argument 'more'): rank 0: 0; rank 1: 1",
                                unlike_method="unlike calls: rank 0: Echo.add",
                                unlike_object="unlike calls: rank 0: Echo.add of placed object").items():
            assert said[what].startswith("ValueError: SpmdPool: the ranks") and words in said[what]
            assert "Every rank runs every line" in said[what]
        assert "TypeError: Echo.number: a int cannot be joined" in said["a_number"]
        assert "inside a list is not cut" in said["a_list"] and "one of the 3 parts" in said["part"]
        assert torch.equal(said["after"], spmd_loops.prompts((5, 2, 7, 3)).tokens)


def test_ranks_of_a_replica_share_their_rows(ranks):
    "They are given the same, and the lowest of them answers."
    if len(ranks) == 1: pytest.skip("needs two ranks")
    saw = [rank["replicas"]["saw"] for rank in ranks]
    for rank in ranks:
        got = rank["replicas"]
        shared, alone, silent = got["tokens"]
        # prompts computed once: groups stay together
        assert alone == silent and (len(ranks) > 2 or (shared == [42, 42, 40, 40] and alone == [41]*4))
        assert set(got["who"].tolist()) == ({0} if len(ranks) == 2 else {0, 2}) and got["total"] == 17
        assert got["answers"] == [f"{x}{w}" for x, w in zip("5273", got["who"].tolist(), strict=True)]
    assert all(saw[r] == saw[r - r % 2] for r in range(len(ranks)))
    assert sorted(x for r in range(0, len(ranks), 2) for x in saw[r]) == ["2", "3", "5", "7"]


def test_consumers_stop_together(ranks):
    """Rank 0 sees the rows; where it stops, every rank's loop is closed after the same step. The save that it asked
    for is made by all ranks, and a second run goes on from there."""
    if len(ranks) == 1: pytest.skip("needs two ranks")
    assert ranks[0]["stopped"] == ([0, 1, 2], ["step-00000002"], [2, 3])
    assert all(rank["stopped"] == ([], ["step-00000002"], []) for rank in ranks[1:])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    "What each of two ranks saw of calls that they begin."
    folder = tmp_path_factory.mktemp("begun")
    on_ranks(spmd_loops.begun_on_rank, (folder,), 2, group=False, limit=300)
    return [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(2)]


def test_later_gives_the_rows_of_a_call_and_each_rank_draws_its_part(begun):
    "Whatever is called between; but for the versions, which rows under way have for each token."
    alone = spmd_loops.begun(here)
    of_rows = lambda columns: {k: x for k, x in columns.items() if k != "policy_version"}
    for rank in begun:
        got = rank["begun"]
        same(got, alone | dict(own=got["own"]), "begun", 1e-9)
        for x, now in (("rows", "called"), ("second", "few")): same(of_rows(got[x]), of_rows(got[now]), x, 1e-9)
        assert len(got["rows"]["tokens"]) == 12 and got["rows"]["policy_version"].shape == got["rows"]["tokens"].shape
        assert len(got["own"]) == 6 and len(set(got["own"])) == 2, "two of four prompts, three rows each"
    assert alone["own"] == alone["rows"]["answer"]
    assert sorted(begun[0]["begun"]["own"] + begun[1]["begun"]["own"]) == sorted(alone["own"])


def test_an_error_of_a_call_begun_by_later_is_raised_by_its_result(begun):
    "On all ranks, with who failed; in the beginning it is raised at once. The pool goes on."
    heard = [rank["errors"]["result"] for rank in begun]
    failed = [h.startswith("OSError: cannot read ") for h in heard]
    assert sorted(failed) == [False, True], heard
    assert [rank["errors"]["again"] for rank in begun] == heard, "asked again, it is raised again"
    r = failed.index(True)
    assert f"RuntimeError: Threaded.names failed on rank {r} of 2: OSError: cannot read " in heard[1-r]
    for rank in begun:
        got = rank["errors"]
        assert "KeyError: 'no such thing as" in got["beginning"]
        assert "unlike calls: rank 0: Threaded.names, the answer of call" in got["order"]
        assert got["good"] == got["after"][0] == got["after"][1] == ["5!", "2!", "7!", "3!"]


DEPARTURES = dict(
    raises_between=("if pool.rank == 1: raise OSError('no space left')",
                    "rank 1 has left the loop with OSError: no space left, while rank 0 is at Pair.meet"),
    ends_early=("if pool.rank == 1: raise SystemExit(0)", "rank 1 has left the loop, while rank 0 is at Pair.meet"),
    fails_in_a_collective=("pair.broken = pool.rank == 1", "Pair.meet failed on rank 1 of 2: OSError: link down"),
    consumer_fails=("if pool.rank == 0: fail = True", "OSError: the printer is out of paper"),
)


@pytest.mark.parametrize("how", ["raises_between", "fails_in_a_collective", *rarely("ends_early", "consumer_fails")])
def test_nobody_waits_for_a_rank_that_is_gone(tmp_path, how):
    "Whatever way one rank goes, the other hears why within seconds, not after the timeout."
    line, words = DEPARTURES[how]
    (tmp_path/"loop.py").write_text(f"""
import torch, torch.distributed as dist
from rlblocks import Batch
from rlblocks.placement.spmd import SpmdPool

class Pair:
    broken = False
    def meet(self, b):
        if self.broken: raise OSError("link down")
        dist.all_reduce(torch.ones(1))
        return b.tokens

fail = False
def loop(pool):
    global fail
    pair, b = pool.place(Pair), Batch(tokens=torch.arange(8).view(4, 2))
    for step in range(4):
        if step == 2:
            {line}
        pair.meet(b)
        yield step

pool = SpmdPool(timeout=600, grace=2)
try:
    for row in pool.watch(loop(pool)):
        if fail: raise OSError("the printer is out of paper")
except (RuntimeError, OSError) as e:
    print(f"rank {{pool.rank}} heard: {{e}}", flush=True)
    raise
""")
    start = time.monotonic()
    run = torchrun(2, tmp_path/"loop.py", limit=300, python=ready())
    assert run.returncode != 0 or how == "ends_early"
    assert words in run.stdout + run.stderr, run.stdout + run.stderr[-2000:]
    # torchrun's last screen says why
    if run.returncode: assert words.split(",")[0].split(": ")[-1] in run.stderr.rpartition(" FAILED")[2], run.stderr
    assert time.monotonic() - start < 300            # the timeout is 600


def launch(script, rank, port, ranks=2):
    "One rank of a world whose store rank 0 keeps, which torchrun's agent would otherwise."
    env = ENV | dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=str(port))
    return subprocess.Popen([ready(), "-c", script], env=env, stderr=subprocess.PIPE, text=True)


FREEZE = """
import os, signal
import torch
from rlblocks import Batch, SpmdPool

class Echo:
    def same(self, b): return b.x
    def freeze(self, b, rank):
        if rank == pool.rank: os.kill(os.getpid(), signal.SIGSTOP)
        return b.x

with SpmdPool(timeout=300, grace=2) as pool:
    echo, b = pool.place(Echo), Batch(x=torch.arange(4))
    echo.same(b)
    pool.timeout = 3.       # from here on all ranks are there
    echo.freeze(b, {frozen})
"""


@pytest.mark.parametrize("frozen", [0, *rarely(1)])
def test_nobody_waits_for_ever_for_a_rank_that_is_frozen(frozen):
    "Rank 0 keeps the store: asking it for an error has a deadline too."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [launch(FREEZE.replace("{frozen}", str(frozen)), r, port) for r in range(2)]
    try:
        # 3 s + 2 s + what starting takes; without a deadline for ever
        said = ranks[1-frozen].communicate(timeout=200)[1]
        assert ranks[1-frozen].returncode > 0 and "a rank that is gone or does not answer" in said, said[-3000:]
        assert ranks[frozen].poll() is None
    finally:
        for rank in ranks: rank.send_signal(signal.SIGKILL)
        for rank in ranks: rank.communicate()


def test_nobody_waits_for_ever_for_a_world_that_does_not_answer():
    "Where the store should be something accepts connections, and is silent."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        rank = launch("from rlblocks import SpmdPool; SpmdPool(timeout=2, grace=1)", 1, s.getsockname()[1])
        try: said = rank.communicate(timeout=200)[1]
        finally: rank.kill()
    assert rank.returncode > 0, said[-3000:]
    assert "TimeoutError: SpmdPool, joining the world: no answer within 3 s" in said, said[-3000:]


LEAVING = """
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
import torch
import torch.distributed as dist
from rlblocks import Policy, here, ppo_loss
from rlblocks.engines.process_group import leave_world
from rlblocks.placement.spmd import SpmdPool
from tiny import model, rows

def loss(out, b): return ppo_loss(out.logprobs, b.ref_logprobs, b.advantages, b.mask, denom=b.n_tokens)

def loop(pool, **how):
    policy, b = pool.place(Policy, model(), lr=1e-3, **how), rows(B=4, dtype=torch.float32)
    for step in range(2):
        for bucket in policy.weights().buckets(1 << 20): del bucket
        b["ref_logprobs"] = policy.logprobs(b)
        yield policy.step(b, loss)

class Echo:
    def same(self, b): return b.tokens

def gloo():
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):     # gone by now
            if "gloo" in (task/"comm").read_text(): found.append(int(task.name))
    return found

def last():
    # From here on gloo's threads come last: on one core with the main one, behind it, and without the interpreter's
    # lock until that one waits. The race that is lost now and then, nearly always.
    sys.setswitchinterval(60)
    for thread in gloo(): os.setpriority(os.PRIO_PROCESS, thread, 19)
    if hasattr(os, "sched_setaffinity"):
        for thread in (0, *gloo()): os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})

"""

ENDINGS = dict(
    with_a_pool=(2, """
with SpmdPool() as pool: last(), pool.place(Echo).same(rows(B=4))
end = time.monotonic() + 20
while gloo() and time.monotonic() < end: time.sleep(.05)        # the kernel's list of them lags behind
assert not gloo()"""),
    zero3=(2, """
from rlblocks import zero
with SpmdPool() as pool: list(pool.watch(loop(pool, engine=zero(3, sequence_parallel=2)))), last()"""),
    never_closed=(2, "pool = SpmdPool()\nlist(pool.watch(loop(pool, engine='fsdp2'))), last()"),
    a_world_of_ones_own=(2, """
dist.init_process_group('gloo')
with SpmdPool() as pool: list(loop(pool)), last()
leave_world()"""),
    alone=(0, "rows = list(loop(here, engine='zero3')), last()"),
)


@pytest.mark.parametrize("ending", ["never_closed", *rarely("zero3", "with_a_pool", "a_world_of_ones_own", "alone")])
def test_a_run_that_succeeds_ends_with_success(tmp_path, ending):
    "Exit code 0, and no last word from C++; nor from libraries about what only they can mend."
    n, lines = ENDINGS[ending]
    if "zero" in lines: skip_without("deepspeed")
    (tmp_path/"loop.py").write_text(f"{LEAVING}{lines}\n")
    run = torchrun(n, tmp_path/"loop.py") if n else subprocess.run([sys.executable, tmp_path/"loop.py"], env=ENV,
                                                                   capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and "terminate called" not in run.stderr, run.stderr[-3000:]
    assert not any(said in run.stderr for said in ("FutureWarning: `torch.distributed", "gemm_4bit")), run.stderr


def one_process(_):
    from rlblocks.placement.spmd import SpmdPool
    with pytest.warns(UserWarning, match="trains alone; for N processes: torchrun --nproc-per-node N"):
        pool = SpmdPool()
    with pool:
        echo = pool.place(spmd_loops.Echo, 2)
        assert type(echo) is spmd_loops.Echo and list(pool.watch(range(3))) == [0, 1, 2]
        assert (pool.rank, pool.ranks) == (0, 1)


def test_without_torchrun_it_is_one_process(): forked(one_process, (), 1)    # this process may be in a world
