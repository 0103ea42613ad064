"The site: every page has its place and its twin, and every link leads somewhere, before Sphinx and after it."
import importlib.util
import json
import os
import re
import subprocess
from html.parser import HTMLParser
from posixpath import dirname, normpath
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

SPHINX = ROOT/".venv/docs/bin/sphinx-build"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("docs_make", ROOT/"docs/make.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def tree(make): return make.tree()


def test_every_link_leads_to_a_page_a_file_or_a_heading(make, tree):
    lost = sorted({f"{page}: {link}" for page, link in make.dead(*tree)})
    assert not lost, f"nothing is there: {'; '.join(lost)}"


@pytest.mark.parametrize("link, lost", [
    ("b.md", False), ("b.md#of-b", False), ("#here", False), ("nbs/c.ipynb", False), ("https://a.b", False),
    ("b.md#gone", True), ("gone.md", True), ("#gone", True)])
def test_a_dead_link_is_found(make, link, lost):
    texts = {"a.md": f"# A\n\n## Here\n\n[x]({link})", "b.md": "# B\n\n## Of `b`", "nbs/c.ipynb": '{"cells": []}'}
    assert bool([*make.dead(texts, {})]) == lost


def test_every_page_is_in_the_sidebar_once_has_a_twin_and_is_listed_for_assistants(make, tree):
    texts, files = tree
    blocks = "\n".join(re.findall(r"(?s)```\{toctree\}\n(.*?)```", texts["index.md"]))
    names = [x.rpartition("<")[2].rstrip(">") for x in blocks.split() if not x.startswith(":")]
    for name in texts:
        for inner in re.findall(r"(?s)```\{toctree\}\n(.*?)```", texts[name]) if name != "index.md" else ():
            names += [normpath(f"{dirname(name)}/{x}") for x in inner.split() if not x.startswith(":")]
    pages = {name.rpartition(".")[0] for name in texts} - {"index"}
    names = [x for x in names if x in pages]
    assert sorted(names) == sorted(pages)
    assert {f"_extra/{name}.md" for name in pages} <= {*files}
    listed = re.findall(r"\]\(([^)]+)\.md\)", files["_extra/llms.txt"].decode())
    assert sorted(listed) == sorted(pages)


def test_hidden_cells_and_directives_are_not_shown(tree):
    texts, hidden = tree[0], 0
    for name in (x for x in texts if x.endswith(".ipynb")):
        shown = {"".join(c["source"]).strip() for c in json.loads(texts[name])["cells"]}
        assert not any(re.match(r"#\s*\|", x) for x in shown), name
        for cell in json.loads((ROOT/name).read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or not re.match(r"#\s*\| *hide", source): continue
            hidden += 1
            assert source.partition("\n")[2].strip() not in shown, f"{name} shows {source[:80]!r}"
    assert hidden > 100


def test_the_api_has_every_public_name_with_its_parameters(tree):
    import rlblocks
    from signatures import FILE
    texts, _ = tree
    headings = {m for name, text in texts.items() if name.startswith("docs/api/")
                for m in re.findall(r"(?m)^#{3,4} `([\w.]+)`$", text)}
    callables = {line.partition("(")[0] for line in FILE.read_text(encoding="utf-8").splitlines() if "(" in line}
    assert callables & {*rlblocks.__all__} <= headings
    assert {"Batch.parts", "Policy.step", "Buffer.take"} <= headings


class Links(HTMLParser):
    "The addresses of a page, the anchors in it, and what it loads when it is shown."
    def __init__(self):
        super().__init__()
        self.links, self.ids, self.loads = [], set(), []

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if "id" in a: self.ids.add(a["id"])
        if tag == "a" and a.get("href"): self.links.append(a["href"])
        if tag == "link" and a.get("href"): self.loads.append(a["href"])
        if a.get("src"): self.loads.append(a["src"])


@pytest.mark.long
@pytest.mark.skipif(not SPHINX.exists(), reason="make .venv/.docs makes Sphinx's environment")
def test_sphinx_has_no_warning_and_no_page_a_dead_link_or_asks_another_host(make, tmp_path):
    make.write(tmp_path/"pages")
    run = subprocess.run([SPHINX, "-q", "-W", "--keep-going", "-b", "html", "-c", ROOT/"docs", tmp_path/"pages",
                          tmp_path/"site"], capture_output=True, text=True, env=os.environ | dict(TZ="UTC"))
    assert not run.returncode, run.stderr[-3000:]
    site, pages = tmp_path/"site", {}
    for path in site.rglob("*.html"):
        pages[path.relative_to(site).as_posix()] = p = Links()
        p.feed(path.read_text(encoding="utf-8"))
    there, lost = {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}, []
    assert len(pages) > 200
    for page, p in pages.items():
        outside = [x for x in p.loads if urlsplit(x).netloc]
        assert not outside, f"{page} loads {outside}"
        for link in {*p.links, *p.loads}:
            if urlsplit(link).scheme or urlsplit(link).netloc: continue
            path, _, anchor = link.partition("#")
            target = normpath(f"{dirname(page)}/{unquote(path.partition('?')[0])}").lstrip("/") if path else page
            ids = pages[target].ids if target in pages else None
            if target not in there or (anchor and ids is not None and unquote(anchor) not in ids):
                lost.append(f"{page}: {link}")
    assert not lost, f"{len(lost)} dead links: {'; '.join(lost[:20])}"
