"verl 0.9.1: `core_algos`, `torch_functional`, `rollout_corr_helper`."
import numpy as np
import torch
from peers import actor_config, verl
from rows import at, row
from types import SimpleNamespace

core = lambda: verl().core_algos
F = lambda: verl().torch_functional


def index(group): return np.array(group.tolist())
def at_last(scores, mask):  # where verl's reward managers put the verdict
    last = mask.shape[1] - 1 - mask.int().flip(1).argmax(1)
    return torch.zeros(mask.shape).scatter(1, last[:, None], scores[:, None])


# -- masked

for mode, call in (
    ("token-mean", "aggregate(x, mask)"),
    ("seq-mean-token-mean", "aggregate(x, mask, over='rows')"),
    ("seq-mean-token-sum", "aggregate(x, mask, denom=mask.any(1).sum())"),
    ("seq-mean-token-sum-norm", "aggregate(x, mask, denom=mask.any(1).sum()*mask.shape[1])"),
    ("token-sum", "aggregate(x, mask, denom=1)"),
):
    row("verl", f"agg_loss {mode}", call, wrt="x")(lambda c, mode=mode: core().agg_loss(c.x, c.mask, mode))

@row("verl", "agg_loss token-mean, batch_num_tokens", "aggregate(x, mask, denom=100)", wrt="x")
def _(c): return core().agg_loss(c.x, c.mask, "token-mean", dp_size=1, batch_num_tokens=100)

@row("verl", "agg_loss seq-mean-token-mean, global_batch_size", "aggregate(x, mask, over='rows', denom=32.)", wrt="x")
def _(c): return core().agg_loss(c.x, c.mask, "seq-mean-token-mean", global_batch_size=32)

@row("verl", "masked_mean", "masked_mean(x, mask)", wrt="x")
def _(c): return F().masked_mean(c.x, c.mask)

@row("verl", "masked_var", "masked_std(x, mask)**2", wrt="x")
def _(c): return F().masked_var(c.x, c.mask)

@row("verl", "masked_whiten", "whiten(x, mask)", wrt="x")
def _(c): return at(c.mask, F().masked_whiten(c.x, c.mask))

@row("verl", "masked_whiten shift_mean=False", "whiten(x, mask, shift=False)", wrt="x")
def _(c): return at(c.mask, F().masked_whiten(c.x, c.mask, shift_mean=False))


# -- logprobs

@row("verl", "logprobs_from_logits", "gather_logprobs(logits, tokens)", wrt="logits")
def _(c): return F().logprobs_from_logits(c.logits, c.tokens)

@row("verl", "entropy_from_logits", "entropy(logits)", wrt="logits")
def _(c): return F().entropy_from_logits(c.logits)


# -- kl

for kind, call in (("k1", "kl_k1(logprobs, ref_logprobs)"), ("mse", "kl_k2(logprobs, ref_logprobs)"),
                   ("low_var_kl", "kl_k3(logprobs, ref_logprobs)"),
                   ("k1+", "straight_through(kl_k1(logprobs, ref_logprobs), kl_k2(logprobs, ref_logprobs))"),
                   ("k3+", "straight_through(kl_k3(logprobs, ref_logprobs), kl_k2(logprobs, ref_logprobs))")):
    row("verl", f"kl_penalty {kind}", call,
        wrt="logprobs")(lambda c, kind=kind: core().kl_penalty(c.logprobs, c.ref_logprobs, kind))

@row("verl", "kl_penalty low_var_kl, reference 3 nats above", "kl_k3(logprobs, logprobs.detach() + 3)", wrt="logprobs",
     because="verl clamps the value at 10: the token that drifted most has no gradient (k3 there is 16.1)")
def _(c): return core().kl_penalty(c.logprobs, c.logprobs.detach() + 3, "low_var_kl")

