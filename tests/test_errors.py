"Bad input says who, what came, what was wanted and how to fix it: a table of what new users do."
import inspect
import re
from dataclasses import fields

import numpy as np
import pytest
import tiny
import torch
from test_floors import FLOORS, MODULES

import rlblocks as rl
from rlblocks import Batch, Buffer, Checkpoint, Critic, Policy, Rollout, Scorer, plan, plan_rollout
from rlblocks.engines.engine import EngineSpec
from rlblocks.models.validation import check_loss
from rlblocks.models.outputs import Out
from rlblocks.placement.plan import REMEDIES
from rlblocks.models.scorer import scores_after
from rlblocks.engines.engine import plain
from rlblocks.engines.optimizers import adamw

x, row = torch.zeros(3, 4), torch.zeros(3)
mask, lengths, tokens = torch.ones(3, 4, dtype=torch.bool), torch.tensor([4, 2, 3]), torch.arange(12).view(3, 4)
chosen = (torch.arange(4) > 0) & (torch.arange(4) < lengths[:, None])


def batch(**columns): return Batch(**dict(tokens=tokens, lengths=lengths, mask=chosen) | columns)


BAD = [   # (what a user does, words of the message)
    # one row alone, a trailing axis, row values for tokens, tokens of unlike number
    (lambda: rl.gae(x[0], x[0], mask[0]), "gae: rewards is [4]; [B, T] is wanted: one row alone is rewards[None]"),
    (lambda: rl.value_loss(x[..., None], x[..., None], x[..., None], mask[..., None]),
     "value_loss: values is [3, 4, 1]; [B, T] is wanted: values.squeeze(-1) drops the last axis"),
    (lambda: rl.ppo_loss(x, x, row, mask),
     "ppo_loss: advantages is [3], logprobs is [3, 4]; spread row values with at_tokens(advantages, mask)"),
    # no mask; the value behind the last token; log-probs without column 0
    (lambda: rl.ppo_loss(x, x, x, None),
     "ppo_loss: mask is None; a Bool mask [B, T] is wanted, True where the token counts (batch.mask)"),
    (lambda: rl.gae(x, x, None), "gae: mask is None; a Bool mask [B, T] is wanted"),
    (lambda: rl.at_tokens(row, None), "at_tokens: mask is None; a Bool mask"),
    (lambda: rl.gae(x, torch.zeros(3, 5), mask),
     "values is [3, 5], rewards is [3, 4]; they must be equal, nothing is broadcast; the value behind the last token "
     "is left out, values[:, :-1]"),
    (lambda: rl.ppo_loss(x[:, 1:], x, x, mask), "column t is token t, also of log-probs, whose column 0 is 0"),
    (lambda: rl.kl_shaped(x, x[:, 1:], x, mask, kl_coef=.1),
     "kl_shaped: logprobs is [3, 3], rewards is [3, 4]; they must be equal, nothing is broadcast"),
    (lambda: rl.at_tokens(row[:2], mask), "at_tokens: x is [2], mask is [3, 4]; one value per row is wanted"),
    (lambda: rl.at_last_token(x, mask), "at_last_token: scores is [3, 4], mask is [3, 4]; one score per row is wanted"),
    (lambda: rl.group_advantages(row, lengths[:2]),
     "group_advantages: scores is [3], group is [2]; one score and one id per row are wanted"),
    (lambda: rl.weighted_scores(x, weights=[1.]),
     "weighted_scores: scores is [3, 4], there are 1 weights; one for each column is wanted"),
    (lambda: rl.standardized(row, row[:1]),
     "standardized: moments is [1]; the three numbers of update_moments are wanted"),
    (lambda: rl.update_moments(row[:1], row),
     "update_moments: moments is [1]; the three numbers of an earlier call are wanted, or None"),
    # masks and flags that are numbers, ids that are floats
    (lambda: rl.masked_mean(x, mask.long()), "masked_mean: mask is int64; masks are Bool (mask.bool(), or mask > 0)"),
    (lambda: rl.truncation_penalty(row, row),
     "truncation_penalty: truncated is float32; a Bool is wanted (truncated.bool(), or truncated > 0)"),
    (lambda: rl.cosine_length_reward(row, lengths, max_length=8),
     "cosine_length_reward: correct is float32; a Bool is wanted"),
    (lambda: rl.group_advantages(row, row), "group_advantages: group is float32; ids are integers"),
    (lambda: rl.repetition_penalty(x, mask),
     "repetition_penalty: tokens is float32; integers are wanted (tokens.long())"),
    (lambda: rl.overlong_penalty(row, max_length=8, buffer=2),
     "overlong_penalty: lengths is float32; integers are wanted (lengths.long())"),
    # lists and arrays
    (lambda: rl.gae(x.tolist(), x, mask), "gae: rewards is a list; a tensor is wanted (torch.as_tensor(rewards))"),
    (lambda: rl.ppo_loss(x, x, x.numpy(), mask),
     "ppo_loss: advantages is a ndarray; a tensor is wanted (torch.as_tensor(advantages))"),
    (lambda: rl.ppo_loss(x, x, x, mask.numpy()), "ppo_loss: mask is a ndarray"),
    (lambda: rl.at_tokens([1., 2., 3.], mask), "at_tokens: x is a list"),
    (lambda: rl.at_last_token([1., 2., 3.], mask), "at_last_token: scores is a list"),
    (lambda: rl.clip_rewards([1.], limit=1.), "clip_rewards: x is a list"),
    (lambda: rl.update_moments(None, [1.]), "update_moments: x is a list"),
    (lambda: rl.overlong_penalty([3], max_length=8, buffer=2), "overlong_penalty: lengths is a list"),
    (lambda: rl.weighted_scores([[1.]]), "weighted_scores: scores is a list"),
    (lambda: rl.mean_of([1.], None), "mean_of: x is a list"),
    # numbers out of range
    (lambda: rl.gae(x, x, mask, gamma=2), "gae: gamma is 2, lam is 0.95; both lie within [0, 1]"),
    (lambda: rl.aggregate(x, mask, over="rowz"), "aggregate: over is 'rowz'; it is 'tokens', 'rows' or 'groups'"),
    (lambda: rl.clip_rewards(row, limit=-1),
     "clip_rewards: limit is -1; it is the largest size that passes and must be positive"),
    # rows and packs
    (lambda: rl.pack(tokens, torch.tensor([5, 2, 3])),
     "pack: the length of row 0 is 5, tokens are 4 wide; lengths count real tokens"),
    (lambda: rl.pack(tokens, torch.tensor([-1, 2, 3])), "pack: the length of row 0 is -1"),
    (lambda: rl.pack(tokens, lengths[:2]), "pack: lengths has 2 rows, tokens is [3, 4]"),
    (lambda: rl.pack(tokens, [4, 2, 3]), "pack: lengths is a list; a tensor is wanted"),
    (lambda: rl.pack(tokens, row), "pack: lengths is float32; integers are wanted"),
    (lambda: rl.pack(tokens[0], lengths), "pack: tokens is [4]; [B, T] is wanted: one row alone is tokens[None]"),
    (lambda: rl.unpack(row, rl.pack(tokens, lengths)), "unpack: flat has 3 values for 9 packed tokens"),
    (lambda: rl.pack(tokens, lengths, lengths[:2]), "pack: group is [2], lengths is [3]; they must be equal"),
    (lambda: rl.pack(tokens, lengths, row), "pack: group is float32; integers are wanted"),
    (lambda: rl.shared_prefix(tokens, lengths, [0, 0, 0]), "shared_prefix: group is a list; a tensor is wanted"),
    (lambda: rl.unpack([1.]*9, rl.pack(tokens, lengths)), "unpack: flat is a list; a tensor is wanted"),
    (lambda: rl.pack(tokens, lengths).take(x.tolist()), "take: column is a list; a tensor is wanted"),
    (lambda: rl.pad([1, 2, 3]),
     "pad: row 0 is the number 1; each row is a tensor or a list, one row alone is pad([row])"),
    (lambda: rl.plan_micro_batches(lengths, max_tokens=3),
     "plan_micro_batches: row 0 takes 4 tokens and 1 rows, the limits are max_tokens=3; raise the limit"),
    (lambda: rl.plan_micro_batches([4, -2], max_tokens=9),
     "plan_micro_batches: the length of row 1 is -2; 0 tokens or more are wanted"),
    (lambda: rl.micro_batch_count([[1], [4]], max_tokens=3), "plan_micro_batches: row 0 takes 4 tokens"),
    (lambda: rl.balance([1., float("nan")], 2), "balance: the cost of item 1 is nan"),
    (lambda: rl.balance([1.], 0), "balance: n=0; a whole number, at least 1, is wanted"),
    # batches
    (lambda: batch(scores=row[:2]), "Batch: column 'scores' has 2 rows, the batch has 3"),
    (lambda: batch(scores=np.zeros(3)), "Batch: column 'scores' is a ndarray; a column is a tensor or a list"),
    (lambda: batch(mask=chosen.long()), "Batch: mask is [3, 4] int64; masks are Bool"),
    (lambda: batch(mask=mask), "mask is True in column 0 of row 0; nothing predicts the first token"),
    (lambda: batch(lengths=torch.tensor([9, 2, 3])), "Batch: lengths reach from 2 to 9, tokens are 4 wide"),
    (lambda: batch(lengths=torch.tensor([-1, 2, 3])), "Batch: lengths reach from -1 to 3"),
    (lambda: batch(tokens=x), "Batch: tokens is [3, 4] float32; integers [B, T] are wanted"),
    (lambda: batch(values=x[:, 1:]), "per-token columns have the T of tokens"),
    (lambda: batch(advantages=row).advantage,
     "Batch: no column 'advantage'; there are tokens, lengths, mask, advantages; is 'advantages' meant?"),
    (lambda: batch(unit=torch.tensor([0, 0, 1]))[:1], "Batch: the selection parts unit 0; take all rows of a unit"),
    (lambda: batch(unit=torch.tensor([0, 0, 0]))[1:], "Batch: the selection parts unit 0; take"),
    (lambda: Out(logprobs=x).logprob, "out.logprob is not there: there are logprobs; is 'logprobs' meant?"),
    (lambda: Out(logprobs=x).entropie, "is 'entropy' meant?"),
    (lambda: rl.Prompts(["a"], "gpt2"),
     "Prompts: tokenizer is 'gpt2'; a tokenizer is wanted, AutoTokenizer.from_pretrained('gpt2')"),
    (lambda: rl.Demonstrations([dict(prompt="a", completion="b")], "gpt2"),
     "Demonstrations: tokenizer is 'gpt2'; a tokenizer is wanted"),
    (lambda: rl.Preferences([dict(prompt="a", chosen="b", rejected="c")], "gpt2"),
     "Preferences: tokenizer is 'gpt2'; a tokenizer is wanted"),
    (lambda: check_loss("Policy", (.5, {})), "Policy: loss(out, b) must return (0-d tensor, dict of "
     "metrics); its first is a float, a 0-d tensor with " "gradient is wanted"),
    (lambda: check_loss("Policy", row.sum()), "it returned a tensor alone: return loss, {}"),
    (lambda: check_loss("Policy", (row, {})), "its first is a tensor of [3], a 0-d tensor with gradient is wanted"),
    (lambda: batch().advantages, "Batch: no column 'advantages'; there are tokens"),
    (lambda: next(iter(rl.Checkpoint()(1, data=[dict(prompt="a")]))),
     "Checkpoint: 'data' is a list; a dict, or an object with state_dict and load_state_dict, is wanted, as "
     "Prompts(rows, tokenizer) is"),
    (lambda: batch().minibatches(0), "Batch.minibatches: n=0; a whole number, at least 1, is wanted"),
    (lambda: batch().parts(0), "Batch.parts: n=0; a whole number, at least 1"),
    (lambda: batch().parts("2"), "Batch.parts: n='2'; a whole number"),
    (lambda: batch().minibatches(2.5), "Batch.minibatches: n=2.5; a whole number"),
    (lambda: batch().cut(2, [1., -2., 1.]), "Batch.cut: the cost of row 1 is -2.0; costs are finite "
     "numbers, 0 or more"), (lambda: batch().cut(2, [1., float("nan"), 1.]), "Batch.cut: the cost of row 1 is nan"),
    (lambda: batch(tokens=mask), "Batch: tokens is [3, 4] bool; integers [B, T] are wanted"),
    (lambda: batch(lengths=mask[:, 0]), "Batch: lengths is [3] bool; integers [B] are wanted"),
    (lambda: batch(features=x[:, 1:]), "features of a row are named when rows are made: "
     "Batch(per_row=['features'], …)"), (lambda: Buffer().add({}), "Buffer.add: dict is no Batch; one is wanted"),
    (lambda: Buffer().add(batch(), keep=[True]*3), "Buffer.add: keep is a list; a tensor is wanted"),
    (lambda: Buffer().prioritise([1], row), "Buffer.prioritise: ids is a list; a tensor is wanted"),
    (lambda: batch()[:0].parts(2), "a batch without rows cannot be cut in parts"),
    (lambda: Batch.cat([]), "Batch.cat: nothing to join"),
    (lambda: Batch.cat([{}]), "Batch.cat: there is a dict among what shall be joined; batches are wanted"),
    (lambda: rl.merge(dict(a=1.)), "merge: 'a' is a float; wrap it in Mean, Max or Last, which say how pieces "
     "join: a=Mean(a), or mean_of(x, b.mask) for a mean over tokens"),
    (lambda: rl.Mean(row), "Mean: total is [3]; a metric holds one number"),
    (lambda: rl.seed_of({}), "seed_of: cannot hash a dict"),
]


