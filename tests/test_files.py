"""Files to rows: every format into its class, rows as they were written, errors with their line, mixtures, splits."""
import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys

import pyarrow
import pytest

from rlblocks import Demonstrations, Feedback, Preferences, Prompts, Stream, hold_out, load_rows

pytest.importorskip("datasets")
ASK, ANSWER = [dict(role="user", content="1+1?")], [dict(role="assistant", content="2")]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    "Caches of `datasets` and relative names are of the test."
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path/"cache")
    monkeypatch.chdir(tmp_path)


def lines(name, *rows, end="\n"):
    with open(name, "w", encoding="utf-8", newline="") as f:
        f.write("".join((row if isinstance(row, str) else json.dumps(row)) + end for row in rows))
    return name


def test_rows_are_as_they_were_written():
    "What the readers of `datasets` change: dates, numbers as text, mixed types, keys that only some dicts have, CSV."
    call = dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="f", arguments=dict(x=.1+.2)))])
    rows = [dict(prompt=ASK, answer="2020-01-01", n=3, tags=["a"]), dict(prompt=ASK + [call], answer="42", n=3.5),
            dict(prompt=ASK, answer=42, n=None, tags=[1, "b"]), dict(prompt=ASK, answer=dict(a=None, b=[{}]), n=4)]
    got = list(load_rows(lines("a.jsonl", *rows)))
    assert got == [dict.fromkeys(("prompt", "answer", "n", "tags")) | row for row in rows]
    assert repr(got[2]["answer"]) == "42" and type(got[0]["n"]) is int and type(got[1]["answer"]) is str
    lines("b.csv", "prompt,answer", "a,007", "b,", "NA,1e3", '"c, d","x\ny"')
    assert load_rows("b.csv")[:] == dict(prompt=["a", "b", "NA", "c, d"], answer=["007", "", "1e3", "x\ny"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst",
                                  "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.txt", "folder", "a*.jsonl", 
                                  "whole.json"])
def test_every_kind_of_file(name):
    "The same rows, whatever holds them: Unicode, a line separator inside a text, a BOM, CRLF, blank lines."
    import datasets
    texts = ["größe \u2028 ok", "日本", "a\x85b"]
    rows = [dict(text=t) for t in texts]
    body = "\ufeff" + "\r\n\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\r\n  \r\n"
    match name.split(".")[-1]:
        case "gz": gzip.open(name, "wb").write(body.encode())
        case "bz2": bz2.open(name, "wb").write(body.encode())
        case "xz": lzma.open(name, "wb").write(body.encode())
        case "zst":
            with pyarrow.CompressedOutputStream(name, "zstd") as f: f.write(body.encode())
        case "parquet": datasets.Dataset.from_list(rows).to_parquet(name)
        case "arrow":
            datasets.Dataset.from_list(rows).save_to_disk("saved")
            assert load_rows("saved")["text"][:] == texts
            name = "saved/data-00000-of-00001.arrow"
        case "json":
            content = dict(version=1, data=rows) if name == "whole.json" else rows
            with open(name, "w", encoding="utf-8") as f: json.dump(content, f, indent=1, ensure_ascii=False)
        case "txt": open(name, "w", encoding="utf-8", newline="").write("\ufeff" + "\r\n\r\n".join(texts))
        case "csv" | "tsv": open(name, "w", encoding="utf-8-sig", newline="").write("\r\n".join(["text", *texts]))
        case "folder":
            import os
            os.makedirs("folder/deep")
            for part, row in zip(["deep/train-0", "test", "train-1", "train-2"], [rows[0], dict(text="no"), *rows[1:]],
                                 strict=True): lines(f"folder/{part}.jsonl", row)
            assert load_rows("folder", split="test")["text"][:] == ["no"]
            with pytest.raises(FileNotFoundError, match="no files of the split 'dev'; it has test, train"):
                load_rows("folder", split="dev")
        case _: open("a.jsonl", "w", encoding="utf-8", newline="").write(body)
    assert load_rows(name)["text"][:] == texts


def malformed(message, name, **more):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as e: load_rows(name, **more)
    assert "\n" not in str(e.value)


