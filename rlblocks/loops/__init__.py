"""The loops of the tutorials, to import, to run as commands, and to copy: each module is the loop cell of a notebook.

A loop is a generator function `loop(pool, data, …, *, model, lr=…, checkpoint=Checkpoint())` that yields a dict a step."""
from rlblocks.loops.agent_grpo import agent_grpo
from rlblocks.loops.async_grpo import async_grpo
from rlblocks.loops.best_of_n import best_of_n
from rlblocks.loops.distill import distill
from rlblocks.loops.dpo import dpo
from rlblocks.loops.grpo import grpo
from rlblocks.loops.grpo_ptx import grpo_ptx
from rlblocks.loops.kto import kto
from rlblocks.loops.offline import offline
from rlblocks.loops.online_dpo import online_dpo
from rlblocks.loops.ppo import ppo
from rlblocks.loops.reward_model import reward_model
from rlblocks.loops.rlhf import rlhf
from rlblocks.loops.sft import sft
from rlblocks.loops.tool_grpo import tool_grpo

__all__ = [
    "agent_grpo", "async_grpo", "best_of_n", "distill", "dpo", "grpo", "grpo_ptx", "kto", "offline", "online_dpo",
    "ppo", "reward_model", "rlhf", "sft", "tool_grpo"]
