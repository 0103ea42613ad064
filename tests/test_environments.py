"""Episodes become rows: what was sampled is trained, what hangs is named, and a rewritten history is another row of the
same unit (LAWS 4, 6, 19, 23, 29)."""
import asyncio
import signal
import socket
import sys
import threading
import time
import warnings

import pytest
import torch
from clock import Clock
from conftest import rarely, vllm_python
from rlblocks import Batch, Endpoint, Policy, Prompts, Rollout, aggregate, rollouts
from rlblocks.data.renderers import ChatRenderer
from rlblocks.environments.adapters import gym_environment, mixed_environment, tool_environment
from rlblocks.environments.episodes import Environment, Step
from rlblocks.environments.tools import PythonTool
from rlblocks.samplers.sampler import vllm
from test_samplers import WIDE
from tiny import model
from torch.testing import assert_close

CHATML = ("{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
          "{% if add_generation_prompt %}<turn>assistant\n{% endif %}")
HEADED = ("{{ '<turn>system\nBe brief.<end>\n' }}{% for m in messages %}<turn>{% if m.role == 'tool' %}user\n"
          "[{{ m.content }}]{% else %}{{ m.role }}\n{{ m.content }}{% endif %}<end>{% endfor %}"
          "{% if add_generation_prompt %}<turn>assistant\n{% endif %}")
# what the assistant said before is cut to its first two characters as soon as somebody answers
FORGETS = ("{% for m in messages %}<turn>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
           "{{ m.content[:2] }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
           "{% if add_generation_prompt %}<turn>assistant\n{% endif %}")
TEMPLATES = dict(chatml=CHATML, headed=HEADED, forgets=FORGETS)


