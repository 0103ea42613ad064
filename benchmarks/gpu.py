"""What only a GPU can show, in one command and at most eight minutes: tests, then figures.

    make gpu                          # or python3 benchmarks/gpu.py
    make gpu OUT=folder               # results go there, not to benchmarks/results
    python3 benchmarks/gpu.py --only head update     # some parts; --list names them
    python3 benchmarks/gpu.py --dry   # on a CPU: tiny shapes and Triton's interpreter; no number means anything

A bare machine will do: torch with CUDA, transformers, triton, einops, jaxtyping, hypothesis, pytest; peft for LoRA,
matplotlib for the picture. Nothing is downloaded, and rlblocks need not be installed.

After every part `gpu_<card>.json` and `.png` are written: what a machine has shown stays when it goes away. Each part
runs in a process of its own and has its seconds, so one that fails or hangs takes no other with it. The exit code is 1
where a part or a test failed. Goals are reported, and change nothing. Then `make readme` puts the results into README
and nbs/gpu.ipynb.

Wheels that are worth carrying, for what is measured beside ours; without one, its rows say so. 4.6 MB together:

    trl 1.16.0            0.9 MB   its head, losses, estimators and update; wants the next three
    datasets 5.2.0        0.6 MB   (and pyarrow, pandas and xxhash, which such machines have)
    dill 0.4.1            0.1 MB
    multiprocess 0.70.19  0.2 MB
    liger-kernel 0.8.5    0.9 MB   its fused head and loss
    verl 0.9.1            1.7 MB   losses and estimators; read as files, so nothing else of it is needed
    openrlhf 0.11.2       0.2 MB   likewise

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels trl==1.16.0 …        # anywhere
    pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site make gpu         # there

The parts, their order and their seconds are PARTS, below; `--list` prints them."""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT/"benchmarks"/"results"

# In order of worth. name: (file of the function, what it shows, seconds on an H100, at most)
PARTS = {
    "tests":   ("gpu", "the tests marked gpu: kernels, precision, engines, sampler, checkpoints, no waiting", 90, 150),
    "card":    ("gpu_kernels", "what the card can do: bytes and products a second", 10, 40),
    "head":    ("gpu_kernels", "log-probs and entropy from hidden states, beside logits in full", 45, 60),
    "update":  ("gpu_models", "a policy update on 32,768 packed tokens, Qwen3-1.7B's shape", 75, 100),
    "step":    ("gpu_models", "a whole GRPO step by phase, Qwen3-0.6B's shape", 40, 70),
    "sampler": ("gpu_models", "tokens a second of the sampler in this process", 40, 60),
    "longest": ("gpu_models", "the longest row that trains, beside what `plan` says", 55, 80),
    "losses":  ("gpu_kernels", "every loss and estimator on a million tokens, eager and compiled", 80, 95),
}
SECONDS = 480       # of a whole run


# -- a part, in a process of its own: what it finds goes line by line to the process that started it
def child(name):
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                               # what libraries print is no row
    def say(found): print(json.dumps(found), file=rows, flush=True)
    file = PARTS[name][0]
    if file == "gpu": return run_tests(say)
    for found in getattr(import_module(file), name)(): say(found)
    return 0


def run_tests(say):
    "The tests marked gpu, each a row."
    import pytest

    class Says:
        def pytest_runtest_logreport(self, report):
            if report.when != "call" and not (report.failed or report.skipped): return
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
            say(dict(case=report.nodeid.split("::", 1)[1], way=report.outcome, s=round(report.duration, 2))
                | {k: x for k, x in report.user_properties if isinstance(x, (int, float))}
                | (dict(why=why[:2000]) if why else {}))

    files = sorted(str(p) for p in (ROOT/"tests").glob("test_gpu*.py"))
    return pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files], plugins=[Says()])


