"""What a reader meets: documented names, a library equal to its notebooks, clean notebooks, a fresh README, loops
that fit a page."""
import ast
import builtins
import configparser
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from conftest import ROOT
from test_floors import FLOORS, MODULES, ROOMS

NOTEBOOKS = sorted([*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("tutorials/*.ipynb")])
TUTORIALS = sorted(ROOT.glob("tutorials/*.ipynb"))
OWN_LOOP = [p for p in TUTORIALS if "default_exp loops." in p.read_text(encoding="utf-8")]
OTHERS = [p for p in TUTORIALS if p not in OWN_LOOP]       # they import the loops of these
MARKDOWN = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "benchmarks/README.md", "docs/coming_from.md",
            "docs/troubleshooting.md")
EQUATION = re.compile("[=≤≥∈∑Σ∝−·√]")
SOURCE = re.compile(r"\b(19|20)\d\d\b")


def public(module):
    """(qualified name, function) of what `module` exports: functions, and the constructors and public methods of
    classes."""
    lib = importlib.import_module(f"rlblocks.{module}")
    for name in lib.__all__:
        thing = getattr(lib, name)
        if inspect.isclass(thing):
            yield name, thing
            for method, f in vars(thing).items():
                f = f.__func__ if isinstance(f, staticmethod | classmethod) else f
                if inspect.isfunction(f) and inspect.unwrap(f).__code__.co_filename == lib.__file__ and (
                        method == "__init__" or not method.startswith("_")):
                    yield f"{name}.{method}", f
        elif inspect.isfunction(thing): yield name, thing


@pytest.mark.parametrize("module", [m for m in MODULES if FLOORS[m] == 1 and not m.startswith("testing.")])
def test_algorithms_give_equation_and_source(module):
    "Each has its equation; what returns tensors (not a guard, not a number to read) also the paper and its year."
    doc = lambda f: f.__doc__ or ""
    from rlblocks import _APART # guards and pieces of the bodies are no algorithms
    poor = [name for name, f in public(module) if name not in _APART and (
        not EQUATION.search(doc(f)) or not SOURCE.search(doc(f))
        and "Tensor" in str(inspect.signature(f).return_annotation))]
    assert not poor, f"no equation or no paper with its year: {', '.join(poor)}"


