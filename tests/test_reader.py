"Log-probs without logits: what runs in the output layer's place gives what the logits give (LAWS 8, 12)."
import math

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rlblocks import Batch, Critic, Policy, Rollout, Scorer, aggregate, entropy, forward_kl_loss
from rlblocks.arithmetic.head import CHUNKS
from rlblocks.models.head import logit_transform
from rlblocks.models.forward import Forward
from rlblocks.models.probes import look_ahead, pack_by
from rlblocks.engines.engine import EngineSpec

KINDS = dict(llama={}, qwen2={}, qwen3={}, mistral={}, gemma={}, gemma2=dict(final_logit_softcapping=3.),
             granite=dict(logits_scaling=8.), cohere=dict(logit_scale=.0625), gpt2={}, qwen3_moe={})


def model(kind):
    import transformers as tf
    common = tiny.SIZES | dict(eos_token_id=1, pad_token_id=0, attn_implementation="eager") | KINDS[kind]
    names = dict(gemma2=("Gemma2", dict(head_dim=8)), granite=("Granite", {}), cohere=("Cohere", {}), gpt2=("GPT2", {}),
                 qwen3_moe=("Qwen3Moe", dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                             decoder_sparse_step=1)))
    if kind not in names: return tiny.model(kind)
    name, extra = names[kind]
    if kind == "gpt2":
        common = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1, bos_token_id=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = getattr(tf, f"{name}{'LMHeadModel' if kind == 'gpt2' else 'ForCausalLM'}")(
            getattr(tf, f"{name}Config")(**common | extra))
    with torch.no_grad(): net.get_output_embeddings().weight.mul_(20) # logits far enough from 0 for a cap to bend them
    return net


def batch():
    b = tiny.rows(B=6, T=12)
    b["temperature"] = torch.tensor([1., .7, 1.3, 1., .5, 1.])
    return b


