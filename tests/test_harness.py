"""lm-eval, inspect-ai and lighteval themselves against the endpoint. `make harness` gives them environments of their
own, where the files of tests/harness run."""
import os
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize(("name", "place"), [("lm_eval", "harness"), ("inspect", "harness"),
                                             ("lighteval", "lighteval")])
def test_with_the_packages_themselves(name, place):
    python = ROOT/".venv"/place/"bin"/"python"
    if not python.exists(): pytest.skip(f"{name} is not installed: make harness")
    path = os.pathsep.join([str(ROOT), str(ROOT/"tests")])
    command = [python, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", f"tests/harness/with_{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
                          timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
