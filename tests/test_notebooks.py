"""Every notebook runs from its first cell to its last, in a process of its own: `nbdev-test NOTEBOOK`, without seven
seconds of imports."""
import os
import sys

import pytest
from conftest import ROOT
from forked import forked

NOTEBOOKS = sorted(p.relative_to(ROOT) for folder in ("nbs", "nbs/*", "tutorials")
                   for p in ROOT.glob(f"{folder}/*.ipynb"))
LIMIT = 600     # seconds


def notebook(_, path, said):
    "Ends the process: 0 if the notebook ran."
    out = os.open(said, os.O_CREAT | os.O_WRONLY, 0o600)
    for fd in (1, 2): os.dup2(out, fd)
    os.chdir(ROOT)
    from nbdev.test import nbdev_test
    try: nbdev_test(path=str(path), n_workers=0)
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stderr__): stream.flush()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_notebook_runs(path, tmp_path):
    try: forked(notebook, (path, str(tmp_path/"said")), 1, limit=LIMIT)
    except Exception as e: pytest.fail(f"{type(e).__name__}: {str(e)[-200:]}\n{(tmp_path/'said').read_text()[-6000:]}",
                                       pytrace=False)
    assert (tmp_path/"said").read_text().splitlines()[-1] == "Success."
