"""What `show` draws: its size, its escapes, what is left where nothing is trusted; and that ∂loss/∂log π is what finite
differences say, for every loss of the library."""
import pickle
import re
from copy import copy, deepcopy
from functools import cache, partial
from html.parser import HTMLParser

import pytest
import tiny
import torch
from test_laws import BLOCKS, CASES, LOSSES, SURROGATE, arguments, differentiable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from rlblocks import (
    Batch, Buffer, Critic, Demonstrations, Policy, Preferences, Prompts, Rollout, Scorer, bradley_terry_loss,
    cispo_loss, pairs, ppo_loss, sequence_logprobs, show, value_loss,
)
from rlblocks.data.drawing import Colouring, constant_of, told
from rlblocks.data.drawn_rows import token_texts
from rlblocks.models.outputs import Out
from rlblocks.people.show import Leaves, loss_gradients, output_sources
from rlblocks.placement.place import Call


@cache
def letters():
    "Bytes as ids."
    vocab = {c: i for i, c in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def rows_of(*rows, **columns):
    "A batch of rows, each [(text, whether the policy wrote it), …]."
    made = [[(i, own) for text, own in row for i in letters()(text)["input_ids"]] for row in rows]
    T = max(map(len, made))
    def wide(x, fill): return torch.tensor([[*y, *[fill]*(T - len(y))] for y in x])
    return Batch(tokens=wide([[i for i, _ in row] for row in made], 0), lengths=torch.tensor([*map(len, made)]),
                 mask=wide([[own for _, own in row] for row in made], False), **columns).with_tokenizer(letters())


def answers(*texts, prompt="What?", **columns):
    return rows_of(*([(prompt, False), (x, True)] for x in texts), **columns)


class Text(HTMLParser):
    "The text of a page, its tags, and the style of each."
    VOID = ("img", "input", "br", "meta")

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.open = [], [], []
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID: self.open.append(tag)

    def handle_endtag(self, tag): assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]: self.text.append(data)

    def spans(self): return [x for tag, x in self.tags if tag == "span" and "title" in x]


def page(drawing): return Text(drawing._repr_html_())


def untrusted(html):
    "What JupyterLab leaves of a page that is not trusted: tags and properties of its lists, no style, svg, script."
    html = re.sub(r"<(style|script|svg).*?</\1>", "", html, flags=re.S)
    html = re.sub(r"--\d+:#\w+;?", "", html)
    return re.sub(r'<input[^>]*>', "", html)


# -- what is drawn

def test_16_short_rows_are_small():
    "Every number that a GRPO run has, on answers of a few letters."
    g = torch.Generator().manual_seed(0)
    batch = answers(*[f"{i % 10} eggs" for i in range(16)], group=torch.arange(16)//8,
                    scores=torch.rand(16, generator=g), prompt="How many eggs has she now? Answer: ")
    def column(per): return torch.where(batch.mask, -torch.rand(16, per, generator=g), 0.)
    T = batch.width
    batch["advantages"], batch["old_logprobs"], batch["ref_logprobs"] = column(1), column(T), column(T)
    batch["rollout_logprobs"] = batch.old_logprobs + 1e-6
    assert len(batch._repr_html_().encode()) < 15_000


def test_texts_are_shown_as_they_are():
    odd = '<b>x</b> &amp; "q" \'s\'\n\ttab \x00 \u202e'
    drawing = show(answers(odd, prompt="<script>alert(1)</script>"))
    found = page(drawing)
    text = "".join(found.text)
    assert "<b>x</b> &amp; \"q\" 's'↵\n\ttab ␀" in text and "<script>alert(1)</script>" in text
    assert not {"b", "script"} & {tag for tag, _ in found.tags}
    assert "<b>x</b>" in repr(drawing) and "\n\t" not in repr(drawing)


def test_texts_of_columns_are_shown_as_they_are():
    "Without a tokenizer; half of a character (a lone surrogate) as well."
    batch = Batch(prompt=["<i>?", "\ud83d"], completion=["<b>", "&lt;"], scores=torch.tensor([1., 0.]))
    text = "".join(page(show(batch)).text)
    assert "<i>?" in text and "<b>" in text and "&lt;" in text and "<b>" in repr(show(batch))
    show(batch)._repr_html_().encode()


