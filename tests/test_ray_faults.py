"""A run on a cluster goes on to its numbers, whichever of its processes is killed; hosts that are cut off are heard
(issue of scale: LAWS 14, 15)."""
import json
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT
from forked import on_ranks
from ray_hosts import Hosts, loops, why_not
from ray_kills import (
    a_rank, anybody, disturbed, on_rank, plain, the_command, the_driver, the_raylet, tiny_grpo, undisturbed
)
from rlblocks import here
from test_spmd import same

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]


def alike(rows, want):
    "Every step, each time it was shown, to the bit."
    assert sorted({row["step"] for row in rows}) == [row["step"] for row in want]
    by_step = {row["step"]: row for row in want}
    for row in rows: assert str(row) == str(by_step[row["step"]])      # NaN is NaN


@pytest.mark.long
def test_a_run_on_two_pools_goes_on_when_a_rank_the_raylet_and_the_driver_are_killed(tmp_path):
    """From the last save: steps that come again are equal to the bit, and all are those of one process. With its raylet
    Ray ends the driver."""
    log, steps = [], 24
    kills = [(1, a_rank), (8, the_raylet), (16, the_driver)]
    rows, run = disturbed(made(tmp_path/"killed"), steps, kills, log.append, limit=600)
    assert [x["name"][:6] for x in run.killed][1:] == ["raylet", "python"], log
    assert run.drivers() == 3, run.warned()
    last = {row["step"]: row for row in rows}
    assert sorted(last) == list(range(steps))
    for row in rows: assert str(row) == str(last[row["step"]])      # NaN is NaN
    same(list(last.values()), plain(tiny_grpo(here, steps)), "killed", 1e-9)


@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse")
def test_the_command_makes_a_new_pool_and_a_new_process_and_resumes(tmp_path):
    """`rlblocks run --restarts`: one of two ranks is killed, then the process of the loop. The numbers are those of
    SpmdPool on two ranks, which nobody disturbed, to the bit."""
    steps, kills = 14, [(3, a_rank), (7, the_driver)]
    rows, run = disturbed(made(tmp_path/"killed"), steps, kills, limit=400, driver=the_command)
    assert ["ray::" in x["name"] for x in run.killed] == [True, False]
    assert [len(x) for x in run.warned()] == [0, 1, 1], run.warned()
    assert "ended with -9; another one resumes, 1 restarts are left" in run.warned()[2][0]
    on_ranks(on_rank, (tmp_path, steps), 2, group=False, limit=300)
    alike(plain(rows), json.loads((tmp_path/"rows.json").read_text()))


@pytest.mark.long
def test_twenty_kills_of_any_process(tmp_path):
    "100 steps; who is killed and when is drawn. benchmarks/raykills.py says what followed; its last result is there."
    want, rng = undisturbed(made(tmp_path/"alone"), 100)[0], random.Random(0)
    kills = [(step, anybody(rng)) for step in sorted(rng.choices(range(1, 98), k=20))]
    rows, run = disturbed(made(tmp_path/"killed"), 100, kills, print, limit=3000)
    assert len(run.killed) == 20
    alike(rows, want)


SUPERVISED = """
import os, signal, time
from rlblocks.placement.restarts import end_with_parent
read, write = os.pipe()
child = os.fork()
if child == 0:
    end_with_parent()
    os.write(write, b"x")
    time.sleep(600)
os.read(read, 1)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_of_a_loop_ends_with_the_one_that_supervises_it():
    "Else two would write the same saves when a third is started."
    run = subprocess.run([sys.executable, "-c", SUPERVISED], stdout=subprocess.PIPE, text=True, timeout=300)
    child = Path("/proc")/run.stdout.strip()/"stat"
    def gone(): return not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    wait_until(gone, 60)
    assert run.returncode == -signal.SIGKILL and gone()


REFUSED = """
import sys
import ray
try: ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], logging_level="ERROR", log_to_driver=False)
except BaseException as e: sys.exit(7)
"""


def test_three_hosts_and_one_that_is_cut_off(tmp_path):
    """GRPO and PPO over network namespaces, with a token: the numbers of one process. A host that is cut off is heard
    in time, and the run goes on with what is left. Who has no token, or another one, is refused."""
    if why := why_not(): pytest.skip(why)
    with Hosts(3) as hosts:
        out = tmp_path/"driver.txt"
        driver = hosts.run(0, [sys.executable, str(ROOT/"tests"/"ray_hosts.py"), f"{hosts.address(0)}:{hosts.port}",
                               str(tmp_path)], out=out)
        hosts.running.append(driver)
        wait_until(lambda: (tmp_path/"cut").exists() or driver.poll() is not None, 240)
        assert driver.poll() is None, out.read_text()[-3000:]
        hosts.cut(2)
        cut_at = time.time()
        strangers = [hosts.run(1, [sys.executable, "-c", REFUSED, f"{hosts.address(0)}:{hosts.port}", hosts.address(1)],
                               **env) for env in (dict(RAY_AUTH_MODE="disabled"), dict(RAY_AUTH_TOKEN="f"*64))]
        hosts.running += strangers
        assert driver.wait(300) == 0, out.read_text()[-3000:]
        refused = [x.wait(120) for x in strangers]
    said = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    def of(what): return next(x[what] for x in said if what in x)       # warnings stand between
    assert of("nodes") == [f"10.88.0.{i}" for i in (1, 2, 3)]
    same(of("loops"), loops(here), "three hosts", 1e-10)
    assert "(node 10.88.0." in of("died") and "out of luck" in of("died"), "its log is on another host"
    rows = [x["row"] for x in said if "row" in x]
    same(rows, [{k: float(v) for k, v in row.items()} for row in loops(here, tmp_path/"alone", 12)], "cut off", 1e-10)
    heard = next(x["at"] for x in said if "a new pool resumes" in x.get("warning", ""))
    assert heard - cut_at < 60, "Ray's defaults take 63 s"
    print(f"a host that is cut off is heard after {heard - cut_at:.1f} s")
    assert all(code == 7 for code in refused), refused


def wait_until(true, seconds):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.05)


def made(folder):
    folder.mkdir()
    return folder
