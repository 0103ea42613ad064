"""Layers cut over ranks are the plain process (tensor parallel, FSDP2 over the replicas; LAWS 1, 22, 24, 29,
30, 40): one launch per world size holds all cases; gloo, CPU.

The whole matrix: `pytest -m "" tests/test_tensor.py` (benchmarks/engines.py runs it and keeps the figures)."""
import resource
import time
from importlib.util import find_spec
from dataclasses import replace
from functools import cache

import pytest
import test_engines as t
import torch
import torch.distributed as dist
from conftest import rarely
from forked import on_ranks
from resident import export_extra, give_back
from rlblocks import Critic, Policy, SpmdPool, entropy
from rlblocks.engines.tensor_plan import partial_gradients
from rlblocks.engines.fsdp2 import gathered
from rlblocks.checkpoint.shards import read_part_shards, part_state, write_shards
from rlblocks.engines.engine import EngineSpec, engine_of, fsdp2
from rlblocks.engines.optimizers import OptimizerSpec, muon
from rlblocks.models.loading import pretrained
from test_engines import HOW, batch, compare, grpo, ppo, run, sft, whole_weights
from tiny import NEAR, SIZES, model, reach, steady

SIZE = 2
WAYS = {"tensor": dict(engine=EngineSpec(tensor_parallel=SIZE)),
        "tensor, fsdp2": dict(engine=fsdp2(tensor_parallel=SIZE)),
        "tensor, sequence": dict(engine=EngineSpec(tensor_parallel=SIZE, sequence_parallel=2))}
WORLDS = {2: ["tensor"], 4: ["tensor, fsdp2", "tensor", "tensor, sequence"]}


LR = 1e-3
LORA = dict(lora=dict(r=4, lora_alpha=8), optimizer=steady(LR))


# -- losses and cases
def by_logits(out, b):
    "Something that only logits tell."
    return (out.logits.softmax(-1).square().sum(-1)*b.mask).sum()/b.n_tokens, {}


def by_measure(out, b):
    "The same, of distributions that nobody holds at once."
    return (out.measured[..., 0]*b.mask).sum()/b.n_tokens, {}


def balanced(out, b):
    "A router's own loss beside another."
    real = torch.arange(b.tokens.shape[1]) < b.lengths[:, None]
    return sft(out, b)[0] + .01*torch.where(real, out.router_logits.logsumexp(-1).square().sum(-1),
                                            0.).sum()/b.n_tokens, {}


def joined(how, **more): return how | dict(engine=replace(engine_of(how.get("engine")), **more))


def cases():
    """Those of the engines, and other ways a plan cuts: norms inside a cut, one table for ids and output, ids that
    do not divide, softcaps, biases, experts."""
    b, even = batch(), lambda b, world, rank: b.parts(world)[rank] if world > 1 else b
    policy = lambda *a, how={}, engine={}, **k: lambda **e: Policy(model(*a, **k), **HOW | how | joined(e, **engine))
    # toys, without a plan
    plain = {k: c for k, c in t.cases().items() if k not in ("unused weights", "ranks use unlike weights")}
    return plain | {
        "norms inside": (policy("qwen3"), b, even, lambda m, b: m.step(b, ppo, entropy=True)),
        "tied table, checkpointed": (policy("gemma", engine=dict(checkpointing=True)), b, even,
                                     lambda m, b: m.step(b, ppo, entropy=True)),
        "softcaps": (policy("gemma2"), batch(5), even, lambda m, b: m.step(b, grpo)),
        "33 ids": (policy(vocab_size=33), batch(5), even, lambda m, b: m.step(b, grpo)),
        "logits": (policy(), batch(4), even, lambda m, b: m.step(b, by_logits, logits=True)),
        "measured": (policy(), batch(4), even, lambda m, b: m.step(
            b, by_measure, measure=lambda z: z.softmax(-1).square().sum(-1, keepdim=True))),
        "routers": (policy("mixtral"), batch(5), even, lambda m, b: m.step(b, balanced, router_logits=True)),
        "biases": (policy("qwen2"), batch(5), even, lambda m, b: m.step(b, sft)),
        "experts": (policy("mixtral"), b, even, lambda m, b: m.step(b, grpo)),
        "experts, norms inside": (policy("qwen3_moe"), batch(5), even, lambda m, b: m.step(b, grpo)),
        "a shared expert": (policy("qwen2_moe"), batch(5), even, lambda m, b: m.step(b, sft)),
        "lora, ppo": (policy(how=LORA), b, even, lambda m, b: m.step(b, ppo, entropy=True)),
        "lora, sft, biases": (policy("qwen2", how=LORA, engine=dict(checkpointing=True)), batch(5), even,
                              lambda m, b: m.step(b, sft)),
        "lora, experts": (policy("mixtral", how=LORA), batch(5), even, lambda m, b: m.step(b, grpo)),
        "lora, critic": (lambda **e: Critic(model(), **HOW | LORA | e), b, even, lambda m, b: m.step(b, t.value)),
    }


