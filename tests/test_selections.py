"""M2PO's mask and the weights of good and bad samples: hand numbers, oracles, peers' rules, laws, precision, errors.
(Covariance, entropy, experts: test_policy_losses.)"""
import math

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.advantages import at_tokens
from rlblocks.data.batch import Batch
from rlblocks.losses.policy import ppo_loss
from rlblocks.losses.ratio import reinforce_loss
from rlblocks.losses.selections import m2po_mask, sign_weights
from rlblocks.testing.laws import check_estimator
from rlblocks.testing.oracles import sample_columns


def columns(seed=0):
    cols = sample_columns(seed=seed)
    return [cols[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")]


def chosen(mask): return {tuple(i) for i in mask.nonzero().tolist()}


def naive_m2po(lp, old, A, mask, limit):
    """Algorithm 1 of the paper: of the tokens that have moved with their advantage, the largest go until the mean is
    small enough."""
    keep = chosen(mask)
    squares = {i: float(lp[i] - old[i])**2 for i in keep if float(A[i])*float(lp[i] - old[i]) > 0}
    while squares and math.fsum(squares.values())/len(squares) > limit:
        worst = max(squares, key=squares.get)
        keep.remove(worst)
        del squares[worst]
    return keep


@pytest.mark.parametrize("limit", [0., .01, .04, .1, 9.])
@pytest.mark.parametrize("seed", range(3))
def test_m2po_equals_its_algorithm(seed, limit):
    lp, old, A, mask = columns(seed)
    keep = m2po_mask(lp, old, A, mask, limit=limit)
    assert chosen(keep) == naive_m2po(lp, old, A, mask, limit)
    x = (lp - old)[keep & ((lp - old)*A > 0)]
    assert not len(x) or x.square().mean() <= limit


def test_m2po_by_hand():
    """Candidates 1, 3, 4, 5 with squares .01, .04, .25, .81: running means .01, .025, .1, .2775. The second token
    moved against its advantage."""
    x, A, on = torch.tensor([[.1, -3., .2, .5, .9, 7.]],
                            dtype=torch.float64), torch.ones(1, 6), torch.tensor([[True]*5 + [False]])
    for limit, kept in ((.005, [1]), (.011, [0, 1]), (.04, [0, 1, 2]), (.101, [0, 1, 2, 3]), (.278, [0, 1, 2, 3, 4])):
        assert m2po_mask(x, 0*x, A, on, limit=limit)[0].nonzero().flatten().tolist() == kept
    assert m2po_mask(x, 0*x, 0*A, on).equal(on) # without an advantage nothing is clipped


def test_m2po_without_signs_is_areals_rule():
    "There all tokens are sorted downwards and the first suffix is kept whose mean is below the threshold."
    lp, old, _, mask = columns()
    for limit in (.01, .05, .08):
        at = sorted(chosen(mask), key=lambda i: -abs(float(lp[i] - old[i])))
        squares = [float(lp[i] - old[i])**2 for i in at]
        first = next(k for k in range(len(at)) if math.fsum(squares[k:])/(len(at) - k) < limit)
        assert chosen(m2po_mask(lp, old, lp - old, mask, limit=limit)) == set(at[first:])


def test_m2po_equal_log_ratios_are_kept_up_to_the_limit():
    "Ten equal candidates: all or none, for their mean is the same however many there are."
    x, on = torch.full((2, 5), .25), torch.ones(2, 5, dtype=torch.bool)
    assert m2po_mask(x, 0*x, x, on, limit=.0625).all() and not m2po_mask(x, 0*x, x, on, limit=.0624).any()


def test_m2po_in_the_loss():
    "PPO with its clip wide open: the kept tokens are −ρÂ, and all tokens are counted (the paper's footnote 2)."
    lp, old, A, mask = columns()
    keep = m2po_mask(lp, old, A, mask)
    got, _ = ppo_loss(lp, old, torch.where(keep, A, 0.), mask, clip_low=1., clip_high=math.inf)
    assert 0 < (mask & ~keep).sum() and keep.any()
    assert_close(got, -((lp - old).exp()*A)[keep].sum()/mask.sum())


def test_selections_are_those_of_the_batch_not_of_its_parts():
    lp, old, A, mask = columns()
    parts = torch.cat([m2po_mask(*x) for x in zip(*(c.split(4) for c in (lp, old, A, mask)), strict=True)])
    assert not parts.equal(m2po_mask(lp, old, A, mask))


def test_m2po_laws_and_errors():
    lp, old, A, mask = columns()
    check_estimator(m2po_mask)
    assert m2po_mask(*(x.bfloat16() if x.is_floating_point() else x for x in (lp, lp, A, mask))).equal(mask)
    assert m2po_mask(lp.masked_fill(~mask, math.nan), old, A.masked_fill(~mask, math.nan),
                     mask).equal(m2po_mask(lp, old, A, mask))
    for limit in (-.1, math.nan):
        with pytest.raises(ValueError, match=f"m2po_mask: limit is {limit}"): m2po_mask(lp, old, A, mask, limit=limit)
    with pytest.raises(ValueError, match="m2po_mask: .*nothing is broadcast|at_tokens"):
        m2po_mask(lp, old, A[:, 0], mask)


# -- positive and negative samples

def test_w_reinforce_is_its_sum():
    "L = λ·L_PSR + L_NSR, value and gradient, and by hand from the rewards ±1."
    lp, _, _, mask = columns()
    reward = torch.where(torch.arange(16) % 3 == 0, 1., -1.).double()
    A, lp = at_tokens(reward, mask), lp.clone().requires_grad_()
    def loss(**kw): return reinforce_loss(lp, sign_weights(A, mask, **kw)*A, mask)[0]
    both, psr, nsr = loss(), loss(positive=1., negative=0.), loss(positive=0., negative=1.)
    slopes = [torch.autograd.grad(x, lp, retain_graph=True)[0] for x in (both, psr, nsr)]
    assert_close(both, .1*psr + nsr)
    assert_close(slopes[0], .1*slopes[1] + slopes[2])
    want = torch.where(mask, -torch.where(reward > 0, .1, -1.).double()[:, None].expand(16, 16)/mask.sum(), 0.)
    assert_close(slopes[0], want)


def test_sign_weights_by_hand():
    A = torch.tensor([[2., -.5, 0., math.nan, 3.]])
    on = torch.tensor([[True, True, True, True, False]])
    assert_close(sign_weights(A, on), torch.tensor([[.1, 1., 0., 0., 0.]]))
    assert_close(sign_weights(A, on, positive=2., negative=3.), torch.tensor([[2., 3., 0., 0., 0.]]))
    assert (sign_weights(A, on)*A)[0, 3].isnan() # a NaN that counts stays visible
    # equal weights: the advantages as they are
    assert_close(sign_weights(A, on, positive=1.), (A.nan_to_num(0.) != 0).float()*on)
    assert not sign_weights(A.requires_grad_(), on).requires_grad
    assert sign_weights(A.bfloat16(), on).dtype == torch.float32
    check_estimator(sign_weights)
    with pytest.raises(ValueError, match="sign_weights: .*nothing is broadcast"): sign_weights(A, on[:, 1:])


def test_they_travel_as_columns():
    lp, old, A, mask = columns()
    lengths = torch.full((16,), 16)
    b = Batch(tokens=torch.zeros(16, 16).long(), lengths=lengths, mask=mask, new=lp, old_logprobs=old, advantages=A)
    b["advantages"] = torch.where(m2po_mask(b.new, b.old_logprobs, b.advantages, b.mask), b.advantages, 0.)
    def loss(b): return ppo_loss(b.new, b.old_logprobs, b.advantages, b.mask, denom=b)[0]
    assert_close(sum(loss(part) for part in b.parts(3)), loss(b))
