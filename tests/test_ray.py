"""RayPool: the tutorials' loops on a Ray cluster give the numbers of one process, and to the bit those of SpmdPool on
as many ranks; what goes wrong is said once, by name (LAWS 24, 39)."""
import asyncio
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import spmd_loops
import torch
from conftest import RAY_TOKEN, ROOT, rarely, ray_python
from forked import on_ranks
from rlblocks import (
    Batch, Checkpoint, Cluster, Flight, Policy, Pools, Prompts, RayPool, Rollout, here, later, loop_from, timed
)
from rlblocks.engines.weights import InProcess, Ticket
from rlblocks.engines.process_group import RankLost
from rlblocks.placement.ray_ranks import Rank
from rlblocks.placement.restarts import RankSilent
from spmd_loops import Echo, net
from test_spmd import same
from tiny import NEAR, prompts, rows

# tests/conftest.py sets the token: Ray reads it when it is imported, by whichever test comes first
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]
ENV = RAY_TOKEN | dict(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1",
                      PYTHONPATH=f"{ROOT/'tests'}{os.pathsep}{ROOT}")


def options(folder):
    "A small Ray of one's own; its sockets want a short path."
    return dict(num_cpus=8, include_dashboard=False, object_store_memory=150_000_000, _temp_dir=folder,
                logging_level="ERROR", log_to_driver=False)


@pytest.fixture(scope="module")
def cluster():
    "A Ray with a token, whose processes end with this module."
    import ray
    folder = tempfile.mkdtemp(prefix="ray")
    with pytest.MonkeyPatch.context() as patch:
        for k, x in ENV.items(): patch.setenv(k, x)
        yield Cluster(options=options(folder), ready=60., runtime_env=dict(py_executable=ray_python()))
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def two(cluster):
    with RayPool(2, cluster=cluster, timeout=300., name="two") as pool: yield pool


@pytest.fixture(scope="module")
def one(cluster):
    with RayPool(1, cluster=cluster, timeout=300., name="one") as pool: yield pool


@pytest.fixture(scope="module")
def three(cluster):
    with RayPool(3, cluster=cluster, timeout=300., name="three") as pool: yield pool


@pytest.fixture(scope="module")
def loops(two): return spmd_loops.tutorials(two)


@pytest.fixture(scope="module")
def cut(two): return spmd_loops.engines(two)


@pytest.fixture(scope="module")
def uncut(): return spmd_loops.alone(spmd_loops.engines)


# -- the same numbers

def test_the_tutorials_loops_give_the_numbers_of_one_process(loops):
    """GRPO, one step off, one prompt, PPO and DPO, unchanged, in float64: metrics, positions in the data and final
    weights."""
    want = spmd_loops.alone(spmd_loops.tutorials)
    assert all(want[name]["shown"][-1]["version"] > 1 for name in want)
    same(loops, want, "tutorials", 1e-10)


@pytest.mark.long
def test_the_other_tutorials_give_the_numbers_of_one_process(two):
    "SFT, KTO, a reward model, best of n, RLHF."
    same(spmd_loops.more_tutorials(two), spmd_loops.more_tutorials(here), "tutorials", 1e-10)


def check_rounding(got, want, path):
    "Of fp32: what every step shows, and the weights after it, which `steady` steps of lr 2e-3 lead to."
    same(got["shown"], want["shown"], path, 1e-5)
    same(got["weights"], want["weights"], path, NEAR*2e-3)


@pytest.mark.long
def test_in_fp32_ranks_differ_from_one_process_by_rounding(two):
    "Rounding decides no step, so no loop amplifies it: the most that was seen is 5e-7, in the third step."
    got, want = (spmd_loops.tutorials(pool, spmd_loops.single) for pool in (two, here))
    assert got.keys() == want.keys()
    for name in want:
        check_rounding(got[name], want[name], name)
        assert got[name]["taken"] == want[name]["taken"]


@pytest.mark.long
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_zero_gives_the_numbers_of_one_process(two):
    "DeepSpeed has no float64."
    got, want = (spmd_loops.engines(pool, ["zero1"], net=spmd_loops.single)["zero1"] for pool in (two, here))
    check_rounding(got, want, "zero1")


def test_one_rank_gives_the_numbers_of_one_process(one):
    same(spmd_loops.dispatch(one), spmd_loops.alone(spmd_loops.dispatch), "dispatch", 1e-10)


@pytest.mark.parametrize("every", [False, *rarely(True)])
def test_as_many_ranks_of_spmd_pool_give_the_same_bits(request, cut, tmp_path, every):
    on_ranks(spmd_loops.loops_on_rank, (tmp_path, tuple(spmd_loops.ENGINES), every), 2, group=False, limit=300)
    tutorials, engines = torch.load(tmp_path/"0.pt", weights_only=False)
    same(request.getfixturevalue("loops") if every else {}, tutorials, "tutorials", 0.)
    same(cut, engines, "engines", 0.)


def test_engines_that_cut_weights_give_the_numbers_of_one_process(cut, uncut):
    "Sharded, and every layer cut; 15 rows on two ranks."
    same(cut, uncut, "engines", 1e-10)


