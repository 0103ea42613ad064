"""Every estimator and loss against the peers' own functions: time, peak memory, and how both grow with B·T.

    .venv/bin/python benchmarks/algorithms.py [--rounds 15] [--only WORD] [--judged] [--threads 1] [--device cpu|cuda]
        [--out benchmarks/results]

The peers are the installed packages (`make peers`; tests/parity says how they are called), whole function against whole
function: TRL's formulas are cut out of its trainers, so its metrics and logging cost it nothing, while ours and verl's
are counted with them. Losses run forward and backward. TRL 1.16 has no PPO any more; the loop that its PPO trainer had
is written here (`trl_gae`). "gae" is every side's recurrence alone, for only verl whitens inside.

Ours and theirs are called in turn, so that other work on the machine meets all alike; medians over the rounds are
compared, and the quartiles of the ratio say how sure it is. On a busy machine use --threads 1: several threads wait for
each other in every operation, and with one it is the processor's time that is measured, not the wall's. Memory is the
highest sum of live tensors that the call itself made, as torch's allocator reports it (CUDA: max_memory_allocated):
exact on any machine, left out on a CPU where a call takes over a second. Growth is our time fitted as (B·T)^p.

Our losses are plain formulas. What is wanted of them is said at 65,536 tokens (or pairs): eager, with their metrics, at
most twice the time of the fastest peer's function with its metrics; the same function through torch.compile, the better
of two ways, ahead of every peer. All columns are shown; the peers run as they do in their trainers, not compiled.

  compiled       torch.compile(loss), and autograd runs the backward pass: two graphs. Between them torch keeps a Bool
                 for each bound that a gradient passes, and torch 2.13 writes Bools on a CPU entry by entry, .3 ms for
                 65,536 of them.
  compiled, its gradient too   torch.compile(torch.func.grad_and_value(loss)): loss, metrics and gradient are one
                 graph. It keeps nothing and reads every column once.

"on 8" in each comparison is a call with its gradient on eight tokens: what guards, dispatch and allocation take. At a
load of 1, SFT takes .05 ms as one graph and .16 as two, where the peer's whole function takes .15 at 65,536 tokens. So
little work depends on what else the machine does: at a load of 8 REINFORCE, eager, took 1.5 times its fastest peer's
time and SFT 2.2. The results come from two quiet cores (each comparison says its date and load).

Masks are those of real rows: answers of a half to all of the columns, every seventh stretch of 64 tokens not the
policy's. `torch.where` takes three times as long with a mask that flips a coin at every token, because no branch can be
predicted, and a product with the mask does not; no batch has such a mask.

Some have no peer: TRL 1.16 has dropped PPO's trainer, BCO, XPO, Nash-MD and MiniLLM, and verl and OpenRLHF never had
the last four. Theirs is then "formula", the paper's equation as one would write it in plain torch, without metrics,
weights or a mask's safety, and nothing is promised against it. PPO as a whole is verl's three functions."""
import argparse
import importlib
import json
import math
import os
import platform
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

BACKEND = "inductor"    # of torch.compile
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"tests"/"parity"))
import peers  # noqa: E402

from rlblocks.arithmetic import head, kl, logprobs, masked  # noqa: E402
from rlblocks.losses import answer_ratio, distill as distill_losses, margins  # noqa: E402
from rlblocks.losses import online as online_losses, policy as policy_losses  # noqa: E402
from rlblocks.losses import preference as preference_losses, ratio as ratio_losses, reward as reward_losses  # noqa: E402
from rlblocks.losses import selections, unpaired as unpaired_losses, value as value_losses  # noqa: E402
from rlblocks.signals import advantages, best_of, corrections, groups, teachers  # noqa: E402

LONG, WIDE, SQUARE = (8, 131_072), (128, 8_192), (1_024, 1_024)
STEP = (64, 1_024)                    # 65,536 tokens: where losses are judged
COMPILED, ONE_GRAPH = "ours, compiled", "ours, compiled, its gradient too"
FEW = {"tokens": (1, 8), "pairs": (8, 1)}  # of these a call takes what any call takes
def judged(shape): return {(shape, "fastest"): 1/2, (shape, COMPILED): 1.}


@dataclass
class Task:
    name: str
    make: callable           # (B, T, device) -> columns
    ours: callable           # columns -> result
    theirs: dict             # name of the peer's function -> columns -> result
    wrt: tuple = ()          # columns with a gradient; the result is then a loss and is differentiated
    shapes: tuple = ((128, 1_024), WIDE, SQUARE)
    promised: dict = field(default_factory=dict)  # {(shape, peer): how many times faster}
    along: str = "tokens"    # what it should be linear in: "tokens", "rows" or "pairs"


FORMULA = "formula, no peer"
# a part of its function: ours, verl's and OpenRLHF's measure clipping and KL, and so does TRL's
BARE = "trl, no metrics"
ROWWISE = "trl, no metrics, one advantage a row" # and less to read than the column that all others get
UNSAFE = "openrlhf, inf from 89 on"   # log(1 + exp(x)) as typed
ASIDE = {BARE, ROWWISE, UNSAFE, "trl, all its lines"} # shown, but not what "fastest" means
TASKS = []
def task(name, make, ours, **theirs): TASKS.append(Task(name, make, ours, theirs.pop("theirs"), **theirs))


# -- columns

