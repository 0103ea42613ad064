"""Prompts and demonstrations: LAWS 10 (BOS, EOS, pad), 33 (boundary, truncation), 37 (tokenised once), exact resume,
errors by row."""
import gzip
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from rlblocks.data.preferences import Feedback, Preferences
from rlblocks.data.demonstrations import Demonstrations, segments
from rlblocks.data.prompts import Prompts, encode, prompt_ids

REAL = ["tokenizers/gpt2", "tokenizers/qwen2.5", "models/stories260K", "models/babyllama-char105"]
TALK = [dict(role="user", content="Is 7 prime?"), dict(role="assistant", content="Yes."),
        dict(role="user", content="And 8?"), dict(role="assistant", content="No.")]
CHAT = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}{% if "
        "add_generation_prompt %}assistant: {% endif %}")
ROWS = [dict(prompt=f"What is {a} plus {b}?", answer=str(a+b)) for a in range(3) for b in range(3)]


class Plain:
    "A callable and its ids, nothing of Hugging Face; writes BOS and EOS on everything it is given."
    bos_token_id, eos_token_id = 1, 2
    def __init__(self): self.calls = 0
    def __call__(self, text):
        self.calls += 1
        return [1] + [ord(c) for c in text] + [2]


@pytest.fixture(scope="session")
def llama_like():
    "A Hugging Face tokenizer built here: BOS on every text, a chat template that writes one too, pad = EOS."
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    t = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    # a space before every text, as SentencePiece does
    t.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    t.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<bos>", "<eos>"],
                                             show_progress=False)
    t.train_from_iterator(["What is 1 plus 2? user: assistant: Yes. No. Is 7 prime? And 8? 3 4 5 6 7 8 9 0\n"]*4,
                          trainer)
    t.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token="<eos>",
                                                pad_token="<eos>", unk_token="<unk>")
    fast.chat_template = CHAT
    return fast


@pytest.fixture(scope="session", params=REAL)
def real(request, shared):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(shared / request.param)


class Spy:
    "A tokenizer that counts what it is asked."
    def __init__(self, inner): self.inner, self.calls, self.texts = inner, 0, 0
    def __getattr__(self, name): return getattr(self.inner, name)
    def __call__(self, texts, **kw):
        self.calls += 1
        self.texts += len(texts)
        return self.inner(texts, **kw)


def row_ids(batch, i): return batch.tokens[i, :batch.lengths[i]].tolist()


# -- LAWS 10: one BOS, EOS in the loss once, pad = EOS

def one_bos(ids, tokenizer):
    habit = tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
    return ids[:1] == [tokenizer.bos_token_id] and ids[1:2] != [
        tokenizer.bos_token_id] if habit else tokenizer.bos_token_id not in ids


def check_prompts(tokenizer):
    "Exactly one BOS whatever text, template or chat template does, and nothing behind the text's last token."
    bos = tokenizer.bos_token or ""
    twice = [bos + "Hello there", "Hello there"]
    for data in (Prompts(twice, tokenizer, shuffle=False), Prompts(ROWS, tokenizer, template=bos + "Q: {prompt}\nA:"),
                 Prompts(ROWS, tokenizer, template=lambda r: bos*2 + r["prompt"])):
        batch = data.take(2)
        for i in range(2):
            ids = row_ids(batch, i)
            if tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]: assert one_bos(ids, tokenizer)
            assert ids[-1] != tokenizer.eos_token_id
        assert not batch.mask.any() and batch.mask.dtype == torch.bool
    assert prompt_ids(["Hello there"], tokenizer)[0] == tokenizer("Hello there")["input_ids"]


