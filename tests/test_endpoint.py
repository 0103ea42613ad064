"""Agents as they are, with the clients that they have, become rows: ids as they were sampled, nothing twice, nothing
lost, nobody else let in (LAWS 3, 19, 23, 29). That rows are those of the environment loop, with three chat templates
and with vLLM too, is in tests/test_environments.py."""
import asyncio
import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import skip_without
from lazily import Lazily
from rlblocks import Endpoint, Policy, Response, Rollout, group_advantages
from rlblocks.data.renderers import ChatRenderer, read_response
from rlblocks.graders.http_server import Connections, Served
from test_environments import CHATML, Leaves, Mute, asked, gap, net, spelling
from torch.testing import assert_close

CLIENTS = ("anthropic", "httpx2", "openai")
for name in CLIENTS: skip_without(name)
anthropic, httpx2, openai = map(Lazily, CLIENTS)

USER = [dict(role="user", content="a")]
TOOLS = "{% for t in tools or [] %}<turn>tool {{ t.function.name }}\n{{ t.function.description }}<end>\n{% endfor %}"
ADD = dict(name="add", description="Adds.", parameters=dict(type="object", properties=dict(
    a=dict(type="integer"), b=dict(type="integer")), required=["a", "b"]))


def engine(weights=None, **more):
    tokenizer = spelling(CHATML)
    how = dict(max_tokens=8, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    return Rollout(weights or net(), **how | more)


@pytest.fixture(scope="module")
def rollout(): return engine()


@pytest.fixture(scope="module")
def at(rollout):
    with Endpoint(rollout, model="policy") as made: yield made


def chat(client, text="Say 1."):
    said = client.chat.completions.create(model="policy", messages=[dict(role="user", content=text)])
    return said.choices[0].message.content


def plain(text):
    "Without special tokens, as the column `completion` has it."
    return text.replace("<end>", "").replace("<turn>", "")


# -- the rows

def test_weights_may_change_between_calls(rollout):
    "LAWS 3: every token has the version that it was drawn from."
    r, policy = engine(), Policy(net(), lr=1e-2, device="cpu")
    r.load(policy.weights())
    first = r.sampler.version
    def agent(base_url, api_key, messages):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for n in range(2):
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                messages = [*messages, said, dict(role="user", content="And?")]
                if not n: r.load(policy.weights())
    with Endpoint(r) as at:
        b = at.run(agent, asked(r.tokenizer, 1))
        policy.step(b, lambda out, b: (-out.logprobs[b.mask].sum(), {}))
        agent2 = at.run(agent, asked(r.tokenizer, 1))
    assert set(b.policy_version[b.mask].tolist()) == {first}
    after = agent2.policy_version[agent2.mask & (agent2.turn == 1)].unique()
    assert after.tolist() == [r.sampler.version] and r.sampler.version > first
    now = policy.logprobs(agent2)
    of_now = agent2.mask & (agent2.policy_version == r.sampler.version)
    assert of_now.any() and float((now - agent2.rollout_logprobs)[of_now].abs().max()) < 1e-3


# -- the clients

def by_chat(at, key, stream):
    with openai.OpenAI(base_url=at.url, api_key=key) as client:
        def say(history, ask):
            messages = [*history, dict(role="user", content=ask)]
            made = client.chat.completions.create(model="policy", messages=messages, stream=stream)
            if not stream: text = made.choices[0].message.content
            else:
                chunks = [c.choices[0] for c in made]
                assert chunks[-1].finish_reason in ("stop", "length")
                text = "".join(c.delta.content or "" for c in chunks)
            return text, [*messages, dict(role="assistant", content=text)]
        one, history = say([], "Say 1.")
        return one, say(history, "Say 2.")[0]


def by_responses(at, key, stream):
    "The server keeps the conversation."
    with openai.OpenAI(base_url=at.url, api_key=key) as client:
        def say(ask, after=None):
            how = dict(model="policy", input=ask, previous_response_id=after)
            if not stream: made = client.responses.create(**how)
            else:
                events = list(client.responses.create(stream=True, **how))
                made, text = events[-1].response, "".join(e.delta for e in events if e.type.endswith("text.delta"))
                assert made.output_text == text and [e.sequence_number for e in events] == list(range(len(events)))
            assert made.usage.output_tokens > 0 and made.status in ("completed", "incomplete")
            return made.output_text, made.id
        one, name = say("Say 1.")
        return one, say("Say 2.", name)[0]


def by_messages(at, key, stream):
    with anthropic.Anthropic(base_url=at.url.removesuffix("/v1"), api_key=key) as client:
        def say(history, ask):
            messages = [*history, dict(role="user", content=ask)]
            how = dict(model="policy", max_tokens=8, messages=messages)
            if not stream: text = client.messages.create(**how).content[0].text
            else:
                with client.messages.stream(**how) as made: text = "".join(made.text_stream)
                assert made.get_final_message().stop_reason in ("end_turn", "max_tokens")
            return text, [*messages, dict(role="assistant", content=text)]
        one, history = say([], "Say 1.")
        return one, say(history, "Say 2.")[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", [by_chat, by_responses, by_messages])
def test_clients_of_three_protocols(rollout, at, by, stream):
    session = at.session(group=3, seed=7)
    said = by(at, session.key, stream)
    b = at.collect([session])
    assert len(b) == 1 and b.n_turns.tolist() == [2] and gap(b) < 1e-3
    assert b.completion == ["\n".join(map(plain, said))] and [m["role"] for m in b.messages[0]] == [
        "user", "assistant"]*2
    alone = at.session(group=3, seed=7)           # the same words, whatever the protocol
    assert by_chat(at, alone.key, False) == said
    assert at.collect([alone]).tokens.equal(b.tokens)


def test_a_base_url_with_or_without_v1(at):
    for url in (at.url, at.url.removesuffix("/v1")):
        session = at.session()
        with anthropic.Anthropic(base_url=url, api_key=session.key) as client:
            client.messages.create(model="policy", max_tokens=2, messages=[dict(role="user", content="a")])
            assert [m.id for m in client.models.list()] == ["policy"]
        with openai.OpenAI(base_url=url, api_key=session.key) as client:
            chat(client)
            assert [m.id for m in client.models.list()] == ["policy"]
        assert at.collect([session]).n_turns.tolist() == [2, 2]


# -- tools

@pytest.fixture(scope="module")
def calling(rollout):
    "The policy's words are random, so a reader of them makes the calls: one in the first answer of each session."
    def read(text):
        calls = (dict(name="add", arguments=dict(a=1, b=2)),)
        return Response(text[:3], tool_calls=calls) if read.calls else Response(text)
    read.calls = True
    tokenizer = spelling(TOOLS + CHATML)
    with Endpoint(rollout, renderer=ChatRenderer(tokenizer, read=read)) as made:
        made.read = read
        yield made


def tools_by_chat(at, key):
    with openai.OpenAI(base_url=at.url, api_key=key) as client:
        how = dict(model="policy", tools=[dict(type="function", function=ADD)])
        messages = [dict(role="user", content="1 + 2?")]
        said = client.chat.completions.create(messages=messages, **how).choices[0]
        call, = said.message.tool_calls
        assert said.finish_reason == "tool_calls"
        messages += [said.message, dict(role="tool", tool_call_id=call.id, content="3")]
        at.read.calls = False
        client.chat.completions.create(messages=messages, **how)
        return call.function.name, json.loads(call.function.arguments)


def tools_by_chat_stream(at, key):
    with openai.OpenAI(base_url=at.url, api_key=key) as client:
        how = dict(model="policy", tools=[dict(type="function", function=ADD)])
        messages = [dict(role="user", content="1 + 2?")]
        with client.chat.completions.stream(messages=messages, **how) as events:
            for _ in events: pass
            said = events.get_final_completion().choices[0].message
        call, = said.tool_calls
        at.read.calls = False
        messages += [dict(role="assistant", content=said.content, tool_calls=[dict(
            id=call.id, type="function", function=dict(name=call.function.name, arguments=call.function.arguments))]),
            dict(role="tool", tool_call_id=call.id, content="3")]
        client.chat.completions.create(messages=messages, **how)
        return call.function.name, json.loads(call.function.arguments)


def tools_by_responses(at, key):
    with openai.OpenAI(base_url=at.url, api_key=key) as client:
        how = dict(model="policy", tools=[dict(type="function", **ADD)])
        items = [dict(role="user", content="1 + 2?")]
        with client.responses.stream(input=items, **how) as events:
            for _ in events: pass
            said = events.get_final_response()
        call, = (x for x in said.output if x.type == "function_call")
        at.read.calls = False
        items += [x.model_dump() for x in said.output]
        items += [dict(type="function_call_output", call_id=call.call_id, output="3")]
        client.responses.create(input=items, **how)
        return call.name, json.loads(call.arguments)


def tools_by_messages(at, key):
    with anthropic.Anthropic(base_url=at.url, api_key=key) as client:
        tool = dict(name="add", description="Adds.", input_schema=ADD["parameters"])
        how, messages = dict(model="policy", max_tokens=8, tools=[tool]), [dict(role="user", content="1 + 2?")]
        with client.messages.stream(messages=messages, **how) as events: said = events.get_final_message()
        call, = (x for x in said.content if x.type == "tool_use")
        assert said.stop_reason == "tool_use"
        messages += [dict(role="assistant", content=said.content), dict(role="user", content=[
            dict(type="tool_result", tool_use_id=call.id, content="3")])]
        at.read.calls = False
        client.messages.create(messages=messages, **how)
        return call.name, call.input


def tools_by_pydantic_ai(at, key):
    "A framework from the registry, as it is."
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    agent, seen = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=at.url, api_key=key))), []
    @agent.tool_plain(name="add")
    def add(a:int, b:int)->int:
        "Adds."
        seen.append(dict(a=a, b=b))
        at.read.calls = False
        return a + b
    agent.run_sync("1 + 2?")
    return "add", seen[0]