def tokens(B, T, device, seed=0):
    """What a step of RL has: ragged rows, turns of tools as holes, groups of eight in order and of random sizes in
    any order."""
    g = torch.Generator().manual_seed(seed)
    normal, uniform = (lambda *s: torch.randn(*s, generator=g)), (lambda *s: torch.rand(*s, generator=g))
    turns = (uniform(B, -(-T//64)) < .85).repeat_interleave(64, 1)[:, :T]
    c = SimpleNamespace(mask=turns & (torch.arange(T) < T*(.5 + .5*uniform(B, 1))))
    c.mask[:, 0] = True
    c.mask_float = c.mask.float()
    c.logprobs = -2*uniform(B, T)
    c.old, c.ref, c.rollout = (c.logprobs + .1*normal(B, T) for _ in range(3))
    c.rewards, c.values, c.returns = normal(B, T), normal(B, T), normal(B, T)
    c.old_values = c.values + .1*normal(B, T)
    c.scores, c.baselines, c.scores3 = normal(B), normal(B), normal(B, 3)
    c.group, c.ragged = torch.arange(B)//8, torch.randint(max(1, B//8), (B,), generator=g)
    c.sum_sq = c.old.exp()**2
    c.entropies = 2*uniform(B, T)
    c = SimpleNamespace(**{k: x.to(device) for k, x in vars(c).items()})
    c.row_advantages = c.scores
    c.advantages = advantages.at_tokens(c.scores, c.mask)
    c.index, c.ragged_index = np.array(c.group.tolist()), np.array(c.ragged.tolist())
    c.at_last = torch.zeros(B, T, device=device).scatter_(1, (T - 1 - c.mask.int().flip(1).argmax(1))[:, None],
                                                          c.scores[:, None])
    c.n = c.mask.sum()
    return c


def pairs(P, _, device):
    g = torch.Generator().manual_seed(0)
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    c = SimpleNamespace(**{k: (-20*torch.rand(P, generator=g)).to(device) for k in names},
                        desirable=(torch.rand(P, generator=g) < .5).to(device))
    c.mean_chosen, c.mean_rejected = c.chosen/10, c.rejected/10
    c.win_prob = torch.rand(P, generator=g).to(device)
    return c


def vocabulary(B, T, device, V=4_096, H=256):
    g = torch.Generator().manual_seed(0)
    c = SimpleNamespace(logits=torch.randn(B, T, V, generator=g), teacher=torch.randn(B, T, V, generator=g),
                        tokens=torch.randint(V, (B, T), generator=g), mask=torch.rand(B, T, generator=g) < .7,
                        hidden=torch.randn(B*T, H, generator=g), weight=.1*torch.randn(V, H, generator=g))
    c = SimpleNamespace(**{k: x.to(device) for k, x in vars(c).items()})
    c.labels = torch.where(c.mask, c.tokens, -100)
    return c


# -- peers

core = lambda: peers.verl().core_algos
rlhf = lambda: peers.openrlhf().loss
config = peers.actor_config


def maker(): return object.__new__(peers.openrlhf().experience_maker.RemoteExperienceMaker)


def verl_gae(c):
    "The lines of verl's estimator before it whitens."
    run = peers.statements(core().compute_gae_advantage_return, "nextvalues = 0", "returns = advantages + values")
    return run(token_level_rewards=c.rewards, values=c.values, response_mask=c.mask_float, gamma=.99, lam=.95).returns


def trl_gae(c, gamma=.99, lam=.95, white=False):
    """The loop that TRL's PPO trainer had: values and rewards are cleared under the mask first, λ runs through all
    columns."""
    rewards, values, columns, later = c.rewards*c.mask, c.values*c.mask, [], 0.
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.
        later = rewards[:, t] + gamma*following - values[:, t] + gamma*lam*later
        columns.append(later)
    found = torch.stack(columns[::-1], 1)
    returns = found + values
    # its masked_whiten and verl's are one
    return peers.verl().torch_functional.masked_whiten(found, c.mask) if white else found, returns


def verl_policy(name, mode="token-mean", **changed):
    return lambda c: core().POLICY_LOSS_REGISTRY[name](c.old, c.logprobs, c.advantages, c.mask, mode,
                                                       config(**changed))[0]


def trl_policy(loss_type, level="token", rows=False, bare=False, **changed):
    """`_compute_loss` from the ratio to its last metric, with the entropies as good as left out; `bare`: to the loss
    alone. On the columns that all get, or on one advantage a row."""
    @cache
    def set_up():
        trainers = importlib.import_module("trl")
        args = peers.defaults(trainers.GRPOConfig, loss_type=loss_type, **changed)
        args.steps_per_generation = 1
        alone = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
        self = peers.bare(trainers.GRPOTrainer, args=args, loss_type=loss_type, importance_sampling_level=level,
                          beta=args.beta, epsilon_low=.2, epsilon_high=args.epsilon_high or .2,
                          off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False,
                          _entropy_bonus_enabled=False, aux_loss_enabled=False, accelerator=alone,
                          model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1)
        last = "'grpo', 'sapo'" if bare else "'grpo', 'bnpo', 'dr_grpo', 'dapo', 'luspo'"
        return self, peers.statements(trainers.GRPOTrainer._compute_loss, "log_ratio =",
                                      f"if self.loss_type in [{last}]")
    def call(c):
        self, run = set_up()
        self.max_completion_length, self._metrics = c.mask.shape[1], dict(train=defaultdict(list))
        return run(self=self, per_token_logps=c.logprobs, old_per_token_logps=c.old,
                   advantages=c.row_advantages[:, None] if rows else c.advantages, mask=c.mask, entropy_mask=None,
                   entropies=c.row_advantages[:, None],
                   inputs=dict(ref_per_token_logps=c.ref, num_items_in_batch=c.n)).loss
    return call


def trl_losses(*how, rows=True, **changed):
    "TRL's loss as it runs, without its metrics, and on one advantage a row without them."
    return dict(trl=trl_policy(*how, **changed), **{BARE: trl_policy(*how, bare=True, **changed)},
                **({ROWWISE: trl_policy(*how, bare=True, rows=True, **changed)} if rows else {}))


def trl_gmpo(c):
    trainer = trl("experimental.gmpo").GMPOTrainer
    self = peers.bare(trainer, epsilon_low=.4, epsilon_high=.4, beta=0.)
    run = peers.statements(trainer._compute_loss, "log_ratio =", "loss = per_sequence_loss.mean()")
    return run(self=self, per_token_logps=c.logprobs, old_per_token_logps=c.old, advantages=c.row_advantages,
               mask=c.mask, entropy_mask=None, inputs={}).loss


def trl_advantages(trainer, config_name, rewards=lambda c: c.scores[:, None], **changed):
    def call(c):
        args, made = peers.defaults(getattr(importlib.import_module("trl"), config_name),
                                    **changed), getattr(importlib.import_module("trl"), trainer)
        x = rewards(c)
        self = peers.bare(made, reward_weights=torch.ones(x.shape[1], device=x.device), reward_funcs=[None]*x.shape[1],
                          beta=0., reward_clip_range=None, normalize_advantages=False, scale_rewards="group",
                          multi_objective_aggregation=getattr(args, "multi_objective_aggregation", None))
        run = peers.statements(made._generate_and_score_completions, "unscorable_mask =",
                               "advantages = torch.nan_to_num")
        return run(self=self, rewards_per_func=x, device=x.device, num_generations=8).advantages
    return call


def trl_reshape(c):
    "TRL's statistics of groups of a fixed size, nothing around them."
    nanstd = trl("trainer.utils").nanstd
    mean = torch.nanmean(c.scores.view(-1, 8), dim=1).repeat_interleave(8, dim=0)
    return (c.scores - mean)/(nanstd(c.scores.view(-1, 8), dim=1).repeat_interleave(8, dim=0) + 1e-4)


def openrlhf_reshape(c):
    run = peers.statements(peers.openrlhf().experience_maker.RemoteExperienceMaker.compute_advantages_and_returns,
                           "rewards = (rewards - rewards.mean(-1, keepdim=True)) /",
                           "rewards = (rewards - rewards.mean(-1, keepdim=True)) /")
    return run(rewards=c.scores.reshape(-1, 8)).rewards.reshape(-1)


def ppo_whole(c):
    A, returns = advantages.gae(c.rewards, c.old_values, c.mask, **DISCOUNT)
    return policy_losses.ppo_loss(c.logprobs, c.old, masked.whiten(A, c.mask),
                                  c.mask)[0] + .5*value_losses.value_loss(c.values, c.old_values, returns, c.mask)[0]


def verl_ppo_whole(c):
    A, returns = core().compute_gae_advantage_return(c.rewards, c.old_values, c.mask_float, .99, .95)
    return (core().POLICY_LOSS_REGISTRY["vanilla"](c.old, c.logprobs, A, c.mask, "token-mean", config())[0]
            + .5*core().compute_value_loss(c.values, returns, c.old_values, c.mask, .2)[0])


def plain_minillm(c):
    "γ = 1: what is still to come, a reversed running sum."
    on = c.mask.float()
    total, count = (x.flip(1).cumsum(1).flip(1) for x in ((c.ref - c.logprobs)*on, on))
    return total/count.clamp(min=1)*on


def outcome(name, ragged=True, **kw):
    return lambda c: getattr(core(), name)(c.at_last, c.mask_float, c.ragged_index if ragged else c.index, **kw)[0]
def trl(module): return importlib.import_module(f"trl.{module}")


# -- estimators

DISCOUNT = dict(gamma=.99, lam=.95)
task("gae", tokens, lambda c: advantages.gae(c.rewards, c.values, c.mask, **DISCOUNT), shapes=(LONG, WIDE, SQUARE),
     theirs=dict(verl=verl_gae, trl=trl_gae,
                 openrlhf=lambda c: maker().get_advantages_and_returns(c.values, c.rewards, c.mask, .99, .95)),
     promised={(LONG, "verl"): 150, (LONG, "trl"): 80, (WIDE, "verl"): 14, (WIDE, "trl"): 6, (SQUARE, "verl"): 4,
               (SQUARE, "trl"): 2.5})
task("gae, whitened", tokens,
     lambda c: masked.whiten(advantages.gae(c.rewards, c.values, c.mask, **DISCOUNT)[0], c.mask), shapes=(WIDE, SQUARE),
     theirs=dict(verl=lambda c: core().compute_gae_advantage_return(c.rewards, c.values, c.mask_float, .99, .95),
                 trl=lambda c: trl_gae(c, white=True)))
task("discounted_returns", tokens, lambda c: advantages.discounted_returns(c.rewards, c.mask, gamma=.99),
     shapes=(LONG, WIDE, SQUARE),
     theirs=dict(openrlhf=lambda c: maker().get_cumulative_returns(c.rewards, c.mask, .99)))
task("reinforce_pp_advantages", tokens, lambda c: advantages.reinforce_pp_advantages(c.rewards, c.mask, gamma=.99),
     shapes=(LONG, WIDE, SQUARE), theirs=dict(verl=lambda c: core().compute_reinforce_plus_plus_outcome_advantage(
    c.rewards, c.mask_float, SimpleNamespace(gamma=.99))))
task("remax_advantages", tokens, lambda c: advantages.remax_advantages(c.rewards, c.baselines, c.mask),
     theirs=dict(verl=lambda c: core().compute_remax_outcome_advantage(c.rewards, c.baselines, c.mask_float)))
task("whiten", tokens, lambda c: masked.whiten(c.values, c.mask),
     theirs=dict(verl=lambda c: peers.verl().torch_functional.masked_whiten(c.values, c.mask)))

ROWS = ((1_024, 1), (8_192, 1))
by_rows = partial(dict, shapes=ROWS, along="rows")
task("group_advantages, ragged ids", tokens, lambda c: groups.group_advantages(c.scores, c.ragged), **by_rows(),
     theirs={"verl": outcome("compute_grpo_outcome_advantage"),
             "verl vectorized": outcome("compute_grpo_vectorized_outcome_advantage"), "trl, groups of 8": trl_reshape,
             "openrlhf, groups of 8": openrlhf_reshape,
             "trl, all its lines": trl_advantages("GRPOTrainer", "GRPOConfig")},
     promised={((1_024, 1), "verl"): 30, ((1_024, 1), "trl, groups of 8"): 1/1.5})
task("leave_one_out, ragged ids", tokens, lambda c: groups.leave_one_out(c.scores, c.ragged), **by_rows(),
     theirs={"verl": outcome("compute_rloo_outcome_advantage"),
             "verl vectorized": outcome("compute_rloo_vectorized_outcome_advantage"),
             "trl, all its lines": trl_advantages("RLOOTrainer", "RLOOConfig")}, promised={((1_024, 1), "verl"): 30})
task("reinforce_pp_baseline, ragged ids", tokens, lambda c: groups.reinforce_pp_baseline(c.scores, c.ragged, c.mask),
     **by_rows(), theirs=dict(verl=outcome("compute_reinforce_plus_plus_baseline_outcome_advantage")))
task("opo_advantages, ragged ids", tokens, lambda c: groups.opo_advantages(c.scores, c.ragged, lengths=c.mask.sum(1)),
     **by_rows(), theirs=dict(verl=outcome("compute_opo_outcome_advantage")))
task("gpg_advantages, ragged ids", tokens, lambda c: groups.gpg_advantages(c.scores, c.ragged), **by_rows(),
     theirs=dict(verl=outcome("compute_gpg_outcome_advantage")))
task("best_of_n_advantages", tokens, lambda c: best_of.best_of_n_advantages(c.scores, c.group, scale=True), **by_rows(),
     theirs=dict(verl=outcome("compute_grpo_passk_outcome_advantage", ragged=False, config={})))
task("gdpo_advantages, 3 rewards", tokens, lambda c: groups.gdpo_advantages(c.scores3, c.group), **by_rows(),
     theirs={"trl, all its lines": trl_advantages("GRPOTrainer", "GRPOConfig", lambda c: c.scores3,
                                                  multi_objective_aggregation="normalize_then_sum")})
task("optimal_token_baseline", tokens,
     lambda c: groups.optimal_token_baseline(c.rewards, c.old, c.ragged, c.mask, sum_pi_squared=c.sum_sq),
     theirs={"verl, single turn": lambda c: core().compute_optimal_token_baseline_advantage(
    c.rewards, c.mask_float, c.ragged_index, c.old, c.sum_sq),
             "verl, with tools": lambda c: core().compute_multi_turn_optimal_token_baseline_advantage(
    c.rewards, c.mask_float, c.ragged_index, c.old, c.sum_sq)})

# -- corrections

helper = lambda: peers.verl().rollout_corr_helper
task("truncated_weights", tokens, lambda c: corrections.truncated_weights(c.old, c.rollout, c.mask),
     theirs=dict(verl=lambda c: helper().compute_rollout_correction_weights(c.old - c.rollout, c.mask, "token", 2.)))
task("sequence_weights", tokens, lambda c: corrections.sequence_weights(c.old, c.rollout, c.mask),
     theirs=dict(verl=lambda c: helper().compute_rollout_correction_weights(c.old - c.rollout, c.mask, "sequence", 2.)))
task("geometric_mask", tokens, lambda c: corrections.geometric_mask(c.old, c.rollout, c.mask), theirs=dict(
    verl=lambda c: helper().compute_rollout_rejection_mask(c.old - c.rollout, c.mask, "seq_mean_k1", ".5_5")))

# -- policy losses, forward and backward

loss = partial(dict, wrt=("logprobs",), shapes=(STEP, WIDE))
A = lambda c: (c.logprobs, c.old, c.advantages, c.mask)
fastest = judged(STEP)
task("ppo_loss", tokens, lambda c: policy_losses.ppo_loss(*A(c)), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("vanilla"), openrlhf=lambda c: rlhf().PolicyLoss()(*A(c))[0], **trl_losses("bnpo")))
task("ppo_loss, dual clip", tokens, lambda c: policy_losses.ppo_loss(*A(c), dual_clip=3.), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("vanilla"), openrlhf=lambda c: rlhf().PolicyLoss(dual_clip=3.)(*A(c))[0],
                 **trl_losses("bnpo", rows=False, delta=3.)))
task("grpo_loss", tokens, lambda c: policy_losses.grpo_loss(c.logprobs, c.old, c.ref, c.advantages, c.mask),
     **loss(promised=fastest), theirs=trl_losses("grpo", rows=False, beta=.04, use_bias_correction_kl=False))
task("dr_grpo_loss", tokens, lambda c: policy_losses.dr_grpo_loss(*A(c), max_tokens=1_024), **loss(promised=fastest),
     theirs=trl_losses("dr_grpo", rows=False))
task("gspo_loss", tokens, lambda c: answer_ratio.gspo_loss(*A(c), clip_low=.2, clip_high=.2), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("gspo", "seq-mean-token-mean"), openrlhf=lambda c: rlhf().PolicyLoss(
    policy_loss_type="gspo")(*A(c))[0], **trl_losses("grpo", "sequence")))