def test_a_character_of_several_tokens():
    texts = token_texts(letters(), letters()("a ☃é🙂b")["input_ids"])
    assert texts == ["a", " ", "☃", "", "", "é", "", "🙂", "", "", "", "b"]
    cut = letters()("🙂")["input_ids"][:3]
    assert token_texts(letters(), cut + letters()("ok")["input_ids"])[-2:] == ["o", "k"]
    assert "".join(token_texts(letters(), cut)).strip("\ufffd") == ""
    found = page(show(answers("☃", advantages=torch.ones(1, 8))))
    assert len(found.spans()) == 3 and "☃··" in "".join(found.text)


def test_numbers_that_are_none():
    x = torch.zeros(1, 8)
    x[0, 5:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    batch = answers("abc", advantages=x, scores=torch.tensor([torch.nan]))
    first, second, third = page(show(batch)).spans()
    assert "advantages nan" in first["title"] and "#bbb" in first["style"]
    assert "advantages inf" in second["title"] and "background-color:#5" in second["style"]
    assert "advantages -inf" in third["title"] and "background-color:#e" in third["style"]


def test_long_rows_are_folded():
    "16 rows of 10,000 tokens: beginning and end are coloured, the middle is text; the size has a bound."
    g = torch.Generator().manual_seed(0)
    T = 10_000
    tokens = torch.randint(2, 258, (16, T), generator=g)
    tokens[:, :4] = 7
    batch = Batch(tokens=tokens, lengths=torch.full((16,), T), mask=(torch.arange(T) > 3).expand(16, T).clone(),
                  advantages=torch.randn(16, T, generator=g), group=torch.zeros(16, dtype=torch.long))
    batch = batch.with_tokenizer(letters())
    found = show(batch)
    html = found._repr_html_()
    assert len(html) < 600_000 and 2300 <= len(Text(html).spans()) <= 2400
    assert html.count("more tokens …") == 16 and html.count("<details") == 16
    assert len(Text(show(batch, rows=1, tokens=20_000)._repr_html_()).spans()) == T - 4


def test_only_the_drawn_rows_are_read():
    "A column that raises where all of its rows are computed with."
    class Fragile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                whole = any(isinstance(x, torch.Tensor) and x.dim() and len(x) == 6 for x in args)
            read = f.__name__ in ("__getitem__", "__get__", "dim", "size", "is_floating_point")
            if whole and (not read or f.__name__ == "__getitem__" and len(args[1]) > 2): raise AssertionError(f)
            return super().__torch_function__(f, types, args, kwargs or {})
    batch = answers(*["ab", "cd", "ef"]*2, group=torch.arange(6)//2)
    batch.columns["advantages"] = torch.zeros(batch.mask.shape).as_subclass(Fragile)
    batch.kinds["advantages"] = "token"
    with pytest.raises(AssertionError): show(batch, rows=3)
    assert "a" in repr(show(batch, rows=2))


def test_colours_are_there_where_nothing_is_trusted():
    batch = answers("ab", "cd", group=torch.tensor([0, 0]), scores=torch.tensor([1., 0.]))
    batch["advantages"] = torch.where(batch.mask, torch.tensor([[1.], [-1.]]), 0.)
    batch["entropy"] = torch.where(batch.mask, torch.rand(batch.mask.shape), 0.)
    html = show(batch)._repr_html_()
    assert "<script" not in html and "javascript" not in html and "<svg" not in html and "http" not in html
    found = Text(untrusted(html))
    colours = [x["style"] for x in found.spans()]
    assert [re.search("#(.)", x)[1] for x in colours] == ["5", "5", "e", "e"]
    assert "coloured by advantages" in "".join(found.text)
    assert next(x for tag, x in found.tags if tag == "form")["style"] == "display:none"      # its buttons would be dead
    assert "color:#222" in html.split(">")[0] and "background-color:#fff" in html.split(">")[0]      # for dark themes


def test_green_is_what_a_step_makes_more_probable():
    "The gradient is negative there; the legend says so."
    batch = answers("ab", old_logprobs=torch.zeros(1, 7))
    def loss(out, b): return -out.logprobs[0, 5] + out.logprobs[0, 6], {}
    html = show(batch, loss=loss)._repr_html_()
    more, less = page(show(batch, loss=loss)).spans()
    assert "∂loss/∂log π -1" in more["title"] and "background-color:#5b7" in more["style"]
    assert "∂loss/∂log π 1" in less["title"] and "background-color:#e" in less["style"]
    assert re.search("#5b7[^>]*>-1 pushed up", html)


def test_every_number_has_a_button_and_a_rule():
    batch = answers("ab", advantages=torch.randn(1, 7), entropy=torch.rand(1, 7), mine=torch.randn(1, 7))
    html = show(batch, by="entropy")._repr_html_()
    values = [x["value"] for tag, x in Text(html).tags if tag == "input" and x["type"] == "radio"]
    assert values == ["0", "1", "2"] and [f'[value="{k}"]:checked' in html for k in (1, 2)] == [True, True]
    assert re.findall(r"<label><input[^>]*>(\w+) <span", html) == ["entropy", "advantages", "mine"]
    for name in ("advantages", "entropy", "mine"): assert all(f"{name} " in x["title"] for x in Text(html).spans())


# -- which rows, in which order

def test_groups_stay_together_best_first():
    scores = torch.tensor([.1, 0., .9, 1., torch.nan, .5])
    batch = answers(*"abcdef", group=torch.tensor([5, 2, 5, 2, 5, 9]), scores=scores)
    assert show(batch).rows == [2, 0, 4, 3, 1, 5] and show(batch, rows=4).rows == [2, 0, 4, 3]
    assert show(batch, rows=2).rows == [2, 4] and "1 rows between" in show(batch, rows=2)._repr_html_()
    assert show(batch, rows=batch.scores > .4).rows == [2, 3, 5]
    text = "".join(page(show(batch)).text)
    assert text.count("What?") == 3 and "nan" in text


def test_pairs_and_verdicts():
    batch = answers("good", "evil", unit=torch.tensor([4, 4]), chosen=torch.tensor([False, True]))
    text = "".join(page(show(batch)).text)
    assert text.index("chosen") < text.index("rejected") and text.index("evil") < text.index("good")


def test_before_and_after():
    before = answers("ab", "cd", "ef", group=torch.tensor([0, 0, 1]), scores=torch.tensor([0., 1., 0.]))
    after = answers("gh", "ij", "kl", group=torch.tensor([1, 0, 0]), scores=torch.tensor([0., 1., 0.]))
    text = "".join(page(show(before, after, rows=2)).text)
    assert "cd" in text and "ij" in text and "gh" not in text and text.count("What?") == 1     # one prompt, of group 0
    assert text.index("cd") < text.index("after", text.index("cd")) < text.index("ij")


def test_before_and_after_have_the_gradient_at_their_own_columns():
    both = [answers("ab", "cd", group=torch.tensor([0, 0]), old_logprobs=torch.full((2, 7), x)) for x in (-1., -2.)]
    def loss(out, b): return (out.logprobs**2*b.mask).sum()/2, {}
    drawing = show(*both, loss=loss)
    for side, batch in zip(drawing.sides, both, strict=True):
        assert_close(side.numbers["gradient"], torch.where(batch.mask, batch.old_logprobs, 0.)[side.rows])
    assert [repr(drawing).count(x) for x in ("before: 2 rows", "after: 2 rows", "loss 2 ", "loss 8 ")] == [1]*4


def test_tools_turns_and_ends():
    batch = rows_of([("Q", False), ("call", True), ("<tool>", False), ("done", True)], [("Q", False), ("no", True)],
                    finish_reason=["completed", "max_tokens"], policy_version=torch.tensor([3, 4]))
    found = page(show(batch))
    bars = [x for tag, x in found.tags if tag == "div" and "border-left" in x.get("style", "")]
    assert len(bars) == 1 and len(found.spans()) == 10 and "⟦<tool>⟧" in repr(show(batch))
    text = "".join(found.text)
    assert "max_tokens" in text and "completed" not in text and "version 4" in text
    assert "turn 0 call<tool>turn 1 done" in text and "turn 0 no" not in text
    batch["turn"] = torch.where(batch.mask, 0, -1) + 3*(torch.arange(batch.width) > 8)*batch.mask     # the row's own
    assert "turn 0 call<tool>turn 3 done" in "".join(page(show(batch)).text)
    # an answer of temperature 0 has no True in its mask
    greedy = answers("told", prompt_lengths=torch.tensor([5]))
    greedy["mask"] = torch.zeros_like(greedy.mask)
    assert "told" in "".join(page(show(greedy)).text) and not page(show(greedy)).spans()


def test_duplicates_are_counted_once_a_group():
    again = torch.tensor([False, True, True, False, False, False])
    batch = answers(*"aaabcd", group=torch.tensor([0]*4 + [1]*2), duplicate=again)
    for text in ("".join(page(show(batch)).text), repr(show(batch))):
        assert text.count("2 of 4 answers repeat another") == 1 == text.count("repeat") and "duplicate" not in text


def test_a_score_that_is_missing_is_in_no_mean():
    batch = answers("a", "b", "c", group=torch.tensor([0, 0, 0]))
    batch.set("scores", torch.tensor([[torch.nan, 2.], [0., 1.], [torch.nan, torch.nan]]), per="row")
    drawing = show(batch)
    assert drawing.rows == [0, 1, 2] and "score 1.25 (0.5" in repr(drawing) and ", 1 not finite" in repr(drawing)


def test_without_a_tokenizer():
    batch = answers("ab", advantages=torch.ones(1, 7)*torch.arange(7))
    bare = batch.with_tokenizer(None)
    text = "".join(page(show(bare)).text)
    assert "tokenizer=" in text and str(int(bare.tokens[0, 5])) in text and len(page(show(bare)).spans()) == 2
    bare["completion"], bare["prompt"] = ["AB"], ["What is it?"]
    text = "".join(page(show(bare)).text)
    assert "AB" in text and "What is it?" in text and "tokenizer=" in text
    assert "ab" in "".join(page(show(bare, tokenizer=letters())).text)
    assert Batch(scores=torch.ones(2))._repr_html_() is None and answers("x")[:0]._repr_html_() is None


def test_media_are_thumbnails(tmp_path):
    pytest.importorskip("PIL")
    import tiny_media
    from PIL import Image
    Image.effect_noise((900, 600), 90).save(tmp_path/"big.png")
    Image.new("RGB", (40, 40)).save(tmp_path/"gone.png")
    message = [dict(role="user", content=[dict(type="image"), dict(type="text", text="What?")])]
    data = Prompts([dict(prompt=message, images=[str(tmp_path/name)]) for name in ("big.png", "gone.png")],
                   tiny_media.processor("llava"), shuffle=False)
    batch = data.take(2)
    (tmp_path/"gone.png").unlink()
    found = page(show(batch))
    images = [x for tag, x in found.tags if tag == "img"]
    assert len(images) == 1 and images[0]["src"].startswith("data:image/png;base64,") and len(images[0]["src"]) < 15_000
    assert "gone.png" in "".join(found.text) and "<image>×" in "".join(found.text)


def test_a_file_stands_alone(tmp_path):
    path = show(answers("☃ <b>")).html(tmp_path/"rows.html")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "utf-8" in text and "http" not in text and "☃" in text


# -- the batch

def test_a_batch_completes_its_columns():
    batch = answers("ab", group=torch.tensor([0]))
    assert {"tokens", "group", "minibatches"} <= {*dir(batch)}
    assert batch._ipython_key_completions_() == list(batch.columns)
    assert len(repr(batch)) < 150 and "mask" in repr(batch) and "\n" not in repr(batch)


def test_the_tokenizer_goes_with_the_rows_and_not_into_pickles():
    batch = answers("ab", "cd", group=torch.tensor([0, 1]), unit=torch.tensor([0, 1]))
    made = [batch[:1], batch.drop("group"), batch.trim(), batch.to("cpu"), copy(batch), *batch.parts(2),
            *batch.minibatches(2, seed=0), Batch.cat([batch, batch.with_tokenizer(None)]),
            batch.with_columns(batch.columns)]
    assert all(b.tokenizer is letters() for b in made) and "tokenizer" not in batch
    for other in (pickle.loads(pickle.dumps(batch)), deepcopy(batch)):
        assert other.tokenizer is None and other.tokens.equal(batch.tokens) and other.n_units == 2
    assert len(pickle.dumps(batch)) == len(pickle.dumps(batch.with_tokenizer(None)))
    queue = Buffer()
    queue.add(batch)
    assert all(b.tokenizer is letters() for b in (queue.rows(), queue.sample(1, seed=0), queue.take(2)))


def test_data_and_rollouts_give_their_tokenizer():
    pair = dict(prompt="w3 w4", chosen="w5", rejected="w6")
    words = tiny.tokenizer()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Preferences([pair], words).take(1).tokenizer is words
    assert Demonstrations([dict(prompt="w3", completion="w5")], words).take(1).tokenizer is words
    prompts = Prompts(["w3 w4", "w5"], words).take(2)
    rollout = Rollout(tiny.model(), tokenizer=words, max_tokens=3)
    rows = rollout.generate(prompts, seed=0)
    assert prompts.tokenizer is words and rows.tokenizer is words
    assert rollout.extend(rows, [torch.tensor([3])]*2).tokenizer is words
    sent = pickle.loads(pickle.dumps(rows))
    for n, found in ((1, [sent]), (2, [sent[:1], sent[1:]])):
        assert Call((prompts,), {}, n).joined(found).tokenizer is words      # as a pool of processes answers


# -- the numbers

def tiny_rows():
    "Rows with all the columns of a GRPO step."
    batch = tiny.rows(B=8, T=12, dtype=torch.float32)
    ref = Policy(tiny.model(seed=1), frozen=True, device="cpu")
    batch["rollout_logprobs"] = ref.logprobs(batch)
    return batch, ref


def test_numbers_of_models():
    "On the drawn rows alone, without a loss."
    batch, ref = tiny_rows()
    policy, critic = Policy(tiny.model(), lr=1e-3, device="cpu"), Critic(tiny.model(seed=2), device="cpu")
    batch["old_logprobs"] = policy.logprobs(batch) + .1
    seen = []
    class Counted:
        def logprobs(self, rows):
            seen.append(len(rows))
            return policy.logprobs(rows)
    found = show(batch, Counted(), ref=ref, critic=critic, rows=3)
    assert seen == [3] and "gradient" not in found.numbers
    at, mask = found.rows, batch.mask[found.rows]
    numbers = {k: x[mask] for k, x in found.numbers.items()}
    now, refs = policy.logprobs(batch)[at][mask], ref.logprobs(batch)[at][mask]
    assert_close(numbers["logprobs"], now)
    assert_close(numbers["ratio"], torch.full_like(now, -.1).exp())
    assert_close(numbers["mismatch"], (now + .1 - batch.rollout_logprobs[at][mask]).exp())
    assert_close(numbers["kl"], (refs - now).exp() - 1 - (refs - now))
    assert_close(numbers["values"], critic.values(batch)[at][mask])
    assert (show(batch, policy, rows=3).numbers["entropy"][mask] > 0).all()


def test_units_may_be_drawn_in_part():
    batch, _ = tiny_rows()
    batch["unit"] = torch.arange(8)//2
    assert len(show(batch.drop("group"), Policy(tiny.model(), device="cpu"), rows=3).rows) == 3


OWN = ("logprobs", "values", "scores", "logits", "router_logits", "measured", "entropy")     # what `out` may hold


def closure(case):
    """(loss(out, b), rows) of a loss of the library: its first argument comes from `out`.

    Where that is one number an answer, it is the sum over the answer's tokens of `out.logprobs`, so that the gradient
    is one of tokens; pairs are two rows of a unit."""
    columns, hyper = arguments(case)
    f, firsts = BLOCKS[CASES[case][0]], differentiable(case, columns)
    of_answers = all(columns[k].dim() == 1 for k in firsts)
    B = 16*len(firsts) if of_answers else 16
    base = {k: torch.cat([x]*(B//16)) for k, x in tiny.rows(B=16, T=16).columns.items()}
    own = dict(tokens=base["tokens"], lengths=base["lengths"], mask=base["mask"])
    g = torch.Generator().manual_seed(1)
    if of_answers:
        own |= dict(unit=torch.arange(16).repeat(B//16), old_logprobs=-torch.rand(B, 16, generator=g).double())
        def loss(out, b):
            sums = sequence_logprobs(out.logprobs, b.mask).view(len(firsts), 16)
            return f(**columns | dict(zip(firsts, sums, strict=True)), **hyper)
    else:
        # a column of the batch stands in for what a model gives
        own = {k: x for k, x in columns.items() if k == "mask" and x.shape == (16, 16)} | dict(
            tokens=base["tokens"], lengths=torch.full((16,), 16))
        names = {k: k if k in OWN else f"given_{k}" for k in firsts}
        def loss(out, b):
            return f(**columns | {k: getattr(out, name) for k, name in names.items()}, **hyper)
        own |= {("old_logprobs" if name == "logprobs" else name): columns[k] for k, name in names.items()}
    return loss, Batch(per_row=[k for k, x in own.items() if x.dim() > 1 and x.shape[1] != 16], **own)


class Frozen:
    "Stopped gradients are numbers: what `detach` gives at first, it gives again where the arguments have moved."

    def __init__(self, monkeypatch):
        self.known, self.at, detach = [], None, torch.Tensor.detach
        def replay(x):
            if self.at is None: self.known.append(detach(x).clone())
            else: self.at += 1
            return self.known[-1 if self.at is None else self.at - 1]
        monkeypatch.setattr(torch.Tensor, "detach", replay)

    def again(self): self.at = 0


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name in LOSSES])
def test_the_gradient_is_that_of_finite_differences(case, monkeypatch):
    """In float64, in three directions, an entry of which is a token: of `loss_gradients` for whatever a loss reads, and
    of `show`'s numbers. Of losses that stop a gradient on purpose, what is stopped stays as it was."""
    loss, batch = closure(case)
    out = Leaves(output_sources(batch), torch.device("cpu"))
    value, grads = loss_gradients(loss, out, batch)
    assert grads and value.dtype == torch.float64 and any(x.any() for x in grads.values())
    leaves, g, frozen = {k: x.detach() for k, x in out.items()}, torch.Generator().manual_seed(2), None
    if case in SURROGATE or CASES[case][0] in SURROGATE: frozen = Frozen(monkeypatch)
    def value_at(moved):
        if frozen and frozen.known: frozen.again()
        return loss(Out(**leaves | moved), batch)[0]
    with torch.no_grad():
        value_at({})
        for name, grad in grads.items():
            for _ in range(3):
                to = torch.randn(grad.shape, generator=g, dtype=torch.float64)
                up, down = (value_at({name: leaves[name] + step*to}) for step in (1e-6, -1e-6))
                assert_close((grad*to).sum(), (up - down)/2e-6, rtol=1e-5, atol=1e-8)
    monkeypatch.undo()
    if "logprobs" in grads:
        drawn = show(batch, loss=loss, rows=len(batch))
        assert_close(drawn.numbers["gradient"].double(), grads["logprobs"][drawn.rows], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("block", [ppo_loss, partial(cispo_loss, clip_high=.2)])
def test_the_gradient_is_what_a_step_follows(block):
    """Chain rule through a real model: Σ ∂loss/∂log π · ∂log π/∂w is the gradient of the weights; also for a loss whose
    value is not what it descends."""
    net, batch = tiny.model(dtype=torch.float64), tiny.rows(B=4, T=10)
    batch = batch.drop("temperature")
    def logprobs():
        x = net(batch.tokens).logits.log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return torch.where(batch.mask, torch.nn.functional.pad(x, (1, 0)), 0.)
    batch["old_logprobs"] = logprobs().detach() + .1*torch.randn(batch.mask.shape).double()
    def loss(out, b): return block(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b)
    class Model:
        def logprobs(self, rows): return logprobs().detach()
    found = show(batch, Model(), loss=loss, rows=4)
    given = torch.zeros(batch.mask.shape, dtype=torch.float64)
    given[found.rows] = found.numbers["gradient"].double()
    weights = [*net.parameters()]
    by_token = torch.autograd.grad((given*logprobs()).sum(), weights)
    whole = torch.autograd.grad(loss(Out(logprobs=logprobs()), batch)[0], weights)
    for a, b in zip(by_token, whole, strict=True): assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_losses_of_critics_and_scorers():
    batch, _ = tiny_rows()
    batch["old_values"] = torch.randn(batch.mask.shape)
    def fit(out, b): return value_loss(out.values, b.old_values, b.returns.float(), b.mask, denom=b)
    critic = Critic(tiny.model(seed=2), device="cpu")
    found = show(batch, critic=critic, loss=fit)
    mask = batch.mask[found.rows]
    want = (critic.values(batch) - batch.returns)[found.rows][mask]
    assert (found.numbers["gradient_of_values"][mask].sign() == want.sign()).float().mean() > .5
    assert "∂loss/∂values" in found._repr_html_()
    assert_close(show(batch, critic, loss=fit).numbers, found.numbers, equal_nan=True)
    batch["unit"], batch["chosen"] = torch.arange(8)//2, torch.arange(8) % 2 == 0
    def better(out, b): return bradley_terry_loss(*pairs(out.scores, b), denom=b)
    found = show(batch.drop("group"), Scorer(tiny.model(seed=3), device="cpu"), loss=better)
    assert repr(found).count("∂loss/∂scores -0.1") == 4 and repr(found).count("∂loss/∂scores 0.1") == 4


def test_what_a_loss_reads_and_nobody_has():
    batch = answers("ab")
    with pytest.raises(AttributeError, match="show: the loss reads out.logprobs"):
        show(batch, loss=lambda out, b: (out.logprobs.sum(), {}))
    with pytest.raises(AttributeError, match="show: the loss reads out.values.*critic"):
        show(batch, loss=lambda out, b: (out.values.sum(), {}))
    with pytest.raises(TypeError, match="show: the loss returned"): show(batch, loss=lambda out, b: ({}, {}))
    with pytest.raises(TypeError, match="tokenizer="): show(batch, letters())
    with pytest.raises(ValueError, match="show: by='advantage'.*is 'advantages' meant"):
        show(answers("ab", advantages=torch.ones(1, 7)), by="advantage")


def test_one_number_that_differs_is_not_hidden():
    x = torch.ones(1, 1600)
    x[0, 4:] += torch.linspace(-4e-4, 4e-4, 1596)
    assert constant_of([(x, torch.ones(1, 1600, dtype=torch.bool))]) == "1"
    x[0, 9] = 3.
    assert constant_of([(x, torch.ones(1, 1600, dtype=torch.bool))]) == ""


def test_a_legend_has_the_sign_of_its_numbers_and_a_reference_its_name():
    assert ">-3<" in Colouring.of("logprobs", torch.tensor([-3., -1.])).legend()
    assert ">3<" in Colouring.of("kl", torch.tensor([1., 3.])).legend()
    assert told(dict(ref_logprobs=-2.)) == ["log π ref -2"]


def test_before_and_after_are_matched_by_prompt_not_by_number():
    def asked(*prompts):
        return Batch(prompt=[*prompts], completion=["x"]*len(prompts), group=torch.arange(len(prompts)))
    found = repr(show(asked("aa", "bb"), asked("bb", "aa"), rows=1))
    assert found.count("aa") == 2 and "bb" not in found
