"""Two pages that are made from the library and its notebooks: nbs/blocks.ipynb has all functions on tensors, by family,
and nbs/map.ipynb all notebooks, by package.

    python nbs/make_pages.py

The picture of the map is a stored output. Where its cell has changed, `nbdev-test --save` draws it anew.
"""
import ast
import json
import os
import re
import textwrap
from pathlib import Path

from make_readme import packages

ROOT = Path(__file__).resolve().parents[1]
TITLE = "# All blocks\n\n> Every function on tensors: what it does, from which paper, where it is explained"
INTRO = """Made by `nbs/make_pages.py` from the docstrings; edit those. These are the packages `arithmetic`, `signals`,
`losses`, `statistics` and `testing`; wrappers and engines are on the [map](map.ipynb). Every name is imported with
`from rlblocks import …`, or from its module where that is said. `rlblocks.<Tab>` leaves out what few people look for:
slow reference versions (`naive_…`), guards, and names that only annotations need."""
NAME = r"(?:[A-Z][\w'’\-]+ ){0,2}[A-Z][\w'’\-]+"
PAPER = re.compile(rf"({NAME}(?: et al\.|(?:, {NAME})* and {NAME})? (?:19|20)\d\d[a-z]?)\b")
LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)\s]+)\)")


PURE = ("arithmetic", "signals", "losses", "statistics", "testing")     # packages of functions on tensors
MAP = """# Map

> All notebooks, by package, in reading order

Made by `nbs/make_pages.py`. Each notebook is the source of the module of its name; numbers are the reading order.
A package imports only from packages before it: an arrow is an import, and those that follow from others are left out.
`import rlblocks` loads the packages down to `data`, which need torch, einops and jaxtyping; the others are loaded when
a name of theirs is first used."""
# where each package stands in the picture of the map: those that it imports are below it
PLACES = dict(people=(3, 10), loops=(3, 9), tracking=(5, 9), evaluation=(1, 9), placement=(3, 8), endpoint=(5, 8),
              checkpoint=(1.5, 7), environments=(5, 7), graders=(4, 6), rollout=(4, 5), samplers=(4, 4), models=(3, 3),
              losses=(1, 2), engines=(4, 2), signals=(1, 1), testing=(2.4, 1), data=(4, 1), arithmetic=(2.4, 0),
              statistics=(-.4, 2))
FRAMES = [("functions on tensors", PURE),
          ("from prompts to rewards", ("samplers", "rollout", "graders", "environments", "endpoint"))]
CELL = '''#| echo: false
import matplotlib.pyplot as plt
from diagram import diagram
from make_pages import FRAMES, PLACES

plt.style.use("rlblocks.plots")
imports = """
{}"""
diagram(PLACES, [arrow.split("→") for arrow in imports.split()], size=(7.5, 6), frames=FRAMES)'''
PAGES = ("tour your_loop commands blocks which_loss conventions sampling media agents rewards distillation layouts "
         "clusters inside guarantees learning gpu").split()


def cells_of(path):
    "(kind, text) of the cells of a notebook."
    return [(c["cell_type"], "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def notebooks():
    "(path, module, cells) of the notebooks of these packages that export a module."
    for path in (p for name in PURE for p in sorted((ROOT/"nbs"/name).glob("*.ipynb"))):
        cells = cells_of(path)
        module = next((m[1] for _, text in cells if (m := re.search(r"#\| *default_exp ([\w.]+)", text))), None)
        if module: yield path, module, cells


def exported(cells):
    "(name, docstring, cell) of the public functions and classes of a notebook, in its order."
    for i, (kind, text) in enumerate(cells):
        if kind != "code" or not re.search(r"(?m)^#\| *export\b", text): continue
        for n in ast.parse(re.sub(r"(?m)^[%!].*$", "", text)).body:
            if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_"):
                yield n.name, ast.get_docstring(n) or "", i


def sections(cells):
    "Of each cell, the section that it is in: (heading, its Markdown)."
    heading, of, text = "", [], {}
    for kind, cell in cells:
        if kind == "markdown" and (m := re.match(r"## (.+)", cell)): heading = m[1]
        if kind == "markdown": text[heading] = text.get(heading, "") + cell
        of.append(heading)
    return [(h, text.get(h, "")) for h in of]


def sentence(doc):
    "The first sentence of a docstring, as one line for a table."
    text = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-ZΑ-Ω])", text)[0].replace("|", "\\|").replace("*", "\\*")


def addresses(text):
    "{paper: the addresses it is linked to} in some Markdown."
    found = {}
    for name, url in LINK.findall(text):
        for paper in PAPER.findall(name)[:1]: found.setdefault(paper, set()).add(url)
    return found


