"""What only a GPU can show, in one command and at most eight minutes: tests, then figures.

    make gpu                          # or python3 benchmarks/gpu.py
    make gpu OUT=folder ONLY="head update" PYTHON=python3.12    # results elsewhere; some parts; another interpreter
    python3 benchmarks/gpu.py --dry   # on a CPU: tiny shapes and Triton's interpreter; no number means anything

A bare machine will do: torch with CUDA, transformers, triton and a C compiler for it, einops, jaxtyping, hypothesis,
pytest; peft for LoRA, matplotlib for the picture. Nothing is downloaded, and rlblocks need not be installed. The first
card is used; shapes are for 80 GB, and what does not fit a smaller one says so.

Rows are written as they come, to `gpu_<card>.json`, and after every part the picture beside it: what a machine has
shown stays when it goes away. Parts of an earlier run on such a card stay until they are run again. Each part runs in a
process of its own and has its seconds, so one that fails or hangs takes no other with it. The exit code is 1 where a
part, a test or something of ours failed. Goals are reported, and change nothing. Commit both files; `make readme`, on
any machine, puts them into README and nbs/gpu.ipynb.

Wheels that are worth carrying, for what is measured beside ours; without one, its rows say so. 4.6 MB together:

    trl 1.16.0            0.9 MB   its head, losses, estimators and update; wants the next three
    datasets 5.2.0        0.6 MB   (and pyarrow, pandas and xxhash, which such machines have)
    dill 0.4.1            0.1 MB
    multiprocess 0.70.19  0.2 MB
    liger-kernel 0.8.5    0.9 MB   its fused head and loss
    verl 0.9.1            1.7 MB   losses and estimators; read as files, so nothing else of it is needed
    openrlhf 0.11.2       0.2 MB   likewise

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels trl==1.16.0 datasets==5.2.0 \\
        dill==0.4.1 multiprocess==0.70.19 liger-kernel==0.8.5 verl==0.9.1 openrlhf==0.11.2          # anywhere
    pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=$PWD/site make gpu    # there

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT/"benchmarks"/"results"

# In order of worth. name: (file of the function, what it shows, seconds on an H100, at most)
PARTS = {
    "tests":   ("gpu", "kernels, precision, engines, sampler, checkpoints; that nothing waits for the card", 90, 150),
    "card":    ("gpu_kernels", "what the card can do: bytes and products a second", 10, 40),
    "head":    ("gpu_kernels", "log-probs and entropy from hidden states, beside logits in full", 45, 65),
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
    if os.environ.get("TRITON_INTERPRET"): mend_interpreter()
    if file == "gpu": return run_tests(say)
    for found in getattr(import_module(file), name)(): say(found)
    return 0


def mend_interpreter():
    "Triton 3.6 takes the number of an array of one in a way that numpy 2.5 refuses; 3.7 as here."
    from triton.runtime import interpreter
    patch = interpreter._patch_lang_tensor
    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())
    interpreter._patch_lang_tensor = patched


def run_tests(say):
    "The tests marked gpu, each a row."
    import pytest

    class Says:
        def pytest_runtest_logreport(self, report):
            if report.when != "call" and not (report.failed or report.skipped): return
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
            told = {k: x if isinstance(x, int | float) else ", ".join(f"{y:.2g}" for y in x)
                    for k, x in report.user_properties if k != "used"}      # that is the suite's own
            say(dict(case=report.nodeid.split("::", 1)[1], way=report.outcome, s=round(report.duration, 2)) | told
                | (dict(why=why[:2000]) if why else {}))

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            "What is compiled for long comes last."
            items.sort(key=lambda item: "flex" in item.name or "compiled" in item.name)

    files = sorted(str(p) for p in (ROOT/"tests").glob("test_gpu*.py"))
    return pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files], plugins=[Says()])


# -- the parts in turn
def run(name, seconds, dry, keep=lambda part: None):
    "Rows, goals, and what became of a part; `keep` is given what there is after each row."
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT/"benchmarks"),
                                                       os.environ.get("PYTHONPATH", "")]))
    env |= dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", RLBLOCKS_GPU_UNTIL=str(time.time() + seconds - 3))
    if dry: env |= dict(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", RLBLOCKS_GPU_DRY="1")
    part = dict(state="interrupted", date=datetime.now().isoformat(timespec="seconds"), seconds=0.,
                commit=answer("git", "describe", "--always", "--dirty"), rows=[], goals=[])
    began, late = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, __file__, "--child", name], cwd=ROOT, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        def stop():
            late.set()
            end(process)
        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for line in process.stdout:
                found = json.loads(line)
                part["goals" if "goal" in found else "rows"].append(found)
                part["seconds"] = round(time.monotonic() - began, 1)
                keep(part)
                print("   ", text_of(found), flush=True)
            code = process.wait()
            part["state"] = f"stopped after {seconds:.0f} s" if late.is_set() else "failed" if code else "done"
        finally:
            timer.cancel()
            end(process)
            if part["state"] != "done":
                said.seek(0)
                part["error"] = said.read()[-4000:]
            part["seconds"] = round(time.monotonic() - began, 1)
            keep(part)
    return part


def end(process):
    "And all that it has started."
    try: os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    process.wait()


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
    "How the parts ended, as text: their rows have been shown."
    lines = []
    for name, part in result["parts"].items():
        lines.append(f"{name:8} {part['state']}, {part['seconds']:g} s, " + (summary(part) if name == "tests"
                                                                         else f"{len(part['rows'])} rows"))
        lines += ["         " + text_of(x) for x in [*odd(part), *part["goals"]]]
        if "error" in part: lines += ["         " + line for line in part["error"].splitlines()[-6:]]
    return "\n".join(lines)


def outcomes(part):
    "How many tests ended how."
    ways = [x["way"] for x in part["rows"]]
    return {way: ways.count(way) for way in ("passed", "failed", "skipped") if way in ways}


def summary(part): return ", ".join(f"{n} {way}" for way, n in outcomes(part).items()) or "no test ran"
def odd(part):
    "Rows of ours that failed, and failed tests."
    return [x for x in part["rows"] if "failed" in (x["way"], *x)]


def failed(result):
    return [name for name, part in result["parts"].items() if part["state"] != "done" or odd(part)]


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
    found |= dict(dry=dry, cuda=torch.version.cuda)
    if dry: return found | dict(card="no card, dry")
    # not in this process, whose share of the card's memory would stay taken
    asked = answer(sys.executable, "-c", "import torch; p = torch.cuda.get_device_properties(0); "
                                         "print(p.name, p.total_memory/2**30, f'{p.major}.{p.minor}', sep='|')")
    name, memory, capability = asked.splitlines()[-1].split("|")
    return found | dict(card=name, GiB=round(float(memory), 1), capability=capability,
                        driver=answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))


def file_of(machine, out):
    words = "dry" if machine["dry"] else re.sub(r"\W+", "_", machine["card"].removeprefix("NVIDIA ").lower()).strip("_")
    return out/f"gpu_{words}.json"


def write(result, path):
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)


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
    figure.savefig(path, dpi=110, bbox_inches="tight")
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
        return ("What is written for GPUs has **not run on one yet**; there `make gpu` shows in eight minutes what "
                "works and how fast ([what it runs](nbs/gpu.ipynb)).")
    last = found[-1]
    m, ended = last["machine"], outcomes(last["parts"].get("tests", dict(rows=[])))
    tried = ended.get("passed", 0) + ended.get("failed", 0)
    said = [f"{ended.get('passed', 0)} of {tried} tests for GPUs passed" if tried else "no tests ran"]
    goals = [x for part in last["parts"].values() for x in part["goals"]]
    if goals: said.append(f"{sum(x['reached'] for x in goals)} of {len(goals)} goals for speed and memory were reached")
    left = [name for name in PARTS if name not in last["parts"]]
    if wrong := failed(last): said.append(f"**not as it should be: {', '.join(wrong)}**")
    if left: said.append(f"**not run: {', '.join(left)}**")
    return f"On an {m['card']} ({m['date'][:10]}, torch {m['torch']}): {'; '.join(said)} ([figures](nbs/gpu.ipynb))."


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
           f"Python {m['python']}")
    if goals := [x for part in run["parts"].values() for x in part["goals"]]:
        yield one_table([x | dict(reached="yes" if x["reached"] else "no") for x in goals])
    picture = file_of(m, Path("../benchmarks/results")).with_suffix(".png")
    if (RESULTS/picture.name).exists(): yield f"![Figures of {m['card']}]({picture})"
    yield from parts_of(run)


def parts_of(run):
    for name, part in run["parts"].items():
        yield (f"### {name}: {PARTS[name][1]}\n{part['state']}, {part['seconds']:g} s, {part['date'][:10]}, "
               f"commit {part['commit'] or 'unknown'}")
        rows = part["rows"]
        if name == "tests":
            yield summary(part)
            rows = [x for x in rows if x["way"] != "passed"]
        if part.get("error"): yield "```\n" + "\n".join(part["error"].splitlines()[-12:]) + "\n```"
        yield from tables([x for x in rows if "text" not in x])
        if texts := [x for x in rows if "text" in x]:
            yield f"<details><summary>Kernels</summary>\n\n{one_table(texts)}\n\n</details>"


UNSHOWN = "first_s", "reserved_GiB"
NAMES = "case", "way", "of"


def tables(rows):
    "Rows that have a number of one kind in one table, whoever did the same thing together."
    found = []
    for x in rows:
        kinds = set(x) - {*NAMES, *UNSHOWN}
        home = next((some for some in found if any(kinds & set(y) for y in some)), None)
        if home is None: found.append([x])
        else: home.append(x)
    return [one_table(by_case(some)) for some in found]


def one_table(rows):
    columns = [k for k in dict.fromkeys(k for x in rows for k in x) if k not in UNSHOWN]
    lines = [columns, ["---"]*len(columns), *([number(x.get(k, "")) for k in columns] for x in rows)]
    def cell(x): return " ".join(x.split()).replace("|", "\\|")
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


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
        sys.exit(f"make gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device; make gpu PYTHON=… "
                 "takes another interpreter, and python3 benchmarks/gpu.py --dry runs every line on the CPU")
    result = dict(machine=where(a.dry), parts={})
    path = file_of(result["machine"], a.out)
    if a.only and path.exists(): result["parts"] = json.loads(path.read_text())["parts"]
    try:
        a.out.mkdir(parents=True, exist_ok=True)
        write(result, path)
    except OSError as e: sys.exit(f"make gpu: nothing can be written to {a.out}: {e}; OUT= names another folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try: in_turn(a.only or PARTS, result, path, a)
    except KeyboardInterrupt: print("\nmake gpu: interrupted", file=sys.stderr)
    print(f"\n{table(result)}\n\n{result['machine']['card']}, {datetime.now():%F %R}: {path}")
    wrong = failed(result) + [name for name in a.only or PARTS if name not in result["parts"]]
    if wrong: print(f"make gpu: not as it should be: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def in_turn(names, result, path, a):
    "Run the parts; what they find is in `result`, and in the file."
    until = time.monotonic() + a.seconds
    def keep(part):
        result["parts"][name] = part
        write(result, path)
    for name in names:
        left = until - time.monotonic()
        if left < 10:
            keep(dict(state="not begun, no time left", date="", commit=None, seconds=0., rows=[], goals=[]))
            continue
        print(f"\n{name}: {PARTS[name][1]}", flush=True)
        run(name, min(PARTS[name][3], left), a.dry, keep)
        try: draw(result, path.with_suffix(".png"))
        except ImportError: pass


if __name__ == "__main__": sys.exit(main())
