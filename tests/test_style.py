"""How floors 0 and 1 are written (STYLE B3): formulas in plain PyTorch, short bodies, lines that fit, no argument by
accident; and on all floors no private name across modules."""
import ast
import importlib
import inspect
import json
import re
import statistics

import pytest
from conftest import ROOT
from test_floors import FLOORS, source

LOW = sorted(m for m in FLOORS if FLOORS[m] <= 1)
NOTEBOOKS = sorted(p for room in {m.split(".")[0] for m in LOW} for p in ROOT.glob(f"nbs/{room}/*.ipynb"))
# where a gradient written by hand saves memory of the size of the vocabulary
HEAD = {"arithmetic.logprobs", "arithmetic.head"}
DICTS = {"metrics", "cut"}                # names of dictionaries, which a loss fills key by key
MACHINERY = {"testing.laws", "testing.oracles", "testing.probes"} # no blocks
WIDTH = 120
each_module, each_notebook = pytest.mark.parametrize("module", LOW), pytest.mark.parametrize("path", NOTEBOOKS,
                                                                                             ids=lambda p: p.name)


def cells(path):
    return [(i, "".join(c["source"]))
            for i, c in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]) if c["cell_type"] == "code"]
def functions(tree): return [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]


# -- formulas, not gradients

def hand_written(tree):
    """Gradients written by hand: subclasses of autograd.Function, torch's own …_backward called as an operation,
    custom_op and register_hook."""
    found = [c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef)
             and any(re.search(r"(^|\.)Function$", ast.unparse(b)) for b in c.bases)]
    return found + [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)
                    and (n.attr.endswith("_backward") or n.attr in ("custom_op", "register_hook"))]