QUICK = {(2, "tensor"): ("ppo, uneven rows", "ppo and ptx", "value head", "tied table, checkpointed", "33 ids",
                         "logits", "measured", "routers", "experts", "experts, norms inside", "lora, ppo",
                         "lora, experts", "lora, critic"),
         (4, "tensor, fsdp2"): ("ppo, uneven rows", "experts", "lora, ppo"),
         (4, "tensor"): ("sft, fewer rows than ranks",), (4, "tensor, sequence"): ("lora, critic",)}


def chosen(way, world, every):
    return {k: c for k, c in cases().items() if (every or k in QUICK[world, way])
            and not ("sequence" in way and k in ("logits", "measured", "routers"))}
def steps_of(every): return t.STEPS if every else t.FEW
def replicas(way, world): return world//SIZE//WAYS[way]["engine"].sequence_parallel


# -- checks on every rank; `world` and `rank` count replicas, as in test_engines
def part(b, world, rank): return b.parts(world)[rank] if world > 1 else b
def tensor(engine, **more): return replace(engine_of(engine), tensor_parallel=SIZE, **more)
def cut(kind="llama", engine=None, **more): return Policy(model(kind), **HOW | more, engine=tensor(engine))


# one of each way in which plans cut: norms inside a cut, softcaps and windows, a shared expert, one matrix for gate and
# rest, latent attention. `make test-long` has all plans
PLANS = ["qwen3", "gemma3", "qwen2_moe", "phi3", "deepseek_v3"]


def gradients(engine, world, rank, folder):
    """The gradient of every single weight, in fp64, to 1e-6 of its own largest entry (transformers' norms pass
    through fp32): Adam would hide one that is twice or half as large."""
    # over more replicas it is the same cut of the same plans
    gradients_of(PLANS if world == 1 else ["gemma3", "qwen2_moe", "phi3"], engine, world, rank)


def more_gradients(engine, world, rank, folder):
    "The same of all other plans."
    others = [k for k in ("qwen2", "gemma", "mixtral", *OTHERS) if k not in PLANS]
    if world == 1: gradients_of(others, engine, world, rank)


def gradients_of(kinds, engine, world, rank):
    b, how = batch(5), HOW | dict(optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=1.), max_norm=None))
    for kind in kinds:
        plain, policy = Policy(in_double(kind), **how), Policy(in_double(kind), **how, engine=tensor(engine))
        before = whole_weights(plain)
        plain.step(b, ppo, entropy=True), policy.step(part(b, world, rank), ppo, entropy=True)
        found, want = ({k: x-before[k] for k, x in whole_weights(m).items()} for m in (policy, plain))
        far = {k: ((found[k]-x).abs().max()/x.abs().max().clamp(min=1e-12)).item() for k, x in want.items() if x.any()}
        still = {k for k in want if k not in far and not k.endswith("e_score_correction_bias")}       # a buffer
        assert found.keys() == want.keys() and not still and max(far.values()) < 1e-6, (kind, far)


def in_double(kind):
    "transformers' fast kernel for experts knows no fp64."
    m = other(kind) if kind in OTHERS else model(kind)
    m.config._experts_implementation = "eager"
    return m.double()


EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
               first_k_dense_replace=0, n_group=1, topk_group=1)
# norms inside a cut that the plan is silent about, latent attention, one matrix for gate and rest, norms of whole
# projections
OTHERS = dict(
    glm4_moe=("Glm4Moe", EXPERTS | dict(head_dim=8, use_qk_norm=True)), phi=("Phi", dict(qk_layernorm=True)),
    deepseek_v3=("DeepseekV3", EXPERTS | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
                                              qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)),
    phi3=("Phi3", {}), glm4=("Glm4", dict(head_dim=8)), olmo2=("Olmo2", {}),
    olmoe=("Olmoe", dict(num_experts=4, num_experts_per_tok=2)), starcoder2=("Starcoder2", {}), cohere=("Cohere", {}),
    granite=("Granite", {}))


