"""`watch` (nbs/people/09_watch): the numbers of a run left alone, interrupts, sliders, notebooks, terminals."""
import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from math import nan
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, skip_without
from rlblocks import Mean, Prompts, here, watch, without_times
from rlblocks.loops import grpo, ppo
from rlblocks.people import displays
from rlblocks.people.alarms import alarms
from rlblocks import log_to
from rlblocks.people.curves import Curves, curve_svg, phases_svg, row_numbers, thinned
from rlblocks.people.displays import page_html
from tiny import model, tokenizer

skip_without("matplotlib")
skip_without("IPython")


def prompts(): return Prompts([dict(prompt=f"w{i} w{i + 1}") for i in range(2, 12)], tokenizer(), template="{prompt}")
def reward(prompts, completions, **_): return [float(len(set(text.split()))) for text in completions]
def tiny_grpo(steps=4, reward=reward, **more):
    return grpo(here, prompts(), reward, model=model(), tokenizer=tokenizer(), lr=1e-2, steps=steps, prompts=4,
                group_size=4, minibatches=2, max_tokens=4, **more)
def own(numbers): return [without_times(row) for row in numbers]
def plain(rows): return [row_numbers(row) for row in rows]


def loop(steps=6, kl_coef=.5, lr=1e-3, during=lambda step: None, model=None):
    def loss(out, b): return kl_coef
    for step in range(steps):
        during(step)
        yield dict(step=step, reward=Mean(step, 2), kl=torch.tensor(.1*step), used=loss(0, 0))


def interrupt(): os.kill(os.getpid(), signal.SIGINT)


# -- the numbers, and an end between two steps

def test_a_real_loop_gives_the_numbers_of_one_that_is_left_alone_also_when_it_is_interrupted():
    def interrupted(prompts, completions, **_):
        if len(seen) == 1: interrupt()
        return reward(prompts, completions)
    seen, w = [], watch(tiny_grpo(reward=interrupted), every=0)
    for m in w: seen.append(m)
    assert len(seen) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert w.batch.tokens.shape[0] == 16 and "advantages" in w.batch and w.loss.__name__ == "loss"
    seen += w
    assert plain(seen) == plain(w.rows) == plain(tiny_grpo())
    assert w.state == "done" and list(w) == []


def test_an_interrupt_in_a_step_is_held_until_the_step_has_ended():
    w = watch(loop(during=lambda step: step == 2 and interrupt()))
    assert [m["step"] for m in w] == [0, 1, 2] and w.state == "stopped"
    assert [m["step"] for m in w] == [3, 4, 5] and w.state == "done"


def test_a_second_interrupt_raises_at_once():
    w = watch(loop(during=lambda step: step == 2 and [interrupt() for _ in range(2)]))
    with pytest.raises(KeyboardInterrupt): list(w)
    assert len(w.rows) == 2 and w.state == "failed in step 2: KeyboardInterrupt"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(RuntimeError, match="failed in step 2.*make it anew"): list(w)


def test_what_a_step_raises_is_raised_and_the_rows_so_far_stay():
    w = watch(loop(during=lambda step: 1/(3 - step)))
    with pytest.raises(ZeroDivisionError): list(w)
    assert len(w.rows) == 3 and "failed in step 3: ZeroDivisionError" in repr(w)


def test_an_interrupt_between_two_steps_belongs_to_the_cell_and_the_loop_can_go_on():
    w = watch(loop())
    with pytest.raises(KeyboardInterrupt):
        for m in w:
            if m["step"] == 2: interrupt()
    assert w.state == "stopped" and [m["step"] for m in w] == [3, 4, 5]
    half = iter(watch(loop()))
    next(half)                                  # and nothing is held while it lies about
    with pytest.raises(KeyboardInterrupt): interrupt()
    assert next(half)["step"] == 1


