"Batch: columns that fit, wholes and parts, units that stay together."
import pickle

import pytest
import torch
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
    assert len(fillers) == 2 and all(p.unit.tolist() == [7, 7] and not p.mask.any() and p.n_rows == 3 for p in fillers)
    assert b.mask.any()


def test_minibatches_are_wholes_of_their_own_and_shuffled_by_name():
    b = rows()
    minis = b.minibatches(3, seed=(0, 4))
    assert sum(m.n_tokens for m in minis) == b.n_tokens and [len(m) for m in minis] == [6, 5, 5]
    assert [m.row.tolist() for m in b.minibatches(3, seed=(0, 4))] == [m.row.tolist() for m in minis] != [m.row.tolist() for m in b.minibatches(3, seed=(0, 5))]
    assert len(b[:2].minibatches(3)) == 2
    with pytest.raises(ValueError, match="needs a whole"): b.parts(2)[0].minibatches(2)


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
    ("unit", torch.zeros(3), TypeError, "integer ids"),
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
