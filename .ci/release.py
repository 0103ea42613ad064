"""`make release`: wheel and source distribution in dist/, and the tour in a new environment that has the wheel and
nothing of this folder. Nothing is uploaded.

    python .ci/release.py torch==2.13.0 [--index-url URL]       # the words are pip's, for torch"""
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT/"dist"


def run(*words, **options):
    "Run a command and show it; SystemExit with its exit code when it fails."
    print("$", *words, flush=True)
    if code := subprocess.run([str(w) for w in words], check=False, **options).returncode: raise SystemExit(code)


def build():
    "(wheel, source distribution): the second of the files of this folder as they are, the first from the second."
    for old in [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]: old.unlink()
    DIST.mkdir(exist_ok=True)
    run(sys.executable, "-c", "import setuptools.build_meta as build; build.build_sdist('dist')", cwd=ROOT,
        stdout=subprocess.DEVNULL)
    sdist = next(DIST.glob("*.tar.gz"))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", DIST, sdist)
    return next(DIST.glob("*.whl")), sdist


def check(wheel, sdist):
    "AssertionError for an archive without the modules that are here, the mark of typed packages or the licence."
    modules = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("rlblocks/**/*.py")}
    inside = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as tar: source = {name.partition("/")[2] for name in tar.getnames()}
    for name, has in ((wheel.name, inside), (sdist.name, source)):
        assert not (lost := modules - has), f"{name} lacks {', '.join(sorted(lost)[:5])}"
        assert "rlblocks/py.typed" in has, f"{name} lacks py.typed"
        assert any(x.endswith("LICENSE") for x in has), f"{name} lacks LICENSE"


def check_version():
    "AssertionError where settings.ini, CHANGELOG.md and CITATION.cff do not name the same version."
    texts = {name: (ROOT/name).read_text(encoding="utf-8") for name in ("settings.ini", "CHANGELOG.md", "CITATION.cff")}
    version = re.search(r"(?m)^version = (\S+)", texts["settings.ini"])[1]
    assert f"\n## {version}\n" in texts["CHANGELOG.md"], f"CHANGELOG.md has no section {version}"
    assert f"\nversion: {version}\n" in texts["CITATION.cff"], f"CITATION.cff names another version than {version}"


def tour():
    "The code of nbs/tour.ipynb as a program."
    cells = json.loads((ROOT/"nbs/tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return "import matplotlib\nmatplotlib.use('Agg')\n" + re.sub(r"(?m)^#\|.*\n", "", code)


def main(torch):
    check_version()
    wheel, sdist = build()
    check(wheel, sdist)
    with tempfile.TemporaryDirectory() as there:
        python = Path(there)/"env/bin/python"
        run(sys.executable, "-m", "venv", Path(there)/"env")
        run(python, "-m", "pip", "install", "-q", *torch)
        run(python, "-m", "pip", "install", "-q", "-c", ROOT/"constraints.txt", f"{wheel}[notebook,cli]")
        (Path(there)/"tour.py").write_text(tour(), encoding="utf-8")
        run(python, "tour.py", cwd=there)
        run(python, "-c", "import rlblocks as r; print('the tour ran with', r.__version__, r.__file__)", cwd=there)
        run(Path(there)/"env/bin/rlblocks", "--help", cwd=there, stdout=subprocess.DEVNULL)
    print(f"{wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} are ready; nothing was uploaded")


if __name__ == "__main__": main(sys.argv[1:])