def check_demonstrations(tokenizer):
    "Prompt ids as generation starts from them; completion and exactly one EOS chosen, with pad = EOS."
    eos = tokenizer.eos_token
    rows = [dict(prompt="What is 1 plus 2?", completion=" 3"), dict(prompt="Is 7 prime?", completion=" Yes." + eos),
            dict(prompt="Is 8 prime?", completion=" No. And 9? No. And 10? No.")]
    batch = Demonstrations(rows, tokenizer, shuffle=False).take(3)
    start = Prompts([dict(prompt=r["prompt"]) for r in rows], tokenizer, shuffle=False).take(3)
    for i, row in enumerate(rows):
        ids, n = row_ids(batch, i), int(start.lengths[i])
        assert ids[:n] == row_ids(start, i)
        assert batch.mask[i].tolist() == [False]*n + [True]*(len(ids)-n) + [False]*(batch.tokens.shape[1]-len(ids))
        chosen = ids[n:]
        assert chosen[-1] == tokenizer.eos_token_id and chosen.count(tokenizer.eos_token_id) == 1
        whole = tokenizer(row["prompt"] + row["completion"].removesuffix(eos))["input_ids"]
        # no second space at the boundary
        assert tokenizer.decode(ids[:-1], skip_special_tokens=True) == tokenizer.decode(whole, skip_special_tokens=True)


def test_one_bos_and_no_eos_behind_a_prompt(llama_like): check_prompts(llama_like)
def test_one_bos_and_no_eos_behind_a_prompt_real(real): check_prompts(real)
def test_eos_in_the_loss_exactly_once(llama_like): check_demonstrations(llama_like)
def test_eos_in_the_loss_exactly_once_real(real): check_demonstrations(real)


def test_chat_template_and_tokenizer_both_write_bos(llama_like):
    text = llama_like.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert llama_like(text)["input_ids"][:2] == [1, 1]   # the trap is real
    batch = Prompts([dict(prompt=TALK[:1])], llama_like).take(1)
    assert row_ids(batch, 0) == llama_like(text)["input_ids"][1:] and batch.prompt == [text]


def test_a_chat_template_without_bos_still_gets_one(llama_like):
    bare = Spy(llama_like)
    bare.apply_chat_template = lambda messages, **kw: "".join(m["content"] for m in messages)
    assert row_ids(Prompts([dict(prompt=TALK[:1])], bare).take(1), 0)[:1] == [1]


def test_plain_callable_closes_texts_itself():
    batch = Prompts(["hi"], Plain()).take(1)
    assert row_ids(batch, 0) == [1, *map(ord, "hi")]
    batch = Demonstrations([dict(prompt="hi", completion="yo")], Plain()).take(1)
    assert row_ids(batch, 0) == [1, *map(ord, "hiyo"), 2] and batch.mask[0].tolist() == [False]*3 + [True]*3


def test_bos_that_is_also_eos_is_never_cut_away():
    both = lambda text: [1] + [ord(c) for c in text.replace("^", "\x01")]
    both.bos_token_id = both.eos_token_id = 1
    assert prompt_ids(["^", "a^b"], both) == [[1], [1, 97, 1, 98]]   # from nothing; an inner separator stays


def test_multi_turn_masks_every_answer_and_its_eos(llama_like):
    batch = Demonstrations([dict(messages=TALK)], llama_like).take(1)
    ids, mask = batch.tokens[0], batch.mask[0]
    spoken, runs = ids[mask].tolist(), int((mask[1:] & ~mask[:-1]).sum())
    assert spoken.count(llama_like.eos_token_id) == 2 and spoken[-1] == llama_like.eos_token_id and runs == 2
    assert llama_like.decode(spoken).replace(" ", "") == "Yes.<eos>No.<eos>"
    start = Prompts([dict(prompt=TALK[:1])], llama_like).take(1)
    assert row_ids(batch, 0)[:int(start.lengths[0])] == row_ids(start, 0)


def test_multi_turn_on_the_real_qwen_template(shared):
    transformers = pytest.importorskip("transformers")
    qwen = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/qwen2.5")
    batch = Demonstrations([dict(messages=TALK)], qwen).take(1)
    assert qwen.decode(batch.tokens[0][batch.mask[0]]) == "Yes.<|im_end|>No.<|im_end|>"
    text = qwen.apply_chat_template(TALK, tokenize=False)
    assert qwen.decode(batch.tokens[0]) + "\n" == text
    assert batch.tokens[0].tolist() == qwen(text.removesuffix("\n"))["input_ids"]