@pytest.mark.parametrize("by", [tools_by_chat, tools_by_chat_stream, tools_by_responses, tools_by_messages,
                                tools_by_pydantic_ai])
def test_tools(rollout, calling, by):
    "They are in the template, their calls are read from the answer, and what they gave is not trained."
    session, calling.read.calls = calling.session(seed=2), True
    assert by(calling, session.key) == ("add", dict(a=1, b=2))
    b = calling.collect([session])
    text = rollout.tokenizer.decode(b.tokens[0, :b.lengths[0]])
    assert len(b) == 1 and b.n_turns.tolist() == [2] and gap(b) < 1e-3
    assert text.startswith("<turn>tool add\nAdds.<end>") and "<turn>tool\n3<end>" in text
    assert [m["role"] for m in b.messages[0]] == ["user", "assistant", "tool", "assistant"]
    assert b.mask.equal(b.turn >= 0)


# -- histories that change

def test_a_rewritten_history_is_another_row(rollout, at):
    "The agent drops its first turn, then tries its second again: three rows of one unit, no answer in two of them."
    def agent(base_url, api_key, messages):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            def say(messages):
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                return [*messages, dict(role="assistant", content=said.content)]
            more = dict(role="user", content="More.")
            one = say(messages)
            two = say([*one, more])
            say([*two[2:], dict(role="user", content="And?")])     # forgot the beginning
            say([*one, dict(role="user", content="Again.")])       # a branch
            say([*two, dict(role="user", content="Then?")])        # the first row goes on
    before = at.report()
    b = at.run(agent, asked(rollout.tokenizer, 2), seed=3)
    after = at.report()
    assert b.unit.diff().bool().tolist() == [0, 0, 1, 0, 0] and b.n_turns.tolist() == [5]*6 and gap(b) < 1e-3
    said = [sorted(b.turn[i][b.mask[i]].unique().tolist()) for i in range(3)]
    assert said == [[0, 1, 4], [2], [3]]
    assert (after["forks"] - before["forks"], after["rows"] - before["rows"]) == (4, 6)
    first, branch = b.tokens[0], b.tokens[2]
    kept = int(b.lengths[0].new_tensor([i for i in range(len(first)) if b.turn[0, i] == 0]).max()) + 1
    assert branch[:kept].equal(first[:kept]) and not b.mask[2, :kept].any()     # ids as they were sampled, untrained


@pytest.mark.parametrize("strip", [False, True])
def test_agents_that_strip_are_counted(rollout, strip):
    def agent(base_url, api_key, messages):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
                messages = [*messages, dict(role="assistant", content=said.strip() + " "),
                            dict(role="user", content="More.")]
    with Endpoint(rollout, strip=strip) as at, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        b, report = at.run(agent, asked(rollout.tokenizer, 2)), at.report()
    assert gap(b) < 1e-3 and len(b) == (2 if strip else 6)
    assert report["fork_share"] == (0. if strip else 1.) and report["respaced"] == (0 if strip else 4)
    assert bool([w for w in heard if "4 of 4 calls began a row of their own" in str(w.message)]) is not strip


# -- many, late, gone