@row("verl", "AdaptiveKLController", "torch.tensor(adaptive_kl_coef(.1, .07, target=.05, horizon=1000, n_rows=64))")
def _(c):
    controller = core().AdaptiveKLController(.1, .05, 1000)
    controller.update(.07, 64)
    return torch.tensor(float(controller.value))

@row("verl", "compute_rewards", "rewards - kl_coef*kl_k1(old_logprobs, ref_logprobs)", wrt="rewards")
def _(c): return core().compute_rewards(c.rewards, c.old_logprobs, c.ref_logprobs, c.kl_coef)


# -- advantages

def verl_gae(c, mask=None, **kw):
    return core().compute_gae_advantage_return(c.rewards, c.values, (c.mask if mask is None else mask).float(),
                                               kw.get("gamma", .99), kw.get("lam", .95))

@row("verl", "compute_gae_advantage_return advantages", "whiten(gae(rewards, values, mask, gamma=.99)[0], mask)")
def _(c): return at(c.mask, verl_gae(c)[0])

@row("verl", "compute_gae_advantage_return advantages, not whitened", "gae(rewards, values, mask, gamma=.99)[0]",
     because="whitening is part of the estimator there, a block of its own here")
def _(c): return at(c.mask, verl_gae(c)[0])

@row("verl", "compute_gae_advantage_return returns", "gae(rewards, values, mask, gamma=.99)[1]")
def _(c): return at(c.mask, verl_gae(c)[1])

@row("verl", "compute_reinforce_plus_plus_outcome_advantage returns", "discounted_returns(rewards, mask, gamma=.9)")
def _(c):
    return core().compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask.float(), SimpleNamespace(gamma=.9))[1]

@row("verl", "compute_reinforce_plus_plus_outcome_advantage",
     "whiten(discounted_returns(rewards, mask, gamma=.9), mask)")
def _(c):
    return core().compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask.float(), SimpleNamespace(gamma=.9))[0]

@row("verl", "compute_grpo_outcome_advantage", "at_tokens(group_advantages(scores, ragged), mask)")
def _(c): return core().compute_grpo_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.ragged))[0]

@row("verl", "compute_grpo_outcome_advantage norm_adv_by_std_in_grpo=False",
     "at_tokens(group_advantages(scores, ragged, scale=False), mask)")
def _(c):
    return core().compute_grpo_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.ragged),
                                                 norm_adv_by_std_in_grpo=False)[0]

@row("verl", "compute_grpo_vectorized_outcome_advantage", "at_tokens(group_advantages(scores, ragged), mask)")
def _(c):
    return core().compute_grpo_vectorized_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(),
                                                            index(c.ragged))[0]

@row("verl", "compute_rloo_outcome_advantage", "at_tokens(leave_one_out(scores, ragged), mask)")
def _(c): return core().compute_rloo_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.ragged))[0]

@row("verl", "compute_rloo_vectorized_outcome_advantage", "at_tokens(leave_one_out(scores, ragged), mask)")
def _(c):
    return core().compute_rloo_vectorized_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(),
                                                            index(c.ragged))[0]

alone = torch.tensor([0, 0, 0, 0, 1, 1, 1, 7])

@row("verl", "compute_rloo_outcome_advantage, a group of one",
     "at_tokens(leave_one_out(scores, torch.tensor([0, 0, 0, 0, 1, 1, 1, 7])), mask)",
     because="the loop keeps the raw score of a group of one, its vectorised twin and we give 0")
def _(c): return core().compute_rloo_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(alone))[0]

@row("verl", "compute_rloo_vectorized_outcome_advantage, a group of one",
     "at_tokens(leave_one_out(scores, torch.tensor([0, 0, 0, 0, 1, 1, 1, 7])), mask)")
def _(c):
    return core().compute_rloo_vectorized_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(alone))[0]

@row("verl", "compute_grpo_outcome_advantage, equal scores .1",
     "at_tokens(group_advantages(0*scores + .1, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])), mask)",
     because="rounding of the mean divided by ε: equal scores get an advantage; ours is exactly 0")
