"""`check_loss` and `check_estimator`: each law is seen to fail on a loss that breaks it and on nothing else; the
oracles are held by hand-made numbers."""
import ast
import inspect
import json
import math
import random
import re
import textwrap
from functools import partial

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from rlblocks.data.batch import pairs
from rlblocks.losses.distill import forward_kl_loss, sft_loss
from rlblocks.arithmetic.kl import kl_k3
from rlblocks.arithmetic.logprobs import sequence_logprobs
from rlblocks.arithmetic.masked import (Counts, Last, Max, Mean, aggregate, divisor, masked_mean, masked_sum, mean_of,
                                        promoted, whiten)
from rlblocks.losses.policy import grpo_loss, ppo_loss
from rlblocks.losses.answer_ratio import gmpo_loss, gspo_loss
from rlblocks.testing.oracles import (naive_aggregate, naive_gae, naive_group_advantages, naive_leave_one_out,
                              naive_ppo_loss, naive_returns, naive_token_logprobs, naive_value_loss)
from rlblocks.losses.reward import bradley_terry_loss
from rlblocks.people.run import loop_from
from rlblocks.losses.selections import router_z_loss
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.unpaired import kto_loss
from rlblocks.losses.value import value_loss

ROWS = ("purity", "mask", "empty", "permutation", "padding", "empty_rows")
CUTS = ("split", "gradient", "metrics", "precision")
LAWS = {*ROWS, *CUTS, "differentiable"}


def laws(*more, policy=False): return (*ROWS, *CUTS, *["scale", "reinforce"]*policy, *more, "differentiable")
def of_block(*, policy=False): return (*ROWS, "denom", *CUTS, *["scale", "reinforce"]*policy, "differentiable")


def clean(mask, *tensors): return [torch.where(mask, promoted(x), 0.) for x in tensors]

def good(out, b): # per token, nothing wrong with it; the broken closures are one step away
    lp, old, A = clean(b.mask, out.logprobs, b.old_logprobs, b.advantages)
    return -(lp-old).exp()*A

def good_block(logprobs, old_logprobs, advantages, mask, *, over="tokens", denom=None):
    lp, old, A = clean(mask, logprobs, old_logprobs.detach(), advantages.detach())
    return aggregate(-(lp-old).exp()*A, mask, over=over, denom=denom), dict(ratio=mean_of((lp-old).exp(), mask))

def plain_ppo(logprobs, old_logprobs, advantages, mask, *, clip_low=.2, clip_high=.2, over="tokens", denom=None):
    "PPO as its equation, as every loss is written."
    lp, old, A = clean(mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = (lp-old).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio*A, ratio.clamp(1-clip_low, 1+clip_high)*A)
    return aggregate(loss, mask, over=over, denom=denom), dict(ratio=mean_of(ratio, mask), ratio_max=Max(ratio.amax()))


# -- broken closures

def local_mean(out, b): return masked_mean(good(out, b), b.mask), {}
def local_row_mean(out, b): return aggregate(good(out, b), b.mask, over="rows"), {}
def scaled_by_rows(out, b): return good(out, b).sum()*len(b)/16/b.n_tokens, {}
def right_value_wrong_gradient(out, b):
    x, local = good(out, b).sum()/b.n_tokens, masked_mean(good(out, b), b.mask)
    return local - local.detach() + x.detach(), {}
def multiplied(out, b): return ((out.logprobs-b.old_logprobs).exp()*b.advantages*b.mask).sum()/b.n_tokens, {}
def where_too_late(out, b): return masked_sum((out.logprobs-b.old_logprobs).exp()*b.advantages, b.mask)/b.n_tokens, {}
def counts_padding(out, b): return -(out.logprobs*b.advantages).sum()/b.n_tokens, {}
def metric_counts_padding(out, b):
    return good(out, b).sum()/b.n_tokens, dict(lp=Mean(out.logprobs.sum(), out.logprobs.numel()))
def broadcasts(out, b): return (-clean(b.mask, out.logprobs)[0]*b.scores).sum()/b.n_tokens, {}
def sorted_rows(out, b): # each meets the group of another
    order = b.lengths.argsort()
    return aggregate(good(out, b)[order], b.mask[order], over="groups", denom=b), {}
def positional_groups(out, b):
    x = good(out, b).sum(1)
    return (x*torch.arange(len(x))).sum()/b.n_tokens, {}
def captured(out, b, whole=sample_columns()["advantages"]):
    return (-clean(b.mask, out.logprobs)[0]*whole).sum()/b.n_tokens, {}
def in_place(out, b): return (good(out, b) + 0*b.advantages.clamp_(-1, 1).nan_to_num()).sum()/b.n_tokens, {}
def mask_in_place(out, b):
    b.mask[:, -1] = False
    return good(out, b).sum()/b.n_tokens, {}
def writes_column(out, b):
    b.advantages = b.advantages/2
    return good(out, b).sum()/b.n_tokens, {}
def writes_item(out, b):
    b["advantages"] = b.advantages/2
    return good(out, b).sum()/b.n_tokens, {}
def draws(out, b): return (good(out, b)*torch.rand_like(b.advantages)).sum()/b.n_tokens, {}
class Counter:
    def __init__(self): self.n = 0
    def __call__(self, out, b):
        self.n += 1
        return good(out, b).sum()*self.n/b.n_tokens, {}
def detached(out, b): return good(out, b).sum().detach()/b.n_tokens, {}
def constant_if_empty(out, b): return (good(out, b).sum()/b.n_tokens if b.mask.any() else torch.zeros(())), {}
def nan_gradient_if_empty(out, b): return masked_sum(-out.logprobs/b.mask.sum(), b.mask), {}
def offset(out, b): return good(out, b).sum()/b.n_tokens + 1e-3, {}
def padded_length(out, b): return good(out, b).sum()/b.n_rows/b.mask.shape[1], {}
def empty_row_mean(out, b): return (good(out, b).sum(1)/b.mask.sum(1)).sum()/b.n_rows, {}
def mean_without_count(out, b): return good(out, b).sum()/b.n_tokens, dict(x=Mean(masked_mean(good(out, b), b.mask)))
def changing_keys(out, b): return good(out, b).sum()/b.n_tokens, {f"x{min(len(b), 9)}": Last(0)}
def single(out, b): return good(out, b).sum().float()/b.n_tokens, {}
def squashed(out, b): return (good(out, b)/(1+clean(b.mask, b.advantages)[0].abs())).sum()/b.n_tokens, {}
def wrong_sign(out, b): return -good(out, b).sum()/b.n_tokens, {}
def shifted(out, b):
    lp, A = clean(b.mask, out.logprobs, b.advantages)
    return (-lp*A.roll(1, 1)).sum()/b.n_tokens, {}
def asymmetric(out, b): # squares the weight of some tokens: homogeneous in A, but not linear
    lp, A = clean(b.mask, out.logprobs, b.advantages)
    return (-lp*torch.where(A > 0, A, 2*A)).sum()/b.n_tokens, {}