task("cispo_loss", tokens, lambda c: ratio_losses.cispo_loss(*A(c)), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("cispo"), **trl_losses("cispo", epsilon_high=5.)))
task("sapo_loss", tokens, lambda c: ratio_losses.sapo_loss(*A(c)), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("sapo"), **trl_losses("sapo")))
task("gmpo_loss", tokens, lambda c: answer_ratio.gmpo_loss(*A(c)), **loss(promised=fastest),
     theirs=dict(verl=verl_policy("geo_mean"), trl=trl_gmpo))
task("vespo_loss", tokens, lambda c: answer_ratio.vespo_loss(*A(c)), **loss(promised=fastest),
     theirs=trl_losses("vespo"))
task("luspo_loss", tokens, lambda c: answer_ratio.luspo_loss(*A(c), clip_low=.2, clip_high=.2),
     **loss(promised=fastest), theirs=trl_losses("luspo", "sequence"))
task("reinforce_loss", tokens, lambda c: ratio_losses.reinforce_loss(c.logprobs, c.advantages, c.mask),
     **loss(promised=fastest), theirs=dict(verl=verl_policy("gpg")))
task("clip_cov, mask and loss", tokens, lambda c: selections.clip_cov_loss(
    *A(c), selected=selections.clip_cov_mask(c.logprobs, c.advantages, c.mask, uniform=c.entropies)),
     **loss(promised=fastest), theirs=dict(verl=verl_policy("clip_cov")))
