"The house plan (DESIGN 2): a module imports only from its floor and below, and `import rlblocks` loads floors 0–2 and torch."
import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

BELOW = {"torch", "einops", "jaxtyping"}                     # all that floors 0–2 may use
SHIPPED = {"kernels": {"triton"}}                            # and, where it is needed, what comes with torch's CUDA builds
REQUIRED = BELOW | {"numpy", "safetensors", "tqdm"}          # what floors 3–5 may load with themselves; the rest comes when it is needed
HEAVY = ["transformers", "datasets", "ray", "vllm", "deepspeed", "matplotlib", "peft", "IPython"]


def floors():
    "Floor of each module: the tens of its notebook's number, 21_batch → 2."
    found = {}
    for nb in ROOT.glob("nbs/[0-9]*.ipynb"):
        name = re.search(r"#\| *default_exp (\w+)", nb.read_text(encoding="utf-8"))
        if name: found[name[1]] = int(nb.name[0])
    return found


FLOORS = floors()
MODULES = sorted(p.stem for p in (ROOT/"rlblocks").glob("*.py") if not p.stem.startswith("_"))


def imports(source):
    "(module, at import time?) of every import in `source`; our own modules as `rlblocks.NAME`."
    tree = ast.parse(source)
    late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for n in ast.walk(f)}
    late |= {id(n) for i in ast.walk(tree) if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test) for n in ast.walk(i)}
    for node in ast.walk(tree):
        now = id(node) not in late
        if isinstance(node, ast.Import): yield from ((a.name, now) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = "rlblocks" if node.level else ""
            module = ".".join(x for x in (inside, node.module) if x)
            yield from ((f"rlblocks.{a.name}", now) for a in node.names) if module == "rlblocks" else [(module, now)]


def imports_of(module): return list(imports((ROOT/"rlblocks"/f"{module}.py").read_text(encoding="utf-8")))
def ours(module): return {name.split(".")[1] for name, _ in imports_of(module) if name.startswith("rlblocks.")}


def test_imports_are_found_wherever_they_hide():
    code = "import a.b, c\nfrom .masked import x\nfrom rlblocks.kl import y\nfrom . import batch\ndef f():\n  import late\n  from ..x import z\nif TYPE_CHECKING: import typed\ntry: import tried\nexcept ImportError: pass"
    assert set(imports(code)) == {("a.b", True), ("c", True), ("rlblocks.masked", True), ("rlblocks.kl", True), ("rlblocks.batch", True), ("late", False),
                                  ("rlblocks.x", False), ("typed", False), ("tried", True)}


def test_every_module_has_a_notebook_and_a_floor():
    assert MODULES and set(MODULES) == set(FLOORS), "modules and notebooks differ: " + ", ".join(sorted(set(MODULES) ^ set(FLOORS)))
    assert max(FLOORS.values()) <= 5


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_or_sideways(module):
    for other in ours(module): assert FLOORS[other] <= FLOORS[module], f"{module} (floor {FLOORS[module]}) imports {other} (floor {FLOORS[other]})"


def test_no_cycles():
    graph, done = {m: ours(m) for m in MODULES}, set()
    def visit(m, path):
        assert m not in path, "a circle of imports: " + " → ".join([*path, m])
        if m not in done:
            for other in graph[m]: visit(other, [*path, m])
            done.add(m)
    for m in MODULES: visit(m, [])


@pytest.mark.parametrize("module", MODULES)
def test_outside_imports(module):
    outside = [(name.split(".")[0], now) for name, now in imports_of(module) if not name.startswith("rlblocks.")]
    strangers = {(name, now) for name, now in outside if name not in sys.stdlib_module_names}
    if FLOORS[module] <= 2: assert {name for name, _ in strangers} <= BELOW | SHIPPED.get(module, set()), f"floors 0–2 use {', '.join(sorted(BELOW))} only"
    assert {name for name, now in strangers if now} <= REQUIRED, "import what is optional or heavy where it is used, not at the top"


def fresh(code):
    "Output of `code` in a process that has imported nothing."
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_package_loads_floors_0_to_2_and_nothing_heavy():
    loaded = set(fresh("import rlblocks, sys; print(*sys.modules)").split())
    assert "torch" in loaded and not loaded & set(HEAVY)
    assert {m.split(".")[1] for m in loaded if m.startswith("rlblocks.")} == {m for m, floor in FLOORS.items() if floor <= 2}


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
    def find_spec(self, name, path=None, target=None): return None if name.split('.')[0] in self.names else self.finder.find_spec(name, path, target)
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


def test_absent_is_absent():
    with pytest.raises(AssertionError, match="No module named 'numpy'"): fresh(ABSENT.format(absent=["numpy"]) + "import numpy")


def test_wrappers_come_lazily_by_name():
    assert fresh("from rlblocks import Policy, Rollout, Grader, here; import rlblocks; print(Policy.__module__, 'Policy' in dir(rlblocks))") == "rlblocks.models True"
    with pytest.raises(AssertionError, match="cannot import name 'Polcy'"): fresh("from rlblocks import Polcy")
