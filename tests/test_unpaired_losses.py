"""KTO with its reference point, BCO, APO and AOT of single answers: hand numbers, oracles, laws, pairings,
compilation, derivatives, errors (LAWS 1, 25)."""
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from rlblocks.data.batch import Batch, pairs
from rlblocks.arithmetic.logprobs import sequence_logprobs
from rlblocks.losses.preference import apo_zero_loss, bco_pair_loss, dpo_loss
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns
from rlblocks.losses.unpaired import (
    aot_units, bco_delta, bco_loss, kto_kl, kto_loss, mismatched, swap_completions, udm_weights,
)

COLS = sample_columns(seed=0)
LP, REF, GOOD = COLS["chosen"], COLS["ref_chosen"], COLS["desirable"]
JUDGED = dict(logprobs=LP, ref_logprobs=REF, desirable=GOOD)
WEIGHTS = sample_columns(seed=3)["scores"].clone().index_fill(0, torch.tensor([3, 8]), 0.)


def sig(x): return 1/(1 + math.exp(-x))


LOSSES = { # name → (loss, formula of a log-ratio and its verdict)
    "kto": (partial(kto_loss, kl=.7, beta=.3), lambda x, d: 1 - sig(.3*(x-.7)) if d else 1 - sig(.3*(.7-x))),
    "kto unequal": (partial(kto_loss, kl=torch.tensor(.7), desirable_weight=1.2, undesirable_weight=.9),
                    lambda x, d: 1.2*(1 - sig(.1*(x-.7))) if d else .9*(1 - sig(.1*(.7-x)))),
    "apo": (partial(kto_loss, kl=0.), lambda x, d: 1 - sig(.1*x) if d else sig(.1*x)),
    "bco": (partial(bco_loss, delta=.2, beta=.3), lambda x, d: -math.log(sig(.3*(x-.2)) if d else sig(.3*(.2-x)))),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


# -- oracle


@every_loss
def test_as_a_closure_over_rows(name): # a filler is a row without weight
    def closure(out, b):
        lp, ref = (sequence_logprobs(x, b.mask) for x in (out.logprobs, b.ref_logprobs))
        return LOSSES[name][0](lp, ref, b.desirable, weights=b.mask.any(1).float(), denom=b)
    assert {"split", "mask", "empty", "padding", "empty_rows"} <= set(check_loss(closure))


@every_loss
def test_equals_oracle(name):
    f, formula = LOSSES[name]
    rows = [(x, d, w) for x, d, w in zip((LP-REF).tolist(), GOOD.tolist(), WEIGHTS.tolist(), strict=True)]
    assert_close(f(LP, REF, GOOD)[0].item(), sum(formula(x, d) for x, d, _ in rows)/16, rtol=1e-7, atol=0)
    assert_close(f(LP, REF, GOOD, weights=WEIGHTS)[0].item(), sum(w*formula(x, d) for x, d, w in rows)/14, rtol=1e-7,
                 atol=0)
    assert_close(f(LP, REF, GOOD, denom=7.)[0].item(), sum(formula(x, d) for x, d, _ in rows)/7, rtol=1e-7, atol=0)


def test_kto_golden():
    x = torch.full((2,), 1+math.log(3)).requires_grad_()
    loss, metrics = kto_loss(x, torch.zeros(2), torch.tensor([True, False]), kl=1., beta=1.)
    assert_close(loss, torch.tensor(.5))
    assert_close(torch.autograd.grad(loss, x)[0], torch.tensor([-3/32, 3/32]))
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(dict(accuracy=.5, chosen_reward=1+math.log(3),
                                                                           rejected_reward=1+math.log(3), kl=1.))


def test_metrics_by_hand():
    x, ok = torch.tensor([3., 0., 2., -1., 9.]), torch.tensor([True, True, False, False, True])
    _, metrics = kto_loss(x, torch.zeros(5), ok, weights=torch.tensor([1., 2., 1., 1., 0.]), kl=1., beta=.5)
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(dict(accuracy=.5, chosen_reward=.75,
                                                                           rejected_reward=.25, kl=1.))
    _, metrics = bco_loss(x, torch.zeros(5), ok, delta=-1.5, beta=.5)
    assert float(metrics["accuracy"]) == .6 and float(metrics["delta"]) == -1.5


def test_reflection_at_the_reference_point_exchanges_the_classes():
    for z in (0., 1.3):
        assert_close(kto_loss(LP, REF, GOOD, kl=z)[0], kto_loss(2*z+2*REF-LP, REF, ~GOOD, kl=z)[0])
        assert_close(bco_loss(LP, REF, GOOD, delta=z)[0], bco_loss(2*z+2*REF-LP, REF, ~GOOD, delta=z)[0])


def test_relatives():
    four = [COLS[k] for k in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
    rows = torch.cat(four[:2]), torch.cat(four[2:]), torch.arange(32) < 16
    assert_close(kto_loss(*rows, kl=0., denom=16.)[0], apo_zero_loss(*four)[0])
    assert_close(bco_loss(*rows, delta=0., denom=16.)[0], bco_pair_loss(*four)[0]) # one default β for both


def test_the_reference_point_carries_no_gradient():
    z = torch.tensor(.5, dtype=torch.float64, requires_grad=True)
    for f in (partial(kto_loss, kl=z), partial(bco_loss, delta=z)):
        x = LP.clone().requires_grad_()
        f(x, REF, GOOD)[0].backward()
        assert z.grad is None and x.grad.any()


def test_undetached_vanilla_kto_is_a_pair_loss(): # OpenRLHF-M's, with one answer of each class above the reference
    x = torch.tensor([5., 3.], requires_grad=True)
    vanilla = ((1-torch.sigmoid(x[0]-x[1].clamp(min=0))) + (1-torch.sigmoid(x[0].clamp(min=0)-x[1])))/2
    up, down = torch.autograd.grad(vanilla, x)[0]
    assert_close(vanilla, torch.sigmoid(x[1]-x[0]))
    assert_close(up, -down)


# -- the pairing

@pytest.mark.parametrize("ids", [[0, 1], [7, 3, 7, 5, 3], [1, 1, 2, 2], [4, 4, 4, 1], [1, 2, 1, 1, 1, 3], [9, 8, 7, 6]])
def test_an_answer_never_meets_its_own_prompt(ids):
    most = max(map(ids.count, ids))
    for p in list(itertools.permutations(range(len(ids))))[::7]:
        group = torch.tensor(ids)[list(p)]
        other = mismatched(group)
        assert (group[other] != group).all()
        if 2*most <= len(ids): assert other.sort().values.tolist() == list(range(len(ids)))


def test_too_few_prompts():
    with pytest.raises(ValueError, match=r"mismatched: group is \[1\]; two rows of different prompts"):
        mismatched(torch.tensor([3]))
    other = mismatched(torch.tensor([3, 3, 3]))
    with pytest.raises(IndexError): torch.arange(3)[other]


def test_swapped_rows():
    B, T = 16, 16
    tokens, mask, lengths = COLS["tokens"], COLS["mask"], COLS["lengths"]
    tokens = torch.where(torch.arange(T) < lengths[:, None], tokens, 0)
    other = mismatched(torch.arange(B))
    new, on, n = swap_completions(tokens, mask, lengths, other=other)
    start = [next((t for t in range(T) if row[t]), int(length))
             for row, length in zip(mask.tolist(), lengths, strict=True)]
    for b in range(B):
        j = int(other[b])
        want = tokens[b, :start[b]].tolist() + tokens[j, start[j]:lengths[j]].tolist()
        chosen = [False]*start[b] + mask[j, start[j]:lengths[j]].tolist()
        assert new[b].tolist() == want + [0]*(2*T-len(want)) and on[b].tolist() == chosen + [False]*(2*T-len(want))
        assert n[b] == len(want)
    assert (on.sum(1) == mask[other].sum(1)).all()


def test_swapping_twice_in_a_pair_is_the_identity():
    tokens, mask, lengths = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]), torch.tensor(
        [[False, False, True, False], [False, True, False, True]]), torch.tensor([3, 4])
    other = torch.tensor([1, 0])
    once = swap_completions(tokens, mask, lengths, other=other)
    assert once[0][:, :5].tolist() == [[1, 2, 5, 6, 7], [4, 3, 0, 0, 0]]
    twice = swap_completions(*once, other=other)
    assert twice[0][:, :4].equal(tokens) and twice[1][:, :4].equal(mask) and twice[2].equal(lengths)