def _(c):
    return core().compute_grpo_outcome_advantage(at_last(0*c.scores + .1, c.mask), c.mask.float(),
                                                 index(torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])))[0]


# -- policy losses

def policy(name, c, advantages, mode="token-mean", **config):
    function = core().POLICY_LOSS_REGISTRY[name]
    return function(c.old_logprobs, c.logprobs, advantages, c.mask.float(), mode, actor_config(**config))[0]

def by_row(c): return at(c.mask, c.row_advantages[:, None].expand_as(c.mask))

@row("verl", "compute_policy_loss_vanilla", "ppo_loss(logprobs, old_logprobs, advantages, mask, dual_clip=3.)",
     wrt="logprobs")
def _(c): return policy("vanilla", c, c.advantages)

@row("verl", "compute_policy_loss_vanilla clip_ratio_high=.28",
     "ppo_loss(logprobs, old_logprobs, advantages, mask, clip_low=.2, clip_high=.28, dual_clip=3.)", wrt="logprobs")
def _(c): return policy("vanilla", c, c.advantages, clip_ratio_high=.28)

@row("verl", "compute_policy_loss_vanilla clip_ratio_c=1.2",
     "ppo_loss(logprobs, old_logprobs, advantages, mask, dual_clip=1.2)", wrt="logprobs")
def _(c): return policy("vanilla", c, c.advantages, clip_ratio_c=1.2)

@row("verl", "compute_policy_loss_vanilla clip_ratio_c=1.2, not asked for",
     "ppo_loss(logprobs, old_logprobs, advantages, mask)", wrt="logprobs",
     because="dual clip is on by default (c = 3; 1.2 here, so that 96 tokens show it)")
def _(c): return policy("vanilla", c, c.advantages, clip_ratio_c=1.2)

@row("verl", "compute_policy_loss_vanilla seq-mean-token-mean",
     "ppo_loss(logprobs, old_logprobs, advantages, mask, dual_clip=3., over='rows')", wrt="logprobs")
def _(c): return policy("vanilla", c, c.advantages, "seq-mean-token-mean")

@row("verl", "compute_policy_loss_vanilla rollout_is_weights",
     "ppo_loss(logprobs, old_logprobs, truncated_weights(old_logprobs, rollout_logprobs, mask)*advantages, mask, "
     "dual_clip=3.)", wrt="logprobs")
def _(c):
    weights = verl().rollout_corr_helper.compute_rollout_correction_weights(c.old_logprobs - c.rollout_logprobs,
                                                                            c.mask.float(), "token", 2.)[0]
    return core().compute_policy_loss_vanilla(c.old_logprobs, c.logprobs, c.advantages, c.mask.float(), "token-mean",
                                              actor_config(), weights)[0]


# -- value losses

def value(c, clip): return core().compute_value_loss(c.values, c.returns, c.old_values, c.mask.float(), clip)[0]

@row("verl", "compute_value_loss", "value_loss(values, old_values, returns, mask, clip=.5)", wrt="values")
def _(c): return value(c, .5)

@row("verl", "compute_value_loss cliprange_value, as by default", "value_loss(values, old_values, returns, mask)",
     wrt="values", because="verl's default range is .5, ours .2 as in the paper's code")
def _(c): return value(c, .5)


# -- the other estimators

@row("verl", "compute_reinforce_plus_plus_baseline_outcome_advantage", "reinforce_pp_baseline(scores, ragged, mask)")
def _(c):
    return core().compute_reinforce_plus_plus_baseline_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(),
                                                                         index(c.ragged))[0]

@row("verl", "compute_opo_outcome_advantage", "at_tokens(opo_advantages(scores, ragged, lengths=mask.sum(1)), mask)")
def _(c): return core().compute_opo_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.ragged))[0]

@row("verl", "compute_remax_outcome_advantage", "remax_advantages(rewards, baselines, mask)")
def _(c): return at(c.mask, core().compute_remax_outcome_advantage(c.rewards, c.baselines, c.mask.float())[0])

