"What several test files need, and the order in which tests run."
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")   # its threads and our subprocesses do not mix
os.environ.setdefault("HF_HUB_OFFLINE", "1")               # no test asks the network


@pytest.fixture(scope="session")
def root():
    "The repository."
    return ROOT


@pytest.fixture(scope="session")
def shared():
    "Real data, models and tokenizers beside the repository; tests that need them are skipped without."
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir(): pytest.skip(f"{folder} is absent: real data, models and tokenizers are not part of the repository")
    return folder


# -- order. `make test` has two workers (pytest-xdist). A worker takes one group after another, the longest first,
# so that none is left alone with it at the end.

SECONDS = ROOT/"tests"/"seconds.json"       # of each group, as `make test-times` wrote them


def group(item):
    "What one worker runs in a row: a file, whose fixtures are made once; all that launch ranks, which fill both cores by themselves; a notebook alone."
    if item.path.stem == "test_notebooks": return ""
    return "ranks" if item.get_closest_marker("ranks") else item.path.stem


def scope(nodeid):
    "The group in the name that xdist gives a test, or the test."
    return nodeid.rsplit("@", 1)[-1] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid.split("::")[-1]


def pytest_addoption(parser):
    parser.addoption("--write-seconds", action="store_true", help=f"write {SECONDS.name}, by which groups are ordered")


def pytest_configure(config):
    if config.getoption("--write-seconds"): config.pluginmanager.register(Took())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    "Only in xdist's workers: by hand, tests run in the order of their files."
    if not hasattr(config, "workerinput"): return
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    for item in items:
        if group(item): item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: -known.get(group(item) or scope(item.nodeid), 0.))


class Took:
    "Seconds of each group, for SECONDS."
    def __init__(self): self.seconds = defaultdict(float)
    def pytest_runtest_logreport(self, report): self.seconds[scope(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"): return
        longest = sorted(self.seconds.items(), key=lambda x: -x[1])
        SECONDS.write_text(json.dumps({k: round(s, 1) for k, s in longest if s >= 1}, indent=0) + "\n")
