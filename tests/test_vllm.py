"""vLLM as an engine: what computes there is what the trainer computes, and an engine that is gone is known to be gone.

An engine takes as long to start as all else here: tests that can share one do, those that end theirs stand last."""
import os
import pickle
import re
import signal
import subprocess
import tempfile
import time
from itertools import product
from pathlib import Path

import pytest
import cuda_stand_in
import torch
from clock import Clock
from conftest import rarely, vllm_interpreter, vllm_python
from forked import forked
from ready import behind
from rlblocks import Batch, Policy, Rollout, later
from rlblocks.engines.weight_folder import publish_weights, published_weights
from rlblocks.engines.weights import buckets, checksum, named_weights
from rlblocks.graders.jail import adopt_orphans, children
from rlblocks.rollout.rows import to_rows
from rlblocks.samplers import processes, weight_transfer
from rlblocks.samplers import vllm as vllm_module
from rlblocks.samplers.processes import child_environment
from rlblocks.samplers.sampler import Request, Sampling, complete, vllm
from rlblocks.samplers.vllm import Vllm, to_completion
from rlblocks.samplers.weight_transfer import CudaIpc
from test_samplers import PROMPTS, asked, in_vllm, said, sharp
from test_weights import lora, nudge, stirred
from tiny import prompts, tokenizer

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
# what one dense model can have together: biases, one table for ids and output, a window; each by itself takes an engine
DENSE = dict(tie_word_embeddings=True, use_sliding_window=True, max_window_layers=0, sliding_window=5)
KINDS = dict(dense=("qwen2", DENSE), mixture=("qwen3_moe", dict(head_dim=32) | MOE))
ALONE = dict(tied=("llama", dict(tie_word_embeddings=True)), gqa=("qwen2", {}),
             window=("mistral", dict(sliding_window=5)))


@pytest.fixture(autouse=True, scope="module")
def there():
    if vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")


def moved(policy, far=.05):
    "The policy, with every tensor another one."
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for w in policy._run.module.trunk.parameters():
            w.add_(far*w.std().nan_to_num(1.)*torch.randn(w.shape, generator=g))
    return policy


def rollout(net, python=None, **settings):
    spec = vllm(cache_bytes=1 << 26, timeout=120., python=python or vllm_python(), **settings)
    return Rollout(net, engine=spec, max_tokens=12, stop=[])


@pytest.fixture(scope="module")
def started():
    "An engine in small buckets, started in one of torchrun's processes."
    with pytest.MonkeyPatch.context() as patch:
        for name, x in TORCHRUN.items(): patch.setenv(name, x)
        made = rollout(sharp(), bucket_bytes=40_000)
    yield made
    made.close()


@pytest.fixture
def shared(started):
    "The same, with the first weights; where a test ended it, another."
    if started.sampler.version is None: started.load(Policy(sharp(), device="cpu").weights())
    return started


def engine(sampler):
    "The number of its process."
    return behind(vllm_python(), sampler.child.process.pid)


