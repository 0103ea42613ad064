"Buffer: nothing lost, nothing parted, freshness counted, and a resume that is a continuation (LAWS 20, 25)."
import io
import random

import pytest
import torch
from torch.testing import assert_close

from rlblocks.batch import Batch
from rlblocks.buffer import Buffer


def rows(groups, *, version=0, seed=0, T=7, **columns):
    g = torch.Generator().manual_seed(seed)
    B, at = len(groups), torch.arange(T)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    real = at < lengths[:, None]
    return Batch(tokens=torch.randint(1, 99, (B, T), generator=g)*real, lengths=lengths, mask=real & (at >= 1) & (torch.rand(B, T, generator=g) > .3),
                 group=torch.tensor(groups), policy_version=torch.full((B,), version), text=[f"{seed}:{i}" for i in range(B)],
                 logprobs=torch.randn(B, T, generator=g, dtype=torch.float64)*real, support=torch.randint(0, 9, (B, T, 3), generator=g, dtype=torch.int32)*real[..., None], **columns)


def resumed(buffer):
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    new = Buffer(max_age=buffer.max_age, max_rows=buffer.max_rows)
    new.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return new


def assert_equal(a, b):
    assert list(a.columns) == list(b.columns) and a.per_row == b.per_row and len(a) == len(b)
    for name, x in a.columns.items():
        if isinstance(x, list): assert x == b[name]
        else: assert x.dtype == b[name].dtype and x.equal(b[name]), name


def test_rows_come_back_as_they_went_in():
    batch = Batch(per_row=["feature"], **rows([0, 0, 1, 2, 2, 2]).columns, feature=torch.randn(6, 2, 5))
    buffer = Buffer()
    buffer.add(batch)
    assert len(buffer) == 6 and buffer.n_tokens == batch.n_tokens
    out = buffer.take(6)
    assert_equal(out, batch.trim())
    assert len(buffer) == 0 and out._whole is None


def test_a_batch_without_tokens_waits_too():
    buffer = Buffer()
    buffer.add(Batch(scores=torch.tensor([1., 2.]), text=["a", "b"]))
    assert buffer.n_tokens == 0 and buffer.take(1).text == ["a"] and buffer.take(1).scores.tolist() == [2.]


def test_groups_and_units_leave_whole_and_in_order():
    batch = rows([5, 9, 7, 9, 3])
    batch["unit"] = torch.tensor([1, 2, 3, 1, 4]) # rows 0, 3 share a unit, 1, 3 a group
    buffer = Buffer()
    buffer.add(batch)
    assert buffer.take(1).text == ["0:0", "0:1", "0:3"]
    assert buffer.take(1).text == ["0:2"] and buffer.take(1).text == ["0:4"]


def test_nothing_is_lost_or_parted_in_random_use():
    rng = random.Random(0)
    for _ in range(100):
        buffer = Buffer(max_age=rng.choice([None, 0, 2]), max_rows=rng.choice([None, 12]))
        came, left, group = {}, [], 0
        for version in range(6):
            groups = [group + rng.randrange(4) for _ in range(rng.randint(1, 9))] # interleaved, ragged
            group += 4
            batch = rows(groups, version=version, seed=rng.randrange(10**6), serial=torch.arange(len(came), len(came) + len(groups)))
            for i, s in enumerate(batch.serial.tolist()): came[s] = batch[[i]].trim()
            buffer.add(batch)
            assert buffer.max_rows is None or len(buffer) <= buffer.max_rows
            if rng.random() < .3: buffer = resumed(buffer)
            buffer.evict(version)
            if len(buffer): left.append(buffer.take(rng.randint(1, len(buffer)), version=version))
        serials = [s for b in left for s in b.serial.tolist()]
        groups = [set(b.group.tolist()) for b in left]
        assert len(serials) == len(set(serials)) and sum(map(len, groups)) == len(set().union(*groups))
        assert len(serials) + len(buffer) + sum(buffer.dropped.values()) == len(came)
        for b in left:
            for i, s in enumerate(b.serial.tolist()): assert_equal(b[[i]].trim(), came[s])


def test_stale_groups_go_whole_and_are_counted():
    buffer = Buffer(max_age=2)
    old = rows([0, 0, 1])
    old["policy_version"] = torch.tensor([3, 6, 6])
    buffer.add(old)
    assert buffer.evict(5) == 0 # 3 is two versions old: fresh
    assert buffer.evict(6) == 2 and buffer.dropped == {"stale": 2} and len(buffer) == 1
    assert buffer.take(1, version=8).group.tolist() == [1]
    assert "2 dropped as stale" in repr(buffer)


