"Mismatch metrics: hand numbers, oracles over all tokens at once, exact merging, what no cut may change (LAWS 1, 2, 5)."
import math

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.corrections import truncated_weights
from rlblocks.arithmetic.kl import kl_k1, kl_k3
from rlblocks.arithmetic.masked import Max, Mean, merge
from rlblocks.signals.mismatch import effective_share, mismatch_metrics, probability_correlation
from rlblocks.testing.oracles import sample_columns

nan, inf = math.nan, math.inf
KEYS = ["rollout_ratio", "rollout_ratio_max", "rollout_abs_diff", "rollout_abs_diff_max", "rollout_kl", "rollout_kl_k3",
        "rollout_chi2", "rollout_product", "rollout_product_chi2", "rollout_row_ratio_max", "rollout_row_inverse_max",
        "trainer_prob", "rollout_prob", "trainer_prob_sq", "rollout_prob_sq", "prob_gap_sq"]


def columns(seed=0, dtype=torch.float64):
    cols = sample_columns(seed=seed)
    return cols["old_logprobs"].to(dtype), cols["rollout_logprobs"].to(dtype), cols["mask"]

def read(m):
    "Every number, and those of the readers."
    m = {k: float(x) for k, x in m.items()}
    return m | dict(tokens=effective_share(m), rows=effective_share(m, over="rows"), r=probability_correlation(m))

def oracle(old, rollout, mask):
    "The same in Python floats, all chosen tokens at once."
    logs = [[old[b, t].item() - rollout[b, t].item() for t in range(mask.shape[1]) if mask[b, t]]
            for b in range(len(mask))]
    logs, x = [row for row in logs if row], [x for row in logs for x in row]
    rho, products, means = [math.exp(y)
                            for y in x], [math.exp(sum(row)) for row in logs], [sum(row)/len(row) for row in logs]
    p, q = ([math.exp(y) for y in z[mask].tolist()] for z in (old, rollout))
    def mean(y): return sum(y)/len(y)
    def share(w): return sum(w)**2/(len(w)*sum(y*y for y in w))
    def cov(a, b): return mean([(x - mean(a))*(y - mean(b)) for x, y in zip(a, b, strict=True)])
    return dict(zip(KEYS, [mean(rho), max(rho), mean([abs(y) for y in x]), max(abs(y) for y in x), -mean(x),
                           mean([math.exp(y) - 1 - y for y in x]), mean([y*y for y in rho]) - 1, mean(products),
                           mean([y*y for y in products]) - 1, math.exp(max(means)), math.exp(-min(means)), mean(p),
                           mean(q), mean([y*y for y in p]), mean([y*y for y in q]),
                           mean([(a - b)**2 for a, b in zip(p, q, strict=True)])], strict=True)) | dict(
        tokens=share(rho), rows=share(products), r=cov(p, q)/math.sqrt(cov(p, p)*cov(q, q)))


def test_by_hand():
    ratio, on = torch.tensor([[1., 3.], [.5, nan]]), torch.tensor([[True, True], [True, False]])
    rollout = torch.full((2, 2), .25).log()
    # a True outside the mask counts for nothing
    found = mismatch_metrics(rollout + ratio.log(), rollout, on, keep=torch.tensor([[True, False], [False, True]]))
    wanted = dict(zip(KEYS,
                      [1.5, 3., math.log(6)/3, math.log(3), -math.log(1.5)/3, (2 - math.log(3) + math.log(2) - .5)/3,
                       29/12, 1.75, 3.625, 3**.5, 2., 3/8, 1/4, (1/16 + 9/16 + 1/64)/3, 1/16, (1/4 + 1/64)/3],
                      strict=True)) | dict(rollout_rejected=2/3, rollout_rejected_rows=.5)
    assert_close({k: float(m) for k, m in found.items()}, wanted, atol=1e-6, rtol=0)
    assert_close([effective_share(found), effective_share(found, over="rows")], [4.5**2/(3*10.25), 3.5**2/(2*9.25)],
                 atol=1e-6, rtol=0)
    assert math.isnan(probability_correlation(found)) # the sampler's probabilities are all equal
    assert list(mismatch_metrics(rollout, rollout, on)) == KEYS and {type(m) for m in found.values()} == {Mean, Max}


