"""Functional building blocks for reinforcement learning on language models.

The packages from arithmetic to data are imported here and need only torch, einops and jaxtyping. Wrappers and placement
come by name when first asked for, with the libraries they need. `rlblocks.<Tab>` shows losses, estimators, data and
wrappers; no modules, and not what few people look for: slow reference versions (`naive_gae`), names for annotations
(`Denom`) and guards (`same_shape`). nbs/blocks.ipynb has all blocks on one page.
"""
import gc
from importlib import import_module
from importlib.util import find_spec
from sys import _getframe
from typing import TYPE_CHECKING

# One full collection walks over all that torch has made, and takes longer than all the imports below together.
_collecting = gc.isenabled()
gc.disable()

try:
    from rlblocks.signals.advantages import (
        at_tokens, discounted_returns, gae, length_adaptive_lam, n_step_returns, reinforce_pp_advantages,
        remax_advantages, vtrace,
    )
    from rlblocks.data.balancing import balance, balance_families, fit_row_costs, row_costs
    from rlblocks.data.batch import Batch, Whole, pairs
    from rlblocks.data.columns import pad, seed_of
    from rlblocks.signals.best_of import (
        best_of_n_advantages, best_worst_weights, group_pass_at_k_advantages,
        pass_at_k_advantages, resampled_rows,
    )
    from rlblocks.data.buffer import Buffer
    from rlblocks.data.replay import replay_draw
    from rlblocks.losses.components import components_loss
    from rlblocks.signals.corrections import (
        binary_kl, binary_tv, fresh_mask, geometric_mask, geometric_weights, icepop_weights, k3_mask,
        off_policy_sequence_mask, proximal_logprobs, row_max, row_mean, row_sum, sequence_mask, sequence_weights,
        staleness_weights, token_mask, truncated_weights, veto_mask, within,
    )
    from rlblocks.losses.distill import (
        dft_loss, forward_kl_loss, jsd, jsd_loss, reverse_kl_loss, sft_loss, softened_logprobs, support_logprobs,
        uld_loss,
    )
    from rlblocks.data.refill import mixed_groups, refill
    from rlblocks.data.saved import load_rollouts, save_rollouts, saved_steps
    from rlblocks.signals.groups import (
        bnpo_advantages, gdpo_advantages, gpg_advantages, group_advantages, leave_one_out,
        lite_ppo_advantages, maxrl_advantages, opo_advantages, optimal_token_baseline, reinforce_pp_baseline,
        soft_values,
    )
    from rlblocks.losses.guidance import chord_mu, chord_phi_loss, luffy_loss
    from rlblocks.losses.implicit_rewards import implicit_process_rewards, implicit_reward_loss
    from rlblocks.arithmetic.kl import (
        adaptive_kl_coef, full_kl, kl_k1, kl_k2, kl_k3, ratio_corrected, straight_through,
    )
    from rlblocks.arithmetic.head import linear_logprobs, linear_measured
    from rlblocks.arithmetic.logprobs import entropy, gather_logprobs, sequence_logprobs, token_logprobs
    from rlblocks.losses.margins import (
        alpha_reward, alphapo_loss, aot_loss, aot_matched, chi_reward, chipo_loss, cpo_loss, f_dpo_loss,
        js_reward, ld_logprobs, log_odds, mean_logprobs_only, orpo_loss, simpo_loss, tpo_loss,
        wpo_weights,
    )
    from rlblocks.arithmetic.masked import (
        Counts, Denom, Last, Max, Mean, Metric, Number, Over, aggregate, clip, divisor, finite_logprobs, masked_mean,
        masked_std, masked_sum, mean_of, merge, promoted, same_shape, whiten,
    )
    from rlblocks.signals.mismatch import effective_share, mismatch_metrics, probability_correlation
    from rlblocks.losses.online import (
        a2po_loss, best_worst_pairs, geometric_mixture, nash_md_loss, qrpo_loss, quantile_rewards, rebel_loss,
        xpo_loss,
    )
    from rlblocks.testing.oracles import (
        naive_aggregate, naive_gae, naive_group_advantages, naive_leave_one_out, naive_ppo_loss, naive_returns,
        naive_token_logprobs, naive_value_loss, sample_columns,
    )
    from rlblocks.data.packing import (
        Packed, bin_pack, drop_long, micro_batch_count, pack, plan_micro_batches, shared_prefix, split_long, unpack,
    )
    from rlblocks.losses.policy import (
        adaptive_clip, assert_on_policy, check_clip, clip_metrics, clipped_surrogate, dapo_loss, dr_grpo_loss,
        grpo_loss, log_ratio, masked_data, ppo_loss, ratio_metrics,
    )
    from rlblocks.losses.pairs import (
        answer_log_ratios, means_of, over_pairs, over_rows, pair_log_ratios, pair_metrics, preference_margin,
        zero_unweighted,
    )
    from rlblocks.losses.preference import (
        apo_down_loss, apo_zero_loss, bco_pair_loss, discopop_loss, dpo_loss, dpop_loss, exo_loss, hinge_loss,
        ipo_loss, nca_loss, robust_dpo_loss, sppo_loss,
    )
    from rlblocks.data.preferences import Feedback, Preferences, as_feedback
    from rlblocks.data.demonstrations import Demonstrations
    from rlblocks.data.files import hold_out, load_rows
    from rlblocks.data.stepwise import StepFeedback
    from rlblocks.data.media import Media
    from rlblocks.data.prompts import Prompts, Stream
    from rlblocks.data.ragged import Ragged, from_arrow, to_arrow
    from rlblocks.data.renderer_checks import check_renderer
    from rlblocks.data.renderers import ChatRenderer, Renderer, Response, TextRenderer, read_response, renderer_of
    from rlblocks.losses.answer_ratio import (
        gmpo_loss, gspo_loss, gspo_token_loss, luspo_loss, sequence_metrics, sequence_ratio, topr_loss, vespo_loss,
    )
    from rlblocks.losses.ratio import (
        asymre_loss, cispo_loss, cpgd_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, gppo_loss, policy_gradient,
        reinforce_loss, sapo_loss,
    )
    from rlblocks.losses.reward import (
        bradley_terry_loss, centering_loss, davidson_loss, generative_scores, hps_loss, multi_head_loss,
        plackett_luce_loss, process_reward_loss, rao_kupper_loss, rating_loss, safety_loss, score_metrics, tie_loss,
    )
    from rlblocks.losses.selections import (
        adaptive_entropy_coef, clip_cov_loss, clip_cov_mask, entropy_loss, expert_load, high_entropy_mask,
        kl_cov_loss, kl_cov_mask, m2po_mask, moe_balance_loss, routed_tokens, router_z_loss, sign_weights,
        token_covariance,
    )
    from rlblocks.signals.shaping import (
        at_last_token, clip_rewards, cosine_length_reward, kl_shaped, overlong_penalty, repeated_tokens,
        repetition_penalty, standardized, step_rewards, truncation_penalty, truncation_score, update_moments,
        weighted_scores, without_truncated, without_unscored,
    )
    from rlblocks.statistics.comparisons import (
        bradley_terry_ratings, length_controlled_win_rate, paired_difference, win_rate,
    )
    from rlblocks.statistics.diversity import distinct_n, longest_loop
    from rlblocks.statistics.intervals import Interval, mean_interval, wilson_interval
    from rlblocks.statistics.pass_at_k import best_of_k, majority_at_k, pass_at_k, pass_hat_k
    from rlblocks.statistics.reward_accuracy import (
        best_of_n_accuracy, calibration_error, pair_accuracy, reliability_curve, ties_score,
    )
    from rlblocks.signals.teachers import (
        distill_advantages, iw_opd_weights, minillm_advantages, realigned, teacher_mix_weights,
    )
    from rlblocks.testing.contracts import check_env, check_grader
    from rlblocks.testing.laws import check_estimator, check_loss
    from rlblocks.signals.trajectories import (
        by_unit, gigpo_advantages, hierarchical_advantages, joint_groups, role_advantages, trajectory_returns,
        vine_advantages,
    )
    from rlblocks.losses.unpaired import (
        aot_units, bco_delta, bco_loss, kto_kl, kto_loss, mismatched, swap_completions, udm_weights, verdict_metrics,
    )
    from rlblocks.losses.value import (
        classification_value_loss, expected_value, explained_variance, half_square, hl_gauss, two_hot, value_loss,
        value_metrics,
    )
