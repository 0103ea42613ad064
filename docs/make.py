"""The source tree of the site, for Sphinx: notebooks with their stored outputs, Markdown, and the pages that are made
from them and from the library. Nothing is run, and only the standard library is needed.

    python docs/make.py build/pages

The tree has the folders of the repository, so that the links between notebooks hold in both. `_extra/` holds what the
site takes over as it is: a Markdown twin of each page, and llms.txt, which lists them."""
import ast
import base64
import json
import re
import shutil
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"nbs"))
import make_pages as pages  # noqa: E402
import make_readme as readme  # noqa: E402

TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "benchmarks/README.md",
         "docs/coming_from.md", "docs/troubleshooting.md")
FILES = ("LICENSE", "tutorials/configs/rlhf.yaml", "docs/learning.png")     # what pages link to and show
START = ("nbs/tour Overview<README> nbs/your_loop docs/gallery nbs/which_loss docs/algorithms docs/coming_from "
         "docs/troubleshooting")
GUIDES = ("nbs/commands nbs/rewards nbs/sampling nbs/agents nbs/media nbs/distillation nbs/layouts nbs/clusters "
          "nbs/conventions nbs/inside nbs/guarantees")
PROJECT = "nbs/map nbs/blocks benchmarks/README nbs/learning nbs/gpu CONTRIBUTING AGENTS CHANGELOG"
ALGORITHMS = ("arithmetic", "signals", "losses", "statistics")
DIRECTIVE = re.compile(r"#\s*\|\s*(.*)")
LINK = re.compile(r"\]\(([^)\s:#]*)(#[^)\s]*)?\)")


# -- notebooks

def directives(source):
    "(nbdev's directives at the top of a cell, the code below them)."
    lines, found = source.splitlines(), []
    while lines and (m := DIRECTIVE.fullmatch(lines[0].strip())):
        found.append(m[1].replace(" ", ""))
        del lines[0]
    return found, "\n".join(lines).strip("\n")


def shown(cell):
    "A cell as its reader sees it, or None: hidden cells go, and the input of `#| echo: false`."
    if cell["cell_type"] != "code": return cell
    found, source = directives("".join(cell["source"]))
    if not source or any(d.startswith(("hide", "default_exp")) for d in found): return None
    tags = dict(tags=["remove-input"]) if "echo:false" in found else {}
    return cell | dict(source=source.splitlines(keepends=True), metadata=tags)


def prepared(nb):
    "A notebook without what only nbdev reads."
    return nb | dict(cells=[c for cell in nb["cells"] if (c := shown(cell))],
                     metadata=nb["metadata"] | dict(language_info=dict(name="python", pygments_lexer="ipython3")))


def titled(text):
    "(title, subtitle) of a page; the subtitle is the quote below the title, or the first sentence."
    text = re.sub(r"(?s)<!--.*?-->|^---\n.*?\n---\n", "", text)
    title = re.search(r"(?m)^# (.+)", text)[1]
    quote = re.search(r"(?m)^> (.+(?:\n> .+)*)", text) or re.search(r"(?m)^(?![#>|`:\s])(.+(?:\n.+)*)", text)
    about = " ".join(re.sub(r"(?m)^> ", "", quote[1]).split()) if quote else ""
    return title, re.split(r"(?<=\.) (?=[A-Z])", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", about))[0]


def slug(heading):
    "The anchor that MyST and GitHub give a heading."
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# -- pages that are made

def toctree(caption, names):
    "A table of contents that only the sidebar shows."
    title = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *title, "", *names, "```", ""])


def index(tutorials):
    "The start page: docs/index.md, moved to the top of the tree, and the sidebar of the site."
    text = (ROOT/"docs/index.md").read_text(encoding="utf-8")
    text = LINK.sub(lambda m: f"]({normpath(f'docs/{m[1]}')}{m[2] or ''})", text)
    trees = {"Start": START.split(), "Guides": GUIDES.split(), "Tutorials": tutorials,
             "Packages": [f"docs/api/{name}" for name in readme.PACKAGES], "Project": PROJECT.split()}
    return text + "\n" + "\n".join(toctree(*tree) for tree in trees.items())