task("kl_cov, mask and loss", tokens,
     lambda c: selections.kl_cov_loss(*A(c), selected=selections.kl_cov_mask(c.logprobs, c.advantages, c.mask)),
     **loss(promised=fastest), theirs=dict(verl=verl_policy("kl_cov")))
task("high_entropy_mask", tokens, lambda c: selections.high_entropy_mask(c.entropies, c.mask), theirs=dict(
    trl=lambda c: peers.bare(trl("trainer.grpo_trainer").GRPOTrainer).get_high_entropy_mask(c.entropies, c.mask, .8)))
task("kl_k3, aggregated", tokens, lambda c: masked.aggregate(kl.kl_k3(c.logprobs, c.ref, c.mask), c.mask),
     **loss(promised=fastest),
     theirs=dict(verl=lambda c: core().agg_loss(core().kl_penalty(c.logprobs, c.ref, "low_var_kl"), c.mask,
                                                "token-mean"), openrlhf=lambda c: rlhf().aggregate_loss(
    peers.openrlhf().utils.compute_approx_kl(c.logprobs, c.ref, kl_estimator="k3"), c.mask)))
task("value_loss", tokens, lambda c: value_losses.value_loss(c.values, c.old_values, c.returns, c.mask),
     wrt=("values",), shapes=(STEP, WIDE), promised=fastest,
     theirs=dict(verl=lambda c: core().compute_value_loss(c.values, c.returns, c.old_values, c.mask, .2)[0],
                 openrlhf=lambda c: rlhf().ValueLoss(clip_eps=.2)(c.values, c.old_values, c.returns, c.mask)))