finally:
    if _collecting: gc.enable()

if TYPE_CHECKING:
    from rlblocks.engines.engine import fsdp2, plain, zero
    from rlblocks.engines.phases import phase
    from rlblocks.engines.weights import delta_apply, delta_encode
    from rlblocks.engines.optimizers import adamw, adamw_8bit, constant, cosine, linear, muon, OptimizerSpec, wsd
    from rlblocks.engines.weight_folder import publish_weights, published_weights
    from rlblocks.models.critic import Critic
    from rlblocks.models.loading import pretrained
    from rlblocks.models.policy import Policy
    from rlblocks.models.scorer import Scorer, scores_after
    from rlblocks.samplers.decoding import penalties
    from rlblocks.samplers.sampler import sglang, vllm
    from rlblocks.rollout.flight import Flight
    from rlblocks.rollout.rollout import Rollout
    from rlblocks.graders.code import code_reward
    from rlblocks.graders.graders import best_rows, Grader
    from rlblocks.graders.judge import judge_reward, judge_rollout, judge_url, pairwise_reward
    from rlblocks.graders.killable import GraderLimits
    from rlblocks.graders.maths import math_reward
    from rlblocks.graders.regrade import regrade
    from rlblocks.graders.remote import RemoteReward, Retries
    from rlblocks.graders.rewards import (
        choice_reward, distinct_reward, exact_reward, format_reward, json_reward, length_reward,
        overlong_reward,
    )
    from rlblocks.graders.sandbox import run_code, Sandbox, sandbox_support
    from rlblocks.graders.served import reward_app, scorer_reward, serve_reward
    from rlblocks.environments.adapters import gym_environment, mixed_environment, tool_environment
    from rlblocks.environments.environments import rollouts
    from rlblocks.environments.episodes import Environment, Step
    from rlblocks.environments.hubs import (
        openenv_environment, openenv_tools, reasoning_gym_reward, reasoning_gym_rows, textarena_environment,
    )
    from rlblocks.environments.tools import Calculator, Documents, PythonTool, Search
    from rlblocks.endpoint.endpoint import Endpoint
    from rlblocks.endpoint.sessions import Session
    from rlblocks.endpoint.tasksets import taskset_environment, taskset_rows, verifiers_environment, verifiers_rows
    from rlblocks.checkpoint.checkpoint import Checkpoint
    from rlblocks.checkpoint.saves import writable
    from rlblocks.placement.cluster import Cluster
    from rlblocks.placement.place import Pools, here, later
    from rlblocks.evaluation.evaluate import evaluate
    from rlblocks.evaluation.results import load_evaluation
    from rlblocks.evaluation.tasks import Task
    from rlblocks.placement.plan import plan, plan_rollout, step_seconds
    from rlblocks.placement.raypool import RayPool
    from rlblocks.placement.restarts import restarted
    from rlblocks.placement.spmd import SpmdPool
    from rlblocks.tracking.log_to import log_to
    from rlblocks.tracking.sinks import JsonLines
    from rlblocks.tracking.timing import timed, without_times
    from rlblocks.tracking.trackers import MLflow, TensorBoard, Trackio, Wandb
    from rlblocks.people.explore import explore
    from rlblocks.people.report import report
    from rlblocks.people.run import loop_from
    from rlblocks.people.show import show
    from rlblocks.people.watch import watch

