"Rows that are sampled while the trainer trains: whose weights drew each token, what is late, and what is lost."
import os
import signal
import time

import pytest
import torch
from conftest import vllm_python
from rlblocks import Batch, Flight, Policy, Rollout, later
from rlblocks.engines.phases import Recorder, now
from rlblocks.samplers.sampler import vllm
from test_samplers import sharp
from test_vllm import engine, moved
from tiny import prompts


LONG = dict(max_position_embeddings=8192)      # room for a row that never ends


def by_hf(net, **how): return Rollout(net, device="cpu", **dict(max_tokens=12, stop=[]) | how)


def by_vllm(net, **how):
    spec = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python())
    return Rollout(net, engine=spec, **dict(max_tokens=12, stop=[]) | how)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def make(request):
    if request.param == "vllm" and vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    return by_hf if request.param == "hf" else by_vllm


@pytest.fixture(scope="module")
def started(make):
    "An engine takes as long to start as all else here: one for the tests that leave it as it was."
    made = make(sharp(**LONG))
    yield made
    made.close()


@pytest.fixture
def shared(started):
    "The same, with the first weights."
    started.load(Policy(sharp(**LONG), device="cpu").weights())
    return started


def test_later_starts_a_bound_method_and_its_rows_are_those_of_generate(shared):
    r = shared
    ask = dict(group_size=4, seed=(0, 1))
    call, other = later(r.generate, prompts(), **ask), later(r.generate, prompts(), group_size=2, seed=7)
    assert r.sampler.elsewhere == bool(r.shared.under_way), "an engine elsewhere samples on, another has sampled"
    between = r.generate(prompts(), temperature=0.)
    rows, want = call.result(), r.generate(prompts(), **ask)
    assert rows.tokens.equal(want.tokens) and rows.rollout_logprobs.allclose(want.rollout_logprobs, atol=1e-5)
    assert rows.policy_version.shape == rows.tokens.shape and want.policy_version.shape == (len(want),)
    assert not rows.policy_version.any() and call.result() is rows
    assert other.result().tokens.equal(r.generate(prompts(), group_size=2, seed=7).tokens)
    assert between.tokens.equal(r.generate(prompts(), temperature=0.).tokens) and not r.shared.under_way


def test_each_token_is_of_the_weights_that_drew_it(shared):
    "In vLLM, with rows under way while weights change: keys and values computed anew, and kept."
    if not shared.sampler.elsewhere: pytest.skip("this engine finishes what it has begun")
    net = sharp(**LONG)
    old, new, r = Policy(net, device="cpu"), Policy(net, device="cpu", lr=1e-2), shared
    new._run.model.version = 1
    moved(new)
    far = lambda policy, rows, at: float((policy.logprobs(rows) - rows.rollout_logprobs)[at].abs().max())
    for keep in (False, True):
        r.load(old.weights())
        call = later(r.generate, prompts(), group_size=4, seed=3, max_tokens=400)
        while r.sampler.under_way and not under_way(r): time.sleep(.05)
        r.load(new.weights(), keep=keep)
        after, rows = r.generate(prompts(), group_size=2, max_tokens=20), call.result()
        v = rows.policy_version
        before, behind = rows.mask & (v == 0), rows.mask & (v == 1)
        assert before.any() and behind.any() and (before | behind).equal(rows.mask) and not v[~rows.mask].any()
        assert (v*rows.mask).diff(dim=1)[rows.mask[:, 1:]].ge(0).all()
        assert far(old, rows, before) < 1e-4 and far(new, rows, before) > .1
        assert (far(new, rows, behind) < 1e-4) != keep and far(old, rows, behind) > .1
        assert after.policy_version.tolist() == [1]*len(after) and far(new, after, after.mask) < 1e-4


def under_way(r, tokens=30):
    "Whether it has probably drawn so many tokens of each row: a sample as long has ended beside them."
    r.generate(prompts(), max_tokens=tokens)
    return True


class Losing:
    "A real engine that loses the requests with one prompt: the fault that the law speaks of."
    def __init__(self, sampler, prompt): self.sampler, self.prompt = sampler, prompt
    def __getattr__(self, name): return getattr(self.sampler, name)

    def submit(self, requests):
        self.sampler.submit([r for r in requests if r.ids.tolist() != self.prompt])