def read(policy, b):
    policy._run.module.zero_grad()
    out = tiny.read(policy, b, entropy=True)
    (out.logprobs.cos() + .3*out.entropy).sum().backward()
    return [out.logprobs.detach(), out.entropy.detach(), *(p.grad for p in policy._run.module.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_read_straight_gives_what_the_logits_give(kind):
    policy = Policy(model(kind), lr=0.)
    k, c = policy._run.layout.transform
    assert (k, c) == (pytest.approx(KINDS[kind].get("logit_scale", 1/KINDS[kind].get("logits_scaling", 1.)), rel=1e-5),
                      KINDS[kind].get("final_logit_softcapping"))
    straight = read(policy, batch())
    tiny.laid_out(policy, transform=None)
    for x, y in zip(straight, read(policy, batch()), strict=True):
        assert_close(x, y, atol=tiny.APART*max(1., float(y.abs().max())), rtol=0)
    if c: assert policy._run.module.trunk(batch().tokens).logits.abs().max() > .5*c # the cap was felt


def test_absolute_golden(): # LAWS 8: parity alone would let both be wrong
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Embedding(3, 1), nn.Linear(1, 3, bias=False)
            with torch.no_grad():
                self.body.weight.fill_(1.), self.head.weight.copy_(torch.tensor([[1.], [2.], [5.]]).log())
        def get_output_embeddings(self): return self.head
        def forward(self, tokens): return self.head(self.body(tokens))
    policy = Policy(Fixed)
    b = Batch(tokens=torch.tensor([[0, 1, 2, 0]]*2), mask=torch.tensor([[False, True, True, False]]*2),
              lengths=torch.tensor([3, 3]))
    assert policy._run.layout.transform == (1., None)
    assert_close(policy.logprobs(b).exp(), torch.tensor([[1., .25, .625, 1.]]*2)) # 0 where nothing was chosen
    out = tiny.read(policy, b, entropy=True)
    aggregate(-out.logprobs, b.mask).backward()
    H = -sum(p*math.log(p) for p in (.125, .25, .625))
    assert_close(out.entropy[0, 1].item(), H, atol=1e-6, rtol=0)
    # p − share of the targets: ⅛−0, ¼−½, ⅝−½
    assert_close(policy._run.module.trunk.head.weight.grad.flatten(), torch.tensor([.125, -.25, .125]))


class Squared(nn.Module):
    "A trunk that bends its logits in a way nobody knows."
    def __init__(self, f):
        super().__init__()
        self.body, self.head, self.f = nn.Embedding(8, 4), nn.Linear(4, 8), f
    def get_output_embeddings(self): return self.head
    def forward(self, tokens): return self.f(self.head(self.body(tokens)))


@pytest.mark.parametrize(
    "f, transform", [
        (lambda z: z, (1., None)), (lambda z: z/4, (.25, None)), (lambda z: 30*torch.tanh(z/30), (1., 30.)),
        (lambda z: 5*torch.tanh(.5*z/5), (.5, 5.)), (lambda z: z*z.abs(), None), (lambda z: z + 1, None),
        (lambda z: z.clamp(-10, 10), None), (lambda z: z.log_softmax(-1), None), (lambda z: -z, (-1., None))])
def test_an_unknown_transform_is_read_from_logits(f, transform):
    found = logit_transform(Squared(f), "cpu")
    assert found == transform if transform is None else found == pytest.approx(transform)
    x = torch.zeros(1, 3, dtype=torch.long)
    net = Squared(f)
    assert logit_transform(net, "cpu") is None or "forward" not in vars(net.head)
    assert_close(net(x), f(net.head(net.body(x)))) # nothing is left behind


def test_a_head_that_is_no_bare_matrix_is_read_from_logits():
    net = Squared(lambda z: z)
    net.head = nn.Sequential(nn.Linear(4, 8))
    assert logit_transform(net, "cpu") is None


class Widest(TorchDispatchMode):
    numel = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(x.numel() for x in (out if isinstance(out, tuple | list) else [out])
                                        if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("head", [False, True])
def test_no_logits_are_held(head):
    policy = Policy(tiny.model(vocab_size=20_000), value_head=head)
    b = tiny.rows(B=120, T=40)
    assert b.n_tokens > 2*CHUNKS["cpu"]     # places that are read at a time
    with Widest() as seen: tiny.read(policy, b, entropy=True).logprobs.sum().backward()
    assert seen.numel <= CHUNKS["cpu"]*20_000
    tiny.laid_out(policy, transform=None)
    with Widest() as seen: tiny.read(policy, b, entropy=True)
    assert seen.numel >= b.n_tokens*20_000


# -- what a loss or an estimator may want to know of the whole distribution

@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_measure_sees_the_distribution_that_was_sampled_from(kind):
    policy, b = Policy(model(kind)), batch()
    out = tiny.read(policy, b, entropy=True, logits=True)
    z = out.logits.detach()
    assert z.shape == (*b.mask.shape, 32) and (z[~b.mask] == 0).all()
    for transform in (policy._run.layout.transform, None):
        tiny.laid_out(policy, transform=transform)
        assert_close(policy.measure(b, entropy), torch.where(b.mask, out.entropy.detach(), 0.))
        squares = policy.measure(b, lambda z: (2*z.log_softmax(-1)).logsumexp(-1))
        assert_close(squares[b.mask], z.softmax(-1).square().sum(-1).log()[b.mask], atol=1e-5, rtol=1e-5)
        top = policy.measure(b, lambda z: z.topk(3).indices)
        assert top.dtype == torch.int64 and top.shape == (*b.mask.shape, 3)
        assert top[b.mask].equal(z.topk(3).indices[b.mask])


def test_measure_replays_a_support():
    policy, b = Policy(model("llama")), batch()
    b["top_k"], b["support"] = torch.full((len(b),), 2), torch.stack([b.tokens, (b.tokens + 1) % 32], -1)
    assert_close(policy.measure(b, lambda z: z.isfinite().sum(-1))[b.mask], torch.full((b.n_tokens,), 2))


def test_a_student_learns_from_full_logits_however_the_step_is_cut():
    teacher, b = Policy(model("llama"), frozen=True), tiny.rows(B=6, T=12)
    b["teacher_logits"] = teacher.measure(b, lambda z: z)
    def loss(out, b): return forward_kl_loss(out.logits, b.teacher_logits, b.mask, denom=b.n_tokens)
    weights = []
    for rows in (1, 6):
        student = Policy(tiny.model("llama", seed=1), optimizer=tiny.steady(1e-2), micro_rows=rows)
        found = [student.step(b, loss, logits=True) for _ in range(5)]
        weights.append(torch.cat([p.detach().flatten() for p in student._run.module.parameters()]))
    assert_close(*weights, atol=tiny.NEAR*1e-2, rtol=0)
    # 0.17, 0.17, 0.19, 0.13, 0.22 of it for seeds 0 to 4; seed 0 on two threads the same
    assert float(found[-1]["loss"]) < .8*float(found[0]["loss"])
    with pytest.raises(AttributeError, match="logits=True"): Policy(tiny.model("llama")).step(b, loss)


# -- what stands behind a token says nothing about it

SMALL = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
             initializer_range=.15)
ROPES = dict(longrope=dict(rope_type="longrope", factor=4., rope_theta=1e4, short_factor=[1.]*4,
                           long_factor=[4., 3., 2., 2.], original_max_position_embeddings=4),
             dynamic=dict(rope_type="dynamic", factor=4., rope_theta=1e4))


def made(name, config):
    import transformers as tf
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(tf, name)(config(tf)).eval()


class Row(nn.Module):
    "Gives every token something of its row: hidden states, or logits."
    def __init__(self, of, logits=True):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.at, self.out, self.of = (nn.Embedding(32, 8), nn.Embedding(32, 8),
                                                nn.Linear(8, 32) if logits else nn.Identity(), of)
    def forward(self, tokens):
        x, T = self.emb(tokens), tokens.shape[1]
        return self.out(dict(mean=lambda: x + x.mean(1, keepdim=True), next=lambda: x + x.roll(-1, 1),
                             end=lambda: x + self.at(torch.arange(T).flip(0)), causal=lambda: x.cumsum(1))[self.of]())


NOT_CAUSAL = dict(
    bert=(lambda: made("BertLMHeadModel", lambda tf: tf.BertConfig(**SMALL)),
          "looks ahead.*load it with is_decoder=True"),
    electra=(lambda: made("ElectraForCausalLM", lambda tf: tf.ElectraConfig(**SMALL, embedding_size=32)),
             "looks ahead.*load it with is_decoder=True"),
    xlm=(lambda: made("XLMWithLMHeadModel", lambda tf: tf.XLMConfig(vocab_size=32, emb_dim=32, n_layers=2, n_heads=4,
                                                                    init_std=.15, embed_init_std=.15)),
         "looks ahead.*load it with causal=True"),
    xlnet=(lambda: made("XLNetLMHeadModel", lambda tf: tf.XLNetConfig(
        vocab_size=32, d_model=32, n_layer=2, n_head=4, d_inner=64, initializer_range=.15)), "looks ahead"),
    modernbert=(lambda: made("ModernBertForMaskedLM", lambda tf: tf.ModernBertConfig(
        **SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1)), "looks ahead"),
    mean=(lambda: Row("mean"), "Row looks ahead"), next=(lambda: Row("next"), "Row looks ahead"),
    end=(lambda: Row("end"), "Row reads its padding"))


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_model_that_is_not_causal_is_refused(name):
    """Its log-probs would be of another distribution than it samples from, and a row's would change with the rows
    beside it."""
    make, words = NOT_CAUSAL[name]
    net = make()
    for Wrapper in (Policy, Critic, Scorer, Rollout):
        if hasattr(net, "config") or Wrapper in (Policy, Rollout):
            with pytest.raises(ValueError, match=f"{Wrapper.__name__}: .*{words}"): Wrapper(net, device="cpu")
    if not hasattr(net, "config"):
        with pytest.raises(ValueError, match=f"Critic: {words}"): Critic(Row(name, logits=False), device="cpu")
    for how in (dict(pack=False), dict(frozen=True, engine=EngineSpec(dtype=torch.bfloat16))):
        with pytest.raises(ValueError, match=words): Policy(net, device="cpu", **how)


CAUSAL = {kind: (lambda kind=kind: tiny.model(kind))
          for kind in tiny.KINDS} | {f"{kind}_in_half": (lambda kind=kind: tiny.model(kind, torch.bfloat16))
                                     for kind in ("llama", "gemma3", "qwen3_moe", "gpt2")} | dict(
    mamba=lambda: made("MambaForCausalLM",
                       lambda tf: tf.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8)),
    recurrent=lambda: made("RecurrentGemmaForCausalLM", lambda tf: tf.RecurrentGemmaConfig(
    **tiny.SIZES | dict(num_hidden_layers=3, lru_width=32, attention_window_size=8))),
    bloom=lambda: made("BloomForCausalLM",
                       lambda tf: tf.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4)),
    bert_decoder=lambda: made("BertLMHeadModel", lambda tf: tf.BertConfig(**SMALL, is_decoder=True)),
    roberta_decoder=lambda: made("RobertaForCausalLM", lambda tf: tf.RobertaConfig(**SMALL, is_decoder=True)),
    longrope=lambda: tiny.model(rope_parameters=ROPES["longrope"]),
    dynamic=lambda: tiny.model(rope_parameters=ROPES["dynamic"], max_position_embeddings=5),
    five_positions=lambda: tiny.model("gpt2", n_positions=5), two_words=lambda: tiny.model(vocab_size=2),
    own=lambda: Row("causal"))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_is_never_refused(name):
    net = Forward(CAUSAL[name]().eval())
    pack_by(net, torch.device("cpu"))
    assert look_ahead(net, torch.device("cpu")) == ""


def test_places_of_images_are_no_words():
    "Ids that a model reads as something else than text are not asked about."
    net = tiny.model()
    net.config.image_token_id, net.config.video_token_id = 3, 5
    seen = []
    net.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    # 1 ends a row
    assert look_ahead(Forward(net), "cpu") == ""
    assert not {3, 5, 1} & set(torch.cat([x.flatten() for x in seen]).tolist())
