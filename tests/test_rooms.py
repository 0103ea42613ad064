"""How floors 2-4 are written: short functions, short cells, short modules, few parameters, no state at module level,
nothing done on import.

OWED holds what does not keep a rule yet. It only shrinks: a test fails on what is not in it, and on an entry that
nobody owes any more."""
import ast
import json
import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from test_floors import FLOORS, source
from test_style import any_things, body, cells, functions, hidden_names, outer

HIGH = sorted(m for m in FLOORS if 2 <= FLOORS[m] <= 4)
OWED = json.loads((ROOT/"tests"/"owed.json").read_text())
MODULE, CELL, BODY, PARAMETERS = 350, 80, 60, 12
MUTABLE = {"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter", "WeakKeyDictionary",
           "WeakValueDictionary", "WeakSet"}


def owed(rule, found):
    "What is found, against what is owed."
    extra, paid = sorted(set(found) - set(OWED[rule])), sorted(set(OWED[rule]) - set(found))
    assert not extra, f"{rule}: {', '.join(extra)}"
    assert not paid, f"{rule}: nobody owes {', '.join(paid)}: strike it out of tests/owed.json"


@cache
def trees(): return {m: ast.parse(source(m)) for m in HIGH}


def top(tree):
    "Statements that run on import, those of classes too; not the bodies of functions."
    for n in tree.body:
        yield n
        if isinstance(n, ast.ClassDef | ast.If | ast.Try | ast.With): yield from top(n)


def is_mutable(value):
    """An empty container that code fills later, or one that it could: a dict or list that is a table of constants is
    read only."""
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return not (getattr(value, "elts", None) or getattr(value, "keys", None))
    return isinstance(value, ast.Call) and not value.args and not value.keywords and ast.unparse(value.func).split(
        ".")[-1] in MUTABLE | {"local", "count"} or (
        isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE - {"dict", "list", "set"})


def state(tree):
    "Names of the containers that a module makes to be filled later."
    made = [(n.targets[0] if isinstance(n, ast.Assign) else n.target, n.value)
            for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value]
    return [ast.unparse(name) for name, value in made if is_mutable(value) and ast.unparse(name) != "__all__"]


def written(tree):
    "Names that a function declares global, and functions that keep one answer for all: state that is in no container."
    kept = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and not n.args.args
            and any(re.match(r"(functools\.)?(lru_)?cache\b", ast.unparse(d)) for d in n.decorator_list)]
    return [f"global {name}" for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names] + kept


EVERYWHERE = ("warnings.filterwarnings", "warnings.simplefilter", "filterwarnings", "simplefilter", "os.putenv",
              "os.environ.setdefault", "os.environ.update", "torch.set_num_threads", "set_num_threads",
              "os.register_at_fork")
METHODS = re.compile(r".*\.(addFilter|setLevel)|atexit\.register|([\w.]*\.)?[A-Z]\w*\.register")  # registries: classes


def base(x):
    "What an attribute is read of in the end: `b` of `cast(Any, b.c[0].d)`."
    while True:
        if isinstance(x, ast.Attribute | ast.Subscript): x = x.value
        elif isinstance(x, ast.Call) and ast.unparse(x.func) == "cast": x = x.args[-1]
        else: return x.id if isinstance(x, ast.Name) else ""


def others(tree):
    "Names of what a module imports, and of what it reads of that."
    names = {a.asname or a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
             for a in n.names}
    return names | {n.targets[0].id for n in ast.walk(tree) if isinstance(n, ast.Assign)
                    and isinstance(n.targets[0], ast.Name) and base(n.value) in names}


def effects(tree):
    """What reaches beyond its own objects, anywhere: filters of warnings and logs, levels of loggers, writes to the
    environment and to what is imported, registries of libraries, torch's threads, what runs at exit."""
    foreign = others(tree)
    for n in ast.walk(tree):
        for x in n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AugAssign) else []:
            if not isinstance(x, ast.Name) and base(x) in foreign and "os.environ" not in ast.unparse(x):
                yield ast.unparse(x)
        name = ast.unparse(n.func) if isinstance(n, ast.Call) else ""
        if name in EVERYWHERE or METHODS.fullmatch(name): yield name
        if isinstance(n, ast.Assign | ast.AugAssign) and "os.environ" in ast.unparse(
                n.targets[0] if isinstance(n, ast.Assign) else n.target):
            yield "os.environ"


def parameters(f):
    a = f.args
    return len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg) - bool(
        a.args and a.args[0].arg in ("self", "cls"))


def test_bodies_are_short():
    "Median at most 8 lines, 95 % at most 30, none over 60."
    sizes = sorted((body(f), f"{m}.{f.name}") for m, tree in trees().items() for f in outer(tree))
    assert statistics.median(n for n, _ in sizes) <= 8
    assert sum(n > 30 for n, _ in sizes) <= .05*len(sizes), [name for n, name in sizes if n > 30]
    owed("bodies", [name for n, name in sizes if n > BODY])


