"""Models on a card: each test a small twin of one on CPU. Blocks: tests/test_gpu.py; without a card: tests/card.py."""
import statistics
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import tiny
import torch
import torch.distributed as dist
from card import CARD, DEVICE, waits
from rlblocks import (Checkpoint, Critic, Policy, Rollout, Scorer, bradley_terry_loss, masked_mean, pairs,
                      ppo_loss, sft_loss, value_loss)
from rlblocks.engines.engine import fsdp2, plain
from rlblocks.engines.optimizers import adamw
from rlblocks.engines.weights import checksum, named_weights
from rlblocks.engines.process_group import leave_world
from rlblocks.models.attention import NAME
from rlblocks.models.loading import pretrained
from test_attention import groups
from tiny import steady
from torch.testing import assert_close

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
LR = 1e-3
# of a weight after a step: another step would be off by LR. Gradients are compared before, unclipped
MOVED = .1*LR
UNCLIPPED = steady(LR, max_norm=None)
# heads of 32: what kernels of attention take
SIZES = dict(hidden_size=128, intermediate_size=256) if CARD else dict(hidden_size=64)


def sharp(dtype=torch.float32, **more):
    "A model with opinions: what a row reads of another one shows."
    net = tiny.model("llama", dtype, **SIZES | dict(max_position_embeddings=128) | more)
    with torch.no_grad():
        for w in net.parameters(): w *= 4 if w.dim() > 1 else 1
    return net


def batch(B=12, seed=0):
    b = tiny.rows(B=B, seed=seed, dtype=torch.float32)
    b["old_logprobs"], b["old_values"] = b.ref_logprobs.clone(), b.returns + .1
    return b


def ppo(out, b):
    pg, metrics = ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b)
    return pg - .01*masked_mean(out.entropy, b.mask, denom=b), metrics


def weighted(out, b):
    w = (7*b.tokens + 3*torch.arange(b.width, device=b.tokens.device)) % 5 - 2.
    return torch.where(b.mask, w*out.logprobs, 0.).sum()/b.n_tokens, {}


def sft(out, b): return sft_loss(out.logprobs, b.mask, denom=b)
def value(out, b): return value_loss(out.values, b.old_values, b.returns, b.mask, denom=b)
def verdict(out, b): return bradley_terry_loss(*pairs(out.scores, b), denom=b)


def local(x): return (x.to_local() if hasattr(x, "to_local") else x).detach().cpu()
def weights(wrapper): return {n: local(p).clone() for n, p in wrapper._run.module.named_parameters()}


def stepped(wrapper, b, loss, n=1, **how):
    "(gradient of the last of n steps, metrics of all), on the CPU."
    wrapper._run.model.engine.refresh()     # its parameters are what the optimizer has
    found = tiny.gradients(wrapper)
    metrics = [wrapper.step(b, loss, **how) for _ in range(n)]
    return {name: local(g) for name, g in found.items()}, metrics


def distance(a, b):
    "Of two gradients, relative to the second."
    assert a.keys() == b.keys() and a
    norm = lambda xs: float(torch.stack([x.double().square().sum() for x in xs]).sum().sqrt())
    assert norm(b.values()) > 1e-3
    return norm(a[n] - b[n] for n in b)/norm(b.values())


