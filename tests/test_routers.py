"""Router logits of a mixture of experts: the same columns and the same gradient however rows are laid out and a step
is cut (LAWS 1, 12)."""
import pytest
import tiny
import torch
from rlblocks import Batch, Policy, Rollout, expert_load, masked_mean, moe_balance_loss, router_z_loss
from rlblocks.models.routers import experts_per_token, picked, routed, router_columns, routers_of, routing
from rlblocks.engines.engine import EngineSpec, plain
from rlblocks.engines.optimizers import adamw
from torch.testing import assert_close

KINDS = ["mixtral", "qwen2_moe", "qwen3_moe"]


def net(kind, **more):
    model = tiny.model(kind, **more).double()
    model.set_experts_implementation("eager")       # the grouped product knows no float64
    return model


def batch(B=16):
    "Rows of a few groups; each group begins with a prompt of its own."
    b, at = tiny.rows(B=B, T=14), torch.arange(14)
    start, lengths = 4 + b.group, (5 + b.group + torch.arange(B)*5 % 6).clamp(max=14)
    tokens = torch.where(at < start[:, None], b.tokens[b.group*4], b.tokens)
    return Batch(**b.columns | dict(tokens=tokens, lengths=lengths,
                                    mask=(at >= start[:, None]) & (at < lengths[:, None])))


def real(b): return torch.arange(b.tokens.shape[1]) < b.lengths[:, None]


def loaded(policy, b):
    "The batch with what the balancing loss must know of the whole."
    counts = policy.expert_counts(b)
    return Batch(**b.columns, per_row=["load"], load=(counts.sum(0)/b.lengths.sum()).double().expand(counts.shape),
                 n_real=b.lengths.sum().expand(len(b)))


def loss(out, b):
    "Both router losses over all real tokens, and something of the log-probs."
    n = b.n_real[0]
    each = [moe_balance_loss(x, b.load[:, i], real(b), denom=n)[0] + .1*router_z_loss(x, real(b), denom=n)[0]
            for i, x in enumerate(out.router_logits.unbind(2))]
    return sum(each) - .1*masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}


def gradient(model, b, **how):
    policy = Policy(model, device="cpu", optimizer=adamw(max_norm=None), **how)
    found = tiny.gradients(policy)
    metrics = policy.step(loaded(policy, b), loss, router_logits=True)
    return float(metrics["loss"]), found


@pytest.mark.parametrize("kind", KINDS)
def test_one_gradient_however_the_step_is_cut(kind):
    b, model = batch(), net(kind)
    value, want = gradient(model, b, pack=False)
    routers = [n for n in want if "gate" in n and "shared" not in n and "gate_up" not in n and "gate_proj" not in n]
    assert len(routers) == 2 and all(want[n].abs().max() > 1e-4 for n in routers)
    for packed, micro in ((False, 1), (False, 2), (True, 1), (True, 2), (True, 16)):
        one, found = gradient(model, b, pack=packed, micro_rows=micro)
        assert one == pytest.approx(value, rel=1e-6) and tiny.apart(found, want) < 1e-6