@row("verl", "compute_gpg_outcome_advantage, no score is 0", "at_tokens(gpg_advantages(scores, ragged), mask)")
def _(c): return core().compute_gpg_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.ragged))[0]

@row("verl", "compute_gpg_outcome_advantage, scores 0 and 1",
     "at_tokens(gpg_advantages(desirable.float(), group), mask)",
     because="α counts rows whose score is not 0; the paper, and we, rows whose group is not of equals")
def _(c):
    return core().compute_gpg_outcome_advantage(at_last(c.desirable.float(), c.mask), c.mask.float(), index(c.group))[0]

@row("verl", "compute_grpo_passk_outcome_advantage norm_adv_by_std_in_grpo",
     "at_tokens(best_of_n_advantages(scores, group, scale=True), mask)")
def _(c):
    return core().compute_grpo_passk_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.group),
                                                       config={})[0]

@row("verl", "compute_grpo_passk_outcome_advantage", "at_tokens(best_of_n_advantages(scores, group), mask)")
def _(c):
    return core().compute_grpo_passk_outcome_advantage(at_last(c.scores, c.mask), c.mask.float(), index(c.group),
                                                       config=dict(norm_adv_by_std_in_grpo=False))[0]

@row("verl", "compute_gdpo_outcome_advantage", "whiten(at_tokens(gdpo_advantages(scores3, group), mask), mask)")
def _(c):
    keys = ["a", "b", "c"]
    last = c.mask.shape[1] - 1 - c.mask.int().flip(1).argmax(1)  # verl counts the attention mask for it
    attended = torch.arange(c.mask.shape[1] + 1) <= last[:, None] + 1
    return core().compute_gdpo_outcome_advantage(
        torch.zeros(c.mask.shape), c.mask.float(), index(c.group), config=dict(gdpo_reward_keys=keys),
        non_tensor_batch={k: c.scores3[:, i].numpy() for i, k in enumerate(keys)},
        batch=dict(prompts=torch.zeros(8, 1), attention_mask=attended.long()))[0]

def otb(c, name, mask, group, weights=None):
    return getattr(core(), name)(at_last(c.scores, mask), mask.float(), index(group), c.old_logprobs, c.sum_sq,
                                 weights)[0]

@row("verl", "compute_optimal_token_baseline_advantage",
     "optimal_token_baseline(at_last_token(scores, exists), old_logprobs, group, exists, sum_pi_squared=sum_sq, "
     "tail=True)")
def _(c): return otb(c, "compute_optimal_token_baseline_advantage", c.exists, c.group)

@row("verl", "compute_optimal_token_baseline_advantage rollout_is_weights",
     "optimal_token_baseline(at_last_token(scores, exists), old_logprobs, group, exists, sum_pi_squared=sum_sq, "
     "weights=truncated_weights(old_logprobs, rollout_logprobs, exists), tail=True)")
def _(c):
    weights = verl().rollout_corr_helper.compute_rollout_correction_weights(c.old_logprobs - c.rollout_logprobs,
                                                                            c.exists.float(), "token", 2.)[0]
    return otb(c, "compute_optimal_token_baseline_advantage", c.exists, c.group, weights)

@row("verl", "compute_multi_turn_optimal_token_baseline_advantage",
     "optimal_token_baseline(at_last_token(scores, mask), old_logprobs, group, mask, sum_pi_squared=sum_sq, tail=True)")
def _(c): return otb(c, "compute_multi_turn_optimal_token_baseline_advantage", c.mask, c.group)


# -- the other policy losses

R = "logprobs, old_logprobs, at_tokens(row_advantages, mask), mask"

@row("verl", "compute_policy_loss_gspo seq-mean-token-mean", f"gspo_loss({R}, clip_low=.2, clip_high=.2)",
     wrt="logprobs")