# module of floors 3-5 → what it offers: imported when first asked for
_OFFERS = {
    "engines.engine": "fsdp2 plain zero",
    "engines.phases": "phase",
    "engines.weights": "delta_apply delta_encode",
    "engines.optimizers": "adamw adamw_8bit constant cosine linear muon OptimizerSpec wsd",
    "engines.weight_folder": "publish_weights published_weights",
    "models.critic": "Critic",
    "models.loading": "pretrained",
    "models.policy": "Policy",
    "models.scorer": "Scorer scores_after",
    "samplers.decoding": "penalties",
    "samplers.sampler": "sglang vllm",
    "rollout.flight": "Flight",
    "rollout.rollout": "Rollout",
    "graders.code": "code_reward",
    "graders.graders": "best_rows Grader",
    "graders.judge": "judge_reward judge_rollout judge_url pairwise_reward",
    "graders.killable": "GraderLimits",
    "graders.maths": "math_reward",
    "graders.regrade": "regrade",
    "graders.remote": "RemoteReward Retries",
    "graders.rewards":
        "choice_reward distinct_reward exact_reward format_reward json_reward length_reward overlong_reward",
    "graders.sandbox": "run_code Sandbox sandbox_support",
    "graders.served": "reward_app scorer_reward serve_reward",
    "environments.adapters": "gym_environment mixed_environment tool_environment",
    "environments.environments": "rollouts",
    "environments.episodes": "Environment Step",
    "environments.hubs":
        "openenv_environment openenv_tools reasoning_gym_reward reasoning_gym_rows textarena_environment",
    "environments.tools": "Calculator Documents PythonTool Search",
    "endpoint.endpoint": "Endpoint",
    "endpoint.sessions": "Session",
    "endpoint.tasksets": "taskset_environment taskset_rows verifiers_environment verifiers_rows",
    "checkpoint.checkpoint": "Checkpoint",
    "checkpoint.saves": "writable",
    "evaluation.evaluate": "evaluate",
    "evaluation.results": "load_evaluation",
    "evaluation.tasks": "Task",
    "placement.plan": "plan plan_rollout step_seconds",
    "placement.cluster": "Cluster",
    "placement.place": "Pools here later",
    "placement.raypool": "RayPool",
    "placement.restarts": "restarted",
    "placement.spmd": "SpmdPool",
    "tracking.log_to": "log_to",
    "tracking.sinks": "JsonLines",
    "tracking.timing": "timed without_times",
    "tracking.trackers": "MLflow TensorBoard Trackio Wandb",
    "people.explore": "explore",
    "people.report": "report",
    "people.run": "loop_from",
    "people.show": "show",
    "people.watch": "watch",
}
_LAZY = {name: module for module, names in _OFFERS.items() for name in names.split()}

