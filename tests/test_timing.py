"""`timed` (nbs/tracking/05 … 07): phases of real loops, numbers to the bit, timelines, idle engines, ranks."""
import json
import threading
from itertools import count, pairwise

import pytest
import torch
from rlblocks import Grader, Mean, Policy, Prompts, here, later, phase, timed, watch, without_times
from rlblocks.engines import phases, usage
from rlblocks.engines.phases import Recorder, PhaseSpan, note
from rlblocks.engines.usage import Usage
from rlblocks.loops import async_grpo, grpo
from rlblocks.models.flops import size_of
from rlblocks.people.curves import row_numbers
from rlblocks.people.loop_frame import innermost
from rlblocks.tracking import timing
from rlblocks.tracking.timing import EngineIdle, device_numbers, phase_seconds
from tiny import model, rows, tokenizer


def reward(prompts, completions, **_): return [float(len(set(text.split()))) for text in completions]
def tiny(loop=grpo, steps=3, **more):
    prompts = Prompts([dict(prompt=f"w{i} w{i + 1}") for i in range(2, 12)], tokenizer(), template="{prompt}")
    return loop(here, prompts, reward, model=model(), tokenizer=tokenizer(), lr=1e-2, steps=steps, prompts=4,
                group_size=4, minibatches=2, max_tokens=4, **more)


@pytest.fixture
def ticks(monkeypatch):
    "A clock that shows a second more at each look; the list has the looks."
    looks, clock = [], count()
    def now():
        looks.append(float(next(clock)))
        return looks[-1]
    for module in (phases, timing): monkeypatch.setattr(module, "now", now)
    return looks


# -- what a step's dict gets

def test_a_real_loop_has_all_its_phases_and_they_add_up_to_the_step(ticks, tmp_path):
    made = list(timed(tiny(save=tmp_path/"model")))
    named = {"seconds_sample", "seconds_grade", "seconds_logprobs", "seconds_update", "seconds_sync"}
    for row in made:
        assert named <= row.keys() and row["tokens_per_second"] > 0 < row["sampled_per_second"] and row["tflops"] > 0
        assert sum(x for k, x in row.items() if k.startswith("seconds_")) == row["seconds"]
    # two looks a mark, two a step: weights, load, generate, score, two logprobs, two steps. This is all that a run pays
    # for the clock; benchmarks/timing.py has what it costs in seconds
    assert len(ticks) <= len(made)*(2*8 + 2) + 3, f"{len(ticks)} looks at the clock"
    assert made[0]["seconds_update"] == 2. and made[0]["seconds_grade"] == 1. and made[0]["seconds_sync"] == 2.


def test_the_numbers_of_a_run_are_equal_to_the_bit_with_and_without(tmp_path):
    def numbers(loop): return [row_numbers(without_times(row)) for row in loop]
    plain = numbers(tiny())
    assert numbers(timed(tiny())) == numbers(watch(tiny())) == numbers(watch(timed(tiny()))) == plain
    assert numbers(timed(tiny(), trace=tmp_path/"t.json", profile={1}, folder=tmp_path)) == plain
    profile = json.loads((tmp_path/"profile-1.json").read_text())["traceEvents"]
    assert {"sample", "grade", "update"} <= {x.get("name") for x in profile}
    assert [x.name for x in tmp_path.iterdir() if "profile" in x.name] == ["profile-1.json"]


def test_a_mark_inside_another_counts_once_and_each_thread_has_its_own(ticks):
    class Judge:
        @phase("logprobs")
        def logprobs(self): return 1.
        @phase("grade")
        def grade(self, fail=False):
            if fail: raise KeyError
            return self.logprobs()
    judge = Judge()
    with Recorder() as first, Recorder() as second:
        judge.grade()
        with pytest.raises(KeyError): judge.grade(fail=True)       # it ends all the same
        thread = threading.Thread(target=judge.grade, name="aside")
        with phase("wait"):
            thread.start()
            thread.join()
        spans = first.taken()
    assert [(s.phase, s.lane) for s in spans] == [
        ("grade", "MainThread"), ("grade", "MainThread"), ("grade", "aside"), ("wait", "MainThread")]
    assert second.taken() == spans and judge.grade() == 1. and not first.spans
    row = phase_seconds([s for s in spans if s.lane == "MainThread"], 9.)
    assert row == dict(seconds=9., seconds_grade=2., seconds_wait=3., seconds_other=4.)


def test_a_loops_own_number_stays_and_what_is_no_loop_is_told():
    made = list(timed({"step": i, "seconds": -1., "loss": Mean(1, 2)} for i in range(2)))
    assert [row["seconds"] for row in made] == [-1., -1.] and "seconds_other" in made[0]
    with pytest.raises(TypeError, match="timed: a function came; .*call it"): timed(tiny)
    with pytest.raises(TypeError, match="timed: a float came from step 1"): list(timed(iter([dict(loss=1.), 2.])))