def test_age_in_flight_is_that_of_the_oldest_chosen_token():
    batch = rows([0, 1, 2])
    batch["lengths"] = torch.tensor([7, 4, 7])
    batch["mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0], [0]*7]).bool()
    batch["policy_version"] = torch.tensor([[0, 0, 7, 7, 8, 8, 8], [0, 0, 6, 8, 0, 0, 0], [0]*7])
    buffer = Buffer(max_age=1)
    buffer.add(batch)
    assert buffer.evict(8) == 1
    assert buffer.take(2, version=8).group.tolist() == [0, 2] # nobody chose anything in row 2: it cannot be stale


def test_a_draw_is_named_by_its_seed_and_repeats_nothing():
    buffer = Buffer()
    buffer.add(rows([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    a, b, c = (buffer.sample(5, seed=s) for s in ((0, 1), (0, 1), (0, 2)))
    assert_equal(a, b)
    assert a.group.tolist() != c.group.tolist() and len(a) == 6 and len(set(a.text)) == 6 and len(buffer) == 10
    assert sorted(buffer.sample(10, seed=0).text) == sorted(buffer.take(10).text)


def test_resume_is_a_continuation():
    "LAWS 20: fresh, taken, drawn and dropped as if there had been no break."
    buffer = Buffer(max_age=1, max_rows=9)
    for v in range(3): buffer.add(rows([2*v, 2*v, 2*v + 1], version=v, seed=v))
    buffer.add(rows([7, 7], version=3))
    other = resumed(buffer)
    assert other.dropped == buffer.dropped == {"full": 2} and len(other) == len(buffer)
    assert_equal(buffer.sample(3, seed=4, version=2), other.sample(3, seed=4, version=2))
    assert_equal(buffer.take(3, version=3), other.take(3, version=3))
    assert other.dropped == buffer.dropped == {"full": 2, "stale": 4} and repr(buffer) == repr(other)
    with pytest.raises(ValueError): other.add(rows([7]))


def test_a_saved_state_stays_as_it_was():
    buffer, other = Buffer(), Buffer()
    buffer.add(rows([0, 1]))
    state = buffer.state_dict()
    buffer.take(1)
    other.load_state_dict(state)
    other.take(1)
    assert len(state["bundles"]) == 2 and len(buffer) == len(other) == 1


def test_the_buffer_shares_no_memory_with_what_comes_and_goes():
    batch = rows([0, 1])
    batch["logprobs"] = batch.logprobs.clone().requires_grad_()
    buffer, before = Buffer(), batch.tokens.clone()
    buffer.add(batch)
    batch.tokens.zero_()
    drawn = buffer.sample(2, seed=0)
    assert not drawn.logprobs.requires_grad
    drawn.tokens.zero_()
    assert_close(buffer.take(2).tokens, before[:, :int(batch.lengths.max())])


def test_memory_is_that_of_the_real_tokens():
    batch = rows(list(range(64)), T=500)
    buffer = Buffer()
    buffer.add(batch)
    def held():
        tensors = [x for b in buffer._held for x in b["columns"].values() if isinstance(x, torch.Tensor)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    assert held() == int(batch.lengths.sum())*(8 + 1 + 8 + 3*4) + 64*(8 + 8 + 8)
    buffer.take(60)
    assert held() == int(batch.lengths[60:].sum())*(8 + 1 + 8 + 3*4) + 4*(8 + 8 + 8)


def test_fillers_and_empty_batches_add_nothing():
    buffer = Buffer()
    for part in rows([0, 1]).parts(3): buffer.add(part)
    assert len(buffer) == 2
    buffer.add(rows([2, 2])[[]])
    assert len(buffer) == 2


@pytest.mark.parametrize("call, text", [
    (lambda b: b.take(3, version=0), "Buffer.take: 3 rows were asked for, 2 are there; add more rows, or ask for fewer"),
    (lambda b: b.sample(3, seed=0, version=0), "Buffer.sample: 3 rows were asked for, 2 are there"),
    (lambda b: b.take(0, version=0), "Buffer.take: 0 rows were asked for; at least 1 is wanted"),
    (lambda b: b.take(2), "max_age is 1, so freshness must be known; pass version=…"),
    (lambda b: b.add(rows([1, 0])), "group 0 is already waiting"),
    (lambda b: b.add(rows([1]).drop("text")), "column 'text' is missing, in the rows that wait it is ['list']"),
    (lambda b: b.add(rows([1], scores=torch.ones(1))), "column 'scores' is ['row', 'torch.float32'], in the rows that wait it is missing"),
    (lambda b: b.add(rows([1]*5)), "a group of 5 rows came, max_rows is 4"),
    (lambda b: b.add(rows([1]).drop("policy_version")), "max_age needs the column 'policy_version'"),
    (lambda b: b.add(rows([1]).drop("lengths")), "per-token columns without 'lengths'"),
    (lambda b: Buffer(max_age=-1), "max_age is -1"),
    (lambda b: Buffer(max_rows=0), "max_rows is 0"),
])
def test_errors_say_what_came_and_leave_the_buffer_as_it_was(call, text):
    buffer = Buffer(max_age=1, max_rows=4)
    buffer.add(rows([0, 0]))
    with pytest.raises(ValueError) as e: call(buffer)
    assert text in str(e.value) and len(buffer) == 2 and not buffer.dropped
