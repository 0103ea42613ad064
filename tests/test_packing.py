"Packing: there and back with gradients, a cap that holds over thousands of random cases, equal steps on every rank (LAWS 24, 26)."
import random

import pytest
import torch
from torch.testing import assert_close

from rlblocks.packing import balance, bin_pack, micro_batch_count, pack, pad, plan_micro_batches, unpack


def ragged(seed, B=6, T=9):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, T + 1, (B,), generator=g)
    return torch.randint(1, 99, (B, T), generator=g), lengths, torch.arange(T) < lengths[:, None]


@pytest.mark.parametrize("seed", range(20))
def test_unpack_undoes_pack(seed):
    tokens, lengths, real = ragged(seed)
    p = pack(tokens, lengths)
    assert unpack(p.tokens, p).equal(torch.where(real, tokens, 0))
    assert unpack(p.take(real), p).equal(real)
    assert p.cu_seqlens.dtype == torch.int32 and p.cu_seqlens.diff().tolist() == lengths.tolist()
    assert p.max_length == lengths.max() and (p.B, p.T) == tokens.shape
    assert p.tokens.equal(tokens[real]) and p.row_ids.equal(real.nonzero()[:, 0]) and p.position_ids.equal(real.nonzero()[:, 1])
    rows = [t[:n] for t, n in zip(tokens, lengths.tolist(), strict=True)]
    padded, again = pad(rows, length=tokens.shape[1])
    assert padded.equal(torch.where(real, tokens, 0)) and again.equal(lengths)


def test_gradients_reach_real_tokens_and_no_others():
    tokens, lengths, real = ragged(1)
    x = torch.randn(*tokens.shape, 2, dtype=torch.float64, requires_grad=True)
    p = pack(tokens, lengths)
    assert torch.autograd.gradcheck(lambda x: unpack(p.take(x).sin(), p), x)
    g, = torch.autograd.grad(p.take(x).sum(), x)
    assert_close(g, real[..., None].double().expand_as(x))


def test_padding_may_hold_anything():
    tokens, lengths, real = ragged(2)
    x = torch.where(real, 1., float("nan")).requires_grad_()
    p = pack(tokens, lengths)
    out = unpack(p.take(x), p)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.equal(real.float())


@pytest.mark.parametrize("sizes", [[], [0, 0], [0, 3, 0]])
def test_empty_rows(sizes):
    tokens = torch.ones(len(sizes), 3, dtype=torch.long)
    p = pack(tokens, torch.tensor(sizes, dtype=torch.long))
    assert len(p.tokens) == sum(sizes) and p.max_length == max(sizes, default=0) and len(p.cu_seqlens) == len(sizes) + 1
    assert unpack(p.tokens, p).sum(1).tolist() == sizes


def test_attention_by_row_ids_keeps_rows_apart():
    "LAWS 26: packed equals each row alone; a change in row A never reaches row B."
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 0, 7, 1])
    x = torch.randn(4, 7, 8, generator=g, dtype=torch.float64)
    p = pack(torch.zeros(4, 7, dtype=torch.long), lengths)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    def packed(x):
        q = p.take(x)[None]
        see = (p.row_ids[:, None] == p.row_ids) & (p.position_ids[:, None] >= p.position_ids)
        return unpack(sdpa(q, q, q, attn_mask=see)[0], p)
    alone = torch.zeros_like(x)
    for i, n in enumerate(lengths.tolist()):
        if n: alone[i, :n] = sdpa(*[x[None, i, :n]]*3, is_causal=True)[0]
    assert_close(packed(x), alone)
    y = x.clone()
    y[0] += 1
    assert packed(x)[1:].equal(packed(y)[1:])


def cost(bin, lengths, padded): return len(bin)*max(lengths[i] for i in bin) if padded else sum(lengths[i] for i in bin)


