"Bad input says who, what came, what was wanted and how to fix it: a table of what new users do."
import inspect
import re

import numpy as np
import pytest
import torch
from test_floors import FLOORS, MODULES

import rlblocks as rl
from rlblocks import Batch

x, row = torch.zeros(3, 4), torch.zeros(3)
mask, lengths, tokens = torch.ones(3, 4, dtype=torch.bool), torch.tensor([4, 2, 3]), torch.arange(12).view(3, 4)
chosen = (torch.arange(4) > 0) & (torch.arange(4) < lengths[:, None])


def batch(**columns): return Batch(**dict(tokens=tokens, lengths=lengths, mask=chosen) | columns)


BAD = [   # (what a user does, words of the message)
    # one row alone, a trailing axis, row values for tokens, tokens of unlike number
    (lambda: rl.gae(x[0], x[0], mask[0]), "gae: rewards is [4]; [B, T] is wanted: one row alone is rewards[None]"),
    (lambda: rl.value_loss(x[..., None], x[..., None], x[..., None], mask[..., None]), "value_loss: values is [3, 4, 1]; [B, T] is wanted: values.squeeze(-1) drops the last axis"),
    (lambda: rl.ppo_loss(x, x, row, mask), "ppo_loss: advantages is [3], logprobs is [3, 4]; spread row values with at_tokens(advantages, mask)"),
    (lambda: rl.kl_shaped(x, x[:, 1:], x, mask, kl_coef=.1), "kl_shaped: logprobs is [3, 3], rewards is [3, 4]; they must be equal, nothing is broadcast"),
    (lambda: rl.at_tokens(row[:2], mask), "at_tokens: x is [2], mask is [3, 4]; one value per row is wanted"),
    (lambda: rl.at_last_token(x, mask), "at_last_token: scores is [3, 4], mask is [3, 4]; one score per row is wanted"),
    (lambda: rl.group_advantages(row, lengths[:2]), "group_advantages: scores is [3], group is [2]; one score and one id per row are wanted"),
    (lambda: rl.weighted_scores(x, weights=[1.]), "weighted_scores: scores is [3, 4], there are 1 weights; one for each column is wanted"),
    (lambda: rl.standardized(row, row[:1]), "standardized: moments is [1]; the three numbers of update_moments are wanted"),
    (lambda: rl.update_moments(row[:1], row), "update_moments: moments is [1]; the three numbers of an earlier call are wanted, or None"),
    # masks and flags that are numbers, ids that are floats
    (lambda: rl.masked_mean(x, mask.long()), "masked_mean: mask is int64; masks are Bool (mask.bool(), or mask > 0)"),
    (lambda: rl.truncation_penalty(row, row), "truncation_penalty: truncated is float32; a Bool is wanted (truncated.bool(), or truncated > 0)"),
    (lambda: rl.cosine_length_reward(row, lengths, max_length=8), "cosine_length_reward: correct is float32; a Bool is wanted"),
    (lambda: rl.group_advantages(row, row), "group_advantages: group is float32; ids are integers"),
    (lambda: rl.repetition_penalty(x, mask), "repetition_penalty: tokens is float32; integers are wanted (tokens.long())"),
    (lambda: rl.overlong_penalty(row, max_length=8, buffer=2), "overlong_penalty: lengths is float32; integers are wanted (lengths.long())"),
    # lists and arrays
    (lambda: rl.gae(x.tolist(), x, mask), "gae: rewards is a list; a tensor is wanted (torch.as_tensor(rewards))"),
    (lambda: rl.ppo_loss(x, x, x.numpy(), mask), "ppo_loss: advantages is a ndarray; a tensor is wanted (torch.as_tensor(advantages))"),
    (lambda: rl.ppo_loss(x, x, x, mask.numpy()), "ppo_loss: mask is a ndarray"), (lambda: rl.at_tokens([1., 2., 3.], mask), "at_tokens: x is a list"),
    (lambda: rl.at_last_token([1., 2., 3.], mask), "at_last_token: scores is a list"), (lambda: rl.clip_rewards([1.], limit=1.), "clip_rewards: x is a list"),
    (lambda: rl.update_moments(None, [1.]), "update_moments: x is a list"), (lambda: rl.overlong_penalty([3], max_length=8, buffer=2), "overlong_penalty: lengths is a list"),
    (lambda: rl.weighted_scores([[1.]]), "weighted_scores: scores is a list"), (lambda: rl.mean_of([1.], None), "mean_of: x is a list"),
    # numbers out of range
    (lambda: rl.gae(x, x, mask, gamma=2), "gae: gamma is 2, lam is 0.95; both lie within [0, 1]"), (lambda: rl.aggregate(x, mask, over="rowz"), "aggregate: over is 'rowz'; it is 'tokens' or 'rows'"),
    (lambda: rl.clip_rewards(row, limit=-1), "clip_rewards: limit is -1; it is the largest size that passes and must be positive"),
    # rows and packs
    (lambda: rl.pack(tokens, torch.tensor([5, 2, 3])), "pack: the length of row 0 is 5, tokens are 4 wide; lengths count real tokens"),
    (lambda: rl.pack(tokens, torch.tensor([-1, 2, 3])), "pack: the length of row 0 is -1"), (lambda: rl.pack(tokens, lengths[:2]), "pack: lengths has 2 rows, tokens is [3, 4]"),
    (lambda: rl.pack(tokens, [4, 2, 3]), "pack: lengths is a list; a tensor is wanted"), (lambda: rl.pack(tokens, row), "pack: lengths is float32; integers are wanted"),
    (lambda: rl.pack(tokens[0], lengths), "pack: tokens is [4]; [B, T] is wanted: one row alone is tokens[None]"),
    (lambda: rl.unpack(row, rl.pack(tokens, lengths)), "unpack: 3 values came for 9 packed tokens"),
    (lambda: rl.plan_micro_batches(lengths, max_tokens=3), "plan_micro_batches: row 0 takes 4 tokens"), (lambda: rl.balance([1., float("nan")], 2), "balance: the cost of item 1 is nan"),
    (lambda: rl.balance([1.], 0), "balance: 0 parts were asked for; at least 1 is wanted"),
    # batches
    (lambda: batch(scores=row[:2]), "Batch: column 'scores' has 2 rows, the batch has 3"), (lambda: batch(scores=np.zeros(3)), "Batch: column 'scores' is a ndarray; a column is a tensor or a list"),
    (lambda: batch(mask=chosen.long()), "Batch: mask is [3, 4] int64; masks are Bool"), (lambda: batch(mask=mask), "mask is True in column 0 of row 0; nothing predicts the first token"),
    (lambda: batch(lengths=torch.tensor([9, 2, 3])), "Batch: lengths reach from 2 to 9, tokens are 4 wide"), (lambda: batch(lengths=torch.tensor([-1, 2, 3])), "Batch: lengths reach from -1 to 3"),
    (lambda: batch(tokens=x), "Batch: tokens is [3, 4] float32; integers [B, T] are wanted"), (lambda: batch(values=x[:, 1:]), "per-token columns have the T of tokens"),
    (lambda: batch().advantages, "Batch: no column 'advantages'; there are tokens"), (lambda: batch().minibatches(0), "Batch: minibatches(0); at least 1 is wanted"),
    (lambda: batch()[:0].parts(2), "a batch without rows cannot be cut in parts"), (lambda: Batch.cat([]), "Batch.cat: nothing to join"),
    (lambda: Batch.cat([{}]), "Batch.cat: there is a dict among what shall be joined; batches are wanted"),
    (lambda: rl.merge(dict(a=1.)), "merge: 'a' is a float; wrap it in Mean, Max or Last"), (lambda: rl.Mean(row), "Mean: total is [3]; a metric holds one number"), (lambda: rl.seed_of({}), "seed_of: cannot hash a dict"),
]


