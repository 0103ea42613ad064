"""Several losses in one row, each with the count of its own tokens: hand numbers, an oracle, exact parts, rows that
fill up a rank, laws, a training step, errors."""
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch.testing import assert_close

from rlblocks import Policy
from rlblocks.data.batch import Batch
from rlblocks.losses.components import components_loss
from rlblocks.losses.distill import sft_loss
from rlblocks.arithmetic.kl import kl_k3
from rlblocks.arithmetic.masked import aggregate, masked_mean, merge
from rlblocks.losses.policy import clipped_surrogate, log_ratio, ppo_loss
from rlblocks.testing.laws import check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.engines.optimizers import adamw

COLS = sample_columns()
ACTED = COLS["mask"] & (torch.arange(16) % 3 > 0) & (torch.arange(16)[:, None] != 2) # row 2 has observations only, …
# … row 5 actions only, and some tokens are neither
OBSERVED = COLS["mask"] & ~ACTED & (torch.arange(16)[:, None] != 5)


def batch(**more):
    names = ("tokens", "lengths", "mask", "old_logprobs", "ref_logprobs", "advantages")
    return Batch(**{k: COLS[k] for k in names}, acted=ACTED, observed=OBSERVED, row=torch.arange(16), **more)


def loss(out, b):
    ratio = log_ratio(out.logprobs, b.old_logprobs, b.mask).exp()
    return components_loss(b,
        rl=(clipped_surrogate(ratio, b.advantages, b.mask), "acted", 1.),
        echo=(-out.logprobs, "observed", .1),
        kl=(kl_k3(out.logprobs, b.ref_logprobs, b.mask), "acted", .01))


def of(b, lp): return loss(SimpleNamespace(logprobs=lp[b.row]), b)


def flags(*on): return torch.tensor([on]).bool()


def test_by_hand():
    "Actions cost −1 and −3, observations 2 and 4 nats: −2 + .1·3. The 9s are about other tokens."
    b = Batch(tokens=torch.zeros(1, 5).long(), lengths=torch.tensor([5]), mask=flags(0, 1, 1, 1, 1),
              acted=flags(0, 1, 1, 0, 0), observed=flags(0, 0, 0, 1, 1))
    rl, nll = torch.tensor([[9., -1., -3., 9., 9.]],
                           requires_grad=True), torch.tensor([[9., 9., 9., 2., 4.]], requires_grad=True)
    value, metrics = components_loss(b, rl=(rl, "acted", 1.), echo=(nll, "observed", .1))
    value.backward()
    assert_close(value.item(), -1.7)
    assert_close([rl.grad, nll.grad], [torch.tensor([[0., .5, .5, 0., 0.]]), torch.tensor([[0., 0., 0., .05, .05]])])
    assert {k: float(x) for k, x in metrics.items()} == dict(rl=-2., echo=3.)


def test_equals_python():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, 16, generator=g, dtype=torch.float64)
    want = sum(w*sum(float(z[i]) for i in map(tuple, on.nonzero().tolist()))/int(on.sum())
               for z, on, w in ((x, ACTED, 2.), (y, OBSERVED, .3), (x, COLS["mask"], -1.)))
    got, _ = components_loss(batch(), a=(x, "acted", 2.), o=(y, "observed", .3), every=(x, "mask", -1.))
    assert_close(got.item(), want)


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_parts_add_up_to_the_batch(n):
    "Although one part has many observations and another none: loss, gradient and metrics."
    b, lp = batch(), COLS["logprobs"].clone().requires_grad_()
    value, metrics = of(b, lp)
    parts = [of(part, lp) for part in b.parts(n)]
    assert n < 16 or not all(bool((part.mask & part.observed).any()) for part in b.parts(n))
    total = sum(x for x, _ in parts)
    assert_close([total, *torch.autograd.grad(total, lp)], [value, *torch.autograd.grad(value, lp)])
    assert {k: float(x) for k, x in merge(*(m for _, m in parts)).items()} == pytest.approx(
        {k: float(x) for k, x in metrics.items()})


def test_one_count_for_all_would_be_another_loss():
    b, lp = batch(), COLS["logprobs"]
    ratio = log_ratio(lp, b.old_logprobs, b.mask).exp()
    token = torch.where(ACTED, clipped_surrogate(ratio, b.advantages, b.mask) + .01*kl_k3(lp, b.ref_logprobs, b.mask),
                        torch.where(OBSERVED, -.1*lp, 0.))
    assert (aggregate(token, b.mask) - of(b, lp)[0]).abs() > .01


def test_rows_that_fill_up_a_rank_add_nothing():
    "Their mask is all False and their other columns are a real row's."
    b, lp = batch()[:3], COLS["logprobs"]
    parts = list(b.parts(5))
    assert len(parts) == 5
    assert any(bool(part.observed.any() or part.acted.any()) and not part.mask.any() for part in parts)
    assert_close(sum(of(part, lp)[0] for part in parts), of(b, lp)[0])


