"Rollout: log-probs of the distribution that was sampled, seeds that belong to samples, weights that are proved."
import warnings

import numpy as np
import pytest
import torch
from rlblocks import Batch, Grader, Policy, Rollout, at_tokens, group_advantages, masked_mean, ppo_loss
from rlblocks.samplers.decoding import penalties, sample_tokens
from rlblocks.samplers.kv_cache import CachedDecoder
from rlblocks.models.outputs import Out, check_splits
from tiny import KINDS, model, prompts, tokenizer
from torch import nn
from torch.testing import assert_close


def engine(net=None, **how):
    return Rollout(net if net is not None else sharp(), device="cpu", **dict(max_tokens=12) | how)


def sharp(kind="llama", **more):
    "A model with opinions: an untrained one is almost uniform and hides mistakes in temperature."
    net = model(kind, **more)
    with torch.no_grad():
        for w in net.parameters(): w *= 3
    return net


def said(b): return [b.tokens[i, b.prompt_lengths[i]:b.lengths[i]].tolist() for i in range(len(b))]


@pytest.mark.parametrize("top_p, top_k", [(1., 0), (.8, 0), (1., 5), (.9, 8)])
@pytest.mark.parametrize("T", [.6, 1., 1.3])
def test_ratio_is_one_before_any_update(T, top_p, top_k):
    "LAWS 2: sampler and trainer speak of the same distribution, from different forward passes."
    b = engine(temperature=T, top_p=top_p, top_k=top_k).generate(prompts(), group_size=6, seed=1)
    policy = Policy(sharp(), device="cpu")
    ratio = (policy.logprobs(b) - b.rollout_logprobs)[b.mask].exp()
    assert (ratio - 1).abs().max() < 1e-3 and b.temperature.tolist() == pytest.approx([T]*18)
    if top_p < 1 or top_k:
        with pytest.raises(ValueError, match="no column 'support'"): policy.logprobs(b.drop("support"))
        full = (policy.logprobs(b.drop("support", "top_p", "top_k")) - b.rollout_logprobs)[b.mask].exp()
        assert full.mean() < .99            # what forgetting the nucleus would give: its mass


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_attend_alike(kind):
    """LAWS 2, for each architecture, with weights so large that scores matter: at its first weights a model's
    attention is flat, and a softcap left out does not show."""
    net = model(kind)
    with torch.no_grad():
        for w in net.parameters(): w *= 8 if w.dim() > 1 else 1
    b = engine(net, max_tokens=24, stop=[]).generate(prompts(), group_size=4, seed=0)
    for pack in (None, False):
        assert (Policy(net, device="cpu", pack=pack).logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 2e-4


def test_numbers_of_numpy_are_numbers_and_bools_are_none():
    r = engine(max_tokens=np.int64(3), max_rows=np.int32(4), temperature=np.float32(.5), top_k=np.int64(4),
               stop=np.int64(1))
    b = r.generate(prompts(), group_size=np.int64(2), max_tokens=np.int16(2), seed=np.int64(1))
    same = engine(max_tokens=3, max_rows=4, temperature=.5, top_k=4,
                  stop=1).generate(prompts(), group_size=2, max_tokens=2, seed=1)
    assert said(b) == said(same) and b.top_k.tolist() == [4]*6 and b.rollout_logprobs.equal(same.rollout_logprobs)
    for name in ("max_tokens", "max_rows"):
        with pytest.raises(ValueError, match=f"Rollout: {name}=True; a whole number, at least 1, is wanted"):
            engine(**{name: True})
    for name in ("max_tokens", "group_size"):
        with pytest.raises(ValueError, match=f"generate: {name}=True; a whole number"):
            r.generate(prompts(), **{name: True})
    for name in ("temperature", "top_p", "top_k", "min_p"):
        with pytest.raises(TypeError, match=f"Rollout: {name} is True; a (whole )?number is wanted"):
            engine(**{name: True})
    for odd in (float("inf"), 1e-40):
        with pytest.raises(ValueError, match=f"temperature is {odd}; 0 .greedy., or 1e-6 and more"):
            engine(temperature=odd)
    with pytest.raises(ValueError, match="stop holds 1.0"): engine(stop=1.)


def test_rows_with_penalties_are_not_trained_on():
    "Nothing can replay their log-probs: the mask is False, on an engine that leaves it True without them."
    r = engine(tokenizer=tokenizer())
    assert r.generate(prompts(), group_size=2).mask.any()
    b = r.generate(prompts(), group_size=2, penalties=penalties(bad_words=["w3"], logit_bias={4: 1.}))
    assert not b.mask.any() and not any(3 in x for x in said(b)) and b.rollout_logprobs.isfinite().all()
    with pytest.raises(ValueError, match="penalties name id 32; ids 0 to 31 are wanted"):
        r.generate(prompts(), penalties=penalties(logit_bias={32: 1.}))
    with pytest.raises(TypeError, match="penalties is a dict; penalties\\(repetition=1.2"):
        r.generate(prompts(), penalties=dict(repetition=2.))


def test_stops_are_ids_and_texts():
    "A text beside the model's own ends; with an id, instead of them; a special token's text is its id."
    r = engine(stop="w9 w4", tokenizer=tokenizer())
    assert r.stop.tolist() == [1] and r.stop_strings == ("w9 w4",)
    r = engine(stop=[7, "w9", "w0"], tokenizer=tokenizer(), max_tokens=40)
    assert r.stop.tolist() == [0, 7] and r.stop_strings == ("w9",)
    b = r.generate(prompts(), group_size=8)
    for ids, text, why in zip(said(b), b.completion, b.finish_reason, strict=True):
        assert (why == "completed") == (ids[-1] in (0, 7, 9)) and not {0, 7, 9} & set(ids[:-1])
        assert (ids[-1] == 9) == text.endswith("w9")
    assert 9 in {ids[-1] for ids in said(b)}
    with pytest.raises(ValueError, match="stop holds an empty text"): engine(stop=["", 7], tokenizer=tokenizer())


def test_a_row_is_continued_with_the_seed_of_its_turn():
    "LAWS 28: hash(seed, group, sample, turn), whatever the version and whoever else is continued."
    r, p = engine(), prompts((5, 2, 7))
    again = p[[0, 0, 2]]
    again["sample"], again["turn"] = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 2])
    both = r.generate(again, seed=(0, 3))
    assert said(both)[0] != said(both)[1] and both.sample.tolist() == [0, 1, 1] and both.turn.tolist() == [1, 1, 2]
    r.sampler.version = 9
    assert said(r.generate(again[[2, 1]], seed=(0, 3))) == [said(both)[2], said(both)[1]]
    again["turn"] = torch.tensor([0, 0, 2])
    first = said(r.generate(again, seed=(0, 3)))[:2]
    assert first == said(r.generate(p[[0]], group_size=2, seed=(0, 3)))      # turn 0 is the first call
    with pytest.raises(ValueError, match="group_size=2 for rows that carry 'sample' and 'turn'"):
        r.generate(again, group_size=2)
    with pytest.raises(ValueError, match="a column 'sample', which generate writes"): r.generate(again.drop("turn"))


