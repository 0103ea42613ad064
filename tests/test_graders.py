"""Grader: what a reward function is given, what it may answer, and errors that name the function and the row (LAWS
19, 25)."""
import asyncio
import functools
import gzip
import json
import threading
import warnings

import numpy as np
import pytest
import torch

from rlblocks import merge
from rlblocks.data.batch import Batch
from rlblocks.graders.graders import Grader
from rlblocks.graders.maths import math_reward


def rollout(**columns):
    "Three rows, prompts of 2 tokens, completions of 1, 3 and 2, with a tool's token in the middle of the second."
    tokens = torch.tensor([[5, 6, 11, 0, 0], [5, 6, 12, 99, 13], [5, 7, 14, 15, 0]])
    mask = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 1, 0, 1], [0, 0, 1, 1, 0]]).bool()
    return Batch(tokens=tokens, lengths=torch.tensor([3, 5, 4]), mask=mask, group=torch.tensor([0, 0, 1]),
                 prompt=["p", "p", "q"], completion=["a", "bcd", "ef"], **columns)


def test_a_function_with_kwargs_gets_every_row_column_by_trl_names():
    seen = {}
    def fn(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0]*3
    Grader(fn).score(rollout(answer=["x", "y", "z"], prompt_lengths=torch.tensor([2, 2, 2])))
    assert seen == dict(prompts=["p", "p", "q"], completions=["a", "bcd", "ef"],
                        completion_ids=[[11], [12, 99, 13], [14, 15]], answer=["x", "y", "z"],
                        prompt_lengths=[2, 2, 2], lengths=[3, 5, 4], group=[0, 0, 1])


def test_completion_ids_without_prompt_lengths_are_the_policys_own():
    seen = []
    Grader(lambda completion_ids: seen.append(completion_ids) or [0]*3, name="f").score(rollout())
    assert seen == [[[11], [12, 13], [14, 15]]]


def test_a_function_without_kwargs_gets_what_it_names():
    assert Grader(lambda completions: [len(c) for c in completions],
                  name="f").score(rollout(answer=[1, 2, 3])).tolist() == [1, 3, 2]
    assert Grader(lambda answer, scale=2: [a*scale for a in answer],
                  name="f").score(rollout(answer=[1, 2, 3])).tolist() == [2, 4, 6]
    # a per-token column comes when named
    assert Grader(lambda mask, **_: [sum(m) for m in mask], name="f").score(rollout()).tolist() == [1, 2, 2]
    def constant(completions, k): return [k]*3
    grader = Grader(functools.partial(constant, k=7))
    assert grader.score(rollout()).tolist() == [7, 7, 7] and list(grader.fns) == ["constant"]


def test_missing_column_is_named_with_what_there_is():
    with pytest.raises(TypeError,
                       match="Grader: f wants solution; the batch offers tokens.*prompts, completions, completion_ids"):
        Grader(lambda completions, solution: [0]*3, name="f").score(rollout())
    with pytest.raises(TypeError, match=r"wants completions; .*Rollout\(…, tokenizer=…\)$"):
        Grader(lambda completions: [0]*3, name="f").score(rollout().drop("completion"))
    with pytest.raises(TypeError, match="; add 'solution' to the rows of Prompts$"):
        Grader(lambda completions, solution: [0]*3, name="f").score(rollout())


def test_a_function_that_scores_no_row_warns_once():
    def f(completions, **_): return [None]*3
    grader = Grader([f, lambda completions, **_: [1, None, 0]], weights=[1, 1])
    with pytest.warns(UserWarning, match="Grader: f scored none of the 3 rows, None for each; their scores are NaN"):
        assert grader.score(rollout()).isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grader.score(rollout()).isnan().all()
        assert not Grader(lambda completions, **_: [1, None, 0], name="g").score(rollout()).isnan().all()


@pytest.mark.parametrize("out", [[True, False, 2], (1, 0, 2.0), torch.tensor([1., 0., 2.]), [
    torch.tensor(1), torch.tensor(0.), torch.tensor(2.)], torch.tensor([1, 0, 2], dtype=torch.int32),])
def test_what_counts_as_a_verdict(out):
    scores = Grader(lambda **_: out, name="f").score(rollout())
    assert scores.dtype == torch.float32 and scores.tolist() == [float(x) for x in out]


