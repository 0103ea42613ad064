"""A moving average is cut over the ranks as its model is: what stands in for the weights, what a checkpoint holds,
and who goes on with it."""
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import rarely
from rlblocks import Checkpoint, Policy
from rlblocks.checkpoint.convert import convert
from rlblocks.engines.ema import Ema
from rlblocks.engines.weights import copy_weights
from rlblocks.engines.engine import engine_of, fsdp2, plain
from test_shards import far, launch, loss, moved, net, weights
from tiny import NEAR, model, rows, steady

LR = 1e-2
HOW = dict(optimizer=steady(LR, weight_decay=.1, max_norm=.5), device="cpu", micro_rows=4)
CASES = {"plain": {}, "fsdp2": dict(engine=fsdp2(offload="cpu")), "zero1": dict(engine="zero1"),
         "zero2": dict(engine="zero2"), "zero3": dict(engine="zero3"), "tensor": dict(engine=plain(tensor_parallel=2)),
         "tensor, fsdp2": dict(engine=fsdp2(tensor_parallel=2)), "lora": dict(engine="zero3", lora=dict(r=2))}
HALF = {f"{name}, bf16": CASES[name] | dict(engine=replace(engine_of(CASES[name]["engine"]), dtype=torch.bfloat16))
        for name in ("fsdp2", "zero1", "zero2", "zero3")}
# in parts; gathered
WAYS = [(name, whole) for name in CASES for whole in (False, True) if not whole or name in ("zero3", "tensor")]


def fused(seed=0):
    "Attention's three matrices in one, and the gate's two: pieces of them are no stretch."
    import transformers as tf
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tf.Phi3ForCausalLM(tf.Phi3Config(vocab_size=32, hidden_size=32, intermediate_size=64,
                                                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                                max_position_embeddings=64, original_max_position_embeddings=64,
                                                eos_token_id=1, pad_token_id=0))


def made(name, fresh=True, **how):
    "Policy and average of a case; fresh=False: of other weights, which a checkpoint must replace."
    how = (CASES | HALF)[name] | how
    make = partial(fused,
                   seed=int(not fresh)) if "tensor" in name else model if "lora" in how else net if fresh else moved
    policy = Policy(make(), **HOW | how)
    return policy, Ema(policy, decay=.5)


def trained(policy, ema, steps, checkpoint=Checkpoint(), stop=None):
    "A loop as users write it; `stop`: it dies in that step."
    for step in checkpoint(steps, policy=policy, ema=ema):
        b = rows(B=9, seed=step, dtype=torch.float32)
        policy.step(b.parts(n)[policy.replica] if (n := policy._run.model.replicas) > 1 else b, loss)
        if step == stop: raise KeyboardInterrupt
        ema.update()
    return ema.state_dict()["average"]


def same(a, b): return a.keys() == b.keys() and all(torch.equal(x, b[k]) for k, x in a.items())


def swaps(world, rank, folder, *, cases):
    "Inside `swapped` all that reads the model sees the average, and afterwards its own weights, in every engine."
    for name in cases:
        policy, ema = made(name)
        average = trained(policy, ema, 3)
        b = rows(B=4, dtype=torch.float32)
        look = lambda policy, b=b: (weights(policy), policy.logprobs(b),
                                    {n: x for n, x in policy.state_dict()["module"].items()})
        own, state = [*look(policy)], policy.state_dict()
        own[2] = {n: x.clone() for n, x in own[2].items()}
        twin = made(name)[0]
        tied = ({"trunk.lm_head.weight": average["trunk.model.embed_tokens.weight"]}
                if "trunk.lm_head.weight" not in average and "lora" not in name else {})
        twin.load_state_dict(state | dict(module=state["module"] | average | tied))
        receiver = model() if "lora" in name else None
        with ema.swapped():
            inside = look(policy)
            if receiver: copy_weights(policy.weights(), receiver)
            assert same({n: inside[2][n].float() for n in average}, average), name
            inside = [dict(inside[0]), inside[1].clone(), {n: x.clone() for n, x in inside[2].items()}]
        wanted = look(twin)
        assert same(inside[0],
                    wanted[0]) and torch.equal(inside[1], wanted[1]), (name, (inside[1]-wanted[1]).abs().max())
        if receiver:
            assert same({f"trunk.{k}": x for k, x in receiver.state_dict().items() if f"trunk.{k}" in wanted[0]},
                        wanted[0])
        assert (inside[1]-own[1]).abs().max() > .02 and far(inside[0], own[0]) > 1e-3, name
        after = look(policy)
        assert same(after[0], own[0]) and torch.equal(after[1], own[1]) and same(after[2], own[2]), name
    return True