def test_kto_kl():
    assert kto_kl(torch.tensor([3., -1., math.nan]), torch.zeros(3), weights=torch.tensor([1., .5, 0.])) == 1
    assert kto_kl(torch.tensor([-3., -1.]), torch.zeros(2)) == 0
    assert not kto_kl(LP.clone().requires_grad_(), REF).requires_grad
    check_estimator(kto_kl, dict(logprobs=LP, ref_logprobs=REF))


# -- BCO's blocks

def test_delta_is_the_middle_of_both_classes():
    x = (LP-REF).tolist()
    ends = [sum(v for v, d in zip(x, GOOD.tolist(), strict=True) if d is side)/sum(d is side for d in GOOD.tolist())
            for side in (True, False)]
    assert_close(bco_delta(None, LP, REF, GOOD).item(), sum(ends)/2)
    assert_close(bco_delta(5., LP, REF, GOOD, decay=.8).item(), 4 + .2*sum(ends)/2)
    for side in (GOOD, ~GOOD): # a batch that lacks a class
        assert bco_delta(torch.tensor(5.), LP, REF, GOOD, weights=side.float()) == 5
        # nothing seen before: no middle, the reference's own reward
        assert bco_delta(None, LP, REF, GOOD, weights=side.float()) == 0
    assert not bco_delta(torch.tensor(1., requires_grad=True), LP.clone().requires_grad_(), REF, GOOD).requires_grad


