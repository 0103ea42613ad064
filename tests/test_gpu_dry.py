"""`make gpu` where there is no card: every part runs small, and one that fails or hangs takes no other with it."""
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import ROOT, rarely
from forked import forked

BENCHMARKS = str(ROOT/"benchmarks")
sys.path.append(BENCHMARKS)
import gpu  # noqa: E402
import gpu_measuring  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: make gpu runs all of it there")


def run(*how, out, **env):
    return subprocess.run([sys.executable, f"{BENCHMARKS}/gpu.py", *how, "--out", str(out)], cwd=ROOT,
                          env=os.environ | env, capture_output=True, text=True)


def write_rows(_, name, file):
    sys.path[:0] = [BENCHMARKS]
    Path(file).write_text(json.dumps(list(getattr(import_module(gpu.PARTS[name][0]), name)())))


SHORT = ["head", "step", "sampler"]     # of each file of parts, those that take seconds
ALONE = ["tests", "card"]               # under Triton's interpreter


@pytest.mark.parametrize("name", [*SHORT, *rarely(*(name for name in gpu.PARTS if name not in SHORT + ALONE))])
def test_a_part_runs_without_a_card(tmp_path, name):
    forked(write_rows, (name, str(tmp_path/"rows.json")), 1)
    found = json.loads((tmp_path/"rows.json").read_text())
    rows, goals = [x for x in found if "goal" not in x], [x for x in found if "goal" in x]
    ours = [x for x in rows if x["way"].startswith("ours")]
    assert rows and (ours or name == "longest") and not [x for x in ours if {"absent", "failed"} & set(x)]
    assert goals or name in ("step", "longest")
    part = dict(state="done", date="2026", commit=None, seconds=1., rows=rows, goals=goals)
    result = dict(machine=dict.fromkeys("card date torch cuda transformers python".split(), "one") | dict(dry=False),
                  parts={name: part})
    page = gpu.page([result])
    assert f"### {name}: " in page and all(x["case"] in page for x in rows)
    gpu.draw(result, tmp_path/"picture.png")
    assert (tmp_path/"picture.png").exists() == (name in gpu.UNITS and any(gpu.UNITS[name] in x for x in rows))


@pytest.mark.parametrize("names", [ALONE[1:], *rarely(ALONE)], ids=" ".join)
def test_the_tests_for_a_card_run_without_one(tmp_path, names):
    """And a kernel by itself: both need Triton's interpreter, which is chosen before a process imports it. There are no
    datasets, as on a bare machine."""
    (tmp_path/"datasets.py").write_text("raise ImportError('there are no datasets here')")
    done = run("--dry", "--only", *names, "--seconds", "600", out=tmp_path, PYTHONPATH=str(tmp_path))
    result = json.loads((tmp_path/"gpu_dry.json").read_text())
    assert not [x for x in result["parts"]["card"]["rows"] if {"absent", "failed"} & set(x)]
    assert done.returncode == 0, done.stdout
    if "tests" not in names: return
    ended = gpu.outcomes(result["parts"]["tests"])
    assert ended["passed"] > 25 and set(ended) <= {"passed", "skipped"}, done.stdout
    assert f"{ended['passed']} of {ended['passed']} tests" in gpu.sentence([result]) and "make gpu" in gpu.sentence([])


def test_a_part_that_fails_or_hangs_is_reported_and_the_next_one_begins(tmp_path, monkeypatch):
    (tmp_path/"part.py").write_text("""import json, sys, time
print(json.dumps(dict(case="one", way="ours", ms=1.)), flush=True)
if sys.argv[-1] == "update": raise RuntimeError("the card is gone")
if sys.argv[-1] == "step": time.sleep(60)
""")
    monkeypatch.setattr(gpu, "__file__", str(tmp_path/"part.py"))
    parts = {name: gpu.run(name, 5., dry=True) for name in ("update", "step", "head")}
    assert [x["state"] for x in parts.values()] == ["failed", "stopped after 5 s", "done"]
    assert all(x["rows"] == [dict(case="one", way="ours", ms=1.)] for x in parts.values())
    assert "the card is gone" in parts["update"]["error"]
    parts["card"] = parts["head"] | dict(rows=[gpu_measuring.absent("a kernel", "ours", RuntimeError("no compiler"))])
    result = dict(machine=dict(dry=True, card="", date="", torch=""), parts=parts)
    assert gpu.failed(result) == ["update", "step", "card"]
    for said in (gpu.table(result), "".join(gpu.parts_of(result))):
        assert "the card is gone" in said and "no compiler" in said
    assert "**not as it should be: update, step, card**" in gpu.sentence([result])


def test_what_it_cannot_do_it_says_in_a_line(tmp_path):
    done = run(out=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr
    done = run("--dry", out="/proc/nowhere")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "OUT= names another folder" in done.stderr
