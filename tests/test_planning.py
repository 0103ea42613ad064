"Plans: the bytes that a wrapper holds, known before anything is allocated, and what cannot be planned says why."
import re
import resource
import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from forked import forked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, ViTConfig

from rlblocks.engines import zero
from rlblocks.engines.engine import EngineSpec
from rlblocks.models.attention import Segments, attend_by_segments, layout
from rlblocks.placement.memory import Live, pass_bytes, fake_model
from rlblocks.arithmetic.head import linear_logprobs
from rlblocks.placement.plan import plan, plan_rollout, step_seconds

TINY = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, tie_word_embeddings=False)
SMALL = dict(micro_tokens=128, row=64)
# 70B parameters
LARGE = LlamaConfig(vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
                    num_attention_heads=64, num_key_value_heads=8, dtype="bfloat16")


SETTINGS = {f.name for f in fields(EngineSpec)} - {"word"}


def planned(engine=None, **how):
    "The plan of a tiny model; what is a setting of the engine's goes into its value."
    spec = EngineSpec(engine, **{k: x for k, x in how.items() if k in SETTINGS})
    return plan(TINY, engine=spec, **SMALL | {k: x for k, x in how.items() if k not in SETTINGS})


def bytes_of(**how): return planned(**how).bytes()


class Real(TorchDispatchMode):
    """The largest storage that a real operation makes while inside: fake tensors and those on the meta device have
    no memory."""
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        from torch._subclasses.fake_tensor import FakeTensor
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and not x.is_meta:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


def tables(rank, file):
    "What is said of 70 billion parameters in a process that may take 8 GiB of address space."
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (8*2**30, 8*2**30))
    with pytest.raises(MemoryError) as refused: plan(LARGE, frozen=True, micro_tokens=256, row=256, memory="80GB")
    found = f"{refused.value}\n{plan_rollout(LARGE, rows=64, tokens=1024)}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    file.write_text(f"{found}\ngrew by MiB {grown//1024}")


def test_nothing_is_allocated_for_70_billion_parameters(tmp_path):
    """Where 131 GiB of weights alone would end the process; the request that cannot fit fails with the table."""
    forked(tables, (tmp_path/"said",), 1)
    table = (tmp_path/"said").read_text()
    assert re.search(r"plan: 13\d\.\d+ GiB are wanted on each device, 67\.06 of 74\.51 GiB", table)
    assert re.search(r"GiB a device +weights +activations +logits +peak", table) and "131.42" in table
    assert int(table.split()[-1]) < 600, table.splitlines()[-1]


def test_every_tensor_of_a_plan_is_without_memory():
    with Real() as seen: plan(TINY, **SMALL, lora=dict(r=4), value_head=True)
    # a few positions and angles, no weight of 128 × 64 × 4 bytes for each of 3 layers together
    assert seen.largest <= 64*1024
    model = fake_model(TINY)
    with Real() as seen: model(torch.zeros(1, 64, dtype=torch.long))
    assert seen.largest >= 64*512*4     # the watch sees what a real pass makes


def test_an_adapter_has_gradients_and_states_of_its_own():
    whole, lora, packed = bytes_of(), bytes_of(lora=dict(r=4)), bytes_of(lora=dict(r=4), quantization="4bit")
    own = 3*sum(4*4*(n + m) for n, m in [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)])
    assert (lora["gradients"], lora["states"]) == (own, 2*own) and lora["weights"] == whole["weights"] + own
    assert packed["gradients"] == own and packed["weights"] < lora["weights"]
    half = LlamaConfig(**TINY.to_dict() | dict(dtype="bfloat16"))
    # the base keeps its precision, the adapter is fp32
    kinds = dict(lora=dict(r=4)), dict(frozen=True)
    adapted, frozen = (plan(half, **SMALL, **how).bytes()["weights"] for how in kinds)
    assert adapted - own == frozen
    kept = bytes_of(lora=dict(r=4), checkpointing=True)
    assert kept["activations"] < .7*lora["activations"] and kept["gradients"] == own