task("ppo whole: gae, policy and value loss", tokens, lambda c: ppo_whole(c), wrt=("logprobs", "values"),
     shapes=(STEP, WIDE), promised={(STEP, "fastest"): 1.}, theirs=dict(verl=lambda c: verl_ppo_whole(c)))
task("minillm_advantages", tokens, lambda c: teachers.minillm_advantages(c.logprobs, c.ref, c.mask),
     theirs={FORMULA: lambda c: plain_minillm(c)})
task("sft_loss", tokens, lambda c: distill_losses.sft_loss(c.logprobs, c.mask), **loss(promised=fastest),
     theirs=dict(openrlhf=lambda c: rlhf().SFTLoss()(c.logprobs, c.mask)))

# -- preferences and reward models, forward and backward

P = lambda c: (c.chosen, c.rejected, c.ref_chosen, c.ref_rejected)
MANY = ((512, 1), (65_536, 1), (1_048_576, 1))
pair = partial(dict, wrt=("chosen", "rejected"), shapes=MANY, along="pairs", promised=judged(MANY[1]))
means = pair(wrt=("mean_chosen", "mean_rejected"))
openrlhf_dpo = lambda **kw: lambda c: rlhf().DPOLoss(**kw)(*P(c))[0]


def trl_cpo(**kw):
    def call(c):
        return peers.bare(trl("experimental.cpo").CPOTrainer,
                          **dict(beta=2., loss_type="simpo", simpo_gamma=1., alpha=0.,
                                 label_smoothing=0.) | kw).cpo_loss(c.mean_chosen, c.mean_rejected)[0].mean()
    return call


def trl_orpo(c):
    return -c.mean_chosen.mean() - peers.bare(trl("experimental.orpo").ORPOTrainer,
                                              beta=.1).odds_ratio_loss(c.mean_chosen, c.mean_rejected)[0].mean()


def trl_kto(c):
    "The lines of `_compute_loss` that make the two classes' losses."
    trainer = trl("trainer.kto_trainer").KTOTrainer
    self = peers.bare(trainer, loss_type="kto", beta=.1, desirable_weight=1., undesirable_weight=1.)
    run = peers.statements(trainer._compute_loss, "if chosen_logps.shape[0] != 0", "losses = torch.cat")
    d = c.desirable
    return run(self=self, chosen_logps=c.chosen[d], rejected_logps=c.chosen[~d], ref_chosen_logps=c.ref_chosen[d],
               ref_rejected_logps=c.ref_chosen[~d], kl=torch.zeros(())).losses.nanmean()


task("dpo_loss", pairs, lambda c: preference_losses.dpo_loss(*P(c)), **pair(),
     theirs=dict(openrlhf=openrlhf_dpo(beta=.1)))
task("ipo_loss", pairs, lambda c: preference_losses.ipo_loss(*P(c)), **pair(),
     theirs=dict(openrlhf=openrlhf_dpo(beta=.1, ipo=True)))
task("simpo_loss", pairs, lambda c: margins.simpo_loss(c.mean_chosen, c.mean_rejected), **means,
     theirs=dict(trl=trl_cpo()))
task("alphapo_loss", pairs, lambda c: margins.alphapo_loss(c.mean_chosen, c.mean_rejected), **means,
     theirs=dict(trl=trl_cpo(alpha=.25)))
task("orpo_loss", pairs, lambda c: margins.orpo_loss(c.mean_chosen, c.mean_rejected), **means,
     theirs=dict(trl=trl_orpo))
task("kto_loss", pairs, lambda c: unpaired_losses.kto_loss(c.chosen, c.ref_chosen, c.desirable, kl=0.),
     **pair(wrt=("chosen",)), theirs=dict(trl=trl_kto))