def test_malformed_rows_say_where_and_what_to_do():
    good = dict(prompt="a", completion="b")
    for bad, message in [
            ('{"prompt": "a" "completion": "b"}', r"no JSON: Expecting ',' delimiter at character 16, near"),
            ('["a"]', r"\['a'\] is a list; an object is wanted"),
            (dict(prompt="a"), "field 'completion' is absent, there are prompt"),
            (dict(prompt=3, completion="b"), r"field 'prompt' is 3 \(int\); text is wanted; write it as \"3\""),
            (dict(prompt=[], completion="b"), "a list of messages"),
            (dict(prompt=[dict(role="user", text="a")], completion="b"), r"'prompt\[0\].content' is None"),
            (dict(prompt="a", completion=None), "field 'completion' is None"),
            ('{"prompt": "half \\ud83d", "completion": "b"}', "field 'prompt' .* lone surrogate")]:
        lines("bad.jsonl", good, "", bad, good, bad)
        malformed(f"load_rows: bad.jsonl, line 3: .*{message}", "bad.jsonl")
        with pytest.warns(UserWarning, match=f"2 malformed rows are left out. The first: bad.jsonl, line 3: .*{message}"
                          ):
            assert len(load_rows("bad.jsonl", on_error="skip")) == 2
    open("latin.jsonl", "wb").write(b'{"text": "a"}\n{"text": "gr\xf6\xdfe"}\n')
    malformed("latin.jsonl, line 2: byte 12 is no UTF-8", "latin.jsonl")
    lines("bad.csv", "prompt,completion", "a,b", "c,d,e")
    malformed("bad.csv, line 3: 3 cells, the first line names 2 columns", "bad.csv")
    open("bad.json", "w").write('[{"prompt": "a"},')
    malformed("bad.json cannot be read: .*no JSON", "bad.json")
    open("bad.parquet", "w").write("nothing")
    malformed("bad.parquet cannot be read", "bad.parquet")
    lines("big.jsonl", dict(prompt="a", answer=2**64))
    malformed("18446744073709551616 is a number beyond 64 bits; write it as text", "big.jsonl")


def test_names_that_lead_nowhere():
    lines("train.jsonl", dict(text="a"))
    lines("empty.jsonl"), lines("blank.csv"), lines("rows.foo", "a"), lines("odd.jsonl", dict(query="a", response="b"))
    malformed("there is no trian.jsonl; is train.jsonl meant?", "trian.jsonl")
    malformed("there is no folder none for none/a.jsonl", "none/a.jsonl")
    malformed("no rows in empty.jsonl", "empty.jsonl")
    malformed("no rows in blank.csv", "blank.csv")
    malformed("`where` leaves none", "train.jsonl", where=lambda row: False)
    malformed("rows.foo ends in .foo, which nobody reads; .jsonl, .*rename it", "rows.foo")
    malformed("no file that can be read matches x", "x*.jsonl")
    malformed("trian is no file here, and as a data set of the Hub: .*Is train.jsonl meant", "trian")
    malformed(r"odd.jsonl, line 1: the columns query, response are of no format. columns={'query': 'prompt', "
              r"'response': 'completion'} makes it prompt_completion", "odd.jsonl")
    assert load_rows("odd.jsonl", columns=dict(query="prompt", response="completion"))[0] == dict(
        prompt="a", completion="b")
    malformed("columns= names 'qurey', there are query, response; is 'query' meant", "odd.jsonl",
              columns=dict(qurey="prompt"))
    malformed("format='promt' is none of .*is 'prompt' meant", "train.jsonl", format="promt")
    malformed("the key 'wieght'; .*is 'weight' meant", [dict(path="train.jsonl", wieght=2)])


def test_parquet_of_others():
    "Arrow fills in None for the keys of other rows: none of it reaches a template or a reward."
    import datasets
    call = dict(role="assistant", content=None, tool_calls=[dict(type="function", function=dict(name="f"))])
    rows = [dict(data_source="a", prompt=ASK, reward_model=dict(style="rule", ground_truth="2"), extra_info=dict(i=1)),
            dict(data_source="b", prompt=ASK + [call], reward_model=dict(ground_truth="3"), extra_info=dict(j="x"))]
    datasets.Dataset.from_list(rows).to_parquet("verl.parquet")
    got = load_rows("verl.parquet")
    assert [list(row["extra_info"]) for row in got] == [["i"], ["j"]] and got["ground_truth"][:] == ["2", "3"]
    assert got[0]["prompt"] == ASK and got[1]["prompt"] == ASK + [call]
    batch = Prompts(got.select([0]), Chat(), shuffle=False).take(1)
    assert batch.ground_truth == ["2"] and batch.data_source == ["a"] and batch.prompt == ["user:1+1?■assistant:"]


