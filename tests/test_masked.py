"""Laws of the masked arithmetic: one number for every cut, nothing from under the mask, errors that say what to do."""
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rlblocks.data.batch import Batch
from rlblocks.losses.distill import sft_loss
from rlblocks.losses.policy import ppo_loss
from rlblocks.arithmetic.masked import (Counts, Last, Max, Mean, aggregate, divisor, masked_mean, masked_std,
                                        masked_sum, mean_of, merge, promoted, same_shape, whiten)
from rlblocks.testing.oracles import naive_aggregate, sample_columns
from rlblocks.losses.reward import bradley_terry_loss

REDUCTIONS = {
    "sum": masked_sum, "mean": masked_mean, "std": masked_std, "whiten": whiten, "tokens": aggregate,
    "row sums": lambda x, m: masked_sum(x, m, dim=-1), "row means": lambda x, m: masked_mean(x, m, dim=-1),
    "of a whole": lambda x, m: masked_mean(x, m, denom=7), "biased std": lambda x, m: masked_std(x, m, unbiased=False),
    "unshifted": lambda x, m: whiten(x, m, shift=False), "rows": lambda x, m: aggregate(x, m, over="rows"),
}
each = pytest.mark.parametrize("f", REDUCTIONS.values(), ids=REDUCTIONS)


def ragged(B=6, T=9, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, generator=g, dtype=dtype), torch.rand(B, T, generator=g) < torch.linspace(0, 1, B)[:, None]


def value_and_gradient(f, x, mask):
    x = x.clone().requires_grad_()
    y = f(x, mask)
    return y.detach(), torch.autograd.grad((y*torch.arange(1, y.numel()+1).view(y.shape)).sum(), x)[0]


@pytest.mark.parametrize("dim", [None, -1, 0])
def test_no_mask_is_a_mask_of_true(dim):
    x = ragged()[0].half().requires_grad_()
    every = torch.ones_like(x, dtype=torch.bool)
    for f in (masked_sum, masked_mean):
        along = partial(f, dim=dim)
        assert_close(value_and_gradient(along, x, None), value_and_gradient(along, x, every))
    assert_close(masked_mean(x, None, denom=7), masked_mean(x, every, denom=7))
    assert_close([float(y) for y in vars(mean_of(x, None)).values()],
                 [float(y) for y in vars(mean_of(x, every)).values()])
    assert masked_mean(x[:0], None) == 0 and mean_of(x, None).total.dtype == torch.float32


# LAWS 1: one loss, whatever the micro-batch

def test_golden_is_a_quarter_not_a_half():
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    x = torch.tensor([[1.], [0.]]).expand(2, 6)
    assert aggregate(x, mask) == .25
    assert sum(aggregate(x[i:i+1], mask[i:i+1], denom=mask.sum()) for i in (0, 1)) == .25
    assert aggregate(x, mask, over="rows") == .5