def test_two_runs_at_once_leave_the_handler_as_it_was():
    first, second = watch(loop(during=lambda step: step == 2 and interrupt())), watch(loop())
    assert len(list(zip(first, second, strict=False))) == 3 and first.state == "stopped"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    async def both():
        async def read(w): return [m async for m in w]
        return await asyncio.gather(read(watch(loop())), read(watch(loop(steps=3))), read(watch(loop())))
    assert [len(rows) for rows in asyncio.run(both())] == [6, 3, 6]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_a_pause_stops_softly():
    async def some(w): return [m async for m in w]
    for read in (list, lambda w: asyncio.run(some(w))):
        def pause(step):
            if step != 3: return
            w.paused = True                     # noqa: B023
            threading.Timer(.3, interrupt).start()
        w = watch(loop(during=pause))
        assert len(read(w)) == 4 and w.state == "stopped" and len(read(w)) == 2


def test_what_is_no_dict_is_told_and_the_loop_can_go_on():
    w = watch(iter([dict(loss=1.), 2., dict(loss=3.)]))
    with pytest.raises(TypeError, match="watch: a float came from step 1 of the loop; a dict .* yield dict"): list(w)
    assert w.state == "stopped" and len(list(w)) == 1 and len(w.rows) == 2


def test_a_consumer_that_breaks_or_fails_may_go_on():
    w = watch(loop())
    for _ in w: break
    with pytest.raises(KeyError):
        for _ in w: raise KeyError
    assert w.state == "stopped" and len(w.rows) == 2 and [m["step"] for m in w] == [2, 3, 4, 5]


def test_a_loop_in_another_thread_takes_no_signals():
    rows = []
    thread = threading.Thread(target=lambda: rows.extend(watch(loop())))
    thread.start()
    thread.join()
    assert len(rows) == 6


def test_async_for_gives_the_same():
    w = watch(loop(), sliders=dict(kl_coef=(0, 1)))
    async def some(n):
        async for m in w:
            if m["step"] == n: w.stop()
    asyncio.run(some(2))
    assert len(w.rows) == 3 and w.state == "stopped"
    w.set(kl_coef=.7)
    asyncio.run(some(9))
    assert [m["used"] for m in w.rows] == [.5]*3 + [.7]*3 and w.state == "done"


def test_a_pause_waits_between_two_steps():
    w, at = watch(loop()), []
    def go_on():
        time.sleep(.3)
        at.append(len(w.rows))
        w.paused = False
    for m in w:
        if m["step"] == 2:
            w.paused = True
            threading.Thread(target=go_on).start()
    assert at == [3] and len(w.rows) == 6


def test_a_run_that_has_ended_holds_no_model():
    class Model: pass
    net = Model()
    gone, w = weakref.ref(net), watch(loop(model=net))
    del net
    next(iter(w))
    assert gone() is not None
    list(w)
    gc.collect()
    assert gone() is None


def test_a_resumed_run_counts_on_and_a_step_that_comes_again_replaces_the_first():
    w = watch(iter([dict(step=i, reward=float(x)) for x, i in enumerate([7, 8, 9, 8, 9, 10])]), total=20)
    for m in w:
        if m["step"] == 9: break
    list(w)
    assert [(m["step"], m["reward"]) for m in w.rows] == [(7, 0.), (8, 3.), (9, 4.), (10, 5.)]
    other = watch(iter([dict(step="warm-up"), {}, dict(step=nan), dict(loss=1.)]))
    assert list(other) == other.rows and other.done == 4, "without a number of the step its place is taken"
    assert w.done == 11 and w.share == 11/20 and "step 11 of 20" in w.status()
    assert watch.compare([dict(step=nan, loss=1.), dict(step=1, loss=2.)]).html()


def test_dicts_of_one_step_are_merged_and_a_loop_that_counts_anew_is_counted_on():
    dicts = [dict(step=0, loss=3.), dict(step=0, held_out=5.), dict(step=1, loss=2.), dict(step=0, loss=1.),
             dict(step=0, held_out=4.), dict(step=1, loss=0.)]
    w = watch(iter(dicts))
    assert list(w) == dicts
    assert own(w.numbers) == [dict(step=0., loss=3., held_out=5.), dict(step=1., loss=2.),
                         dict(step=2., loss=1., held_out=4.), dict(step=3., loss=0.)]
    assert w.rows[0] == dict(step=0, loss=3., held_out=5.) and len(w.rows) == 4


