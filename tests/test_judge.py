"""A language model as a judge: what it is asked, what counts as a verdict, both orders; and rows that are graded again
without sampling."""
import asyncio
import json
import re
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from rlblocks import (Grader, Retries, Rollout, judge_reward, judge_rollout, judge_url, load_rollouts, pairwise_reward,
                      regrade, save_rollouts)
from test_killable import batch
from tiny import model, tokenizer


def answers_of(text): return [re.search(f"<answer {x}>\n(.*)\n</answer {x}>", text, re.DOTALL)[1] for x in "AB"]


def longer(texts):
    "Prefers the longer one."
    verdict = lambda a, b: "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"
    return [f"So it is.\nVerdict: **{verdict(*answers_of(t))}**" for t in texts]


def test_each_pair_is_asked_in_both_orders_once():
    asked = []
    def ask(texts):
        asked.extend(tuple(answers_of(t)) for t in texts)
        return longer(texts)
    b = batch(["aaa", "a", "aa", "b"])
    scores = Grader(pairwise_reward(ask, rivals=3)).score(b)
    assert scores.tolist() == pytest.approx([1., 1/6, 2/3, 1/6])
    assert len(asked) == len(set(asked)) == 12 and {(y, x) for x, y in asked} == set(asked)


@pytest.mark.parametrize("says", ["Verdict: A", "Verdict: B", "I think A is better. verdict - tie"])
def test_a_judge_of_positions_teaches_nothing(says):
    graded = Grader(pairwise_reward(lambda texts: [says]*len(texts))).grade(batch(["a", "bb", "ccc"]))
    assert graded["scores"].tolist() == [.5]*3
    assert float(graded["metrics"]["judge/contradicts_itself"]) == float("tie" not in says)


def test_groups_are_apart_and_a_lone_row_has_no_score():
    b = batch(["a", "bb", "c", "dd", "e"])
    b["group"] = torch.tensor([0, 0, 1, 1, 2])
    scores = Grader(pairwise_reward(longer)).score(b)
    assert scores[:4].tolist() == [0., 1., 0., 1.] and scores[4].isnan()


def test_a_pair_without_both_verdicts_counts_for_nobody():
    def mute(texts):
        return [v if answers_of(t)[0] != "a" else "?" for t, v in zip(texts, longer(texts), strict=True)]
    graded = Grader(pairwise_reward(mute, rivals=2)).grade(batch(["a", "bb", "ccc"]))
    assert graded["scores"].isnan().tolist() == [True, False, False] and graded["scores"][1:].tolist() == [0., 1.]
    assert float(graded["metrics"]["judge/without_verdict"]) == pytest.approx(1/3)
    with pytest.raises(ValueError, match="rivals=0"): pairwise_reward(longer, rivals=0)


def test_points_are_read_from_the_end_and_braces_are_text():
    says = iter(["Score: 1 at first. Score: 7", "**Score:** 10", "score 5.5", "Score: 11", "no verdict", "Score: -3"])
    async def ask(texts): return [next(says) for _ in texts]
    texts = ["{x}", "Score: 10", "{prompt}", "%s", "", "}{"]
    graded = Grader(judge_reward(ask)).grade(batch(texts))
    assert graded["scores"][:3].tolist() == pytest.approx([6/9, 1., .5]) and graded["scores"][3:].isnan().all()
    assert float(graded["metrics"]["judge/without_verdict"]) == .5


def test_a_template_names_columns():
    seen = []
    def ask(texts): seen.extend(texts); return ["Score: 1"]*len(texts)
    fn = judge_reward(ask, template="{prompt} {completion} {rubric} {lowest}-{highest}", lowest=0, highest=1)
    assert Grader(fn).score(batch(["a"], rubric=["be kind"])).tolist() == [1.] and seen == ["? a be kind 0-1"]
    with pytest.raises(RuntimeError, match="2 answers came to 1 questions"):
        Grader(judge_reward(lambda texts: ["Score: 1"]*2)).score(batch(["a"]))


def test_a_rollout_is_a_judge():
    "One of random weights: what it says is no verdict, and it says the same of the same text."
    rollout = Rollout(model(), tokenizer=tokenizer(), max_tokens=4, device="cpu")
    ask = judge_rollout(rollout)
    first = ask(["w3 w4", "w5", "w3 w4"])
    assert first[0] == first[2] and len(first) == 3 and all(isinstance(t, str) for t in first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Grader(judge_reward(ask, template="w3 w4")).score(batch(["a", "b"])).isnan().all()
    with pytest.raises(ValueError, match="no tokenizer"): judge_rollout(Rollout(model(), device="cpu"))


class Chat(BaseHTTPRequestHandler):
    "Chat Completions: says who asked, and how long the text was; busy at first."
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers["authorization"], body["model"]))
        busy = len(self.server.seen) == 1
        text = f"Score: {len(body['messages'][0]['content']) % 10}"
        made = json.dumps(dict(choices=[dict(message=dict(role="assistant", content=text))])).encode()
        self.send_response(429 if busy else 200)
        self.end_headers()
        self.wfile.write(b"" if busy else made)
    def log_message(self, *_): pass


