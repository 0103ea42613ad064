"TRL 1.16.0: the statements of its trainers' losses and advantages, and its functions."
import os
from types import SimpleNamespace

import torch
from peers import Lazily, bare, defaults, statements
from rows import at, row

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl, reward_functions, utils = map(Lazily, ("trl", "trl.rewards", "trl.trainer.utils"))
trl_a2po, trl_cpo, trl_gkd, trl_gmpo, trl_online_dpo, trl_orpo, trl_tpo, async_grpo_trainer, loss_utils = (
    Lazily(f"trl.experimental.{x}") for x in ("a2po", "cpo", "gkd", "gmpo", "online_dpo", "orpo", "tpo",
                                              "async_grpo.async_grpo_trainer", "sdpo.loss_utils"))


# -- log-probs

@row("trl", "trainer.utils.selective_log_softmax", "gather_logprobs(logits, tokens)", wrt="logits")
def _(c): return utils.selective_log_softmax(c.logits, c.tokens)

@row("trl", "trainer.utils.selective_log_softmax temperature=.7", "gather_logprobs(logits, tokens, temperature=.7)",
     wrt="logits")
def _(c): return utils.selective_log_softmax(c.logits, c.tokens, temperature=.7)

@row("trl", "trainer.utils.entropy_from_logits", "entropy(logits)", wrt="logits")
def _(c): return utils.entropy_from_logits(c.logits)


# -- shaping

@row("trl", "rewards.get_soft_overlong_punishment(10, 4)", "overlong_penalty(lengths, max_length=10, buffer=4)")
def _(c): return torch.tensor(reward_functions.get_soft_overlong_punishment(10, 4)([[1]*int(n) for n in c.lengths]))

@row("trl", "rewards.get_repetition_penalty_reward(2)", "repetition_penalty(tokens % 3, exists, n=2)")
def _(c):
    return torch.tensor(reward_functions.get_repetition_penalty_reward(2)(
        [t[:n].tolist() for t, n in zip(c.tokens % 3, c.lengths, strict=True)]))

@row("trl", "rewards.get_cosine_scaled_reward(max_len=10)",
     "cosine_length_reward(desirable, lengths, max_length=10, right=(1., .5), wrong=(-1., -.5), exceeded=None)")
def _(c):
    from trl.rewards import accuracy_rewards
    original, accuracy_rewards.accuracy_reward = accuracy_rewards.accuracy_reward, lambda *args: c.desirable.tolist()
    try:
        return torch.tensor(
            reward_functions.get_cosine_scaled_reward(max_len=10)(None, None, [[1]*int(n) for n in c.lengths]))
    finally: accuracy_rewards.accuracy_reward = original


# -- advantages

def scored(c, rewards, functions=1, n=4, method=None, first="unscorable_mask =", last="advantages = torch.nan_to_num",
           **config):
    "The lines of GRPO's trainer between the reward functions and the advantages."
    args = defaults(trl.GRPOConfig, **config)
    trainer = bare(trl.GRPOTrainer, args=args, reward_weights=torch.ones(functions), reward_funcs=[None]*functions,
                   scale_rewards=args.scale_rewards, multi_objective_aggregation=args.multi_objective_aggregation)
    return statements(trl.GRPOTrainer._generate_and_score_completions, first,
                      last)(self=trainer, rewards_per_func=rewards.reshape(len(rewards), -1),
                            device=torch.device("cpu"), num_generations=n).advantages

@row("trl", "GRPOTrainer scale_rewards=group", "group_advantages(scores, group, eps=1e-4)")
def _(c): return scored(c, c.scores)

@row("trl", "GRPOTrainer scale_rewards=none", "group_advantages(scores, group, scale=False)")
def _(c): return scored(c, c.scores, scale_rewards="none")

@row("trl", "GRPOTrainer scale_rewards=batch", "lite_ppo_advantages(scores, group, eps=1e-4)")
def _(c): return scored(c, c.scores, scale_rewards="batch")

@row("trl", "GRPOTrainer scale_rewards=group, ε as ours", "group_advantages(scores, group)",
     because="ε: TRL adds 1e-4 to the std, we 1e-6")
def _(c): return scored(c, c.scores)

@row("trl", "GRPOTrainer scale_rewards=group, one unscorable",
     "group_advantages(torch.where(torch.arange(8) == 2, torch.nan, scores), group, eps=1e-4)")
def _(c): return scored(c, torch.where(torch.arange(8) == 2, torch.nan, c.scores))

@row("trl", "GRPOTrainer scale_rewards=group, equal scores .1", "group_advantages(0*scores + .1, 0*group, eps=1e-4)",
     because="rounding of the mean divided by ε; with 1e-4 it is small, ours is exactly 0")
def _(c): return scored(c, 0*c.scores + .1, n=8)

@row("trl", "GRPOTrainer normalize_then_sum", "gdpo_advantages(scores3, group, eps=1e-4)")
def _(c): return scored(c, c.scores3, functions=3, multi_objective_aggregation="normalize_then_sum")

