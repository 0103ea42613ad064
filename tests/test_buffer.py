"Buffer: nothing lost, nothing parted, freshness counted, and a resume that is a continuation (LAWS 20, 25)."
import io
import random
import subprocess
import sys
from itertools import product

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from rlblocks.data.batch import Batch
from rlblocks.data.columns import seed_of
from rlblocks.data.buffer import Buffer
from rlblocks.data.replay import replay_draw
from rlblocks.data.refill import mixed_groups, refill


def rows(groups, *, version=0, seed=0, T=7, **columns):
    g = torch.Generator().manual_seed(seed)
    B, at = len(groups), torch.arange(T)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    real = at < lengths[:, None]
    return Batch(tokens=torch.randint(1, 99, (B, T), generator=g)*real, lengths=lengths,
                 mask=real & (at >= 1) & (torch.rand(B, T, generator=g) > .3), group=torch.tensor(groups),
                 policy_version=torch.full((B,), version), text=[f"{seed}:{i}" for i in range(B)],
                 logprobs=torch.randn(B, T, generator=g, dtype=torch.float64)*real,
                 support=torch.randint(0, 9, (B, T, 3), generator=g, dtype=torch.int32)*real[..., None], **columns)


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
            batch = rows(groups, version=version, seed=rng.randrange(10**6),
                         serial=torch.arange(len(came), len(came) + len(groups)))
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


def test_versions_of_rows_and_of_tokens_join_whichever_came_first():
    def each(groups, version): return rows(groups, version=version)
    def token(groups, version):
        b = rows(groups, seed=9, version=version)
        b["policy_version"] = torch.where(b.mask, b.policy_version[:, None], 0)
        return b
    for first, then in ((each([0, 1], 3), token([2], 5)), (token([2], 5), each([0, 1], 3))):
        buffer = Buffer(max_age=1)
        buffer.add(first)
        buffer.add(then)
        b = buffer.rows()
        want = torch.where(b.group == 2, 5, 3)[:, None].expand_as(b.mask)
        assert b.policy_version.equal(torch.where(b.mask, want, 0))
        assert buffer.evict(4) == 0 and buffer.evict(5) == 2 and buffer.rows().group.tolist() == [2]


def test_a_batch_that_is_refused_leaves_the_versions_that_wait_as_they_were():
    "Also where it has a version of each token, and the rows that wait one of each row."
    buffer, new = Buffer(), rows([0], seed=9)
    buffer.add(rows([0, 1], version=3))
    new["policy_version"] = torch.where(new.mask, 5, 0)
    with pytest.raises(ValueError, match="group 0 is already waiting"): buffer.add(new)
    assert buffer.rows().policy_version.tolist() == [3, 3]


def test_ages_count_steps_of_the_loop():
    buffer = Buffer(max_age=2, per_step=4)
    for group, version in enumerate((0, 4, 8)): buffer.add(rows([group], seed=group, version=version))
    assert buffer.evict(8) == 0 and buffer.evict(12) == 1 and buffer.rows().group.tolist() == [1, 2]


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


def test_an_id_is_free_again_when_its_rows_have_left():
    buffer = Buffer(max_age=0)
    buffer.add(rows([0, 1], version=0))
    buffer.take(1, version=0)
    buffer.add(rows([0]))
    buffer.evict(1)
    buffer.add(rows([0, 1], version=1))
    assert buffer.take(2, version=1).group.tolist() == [0, 1]


def test_a_saved_state_stays_as_it_was():
    buffer, other = Buffer(), Buffer()
    buffer.add(rows([0, 1]))
    state = buffer.state_dict()
    buffer.take(1)
    other.load_state_dict(state)
    other.take(1)
    third = Buffer()
    third.load_state_dict(state)
    assert len(third) == 2 and len(buffer) == len(other) == 1


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
    def held(lengths):
        return int(lengths.sum())*(8 + 1 + 8 + 3*4) + len(lengths)*(8 + 8 + 8) + (len(lengths) + 1)*8 + len(lengths)*7*8
    assert buffer.nbytes == held(batch.lengths)
    buffer.take(60)
    assert buffer.nbytes == held(batch.lengths[60:]) # what has left is no longer there
    buffer.take(4)
    assert buffer.nbytes == 0


