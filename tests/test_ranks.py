"""Many ranks, one step (LAWS 1 and 24): the same number of micro-batches everywhere, the gradient of one process,
metrics that merge."""
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from conftest import rarely, skip_without
from forked import on_ranks
from rlblocks import Batch, Checkpoint, Policy, Scorer, masked_mean, merge, ppo_loss, scores_after
from rlblocks.engines.fsdp2 import Fsdp
from rlblocks.engines.optimizers import adamw
from rlblocks.engines.process_group import RankLost
from tiny import apart, exact, gradients, model, rows

HOW = dict(optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu", micro_rows=2, pack=True)


def net(): return exact(model(dtype=torch.float64))


def loss(out, b):
    return ppo_loss(out.logprobs, out.logprobs.detach() - .1*b.advantages, b.advantages, b.mask, denom=b.n_tokens)


def batch():
    b = Batch.cat([rows(B=11, seed=1), rows(B=11, seed=2)])
    b["row"] = torch.arange(22)
    return b


def prompted():
    "Five prompts of 9 … 13 tokens with four answers each."
    b, at = rows(B=20, T=26, seed=3), torch.arange(26)
    start = 9 + b.group
    lengths = start + 1 + torch.arange(20)*7 % 12
    tokens = torch.where(at < start[:, None], b.tokens[b.group*4], b.tokens)
    return Batch(**b.columns
                 | dict(tokens=tokens, lengths=lengths, mask=(at >= start[:, None]) & (at < lengths[:, None])))


CASES = {"uneven": (batch, HOW), "balanced": (batch, HOW), "fewer rows than ranks": (lambda: batch()[:3], HOW),
         "a prompt on both": (prompted, HOW | dict(micro_rows=None, micro_tokens=60))}


def uneven(b):
    "Parts whose own micro-batches of 2 rows number 1, 5, 2 and 3."
    cuts = [list(range(0, 2)), list(range(2, 12)), list(range(12, 16)), list(range(16, 22))]
    return [b.part(c, len(cuts)) for c in cuts]


def torn(b, world):
    "Parts with a row of every prompt each: a cut that does not keep groups together."
    cuts = [list(range(k, len(b), world)) for k in range(world)]
    return [b.part(c, len(cuts)) for c in cuts]


def one_rank(rank, world, cut, folder):
    make, how = CASES[cut]
    policy = Policy(net, **how)
    calls, laid = [], []
    policy._run.module.register_forward_pre_hook(lambda *_: calls.append(1))
    policy._run.module.trunk.register_forward_pre_hook(lambda m, args, kw: laid.append(args[0].numel()),
                                                       with_kwargs=True)
    found = gradients(policy)
    part = (uneven(make()) if cut == "uneven" else torn(make(), world) if cut == "a prompt on both"
            else make().parts(world))[rank]
    metrics = policy.step(part, loss)
    lp = policy.logprobs(part)
    torch.save(dict(laid=sum(laid), tokens=int(part.lengths.sum()), groups=set(part.group.tolist()), gradient=found,
                    metrics={k: m.to("cpu") for k, m in metrics.items()}, calls=len(calls), lp=lp, rows=part.row,
                    filler=part.filler,
                    weights=policy.state_dict()["module"]), folder/f"{rank}.pt")
    with pytest.raises(ValueError, match="cut in 3, but"): policy.step(make().parts(3)[0], loss)
    whole = policy.step(make(), loss)          # a whole is the same on every rank: nothing is summed, nothing is cut
    assert policy.version == 2 and float(whole["skipped"]) == 0
    checkpoint = Checkpoint(folder/"run", every=1)
    for _ in checkpoint(1, policy=policy): pass
    assert [s.name for s in checkpoint.saves()] == ["step-00000001"]


@pytest.mark.ranks
@pytest.mark.parametrize("world, cut",
                         [(2, "balanced"), (4, "fewer rows than ranks"), (2, "a prompt on both"),
                          *rarely((4, "uneven"))])
def test_ranks_agree_with_one_process(tmp_path, world, cut):
    start = time.monotonic()
    on_ranks(one_rank, (cut, tmp_path), world)
    assert time.monotonic() - start < 300          # it ends: no rank waits for a collective that another never enters
    ranks = [torch.load(tmp_path/f"{r}.pt", weights_only=False) for r in range(world)]
    make, how = CASES[cut]
    b, policy = make(), Policy(net, **how)
    want = gradients(policy)
    metrics = policy.step(b, loss)
    joined = merge(*(r["metrics"] for r in ranks))
    for r in ranks:
        assert apart(r["gradient"], want) < 1e-10
        assert all(torch.equal(v, ranks[0]["weights"][k]) for k, v in r["weights"].items())
    for k in metrics: assert float(joined[k]) == pytest.approx(float(metrics[k]), rel=1e-9, abs=1e-12), k
    assert len({r["calls"] for r in ranks}) == 1
    if cut == "uneven": assert ranks[0]["calls"] == 5 + 5       # five micro-batches of the step, five of logprobs
    lp = policy.logprobs(b)
    for r in ranks:
        if not r["filler"]: assert (r["lp"][:, :lp.shape[1]] - lp[r["rows"]]).abs().max() < 1e-10
    assert sum(r["filler"] for r in ranks) == (1 if cut == "fewer rows than ranks" else 0)
    if cut == "a prompt on both":
        # the cut parts groups: each rank lays their prompt for itself
        assert len(ranks[0]["groups"] & ranks[1]["groups"]) >= 2
        # once for step, once for logprobs; and the prompt once a group
        assert all(r["laid"] < .8*2*r["tokens"] for r in ranks)
        assert ranks[0]["calls"] >= 2*2                                         # several micro-batches a rank


# -- a part that cannot be read
ODD = dict(length=(lambda b: b.lengths.fill_(60), "takes 60 tokens"),
           id=(lambda b: b.tokens.fill_(99), "is 99; the model's"),
           support=(lambda b: b.top_p.fill_(.9), "sampled with top_p, but the batch has no column 'support'"))


def one_odd(rank, ranks, odd, engine):
    "One rank's rows cannot be planned or read: a step and a column of numbers raise on all, and the ranks go on."
    policy = Policy(model(), lr=1e-2, device="cpu", micro_tokens=40, engine=engine)
    b = rows(B=8, dtype=torch.float32)
    b["top_p"] = torch.ones(8)
    part, (spoil, says) = b.parts(ranks)[rank], ODD[odd]
    bad = b.parts(ranks)[rank]
    if rank == 1: spoil(bad)       # in place, behind the checks of columns
    for call in (lambda: policy.logprobs(bad), lambda: policy.step(bad, sft)):
        with pytest.raises((ValueError, RuntimeError), match=says) as e: call()
        assert not isinstance(e.value, RankLost) and (rank == 1 or "rank 1" in str(e.value))
    policy.logprobs(part), policy.step(part, sft)
    assert policy.version == 1


@pytest.mark.ranks
@pytest.mark.parametrize("odd, engine", [("length", None), ("id", None), ("support", None), ("support", "fsdp2")])
def test_rows_that_one_rank_cannot_read_are_heard_on_all(odd, engine):
    on_ranks(one_odd, (odd, engine), 2, limit=300)


def constant_on_one(rank, ranks, engine):
    "One rank's loss does not reach the weights: the others are told, and do not wait in its backward pass."
    policy, b = Policy(model(), lr=1e-2, device="cpu", engine=engine), rows(B=8, dtype=torch.float32)
    def loss(out, b): return sft(out, b) if rank == 0 else (torch.tensor(0.), {})
    for whole in (b, b[:1]):       # of one row, rank 1 has a filler
        with pytest.raises((ValueError, RuntimeError), match="does not depend on the model's outputs") as e:
            policy.step(whole.parts(ranks)[rank], loss)
        assert not isinstance(e.value, RankLost)
    policy.step(b.parts(ranks)[rank], sft)
    assert policy.version == 1


@pytest.mark.ranks
@pytest.mark.parametrize("engine", [None, "fsdp2", "zero3"])
def test_a_loss_without_a_gradient_on_one_rank_is_heard_on_all(engine):
    if engine == "zero3": skip_without("deepspeed")
    on_ranks(constant_on_one, (engine,), 2, limit=300)


# -- ranks that were given unlike batches
def scored(rank, ranks, at):
    "A rank with one long row, and one with five short ones. They exchange one number."
    lengths, tokens = torch.tensor([10, 2, 2, 2, 2, 2]), torch.arange(60).view(6, 10) % 30 + 2
    b = Batch(tokens=tokens, lengths=lengths, steps=torch.arange(10) == lengths[:, None] - 1)
    masked = Batch(**b.columns, mask=torch.zeros(6, 10, dtype=torch.bool))
    asked = []
    def counted(name, own):
        def asks(*args, **how):
            asked.append(name)
            return own(*args, **how)
        return asks
    for name in ("all_reduce", "all_gather_object"): setattr(dist, name, counted(name, getattr(dist, name)))
    for how, most in ((dict(micro_rows=1), 5), (dict(micro_tokens=10), 1), (dict(micro_rows=1, pack=False), 5)):
        scorer, calls = Scorer(model(), device="cpu", outputs=scores_after(at) if at else None, **how), []
        scorer._run.module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        for whole, wanted in ((b, most), (masked, most), (b[:1], 1)):    # of one row a rank has none
            calls.clear(), asked.clear()
            part = whole.parts(ranks)[rank]
            scorer.scores(part)
            assert len(calls) == wanted, (how, len(whole), part.filler, len(calls))
            assert asked == ["all_reduce"], asked       # they agree on their number by one exchange


@pytest.mark.ranks
@pytest.mark.parametrize("at", [None, "steps"])
def test_ranks_score_rows_in_as_many_forward_passes(at): on_ranks(scored, (at,), 2, limit=300) # LAW 24


def sft(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}


UNLIKE = {("whole", "part"): "the ranks disagree.*a whole batch.*a part of",
          ("whole", "own"): r"the ranks disagree.*a whole batch of 8 rows.*one cut, batch\.parts",
          ("part", "other"): "the ranks disagree.*a part of", ("part", "none"): "the batch is a str"}


def unlike(rank, ranks, kinds, engine):
    "A step that raises on all ranks, then one that all can take; where weights are sharded, log-probs likewise."
    policy, b, other = Policy(model(), lr=1e-2, device="cpu", engine=engine), rows(B=8), rows(B=8, seed=5)
    given = dict(whole=b, part=b.parts(ranks)[rank], other=other.parts(ranks)[rank], own=other, none="no batch")
    with pytest.raises((ValueError, TypeError, RuntimeError), match=UNLIKE[kinds]) as e:
        policy.step(given[kinds[rank]], sft)
    assert policy.version == 0 and not isinstance(e.value, RankLost)
    policy.step(given["part"], sft)
    assert policy.version == 1
    if engine is None:
        if rank == 0: assert policy.logprobs(b).any()       # it has all weights, and may ask alone
        return
    with pytest.raises((ValueError, TypeError, RuntimeError), match=UNLIKE[kinds]) as e:
        policy.logprobs(given[kinds[rank]])
    assert not isinstance(e.value, RankLost)
    assert policy.logprobs(given["part"]).any()


@pytest.mark.ranks
@pytest.mark.parametrize("kinds, engine", [*product(UNLIKE, [None, "fsdp2"]), (("part", "none"), Fsdp)])
def test_ranks_that_are_given_unlike_batches_raise_together(kinds, engine):
    on_ranks(unlike, (kinds, engine), 2, limit=300)
