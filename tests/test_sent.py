"Weights from process to process and from network to network: complete, or an error that names who is gone, in time."
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from clock import Clock
from forked import context, on_ranks
from tiny import model

from rlblocks import Policy, Rollout, send_weights
from rlblocks.engines.sent import flattened, restored
from rlblocks.engines.weights import InProcess, Ticket, buckets, checksum, named_weights

NEWNET = 0x40000000


def read(ticket, queue, network=None):
    "A process: takes a ticket's weights, perhaps in a network of its own, and says what it has."
    torch.set_num_threads(1)
    try:
        if network: separate(queue, network)
        queue.put(Rollout(model(seed=1), device="cpu").load(pickle.loads(ticket)))
    except Exception as e: queue.put(e)


def separate(queue, network):
    "Leave the machine's network, and wait until a wire leads into the new one."
    if ctypes.CDLL(None, use_errno=True).unshare(NEWNET): raise OSError(ctypes.get_errno(), "unshare")
    queue.put(os.getpid())
    while subprocess.run(["ip", "link", "show", network["there"]], capture_output=True).returncode: time.sleep(.05)
    for words in (["addr", "add", f"{network['reader']}/30", "dev", network["there"]],
                  ["link", "set", network["there"], "up"]): subprocess.run(["ip", *words], check=True)


def start(work, *args):
    queue = context().Queue()
    process = context().Process(target=work, args=(*args[:1], queue, *args[1:]), daemon=True)
    process.start()
    return process, queue


def answer(queue, seconds=300):
    found = queue.get(timeout=seconds)
    if isinstance(found, Exception): raise found
    return found


def policy_of(net=None): return Policy(net or model(), device="cpu")


def test_two_processes_take_what_is_sent_once():
    policy = policy_of()
    sending = send_weights(policy.weights(), readers=2, bucket_bytes=10_000, timeout=300.)
    both = [start(read, pickle.dumps(sending.ticket)) for _ in range(2)]
    manifests = [answer(queue) for _, queue in both]
    own = named_weights(policy._run.module.trunk)
    assert sending.result() == sum(x.nbytes for x in own.values()) == manifests[0].n_bytes
    here = Rollout(model(), device="cpu").load(policy.weights())
    assert manifests[0].checksums == manifests[1].checksums == here.checksums
    assert manifests[0].n_messages > 3 and len(pickle.dumps(sending.ticket)) < 8000


def test_from_one_network_to_another():
    "The reader has left this machine's network; a wire leads to it, as to another machine."
    number = os.getpid() % 250
    network = dict(here=f"rlb{number}a", there=f"rlb{number}b", sender=f"10.91.{number}.1", reader=f"10.91.{number}.2")
    try:
        words = ["ip", "link", "add", network["here"], "type", "veth", "peer", "name", network["there"]]
        if subprocess.run(words, capture_output=True).returncode: pytest.skip("no rights to make a network")
    except FileNotFoundError: pytest.skip("there is no ip")
    try:
        subprocess.run(["ip", "addr", "add", f"{network['sender']}/30", "dev", network["here"]], check=True)
        subprocess.run(["ip", "link", "set", network["here"], "up"], check=True)
        policy = policy_of()
        sending = send_weights(policy.weights(), host=network["sender"], bucket_bytes=20_000, timeout=300.)
        _, queue = start(read, pickle.dumps(sending.ticket), network)
        pid = answer(queue)
        subprocess.run(["ip", "link", "set", network["there"], "netns", str(pid)], check=True)
        assert answer(queue).n_bytes == sending.result()
    finally: subprocess.run(["ip", "link", "del", network["here"]], capture_output=True)


def send_and(what, queue):
    "A process: sends one bucket and then stops or ends."
    torch.set_num_threads(1)
    net = model()
    def breaks(n):
        yield from list(buckets(named_weights(net).items(), n))[:2]
        time.sleep(.5)           # the second is on its way
        os.kill(os.getpid(), what)
        time.sleep(60)           # another thread may be the one that takes the signal
    ticket = Ticket(4, InProcess(lambda: 4, breaks), {n: tuple(x.shape) for n, x in named_weights(net).items()})
    sending = send_weights(ticket, bucket_bytes=10_000)
    queue.put(pickle.dumps(sending.ticket))
    try: sending.result()
    finally: time.sleep(60)


@pytest.mark.parametrize("what,deadline", [(signal.SIGKILL, 0), (signal.SIGSTOP, 3)], ids=["killed", "silent"])
def test_a_sender_that_goes_in_mid_transfer_is_named_in_time(what, deadline):
    "Within 2 s of the deadline, which is at once where its connection ends; and half-loaded weights are no version."
    rollout = Rollout(model(seed=1), device="cpu")
    process, queue = start(send_and, what)
    ticket = pickle.loads(answer(queue))
    ticket = replace(ticket, transport=replace(ticket.transport, timeout=3.))
    named = f"its sender, process {process.pid} of .* is gone, or did not"
    with Clock() as clock, pytest.raises(RuntimeError, match=named): rollout.load(ticket)
    assert clock.seconds < .5 + deadline + 2
    with pytest.raises(RuntimeError, match="of no known version"): rollout.sampler.submit([])
    process.kill()
    process.join()
    with Clock() as clock, pytest.raises(RuntimeError, match=named): rollout.load(ticket)
    assert clock.seconds < 2
    assert rollout.load(policy_of().weights()).version == 0