def rloo(c, rewards, **config):
    args = defaults(trl.RLOOConfig, **config)
    trainer = bare(trl.RLOOTrainer, args=args, beta=args.beta, reward_weights=torch.ones(1),
                   reward_clip_range=args.reward_clip_range, normalize_advantages=args.normalize_advantages)
    return statements(trl.RLOOTrainer._generate_and_score_completions, "unscorable_mask =",
                      "advantages = torch.nan_to_num")(
        self=trainer, rewards_per_func=rewards[:, None], device=torch.device("cpu"), num_generations=4,
        old_per_token_logps=c.old_logprobs, ref_per_token_logps=c.ref_logprobs,
        completion_mask=c.mask, gather=lambda x: x).advantages

@row("trl", "RLOOTrainer beta=0", "leave_one_out(scores, group)")
def _(c): return rloo(c, c.scores, beta=0.)

@row("trl", "RLOOTrainer beta=.05, the default",
     "leave_one_out(scores - .05*masked_sum(kl_k1(old_logprobs, ref_logprobs), mask, dim=-1), group)")
def _(c): return rloo(c, c.scores)

@row("trl", "RLOOTrainer reward_clip_range=(-.5, .5)", "leave_one_out(clip_rewards(scores, limit=.5), group)")
def _(c): return rloo(c, c.scores, beta=0., reward_clip_range=(-.5, .5))

@row("trl", "RLOOTrainer one unscorable", "leave_one_out(torch.where(torch.arange(8) == 2, torch.nan, scores), group)")
def _(c): return rloo(c, torch.where(torch.arange(8) == 2, torch.nan, c.scores), beta=0.)

@row("trl", "A2POTrainer V*", "soft_values(scores, group, beta=.5)[::4]")
def _(c):
    import math
    return statements(trl_a2po.A2POTrainer._estimate_optimal_values, "v_star =",
                      "v_star =")(beta1=.5, rewards=c.scores.view(2, 4), n=4, math=math).v_star


# -- corrections

def is_ratio(c, mode, low=None, high=3.):
    trainer = bare(trl.GRPOTrainer, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
                   vllm_importance_sampling_clip_max=high)
    run = statements(trl.GRPOTrainer._generate_and_score_completions, "mask = completion_mask if tool_mask is None",
                     "if self.vllm_importance_sampling_mode in")
    found = run(self=trainer, completion_mask=c.mask, tool_mask=None, old_per_token_logps=c.old_logprobs,
                sampling_per_token_logps=c.rollout_logprobs)
    return at(c.mask, found.vllm_importance_sampling_ratio.expand_as(c.mask))

@row("trl", "vllm_importance_sampling_mode token_truncate",
     "truncated_weights(old_logprobs, rollout_logprobs, mask, high=1.1)")
def _(c): return is_ratio(c, "token_truncate", high=1.1)

@row("trl", "vllm_importance_sampling_mode token_truncate, two-sided",
     "truncated_weights(old_logprobs, rollout_logprobs, mask, low=.9, high=1.1)")
def _(c): return is_ratio(c, "token_truncate", .9, 1.1)

@row("trl", "vllm_importance_sampling_mode token_mask",
     "icepop_weights(old_logprobs, rollout_logprobs, mask, low=.9, high=1.1)")
def _(c): return is_ratio(c, "token_mask", .9, 1.1)

@row("trl", "vllm_importance_sampling_mode sequence_truncate",
     "sequence_weights(old_logprobs, rollout_logprobs, mask, high=1.1)")
def _(c): return is_ratio(c, "sequence_truncate", high=1.1)

@row("trl", "vllm_importance_sampling_mode sequence_mask, the default",
     "sequence_weights(old_logprobs, rollout_logprobs, mask, high=20.)*sequence_mask(old_logprobs, "
     "rollout_logprobs, mask, high=1.1)")
def _(c): return is_ratio(c, "sequence_mask", high=1.1)

@row("trl", "GRPOTrainer.get_off_policy_mask",
     "off_policy_sequence_mask(logprobs, rollout_logprobs, at_tokens(row_advantages, mask), mask, "
     "threshold=.02).float()")
def _(c):
    return at(c.mask, trl.GRPOTrainer.get_off_policy_mask(c.row_advantages[:, None], c.logprobs, c.rollout_logprobs,
                                                          c.mask.float(), .02).expand_as(c.mask))


# -- policy losses

def grpo(c, advantages, trainer=None, config=None, **changed):
    "GRPO's `_compute_loss`, with the log-probs given."
    a = defaults(config or trl.GRPOConfig, **changed)
    a.steps_per_generation = 1
    made = bare(
        trainer or trl.GRPOTrainer, args=a, epsilon_low=a.epsilon,
        epsilon_high=a.epsilon if a.epsilon_high is None else a.epsilon_high, max_completion_length=c.mask.shape[1],
        _entropy_bonus_enabled=a.entropy_coef != 0, use_adaptive_entropy=False, entropy_coef=a.entropy_coef,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (c.logprobs, c.entropies, None),
        **{k: getattr(a, k) for k in ("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile",
                                      "off_policy_mask_threshold", "use_vllm", "vllm_importance_sampling_correction")})
    ids = torch.zeros(len(c.mask), 1, dtype=torch.long)
    return made._compute_loss(
        None, dict(prompt_ids=ids, prompt_mask=ids + 1, completion_ids=c.tokens, completion_mask=c.exists.long(),
                   tool_mask=c.mask.long(), advantages=advantages,
                   old_per_token_logps=c.old_logprobs, ref_per_token_logps=c.ref_logprobs,
                   num_items_in_batch=c.mask.sum(), sampling_per_token_logps=c.rollout_logprobs,
                   **dict(importance_sampling_ratio=is_ratio(c, "token_truncate", high=2.)) if a.use_vllm else {}))