def bare(out, b): return good(out, b).sum()/b.n_tokens
def vector(out, b): return good(out, b).sum(1), {}
def number(out, b): return good(out, b).sum().item(), {}
def float_metric(out, b): return good(out, b).sum()/b.n_tokens, dict(x=1.)
def raises_on_parts(out, b):
    if len(b) < 4: raise RuntimeError("four rows at least")
    return good(out, b).sum()/b.n_tokens, {}
def tokens_by_rows(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_rows)
def rows_by_tokens(out, b):
    return grpo_loss(out.logprobs, b.old_logprobs, b.ref_logprobs, b.advantages, b.mask,
                     denom=float(b.n_tokens))
def even_ids_by_all_tokens(out, b): return sft_loss(out.logprobs, b.mask & (b.tokens % 2 == 0), denom=b)
def even_mean_by_all_tokens(out, b): return masked_mean(-out.logprobs, b.mask & (b.tokens % 2 == 0), denom=b), {}
def pairs_by_rows(out, b): loss, m = dpo_rows(out, b); return loss*b.n_units/b.n_rows, m
def sequence(out, b, weigh): # one ratio and one advantage a row
    s, A = (masked_mean(x, b.mask, dim=-1) for x in clean(b.mask, out.logprobs-b.old_logprobs, b.advantages))
    return -(s.exp()*weigh(A)).sum()/b.n_rows, {}
def uneven_sequence(out, b): return sequence(out, b, lambda A: torch.where(A > 0, A, 2*A))
def shifted_sequence(out, b):
    s, A = clean(b.mask, out.logprobs-b.old_logprobs, b.advantages)
    return -(masked_mean(s, b.mask, dim=-1).exp()*masked_mean(A.roll(1, 1), b.mask, dim=-1)).sum()/b.n_rows, {}
def rolled(out, b): # within the row: equal advantages would not show it
    lp, A = clean(b.mask, out.logprobs, b.advantages)
    order, n = b.mask.long().argsort(dim=1, descending=True, stable=True), b.mask.sum(1, keepdim=True).clamp(min=1)
    before = A.gather(1, order).gather(1, (b.mask.cumsum(1) - 2) % n)
    return (-lp*before)[b.mask].sum()/b.n_tokens, {}
class Squares(torch.autograd.Function): # x², with its derivative written by hand
    @staticmethod
    def forward(ctx, x):
        ctx.slope = 2*x.detach()
        return x*x
    @staticmethod
    def backward(ctx, g): return g*ctx.slope

def by_hand(out, b): return Squares.apply(clean(b.mask, out.values)[0]).sum()/b.n_tokens, {}
def guarded(out, b):
    if good(out, b).isnan().any(): raise ValueError("a NaN")
    return good(out, b).sum()/b.n_tokens, {}
def branches(out, b):
    return (good(out, b).sum() if clean(b.mask, out.logprobs)[0].sum() < 9
            else 0*out.logprobs.where(b.mask, 0.).sum())/b.n_tokens, {}
class Reversed(torch.autograd.Function): # x, whose tangent is −x
    generate_vmap_rule = True
    @staticmethod
    def forward(x): return x.clone()
    @staticmethod
    def setup_context(ctx, inputs, out): pass
    @staticmethod
    def backward(ctx, g): return g
    @staticmethod
    def jvp(ctx, v): return -v
def wrong_tangent(out, b): return Reversed.apply(clean(b.mask, out.values)[0]).sum()/b.n_tokens, {}

CLOSURES = [
    (local_mean, "split", r"the parts sum to [-\d.]+, the batch gives -0\.\d+: pass denom=b"),
    (local_row_mean, "split", "the batch gives"),
    (scaled_by_rows, "empty_rows", "two rows more"),
    (right_value_wrong_gradient, "split", "the gradient of out.logprobs at"),
    (multiplied, "mask", "nan under the mask of out.logprobs, the loss went from .* to nan; torch.where"),
    (where_too_late, "mask", "nan under the mask of out.logprobs, the gradient of out.logprobs .* went from 0 to nan"),
    (counts_padding, "mask", "with 0 under the mask of out.logprobs, the loss went .* not chosen"),
    (metric_counts_padding, "mask", "the metric 'lp' went"),
    (broadcasts, "permutation", "at_tokens"),
    (positional_groups, "permutation", "by id, not by position"),
    (sorted_rows, "permutation", "rows in the order of b"),
    (partial(captured), "permutation", "captured tensors"),
    (in_place, "purity", "changed advantages in place"),
    (mask_in_place, "purity", "changed mask in place"),
    (writes_column, "purity", "writes b.advantages"),
    (writes_item, "purity", "writes b.advantages"),
    (draws, "purity", "global random state"),
    (Counter(), "purity", "differs between two equal calls"),
    (detached, "gradient", "none reaches out.logprobs; there is a detach"),
    (constant_if_empty, "empty", "no graph"),
    (nan_gradient_if_empty, "empty", "gradient of out.logprobs is not finite"),
    (offset, "empty", "the loss is 0.001, not 0"),
    (padded_length, "padding", "three columns of padding more, the loss went"),
    (empty_row_mean, "result", "one with nothing counted, the loss is not finite"),
    (mean_without_count, "metrics", "the metric 'x' went from"),
    (changing_keys, "empty_rows|metrics|permutation", "same keys always"),
    (single, "precision", "the loss is torch.float32, wanted torch.float64"),
    (squashed, "scale", "with advantages times 0.5 the loss is"),
    (wrong_sign, "reinforce", "a loss is minimised"),
    (shifted, "reinforce", "same token"),
    (asymmetric, "reinforce", "a weight without A"),
    (bare, "result", "returned a tensor alone"),
    (vector, "result", r"returned \(a tensor \[16\], a dict\)"),
    (number, "result", r"returned \(a float, a dict\)"),
    (float_metric, "result", "metric 'x' is a float; wrap it in Mean, Max or Last"),
    (raises_on_parts, "split", "it raised RuntimeError: four rows at least"),
    (tokens_by_rows, "mean", r"the loss is -?[\d.]+, and -?[\d.]+ if rows are shorter .* tokens with b.n_tokens"),
    (rows_by_tokens, "mean", "means of rows with b.n_rows"),
    (pairs_by_rows, "mean", "pairs with b.n_units"),
    (even_ids_by_all_tokens, "mean", "divides by the count of another"),
    (even_mean_by_all_tokens, "mean", "divides by the count of another"),
    (shifted_sequence, "reinforce", "belongs to the same token"),
    (uneven_sequence, "reinforce", "a weight without A"),
    (rolled, "reinforce", "a weight without A"),
    (by_hand, "differentiable", "under torch.func.grad it raised .*no autograd.Function.*differentiable=False"),
    (branches, "differentiable", "under torch.func.vmap it raised"),
    (wrong_tangent, "differentiable", "under torch.func.jvp the derivative of loss went from"),
]