@pytest.mark.parametrize("at_once", [1, 7, 512])
def test_overhead_is_small_however_rows_come(at_once):
    "At most 16 bytes a token beyond the columns, tensor objects counted at 1 KiB each; rows of GSM8K's length."
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(512, generator=g)*.36 + 5.14).exp().long().clamp(64, 536)
    real = torch.arange(536) < lengths[:, None]
    batch = Batch(tokens=real.long(), lengths=lengths, mask=real & (torch.arange(536) > 0), logprobs=real.float(),
                  group=torch.arange(512))
    buffer, columns = Buffer(), int(lengths.sum())*(8 + 1 + 4) + 512*16
    for i in range(0, 512, at_once): buffer.add(batch[i:i+at_once])
    objects = 1024*sum(len(s.columns) + 1 for s in buffer.waiting.slabs.values())
    assert buffer.nbytes + objects - columns < 2*int(lengths.sum()) and len(buffer.waiting.slabs) < 12


def test_slabs_that_are_mostly_gone_are_rewritten():
    buffer = Buffer(max_age=0)
    batch = rows(list(range(20)), T=50)
    batch["policy_version"] = torch.tensor([0, 1]*10)
    buffer.add(batch)
    before = buffer.nbytes
    buffer.evict(1)
    assert len(buffer) == 10 and buffer.dropped == {"stale": 10}
    buffer.take(1, version=1) # 9 of 20 live
    assert buffer.nbytes < .6*before
    assert_equal(buffer.take(9, version=1), batch[3::2].trim())


REAL = """
import ctypes, torch
from rlblocks.data.batch import Batch
from rlblocks.data.buffer import Buffer
# bytes of memory that are in use and nobody else's: mapped files do not count, tensors and Python objects do
def held():
    ctypes.CDLL(None).malloc_trim(0)
    return 1024*int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1])
def batch(step):
    g = torch.Generator().manual_seed(step)
    lengths = (torch.randn(512, generator=g)*.9 + 6.5).exp().long().clamp(64, 4096)
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    x = torch.rand(real.shape, generator=g)*real
    return Batch(tokens=torch.randint(1, 150_000, real.shape, generator=g)*real, lengths=lengths,
                 mask=real & (torch.arange(real.shape[1]) > 0), old_logprobs=x, rollout_logprobs=-x, advantages=2*x,
                 group=torch.arange(512)//8 + 64*step, text=[f"answer {i} of step {step}" for i in range(512)])
small = Buffer()
small.add(batch(99))        # everything is imported, the allocator has its arenas
small.take(512)
before, tokens, columns = held(), 0, 0
for step in range(8):
    b = batch(step)
    tokens, columns = tokens + int(b.lengths.sum()), columns + int(b.lengths.sum())*21 + 512*16
    small.add(b)
    del b
print(tokens, columns, held() - before, small.nbytes)
for step in range(8):
    out, want = small.take(512), batch(step).trim()
    for name, x in want.columns.items(): assert out[name] == x if isinstance(x, list) else out[name].equal(x), name
"""


def measured():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", REAL], cwd=ROOT, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    return map(int, run.stdout.split())


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and trims glibc's heap")


@linux
def test_rows_of_real_size_take_their_columns_and_16_bytes_a_token_at_most():
    "4,096 rows, 4 million tokens: what the process grows by, Python objects and texts included."
    tokens, columns, grew, nbytes = measured()
    assert tokens > 3e6 and columns <= nbytes < columns + tokens
    assert .9*columns < grew < columns + 16*tokens