@pytest.mark.parametrize("call, words", BAD, ids=[words[:50] for _, words in BAD])
def test_bad_input_is_told_how_to_be_good(call, words):
    with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(words)): call()


@pytest.mark.parametrize("name, there, meant", [
    ("ref_logprobs", "old_logprobs", False), ("ref_logprobs", "logprobs", False), ("maks", "mask", True),
    ("old_logprob", "old_logprobs", True), ("odl_logprobs", "old_logprobs", True), ("log_probs", "logprobs", True),
    ("reflogprobs", "ref_logprobs", True)])
def test_one_column_is_not_taken_for_another(name, there, meant):
    "A slip within a word is; another word, or one more, is another column."
    given = batch(**{there: chosen if there == "mask" else x})
    with pytest.raises(AttributeError, match=f"no column '{name}'; there are ") as e: getattr(given, name)
    assert str(e.value).endswith(f"; is {there!r} meant?" if meant else f", {there}")


def test_whole_numbers_are_rewards():
    "Right and wrong come as 1 and 0: the same as floats, to the digit."
    right = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    for found, wanted in zip(rl.gae(right, x.long(), mask, gamma=.9), rl.gae(right.float(), x, mask, gamma=.9),
                             strict=True):
        assert torch.equal(found, wanted) and found.is_floating_point()
    assert torch.equal(rl.standardized(right, torch.tensor([4., .5, 2.])),
                       rl.standardized(right.float(), torch.tensor([4., .5, 2.])))
    assert torch.equal(rl.discounted_returns(right, mask, gamma=.5),
                       rl.discounted_returns(right.float(), mask, gamma=.5))


