"Tickets are data: what they say, what they refuse, and that they never take a model along."
import copy
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT
from rlblocks import Policy, Rollout
from rlblocks.engines.weights import delta_apply, delta_encode
from rlblocks.engines.weight_folder import publish_weights, published_weights, versions
from rlblocks.engines.weights import InProcess, Ticket, Transport, buckets, checksum, copy_weights, named_weights
from tiny import model


def engine(**how): return Rollout(model(), max_tokens=4, stop=[], device="cpu", **how)


# -- a ticket is data

def pickler(name):
    "A module that pickles, two of them functions by value; cloudpickle comes with Ray too."
    return pytest.importorskip("ray.cloudpickle" if name == "cloudpickle" and not find_spec(name) else name)


@pytest.mark.parametrize("module", ["pickle", "dill", "cloudpickle"])
def test_a_pickled_ticket_takes_no_model_along(module):
    "cloudpickle would take closures, and with them the weights, without a word."
    dumps = pickler(module).dumps
    policy = Policy(model(vocab_size=2048), device="cpu")
    ticket = policy.weights()
    data = dumps(ticket)
    assert len(data) < 8000 < sum(x.nbytes for x in policy._run.module.trunk.parameters())/10
    again = pickle.loads(data)
    assert (again.version, again.shapes, again.probe) == (0, ticket.shapes, ticket.probe) and len(ticket.probe) == 32
    assert set(again.shapes) == set(named_weights(policy._run.module.trunk))
    for use in (lambda: list(again.buckets(1 << 20)), lambda: again.score(torch.tensor([1, 2]))):
        with pytest.raises(RuntimeError, match=f"its weights are in process {os.getpid()} of .*; load it there"): use()


@pytest.mark.parametrize("module", ["dill", "cloudpickle"])
@pytest.mark.parametrize("who", ["Policy", "Rollout"])
def test_a_function_that_has_captured_a_wrapper_is_not_sent(who, module):
    "Weights would go with it, without a word; a ticket it may have, and a copy in this process is none of that."
    by_value = pickler(module)
    policy = Policy(model(), device="cpu")
    other, ticket = policy if who == "Policy" else engine(), policy.weights()
    def loss(out, b): return other(out, b)
    def fine(out, b): return ticket.version
    for send in (lambda: by_value.dumps(loss), lambda: pickle.dumps(dict(x=(other,)))):
        with pytest.raises(TypeError, match=f"{who}: it lives in process {os.getpid()} and cannot be sent"): send()
    assert len(by_value.dumps(fine)) < 10_000
    twin = copy.deepcopy(policy)
    assert twin.version == 0 and twin.weights().transport is not policy.weights().transport
    assert next(twin._run.module.parameters()).data_ptr() != next(policy._run.module.parameters()).data_ptr()


def test_another_process_reads_the_ticket_and_is_refused_by_name():
    code = ("import pickle, sys; t = pickle.load(sys.stdin.buffer); print(t.version, len(t.shapes))\n"
            "try: next(t.buckets(1))\nexcept RuntimeError as e: print(e)")
    ticket = Policy(model(), device="cpu").weights()
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(ticket), capture_output=True,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)), timeout=300)
    says = f"0 {len(ticket.shapes)}\nTicket: its weights are in process {os.getpid()} of"
    assert run.stdout.decode().startswith(says), run


def test_a_ticket_here_costs_no_copy_before_it_is_loaded():
    "A deep copy of what holds a ticket does not copy the model either."
    policy = Policy(model(), device="cpu")
    ticket = policy.weights()
    assert isinstance(ticket.transport, Transport) and copy.deepcopy(ticket).transport is ticket.transport
    first = next(ticket.buckets(1 << 28))
    assert all(x.data_ptr() != named_weights(policy._run.module.trunk)[n].data_ptr() for n, x in first.items())
    assert engine().load(ticket).version == 0


def test_shapes_are_known_before_anything_is_gathered():
    net, read = model(), []
    policy = Policy(net, device="cpu")
    ticket = policy.weights()
    params = ticket.transport.params
    ticket.transport.params = lambda n: read.append(n) or params(n)
    for other, says in ((model(num_hidden_layers=1), "the receiver has no"), (model(vocab_size=64), r"is \[64")):
        with pytest.raises(ValueError, match=says): Rollout(other, device="cpu").load(ticket)
    assert not read


def test_checksums_that_a_ticket_names_are_those_of_what_arrives():
    net, other = model(), model(seed=1)
    own = named_weights(net)
    how = InProcess(lambda: 0, lambda n: buckets(own.items(), n))
    known = {n: checksum(x) for n, x in own.items()}
    assert copy_weights(Ticket(0, how, checksums=known), other).checksums == known
    known[next(iter(known))] += 1
    with pytest.raises(RuntimeError, match=f"{next(iter(known))!r} arrived changed"):
        copy_weights(Ticket(0, how, checksums=known), other)


