"Rows that are sampled while the trainer trains: whose weights drew each token, what is late, and what is lost."
import time

import pytest
from conftest import vllm_python
from rlblocks import Policy, Rollout, later
from rlblocks.rollout.samplers import vllm
from test_samplers import sharp
from test_vllm import moved
from tiny import prompts


def by_hf(net, **how): return Rollout(net, device="cpu", **dict(max_tokens=12, stop=[]) | how)


def by_vllm(net, **how):
    spec = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python())
    return Rollout(net, engine=spec, **dict(max_tokens=12, stop=[]) | how)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def make(request):
    if request.param == "vllm" and vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    return by_hf if request.param == "hf" else by_vllm


def test_later_starts_a_bound_method_and_its_rows_are_those_of_generate(make):
    net = sharp()
    r = make(net)
    ask = dict(group_size=4, seed=(0, 1))
    call, other = later(r.generate, prompts(), **ask), later(r.generate, prompts(), group_size=2, seed=7)
    assert r.sampler.elsewhere == bool(r.lines.of), "an engine elsewhere samples on, another has sampled"
    between = r.generate(prompts(), temperature=0.)
    rows, want = call.result(), r.generate(prompts(), **ask)
    assert rows.tokens.equal(want.tokens) and rows.rollout_logprobs.allclose(want.rollout_logprobs, atol=1e-5)
    assert rows.policy_version.shape == rows.tokens.shape and want.policy_version.shape == (len(want),)
    assert not rows.policy_version.any() and call.result() is rows
    assert other.result().tokens.equal(r.generate(prompts(), group_size=2, seed=7).tokens)
    assert between.tokens.equal(r.generate(prompts(), temperature=0.).tokens) and not r.lines.of
    r.close()


def test_each_token_is_of_the_weights_that_drew_it():
    "In vLLM, with rows under way while weights change: keys and values computed anew, and kept."
    if vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    net = sharp(max_position_embeddings=512)
    old, new, r = Policy(net, device="cpu"), Policy(net, device="cpu", lr=1e-2), by_vllm(net, max_tokens=400)
    new._run.model.version = 1
    moved(new)
    far = lambda policy, rows, at: float((policy.logprobs(rows) - rows.rollout_logprobs)[at].abs().max())
    for keep in (False, True):
        r.load(old.weights())
        call = later(r.generate, prompts(), group_size=4, seed=3)
        while r.sampler.asked and not under_way(r): time.sleep(.05)
        r.load(new.weights(), keep=keep)
        after, rows = r.generate(prompts(), group_size=2, max_tokens=20), call.result()
        v = rows.policy_version
        before, behind = rows.mask & (v == 0), rows.mask & (v == 1)
        assert before.any() and behind.any() and (before | behind).equal(rows.mask) and not v[~rows.mask].any()
        assert (v*rows.mask).diff(dim=1)[rows.mask[:, 1:]].ge(0).all()
        assert far(old, rows, before) < 1e-4 and far(new, rows, before) > .1
        assert (far(new, rows, behind) < 1e-4) != keep and far(old, rows, behind) > .1
        assert after.policy_version.tolist() == [1]*len(after) and far(new, after, after.mask) < 1e-4
    r.close()


def under_way(r, tokens=30):
    "Whether it has probably drawn so many tokens of each row: a sample as long has ended beside them."
    r.generate(prompts(), max_tokens=tokens)
    return True
