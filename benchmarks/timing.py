"""What `timed` costs a step: marks, clocks, counters and the dict, of a GRPO step that is as small as a step gets.

    python benchmarks/timing.py [--steps 12] [--rounds 10] [--out benchmarks/results]

Two ways to ask, since the cost is smaller than what steps differ by:

  apart     a timer around a step with ten marks in which nothing happens; it does not depend on the model, so it is the
            number to compare with a step of one's own. Also with a timeline, and a mark that nobody listens to
  together  runs with and without a timer in turns, a pair of steps each: the median of their differences, ± the notch
            of a box plot (1.57 IQR/√n), in which the median of equal runs would lie

Seconds are of processor time, one thread: the clock's are what other work on the machine leaves. Promised is that
the timer, with a timeline, takes at most 1 % of the step. A promise that is not kept is printed as MISSED, and the exit
code is 1."""
import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import process_time

import torch

sys.path[:0] = [str(Path(__file__).parents[1]/"tests"), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from machine import machine  # noqa: E402
from rlblocks import Prompts, here, timed  # noqa: E402
from rlblocks.engines.phases import phase  # noqa: E402
from rlblocks.loops import grpo  # noqa: E402
from rlblocks.tracking.timing import StepTimer  # noqa: E402
from tiny import model, rows, tokenizer  # noqa: E402

WANTED = .01


def reward(prompts, completions, **_): return [float(len(set(text.split()))) for text in completions]


def loop(steps):
    prompts = Prompts([dict(prompt=f"w{i} w{i + 1}") for i in range(2, 12)], tokenizer(), template="{prompt}")
    return grpo(here, prompts, reward, model=model(), tokenizer=tokenizer(), lr=1e-2, steps=steps, prompts=8,
                group_size=8, minibatches=4, max_tokens=16)


def together(steps, rounds):
    "(seconds of a plain step, those that a timed one takes more, the notch of these), over pairs of the same step."
    plain, more = [], []
    for _ in range(rounds):
        runs, ends = [loop(steps), timed(loop(steps))], [[], []]
        for step in range(steps):
            for k in (0, 1) if step % 2 else (1, 0):        # the one that runs second has warmer caches
                start = process_time()
                next(runs[k])
                ends[k].append(process_time() - start)
        for run in runs: run.close()
        plain += ends[0][2:]                                # the first ones make the models
        more += [b - a for a, b in zip(ends[0][2:], ends[1][2:], strict=True)]
    first, middle, third = statistics.quantiles(more)
    return statistics.median(plain), middle, 1.57*(third - first)/len(more)**.5


def apart(n=2000, rounds=5, marks=10):
    "Seconds of a timer around a step with so many marks, the same with a timeline, and of a mark that nobody hears."
    class Nothing:
        @phase("update")
        def step(self, batch): pass
    nothing, batch, found = Nothing(), rows(), dict(timer=[], timeline=[], unheard=[])
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, where in (("timer", None), ("timeline", folder)):
                with StepTimer(folder=where) as timer:
                    start = process_time()
                    for step in range(n):
                        timer.begin()
                        for _ in range(marks): nothing.step(batch)
                        timer.end(dict(step=step), batch)
                    found[name].append((process_time() - start)/n)
            start = process_time()
            for _ in range(marks*n): nothing.step(batch)
            found["unheard"].append((process_time() - start)/marks/n)
    return {name: min(seconds) for name, seconds in found.items()}


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--steps", type=int, default=12)
    words.add_argument("--rounds", type=int, default=10)
    words.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    given = words.parse_args()
    torch.set_num_threads(1)
    alone, (plain, more, notch) = apart(), together(given.steps, given.rounds)
    print(f"a step of GRPO on a toy model: {1e3*plain:.1f} ms; timed {1e6*more:+.0f} ± {1e6*notch:.0f} µs")
    timer, timeline, unheard = (1e6*alone[k] for k in ("timer", "timeline", "unheard"))
    print(f"the timer of a step with ten marks: {timer:.0f} µs, with a timeline {timeline:.0f} µs; "
          f"a mark that nobody listens to: {unheard:.2f} µs")
    share = alone["timeline"]/plain
    print(f"wanted: at most {WANTED:.0%} of the step; got {share:.2%}{'' if share <= WANTED else ' MISSED'}")
    found = dict(step_seconds=plain, more_seconds=more, notch=notch, share=share)
    found |= {f"{k}_seconds": x for k, x in alone.items()}
    (given.out/"timing_cpu.json").write_text(json.dumps(found | dict(machine=machine()), indent=1) + "\n")
    sys.exit(share > WANTED)
