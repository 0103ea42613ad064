"""`timed` (nbs/tracking/05, 06): phases of real loops, numbers to the bit, timelines, idle engines, ranks."""
import json
import sys
import threading
import warnings
from ctypes import c_uint
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_media
import torch
from forked import on_ranks
from rlblocks import (
    Batch, Checkpoint, Grader, JsonLines, Mean, Policy, Prompts, here, later, log_to, phase, report, timed, watch,
    without_times)
from rlblocks.engines import phases, usage
from rlblocks.engines.phases import Recorder, PhaseSpan, note
from rlblocks.engines.usage import Usage
from rlblocks.loops import async_grpo, grpo, ppo
from rlblocks.models.flops import size_of
from rlblocks.people.command import command_line
from rlblocks.people.curves import row_numbers
from rlblocks.tracking import timing
from rlblocks.tracking.loop_frame import innermost
from rlblocks.tracking.timing import EngineIdle, batch_shares, device_numbers, phase_seconds
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
    assert numbers(timed(tiny())) == numbers(watch(tiny())) == numbers(log_to(tiny(), console=False)) == plain
    assert numbers(watch(log_to(timed(tiny(), folder=tmp_path, profile={1})))) == plain
    profile = json.loads((tmp_path/"profile-1.json").read_text())["traceEvents"]
    assert {"sample", "grade", "update"} <= {x.get("name") for x in profile}
    assert sorted(x.name for x in tmp_path.iterdir()) == ["profile-1.json", "trace.json"]


def test_all_loops_that_run_under_a_timer_are_timed_once(ticks):
    "The innermost timer's numbers stand; those around it hand them on."
    row, = timed(timed(iter([dict(step=0)])))
    assert row == dict(step=0, seconds=1., seconds_other=1., memory_gib=row["memory_gib"])
    assert list(timed(iter([row | dict(seconds_other=.5)]))) == [row | dict(seconds_other=.5)]
    del row["memory_gib"]
    assert list(timed(iter([row]))) == [row], "a log of another machine"


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


def test_a_critics_tokens_are_not_added_to_those_of_its_policy():
    w = watch(tiny(ppo, steps=1, epochs=2))
    list(w)
    row, = w.numbers
    assert row["tokens_per_second"]*row["seconds"] == pytest.approx(2*int(w.batch.lengths.sum()))


def test_shares_of_groups_and_answers_are_those_of_a_plain_count():
    b = Batch(group=torch.tensor([7, 7, 3, 3, 3, 9]), scores=torch.tensor([1., 1., 0., 1., 0., 5.]),
              finish_reason=["max_tokens", "end", "end", "max_tokens", "end", "max_tokens"])
    assert batch_shares(b) == dict(equal_groups=.5, at_limit=.5), "a group of one row is not counted"
    b["scores"] = torch.tensor([float("nan")]*6)
    assert batch_shares(b)["equal_groups"] == 0. and batch_shares(b[torch.zeros(6, dtype=torch.bool)]) == {}
    b["scores"] = torch.tensor([True, True, False, True, True, True])
    assert batch_shares(b)["equal_groups"] == .5
    assert batch_shares(None) == batch_shares(Batch(tokens=torch.zeros(2, 2, dtype=torch.long))) == {}


def test_a_loops_own_number_stays_and_what_is_no_loop_is_told():
    made = list(timed({"step": i, "seconds": -1., "loss": Mean(1, 2)} for i in range(2)))
    assert [row["seconds"] for row in made] == [-1., -1.] and "seconds_other" in made[0]
    with pytest.raises(TypeError, match="timed: a function came; .*call it"): timed(tiny)
    with pytest.raises(TypeError, match="timed: a float came from step 1"): list(timed(iter([dict(loss=1.), 2.])))
    with pytest.raises(ValueError, match=r"profile=\{3\} came without folder="): timed(iter([]), profile={3})
    def loop():
        yield dict(step=0)
        return "the model"
    def through(): answers.append((yield from timed(loop())))
    answers = []
    assert len(list(through())) == 1 and answers == ["the model"]


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
    assert list(w) == [dict(step=0, loss=1.), dict(step=0, held_out=1.)]
    numbers, = w.numbers
    assert numbers["seconds"] == numbers["seconds_other"] == 2. and numbers["loss"] == numbers["held_out"] == 1.