def test_numpy_numbers_are_verdicts():
    np = pytest.importorskip("numpy")
    for out in (np.array([1., 0., 2.]), [np.float32(1), np.bool_(False), np.int64(2)]):
        assert Grader(lambda **_: out, name="f").score(rollout()).tolist() == [1, 0, 2]   # noqa: B023


def test_none_is_nan_and_stays_out_of_the_group():
    from rlblocks.signals.groups import group_advantages
    batch = rollout()
    scores = Grader(lambda **_: [1.0, None, 0.0], name="f").score(batch)
    assert scores.isnan().tolist() == [False, True, False]
    assert torch.isfinite(group_advantages(scores, batch.group)).all() and group_advantages(scores, batch.group)[1] == 0


@pytest.mark.parametrize("out, kind, message", [
    ([1.0, 2.0], ValueError, "Grader: f returned 2 verdicts for 3 rows"),
    (1.0, TypeError, "Grader: f returned a float; a list of 3 numbers or None"),
    (None, TypeError, "Grader: f returned a NoneType"),
    ({"a": 1}, TypeError, "Grader: f returned a dict"),
    ([0, "1", 0], TypeError, r"Grader: f returned str '1' for row 1 \(prompt 'p'\)"),
    ([0, 1, [1.0]], TypeError, r"Grader: f returned list .* for row 2 \(prompt 'q'\)"),
    (torch.zeros(3, 1), TypeError, r"Grader: f returned list .* for row 0"),
    ([0, float("nan"), 0], ValueError, r"Grader: f returned nan for row 1 \(prompt 'p'\); return None"),
    ([0, 0, float("-inf")], ValueError, r"Grader: f returned -inf for row 2 \(prompt 'q'\)"),
])
def test_no_verdicts(out, kind, message):
    with pytest.raises(kind, match=message): Grader(lambda **_: out, name="f").score(rollout())


def test_raising_names_function_and_row_and_chains():
    def divide(completions): return [1/(len(c)-3) for c in completions]
    with pytest.raises(RuntimeError, match=r"Grader: divide raised ZeroDivisionError on row 1 \(prompt 'p'\): float "
                       "division|division by zero") as info:
        Grader(divide).score(rollout())
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    def together(completions): return [1/(len(completions)-3)]
    with pytest.raises(RuntimeError, match="together raised ZeroDivisionError on the batch as a whole"):
        Grader(together).score(rollout())


def test_long_prompts_are_shown_by_their_head():
    batch = rollout()
    batch["prompt"] = ["x"*500]*3
    with pytest.raises(ValueError) as info: Grader(lambda **_: [0, 0, float("inf")], name="f").score(batch)
    assert "xxx…)" in str(info.value) and len(str(info.value)) < 250


async def judge(completions):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


async def broken(completions):
    await asyncio.sleep(0)
    return [1/(len(c)-2) for c in completions]


def test_async_functions_run_to_completion_with_and_without_a_loop():
    assert Grader(judge).score(rollout()).tolist() == [1, 3, 2]
    async def notebook(): return Grader(judge).score(rollout())
    assert asyncio.run(notebook()).tolist() == [1, 3, 2]
    with pytest.raises(RuntimeError, match="broken raised ZeroDivisionError on row 2"): Grader(broken).score(rollout())


def test_parts_and_weights():
    a, b = lambda completions: [1, 2, 3], lambda completions: [10, None, 30]
    grader = Grader(dict(a=a, b=b), weights=dict(b=.5, a=2))
    parts = grader.scores(rollout())
    assert list(parts) == ["a", "b"] and parts["a"].tolist() == [1, 2, 3]
    torch.testing.assert_close(grader.score(rollout()), torch.tensor([7., float("nan"), 21.]), equal_nan=True)
    assert repr(grader) == "Grader(2·a, 0.5·b)"
    assert Grader([judge, broken], weights=[1, 0]).weights == dict(judge=1.0, broken=0.0)
    assert list(Grader(judge, name="length").fns) == ["length"]


