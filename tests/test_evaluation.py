"""`evaluate` (nbs/evaluation): killed and gone on with, graded again, beside training, and what its table says."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import ROOT
from forked import on_ranks
from rlblocks import Policy, Preferences, Prompts, Rollout, Scorer, SpmdPool, evaluate, later, load_evaluation
from rlblocks.evaluation.measures import bits_per_byte
from rlblocks.evaluation.results import Evaluation, TaskResult
from rlblocks.evaluation.tasks import Task, bbh, gsm8k, humaneval, math500, perplexity, preferences
from rlblocks.people.command import command_line
from rlblocks.people.evaluate import evaluation_text

ROWS = [dict(prompt=f"w{i}", answer=f"w{i}") for i in (*range(2, 10), *range(20, 32))]     # w1 ends a text


def even(completions, **_): return [float(len(c) % 2 == 0) for c in completions]


EXAM = Task("exam", ROWS, even, chat="{prompt}", max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A model and its tokenizer, saved."
    made = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(made)
    tiny.tokenizer().save_pretrained(made)
    return made


CHILD = """
import sys, time
from pathlib import Path
from rlblocks import Rollout, evaluate
from test_evaluation import EXAM
plain = Rollout.generate
def slowly(self, prompts, **how):
    made = plain(self, prompts, **how)
    with open(sys.argv[3], "a") as f: f.writelines(x + "\\n" for x in prompts.prompt)
    time.sleep(.1)
    return made