def test_steps_are_counted_from_where_the_loop_counts_them():
    one = watch((dict(step=i, loss=1.) for i in range(1, 11)), total=10)
    next(iter(one))
    assert one.done == 1 and "step 1 of 10" in one.status()
    assert len(list(one)) == 9 and "step 10 of 10" in one.status() and "done, 10 steps" in one.summary()
    seldom = watch((dict(step=i, loss=1.) for i in range(0, 100, 10)), total=100)
    list(seldom)
    assert "done, last step 90 of 100" in seldom.summary() and "left" not in seldom.status()
    resumed = watch((dict(step=i, loss=1.) for i in range(7, 10)), total=10)
    next(iter(resumed))
    assert resumed.done == 8


# -- sliders

def test_a_slider_sets_what_an_inner_function_closes_over_for_the_next_step():
    w = watch(loop(), sliders=dict(kl_coef=(0, 1)))
    for m in w:
        if m["step"] == 2: w.set(kl_coef=.25)
        if m["step"] == 4: w.set(kl_coef=.25)       # no change
    assert [m["used"] for m in w.rows] == [m["kl_coef"] for m in w.rows] == [.5, .5, .5, .25, .25, .25]
    assert w.marks == [(3, "kl_coef 0.5 → 0.25")]
    assert "step 3: kl_coef 0.5 → 0.25" in w.curves.html()
    assert {**w.rows[0]} == dict(next(loop())) | dict(kl_coef=.5), "but for the slider's entry the dicts are equal"


def test_a_slider_sets_the_loops_variable_and_not_that_of_a_reward_with_the_same_name():
    def rewards(kl_coef=7.):
        def reward(): return kl_coef
        return reward
    def named(reward, kl_coef=.5):
        def loss(out, b): return kl_coef
        for step in range(2): yield dict(step=step, used=loss(0, 0), reward=reward())
    def nameless(reward, kl_coef=.5):
        loss = lambda out, b: kl_coef
        for step in range(2): yield dict(step=step, used=loss(0, 0), reward=reward())
    for run in (named, nameless):
        w = watch(run(rewards()), sliders=dict(kl_coef=(0, 1)))
        for _ in w: w.set(kl_coef=.25)
        assert [(m["used"], m["reward"]) for m in w.rows] == [(.5, 7.), (.25, 7.)]


def test_a_slider_keeps_a_number_an_int():
    def run(n=2, coef=0):
        def much(): return sum(range(n)), coef
        for step in range(3): yield dict(step=step, much=much()[0], coef=much()[1])
    w = watch(run(), sliders=dict(n=(1, 8), coef=(0, .5)))
    for m in w:
        if m["step"] == 0: w.set(n=3.)
        if m["step"] == 1: w.set(n=4.2, coef=.1)
    assert [(m["n"], m["much"], m["coef"]) for m in w.rows] == [(2, 1, 0), (3, 3, 0), (4, 6, .1)]
    assert all(type(m["n"]) is int for m in w.rows)


def test_widgets_are_of_the_numbers_kind_and_a_number_outside_the_range_stays():
    skip_without("ipywidgets")
    from rlblocks.people.controls import Controls
    asked = []
    run = SimpleNamespace(paused=False, stop=None, set=lambda **values: asked.append(values))
    made = Controls(run, dict(n=(1, 8), coef=(0, .5)), dict(n=2, coef=0))
    made.sliders["n"].value = 3
    assert asked == [dict(n=3)] and type(asked[0]["n"]) is int and type(made.sliders["coef"].value) is float
    made.follow(dict(n=2.5, coef=9.))
    assert len(asked) == 1 and made.sliders["coef"].value == 0
    made.close()
    late = Controls(run, dict(n=(1, 8)), dict(n=None))      # a loop that has not begun
    assert len(late.box.children) == 2
    late.follow(dict(n=2))
    late.box.children[2].value = 4
    assert asked[-1] == dict(n=4) and type(asked[-1]["n"]) is int
    late.close()


