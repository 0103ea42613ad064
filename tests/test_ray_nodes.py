"""RayPool over two nodes: where ranks and their devices are, and what has to stay on one node (LAWS 38)."""
import os
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import spmd_loops
import torch
from conftest import RAY_TOKEN, ROOT, rarely, ray_python
from rlblocks import (
    Batch, Cluster, Critic, Policy, Pools, Prompts, RayPool, Scorer, here, later, loop_from, plain
)
from rlblocks.engines.process_group import RankLost
from spmd_loops import net
from test_ray import Large, Reads
from test_spmd import same
from tiny import prompts

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")]
ENV = RAY_TOKEN | dict(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1",
                      PYTHONPATH=f"{ROOT/'tests'}{os.pathsep}{ROOT}")


@pytest.fixture(scope="module")
def nodes():
    "Two nodes on this machine, each a raylet with a store. Their GPUs are numbers: Ray hands them out all the same."
    import ray
    from ray.cluster_utils import Cluster as Nodes
    folder = tempfile.mkdtemp(prefix="ray")
    size = dict(num_cpus=4, num_gpus=4, object_store_memory=100_000_000)
    with pytest.MonkeyPatch.context() as patch:
        for k, x in ENV.items(): patch.setenv(k, x)
        nodes = Nodes(initialize_head=True, head_node_args=size | dict(temp_dir=folder, include_dashboard=False))
        nodes.add_node(**size)
        nodes.wait_for_nodes()
        yield nodes
        ray.shutdown()
        nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(nodes):
    return Cluster(address=nodes.address, ready=60., runtime_env=dict(py_executable=ray_python()),
                   options=dict(logging_level="ERROR", log_to_driver=False))


class Sees:
    "Says which devices its process may use."
    def devices(self, b): return [os.environ.get("CUDA_VISIBLE_DEVICES")]*len(b)


def devices_of(pool):
    "What each rank may use."
    return pool.place(Sees).devices(prompts([5]*pool.ranks))


@pytest.fixture(scope="module")
def apart(cluster):
    "A rank on each node."
    with RayPool(2, nodes=2, gpus=2, cluster=cluster, timeout=300., name="apart") as pool: yield pool


@pytest.mark.parametrize("engine", [plain(tensor_parallel=2), *rarely(plain(sequence_parallel=2))])
def test_a_replica_over_two_nodes_is_refused(apart, engine):
    "What its ranks exchange at every layer would travel between hosts."
    assert len({rank.node for rank in apart.processes.ranks}) == 2
    with pytest.raises(RuntimeError, match=r"a replica of Policy is spread over nodes: rank 0 .*rank 1 .*nodes=…"):
        apart.place(Policy, net, engine=engine)
    assert apart.place(Policy, net, engine=plain()).version == 0, "one on each node"


def test_ranks_have_devices_of_their_own(apart):
    "Of every node the first two for two ranks of two. The GPUs are numbers here: on CUDA it is untried."
    assert devices_of(apart) == ["0,1", "0,1"]


@pytest.mark.long
def test_pools_beside_share_devices(apart, cluster):
    "A pool of one each, and one beside it that sees the same. (`make test` has such pools in tests/test_ray.py.)"
    with RayPool(2, gpus=1, cluster=cluster, world=False, name="ones") as ones:
        mine = devices_of(ones)
        assert len(set(mine)) == 2 and not {"0", "1"} & set(mine), "on one node, which has two left"
        with RayPool(2, gpus=1, cluster=cluster, world=False, beside=ones, name="twin") as twin:
            assert devices_of(twin) == mine
            assert [rank.node for rank in twin.processes.ranks] == [rank.node for rank in ones.processes.ranks]
        with pytest.raises(ValueError, match="as many ranks .* as there are, 2, no nodes=, and at most one GPU"):
            RayPool(2, gpus=2, nodes=2, cluster=cluster, beside=apart)