def test_200_calls_at_once(rollout, at):
    "Each is one row of its own session, with the ids that `generate` draws."
    p = asked(rollout.tokenizer, 100)
    async def run(sessions):
        async with openai.AsyncOpenAI(base_url=at.url, api_key="none", timeout=300) as client:
            calls = [client.chat.completions.create(model="policy", messages=s.episode.row["messages"], max_tokens=3,
                     extra_headers=dict(Authorization=f"Bearer {s.key}")) for s in sessions]
            return await asyncio.gather(*calls)
    sessions = [at.session(group=g, sample=k, seed=9, messages=m)
                for g, m in zip(p.group.tolist(), p.messages, strict=True) for k in range(2)]
    said = asyncio.run(run(sessions))
    b = at.collect(sessions)
    want = rollout.generate(p, group_size=2, seed=9, max_tokens=3)
    assert len(b) == 200 and b.n_turns.tolist() == [1]*200 and b.tokens.equal(want.tokens)
    assert_close(b.rollout_logprobs, want.rollout_logprobs, atol=1e-5, rtol=0)
    assert [plain(x.choices[0].message.content) for x in said] == b.completion
    assert not rollout.shared.under_way and not at.state.requests.waits


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_cancelled_stream_is_not_recorded(rollout, at, path):
    "It leaves the engine; tried again it is one row, the one that it would have been."
    session, ask = at.session(group=5), [dict(role="user", content="Say 1.")]
    body = dict(model="policy", stream=True, **{"input" if path == "responses" else "messages": ask})
    with rollout.lock:                     # the engine is busy with something else
        with httpx2.Client() as client, client.stream(
                "POST", f"{at.url}/{path}", json=body, headers=dict(authorization=f"Bearer {session.key}")) as got:
            lines = got.iter_lines()       # its end would close the connection
            next(lines)
            wait_until(lambda: session.tasks and at.state.requests.waits)
        wait_until(lambda: not session.tasks and not at.state.requests.waits)
    wait_until(lambda: not at.state.requests.gone and not rollout.shared.under_way)
    assert not session.points and session.draws == 1
    got = httpx2.post(f"{at.url}/{path}", json=body, timeout=60, headers={
        "authorization": f"Bearer {session.key}", "x-stainless-retry-count": "1"})
    assert got.status_code == 200 and not session.rooms and not session.running
    b, undisturbed = at.collect([session]), at.session(group=5)
    assert len(b) == 1 and b.n_turns.tolist() == [1] and gap(b) < 1e-3
    chat_with(at, undisturbed, "Say 1.")
    assert at.collect([undisturbed]).tokens.equal(b.tokens)


def wait_until(true, seconds=300.): # what hangs, not a machine with other work
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(.01)


def test_a_call_that_is_repeated_is_answered_once(at):
    "What clients do when an answer got lost on its way. It is no further call, which this session may not make."
    session, body = at.session(max_turns=1), dict(model="policy", messages=[dict(role="user", content="Say 1.")])
    said = [httpx2.post(f"{at.url}/chat/completions", json=body, timeout=60, headers={
        "authorization": f"Bearer {session.key}", "x-stainless-retry-count": n}).json() for n in "012"]
    assert said[0] == said[1] == said[2] and at.collect([session]).n_turns.tolist() == [1]


def test_of_two_calls_with_one_body_each_has_its_own_answer(rollout, at):
    "The best of two: the client of the second goes away and asks again. Its sample is its own."
    session, body = at.session(), dict(model="policy", messages=[dict(role="user", content="Say 1.")])
    def call(attempt): return dict(url=f"{at.url}/chat/completions", json=body, timeout=60, headers={
        "authorization": f"Bearer {session.key}", "x-stainless-retry-count": str(attempt)})
    def ask(attempt): return httpx2.post(**call(attempt)).json()
    async def leave():
        async with httpx2.AsyncClient() as client:
            asked = asyncio.create_task(client.post(**call(0)))
            await asyncio.to_thread(wait_until, lambda: session.tasks and at.state.requests.waits)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError): await asked
    first = ask(0)
    with rollout.lock:                     # the engine is busy with something else
        asyncio.run(leave())
        wait_until(lambda: not session.tasks and not at.state.requests.waits)
    second = ask(1)
    assert second["id"] != first["id"] and ask(1) == second
    b = at.collect([session])
    assert b.n_turns.tolist() == [2, 2] and b.unit.unique().numel() == 1


def test_of_two_equal_answers_each_keeps_its_own_ids(rollout):
    "A history that is rewritten around them."
    from rlblocks.environments.episodes import Episode
    from rlblocks.endpoint.sessions import Point, Session, kept_words
    from rlblocks.environments.conversations import Branch
    from rlblocks.rollout.turns import Limits
    session, said = Session(Episode({}, [], 0, 0), Limits(8)), dict(role="assistant", content="OK")
    for ids in ([5, 6, 7], [5, 8, 9]): session.points.append(Point([said], None, Branch(ids, ids=ids), 1, 3))
    made, kept = kept_words(session, [said, dict(role="user", content="?"), said, said], False)
    assert kept == {0: [6, 7], 2: [8, 9]}


def test_a_call_that_is_repeated_while_it_runs_is_sampled_once(at, rollout):
    session, said = at.session(), []
    body = dict(model="policy", messages=[dict(role="user", content="Say 1.")])
    def ask(attempt): said.append(httpx2.post(f"{at.url}/chat/completions", json=body, timeout=60, headers={
        "authorization": f"Bearer {session.key}", "x-stainless-retry-count": str(attempt)}).json())
    threads = [threading.Thread(target=ask, args=(k,)) for k in range(3)]
    with rollout.lock:
        for k, thread in enumerate(threads):
            thread.start()
            wait_until(lambda k=k: len(at.served.server.server_state.tasks) == k + 1)
        wait_until(lambda: at.state.requests.waits)
    for thread in threads: thread.join(timeout=60)
    assert said[0] == said[1] == said[2] and session.draws == 1 and at.collect([session]).n_turns.tolist() == [1]


def test_a_stream_that_fails_ends_with_an_error(rollout):
    "What the renderer cannot read is no part of the rows."
    def unreadable(text): raise ValueError("no words")
    with Endpoint(rollout, renderer=ChatRenderer(spelling(CHATML), read=unreadable)) as at:
        session = at.session()
        with openai.OpenAI(base_url=at.url, api_key=session.key, max_retries=0) as client:
            with pytest.raises(openai.APIError, match="ValueError: no words"):
                list(client.chat.completions.create(model="policy", messages=USER, stream=True))
            last = list(client.responses.create(model="policy", input="a", stream=True))[-1]
            assert last.type == "error" and last.message == "ValueError: no words"       # as their protocol has it
            with pytest.raises(openai.InternalServerError, match="ValueError: no words"): chat(client)
        with anthropic.Anthropic(base_url=at.url, api_key=session.key, max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="ValueError: no words"):
                list(client.messages.create(model="policy", max_tokens=4, messages=USER, stream=True))
        assert not session.points and not session.rooms and not session.running