@pytest.mark.parametrize("how", [dict(r=4), dict(r=4, use_dora=True)], ids=str)
def test_a_real_adapter_holds_what_was_planned(how):
    from rlblocks.models.policy import Policy
    from tiny import rows
    config = LlamaConfig(**TINY.to_dict() | dict(vocab_size=64))
    policy = Policy(lambda: fake_model(config), lora=how, lr=1e-3, device="cpu", value_head=True)
    policy.step(rows(B=4, T=8, dtype=torch.float32), lambda out, b: ((out.logprobs + out.values).sum()/b.n_tokens, {}))
    mine = list(policy._run.module.parameters())
    held = dict(weights=sum(p.nbytes
                            for p in {id(p): p
                                      for p in (*policy._run.model.engine.base.trunk.parameters(), *mine)}.values()),
                                      gradients=sum(p.nbytes for p in mine),
                states=sum(x.nbytes for s in policy._run.model.optimizer.state.values() for x in s.values() if x.dim()))
    want = plan(config, **SMALL, lora=how, value_head=True).bytes()
    for kind in held: assert abs(want[kind] - held[kind]) <= .01*held[kind], kind


def test_a_critic_holds_no_output_layer():
    policy, both, critic = bytes_of(), bytes_of(value_head=True), bytes_of(value_head=True, lm_head=False)
    assert both["weights"] - policy["weights"] == 4*65 and both["states"] - policy["states"] == 8*65
    assert policy["weights"] - critic["weights"] == 4*(512*64 - 65) and critic["logits"] == 0


def test_ranks_that_share_a_layer_or_a_line():
    one, tensor, line = (bytes_of(devices=n, **how)
                         for n, how in ((1, {}), (2, dict(tensor_parallel=2)), (2, dict(sequence_parallel=2))))
    whole = 4*7*64                                              # norms: every rank has them
    rest = one["weights"] - whole - (fake_buffers := sum(b.nbytes for b in fake_model(TINY).buffers()))
    assert tensor["weights"] - whole - fake_buffers == rest/2 and tensor["gradients"] < one["gradients"]
    assert tensor["activations"] < one["activations"]
    assert line["weights"] == one["weights"] and abs(line["activations"] - one["activations"]/2) < .1*one["activations"]
    cut = bytes_of(devices=4, tensor_parallel=2, engine="fsdp2")
    assert abs(cut["states"] - tensor["states"]/2) < .01*tensor["states"]
    for how in ({}, dict(value_head=True, lm_head=False)):
        lora = [bytes_of(**how, lora=dict(r=4), devices=n, tensor_parallel=n) for n in (1, 2)]
        # A and B are whole on every rank …
        assert lora[1]["states"] == lora[0]["states"] and lora[1]["gradients"] == lora[0]["gradients"]
        # … and the weights below are cut
        base = [x["weights"] - x["gradients"] - whole - fake_buffers for x in lora]
        assert base[1] == base[0]/2 and lora[1]["activations"] < lora[0]["activations"]


def test_offload_names_the_host():
    # a bucket, or the largest of them
    for engine, stays in (("fsdp2", set()), ("zero1", {"weights", "gradients"}), ("zero2", {"weights", "gradients"}),
                          ("zero3", {"weights", "gradients"})):
        p = planned(engine=engine, devices=2, offload="cpu")
        (_, device, host), = p.parts
        # 200: the angles
        assert {k for k in ("weights", "gradients", "states") if device.get(k, 0) > 200} == stays, engine
        assert host["states"] and "(host)" in repr(p), engine
    # nothing is cut, so nothing goes
    assert not planned(engine="zero2", devices=2, offload="cpu", frozen=True).parts[0][2]


@pytest.mark.parametrize("how, entry", [({}, 4), (dict(dtype=torch.bfloat16), 2)], ids=str)
def test_no_number_of_devices_makes_the_bucket_of_gradients_smaller(how, entry):
    "ZeRO-3 keeps it beside its part of the gradients, in fp32; the others have it in the backward pass."
    n = bytes_of()["gradients"]//4
    # beside one entry of the gradients themselves
    for engine, kind, want in (("zero1", "gathered", 4*n), ("zero2", "gathered", entry*n),
                               ("zero3", "gradients", 4*n + 4)):
        assert bytes_of(engine=engine, devices=n, **how)[kind] == want, engine
    assert not bytes_of(engine="zero2", devices=2, frozen=True)["gathered"]
    large = plan(LlamaConfig(**LARGE.to_dict() | dict(num_hidden_layers=2)), engine="zero2", devices=64,
                 micro_tokens=64, row=64).bytes()
    assert large["gathered"] == 2*zero.BUCKET


