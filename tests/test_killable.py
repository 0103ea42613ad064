"""Graders that hang, crash or eat memory take nothing down: the batch returns by its deadline, failures are counted by
kind and named by row (LAWS 19)."""
import asyncio
import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch
from clock import Clock
from forked import forked
from rlblocks import Batch, GraderLimits, Grader, group_advantages
from rlblocks.graders.killable import each


def batch(texts, **columns):
    "Rows of one prompt, a token a character."
    lengths = torch.tensor([1 + len(t) for t in texts])
    at = torch.arange(int(lengths.max()))
    mask = (at >= 1) & (at < lengths[:, None])
    return Batch(tokens=mask.long(), lengths=lengths, mask=mask, group=torch.zeros(len(texts), dtype=torch.long),
                 prompt=["?"]*len(texts), completion=list(texts), **columns)


def deep(n): return deep(n + 1)


WILD = dict(
    sleeps=lambda: time.sleep(3600), spins=lambda: [0 for _ in iter(int, 1)], raises=lambda: 1/0,
    segfaults=lambda: os.kill(os.getpid(), signal.SIGSEGV), exits=lambda: os._exit(3), leaves=lambda: exit(0),
    nan=lambda: float("nan"), text=lambda: "5", recurses=lambda: deep(0), allocates=lambda: len(bytearray(8 << 30)),
    waits=lambda: asyncio.run(asyncio.sleep(3600)), ignores=lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN),
                                                                     time.sleep(3600)))
KINDS = dict(sleeps="timeout", spins="timeout", raises="raised", segfaults="died", exits="died", leaves="raised",
             nan="raised", text="raised", recurses="raised", allocates="raised", waits="timeout", ignores="timeout")


def judge(completions):
    text, = completions
    return [WILD[text]() if text in WILD else float(text)]


def test_every_kind_of_failure_costs_its_row_and_nothing_else():
    b = batch(["1", *WILD, "2", "3"])
    grader = Grader(judge, deadline=GraderLimits(600., item=2.))
    with pytest.warns(UserWarning, match="judge failed on 12 of 15 rows"): scores = grader.score(b)
    assert not grader.counts["late"]            # by the deadline
    assert scores.isnan().tolist() == [t in WILD for t in b.completion] and scores[[0, -2, -1]].tolist() == [1., 2., 3.]
    assert {b.completion[f.item]: f.kind for f in grader.failures["judge"]} == KINDS
    assert grader.counts == dict(timeout=4, raised=6, died=2)
    texts = {b.completion[f.item]: f.text for f in grader.failures["judge"]}
    assert texts["segfaults"] == "SIGSEGV" and "MemoryError" in texts["allocates"] and "nan" in texts["nan"]
    advantages = group_advantages(scores, b.group)
    expected = group_advantages(torch.tensor([1., 2., 3.]), torch.zeros(3, dtype=torch.long))
    assert advantages[[0, -2, -1]].allclose(expected) and (advantages[1:-2] == 0).all()


def test_wrong_lengths_are_named():
    b = batch(["1", "2"])
    grader = Grader(lambda completions: [1.]*(2 if completions == ["2"] else 1), name="two", deadline=20)
    with pytest.warns(UserWarning, match="two failed on 1 of 2 rows .1 raised.: row 1.*returned 2 verdicts"):
        assert grader.score(b).isnan().tolist() == [False, True]


def test_a_batch_returns_by_its_deadline():
    b = batch(["sleeps"]*6 + ["4"])
    grader = Grader(judge, deadline=GraderLimits(3., item=3600.))
    with Clock() as clock, pytest.warns(UserWarning) as heard: grader.score(b)
    assert any("judge failed on" in str(w.message) for w in heard)
    assert clock.seconds < 10 and grader.counts["late"] >= 6