def test_agents_that_raise_hang_or_ask_nothing_are_named(rollout, at):
    "LAWS 19 and 23: the others arrive by the deadline."
    async def agent(base_url, api_key, messages, session):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            if session.episode.group == 2: return
            await client.chat.completions.create(model="policy", messages=messages)
            if session.episode.group == 0: raise OSError("its tool is gone")
            if session.episode.group == 1 and hangs: await asyncio.sleep(3600)
        return dict(done=True)
    hangs, began, p = False, time.monotonic(), asked(rollout.tokenizer, 4)
    with pytest.warns(UserWarning, match="2 of 4 sessions did not arrive"): assert len(at.run(agent, p)) == 2
    hangs, enough = True, 3 + 8*(time.monotonic() - began)       # on this machine, with its other work
    with pytest.warns(UserWarning, match="3 of 4 sessions did not arrive") as heard:
        b = at.run(agent, p, deadline=enough)
    text = str(heard[0].message)
    assert f"it had not ended after {enough:g} s" in text
    assert "OSError: its tool is gone" in text and "it asked nothing" in text
    assert b.group.tolist() == [3] and b.result == [dict(done=True)] and b.reward.isnan().all()
    assert not rollout.shared.under_way and not at.state.sessions


def test_an_async_agent_that_blocks_all_others_ends_by_the_deadline(rollout, at):
    go = threading.Event()
    async def blocks(base_url, api_key): go.wait(600.)
    try:
        with pytest.raises(RuntimeError, match="an async agent does not give way to the others"):
            at.run(blocks, asked(rollout.tokenizer, 2), deadline=.5)
    finally: go.set()
    assert not at.state.sessions


def test_limits_end_a_session_with_their_names(rollout, at):
    def agent(base_url, api_key, messages):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                messages = [*messages, said, dict(role="user", content="x"*100)]
    p = asked(rollout.tokenizer, 2)
    b = at.run(agent, p, max_turns=2)
    assert b.finish_reason == ["max_turns"]*2 and b.n_turns.tolist() == [2, 2]
    b = at.run(agent, p, budget=10)
    assert b.finish_reason == ["max_tokens"]*2 and int(b.mask.sum(1).max()) <= 10
    b = at.run(agent, p)
    assert b.finish_reason == ["context_overflow"]*2 and int(b.lengths.max()) <= 512


def test_calls_at_once_do_not_pass_a_limit(rollout, at):
    "What is under way counts as if it took all that it may."
    session, box = at.session(max_turns=2), []
    def ask():
        try: box.append(chat_with(at, session))
        except openai.BadRequestError as e: box.append(e)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    with rollout.lock:
        for t in threads: t.start()
        wait_until(lambda: len(box) == 2 and len(at.state.requests.waits) == 2)
    for t in threads: t.join(timeout=60)
    assert sum(isinstance(x, str) for x in box) == 2 and all("max_turns" in str(x) for x in box[:2])
    b = at.collect([session])
    assert b.n_turns.tolist() == [2, 2] and b.finish_reason == ["max_turns"]*2 and not session.rooms


def test_a_call_that_comes_while_weights_change_waits(rollout, at):
    session, box = at.session(), []
    thread = threading.Thread(target=lambda: box.append(chat_with(at, session)))
    with rollout.lock:
        rollout.sleep()
        thread.start()
        wait_until(lambda: at.state.requests.waits)
        rollout.wake()
    thread.join(timeout=60)
    assert isinstance(box[0], str) and at.collect([session]).n_turns.tolist() == [1]


# -- one agent's fault is its own

async def raises_cancelled(ask): raise asyncio.CancelledError


async def cancels_itself(ask):
    asyncio.current_task().cancel()
    await asyncio.sleep(600)


async def cancels_all(ask):
    for task in asyncio.all_tasks() - {asyncio.current_task()}: task.cancel()
    await ask()             # and goes on
    raise ValueError("after it had cancelled all")


async def interrupts(ask): raise KeyboardInterrupt


async def has_a_task_that_leaves(ask):
    async def leaves(): sys.exit(3)
    await asyncio.create_task(leaves())


async def stops_the_loop(ask):
    asyncio.get_running_loop().stop()
    raise ValueError("after it had stopped the loop")


async def leaves_a_generator(ask): raise GeneratorExit


async def has_no_words(ask): raise Mute


async def leaves_for_want_of_words(ask): raise Leaves


@pytest.mark.parametrize(("bad", "says"), [
    (raises_cancelled, "it was cancelled"), (cancels_itself, "it was cancelled"), (interrupts, "KeyboardInterrupt"),
    (cancels_all, "after it had cancelled all"), (has_a_task_that_leaves, "SystemExit: 3"),
    (stops_the_loop, "after it had stopped the loop"), (leaves_a_generator, "GeneratorExit"),
    (has_no_words, "Mute"), (leaves_for_want_of_words, "SystemExit: 4")])
def test_an_agent_that_ends_oddly_loses_its_own_rows_only(rollout, at, bad, says):
    "It has asked something, and the others have ended: theirs stay."
    ended = []
    async def agent(base_url, api_key, messages, session):
        async def ask():
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                await client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        await ask()
        if session.episode.group == 1:
            while len(ended) < 2: await asyncio.sleep(.01)
            await asyncio.sleep(.05)
            await bad(ask)
        ended.append(session)
        return 1.
    with pytest.warns(UserWarning, match="1 of 3 sessions did not arrive: sample 0 of group 1: .*" + says):
        b = at.run(agent, asked(rollout.tokenizer, 3), deadline=120)
    assert b.group.tolist() == [0, 2] and b.reward.tolist() == [1., 1.] and not at.state.sessions


def test_agents_that_another_one_cancels_are_named(rollout, at):
    "Also those that had not begun. Who cancelled them goes on."
    async def agent(base_url, api_key, messages, session):
        if session.episode.group == 1:
            for task in asyncio.all_tasks() - {asyncio.current_task()}: task.cancel()
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
    with pytest.warns(UserWarning, match="2 of 3 sessions did not arrive") as heard:
        b = at.run(agent, asked(rollout.tokenizer, 3), deadline=120)
    assert b.group.tolist() == [1] and str(heard[0].message).count("it was cancelled") == 2


@pytest.mark.parametrize("reward", [float("inf"), float("-inf"), float("nan"), 1e39, 10**400])
@pytest.mark.parametrize("sets", [False, True])
def test_a_reward_that_is_no_number_of_single_precision_is_named(rollout, at, reward, sets):
    "Among others it would make the advantages of its group NaN, and a step all weights."
    def agent(base_url, api_key, session, messages):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        if session.episode.sample != 1: return float(session.episode.sample)
        if not sets: return reward
        session.reward = reward
    said = "its reward is" if reward != 10**400 else "OverflowError"
    with pytest.warns(UserWarning, match="1 of 3 sessions did not arrive: sample 1 of group 0: " + said):
        b = at.run(agent, asked(rollout.tokenizer, 1), group_size=3)
    assert b.reward.tolist() == [0., 2.] and group_advantages(b.reward, b.group).isfinite().all()