@pytest.mark.parametrize("how, entry", [({}, 4), (dict(dtype=torch.bfloat16), 2)], ids=str)
def test_zero3_keeps_what_it_has_gathered(how, entry, monkeypatch):
    "On one device too; up to as many entries as DeepSpeed lets live."
    n = bytes_of()["gradients"]//4
    assert [bytes_of(engine="zero3", devices=d, **how)["gathered"] for d in (1, 8)] == [entry*n, entry*n]
    monkeypatch.setattr(zero, "LIVE", n//2)
    assert abs(bytes_of(engine="zero3", devices=8, **how)["gathered"] - entry*n/2) <= entry


def test_an_engine_of_ones_own_is_not_planned_as_the_plain_one():
    with pytest.raises(ValueError, match="plan: what an engine of your own holds is not known here"):
        plan(TINY, engine=lambda module, device, **how: None, **SMALL)


def test_kinds_of_a_call_do_not_peak_together():
    """The worst moment is that of a real pass: the layers' forward pass, then a chunk of logits on top of what they
    have kept, then the layers backward."""
    config = LlamaConfig(**TINY.to_dict() | dict(vocab_size=8192))
    p = plan(config, **SMALL, device="cpu")
    (_, device, _), = p.parts
    assert max(device["activations"], device["logits"]) < device["call"] < device["activations"] + device["logits"]
    assert p.total == sum(device[k] for k in ("weights", "gradients", "states", "call"))
    assert f"{p.total/2**30:.2f}" == repr(p).splitlines()[1].split()[-1]
    model = fake_model(config, torch.float32)
    attend_by_segments(model)
    laid = layout(Segments([64, 64], [(0, 0), (1, 0)]), torch.device("cpu"))
    for x in model.parameters(): x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    with Live(*model.parameters(), *model.buffers()) as live:
        ids = torch.zeros(1, 128, dtype=torch.long)
        hidden = model.model(ids, position_ids=torch.arange(64).repeat(2)[None], use_cache=False,
                             **laid).last_hidden_state[0]
        linear_logprobs(hidden, model.lm_head.weight, ids[0]).sum().backward()
    assert abs(live.peak - device["call"]) <= .02*device["call"]


def test_every_process_holds_the_whole_on_its_host_while_it_builds():
    half = LlamaConfig(**TINY.to_dict() | dict(dtype="bfloat16"))
    whole, frozen = (plan(half, **SMALL, engine="zero3", devices=4, frozen=frozen) for frozen in (False, True))
    assert whole.building == plan(half, **SMALL).bytes()["weights"] and whole.building > 1.9*frozen.building
    assert (whole + frozen).building == whole.building and "while it is built: " in repr(whole)


def test_operations_a_token_are_told():
    assert f"{plan(TINY, **SMALL).flops_per_token/1e9:.3g} GFLOP a token" in repr(plan(TINY, **SMALL))
    assert "GFLOP" not in repr(plan_rollout(TINY, rows=8, tokens=32))


def test_half_precision_weights_are_copied_by_autocast_alone():
    """A plain fp32 model computes in bf16 from copies (and its norms give fp32); one that gathers its weights in
    bf16 needs none."""
    plain, sharded = bytes_of(dtype=torch.bfloat16), bytes_of(dtype=torch.bfloat16, engine="fsdp2", devices=2)
    linear = 2*3*(64*64*2 + 64*32*2 + 3*64*128)
    assert plain["activations"] - sharded["activations"] > linear


def test_logits_are_a_chunk_of_the_device():
    """1,024 places on a GPU and 512 on a CPU, beside the gradient of the matrix on its way to the sum; the CPU's is
    what `linear_logprobs` takes there."""
    config = LlamaConfig(**TINY.to_dict() | dict(vocab_size=8192))
    gpu, cpu = (plan(config, micro_tokens=2048, row=256, device=d).bytes()["logits"] for d in ("cuda", "cpu"))
    matrix, near = 8192*64*4, 1.1
    assert 1024*8192*4 + matrix <= gpu <= near*(1024*8192*4 + matrix)
    assert 512*8192*4 + matrix <= cpu <= near*(512*8192*4 + matrix)
    assert plan(config, micro_tokens=2048, row=256).bytes()["logits"] == gpu                # wherever the plan is made
    hidden, weight = torch.zeros(1024, 64, requires_grad=True), torch.zeros(8192, 64, requires_grad=True)
    tokens = torch.zeros(1024, dtype=torch.long)
    with Live(hidden, weight, tokens) as live: linear_logprobs(hidden, weight, tokens).sum().backward()
    assert abs(live.peak - hidden.nbytes - cpu) <= .05*cpu


def test_a_shared_matrix_keeps_its_gradient_through_the_layers():
    own, tied = (plan(LlamaConfig(**TINY.to_dict() | dict(tie_word_embeddings=tie)), **SMALL).bytes()["activations"]
                 for tie in (False, True))
    assert tied - own == 512*64*4


def test_operations_are_six_a_weight_and_attention():
    """2 a weight forward and 4 back; a head of d reads T keys: 4·T·d forward, 10·T·d back (torch's count: scores are
    made again)."""
    with FakeTensorMode(): model = fake_model(TINY); found = pass_bytes(model, 128, row=128)
    weights = sum(p.numel() for p in model.parameters()) - 512*64 - 7*64
    assert found.flops == 6*weights*128 + 3*(4 + 10)*128*128*64


@pytest.mark.parametrize("prompt, new", [(20, 100), (100, 3), (7, 300)], ids=str)
def test_a_cache_has_the_room_that_the_decoder_takes(prompt, new):
    "It grows by quarters from the prompt on; not knowing the prompt, the plan says the most that there can be."
    from rlblocks.samplers.kv_cache import CachedDecoder
    with torch.no_grad():
        decoder = CachedDecoder(fake_model(TINY, torch.float32).eval(), torch.ones(2, prompt, dtype=torch.long),
                                torch.full((2,), prompt), 1)
        for _ in range(new - 1): decoder.push(torch.ones(2, dtype=torch.long))
    held = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for layer in decoder.cache.layers
                for x in (layer.keys, layer.values, *layer.buffers)}.values())
    known, unknown = (plan_rollout(TINY, rows=2, tokens=prompt + new, prompt=p, dtype=torch.float32).bytes()["cache"]
                      for p in (prompt, None))
    assert held == known <= unknown