def test_modules_are_short():
    "On every floor."
    owed("modules", [m for m in FLOORS if source(m).count("\n") > MODULE])


def test_class_cells_are_short():
    "A method of a wrapper is a few lines over a function that has its own cell."
    paths = [p for room in sorted({m.split(".")[0] for m in HIGH}) for p in ROOT.glob(f"nbs/{room}/*.ipynb")]
    found = [(p.name, i, text) for p in paths for i, text in cells(p) if "#| export" in text and "\nclass " in text]
    owed("class cells", [f"{name.split('_', 1)[1].removesuffix('.ipynb')}: "
                         f"{text.split(chr(10) + 'class ')[1].split('(')[0].split(':')[0]}"
                         for name, i, text in found if text.count("\n") + 1 > CELL])


def test_no_hidden_cell_defines_what_a_visible_one_uses():
    "A reader of the page can run it."
    paths = [p for room in ("engines", "models", "data", "checkpoint") for p in ROOT.glob(f"nbs/{room}/*.ipynb")]
    owed("hidden cells", [f"{p.parent.name}/{p.stem}" for p in paths if hidden_names(cells(p))])


def test_constructors_take_few_parameters():
    "What is more is a value: engine=fsdp2(…), optimizer=adamw(…)."
    found = [f"{m}.{c.name}" for m, tree in trees().items() for c in ast.walk(tree) if isinstance(c, ast.ClassDef)
             for f in c.body if isinstance(f, ast.FunctionDef) and f.name == "__init__" and parameters(f) > PARAMETERS]
    owed("constructors", found)


def test_no_module_keeps_state():
    """Owed are answers that are the same as long as a process lives: what its system offers (`sandbox_support`), a
    class that can be made once a heavy library is there (`pickler_class`, `_buffered_layer`), and the locks that a
    forked child has to close (`_locks`)."""
    owed("state", [f"{m}.{name}" for m, tree in trees().items() for name in state(tree) + written(tree)])


def test_nothing_reaches_beyond_its_own_objects():
    """At import never; in a function only where that is documented, once: its entry in `tests/owed.json`.

    DeepSpeed's settings and the environment it reads are a table of `59a_compiled`; torch keeps the limit of groups
    that have none of their own in its module, and `leave_world` puts it back; a process that grades has no streams; a
    forked child closes its copies of the locks."""
    for m, tree in trees().items():
        on_import = [e for n in top(tree) if not isinstance(n, ast.FunctionDef | ast.ClassDef | ast.If | ast.Try
                                                            | ast.With) for e in effects(n)]
        assert not on_import, f"{m}, on import: {', '.join(on_import)}"
    owed("effects", sorted({f"{m}: {e}" for m, tree in trees().items() for e in effects(tree)}))


def test_public_signatures_say_what_they_take():
    "Floors 2 to 5; below them nothing is owed (`tests/test_style.py`)."
    owed("any", {f"{m}: {x}" for m in FLOORS if FLOORS[m] >= 2
                 for x in any_things(ast.parse(source(m)), offered(ast.parse(source(m))))})


def offered(tree):
    "A module's `__all__`."
    return next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
                and ast.unparse(n.targets[0]) == "__all__")


def hidden(name): return name.startswith("_") and not name.endswith("__")


def own(tree):
    "Private methods and attributes of a module's classes."
    for c in ast.walk(tree):
        if isinstance(c, ast.Attribute) and isinstance(c.ctx, ast.Store) and hidden(c.attr): yield c.attr
        for n in c.body if isinstance(c, ast.ClassDef) else ():
            if isinstance(n, ast.FunctionDef) and hidden(n.name): yield n.name
            if isinstance(n, ast.AnnAssign) and hidden(ast.unparse(n.target)): yield ast.unparse(n.target)


def crossing(trees):
    "Private attributes that a module reads of objects of another one of ours: {module: what it reads}."
    made = {m: set(own(tree)) for m, tree in trees.items()}
    ours = set().union(*made.values())
    return {f"{m}: {ast.unparse(n)}" for m, tree in trees.items() for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and hidden(n.attr) and n.attr in ours - made[m]
            and ast.unparse(n.value) not in ("self", "cls")}


def test_no_private_attribute_crosses_a_module():
    "What two modules need of a class is a public method of it."
    owed("private", crossing({m: ast.parse(source(m)) for m in FLOORS}))


