"What several test files need."
import os
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