@pytest.mark.parametrize("call, words", BAD, ids=[words[:50] for _, words in BAD])
def test_bad_input_is_told_how_to_be_good(call, words):
    with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(words)): call()


def test_whole_numbers_are_rewards():
    "Right and wrong come as 1 and 0: the same as floats, to the digit."
    right = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    for found, wanted in zip(rl.gae(right, x.long(), mask, gamma=.9), rl.gae(right.float(), x, mask, gamma=.9), strict=True): assert torch.equal(found, wanted) and found.is_floating_point()
    assert torch.equal(rl.standardized(right, torch.tensor([4., .5, 2.])), rl.standardized(right.float(), torch.tensor([4., .5, 2.])))
    assert torch.equal(rl.discounted_returns(right, mask, gamma=.5), rl.discounted_returns(right.float(), mask, gamma=.5))


def test_a_nan_reward_stays_in_its_row():
    bad = x.clone()
    bad[1, 2] = torch.nan
    advantages = rl.gae(bad, x, mask)[0]
    assert advantages[1].isnan().any() and not advantages[[0, 2]].isnan().any()
    assert rl.group_advantages(torch.tensor([1., torch.nan, 0.]), torch.zeros(3, dtype=torch.long))[1] == 0


# -- every block whose tensors are per-token columns refuses the same things, whoever wrote it

NUMBERS = dict(n=2, kl_coef=.1, threshold=1., max_tokens=8)


def per_token_blocks():
    "(function, names of its positional arguments): floors 0 and 1, where each of these is `[B, T]`."
    for module in MODULES:
        if FLOORS[module] > 1 or module in ("testing", "oracles"): continue
        lib = __import__(f"rlblocks.{module}", fromlist=["x"])
        for f in (getattr(lib, n) for n in lib.__all__):
            if not inspect.isfunction(f): continue
            known = inspect.signature(f).parameters.values()
            tensors = [p for p in known if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            needs = [p.name for p in known if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
            if len(tensors) > 1 and all(getattr(p.annotation, "dim_str", "") == "B T" for p in tensors) and set(needs) <= set(NUMBERS): yield f, tensors, {k: NUMBERS[k] for k in needs}


BLOCKS = list(per_token_blocks())


def of_kind(p):
    if "Bool" in str(p.annotation): return mask
    return tokens if "Int" in str(p.annotation) else x + .5


@pytest.mark.parametrize("f, tensors, numbers", BLOCKS, ids=[f.__name__ for f, *_ in BLOCKS])
def test_every_block_of_tokens_refuses_by_name(f, tensors, numbers):
    good = [of_kind(p) for p in tensors]
    f(*good, **numbers)
    def refuses(args, kind, words):
        with pytest.raises(kind, match=re.escape(words)) as e: f(*args, **numbers)
        assert re.match(r"[a-z_0-9]+: ", str(e.value)), e.value
    refuses([a[0] for a in good], ValueError, "[B, T] is wanted: one row alone is")
    for i, p in enumerate(tensors):
        put = lambda v, i=i: [*good[:i], v, *good[i+1:]]
        refuses(put(good[i].tolist()), TypeError, f"{p.name} is a list; a tensor is wanted")
        refuses(put(good[i].numpy()), TypeError, f"{p.name} is a ndarray; a tensor is wanted")
        refuses(put(good[i][:, 1:]), ValueError, "they must be equal, nothing is broadcast")
        if p.name == "mask": refuses(put(mask.long()), TypeError, "mask is int64; masks are Bool")


def test_there_are_such_blocks(): assert len(BLOCKS) > 40 and {"gae", "ppo_loss", "value_loss"} <= {f.__name__ for f, *_ in BLOCKS}
