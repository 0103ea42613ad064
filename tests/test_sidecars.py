"""Columns that travel beside the tokens (routed experts, media, ids of confined sampling) stay with their row and their
token through all that moves rows.

Every entry says whose it is: a per-token one its row and position, a per-row one its row. `at_home` reads them back."""
import pickle

import pytest
import torch

from rlblocks import Batch, Buffer, Policy, Rollout, pack, unpack
from rlblocks.placement.place import Call
from rlblocks.data.ragged import from_arrow, ragged, to_arrow
from tiny import model, prompts, reach

LAYERS, K = 3, 2


def carrying(sizes=(4, 4, 3, 1), prompt=10, answer=9, seed=0):
    "Groups of `sizes` rows with a common prompt, rows mixed, and a sidecar of every kind."
    g, B, T = torch.Generator().manual_seed(seed), sum(sizes), prompt + answer
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(B, generator=g)]
    lengths, at, row = prompt + torch.randint(0, answer + 1, (B,), generator=g), torch.arange(T), torch.arange(B)
    tokens = torch.randint(2, 32, (B, T), generator=g)
    tokens[:, :prompt] = torch.randint(2, 32, (len(sizes), prompt), generator=g)[group]
    real = at < lengths[:, None]
    b = Batch(tokens=tokens*real, lengths=lengths, mask=real & (at >= prompt), group=group, row=row,
              policy_version=torch.zeros(B, dtype=torch.long), per_row=["pixels", "boxes"],
              # [B, T] by its shape, of the row by its name
              pixels=row[:, None, None].float().expand(B, 3, 4).clone(), boxes=row[:, None].expand(B, T).clone(),
              images=[torch.full((1 + i % 3, 2), float(i)) for i in range(B)],
              sound=[None if i % 2 else dict(rate=i) for i in range(B)], text=[f"row {i}" for i in range(B)])
    for name, dtype in dict(routing=torch.int16, support=torch.int32, weights=torch.bfloat16).items():
        b[name] = (said(b)*real[..., None, None]).to(dtype)
    b["seen"] = (said(b)[..., 0, 0] % 2 == 0) & real
    return b


def said(b): # `[B, T, LAYERS, K]`: what the sidecar of a row's token holds; the prompt's is the group's
    at = torch.arange(b.width)
    whose = torch.where(at < 10, 100 + b.group[:, None], b.row[:, None])
    return (whose*20 + at)[..., None, None] + torch.arange(LAYERS*K).view(LAYERS, K)


def at_home(b):
    "Every entry of every sidecar is that of its row and token, and padding holds nothing."
    real = torch.arange(b.width) < b.lengths[:, None]
    for name in ("routing", "support", "weights"):
        assert b[name].shape[2:] == (LAYERS,
                                     K) and b[name].equal((said(b)*real[..., None, None]).to(b[name].dtype)), name
    assert b.seen.equal((said(b)[..., 0, 0] % 2 == 0) & real) and b.seen.dtype == torch.bool
    assert b.pixels.equal(b.row[:, None, None].float().expand(len(b), 3, 4))
    assert b.boxes.equal(b.row[:, None].expand_as(b.boxes)) and {"pixels", "boxes"} <= b.per_row
    for i, images, sound, text in zip(b.row.tolist(), b.images, b.sound, b.text, strict=True):
        assert images.equal(torch.full((1 + i % 3, 2), float(i))) and sound == (None if i % 2 else dict(rate=i))
        assert text == f"row {i}"
    return b


def rows_of(*batches): return sorted(i for b in batches for i in b.row.tolist())


def test_what_is_out_of_place_is_seen():
    b = at_home(carrying())
    for name in ("routing", "support", "weights", "seen", "pixels", "boxes"):
        wrong = pickle.loads(pickle.dumps(b))
        wrong[name] = wrong[name].roll(1, 0)
        with pytest.raises(AssertionError): at_home(wrong)
    wrong = pickle.loads(pickle.dumps(b))
    wrong["routing"] = wrong.routing.roll(1, 1)
    with pytest.raises(AssertionError): at_home(wrong)


@pytest.mark.parametrize("shared", [False, True])
def test_packed_and_back(shared):
    b = carrying()
    p = pack(b.tokens, b.lengths, b.group if shared else None)
    assert (len(p.tokens) < int(b.lengths.sum())) == shared
    for name in ("routing", "support", "weights", "seen"):
        flat = p.take(b[name])
        assert flat.shape == (len(p.tokens), *b[name].shape[2:]) and unpack(flat, p).equal(b[name])
    assert p.take(b.routing)[:, 0, 0].equal(said(b)[p.row_ids, p.position_ids, 0, 0].short())
    assert [b.text[i] for i in p.row_ids.tolist()] == [f"row {i}" for i in b.row[p.row_ids].tolist()]
    assert b.pixels[p.row_ids][:, 0, 0].equal(b.row[p.row_ids].float())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 15])
