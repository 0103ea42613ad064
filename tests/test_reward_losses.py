"""How judges learn: pairs, ties, lists, heads, safety labels and steps, by hand numbers, oracles, special cases,
laws, compilation and errors."""
import math
from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.testing import assert_close

from rlblocks.data.batch import Batch, pairs
from rlblocks.arithmetic.masked import aggregate
from rlblocks.losses.reward import (
    bradley_terry_loss, centering_loss, davidson_loss, generative_scores, hps_loss, multi_head_loss, plackett_luce_loss,
    process_reward_loss, rao_kupper_loss, rating_loss, safety_loss, tie_loss,
)
from rlblocks.testing.laws import check_loss
from rlblocks.testing.oracles import sample_columns


def columns(seed=0):
    "Everything that a reward loss reads, 16 rows of it."
    cols, g = sample_columns(seed=seed), torch.Generator().manual_seed(seed)
    def noise(*shape): return torch.randn(*shape, generator=g, dtype=torch.float64)
    lists = torch.rand(16, 5, generator=g) > .3
    lists[3] = False # a unit of nothing
    return dict(
        chosen=cols["chosen"], rejected=cols["rejected"], margin=noise(16).abs(),
        tied=torch.randperm(16, generator=g) % 3 == 0,
        scores=noise(16, 5), preference=noise(16, 5).softmax(-1), ranks=torch.randint(0, 4, (16, 5), generator=g),
        lists=lists,
        first=noise(16, 5), second=noise(16, 5), prefer=torch.randint(0, 3, (16, 5), generator=g).double()/2,
        ratings=noise(16, 5),
        unsafe=torch.randperm(16, generator=g) % 2 == 0, logits=noise(16, 16, 3),
        hard=torch.randint(0, 3, (16, 16), generator=g),
        soft=noise(16, 16, 3).softmax(-1), mask=cols["mask"])