def test_correlation_by_hand(): # deviations (−.3, −.1, .4) and (−.4, 0, .4)
    p, q, on = torch.tensor([[.2, .4, .9,
                              nan]]), torch.tensor([[.1, .5, .9, .5]]), torch.tensor([[True, True, True, False]])
    for a, b in ((p, q), (q, p)):
        assert_close(probability_correlation(mismatch_metrics(a.log(), b.log(), on)), .28/math.sqrt(.26*.32), atol=1e-5,
                     rtol=0)
    assert_close(probability_correlation(mismatch_metrics((.4 - q/3).log(), q.log(), on)), -1., atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_equals_oracle_under_every_cut(seed):
    old, rollout, mask = columns(seed)
    wanted = oracle(old, rollout, mask)
    for n in (1, 3, 16):
        parts = [mismatch_metrics(*x) for x in zip(*(c.split(n) for c in (old, rollout, mask)), strict=True)]
        assert_close(read(merge(*parts)), wanted, rtol=1e-9, atol=1e-12)


def test_rejections_merge():
    old, rollout, mask = columns()
    keep = mask & ((old - rollout).abs() < .3)
    for n in (1, 5):
        parts = [mismatch_metrics(*x, keep=k)
                 for *x, k in zip(*(c.split(n) for c in (old, rollout, mask, keep)), strict=True)]
        m = merge(*parts)
        rows = mask.any(1)
        assert_close(float(m["rollout_rejected"]), ((mask & ~keep).sum()/mask.sum()).item(), rtol=1e-6, atol=0)
        assert_close(float(m["rollout_rejected_rows"]), ((rows & ~keep.any(1)).sum()/rows.sum()).item(), rtol=1e-6,
                     atol=0)
        assert 0 < float(m["rollout_rejected"]) < 1


def test_identities():
    old, rollout, mask = columns()
    m = mismatch_metrics(old, rollout, mask)
    w = truncated_weights(old, rollout, mask, high=inf)
    for k, x in (("ratio", w), ("kl", kl_k1(rollout, old, mask)), ("kl_k3", kl_k3(rollout, old, mask)),
                 ("abs_diff", kl_k1(old, rollout, mask).abs())):
        assert_close(float(m[f"rollout_{k}"]), (x.sum()/mask.sum()).item())
    one = mask & (mask.cumsum(1) == 1) # a row of one token is that token
    s = mismatch_metrics(old, rollout, one)
    assert_close(float(s["rollout_product"]),
                 float(s["rollout_ratio"])), assert_close(float(s["rollout_product_chi2"]), float(s["rollout_chi2"]))
    assert_close(float(s["rollout_row_ratio_max"]), float(s["rollout_ratio_max"]))
    assert_close(effective_share(s, over="rows"), effective_share(s))
    back = mismatch_metrics(rollout, old, mask) # exchanged: the inverse of every ratio
    assert_close(float(back["rollout_row_inverse_max"]), float(m["rollout_row_ratio_max"]))
    assert_close(float(back["rollout_kl"]),
                 -float(m["rollout_kl"])), assert_close(probability_correlation(back), probability_correlation(m))


def test_without_a_difference():
    old, _, mask = columns()
    m = mismatch_metrics(old, old, mask, keep=mask)
    for k in ("kl", "kl_k3", "abs_diff", "abs_diff_max", "chi2", "product_chi2", "rejected", "rejected_rows"):
        assert float(m[f"rollout_{k}"]) == 0
    for k in ("ratio", "ratio_max", "product", "row_ratio_max", "row_inverse_max"): assert float(m[f"rollout_{k}"]) == 1
    assert effective_share(m) == effective_share(m, over="rows") == 1
    assert probability_correlation(m) == pytest.approx(1, abs=1e-12)


def test_of_nothing():
    old, rollout, mask = columns()
    found = mismatch_metrics(old, rollout, mask & False, keep=mask)
    assert all(math.isnan(float(m)) if isinstance(m, Mean) else float(m) == 0 for m in found.values())
    assert math.isnan(effective_share(found)) and math.isnan(effective_share(found, over="rows"))
    assert math.isnan(probability_correlation(found))
    joined = merge(found, mismatch_metrics(old, rollout, mask, keep=mask)) # a part without tokens changes nothing
    assert read(joined) == read(mismatch_metrics(old, rollout, mask, keep=mask))


def test_what_is_masked_reaches_nothing():
    old, rollout, mask = columns()
    for fill in (nan, inf, -inf, 100.):
        a, b = (torch.where(mask, x, fill) for x in (old, rollout))
        assert read(mismatch_metrics(a, b, mask)) == read(mismatch_metrics(old, rollout, mask))


def test_a_broken_token_stays_visible():
    on = torch.ones(1, 2).bool()
    gone = mismatch_metrics(torch.tensor([[-inf, -1.]]), torch.tensor([[-1., -1.]]), on)
    assert float(gone["rollout_abs_diff_max"]) == 20 and all(math.isfinite(float(m)) for m in gone.values())
    bad = mismatch_metrics(torch.tensor([[nan, -1.]]), torch.tensor([[-1., -1.]]), on)
    assert all(math.isnan(float(bad[k])) for k in KEYS if k not in ("rollout_prob", "rollout_prob_sq"))
    assert math.isnan(float(merge(gone, bad)["rollout_ratio_max"])) and math.isnan(probability_correlation(bad))


def test_small_differences_keep_their_digits_in_single_precision():
    # log ρ = 3·2⁻²⁵ exactly: ρ² − 1 by subtraction is a multiple of 2⁻²³
    half, on = torch.full((4, 8), -.5), torch.ones(4, 8).bool()
    m = mismatch_metrics(half + 3*2**-25, half, on)
    for k, n in (("chi2", 2), ("product_chi2", 16)):
        assert_close(float(m[f"rollout_{k}"]), math.expm1(n*3*2**-25), rtol=1e-6, atol=0)
    g = torch.Generator().manual_seed(0)
    q = torch.rand(64, 64, generator=g).clamp(min=.01).log()
    p, on = q + 1e-4*torch.randn(64, 64, generator=g), torch.ones(64, 64).bool()
    one, exact = (1 - probability_correlation(mismatch_metrics(*x, on)) for x in ((p, q), (p.double(), q.double())))
    # p and q, from exp, are off by 2⁻²⁴ of themselves, p − q by 1/1000 of itself
    assert 0 < exact < 1e-7 and abs(one - exact) < .01*exact


def test_at_least_single_precision_and_no_gradient():
    for dtype in (torch.bfloat16, torch.float16):
        old, rollout, mask = columns(dtype=dtype)
        assert read(mismatch_metrics(old, rollout, mask)) == read(mismatch_metrics(old.float(), rollout.float(), mask))
    old, rollout, mask = columns()
    found = mismatch_metrics(old.requires_grad_(), rollout.requires_grad_(), mask, keep=mask)
    assert not any(x.requires_grad for m in found.values() for x in vars(m).values() if isinstance(x, torch.Tensor))


def test_never_waits_and_compiles_in_one_graph():
    args = columns()
    # a tensor without values cannot be read
    found = mismatch_metrics(*(x.to("meta") for x in args), keep=args[2].to("meta"))
    assert all(x.is_meta and x.ndim == 0 for m in found.values() for x in vars(m).values())
    compiled = torch.compile(mismatch_metrics, fullgraph=True, backend="eager")(*args)
    assert read(compiled) == read(mismatch_metrics(*args))


def test_errors():
    x, m = torch.zeros(4, 7), torch.ones(4, 7).bool()
    same = "they must be equal, nothing is broadcast"
    with pytest.raises(ValueError) as e: mismatch_metrics(x, x, m, keep=m[1:])
    assert str(e.value) == f"mismatch_metrics: keep is [3, 7], logprobs is [4, 7]; {same}"
    with pytest.raises(TypeError) as e: mismatch_metrics(x, x, m.int())
    assert str(e.value) == "mismatch_metrics: mask is int32; masks are Bool (mask.bool(), or mask > 0)"
