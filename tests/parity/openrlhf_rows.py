"OpenRLHF 0.11.2: `models.loss`, `models.utils`, `trainer.ppo_utils`."
from types import SimpleNamespace

import torch
from peers import openrlhf
from rows import at, row

loss = lambda: openrlhf().loss
utils = lambda: openrlhf().utils


def advantages(c, estimator, *, rewards=None, group=4, mask=None, **changed):
    "What the experience maker makes of scalar rewards (and, for gae, of values): (advantages, returns)."
    maker_of, mask = openrlhf().experience_maker.RemoteExperienceMaker, (c.mask if mask is None else mask)
    args = SimpleNamespace(reward=SimpleNamespace(clip_range=None), rollout=SimpleNamespace(n_samples_per_prompt=group),
                           algo=SimpleNamespace(advantage=SimpleNamespace(
        estimator=estimator, gamma=1., lambd=.95, no_std_norm=False), kl=SimpleNamespace(use_loss=False)))
    args.algo.advantage.__dict__.update(changed)
    maker = object.__new__(maker_of)
    maker.__dict__.update(strategy=SimpleNamespace(args=args), args=args, advantage_estimator=estimator,
                          kl_ctl=SimpleNamespace(value=0.))
    experience = SimpleNamespace(index=list(range(len(mask))), rewards=c.scores if rewards is None else rewards,
                                 values=c.values, kl=torch.zeros(mask.shape), action_mask=mask, info={})
    maker.compute_advantages_and_returns([experience])
    return at(mask, experience.advantages), at(mask, experience.returns)


# -- masked

@row("openrlhf", "aggregate_loss", "aggregate(x, mask)", wrt="x")
def _(c): return loss().aggregate_loss(c.x, c.mask)

@row("openrlhf", "aggregate_loss token_level_loss=False", "aggregate(x, mask, over='rows')", wrt="x")
def _(c): return loss().aggregate_loss(c.x, c.mask, token_level_loss=False)

@row("openrlhf", "aggregate_loss batch_num_tokens", "aggregate(x, mask, denom=100)", wrt="x")
def _(c): return loss().aggregate_loss(c.x, c.mask, batch_num_tokens=100)

@row("openrlhf", "masked_mean dim=-1", "masked_mean(x, mask, dim=-1)", wrt="x")
def _(c): return utils().masked_mean(c.x, c.mask, dim=-1)

@row("openrlhf", "masked_mean of a row without a token", "masked_mean(x[:1], mask[:1] & False, dim=-1)",
     because="0/0: a row whose tokens are all masked is NaN there and 0 here")
def _(c): return utils().masked_mean(c.x[:1], c.mask[:1] & False, dim=-1)


# -- logprobs

@row("openrlhf", "log_probs_from_logits", "gather_logprobs(logits, tokens)", wrt="logits")
def _(c): return utils().log_probs_from_logits(c.logits, c.tokens)

@row("openrlhf", "log_probs_from_logits temperature=.7", "gather_logprobs(logits, tokens, temperature=.7)")
def _(c): return utils().log_probs_from_logits(c.logits.clone(), c.tokens, .7)

@row("openrlhf", "compute_entropy", "entropy(logits)", wrt="logits")
def _(c):
    with torch.compiler.set_stance("force_eager"): return utils().compute_entropy(c.logits)


# -- kl

for kind in ("k1", "k2", "k3"):
    row("openrlhf", f"compute_approx_kl {kind}", f"kl_{kind}(logprobs, ref_logprobs)", wrt="logprobs")(
        lambda c, kind=kind: utils().compute_approx_kl(c.logprobs, c.ref_logprobs, kl_estimator=kind))
    row("openrlhf", f"compute_approx_kl {kind}, unbiased_gradient",
        f"straight_through(kl_{kind}(logprobs, ref_logprobs), kl_k2(logprobs, ref_logprobs))",
        wrt="logprobs")(lambda c, kind=kind: utils().compute_approx_kl(c.logprobs, c.ref_logprobs,
                                                                       kl_estimator=kind, unbiased_gradient=True))

@row("openrlhf", "compute_approx_kl unbiased_gradient, log_probs_old",
     "straight_through(kl_k3(logprobs, ref_logprobs), ratio_corrected(kl_k2(logprobs, ref_logprobs), "
     "logprobs.detach(), old_logprobs))", wrt="logprobs")
