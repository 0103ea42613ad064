"""Packed rows with shared prompts are what rows are alone, for every architecture, or the model is refused by name
(LAWS 1, 26)."""
import pytest
import tiny
import torch
from tiny import exact
from torch import nn
from torch.testing import assert_close

from rlblocks import Batch, Critic, Policy, Scorer
from rlblocks.models.attention import NAME, Segments, attend_as_before, attend_by_segments, layout, segment_attention
from rlblocks.data.packing import pack
from rlblocks.models.forward import Forward
from rlblocks.models.probes import separates_rows, pack_by
from rlblocks.models.step import micro_batches
from rlblocks.engines.engine import EngineSpec
from rlblocks.engines.optimizers import adamw


def groups(sizes=((9, 3, 4), (9, 1), (12, 5, 2, 3)), seed=0):
    "Groups of answers: (tokens of the prompt, tokens of each answer …). Half the answers of a group begin alike."
    g = torch.Generator().manual_seed(seed)
    rows, group, mask = [], [], []
    T = max(p + max(cs) for p, *cs in sizes)
    for k, (p, *cs) in enumerate(sizes):
        prompt = torch.randint(2, 32, (p,), generator=g).tolist()
        for c in cs:
            rows.append(prompt + [7]*(c > 2) + torch.randint(2, 32, (c - (c > 2),), generator=g).tolist())
            group.append(40 - k)
            mask.append([False]*p + (torch.rand(c, generator=g) < .8).tolist())
    lengths = torch.tensor([len(r) for r in rows])
    pad = lambda xs: torch.tensor([x + [0]*(T-len(x)) for x in xs])
    return Batch(tokens=pad(rows), lengths=lengths, mask=pad(mask).bool(), group=torch.tensor(group),
                 temperature=torch.full((len(rows),), .75), row=torch.arange(len(rows)))


def weights(b):
    return torch.where(b.mask, ((b.tokens*7 + torch.arange(b.width)*3 + b.row[:, None]) % 5 - 2.).double(), 0.)
def loss(out, b): return (weights(b)*out.logprobs).sum()/b.n_tokens, {}


