"""`log_to` (nbs/tracking): it hands a loop on unchanged, and keeps each step once; names of metrics are what the code
emits. The trackers themselves are in an environment beside (`make trackers`), where tests/trackers runs."""
import ast
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from forked import on_ranks
from rlblocks import (
    Checkpoint, JsonLines, MLflow, Policy, Prompts, here, log_to, loops, ppo_loss, timed, watch,
    without_times)
from rlblocks.loops import grpo
from rlblocks.people.command import command_line
from rlblocks.tracking.log_to import sample_rows
from rlblocks.tracking.metric_names import METRICS, METRIC_PREFIXES, TRL, TRL_PAIRS, VERL, meaning, renamed
from rlblocks.tracking.sinks import plain_values
from rlblocks.tracking.timing import TIMED
from test_laws import CASES, LOSSES, arguments, block
from tiny import model, rows, tokenizer

PYTHON = Path(os.environ.get("TRACKERS", ROOT/".venv/trackers"))/"bin/python"


def test_with_the_trackers_themselves(tmp_path):
    if not PYTHON.exists(): pytest.skip("wandb, trackio, TensorBoard and MLflow are not installed: make trackers")
    path = os.pathsep.join([str(ROOT), str(ROOT/"tests")])
    command = [PYTHON, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "tests/trackers/with_trackers.py"]
    env = os.environ | dict(PYTHONPATH=path, TRACKIO_DIR=str(tmp_path/"trackio"))
    done = subprocess.run(command, cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def reward(prompts, completions, **_): return [float(len(set(text.split()))) for text in completions]


def tiny_grpo(steps=4, **more):
    data = Prompts([dict(prompt=f"w{i} w{i + 1}") for i in range(2, 12)], tokenizer(), template="{prompt}")
    return grpo(here, data, reward, model=model(), tokenizer=tokenizer(), lr=1e-2, steps=steps, prompts=4, group_size=4,
                minibatches=2, max_tokens=4, **more)


def counts(first=0, steps=4):
    for step in range(first, steps): yield dict(step=step, x=step/3)
    return "all of it"


class Keeps:
    "A sink that keeps what it is given, without times."
    def __init__(self): self.rows, self.tables, self.ended = [], [], 0
    def log(self, row, step): self.rows.append((step, without_times(row)))
    def table(self, name, rows): self.tables.append((name, rows))
    def finish(self): self.ended += 1


# -- the loop stays the loop

def test_a_real_run_has_the_same_numbers_to_the_bit(tmp_path, capsys):
    bare, sink = [plain_values(row) for row in tiny_grpo()], Keeps()
    logged = list(log_to(tiny_grpo(checkpoint=Checkpoint(tmp_path)), sink, every=2, samples=3))
    log = JsonLines(tmp_path/"log.jsonl").rows()
    assert [plain_values(row) for row in logged] == bare == [without_times(row) for row in log]
    assert all(row["seconds_update"] > 0 and row["at_limit"] >= 0 for row in log)
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3] and sink.ended == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "3"]
    samples = JsonLines(tmp_path/"log.jsonl").rows("samples")
    assert [row["step"] for row in samples] == [0, 0, 0, 2, 2, 2] and samples == sum((t for _, t in sink.tables), [])
    for row in samples: assert row["score"] == reward([], [row["completion"]])[0] and 1 <= row["length"] <= 4
    assert len({row["prompt"] for row in samples[:3]}) == 3        # spread over the prompts


def test_it_is_a_generator_like_the_loop():
    def through(): return (yield from log_to(counts(), console=False))
    sink, loop = Keeps(), counts()
    logged = log_to(loop, sink, console=False)
    first = next(logged)
    assert first == dict(step=0, x=0.)
    logged.close()
    assert sink.ended == 1 and list(loop) == [] == list(logged)
    end = through()
    assert len([*iter(lambda: next(end, None), None)]) == 4
    end = through()
    for _ in range(4): next(end)
    with pytest.raises(StopIteration) as said: next(end)
    assert said.value.value == "all of it"