@pytest.mark.parametrize("over", ["tokens", "rows"])
@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_pieces_sum_to_the_whole(over, size):
    x = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(16) < torch.arange(1, 17)[:, None]
    denom = 16. if over == "rows" else mask.sum()
    whole, parts = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = aggregate(whole.sin(), mask, over=over)
    joined = sum(aggregate(p.sin(), m, over=over, denom=denom)
                 for p,m in zip(parts.split(size), mask.split(size), strict=True))
    loss.backward(), joined.backward()
    assert_close(joined, loss, atol=1e-10, rtol=1e-10)
    assert_close(parts.grad, whole.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("over", ["tokens", "rows", "groups"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_parts_of_a_batch_sum_to_its_loss(over, size):
    "denom=b: a part counts what its batch has, its prompts' tokens included, wherever their other answers are."
    cols = sample_columns()
    batch, x = Batch(**{k: cols[k] for k in ("mask", "group")}, row=torch.arange(16)), cols["advantages"]
    uncut, parts = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = aggregate(uncut.sin(), batch.mask, over=over, denom=batch)
    joined = sum(aggregate(parts[p.row].sin()[:, :p.mask.shape[1]], p.mask, over=over, denom=p)
                 for p in batch.parts(size))
    loss.backward(), joined.backward()
    assert_close(joined, loss, atol=1e-12, rtol=1e-12)
    assert_close(parts.grad, uncut.grad, atol=1e-12, rtol=1e-12)
    assert_close(loss.detach(), naive_aggregate(x.sin(), batch.mask, over=over, group=batch.group), atol=1e-12,
                 rtol=1e-12)
    if over != "groups": assert_close(loss, aggregate(uncut.sin(), batch.mask, over=over))


def test_prompts_weigh_the_same():
    "Lengths 2, 6 and 8, two answers to one prompt and one to another."
    mask = torch.arange(9)[None].expand(3, 9) % 9 < torch.tensor([[3], [7], [9]])
    mask = mask & (torch.arange(9) > 0)
    b = Batch(mask=mask, group=torch.tensor([7, 7, 3]))
    for row, wanted in ((0, 2/8/2), (1, 6/8/2), (2, 1/2)):
        x = (torch.arange(3) == row).double()[:, None].expand(3, 9)
        assert aggregate(x, mask, over="groups", denom=b) == wanted


def test_groups_need_a_batch_and_its_part():
    x, mask = ragged()
    b = Batch(mask=mask & (torch.arange(9) > 0), group=torch.arange(6) // 2)
    for denom, says in ((None, "None"), (7, "a int"), (torch.tensor(7), "a Tensor")):
        with pytest.raises(
                ValueError,
                match=f"over='groups' divides by .* which {says} does not know; give the batch, denom=b, with a column "
                "'group'"):
            aggregate(x, mask, over="groups", denom=denom)
    with pytest.raises(ValueError, match="a Batch does not know; give the batch, denom=b, with a column 'group'"):
        aggregate(x, b.mask, over="groups", denom=b.drop("group"))
    with pytest.raises(ValueError,
                       match="x has 2 rows, denom has 6; over='groups' takes the part that x was computed on"):
        aggregate(x[:2], b.mask[:2], over="groups", denom=b)


def test_divisor_picks_the_count():
    b = Batch(mask=torch.tensor([[False, True, True], [False, False, True]]), unit=torch.tensor([4, 4]),
              tied=torch.tensor([True, True]))
    assert [divisor(b, name, None) for name in ("n_tokens", "n_rows", "n_units", "n_tied")] == [3, 2, 1, 1]
    assert isinstance(b, Counts)
    assert divisor(None, "n_rows", 5) == 5 and divisor(7., "n_rows", 5) == 7
    assert divisor(torch.tensor(0), "n_rows", 5) == 1 == divisor(None, "n_rows", 0)
    with pytest.raises(TypeError, match=r"denom is a list, which has no n_rows; give the batch \(denom=b\)"):
        divisor([3], "n_rows", 5)
    x, mask = ragged()
    with pytest.raises(ValueError,
                       match=r"x is \[6\], and of a Batch only values of tokens, .* denom=b.n_rows or denom=b.n_units"):
        masked_mean(x[:, 0], mask[:, 0], denom=b)


@each
def test_padding_columns_change_nothing(f):
    x, mask = ragged()
    wide = f(torch.nn.functional.pad(x, (0, 3), value=9.), torch.nn.functional.pad(mask, (0, 3)))
    assert_close(wide[..., :x.shape[1]] if wide.ndim == 2 else wide, f(x, mask), atol=1e-14, rtol=1e-14)


# LAWS 5: nothing from under the mask

@each
@pytest.mark.parametrize("junk", [0., 100., float("nan"), float("inf"), float("-inf")])
def test_what_is_masked_reaches_neither_value_nor_gradient(f, junk):
    x, mask = ragged()
    clean, dirty = (value_and_gradient(f, torch.where(mask, x, fill), mask) for fill in (0., junk))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1]) and (dirty[1][~mask] == 0).all()


# LAWS 13: filters take from numerator and denominator alike

def test_a_truncated_row_dilutes_nothing():
    mask = (torch.arange(8) < torch.tensor([[4], [4], [8]])) & torch.tensor([[True], [True], [False]])
    for over in ("tokens", "rows"): assert aggregate(torch.ones(3, 8), mask, over=over) == 1.


@each
def test_nothing_chosen_is_zero_with_a_finite_gradient(f):
    x, mask = ragged()
    value, gradient = value_and_gradient(f, x, mask & False)
    assert (value == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("zero", [0., torch.tensor(0), torch.tensor(0.)])
@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_an_empty_whole_is_no_division_by_zero(over, zero):
    x, mask = ragged()
    assert aggregate(x, mask & False, over=over, denom=zero) == 0


def test_no_rows_and_no_columns():
    for shape in ((0, 4), (4, 0)):
        x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        assert aggregate(x, mask) == aggregate(x, mask, over="rows") == masked_std(x, mask) == 0
        assert whiten(x, mask).shape == shape


# numbers

@pytest.mark.parametrize(("denom", "error", "says"), [
    (torch.tensor([3, 4]), ValueError, r"\[2\]; one number is wanted, the n_tokens of the whole optimizer step"),
    (torch.tensor([3]), ValueError, r"denom is \[1\]"),
    (-3, ValueError, r"denom is -3(.0)?; it divides a sum, and must be a count"), (-.5, ValueError, "denom is -0.5"),
    (float("nan"), ValueError, "denom is nan"), (np.float32(-1), ValueError, "denom is -1"),
    (True, TypeError, "denom is a bool, which has no n_tokens"),
    (torch.tensor(True), TypeError, "denom is a Bool tensor"), (np.bool_(True), TypeError, "denom is a bool"),
    ("3", TypeError, "denom is a str"),], ids=str)
def test_what_is_no_count_is_refused(denom, error, says):
    x, mask = ragged()
    for f in (masked_mean, aggregate):
        with pytest.raises(error, match=says): f(x, mask, denom=denom)
    with pytest.raises(error, match=says): masked_mean(x, mask, dim=-1, denom=denom)
    with pytest.raises(error, match=says.replace("n_tokens", "n_units")):
        bradley_terry_loss(x[0], x[1], denom=float(denom) if type(denom) is int else denom)


def test_an_integer_is_refused_where_tokens_are_not_counted():
    "7 could be tokens, rows or pairs; a float is taken as it is, and so is a tensor, whose value is not read."
    x, mask = ragged()
    wants = "which could be a number of tokens, rows or pairs; give the batch, denom=b, whose"
    with pytest.raises(TypeError, match=f"^aggregate: denom is 7, {wants} n_rows"):
        aggregate(x, mask, over="rows", denom=7)
    with pytest.raises(TypeError, match=f"^bradley_terry_loss: denom is 7, {wants} n_units"):
        bradley_terry_loss(x[0], x[1], denom=7)
    assert aggregate(x, mask, denom=7) == aggregate(x, mask, denom=7.) == aggregate(x, mask, denom=torch.tensor(7))
    whole = aggregate(x, mask, over="rows", denom=7.)
    assert whole == aggregate(x, mask, over="rows", denom=torch.tensor(7))


def test_a_count_that_changes_compiles_to_one_graph(): # a number that differs from call to call is a symbol there
    x, mask = ragged()
    compiled = torch.compile(lambda n: aggregate(x, mask, denom=n), fullgraph=True, backend="eager")
    for n in (7, 8, 9, 0, torch.tensor(3)): assert_close(compiled(n), aggregate(x, mask, denom=n))


def test_means_of_rows_take_no_batch():
    b = Batch(**sample_columns())
    x, mask = b.values, b.mask
    with pytest.raises(ValueError, match="masked_mean: dim=-1 asks for several means, .* leave out dim, or denom"):
        masked_mean(x, mask, dim=-1, denom=b)
    assert_close(masked_mean(x, mask, dim=-1, denom=4), masked_sum(x, mask, dim=-1)/4)


def test_denominators_may_be_numbers_or_tensors():
    x, mask = ragged()
    for n in (7, 7., torch.tensor(7), torch.tensor(7.), np.int64(7), np.float32(7)):
        assert_close(masked_mean(x, mask, denom=n), masked_sum(x, mask)/7, check_dtype=False)
    assert_close(masked_mean(x, mask, denom=.5), masked_sum(x, mask)*2) # only 0 is replaced


@pytest.mark.parametrize("value", [.95, .1, 1/3, 1000.1, 123456.7])
@pytest.mark.parametrize("n", [1, 7, 301, 7777])
def test_equal_entries_have_no_spread(value, n):
    x = torch.full((n,), value, requires_grad=True)
    assert masked_std(x, x > 0) == 0 and (whiten(x, x > 0) == 0).all()
    assert (torch.autograd.grad(masked_std(x, x > 0), x)[0] == 0).all()
    assert torch.autograd.grad(whiten(x, x > 0)[0], x)[0].isfinite().all()


def test_whiten_has_mean_zero_and_unit_spread():
    x, mask = ragged()
    white = whiten(100 + 3*x, mask)
    assert_close(white[mask].mean(), torch.tensor(0.).double(), atol=1e-12, rtol=0)
    assert_close(white[mask].std(), torch.tensor(1.).double())
    kept = whiten(100 + 3*x, mask, shift=False)
    assert_close(kept[mask].mean(), (100 + 3*x)[mask].mean())
    assert (white[~mask] == 0).all() and (kept[~mask] == 0).all()


@each
def test_gradients_are_those_of_the_definition(f):
    x, mask = ragged(3, 4)
    assert torch.autograd.gradcheck(lambda x: f(x, mask), x.requires_grad_())


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_single_precision(f, dtype):
    x, mask = ragged(dtype=torch.float32)
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    assert f(x.to(dtype), mask).dtype is wanted is promoted(x.to(dtype)).dtype
    assert_close(f(x.to(dtype), mask), f(x.to(dtype).to(wanted), mask))


@each
def test_inputs_stay_as_they_were_and_compile(f):
    x, mask = ragged()
    before = x.clone(), mask.clone()
    assert_close(torch.compile(f, fullgraph=True, backend="eager")(x, mask), f(x, mask))
    assert torch.equal(x, before[0]) and torch.equal(mask, before[1])


# metrics

def test_metrics_of_any_cut_are_those_of_the_whole():
    "LAWS 35: micro-batches change no metric."
    x, mask = ragged(16, 5)
    def measure(x, m): return dict(mean=mean_of(x, m), top=Max(x.max()), lr=Last(x[-1, -1]))
    whole = measure(x, mask)
    for size in (1, 2, 3, 16):
        joined = merge(*map(measure, x.split(size), mask.split(size)))
        assert joined["mean"].count == whole["mean"].count
        for key in whole: assert_close(float(joined[key]), float(whole[key]), atol=1e-10, rtol=1e-10)


def test_mean_is_of_tokens_not_of_means():
    assert float(Mean(10., 10) + Mean(3000., 1000)) == 3010/1010
    assert repr(Mean(1, 2)) == "0.5" and f"{Mean(1, 3):.2f}" == "0.33"
    assert str(float(Mean(0., 0))) == "nan"


def test_max_shows_a_nan_wherever_it_was():
    assert float(Max(.1) + Max(torch.tensor(.05))) == .1
    for pair in ((float("nan"), 1.), (1., float("nan"))): assert str(Max(pair[0]) + Max(pair[1])) == "nan"


def test_metrics_are_detached_picklable_and_movable():
    x, mask = ragged()
    for m in (mean_of(x.requires_grad_(), mask), Mean((x*2).sum(), 3), Max(x.max()), Last(3)):
        assert not any(t.requires_grad for t in vars(m).values() if isinstance(t, torch.Tensor))
        assert float(pickle.loads(pickle.dumps(m)).to("cpu")) == float(m)
    assert Mean(torch.tensor(1.)).to("meta").total.device.type == "meta"


def test_metrics_come_out_of_a_compiled_loss():
    x, mask = ragged()
    def loss(x, mask): return aggregate(x, mask), dict(mean=mean_of(x, mask), top=Max(x.max()))
    value, metrics = torch.compile(loss, fullgraph=True, backend="eager")(x, mask)
    assert float(metrics["mean"]) == float(mean_of(x, mask)) and value == aggregate(x, mask)


def test_a_metric_costs_no_synchronisation():
    x = torch.ones(3, 4, device="meta") # reading a meta tensor raises
    mask = torch.ones(3, 4, dtype=torch.bool, device="meta")
    m = merge(dict(a=mean_of(x, mask)), dict(a=mean_of(x, mask)), dict(b=Max(x.max())))["a"]
    aggregate(x, mask, over="rows", denom=mask.sum()), whiten(x, mask), masked_std(x, mask)
    with pytest.raises((RuntimeError, NotImplementedError)): float(m)


def test_merge_names_what_it_cannot_join():
    with pytest.raises(TypeError, match="merge: 'kl' is a Mean and a Max; one key, one class"):
        merge(dict(kl=Mean(1)), dict(kl=Max(1)))
    with pytest.raises(TypeError, match="merge: 'kl' is a float; wrap it in Mean, Max or Last"): merge(dict(kl=.1))
    with pytest.raises(TypeError): Mean(1) + Max(1)
    with pytest.raises(ValueError, match=r"Mean: total is \[4\]; a metric holds one number"): Mean(torch.ones(4))
    assert merge() == {} and list(merge(dict(a=Mean(1)), dict(b=Mean(2)))) == ["a", "b"]


# errors

def my_loss(logprobs, advantages, mask):
    same_shape(logprobs=logprobs, advantages=advantages, mask=mask, mask_optional=True)

def test_errors_say_who_what_and_how_to_fix():
    x, mask = torch.zeros(4, 7), torch.ones(4, 7, dtype=torch.bool)
    my_loss(x, x, mask), my_loss(x, None, mask), my_loss(x, x, None), my_loss(x[0], x[0], mask[0])
    for args,error,text in [
        ((x, x[:, 0], mask), ValueError,
         "my_loss: advantages is [4], logprobs is [4, 7]; spread row values with at_tokens(advantages, mask)"),
        ((x[:, 0], x[:, 0], mask), ValueError,
         "my_loss: logprobs is [4], mask is [4, 7]; spread row values with at_tokens(logprobs, mask)"),
        ((x[:, 0], x, None), ValueError,
         "my_loss: logprobs is [4], advantages is [4, 7]; spread row values with at_tokens(logprobs, mask)"),
        ((x, x[:, 1:], mask), ValueError,
         "my_loss: advantages is [4, 6], logprobs is [4, 7]; they must be equal, nothing is broadcast; column t is "
         "token t, also of log-probs, whose column 0 is 0 (token_logprobs)"),
        ((x, x, mask[:, 1:]), ValueError,
         "my_loss: logprobs is [4, 7], mask is [4, 6]; they must be equal, nothing is broadcast"),
        ((x, x, mask.long()), TypeError, "my_loss: mask is int64; masks are Bool (mask.bool(), or mask > 0)"),
        ((x, x, x), TypeError, "my_loss: mask is float32; masks are Bool (mask.bool(), or mask > 0)"),
    ]:
        with pytest.raises(error) as e: my_loss(*args)
        assert str(e.value) == text


@each
def test_every_reduction_refuses_broadcasting_and_int_masks(f):
    x, mask = ragged(4, 4)
    with pytest.raises(ValueError, match="masked_|whiten|aggregate"): f(x, mask[:, 0])
    with pytest.raises(TypeError, match="mask is int64"): f(x, mask.long())


def test_aggregate_knows_three_weightings():
    with pytest.raises(ValueError, match="aggregate: over is 'mean'; it is 'tokens', 'rows' or 'groups'"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1) > 0, over="mean")


# -- tracers: the checks of shapes have nothing to compare under torch.fx, and leave no trace in a graph

def traced_losses():
    cols = {k: x.float() if x.is_floating_point() else x for k, x in sample_columns().items()}
    tokens, four = ("logprobs", "old_logprobs", "advantages", "mask"), ("chosen", "rejected", "ref_chosen",
                                                                        "ref_rejected")
    yield pytest.param(lambda *x: ppo_loss(*x)[0], [cols[k] for k in tokens], id="ppo")
    yield pytest.param(lambda *x: ppo_loss(*x, over="rows", dual_clip=3.)[0], [cols[k] for k in tokens], id="ppo rows")
    yield pytest.param(lambda *x: sft_loss(*x)[0], [cols["logprobs"], cols["mask"]], id="sft")
    yield pytest.param(lambda *x: masked_mean(*x), [cols["values"], cols["mask"]], id="masked_mean")
    yield pytest.param(lambda *x: same_shape("P", **dict(zip(four, x, strict=True))) or x[0] - x[1],
                       [cols[k] for k in four], id="same_shape")


@pytest.mark.parametrize(("f", "args"), traced_losses())
def test_tracers_pass_the_checks(f, args):
    class Module(torch.nn.Module): # with parameters of its own number, as both tracers want it
        if len(args) == 4:
            def forward(self, a, b, c, d): return f(a, b, c, d)
        else:
            def forward(self, a, b): return f(a, b)
    want = f(*args)
    torch.testing.assert_close(torch.fx.symbolic_trace(Module())(*args), want)
    torch.testing.assert_close(torch.export.export(Module(), tuple(args)).module()(*args), want)