def other(kind):
    "One random layer of an architecture."
    import transformers as tf
    name, extra = OTHERS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(tf, f"{name}ForCausalLM")(
            getattr(tf, f"{name}Config")(**SIZES | dict(num_hidden_layers=1, eos_token_id=1, pad_token_id=0) | extra))


def alike(engine, world, rank, folder):
    "What every rank has whole is the same to the bit on all of them, and what is cut is half as large."
    policy = cut("qwen3", engine)
    for _ in range(3): policy.step(part(batch(), world, rank), sft)
    module, cuts = policy._run.model.module, policy._run.model.engine.cut.cuts
    names = {n for n, _ in module.named_parameters()}
    # the last norm, four norms a layer
    assert {n for n in names if n.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight"))} == set(cuts)
    assert len(names - set(cuts)) == 1 + 2*4
    for n, p in module.named_parameters():
        mine = gathered(p.data).contiguous()
        told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(told, mine)
        same = [r for r, x in enumerate(told) if torch.equal(x, mine)]
        assert same == (list(range(dist.get_rank() % SIZE, len(told), SIZE)) if n in cuts
                        else list(range(len(told)))), n
        assert mine.numel()*(SIZE if n in cuts
                             else 1) == dict(model("qwen3").named_parameters())[n.removeprefix("trunk.")].numel()


def reads(engine, world, rank, folder):
    "Everything that is read of the output layer, whose ids are cut."
    for kind in ("llama", "gemma2"):
        policy, plain, b = cut(kind, engine), Policy(model(kind), **HOW), batch(5)
        b["support"] = torch.stack([b.tokens, (b.tokens+9) % 32, torch.full_like(b.tokens, -1)], -1)
        near(policy.logprobs(b), plain.logprobs(b))
        for measure, c in ((lambda z: z.exp().topk(2).values, b), (entropy, b.drop("support"))):
            near(policy.measure(c, measure), plain.measure(c, measure))
        if hasattr(policy, "head"):
            h = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
            near(policy.head()(h), plain.head()(h))


def reshards(engine, world, rank, folder):
    "A state in shards goes into a model that is cut in other ways: blocks in one matrix (experts) too."
    b = batch(5)
    for kind in ("llama", "mixtral"):
        policy, other = cut(kind, engine), Policy(model(kind, seed=1), **HOW, engine="fsdp2")
        part_state(policy, "policy")                   # before the first step: it counts none
        for _ in range(2): policy.step(part(b, world, rank), sft)
        rest, shards = part_state(policy, "policy")
        assert shards
        write_shards(shards, folder/f"{kind}-{engine}")
        dist.barrier()
        for again in (Policy(model(kind, seed=1), **HOW, engine=tensor(engine)), other):
            again.load_state_dict(read_part_shards(rest, again, "policy", folder/f"{kind}-{engine}"))
        want = policy.state_dict()
        for one in (other, cut(kind, engine)):
            one.load_state_dict(want)
            assert all(torch.equal(x, want["module"][k]) for k, x in one.state_dict()["module"].items())
        policy.step(part(b, world, rank), sft), other.step(b, sft)
        mine, theirs = whole_weights(policy), whole_weights(other)
        assert mine.keys() == theirs.keys() and all((x-theirs[k]).abs().max() < NEAR*t.LR for k, x in mine.items())


def same_groups(engine, world, rank, folder):
    "A model uses the process groups of the one before: each has threads and connections of its own."
    def groups(): return len(dist.distributed_c10d._world.pg_map)
    cut(engine=engine)
    before = groups()
    cut("qwen3", engine)
    assert groups() == before, (before, groups())


def export_peak(engine, world, rank, folder):
    "LAWS 22: beside the pieces an export holds one bucket and one weight."
    policy = Policy(model(hidden_size=256, intermediate_size=8192, num_hidden_layers=4), **HOW, engine=tensor(engine))
    mb = 8            # 8 MiB each of three a layer, cut by rows and by columns
    extra, most = export_extra(policy._run.model.iter_full_params,
                               3*mb << 20), 3*mb + mb + (mb/SIZE if engine else 0) + mb/2
    print(f"peak {engine} {world} {rank}: {extra:.1f} of {most:.1f} MiB")
    assert extra < most, f"{extra:.1f} MiB beside the pieces, {most:.1f} is the most"


def adapters(engine, world, rank, folder):
    """Policy, reference and critic on one base that is cut: A and B, their gradients, moments, states and folders
    are those of one process."""
    from peft import PeftModel
    b, made = batch(5), []
    for spec in (tensor(engine), EngineSpec()):
        policy = Policy(model(), **HOW | LORA, engine=replace(spec, checkpointing=True))
        made.append((policy, Policy(policy, lora=None), Critic(policy, **HOW | LORA | dict(lora="value"))))
    (policy, ref, critic), (plain, _, judge) = made
    first, start = ref.logprobs(b), t.copied(policy.state_dict())
    same(start, plain.state_dict(), 0.)              # drawn alike
    # B is 0; where arrays lie differently, a product may be rounded differently
    near(policy.logprobs(b), first)
    assert any(x.any() for k, x in start["module"].items() if "lora_A" in k)
    for _ in range(3):
        (policy.step(part(b, world, rank), ppo, entropy=True), critic.step(part(b, world, rank), t.value),
         plain.step(b, ppo, entropy=True), judge.step(b, t.value))
    # what recomputed layers entered is nobody's
    assert policy._run.model.engine.base.model.engine.entry.x is None
    same(policy.state_dict(), plain.state_dict(), NEAR*LR), same(critic.state_dict(), judge.state_dict(), NEAR*LR)
    lp = policy.logprobs(b)
    assert (lp-first).abs().max() > 1e-3
    near(ref.logprobs(b), first), near(lp, plain.logprobs(b)), near(critic.values(b), judge.values(b))
    policy.save_pretrained(folder/"adapter", adapter=True), policy.save_pretrained(folder/"merged")
    near(Policy(folder/"merged", frozen=True, device="cpu").logprobs(b), lp)
    near(Policy(PeftModel.from_pretrained(model(), folder/"adapter").merge_and_unload(), frozen=True,
                device="cpu").logprobs(b), lp)
    held = Policy(model(), **HOW, frozen=True, engine=tensor(engine))       # a frozen wrapper takes them too
    again = Policy(held, **HOW | LORA | dict(lora=folder/"adapter"))
    near(again.logprobs(b), lp), near(held.logprobs(b), first)
    again.load_state_dict(plain.state_dict()), plain.load_state_dict(t.copied(policy.state_dict()))
    for p, rows in ((policy, part(b, world, rank)), (again, part(b, world, rank)), (plain, b)): p.step(rows, sft)
    for p in (again, plain): same(p.state_dict(), policy.state_dict(), NEAR*LR)
    policy, plain = (Policy(model(dtype=torch.bfloat16), **HOW | LORA | how)
                     for how in (dict(engine=tensor(engine)), {}))
    policy.step(part(b, world, rank), sft)
    # sums in bf16 differ by what is cut, the same adapter merges to the same weights
    plain.load_state_dict(policy.state_dict())
    want = whole_weights(plain)
    assert all(torch.equal(x, want[k]) and x.dtype == want[k].dtype for k, x in whole_weights(policy).items())


def near(x, want): assert (far := (x-want).abs().max()) < reach(want), (far, reach(want))


def same(state, want, far):
    "Adapters, heads and moments."
    assert state["module"].keys() == want["module"].keys() and state["base"] == want["base"]
    assert state["version"] == want["version"]
    pairs = [(state["module"][k], x) for k, x in want["module"].items()] + [
        (state["optimizer"]["state"][i][k], x) for i, kept in want["optimizer"]["state"].items()
        for k, x in kept.items()]
    assert max((x-y).abs().max().item() for x, y in pairs) <= far


def adapters_gradients(engine, world, rank, folder):
    "As `gradients`, of every A and B, where plans cut in all the ways they have for linear layers."
    b, how = batch(5), HOW | dict(optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=1.), max_norm=None),
                                  lora=dict(r=4, lora_alpha=8))
    for kind in ("llama", "qwen2", "phi3"):
        plain, policy = Policy(in_double(kind), **how), Policy(in_double(kind), **how, engine=tensor(engine))
        before = [{k: x.clone() for k, x in plain.state_dict()["module"].items()}]
        for _ in range(2):               # in the first B is 0, and no gradient comes to A
            plain.step(b, ppo, entropy=True), policy.step(part(b, world, rank), ppo, entropy=True)
            before.append({k: x.clone() for k, x in plain.state_dict()["module"].items()})
        found, (start, middle, end) = policy.state_dict()["module"], before
        far = {k: ((found[k]-x).abs().max()/(x-start[k]).abs().max()).item() for k, x in end.items()}
        assert all((end[k] != middle[k]).any() for k in end) and max(far.values()) < 1e-6, (kind, far)