@pytest.mark.parametrize("unit", [False, True])
def test_cut_joined_dealt_and_shuffled(n, unit):
    b = carrying()
    if unit: b["unit"] = torch.arange(12) % 5
    for batches in (b.parts(n), b.minibatches(n, seed=n), b.minibatches(n, seed=n, keep_groups=True)):
        real = [at_home(x.trim()) for x in batches if not x.filler]
        assert rows_of(*real) == list(range(12)) and rows_of(at_home(Batch.cat(real))) == list(range(12))
        for x in batches:
            if not x.filler: assert rows_of(*(at_home(y.trim()) for y in x.parts(2) if not y.filler)) == rows_of(x)
    call = Call((b,), {}, n)
    back = at_home(call.joined([call.of(k)[0][0].trim() for k in range(n)]))
    assert back.row.tolist() == list(range(12)) and back.tokens.equal(b.trim().tokens)
    assert rows_of(at_home(b[b.group != 1]) if not unit else b) and at_home(b.to("cpu")).row.equal(b.row)


def test_waiting_in_a_buffer():
    "Put, drawn, filtered, taken, saved and restored; slabs joined and rewritten."
    b, buffer = carrying(), Buffer()
    buffer.add(b[b.group < 2])
    buffer.add(b[b.group >= 2], priority=torch.arange(4.))
    assert rows_of(at_home(buffer.rows())) == list(range(12))
    for seed in range(5): assert len(at_home(buffer.sample(5, seed=seed, alpha=1.))) >= 5
    buffer["routing"] = buffer.rows().routing.clone()
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    taken = at_home(buffer.take(5))
    rest = at_home(buffer.rows())
    assert rows_of(taken, rest) == list(range(12))
    again = Buffer()
    again.load_state_dict(state)
    assert at_home(again.rows()).row.tolist() == taken.row.tolist() + rest.row.tolist()
    buffer.add(taken)
    assert rows_of(at_home(buffer.take(12))) == list(range(12)) and not len(buffer)
    filtered = Buffer()
    filtered.add(b, keep=b.group % 2 == 0)
    assert rows_of(at_home(filtered.rows())) == rows_of(b[b.group % 2 == 0])


def test_in_a_file(tmp_path):
    "Any rows, in any order, twice too; lists of objects cannot go there, and join them again."
    b, some = carrying(), torch.tensor([11, 3, 3, 0])
    back = from_arrow(to_arrow(ragged(b.drop("images", "sound")), tmp_path/"rows.arrow")).batch(some)
    for name in ("images", "sound"): back[name] = b[some][name]
    assert at_home(back).row.tolist() == some.tolist() and back.weights.dtype == torch.bfloat16


@pytest.mark.parametrize("pack", [True, False])
def test_a_loss_sees_them_beside_their_rows(pack):
    """Packed with shared prompts or padded, in micro-batches: what the closure is given has every sidecar at home,
    and each row once."""
    policy, met = Policy(model(), lr=0., device="cpu", pack=pack, micro_tokens=64, micro_rows=3), []
    b = carrying().drop("support")      # this one the policy reads itself
    plain = policy.logprobs(b)
    def loss(out, part):
        part = part.with_columns(part.columns | dict(support=part.routing.int()))
        met.append(at_home(part))
        # and they are beside what was computed of them
        assert (out.logprobs.detach() - plain[part.row, :part.width]).abs().max() < reach(plain)
        return torch.where(part.mask, out.logprobs*part.routing[..., 0, 0], 0.).sum()/part.n_tokens, {}
    policy.step(b, loss)
    seen = torch.cat([m.row for m in met]).unique()
    assert seen.equal(b.row)


def test_generated_rows_carry_what_their_prompt_brought():
    p = prompts((5, 2, 7))
    p = Batch(per_row=["pixels"], **p.columns, pixels=p.group[:, None, None].float().expand(3, 2, 2).clone(),
              images=[[torch.full((2,), float(g))] for g in p.group.tolist()],
              kind=(p.tokens*7)[..., None].expand(-1, -1, 2).clone())
    b = Rollout(model(), max_tokens=4, device="cpu", max_rows=4).generate(p, group_size=3, seed=0)
    assert b.pixels[:, 0, 0].equal(b.group.float())
    assert all(x[0].eq(float(g)).all() for x, g in zip(b.images, b.group.tolist(), strict=True))
    assert "pixels" in b.per_row
    prompt = torch.arange(b.width) < b.prompt_lengths[:, None]
    # per token: the prompt's own, nothing for what was sampled
    assert b.kind.equal((b.tokens*7*prompt)[..., None].expand_as(b.kind))