Rollout.generate = slowly
evaluate(sys.argv[1], EXAM, name="m", folder=sys.argv[2], n=2, prompts=2)
"""


def test_an_evaluation_that_is_killed_samples_nothing_twice(folder, tmp_path):
    """Killed between two batches of ten: what is in the file is not sampled again, half a line is no answer, and the
    files are those of an evaluation that nobody killed."""
    seen, out = tmp_path/"seen", tmp_path/"out"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT/"tests")]))
    def start(): return subprocess.Popen([sys.executable, "-c", CHILD, folder, out, seen], env=env)
    child, end = start(), time.monotonic() + 120
    while time.monotonic() < end and (not seen.exists() or seen.read_text().count("\n") < 8): time.sleep(.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    file = out/"exam.jsonl"
    kept = file.read_bytes()
    assert 4 <= kept.count(b"\n") < len(ROWS) and not json.loads(
        (out/"evaluation.json").read_text())["tasks"]["exam"]["done"]
    with pytest.raises(ValueError, match="is unfinished"): load_evaluation(out)
    seen.unlink()
    file.write_bytes(kept + b'{"prompt": "w9", "comple')
    child = start()
    assert child.wait(timeout=120) == 0
    again = seen.read_text().split()
    assert not {*again} & {json.loads(x)["prompt"] for x in kept.splitlines()} and len(again) == len({*again})
    evaluate(folder, EXAM, name="m", folder=tmp_path/"whole", n=2, prompts=2)
    for name in ("exam.jsonl", "exam.scores.jsonl"):
        assert (out/name).read_bytes() == (tmp_path/"whole"/name).read_bytes()


def test_grades_are_made_again_without_sampling(folder, tmp_path, monkeypatch):
    first = evaluate(folder, EXAM, folder=tmp_path, n=2)
    def never(*_, **how): raise AssertionError("sampled")
    monkeypatch.setattr(Rollout, "generate", never)
    monkeypatch.setattr(Rollout, "__init__", never)
    odd = replace(EXAM, reward=lambda completions, **_: [1 - x for x in even(completions)])
    with pytest.raises(ValueError, match=r"has scores of the reward .*even, and .*lambda.* came; regrade=True"):
        evaluate(folder, odd, folder=tmp_path, n=2)
    assert repr(evaluate(folder, EXAM, folder=tmp_path, n=2)) == repr(first)
    second = evaluate(folder, odd, folder=tmp_path, n=2, regrade=True)
    value = first.tasks["exam"].estimate().value
    assert 0 < value < 1 and second.tasks["exam"].estimate().value == pytest.approx(1 - value)
    assert repr(load_evaluation(tmp_path).table()) == repr(second.table())


def test_a_gold_answer_that_was_mended_counts_when_answers_are_graded_again(folder, tmp_path):
    "The prompts are those of the file, what the reward reads is the task's of today: numbers too, which no line has."
    def told(completions, worth, **_): return worth
    def exam(*worth): return Task("exam", [dict(prompt=f"w{i}", worth=x) for i, x in enumerate(worth, 2)], told)
    first = evaluate(folder, exam(1., 0., 1., 1.), folder=tmp_path, max_tokens=2)
    second = evaluate(folder, exam(0., 0., 1., 0.), folder=tmp_path, max_tokens=2, regrade=True)
    assert [e.tasks["exam"].scores for e in (first, second)] == [[[1.], [0.], [1.], [1.]], [[0.], [0.], [1.], [0.]]]


def test_a_base_model_s_next_question_is_no_part_of_its_answer(tmp_path):
    "A chat model ends its answer by itself."
    seen, base = [], tiny.tokenizer()
    base.chat_template = None
    def reward(completions, **_):
        seen[:] = completions
        return [1.]*len(completions)
    def graded(tokenizer, folder, **how):
        rollout = Rollout(tiny.model(), tokenizer=tokenizer)
        evaluate(rollout, replace(EXAM, reward=reward, **how), folder=folder, regrade=True)
        return seen[:]
    said = graded(base, tmp_path)
    word = next(w for c in said for w in c.split()[1:])
    assert graded(base, tmp_path, stop=(word, "nowhere")) == [c.split(word)[0] for c in said] != said
    assert any(word in c for c in graded(tiny.tokenizer(), None, stop=(word,)))


def test_a_grader_that_fails_keeps_the_samples(folder, tmp_path, monkeypatch):
    def broken(completions, **_): raise RuntimeError("the server is gone")
    with pytest.raises(RuntimeError, match="the server is gone"):
        evaluate(folder, replace(EXAM, reward=broken), folder=tmp_path)
    monkeypatch.setattr(Rollout, "__init__", lambda *_, **how: pytest.fail("sampled"))
    assert evaluate(folder, EXAM, folder=tmp_path).table()[0]["samples"] == len(ROWS)


def test_a_folder_has_the_answers_of_one_model_and_one_way_to_sample(folder, tmp_path):
    model = tmp_path/"model"
    Policy(str(folder), frozen=True).save_pretrained(model)
    evaluate(model, EXAM, folder=tmp_path/"a")
    with pytest.raises(ValueError, match=r"other settings.*'n': 1"): evaluate(model, EXAM, folder=tmp_path/"a", n=2)
    Policy(tiny.model(seed=1), frozen=True, tokenizer=tiny.tokenizer()).save_pretrained(model)      # trained on, say
    with pytest.raises(ValueError, match="other settings.*weights"): evaluate(model, EXAM, folder=tmp_path/"a")
    with pytest.raises(ValueError, match="answers to other prompts"):
        evaluate(folder, EXAM, folder=tmp_path/"b", name="b")
        evaluate(folder, replace(EXAM, rows=ROWS[::-1]), folder=tmp_path/"b", name="b")
    with pytest.raises(ValueError, match=r"answers of at most 6 tokens, and 5 are asked for"):
        evaluate(folder, replace(EXAM, max_tokens=5), folder=tmp_path/"b", name="b")
    with pytest.raises(ValueError, match=f"answers to {len(ROWS)} prompts, and there are 3"):
        evaluate(folder, EXAM, folder=tmp_path/"b", name="b", limit=3)
    with pytest.raises(ValueError, match="temperature 0 are 3 times the same"):
        evaluate(folder, EXAM, n=3, temperature=0)


# -- beside training
def trained(exam, background, tmp, saved=None):
    "Four steps of a policy, with an exam before each or without."
    policy = Policy(tiny.model(), lr=1e-2, tokenizer=tiny.tokenizer())
    rollout = Rollout(tiny.model(), tokenizer=tiny.tokenizer(), max_tokens=5)
    examiner = Rollout(tiny.model(seed=3), tokenizer=tiny.tokenizer(), max_tokens=5) if exam else None
    texts = Task("texts", [dict(text="w3"), dict(text="w4")], measure=perplexity([dict(text="w3")]).measure)
    torch.manual_seed(5)
    random.seed(5)
    data, rows, seen = Prompts(ROWS, tiny.tokenizer()), [], []
    for step in range(4):
        rollout.load(policy.weights())
        if examiner is not None:
            examiner.load(policy.weights())
            running = (later if background else AtOnce)(evaluate, examiner, [EXAM, texts], folder=tmp/f"{step}", n=2)
        if saved and step == 2: evaluate(saved, [EXAM, texts], n=2)      # a model that is loaded, in the loop's process
        batch = rollout.generate(data.take(4), group_size=2, seed=(0, step))
        batch["advantages"] = torch.where(batch.mask, 1., 0.)*torch.rand(len(batch), 1)
        metrics = policy.step(batch, lambda out, b: (-(out.logprobs*b.advantages).sum()/b.n_tokens, {}))
        rows.append({k: float(x) for k, x in metrics.items()} | dict(tokens=batch.tokens.tolist()))
        if examiner is not None: seen.append(running.result().numbers(version=policy.version))
    weights = {k: x.clone() for k, x in policy._run.module.state_dict().items()}
    modes = [m.training for m in policy._run.module.modules()]
    return (rows, torch.get_rng_state().tolist(), random.getstate(), data.state_dict(), modes), weights, seen


class AtOnce:
    "A call that runs at once."
    def __init__(self, f, *args, **how): self.made = f(*args, **how)
    def result(self): return self.made


def test_evaluating_changes_no_bit_of_the_run(tmp_path, folder):
    "Random numbers, modes, the order of the data, samples, metrics and weights; at once, and beside training."
    alone, weights, _ = trained(False, False, tmp_path)
    for background in (False, True):
        run, other, seen = trained(True, background, tmp_path/str(background), folder)
        assert run == alone and all(torch.equal(weights[k], other[k]) for k in weights)
        assert [x["evaluation/version"] for x in seen] == [0, 1, 2, 3]
        assert [x["evaluation/lag"] for x in seen] == [1, 1, 1, 1]
    assert len({x["evaluation/texts"] for x in seen}) == 4      # each version was measured, not the first four times


def test_answers_of_two_versions_are_not_mixed(tmp_path):
    policy = Policy(tiny.model(), lr=1e-2, tokenizer=tiny.tokenizer())
    examiner = Rollout(tiny.model(), tokenizer=tiny.tokenizer())
    examiner.load(policy.weights())
    first = evaluate(examiner, replace(EXAM, rows=ROWS[:4]), folder=tmp_path)
    assert first.version == 0
    batch = examiner.generate(EXAM.prompts(tiny.tokenizer()).take(2), max_tokens=3)
    policy.step(batch, lambda out, b: (out.logprobs.sum()/b.n_tokens, {}))
    examiner.load(policy.weights())
    with pytest.raises(ValueError, match="answers of version 0, and the weights have version 1"):
        evaluate(examiner, EXAM, folder=tmp_path)


def exam_on_rank(rank, ranks, folder, out):
    pool = SpmdPool()
    texts = Task("texts", [dict(text=f"w{i}") for i in range(5)], measure=perplexity([dict(text="w3")]).measure)
    kept = evaluate(folder, [EXAM, texts], folder=out/"kept", name="m", n=2, prompts=8, pool=pool)
    again = evaluate(folder, [EXAM, texts], folder=out/"kept", name="m", n=2, prompts=8, pool=pool)
    lost = evaluate(folder, [EXAM, texts], name="m", n=2, prompts=8, pool=pool)
    failed = "nothing"
    try: evaluate(folder, replace(EXAM, reward=lambda completions, **_: 1/0), name="m", pool=pool)
    except RuntimeError as e: failed = str(e)
    try: later(evaluate, folder, EXAM)
    except RuntimeError as e: failed += str(e)
    (out/f"{rank}.json").write_text(json.dumps([*map(repr, (kept, again, lost)), failed]))


def test_ranks_evaluate_together(folder, tmp_path):
    "Rank 0 alone has the files, all have the table, and an error of the grader ends all."
    on_ranks(exam_on_rank, (folder, tmp_path), 2, group=False)
    one, two = (json.loads((tmp_path/f"{r}.json").read_text()) for r in (0, 1))
    alone = evaluate(folder, EXAM, name="m", n=2)
    assert {*one[:3], *two[:3]} == {one[0]}
    assert [*map(str.split, repr(alone).splitlines())][-1] in [*map(str.split, one[0].splitlines())]
    assert all("ZeroDivisionError" in x[3] and "there are 2 ranks" in x[3] for x in (one, two))


# -- what is asked
def test_a_reward_model_and_a_policy_judge_pairs(folder, tmp_path):
    rows = [dict(prompt="w2", chosen=f"w{i}", rejected=f"w{i+1}") for i in (2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 24)]
    task = preferences(rows)
    Scorer(str(folder), frozen=True).save_pretrained(tmp_path/"scorer")
    tied = evaluate(tmp_path/"scorer", task).tasks["preferences"]
    assert tied.scores == [[.5]]*len(rows)                     # its head is new and gives 0
    policy = Policy(tiny.model(), frozen=True, tokenizer=tiny.tokenizer())
    judged = evaluate(policy, task).tasks["preferences"].scores
    batch = Preferences(rows, tiny.tokenizer(), shuffle=False).take(len(rows))
    total = (policy.logprobs(batch)*batch.mask).sum(1)
    assert judged == [[float(a > b)] for a, b in total.view(-1, 2).tolist()] and 0 < sum(x for x, in judged) < len(rows)
    same = evaluate(policy, preferences(rows, reference=policy)).tasks["preferences"].scores
    assert same == [[.5]]*len(rows)                            # β·log π/π is 0
    with pytest.raises(ValueError, match="a task samples, and the model does not"): evaluate(policy, EXAM)


def test_rows_of_one_prompt_are_one_observation(folder):
    "An exam that has each question ten times is no more certain."
    once = evaluate(folder, EXAM).tasks["exam"]
    ten = evaluate(folder, replace(EXAM, rows=ROWS*10)).tasks["exam"]
    assert ten.row()["prompts"] == len(ROWS) and ten.row()["samples"] == 10*len(ROWS)
    assert ten.estimate()[:3] == pytest.approx(once.estimate()[:3])


def test_prompts_beyond_the_context_are_left_out_and_said(folder):
    "64 positions, of which half may be the answer's."
    long = Task("long", [dict(prompt="a"*20), dict(prompt="a"*60)], even, max_tokens=50)
    spell = tiny.speller("a12")
    with pytest.warns(UserWarning, match="answers end at 32 tokens"):
        found = evaluate(Rollout(tiny.model(), tokenizer=spell), long, tokenizer=spell)
    assert found.table()[0]["left_out"] == 1 and "left out" in repr(found)


def scored(name, right, n=200, lower=False, unit="accuracy"):
    return Evaluation(name, dict(quiz=TaskResult("quiz", [str(i) for i in range(n)], [[float(x)] for x in right],
                                                 lower=lower, unit=unit)))


def test_the_sentence_is_sure_only_where_the_interval_is():
    "Paired: 55 % against 50 % is sure where the same questions are answered, and chance where others are."
    weak, nested = [i < 100 for i in range(200)], [i < 110 for i in range(200)]
    other = [i >= 90 for i in range(200)]
    sure, chance = scored("a", weak).compare(scored("b", nested)), scored("a", weak).compare(scored("b", other))
    assert "b is better than a on quiz: 55.0 % against 50.0 %, by 5.0 points" in repr(sure)
    assert sure.tasks[0].winner == 1 and sure.rows()[0]["winner"] == "b"
    assert "Nobody can be sure which is better on quiz" in repr(chance) and chance.tasks[0].winner is None
    assert sure.tasks[0].value == chance.tasks[0].value == pytest.approx(.05)
    few = scored("a", weak, lower=True, unit="bits").compare(scored("b", nested, lower=True, unit="bits"))
    assert few.tasks[0].winner == 0 and "a is better than b" in repr(few)      # less is better


def test_the_sentence_has_the_numbers_of_the_table():
    "Also where prompts come more than once, or weigh more than others."
    def of(name, *scores, **how):
        made = TaskResult("quiz", [*"aaabcd"], [[x] for x in scores], **how)
        return Evaluation(name, dict(quiz=made))
    for how in ({}, dict(weights=[1., 2, 3, 4, 5, 6], unit="bits", lower=True)):
        one, two = of("one", 1., 0, 1, 0, 1, 0, **how), of("two", 1., 1, 0, 1, 1, 1, **how)
        said = one.compare(two).tasks[0]
        shown = [e.tasks["quiz"].estimate().value for e in (one, two)]
        assert [said.first, said.second] == pytest.approx(shown) and said.value == pytest.approx(shown[1] - shown[0])
        assert said.prompts == 4


def test_the_command_says_which_checkpoint_is_better(folder, tmp_path, capsys, monkeypatch):
    "One command; an earlier evaluation in a model's place; a run's folder for its model."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT/"tests")
    (tmp_path/"exam.jsonl").write_text("".join(json.dumps(x) + "\n" for x in ROWS))
    (tmp_path/"texts.jsonl").write_text("".join(json.dumps(dict(text=f"w{i} w2")) + "\n" for i in range(2, 8)))
    Policy(tiny.model(seed=1), frozen=True, tokenizer=tiny.tokenizer()).save_pretrained(tmp_path/"run"/"model")
    words = ["--tasks", "exam.jsonl", "--reward", "test_evaluation:even", "--max-tokens", "6"]
    assert command_line(["evaluate", str(folder), "run", *words]) == 0
    said = capsys.readouterr().out
    assert said.count("exam") >= 3 and "on exam" in said and "95 % interval" in said
    found = json.loads((tmp_path/"evaluations"/"comparison.json").read_text())
    assert [*found] == [f"{folder} → run"]
    assert command_line(["evaluate", "run", *words, "--tasks", "perplexity=texts.jsonl"]) == 0
    assert "bits per byte" in capsys.readouterr().out                  # a task of a known name has its own grading
    assert command_line(["evaluate", "evaluations/run", "evaluations/run"]) == 0
    assert "score the same on each of" in capsys.readouterr().out
    assert command_line(["evaluate", "run", "--tasks", "exm"]) == 2
    assert "there is no task 'exm'; there are gsm8k" in capsys.readouterr().err


def trained_run(model, steps):
    "A run that saves every two steps, in `run` of the working directory."
    lines = [dict(prompt=f"w{i}", completion=f" w{i+1} w{i+2}") for i in range(2, 26)]
    Path("rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    Path("texts.jsonl").write_text("".join(json.dumps(dict(text=f"w{i} w{i+2}")) + "\n" for i in range(2, 26)))
    words = ["--steps", str(steps), "--save_every", "2", "--rows", "4", "--folder", "run", "--lr", "0.01"]
    assert command_line(["sft", "--data", "rows.jsonl", "--model", str(model), *words]) == 0


def test_a_run_that_goes_on_is_measured_at_its_newest_save(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained_run(folder, 5)
    tasks = ["--tasks", "perplexity=texts.jsonl"]
    assert command_line(["evaluate", "run", *tasks]) == 0          # it has ended: its model
    assert "more" not in capsys.readouterr().out
    shutil.rmtree("run/model")                                     # it goes on: its saves alone
    assert command_line(["evaluate", "run", *tasks]) == 0
    assert "run: measured after 5 steps; the run has done 5, which is 0 more" in capsys.readouterr().out
    ended, at_5 = (load_evaluation(f"evaluations/run{x}") for x in ("", "-step-5"))
    assert ended.tasks["perplexity"].scores == at_5.tasks["perplexity"].scores
    shutil.rmtree("run/step-00000005")
    assert command_line(["evaluate", str(folder), "run", *tasks]) == 0
    said = capsys.readouterr().out
    assert "run: measured after 4 steps; the run has done 5, which is 1 more" in said and "run step 4" in said
    assert load_evaluation("evaluations/run-step-4").tasks["perplexity"].scores != at_5.tasks["perplexity"].scores
    assert command_line(["evaluate", "run", *tasks]) == 0          # the same weights, made anew: nothing is refused


def test_two_saves_of_a_run_are_compared(folder, tmp_path, capsys, monkeypatch):
    "By their folders, also from elsewhere, though the run was given a relative path of its model."
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "base")
    trained_run("base", 4)
    shutil.copytree(folder, "run/base")                        # of another run: this one began beside its own
    (tmp_path/"run/base/config.json").write_text("{}")
    for at, run, texts in ((".", "run", "texts.jsonl"), ("run", "../run", "../texts.jsonl")):
        monkeypatch.chdir(tmp_path/at)
        saves = [f"{run}/step-0000000{k}" for k in (2, 4)]
        assert command_line(["evaluate", *saves, "--tasks", f"perplexity={texts}"]) == 0
        said = capsys.readouterr().out
        assert f"{run} step 2" in said and f"{run} step 4" in said and "on perplexity" in said and "more." not in said
    shutil.move(tmp_path/"run/config.yaml", tmp_path)
    assert command_line(["evaluate", saves[0], "--tasks", f"perplexity={texts}"]) == 2
    assert "names no model" in capsys.readouterr().err


def test_models_of_one_name_are_told_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text("".join(json.dumps(dict(text=f"w{i} w2")) + "\n" for i in range(2, 8)))
    for seed in (0, 1):
        Policy(tiny.model(seed=seed), frozen=True, tokenizer=tiny.tokenizer()).save_pretrained("run/model")
        words = ["run", "--tasks", "perplexity=texts.jsonl", "--folder", f"at-{seed}"]
        assert command_line(["evaluate", *["at-0/run"]*seed, *words]) == 0
    said, found = capsys.readouterr().out, json.loads(Path("at-1/comparison.json").read_text())
    assert [*found] == ["at-0/run → at-1/run"]
    assert all(re.search(rf"^at-{k}/run +perplexity", said, re.MULTILINE) for k in (0, 1)) and "run is better" not in (
        said.replace("at-0/run", "").replace("at-1/run", ""))
    assert "at-0/run" in repr(load_evaluation("at-0/run").compare(load_evaluation("at-1/run")))


def test_answers_are_graded_with_the_rows_of_their_prompts(folder, tmp_path):
    "Rows may come in another order, and twice; one that is gone is missed."
    def told(completions, worth, **_): return worth
    def exam(*rows): return Task("exam", [dict(prompt=p, worth=x) for p, x in rows], told, max_tokens=2)
    rows = ("w2", 1.), ("w3", 0.), ("w4", .5), ("w3", .25), ("w5", 0.)
    evaluate(folder, exam(*rows), folder=tmp_path)
    other = [rows[i] for i in (2, 1, 0, 3, 4)]
    again = evaluate(folder, exam(*other), folder=tmp_path, regrade=True)
    assert again.tasks["exam"].scores == [[x] for _, x in rows]
    with pytest.raises(ValueError, match=r"exam\.jsonl has an answer to 'w4'.*of which the task has no row"):
        evaluate(folder, exam(*[r if r[0] != "w4" else ("w9", 0.) for r in rows]), folder=tmp_path, regrade=True)
    assert load_evaluation(tmp_path).tasks["exam"].scores == again.tasks["exam"].scores


def test_old_numbers_are_no_answer_for_new_weights(tmp_path):
    "Also where nothing is left to be sampled or measured; a version that is refused leaves the old one whole."
    texts = Task("texts", [dict(text="w3 w4")], measure=perplexity([dict(text="w3")]).measure)
    policy = Policy(tiny.model(), lr=1e-2, tokenizer=tiny.tokenizer())
    examiner = Rollout(tiny.model(), tokenizer=tiny.tokenizer())
    examiner.load(policy.weights())
    for task in (EXAM, texts): evaluate(examiner, task, folder=tmp_path/task.name)
    batch = examiner.generate(EXAM.prompts(tiny.tokenizer()).take(2), max_tokens=3)
    policy.step(batch, lambda out, b: (out.logprobs.sum()/b.n_tokens, {}))
    examiner.load(policy.weights())
    for task in (EXAM, texts):
        with pytest.raises(ValueError, match="answers of version 0, and the weights have version 1"):
            evaluate(examiner, task, folder=tmp_path/task.name)
        assert load_evaluation(tmp_path/task.name).version == 0
    model = tiny.model()
    evaluate(model, texts, folder=tmp_path/"module", tokenizer=tiny.tokenizer())
    evaluate(model, texts, folder=tmp_path/"module", tokenizer=tiny.tokenizer())
    with torch.no_grad(): next(model.parameters()).add_(.1)
    with pytest.raises(ValueError, match="other settings.*weights"):
        evaluate(model, texts, folder=tmp_path/"module", tokenizer=tiny.tokenizer())


def test_a_task_that_was_cut_short_is_in_no_table(folder, tmp_path):
    "Until it has been gone on with."
    texts = perplexity([dict(text=f"w{i} w3") for i in range(2, 8)])
    def killed(model, rows, tokenizer):
        if rows[0]["text"] != "w2 w3": raise KeyboardInterrupt
        return bits_per_byte(model, rows, tokenizer)
    with pytest.raises(KeyboardInterrupt): evaluate(folder, replace(texts, measure=killed), folder=tmp_path, prompts=3)
    with pytest.raises(ValueError, match="is unfinished"): load_evaluation(tmp_path)
    evaluate(folder, EXAM, folder=tmp_path)
    assert [*load_evaluation(tmp_path).tasks] == ["exam"]
    about = json.loads((tmp_path/"evaluation.json").read_text())
    assert {k: x["done"] for k, x in about["tasks"].items()} == dict(perplexity=False, exam=True)
    assert [row["task"] for row in about["table"]] == ["exam"]
    evaluate(folder, texts, folder=tmp_path)
    assert {k: len(t.keys) for k, t in load_evaluation(tmp_path).tasks.items()} == dict(perplexity=6, exam=len(ROWS))


def test_a_folder_is_of_one_evaluation_at_a_time(folder, tmp_path):
    "Another process is named; one that was refused, or has ended, keeps nobody out."
    def meanwhile(completions, **_):
        out = subprocess.run([sys.executable, "-c", TAKEN, tmp_path], env=os.environ | dict(PYTHONPATH=str(ROOT)),
                             capture_output=True, text=True)
        assert f"evaluate: {tmp_path} is in use by process {os.getpid()}" in out.stderr, out.stderr[-500:]
        return even(completions)
    evaluate(folder, replace(EXAM, reward=meanwhile), folder=tmp_path)
    with pytest.raises(ValueError, match="other settings"): evaluate(folder, EXAM, n=2, folder=tmp_path)
    evaluate(folder, EXAM, folder=tmp_path, regrade=True)


TAKEN = """
import sys
from rlblocks.evaluation.evaluate import sole_evaluation
with sole_evaluation(sys.argv[1]): pass
"""


def test_rows_that_say_nothing_have_no_score(folder):
    "An empty text, and two answers that are equal; alone in a chunk, too."
    texts = evaluate(folder, perplexity([dict(text="w2 w3"), dict(text=""), dict(text="w4")])).tasks["perplexity"]
    assert [x == x for x, in texts.scores] == [True, False, True] and texts.row()["ungraded"] == 1
    full = evaluate(folder, perplexity([dict(text="w2 w3"), dict(text="w4")])).tasks["perplexity"]
    assert texts.estimate()[:3] == pytest.approx(full.estimate()[:3])
    rows = [dict(prompt="w2", chosen="w3", rejected="w4"), dict(prompt="w2", chosen="w5", rejected="w5")]
    for task in (preferences(rows), perplexity([dict(text="w2 w3"), dict(text="")])):
        scores = evaluate(folder, task, prompts=1).tasks[task.name].scores
        assert [x == x for x, in scores] == [True, False]


def test_a_reward_that_leaves_0_to_1_is_no_percentage():
    one, two = scored("one", [2.5, 100., 3.]*10, n=30), scored("two", [3.5, 101., 4.1]*10, n=30)
    assert "35.17" in repr(one) and "%" not in repr(one).replace("95 %", "") and one.table()[0]["unit"] == "score"
    said = repr(one.compare(two))
    assert "two is better than one on quiz: 36.2 against 35.17, by 1.033 (95 % interval" in said
    back = repr(two.compare(one))           # how much the better one is better, whichever comes first
    assert said.partition("by ")[2] == back.partition("by ")[2] and " 1.0" in back.partition("interval")[2]
    alike = repr(one.compare(scored("two", [3.5, 101., 4.]*10, n=30)))
    assert "two differs from one by 1 on each of 30 prompts of quiz" in alike and "1.9e-09" in alike
    mixed = evaluation_text([scored("low", [0., 1.], n=2), scored("high", [0., 7.], n=2)])
    assert "%" not in mixed.replace("95 %", "") and "0.5" in mixed and "points" not in mixed


# -- real rows
def whole_function(r):
    "A problem's function without the imports above it, which a chat model leaves out."
    return r["prompt"][r["prompt"].rfind("def "):] + r["canonical_solution"]


@pytest.mark.shared
@pytest.mark.parametrize(("task", "file", "gold"), [
    (gsm8k, "gsm8k/test", lambda r: r["completion"]),
    (math500, "prompts/math500", lambda r: f"So it is \\boxed{{{r['answer']}}}."),
    (humaneval, "prompts/HumanEval", lambda r: r["canonical_solution"]),
    (humaneval, "prompts/HumanEval", lambda r: f"The body:\n```python\n{r['canonical_solution']}```\nDone."),
    (humaneval, "prompts/HumanEval", lambda r: f"```python\n{whole_function(r)}```"),
    (bbh, "prompts/bbh", lambda r: f"Is the answer: maybe?\nThe answer is {r['answer']}.")])
def test_gold_answers_are_right_and_others_are_not(shared, task, file, gold):
    made = task(shared/f"{file}.jsonl.gz", limit=6)
    rows = [*made.rows]
    columns = {k: [r[k] for r in rows] for k in rows[0] if k != "completion"}
    assert made.reward(completions=[gold(r) for r in rows], **columns) == [1.]*6
    assert made.reward(completions=["I do not know."]*6, **columns) == [0.]*6