task("bradley_terry_loss", pairs, lambda c: reward_losses.bradley_terry_loss(c.chosen, c.rejected), **pair(),
     theirs=dict(openrlhf=lambda c: rlhf().PairWiseLoss()(c.chosen, c.rejected)))
task("bradley_terry_loss, as log(1 + exp)", pairs, lambda c: reward_losses.bradley_terry_loss(c.chosen, c.rejected),
     **pair(), theirs={UNSAFE: lambda c: rlhf().LogExpLoss()(c.chosen, c.rejected),
                       "openrlhf, PairWiseLoss": lambda c: rlhf().PairWiseLoss()(c.chosen, c.rejected)})

bare = partial(dict, shapes=MANY, along="pairs")  # without a peer
logsigmoid = torch.nn.functional.logsigmoid
task("bco_loss", pairs, lambda c: unpaired_losses.bco_loss(c.chosen, c.ref_chosen, c.desirable, delta=1.),
     **bare(wrt=("chosen",)),
     theirs={FORMULA: lambda c: -logsigmoid((.1*(c.chosen - c.ref_chosen) - .1)*(2*c.desirable.float() - 1)).mean()})
task("xpo_loss", pairs, lambda c: online_losses.xpo_loss(*P(c), c.desirable), **bare(wrt=("chosen", "rejected")),
     theirs={FORMULA: lambda c: (-logsigmoid(.1*(c.chosen - c.ref_chosen - c.rejected + c.ref_rejected))
                                 + 1e-5*torch.where(c.desirable, c.chosen, c.rejected)).mean()})
task("nash_md_loss", pairs, lambda c: online_losses.nash_md_loss(c.chosen, c.ref_chosen, c.win_prob),
     **bare(wrt=("chosen",)),
     theirs={FORMULA: lambda c: -((c.win_prob - .5 - .1*(c.chosen - c.ref_chosen)).detach()*c.chosen).mean()})


# -- whole vocabularies, forward and backward

logits = partial(dict, wrt=("logits",), shapes=((4, 128), (8, 512)),
                 promised={(shape, "fastest"): 1/1.1 for shape in ((4, 128), (8, 512))})
verl_F = lambda: peers.verl().torch_functional
task("gather_logprobs, 4,096 ids", vocabulary, lambda c: logprobs.gather_logprobs(c.logits, c.tokens).sum(), **logits(),
     theirs=dict(verl=lambda c: verl_F().logprobs_from_logits(c.logits, c.tokens).sum(),
                 openrlhf=lambda c: peers.openrlhf().utils.log_probs_from_logits(c.logits, c.tokens).sum(),
                 trl=lambda c: trl("trainer.utils").selective_log_softmax(c.logits, c.tokens).sum()))
task("entropy, 4,096 ids", vocabulary, lambda c: logprobs.entropy(c.logits).sum(), **logits(),
     theirs=dict(verl=lambda c: verl_F().entropy_from_logits(c.logits).sum(),
                 trl=lambda c: trl("trainer.utils").entropy_from_logits(c.logits).sum()))
task("linear_logprobs with entropy, 256 × 4,096", vocabulary,
     lambda c: sum(x.sum() for x in head.linear_logprobs(c.hidden, c.weight, c.tokens.flatten(), entropy=True)),
     **logits(wrt=("hidden", "weight")),
     theirs=dict(trl=lambda c: sum(x.sum() for x in trl("trainer.utils")._ChunkedLogProbFunction.apply(
    c.hidden, c.weight, None, c.tokens.flatten(), 1., 256, None, 1., ("log_probs", "entropy"))[:2])))
task("jsd_loss, 4,096 ids", vocabulary, lambda c: distill_losses.jsd_loss(c.logits, c.teacher, c.mask),
     **logits(promised=judged((8, 512))),
     theirs=dict(trl=lambda c: trl("experimental.gkd").GKDTrainer.generalized_jsd_loss(c.logits, c.teacher, c.labels)))
task("reverse_kl_loss, 4,096 ids", vocabulary, lambda c: distill_losses.reverse_kl_loss(c.logits, c.teacher, c.mask),
     **logits(promised=judged((8, 512))), theirs=dict(
    trl=lambda c: trl("experimental.gkd").GKDTrainer.generalized_jsd_loss(c.logits, c.teacher, c.labels, 1)))


# -- measuring

def differentiated(call, wrt):
    "The call, or the loss it returns with its gradient."
    if not wrt: return call
    def both(c):
        result = call(c)
        return torch.autograd.grad(result[0] if isinstance(result, tuple) else result,
                                   [getattr(c, name) for name in wrt])
    return both


def compiled(t):
    "Ours through torch.compile, its backward pass by autograd."
    return differentiated(torch.compile(own(t), fullgraph=True, backend=BACKEND), t.wrt)


class Replaced:
    "Columns, some of them others than those of `c`."
    def __init__(self, c, names, columns):
        self.c = c
        for name, x in zip(names, columns, strict=True): setattr(self, name, x)

    def __getattr__(self, name): return getattr(self.c, name)


def compiled_with_gradient(t):
    "The gradient of ours, the loss and its metrics, through torch.compile."
    ours = own(t)
    def loss(columns, c):
        result = ours(Replaced(c, t.wrt, columns))
        total, metrics = result if isinstance(result, tuple) else (result, {})
        numbers = {k: m.numbers().values() for k, m in metrics.items()}
        return total, {k: [x for x in some if isinstance(x, torch.Tensor)] for k, some in numbers.items()}
    call = torch.compile(torch.func.grad_and_value(loss, has_aux=True), fullgraph=True, backend=BACKEND)
    return lambda c: call(tuple(getattr(c, name).detach() for name in t.wrt), c)[0]


WAYS = {COMPILED: compiled, ONE_GRAPH: compiled_with_gradient}


def own(t):
    "A copy of the code of ours: of one code torch.compile keeps one result, whoever compiled it."
    return FunctionType(t.ours.__code__.replace(), t.ours.__globals__, t.ours.__name__, None, t.ours.__closure__)


