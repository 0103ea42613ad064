"Tickets are data: what they say, what they refuse, and that they never take a model along."
import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from rlblocks import Policy, Rollout
from rlblocks.engines.deltas import delta_apply, delta_encode
from rlblocks.engines.weights import InProcess, Ticket, Transport, buckets, checksum, copy_weights, named_weights
from tiny import model


def engine(**how): return Rollout(model(), max_tokens=4, stop=[], device="cpu", **how)


# -- a ticket is data

@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
def test_a_pickled_ticket_takes_no_model_along(module):
    "cloudpickle would take closures, and with them the weights, without a word."
    dumps = pytest.importorskip(module).dumps
    policy = Policy(model(vocab_size=2048), device="cpu")
    ticket = policy.weights()
    data = dumps(ticket)
    assert len(data) < 8000 < sum(x.nbytes for x in policy._run.module.trunk.parameters())/10
    again = pickle.loads(data)
    assert (again.version, again.shapes, again.probe) == (0, ticket.shapes, ticket.probe) and len(ticket.probe) == 32
    assert set(again.shapes) == set(named_weights(policy._run.module.trunk))
    for use in (lambda: list(again.buckets(1 << 20)), lambda: again.score(torch.tensor([1, 2]))):
        with pytest.raises(RuntimeError, match=f"its weights are in process {os.getpid()} of .*; load it there"): use()


def test_another_process_reads_the_ticket_and_is_refused_by_name():
    code = ("import pickle, sys; t = pickle.load(sys.stdin.buffer); print(t.version, len(t.shapes))\n"
            "try: next(t.buckets(1))\nexcept RuntimeError as e: print(e)")
    ticket = Policy(model(), device="cpu").weights()
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(ticket), capture_output=True,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)), timeout=120)
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