def test_what_fits_on_no_node_is_refused_with_what_each_has(cluster, apart):
    "LAWS 38: there are enough processors in the cluster, and not on one node."
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"2 × \(3 CPU\) \(STRICT_PACK\) could not be had within 2 s; free are "
                       r"\S+: 3 CPU, 2 GPU; \S+: 3 CPU, 2 GPU"):
        RayPool(2, cpus=3, strategy="STRICT_PACK", cluster=replace(cluster, ready=2.))
    assert time.monotonic() - start < 30


class Mixed:
    """A model of words and images: of a row that has images it reads them, and ranks meet where they do so, as under
    FSDP. A rank whose rows have none has to come, too."""
    def __init__(self):
        torch.manual_seed(0)
        self.words, self.eye = torch.nn.Embedding(32, 16), torch.nn.Linear(64, 16)

    def logprobs(self, b):
        seen = [sum((self.eye(x.flatten()) for x in images), torch.zeros(16)) for images in b.images]
        torch.distributed.all_reduce(torch.ones(1))
        hidden = [self.words(row[:n]) + image for row, n, image in zip(b.tokens, b.lengths, seen, strict=True)]
        out = torch.zeros(b.tokens.shape)
        for i, (h, n) in enumerate(zip(hidden, b.lengths, strict=True)):
            said = (h[:-1] @ self.words.weight.T).log_softmax(-1)
            out[i, 1:n] = said.gather(-1, b.tokens[i, 1:n, None])[:, 0]
        return out.detach()


def test_text_and_images_in_one_batch(apart):
    """LAWS 11: rows of text, of one image and of three, over two ranks. The call ends, images stay with their rows, and
    text does not change by its neighbours. There is no model of images in this version: this one is a user's."""
    mixed, b, image = apart.place(Mixed), prompts((5, 2, 7, 3, 4)), torch.rand(8, 8)
    b["images"] = [[], [image], [image, 2*image, 3*image], [], [4*image]]
    got = mixed.logprobs(b)
    assert len({tuple(x.flatten().tolist()) for x in got}) == 5
    def alone(rows, images): return mixed.logprobs(Batch(**b[rows].columns | dict(images=images)))
    text, blind = alone([0, 3], [[], []]), alone([1, 2, 4], [[], [], []])
    assert torch.equal(text, got[[0, 3], :text.shape[1]]), "to the bit"
    assert all((x[1:n] != y[1:n]).any() for x, y, n in zip(blind, got[[1, 2, 4]], b.lengths[[1, 2, 4]], strict=True))
    swapped = alone([1, 4], [[4*image], [image]])
    assert torch.equal(alone([4, 1], [[4*image], [image]]), got[[4, 1], :swapped.shape[1]])
    assert not torch.equal(swapped, got[[1, 4], :swapped.shape[1]])
    assert torch.equal(mixed.logprobs(b[:1]), got[:1]), "the other rank has no row"


def test_calls_and_ranks_have_names(apart):
    "In the dashboard's lists, in `ray timeline`, in `ps` (tests/test_ray.py) and in the pool's own report."
    import ray
    apart.place(Sees).devices(prompts([5]*2))
    found = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert {f"apart-{apart.processes.id}-{r}" for r in range(2)} <= found
    rows = {(row["call"], row["rank"]): row for row in apart.report()}
    assert rows["Sees.devices", 0].keys() == {"call", "rank", "node", "pid", "calls", "seconds", "longest", "mib"}
    assert rows["Sees.devices", 1]["calls"] >= 1 and rows["place(Sees)", 1]["mib"] > 50
    end = time.monotonic() + 60
    while not (named := [e for e in ray.timeline() if e["cat"] == "task::Sees.devices"]) and time.monotonic() < end:
        time.sleep(.2)                                      # events come to the control store once a second
    assert named