def test_a_column_can_be_added_while_rows_wait():
    buffer = Buffer()
    buffer.add(rows([0, 0, 1], seed=1))
    buffer.add(rows([2, 3], seed=2))
    buffer.take(1)
    waiting = buffer.rows()
    ref = torch.randn(waiting.tokens.shape)*(torch.arange(waiting.width) < waiting.lengths[:, None])
    buffer["ref_logprobs"], buffer["scores"], buffer["note"] = ref, torch.arange(3.), ["a", "b", "c"]
    assert_equal(buffer.take(1), Batch(**waiting.columns, ref_logprobs=ref, scores=torch.arange(3.),
                                       note=["a", "b", "c"])[:1].trim())
    assert len(buffer) == 2 and buffer.rows().note == ["b", "c"]
    with pytest.raises(ValueError, match="column 'ref_logprobs' is missing"): buffer.add(rows([9]))
    with pytest.raises(ValueError, match="column 'scores' has 1 rows, the batch has 2"):
        buffer["scores"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"column 'values' is \[2, 99\], but tokens are \[2, "):
        buffer["values"] = torch.ones(2, 99)
    for name in ("group", "mask", "lengths", "policy_version", "unit"):
        with pytest.raises(ValueError, match=f"'{name}' decides what belongs together"):
            buffer[name] = torch.ones(2, dtype=torch.long)
    rewritten = buffer.rows()
    buffer["scores"] = 2*rewritten.scores
    assert buffer.rows().scores.equal(2*rewritten.scores) and buffer.rows().tokens.equal(rewritten.tokens)
    with pytest.raises(ValueError, match="group 3 is already waiting"):
        buffer.add(rows([3], ref_logprobs=torch.zeros(1, 7), scores=torch.ones(1), note=["d"]))


def test_draws_follow_priorities_and_weights_undo_them():
    priority, sizes = torch.tensor([1., 1., 2., 2., 3., 3.]), torch.tensor([1, 2, 1, 3, 2, 2])
    value = torch.tensor([10., 20., 30., 40., 50., 60.], dtype=torch.float64)
    draws = [replay_draw(priority, sizes, 6, alpha=1., seed=k) for k in range(3000)]
    assert all(sizes[c].sum() >= 6 > sizes[c[:-1]].sum() and len(set(c.tolist())) == len(c) and (0 < q).all()
               and (q <= 1).all() for c, q in draws)
    totals = torch.tensor([[(value[c]/q).sum(), (1/q).sum()] for c, q in draws], dtype=torch.float64).mean(0)
    assert_close(totals, torch.tensor([210., 6.], dtype=torch.float64), rtol=.03, atol=0.)
    first = torch.stack([c[0] for c, _ in draws]).bincount(minlength=6)/3000
    assert_close(first, priority/12, rtol=.15, atol=.0) # the first to come is chosen in proportion
    everything, q = replay_draw(priority, sizes, 11, alpha=1., seed=0)
    assert sorted(everything.tolist()) == list(range(6)) and q.tolist() == [1.]*6
    one, other = replay_draw(priority, sizes, 6, alpha=0.,
                             seed=0), replay_draw(torch.zeros(6), sizes, 6, alpha=0., seed=0)
    assert one[0].equal(other[0]) and one[1].equal(other[1]) # alpha 0: priorities do not count
    last, _ = replay_draw(torch.tensor([0., 1., 1.]), torch.tensor([1, 1, 1]), 3, alpha=1., seed=0)
    assert last[-1] == 0