def test_columns_are_the_models_own():
    b, model = batch(), net("mixtral")
    want = torch.stack(model(b.tokens, output_router_logits=True).router_logits, 1).view(16, 14, 2, 4)
    want = torch.where(real(b)[..., None, None], want, 0.).detach()
    for packed in (False, True):
        policy = Policy(model, pack=packed, device="cpu")
        assert_close(tiny.read(policy, b, routers="scores").router_logits.detach(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("how", [dict(engine=EngineSpec(checkpointing=True)),
                                 dict(lora=dict(r=2, target_modules=["q_proj"])), dict(value_head=True)])
def test_under_what_stands_around_the_model(how):
    "Layers computed again in the backward pass; an adapter's wrapping; a value head."
    b, model = batch(), net("qwen3_moe")
    policy = Policy(model, device="cpu", micro_rows=5, optimizer=adamw(max_norm=None), **how)
    plain = Policy(model, device="cpu")
    assert_close(policy.expert_counts(b), plain.expert_counts(b))
    found = tiny.gradients(policy)
    value = float(policy.step(loaded(policy, b), loss, router_logits=True)["loss"])
    assert value == pytest.approx(float(plain.step(loaded(plain, b), loss, router_logits=True)["loss"]), rel=1e-6)
    assert any(g.abs().max() > 0 for g in found.values())
    if "checkpointing" in how: assert tiny.apart(found, gradient(model, b)[1]) < 1e-6


def test_counts_are_the_load_of_the_whole():
    b, policy = batch(), Policy(net("mixtral"), device="cpu", micro_rows=3)
    counts, x = policy.expert_counts(b), tiny.read(policy, b, routers="scores").router_logits
    assert counts.shape == (16, 2, 4) and counts.sum() == 2*2*b.lengths.sum()
    for i in range(2):
        assert_close((counts.sum(0)/b.lengths.sum())[i].double(), expert_load(x[:, :, i], real(b), top_k=2)[0])
    assert policy.expert_counts(b, top_k=1).sum() == 2*b.lengths.sum()
    assert_close(torch.cat([policy.expert_counts(b[:5]), policy.expert_counts(b[5:])]), counts)
    assert_close(policy.expert_counts(b.drop("mask")), counts)       # a prompt's tokens are routed too


def deepseek():
    """Eight experts in four groups, of which two are open to a token, and a selection bias that has moved: picks
    that the scores do not show."""
    import transformers as tf
    torch.manual_seed(0)
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2, eos_token_id=1, pad_token_id=0)).double()
    for layer in model.model.layers[1:]: layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(8)*.3)
    model.set_experts_implementation("eager")
    return model


def entered(model, b):
    "What entered the experts of each layer, row by row: `[B, L, E]`."
    given = []
    hooks = [m.register_forward_pre_hook(lambda m, args: given.append(args[1]))
             for n, m in model.named_modules() if n.endswith(".experts")]
    for row, n in zip(b.tokens, b.lengths, strict=True):
        with torch.no_grad(): model(row[None, :n])
    for h in hooks: h.remove()
    return torch.stack([x.flatten().bincount(minlength=8) for x in given]).view(len(b), len(hooks), 8).float()


@pytest.mark.parametrize("packed", [False, True])
def test_counts_are_of_the_experts_that_tokens_went_to(packed):
    b, model = batch(), deepseek()
    policy, want = Policy(model, device="cpu", pack=packed, micro_rows=5), entered(model, b)
    # the scores alone say another thing
    assert want.sum() == 2*2*b.lengths.sum() and (policy.expert_counts(b, top_k=2) - want).abs().sum()/2 > .3*want.sum()
    assert_close(policy.expert_counts(b), want)


def test_picks_that_nobody_tells():
    """A router that returns scores alone is seen to pick; of one that picks in another way than by `topk`, a bias or
    groups are refused, and without them the largest scores stand."""
    model, b = deepseek(), batch()
    want, gates = entered(model, b), [layer.mlp.gate for layer in model.model.layers[1:]]
    for layer in model.model.layers[1:]:
        gate = layer.mlp.gate
        gate.chosen = gate.forward
        def forward(hidden, mlp=layer.mlp):
            scores, weights, ids = mlp.gate.chosen(hidden)
            mlp.chosen = ids, weights
            return scores, weights, None
        gate.forward = forward
        layer.mlp.forward = lambda hidden, mlp=layer.mlp: (
            mlp.gate(hidden), mlp.experts(hidden.flatten(0, 1), *mlp.chosen).view(hidden.shape))[1]
    def counts():
        with torch.no_grad(), picked(model) as went: model(b.tokens[:1, :b.lengths[0]])
        return torch.stack([x.sum(0) for x in went])
    assert_close(counts(), want[0])
    for layer in model.model.layers[1:]:
        layer.mlp.forward = lambda hidden, mlp=layer.mlp: (mlp.gate(hidden), hidden)[1]
        layer.mlp.gate.forward = lambda hidden, gate=layer.mlp.gate: (
            torch.nn.functional.linear(hidden.flatten(0, 1), gate.weight), None, None)
    with pytest.raises(ValueError,
                       match="DeepseekV3TopkRouter of DeepseekV3ForCausalLM does not pick by its scores alone "
                       r"\(gate.e_score_correction_bias, num_group\), and not by topk"):
        counts()
    for gate in gates:
        del gate._buffers["e_score_correction_bias"]
        gate.num_group = 1
    assert counts().sum() == 2*2*b.lengths[0]