def leave(ticket, queue):
    "A process: takes one bucket and ends."
    torch.set_num_threads(1)
    next(pickle.loads(ticket).buckets(1))
    os._exit(1)


def test_a_reader_that_goes_is_an_error_of_the_sender_and_of_the_other_reader():
    sending = send_weights(policy_of().weights(), readers=2, bucket_bytes=10_000)
    process, queue = start(leave, pickle.dumps(sending.ticket))         # a queue that nobody holds is gone
    other = Rollout(model(), device="cpu")
    with pytest.raises(RuntimeError, match="or another reader has left|could not send version 0"):
        other.load(sending.ticket)
    process.join()
    assert process.exitcode == 1 and queue.empty()
    with pytest.raises(RuntimeError, match="2 of 2 readers have come, and not all have everything"): sending.result()


def test_a_reader_too_many_and_a_reader_of_another_model_are_refused_before_the_first_byte():
    policy = policy_of()
    sending = send_weights(policy.weights(), readers=1, timeout=2.)
    for other, says in ((model(num_hidden_layers=1), "the receiver has no"), (model(vocab_size=64), r"is \[64")):
        with pytest.raises(ValueError, match=says): Rollout(other, device="cpu").load(sending.ticket)
    with pytest.raises(RuntimeError, match="0 of 1 readers have come"): sending.result()
    sending = send_weights(policy.weights(), readers=1, bucket_bytes=10_000, timeout=20.)
    first, second = sending.ticket.buckets(1), sending.ticket.buckets(1)
    next(first)
    with pytest.raises(RuntimeError, match=r"is for 1 readers, .*; send_weights\(…, readers=2\)"): next(second)
    assert len(list(first)) > 2 and sending.result() > 0


def test_a_trainer_that_steps_meanwhile_is_found_out_on_both_sides():
    policy = policy_of()
    ticket = policy.weights()
    policy._run.model.version += 1
    sending = send_weights(ticket, timeout=20.)
    with pytest.raises(RuntimeError, match="could not send version 0: RuntimeError: .*the policy is at 1 by now"):
        Rollout(model(), device="cpu").load(sending.ticket)
    with pytest.raises(RuntimeError, match="the policy is at 1 by now"): sending.result()


def test_changes_are_data_and_are_not_sent():
    policy = policy_of()
    Rollout(model(), device="cpu").load(policy.weights(since=0))
    policy._run.model.version += 1
    with pytest.raises(ValueError, match="pickle it as it is"): send_weights(policy.weights(since=0))


def sharded(rank, ranks):
    "All ranks gather what they hold, and the first one sends."
    policy = Policy(model(), device="cpu", engine="fsdp2")
    sending = send_weights(policy.weights(), bucket_bytes=10_000, write=rank == 0)
    if rank == 0:
        manifest = Rollout(model(seed=1), device="cpu").load(sending.ticket)
        assert manifest.checksums == {n: checksum(x) for n, x in named_weights(model()).items()}
    else: assert sending.ticket is None
    assert sending.result() == sum(x.nbytes for x in named_weights(model()).values())


@pytest.mark.ranks
def test_sharded_weights_are_gathered_by_all_and_sent_by_one(): on_ranks(sharded, (), 2, limit=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_bucket_is_the_same_after_its_way(dtype):
    g = torch.Generator().manual_seed(0)
    shapes = (), (3,), (5, 7), (0, 2), (64,)
    bucket = {str(k): torch.randn(shape, generator=g).to(dtype) for k, shape in enumerate(shapes)}
    bucket["t"] = torch.randn(6, 5, generator=g).to(dtype).T
    again = restored(*flattened(bucket))
    assert list(again) == list(bucket) and all(again[n].equal(x) and again[n].dtype == dtype for n, x in bucket.items())


def test_nobody_reaches_the_sender_by_another_address():
    sending = send_weights(Policy(model(), device="cpu").weights(), timeout=2.)
    port = sending.ticket.transport.port
    socket.create_connection(("127.0.0.1", port), 2.).close()
    with pytest.raises(OSError): socket.create_connection(("127.0.0.2", port), 2.)
    with pytest.raises(RuntimeError, match="0 of 1 readers have come"): sending.result()


ENDS = """
import sys, time, torch
from torch import nn
from rlblocks import send_weights
from rlblocks.engines.weights import InProcess, Ticket, buckets, named_weights
class Slow:
    def __del__(self): time.sleep(2.5)     # while the interpreter ends, other threads go on
sys.slow, net = Slow(), nn.Linear(50, 20)
sending = send_weights(Ticket(0, InProcess(lambda: 0, lambda n: buckets(named_weights(net).items(), n))),
                       bucket_bytes=1000, timeout=1.)
if sys.argv[1] == "silent": first = next(reading := sending.ticket.buckets(0))
"""


@pytest.mark.parametrize("reader", ["absent", "silent"])
def test_a_program_ends_with_success_while_its_weights_wait_for(reader, root):
    run = subprocess.run([sys.executable, "-c", ENDS, reader], capture_output=True, text=True, timeout=300,
                         env=os.environ | dict(PYTHONPATH=str(root)))
    assert run.returncode == 0, run.stderr[-2000:]