def test_delta_is_in_nats():
    "β is given once, to the loss: the published form σ(βx − δ′) has δ′ = βδ."
    delta = bco_delta(None, LP, REF, GOOD)
    for beta in (.1, .7):
        x = beta*(LP - REF)
        published = -F.logsigmoid(torch.where(GOOD, x - beta*delta, beta*delta - x)).mean()
        assert_close(bco_loss(LP, REF, GOOD, delta=delta, beta=beta)[0], published)


def test_delta_in_the_middle_is_nearest_to_dpo():
    x, ok = torch.tensor([3., -1.], dtype=torch.float64), torch.tensor([True, False])
    deltas = torch.linspace(-1, 3, 41).double()
    gap = (torch.stack([bco_loss(x, 0*x, ok, delta=d, beta=1., denom=1.)[0] for d in deltas])
           - dpo_loss(x[:1], x[1:], *torch.zeros(2, 1), beta=1.)[0])
    assert (gap > 0).all() and gap.argmin() == 20 and bco_delta(None, x, 0*x, ok) == 1


def test_udm_weights():
    p, ok = torch.tensor([.75, .75, .25, .0, 1.]), torch.tensor([True, False, False, False, False])
    assert_close(udm_weights(p, ok), torch.tensor([1., 3., .5, .5, 10.]))
    assert_close(udm_weights(p, ok, low=0., high=2.), torch.tensor([1., 2., 1/3, 0., 2.]))
    check_estimator(udm_weights, dict(prob_desirable=COLS["scores"].sigmoid()))


# -- AOT

def test_aot_is_the_published_one():
    good = torch.arange(16) % 2 == 0
    for cut in (1, 3):
        x = LP.clone().requires_grad_()
        b = Batch(mask=torch.tensor([[False, True]]*16), lengths=torch.tensor([2]*16), unit=aot_units(x, REF, good),
                  chosen=good, lp=x, ref=REF)
        def loss(b):
            (c, r), (rc, rr) = pairs(b.lp, b), pairs(b.ref, b)
            return dpo_loss(c, r, rc, rr, beta=.3, denom=b)[0]
        published = -F.logsigmoid(.3*((x-REF)[good].sort().values - (x-REF)[~good].sort().values)).mean()
        ours = sum(loss(part) for part in b.parts(cut))
        assert_close(ours, published)
        assert_close(torch.autograd.grad(ours, x, retain_graph=True), torch.autograd.grad(published, x))


def test_aot_wants_as_many_of_each():
    units = aot_units(LP[:3], REF[:3], torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="exactly one chosen and one rejected row"):
        pairs(LP[:3], Batch(unit=units, chosen=torch.tensor([True, False, True])))


# -- nothing at all