def test_template_that_rewrites_history_is_refused(llama_like):
    forgetful = Spy(llama_like)
    forgetful.apply_chat_template = lambda m, **kw: llama_like.apply_chat_template(
        [x for x in m[:-1] if x["role"] != "assistant"] + m[-1:], **kw)
    with pytest.raises(ValueError, match="row 0 .*not append-only: at message 3"):
        Demonstrations([dict(messages=TALK)], forgetful)


def test_completion_as_messages_trains_only_the_completion(llama_like):
    batch = Demonstrations([dict(prompt=TALK[:3], completion=TALK[3:])], llama_like).take(1)
    assert llama_like.decode(batch.tokens[0][batch.mask[0]]).replace(" ", "") == "No.<eos>"
    same = Demonstrations([dict(prompt=TALK[:3], completion="No.")], llama_like).take(1)
    assert same.tokens.tolist() == batch.tokens.tolist() and same.mask.tolist() == batch.mask.tolist()


def test_text_rows_choose_everything_but_the_first_token(llama_like):
    batch = Demonstrations(["Is 7 prime? Yes."], llama_like).take(1)
    assert row_ids(batch, 0) == llama_like("Is 7 prime? Yes.")["input_ids"] + [2]
    assert batch.mask[0].tolist() == [False] + [True]*(int(batch.lengths[0])-1)
    # written and added: one
    assert Demonstrations(["<bos>Is 7 prime? Yes."], llama_like).take(1).tokens.tolist() == batch.tokens.tolist()
    no_bos = lambda t: [ord(c) for c in t]
    no_bos.eos_token_id = 2
    assert Demonstrations(["abc"], no_bos).take(1).mask[0].tolist() == [False, True, True, True]


def test_boundary_is_never_inside_a_token(shared):
    "Where the joined text has one token over the boundary, the prompt's ids stay those of generation."
    transformers = pytest.importorskip("transformers")
    qwen = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/qwen2.5")
    row = dict(prompt="Answer:", completion="\n\n42")
    prompt = qwen(row["prompt"])["input_ids"]
    assert qwen(row["prompt"] + row["completion"])["input_ids"][:len(prompt)] != prompt   # the trap is real
    batch = Demonstrations([row], qwen).take(1)
    assert row_ids(batch, 0) == prompt + qwen(row["completion"])["input_ids"] + [qwen.eos_token_id]


def test_real_stories_have_one_space_at_the_boundary(shared):
    transformers = pytest.importorskip("transformers")
    stories = transformers.AutoTokenizer.from_pretrained(shared / "models/stories260K")
    with gzip.open(shared / "stories/tinystories_test.jsonl.gz") as f: rows = [json.loads(line) for line in f]
    batch = Demonstrations(rows, stories, shuffle=False).take(len(rows))
    assert all(row_ids(batch, i) == stories(r["text"])["input_ids"] + [stories.eos_token_id]
               for i, r in enumerate(rows))


# -- LAWS 37: tokenised once, in batches

def test_tokenizer_calls(llama_like):
    spy = Spy(llama_like)
    data = Prompts([f"What is {i} plus {i}?" for i in range(10)], spy, batch_size=4)
    assert (spy.calls, spy.texts) == (3, 10)
    for _ in range(3): data.take(7)
    data.load_state_dict(data.state_dict())
    assert spy.calls == 3


