"""Adapters: one frozen model under several learners, syncs that never touch it (LAWS 9), folders that plain
transformers and peft load (LAWS 40)."""
import copy
import json
import os
import socket
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import rarely, skip_without
from forked import forked
from lazily import Lazily
from resident import export_extra, give_back
from rlblocks import Checkpoint, Critic, Policy, Rollout, Scorer, assert_on_policy, here, merge, ppo_loss
from rlblocks.models.adapters import fingerprint, lora_config
from rlblocks.models.lora import merge_adapters
from rlblocks.engines.weights import checksum, named_weights
from rlblocks.engines.engine import EngineSpec, engine_of
from rlblocks.engines.optimizers import adamw
from rlblocks.models.loading import pretrained
from rlblocks.models.prepared import WrapperSettings
from tiny import NEAR, apart, gradients, model, reach, rows, steady
from torch import nn
from torch.testing import assert_close

skip_without("peft")
peft = Lazily("peft")
LORA = dict(r=4, lora_alpha=8)
KINDS = dict(lora=LORA, dora=LORA | dict(use_dora=True), rslora=LORA | dict(use_rslora=True),
             one=LORA | dict(target_modules=["v_proj"]), head=LORA | dict(modules_to_save=["lm_head"]), norm=LORA
             | dict(modules_to_save=["norm"]), embed=LORA | dict(target_modules=["q_proj", "embed_tokens", "lm_head"]))


def pg(out, b): return -torch.where(b.mask, out.logprobs*b.advantages, 0.).sum()/b.n_tokens, {}
def fit(out, b): return torch.where(b.mask, (out.values-b.returns)**2, 0.).sum()/b.n_tokens, {}
def batch(dtype=torch.float32): return rows(dtype=dtype)
def stir(wrapper, n=3, b=None, loss=pg):
    for _ in range(n): wrapper.step(batch() if b is None else b, loss)
    return wrapper