@pytest.mark.long       # `make test` has one rank and two, which cannot share 15 rows evenly either
def test_three_ranks_give_the_numbers_of_one_process(three, uncut):
    same(spmd_loops.tutorials(three), spmd_loops.alone(spmd_loops.tutorials), "tutorials", 1e-10)
    same(spmd_loops.engines(three, ["fsdp2"]), dict(fsdp2=uncut["fsdp2"]), "three ranks", 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_other_numbers_of_ranks_give_the_numbers_of_one_process_and_the_bits_of_spmd_pool(cluster, tmp_path, ranks):
    "Pairs, one prompt for all ranks, rows that they cannot share evenly; engines that are plain and that shard."
    with RayPool(ranks, cpus=.1, cluster=cluster, timeout=300., name="many") as pool:
        got = spmd_loops.tutorials(pool), spmd_loops.engines(pool, ["fsdp2"])
    same(got, (spmd_loops.alone(spmd_loops.tutorials), spmd_loops.engines(here, ["fsdp2"])), f"{ranks} ranks", 1e-10)
    on_ranks(spmd_loops.loops_on_rank, (tmp_path, ["fsdp2"]), ranks, group=False, limit=300)
    same(got, torch.load(tmp_path/"0.pt", weights_only=False), f"{ranks} ranks", 0.)


# -- saves

def saved_by(folder): return sorted(f.name for f in Path(folder).glob("step-*/shards/*.distcp"))


@pytest.mark.parametrize("others", [["one"], *rarely(["three", "one"])], ids=" ".join)
def test_what_ranks_hold_is_saved_and_restored_there(two, others, request, tmp_path, monkeypatch, cut):
    """Stopped, and gone on with on the same and on other numbers of ranks: to the bit, or as one process. No state
    passes through this process, and a relative path means its folder."""
    pools = {name: request.getfixturevalue(name) for name in others}
    monkeypatch.chdir(tmp_path)
    for pool in (two, *pools.values()): pool.calls.seen.clear()
    spmd_loops.engines(two, ["fsdp2"], Checkpoint("run", every=2), steps=2)
    assert saved_by("run") == ["__0_0.distcp", "__1_0.distcp"]
    for name in others: shutil.copytree("run", name)
    want = cut["fsdp2"]["shown"][2:]
    for pool, folder, tol in ((two, "run", 0.), *((pool, name, 1e-10) for name, pool in pools.items())):
        got = spmd_loops.engines(pool, ["fsdp2"], Checkpoint(folder, every=2), steps=3)["fsdp2"]["shown"]
        same(got, want, folder, tol)
        phases = {row["call"] for row in pool.report()}
        assert {"Keeper.check", "Keeper.read", "Keeper.write"} <= phases
        assert "Policy.load_state_dict" not in phases


def test_parts_on_two_pools_have_folders_of_their_own_in_a_save(two, one, tmp_path):
    def parts(seed):
        return {name: pool.place(Policy, net(seed=seed + i), engine="fsdp2", lr=1e-2)
                for i, (name, pool) in enumerate(dict(policy=two, proposer=one).items())}
    saved, fresh, b = parts(3), parts(5), rows(B=4)
    Checkpoint(tmp_path/"run").save(1, saved)
    assert {f.parent.name: f.name for f in sorted((tmp_path/"run").glob("step-*/*/__*"))} == {
        "shards": "__1_0.distcp", "shards-1": "__0_0.distcp"}
    assert Checkpoint(tmp_path/"run").restore(fresh) == 1
    for name, part in fresh.items(): assert torch.equal(part.logprobs(b), saved[name].logprobs(b))


def test_a_folder_that_ranks_do_not_see(two, tmp_path, monkeypatch, cut):
    "States pass through this process, which says so of large ones; shards that others wrote cannot be had."
    from rlblocks.checkpoint import keeper
    monkeypatch.chdir(tmp_path)          # the ranks stay where they are
    monkeypatch.setattr(keeper, "LARGE_STATE", 1000)
    def run(folder, steps):
        return spmd_loops.engines(two, ["fsdp2"], Checkpoint(folder, every=1), steps)["fsdp2"]["shown"]
    with pytest.warns(UserWarning, match=r"the state of 'policy', .* GB, passes through this process, since not every "
                      r"rank of RayPool\(2 ranks\) sees /proc/self/cwd/run"): run("/proc/self/cwd/run", 2)
    assert not saved_by("run")
    with pytest.warns(UserWarning, match="passes through"): again = run("/proc/self/cwd/run", 3)
    same(again, cut["fsdp2"]["shown"][2:], "unseen", 0.)
    run("seen", 1)
    with pytest.raises(ValueError, match="not all ranks that hold it now see /proc/self/cwd/seen"):
        run("/proc/self/cwd/seen", 2)


def test_a_folder_that_ranks_do_not_see_is_said_at_the_start(two, tmp_path, monkeypatch, caplog):
    "Before the first step, by a file that each rank reads; nothing is said of one that they see."
    monkeypatch.chdir(tmp_path)
    policy = two.place(Policy, net)
    for folder in (tmp_path/"seen", "/proc/self/cwd/run"):
        steps = Checkpoint(folder, every=100)(3, policy=policy)
        next(steps)
        said = [r.getMessage() for r in caplog.records]
        steps.close()
        assert any("not every rank of RayPool(2 ranks) sees /proc/self/cwd/run; states of 'policy'" in x
                   for x in said) == (folder != tmp_path/"seen"), said
        assert folder == tmp_path/"seen" or not any("seen;" in x for x in said)


def test_every_kind_of_call_is_answered_as_in_one_process(two):
    # Adam, eps 1e-8: see tests/test_spmd.py
    same(spmd_loops.dispatch(two), spmd_loops.alone(spmd_loops.dispatch), "dispatch", 1e-7)


# -- what travels

class Keeps:
    "Says what it was given."
    def same(self, f, g): return f is g, id(f)
    def run(self, f, b): return f(b)
    def method(self, f, b): return f(b)
    def spoil(self, b): return b.tokens.fill_(0)
    def warns(self):
        warnings.warn("the learning rate is odd", RuntimeWarning, stacklevel=1)
        return 1
    def sleeps(self, path):
        Path(path).touch()
        time.sleep(2)
        return 2
    def step(self, path): return self.sleeps(path)
    def cancelled(self): raise asyncio.CancelledError("no more")
    def pid(self): return os.getpid()
    def in_main_thread(self): return threading.current_thread() is threading.main_thread()
    def title(self): return Path("/proc/self/cmdline").read_text()
    def pids(self, b): return torch.full((len(b),), os.getpid())
    def dies(self, b, n):
        if int(os.environ["RANK"]) == n:
            sys.stderr.write("out of luck\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return b.tokens


def test_handles_methods_and_functions_arrive_as_the_ranks_own(two):
    keeps, policy, b = two.place(Keeps), two.place(Policy, net(), lr=1e-3), rows(B=5)
    want = Policy(net(), lr=1e-3).logprobs(b)
    for got in (keeps.run(lambda b: policy.logprobs(b), b), keeps.method(policy.logprobs, b)):
        assert (got - want).abs().max() < 1e-10
    clip = lambda x: (lambda b: b.lengths.clamp(max=x))
    (alike, first), (_, again), (_, other) = (keeps.same(clip(x), clip(x)) for x in (3, 3, 4))
    assert alike and first == again != other      # one object for each content
    table = torch.zeros(1 << 20)
    with pytest.raises(ValueError, match="captures 'table', a Tensor of 4.2 MB"):
        keeps.run(lambda b: table[b.tokens], b)
    tokens = b.tokens.clone()
    assert not keeps.spoil(b).any() and torch.equal(b.tokens, tokens), "what arrives is the rank's own"
    with pytest.raises(AttributeError, match="Policy._run is private"): _ = policy._run
    assert keeps.in_main_thread(), "graders may set signals, as math-verify does"
    assert policy.logprobs.__doc__ == Policy.logprobs.__doc__ and "step" in dir(policy)


def test_weights_go_to_another_pool_and_come_here(one, two):
    "Through the store, with their proof; a handle itself does not go."
    policy, rollout = two.place(Policy, net(seed=3)), one.place(Rollout, net(), max_tokens=4)
    mine, ticket = Rollout(net(), max_tokens=4), policy.weights()
    for receiver in (rollout, mine):
        manifest = receiver.load(ticket)
        assert manifest.version == 0 and manifest.n_messages >= 1
    want = Rollout(net(seed=3), max_tokens=4).generate(prompts(), seed=1)
    for receiver in (rollout, mine): assert torch.equal(receiver.generate(prompts(), seed=1).tokens, want.tokens)
    keeps = one.place(Keeps)
    with pytest.raises(ValueError, match="a Policy on RayPool.2 ranks. was handed to another pool"):
        keeps.run(policy, prompts())


class Torn(Rollout):
    "A rollout whose first load ends in the middle."
    def load(self, ticket):
        if not hasattr(self, "tried"):
            self.tried = next(ticket.buckets(1 << 20))
            raise OSError("the link is gone")
        return super().load(ticket)


def test_a_load_that_fails_is_heard_and_can_be_repeated(one, two):
    "LAWS 14: neither pool hangs, and the next load is whole."
    policy, rollout = two.place(Policy, net(seed=3)), one.place(Torn, net(), max_tokens=4)
    with pytest.raises(OSError, match="the link is gone") as e: rollout.load(policy.weights())
    assert "in Torn.load on rank 0" in "\n".join(e.value.__notes__)
    assert rollout.load(policy.weights()).version == 0
    want = Rollout(net(seed=3), max_tokens=4).generate(prompts(), seed=1)
    assert torch.equal(rollout.generate(prompts(), seed=1).tokens, want.tokens)


def test_rows_of_the_next_step_are_drawn_on_another_pool_while_this_one_trains(one, two):
    "The asynchronous layout: the loop of one process, to 1e-10, and every row one step old. (LAWS 38)"
    loop = loop_from(f"{ROOT}/tutorials/async.ipynb:async_grpo")
    def run(pool):
        rows = loop(pool, Prompts(spmd_loops.ASKED, spmd_loops.Digits()), spmd_loops.prefers, model=net, prompts=4,
                    engine=spmd_loops.steadily, group_size=3, minibatches=2, max_tokens=4, steps=3, micro_tokens=64)
        return [{k: float(v) for k, v in row.items() if k not in spmd_loops.TIMES} for row in rows]
    got = run(Pools(lambda make, how: one if make is Rollout else two))
    same(got, run(here), "asynchronous", 1e-10)
    assert [row["staleness"] for row in got] == [0, 1, 1]


def test_a_flight_over_a_pool_gives_the_rows_of_generate(two):
    "In the order of asking, of the version that was loaded before; what has failed is asked for again."
    policy, rollout, p = two.place(Policy, net(seed=3)), two.place(Rollout, net(), max_tokens=4), prompts((5, 2, 7, 3))
    alone, flight = Rollout(net(), max_tokens=4), Flight(rollout)
    flight.ask(p[[0, 1, 2]], group_size=2, seed=1)
    flight.ask(p[[3]], group_size=2, seed=1)
    rollout.load(policy.weights())
    assert flight.versions == [0]*8 and len(flight) == 4
    want, got = alone.generate(p, group_size=2, seed=1), flight.collect(4)
    for x in got: assert torch.equal(x.tokens, want[want.group == x.group[0]].trim().tokens)
    assert [int(x.group[0]) for x in got] == p.group.tolist() and got[0].policy_version.shape == got[0].tokens.shape
    flight.ask(p[[1]], max_tokens=10**6)
    with pytest.raises(ValueError, match="1000000"): flight.collect(1)
    assert len(flight) == 1 and flight.abort(p.group.tolist())[0].group.tolist() == p.group[[1]].tolist()


def test_a_sampler_beside_the_trainer_sleeps_and_wakes(two, cluster):
    """Time-shared: the same bundles, other processes. It refuses while it sleeps, and a load wakes it. On CUDA this is
    untried."""
    policy, p = two.place(Policy, net(seed=3)), prompts((5, 2, 7, 3))
    want = Rollout(net(seed=3), max_tokens=4).generate(p, seed=1).tokens
    with RayPool(2, world=False, beside=two, cluster=cluster, name="beside") as twin:
        rollout = twin.place(Rollout, net(), max_tokens=4)
        assert {r.node for r in twin.processes.ranks} == {r.node for r in two.processes.ranks}
        assert not {r.pid for r in twin.processes.ranks} & {r.pid for r in two.processes.ranks}
        for _ in range(2):
            rollout.load(policy.weights())
            assert torch.equal(rollout.generate(p, seed=1).tokens, want)
            rollout.sleep()
            with pytest.raises(RuntimeError, match="the engine is asleep"): rollout.generate(p, seed=1)
        flight = Flight(rollout)
        flight.ask(p, seed=1)
        with pytest.raises(RuntimeError, match="the engine is asleep"): flight.collect(4)
        rollout.wake()
        assert torch.equal(Batch.cat(flight.collect(4)).tokens, want), "they were asked for again"


class Counts:
    "Says in which order it was called, and how much private memory its process has."
    def __init__(self): self.said = []
    def note(self, x): self.said.append(x)
    def order(self, b): return [self.said]*len(b)
    def takes(self, b): return None
    def anon(self): return anon()
    def sources(self, b):
        self.kept = [*getattr(self, "kept", []), b.media]
        n = len({id(s) for media in self.kept for m in media for s in m.sources})
        return torch.full((len(b),), n)
    def see(self, b): return torch.tensor([sum(float(x.sum()) for x in images) for images in b.images])


def anon():
    "Private memory of this process, MB: the store does not count."
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))/1e3