def _(c): return utils().compute_approx_kl(c.logprobs, c.ref_logprobs, c.old_logprobs, "k3", True)

@row("openrlhf", "compute_approx_kl k3, reference 3 nats above", "kl_k3(logprobs, logprobs.detach() + 3)",
     wrt="logprobs",
     because="the value is clamped at 10: the token that drifted most has no gradient (k3 there is 16.1)")
def _(c): return utils().compute_approx_kl(c.logprobs, c.logprobs.detach() + 3, kl_estimator="k3")

@row("openrlhf", "compute_approx_kl k1, reference 12 nats above", "kl_k1(logprobs, logprobs.detach() + 12)",
     wrt="logprobs", because="the value is clamped at ±10; ours clamps the log-ratio at ±20")
def _(c): return utils().compute_approx_kl(c.logprobs, c.logprobs.detach() + 12, kl_estimator="k1")

@row("openrlhf", "AdaptiveKLController", "torch.tensor(adaptive_kl_coef(.1, .03, target=.05, horizon=1000, n_rows=64))")
def _(c):
    controller = openrlhf().kl_controller.AdaptiveKLController(.1, .05, 1000)
    controller.update(.03, 64)
    return torch.tensor(float(controller.value))

@row("openrlhf", "compute_reward", "at_last_token(scores, mask) - kl_coef*kl_k1(old_logprobs, ref_logprobs, mask)")
def _(c): return at(c.mask, utils().compute_reward(c.scores, c.kl_coef, c.old_logprobs - c.ref_logprobs, c.mask))


# -- advantages

def maker(c): return object.__new__(openrlhf().experience_maker.RemoteExperienceMaker)

@row("openrlhf", "get_advantages_and_returns, no tool tokens", "gae(rewards, values, exists, gamma=.99)")
def _(c):
    return tuple(at(c.exists, x) for x in maker(c).get_advantages_and_returns(c.values, c.rewards, c.exists, .99, .95))

@row("openrlhf", "get_advantages_and_returns, γ = λ = 1", "gae(rewards, values, mask, lam=1.)[0]")
def _(c): return at(c.mask, maker(c).get_advantages_and_returns(c.values, c.rewards, c.mask, 1., 1.)[0])

@row("openrlhf", "get_advantages_and_returns across tool tokens", "gae(rewards, values, mask, gamma=.99)[0]",
     because="V is 0 and λ decays on tool tokens; we (and verl) step from chosen token to chosen token")
def _(c): return at(c.mask, maker(c).get_advantages_and_returns(c.values, c.rewards, c.mask, .99, .95)[0])

@row("openrlhf", "get_cumulative_returns", "discounted_returns(rewards, exists, gamma=.9)")
def _(c): return at(c.exists, maker(c).get_cumulative_returns(c.rewards, c.exists, .9))

@row("openrlhf", "get_cumulative_returns across tool tokens, γ = .9", "discounted_returns(rewards, mask, gamma=.9)",
     because="γ also decays on tool tokens: their number changes the return")
def _(c): return at(c.mask, maker(c).get_cumulative_returns(c.rewards, c.mask, .9))

@row("openrlhf", "get_cumulative_returns across tool tokens, γ = 1", "discounted_returns(rewards, mask)")
def _(c): return at(c.mask, maker(c).get_cumulative_returns(c.rewards, c.mask, 1.))

@row("openrlhf", "advantage.estimator rloo", "at_tokens(leave_one_out(scores, group), mask)")
def _(c): return advantages(c, "rloo")[0]

@row("openrlhf", "advantage.estimator group_norm", "at_tokens(group_advantages(scores, group, eps=1e-9), mask)")
def _(c): return advantages(c, "group_norm")[0]

@row("openrlhf", "advantage.estimator dr_grpo", "at_tokens(group_advantages(scores, group, scale=False), mask)")
def _(c): return advantages(c, "dr_grpo")[0]

@row("openrlhf", "advantage.estimator group_norm, equal scores .1",
     "at_tokens(group_advantages(0*scores + .1, 0*group), mask)",
     because="rounding of the mean divided by ε = 1e-9; ours is exactly 0")
def _(c): return advantages(c, "group_norm", rewards=0*c.scores + .1, group=8)[0]

biased = "*(1 - 1/mask.sum()).rsqrt()"

