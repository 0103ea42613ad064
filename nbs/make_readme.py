"""README.md from nbs/index.ipynb: its prose, its code and its stored outputs, as Markdown.

    python nbs/make_readme.py
"""
import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"benchmarks"))
import gpu  # noqa: E402
NOTE = "<!-- made from nbs/index.ipynb by nbs/make_readme.py; edit the notebook -->"


PACKAGES = ("arithmetic signals losses statistics testing data engines models samplers rollout graders environments "
            "endpoint checkpoint placement evaluation tracking people").split()


def packages():
    "(name, what it holds, in its own words) of the packages, lowest first."
    for name in PACKAGES:
        text = (ROOT/"rlblocks"/name/"__init__.py").read_text(encoding="utf-8")
        yield name, ast.get_docstring(ast.parse(text))


def table():
    "The packages as Markdown."
    return "\n".join(["| package | holds |", "|---|---|", *(f"| `{name}` | {holds} |" for name, holds in packages())])


def made(source):
    "Markdown with what is made from other files in place of its marks."
    return source.replace("<!-- packages -->", table()).replace("<!-- gpu -->", gpu.sentence(gpu.results()))


def output(out):
    "A stored output as Markdown: Markdown itself, else plain text, indented; nothing for pictures."
    data = out.get("data", {})
    if "text/markdown" in data: return "".join(data["text/markdown"]).strip()
    text = "".join(out.get("text", data.get("text/plain", ""))).rstrip()
    return "\n".join("    " + line for line in text.splitlines())


def cell(c):
    "A cell as Markdown; nothing for hidden cells. nbdev's directives (`#| …`) are left out."
    source = "".join(c["source"]).strip()
    if c["cell_type"] == "markdown": return [made(source)]
    directives = re.findall(r"^#\| *(.*)$", source, re.M)
    if any(d.startswith(("hide", "default_exp")) for d in directives): return []
    code = re.sub(r"^#\| *.*\n?", "", source, flags=re.M).strip()
    return [f"```python\n{code}\n```", *(output(o) for o in c.get("outputs", []))]


def render(notebook):
    "The whole README."
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join([NOTE, *(part for c in cells for part in cell(c) if part)]) + "\n"


if __name__ == "__main__": (ROOT/"README.md").write_text(render(ROOT/"nbs/index.ipynb"), encoding="utf-8")