def test_the_cap_holds_over_10_000_random_cases():
    rng = random.Random(0)
    for case in range(10_000):
        cap = rng.choice([1, 7, 64, 2048])
        lengths = [rng.choice([0, cap, rng.randint(0, cap), rng.randint(0, cap//3)]) for _ in range(rng.randint(0, 30))]
        for bins in (bin_pack(lengths, cap), plan_micro_batches(lengths, max_tokens=cap, padded=case % 2 == 0)):
            assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
            assert all(b == sorted(b) and cost(b, lengths, False) <= cap for b in bins)


def test_units_and_limits_hold_over_10_000_random_cases():
    rng = random.Random(1)
    for case in range(10_000):
        padded = case % 2 == 0
        lengths = [rng.randint(0, 40) for _ in range(rng.randint(1, 24))]
        unit = [rng.randrange(12) for _ in lengths]
        of = {u: [i for i, v in enumerate(unit) if v == u] for u in unit}
        max_tokens = max(cost(b, lengths, padded) for b in of.values()) + rng.choice([0, 1, 30, 200])
        max_rows = max(map(len, of.values())) + rng.choice([0, 1, 5]) if case % 3 else None
        plan = plan_micro_batches(lengths, max_tokens=max_tokens, unit=unit, max_rows=max_rows, padded=padded)
        assert sorted(i for b in plan for i in b) == list(range(len(lengths)))
        assert all(cost(b, lengths, padded) <= max_tokens and len(b) <= (max_rows or len(lengths)) for b in plan)
        assert sum(len({unit[i] for i in b}) for b in plan) == len(of) # a parted unit is counted twice


def test_tensors_and_lists_plan_alike():
    g = torch.Generator().manual_seed(0)
    lengths, unit = torch.randint(0, 50, (40,), generator=g), torch.randint(0, 25, (40,), generator=g)
    for kw in (dict(), dict(padded=True), dict(max_rows=6)):
        assert plan_micro_batches(lengths, max_tokens=400, unit=unit, **kw) == plan_micro_batches(lengths.tolist(), max_tokens=400, unit=unit.tolist(), **kw)
    assert balance(lengths, 7) == balance(lengths.tolist(), 7) and bin_pack(lengths, 60) == bin_pack(lengths.tolist(), 60)


def test_every_rank_counts_the_same_steps():
    "LAWS 24: local bins 1, 5, 2, 3 → every rank runs 5."
    ranks = [[4, 6], [7, 8, 6, 9, 10], [5, 5, 10], [9, 9, 9]]
    assert [len(plan_micro_batches(n, max_tokens=10)) for n in ranks] == [1, 5, 2, 3]
    assert micro_batch_count(ranks, max_tokens=10) == 5
    assert micro_batch_count([torch.tensor(n) for n in ranks], max_tokens=10) == 5
    assert micro_batch_count([[3, 3], []], max_tokens=10, unit=[[0, 1], []], max_rows=1) == 2
    assert micro_batch_count([[], []], max_tokens=10) == 0


def test_fewer_bins_than_one_by_one_and_never_more_than_the_count_by_total_allows():
    "The case in which balanced bins go over (FEATURES C-O4): 21 × 5,000 at 16,384."
    assert [len(b) for b in bin_pack([5000]*21, 16384)] == [3]*7


def test_balance_is_even_and_leaves_no_part_empty():
    rng = random.Random(2)
    for _ in range(500):
        n, costs = rng.randint(1, 9), [rng.choice([0, 0.5, rng.randint(0, 100)]) for _ in range(rng.randint(0, 40))]
        parts = balance(costs, n)
        loads = [sum(costs[i] for i in p) for p in parts]
        assert len(parts) == n and sorted(i for p in parts for i in p) == list(range(len(costs)))
        assert len(costs) < n or all(parts)
        assert max(loads) - min(loads) <= max(costs, default=0)
    assert balance([1, 1, 1, 1, 4], 2) == [[4], [0, 1, 2, 3]] # the largest goes first, wherever it stands


@pytest.mark.parametrize("call, text", [
    (lambda: pad([]), "pad: no rows came"),
    (lambda: pad([[1], [1, 2, 3]], length=2), "pad: row 1 has 3 elements, length is 2; cut the row to 2 or raise length to 3"),
    (lambda: pad([torch.ones(2, 3), torch.ones(2, 4)]), "pad: row 1 has elements of shape [4], others [3]"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([5, 1])), "pack: the length of row 0 is 5, tokens are 4 wide"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, -1])), "pack: the length of row 1 is -1"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1])), "pack: lengths has 1 rows, tokens is [2, 4]"),
    (lambda: pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, 2])).take(torch.ones(2)), "row values [B] go by x[packed.row_ids]"),
    (lambda: unpack(torch.ones(1, 3), pack(torch.ones(2, 4, dtype=torch.long), torch.tensor([1, 2]))), "unpack: 1 values came for 3 packed tokens"),
    (lambda: bin_pack([100, 5000], 2048), "bin_pack: the length of row 1 is 5000, cap is 2048; cut or drop the row, or raise cap to 5000"),
    (lambda: bin_pack([-1], 2048), "bin_pack: the length of row 0 is -1"),
    (lambda: plan_micro_batches([3, 12], max_tokens=10), "plan_micro_batches: row 1 takes 12 tokens"),
    (lambda: plan_micro_batches([3, -2], max_tokens=10), "plan_micro_batches: row 1 takes -2 tokens"),
    (lambda: plan_micro_batches([4, 6], max_tokens=10, unit=[7, 7], padded=True), "unit 7 (rows 0, 1) takes 12 tokens and 2 rows"),
    (lambda: plan_micro_batches([4, 5], max_tokens=20, unit=[7, 7], max_rows=1), "the limits are max_tokens=20 and max_rows=1"),
    (lambda: plan_micro_batches([4, 5], max_tokens=20, unit=[7]), "unit has 1 rows, lengths has 2"),
    (lambda: micro_batch_count([[4], [1]], max_tokens=20, unit=[[7]]), "unit is given for 1 ranks, lengths for 2"),
    (lambda: balance([1, 2], 0), "balance: 0 parts were asked for"),
    (lambda: balance([1, float("nan")], 2), "balance: the cost of item 1 is nan"),
])
def test_errors_say_what_came_and_how_to_mend_it(call, text):
    with pytest.raises(ValueError) as e: call()
    assert text in str(e.value)