def gallery(books):
    "(text, {file: picture}): the first picture of each notebook that has one, by folder."
    files, sections = {}, {}
    for path, nb in books.items():
        found = (o["data"]["image/png"] for c in nb["cells"] if c["cell_type"] == "code" for o in c["outputs"]
                 if "image/png" in o.get("data", {}))
        if not (png := next(found, None)): continue
        name = f"docs/pictures/{path.removesuffix('.ipynb').replace('/', '-')}.png"
        files[name] = base64.b64decode("".join(png))
        title, about = titled("".join(nb["cells"][0]["source"]))
        link = relpath(path, "docs")
        folder = dirname(path).removeprefix("nbs").strip("/") or "guides"
        sections.setdefault(folder, []).append(
            f":::{{container}} card\n[![{title}]({relpath(name, 'docs')})]({link})\n\n"
            f"[**{title}**]({link})\n\n{about}\n:::\n")
    order = sorted(sections, key=["tutorials", "guides", *readme.PACKAGES].index)
    text = ["# Gallery\n\n> What the notebooks draw: a picture each, and the code behind it\n",
            "Each picture is a stored output. It links to the notebook whose code draws it.\n"]
    for folder in order:
        text += [f"## {folder.capitalize()}\n", "::::{container} gallery\n", *sections[folder], "::::\n"]
    return "\n".join(text), files


def equation(name, heading, text, doc):
    "The displayed equation of a block's lesson, or the sentence of its docstring that has one."
    if heading == f"`{name}`" and (m := re.search(r"\$\$(.+?)\$\$", text, re.S)):
        return f"$$\n{m[1].strip().rstrip('.,;')}\n$$"
    rest = " ".join(" ".join(doc.split("\n\n")[1:]).split())
    said = next((s for s in re.split(r"(?<=\.) (?=[A-ZΑ-Ω])", rest) if re.search("[=≤≥∈∑Σ∝√]", s)), "")
    return f":::{{container}} equation\n{escaped(said)}\n:::" if said else ""


def algorithms(offered):
    "Every estimator, loss and statistic: equation, paper, function, lesson."
    books = list(pages.notebooks())
    everywhere = pages.addresses("\n".join(t for *_, cells in books for kind, t in cells if kind == "markdown"))
    text = ["# Algorithms\n\n> Estimators, losses and statistics: equation, paper, function and lesson of each\n",
            "Made from the notebooks and the docstrings. A function takes and returns tensors and fits any loop. To "
            "choose between them, [which loss for what](../nbs/which_loss.ipynb) begins with the data that there is.\n"]
    for path, module, cells in books:
        package, where = module.split(".")[0], f"../{path.relative_to(ROOT).as_posix()}"
        if package not in ALGORITHMS: continue
        entries, of = [], pages.sections(cells)
        for name, doc, i in pages.exported(cells):
            heading, lesson = of[i]
            papers = ", ".join(pages.papers(doc, pages.addresses(lesson), everywhere))
            if not papers: continue                 # guards and pieces; docs/api has them
            links = f"[Lesson]({where}#{slug(heading)})"
            if name in offered: links += f" · [parameters](api/{package}.md#{slug(name)})"
            entries += [f"### `{name}`\n", escaped(" ".join(doc.split("\n\n")[0].split())), "",
                        equation(name, heading, lesson, doc), "", f"{papers} · {links}\n"]
        if entries:
            title, about = titled(cells[0][1])
            text += [f"## {title}\n", f"{about}.\n", *entries]
    return "\n".join(text)


# -- API

def escaped(text):
    "Plain text of a docstring as Markdown: only what stands between backticks is markup."
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if i % 2 else re.sub(r"([\\*_$<>\[\]#|~^`])", r"\\\1", p) for i, p in enumerate(parts))


def prose(doc):
    "A docstring as Markdown; indented lines, examples and lists keep their lines."
    for part in re.split(r"\n\s*\n", doc.strip()):
        if re.search(r"(?m)^( {2,}|>>> |\* |- )", part): yield f"```text\n{part}\n```\n"
        else: yield escaped(" ".join(part.split())) + "\n"