def test_without_ipywidgets_a_page_says_how_they_are_installed(monkeypatch):
    from rlblocks.people import controls
    monkeypatch.setattr(controls, "find_spec", lambda name: None)
    assert controls.unclickable() == "for buttons and sliders: pip install -e '.[notebook]' in the clone"


def test_a_slider_of_a_real_loop_changes_what_it_learns():
    def rows(kl_coef):
        w = watch(tiny_grpo(kl_coef=.01), sliders=dict(kl_coef=(0, 50)))
        for m in w:
            if m["step"] == 1: w.set(kl_coef=kl_coef)
        return plain(w.rows)
    same, other = rows(.01), rows(20.)
    assert [{k: x for k, x in row.items() if k != "kl_coef"} for row in same] == plain(tiny_grpo(kl_coef=.01))
    assert same[:2] == other[:2] and same[2] != other[2] and other[2]["kl_coef"] == 20.


def test_a_slider_sets_the_state_of_ppo():
    run = ppo(here, prompts(), reward, model=model(), tokenizer=tokenizer(), steps=3, prompts=2, group_size=2,
              minibatches=1, epochs=1, max_tokens=3)
    w = watch(run, sliders=dict(kl_coef=(0, 1), clip=(0, .5)))
    for m in w:
        if m["step"] == 0: w.set(kl_coef=.9)
    assert w.marks == [(1, w.marks[0][1])] and "→ 0.9" in w.marks[0][1]
    first, second = (m["kl_coef"] for m in w.rows[:2])     # the loop's own entry, after its control
    assert 0 < abs(second - .9) < .05 < abs(first - .9)
    assert w.rows[0]["clip"] == .2 and w.loss.__name__ == "policy_loss"


def test_what_no_slider_can_set_is_told_after_the_first_step():
    def stateful():
        state = dict(a=1., rows=[])
        for step in range(3): yield dict(step=step, b="b", a=state["a"], n=len(state["rows"]))
    for run, names, known in ((loop, ("lr", "nope", "steps"), "kl_coef"), (stateful, ("b", "rows"), "a")):
        for name in names:
            w = watch(run(), sliders={name: (0, 1)})
            with pytest.raises(ValueError, match=f"no slider can set {name}: .*these can be set: {known}"): list(w)
            assert len(w.rows) == 1 and w.state == "stopped"
    run = ppo(here, prompts(), reward, model=model(), tokenizer=tokenizer(), steps=2, prompts=2, group_size=2,
              max_tokens=3)
    with pytest.raises(ValueError, match="these can be set: clip, kl_coef, value_clip"):
        list(watch(run, sliders=dict(lr=(0, 1))))


def test_a_loop_inside_another_is_reached():
    def outer(): yield from loop()
    w = watch(outer(), sliders=dict(kl_coef=(0, 1)))
    w.set(kl_coef=.1)                           # before it has begun: for its second step
    assert [m["used"] for m in w] == [.5] + [.1]*5 and w.total == 6


# -- alarms

def test_alarms_are_silent_where_a_run_is_well():
    def rows(n=40, **more): return [dict(step=i, grad_norm=.3) | {k: f(i) for k, f in more.items()} for i in range(n)]
    assert alarms(rows(kl=lambda i: .2*i)) == [], "KTO's kl is nats an answer"
    assert len(alarms(rows(kl=lambda i: .2*i, reward=lambda i: i))) == 1
    assert alarms(rows(kl=lambda i: 900. if i == 38 else .1, reward=lambda i: i)) == []
    assert alarms(rows(reward=lambda i: 1., length=lambda i: 2.)) == [], "a task that is solved"
    assert "reward was 1 in each" in alarms(rows(reward=lambda i: 1., grad_norm=lambda i: 0.))[0]
    assert alarms(rows(3, skipped=lambda i: .5*(i == 1)))[0].startswith(
        "nothing was learned in some minibatches of 1 of the last 3 steps")