def _(c): return policy("gspo", c, by_row(c), "seq-mean-token-mean")

@row("verl", "compute_policy_loss_gspo, advantages of tokens",
     "gspo_token_loss(logprobs, old_logprobs, advantages, mask, clip_low=.2, clip_high=.2)", wrt="logprobs")
def _(c): return policy("gspo", c, c.advantages, "seq-mean-token-mean")

@row("verl", "compute_policy_loss_gspo, token-mean as by default", f"gspo_loss({R}, clip_low=.2, clip_high=.2)",
     wrt="logprobs",
     because="the default loss_agg_mode, token-mean, weighs an answer by its length; since 0.9 it is no longer "
     "overridden")
def _(c): return policy("gspo", c, by_row(c))

@row("verl", "compute_policy_loss_sapo", f"sapo_loss({R})", wrt="logprobs")
def _(c): return policy("sapo", c, by_row(c))

@row("verl", "compute_policy_loss_gpg", "reinforce_loss(logprobs, advantages, mask)", wrt="logprobs")
def _(c): return policy("gpg", c, c.advantages)

@row("verl", "compute_policy_loss_reinforce seq-mean-token-sum",
     "reinforce_loss(logprobs, advantages, mask, denom=mask.any(1).sum())", wrt="logprobs")
def _(c):
    return core().compute_policy_loss_reinforce(c.rollout_logprobs, c.logprobs, c.advantages, c.mask.float(),
                                                config=actor_config())[0]

@row("verl", "compute_policy_loss_cispo",
     "cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low=.2, clip_high=.2)", wrt="logprobs")
def _(c): return policy("cispo", c, c.advantages)

@row("verl", "compute_policy_loss_geo_mean", f"gmpo_loss({R}, nats_low=.2, nats_high=.2)", wrt="logprobs")
def _(c): return policy("geo_mean", c, by_row(c))

@row("verl", "compute_policy_loss_geo_mean, as it stands", f"gmpo_loss({R})", wrt="logprobs",
     because="the paper's range is ±.4 nats; verl takes PPO's .2")
def _(c): return policy("geo_mean", c, by_row(c))

@row("verl", "compute_policy_loss_bypass_mode ppo_clip, seq_mean_k1",
     "ppo_loss(logprobs, old_logprobs, advantages, geometric_mask(logprobs.detach(), old_logprobs, mask, low=.95, "
     "high=1.05), dual_clip=3.)", wrt="logprobs")