# -- deltas

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def bits(x): return x.contiguous().view(BITS[x.dtype])


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("share", [0., .01, .3, 1.])
def test_a_delta_is_lossless(dtype, share):
    "To the bit, −0.0 and every NaN included; never larger than the tensor."
    g = torch.Generator().manual_seed(0)
    old = torch.randn(70, 90, generator=g).to(dtype)
    at = torch.rand(70, 90, generator=g) < share
    new = torch.where(at, torch.randn(70, 90, generator=g).to(dtype), old)
    old.view(-1)[:2], new.view(-1)[:2] = torch.tensor([0., 1.]), torch.tensor([-0., float("nan")])
    bits(old).view(-1)[2], bits(new).view(-1)[2] = bits(new).view(-1)[1], bits(new).view(-1)[1] + 1
    before, delta = bits(old).clone(), delta_encode(old, new)
    assert bits(delta_apply(old, delta)).equal(bits(new)) and bits(old).equal(before) and delta.nbytes <= new.nbytes
    assert share != .01 or delta.nbytes < .05*new.nbytes
    again = pickle.loads(pickle.dumps(delta))
    assert again.checksum == checksum(new) and bits(again.applied(old)).equal(bits(new))
    if delta.index is not None:
        with pytest.raises(RuntimeError, match="not those that the delta was made from"): delta_apply(new + 1, delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rollout_follows_by_changes_alone(dtype):
    "1 % of the entries in less than 5 % of the bytes; by the checksums the weights are the policy's."
    policy, r = Policy(model(vocab_size=512), device="cpu"), Rollout(model(vocab_size=512), dtype=dtype, device="cpu")
    sent = r.load(policy.weights(since=r.sampler.version, dtype=dtype)).n_bytes
    for version in (1, 2):
        nudge(policy)
        ticket = policy.weights(since=version - 1, dtype=dtype)
        manifest = r.load(pickle.loads(pickle.dumps(ticket)))            # as from another machine
        own = named_weights(policy._run.module.trunk)
        assert manifest.version == version and manifest.n_bytes < .05*sent
        assert manifest.checksums == {n: checksum(x.to(dtype)) for n, x in own.items()}


def nudge(policy, every=100):
    "A step that moves one entry in a hundred."
    with torch.no_grad():
        for w in policy._run.module.trunk.parameters(): w.view(-1)[::every] += .25
    policy._run.model.version += 1


def test_changes_of_another_version_are_refused_and_all_weights_come_again():
    policy, r, late = Policy(model(), device="cpu"), engine(), engine()
    r.load(policy.weights(since=0))
    nudge(policy)
    ticket = policy.weights(since=0)
    r.load(ticket)
    nudge(policy)
    late.load(policy.weights())
    with pytest.raises(ValueError, match="changed from version 0 to 1, the receiver has version 2"): late.load(ticket)
    assert late.sampler.version == 2
    half = engine(dtype=torch.bfloat16)
    half.sampler.version = 1
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16.*dtype=torch.bfloat16\) makes deltas for this one"):
        half.load(policy.weights(since=1))
    with pytest.raises(RuntimeError, match="of no known version"): half.sampler.submit([])
    assert half.load(policy.weights(since=1)).version == 2               # the copy is of 2 by now: all weights


# -- adapters alone

def lora(net, **how): return Policy(net, lora=dict(r=4, **how), lr=1e-2, device="cpu")