@pytest.mark.parametrize("around", [lambda loop: log_to(loop, console=False), timed, lambda loop: timed(timed(loop))])
def test_what_a_loop_lets_go_is_gone(around):
    "The frame of a loop would keep the batch of the last step while the next one is sampled."
    def loop():
        for step in range(3):
            batch = rows()
            ref = weakref.ref(batch)
            yield dict(step=step)
            del batch
            assert ref() is None
    assert len(list(around(loop()))) == 3
    def describes(lr=.5):
        given = locals()
        for step in range(3):
            yield dict(step=step)
            assert given["lr"] == .5
    assert len(list(around(describes()))) == 3


def test_the_same_dicts_come_out_and_what_a_loop_raises_is_raised():
    def fails():
        yield row
        raise ZeroDivisionError
    row, sink = dict(loss=1.), Keeps()
    logged = log_to(fails(), sink, console=False)
    assert next(logged) is row and row == dict(loss=1.) and sink.rows == [(0, row)]
    with pytest.raises(ZeroDivisionError): next(logged)
    assert sink.ended == 1


@pytest.mark.parametrize("around", [lambda loop, sink: watch(log_to(loop, sink, console=False, every=1)),
                                    lambda loop, sink: log_to(watch(loop), sink, console=False, every=1)])
def test_watch_and_log_to_go_around_each_other(around, capsys):
    sink = Keeps()
    w = around(tiny_grpo(2), sink)
    assert len(list(w)) == 2 and [len(rows) for _, rows in sink.tables] == [8, 8]
    if isinstance(w, watch): assert w.batch is not None and w.total == 2 and w.loss.__name__ == "loss"


def test_a_run_that_was_killed_has_each_step_once(tmp_path):
    log = JsonLines(tmp_path/"log.jsonl")
    list(log_to(counts(steps=5), folder=tmp_path, console=False))
    log.table("samples", [dict(step=0, completion="\u2028 a line"), dict(step=4, completion="b")])
    with log.path.open("a") as f: f.write('{"step": 5, "x')
    again = JsonLines(log.path)
    list(log_to(counts(3, 7), again, console=False))
    again.table("samples", [dict(step=4, completion="c")])
    assert [row["step"] for row in log.rows()] == [*range(7)]
    assert [row["completion"] for row in log.rows("samples")] == ["\u2028 a line", "c"]


def test_a_line_that_ends_within_a_character_is_none(tmp_path):
    log, whole = JsonLines(tmp_path/"log.jsonl"), '{"step": 0, "note": "学"}\n'.encode()
    log.path.write_bytes(whole + whole.replace(b"0", b"1")[:-5])
    assert log.rows() == [dict(step=0, note="学")]
    list(log_to(counts(1, 3), folder=tmp_path, console=False))
    assert [row["step"] for row in log.rows()] == [0, 1, 2] and log.path.read_bytes().startswith(whole)


def test_a_file_that_is_no_log_keeps_its_lines(tmp_path):
    (tmp_path/"questions.jsonl").write_text('{"prompt": "2+2="}\n')
    list(log_to(counts(steps=1), tmp_path/"questions.jsonl", console=False))
    found = JsonLines(tmp_path/"questions.jsonl").rows()
    assert [*map(without_times, found)] == [dict(prompt="2+2="), dict(step=0, x=0.)]


# -- sinks that fail, ranks

class Fails(Keeps):
    def __init__(self, *steps):
        super().__init__()
        self.steps = steps
    def log(self, row, step):
        if step in self.steps: raise OSError(28, "No space left on device")
        super().log(row, step)


@pytest.mark.parametrize("steps, kept, then", [((0,), [], "it is left out"),
                                               ((1, 2), [0, 3], "it is tried again at the next step")])