# -- the device

def test_operations_are_those_of_the_sizes_and_of_what_learns():
    policy, b = Policy(model(), lr=1e-2), rows(dtype=torch.float32)
    size, before = size_of(policy._run.module), usage.usage().flops
    policy.logprobs(b)
    forward = usage.usage().flops - before
    assert forward == size.flops(b.lengths) > 2*size.weights*int(b.lengths.sum())
    policy.step(b, lambda out, b: (out.logprobs.sum(), {}))
    assert usage.usage().flops - before - forward == pytest.approx(3*forward)
    def total(net, part=""): return sum(p.numel() for name, p in net.named_parameters() if part in name)
    table = model().get_input_embeddings().weight.numel()
    assert size.weights == total(policy._run.module) - table, "it is looked up"
    mixture = model("mixtral")
    assert size_of(mixture).weights == total(mixture) - total(mixture, "embed_tokens") - total(mixture, ".experts.")/2
    sees = tiny_media.model("qwen3_vl")
    assert size_of(sees).weights == total(sees) - total(sees, "visual") and total(sees, "visual") > 0


def test_use_is_of_all_devices_that_computed_and_unknown_where_one_is():
    def used(flops, peak=100., **more): return Usage(flops, peak, more.get("memory", 0), 0, more.get("busy", 0.), 10)
    before = dict(a=used(100.), loop=used(0., 0.))
    after = dict(a=used(200., memory=2**30), b=used(60., memory=2**31, busy=5.), loop=used(0., 0.))
    found = device_numbers(before, after, 2.)
    assert found == dict(tflops=80e-12, mfu=.4, memory_gib=2., gpu_use=.5), "the loop's own process computed nothing"
    assert "mfu" not in device_numbers(before, after | dict(b=used(60., 0.)), 2.)
    again = device_numbers(dict(a=used(200.)), dict(a=used(60.)), 1.)
    assert "tflops" not in again, "of a rank that was started again the counters begin anew"


def test_of_a_slice_of_a_card_the_peak_is_not_known():
    assert usage.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert usage.peak_flops(name) == 0., name


def test_a_report_has_what_to_mend_before_what_is_slow(tmp_path):
    def loop():
        for step in range(12): yield dict(step=step, loss=float("nan"), seconds=2., seconds_sample=2.)
    for _ in log_to(loop(), folder=tmp_path, console=False): pass
    said = report(tmp_path)
    assert 0 < said.index("Mend first: ") < said.index("Then, for speed: sampling is most of it"), said
    assert said == report(JsonLines(tmp_path/"log.jsonl").rows())
    assert "Mend first" not in report([dict(step=0, seconds=1., seconds_update=1., seconds_other=0.)])
    with pytest.raises(ValueError, match="report: .* has no steps"): report(tmp_path/"none.jsonl")


def test_an_engine_elsewhere_waits_between_its_spans_also_over_steps():
    idle, engine = EngineIdle(), lambda *times: PhaseSpan("sample", "engine", *times, "engine")
    own = PhaseSpan("wait", "", 0., 9., "loop")
    def between(*spans, seconds=9.): return idle.between(spans, {"engine", "other"}, seconds)
    assert between(own) == {} == between(PhaseSpan("sample", "", 0., 1., "grader 1"))
    assert between(own, engine(1., 3.), engine(4., 5.)) == dict(engine_wait=1.)
    assert between(engine(8., 9.), own) == dict(engine_wait=3.)
    assert between(engine(10., 11.), PhaseSpan("sample", "", 2., 3., "other")) == dict(engine_wait=.5)
    assert between(engine(90., 91.), seconds=4.) == dict(engine_wait=4.)


