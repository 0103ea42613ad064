"One optimizer step: how many modules it goes through, and how deep it is."
import sys
from pathlib import Path

import pytest
import rlblocks
import tiny
import torch
from rlblocks import Policy, here, ppo_loss

ROOT = str(Path(rlblocks.__file__).parent)
ROOMS = ("data", "engines", "models", "samplers", "rollout", "graders", "environments", "endpoint", "checkpoint",
         "placement")


def traced(f):
    "Modules of floors 2 to 4 that had a frame, and the deepest stack of such frames, outermost first."
    modules, deepest = set(), []
    def ours(frame):
        file = frame.f_code.co_filename
        return Path(file).relative_to(ROOT).with_suffix("").as_posix() if file.startswith(ROOT) else ""
    def see(frame, event, arg):
        if event != "call" or not ours(frame).startswith(ROOMS): return
        modules.add(ours(frame))
        stack = []
        while frame is not None:
            if ours(frame).startswith(ROOMS): stack.append(f"{ours(frame)}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        if len(stack) > len(deepest): deepest[:] = stack[::-1]
    sys.setprofile(see)
    try: f()
    finally: sys.setprofile(None)
    return modules, deepest


@pytest.fixture(scope="module")
def step():
    """Of the engine room, floors 2 to 4: what blocks below it call is theirs.

    The third step, on which the closure is not checked."""
    policy, b = here.place(Policy, tiny.model(), lr=1e-3, device="cpu"), tiny.rows(dtype=torch.float32)
    def loss(out, b): return ppo_loss(out.logprobs, b.ref_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    for _ in range(2): policy.step(b, loss)
    return traced(lambda: policy.step(b, loss))


def test_a_step_is_shallow(step):
    "No function of one object is handed to another only to call back up."
    _, deepest = step
    assert deepest[0] == "models/policy.Policy.step" and len(deepest) <= 12, deepest
    assert not any("lambda" in frame for frame in deepest), deepest


def test_models_and_engines_are_few(step):
    modules = {m for m in step[0] if m.startswith(("engines", "models"))}
    assert len(modules) <= 12, sorted(modules)


def test_all_rooms_are_few(step):
    assert len(step[0]) <= 12, sorted(step[0])