def many(n):
    "Prompts of two tokens, no two alike."
    tokens = torch.stack([torch.arange(n) // 29 + 3, torch.arange(n) % 29 + 3], 1)
    return Batch(tokens=tokens, lengths=torch.full((n,), 2), group=torch.arange(n) + 1000)


def test_one_that_never_ends_and_one_that_is_lost_hold_up_nobody(shared, monkeypatch):
    "LAWS 23, in vLLM: by the deadline 510 of 512 have come, and the two that have not are named."
    if not shared.sampler.elsewhere: pytest.skip("this engine finishes what it has begun")
    n, endless, lost, r = 512, 7, 20, shared
    prompts = many(n)
    monkeypatch.setattr(r.shared, "sampler", Losing(r.sampler, prompts.tokens[lost].tolist()))
    flight = Flight(r)
    flight.ask(prompts[[i for i in range(n) if i != endless]], seed=0, max_tokens=8)
    flight.ask(prompts[[endless]], max_tokens=8000)
    rows = flight.collect(n - 2, seconds=600.)          # long before that, on a machine that has other work too
    assert len(rows) == n - 2 and not flight.late(600.)
    assert flight.collect(1, seconds=.5) == [] and flight.late(.5) == [1000 + lost, 1000 + endless]
    assert sorted(int(b.group[0]) for b in rows) == [1000 + i for i in range(n) if i not in (endless, lost)]
    stopped = flight.abort(flight.late(.5))
    assert [int(p.group[0]) for p in stopped] == [1000 + lost, 1000 + endless] and not r.shared.under_way
    assert not r.sampler.sampler.under_way, "their places are free"
    began = time.monotonic()
    r.generate(prompts[21:85], max_tokens=8)
    with pytest.raises(TimeoutError, match="1 of 64 samples had not ended .* sample 0 of prompt 20"):
        r.generate(prompts[:64], max_tokens=8, timeout=2 + 10*(time.monotonic() - began))


def test_hf_names_what_is_lost_too():
    prompts, r = many(16), by_hf(sharp(), max_rows=4)
    r.shared.sampler = Losing(r.sampler, prompts.tokens[3].tolist())
    flight = Flight(r)
    flight.ask(prompts, group_size=2)
    assert len(flight.collect(15)) == 15 and flight.collect(1, seconds=.1) == [] and flight.late(0) == [1003]
    with pytest.raises(TimeoutError, match="2 of 2 samples had not ended .* sample 0 of prompt 0"):
        r.generate(prompts[[3]], group_size=2, timeout=1.)


def test_what_is_stopped_goes_on_under_the_next_weights(shared):
    "Partial rollouts: pieces of two versions, each token within 1e-4 of its own policy."
    net = sharp(**LONG)
    old, new, r = Policy(net, device="cpu"), Policy(net, device="cpu", lr=1e-2), shared
    new._run.model.version = 1
    moved(new)
    flight = Flight(r)
    flight.ask(prompts(), group_size=2, seed=0, max_tokens=300)
    if r.sampler.elsewhere: r.generate(prompts(), max_tokens=30)
    flight.renew()
    assert not r.shared.under_way and len(flight) == len(prompts())
    r.load(new.weights())
    b = Batch.cat(flight.collect(len(prompts())))
    v, at = b.policy_version, b.mask
    assert b.mask.sum(1).tolist() == [300]*len(b) and set(b.finish_reason) == {"max_tokens"}
    assert r.sampler.elsewhere == bool((at & (v == 0)).any()) and (at & (v == 1)).any()
    for policy, k in ((old, 0), (new, 1)):
        gap = (policy.logprobs(b) - b.rollout_logprobs)[at & (v == k)].abs()
        assert not len(gap) or gap.max() < 1e-4


def test_a_sleeping_engine_refuses_and_so_does_one_with_rows_under_way(shared):
    r = shared
    flight = Flight(r)
    flight.ask(prompts())
    with pytest.raises(RuntimeError, match="sleep: rows of 3 prompts are under way"): r.sleep()
    flight.collect(3)
    r.sleep()
    for ask in (flight.ask, r.generate, lambda p: later(r.generate, p)):
        with pytest.raises(RuntimeError, match="the engine is asleep"): ask(prompts())
    r.wake()
    flight.ask(prompts())
    assert len(flight.collect(3)) == 3


def test_rows_that_nobody_can_ask_for_are_ended(shared):
    r = shared
    later(r.generate, prompts(), group_size=2)              # and nobody has its answer
    r.sleep()
    r.wake()
    rows = r.generate(prompts(), group_size=2, seed=0).tokens
    call, flight = later(r.generate, prompts(), group_size=2, seed=0), Flight(r)
    flight.ask(prompts(), group_size=2, seed=0)
    r.abort()
    assert not r.shared.under_way and not getattr(r.sampler, "asked", ())
    if r.sampler.elsewhere:
        with pytest.raises(RuntimeError, match=r"are lost: rollout.abort\(\) has ended them"): call.result()
    with pytest.raises(RuntimeError, match=r"are lost: rollout.abort\(\) has ended them"): flight.collect(3)
    assert Batch.cat(flight.collect(3)).tokens.equal(rows)


def test_what_is_no_rollout_cannot_fly():
    "Over a pool's handle: tests/test_ray.py, and under torchrun tests/test_spmd.py."
    with pytest.raises(TypeError, match="a Rollout is wanted, as pool.place"): Flight(sharp())


def test_an_engine_that_is_gone_is_heard_of_by_all_who_wait_and_no_prompt_is_lost():
    if vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    net = sharp()
    policy, r = Policy(net, device="cpu"), by_vllm(net, max_tokens=100)
    flight = Flight(r)
    os.kill(engine(r.sampler), signal.SIGSTOP)      # or the rows could be whole before it is killed
    flight.ask(prompts(), group_size=2, seed=0)
    call = later(r.generate, prompts(), group_size=2, seed=0)
    os.kill(engine(r.sampler), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="is gone"): flight.collect(3)
    with pytest.raises(RuntimeError, match="rows that were under way are lost: .*is gone"): call.result()
    with pytest.raises(RuntimeError, match="rows that were under way are lost"): call.result()
    r.load(policy.weights())
    flight.renew()
    rows = Batch.cat(flight.collect(3))
    assert rows.tokens.equal(r.generate(prompts(), group_size=2, seed=0).tokens)
    later(r.generate, prompts())
    os.kill(engine(r.sampler), signal.SIGKILL)
    r.sampler.child.process.wait()
    with pytest.raises(RuntimeError, match="is gone"): r.close()
    r.close()


def test_what_has_ended_unread_is_not_drawn_again():
    "Samples that end while the trainer trains lie in the mail when they are stopped: whole, with their own reason."
    if vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    r = by_vllm(sharp(max_position_embeddings=1 << 15))
    flight = Flight(r)
    flight.ask(prompts(), group_size=2, seed=0, max_tokens=5)
    flight.ask(many(1), max_tokens=32000)     # still under way however late this process gets its turn
    child = r.sampler.child
    while not [x for x in child.mail if x[0] == "done"]: child.ask("cached")     # what else comes is kept, and not read
    said = r.sampler.abort(list(r.shared.under_way))
    assert {len(c.tokens) for c in said if c.reason == "length"} == {5} and not r.sampler.under_way
    assert not [x for x in child.mail if x[0] != "idle"]
    assert said[-1].reason == "abort"
    r.close()


def test_after_an_error_nothing_is_left_in_the_engine_and_a_flight_asks_again():
    "LAWS 23. What failed is not decoded before the next rows, with other weights; no prompt is lost."
    r, policy = by_hf(sharp(), max_rows=2), Policy(sharp(), device="cpu")
    flight = Flight(r)
    flight.ask(prompts(), group_size=2, seed=0)
    with torch.no_grad(): next(r.module.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError): r.generate(many(9))
    assert not r.sampler.queue and not r.shared.under_way
    with pytest.raises(RuntimeError, match="rows that were under way are lost"): flight.collect(3)
    r.load(policy.weights())
    assert Batch.cat(flight.collect(3)).tokens.equal(r.generate(prompts(), group_size=2, seed=0).tokens)


def test_an_engine_beside_says_when_it_had_nothing_to_do(shared):
    "Its slice of a timeline ends when it has ended, not when the loop has read what came."
    if not shared.sampler.elsewhere: pytest.skip("this engine samples while it is asked")
    flight = Flight(shared)
    with Recorder() as heard:
        flight.ask(prompts(), seed=0, max_tokens=8)
        child = shared.sampler.child
        while not [x for x in child.mail if x[0] == "idle"]: child.ask("cached")    # what comes is kept, and not read
        came = now()
        assert len(flight.collect(9)) == len(prompts())
    spans = {s.lane: s for s in heard.taken() if s.name in ("engine", "Flight.collect")}
    engine, waited = spans["engine"], spans["MainThread"]
    assert engine.phase == "sample" and waited.phase == "wait" and waited.start >= came > engine.end > engine.start
    assert waited.sampled == 8*len(prompts()), "with what was drawn meanwhile"