def _(c):
    with verl().imports():
        return policy("bypass_mode", c, c.advantages, rollout_correction=dict(
            loss_type="ppo_clip", rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1/1.05}_{1/.95}"))

@row("verl", "compute_policy_loss_bypass_mode reinforce, token",
     "reinforce_loss(logprobs, truncated_weights(logprobs.detach(), old_logprobs, mask)*advantages, mask)",
     wrt="logprobs")
def _(c):
    with verl().imports():
        return policy("bypass_mode", c, c.advantages,
                      rollout_correction=dict(loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.))


@row("verl", "compute_policy_loss_clip_cov, no token clipped",
     "clip_cov_loss(logprobs, old_logprobs, advantages, mask, selected=clip_cov_mask(logprobs, advantages, mask, "
     "uniform=x, share=1., least=.2, most=.8), clip_low=1., clip_high=99.)", wrt="logprobs")
def _(c):
    return policy("clip_cov", c, c.advantages, clip_ratio_low=1., clip_ratio_high=99., clip_cov_ratio=1.,
                  clip_cov_lb=.2, clip_cov_ub=.8)

@row("verl", "compute_policy_loss_clip_cov",
     "clip_cov_loss(logprobs, old_logprobs, advantages, mask, selected=clip_cov_mask(logprobs, advantages, mask, "
     "uniform=x, share=1., least=.2, most=.8))",
     wrt="logprobs", because="tokens that PPO's clip has already stopped are no candidates there; the gradient agrees")
def _(c): return policy("clip_cov", c, c.advantages, clip_cov_ratio=1., clip_cov_lb=.2, clip_cov_ub=.8)

@row("verl", "compute_policy_loss_kl_cov",
     "kl_cov_loss(logprobs, old_logprobs, advantages, mask, selected=kl_cov_mask(logprobs, advantages, mask, "
     "share=.1), kl_coef=.1)", wrt="logprobs")
def _(c): return policy("kl_cov", c, c.advantages, kl_cov_ratio=.1)

@row(
    "verl", "compute_policy_loss_kl_cov ppo_kl_coef, as by default",
    "kl_cov_loss(logprobs, old_logprobs, advantages, mask, selected=kl_cov_mask(logprobs, advantages, mask, share=.1))",
    wrt="logprobs", because="β is .1 in the configuration, 1 in the function and in the paper")
def _(c): return policy("kl_cov", c, c.advantages, kl_cov_ratio=.1)


# -- corrections

def weights(c, level, threshold, normalize=False):
    return verl().rollout_corr_helper.compute_rollout_correction_weights(c.old_logprobs - c.rollout_logprobs,
                                                                         c.mask.float(), level, threshold, normalize)[0]

SAMPLED = "old_logprobs, rollout_logprobs, mask"

@row("verl", "compute_rollout_correction_weights token", f"truncated_weights({SAMPLED}, high=1.1)")
def _(c): return weights(c, "token", 1.1)

@row("verl", "compute_rollout_correction_weights sequence", f"sequence_weights({SAMPLED}, high=1.1)")
def _(c): return at(c.mask, weights(c, "sequence", 1.1))

@row("verl", "compute_rollout_correction_weights token, '.9_1.1' (IcePop)",
     f"icepop_weights({SAMPLED}, low=.9, high=1.1)")
def _(c): return weights(c, "token", ".9_1.1")

@row("verl", "compute_rollout_correction_weights token, batch_normalize",
     f"(lambda w: w/masked_mean(w, mask))(truncated_weights({SAMPLED}, high=1.1))")
def _(c): return weights(c, "token", 1.1, True)

def kept(c, mode, threshold):
    return verl().rollout_corr_helper.compute_rollout_rejection_mask(c.old_logprobs - c.rollout_logprobs,
                                                                     c.mask.float(), mode, threshold)[0]

for mode, threshold, call in (
    ("token_k1", ".9_1.1", f"(icepop_weights({SAMPLED}, low=1/1.1, high=1/.9) > 0)"),
    ("token_k2", "0.02", "within(kl_k2(old_logprobs, rollout_logprobs), mask, high=.02)"),
    ("token_k3", "0.02", "within(kl_k3(rollout_logprobs, old_logprobs), mask, high=.02)"),
    ("seq_sum_k1", ".5_1.2", f"sequence_mask({SAMPLED}, low=1/1.2, high=2.)"),
    ("seq_mean_k1", ".97_1.05", f"geometric_mask({SAMPLED}, low=1/1.05, high=1/.97)"),
    ("seq_sum_k3", "0.15", "within(row_sum(kl_k3(rollout_logprobs, old_logprobs), mask), mask, high=.15)"),
    ("seq_mean_k2", "0.02", "within(row_mean(kl_k2(old_logprobs, rollout_logprobs), mask), mask, high=.02)"),
    ("seq_max_k3", "0.06", "within(row_max(kl_k3(rollout_logprobs, old_logprobs), mask), mask, high=.06)"),
):
    row("verl", f"compute_rollout_rejection_mask {mode} {threshold}",
        call + ".float()")(lambda c, mode=mode, threshold=threshold: kept(c, mode, threshold))


# -- draws by weight

def drawn(c, method, **kw):
    "The weights that verl hands to multinomial."
    seen = []
    original, torch.multinomial = torch.multinomial, lambda weights, n, replacement: (seen.append(weights),
                                                                                      torch.arange(n))[1]
    try:
        try:
            core().compute_pf_ppo_reweight_data(SimpleNamespace(batch=dict(token_level_scores=c.scores[:, None]),
                                                                non_tensor_batch={}, meta_info={}), method, **kw)
        except Exception:  # what follows the draw needs a DataProto
            if not seen: raise
    finally: torch.multinomial = original
    return seen[0]

@row("verl", "compute_pf_ppo_reweight_data pow", "scores.abs().pow(2.) + 1e-8")
def _(c): return drawn(c, "pow")

@row("verl", "compute_pf_ppo_reweight_data max_min", "best_worst_weights(scores, 0*group) + 1e-8")
def _(c): return drawn(c, "max_min")

@row("verl", "compute_pf_ppo_reweight_data max_random", "torch.where(scores == scores.max(), .4, .1) + 1e-8")
def _(c): return drawn(c, "max_random")


# -- distillation

@row("verl", "distillation.fsdp.compute_forward_kl_topk",
     "(lambda ids: forward_kl_loss(support_logprobs(logits, ids, mask), "
     "support_logprobs(teacher_logits, ids, mask), mask))(teacher_logits.topk(4).indices)", wrt="logits",
     because="Σ over the top k alone is no divergence: what the teacher gives to all other ids is left out, and "
     "the sum can be negative")
def _(c):
    top = c.teacher_logits.log_softmax(-1).topk(4)
    nested = lambda x: torch.nested.nested_tensor([x.flatten(0, 1)], layout=torch.jagged)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(use_chunked_topk=False, log_prob_min_clamp=None))
    loss = verl().losses.compute_forward_kl_topk(c.logits.flatten(0, 1)[None], nested(top.values), nested(top.indices),
                                                 config, "thd")["distillation_losses"].view(8, 12)
    return at(c.mask, loss).sum()/c.mask.sum()


