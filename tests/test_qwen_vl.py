"""Qwen's vision-language models in the tests of tests/test_media.py: their processors import torchvision, which `make
torchvision` puts into a folder beside the environment."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT, rarely
from tiny_media import TORCHVISION


def with_torchvision(file, tests):
    if not TORCHVISION.exists(): pytest.skip("torchvision is not installed: make torchvision")
    path = os.pathsep.join(map(str, (ROOT, ROOT/"tests", TORCHVISION)))
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", f"tests/{file}", "-k",
               f"(qwen2_5_vl or qwen3_vl) and ({tests})"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
                          timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tests", ["loop or agree or one_batch or packed", *rarely("test")])
def test_rows_with_images_in_a_process_with_torchvision(tests): with_torchvision("test_media.py", tests)


@pytest.mark.long
def test_images_on_vllm_in_a_process_with_torchvision(): with_torchvision("test_media_vllm.py", "test")


def test_rows_with_video_in_a_process_with_torchvision(): with_torchvision("test_media_files.py", "video or sizes")