def base_of(policy): return policy._run.model.engine.base
def plainly(net, b): return Policy(net, frozen=True, device="cpu").logprobs(b)
def resting(base): return [(m._active_adapter, m._disable_adapters) for m in base.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_learns_and_the_base_does_not_move(kind):
    net, b = model(), batch()
    policy = Policy(net, lora=KINDS[kind], lr=1e-2, device="cpu")
    base = base_of(policy)
    before = {k: checksum(x) for k, x in base.merged({})}
    # names of the plain model, every weight once
    assert before == {k: checksum(x) for k, x in named_weights(net).items()}
    assert_close(policy.logprobs(b), plainly(net, b), rtol=0, atol=1e-6)
    stir(policy)
    assert (policy.logprobs(b)-plainly(net, b)).abs().max() > .05
    assert before == {k: checksum(x) for k, x in base.merged({})}
    engine = Rollout(net, max_tokens=4, device="cpu")
    engine.load(policy.weights())
    assert_close(plainly(engine.module, b), policy.logprobs(b), rtol=0, atol=1e-5)
    params = {id(p) for p in policy._run.module.parameters()}
    assert params == {id(p) for p in base.trunk.parameters() if p.requires_grad}
    assert not any(id(p) in params for n, p in base.trunk.named_parameters() if n not in base.added)


@pytest.mark.parametrize("kind, syncs", [("lora", 100), ("bf16", 60), ("dora", 60), ("4bit", 60),
                                         *rarely(*((kind, 1000) for kind in ("lora", "bf16", "dora", "4bit")))])
def test_a_thousand_syncs_leave_the_base_bit_for_bit_alone(kind, syncs, tmp_path):
    """LAWS 9: sampled, learnt, synced 1,000 times, in half precision and packed too; the receiver has the trainer's
    numbers."""
    net, b = model(dtype=torch.bfloat16 if kind == "bf16" else torch.float32,
                   **dict(hidden_size=64) if kind == "4bit" else {}), batch()[list(range(4))]
    net.save_pretrained(tmp_path)
    how = dict(lora=LORA) if pytest.importorskip("bitsandbytes") and kind == "4bit" else dict(
        lora=LORA | (dict(use_dora=True) if kind == "dora" else dict(modules_to_save=["lm_head"])))
    policy, engine = Policy(pretrained(tmp_path, quantization="4bit" if kind == "4bit" else None), lr=1e-3,
                            device="cpu", **how), Rollout(net, device="cpu")
    trunk = base_of(policy).trunk
    def hashes():
        tables = {f"{n} {k}": x for n, p in trunk.named_parameters()
                  for k, x in (getattr(p, "quant_state", None).as_dict() if getattr(p, "quant_state", None)
                               else {}).items() if isinstance(x, torch.Tensor)}
        return {n: checksum(x)
                for n, x in [*trunk.named_parameters(), *trunk.named_buffers(), *tables.items()] if not x.requires_grad}
    before, sent = hashes(), set()
    for cycle in range(syncs):
        if cycle % 20 == 0: policy.step(b, pg)
        sent.add(engine.load(policy.weights()).checksums["model.layers.0.self_attn.q_proj.weight"])
    assert len(before) > (30 if kind == "4bit" else 15) and hashes() == before and len(sent) == syncs//20
    held = dict(engine.module.named_parameters())
    # rounded once, where the receiver is in half precision
    assert all(torch.equal(held[n], x.to(held[n].dtype)) for bucket in policy.weights().buckets(1 << 28)
               for n, x in bucket.items() if n in held)
    if kind != "bf16": assert_close(plainly(engine.module, b), policy.logprobs(b), rtol=0, atol=1e-5)


def test_adapters_are_fp32_on_a_half_precision_base():
    "LAWS 30: an update of 1e-6 on a weight of 0.02 is not lost; moments are fp32; the base keeps its two bytes."
    policy = stir(Policy(model(dtype=torch.bfloat16), lora=LORA, lr=1e-6, device="cpu"), 2)
    base = base_of(policy)
    assert {p.dtype for n, p in base.trunk.named_parameters() if n not in base.added} == {torch.bfloat16}
    assert {p.dtype for p in policy._run.module.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in policy._run.model.optimizer.state.values()} == {torch.float32}
    moved = [p for n, p in policy._run.module.named_parameters() if "lora_B" in n]
    assert all((p != 0).float().mean() > .9 for p in moved)
    exported = dict(base.merged(dict(default=1.)))
    assert exported["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    assert exported["model.norm.weight"].dtype == torch.bfloat16


def test_several_learners_stand_on_one_module():
    net, b = model(), batch()
    policy = here.place(Policy, net, lora=LORA, lr=1e-2, device="cpu")
    ref, critic = here.place(Policy, policy, lora=None), here.place(Critic, policy, lora="value", lr=1e-2)
    scorer = Scorer(policy, lora=dict(r=2, name="reward"), lr=1e-2)
    base = base_of(policy)
    assert all(base_of(w) is base for w in (ref, critic, scorer)) and critic._run.module.trunk is base.trunk.model
    assert set(base.own) == {"default", "value", "reward"}
    assert torch.equal(ref.logprobs(b), plainly(net, b)) and ref._run.model.frozen
    alone, apart_ = stir(Policy(net, lora=LORA, lr=1e-2, device="cpu"),
                         4), stir(Critic(net, lora=dict(LORA, name="value"), lr=1e-2, device="cpu"), 4, loss=fit)
    for _ in range(4):                                     # in turns, as in a loop
        policy.step(b, pg)
        critic.step(b, fit)
        scorer.step(b, lambda out, b: (((out.scores-1)**2).sum()/b.n_rows, {}))
    # as if each had a model of its own
    assert torch.equal(policy.logprobs(b), alone.logprobs(b)) and torch.equal(critic.values(b), apart_.values(b))
    assert torch.equal(ref.logprobs(b), plainly(net, b)) and (critic.values(b) != 0).any()
    assert (scorer.scores(b) != 0).all()
    with pytest.raises(RuntimeError, match="frozen"): ref.step(b, pg)
    with pytest.raises(ValueError, match="trained by a Critic already"): Critic(policy, lora="value")
    assert torch.equal(Policy(policy, lora="default", frozen=True).logprobs(b), policy.logprobs(b))


def test_the_reference_is_what_the_kl_needs():
    "A frozen policy serves as a base as well; one that trains its own weights does not."
    net, b = model(), batch()
    ref = Policy(net, frozen=True, device="cpu")
    policy = stir(Policy(ref, lora=LORA, lr=1e-2))
    assert torch.equal(ref.logprobs(b), plainly(net, b)) and (policy.logprobs(b) != ref.logprobs(b)).any()
    with pytest.raises(ValueError, match="change with every step"): Policy(Policy(net, device="cpu"), lora=None)
    with pytest.raises(ValueError, match="engine='fsdp2' cannot be chosen here"):
        Policy(policy, lora=None, engine="fsdp2")
    probe = stir(Critic(policy, lora=None, lr=1e-2), loss=fit)             # a head alone
    assert [n for n, _ in probe._run.module.named_parameters()] == ["head.weight"] and (probe.values(b) != 0).any()


@pytest.mark.parametrize("how", [dict(), dict(engine=EngineSpec(checkpointing=True))])
def test_switching_never_leaks(how):
    """The state of the layers is the same before and after each call, also one that fails in the forward, in the
    loss, in the backward."""
    net, b = model(dtype=torch.float64), rows()
    policy = Policy(net, lora=LORA, lr=1e-2, device="cpu", **how)
    critic, ref, base = Critic(policy, lora="value", lr=1e-2), Policy(policy, lora=None), base_of(policy)
    rest, flags = resting(base), [p.requires_grad for p in base.trunk.parameters()]
    class Halt(Exception): pass
    def halt(*_): raise Halt
    def in_loss(out, b): raise Halt
    def in_backward(out, b):
        out.logprobs.register_hook(halt)
        return pg(out, b)
    for call in (lambda: policy.step(b, in_loss), lambda: policy.step(b, in_backward)):
        with pytest.raises(Halt): call()
        assert resting(base) == rest
    hook = base.trunk.model.layers[1].register_forward_pre_hook(halt)
    for call in (lambda: policy.logprobs(b), lambda: critic.step(b, fit), lambda: ref.logprobs(b)):
        with pytest.raises(Halt): call()
        assert resting(base) == rest
    hook.remove()
    stir(policy, b=b), stir(critic, b=b, loss=fit)
    assert resting(base) == rest and all(off for _, off in rest)
    assert [p.requires_grad for p in base.trunk.parameters()] == flags
    assert_close(ref.logprobs(b), plainly(net, b), rtol=0, atol=0)


def test_recomputed_layers_find_their_adapter():
    net, b = model(dtype=torch.float64), rows()
    def grads(**how):
        policy = stir(Policy(net, lora=LORA, optimizer=adamw(lr=1e-2, max_norm=1e9), device="cpu", **how), 2, b)
        critic = Critic(policy, lora="value", optimizer=adamw(lr=1e-2, max_norm=1e9))
        stir(critic, 2, b, fit)
        found = gradients(critic)
        critic.step(b, fit)
        return found
    assert apart(grads(engine=EngineSpec(checkpointing=True), micro_rows=3), grads()) < 1e-8


def test_the_gradient_is_that_of_peft():
    net, b = model(dtype=torch.float64), rows()
    policy = stir(Policy(net, lora=LORA, optimizer=adamw(lr=1e-2, max_norm=1e9), device="cpu", micro_rows=5), 2, b)
    other = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(**LORA, target_modules="all-linear"))
    theirs = {n: p for n, p in other.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for n, p in policy._run.module.named_parameters():
            theirs["base_model.model." + n.removeprefix("adapter.").replace(".weight", ".default.weight")].copy_(p)
    plain = Policy(other, optimizer=adamw(lr=1e-2, max_norm=1e9), device="cpu")
    mine, want = gradients(policy), gradients(plain)
    policy.step(b, pg), plain.step(b, pg)
    assert apart({n.removeprefix("adapter."): g for n, g in mine.items()},
                 {n.removeprefix("trunk.base_model.model.").replace(".default", ""): g for n, g in want.items()}) < 1e-9


def test_the_ratio_of_the_first_update_is_one():
    "LAWS 29: dropout in an adapter's folder is off; asked for, it is refused."
    b = batch()
    with pytest.raises(ValueError, match="lora_dropout=0.05"):
        Policy(model(), lora=LORA | dict(lora_dropout=.05), device="cpu")
    policy = stir(Policy(model(attention_dropout=.1), lora=LORA, lr=1e-2, device="cpu", pack=True))
    b["old_logprobs"] = Policy(policy, lora="default", frozen=True, pack=False, micro_rows=3).logprobs(b)
    def loss(out, b):
        assert_on_policy(out.logprobs, b.old_logprobs, b.mask, tol=1e-4)
        return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    policy.step(b, loss)


def test_the_seed_makes_the_adapter():
    made = lambda **how: Policy(model(), lora=LORA | how, device="cpu").state_dict()["module"]
    torch.manual_seed(5)
    first = made()
    state = torch.random.get_rng_state()
    second, third = made(), made(seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    key = "adapter.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(first[key], second[key]) and not torch.equal(first[key], third[key])


def test_state_is_the_adapter_and_the_name_of_its_base(tmp_path):
    "Checkpoints hold no base; a resumed run has the numbers of one that was not stopped; another base is refused."
    net, b = model(), batch()
    def fresh(net=net):
        policy = Policy(net, lora=LORA, value_head=True, lr=1e-2, device="cpu")
        return dict(policy=policy, critic=Critic(policy, lora="value", lr=1e-2))
    def run(parts, steps, path=None):
        for _ in Checkpoint(path, every=2)(steps, **parts):
            parts["policy"].step(b, lambda out, b: (pg(out, b)[0] + fit(out, b)[0], {}))
            parts["critic"].step(b, fit)
        return parts["policy"].logprobs(b), parts["policy"].values(b), parts["critic"].values(b)
    want = run(fresh(), 6)
    run(fresh(), 4, tmp_path)
    for x, y in zip(run(fresh(), 6, tmp_path), want, strict=True): assert torch.equal(x, y)
    state = fresh()["policy"].state_dict()
    assert all(k.startswith(("adapter.", "head.")) for k in state["module"])
    assert sum(x.numel() for x in state["module"].values()) == 4096 + 33
    with pytest.raises(ValueError, match="adapter on another base"):
        fresh(model(seed=1))["policy"].load_state_dict(state)
    with pytest.raises(ValueError, match="the state has 'trunk.model.embed_tokens.weight', which this model has not"):
        fresh()["policy"].load_state_dict(Policy(net, device="cpu").state_dict())


def test_the_exporter_holds_a_bucket_and_a_tensor():
    "LAWS 22: buckets are small, and nothing of the model's size is made."
    net = model(vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
                num_key_value_heads=4)
    policy = stir(Policy(net, lora=LORA, device="cpu"), 1)
    largest = max(x.nbytes for x in named_weights(net).values())
    sizes = [sum(x.nbytes for x in bucket.values()) for bucket in policy._run.model.iter_full_params(1 << 16, "trunk.")]
    assert max(sizes) <= max(largest, 1 << 16) and len(sizes) > 10


def test_a_folder_that_is_there_is_meant_and_not_a_new_name(tmp_path, monkeypatch):
    "`save_pretrained(\"out\", adapter=True)`, then lora=\"out\": the plain word is the folder's."
    monkeypatch.chdir(tmp_path)
    model().save_pretrained("base")
    policy = stir(Policy("base", lora=LORA, lr=1e-2, device="cpu"), 2)
    policy.save_pretrained("out", adapter=True)
    b = rows(B=3, dtype=torch.float32)
    assert torch.equal(Policy("base", lora="out", device="cpu").logprobs(b), policy.logprobs(b))
    for base in ("base", policy):
        with pytest.raises(ValueError, match="lora='typo' is the name of no adapter here"):
            Policy(base, lora="typo", frozen=True, **dict(device="cpu") if base == "base" else {})
    assert lora_config("value")[:1] + lora_config("value")[2:] == ("value", None, 0)


def test_a_second_adapter_where_the_layer_itself_is_cut():
    "FSDP2 gives what it cuts a class of its own; a model whose layers are the linear ones has such adapters."
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers, self.out = (nn.Embedding(16, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
                                                 nn.Linear(8, 16))
        def forward(self, tokens):
            h = self.embed(tokens).cumsum(1)
            for layer in self.layers: h = h + torch.tanh(layer(h))
            return self.out(h)
    policy = Policy(Net, engine="fsdp2", lora=dict(r=2, target_modules=["layers.0", "layers.1"]), lr=1e-2, device="cpu")
    critic, b = Critic(policy, lora="value", lr=1e-2), rows(B=3, dtype=torch.float32)
    b["tokens"] %= 16
    before = policy.logprobs(b)
    critic.step(b, lambda out, b: (torch.where(b.mask, (out.values-1)**2, 0.).sum()/b.n_tokens, {}))
    assert torch.equal(policy.logprobs(b), before) and critic.values(b).abs().max() > 0


def peaks(rank, folder, engine, port):
    """Tensors beside what stays, while merged weights are exported in buckets of three; with an engine the base is
    sharded over two ranks."""
    give_back()
    if engine:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
        torch.distributed.init_process_group("gloo")
    from rlblocks.models.forward import Forward
    from rlblocks.engines.sharded_model import ShardedModel
    from rlblocks.models.lora import on_base
    torch.set_num_threads(1)
    def packed(layer):
        import bitsandbytes as bnb
        other = bnb.nn.Linear4bit(1500, 1401, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        other.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        return other.to("cpu")
    found, size = {}, 1500*1401*4
    for kind in ("lora", "dora", "bf16") if engine else ("lora", "dora", "bf16", "4bit"):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(1500, 1401, bias=False)
                              for _ in range(5)]).to(torch.bfloat16 if kind == "bf16" else torch.float32)
        if kind == "4bit": net = nn.Sequential(*map(packed, net))
        reader = Forward(net)
        lora = dict(r=4, target_modules=[str(i) for i in range(5)], use_dora=kind == "dora")
        setup = WrapperSettings(lora, engine_of(engine), device="cpu")
        setup, _ = on_base(None, reader, setup, "Policy")
        m = ShardedModel(reader, engine=setup.engine, device="cpu")
        found[kind] = export_extra(lambda n, m=m: m.iter_full_params(n, "trunk."), 3*size)/size*2**20
    torch.save(found, folder/f"peaks{rank}.pt")


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the kernel's account of this process")
@pytest.mark.parametrize("engine", rarely(None, "fsdp2", "zero3"))
def test_a_merged_export_holds_a_bucket_and_a_tensor(tmp_path, engine):
    "LAWS 22 for adapters: LoRA, DoRA, on half-precision, packed and sharded weights; in processes of its own."
    skip_without("deepspeed" if engine == "zero3" else "bitsandbytes")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = 2 if engine else 1
    forked(peaks, (tmp_path, engine, port), ranks)
    for found in (torch.load(tmp_path/f"peaks{r}.pt") for r in range(ranks)):
        # in tensors: three in the bucket, one under way
        assert len(found) == (3 if engine else 4) and all(3.5 < x < 4.5 for x in found.values()), found


# -- many ranks

# B is drawn as A is: at B = 0 A has no gradient in the first step, and its moments would begin in the second
DRAWN = LORA | dict(init_lora_weights=False)
HOW = dict(lora=DRAWN, dora=DRAWN | dict(use_dora=True), head=DRAWN | dict(modules_to_save=["lm_head"]),
           lm_head=DRAWN | dict(target_modules=["q_proj", "lm_head"]))


LR, STEPS = 1e-3, 2      # in the policy's second step the moments of every weight are of two gradients


def on_shards(b, whole, engine, names=tuple(HOW)):
    """A policy, its reference and a critic that came later, stepped in turns: what they compute, what they send,
    what they keep."""
    found = {}
    for name in names:
        how = HOW[name]
        policy = Policy(model(), lora=how, optimizer=steady(LR), device="cpu",
                        engine=replace(engine_of(engine), checkpointing=name != "lm_head"), micro_rows=5)
        ref, critic = Policy(policy, lora=None, engine=engine), Critic(policy, lora=DRAWN | dict(name="value"),
                                                                       optimizer=steady(LR), micro_rows=5)
        metrics = [(policy.step(b, pg), critic.step(b, fit)) for _ in range(STEPS)]
        sent = {k: x for bucket in policy.weights().buckets(1 << 14) for k, x in bucket.items()}
        outputs = torch.stack([policy.logprobs(whole), ref.logprobs(whole), critic.values(whole)])
        found[name] = dict(outputs=outputs, sent=sent, kept=policy.state_dict()["module"]
                           | {f"critic.{k}": x for k, x in critic.state_dict()["module"].items()}, metrics=metrics,
                           transform=policy._run.layout.transform)
        if engine: others(policy, ref, b, whole, outputs, sharded=engine not in ("zero1", "zero2"), late=name != "head")
    return found


def others(policy, ref, b, whole, outputs, sharded, late):
    "What fails leaves the shards in order; so does an adapter on the output layer, put on when that is sharded."
    if sharded:
        with pytest.raises(ValueError, match="starts from whole weights"):
            Critic(policy, lora=dict(name="late", use_dora=True))
    hook = base_of(policy).trunk.model.layers[1].register_forward_pre_hook(lambda *_: 1/0)
    for call in (lambda: policy.step(b, pg), lambda: ref.logprobs(whole)):
        with pytest.raises(ZeroDivisionError): call()
    hook.remove()
    with pytest.raises(ZeroDivisionError): policy.step(b, lambda out, b: 1/0)
    for _ in range(2):
        assert torch.equal(ref.logprobs(whole), outputs[1]) and torch.equal(policy.logprobs(whole), outputs[0])
    if not late: return
    later = Policy(policy, lora=dict(name="later", r=2, target_modules=["lm_head"]), lr=1e-2)
    assert_close(torch.stack([policy.logprobs(whole), later.logprobs(whole)]), outputs[:2], rtol=0, atol=1e-6)
    later.step(b, pg)
    assert (later.logprobs(whole)-outputs[1]).abs().max() > 1e-3
    assert_close(torch.stack([policy.logprobs(whole), ref.logprobs(whole)]), outputs[:2], rtol=0, atol=1e-6)


def one_rank(rank, world, folder, engine, names):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    whole = batch()
    torch.save(on_shards(whole.parts(world)[rank], whole, engine, names), folder/f"{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def one_process(): return on_shards(batch(), batch(), None)


# ZeRO-3 brings a copy of a whole layer, FSDP2 has what else an adapter can be
QUICK = [("fsdp2", 2, ("dora", "lm_head")), ("zero3", 2, ("head",))]
ALL = [(engine, world, tuple(HOW)) for engine in ("fsdp2", "zero1", "zero2", "zero3") for world in (1, 2, 4)]


@pytest.mark.ranks
@pytest.mark.parametrize("engine, world, names", QUICK + rarely(*ALL),
                         ids=lambda x: " ".join(x) if isinstance(x, tuple) else str(x))
def test_adapters_on_a_sharded_base(engine, world, names, one_process, tmp_path):
    """The base in pieces under adapters: losses, norms, weights and outputs are those of one process without an
    engine, on every rank; the export is whole."""
    if engine.startswith("zero"): skip_without("deepspeed")
    forked(one_rank, (world, tmp_path, engine, names), world)
    ranks = [torch.load(tmp_path/f"{rank}.pt", weights_only=False) for rank in range(world)]
    for name, want in ((name, one_process[name]) for name in names):
        for step, pair in enumerate(want["metrics"]):
            for which, metrics in enumerate(pair):
                joined = merge(*(r[name]["metrics"][step][which] for r in ranks))
                for key in ("loss", "grad_norm"):
                    assert float(joined[key]) == pytest.approx(float(metrics[key]), rel=(far := reach(torch.ones(1))),
                                                               abs=far), (name, step, which, key)
        for got in (r[name] for r in ranks):
            assert_close(got["outputs"], want["outputs"], rtol=0, atol=reach(want["outputs"]))
            # straight from hidden states; ZeRO-3 brings a whole layer's copy of its own only
            known = want["transform"] if (engine, name) != ("zero3", "head") else None
            assert got["transform"] == known and want["transform"]
            for what in ("sent", "kept"):
                assert got[what].keys() == want[what].keys()
                for k, x in want[what].items(): assert_close(got[what][k], x, rtol=0, atol=NEAR*LR)


# -- folders

def test_saved_folders_are_plain_and_peft(tmp_path):
    "LAWS 40: merged for transformers, alone for peft, and back again."
    from transformers import AutoModelForCausalLM
    net, b = model(), batch()
    net.save_pretrained(tmp_path/"base")
    policy = stir(Policy(tmp_path/"base", lora=LORA | dict(modules_to_save=["lm_head"]), lr=1e-2, device="cpu"))
    policy.save_pretrained(tmp_path/"merged"), policy.save_pretrained(tmp_path/"adapter", adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path/"merged")
    assert type(merged) is type(net) and named_weights(merged).keys() == named_weights(net).keys()
    assert (tmp_path/"merged/generation_config.json").is_file()
    want = policy.logprobs(b)
    assert_close(plainly(merged, b), want, rtol=0, atol=1e-5)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path/"base"), tmp_path/"adapter")
    assert_close(plainly(theirs, b), want, rtol=0, atol=1e-6)
    config = json.loads((tmp_path/"adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path/"base") and config["task_type"] == "CAUSAL_LM"
    again = Policy(tmp_path/"base", lora=tmp_path/"adapter", lr=1e-2, device="cpu")
    assert torch.equal(again.logprobs(b), want)
    named = Policy(again, lora=dict(path=str(tmp_path/"adapter"), name="old"), frozen=True)
    assert torch.equal(named.logprobs(b), want)
    with pytest.raises(ValueError, match="no adapter to save"):
        Policy(net, device="cpu").save_pretrained(tmp_path/"x", adapter=True)
    with pytest.raises(ValueError, match="adapter of another model"):
        Policy(model(num_hidden_layers=1), lora=tmp_path/"adapter", device="cpu")
    with pytest.raises(ValueError, match="has adapters on it already"): Policy(theirs, lora=LORA, device="cpu")


def test_an_adapter_that_peft_trained_goes_on_here(tmp_path):
    net, b = model(), batch()
    theirs = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], lora_dropout=.5, use_dora=True, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if "lora_B" in n: p.copy_(5*torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))))
    theirs.save_pretrained(tmp_path)
    policy = Policy(net, lora=tmp_path, lr=1e-2, device="cpu")
    want = plainly(theirs.eval(), b)
    assert_close(policy.logprobs(b), want, rtol=0, atol=1e-6)
    assert (want-plainly(net, b)).abs().max() > .005 and (stir(policy).logprobs(b)-want).abs().max() > 1e-3


