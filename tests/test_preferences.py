"Pairs and feedback: LAWS 33 (one prompt for both answers, nothing cut in silence), units, exact resume, errors by row."
import contextlib
import json
import math

import pytest
import torch

from rlblocks import Checkpoint, Policy, dpo_loss, here, loop_from, pairs, sequence_logprobs
from rlblocks.data.preferences import Feedback, Preferences, as_feedback
from rlblocks.data.demonstrations import Demonstrations
from rlblocks.data.prompts import Prompts
from rlblocks.losses.unpaired import mismatched

REAL = ["tokenizers/gpt2", "tokenizers/qwen2.5", "models/stories260K", "models/babyllama-char105"]
PAIRS = [dict(prompt=f"What is {a} plus {b}?", chosen=f" {a+b}", rejected=f" {a+b+1} or {a}", margin=a/2)
         for a in range(3) for b in range(3)]
ASK = [dict(role="user", content="Is 7 prime?")]


def says(text): return [dict(role="assistant", content=text)]


class Plain:
    "A callable and its ids, which writes BOS and EOS on everything; counts the texts it is given."
    bos_token_id, eos_token_id = 1, 2
    def __init__(self): self.texts = []
    def __call__(self, text):
        self.texts.append(text)
        return [1] + [ord(c) for c in text] + [2]
    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        return "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:"*add_generation_prompt


def chosen_ids(batch, i): return batch.tokens[i][batch.mask[i]].tolist()


@pytest.fixture(scope="session", params=REAL)
def real(request, shared):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(shared / request.param)


# -- what a pair is

def test_a_pair_is_two_rows_tied_by_unit():
    data = Preferences(PAIRS, Plain(), shuffle=False)
    batch = data.take(3)
    assert len(data) == 9 and len(batch) == 6
    assert set(batch.columns) == {"tokens", "lengths", "mask", "unit", "chosen", "prompt", "completion", "margin"}
    assert batch.unit.tolist() == [0, 0, 1, 1, 2, 2] and batch.chosen.tolist() == [True, False]*3
    assert batch.chosen.dtype == torch.bool
    assert batch.completion[:2] == [" 0", " 1 or 0"] and batch.margin == [0., 0., 0., 0., 0., 0.]
    assert chosen_ids(batch, 1) == [*map(ord, " 1 or 0"), 2] and batch.n_units == 3 and batch.n_rows == 6
    good, bad = pairs(batch.lengths, batch)
    assert (bad - good == 5).all()
    assert data.take(1).unit.tolist() == [3, 3]


def test_pairs_stay_together_in_any_cut():
    batch = Preferences(PAIRS, Plain(), seed=3).take(9)
    for piece in [*batch.parts(4), *batch.minibatches(4, seed=1)]:
        assert piece.chosen.sum()*2 == len(piece) and piece.unit.unique().numel()*2 == len(piece)
    with pytest.raises(ValueError, match="parts unit"): batch[:3]


