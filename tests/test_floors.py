"""`import rlblocks` loads floors 0–2 and torch, and the library is what its notebooks say. That imports point downwards
is the contract of import-linter in pyproject.toml."""
import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

# packages from the lowest to the highest, each with its floor (DESIGN 2)
ROOMS = dict(arithmetic=0, signals=1, losses=1, statistics=1, testing=1, data=2, engines=3, models=3, samplers=3,
             rollout=3, graders=3, environments=3, endpoint=3, checkpoint=3, placement=4, evaluation=4, tracking=4,
             loops=5, people=5)
HEAVY = ["transformers", "datasets", "ray", "vllm", "deepspeed", "matplotlib", "peft", "IPython"]
BOOKS = sorted(ROOT.glob("nbs/*/*.ipynb"))
TUTORIALS = sorted(ROOT.glob("tutorials/*.ipynb"))


def module_of(path):
    "The module that a notebook exports."
    found = re.search(r"#\| *default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
    return found and found[1]


FLOORS = {module_of(path): ROOMS[path.parent.name] for path in BOOKS} | {
    module_of(path): ROOMS["loops"] for path in TUTORIALS if module_of(path)}
MODULES = sorted(".".join(p.relative_to(ROOT/"rlblocks").with_suffix("").parts)
                 for p in (ROOT/"rlblocks").glob("*/*.py") if not p.stem.startswith("_"))


def test_every_module_has_a_notebook_of_its_name_in_its_room():
    assert MODULES and set(MODULES) == set(FLOORS), "modules and notebooks differ: " + ", ".join(
        sorted(set(MODULES) ^ set(FLOORS)))
    for path in BOOKS:
        assert re.fullmatch(r"\d\d[a-z]?_" + module_of(path).split(".")[1],
                            path.stem) and module_of(path).split(".")[0] == path.parent.name, path
    for name in ROOMS:
        assert ast.get_docstring(ast.parse((ROOT/"rlblocks"/name/"__init__.py").read_text(
            encoding="utf-8"))), f"{name}/__init__.py does not say what the room holds"


def fresh(code):
    "Output of `code` in a process that has imported nothing."
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_package_loads_floors_0_to_2_and_nothing_heavy():
    loaded = set(fresh("import rlblocks, sys; print(*sys.modules)").split())
    assert "torch" in loaded and not loaded & set(HEAVY)
    assert {m.removeprefix("rlblocks.") for m in loaded if m.count(".") == 2
            and m.startswith("rlblocks.")} == {m for m, floor in FLOORS.items() if floor <= 2}


def test_no_module_starts_cuda_when_it_is_imported():
    "LAWS 32: a process that forks afterwards could not use CUDA."
    fresh("import torch\ndef starts(): raise AssertionError('CUDA is started')\ntorch.cuda._lazy_init = starts\n"
          + "\n".join(f"import rlblocks.{name}" for name in MODULES))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_import_does_not_search_all_of_torch_for_garbage(enabled):
    "Three quarters of its time were one full collection. The collector is as it was afterwards."
    code = f"""
import gc, sys, torch
class Watch:
    def find_spec(name, path=None, target=None): seen.append(gc.isenabled()) if name.startswith("rlblocks.") else None
seen = []
sys.meta_path.insert(0, Watch)
gc.{'enable' if enabled else 'disable'}()
import rlblocks
print(len(seen) > 20, any(seen), gc.isenabled())"""
    assert fresh(code) == f"True False {enabled}"


ABSENT = """
import sys
class Blind:
    "An import path on which some packages are not installed."
    names = {absent!r}
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split('.')[0] in self.names else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Blind, sys.meta_path)
"""


def test_blocks_work_with_only_torch_einops_and_jaxtyping():
    code = ABSENT.format(absent=["numpy", "safetensors", "tqdm", *HEAVY]) + """
import warnings; warnings.filterwarnings("ignore")
import torch
from rlblocks import gae, ppo_loss, Prompts, Batch
x, mask = torch.randn(2, 3).requires_grad_(), torch.tensor([[False, True, True]]*2)
advantages, returns = gae(torch.ones(2, 3), torch.zeros(2, 3), mask)
loss, metrics = ppo_loss(x, x.detach(), advantages, mask)
loss.backward()
batch = Prompts(["ab", "c"], lambda t: [ord(c) for c in t], shuffle=False).take(3)
print(batch.lengths.tolist(), bool(x.grad.isfinite().all()), {m.split('.')[0] for m in sys.modules} & set(Blind.names))
"""
    assert fresh(code) == "[2, 1, 2] True set()"


def test_wrappers_come_lazily_by_name():
    assert fresh(
        "from rlblocks import Policy, Rollout, Grader, here; import rlblocks; print(Policy.__module__, 'Policy' in "
        "dir(rlblocks))") == "rlblocks.models.policy True"
    with pytest.raises(AssertionError, match="cannot import name 'Polcy'"): fresh("from rlblocks import Polcy")
