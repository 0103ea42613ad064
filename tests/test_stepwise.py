"""Stepwise feedback: labels sit at the last token of their step, whatever tokenizer, order and batch."""
import gzip
import json

import pytest
import torch
from rlblocks import StepFeedback


class Plain:
    bos_token_id, eos_token_id, eos_token = 1, 2, "■"
    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[1]*add_special_tokens + [ord(c) for c in t] for t in texts]}


ROWS = [dict(prompt=f"{i}?", steps=[f"{i}{'x'*k}" for k in range(1 + i % 3)], labels=[1, 0, None][:1 + i % 3], number=i)
        for i in range(7)]


def test_labels_follow_their_steps_through_shuffles_and_resumption():
    data, again = (StepFeedback(ROWS, Plain(), seed=3) for _ in range(2))
    data.take(4)
    again.load_state_dict(data.state_dict())
    batch, same = data.take(5), again.take(5)
    assert batch.number == same.number and torch.equal(batch.steps, same.steps)
    for k, number in enumerate(batch.number):
        row, tokens = ROWS[number], batch.tokens[k].tolist()
        ends = [i for i, t in enumerate(tokens) if t == ord("\n")]
        judged = ends[:2]                       # the third step has no label
        assert len(ends) == len(row["steps"]) and batch.steps[k].nonzero()[:, 0].tolist() == judged
        assert batch.step_labels[k, judged].tolist() == row["labels"][:2] and batch.step_labels[k].sum() == 1
        assert batch.mask[k].sum() == len("".join(row["steps"])) + len(ends) + 1 and tokens[batch.lengths[k]-1] == 2
    with pytest.raises(ValueError, match="fingerprint"):
        StepFeedback([r | dict(labels=r["labels"][::-1]) for r in ROWS], Plain(), seed=3).load_state_dict(
            data.state_dict())


def test_rows_without_a_judged_step_and_long_ones_are_left_out():
    rows = [*ROWS, dict(prompt="?", steps=["a"], labels=[None], number=7)]
    with pytest.warns(UserWarning, match="1 of 8 rows have no judged step"):
        data = StepFeedback(rows, Plain(), max_tokens=8, drop_longer=True, shuffle=False)
    assert (data.dropped, data.longer, len(data)) == (1, 4, 3)
    batch = data.take(3)
    assert batch.number == [0, 3, 6] and batch.step_labels[batch.steps].tolist() == [1, 1, 1]


@pytest.mark.shared
def test_real_steps_end_where_their_texts_do(shared):
    "Tokens of a real tokenizer up to each mark are the text up to the end of that step."
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(shared/"tokenizers/qwen2.5")
    with gzip.open(shared/"prm/prm_train.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(100), strict=False)]
    rows = [dict(prompt=r["question"] + "\n", steps=r["steps"], labels=r["step_labels"]) for r in rows]
    data = StepFeedback(rows, tok, shuffle=False)
    batch = data.take(len(rows))
    for k, row in enumerate(rows):
        text, ends, labels = row["prompt"], [], []
        for step, label in zip(row["steps"], row["labels"], strict=True):
            text += step + "\n"*(not step.endswith("\n"))
            if label is not None: ends.append(text); labels.append(label)
        at = batch.steps[k].nonzero()[:, 0].tolist()
        assert [tok.decode(batch.tokens[k, :i+1]) for i in at] == ends
        assert batch.step_labels[k, at].tolist() == labels