def test_threads_that_ask_at_once_are_heard_in_one_order_by_all_ranks(two):
    "Else collectives would not meet."
    counts = two.place(Counts)
    def ask(name):
        for i in range(40): counts.note((name, i))
    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for t in threads: t.start()
    for t in threads: t.join()
    first, second = counts.order(prompts((5, 2)))
    assert first == second and len(first) == 120


def test_images_stay_with_their_rows(two):
    "LAWS 11: rows of text, of one image and of three, cut between two ranks."
    b, image = prompts((5, 2, 7, 3, 4)), torch.rand(3, 8, 8)
    b["images"] = [[], [image], [image, 2*image, 3*image], [], [4*image]]
    want = torch.tensor([0., 1., 6., 0., 4.])*float(image.sum())
    counts = two.place(Counts)
    assert torch.allclose(counts.see(b), want) and torch.allclose(counts.see(b[[2, 0]]), want[[2, 0]])


def test_each_source_travels_to_a_rank_once_and_is_there_once(two, monkeypatch):
    "4,096 rows with 512 distinct media; a rank that is sent them again holds those that it has."
    import tiny_media
    from rlblocks.data.media import FeatureMaker, Media, Source
    from rlblocks.placement import ray_calls
    data, maker = [os.urandom(4096) for _ in range(512)], FeatureMaker(tiny_media.processor("llava"))
    media = [Media((Source("image", x, f"{i:032}"),), maker) for i, x in enumerate(data)]
    b = Batch(tokens=torch.ones(4096, 2, dtype=torch.long), lengths=torch.full((4096,), 2), unit=torch.arange(4096)//8,
              media=[media[i//8] for i in range(4096)])
    sent, counts = [], two.place(Counts)
    def serialize(*args, **how):
        sent.append(ray_messages_serialize(*args, **how))
        return sent[-1]
    ray_messages_serialize = ray_calls.serialize
    monkeypatch.setattr(ray_calls, "serialize", serialize)
    assert sum({id(s): s.nbytes for m in b.media for s in m.sources}.values()) == 512*4096
    assert counts.sources(b).tolist() == counts.sources(b).tolist() == [256]*4096
    assert len(sent) == 4 and sum(x.nbytes for x in sent) < 2*(512*4096 + 4096*100)


def test_rows_with_images_give_the_numbers_of_one_process(two):
    "The tutorial's loop on two ranks, one of which may have rows of text alone."
    import tiny_media
    rows = [tiny_media.row("llava", *some) for some in ((0,), (), (1, 2))]
    loop = loop_from(f"{ROOT}/tutorials/grpo.ipynb:grpo")
    def reward(completions, **_): return [float(len(set(c))) for c in completions]
    def run(pool):
        reads = tiny_media.processor("llava")
        data = Prompts(rows, reads, shuffle=False)
        return list(loop(pool, data, reward, model=partial(tiny_media.model, "llava"), tokenizer=reads, steps=2,
                          prompts=3, group_size=2, minibatches=1, max_tokens=4, lr=1e-3))
    for got, want in zip(run(two), run(here), strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-5, abs=1e-6)


def test_memory_does_not_grow_with_calls_nor_hold_what_passes(two):
    """LAWS 15 and 39, small: two hundred steps of 13 bytes a token, which keep less than 0.2 MB each; the process here
    holds less than two batches more while one passes."""
    counts = two.place(Counts)
    def batch(tokens=40_000):
        return Batch(tokens=torch.zeros(8, tokens, dtype=torch.long), lengths=torch.full((8,), tokens),
                     mask=torch.arange(tokens).expand(8, -1) > 0, logprobs=torch.zeros(8, tokens))
    for _ in range(60): counts.takes(batch())       # until the heap has its size
    before, there = anon(), counts.anon()
    for _ in range(200): counts.takes(batch())
    assert anon() - before < 40 and counts.anon() - there < 40, "0.2 MB a step"
    b = batch(400_000)
    size, most, done = sum(x.nbytes for x in b.columns.values())/1e6, [], threading.Event()
    def watch():
        while not done.wait(.005): most.append(anon())
    thread, before = threading.Thread(target=watch), anon()
    thread.start()
    counts.takes(b)
    done.set(), thread.join()
    assert max(most) - before < 2*size, (max(most) - before, size)


def test_a_function_stays_the_same_while_what_it_captured_is_there():
    "Each step of a loop lets go of a ticket; only functions that captured it go with it."
    from rlblocks.placement.ray_messages import FUNCTION_BYTES, Reader, serialize
    from rlblocks.placement.ray_ranks import RankActor
    member, reader, kept, gone = RankActor(0, 1, "."), Reader(), object(), object()
    def names(x): return (7,) if x is kept else (8,) if x is gone else None
    for number in (7, 8): member.place(number, serialize((Seen, (), {})))
    def seen(f):
        message = serialize(((f,), {}), names=names, limit=FUNCTION_BYTES)
        return reader.read(member.call(7, "seen", message, True, 9).message)
    functions = [lambda b: b, lambda b: (b, kept), lambda b: (b, gone)]
    assert [seen(f) for f in functions] == [0, 0, 0] and [seen(f) for f in functions] == [1, 1, 1]
    member.drop([8])
    assert [seen(f) for f in functions[:2]] == [2, 2] and len(member.reader.functions) == 2


def test_threads_pack_modules_by_value_at_once(tmp_path, monkeypatch):
    "cloudpickle has one list of them: who has put a module there takes it off, and another one may need it."
    from ray import cloudpickle
    from rlblocks.placement.ray_messages import Reader, serialize
    (tmp_path/"packed_at_once.py").write_text("def f(x): return 2*x\n")
    monkeypatch.syspath_prepend(tmp_path)
    f = importlib.import_module("packed_at_once").f
    both, register, packed = threading.Barrier(2), cloudpickle.register_pickle_by_value, []
    def late(module):
        with suppress(threading.BrokenBarrierError): both.wait(.5)
        register(module)
    monkeypatch.setattr(cloudpickle, "register_pickle_by_value", late)
    threads = [threading.Thread(target=lambda: packed.append(serialize(f))) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    del sys.modules["packed_at_once"]
    assert [Reader().read(x)(21) for x in packed] == [42, 42]


class Seen:
    "Counts how often it was given a function."
    def seen(self, f):
        vars(f)["seen"] = vars(f).get("seen", -1) + 1
        return vars(f)["seen"]


class Large:
    "Holds weights that are made bucket by bucket, as a sharded policy's are."
    def __init__(self, n, megabytes): self.n, self.size, self.times = n, megabytes*250_000, 0
    def weights(self):
        def made(_): yield from ({f"w{i}": torch.full((self.size,), float(i))} for i in range(self.n))
        return Ticket(1, InProcess(lambda: 1, made, self.score), probe=(1, 2))
    def score(self, ids):
        self.times += 1
        return -ids[1:].double()


class Reads:
    "Reads what comes, slowly."
    def load(self, ticket, seconds=0., stops=None):
        said = []
        for i, bucket in enumerate(ticket.buckets(1)):
            if i == stops and os.environ["RANK"] == "1": raise OSError("no room here")
            (name, x), = bucket.items()
            said.append((name, x.numel(), float(x[-1])))
            time.sleep(seconds)
        return said
    def ignores(self, ticket): return 1
    def proves(self, ticket):
        for bucket in ticket.buckets(1): del bucket
        return ticket.score(torch.tensor(ticket.probe)).tolist()


def test_the_sender_scores_its_probe_once_for_all_readers(one, two):
    "After the last bucket; of sharded senders all ranks take part. Who stops reading holds up nobody."
    large, reads = one.place(Large, 3, 1), two.place(Reads)
    assert len(reads.load(large.weights())) == 3 and large.times == 1
    assert reads.proves(large.weights()) == [-2.] and large.times == 2
    with pytest.raises(OSError, match="no room here"): reads.load(large.weights(), stops=1)
    policy, reads = two.place(Policy, net(seed=3), engine="fsdp2"), one.place(Reads)
    own = Policy(net(seed=3)).weights()
    for _ in range(2):
        got = torch.tensor(reads.proves(policy.weights()), dtype=torch.double)
        assert (got - own.score(torch.tensor(own.probe))).abs().max() < 1e-6
        assert reads.ignores(policy.weights()) == 1 and len(policy.logprobs(rows(B=5))) == 5


def test_the_doctor_asks_every_node(cluster, two, tmp_path):
    from rlblocks.placement.doctor import examine
    found = {x.what: x for x in examine(cluster, tmp_path)}
    assert not found["versions"].remedy and found[str(tmp_path)].found == "seen"
    assert found["health checks"].remedy == "set these where `ray start` runs" and not list(tmp_path.iterdir())
    sends = replace(cluster, runtime_env=dict(working_dir=str(tmp_path/"nowhere")))
    with pytest.raises(ValueError, match="nowhere"): examine(sends)


def test_what_nobody_refers_to_is_let_go(two):
    keeps = two.place(Keeps)
    number = vars(keeps)["_placed"].number
    del keeps
    two.place(Keeps)
    assert all(let_go(two, number))


# -- what is heard

def test_an_error_in_a_call_keeps_its_class_and_the_pool_goes_on(two):
    echo, b = two.place(Echo), prompts((5, 2, 7, 3))
    with pytest.raises(KeyError, match="no such thing as") as e: echo.fails(b)
    note = "\n".join(e.value.__notes__)
    assert "in Echo.fails on rank 0 (node" in note and "pid" in note and 'raise KeyError(f"no such thing' in note
    with pytest.raises(TypeError, match="Echo.number: a int cannot be joined"): echo.number(b)
    class Broken:
        def __init__(self): raise OSError("disk on fire")
    with pytest.raises(OSError, match="disk on fire"): two.place(Broken)
    assert torch.equal(echo.add(b), b.tokens)


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call(two):
    echo, b = two.place(Echo), prompts((5, 2, 7, 3))
    call = later(echo.fails, b)
    assert torch.equal(echo.add(b), b.tokens)           # it can still be asked for
    with pytest.raises(KeyError): call.result()
    with pytest.raises(KeyError): call.result()
    later(echo.fails, b)
    with pytest.raises(KeyError) as e: echo.add(b), echo.add(b)      # the second at the latest: one queue
    assert "whose result nobody asked for" in "\n".join(e.value.__notes__)
    assert torch.equal(echo.add(b), b.tokens)


def test_warnings_and_what_calls_took_are_seen_here(two):
    keeps = two.place(Keeps)
    with pytest.warns(RuntimeWarning, match=r"learning rate is odd \[Keeps.warns on rank 0"): keeps.warns()
    found = [row for row in two.report() if row["call"] == "Keeps.warns"]
    assert keeps.title().startswith("ray::Keeps.title"), "as ps and the dashboard show it"
    assert [row["rank"] for row in found] == [0, 1] and all(row["calls"] == 1 and row["mib"] > 50 for row in found)


def test_calls_on_ranks_are_phases_of_the_loop_and_rows_of_a_timeline(two, tmp_path):
    "The loop's waiting for a method counts as its phase; what each rank did lies within, whatever its clock says."
    def loop():
        policy, b = two.place(Policy, net(), lr=1e-2), rows(B=4)
        for step in range(2):
            b["old_logprobs"] = policy.logprobs(b)
            later(policy.logprobs, b).result()
            yield dict(step=step) | policy.step(b, spmd_loops.loss)
    made = list(timed(loop(), folder=tmp_path))
    assert {"seconds_logprobs", "seconds_update"} <= made[1].keys() and made[1]["tflops"] > 0
    assert "seconds_wait" not in made[1], "a call that was begun earlier counts as its phase when it is waited for"
    assert made[1]["memory_gib"] > .05 and made[1]["tokens_per_second"] > 0
    events = json.loads((tmp_path/"trace.json").read_text())["traceEvents"]
    lanes = {x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"}
    assert sorted(lanes.values()) == ["loop", "two rank 0", "two rank 1"]
    slices = [x for x in events if x["ph"] == "X"]
    def of(lane, name): return [x for x in slices if lanes[x["pid"]] == lane and x["name"] == name]
    for outer, inner in zip(of("loop", "update"), of("two rank 0", "update"), strict=True):
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
        assert inner["args"]["call"] == "Policy.step"
    behind, ahead = (Rank(0, "node", "address", 0) for _ in range(2))      # clocks that are 50 s and 100 s off
    assert behind.local_time(-40., -39., asked=10., heard=12.) == (10., 11.)
    assert ahead.local_time(110., 111., asked=10., heard=12.) == (11., 12.)


def interrupt(pool, path, ranks=2):
    "Ctrl-C, once so many ranks were given a call and one is at work."
    def given(): return len(pool.calls.open[-1].refs) if pool.calls.open else 0
    def press():
        while not path.exists() or given() < ranks: time.sleep(.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()


@pytest.mark.parametrize("method", ["sleeps", "step"])
def test_ctrl_c_leaves_ranks_at_work_and_the_next_call_says_so(two, tmp_path, method):
    "A step whose answer was lost is not taken twice."
    keeps, before = two.place(Keeps), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt(two, tmp_path/"began")
        with pytest.raises(KeyboardInterrupt): getattr(keeps, method)(str(tmp_path/"began"))
    finally: signal.signal(signal.SIGINT, before)
    with pytest.warns(UserWarning, match=f"Keeps.pid waits: Keeps.{method} was interrupted"):
        if method == "sleeps": assert keeps.pid() > 0
        else:
            with pytest.raises(RuntimeError, match="Keeps.step was interrupted, and the ranks have finished it"):
                keeps.pid()
    assert keeps.pid() > 0


def test_each_call_that_nobody_heard_is_told_by_one_that_follows(two, tmp_path):
    "One at a time, and none is lost: an error of a grader does not hide a step that was interrupted."
    keeps, echo, before = two.place(Keeps), two.place(Echo), signal.signal(signal.SIGINT, signal.default_int_handler)
    unheard = [later(echo.fails, prompts((5, 2, 7, 3))) for _ in range(2)]
    try:
        interrupt(two, tmp_path/"began")
        with pytest.raises(KeyboardInterrupt): keeps.step(str(tmp_path/"began"))
    finally: signal.signal(signal.SIGINT, before)
    unheard.clear()
    for _ in range(2):
        with pytest.raises(KeyError, match="no such thing"): keeps.pid()
    with pytest.warns(UserWarning, match="Keeps.step was interrupted"):
        with pytest.raises(RuntimeError, match="Keeps.step was interrupted, and the ranks have finished it"):
            keeps.pid()
    assert keeps.pid() > 0 and not two.calls.open


class Slowly:
    "Is made, read and set slowly."
    def __init__(self, path=None): self.wait(path)
    def wait(self, path):
        if path:
            Path(path).touch()
            time.sleep(1)
    @property
    def slow(self): return self.wait(self.path)
    @slow.setter
    def slow(self, path): self.wait(path)


@pytest.mark.parametrize("what", ["place(Slowly)", "Slowly.slow", "Slowly.slow = …"])
def test_ctrl_c_while_an_object_is_placed_read_or_set_is_said_by_the_next_call(two, tmp_path, what):
    slowly, before = two.place(Slowly), signal.signal(signal.SIGINT, signal.default_int_handler)
    path = slowly.path = str(tmp_path/"began")
    try:
        interrupt(two, tmp_path/"began", 1 if what == "Slowly.slow" else 2)
        with pytest.raises(KeyboardInterrupt):
            if what.startswith("place"): two.place(Slowly, path)
            elif what.endswith("slow"): assert slowly.slow
            else: slowly.slow = path
    finally: signal.signal(signal.SIGINT, before)
    number = two.calls.number
    with pytest.warns(UserWarning, match=f"Slowly.path waits: {re.escape(what)} was interrupted"):
        assert slowly.path == path
    if what.startswith("place"): assert all(let_go(two, number))


def let_go(pool, number):
    "Whether each rank holds an object no more. It hears of it with a call."
    import ray
    def says(rank):
        try: ray.get(rank.actor.find.remote(number))
        except ray.exceptions.RayTaskError as e: return f"holds no object {number} any more" in str(e)
        return False
    return [says(rank) for rank in pool.processes.ranks]


class Half:
    def __init__(self):
        if os.environ["RANK"] == "1": raise MemoryError("CUDA out of memory")


def test_an_object_that_could_not_be_placed_is_let_go(two, monkeypatch):
    "Also by the ranks that have made it, and when the pool refuses it afterwards."
    from rlblocks.placement import raypool
    with pytest.raises(MemoryError, match="CUDA out of memory"): two.place(Half)
    numbers = [two.calls.number]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="is spread over nodes"):
        patch.setattr(raypool, "check_together", lambda *_: spread())
        two.place(Keeps)
    numbers.append(two.calls.number)
    assert two.place(Keeps).pid() > 0
    assert all(all(let_go(two, number)) for number in numbers)


def spread(): raise RuntimeError("a replica is spread over nodes")


def test_what_stops_a_rank_no_more_than_a_call_is_an_error_of_the_call(one):
    """A task of asyncio that is cancelled is no `Exception`, and Ray has errors of a call, as a disk that is full: no
    process has died."""
    import ray
    from rlblocks.placement.ray_calls import RankCall
    with pytest.raises(RuntimeError, match="CancelledError: no more") as e: one.place(Keeps).cancelled()
    assert "in Keeps.cancelled on rank 0" in "\n".join(e.value.__notes__)
    def full(): raise OSError("the disk is full")
    lost = ray.remote(full).options(num_cpus=0, max_retries=0).remote()      # as an argument
    with pytest.raises(Exception, match="the disk is full") as e:
        one.calls.begin(RankCall("Keeps.pid", lambda rank: ("drop", lost)), lambda found: found).result()
    assert not isinstance(e.value, RankLost) and one.place(Keeps).pid() > 0


# -- what cannot be had

def test_a_pool_is_on_the_cluster_that_it_was_asked_for(cluster, one):
    "Also where this process is connected to another one already."
    import ray
    there = ray.get_runtime_context().gcs_address
    with RayPool(1, cluster=replace(cluster, address=there), cpus=.1) as pool: assert pool.ranks == 1
    for address, says in (("192.0.2.77:1", f"asked for the cluster at 192.0.2.77:1, but .* connected to {there}"),
                          (f"ray://{there}", "is Ray's client")):
        with pytest.raises(ValueError, match=says): RayPool(1, cluster=replace(cluster, address=address))


def test_room_that_is_not_there_is_refused_in_time(cluster, two):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"3 × \(100 CPU\) \(PACK\) could not be had within 2 s; free are .*CPU"):
        RayPool(3, cpus=100, cluster=replace(cluster, ready=2.))
    assert time.monotonic() - start < 60
    for how, says in ((dict(ranks=5, nodes=2), "5 ranks cannot be spread evenly over nodes=2"),
                      (dict(ranks=2, restarts=1), "restarts= is for what can be made again"),
                      (dict(ranks=2, gpus=.5), "ranks of a world have GPUs of their own.*gpus=0.5 is for world=False"),
                      (dict(ranks=1, beside=two), "as many ranks are wanted as there are, 2")):
        with pytest.raises(ValueError, match=says): RayPool(**how, cluster=cluster)


def test_a_pool_beside_a_closed_one_is_refused_and_ends_with_it(cluster):
    host = RayPool(1, cluster=cluster, cpus=.1, name="host")
    with RayPool(1, beside=host, cluster=cluster, name="twin") as twin:
        keeps = twin.place(Keeps)
        host.close()
        with pytest.raises(RuntimeError, match="Keeps.pid: .*it is beside 'host', which was closed"): keeps.pid()
        with pytest.raises(ValueError, match=r"beside=RayPool\(1 ranks\) cannot be asked any more, it is closed"):
            RayPool(1, beside=host, cluster=cluster)


def test_a_token_that_others_can_read_is_closed_to_them(cluster, two, tmp_path, monkeypatch):
    from rlblocks.placement.cluster import check_token
    token = tmp_path/"token"
    token.touch(mode=0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    check_token(cluster)
    assert token.stat().st_mode & 0o777 == 0o600


OPEN = """
import os, sys
from rlblocks import Cluster, RayPool
from test_ray import options
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
try: RayPool(1, cluster=Cluster(options=options(sys.argv[1])))
except RuntimeError as e: print(e)
print("stopped", not ray.is_initialized())
"""


def said_by(script):
    "A process with a Ray of its own."
    folder = tempfile.mkdtemp(prefix="ray")
    run = subprocess.run([ray_python(), "-c", script, folder], env=os.environ | ENV, capture_output=True, text=True,
                         timeout=300)
    shutil.rmtree(folder, ignore_errors=True)
    return run


def test_a_cluster_without_a_token_is_refused():
    run = said_by(OPEN)
    assert "this Ray cluster has no token" in run.stdout and "stopped True" in run.stdout, run.stderr[-2000:]


LEFT = """
import sys
import ray
from rlblocks import Cluster, RayPool, later
from test_ray import Keeps, options
def pool(): return RayPool(1, cpus=.1, cluster=Cluster(options=options(sys.argv[1])), name="left")
def says(call):
    try: print("answer", call())
    except RuntimeError as e: print("says", e)
first = pool()
keeps, begun = first.place(Keeps), later(first.place(Keeps).pid)
ray.shutdown()
says(keeps.pid)
says(begun.result)
print("another Ray", ray.is_initialized())
with pool() as second:
    says(keeps.pid)
    first.close()
    print("second", second.place(Keeps).pid() > 0)
"""


@pytest.mark.long
def test_a_pool_whose_ray_was_shut_down_says_so():
    "No other Ray is started for it, and a later one is not taken for it."
    run = said_by(LEFT)
    said = run.stdout.splitlines()
    assert [line.split(":")[0] for line in said] == ["says Keeps.pid", "says Keeps.pid", "another Ray False",
                                                     "says Keeps.pid", "second True"], run.stdout + run.stderr[-2000:]
    assert all("pool 'left' cannot be asked any more: its Ray was shut down" in said[i] for i in (0, 1, 3))


# -- ranks that die

def test_a_rank_that_dies_is_named_and_the_pool_is_given_up(cluster):
    b = prompts((5, 2, 7, 3))
    with RayPool(2, cluster=cluster, grace=2., name="mortal") as pool:
        keeps = pool.place(Keeps)
        pid = pool.processes.ranks[1].pid
        keeps.spoil(b)
        with pytest.raises(RankLost) as e: keeps.dies(b, 1)
        for words in ("Keeps.dies: rank 1 (node ", f"pid {pid}) of 2 in pool 'mortal', of replica 1, died",
                      "MiB after Keeps.spoil", "Worker exit detail", "out of luck"): assert words in str(e.value)
        with pytest.raises(RuntimeError, match="cannot be asked any more: Keeps.dies: rank 1"): keeps.spoil(b)


class Together:
    "Ranks that wait for each other, but for one that fails before."
    def sums(self, fails):
        if os.environ["RANK"] == fails: raise KeyError("a shard is missing")
        x = torch.ones(1)
        torch.distributed.all_reduce(x)
        return int(x)
    def asserts(self, fails):
        if os.environ["RANK"] == fails: raise AssertionError     # pytest gives an `assert` of this file a text
        torch.distributed.barrier()


def test_an_error_without_a_text_breaks_the_pool_as_any_other(cluster):
    "As a bare `assert` has none."
    with RayPool(2, cluster=cluster, cpus=.1, grace=1., name="bare") as pool:
        ranks = pool.place(Together)
        with pytest.raises(AssertionError) as e: ranks.asserts("1")
        assert "no answer within 1 s more from rank 0" in "\n".join(e.value.__notes__)
        with pytest.raises(RuntimeError, match=r"asked any more: Together.asserts: AssertionError\(\)"):
            ranks.sums("none")


def test_a_rank_that_does_not_answer_in_time_is_named_and_the_pool_is_given_up(cluster):
    with RayPool(1, cluster=cluster, cpus=.1, name="silent") as pool:
        keeps = pool.place(Keeps)
        pool.calls.timeout = .5         # of the next call: placing may take longer
        with pytest.raises(RankSilent, match=r"Keeps.run: no answer within 0.5 s from rank 0 \(node "):
            keeps.run(time.sleep, 600)
        with pytest.raises(RuntimeError, match="cannot be asked any more: Keeps.run: no answer within"): keeps.pid()


def test_an_error_that_leaves_others_in_a_collective_breaks_the_pool_after_the_grace(cluster):
    "The error keeps its class and names who is silent; the processes are gone when the pool is closed."
    with RayPool(2, cluster=cluster, grace=1., name="grace") as pool:
        ranks, pids = pool.place(Together), [rank.pid for rank in pool.processes.ranks]
        assert ranks.sums("none") == 2
        start = time.monotonic()
        with pytest.raises(KeyError, match="a shard is missing") as e: ranks.sums("1")
        assert time.monotonic() - start < 60, "long before the timeout of 1800 s"
        notes = "\n".join(e.value.__notes__)
        assert "in Together.sums on rank 1" in notes and "no answer within 1 s more from rank 0" in notes
        with pytest.raises(RuntimeError, match=r"asked any more: Together.sums: KeyError\('a shard is missing'\)"):
            ranks.sums("none")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Fragile(Rollout):
    "A rollout whose rank 1 dies once, in its second call."
    def generate(self, prompts, *, once=None, **how):
        if once and os.environ["RANK"] == "1" and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(prompts, **how)


def check_the_store_keeps_the_last_weights(one, pool):
    "Of a pool whose ranks may have to read them again: those of one load, however many there were."
    import ray
    def used(): return before - ray.available_resources()["object_store_memory"]/1e6
    def becomes(least, most):
        end = time.monotonic() + 60
        while not least <= used() <= most and time.monotonic() < end: time.sleep(.1), gc.collect()
        return least <= used() <= most
    def still(): # Ray says it with a delay, and what earlier tests held goes when it is collected
        gc.collect()
        seen, end = [used()], time.monotonic() + 60
        while len(set(seen[-4:])) > 1 - (len(seen) < 4) and time.monotonic() < end:
            seen.append((time.sleep(.5), used())[1])
        return seen[-1]
    before = 0.
    large, reads, before = one.place(Large, 3, 10), pool.place(Reads), -still()
    for _ in range(3): assert len(reads.load(large.weights())) == 3
    assert becomes(29, 35), used()
    del reads
    pool.place(Keeps)
    assert becomes(-5, 5), used()


@pytest.mark.long       # `make test` has a rank that dies once and is made anew, below
def test_a_call_that_kills_a_rank_twice_is_repeated_once(cluster, tmp_path):
    with RayPool(1, cluster=cluster, world=False, restarts=3, name="twice") as pool:
        keeps = pool.place(Keeps)
        twice = pytest.raises(RankLost, match="Keeps.dies: rank 0")
        with pytest.warns(UserWarning, match="2 restarts are left"), twice:
            keeps.dies(prompts(), 0)


def test_a_ticket_in_a_function_for_another_pool_is_refused(one, two):
    ticket, keeps = two.place(Policy, net(seed=3)).weights(), one.place(Keeps)
    with pytest.raises(ValueError, match="pass the ticket itself as an argument"):
        keeps.run(lambda b: ticket, prompts())


def test_pools_that_load_from_each_other_at_once(one, two):
    "From two threads: neither holds what the other waits for."
    pairs = [(a.place(Policy, net(seed=3)), b.place(Rollout, net(), max_tokens=4)) for a, b in ((one, two), (two, one))]
    errors = []
    def loads(policy, rollout):
        try: [rollout.load(policy.weights()) for _ in range(10)]
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=loads, args=pair, daemon=True) for pair in pairs]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert not errors and not any(t.is_alive() for t in threads)


def test_a_rank_without_a_world_is_made_anew_and_asked_once_more(cluster, one, two, tmp_path):
    "It places what it had, loads what it was given, and does its part again: the rows are those of no death."
    policy, p = two.place(Policy, net(seed=3), lr=1e-2), prompts((5, 2, 7, 3))
    want = Rollout(net(seed=3), max_tokens=4).generate(p, seed=1)
    with RayPool(2, cluster=cluster, world=False, restarts=1, name="again") as pool:
        rollout = pool.place(Fragile, net(), max_tokens=4)
        check_the_store_keeps_the_last_weights(one, pool)
        rollout.load(policy.weights())
        policy.step(rows(B=4), lambda out, b: (out.logprobs[b.mask].sum()/b.n_tokens, {}))  # these weights are gone
        assert torch.equal(rollout.generate(p, seed=1).tokens, want.tokens)
        with pytest.warns(UserWarning, match="rank 1 .*died.*made anew; 0 restarts are left"):
            again = rollout.generate(p, seed=1, once=str(tmp_path/"died"))
        assert torch.equal(again.tokens, want.tokens) and len(pool.calls.revived) == 1
        keeps = pool.place(Keeps)
        with pytest.raises(RankLost, match="Keeps.dies: rank 0"): keeps.dies(p, 0)


def test_what_trains_is_refused_where_ranks_are_made_anew(cluster):
    "A rank would come back with the weights that were placed, and say nothing."
    with RayPool(1, cluster=cluster, cpus=.1, world=False, restarts=1, name="anew") as pool:
        with pytest.raises(ValueError, match="a Policy that trains is on .* with restarts=.*or say frozen=True"):
            pool.place(Policy, net(seed=3))
        refused = pool.calls.number
        assert pool.place(Policy, net(seed=3), frozen=True).logprobs(rows(B=2)).shape[0] == 2
        assert let_go(pool, refused) == [True] and len(pool.calls.kept) <= 1


class Slow(Rollout):
    "A rollout that dies once, while it generates."
    def generate(self, prompts, *, once=None, **how):
        if once and not Path(once).exists():
            Path(once).touch()
            time.sleep(1)          # so that the calls after this one are there
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(prompts, **how)


def test_a_death_costs_one_restart_and_calls_come_again_in_their_order(cluster, two, tmp_path):
    "Two generations, a load and a third are before the rank when it dies: the first two have the old weights."
    policy, p = two.place(Policy, net(seed=3), lr=1e-2), prompts((5, 2, 7, 3))
    old, new = (Rollout(net(seed=seed), max_tokens=4).generate(p, seed=1).rollout_logprobs for seed in (0, 3))
    assert not torch.equal(old, new)
    with RayPool(1, cluster=cluster, world=False, restarts=2, name="order") as pool:
        rollout = pool.place(Slow, net(seed=0), max_tokens=4)
        began = [later(rollout.generate, p, seed=1, once=str(tmp_path/"died")) for _ in range(2)]
        with pytest.warns(UserWarning, match="Slow.generate: rank 0 .*died.*made anew; 1 restarts are left"):
            rollout.load(policy.weights())
        began.append(later(rollout.generate, p, seed=1))
        got = [x.result().rollout_logprobs for x in began]
        assert len(pool.calls.revived) == 1 and pool.calls.restarts == 1
        assert all(torch.equal(x, y) for x, y in zip(got, (old, old, new), strict=True))
        assert [x.sets and x.sets[1] for x in pool.calls.kept] == ["place", "load"]


def test_a_closed_pool_makes_no_rank_anew(cluster):
    "A thread waits for an answer while the pool is closed: its room is gone, so nothing would come for minutes."
    pool, said = RayPool(1, cluster=cluster, cpus=.1, world=False, restarts=2, name="closed"), []
    slow = later(pool.place(Sleeps).sleep)
    def waits():
        try: slow.result()
        except Exception as e: said.append(e)
    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    pool.close()
    thread.join(60)
    assert not thread.is_alive() and isinstance(said[0], RankLost) and pool.calls.restarts == 2, said


class Sleeps:
    def sleep(self): time.sleep(600)


def test_a_load_that_cannot_begin_leaves_the_ranks_that_send_free(cluster, two):
    "What the receiver has unheard is raised, or that it is given up; nothing is left that waits for a reader."
    policy = two.place(Policy, net(seed=3), lr=1e-2)
    with RayPool(1, cluster=cluster, world=False, name="refuses") as pool:
        rollout, keeps = pool.place(Rollout, net(), max_tokens=4), pool.place(Keeps)
        later(keeps.run, fails, 1)
        time.sleep(2)
        with pytest.raises(ValueError, match="no luck"): rollout.load(policy.weights())
        assert answers_in(20, lambda: policy.logprobs(rows(B=2)))
        rollout.load(policy.weights())
        with pytest.raises(RankLost): keeps.dies(prompts((2,)), 0)
        with pytest.raises(RuntimeError, match="cannot be asked any more"): rollout.load(policy.weights())
        assert answers_in(20, lambda: policy.logprobs(rows(B=2)))


def fails(_): raise ValueError("no luck")


def answers_in(seconds, call):
    "Whether it does, and raises nothing."
    done = threading.Event()
    threading.Thread(target=lambda: (call(), done.set()), daemon=True).start()
    return done.wait(seconds)


def test_a_share_that_cannot_be_stored_reaches_no_rank(two, monkeypatch):
    "Ranks of a world would wait for those that had nothing; so all shares are there before the first rank is asked."
    from rlblocks.placement import ray_calls
    put, b, echo = ray_calls.put_large, prompts((2, 3)), two.place(Keeps)
    with monkeypatch.context() as patch:
        calls = iter([0, 1])
        patch.setattr(ray_calls, "put_large", lambda x: put(x) if next(calls) == 0 else full())
        with pytest.raises(MemoryError, match="the store is full"): echo.pids(b)
    assert len(set(echo.pids(b).tolist())) == 2


def test_a_call_that_reached_some_ranks_ends_a_pool_whose_ranks_wait_for_each_other(cluster, monkeypatch):
    "Ctrl-C may come between one rank and the next."
    from rlblocks.placement.ray_ranks import Rank
    ask = Rank.ask
    def pressed(rank, *args):
        if rank.number == 1: raise KeyboardInterrupt
        return ask(rank, *args)
    with RayPool(2, cluster=cluster, cpus=.1, name="partly") as pool:
        keeps = pool.place(Keeps)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Rank, "ask", pressed)
            keeps.pid()
        with pytest.raises(RuntimeError, match="cannot be asked any more: Keeps.pid reached 1 of 2 ranks.*Interrupt"):
            keeps.pid()


def full(): raise MemoryError("the store is full")


def test_ctrl_c_between_sending_and_waiting_is_said_by_the_next_call(two, tmp_path, monkeypatch):
    """The ranks were called by then; a step is not taken twice. The traceback is kept, as notebooks do, and with it all
    that the frames hold."""
    from rlblocks.placement import ray_calls
    keeps = two.place(Keeps)
    def pressed(self): raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(ray_calls.RankAnswer, "result", pressed)
        keeps.step(str(tmp_path/"began"))
    with pytest.warns(UserWarning, match="Keeps.pid waits: Keeps.step was interrupted"):
        with pytest.raises(RuntimeError, match="Keeps.step was interrupted, and the ranks have finished it"):
            keeps.pid()
    assert keeps.pid() > 0 and kept.tb


class Uneven:
    "Rank 0 raises; the others take their time."
    def go(self):
        if os.environ["RANK"] == "0": raise ValueError("no luck")
        time.sleep(3)


def test_ranks_that_do_not_wait_for_each_other_have_their_time_when_one_fails(cluster):
    with RayPool(2, cluster=cluster, world=False, grace=1., name="uneven") as pool:
        uneven, keeps = pool.place(Uneven), pool.place(Keeps)
        with pytest.raises(ValueError, match="no luck"): uneven.go()
        assert keeps.pid() > 0


class Unreadable:
    "What a rank cannot read; the others can."
    def __init__(self, rank): self.rank = rank
    def __reduce__(self): return read_on, (self.rank,)


def read_on(rank):
    if os.environ.get("RANK") == rank: raise OSError("no such file here")
    return rank


class Readers(Reads):
    "One of which ends before it has read all."
    def load(self, ticket, rank, how):
        for bucket in ticket.buckets(1):
            if os.environ["RANK"] == rank and how == "dies": os.kill(os.getpid(), signal.SIGKILL)
            del bucket


@pytest.mark.parametrize("how, error", [("dies", RankLost), ("cannot read", OSError)])
def test_a_reader_that_ends_holds_up_nobody(cluster, one, how, error):
    "More weights than pass at a time, and it neither reads them nor leaves: the sender and the others wait for it."
    with RayPool(2, cluster=cluster, cpus=.1, world=False, timeout=1800., name="readers") as pool:
        large, reads, rank = one.place(Large, 6, 1), pool.place(Readers), "1"
        def load():
            with pytest.raises(error, match="died|no such file here"):
                reads.load(large.weights(), Unreadable(rank) if how == "cannot read" else rank, how)
        assert answers_in(60, load), "long before the timeout of 1800 s"
        assert answers_in(60, lambda: large.n)


class Ends(Large):
    "One of its ranks dies while it sends."
    def weights(self):
        def made(_):
            yield dict(w=torch.zeros(self.size))
            if os.environ["RANK"] == self.which: os.kill(os.getpid(), signal.SIGKILL)
            if self.hangs: time.sleep(600)       # as NCCL does, until its watchdog barks
            torch.distributed.barrier()
        return Ticket(1, InProcess(lambda: 1, made, self.score), probe=(1, 2))
    def choose(self, rank, hangs): self.which, self.hangs = str(rank), hangs


@pytest.mark.parametrize("rank, hangs", [(0, False), (1, False), (1, True)])
def test_the_death_of_a_rank_that_sends_weights_is_said_by_name(cluster, one, rank, hangs):
    "Not only that the weights did not come: RankLost, so that `restarted` makes a new pool."
    with RayPool(2, cluster=cluster, grace=2. if hangs else 10., name="ends") as pool:
        ends, reads = pool.place(Ends, 2, 1), one.place(Reads)
        ends.choose(rank, hangs)
        def load():
            with pytest.raises(RankLost, match=rf"Ticket.send: rank {rank} .* in pool 'ends'.*died"):
                reads.load(ends.weights())
        assert answers_in(100, load), "long before the timeout of 300 s"


class Alone(Large):
    "Of a pool without a world, where rank 0 alone sends: the other one dies meanwhile."
    def weights(self):
        def made(_):
            for _ in range(3):
                if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1)       # the loop looks every second who has died
                yield dict(w=torch.zeros(self.size))
        return Ticket(1, InProcess(lambda: 1, made, self.score), probe=(1, 2))


def test_the_death_of_a_rank_that_sends_nothing_does_not_end_a_load(cluster, one):
    with RayPool(2, cluster=cluster, cpus=.1, world=False, restarts=1, name="alone") as pool:
        alone, reads = pool.place(Alone, 2, 1), one.place(Reads)
        assert len(reads.load(alone.weights())) == 3


DRIVER = """
import os, signal, sys
from rlblocks import Cluster, RayPool
from test_ray import Keeps, options
pool = RayPool(1, cluster=Cluster(options=options(sys.argv[1])))
print(pool.place(Keeps).pid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_driver_that_dies_takes_its_ranks_along():
    folder = tempfile.mkdtemp(prefix="ray")
    out = Path(folder)/"pid"      # no pipe: Ray's processes would hold it open
    with out.open("w") as f:
        run = subprocess.run([ray_python(), "-c", DRIVER, folder], env=os.environ | ENV, stdout=f, timeout=300)
    pid, end = int(out.read_text()), time.monotonic() + 120
    def alive(): return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    while alive() and time.monotonic() < end: time.sleep(.1)
    assert run.returncode == -signal.SIGKILL and not alive()
    shutil.rmtree(folder, ignore_errors=True)