def test_a_sink_that_fails_warns_once_and_ends_nothing(steps, kept, then):
    sink, other = Fails(*steps), Keeps()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(log_to(counts(), sink, other, console=False))) == 4
    assert [step for step, _ in sink.rows] == kept and len(other.rows) == 4
    assert len(said) == 1 and said[0].filename == __file__
    assert "Fails.log failed, and the run goes on without: OSError: [Errno 28]" in str(said[0].message)
    assert then in str(said[0].message)


def test_mlflow_is_given_names_that_it_allows(monkeypatch):
    "Its own rule: letters, digits, space and _ - . / alone, or the whole step is refused."
    sent = []
    class Client:
        def __init__(self, uri): pass
        def get_experiment_by_name(self, name): return SimpleNamespace(experiment_id="1")
        def create_run(self, experiment, run_name): return SimpleNamespace(info=SimpleNamespace(run_id="a"))
        def log_batch(self, run, metrics=(), params=()): sent.extend(x[0] for x in (*metrics, *params))
        def set_terminated(self, run): pass
    entities = SimpleNamespace(Metric=lambda *x: x, Param=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(
        __file__=__file__, MlflowClient=Client, entities=entities))
    MLflow(config={"a=b": 1}).log({"evaluation/my task@2": .5, "学 x-1.y/z_": 1.}, 0)
    assert sent == ["a_b", "evaluation/my task_2", "学 x-1.y/z_"]


def test_a_batch_that_cannot_be_read_ends_nothing():
    def broken(): raise RuntimeError("gone")
    with pytest.warns(UserWarning, match="step 0 has no samples: RuntimeError: gone"):
        assert len(list(log_to(counts(), Keeps(), console=False, batch=broken))) == 4
    assert sample_rows(rows(), 0) == []                 # nobody sampled these


def rank_writes(rank, ranks, folder):
    assert dist.get_rank() == rank
    sink = Keeps()
    assert len(list(log_to(counts(), sink, folder=Path(folder, str(rank)), console=False))) == 4
    assert len(sink.rows) == (0 if rank else 4) and sink.ended == (0 if rank else 1)
    assert Path(folder, str(rank)).exists() == (rank == 0)


@pytest.mark.ranks
def test_rank_0_alone_writes(tmp_path): on_ranks(rank_writes, (str(tmp_path),), 2)


# -- the command