def test_what_it_prints_goes_nowhere(capfd):
    def loud(completions):
        for _ in range(1024): print("x"*(1 << 20))
        return [1.]
    assert Grader(loud, deadline=60).score(batch(["a"])).tolist() == [1.]
    assert capfd.readouterr().out == ""


def nothing_is_left(_, folder):
    "In a process of its own, whose descriptors and threads are this test's."
    def starts(completions):
        if not os.fork():
            if os.fork(): os._exit(0)
            os.setsid()
            os.write(alive, str(os.getpid()).encode() + b" ")
            time.sleep(3600)
        time.sleep(3600)
    asks, alive = os.pipe()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.warns(UserWarning): Grader(starts, deadline=GraderLimits(60., item=3.)).score(batch(["a"]))
    os.close(alive)
    assert os.read(asks, 99).split() and os.read(asks, 1) == b""     # it is there, and nobody has this pipe any more
    os.close(asks)
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == descriptors - 2
    for _ in range(20): assert each(float, 3, GraderLimits(60.)) == ([0., 1., 2.], [])
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
    with pytest.raises(ChildProcessError): os.waitpid(-1, os.WNOHANG)


@pytest.mark.skipif(sys.platform != "linux", reason="it counts descriptors in /proc")
def test_nothing_is_left_of_it(tmp_path):
    "Daemons that it started too; no thread, no descriptor, no child of ours."
    forked(nothing_is_left, (str(tmp_path),), 1, limit=600)


def multiplying(_, folder):
    "A worker that lives on in its child, and that in its own, faster than /proc is read; and one of 64 at once."
    asks, alive = os.pipe()
    end = time.monotonic() + 60     # whatever happens to the test
    def hops(completions):
        while time.monotonic() < end:
            if os.fork(): os._exit(0)
    def doubles(completions):
        for _ in range(6): os.fork()
        time.sleep(60)
    for f in (hops, doubles):
        with pytest.warns(UserWarning):
            assert Grader(f, deadline=GraderLimits(30., item=2.)).score(batch(["a"])).isnan().all()
    os.close(alive)
    assert os.read(asks, 1) == b"" and time.monotonic() < end        # nobody has this pipe any more


@pytest.mark.skipif(sys.platform != "linux", reason="a watcher adopts orphans on Linux")
def test_fork_bombs_cost_their_row(tmp_path): forked(multiplying, (str(tmp_path),), 1, limit=600)


def interrupted(_, folder):
    "What Ctrl-C leaves behind."
    asks, alive = os.pipe()
    def endless(i):
        os.kill(main, signal.SIGUSR1)
        time.sleep(3600)
    def stop(*_): raise KeyboardInterrupt
    main = os.getpid()
    signal.signal(signal.SIGUSR1, stop)
    with pytest.raises(KeyboardInterrupt): each(endless, 1, GraderLimits(600.))
    os.close(alive)
    assert os.read(asks, 1) == b""
    with pytest.raises(ChildProcessError): os.waitpid(-1, os.WNOHANG)


def test_an_interrupt_ends_them(tmp_path): forked(interrupted, (str(tmp_path),), 1, limit=600)


def descriptors(): return {fd for fd in range(3, 1024) if os.path.exists(f"/proc/self/fd/{fd}")}


def writes(line, then):
    "To what it was not given by who started the test."
    for fd in descriptors() - BEFORE:
        try: os.write(fd, line)
        except OSError: pass
    return then()


BEFORE = set()


MEDDLERS = dict(
    closes=lambda: (os.closerange(3, 1024), time.sleep(3600)), garbage=lambda: writes(b"garbage\n", lambda: 1.),
    forges=lambda: writes(b"[1.0, null]\n"*3, lambda: os._exit(0)),
    others=lambda: writes(b"[7, 1.0, null]\n"*3, lambda: os._exit(0)),
    crashes=lambda: time.sleep(3600) if not os.fork() else os.kill(os.getpid(), signal.SIGSEGV))


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for descriptors in /proc")
def test_who_meddles_with_descriptors_costs_its_row(tmp_path): forked(meddles, (str(tmp_path),), 1, limit=600)


