"Checkpoint: a run that was killed anywhere is the run that was not; what was not written whole is refused."
import errno
import fcntl
import gc
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import date, timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, rarely
from forked import on_ranks
from rlblocks import (
    Batch, Checkpoint, Policy, Prompts, Rollout, adaptive_kl_coef, at_tokens, group_advantages, here, loop_from,
    merge, ppo_loss
)
from rlblocks.checkpoint import checkpoint as checkpoint_module, keeper as keeper_module
from rlblocks.checkpoint.saves import saves_in
from tiny import model, rows as tiny_rows

ROWS = [dict(prompt=f"{i}", answer=str(i % 7)) for i in range(10)]


class Digits:
    "A tokenizer of digits, so that no training is needed: '37' → [5, 9]."
    bos_token_id, eos_token_id = None, 1
    def __call__(self, text): return [int(c)+2 for c in text]
    def decode(self, ids, **_): return "".join(str(i-2) for i in ids if 2 <= i < 12)


def loop(*, steps=8, checkpoint=Checkpoint(), fail_at=None, net=None, epochs=2):
    """A real GRPO loop on a tiny model: epochs end inside it (10 prompts, 4 a step), minibatches are shuffled, a
    coefficient lives across steps."""
    policy = here.place(Policy, net or model(), lr=1e-2, device="cpu")
    rollout = here.place(Rollout, net or model(), max_tokens=4, device="cpu", tokenizer=Digits())
    data, state = Prompts(ROWS, Digits(), seed=3), dict(coef=.5)
    def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    for step in checkpoint(steps, policy=policy, data=data, state=state):
        rollout.load(policy.weights())
        batch = rollout.generate(data.take(4), group_size=4, seed=(0, step))
        batch["scores"] = torch.tensor([float(a in c) + state["coef"]*len(c)
                                        for a, c in zip(batch.answer, batch.completion, strict=True)])
        batch["advantages"] = at_tokens(group_advantages(batch.scores, batch.group), batch.mask)
        batch["old_logprobs"] = policy.logprobs(batch)
        metrics = {}
        for epoch in range(epochs):
            for k, mini in enumerate(batch.minibatches(2, seed=(0, step, epoch))):
                metrics = merge(metrics, policy.step(mini, loss))
                if step == fail_at and epoch == 0 and k == 1: raise RuntimeError("killed mid-epoch")
        state["coef"] = adaptive_kl_coef(state["coef"], .2, target=.1, horizon=100, n_rows=16)
        yield dict(step=step, prompts=batch.prompt[::4], reward=batch.scores.mean().item(), loss=float(metrics["loss"]),
                   norm=float(metrics["grad_norm"]),
                   weights=sum(p.double().sum().item() for p in policy._run.module.parameters()),
                   version=policy.version)


@pytest.fixture(scope="module")
def plain(): return {m["step"]: m for m in loop()}


def run(folder, **how):
    "(what was shown, the exception that ended it)"
    shown = {}
    try:
        for m in itertools.islice(loop(checkpoint=Checkpoint(folder, every=3), **how.get("loop", {})), how.get("stop")):
            shown[m["step"]] = m
    except RuntimeError as e: return shown, e
    return shown, None


@pytest.mark.parametrize("how, first",
                         [(dict(stop=5), 3), (dict(stop=3), 0), (dict(loop=dict(fail_at=4)), 3),
                          (dict(loop=dict(fail_at=6)), 6), (dict(loop=dict(fail_at=1)), 0)])
def test_resumed_equals_undisturbed(tmp_path, plain, how, first):
    """LAWS 20: stopped by its consumer, or killed mid-epoch: prompts, rewards, losses and weights come out equal, to
    the bit."""
    shown, _ = run(tmp_path, **how)
    again, _ = run(tmp_path)
    assert min(again) == first and max(again) == 7
    assert shown | again == plain
    assert all(again[k] == shown[k] for k in shown.keys() & again.keys())


def test_the_plain_run_does_something(plain):
    assert len({m["weights"] for m in plain.values()}) == 8 and plain[7]["version"] == 32
    # 10 prompts: the epoch ends inside step 2
    assert plain[2]["prompts"][1:] != plain[0]["prompts"][1:]
    assert len({p for m in list(plain.values())[:2] for p in m["prompts"]}) == 8


@pytest.mark.ranks
@pytest.mark.parametrize("moments, kinds",
                         [(1, ["fsdp2_background"]), *rarely((1, ["two", "background", "fsdp2_to_one"]), (4, []))])
