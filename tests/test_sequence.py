"""Sequence parallel (LAWS 34): ranks that share a line of tokens come to the numbers of one process; one launch per
world size holds all cases.

The worlds: two ranks that share their rows; four that do; two replicas of two."""
import warnings
from functools import cache

import pytest
import test_engines as engines
import test_routers as routers
import torch
from conftest import rarely
from forked import on_ranks
from resident import give_back
from rlblocks import Batch, Critic, Policy, merge
from rlblocks.models.forward import Forward
from rlblocks.models.probes import mixer, pack_by
from rlblocks.placement.spmd import SpmdPool
from rlblocks.engines.engine import EngineSpec
from test_ranks import prompted
from tiny import apart, exact, gradients, model, rows, steady

# (engine, ranks that share rows, cases of test_engines)
MOST = ("ppo, uneven rows", "grpo", "dpo pairs", "sft, fewer rows than ranks", "ppo and ptx", "value head",
        "tied weights, whole on every rank", "critic", "scorer")
RUNS = {2: [(None, 2, MOST), ("fsdp2", 2, ("ppo, uneven rows", "grpo")), ("zero1", 2, ("ppo and ptx",)),
            ("zero3", 2, ("grpo", "scorer"))],
        4: [(None, 4, ("grpo", "dpo pairs", "critic")),
            (None, 2, ("ppo, uneven rows", "tied weights, whole on every rank", "scorer")),
            ("fsdp2", 2, ("sft, fewer rows than ranks", "tied weights, whole on every rank", "value head"))]}
QUICK = [(None, 2, ("ppo, uneven rows", "sft, fewer rows than ranks", "tied weights, whole on every rank",
                        "scorer")), ("fsdp2", 2, ("grpo",)), ("zero3", 2, ("grpo",))]
# softcaps, windows, learned positions, one key head
KINDS = dict(llama={}, gemma2={}, mistral_window={}, gpt2={}, qwen3=dict(num_key_value_heads=1))
ROUTED, LORA = dict(optimizer=steady(1e-2), device="cpu", micro_rows=5), dict(r=4, init_lora_weights=False)
DOUBLE = dict(optimizer=steady(1e-3, max_norm=1e9), device="cpu", micro_tokens=150, micro_rows=8)


def shared_prompts(dtype=torch.float64):
    b = prompted()
    return Batch(**b.columns | {k: b[k].to(dtype) for k in ("advantages", "returns", "ref_logprobs")})


def weighted(out, b):
    return (out.logprobs*b.advantages*b.mask).sum()/b.n_tokens + .1*(out.entropy*b.mask).sum()/b.n_tokens, {}


def twice(kind):
    "A model in float64 all through."
    return lambda: exact(model(kind, dtype=torch.float64, **KINDS[kind]))


def steps_of(runs): return engines.FEW if runs == QUICK else engines.STEPS


# -- on every rank
def one_rank(rank, world, folder, runs):
    give_back()
    found, alone = dict(engines={}, gradients={}, layers={}), torch.load(folder/"alone.pt", weights_only=False)
    steps = steps_of(runs)
    for engine, shares, names in runs:
        if engine and engine.startswith("zero") and not have_deepspeed(): continue
        for name in names:
            _, metrics, weights = engines.run(engines.cases()[name], world//shares, rank//shares, steps,
                                              engine=EngineSpec(engine, sequence_parallel=shares), micro_rows=5)
            found["engines"][engine, shares, name] = dict(metrics=metrics, weights=weights if rank == 0 else None)
    for kind in KINDS:
        for shares in (2, 4) if kind == "llama" else (world,):
            if shares <= world:
                found["gradients"][kind, shares] = stepped(twice(kind), shared_prompts(),
                                                           engine=EngineSpec(sequence_parallel=shares), **DOUBLE)
    for shares in {2, world}:
        found["layers"][shares] = stepped(model, shared_prompts(torch.float32),
                                          engine=EngineSpec(sequence_parallel=shares), **DOUBLE)["gradient"]
    for check in CHECKS: check(rank, world, alone)
    torch.save(found, folder/f"{rank}.pt")


def have_deepspeed():
    try: import deepspeed
    except ImportError: return False
    return bool(deepspeed)