def case(name, world, whole=False, fresh=True):
    "A case in this world: one rank has nobody to hold layers with."
    return made(name, fresh, **dict(engine=None if whole else "fsdp2") if "tensor" in name and world == 1 else {})


def save(world, rank, folder, *, cases, dying=True):
    """Unbroken runs of four steps; and of each case a loop that dies in its fourth, with three saved, whole or in
    parts, in the background or not."""
    found = {}
    for name in cases:
        policy, ema = case(name, world)
        found[name] = kept(trained(policy, ema, 4))
        for whole in (w for n, w in WAYS if n == name and dying):
            policy, ema = case(name, world, whole)
            with pytest.raises(KeyboardInterrupt):
                trained(policy, ema, 4, Checkpoint(folder/f"{world}-{name}-{whole}", every=1, whole=whole,
                                                   background=name in ("fsdp2", "zero2")), stop=3)
            found[name, whole] = kept(ema.state_dict()["average"])
        mine, all_ = (sum(x.numel() for x in xs.values()) for xs in (ema.average, found[name]))
        # a rank's share
        assert mine == all_ if name in ("plain", "lora") or world == 1 else .3*all_ < mine < .7*all_, (name, mine, all_)
    return found


def go_on(world, rank, folder, *, saved_by, cases):
    "What was saved, read into models with other weights, and where the run ends."
    found = {}
    for name, whole in ways(cases):
        mine = folder/f"{saved_by}-{name}-{whole}-on-{world}"
        if rank == 0: shutil.copytree(folder/f"{saved_by}-{name}-{whole}", mine)
        dist.barrier()
        policy, ema = case(name, world, whole, fresh=False)
        assert Checkpoint(mine).restore(dict(policy=policy, ema=ema)) == 3 and ema.updates == 3
        read = kept(ema.state_dict()["average"])
        found[name, whole] = read, kept(trained(policy, ema, 4, Checkpoint(mine)))
    return found


def ways(names): return [(name, whole) for name, whole in WAYS if name in names]
def kept(xs): return {n: x.clone() for n, x in xs.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("names", [("fsdp2", "tensor", "lora", "zero3, bf16"),
                                   *rarely(((*CASES, *HALF),))], ids=["some", "all"])
def test_inside_everything_sees_the_average(tmp_path, names):
    assert launch(2, [partial(swaps, cases=names)], tmp_path) == [True]


@pytest.mark.ranks
@pytest.mark.parametrize("names", [("fsdp2", "zero3", "tensor", "lora"), *rarely((tuple(CASES),))], ids=["some", "all"])
def test_a_run_that_died_goes_on_with_its_average(tmp_path, names):
    """Saved by two ranks, resumed by two and by one; in `make test-long` saved by one, resumed by two: what is read is
    what was saved, to the bit, and the end is that of the unbroken run."""
    write, on = partial(save, cases=names), partial(go_on, cases=names)
    two, two_on_two = launch(2, [write, partial(on, saved_by=2)], tmp_path)
    back = names == tuple(CASES)        # what one has saved is read only then
    one, two_on_one = launch(1, [partial(write, dying=back), partial(on, saved_by=2)], tmp_path)
    runs = [(two, two_on_two), (two, two_on_one)]
    if back: runs += [(one, *launch(2, [partial(on, saved_by=1)], tmp_path))]
    for name in names: assert far(two[name], one[name]) < NEAR*LR, name
    for (name, whole) in ways(names):
        for saved, found in runs:
            read, end = found[name, whole]
            assert same(read, saved[name, whole]) and far(read, saved[name]) > 1e-3, (name, whole)
            assert same(end, saved[name]) if found is two_on_two else far(end, saved[name]) < NEAR*LR, (
                name, whole, far(end, saved[name]))
    fused(seed=1).save_pretrained(tmp_path/"base")
    for whole in (False, True):
        smooth = fused().from_pretrained(convert(tmp_path/f"2-tensor-{whole}", tmp_path/f"smooth-{whole}",
                                                 base=tmp_path/"base", part="ema")).state_dict()
        assert all(torch.equal(smooth[n.removeprefix("trunk.")], x) for n, x in two["tensor", whole].items())
    with pytest.raises(ValueError, match="average of an adapter.*inside ema.swapped"):
        convert(tmp_path/"2-lora-False", tmp_path/"x", base=tmp_path/"base", part="ema")
    net().save_pretrained(tmp_path/"frozen")
    with pytest.raises(ValueError, match="weights of a GemmaForCausalLM are missing"):
        convert(tmp_path/"2-zero3-False", tmp_path/"x", base=tmp_path/"frozen", part="ema")
    convert(tmp_path/"2-zero3-False", tmp_path/"policy", base=tmp_path/"frozen")         # unasked, the policy's
