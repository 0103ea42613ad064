"A command that stands for an interpreter ends as a program of it does, and its work ends with it."
import os
import signal
import subprocess
import sys
import time

import pytest
from ready import Ready, behind


@pytest.fixture(scope="module", params=["json", "no.such.module"])
def ready(request):
    "One that has a module, and one whose process has ended: it could not import, and the interpreter does all itself."
    made = Ready(sys.executable, [request.param])
    if request.param != "json": assert made.process.wait(60)
    yield made
    made.close()


@pytest.mark.parametrize("words, code, out", [
    (["-c", "import sys; print(sys.argv, __name__); sys.exit(3)", "x"], 3, "['-c', 'x'] __main__"),
    (["-c", "import sys; sys.exit('no')"], 1, ""), (["-P", "-c", "1/0"], 1, ""),
    (["-c", "import os; os.kill(os.getpid(), 9)"], -signal.SIGKILL, ""),
    (["-c", "import os; print(os.environ['WORD'], os.getcwd())"], 0, "a /"),
    (["-c", "print(input())"], 0, "said"), (["-m", "this", "x"], 0, None)])
def test_a_command_ends_as_its_program_does(ready, words, code, out):
    run = subprocess.run([ready.command, *words], capture_output=True, text=True, input="said\n", cwd="/",
                         env=os.environ | dict(WORD="a"), timeout=60)
    assert run.returncode == code and (out is None or run.stdout.strip() == out), run
    assert (code == 1) == bool(run.stderr)


def test_its_libraries_are_there_and_a_variable_they_have_read_is_not_changed(ready):
    def has(**more):
        run = subprocess.run([ready.command, "-c", "import sys; print('json' in sys.modules)"], capture_output=True,
                             text=True, env=os.environ | more, timeout=60)
        return run.stdout.strip() == "True"
    assert has() == (ready.process.poll() is None) and not has(VLLM_X="1")


def test_the_work_ends_with_its_command(ready):
    command = subprocess.Popen([ready.command, "-c", "import time; print('on', flush=True); time.sleep(600)"],
                               stdout=subprocess.PIPE, text=True)
    assert command.stdout.readline() == "on\n"
    work = behind(ready.command, command.pid)
    assert (work == command.pid) == (ready.process.poll() is not None)
    command.kill(), command.wait(), command.stdout.close()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{work}") and time.monotonic() < end: time.sleep(.01)
    assert not os.path.exists(f"/proc/{work}")
