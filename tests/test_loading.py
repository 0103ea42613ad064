"""Weights read shard by shard are those of the model loaded whole, and no rank ever holds more than its shard and one
weight."""
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import rarely
from forked import forked
from resident import give_back, memory, settled
from tiny import rows

from rlblocks import Critic, Policy, Scorer
from rlblocks.engines.lazy import lazy_weights, read_module_
from rlblocks.engines.sharded import ShardedModel
from rlblocks.models import loading
from rlblocks.models.forward import Forward
from rlblocks.models.loading import load_module
from rlblocks.engines.base import engine_of

SMALL = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1)
MODELS = dict(
    tied=lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    half=lambda: transformers.Qwen3Config(**SMALL, head_dim=8, dtype=torch.bfloat16),
    experts=lambda: transformers.Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=3, num_experts_per_tok=2,
                                                moe_intermediate_size=12),
    learned=lambda: transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64,
                                            bos_token_id=0, eos_token_id=0),
    windows=lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=8, dtype=torch.bfloat16))


def saved(path, kind):
    torch.manual_seed(0)
    config = MODELS[kind]()
    most = "8KB" if kind == "half" else "1GB"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size=most)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for kind in MODELS: saved(path/kind, kind)
    Policy(path/"tied", value_head=True, device="cpu").save_pretrained(path/"valued")
    Scorer(path/"half", device="cpu", outputs=2).save_pretrained(path/"reward")
    Critic(path/"tied", device="cpu", bins=[0., 1., 2.]).save_pretrained(path/"critic")
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_a_lazy_model_read_whole_is_the_one_that_transformers_loads(folders, kind):
    "Bits, buffers that no file holds, what is tied, and what is written again."
    whole, late = load_module(folders/kind), load_module(folders/kind, lazy=True)
    assert lazy_weights(late) and all(p.is_meta for p in late.parameters())
    assert not any(b.is_meta for b in late.buffers())
    read_module_(late)
    same_bits(late, whole)
    # what is tied comes once
    assert [n for n, _ in late.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert late.training is whole.training and late.config.to_dict() == whole.config.to_dict()
    assert late.generation_config.to_dict() == whole.generation_config.to_dict()
    late.save_pretrained(folders/f"again-{kind}")
    same_bits(load_module(folders/f"again-{kind}"), whole)


def same_bits(a, b):
    for x, y in ((dict(a.named_parameters()), dict(b.named_parameters())),
                 (dict(a.named_buffers()), dict(b.named_buffers()))):
        assert x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


def strange(path, kind):
    "Folders whose weights cannot be read by shards, each a copy of a good one."
    import json

    from safetensors.torch import load_file, save_file
    weights, config = load_file(path/"model.safetensors"), json.loads((path/"config.json").read_text())
    if kind == "lacking": del weights["model.norm.weight"]
    if kind == "twice": weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if kind == "bin": torch.save(weights, path/"pytorch_model.bin")
    if kind == "code": config["auto_map"] = dict(AutoConfig="mine.Config")
    save_file(weights, path/"model.safetensors", metadata=dict(format="pt"))
    if kind == "bin": (path/"model.safetensors").unlink()
    (path/"config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", ["lacking", "twice", "bin", "code"])
def test_what_cannot_be_read_by_shards_is_loaded_whole(tmp_path, kind):
    module = load_module(strange(saved(tmp_path, "tied"), kind), lazy=True)
    assert not lazy_weights(module) and not any(p.is_meta for p in module.parameters())


def wrappers(path, engine, load):
    "Each kind of wrapper, and what it is given: a folder, or the module that was loaded whole."
    for kind in MODELS:
        if engine == "zero3" and kind == "experts": continue
        yield kind, Policy(load(path/kind), engine=engine, device="cpu")
    yield "frozen", Policy(load(path/"half"), engine=engine, frozen=True, device="cpu")
    yield "dtype", Policy(load(path/"tied"), engine=replace(engine_of(engine), dtype=torch.bfloat16), device="cpu")


def _equal(rank, path, store, ranks, engine):
    join(rank, store, ranks)
    b = rows(B=5, dtype=torch.float32)
    for (kind, late), (_, whole) in zip(wrappers(path, engine, lambda p: p), wrappers(path, engine, load_module),
                                        strict=True):
        alike(kind, late, whole)
        assert torch.equal(late.logprobs(b), whole.logprobs(b)), kind
    pairs = [(Policy(path/"valued", value_head=True, engine=e, device="cpu") for e in (engine, None)),
             (Scorer(path/"reward", engine=e, device="cpu") for e in (engine, None)),
             (Critic(path/"critic", engine=e, device="cpu") for e in (engine, None)),
             (Scorer(path/"half", engine=e, device="cpu") for e in (engine, None))]
    for late, whole in pairs: alike(type(late).__name__, late, whole)
    dist.destroy_process_group()


def join(rank, store, ranks):
    import os
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def alike(kind, late, whole):
    a, b = late.state_dict()["module"], whole.state_dict()["module"]
    assert a.keys() == b.keys(), kind
    for k in a: assert a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]), (kind, k)


@pytest.mark.parametrize("ranks, engine", [(2, "fsdp2"), (2, "zero3"), *rarely((1, "fsdp2"), (1, "zero3"))])
def test_shards_read_from_files_are_those_of_the_whole_model(folders, tmp_path, engine, ranks):
    "Difference 0, of weights and of log-probs; masters in fp32, heads, experts put together, weights tied."
    if engine == "zero3": pytest.importorskip("deepspeed")
    forked(_equal, (folders, tmp_path/"store", ranks, engine), ranks)


def _peak(rank, path, store, ranks):
    "What this rank holds at its highest while it loads, beyond what it held before, in bytes."
    give_back()
    join(rank, store, ranks)
    loading.RENEW = 1 << 22
    load = lambda folder: ShardedModel(Forward(load_module(folder, lazy=True)), engine="fsdp2", device="cpu")
    def grown(folder):
        before = settled()
        open("/proc/self/clear_refs", "w").write("5")
        held.append(load(folder))
        return (memory("VmHWM") - before)*2**20
    held = [load(path/"thin")]                          # libraries, groups and threads are there from now on
    constant, peak = grown(path/"thin"), grown(path/"large")          # thin: as many layers, of next to no weight
    sizes = [4*p.numel() for p in held[-1].module.parameters()]
    shard = sum(4*p.to_local().numel() for p in held[-1].module.parameters())
    assert shard <= peak, "nothing was measured"
    # beside its shards: of the largest weight its rows, and the mapped pages that they are copied from; RENEW bytes of
    # pages that were read before
    found = peak/2**20, shard/2**20, constant/2**20, sum(sizes)/2**20
    assert peak <= shard + 2*max(sizes)/ranks + loading.RENEW + constant, found
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, *rarely(4)])
def test_a_rank_holds_its_shard_and_what_it_reads_of_one_weight(folders, tmp_path, ranks):
    "By the kernel's account; the model loaded whole would be twice, four times the shard."
    sizes = SMALL | dict(num_hidden_layers=10)
    for name, more in dict(thin={}, large=dict(hidden_size=512, intermediate_size=2048, vocab_size=8192)).items():
        config = transformers.LlamaConfig(**sizes | more, tie_word_embeddings=False)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders/name, max_shard_size="50MB")
    forked(_peak, (folders, tmp_path/"store", ranks), ranks)