def test_a_key_that_no_step_has_is_named_until_it_comes():
    w = watch((dict(step=i, reward=1.) | (dict(held_out=.5) if i == 2 else {}) for i in range(4)), keys=["held_out"])
    said = [(w.alarms(), "no step has" in page_html(w)) for _ in w]
    assert said == [(["no step has 'held_out'; there are step, reward"], True)]*2 + [([], False)]*2


def test_a_terminal_prints_an_alarm_once_and_no_oftener_than_asked(monkeypatch):
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    looks, judged = [], displays.named_alarms
    monkeypatch.setattr(displays, "named_alarms", lambda rows, keys: (looks.append(len(rows)), judged(rows, keys))[1])
    monkeypatch.setattr(sys.modules["rlblocks.people.watch"], "display_for", displays.TerminalDisplay)
    for every in (0, 100):
        looks.clear()
        list(watch((dict(step=i, clip_frac=.5 + .001*i) for i in range(50)), every=every))
        assert len(looks) == (51 if every == 0 else 2)
    assert said.getvalue().count("tokens are clipped") == 2


# -- what is drawn

def long_run(n=1000):
    g = torch.Generator().manual_seed(0)
    names = ["reward", "kl", "length", "clip_frac", "grad_norm", "entropy", "seconds_a", "seconds_b"]
    return [dict(step=i) | dict(zip(names, torch.rand(8, generator=g).tolist(), strict=True)) for i in range(n)]


def test_the_curves_of_a_thousand_steps_are_small():
    w = watch(iter(long_run()), total=2000)
    list(w)
    w.marks = [(i, f"kl_coef 0.1 → {i}") for i in (10, 500, 900)]
    page = page_html(w)
    assert len(page.encode()) <= 80_000 and page.count("<svg") == 7 and "<script" not in page
    assert len(w.curves.png()) <= 400_000


def test_names_of_metrics_and_errors_are_text():
    name = "<b>&\"x\""
    w = watch(loop(during=lambda step: [][step]), keys=[name])
    with pytest.raises(IndexError): list(w)
    w.numbers, w.marks = [{"step": 0., name: 1.}, {"step": 1., name: 2., "<i>": 3.}], [(1, "<u> 0 → 1")]
    page = page_html(w)
    assert not any(tag in page for tag in ("<b>&", "<i>", "<u>")) and "&lt;b&gt;&amp;" in page


def test_a_spike_of_one_step_is_drawn_and_no_nan():
    ys = [1.]*1000
    ys[517], ys[305], ys[306], ys[307] = 40., nan, nan, 30.      # 305 begins a column
    points = thinned(range(1000), ys)
    assert {(517, 40.), (307, 30.)} <= {*points} and len(points) <= 210
    ys[700] = float("inf")
    drawn = curve_svg("x", {"": [dict(step=i, x=y) for i, y in enumerate(ys)]})
    assert "nan" not in drawn and "inf" not in drawn
    assert "nan" not in phases_svg([dict(step=i, seconds_a=y) for i, y in enumerate(ys)])
    assert curve_svg("x", {"": [dict(x=nan)]*3}) == ""
    assert "nan" not in curve_svg("x", {"": [dict(x=1e300), dict(x=2.)]})
    assert Curves({"": [dict(x=nan, reward=1e300)]}).png()


def test_equal_rows_give_equal_pictures_whatever_style_the_reader_has():
    import matplotlib
    from PIL import Image
    first = Curves({"": plain(loop())}).png()
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30}):
        assert Curves({"": plain(loop())}).png() == first
    alpha = Image.open(io.BytesIO(first)).convert("RGBA").getchannel("A")
    assert alpha.histogram()[0] > .8*alpha.width*alpha.height, "a page's own background, light or dark, is behind it"


