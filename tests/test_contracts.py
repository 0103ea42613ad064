"check_grader and check_env: what keeps its contract passes, and each law is broken by a function made for it."
import asyncio
import math
import os
import re
import threading
import time

import pytest
import torch
from rlblocks import Grader, Step, check_env, check_grader, exact_reward
from rlblocks.graders import rewards
from rlblocks.environments.adapters import tool_environment
from rlblocks.graders.maths import math_reward
from rlblocks.testing.contracts import ENV_LAWS, GRADER_LAWS, sample_rows


def exact(completions, answer, **_): return [None if a is None else float(c == a) for c, a in zip(
    completions, answer, strict=True)]
async def later(completions): return torch.tensor([float(len(c)) for c in completions])


@pytest.mark.parametrize("fn", [exact, later, exact_reward, rewards.choice_reward, Grader([exact, later])],
                         ids=["exact", "later", "exact_reward", "choice_reward", "Grader"])
def test_what_keeps_the_contract_passes_in_one_line(fn, capsys):
    seconds = check_grader(fn)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"{len(GRADER_LAWS)} laws hold" in said and "ms a row" in said
    assert all(s > 0 for s in seconds.values())


def test_the_rewards_of_the_library_keep_it():
    made = dict(format=rewards.format_reward("[0-9]+"), length=rewards.length_reward(3, width=9),
                overlong=rewards.overlong_reward(9, margin=4), distinct=rewards.distinct_reward(2))
    for fn in made.values(): check_grader(fn, without=["pickle"], show=False)   # made in a function


def test_mathematics_keeps_it():
    pytest.importorskip("math_verify")
    check_grader(math_reward, show=False)


COUNT = []
def remembers(completions): COUNT.append(1); return [float(len(COUNT))]*len(completions)
def numbers_rows(completions): return [float(i) for i, _ in enumerate(completions)]
def mean_of_batch(completions): n = sum(map(len, completions)); return [n/len(completions)]*len(completions)
def popping(completions): return [float(len(completions.pop(0))) for _ in range(len(completions))]
def deep(completions, answer): answer[0] = "x"; return [1.]*len(completions)
def parses(completions): return [float(int(c) > 3) for c in completions]
def short(completions): return [1.]
def single(completions): return 1.
def nan(completions): return [math.nan]*len(completions)
def words(completions): return ["1"]*len(completions)
def no_holes(completions, answer): return [float(len(a)) for a in answer]
def encodes(completions): return [float(len(c.encode())) for c in completions]
class Locked:
    def __init__(self): self.lock = threading.Lock()
    def __call__(self, completions): return [1.]*len(completions)


def hangs(completions): return [float(bool(re.fullmatch("(a|a)*b", c))) for c in completions]
def sleeps(completions): time.sleep(3600 if "" in completions else 0); return [1.]*len(completions)
def ends(completions): os._exit(3)


@pytest.mark.parametrize(("fn", "says"), [
    (hangs, "its call on completions=.'aaa.* had not returned after 3 s"), (ends, "its call on .* ended the process"),
    (sleeps, r"its call on .*completions=\[''\].* had not returned after 3 s")])
def test_what_never_returns_is_named_and_killed(fn, says, monkeypatch):
    "A pattern that backtracks holds Python's lock: only another process can end it."
    forks, fork = [], os.fork
    def noted():
        forks.append(fork())
        return forks[-1]
    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(AssertionError, match=f"{fn.__name__} breaks the law 'returns': {says}"):
        check_grader(fn, deadline=3.)
    assert forks
    for pid in forks:
        with pytest.raises(ProcessLookupError): os.kill(pid, 0)     # ended, and waited for


class Stuck:
    async def reset(self, **row): return None
    async def step(self, message): time.sleep(3600)


def test_who_leaves_out_returning_is_not_killed():
    "It takes longer than the deadline, and stays in this process, as with deadline=None."
    def slow(completions): time.sleep(.01); return where.append(os.getpid()) or [float(len(c)) for c in completions]
    where = []
    check_grader(slow, without=["returns", "pickle"], deadline=1e-4, show=False)
    assert set(where) == {os.getpid()}


def test_an_environment_that_never_returns_is_named():
    with pytest.raises(AssertionError, match=r"Stuck breaks the law 'returns': turn 0, step\('a'\) had not returned"):
        check_env(Stuck, ["a"], deadline=1.)


@pytest.mark.parametrize(("fn", "law", "says"), [
    (remembers, "repeat", "asked again, the verdict went from 1.0 to 2.0"), (mean_of_batch, "company", "alone in its"),
    (numbers_rows, "repeat", "beside an equal row"), (popping, "inputs", "it changed completions"),
    (deep, "inputs", "it changed answer"), (parses, "texts", "ValueError: invalid literal"),
    (short, "length", "6 rows"),
    (single, "length", "it gave a float"), (nan, "verdict", "it gave nan for"), (words, "verdict", "it gave '1' for"),
    (no_holes, "holes", "answer=.None."), (encodes, "texts", "UnicodeEncodeError"), (Locked(), "pickle", "TypeError"),
    (lambda completions: [1.]*len(completions), "pickle", "at the top of a module")])
def test_each_law_is_broken_by_its_function(fn, law, says):
    COUNT.clear()
    with pytest.raises(AssertionError, match=f"breaks the law '{law}': .*{says}"): check_grader(fn)


