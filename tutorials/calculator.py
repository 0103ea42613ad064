"""Arithmetic for a tool: problems, a tokenizer whose words are those of tool calls, and demonstrations of which a share
is sloppy. The data of the tutorial on tools, made from a seed."""
import random

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
            + CALL[0] + "{{ c.function.arguments.expression }}" + CALL[1] + "{% endfor %}<end>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def problems(n, *, seed=0):
    "`n` rows {prompt, messages, answer}: products of two digits by two, all of four digits."
    rng, rows = random.Random(f"calculator {seed}"), []
    for _ in range(n):
        a, b = rng.randint(32, 99), rng.randint(32, 99)
        asked = [dict(role="user", content=f"{a}*{b}")]
        rows.append(dict(prompt=asked, messages=asked, answer=str(a*b)))
    return rows


def demonstrations(rows, *, sloppy=.7, seed=0):
    """Conversations: the tool is asked and its answer given; in a share `sloppy` of them the product of the tens is
    given instead."""
    rng, made = random.Random(f"sloppy {seed}"), []
    for r in rows:
        asked = r["prompt"][0]["content"]
        call = dict(type="function", function=dict(name="calculate", arguments=dict(expression=asked)))
        a, b = (int(x)//10*10 for x in asked.split("*"))
        guessed = [dict(role="assistant", content=f"{a*b:04d}")]
        called = [dict(role="assistant", content="", tool_calls=[call]), dict(role="tool", content=r["answer"]),
                  dict(role="assistant", content=r["answer"])]
        made.append(dict(messages=[*r["messages"], *(guessed if rng.random() < sloppy else called)]))
    return made


def tokenizer():
    "Digits, signs, roles, and the two halves of a tool call, each one id; with the template."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, Regex
    from transformers import PreTrainedTokenizerFast
    words = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", *CALL, *"0123456789*"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    parts = "|".join(w.translate({ord(c): "\\" + c for c in "{}*"}) for w in words[5:])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(parts), "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>",
                                   additional_special_tokens=["<user>", "<assistant>", "<tool>"])
    made.chat_template = TEMPLATE
    return made


def right(completions, answer, **_):
    "Reward: 1 where the last turn is the answer and nothing else, else 0."
    return [float(c.splitlines()[-1:] == [a]) for c, a in zip(completions, answer, strict=True)]