def one_fails(engine, world, rank, folder):
    "A loss that raises on one of the ranks that hold a layer together raises on all; nothing changed."
    policy, calls = cut(engine=engine), []
    before = whole_weights(policy)
    def broken(out, b):
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2: raise KeyError("mine")
        return sft(out, b)
    with pytest.raises(Exception, match="mine"): policy.step(part(batch(), world, rank), broken)
    assert policy.version == 0 and all(torch.equal(x, before[k]) for k, x in whole_weights(policy).items())
    policy.step(part(batch(), world, rank), sft)
    assert policy.version == 1


def placed(engine, world, rank, folder):
    "A pool cuts a batch by replicas and joins the answers, once each."
    b, plain, pool = batch(), Policy(model(), **HOW), SpmdPool()
    policy = pool.place(Policy, model(), **HOW, engine=tensor(engine))
    assert policy.replica == rank
    mine, theirs = policy.step(b, ppo, entropy=True), plain.step(b, ppo, entropy=True)
    assert mine.keys() == theirs.keys()
    assert all(float(mine[k]) == pytest.approx(float(x), rel=1e-4, abs=1e-5) for k, x in theirs.items())
    near(policy.logprobs(b), plain.logprobs(b))


def refuses(engine, world, rank, folder):
    "What cannot be cut says why, by name."
    for match, make in {
        r"GPT2LMHeadModel has no plan .*engine=\"fsdp2\"": lambda: cut("gpt2", engine),
        r"Routed has no plan": lambda: Policy(lambda: t.Routed(False), **HOW, engine=EngineSpec(tensor_parallel=SIZE)),
        r"k_proj has 1 head, which 2 ranks": lambda: Policy(model(num_key_value_heads=1), **HOW,
                                                            engine=EngineSpec(tensor_parallel=SIZE)),
        r"gate_proj has 63 features, which 2 ranks": lambda: Policy(model(intermediate_size=63), **HOW,
                                                                    engine=EngineSpec(tensor_parallel=SIZE)),
        r"engine='zero1' does not go with it": lambda: Policy(model(),
                                                              **HOW, engine=EngineSpec("zero1", tensor_parallel=SIZE)),
        r"tensor_parallel=2: Muon does not step one that is flat": lambda: cut(engine=engine, optimizer=muon()),
        r"ranks 0 and 1 built different models": lambda: Policy(model(seed=min(dist.get_rank(), 1)), **HOW,
                                                                engine=tensor(engine)),
        "use_dora starts from whole weights, and "
        "tensor_parallel=2 has cut these": lambda: cut(engine=engine, lora=dict(r=2, use_dora=True)),
        r"modules_to_save starts from whole weights, and tensor_parallel=2": lambda: Policy(
            cut(engine=engine, frozen=True), **HOW, lora=dict(r=2, modules_to_save=["norm"])),
        r"lm_head gives logits": lambda: cut(engine=engine, lora=dict(r=2, target_modules=["q_proj", "lm_head"])),
        r"embed_tokens is no linear layer": lambda: cut(engine=engine, lora=dict(r=2, target_modules=["embed_tokens"])),
        r"shared_expert.gate_proj is whole on every rank": lambda: cut("qwen2_moe", engine, lora=dict(r=2)),
        # of `adapters`
        r"cuts matrices, and these are quantized": lambda: Policy(
            pretrained(folder/"merged", quantization="4bit"), lora=dict(r=2), device="cpu",
            engine=EngineSpec(tensor_parallel=SIZE)),
        r"tensor_parallel=2 cannot be chosen here": lambda: Policy(
            Policy(model(), frozen=True, **HOW), **HOW, lora=dict(r=2), engine=EngineSpec(tensor_parallel=SIZE)),
        r"its plan does not fit its code": lambda: Policy(untrue(), **HOW, engine=tensor(engine)),
        r"its plan does not fit its code,": lambda: Policy(untrue(torch.bfloat16), **HOW, frozen=True,
                                                           engine=tensor(engine)),
        "no gradient of eight tokens comes back to "
        r"(trunk\.)?model\.layers\.0\.self_attn\.q_norm": lambda: Policy(silent(), **HOW, engine=tensor(engine)),
        r"gradient of x is neither whole": lambda: partial_gradients(dict(x=torch.ones(3)),
                                                                     dict(x=torch.full((3,), .7)), (), None),
        r"world of 3 ranks, or a multiple": lambda: Policy(model(), **HOW, engine=EngineSpec(tensor_parallel=3)),
    }.items():
        if "quantized" in match and find_spec("bitsandbytes") is None: continue
        with pytest.raises(ValueError, match=match): make()