class Dies(Reads):
    "Reads a few buckets, and is killed."
    def load(self, ticket, n):
        for i, _ in enumerate(ticket.buckets(1)):
            if i == n: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_load_whose_reader_dies_is_heard_and_a_new_reader_loads(apart, cluster):
    "LAWS 14: killed in the middle, between two nodes; the trainer's ranks go on and give the same weights again."
    large, want = apart.place(Large, 6, 20), [(f"w{i}", 5_000_000, float(i)) for i in range(6)]
    def reader(): return RayPool(1, cluster=cluster, world=False, grace=2., name="reader")
    start = time.monotonic()
    with reader() as first, pytest.raises(RankLost, match="Dies.load: rank 0 .*died"):
        first.place(Dies).load(large.weights(), 3)
    assert time.monotonic() - start < 60
    with reader() as second: assert second.place(Reads).load(large.weights()) == want
    assert apart.place(Sees).devices(prompts([5]*2)) == ["0,1", "0,1"]


def rlhf(pool):
    "What RLHF shows: five models, of which two score and value."
    loop = loop_from(f"{ROOT}/tutorials/rlhf.ipynb:rlhf")
    def scorer():
        from transformers import LlamaConfig, LlamaForSequenceClassification
        torch.manual_seed(1)
        how = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
        return LlamaForSequenceClassification(LlamaConfig(num_labels=1, pad_token_id=0, **how)).double()
    rows = loop(pool, Prompts(spmd_loops.ASKED, spmd_loops.Digits()), model=net, reward_model=scorer(),
                engine=spmd_loops.steadily, steps=3, prompts=5, minibatches=2, max_tokens=4, micro_tokens=64)
    return [{k: float(v) for k, v in row.items()} for row in rows]


@pytest.mark.long
def test_pairs_of_models_on_pools_of_their_own(apart, cluster):
    "Actor, reference and rollouts on one pool, critic and reward model on another: the numbers of one process."
    want = rlhf(here)
    assert len({row["score"] for row in want}) == 3
    with RayPool(2, nodes=2, cluster=cluster, timeout=300., name="critics") as critics:
        same(rlhf(Pools(lambda make, kw: critics if make in (Critic, Scorer) else apart)), want, "pairs", 1e-10)
        phases = {row["call"] for row in critics.report()}
    assert {"Critic.step", "Scorer.scores"} <= phases and not {x for x in phases if x.startswith("Policy")}


@pytest.mark.long
def test_two_replicas_on_two_nodes_give_the_numbers_of_one_process(cluster):
    "Each of two ranks that hold a layer together; the nodes come in mixed order, and ranks are neighbours."
    with RayPool(4, cpus=.5, strategy="SPREAD", cluster=cluster, timeout=300., name="four") as four:
        nodes = [rank.node for rank in four.processes.ranks]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        same(spmd_loops.engines(four, ["tensor"]), spmd_loops.engines(here, ["tensor"]), "two nodes", 1e-10)


class Answers:
    "With what the store of its node has to keep."
    def large(self): return torch.arange(100_000)
    def small(self): return os.getpid()


@pytest.mark.long
@pytest.mark.parametrize("first", ["small", "large"])
def test_an_answer_that_is_lost_with_its_node_is_given_again(nodes, cluster, first):
    "The rank had answered; nobody had asked for it when the machine was gone."
    import ray
    more = [nodes.add_node(num_cpus=6, object_store_memory=100_000_000) for _ in range(2)]
    nodes.wait_for_nodes()
    with RayPool(1, cluster=cluster, cpus=5, world=False, restarts=2, name="lost") as pool:
        answers = pool.place(Answers)
        large = later(answers.large)
        ray.wait(list(pool.calls.open[-1].refs.values()), fetch_local=False)
        where = next(node for node in more if node.node_id == pool.processes.ranks[0].node)
        more.remove(where)
        nodes.remove_node(where, allow_graceful=False)
        while any(n["Alive"] and n["NodeID"] == where.node_id for n in ray.nodes()): time.sleep(.1)
        with pytest.warns(UserWarning, match="Answers.[a-z]+: rank 0 .*died.*made anew; 1 restarts are left"):
            answers.small() if first == "small" else large.result()
        assert torch.equal(large.result(), torch.arange(100_000))
    nodes.remove_node(more[0])