@pytest.mark.parametrize(("loss", "law", "says"), CLOSURES, ids=lambda x: getattr(x, "__name__", None))
def test_broken_closure(loss, law, says):
    with pytest.raises(AssertionError, match=f"breaks the ({law}) law: .*{says}"): check_loss(loss)


# -- broken blocks

def through_advantages(logprobs, advantages, mask, *, denom=None):
    lp, A = clean(mask, logprobs, advantages)
    return aggregate(-lp*A, mask, denom=denom), {}
def unclean_ratio(logprobs, old_logprobs, advantages, mask, *, denom=None): # a gradient reaches data too
    return aggregate(-(logprobs-old_logprobs).exp()*advantages, mask, denom=denom), {}
def through_old(logprobs, old_logprobs, advantages, mask, *, denom=None):
    lp, old, A = clean(mask, logprobs, old_logprobs, advantages.detach())
    return aggregate(-(lp-old).exp()*A, mask, denom=denom), {}
def no_denom(logprobs, mask): return masked_mean(-logprobs, mask), {}
def ignores_denom(logprobs, mask, *, denom=None): return masked_mean(-logprobs, mask), {}
def zero_over_zero(logprobs, mask, *, denom=None):
    return masked_sum(-logprobs, mask)/(mask.sum() if denom is None else denom), {}
def all_rows(logprobs, mask, *, over="rows", denom=None):
    return masked_sum(-logprobs, mask)/(len(mask) if denom is None else denom), {}
def narrow(logprobs, mask, *, denom): return torch.where(mask, -logprobs, 0.).sum()/denom, {}
def narrow_inside(logprobs, mask, *, denom): return promoted(torch.where(mask, -logprobs, 0.).sum())/denom, {}
def single_inside(logprobs, mask, *, denom): return torch.where(mask, -logprobs, 0.).sum().float()/denom, {}
def widened(logprobs, mask, *, denom): return torch.where(mask, -logprobs.double(), 0.).sum()/denom, {}
# an importance weight that is clip_high for everybody
def inert(logprobs, old_logprobs, advantages, mask, *, clip_high=.2, denom=None):
    lp, old, A = clean(mask, logprobs, old_logprobs.detach(), advantages.detach())
    return aggregate(-(lp-old).exp().clamp(max=clip_high).detach()*A*lp, mask, denom=denom), {}
def rows_by_tokens_of_b(logprobs, mask, *, denom=None):
    return masked_mean(-logprobs, mask, dim=-1).sum()/divisor(denom, "n_tokens", mask.any(1).sum()), {}
def sum_by_rows_of_b(logprobs, mask, *, denom=None):
    return masked_sum(-logprobs, mask)/divisor(denom, "n_rows", mask.sum()), {}
def pairs_by_rows_of_b(chosen, rejected, *, denom=None):
    return promoted(rejected-chosen).sigmoid().sum()/divisor(denom, "n_rows", len(chosen)), {}
def by_groups_of_b(logprobs, mask, *, denom=None):
    return masked_mean(-logprobs, mask, dim=-1).sum()/divisor(denom, "n_groups", mask.any(1).sum()), {}
def maskless(logprobs, advantages): return -(logprobs*advantages.detach()).sum(), {}

BLOCKS = [
    (through_advantages, "gradient", r"reaches advantages; .* advantages.detach\(\)"),
    (through_old, "gradient", "reaches old_logprobs; .* Harmless where you pass columns of a batch"),
    (unclean_ratio, "mask", r"torch.where\(mask, x, 0.\) on every .* log_ratio\(logprobs, old_logprobs, mask\)"),
    (no_denom, "split", r"the batch gives .*: hand on denom, aggregate\(…, denom=denom\), instead of"),
    (ignores_denom, "split", "the batch gives .*: hand on denom"),
    (zero_over_zero, "empty", "the loss is nan, not 0"),
    (all_rows, "empty_rows", r"two rows more .* mask.any\(1\)"),
    (narrow, "precision", "with torch.bfloat16 the loss is torch.bfloat16, wanted torch.float32"),
    (narrow_inside, "precision", "with torch.bfloat16 the loss went from"),
    (single_inside, "precision", "with torch.float64 the loss is torch.float32, wanted torch.float64"),
    (widened, "precision", "with torch.bfloat16 the loss is torch.float64, wanted torch.float32"),
    (inert, "reinforce", "weights of the tokens sum to 0.2, not to 1"),
    (maskless, "mask", "it takes no mask"),
    (rows_by_tokens_of_b, "denom", "with denom=b instead of denom=None, the loss went from .* divisor"),
    (sum_by_rows_of_b, "denom", "another count of the batch than its own"),
    (pairs_by_rows_of_b, "denom", "another count of the batch than its own"),
    (by_groups_of_b, "denom", "another count of the batch than its own"),
]


@pytest.mark.parametrize(("loss", "law", "says"), BLOCKS, ids=lambda x: getattr(x, "__name__", None))
def test_broken_block(loss, law, says):
    with pytest.raises(AssertionError, match=f"{loss.__name__} breaks the {law} law: .*{says}"): check_loss(loss)


def test_every_law_has_a_loss_that_breaks_it():
    seen = {law for _, laws, _ in CLOSURES + BLOCKS for law in laws.split("|")}
    assert seen == {*LAWS, "denom", "scale", "reinforce", "mean", "result"}


# -- what passes

