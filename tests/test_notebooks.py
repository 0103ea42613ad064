"""Every notebook runs from its first cell to its last, in a process of its own: `nbdev-test NOTEBOOK`, without ten
seconds of imports.

It is forked from the process that ranks are forked from (tests/forked.py), and its hook that checks types does nothing.
In `make test-long` it is forked from a process that has imported rlblocks under the type checker, which takes five
times as long."""
import contextlib
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import jaxtyping
import pytest
from conftest import ROOT, rarely
from forked import RESIDENT, context, forget, forked

NOTEBOOKS = sorted(p.relative_to(ROOT) for folder in ("nbs", "nbs/*", "tutorials")
                   for p in ROOT.glob(f"{folder}/*.ipynb"))
# At full length: their loops, as they stand, run on tiny models in tests/test_spmd.py, tests/test_preferences.py and
# tests/test_tutorials.py; layouts starts nine processes of Ray, and those of its kinds are in tests/test_ray.py.
LONG = ["nbs/layouts.ipynb", *(f"tutorials/{name}.ipynb" for name in (
    "agent_endpoint", "async", "audio_grpo", "best_of_n", "code_reward", "conditional_sft", "distill", "dpo",
    "generative_reward", "grpo", "kto", "lora", "multi_reward", "offline", "online_dpo", "ppo", "pretrain",
    "process_reward", "relatives", "reward_model", "rlhf", "sft", "tools", "vlm_grpo", "vlm_reward_model",
    "vlm_sft_dpo"))]
HOOK = 'install_import_hook(\\"rlblocks\\", \\"beartype.beartype\\")'       # as it stands in a notebook's file
LIMIT = 1800    # seconds: a notebook that hangs, not one on a machine that has other work


def notebook(_, path, said):
    "Ends the process: 0 if the notebook ran."
    out = os.open(said, os.O_CREAT | os.O_WRONLY, 0o600)
    for fd in (1, 2): os.dup2(out, fd)
    os.chdir(ROOT)
    from nbdev import test as runner
    write = runner.write_nb
    runner.write_nb = lambda nb, _: write(nb, f"{said}.ipynb")  # instead of the notebook
    look_at_figures(f"{said}.covered")
    try: runner.nbdev_test(path=str(path), n_workers=0, save=True)
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stderr__): stream.flush()


def look_at_figures(file):
    "From now on every figure that is shown writes what is covered in it to a file."
    from IPython.core import pylabtools
    draw = pylabtools.print_figure
    def print_figure(fig, *args, **options):
        from figures import covered
        data = draw(fig, *args, **options)
        title = fig.axes[0].get_title(loc="left")
        with open(file, "a", encoding="utf-8") as f: f.writelines(f"{title}: {x}\n" for x in covered(fig))
        return data
    pylabtools.print_figure = print_figure


def unchecked(rank, path, said):
    "As `notebook`, without the hook that checks types: what only the hook refuses may do anything."
    jaxtyping.install_import_hook = lambda *_: contextlib.nullcontext()
    import fastcore.test
    refused, lax = fastcore.test.expect_fail, contextlib.suppress(Exception)
    fastcore.test.expect_fail = lambda *a, **k: lax if a[:1] == (jaxtyping.TypeCheckError,) else refused(*a, **k)
    notebook(rank, path, said)


def serve(requests):
    "Imports rlblocks, then forks a process for each notebook that is asked for, and answers how it ended."
    forget()
    jaxtyping.install_import_hook("rlblocks", "beartype.beartype")
    faulthandler.enable()
    for path in sorted(ROOT.glob("rlblocks/*/*.py")):
        # what wants a GPU's libraries
        with contextlib.suppress(ImportError): import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    gc.freeze()         # a notebook's garbage collections look at its own objects
    with contextlib.suppress(EOFError):
        while True:
            asked = requests.recv()
            pid = os.fork()
            requests.send(ended(pid) if pid else run_and_exit(*asked))


