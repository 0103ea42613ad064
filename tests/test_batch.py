"Batch: columns that fit, wholes and parts, units that stay together."
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from rlblocks import Batch, pairs, seed_of
from tiny import rows
from torch.testing import assert_close


def small(): return Batch(tokens=torch.arange(12).view(3, 4), lengths=torch.tensor([4, 2, 3]), mask=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]).bool(), name=["a", "b", "c"])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 20])
def test_losses_of_parts_add_up_to_the_whole(n):
    b = rows()
    parts = b.parts(n)
    assert len(parts) == n and all((p.n_tokens, p.n_rows, p.n_units) == (b.n_tokens, b.n_rows, b.n_units) for p in parts)
    whole = torch.where(b.mask, b.advantages, 0.).sum()/b.n_tokens
    assert_close(sum(torch.where(p.mask, p.advantages, 0.).sum()/p.n_tokens for p in parts), whole, rtol=1e-12, atol=1e-14)
    assert sorted(i for p in parts if not p.filler for i in p.row.tolist()) == list(range(16))


def test_local_means_do_not_add_up():
    "LAWS 1: rows of 2 and 6 tokens, loss 1 on the short one: 0.25 in any cut, where the mean of local means says 0.5."
    mask = torch.tensor([[0]+[1]*2+[0]*4, [0]+[1]*6]).bool()
    b = Batch(tokens=torch.zeros(2, 7, dtype=torch.long), lengths=torch.tensor([3, 7]), mask=mask, x=torch.tensor([[1.]*7, [0.]*7]))
    parts = b.parts(2)
    assert sum(float(torch.where(p.mask, p.x, 0.).sum())/p.n_tokens for p in parts) == .25
    assert sum(float(p.x[p.mask].mean()) for p in parts)/2 == .5


def test_a_part_of_a_part_remembers_the_first_whole():
    b = rows()
    part = b.parts(2)[0].part([0, 1])
    assert part.n_tokens == b.n_tokens and len(part) == 2
    assert len(part.whole.siblings) == 2


def test_fillers_are_weightless_copies_of_a_real_unit():
    b = small()
    b["unit"] = torch.tensor([7, 7, 9])
    fillers = [p for p in b.parts(4) if p.filler]
    assert len(fillers) == 2 and all(p.unit.tolist() == [9] and not p.mask.any() and p.n_rows == 3 for p in fillers) # 3 tokens, where unit 7 has 6
    assert b.mask.any() and b.part([]).unit.tolist() == [9]


@pytest.mark.parametrize("n", [1, 3, 8, 20])
@pytest.mark.parametrize("unit", [False, True])
def test_what_parts_answer_goes_back_where_it_came_from(n, unit):
    "Every column, lists too, comes back in the order of the rows; each can be made alone; units and group ids are what they were."
    b = rows()
    b["name"], b["group"] = [dict(i=i) for i in range(16)], torch.arange(16) % 5
    if unit: b["unit"] = torch.arange(16) % 6
    cuts, parts = b.cut(n), b.parts(n)
    assert sorted(sum(cuts, [])) == list(range(16)) and all(c == sorted(c) for c in cuts)
    for k, part in enumerate(parts):
        share = b.part(cuts[k], b.siblings(cuts))
        assert share.row.tolist() == part.row.tolist() and share.filler == part.filler == (not cuts[k]) and share.whole.n_tokens == part.whole.n_tokens == b.n_tokens
        assert part.filler or part.row.tolist() == cuts[k]
        assert [x[0].tolist() for x in part.whole.siblings] == [p.lengths.tolist() for p in parts] # everybody knows what the others have
    back = Batch.cat(parts)[torch.tensor(sum(cuts, [])).argsort()]
    for name, x in b.columns.items(): assert back[name] == x if isinstance(x, list) else back[name].equal(x), name


def test_a_filler_has_a_token_if_any_row_has():
    b = Batch(tokens=torch.ones(4, 7, dtype=torch.long), lengths=torch.tensor([5, 0, 1, 7]), mask=torch.zeros(4, 7, dtype=torch.bool))
    assert [p.lengths.tolist() for p in b.parts(6) if p.filler] == [[1], [1]]
    b = Batch(tokens=torch.ones(4, 7, dtype=torch.long), lengths=torch.tensor([5, 0, 0, 7]), unit=torch.tensor([0, 0, 1, 2]))
    assert b.part([]).lengths.tolist() == [5, 0]
    assert b[[2]].part([]).lengths.tolist() == [0]


