"Batch: columns that fit, wholes and parts, units that stay together."
import copy
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from rlblocks import Batch, Buffer, Critic, Policy, Scorer, aggregate, masked_mean, pairs, seed_of, shared_prefix
from rlblocks.data.ragged import ragged
from rlblocks.engines.optimizers import adamw
from rlblocks.placement.place import Call
import tiny
from tiny import apart, gradients, model, rows
from torch.testing import assert_close


def small():
    return Batch(tokens=torch.arange(12).view(3, 4), lengths=torch.tensor([4, 2, 3]),
                 mask=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]).bool(), name=["a", "b", "c"])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 20])
def test_losses_of_parts_add_up_to_the_whole(n):
    b = rows()
    parts = b.parts(n)
    assert len(parts) == n
    assert all((p.n_tokens, p.n_rows, p.n_units) == (b.n_tokens, b.n_rows, b.n_units) for p in parts)
    whole = torch.where(b.mask, b.advantages, 0.).sum()/b.n_tokens
    assert_close(sum(torch.where(p.mask, p.advantages, 0.).sum()/p.n_tokens for p in parts), whole, rtol=1e-12,
                 atol=1e-14)
    assert sorted(i for p in parts if not p.filler for i in p.row.tolist()) == list(range(16))


def test_local_means_do_not_add_up():
    "LAWS 1: rows of 2 and 6 tokens, loss 1 on the short one: 0.25 in any cut, where the mean of local means says 0.5."
    mask = torch.tensor([[0]+[1]*2+[0]*4, [0]+[1]*6]).bool()
    b = Batch(tokens=torch.zeros(2, 7, dtype=torch.long), lengths=torch.tensor([3, 7]), mask=mask,
              x=torch.tensor([[1.]*7, [0.]*7]))
    parts = b.parts(2)
    assert sum(float(torch.where(p.mask, p.x, 0.).sum())/p.n_tokens for p in parts) == .25
    assert sum(float(p.x[p.mask].mean()) for p in parts)/2 == .5


def test_a_part_of_a_part_remembers_the_first_whole():
    b = rows()
    part = b.parts(2)[0].part([0, 1])
    assert part.n_tokens == b.n_tokens and len(part) == 2
    assert part.whole.parts == 2


def test_fillers_are_weightless_copies_of_a_real_unit():
    b = small()
    b["unit"] = torch.tensor([7, 7, 9])
    fillers = [p for p in b.parts(4) if p.filler]
    # 3 tokens, where unit 7 has 6
    assert len(fillers) == 2 and all(p.unit.tolist() == [9] and not p.mask.any() and p.n_rows == 3 for p in fillers)
    assert b.mask.any() and b.part([]).unit.tolist() == [9]


@pytest.mark.parametrize("n", [1, 3, 8, 20])
@pytest.mark.parametrize("unit", [False, True])
def test_what_parts_answer_goes_back_where_it_came_from(n, unit):
    """Every column, lists too, comes back in the order of the rows; each can be made alone; units and group ids are
    what they were."""
    b = rows()
    b["name"], b["group"] = [dict(i=i) for i in range(16)], torch.arange(16) % 5
    if unit: b["unit"] = torch.arange(16) % 6
    cuts, parts = b.cut(n), b.parts(n)
    assert sorted(sum(cuts, [])) == list(range(16)) and all(c == sorted(c) for c in cuts)
    for k, part in enumerate(parts):
        share = b.part(cuts[k], len(cuts))
        assert share.row.tolist() == part.row.tolist() and share.filler == part.filler == (not cuts[k])
        assert share.whole.n_tokens == part.whole.n_tokens == b.n_tokens
        assert part.filler or part.row.tolist() == cuts[k]
        assert part.whole == share.whole and part.whole.parts == n
    back = Batch.cat(parts)[torch.tensor(sum(cuts, [])).argsort()]
    for name, x in b.columns.items(): assert back[name] == x if isinstance(x, list) else back[name].equal(x), name


def test_a_filler_has_a_token_if_any_row_has():
    b = Batch(tokens=torch.ones(4, 7, dtype=torch.long), lengths=torch.tensor([5, 0, 1, 7]),
              mask=torch.zeros(4, 7, dtype=torch.bool))
    assert [p.lengths.tolist() for p in b.parts(6) if p.filler] == [[1], [1]]
    b = Batch(tokens=torch.ones(4, 7, dtype=torch.long), lengths=torch.tensor([5, 0, 0, 7]),
              unit=torch.tensor([0, 0, 1, 2]))
    assert b.part([]).lengths.tolist() == [5, 0]
    assert b[[2]].part([]).lengths.tolist() == [0]