def in_place(tree):
    """What writes into a tensor: methods that end in _, out=, inplace=True, and in bodies of functions x += y and
    x[i] = y (but of a DICT)."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    methods = [f"line {n.lineno}: {ast.unparse(n.func)}"
               for n in calls if isinstance(n.func, ast.Attribute) and re.search(r"[a-z]_$", n.func.attr)]
    options = [f"line {n.lineno}: {ast.unparse(n.func)}({k.arg}=…)" for n in calls for k in n.keywords
               if k.arg == "out" or k.arg == "inplace" and ast.unparse(k.value) != "False"]
    inside = {id(n): n for f in functions(tree) for n in ast.walk(f)}.values()
    stores = [n for n in inside if isinstance(n, ast.AugAssign) or isinstance(n, ast.Subscript)
              and isinstance(n.ctx, ast.Store)]
    targets = {id(n.target) for n in stores if isinstance(n, ast.AugAssign)} # x[0] += 1 is said once
    stores = [n for n in stores if id(n) not in targets
              and not (isinstance(n, ast.Subscript) and ast.unparse(n.value) in DICTS)]
    return methods + options + [f"line {n.lineno}: {ast.unparse(n)}{' = …'*isinstance(n, ast.Subscript)}"
                                for n in stores]


@pytest.mark.parametrize("module", [m for m in LOW if m not in HEAD])
def test_no_gradient_is_written_by_hand(module):
    found = hand_written(ast.parse(source(module)))
    assert not found, f"a loss is its equation, and autograd finds the gradient: {', '.join(found)}"


@pytest.mark.parametrize("module",
                         [m for m in LOW if m not in MACHINERY and re.search(r"(?m)^def \w+_loss\(", source(m))])
def test_nothing_is_written_in_place_where_losses_are(module):
    found = in_place(ast.parse(source(module)))
    assert not found, "\n".join(found)


def test_these_two_checks_see_what_they_forbid():
    tree = ast.parse(
        "class A(torch.autograd.Function): pass\nclass B(Function): pass\nclass C(FunctionLike): pass\n"
        "y = torch.ops.aten.threshold_backward(x, g, 0.)\nx.mul_(2)\ntorch.add(x, y, "
        "out=x)\nx.__init__()\nf._replace(a=1)\nx.clamp(0)\n"
        "relu(x, inplace=True)\nx.register_hook(f)\ntorch.library.custom_op('a::b')\nn += 1\nNAMES['a'] = 1\n"
        "def f(x, y):\n  x += 1\n  x[0] = 2\n  x *= y\n  x[:, 1] -= 3\n  metrics['a'] = x[0]\n  x[0], y = y, x\n  "
        "return relu(x, inplace=False)")
    assert hand_written(tree) == ["A", "B", "torch.ops.aten.threshold_backward", "x.register_hook",
                                  "torch.library.custom_op"]
    assert sorted(in_place(tree)) == sorted(["line 5: x.mul_", "line 6: torch.add(out=…)", "line 10: relu(inplace=…)",
                                             "line 16: x += 1", "line 17: x[0] = …",
                                             "line 18: x *= y", "line 19: x[:, 1] -= 3", "line 21: x[0] = …"])


# -- modules

def private_imports(tree):
    own = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
           and (n.level or (n.module or "").split(".")[0] == "rlblocks")]
    return [f"{n.module}.{a.name}" for n in own for a in n.names if a.name.startswith("_")]


@pytest.mark.parametrize("module", sorted(FLOORS))
def test_no_private_name_crosses_a_module(module):
    found = private_imports(ast.parse(source(module)))
    assert not found, (
        f"what two modules need is a public piece of the lower one (#| exporti if users do not): {', '.join(found)}")


def test_the_check_of_imports_sees_private_names():
    tree = ast.parse(
        "from .masked import _whole, aggregate\nfrom rlblocks.arithmetic.kl import _x as x\nfrom torch import "
        "_C\nfrom rlblocks import kl")
    assert private_imports(tree) == ["masked._whole", "rlblocks.arithmetic.kl._x"]


# -- length

def body(f):
    "Lines of a function without signature and docstring."
    statements = f.body[ast.get_docstring(f) is not None:]
    return f.end_lineno - statements[0].lineno + 1 if statements else 0


def outer(tree):
    "Functions and methods, not the functions inside them."
    inner = {id(g) for f in functions(tree) for g in functions(f) if g is not f}
    return [f for f in functions(tree) if id(f) not in inner]


def test_bodies_are_short():
    "Median at most 8 lines, 95 % at most 25, none over 40."
    sizes = sorted((body(f), f"{m}.{f.name}") for m in LOW for f in outer(ast.parse(source(m))))
    lengths = [n for n, _ in sizes]
    long = [f"{name}: {n}" for n, name in sizes if n > 25]
    assert lengths[-1] <= 40 and len(long) <= .05*len(
        sizes), f"{len(long)} of {len(sizes)} bodies are over 25 lines, none may be over 40: {', '.join(long)}"
    assert statistics.median(lengths) <= 8


def test_the_length_of_a_body():
    tree = ast.parse(
        'def f(\n  a, # a\n  b,\n):\n  """One.\n\n  Two."""\n  x = 1\n\n  def g():\n    return 2\n  return '
        'x\nclass A:\n  def h(self): return 1\ndef k():\n  "documented"')
    assert [(f.name, body(f)) for f in outer(tree)] == [("f", 5), ("k", 0), ("h", 1)]


def wide(text):
    return [f"line {i}: {len(line)} columns: {line.strip()[:50]}…"
            for i, line in enumerate(text.split("\n"), 1) if len(line) > WIDTH]


@each_module
def test_lines_of_a_module_fit(module):
    found = wide(re.sub(r"(?ms)^__all__ = \[.*?\]", "", source(module))) # which nbdev breaks as it likes
    assert not found, "\n".join(found)


@each_notebook
def test_lines_of_a_notebook_fit(path):
    found = [f"cell {i}, {line}" for i, text in cells(path) for line in wide(text)]
    assert not found, "\n".join(found)


# -- names

# Words that the field has others for: clip, gather, shard, refresh, probe, load; split, atomic, elementwise, mask.
WORDS = {"settle", "settled", "felt", "told", "laid", "follow", "follows", "apart", "held", "came", "looks", "asked",
         "said", "torn", "undivided", "entrywise", "mark", "marks", "freshness"}


def defined(tree):
    "Names that a module gives: of functions and classes, their parameters, variables and attributes."
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef): yield n.name
        elif isinstance(n, ast.arg): yield n.arg
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): yield n.id
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store): yield n.attr


def dialect(tree): return {name for name in defined(tree) if WORDS & set(name.lower().split("_"))}


def test_names_are_those_of_the_field():
    "Floors 2 to 5. What is owed only shrinks."
    owed = json.loads((ROOT/"tests"/"owed.json").read_text())["words"]
    found = {f"{m}: {name}" for m in FLOORS if FLOORS[m] >= 2 for name in dialect(ast.parse(source(m)))}
    assert found == set(owed), f"new: {sorted(found - set(owed))}; nobody owes: {sorted(set(owed) - found)}"


def test_the_check_of_names_sees_words():
    tree = ast.parse("def asked_for(told, *, x): held = self.y.torn; self.came = said(1); Undivided = laidback = 2\n"
                     "class Mark_: pass")
    assert dialect(tree) == {"asked_for", "told", "held", "came", "Undivided", "Mark_"}


# -- arguments



def by_accident(f):
    "Parameters that a positional argument can reach and should not: those with a default, and numbers."
    params = [p for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # coefficients, schedules: numbers are all they have
    if not any("Tensor" in str(p.annotation) for p in params): return []
    return [p.name for p in params if p.default is not p.empty or p.annotation in (int, float, bool, str)
            or isinstance(p.annotation, str)]


@pytest.mark.parametrize("module", [m for m in LOW if FLOORS[m] == 1 and m not in MACHINERY])
def test_optional_tensors_and_numbers_are_keywords(module):
    lib = importlib.import_module(f"rlblocks.{module}")
    found = [f"{name}({', '.join(by_accident(f))})"
             for name in lib.__all__ if inspect.isfunction(f := getattr(lib, name)) and by_accident(f)]
    assert not found, f"can be given by position, and so in each other's place: {', '.join(found)}"


def any_things(tree, public):
    """Parameters and results of public functions, and of the methods of public classes, that are annotated with Any:
    no annotation at all."""
    shown = [(f.name, f) for f in functions(tree) if f.name in public]
    shown += [(f"{c.name}.{f.name}", f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name in public
              for f in c.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    found = []
    for who, f in shown:
        args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg]
        said = {a.arg: a.annotation for a in args if a} | {"return": f.returns}
        found += [f"{who}: {name}" for name, x in said.items() if x and re.search(r"\bAny\b", ast.unparse(x))]
    return found


@each_module
def test_no_public_signature_takes_anything(module):
    found = any_things(ast.parse(source(module)), importlib.import_module(f"rlblocks.{module}").__all__)
    assert not found, f"say what is wanted, a Protocol if need be: {', '.join(found)}"


def test_the_check_of_annotations_sees_any():
    tree = ast.parse("def f(a:int, *, b:list[Any]|None=None, **kw:Any)->tuple[int, Any]: pass\ndef _g(x:Any): pass\n"
                     "def h(x:Anything): pass\nclass C:\n  def m(self, x:Any): pass\n  def _n(self, x:Any): pass")
    assert any_things(tree, ["f", "h", "C"]) == ["f: b", "f: kw", "f: return", "C.m: x"]


def test_the_check_of_arguments_sees_what_is_optional():
    from torch import Tensor
    def bad(x:Tensor, y:Tensor|None=None, beta:float=.1, *, z:Tensor|None=None): pass
    def number(x:Tensor, n:int, *rest:Tensor): pass
    def good(x:Tensor, y:Tensor, *, beta:float=.1, z:Tensor|None=None): pass
    def schedule(coef:float, step:int, *, horizon:int=3): pass
    assert [by_accident(f) for f in (bad, number, good, schedule)] == [["y", "beta"], ["n"], [], []]


# -- notebooks

def hidden_names(pairs):
    "Names that a hidden cell defines or imports and a cell that is shown uses: {name: cell}."
    code = {i: re.sub(r"(?m)^\s*[%!].*$", "pass", text) for i, text in pairs}
    hidden = {i for i, text in pairs if re.search(r"(?m)^#\| *hide\b", text)}
    made = {}
    for i in hidden:
        for n in ast.parse(code[i]).body:
            if isinstance(n, ast.FunctionDef | ast.ClassDef): made[n.name] = i
            elif isinstance(n, ast.Import | ast.ImportFrom):
                made |= {(a.asname or a.name.partition(".")[0]): i for a in n.names}
            elif isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
                made |= {x.id: i for x in ast.walk(n) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    used = {x.id for i in code.keys() - hidden
            for x in ast.walk(ast.parse(code[i])) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    return {name: i for name, i in made.items() if name in used}


@each_notebook
def test_no_hidden_cell_defines_what_a_visible_one_uses(path):
    assert not hidden_names(cells(path)), "show the cell, or import the name"


def test_the_check_of_hidden_cells_sees_definitions():
    shown = [(0, "#| hide\nimport a.x\nfrom g import h\nb = 1\ndef c(): pass\nd, e = 1, 2\n%magic"),
             (1, "a + b; c(); d"), (2, "#| hide\ne + f"), (3, "#| export\nf = 1")]
    assert hidden_names(shown) == dict(a=0, b=0, c=0, d=0)
