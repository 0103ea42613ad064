"""Optimizers and schedules through the wrappers: resumed to the bit, equal on one rank and on two, in fp32 whatever
the model came in (LAWS 30)."""
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import rarely, skip_without
from forked import on_ranks
from rlblocks import Checkpoint, Policy, ppo_loss
from rlblocks.engines.ema import Ema
from rlblocks.engines.optimizers import adamw, adamw_8bit, cosine, freeze_, muon, wsd
from rlblocks.engines.engine import EngineSpec, engine_of
from rlblocks.engines.sharded_model import ShardedModel
from rlblocks.engines.process_group import leave_world
from tiny import NEAR, bound, model, rows, steady
from torch.testing import assert_close

LR = 1e-2
MAKERS = dict(adamw=steady(LR, weight_decay=.1, no_decay=("embed_tokens",)), muon=muon(lr=1e-2, weight_decay=.1))


def loss(out, b):
    return ppo_loss(out.logprobs, out.logprobs.detach() - .1*b.advantages, b.advantages, b.mask, denom=b.n_tokens)


def batch(seed, **more): return rows(B=8, seed=seed, dtype=torch.float32, **more)


def weights(policy): return {n: p.detach().clone() for n, p in policy._run.model.module.named_parameters()}


@pytest.mark.parametrize("name", [*MAKERS, "8bit"])
def test_resumed_equals_undisturbed(tmp_path, name):
    """Six steps at once, and three, a checkpoint, and three more: weights, moving average and learning rates to the
    bit (LAWS 20)."""
    def run(steps, checkpoint):
        big = dict(hidden_size=64, intermediate_size=128) if name == "8bit" else {}
        policy = Policy(model(**big), optimizer=replace(MAKERS.get(name, adamw_8bit(lr=1e-2)),
                                                        schedule=wsd(6, warmup=2, decay=3)), device="cpu")
        ema = Ema(policy, decay=.9)
        for step in checkpoint(steps, policy=policy, ema=ema):
            rate = float(policy.step(batch(step), loss)["lr"])
            ema.update()
        return weights(policy), ema.average, rate, policy
    whole = run(6, Checkpoint())
    run(3, Checkpoint(tmp_path))
    again = run(6, Checkpoint(tmp_path))
    assert whole[2] == again[2] == pytest.approx(1e-2/3)
    for a, b in zip(whole[:2], again[:2], strict=True): assert all(torch.equal(a[n], b[n]) for n in a)
    states = whole[3]._run.model.optimizer.state.values()
    # matrices in 8 bits, norms in fp32
    if name == "8bit": assert {s["state1"].dtype for s in states} == {torch.uint8, torch.float32}
    else: assert {x.dtype for s in states for x in s.values()} == {torch.float32}


def test_groups_know_the_models_names():
    policy = Policy(model(), optimizer=MAKERS["muon"], device="cpu")
    hidden, *rest = (set(g["param_names"]) for g in policy._run.model.optimizer.param_groups)
    assert hidden == {n for n, p in policy._run.model.module.named_parameters() if p.dim() == 2
                      and not n.endswith(("embed_tokens.weight", "lm_head.weight"))}
    assert {"trunk.model.embed_tokens.weight", "trunk.lm_head.weight"} <= rest[0]
    assert "trunk.model.norm.weight" in rest[1] and policy._run.model.optimizer.param_groups[2]["weight_decay"] == 0
    kept = Policy(model(), optimizer=MAKERS["adamw"], device="cpu")._run.model.optimizer.param_groups[1]
    assert "trunk.model.embed_tokens.weight" in kept["param_names"] and kept["weight_decay"] == 0


def test_a_half_precision_model_steps_in_fp32():
    """LAWS 30: a model that comes in bfloat16 moves by steps that bfloat16 could not hold, with fp32 states; asked
    for low precision, it does not."""
    def moved(**how):
        policy = Policy(model(dtype=torch.bfloat16), device="cpu",
                        **dict(optimizer=adamw(lr=1e-6, max_norm=None)) | how)
        before = weights(policy)
        for step in range(10): policy.step(batch(step), loss)
        after = weights(policy)
        dtypes = {x.dtype for s in policy._run.model.optimizer.state.values() for k, x in s.items() if k != "step"}
        big = {n for n, p in before.items() if p.dim() == 2 and "embed" not in n}
        return sum((after[n] != before[n]).sum().item() for n in big)/sum(before[n].numel() for n in big), dtypes
    share, dtypes = moved(optimizer=adamw(lr=1e-6))
    assert share > .99 and dtypes == {torch.float32}
    share, dtypes = moved(engine=EngineSpec(low_precision=True))
    assert share < .5 and dtypes == {torch.bfloat16}


def test_frozen_parts_stay():
    policy = Policy(lambda: freeze_(model(), "embed_tokens", "layers.0"), lr=1e-2, device="cpu")
    before = weights(policy)
    policy.step(batch(0), loss)
    stayed = {n for n, p in weights(policy).items() if torch.equal(p, before[n])}
    assert stayed == {n for n in before if "embed_tokens" in n or "layers.0." in n}