def test_a_draw_is_what_its_definition_says():
    """Naive: everybody waits an exponential time; the first to come are in; q is the chance to come before the
    others have filled the draw."""
    for seed in range(200):
        rng = random.Random(seed)
        K, n, alpha = rng.randint(1, 7), rng.randint(1, 12), rng.choice([0., .5, 1., 2.])
        priority, sizes = torch.tensor([rng.choice([0., .5, 1., 3.])
                                        for _ in range(K)]), torch.tensor([rng.randint(1, 4) for _ in range(K)])
        chosen, q = replay_draw(priority, sizes, n, alpha=alpha, seed=seed)
        u = torch.rand(K, generator=torch.Generator().manual_seed(seed_of("sample", seed)), dtype=torch.double)
        rate = priority.double()**alpha
        time = [float(-torch.log(1 - a)/r) if r else float("inf") for a, r in zip(u, rate, strict=True)]
        order = sorted(range(K), key=time.__getitem__)
        assert chosen.tolist() == [i for k, i in enumerate(order) if sum(int(sizes[j]) for j in order[:k]) < n]
        for i, p in zip(chosen.tolist(), q.tolist(), strict=True):
            others, rows_, tau = [j for j in order if j != i], 0, float("inf")
            for j in others:
                rows_ += int(sizes[j])
                if rows_ >= n:
                    tau = time[j]
                    break
            assert p == pytest.approx(1. if tau == float("inf") else float(1 - torch.exp(-rate[i]*tau)), abs=1e-9)


def test_of_two_the_likelier_is_drawn_as_its_priority_says():
    "Closed form: of rates a and b the first to come is a/(a+b), and then 1/q is on average 1 for each."
    draws = [replay_draw(torch.tensor([1., 4.]), torch.tensor([1, 1]), 1, alpha=1., seed=k) for k in range(4000)]
    assert sum(int(c[0]) == 1 for c, _ in draws)/4000 == pytest.approx(.8, abs=.02)
    for i in (0, 1): assert sum(1/float(q[0]) for c, q in draws if int(c[0]) == i)/4000 == pytest.approx(1, abs=.15)


def test_prioritised_replay_and_its_resume():
    buffer = Buffer()
    buffer.add(rows([0, 0, 1, 1]), priority=torch.tensor([0., 2., 4., 4.]))
    buffer.add(rows([2]))
    assert buffer.waiting.index["priority"].tolist() == [1., 4., 4.] # the mean of a bundle; a new one gets the highest
    out = buffer.sample(5, seed=1, alpha=1.)
    assert out.replay_weight.tolist() == [1.]*5 # everything was drawn, so all count alike
    buffer.prioritise(out.replay_id, torch.where(out.group == 1, 0., 3.))
    assert buffer.waiting.index["priority"].tolist() == [3., 0., 3.]
    assert 1 not in buffer.sample(3, seed=2, alpha=1.).group.tolist()
    other = resumed(buffer)
    a, b = buffer.sample(1, seed=3, alpha=.5, beta=.4), other.sample(1, seed=3, alpha=.5, beta=.4)
    assert_equal(a, b)
    assert a.replay_weight.max() == 1 and a.replay_weight.dtype == torch.float32
    buffer.take(2)
    state = buffer.state_dict()
    buffer.prioritise(out.replay_id, torch.where(out.group == 0, 9., 7.)) # group 0 has left: passed over
    # what was saved stays as it was
    assert buffer.waiting.index["priority"].tolist() == [7., 7.] and state["index"]["priority"].tolist() == [0., 3.]
    buffer.prioritise(out.replay_id[out.group == 0], torch.tensor([9., 9.]))
    assert buffer.waiting.index["priority"].tolist() == [7., 7.]
    buffer.take(3)
    buffer.prioritise(out.replay_id, torch.full((5,), 7.))
    assert len(buffer) == 0


def test_weights_grow_where_draws_are_rare():
    buffer = Buffer()
    buffer.add(rows(list(range(40))), priority=torch.arange(1., 41.))
    out = buffer.sample(10, seed=0, alpha=1.)
    order = out.group.argsort() # priority ascending: less likely first, all rows of one size
    assert (out.replay_weight[order].diff() < 0).all()
    half = buffer.sample(10, seed=0, alpha=1., beta=.5)
    assert_close(half.replay_weight, out.replay_weight.sqrt())


def test_mixed_groups():
    nan = float("nan")
    scores, group = torch.tensor([1., 0., 1., 1., nan, 1., nan, nan, 2., -1.,
                                  float("inf")]), torch.tensor([5, 5, -3, -3, -3, 8, 9, 9, 10, 10, 11])
    want = [True, True, False, False, False, False, False, False, True, True, False]
    assert mixed_groups(scores, group).tolist() == want
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    assert mixed_groups(scores[order], group[order]).tolist() == [want[i] for i in order]


