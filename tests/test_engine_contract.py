"The contract of `engines.engine.Engine`, on each engine, in a world of one: what no engine may do its own way."
from functools import partial

import pytest
import tiny
import torch
from conftest import skip_without
from forked import on_ranks
from rlblocks import Policy
from rlblocks.engines.engine import Engine, engine_of
from rlblocks.engines.fsdp2 import Fsdp
from rlblocks.engines.optimizers import adamw
from rlblocks.engines.plain import Plain
from rlblocks.engines.sharded_model import ShardedModel
from rlblocks.engines.zero import Zero
from torch import nn

CPU, X = torch.device("cpu"), torch.linspace(-1, 1, 18).view(6, 3)
MAKERS = dict(plain=Plain, fsdp2=Fsdp) | {f"zero{n}": partial(Zero, stage=n) for n in (1, 2, 3)}


def made(name, seed=0, **how):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return MAKERS[name](net, CPU, optimizer=adamw(lr=.1), max_norm=.5, **how)


def stepped(engine):
    for rows in (X[:2], X[2:]): engine.backward(engine(rows).square().sum()/6, last=len(rows) == 4, shared=False)
    return engine.step(shared=False)


def weights(engine): return {n: x.clone() for n, x in engine.weights()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", MAKERS)
def test_contract(name):
    """In a process of its own: DeepSpeed changes how all modules there are made and run.

    `TensorParallel` and `Adapted` are not here: the first wants a model of transformers with a plan of cuts, and the
    second keeps only an adapter's state, which no other engine loads. See test_tensor.py and test_adapters.py."""
    if name.startswith("zero"): skip_without("deepspeed")
    on_ranks(keeps_the_contract, (name,), 1)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*MAKERS, "make"])
def test_unlike_models_are_refused(name):
    "Whatever the engine, one of the user's own included: ranks would train apart without a word."
    if name.startswith("zero"): skip_without("deepspeed")
    on_ranks(refuses_unlike_models, (name,), 2)


def refuses_unlike_models(rank, ranks, name):
    engine = Plain if name == "make" else None if name == "plain" else name
    def model(seed, **how):
        torch.manual_seed(seed)
        return ShardedModel(nn.Linear(3, 1), engine=engine, device="cpu", **how)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 built different models \(weight\)"): model(rank)
    model(0)
    if name != "plain": return
    model(rank, frozen=True)   # a reference of a rank's own
    for part, how in {"the base": dict(seed=rank), "lora_A": dict(lora=dict(r=2, seed=rank))}.items():
        lora = how.pop("lora", dict(r=2))
        with pytest.raises(ValueError, match=f"ranks 0 and 1 built different models .*{part}"):
            Policy(tiny.model(**how), lora=lora, device="cpu")


def keeps_the_contract(rank, ranks, name):
    engine, other, plain = made(name), made(name, seed=1), made("plain")
    assert isinstance(engine, Engine) and isinstance(engine.module, nn.Module) and engine.optimizer.param_groups
    assert engine.gathers == engine_of(name if name != "plain" else None).gathers   # as the word says beforehand
    torch.testing.assert_close(stepped(engine), stepped(plain))   # the same step, the norm before clipping
    for (n, x), (m, y) in zip(engine.weights(), plain.weights(), strict=True):
        assert n == m
        torch.testing.assert_close(x, y)

    kept = engine.state(True)   # any engine's full state is every engine's
    other.load(kept)
    plain.load(kept)
    for a, b, c in zip(*(weights(e).values() for e in (engine, other, plain)), strict=True):
        assert a.equal(b) and a.equal(c)
    stepped(engine), stepped(other)
    for a, b in zip(weights(engine).values(), weights(other).values(), strict=True): assert a.equal(b)

    inside = engine.within(lambda: engine.module[0](X).square().sum().item())   # a part by itself, inside the hooks
    first = weights(engine)
    assert inside == pytest.approx((X @ first["0.weight"].T + first["0.bias"]).square().sum().item(), rel=1e-5)

    engine.backward(engine(X).sum()*100, last=True, shared=False)   # forgotten
    engine.discard()
    torch.testing.assert_close(stepped(engine), stepped(other))
    for a, b in zip(weights(engine).values(), weights(other).values(), strict=True): assert a.equal(b)

    before = weights(engine)   # nothing changes where the gradient is not finite
    engine.backward(engine(X).sum()*float("nan"), last=True, shared=False)
    assert not torch.isfinite(engine.step(shared=False))
    for a, b in zip(weights(engine).values(), before.values(), strict=True): assert a.equal(b)

    shards = engine.shards()   # written memory computes after `refresh`
    assert list(shards) == list(before)
    for n, shard in shards.items():
        full = shard.save(shard.local.clone(), True)
        assert full.shape == before[n].shape and shard.load(full).equal(shard.local)
        shard.local.zero_()
    engine.refresh()
    assert engine(X).abs().sum() == 0 and not any(x.any() for x in weights(engine).values())

    with engine.lock, engine.lock: assert engine(X).abs().sum() == 0   # a lock that a thread may take again