def papers(doc, *places):
    "The papers that a docstring names, linked where the first place that knows the name has one address for it."
    for paper in dict.fromkeys(PAPER.findall(" ".join(doc.split()))):
        urls = next((urls for place in places if (urls := place.get(paper))), ())
        yield f"[{paper}]({next(iter(urls))})" if len(urls) == 1 else paper


def offered():
    "The names that `from rlblocks import …` offers."
    tree = ast.parse((ROOT/"rlblocks/__init__.py").read_text(encoding="utf-8"))
    return next(ast.literal_eval(n.value) for n in tree.body
                if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")


def table(path, module, cells, everywhere, flat):
    "One family, or nothing if its notebook exports none."
    rows, of, link = [], sections(cells), path.relative_to(ROOT/"nbs")
    for name, doc, i in exported(cells):
        heading, text = of[i]
        anchor = f"#{name.lower()}" if heading == f"`{name}`" else ""
        where = "" if name in flat else f" (`rlblocks.{module}`)"
        cited = ", ".join(papers(doc, addresses(text), everywhere))
        rows.append(f"| [`{name}`]({link}{anchor}){where} | {sentence(doc)} | {cited} |")
    return "\n".join(["| name | what it does | paper |", "|---|---|---|", *rows]) if rows else ""


def render():
    "The notebook as text."
    books, flat = list(notebooks()), set(offered())
    everywhere = addresses("\n".join(text for *_, cells in books for kind, text in cells if kind == "markdown"))
    cells = [TITLE, INTRO]
    for path, module, own in books:
        if not (rows := table(path, module, own, everywhere, flat)): continue
        title, about = next(m for kind, text in own if (m := re.match(r"# (.+)\n+> (.+)", text))).groups()
        cells += [f"## {title}\n\n{about}: [{path.stem}]({path.relative_to(ROOT/'nbs')})", rows]
    return notebook(cells)


def described(path):
    "A line of the map: a notebook's title, linked, and its subtitle."
    title, about = re.match(r"# (.+)\n+> (.+)", cells_of(path)[0][1]).groups()
    return f"* [{title}]({os.path.relpath(path, ROOT/'nbs')}): {about}"


def imports():
    "{package: the packages that its modules import}. People run loops by name, and loops import what is public."
    found = {name: set() for name in PLACES} | dict(people={"loops"}, loops={"placement"})
    for name in found:
        for path in (ROOT/"rlblocks"/name).glob("*.py"):
            modules = re.findall(r"(?m)^ *from (?:\.\.|rlblocks\.)(\w+)", path.read_text(encoding="utf-8"))
            found[name] |= {m for m in modules if m in found and m != name}
    return found


def reached(name, of):
    "What a package imports, and what that imports."
    return of[name].union(*(reached(m, of) for m in of[name]))


def picture():
    "Code that draws the packages, with an arrow to each import that is not reached through another one."
    of = imports()
    arrows = [(name, m) for name in PLACES for m in sorted(of[name])
              if not any(m in reached(other, of) for other in of[name])]
    assert all(PLACES[a][1] > PLACES[b][1] for a, b in arrows), "an import points upwards"
    words = textwrap.fill(" ".join(f"{a}→{b}" for a, b in arrows), 110, initial_indent=" "*4, subsequent_indent=" "*4)
    return CELL.format(words)


def render_map():
    "The notebook of all notebooks, as text."
    cells = [MAP, code(picture(), ROOT/"nbs/map.ipynb"),
             "\n".join(["## Pages", "", *(described(ROOT/f"nbs/{name}.ipynb") for name in PAGES)])]
    for name, holds in packages():
        books = sorted((ROOT/"nbs"/name).glob("*.ipynb"))
        cells.append("\n".join([f"## `{name}`", "", holds, "", *map(described, books)]))
    loops = sorted((ROOT/"tutorials").glob("*.ipynb"))
    return notebook([*cells, "\n".join(["## Tutorials", "", "One loop each; nothing imports them.", "",
                                        *map(described, loops)])])


def code(source, path):
    "A cell of code with the outputs that it has in the notebook at `path`."
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = next((c["outputs"] for c in stored if c["cell_type"] == "code" and "".join(c["source"]) == source), [])
    return dict(cell_type="code", execution_count=None, metadata={}, outputs=outputs, source=source)


def notebook(cells):
    "A notebook as text; a cell that is a text is Markdown."
    cells = [dict(cell_type="markdown", metadata={}, source=c) if isinstance(c, str) else c for c in cells]
    cells = [dict(sorted((c | dict(id=f"{i:08x}", source=c["source"].splitlines(keepends=True))).items()))
             for i, c in enumerate(cells)]
    metadata = dict(kernelspec=dict(display_name="python3", language="python", name="python3"))
    return json.dumps(dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5), indent=1,
                      ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (ROOT/"nbs/blocks.ipynb").write_text(render(), encoding="utf-8")
    (ROOT/"nbs/map.ipynb").write_text(render_map(), encoding="utf-8")