@pytest.mark.parametrize("p, G, share", [(.18, 2, .2952), (.18, 8, 1 - .18**8 - .82**8), (.5, 4, 7/8)])
def test_the_share_of_mixed_groups(p, G, share):
    "LAWS 13: with p = 0.18 a group of 2 is wasted 70 times in 100, one of 8 20 times; every outcome enumerated."
    outcomes = list(product([0., 1.], repeat=G))
    mixed = mixed_groups(torch.tensor(outcomes).flatten(), torch.arange(len(outcomes)).repeat_interleave(G)).view(-1, G)
    assert mixed.all(1).equal(mixed.any(1))
    assert sum(p**sum(x)*(1-p)**(G-sum(x))
               for x, m in zip(outcomes, mixed[:, 0].tolist(), strict=True) if m) == pytest.approx(share)


def test_nothing_but_flat_groups_stops_with_numbers():
    "LAWS 13: a clean stop, after exactly the calls that were allowed; what waited before still does."
    buffer, calls = Buffer(), []
    buffer.add(rows([0, 0]))
    def more(missing):
        calls.append(missing)
        return rows([4*len(calls) + k for k in range(4) for _ in range(2)], seed=len(calls), scores=torch.ones(8))
    buffer.take(2)
    with pytest.raises(ValueError, match=(
            "16 rows were asked for, 0 are there after 5 calls, in which 0 of 20 groups could be used, 40 dropped as "
            "filtered")):
        refill(buffer, more, 16, max_calls=5)
    assert calls == [16]*5 and (buffer.offered, buffer.accepted) == (21, 1) and len(buffer) == 0
    assert "1 of 21 bundles accepted" in repr(buffer) and "1 of 21 bundles accepted" in repr(resumed(buffer))


def test_groups_that_grew_stale_while_others_came_are_asked_for_again():
    buffer, asked = Buffer(max_age=1), []
    def more(missing): # the engine that sampled has not been updated for a while
        asked.append(missing)
        return rows([len(asked)]*2, seed=len(asked), version=1 if len(asked) < 3 else 5, scores=torch.tensor([0., 1.]))
    assert refill(buffer, more, 2, version=5).group.tolist() == [3, 3] and asked == [2, 2, 2]
    assert buffer.dropped == {"stale": 4}
    with pytest.raises(TypeError, match="gave a list; a scored Batch"): refill(buffer, lambda missing: [], 2, version=5)


def test_refill_loses_no_accepted_group():
    "DAPO's dynamic sampling: whatever was accepted is handed out once, over steps, failures and resumes."
    rng, accepted, left, serial = random.Random(0), [], [], [0]
    def more(missing):
        assert missing > 0
        groups = [serial[0] + k for k in range(rng.randint(1, 5)) for _ in range(4)]
        serial[0] += 5
        batch = rows(groups, seed=serial[0])
        flat = {g: rng.random() < .6 for g in groups}
        batch["scores"] = torch.tensor([0. if flat[g] else float(i % 4 == 0) for i, g in enumerate(groups)])
        accepted.extend(g for g in dict.fromkeys(groups) if not flat[g])
        return batch
    buffer, failures = Buffer(), 0
    for step in range(60):
        try: left += [refill(buffer, more, 12, max_calls=3)]
        except ValueError as e:
            failures += 1
            assert "they stay in the buffer" in str(e) and f"{len(buffer)} are there after 3 calls" in str(e)
        if step % 7 == 0: buffer = resumed(buffer)
    assert 0 < failures < 60 and all(len(b) >= 12 for b in left)
    out = [g for b in left for g in b.group.tolist()] + (buffer.rows().group.tolist() if len(buffer) else [])
    assert out == [g for g in accepted for _ in range(4)] and buffer.dropped["filtered"] > 0