def stepped(net, b, **how):
    "The gradient of a step, its metrics, and everything that is read."
    policy = Policy(net, value_head=True, **how)
    found, n = gradients(policy), policy._run.model.replicas
    part = b.parts(n)[policy.replica] if n > 1 else b
    lp, values = policy.logprobs(part), policy.values(part)
    likeliest = policy.measure(part, lambda z: z.topk(3).indices)
    metrics = {k: m.to("cpu") for k, m in policy.step(part, lambda out, b: sum_of(
        weighted(out, b), (out.values*b.mask).sin().sum()/b.n_tokens), entropy=True).items()}
    return dict(gradient=found, metrics=metrics, rows=part.row, logprobs=lp, values=values, likeliest=likeliest,
                tokens=int(part.lengths.sum()))


def sum_of(loss, more): return loss[0] + more, loss[1]


def half_to_read(rank, world, alone):
    """Only the first token after the prompt of the first row counts: the other ranks have nothing to read, and wait
    for nobody."""
    policy = Policy(twice("llama"), engine=EngineSpec(sequence_parallel=world), **DOUBLE)
    assert apart(gradient_of(policy, one_to_read()), alone["half_to_read"]) < 1e-10


def one_to_read():
    b = shared_prompts()
    b["mask"] = torch.zeros_like(b.mask).index_put((torch.tensor(0), b.mask[0].nonzero()[0]), torch.tensor(True))
    return b


def gradient_of(policy, b):
    found = gradients(policy)
    policy.step(b, weighted, entropy=True)
    return found


def under_a_pool(rank, world, alone):
    "A loop hands in whole batches; the lowest rank of a replica answers for it."
    b, pool = shared_prompts(), SpmdPool(timeout=300)
    policy = pool.place(Policy, twice("llama"), engine=EngineSpec(sequence_parallel=2), **DOUBLE)
    assert policy.replica == rank//2
    (metrics, lp, last), (want, want_lp, want_last) = three_steps(policy, b), alone["under_a_pool"]
    assert metrics.keys() == want.keys()
    assert all(metrics[k] == pytest.approx(x, rel=1e-9, abs=1e-12) for k, x in want.items())
    assert (lp - want_lp).abs().max() < 1e-10
    assert all(last[k] == pytest.approx(x, rel=1e-9, abs=1e-12) for k, x in want_last.items())


def three_steps(policy, b):
    "Metrics of the second, log-probs after it, and metrics of one more; there one of two replicas has no row."
    for _ in range(2): metrics = floats(policy.step(b, weighted, entropy=True))
    return metrics, policy.logprobs(b), floats(policy.step(b[:1], weighted, entropy=True))


def floats(metrics): return {k: float(x) for k, x in metrics.items()}


def under_an_adapter(rank, world, alone):
    "LoRA on a base that is whole on every rank, and a reference on the same base that shares no rows."
    b, (theirs, lp) = shared_prompts(torch.float32), alone["under_an_adapter"]
    policy = Policy(model(), lora=LORA, engine=EngineSpec(sequence_parallel=world), **DOUBLE)
    assert apart(gradient_of(policy, b), theirs) < 1e-5
    ref = Policy(policy, lora=None, frozen=True, **DOUBLE)
    assert ref.replica == rank and (ref.logprobs(b) - lp).abs().max() < 1e-5


def under_routers(rank, world, alone):
    """Of a mixture of experts the load, both router losses, and three steps of them with something of the log-probs;
    with one replica, and with several."""
    b, pool = routers.batch(), SpmdPool(timeout=300)
    for kind, shares in (("mixtral", 2), ("qwen2_moe", world)):
        policy = pool.place(Policy, lambda kind=kind: routers.net(kind), engine=EngineSpec(sequence_parallel=shares),
                            **ROUTED)
        (_, found, ours), (before, wanted, theirs) = routed(policy, b), alone["under_routers"][kind]
        for (counts, first, metrics), (want_counts, want_first, want) in zip(found, wanted, strict=True):
            assert torch.equal(counts, want_counts) and torch.equal(first, want_first)
            assert metrics.keys() == want.keys()
            assert all(metrics[k] == pytest.approx(x, rel=1e-9, abs=1e-12) for k, x in want.items())
            assert want["grad_norm"] > .1
        for name, x in theirs.items():
            assert (ours[name]-x).abs().max() < 1e-9 and (x-before[name]).abs().max() > 1e-4, (kind, name)
    # picks that the scores do not show
    b, chosen = b[:8], Policy(routers.deepseek(), device="cpu", engine=EngineSpec(sequence_parallel=world), frozen=True)
    assert torch.equal(chosen.expert_counts(b), alone["picks"])