@pytest.mark.parametrize(("written", "read"), [
    ('{"name": "f", "arguments": {"x": NaN, "y": [1e999, 1]}}', ("f", dict(x=None, y=[None, 1]))),
    ('{"name": "f\\ud800", "arguments": {"x": "a\\udc00", "é": "ü"}}', ("f?", dict(x="a?", é="ü")))])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_policy_writes_into_a_call_reaches_every_client(rollout, written, read, stream):
    "NaN is no JSON, and half a character no UTF-8. Rows and clients have the same, so the conversation goes on."
    def said(text): return read_response(f"<tool_call>{written}</tool_call>")
    def strict(text): return json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
    with Endpoint(rollout, renderer=ChatRenderer(spelling(TOOLS + CHATML), read=said)) as at:
        for path in ("chat/completions", "responses", "messages"):
            session = at.session()
            first = {"model": "p", "stream": stream, "input" if path == "responses" else "messages": USER}
            got = httpx2.post(f"{at.url}/{path}", json=first, headers={"x-api-key": session.key}, timeout=60)
            assert got.status_code == 200 and "error\":{" not in got.text, got.text
            found = [strict(x[6:]) for x in got.text.splitlines() if x.startswith("data: {")] if stream else [
                strict(got.text)]
            assert call_in(found) == read
            call, = session.messages[-1]["tool_calls"]
            assert (call["function"]["name"], call["function"]["arguments"]) == read
            if path == "chat/completions":
                back = [*USER, dict(role="assistant", content=session.messages[-1]["content"], tool_calls=[call | dict(
                    function=dict(name=read[0], arguments=json.dumps(read[1])))]), dict(role="tool", content="3")]
                again = httpx2.post(f"{at.url}/{path}", json=dict(model="p", messages=back), timeout=60,
                                    headers={"x-api-key": session.key})
                assert again.status_code == 200
            b = at.collect([session])
            assert len(b) == 1 and gap(b) < 1e-3


def call_in(found):
    "Name and arguments of the call in what came, of whichever protocol, whole or in pieces."
    if found[0].get("object", "").startswith("chat"):
        parts = [c["choices"][0].get("delta", c["choices"][0].get("message")) for c in found if c["choices"]]
        call, = (c["function"] for p in parts for c in p.get("tool_calls", ()))
        return call["name"], json.loads(call["arguments"])
    if "response" in found[-1] or found[0].get("object") == "response":
        call, = (x for x in found[-1].get("response", found[-1])["output"] if x["type"] == "function_call")
        return call["name"], json.loads(call["arguments"])
    blocks = found[0].get("content") or [x["content_block"] for x in found if x["type"] == "content_block_start"]
    call, = (x for x in blocks if x["type"] == "tool_use")
    pieces = [x["delta"].get("partial_json", "") for x in found if x["type"] == "content_block_delta"]
    return call["name"], json.loads("".join(pieces)) if pieces else call["input"]


# -- calls that are large

def counting(template=CHATML):
    "A renderer that counts what it encodes."
    class Counts(ChatRenderer):
        encoded = 0
        def ids(self, text):
            self.encoded += len(text)
            return super().ids(text)
    return Counts(spelling(template))


@pytest.mark.parametrize("messages", [[dict(role="assistant", content="")]*600 + USER,
                                      [dict(role="user", content="a"*100_000)]], ids=["many", "long"])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_what_cannot_fit_is_refused_before_it_is_encoded(rollout, messages, path):
    "The window has 512 positions. The session has ended for that reason, as for a call that was encoded."
    with Endpoint(rollout, renderer=counting()) as at:
        session = at.session()
        chat_with(at, session)
        before = at.state.renderer.encoded
        body = {"model": "p", "input" if path == "responses" else "messages": messages}
        got = httpx2.post(f"{at.url}/{path}", json=body, headers={"x-api-key": session.key}, timeout=60)
        assert got.status_code == 400 and "context_overflow" in got.json()["error"]["message"]
        assert at.state.renderer.encoded == before
        assert at.collect([session]).finish_reason == ["context_overflow"]


def large_parts():
    "A call of a tool in the history, a name, and a tool, each of 100,000 characters."
    long = "a"*100_000
    call = dict(id="c", type="function", function=dict(name="f", arguments=json.dumps(dict(x=long))))
    return dict(arguments=dict(messages=[*USER, dict(role="assistant", content="", tool_calls=[call]), *USER]),
                name=dict(messages=[dict(role="user", name=long, content="a")]),
                tools=dict(messages=USER, tools=[dict(type="function", function=ADD | dict(description=long))]))


WHOLE = ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<turn>{{ m.role }}\n"
         "{{ m.name or '' }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
         "<end>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}")


@pytest.mark.parametrize("part", large_parts())
def test_what_a_template_writes_counts_wherever_it_came(rollout, part):
    "Where the template leaves it out, the call is answered."
    body = dict(model="p", **large_parts()[part])
    for template, status, kept in ((WHOLE, 400, True), (CHATML, 200, False)):
        with Endpoint(rollout, renderer=counting(template)) as at:
            session, before = at.session(), at.state.renderer.encoded
            got = httpx2.post(f"{at.url}/chat/completions", json=body, headers={"x-api-key": session.key}, timeout=60)
            assert got.status_code == status and ("context_overflow" in got.text) == kept
            assert (at.state.renderer.encoded == before) == kept


def test_a_call_that_takes_long_to_read_keeps_nobody_else(rollout):
    "Another agent is answered, and rows of a session that has ended are taken."
    go, reached = threading.Event(), threading.Event()
    class Slow(ChatRenderer):
        def text(self, messages, *more):
            if "slow" in messages[-1]["content"]:
                reached.set()
                assert go.wait(300.)
            return super().text(messages, *more)
    with Endpoint(rollout, renderer=Slow(spelling(CHATML))) as at, ThreadPoolExecutor(1) as pool:
        done, slow = at.session(), at.session()
        chat_with(at, done)
        late = pool.submit(httpx2.post, f"{at.url}/chat/completions", timeout=300, headers={"x-api-key": slow.key},
                           json=dict(model="p", messages=[dict(role="user", content="slow")]))
        try:
            assert reached.wait(60.)
            other = httpx2.post(f"{at.url}/chat/completions", json=dict(model="p", messages=USER), timeout=20,
                                headers={"x-api-key": at.session().key})
            assert other.status_code == 200
            got = httpx2.get(f"{at.url}/models", headers={"x-api-key": slow.key}, timeout=20)
            assert got.status_code == 200 and at.collect([done]).n_turns.tolist() == [1]
            with pytest.raises(RuntimeError, match="it asked nothing"): at.collect([slow])
        finally: go.set()
        assert late.result().status_code == 401 and "this session has ended" in late.result().text
        assert not slow.points and not slow.rooms and not slow.running