__all__ = [
    "Batch", "Buffer", "Calculator", "ChatRenderer", "Checkpoint", "Cluster", "Counts", "Critic", "Demonstrations",
    "Denom", "Documents", "Endpoint", "Environment", "Feedback", "Flight", "Grader", "GraderLimits", "Interval",
    "JsonLines", "Last", "MLflow", "Max", "Mean", "Media", "Metric", "Number", "OptimizerSpec", "Over", "Packed",
    "Policy", "Pools", "Preferences", "Prompts", "PythonTool", "Ragged", "RayPool", "RemoteReward", "Renderer",
    "Response", "Retries", "Rollout", "Sandbox", "Scorer", "Search", "Session", "SpmdPool", "Step", "StepFeedback",
    "Stream", "Task", "TensorBoard", "TextRenderer", "Trackio", "Wandb", "Whole", "a2po_loss", "adamw", "adamw_8bit",
    "adaptive_clip", "adaptive_entropy_coef", "adaptive_kl_coef", "aggregate", "alpha_reward", "alphapo_loss",
    "answer_log_ratios", "aot_loss", "aot_matched", "aot_units", "apo_down_loss", "apo_zero_loss", "as_feedback",
    "assert_on_policy", "asymre_loss", "at_last_token", "at_tokens", "balance", "balance_families", "bco_delta",
    "bco_loss", "bco_pair_loss", "best_of_k", "best_of_n_accuracy", "best_of_n_advantages", "best_rows",
    "best_worst_pairs", "best_worst_weights", "bin_pack", "binary_kl", "binary_tv", "bnpo_advantages",
    "bradley_terry_loss", "bradley_terry_ratings", "by_unit", "calibration_error", "centering_loss", "check_clip",
    "check_env", "check_estimator", "check_grader", "check_loss", "check_renderer", "chi_reward", "chipo_loss",
    "choice_reward", "chord_mu", "chord_phi_loss", "cispo_loss", "classification_value_loss", "clip", "clip_cov_loss",
    "clip_cov_mask", "clip_metrics", "clip_rewards", "clipped_surrogate", "code_reward", "components_loss",
    "constant", "cosine", "cosine_length_reward", "cpgd_loss", "cpo_loss", "dapo_loss", "davidson_loss",
    "delta_apply", "delta_encode", "dft_loss", "discopop_loss", "discounted_returns", "distill_advantages",
    "distinct_n", "distinct_reward", "divisor", "dpo_loss", "dpop_loss", "dppo_kl_loss", "dppo_tv_loss",
    "dr_grpo_loss", "dro_loss", "drop_long", "effective_share", "entropy", "entropy_loss", "evaluate", "exact_reward",
    "exo_loss", "expected_value", "expert_load", "explained_variance", "explore", "f_dpo_loss", "finite_logprobs",
    "fit_row_costs", "format_reward", "forward_kl_loss", "fresh_mask", "from_arrow", "fsdp2", "full_kl", "gae",
    "gather_logprobs", "gdpo_advantages", "generative_scores", "geometric_mask", "geometric_mixture",
    "geometric_weights", "gigpo_advantages", "gmpo_loss", "gpg_advantages", "gppo_loss", "group_advantages",
    "group_pass_at_k_advantages", "grpo_loss", "gspo_loss", "gspo_token_loss", "gym_environment", "half_square",
    "here", "hierarchical_advantages", "high_entropy_mask", "hinge_loss", "hl_gauss", "hold_out", "hps_loss",
    "icepop_weights", "implicit_process_rewards", "implicit_reward_loss", "ipo_loss", "iw_opd_weights",
    "joint_groups", "js_reward", "jsd", "jsd_loss", "json_reward", "judge_reward", "judge_rollout", "judge_url",
    "k3_mask", "kl_cov_loss", "kl_cov_mask", "kl_k1", "kl_k2", "kl_k3", "kl_shaped", "kto_kl", "kto_loss", "later",
    "ld_logprobs", "leave_one_out", "length_adaptive_lam", "length_controlled_win_rate", "length_reward", "linear",
    "linear_logprobs", "linear_measured", "lite_ppo_advantages", "load_evaluation", "load_rollouts", "load_rows",
    "log_odds", "log_ratio", "log_to", "longest_loop", "loop_from", "luffy_loss", "luspo_loss", "m2po_mask",
    "majority_at_k", "masked_data", "masked_mean", "masked_std", "masked_sum", "math_reward", "maxrl_advantages",
    "mean_interval", "mean_logprobs_only", "mean_of", "means_of", "merge", "micro_batch_count", "minillm_advantages",
    "mismatch_metrics", "mismatched", "mixed_environment", "mixed_groups", "moe_balance_loss", "multi_head_loss",
    "muon", "n_step_returns", "naive_aggregate", "naive_gae", "naive_group_advantages", "naive_leave_one_out",
    "naive_ppo_loss", "naive_returns", "naive_token_logprobs", "naive_value_loss", "nash_md_loss", "nca_loss",
    "off_policy_sequence_mask", "openenv_environment", "openenv_tools", "opo_advantages", "optimal_token_baseline",
    "orpo_loss", "over_pairs", "over_rows", "overlong_penalty", "overlong_reward", "pack", "pad", "pair_accuracy",
    "pair_log_ratios", "pair_metrics", "paired_difference", "pairs", "pairwise_reward", "pass_at_k",
    "pass_at_k_advantages", "pass_hat_k", "penalties", "phase", "plackett_luce_loss", "plain", "plan",
    "plan_micro_batches", "plan_rollout", "policy_gradient", "ppo_loss", "preference_margin", "pretrained",
    "probability_correlation", "process_reward_loss", "promoted", "proximal_logprobs", "publish_weights",
    "published_weights", "qrpo_loss", "quantile_rewards", "rao_kupper_loss", "rating_loss", "ratio_corrected",
    "ratio_metrics", "read_response", "realigned", "reasoning_gym_reward", "reasoning_gym_rows", "rebel_loss",
    "refill", "regrade", "reinforce_loss", "reinforce_pp_advantages", "reinforce_pp_baseline", "reliability_curve",
    "remax_advantages", "renderer_of", "repeated_tokens", "repetition_penalty", "replay_draw", "report",
    "resampled_rows", "restarted", "reverse_kl_loss", "reward_app", "robust_dpo_loss", "role_advantages", "rollouts",
    "routed_tokens", "router_z_loss", "row_costs", "row_max", "row_mean", "row_sum", "run_code", "safety_loss",
    "same_shape", "sample_columns", "sandbox_support", "sapo_loss", "save_rollouts", "saved_steps", "score_metrics",
    "scorer_reward", "scores_after", "seed_of", "sequence_logprobs", "sequence_mask", "sequence_metrics",
    "sequence_ratio", "sequence_weights", "serve_reward", "sft_loss", "sglang", "shared_prefix", "show",
    "sign_weights", "simpo_loss", "soft_values", "softened_logprobs", "split_long", "sppo_loss", "staleness_weights",
    "standardized", "step_rewards", "step_seconds", "straight_through", "support_logprobs", "swap_completions",
    "taskset_environment", "taskset_rows", "teacher_mix_weights", "textarena_environment", "tie_loss", "ties_score",
    "timed", "to_arrow", "token_covariance", "token_logprobs", "token_mask", "tool_environment", "topr_loss",
    "tpo_loss", "trajectory_returns", "truncated_weights", "truncation_penalty", "truncation_score", "two_hot",
    "udm_weights", "uld_loss", "unpack", "update_moments", "value_loss", "value_metrics", "verdict_metrics",
    "verifiers_environment", "verifiers_rows", "vespo_loss", "veto_mask", "vine_advantages", "vllm", "vtrace", "watch",
    "weighted_scores", "whiten", "wilson_interval", "win_rate", "within", "without_times", "without_truncated",
    "without_unscored", "wpo_weights", "writable", "wsd", "xpo_loss", "zero", "zero_unweighted",
]

