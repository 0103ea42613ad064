"""vLLM as an engine: what computes there is what the trainer computes, and an engine that is gone is known to be gone.

An engine takes as long to start as all else here: tests that can share one do, those that end theirs stand last."""
import os
import re
import signal
import subprocess
from itertools import product

import pytest
import torch
from clock import Clock
from conftest import rarely, vllm_python
from rlblocks import Policy, Rollout, later, send_weights
from rlblocks.engines.published import publish_weights, published_weights
from rlblocks.engines.weights import buckets, checksum, named_weights
from rlblocks.samplers.samplers import Sampling, complete, vllm
from test_samplers import asked, in_vllm, said, sharp
from test_weights import lora, nudge, stirred
from tiny import prompts

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


def rollout(net, **settings):
    spec = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python(), **settings)
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


def gap(policy, b): return float((policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max())


@pytest.mark.parametrize("kind", [*KINDS, *rarely(*ALONE)])
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


def test_the_registered_engine_is_what_the_entry_point_names(root):
    "In the environment that has vLLM; more than once, as vLLM calls it in each of its processes."
    where = re.search(r'"vllm.general_plugins": \["rlblocks = ([\w.]+):(\w+)"\]', (root/"setup.py").read_text())
    code = (f"from {where[1]} import {where[2]} as f; f(); f()\n"
            "from vllm.distributed.weight_transfer import WeightTransferEngineFactory as made\n"
            "print(made._registry['rlblocks']().__name__)")
    run = subprocess.run([vllm_python(), "-c", code], capture_output=True, text=True, timeout=300,
                         env=os.environ | dict(PYTHONPATH=str(root), VLLM_LOGGING_LEVEL="ERROR"))
    assert run.stdout == "FromMemory\n", run.stderr[-1000:]


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
        os.kill(r.sampler.child.process.pid, signal.SIGKILL)
        r.generate(prompts(), group_size=8, max_tokens=100)
    assert clock.seconds < 2
    with pytest.raises(RuntimeError, match="of no known version"): r.generate(prompts())
    def dies(n):        # in the middle of a transfer, to an engine that is new
        died.append(clock.seconds)
        os.kill(r.sampler.child.process.pid, signal.SIGKILL)
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
    os.kill(sampler.child.process.pid, signal.SIGKILL)
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
    os.kill(sampler.child.process.pid, signal.SIGSTOP)
    with Clock() as clock, pytest.raises(TimeoutError, match="no sign of life for 2 s and was stopped. Its log ends:"):
        complete(sampler, asked())
    assert clock.seconds < 2 + 2 and sampler.child is None
    policy = Policy(sharp(), device="cpu")
    shared.load(policy.weights())               # a new one; it is stuck in mid-transfer
    def stops(n):
        first, *others = buckets(named_weights(policy._run.module.trunk).items(), 1 << 14)
        yield first
        sampler.child.timeout = 2.
        os.kill(sampler.child.process.pid, signal.SIGSTOP)
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


def test_weights_that_come_by_network_are_proved_too_and_a_sender_that_goes_ends_the_engine(shared):
    policy = moved(Policy(sharp(), device="cpu"))
    manifest = shared.load(send_weights(policy.weights(), bucket_bytes=20_000).ticket)
    assert manifest.gap < 1e-4 and manifest.n_messages > 4
    def breaks(n):
        yield from list(buckets(named_weights(policy._run.module.trunk).items(), n))[:2]
        raise ConnectionError("the disk is gone")
    ticket = policy.weights()
    ticket.transport.params = breaks
    with Clock() as clock, pytest.raises(RuntimeError, match="could not send version 0: ConnectionError: the disk is"):
        shared.load(send_weights(ticket, bucket_bytes=20_000).ticket)
    assert clock.seconds < 2 and shared.sampler.child is None and shared.sampler.version is None