def test_parts_are_balanced_by_tokens_or_by_cost():
    lengths = torch.tensor([800] + [100]*8)
    b = Batch(tokens=torch.zeros(9, 800, dtype=torch.long), lengths=lengths,
              mask=(torch.arange(800) >= 1) & (torch.arange(800) < lengths[:, None]))
    assert [int(p.lengths.sum()) for p in b.parts(2)] == [800, 800]
    assert sorted(len(p) for p in b.parts(3, lengths.double()**2)) == [1, 4, 4] and b.cut(2, [1.]*9) != b.cut(2)
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 500, (256,), generator=g)
    b = Batch(tokens=torch.zeros(256, 500, dtype=torch.long), lengths=lengths,
              mask=(torch.arange(500) >= 1) & (torch.arange(500) < lengths[:, None]))
    assert max(int(p.lengths.sum()) for p in b.parts(8)) <= 1.001*int(lengths.sum())/8
    with pytest.raises(ValueError, match="costs are .3., the batch has 256 rows"): b.parts(2, [1., 2., 3.])


def test_rows_without_a_mask_are_cut_too():
    b = Batch(tokens=torch.ones(3, 4, dtype=torch.long), lengths=torch.tensor([4, 1, 2]))
    parts = b.parts(4)
    assert [p.lengths.tolist() for p in parts if not p.filler] == [[4], [2], [1]] and parts[3].filler
    assert parts[3].lengths.tolist() == [1] and parts[0].n_tokens == 0
    assert len(Batch(x=torch.ones(3)).parts(2)) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cut_holds_one_share_at_a_time():
    """LAWS 39: a batch goes out in 8 shares and a column comes back, and the peak stays under twice the batch; rows
    that are sent ragged take what exists, 13 bytes a token."""
    code = """
import torch
from rlblocks.data.batch import Batch
from rlblocks.data.ragged import ragged
from rlblocks.placement.place import Call
from rlblocks.data.ragged import ragged
# ru_maxrss would begin with the parent's
rss = lambda: 1024*int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
g = torch.Generator().manual_seed(0)
B, T = 1024, 8192
lengths = torch.randint(T//2, T + 1, (B,), generator=g)
mask = torch.zeros(B, T, dtype=torch.bool)
for i, n in enumerate(lengths.tolist()): mask[i, 1:n] = True
b = Batch(tokens=torch.ones(B, T, dtype=torch.long), lengths=lengths, mask=mask, old_logprobs=torch.ones(B, T))
held = sum(x.nbytes for x in b.columns.values())
b.part([0, 1])                                  # allocator and imports
before, sent, call, answers = rss(), 0, Call((b,), {}, 8), []
for k in range(8):
    share = call.of(k)[0][0]
    flat = ragged(share)
    sent += flat.nbytes
    answers.append(share.old_logprobs.clone())
    del share, flat
b["ref_logprobs"] = call.joined(answers)
assert b.ref_logprobs.equal(b.old_logprobs)
print(held, rss() - before, sent/int(lengths.sum()))
"""
    # what is freed goes back at once: else the peak is a matter of the allocator's holes
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True,
                         check=True, env=os.environ | dict(MALLOC_MMAP_THRESHOLD_="65536"))
    held, grew, a_token = map(float, run.stdout.split())
    assert 0 < grew < .6*held and a_token < 16


def test_minibatches_are_wholes_of_their_own_and_shuffled_by_name():
    b = rows()
    minis = b.minibatches(3, seed=(0, 4))
    assert sum(m.n_tokens for m in minis) == b.n_tokens and [len(m) for m in minis] == [6, 5, 5]
    assert [m.row.tolist() for m in b.minibatches(3, seed=(0, 4))] == [m.row.tolist() for m in minis] != [
        m.row.tolist() for m in b.minibatches(3, seed=(0, 5))]
    assert len(b[:2].minibatches(3)) == 2
    with pytest.raises(ValueError, match="needs a whole"): b.parts(2)[0].minibatches(2)


