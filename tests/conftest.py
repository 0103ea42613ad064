"What several test files need, and the order in which tests run."
import ast
import atexit
import gc
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from itertools import combinations, product
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")   # its threads and our subprocesses do not mix
os.environ.setdefault("HF_HUB_OFFLINE", "1")               # no test asks the network
RAY_TOKEN = dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef"*2)
RAY_TOKEN |= dict(RAY_prestart_worker_first_driver="0",     # it would start a process for each of the node's CPUs
                  RAY_worker_niceness="0")      # at Ray's 15 other tests leave a rank a thirtieth of the machine
os.environ.update(RAY_TOKEN)    # read when Ray is imported, which another test than those of RayPool may do


def rarely(*params):
    "Parameters of a test that only `make test-long` runs."
    return [pytest.param(*(p if isinstance(p, tuple) else (p,)), marks=pytest.mark.long) for p in params]


def skip_without(name, reason=None):
    """As pytest.importorskip, but nothing is imported: every worker collects every file, and often it is only the
    processes of a test that need it."""
    if find_spec(name) is None: pytest.skip(reason or f"{name} is not installed", allow_module_level=True)


def pairwise(*axes):
    """The rule for a test over several choices: `make test` has rows in which every pair of values of two axes occurs,
    `make test-long` the whole product. An error that takes two choices at once is seen; one that takes three is rare.
    """
    places = list(product(*(range(len(axis)) for axis in axes)))
    def pairs(row): return set(combinations(enumerate(row), 2))
    left, rows = set().union(*map(pairs, places)), []
    while left:
        rows.append(max(places, key=lambda row: len(pairs(row) & left)))
        left -= pairs(rows[-1])
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Whatever ran before it in its worker, a test draws from the same state, and the compiler has compiled nothing: it
    counts recompilations by the frame, and a frame of its own holds the functions of all tests."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    yield
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None and compiler.FRAME_COUNTER: torch.compiler.reset()


def pytest_runtest_setup(item):
    "Tests for a card need one, or are told to run without."
    if not item.get_closest_marker("gpu"): return
    import card
    if not (card.CARD or card.DRY): pytest.skip(card.REASON)


@pytest.fixture
def device():
    "The card; in a dry run the CPU."
    from card import DEVICE
    return DEVICE


@pytest.fixture(scope="session")
def root():
    "The repository."
    return ROOT


@pytest.fixture(scope="session")
def shared():
    "Real data, models and tokenizers beside the repository; tests that need them are skipped without."
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: real data, models and tokenizers are not part of the repository")
    return folder


def vllm_interpreter():
    "The interpreter that has vLLM: the variable's, that of `make vllm`, or this one. None: there is none."
    for path in (os.environ.get("VLLM_PYTHON"), ROOT/".venv"/"vllm"/"bin"/"python"):
        if path and Path(path).exists(): return str(path)
    return sys.executable if find_spec("vllm") else None


@cache
def vllm_python():
    "A command that stands for it and has imported vLLM (tests/ready.py): an engine starts in 2 s, not in 11."
    if (python := vllm_interpreter()) is None: return None
    from ready import VLLM, Ready
    from rlblocks.samplers.processes import child_environment
    from rlblocks.samplers.vllm import _QUIET
    return resident(Ready(python, VLLM, child_environment(dict(os.environ)) | _QUIET)).command


@cache
def ray_python():
    """A command for Ray's ranks that has imported all but Ray: a rank starts in 2 s, not in 8. Those of
    tests/test_ray_faults.py, which is about processes, start from nothing."""
    from ready import RANK, Ready
    return resident(Ready(sys.executable, RANK)).command


def resident(ready):
    "Let it stay until the tests are over, and count what it uses."
    from forked import RESIDENT
    RESIDENT.append(ready.process.pid)
    atexit.register(ready.close)
    return ready


# -- order. `make test` has three workers (pytest-xdist): some tests wait for processes that are killed, frozen or cut
# off, and two others then have the two cores. A worker takes one group after another, the longest first, so that none
# is left alone with it at the end.

SECONDS = ROOT/"tests"/"seconds.json"       # of each group, as `make test-times` wrote them
MATRICES = ("test_engines", "test_tensor")      # of engines and cases: half of what ranks take


def group(nodeid):
    """What one worker runs in a row: a file, whose fixtures are made once; all that launch ranks, which fill both
    cores by themselves, in two halves, for one would take longer than all else; files with engines of vLLM, and files
    with ranks of Ray, for which what they need is imported once (tests/ready.py); notebooks that run under the type
    checker, for which rlblocks is imported once more; any other notebook alone."""
    file, _, test = nodeid.partition("::")
    name, _, params = test.partition("[")
    if Path(file).stem == "test_notebooks":
        return "notebooks" if "type_checker" in name else params.removesuffix("]")
    if name in launching(ROOT/file): return "ranks" if Path(file).stem not in MATRICES else "matrices"
    for word in ("vllm", "ray"):
        if f"{word}_python()" in text(ROOT/file): return word
    return Path(file).stem