def test_good_losses_pass_in_both_forms():
    def closure(out, b): return good_block(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    def by_item(out, b):
        return masked_sum(good(out, b), b["mask"])/b.n_tokens, dict(n=Last(0), most=Max(good(out, b).amax()))
    for loss in (good_block, plain_ppo):
        for over in ("tokens", "rows"):
            assert check_loss(partial(loss, over=over)) == check_loss(loss, over=over) == of_block(policy=True)
        # only the batch knows what a group counts
        assert check_loss(loss, over="groups") == tuple(x for x in of_block(policy=True) if x != "denom")
    for loss in (closure, by_item, partial(sequence, weigh=lambda A: A)):
        assert check_loss(loss) == laws("mean", policy=True)


def test_policy_laws_are_for_policy_losses():
    assert check_loss(value_loss) == of_block() and check_loss(grpo_loss) == of_block(policy=True)
    with_entropy = lambda out, b: ((good(out, b) - .1*clean(b.mask, out.entropy)[0]).sum()/b.n_tokens, {})
    assert check_loss(with_entropy) == laws("mean", policy=True)
    assert check_loss(grpo_loss, kl_coef=0.,
                      policy=True)[-3:-1] == check_loss(grpo_loss, policy=True)[-3:-1] == ("scale", "reinforce")
    assert check_loss(squashed, policy=False) == laws("mean")


def test_the_answer_is_one_line_and_a_tuple():
    held = check_loss(plain_ppo)
    assert repr(held) == str(held) == "14 laws hold" and held == of_block(policy=True) and "split" in held
    def by_number(logprobs, mask, *, denom=None):
        return masked_sum(-logprobs, mask)/(denom or mask.sum().clamp(min=1)), {}
    assert re.fullmatch(
        r"12 laws hold, with n_tokens as the number denom \(for a batch: TypeError: unsupported operand .*\)",
        repr(check_loss(by_number)))
    assert repr(check_estimator(whiten, dict(x=sample_columns()["rewards"]))) == "8 laws hold"


# -- a term beside the policy's hides nothing

def kl_term(out, b): return .04*masked_mean(kl_k3(out.logprobs, b.ref_logprobs, b.mask), b.mask, denom=b.n_tokens)
def kl_of_first_order(out, b): return .04*masked_sum(out.logprobs-b.ref_logprobs, b.mask)/b.n_tokens
def entropy_term(out, b): return -.01*masked_mean(out.entropy, b.mask, denom=b.n_tokens)
def value_term(out, b): return .5*value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens)[0]
def imitation_term(out, b): return .1*masked_mean(-out.logprobs, b.mask, denom=b.n_tokens)
def heavy_kl_term(out, b): return 100*kl_term(out, b)
TERMS = [kl_term, heavy_kl_term, kl_of_first_order, entropy_term, value_term, imitation_term]
def all_terms(out, b): return sum(f(out, b) for f in TERMS)

def of_magnitude(out, b): # |A|
    lp, old, A = clean(b.mask, out.logprobs, b.old_logprobs, b.advantages)
    return (-(lp-old).exp()*A.abs()).sum()/b.n_tokens, {}
def unmoved(out, b): # old log-probs that are the new ones: a ratio without gradient
    lp, A = clean(b.mask, out.logprobs, b.advantages)
    return (-(lp-lp).exp()*A).sum()/b.n_tokens, {}


BROKEN = [(wrong_sign, "reinforce"), (of_magnitude, "reinforce"), (unmoved, "reinforce"), (shifted, "reinforce"),
          (squashed, "scale")]


@pytest.mark.parametrize(("policy", "law", "term"), [(*x, f) for x in BROKEN for f in (kl_term, all_terms)] + [
    (wrong_sign, "reinforce", f) for f in TERMS[1:]], ids=lambda x: getattr(x, "__name__", None))
def test_another_term_hides_no_broken_policy_term(policy, law, term):
    def loss(out, b): return policy(out, b)[0] + term(out, b), {}
    with pytest.raises(AssertionError, match=f"breaks the {law} law"): check_loss(loss, mean=False)


@pytest.mark.parametrize("term", [*TERMS, all_terms], ids=lambda f: f.__name__)
def test_another_term_is_no_false_alarm(term):
    def loss(out, b): return good(out, b).sum()/b.n_tokens + term(out, b), {}
    assert check_loss(loss)== laws("mean", policy=True)


@pytest.mark.parametrize("loss", [
    lambda out, b: gspo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b),
    lambda out, b: gmpo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b)], ids=["gspo", "gmpo"])
def test_ratios_of_rows_pass_with_advantages_of_tokens(loss): assert {"reinforce", "mean"} <= set(check_loss(loss))


def test_a_mean_is_one_with_any_reduction_and_any_term():
    def mixed(out, b): # each term with its own count; only one of them wrong is seen, too
        rows, m = grpo_loss(out.logprobs, b.old_logprobs, b.ref_logprobs, b.advantages, b.mask, denom=b)
        return rows + masked_mean(clean(b.mask, out.entropy)[0], b.mask, denom=b.n_tokens), m
    assert check_loss(mixed)[-2] == check_loss(dpo_rows)[-2] == "mean"
    def one_wrong(out, b):
        loss, m = mixed(out, b)
        return loss + value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_rows)[0], m
    with pytest.raises(AssertionError, match="one_wrong breaks the mean law"): check_loss(one_wrong)
    assert "mean" not in check_loss(one_wrong, mean=False) + check_loss(ppo_loss)
    few = sample_columns(4, 3) # rows of few tokens: nothing is left to shorten, and no false alarm
    assert check_loss(mixed, {k: few[k] for k in ("old_logprobs", "ref_logprobs", "advantages", "mask")})[-2] == "mean"


def test_a_block_gets_the_batch_as_denom():
    seen = []
    def loss(logprobs, mask, *, over="tokens", denom=None):
        seen.append(denom)
        return aggregate(-logprobs, mask, over=over, denom=denom), {}
    def wrapped(logprobs, mask, **kw): return loss(logprobs, mask, **kw)
    for fn, kw, expected in ((loss, {}, {"batch", None}), (loss, dict(over="rows"), {"batch", None}),
                             (partial(loss, over="rows"), {}, {"batch", None}),
                             (loss, dict(over="groups"), {"batch"}), (wrapped, {}, {"batch"}),
                             (wrapped, dict(over="rows"), {"batch"}), (partial(loss, denom=100.), {}, {100.})):
        seen.clear()
        check_loss(fn, **kw)
        assert {"batch" if isinstance(x, Counts) else x for x in seen} == expected


def test_a_block_that_only_knows_numbers_gets_one():
    seen = []
    def loss(logprobs, mask, *, over="tokens", denom=None):
        rows, n = (masked_mean(-logprobs, mask, dim=-1) if over == "rows" else masked_sum(-logprobs, mask, dim=-1),
                   mask.sum() if over == "tokens" else mask.any(1).sum())
        total = rows.sum()/(n.clamp(min=1) if denom is None else denom)
        seen.append(denom) # the batch has raised by now
        return total, {}
    def wrapped(logprobs, mask, **kw): return loss(logprobs, mask, **kw)
    mask = sample_columns()["mask"]
    n_tokens, n_rows = int(mask.sum()), int(mask.any(1).sum())
    for fn, kw, expected in ((loss, {}, {n_tokens, None}), (loss, dict(over="rows"), {n_rows, None}),
                             (partial(loss, over="rows"), {}, {n_rows, None}),
                             (wrapped, {}, {n_tokens}), (wrapped, dict(over="rows"), {n_rows}),
                             (loss, dict(over="rows", denom="n_units"), {n_rows, None})):
        seen.clear()
        check_loss(fn, **kw)
        assert set(seen) == expected
    with pytest.raises(AssertionError, match="denom law"): check_loss(loss, denom="n_units") # tokens, divided by units
    def typo(logprobs, mask, *, denom=None): return aggregate(-logprob, mask, denom=denom), {}        # noqa: F821
    with pytest.raises(NameError): check_loss(typo) # an error of its own comes out as it is