def check_prompts(tokenizer):
    "Both rows begin with the ids that generation starts from; what is chosen spells the answer and one EOS."
    batch = Preferences(PAIRS, tokenizer, shuffle=False).take(9)
    start = Prompts([dict(prompt=r["prompt"]) for r in PAIRS], tokenizer, shuffle=False).take(9)
    same = Demonstrations([{"prompt": r["prompt"], "completion": r[side]} for r in PAIRS
                           for side in ("chosen", "rejected")], tokenizer, shuffle=False).take(18)
    for i in range(18):
        n = int(start.lengths[i//2])
        assert batch.tokens[i, :n].equal(start.tokens[i//2, :n]) and not batch.mask[i, :n].any()
        assert batch.mask[i, n:batch.lengths[i]].all()
        assert chosen_ids(batch, i).count(tokenizer.eos_token_id) == 1 == chosen_ids(batch, i)[-1:].count(
            tokenizer.eos_token_id)
    assert batch.tokens.equal(same.tokens) and batch.mask.equal(same.mask)


def test_both_answers_follow_the_same_ids(): check_prompts(Plain())
def test_both_answers_follow_the_same_ids_real(real): check_prompts(real)


def test_the_boundary_is_never_inside_a_token(shared):
    "gpt2 merges 'a' + 'bc' into other tokens than 'a' + ' d': apart, the prompts would differ."
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2")
    row = dict(prompt="The under", chosen="stand", rejected=" tree")
    # the trap is real
    assert gpt2(row["prompt"] + row["chosen"])["input_ids"][:2] != gpt2(row["prompt"])["input_ids"]
    batch = Preferences([row], gpt2).take(1)
    n = len(gpt2(row["prompt"])["input_ids"])
    assert batch.tokens[0, :n].equal(batch.tokens[1, :n]) and gpt2.decode(chosen_ids(batch, 0)[:-1]) == "stand"
    assert gpt2.decode(chosen_ids(batch, 1)[:-1]) == " tree"


def test_a_prompt_is_tokenised_once():
    spy = Plain()
    Preferences(PAIRS + PAIRS[:2], spy)
    # with its BOS, and bare to see where the answers begin
    assert all(spy.texts.count(r["prompt"]) == 2 for r in PAIRS)


# -- row formats

def test_messages_and_whole_conversations_mean_the_same():
    make = lambda *rows: Preferences(list(rows), Plain(), shuffle=False).take(1)
    text = make(dict(prompt=ASK, chosen="Yes.", rejected="No."))
    for other in (make(dict(prompt=ASK, chosen=says("Yes."), rejected=says("No."))),
                  make(dict(chosen=ASK + says("Yes."), rejected=ASK + says("No.")))):
        assert other.prompt == text.prompt == ["u:Is 7 prime?\na:"]*2
        n = int(text.mask[0].int().argmax())
        assert other.tokens[:, :n].equal(text.tokens[:, :n]) and other.mask[:, :n].equal(text.mask[:, :n])
    long = make(dict(chosen=ASK + says("Yes.") + ASK + says("Yes!"), rejected=ASK + says("Yes.") + ASK + says("No.")))
    assert long.prompt[0] == "u:Is 7 prime?\na:Yes.\nu:Is 7 prime?\na:"
    # more turns than one: each is the policy's, what is between is not
    turns = make(dict(prompt=ASK, chosen=says("Yes.") + ASK + says("Yes!"), rejected=says("No.")))
    assert bytes(chosen_ids(turns, 0)) == b"Yes.\nYes!\n\x02"


def test_templates_and_bos_written_twice():
    rows = [dict(question="1+1?", chosen="2", rejected="3")]
    batch = Preferences(rows, Plain(), template="\x01Q: {question} A: ").take(1)
    assert bytes(batch.tokens[0, :14].tolist()) == b"\x01Q: 1+1? A: 2\x02" and batch.prompt[0] == "\x01Q: 1+1? A: "
    assert batch.question == ["1+1?"]*2


def test_hugging_face_rows():
    datasets = pytest.importorskip("datasets")
    assert Preferences(datasets.Dataset.from_list(PAIRS), Plain(),
                       seed=1).take(9).tokens.equal(Preferences(PAIRS, Plain(), seed=1).take(9).tokens)


# -- LAWS 33: nothing is cut, what is left out is counted

LONG = [dict(prompt="ab", chosen="cd", rejected="e"), dict(prompt="ab", chosen="c", rejected="defgh"),
        dict(prompt="abcdefgh", chosen="i", rejected="j")]


def test_longer_pairs_raise_or_are_left_out_and_counted():
    with pytest.raises(ValueError, match=r"Preferences: row 1 .*9 tokens, max_tokens is 8; pass drop_longer=True"):
        Preferences(LONG, Plain(), max_tokens=8)
    data = Preferences(LONG, Plain(), max_tokens=8, drop_longer=True)
    assert (len(data), data.longer, data.dropped) == (1, 2, 0) and data.take(2).prompt == ["ab"]*4
    data = Preferences(LONG, Plain(), max_tokens=9, drop_longer=True)
    # nine are allowed
    assert (len(data), data.longer) == (2, 1) and len(Preferences(LONG[:2], Plain(), max_tokens=9)) == 2
    with pytest.raises(ValueError, match="none of the 3 rows"):
        Preferences(LONG, Plain(), max_tokens=3, drop_longer=True)
    with pytest.raises(ValueError, match="drop_longer needs max_tokens"): Preferences(LONG, Plain(), drop_longer=True)
    judged = Feedback(as_feedback(LONG), Plain(), max_tokens=8, drop_longer=True, shuffle=False)
    assert (len(judged), judged.longer) == (3, 3) and judged.take(3).desirable.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="Feedback: row 3 .*9 tokens"):
        Feedback(as_feedback(LONG), Plain(), max_tokens=8)


def test_pairs_that_say_nothing_are_left_out_aloud():
    rows = [dict(prompt="a", chosen="", rejected="b"), PAIRS[0] | dict(margin=0),
            dict(prompt="a", chosen="b", rejected="b")]
    rows = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in rows]
    with pytest.warns(UserWarning, match="2 of 3 pairs have an empty answer or two equal ones"):
        data = Preferences(rows, Plain(), shuffle=False)
    assert (len(data), data.dropped) == (1, 2) and data.take(1).prompt == ["What is 0 plus 0?"]*2
    with pytest.warns(UserWarning, match="1 of 2 rows have no completion token"):
        judged = Feedback(as_feedback(rows[:1]), Plain())
    assert len(judged) == 1 and not judged.take(1).desirable.any()


# -- order and resume

@pytest.mark.parametrize("stop", [0, 1, 4, 9, 13])
def test_resume_is_a_continuation(stop):
    make = lambda: Preferences(PAIRS, Plain(), seed=(3, "data"))
    whole, first, second = make(), make(), make()
    straight = whole.take(stop + 12)
    if stop: first.take(stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = second.take(12)
    assert rest.completion == straight.completion[2*stop:] and rest.unit.tolist() == straight.unit.tolist()[2*stop:]
    assert rest.tokens.tolist() == straight[slice(2*stop, None)].trim().tokens.tolist()


def test_an_epoch_is_every_pair_once():
    data = Preferences(PAIRS, Plain(), seed=1)
    epochs = [data.take(4).prompt[::2] + data.take(5).prompt[::2] for _ in range(3)]
    assert all(sorted(e) == sorted(r["prompt"] for r in PAIRS) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert data.epochs == 3
    assert repr(data).startswith("Preferences(9 pairs of 21…26 tokens, epoch 3.00; prompt, chosen")
    with pytest.raises(ValueError, match="another seed"):
        Preferences(PAIRS, Plain(), seed=2).load_state_dict(data.state_dict())
    swapped = [r | dict(chosen=r["rejected"], rejected=r["chosen"]) for r in PAIRS]
    with pytest.raises(ValueError, match="fingerprint"):
        Preferences(swapped, Plain(), seed=1).load_state_dict(data.state_dict())
    flipped = [r | dict(label=not r["label"]) for r in as_feedback(PAIRS)]
    with pytest.raises(ValueError, match="fingerprint"):
        Feedback(flipped, Plain()).load_state_dict(Feedback(as_feedback(PAIRS), Plain()).state_dict())


# -- feedback

def test_feedback_is_a_demonstration_with_a_verdict():
    rows = as_feedback(PAIRS)
    assert len(rows) == 18 and rows[1] == dict(prompt="What is 0 plus 0?", completion=" 1 or 0", label=False, margin=0.)
    a, b = Feedback(rows, Plain(), seed=1).take(7), Demonstrations(rows, Plain(), seed=1).take(7)
    assert a.tokens.equal(b.tokens) and a.mask.equal(b.mask) and a.completion == b.completion
    assert a.desirable.dtype == torch.bool and a.desirable.tolist() == b.label and "unit" not in a


def test_feedback_groups_are_prompts():
    """Two answers to one prompt, or two visits of one row, are one group: KTO's mismatched answers must come from
    another."""
    batch = Feedback(as_feedback(PAIRS), Plain(), seed=1).take(40)
    assert all((batch.group[i] == batch.group[j]) == (batch.prompt[i] == batch.prompt[j]) for i in range(40)
               for j in range(40))
    other = mismatched(batch.group)
    assert all(batch.prompt[i] != batch.prompt[j] for i, j in enumerate(other.tolist()))


@pytest.mark.parametrize("kind, row, error, match", [
    (Preferences, dict(prompt="a", chosen="b"), ValueError, "row 0 .*no column `rejected`"),
    (Preferences, dict(chosen="b", rejected="c"), ValueError, "no column `prompt`"),
    (Preferences, dict(prompt="", chosen="b", rejected="c"), ValueError, "the prompt is empty"),
    (Preferences, dict(prompt="a", chosen="b", rejected=3), TypeError, "completion is a int"),
    (Preferences, dict(prompt="a", chosen="b", rejected="c", unit=1), ValueError, "unit are the batch's own"),
    (Preferences, dict(prompt="a", chosen="b", rejected="c", completion="d"), ValueError,
     "completion are the batch's own"),
    (Preferences, dict(prompt=ASK, chosen=says("b"), rejected=ASK + says("b")), ValueError, "the same prompt"),
    (Feedback, dict(prompt="a", completion="b"), ValueError, "no column `label`"),
    (Feedback, dict(prompt="a", label=True), ValueError, "no column `completion`"),
    (Feedback, dict(prompt="a", completion="b", label=None), TypeError, "label is None"),
    (Feedback, dict(prompt="a", completion="b", label="yes"), TypeError, "label is 'yes'"),])
def test_bad_rows_are_named(kind, row, error, match):
    with pytest.raises(error, match=match): kind([row], Plain())


def test_what_is_no_pair_is_no_feedback():
    with pytest.raises(ValueError, match="as_feedback: row 1: no column `rejected` among prompt, chosen"):
        as_feedback([PAIRS[0], dict(prompt="a", chosen="b")])
    with pytest.raises(TypeError, match="as_feedback: row 0 is a str; a dict is wanted"): as_feedback(["a"])


def test_a_tokenizer_without_eos_is_refused():
    for kind, rows in ((Preferences, PAIRS), (Feedback, as_feedback(PAIRS))):
        with pytest.raises(ValueError, match=f"{kind.__name__}: the tokenizer has no eos_token_id"):
            kind(rows, lambda t: [ord(c) for c in t])


# -- into the loops of the tutorials

@pytest.fixture(scope="module")
def net():
    pytest.importorskip("transformers")
    from tiny import model
    return model(vocab_size=128, eos_token_id=2)


def test_the_first_dpo_step_costs_a_coin(net):
    "LAWS 33: before anything is learned the loss is log 2 and the margin 0, whatever the cut into micro-batches."
    from tiny import reach
    policy, ref = Policy(net, lr=1e-3, device="cpu", micro_rows=4), Policy(net, frozen=True, device="cpu")
    batch = Preferences(PAIRS, Plain()).take(9)
    batch["ref_logprobs"] = ref.logprobs(batch)
    def totals(x, b): return pairs(sequence_logprobs(x, b.mask), b)
    first = policy.step(batch,
                        lambda out, b: dpo_loss(*totals(out.logprobs, b), *totals(b.ref_logprobs, b), denom=b))
    far = .1*4*int(batch.mask.sum(1).max())*reach(batch.ref_logprobs)         # β times four sums of log-probs
    assert float(first["loss"]) == pytest.approx(math.log(2), abs=far)
    assert float(first["margin"]) == pytest.approx(0, abs=far)


def steps_of(name, root, net, folder):
    "A tutorial's loop on a tiny model."
    run = loop_from(f"{root}/tutorials/{name}.ipynb:{name}")
    data = (lambda n: Feedback(as_feedback(PAIRS), Plain(),
                               seed=n)) if name == "kto" else (lambda n: Preferences(PAIRS, Plain(), seed=n))
    args = (data(0), data(1)) if name != "rlhf" else (Prompts([dict(prompt=r["prompt"]) for r in PAIRS], Plain()),)
    more = dict(every=2) if name != "rlhf" else dict(reward_model=net, max_tokens=3, prompts=6, critic_lr=1e-3)
    return run(here, *args, model=net, lr=1e-3, steps=4, checkpoint=Checkpoint(folder, every=1), **more)


def numbers(metrics): return {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("name", ["reward_model", "dpo", "kto", "rlhf"])
def test_a_tutorial_that_is_stopped_goes_on_with_the_same_numbers(name, root, net, tmp_path):
    straight = [numbers(m) for m in steps_of(name, root, net, None)]
    with contextlib.closing(steps_of(name, root, net, tmp_path)) as started:
        first = [numbers(next(started)) for _ in range(2)]
    rest = [numbers(m) for m in steps_of(name, root, net, tmp_path)]
    # an early stop keeps the last save: step 1 is done again
    assert [m["step"] for m in first] == [0, 1] and [m["step"] for m in rest] == [1, 2, 3]
    for m in first + rest: assert straight[int(m["step"])] == pytest.approx(m, abs=1e-6, nan_ok=True)
    assert all(m["skipped"] == 0 and m["grad_norm"] > 0 for m in straight)


def odd(completion_ids, **_): return [float(sum(ids) % 2) for ids in completion_ids]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_asynchronous_loop_on_a_tiny_model(ahead, root, net):
    "As many steps old as is said, from the second step on; each step learns."
    run = loop_from(f"{root}/tutorials/async.ipynb:async_grpo")
    data = Prompts([dict(prompt=r["prompt"]) for r in PAIRS], Plain())
    rows = [numbers(m) for m in run(here, data, odd, model=net, ahead=ahead, lr=1e-3, steps=3, prompts=4, group_size=4,
                                    minibatches=2, max_tokens=3)]
    assert [(m["step"], m["version"], m["staleness"]) for m in rows] == [(0, 2, 0), (1, 4, ahead), (2, 6, ahead)]
    assert all(m["grad_norm"] > 0 and m["skipped"] == 0 for m in rows) and data.taken == 12


def test_best_of_n_on_a_tiny_model(root, net):
    "The best of each prompt's answers, those that are good enough."
    run = loop_from(f"{root}/tutorials/best_of_n.ipynb:best_of_n")
    data = Prompts([dict(prompt=r["prompt"]) for r in PAIRS], Plain())
    for m in map(numbers, run(here, data, odd, model=net, lr=1e-3, steps=3, prompts=4, n=4, max_tokens=3)):
        assert m["best"] >= m["reward"] and m["kept"] == 4*m["best"] and m["version"] == m["step"] + 1 and m["loss"] > 0