def test_refill_knows_what_is_stale():
    buffer = Buffer(max_age=1)
    buffer.add(rows([0, 0], version=1))
    def more(missing):
        assert missing == 2
        return rows([1, 1], version=5, scores=torch.tensor([0., 1.]))
    assert refill(buffer, more, 2, version=5).group.tolist() == [1, 1] and buffer.dropped == {"stale": 2}


def test_bundles_stay_if_any_of_their_rows_is_wanted():
    buffer = Buffer()
    batch = rows([0, 1, 2])
    batch["unit"] = torch.tensor([7, 7, 8]) # groups 0 and 1 share a unit
    buffer.add(batch, keep=torch.tensor([False, True, False]))
    assert buffer.take(2).group.tolist() == [0, 1] and buffer.dropped == {"filtered": 1}
    buffer.add(rows([2]), keep=torch.tensor([False])) # nothing left to add; its id is free again
    buffer.add(rows([2]))
    assert len(buffer) == 1


def test_fillers_and_empty_batches_add_nothing():
    buffer = Buffer()
    for part in rows([0, 1]).parts(3): buffer.add(part)
    assert len(buffer) == 2
    buffer.add(rows([2, 2])[[]])
    assert len(buffer) == 2


@pytest.mark.parametrize("call, text", [
    (lambda b: b.take(3, version=0),
     "Buffer.take: 3 rows were asked for, 2 are there; add more " "rows, or ask for fewer"),
    (lambda b: b.sample(3, seed=0, version=0), "Buffer.sample: 3 rows were asked for, 2 are there"),
    (lambda b: b.take(0, version=0), "Buffer.take: n=0; a whole number, at least 1, is wanted"),
    (lambda b: b.take(2), "max_age is 1, so freshness must be known; pass version=…"),
    (lambda b: b.add(rows([1, 0])), "group 0 is already waiting"),
    (lambda b: b.add(rows([1]).drop("text")), "column 'text' is missing, in the rows that wait it is " "['list']"),
    (lambda b: b.add(rows([1], scores=torch.ones(1))), "column 'scores' is ['row', 'torch.float32'], in the rows "
     "that wait it is missing"), (lambda b: b.add(rows([1]*5)), "a group has 5 rows, max_rows is 4"),
    (lambda b: b.add(rows([1]).drop("policy_version")), "max_age needs the column 'policy_version'"),
    (lambda b: b.add(rows([1]).drop("lengths")), "per-token columns without 'lengths'"),
    (lambda b: b.add(rows([1]), keep=torch.ones(2, dtype=torch.bool)), "Buffer.add: keep is [2], the batch has 1 rows"),
    (lambda b: b.add(rows([1]), priority=torch.tensor([-1.])), "Buffer.add: a priority is negative"),
    (lambda b: b.sample(2, seed=0, version=0, alpha=-1), "Buffer.sample: alpha is -1, beta is 1.0; 0 or more is "
     "wanted"), (lambda b: b.load_state_dict(dict(rows=3)),
                 "Buffer: the state has rows; slabs, index, layout, " "dropped, next, offered, accepted are wanted"),
    (lambda b: b.prioritise(torch.tensor([0]), torch.tensor([float("nan")])),
     "Buffer.prioritise: ids is [1], priority is [1]"), (lambda b: Buffer().rows(), "Buffer.rows: no rows wait"),
    (lambda b: mixed_groups(torch.ones(2), torch.ones(3, dtype=torch.long)),
     "mixed_groups: scores is [2], group is [3]"),
    (lambda b: Buffer(max_age=-1), "Buffer: max_age=-1; a whole number, 0 or more, is wanted"),
    (lambda b: Buffer(max_rows=0), "Buffer: max_rows=0; a whole number"),])
def test_errors_say_what_came_and_leave_the_buffer_as_it_was(call, text):
    buffer = Buffer(max_age=1, max_rows=4)
    buffer.add(rows([0, 0]))
    with pytest.raises(ValueError) as e: call(buffer)
    assert text in str(e.value) and len(buffer) == 2 and not buffer.dropped