def test_killed_at_any_moment(tmp_path, moments, kinds):
    """LAWS 20, with SIGKILL: one rank or both, in a save or not: the rows shown are those of the run that was not
    killed. `make test` has two ranks that save shards while they train; one process, and another number of ranks
    afterwards, are long (tests/test_shards.py has the latter without a kill)."""
    run = subprocess.run([sys.executable, ROOT/"benchmarks"/"kill.py", "--moments", str(moments),
                          *(["--kinds", *kinds] if kinds else []), "--out", tmp_path], capture_output=True, text=True,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert run.returncode == 0, run.stderr[-3000:]
    for name, found in json.loads((tmp_path/"kill_cpu.json").read_text())["results"].items():
        assert len(found["moments"]) == moments
        assert 0 < found["moments"][0]["resumed_at"] < 12, (name, found["moments"][0])
        for m in found["moments"]:
            assert m["complete"] and m["others_left"], (name, m)
            # another number of ranks adds in another order
            if "_to_" in name: assert m["distance"] < 1e-5, (name, m)
            else: assert m["distance"] == 0 and m["same_hash"], (name, m)


def last(caplog, path):
    "What was logged last of a folder: a loop that an earlier test has left may be collected, and say so, meanwhile."
    return [m for m in caplog.messages if str(path) in m][-1]


def test_leaving_the_body_keeps_no_half_step(tmp_path, caplog):
    """A break, a return or an error in the body may come before the update, and stopping at the yield looks the
    same: the last save stays, and the log names it."""
    class Count:
        n = 0
        def state_dict(self): return dict(n=self.n)
        def load_state_dict(self, s): self.n = s["n"]
    def body(path, end=None):
        c = Count()
        for step in Checkpoint(path, every=2)(10, c=c):
            if step == 3:
                if end == "break": break
                if end == "raise": raise RuntimeError
                if end == "return": return
            c.n += 1
            yield step
    for end in ("break", "raise", "return"):
        try: list(body(tmp_path/end, end))
        except RuntimeError: pass
        gc.collect()
        assert Checkpoint(tmp_path/end).restore(dict(c=(c := Count()))) == 2 == c.n, end
        assert last(caplog, tmp_path/end).endswith(f"{end} stopped at step 3; the last save is step-00000002")
    for end in ("close", "throw", "forget"):
        g = body(tmp_path/end)
        for _ in range(3): next(g)
        if end == "close": g.close()
        elif end == "throw":
            with pytest.raises(KeyError): g.throw(KeyError())
        del g
        assert Checkpoint(tmp_path/end).restore(dict(c=(c := Count()))) == 2 == c.n, end
        assert last(caplog, tmp_path/end).endswith(f"{end} stopped at step 2; the last save is step-00000002")
    next(body(tmp_path/"none"))
    assert last(caplog, tmp_path/"none") == f"Checkpoint: {tmp_path/'none'} stopped at step 0; nothing is saved yet"


@pytest.mark.parametrize("background", [False, True])
def test_a_save_when_it_is_asked_for(tmp_path, background, caplog):
    """By the consumer between steps, or by the loop before its yield: the step at hand, whatever shape the loop has;
    nothing is saved twice, and the run goes on after it."""
    def body(checkpoint, at=None):
        state = dict(n=0)
        def steps(): yield from checkpoint(9, state=state)
        for step in steps():            # the parts are not in the frame that asks for steps
            state["n"] += 1
            if step == at: checkpoint.save()
            yield step, state["n"]
            state["seen"] = step
    checkpoint = Checkpoint(tmp_path, background=background)
    for step, _ in body(checkpoint):
        if step == 4:
            checkpoint.save()
            break
    gc.collect()
    assert names(tmp_path) == [name(5)] and "stopped at step 4; the last save is step-00000005" in caplog.text
    assert next(rows := body(checkpoint, at=6)) == (5, 6) and next(rows) == (6, 7)
    rows.close()
    assert names(tmp_path) == [name(5), name(7)]
    assert list(body(checkpoint)) == [(7, 8), (8, 9)] and names(tmp_path) == [name(7), name(9)]
    with pytest.raises(RuntimeError, match="saves the step of a loop, and none is running"): checkpoint.save()
    Checkpoint().save()         # keeps nothing, so there is nothing to do
    for half in (dict(step=5), dict(parts=dict(state={}))):
        with pytest.raises(TypeError, match=r"save\(step, parts\) takes both, or neither"): checkpoint.save(**half)


def test_no_half_step_through_wrappers_and_kept_iterators(tmp_path):
    """An error inside the loop's body, in five shapes that all look like an iterator being dropped: the save stays
    at the last whole step."""
    class Count:
        n = 0
        def state_dict(self): return dict(n=self.n)
        def load_state_dict(self, s): self.n = s["n"]
    def fail(): raise RuntimeError
    def chained(steps): yield from steps
    def again(steps):
        for s in steps: yield s  # noqa: UP028
    def loop(path, wrap, swallow=False):
        c = Count()
        it = wrap(Checkpoint(path, every=2)(10, c=c))
        try:
            for step in it:
                c.n += 1
                if step == 3: fail()
                yield step
        except RuntimeError:
            if not swallow: raise
    def inline(path):
        c = Count()
        for step in Checkpoint(path, every=2)(10, c=c):
            c.n += 1
            if step == 3: fail()
            yield step
    loops = dict(kept=lambda p: loop(p, lambda x: x), swallowed=lambda p: loop(p, lambda x: x, True),
                 chained=lambda p: loop(p, chained), again=lambda p: loop(p, again),
                 expression=lambda p: loop(p, lambda x: (s for s in x)), inline=inline)
    for name, make in loops.items():
        try: list(make(tmp_path/name))
        except RuntimeError: pass
        gc.collect()
        assert Checkpoint(tmp_path/name).restore(dict(c=(c := Count()))) == 2 == c.n, name


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    from rlblocks import Buffer, Mean
    for value in (Mean(1.), date(2026, 1, 1), tmp_path):
        with pytest.raises(TypeError, match="'state' holds what a safe load refuses"):
            list(Checkpoint(tmp_path/"a", every=1)(1, state=dict(x=value)))
    buffer = Buffer()
    buffer.add(tiny_rows(B=4))
    list(Checkpoint(tmp_path/"b", every=1)(1, buffer=buffer))
    again = Buffer()
    assert Checkpoint(tmp_path/"b").restore(dict(buffer=again)) == 1 and len(again) == 4
    assert again.n_tokens == buffer.n_tokens
    assert torch.equal(again.take(4).tokens, buffer.take(4).tokens)


def test_statements_after_the_yield_are_part_of_the_step(tmp_path):
    "A consumer that stops at such a yield stops inside the step: it is not saved, and comes again."
    def body(path):
        state = dict(n=0)
        for step in Checkpoint(path, every=2)(6, state=state):
            yield step, state["n"]
            state["n"] += 1
    assert list(itertools.islice(body(tmp_path), 4)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert list(body(tmp_path)) == [(2, 2), (3, 3), (4, 4), (5, 5)]


def test_a_loop_left_open_when_the_interpreter_ends_is_quiet(tmp_path):
    "It is closed while there is something to close it with: its folder is free, and stderr is empty."
    script = f"""
from rlblocks.checkpoint.checkpoint import Checkpoint
def loop():
    for step in Checkpoint({str(tmp_path/"run")!r})(5, state=dict(a=1)): yield step
rows = loop()
next(rows)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "", run.stderr


def test_a_save_in_one_process_does_not_search_its_state_for_shards(tmp_path, monkeypatch):
    from rlblocks.checkpoint import shards
    policy, asked = Policy(model(), lr=1e-2, device="cpu"), []
    monkeypatch.setattr(shards, "is_shard", asked.append)
    Checkpoint(tmp_path).save(1, dict(policy=policy))
    assert not asked


def test_a_finished_run_says_so(tmp_path):
    list(loop(steps=3, checkpoint=Checkpoint(tmp_path)))
    with pytest.warns(UserWarning, match="has done 3 of 3 steps"):
        assert list(loop(steps=3, checkpoint=Checkpoint(tmp_path))) == []
    assert [m["step"] for m in loop(steps=5, checkpoint=Checkpoint(tmp_path))] == [3, 4]


def test_saves_appear_whole_and_old_ones_go(tmp_path):
    list(loop(steps=5, checkpoint=Checkpoint(tmp_path, every=1, keep=2)))
    assert sorted(f.name for f in tmp_path.iterdir()) == [".lock", "step-00000004", "step-00000005"]
    (tmp_path/".draft-step-00000006-x").mkdir()       # of a process that died while saving
    (tmp_path/".draft-x").mkdir()                     # of another that is writing a model there
    list(loop(steps=6, checkpoint=Checkpoint(tmp_path, every=1, keep=2)))
    assert sorted(f.name for f in tmp_path.iterdir()) == [".draft-x", ".lock", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("harm, says",
                         [("cut", "is not what was written"), ("flip", "is not what was written"),
                          ("gone", "is missing"), ("meta", "cannot be read")])
def test_a_corrupt_save_is_refused_by_name(tmp_path, harm, says):
    list(loop(steps=2, checkpoint=Checkpoint(tmp_path, every=1)))
    folder = Checkpoint(tmp_path).saves()[-1]
    file = folder/("meta.json" if harm == "meta" else "policy.pt")
    data = bytearray(file.read_bytes())
    if harm == "gone": file.unlink()
    elif harm == "flip": data[len(data)//2] ^= 1; file.write_bytes(data)
    else: file.write_bytes(data[:len(data)//2])
    with pytest.raises(ValueError, match=f"{file.name}.*{says}.*delete .*to resume from the save before"):
        list(loop(steps=4, checkpoint=Checkpoint(tmp_path)))
    shutil.rmtree(folder)
    assert [m["step"] for m in loop(steps=4, checkpoint=Checkpoint(tmp_path))] == [1, 2, 3]


def test_clear_errors(tmp_path):
    (tmp_path/"file").write_text("")
    with pytest.raises(OSError, match="Checkpoint: cannot write to .*file"): Checkpoint(tmp_path/"file")
    with pytest.raises(TypeError, match="'data' is a list"): next(Checkpoint()(3, data=[]))
    with pytest.raises(ValueError, match="every=0"): Checkpoint(tmp_path, every=0)
    list(loop(steps=1, checkpoint=Checkpoint(tmp_path/"run")))
    with pytest.raises(ValueError, match=r"holds \['data', 'policy', 'state'\], the loop has \['policy'\]"):
        next(Checkpoint(tmp_path/"run")(3, policy={}))


def test_the_tutorials_loop_resumes(tmp_path):
    "The loop as it is shown to readers, cut in two."
    grpo = loop_from(str(ROOT/"tutorials"/"grpo.ipynb") + ":grpo")
    class Data(Prompts): pass
    def go(steps, checkpoint=Checkpoint()):
        rows = grpo(here, Data(ROWS, Digits()), lambda completion_ids, **_: [float(2 in x) for x in completion_ids],
                    model=model, lr=1e-2, steps=steps, prompts=4, group_size=4,
                    minibatches=2, max_tokens=4, checkpoint=checkpoint)
        return {m["step"]: {k: float(v) for k, v in m.items()} for m in rows}
    whole = go(4)
    first = go(2, Checkpoint(tmp_path))
    assert first | go(4, Checkpoint(tmp_path)) == whole


class Count:
    "A part that counts, whose state may be slow or impossible to write."
    def __init__(self, n=0): self.n, self.w = n, torch.zeros(1000)
    def state_dict(self): return dict(n=self.n, w=self.w)
    def load_state_dict(self, s): self.n, self.w = s["n"], s["w"]


def test_the_best_is_kept(tmp_path):
    "Saved when it beats all before, whatever `every` says; kept until one is better, also across a resume."
    def run(ratings, start=0):
        checkpoint, state = Checkpoint(tmp_path, every=4, keep=1), dict(n=0)
        for step in loop_of(checkpoint, state, len(ratings)+start): checkpoint.rate(ratings[step-start])
        return checkpoint
    def loop_of(checkpoint, state, steps):
        for step in checkpoint(steps, state=state):
            state["n"] += 1
            yield step
    first = run([.1, .5, .3, .2, .4])
    assert [f.name for f in first.saves()] == ["step-00000002", "step-00000005"]
    assert first.best().name == "step-00000002"
    again = run([.45, .3, .2, .1], start=5)
    assert [f.name for f in again.saves()] == ["step-00000002", "step-00000009"]
    assert again.best().name == "step-00000002"
    last = run([.6, .1], start=9)
    assert [f.name for f in last.saves()] == ["step-00000010", "step-00000011"] and last.best().name == "step-00000010"
    assert Checkpoint(tmp_path/"none").best() is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), torch.tensor(-torch.inf)])
def test_a_rating_that_is_no_number_is_refused(tmp_path, odd):
    "NaN is neither above nor below another rating. One that an earlier version wrote counts as none."
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=f"Checkpoint.rate: the rating is {float(odd)}; a finite number is wanted"):
        checkpoint.rate(odd)
    assert checkpoint.rating is None
    for step, rating in enumerate([float("nan"), .5, .9, .1, None], 1):
        checkpoint_module.write_save(tmp_path, step, dict(state={}), {}, keep=1, rating=rating)
    assert checkpoint.best().name == name(3) and names(tmp_path) == [name(3), name(5)]


def test_a_save_in_the_background_is_of_its_own_step(tmp_path, monkeypatch):
    "The state is copied before the loop goes on, the next save waits for this one, and the end waits for the last."
    go, began, write = threading.Event(), threading.Event(), checkpoint_module.write_save
    def slow(*a, **k):
        began.set()
        assert go.wait(60)
        return write(*a, **k)
    monkeypatch.setattr(checkpoint_module, "write_save", slow)
    checkpoint, c, seen = Checkpoint(tmp_path, every=2, background=True), Count(), []
    for step in checkpoint(3, c=c):
        seen.append((step, [f.name for f in checkpoint.saves()]))
        if step == 2:
            assert began.wait(60)
            go.set()
        c.n += 1
        c.w += 1
    assert seen == [(0, []), (1, []), (2, [])]
    assert [f.name for f in checkpoint.saves()] == ["step-00000002", "step-00000003"]
    state = torch.load(tmp_path/"step-00000002"/"c.pt")
    assert state["n"] == 2 and state["w"][0] == 2       # step 3 had begun to change them
    assert Checkpoint(tmp_path).restore(dict(c=(again := Count()))) == 3 == again.n


@pytest.mark.parametrize("end", ["next", "last"])
def test_an_error_in_the_background_is_raised(tmp_path, monkeypatch, end):
    "By the next save, or at the end; what was saved before stays whole."
    checkpoint, c, steps = Checkpoint(tmp_path, every=1, background=True), Count(), 5 if end == "next" else 2
    write, shown = keeper_module.write_state, []
    def full(name, state, file):
        if state["n"] == 2: raise OSError("no space left on device")
        return write(name, state, file)
    monkeypatch.setattr(keeper_module, "write_state", full)
    def run():
        for step in checkpoint(steps, c=c):
            c.n += 1
            yield step
    with pytest.raises(OSError, match="no space left on device"):
        for step in run(): shown.append(step)
    assert shown == ([0, 1, 2] if end == "next" else [0, 1])
    assert Checkpoint(tmp_path).restore(dict(c=(again := Count()))) == 1 == again.n


SHARDS = """
import sys, torch
from pathlib import Path
from rlblocks import Checkpoint, Policy
from rlblocks.engines.ema import Ema
from tiny import NEAR, model, steady
from test_optim import LR, batch, loss
folder = Path(sys.argv[1])
def run(path, steps, engine, **how):
    policy = Policy(model(), optimizer=steady(LR), engine=engine, device="cpu")
    checkpoint = Checkpoint(path, every=2, **how)
    for step in checkpoint(steps, policy=policy, state=dict(x=1)): policy.step(batch(step), loss)
    return {k: v for b in policy.weights().buckets(1 << 30) for k, v in b.items()}
plain = run(None, 4, None)
near = lambda a: max((a[k]-v).abs().max().item() for k, v in plain.items()) < NEAR*LR
run(folder/"a", 2, "fsdp2")
save = Checkpoint(folder/"a").saves()[0]
files = sorted(str(f.relative_to(save)) for f in save.rglob("*") if f.is_file())
print(files, (save/"policy.pt").stat().st_size < 40_000)
print(near(run(folder/"a", 4, "fsdp2")))
try: run(folder/"a", 6, None)
except ValueError as e: print(e)
run(folder/"b", 2, "fsdp2", whole=True)
print(near(run(folder/"b", 4, None)), [f.name for f in (folder/"b"/"step-00000002").iterdir() if f.is_dir()])
shard = next((folder/"a"/"step-00000004"/"shards").glob("__0*"))
data = bytearray(shard.read_bytes()); data[len(data)//2] ^= 1; shard.write_bytes(data)
try: run(folder/"a", 6, "fsdp2")
except ValueError as e: print(e)
"""


def test_shards_are_written_and_read_as_shards(tmp_path):
    run = subprocess.run([sys.executable, "-c", SHARDS, tmp_path], capture_output=True, text=True,
                         env=os.environ | dict(PYTHONPATH=f"{ROOT/'tests'}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1"))
    assert run.returncode == 0, run.stderr[-2000:]
    files, resumed, engine, whole, harm = run.stdout.splitlines()
    assert files == "['meta.json', 'policy.pt', 'shards/.metadata', 'shards/__0_0.distcp', 'state.pt'] True"
    assert resumed == "True" and whole == "True []"
    assert "'policy' was saved in shards, and is not cut over ranks now" in engine
    assert "__0_0.distcp is not what was written" in harm


def names(folder): return sorted(f.name for f in folder.iterdir() if f.name != ".lock")
def name(step): return f"step-{step:08d}"


def count(path, steps, state, at=None, **how):
    "A loop that counts; `at`: what happens to the state in which step."
    for step in Checkpoint(path, every=1, **how)(steps, state=state):
        state["n"] = state.get("n", 0) + 1
        if at and step in at: at[step](state)
        yield step


class Fails:
    "A part that rank 1 can neither save nor load, where `what` says so."
    def __init__(self, rank): self.rank, self.what, self.w = rank, "", torch.zeros(3)
    def odd(self, what):
        if self.rank == 1 and what == self.what: raise MemoryError(f"no room to {what}")
    def state_dict(self):
        self.odd("save")
        return dict(w=self.w)
    def load_state_dict(self, state): self.odd("load")


class Meets:
    "A part whose ranks wait for each other, as those of a model do that is cut."
    def state_dict(self): dist.barrier(); return {}
    def load_state_dict(self, state): dist.barrier()


def one_fails(rank, world, folder):
    "What each rank raises where rank 1 alone fails, and stays; afterwards all save and load together."
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    parts, said, load, copy = dict(a=Fails(rank), b=Meets()), {}, torch.load, checkpoint_module.snapshot
    keeper = keeper_module.Keeper(parts)
    def ways(what):
        parts["a"].what = what
        yield "save", lambda: Checkpoint(folder, background=what == "copy").save(2, parts)
        yield "load", lambda: Checkpoint(folder).restore(parts)
        yield "keeper saves", lambda: keeper.write(str(folder/what), "shards", False)
        yield "keeper loads", lambda: keeper.read(str(folder/"step-00000001"), {})
    def broken(*args, **how): raise MemoryError(f"no room to {parts['a'].what}")
    Checkpoint(folder).save(1, parts)
    for what in ("save", "load", "read", "copy", "nothing"):
        if rank == 0: (folder/what).mkdir()
        if rank == 1: torch.load = broken if what == "read" else load
        if rank == 1: checkpoint_module.snapshot = broken if what == "copy" else copy
        for way, do in ways(what):
            if what == "read" and way.endswith("saves") or what == "copy" and way != "save": continue
            try: do(); error = None
            except Exception as e: error = e
            said[what, way] = f"{type(error).__name__}: {error}"
    torch.save(said, folder/f"{rank}.pt")
    dist.barrier()


@pytest.mark.ranks
def test_what_one_rank_fails_in_all_ranks_raise(tmp_path):
    "At once and with its text, in place of a wait for a rank that never comes; and the ranks can still go on together."
    on_ranks(one_fails, (tmp_path,), 2, group=False, limit=300)
    mine, other = (torch.load(tmp_path/f"{r}.pt") for r in (1, 0))
    odd = {("save", "save"), ("save", "keeper saves"), ("load", "load"), ("load", "keeper loads"), ("read", "load"),
           ("read", "keeper loads"), ("copy", "save")}
    assert {k for k, x in mine.items() if x != "NoneType: None"} == odd
    for key, text in mine.items():
        failed = f"MemoryError: no room to {key[0]}"
        assert (text, other[key]) == ((failed, f"RuntimeError: Checkpoint: rank 1 failed: {failed}") if key in odd
                                      else ("NoneType: None",)*2), key


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_turns_unloadable_is_refused_when_it_is_saved(tmp_path, background):
    "A safe load of every save, not of the first: the saves before stay, and the run can be resumed from them."
    worse = {3: lambda state: state.update(best=np.array([1., 2.]).mean())}
    with pytest.raises(TypeError, match=r"'state' holds what a safe load refuses \(numpy.*scalar\)"):
        list(count(tmp_path, 8, {}, worse, background=background))
    assert names(tmp_path) == [name(2), name(3)]
    assert list(count(tmp_path, 8, state := {})) == [3, 4, 5, 6, 7] and state["n"] == 8


def test_what_cannot_even_be_written_is_the_same_error(tmp_path):
    with pytest.raises(TypeError, match="'state' holds what a safe load refuses"):
        list(count(tmp_path, 3, dict(f=lambda: 0)))
    assert names(tmp_path) == []


def test_the_proof_reads_no_numbers(tmp_path, monkeypatch):
    "So that it costs nothing with gigabytes: the pages of the file that come into memory are a small part of it."
    grown, load = [], torch.load
    def resident(): return int(open("/proc/self/statm").read().split()[1])*resource.getpagesize()
    def counted(*args, **how):
        before, x = resident(), load(*args, **how)
        grown.append(resident() - before)
        return x
    monkeypatch.setattr(torch, "load", counted)
    Checkpoint(tmp_path).save(1, dict(state=dict(x=torch.zeros(1 << 24))))
    assert len(grown) == 1 and grown[0] < 1 << 23        # of 64 MB


def test_only_step_and_digits_are_saves(tmp_path):
    "Copies under other names are neither pruned nor resumed from, and numbers are compared as numbers."
    list(count(tmp_path, 3, {}))
    for copy in ("step-00000003-good", "step-best", "step-99999999.bak"):
        shutil.copytree(tmp_path/name(3), tmp_path/copy)
    (tmp_path/name(9)).write_text("a file")
    assert [f.name for f in saves_in(tmp_path)] == [name(2), name(3)]
    assert list(count(tmp_path, 6, state := {})) == [3, 4, 5] and state["n"] == 6
    assert names(tmp_path) == ["step-00000003-good", name(5), name(6), name(9), "step-99999999.bak", "step-best"]
    for n in (99999999, 100000000): shutil.copytree(tmp_path/name(6), tmp_path/name(n))
    assert [f.name for f in saves_in(tmp_path)][-1] == "step-100000000"


def test_a_save_that_is_a_link(tmp_path):
    """To another folder of the run's: it is resumed from, and when it is old the link goes, what it points to stays,
    and the run goes on. A link to nowhere is no reason to begin anew."""
    run, large = tmp_path/"run", tmp_path/"run"/".elsewhere"
    list(count(run, 2, {}))
    shutil.move(run/name(2), large)
    os.symlink(large, run/name(2))
    assert list(count(run, 6, {})) == [2, 3, 4, 5] and (large/"meta.json").exists()
    assert names(run) == [".elsewhere", name(5), name(6)]
    shutil.rmtree(run/name(6))
    os.symlink(run/"not mounted", run/name(6))
    with pytest.raises(ValueError, match=f"{name(6)}/meta.json cannot be read"): list(count(run, 8, {}))
    # and the lock was free
    with pytest.raises(ValueError, match=f"{name(6)}/meta.json cannot be read"): list(count(run, 8, {}))


@contextmanager
def full_disk(most=100_000):
    "While inside, no file of this process grows beyond so many bytes."
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_does_not_fit_leaves_nothing(tmp_path, background):
    """OSError with the folder and what is free; no draft, which would hold the room that the next save needs; the
    saves before stay."""
    grow = {2: lambda state: state.update(x=torch.zeros(100_000))}
    for _ in range(2):
        said = f"step 3 cannot be written to {tmp_path}: .*bytes are free on its disk; the save before it has"
        with full_disk(), pytest.raises(OSError, match=f"the save of {said}"):
            list(count(tmp_path, 6, {}, grow, background=background))
        assert names(tmp_path) == [name(1), name(2)]
    assert list(count(tmp_path, 4, state := {}, grow, background=background)) == [2, 3] and len(state["x"]) == 100_000


def test_on_a_disk_that_is_really_full(tmp_path):
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", tmp_path],
                                      capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        state = dict(x=torch.zeros(300_000))         # 1.2 MB
        list(count(tmp_path/"run", 2, state))
        (tmp_path/"other").write_bytes(bytes(1_900_000))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left on device"):
                list(count(tmp_path/"run", 6, dict(x=torch.zeros(300_000))))
            assert names(tmp_path/"run") == [name(1), name(2)]
        with (tmp_path/"other").open("wb") as f: f.write(bytes(1_300_000))
        assert list(count(tmp_path/"run", 3, dict(x=torch.zeros(300_000)))) == [2]
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", tmp_path], check=True)


RUN = """
import os, sys, time
from rlblocks import Checkpoint
for step in Checkpoint(sys.argv[1], every=1)(3, state={}):
    if step == 1:
        child = os.fork()           # inherits the open file
        if child == 0: time.sleep(600)
        print(child, flush=True)
        time.sleep(600)
"""


def test_one_run_a_folder_and_a_dead_one_does_not_count(tmp_path):
    """The second is refused with host and process of the first, reading is not; a run that was killed has let go,
    also when a process that it forked lives on."""
    other = subprocess.Popen([sys.executable, "-c", RUN, tmp_path], stdout=subprocess.PIPE, text=True,
                             env=os.environ | dict(PYTHONPATH=str(ROOT)))
    child = int(other.stdout.readline())
    try:
        with pytest.raises(RuntimeError,
                           match=f"{tmp_path} is in use by a run on host {socket.gethostname()}, process "
                                 f"{other.pid}; one run a folder"):
            list(count(tmp_path, 3, {}))
        with pytest.raises(RuntimeError, match="is in use by a run"): Checkpoint(tmp_path).save(7, dict(state={}))
        assert names(tmp_path) == [name(1)] and Checkpoint(tmp_path).restore(dict(state={})) == 1
        assert Checkpoint(tmp_path).best() is None
        other.send_signal(signal.SIGKILL)
        other.wait()
        os.kill(child, 0)
        assert list(count(tmp_path, 3, {})) == [1, 2]
    finally:
        other.kill()
        os.kill(child, signal.SIGKILL)


def test_a_cell_that_is_run_again(tmp_path):
    """In one process: refused while the earlier loop is held, also by the same Checkpoint; free when it is closed,
    dropped, failed, finished, or in a ring of references."""
    first = count(tmp_path, 9, {})
    assert next(first) == 0
    with pytest.raises(RuntimeError,
                       match=f"process {os.getpid()}; one run a folder: an earlier loop of this process has not ended"):
        next(count(tmp_path, 9, {}))
    first.close()
    first = count(tmp_path, 9, {})
    assert next(first) == 0 and next(first) == 1
    del first
    ring = [count(tmp_path, 9, {})]
    assert next(ring[0]) == 1
    ring.append(ring)
    gc.disable()
    try:
        del ring
        with pytest.raises(ZeroDivisionError): list(count(tmp_path, 9, {}, {5: lambda _: 1/0}))
    finally: gc.enable()
    again = Checkpoint(tmp_path)
    loop, other = again(9, state={}), again(9, state={})
    assert next(loop) == 5
    with pytest.raises(RuntimeError, match="is in use"): next(other)
    assert list(loop) == [6, 7, 8] and names(tmp_path) == [name(5), name(9)]         # the refused one took nothing away


def test_a_lock_that_was_deleted(tmp_path):
    "By somebody who cleans up: it is taken again with the next save, unless another run has done so."
    one = count(tmp_path, 9, {})
    assert next(one) == 0 and next(one) == 1
    (tmp_path/".lock").unlink()
    assert next(one) == 2
    with pytest.raises(RuntimeError, match="is in use"): next(count(tmp_path, 9, {}))
    (tmp_path/".lock").unlink()
    two = count(tmp_path, 9, {})
    assert next(two) == 2
    with pytest.raises(RuntimeError, match="is in use"): next(one)
    two.close()


def test_without_locks_a_run_goes_on_with_a_warning(tmp_path, monkeypatch):
    def none(fd, how):
        if how & fcntl.LOCK_EX: raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="this file system has no locks"): assert list(count(tmp_path, 2, {})) == [0, 1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_save_that_replaces_one_is_never_missing(tmp_path, monkeypatch, n):
    "The process dies at either rename: the old save or the new one is there when the next run starts."
    Checkpoint(tmp_path).save(5, dict(state=dict(n=1)))
    replace, seen = os.replace, []
    class Dies(BaseException): pass
    def dies(*a):
        seen.append(a)
        if len(seen) == n: raise Dies
        return replace(*a)
    monkeypatch.setattr(os, "replace", dies)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)           # a process that is killed cleans nothing up
    with pytest.raises(Dies): Checkpoint(tmp_path).save(5, dict(state=dict(n=2)))
    monkeypatch.undo()
    assert list(count(tmp_path, 6, state := {})) == [5] and state["n"] == 2
    assert names(tmp_path) == [name(5), name(6)]


def test_a_save_of_an_earlier_version_loads(tmp_path):
    "The layout of version 0.1: a file a part, a list of BLAKE2b hashes; written here by hand."
    save = tmp_path/name(4)
    save.mkdir()
    torch.save(dict(n=4, w=torch.full((1000,), 4.)), save/"c.pt")
    torch.save(dict(coef=.25), save/"state.pt")
    files = {f: hashlib.blake2b((save/f).read_bytes()).hexdigest() for f in ("c.pt", "state.pt")}
    (save/"meta.json").write_text(json.dumps(dict(step=4, files=files, rating=.5), indent=1))
    checkpoint, c, state = Checkpoint(tmp_path), Count(), {}
    steps = [(step, c.n, float(c.w[0]), dict(state)) for step in checkpoint(6, c=c, state=state)]
    assert steps[0] == (4, 4, 4., dict(coef=.25)) and [s for s, *_ in steps] == [4, 5]
    assert checkpoint.best() == save


def test_a_save_that_an_earlier_version_wrote_goes_on(tmp_path):
    """tests/saved_7471a96 was written by `Checkpoint` of that commit (22 November 2026, modules in one flat folder):
    a policy and its Adam moments after two steps, and what the policy gave then. A third step needs the moments."""
    from transformers import LlamaConfig, LlamaForCausalLM
    shutil.copytree(ROOT/"tests"/"saved_7471a96", tmp_path/"saves")
    net = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                                       num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
                                       bos_token_id=1, eos_token_id=1, pad_token_id=0))
    policy, state, lengths, at = Policy(net, lr=1e-2, device="cpu"), {}, torch.tensor([6, 5, 4, 6]), torch.arange(6)
    b = Batch(tokens=torch.arange(24).reshape(4, 6) % 7 + 1, lengths=lengths, mask=(at > 1) & (at < lengths[:, None]))
    given = Checkpoint(tmp_path/"saves")(3, policy=policy, state=state)
    assert next(given) == policy.version == 2 and state == dict(coef=2.5)
    then = torch.tensor([[-1.97710419, -1.98715174, -1.97906005, -1.98000729],
                         [-1.97658813, -1.97198665, -1.98820245, 0],
                         [-2.02265430, -1.97676039, 0, 0], [-1.96273685, -2.02264857, -1.97650409, -1.97123444]])
    assert (policy.logprobs(b)[:, 2:] - then).abs().max() < 1e-5
    moments = policy.state_dict()["optimizer"]["state"]
    assert moments and all(float(x["step"]) == 2 and x["exp_avg_sq"].any() for x in moments.values())
    policy.step(b, lambda out, b: (-(out.logprobs*b.mask).sum()/b.n_tokens, {}))
    assert policy.version == 3
    given.close()