def spelling(template=None):
    "A tokenizer of pairs and single characters: encode(decode(ids)) is often not ids."
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    letters = {c: i for i, c in enumerate("\n" + "".join(map(chr, range(32, 127))))}
    pairs = [(a, b) for a in "aeiou" for b in "nrst"]
    ids = letters | {a + b: len(letters) + i for i, (a, b) in enumerate(pairs)}
    made = Tokenizer(models.BPE(ids, merges=pairs, fuse_unk=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]+"), "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", additional_special_tokens=["<turn>"])
    made.chat_template = template
    return made


SIZE = 120      # ids, special ones included


def net():
    made = model(**WIDE | dict(vocab_size=SIZE, max_position_embeddings=512, eos_token_id=None))
    with torch.no_grad():
        for w in made.parameters(): w *= 2 if w.dim() > 1 else 1
    return made


@pytest.fixture(scope="module", params=["hf", "vllm"])
def rollout(request):
    "One engine for the tests of this file."
    if request.param == "vllm" and vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    engine = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python()) if request.param == "vllm" else "hf"
    tokenizer = spelling(CHATML)
    assert len(tokenizer) <= SIZE
    made = Rollout(net(), engine=engine, max_tokens=8, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    yield made
    made.close()


def asked(tokenizer, n=3):
    rows = [dict(prompt=[dict(role="user", content=f"Say {k}.")], messages=[dict(role="user", content=f"Say {k}.")],
                 turns=k) for k in range(1, n + 1)]
    return Prompts(rows, tokenizer, shuffle=False).take(n)


class Talk:
    "Goes on for some turns."
    last = 5
    def __init__(self): self.n = 0
    async def reset(self, **row): return row["messages"]
    async def step(self, message):
        self.n += 1
        if self.n >= self.last: return Step(done=True, reward=1.)
        return Step([dict(role="tool" if self.n % 2 else "user", content=f"Turn {self.n}")], reward=.25)


def gap(b):
    "How far the trainer's log-probs are from the sampler's."
    return float((Policy(net(), device="cpu", frozen=True).logprobs(b) - b.rollout_logprobs)[b.mask].abs().max())


class Spy:
    "A tokenizer that remembers which texts it was asked to encode."
    def __init__(self, tokenizer): self.inner, self.encoded = tokenizer, []
    def __getattr__(self, name): return getattr(self.inner, name)
    def __call__(self, text, add_special_tokens=True, **more):
        self.encoded += [text] if isinstance(text, str) else list(text)
        return self.inner(text, add_special_tokens=add_special_tokens, **more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_five_turns_with_three_templates(rollout, name):
    "LAWS 4 and 29. A template that rewrites history gives several rows of one unit, and nothing is lost."
    tokenizer = Spy(spelling(TEMPLATES[name]))
    b = rollouts(rollout, Talk, asked(tokenizer), group_size=2, seed=0, renderer=ChatRenderer(tokenizer))
    assert gap(b) < 1e-3 and b.mask.equal(b.turn >= 0)
    units = b.unit.tolist()
    assert len(set(units)) == 6 == b.n_units and b.n_turns.tolist() == [5]*len(b)
    assert len(b) == 6 if name != "forgets" else len(b) > 6
    for u in set(units):
        turns = torch.cat([b.turn[i][b.turn[i] >= 0] for i in range(len(b)) if units[i] == u])
        assert turns.unique().tolist() == [0, 1, 2, 3, 4] and turns.equal(turns.sort().values)
    assert b.reward.tolist() == [2.]*len(b) and set(b.finish_reason) <= {"completed", "max_tokens"}
    said = {text for rows in b.messages for m in rows if m["role"] == "assistant" and len(text := m["content"]) > 3}
    assert not [t for t in tokenizer.encoded if any(text in t for text in said)]


class Compacts(Talk):
    "After two turns what was said is short: the second turn stays, with its ids."
    async def step(self, message):
        said = await super().step(message)
        if self.n != 2: return said
        return Step([dict(role="user", content="Go on.")], history=[dict(role="user", content="So far:"), message])


class Asks(Talk):
    "Has a sub-agent of two turns, and asks another the same: three rows."
    ask = None
    async def step(self, message):
        if self.n == 0:
            asked = [dict(role="user", content="Aside?")]
            said = await self.ask(asked)
            assert (await self.ask([*asked, said, dict(role="user", content="Again?")]))["role"] == "assistant"
            await self.ask(asked)
        return await super().step(message)


@pytest.mark.parametrize(("env", "rows", "turns"), [(Compacts, 2, 5), (Asks, 3, 8)])
def test_an_episode_of_several_rows_is_one_unit(rollout, env, rows, turns):
    "Every token that was sampled is trained once, in the row that it was sampled in."
    b = rollouts(rollout, env, asked(rollout.tokenizer, 2), group_size=2, seed=5)
    assert gap(b) < 1e-3 and b.n_units == 4 and len(b) == 4*rows and set(b.n_turns.tolist()) == {turns}
    for u in b.unit.unique():
        said = b.turn[(b.unit == u)[:, None] & b.mask]
        assert said.unique().tolist() == list(range(turns))
    again = rollouts(rollout, env, asked(rollout.tokenizer, 2), group_size=2, seed=5)
    assert again.tokens.equal(b.tokens) and again.unit.equal(b.unit)
    if env is Compacts:
        want, row = b.tokens[0][b.turn[0] == 1].tolist(), b.tokens[1].tolist()
        assert any(row[i:i+len(want)] == want for i in range(len(row))) and b.messages[1][0]["content"] == "So far:"


def test_an_episode_counts_once_however_many_rows_it_has(rollout):
    "The token mean does not see the forks; the mean of episodes is that of groups, where a group is a unit."
    b = rollouts(rollout, Compacts, asked(rollout.tokenizer, 2), group_size=2, seed=5)
    x = torch.where(b.mask, torch.sin(b.tokens.double()), 0.)
    first = b.unit.diff(prepend=torch.tensor([-1])) != 0
    of = lambda u: x[b.unit == u].sum()/b.mask[b.unit == u].sum()
    assert first.sum() == 4
    torch.testing.assert_close(aggregate(x, b.mask, over="tokens", denom=b), x.sum()/b.mask.sum())
    b["group"] = b.unit
    want = sum(of(u) for u in b.unit.unique())/4
    torch.testing.assert_close(aggregate(x, b.mask, over="groups", denom=b), want)
    parts = [aggregate(x[rows], p.mask, over="groups", denom=p) for rows, p in cuts(b)]
    torch.testing.assert_close(sum(parts), want)


def test_words_that_a_template_shortens_are_counted():
    "They cannot keep their ids; what nobody shortens does, and a warning says so."
    r = small()
    with pytest.warns(UserWarning, match="encoded from their text .column retokenised"):
        b = rollouts(r, Talk, asked(r.tokenizer), renderer=ChatRenderer(spelling(TEMPLATES["forgets"])))
    assert int(b.retokenised.max()) > 0 and set(b.n_calls.tolist()) == {0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        b = rollouts(r, Compacts, asked(r.tokenizer), renderer=ChatRenderer(spelling(CHATML)))
    assert not b.retokenised.any() and len(b) == 6


class AsksAtOnce:
    ask = None
    async def reset(self, **row): return row["messages"]
    async def step(self, message):
        asks = [self.ask([dict(role="user", content=f"Aside {k}?")]) for k in range(8)]
        said = await asyncio.gather(*asks, return_exceptions=True)
        return Step(done=True, reward=float(sum(isinstance(x, RuntimeError) for x in said)))


def test_turns_side_by_side_do_not_pass_the_budget():
    "Sub-agents that are asked at once, after a first turn of at most 8 tokens."
    r = small()
    b = rollouts(r, AsksAtOnce, asked(r.tokenizer), budget=20, max_tokens=8)
    for u in set(b.unit.tolist()): assert 1 < int(b.mask[b.unit == u].sum()) <= 20
    assert b.reward.min() > 0 and b.unit.unique().numel() == 3       # some were refused


def cuts(b):
    "Two parts between units, with the numbers of their rows."
    b["row"] = torch.arange(len(b))
    return [(p.row, p) for p in b.parts(2)]


def test_ids_that_would_change_are_those_that_were_sampled(rollout):
    "In this tokenizer two characters that were sampled apart are encoded as one: rows keep them apart."
    b = rollouts(rollout, Talk, asked(rollout.tokenizer), group_size=4, seed=1)
    text = lambda ids: rollout.tokenizer.decode(ids)
    again = [rollout.tokenizer(text(row[:n]), add_special_tokens=False).input_ids == row[:n].tolist()
             for row, n in zip(b.tokens, b.lengths.tolist(), strict=True)]
    assert not all(again) and gap(b) < 1e-3


def test_episodes_are_their_seeds(rollout):
    a, b = (rollouts(rollout, Talk, asked(rollout.tokenizer), group_size=2, seed=3) for _ in range(2))
    assert a.tokens.equal(b.tokens) and len({tuple(x) for x in a.tokens.tolist()}) == 6
    alone = rollouts(rollout, Talk, asked(rollout.tokenizer)[[1]], group_size=2, seed=3)
    assert alone.tokens[0, :alone.lengths[0]].equal(a.tokens[2, :a.lengths[2]])


def test_budgets_have_names(rollout):
    p = asked(rollout.tokenizer)
    b = rollouts(rollout, Talk, p, max_turns=2)
    assert b.finish_reason == ["max_turns"]*3 and b.n_turns.tolist() == [2]*3
    b = rollouts(rollout, Talk, p, budget=10)
    assert b.finish_reason == ["max_tokens"]*3 and int(b.mask.sum(1).max()) <= 10
    class Long(Talk):
        async def step(self, message): return [dict(role="user", content="x"*200)]
    b = rollouts(rollout, Long, p)
    assert b.finish_reason == ["context_overflow"]*3 and int(b.lengths.max()) <= 512


def test_64_episodes_of_which_one_never_ends_and_one_loses_its_server(rollout):
    "LAWS 23: the others arrive by the deadline, and both are named."
    began = time.monotonic()
    rollouts(rollout, Talk, asked(rollout.tokenizer, 8), group_size=8, max_tokens=3)
    enough = 5 + 8*(time.monotonic() - began)       # on this machine, with its other work
    made, closed = [], []
    class Frail(Talk):
        def __init__(self):
            super().__init__()
            made.append(self)
            self.number, self.last = len(made), 1 + len(made) % 20
        async def step(self, message):
            if self.number == 7: await asyncio.sleep(3600)
            if self.number == 20: raise ConnectionError("the server of this environment died")
            return await super().step(message)
        async def close(self): closed.append(self.number)
    with Clock() as clock, pytest.warns(UserWarning, match="2 of 64 episodes did not arrive") as heard:
        b = rollouts(rollout, Frail, asked(rollout.tokenizer, 8), group_size=8, max_tokens=3, deadline=enough)
    assert clock.seconds < enough + 15 and len(b) == 62 and gap(b) < 1e-3
    text = str(heard[0].message)
    assert "sample 6 of group 0" in text and "sample 3 of group 2: ConnectionError: the server" in text
    assert sorted(closed) == list(range(1, 65)) and not rollout.shared.under_way


def test_plain_methods_that_hang_hold_nobody_up():
    tokenizer = spelling(CHATML)
    r = Rollout(net(), max_tokens=3, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    class Hangs:
        def reset(self, messages, **row): return messages
        def step(self, message): time.sleep(3600)
    before = set(threading.enumerate()) # other tests' threads may run in this process
    with pytest.raises(RuntimeError, match="3 of 3 episodes did not arrive: sample 0 of group 0: it had not ended"):
        rollouts(r, Hangs, asked(tokenizer), deadline=1.)
    assert all(t.daemon for t in set(threading.enumerate()) - before)
    assert len(rollouts(r, Talk, asked(tokenizer))) == 3


def small():
    tokenizer = spelling(CHATML)
    return Rollout(net(), max_tokens=3, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)


class Exits(Talk):
    def step(self, message): sys.exit("a tool that parses arguments")
class Runs_out(Talk):
    def step(self, message): return next(iter(()))
class Ends_the_process(Talk):
    async def step(self, message): raise SystemExit("no")
class Cancels(Talk):
    async def step(self, message): raise asyncio.CancelledError


@pytest.mark.parametrize("env", [Exits, Runs_out, Ends_the_process, Cancels])
def test_what_ends_an_environment_ends_no_other(env):
    "`sys.exit` in a tool, a `next` at its end: the episode is named, the trainer and its thread stay."
    r, n = small(), iter(range(9))
    def mixed(): return env() if next(n) == 1 else Talk()
    with pytest.warns(UserWarning, match="1 of 3 episodes did not arrive"):
        assert len(rollouts(r, mixed, asked(r.tokenizer))) == 2


async def env_is_cancelled(): raise asyncio.CancelledError


async def env_cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(600)


async def env_cancels_all():
    "And goes on: its next turn finds nobody who asks the engine."
    for task in asyncio.all_tasks() - {asyncio.current_task()}: task.cancel()
    return [dict(role="user", content="x")]


async def env_interrupts(): raise KeyboardInterrupt


async def env_has_a_task_that_leaves():
    async def leaves(): sys.exit(3)
    await asyncio.create_task(leaves())


class Mute(Exception):
    def __str__(self): raise RuntimeError("no words")


class Leaves(Exception):
    def __str__(self): sys.exit(4)


async def env_has_no_words(): raise Mute


async def env_leaves_for_want_of_words(): raise Leaves


async def env_is_infinite(): return Step(done=True, reward=1e39)


async def env_is_no_number(): return Step(done=True, reward=float("inf") - float("inf"))


@pytest.mark.parametrize(("bad", "says"), [
    (env_is_cancelled, "it was cancelled"), (env_cancels_itself, "it was cancelled"),
    (env_cancels_all, "RuntimeError: CancelledError"), (env_interrupts, "KeyboardInterrupt"),
    (env_has_a_task_that_leaves, "SystemExit: 3"), (env_has_no_words, "Mute"),
    (env_leaves_for_want_of_words, "SystemExit: 4"), (env_is_infinite, "its reward is 1e.39"),
    (env_is_no_number, "its reward is nan")])
def test_an_environment_that_ends_oddly_loses_its_own_rows_only(bad, says):
    "The others have ended: their rows stay, and their rewards."
    r, ended = small(), []
    class Odd(Talk):
        async def step(self, message):
            if self.task == 1:
                while len(ended) < 2: await asyncio.sleep(.01)
                await asyncio.sleep(.05)
                return await bad()
            ended.append(self)
            return Step(done=True, reward=1.)
        async def reset(self, messages, **row):
            self.task = next(n)
            return messages
    n = iter(range(3))
    with pytest.warns(UserWarning, match="1 of 3 episodes did not arrive: .*" + says):
        b = rollouts(r, Odd, asked(r.tokenizer), deadline=120)
    assert b.reward.tolist() == [1., 1.] and not r.shared.under_way


def test_constructors_connect_side_by_side_and_are_part_of_the_deadline():
    r, meet = small(), threading.Barrier(3)
    class Connects(Talk):
        def __init__(self):
            super().__init__()
            meet.wait(60.)
    assert len(rollouts(r, Connects, asked(r.tokenizer))) == 3


@pytest.mark.parametrize("there", [True, False], ids=["its loop runs", "its loop has ended"])
def test_a_constructor_that_ends_after_its_episode_is_closed(there):
    "What it connected to would stay open: a session for every late episode."
    from rlblocks.environments.episodes import created
    began, go, closed = threading.Event(), threading.Event(), threading.Event()
    class Slow:
        def __init__(self): began.set(); go.wait()
        async def close(self): closed.set()
    async def give_up():
        task = asyncio.ensure_future(created(Slow))
        while not began.is_set(): await asyncio.sleep(.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        if there:
            go.set()
            while not closed.is_set(): await asyncio.sleep(.001)
    asyncio.run(asyncio.wait_for(give_up(), 60))
    go.set()
    assert closed.wait(60)


def test_an_async_method_that_blocks_all_others_ends_by_the_deadline():
    r, go = small(), threading.Event()
    class Blocks(Talk):
        async def step(self, message): go.wait(600.)
    try:
        with Clock() as clock, pytest.raises(RuntimeError, match="does not give way"):
            rollouts(r, Blocks, asked(r.tokenizer), deadline=.5)
        assert clock.seconds < 60
    finally: go.set()


def test_an_interrupt_stops_the_episodes():
    "Ctrl-C: no environment takes a step behind the caller's back, and the engine has nothing under way."
    r, steps, first = small(), [], threading.Event()
    class Endless(Talk):
        async def step(self, message):
            steps.append(1)
            first.set()
            time.sleep(.1)      # the interrupt comes now; the two others have their answers already
            return [dict(role="user", content="x")]
    main = threading.get_ident()
    def interrupt():
        first.wait(60.)
        signal.pthread_kill(main, signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # ignored in what a shell starts with &
    try:
        with pytest.raises(KeyboardInterrupt): rollouts(r, Endless, asked(r.tokenizer), max_tokens=1)
    finally: signal.signal(signal.SIGINT, before)
    n = len(steps)
    time.sleep(.3)
    assert len(steps) == n and not r.shared.under_way
    assert len(rollouts(r, Talk, asked(r.tokenizer))) == 3


def test_units_of_two_calls_are_apart():
    r = small()
    data = Prompts([dict(prompt=[dict(role="user", content="a")], messages=[dict(role="user", content="a")])]*4,
                   r.tokenizer, shuffle=False)
    a, b = (rollouts(r, Talk, data.take(2), group_size=n) for n in (2, 3))
    assert Batch.cat([a, b]).n_units == 10


def test_an_environment_cannot_change_the_record():
    r = small()
    class Vandal(Talk):
        async def step(self, message):
            message["content"] = "I said nothing"
            return await super().step(message)
    b = rollouts(r, Vandal, asked(r.tokenizer))
    assert not any(m["content"] == "I said nothing" for row in b.messages for m in row) and gap(b) < 1e-3


def test_a_reward_of_none_is_no_reward():
    r = small()
    class Unscored(Talk):
        async def step(self, message): return None
        def get_reward(self): return None
    assert rollouts(r, Unscored, asked(r.tokenizer)).reward.isnan().all()
    p = asked(r.tokenizer)
    p["reward"] = torch.zeros(3)
    with pytest.raises(ValueError, match="a column 'reward', which rollouts writes itself"): rollouts(r, Talk, p)


def test_an_engine_that_fails_is_everybodys_error():
    tokenizer = spelling(CHATML)
    broken = net()
    with torch.no_grad(): broken.lm_head.weight.fill_(float("nan"))
    r = Rollout(broken, max_tokens=3, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    with pytest.raises(RuntimeError, match="6 of 6 episodes did not arrive.*not finite"):
        rollouts(r, Talk, asked(tokenizer), group_size=2)
    assert not r.shared.under_way


class Sums:
    "As TRL's `environment_factory` takes it."
    def reset(self, **row): self.calls = 0
    def add(self, a:int, b:int)->int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        self.calls += 1
        return a + b
    def get_reward(self): return float(self.calls)


def test_a_class_whose_methods_are_tools(rollout):
    "The policy's words are random, so a reader of them makes the calls."
    from rlblocks import Response
    seen = []
    def read(text):
        seen.append(text)
        return Response(text, tool_calls=(dict(name="add", arguments=dict(a=1, b=2)),))
    renderer = ChatRenderer(rollout.tokenizer, read=read)
    p = asked(rollout.tokenizer, 1)
    b = rollouts(rollout, tool_environment(Sums), p, max_tool_calls=2, renderer=renderer)
    assert b.finish_reason == ["max_tool_calls"] and b.reward.tolist() == [2.]
    assert [m["content"] for m in b.messages[0] if m["role"] == "tool"] == ["3", "3"] and gap(b) < 1e-3
    b = rollouts(rollout, tool_environment(Sums), p)
    assert b.finish_reason[0] in ("completed", "max_tokens") and b.reward.tolist() == [0.]
    assert isinstance(tool_environment(Sums)(), Environment)


def test_a_call_that_cannot_be_read_is_an_error_only_where_it_was_written_to_its_end():
    from rlblocks import Response
    r = small()
    bad = ChatRenderer(r.tokenizer, read=lambda text: Response(text, problem="no JSON"))
    b = rollouts(r, tool_environment(Sums, on_problem="end"), asked(r.tokenizer), group_size=8, max_tokens=100,
                 renderer=bad)
    whole = [row[n - 1] == r.tokenizer.eos_token_id for row, n in zip(b.tokens.tolist(), b.lengths, strict=True)]
    assert b.finish_reason == ["parse_error" if x else "max_tokens" for x in whole] and set(whole) == {True, False}


def test_tools_that_are_known_after_reset():
    "An environment may learn from its row, or from a server, which tools it has."
    r, seen = small(), []
    class Renders(ChatRenderer):
        def render_ids(self, messages, *, tools=None, **how):
            seen.append(tools)
            return super().render_ids(messages, tools=tools, **how)
    class Learns(Talk):
        tools = None
        async def reset(self, turns, **row): self.tools = [dict(type="function", function=dict(name=f"tool_{turns}"))]
    rollouts(r, Learns, asked(r.tokenizer), max_turns=1, renderer=Renders(r.tokenizer))
    assert sorted(t[0]["function"]["name"] for t in seen) == ["tool_1", "tool_2", "tool_3"]


class HandsIn(Sums):
    def hand_in(self, answer:int):
        """Hand in the answer.

        Args:
            answer: a number
        """
        self.calls += 1
        return Step([dict(role="tool", content="Thank you.")], reward=float(answer), done=True, finish="tool_stopped")


def reader_of(*calls):
    "Random words are read as these calls."
    from rlblocks import Response
    return lambda text: Response(text, tool_calls=tuple(dict(name=name, arguments=given) for name, given in calls))


@pytest.mark.filterwarnings("ignore")       # TRL calls it experimental
def test_an_environment_that_trl_ships():
    "Its tool and its schema as they are. Its sandbox wants Docker, so commands are answered here."
    harbor = pytest.importorskip("trl.experimental.harbor")
    class Local(harbor.HarborBashEnv):
        def __init__(self): pass        # a thread for its sandbox, which its end waits for
        def __del__(self): pass
        def reset(self, task_dir, **row): return f" Task {task_dir}."
        def _exec(self, command, timeout=180): return f"$ {command}"
    r = small()
    p = asked(r.tokenizer, 1)
    p["task_dir"] = ["one"]
    renderer = ChatRenderer(r.tokenizer, read=reader_of(("bash", dict(command="ls"))))
    b = rollouts(r, tool_environment(Local), p, max_turns=2, renderer=renderer)
    assert [m["content"] for m in b.messages[0]][::2] == ["Say 1. Task one.", "$ ls"] and b.reward.isnan().all()
    [tool] = tool_environment(Local)().tools
    assert tool["function"]["name"] == "bash" and "shell command" in tool["function"]["description"]


def test_a_tool_may_end_the_episode():
    "What is called behind it is not called."
    r = small()
    read = reader_of(("add", dict(a=1, b=2)), ("hand_in", dict(answer=3)), ("add", dict(a=1, b=2)))
    b = rollouts(r, tool_environment(HandsIn), asked(r.tokenizer), max_tokens=40,
                 renderer=ChatRenderer(r.tokenizer, read=read))
    assert b.n_turns.tolist() == [1]*3 and b.reward.tolist() == [5.]*3        # 3, and 2 calls
    assert b.finish_reason == ["tool_stopped"]*3 and b.n_calls.tolist() == [3]*3


def test_why_an_episode_ended_is_one_of_a_closed_list():
    with pytest.raises(ValueError, match="Step: finish='won'; one of completed, tool_stopped, max_turns, max_tokens, "):
        Step(done=True, finish="won")


def test_what_a_tool_raises_is_counted_and_named_once():
    "Its text is the tool's answer, so a bug would look like a policy that calls it wrongly."
    class Broken(Sums):
        def add(self, a:int, b:int)->int:
            """Add.

            Args:
                a: the first
                b: the second
            """
            return a + c    # noqa: F821
    r, env = small(), tool_environment(Broken)
    how = dict(max_turns=2, renderer=ChatRenderer(r.tokenizer, read=reader_of(("add", dict(a=1, b=2)), ("sub", {}))))
    with pytest.warns(UserWarning, match="calls of tools failed; .* of each kind: add: NameError: name 'c' is not"
                                         " defined; sub: LookupError: no tool 'sub'"):
        b = rollouts(r, env, asked(r.tokenizer), **how)
    assert b.n_calls.tolist() == b.failed_calls.tolist() == [4]*3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rollouts(r, env, asked(r.tokenizer), **how).failed_calls.tolist() == [4]*3


def test_calls_of_tools_run_as_many_at_once_as_they_say():
    "Over all episodes. A call waits here for others: without a limit they would be all there, with one they never are."
    import pickle
    class Waits:
        at_once = 2
        def reset(self, **row): return None
        def meet(self, n:int)->str:
            """Wait for others.

            Args:
                n: how many
            """
            with lock: running.append(1); most.append(len(running))
            try: doors[n].wait(60)
            finally:
                with lock: running.pop()
            return "met"
    lock, running, most = threading.Lock(), [], []
    doors = {n: threading.Barrier(n) for n in (2, 3, 6)}
    async def all_of(env, n):
        call = dict(role="assistant", content="", tool_calls=[dict(function=dict(name="meet", arguments=dict(n=n)))])
        steps = await asyncio.gather(*(env().step(call) for _ in range(6)))
        assert [s.messages[0]["content"] for s in steps] == ["met"]*6
    env = tool_environment(Waits)
    loops = [threading.Thread(target=asyncio.run, args=(all_of(env, 2),)) for _ in range(2)]
    for thread in loops: thread.start()                 # side by side: two rollouts, an event loop each
    for thread in loops: thread.join()
    assert len(most) == 12 and max(most) == 2
    asyncio.run(all_of(tool_environment(Waits, at_once=3), 3))
    assert max(most) == 3
    Waits.at_once = None
    asyncio.run(all_of(tool_environment(Waits), 6))
    assert max(most) == 6
    env = tool_environment(Sums, at_once=4)
    asyncio.run(env().step(dict(tool_calls=[])))
    assert pickle.loads(pickle.dumps(env)).at_once == 4
    with pytest.raises(ValueError, match="tool_environment: at_once"): tool_environment(Waits, at_once=0)


def test_a_call_that_is_cancelled_gives_its_turn_to_the_next():
    "Whether it waits for its turn, or has it already and does not know yet."
    from rlblocks.environments.adapters import Gate
    async def run(n, late):
        gate, ran = Gate(1), []
        async def one(k):
            async with gate: ran.append(k); await asyncio.sleep(.01)
        await gate.__aenter__()
        waiting = [asyncio.create_task(one(k)) for k in range(n)]
        await asyncio.sleep(0)
        if late: gate.leave()
        waiting[0].cancel()
        if not late: gate.leave()
        await asyncio.wait(waiting)
        return ran, gate.free, len(gate.waiting)
    for late in (False, True): assert asyncio.run(asyncio.wait_for(run(4, late), 60)) == ([1, 2, 3], 1, 0)


def test_a_group_plays_one_game():
    "Without a column `seed` its seed is of the group; wrappers take any keyword."
    seeds = []
    class Game:
        def reset(self, seed=None): seeds.append(seed); return "Go!", {}
        def step(self, action): return "", 1., True, False, {}
    class Wrapped(Game):
        def reset(self, **more): return super().reset(**more)
    r = small()
    for game in (Game, Wrapped):
        p = asked(r.tokenizer, 2)
        rollouts(r, gym_environment(game), p, group_size=3)
        assert sorted(seeds) == sorted(p.group.tolist()*3)
        seeds.clear()
    p["seed"] = torch.tensor([11, 12])
    rollouts(r, gym_environment(Game), p)
    assert sorted(seeds) == [11, 12]


def test_tools_may_ask_the_policy():
    "A sub-agent inside a tool, also where the row names the environment."
    class Delegates:
        ask = None
        def reset(self, **row): return None
        async def delegate(self, task:str)->str:
            """Ask another one.

            Args:
                task: what to do
            """
            return (await self.ask([dict(role="user", content=task)]))["content"]
    r = small()
    p = asked(r.tokenizer, 1)
    p["environment"] = ["agents"]
    read = reader_of(("delegate", dict(task="Go!")))
    for env in (tool_environment(Delegates), mixed_environment(dict(agents=tool_environment(Delegates)))):
        b = rollouts(r, env, p, max_tool_calls=1, renderer=ChatRenderer(r.tokenizer, read=read))
        assert len(b) == 2 and b.unit.unique().numel() == 1 and b.failed_calls.tolist() == [0, 0]
        assert b.messages[1][0]["content"] == "Go!"


def test_a_game_of_five_values(rollout):
    class Game:
        def reset(self): self.n = 0; return "Go!", {}
        def step(self, action):
            self.n += 1
            return f"You said {len(action)}.", .5, False, self.n == 3, {}
    b = rollouts(rollout, gym_environment(Game), asked(rollout.tokenizer, 2))
    assert b.reward.tolist() == [1.5, 1.5] and b.n_turns.tolist() == [3, 3] and set(b.finish_reason) == {"max_turns"}
    assert b.messages[0][0]["content"] == "Say 1.Go!" and gap(b) < 1e-3


def test_a_batch_of_several_environments():
    "Each episode has the tools and the reward of the one that its row names."
    class Other(Sums):
        def get_reward(self): return 7.
    r, seen = small(), []
    p = asked(r.tokenizer)
    p["environment"] = ["sums", "talk", "other"]
    class Renders(ChatRenderer):
        def render_ids(self, messages, *, tools=None, **how):
            seen.append(tools and tools[0]["function"]["name"])
            return super().render_ids(messages, tools=tools, **how)
    env = mixed_environment(dict(sums=tool_environment(Sums), talk=Talk, other=tool_environment(Other)))
    b = rollouts(r, env, p, renderer=Renders(r.tokenizer))
    assert b.reward.tolist() == [0., 2., 7.] and b.n_turns.tolist() == [1, 5, 1] and seen[:3].count("add") == 2


def test_a_text_that_is_no_action_costs_a_turn_and_not_the_episode():
    class Counts:
        def reset(self): return "Go!", {}
        def step(self, action): return str(action), 1., True, False, {}
    def number(text): return int(text)          # random letters are none
    r = small()
    b = rollouts(r, gym_environment(Counts, action=number), asked(r.tokenizer), max_turns=2)
    assert b.n_turns.tolist() == [2]*3 and b.finish_reason == ["max_turns"]*3
    assert all("the action could not be read" in m[2]["content"] for m in b.messages) and gap(b) < 1e-3


def test_a_hundred_batches_leave_nothing_behind():
    "Counted are our own: environments, connections, tasks and threads; other tests of this process have theirs."
    tokenizer = spelling(CHATML)
    rollout = Rollout(net(), max_tokens=1, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    here, there = socket.socketpair()
    made, closed, threads, tasks = [], [], [], []
    class Session(Talk):
        last = 1
        def __init__(self):
            super().__init__()
            made.append(self)
            self.line = socket.fromfd(here.fileno(), here.family, here.type)
        async def reset(self, **row):
            threads.append(threading.current_thread())
            tasks.append(asyncio.current_task())
            return await super().reset(**row)
        def close(self):
            threads.append(threading.current_thread())
            closed.append(self)
            self.line.close()
    p = asked(tokenizer, 1)
    for _ in range(100): rollouts(rollout, Session, p, group_size=2, max_tokens=1)
    for t in threads: t.join(10.)
    assert len(made) == 200 and set(map(id, made)) == set(map(id, closed)) and not rollout.shared.under_way
    assert not any(t.is_alive() for t in threads) and all(t.done() for t in tasks)
    assert all(x.line.fileno() == -1 for x in made)
    here.close(), there.close()


def test_errors_say_what_is_wanted(rollout):
    p = asked(rollout.tokenizer)
    with pytest.raises(RuntimeError, match="TypeError: step gave a int"):
        class Odd(Talk):
            async def step(self, message): return 4
        rollouts(rollout, Odd, p)
    bare = Rollout(net(), max_tokens=3, stop=[1], device="cpu", tokenizer=rollout.tokenizer)
    with pytest.raises(ValueError, match="the chat template ends a turn with"): rollouts(bare, Talk, p)
    with pytest.raises(ValueError, match="max_tokens=0"): rollouts(rollout, Talk, p, max_tokens=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollouts(rollout, Talk, p, max_tokens=1)


# -- an agent over HTTP (tests/test_endpoint.py has the rest)

async def talk(base_url, api_key, messages):
    "The conversation of `Talk`, by an agent that has never heard of environments."
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for n in range(1, 6):
            said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages = [*messages, said.model_dump(), dict(role="tool" if n % 2 else "user", content=f"Turn {n}")]
    return 2.


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_of_an_agent_are_those_of_the_environment_loop(rollout, name):
    "Of the same seeds, column by column; with a template that rewrites history, several rows of one unit."
    renderer = ChatRenderer(spelling(TEMPLATES[name]))
    p = asked(renderer.tokenizer)
    with Endpoint(rollout, renderer=renderer) as at: a = at.run(talk, p, group_size=2, seed=5)
    b = rollouts(rollout, Talk, p, group_size=2, seed=5, renderer=renderer)
    assert len(a) == 6 if name != "forgets" else len(a) > 6
    assert set(a.columns) == set(b.columns) and a.per_row == b.per_row and gap(a) < 1e-3
    for name in ("tokens", "lengths", "prompt_lengths", "mask", "turn", "policy_version", "group", "sample", "unit",
                 "temperature", "n_turns", "duplicate", "reward"): assert a[name].equal(b[name]), name
    assert a.finish_reason == b.finish_reason and a.completion == b.completion
    assert_close(a.rollout_logprobs, b.rollout_logprobs, atol=1e-5, rtol=0)
    assert [[m["content"] for m in x] for x in a.messages] == [[m["content"] for m in x] for x in b.messages]


async def call(base_url, api_key, messages):
    "An agent that asks once."
    import httpx2
    body = dict(model="gpt-4o", messages=messages, max_tokens=3)
    async with httpx2.AsyncClient(timeout=300) as client:
        got = await client.post(f"{base_url}/chat/completions", json=body,
                                headers=dict(authorization=f"Bearer {api_key}"))
    return got.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("rollout", ["vllm"], indirect=True)
def test_an_endpoint_keeps_its_promises_on_an_engine_elsewhere(rollout):
    "200 calls at once, and a stream that is given up, as in tests/test_endpoint.py."
    import httpx2
    from test_endpoint import wait_until
    ask, plan = dict(model="gpt-4o", messages=[dict(role="user", content="Say 1.")]), asked(rollout.tokenizer, 100)
    with Endpoint(rollout) as at:
        b, want = at.run(call, plan, group_size=2, seed=9), rollout.generate(plan, group_size=2, seed=9, max_tokens=3)
        assert len(b) == 200 and b.tokens.equal(want.tokens) and b.n_turns.tolist() == [1]*200
        assert_close(b.rollout_logprobs, want.rollout_logprobs, atol=1e-4, rtol=0)
        session = at.session()
        with rollout.lock, httpx2.Client() as client, client.stream(        # the engine is busy with something else
                "POST", f"{at.url}/chat/completions", json=ask | dict(stream=True),
                headers=dict(authorization=f"Bearer {session.key}")) as got:
            lines = got.iter_lines()
            next(lines)
            wait_until(lambda: session.tasks and at.state.requests.waits)
        wait_until(lambda: not session.tasks and not at.state.requests.waits and not rollout.shared.under_way)
        assert not session.points
        with pytest.raises(RuntimeError, match="it asked nothing"): at.collect([session])


@pytest.mark.parametrize("rollout", rarely("vllm"), indirect=True)
def test_a_hundred_batches_of_agents_leave_nothing_in_an_engine_elsewhere(rollout):
    one = asked(rollout.tokenizer, 1)
    with Endpoint(rollout) as at:
        for k in range(100): assert len(at.run(call, one, seed=k)) == 1
        assert not at.state.sessions and not rollout.shared.under_way and at.report()["calls"] == 100


def test_a_tool_may_have_any_parameter():
    "Also one that is called as a parameter of ours."
    class Solver:
        def reset(self, **row): return None
        def solve(self, method: str) -> str:
            """Solve.

            Args:
                method: Its name.
            """
            return f"by {method}"
    env = tool_environment(Solver)()
    call = dict(function=dict(name="solve", arguments=dict(method="Newton")))
    step = asyncio.run(env.step(dict(role="assistant", content="", tool_calls=[call])))
    assert step.messages[0]["content"] == "by Newton"


def test_python_that_cannot_be_kept_in_is_refused_to_its_user(monkeypatch):
    "Not said to the policy, which would learn from it."
    from rlblocks.graders import sandbox
    monkeypatch.setattr(sandbox, "sandbox_support", lambda: dict.fromkeys(sandbox.PARTS, "not here"))
    with pytest.raises(RuntimeError, match="this system cannot keep a program in"): PythonTool()