def test_calls_of_a_session_are_read_as_they_come(rollout):
    "The first call takes longer to read than the second, and has the first place, which names its samples."
    reached = threading.Event()
    class Slow(ChatRenderer):
        def text(self, messages, *more):
            if messages[-1]["content"] == "slow":
                reached.set()
                time.sleep(.3)
            return super().text(messages, *more)
    with Endpoint(rollout, renderer=Slow(spelling(CHATML))) as at, ThreadPoolExecutor(1) as pool:
        session = at.session()
        first = pool.submit(chat_with, at, session, "slow")
        assert reached.wait(60.)
        chat_with(at, session, "quick")
        first.result()
        places = {name.split("_")[1]: p.messages[0]["content"] for name, p in session.answers.items()}
        assert places == {"0": "slow", "1": "quick"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_many_levels_is_recorded_and_sent_or_neither(rollout, stream):
    "Of too many for Python the call has an error that says so."
    recorded = []
    for levels in (490, *range(900, 1000, 9)):
        made = dict(name="f", arguments=dict(x=1))
        for _ in range(levels): made["arguments"] = dict(a=made["arguments"])
        reads = ChatRenderer(spelling(CHATML), read=lambda _: Response("", tool_calls=(made,)))   # noqa: B023
        with Endpoint(rollout, renderer=reads) as at:
            session = at.session()
            got = httpx2.post(f"{at.url}/messages", json=dict(model="p", max_tokens=8, messages=USER, stream=stream),
                              headers={"x-api-key": session.key}, timeout=60)
            well = got.status_code == 200 and "RecursionError" not in got.text
            recorded.append(well)
            assert well or "RecursionError: maximum recursion depth exceeded" in got.text
            assert len(session.points) == len(session.branches) == session.episode.turns == well
            assert bool(session.placed) == well and not session.rooms and not session.running
    assert recorded[0] and not recorded[-1]


def test_a_message_shows_the_beginning_of_a_value_only():
    from rlblocks.endpoint.calls import short
    class Unread:
        def __str__(self): raise AssertionError("no more of a value is written than is shown")
    assert short(dict(a=[0]*99 + [Unread()])) == '{"a": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, …'
    assert short("a"*39) == '"' + "a"*39 + "…" and short([1, "é"]) == '[1, "é"]'


def test_known_conversations_are_found_by_a_walk():
    "As they would be by comparing each message with each, spaces, calls and the likeness of 1 and 1.0 included."
    from rlblocks.endpoint.calls import continues
    from rlblocks.endpoint.sessions import Known, Point
    draw = random.Random(0)
    def message():
        calls = [dict(function=dict(name="f", arguments=dict(x=draw.choice([1, 1., True, [1], -1, -2]))))]
        return dict(role="assistant", content=draw.choice(["a", "a ", ""])) | draw.choice([{}, dict(tool_calls=calls)])
    for strip in (False, True):
        known, points, found = Known(strip), [], 0
        for _ in range(300):
            messages = [message() for _ in range(draw.randint(1, 3))]
            expected = [p for p in points if continues(messages, p.messages, strip)]
            got = known.continued(messages)
            assert sorted(map(id, got)) == sorted(map(id, expected))
            found += len(got)
            points.append(Point(messages, None, None, 0, 0))
            known.add(points[-1])
        assert found > 100


# -- connections

def strangers(port, said, n):
    "Connections that say so much and no more."
    made = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(n)]
    for s in made: s.sendall(said)
    return made


def hung_up(s):
    "Whether the other side ends a connection, within its timeout; it may say something before."
    try:
        while s.recv(1 << 16): pass
    except ConnectionError: pass
    except TimeoutError: return False
    finally: s.close()
    return True


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-",
                                  b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nG"],
                         ids=["nothing", "half", "again"])
def test_a_connection_without_a_request_is_closed_in_time(rollout, said):
    "One that waits for its answer is not, however long that takes."
    with Endpoint(rollout) as at, ThreadPoolExecutor(1) as pool:
        at.served.connections.seconds, session = .2, at.session()
        with rollout.lock:                     # the engine is busy with something else
            waits = pool.submit(chat_with, at, session)
            wait_until(lambda: at.state.requests.waits)
            assert all(map(hung_up, strangers(at.served.port, said, 3)))
            assert not waits.done()
        assert isinstance(waits.result(60), str)


def test_who_asks_and_reads_nothing_is_hung_up_on(rollout):
    "Until the answers no longer fit in what the system keeps for a connection."
    with Endpoint(rollout) as at:
        at.served.connections.seconds = at.served.connections.unread = .2
        s, = strangers(at.served.port, b"", 1)
        s.settimeout(20)
        with pytest.raises(ConnectionError):
            for _ in range(1000): s.sendall(b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"*2000)
        wait_until(lambda: not at.served.connections.open)


def test_strangers_do_not_use_up_the_files(rollout):
    "Of those that say half a request the oldest are closed; agents are answered, on connections that they keep."
    with Endpoint(rollout) as at:
        at.served.connections.most, session = 20, at.session()
        half = strangers(at.served.port, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", 100)
        wait_until(lambda: len(at.served.server.server_state.connections) <= 30)
        assert all(map(hung_up, half[:60]))
        with httpx2.Client() as client:
            for k in range(5):
                body = dict(model="p", max_tokens=1, messages=[dict(role="user", content=str(k))])
                how = dict(headers={"x-api-key": session.key}, timeout=60)
                assert client.post(f"{at.url}/chat/completions", json=body, **how).status_code == 200
        for s in half: s.close()
        assert at.collect([session]).n_turns.unique().tolist() == [5]
    few = Connections()
    assert 0 < few.most <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]//4


def test_a_body_that_does_not_end_is_refused(rollout, monkeypatch):
    monkeypatch.setattr("rlblocks.endpoint.exchanges.MOST_SECONDS", .2)
    with Endpoint(rollout) as at:
        session = at.session()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {session.key}\r\n"
                "Content-Length: 100\r\n\r\n{").encode()
        s, = strangers(at.served.port, head, 1)
        assert b" 408 " in s.recv(1 << 16) and not session.running
        s.close()
        assert isinstance(chat_with(at, session), str)


def test_a_body_that_is_too_large_is_refused_as_it_arrives(at):
    session = at.session()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {session.key}\r\n"
            f"Content-Length: {10**11}\r\n\r\n{{").encode()
    s, = strangers(at.served.port, head, 1)
    assert b" 413 " in s.recv(1 << 16) and not session.running
    s.close()


def test_a_client_that_hangs_up_within_its_body_is_no_news(rollout, caplog):
    with Endpoint(rollout) as at:
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {at.session().key}\r\n"
                "Content-Length: 100\r\n\r\n{").encode()
        s, = strangers(at.served.port, head, 1)
        wait_until(lambda: at.state.sessions[1].bodies._value < 16)
        s.close()
        wait_until(lambda: at.state.sessions[1].bodies._value == 16)
    assert not caplog.records


# -- who may ask, and what is refused

