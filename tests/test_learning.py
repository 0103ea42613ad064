"""The benchmark of learning beside TRL compares learning, and nothing else: given one batch again and again, both sides
take the same steps. What samples draws other answers on each side, and is only run."""
import importlib.util

import pytest

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def learning(root):
    "The benchmark as a module; nothing of it runs on import."
    spec = importlib.util.spec_from_file_location("learning", root/"benchmarks/learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pairs(learning, shared): return [part[:8] for part in learning.judged(shared)]


def gap_of(learning, rows):
    "How far the model prefers the good answers of some rows, in nats or in reward: unlike an accuracy, not in steps."
    def number(exam, net):
        if exam.name == "reward_model":
            ids, there = learning.padded([ids for ids, _ in rows]), learning.padded([[1]*len(ids) for ids, _ in rows])
            score = net(input_ids=ids, attention_mask=there).logits[:, 0]
        else: score, _ = learning.answer_logprobs(net, rows)
        return (score[::2] - score[1::2]).mean()
    return number


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model"])
def test_both_sides_take_the_same_steps(name, learning, pairs, shared, monkeypatch):
    train, kept = pairs
    rows = learning.batch_rows(learning.pairs_of(kept, learning.tokenizer_of(shared)).take(8))
    monkeypatch.setattr(learning, "judged", lambda data: (train, kept))
    monkeypatch.setattr(learning, "KEPT", len(kept))
    monkeypatch.setattr(learning, "EVERY", 1)
    monkeypatch.setattr(learning.Exam, "number", gap_of(learning, rows))
    every_row = dict(sft=8, dpo=8, kto=16, reward_model=8)[name]
    monkeypatch.setitem(learning.SETTINGS, name, learning.Settings(3, 2e-3, rows=every_row))
    ours, theirs = (learning.run(name, side, 0, shared) for side in ("ours", "trl"))
    assert [x for x, *_ in ours] == [x for x, *_ in theirs] == [every_row*step for step in range(4)]
    moved = abs(ours[-1][-1] - ours[0][-1])
    assert moved > .01
    assert [y for *_, y in ours] == pytest.approx([y for *_, y in theirs], abs=.002*moved)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("side", ["ours", "trl"])
def test_what_samples_runs(name, side, learning, shared, monkeypatch):
    monkeypatch.setattr(learning, "EVERY", 1)
    monkeypatch.setattr(learning.Exam, "number", lambda exam, net: sum(float(p.abs().sum()) for p in net.parameters()))
    monkeypatch.setitem(learning.SETTINGS, name, learning.Settings(2, 3e-4, rows=2, group_size=4, max_tokens=8))
    points = learning.run(name, side, 0, shared)
    assert [x for x, *_ in points] == [0, 8, 16]
    assert points[1][1] < points[2][1]
