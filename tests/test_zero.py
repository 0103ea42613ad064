"""ZeRO on two ranks: a model is cut before DeepSpeed sees it, and a step does not depend on how many gradients travel
together."""
from types import SimpleNamespace

import pytest
import torch
from conftest import skip_without
from forked import on_ranks
from rlblocks.engines import zero_shards
from rlblocks.engines.engine import zero
from rlblocks.engines.plain import Plain
from rlblocks.engines.zero import Zero
from torch import nn

skip_without("deepspeed")
pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


class Net(nn.Module):
    "A large tied matrix, small weights, and a buffer."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.out = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.full((16,), .5))

    def forward(self, ids): return self.out(torch.tanh(self.mid(self.embed(ids)))*self.scale)


def stepped(make, ids, **how):
    "Two steps of two micro-batches; every weight after them."
    engine = make(Net(), CPU, optimizer=lambda ps: torch.optim.SGD(ps, lr=.01, momentum=.9), **how)
    for _ in range(2):
        for part in (ids[:2], ids[2:]):
            engine.backward(engine(part).logsumexp(-1).square().sum()/10, last=False, shared=make is Zero)
        engine.step(make is Zero)
    return {name: x.clone() for name, x in engine.weights()}


def at_initialize(dtype):
    """What stands in the module when DeepSpeed is given it: (name, entries in place, entries of the part, dtype of the
    part)."""
    import deepspeed
    seen, given = [], deepspeed.initialize
    def initialize(model, **how):
        for name, p in model.named_parameters():
            part = getattr(p, "ds_tensor", p)
            seen.append((name, p.numel(), part.numel(), part.dtype))
        return given(model=model, **how)
    deepspeed.initialize = initialize
    try: Zero(Net(), CPU, stage=3, optimizer=lambda ps: torch.optim.SGD(ps, lr=.1), dtype=dtype)
    finally: deepspeed.initialize = given
    return seen


def masters(stage):
    "The weights as they are exported before any step, bf16 computing."
    engine = Zero(Net(), CPU, stage=stage, optimizer=lambda ps: torch.optim.AdamW(ps),
                  adamw=dict(lr=.1, betas=(.9, .999), eps=1e-8, weight_decay=0.), dtype=torch.bfloat16)
    return {name: x.clone() for name, x in engine.weights()}


def one_rank(rank, world, folder):
    ids = torch.randint(50, (8, 5), generator=torch.Generator().manual_seed(0))
    found = dict(cut={dtype: at_initialize(dtype) for dtype in (None, torch.bfloat16)},
                 plain=stepped(Plain, ids[[0, 1, 4, 5, 2, 3, 6, 7]]) if rank == 0 else None)
    found |= {f"masters {stage}": masters(stage) for stage in (1, 2, 3)}
    for bucket in (5*10**7, 300):                 # the matrix has 800 entries, what is between 256 and 16
        zero.BUCKET = bucket
        for stage in (1, 2, 3): found[f"stage {stage}, {bucket}"] = stepped(Zero, ids[4*rank:][:4], stage=stage)
    if rank == 0: torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    on_ranks(one_rank, (str(folder),), 2)
    return torch.load(folder/"found.pt")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_no_weight_is_whole_when_deepspeed_gets_the_model(found, dtype):
    """`deepspeed.initialize` moves a module to its device before it cuts; of one that is cut there is only a part to
    move."""
    given = [(name, whole, kind) for name, whole, _, kind in found["cut"][dtype]]
    assert given == [(name, 0, dtype or torch.float32) for name in ("embed.weight", "mid.weight", "mid.bias")]
    assert [part for *_, part, _ in found["cut"][dtype]] == [400, 128, 8]


@pytest.mark.parametrize("bucket", [5*10**7, 300])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_in_any_bucket_are_the_plain_ones(found, stage, bucket):
    got = found[f"stage {stage}, {bucket}"]
    assert got.keys() == found["plain"].keys()
    for name, x in found["plain"].items(): torch.testing.assert_close(got[name], x, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_begin_as_the_weights_were_loaded_not_as_they_are_rounded(found, stage):
    got, want = found[f"masters {stage}"], Net().state_dict()
    assert all(torch.equal(x, want[name]) for name, x in got.items())
    assert not torch.equal(want["mid.weight"], want["mid.weight"].bfloat16().float())


def test_a_weight_of_fewer_entries_than_ranks(monkeypatch):
    "ZeRO-3 gives each of four ranks a place of one entry; a bias has one entry, which is the first's."
    given = SimpleNamespace(grad_position={0: (0, 0, 1)}, get_param_id=lambda p: 0,
                            fp32_partitioned_groups_flat=[torch.ones(4)])
    found = []
    for rank in range(4):
        monkeypatch.setattr(zero_shards, "world", lambda rank=rank: (rank, 4))
        piece = zero_shards.Piece(given, SimpleNamespace(ds_shape=torch.Size([1]), shape=torch.Size([0])), 3)
        found.append((piece.start, piece.n, len(piece.slice(piece.flat, CPU).local)))
    assert found == [(0, 1, 1), (1, 0, 0), (1, 0, 0), (1, 0, 0)]