def __getattr__(name):
    if name == "__version__":
        from importlib.metadata import version
        return version("rlblocks")
    if name in _LAZY: return getattr(import_module(f"rlblocks.{_LAZY[name]}"), name)
    near = _near(name)
    hint = f"; is {' or '.join(near)} meant?" if near else ""
    # `from rlblocks import name` asks through importlib, which leaves the hint out, and then looks for such a module
    importing = _getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
    if near and importing and not find_spec(f"rlblocks.{name}"):
        raise ImportError(f"cannot import name {name!r} from 'rlblocks'{hint}", name=name)
    raise AttributeError(f"module 'rlblocks' has no attribute {name!r}{hint}")

def _near(name):
    "Names like one that is not there; of private ones, which libraries ask for, none."
    from difflib import get_close_matches
    return [] if name.startswith("_") else get_close_matches(name, __all__, 2, .75)

# importable by name, but not among what `rlblocks.<Tab>` shows: oracles, what only annotations name, guards, and
# the small pieces of the losses' bodies, which are here so that every body can be copied into a cell and changed
_APART = {"Counts", "Denom", "Metric", "Number", "Over", "Whole", "divisor", "same_shape", "check_clip", "clip",
          "half_square", "masked_data", "mean_logprobs_only", "means_of", "promoted", "routed_tokens",
          "zero_unweighted"}

def __dir__():
    return [*(name for name in __all__ if name not in _APART and not name.startswith("naive_")), "__version__"]

# in IPython and Jupyter, `gae?` and Shift-Tab show what each parameter is
if _shell := getattr(import_module("builtins"), "get_ipython", None):
    import_module("rlblocks.people.help").show_definitions(_shell())
