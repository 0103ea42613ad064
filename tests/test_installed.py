"What `make` installed is what constraints.txt says, in each environment: else a new machine gets another one, or none."
from importlib.metadata import distributions

import pytest
from conftest import ROOT
from packaging.requirements import Requirement


def pinned():
    lines = (line.partition("#")[0].strip() for line in (ROOT/"constraints.txt").read_text().splitlines())
    return {x.name.lower(): x.specifier for x in map(Requirement, filter(None, lines))}


@pytest.mark.parametrize("folder", [".venv", ".venv/vllm"])
def test_an_environment_has_the_versions_of_constraints_txt(folder):
    "fastapi once fitted one environment: where the other was old nobody saw it, and a new one could not be made."
    made = dict(zip([".venv", ".venv/vllm"], [".venv/.dev", ".venv/.vllm"], strict=True))[folder]
    if not (ROOT/made).exists(): pytest.skip(f"{folder} is not an environment that make has made")
    site = next((ROOT/folder).glob("lib/python3*/site-packages"))
    wanted = pinned()
    had = {x.name.lower(): x.version for x in distributions(path=[str(site)])}
    assert "torch" in had and "transformers" in had
    other = [f"{k} {v}, wanted {wanted[k]}" for k, v in had.items() if k in wanted and not wanted[k].contains(v)]
    assert not other, f"{folder}: {'; '.join(other)}: make it anew, with a constraints.txt that all environments allow"