@pytest.mark.parametrize("make, kind, message", [
    (lambda: Grader(3), TypeError, "3 is not callable"),
    (lambda: Grader(Grader(judge)), TypeError,
     r'scores batches itself; write batch\["scores"\] = scorer.scores\(batch\)'),
    (lambda: Grader([]), ValueError, "no reward function"),
    (lambda: Grader([judge, judge]), ValueError, "two functions have one name among judge, judge"),
    (lambda: Grader([judge, broken], weights=[1]), ValueError, "1 weights for 2 functions"),
    (lambda: Grader(dict(a=judge), weights=dict(b=1)), ValueError, "weights are for b, functions are a"),])
def test_construction_errors(make, kind, message):
    with pytest.raises(kind, match=message): make()


def test_scores_follow_rows_not_positions():
    grader, batch = Grader(lambda completions: [len(c) for c in completions], name="f"), rollout()
    order = torch.tensor([2, 0, 1])
    assert grader.score(batch[order]).tolist() == grader.score(batch)[order].tolist()
    for part in batch.parts(2): assert grader.score(part).tolist() == [len(c) for c in part.completion]


def test_what_a_function_does_to_its_lists_stays_with_it():
    "The batch, the other functions and a second look at the rows see the columns as they are."
    def empties(prompts, completions, talk, **columns):
        verdicts = [float(len(c)) for c in completions]
        for row in talk: row.append(row.pop()["content"].update(text="changed"))
        for column in (prompts, completions, *columns.values()): column.clear()
        return verdicts
    def fails(completions):
        while completions: int(completions.pop(0))
    async def later(completions, talk):
        talk.reverse()
        return [talk[0][0]["content"]["text"] == "2" and c == "a" for c in completions]
    batch = rollout(talk=[[dict(role="user", content=dict(text=str(i)))] for i in range(3)])
    before = {k: x.clone() if isinstance(x, torch.Tensor) else repr(x) for k, x in batch.columns.items()}
    scores = Grader([empties, later, lambda completions: [len(c) for c in completions]]).scores(batch)
    assert [x.tolist() for x in scores.values()] == [[1, 3, 2], [1, 0, 0], [1, 3, 2]]
    batch["completion"] = ["1", "x", "2"]
    with pytest.raises(RuntimeError, match=r"fails raised ValueError on row 1 \(prompt 'p'\)"):
        Grader(fails).score(batch)
    batch["completion"] = ["a", "bcd", "ef"]
    assert all(x.equal(before[k]) if isinstance(x, torch.Tensor) else repr(x) == before[k]
               for k, x in batch.columns.items())


@pytest.mark.parametrize("out, says", [
    (1e300, "returned 1e\\+300"), (-1e39, "returned -1e\\+39"), (10**400, "returned an integer of 1329 bits"),
    (10**5000, "returned an integer of 16610 bits"), (torch.tensor(1e300, dtype=torch.float64), "returned 1e\\+300"),
    (float("inf"), "returned inf"), (np.float64("nan"), "returned nan")], ids=range(7))
def test_a_verdict_that_single_precision_does_not_hold_names_function_and_row(out, says):
    with pytest.raises(
            ValueError,
            match=rf"Grader: big {says} for row 1 \(prompt 'p'\); return None for a row that cannot be scored, else "
            "a number within ±3.4e.38"):
        Grader(lambda **_: [0., out, 1.], name="big").score(rollout())
    largest = torch.finfo(torch.float32).max
    assert Grader(lambda **_: [largest, -largest, 1], name="f").score(rollout()).tolist() == [largest, -largest, 1]


def test_weights_and_their_sum_stay_finite():
    for weight in (float("nan"), float("inf"), 10**400, 1e300, None, "1"):
        with pytest.raises(ValueError, match="Grader: the weight of f is "): Grader(dict(f=judge), weights=[weight])
    with pytest.raises(ValueError, match=r"Σ weight·score is beyond single precision for row 2 \(prompt 'q'\)"):
        Grader(lambda **_: [1, None, 1e20], weights=[1e20], name="f").score(rollout())
    with pytest.raises(TypeError, match="Grader: dict does not say which arguments it takes"):
        Grader(dict).score(rollout())
    with pytest.raises(TypeError, match="Grader: the batch is a list; a Batch is wanted"): Grader(judge).score([1])


# -- mathematics

@pytest.fixture
def math_verify(): return pytest.importorskip("math_verify")