def test_a_moving_average_is_a_reference():
    "With the averaged weights in place the policy gives the log-probs of a model that has them; then its own again."
    policy = Policy(model(), lr=1e-2, device="cpu")
    ema, b = Ema(policy, decay=.5), batch(0)
    for step in range(3):
        policy.step(batch(step), loss)
        ema.update()
    own = policy.logprobs(b)
    with ema.swapped(): smooth = policy.logprobs(b)
    assert torch.equal(policy.logprobs(b), own) and (smooth-own).abs().max() > 1e-3
    other = Policy(model(), device="cpu", frozen=True)
    other._run.model.module.load_state_dict({n: ema.average[n] for n in weights(other)})
    assert torch.equal(other.logprobs(b), smooth)
    with pytest.raises(ValueError, match="Ema: the state's 'trunk.model.embed_tokens.weight' is"):
        Ema(Policy(model(vocab_size=40), lr=1., device="cpu")).load_state_dict(ema.state_dict())


def sharded(rank, ranks, folder):
    """On as many ranks as there are: four steps of each optimizer under FSDP2, full weights and averages written by
    rank 0."""
    from rlblocks import SpmdPool
    from rlblocks.placement.place import local
    with SpmdPool(timeout=300.) as pool:
        for name, make in MAKERS.items():
            policy = pool.place(Policy, model(), engine="fsdp2", optimizer=replace(make, schedule=cosine(4, end=.5)),
                                device="cpu")
            ema = pool.place(Ema, policy, decay=.5)
            for step in range(4):
                policy.step(batch(step), loss)
                ema.update()
            full = lambda policy=policy: {k: x for part in local(policy)._run.model.iter_full_params()
                                          for k, x in part.items()}
            own = full()
            with ema.swapped(): smooth = full()
            if pool.rank == 0: torch.save((own, smooth), Path(folder)/f"{name}.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2])
def test_sharded_as_in_one_process(tmp_path, ranks):
    on_ranks(sharded, (tmp_path,), ranks, group=False)
    for name, make in MAKERS.items():
        policy = Policy(model(), optimizer=replace(make, schedule=cosine(4, end=.5)), device="cpu")
        start, ema = weights(policy), Ema(policy, decay=.5)
        for step in range(4):
            policy.step(batch(step), loss)
            ema.update()
        own, smooth = torch.load(tmp_path/f"{name}.pt")
        moved = sum((p-start[n]).square().sum().item() for n, p in weights(policy).items())**.5
        for mine, theirs in ((own, weights(policy)), (smooth, ema.average)):
            largest, norm = (max((mine[n]-x).abs().max().item() for n, x in theirs.items()),
                             sum((mine[n]-x).square().sum().item() for n, x in theirs.items())**.5)
            # Muon's polynomial: five times three products in bfloat16
            assert moved > .1 and (largest < NEAR*LR if name == "adamw"
                                   else norm < bound(5*3, moved, torch.bfloat16)), (name, largest, norm, moved)


ODD = {"Muon does not step": MAKERS["muon"], r"AdamW8bit keeps 'qmap1' \[256\]": adamw_8bit(lr=1e-2),
       "Adafactor moves an entry by": torch.optim.Adafactor,
       "LBFGS does not step": lambda ps: torch.optim.LBFGS([p for _, p in ps])}
KEPT = dict(sgd=partial(torch.optim.SGD, lr=1e-1), momentum=partial(torch.optim.SGD, lr=1e-1, momentum=.9),
            nadam=partial(torch.optim.NAdam, lr=1e-2, eps=1e-3), asgd=partial(torch.optim.ASGD, lr=1e-1, t0=1),
            rprop=partial(torch.optim.Rprop, lr=1e-3), adagrad=partial(torch.optim.Adagrad, eps=1e-3))


def optimizers_under_zero(world, rank, folder, names):
    """What cannot take a stretch of a weight is refused before anything is cut; what can is saved after every step,
    the first included, and goes on."""
    for engine in ("zero1", "zero2", "zero3"):
        for words, make in ODD.items():
            with pytest.raises(
                    ValueError,
                    match=rf'engine="{engine}": {words}.*use an optimizer that treats entries alone, such as adamw'):
                Policy(model(), engine=engine, optimizer=make, device="cpu")
    def run(make, engine, steps, checkpoint=Checkpoint()):
        policy = Policy(model(), engine=engine, optimizer=make, device="cpu")
        for step in checkpoint(steps, policy=policy): policy.step(batch(step), loss)
        return {k: x for part in policy._run.model.iter_full_params() for k, x in part.items()}
    apart = lambda a, b: max((a[k]-x).abs().max().item() for k, x in b.items())
    for i, name in enumerate(names):
        make, engine, whole = KEPT[name], f"zero{1 + i%3}", bool(i%2)
        plain = run(make, None, 4)
        unbroken = run(make, engine, 4)
        run(make, engine, 2, Checkpoint(folder/name, every=1, whole=whole))
        again = run(make, engine, 4, Checkpoint(folder/name, every=1, whole=whole))
        assert apart(again, unbroken) == 0 and apart(
            plain, dict(("trunk." + k, x) for k, x in model().state_dict().items() if "trunk." + k in plain)) > 1e-4, (
            name, engine, apart(again, unbroken))
        # Rprop goes by signs alone, which rounding decides where a gradient is next to 0
        assert name == "rprop" or apart(unbroken, plain) < NEAR*LR, (name, engine, apart(unbroken, plain))
    return True


def float16(world, rank, folder):
    """Every engine refuses to train where small gradients vanish, names the way out, which trains, and reads with a
    frozen float16 model."""
    half, b = (lambda: model(dtype=torch.float16)), batch(0)
    fp32 = Policy(model(dtype=torch.float16).float(), frozen=True, device="cpu").logprobs(b)
    for how in ({}, dict(engine="fsdp2"), dict(engine="zero1"), dict(engine="zero2"), dict(engine="zero3"),
                dict(engine=EngineSpec(tensor_parallel=2))):
        spec = engine_of(how.get("engine"))
        for odd in (dict(), dict(engine=replace(spec, dtype=torch.float16)),
                    dict(engine=replace(spec, low_precision=True, dtype=torch.bfloat16)), dict(lora=dict(r=2))):
            with pytest.raises(
                    ValueError,
                    match="in float16 a gradient below 6e-8 is 0.*dtype=torch.bfloat16 or dtype=torch.float32"):
                Policy(half(), device="cpu", **how | odd)
        with pytest.raises(ValueError, match="in float16"):
            Policy(model(), device="cpu", engine=replace(spec, dtype=torch.float16))
        assert (Policy(half(), frozen=True, device="cpu", **how).logprobs(b)-fp32).abs().max() < .02, how
    for how in (None, "fsdp2", "zero3"):
        for dtype in (torch.bfloat16, torch.float32):
            for lora in (None, dict(r=2)):
                spec = replace(engine_of(how), dtype=dtype)
                if lora and dtype == torch.bfloat16 and how == "zero3":
                    with pytest.raises(
                            ValueError,
                            match="in torch.float16 are not gathered while torch.bfloat16 computes; load them in "
                            "torch.bfloat16"):
                        Policy(half(), engine=spec, device="cpu", lora=lora)
                    continue
                policy = Policy(half(), lr=1e-2, engine=spec, device="cpu", lora=lora)
                assert float(policy.step(batch(1), loss)["grad_norm"]) > 1e-3, (how, dtype)
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("names", rarely((tuple(KEPT),)), ids=["all"])
def test_on_two_ranks(tmp_path, names):
    skip_without("deepspeed")
    from test_shards import launch
    assert launch(2, [partial(optimizers_under_zero, names=names), float16], tmp_path) == [True, True]


# -- optimizers that start with numbers other than 0, and states of older groups
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.AdamW])
def test_a_state_in_shards_that_was_saved_before_the_first_step_starts_as_new(kind):
    "NAdam's product of momenta is 1 at first, not what a step of no size leaves. (torch has no Rprop in shards.)"
    def sharded(engine):
        torch.manual_seed(0)
        return ShardedModel(torch.nn.Linear(4, 4), engine=engine, device="cpu",
                            optimizer=lambda named: kind([p for _, p in named], lr=.1))
    def stepped(m):
        for k in (1., 2., 3.):
            m.backward((m(k*torch.ones(2, 4))**2).sum())
            m.apply()
        return next(m.iter_full_params())
    try:
        saved, other = sharded("fsdp2").state_dict(full=False), sharded("fsdp2")
        other.load_state_dict(saved)
        assert_close(stepped(other), stepped(sharded(None)))
    finally: leave_world()


def test_a_state_of_one_group_says_how_it_goes_on():
    "adamw used to decay norms and biases too."
    def made(optimizer):
        torch.manual_seed(0)
        return ShardedModel(torch.nn.Linear(2, 2), device="cpu", optimizer=optimizer)
    def once(named): return torch.optim.AdamW([p for _, p in named], lr=.1, weight_decay=.1)
    old = made(once)
    old.backward(old(torch.ones(1, 2)).sum())
    old.apply()
    with pytest.raises(ValueError, match="one group of weights, this one has 2.*AdamW"):
        made(adamw(lr=.1, weight_decay=.1)).load_state_dict(old.state_dict())
    made(once).load_state_dict(old.state_dict())


def test_a_state_keeps_the_kernels_of_the_optimizer_that_takes_it():
    "One that was saved on CUDA is fused there; here another is."
    one, two = (Policy(model(), device="cpu") for _ in range(2))
    state = one.state_dict()
    assert {g["fused"] for g in state["optimizer"]["param_groups"]} == {None}
    for g in state["optimizer"]["param_groups"]: g["fused"] = True
    two.load_state_dict(state)
    assert {g["fused"] for g in two._run.model.optimizer.param_groups} == {None}