def test_reward_models_and_critics_with_adapters(tmp_path):
    from transformers import AutoModelForSequenceClassification
    net, b = model(), batch()
    scorer = Scorer(net, lora=LORA, lr=1e-2, device="cpu")
    for _ in range(4): scorer.step(b, lambda out, b: (((out.scores-b.lengths/9)**2).sum()/b.n_rows, {}))
    scorer.save_pretrained(tmp_path/"rm")
    plain, again = AutoModelForSequenceClassification.from_pretrained(tmp_path/"rm"), Scorer(tmp_path/"rm",
                                                                                             device="cpu")
    assert_close(again.scores(b), scorer.scores(b), rtol=0, atol=1e-5)
    assert_close(plain(b.tokens[:1, :2]).logits[0], scorer.scores(b)[:1], rtol=0, atol=1e-5)
    on = Scorer(tmp_path/"rm", lora=LORA, lr=1e-2, device="cpu")          # its head goes on too
    assert torch.equal(on.scores(b), again.scores(b))
    assert "head.weight" in on.state_dict()["module"]


# -- sums of adapters

def test_adapters_are_combined_into_a_plain_folder(tmp_path):
    net = model()
    net.save_pretrained(tmp_path/"base")
    for i, loss in enumerate((pg, lambda out, b: (-pg(out, b)[0], {}))):
        stir(Policy(tmp_path/"base", lora=LORA | dict(seed=i), lr=1e-2, device="cpu"),
             loss=loss).save_pretrained(tmp_path/str(i), adapter=True)
    merge_adapters(tmp_path/"base", {tmp_path/"0": .25, tmp_path/"1": .5}, tmp_path/"sum")
    own, start = named_weights(Policy(tmp_path/"sum", device="cpu")._run.module.trunk), named_weights(net)
    want = {k: x.clone() for k, x in start.items()}
    for folder, share in ((tmp_path/"0", .25), (tmp_path/"1", .5)):
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(net), folder).merge_and_unload()
        for k, x in named_weights(theirs).items(): want[k] += share*(x-start[k])
    for k in want: assert_close(own[k], want[k], rtol=0, atol=1e-6)
    assert max((own[k]-start[k]).abs().max() for k in own) > 1e-3
    merge_adapters(tmp_path/"base", tmp_path/"0", tmp_path/"half", dtype=torch.bfloat16)
    assert Policy(tmp_path/"half", frozen=True, device="cpu")._run.module.trunk.dtype == torch.bfloat16
    stir(Policy(tmp_path/"base",
                lora=LORA | dict(use_dora=True), lr=1e-2, device="cpu")).save_pretrained(tmp_path/"dora", adapter=True)
    with pytest.raises(ValueError, match="DoRA adapter; it can be merged alone"):
        merge_adapters(tmp_path/"base", {tmp_path/"0": 1., tmp_path/"dora": 1.}, tmp_path/"x")