A = "logprobs, old_logprobs, at_tokens(row_advantages, mask), mask"

@row("trl", "GRPOTrainer loss_type=grpo", f"ppo_loss({A}, over='rows')", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="grpo")

@row("trl", "GRPOTrainer loss_type=grpo, beta=.04, use_bias_correction_kl=False",
     "grpo_loss(logprobs, old_logprobs, ref_logprobs, at_tokens(row_advantages, mask), mask, kl_coef=.04)",
     wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="grpo", beta=.04, use_bias_correction_kl=False)

@row("trl", "GRPOTrainer loss_type=grpo, beta=.04",
     "grpo_loss(logprobs, old_logprobs, ref_logprobs, at_tokens(row_advantages, mask), mask, kl_coef=.04)",
     wrt="logprobs",
     because="TRL multiplies k3 by the differentiable ratio by default (DeepSeek-V3.2); GRPO's paper has k3 alone")
def _(c): return grpo(c, c.row_advantages, loss_type="grpo", beta=.04)

@row("trl", "GRPOTrainer loss_type=grpo, beta=.04, use_bias_correction_kl, the default",
     f"ppo_loss({A}, over='rows')[0] + .04*aggregate(ratio_corrected(kl_k3(logprobs, ref_logprobs), logprobs, "
     "old_logprobs), mask, over='rows')", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="grpo", beta=.04)