def routed(policy, b):
    "Weights before; of each of three steps what was counted (all picks, the first ones), and its metrics; the end."
    before, found = full(policy), []
    for _ in range(3):
        counts = policy.expert_counts(b), policy.expert_counts(b, top_k=1)
        found.append((*counts, floats(policy.step(routers.loaded(policy, b), routers.loss, router_logits=True))))
    return before, found, full(policy)


def full(policy): return {k: x.clone() for bucket in policy.weights().buckets(1 << 28) for k, x in bucket.items()}


def refused(rank, world, alone):
    "What cannot be shared says so, on every rank."
    b = shared_prompts(torch.float32)
    policy = Policy(model(), engine=EngineSpec(sequence_parallel=2), **DOUBLE)
    with pytest.raises(ValueError, match="the ranks disagree"): policy.logprobs(b[:8] if rank else b)
    with pytest.raises(ValueError, match="ranks 0 and 1 share rows, and were given unlike ones"):
        policy.logprobs(b.parts(2)[rank % 2])
    if world//2 == 1:
        with pytest.raises(ValueError, match="a batch cut in 2, but 1 replica"): policy.step(b.parts(2)[0], weighted)
    with pytest.raises(ValueError, match=f"sequence_parallel={world+1} wants a world of {world+1} ranks"):
        Policy(model(), engine=EngineSpec(sequence_parallel=world+1), **DOUBLE)
    with pytest.raises(ValueError, match="pack=False"):
        Policy(model(), engine=EngineSpec(sequence_parallel=2), pack=False, **DOUBLE)
    heads = dict(num_attention_heads=6 if world == 4 else 3, hidden_size=24)
    with pytest.raises(ValueError,
                       match=f"has {heads['num_attention_heads']} heads, which cannot be divided among {world} ranks"):
        Policy(model(num_key_value_heads=3, **heads), engine=EngineSpec(sequence_parallel=world), **DOUBLE)
    with pytest.raises(
            ValueError,
            match="Policy: sequence_parallel=2, but in Lfm2ForCausalLM tokens meet outside attention, first in "
            r"'model\.layers\.0\.conv"):
        Policy(convolved(), engine=EngineSpec(sequence_parallel=2), **DOUBLE)
    turning = model(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.), max_position_embeddings=16)
    with pytest.raises(
            ValueError,
            match="'dynamic' rotary embedding of LlamaForCausalLM turns with the longest position beyond 16"):
        Policy(turning, engine=EngineSpec(sequence_parallel=2), **DOUBLE).logprobs(b)


CHECKS = [half_to_read, under_a_pool, under_an_adapter, under_routers, refused]


# -- in the parent
def one_process():
    "What the checks compare with, once for all ranks and worlds: within a world a plain model steps on every rank."
    b, single = routers.batch(), shared_prompts(torch.float32)
    return dict(half_to_read=gradient_of(Policy(twice("llama"), **DOUBLE), one_to_read()),
                under_a_pool=three_steps(Policy(twice("llama"), **DOUBLE), shared_prompts()),
                under_an_adapter=(gradient_of(Policy(model(), lora=LORA, **DOUBLE), single),
                                  Policy(model(), frozen=True, **DOUBLE).logprobs(single)),
                under_routers={kind: routed(Policy(routers.net(kind), **ROUTED), b)
                               for kind in ("mixtral", "qwen2_moe")},
                picks=Policy(routers.deepseek(), device="cpu", frozen=True).expert_counts(b[:8]))


@pytest.fixture(scope="module")
def plain():
    "The plain process, each thing once; cases of the engines when they are first asked for."
    return dict(alone=one_process(),
                engines=cache(lambda name, steps: engines.run(engines.cases()[name], steps=steps)[1:]),
                gradients={kind: stepped(twice(kind), shared_prompts(), pack=False, **DOUBLE | dict(micro_tokens=8192))
                           for kind in KINDS}, layers=stepped(model, shared_prompts(torch.float32), pack=False,
                                                              **DOUBLE | dict(micro_tokens=8192))["gradient"])


@pytest.mark.ranks
@pytest.mark.parametrize("world, runs", [(2, QUICK), *rarely(*((w, RUNS[w]) for w in (2, 4)))],
                         ids=lambda x: str(x) if isinstance(x, int) else "all" if x in RUNS.values() else "some")
