"""Renderers on real templates: a conversation grows at its end, or a row of its own is made; what was said keeps its
ids (LAWS 4)."""
from pathlib import Path

import pytest
from rlblocks import ChatRenderer, Renderer, TextRenderer, check_renderer, read_response, renderer_of
from rlblocks.data.renderers import message_of, next_ids
from rlblocks.environments.rewriting import rewritten

ADD = dict(type="function", function=dict(
    name="add", description="Add.", parameters=dict(
        type="object", properties=dict(a=dict(type="integer"), b=dict(type="integer")), required=["a", "b"])))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def qwen(shared):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(shared/"tokenizers"/"qwen2.5")


@pytest.fixture
def templates():
    trl = pytest.importorskip("trl")
    return Path(trl.__file__).parent/"chat_templates"


def apart(tokenizer, text):
    "Ids of a text, a token a character where that is possible: not those that the tokenizer would give."
    return [i for c in text for i in tokenizer(c, add_special_tokens=False).input_ids]


def test_qwens_template_grows_at_its_end(qwen):
    r = ChatRenderer(qwen)
    assert isinstance(r, Renderer) and all(check_renderer(r).values())
    assert r.get_stop_token_ids() == [qwen.convert_tokens_to_ids("<|im_end|>")]


def test_a_loop_of_three_calls_never_encodes_what_was_said(qwen):
    "Ids that are not their text's own stay as they were sampled, and the text is the template's."
    r, messages = ChatRenderer(qwen), [dict(role="user", content="1 + 2 + 3?")]
    row = r.render_ids(messages, tools=[ADD], add_generation_prompt=True)
    for turn in range(3):
        said = apart(qwen, CALL) + r.stop
        assert r.ids(r.decode(said)) != said
        messages.append(message_of(r.parse_response(said)))
        assert messages[-1]["tool_calls"][0]["function"] == dict(name="add", arguments=dict(a=1, b=2))
        new = next_ids(r, messages, row, said, [dict(role="tool", content=str(turn))], tools=[ADD])
        row, before = row + said + new, row + said
        messages.append(dict(role="tool", content=str(turn)))
        assert row[:len(before)] == before and r.decode(row) == r.text(messages, [ADD], True)


def test_a_turn_that_was_cut_off_is_closed_by_the_template(qwen):
    r, user = ChatRenderer(qwen), dict(role="user", content="Hm?")
    asked, said = r.render_ids([user], add_generation_prompt=True), apart(qwen, "I wond")
    told = message_of(r.parse_response(said))
    new = next_ids(r, [user, told], asked, said, [user])
    assert r.decode(asked + said + new) == r.text([user, told, user], None, True)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "qwen3_instruct_2507", "llama3_1", "lfm2"])
