"""A reward function behind an address: batched, asked again without being computed again, refused clearly, and gone
when it is closed."""
import asyncio
import json
import pickle
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from clock import Clock
from conftest import skip_without
from rlblocks import Grader, RemoteReward, Retries, Scorer, scorer_reward, serve_reward
from test_killable import batch

skip_without("fastapi", "the extra server is not installed")
skip_without("httpx2", "the extra server is not installed")
QUICK = Retries(tries=4, first=.01, timeout=60.)


def lengths(completions, **_): return [float(len(c)) if c else None for c in completions]


def post(server, body, token=None, path="/score"):
    "(status, answer) of one question."
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {server.token if token is None else token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e: return e.code, json.load(e)


def test_it_is_a_reward_function_as_it_would_be_here():
    texts = [("x"*(i % 7)) for i in range(50)]
    with serve_reward(lengths) as server:
        assert server.url.startswith("http://127.0.0.1:")
        remote = pickle.loads(pickle.dumps(RemoteReward(server.url, server.token, rows=8, at_once=3)))
        got = Grader(remote).score(batch(texts))
    assert torch.equal(got.isnan(), torch.tensor([not t for t in texts]))
    assert got.nan_to_num(0.).tolist() == [float(len(t)) for t in texts]


def test_a_question_that_is_asked_again_is_not_computed_again():
    "Also where the first is under way."
    calls, goes = [], threading.Event()
    def slow(completions):
        calls.append(completions)
        assert goes.wait(60)
        return [float(len(calls))]*len(completions)
    with serve_reward(slow) as server, ThreadPoolExecutor(3) as pool:
        body = dict(id="one", rows=dict(completions=["a"]))
        asked = [pool.submit(post, server, body) for _ in range(3)]
        goes.set()
        answers = [a.result() for a in asked] + [post(server, body)]
        assert answers == [(200, dict(id="one", scores=[1.]))]*4 and calls == [["a"]]
        status, said = post(server, dict(id="one", rows=dict(completions=["b"])))
        assert status == 409 and "'one' was another question's" in said["error"]


def test_an_error_is_said_to_who_asked_and_not_kept():
    def picky(completions):
        if "bad" in completions and not well.is_set(): raise ValueError("bad word")
        return [1.]*len(completions)
    well = threading.Event()
    with serve_reward(picky, wait=.05) as server, ThreadPoolExecutor(2) as pool:
        bad = dict(id="b", rows=dict(completions=["bad"]))
        asked = [pool.submit(post, server, b) for b in (bad, dict(id="g", rows=dict(completions=["good"])))]
        assert asked[0].result() == (422, dict(error="the reward function raised ValueError: bad word"))
        assert asked[1].result() == (200, dict(id="g", scores=[1.]))
        remote = RemoteReward(server.url, server.token, retries=QUICK)
        with pytest.raises(RuntimeError, match="rows 0 to 0: .*422.*bad word"):
            asyncio.run(remote(completions=["bad"]))
        well.set()
        assert post(server, bad) == (200, dict(id="b", scores=[1.]))


def test_rows_that_the_function_raises_on_have_no_verdict():
    "The others keep theirs, and a warning names one. That its words raise changes nothing."
    class Mute(ValueError):
        def __str__(self): raise RuntimeError("no words")
    def picky(completions):
        if "mute" in completions: raise Mute
        return [float(x) for x in completions]
    with serve_reward(picky) as server:
        remote = RemoteReward(server.url, server.token, retries=QUICK, rows=3)
        with pytest.warns(UserWarning, match="remote: 2 of 7 rows have no verdict: remote: rows 2 to 2: .*422.*'bad'"):
            got = asyncio.run(remote(completions=["0", "1", "bad", "3", "mute", "5", "6"]))
        assert got == [0, 1, None, 3, None, 5, 6]
        with pytest.raises(RuntimeError, match="rows 0 to 0: .*422.*Mute"):
            asyncio.run(remote(completions=["mute"]*4))


def test_questions_of_many_clients_become_few_calls():
    sizes, goes = [], threading.Event()
    def counts(completions, gold=None):
        assert goes.wait(60)
        sizes.append(len(completions))
        return [float(c) for c in completions]
    with serve_reward(counts, rows=16) as server:
        async def all_of():
            asks = [RemoteReward(server.url, server.token)(completions=[str(2*i), str(2*i + 1)]) for i in range(24)]
            asked = asyncio.gather(*asks)
            while len(server.app.state.batcher.named) < 24: await asyncio.sleep(.01)
            goes.set()
            return await asked
        assert asyncio.run(all_of()) == [[2.*i, 2.*i + 1] for i in range(24)]
    assert sum(sizes) == 48 and max(sizes) <= 16 and len(sizes) < 24


def test_what_is_no_question_is_refused_with_a_sentence():
    deep = b'{"rows": {"completions": [' + b"["*2000 + b"]"*2000 + b"]}}"
    with serve_reward(lengths, most=5000) as server:
        assert post(server, dict(rows=dict(completions=["a"])), token="guess")[0] == 401
        assert post(server, dict(rows=dict(completions=["a"])), token="ü")[0] == 401
        for body in (b"{", b"[]", b"\xff", dict(rows={}), dict(rows=[]), dict(rows=dict(completions="a")), deep,
                     dict(rows=dict(completions=["a"], gold=[])), dict(id=3, rows=dict(completions=["a"])),
                     b"["*2000, dict(id="\ud800", rows=dict(completions=["a"])), {"rows": {"\ud800": 1}}):
            status, said = post(server, body)
            assert status == 400 and "no question: " in said["error"], body
        assert post(server, dict(rows=dict(completions=["a"*6000])))[0] == 413
        with urllib.request.urlopen(server.url + "/health", timeout=60) as r: assert json.load(r) == dict(ok=True)
        assert post(server, dict(rows=dict(completions=["ab"])))[1]["scores"] == [2.]


def test_a_function_that_hangs_or_leaves_costs_its_question():
    "What may pass is 503, and is asked again; the server goes on, and closes."
    hangs = threading.Event()
    def wild(completions):
        what, = completions
        if what == "hangs": hangs.wait(600)
        if what == "leaves": raise SystemExit
        if what == "stops": raise StopIteration
        if what == "cancels": raise asyncio.CancelledError
        if what == "upstream": raise ConnectionError("busy")
        if what == "recurs": return wild(completions)
        if what == "half": raise ValueError("\ud800")
        return [1.]
    with serve_reward(wild, deadline=3., rows=1) as server:
        for what, status, says in (("hangs", 503, "took more than 3"), ("leaves", 422, "it left by SystemExit"),
                                   ("stops", 422, "it left by StopIteration"), ("upstream", 503, "ConnectionError"),
                                   ("cancels", 422, "it left by CancelledError"), ("recurs", 422, "RecursionError"),
                                   ("half", 422, "ValueError: ?")):
            got, said = post(server, dict(rows=dict(completions=[what])))
            assert got == status and says in said["error"]
        assert post(server, dict(rows=dict(completions=["well"])))[1]["scores"] == [1.]
    assert not server._served.thread.is_alive()
    hangs.set()


@pytest.mark.parametrize("end", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_an_async_function_that_leaves_costs_its_question(end):
    async def wild(completions):
        if completions == ["leaves"]: raise end
        return [1.]*len(completions)
    with serve_reward(wild, rows=1) as server:
        got, said = post(server, dict(rows=dict(completions=["leaves"])))
        assert got == 422 and f"it left by {end.__name__}" in said["error"]
        assert post(server, dict(rows=dict(completions=["well"])))[1]["scores"] == [1.]


def test_a_question_that_does_not_arrive_and_who_asks_none_are_hung_up_on(monkeypatch):
    "One that is being worked on is not."
    monkeypatch.setattr("rlblocks.graders.served.MOST_SECONDS", .2)
    goes = threading.Event()
    def slow(completions):
        assert goes.wait(60)
        return [1.]
    with serve_reward(slow) as server, ThreadPoolExecutor(1) as pool:
        server._served.connections.seconds = .2
        works = pool.submit(post, server, dict(rows=dict(completions=["a"])))
        where = "127.0.0.1", int(server.url.rpartition(":")[2])
        half = socket.create_connection(where, timeout=60)
        half.sendall(f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
                     "Content-Length: 9\r\n\r\n{".encode())
        assert b" 408 " in half.recv(1 << 16)
        silent = socket.create_connection(where, timeout=60)
        assert silent.recv(1) == b"" and not works.done()
        goes.set()
        assert works.result()[1]["scores"] == [1.]
    for s in (half, silent): s.close()


@pytest.mark.parametrize(("out", "says"), [([1.], "1 verdicts for 2"), ([float("nan"), 1.], "it returned nan"),
                                           (["x", 1.], "ValueError")])
def test_verdicts_are_checked_there(out, says):
    with serve_reward(lambda completions: out) as server:
        status, said = post(server, dict(rows=dict(completions=["a", "b"])))
        assert status == 422 and says in said["error"]


def test_async_functions_are_awaited_and_tensors_are_numbers():
    async def later(completions):
        await asyncio.sleep(0)
        return torch.tensor([float(len(c)) for c in completions])
    with serve_reward(later) as server:
        assert post(server, dict(rows=dict(completions=["a", "bc"])))[1]["scores"] == [1., 2.]


class Flaky:
    "A server that fails so many times before it answers, in one of the ways in which servers fail."

    def __init__(self, *failures):
        self.failures, self.seen = list(failures), []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try: conn, _ = self.socket.accept()
            except OSError: return
            with conn: self.answer(conn)

    def answer(self, conn):
        data = b""
        while b"\r\n\r\n" not in data: data += conn.recv(1 << 16)
        head, body = data.split(b"\r\n\r\n", 1)
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < size: body += conn.recv(1 << 16)
        self.seen.append(json.loads(body)["id"])
        how = self.failures.pop(0) if self.failures else 200
        how, after = how if isinstance(how, tuple) else (how, "")
        if how == "cut": return
        if how in ("drips", "floods"): return self.goes_on(conn, b" " if how == "drips" else b" "*(1 << 20))
        text, how = (how, 200) if isinstance(how, bytes) else (
            json.dumps(dict(scores=[7.]) if how == 200 else dict(error="busy")).encode(), how)
        head = f"HTTP/1.1 {how} x\r\nConnection: close\r\nRetry-After: {after}\r\n"
        conn.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode("latin-1") + text)


    def goes_on(self, conn, part):
        conn.sendall(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % (300 << 20))
        try:
            while True: conn.sendall(part); time.sleep(.05*(len(part) == 1))
        except OSError: pass                    # the client has gone


def test_it_asks_again_by_the_same_name():
    server = Flaky(503, "cut", 429)
    assert asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"])) == [7.]
    assert len(server.seen) == 4 and len(set(server.seen)) == 1
    server.socket.close()


def test_it_gives_up_and_does_not_ask_again_what_was_refused():
    server = Flaky(*[503]*9)
    with pytest.raises(RuntimeError, match="remote: rows 0 to 0: .*no answer in 4 tries; the last one: 503.*busy"):
        asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"]))
    assert len(server.seen) == 4
    server.failures = [403]
    with pytest.raises(RuntimeError, match="refused: 403"):
        asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"]))
    assert len(server.seen) == 5
    with pytest.raises(RuntimeError, match="2 scores are wanted"):
        asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a", "b"]))
    server.socket.close()


def test_a_timeout_is_of_the_whole_answer_and_an_answer_has_an_end():
    server = Flaky(*["drips"]*2, "floods")
    quick = Retries(tries=2, first=.01, timeout=.5)
    with Clock() as clock, pytest.raises(RuntimeError, match="in 2 tries; the last one: no whole answer came in 0.5 s"):
        asyncio.run(RemoteReward(server.url, retries=quick)(completions=["a"]))
    assert len(server.seen) == 2 and clock.seconds < 30          # at 20 bytes a second it would be half a year
    with pytest.raises(RuntimeError, match="refused: an answer of more than 16777216 bytes"):
        asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"]))
    server.socket.close()


@pytest.mark.parametrize(("answer", "says"), [
    (b'{"id": "another", "scores": [7.0]}', "answered the question 'another'; '[0-9a-f]{32}' was asked"),
    (b"[7.0]", r"refused: no JSON object: \[7.0\]"), (b"["*100000, "refused: no JSON: "),
    (b'{"scores": 7.0}', "1 scores are wanted")])
def test_an_answer_that_is_none_is_not_taken(answer, says):
    server = Flaky(answer)
    with pytest.raises(RuntimeError, match="rows 0 to 0: .*" + says):
        asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"]))
    assert len(server.seen) == 1
    server.failures = [b'{"id": null, "scores": [7.0]}']         # a server that gives back no name
    assert asyncio.run(RemoteReward(server.url, retries=QUICK)(completions=["a"])) == [7.]
    server.socket.close()


@pytest.mark.parametrize("after", ["0", "²", "soon", "-1", "9"*400])
def test_a_server_may_say_how_long_to_wait(after):
    "In digits; what else it says is no error."
    server = Flaky((503, after))
    quick = Retries(tries=2, first=.01, most=.02, timeout=60.)
    assert asyncio.run(RemoteReward(server.url, retries=quick)(completions=["a"])) == [7.]
    server.socket.close()


def test_waits_grow_and_differ():
    waits = [[Retries(first=1., most=20.).wait(k) for _ in range(200)] for k in range(1, 8)]
    for k, w in enumerate(waits):
        top = min(20., 2.**k)
        assert top/2 <= min(w) and max(w) <= top and len(set(w)) > 100


def test_the_rate_is_kept():
    "A clock is read, and only a lower bound is claimed of it."
    with serve_reward(lengths) as server:
        began = time.monotonic()
        asyncio.run(RemoteReward(server.url, server.token, rows=1, per_second=20)(completions=["a"]*7))
        assert time.monotonic() - began >= 6/20


def test_a_closed_server_is_gone():
    server = serve_reward(lengths, token="t")
    assert server.token == "t" and post(server, dict(rows=dict(completions=["a"])))[0] == 200
    server.close()
    assert not server._served.thread.is_alive()
    with pytest.raises(urllib.error.URLError): post(server, dict(rows=dict(completions=["a"])))
    with pytest.raises(ValueError, match="token=''"): serve_reward(lengths, token="")


def test_a_served_reward_model_scores_as_it_does_here():
    from tiny import model
    class Characters:
        eos_token_id = 1
        def __call__(self, text): return dict(input_ids=[2 + ord(c) % 20 for c in text])
    reward = scorer_reward(Scorer(model(), outputs=1, device="cpu"), Characters())
    prompts, completions = ["a", "bb", "a"], ["xyz", "u", ""]
    here = reward(prompts, completions)
    with serve_reward(reward) as server:
        there = asyncio.run(RemoteReward(server.url, server.token)(prompts=prompts, completions=completions))
    assert there == here and len(here) == 3