def test_the_cache_of_a_window_stops_growing():
    from transformers import MistralConfig
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=16)
    short, long = (plan_rollout(config, rows=4, tokens=n).bytes()["cache"] for n in (64, 512))
    assert short == long <= 4*2*2*16*2*8*4


def test_seconds_of_a_step_by_hand():
    policy, engine = plan(TINY, **SMALL), plan_rollout(TINY, rows=8, tokens=32)
    t = step_seconds(policy, engine, rows=8, prompt=16, new=16, flops=1e9, bandwidth=1e3, side_by_side=4, passes=2,
                     price=3600.)
    # layers, keys and values, heads, features, bytes
    weights, a_token = engine.bytes()["weights"], 3*2*2*16*4
    assert t["update"] == pytest.approx(8*32*policy.flops_per_token/1e9)
    assert t["passes"] == pytest.approx(2*t["update"]/3)
    assert t["generate"] == pytest.approx((2*16*weights + 8*16*24*a_token)/1e3)
    assert t["price"] == pytest.approx(t["total"])


REFUSED = [   # (what is wrong, words of the message)
    (dict(engine="ddp"), "engine 'ddp' is not known here"), (dict(devices=0), "devices=0; a whole number"),
    (dict(devices=2.), "devices=2.0"), (dict(device="mps"), "device='mps'; the kind of device that the run will have"),
    (dict(row=True), "row=True"),
    (dict(micro_tokens=64, row=128), "a row of 128 tokens does not fit micro_tokens=64; raise it"),
    (dict(offload="cpu"), "offload='cpu' needs an engine"),
    (dict(offload="disk", engine="fsdp2"), "offload='disk'"),
    (dict(offload="nvme", nvme="/disk", engine="fsdp2"), '"nvme" with zero(3)'),
    (dict(quantization="4bit"), "quantized weights do not train; give an adapter"),
    (dict(quantization="4bit", lora=dict(r=4), engine="fsdp2"), "not sharded here; leave out engine"),
    (dict(quantization="3bit", frozen=True), "'3bit' is not known here; \"4bit\""),
    (dict(quantization="4bit", lora=dict(r=4, use_dora=True)), "leave out use_dora"),
    (dict(lora=dict(r=4), low_precision=True), "adapters are kept in fp32"),
    (dict(lm_head=False), "a Critic or a Scorer is value_head=True, lm_head=False"),
    (dict(devices=3, sequence_parallel=2), "want a multiple of 2 devices; there are 3"),
    (dict(devices=2, tensor_parallel=2, engine="zero3"), 'None and "fsdp2" do'),
    (dict(devices=2, tensor_parallel=2, lora=dict(r=4), quantization="4bit"), "cuts matrices, and these are quantized"),
    (dict(devices=2, tensor_parallel=2, lora=dict(r=4, target_modules=["lm_head"])),
     "gives logits, which are read of its matrix alone"),
    (dict(devices=8, tensor_parallel=8, lora=dict(r=4)), "cannot share evenly"),
    (dict(devices=8, tensor_parallel=8), "cannot share evenly"),
    (dict(memory="80 gigs"), '"80GB" (10⁹ bytes) or "80GiB" (2³⁰)'), (dict(memory=80), "memory=80; the bytes"),
    (dict(memory=True), "memory=True"),
    (dict(memory=float("nan")), "memory=nan"), (dict(dtype="bf16"), "dtype is 'bf16'; a torch.dtype"),
]


