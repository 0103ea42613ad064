"""Adapters on the packages themselves: environments of verifiers v0, tasks of v1, and renderers of the `renderers`
package. Run by tests/test_hubs.py with the interpreter of `make hubs`."""
import sys
import types
from pathlib import Path

import pytest
import renderers
import verifiers as vf0
import verifiers.v1 as vf
from datasets import Dataset
from rlblocks import (ChatRenderer, Policy, Prompts, Renderer, Response, Rollout, check_renderer, rollouts,
                      taskset_environment, taskset_rows, verifiers_environment, verifiers_rows)
from rlblocks.data.renderers import message_of, next_ids
from rlblocks.environments.rewriting import rewritten
from test_environments import CHATML, Talk, gap, net, spelling
from test_samplers import WIDE
from tiny import model


@pytest.fixture(scope="module")
def rollout():
    tokenizer = spelling(CHATML)
    return Rollout(net(), max_tokens=4, stop=[tokenizer.eos_token_id], device="cpu", tokenizer=tokenizer)


# -- v0

ASKED = Dataset.from_list([dict(question=f"Say {n}.", answer=str(n), info=dict(n=n)) for n in range(3)])


def long(completion, **_): return float(sum(len(m.content or "") for m in completion if m.role == "assistant"))
def turns(state, answer): return 10.*len(state["trajectory"]) + int(answer)


def loaded(make):
    "An environment by `load_environment`, as from a package of its own."
    sys.modules["env_of_a_test"] = types.ModuleType("env_of_a_test")
    sys.modules["env_of_a_test"].load_environment = make
    return vf0.load_environment("env-of-a-test")


def played(rollout, env, **how):
    rows = verifiers_rows(env)
    prompts = Prompts(rows, rollout.tokenizer, shuffle=False).take(len(rows))
    return rollouts(rollout, verifiers_environment(env), prompts, deadline=300., **how)