@pytest.mark.parametrize("says, gold, verdict", [
    ("The answer is 72.", 72, 1.0), (r"so \boxed{72}", "72", 1.0), ("1,234 clips", "1234", 1.0),
    ("It is 40.", "Kelsey answered 43 correctly.\nMartin answered 43-3=40 correctly.\n#### 40", 1.0),
    (r"$\frac{1}{2}$", "0.5", 1.0), (r"$(3, \pi/2)$", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
    ("It is $6-5i$", "6 - 5i", 1.0), ("71", 72, 0.0), ("I do not know", 72, 0.0), ("", 72, 0.0),
    (r"\boxed{\frac{}", 72, 0.0), ("3", r"\left( 3, \frac{\pi}{2} \right)", 0.0),
    ("72", "no number here", None), ("72", "", None), ("72", "???", None), ("???", "???", None), ("", "", None),])
def test_math_reward(math_verify, says, gold, verdict): assert math_reward([says], [gold]) == [verdict]


def test_math_reward_ends_endless_expressions_in_any_thread(math_verify):
    "A signal would be heard in the main thread only; nobody else would ever return."
    answers, endless = [], [r"\boxed{9^{9^{9^{9}}}}", "72"]
    work = lambda: answers.append(math_reward(endless, ["72", 72]))
    thread = threading.Thread(target=work); thread.start(); thread.join()
    work()
    assert answers == [[0.0, 1.0]]*2


def test_math_reward_wants_an_answer_a_row(math_verify):
    with pytest.raises(ValueError, match="1 answers for 2 completions"): math_reward(["1", "2"], ["1"])


def test_math_reward_without_its_extra_names_it(monkeypatch):
    monkeypatch.setattr("rlblocks.graders.maths.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install -e .\.\[rewards\]"):
        Grader(math_reward).score(rollout(answer=[1, 2, 3]))


def test_math_reward_on_real_answers(math_verify, shared):
    "GSM8K solutions answer themselves; so do the gold answers of MATH-500, boxed."
    def read(name):
        with gzip.open(shared / name) as f: return [json.loads(line) for line in f]
    gsm = read("gsm8k/train.jsonl.gz")[:400]
    verdicts = math_reward([r["answer"] for r in gsm], [r["answer"] for r in gsm])
    assert None not in verdicts and sum(verdicts) >= 0.98*len(gsm)
    hard = read("prompts/math500.jsonl.gz")[::3]
    verdicts = math_reward([f"So it is $\\boxed{{{r['answer']}}}$." for r in hard], [r["answer"] for r in hard])
    assert verdicts.count(1.0) >= 0.98*len(hard)
    assert sum(math_reward(["It is \\boxed{123454321}."]*len(hard), [r["answer"] for r in hard]).count(v)
               for v in (0.0, None)) == len(hard)


def test_math_reward_reads_what_stands_behind_the_hashes():
    """GSM8K's way of stating an answer: dollars and percents before it are not the answer, and another number behind
    it is wrong."""
    told = "At $0.50 each and 10% off, that makes 33 in all.\n#### "
    assert math_reward([told + "33", told + "1,033", told + "34"], ["33", "1033", "33"]) == [1.0, 1.0, 0.0]


# -- what functions log

def test_the_mean_of_a_function_is_over_the_rows_that_it_scored():
    def never(completions, **_): return [None]*len(completions)
    def one(completions, **_): return [4.] + [None]*(len(completions) - 1)
    with pytest.warns(UserWarning, match="never scored none"): found = Grader([never, one]).grade(rollout())["metrics"]
    assert {k: float(x) for k, x in found.items()} == {"rewards/one": 4.}


@pytest.mark.parametrize("deadline", [None, 60.])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_trl_reach_the_metrics_of_the_loop(deadline, late):
    def fn(completions, log_metric=None, log_extra=None, **columns):
        assert not {"log_metric", "log_extra"} & set(columns)
        for c in completions: log_metric("mean_length", len(c))
        log_extra("first", [c[0] for c in completions])
        return [float(len(c)) if c != "a" else None for c in completions]
    async def later(completions, log_metric, log_extra): return fn(completions, log_metric, log_extra)
    grader = Grader(later if late else fn, name="f", deadline=deadline)
    graded = grader.grade(rollout())
    assert graded["scores"].isnan().tolist() == [True, False, False] and graded["extra"] == dict(first=["a", "b", "e"])
    assert {k: (float(x), float(x.count)) for k, x in graded["metrics"].items()} == {
        "rewards/f": (2.5, 2.), "mean_length": (2., 3.)}
    again = grader.grade(rollout())["metrics"]
    assert float(merge(graded["metrics"], again)["mean_length"].count) == 6. and float(again["mean_length"].count) == 3.


def test_a_function_of_trl_logs_as_it_does_there(math_verify):
    trl = pytest.importorskip("trl.rewards")
    b = rollout(solution=[r"\frac{1}{2}", "$3$", "no number"])
    b["completion"] = [[dict(role="assistant", content=c)] for c in (r"\boxed{\frac{1}{2}}", r"\boxed{4}", "x")]
    seen, extra = Grader(trl.accuracy_reward).grade(b), ("solution", "gold_parsed", "answer_parsed")
    assert seen["scores"][1] == 0. and set(seen["extra"]) == set(extra)
    assert all(len(x) == 3 for x in seen["extra"].values())


@pytest.mark.parametrize("deadline", [None, 120.])
def test_grading_does_not_block_the_trainer(deadline):
    "Each row waits for a byte that is written only when the trainer has made a step."
    import os

    from rlblocks import later, masked_mean
    from tiny import model
    from rlblocks import Policy
    reads, writes = os.pipe()
    def waits(completions): return [float(len(os.read(reads, 1))) for _ in completions]
    policy = Policy(model(), lr=1e-2, device="cpu")
    b = Batch(tokens=torch.arange(12).view(3, 4), mask=(torch.arange(4) > 0).expand(3, 4), group=torch.arange(3),
              lengths=torch.full((3,), 4), completion=["a", "b", "c"])
    grader = Grader(waits, deadline=deadline)
    graded = later(grader.score, b), later(grader.grade, b)      # the second when the first has ended
    before = policy.version
    policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b), {}))
    assert policy.version == before + 1 and not graded[0].done()
    os.write(writes, b"x"*6)
    assert graded[0].result(600).tolist() == graded[1].result(600)["scores"].tolist() == [1.]*3
    with pytest.raises(RuntimeError, match="ValueError"):
        later(Grader(lambda completions: [float("x")]).score, b).result(600)
    for fd in (reads, writes): os.close(fd)