def test_the_combiner_is_a_command(tmp_path):
    from rlblocks.models.lora import main
    net, b = model(), batch()
    net.save_pretrained(tmp_path/"base")
    policy = stir(Policy(tmp_path/"base", lora=LORA, lr=1e-2, device="cpu"))
    policy.save_pretrained(tmp_path/"a", adapter=True)
    main([str(tmp_path/"base"), f"{tmp_path/'a'}", str(tmp_path/"out")])
    assert_close(plainly(model_of(tmp_path/"out"), b), policy.logprobs(b), rtol=0, atol=1e-5)
    main([str(tmp_path/"base"), f"{tmp_path/'a'}:0", str(tmp_path/"none"), "--dtype", "float32"])
    assert torch.equal(plainly(model_of(tmp_path/"none"), b), plainly(net, b))
    with pytest.raises(FileNotFoundError, match="no adapter's folder"):
        main([str(tmp_path/"base"), str(tmp_path/"nowhere"), str(tmp_path/"out")])


def model_of(path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path)


# -- quantized bases

@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantized_base_trains_and_exports_what_it_computes(bits, tmp_path):
    """QLoRA on the CPU: the packed weights do not move; the merged folder is plain, of the numbers that were
    multiplied with."""
    pytest.importorskip("bitsandbytes")
    net, b = model(hidden_size=64, intermediate_size=128), batch()
    net.save_pretrained(tmp_path/"base")
    policy = Policy(pretrained(tmp_path/"base", quantization=bits), lora=LORA, lr=1e-2, device="cpu")
    trunk = base_of(policy).trunk
    packed = {n: checksum(p) for n, p in trunk.named_parameters() if not p.requires_grad}
    assert any(p.dtype in (torch.uint8, torch.int8) for p in trunk.parameters())
    ref = Policy(policy, lora=None).logprobs(b)
    assert .5 > (ref-plainly(net, b)).abs().max() > 1e-3
    stir(policy)
    want = policy.logprobs(b)
    assert (want-ref).abs().max() > .05
    assert packed == {n: checksum(p) for n, p in trunk.named_parameters() if not p.requires_grad}
    far = 1e-5 if bits == "4bit" else .05              # the 8-bit kernel rounds what enters a layer, too
    engine = Rollout(tmp_path/"base", device="cpu")
    engine.load(policy.weights())
    assert_close(plainly(engine.module, b), want, rtol=0, atol=far)
    policy.save_pretrained(tmp_path/"merged")
    merged = model_of(tmp_path/"merged")
    # what flows back through the packed layers is what flows through their numbers, also after a pass without gradient
    if bits == "4bit":
        unpacked = model_of(tmp_path/"base")
        unpacked.load_state_dict(dict(base_of(policy).merged({})))
        other = Policy(unpacked, lora=LORA, optimizer=adamw(lr=1e-2, max_norm=1e9), device="cpu")
        with torch.no_grad():
            for k, p in base_of(other).own["default"].items(): p.copy_(base_of(policy).own["default"][k])
        found, theirs = gradients(policy), gradients(other)
        policy.step(b, pg), other.step(b, pg)
        assert apart(found, theirs) < 1e-4
    assert not getattr(merged, "is_quantized", False) and merged.dtype == torch.float32
    assert_close(plainly(merged, b), want, rtol=0, atol=far)
    with pytest.raises(ValueError, match="quantized weights do not train"):
        Policy(pretrained(tmp_path/"base", quantization=bits), device="cpu")
    with pytest.raises(TypeError, match="is loaded already"): pretrained(net, quantization=bits)
    with pytest.raises(ValueError, match="are not sharded here"):
        Policy(pretrained(tmp_path/"base", quantization=bits), lora=LORA, engine="fsdp2", device="cpu")