def dense(module, query, key, value, attention_mask, *, scaling, softcap=None, **more):
    """Attention as it is written down, in the precision of its input (transformers' eager one takes its softmax in
    fp32)."""
    key, value = (x.repeat_interleave(query.shape[1]//x.shape[1], 1) for x in (key, value))
    s = query @ key.mT*scaling
    s = softcap*(s/softcap).tanh() if softcap else s
    return ((s + attention_mask).softmax(-1) @ value).transpose(1, 2), None


def alone(net, b):
    "Every row by itself through dense attention under transformers' own masks: log-probs and gradients."
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    AttentionInterface.register("dense", dense), AttentionMaskInterface.register("dense", eager_mask)
    net.eval().config._attn_implementation = "dense"
    out = torch.zeros(b.mask.shape, dtype=next(net.parameters()).dtype)
    for i, n in enumerate(b.lengths.tolist()):
        z = net(b.tokens[i:i+1, :n], use_cache=False).logits[0]/.75
        out[i, 1:n] = z[:-1].log_softmax(-1).gather(-1, b.tokens[i, 1:n, None])[:, 0]
    out = torch.where(b.mask, out, 0.)
    (weights(b)*out).sum().div(b.n_tokens).backward()
    found = {f"trunk.{k}": p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return out.detach(), found


def ours(net, b, **how):
    policy = Policy(net, optimizer=adamw(lr=0., max_norm=None), device="cpu", **how)
    grads = tiny.gradients(policy)
    policy.step(b, loss)
    return policy.logprobs(b), grads, policy


DENSE = [k for k in tiny.KINDS if "moe" not in k and k != "mixtral"]


@pytest.mark.parametrize("kind", DENSE)
def test_packed_with_shared_prompts_is_each_row_alone(kind):
    b = groups()
    logprobs, grads = alone(exact(tiny.model(kind)), b)
    for how in (dict(), dict(micro_tokens=40), dict(engine=EngineSpec(checkpointing=True)), dict(pack=False)):
        found, others, policy = ours(lambda: exact(tiny.model(kind)), b, **how)
        assert policy._run.layout.packed is how.get("pack", True) and policy._run.layout.segments
        assert_close(found, logprobs, rtol=0, atol=1e-10)
        assert tiny.apart(others, grads) < 1e-10


@pytest.mark.parametrize("kind", tiny.KINDS)
# a mixture of experts rounds by which tokens an expert gets; its routers, in fp32 whatever the model is in, are where
# float64 would end
def test_packed_is_alone_in_fp32(kind):
    b = groups()
    logprobs, grads = alone(tiny.model(kind), b)
    for how in (dict(), dict(engine=EngineSpec(checkpointing=True))):
        found, others, policy = ours(tiny.model(kind), b, **how)
        assert policy._run.layout.packed and policy._run.layout.segments
        assert_close(found, logprobs, rtol=0, atol=tiny.reach(logprobs))
        assert tiny.apart(others, grads) < tiny.APART


def test_the_prompt_is_laid_out_once():
    policy, b, seen = Policy(tiny.model(), device="cpu"), groups(), []
    policy._run.module.trunk.register_forward_pre_hook(lambda m, args, kw: seen.append(args[0].numel()),
                                                       with_kwargs=True)
    policy.logprobs(b)
    # answers of more than two tokens begin with the same one: it is shared as well
    assert seen == [9+3+4-1 + 9+1 + 12+5+2+3-1] and int(b.lengths.sum()) == 81
    b["unit"] = b.group
    policy.logprobs(b.drop("group"))
    policy.logprobs(b.drop("group", "unit"))
    assert seen[1:] == [seen[0], 81] # by unit without groups, and whole without either


def test_a_group_id_that_lies_costs_time_and_no_number():
    b = groups()
    b["group"] = torch.zeros_like(b.group)
    logprobs, grads = alone(exact(tiny.model()), b)
    found, others, _ = ours(lambda: exact(tiny.model()), b)
    assert_close(found, logprobs, rtol=0, atol=1e-10)
    assert tiny.apart(others, grads) < 1e-10


def test_a_row_that_says_what_the_first_said_adds_nothing():
    net, b = tiny.model(dtype=torch.float64), groups()
    twice = Batch.cat([b, b])
    twice["row"] = torch.cat([b.row, b.row])
    assert_close(Policy(net, device="cpu").logprobs(twice), Policy(net, device="cpu").logprobs(b).repeat(2, 1), rtol=0,
                 atol=1e-12)
    p = pack(twice.tokens, twice.lengths, twice.group)
    assert [p.sizes[6+i] for i in (0, 2, 3)] == [0, 0, 0] and p.prefixes[6] == (0, 12)


def test_a_change_in_one_answer_reaches_no_other(): # LAWS 26
    policy, b = Policy(tiny.model("mistral_window"), device="cpu"), groups()
    before, changed = policy.logprobs(b), b[list(range(len(b)))]
    changed["tokens"] = b.tokens.clone()
    changed["tokens"][0, 9:12] = changed.tokens[0, 9:12].flip(0) + 1
    after = policy.logprobs(changed)
    assert_close(after[1:], before[1:], rtol=0, atol=tiny.reach(before))
    assert (after[0] - before[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_values_and_scores_go_the_same_way(kind):
    net, b = tiny.model(kind, torch.float64), groups()
    def filled(wrapper):
        with torch.no_grad(): wrapper._run.module.head.weight.copy_(torch.linspace(-1, 1, 32))
        return wrapper
    for make, ask in ((Critic, "values"), (Scorer, "scores")):
        packed, padded = (filled(make(net, device="cpu", pack=p)) for p in (None, False))
        assert packed._run.layout.packed and packed._run.layout.segments
        assert_close(getattr(packed, ask)(b), getattr(padded, ask)(b), rtol=0, atol=1e-10)


def test_columns_keep_their_tokens(): # media and routed experts travel so
    b = groups()
    experts = torch.stack([b.tokens, b.tokens*b.row[:, None], torch.arange(b.width).expand_as(b.tokens)], -1)
    p = pack(b.tokens, b.lengths, b.group)
    taken = p.take(experts)
    assert taken.shape == (len(p.tokens), 3) and taken[:, 0].equal(p.tokens) and taken[:, 2].equal(p.position_ids)
    assert taken[:, 1].equal(p.tokens*p.row_ids)


# -- what cannot be packed says so

class Sinks(nn.Module):
    def __init__(self, net, blind=False):
        super().__init__()
        self.net, self.config, self.blind = net, net.config, blind      # blind: takes positions and loses them
        for layer in net.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda m, args, kw: (args, kw | dict(s_aux=torch.zeros(4))),
                                                      with_kwargs=True)
    def get_output_embeddings(self): return self.net.get_output_embeddings()
    def forward(self, tokens, position_ids=None, use_cache=None, **more):
        return self.net(tokens, position_ids=None if self.blind else position_ids, use_cache=use_cache, **more)


def test_attention_sinks_are_refused_by_name():
    for blind in (False, True):
        net = Sinks(tiny.model(), blind).eval()
        found = pack_by(Forward(net), "cpu")
        assert not found.segments and net.config._attn_implementation == "sdpa"
        # by positions, if the model knows them
        assert found.safe is not blind and ("attention sinks" in found.why) is blind
    with pytest.raises(NotImplementedError, match="LlamaAttention has attention sinks"):
        x = torch.zeros(1, 4, 3, 8)
        segment_attention(tiny.model().model.layers[0].self_attn, x, x, x, None, segments=Segments([3], [(0, 0)]),
                          s_aux=torch.zeros(4))


def broken(window=None, prefix=0):
    "`segment_attention` that is told a wrong window or a wrong prefix."
    def f(*args, segments=None, sliding_window=None, **more):
        if segments: segments = Segments(segments.sizes, [(h, max(0, n-prefix)) for h, n in segments.prefixes])
        return segment_attention(*args, segments=segments,
                                 sliding_window=window if window and sliding_window else sliding_window, **more)
    return f


@pytest.mark.parametrize("kind, how", [("mistral_window", dict(window=50)), ("mistral_window", dict(window=3)),
                                       ("llama", dict(prefix=1)), ("gemma3", dict(window=50))])
def test_the_probe_sees_wrong_windows_and_prefixes(kind, how, monkeypatch):
    monkeypatch.setattr("rlblocks.models.attention.segment_attention", broken(**how))
    net = tiny.model(kind)
    if kind == "mistral_window": net.config.sliding_window = 4096 # as real ones: rows of the probe are shorter
    assert not pack_by(Forward(net.eval()), "cpu").segments and net.config._attn_implementation == "sdpa"
    assert kind != "mistral_window" or net.config.sliding_window == 4096 # nothing is left behind
    monkeypatch.undo()
    attend_by_segments(nn.Module()) # an object without a model: nothing to set
    assert pack_by(Forward(net), "cpu").segments


def test_other_attentions_are_left_alone():
    net = tiny.model()
    net.config._attn_implementation = "flex_attention"
    assert attend_by_segments(net) == [] and net.config._attn_implementation == "flex_attention"


def test_eager_position_packing_still_works_where_segments_do_not(monkeypatch):
    monkeypatch.setattr("rlblocks.models.attention.segment_attention", broken(prefix=1))
    b = groups()
    policy = Policy(tiny.model(), pack=True, device="cpu")
    assert policy._run.layout.packed and not policy._run.layout.segments
    assert_close(policy.logprobs(b), (want := Policy(tiny.model(), pack=False, device="cpu").logprobs(b)), rtol=0,
                 atol=tiny.reach(want))
    assert not Policy(tiny.model(), device="cpu")._run.layout.packed # a dense mask over the line: padding is faster


# -- rotary embeddings that turn with the longest row of a call

LONGROPE = dict(rope_type="longrope", factor=4., rope_theta=1e4, short_factor=[1.]*4, long_factor=[4., 3., 2., 2.],
                original_max_position_embeddings=16)
DYNAMIC = dict(rope_type="dynamic", factor=4., rope_theta=1e4)


def lengthy(*lengths, **more):
    g, L, at = torch.Generator().manual_seed(0), torch.tensor(lengths), torch.arange(max(lengths))
    return Batch(tokens=torch.randint(2, 32, (len(L), max(lengths)), generator=g), lengths=L,
                 mask=(at >= 1) & (at < L[:, None]), row=torch.arange(len(L)), **more)


def strong(**rope):
    net = tiny.model(dtype=torch.float64, **rope)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1: p.mul_(8)
    return net


@pytest.mark.parametrize("pack", [None, True, False])
def test_rows_within_and_beyond_a_longrope_window_never_share_a_call(pack):
    policy, b = Policy(strong(rope_parameters=LONGROPE), pack=pack, device="cpu"), lengthy(12, 40, 16, 17, 30)
    by_itself = torch.cat([Policy(strong(rope_parameters=LONGROPE), pack=False, device="cpu").logprobs(b[[i]])
                           for i in range(5)])
    assert_close(policy.logprobs(b), by_itself, rtol=0, atol=1e-10)
    assert sorted(micro_batches(policy._run, b)) == [[0, 2], [1, 3, 4]]
    # a forward pass for each kind that a rank has (on ranks all have as many: tests/test_ranks.py)
    kinds = [len(set((p.lengths > 16).tolist())) for p in b.parts(3)]
    assert [len(micro_batches(policy._run, p)) for p in b.parts(3)] == kinds and set(kinds) == {1, 2}
    with pytest.raises(ValueError, match="Policy: unit 1 has rows on both sides of 16 tokens.*longrope"):
        policy.logprobs(lengthy(12, 14, 40, unit=torch.tensor([0, 1, 1])))


@pytest.mark.parametrize("pack", [None, False])
def test_rows_beyond_the_window_of_a_dynamic_rope_are_refused_by_name(pack):
    policy, b = Policy(strong(rope_parameters=DYNAMIC, max_position_embeddings=16), pack=pack,
                       device="cpu"), lengthy(12, 16, 9)
    by_itself = torch.cat([Policy(strong(rope_parameters=DYNAMIC, max_position_embeddings=16), pack=False,
                                  device="cpu").logprobs(b[[i]]) for i in range(3)])
    assert_close(policy.logprobs(b), by_itself, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="Policy: a row has 17 tokens.*dynamic.*beyond 16"):
        policy.logprobs(lengthy(12, 17))
    parts = lengthy(12, 17).parts(2)        # on ranks all of them raise: tests/test_ranks.py
    with pytest.raises(ValueError, match="dynamic"): policy.logprobs(next(p for p in parts if p.lengths.max() == 17))


# -- the model is still the model

@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2"])
def test_without_segments_the_model_is_what_it_was(kind):
    net, plain, b = tiny.model(kind).eval(), tiny.model(kind, attn_implementation="eager").eval(), groups()
    first, before = net.config._attn_implementation, attend_by_segments(net)
    assert before and net.config._attn_implementation == NAME != first
    exist = torch.arange(b.width) < b.lengths[:, None]
    left = dict(input_ids=b.tokens.flip(1), attention_mask=exist.flip(1).long()) # padding on the left, as in generation
    with torch.no_grad():
        assert_close(net(**left).logits[exist.flip(1)], (want := plain(**left).logits[exist.flip(1)]), rtol=0,
                     atol=tiny.reach(want))
        made = [m.generate(**left, max_new_tokens=5, do_sample=False) for m in (net, plain)]
    assert made[0].equal(made[1])
    attend_as_before(before)
    assert net.config._attn_implementation == first


def test_a_saved_policy_says_nothing_of_segments(tmp_path):
    policy = Policy(tiny.model(), device="cpu")
    assert policy._run.layout.segments
    policy.save_pretrained(tmp_path)
    assert "segments" not in (tmp_path/"config.json").read_text()
    assert_close(Policy(str(tmp_path), device="cpu").logprobs(groups()), policy.logprobs(groups()))


def test_a_peft_model_is_packed():
    peft = pytest.importorskip("peft")
    net, b = tiny.model(dtype=torch.float64), groups()
    adapted = peft.get_peft_model(net,
                                  peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    packed, padded = (Policy(adapted, device="cpu", pack=p) for p in (None, False))
    assert packed._run.layout.segments
    assert_close(packed.logprobs(b), padded.logprobs(b), rtol=0, atol=1e-10)


# -- kernels for rows of unequal length

def test_keys_of_rows_of_unequal_length_are_gathered(monkeypatch):
    """The arithmetic around the kernel that needs a GPU, with a plain function in its place: causal from the right,
    window, fewer key heads; torch 2.11's wants as many."""
    import rlblocks.models.attention as module
    from torch.nn.attention import varlen
    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        out = []
        for i in range(len(cu_q)-1):
            Q, K, V = (x[a[i]:a[i+1]].transpose(0, 1) for x, a in ((q, cu_q), (k, cu_k), (v, cu_k)))
            back = torch.arange(K.shape[1]-Q.shape[1], K.shape[1])[:, None] - torch.arange(K.shape[1])
            see = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
            out.append(nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None], attn_mask=see, scale=scale,
                                                                  enable_gqa=enable_gqa)[0].transpose(0, 1))
        assert max_q == max(cu_q.diff()) and max_k == max(cu_k.diff())
        return torch.cat(out)
    segments, g = Segments([9, 4, 6, 0, 5], [(0, 0), (0, 5), (0, 0), (0, 3), (2, 6)]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, 24, 8, generator=g, dtype=torch.float16) for H in (4, 2, 2))
    def of_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)
    for window, installed in ((24, kernel), (3, kernel), (24, of_2_11), (3, of_2_11)):
        monkeypatch.setattr(varlen, "varlen_attn", installed)
        got = module._kernel(q, k, v, segments, window, scale=.5, enable_gqa=True)
        want = segment_attention(nn.Identity(), q, k, v, None, segments=segments, scaling=.5, sliding_window=window)[0]
        assert_close(got[None], want, rtol=0, atol=2e-3)


# -- on a real layer stack the segments travel with the layer

def test_recomputed_layers_see_their_rows():
    net = tiny.model(dtype=torch.float64).eval()
    attend_by_segments(net)
    one, two = (layout(Segments(s, [(0, 0)]*len(s)), "cpu") for s in ([5, 3], [2, 6]))
    ids, positions = torch.arange(2, 10)[None], lambda s: torch.cat([torch.arange(n) for n in s])[None]
    def gradient(recompute):
        net.zero_grad()
        for m in net.modules():
            if hasattr(m, "gradient_checkpointing"): m.gradient_checkpointing, m.training = recompute, recompute
        if recompute: net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        # two forwards, then two backwards
        out = [net(ids, position_ids=positions(s), use_cache=False, **how).logits
               for s, how in (((5, 3), one), ((2, 6), two))]
        sum(x.sin().sum() for x in out).backward()
        return {k: p.grad.clone() for k, p in net.named_parameters()}
    assert tiny.apart(gradient(True), gradient(False)) < 1e-12


def test_separates_rows_needs_positions():
    assert not separates_rows(Forward(nn.Embedding(8, 4)), "cpu")


# -- attention that is another one than softmax over a row's keys

# 16 heads of the index: of fewer all may give a key exactly 0, and top-k then chooses among equals
SPARSE = tiny.SIZES | dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
                           qk_nope_head_dim=8, v_head_dim=8, index_topk=8, index_head_dim=16, index_n_heads=16,
                           initializer_range=.15, eos_token_id=1, pad_token_id=0)
