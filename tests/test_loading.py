"""Weights read shard by shard are those of the model loaded whole, and no rank ever holds more than its shard and one
weight."""
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import rarely, skip_without
from forked import forked
from resident import give_back, memory, settled
from tiny import rows

from rlblocks import Checkpoint, Critic, Policy, Scorer, fsdp2, plain, ppo_loss, zero
from rlblocks.engines import tensor_plan
from rlblocks.engines.lazy_weights import lazy_weights, read_module_
from rlblocks.engines.sharded_model import ShardedModel
from rlblocks.models import loading
from rlblocks.models.forward import Forward
from rlblocks.models.loading import WeightFiles, load_module
from rlblocks.models.lora import Base
from rlblocks.engines.engine import engine_of

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
    if engine == "zero3": skip_without("deepspeed")
    forked(_equal, (folders, tmp_path/"store", ranks, engine), ranks)


CASES = {"fsdp2": (fsdp2(), None), "fsdp2, lora": (fsdp2(), dict(r=2)), "zero3": (zero(3), None),
         "zero3, lora": (zero(3), dict(r=2)), "tensor": (plain(tensor_parallel=2), None),
         "tensor, lora": (plain(tensor_parallel=2), dict(r=2)), "fsdp2, tensor": (fsdp2(tensor_parallel=2), None)}


def load(folder, case, lazy=True):
    "What a wrapper makes of a folder before it probes the model."
    (engine, lora), module = CASES[case], load_module(folder, lazy=lazy)
    if lora: return Base(module, lora, engine=engine, device="cpu")
    return ShardedModel(Forward(module), engine=engine, device="cpu")


@contextmanager
def reads(found):
    "Each read of a file: the weight's shape, and how many numbers were asked for at once."
    part = WeightFiles.part
    def counted(self, name, index=()):
        x = part(self, name, index)
        found.append((self.shape(name), x.numel()))
        return x
    WeightFiles.part = counted
    try: yield
    finally: WeightFiles.part = part


def grown(folder, case, lazy):
    "(at its highest, what stays) while a model is loaded, beyond what was held before, in bytes; and the model."
    before = settled()
    open("/proc/self/clear_refs", "w").write("5")
    held = load(folder, case, lazy)
    peak = memory("VmHWM")
    return (peak - before)*2**20, (settled() - before)*2**20, held


def _law(rank, path, store, ranks, cases, lazy=True):
    """What this rank holds beyond its shard while it loads, by the kernel's account: at most one weight, and RENEW
    bytes of pages that were read before. No read is larger than the rank's part of a weight."""
    give_back()
    join(rank, store, ranks)
    loading.RENEW, tensor_plan.SLAB, largest = 1 << 22, 1 << 14, 4*8192*512
    for case in cases:
        first = load(path/"thin", case, lazy)           # libraries, groups and threads are there from now on
        peak, kept, thin = grown(path/"thin", case, lazy)              # as many layers, of next to no weight
        constant, found = peak - kept, []
        with reads(found): peak, kept, large = grown(path/"large", case, lazy)
        assert kept > largest/ranks, (case, "nothing was measured")
        assert peak - kept <= largest + loading.RENEW + constant, (case, peak/2**20, kept/2**20, constant/2**20)
        parts = 2 if "tensor" in case else ranks
        for shape, n in found:          # a part ends in the middle of a row; ranks compare 4096 numbers of each weight
            assert n <= math.prod(shape)/parts + 2*math.prod(shape[1:]) + 4096, (case, shape, n)
        assert found
        del first, thin, large
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sizes(folders):
    "Two models of as many layers: one of 19 million weights, and one of next to none."
    for name, more in dict(thin={}, large=dict(hidden_size=512, intermediate_size=2048, vocab_size=8192)).items():
        config = transformers.LlamaConfig(**SMALL | dict(num_hidden_layers=2, num_key_value_heads=2) | more,
                                          tie_word_embeddings=False)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders/name, max_shard_size="50MB")
    return folders