@pytest.mark.parametrize("module", [m for m in MODULES if FLOORS[m] == 1 and not m.startswith("testing.")])
def test_optional_tensors_and_numbers_are_keywords(module):
    "By position they could be given in each other's place. Coefficients and schedules have nothing but numbers."
    for name, f in public(module):
        given = [p for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if inspect.isclass(f) or not any("Tensor" in str(p.annotation) for p in given): continue
        assert not [p.name for p in given if p.default is not p.empty or p.annotation in (int, float, bool, str)], name


def test_the_namespace_is_flat():
    "A name lives in one module, and all that the package lists is there, lazy or not."
    lib, home = importlib.import_module("rlblocks"), {}
    for module in MODULES:
        for name in importlib.import_module(f"rlblocks.{module}").__all__:
            assert name not in home, f"{name} is exported by {home[name]} and by {module}"
            home[name] = module
    assert not set(lib.__all__) & set(ROOMS), "a name of the package hides a room"
    for name in lib.__all__:
        assert getattr(lib, name) is getattr(importlib.import_module(f"rlblocks.{home[name]}"), name)


# what modules share with each other or show in their notebooks, and `from rlblocks import …` does not offer
INSIDE = dict(
    masked={"LOG_ZERO"}, columns={"HasColumns", "check_tokenizer", "listed", "whole_number", "widen"},
    renderers={"Message", "Parsed", "Rendered", "message_of", "next_ids"}, # of environments
    formats={"FORMATS", "Format", "as_chat", "recognised", "standard"}, # `load_rows` applies them
    prompts={"encode", "prompt_ids", "render"}, demonstrations={"segments"},
    packing={"common_prefix"}, # `shared_prefix` unchecked
    stepwise={"last_tokens"},
    ragged={"ragged"}, # would hide its module
)


@pytest.mark.parametrize("module", [m for m in MODULES if FLOORS[m] <= 2])
def test_every_block_is_in_the_package(module):
    absent = set(importlib.import_module(f"rlblocks.{module}").__all__) - set(
        importlib.import_module("rlblocks").__all__)
    assert absent == INSIDE.get(module.split(".")[1], set()), (
        f"in rlblocks.{module}, not in rlblocks: {', '.join(sorted(absent))}; name it in __init__, or say in "
        "INSIDE why not")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "The library as its notebooks would make it now."
    pytest.importorskip("nbdev")
    there = tmp_path_factory.mktemp("export")
    for name in ("pyproject.toml", "settings.ini", "README.md"): shutil.copy(ROOT/name, there)
    for name in ("nbs", "tutorials", "rlblocks"):
        shutil.copytree(ROOT/name, there/name, ignore=shutil.ignore_patterns("__pycache__", "_proc"))
    for module in MODULES: (there/"rlblocks"/f"{module.replace('.', '/')}.py").unlink()
    for more in ([], ["--path", "tutorials"]):
        run = subprocess.run([Path(sys.executable).with_name("nbdev-export"), *more], cwd=there, capture_output=True,
                             text=True)
        assert run.returncode == 0, run.stderr
    return there/"rlblocks"


def test_library_is_what_the_notebooks_say(exported):
    read = lambda root: {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in root.glob("*/*.py")}
    here, there = read(ROOT/"rlblocks"), read(exported)
    stale = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    assert there and not stale, f"not what the notebooks export (make export): {', '.join(stale)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_clean(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert set(nb["metadata"]) <= {"kernelspec", "language_info"}
    assert set(nb["metadata"].get("language_info", {})) <= {"name"}
    for i, cell in enumerate(nb["cells"]):
        where = f"cell {i}: {''.join(cell['source'])[:50]!r}"
        assert not cell["metadata"], f"{where} has metadata"
        if cell["cell_type"] != "code": continue
        assert cell["execution_count"] is None and ''.join(
            cell["source"]).strip(), f"{where} has an execution count or nothing in it"
        for out in cell["outputs"]:
            kept = {"image/png"}        # the size of a picture
            assert out["output_type"] != "error" and out.get("execution_count") is None and set(
                out.get("metadata", {})) <= kept, f"{where} has an output to clean"
            said = "".join(out.get("text", ""))
            assert out.get("name") != "stderr" and "[WARNING]" not in said, f"{where} left a warning: {said[:80]}"


def test_notebooks_begin_with_a_title():
    for path in NOTEBOOKS:
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        assert re.match(r"# .+\n+> .+", first), f"{path.name} begins with {first[:40]!r}"


def test_jupyter_saves_notebooks_as_they_are_kept():
    "One that was opened, run and saved without a change is the same file."
    import nbformat
    config = types.SimpleNamespace(ContentsManager=types.SimpleNamespace())
    exec((ROOT/"jupyter_server_config.py").read_text(encoding="utf-8"), dict(c=config))
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        nb = nbformat.reads(text, as_version=4)
        nb.metadata.language_info = dict(name="python", version="3.99.9")
        for i, cell in enumerate(nb.cells):
            cell.metadata.trusted = True
            if cell.cell_type == "code": cell.execution_count = i
        config.ContentsManager.pre_save_hook(dict(type="notebook", content=nb), f"{path.relative_to(ROOT)}")
        assert nbformat.writes(nb) + "\n" == text, f"Jupyter would change {path.name}"


def test_help_of_a_notebook_shows_definitions_once_rlblocks_is_imported():
    code = "import rlblocks; print(get_ipython().inspector.mime_hooks['text/plain'].__name__)"
    words = [sys.executable, "-m", "IPython", "--no-banner", "-c", code]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.split()[-1:] == ["help_text"], said.stdout + said.stderr


@pytest.mark.skipif(not (ROOT/".venv/browser/bin/python").exists(), reason="make browser: there is no Jupyter")
def test_jupyter_takes_that_configuration_as_make_lab_gives_it():
    flags = re.search(r"jupyter lab (--config=\S+)", (ROOT/"Makefile").read_text(encoding="utf-8"))[1]
    code = (f"from jupyter_server.serverapp import ServerApp; app = ServerApp(); words = [{flags!r}, '--allow-root']; "
            "app.initialize(words, find_extensions=False, new_httpserver=False); "
            "print(app.contents_manager.pre_save_hook.__name__)")
    said = subprocess.run([ROOT/".venv/browser/bin/python", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.split()[-1:] == ["clean"], said.stderr


def test_readme_is_what_the_index_says():
    assert (ROOT/"README.md").read_text(encoding="utf-8") == script("make_readme").render(
        ROOT/"nbs/index.ipynb"), "README.md is stale: make readme"


def links(text, folder):
    "Addresses of files in Markdown, as paths from `folder`."
    return [folder/m for m in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text) if "/" in m or re.search(r"\.\w+$", m)]


@pytest.mark.parametrize("path", [*NOTEBOOKS, *(ROOT/name for name in MARKDOWN)], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    "nbs/index.ipynb is the README, and its links are the README's."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    lost = [str(x) for x in links(text, ROOT if path.name == "index.ipynb" else path.parent) if not x.exists()]
    assert not lost, f"nothing is there: {', '.join(lost)}"


# -- code in prose

PROSE = [*sorted(ROOT.glob("nbs/*.ipynb")), *(ROOT/name for name in MARKDOWN)]
OBJECTS = dict(policy="Policy", ref="Policy", teacher="Policy", student="Policy", lora_policy="Policy", critic="Critic",
               rollout="Rollout", grader="Grader", batch="Batch", b="Batch", mini="Batch", buffer="Buffer",
               flight="Flight", pool="RayPool", at="Endpoint", data="Prompts")


def prose(path):
    "The text of a page, and the code that it runs."
    if path.suffix == ".md": return path.read_text(encoding="utf-8"), ""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    kinds = [[("".join(c["source"])) for c in cells if c["cell_type"] == kind] for kind in ("markdown", "code")]
    return "\n".join(kinds[0]), re.sub(r"(?m)^\s*[%!].*$", "pass", "\n".join(kinds[1]))


def parsed(code):
    "Code of a fragment, where … stands for what is left out; None for what is no Python."
    for shown in (code.replace("…, ", "").replace(", …", "").replace("…", ""), code.replace("…", "etc")):
        try: return ast.parse(textwrap.dedent(shown))
        except SyntaxError: pass
    return None


def fragments(text):
    "(tree, whether it is a block) of the Python blocks in a text, and of the calls between backticks."
    for code in re.findall(r"(?ms)^ *```python\n(.*?)^ *```", text):
        tree = parsed(code)
        assert tree, f"no Python: {code[:200]}"
        yield tree, True
    for code in re.findall(r"`([^`\n]+\([^`\n]*\)[^`\n]*)`", re.sub(r"(?ms)^ *```.*?^ *```", "", text)):
        if tree := parsed(code): yield tree, False


def takes(f, call):
    "Keywords of a call that a function does not have."
    parameters = inspect.signature(f).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters): return []
    return sorted({k.arg for k in call.keywords if k.arg} - {p.name for p in parameters})


def unknown(tree, lib, own=()):
    """What a fragment takes from rlblocks and is not there: names that it imports, functions that it calls (but `own`
    ones), methods of the objects whose names say what they are, and keywords of all of these."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "rlblocks"]
    yield from (a.name for n in imports for a in n.names if not hasattr(lib, a.name))
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        f, thing = call.func, None
        if isinstance(f, ast.Name) and f.id not in own:
            thing = getattr(lib, f.id, None)
            if inspect.ismodule(thing): thing = None        # a value of the reader's: `data`, `checkpoint`
            elif thing is None and not hasattr(builtins, f.id): yield f.id
        if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id in OBJECTS:
            thing = getattr(getattr(lib, OBJECTS[f.value.id]), f.attr, None)
            if thing is None: yield ast.unparse(f)
        if thing is not None: yield from (f"{ast.unparse(f)}({k}=…)" for k in takes(thing, call))


def names(tree):
    "What a fragment defines or imports."
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef): yield n.name
        elif isinstance(n, ast.alias): yield (n.asname or n.name).partition(".")[0]
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): yield n.id
        elif isinstance(n, ast.arg): yield n.arg


# of the reader, of another library or of our tests; `rlblocks` has no such names
THEIRS = {"loss", "head", "grpo", "partial", "get_repetition_penalty_reward", "on_ranks", "vllm_python", "GRPOTrainer",
          "compute_score",
          "supervise", "ended_by_itself"}      # the last two of `rlblocks.placement.restarts`, as is said there


@pytest.mark.parametrize("path", PROSE, ids=lambda p: p.name)
def test_code_in_prose_names_what_is_there(path):
    lib, (text, code) = importlib.import_module("rlblocks"), prose(path)
    trees = [tree for tree, _ in fragments(text)]
    own = {*THEIRS, *(n for tree in [ast.parse(code), *trees] for n in names(tree) if not hasattr(lib, n))}
    lost = sorted({x for tree in trees for x in unknown(tree, lib, own)})
    assert not lost, f"rlblocks has no {', '.join(lost)}"


def script(name):
    "A script of nbs/ as a module; they import one another."
    spec = importlib.util.spec_from_file_location(name, ROOT/f"nbs/{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT/"nbs"))
    try: spec.loader.exec_module(made)
    finally: sys.path.remove(str(ROOT/"nbs"))
    return made


@pytest.mark.parametrize("page, render", [("blocks", "render"), ("map", "render_map")])
def test_a_page_that_is_made_is_fresh(page, render):
    made = getattr(script("make_pages"), render)()
    assert (ROOT/f"nbs/{page}.ipynb").read_text(encoding="utf-8") == made, f"nbs/{page}.ipynb is stale: make readme"


def test_the_map_has_every_notebook():
    text = (ROOT/"nbs/map.ipynb").read_text(encoding="utf-8")
    own = {ROOT/"nbs/index.ipynb", ROOT/"nbs/map.ipynb"}
    assert not [p.name for p in NOTEBOOKS if p not in own and f"{p.parent.name}/{p.name})" not in text
                and f"]({p.name})" not in text]


def test_the_page_of_all_blocks_has_every_block():
    """Every function and class of floors 0 and 1 once; a paper wherever the docstring has one; links that lead
    somewhere."""
    text = "\n".join("".join(c["source"])
                     for c in json.loads((ROOT/"nbs/blocks.ipynb").read_text(encoding="utf-8"))["cells"])
    rows = re.findall(r"(?m)^\| \[`(\w+)`\]\(([^)#]+)(?:#\w+)?\)(?: \([^)]*\))? \| (.*) \| (.*) \|$", text)
    libs = [importlib.import_module(f"rlblocks.{m}") for m in MODULES if FLOORS[m] <= 1]
    blocks = {name: lib for lib in libs
              for name in lib.__all__ if inspect.isfunction(getattr(lib, name)) or inspect.isclass(getattr(lib, name))}
    assert sorted(name for name, *_ in rows) == sorted(blocks)
    for name, path, what, paper in rows:
        assert (ROOT/"nbs"/path).exists() and what, name
        years = set(re.findall(r"\b(?:19|20)\d\d\b", getattr(blocks[name], name).__doc__))
        assert set(re.findall(r"\b(?:19|20)\d\d\b",
                              re.sub(r"\(http[^)]*\)", "", paper))) == years, f"{name}: {paper!r} beside {years}"


def test_a_paper_with_two_addresses_is_not_linked():
    make = script("make_pages")
    here, there = (make.addresses("[Liu et al. 2025](http://a), [Yu et al. 2025](http://c)"),
                   make.addresses("[Liu et al. 2025, eq. 3](http://b), [code](http://x), [Shao 2024](http://s)"))
    both = {k: here.get(k, set()) | there.get(k, set()) for k in here | there}
    assert [*make.papers("x = y. Liu et al. 2025, eq. 1, and Shao 2024.", here,
                         both)] == ["[Liu et al. 2025](http://a)", "[Shao 2024](http://s)"]
    assert [*make.papers("x = y. Liu et al. 2025. Nobody 1999.", {}, both)] == ["Liu et al. 2025", "Nobody 1999"]


def test_tab_shows_what_people_want():
    "No modules, no imports of the package's own, no oracles, no plumbing; all of it can still be imported."
    import rlblocks
    shown = set(dir(rlblocks))
    assert {"ppo_loss", "gae",
            "Policy", "Batch", "check_loss", "__version__"} <= shown <= {*rlblocks.__all__, "__version__"}
    assert not shown & {*ROOMS, "gc", "sys", "import_module", "naive_gae", "Denom", "same_shape"}
    assert all(hasattr(rlblocks, name)
               for name in ("naive_gae", "naive_ppo_loss", "Denom", "Over", "Number", "Counts", "Metric", "same_shape"))
    assert rlblocks._APART <= {*rlblocks.__all__}


def test_a_name_that_is_not_there_is_answered_by_those_like_it():
    "Also by `from rlblocks import …`; rooms are still imported so, and what is like nothing has no hint."
    import rlblocks
    for code in ("from rlblocks import ppo_los", "import rlblocks; rlblocks.ppo_los"):
        with pytest.raises((ImportError, AttributeError), match="'ppo_los'.*; is ppo_loss or .* meant?"):
            exec(code, {})
    code = "from rlblocks import placement, models\nassert models.__name__ == 'rlblocks.models'"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
    assert not hasattr(rlblocks, "ppo_los") and not hasattr(rlblocks, "__path_of__")
    with pytest.raises(ImportError, match="cannot import name 'quiteelse'"): exec("from rlblocks import quiteelse", {})


def test_a_cluster_without_ray_says_what_to_install():
    "The name is there without Ray, and importing it does not import Ray."
    code = ("import sys; sys.modules['ray'] = None\nfrom rlblocks import Cluster, RayPool\n"
            "try: RayPool(2, cluster=Cluster(ready=1.))\nexcept ImportError as e: print(e)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "RayPool needs Ray: pip install -e '.[ray]'" in run.stdout, run.stderr[-2000:]


def test_what_a_message_tells_to_install_can_be_installed():
    "rlblocks is in no package index: extras are installed in the clone."
    texts = {p.name: p.read_text(encoding="utf-8") for p in (ROOT/"rlblocks").rglob("*.py")}
    settings = configparser.ConfigParser(delimiters="=")
    settings.read(ROOT/"settings.ini")
    named = {x for text in texts.values() for found in re.findall(r"'\.\[([\w,-]+)\]'", text) for x in found.split(",")}
    assert {"ray", "notebook"} <= named <= {*settings["extras"]}
    assert not [name for name, text in texts.items() if re.search(r"pip install '?rlblocks", text)]


def test_contributing_names_what_is_there():
    "Files, pieces of the file that a bracket names, rooms, and targets of the Makefile."
    text, made = (ROOT/"CONTRIBUTING.md").read_text(), (ROOT/"Makefile").read_text()
    files = re.findall(r"`((?:rlblocks|nbs|tests)/[\w/]+\.(?:py|ipynb))`", text)
    assert len(files) > 10 and not [f for f in files if not (ROOT/f).exists()]
    pairs = re.findall(r"`([\w.]+)`\s\(`((?:rlblocks|tests)/[\w/]+\.py)`\)", text)
    assert pairs and not [(x, f) for x, f in pairs if x.split(".")[-1] not in (ROOT/f).read_text()]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", text)) == {p.parent.name for p in ROOT.glob("rlblocks/*/__init__.py")}
    assert all(f"\n{target}:" in made for target in re.findall(r"`make ([\w-]+)`", text))


# -- tutorials

def code_of(path):
    return "\n".join(re.sub(r"(?m)^[%!].*$", "pass", "".join(c["source"]))
                     for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code")


def loops(tree):
    "Generator functions at the top: the loops."
    return [f
            for f in tree.body if isinstance(f, ast.FunctionDef) and any(isinstance(n, ast.Yield) for n in ast.walk(f))]


def strangers(tree, loop):
    """Names that `loop` uses and that come neither from itself, nor from builtins, nor from an import of torch or
    rlblocks."""
    lib, origin = importlib.import_module("rlblocks"), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): origin |= {(a.asname or a.name).split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [(a.asname or a.name) for a in node.names]
            if names == ["*"]:
                names = [n for n in dir(lib) if not n.startswith(
                    "_")] if node.module == "rlblocks" else importlib.import_module(node.module).__all__
            origin |= dict.fromkeys(names, node.module)
    names = [n for n in ast.walk(loop) if isinstance(n, ast.Name)]
    own = {n.id for n in names if not isinstance(n.ctx,
                                                 ast.Load)} | {a.arg for a in ast.walk(loop) if isinstance(a, ast.arg)}
    own |= {f.name for f in ast.walk(loop) if isinstance(f, ast.FunctionDef)}
    return {n.id for n in names} - own - set(dir(builtins)) - {n for n, module in origin.items()
                                                               if module.split(".")[0] in ("torch", "rlblocks",
                                                                                       "collections")}


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.name)
def test_a_tutorial_without_a_loop_of_its_own_runs_those_of_others(path):
    code = code_of(path)
    assert not loops(ast.parse(code)) and "from rlblocks.loops import " in code


def test_every_loop_can_be_imported():
    from rlblocks import loops as lib
    assert sorted(lib.__all__) == sorted(re.search(r"default_exp loops\.(\w+)", p.read_text(encoding="utf-8"))[1]
                                         for p in OWN_LOOP)
    assert all(inspect.isgeneratorfunction(getattr(lib, name)) for name in lib.__all__)


@pytest.mark.parametrize("path", OWN_LOOP, ids=lambda p: p.name)
def test_a_tutorial_is_one_loop(path):
    tree = ast.parse(code_of(path))
    found = loops(tree)
    assert len(found) == 1, f"one generator function is wanted, there are {[f.name for f in found]}"
    loop, = found
    assert not strangers(tree, loop), (
        f"{loop.name} needs {', '.join(sorted(strangers(tree, loop)))}, neither torch nor rlblocks nor its own "
        "argument")
    assert (loop.args.kwonlyargs
            and not loop.args.kwarg), f"{loop.name}: hyper-parameters are keyword arguments with defaults"
    first = next(n for n in ast.walk(loop) if isinstance(n, ast.For))
    assert "checkpoint" in ast.unparse(
        first.iter), f"{loop.name} iterates over {ast.unparse(first.iter)}, not over the checkpoint"


def test_there_are_tutorials():
    assert {f"{n}.ipynb"
            for n in ("sft", "grpo", "ppo", "reward_model", "dpo", "kto", "rlhf")} <= {p.name for p in TUTORIALS}
