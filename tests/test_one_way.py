"One optimizer step: how many modules it goes through, and how deep it is."
import sys
from pathlib import Path

import pytest
import rlblocks
import tiny
import torch
from rlblocks import Policy, gather_logprobs, here, ppo_loss

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


# Modules of floors 2 to 4, and frames of theirs: at the third step, and at the first, which checks the closure. An
# adapter is an engine on another one's weights; with `measure=` the loss sees what a function makes of the logits. At
# most 12 of each; these numbers only shrink. Floors below are not counted: what `arithmetic` does inside is its own.
MOST = {"third": (12, 11), "first": (12, 12), "third, adapter": (12, 12), "first, adapter": (12, 12),
        "third, measure": (12, 11), "first, measure": (12, 12)}


@pytest.fixture(scope="module")
def steps():
    "Of the engine room, floors 2 to 4: what blocks below it call is theirs."
    found = {}
    for how, name in (({}, ""), (dict(lora=dict(r=2)), ", adapter"), ({}, ", measure")):
        policy = here.place(Policy, tiny.model(), lr=1e-3, device="cpu", **how)
        b = tiny.rows(dtype=torch.float32)
        asks = dict(measure=lambda logits, tokens: gather_logprobs(logits, tokens)) if name == ", measure" else {}
        def loss(out, b, read="measured" if asks else "logprobs"):
            return ppo_loss(getattr(out, read), b.ref_logprobs, b.advantages, b.mask, denom=b.n_tokens)
        def step(policy=policy, b=b, loss=loss, asks=asks): policy.step(b, loss, **asks)
        first, _, third = (traced(step) for _ in range(3))
        found |= {f"first{name}": first, f"third{name}": third}
    return found


@pytest.mark.parametrize("which", MOST)
def test_a_step_is_shallow(steps, which):
    "No function of one object is handed to another only to call back up."
    (modules, deepest), (most, deep) = steps[which], MOST[which]
    assert deepest[0] == "models/policy.Policy.step" and len(deepest) <= deep, deepest
    assert not any("lambda" in frame for frame in deepest), deepest
    assert len(modules) <= most, sorted(modules)