def untrue(dtype=torch.float32):
    "A model whose plan leaves out the sum that ends its experts."
    m = model("mixtral", dtype)
    m._tp_plan = {place: style for place, style in m._tp_plan.items() if not place.endswith("mlp.experts")}
    return m


def silent():
    "A model that nothing comes back through from attention."
    m = model("qwen3")
    for layer in m.model.layers: torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return m


def with_engines(check):
    "A check of tests/test_engines.py, with every model that it gives an engine cut."
    def cut_there(make):
        return lambda *a, **k: make(*a, **k | (dict(engine=tensor(k["engine"])) if "engine" in k else {}))
    def run(engine, world, rank, folder):
        own = {c: getattr(t, c) for c in ("Policy", "Critic", "Scorer")}
        for c, make in own.items(): setattr(t, c, cut_there(make))
        try: check(engine, world, rank, folder)
        finally:
            for c, make in own.items(): setattr(t, c, make)
    run.__name__ = check.__name__
    return run


CHECKS = [gradients, adapters, adapters_gradients, alike, same_groups, export_peak, reads, reshards, one_fails, placed,
          refuses] + [with_engines(c)
                      for c in (t.on_policy, t.reference, t.half_precision, t.poison, t.resumes, t.failing, t.saved)]
# over replicas; what is computed there is the same cuts of the same plans, and long
SPREAD = [c for c in CHECKS if c.__name__ in ("alike", "reshards", "placed")]


