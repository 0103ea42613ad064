"Loops of tutorials that say they are GRPO's but for the line that samples."
import inspect

import pytest
from rlblocks import loops

# what stands in a loop instead of GRPO's line that samples, and what it reports instead of the length
SAMPLES = {
    "tool_grpo": (["batch = rollouts(rollout, environment, data.take(prompts), group_size=group_size, seed=(seed, "
                   "step))"],
              ["yield dict(step=step, reward=batch.scores.mean().item(), "
               "calls=batch.n_turns.float().mean().item() - 1,", "**metrics)"]),
    "agent_grpo": (["with Endpoint(rollout) as at:",
                        "batch = at.run(agent, data.take(prompts), group_size=group_size, seed=(seed, step), "
                        "deadline=deadline)"], [])}


def body(name):
    "Lines of the loop, without its signature."
    text = inspect.getsource(getattr(loops, name)).split("\n):\n", 1)[1]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_loop_is_grpos_but_for_the_line_that_samples(name):
    instead, reports = SAMPLES[name]
    want = body("grpo")
    at = next(i for i, line in enumerate(want) if line.startswith("batch = rollout.generate("))
    end = next(i for i, line in enumerate(want) if line.startswith("yield "))
    out = want[:at] + (instead or want[at:at + 1]) + want[at + 1:end] + (reports or want[end:end + 2]) + want[end + 2:]
    assert body(name) == out