# -- the parts in turn
def run(name, seconds, dry):
    "Rows, goals, and what became of a part."
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT/"benchmarks"),
                                                       os.environ.get("PYTHONPATH", "")]))
    env |= dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if dry: env |= dict(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", RLBLOCKS_GPU_DRY="1")
    found, late = [], threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, __file__, "--child", name], cwd=ROOT, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        def stop():
            late.set()
            os.killpg(process.pid, signal.SIGKILL)
        timer = threading.Timer(seconds, stop)
        timer.start()
        for line in process.stdout:
            found.append(json.loads(line))
            print("   ", text_of(found[-1]), flush=True)
        code = process.wait()
        timer.cancel()
        said.seek(0)
        words = said.read()[-4000:]
    state = f"stopped after {seconds:.0f} s" if late.is_set() else "failed" if code else "done"
    part = dict(state=state, seconds=round(time.monotonic() - began, 1),
                rows=[x for x in found if "goal" not in x], goals=[x for x in found if "goal" in x])
    return part | (dict(error=words) if state != "done" else {})


def number(x):
    if not isinstance(x, float): return f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else str(x)
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def text_of(found):
    if "goal" in found:
        return f"{found['goal']}: wanted {found['wanted']}, got {number(found['got'])}" + (
            "" if found["reached"] else "  (not reached)")
    more = ", ".join(f"{k} {number(x)}" for k, x in found.items() if k not in ("case", "way"))
    return f"{found['case']} | {found['way']} | {more}"


def table(result):
    "The whole run, as text."
    lines = []
    for name, part in result["parts"].items():
        lines.append(f"\n{name}: {part['state']}, {part['seconds']:g} s")
        rows = part["rows"]
        if name == "tests":
            lines.append("    " + ", ".join(f"{n} {way}" for way, n in outcomes(part).items()))
            rows = [x for x in rows if x["way"] == "failed"]
        lines += ["    " + text_of(x) for x in [*rows, *part["goals"]]]
        if "error" in part: lines += ["    " + line for line in part["error"].splitlines()[-6:]]
    return "\n".join(lines)


def outcomes(part):
    "How many tests ended how."
    ways = [x["way"] for x in part["rows"]]
    return {way: ways.count(way) for way in ("passed", "failed", "skipped") if way in ways}


def failed(result): return [name for name, part in result["parts"].items() if part["state"] != "done"]


# -- what was measured where
def installed(name):
    try: return version(name)
    except PackageNotFoundError: return None


def answer(*command):
    "A line of another program; None where it is not there."
    try: return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError: return None


def where(dry):
    import torch
    from machine import machine
    found = machine() | {name: installed(name) for name in ("triton", "trl", "verl", "liger-kernel", "flash-attn")}
    found |= dict(commit=answer("git", "log", "-1", "--format=%h"), dry=dry, cuda=torch.version.cuda)
    if dry: return found | dict(card="no card (dry)")
    card = torch.cuda.get_device_properties(0)
    return found | dict(card=card.name, GiB=round(card.total_memory/2**30, 1), capability=f"{card.major}.{card.minor}",
                        multiprocessors=card.multi_processor_count,
                        driver=answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))


def write(result, out):
    "The file and its picture."
    name = "gpu_" + ("dry" if result["machine"]["dry"] else
                     re.sub(r"\W+", "_", result["machine"]["card"].removeprefix("NVIDIA ").lower()).strip("_"))
    out.mkdir(parents=True, exist_ok=True)
    draft = out/f".{name}.json"
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(out/f"{name}.json")
    try: draw(result, out/f"{name}.png")
    except ImportError: pass
    return out/f"{name}.json"


def draw(result, path):
    "A panel of bars for each part that has rows with a number of its kind."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = {name: (unit, rows[:MOST_BARS]) for name, part in result["parts"].items()
              for unit in [UNITS.get(name)] if (rows := by_case([x for x in part["rows"] if unit in x]))}
    if not panels: return
    height = [1 + .18*len(rows) for _, rows in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, sum(height)), squeeze=False,
                                gridspec_kw=dict(height_ratios=height))
    for ax, (name, (unit, rows)) in zip(axes[:, 0], panels.items(), strict=True):
        labels = [f"{x['case']} | {x['way']}" for x in rows]
        colours = ["C0" if x["way"].startswith("ours") else "C7" for x in rows]
        ax.barh(range(len(rows)), [x[unit] for x in rows], color=colours)
        ax.set_yticks(range(len(rows)), labels, fontsize=6)
        ax.set_ylim(len(rows) - .4, -.6)
        ax.set_title(f"{PARTS[name][1]}: {unit.replace('_per_', ' / ')}", fontsize=8, loc="left")
        ax.tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def by_case(rows):
    "Whoever did the same thing stands together, in the order in which the cases came."
    cases = list(dict.fromkeys(x["case"] for x in rows))
    return sorted(rows, key=lambda x: cases.index(x["case"]))