def test_templates_of_others_are_told_apart(qwen, templates, name):
    "Qwen3's own drops earlier thinking; TRL's version for training does not."
    qwen.chat_template = (templates/f"{name}.jinja").read_text(encoding="utf-8")
    if name == "llama3_1":      # its turns end with a token that has to be one
        assert not check_renderer(ChatRenderer(qwen))["stops"]
        qwen.add_tokens([f"<|{x}|>" for x in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")],
                        special_tokens=True)
    found = check_renderer(ChatRenderer(qwen))
    if name == "qwen3": assert found["prefix"] is False and found["opens"] and found["said"]
    else: assert all(found.values()), found


def test_a_rewritten_history_keeps_the_ids_of_what_is_left(qwen, templates):
    qwen.chat_template = (templates/"qwen3.jinja").read_text(encoding="utf-8")
    r, user, again = ChatRenderer(qwen), dict(role="user", content="1+2?"), dict(role="user", content="Sure?")
    asked = r.render_ids([user], add_generation_prompt=True)
    thought, answer = apart(qwen, "<think>\nadd\n</think>\n\n"), apart(qwen, "It is 3.")
    said = thought + answer + r.stop
    told = message_of(r.parse_response(said))
    assert told == dict(role="assistant", content="It is 3.", reasoning_content="add")
    assert next_ids(r, [user, told], asked, said, [again]) is None
    row, anew = rewritten(r, [user, told, again], {1: said})
    assert not anew and r.decode(row) == r.text([user, told, again], None, True) and "add" not in r.decode(row)
    assert any(row[i:i + len(answer)] == answer for i in range(len(row))) and r.ids("It is 3.") != answer


def test_words_that_are_in_the_question_too_keep_their_ids_where_they_were_said(qwen, templates):
    qwen.chat_template = (templates/"qwen3.jinja").read_text(encoding="utf-8")
    r, user = ChatRenderer(qwen), dict(role="user", content="Say It is 3. or no.")
    words = apart(qwen, "It is 3.")
    said = apart(qwen, "<think>\nadd\n</think>\n\n") + words + r.stop
    row, anew = rewritten(r, [user, message_of(r.parse_response(said)), dict(role="user", content="Sure?")], {1: said})
    assert not anew
    asked = r.render_ids([user], add_generation_prompt=True)
    assert row[:len(asked)] == asked and any(row[i:i+len(words)] == words for i in range(len(asked), len(row)))


def test_a_call_in_other_words_than_the_templates_keeps_its_ids(qwen):
    "A conversation that was compacted: the template would write the call with other spaces."
    r, user = ChatRenderer(qwen), dict(role="user", content="1+2?")
    said = apart(qwen, '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>') + r.stop
    told = message_of(r.parse_response(said))
    row, anew = rewritten(r, [user, told, dict(role="tool", content="3")], {1: said}, tools=[ADD])
    assert not anew and any(row[k:k + len(said)] == said for k in range(len(row)))


def test_ids_without_a_text_are_kept_too(qwen):
    "A model may have more ids than its tokenizer: they are drawn, and decode to nothing."
    r, user = ChatRenderer(qwen), dict(role="user", content="1+2?")
    said = [151_700, *apart(qwen, "It"), 151_701, *r.stop]
    assert r.decode(said) == "It<|im_end|>"
    row, anew = rewritten(r, [user, message_of(r.parse_response(said)), user], {1: said})
    assert not anew and any(row[k:k + len(said)] == said for k in range(len(row)))


def test_words_that_a_template_shortens_are_counted(qwen):
    qwen.chat_template = "{% for m in messages %}{{ m.content[:4] }}<|im_end|>{% endfor %}"
    r, user = ChatRenderer(qwen), dict(role="user", content="1+2?")
    said = apart(qwen, "It is 3.") + r.stop
    row, anew = rewritten(r, [user, message_of(r.parse_response(said)), user], {1: said})
    assert anew == [1] and r.decode(row) == r.text([user, dict(content="It is 3."), user], None, True)


def test_a_renderer_without_a_template_keeps_every_id(qwen):
    "Also where a conversation begins with what was said."
    r, user, again = TextRenderer(qwen), dict(role="user", content="1+2?"), dict(role="user", content=" Sure?")
    one, two = apart(qwen, "It is 3."), apart(qwen, "Yes it is.")
    told = [message_of(r.parse_response(x)) for x in (one, two)]
    row, anew = rewritten(r, [user, told[0], again, told[1], user], {1: one, 3: two})
    ids = [r.render_ids([m]) for m in (user, again)]
    assert not anew and row == ids[0] + one + ids[1] + two + ids[0] and r.render_ids([told[0]]) != one
    assert rewritten(r, [told[0], user], {0: one}) == (one + ids[0], []) and rewritten(r, [user], {}) == (ids[0], [])


def test_a_renderer_that_gives_more_than_ids_is_accepted(qwen):
    "As those of the published package do: an object with `token_ids`, and None for an assistant among the new."
    class Rendered:
        def __init__(self, ids): self.token_ids = ids
    class Other(TextRenderer):
        def bridge_to_next_turn(self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None):
            if any(m["role"] == "assistant" for m in new_messages): return None
            return Rendered(super().bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, new_messages))
    r, said = Other(qwen), dict(role="assistant", content="b")
    assert next_ids(r, [said], [1], [2], [dict(role="user", content="c")]) == qwen("c").input_ids
    assert next_ids(r, [said], [1], [2], [said]) is None


def test_one_that_changes_what_stands_there_is_found_out(qwen):
    class Wrong(TextRenderer):
        def bridge_to_next_turn(self, *args, **more): return [0, *super().bridge_to_next_turn(*args, **more)]
    assert next_ids(Wrong(qwen), [], [1], [2], [dict(role="user", content="c")]) is None


def test_calls_that_cannot_be_read_are_kept():
    for text in ("<tool_call>{", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>',
                 '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "<tool_call>" + "["*100_000):
        assert read_response(text).problem and not read_response(text).tool_calls, text[:30]
    two = read_response(f"First.\n{CALL}\n{CALL}")
    assert two.content == "First." and [c["name"] for c in two.tool_calls] == ["add", "add"] and two.problem is None
    assert read_response('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>').tool_calls[0] == dict(
        name="f", arguments=dict(x=1))


def test_without_a_template_messages_are_their_text(qwen):
    assert isinstance(renderer_of(qwen), ChatRenderer)
    qwen.chat_template = None
    assert isinstance(renderer_of(qwen), TextRenderer)
    with pytest.raises(ValueError, match="has no chat template"): ChatRenderer(qwen)
