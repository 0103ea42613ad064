"The house plan (DESIGN 2): rooms on floors, imports only downwards, and `import rlblocks` loads floors 0–2 and torch."
import ast
import re
import subprocess
import sys
from functools import cache

import pytest
from conftest import ROOT

# A room imports only from rooms above it in this list; its floor says what else it may use.
ROOMS = dict(arithmetic=0, signals=1, losses=1, testing=1, data=2, engines=3, models=3, samplers=3,
             rollout=3, graders=3, environments=3, endpoint=3, checkpoint=3, placement=4, people=5)
BELOW = {"torch", "einops", "jaxtyping"}                     # all that floors 0–2 may use
# and, where it is needed, what comes with torch's CUDA builds
SHIPPED = {"arithmetic.kernels": {"triton"}}
# what floors 3–5 may load with themselves; the rest comes when it is needed
REQUIRED = BELOW | {"numpy", "safetensors", "tqdm"}
HEAVY = ["transformers", "datasets", "ray", "vllm", "deepspeed", "matplotlib", "peft", "IPython"]
BOOKS = sorted(ROOT.glob("nbs/*/*.ipynb"), key=lambda p: p.name)


def module_of(path):
    "The module that a notebook exports."
    found = re.search(r"#\| *default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
    return found and found[1]


FLOORS = {module_of(path): ROOMS[path.parent.name] for path in BOOKS}
MODULES = sorted(".".join(p.relative_to(ROOT/"rlblocks").with_suffix("").parts)
                 for p in (ROOT/"rlblocks").glob("*/*.py") if not p.stem.startswith("_"))


def room(module): return module.split(".")[0]
def path_of(module): return ROOT/"rlblocks"/f"{module.replace('.', '/')}.py"
def source(module): return path_of(module).read_text(encoding="utf-8")


def imports(source, room="room"):
    """(module, at import time?) of every import in `source`, a module of `room`; our own modules as
    `rlblocks.ROOM.NAME`."""
    tree = ast.parse(source)
    late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for n in ast.walk(f)}
    late |= {id(n) for i in ast.walk(tree) if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test)
             for n in ast.walk(i)}
    for node in ast.walk(tree):
        now = id(node) not in late
        if isinstance(node, ast.Import): yield from ((a.name, now) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(x for x in (("", f"rlblocks.{room}", "rlblocks")[node.level], node.module) if x)
            # a package: what it gives is a module
            whole = module == "rlblocks" or re.fullmatch(r"rlblocks\.\w+", module)
            yield from ((f"{module}.{a.name}", now) for a in node.names) if whole else [(module, now)]


@cache
def imports_of(module): return list(imports(source(module), room(module)))
def ours(module):
    return {name.removeprefix("rlblocks.") for name, _ in imports_of(module) if name.startswith("rlblocks.")}


def test_imports_are_found_wherever_they_hide():
    code = ("import a.b, c\nfrom .masked import x\nfrom rlblocks.arithmetic.kl import y\nfrom ..data import "
            "batch\nfrom . import near\ndef f():\n  import late\n"
            "  from ..x.y import z\nif TYPE_CHECKING: import typed\ntry: import tried\nexcept ImportError: pass")
    assert set(imports(code)) == {("a.b", True), ("c", True), ("rlblocks.room.masked", True),
                                  ("rlblocks.arithmetic.kl", True), ("rlblocks.data.batch", True),
                                  ("rlblocks.room.near", True), ("late", False), ("rlblocks.x.y", False),
                                  ("typed", False), ("tried", True)}


def test_every_module_has_a_notebook_of_its_name_in_its_room():
    assert MODULES and set(MODULES) == set(FLOORS), "modules and notebooks differ: " + ", ".join(
        sorted(set(MODULES) ^ set(FLOORS)))
    for path in BOOKS:
        assert re.fullmatch(r"\d\d[a-z]?_" + module_of(path).split(".")[1],
                            path.stem) and module_of(path).split(".")[0] == path.parent.name, path
    for name in ROOMS:
        assert ast.get_docstring(ast.parse((ROOT/"rlblocks"/name/"__init__.py").read_text(
            encoding="utf-8"))), f"{name}/__init__.py does not say what the room holds"


def test_numbers_are_places_in_reading_order():
    """Each number once (51b follows 51), and rooms in the order of their floors: what a notebook uses comes before
    it, or in its own room."""
    numbers = [path.name.split("_")[0] for path in BOOKS]
    assert len(set(numbers)) == len(
        numbers), f"numbers given twice: {sorted({n for n in numbers if numbers.count(n) > 1})}"
    seen = [path.parent.name for path in BOOKS]
    assert [r for i, r in enumerate(seen) if r not in seen[:i]] == list(ROOMS)
    assert seen == sorted(seen, key=list(ROOMS).index)


def test_a_notebook_imports_from_smaller_numbers():
    "All but `hf`, the sampler to read first, which takes what it does with a ticket from `transfer`, a later one."
    places = {module_of(path): i for i, path in enumerate(BOOKS)}
    back = {(m, other) for m in MODULES for other in ours(m) & set(places) if places[other] > places[m]}
    assert back == {("samplers.hf", "samplers.transfer")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    order = list(ROOMS)
    for other in ours(module):
        assert order.index(room(other)) <= order.index(room(module)), f"{module} imports {other}, of a room above it"


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
    if FLOORS[module] <= 2:
        assert {name for name, _ in strangers} <= BELOW | SHIPPED.get(
            module, set()), f"floors 0–2 use {', '.join(sorted(BELOW))} only"
    assert {name for name, now in strangers
            if now} <= REQUIRED, "import what is optional or heavy where it is used, not at the top"


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


def test_absent_is_absent():
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        fresh(ABSENT.format(absent=["numpy"]) + "import numpy")


def test_wrappers_come_lazily_by_name():
    assert fresh(
        "from rlblocks import Policy, Rollout, Grader, here; import rlblocks; print(Policy.__module__, 'Policy' in "
        "dir(rlblocks))") == "rlblocks.models.policy True"
    with pytest.raises(AssertionError, match="cannot import name 'Polcy'"): fresh("from rlblocks import Polcy")
