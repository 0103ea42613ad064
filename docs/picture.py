"""docs/learning.png, the picture of the README: curves and rows as tutorials/grpo.ipynb has stored them.

    python docs/picture.py

Chromium draws it; it is found on the path."""
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stored(notebook, kind):
    "The outputs of one kind that a notebook has stored, in order."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(out["data"][kind]) for c in cells for out in c.get("outputs", []) if kind in out.get("data", {})]


def main():
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None: raise SystemExit("docs/picture.py: there is no Chromium on the path")
    curves, rows = (stored(ROOT/"tutorials/grpo.ipynb", kind)[-1] for kind in ("image/png", "text/html"))
    page = (f"<meta charset=utf-8><body style='margin:8px;background:white;font-family:sans-serif'>"
            f"<img width=960 src='data:image/png;base64,{curves}'>{rows}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder)/"page.html"
        file.write_text(page, encoding="utf-8")
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=980,880".split()
        subprocess.run([browser, *flags, f"--screenshot={ROOT/'docs/learning.png'}", file.as_uri()], check=True,
                       capture_output=True)


if __name__ == "__main__": main()