EXPERTS = dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)


def sparse(kind):
    import transformers as tf
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tf.AutoModelForCausalLM.from_config(tf.CONFIG_MAPPING[kind](**SPARSE | EXPERTS)).eval()


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_stays_the_models_own(kind):
    """Rows of three times the keys that a query chooses: read densely they are nats away, and up to that number of
    tokens the same."""
    net, b = sparse(kind), tiny.rows(B=3, T=26)
    b["lengths"], b["mask"] = (torch.tensor([26, 24, 7]),
                               (torch.arange(26) > 0) & (torch.arange(26) < torch.tensor([26, 24, 7])[:, None]))
    wanted = torch.zeros(b.mask.shape)
    with torch.no_grad():
        for i, n in enumerate(b.lengths.tolist()):
            wanted[i, 1:n] = (net(b.tokens[i:i+1, :n], use_cache=False).logits[0, :-1]/.7).log_softmax(-1).gather(
                -1, b.tokens[i, 1:n, None])[:, 0]
    for how in (dict(), dict(pack=False)):
        assert_close(Policy(net, **how, device="cpu").logprobs(b), wanted, rtol=0, atol=1e-4)
    with pytest.raises(
            ValueError,
            match="Policy: pack=True, but .* attends in a way that is not known here .*hands down 'indices'"):
        Policy(net, pack=True, device="cpu")