def test_an_evaluation_in_a_thread_is_no_engine_that_waits():
    "`later(evaluate, …)` samples in a thread of this process, once in many steps."
    def sample():
        with phase("sample"): pass
    def loop():
        for step in range(4):
            if step % 2:
                thread = threading.Thread(target=sample)
                thread.start()
                thread.join()
            yield dict(step=step)
    assert not any("engine_wait" in row for row in timed(loop()))


def test_a_full_disk_ends_a_timeline_and_no_run(tmp_path):
    if not Path("/dev/full").exists(): pytest.skip("there is no /dev/full")
    (tmp_path/"trace.json").symlink_to("/dev/full")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(timed(iter([dict(step=i) for i in range(3)]), folder=tmp_path))) == 3
    assert len(said) == 1 and "timed: " in str(said[0].message) and "No space left" in str(said[0].message)
    (tmp_path/"file").touch()
    with pytest.warns(UserWarning, match="goes on without"):
        assert len(list(timed(iter([dict(step=0)]), folder=tmp_path/"file", profile={0}))) == 1


def test_what_nvml_notes_is_read_once(monkeypatch):
    "With NVML's own structures; a driver that has no new notes raises."
    nvml = pytest.importorskip("ray._private.thirdparty.pynvml.pynvml")
    notes = []
    def samples(handle, kind, since):
        assert (handle, kind) == ("GPU-12", nvml.NVML_GPU_UTILIZATION_SAMPLES)
        new = [x for x in notes if x.timeStamp > since - 10]           # it may give old ones again
        if not new: raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
        return 1, new
    def noted(time, busy):
        x = nvml.c_nvmlSample_t()
        x.timeStamp, x.sampleValue.uiVal = time, c_uint(busy)
        notes.append(x)
    calls = dict(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda x: x, nvmlDeviceGetSamples=samples)
    for name, f in calls.items(): monkeypatch.setattr(nvml, name, f)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    fake = dict(is_initialized=lambda: True, current_device=lambda: 12, memory_stats=lambda: {},
                get_device_properties=lambda i: SimpleNamespace(uuid=i), get_device_name=lambda i: "NVIDIA H200")
    for name, f in fake.items(): monkeypatch.setattr(torch.cuda, name, f)
    usage._gpu.cache_clear(), usage._peak.cache_clear()
    assert usage.gpu_notes() == []
    noted(100, 50), noted(105, 100)
    before = usage.usage()
    noted(110, 0), noted(112, 30)
    after = usage.usage()
    assert device_numbers(dict(a=before), dict(a=after), 1.)["gpu_use"] == pytest.approx(.15)
    assert after.peak_flops == 989e12
    usage._gpu.cache_clear(), usage._peak.cache_clear()


# -- timelines