@every_loss
@pytest.mark.parametrize("x", [-math.inf, math.inf])
def test_an_infinite_log_ratio_has_the_loss_of_its_limit(name, x):
    for good in (True, False):
        def at(x, good=good):
            lp = torch.tensor([-1., x]).requires_grad_()
            loss = LOSSES[name][0](lp, torch.zeros(2), torch.tensor([True, good]))[0]
            return loss.detach(), torch.autograd.grad(loss, lp)[0]
        (loss, grad), (limit, flat) = at(x), at(1e6*math.copysign(1, x))
        if limit < 1e3: assert_close(loss, limit)
        else: assert loss > 1e12 # BCO holds on to what is most wrong
        assert_close(grad, flat*torch.tensor([1., limit < 1e3])) # nothing is learnt through a log-prob that is none


@every_loss
def test_no_rows_is_zero_with_a_graph(name):
    for args, weights in (((LP[:0], REF[:0], GOOD[:0]), None), ((LP, REF, GOOD), torch.zeros(16))):
        x = args[0].clone().requires_grad_()
        loss = LOSSES[name][0](x, *args[1:], weights=weights)[0]
        loss.backward()
        assert loss == 0 and not x.grad.any()


# -- errors

@every_loss
def test_refusals(name):
    f = LOSSES[name][0]
    who = getattr(f, "func", f).__name__
    with pytest.raises(
            ValueError,
            match=rf"{who}: ref_logprobs is \[16\], logprobs is \[16, 3\]; one number per row is wanted, of log-probs "
            r"sequence_logprobs\(logprobs"):
        f(LP[:,None].expand(16, 3), REF, GOOD)
    with pytest.raises(ValueError, match=rf"{who}: desirable is \[15\], logprobs is \[16\]"): f(LP, REF, GOOD[1:])
    with pytest.raises(TypeError, match=r"\w+_loss: desirable is int64; a Bool is wanted"): f(LP, REF, GOOD.long())
    with pytest.raises(ValueError,
                       match=r"\w+_loss: logprobs is \[4, 4\]; one number per row is wanted, sequence_logprobs"):
        f(*(x.reshape(4, 4) for x in (LP, REF, GOOD)))


def test_optional_tensors_have_a_name():
    for f in (partial(kto_loss, kl=0.), partial(bco_loss, delta=0.), partial(bco_delta, None)):
        with pytest.raises(TypeError): f(LP, REF, GOOD, WEIGHTS)
    with pytest.raises(TypeError): kto_kl(LP, REF, WEIGHTS)


def test_a_batch_as_denom_counts_rows():
    b = Batch(mask=(torch.arange(3) > 0) & (torch.arange(16)[:, None] % 4 > 0), lengths=torch.full((16,), 3),
              unit=torch.arange(16)//2, lp=LP, ref=REF, good=GOOD)
    def loss(b, denom): return kto_loss(b.lp, b.ref, b.good, kl=.3, weights=b.mask.any(1).float(), denom=denom)[0]
    assert (b.n_rows, b.n_units) == (12, 8) and loss(b, b) == loss(b, 12.) == loss(b, None)
    assert_close(sum(loss(part, part) for part in b.parts(5)), loss(b, b))


def test_kto_wants_its_reference_point():
    with pytest.raises(TypeError, match="kl"): kto_loss(LP, REF, GOOD)
    with pytest.raises(TypeError, match="delta"): bco_loss(LP, REF, GOOD)


@pytest.mark.parametrize("liked, disliked", [(1e-3, 1.), (1e-8, 1.), (1., 1e-8), (1e-8, 1e8)])
def test_a_class_keeps_its_weight_beside_a_heavy_one(liked, disliked):
    x = torch.tensor([.3, -1.2, 2.])
    for all_ in (True, False):
        loss, _ = kto_loss(x, torch.zeros(3), torch.full((3,), all_), kl=.1, beta=1., desirable_weight=liked,
                           undesirable_weight=disliked)
        assert_close(loss.double(),
                     (liked if all_ else disliked)*torch.sigmoid((.1 - x if all_ else x - .1).double()).mean(),
                     rtol=1e-6, atol=0)


def test_a_shift_that_was_not_found_is_refused():
    with pytest.raises(TypeError, match=r"bco_loss: delta is None; find it on the batch before the step"):
        bco_loss(torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), delta=None)