def test_a_nan_reward_stays_in_its_row():
    bad = x.clone()
    bad[1, 2] = torch.nan
    advantages = rl.gae(bad, x, mask)[0]
    assert advantages[1].isnan().any() and not advantages[[0, 2]].isnan().any()
    assert rl.group_advantages(torch.tensor([1., torch.nan, 0.]), torch.zeros(3, dtype=torch.long))[1] == 0


# -- every block whose tensors are per-token columns refuses the same things, whoever wrote it

NUMBERS = dict(n=2, kl_coef=.1, threshold=1., max_tokens=8)


def per_token_blocks():
    "(function, names of its positional arguments): floors 0 and 1, where each of these is `[B, T]`."
    for module in MODULES:
        if FLOORS[module] > 1 or module in ("testing.laws", "testing.oracles"): continue
        lib = __import__(f"rlblocks.{module}", fromlist=["x"])
        for f in (getattr(lib, n) for n in lib.__all__):
            if not inspect.isfunction(f): continue
            known = inspect.signature(f).parameters.values()
            tensors = [p for p in known if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            needs = [p.name for p in known if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
            if len(tensors) > 1 and all(getattr(p.annotation, "dim_str", "") == "B T"
                                        for p in tensors) and set(needs) <= set(NUMBERS):
                yield f, tensors, {k: NUMBERS[k] for k in needs}


BLOCKS = list(per_token_blocks())


def of_kind(p):
    if "Bool" in str(p.annotation): return mask
    return tokens if "Int" in str(p.annotation) else x + .5


@pytest.mark.parametrize("f, tensors, numbers", BLOCKS, ids=[f.__name__ for f, *_ in BLOCKS])
def test_every_block_of_tokens_refuses_by_name(f, tensors, numbers):
    good = [of_kind(p) for p in tensors]
    f(*good, **numbers)
    def refuses(args, kind, words):
        with pytest.raises(kind, match=re.escape(words)) as e: f(*args, **numbers)
        assert re.match(r"[a-z_0-9]+: ", str(e.value)), e.value
    refuses([a[0] for a in good], ValueError, "[B, T] is wanted: one row alone is")
    for i, p in enumerate(tensors):
        put = lambda v, i=i: [*good[:i], v, *good[i+1:]]
        refuses(put(good[i].tolist()), TypeError, f"{p.name} is a list; a tensor is wanted")
        refuses(put(good[i].numpy()), TypeError, f"{p.name} is a ndarray; a tensor is wanted")
        refuses(put(good[i][:, 1:]), ValueError, "they must be equal, nothing is broadcast")
        if p.name == "mask": refuses(put(mask.long()), TypeError, "mask is int64; masks are Bool")


def test_there_are_such_blocks():
    assert len(BLOCKS) > 40 and {"gae", "ppo_loss", "value_loss"} <= {f.__name__ for f, *_ in BLOCKS}


# -- a model that is not there

LOADERS = dict(Policy=lambda m: Policy(m, device="cpu"), Critic=lambda m: Critic(m, device="cpu"),
               Scorer=lambda m: Scorer(m, device="cpu"), Rollout=lambda m: Rollout(m, device="cpu"), plan=plan,
               plan_rollout=lambda m: plan_rollout(m, rows=2, tokens=8), lora=lambda m: plan(m, lora=dict(r=2)))


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_mistyped_folder_is_called_so(load, tmp_path, monkeypatch):
    "Not a repository of the hub that nobody asked for; and the folder that is meant, if one is near."
    tiny.model().save_pretrained(tmp_path/"my-model")
    (tmp_path/"other").mkdir()
    monkeypatch.chdir(tmp_path)
    for wrong, meant in ((str(tmp_path/"my-modle"), str(tmp_path/"my-model")), ("./my-modle", "my-model"),
                         (tmp_path/"my_model"/"last", str(tmp_path/"my-model"))):
        with pytest.raises(FileNotFoundError) as e: load(wrong)
        said = str(e.value)
        assert (f"there is no folder {str(wrong)!r} (is {meant!r} meant?); a folder that save_pretrained wrote, a name "
                "of the hub as 'Qwen/Qwen3-1.7B'" in said and "epo" not in said), said
    with pytest.raises(FileNotFoundError, match="there is no folder './quite-else'; a folder"): load("./quite-else")
    # might be the hub's as well: its answer is told too
    with pytest.raises(FileNotFoundError,
                       match="no folder 'my-modle' .is 'my-model' meant.., and as a name it was not found: "):
        load("my-modle")
    with pytest.raises(FileNotFoundError, match=re.escape("'other' holds no model: there is no config.json in it")):
        load("other")
    with pytest.raises(NotADirectoryError,
                       match="model.safetensors' is a file; the folder around it is wanted, 'my-model'"):
        load("my-model/model.safetensors")


def test_a_folder_of_something_else_says_what_to_do_with_it(tmp_path):
    for folder, file, words in (("adapter", "adapter_config.json", "lora="),
                                ("run/step-00000001", "meta.json", "rlblocks.checkpoint.convert")):
        (tmp_path/folder).mkdir(parents=True)
        (tmp_path/folder/file).write_text("{}")
        with pytest.raises(FileNotFoundError, match=words): Policy(tmp_path/folder, device="cpu")
    with pytest.raises(FileNotFoundError, match="rlblocks.checkpoint.convert"): Policy(tmp_path/"run", device="cpu")
    tiny.model().save_pretrained(tmp_path/"out"/"last")
    with pytest.raises(FileNotFoundError, match="there is one in last"): Policy(tmp_path/"out", device="cpu")


# -- ids that a model does not have

def of_ids(bad, at, padded=False):
    "Four rows of lengths 4 … 7 with one bad id; `padded`: behind the row's end."
    b = tiny.rows(B=6, T=8, dtype=torch.float32, holes=False)[[2, 3, 4, 5]]
    b["tokens"] = b.tokens.clone()
    b.tokens[at] = bad
    return b


def summed(out, b): return sum(x.sum() for _, x in out.items() if x.is_floating_point())/b.n_rows, {}


VERBS = dict(logprobs=lambda net, b, **how: Policy(net, device="cpu", **how).logprobs(b),
             step=lambda net, b, **how: Policy(net, device="cpu", **how).step(b, summed),
             hidden=lambda net, b, **how: Policy(net, device="cpu", **how).hidden(b),
             values=lambda net, b, **how: Critic(net, device="cpu", **how).values(b),
             scores=lambda net, b, **how: Scorer(net, device="cpu", **how).scores(b),
             lora=lambda net, b, **how: Policy(net, lora=dict(r=2), device="cpu", **how).logprobs(b))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_an_id_beyond_the_embedding_is_named(verb, pack):
    "Row, place, id and how many there are; before the embedding, whose error on a GPU ends the process."
    for bad in (32, 50_000, -1, -100):
        with pytest.raises(ValueError,
                           match=re.escape(f"token 3 of row 2 is {bad}; the model's embedding has 32 ids, 0 to 31")):
            verb(tiny.model(), of_ids(bad, (2, 3)), pack=pack)
    outside = of_ids(-100, (0, 7))                  # behind the end of row 0
    if pack: verb(tiny.model(), outside, pack=True)  # never run there
    else:
        with pytest.raises(ValueError, match="token 7 of row 0 .padding, which is run as well. is -100"):
            verb(tiny.model(), outside, pack=False)


def test_padding_of_any_id_changes_nothing_where_it_is_never_run():
    policy, good = Policy(tiny.model(), pack=True, device="cpu"), of_ids(0, (0, 7))
    assert torch.equal(policy.logprobs(of_ids(-100, (0, 7))), policy.logprobs(good))


def test_ids_of_a_larger_tokenizer_are_told_to_an_engine_too():
    p = tiny.prompts()
    p["tokens"] = torch.where(p.tokens == p.tokens[1, 1], 40, p.tokens)
    with pytest.raises(
            ValueError,
            match=r"generate: token \d of prompt \d is 40; the model's embedding has 32 ids.*resize_token_embeddings"):
        Rollout(tiny.model(), device="cpu").generate(p)
    net = tiny.model()
    net.resize_token_embeddings(48)
    # as many as the embedding has, whatever the configuration once said
    Rollout(net, device="cpu", max_tokens=2).generate(p)


def test_a_part_speaks_of_its_row():
    part = of_ids(32, (2, 3)).parts(2)
    found = []
    for one in part:
        try: Policy(tiny.model(), device="cpu").logprobs(one)
        except ValueError as e: found.append(str(e))
    assert len(found) == 1 and re.search(r"of its row \d is 32", found[0])


# -- the state of another model

def test_the_state_of_another_model_is_refused_by_name():
    "And nothing is changed by it."
    policy = Policy(tiny.model(), device="cpu", lr=1e-3)
    before = policy.state_dict()["module"]
    before = {k: x.clone() for k, x in before.items()}
    for other, words in (
            (Policy(tiny.model(vocab_size=48), device="cpu"),
             "'trunk.model.embed_tokens.weight' is [48, 32] in the state, [32, 32] in this model (2 such weights)"),
            (Policy(tiny.model(num_hidden_layers=3), device="cpu"),
             "the state has 'trunk.model.layers.2.self_attn.q_proj.weight', which this model has not (9 such weights)"),
            (Policy(tiny.model(num_hidden_layers=1), device="cpu"),
             "the state lacks 'trunk.model.layers.1.self_attn.q_proj.weight', which this model has (9 such weights)"), (
            Policy(tiny.model(), value_head=True, device="cpu"),
            "the state has 'head.weight', which this model has not (2 such weights); the state is of another model, or "
            "of a wrapper with other heads"), (Critic(tiny.model(), device="cpu"),
                                               "the state has 'trunk.embed_tokens.weight', which this model has not")):
        with pytest.raises(ValueError, match=re.escape(words)): policy.load_state_dict(other.state_dict())
        assert all(torch.equal(x, before[k]) for k, x in policy.state_dict()["module"].items())
    for state, words in ((tiny.model().state_dict(), "the state has model.embed_tokens.weight, "),
                         ("policy.pt", "the state is a str; what state_dict() gave is wanted"),
                         (None, "the state is a NoneType")):
        with pytest.raises(ValueError, match=re.escape(words)): policy.load_state_dict(state)
    policy.load_state_dict(Policy(tiny.model(seed=1), device="cpu").state_dict())
    scorer = Scorer(tiny.model(), outputs=2, device="cpu")
    with pytest.raises(ValueError, match=re.escape("'head.weight' is [1, 32] in the state, [2, 32] in this model")):
        scorer.load_state_dict(Scorer(tiny.model(), device="cpu").state_dict())


def test_a_tied_weight_may_come_under_one_name():
    net = tiny.model(tie_word_embeddings=True)
    policy = Policy(net, device="cpu")
    policy.load_state_dict(policy.state_dict())


# -- an error names arguments that its caller has

def test_a_remedy_is_an_argument_of_the_plan_that_failed():
    takes = {name: set(inspect.signature(f).parameters)
             for name, f in dict(plan=plan, plan_rollout=plan_rollout).items()}
    # said in the value: engine=plain(checkpointing=True)
    takes["plan"] |= {f.name for f in fields(EngineSpec)}
    others = set(inspect.signature(Policy).parameters) | {"micro_tokens", "checkpointing",
                                                          "offload"} | takes["plan"] | takes["plan_rollout"]
    assert REMEDIES.keys() == takes.keys()
    for name, said in REMEDIES.items():
        for kind, text in said.items():
            named = set(re.findall(r"\w+(?==)", text)) | {
                w for w in re.findall(r"\w+", re.sub(r"\([^)]*of the Rollout\)", "", text)) if w in others and "_" in w}
            assert named <= takes[name], (name, kind, text)


def test_what_does_not_fit_is_told_in_the_words_of_who_planned_it():
    from transformers import LlamaConfig
    TINY, SMALL = LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2), dict(micro_tokens=128, row=64)
    for how, words in ((dict(rows=2, tokens=8),
                        "most of it is weights of 'rollout': hold them in half precision (dtype=torch.bfloat16)"), (
            dict(rows=1024, tokens=256), "cache of 'rollout': lower rows (max_rows of the Rollout), or tokens"),
                       (dict(rows=8192, tokens=1), "logits of 'rollout': lower rows")):
        with pytest.raises(MemoryError, match=re.escape(words)) as e: plan_rollout(TINY, **how, memory=1e6)
        assert str(e.value).startswith("plan_rollout: ")
    with pytest.raises(MemoryError, match=r"(?s)^plan: .*most of it is \w+ of 'policy'"):
        plan(TINY, **SMALL, memory=1e6)
    with pytest.raises(MemoryError, match="^plan_rollout: .*most of it is cache of 'rollout'"):
        (plan(TINY, **SMALL) + plan_rollout(TINY, rows=1024, tokens=256)).fit(1e6)
    for call in (lambda m: plan(TINY, **SMALL, memory=m), lambda m: plan_rollout(TINY, rows=2, tokens=8, memory=m)):
        with pytest.raises(ValueError, match="^plan(_rollout)?: memory='80 gigs'"): call("80 gigs")
    with pytest.raises(ValueError, match="^plan_rollout: memory="):
        plan_rollout(TINY, rows=2, tokens=8, memory="80 gigs")
    with pytest.raises(TypeError, match="^plan_rollout: dtype is 'bf16'"):
        plan_rollout(TINY, rows=2, tokens=8, dtype="bf16")
    with pytest.raises(TypeError, match="^plan_rollout: model is a int"): plan_rollout(7, rows=2, tokens=8)


def test_a_row_beyond_the_budget_names_the_wrappers_budget():
    b = of_ids(3, (0, 1))
    for make, verb in ((Policy, "logprobs"), (Critic, "values"), (Scorer, "scores")):
        with pytest.raises(
                ValueError,
                match=f"^{make.__name__}: row 1 takes 5 tokens and 1 rows, the limits are micro_tokens=4; raise the "
                "limit"):
            getattr(make(tiny.model(), micro_tokens=4, device="cpu"), verb)(b[[0, 1]])
    b["unit"] = torch.tensor([0, 0, 1, 1])
    with pytest.raises(
            ValueError,
            match=r"^Policy: unit 0 \(rows 0, 1\) takes 10 tokens and 2 rows, the limits are micro_tokens=8192 and "
            "micro_rows=1"):
        Policy(tiny.model(), micro_rows=1, pack=False, device="cpu").logprobs(b)


# -- what a hostile user gives to wrappers

def now(name, x):
    b = of_ids(3, (0, 1))
    b[name] = x
    return b


def policy(**how): return Policy(tiny.model(), device="cpu", **how)
def engine(**how): return Rollout(tiny.model(), **dict(device="cpu", max_tokens=2) | how)
def loss(out, b): return out.logprobs.sum()/b.n_tokens, {}


HOSTILE = [
    (lambda: policy().logprobs([1, 2]), "Policy: the batch is a list; a Batch is wanted"),
    (lambda: policy().step(batch(), rl.ppo_loss),
     "Policy: step calls loss(out, b), and ppo_loss cannot be called so (missing a required argument: 'advantages'); a "
     "block goes into such a function: def loss(out, b): return ppo_loss(out.logprobs, …, b.mask, denom=b)"),
    (lambda: policy().logprobs(now("mask", of_ids(3, (0, 1)).mask).drop("tokens")),
     "Policy: the batch has no column 'tokens'"),
    (lambda: policy().logprobs(now("tokens", of_ids(3, (0, 1)).tokens.short())),
     "Policy: tokens are int16; an embedding reads int64 or int32 (tokens.long())"),
    (lambda: policy().logprobs(now("temperature", torch.full((4,), -1.))),
     "Policy: the column 'temperature' is [4] float32 from -1 to -1; a number of 0 or more for each row is wanted"),
    (lambda: policy().logprobs(now("temperature", torch.full((4,), torch.nan))),
     "from nan to nan; a number of 0 or more"),
    (lambda: policy().step(now("temperature", torch.ones(4, 8)), loss), "'temperature' is [4, 8] float32; a number"),
    (lambda: policy().logprobs(now("temperature", ["1"]*4)), "'temperature' is a list; a number"),
    (lambda: policy().logprobs(now("support", torch.full((4, 8, 2), 32))),
     "'support' has ids from 32 to 32; 0 to 31 are wanted, and -1 for an empty place"),
    (lambda: policy().step(now("support", torch.full((4, 8, 2), -5)), loss), "'support' has ids from -5 to -5"),
    (lambda: policy().logprobs(now("support", torch.zeros(4, 8, dtype=torch.long))),
     "'support' is [4, 8] int64; ids [B, T, K] are wanted"),
    (lambda: policy().step(of_ids(3, (0, 1)), None), "Policy: step got (Batch, NoneType); step(batch, loss) is wanted"),
    (lambda: policy().step(of_ids(3, (0, 1)), loss, of_ids(3, (0, 1)), loss),
     "Policy: step got a Batch; step(batch, loss) is wanted"),
    (lambda: Scorer(tiny.model(), device="cpu").step(of_ids(3, (0, 1)), loss, loss), "Scorer: step got a function"),
    (lambda: Scorer(tiny.model(), device="cpu").step({}, loss), "Scorer: the batch is a dict"),
    (lambda: policy().measure(of_ids(3, (0, 1)), 3), "Policy: measure is a int; a function of logits"),
    (lambda: policy(lr="1e-6"), "lr='1e-6'; a number of 0 or more is wanted, and this is text (YAML reads 1e-6 "
     "so: write 1.0e-6)"), (lambda: policy(lr=-1.), "lr=-1.0; a number"),
    (lambda: policy(lr=float("nan")), "lr=nan"), (lambda: adamw(max_norm=0), "max_norm=0; a number above 0, or None"),
    (lambda: adamw(weight_decay=-1), "weight_decay=-1"), (lambda: adamw(betas=.9), "betas=0.9; two numbers"),
    (lambda: adamw(betas=(.9, 1.)), "betas=(0.9, 1.0)"),
    (lambda: adamw(schedule="cosine"), "schedule is 'cosine'; a function is wanted"),
    (lambda: policy(optimizer="adamw"), "optimizer is 'adamw'; a function is wanted"),
    (lambda: policy(engine=plain(dtype=torch.long)), "dtype is torch.int64; a torch.dtype of floats is wanted"),
    (lambda: policy(engine=plain(sequence_parallel="2")), "sequence_parallel='2'; a whole number of ranks"),
    (lambda: policy(micro_tokens=0), "Policy: micro_tokens=0; a whole number, at least 1"),
    (lambda: policy(micro_rows="8"), "Policy: micro_rows='8'"),
    (lambda: Policy(tiny.model(), device="gpu"), "device='gpu'; \"cpu\", \"cuda\" or \"cuda:1\" is wanted"),
    (lambda: policy(tokenizer="gpt2"),
     "tokenizer is 'gpt2'; the tokenizer itself is wanted: AutoTokenizer.from_pretrained('gpt2')"),
    (lambda: Scorer(tiny.model(), outputs=0, device="cpu"), "Scorer: outputs=0; the number of scores"),
    (lambda: Scorer(tiny.model(), outputs="good", device="cpu"), "Scorer: outputs='good'"),
    (lambda: Scorer(tiny.model(), outputs=scores_after("s"), device="cpu").scores(
        now("s", of_ids(3, (0, 1)).mask.float())), "Scorer: column 's' is [4, 8] torch.float32; Bool [B, T] is wanted"),
    (lambda: Scorer(tiny.model(), outputs=scores_after("s"), device="cpu").scores(now("s", [1]*4)),
     "Scorer: column 's' is a list"),
    (lambda: Scorer(tiny.model(), outputs=scores_after("s"), device="cpu").scores(
        now("s", torch.ones(4, 8, dtype=torch.bool))), "column 's' marks a token behind the end of row 0"),
    (lambda: engine(device="cuda:99"), "Rollout: device='cuda:99', and torch sees"),
    (lambda: engine(dtype="bf16"), "Rollout: dtype is 'bf16'"),
    (lambda: engine(dtype=torch.int8), "Rollout: dtype is torch.int8; a torch.dtype of floats"),
    (lambda: engine(max_tokens=0), "Rollout: max_tokens=0"),
    (lambda: engine(max_rows=0), "Rollout: max_rows=0"),
    (lambda: engine(top_k=5.), "Rollout: top_k is 5.0; a whole number"),
    (lambda: engine(top_p="0.9"), "Rollout: top_p is '0.9'; a number"),
    (lambda: engine(tokenizer="gpt2"), "tokenizer is 'gpt2'"),
    (lambda: engine(stop="</s>"), "Rollout: stop holds the text '</s>' and there is no tokenizer; pass "
     "tokenizer=…, or ids"),
    (lambda: engine(stop=[1, 99]), "Rollout: stop holds 99; ids of the vocabulary are wanted, 0 to 31"),
    (lambda: engine().generate(tiny.prompts(), group_size=2.5), "generate: group_size=2.5; a whole number"),
    (lambda: engine().generate(tiny.prompts(), max_tokens="3"), "generate: max_tokens='3'"),
    (lambda: engine().generate(tiny.prompts(), temperature="hot"), "generate: temperature is 'hot'; a number"),
    (lambda: engine().generate(tiny.prompts(), temperature=-1), "generate: temperature is -1"),
    (lambda: engine().generate(tiny.prompts().drop("tokens")), "generate: the prompts have no column 'tokens'"),
    (lambda: engine().load(policy()), "load: the ticket is a Policy; a Ticket is wanted, as policy.weights() gives it"),
    (lambda: list(Checkpoint()("3")), "Checkpoint: steps='3'; a whole number, 0 or more"),
    (lambda: list(Checkpoint()(-3)), "Checkpoint: steps=-3"),
    (lambda: Checkpoint(every=2.5), "Checkpoint: every=2.5; a whole number, at least 1"),
    (lambda: Checkpoint(keep="2"), "Checkpoint: keep='2'"),
]


@pytest.mark.parametrize("call, words", HOSTILE, ids=[words[:60] for _, words in HOSTILE])
def test_a_hostile_user_is_told_as_well(call, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)): call()