@row("openrlhf", "advantage.estimator gae",
     "whiten(gae(at_last_token(scores, exists), values, exists)[0], exists)" + biased.replace("mask", "exists"))
def _(c): return advantages(c, "gae", mask=c.exists)[0]

@row("openrlhf", "advantage.estimator reinforce",
     "whiten(discounted_returns(at_last_token(scores, mask), mask), mask)" + biased)
def _(c): return advantages(c, "reinforce")[0]

@row("openrlhf", "advantage.estimator reinforce_baseline",
     "whiten(at_tokens(group_advantages(scores, group, scale=False), mask), mask)" + biased)
def _(c): return advantages(c, "reinforce_baseline")[0]

@row("openrlhf", "advantage.estimator reinforce_baseline, as it stands",
     "whiten(at_tokens(group_advantages(scores, group, scale=False), mask), mask)",
     because="std with n instead of n − 1 tokens")
def _(c): return advantages(c, "reinforce_baseline")[0]


# -- policy losses

def policy(c, adv, **kw): return loss().PolicyLoss(**kw)(c.logprobs, c.old_logprobs, adv, c.mask, c.rollout_logprobs)[0]

@row("openrlhf", "PolicyLoss", "ppo_loss(logprobs, old_logprobs, advantages, mask)", wrt="logprobs")
def _(c): return policy(c, c.advantages)

@row("openrlhf", "PolicyLoss clip_eps_high=.28", "ppo_loss(logprobs, old_logprobs, advantages, mask, clip_high=.28)",
     wrt="logprobs")
def _(c): return policy(c, c.advantages, clip_eps_high=.28)

@row("openrlhf", "PolicyLoss dual_clip=1.2", "ppo_loss(logprobs, old_logprobs, advantages, mask, dual_clip=1.2)",
     wrt="logprobs")
def _(c): return policy(c, c.advantages, dual_clip=1.2)

@row("openrlhf", "PolicyLoss token_level_loss=False", "ppo_loss(logprobs, old_logprobs, advantages, mask, over='rows')",
     wrt="logprobs")
def _(c): return policy(c, c.advantages, token_level_loss=False)

@row("openrlhf", "SFTLoss", "sft_loss(logprobs, mask)", wrt="logprobs")
def _(c): return loss().SFTLoss()(c.logprobs, c.mask)

@row("openrlhf", "SFTLoss token_level_loss=False", "sft_loss(logprobs, mask, over='rows')", wrt="logprobs")
def _(c): return loss().SFTLoss(token_level_loss=False)(c.logprobs, c.mask)


# -- value losses

def value(c, **kw): return loss().ValueLoss(**kw)(c.values, c.old_values, c.returns, c.mask)

@row("openrlhf", "ValueLoss clip_eps=.5", "value_loss(values, old_values, returns, mask, clip=.5)", wrt="values")
def _(c): return value(c, clip_eps=.5)

@row("openrlhf", "ValueLoss clip_eps=None", "value_loss(values, old_values, returns, mask, clip=None)", wrt="values")
def _(c): return value(c)


# -- preferences

def dpo(c, **kw): return loss().DPOLoss(**kw)(c.chosen, c.rejected, c.ref_chosen, c.ref_rejected)[0]

@row("openrlhf", "DPOLoss", "dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=.1)", wrt="chosen rejected")
def _(c): return dpo(c, beta=.1)

@row("openrlhf", "DPOLoss label_smoothing=.1",
     "dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=.1, label_smoothing=.1)", wrt="chosen rejected")
def _(c): return dpo(c, beta=.1, label_smoothing=.1)

@row("openrlhf", "DPOLoss ipo=True", "ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=.1)",
     wrt="chosen rejected")
def _(c): return dpo(c, beta=.1, ipo=True)


# -- more of the policy loss

@row("openrlhf", "PolicyLoss policy_loss_type=gspo",
     "gspo_loss(logprobs, old_logprobs, at_tokens(row_advantages, mask), mask, clip_low=.2, clip_high=.2)",
     wrt="logprobs")
def _(c): return policy(c, at(c.mask, c.row_advantages[:, None].expand_as(c.mask)), policy_loss_type="gspo")

@row("openrlhf", "PolicyLoss policy_loss_type=gspo, is_correction_level=token",
     "gspo_loss(logprobs, rollout_logprobs, at_tokens(row_advantages, mask), mask, clip_low=.2, clip_high=.2)",
     wrt="logprobs")
