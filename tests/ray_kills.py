"""A run on a cluster of one machine whose processes are killed, any of them, and what is left of its numbers.

python tests/ray_kills.py FOLDER STEPS RAY     # one driver: GRPO to its end, a line of JSON for each step"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import RAY_TOKEN, ROOT

PATHS = [str(ROOT/"tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
ENV = RAY_TOKEN | dict(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
                      TOKENIZERS_PARALLELISM="false", RAY_gcs_rpc_server_reconnect_timeout_s="10",
                      PYTHONPATH=os.pathsep.join(PATHS))


def options(folder):
    "A small Ray of one's own; its sockets want a short path."
    return dict(num_cpus=8, include_dashboard=False, object_store_memory=150_000_000, _temp_dir=folder,
                logging_level="ERROR", log_to_driver=False)


class Both:
    "Two ranks that train, and one that samples and is made anew when it dies."
    rank = 0

    def __init__(self, cluster):
        from rlblocks import RayPool, Rollout
        from rlblocks.placement.pools import Pools
        self.train = RayPool(2, cluster=cluster, timeout=120., grace=5., name="train")
        self.sample = RayPool(1, cluster=cluster, timeout=120., world=False, restarts=8, name="sample")
        self.pools = Pools(lambda make, kw: self.sample if make is Rollout else self.train)

    def place(self, make, /, *args, **kwargs): return self.pools.place(make, *args, **kwargs)
    def close(self):
        for pool in (self.sample, self.train): pool.close()


def tiny_grpo(pool, steps, checkpoint=None):
    "Of a tiny model, cut over the ranks."
    import spmd_loops
    from rlblocks import Checkpoint, Prompts, here, loop_from
    grpo = loop_from(f"{ROOT}/tutorials/grpo.ipynb:grpo")
    return grpo(pool, Prompts(spmd_loops.ASKED, spmd_loops.Digits()), spmd_loops.prefers, prompts=3, group_size=2,
                minibatches=1, max_tokens=4, model=spmd_loops.net, steps=steps, micro_tokens=64,
                engine=spmd_loops.steadily if pool is here else spmd_loops.sharded,
                checkpoint=checkpoint or Checkpoint())


def drive(folder, steps, ray_folder):
    "The loop, resumed where a driver before this one was killed."
    import torch
    from rlblocks import Checkpoint, Cluster, restarted
    torch.set_num_threads(1)
    def loop(pool): return tiny_grpo(pool, steps, Checkpoint(Path(folder)/"run", every=2))
    with open(Path(folder)/"rows.jsonl", "a") as file:
        for row in restarted(loop, lambda: Both(Cluster(options=options(ray_folder), ready=60.)), restarts=50):
            file.write(json.dumps({k: float(v) for k, v in row.items()}) + "\n")
            file.flush()


# -- who is killed, and when

def processes():
    "pid → (parent, name, when it started)"
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: text = stat.read_text()
        except OSError: continue
        rest = text[text.rindex(")") + 2:].split()
        found[int(stat.parent.name)] = int(rest[1]), text[text.index("(") + 1:text.rindex(")")], int(rest[19])
    return found


def family(pid):
    "(pid, when it started) → name of a process and of all that descend from it."
    now = processes()
    mine = {pid} & now.keys()
    while more := {p for p, (parent, *_) in now.items() if parent in mine} - mine: mine |= more
    return {(p, now[p][2]): now[p][1] for p in mine}


def end(seen):
    "End those of the processes that are still the same."
    now = processes()
    for pid, start in seen:
        if pid in now and now[pid][2] == start:
            try: os.kill(pid, signal.SIGKILL)
            except ProcessLookupError: pass


def steps_in(folder):
    file = Path(folder)/"rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def own_driver(folder, steps, ray): return [sys.executable, __file__, folder, steps, ray]


def the_command(folder, steps, ray):
    "The same loop on two ranks by `rlblocks run`, which resumes twice."
    flags = dict(pool="ray", ranks=2, restarts=2, folder=f"{folder}/run", every=2, rows=f"{folder}/rows.jsonl",
                 steps=steps) | {"ray.grace": 5, "ray.timeout": 120, "ray.name": "train", "cluster.ready": 60,
                                 "cluster.options": json.dumps(options(ray))}
    return [sys.executable, "-m", "rlblocks.people.command", "run", "ray_kills:tiny_grpo",
            *(f"--{k}={x}" for k, x in flags.items())]


class Run:
    "Drivers, one after another until the run is done."
    def __init__(self, folder, steps, log=lambda text: None, driver=own_driver):
        self.folder, self.steps, self.log, self.seen, self.drivers = Path(folder), steps, log, {}, 0
        self.command = driver
        self.began, self.killed, self.ended = time.monotonic(), [], []
        self.start()

    def start(self):
        self.drivers, self.ray = self.drivers + 1, tempfile.mkdtemp(prefix="ray")
        self.out = open(self.folder/f"driver-{self.drivers}.txt", "w")
        self.driver = subprocess.Popen(list(map(str, self.command(self.folder, self.steps, self.ray))), cwd=ROOT,
                                       env=os.environ | ENV, stdout=self.out, stderr=self.out)

    def look(self):
        "Whether it is done; a driver that died is followed by another."
        self.seen |= family(self.driver.pid)
        if (code := self.driver.poll()) is None: return False
        self.clean()
        if code == 0: return True
        self.ended.append(dict(code=code, **self.now()))
        self.log(f"the driver ended with {code}; another one resumes")
        self.start()
        return False

    def clean(self):
        end(self.seen)
        self.seen = {}
        self.out.close()
        shutil.rmtree(self.ray, ignore_errors=True)

    def close(self):
        if self.driver.poll() is None: self.seen |= family(self.driver.pid)
        end(self.seen)
        self.driver.wait()
        self.clean()

    def kill(self, choose):
        "One of the driver's processes, itself included. False while there is none such."
        now = family(self.driver.pid)
        self.seen |= now
        if (chosen := choose(now)) is None: return False
        (pid, start), name = chosen
        what = dict(name=name, pid=pid, driver=self.drivers, **self.now())
        end([(pid, start)])
        self.killed.append(what)
        self.log("rows {rows}, second {second}: {name} ({pid}) killed".format(**what))
        return True

    def now(self): return dict(rows=len(steps_in(self.folder)), second=round(time.monotonic() - self.began, 1))

    def warned(self):
        "What drivers said of ranks that were made anew, and of pools; which rank, where it was one."
        said = "".join(file.read_text() for file in sorted(self.folder.glob("driver-*.txt")))
        lines = [line for line in said.splitlines() if "UserWarning" in line]
        return [line for line in lines if "made anew" in line], [line for line in lines if "a new pool resumes" in line]


def a_rank(now):
    "The first rank of a pool: Ray's own helpers are called ray:: as well, but only a rank has been given a RANK."
    return next((x for x in by_age(now) if x[1].startswith("ray::") and "RANK" in given(x[0][0])), None)


def given(pid):
    "Names of the environment variables with which a process was started; none of one that is gone."
    try: text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError: return set()
    return {x.partition(b"=")[0].decode(errors="replace") for x in text.split(b"\0")}


def the_driver(now): return by_age(now)[0]      # all others descend from it


def by_age(now): return sorted(now.items(), key=lambda x: x[0][1])     # numbers of processes start again at the end


def disturbed(folder, steps, kills, log=print, limit=3600., seed=0, driver=own_driver):
    """A run with `kills`, pairs (step, chooser): each waits until so many steps have been shown, and a moment more.

    Gives the rows, in the order in which they were shown, and the run."""
    rng, run = random.Random(seed), Run(folder, steps, log, driver)
    waiting, end_at = list(kills), time.monotonic() + limit
    try:
        while not run.look():
            if time.monotonic() > end_at: raise TimeoutError(f"no end after {limit} s; {run.now()}, {run.killed}")
            time.sleep(.05)
            if not waiting or len(steps_in(folder)) < waiting[0][0]: continue
            time.sleep(rng.uniform(0., .5))
            if run.driver.poll() is None and run.kill(waiting[0][1]): waiting.pop(0)
    finally: run.close()
    return steps_in(folder), run


def anybody(rng):
    "Any process of the run: its driver, Ray's own, a rank."
    def choose(now): return rng.choice(by_age(now))
    return choose


def undisturbed(folder, steps):
    "The same run, left alone."
    return disturbed(folder, steps, [])


if __name__ == "__main__": drive(sys.argv[1], int(sys.argv[2]), sys.argv[3])
