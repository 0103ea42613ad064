"""Decoding against sampling one row at a time: the same tokens at the same random numbers, whoever decodes beside
it, ends early, shares its prompt or is confined."""
import random

import pytest
import torch
from rlblocks import Batch, Policy, Rollout
from rlblocks.samplers.decoding import MAX_SUPPORT
from rlblocks.samplers.hf import uniforms
from rlblocks.samplers.kv_cache import CachedDecoder
from rlblocks.samplers.sampler import sample_seeds
from tiny import model, reach

# shared and not, windows, softcaps, experts, learned positions
KINDS_ = ["llama", "qwen3", "qwen2_window", "gemma2", "mixtral", "gpt2"]


def ragged_prompts(rng, count):
    lengths = [rng.choice([1, rng.randint(2, 9), rng.randint(10, 24)]) for _ in range(count)]
    g, T = torch.Generator().manual_seed(rng.randrange(2**31)), max(lengths)
    n = torch.tensor(lengths)
    return Batch(tokens=torch.randint(2, 32, (count, T), generator=g)*(torch.arange(T) < n[:, None]), lengths=n,
                 mask=torch.zeros(count, T, dtype=torch.bool), group=torch.arange(count)*7 + 3)


def settings(rng):
    "How to sample: free, greedy, confined by each of the three and by several."
    temperature = rng.choice([0., .5, 1., 1.7])
    return dict(temperature=temperature) | rng.choice([{}, {}, dict(top_k=rng.choice([1, 3, 20])), dict(
        top_p=rng.choice([.3, .9])), dict(min_p=rng.choice([.05, .5])), dict(top_k=9, top_p=.8, min_p=.02)])


def distribution(logits, temperature=1., top_k=0, top_p=1., min_p=0.):
    "(ids in the order in which they are drawn from, their probabilities), in float64, as the papers write it."
    z = logits.double()/temperature
    p, ids = z.softmax(-1), torch.arange(len(z))
    if not (top_k or top_p < 1 or min_p > 0): return ids, p
    p, ids = p.sort(descending=True, stable=True)
    p, ids = p[:top_k or MAX_SUPPORT], ids[:top_k or MAX_SUPPORT]
    p, ids = p[p >= min_p*p[0]], ids[p >= min_p*p[0]]
    p = p/p.sum()
    keep = p.cumsum(0) - p < top_p
    return ids[keep], p[keep]/p[keep].sum()


LARGER = 2.5                    # than a new model's: weights that have opinions, so that confining confines


@torch.no_grad()
def check_row(net, ids, start, logps, u, stop, S, support, temperature, **how):
    "One row alone, token after token from its own prefix. → (tokens that float32 left to chance, tokens)"
    close = 0
    for t in range(start, len(ids)):
        logits = net(ids[None, :t], use_cache=False).logits[0, -1].float()
        # Of a log-probability, and less of a probability: each of two layers passes errors on as much larger as its
        # weights are.
        token, far = int(ids[t]), LARGER**2*reach(logits)/(temperature or 1.)
        if not temperature:
            assert logits[token] >= logits.max() - far
            close += token != int(logits.argmax())
            continue
        kept, p = distribution(logits, temperature, **how)
        F, at = p.cumsum(0), (kept == token).nonzero()
        assert len(at), f"{token} is none of {kept.tolist()}"
        low, high = float(F[at[0, 0]] - p[at[0, 0]]), float(F[at[0, 0]])
        x = float(u[t - start])
        assert low - far <= x <= high + far
        close += not low <= x < high
        assert abs(float(logps[t]) - float(p[at[0, 0]].log())) < far
        if support is not None: assert set(support[t].tolist()) - {-1} == set(kept.tolist())
    said = ids[start:].tolist()
    # ends with its first stop id, or is as long as it may be
    assert not set(said[:-1]) & stop and (said[-1] in stop or len(said) == S)
    return close, len(said)


@pytest.mark.parametrize("kind", KINDS_)
def test_tokens_are_those_of_one_row_at_a_time(kind):
    rng, net = random.Random(kind), model(kind).eval()
    with torch.no_grad():
        for w in net.parameters(): w *= LARGER if w.dim() > 1 else 1
    policy, chance, total, confined, ended = Policy(net, frozen=True, device="cpu"), 0, 0, 0, 0
    for case in range(10):
        how, size, S, stop = (settings(rng), rng.randint(1, 9), rng.choice([1, 5, 16, 30]),
                              set(rng.sample(range(2, 32), rng.choice([0, 1, 4]))))
        p, seed = ragged_prompts(rng, rng.randint(1, 5)), (case, "fuzz")
        r = Rollout(net, device="cpu", max_tokens=S, stop=sorted(stop), max_rows=rng.choice([1, 7, 512]), **how)
        b = r.generate(p, group_size=size, seed=seed)
        assert b.group.tolist() == [g for g in p.group.tolist() for _ in range(size)]
        assert b.sample.tolist() == list(range(size))*len(p)
        u = uniforms([s for g in p.group.tolist() for s in sample_seeds(seed, g, size)], S)
        for i in rng.sample(range(len(b)), min(len(b), 6)):
            k, n, start = i//size, int(b.lengths[i]), int(b.prompt_lengths[i])
            assert b.tokens[i, :start].equal(p.tokens[k, :int(p.lengths[k])]) and not b.tokens[i, n:].any()
            assert not b.rollout_logprobs[i, n:].any()
            assert (b.finish_reason[i] == "completed") == (int(b.tokens[i, n-1]) in stop)
            close, count = check_row(net, b.tokens[i, :n], start, b.rollout_logprobs[i], u[i], stop, S,
                                     b.support[i] if "support" in b else None, **how)
            chance, total, ended = chance + close, total + count, ended + (n - start < S)
        confined += "support" in b
        if how["temperature"]:
            assert b.mask.sum(1).equal(b.lengths - b.prompt_lengths)
            assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < reach(b.rollout_logprobs)
        else: assert not b.mask.any() and "support" not in b
    assert total > 100 and chance <= total/100 and confined and ended


def test_a_cache_lies_in_one_place():
    "When rows end, the others' keys are copied out of the room in which all lay: it goes with them."
    decoder = CachedDecoder(model().eval(), torch.ones(8, 20, dtype=torch.long), torch.full((8,), 20), 1)
    decoder.push(torch.ones(8, dtype=torch.long))
    def held():
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for layer in decoder.cache.layers
                    for x in (layer.keys, layer.values, *layer.buffers) if x is not None}.values())
    before = held()
    decoder.keep(torch.arange(4))
    assert held() <= before/2
