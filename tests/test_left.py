"""What a trainer that is killed leaves behind: nothing. It is killed at moments drawn at random, with a reward function
that hangs and starts daemons, a program in the sandbox and an engine; within five seconds no process, folder or port of
it is left."""
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import rarely
from forked import forked
from ready import Ready
from rlblocks import GraderLimits, Sandbox
from rlblocks.graders.code import passed_tests
from rlblocks.graders.jail import adopt_orphans, children
from rlblocks.graders.killable import each
from rlblocks.graders.sandbox import lacking, sandbox_support
from rlblocks.samplers.processes import Child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the trainer's end is heard of by Linux's means")
KILLS = signal.SIGKILL, signal.SIGTERM, signal.SIGHUP
ENGINE = """
def run(trainer, folder):
    trainer.send(("begins",))
    sum(range(10**12))      # no other thread runs while C code keeps the GIL
"""


def trains(python, port, folder):
    "Until it is killed. The engine starts beside the rewards, as it does behind a `later`."
    for s in KILLS[1:]: signal.signal(s, signal.SIG_DFL)
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    server = socket.create_server(("127.0.0.1", port))      # as an endpoint does
    threading.Thread(target=Child, args=("engine", "run"), daemon=True,
                     kwargs=dict(python=python, environment=dict(PYTHONPATH=str(Path(folder).parent)))).start()
    def reward(i):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        if not os.fork():
            server.listen()         # it has all that the trainer had open
            time.sleep(3600)
        time.sleep(3600*(i % 2))
        return 1.
    programs = ["import time\ntime.sleep(3600)", "while True: pass", "def f(): pass"]
    isolation = "partial" if lacking() else "full"
    while True:
        each(reward, 4, GraderLimits(600., item=.3))
        passed_tests(programs, [["f()"]]*3, Sandbox(seconds=.5, isolation=isolation))


def check_left(trainer, folder, case):
    "Within five seconds all processes have ended that come from the trainer, and its folders are gone."
    end, left = time.monotonic() + 5., [trainer]
    while left and time.monotonic() < end:
        with suppress(ChildProcessError): os.waitpid(-1, os.WNOHANG)
        left = children(trainer)
        time.sleep(.02)
    names = [(pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]) for pid in left]
    for pid in left: os.kill(pid, signal.SIGKILL)
    assert not left, f"{case}: {names}"
    assert not list(folder.iterdir()), f"{case}: {list(folder.iterdir())}"


def killed(_, folder, seeds, python):
    "Every orphan of the trainer comes to this process, so that none is overlooked."
    adopt_orphans()
    sandbox_support()
    for seed in seeds:
        draw, work = random.Random(seed), Path(folder)/str(seed)
        work.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as s: port = s.getsockname()[1]
        trainer = os.fork()
        if not trainer:
            try: trains(python if seed % 2 else None, port, str(work))
            finally: os._exit(1)
        time.sleep(draw.uniform(0., 1.5))
        assert not os.waitpid(trainer, os.WNOHANG)[0], "it trains until it is killed"
        os.kill(trainer, KILLS[seed % 3])
        check_left(trainer, work, f"seed {seed}")
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("seeds", [range(16), *rarely(range(16, 50))])
def test_a_killed_trainer_leaves_nothing(tmp_path, seeds):
    (tmp_path/"engine.py").write_text(ENGINE)
    ready = Ready(sys.executable, ["rlblocks.samplers.vllm_process"])
    try: forked(killed, (str(tmp_path), list(seeds), ready.command), 1, limit=60 + 20*len(seeds))
    finally: ready.close()


def computes(_, folder):
    adopt_orphans()
    reads, writes = os.pipe()
    trainer = os.fork()
    if not trainer:
        tempfile.tempdir = folder
        child = Child("engine", "run", environment=dict(PYTHONPATH=str(Path(folder).parent)))
        child.read(60.)
        os.write(writes, b".")
        time.sleep(3600)
    os.read(reads, 1)
    os.kill(trainer, signal.SIGKILL)
    check_left(trainer, Path(folder), "an engine in C code that keeps the GIL")


def test_an_engine_ends_that_keeps_the_gil(tmp_path):
    (tmp_path/"engine.py").write_text(ENGINE)
    (tmp_path/"folders").mkdir()
    forked(computes, (str(tmp_path/"folders"),), 1, limit=120)