MOST_BARS = 60
UNITS = dict(head="ms", update="tokens_per_s", step="s", sampler="tokens_per_s", longest="GiB", losses="us")


# -- what README and the page say, from the files
def results(folder=RESULTS):
    "Every run on a card, the newest last."
    found = [json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("gpu_*.json")]
    return sorted((x for x in found if not x["machine"]["dry"]), key=lambda x: x["machine"]["date"])


def sentence(found):
    "README's word on GPUs."
    if not found:
        return ("What is written for GPUs (Triton, NCCL, CUDA's attention) has **not run on one yet**; where there is "
                "one, `make gpu` shows in eight minutes what works and how fast ([what it runs](nbs/gpu.ipynb)).")
    last = found[-1]
    m, ended = last["machine"], outcomes(last["parts"].get("tests", dict(rows=[])))
    goals = [x for part in last["parts"].values() for x in part["goals"]]
    said = ", ".join(f"{n} tests {way}" for way, n in ended.items()) or "no tests ran"
    if goals: said += f"; {sum(x['reached'] for x in goals)} of {len(goals)} goals for speed and memory were reached"
    return f"On an {m['card']} ({m['date'][:10]}, torch {m['torch']}): {said} ([figures](nbs/gpu.ipynb); `make gpu`)."


def parts():
    "What a run consists of, as Markdown."
    lines = [("part", "shows", "seconds on an H100", "at most"), ("---",)*4,
             *((f"`{name}`", what, str(usual), str(most)) for name, (_, what, usual, most) in PARTS.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(found):
    "The runs as Markdown."
    if not found: return "**Not run yet.** No machine with a GPU has run `make gpu` and committed what it wrote."
    return "\n\n".join(part for run in reversed(found) for part in of_run(run))


def of_run(run):
    m = run["machine"]
    yield (f"## {m['card']}\n{m['date'][:10]}, torch {m['torch']}, CUDA {m['cuda']}, transformers {m['transformers']}, "
           f"Python {m['python']}, commit {m['commit']}")
    for name, part in run["parts"].items():
        yield f"### {name}: {PARTS[name][1]}\n{part['state']}, {part['seconds']:g} s"
        rows = part["rows"]
        if name == "tests":
            yield ", ".join(f"{n} {way}" for way, n in outcomes(part).items())
            rows = [x for x in rows if x["way"] == "failed"]
        yield from tables(rows)
        yield from tables(part["goals"])


def tables(rows):
    "One for each run of rows with the same columns."
    for columns, some in groupby(rows, key=lambda x: tuple(x)):
        lines = [columns, ["---"]*len(columns), *(map(number, row.values()) for row in some)]
        def cell(x): return " ".join(x.split()).replace("|", "\\|")
        yield "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="these parts")
    p.add_argument("--list", action="store_true", help="name the parts and their seconds")
    p.add_argument("--dry", action="store_true", help="on the CPU, tiny: whether every line runs")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu_<card>.json and .png")
    p.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run; what finds none left is not begun")
    p.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child: return child(a.child)
    if a.list:
        for name, (_, what, expected, most) in PARTS.items(): print(f"{name:8} {what} ({expected} s, at most {most})")
        return 0
    import torch
    if not a.dry and not torch.cuda.is_available():
        sys.exit(f"make gpu: torch {torch.__version__} sees no CUDA device here; python3 benchmarks/gpu.py --dry runs "
                 "every line on the CPU")
    end, result = time.monotonic() + a.seconds, dict(machine=where(a.dry), parts={})
    for name in a.only or PARTS:
        left = end - time.monotonic()
        if left < 10:
            result["parts"][name] = dict(state="not begun, no time left", seconds=0., rows=[], goals=[])
            continue
        print(f"\n{name}: {PARTS[name][1]}", flush=True)
        result["parts"][name] = run(name, min(PARTS[name][3], left), a.dry)
        path = write(result, a.out)
    print(table(result))
    print(f"\n{result['machine']['card']}, {datetime.now():%F %R}: {path}")
    if odd := failed(result): print(f"make gpu: not as it should be: {', '.join(odd)}", file=sys.stderr)
    return int(bool(odd))


if __name__ == "__main__": sys.exit(main())