@cache
def text(file): return file.read_text(encoding="utf-8")


@cache
def launching(file):
    "Names of the tests of a file that have the mark `ranks`, by themselves or all of them."
    body, ranks = ast.parse(text(file)).body, "pytest.mark.ranks"
    tests = [x for x in body if isinstance(x, ast.FunctionDef)]
    if f"pytestmark = {ranks}" in map(ast.unparse, body): return {x.name for x in tests}
    return {x.name for x in tests if ranks in map(ast.unparse, x.decorator_list)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "By ids: the groups of pytest-xdist 3.8 (xdist_group) are lost under pytest 9.2, which reads no id that it writes."
    from xdist.scheduler import LoadScopeScheduling
    by_file = config.option.markexpr == "long"      # else hundreds of kills would wait for every engine
    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            name = group(nodeid)
            return Path(nodeid.partition("::")[0]).stem if by_file and name in ("ranks", "matrices") else name
    return Groups(config, log)


def pytest_addoption(parser):
    parser.addoption("--write-seconds", action="store_true", help=f"write {SECONDS.name}, by which groups are ordered")


def pytest_configure(config):
    if hasattr(config, "workerinput"): return
    if config.getoption("--write-seconds"): config.pluginmanager.register(Took())
    # while workers collect; a test that comes before its end waits for it
    if getattr(config.option, "numprocesses", None) and find_spec("deepspeed"):
        build = "import torch; from rlblocks.engines.zero import build_ops; build_ops(torch.device('cpu'), 'cpu')"
        config.add_cleanup(subprocess.Popen([sys.executable, "-c", build], cwd=ROOT).wait)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    "Only in xdist's workers: by hand, tests run in the order of their files."
    if not hasattr(config, "workerinput"): return
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else dict(ranks=1e3)
    unknown = 20.       # a new file is not left for the end
    items.sort(key=lambda item: -known.get(group(item.nodeid), unknown))


def pytest_collection_finish():
    "Libraries and collected tests stay: a garbage collection looks at what tests make, and takes no half second."
    gc.collect()
    gc.freeze()


def cpu():
    """Seconds of CPU that this process, its children and the processes that others are forked from have used; a wall
    clock measures the neighbours."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    resident = [server, *getattr(sys.modules.get("forked"), "RESIDENT", [])]
    stats = [path.read_text().rsplit(")", 1)[1].split()
             for pid in resident if pid is not None and (path := Path(f"/proc/{pid}/stat")).exists()]
    return sum(os.times()[:4]) + sum(sum(map(int, s[11:15])) for s in stats)/os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    "Each test says what it used: the reports carry it from a worker to the one who writes SECONDS."
    item.began = cpu()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties = [*report.user_properties, ("used", (group(item.nodeid), cpu() - item.began))]
    return report


def machine():
    "Seconds that the machine's cores have worked, and all their seconds."
    user, nice, system, idle, waiting, *more = (int(x) for x in Path("/proc/stat").read_text().split()[1:9])
    worked = user + nice + system + sum(more)
    return worked/os.sysconf("SC_CLK_TCK"), (worked + idle + waiting)/os.sysconf("SC_CLK_TCK")


class Took:
    """Seconds for which each group holds a worker, for SECONDS; CPU seconds of each file, and how busy the machine was,
    for the terminal. What Ray's processes use is not counted: they are nobody's children."""
    def __init__(self): self.used, self.held, self.began = {}, defaultdict(float), machine()

    def pytest_runtest_logreport(self, report):
        self.held[report.nodeid] += report.duration
        if report.when == "teardown": self.used[report.nodeid] = dict(report.user_properties)["used"][1]

    def by(self, name, seconds):
        found = defaultdict(float)
        for nodeid, s in seconds.items(): found[name(nodeid)] += s
        return {k: round(s, 1) for k, s in sorted(found.items(), key=lambda x: -x[1]) if s >= 1}

    def pytest_terminal_summary(self, terminalreporter):
        SECONDS.write_text(json.dumps(self.by(group, self.held), indent=0) + "\n")
        terminalreporter.section("CPU seconds")
        worked, all_ = (now - then for now, then in zip(machine(), self.began, strict=True))
        terminalreporter.write_line(f"the machine's cores worked {worked:.0f} of {all_:.0f} s")
        files, tests = self.by(lambda nodeid: nodeid.split("::")[0], self.used), self.by(str, self.used)
        for name, seconds in [*self.by(group, self.used).items(), *files.items(), *[*tests.items()][:60]]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