@pytest.mark.parametrize("ranks, cases", [(2, [c for c in CASES if c != "fsdp2, tensor"]), *rarely((4, list(CASES)))])
def test_a_rank_holds_its_shard_and_one_weight(sizes, tmp_path, ranks, cases):
    "With every engine, under an adapter too: each reads its part of the files."
    skip_without("deepspeed")
    forked(_law, (sizes, tmp_path/"store", ranks, cases), ranks)


def _adapted(rank, path, store, ranks, engine):
    join(rank, store, ranks)
    b, lora = rows(B=5, dtype=torch.float32), dict(r=2, target_modules=["q_proj", "v_proj"])
    for kind in ("tied", "half"):
        late, whole = (Policy(m, lora=lora, engine=engine, device="cpu") for m in (path/kind, load_module(path/kind)))
        assert late._view.base.digest == whole._view.base.digest, kind
        assert torch.equal(late.logprobs(b), whole.logprobs(b)), kind
        a, b_ = late.state_dict()["module"], whole.state_dict()["module"]
        assert a.keys() == b_.keys() and all(torch.equal(a[k], b_[k]) for k in a), kind
    dora = Policy(path/"tied", lora=lora | dict(use_dora=True), engine=engine, device="cpu")   # starts from all weights
    assert torch.isfinite(dora.logprobs(b)).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_an_adapter_beside_weights_that_are_read_late(folders, tmp_path, engine):
    "The same A, the same base, the same log-probs, to the bit."
    if engine == "zero3": skip_without("deepspeed")
    forked(_adapted, (folders, tmp_path/"store", 2, engine), 2)


def _pieces(rank, path, store):
    join(rank, store, 2)
    b = rows(B=5, dtype=torch.float32)
    for kind, more in (("two", {}), ("two", dict(lora=dict(r=2, target_modules=["q_proj"])))):
        late, whole = (Policy(m, engine=plain(tensor_parallel=2), device="cpu", **more)
                       for m in (path/kind, load_module(path/kind)))
        assert torch.equal(late.logprobs(b), whole.logprobs(b)), more
        if not more: alike(kind, late, whole)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(folders):
    "A model whose layers two ranks can hold together."
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | dict(num_key_value_heads=2), tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders/"two")
    return folders


def test_pieces_read_from_files_are_those_of_the_whole_model(two, tmp_path):
    "Tensor parallel, cut by rows and by columns, tied, without and with an adapter: difference 0."
    forked(_pieces, (two, tmp_path/"store"), 2)


def _resumed(rank, path, store, folder, ranks, cases):
    join(rank, store, ranks)
    b = rows(B=6, dtype=torch.float32)
    def loss(out, b): return ppo_loss(out.logprobs, b.ref_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    for case in cases:
        def policy(engine=CASES[case][0], lora=CASES[case][1]):
            return Policy(path/"two", engine=engine, lora=lora, lr=1e-3, device="cpu")
        straight, again, done = policy(), policy(), []
        for _ in Checkpoint(folder/case, every=2)(2, policy=straight): straight.step(b, loss)
        for _ in range(2): straight.step(b, loss)
        for step in Checkpoint(folder/case, every=2)(4, policy=again):
            done.append(step)
            again.step(b, loss)
        assert done == [2, 3] and again.version == straight.version == 4, case
        assert torch.equal(again.logprobs(b), straight.logprobs(b)), case
        assert not torch.equal(again.logprobs(b), policy().logprobs(b)), (case, "nothing was learnt")
        mine, theirs = again.state_dict()["module"], straight.state_dict()["module"]
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine), case
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks, cases", [(2, ["fsdp2, lora", "zero3, lora", "tensor", "tensor, lora"]),
                                          *rarely((4, [c for c in CASES if c != "zero3"]))])
def test_a_policy_read_by_shards_resumes(two, tmp_path, ranks, cases):
    "Two steps, a save, two more by a policy that reads its files anew: the run that was not interrupted, to the bit."
    skip_without("deepspeed")
    forked(_resumed, (two, tmp_path/"store", tmp_path/"runs", ranks, cases), ranks)
