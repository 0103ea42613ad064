"""README.md from nbs/index.ipynb: its prose, its code and its stored outputs, as Markdown.

    python nbs/make_readme.py
"""
import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- made from nbs/index.ipynb by nbs/make_readme.py; edit the notebook -->"


ROOMS = ("arithmetic signals losses testing data engines models samplers rollout graders environments endpoint "
         "checkpoint placement people").split()


def rooms():
    "A table of the rooms, lowest first: what each holds, in its package's words, and its notebooks."
    lines = ["| room | holds | notebooks |", "|---|---|---|"]
    for room in ROOMS:
        holds = ast.get_docstring(ast.parse((ROOT/"rlblocks"/room/"__init__.py").read_text(encoding="utf-8")))
        books = sorted((ROOT/"nbs"/room).glob("*.ipynb"))
        names = [path.stem.split("_", 1)[1].replace("_", " ") for path in books]
        links = " · ".join(f"[{name}](nbs/{room}/{path.name})" for name, path in zip(names, books, strict=True))
        lines.append(f"| `{room}` | {holds} | {links} |")
    return "\n".join(lines)


def output(out):
    "A stored output as Markdown: Markdown itself, else plain text, indented; nothing for pictures."
    data = out.get("data", {})
    if "text/markdown" in data: return "".join(data["text/markdown"]).strip()
    text = "".join(out.get("text", data.get("text/plain", ""))).rstrip()
    return "\n".join("    " + line for line in text.splitlines())


def cell(c):
    "A cell as Markdown; nothing for hidden cells. nbdev's directives (`#| …`) are left out."
    source = "".join(c["source"]).strip()
    if c["cell_type"] == "markdown": return [source.replace("<!-- rooms -->", rooms())]
    directives = re.findall(r"^#\| *(.*)$", source, re.M)
    if any(d.startswith(("hide", "default_exp")) for d in directives): return []
    code = re.sub(r"^#\| *.*\n?", "", source, flags=re.M).strip()
    return [f"```python\n{code}\n```", *(output(o) for o in c.get("outputs", []))]


def render(notebook):
    "The whole README."
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join([NOTE, *(part for c in cells for part in cell(c) if part)]) + "\n"


if __name__ == "__main__": (ROOT/"README.md").write_text(render(ROOT/"nbs/index.ipynb"), encoding="utf-8")