def test_own_columns():
    def weighted(logprobs, weights, advantages, mask, *, denom=None):
        lp, w, A = clean(mask, logprobs, weights.detach(), advantages.detach())
        return aggregate(-w*lp*A, mask, denom=denom), {}
    with pytest.raises(
            ValueError,
            match=r"check_loss: weighted wants 'weights'.*inputs=dict\(weights=…\) .*, or a number, weights=…"):
        check_loss(weighted)
    assert check_loss(weighted, dict(weights=torch.rand(16, 16)), policy=False) == of_block()
    assert check_loss(weighted, dict(weights=torch.rand(5, 9)), policy=False) == of_block() # the others follow in shape
    closure = lambda out, b: ((good(out, b)*clean(b.mask, b.weights)[0]).sum()/b.n_tokens, {})
    assert check_loss(closure, dict(weights=torch.rand(16, 16)), policy=False) == laws("mean")
    with pytest.raises(AttributeError, match=r"check_loss: b has no column 'weights'.*inputs=dict\(weights=…\)"):
        check_loss(lambda out, b: (b.weights.sum(), {}))
    with pytest.raises(ValueError, match="equally many rows"):
        check_loss(weighted, dict(weights=torch.rand(5, 9), logprobs=torch.rand(6, 9)))
    with pytest.raises(TypeError, match="local_mean is a closure loss.out, b.; clip_low cannot be passed to it"):
        check_loss(local_mean, clip_low=.1)
    # b has it, out has not
    with pytest.raises(AttributeError, match="out has no 'advantages'.*a column of the batch is b.advantages"):
        check_loss(lambda out, b: (out.advantages.sum(), {}))


def test_losses_without_tokens_have_no_mask_to_check():
    def pairs(chosen, rejected, *, denom=None):
        x = torch.nn.functional.softplus(promoted(rejected.detach())-promoted(chosen))
        return x.sum()/(len(x) if denom is None else denom), dict(margin=Mean((chosen-rejected).sum(), len(x)))
    held = check_loss(pairs, dict(chosen=torch.randn(16), rejected=torch.randn(16)))
    assert held == ("purity", "permutation", "denom", "split", "gradient", "metrics", "precision", "differentiable")


def test_a_loss_that_reads_nothing_is_refused():
    with pytest.raises(ValueError, match="reads no column"): check_loss(lambda out, b: (torch.zeros(()), {}))


def test_its_own_error_comes_out_as_it_is():
    def typo(out, b): return undefined, {}        # noqa: F821
    with pytest.raises(NameError): check_loss(typo)


def test_checking_leaves_no_trace():
    state, inputs = (torch.get_rng_state(),
                     dict(advantages=torch.randn(16, 16, generator=torch.Generator().manual_seed(0))))
    before = inputs["advantages"].clone()
    python = random.getstate()
    for loss in (ppo_loss, in_place):
        try: check_loss(loss, inputs)
        except AssertionError: pass
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
    assert torch.equal(inputs["advantages"], before) and not inputs["advantages"].requires_grad


def test_counts_are_those_of_a_batch():
    from rlblocks.data.batch import Batch
    names, seen = ("n_tokens", "n_rows", "n_units", "n_groups", "n_desirable", "group_tokens"), {}
    def loss(out, b, over="tokens"):
        if len(b) == 16: seen.update({k: getattr(b, k) for k in names})
        return good_block(out.logprobs, b.old_logprobs, b.advantages, b.mask, over=over, denom=b)
    batch = Batch(**sample_columns())
    for over in ("tokens", "rows", "groups"):
        check_loss(partial(loss, over=over), mean=False) # whose law counts another batch
        stand_in = dict(seen)
        total = sum(loss(part, part, over)[0] for part in batch.parts(5)) # here `logprobs` is a column, too
        assert_close(total, loss(batch, batch, over)[0])
        assert seen.keys() == stand_in.keys()
    # the stand-in has the permuted, the padded … rows too; the first call has those of the vocabulary
    first = {}
    def look(out, b):
        if not first: first.update({k: getattr(b, k) for k in names})
        return loss(out, b)
    check_loss(look)
    assert {k: x for k, x in first.items()
            if k != "group_tokens"} == {k: getattr(batch, k) for k in names if k != "group_tokens"}
    assert torch.equal(first["group_tokens"], batch.group_tokens)


def test_a_closure_that_takes_the_batch_splits_and_is_a_mean():
    def of(over):
        return lambda out, b: plain_ppo(out.logprobs, b.old_logprobs, b.advantages, b.mask, over=over, denom=b)
    for over in ("tokens", "rows", "groups"): assert check_loss(of(over)) == laws("mean", policy=True)
    marked = torch.rand(16, 16, generator=torch.Generator().manual_seed(4)) < .5
    def of_marks(out, b, count="n_marked"):
        return masked_sum(clean(b.mask, out.values)[0], b.mask & b.marked)/divisor(b, count, None), {}
    assert {"split", "mean"} <= set(check_loss(of_marks, dict(marked=marked)))
    with pytest.raises(AssertionError, match="mean law"):
        check_loss(partial(of_marks, count="n_tokens"), dict(marked=marked))
    with pytest.raises(AttributeError, match="b has no column 'n_marks'"):
        check_loss(lambda out, b: (out.values.sum()/b.n_marks, {}))


# -- derivatives

@pytest.mark.parametrize("loss", [by_hand, guarded, branches, wrong_tangent], ids=lambda f: f.__name__)
def test_what_only_the_last_law_sees(loss):
    assert "split" in check_loss(loss, differentiable=False, policy=False, mean=False)
    with pytest.raises(AssertionError, match="breaks the differentiable law"):
        check_loss(loss, policy=False, mean=False)


def test_a_stopped_gradient_is_no_second_derivative_missing():
    def sg(out, b):
        return (-(lp := clean(b.mask,
                              out.logprobs)[0])*lp.detach().exp()*clean(b.mask, b.advantages)[0]).sum()/b.n_tokens, {}
    assert check_loss(sg) == laws("mean", policy=True)


# -- estimators

def unmasked_whiten(x, mask): return torch.where(mask, (x-x.mean())/x.std(), 0.)
def zero_filled_whiten(x, mask): return torch.where(mask, promoted(x)-torch.where(mask, promoted(x), 0.).mean(), 0.)
def leaves_padding(rewards, mask): return promoted(rewards).clone()
def through_values(rewards, values, mask): return torch.where(mask, promoted(rewards)-promoted(values), 0.)
def centered_by_rows(rewards, mask):
    x = torch.where(mask, promoted(rewards), 0.)
    return torch.where(mask, x - x.sum()/mask.sum().clamp(min=1)/len(mask), 0.)
def neighbour(rewards, mask): return torch.where(mask, torch.where(mask, promoted(rewards), 0.).roll(1, 0), 0.)
def fills_nothing(rewards, mask): return masked_mean(rewards, mask)+1
def half_inside(rewards, mask): return torch.where(mask, rewards*1.1, 0.)
def sorts_in_place(rewards, mask): return torch.where(mask, rewards.detach().copy_(rewards.detach()), 0.)

