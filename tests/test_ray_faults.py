"""A run on a cluster goes on to its numbers, whichever of its processes is killed; hosts that are cut off are heard
(issue of scale: LAWS 14, 15)."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, rarely
from forked import on_ranks
from ray_hosts import Hosts, loops, why_not
from ray_kills import (
    ENV, a_rank, anybody, disturbed, end, family, on_rank, options, plain, the_command, the_driver, the_raylet,
    tiny_grpo, undisturbed
)
from rlblocks import here
from rlblocks.engines.process_group import RankLost
from rlblocks.people.command import command_line
from rlblocks.placement import restarts
from rlblocks.placement.restarts import RankSilent, supervise
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
    log, steps = [], 30
    kills = [(1, a_rank), (14, the_raylet), (22, the_driver)]
    rows, run = disturbed(made(tmp_path/"killed"), steps, kills, log.append, limit=600)
    assert [x["name"][:6] for x in run.killed][1:] == ["raylet", "python"], log
    assert run.drivers() == 3 and len(run.warned()[1]) == 1, run.warned()
    last = {row["step"]: row for row in rows}
    assert sorted(last) == list(range(steps))
    for row in rows: assert str(row) == str(last[row["step"]])      # NaN is NaN
    same(list(last.values()), plain(tiny_grpo(here, steps)), "killed", 1e-9)


@pytest.mark.parametrize("ranks", rarely(1, 2))      # in `make test` tests/test_ray.py has a rank that dies
@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse")
def test_the_command_makes_a_new_pool_and_a_new_process_and_resumes(tmp_path, ranks):
    """`rlblocks run --restarts`: a rank is killed, then the process of the loop. The numbers are those of SpmdPool on
    as many ranks, which nobody disturbed, to the bit."""
    steps, kills = 10, [(2, a_rank), (5, the_driver)]
    rows, run = disturbed(made(tmp_path/"killed"), steps, kills, limit=1200, driver=partial(the_command, ranks=ranks))
    assert ["ray::" in x["name"] for x in run.killed] == [True, False]
    assert [len(x) for x in run.warned()] == [0, 1, 1], run.warned()
    assert "ended with -9; another one resumes, 1 restarts are left" in run.warned()[2][0]
    on_ranks(on_rank, (tmp_path, steps), ranks, group=False, limit=300)
    alike(plain(rows), json.loads((tmp_path/"rows.json").read_text()))


@pytest.mark.long
def test_twenty_kills_of_any_process(tmp_path):
    """100 steps; who is killed and when is drawn, from the first 75, since a kill waits for what the last one caused.
    benchmarks/raykills.py says what followed; its last result is there."""
    want, rng = undisturbed(made(tmp_path/"alone"), 100)[0], random.Random(0)
    kills = [(step, anybody(rng)) for step in sorted(rng.choices(range(1, 75), k=20))]
    rows, run = disturbed(made(tmp_path/"killed"), 100, kills, print, limit=3000)
    assert len(run.killed) == 20 and run.warned()[0], "a sampler was killed, and made anew"
    alike(rows, want)


@pytest.mark.parametrize("error, made", [(TimeoutError("the judge did not answer"), 1), (RankSilent("no answer"), 2),
                                         (RankLost("rank 1 died"), 2), (ConnectionError("no such judge"), 1)], ids=repr)
def test_another_pool_is_made_for_ranks_that_are_lost_not_for_a_service_of_the_loop(monkeypatch, error, made):
    monkeypatch.setattr(restarts, "disconnect", lambda: None)
    pools = []
    class Pool:
        def __init__(self): pools.append(self)
        def close(self): pass
    def loop(pool):
        yield dict(step=0)
        if len(pools) == 1: raise error
    def run(): return list(restarts.restarted(loop, Pool))
    if made == 1:
        with pytest.raises(type(error), match=str(error)): run()
    else:
        with pytest.warns(UserWarning, match="a new pool resumes"): assert run() == [dict(step=0)]
    assert len(pools) == made


@pytest.mark.parametrize("error", [TimeoutError("starting the ranks: no answer"), ConnectionError("no Ray")], ids=repr)
def test_a_pool_that_is_lost_while_it_starts_is_made_again(monkeypatch, error):
    monkeypatch.setattr(restarts, "disconnect", lambda: None)
    tries = []
    def make():
        tries.append(1)
        if len(tries) == 1: raise error
        return here
    with pytest.warns(UserWarning, match="no pool could be made: .*; a new pool resumes"):
        assert list(restarts.restarted(lambda pool: iter([dict(step=0)]), make)) == [dict(step=0)]
    assert len(tries) == 2


def offered(*errors):
    "Makers of pools: each raises its error when it is first asked. And who was asked."
    asked, left = [], dict(enumerate(errors))
    def maker(n):
        def make():
            asked.append(n)
            if left.get(n): raise left.pop(n)
            return here
        return make
    return [maker(n) for n in range(len(errors))], asked


def one_step(pool): yield dict(step=0)


def test_a_head_that_is_not_reached_ends_no_run_that_has_smaller_pools(monkeypatch):
    "With one maker it is tried again, too."
    monkeypatch.setattr(restarts, "disconnect", lambda: None)
    makers, asked = offered(ConnectionError("no Ray at 10.0.0.1:6379"), None)
    class Lost:
        def close(self): pass
    pools = [Lost()]
    def first(): return pools.pop() if pools else makers[0]()
    def loop(pool):
        if isinstance(pool, Lost): raise RankLost("rank 1 died")
        yield dict(step=0)
    with pytest.warns(UserWarning, match="10.0.0.1:6379; the next smaller pool is tried"):
        assert list(restarts.restarted(loop, [first, makers[1]])) == [dict(step=0)]
    assert asked == [0, 1]


def test_a_process_that_is_started_again_takes_what_is_left(monkeypatch):
    "Its machines may be gone with the process before it. A first one starts with what was asked for, or not at all."
    full = RuntimeError("RayPool: 16 × (1 CPU) could not be had")
    for resumes, taken in (("0", [0]), ("1", [0, 1])):
        monkeypatch.setenv("RLBLOCKS_RESUMES", resumes)
        makers, asked = offered(full, None)
        if taken == [0]:
            with pytest.raises(RuntimeError, match="could not be had"): list(restarts.restarted(one_step, makers))
        else:
            with pytest.warns(UserWarning, match="the next smaller pool is tried"):
                assert list(restarts.restarted(one_step, makers)) == [dict(step=0)]
        assert asked == taken


def test_an_error_without_words_is_said_by_its_name(monkeypatch):
    monkeypatch.setattr(restarts, "disconnect", lambda: None)
    makers, _ = offered(RankLost())
    with pytest.warns(UserWarning, match=r"step 0: RankLost\(\); a new pool resumes"):
        assert list(restarts.restarted(one_step, makers[0])) == [dict(step=0)]


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
    wait_until(lambda: gone(run.stdout.strip()), 60)
    assert run.returncode == -signal.SIGKILL and gone(run.stdout.strip())


def gone(pid):
    "Whether a process has ended; nobody may have taken note."
    stat = Path(f"/proc/{pid}/stat")
    try: return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError: return True


IMPORTS = """
import sys
from rlblocks.people.command import command_line
from rlblocks.placement.restarts import supervise
slowly = "import sys, time; sys.stdin.readline(); from rlblocks.placement.restarts import end_with_parent; " \\
    "end_with_parent(); print('it goes on', flush=True); time.sleep(600)"