def test_an_engine_that_is_not_here_says_so():
    with pytest.raises(ValueError, match="Rollout: engine='fax' is not in this version; leave it out, or say 'hf'"):
        engine(engine="fax")


def test_raw_logprobs_at_another_temperature_are_refused():
    b = engine(temperature=.6).generate(prompts(), seed=1)
    with pytest.raises(ValueError, match="sampled at 0.6"): b.with_logprobs(torch.zeros(b.tokens.shape), temperature=1.)


def test_frequencies_are_the_distributions():
    g, z = torch.Generator().manual_seed(0), torch.tensor([2., 1., .5, 0., -1.])
    n = 40_000
    for how in (dict(), dict(temperature=.5), dict(top_k=3), dict(top_p=.7), dict(min_p=.3),
                dict(top_k=4, top_p=.9, temperature=2.)):
        tokens, logp, support = sample_tokens(z.expand(n, -1), torch.rand(n, generator=g), **how)
        p = (z/how.get("temperature", 1.)).softmax(-1)
        keep = torch.ones(5, dtype=torch.bool)
        if "top_k" in how: keep &= torch.arange(5) < how["top_k"]
        p = torch.where(keep, p, 0.)/p[keep].sum()
        if "top_p" in how: keep &= p.cumsum(0) - p < how["top_p"]
        if "min_p" in how: keep &= p >= how["min_p"]*p.max()
        p = torch.where(keep, p, 0.)/p[keep].sum()
        assert (tokens.bincount(minlength=5)/n - p).abs().max() < .01, how
        assert_close(logp, p.log()[tokens], rtol=1e-5, atol=1e-5)
        assert (support is None) == (how.keys() <= {"temperature"})
        if support is not None:
            assert all(set(s.tolist()) - {-1} == set(keep.nonzero()[:, 0].tolist()) for s in support[:5])