def _(c):
    return policy(c, at(c.mask, c.row_advantages[:, None].expand_as(c.mask)), policy_loss_type="gspo",
                  is_correction_level="token")

def corrected(c, **kw): return policy(c, c.advantages, is_correction_threshold=kw.pop("band", [.9, 1.1]), **kw)

@row("openrlhf", "PolicyLoss is_correction token, clip (TIS, two-sided)",
     "ppo_loss(logprobs, old_logprobs, truncated_weights(old_logprobs, rollout_logprobs, mask, low=.9, "
     "high=1.1)*advantages, mask)", wrt="logprobs")
def _(c): return corrected(c, is_correction_level="token", is_correction_mode="clip")

@row("openrlhf", "PolicyLoss is_correction token, mask (IcePop)",
     "ppo_loss(logprobs, old_logprobs, icepop_weights(old_logprobs, rollout_logprobs, mask, low=.9, "
     "high=1.1)*advantages, mask)", wrt="logprobs")
def _(c): return corrected(c, is_correction_level="token")

@row("openrlhf", "PolicyLoss is_correction seq, mask",
     "ppo_loss(logprobs, old_logprobs, truncated_weights(old_logprobs, rollout_logprobs, mask, "
     "high=100.)*geometric_mask(old_logprobs, rollout_logprobs, mask, low=.97, high=1.05)"
     "*advantages, mask)", wrt="logprobs")
def _(c): return corrected(c, is_correction_level="seq", band=[.97, 1.05])


# -- reward model, shaping

@row("openrlhf", "PairWiseLoss", "bradley_terry_loss(scores, baselines)", wrt="scores baselines")
def _(c): return loss().PairWiseLoss()(c.scores, c.baselines)

@row("openrlhf", "PairWiseLoss margin", "bradley_terry_loss(scores, baselines, margin=row_advantages)",
     wrt="scores baselines")
def _(c): return loss().PairWiseLoss()(c.scores, c.baselines, c.row_advantages)

@row("openrlhf", "LogExpLoss", "bradley_terry_loss(scores, baselines)", wrt="scores baselines")
def _(c): return loss().LogExpLoss()(c.scores, c.baselines)

@row("openrlhf", "LogExpLoss margin", "bradley_terry_loss(scores, baselines, margin=row_advantages)",
     wrt="scores baselines", because="the margin is ignored")
def _(c): return loss().LogExpLoss()(c.scores, c.baselines, c.row_advantages)

@row("openrlhf", "LogExpLoss, 100 apart", "bradley_terry_loss(scores - 100, baselines)", wrt="scores baselines",
     because="log(1 + e¹⁰⁰) is inf in float32")
def _(c): return loss().LogExpLoss()(c.scores - 100, c.baselines)

@row("openrlhf", "apply_overlong_penalty", "overlong_penalty(lengths, max_length=10, buffer=4)")
def _(c):
    x = SimpleNamespace(rewards=torch.zeros(8), response_length=c.lengths)
    openrlhf().length_penalty.apply_overlong_penalty([x], 10, 4.)
    return x.rewards

@row("openrlhf", "apply_stop_properly_penalty .5", "truncation_penalty(scores, desirable, keep=.5)")
def _(c):
    x = SimpleNamespace(rewards=c.scores.clone(), truncated=c.desirable)
    openrlhf().length_penalty.apply_stop_properly_penalty([x], .5)
    return x.rewards

for gating, level, call in (("binary_kl", "token", "binary_kl(old_logprobs, rollout_logprobs, mask)"),
                            ("tv", "token", "binary_tv(old_logprobs, rollout_logprobs, mask)"),
                            ("binary_kl", "seq", "row_mean(binary_kl(old_logprobs, rollout_logprobs, mask), mask)")):
    row("openrlhf", f"PolicyLoss is_correction {level}, {gating}",
        "ppo_loss(logprobs, old_logprobs, truncated_weights(old_logprobs, rollout_logprobs, mask, high=1e6)*"
        f"within({call}, mask, high=.01)*advantages, mask)",
        wrt="logprobs")(lambda c, gating=gating, level=level: corrected(c, is_correction_level=level,
                                                                        is_correction_gating=gating, band=[0., .01]))