def clock(device):
    "Seconds; on a CPU with one thread those that this process had the core, whoever else wants it."
    if device == "cuda": torch.cuda.synchronize()
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def timed(calls, c, rounds, device, budget=20., least=2e-3):
    "{name: seconds of each round}, in turn; short calls are repeated until they take 2 ms, long ones get fewer rounds."
    repeats, few, seconds = {}, {}, {name: [] for name in calls}
    for name, call in calls.items():
        call(c)
        start = clock(device)
        call(c)
        once = clock(device) - start
        repeats[name], few[name] = max(1,
                                       round(least/max(once, 1e-7))), max(3, min(rounds, round(budget/max(once, 1e-7))))
    for i in range(rounds):
        for name, call in calls.items():
            if i >= few[name]: continue
            start = clock(device)
            for _ in range(repeats[name]): call(c)
            seconds[name].append((clock(device) - start)/repeats[name])
    return seconds


def peak(call, c, device):
    "Highest sum of the bytes of tensors that one call makes."
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(c)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        result = call(c)
    del result
    now = most = 0
    for _, change in sorted((e.start_ns(), e.nbytes())
                            for e in p.profiler.kineto_results.events() if e.name() == "[memory]"):
        now += change
        most = max(most, now)
    return most


def quantile(x, q): return float(np.quantile(x, q))


def compare(t, shape, rounds, device):
    "Ours and theirs on one shape: medians, and the ratio of the times of each round."
    c = t.make(*shape, device)
    for name in t.wrt: getattr(c, name).requires_grad_()
    calls = {"ours": differentiated(t.ours, t.wrt)} | {k: differentiated(f, t.wrt) for k, f in t.theirs.items()}
    if (shape, COMPILED) in t.promised:
        torch.compiler.reset()
        calls |= {k: way(t) for k, way in WAYS.items()}
    seconds = timed(calls, c, rounds, device)
    # the CPU's profiler needs minutes for a million small tensors
    memory = {k: peak(f, c, device) if min(seconds[k]) < 1 or device == "cuda" else None for k, f in calls.items()}
    entry = dict(name=t.name, shape=list(shape), date=now(), load=os.getloadavg()[0],
                 ms={k: 1e3*quantile(x, .5) for k, x in seconds.items()}, bytes=memory,
                 rounds={k: len(x) for k, x in seconds.items()})
    # theirs may have fewer rounds
    ratios = {k: [b/a for a, b in zip(seconds["ours"], x, strict=False)] for k, x in seconds.items() if k != "ours"}
    entry["faster"] = {k: [quantile(x, q) for q in (.5, .25, .75)] for k, x in ratios.items()}
    best = min((k for k in t.theirs if k not in ASIDE), key=lambda k: entry["ms"][k], default=None)
    entry["fastest"] = best
    entry["promised"] = {k: wanted for (s, k), wanted in t.promised.items() if s == shape}
    best_compiled = min((entry["ms"][k] for k in WAYS if k in entry["ms"]), default=math.nan)
    got = {k: x[0] for k, x in entry["faster"].items()}
    got |= {"fastest": got.get(best, math.nan), COMPILED: entry["ms"].get(best, math.nan)/best_compiled}
    entry["missed"] = [k for k, wanted in entry["promised"].items() if got[k] < wanted]
    if (shape, COMPILED) in t.promised and t.make is not vocabulary: entry["few"] = on_few(t, best, rounds, device)
    return entry


def on_few(t, best, rounds, device):
    """Milliseconds of a call with its backward pass on eight tokens or pairs: what guards, dispatch and allocation
    take, however many there are."""
    c = t.make(*FEW[t.along], device)
    for name in t.wrt: getattr(c, name).requires_grad_()
    calls = {"ours": differentiated(t.ours, t.wrt), best: differentiated(t.theirs[best], t.wrt),
             **{k: way(t) for k, way in WAYS.items()}}
    seconds = timed(calls, c, rounds, device)
    return dict(load=os.getloadavg()[0], ms={k: 1e3*quantile(x, .5) for k, x in seconds.items()})


GROWTH = {"tokens": {"T": [(32, 2**k) for k in range(9, 16)], "B": [(2**k, 1_024) for k in range(4, 11)]},
          "rows": {"B": [(2**k, 1) for k in range(10, 19)]}, "pairs": {"P": [(2**k, 1) for k in range(14, 21)]}}


def growth(t, rounds, device):
    "Our time and memory along each axis, and the exponent p of (B·T)^p over the larger half of the sizes."
    for axis, shapes in GROWTH[t.along].items() if t.make is not vocabulary else [
            ("T", [(4, 2**k) for k in range(5, 10)])]:
        ns, bytes_ = [], []
        for shape in shapes:
            c = t.make(*shape, device)
            for name in t.wrt: getattr(c, name).requires_grad_()
            call = differentiated(t.ours, t.wrt)
            ns.append(1e9*min(timed({"ours": call}, c, rounds, device)["ours"]))
            bytes_.append(peak(call, c, device))
        size, half = np.log([math.prod(s) for s in shapes]), len(shapes)//2
        fit = lambda y: float(np.polyfit(size[half:], np.log(np.maximum(y, 1))[half:], 1)[0])  # noqa: B023
        yield dict(name=t.name, axis=axis, sizes=[math.prod(s) for s in shapes], ns=ns, bytes=bytes_,
                   time_exponent=fit(ns), memory_exponent=fit(bytes_))


def now(): return datetime.now().isoformat(timespec="seconds")
def machine(device):
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
               platform.processor()) if os.path.exists("/proc/cpuinfo") else platform.processor()
    return dict(date=now(), device=torch.cuda.get_device_name()
                if device == "cuda" else cpu, cores=os.cpu_count(), threads=torch.get_num_threads(),
                load=os.getloadavg(), torch=torch.__version__, python=platform.python_version(), **peers.VERSIONS)