def test_seeds_belong_to_samples():
    """LAWS 28: alone, among others, in another order, cut in pieces: the same completions; other seeds and siblings
    differ."""
    r, p = engine(), prompts((5, 2, 7, 3))
    whole = r.generate(p, group_size=4, seed=(0, 3))
    assert len({tuple(x) for x in said(whole)}) == 16
    assert said(r.generate(p[[2]], group_size=4, seed=(0, 3))) == said(whole)[8:12]
    assert said(r.generate(p[[3, 1]], group_size=4, seed=(0, 3))) == said(whole)[12:] + said(whole)[4:8]
    pieces = [row for part in p.parts(3) for row in zip(part.group.repeat_interleave(4).tolist(),
                                                        said(r.generate(part, group_size=4, seed=(0, 3))), strict=True)]
    assert sorted(pieces) == sorted(zip(whole.group.tolist(), said(whole), strict=True))
    assert said(engine(max_rows=4).generate(p, group_size=4, seed=(0, 3))) == said(whole)
    assert said(r.generate(p, group_size=4, seed=(0, 4))) != said(whole)
    assert said(r.generate(p, group_size=2, seed=(0, 3))) == [x for i, x in enumerate(said(whole)) if i % 4 < 2]


def test_a_group_that_is_sampled_again_without_a_seed_warns():
    "One stream of random numbers in every step. Other groups, seeds, greedy rows and rows that go on are not."
    r, b, other = engine(), prompts(), prompts()
    other["group"] = b.group + len(b)
    on = b[:]
    on["sample"], on["turn"] = torch.zeros(len(b), dtype=torch.long), torch.ones(len(b), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = r.generate(b)
        for how in (dict(seed=0), dict(seed=(0, 1)), dict(temperature=0.)): r.generate(b, **how)
        for x in (on, on, other): r.generate(x)
        r.generate(b)
    with pytest.warns(UserWarning, match="there is no seed=.*Say seed=.seed, step."): again = r.generate(b)
    assert said(first) == said(again)


def test_a_long_vocabulary_is_drawn_as_in_float64():
    """Places found block by block are those of one cumulative sum, for any length, banned ids and the last number
    below 1 included."""
    g = torch.Generator().manual_seed(1)
    for V in (1, 63, 64, 65, 1000):
        z, u = torch.randn(300, V, generator=g)*4, torch.rand(300, generator=g, dtype=torch.float64)
        z[:, V//2+1:][torch.rand(300, V - V//2 - 1, generator=g) < .3] = -torch.inf
        z[0, V//2+1:], u[0] = -torch.inf, 1 - 1e-16       # the last id with any mass
        F = z.double().softmax(-1).cumsum(-1)
        tokens, logp, _ = sample_tokens(z, u)
        wanted = torch.searchsorted(F, (u*F[:, -1])[:, None], right=True)[:, 0].clamp(max=V-1)
        wanted[0] = V//2
        assert tokens.tolist() == wanted.tolist(), V
        assert_close(logp, z.log_softmax(-1).gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)


def ran(net, what):
    "A list that receives what `what` makes of (module, inputs, output) of each forward pass."
    seen = []
    net.register_forward_hook(lambda module, args, kwargs, out: seen.append(what(args[0], out)), with_kwargs=True)
    return seen


def test_only_what_is_needed_is_run():
    "Prompts of like length together, each once for its group; one logit vector a row; rows that have ended leave."
    p, r = prompts((3, 9, 2, 8)), engine(model(eos_token_id=1), max_rows=8, max_tokens=30)
    ids, logits, head = (ran(r.module, lambda x, out: tuple(x.shape)),
                         ran(r.module, lambda x, out: out.logits.shape[:2].numel()),
                         ran(r.module.lm_head, lambda x, out: x.shape[:-1].numel()))
    b = r.generate(p, group_size=4, seed=3)
    prefills = [i for i, (rows, width) in enumerate(ids) if rows*width != logits[i]]
    assert [ids[i] for i in prefills] == [(2, 9), (2, 3)] and [logits[i] for i in prefills] == [2, 2]
    assert logits == head
    completions = b.lengths - b.prompt_lengths
    assert completions.min() < 15 and (completions == 30).any()
    for rows, start, stop in zip((completions.view(4, 4)[[1, 3]].flatten(), completions.view(4, 4)[[0, 2]].flatten()),
                                 prefills, [*prefills[1:], len(ids)], strict=True):
        steps = logits[start+1:stop]
        alive = [int((rows > s+1).sum()) for s in range(len(steps))]      # who still has something to say after step s
        assert len(steps) == int(rows.max()) - 1
        assert all(a <= n and n*7//8 < a or n == a for n, a in zip(steps, alive, strict=True)), (steps, alive)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "gemma"])
def test_siblings_side_by_side_change_nothing(kind):
    """One copy of a prompt's keys for its group: until rows leave, or have said more than they share; nothing of it
    shows."""
    net = sharp(kind)
    both = engine(net, max_tokens=30), engine(net, max_tokens=30)
    assert both[0].sampler.shared
    both[1].sampler.shared = False
    for p, stop in ((prompts((20, 31)), True), (prompts((2, 9, 3)), False), (prompts((6,)), True)):
        if not stop: both[0].stop = both[1].stop = torch.tensor([], dtype=torch.long)
        a, b = (r.generate(p, group_size=8, seed=4) for r in both)
        assert said(a) == said(b)
        assert_close(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-4)


def test_a_groups_prompt_is_kept_once():
    net = model().eval()
    def keys(repeats, said, shared=True):
        with torch.no_grad():
            decoder, at = CachedDecoder(net, torch.randint(2, 32, (3, 20)), torch.tensor([20, 9, 4]), repeats,
                                        shared=shared), []
            for _ in range(said):
                decoder.push(torch.randint(2, 32, (3*repeats,)))
                at.append(decoder.cache.layers[0].keys)
        return at
    shapes = [tuple(k.shape) for k in keys(4, 22)]
    assert [s[0]*s[2] for s in shapes[:20]] == [3*(20 + 4*(s+1)) for s in range(20)]
    assert [s[0]*s[2] for s in shapes[20:]] == [12*41, 12*42]
    assert [k.shape[0]*k.shape[2] for k in keys(4, 2, shared=False)] == [12*21, 12*22]
    assert len({k.data_ptr() for k in keys(1, 40)}) <= 3        # written in place, in room that grows by a quarter


def test_models_with_windows_or_masks_of_their_own_keep_their_siblings_apart():
    "Mistral's window, and GPT-Neo, whose layers cut a window out of the columns of the cache: right, and not shared."
    import transformers as tf
    neo = tf.GPTNeoForCausalLM(tf.GPTNeoConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_layers=2,
                                               attention_types=[[["global", "local"], 1]], num_heads=4, window_size=12,
                                               max_position_embeddings=64, eos_token_id=1, bos_token_id=1))
    for net in (neo, sharp("mistral", sliding_window=12)):      # longer than what the probe runs
        with torch.no_grad():
            for w in net.parameters(): w *= 2
        class Again(nn.Module):
            def __init__(self, net): super().__init__(); self.net = net
            def forward(self, tokens): return self.net(tokens, use_cache=False).logits
        fast = engine(net)
        assert not fast.sampler.shared
        a, b = fast.generate(prompts((9, 20)), group_size=4,
                             seed=2), engine(Again(net), stop=[1]).generate(prompts((9, 20)), group_size=4, seed=2)
        assert said(a) == said(b)
        assert_close(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "mistral"])
def test_the_cache_changes_nothing(kind):
    "Left-padded decoding with a cache, finished rows leaving, against running every row again from its start."
    net = sharp(kind)
    class Again(nn.Module):
        def __init__(self): super().__init__(); self.net = net
        def forward(self, tokens): return self.net(tokens, use_cache=False).logits
    fast = engine(net).generate(prompts(), group_size=8, seed=2)
    slow = engine(Again(), stop=[1]).generate(prompts(), group_size=8, seed=2)
    assert said(fast) == said(slow) and fast.finish_reason == slow.finish_reason
    assert_close(fast.rollout_logprobs, slow.rollout_logprobs, rtol=0, atol=1e-4)


def test_a_cache_that_lies_is_not_used():
    "A model whose cache gives other numbers is decoded without it, and is right."
    class Liar(nn.Module):
        def __init__(self): super().__init__(); self.net = sharp(); self.config = self.net.config
        def forward(self, tokens, attention_mask=None, past_key_values=None, use_cache=False, position_ids=None):
            out = self.net(tokens, attention_mask=attention_mask, past_key_values=past_key_values, use_cache=use_cache,
                           position_ids=position_ids)
            if past_key_values is not None and tokens.shape[1] == 1: out.logits = out.logits.flip(-1)
            return out
    with pytest.warns(UserWarning, match="Liar is decoded without a key-value cache") as said_so:
        lying, honest = engine(Liar(), stop=[1]), engine(sharp())
    assert len([w for w in said_so if "key-value" in str(w.message)]) == 1
    assert honest.sampler.cached and not lying.sampler.cached
    assert said(lying.generate(prompts(), group_size=4)) == said(honest.generate(prompts(), group_size=4))


def test_what_generate_writes_is_not_the_users():
    p = prompts()
    p["completion"] = ["gold"]*3
    with pytest.raises(ValueError, match="column 'completion', which generate writes itself"): engine().generate(p)
    filler = prompts()[:1].parts(2)[1]
    made = engine().generate(filler, group_size=2)
    assert made.filler and not made.mask.any() and len(Batch.cat([engine().generate(prompts()), made])) == 3
    broken = sharp()
    with torch.no_grad(): broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"): engine(broken).generate(prompts())


def test_rows_end_with_their_stop_token_exactly_once():
    "LAWS 10: pad == eos, or eos inside the prompt, changes nothing: what exists is said by lengths."
    p = prompts()
    # the stop id inside every prompt
    p["tokens"] = torch.where((torch.arange(7) == 1) & (torch.arange(7) < p.lengths[:, None]), 1, p.tokens)
    b = engine(model(eos_token_id=1, pad_token_id=1), max_tokens=60 - 7).generate(p, group_size=8, seed=0)
    for x, reason in zip(said(b), b.finish_reason, strict=True):
        assert (reason == "completed") == (x[-1] == 1) and 1 not in x[:-1] and (reason == "completed" or len(x) == 53)
    assert "completed" in b.finish_reason
    assert torch.equal(b.mask.sum(1), b.lengths - b.prompt_lengths) and not b.mask[:, 0].any()
    for i in range(len(b)):
        assert b.tokens[i, :b.prompt_lengths[i]].tolist() == p.tokens[i//8, :p.lengths[i//8]].tolist()


@pytest.mark.parametrize("end, warned", [(2, True), ([1, 2], True), (1, False), (0, False), (3, False), (None, False)])
def test_a_models_stop_id_that_is_text_to_the_tokenizer_warns(end, warned):
    "transformers' configurations name 2 by themselves; rows would end at a word and nobody would know."
    tok = tokenizer()                   # w1 ends, w0 pads
    tok.add_special_tokens(dict(additional_special_tokens=["w3"]))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        r = engine(model(eos_token_id=end), tokenizer=tok)
    said = [str(w.message) for w in seen if "Rollout" in str(w.message)]
    assert len(said) == warned and 1 in r.stop
    if warned:
        assert "ends rows at 2, which is 'w2' to the tokenizer, no special token; its end is 1 ('w1')" in said[0]
        assert "say stop=1" in said[0]


def test_siblings_that_say_the_same_are_marked():
    """LAWS 28: the share of duplicates in a group is there to be logged; greedy siblings are all alike, sampled ones
    are not."""
    r = engine()
    assert r.generate(prompts(), group_size=4, temperature=0.).duplicate.tolist() == [False, True, True, True]*3
    b = r.generate(prompts(), group_size=8, max_tokens=1)
    seen = set()
    for row, group, repeated in zip(said(b), b.group.tolist(), b.duplicate.tolist(), strict=True):
        assert repeated == ((group, *row) in seen)
        seen.add((group, *row))
    assert b.duplicate.any() and not b.duplicate.all()


def test_columns_travel_with_their_prompt():
    b = engine().generate(prompts(), group_size=3)
    assert b.answer == ["5"]*3 + ["2"]*3 + ["7"]*3 and b.group.tolist() == [100]*3 + [101]*3 + [102]*3
    assert b.sample.tolist() == [0, 1, 2]*3
    assert b.prompt_lengths.tolist() == [5]*3 + [2]*3 + [7]*3 and b.policy_version.tolist() == [0]*9
    scores = Grader(lambda completion_ids, **_: [float(len(x)) for x in completion_ids]).score(b)
    assert scores.tolist() == (b.lengths - b.prompt_lengths).tolist()
    scores = Grader(lambda completion_ids, **_: [None if i == 1 else float(i)
                                                 for i in range(len(completion_ids))]).score(b)
    kept = b[~scores.isnan()]
    advantages = group_advantages(scores[~scores.isnan()], kept.group)
    assert len(kept) == 8 and kept.group.tolist().count(100) == 2 and advantages.isfinite().all()


def test_a_loss_whose_terms_cancel_is_no_broken_loss():
    """GRPO on fresh rows of one length, old log-probs from the same forward pass: the loss is 0 but for rounding,
    its gradient is not."""
    g = torch.Generator().manual_seed(0)
    group, mask = torch.arange(64)//8, (torch.arange(64) > 0).expand(64, -1)
    b = Batch(tokens=torch.ones(64, 64, dtype=torch.long), lengths=torch.full((64,), 64), mask=mask, group=group,
              advantages=at_tokens(group_advantages(torch.rand(64, generator=g), group), mask))
    out = Out(logprobs=-torch.rand(64, 64, generator=g)*8)
    def loss(out, b): return ppo_loss(out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b.n_tokens)
    assert check_splits(loss, out, b, "Policy")
    # added once a call
    with pytest.raises(ValueError, match="not a sum over rows"):
        check_splits(lambda out, b: (loss(out, b)[0] + 1e-3, {}), out, b, "Policy")


def test_greedy_rows_are_never_trained_on():
    net = sharp()
    b = engine(net).generate(prompts(), temperature=0.)
    assert not b.mask.any() and b.temperature.tolist() == [0.]*3
    for i in range(3):
        ids = b.tokens[i:i+1, :b.lengths[i]]
        start = int(b.prompt_lengths[i])
        assert net(ids).logits[0, start-1:-1].argmax(-1).tolist() == ids[0, start:].tolist()
    policy = Policy(net, lr=1e-2, device="cpu")
    with pytest.raises(ValueError, match="nothing to read.*at="): policy.logprobs(b)
    new = (torch.arange(b.tokens.shape[1])
           >= b.prompt_lengths[:, None]) & (torch.arange(b.tokens.shape[1]) < b.lengths[:, None])
    assert (policy.logprobs(b, at=new)[new] < 0).all()
    assert float(policy.step(b,
                             lambda out, b: (masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))["skipped"]) == 1


def test_support_of_many_tokens_stays_small():
    r = engine(model(vocab_size=500), top_p=.99)
    with pytest.warns(UserWarning, match="top_p=0.99, min_p=0 leave more than 64 ids"):
        b = r.generate(prompts(), group_size=2)
    assert b.support.shape[2] == 64 and b.support.dtype == torch.int32
    for i, t in b.mask.nonzero().tolist(): assert b.tokens[i, t] in b.support[i, t]
    assert (b.support[~b.mask] <= 0).all()        # nothing sampled there: −1, or 0 where rows were padded to join


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes, how",
                         [(dict(vocab_size=500), dict(top_p=.05)), (dict(vocab_size=500), dict(top_k=64, top_p=.99)),
                          (dict(vocab_size=64), dict(top_p=1-1e-6))])
def test_no_warning_of_a_cut_where_nothing_was_cut(sizes, how):
    assert "support" in engine(model(**sizes), **how).generate(prompts())


@pytest.mark.parametrize("temperature", [0., 1.])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_not_sampled_from(temperature, bad):
    r = engine(temperature=temperature)
    with torch.no_grad(): r.module.lm_head.weight[7, 3] = bad
    with pytest.raises(FloatingPointError, match="the weights hold NaN or inf"): r.generate(prompts())


def test_a_sync_is_proved_and_a_failed_one_refuses_to_sample():
    """LAWS 3: whichever weight moves, the engine follows, and its log-probs are the trainer's; a stranger's weights
    raise."""
    from rlblocks.engines.weights import checksum, named_weights
    net = sharp()
    policy, r = Policy(net, lr=1e-2, device="cpu"), engine(net)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight",
                 "lm_head.weight"):
        with torch.no_grad():
            dict(policy._run.module.trunk.named_parameters())[name].add_(
                1e-2*torch.randn(1, generator=torch.Generator().manual_seed(1)))
        manifest = r.load(policy.weights())
        assert manifest.checksums == {n: checksum(x) for n, x in named_weights(policy._run.module.trunk).items()}
        assert name in manifest.checksums
        b = r.generate(prompts(), group_size=4)
        assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-4
    ticket = policy.weights()
    policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))
    with pytest.raises(RuntimeError, match="weights of version 0, the policy is at 1"): r.load(ticket)
    with pytest.raises(RuntimeError, match="the last load failed"): r.generate(prompts())
    assert r.load(policy.weights()).version == 1 and r.generate(prompts()).policy_version.tolist() == [1]*3
    r.load(policy.weights()); r.load(policy.weights())
    with pytest.raises(ValueError, match="the ticket lacks 'model.layers.1"):
        r.load(Policy(model(num_hidden_layers=1), device="cpu").weights())
    with pytest.raises(ValueError, match="has no 'model.layers.2"):
        r.load(Policy(model(num_hidden_layers=3), device="cpu").weights())
    with pytest.raises(ValueError, match="is \\[64"): r.load(Policy(model(vocab_size=64), device="cpu").weights())