supervise([sys.executable, "-c", "import os; print(os.getpid(), flush=True); " + slowly])
"""


def test_a_supervisor_that_ends_while_modules_are_imported_takes_the_loop_along():
    "The process it has started is nobody's child when it first asks whose it is."
    supervisor = subprocess.Popen([sys.executable, "-c", IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    child = supervisor.stdout.readline().strip()
    supervisor.kill()
    supervisor.wait()
    supervisor.stdin.write("go on\n")
    supervisor.stdin.close()
    wait_until(lambda: gone(child), 120)
    assert gone(child) and supervisor.stdout.read() == ""


def test_a_signal_is_sent_once(monkeypatch):
    "One comes while the process starts, another one while the first is sent."
    sent = []
    class Process:
        def __init__(self, *_, **__): os.kill(os.getpid(), signal.SIGINT)
        def send_signal(self, number):
            sent.append(number)
            if len(sent) == 1: os.kill(os.getpid(), signal.SIGTERM)
        def wait(self): return -sent[0]
    monkeypatch.setattr(subprocess, "Popen", Process)
    assert supervise(["loop"]) == 128 + signal.SIGINT and sent == [signal.SIGINT, signal.SIGTERM]


def as_module(*words):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("place, text", [("nope:loop", "no module 'nope'"), ("json:loop", "has no function 'loop'"),
                                         ("nope.ipynb:loop", "cannot read nope.ipynb")])
@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse")
def test_a_loop_that_does_not_exist_is_told_in_a_line(place, text, capsys):
    assert command_line(["run", place]) == 2
    assert text in (said := capsys.readouterr().err) and said.count("\n") == 1, said


@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse")
def test_the_command_is_a_module_and_says_in_a_line_what_it_lacks():
    run = as_module("rlblocks", "run", "nope:loop")
    assert run.returncode == 2 and "no module 'nope'" in run.stderr and run.stderr.count("\n") == 1, run.stderr


def test_a_module_that_a_loop_misses_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path/"missing.py").write_text("import not_there\ndef loop(pool): yield {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"): command_line(["run", "missing:loop"])


def test_the_doctor_is_a_module():
    run = as_module("rlblocks.placement.doctor", "--help")
    assert run.returncode == 0 and "usage: rlblocks doctor" in run.stdout and not run.stderr


@pytest.mark.parametrize("words, says", [(["--cluster", "ray://head:10001"], "is Ray's client"),
                                         (["--folder", "not/there"], "into the folder .*/not/there: No such file")])
def test_what_the_doctor_cannot_look_at_is_said_in_a_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command_line(["doctor", *words]) == 1
    *_, said = capsys.readouterr().out.splitlines()        # behind what there is to say of this machine
    assert re.match(f"WRONG .*{says}", said), said


def test_who_waits_for_a_cluster_that_says_nothing_leaves_it(monkeypatch):
    import ray
    from rlblocks.placement import cluster
    left = []
    def silent(_): raise ray.exceptions.GetTimeoutError("no answer")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append("ray"))
    monkeypatch.setattr(cluster, "check_token", silent)
    with pytest.raises(TimeoutError): cluster.connect(cluster.Cluster(address="auto"))
    assert left == ["ray"]


CALLS = """
import json, sys, time
import ray
ray.init(**json.loads(sys.argv[1]))
print("ready", flush=True)
while True:
    ray.get(ray.put(bytes(1 << 20)))
    time.sleep(.1)