# -- one row beside another
def as_flex():
    "Attention that is compiled on a card: on a CPU torch runs it as it is written down, forward only."
    return nullcontext() if CARD else torch.compiler.set_stance("force_eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_packed_is_padded_is_alone(device, record_property, attention, dtype):
    "… on a CPU in fp32, with the same weights."
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    b, exact = groups(), dict(optimizer=adamw(lr=0., max_norm=None))
    alone = Policy(sharp(dtype).float(), device=CPU, pack=False, micro_rows=1, **exact)
    wanted, (grads, _) = alone.logprobs(b), stepped(alone, b, weighted)
    assert wanted.abs().max() > 5
    learns = CARD or attention == "sdpa"
    with as_flex():
        for pack in (True, False):
            how = exact if learns else dict(frozen=True)
            policy = Policy(sharp(dtype, attn_implementation=attention), device=device, pack=pack, **how)
            assert policy._run.layout.packed is pack
            off = (policy.logprobs(b) - wanted)[b.mask].abs()
            record_property(f"packed={pack}", (float(off.max()), float(off.mean())))
            assert off.max() < (1e-4 if dtype == torch.float32 else .3)
            assert off.mean() < (1e-5 if dtype == torch.float32 else .05)
            if not learns: continue
            far = distance(stepped(policy, b, weighted)[0], grads)
            record_property(f"packed={pack}: gradient", float(far))
            assert far < (1e-4 if dtype == torch.float32 else .15)


def test_flash_attention_keeps_packed_rows_apart_or_is_refused(device, tmp_path):
    "… by the probe. On a CPU sdpa plays it."
    if CARD and find_spec("flash_attn") is None: pytest.skip("flash-attn is not installed")
    name = "flash_attention_2" if CARD else "sdpa"
    sharp(torch.bfloat16).save_pretrained(tmp_path)
    how, b = dict(frozen=True, device=device), groups()
    wanted = Policy(sharp(torch.bfloat16), pack=False, **how).logprobs(b)
    policy = Policy(pretrained(tmp_path, attention=name), **how)
    assert policy._run.module.trunk.config._attn_implementation in (name, NAME)
    if policy._run.layout.packed: assert (policy.logprobs(b) - wanted)[b.mask].abs().max() < .3
    else:
        with pytest.raises(ValueError, match="pack=True, but"):
            Policy(pretrained(tmp_path, attention=name), pack=True, **how)


# -- a step
def test_a_step_is_that_of_the_cpu(device):
    "In fp32: loss, entropy's part included, gradient and weights; packed there, padded here."
    b, net = batch(), sharp()
    there, here = (Policy(net, optimizer=UNCLIPPED, device=d, pack=p) for d, p in ((device, True), (CPU, False)))
    (grads, (mine,)), (wanted, (theirs,)) = (stepped(p, b, ppo, entropy=True) for p in (there, here))
    assert next(there._run.module.parameters()).device.type == device.type
    assert distance(grads, wanted) <= 1e-4
    for k in ("loss", "grad_norm", "approx_kl", "ratio", "clip_frac"):
        assert float(mine[k]) == pytest.approx(float(theirs[k]), rel=1e-4, abs=1e-6)
    assert_close(weights(there), weights(here), rtol=0, atol=MOVED)


def test_bf16_learns_in_fp32_masters(device):
    "Steps of 1e-6 add up in fp32, where bf16 weights stay; steps that are large enough lower the loss."
    b, net, moved = batch(), sharp(torch.bfloat16), {}
    for low in (False, True):
        policy = Policy(net, lr=1e-6, engine=plain(low_precision=low), device=device)
        assert {p.dtype for p in policy._run.module.parameters()} == {torch.bfloat16 if low else torch.float32}
        before = weights(policy)
        # one that has no gradient, as words that no row has, is not asked
        asked = {n: g != 0 for n, g in stepped(policy, b, sft, n=3)[0].items()}
        change = torch.cat([(x - before[n])[asked[n]].float().abs() for n, x in weights(policy).items()])
        moved[low] = float((change > 5e-7).float().mean())
    assert moved[False] > .9 and moved[True] < .1
    policy = Policy(net, lr=LR, device=device)
    _, losses = stepped(policy, b, sft, n=6)
    assert float(losses[-1]["loss"]) < .9*float(losses[0]["loss"])


def test_a_critic_and_a_scorer_are_those_of_the_cpu(device):
    b, net = batch(), sharp()
    b["unit"], b["chosen"] = torch.arange(len(b)//2).repeat_interleave(2), torch.arange(len(b)) % 2 == 0
    for make, ask, loss in ((Critic, "values", value), (Scorer, "scores", verdict)):
        found = []
        for d, pack in ((device, True), (CPU, False)):
            made = make(net, optimizer=UNCLIPPED, device=d, pack=pack)
            with torch.no_grad(): made._run.module.head.weight.copy_(torch.linspace(-1, 1, SIZES["hidden_size"]))
            before = getattr(made, ask)(b)
            grads, (metrics,) = stepped(made, b, loss)
            found.append((before, float(metrics["loss"]), grads, weights(made), getattr(made, ask)(b)))
        (was, loss_, grads, now, after), (cpu_was, cpu_loss, cpu_grads, cpu_now, cpu_after) = found
        scale = float(cpu_was.abs().max())
        assert_close(was, cpu_was, rtol=0, atol=1e-4*scale)
        assert loss_ == pytest.approx(cpu_loss, rel=1e-4) and distance(grads, cpu_grads) <= 1e-4
        assert_close(now, cpu_now, rtol=0, atol=MOVED)
        assert after.isfinite().all() and (after - was).abs().max() > 1e-4*scale
        assert_close(after, cpu_after, rtol=0, atol=1e-3*scale)


def test_an_adapter_learns_and_merges(device):
    pytest.importorskip("peft")
    b, net = batch(), sharp()
    policy = Policy(net, lora=dict(r=4, lora_alpha=8), lr=1e-2, device=device)
    base = policy._run.model.engine.base
    before = {k: checksum(x) for k, x in base.merged({})}
    assert before == {k: checksum(x) for k, x in named_weights(net).items()}
    was = policy.logprobs(b)
    assert_close(was, Policy(net, frozen=True, device=device).logprobs(b), rtol=0, atol=1e-4)
    stepped(policy, b, sft, n=3)
    assert (policy.logprobs(b) - was).abs().max() > .05
    assert before == {k: checksum(x) for k, x in base.merged({})}
    engine = Rollout(net, max_tokens=4, device=device)
    engine.load(policy.weights())
    merged = Policy(engine.module, frozen=True, device=device)
    assert_close(merged.logprobs(b), policy.logprobs(b), rtol=0, atol=1e-3)


def test_a_step_waits_for_the_card_once(monkeypatch, device):
    "As often with six micro-batches as with two; the check of a closure, which is rare, is left out."
    b, found = batch().drop("group"), {}
    for n in (2, 6):
        policy = Policy(sharp(), device=device, micro_rows=12//n)
        monkeypatch.setattr(policy._run.checked, "due", lambda loss: False)
        def step(policy=policy): policy.step(b, ppo, entropy=True)
        step(), step()
        found[n] = waits(step, list(policy._run.module.parameters()))
    assert found[2] > 0     # it is told of a gradient's norm, at least
    assert found[6] == found[2]


# -- sampling
def test_log_probs_of_the_sampler_in_bf16(device, record_property):
    "By its cache and by running rows again, against a policy that packs and one that pads; the masters are fp32."
    net, prompts = sharp(torch.bfloat16), tiny.prompts((5, 9, 3, 7, 12, 4))
    rollout, found = Rollout(net, max_tokens=64 if CARD else 12, stop=[], device=device), {}
    policies = {pack: Policy(net, device=device, pack=pack) for pack in (True, False)}
    rollout.load(policies[True].weights())
    assert rollout.sampler.cached and next(rollout.module.parameters()).dtype == torch.bfloat16
    for cached in (True, False):
        rollout.sampler.cached = cached
        b = rollout.generate(prompts, group_size=4, seed=1)
        assert b.rollout_logprobs[b.mask].std() > .5
        for pack, policy in policies.items():
            off = (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs()
            found[f"cached={cached}, packed={pack}"] = float(off.max()), float(off.mean())
    for name, (largest, mean) in found.items():
        record_property(f"{name}: largest", largest)
        record_property(f"{name}: mean", mean)
        print(f"{name}: largest {largest:.3g}, mean {mean:.3g} nats")
    assert max(x for x, _ in found.values()) < .3 and statistics.mean(x for _, x in found.values()) < .03


# -- engines
@pytest.fixture
def world():
    "The world of one rank that an engine forms ends with the test."
    there = dist.is_initialized()
    yield
    if not there: leave_world()


CUT = {"fsdp2": fsdp2(), "offload": fsdp2(offload="cpu"), "checkpointing": fsdp2(checkpointing=True),
       "plain, checkpointing": plain(checkpointing=True)}


def test_engines_of_one_rank_are_the_plain_one(device, world):
    "FSDP2 over NCCL, weights on the host, activations computed twice: gradients of two steps, weights, losses."
    b, how = batch(), dict(optimizer=steady(LR, weight_decay=.1, max_norm=.5), device=device, micro_rows=5)
    for dtype, names, far in ((torch.float32, list(CUT), 1e-4), (torch.bfloat16, ["fsdp2"], .05)):
        net = sharp(dtype)
        one = Policy(net, **how)
        wanted, theirs = stepped(one, b, ppo, n=2, entropy=True)
        for name in names:
            policy = Policy(net, engine=CUT[name], **how)
            grads, mine = stepped(policy, b, ppo, n=2, entropy=True)
            assert distance(grads, wanted) < far, name
            for m, t in zip(mine, theirs, strict=True):
                for k in ("loss", "grad_norm"): assert float(m[k]) == pytest.approx(float(t[k]), rel=far, abs=far), name
            if dtype == torch.float32: assert_close(weights(policy), weights(one), rtol=0, atol=MOVED)
            on_host = next(iter(policy._run.module.parameters())).device.type
            assert on_host == ("cpu" if name == "offload" else device.type)
    if CARD: assert "cuda:nccl" in dist.get_backend_config()


@pytest.mark.parametrize("first, then", [(DEVICE, CPU), (CPU, DEVICE)], ids=["to the CPU", "to the card"])
def test_a_save_goes_on_elsewhere(tmp_path, device, first, then):
    "Weights and moments to the bit, where the new policy is; its next step is the old one's."
    def policy(where): return Policy(sharp(), optimizer=steady(LR), device=where)
    old, new = policy(first), policy(then)
    for step in Checkpoint(tmp_path, every=1)(2, policy=old): old.step(batch(seed=step), ppo, entropy=True)
    saved = old.state_dict()
    assert Checkpoint(tmp_path).restore(dict(policy=new)) == new.version == 2
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*(tensors(x) for x in (saved, new.state_dict())),
                                                             strict=True))
    assert bool(new._run.model.optimizer.param_groups[0]["fused"]) is (then.type == "cuda")
    moments = new._run.model.optimizer.state.values()
    assert moments and {s["exp_avg"].device.type for s in moments} == {then.type}
    for step in Checkpoint(tmp_path)(3, policy=new): mine = new.step(batch(seed=step), ppo, entropy=True)
    theirs = old.step(batch(seed=2), ppo, entropy=True)
    assert step == 2 and new.version == 3
    for k in ("loss", "grad_norm"): assert float(mine[k]) == pytest.approx(float(theirs[k]), rel=1e-4, abs=1e-6)
    assert_close(weights(new), weights(old), rtol=0, atol=MOVED)


def tensors(state): return [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