@row("trl", "GRPOTrainer loss_type=bnpo", f"ppo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="bnpo")

@row("trl", "GRPOTrainer loss_type=dapo, the default", f"ppo_loss({A}, denom=mask.sum())", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages)

@row("trl", "GRPOTrainer loss_type=dapo, epsilon_high=.28", f"dapo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, epsilon_high=.28)

@row("trl", "GRPOTrainer loss_type=dr_grpo", f"dr_grpo_loss({A}, max_tokens=12)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="dr_grpo")

@row("trl", "GRPOTrainer delta=1.3", f"ppo_loss({A}, dual_clip=1.3)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, delta=1.3)

@row("trl", "GRPOTrainer delta=1.1, within the clip", f"ppo_loss({A}, dual_clip=1.1)", wrt="logprobs",
     because="below 1 + ε_high TRL's δ also caps tokens with a positive advantage; dual clip never does")
def _(c): return grpo(c, c.row_advantages, delta=1.1)

@row("trl", "GRPOTrainer advantages [B, T]", "ppo_loss(logprobs, old_logprobs, advantages, mask)", wrt="logprobs")
def _(c): return grpo(c, c.advantages)

@row("trl", "GRPOTrainer use_vllm, token_truncate",
     "ppo_loss(logprobs, old_logprobs, truncated_weights(old_logprobs, rollout_logprobs, "
     "mask)*at_tokens(row_advantages, mask), mask)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, use_vllm=True)

@row("trl", "GRPOTrainer off_policy_mask_threshold=.02",
     "ppo_loss(logprobs, old_logprobs, at_tokens(row_advantages, mask), off_policy_sequence_mask(logprobs, "
     "rollout_logprobs, at_tokens(row_advantages, mask), mask, threshold=.02), " "denom=mask.sum())", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, off_policy_mask_threshold=.02)

@row("trl", "GRPOTrainer entropy_coef=.01", f"ppo_loss({A})[0] + entropy_loss(entropies, mask)[0]*.01",
     wrt="logprobs entropies")
def _(c): return grpo(c, c.row_advantages, entropy_coef=.01)

@row("trl", "GRPOTrainer.get_high_entropy_mask", "high_entropy_mask(entropies, mask, share=.2).float()")
def _(c): return bare(trl.GRPOTrainer).get_high_entropy_mask(c.entropies, c.mask, .8).float()

@row("trl", "GRPOTrainer top_entropy_quantile=.2",
     f"ppo_loss({A[:-4]}high_entropy_mask(entropies, mask, share=.2), denom=mask.sum())", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, top_entropy_quantile=.2)

@row("trl", "GRPOTrainer importance_sampling_level=sequence, loss_type=grpo",
     f"gspo_loss({A}, clip_low=.2, clip_high=.2)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, importance_sampling_level="sequence", loss_type="grpo")

@row("trl", "GRPOTrainer importance_sampling_level=sequence", f"gspo_loss({A}, clip_low=.2, clip_high=.2)",
     wrt="logprobs",
     because="the default loss_type, dapo, weighs an answer by its length; GSPO's paper weighs answers alike")
def _(c): return grpo(c, c.row_advantages, importance_sampling_level="sequence")

@row("trl", "GRPOTrainer loss_type=luspo, sequence", f"luspo_loss({A}, clip_low=.2, clip_high=.2)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="luspo", importance_sampling_level="sequence")

@row("trl", "GRPOTrainer loss_type=cispo, epsilon_high=5", f"cispo_loss({A}, clip_high=4.)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="cispo", epsilon_high=5.)

@row("trl", "GRPOTrainer loss_type=cispo, epsilon_high=1.1", f"cispo_loss({A}, clip_high=.1)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="cispo", epsilon_high=1.1)

@row("trl", "GRPOTrainer loss_type=cispo, as it stands", f"cispo_loss({A})", wrt="logprobs",
     because="epsilon_high is the bound itself there (ours is 1 + clip_high) and defaults to .2: every weight "
     "above .2 is .2, the loss about five times smaller")
def _(c): return grpo(c, c.row_advantages, loss_type="cispo")

@row("trl", "GRPOTrainer loss_type=cispo, as it stands, is .2 × REINFORCE",
     "reinforce_loss(logprobs, .2*at_tokens(row_advantages, mask), mask)", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="cispo")

@row("trl", "GRPOTrainer loss_type=sapo", f"sapo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="sapo")

@row("trl", "GRPOTrainer loss_type=vespo", f"vespo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="vespo")

@row("trl", "GMPOTrainer", f"gmpo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, trl_gmpo.GMPOTrainer, trl_gmpo.GMPOConfig)

@row("trl", "RLOOTrainer loss", "(lambda s: torch.maximum(-s.exp()*row_advantages, -s.exp().clamp(.8, "
     "1.2)*row_advantages).mean())(sequence_logprobs(logprobs, mask) - sequence_logprobs(old_logprobs, mask))",
     wrt="logprobs")
def _(c):
    a = defaults(trl.RLOOConfig)
    made = bare(trl.RLOOTrainer, args=a, epsilon_low=a.epsilon, epsilon_high=a.epsilon,
                _get_per_token_logps_and_entropies=lambda *args, **kwargs: (c.logprobs, c.entropies, None))
    ids = torch.zeros(len(c.mask), 1, dtype=torch.long)
    return made._compute_loss(None, dict(prompt_ids=ids, prompt_mask=ids + 1, completion_ids=c.tokens,
                                         completion_mask=c.mask.long(), advantages=c.row_advantages,
                                         old_logps=(c.old_logprobs*c.mask).sum(1)))

@row("trl", "AsyncGRPOTrainer", "ppo_loss(logprobs, old_logprobs, advantages, mask)", wrt="logprobs")
def _(c):
    run = statements(async_grpo_trainer.AsyncGRPOTrainer.compute_loss, "log_ratio = log_probs",
                     "loss = loss / tokens_per_rank")
    return run(self=bare(async_grpo_trainer.AsyncGRPOTrainer, epsilon_low=.2, epsilon_high=.2),
               log_probs=c.logprobs[c.mask], old_log_probs=c.old_logprobs[c.mask],
               advantages=c.advantages[c.mask], inputs=dict(global_n_tokens=c.mask.sum()[None])).loss


# -- preferences

def outputs(logprobs, log_sum_sq=None):
    zero = torch.zeros_like(logprobs.detach())
    return lambda **kwargs: SimpleNamespace(log_probs=logprobs, entropy=zero, mean_logits=zero, is_top1=zero > 1,
                                            log_sum_sq_probs=zero if log_sum_sq is None else log_sum_sq,
                                            label_mask=kwargs.get("labels") if kwargs.get("labels") is None
                                            else kwargs["labels"][:, 1:] != -100)

def dpo(c, loss_type="sigmoid", chosen=None, masks=None, log_sum_sq=None, **config):
    "DPO's `_compute_loss`: the whole log-prob of an answer stands at its first token, unless tokens are given."
    a = defaults(trl.DPOConfig, **config)
    first = torch.arange(12) == 0
    if chosen is None: chosen = torch.cat([c.chosen, c.rejected])[:, None]*first
    if masks is None: masks = torch.arange(12) < torch.cat([c.n_chosen, c.n_rejected])[:, None]
    pad = lambda x: torch.nn.functional.pad(x.long(), (1, 0))
    made = bare(trl.DPOTrainer, args=a, loss_types=[loss_type] if isinstance(loss_type, str) else loss_type,
                loss_weights=config.get("loss_weights") or [1.], precompute_ref_logps=True, ref_model=None,
                use_weighting=a.use_weighting, label_smoothing=a.label_smoothing, beta=a.beta, ld_alpha=a.ld_alpha,
                f_divergence_type=getattr(a.f_divergence_type, "value", a.f_divergence_type),
                f_alpha_divergence_coef=a.f_alpha_divergence_coef)
    n = len(masks)//2
    ref = c.ref_chosen[:n], c.ref_rejected[:n]
    return made._compute_loss(outputs(chosen, log_sum_sq),
                              dict(input_ids=pad(masks), attention_mask=pad(masks) + 1, completion_mask=pad(masks),
                                   ref_chosen_logps=ref[0], ref_rejected_logps=ref[1]), False)

P = "chosen, rejected, ref_chosen, ref_rejected"
mean = "chosen/n_chosen, rejected/n_rejected, ref_chosen/n_chosen, ref_rejected/n_rejected"
for name, call, options in (
    ("sigmoid", f"dpo_loss({P})", {}), ("hinge", f"hinge_loss({P})", {}), ("ipo", f"ipo_loss({mean})", {}),
    ("exo_pair label_smoothing=.1", f"exo_loss({P}, label_smoothing=.1)", dict(label_smoothing=.1)),
    ("nca_pair", f"nca_loss({P}, beta=.1)", {}),
    ("robust label_smoothing=.1", f"robust_dpo_loss({P})", dict(label_smoothing=.1)),
    ("bco_pair", f"bco_pair_loss({P}, beta=.1)", {}),
    ("sppo_hard", f"sppo_loss({P}, beta=.1)", {}), ("apo_zero", f"apo_zero_loss({P})", {}),
    ("apo_down", f"apo_down_loss({P})", {}),
    ("discopop", f"discopop_loss({P}, beta=.1)", {}), ("sigmoid_norm", f"dpo_loss({mean})", {}),
    ("aot", f"aot_loss(chosen, rejected, aot_matched({P}), beta=.1)", {}),
    ("aot label_smoothing=.1", f"aot_loss(chosen, rejected, aot_matched({P}), beta=.1, label_smoothing=.1)",
     dict(label_smoothing=.1)),
    ("aot_unpaired", "(lambda a, b: dpo_loss(chosen[a], rejected[b], ref_chosen[a], ref_rejected[b]))((chosen - "
     "ref_chosen).argsort(), (rejected - ref_rejected).argsort())", {}),
):
    row("trl", f"DPOTrainer {name}", call,
        wrt="chosen rejected")(lambda c, name=name, options=options: dpo(c, name.split()[0], **options))

@row("trl", "DPOTrainer sigmoid, label_smoothing=.1", f"dpo_loss({P}, label_smoothing=.1)", wrt="chosen rejected",
     because="sigmoid ignores label_smoothing there; OpenRLHF and TRL's CPO have cDPO")
def _(c): return dpo(c, label_smoothing=.1)

@row("trl", "DPOTrainer ipo, sums", f"ipo_loss({P})", wrt="chosen rejected",
     because="log-probs per token, as IPO's authors meant; OpenRLHF's flag of the same name takes sums")
def _(c): return dpo(c, "ipo")

@row("trl", "DPOTrainer sft", "sft_loss(logprobs[:4], exists[:4])", wrt="logprobs")
def _(c): return dpo(c, "sft", chosen=c.logprobs*c.exists, masks=c.exists)

for kind, call in (("forward_kl", "lambda x: alpha_reward(x, alpha=1.)"), ("js_divergence", "js_reward"),
                   ("alpha_divergence", "lambda x: alpha_reward(x, alpha=.5)")):
    row("trl", f"DPOTrainer f_divergence_type={kind}", f"f_dpo_loss({P}, divergence={call})", wrt="chosen rejected")(
        lambda c, kind=kind: dpo(c, f_divergence_type=kind, f_alpha_divergence_coef=.5))

@row("trl", "DPOTrainer ld_alpha=.3",
     "(lambda shared: dpo_loss(ld_logprobs(logprobs[:4], exists[:4], shared, alpha=.3), ld_logprobs(logprobs[4:], "
     "exists[4:], shared, alpha=.3), ref_chosen[:4], ref_rejected[:4]))"
     "(torch.minimum(lengths[:4], lengths[4:]))", wrt="logprobs")
def _(c): return dpo(c, chosen=c.logprobs*c.exists, masks=c.exists, ld_alpha=.3)

@row("trl", "DPOTrainer use_weighting",
     "(lambda w: dpo_loss(sequence_logprobs(logprobs[:4], exists[:4]), sequence_logprobs(logprobs[4:], exists[4:]), "
     "ref_chosen[:4], ref_rejected[:4], weights=w[:4]*w[4:]))"
     "(wpo_weights(logprobs, (-sum_sq).exp(), exists))", wrt="logprobs")
def _(c): return dpo(c, chosen=c.logprobs*c.exists, masks=c.exists, use_weighting=True, log_sum_sq=-c.sum_sq)

@row("trl", "DPOTrainer loss_type=[sigmoid, bco_pair], loss_weights=[.8, .2] (MPO)",
     f".8*dpo_loss({P})[0] + .2*bco_pair_loss({P}, beta=.1)[0]", wrt="chosen rejected")
def _(c): return dpo(c, ["sigmoid", "bco_pair"], loss_weights=[.8, .2])

def kto(c, **config):
    a = defaults(trl.KTOConfig, **config)
    made = bare(trl.KTOTrainer, args=a, calculate_KL=a.loss_type == "kto", precompute_ref_logps=True, ref_model=None,
                loss_type=a.loss_type, beta=a.beta, desirable_weight=a.desirable_weight,
                undesirable_weight=a.undesirable_weight, _compute_kl_logps=lambda model, batch: c.logprobs_kl)
    ids = torch.ones(8, 13, dtype=torch.long)
    ref = torch.where(c.desirable, c.ref_chosen, c.ref_rejected)
    logprobs = torch.where(c.desirable, c.chosen, c.rejected)
    return made._compute_loss(outputs(logprobs[:, None]*(torch.arange(12) == 0)),
                              dict(label=c.desirable, input_ids=ids, attention_mask=ids, completion_mask=ids,
                                   ref_logps=ref, ref_KL_logps=c.ref_logprobs_kl), False)

U = "torch.where(desirable, chosen, rejected), torch.where(desirable, ref_chosen, ref_rejected), desirable"

@row("trl", "KTOTrainer", f"kto_loss({U}, kl=kto_kl(logprobs_kl, ref_logprobs_kl))", wrt="chosen rejected")
def _(c): return kto(c)

@row("trl", "KTOTrainer desirable_weight=1.5, undesirable_weight=.5",
     f"kto_loss({U}, kl=kto_kl(logprobs_kl, ref_logprobs_kl), desirable_weight=1.5, undesirable_weight=.5)",
     wrt="chosen rejected")
def _(c): return kto(c, desirable_weight=1.5, undesirable_weight=.5)

@row("trl", "KTOTrainer apo_zero_unpaired", f"kto_loss({U}, kl=0.)", wrt="chosen rejected")
def _(c): return kto(c, loss_type="apo_zero_unpaired")

def cpo(c, **config):
    a = defaults(trl_cpo.CPOConfig, **config)
    made = bare(trl_cpo.CPOTrainer, args=a, beta=a.beta, loss_type=a.loss_type, simpo_gamma=a.simpo_gamma,
                alpha=a.alpha, label_smoothing=a.label_smoothing)
    means = a.loss_type in ("simpo", "ipo")
    return made.cpo_loss(*((c.chosen/c.n_chosen,
                            c.rejected/c.n_rejected) if means else (c.chosen, c.rejected)))[0].mean()

means = "chosen/n_chosen, rejected/n_rejected"

@row("trl", "CPOTrainer.cpo_loss sigmoid", "cpo_loss(chosen, rejected, nll_coef=0.)", wrt="chosen rejected")
def _(c): return cpo(c)

@row("trl", "CPOTrainer.cpo_loss sigmoid, label_smoothing=.1",
     "dpo_loss(chosen, rejected, 0*chosen, 0*rejected, label_smoothing=.1)", wrt="chosen rejected")
def _(c): return cpo(c, label_smoothing=.1)

@row("trl", "CPOTrainer.cpo_loss simpo", f"simpo_loss({means}, beta=2., gamma=.5)", wrt="chosen rejected")
def _(c): return cpo(c, loss_type="simpo", beta=2.)

@row("trl", "CPOTrainer.cpo_loss simpo, alpha=.25 (AlphaPO)", f"alphapo_loss({means}, beta=2., gamma=.5)",
     wrt="chosen rejected")
def _(c): return cpo(c, loss_type="simpo", beta=2., alpha=.25)

@row("trl", "CPOTrainer.cpo_loss hinge", "hinge_loss(chosen, rejected, 0*chosen, 0*rejected)", wrt="chosen rejected")
def _(c): return cpo(c, loss_type="hinge")

@row("trl", "CPOTrainer.cpo_loss ipo", "ipo_loss(chosen/n_chosen, rejected/n_rejected, 0*chosen, 0*rejected)",
     wrt="chosen rejected")
def _(c): return cpo(c, loss_type="ipo")

@row("trl", "CPOTrainer.cpo_loss alpha=.25 on sums", "alphapo_loss(10*chosen, 10*rejected, beta=.1, gamma=0.)",
     wrt="chosen rejected",
     because="exp(lp)^−α overflows for the log-prob of a long answer and the loss is nan; our power goes on as "
     "its tangent")
def _(c):
    long = SimpleNamespace(**vars(c) | dict(chosen=10*c.chosen, rejected=10*c.rejected))
    return cpo(long, alpha=.25)

@row("trl", "ORPOTrainer.odds_ratio_loss", f"orpo_loss({means})[0] + (chosen/n_chosen).mean()", wrt="chosen rejected")
def _(c):
    made = bare(trl_orpo.ORPOTrainer, beta=defaults(trl_orpo.ORPOConfig).beta)
    return -made.odds_ratio_loss(c.chosen/c.n_chosen, c.rejected/c.n_rejected)[0].mean()

def tpo(c, chosen, rejected, **config):
    a = defaults(trl_tpo.TPOConfig, **config)
    made = bare(trl_tpo.TPOTrainer, args=a, loss_type=a.loss_type, beta=a.beta, label_smoothing=a.label_smoothing,
                tpo_l_gamma=a.tpo_l_gamma)
    return statements(trl_tpo.TPOTrainer._compute_loss, "delta_score =",
                      "loss = per_sequence_loss")(self=made, chosen_logps=chosen, rejected_logps=rejected).loss

@row("trl", "TPOTrainer sigmoid, without its NLL", "tpo_loss(chosen, rejected, ref_chosen, nll_coef=0.)",
     wrt="chosen rejected")
def _(c): return tpo(c, c.chosen, c.rejected)

@row("trl", "TPOTrainer tpo-l, without its NLL", f"tpo_loss({means}, ref_chosen, gamma=.5, nll_coef=0.)",
     wrt="chosen rejected")
def _(c): return tpo(c, c.chosen/c.n_chosen, c.rejected/c.n_rejected, loss_type="tpo-l")

def online(c, loss_type):
    a = defaults(trl_online_dpo.OnlineDPOConfig, loss_type=loss_type)
    return statements(trl_online_dpo.OnlineDPOTrainer.training_step, "pi_logratios =", "loss = losses.mean()")(
        self=bare(trl_online_dpo.OnlineDPOTrainer, args=a, _beta=.1), chosen_logprobs_sum=c.chosen,
        rejected_logprobs_sum=c.rejected,
        chosen_ref_logprobs_sum=c.ref_chosen, rejected_ref_logprobs_sum=c.ref_rejected).loss

@row("trl", "OnlineDPOTrainer sigmoid", f"dpo_loss({P})", wrt="chosen rejected")
def _(c): return online(c, "sigmoid")

@row("trl", "OnlineDPOTrainer ipo", f"ipo_loss({P})", wrt="chosen rejected")
def _(c): return online(c, "ipo")

@row("trl", "A2POTrainer", "a2po_loss(chosen, ref_chosen, scores - baselines, beta=.001)", wrt="chosen")
def _(c):
    made = bare(trl_a2po.A2POTrainer, args=defaults(trl_a2po.A2POConfig, beta2=.001),
                _get_sequence_logps=lambda *args: c.chosen)
    return made.compute_loss(None, dict(input_ids=None, attention_mask=None, logits_to_keep=None,
                                        ref_logps=c.ref_chosen, rewards=c.scores, v_star=c.baselines))


# -- reward model, SFT, distillation

def reward(c, **config):
    made = bare(trl.RewardTrainer,
                args=defaults(trl.RewardConfig, **{k: v for k, v in config.items() if k != "margin"}))
    inputs = dict(attention_mask=torch.ones(16, 2)) | {k: v for k, v in config.items() if k == "margin"}
    return made.compute_loss(lambda **kwargs: SimpleNamespace(logits=torch.cat([c.scores, c.baselines])[:, None]),
                             inputs)

@row("trl", "RewardTrainer", "bradley_terry_loss(scores, baselines)", wrt="scores baselines")
def _(c): return reward(c)

@row("trl", "RewardTrainer margin", "bradley_terry_loss(scores, baselines, margin=row_advantages.abs())",
     wrt="scores baselines")
def _(c): return reward(c, margin=c.row_advantages.abs())

@row("trl", "RewardTrainer center_rewards_coefficient=.01",
     "bradley_terry_loss(scores, baselines)[0] + .01*centering_loss(scores, baselines)[0]", wrt="scores baselines")
def _(c): return reward(c, center_rewards_coefficient=.01)

def sft(c, **config):
    made = bare(trl.SFTTrainer, args=defaults(trl.SFTConfig, **config), compute_loss_func=None, label_smoother=None)
    labels = torch.nn.functional.pad(torch.where(c.mask, c.tokens, -100), (1, 0), value=-100)
    return made.compute_loss(outputs(c.logprobs*c.mask), dict(labels=labels, attention_mask=torch.ones(8, 13)))

@row("trl", "SFTTrainer loss_type=nll", "sft_loss(logprobs, mask)", wrt="logprobs")
def _(c): return sft(c)

@row("trl", "SFTTrainer loss_type=dft", "dft_loss(logprobs, mask)", wrt="logprobs")
def _(c): return sft(c, loss_type="dft")

for beta in (0, .3, .5, 1):
    call = {0: "forward_kl_loss(logits, teacher_logits, mask)", 1: "reverse_kl_loss(logits, teacher_logits, mask)"}.get(
        beta, f"jsd_loss(logits, teacher_logits, mask, beta={beta})")
    row("trl", f"GKDTrainer.generalized_jsd_loss beta={beta}", call,
        wrt="logits")(lambda c, beta=beta: trl_gkd.GKDTrainer.generalized_jsd_loss(c.logits, c.teacher_logits,
                                                                           torch.where(c.mask, c.tokens, -100), beta))

def student(c, **kw):
    return at(c.mask,
              loss_utils.compute_topk_self_distillation_loss(c.logits, c.teacher_logits, **kw)).sum()/c.mask.sum()

few = ("(lambda ids: {}(support_logprobs(logits, ids, mask), support_logprobs(teacher_logits, ids, mask), "
       "mask{}))(logits.topk(4).indices)")
for alpha, name, rest in ((0., "forward_kl_loss", ""), (1., "reverse_kl_loss", ""), (.5, "jsd_loss", "")):
    row("trl", f"sdpo.compute_topk_self_distillation_loss alpha={alpha}, add_tail", few.format(name, rest),
        wrt="logits")(lambda c, alpha=alpha: student(c, distillation_topk=4, distillation_alpha=alpha,
                                                     distillation_add_tail=True))

@row("trl", "sdpo.compute_topk_self_distillation_loss alpha=0, no tail",
     "(lambda ids: forward_kl_loss(logits.gather(-1, ids), teacher_logits.gather(-1, ids), "
     "mask))(logits.topk(4).indices)", wrt="logits")
def _(c): return student(c, distillation_topk=4, distillation_alpha=0., distillation_add_tail=False)

@row("trl", "sdpo.compute_full_logit_self_distillation_loss alpha=1", "reverse_kl_loss(logits, teacher_logits, mask)",
     wrt="logits")
def _(c):
    return at(c.mask, loss_utils.compute_full_logit_self_distillation_loss(c.logits, c.teacher_logits,
                                                                           distillation_alpha=1.)).sum()/c.mask.sum()

@row("trl", "sdpo.compute_sampled_token_self_distillation_loss",
     "(lambda lp, teacher: reinforce_loss(lp, teacher - lp, mask))(gather_logprobs(logits, tokens), "
     "gather_logprobs(teacher_logits, tokens))", wrt="logits")
def _(c):
    return at(c.mask, loss_utils.compute_sampled_token_self_distillation_loss(c.logits, c.teacher_logits, c.tokens,
                                                                              distillation_alpha=1.)).sum()/c.mask.sum()

@row("trl", "sdpo.apply_importance_sampling_clipping",
     "aggregate(truncated_weights(logprobs.detach(), old_logprobs, mask, high=1.1)*x, mask)", wrt="x")
def _(c):
    return at(c.mask,
              loss_utils.apply_importance_sampling_clipping(c.x, c.logprobs, c.old_logprobs, 1.1)).sum()/c.mask.sum()

@row("trl", "distillation_trainer._chunked_divergence_loss beta=.5",
     "jsd_loss(hidden @ weight.T, teacher_hidden @ teacher_weight.T, mask)", wrt="hidden weight")
def _(c):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss
    return _chunked_divergence_loss(c.hidden, c.teacher_hidden, c.weight, c.teacher_weight, c.mask,
                                                         .5)[0]

@row("trl", "trainer.utils._ChunkedLogProbFunction temperature=.7",
     "linear_logprobs(hidden.flatten(0, 1), weight, tokens.flatten(), temperature=.7, entropy=True)",
     wrt="hidden weight")
def _(c):
    from trl.trainer.utils import _ChunkedLogProbFunction
    return _ChunkedLogProbFunction.apply(c.hidden.flatten(0, 1), c.weight, None, c.tokens.flatten(), .7, 256,
                                               None, 1., ("log_probs", "entropy"))[:2]

@row("trl", "DPOTrainer sft, use_weighting", "sft_loss(logprobs[:4], exists[:4])", wrt="logprobs",
     because="an in-place product on an expanded scalar")
def _(c): return dpo(c, "sft", chosen=c.logprobs*c.exists, masks=c.exists, use_weighting=True, log_sum_sq=-c.sum_sq)

@row("trl", "GRPOTrainer loss_type=bnpo, old_per_token_logps=None",
     "ppo_loss(logprobs, logprobs.detach(), at_tokens(row_advantages, mask), mask)", wrt="logprobs")
def _(c): return grpo(SimpleNamespace(**vars(c) | dict(old_logprobs=None)), c.row_advantages, loss_type="bnpo")

@row("trl", "GRPOTrainer loss_type=bnpo, one call", f"ppo_loss({A})", wrt="logprobs")
def _(c): return grpo(c, c.row_advantages, loss_type="bnpo")

@row("trl", "IWOPDTrainer._compute_iw_opd_loss",
     "(lambda A: reinforce_loss(gather_logprobs(logits, tokens), iw_opd_weights(A, mask, gamma=.5)*A, "
     "mask))(distill_advantages(gather_logprobs(logits, tokens), ref_logprobs, mask))", wrt="logits")
def _(c):
    from trl.experimental.iw_opd import IWOPDTrainer
    made = bare(IWOPDTrainer, temperature=1., iw_opd_gamma=.5, iw_opd_epsilon=1e-8)
    return made._compute_iw_opd_loss(c.logits, c.tokens, torch.where(c.mask, c.tokens, -100), c.ref_logprobs)

@row("trl", "GOLDTrainer ULD", "uld_loss(logits, teacher_logits, mask)", wrt="logits")
def _(c):
    from trl.experimental.gold import gold_trainer
    loss = next(x
                for x in vars(gold_trainer).values() if isinstance(x, type) and hasattr(x, "_compute_hybrid_uld_loss"))
    run = statements(loss._compute_distillation_loss, "student_sorted = student_aligned", "aligned_loss = F.l1_loss")
    return run(student_aligned=c.logits.softmax(-1)[c.mask],
               teacher_aligned=c.teacher_logits.softmax(-1)[c.mask]).aligned_loss/c.mask.sum()

@row("trl", "OnlineDPOTrainer pairs", "torch.stack(best_worst_pairs(scores, torch.arange(8) % 4)).float()")
def _(c):
    run = statements(trl_online_dpo.OnlineDPOTrainer.training_step, "first_half, second_half =", "rejected_indices =")
    found = run(rewards=c.scores, batch_size=4, device=torch.device("cpu"))
    return torch.stack([torch.zeros(8).index_fill(0, i, 1.) for i in (found.chosen_indices, found.rejected_indices)])

@row("trl", "GRPOTrainer use_adaptive_entropy",
     "torch.tensor(adaptive_entropy_coef(.01, masked_mean(entropies, mask).item(), target=.5, step=.005))")
def _(c):
    a = defaults(trl.GRPOConfig, entropy_target=.5, entropy_coef_delta=.005, entropy_coef_max=1., entropy_coef_min=0.)
    made = bare(trl.GRPOTrainer, args=a, entropy_coef=.01)
    statements(trl.GRPOTrainer._compute_loss, "if world_entropy <=",
               "self._last_world_entropy")(self=made, world_entropy=(c.entropies[c.mask].mean()).item())
    made.use_adaptive_entropy = True
    used = statements(trl.GRPOTrainer._compute_loss, "if self.use_adaptive_entropy:",
                      "if self.use_adaptive_entropy:")(self=made).apply_coef
    return torch.tensor([made.entropy_coef, used])
