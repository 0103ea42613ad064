"""`rlblocks run`: what it answers to what cannot run, and its help (nbs/people/01_command)."""
import sys

import pytest
from rlblocks.people.command import command_line
from rlblocks.people.flags import OWN
from rlblocks.placement import doctor
from rlblocks.placement.doctor import facts_of_node, findings

pytest.importorskip("jsonargparse")

LOOPS = '''
from rlblocks import Checkpoint
def count(pool, *, lr:float=1e-3, steps:int=2, checkpoint=Checkpoint()):
    "Count the steps."
    for step in range(steps): yield dict(step=step, lr=lr)
def rewarded(pool, *, reward, lr:float=1e-3): yield dict(step=0)
def placed(pool, data, reward, *, lr:float=1e-3): yield dict(step=0)
def clash(pool, *, folder:int=3): yield dict(step=0)
def bare(pool, *, lr:float=1e-3): yield dict(step=0)
def typed(pool, *, size:int): yield dict(step=0)
def alone(): yield dict(step=0)
'''


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    (tmp_path/"some_loops.py").write_text(LOOPS)
    (tmp_path/"rate.yaml").write_text("lrs: 1e-3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "some_loops", raising=False)


@pytest.mark.parametrize("words, said", [
    ("rewarded", "required: reward"),
    ("placed", "required: data"),
    ("clash", "the loop's keyword folder is a flag of the command; give it another name, and none of config, env"),
    ("bare --folder x", "--folder is of a loop that saves"),
    ("count --config rate.yaml", "there is no flag 'lrs'; is 'lr' meant?"),
    ("count --lrs 1", "is 'lr' meant?"),
    ("count --stepps 1", "is 'steps' meant?"),
    ("count --warmth 1", "there is no flag 'warmth'; there are lr, steps, config, env, pool"),
    ("count --lr x", "Expected a <class 'float'>. Got value: x; rlblocks run some_loops:count --help"),
    ("typed", "required: size"),
    ("count --ranks 2", "--ranks 2 with --pool here"),
    ("count --restarts 2", "--restarts makes a new pool"),
    ("nothing", "no function 'nothing'")])
def test_what_cannot_run_is_answered_in_a_line(capsys, words, said):
    assert command_line(["run", *f"some_loops:{words}".split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


def test_a_command_that_there_is_not_is_named(capsys):
    assert command_line(["ruin"]) == 2
    out, err = capsys.readouterr()
    assert err == "rlblocks: there is no command 'ruin'; is 'run' meant?\n" and not out


def test_without_jsonargparse_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert command_line(["run", "some_loops:count"]) == 2
    assert "needs jsonargparse: pip install -e '.[cli]' in the clone" in capsys.readouterr().err


@pytest.mark.parametrize("words, code", [(["run", "--help"], 0), (["--help"], 0), (["run"], 2), ([], 2), (None, 2)])
def test_help_says_what_a_place_is_and_which_flags_are_taken(capsys, monkeypatch, words, code):
    monkeypatch.setattr(sys, "argv", ["rlblocks"])
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


def facts(**change): return facts_of_node(1e9, "", "", "/")._replace(shm=8e9, spill=1e11, **change)


@pytest.mark.parametrize("lacks, said", [("", "full"),
                                         ("no mount (EPERM): it can change files outside", "partial: no mount")])
def test_the_doctor_says_whether_programs_can_be_kept_in(lacks, said):
    found = next(x for x in findings(dict(a=facts(lacks=lacks)), facts(), "") if x.what == "sandbox")
    assert found.found.startswith(said) and not found.remedy
    assert not lacks or "it can change files outside; rewards that run code refuse to" in found.found


def test_the_doctor_without_ray_looks_at_the_sandbox_of_this_machine(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(doctor, "lacking", lambda: "no mount (EPERM): it can change files outside")
    assert command_line(["doctor"]) == 1
    *_, sandbox, ray = capsys.readouterr().out.splitlines()
    assert "this machine    sandbox          partial: no mount" in sandbox and "pip install -e '.[ray]'" in ray


@pytest.mark.parametrize("alone", [True, False])
def test_the_doctor_of_one_machine_wants_no_health_checks(capsys, monkeypatch, alone):
    "Ray that the command started itself has no host that can be cut off."
    node = facts(health=dict.fromkeys(doctor.HEALTH), token_is_its_owners=True, here=True, lacks="")
    monkeypatch.setattr(doctor, "examine", lambda *_: findings(dict(a=node), node, ""))
    monkeypatch.setattr(doctor, "own_ray", lambda: alone)
    assert command_line(["doctor"]) == (0 if alone else 1)
    assert ("WRONG" in capsys.readouterr().out) != alone