def test_cache_spares_the_second_run_and_knows_its_tokenizer(llama_like, tmp_path, shared):
    texts = [r["prompt"] for r in ROWS]
    first, second = Spy(llama_like), Spy(llama_like)
    a = Prompts(texts, first, cache=tmp_path, batch_size=2)
    b = Prompts(texts, second, cache=tmp_path, batch_size=2)
    assert (first.calls, second.calls) == (5, 0) and a.fingerprint == b.fingerprint
    assert a.take(20).tokens.equal(b.take(20).tokens)
    transformers = pytest.importorskip("transformers")
    other = Spy(transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2"))
    Prompts(texts, other, cache=tmp_path)
    assert other.calls == 1 and not [p for p in tmp_path.iterdir() if p.suffix not in (".ids", ".lock")]
    with pytest.raises(TypeError, match="leave cache out"): Prompts(texts, Plain(), cache=tmp_path)


def test_fingerprint_is_equal_in_fresh_processes(root):
    code = ("from rlblocks.data.prompts import Prompts; print(Prompts(['ab', 'c'], lambda t: [ord(c) for c in "
            "t]).fingerprint)")
    prints = {subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
              for _ in range(2)}
    mine = Prompts(["ab", "c"], lambda t: [ord(c) for c in t]).fingerprint
    assert prints == {mine + "\n"} and mine != Prompts(["a", "bc"], lambda t: [ord(c) for c in t]).fingerprint


# -- epochs and resume

@pytest.mark.parametrize("kind", ["prompts", "demonstrations"])
@pytest.mark.parametrize("stop", [0, 1, 4, 9, 10, 18, 23])
def test_resume_is_a_continuation(kind, stop):
    rows = [dict(prompt=f"row {i}", completion=str(i), i=i) for i in range(9)]
    make = (lambda: Prompts(rows, Plain(), seed=(3, "data"))) if kind == "prompts" else (
        lambda: Demonstrations(rows, Plain(), seed=(3, "data")))
    whole, first, second = make(), make(), make()
    straight = whole.take(stop + 12)
    if stop: first.take(stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))   # a state survives JSON
    rest = second.take(12)
    assert rest.i == straight.i[stop:]
    assert rest.group.tolist() == straight.group.tolist()[stop:] == list(range(stop, stop+12))
    assert rest.trim().tokens.tolist() == straight[slice(stop, None)].trim().tokens.tolist()


