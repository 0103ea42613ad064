"""Adapters through a pool of processes: a placed wrapper is a base to stand on, and the numbers are those of one
process; reward moments are the whole batch's."""

import pytest
import torch
from conftest import rarely, skip_without
from forked import on_ranks
from rlblocks import Policy, Scorer, here
from spmd_adapters import on_rank, together
from test_spmd import same
from tiny import model, reach, rows

skip_without("peft")
pytestmark = pytest.mark.ranks
ENGINES = [["fsdp2"], *rarely(["None", "zero2", "zero3"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool")
    model().save_pretrained(path/"base")
    return path


@pytest.fixture(scope="module")
def alone(folder): return together(here, None, folder, folder/"alone")


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def ranks(request, folder):
    "What each of two ranks saw, with an engine after another."
    skip_without("deepspeed")
    on_ranks(on_rank, (folder, request.param), 2, group=False)
    return [torch.load(folder/f"{r}.pt", weights_only=False) for r in range(2)]


def test_views_on_a_placed_base_are_those_of_one_process(alone, ranks, folder):
    "Metrics, outputs, moments, the sampler's weights, folders and a resumed run; on every rank the same."
    for engine in ranks[0]: is_that_of_one_process(alone, ranks, folder, engine)


def is_that_of_one_process(alone, ranks, folder, engine):
    assert torch.equal(alone["first"], alone["ref"]) and (alone["policy"]-alone["ref"]).abs().max() > 1e-3
    assert (alone["values"] != 0).any()
    assert len(alone["shown"]) == 12 and len(alone["resumed"]) == 6
    for rank in ranks:
        got = rank[engine]
        same(got, alone, engine, reach(torch.ones(1)))
        # the reference has not moved
        assert torch.equal(got["first"], got["ref"])
        assert torch.equal(got["again"][0], got["policy"]) and torch.equal(got["again"][1], got["values"])
        assert got["resumed"] == got["shown"][6:]
        assert got["moments"] == ranks[0][engine]["moments"]
    b = rows(B=7, dtype=torch.float32)
    for path in (folder/engine/"merged", folder/"alone"/"merged"):
        assert (Policy(path, frozen=True,
                       device="cpu").logprobs(b)-alone["policy"]).abs().max() < reach(alone["policy"])
    assert (Policy(folder/"base", lora=folder/engine/"adapter", frozen=True,
                   device="cpu").logprobs(b)-alone["policy"]).abs().max() < reach(alone["policy"])
    assert (Scorer(folder/engine/"reward",
                   device="cpu").scores(b)-alone["scores"]).abs().max() < reach(alone["scores"])/alone["moments"][1][0]


def test_moments_are_those_of_the_whole_batch(alone):
    "Mean 0 and standard deviation 1 on the rows they were measured on."
    assert abs(float(alone["scores"].mean())) < 1e-5 and float(alone["scores"].std()) == pytest.approx(1, abs=1e-5)