def slices_of(path):
    """The slices of a file that Perfetto opens, by the name of their process: `traceEvents`, in which each slice has a
    whole `ts` and `dur`, its process is named, and those of a thread nest or are apart."""
    events = json.loads(path.read_text())["traceEvents"]
    assert isinstance(events, list) and {x["ph"] for x in events} <= {"X", "M"}
    assert all({"name", "ph", "pid", "tid"} <= x.keys() and isinstance(x["pid"], int) for x in events)
    names = {x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"}
    found = {name: [] for name in names.values()}
    for x in events:
        if x["ph"] == "M": continue
        assert isinstance(x["ts"], int) and isinstance(x["dur"], int) and x["dur"] >= 0 and x["ts"] > 0
        found[names[x["pid"]]].append(x)
    for slices in found.values():
        slices.sort(key=lambda x: (x["ts"], -x["dur"]))
        ends = []                                   # of the slices that the next one may lie in
        for x in slices:
            while ends and ends[-1] <= x["ts"]: ends.pop()
            assert not ends or x["ts"] + x["dur"] <= ends[-1], f"{x} crosses the one around it"
            ends.append(x["ts"] + x["dur"])
    return found


def test_the_slices_of_a_timeline_nest_and_the_file_is_whole_after_each_step(tmp_path):
    for row in timed(tiny(async_grpo), folder=tmp_path/"a"):
        assert f"step {row['step']}" in {x["name"] for x in slices_of(tmp_path/"a/trace.json")["loop"]}
    found = slices_of(tmp_path/"a/trace.json")
    assert found.keys() == {"loop"}
    slices = [(x["ts"], -x["dur"], x["name"]) for x in found["loop"]]
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
            answers = [later(grader.score, rows(dtype=torch.float32)) for grader in graders]
            used = Usage(1e9*step, 0., 2**31, 0, 0., 0)
            note(PhaseSpan("sample", "Rollout.generate", 5.*step + 1, 5.*step + 3., "pool rank 0"), used)
            for answer in answers: answer.result()
            yield dict(step=step)
    graders = [Grader(lambda tokens: [1.]*len(tokens)) for _ in range(2)]
    made = list(timed(loop(), folder=tmp_path))
    found = slices_of(tmp_path/"trace.json")
    assert found.keys() == {"loop", "pool rank 0", *(g._background.thread for g in graders)} and len(found) == 4
    assert made[1]["engine_wait"] == min(3., made[1]["seconds"]), "no engine has waited longer than the step"
    assert made[1]["memory_gib"] == 2. and "seconds_wait" not in made[1]
    asked = [x["args"]["call"] for x in found["loop"] if x["name"] == "grade"]
    assert asked == ["BackgroundCall.result"]*4, "to wait for a grader is to grade"


def test_a_run_that_resumes_profiles_the_steps_that_it_was_asked_for(tmp_path):
    def loop(steps, checkpoint):
        for step in checkpoint(steps, state=dict(x=0)): yield dict(step=step)
    def profiles(): return sorted(x.name for x in tmp_path.glob("profile-*"))
    for _ in loop(2, Checkpoint(tmp_path/"saves")): pass
    for _ in timed(loop(5, Checkpoint(tmp_path/"saves")), folder=tmp_path, profile={0, 2, 4}): pass
    assert profiles() == ["profile-2.json", "profile-4.json"]
    for _ in timed(iter([dict(step=7), dict(step=8)]), folder=tmp_path, profile={0}): pass
    assert profiles() == ["profile-2.json", "profile-4.json", "profile-7.json"], "named after the step that came"


def timed_there(rank, ranks, folder):
    for _ in timed(iter([dict(step=0)]), folder=f"{folder}/{rank}", profile={0}): pass


def test_rank_0_alone_writes(tmp_path):
    on_ranks(timed_there, (tmp_path,), 2)
    files = sorted(str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*.json"))
    assert files == ["0/profile-0.json", "0/trace.json"]


# -- commands

def test_a_command_writes_its_timeline_and_says_so_in_its_program(tmp_path, monkeypatch, capsys):
    (tmp_path/"ticked.py").write_text("""
from rlblocks import Checkpoint
def count(pool, *, steps:int=3, checkpoint=Checkpoint()):
    for step in checkpoint(steps): yield dict(step=step)""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["run", "ticked:count", "--profile", "1"]
    assert command_line(words) == 2 and "--profile writes into a folder; give --folder" in capsys.readouterr().err
    words += ["--folder", "a"]
    assert command_line([*words, "--show-code"]) == 0
    assert "log_to(timed(count(pool, checkpoint=Checkpoint('a', every=10)), folder='a', profile=[1]))" in \
        capsys.readouterr().out
    assert command_line(words) == 0
    steps = [x["name"] for x in slices_of(tmp_path/"a/trace.json")["loop"] if x["name"] != "save"]
    assert steps == ["step 0", "step 1", "step 2"]
    assert (tmp_path/"a/profile-1.json").exists() and not (tmp_path/"a/profile-0.json").exists()
    log = [json.loads(x) for x in (tmp_path/"a/log.jsonl").read_text().splitlines()]
    assert [without_times(row) for row in log] == [dict(step=i) for i in range(3)]
    assert report(log).startswith("A step takes ") and " other" in report(log)