def test_the_terms_are_the_losses_one_knows():
    b, lp = batch(), COLS["logprobs"]
    ratio = log_ratio(lp, b.old_logprobs, b.mask).exp()
    assert_close(components_loss(b, rl=(clipped_surrogate(ratio, b.advantages, b.mask), "acted", 1.))[0],
                 ppo_loss(lp, b.old_logprobs, b.advantages, ACTED)[0])
    assert_close(components_loss(b, echo=(-lp, "observed", 1.))[0], sft_loss(lp, OBSERVED)[0])
    assert_close(components_loss(b, kl=(kl_k3(lp, b.ref_logprobs, b.mask), "mask", 1.))[0],
                 masked_mean(kl_k3(lp, b.ref_logprobs, b.mask), b.mask))


def test_closure_obeys_the_laws():
    laws = check_loss(loss, dict(acted=ACTED, observed=OBSERVED), policy=False, mean=False)
    assert {"split", "mask", "empty", "empty_rows", "metrics", "gradient"} <= set(laws)
    def local(out, b): return masked_mean(-out.logprobs, b.mask & b.observed), {} # a count of the part
    with pytest.raises(AssertionError, match="split"):
        check_loss(local, dict(observed=OBSERVED), policy=False, mean=False)


def test_derivatives_and_compilation():
    b, lp = batch(), COLS["logprobs"]
    def value(lp): return of(b, lp)[0]
    x = lp.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, x, fast_mode=True) and torch.autograd.gradgradcheck(value, x, fast_mode=True)
    assert_close(torch.func.grad(value)(lp), torch.autograd.grad(value(x), x)[0])
    assert_close(torch.func.vmap(value)(torch.stack([lp, 2*lp])), torch.stack([value(lp), value(2*lp)]))
    columns = SimpleNamespace(mask=b.mask, n_acted=b.n_acted, n_tokens=b.n_tokens)
    def compiled(x, mask): return components_loss(Columns(columns, acted=ACTED), a=(x, "acted", .5))[0]
    assert_close(torch.compile(compiled, fullgraph=True, backend="eager")(lp, b.mask), .5*masked_mean(lp, ACTED))


class Columns:
    "The least that a batch must be: columns as items, `mask` and counts as attributes."
    n_tokens = n_rows = n_units = 0
    def __init__(self, like, **columns): self.mask, self.n_acted, self.columns = like.mask, like.n_acted, columns
    def __getitem__(self, name): return self.columns[name]


@pytest.mark.parametrize("micro_rows", [1, 3])
def test_a_training_step_is_the_same_however_it_is_cut(micro_rows):
    def kinds():
        b = tiny.rows(B=6, T=14)
        real = torch.arange(b.width) < b.lengths[:, None]
        b["acted"] = b.mask
        b["observed"] = real & (b.mask.cumsum(1) > 0) & ~b.mask
        b["mask"] = b.acted | b.observed
        b["old_logprobs"], b["ref_logprobs"], b["advantages"] = (torch.zeros(6, b.width, dtype=torch.float64)
                                                                 for _ in range(3))
        b["advantages"] = b.advantages + 1
        return b
    net, found = tiny.model(dtype=torch.float64), []
    for rows in (6, micro_rows):
        policy = Policy(net, device="cpu", optimizer=adamw(max_norm=None), micro_rows=rows, pack=False)
        gradients = tiny.gradients(policy)
        b = kinds()
        b["old_logprobs"] = b["ref_logprobs"] = policy.logprobs(b)
        assert b.n_observed and not (policy.logprobs(b)[b.observed] == 0).any()
        found.append((policy.step(b, loss), gradients))
    (one, g), (other, h) = found
    assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-7)
    assert float(one["echo"]) == pytest.approx(float(other["echo"]), rel=1e-7)
    assert tiny.apart(g, h) < 1e-6


def test_errors_name_the_term():
    b, x = batch(), torch.zeros(16, 16)
    with pytest.raises(TypeError, match="components_loss: no terms"): components_loss(b)
    for term in (x, (x, "acted"), (x, ACTED, 1.)):
        with pytest.raises((TypeError, ValueError),
                           match="components_loss: echo is a (Tensor|tuple); three things are wanted"):
            components_loss(b, echo=term)
    with pytest.raises(ValueError, match=r"components_loss: echo is \[16, 15\]"):
        components_loss(b, echo=(x[:, 1:], "observed", 1.))
    with pytest.raises(AttributeError, match="no n_observd"): components_loss(b, echo=(x, "observd", 1.))
    with pytest.raises(AttributeError, match="no n_advantages"): components_loss(b, echo=(x, "advantages", 1.))