def test_a_tied_model_syncs_as_one():
    net = sharp(tie_word_embeddings=True)
    policy, r = Policy(net, lr=1e-2, device="cpu"), engine(net)
    manifest = r.load(policy.weights())
    assert ("lm_head.weight" in manifest.checksums) + ("model.embed_tokens.weight" in manifest.checksums) == 1


def test_a_value_head_stays_at_home():
    policy = Policy(sharp(), value_head=True, device="cpu")
    assert "head.weight" not in engine().load(policy.weights()).checksums


def padded(left):
    "Prompts of 4 tokens and of 2."
    short = [0, 0, 5, 6] if left else [5, 6, 0, 0]
    return Batch(tokens=torch.tensor([[3, 4, 5, 6], short]), lengths=torch.tensor([4, 2]), group=torch.arange(2))


def test_clear_errors():
    r, p = engine(), prompts()
    empty = Batch(tokens=torch.zeros(2, 3, dtype=torch.long), lengths=torch.tensor([2, 0]),
                  mask=torch.zeros(2, 3, dtype=torch.bool), group=torch.arange(2))
    with pytest.raises(ValueError, match="prompt 1 is empty"): r.generate(empty)
    with pytest.raises(ValueError, match="prompt 2 has 7 tokens; with max_tokens=60 that is beyond the model's 64"):
        r.generate(p, max_tokens=60)
    with pytest.raises(TypeError, match="prompts is a list; a Batch is wanted"): r.generate(["hello"])
    with pytest.raises(ValueError, match="no prompts"): r.generate(p[[]])
    words = "padded on the left: row 1 begins with 2 times the id 0 of padding. A row begins in column 0 and ends at"
    with pytest.raises(ValueError, match=words): engine(tokenizer=tokenizer()).generate(padded(left=True))
    assert len(engine(tokenizer=tokenizer()).generate(padded(left=False))) == len(r.generate(padded(left=True))) == 2
    with pytest.raises(ValueError, match=r"no column 'group'.*data.take\(n\)"): r.generate(p.drop("group"))
    with pytest.raises(ValueError, match="group_size=0"): r.generate(p, group_size=0)
    for how, says in ((dict(temperature=-1.), "temperature is -1"), (dict(top_p=0.), "top_p is 0"),
                      (dict(top_k=65), "top_k is 65"), (dict(min_p=1.), "min_p is 1"), (dict(engine="fax"), "'fax'")):
        with pytest.raises(ValueError, match=says): engine(**how)