def test_a_loop_inside_is_found_by_sliders_and_closed_with_what_is_around_it():
    def loop():
        kl_coef = .5
        def loss(out, b): return kl_coef
        try:
            for step in range(9): yield dict(step=step, used=loss(0, 0))
        finally: closed.append(step)
    closed, inner = [], loop()
    w = watch(timed(inner), sliders=dict(kl_coef=(0, 1)))
    for row in w:
        if row["step"] == 1: w.set(kl_coef=.25)
        if row["step"] == 3: break
    assert innermost(w.loop) is inner and [row["used"] for row in w.rows] == [.5, .5, .25, .25]
    w.loop.close()
    assert closed == [3]


def test_two_dicts_of_a_step_have_their_seconds_together(ticks):
    w = watch(dict(step=0, **{name: 1.}) for name in ("loss", "held_out"))
    first, second = w
    assert len(w.rows) == 1 and w.rows[0]["seconds"] == first["seconds"] + second["seconds"]


# -- the device

def test_operations_are_those_of_the_sizes_and_of_what_learns():
    policy, b = Policy(model(), lr=1e-2), rows(dtype=torch.float32)
    size, before = size_of(policy._run.module), usage.usage().flops
    policy.logprobs(b)
    forward = usage.usage().flops - before
    assert forward == size.flops(b.lengths) > 2*size.weights*int(b.lengths.sum())
    policy.step(b, lambda out, b: (out.logprobs.sum(), {}))
    assert usage.usage().flops - before - forward == pytest.approx(3*forward)
    experts = size_of(model("mixtral"))       # 2 of 4 are asked
    assert experts.weights < sum(p.numel() for p in model("mixtral").parameters())
    table = model().get_input_embeddings().weight.numel()
    assert size.weights == sum(p.numel() for p in policy._run.module.parameters()) - table, "it is looked up"


def test_use_is_of_all_devices_that_computed_and_unknown_where_one_is():
    def used(flops, peak=100., **more): return Usage(flops, peak, more.get("memory", 0), 0, more.get("busy", 0.), 10)
    before = dict(a=used(100.), loop=used(0., 0.))
    after = dict(a=used(200., memory=2**30), b=used(60., memory=2**31, busy=5.), loop=used(0., 0.))
    found = device_numbers(before, after, 2.)
    assert found == dict(tflops=80e-12, mfu=.4, memory_gib=2., gpu_use=.5), "the loop's own process computed nothing"
    assert "mfu" not in device_numbers(before, after | dict(b=used(60., 0.)), 2.)
    again = device_numbers(dict(a=used(200.)), dict(a=used(60.)), 1.)
    assert "tflops" not in again, "of a rank that was started again the counters begin anew"


def test_an_engine_elsewhere_waits_between_its_spans_also_over_steps():
    idle, engine = EngineIdle(), lambda *times: PhaseSpan("sample", "engine", *times, "engine")
    own = PhaseSpan("wait", "", 0., 9., "loop")
    assert idle.between([own], "loop") == {}
    assert idle.between([own, engine(1., 3.), engine(4., 5.)], "loop") == dict(engine_wait=1.)
    assert idle.between([engine(8., 9.), own], "loop") == dict(engine_wait=3.)
    assert idle.between([engine(10., 11.), PhaseSpan("sample", "", 2., 3., "other")], "loop") == dict(engine_wait=.5)


# -- timelines

def test_the_slices_of_a_timeline_nest_and_the_file_is_whole_after_each_step(tmp_path):
    for row in timed(tiny(async_grpo), trace=tmp_path/"a"/"trace.json"):
        events = json.loads((tmp_path/"a"/"trace.json").read_text())
        assert f"step {row['step']}" in {x["name"] for x in events}
    names = {x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"}
    assert names == {0: "loop"}
    slices = sorted((x["ts"], -x["dur"], x["name"]) for x in events if x["ph"] == "X")
    assert {"sample", "update", "sync", "grade", "step 2"} <= {name for *_, name in slices}
    steps = [x for x in slices if x[2].startswith("step")]
    assert all(start - length <= after for (start, length, _), (after, *_) in pairwise(steps)), "steps do not overlap"
    inside = [x for x in slices if not x[2].startswith("step")]
    for start, length, _ in inside[:-1]:
        assert any(s <= start and start - length <= s - n for s, n, _ in steps), "a phase lies within its step"
    assert all(start - length <= after for (start, length, _), (after, *_) in pairwise(inside)), "outermost marks alone"


def test_spans_of_other_processes_and_threads_have_rows_of_their_own(tmp_path):
    def loop():
        for step in range(2):
            answer = later(grader.score, rows(dtype=torch.float32))
            used = Usage(1e9*step, 0., 2**31, 0, 0., 0)
            note(PhaseSpan("sample", "Rollout.generate", 5.*step, 5.*step + 2., "pool rank 0"), used)
            answer.result()
            yield dict(step=step)
    grader = Grader(lambda tokens: [1.]*len(tokens))
    made = list(timed(loop(), trace=tmp_path/"trace.json"))
    events = json.loads((tmp_path/"trace.json").read_text())
    assert {x["args"]["name"] for x in events if x["name"] == "process_name"} == {"loop", "grader", "pool rank 0"}
    assert made[1]["engine_wait"] == 3. and made[1]["memory_gib"] == 2. and made[1]["seconds_wait"] >= 0
    assert "seconds_grade" not in made[1], "of another thread"
