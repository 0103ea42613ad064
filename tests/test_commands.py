"""Commands on files: each stage, what they keep, how they end and go on (nbs/people)."""
import ast
import errno
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from conftest import ROOT
from rlblocks import loops, without_times
from rlblocks.people.command import OTHERS, command_line, loop_of, run_loop
from rlblocks.people.flags import comments, flags, keywords, parse, read_config
from rlblocks.people.generate import generate
from rlblocks.people.program import program

pytest.importorskip("jsonargparse")
ALL = [*(getattr(loops, name) for name in loops.__all__), generate]


@pytest.mark.parametrize("loop", ALL, ids=lambda f: f.__name__)
def test_every_keyword_has_a_comment_and_is_read(loop):
    "A flag without help is asked about, and a knob that turns nothing is worse (LAWS 43)."
    words = keywords(loop)
    assert not [k for k in words if not comments(loop).get(k)]
    body = ast.parse(textwrap.dedent(inspect.getsource(loop))).body[0].body
    read = {n.id for part in body for n in ast.walk(part) if isinstance(n, ast.Name)}
    assert not {*words} - read
    assert "pool" in read and (loop is generate or "checkpoint" in read)


@pytest.mark.parametrize("word", [*OTHERS, "generate"])
def test_every_other_command_is_there(word, capsys):
    with pytest.raises(SystemExit) as end: command_line([word, "--help"])
    assert end.value.code == 0 and f"usage: rlblocks {word}" in capsys.readouterr().out


@pytest.mark.parametrize("loop", ALL, ids=lambda f: f.__name__)
def test_a_loop_can_be_a_command(loop):
    assert {*keywords(loop)} <= {a.dest for a in flags(loop)._actions}


# -- on files