def run_and_exit(path, said):
    try: notebook(0, path, said)
    except SystemExit as e: os._exit(int(bool(e.code)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def ended(pid):
    "The exit code of a process; one that takes too long says where it is, and ends."
    end, killed = time.monotonic() + LIMIT, False
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end: os.kill(pid, signal.SIGKILL if killed else signal.SIGABRT)
        if time.monotonic() > end: killed, end = True, end + 10
        time.sleep(.05)
    return os.waitstatus_to_exitcode(done[1])


@pytest.fixture(scope="session")
def typed():
    "Runs a notebook in a fork of a process that has rlblocks under the type checker."
    ours, theirs = context().Pipe()
    process = context().Process(target=serve, args=(theirs,))
    process.start()
    RESIDENT.append(process.pid)
    theirs.close()
    def run(asked):
        ours.send(asked)
        if code := ours.recv(): raise RuntimeError(f"exit code {code}")
    yield run
    ours.close()
    RESIDENT.remove(process.pid)
    process.join()


def outputs(nb):
    "What each code cell has printed and shown, in words: numbers and addresses differ from machine to machine."
    def text(out):
        data = out.get("data", {})
        return out["text"] if out.get("name") == "stdout" else data.get("text/markdown", data.get("text/plain", ""))
    def words(cell):
        said = "\n".join("".join(text(out)) for out in cell["outputs"])
        said = re.sub(r".*\[WARNING\].*", "", said)     # DeepSpeed's, where it is imported first
        return " ".join(re.sub(r"0x[0-9a-f]+|[-+]?(\d[\d.,_]*(e[-+]?\d+)?|\b(nan|inf)\b)", "#", said).split())
    return {i: words(cell) for i, cell in enumerate(nb["cells"]) if cell["cell_type"] == "code"}


def has(path, words): return words in (ROOT/path).read_text(encoding="utf-8")
def paths(chosen): return pytest.mark.parametrize("path", chosen, ids=lambda p: f"{p.parent.name}/{p.stem}")


@paths([*(p for p in NOTEBOOKS if str(p) not in LONG), *rarely(*(p for p in NOTEBOOKS if str(p) in LONG))])
def test_a_notebook_runs(path, tmp_path): check(path, tmp_path, partial(forked, unchecked, ranks=1, limit=LIMIT))


@pytest.mark.long
@paths([p for p in NOTEBOOKS if has(p, HOOK)])
def test_a_notebook_runs_under_the_type_checker(path, tmp_path, typed): check(path, tmp_path, typed)


@pytest.mark.long
@paths([p for p in NOTEBOOKS if str(p) not in LONG])
def test_a_notebook_runs_twice_in_one_kernel(path, monkeypatch):
    "As a reader does who chooses \"Run all cells\" again."
    import nbformat
    from nbclient import NotebookClient
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nb = nbformat.read(ROOT/path, as_version=4)
    nb.cells = 2*[nbformat.v4.new_code_cell(c.source) for c in nb.cells
                  if c.cell_type == "code" and not re.search(r"#\| *eval: *false", c.source)]
    NotebookClient(nb, timeout=LIMIT, kernel_name="python3",
                   resources=dict(metadata=dict(path=str((ROOT/path).parent)))).execute()


def check(path, folder, run):
    "It ends well, and says what it stores."
    said = folder/"said"
    try: run((path, str(said)))
    except Exception as e:
        pytest.fail(f"{type(e).__name__}: {str(e)[-200:]}\n{said.read_text()[-6000:]}", pytrace=False)
    assert said.read_text().splitlines()[-1] == "Success."
    figures = Path(f"{said}.covered")
    assert not figures.exists() or not figures.read_text(encoding="utf-8"), figures.read_text(encoding="utf-8")
    if path.parts[0] == "tutorials": return     # what a trained model says is not the same on every machine
    stored, now = (outputs(json.loads(x.read_text(encoding="utf-8"))) for x in (ROOT/path, folder/"said.ipynb"))
    stale = {f"cell {i}": (stored[i], now[i]) for i in stored if stored[i] != now[i]}
    assert not stale, f"what {path} stores is not what it says: nbdev-test {path} --n-workers 0 --save"