# -- what it refuses

def test_refusals():
    tied = model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="is one weight with"):
        Policy(tied, lora=LORA | dict(modules_to_save=["lm_head"]), device="cpu")
    Policy(tied, lora=LORA, device="cpu")
    with pytest.raises(TypeError, match="lora is a float"): Policy(model(), lora=8., device="cpu")
    with pytest.raises(FileNotFoundError, match="no adapter's folder"): Policy(model(), lora="some/where", device="cpu")
    with pytest.raises(ValueError, match="low_precision=True"):
        Policy(model(), lora=LORA, engine=EngineSpec(low_precision=True), device="cpu")
    with pytest.raises(ValueError, match="a plain word is wanted"): lora_config(dict(name="a b"))
    with pytest.raises(ValueError, match="brings its own settings; leave out r"): lora_config(dict(path="x", r=3))
    policy = Policy(model(), lora=LORA, device="cpu")
    with pytest.raises(ValueError, match="an adapter 'default' on this base already"): Critic(policy, lora=dict(r=3))
    with pytest.raises(ValueError, match="low_precision=True"):
        Critic(policy, lora="value", engine=EngineSpec(low_precision=True))


@pytest.mark.parametrize("odd, says", [(dict(lr="1e-6"), "lr='1e-6'"), (dict(micro_tokens=0), "micro_tokens=0"),
                                       (dict(optimizer=8), "optimizer")])