def logged(folder):
    "What the loop itself said of each step, of whole lines alone."
    return [without_times(json.loads(x)) for x in (folder/"log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "A folder with a model of 2 layers and its tokenizer."
    sys.path.insert(0, str(ROOT/"tutorials"))
    try: from word_problems import problems, tokenizer, transformer
    finally: sys.path.remove(str(ROOT/"tutorials"))
    folder = tmp_path_factory.mktemp("model")
    tok = tokenizer(r["prompt"] + r["completion"] for r in problems(100))
    transformer(tok, width=16, heads=2, layers=1).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


MINE = """
def score(completions, goal, **_): return [float(c.count(g)) for c, g in zip(completions, goal)]
def short(row): return len(row["prompt"]) < 1000
"""
TEXTS = [(f"Tom has {i} apples and eats {i % 3}. How many?", f" {i - i % 3}", f" {i + 1}") for i in range(3, 43)]
FILES = dict(
    prompts=[dict(question=p, goal=a) for p, a, _ in TEXTS],
    demonstrations=[dict(question=p, answer=a) for p, a, _ in TEXTS],
    pairs=[dict(question=p, good=a, bad=b) for p, a, b in TEXTS],
    judged=[dict(question=p, answer=a, ok=i % 2 == 0) for i, (p, a, _) in enumerate(TEXTS)],
    solutions=[dict(question=p, steps=[a, b], labels=[1, i % 2]) for i, (p, a, b) in enumerate(TEXTS)])
NAMES = dict(question="prompt", answer="completion", good="chosen", bad="rejected", ok="label")
COLUMNS = {name: json.dumps({k: NAMES[k] for k in rows[0] if k in NAMES}) for name, rows in FILES.items()}


@pytest.fixture
def files(tmp_path, monkeypatch):
    "A user's folder: files with fields of their own names, and a reward function."
    for name, rows in FILES.items(): (tmp_path/f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path/"mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


ROUNDS = ["--prompts", "4", "--max_tokens", "4", "--reward", "mine:score"]
STAGES = [("sft", "demonstrations", ["--rows", "4"]), ("reward", "pairs", ["--n_pairs", "4"]),
          ("dpo", "pairs", ["--n_pairs", "4"]), ("kto", "judged", ["--rows", "4", "--data.held_out", "0.4"]),
          ("ppo", "prompts", ROUNDS), ("grpo", "prompts", [*ROUNDS, "--group_size", "2"]),
          ("process-reward", "solutions", ["--rows", "4", "--data.held_out", "0.4"]),
          ("distill", "prompts", [*ROUNDS[:-2], "--teacher", "MODEL"]),
          ("best-of-n", "prompts", [*ROUNDS, "--n", "2", "--least", "-1"])]


def ask(name, *more, data, model, folder="runs/a", steps=2):
    "Words of a command on a file."
    return [name, "--model", str(model), "--data", f"{data}.jsonl", "--data.columns", COLUMNS[data], "--steps",
            str(steps), "--folder", folder, *more]


@pytest.mark.parametrize(("name", "data", "more"), STAGES, ids=[s[0] for s in STAGES])
def test_a_stage_runs_on_a_file_of_its_format(name, data, more, model, files, capsys):
    "Two steps, a log, a model; and a line that is no row is named with its place."
    more = [str(model) if w == "MODEL" else w for w in more]
    assert command_line(ask(name, *more, data=data, model=model)) == 0
    rows = [json.loads(x) for x in (files/"runs/a/log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1] and (files/"runs/a/model/config.json").exists()
    assert name not in ("reward", "dpo", "kto") or 0 <= rows[-1]["held_out"] <= 1
    with (files/f"{data}.jsonl").open("a") as f: f.write('{"question": "cut off\n')
    capsys.readouterr()
    assert command_line(ask(name, *more, data=data, model=model, folder="runs/b")) == 2
    said = capsys.readouterr().err.strip()
    assert f"{data}.jsonl, line {len(TEXTS) + 1}" in said and "\n" not in said.split("rlblocks")[-1]


def test_the_printed_program_gives_the_same_numbers(model, files, capsys):
    more = ["--group-size=2", "--data.where", "mine:short", "--lr", "1e-2"]
    words = ask("grpo", *ROUNDS, *more, data="prompts", model=model)
    words = [w.replace("runs/a", "runs/b") for w in words]
    assert command_line([*words, "--show-code"]) == 0
    text = capsys.readouterr().out
    assert "def grpo(" in text and "from mine import score as reward, short as data_where" in text
    exec(compile(text, "mine_grpo.py", "exec"), dict(__name__="__main__"))
    printed = capsys.readouterr().out
    assert command_line([w.replace("runs/b", "runs/c") for w in words]) == 0
    assert capsys.readouterr().out == printed and printed.startswith("step 0")


def test_a_run_goes_on_where_it_stopped(model, files, capsys):
    "The log of two runs is that of one, and a configuration that was written starts the same run."
    how = dict(data="pairs", model=model)
    assert command_line(ask("reward", "--n_pairs", "4", "--save_every", "1", folder="whole", steps=3, **how)) == 0
    assert command_line(["reward", "--config", "whole/config.yaml", "--folder", "parts", "--dry-run"]) == 0
    assert "it fits" in capsys.readouterr().out and not (files/"parts/log.jsonl").exists()
    loop, given = parse(loop_of("reward"), ["--config", "whole/config.yaml", "--folder", "parts"])
    rows = run_loop(loop, given)
    next(rows), next(rows), rows.close()
    with (files/"parts/log.jsonl").open("a") as f: f.write('{"step": 9, "lo')
    assert command_line(["reward", "--config", "whole/config.yaml", "--folder", "parts"]) == 0
    assert logged(files/"parts") == logged(files/"whole")


def test_a_reward_model_is_a_reward(model, files):
    assert command_line(ask("reward", "--n_pairs", "4", data="pairs", model=model)) == 0
    more = [*ROUNDS, "--group_size", "2", "--reward", "runs/a/model"]
    assert command_line(ask("grpo", *more, data="prompts", model=model, folder="b")) == 0
    rows = [json.loads(x) for x in (files/"b/log.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(r["reward"] != 0 for r in rows)


def test_a_stream_is_resumed_where_it_was(model, files):
    how = dict(data="demonstrations", model=model)
    more = ["--rows", "4", "--data.streaming", "true", "--save_every", "1"]
    assert command_line(ask("sft", *more, folder="whole", steps=3, **how)) == 0
    loop, given = parse(loop_of("sft"), ["--config", "whole/config.yaml", "--folder", "parts"])
    rows = run_loop(loop, given)
    next(rows), next(rows), rows.close()
    assert command_line(["sft", "--config", "whole/config.yaml", "--folder", "parts"]) == 0
    assert logged(files/"parts") == logged(files/"whole")


def test_best_of_n_into_a_file(model, files):
    words = ["generate", "--model", str(model), "--data", "prompts.jsonl", "--data.columns", COLUMNS["prompts"],
             "--out", "out.jsonl", "--n", "3", "--max_tokens", "4", "--reward", "mine:score", "--prompts", "16"]
    assert command_line(words) == 0
    rows = [json.loads(x) for x in (files/"out.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == [p for p, *_ in TEXTS]
    assert all(len(r["completions"]) == len(r["scores"]) == 3 for r in rows)
    assert command_line([*words, "--best", "true", "--out", "best.jsonl"]) == 0
    best = [json.loads(x) for x in (files/"best.jsonl").read_text().splitlines()]
    assert [r["scores"] for r in best] == [[max(r["scores"])] for r in rows]
    other = [w.replace("prompts.jsonl", "judged.jsonl").replace("mine:score", "math_reward") for w in words[:-2]]
    (files/"judged.jsonl").write_text((files/"prompts.jsonl").read_text().replace("Tom", "Ann"))
    assert command_line(other) == 2


RLHF = """
model: {model}
folder: run
sft: {{data: {{path: demonstrations.jsonl, columns: {demonstrations}}}, steps: 2, rows: 4}}
reward_model: {{data: {{path: pairs.jsonl, columns: {pairs}}}, steps: 2, n_pairs: 4}}
rlhf: {{data: {{path: prompts.jsonl, columns: {prompts}}}, steps: 2, prompts: 4, max_tokens: 4, minibatches: 1}}
"""


def test_three_stages_in_one_command(model, files, capsys):
    "Each begins with what the one before has left; what has ended is not run again, and not with other settings."
    (files/"rlhf.yaml").write_text(RLHF.format(model=model, **COLUMNS))
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--rlhf.steps", "1", "--dry-run"]) == 0
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--skip", "[rlhf]"]) == 0
    capsys.readouterr()
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--rlhf.steps", "1"]) == 0
    out, report = capsys.readouterr().out, (files/"run/report.md").read_text()
    assert "sft: done before, loss" in out and "== rlhf" in out and out.endswith(report)
    assert all(f"| {s} |" in report for s in ("sft", "reward_model", "rlhf")) and report.count("- after: ") == 4
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--rlhf.steps", "1", "--show-code"]) == 0
    text = capsys.readouterr().out
    assert "rlhf(" in text and "reward_model='run/reward_model/model'" in text and compile(text, "rlhf.py", "exec")
    config = (files/"run/rlhf/config.yaml").read_text()
    assert "model: run/sft/model" in config and "reward_model: run/reward_model/model" in config
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--sft.lr", "1e-5"]) == 2
    assert "it has ended with other settings: lr was 0.004, is 1e-05" in capsys.readouterr().err
    assert command_line(["rlhf", "--config", "rlhf.yaml", "--reward_model.stepps", "1"]) == 2
    assert "is 'steps' meant?" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "said"), [
    (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 2,
     "rlblocks run counting:failing: [Errno 28] No space left on device: 'runs/a'"),
    (KeyboardInterrupt(), 130, "stopped after step 0; with --folder it could be resumed")])
def test_how_a_run_ends(error, code, said, files, capsys):
    (files/"counting.py").write_text("ERROR = None\ndef failing(pool):\n    yield dict(step=0)\n    raise ERROR\n")
    sys.modules.pop("counting", None)
    import counting
    counting.ERROR = error
    assert command_line(["run", "counting:failing"]) == code
    assert capsys.readouterr().err.strip().endswith(said)
    counting.ERROR = ValueError("of its own")
    with pytest.raises(ValueError, match="of its own"): command_line(["run", "counting:failing"])


COUNTING = """
import time
from rlblocks import Checkpoint
def counting(pool, *, steps=40, checkpoint=Checkpoint()):
    state = dict(total=0)
    for step in checkpoint(steps, state=state):
        state["total"] += step
        time.sleep(.15)         # signals come in time on a busy machine too
        yield dict(step=step, total=state["total"])
"""


def test_signals_at_any_moment(files):
    "SIGTERM, SIGKILL, Ctrl-C, and then to the end: the exit codes, and a log that has each step once."
    (files/"counting.py").write_text(COUNTING)
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    def run(number=None):
        words = [sys.executable, "-m", "rlblocks", "run", "counting:counting", "--folder", "run", "--save_every", "4"]
        p = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        if number is not None:
            for _ in range(7): p.stdout.readline()
            p.send_signal(number)
        _, err = p.communicate()
        return p.returncode, err
    code, err = run(signal.SIGTERM)
    assert code == 143 and re.search(r"stopped after step \d+; the same command resumes", err)
    assert run(signal.SIGKILL)[0] == -9
    code, err = run(signal.SIGINT)
    assert code == 130 and "the same command resumes" in err
    assert run()[0] == 0
    rows = logged(files/"run")
    assert rows == [dict(step=s, total=s*(s + 1)//2) for s in range(40)]


@pytest.mark.shared
@pytest.mark.skipif(not (ROOT.parent/"shared").exists(), reason="needs ../shared")
def test_the_small_configuration_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["sft", "--config", "tutorials/configs/small.yaml", "--steps", "3", "--folder", str(tmp_path)]
    assert command_line(words) == 0
    rows = logged(tmp_path)
    assert len(rows) == 3 and rows[-1]["loss"] < 2


CONFIGS = sorted((ROOT/"tutorials"/"configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_a_configuration_is_read_as_its_first_lines_say(path, monkeypatch):
    "The command is in the file's comment; its program can be printed."
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(right=len))       # the reward that the user writes
    command = re.search(r"#\s+rlblocks (.*)", path.read_text())[1].split()
    assert ROOT/command[command.index("--config") + 1] == path
    if command[0] == "rlhf":
        stages = read_config([path])
        stages["rlhf"]["reward_model"] = "left/by/the/stage/before"
        for name in ("sft", "reward_model", "rlhf"):
            parse(f"rlblocks.loops:{name}", [], "rlhf", dict(model="m") | stages[name])
        return
    loop, given = parse(loop_of(command[0]), command[1:])
    if str(given["model"])[:9] == "../shared" and not (ROOT/given["model"]).exists(): pytest.skip("needs ../shared")
    assert compile(str(program(loop, given)), path.name, "exec")