# -- in every process
def one_rank(rank, world, folder, every):
    give_back()
    found, times = {}, {}
    for way in WORLDS[world]:
        n, engine = replicas(way, world), WAYS[way]["engine"].word
        for name, case in chosen(way, world, every).items():
            start = time.process_time()
            _, metrics, weights = run(case, n, rank//(world//n), steps_of(every), **WAYS[way])
            found[way, name] = dict(metrics=metrics, weights=weights if rank == 0 else None)
            times[way, name] = round(time.process_time()-start, 2)
        whole = CHECKS + [more_gradients] if every else CHECKS
        for check in [] if "sequence" in way else whole if world == 2 or every else SPREAD if engine else []:
            start = time.process_time()
            (folder/way).mkdir(exist_ok=True)
            check(engine, n, rank//SIZE, folder/way)
            times[way, check.__name__] = round(time.process_time()-start, 2)
    torch.save(dict(found=found, times=times, rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10),
               folder/f"{rank}.pt")


@pytest.fixture(scope="module")
def plain():
    "The plain process, each case once, when it is first asked for."
    return cache(lambda name, steps: run(cases()[name], steps=steps)[1:])


@pytest.mark.ranks
@pytest.mark.parametrize("world, every", [(2, False), *rarely((4, False), (2, True), (4, True))])
def test_cut_layers_equal_the_plain_process(tmp_path, plain, world, every):
    ranks = launch(world, tmp_path, every)
    for way in WORLDS[world]:
        far = compare(answering(ranks, way), {name: plain(name, steps_of(every))
                                                   for name in chosen(way, world, every)})
        assert len(far) == 3*len(chosen(way, world, every)) and max(far.values()) < t.FAR, far
    assert sum(r["rss"] for r in ranks) < 8 << 30


def launch(world, folder, every):
    "What every rank found."
    on_ranks(one_rank, (folder, every), world)
    return [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(world)]


def answering(ranks, way):
    "The first rank of each replica."
    return [r | dict(found={name: f for (w, name), f in r["found"].items() if w == way})
            for r in ranks[::len(ranks)//replicas(way, len(ranks))]]