# -- trust regions and leashes

@row("verl", "compute_policy_loss_dppo_tv",
     "dppo_tv_loss(logprobs, old_logprobs, advantages, mask, shift_low=.03, shift_high=.03)", wrt="logprobs")
def _(c): return policy("dppo_tv", c, c.advantages, clip_ratio_low=.03, clip_ratio_high=.03, clip_ratio_c=20.)

@row("verl", "compute_policy_loss_dppo_kl",
     "dppo_kl_loss(logprobs, old_logprobs, advantages, mask, nats_low=.02, nats_high=.02)", wrt="logprobs")
def _(c): return policy("dppo_kl", c, c.advantages, clip_ratio_low=.02, clip_ratio_high=.02, clip_ratio_c=20.)

@row("verl", "compute_policy_loss_dppo_tv clip_ratio_c, as by default",
     "dppo_tv_loss(logprobs, old_logprobs - 2, advantages, mask)", wrt="logprobs",
     because="verl caps the weight at PPO's clip_ratio_c, 3 in the configuration and 20 in the function alone; its "
     "published DPPO run sets it out of reach, as ours is by default")
def _(c): return policy("dppo_tv", SimpleNamespace(**vars(c) | dict(old_logprobs=c.old_logprobs - 2)), c.advantages)

@row("verl", "compute_policy_loss_dro", "dro_loss(logprobs, old_logprobs, advantages, mask, beta=.5)", wrt="logprobs")
def _(c): return policy("dro", c, c.advantages, dro_beta=.5)

@row("verl", "compute_reinforce_plus_plus_outcome_advantage, one call",
     "reinforce_pp_advantages(rewards, mask, gamma=.9)")
def _(c):
    return core().compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask.float(), SimpleNamespace(gamma=.9))[0]

@row("verl", "compute_rewards, masked", "kl_shaped(rewards, old_logprobs, ref_logprobs, mask, kl_coef=kl_coef)")
def _(c): return at(c.mask, core().compute_rewards(c.rewards, c.old_logprobs, c.ref_logprobs, c.kl_coef))