def test_runs_are_compared_from_folders_lists_and_what_was_watched(tmp_path):
    for name, kl_coef in (("a", .5), ("b", .1)):
        list(log_to(loop(kl_coef=kl_coef), folder=tmp_path/name, console=False))
    w = watch(loop())
    list(w)
    drawn = watch.compare(tmp_path/"a", str(tmp_path/"b"), w, list(loop()), keys=["reward", "used"])
    assert [*drawn.runs] == [str(tmp_path/"a"), str(tmp_path/"b"), "run 2", "run 3"]
    assert own(drawn.runs[str(tmp_path/"a")]) == own(drawn.runs["run 2"]) == drawn.runs["run 3"] == plain(loop())
    assert drawn.png(tmp_path/"both.png").read_bytes() == drawn.png() and "used 0.1" in repr(drawn)
    with pytest.raises(ValueError, match="watch.compare: .*has no steps"): watch.compare(tmp_path)
    with pytest.raises(ValueError, match="watch.compare: no step has 'rewards'; there are step, reward, kl, used; "):
        watch.compare(w, keys=["kl", "rewards"])


# -- notebooks and terminals

SCRIPT = '''
import time
from rlblocks import watch
def loop(steps=8, kl_coef=.5, during=lambda step: None):
    def loss(out, b): return kl_coef
    for step in range(steps):
        during(step)
        yield dict(step=step, reward=.1*step, kl=.2*loss(0, 0))
'''


def executed(folder):
    "A notebook after nbclient."
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [SCRIPT, "w = watch(loop(), sliders=dict(kl_coef=(0, 1)))\nfor m in w:\n    if m['step'] == 3: w.stop()",
             "for m in w: pass", "w = watch(loop(steps=5))\nfor m in w: 1/(2 - m['step'])"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(x, id=f"c{i}") for i, x in enumerate(cells)])
    where = dict(metadata=dict(path=str(folder)))
    client = nbclient.NotebookClient(nb, timeout=300, allow_errors=True, resources=where)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        client.execute()
    return nb


@pytest.mark.ranks
def test_a_notebook_that_is_executed_twice_has_equal_outputs(tmp_path):
    skip_without("ipykernel")
    first, second = (executed(tmp_path) for _ in range(2))
    outputs = [[dict(out) for cell in nb.cells for out in cell.outputs] for nb in (first, second)]
    for side in outputs:
        for out in side: out.pop("traceback", None)     # it names the process's temporary file
    assert json.dumps(outputs[0]) == json.dumps(outputs[1])
    kinds = [[{*out["data"]} if "data" in out else out.get("ename") for out in cell.outputs] for cell in first.cells]
    kept = [{"text/plain"}, {"image/png", "text/plain"}]
    assert kinds == [[], kept, kept, [*kept, "ZeroDivisionError"]]
    said = [cell.outputs[0].data["text/plain"] for cell in first.cells[1:]]
    assert said[0].startswith("stopped after 4 of 8 steps") and said[1].startswith("done, 8 steps")
    assert said[2].startswith("stopped after 3 of 5 steps") and "widgets" not in first.metadata


@pytest.mark.ranks
def test_in_a_terminal_there_is_a_line_and_a_bar_and_ctrl_c_waits(tmp_path):
    code = SCRIPT + '''
import os, signal
w = watch(loop(during=lambda step: step == 4 and os.kill(os.getpid(), signal.SIGINT)), sliders=dict(kl_coef=(0, 1)))
for m in w:
    if m["step"] == 2: w.set(kl_coef=.25)
print("went on", len(w.rows), [m["kl_coef"] for m in w.rows])
for m in w: pass
print("done", len(w.rows))'''
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "went on 5 [0.5, 0.5, 0.5, 0.25, 0.25]\ndone 8\n", run.stdout
    for words in ("8/8", "reward 0.7", "step 3: kl_coef 0.5 → 0.25", "stops after this step; Ctrl-C again",
                  "stopped after 5 of 8 steps, iterate again to go on"): assert words in run.stderr, run.stderr
    assert "IPython" not in run.stderr and run.stderr.count("\r") < 10, "a file is no screen"
    other = subprocess.run([sys.executable, "-c", SCRIPT + "print(len(list(watch(loop()))))"], cwd=ROOT,
                           capture_output=True, text=True, env=os.environ | dict(RANK="1"))
    assert (other.stdout, other.stderr) == ("8\n", ""), "a rank above 0 draws nothing"


def test_what_a_page_needs_is_named_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[notebook\]'"): Curves({"": plain(loop())}).png()
