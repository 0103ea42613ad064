"""Divergences from a teacher and router losses on many ranks: what the plain process comes to, under every engine;
one launch holds all cases."""

import pytest
import torch
from conftest import skip_without
from forked import on_ranks
from rlblocks import Policy, jsd, masked_mean, merge
from rlblocks.data.batch import Batch
from test_routers import batch, loss
from tiny import NEAR, model, steady

LR = 1e-3
HOW = dict(optimizer=steady(LR, max_norm=1e9), device="cpu", micro_rows=3)
ENGINES = [None, "fsdp2", "zero3"]


def whole(moe, teacher):
    "The rows, with what both losses must know beforehand: found by the plain process on the whole."
    b = batch(11)
    b["teacher_hidden"] = teacher.hidden(b)
    counts = Policy(moe, frozen=True, device="cpu").expert_counts(b)
    return Batch(**b.columns, per_row=["load"], load=(counts.sum(0)/b.lengths.sum()).expand(counts.shape),
                 n_real=b.lengths.sum().expand(len(b)))


def cases(head, **engine):
    "name → (policy, step)"
    def divergence(logits, teacher_hidden, temperature):
        return jsd(logits, head(teacher_hidden, temperature=temperature), beta=1.)
    def distill(out, b): return masked_mean(out.measured, b.mask, denom=b.n_tokens), {}
    yield "distill", Policy(model(), **HOW | engine), lambda p, b: p.step(b, distill, measure=divergence)
    yield "tied", Policy(model("gemma"), **HOW | engine), lambda p, b: p.step(b, distill, measure=divergence)
    yield "routers", Policy(model("mixtral"), **HOW | engine), lambda p, b: p.step(b, loss, router_logits=True)


def uneven(b, world):
    "Parts of one row and of all others: the first rank fills up with weightless rows."
    cuts = [[0], list(range(1, len(b)))] if world == 2 else [list(range(len(b)))]
    return [b.part(c, len(cuts)) for c in cuts]


def weights(policy): return {n: x.clone() for bucket in policy._run.model.iter_full_params() for n, x in bucket.items()}


def one_rank(rank, world, folder):
    teacher, found = Policy(model(hidden_size=64, seed=9), frozen=True, device="cpu"), {}
    b = whole(model("mixtral"), teacher)
    for engine in ENGINES:
        # a sharded teacher: its head comes gathered
        cut = Policy(model(hidden_size=64, seed=9), frozen=True, device="cpu", engine=engine)
        head = cut.head()
        assert torch.equal(head.weight, teacher.head().weight) and torch.equal(cut.hidden(b), teacher.hidden(b))
        assert torch.equal(head.weight, cut.head().weight)
        for name, policy, step in cases(head, engine=engine):
            metrics = [{k: m.to("cpu") for k, m in step(policy, uneven(b, world)[rank]).items()} for _ in range(2)]
            found[engine, name] = metrics, weights(policy)
    torch.save(found, folder/f"{rank}.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2])
def test_every_engine_is_the_plain_process(tmp_path, world):
    skip_without("deepspeed")
    on_ranks(one_rank, (tmp_path,), world)
    ranks = [torch.load(tmp_path/f"{r}.pt", weights_only=False) for r in range(world)]
    teacher = Policy(model(hidden_size=64, seed=9), frozen=True, device="cpu")
    b = whole(model("mixtral"), teacher)
    for name, policy, step in cases(teacher.head()):
        first = weights(policy)
        metrics = [step(policy, b) for _ in range(2)]
        want = weights(policy)
        assert max(float((want[n] - first[n]).abs().max()) for n in want) > 1e-4
        for engine in ENGINES:
            for i in range(2):
                joined = merge(*(r[engine, name][0][i] for r in ranks))
                for k in ("loss", "grad_norm"):
                    assert float(joined[k]) == pytest.approx(float(metrics[i][k]), rel=1e-5,
                                                             abs=1e-5), (engine, name, k)
            for r in ranks:
                for n, x in r[engine, name][1].items(): assert (x - want[n]).abs().max() < NEAR*LR, (engine, name, n)