class Chat:
    "A tokenizer of characters with a chat template."
    bos_token_id, eos_token_id, eos_token = None, 1, "■"
    def __call__(self, text): return [1 if c == "■" else ord(c) for c in text]
    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=False, tools=None):
        said = "".join(f"{m['role']}:{m['content']}■" for m in messages)
        return (f"tools {json.dumps(tools)}■" if tools else "") + said + "assistant:"*add_generation_prompt


def test_chat_and_system():
    file = lines("a.jsonl", dict(question="1+1?", answer="2"))
    rows = load_rows(file, chat=True, system="Short.")
    assert rows[0] == dict(answer="2", prompt=[dict(role="system", content="Short.")] + ASK, completion=ANSWER)
    batch = Demonstrations(rows, Chat()).take(1)
    assert "".join(map(chr, batch.tokens[0][batch.mask[0]])) == "2\x01"
    malformed("line 1: system= is a message, and this row is text; pass chat=True", file, system="Short.")


def test_mixtures_have_their_shares_and_one_order():
    lines("a.jsonl", *(dict(prompt=f"a{i}", answer=i) for i in range(100)))
    lines("b.jsonl", *(dict(prompt=f"b{i}") for i in range(10)))
    both = [dict(path="a.jsonl", weight=3), dict(path="b.jsonl", weight=1, epochs=2)]
    one, two, other = (load_rows(both, seed=s) for s in (0, 0, 1))
    assert one["prompt"][:] == two["prompt"][:] != other["prompt"][:]
    assert len(one) == 80 and [p for p in one["prompt"] if p[0] == "a"] == [f"a{i}" for i in range(60)]
    assert [p for p in one["prompt"] if p[0] == "b"] == [f"b{i}" for i in range(10)]*2
    assert one[one["prompt"][:].index("b0")] == dict(prompt="b0", answer=None)
    plain = load_rows(["a.jsonl", dict(path="b.jsonl", epochs=1.5, limit=4)])
    assert plain["prompt"][-6:] == ["b0", "b1", "b2", "b3", "b0", "b1"] and len(plain) == 106
    malformed("b.jsonl has no weight, others have", [dict(path="a.jsonl", weight=3), "b.jsonl"])
    malformed("weight=0; a share above 0", [dict(path="a.jsonl", weight=0)])


def test_filters_and_order():
    file = lines("a.jsonl", *(dict(prompt=f"{i % 4}", id=i, level=-i) for i in range(8)))
    assert load_rows(file, where=lambda r: r["id"] > 2, limit=3)["id"][:] == [3, 4, 5]
    assert load_rows(file, order_by="level", limit=2)["id"][:] == [7, 6]
    assert load_rows(file, order_by=lambda r: r["id"] % 3)["id"][:] == [0, 3, 6, 1, 4, 7, 2, 5]
    with pytest.warns(UserWarning, match="4 of 8 rows came before"):
        assert load_rows(file, dedup=True)["id"][:] == [0, 1, 2, 3]
    easy_first = Prompts(load_rows(file, order_by="level"), Chat(), shuffle=False)
    assert easy_first.take(6).id + easy_first.take(6).id == ([7, 6, 5, 4, 3, 2, 1, 0]*2)[:12]
    malformed("order_by='levle', a row has .*is 'level' meant", file, order_by="levle")


def test_held_out_prompts_are_on_one_side():
    rows = [dict(prompt=f"p{i % 50}" if i % 3 else [dict(role="user", content=f"p{i % 50}")], id=i) for i in range(300)]
    train, held = hold_out(rows, .2)
    key = lambda r: r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][0]["content"]
    assert not {*map(key, train)} & {*map(key, held)} and len(held) == 60
    assert train == [r for r in rows if r not in held]
    shuffled = random.Random(0).sample(rows, 300)
    assert {r["id"] for r in hold_out(shuffled, .2)[1]} == {r["id"] for r in held}  # by the prompt, not its place
    assert {r["id"] for r in hold_out(rows, .2, seed=1)[1]} != {r["id"] for r in held}
    assert len(hold_out(load_rows(rows), 12)[1]) == 12
    with pytest.raises(ValueError, match="leaves one side empty"): hold_out(rows[:1], .5)
    with pytest.raises(ValueError, match="a share between 0 and 1"): hold_out(rows, 1.5)