def test_parts_are_balanced_by_tokens_or_by_cost():
    lengths = torch.tensor([800] + [100]*8)
    b = Batch(tokens=torch.zeros(9, 800, dtype=torch.long), lengths=lengths, mask=(torch.arange(800) >= 1) & (torch.arange(800) < lengths[:, None]))
    assert [int(p.lengths.sum()) for p in b.parts(2)] == [800, 800]
    assert sorted(len(p) for p in b.parts(3, lengths.double()**2)) == [1, 4, 4] and b.cut(2, [1.]*9) != b.cut(2)
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 500, (256,), generator=g)
    b = Batch(tokens=torch.zeros(256, 500, dtype=torch.long), lengths=lengths, mask=(torch.arange(500) >= 1) & (torch.arange(500) < lengths[:, None]))
    assert max(int(p.lengths.sum()) for p in b.parts(8)) <= 1.001*int(lengths.sum())/8
    with pytest.raises(ValueError, match="costs are 3, the batch has 256 rows"): b.parts(2, [1., 2., 3.])


def test_rows_without_a_mask_are_cut_too():
    b = Batch(tokens=torch.ones(3, 4, dtype=torch.long), lengths=torch.tensor([4, 1, 2]))
    parts = b.parts(4)
    assert [p.lengths.tolist() for p in parts if not p.filler] == [[4], [2], [1]] and parts[3].filler and parts[3].lengths.tolist() == [1] and parts[0].n_tokens == 0
    assert len(Batch(x=torch.ones(3)).parts(2)) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cut_holds_one_share_at_a_time():
    "LAWS 39: a batch goes out in 8 shares and a column comes back, and the peak stays under twice the batch; rows that are sent ragged take what exists, 13 bytes a token."
    code = """
import torch
from rlblocks.batch import Batch
from rlblocks.ragged import ragged
rss = lambda: 1024*int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) # ru_maxrss would begin with the parent's
g = torch.Generator().manual_seed(0)
B, T = 1024, 8192
lengths = torch.randint(T//2, T + 1, (B,), generator=g)
mask = torch.zeros(B, T, dtype=torch.bool)
for i, n in enumerate(lengths.tolist()): mask[i, 1:n] = True
b = Batch(tokens=torch.ones(B, T, dtype=torch.long), lengths=lengths, mask=mask, old_logprobs=torch.ones(B, T))
held = sum(x.nbytes for x in b.columns.values())
b.part([0, 1])                                  # allocator and imports
before, sent, cuts, answers = rss(), 0, b.cut(8), []
siblings = b.siblings(cuts)
for k in range(8):
    share = b.part(cuts[k], siblings)
    flat = ragged(share)
    sent += flat.nbytes
    answers.append(share.old_logprobs + share.row if "row" in share else share.old_logprobs.clone())
    del share, flat
b["ref_logprobs"] = torch.cat(answers)[torch.tensor(sum(cuts, [])).argsort()]
assert b.ref_logprobs.equal(b.old_logprobs)
print(held, rss() - before, sent/int(lengths.sum()))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    held, grew, a_token = map(float, run.stdout.split())
    assert 0 < grew < held and a_token < 16


def test_minibatches_are_wholes_of_their_own_and_shuffled_by_name():
    b = rows()
    minis = b.minibatches(3, seed=(0, 4))
    assert sum(m.n_tokens for m in minis) == b.n_tokens and [len(m) for m in minis] == [6, 5, 5]
    assert [m.row.tolist() for m in b.minibatches(3, seed=(0, 4))] == [m.row.tolist() for m in minis] != [m.row.tolist() for m in b.minibatches(3, seed=(0, 5))]
    assert len(b[:2].minibatches(3)) == 2
    with pytest.raises(ValueError, match="needs a whole"): b.parts(2)[0].minibatches(2)


@pytest.mark.parametrize("unit", [None, 2, 3])
def test_minibatches_have_as_many_units_and_may_part_groups(unit):
    "Equal are units, to one; tokens are as they fall; groups are parted, since what depends on them was made on the whole."
    b = rows()
    b["group"] = torch.arange(16)//4
    if unit: b["unit"] = torch.arange(16)//unit
    counts, parted = [], 0
    for seed in range(20):
        minis = b.minibatches(3, seed=seed)
        counts = [len(m.unit_rows()) for m in minis]
        assert max(counts) - min(counts) <= 1 and sum(counts) == len(b.unit_rows())
        assert sorted(i for m in minis for i in m.row.tolist()) == list(range(16)) and all(m._whole is None and m.n_tokens == int(m.mask.sum()) for m in minis)
        parted += sum(len(set(m.group.tolist())) for m in minis) > 4
    assert parted


def test_units_are_never_parted():
    b = rows()
    b["unit"] = torch.arange(16)//2
    for cut in (b.parts(3), b.minibatches(5, seed=1), [b.parts(2)[0].part(r) for r in b.parts(2)[0].cut(3)]):
        seen = [set(p.unit.tolist()) for p in cut if not p.filler]
        assert sum(map(len, seen)) == len(set.union(*seen))
    with pytest.raises(ValueError, match="parts unit 0"): b[1:]
    assert len(b[2:4]) == 2 and len(b.drop("unit")[1:]) == 15


def test_pairs_side_by_side():
    b = small()[[0, 1, 2, 0]]
    b["unit"], b["chosen"] = torch.tensor([5, 2, 2, 5]), torch.tensor([False, True, False, True])
    assert [x.tolist() for x in pairs(torch.tensor([1., 2., 3., 4.]), b)] == [[2., 4.], [3., 1.]]
    b["chosen"] = torch.tensor([True, True, False, True])
    with pytest.raises(ValueError, match="exactly one chosen"): pairs(torch.zeros(4), b)
    b["chosen"] = torch.tensor([False, True, False, True])
    b["mask"] = b.mask & (b.unit == 2)[:, None]
    assert [x.tolist() for x in pairs(torch.tensor([1., 2., 3., 4.]), b)] == [[2.], [3.]] and b.n_units == 1       # what n_units does not count is not there
    b["chosen"] = torch.tensor([True, True, False, True])
    with pytest.raises(ValueError, match="x is \\[3\\]"): pairs(torch.zeros(3), b)


def test_cat_pads_with_nothing_and_refuses_to_lose_columns():
    a, b = small(), small()[[1]].trim()
    assert b.width == 2
    both = Batch.cat([a, b])
    assert both.tokens[3].tolist() == [4, 5, 0, 0] and both.mask[3].tolist() == [False, True, False, False] and both.name == ["a", "b", "c", "b"]
    assert both._whole is None and both.n_rows == 4
    b["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="extra"): Batch.cat([a, b])


def test_selection_makes_a_new_whole():
    b = small()
    assert b[torch.tensor([True, False, True])].name == ["a", "c"] and b[[2, 0]].name == ["c", "a"] and b[1].name == ["b"] and b[:2].n_tokens == 4
    part = b.parts(3)[1]
    assert part.n_tokens == 5 and part[:1].n_tokens == int(part.mask.sum())
    assert len(b[[]]) == 0 and b[[]].n_tokens == 0


def test_pickles_and_moves_whole():
    part = rows().parts(3)[1]
    again = pickle.loads(pickle.dumps(part)).to("cpu")
    assert again.n_tokens == part.n_tokens and again.columns.keys() == part.columns.keys() and not again.filler


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


def test_unlike_logprobs_are_refused():
    b = small()
    b["temperature"] = torch.full((3,), .6)
    with pytest.raises(ValueError, match="temperature=1.0, but row 0 was sampled at 0.6"): b.with_logprobs(torch.zeros(3, 4), temperature=1.)
    with pytest.raises(ValueError, match="top_p=0.9"): b.with_logprobs(torch.zeros(3, 4), temperature=.6, top_p=.9)
    assert "rollout_logprobs" in b.with_logprobs(torch.zeros(3, 4), temperature=.6) and "rollout_logprobs" not in b


def test_seeds_are_named_not_added():
    assert len({seed_of(a, b) for a in range(20) for b in range(20)}) == 400
    assert seed_of("x", (1, 2.5), None) == 5357618132437867954 == seed_of("x", [1, torch.tensor(2.5)], None)   # equal in every process and version