def rounded(x):
    "Four digits of every float; more are noise."
    if isinstance(x, dict): return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)): return [rounded(v) for v in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


def line(x):
    "One line: ours, each of theirs with ratios of time and memory, what eight tokens take, and what was promised."
    def name(k): return f"**{k}**" if k == x["fastest"] else k
    per = [f"{name(k)} {x['ms'][k]:.3g} ms, {x['faster'][k][0]:.3g}× "
           f"({x['faster'][k][1]:.3g}–{x['faster'][k][2]:.3g}) faster" + (
        f", {x['bytes'][k]/max(x['bytes']['ours'], 1):.2g}× memory" if x["bytes"][k] and x["bytes"]["ours"] else "")
           for k in x["ms"] if k != "ours"]
    short = ", ".join("{} {:.3g}×".format(k, x["promised"][k]) for k in x["missed"])
    verdict = f"  MISSED {short}" if short else "  as promised" if x["promised"] else ""
    few = " | on 8: " + ", ".join(f"{k} {ms:.2g} ms" for k, ms in x["few"]["ms"].items()) if "few" in x else ""
    size = ", {:.3g} MiB".format(x["bytes"]["ours"]/2**20) if x["bytes"]["ours"] else ""
    return (f"{x['name']:<38} {x['shape'][0]:>9,} × {x['shape'][1]:<8,} ours {x['ms']['ours']:.3g} ms{size} | "
            + " | ".join(per) + few + verdict)


def draw(result, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 9), sharey=True)
    last, marks = {}, dict(verl="o", trl="s", openrlhf="^", formula="x", ours="*")
    for x in result["comparisons"]:
        if x["name"] not in last or None not in x["bytes"].values(): last[x["name"]] = x
    for i, x in enumerate(last.values()):
        for k in x["faster"]:
            mark = marks[k.split()[0].rstrip(",")]
            left.plot(x["faster"][k][0], i, mark, color=f"C{'os^x*'.index(mark)}", ms=5)
            if x["bytes"][k] and x["bytes"]["ours"]:
                right.plot(x["bytes"][k]/max(x["bytes"]["ours"], 1), i, mark, color=f"C{'os^x*'.index(mark)}", ms=5)
    for axis, label in ((left, "their time / ours"), (right, "their peak memory / ours")):
        axis.axvline(1, color="k", lw=.8)
        axis.set(xscale="log", xlabel=f"{label}, largest shape", yticks=range(len(last)), yticklabels=list(last))
        axis.grid(alpha=.3)
        axis.xaxis.set_minor_formatter(plt.NullFormatter())
    right.set(xticks=[.125, .25, .5, 1, 2, 4], xticklabels=["⅛", "¼", "½", "1", "2", "4"])
    for peer, mark in marks.items(): right.plot([], [], mark, color=f"C{'os^x*'.index(mark)}", label=peer)
    right.legend()
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def write(path, result, kept=()):
    "The results in the order of the tasks, with those of an earlier run that are not measured again."
    fresh = {(x["name"], *x["shape"]): x for x in result["comparisons"]}
    merged = {(x["name"], *x["shape"]): x for x in kept} | fresh
    order = [t.name for t in TASKS]
    result = result | dict(comparisons=sorted(merged.values(), key=lambda x: order.index(x["name"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(result), indent=1) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=15, help="calls of each function; those that take seconds get three")
    p.add_argument("--only", default="", help="tasks with one of these words, with commas between, in their name; "
                   "nothing is written but with --judged, which replaces what it measures again")
    p.add_argument("--judged", action="store_true",
                   help="losses at the sizes where they are judged, eager and compiled, and nothing else: "
                   "algorithms_judged_DEVICE.json")
    p.add_argument("--threads", type=int, help="of torch; default: its own choice")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-growth", action="store_true", help="compare only")
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results",
                   help="folder for algorithms_DEVICE.json and .png")
    a = p.parse_args()
    if a.threads: torch.set_num_threads(a.threads)
    if absent := [reason for name in peers.VERSIONS if (reason := peers.missing(name))]:
        raise SystemExit("algorithms: " + "; ".join(absent))
    result = dict(machine=machine(a.device), comparisons=[], growth=[])
    print("{device}, {threads} threads, torch {torch}, load {load[0]:.1f}; trl {trl}, verl {verl}, openrlhf "
          "{openrlhf}".format(**result["machine"]))
    chosen = [t for t in TASKS if any(word in t.name.lower() for word in a.only.lower().split(","))]
    path = a.out/f"algorithms{'_judged'*a.judged}_{a.device}.json"
    kept = json.loads(path.read_text())["comparisons"] if a.judged and a.only and path.exists() else []
    for t in chosen:
        for shape in t.shapes:
            if a.judged and (shape, COMPILED) not in t.promised: continue
            result["comparisons"].append(compare(t, shape, a.rounds, a.device))
            print(line(result["comparisons"][-1]), flush=True)
            if a.judged: write(path, result, kept)
    for t in chosen if not (a.no_growth or a.judged) else ():
        for x in growth(t, max(3, a.rounds//3), a.device):
            result["growth"].append(x)
            print(f"{x['name']:<38} along {x['axis']}: time ∝ (B·T)^{x['time_exponent']:.2f}, "
                  f"{x['ns'][-1]/x['sizes'][-1]:.1f} ns each at {x['sizes'][-1]:,}; "
                  f"memory ∝ (B·T)^{x['memory_exponent']:.2f}, {x['bytes'][-1]/x['sizes'][-1]:.0f} bytes each",
                  flush=True)
    missed = [f"{x['name']} at {x['shape']}: {k}" for x in result["comparisons"] for k in x["missed"]]
    print(f"{len(result['comparisons'])} comparisons; missed: {missed or 'none'}")
    if a.only or a.judged: return
    write(path, result)
    draw(result, path.with_suffix(".png"))


if __name__ == "__main__": main()