def stirred(policy, seed=0):
    "An adapter that does something, and another version."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy._view.base.own[policy._view.adapter].values(): p.copy_(.3*torch.randn(p.shape, generator=g))
    policy._run.model.version += 1
    return policy


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_alone_gives_what_the_merged_weights_give(kind):
    policy, alone, merged = lora(model(kind)), *(Rollout(model(kind), device="cpu") for _ in range(2))
    for seed in (0, 1):
        stirred(policy, seed)
        manifest = alone.load(pickle.loads(pickle.dumps(policy.weights(adapter=True))))
        full = merged.load(policy.weights())
        assert manifest.gap < 1e-4 and manifest.version == full.version == seed + 1
        assert manifest.n_bytes < .5*full.n_bytes
        for (n, x), y in zip(named_weights(alone.module).items(), named_weights(merged.module).values(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6, msg=n)
    assert alone.load(policy.weights()).version == 2 and alone.load(policy.weights(adapter=True)).gap < 1e-4
    with pytest.raises(ValueError, match="the base of another one is gone; load the base once"):
        merged.load(policy.weights(adapter=True))
    merged.load(Policy(policy, lora=None, device="cpu").weights())
    assert merged.load(policy.weights(adapter=True)).gap < 1e-4


def test_an_adapter_on_another_base_is_found_out():
    policy, other = stirred(lora(model())), Rollout(model(seed=1), device="cpu")
    with pytest.raises(RuntimeError, match="The adapter may stand on other weights"):
        other.load(policy.weights(adapter=True))
    with pytest.raises(RuntimeError, match="of no known version"): other.sampler.submit([])


def test_what_is_more_than_two_factors_does_not_go_alone():
    with pytest.raises(ValueError, match="and there is none"): Policy(model(), device="cpu").weights(adapter=True)
    with pytest.raises(ValueError, match="plain LoRA on complete layers"):
        lora(model(), use_dora=True).weights(adapter=True)
    for more in (dict(since=0), dict(dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=f"weights got adapter=True and {next(iter(more))}="):
            lora(model()).weights(adapter=True, **more)


# -- a folder

def test_a_late_rollout_reads_the_last_version_of_a_folder(tmp_path):
    policy, late = Policy(model(), device="cpu"), engine()
    for _ in range(3):
        nudge(policy)
        ticket = publish_weights(policy.weights(), tmp_path, bucket_bytes=10_000)
    nudge(policy)                                                # the folder's versions stay good
    assert [p.name for p in versions(tmp_path)] == ["version-000000002", "version-000000003"]
    again = pickle.loads(pickle.dumps(published_weights(tmp_path)))
    assert again.version == ticket.version == 3 and again.checksums == late.load(again).checksums
    assert torch.allclose(again.score(torch.tensor(again.probe[:9])), ticket.score(torch.tensor(again.probe))[:8])


def test_a_run_that_begins_anew_is_what_late_ones_read(tmp_path):
    "Also in the folder of a run that had come further."
    first, second = Policy(model(), device="cpu"), Policy(model(seed=1), device="cpu")
    for _ in range(3):
        nudge(first)
        publish_weights(first.weights(), tmp_path, keep=9)
    nudge(second)
    nudge(second)
    publish_weights(second.weights(), tmp_path, keep=9)
    assert [p.name[-1] for p in versions(tmp_path)] == ["1", "2"]
    assert published_weights(tmp_path).version == 2
    assert published_weights(tmp_path).checksums == engine().load(second.weights()).checksums


def test_readers_see_complete_versions_only(tmp_path):
    "A writer that is killed leaves nothing that a reader would take."
    code = ("import os, sys, torch\nfrom rlblocks.engines.weights import InProcess, Ticket\n"
            "from rlblocks.engines.weight_folder import publish_weights\n"
            "def dies(n):\n    yield dict(a=torch.zeros(9)); os.kill(os.getpid(), 9)\n"
            "publish_weights(Ticket(5, InProcess(lambda: 5, dies)), sys.argv[1])")
    policy = Policy(model(), device="cpu")
    publish_weights(policy.weights(), tmp_path)
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=300,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert run.returncode == -9 and published_weights(tmp_path).version == 0 and len(versions(tmp_path)) == 1
    assert len(os.listdir(tmp_path)) == 2
    ticket = policy.weights()
    nudge(policy)
    with pytest.raises(RuntimeError, match="weights of version 0, the policy is at 1"):
        publish_weights(ticket, tmp_path)
    assert [p.name for p in versions(tmp_path)] == os.listdir(tmp_path)     # what the killed one left is gone
    with pytest.raises(ValueError, match="has changes alone"):
        policy.weights(since=0)
        publish_weights(policy.weights(since=1), tmp_path)


REPLACES = """
import os, sys, torch
from rlblocks.engines import weight_folder
from rlblocks.engines.weights import InProcess, Ticket
replace, calls = os.replace, []
def at_second(*paths):
    calls.append(paths)
    if len(calls) == 2 and sys.argv[2] == "killed": os.kill(os.getpid(), 9)
    if len(calls) == 2: raise OSError("no room")
    return replace(*paths)
os.replace = at_second
way = InProcess(lambda: 5, lambda n: iter([dict(a=torch.ones(9))]))
weight_folder.publish_weights(Ticket(5, way), sys.argv[1])
"""


@pytest.mark.parametrize("what, code", [("killed", -9), ("fails", 1)])
def test_a_version_that_is_published_again_is_never_missing(tmp_path, what, code):
    "Also where the writer goes between the two renames; the next one that publishes it clears up."
    def publish(x): publish_weights(Ticket(5, InProcess(lambda: 5, lambda n: iter([dict(a=x)]))), tmp_path)
    def found(): return next(published_weights(tmp_path).buckets(1 << 20))["a"].tolist()
    publish(torch.zeros(9))
    run = subprocess.run([sys.executable, "-c", REPLACES, str(tmp_path), what], capture_output=True, timeout=300,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert run.returncode == code and found() == [0.]*9 and len(versions(tmp_path)) == 1
    publish(torch.full((9,), 2.))
    assert found() == [2.]*9 and [p.name for p in tmp_path.glob("version-*")] == ["version-000000005"]
