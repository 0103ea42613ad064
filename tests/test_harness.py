"""lm-eval and inspect-ai themselves against the endpoint. `make harness` gives them an environment of their own, where the
files of tests/harness run."""
import os
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize("name", ["lm_eval", "inspect"])
def test_with_the_packages_themselves(name):
    python = ROOT/".venv"/"harness"/"bin"/"python"
    if not python.exists(): pytest.skip("lm-eval and inspect-ai are not installed: make harness")
    path = os.pathsep.join([str(ROOT), str(ROOT/"tests")])
    command = [python, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", f"tests/harness/with_{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
                          timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