COLS = columns()
PAIR = "chosen", "rejected"
# what each loss is called with: (function, columns in order with renames, which arguments carry the gradient)
LOSSES = {
    "bradley_terry": (bradley_terry_loss, dict(chosen="chosen", rejected="rejected"), PAIR),
    "bradley_terry margin": (bradley_terry_loss, dict(chosen="chosen", rejected="rejected", margin="margin"), PAIR),
    "centering": (centering_loss, dict(chosen="chosen", rejected="rejected"), PAIR),
    "rao_kupper": (partial(rao_kupper_loss, theta=1.5), dict(chosen="chosen", rejected="rejected", tied="tied"), PAIR),
    "davidson": (partial(davidson_loss, nu=.7), dict(chosen="chosen", rejected="rejected", tied="tied"), PAIR),
    "tie": (tie_loss, dict(chosen="chosen", rejected="rejected", tied="tied"), PAIR),
    "hps": (hps_loss, dict(scores="scores", preference="preference", mask="lists"), ("scores",)),
    "plackett_luce": (plackett_luce_loss, dict(scores="scores", ranks="ranks", mask="lists"), ("scores",)),
    "multi_head": (multi_head_loss, dict(first="first", second="second", prefer="prefer", mask="lists"),
                   ("first", "second")),
    "rating": (rating_loss, dict(scores="scores", ratings="ratings", mask="lists"), ("scores",)),
    "safety": (safety_loss, dict(riskier="chosen", safer="rejected", riskier_unsafe="tied", safer_unsafe="unsafe"),
               ("riskier", "safer")),
    "process hard": (process_reward_loss, dict(logits="logits", labels="hard", mask="mask"), ("logits",)),
    "process soft": (process_reward_loss, dict(logits="logits", labels="soft", mask="mask"), ("logits",)),
    "process rows": (partial(process_reward_loss, over="rows"), dict(logits="logits", labels="soft", mask="mask"),
                     ("logits",)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def arguments(name, dtype=torch.float64, cols=COLS):
    f, names, *_ = LOSSES[name]
    return f, {k: cols[v].to(dtype) if cols[v].is_floating_point() else cols[v] for k, v in names.items()}


# -- laws of all


@every_loss
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_on_the_way_back(name):
    "Units of nothing, absent labels: autograd's own detector sees no NaN, not even one that a later where throws away."
    f, args = arguments(name)
    args = {k: x.clone().requires_grad_(k in LOSSES[name][2]) for k, x in args.items()}
    with torch.autograd.detect_anomaly(check_nan=True): f(**args)[0].backward()
    assert all(args[k].grad.isfinite().all() for k in LOSSES[name][2])


@every_loss
def test_nothing_is_broadcast(name):
    f, args = arguments(name)
    who = getattr(f, "func", f).__name__
    for k in args:
        with pytest.raises(ValueError, match=f"{who}: .*nothing is broadcast|{who}: .*at_tokens"):
            f(**args | {k: args[k][:, :-1] if args[k].ndim > 1 else args[k][:-1]})


@every_loss
def test_no_pairs_are_no_error(name):
    f, args = arguments(name)
    none = {k: x[:0].requires_grad_(x.is_floating_point()) for k, x in args.items()}
    loss, metrics = f(**none)
    loss.backward()
    assert loss == 0 and all(math.isnan(float(m)) for m in metrics.values())


# -- pairs

OF_PAIRS = ("bradley_terry", "bradley_terry margin", "centering", "rao_kupper", "davidson", "tie", "safety")


@pytest.mark.parametrize("name", OF_PAIRS)
def test_weights_of_pairs(name):
    "A weight multiplies a pair's loss; a weight of 0 takes it out, whatever stands there."
    f, args = arguments(name)
    wrt = LOSSES[name][2]
    w = COLS["margin"].clone().index_fill(0, torch.tensor([3, 8]), 0.)
    check_loss(f, args | dict(weights=w.exp()), wrt=wrt)
    kept = w != 0
    junk = {k: torch.where(kept, x, math.nan).requires_grad_(k in wrt) if x.is_floating_point() else x
            for k, x in args.items()}
    loss, metrics = f(**junk, weights=w)
    grads = torch.autograd.grad(loss, [junk[k] for k in wrt])
    each = torch.stack([f(**{k: x[i:i+1] for k, x in args.items()}, denom=1.)[0] for i in range(16)])
    counts = (kept & args["tied"] if name == "tie" else kept).sum()
    assert_close(loss.detach(), (w*each).sum()/counts)
    alone = f(**{k: x[kept] for k, x in args.items()}, weights=w[kept])[1]
    assert all(g.isfinite().all() and not g[~kept].any() for g in grads)
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx({k: float(m) for k, m in alone.items()})
    assert_close(f(**args, weights=torch.ones(16).double())[0], f(**args)[0], rtol=0, atol=0)


def test_deepspeed_chat_along_the_tokens(): # mean per pair, then over pairs
    c, r = torch.tensor([[9., 0., 1.], [9., 9., 1.]]), torch.tensor([[9., 0., -1.], [9., 9., 0.]])
    parted = torch.tensor([[False, True, True], [False, False, True]])
    want = ((math.log(2) + math.log(1+math.exp(-2)))/2 + math.log(1+math.exp(-1)))/2
    assert_close(aggregate(-torch.nn.functional.logsigmoid(c-r), parted, over="rows").item(), want)


def test_bradley_terry_by_hand():
    c, r = torch.tensor([math.log(3), 0.]).requires_grad_(), torch.tensor([0., math.log(3)]).requires_grad_()
    loss, metrics = bradley_terry_loss(c, r)
    loss.backward()
    assert_close(loss.item(), (math.log(4/3)+math.log(4))/2)
    assert_close([c.grad, r.grad], [torch.tensor([-1., -3.])/8, torch.tensor([1., 3.])/8])
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(
        dict(accuracy=.5, margin=0, chosen_score=math.log(3)/2, rejected_score=math.log(3)/2))
    assert_close(bradley_terry_loss(c, r, margin=torch.tensor([math.log(3), -math.log(3)]))[0].item(), math.log(2))


def test_the_margin_is_data():
    m = COLS["margin"].clone().requires_grad_()
    assert bradley_terry_loss(COLS["chosen"].clone().requires_grad_(), COLS["rejected"], margin=m)[0].backward() is None
    assert m.grad is None


def test_bradley_terry_does_not_overflow(): # log(1 + e^(r − c)) as typed is infinite from 89 on, C-O13
    for margin in (None, COLS["margin"]):
        got = bradley_terry_loss(COLS["chosen"], COLS["rejected"], margin=margin, denom=3.)[0]
        assert_close(got,
                     torch.log1p((COLS["rejected"] - COLS["chosen"] + (0 if margin is None else margin)).exp()).sum()/3)
    for gap in (89., 1e4, 1e30):
        c = torch.tensor([0.], requires_grad=True)
        loss = bradley_terry_loss(c, torch.tensor([gap]))[0]
        loss.backward()
        assert loss == gap and c.grad == -1


def test_optional_tensors_have_a_name(): # a third tensor could be margins or weights
    for name in OF_PAIRS:
        f, args = arguments(name)
        given = [x for k, x in args.items() if k != "margin"]
        with pytest.raises(TypeError): f(*given, COLS["margin"])


def counted(kind):
    "A batch of 6 rows in 3 units, its loss with `denom`, and what that loss counts."
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([[False, True, True]]*6)
    b = Batch(per_row=("marks", "ratings", "marked"), mask=mask, lengths=torch.full((6,), 3), unit=torch.arange(6)//2,
              chosen=torch.arange(6) % 2 == 0, score=torch.randn(6, generator=g).double(),
              tied=torch.tensor([False, False, True, True, True, True]), marks=torch.randn(6, 2, generator=g).double(),
              ratings=torch.randn(6, 2, generator=g).double(), marked=torch.tensor([[True, False]]*5 + [[True, True]]),
              z=torch.randn(6, 3, 2, generator=g).double(), labels=torch.zeros(6, 3, dtype=torch.long),
              steps=mask & (torch.arange(6) != 1)[:, None] & (torch.arange(3) > 1))
    loss = dict(
        tied=lambda b, denom: tie_loss(*pairs(b.score, b), pairs(b.tied, b)[0], denom=denom),
        marked=lambda b, denom: rating_loss(b.marks, b.ratings, b.marked, denom=denom),
        steps=lambda b, denom: process_reward_loss(b.z, b.labels, b.steps, denom=denom),
        units=lambda b, denom: bradley_terry_loss(*pairs(b.score, b), denom=denom))[kind]
    return b, lambda b, denom: loss(b, denom)[0], dict(tied=2, marked=7, steps=5, units=3)[kind]


@pytest.mark.parametrize("kind", ["tied", "marked", "steps", "units"])
def test_a_batch_as_denom_counts_what_the_loss_counts(kind):
    b, loss, n = counted(kind)
    assert getattr(b, f"n_{kind}") == n and loss(b, b) == loss(b, float(n)) == loss(b, None)
    assert_close(sum(loss(part, part) for part in b.parts(3)), loss(b, b))


@pytest.mark.parametrize("kind", ["tied", "marked", "steps"])
def test_a_batch_that_cannot_count_it_is_refused(kind):
    "Not divided by tokens, rows or pairs instead."
    b, loss, _ = counted(kind)
    with pytest.raises(TypeError, match=f"which has no n_{kind}"): loss(b, b.drop(kind))


def test_solutions_with_a_judged_step_are_given_as_a_number():
    b, _, _ = counted("steps")
    def loss(b, denom): return process_reward_loss(b.z, b.labels, b.steps, over="rows", denom=denom)[0]
    assert_close(sum(loss(part, 5.) for part in b.parts(3)), loss(b, None))
    with pytest.raises(TypeError, match="process_reward_loss: over='rows' divides by solutions with a judged step"):
        loss(b, b)


def test_centering_by_hand():
    c = torch.tensor([1., 2.]).requires_grad_()
    loss, metrics = centering_loss(c, torch.tensor([-3., 1.]))
    loss.backward()
    assert loss == 6.5 and torch.equal(c.grad, torch.tensor([-2., 3.])) and float(metrics["center"]) == .25


@pytest.mark.parametrize("gap", [-40., -3., 0., .7, 40.])
@pytest.mark.parametrize("f", [partial(rao_kupper_loss, theta=3.), partial(davidson_loss, nu=.4)],
                         ids=["rao_kupper", "davidson"])
def test_win_tie_and_loss_have_probability_1(f, gap):
    c, r, no = torch.tensor([gap]).double(), torch.zeros(1).double(), torch.tensor([False])
    win, lose, tie = (f(*x)[0].neg().exp() for x in ((c, r, no), (r, c, no), (c, r, ~no)))
    assert_close(win + lose + tie, torch.tensor(1.).double())
    assert_close(f(c, r, ~no)[0], f(r, c, ~no)[0]) # a tie has no order


def test_shares_of_ties_among_equals():
    z, yes = torch.zeros(1), torch.tensor([True])
    for x in (1.5, 2., 5.):
        assert_close(rao_kupper_loss(z, z, yes, theta=x)[0].neg().exp().item(), (x-1)/(x+1))
        assert_close(davidson_loss(z, z, yes, nu=x)[0].neg().exp().item(), x/(2+x))


def test_decided_pairs_are_bradley_terry():
    c, r, no = COLS["chosen"], COLS["rejected"], torch.zeros(16, dtype=torch.bool)
    assert_close(rao_kupper_loss(c, r, no, theta=2.)[0],
                 bradley_terry_loss(c, r, margin=torch.full_like(c, math.log(2)))[0], rtol=0, atol=0)
    assert_close(davidson_loss(c, r, no, nu=1e-13)[0], bradley_terry_loss(c, r)[0])


def test_ties_are_neither_right_nor_wrong():
    c, r, tied = torch.tensor([1., 0., 5.]), torch.tensor([0., 2., 0.]), torch.tensor([False, False, True])
    for f in (partial(rao_kupper_loss, theta=2.), partial(davidson_loss, nu=1.)):
        metrics = f(c, r, tied)[1]
        assert float(metrics["accuracy"]) == .5 and float(metrics["margin"]) == -.5
        assert float(metrics["chosen_score"]) == 2


def test_tie_loss_counts_ties():
    c, r, tied = torch.tensor([1., 5.,
                               2.]).requires_grad_(), torch.tensor([3., 0., 1.]), torch.tensor([True, False, True])
    loss, _ = tie_loss(c, r, tied)
    loss.backward()
    assert loss == 1.5 and torch.equal(c.grad, torch.tensor([-.5, 0., .5]))
    assert tie_loss(c, r, tied, denom=6.)[0] == .5 and tie_loss(c, r, tied & ~tied)[0] == 0


def test_hyper_parameters_out_of_range():
    args = COLS["chosen"], COLS["rejected"], COLS["tied"]
    with pytest.raises(ValueError, match=r"rao_kupper_loss: theta is 1.0; it is above 1"):
        rao_kupper_loss(*args, theta=1.)
    with pytest.raises(ValueError, match=r"davidson_loss: nu is -1; it is above 0"): davidson_loss(*args, nu=-1)
    with pytest.raises(TypeError): rao_kupper_loss(*args) # no default: it belongs to the judges


# -- lists

def naive_lists(s, mask, ranks=None, preference=None):
    loss, units = 0., 0
    for b in range(len(s)):
        there = [k for k in range(s.shape[1]) if mask[b, k]]
        units += bool(there)
        for k in there:
            rest = [j for j in there if preference is not None or ranks[b, j] >= ranks[b, k]]
            weight = 1. if preference is None else float(preference[b, k])
            loss += weight*(math.log(math.fsum(math.exp(s[b, j]) for j in rest)) - float(s[b, k]))
    return loss/units


@pytest.mark.parametrize("seed", range(3))
def test_lists_equal_oracles(seed):
    c = columns(seed)
    assert_close(plackett_luce_loss(c["scores"], c["ranks"], c["lists"])[0].item(),
                 naive_lists(c["scores"], c["lists"], ranks=c["ranks"]))
    assert_close(hps_loss(c["scores"], c["preference"], c["lists"])[0].item(),
                 naive_lists(c["scores"], c["lists"], preference=c["preference"]))


def test_two_candidates_are_bradley_terry():
    c, r = COLS["chosen"], COLS["rejected"]
    for order in ([0, 1], [1, 0]): # which of the columns is the better one
        s, there = torch.stack([c, r], 1)[:, order], torch.ones(16, 2, dtype=torch.bool)
        ranks = torch.tensor(order).expand(16, 2)
        want = bradley_terry_loss(c, r)
        assert_close([hps_loss(s, (ranks == 0).double(), there)[0], plackett_luce_loss(s, ranks, there)[0]],
                     [want[0]]*2)
        for metric in (hps_loss(s, (ranks == 0).double(), there)[1]["agreement"],
                       plackett_luce_loss(s, ranks, there)[1]["accuracy"]):
            assert float(metric) == float(want[1]["accuracy"])


def test_the_best_alone_is_a_choice():
    """With all others tied behind the best, Plackett–Luce begins with the HPS loss; the ties add what does not
    depend on the best."""
    s, there = COLS["scores"], torch.ones(16, 5, dtype=torch.bool)
    best = one_hot(torch.arange(16) % 5, 5)
    rest = torch.where(best == 1, -math.inf, s)
    want = hps_loss(s, best.double(), there)[0] + (4*rest.logsumexp(1) - (s*(1-best)).sum(1)).mean()
    assert_close(plackett_luce_loss(s, 1-best, there)[0], want)


# -- heads

def test_heads_by_hand():
    prefer = torch.tensor([[1., math.nan], [.5, 0.], [math.nan, math.nan]])
    gap = torch.tensor([[math.log(3), math.inf], [0., math.log(3)], [math.nan, 0.]]).requires_grad_()
    loss, metrics = multi_head_loss(gap, torch.zeros(3, 2), prefer, prefer.isfinite())
    loss.backward()
    assert_close(loss.item(), (math.log(4/3)+math.log(2)+math.log(4))/2)
    assert_close(gap.grad, torch.tensor([[-.125, 0.], [0., .375], [0., 0.]]))
    assert float(metrics["accuracy"]) == .5 and metrics["accuracy"].count == 2
    weighted = multi_head_loss(gap, torch.zeros(3, 2), prefer, prefer.isfinite(), weights=torch.tensor([0., 2.]))[0]
    assert_close(weighted.item(), math.log(4))


def test_a_weight_can_make_heads_equal():
    "Pairs over labels of the head: the sum over heads of the mean over its labels, LightRFT's on the whole."
    a, b, prefer, said = (COLS[k] for k in ("first", "second", "prefer", "lists"))
    got = multi_head_loss(a, b, prefer, said, weights=said.any(1).sum()/said.sum(0))[0]
    want = sum(binary_cross_entropy_with_logits((a-b)[:, h][said[:, h]], prefer[:, h][said[:, h]]) for h in range(5))
    assert_close(got, want)


def test_one_head_is_bradley_terry():
    c, r, one = COLS["chosen"][:, None], COLS["rejected"][:, None], torch.ones(16, 1, dtype=torch.float64)
    assert_close(multi_head_loss(c, r, one, one > 0)[0], bradley_terry_loss(c[:, 0], r[:, 0])[0])
    assert_close(multi_head_loss(r, c, 0*one, one > 0)[0], bradley_terry_loss(c[:, 0], r[:, 0])[0])


def test_ratings_by_hand():
    marks = torch.tensor([[0., math.nan], [3., 1.]])
    loss, metrics = rating_loss(torch.tensor([[1., math.inf], [3., 4.]]), marks, marks.isfinite())
    assert_close([loss.item(), float(metrics["rating_error"])], [10/3]*2)


def test_safety_is_bradley_terry_and_two_regressions():
    c, r, w, s = COLS["chosen"], COLS["rejected"], COLS["tied"], COLS["unsafe"]
    loss, metrics = safety_loss(c, r, riskier_unsafe=w, safer_unsafe=s)
    want = bradley_terry_loss(c, r)[0] + binary_cross_entropy_with_logits(
        c, w.double()) + binary_cross_entropy_with_logits(r, s.double())
    assert_close(loss, want)
    assert float(metrics["sign_accuracy"]) == pytest.approx(((c > 0) == w).double().mean()/2
                                                            + ((r > 0) == s).double().mean()/2)
    assert float(metrics["accuracy"]) == float(bradley_terry_loss(c, r)[1]["accuracy"])
    assert not torch.allclose(safety_loss(c+1, r+1, riskier_unsafe=w, safer_unsafe=s)[0], loss) # the zero has a meaning


# -- steps

def test_soft_labels_are_not_cut(): # C-M2
    z, on = torch.tensor([[[0., math.log(3)]]]).requires_grad_(), torch.tensor([[True]])
    loss, _ = process_reward_loss(z, torch.tensor([[[.7, .3]]]), on)
    loss.backward()
    assert_close(loss.item(), .7*math.log(4)+.3*math.log(4/3))
    assert_close(z.grad, torch.tensor([[[-.45, .45]]]))


def test_hard_labels_are_sure_soft_ones():
    z, y, mask = COLS["logits"], COLS["hard"], COLS["mask"]
    for over in ("tokens", "rows"):
        hard, soft = (process_reward_loss(z, labels, mask, over=over) for labels in (y, one_hot(y, 3).double()))
        assert_close(hard[0], soft[0])
        assert {k: float(m) for k, m in hard[1].items()} == pytest.approx({k: float(m) for k, m in soft[1].items()})
    assert_close(process_reward_loss(z, y, mask)[0], cross_entropy(z[mask], y[mask]))
    assert float(process_reward_loss(z, y, mask)[1]["step_accuracy"]) == pytest.approx(
        (z.argmax(-1) == y)[mask].double().mean())


def test_a_label_of_minus_100_is_silent_under_the_mask_and_loud_above_it():
    z, y, mask = COLS["logits"], COLS["hard"], COLS["mask"]
    assert process_reward_loss(z, y.masked_fill(~mask, -100), mask)[0] == process_reward_loss(z, y, mask)[0]
    with pytest.raises((RuntimeError, IndexError)): process_reward_loss(z, torch.full_like(y, -100), mask)


def test_a_share_is_no_distribution():
    with pytest.raises(ValueError, match=r"process_reward_loss: labels is \[16, 16\], logits is \[16, 16, 3\]"):
        process_reward_loss(COLS["logits"], COLS["soft"][..., 0], COLS["mask"])


# -- the generative judge

def test_generative_scores_by_hand():
    z = torch.tensor([[3., 1., 4., 2.], [1., 1., 0., 2.]]).log()
    assert_close(generative_scores(z, yes=0, no=1), torch.tensor([3/4, 1/2]))
    assert_close(generative_scores(z, yes=(0, 3), no=(1,)), torch.tensor([5/6, 3/4]))
    assert_close(generative_scores(z+7, yes=2, no=1), torch.tensor([4/5, 0.])) # no constant matters, and −∞ is no
    assert generative_scores(torch.tensor([500., -500.]), yes=0, no=1) == 1
