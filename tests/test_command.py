"""`rlblocks run`: what it answers to what cannot run, and its help (nbs/people/99a_command)."""
import sys

import pytest
from rlblocks.people.command import OWN, command_line

pytest.importorskip("jsonargparse")

LOOPS = '''
from rlblocks import Checkpoint
def count(pool, *, lr:float=1e-3, steps:int=2, checkpoint=Checkpoint()):
    "Count the steps."
    for step in range(steps): yield dict(step=step, lr=lr)
def rewarded(pool, *, reward, lr:float=1e-3): yield dict(step=0)
def placed(pool, data, reward, *, lr:float=1e-3): yield dict(step=0)
def clash(pool, *, rows:int=3): yield dict(step=0)
def bare(pool, *, lr:float=1e-3): yield dict(step=0)
def typed(pool, *, size:int): yield dict(step=0)
def alone(): yield dict(step=0)
'''


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    (tmp_path/"some_loops.py").write_text(LOOPS)
    (tmp_path/"rate.yaml").write_text("learning_rate: 1e-3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "some_loops", raising=False)


@pytest.mark.parametrize("words, said", [
    ("rewarded", "reward has no default; make it inside the loop, or give it one"),
    ("placed", "data has no default"),
    ("clash", "the loop's keyword rows is a flag of the command; give it another name, and none of config, pool"),
    ("bare --folder x", "--folder is of a loop that saves"),
    ("count --config rate.yaml", "there is no flag 'learning_rate'; is 'lr' meant?"),
    ("count --learning-rate 1", "is 'lr' meant?"),
    ("count --stepps 1", "is 'steps' meant?"),
    ("count --warmth 1", "there is no flag 'warmth'; the loop has lr, steps, the command config, pool"),
    ("count --lr x", "Expected a <class 'float'>. Got value: x; rlblocks run some_loops:count --help"),
    ("typed", "required: size"),
    ("count --ranks 2", "--ranks 2 with --pool here"),
    ("count --restarts 2", "--restarts makes a new pool"),
    ("nothing", "no function 'nothing'")])
def test_what_cannot_run_is_answered_in_a_line(capsys, words, said):
    assert command_line(["run", *f"some_loops:{words}".split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


def test_without_jsonargparse_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert command_line(["run", "some_loops:count"]) == 2
    assert "pip install 'rlblocks[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("words, code", [(["run", "--help"], 0), (["--help"], 0), (["run"], 2), ([], 2), (["ruin"], 2)])
def test_help_says_what_a_place_is_and_which_flags_are_taken(capsys, words, code):
    assert command_line(words) == code
    out = capsys.readouterr().out
    assert "package.module:function" in out and "folder/notebook.ipynb:function" in out and ", ".join(OWN) in out


@pytest.mark.parametrize("name", ["count", "bare", "alone"])
def test_help_of_a_loop_has_its_name_and_what_it_says_of_itself(capsys, name):
    with pytest.raises(SystemExit) as end: command_line(["run", f"some_loops:{name}", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: rlblocks run some_loops:{name}" in out and "<function" not in out
    assert all(f"--{word}" in out for word in OWN)
    assert name != "count" or "Count the steps." in out and "--lr LR" in out


def test_a_keyword_without_a_default_can_be_given(capsys):
    assert command_line(["run", "some_loops:rewarded", "--reward", "a"]) == 0
    assert command_line(["run", "some_loops:typed", "--size", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["step 0"]*2