def test_ranks_that_share_rows_are_one_process(tmp_path, plain, world, runs):
    torch.save(plain["alone"], tmp_path/"alone.pt")
    on_ranks(one_rank, (tmp_path, runs), world)
    ranks = [torch.load(tmp_path/f"{r}.pt", weights_only=False) for r in range(world)]

    far = {}
    for key in ranks[0]["engines"]:               # losses, gradient norms and weights after some steps, fp32
        _, shares, name = key
        speakers = [dict(found={name: r["engines"][key]}) for r in ranks[::shares]]
        found = engines.compare(speakers, {name: plain["engines"](name, steps_of(runs))})
        far |= {(*key, what): x for (_, what), x in found.items()}
        for r in range(world):
            assert same_numbers(ranks[r]["engines"][key]["metrics"],
                                ranks[r//shares*shares]["engines"][key]["metrics"]), key
    assert max(far.values()) < engines.FAR, {k: x for k, x in far.items() if x >= engines.FAR}
    assert {name for *_, name, _ in far} == {name for *_, names in runs for name in names}

    for kind, shares in ranks[0]["gradients"]:           # one gradient, float64, to rounding
        want, speakers = plain["gradients"][kind], [r["gradients"][kind, shares] for r in ranks[::shares]]
        assert max(apart(r["gradients"][kind, shares]["gradient"], want["gradient"]) for r in ranks) < 1e-10, kind
        joined = merge(*(s["metrics"] for s in speakers))
        for k, x in want["metrics"].items():
            assert float(joined[k]) == pytest.approx(float(x), rel=1e-9, abs=1e-12), (kind, k)
        for s in speakers:
            for k in ("logprobs", "values"):
                assert (s[k] - want[k][s["rows"]][:, :s[k].shape[1]]).abs().max() < 1e-10, (kind, k)
            assert torch.equal(s["likeliest"], want["likeliest"][s["rows"]][:, :s["likeliest"].shape[1]])

    for shares, mine in ranks[0]["layers"].items():         # LAWS 34: every layer's gradient, fp32
        for name, x in plain["layers"].items(): assert (mine[name]-x).abs().max() < 1e-5*x.abs().max(), (shares, name)


def same_numbers(a, b): return all(float(x) == float(m[k]) for n, m in zip(a, b, strict=True) for k, x in n.items())


# -- in one process
def convolved():
    "Short convolutions beside attention; weights so small that what they carry is lost in what comes out."
    import transformers as tf
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tf.Lfm2ForCausalLM(tf.Lfm2Config(vocab_size=32, hidden_size=32, intermediate_size=64, block_ff_dim=64,
                                                block_multiple_of=8, num_hidden_layers=2, num_attention_heads=4,
                                                num_key_value_heads=2, max_position_embeddings=64,
                                                layer_types=["conv", "full_attention"], pad_token_id=0, eos_token_id=1))


def test_small_leaks_are_seen():
    assert not pack_by(Forward(convolved().eval()), "cpu").safe
    with pytest.raises(ValueError, match="packed rows of Lfm2ForCausalLM see each other"):
        Policy(convolved(), pack=True, device="cpu")
    b = rows(B=4, dtype=torch.float32)
    assert Policy(convolved(), device="cpu").logprobs(b).isfinite().all()          # padded, it is right


def test_layers_where_tokens_meet_are_named():
    import transformers as tf
    warnings.simplefilter("ignore")
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    hybrid = tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(
        **sizes, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1))
    assert mixer(Forward(hybrid.eval()), "cpu").startswith("model.layers.0.linear_attn")
    assert mixer(Forward(
        tf.MambaForCausalLM(tf.MambaConfig(vocab_size=32, hidden_size=32, state_size=8, num_hidden_layers=1)).eval()),
                 "cpu").startswith("backbone.layers.0.mixer")
    assert mixer(Forward(convolved().eval()), "cpu").startswith("model.layers.0.conv")
    for kind in ("llama", "gemma3", "qwen3_moe", "gpt2"): assert mixer(Forward(model(kind).eval()), "cpu") == ""


def test_a_world_of_one_shares_with_nobody():
    with pytest.raises(ValueError, match="sequence_parallel=2 wants a world of 2 ranks, or a multiple; this one has 1"):
        Critic(model(), engine=EngineSpec(sequence_parallel=2), device="cpu")
    with pytest.raises(ValueError, match="sequence_parallel=0"):
        Critic(model(), engine=EngineSpec(sequence_parallel=0), device="cpu")