def meddles(_, folder):
    names = [*MEDDLERS, "ok"]
    BEFORE.update(descriptors())
    found, failures = each(lambda i: MEDDLERS.get(names[i], lambda: 1.)(), len(names), GraderLimits(120., item=5.))
    assert found == [None]*len(MEDDLERS) + [1.]
    assert {names[f.item]: f.kind for f in failures} == dict(closes="timeout", garbage="raised", forges="raised",
                                                            others="raised", crashes="died")


def test_what_a_failure_is_worth():
    b = batch(["raises", "1"])
    with pytest.warns(UserWarning): assert Grader(judge, deadline=20, on_failure=-1.).score(b).tolist() == [-1., 1.]
    with pytest.raises(RuntimeError, match="judge failed on 1 of 2 rows .1 raised.: row 0.*ZeroDivisionError"):
        Grader(judge, deadline=20, on_failure="raise").score(b)
    with pytest.raises(ValueError, match="on_failure is 'drop'"): Grader(judge, deadline=20, on_failure="drop")


def test_async_functions_and_several_with_weights():
    async def late(completions):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]
    assert Grader([judge, late], weights=[1., 10.], deadline=30).score(batch(["1", "2"])).tolist() == [11., 12.]


def test_none_is_unscorable_and_no_failure():
    grader = Grader(lambda completions: [None], name="none", deadline=20)
    with pytest.warns(UserWarning, match="scored none of the 1 rows"): assert grader.score(batch(["a"])).isnan().all()
    assert not grader.counts


@pytest.mark.parametrize("deadline", [None, 20.])
def test_functions_for_verl_are_taken_as_they_are(deadline):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "sums" and extra_info == dict(index=0)
        return dict(score=float(solution_str == ground_truth), acc=1.)
    b = batch(["4", "5"], data_source=["sums"]*2, extra_info=[dict(index=0)]*2,
              reward_model=[dict(style="rule", ground_truth="4")]*2)
    assert Grader(compute_score, deadline=deadline).score(b).tolist() == [1., 0.]


def test_functions_for_verl_that_wait_wait_together():
    "Every row waits here for all others: a judge that is asked row after row would never answer."
    door = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None
    if door is None: pytest.skip("asyncio.Barrier is new in Python 3.11")
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.wait_for(door.wait(), 60)
        return float(solution_str == ground_truth)
    b = batch(["4", "5", "4"], ground_truth=["4"]*3)
    assert Grader(compute_score).score(b).tolist() == [1., 0., 1.]


def test_functions_of_trl_are_taken_as_they_are():
    trl = pytest.importorskip("trl.rewards")
    b = batch(["<think>\n1\n</think>\n2", "2"])
    b["completion"] = [[dict(role="assistant", content=c)] for c in b.completion]
    assert Grader(trl.think_format_reward, deadline=60).score(b).tolist() == [1., 0.]


def many_files(_, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    assert each(float, 3, GraderLimits(60.)) == ([0., 1., 2.], []) and kept


def deep_json(_, folder):
    "What a function writes where results go is nested deeper than Python reads."
    def deep(i): return writes(b"[" * 100_000 + b"]" * 100_000 + b"\n", lambda: 1.) if i == 1 else 2.
    BEFORE.update(descriptors())
    found, failures = each(deep, 3, GraderLimits(60., workers=1))
    assert found == [2., None, 2.] and [(f.item, f.kind) for f in failures] == [(1, "raised")]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for descriptors in /proc")
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200, reason="few files may be open here")
@pytest.mark.parametrize("run", [many_files, deep_json])
def test_a_trainer_goes_on(tmp_path, run):
    "With more open files than `select` knows, too, as an endpoint with many agents has."
    forked(run, (str(tmp_path),), 1, limit=600)
