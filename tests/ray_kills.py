"""A run on a cluster of one machine whose processes are killed, any of them, and what is left of its numbers.

python tests/ray_kills.py drive FOLDER STEPS RAY LOOP SEED    # GRPO to its end, a line of JSON for each step, in a
                                # process that is made again when it is ended from outside; `once`: that process"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
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
        from rlblocks.placement.place import Pools
        self.train = RayPool(2, cluster=cluster, timeout=120., grace=5., name="train")
        self.sample = RayPool(1, cluster=replace(cluster, env=dict(SAMPLES="1")), timeout=120., world=False, restarts=8,
                              name="sample")
        self.pools = Pools(lambda make, kw: self.sample if make is Rollout else self.train)

    def place(self, make, /, *args, **kwargs): return self.pools.place(make, *args, **kwargs)
    def close(self):
        for pool in (self.sample, self.train): pool.close()


LOOPS = dict(grpo="grpo.ipynb", async_grpo="async.ipynb")


def tiny_grpo(pool, steps, checkpoint=None, loop="grpo", seed=0):
    "Of a tiny model, cut over the ranks."
    import spmd_loops
    from rlblocks import Checkpoint, Prompts, here, loop_from
    grpo = loop_from(f"{ROOT}/tutorials/{LOOPS[loop]}:{loop}")
    return grpo(pool, Prompts(spmd_loops.ASKED, spmd_loops.Digits()), spmd_loops.prefers, prompts=3, group_size=2,
                minibatches=1, max_tokens=4, model=spmd_loops.net, steps=steps, micro_tokens=64, seed=seed,
                engine=spmd_loops.steadily if pool is here else spmd_loops.sharded,
                checkpoint=checkpoint or Checkpoint())


def on_rank(rank, ranks, folder, steps):
    "The same on a rank of SpmdPool, which gives the bits of as many ranks of Ray."
    from rlblocks import SpmdPool
    with SpmdPool(timeout=300.) as pool: rows = plain(tiny_grpo(pool, steps))
    if rank == 0: (folder/"rows.json").write_text(json.dumps(rows))


CLOCK = {"start", "asked", "idle", "seconds"}      # what the asynchronous loop says of time


def plain(rows): return [{k: float(v) for k, v in row.items() if k not in CLOCK} for row in rows]


def drive(*words):
    "As `rlblocks run --restarts` does."
    from rlblocks.placement.restarts import supervise
    return supervise([sys.executable, __file__, "once", *words], restarts=50)


def once(*words):
    "The loop, resumed where a process before this one was killed. An error of its own is final, as for the command."
    from rlblocks.placement.restarts import end_with_parent, ended_by_itself
    end_with_parent()
    return ended_by_itself(lambda: resumed(*words))


def resumed(folder, steps, ray_folder, loop_name, seed):
    import torch
    from rlblocks import Checkpoint, Cluster, restarted
    torch.set_num_threads(1)
    def loop(pool): return tiny_grpo(pool, int(steps), Checkpoint(Path(folder)/"run", every=2), loop_name, int(seed))
    with open(Path(folder)/"rows.jsonl", "a") as file:
        for row in restarted(loop, lambda: Both(Cluster(options=options(ray_folder), ready=60.)), restarts=50):
            file.write(json.dumps(plain([row])[0]) + "\n")
            file.flush()
    return 0


# -- who is killed, and when

def processes():
    "pid → (parent, name, when it started)"
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: text = stat.read_text()
        except OSError: continue
        rest = text[text.rindex(")") + 2:].split()
        if rest[0] == "Z": continue        # it has ended, and nobody has asked how
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
    from rlblocks import without_times
    file = Path(folder)/"rows.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [without_times(json.loads(line)) for line in lines if line.endswith("}")]


def own_driver(folder, steps, ray, loop="grpo", seed=0):
    return [sys.executable, __file__, "drive", folder, steps, ray, loop, seed]


def the_command(folder, steps, ray, ranks=2):
    "The same loop by `rlblocks run`, which resumes twice."
    flags = dict(pool="ray", ranks=ranks, restarts=2, folder=f"{folder}/run", save_every=2, log=f"{folder}/rows.jsonl",
                 steps=steps) | {"ray.grace": 1, "ray.timeout": 120, "ray.name": "train", "cluster.ready": 60,
                                 "cluster.options": json.dumps(options(ray))}
    return [sys.executable, "-m", "rlblocks", "run", "ray_kills:tiny_grpo",
            *(f"--{k}={x}" for k, x in flags.items())]


class Run:
    "A process that supervises, all that descends from it, and what they have left."
    def __init__(self, folder, steps, log=lambda text: None, driver=own_driver):
        self.folder, self.log, self.seen, self.killed, self.ended = Path(folder), log, {}, [], []
        self.began, self.ray, self.out = time.monotonic(), tempfile.mkdtemp(prefix="ray"), self.folder/"said.txt"
        with self.out.open("w") as out:
            self.supervisor = subprocess.Popen(list(map(str, driver(folder, steps, self.ray))), cwd=ROOT,
                                               env=os.environ | ENV, stdout=out, stderr=out)

    def done(self):
        "Whether it has ended. RuntimeError, with its last words, when it ended badly."
        self.seen |= family(self.supervisor.pid)
        if (code := self.supervisor.poll()): raise RuntimeError(f"ended with {code}: {self.out.read_text()[-3000:]}")
        return code == 0

    def close(self):
        if self.supervisor.poll() is None: self.seen |= family(self.supervisor.pid)
        end(self.seen)
        self.supervisor.wait()
        shutil.rmtree(self.ray, ignore_errors=True)

    def kill(self, choose):
        "One of its processes, but for the one that supervises. False while there is none such."
        now = family(self.supervisor.pid)
        self.seen |= now
        now = {x: name for x, name in now.items() if x[0] != self.supervisor.pid}
        if (chosen := choose(now)) is None: return False
        (pid, start), name = chosen
        what = dict(name=name, kind=kind_of(chosen, now), pid=pid, driver=self.drivers(), **self.now())
        assert (pid, start) not in self.ended, f"{name} ({pid}) was killed before"
        self.ended.append((pid, start))
        end([(pid, start)])
        self.killed.append(what)
        self.log("rows {rows}, second {second}: {name} ({pid}) killed".format(**what))
        return True

    def now(self): return dict(rows=len(steps_in(self.folder)), second=round(time.monotonic() - self.began, 1))

    def warned(self):
        "What was said of ranks that were made anew, of pools and of drivers; which rank, where it was one."
        lines = [line for line in self.out.read_text().splitlines() if "UserWarning" in line]
        return [[line for line in lines if of in line] for of in ("made anew", "a new pool resumes",
                                                                  "the loop's process ended with")]

    def drivers(self): return 1 + len(self.warned()[2])


def a_rank(now):
    "The first rank of a pool: Ray's own helpers are called ray:: as well, but only a rank has been given a RANK."
    return next((x for x in by_age(now) if x[1].startswith("ray::") and "RANK" in given(x[0][0])), None)


def given(pid):
    "Names of the environment variables with which a process was started; none of one that is gone."
    try: text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError: return set()
    return {x.partition(b"=")[0].decode(errors="replace") for x in text.split(b"\0")}


def the_driver(now): return next(iter(by_age(now)), None)      # all others descend from it


def the_raylet(now): return next((x for x in by_age(now) if x[1] == "raylet"), None)


def by_age(now): return sorted(now.items(), key=lambda x: x[0][1])     # numbers of processes start again at the end


def disturbed(folder, steps, kills, log=print, limit=3600., seed=0, driver=own_driver):
    """A run with `kills`, pairs (step, chooser): each waits until so many steps have been shown, until all is well
    again after the one before (`settled`), and a moment more.

    Gives the rows, in the order in which they were shown, and the run."""
    rng, run = random.Random(seed), Run(folder, steps, log, driver)
    waiting, end_at, driver, before = list(kills), time.monotonic() + limit, 0, 0
    try:
        while not run.done():
            if time.monotonic() > end_at: raise TimeoutError(f"no end after {limit} s; {run.now()}, {run.killed}")
            time.sleep(.05)
            rows = len(steps_in(folder))
            if driver != run.drivers(): driver, before = run.drivers(), rows
            if not waiting or rows < max(before + 2, waiting[0][0]) or not settled(run): continue
            time.sleep(rng.uniform(0., .5))
            if run.kill(waiting[0][1]):
                waiting.pop(0)
                before = len(steps_in(folder))
    finally: run.close()
    return steps_in(folder), run


def settled(run):
    """Whether what the last kill entails has happened: else the next one might hit what ends anyway. A step that began
    after it has to end as well, so two more are shown. With raylet and control store the driver ends, but not at once;
    a helper may take the raylet along."""
    if not run.killed: return True
    last = run.killed[-1]
    if last["kind"] in ("loop", "raylet", "gcs_server"): return run.drivers() > last["driver"]
    return last["kind"] != "helper" or run.now()["second"] > last["second"] + 3


def anybody(rng):
    "A kind of process is drawn, and then one of the kind: Ray's helpers are many, and the loop is one."
    def choose(now):
        kinds = {}
        for x in by_age(now): kinds.setdefault(kind_of(x, now), []).append(x)
        return rng.choice(kinds[rng.choice(sorted(kinds))]) if kinds else None
    return choose


def kind_of(x, now):
    "What a process of the run is."
    (pid, _), name = x
    if x == the_driver(now): return "loop"
    if name in ("raylet", "gcs_server"): return name
    env = given(pid)
    return "sampler" if "SAMPLES" in env else "trainer" if "RANK" in env else "helper"


def undisturbed(folder, steps, driver=own_driver):
    "The same run, left alone."
    return disturbed(folder, steps, [], driver=driver)


if __name__ == "__main__": sys.exit(dict(drive=drive, once=once)[sys.argv[1]](*sys.argv[2:]))