def test_an_epoch_is_every_row_once_in_a_new_order():
    data = Prompts([str(i) for i in range(20)], Plain(), seed=1)
    epochs = [data.take(7).prompt + data.take(13).prompt for _ in range(3)]
    assert all(sorted(e, key=int) == [str(i) for i in range(20)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and data.epochs == 3 and len(data) == 20
    assert epochs[0] != Prompts([str(i) for i in range(20)], Plain(), seed=2).take(20).prompt
    assert "epoch 3.00" in repr(data)


def test_state_of_other_data_is_refused():
    data = Prompts(["ab", "c"], Plain())
    state = data.state_dict()
    with pytest.raises(ValueError, match="the state is of 2 rows .*this data has 1"):
        Prompts(["ab"], Plain()).load_state_dict(state)
    with pytest.raises(ValueError, match="fingerprint"): Prompts(["ab", "d"], Plain()).load_state_dict(state)
    with pytest.raises(ValueError, match="another seed or shuffle"):
        Prompts(["ab", "c"], Plain(), shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="are wanted"): data.load_state_dict(dict(taken=3))


def test_datasets_dataset_is_taken_as_it_is():
    datasets = pytest.importorskip("datasets")
    data = Prompts(datasets.Dataset.from_list(ROWS), Plain(), shuffle=False)
    batch = data.take(3)
    assert batch.answer == ["0", "1", "2"] and batch.prompt[1] == "What is 0 plus 1?"


def test_gsm8k_through_a_template(real, shared):
    with gzip.open(shared / "gsm8k/test.jsonl.gz") as f: rows = [json.loads(line) for line in f][:300]
    data = Prompts(rows, real, template="Question: {question}\nAnswer:", max_tokens=2000)
    batch = data.take(300)
    assert sorted(batch.question) == sorted(r["question"] for r in rows)
    assert set(batch.columns) == {"tokens", "lengths", "mask", "group", "prompt", "question", "answer"}
    for i in (0, 17, 299): assert row_ids(batch, i) == real(batch.prompt[i])["input_ids"]
    assert batch.prompt == [f"Question: {q}\nAnswer:" for q in batch.question]


# -- errors, by row, at construction

@pytest.mark.parametrize("rows, kw, kind, message", [
    (["a", ""], {}, ValueError, r"Prompts: row 1 .*the prompt is empty"),
    ([dict(prompt="", x=1)], dict(template="Q: {prompt}"), ValueError, r"row 0 .*the prompt is empty"),
    ([dict(prompt=[])], {}, ValueError, r"row 0 .*the prompt is empty"),
    (["a", "abcdef"], dict(max_tokens=4), ValueError, r"row 1 .*has 7 tokens, max_tokens is 4"),
    ([dict(question="a")], {}, ValueError, r"row 0 .*no column `prompt` among question"),
    ([dict(question="a")], dict(template="{prompt}"), ValueError, r"row 0 .*field \{prompt\}, the row has question"),
    ([dict(prompt="a", x=1), dict(prompt="b")], {}, ValueError, r"row 1 has the columns prompt; row 0 has prompt, x"),
    (["a", 3], {}, TypeError, r"row 1 is a int"),
    ([dict(prompt="a"), dict(prompt=None)], {}, TypeError, r"row 1 .*neither text nor a list of messages"),
    ([dict(prompt=[dict(content="a")])], {}, TypeError, r"row 0 .*messages \{role, content\}"),
    ([dict(prompt=TALK)], {}, ValueError, r"row 0 .*chat template, Plain has none"),
    ([dict(prompt="a", mask=1)], {}, ValueError, r"column names mask are the batch's own"),
    ([], {}, ValueError, "no rows"),
    ("abc", {}, TypeError, "rows is a str"),
    ({"prompt": ["a"]}, {}, TypeError, "rows is a dict"),
    (["a"], dict(template=lambda row: row["b"]), ValueError, r"row 0 .*'b'"),
])
def test_bad_rows_are_named(rows, kw, kind, message):
    with pytest.raises(kind, match=message): Prompts(rows, Plain(), **kw)


def test_a_chat_prompt_without_a_template_names_the_row(shared):
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2")
    with pytest.raises(ValueError, match="Prompts: row 0 .*chat_template"): Prompts([dict(prompt=TALK[:1])], gpt2)


@pytest.mark.parametrize("name", ["width", "parts", "part", "to", "per_row", "columns", "n_tokens", "_whole", "group",
                                  "unit", "policy_version"])
def test_a_field_that_a_batch_cannot_have_is_refused_when_rows_are_read(name):
    "A field `per_row` vanished, `width` was another number by `[]`, `unit` failed in the first step."
    for kind, row in ((Prompts, dict(prompt="a")), (Demonstrations, dict(prompt="a", completion="b")),
                      (Preferences, dict(prompt="a", chosen="b", rejected="c")),
                      (Feedback, dict(prompt="a", completion="b", label=True))):
        with pytest.raises(
                ValueError,
                match=rf"{kind.__name__}: the column names {name} are the batch's own; rename them in the rows"):
            kind([row | {name: "mine"}], Plain())
    with pytest.raises(ValueError, match="Prompts: row 0 has a column named 3; names are text"):
        Prompts([{"prompt": "a", 3: 4}], Plain())
    assert Prompts([dict(prompt="a", self="mine", answer=1)], Plain()).take(1)["self"] == ["mine"]


@pytest.mark.parametrize("kind, good, bad", [
    (Prompts, dict(prompt="a"), dict(prompt="half \ud83d")),
    (Prompts, dict(prompt=TALK[:1]), dict(prompt=[dict(role="user", content="half \ud83d")])),
    (Demonstrations, dict(prompt="a", completion="b"), dict(prompt="a", completion="half \ud83d")),
    (Demonstrations, dict(text="a"), dict(text="half \ud83d")),
    (Preferences, dict(prompt="a", chosen="b", rejected="c"), dict(prompt="a", chosen="half \ud83d", rejected="c")),
    (Preferences, dict(prompt="a", chosen="b", rejected="c"), dict(prompt="a", chosen="b", rejected="half \ud83d")),
    (Feedback, dict(prompt="a", completion="b", label=True), dict(prompt="a", completion="half \ud83d", label=True)),],
                         ids=range(7))
def test_half_a_character_names_its_row(kind, good, bad, llama_like):
    """A tokenizer of Hugging Face says 'TextEncodeInput must be Union[…]' of a thousand texts, a callable may
    tokenise it."""
    with pytest.raises(ValueError, match=rf"{kind.__name__}: row 1 .*half \\+ud83d.* is a lone surrogate"):
        kind([good, bad], llama_like)


def test_tables_of_other_libraries():
    "What has rows by number is read; a table of columns is told how to become rows."
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = [dict(prompt="ab", answer=1), dict(prompt="c", answer=2)]
    frame = pandas.DataFrame(rows)
    for good in (rows, tuple(rows), datasets.Dataset.from_list(rows), frame.to_dict("records"), np.array(rows)):
        assert Prompts(good, Plain(), shuffle=False).take(2).answer == [1, 2]
    assert Prompts(frame.prompt, Plain(), shuffle=False).take(2).prompt == ["ab", "c"]
    for bad, says in ((frame, r"rows\[0\] of a DataFrame raises KeyError.*rows.to_dict\('records'\)"),
                      (frame.prompt[1:], r"rows\[0\] of a Series raises KeyError.*rows.tolist"),
                      (iter(rows), r"rows is a list_iterator.*list\(rows\)"),
                      (datasets.Dataset.from_list(rows).data, r"row 0 is a ChunkedArray.*rows.to_pylist"), (
            datasets.DatasetDict(train=datasets.Dataset.from_list(rows)), r"rows is a DatasetDict.*rows\['train'\]")):
        with pytest.raises(TypeError, match=f"Prompts: {says}"): Prompts(bad, Plain())


def test_a_tokenizer_that_fails_names_the_text():
    known = dict(a=3, b=4)
    with pytest.raises(ValueError, match="encode: the tokenizer raised KeyError on 'ac': 'c'"):
        Prompts(["ab", "ac"], lambda t: [known[c] for c in t])
    for odd in (lambda t: dict(input_ids=[3]), lambda t: [1.5], lambda t: "abc", lambda t: [-1], lambda t: [2**31],
                lambda t: 3):
        with pytest.raises(ValueError, match="encode: the tokenizer made .* of 'ab'; a list of token ids is wanted"):
            Prompts(["ab"], odd)
    for fine in (np.array, torch.tensor, tuple):
        assert Prompts(["ab"], lambda t, fine=fine: fine([known[c] for c in t])).take(1).tokens.tolist() == [[3, 4]]


def test_numbers_of_rows_and_tokens():
    data = Prompts(["a", "b"], Plain(), max_tokens=np.int64(9), batch_size=np.int32(1))
    assert len(data.take(np.int64(3))) == 3 and type(data.state_dict()["taken"]) is int
    for odd in (True, 2., 0, "2"):
        with pytest.raises(ValueError, match=rf"Prompts.take: n={odd!r}; a whole number"): data.take(odd)
        with pytest.raises(ValueError, match=rf"Prompts: max_tokens={odd!r}; a whole number"):
            Prompts(["a"], Plain(), max_tokens=odd)
        with pytest.raises(ValueError, match=rf"encode: batch_size={odd!r}; a whole number"):
            Prompts(["a"], Plain(), batch_size=odd)
    with pytest.raises(ValueError, match="Prompts: taken=-5; a whole number, 0 or more"):
        data.load_state_dict(data.state_dict() | dict(taken=-5))
    assert len(data.take(1)) == 1


def test_a_row_cut_at_its_start_still_has_a_first_token_that_nothing_predicts():
    "Text without a prompt, cut at the start: its first token was chosen, and the first `take` failed."
    class Bare(Plain): bos_token_id = None
    data = Demonstrations(["abcdef", "gh"], Bare(), max_tokens=4, truncate="start", shuffle=False)
    assert data.take(2).mask[0].tolist() == [False, True, True, True] and data.truncated == 1
    with pytest.raises(ValueError, match="truncate='middle'; 'start', 'end' or None is wanted"):
        Demonstrations(["ab"], Plain(), max_tokens=4, truncate="middle")


def test_take_and_tokenizer_errors():
    with pytest.raises(TypeError, match="seed_of: cannot hash a set"): Prompts(["a"], Plain(), seed={1})
    class Two(Plain): eos_token_id = [2, 3]
    with pytest.raises(ValueError, match=r"Demonstrations: the tokenizer's eos_token_id=\[2, 3\]; a whole number"):
        Demonstrations(["a"], Two())
    with pytest.raises(ValueError, match="Prompts.take: n=0; a whole number"): Prompts(["a"], Plain()).take(0)
    with pytest.raises(TypeError, match="Prompts: tokenizer is .gpt2.; a tokenizer is wanted"): Prompts(["a"], "gpt2")
    with pytest.raises(TypeError, match="int is not callable"): Prompts(["a"], 3)
    with pytest.raises(ValueError, match="no tokens"): Prompts(["a"], lambda t: [])
    with pytest.raises(ValueError, match="1 rows of ids from 2 texts"):
        encode(["a", "b"], lambda t, **kw: {"input_ids": [[1]]})


# -- LAWS 33: truncation is asked for, counted, and never leaves a row without a completion

LONG = [dict(prompt="ab", completion="cd"), dict(prompt="abcdef", completion="gh"), dict(prompt="a", completion="")]


@pytest.mark.parametrize("truncate, texts, counts", [("end", ["abcd"], (0, 2)), ("start", ["abcd", "efgh"], (1, 1))])
def test_truncation_modes(truncate, texts, counts):
    with pytest.warns(UserWarning, match=f"{counts[1]} of 3 rows have no completion token"):
        data = Demonstrations(LONG, Plain(), max_tokens=6, truncate=truncate, shuffle=False)
    batch = data.take(len(data))
    assert ["".join(chr(i) for i in row_ids(batch, k) if i > 2) for k in range(len(data))] == texts
    assert (data.truncated, data.dropped) == counts and batch.mask.any(1).all() and batch.tokens[:, 0].eq(1).all()
    assert f"{counts[0]} truncated, {counts[1]} dropped" in repr(data)


def test_end_truncation_of_a_completion_drops_its_eos():
    data = Demonstrations([dict(prompt="ab", completion="cdef")], Plain(), max_tokens=5, truncate="end")
    assert row_ids(data.take(1), 0) == [1, *map(ord, "abcd")] and (data.truncated, data.dropped) == (1, 0)


def test_demonstration_errors():
    with pytest.raises(ValueError, match=r"row 1 .*10 tokens, max_tokens is 6"):
        Demonstrations(LONG, Plain(), max_tokens=6)
    with pytest.raises(ValueError, match="needs max_tokens"): Demonstrations(LONG, Plain(), truncate="end")
    with pytest.raises(ValueError, match="eos_token_id"): Demonstrations(LONG, lambda t: [1])
    with pytest.raises(ValueError, match="none of the 1 rows"): Demonstrations([dict(messages=TALK[:1])], CHATTY)
    with pytest.raises(ValueError, match="row 0 .*there are question"): Demonstrations([dict(question="a")], Plain())
    with pytest.raises(TypeError, match="row 0 .*completion is a int"):
        Demonstrations([dict(prompt="a", completion=3)], Plain())
    with pytest.raises(ValueError, match="a template makes a prompt"):
        Demonstrations([dict(text="a")], Plain(), template="{text}")


class Chatty(Plain):
    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        return "".join(m["content"] for m in messages)

CHATTY = Chatty()


def test_segments_of_every_row_format():
    assert segments(dict(prompt="a", completion="b"), CHATTY) == [("a", False), ("b", True)]
    assert segments(dict(messages=TALK[:2]), CHATTY) == [("Is 7 prime?", False), ("Yes.", True)]
    assert segments(dict(text="a"), CHATTY) == [("", False), ("a", True)]


@pytest.mark.parametrize("data, n, times", [(Prompts(list("abcd"), Plain()), 64, "64 and there are 4 rows.*about 16"),
                                            (Demonstrations(["a", "b"], Plain()), 3, "3 and there are 2 rows.*1.5")])
def test_a_batch_that_is_larger_than_the_data_warns(data, n, times):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3): data.take(len(data)), data.take(1)
    with pytest.warns(UserWarning, match=f"take: n={times} times"): assert len(data.take(n)) == n