def test_a_setting_that_is_refused_leaves_the_base_alone(odd, says):
    base = Policy(model(), frozen=True, device="cpu")
    with pytest.raises((ValueError, TypeError), match=says): Policy(base, lora=LORA | dict(name="a"), **odd)
    Policy(base, lora=LORA | dict(name="a"))


def test_an_adapter_whose_wrapper_failed_is_nobodys():
    base = Policy(model(), frozen=True, device="cpu")
    with pytest.raises(ZeroDivisionError): Policy(base, lora=LORA | dict(name="a"), optimizer=lambda named: 1/0)
    assert float(Policy(base, lora="a").step(batch(), pg)["version"]) == 1


def test_a_module_of_ones_own_takes_adapters():
    class GRU(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.rnn, self.mid, self.out = (nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True),
                                                      nn.Linear(16, 16), nn.Linear(16, 32))
        def forward(self, tokens): return self.out(self.mid(self.rnn(self.emb(tokens))[0]))
    torch.manual_seed(0)
    net, b = GRU(), batch()
    policy = stir(Policy(net, lora=LORA, lr=1e-1, device="cpu"))
    engine = copy.deepcopy(net)
    engine.load_state_dict(dict(base_of(policy).merged(dict(default=1.))))
    assert_close(plainly(engine, b), policy.logprobs(b), rtol=0, atol=1e-5)
    assert (policy.logprobs(b)-plainly(net, b)).abs().max() > .05


def test_the_mark_of_a_base_is_what_older_versions_wrote():
    "States hold it: another formula would refuse them."
    weights = [("a", torch.arange(5.)), ("b", torch.linspace(-1, 1, 6).view(2, 3).bfloat16()), ("c", torch.arange(3))]
    assert fingerprint(weights) == "ab338bdea367a773"
