"""The loops of the tutorials, to import, to run as commands, and to copy: each module is the loop cell of a notebook.

A loop is a generator function `loop(pool, data, …, *, model, lr=…, checkpoint=Checkpoint())` that yields a dict a step."""
from rlblocks.loops.agent_grpo import agent_grpo
from rlblocks.loops.async_grpo import async_grpo
from rlblocks.loops.best_of_n import best_of_n
from rlblocks.loops.conditional_sft import conditional_sft
from rlblocks.loops.distill import distill
from rlblocks.loops.dpo import dpo
from rlblocks.loops.generative_reward import generative_reward
from rlblocks.loops.grpo import grpo
from rlblocks.loops.grpo_ptx import grpo_ptx
from rlblocks.loops.kto import kto
from rlblocks.loops.multi_reward import multi_reward
from rlblocks.loops.offline import offline
from rlblocks.loops.online_dpo import online_dpo
from rlblocks.loops.ppo import ppo
from rlblocks.loops.process_reward import process_reward
from rlblocks.loops.reward_model import reward_model
from rlblocks.loops.rlhf import rlhf
from rlblocks.loops.sft import sft
from rlblocks.loops.tool_grpo import tool_grpo

__all__ = [
    "agent_grpo", "async_grpo", "best_of_n", "conditional_sft", "distill", "dpo", "generative_reward", "grpo",
    "grpo_ptx", "kto", "multi_reward", "offline", "online_dpo", "ppo", "process_reward", "reward_model", "rlhf",
    "sft", "tool_grpo"]