def test_a_refused_load_leaves_the_engine_as_it_was():
    r = engine()
    with pytest.raises(TypeError): r.load(None)
    assert len(r.generate(tiny.prompts())) == 3 and engine(stop=torch.tensor([1, 2])).stop.tolist() == [1, 2]


def test_an_environment_of_another_verifiers_is_told_where_those_went():
    from rlblocks import verifiers_environment, verifiers_rows
    for f in (verifiers_rows, verifiers_environment):
        with pytest.raises(TypeError, match=f"{f.__name__}: list is no environment of verifiers v0, which is gone"):
            f([])


def test_a_plan_leaves_the_configuration_as_it_was():
    "transformers writes the dtype of a model into the configuration it is made of."
    config = tiny.model().config
    before, first = config.to_dict(), plan_rollout(config, rows=2, tokens=8)
    plan_rollout(config, rows=2, tokens=8, dtype=torch.bfloat16)
    assert config.to_dict() == before and plan_rollout(config, rows=2, tokens=8).bytes() == first.bytes()


@pytest.mark.parametrize("Wrapper", [Policy, Critic, Scorer, Rollout])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_encoder_decoders_are_refused_by_name(kind, Wrapper, tmp_path):
    import transformers as tf
    sizes = dict(T5=dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
                 Bart=dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=32,
                           decoder_ffn_dim=32, max_position_embeddings=32, eos_token_id=1, bos_token_id=0,
                           forced_eos_token_id=1, decoder_start_token_id=1))
    net = getattr(tf, f"{kind}ForConditionalGeneration")(getattr(tf, f"{kind}Config")(vocab_size=32, **sizes[kind]))
    net.save_pretrained(tmp_path)
    for model in (net, lambda: net, tmp_path):
        with pytest.raises(ValueError, match=f"is an encoder-decoder \\({kind.lower()}\\)"):
            Wrapper(model, device="cpu")


def test_the_decoder_of_one_is_a_language_model():
    import transformers as tf
    net = tf.BartForCausalLM(tf.BartConfig(vocab_size=32, d_model=32, decoder_layers=1, decoder_attention_heads=4,
                                           decoder_ffn_dim=32, max_position_embeddings=32, eos_token_id=1,
                                           bos_token_id=0))
    assert Policy(net, device="cpu")._run.module.positions == 32        # of 34 rows in its table