def test_what_is_refused():
    b = batch()
    with pytest.raises(ValueError, match="LlamaForCausalLM declares no routers"):
        Policy(tiny.model()).step(b, loss, router_logits=True)
    with pytest.raises(AttributeError, match="router_logits=True"):
        Policy(net("mixtral")).step(b, lambda out, b: (out.router_logits.sum(), {}))
    with pytest.raises(ValueError, match="does not say how many experts"): experts_per_token(tiny.model())
    with pytest.raises(ValueError, match="layers have unlike scores"):
        router_columns([torch.zeros(4, 2), torch.zeros(4, 3)], torch.tensor([4]), 4)
    assert routers_of(tiny.model()) == []


def jittered(sampler):
    "The sampler's routers pick by shifted scores, and weigh experts by the true ones."
    g = torch.Generator().manual_seed(0)
    for router, _ in routers_of(sampler.module):
        shift = .3*torch.rand(len(router.weight), generator=g)
        def forward(hidden, router=router, shift=shift):
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            p = logits.softmax(-1)
            ids = torch.topk(p + shift, router.top_k).indices
            values = p.gather(-1, ids)
            if getattr(router, "norm_topk_prob", True): values = values/values.sum(-1, keepdim=True)
            return logits, values, ids
        router.forward = forward
    return sampler


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_first_ratio_is_one_where_experts_are_replayed(kind, cached):
    "R3: a sampler that routes otherwise is off by what other experts compute; with its experts replayed it is not."
    net = tiny.model(kind)
    with torch.no_grad():
        for w in net.parameters(): w *= 4 if w.dim() > 1 else 1
    rollout = Rollout(net, max_tokens=10, device="cpu")
    jittered(rollout.sampler)
    if not cached: rollout.sampler.cached = rollout.sampler.shared = False
    b = rollout.generate(tiny.prompts(), group_size=6, seed=1, experts=True)
    known = torch.arange(b.tokens.shape[1]) < b.lengths[:, None] - 1
    assert b.experts.shape[2:] == (2, 2) and ((b.experts >= 0).all((2, 3)) == known).all()
    assert ((b.experts < 0).all((2, 3)) == ~known).all()
    for pack in (None, False):
        policy = Policy(net, lr=1e-2, device="cpu", pack=pack, micro_rows=5)
        off = (policy.logprobs(b.drop("experts")) - b.rollout_logprobs)[b.mask].abs()
        assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 2e-4 and off.max() > .05
    seen = []
    def loss(out, part):
        seen.append((out.logprobs.detach() - part.rollout_logprobs)[part.mask].abs().max())
        return -masked_mean(out.logprobs, part.mask, denom=part), {}
    policy.step(b, loss)
    assert seen[0] < 2e-4       # calls after it are the check that the loss adds up, of disturbed outputs
    joined = Batch.cat([b[:3], b[3:]])
    assert joined.experts.equal(b.experts)


def test_experts_are_not_replayed_where_layers_run_twice():
    net = tiny.model("mixtral")
    b = Rollout(net, max_tokens=4, device="cpu").generate(tiny.prompts(), experts=True)
    policy = Policy(net, device="cpu", engine=plain(checkpointing=True))
    with pytest.raises(ValueError, match="experts are not replayed where layers are computed twice"):
        policy.step(b, lambda out, part: (-masked_mean(out.logprobs, part.mask, denom=part), {}))
    with pytest.raises(ValueError, match="LlamaForCausalLM declares no routers"):
        Rollout(tiny.model(), max_tokens=4, device="cpu").generate(tiny.prompts(), experts=True)


def test_hooks_are_registered_once_and_silent_outside():
    "Passes add none; a router that raises leaves no mode behind; and none of it works outside the block."
    model, ids = net("mixtral"), torch.arange(12).view(1, 12)
    routers = [m for m, _ in routers_of(model)]
    def hooks(): return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in routers]
    with torch.no_grad():
        with routed(model) as seen: model(ids)
        once = hooks()
        for _ in range(3):
            with picked(model) as went, routing(model) as experts:
                assert hooks() == once
                model(ids)
        assert len(seen) == len(went) == len(experts) == 2
        broken = routers[1].register_forward_pre_hook(lambda module, args: (None,))
        with pytest.raises(Exception), routing(model) as noted: model(ids) # noqa: B017
        broken.remove()
        assert not torch.overrides._get_current_function_mode_stack() and len(noted) == 1
        model(ids)
        assert len(seen) == len(experts) == 2