def gap(policy, b): return float((policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max())


# of a mixture, the four phases below and the ways between GPUs have them too
@pytest.mark.parametrize("kind", ["dense", *rarely("mixture", *ALONE)])
def test_log_probs_are_the_trainers_whatever_has_been_loaded(kind):
    """LAWS 2 and 3: before and after every tensor has moved, at each temperature with and without a support, after
    changes alone, after LoRA's factors. An old head or old experts would show, whose checksums do not."""
    name, more = (KINDS | ALONE)[kind]
    net = sharp(name, **more)
    policy, r = Policy(net, lr=1e-2, device="cpu"), rollout(net)
    assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    manifest = r.load(moved(policy).weights(since=-1))
    assert manifest.gap < 1e-4 and manifest.version == 0 and manifest.n_messages == 3
    for T, more in product((.6, 1., 1.3), ({}, dict(top_p=.8), dict(top_k=5), dict(min_p=.1, top_p=.9))):
        r.how = Sampling(T, **more)
        assert gap(policy, r.generate(prompts(), group_size=4, seed=1)) < 1e-4
    nudge(policy)
    for changed in (policy.weights(since=0), stirred(lora(net)).weights()):
        assert r.load(changed).gap < 1e-4 and r.sampler.version == 1
    assert gap(stirred(lora(net)), r.generate(prompts(), group_size=4)) < 1e-4
    pid = r.sampler.child.process.pid
    r.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("kind", ["mixture", *rarely("dense", *ALONE)])
def test_the_four_phases_of_vllms_weight_transfer_put_the_same_in_place(kind):
    "By an engine registered in vLLM: names, checksums, log-probs; tied heads and experts are packed again here too."
    name, more = (KINDS | ALONE)[kind]
    net = sharp(name, **more)
    policy = Policy(net, lr=1e-2, device="cpu")
    r = rollout(net, bucket_bytes=40_000, weight_transfer_config=dict(backend="rlblocks"))
    assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    for _ in range(2):
        manifest = r.load(moved(policy).weights())
        assert manifest.gap < 1e-4 and manifest.n_messages > 4
        assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    r.close()


def in_engines_python(code, root):
    "What a program prints in the environment that has vLLM."
    run = subprocess.run([vllm_python(), "-c", code], capture_output=True, text=True, timeout=300,
                         env=child_environment(dict(os.environ)) | vllm_module._QUIET | dict(PYTHONPATH=str(root)))
    assert not run.returncode, run.stderr[-2000:]
    return run.stdout


class Changed(CudaIpc):
    "A bit of a bucket changes on its way."
    breaks = False
    def message(self, entries):
        if self.breaks: self.bucket[0] ^= 1
        return super().message(entries)


def test_weights_on_one_gpu_go_through_vllms_own_engine(monkeypatch, root):
    """Real trainer, real vLLM with its own IPC engine; CUDA's memory is this machine's (untried on a GPU). The same
    checks as with shared memory: names, shapes, checksums and the probe; what breaks ends the engine."""
    begin = f"sys.path.append({str(root/'tests')!r})\nfrom cuda_stand_in import serve_trainer as run # {{}} {{}}"
    monkeypatch.setattr(processes, "_PROGRAM", processes._PROGRAM.replace("from {} import {} as run", begin))
    monkeypatch.setattr(weight_transfer, "reduce_tensor", cuda_stand_in.exported)
    cuda_stand_in.put(monkeypatch.setattr)
    channel = Changed(torch.device("cpu"))
    monkeypatch.setattr(vllm_module, "new_channel", lambda spec: channel)
    net = sharp("qwen3_moe", head_dim=32, tie_word_embeddings=True, **MOE)
    policy, r = Policy(net, lr=1e-2, device="cpu"), rollout(net, bucket_bytes=40_000)
    assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    for _ in range(2):
        manifest = r.load(moved(policy).weights())
        assert manifest.gap < 1e-4 and manifest.n_messages > 4
        assert manifest.n_bytes == sum(x.nbytes for x in named_weights(policy._run.module.trunk).values())
    assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    channel.breaks = True
    with pytest.raises(RuntimeError, match="arrived changed"): r.load(moved(policy).weights())
    assert r.sampler.child is None
    r.close()


def test_the_registered_engine_is_what_the_entry_point_names(root):
    "In the environment that has vLLM; more than once, as vLLM calls it in each of its processes."
    where = re.search(r'"vllm.general_plugins": \["rlblocks = ([\w.]+):(\w+)"\]', (root/"setup.py").read_text())
    code = (f"from {where[1]} import {where[2]} as f; f(); f()\n"
            "from vllm.distributed.weight_transfer import WeightTransferEngineFactory as made\n"
            "print(made._registry['rlblocks']().__name__)")
    assert in_engines_python(code, root) == "FromMemory\n"


RETURNED = """
import numpy as np, pickle, sys
from multiprocessing import Pipe
from rlblocks.samplers.vllm_process import SampleOptions, Server, acceptance
from vllm import EngineArgs
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.v1.metrics.reader import Counter, Vector
counted = dict(num_drafts=17, num_draft_tokens=48, num_accepted_tokens=34)
found = acceptance([Counter(f"vllm:spec_decode_{name}", {}, n) for name, n in counted.items()] +
                   [Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, [1, 0, 0])])
flat = FlatLogprobs()
for i, x in ((7, -.5), (2, -.25)): flat.append({i: Logprob(logprob=x)})
made = CompletionOutput(0, "", [7, 2], None, flat, routed_experts=np.arange(40, dtype=np.uint8).reshape(5, 4, 2),
                        finish_reason="length", sampling_mask=SamplingMask([[5, 7], [2, 4, 6]]))
here, there = Pipe()
server = Server(there)
server.samples.add("0/0")
server.options["0/0"], server.versions["0/0"] = SampleOptions(room=4), [(0, 3)]
server.collect([RequestOutput("0/0", None, [3, 4, 5, 6], None, [made], True)])
server.decode = lambda ids: " ".join(map(str, ids))
server.samples.add("2/0")          # one step adds both ids, and ends the sample behind the string
server.options["2/0"], server.versions["2/0"] = SampleOptions(room=4, strings=("7",)), [(0, 3)]
server.collect([RequestOutput("2/0", None, [3, 4, 5, 6], None, [made], True)])
server.samples.add("1/0")
server.options["1/0"], server.versions["1/0"] = SampleOptions(room=4), [(0, 3)]
server.forget(["1/0"])           # as when it is aborted
assert not server.samples and not server.options and not server.versions
sent = [here.recv() for _ in range(4)]
assert [x[0] for x in sent] == ["done", "idle"]*2, sent
print(pickle.dumps((sent[0], sent[2], found, sorted(EngineArgs.__dataclass_fields__))).hex())
"""


def test_what_vllm_returns_beside_tokens_is_read(root):
    """Read out of vLLM's own classes, as Model Runner V2 fills them (untried on a GPU): experts of the layers that have
    a router, for prompt and tokens but the last; supports as masks; what speculative decoding accepted. A string that
    an accepted token completes ends the sample there. The options have these names in this vLLM."""
    told = pickle.loads(bytes.fromhex(in_engines_python(RETURNED, root)))
    (_, _, *parts, reason), (_, name, ids, logps, support, *_, why), found, options = told
    assert found == dict(drafts=17, draft_tokens=48, accepted_tokens=34, acceptance_rate=34/48, mean_accepted_length=3)
    assert (name, ids.tolist(), logps.tolist(), support.tolist(), why) == ("2/0", [7], [-.5], [[5, 7, -1, -1]], "stop")
    assert {"enable_return_routed_experts", "return_sampling_mask", "enable_sleep_mode"} <= set(options)
    request = Request(0, torch.tensor([3, 4, 5, 6]), (1,), 2, Sampling(top_p=.9), (), experts=True)
    made = to_completion(request, 0, parts, reason, 32, [1, 3])
    batch = Batch(tokens=request.ids[None], lengths=torch.tensor([4]), group=torch.tensor([9]))
    rows = to_rows(batch, 1, [made], request.how)
    assert rows.experts.tolist() == [[[[8*t + 2, 8*t + 3], [8*t + 6, 8*t + 7]] for t in range(5)] + [[[-1, -1]]*2]]
    assert rows.support[0, 4:].tolist() == [[5, 7, -1, -1], [2, 4, 6, -1]]
    assert rows.rollout_logprobs[0, 4:].tolist() == [-.5, -.25] and rows.policy_version.tolist() == [3]


@pytest.mark.long
def test_a_row_ends_within_what_one_step_has_accepted():
    """Real proposals from prompts that the model goes on repeating. Some strings are complete before a step's last id:
    the row ends there, as one that grows token by token."""
    proposer = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    spec = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python(), speculative_config=proposer)
    sampler = Vllm(sharp(), spec=spec, tokenizer=tokenizer())
    def greedy(prompts, S, **more):
        return complete(sampler, asked(prompts, n=1, S=S, how=Sampling(temperature=0.), **more))
    loops = [(*p, *c.tokens.tolist()) for p, c in zip(PROMPTS, greedy(PROMPTS, 40), strict=True)]
    for prompt, ids in zip(loops, said(greedy(loops, 12)), strict=True):
        for i in set(ids) - {0, 1}:
            row, = greedy([prompt], 12, strings=(f"w{i}",))
            texts = [" ".join(f"w{j}" for j in ids[:n]) for n in range(1, 13)]
            assert row.tokens.tolist() == ids[:next(n for n, t in enumerate(texts, 1) if f"w{i}" in t)]
            assert row.reason == "stop"
    assert sampler.metrics()["accepted_tokens"] > 40
    sampler.close()