def test_a_wrong_key_is_an_authentication_error(at):
    session = at.session()
    other = at.session()
    for key in ("sk-wrong", session.key[:-1] + ("a" if session.key[-1] != "a" else "b"), at.token[:-1], "rl-999999-x",
                f"rl-{session.number}-", f"rl-{'9'*30}-x",
                other.key.replace(f"-{other.number}-", f"-{session.number}-", 1)):
        with openai.OpenAI(base_url=at.url, api_key=key) as client:
            with pytest.raises(openai.AuthenticationError, match="no open session has this key"): chat(client)
            with pytest.raises(openai.AuthenticationError): client.responses.create(model="policy", input="a")
        with anthropic.Anthropic(base_url=at.url, api_key=key) as client:
            with pytest.raises(anthropic.AuthenticationError, match="no open session"):
                client.messages.create(model="policy", max_tokens=1, messages=[dict(role="user", content="a")])
    got = httpx2.post(f"{at.url}/chat/completions", json={})
    assert got.status_code == 401 and "no key came" in got.text
    assert not session.draws and len(session.key) > 32
    for s in (session, other): chat_with(at, s)
    at.collect()
    with openai.OpenAI(base_url=at.url, api_key=session.key) as client:
        with pytest.raises(openai.AuthenticationError): chat(client)


def chat_with(at, session, text="a"):
    with openai.OpenAI(base_url=at.url, api_key=session.key) as client: return chat(client, text)


def test_an_agent_may_call_it_by_any_name(rollout):
    "Nothing in an agent is changed, its model's name neither. Sessions that have ended are not kept."
    with Endpoint(rollout) as at:
        headers = {"x-session": "one"}
        with openai.OpenAI(base_url=at.url, api_key=at.token, default_headers=headers) as client:
            made = client.chat.completions.create(model="gpt-4o", messages=USER)
        assert made.model == "gpt-4o" and len(at.collect()) == 1 and not at.names


def test_the_token_and_a_header_name_a_session(at):
    with openai.OpenAI(base_url=at.url, api_key=at.token) as client:
        with pytest.raises(openai.BadRequestError, match="x-session"): chat(client)
        for name in "aab": chat(client.with_options(default_headers={"x-session": name}))
    b = at.collect()
    assert b.name == ["a", "a", "b"] and b.unit.diff().bool().tolist() == [0, 1]      # asked the same twice: a branch


def test_sessions_opened_by_hand_have_the_units_of_the_loop(rollout, at):
    "So their rows may be joined with those of other batches. Two that would be one are refused."
    def of(group, sample):
        session = at.session(group=group, sample=sample)
        chat_with(at, session)
        return session
    first, second = [of(7, 0), of(7, 1)], [of(7, 1), at.session()]
    with pytest.raises(ValueError, match="2 sessions are sample 1 of group 7; give each a place"):
        at.collect([*first, *second])
    assert at.collect(first).unit.tolist() == [7*2**20, 7*2**20 + 1]
    chat_with(at, second[1])
    assert at.collect(second).unit.tolist() == [7*2**20 + 1, (2**40 + second[1].number)*2**20]


BAD = [
    ("chat/completions", b"{", "the body is no JSON"), ("chat/completions", b"[1]", "the body is a list"),
    ("chat/completions", b"[" * 100000, "the body is no JSON"),
    ("chat/completions", b'{"max_tokens":' + b"1"*5000 + b"}", "the body is no JSON"),
    ("chat/completions", dict(model="\ud800", messages=USER), "model: character 0 of"),
    ("chat/completions", dict(model="p", messages=[*USER, dict(role="assistant", content="", tool_calls=[dict(
        id="1", type="function", function=dict(name="f", arguments="["*100000))]), *USER]), "a JSON object is wanted"),
    ("messages", b"\xff\xfe\x00", "the body is no JSON"),
    ("chat/completions", dict(messages=USER), "model is missing"),
    ("chat/completions", dict(model="policy"), "messages is missing"),
    ("chat/completions", dict(model="policy", messages=[]), "there are no messages"),
    ("chat/completions", dict(model="policy", messages="a"), "a list of messages is wanted"),
    ("chat/completions", dict(model="policy", messages=["a"]), "messages[0] is"),
    ("chat/completions", dict(model="policy", messages=[dict(role="cat", content="a")]), "messages[0].role"),
    ("chat/completions", dict(model="policy", messages=[*USER, dict(role="assistant", content="b")]), "last message"),
    ("chat/completions", dict(model="policy", messages=USER, max_tokens=0), "max_tokens=0"),
    ("chat/completions", dict(model="policy", messages=USER, max_tokens=True), "max_tokens=true"),
    ("chat/completions", dict(model="policy", messages=USER, n=3), "n=3 is not supported"),
    ("chat/completions", dict(model="policy", messages=USER, tool_choice="required"), "tool_choice"),
    ("chat/completions", dict(model="policy", messages=USER, tools=[dict(type="web")]), "tools[0] is of type"),
    ("chat/completions", dict(model="policy", messages=[dict(role="user", content=[dict(type="image_url")])]),
     "a part of type 'image_url'"),
    ("chat/completions", dict(model="policy", messages=[dict(role="user", content="\ud800")]), "refuses these mess"),
    ("chat/completions", dict(model="policy", messages=[dict(role="user", content="a"*600)]), "context_overflow"),
    ("chat/completions", dict(model="policy", messages=USER, stream=True, logprobs=True), "logprobs=true"),
    ("responses", dict(model="policy", input=5), "a text or a list of items"),
    ("responses", dict(model="policy", input=[dict(type="computer_call")]), "input[0] is"),
    ("responses", dict(model="policy", input="a", previous_response_id="resp_9_9"), "no such answer"),
    ("messages", dict(model="policy", messages=[dict(role="system", content="a")]), "user or assistant"),
    ("messages", dict(model="policy", messages=USER, stop_sequences=["x"]), "stop_sequences"),
    ("messages", dict(model="policy", messages=[dict(role="user", content=[dict(type="image")])]), "type 'image'")]


@pytest.mark.parametrize("path,body,says", BAD, ids=[f"{i} {x[2]}" for i, x in enumerate(BAD)])
def test_what_cannot_be_answered_is_refused_in_words(at, path, body, says):
    session = at.session()
    sent = dict(content=body) if isinstance(body, bytes) else dict(content=json.dumps(body).encode())
    got = httpx2.post(f"{at.url}/{path}", headers={"x-api-key": session.key}, timeout=60, **sent)
    error = got.json()["error"]
    assert 400 <= got.status_code < 500 and says in error["message"], got.text
    assert got.headers["x-should-retry"] == "false"
    assert got.json().get("type") == ("error" if path == "messages" else None)
    assert error["type"] in ("invalid_request_error", "not_found_error") and not session.points
    with pytest.raises(RuntimeError, match="it asked nothing"): at.collect([session])