def definitions():
    "{name: (node, lines of its file)} of all functions and classes at the top of modules."
    found = {}
    for path in sorted(ROOT.glob("rlblocks/*/*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for n in ast.parse("\n".join(lines)).body:
            if isinstance(n, ast.FunctionDef | ast.ClassDef): found.setdefault(n.name, (n, lines))
    return found


def signature(node, lines):
    "A function as it stands in the source, down to its docstring: each parameter with its comment."
    end = node.body[0].lineno - 1
    text = "\n".join(lines[node.lineno-1:end]) if end >= node.lineno else lines[node.lineno-1]
    if end < node.lineno: text = text[:node.body[0].col_offset].rstrip()         # its body is on the same line
    return re.sub(r"(?m)^" + " "*node.col_offset, "", text).rstrip()


def members(node, lines, known):
    """(name, node, lines) of the public methods of a class: those of its bases, its own, and functions that it takes in
    (`parts, cut = parts, cut`); for a property in one line, its docstring in the node's place."""
    found = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= {name: rest for name, *rest in members(*known[base.id], known)}
    for n in node.body:
        if isinstance(n, ast.FunctionDef): found[n.name] = [n, lines]
        if not isinstance(n, ast.Assign): continue
        left, right = n.targets[0], n.value
        several = isinstance(left, ast.Tuple)
        for target, value in zip(left.elts, right.elts, strict=True) if several else [(left, right)]:
            doc = next((k.value.value for k in getattr(value, "keywords", ()) if k.arg == "doc"), None)
            if doc: found[target.id] = [doc, lines]
            for x in (value, *getattr(value, "args", ())):
                if isinstance(x, ast.Name) and x.id in known: found[target.id] = list(known[x.id])
    return [(name, *rest) for name, rest in found.items() if not name.startswith("_")]


def code_of(node, lines, name):
    "The signature of a function, or of a class: that of `__init__`, or its fields."
    if isinstance(node, ast.FunctionDef): return signature(node, lines)
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init: return re.sub(r"^def __init__\(self(, /)?,? ?", f"{name}(", signature(init, lines)).rstrip(":")
    fields = [lines[n.lineno-1].strip() for n in node.body if isinstance(n, ast.AnnAssign)]
    return "\n    ".join([f"class {name}:", *fields])


def entry(node, lines, name, known, lesson):
    "A function or class: heading, signature, docstring, lesson; of a class, its public methods below."
    yield f"### `{name}`\n\n```python\n{code_of(node, lines, name)}\n```\n"
    yield from prose(ast.get_docstring(node) or "")
    yield lesson + "\n"
    if not isinstance(node, ast.ClassDef): return
    for method, inner, text in members(node, lines, known):
        yield f"#### `{name}.{method}`\n"
        if isinstance(inner, str): yield escaped(inner) + "\n"
        else:
            yield f"```python\n{signature(inner, text)}\n```\n"
            yield from prose(ast.get_docstring(inner) or "")


def module_entries(module, path, cells, offered, known):
    """The API of one module: the names that `from rlblocks import …` offers, in the order of the source, and a line of
    the others."""
    lines = (ROOT/f"rlblocks/{module.replace('.', '/')}.py").read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    public = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
                  and ast.unparse(n.targets[0]) == "__all__")
    of = pages.sections(cells)
    heading = {name: of[i][0] for name, _, i in pages.exported(cells)}
    title, about = titled(cells[0][1])
    lesson, seen = f"../../{path.relative_to(ROOT).as_posix()}", set()
    yield f"## {title}\n\n{about}. Lesson: [{path.stem}]({lesson}).\n"
    for node in tree.body:
        name = getattr(node, "name", None)
        if name not in public or name not in offered or name in seen: continue
        if any("overload" in ast.unparse(d) for d in node.decorator_list): continue
        seen.add(name)
        anchor = f"#{slug(heading[name])}" if heading.get(name) else ""
        yield from entry(node, lines, name, known, f"[Lesson]({lesson}{anchor})")
    if rest := [f"`{name}`" for name in public if name not in offered]:
        yield f"In `rlblocks.{module}`, for those who read on: {', '.join(rest)}.\n"


def api(package, holds, offered, known):
    "The page of a package: its lessons, and every public name with its parameters, shapes and units."
    text, names = [f"# {package}\n\n> {holds}\n"], []
    for path in sorted((ROOT/"nbs"/package).glob("*.ipynb")):
        cells = pages.cells_of(path)
        names.append(f"../../{path.relative_to(ROOT).with_suffix('').as_posix()}")
        module = next((m[1] for _, t in cells if (m := re.search(r"#\| *default_exp ([\w.]+)", t))), None)
        if module: text += module_entries(module, path, cells, offered, known)
    return "\n".join([text[0], toctree("", names), *text[1:]])


# -- twins

def twin(path, text):
    "A page as plain Markdown, with its stored outputs; its links lead to other twins."
    if path.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n\n".join(part for c in cells for part in readme.cell(c) if part) + "\n"
    text = re.sub(r"(?ms)^```\{toctree\}.*?^```\n|^:{3,}.*?$\n?", "", text)
    return LINK.sub(lambda m: f"]({m[1].replace('.ipynb', '.md')}{m[2] or ''})", text)


def llms(texts):
    "llms.txt: every page in the order of the sidebar, with its subtitle."
    lines = ["# rlblocks", "", "> " + titled(texts["README.md"])[1], "",
             "Each page of the site has a Markdown twin, `.md` in the place of `.html`. This file lists them."]
    names = re.findall(r"(?s):caption: (\w+)\n\n(.*?)```", texts["index.md"])
    for caption, block in names:
        lines += ["", f"## {caption}", ""]
        for name in block.split():
            name = name.rpartition("<")[2].rstrip(">")
            lessons = f"nbs/{name.removeprefix('docs/api/')}/"
            lines += [line(texts, name), *(line(texts, n.rpartition(".")[0]) for n in texts if n.startswith(lessons))]
    return "\n".join(lines) + "\n"


def line(texts, name):
    "A line of llms.txt."
    path = next(f"{name}{end}" for end in (".md", ".ipynb") if f"{name}{end}" in texts)
    title, about = titled(twin(path, texts[path]))
    return f"- [{title}]({name}.md): {about}"


# -- the tree

def tree():
    "({page: text}, {file: bytes}) of the whole tree."
    paths = [p for folder in ("nbs", "nbs/*", "tutorials") for p in sorted(ROOT.glob(f"{folder}/*.ipynb"))]
    books = {p.relative_to(ROOT).as_posix(): json.loads(p.read_text(encoding="utf-8")) for p in paths
             if p != ROOT/"nbs/index.ipynb"}            # it is README.md
    offered, known = set(pages.offered()), definitions()
    texts = {name: json.dumps(prepared(nb), ensure_ascii=False) for name, nb in books.items()}
    texts |= {name: (ROOT/name).read_text(encoding="utf-8") for name in TEXTS}
    texts |= {f"docs/api/{name}.md": api(name, holds, offered, known) for name, holds in readme.packages()}
    texts["docs/algorithms.md"] = algorithms(offered)
    texts["docs/gallery.md"], files = gallery(books)
    texts["index.md"] = index([name.removesuffix(".ipynb") for name in books if name.startswith("tutorials/")])
    files |= {name: (ROOT/name).read_bytes() for name in FILES}
    for name, text in texts.items():
        files[f"_extra/{name.rpartition('.')[0]}.md"] = twin(name, text).encode()
    files["_extra/llms.txt"] = llms(texts).encode()
    return texts, files


def markdown(path, text):
    "The Markdown of a page, without code."
    if path.endswith(".ipynb"):
        text = "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    return re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`(?!\])", lambda m: m[0] if m[0].count("\n") == 0 else "", text)


