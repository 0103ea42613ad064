"""Adapters on the packages themselves: OpenEnv's server and clients, GEM, TextArena, reasoning-gym. Run by
tests/test_hubs.py with the interpreter of `make hubs`."""
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from rlblocks import (ChatRenderer, Grader, Prompts, Response, Rollout, gym_environment, openenv_environment,
                      openenv_tools, reasoning_gym_reward, reasoning_gym_rows, rollouts, textarena_environment)
from test_environments import CHATML, asked, gap, net, spelling


@pytest.fixture(scope="module")
def rollout():
    tokenizer = spelling(CHATML)
    return Rollout(net(), max_tokens=4, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)


@contextmanager
def served(app):
    "A server in a thread, on a port of its own."
    import uvicorn
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started: time.sleep(.02)
    def stop():
        server.should_exit = server.force_exit = True
        thread.join(60.)
    try: yield f"http://127.0.0.1:{port}", stop
    finally: stop()


@pytest.fixture(scope="module")
def openenv():
    "A real server whose environment counts letters, and how many of its sessions are open."
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    class Say(Action):
        text: str
    class Heard(Observation):
        text: str
    class Letters(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        made, closed = [], []
        def __init__(self):
            super().__init__()
            self.n = 0
            Letters.made.append(id(self))
        def reset(self, seed=None, episode_id=None, **more):
            self.n = 0
            return Heard(text="Say something.")
        def step(self, action, **more):
            self.n += 1
            return Heard(text=f"{len(action.text)} letters.", reward=.5, done=self.n == 3)
        def close(self): Letters.closed.append(id(self))
        @property
        def state(self): return State(step_count=self.n)
    # an app belongs to one event loop, so each server has its own
    return Letters, lambda: create_fastapi_app(Letters, Say, Heard, max_concurrent_envs=64)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_openenv_over_a_websocket(rollout, openenv, sync):
    from openenv.core.generic_client import GenericEnvClient
    Letters, app = openenv
    with served(app()) as (url, _):
        def connect():
            client = GenericEnvClient(base_url=url)
            return client.sync() if sync else client
        env = openenv_environment(connect, action=lambda m: dict(text=m["content"]))
        before = len(Letters.made)
        b = rollouts(rollout, env, asked(rollout.tokenizer), group_size=2, deadline=300.)
        assert b.reward.tolist() == [1.5]*6 and b.n_turns.tolist() == [3]*6 and gap(b) < 1e-3
        assert b.messages[0][0]["content"] == "Say 1.Say something." and "letters." in b.messages[0][2]["content"]
        end = time.monotonic() + 60
        while len(Letters.closed) < len(Letters.made) and time.monotonic() < end: time.sleep(.05)
        assert len(Letters.made) - before >= 6 and set(Letters.closed) >= set(Letters.made[before:])


def test_a_server_of_openenv_that_dies(rollout, openenv):
    "Its episodes are named by the deadline; those of another server arrive."
    from openenv.core.generic_client import GenericEnvClient
    _, app = openenv
    acted = []
    with served(app()) as (url, _), served(app()) as (gone, stop):
        def act(message):
            acted.append(1)
            if len(acted) == 2: stop()
            return dict(text=message["content"])
        well = openenv_environment(lambda: GenericEnvClient(base_url=url), action=lambda m: dict(text=m["content"]))
        bad = openenv_environment(lambda: GenericEnvClient(base_url=gone, message_timeout_s=60.), action=act)
        n = iter(range(99))
        with pytest.warns(UserWarning, match="1 of 4 episodes did not arrive: sample . of group .: ConnectionClosed"):
            b = rollouts(rollout, lambda: bad() if next(n) == 1 else well(), asked(rollout.tokenizer, 2), group_size=2,
                         deadline=300.)
    assert len(b) == 3 and b.reward.tolist() == [1.5]*3


def test_actions_of_openenv_that_cannot_be_read(rollout, openenv):
    from openenv.core.generic_client import GenericEnvClient
    _, app = openenv
    def number(message): return dict(text=str(int(message["content"])))     # random letters are none
    with served(app()) as (url, _):
        env = openenv_environment(lambda: GenericEnvClient(base_url=url), action=number)
        b = rollouts(rollout, env, asked(rollout.tokenizer, 2), max_turns=2, deadline=300.)
        ends = openenv_environment(lambda: GenericEnvClient(base_url=url), action=number, on_problem="end")
        e = rollouts(rollout, ends, asked(rollout.tokenizer, 2), deadline=300.)
    assert b.n_turns.tolist() == [2, 2] and "could not be read" in b.messages[0][2]["content"] and gap(b) < 1e-3
    assert e.n_turns.tolist() == [1, 1] and set(e.finish_reason) <= {"parse_error", "max_tokens"}


@pytest.fixture
def tools():
    "A real server whose environment has a tool, and pays for its calls."
    from fastmcp import FastMCP
    from openenv.core.env_server import Action, Observation, State, create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    class Adds(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        def __init__(self):
            server = FastMCP("adds")
            @server.tool
            def add(a:int, b:int)->int:
                "Add two numbers."
                return a + b
            super().__init__(server)
            self.n = 0
        def reset(self, seed=None, episode_id=None, **more): return Observation()
        def _step_impl(self, action, **more): return Observation()
        def step(self, action, **more):
            made = super().step(action, **more)
            if type(action).__name__ == "CallToolAction": self.n, made.reward = self.n + 1, .25
            made.done = self.n == 3
            return made
        async def step_async(self, action, **more):
            made = await super().step_async(action, **more)
            if type(action).__name__ == "CallToolAction": self.n, made.reward = self.n + 1, .25
            made.done = self.n == 3
            return made
        @property
        def state(self): return State(step_count=self.n)
    return create_fastapi_app(Adds, Action, Observation, max_concurrent_envs=64)


@pytest.mark.parametrize("http", [False, True], ids=["websocket", "http"])
def test_tools_of_openenv(rollout, tools, http):
    "The policy's words are random, so a reader of them makes the calls."
    from openenv.core.mcp_client import MCPToolClient
    given = iter([dict(a=1, b=2), dict(a="x", b=2)]*20)
    renderer = ChatRenderer(rollout.tokenizer, read=lambda text: Response(
        text, tool_calls=(dict(name="add", arguments=next(given)),)))
    with served(tools) as (url, _):
        def connect():
            client = MCPToolClient(base_url=url)
            client.use_production_mode = http
            return client
        b = rollouts(rollout, openenv_tools(connect), asked(rollout.tokenizer, 1), max_turns=4, deadline=300.,
                     renderer=renderer)
    said = [m["content"] for m in b.messages[0] if m["role"] == "tool"]
    assert said[0] == "3" and said[1].startswith("error: ") and gap(b) < 1e-3
    if http: assert b.n_turns.tolist() == [4] and b.reward.isnan().all()    # this protocol knows neither
    else: assert b.n_turns.tolist() == [3] and b.reward.tolist() == [.75]


def test_gem(rollout):
    import gem
    b = rollouts(rollout, gym_environment(lambda: gem.make("game:GuessTheNumber-v0-easy")), asked(rollout.tokenizer, 2),
                 max_turns=3)
    assert len(b) == 2 and not b.reward.isnan().any() and gap(b) < 1e-3 and len(b.messages[0]) > 1


def test_textarena(rollout):
    "Two random players of a guessing game: each is told the rules, and what came of its words."
    import textarena
    b = rollouts(rollout, textarena_environment(lambda: textarena.make("GuessTheNumber-v0")),
                 asked(rollout.tokenizer, 2))
    assert len(b) == 2 and not b.reward.isnan().any() and gap(b) < 1e-3
    assert all("Guess" in row[0]["content"] for row in b.messages)


def test_a_group_plays_one_game_of_textarena(rollout):
    "It seeds the process's own generator, and all games of a batch begin side by side."
    import random

    import textarena
    secrets = []
    class Game:
        def __init__(self): self.inner = textarena.make("GuessTheNumber-v0")
        def __getattr__(self, name): return getattr(self.inner, name)
        def reset(self, **how):
            self.inner.reset(**how)
            secrets.append((how["seed"], self.inner.state.game_state["game_number"]))
    random.seed(7)
    before = random.getstate()
    rollouts(rollout, textarena_environment(Game), asked(rollout.tokenizer, 2), group_size=8, max_turns=1)
    assert random.getstate() == before
    assert len(secrets) == 16 and len(set(secrets)) == len({seed for seed, _ in secrets}) == 2


def test_reasoning_gym_is_data_and_a_reward_function():
    import reasoning_gym
    data = reasoning_gym.create_dataset("chain_sum", size=4, seed=0)
    rows, score = reasoning_gym_rows(data), reasoning_gym_reward(data)
    assert score(completions=[r["answer"] for r in rows], entry=[r["entry"] for r in rows]) == [1.]*4
    assert max(score(completions=["no"]*4, entry=[r["entry"] for r in rows])) < .1
    tokenizer = spelling(CHATML)
    r = Rollout(net(), max_tokens=3, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)
    b = r.generate(Prompts(rows, tokenizer).take(2), group_size=2)
    assert Grader(score).score(b).shape == (4,)