def test_an_address_is_a_judge():
    pytest.importorskip("httpx2", reason="the extra server is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ask = judge_url(f"http://127.0.0.1:{server.server_port}/v1", "judge", key="k", retries=Retries(first=.01))
    assert asyncio.run(ask(["abc", "a", ""])) == ["Score: 3", "Score: 1", "Score: 0"]
    assert set(server.seen) == {("/v1/chat/completions", "Bearer k", "judge")} and len(server.seen) == 4
    server.shutdown()
    server.server_close()


NO_COMPLETION = [{}, dict(choices=[]), dict(choices=[dict(message=None)]), dict(choices={"0": 1}),
                 dict(choices=[dict(message=dict(content=[1]))])]


@pytest.mark.parametrize("reply", NO_COMPLETION, ids=str)
def test_a_reply_that_is_no_completion_is_no_verdict(reply, monkeypatch):
    "Of one row, with the reason; of all, it is an error that says what came. An empty completion is none either."
    async def post(client, url, body, retries):
        text = body["messages"][0]["content"]
        if text == "long": raise RuntimeError("refused: 400: this model has 4096 positions")
        message = dict(content=None if text == "mute" else "Score: 3")
        return reply if text == "odd" else dict(choices=[dict(message=message)])
    monkeypatch.setattr("rlblocks.graders.judge.post_with_retries", post)
    ask = judge_url("http://127.0.0.1:1/v1", "judge")
    grader = Grader(judge_reward(ask, template="{completion}", lowest=0, highest=3))
    with pytest.warns(UserWarning, match="1 of 3 questions have no verdict; .*: judge_url: the server said {"):
        scores = grader.score(batch(["a", "odd", "mute"]))
    assert scores[0] == 1. and scores[1:].isnan().all()
    with pytest.warns(UserWarning, match="1 of 2 questions have no verdict.* 4096 positions"):
        assert grader.score(batch(["a", "long"]))[0] == 1.
    with pytest.raises(RuntimeError, match="a text at choices.0..message.content is wanted"):
        grader.score(batch(["odd", "odd"]))


# -- graded again

def right(completions, answer): return [float(int(c.replace(",", "")) == a) for c, a in zip(completions, answer,
                                                                                         strict=True)]


def rows(*texts): return batch(texts, answer=[1000]*len(texts), scores=torch.tensor([0.]*len(texts)))


def test_stored_rows_are_graded_again_and_named(tmp_path):
    save_rollouts(tmp_path/"old", 3, rows("1,000", "12"))
    save_rollouts(tmp_path/"old", 7, rows("none", "1000", "9"))
    with pytest.warns(UserWarning, match="1 of 3 rows"):
        found = regrade(tmp_path/"old", Grader(right, deadline=60.), into=tmp_path/"new")
    assert found.rows == 5 and set(found.changed) == {(3, 0), (7, 0), (7, 1)} and found.changed[3, 0] == (0., 1.)
    assert {k: f.kind for k, f in found.failures.items()} == {(7, 0): "raised"} and found.kinds == dict(raised=1)
    assert (found.before, found.after) == (0., .5) and "ValueError" in found.failures[7, 0].text
    assert repr(found) == "Regraded(5 rows, 3 changed, mean 0 → 0.5, failed: 1 raised)"
    new, old = load_rollouts(tmp_path/"new", 7), load_rollouts(tmp_path/"old", 7)
    assert new.scores[1:].tolist() == [1., 0.] and new.scores_before.tolist() == old.scores.tolist() == [0.]*3
    assert regrade(tmp_path/"old", Grader(right), steps=[3]).rows == 2


def test_a_batch_is_graded_again_and_stays_as_it_is():
    b = rows("1,000", "12")
    found = regrade(b, Grader(right))
    assert set(found.changed) == {(0, 0)} and b.scores.tolist() == [0., 0.] and "scores_before" not in b
    assert regrade(b.drop("scores"), Grader(right)).rows == 2


def test_a_folder_without_rows(tmp_path):
    with pytest.raises(ValueError, match="regrade: no rows in"): regrade(tmp_path, Grader(right))
