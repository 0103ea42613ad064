"""The adapters on OpenEnv, verifiers, GEM, TextArena and reasoning-gym themselves. Their dependencies contradict each
other, so `make hubs` gives them environments of their own, and the files of tests/hubs run there."""
import os
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize("name", ["openenv", "verifiers"])
def test_with_the_packages_themselves(name):
    python = ROOT/".venv"/name/"bin"/"python"
    if not python.exists(): pytest.skip(f"{name} is not installed: make hubs")
    path = os.pathsep.join([str(ROOT), str(ROOT/"tests")])
    command = [python, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", f"tests/hubs/with_{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
                          timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