REAL = dict(gsm8k=("gsm8k/train", Prompts, {}), stories=("stories/tinystories_train", Demonstrations, {}),
            sft=("sft/sft_5k", Demonstrations, {}), hh=("preferences/hh_train", Preferences, {}),
            binary=("kto/gsm8k_solutions_binary", Feedback, {}),
            gsm8k_sft=("gsm8k/test", Demonstrations, dict(chat=True)),
            steps=("prm/prm_train", Prompts, {}),
            compared=("multiobjective/fine_grained_qa", Preferences, dict(format=lambda row: [
                dict(prompt=row["prompt"], chosen=row["responses"][p["winner"]],
                     rejected=row["responses"][p["a"] + p["b"] - p["winner"]])
                for p in row["pair_preferences"] if p["winner"] is not None])))


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL)
def test_real_files_into_their_class(name, shared):
    transformers = pytest.importorskip("transformers")
    path, kind, more = REAL[name]
    qwen = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/qwen2.5")
    rows = load_rows(str(shared / f"{path}.jsonl.gz"), limit=300, **more)
    data = kind(rows, qwen)
    batch = data.take(4)
    assert batch.mask.any() == (kind is not Prompts) and len(batch) == 4*kind.each


def test_plain_lines_read_by_arrow_are_the_rows(monkeypatch):
    "The quick way gives what the slow one gives, and leaves to it what it cannot."
    from rlblocks.data import files
    taken, plain = [], files.plain_table
    monkeypatch.setattr(files, "plain_table", lambda *a: taken.append(plain(*a)) or taken[-1])
    rows = [dict(prompt="2020-01-01", n=2**62, ok=True), dict(prompt="ü \u2028 😀", n=None, x="late")]
    for made, quick in ((rows[:1]*3, True), (rows, True), (rows[:1]*200 + rows[1:] + [dict(prompt="a", new=1)], False),
                        (rows[:1]*200 + [dict(prompt="a", n=1.5)], False), ([dict(prompt="a", n=[])], False)):
        got = list(load_rows(lines("a.jsonl", *made, end="\r\n\r\n")))
        names = dict.fromkeys(k for row in made for k in row)
        assert (taken[-1] is not None) == quick and got == [dict.fromkeys(names) | row for row in made]
    for bad in (dict(prompt=""), dict(n=3), dict(prompt=3)):
        malformed("a.jsonl, line 201: field 'prompt'", lines("a.jsonl", *rows[:1]*200, bad))
    assert load_rows(lines("a.jsonl", dict(q="a", i=1)), columns=dict(q="prompt", i=None))[0] == dict(prompt="a")
    assert taken[-1] is not None


def stream(source="a.jsonl", kind=Prompts, window=32, **more):
    return Stream(load_rows(source, streaming=True, **more), lambda rows: kind(rows, Chat(), seed=3), window=window)


@pytest.fixture
def parts(monkeypatch):
    "A file of a hundred rows in eleven parts, as 16 MB are one of a large file."
    from rlblocks.data import files
    monkeypatch.setattr(files, "PART", 300)
    return lines("a.jsonl", *(dict(prompt=f"p{i}", i=i, m=[dict(a=i)] if i % 2 else None) for i in range(100)))


def test_a_stream_that_is_stopped_goes_on_with_the_same_rows(parts):
    whole = stream()
    drawn = [whole.take(7) for _ in range(40)]      # windows of 32: batches straddle them, and epochs
    prompts = [p for b in drawn for p in b.prompt]
    assert sorted(prompts[:100]) == sorted(prompts[100:200]) == sorted(f"p{i}" for i in range(100))
    assert prompts[:32] != prompts[100:132] != [f"p{i}" for i in range(32)]
    for stop in (0, 1, 4, 5, 14, 20, 39):
        first, second = stream(), stream()
        for _ in range(stop): first.take(7)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [second.take(7) for _ in range(40 - stop)]
        assert [p for b in rest for p in b.prompt] == prompts[stop*7:]
        assert [g for b in rest for g in b.group.tolist()] == list(range(stop*7, 280)) and second.taken == 280
        assert all(b.m == [[dict(a=i)] if i % 2 else None for i in b.i] for b in rest)
    rows = load_rows("a.jsonl", streaming=True)
    easy_first = Stream(rows, lambda rows: Prompts(rows, Chat(), shuffle=False), window=32)
    assert easy_first.take(250).i == ([*range(100)]*3)[:250]
    windows = stream(window=50).take(100).i
    assert windows[50:] != [i + 50 for i in windows[:50]]       # another order in each
    with pytest.raises(ValueError, match="windows of 32 rows, this stream of 16"):
        stream(window=16).load_state_dict(whole.state_dict())
    lines("a.jsonl", *(dict(prompt=f"q{i}", i=i, m=None) for i in range(100)))
    with pytest.raises(ValueError, match="fingerprint"): stream().load_state_dict(whole.state_dict())


