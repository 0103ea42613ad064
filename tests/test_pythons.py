"""Blocks and data on other Pythons: only torch, einops, jaxtyping and numpy are there, as floors 0 to 2 promise."""
import subprocess

import pytest
from conftest import ROOT

LOW = ("masked kl logprobs losses policy_losses preference_losses unpaired_losses margins online_losses "
       "reward_losses value_losses distill_losses selections components advantages groups shaping best_of "
       "trajectories corrections mismatch batch packing balancing buffer prompts preferences ragged").split()


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_floors_0_to_2_on_another_python(version):
    python = ROOT/".venv"/version/"bin/python"
    if not python.exists(): pytest.skip(f"no Python {version} here: make pythons")
    run = subprocess.run([python, "-m", "pytest", "-q", "-m", "not long", *(f"tests/test_{name}.py" for name in LOW)],
                         cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
