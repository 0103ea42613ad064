"""What `timed` costs a step: marks, clocks, counters and the dict, of a GRPO step that is as small as a step gets.

    python benchmarks/timing.py [--steps 60] [--repeat 5]

Prints the median step with and without, in turns, and what the calls of the timer take by themselves: that number does
not depend on the model, so it is the one to compare with a step of one's own."""
import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]/"tests"), str(Path(__file__).parents[1])]
from rlblocks import Prompts, here, timed  # noqa: E402
from rlblocks.engines.phases import Recorder, phase  # noqa: E402
from rlblocks.loops import grpo  # noqa: E402
from rlblocks.tracking.timing import StepTimer  # noqa: E402
from tiny import model, rows, tokenizer  # noqa: E402


def reward(prompts, completions, **_): return [float(len(set(text.split()))) for text in completions]


def loop(steps):
    prompts = Prompts([dict(prompt=f"w{i} w{i + 1}") for i in range(2, 12)], tokenizer(), template="{prompt}")
    return grpo(here, prompts, reward, model=model(), tokenizer=tokenizer(), lr=1e-2, steps=steps, prompts=8,
                group_size=8, minibatches=4, max_tokens=16)


def step_seconds(run):
    "Seconds of each step as its consumer sees them, without the first ones."
    ends = [time.perf_counter() for _ in run]
    return [b - a for a, b in zip(ends[2:], ends[3:], strict=False)]


def own_seconds(n=2000):
    "Seconds of a timer around a step with ten marks, in which nothing happens; and of a mark that nobody listens to."
    class Nothing:
        @phase("update")
        def step(self, batch): pass
    nothing, b, timer = Nothing(), rows(), StepTimer()
    with timer:
        start = time.perf_counter()
        for step in range(n):
            timer.begin()
            for _ in range(10): nothing.step(b)
            timer.end(dict(step=step))
        heard = (time.perf_counter() - start)/n
    start = time.perf_counter()
    for _ in range(10*n): nothing.step(b)
    assert Recorder().spans == []
    return heard, (time.perf_counter() - start)/(10*n)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    seconds = dict(plain=[], timed=[])
    for _ in range(given.repeat):
        seconds["plain"] += step_seconds(loop(given.steps))
        seconds["timed"] += step_seconds(timed(loop(given.steps)))
    plain, with_times = (statistics.median(x) for x in seconds.values())
    heard, unheard = own_seconds()
    print(f"a step of GRPO on a toy model: {1e3*plain:.2f} ms, timed {1e3*with_times:.2f} ms "
          f"({100*(with_times/plain - 1):+.2f} %)")
    print(f"the timer of a step with ten marks: {1e6*heard:.0f} µs, {100*heard/plain:.2f} % of that step, "
          f"{100*heard:.4f} % of one of a second; a mark that nobody listens to: {1e6*unheard:.2f} µs")