LOOP = '''
from rlblocks import Checkpoint
def count(pool, *, steps:int=3, lr:float=.5, checkpoint=Checkpoint()):
    for step in checkpoint(steps): yield dict(step=step, x=lr*step)
'''


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    (tmp_path/"counted.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    return tmp_path


@pytest.mark.parametrize("how", ["words", "config", "config of one word", "program"])
def test_the_command_logs_to_what_it_is_told(in_a_folder, capsys, how):
    words = ["run", "counted:count", "--folder", "a"]
    told = dict(words=["--log", "b.jsonl", "c.jsonl"], program=["--log", "b.jsonl", "c.jsonl"])
    (in_a_folder/"log.yaml").write_text("log: [b.jsonl, c.jsonl]" if how == "config" else "log: b.jsonl")
    words += told.get(how, ["--config", "log.yaml"])
    if how == "program":
        assert command_line([*words, "--show-code"]) == 0
        text = capsys.readouterr().out
        call = "count(pool, checkpoint=Checkpoint('a', every=10))"
        assert f"for row in pool.watch(log_to({call}, 'b.jsonl', 'c.jsonl')): pass" in text
        exec(compile(text, "counted_program.py", "exec"), dict(__name__="__main__"))
    else: assert command_line(words) == 0
    assert capsys.readouterr().out == "step 0  x 0\nstep 1  x 0.5\nstep 2  x 1\n"
    for name in ("a/log.jsonl", "b.jsonl", *(["c.jsonl"] if how in told or how == "config" else [])):
        rows = [without_times(row) for row in JsonLines(in_a_folder/name).rows()]
        assert rows == [dict(step=i, x=.5*i) for i in range(3)]


@pytest.mark.parametrize("log, said", [
    ("wandv", "--log: there is no tracker 'wandv'; is 'wandb' meant?"),
    ("here", "there are wandb, trackio, tensorboard, mlflow; a file is written ./here")])
def test_a_sink_that_there_is_not_is_said_before_the_run(in_a_folder, capsys, log, said):
    assert command_line(["run", "counted:count", "--log", log]) == 2
    out, err = capsys.readouterr()
    assert said in err and not out


def test_a_package_that_is_missing_is_said_before_the_run(in_a_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert command_line(["run", "counted:count", "--log", "wandb"]) == 2
    out, err = capsys.readouterr()
    assert "Wandb: the package wandb is not installed; pip install -e '.[wandb]' in the clone" in err and not out


# -- names

def named_in(module):
    "Names of the numbers that a loop's own lines put into its dicts: in `yield`, in what `look` returns, in `metrics`."
    def dicts(node): return [k.arg for n in ast.walk(node) if isinstance(n, ast.Call)
                             and getattr(n.func, "id", "") == "dict" for k in n.keywords if k.arg]
    def target(node): return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Yield): yield from dicts(node)
        if isinstance(node, ast.Return) and node.value is not None: yield from dicts(node.value)
        if isinstance(node, ast.Assign | ast.AugAssign):
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(target(p) & {"seen", "metrics"} for p in places): yield from dicts(node.value)


def emitted():
    "Names of all metrics: of the losses and what they are made of, of a step, of the loops' own lines."
    found = set()
    for case, (name, _) in CASES.items():
        if name not in LOSSES and not name.endswith("_metrics"): continue
        columns, hyper = arguments(case)
        out = block(case)(**columns, **hyper)
        found |= set(out[1] if isinstance(out, tuple) else out)
    found |= {"rollout_rejected", "rollout_rejected_rows"}         # of mismatch_metrics(keep=…)
    b = rows(dtype=torch.float32)
    b["old_logprobs"] = b.ref_logprobs
    found |= set(Policy(model(), lr=1e-3, device="cpu").step(b, lambda out, b: ppo_loss(
        out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b)))
    for name in loops.__all__: found |= set(named_in(sys.modules[getattr(loops, name).__module__]))
    return found - {"data", "engine", "frozen", "guide", "lora", "policy", "max_tokens", "temperature", "tokenizer"}


def test_every_metric_that_is_emitted_is_documented_and_no_other():
    "LAWS 35."
    found = {name for name in {*emitted(), *TIMED} if not any(name.startswith(p) for p in METRIC_PREFIXES)}
    assert found - METRICS.keys() == set()
    assert METRICS.keys() - found == {"prompts"}                   # of `rlblocks generate`
    assert all(meaning(name) for name in {*TRL, *TRL_PAIRS, *VERL})


def test_names_of_others_are_theirs():
    "Read in the packages themselves, where they are there."
    trl, verl = (ROOT/".venv"/x for x in ("lib", "peers"))
    texts = "".join(p.read_text() for p in trl.glob("python3*/site-packages/trl/trainer/*_trainer.py"))
    if not texts: pytest.skip("TRL is not installed")
    for name in {*TRL.values(), *TRL_PAIRS.values()} - {"learning_rate"}: assert f'"{name}"' in texts
    texts = "".join(p.read_text() for p in (verl/"verl").rglob("*.py"))
    if not texts: pytest.skip("verl is not installed: make peers")
    for name in VERL.values():
        family, _, last = name.partition("/")
        assert name in texts or f'"{last}"' in texts and family in ("actor", "critic", "rollout_corr", "timing_s"), name
    limits = dict(at_limit=.5, equal_groups=.25)
    assert renamed(limits, "trl") == {"completions/clipped_ratio": .5, "frac_reward_zero_std": .25}
    times = dict(at_limit=.5, seconds=3., seconds_sample=2., seconds_update=1.)
    assert [*renamed(times, "verl")] == ["response_length/clip_ratio", *(f"timing_s/{x}" for x in
                                                                       ("step", "gen", "update_actor"))]
    assert "seconds_update" in renamed(times | dict(critic_grad_norm=1.), "verl"), "verl times actor and critic apart"