"""


@pytest.mark.parametrize("who", ["raylet", *rarely("gcs_server")])      # the latter is waited for, 10 s
def test_ray_ends_a_driver_with_the_code_of_any_error(who, tmp_path):
    "So who starts a loop again has to be told when an error was the loop's own (`ended_by_itself`)."
    folder, seen = tempfile.mkdtemp(prefix="ray"), {}
    driver = subprocess.Popen([sys.executable, "-c", CALLS, json.dumps(options(folder))], env=os.environ | ENV,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout.readline() == "ready\n"
        seen = family(driver.pid)
        end([x for x, name in seen.items() if name == who])
        assert driver.wait(60) == 1
    finally:
        end(family(driver.pid) | seen)
        driver.wait()
        shutil.rmtree(folder, ignore_errors=True)


STRANGER = """
import sys, time
import ray
start = time.monotonic()
try: ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], logging_level="ERROR", log_to_driver=False)
except Exception as e: print("refused", e, f"after {time.monotonic() - start:.1f} s", flush=True)
else: print("let in")
"""


@pytest.mark.long
def test_three_hosts_and_one_that_is_cut_off(tmp_path):
    """GRPO and PPO over network namespaces, with a token: the numbers of one process. A host that is cut off is heard
    in time, and the run goes on with what is left; when its network is back its Ray ends itself. Who has no token, or
    another one, is refused."""
    if why := why_not(): pytest.skip(why)
    with Hosts(3) as hosts:
        out, address = tmp_path/"driver.txt", f"{hosts.address(0)}:{hosts.port}"
        driver = hosts.run(0, [sys.executable, str(ROOT/"tests"/"ray_hosts.py"), address, str(tmp_path)], out=out)
        hosts.running.append(driver)
        wait_until(lambda: (tmp_path/"cut").exists() or driver.poll() is not None, 240)
        assert driver.poll() is None, out.read_text()[-3000:]
        hosts.cut(2)
        cut_at = time.time()
        envs = dict(none=dict(RAY_AUTH_MODE="disabled"), other=dict(RAY_AUTH_TOKEN="f"*64), same={})
        strangers = [hosts.run(1, [sys.executable, "-c", STRANGER, address, hosts.address(1)],
                               out=tmp_path/f"{name}.txt", **env) for name, env in envs.items()]
        hosts.running += strangers
        assert driver.wait(300) == 0, out.read_text()[-3000:]
        for stranger in strangers: stranger.wait(120)
        hosts.join(2)
        assert hosts.running[2].wait(60) != 0, "its raylet aborts, and `ray start --block` with it"
    said = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    def of(what): return next(x[what] for x in said if what in x)       # warnings stand between
    assert of("nodes") == [f"10.88.0.{i}" for i in (1, 2, 3)]
    same(of("loops"), loops(here), "three hosts", 1e-10)
    assert "(node 10.88.0." in of("died") and "out of luck" in of("died"), "its log is on another host"
    rows = [x["row"] for x in said if "row" in x]
    same(rows, [{k: float(v) for k, v in row.items()} for row in loops(here, tmp_path/"alone", 12)], "cut off", 1e-10)
    heard = next(x["at"] for x in said if "a new pool resumes" in x.get("warning", ""))
    print(f"a host that is cut off is heard after {heard - cut_at:.1f} s")
    assert heard - cut_at < 30, "15 s are promised on a machine that is idle; Ray's defaults take 63 s"
    heard_by = {name: (tmp_path/f"{name}.txt").read_text() for name in envs}
    assert "let in" in heard_by["same"], heard_by
    for name in ("none", "other"):
        assert "refused" in heard_by[name] and re.search("(?i)unauthenticated|auth.*token", heard_by[name]), heard_by
        seconds = float(re.findall(r"after (\S+) s", heard_by[name])[-1])
        print(f"token {name}: refused after {seconds} s")
        assert seconds < 40, "20 s are promised on a machine that is idle"


def wait_until(true, seconds):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.05)


def made(folder):
    folder.mkdir()
    return folder