ESTIMATORS = [
    (unmasked_whiten, "mask", "with 0 under the mask of x, the output at"),
    (zero_filled_whiten, "padding", "the output at"),
    (leaves_padding, "mask", "not 0 where the mask is False"),
    (through_values, "gradient", r"reaches values; .* values.detach\(\)"),
    (centered_by_rows, "empty_rows", "two rows more"),
    (neighbour, "permutation", "the output at"),
    (fills_nothing, "empty", "the output is 1, not 0"),
    (half_inside, "precision", "the output is torch.bfloat16"),
    (sorts_in_place, "purity", "changed rewards in place"),
]


@pytest.mark.parametrize(("fn", "law", "says"), ESTIMATORS, ids=lambda x: getattr(x, "__name__", None))
def test_broken_estimator(fn, law, says):
    inputs = dict(x=sample_columns()["rewards"]) if "whiten" in fn.__name__ else None
    with pytest.raises(AssertionError, match=f"{fn.__name__} breaks the {law} law: .*{says}"):
        check_estimator(fn, inputs)


def test_good_estimators_pass():
    held, x = (*ROWS, "gradient", "precision"), dict(x=sample_columns()["rewards"])
    assert check_estimator(whiten, x) == check_estimator(partial(whiten, shift=False), x) == held
    def two(rewards, values, mask):
        r, v = clean(mask, rewards, values.detach())
        return r-v, r.sum(1)
    assert check_estimator(two) == held
    def per_row(scores, group):
        return promoted(scores)-torch.stack([promoted(scores)[group == g].mean().detach() for g in group])
    assert check_estimator(per_row) == ("purity", "permutation", "gradient", "precision")
    with pytest.raises(ValueError, match="check_estimator: whiten wants 'x'"): check_estimator(whiten)


# -- columns

def test_sample_columns():
    cols = sample_columns()
    assert sorted(cols["lengths"].tolist()) == list(range(1, 17))
    mask, t = cols["mask"], torch.arange(16)
    assert not mask[:, 0].any() and not (mask & (t >= cols["lengths"][:, None])).any()
    assert (~mask & (t < cols["lengths"][:, None]))[:, 1:].any()
    assert (~mask.any(1)).sum() == 1 and all(x.dtype == torch.float64 for x in cols.values() if x.is_floating_point())
    assert all(x.shape in ((16, 16), (16,)) for x in cols.values())
    assert all(torch.equal(x, sample_columns()[k]) for k, x in cols.items())
    assert not torch.equal(cols["rewards"], sample_columns(seed=1)["rewards"])
    assert all(x.shape[0] == 3 for x in sample_columns(3, 7).values()) and sample_columns(3, 7)["mask"].shape == (3, 7)


# -- oracles, by hand

def test_naive_aggregate():
    x, m = torch.tensor([[1., 1., 9.], [0., 0., 3.],
                         [7., 7., 7.]]), torch.tensor([[True, True, False], [True]*3, [False]*3])
    got = (naive_aggregate(x, m), naive_aggregate(x, m, over="rows"), naive_aggregate(x, m, denom=10),
           naive_aggregate(x, m, over="rows", denom=torch.tensor(4)))
    assert_close(got, tuple(torch.tensor(v, dtype=torch.float64) for v in (1., 1., .5, .5)))
    by_group = [naive_aggregate(x, m, over="groups", group=torch.tensor(g)).item()
                for g in ([0, 0, 1], [0, 1, 1], [5, 2, 5])]
    assert by_group == [1., (1+1)/2, (1+1)/2]
    assert naive_aggregate(x, m, over="groups", group=torch.tensor([0, 1, 1]), denom=4) == .5
    assert naive_aggregate(x, ~m & m) == naive_aggregate(x, ~m & m, over="rows", denom=0) == 0


@pytest.mark.parametrize(("ratio", "A", "loss"), [(2., 1., -1.2), (.5, 1., -.5), (.5, -1., .8), (2., -1., 2.),
                                                  (9., -1., 3.), (9., 1., -1.2), (9., 0., 0.)])
def test_naive_ppo(ratio, A, loss):
    got = naive_ppo_loss(torch.tensor([[ratio]]).log(), torch.zeros(1, 1), torch.tensor([[A]]), torch.tensor([[True]]),
                         dual_clip=3.)
    assert_close(got.item(), loss, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("v", "clip", "loss"),
                         [(1., .2, 1.62), (-1., .2, 4.5), (.1, .2, 1.805), (1., None, .5), (1., .5, 1.125)])
def test_naive_value(v, clip, loss):
    got = naive_value_loss(torch.tensor([[v]]).double(), torch.zeros(1, 1), torch.tensor([[2.]]),
                           torch.tensor([[True]]), clip=clip)
    assert_close(got.item(), loss)


def test_naive_gae_and_returns(): # LAWS 2, 3 and 5
    f = lambda *x: torch.tensor([x], dtype=torch.float64)
    two = torch.tensor([[True, True, False]])
    adv, ret = naive_gae(f(0, 1, 0), f(0, 0, 100), two, gamma=1., lam=.95)
    assert_close(adv, f(.95, 1, 0))
    assert_close(naive_gae(f(0, 0, 1), f(.5, .6, .8), torch.ones(1, 3).bool(), gamma=.9, lam=.5)[0], f(.1345, .21, .2))
    adv, ret = naive_gae(f(0, 0, 1), f(.5, .6, .8), torch.tensor([[True, False, True]]), gamma=.9, lam=.5)
    assert_close([adv, ret], [f(.31, 0, .2), f(.81, 0, 1.)])
    assert_close(naive_returns(f(1.5, 1, 2, 2), torch.tensor([[True, True, False, False]])), f(2.5, 1, 0, 0))
    assert_close(naive_returns(f(0, 0, 1), torch.tensor([[True, False, True]]), gamma=.5), f(.5, 0, 1))


def test_naive_groups():
    nan = math.nan
    s, g = torch.tensor([1., 0., nan, 1., 5., .95, .95, .95]), torch.tensor([7, 7, 7, 7, 2, 3, 3, 3])
    f = lambda *x: torch.tensor(x, dtype=torch.float64)
    assert_close(naive_group_advantages(s, g, eps=0.), f(1, -2, 0, 1, 0, 0, 0, 0)/math.sqrt(3))
    assert_close(naive_group_advantages(s, g, scale=False), f(1, -2, 0, 1, 0, 0, 0, 0)/3)
    assert_close(naive_leave_one_out(s, g), f(.5, -1, 0, .5, 0, 0, 0, 0), atol=1e-7, rtol=0)
    assert naive_group_advantages(f(nan, 2., nan, nan), torch.tensor([0, 0, 1, 1])).tolist() == [0, 0, 0, 0]