def anchors(text):
    "The anchors of a page's headings."
    return {slug(m[1]) for m in re.finditer(r"(?m)^#{1,5} (.+)", text)}


def dead(texts, files):
    "(page, link) of the links to pages, files and headings that the tree does not have."
    bodies = {name: markdown(name, text) for name, text in texts.items()}
    headings = {name: anchors(body) for name, body in bodies.items()}
    for name, body in bodies.items():
        for m in LINK.finditer(re.sub(r"`[^`\n]*\]\([^`\n]*`", "", body)):
            if not m[1] and not m[2]: continue
            target = normpath(f"{dirname(name)}/{unquote(m[1])}").lstrip("/") if m[1] else name
            if target not in texts and target not in files: yield name, m[0]
            elif m[2] and m[2][1:] not in headings.get(target, ()): yield name, m[0]


def write(out):
    "The tree as a folder, which is made anew."
    texts, files = tree()
    if lost := sorted(set(dead(texts, files))):
        raise SystemExit("docs/make.py: nothing is there: " + "; ".join(f"{page}: {link}" for page, link in lost))
    shutil.rmtree(out, ignore_errors=True)
    for name, content in [*((n, t.encode()) for n, t in texts.items()), *files.items()]:
        (out/name).parent.mkdir(parents=True, exist_ok=True)
        (out/name).write_bytes(content)
    print(f"{len(texts)} pages in {out}")


if __name__ == "__main__": write(Path(sys.argv[1]))