def test_errors_are_those_of_the_clients(rollout, at):
    session = at.session()
    with openai.OpenAI(base_url=at.url, api_key=session.key) as client:
        with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not here; this endpoint answers as 'policy'"):
            client.chat.completions.create(model="gpt-4o", messages=USER)
        with pytest.raises(openai.BadRequestError, match="frequency_penalty=0.5 is not supported") as e:
            client.chat.completions.create(model="policy", messages=USER, frequency_penalty=.5)
        assert e.value.param == "frequency_penalty" and e.value.code == "unsupported_parameter"
        with pytest.raises(openai.NotFoundError, match="POST to chat/completions"): client.embeddings.create(
            model="policy", input="a")
        got = client.chat.completions.with_raw_response.create(model="policy", messages=USER, temperature=0., seed=3)
        assert set(got.headers["x-ignored-parameters"].split(", ")) == {"temperature", "seed"}
    assert {"temperature", "seed"} <= set(at.report()["ignored"])
    assert httpx2.get(f"{at.url}/chat/completions").status_code == 405
    with pytest.warns(UserWarning, match=r"temperature=0.0 \(the rollout has 1.0\): that has no effect"):
        at.collect([session])
    assert {"temperature", "seed"} <= set(at.report()["ignored"])
    with Endpoint(rollout, model=None, ignore=["n"]) as other:
        with openai.OpenAI(base_url=other.url, api_key=other.session().key) as client:
            assert client.chat.completions.create(model="gpt-4o", messages=USER, n=4).model == "gpt-4o"


def test_an_engine_that_fails_is_an_error_and_then_answers_again():
    broken = net()
    with torch.no_grad(): broken.lm_head.weight.fill_(float("nan"))
    r = engine(broken)
    with Endpoint(r) as at:
        session = at.session()
        with openai.OpenAI(base_url=at.url, api_key=session.key) as client:
            with pytest.raises(openai.InternalServerError, match="the engine failed: .*not finite"): chat(client)
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(client.chat.completions.create(model="policy", messages=USER, stream=True))
            assert session.draws == 2           # nothing was tried again
            r.load(Policy(net(), lr=1e-3, device="cpu").weights())
            chat(client)
        assert at.collect([session]).n_turns.tolist() == [1] and not r.shared.under_way


# -- the server

def test_it_listens_on_the_loopback_interface_only(at):
    assert at.served.socket.getsockname()[0] == "127.0.0.1"
    got = httpx2.post(f"{at.url}/chat/completions", json={}, headers=dict(host="evil.example:80"))
    assert got.status_code == 400 and "host" in got.text.lower()
    try: own = {x[4][0] for x in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError: own = set()                    # a machine that does not know its own name
    for address in own - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError): socket.create_connection((address, at.served.port), timeout=2).close()


def test_a_server_that_does_not_start_says_why():
    class Fails(Served):
        async def serve(self): raise OSError("no event loop today")
    with pytest.raises(RuntimeError, match=r"the server on port \d+ has not started: OSError: no event loop today"):
        Fails(lambda *_: None, "127.0.0.1", 0)


def test_closing_ends_everything_that_was_opened(rollout):
    "Its threads, its socket, and the calls under way; a hundred batches leave no session."
    at = Endpoint(rollout)
    session = at.session()
    box = []
    def late():
        with openai.OpenAI(base_url=at.url, api_key=session.key) as client:
            try: chat(client)
            except openai.APIError as e: box.append(e)
    with rollout.lock:
        thread = threading.Thread(target=late)
        thread.start()
        wait_until(lambda: session.tasks and at.state.requests.waits)
        with pytest.raises(RuntimeError, match="it asked nothing"): at.collect([session])
        thread.join(timeout=60)
    assert isinstance(box[0], openai.AuthenticationError) and "this session has ended" in str(box[0])
    def agent(base_url, api_key): return httpx2.post(
        f"{base_url}/chat/completions", json=dict(model="policy", messages=USER, max_tokens=1), timeout=60,
        headers=dict(authorization=f"Bearer {api_key}")).status_code
    for k in range(100): assert at.run(agent, asked(rollout.tokenizer, 1), seed=k).reward.tolist() == [200.]
    assert not at.state.sessions and at.report()["calls"] == 100 and not rollout.shared.under_way
    port = at.served.port
    at.close()
    assert not at.served.thread.is_alive() and not at.state.requests.thread.is_alive()
    with pytest.raises(OSError): socket.create_connection(("127.0.0.1", port), timeout=2)
    at.close()
    with Endpoint(rollout, port=port) as again:
        assert again.served.port == port
        with pytest.raises(OSError): Endpoint(rollout, port=port)


def test_without_its_extra_it_says_what_to_install():
    code = ("import sys; import rlblocks; assert not {'starlette', 'uvicorn', 'fastapi'} & set(sys.modules)\n"
            "sys.modules['uvicorn'] = None\nfrom rlblocks.endpoint.serving import app_of\n"
            "try: app_of(None)\nexcept ImportError as e: print(e)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Endpoint needs Starlette and uvicorn: pip install -e '.[endpoint]'" in run.stdout, run.stderr[-2000:]
    with pytest.raises(TypeError, match="a Rollout of this process is wanted"): Endpoint("a model")


# -- texts continued and scored, for harnesses (tests/harness asks with the packages themselves)
def test_texts_are_continued_and_scored_under_the_endpoint_s_own_key(at, rollout):
    client = openai.OpenAI(base_url=at.url, api_key=at.token, max_retries=0)
    def ask(**how): return client.completions.create(model="policy", **how)
    texts = ["Say 1.", "Say 12."]
    asked_for = [t for t in texts for _ in range(2)]
    found = ask(prompt=texts, n=2, max_tokens=4, temperature=1, seed=3, echo=True, logprobs=2)
    assert [c.index for c in found.choices] == [0, 1, 2, 3] and found.usage.completion_tokens <= 16
    again = ask(prompt=texts, n=2, max_tokens=4, temperature=1, seed=3)
    assert [c.text for c in found.choices] == [t + c.text for t, c in zip(asked_for, again.choices, strict=True)]
    for text, c in zip(asked_for, found.choices, strict=True):
        marks, n = c.logprobs, len(rollout.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert "".join(marks.tokens[:n]) == text and marks.token_logprobs[0] is None
        assert all(x <= 0 for x in marks.token_logprobs[1:]) and len(marks.tokens) > n
        assert all(w in top and max(top.values()) >= x for w, x, top in list(
            zip(marks.tokens, marks.token_logprobs, marks.top_logprobs, strict=True))[1:])
    greedy = ask(prompt=texts[0], max_tokens=8, temperature=0).choices[0].text
    cut = ask(prompt=texts[0], max_tokens=8, temperature=0, stop=greedy[2]).choices[0]
    assert cut.text == greedy.split(greedy[2])[0] and cut.finish_reason == "stop"
    for how, wrong in [(dict(prompt=[]), "prompt is empty"), (dict(prompt="a", logprobs=65), "logprobs=65"),
                       (dict(prompt=[10**6]), "the id 1000000"), (dict(prompt="a", max_tokens=10**6), "positions"),
                       (dict(prompt="a", best_of=2), "best_of")]:
        with pytest.raises(openai.BadRequestError, match=wrong): ask(**how)
    other = openai.OpenAI(base_url=at.url, api_key=at.session().key, max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="own key"): other.completions.create(model="m", prompt="a")