def test_one_turn_of_v0(rollout):
    env = loaded(lambda: vf0.SingleTurnEnv(dataset=ASKED, system_prompt="Be brief.",
                                           rubric=vf0.Rubric([turns, long], [1., .001])))
    b = played(rollout, env, group_size=2)
    words = [sum(len(m["content"]) for m in row if m["role"] == "assistant") for row in b.messages]
    assert [round(x, 4) for x in b.reward.tolist()] == [round(10. + i//2 + .001*n, 4) for i, n in enumerate(words)]
    assert b.n_turns.tolist() == [1]*6 and gap(b) < 1e-3
    assert b.messages[0][0] == dict(role="system", content="Be brief.")
    assert b.unit.unique().numel() == 6 and set(b.finish_reason) <= {"completed", "max_tokens"}


class Several(vf0.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [dict(role="user", content=f"Turn {len(state['trajectory'])}")]


class Compacts(Several):
    "From the third turn on, the first exchange is left out of the prompt."
    async def get_prompt_messages(self, state):
        made = await super().get_prompt_messages(state)
        return made if len(state["trajectory"]) < 2 else [made[0], *made[3:]]


def test_turns_of_v0_are_turns(rollout):
    "The rows are those of an environment here that says the same, and it ends where verifiers does."
    env = loaded(lambda: Several(dataset=ASKED, max_turns=4, rubric=vf0.Rubric([turns])))
    b = played(rollout, env, group_size=2, seed=3)
    class Same(Talk):
        async def step(self, message):
            self.n += 1
            return None if self.n == 4 else [dict(role="user", content=f"Turn {self.n}")]
    p = Prompts(verifiers_rows(env), rollout.tokenizer, shuffle=False).take(3)
    same = rollouts(rollout, Same, p, group_size=2, seed=3)
    assert b.tokens.equal(same.tokens) and b.turn.equal(same.turn) and b.mask.equal(same.mask)
    assert b.reward.tolist() == [40., 40., 41., 41., 42., 42.] and b.n_turns.tolist() == [4]*6 and gap(b) < 1e-3


def test_a_conversation_that_v0_rewrites_is_several_rows_of_one_unit(rollout):
    "What the policy has said keeps its ids, also where verifiers gives it back without its thoughts."
    env = loaded(lambda: Compacts(dataset=ASKED, max_turns=4, rubric=vf0.Rubric([turns])))
    thinks = ChatRenderer(rollout.tokenizer, read=lambda text: Response(text, reasoning_content="Hm."))
    b = played(rollout, env, group_size=4, renderer=thinks)
    assert b.n_units == 12 < len(b) and set(b.reward.tolist()) == {40., 41., 42.} and gap(b) < 1e-3
    for u in b.unit.unique():
        rows = [i for i, x in enumerate(b.unit.tolist()) if x == u]
        assert b.turn[rows][b.mask[rows]].unique().tolist() == [0, 1, 2, 3]
        said, second = b.tokens[rows[0]][b.turn[rows[0]] == 1].tolist(), b.tokens[rows[1]].tolist()
        assert any(second[i:i + len(said)] == said for i in range(len(second)))


def add(a:int, b:int)->int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def test_tools_of_v0(rollout):
    "The policy's words are random, so a reader of them makes the calls."
    said = iter([Response("", tool_calls=(dict(name="add", arguments=dict(a=1, b=2)),)), Response("3")]*9)
    seen = []
    class Reads(ChatRenderer):
        def render_ids(self, messages, *, tools=None, **how):
            seen.append(tools)
            return super().render_ids(messages, tools=tools, **how)
    env = loaded(lambda: vf0.ToolEnv(tools=[add], dataset=ASKED.select([1]), rubric=vf0.Rubric([turns])))
    b = played(rollout, env, renderer=Reads(rollout.tokenizer, read=lambda text: next(said)))
    assert [m["content"] for m in b.messages[0] if m["role"] == "tool"] == ["3"] and gap(b) < 1e-3
    assert b.reward.tolist() == [21.] and b.n_turns.tolist() == [2] and seen[0][0]["function"]["name"] == "add"


def test_an_episode_that_goes_no_further_is_scored_as_it_stands(rollout):
    env = loaded(lambda: Several(dataset=ASKED, rubric=vf0.Rubric([turns])))
    b = played(rollout, env, max_turns=2)
    assert b.reward.tolist() == [20., 21., 22.] and b.finish_reason == ["max_turns"]*3 and gap(b) < 1e-3


def test_errors_of_v0_are_the_episodes(rollout):
    class Fails(Several):
        async def env_response(self, messages, state, **_):
            if state["answer"] == "1": raise vf0.InfraError("its sandbox died")
            return await super().env_response(messages, state)
    env = loaded(lambda: Fails(dataset=ASKED, max_turns=3, rubric=vf0.Rubric([turns])))
    with pytest.warns(UserWarning, match="1 of 3 episodes did not arrive: sample 0 of group 1: .*sandbox died"):
        assert played(rollout, env).reward.tolist() == [30., 32.]
    def groups(completions, **_)->list[float]: return [0.]*len(completions)
    with pytest.raises(ValueError, match="scores a group as a whole"):
        verifiers_environment(loaded(lambda: vf0.SingleTurnEnv(dataset=ASKED, rubric=vf0.Rubric([groups]))))


# -- v1

class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    @vf.reward
    async def long(self, trace) -> float: return float(len(trace.last_reply) >= len(self.data.answer))
    @vf.reward(weight=.5)
    async def one_turn(self, trace) -> float: return float(trace.num_turns == 1)


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in (0, 99): yield Task(Data(prompt=f"Say {n}.", answer="x"*n))


def test_tasks_of_v1_score_what_the_policy_said(rollout):
    tasks = list(Tasks(vf.TasksetConfig(id="tasks")))
    p = Prompts(taskset_rows(tasks), rollout.tokenizer, shuffle=False).take(2)
    b = rollouts(rollout, taskset_environment(tasks), p, group_size=2)
    assert b.reward.tolist() == [1.5, 1.5, .5, .5] and b.n_turns.tolist() == [1]*4 and gap(b) < 1e-3
    with pytest.raises(ValueError, match="task 0 has no prompt"): taskset_rows([Task(Data(answer=""))])
    class Files(Task):
        @vf.reward
        async def written(self, runtime) -> float: return 1.
    class Prepared(Task):
        async def setup(self, trace, runtime): trace.state.files = 1
    class Judge:
        reward_name = "look"
        async def score(self, trace, runtime): return 1.
    class Judged(Task):
        def plugged_judges(self): return [Judge()]
    for kind, says in ((Files, "reward 'written', which reads a runtime"), (Prepared, "'setup' of its own"),
                       (Judged, "judge 'look', which reads a runtime")):
        with pytest.raises(ValueError, match=says): taskset_rows([kind(Data(prompt="?", answer=""))])



# -- renderers

@pytest.fixture
def qwen(shared):
    from transformers import AutoTokenizer
    made = AutoTokenizer.from_pretrained(shared/"tokenizers"/"qwen2.5")
    made.add_tokens(["<tool_response>", "</tool_response>", "<think>", "</think>"], special_tokens=True) # of Qwen3
    return made


@pytest.fixture
def shared():
    folder = Path(__file__).resolve().parents[2].parent/"shared"/"data"
    if not folder.is_dir(): pytest.skip(f"{folder} is absent: real tokenizers are not part of the repository")
    return folder


@pytest.mark.parametrize("name", ["Qwen3Renderer", "DefaultRenderer"])
def test_published_renderers_are_accepted_as_they_are(qwen, name):
    r = getattr(renderers, name)(qwen)
    found = check_renderer(r)
    assert isinstance(r, Renderer) and found["said"] and found["stops"], found
    user = dict(role="user", content="1 + 2?")
    row = list(r.render_ids([user], add_generation_prompt=True))
    said = qwen("It is 3.", add_special_tokens=False).input_ids + list(r.get_stop_token_ids())[:1]
    told = message_of(r.parse_response(said))
    assert told["content"] == "It is 3."
    behind = [next_ids(r, [user, told], row, said, [dict(role=role, content="Sure?")]) for role in ("tool", "user")]
    if name == "Qwen3Renderer":     # a question makes it drop earlier thoughts: another row
        assert behind[0] and "Sure?" in qwen.decode(behind[0]) and behind[1] is None


@pytest.mark.parametrize(("name", "thought", "role"), [
    ("Qwen3Renderer", "", "tool"), ("Qwen3Renderer", "", "user"), ("DefaultRenderer", "", "user"),
    ("Qwen3Renderer", "<think>\nadd\n</think>\n\n", "user")])
def test_a_history_that_a_published_renderer_rewrites_keeps_its_ids(qwen, name, thought, role):
    "Its own words are drawn a character at a time; the renderer would encode them in fewer ids."
    r = getattr(renderers, name)(qwen)
    def spelt(text): return [i for c in text for i in qwen(c, add_special_tokens=False).input_ids]
    user, again, words = dict(role="user", content="1 + 2?"), dict(role=role, content="Sure?"), spelt("It is 3.")
    said = qwen(thought, add_special_tokens=False).input_ids + words + list(r.get_stop_token_ids())[:1]
    told = message_of(r.parse_response(said))
    row, anew = rewritten(r, [user, told, again], {1: said})
    whole = list(r.render_ids([user, told, again], add_generation_prompt=True))
    assert not anew and row != whole and qwen.decode(row) == qwen.decode(whole)
    assert any(row[k:k + len(words)] == words for k in range(len(row)))
    if thought: assert "add" not in qwen.decode(row)


def test_episodes_with_a_published_renderer(qwen):
    r = renderers.Qwen3Renderer(qwen)
    net = model(**WIDE | dict(vocab_size=len(qwen), max_position_embeddings=512, eos_token_id=None))
    rollout = Rollout(net, max_tokens=4, stop=list(r.get_stop_token_ids()), device="cpu", tokenizer=qwen)
    asked = [dict(role="user", content="Hm?")]
    b = rollouts(rollout, Talk, Prompts([dict(prompt=asked, messages=asked)], qwen).take(1), renderer=r)
    far = (Policy(net, device="cpu", frozen=True).logprobs(b) - b.rollout_logprobs)[b.mask].abs().max()
    assert far < 1e-3 and b.n_turns.tolist()[0] == 5
