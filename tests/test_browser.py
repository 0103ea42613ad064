"""`watch` in JupyterLab and Notebook under Chromium: what a person does with the mouse.

`make browser` has the server; the kernel is this environment. Screenshots are kept in pytest's folder. With
BROWSER_KERNEL=python another kernel runs: an environment with another ipykernel and this one's packages."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT

SERVER = Path(os.environ.get("BROWSER_SERVER", ROOT/".venv/browser"))
KERNEL = os.environ.get("BROWSER_KERNEL", sys.executable)
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
if not (SERVER/"bin/jupyter-lab").exists():
    pytest.skip("JupyterLab and playwright are not there: make browser", allow_module_level=True)
if not CHROMIUM: pytest.skip("there is no Chromium on PATH: make browser says how to get it", allow_module_level=True)
sys.path += map(str, SERVER.glob("lib/python3.*/site-packages"))      # playwright; what is here too comes first
sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

CELLS = ['''
import time
from rlblocks import Mean, watch
def loop(steps=400, kl_coef=.02, seconds=.1):
    def loss(out, b): return kl_coef, {}
    for step in range(steps):
        time.sleep(seconds)
        yield dict(step=step, reward=1 - .98**step, kl=Mean(kl_coef*step, 1), length=20 + step % 7, clip_frac=.1,
                   grad_norm=1/(1 + step), seconds_rollout=.06 + .01*(step % 3), seconds_step=.04, lr=1e-3,
                   used=loss(0, 0)[0])''', '''
w = watch(loop(), sliders=dict(kl_coef=(0, .2)))
for m in w: pass''', '''
for m in w: pass''', '''
async for m in w: pass''', '''
import json
print("SAID", json.dumps([[m["step"] for m in w.rows] == list(range(len(w.rows))), len(w.rows), w.marks,
                          [m["used"] for m in w.rows], [m["kl_coef"] for m in w.rows]]))''']


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "(address, folder) of a JupyterLab and Notebook whose kernel is this environment."
    folder = tmp_path_factory.mktemp("jupyter")
    spec = folder/"share/kernels/here"
    spec.mkdir(parents=True)
    env = dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    (spec/"kernel.json").write_text(json.dumps(dict(
        argv=[KERNEL, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="here", language="python",
        env=env)))
    quiet = folder/"settings/@jupyterlab/apputils-extension"
    quiet.mkdir(parents=True)
    (quiet/"notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    (quiet/"themes.jupyterlab-settings").write_text('{"adaptive-theme": true}')     # light or dark as the browser says
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    places = dict(HOME=folder, JUPYTER_PATH=folder/"share", JUPYTERLAB_SETTINGS_DIR=folder/"settings",
                  JUPYTER_CONFIG_DIR=folder/"config", JUPYTER_DATA_DIR=folder/"data",
                  JUPYTER_RUNTIME_DIR=folder/"runtime", IPYTHONDIR=folder/"ipython")
    command = [SERVER/"bin/jupyter-lab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0",
               "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    with (folder/"server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log,
                                   env=os.environ | {k: str(x) for k, x in places.items()})
    try:
        for _ in range(600):
            try: urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=5).close()
            except OSError: time.sleep(.2)
            else: break
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Notebook:
    "A notebook in a page, as a person uses it."

    def __init__(self, browser, address, folder, app, dark=False):
        self.file, self.shots = folder/f"{app}{'_dark' if dark else ''}.ipynb", folder
        self.file.write_text(json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=dict(
            name="here", display_name="here", language="python")), cells=[
                dict(cell_type="code", id=f"cell{i}", metadata={}, execution_count=None, outputs=[],
                     source=source.strip()) for i, source in enumerate(CELLS)])))
        self.errors, colours = [], "dark" if dark else "light"
        self.page = browser.new_page(viewport=dict(width=1250, height=900), color_scheme=colours)
        self.page.set_default_timeout(120_000)
        self.page.on("console", self.note)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        name = self.file.name
        self.page.goto(f"{address}/lab/tree/{name}?reset" if app == "lab" else f"{address}/notebooks/{name}")
        self.page.wait_for_selector(".jp-CodeCell")
        self.page.wait_for_timeout(1500)
        if app == "lab": self.page.keyboard.press("Control+b")
        self.run(0)
        self.wait(0)
        self.errors.clear()     # Notebook's own, when it starts

    def note(self, message):
        "Keep an error of the console. Notebook's server refuses a font of its own."
        if message.type == "error" and ".woff2" not in str(message.location): self.errors.append(message.text)

    def cell(self, i): return self.page.locator(".jp-CodeCell").nth(i)
    def text(self, i): return self.cell(i).locator(".jp-Cell-outputArea").inner_text()
    def busy(self, i): return "*" in self.cell(i).locator(".jp-InputArea-prompt").inner_text()
    def shot(self, name): self.page.screenshot(path=self.shots/f"{self.file.stem}_{name}.png")

    def run(self, i):
        "Run a cell. Keys that come before the page is ready are lost, so they are pressed until it begins."
        prompt, end = self.cell(i).locator(".jp-InputArea-prompt"), time.monotonic() + 120
        before = prompt.inner_text()
        while prompt.inner_text() == before:
            assert time.monotonic() < end, f"cell {i} does not begin"
            prompt.click()
            self.page.keyboard.press("Control+Enter")
            for _ in range(30):
                if prompt.inner_text() != before: break
                self.page.wait_for_timeout(100)

    def wait(self, i):
        "Until the cell has ended."
        end = time.monotonic() + 120
        while self.busy(i):
            assert time.monotonic() < end, f"cell {i} still runs: {self.text(i)[:300]}"
            self.page.wait_for_timeout(50)

    def shows(self, i, words):
        "Until the cell shows some words."
        end = time.monotonic() + 120
        while words not in self.text(i):
            assert time.monotonic() < end, f"cell {i} does not show {words!r}: {self.text(i)[:300]}"
            self.page.wait_for_timeout(50)

    def step(self, i): return int((re.search(r"step (\d+) of", self.text(i)) or [0, -1])[1])

    def reach(self, i, step):
        "Until the cell shows this step."
        end = time.monotonic() + 120
        while self.step(i) < step:
            assert time.monotonic() < end, f"step {step} of cell {i} is not reached: {self.text(i)[:300]}"
            self.page.wait_for_timeout(50)

    def ends(self, i, step):
        "The cell ends soon after this step, long before the run's last, and keeps a picture and a line."
        self.wait(i)
        self.cell(i).locator("img").wait_for()
        stopped = int(re.search(r"stopped after (\d+) of 400 steps, iterate again to go on", self.text(i))[1])
        assert stopped <= step + 60, "a step of .1 s and a second, were the machine ours alone"

    def interrupt(self):
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.get_by_text("Interrupt Kernel", exact=True).click()

    def said(self):
        "What the last cell prints of the run."
        last = len(CELLS) - 1
        self.run(last)
        self.wait(last)
        return json.loads(self.text(last).partition("SAID")[2])


def use(notebook, i, goes_on=False):
    "Pause, move a slider, stop: a person at cell i."
    first = notebook.step(i) if goes_on else 0
    notebook.reach(i, first + 5)
    pause, slider = notebook.cell(i).locator(".widget-toggle-button"), notebook.cell(i).locator(".noUi-base")
    notebook.shot(f"{i}_runs")
    pause.click()
    notebook.shows(i, "paused")
    paused = notebook.step(i)
    notebook.page.wait_for_timeout(1200)
    assert notebook.step(i) == paused and "paused" in notebook.text(i)
    notebook.shot(f"{i}_paused")
    pause.click()
    notebook.reach(i, paused + 3)
    place = slider.bounding_box()
    notebook.page.mouse.click(place["x"] + place["width"]*(.4 if goes_on else .6), place["y"] + place["height"]/2)
    notebook.shows(i, "→ 0.078" if goes_on else "→ 0.12")
    notebook.reach(i, notebook.step(i) + 5)
    notebook.shot(f"{i}_slid")
    clicked = notebook.step(i)
    notebook.cell(i).locator(".widget-button:not(.widget-toggle-button)").click()
    notebook.ends(i, clicked)
    assert not notebook.cell(i).locator(".widget-button").count(), "the buttons are gone"
    notebook.shot(f"{i}_stopped")


@pytest.mark.parametrize("app, dark", [("lab", False), ("notebook", False), ("lab", True)],
                         ids=["lab", "notebook", "dark"])
def test_a_person_pauses_slides_stops_and_goes_on(server, chromium, app, dark):
    notebook = Notebook(chromium, *server, app, dark)
    notebook.run(1)
    use(notebook, 1)
    whole, steps, marks, used, slid = notebook.said()
    assert whole and marks and used == slid, "each dict has the number that its step was run with"
    for step, said in marks: assert f"{used[step - 1]:.4g} → {used[step]:.4g}" in said
    assert used[-1] > .02

    notebook.run(2)                             # goes on; ■ ends it without an error
    notebook.reach(2, steps + 4)
    clicked = notebook.step(2)
    notebook.interrupt()
    notebook.ends(2, clicked)
    assert "Interrupt" not in notebook.text(2)
    whole, now, *_ = notebook.said()
    assert whole and now >= steps + 4

    notebook.run(3)                             # the same with `async for`
    notebook.reach(3, now + 1)
    use(notebook, 3, goes_on=True)
    assert notebook.said()[0]

    notebook.page.keyboard.press("Control+s")
    notebook.page.wait_for_timeout(1500)
    saved = json.loads(notebook.file.read_text())
    assert "widgets" not in saved["metadata"], "no state of widgets is kept"
    kinds = [{*out["data"]} for i in (1, 2, 3) for out in saved["cells"][i]["outputs"]]
    assert kinds == [{"text/plain"}, {"image/png", "text/plain"}]*3
    assert not notebook.errors
    notebook.page.close()