def test_a_resumed_stream_does_not_read_again_what_came_before(parts, monkeypatch):
    import datasets
    from rlblocks.data import files
    first = stream(window=10)
    for _ in range(8): first.take(10)
    read, parsed = [], files.parsed
    monkeypatch.setattr(files, "parsed", lambda line: read.append(line) or parsed(line))
    rows = load_rows("a.jsonl", streaming=True)
    rows.load_state_dict(first.state_dict()["start"])
    read.clear()
    assert [r["i"] for r in rows] == list(range(70, 100)) and len(read) < 40
    datasets.Dataset.from_list([dict(prompt=f"p{i}", m=[dict(a=i) if i % 2 else dict(b=i)]) for i in range(100)]
                               ).to_parquet("p.parquet", batch_size=10)
    whole, half = stream("p.parquet", window=20), stream("p.parquet", window=20)
    assert load_rows("p.parquet", streaming=True).num_shards == 10
    drawn = whole.take(50), whole.take(30)
    half.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert half.take(40).prompt == whole.take(40).prompt
    assert {len(m[0]) for m in drawn[0].m} == {1}


def test_streams_are_converted_mixed_and_named_by_line(parts, monkeypatch):
    lines("pairs.jsonl", *(dict(prompt="a", chosen=f"b{i}", rejected="c") for i in range(50)))
    assert stream("pairs.jsonl", Preferences).take(40).unit.tolist() == [i for i in range(40) for _ in range(2)]
    mixed = [r["prompt"][0] for r in load_rows([dict(path="a.jsonl", weight=1), dict(path="pairs.jsonl", weight=1,
             format="prompt", epochs=9)], streaming=True, limit=100)]
    assert len(mixed) == 100 and 30 < mixed.count("a") < 70
    both = load_rows(["a.jsonl", dict(path="a.jsonl", limit=5, epochs=2)], streaming=True, where=lambda r: r["i"] > 2)
    assert [r["i"] for r in both] == [*range(3, 100)] + [*range(3, 8)]*2
    for part in range(20, 60):      # wherever a part ends
        monkeypatch.setattr("rlblocks.data.files.PART", part)
        assert [r["i"] for r in load_rows("a.jsonl", streaming=True)] == list(range(100))
    train, held = hold_out(load_rows("a.jsonl", streaming=True), .2)
    assert not {r["i"] for r in train} & {r["i"] for r in held} and 10 < len(list(held)) < 30
    with open("a.jsonl", "a") as f: f.write('{"prompt": 3}\n{"prompt": "last"}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 101: field 'prompt' is 3"):
        list(load_rows("a.jsonl", streaming=True))
    with pytest.warns(UserWarning, match="1 malformed rows .* line 101"):
        assert len(list(load_rows("a.jsonl", streaming=True, on_error="skip"))) == 101
    with pytest.raises(ValueError, match="dedup and order_by need all rows"):
        load_rows("a.jsonl", streaming=True, dedup=True)
    with pytest.raises(TypeError, match=r"rows is a IterableDataset.*Stream\(rows, lambda rows: Prompts"):
        Prompts(load_rows("a.jsonl", streaming=True), Chat())
    with pytest.raises(TypeError, match="Stream: rows is a list"): Stream([dict(prompt="a")], Prompts)


ENCODE = """
import sys, time
from rlblocks.data.prompts import Prompts
from tokenizers import Tokenizer, models, pre_tokenizers
class Slow:
    "A fast tokenizer that takes its time and counts."
    bos_token_id = eos_token_id = None
    def __init__(self):
        self.backend_tokenizer, self.calls = Tokenizer(models.WordLevel({"a": 1, "<unk>": 0}, "<unk>")), 0
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    def __call__(self, texts, add_special_tokens=True):
        self.calls += 1
        time.sleep(.3)
        return dict(input_ids=[e.ids for e in self.backend_tokenizer.encode_batch(texts)])
t = Slow()
data = Prompts(["a b a"]*7, t, batch_size=2, cache=sys.argv[1])
print(t.calls, data.fingerprint)
"""


def test_of_processes_that_arrive_together_one_tokenises(root, tmp_path):
    pytest.importorskip("tokenizers")
    def start(): return subprocess.Popen([sys.executable, "-c", ENCODE, str(tmp_path/"ids")], cwd=root,
                                         stdout=subprocess.PIPE, text=True)
    made = [p.communicate()[0].split() for p in [start(), start()]]
    assert sorted(calls for calls, _ in made) == ["0", "4"] and len({x for _, x in made}) == 1


class Seen(Chat):
    "Keeps what its template was given."
    def __init__(self): self.seen = []
    def apply_chat_template(self, messages, **kw):
        self.seen.append(json.dumps([messages, kw.get("tools")]))
        return super().apply_chat_template(messages, **kw)


def test_tools_and_messages_reach_the_template_as_written():
    "Also from a Dataset made elsewhere, in which Arrow gave every message the keys of all."
    import datasets
    call = dict(role="assistant", content="3", tool_calls=[dict(function=dict(name="add", arguments=dict(a=1)))])
    tool = dict(type="function", function=dict(name="add", parameters=dict(properties=dict(a=dict(type="number")))))
    rows = [dict(messages=ASK + [call], tools=[tool]), dict(messages=ASK + ANSWER, tools=None)]
    for data in (load_rows(lines("a.jsonl", *rows)), datasets.Dataset.from_list(rows)):
        seen = Seen()
        batch = Demonstrations(data, seen, shuffle=False).take(2)
        asked = [json.loads(x) for x in seen.seen]
        assert [ASK + [call], [tool]] in asked and [ASK + ANSWER, None] in asked
        starts = ["".join(map(chr, batch.tokens[i][:5])) for i in range(2)]
        assert starts == ["tools", "user:"]
    prompt = Prompts(load_rows([dict(prompt=ASK, tools=[tool])]), Chat()).take(1).prompt[0]
    assert prompt.startswith("tools") and prompt.endswith("assistant:")


def test_a_mixture_of_formats_is_one_data_set():
    "What one source lacks is None in its rows, and no reason to read them as another format."
    lines("m.jsonl", dict(messages=ASK + ANSWER)), lines("p.jsonl", dict(instruction="1+1?", output="2"))
    lines("t.txt", "Once.")
    for order in (["m.jsonl", "p.jsonl", "t.txt"], ["t.txt", "p.jsonl", "m.jsonl"]):
        batch = Demonstrations(load_rows(order), Chat(), shuffle=False).take(3)
        chosen = ["".join(map(chr, t[m])).strip("\x01") for t, m in zip(batch.tokens, batch.mask, strict=True)]
        assert chosen == (["2", "2", "nce."] if order[0] == "m.jsonl" else ["nce.", "2", "2"])


def test_without_datasets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"): load_rows([dict(prompt="a")])


def test_longer_prompts_are_left_out_and_counted():
    rows = [dict(prompt="a"*n, n=n) for n in (3, 9, 4)]
    data = Prompts(rows, Chat(), max_tokens=4, drop_longer=True, shuffle=False)
    batch = data.take(2)
    assert (batch.n, batch.prompt, batch.lengths.tolist()) == ([3, 4], ["aaa", "aaaa"], [3, 4])
    assert data.longer == 1 and "1 longer than 4 left out" in repr(data)
    with pytest.raises(ValueError, match="all 3 prompts have more than 2"):
        Prompts(rows, Chat(), max_tokens=2, drop_longer=True)


def test_a_picture_in_a_column_is_a_part_of_the_question(tmp_path):
    (tmp_path/"seen.jsonl").write_text(json.dumps(dict(image="a.png", question="What colour?", answer="red")))
    [row] = load_rows(str(tmp_path/"seen.jsonl"), columns=dict(question="prompt"), chat=True)
    parts = [{k: x for k, x in part.items() if x is not None} for part in row["prompt"][0]["content"]]
    assert parts == [dict(type="image"), dict(type="text", text="What colour?")] and row["image"] == "a.png"