def test_weights_that_are_no_numbers_leave_nothing_and_memory_wakes_in_order(shared, monkeypatch):
    """The probe refuses NaN, and the engine is ended with its keys; the next one's rows are the trainer's. After sleep
    its weights wake first, and the cache when the new ones are in place."""
    monkeypatch.setitem(vllm_module._QUIET, "VLLM_LOGGING_LEVEL", "INFO")
    net, r = sharp(), shared
    policy, good, child = Policy(net, device="cpu"), Policy(net, device="cpu"), shared.sampler.child
    with torch.no_grad(): next(policy._run.module.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match="up to nan apart"): r.load(policy.weights())
    assert child.process.poll() is not None and r.sampler.child is None
    with pytest.raises(RuntimeError, match="of no known version"): r.generate(prompts())
    assert r.load(good.weights()).gap < 1e-4 and gap(good, r.generate(prompts(), group_size=4)) < 1e-4
    assert r.metrics() == {}
    r.sleep(2)
    r.load(moved(good).weights())
    assert gap(good, r.generate(prompts(), group_size=4)) < 1e-4
    order = re.findall(r"wake up tags \[([^]]*)\]", open(r.sampler.child.log.name).read())
    assert order == ["'weights'", "'kv_cache'"]


def test_torchruns_variables_do_not_reach_the_engine(shared):
    assert len(said(complete(shared.sampler, asked()))) == 12
    environment = open(f"/proc/{shared.sampler.child.process.pid}/environ").read().split("\0")
    assert not [x for x in environment if re.match(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_)", x)]


def test_keys_of_a_long_prompt_are_not_read_under_other_weights():
    """LAWS 7, with prompts long enough to be kept: rows of a prompt read what its siblings have left; after a load they
    do not, neither with an empty cache nor (`keep`) with a full one."""
    net = sharp(max_position_embeddings=1024)
    policy, r = Policy(net, device="cpu"), rollout(net)
    long = prompts((600, 500))
    for load in ({}, dict(keep=True)):
        first = r.generate(long, group_size=2)
        assert r.generate(long, group_size=2).tokens.equal(first.tokens) and hits(r) > 2*400
        busy = later(r.generate, prompts(), max_tokens=300)       # a cache that is in use is not emptied
        r.load(moved(policy, .2).weights(), **load)
        before = hits(r)
        assert gap(policy, r.generate(long[[0]])) < 1e-4 and hits(r) == before
        busy.result()
        assert gap(policy, r.generate(long, group_size=2)) < 1e-4 and hits(r) > before
    r.close()


def hits(r):
    "Tokens whose keys were read out of the cache, as vLLM counts them."
    return r.sampler.child.ask("cached")[0]


def test_names_and_shapes_are_compared_before_anything_is_sent(shared):
    sampler = shared.sampler
    for other, says in ((sharp(num_hidden_layers=1), "lacks 'model.layers.1"),
                        (sharp(num_hidden_layers=3), "has no 'model.layers.2"), (sharp(vocab_size=64), r"is \[64")):
        pid = sampler.child.process.pid
        with pytest.raises(ValueError, match=says): sampler.load(Policy(other, device="cpu").weights())
        assert sampler.child.process.pid == pid and sampler.child.process.poll() is None


def test_a_bucket_is_a_message_and_checksums_are_of_what_arrived(shared):
    net = sharp()
    manifest = shared.load(Policy(net, device="cpu").weights())
    own = named_weights(net)
    assert manifest.checksums == {n: checksum(x) for n, x in own.items()}
    assert manifest.n_bytes == sum(x.nbytes for x in own.values())
    assert 4 < manifest.n_messages <= manifest.n_bytes//40_000*2 + 4


def test_prompts_and_columns_are_the_same_as_with_the_models_own_forward_pass(shared):
    both = shared, Rollout(sharp(), max_tokens=12, stop=[], device="cpu")
    ours, theirs = (r.generate(prompts(), group_size=3, seed=1) for r in both)
    assert set(ours.columns) == set(theirs.columns) and ours.finish_reason == theirs.finish_reason
    for name in ("group", "sample", "prompt_lengths", "mask", "lengths", "temperature"):
        assert ours[name].equal(theirs[name]), name
    greedy = [r.generate(prompts(), temperature=0.) for r in both]
    assert said_of(greedy[0]) == said_of(greedy[1]) and not greedy[0].mask.any()


def test_an_engine_that_computes_something_else_is_found_out(shared):
    "The weights arrive, their checksums agree, and the trainer means another distribution."
    net, sampler = sharp(), shared.sampler
    policy = moved(Policy(net, device="cpu", lr=1e-2))
    ticket = policy.weights()
    ticket.transport.scored = Policy(net, device="cpu").weights().score
    with pytest.raises(RuntimeError, match="does not compute what the trainer computes.* 0.001 is allowed in float32"):
        sampler.load(ticket)
    with pytest.raises(RuntimeError, match="of no known version"): sampler.submit(asked())
    assert sampler.load(policy.weights()).gap < 1e-4        # a new engine


def test_an_engine_that_is_killed_is_an_error_at_once_and_load_starts_another(shared):
    net, r = sharp(), shared
    policy = Policy(net, device="cpu")
    r.load(policy.weights())
    before = r.generate(prompts(), group_size=2, max_tokens=8)
    with Clock() as clock, pytest.raises(RuntimeError, match="is gone, exit code -9"):
        os.kill(engine(r.sampler), signal.SIGKILL)
        r.generate(prompts(), group_size=8, max_tokens=100)
    assert clock.seconds < 2
    with pytest.raises(RuntimeError, match="of no known version"): r.generate(prompts())
    def dies(n):        # in the middle of a transfer, to an engine that is new
        died.append(clock.seconds)
        os.kill(engine(r.sampler), signal.SIGKILL)
        yield from buckets(named_weights(net).items(), n)
    ticket, died = policy.weights(), []
    ticket.transport.params = dies
    with Clock() as clock, pytest.raises(RuntimeError, match="is gone"): r.load(ticket)
    assert clock.seconds < died[0] + 2
    r.load(policy.weights())
    again = r.generate(prompts(), group_size=2, max_tokens=8)
    assert again.tokens.equal(before.tokens)


def test_changes_alone_and_a_transfer_that_breaks(shared):
    "1 % in 5 % of the bytes. A sender or an engine that dies in mid-transfer: an error at once, and no weights."
    net = sharp()
    policy, sampler = Policy(net, device="cpu"), shared.sampler
    sent = sampler.load(policy.weights(since=0)).n_bytes
    for version in (1, 2):
        nudge(policy)
        manifest = sampler.load(policy.weights(since=version - 1))
        assert manifest.version == version and manifest.gap < 1e-4 and manifest.n_bytes < .05*sent
    assert manifest.checksums == {n: checksum(x) for n, x in named_weights(policy._run.module.trunk).items()}
    def breaks(n):
        yield from list(buckets(named_weights(net).items(), 1 << 14))[:2]
        raise ConnectionError("the sender is gone")
    child, ticket = sampler.child, policy.weights()
    ticket.transport.params = breaks
    with Clock() as clock, pytest.raises(ConnectionError, match="the sender is gone"): sampler.load(ticket)
    assert clock.seconds < 2 and child.process.poll() is not None and sampler.child is None
    with pytest.raises(RuntimeError, match="of no known version"): sampler.submit(asked())
    nudge(policy)
    changes = policy.weights(since=2)
    with pytest.raises(ValueError, match="from version 2 to 3, the receiver has none"): sampler.load(changes)
    assert sampler.load(policy.weights(since=-1)).gap < 1e-4            # a new engine, with all weights
    os.kill(engine(sampler), signal.SIGKILL)
    nudge(policy)
    with Clock() as clock, pytest.raises(RuntimeError, match="is gone"): sampler.load(policy.weights(since=3))
    assert clock.seconds < 2


def test_half_precision_is_proved_to_a_tenth():
    net = sharp()
    policy, sampler = moved(Policy(net, device="cpu")), in_vllm(net, dtype=torch.bfloat16)
    manifest = sampler.load(policy.weights(dtype=torch.bfloat16))
    assert 1e-3 < manifest.gap < .1 and manifest.n_bytes == sum(2*x.numel() for x in named_weights(net).values())
    ticket = policy.weights()
    scored = ticket.transport.scored
    ticket.transport.scored = lambda ids: scored(ids) + .2
    with pytest.raises(RuntimeError, match="0.1 is allowed in bfloat16"): sampler.load(ticket)
    assert sampler.child is None


def test_an_engine_that_is_stuck_is_stopped_with_what_it_last_said(shared):
    sampler = shared.sampler
    sampler.child.timeout = 2.
    os.kill(engine(sampler), signal.SIGSTOP)
    with Clock() as clock, pytest.raises(TimeoutError, match="no sign of life for 2 s and was stopped. Its log ends:"):
        complete(sampler, asked())
    assert clock.seconds < 2 + 2 and sampler.child is None
    policy = Policy(sharp(), device="cpu")
    shared.load(policy.weights())               # a new one; it is stuck in mid-transfer
    def stops(n):
        first, *others = buckets(named_weights(policy._run.module.trunk).items(), 1 << 14)
        yield first
        sampler.child.timeout = 2.
        os.kill(engine(sampler), signal.SIGSTOP)
        yield from others
    ticket = policy.weights()
    ticket.transport.params = stops
    with Clock() as clock, pytest.raises(TimeoutError, match="gave no sign of life for 2 s"): shared.load(ticket)
    assert clock.seconds < 2 + 2 and sampler.child is None
    shared.close()
    shared.close()


def said_of(b): return [b.tokens[i, :b.lengths[i]].tolist() for i in range(len(b))]


def test_a_model_that_this_build_cannot_run_fails_in_the_constructor():
    heads_of_8 = sharp(num_attention_heads=8, num_key_value_heads=8)
    with pytest.raises(RuntimeError, match="engine='vllm' did not start"): rollout(heads_of_8)


def test_a_start_that_takes_too_long_says_so():
    with pytest.raises(TimeoutError, match=r"did not start within 1 s; .* allow more, engine=vllm\(start=…\)"):
        rollout(sharp(), python=vllm_interpreter(), start=1.)        # vLLM alone takes longer to import


def test_adapters_alone_and_a_folder_reach_the_engine(tmp_path):
    "The base stays in vLLM, an adapter goes into a slot, and the log-probs are the trainer's."
    net = sharp()
    r = rollout(net, enable_lora=True, max_lora_rank=8)
    policy = lora(net)
    assert gap(policy, r.generate(prompts(), group_size=4)) < 1e-4
    for seed in (0, 1, 2):
        manifest = r.load(stirred(policy, seed).weights(adapter=True))
        assert manifest.gap < 1e-4 and manifest.version == seed + 1
        b = r.generate(prompts(), group_size=4)
        assert gap(policy, b) < 1e-4 and b.policy_version.eq(seed + 1).all()
    with pytest.raises(ValueError, match="has slots and takes adapters alone"): r.load(policy.weights())
    with pytest.raises(ValueError, match="of rank 16, a slot has room for 8"):
        r.load(Policy(net, lora=dict(r=16), device="cpu").weights(adapter=True))
    assert r.sampler.child is not None and r.sampler.version is None
    r.close()
    assert r.load(policy.weights(adapter=True)).gap < 1e-4            # a new engine has its base again
    r.close()


def test_merged_adapters_and_a_folder_are_proved_too(shared, tmp_path):
    net = sharp()
    policy = stirred(lora(net))
    assert shared.load(policy.weights()).gap < 1e-4
    with pytest.raises(ValueError, match="adapters alone need slots"): shared.load(policy.weights(adapter=True))
    manifest = shared.load(publish_weights(stirred(policy).weights(), tmp_path, bucket_bytes=20_000))
    assert manifest.gap < 1e-4 and manifest.version == 2 and manifest.checksums == published_weights(tmp_path).checksums


def killed(_, folder, python, seconds):
    "Every orphan of the trainer comes to this process."
    adopt_orphans()
    work, there = Path(folder)/"work", Path(folder)/"there"
    work.mkdir()
    trainer = os.fork()
    if not trainer:
        tempfile.tempdir = os.environ["TMPDIR"] = str(work)
        r = rollout(sharp(), python, enable_lora=True, max_lora_rank=8)
        there.write_text(" ".join(os.listdir(r.sampler.child.folder.name)))
        time.sleep(3600)
    end = time.monotonic() + seconds
    while not (there.exists() and there.read_text()) and time.monotonic() < end: time.sleep(.05)
    assert seconds < 100 or "vllm_dist_" in there.read_text()       # else it is made elsewhere, and this sees nothing
    os.kill(trainer, signal.SIGKILL)
    end = time.monotonic() + 5.
    while (left := children(trainer)) and time.monotonic() < end:
        os.waitpid(-1, os.WNOHANG)
        time.sleep(.02)
    assert not left and not list(work.iterdir())


@pytest.mark.parametrize("seconds", rarely(300., .5, 1.5, 3.))
def test_a_killed_trainer_leaves_nothing_of_vllm(tmp_path, seconds):
    "Neither the weights that it read, nor the file by which its ranks would meet."
    forked(killed, (str(tmp_path), vllm_python(), seconds), 1, limit=600)