@pytest.mark.parametrize("unit", [None, 2, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_minibatches_have_as_many_units_and_may_part_groups(unit, keep):
    """Equal are units, to one; tokens are as they fall; groups may be parted, since what depends on them was made on
    the whole."""
    b = rows()
    b["group"] = torch.arange(16)//4
    if unit: b["unit"] = torch.arange(16)//unit
    counts, parted = [], 0
    for seed in range(20):
        minis = b.minibatches(3, seed=seed, keep_groups=keep)
        counts = [len(m.unit_rows()) for m in minis]
        assert max(counts) - min(counts) <= 1 and sum(counts) == len(b.unit_rows())
        assert sorted(i for m in minis for i in m.row.tolist()) == list(range(16))
        assert all(m._whole is None and m.n_tokens == int(m.mask.sum()) for m in minis)
        parted += sum(len(set(m.group.tolist())) for m in minis) > 4
    assert parted


@pytest.mark.parametrize("sizes, n",
                         [([8]*16, 4), ([8]*16, 3), ([1, 3, 8, 2, 5], 3), ([3], 3), ([1]*7, 2), ([2, 2], 7)])
def test_minibatches_tear_a_group_only_where_they_must(sizes, n):
    """Groups are shuffled, if asked, and the line is cut in equal pieces: none torn where they divide, else at most
    one a cut; the number of steps is what was asked for."""
    B, group = sum(sizes), torch.arange(100, 100 + len(sizes)).repeat_interleave(torch.tensor(sizes))
    # groups are ids, wherever their rows stand
    mixed = torch.randperm(B, generator=torch.Generator().manual_seed(3))
    b = Batch(tokens=torch.zeros(B, 3, dtype=torch.long), lengths=torch.full((B,), 3),
              mask=torch.tensor([[False, True, True]]*B), group=group[mixed], row=torch.arange(B))
    met = lambda minis: sum(len(set(m.group.tolist())) for m in minis)
    for seed in range(10):
        minis = b.minibatches(n, seed=(seed, "x"), keep_groups=True)
        assert len(minis) == min(n, B) and max(map(len, minis)) - min(map(len, minis)) <= 1
        assert sorted(i for m in minis for i in m.row.tolist()) == list(range(B))
        torn = met(minis) - len(sizes)
        assert torn <= min(n, B) - 1 and (torn == 0 or sizes[0]*len(sizes) != B or len(sizes) % n)
        by_rows = b.minibatches(n, seed=(seed, "x"))
        assert [len(m) for m in by_rows] == [len(m) for m in minis] and met(by_rows) >= len(sizes)
    if len(sizes) == 16: assert met(by_rows) > 40


def test_any_group_may_come_first():
    "Shuffled are groups, each with the same chance whatever its size, and rows in a group."
    group = torch.arange(3).repeat_interleave(torch.tensor([1, 3, 8]))
    b = Batch(tokens=torch.zeros(12, 2, dtype=torch.long), lengths=torch.full((12,), 2),
              mask=torch.tensor([[False, True]]*12), group=group, row=torch.arange(12))
    first = [b.minibatches(12, seed=seed, keep_groups=True)[0] for seed in range(600)]
    counts = torch.cat([m.group for m in first]).bincount()
    # 4 standard deviations of Binomial(600, 1/3)
    assert ((counts - 200).abs() < 50).all() and len({int(m.row) for m in first}) == 12


def alike(sizes=(8,)*8, prompt=20, answer=12, seed=0):
    "Rows of groups with a common prompt, with a gap in the answers' mask."
    g, B = torch.Generator().manual_seed(seed), sum(sizes)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    tokens, lengths, at = (torch.randint(2, 32, (B, prompt + answer), generator=g),
                           prompt + torch.randint(1, answer + 1, (B,), generator=g), torch.arange(prompt + answer))
    tokens[:, :prompt] = torch.randint(2, 32, (len(sizes), prompt), generator=g)[group]
    mask = (at >= prompt) & (at < lengths[:, None]) & (at != prompt + 2)
    return Batch(tokens=tokens*(at < lengths[:, None]), lengths=lengths, mask=mask, group=group, row=torch.arange(B),
                 advantages=torch.randn(B, prompt + answer, generator=g))


def laid(b, rows): # tokens that a packed forward pass of these rows computes
    return int(b.lengths[rows].sum() - shared_prefix(b.tokens[rows], b.lengths[rows], b.group[rows])[1].sum())


def test_a_cut_keeps_groups_where_it_makes_the_step_shorter():
    """LAWS 26, 24: whole groups where they divide, pieces where one is too large, never a heavier part than rows
    dealt one by one; no group column, nothing kept."""
    b = alike()
    cuts, by_rows = b.cut(2), b.drop("group").cut(2)
    assert [len(set(b.group[rows].tolist())) for rows in cuts] == [4, 4]
    assert [len(set(b.group[rows].tolist())) for rows in by_rows] == [8, 8]
    assert sum(laid(b, rows) for rows in cuts) == laid(b, range(64))
    assert max(laid(b, rows) for rows in cuts) < .85*max(laid(b, rows) for rows in by_rows)
    assert [len(p) for p in alike((12,)).parts(3)] == [4, 4, 4]
    for sizes, n in (((8,)*8, 5), ((1, 3, 8, 20), 3), ((4,)*3, 2), ((2,)*5, 16), ((1,)*9, 4)):
        for seed in range(5):
            b = alike(sizes, seed=seed)
            cuts = b.cut(n)
            assert sorted(sum(cuts, [])) == list(range(len(b)))
            assert max(laid(b, rows)
                       for rows in cuts if rows) <= max(laid(b, rows) for rows in b.drop("group").cut(n) if rows)
    b = alike()
    # groups that begin unlike have nothing in common
    b["tokens"] = torch.randint(2, 32, b.tokens.shape, generator=torch.Generator().manual_seed(1))
    assert b.cut(2) == b.drop("group").cut(2)
    wide = alike((4, 4), prompt=20)
    assert sorted(map(len, wide.cut(2, wide.lengths.double()**2))) == [4, 4]
    # costs of one's own are counted likewise
    assert all(len(set(wide.group[rows].tolist())) == 1 for rows in wide.cut(2, wide.lengths.double()**2))
    copies = alike((5, 4, 3), answer=1)
    for unit in (None, torch.arange(12)//2):
        if unit is not None: copies["unit"] = unit
        # rows that have all in common, at costs that round
        for cost in (.1, 1/3, 1e-9, 0.):
            assert sorted(sum(copies.cut(3, [cost*i for i in range(12)]), [])) == list(range(12))


def test_a_cut_for_models_that_compute_every_prompt():
    """Padded rows, or packed ones without segments: each pays for its prompt, so parts are balanced by tokens; the
    wrapper says which, Call and parts hand it on."""
    for G, K, n, seed in ((4, 16, 4, 1), (8, 16, 8, 0), (16, 8, 8, 2)):
        g, at = torch.Generator().manual_seed(seed), torch.arange(430)
        start = torch.randint(10, 400, (G,), generator=g).repeat_interleave(K)
        lengths = start + torch.randint(2, 30, (G*K,), generator=g)
        tokens = torch.where(at < start[:, None], torch.randint(2, 32, (G, 430), generator=g).repeat_interleave(K, 0),
                             torch.randint(2, 32, (G*K, 430), generator=g))
        b = Batch(tokens=tokens, lengths=lengths, mask=(at >= start[:, None]) & (at < lengths[:, None]),
                  group=torch.arange(G).repeat_interleave(K))
        heavy = lambda cut, b=b: max(int(b.lengths[rows].sum()) for rows in cut)*len(cut)/int(b.lengths.sum())
        cut = b.cut(n, shares_prompts=False)
        assert cut == b.drop("group").cut(n) and heavy(cut) < 1.01 and heavy(b.cut(n)) > 1.1
        assert [p.lengths.tolist()
                for p in b.parts(n, shares_prompts=False)] == [b.lengths[rows].tolist() for rows in cut]
        for said in (True, False):
            assert list(Call((b,), {}, n, shares_prompts=said).cuts.values()) == [b.cut(n, shares_prompts=said)]
    packs = {pack: Policy(model(), frozen=True, device="cpu", pack=pack) for pack in (None, True, False)}
    assert [p.shares_prompts for p in packs.values()] == [True, True, False]
    assert Critic(model(), device="cpu").shares_prompts and not Scorer(model(), device="cpu", pack=False).shares_prompts
    packed = Policy(model(), frozen=True, device="cpu", pack=True)
    # an attention that is told of rows by their positions only, as flash's
    tiny.laid_out(packed, segments=False)
    assert not packed.shares_prompts


def test_units_and_groups_go_together():
    """Pairs over groups of several answers: no cut parts a pair, groups stay whole where they can; a pair of two
    groups is at home in neither."""
    b = alike((4,)*6)
    b["unit"] = torch.arange(24)//2
    for n in (2, 3, 5):
        cuts = b.cut(n)
        assert all(len(set(b.unit[rows].tolist()))*2 == len(rows) for rows in cuts)
        assert sorted(sum(cuts, [])) == list(range(24))
    assert all(len(set(b.group[rows].tolist())) == 2 for rows in b.cut(3))
    b["unit"] = torch.arange(24) % 12        # row 0 with row 12, of group 3
    assert all(len(set(b.unit[rows].tolist()))*2 == len(rows) for rows in b.cut(5))
    pair = alike((2,)*8)
    pair["unit"] = pair.group
    assert pair.drop("group").cut(4) == pair.cut(4) and all(len(rows) == 4 for rows in pair.cut(4))


def test_a_cut_that_keeps_groups_changes_no_gradient():
    """Sum law over cuts and minibatches of rows with shared prompts, packed: the parts' gradients add up to the
    whole's, and every part plans as many forward passes."""
    b = alike((8, 3, 5, 1), prompt=24, answer=8)
    def loss(out, b): return torch.where(b.mask, -out.logprobs*b.advantages, 0.).sum()/b.n_tokens, {}
    def gradient(part):
        policy = Policy(model(), optimizer=adamw(lr=0., max_norm=1e9), device="cpu", micro_tokens=96)
        found = gradients(policy)
        policy.step(part, loss)
        return found
    whole, policy = gradient(b), Policy(model(), frozen=True, device="cpu", micro_tokens=96)
    logprobs = policy.logprobs(b)
    for n in (2, 3, 5):
        parts, total = b.parts(n), {}
        assert all(policy.logprobs(p).sub(logprobs[p.row] if not p.filler else 0).abs().max() < 1e-5 for p in parts)
        for rows_ in b.cut(n):
            if rows_: total = {k: total.get(k, 0) + g for k, g in gradient(b.part(rows_)).items()}
        assert apart(total, whole) < 1e-5
    minis = b.minibatches(3, seed=1)
    total = {}
    for mini in minis:
        for k, g in gradient(mini).items(): total[k] = total.get(k, 0) + g*mini.n_tokens/b.n_tokens
    assert apart(total, whole) < 1e-5


def test_units_are_never_parted():
    b = rows()
    b["unit"] = torch.arange(16)//2
    for cut in (b.parts(3), b.minibatches(5, seed=1), [b.parts(2)[0].part(r) for r in b.parts(2)[0].cut(3)]):
        seen = [set(p.unit.tolist()) for p in cut if not p.filler]
        assert sum(map(len, seen)) == len(set.union(*seen))
    with pytest.raises(ValueError, match="parts unit 0"): b[1:]
    with pytest.raises(KeyError, match="no column 'lenghts'; there are .*; is 'lengths' meant"): b["lenghts"]
    assert len(b[2:4]) == 2 and len(b.drop("unit")[1:]) == 15


def test_pairs_side_by_side():
    b = small()[[0, 1, 2, 0]]
    b["unit"], b["chosen"] = torch.tensor([5, 2, 2, 5]), torch.tensor([False, True, False, True])
    assert [x.tolist() for x in pairs(torch.tensor([1., 2., 3., 4.]), b)] == [[2., 4.], [3., 1.]]
    b["chosen"] = torch.tensor([True, True, False, True])
    with pytest.raises(ValueError, match="exactly one chosen"): pairs(torch.zeros(4), b)
    b["chosen"] = torch.tensor([False, True, False, True])
    b["mask"] = b.mask & (b.unit == 2)[:, None]
    # what n_units does not count is not there
    assert [x.tolist() for x in pairs(torch.tensor([1., 2., 3., 4.]), b)] == [[2.], [3.]] and b.n_units == 1
    b["chosen"] = torch.tensor([True, True, False, True])
    with pytest.raises(ValueError, match="x is \\[3\\]"): pairs(torch.zeros(3), b)


def test_cat_pads_with_nothing_and_refuses_to_lose_columns():
    a, b = small(), small()[[1]].trim()
    assert b.width == 2
    both = Batch.cat([a, b])
    assert both.tokens[3].tolist() == [4, 5, 0, 0] and both.mask[3].tolist() == [False, True, False, False]
    assert both.name == ["a", "b", "c", "b"]
    assert both._whole is None and both.n_rows == 4
    b["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="extra"): Batch.cat([a, b])


def test_padding_is_no_expert():
    "−1 is nobody's id: 0 would send padding to the first expert. A Bool of that name is padded as any other."
    def of(n):
        ids = torch.arange(2*n).view(1, n, 1, 2)
        return Batch(tokens=ids[:, :, 0, 0], lengths=torch.tensor([n]), experts=ids)
    long = Batch.cat([of(2), of(4)])
    for b in (long, ragged(long).batch(), ragged(Batch.cat([of(2), of(4)])).batch(torch.tensor([1, 0]))[[1, 0]]):
        assert (b.experts[0, 2:] == -1).all() and not b.tokens[0, 2:].any()
        assert b.experts[1].equal(of(4).experts[0]) and b.experts[0, :2].equal(of(2).experts[0])
    marks = [Batch(lengths=torch.tensor([n]), experts=torch.ones(1, n, dtype=torch.bool)) for n in (1, 2)]
    assert Batch.cat(marks).experts.tolist() == [[True, False], [True, True]]


def test_selection_makes_a_new_whole():
    b = small()
    assert b[torch.tensor([True, False, True])].name == ["a", "c"] and b[[2, 0]].name == ["c", "a"]
    assert b[1].name == ["b"] and b[:2].n_tokens == 4
    part = b.parts(3)[1]
    assert part.n_tokens == 5 and part[:1].n_tokens == int(part.mask.sum())
    assert len(b[[]]) == 0 and b[[]].n_tokens == 0


def test_pickles_and_moves_whole():
    part = rows().parts(3)[1]
    again = pickle.loads(pickle.dumps(part)).to("cpu")
    assert again.n_tokens == part.n_tokens and again.columns.keys() == part.columns.keys() and not again.filler


def test_a_copy_to_the_cpu_is_waited_for():
    """torch does not wait for one from a GPU that is asked to be non-blocking: it would be read half-written. Untried
    on a GPU: a tensor tells what it is asked."""
    asked = []
    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            if f is not torch.Tensor.to: return super().__torch_function__(f, types, args, kwargs or {})
            asked.append(kwargs["non_blocking"])
            return args[0]
    b = Batch(x=torch.zeros(2).as_subclass(Told))
    for device in ("cpu", torch.device("cpu"), "cuda", torch.device("cuda:1")): b.to(device)
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("name, value, error, says", [
    ("mask", torch.ones(3, 4, dtype=torch.long), TypeError, "masks are Bool"),
    ("mask", torch.ones(3, 4, dtype=torch.bool), ValueError, "column 0 of row 0"),
    ("mask", torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool(), ValueError, "beyond the length of row 1"),
    ("advantages", torch.zeros(3, 3), ValueError, "no T−1"),
    ("scores", torch.zeros(2), ValueError, "has 2 rows, the batch has 3"),
    ("lengths", torch.tensor([4, 5, 1]), ValueError, "tokens are 4 wide"),
    ("lengths", torch.tensor([4., 2., 1.]), TypeError, "integers"),
    ("unit", torch.zeros(3), TypeError, "unit is \\[3\\] float32; integer ids"),
    ("group", torch.zeros(3), TypeError, "group is \\[3\\] float32; integer ids"),
    ("group", torch.zeros(3, 4, dtype=torch.long), TypeError, "group is \\[3, 4\\] int64"),
    ("group", ["a", "b", "c"], TypeError, "group is a list of 3; integer ids"),
    ("policy_version", torch.zeros(3), TypeError, "policy_version is \\[3\\] float32; integers \\[B\\] or"),
    ("scores", 3, TypeError, "is a int"),
    ("scores", torch.tensor(3.), ValueError, "single number"),
])
def test_columns_that_do_not_fit_are_refused_by_name(name, value, error, says):
    b = small()
    with pytest.raises(error, match=says): b[name] = value


def test_other_errors():
    b = small()
    with pytest.raises(AttributeError, match="no column 'scores'; there are tokens, lengths, mask, name"): _ = b.scores
    with pytest.raises(AttributeError, match="write batch\\['scores'\\]"): b.scores = torch.zeros(3)
    with pytest.raises(ValueError, match="of a part is fixed"): b.parts(3)[0]["lengths"] = torch.tensor([1])
    with pytest.raises(ValueError, match="need the column 'mask'"): _ = Batch(x=torch.zeros(2)).n_tokens
    with pytest.raises(ValueError, match="no columns"): Batch()
    with pytest.raises(ValueError, match="beyond the length of row 0"): b["lengths"] = torch.tensor([2, 2, 3])
    with pytest.raises(ValueError, match="without rows"): b[[]].parts(2)
    assert len(b[torch.tensor(1)]) == 1
    part = b.parts(5)[-1]
    assert part.filler and part.drop("name").filler and len(Batch.cat(b.parts(5))) == 3
    assert Batch(per_row=["features"], tokens=b.tokens, features=torch.zeros(3, 2)).is_per_token("tokens")


def test_a_column_never_hides_what_every_batch_has():
    """A name that an attribute or a method has is refused, when rows are made and later; `[]` reads columns and
    nothing else."""
    b = small()
    for name in ("width", "parts", "part", "filler", "n_tokens", "to", "columns", "per_row", "_whole", "_rows",
                 "__len__"):
        taken = "taken are as_part, cat, columns, .* width"
        with pytest.raises(ValueError, match=f"a column cannot be called '{name}', .*rename it .{taken}"):
            b[name] = ["x"]*3
        if name == "per_row": continue      # as an argument it says which columns have no token axis
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"): Batch(tokens=b.tokens, **{name: ["x"]*3})
    for name in ("width", "n_tokens", "parts", "to", "n_name", "scores"):
        with pytest.raises(KeyError, match=f"no column '{name}'; there are tokens, lengths, mask, name"): b[name]
    with pytest.raises(TypeError, match=r"batch\[0\] = … is no column"): b[0] = torch.zeros(3)
    assert Batch(self=[1, 2]).self == Batch(self=[1, 2])["self"] == [1, 2]


def square():
    "As many rows as tokens as features: shapes say nothing."
    g = torch.Generator().manual_seed(0)
    b = Batch(per_row=["feature"], tokens=torch.ones(4, 4, dtype=torch.long), lengths=torch.tensor([4, 2, 3, 1]),
              mask=torch.tensor([[0, 1, 0, 0]]*4).bool() & torch.tensor([[1], [1], [1], [0]]).bool(),
              group=torch.arange(4)//2, feature=torch.rand(4, 4, generator=g), x=torch.rand(4, 4, generator=g),
              answer=["a", "b", "c", "d"], row=torch.arange(4))
    b.set("image", torch.rand(4, 4, 2, generator=g), per="row")
    return b


def test_the_kind_of_a_column_is_declared_and_kept():
    """B == T == K: cut, pad, join, pack, minibatches, buffer and transport all know that `feature` and `image` are
    no tokens."""
    b = square()
    kinds = dict(tokens="token", lengths="row", mask="token", group="row", feature="row", x="token", answer="list",
                 row="row", image="row")
    assert b.kinds == kinds and b.per_row == {"feature", "image"}
    b["feature"] = b.feature + 1        # set again: what it was
    def loaded(b):
        a, c = Buffer(), Buffer()
        a.add(b)
        c.load_state_dict(a.state_dict())
        return c.rows()
    ways = dict(pick=b[[3, 1]], trim=b[1:].trim(), part=b.parts(2)[0], filler=b.parts(9)[8], mini=b.minibatches(2)[0],
                cat=Batch.cat([b[1:].trim(), b]), copy=copy.copy(b), to=b.to("cpu"),
                drop=b.drop("x"), pickle=pickle.loads(pickle.dumps(b)), ragged=ragged(b).batch(), buffer=loaded(b),
                call=Call((b,), {}, 2).of(1)[0][0])
    for way, new in ways.items():
        assert new.kinds == {k: kinds[k] for k in new.columns}, way
        assert new.feature.equal(b.feature[new.row]) and new.image.equal(b.image[new.row]), way
    assert ways["trim"].tokens.shape == (3, 3) and ways["cat"].tokens.shape == (7, 4)


def test_other_columns_are_checked_as_set_does():
    "Those that the batch has already are not looked at again; the kind of a name that it has stays."
    b = small()
    b.set("feature", torch.zeros(3, 4), per="row")
    for odd, error, says in ((dict(mask=torch.ones(3, 4)), TypeError, "masks are Bool"),
                             (dict(parts=["x"]*3), ValueError, "a column cannot be called 'parts'"),
                             (dict(g=torch.zeros(3, 9)), ValueError, "by batch.set.'g', …, per='row'"),
                             (dict(scores=torch.zeros(2)), ValueError, "has 2 rows, the batch has 3"),
                             (dict(scores=3), TypeError, "is a int"),
                             (dict(mask=b.mask, tokens=b.tokens[:, :3], lengths=b.lengths.clamp(max=3)), ValueError,
                              "but tokens are .3, [34].")):
        with pytest.raises(error, match=says): b.with_columns(b.columns | odd)
        with pytest.raises(error, match=says): small().parts(1)[0].with_columns(small().columns | odd)
    new = b.with_columns(dict(feature=b.feature + 1, tokens=b.tokens, x=torch.zeros(3, 4), name=b.name))
    assert new.kinds == dict(feature="row", tokens="token", x="token", name="list")
    assert list(new.columns) == ["feature", "tokens", "x", "name"] and new.tokens is b.tokens
    wider = b.with_columns({k: torch.cat([x, x[:, :1]], 1) if b.is_per_token(k) else x for k, x in b.columns.items()})
    assert wider.width == 5 and wider.feature.shape == (3, 4) and wider.kinds == b.kinds
    part = b.parts(2)[0]
    again = part.with_columns(part.columns | dict(mask=torch.zeros_like(part.mask)))     # read, not trained on
    assert again.whole == part.whole and again.is_part and not again.mask.any()


def test_kinds_are_carried_not_guessed():
    "Whatever a column is by then, even one that no kind can be seen of."
    b = small()
    b.set("odd", torch.zeros(3, 4), per="row")
    class Stored: pass            # stands for a column that is elsewhere
    vars(b).update(columns=b.columns | dict(odd=Stored()), kinds=dict(b.kinds))
    assert b.drop("name").kinds == {k: x for k, x in b.kinds.items() if k != "name"}
    assert b.as_part(b.whole).kinds == b.kinds == b.counted().kinds


def test_a_count_that_is_not_there_is_an_attribute_that_is_not_there():
    b = Batch(tokens=torch.ones(2, 3, dtype=torch.long))
    assert not hasattr(b, "n_foo") and not hasattr(small(), "n_foo") and getattr(b, "n_foo", 7) == 7
    with pytest.raises(AttributeError, match="no n_foo: the whole had no mask, or no Bool column 'foo'"): _ = b.n_foo


def test_a_kind_that_a_column_cannot_have_is_refused():
    b = square()
    for x in (torch.zeros(4), ["a"]*4):
        with pytest.raises(ValueError, match="is not per token"): b.set("y", x, per="token")
    with pytest.raises(ValueError, match="per='rows'; 'token' or 'row' is wanted"):
        b.set("y", torch.zeros(4, 4), per="rows")
    with pytest.raises(ValueError, match="per_row names featrue; columns are tokens"):
        Batch(per_row="featrue", tokens=b.tokens, feature=b.feature)
    with pytest.raises(ValueError, match="by batch.set.'y', …, per='row'"): b["y"] = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"Batch.cat: columns differ: \['y'\]"):
        other = square()
        other["y"], b["y"] = torch.zeros(4, 4), torch.zeros(4, 4)
        other.set("y", other.y, per="row")
        Batch.cat([b, other])
    other.set("y", other.y, per="token")
    assert Batch.cat([b, other]).is_per_token("y")


def test_a_batch_that_was_pickled_before_kinds_were_kept():
    b = square()
    old = object.__new__(Batch)
    old.__setstate__(dict(columns=dict(b.columns), per_row=frozenset(["feature", "image"]), _whole=None, filler=False))
    assert old.kinds == b.kinds and old.per_row == b.per_row and old[1:].trim().feature.equal(b.feature[1:])


def test_whole_numbers_of_numpy_are_numbers_and_bools_are_none():
    b = small()
    for cut in (b.cut, b.parts, b.minibatches):
        assert len(cut(np.int64(2))) == 2
        for odd in (True, 2., np.float64(2), "2", None):
            with pytest.raises(
                    ValueError,
                    match=rf"Batch.{cut.__name__}: n={re.escape(repr(odd))}; a whole number, at least 1, is wanted"):
                cut(odd)


def test_what_silently_went_wrong():
    "A copy that shared its columns, a list joined with a tensor, ids that overflowed, a NaN that no comparison sees."
    b = small()
    c = copy.copy(b)
    c["scores"] = torch.zeros(3)
    assert "scores" not in b
    for one, other in (([1, 2, 3], torch.zeros(3)), (torch.zeros(3), [1, 2, 3]),
                       (torch.zeros(3, 4, 2), torch.zeros(3, 4, 5))):
        with pytest.raises(
                ValueError,
                match="Batch.cat: column 'x' is .* in the first batch and .* in another; they cannot be joined"):
            Batch.cat([Batch(x=one), Batch(x=other)])
    unit = torch.tensor([255, 255, 127, 127], dtype=torch.uint8)
    assert [x.tolist() for x in pairs(
        torch.arange(4.), Batch(unit=unit, chosen=torch.tensor([True, False, False, True])))] == [[3, 0], [2, 1]]
    b["temperature"] = torch.tensor([1., torch.nan, 1.])
    with pytest.raises(ValueError, match="row 1 was sampled at nan"): b.with_logprobs(torch.zeros(3, 4), temperature=1.)
    with pytest.raises(ValueError, match="temperature=nan"):
        small().with_logprobs(torch.zeros(3, 4), temperature=torch.nan)
    with pytest.raises(ValueError, match="leaves no column"): b.drop(*b.columns)
    with pytest.raises(TypeError, match="pairs: x is a list"):
        pairs([1., 2.], Batch(unit=unit[:2], chosen=torch.tensor([True, False])))
    with pytest.raises(ValueError, match=r"costs are \[3, 1\], the batch has 3 rows"): b.cut(2, torch.ones(3, 1))
    assert Batch(per_row="feature", tokens=b.tokens, feature=torch.zeros(3, 4)).per_row == {"feature"}
    assert len(b.minibatches(10**12)) == 3


def test_unlike_logprobs_are_refused():
    b = small()
    b["temperature"] = torch.full((3,), .6)
    with pytest.raises(ValueError, match="temperature=1.0, but row 0 was sampled at 0.6"):
        b.with_logprobs(torch.zeros(3, 4), temperature=1.)
    with pytest.raises(ValueError, match="top_p=0.9"): b.with_logprobs(torch.zeros(3, 4), temperature=.6, top_p=.9)
    assert "rollout_logprobs" in b.with_logprobs(torch.zeros(3, 4), temperature=.6) and "rollout_logprobs" not in b


def test_seeds_are_named_not_added():
    assert len({seed_of(a, b) for a in range(20) for b in range(20)}) == 400
    # equal in every process and version
    assert seed_of("x", (1, 2.5), None) == 5357618132437867954 == seed_of("x", [1, torch.tensor(2.5)], None)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("over", ["tokens", "rows", "groups"])
def test_losses_of_parts_add_up_under_every_weighting(over, n):
    "denom=part is enough, also where a group's rows lie in different parts, and where a group has no chosen token."
    g = torch.Generator().manual_seed(n)
    mask = torch.rand(9, 6, generator=g) < .5
    mask[:, 0], mask[:, 1], mask[4] = False, True, False
    b = Batch(mask=mask, group=torch.tensor([5, 5, 5, 5, 1, 3, 3, 8, 5]), i=torch.arange(9))
    x = torch.randn(9, 6, generator=g, dtype=torch.float64, requires_grad=True)
    of = {g: [i for i in range(9) if b.group[i] == g and mask[i].any()] for g in (5, 3, 8)}
    rows = {"tokens": None, "rows": [[i] for i in range(9) if mask[i].any()], "groups": list(of.values())}[over]
    want = x[mask].mean() if rows is None else torch.stack([x[r][mask[r]].mean() for r in rows]).mean()
    parts = b.parts(n)
    total = sum(aggregate(x[p.i], p.mask, over=over, denom=p) for p in parts)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, retain_graph=True)[0] for y in (total, want)), rtol=1e-12,
                               atol=1e-12)
    assert {p.n_groups for p in parts} == {3}


def test_counts_of_bool_columns_are_those_of_the_whole():
    b = Batch(mask=torch.tensor([[0, 1]]*6).bool(), unit=torch.tensor([0, 0, 1, 1, 2, 2]),
              tied=torch.tensor([1, 1, 0, 0, 1, 1]).bool(), marked=torch.ones(6, 2).bool())
    assert [(p.n_tied, p.n_marked, p.n_units) for p in b.parts(3)] == [(2, 6, 3)]*3
    b["n_tied"] = torch.arange(6)
    assert b.n_tied.tolist() == list(range(6))      # a column of that name is the column
    with pytest.raises(AttributeError, match="no Bool column 'right'.*marked"): _ = b.n_right
    with pytest.raises(ValueError, match="denom=b, with a column 'group'"):
        aggregate(torch.ones(1, 2), torch.ones(1, 2).bool(), over="groups", denom=3)
    with pytest.raises(ValueError, match=r"masked_mean: x is \[6\], and of a Batch only"):
        masked_mean(torch.ones(6), None, denom=b)
    with pytest.raises(TypeError, match="has no n_tokens"): masked_mean(torch.ones(6, 2), None, denom="b")