@pytest.mark.parametrize("how, words", REFUSED, ids=lambda x: str(x)[:40])
def test_refusals(how, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)) as e: planned(**how)
    assert str(e.value).startswith(("plan: ", "engine", "tensor_parallel=", "lora: "))


@pytest.mark.parametrize("model, words",
                         [(7, "model is a int; a transformers configuration"),
                          (torch.nn.Linear(2, 2), "Linear has no config"),
                          (ViTConfig(), "ViTConfig is the configuration of no causal language model")], ids=str)
def test_what_is_no_model(model, words):
    with pytest.raises(TypeError, match=words): plan(model)


def test_words_for_memory():
    p = plan(TINY, **SMALL)
    assert p.fit("80GB") is p and p.fit("1 GiB") is p and p.fit(1e9) is p
    with pytest.raises(MemoryError, match=re.escape("of 0.00 GiB are to be used")): p.fit("1MB")
    with pytest.raises(ValueError, match="headroom=1"): p.fit("80GB", headroom=1)
    for how, words in ((dict(rows=0, tokens=8), "rows=0"), (dict(rows=8, tokens=2.5), "tokens=2.5"),
                       (dict(rows=8, tokens=8, prompt=9), "prompt=9; of tokens=8")):
        with pytest.raises(ValueError, match=words): plan_rollout(TINY, **how)


@pytest.mark.parametrize("how, words",
                         [(dict(rows=0), "rows=0; a whole number, at least 1"),
                          (dict(flops=0), "flops=0; what a device achieves"),
                          (dict(bandwidth=float("inf")), "bandwidth=inf"), (dict(flops="1e9"), "flops='1e9'"),
                          (dict(rows="8"), "rows='8'; a whole number"), (dict(price=-1), "price=-1")], ids=str)
def test_seconds_of_nothing(how, words):
    with pytest.raises(ValueError, match=words):
        step_seconds(plan(TINY, **SMALL), plan_rollout(TINY, rows=8, tokens=32),
                     **dict(rows=8, prompt=8, new=8, flops=1e9, bandwidth=1e9) | how)


def test_numbers_of_numpy_are_numbers():
    "Sizes come from arrays: the same plan as of Python's."
    n = {name: np.int64(x) for name, x in (SMALL | dict(devices=2)).items()}
    assert plan(TINY, engine="fsdp2", **n).bytes() == bytes_of(engine="fsdp2", devices=2)
    assert plan_rollout(TINY, rows=np.int32(2), tokens=np.int64(8),
                        prompt=np.int64(4)).bytes() == plan_rollout(TINY, rows=2, tokens=8, prompt=4).bytes()
    with pytest.raises(ValueError, match="plan_rollout: prompt=True; a whole number"):
        plan_rollout(TINY, rows=2, tokens=8, prompt=True)