def test_failures_are_metrics_too():
    def fn(completions): return [1/(len(c) - 3) for c in completions]
    with pytest.warns(UserWarning, match="1 of 3 rows"): metrics = Grader(fn, deadline=60).grade(rollout())["metrics"]
    assert float(metrics["failures/raised"]) == pytest.approx(1/3)


def test_a_batch_in_a_thread_and_one_in_the_loop_each_get_what_is_theirs():
    "A grader for training and evaluation: scores, columns and metrics are of the batch that was given."
    began, go = threading.Event(), threading.Event()
    def reward(completions, log_metric, log_extra):
        if len(completions) == 3:
            began.set()
            assert go.wait(60)
        log_extra("seen", completions)
        log_metric("rows", len(completions))
        return [1.]*len(completions)
    grader = Grader(reward)
    beside = grader.start_grade(rollout())
    assert began.wait(60)
    here = grader.grade(rollout()[1:])
    go.set()
    for made, want in ((here, ["bcd", "ef"]), (beside.result(timeout=60), ["a", "bcd", "ef"])):
        assert made["extra"] == dict(seen=want) and made["scores"].tolist() == [1.]*len(want)
        assert float(made["metrics"]["rows"]) == len(want)
    assert grader.notes.extra == dict(seen=["a", "bcd", "ef"])      # of the one that ended last


def test_a_call_that_is_cancelled_does_not_hold_up_the_next():
    began, go, seen = threading.Event(), threading.Event(), []
    def reward(completions):
        began.set()
        seen.append(len(completions))
        return [1. for _ in completions] if go.wait(60) else []
    grader, b = Grader(reward), rollout()
    first, second, third = (grader.start_score(b[:n]) for n in (3, 2, 1))
    assert began.wait(60) and second.cancel() and not first.cancel()
    go.set()
    assert third.result(timeout=60).tolist() == [1.] and first.result().tolist() == [1.]*3 and seen == [3, 1]