def test_naive_token_logprobs():
    logits = torch.zeros(1, 3, 2, dtype=torch.float64)
    logits[..., 1] = math.log(3)
    assert_close(naive_token_logprobs(logits, torch.tensor([[0, 0, 1]])).exp(), torch.tensor([[1., .25, .75]]).double())
    half = naive_token_logprobs(logits, torch.tensor([[0, 0, 1]]), temperature=.5).exp()
    assert_close(half, torch.tensor([[1., .1, .9]]).double())


# -- pairs

def dpo_rows(out, b):
    "DPO on rows, as `Policy.step` gives them."
    new, ref = (pairs(sequence_logprobs(x, b.mask), b) for x in (out.logprobs, b.ref_logprobs))
    margin = new[0] - new[1] - (ref[0] - ref[1]).detach()
    return -torch.nn.functional.logsigmoid(.1*margin).sum()/b.n_units, dict(margin=mean_of(margin, margin == margin))


def test_a_closure_of_pairs_is_cut_between_units():
    assert {"split", "empty_rows", "permutation", "empty"} <= set(check_loss(dpo_rows))
    def by_rows(out, b): loss, m = dpo_rows(out, b); return loss*b.n_units/b.n_rows*len(b), m
    with pytest.raises(AssertionError, match="breaks the (empty_rows|split) law"): check_loss(by_rows)


def test_pair_blocks_have_two_differentiable_arguments():
    def margin_loss(chosen, rejected, *, denom=None):
        return (rejected - chosen).double().sum()/(len(chosen) if denom is None else denom), {}
    with pytest.raises(AssertionError, match="precision"): check_loss(margin_loss) # float64 whatever comes
    def leaky(chosen, rejected, ref_chosen, *, denom=None):
        return (rejected - chosen + ref_chosen).sum()/(len(chosen) if denom is None else denom), {}
    with pytest.raises(AssertionError, match="a gradient reaches ref_chosen"): check_loss(leaky)
    def mate(chosen, rejected, *, denom=None):
        return (rejected - chosen).sum()/(len(chosen) if denom is None else denom), {}
    with pytest.raises(AssertionError, match="a gradient reaches rejected"): check_loss(mate, wrt=("chosen",))