def test_a_probe_of_short_rows_sees_what_sparse_attention_does_with_long_ones():
    "By position ids alone, as rows of flash attention are told apart: 13 tokens against a choice of 2,048."
    net = sparse("deepseek_v32")
    for m in net.modules():
        if hasattr(m, "index_topk"): m.index_topk = 2048
    line = []
    for m in net.modules():
        if hasattr(m, "index_topk"): m.register_forward_pre_hook(lambda m, args: line.append(m.index_topk))
    separates_rows(Forward(net), "cpu")
    assert line and max(line) == 4 and all(m.index_topk == 2048 for m in net.modules() if hasattr(m, "index_topk"))


def test_what_layers_hand_down_is_known_or_refused():
    q, layer, line = torch.randn(1, 2, 5, 4), nn.Linear(2, 2), Segments([2, 3], [(0, 0), (0, 1)])
    known = dict(position_ids=torch.arange(5)[None], cache_position=torch.arange(5), use_cache=False,
                 output_attentions=False, output_hidden_states=True, output_router_logits=True, is_causal=True,
                 cu_seq_lens_q=torch.tensor([0, 2, 5]), cu_seq_lens_k=torch.tensor([0, 2, 5]), max_length_q=3,
                 max_length_k=3, seq_idx=torch.zeros(1, 5), num_items_in_batch=torch.tensor(5), indices=None,
                 block_indices=None)
    for segments in (None, line):
        mask = None if segments is None else torch.zeros(1, 1, 1, 1)
        assert torch.equal(segment_attention(layer, q, q, q, mask, segments=segments)[0],
                           segment_attention(layer, q, q, q, mask, segments=segments, **known)[0])
        with pytest.raises(
                NotImplementedError,
                match="segment_attention: Linear hands down 'block_indices', which this attention does not know"):
            segment_attention(layer, q, q, q, mask, segments=segments, block_indices=torch.zeros(1, 5))
    with pytest.raises(NotImplementedError, match=r"segment_attention: Linear makes a mask of its own, \[1, 1, 5, 5\]"):
        segment_attention(layer, q, q, q, torch.zeros(1, 1, 5, 5), segments=line)


def test_a_layer_that_makes_its_own_mask_is_padded():
    """DeepSeek-V4 sees every 128 tokens as one more key, by columns of the mask: on a line of rows shorter than that
    the probe sees none of it, and a long row is read with the one before it."""
    from transformers import AutoModelForCausalLM, DeepseekV4Config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = DeepseekV4Config(
            **tiny.SIZES | dict(num_key_value_heads=1, head_dim=8, q_lora_rank=16, o_lora_rank=8, index_head_dim=16,
                                index_n_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                sliding_window=16, max_position_embeddings=256,
                                layer_types=["heavily_compressed_attention"]*2, eos_token_id=1, pad_token_id=0))
        net = AutoModelForCausalLM.from_config(config).eval()
    assert not Policy(net, device="cpu")._run.layout.packed
    with pytest.raises(ValueError, match="makes a mask of its own"): Policy(net, pack=True, device="cpu")