def test_positions_are_seen():
    "First and last row are treated alike by no equal pair: the order of rows shows it."
    def first(completions):
        return [float(len(c) + (len(completions) == 6 and i == 0)) for i, c in enumerate(completions)]
    with pytest.raises(AssertionError, match="law 'repeat'|law 'order'"): check_grader(first, without=["pickle"])
    with pytest.raises(AssertionError, match="law 'order'"): check_grader(first, without=["pickle", "repeat"])


def test_what_it_needs_is_named():
    with pytest.raises(TypeError, match=r"exact2 wants gold; pass rows=dict\(gold="):
        def exact2(completions, gold): return []
        check_grader(exact2)
    with pytest.raises(ValueError, match="no law is called fast; there are length"):
        check_grader(exact, without=["fast"])
    with pytest.raises(ValueError, match="at least two rows"):
        check_grader(exact, dict(completions=["a"], answer=["a"]))
    assert check_grader(exact, dict(completions=["a", "b"], answer=["a", "a"]), show=False)
    assert sample_rows()["completions"][0] == sample_rows()["completions"][-1]


# -- environments

class Count:
    "Says how often it was asked; done after three."
    instances = []
    async def reset(self, **row): self.n = 0; return "begin"
    async def step(self, message):
        self.n += 1
        return Step([dict(role="user", content=str(self.n))], reward=1., done=self.n == 3)
    def close(self): pass


class Plain(Count):
    def reset(self, prompt, **row): self.n = 0; return [dict(role="user", content=prompt)]
    def step(self, message): self.n += 1; return None if self.n == 3 else "more"


@pytest.mark.parametrize("env", [Count, Plain, lambda: Count()])
def test_an_environment_that_keeps_the_contract(env, capsys):
    made = check_env(env, ["a"], row=dict(prompt="?", level=3))
    assert len(made) == 4 and made[-1][2] and capsys.readouterr().out.endswith(f"{len(ENV_LAWS)} laws hold, 3 turns\n")


class Shares(Count):
    async def step(self, message):
        self.instances.append(1)
        return Step([dict(role="user", content=str(len(self.instances)))], done=len(self.instances) % 3 == 0)
class Keeps(Count):
    def __init__(self): self.n = 0
    async def reset(self, **row): return None
    async def step(self, message):
        self.n += 1
        return Step([dict(role="user", content="more")], done=self.n >= 3)
class Endless(Count):
    async def step(self, message): return "more"
class Number(Count):
    async def step(self, message): return 1.
class Infinite(Count):
    async def step(self, message): return Step(reward=math.inf, done=True)
class Raises(Count):
    async def step(self, message): raise OSError("gone")
class Reset(Count):
    async def reset(self, **row): return 3
class Once(Count):
    shut = False
    def close(self):
        if self.shut: raise OSError("closed twice")
        self.shut = True
ONE = Count()


@pytest.mark.parametrize(("env", "law", "says"), [
    (Shares, "apart", "turn 0 gave"), (Keeps, "again", "after another reset"), (Endless, "ends", "after 100 turns"),
    (Number, "step", "gave a float"), (Infinite, "reward", "the reward inf"), (Raises, "step", "OSError: gone"),
    (Reset, "reset", "gave a int"), (Once, "close", "closed twice"), (lambda: ONE, "apart", "one environment twice")])
def test_each_law_is_broken_by_its_environment(env, law, says):
    Count.instances.clear()
    with pytest.raises(AssertionError, match=f"breaks the law '{law}': .*{says}"): check_env(env, ["a"])


def test_laws_that_an_environment_need_not_keep():
    assert len(check_env(Endless, ["a"], turns=5, without=["ends"], show=False)) == 6
    with pytest.raises(ValueError, match="no law is called fast"): check_env(Count, ["a"], without=["fast"])
    with pytest.raises(ValueError, match="at least one is wanted"): check_env(Count, [])


def test_they_run_where_a_loop_runs():
    async def here(): return check_grader(later, show=False), check_env(Count, ["a"], show=False)
    assert asyncio.run(here())[1][-1][2] and os.getpid()


class Sums:
    "A class as TRL's environment_factory takes it."
    def reset(self, **row): return None
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: a number
            b: another one
        """
        return a + b


class Broken(Sums):
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: a number
            b: another one
        """
        return a + c    # noqa: F821


def test_tools_that_only_raise_are_found():
    call = dict(tool_calls=[dict(function=dict(name="add", arguments=dict(a=2, b=2)))])
    with pytest.raises(AssertionError, match="law 'tools': every call failed; the first: error: NameError: name 'c'"):
        check_env(tool_environment(Broken), [call, "4"])
    wrong = dict(tool_calls=[dict(function=dict(name="sub", arguments={}))])
    with pytest.raises(AssertionError, match="law 'tools': every call failed; the first: error: LookupError: no tool"):
        check_env(tool_environment(Sums), [wrong, "4"])
    check_env(tool_environment(Sums), [wrong, call, "4"], show=False)


def test_an_environment_with_tools_is_tried_by_calls_of_them():
    "A text calls nothing: all laws would hold of an environment whose tools nobody has tried."
    call = dict(tool_calls=[dict(function=dict(name="add", arguments=dict(a=2, b=2)))])
    with pytest.raises(ValueError, match=r"has the tools add, and no message calls one; give dict\(tool_calls="):
        check_env(tool_environment(Sums), ["2 + 2?"])
    made = check_env(tool_environment(Sums), [call, "4"], show=False)
    assert made[1][0][0]["content"] == "4" and not made[1][2] and made[2][2]