def test_closures_on_logits_are_checked():
    z, teacher = (torch.randn(16, 16, 7, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                  for i in (0, 1))
    def distil(out, b): return forward_kl_loss(out.logits, b.teacher_logits, b.mask, denom=b.n_tokens)
    assert "split" in check_loss(distil, dict(teacher_logits=teacher), dict(logits=z), mean=False)
    def local(out, b): return forward_kl_loss(out.logits, b.teacher_logits, b.mask)
    with pytest.raises(AssertionError, match="split law"):
        check_loss(local, dict(teacher_logits=teacher), dict(logits=z), mean=False)


# -- what the model computes, and what the batch has

def scored(out, b): return bradley_terry_loss(*pairs(out.scores, b), denom=b)
def criticised(out, b): return value_loss(out.values, b.values, b.returns, b.mask, denom=b.n_tokens)
def measured(out, b): return masked_mean(out.measured, b.mask, denom=b.n_tokens), dict(kl=mean_of(out.measured, b.mask))
def measured_twice(out, b):
    return masked_mean(out.measured[..., 0] + .1*out.measured[..., 1], b.mask, denom=b.n_tokens), {}
def rated(out, b): return ((out.scores-b.ratings)**2).sum(1).where(b.mask.any(1), 0.).sum()/b.n_rows, {}
def routed(out, b): return router_z_loss(out.router_logits[:, :, 0], b.mask, denom=b.n_tokens)

CHECKED = [  # closure, what it is to be given, the same without a denominator
    (scored, {}, lambda out, b: bradley_terry_loss(*pairs(out.scores, b))),
    (criticised, {}, lambda out, b: value_loss(out.values, b.values, b.returns, b.mask)),
    (measured, {}, lambda out, b: (masked_mean(out.measured, b.mask), {})),
    (measured_twice, dict(outputs=dict(measured=torch.rand(16, 16, 2))),
     lambda out, b: (masked_mean(out.measured[..., 0], b.mask), {})),
    (rated, dict(inputs=dict(ratings=torch.rand(16, 3)), outputs=dict(scores=torch.rand(16, 3)), per_row=("ratings",)),
     lambda out, b: (masked_mean(((out.scores-b.ratings)**2).sum(1), b.mask.any(1)), {})),
    (routed, {}, lambda out, b: router_z_loss(out.router_logits[:, :, 0], b.mask)),
]


@pytest.mark.parametrize(("loss", "given", "local"), CHECKED, ids=lambda x: getattr(x, "__name__", None))
def test_closures_of_every_wrapper_are_checked(loss, given, local):
    assert check_loss(loss, **given) == laws("mean")
    with pytest.raises(AssertionError, match="breaks the split law"): check_loss(local, **given)


def test_out_and_batch_are_two_namespaces():
    seen = {}
    def both(out, b):
        seen.setdefault("values",
                        (out.values.detach(), b.values, b["values"], out.values.requires_grad, b.values.requires_grad))
        return criticised(out, b)
    check_loss(both)
    new, old, item, *_ = seen["values"]
    assert not torch.equal(new, old) and torch.equal(old, item)
    given, said = torch.randn(16, 16), torch.randn(16, 16)
    seen.clear()
    check_loss(both, dict(values=given), dict(values=said))
    assert_close(seen["values"][:2], (said.double(), given.double()))
    with pytest.raises(AttributeError, match="out.logprobs is what the model computes"):
        check_loss(lambda out, b: (b.logprobs.sum(), {}))
    # unless the batch says so
    check_loss(lambda out, b: (masked_mean(out.logprobs-b.logprobs, b.mask, denom=b.n_tokens), {}),
               dict(logprobs=torch.zeros(16, 16)))
    with pytest.raises(ValueError,
                       match=r"scored does not read b.scores; it reads out.scores.*outputs=dict\(scores=…\)"):
        check_loss(scored, dict(scores=torch.rand(16)))
    check_loss(scored, dict(scores=torch.rand(16)), dict(scores=torch.rand(16)))


def test_what_an_error_advises_works():
    weighted = lambda out, b: ((good(out, b)*clean(b.mask, b.weights)[0]).sum()/b.n_tokens, {})
    with pytest.raises(AttributeError,
                       match=r"inputs=dict\(weights=…\) with 16 rows: torch.rand\(16\), or torch.rand\(16, 16\) if"):
        check_loss(weighted)
    check_loss(weighted, dict(weights=torch.rand(16, 16)), policy=False)
    on_logits = lambda out, b: (masked_mean(out.logits.where(b.mask[..., None], 0.).logsumexp(-1), b.mask,
                                            denom=b.n_tokens), {})
    with pytest.raises(AttributeError, match=r"outputs=dict\(logits=…\) with 16 rows, torch.randn\(16, 16, 32\)"):
        check_loss(on_logits)
    check_loss(on_logits, outputs=dict(logits=torch.randn(16, 16, 32)))
    with pytest.raises(ValueError, match=r"ratings is \[16, 3\], and rows have 16 tokens; .* per_row=\('ratings',\)"):
        check_loss(rated, dict(ratings=torch.rand(16, 3), old_values=torch.rand(16, 16)),
                   dict(scores=torch.rand(16, 3)))
    with pytest.raises(ValueError, match=r"inputs=dict\(advantages=…\)"):
        check_loss(weighted, outputs=dict(advantages=torch.rand(16, 16)))
    def clipped(out, b, *, clip): return good(out, b).clamp(-clip, clip).sum()/b.n_tokens, {}
    with pytest.raises(TypeError, match=r"partial\(clipped, clip=…\)"): check_loss(clipped, clip=9.)
    check_loss(partial(clipped, clip=1e9))
    with pytest.raises(TypeError, match="denom cannot be passed to it, it divides by what it reads of b"):
        check_loss(measured, denom="n_rows")
    with pytest.raises(TypeError, match=r"value_loss is called by the names of its columns: inputs=dict\(values=…\)"):
        check_loss(value_loss, outputs=dict(values=torch.rand(16, 16)))
    check_loss(value_loss, dict(values=torch.rand(16, 16)))
    def divergence(p, q): return (promoted(p)-promoted(q)).square().sum(), {}
    with pytest.raises((AttributeError, TypeError)) as found: check_loss(divergence)
    assert "If its parameters are columns, give them by name" in found.value.__notes__[0]
    assert check_loss(divergence, dict(p=torch.rand(16), q=torch.rand(16)), wrt=("p", "q"))


def test_rows_of_which_nothing_is_chosen_do_not_count():
    def kto(out, b, weigh=True):
        lp, ref = sequence_logprobs(out.logprobs, b.mask), sequence_logprobs(b.ref_logprobs, b.mask)
        return kto_loss(lp, ref, b.desirable, weights=b.mask.any(1).float() if weigh else None, kl=.1, denom=b)
    with pytest.raises(AssertionError, match=r"breaks the empty law: .* weights=b.mask.any\(1\).float\(\)"):
        check_loss(partial(kto, weigh=False))
    assert check_loss(kto) == laws("mean")
    def squares(out, b): return (out.scores**2).sum()/b.n_rows, {}
    with pytest.raises(AssertionError, match=r"x.where\(b.mask.any\(1\), 0.\) before the sum"): check_loss(squares)
    check_loss(lambda out, b: ((out.scores**2).where(b.mask.any(1), 0.).sum()/b.n_rows, {}))


# -- whatever Policy.step takes

class Learned(torch.nn.Module):
    "A loss with weights of its own, as a loss has that mixes terms."
    def __init__(self, local=False):
        super().__init__()
        self.mix, self.local = torch.nn.Linear(2, 1), local
    def forward(self, out, b):
        x = self.mix(torch.stack(clean(b.mask, out.logprobs, out.entropy), -1))[..., 0]
        return masked_mean(x, b.mask, denom=None if self.local else b.n_tokens), {}

class Losses:
    def step(self, out, b): return measured(out, b)
    def __call__(self, out, b): return criticised(out, b)

def undecorated(*args, **kw): return measured(*args, **kw)
def with_default(out, b, scale=1.): return scale*measured(out, b)[0], {}


@pytest.mark.parametrize("loss", [Learned(), Losses().step, Losses(), undecorated, with_default,
                                  partial(with_default, scale=2.), partial(lambda c, out, b: measured(out, b), 1)],
                         ids=["module", "method", "callable", "star", "default", "partial", "positional"])
def test_whatever_can_be_called_is_checked(loss): assert check_loss(loss) == laws("mean")


def test_positional_only_parameters_are_a_closure():
    def only(out, b, /): return measured(out, b)
    assert check_loss(only) == laws("mean")


def test_a_module_keeps_its_weights():
    torch.manual_seed(0)
    loss = Learned()
    before = {k: x.clone() for k, x in loss.state_dict().items()}
    check_loss(loss)
    assert all(torch.equal(x, before[k]) for k, x in loss.state_dict().items())
    assert all(p.grad is None for p in loss.parameters())
    with pytest.raises(AssertionError, match="Learned breaks the split law"): check_loss(Learned(local=True))
    class Block(torch.nn.Module):
        def forward(self, logprobs, advantages, mask, *, denom=None):
            return aggregate(-torch.where(mask, promoted(logprobs)*promoted(advantages.detach()), 0.), mask,
                             denom=denom), {}
    with pytest.raises(AssertionError, match="mask law"): check_loss(Block(), policy=False) # the where comes too late


# -- the tutorials' own

# columns that a loop adds to its batch, and scores that are no number a row
GIVEN = dict(
    kto=dict(inputs=dict(kl=torch.full((16,), .1))),
    multi_reward=dict(inputs=dict(prefer=torch.rand(16, 2), told=torch.rand(16, 2) < .8), per_row=("prefer", "told"),
                      outputs=dict(scores=torch.randn(16, 2))),
    process_reward=dict(inputs=dict(steps=torch.rand(16, 16) < .3, step_labels=torch.randint(2, (16, 16))),
                        outputs=dict(scores=torch.randn(16, 16, 2))))


def closures():
    "(tutorial and function, closure) of every loss(out, b) in a tutorial's loop, at the loop's defaults."
    for path in sorted((ROOT/"tutorials").glob("*.ipynb")):
        cells = ["".join(c["source"])
                 for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        for name in sorted({f.name for c in cells if "(out, b)" in c
                            for f in ast.parse(c).body if isinstance(f, ast.FunctionDef)}):
            loop = loop_from(f"{path}:{name}")
            inner = [f for f in ast.parse(textwrap.dedent(inspect.getsource(loop))).body[0].body
                     if isinstance(f, ast.FunctionDef)]
            scope = loop.__globals__ | {k: p.default for k, p in inspect.signature(loop).parameters.items()}
            exec(compile(ast.Module(inner, []), str(path), "exec"), scope)
            yield from (pytest.param(name, scope[f.name], id=f"{path.stem}:{f.name}")
                        for f in inner if [a.arg for a in f.args.args] == ["out", "b"])


@pytest.mark.parametrize(("loop", "loss"), closures())
def test_every_tutorial_obeys_every_law(loop, loss):
    held = check_loss(loss, **GIVEN.get(loop, {}))
    assert set(held) >= {*LAWS, "mean"}
    of_advantages = (loop.endswith("grpo") or loop == "offline") or loss.__name__ == "policy_loss"
    assert ({"scale", "reinforce"} <= set(held)) == of_advantages


def test_the_tutorials_are_found():
    assert {p.id for p in closures()} >= {"sft:loss", "grpo:loss", "ppo:policy_loss", "ppo:critic_loss", "dpo:loss",
                                          "kto:loss", "reward_model:loss", "rlhf:policy_loss", "rlhf:critic_loss",
                                          "async:loss"}
