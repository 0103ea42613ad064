"""SIGKILL to any process of a run on a Ray cluster, at moments drawn from the run; the numbers of the run that was left
alone.

    .venv/bin/python benchmarks/raykills.py [--loop grpo] [--steps 100] [--kills 20] [--seed 0] [--out FOLDER]

GRPO, or the asynchronous `async_grpo`, in float64 on three ranks of one machine: two train with FSDP2, one samples and
is made anew when it dies. Anybody may be killed: a rank, Ray's raylet, its control store and its helpers, the driver
itself. First a kind is drawn, then one of the kind. A kill waits until what the one before has brought about is over,
and a whole step has run since: it hits the run, and not its start, nor what was about to end. For that the last quarter
of the steps has none of its own. The driver is supervised as `rlblocks run --restarts` does it: when it ends from
outside, another one resumes. Steps that come again after a resume are compared as well. The asynchronous loop promises
less: every step comes, but what was under way is answered by the weights of the save, so from the first loss on its
numbers are others. results/raykills_cpu.json, and for the asynchronous loop raykills_async_grpo_cpu.json, say of each
kill what followed before the next one.
"""
import argparse
import json
import random
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests"))

from machine import machine
from ray_kills import LOOPS, anybody, disturbed, own_driver, undisturbed


def followed(kill, run):
    "What came of a kill."
    anew, pools, _ = run.warned()
    of_rank = f"pid {kill['pid']})"
    if any(of_rank in line for line in anew): return "the rank was made anew, and its part repeated"
    if any(of_rank in line for line in pools): return "a new pool resumed"
    later = [x["driver"] for x in run.killed if x["second"] > kill["second"]]
    if [*later, run.drivers()][0] > kill["driver"]: return "a new driver resumed"
    return "nothing"


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--loop", default="grpo", choices=LOOPS)
    words.add_argument("--steps", type=int, default=100)
    words.add_argument("--kills", type=int, default=20)
    words.add_argument("--seed", type=int, default=0, help="of the kills and of the loop")
    words.add_argument("--limit", type=float, default=3000.)
    words.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    given = words.parse_args()
    rng = random.Random(given.seed)
    kills = [(n, anybody(rng)) for n in sorted(rng.choices(range(1, given.steps*3//4), k=given.kills))]
    driver = partial(own_driver, loop=given.loop, seed=given.seed)
    def say(text): print(text, flush=True)
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as folder:
        want = {row["step"]: row for row in undisturbed(alone, given.steps, driver)[0]}
        say(f"left alone: {len(want)} steps")
        rows, run = disturbed(folder, given.steps, kills, say, given.limit, given.seed, driver)
        anew, pools, drivers = map(len, run.warned())
        unlike = [row["step"] for row in rows if str(row) != str(want[row["step"]])]       # NaN is NaN
        found = dict(machine=machine() | dict(ray=version("ray")), loop=given.loop, steps=given.steps,
                     seconds=run.now()["second"], complete={row["step"] for row in rows} == want.keys(),
                     rows_unlike=unlike, steps_shown_again=len(rows) - given.steps, drivers=1 + drivers,
                     pools_after_a_loss=pools, ranks_made_anew=anew,
                     kills=[kill | dict(followed=followed(kill, run)) for kill in run.killed])
    for kill in found["kills"]: say(kill)
    say({k: x for k, x in found.items() if k != "kills"})
    name = "raykills_cpu.json" if given.loop == "grpo" else f"raykills_{given.loop}_cpu.json"
    (given.out/name).write_text(json.dumps(found, indent=1) + "\n")
    odd = unlike if given.loop == "grpo" else []
    return not found["complete"] or len(odd) > 0 or len(run.killed) < given.kills or not anew


if __name__ == "__main__": sys.exit(main())