def test_these_checks_see_what_they_forbid(monkeypatch):
    tree = ast.parse("A = {}\nB = dict(x=1)\nC = [1]\nD = WeakKeyDictionary()\nE: dict = {}\nF = (1,)\ndef f(): global "
                     "G\nos.environ['x'] = 1\nwarnings.filterwarnings('ignore')\n"
                     "def g(): os.environ.setdefault('a', 'b'); atexit.register(f); torch.set_num_threads(1)\n"
                     "logging.getLogger('x').addFilter(f); register(f); ready.register(f); "
                     "a.Interface.register(f)\nclass H:\n  def __init__(self, a, b, *c, d, **e): pass\n"
                     "@cache\ndef k(): pass\n@functools.lru_cache(maxsize=None)\ndef l(): pass\n"
                     "@cache\ndef m(x): pass\nimport lib.sub as s, lib\nfrom lib import part\n"
                     "def n(mine):\n  mine.x = s\n  s.y[0].z = part.w = 1\n  own = cast(Any, lib.group)\n"
                     "  made = lib.make()\n  own.limit += 1\n  made.limit = 1")
    assert state(tree) == ["A", "D", "E"] and written(tree) == ["global G", "k", "l"]
    assert sorted(effects(tree)) == ["a.Interface.register", "atexit.register", "logging.getLogger('x').addFilter",
                                     "os.environ", "os.environ.setdefault", "own.limit", "part.w", "s.y[0].z",
                                     "torch.set_num_threads", "warnings.filterwarnings"]
    assert parameters(functions(tree)[-1]) == 5
    made = "class A:\n  _b:int = 0\n  def _f(self): self._x = self._f()"
    used = "a._f(); b.a._x; self._f(); c._other; d._b"
    assert crossing(dict(m=ast.parse(made), n=ast.parse(used))) == {"n: a._f", "n: b.a._x", "n: d._b"}
    monkeypatch.setitem(OWED, "state", ["old"])
    with pytest.raises(AssertionError, match="nobody owes old"): owed("state", [])
    with pytest.raises(AssertionError, match="state: new"): owed("state", ["old", "new"])


# -- CONTRIBUTING

def placed(text):
    "(name, file): what a sentence names in backticks before it names a file in brackets, or after `in`."
    found = []
    for sentence in re.split(r"(?<=[.:;]) ", " ".join(text.split())):
        names = []
        for word in re.findall(r"`([^`]+)`", sentence):
            if re.fullmatch(r"(?:rlblocks|tests)/[\w/]+\.py", word):
                found += [(name, word) for name in names]
                names = []
            elif re.fullmatch(r"[\w.]+", word): names.append(word.split(".")[-1])
    return found


def test_contributing_names_pieces_of_the_files_beside_them():
    found = placed((ROOT/"CONTRIBUTING.md").read_text())
    assert len(found) > 12
    absent = [f"{name} in {file}" for name, file in found if not re.search(rf"\b{name}\b", (ROOT/file).read_text())]
    assert not absent, f"CONTRIBUTING.md: {', '.join(absent)}"


def test_the_check_of_contributing_sees_pairs():
    text = "A `B`\n(`rlblocks/x.py`) and `f` in `tests/y.py`. Then `g`: no `h(1)`, `C.i` or `j` (`rlblocks/z.py`)"
    assert placed(text) == [("B", "rlblocks/x.py"), ("f", "tests/y.py"), ("i", "rlblocks/z.py"),
                            ("j", "rlblocks/z.py")]


def test_contributing_names_what_is_there():
    "Files, rooms, and targets of the Makefile."
    text, made = (ROOT/"CONTRIBUTING.md").read_text(), (ROOT/"Makefile").read_text()
    files = re.findall(r"`((?:rlblocks|nbs|tests)/[\w/]+\.(?:py|ipynb))`", text)
    assert len(files) > 10 and not [f for f in files if not (ROOT/f).exists()]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", text)) == {p.parent.name for p in ROOT.glob("rlblocks/*/__init__.py")}
    assert all(f"\n{target}:" in made for target in re.findall(r"`make ([\w-]+)`", text))
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]


# -- Python 3.11 … 3.13, as settings.ini says

# removed in 3.12 and 3.13
GONE = {"imp", "asyncore", "asynchat", "smtpd", "distutils", "aifc", "audioop", "cgi", "cgitb", "chunk", "crypt",
        "imghdr", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau",
        "telnetlib", "uu", "xdrlib", "lib2to3"}


def lines():
    return sorted([*ROOT.glob("rlblocks/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py"),
                   *ROOT.glob("tutorials/*.py")])


def test_every_file_is_python_3_11_and_imports_nothing_that_3_13_removed():
    for path in lines():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 11))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {
            n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
        assert not (gone := {n.split(".")[0] for n in names} & GONE), (path, gone)


SYNTAX = ("import ast, sys, warnings; warnings.simplefilter('error'); [compile(open(f, encoding='utf-8').read(), f, "
          "'exec') for f in sys.argv[1:]]")


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons_compile_every_file(version):
    "Without a warning that it will be an error later."
    python = next(iter(Path.home().glob(f".pyenv/versions/{version}*/bin/python3")), None)
    if python is None or sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip(f"no Python {version} here beside this one")
    run = subprocess.run([python, "-c", SYNTAX, *lines()], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
