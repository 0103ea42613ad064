"""An output layer with adapters is read straight, or from its logits where it cannot be: the numbers are the same
(LAWS 8, 12)."""
from functools import partial
from unittest import mock

import pytest
import tiny
import torch
from conftest import skip_without
from lazily import Lazily
from rlblocks import linear_logprobs
from rlblocks.arithmetic.head import CHUNKS
from rlblocks.models import head
from rlblocks.engines.engine import output_layer
from rlblocks.models.head import logit_transform, head_logprobs, head_measured, matrix_of
from rlblocks.models import forward as forward_module
from rlblocks.models.forward import Forward, Layout, Places, OutputRequest
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

skip_without("peft")
peft = Lazily("peft")
WIDE = 400


def model(tied=False, softcap=None, **how):
    "A tiny model with LoRA on its head (and on an attention matrix, so that hidden states have a gradient)."
    kind = dict(final_logit_softcapping=softcap, head_dim=8) if softcap else {}
    import transformers as tf
    net = tiny.model(vocab_size=WIDE,
                     tie_word_embeddings=tied) if not softcap else tf.Gemma2ForCausalLM(tf.Gemma2Config(
        **tiny.SIZES | dict(vocab_size=WIDE, tie_word_embeddings=tied, eos_token_id=1, pad_token_id=0) | kind))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = peft.get_peft_model(net, peft.LoraConfig(**dict(r=3, lora_alpha=12, target_modules=["lm_head", "q_proj"],
                                                              lora_dropout=.1) | how)).double().eval()
        filled(net)
    return net


def filled(net):
    "B is 0 until it has learned; here it has."
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "lora_B" in name: p.normal_()


def read(net, transform):
    "Log-probs, entropy, every gradient, and how often the head was read straight."
    b = tiny.rows(B=6, T=12)
    rows, cols = b.mask.roll(-1, 1).nonzero().unbind(1)
    calls = []
    def counted(*args, **how): calls.append(1); return linear_logprobs(*args, **how)
    with mock.patch.object(head, "linear_logprobs", counted):
        places = Places(rows, cols, targets=b.tokens[rows, cols+1], temperature=torch.linspace(.5, 2, len(rows)))
        forward, layout = Forward(net), Layout(transform=transform)
        out = forward(forward.arrange(b.tokens, b.lengths, places, layout), OutputRequest(entropy=True), layout)
    learning = {n: p for n, p in net.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad((out["logprobs"].cos() + .3*out["entropy"]).sum(), list(learning.values()),
                                allow_unused=True)
    return out["logprobs"].detach(), out["entropy"].detach(), {n: g for n, g in zip(learning, grads, strict=True)
                                                               if g is not None}, len(calls)


def agree(net, adapters, softcap=None):
    "The layer is read straight with so many adapters (None: from logits), and gives what its logits give."
    known = matrix_of(output_layer(net))
    assert (known if known is None else len(known[1])) == adapters
    transform = logit_transform(net, "cpu")
    assert transform == (1., pytest.approx(softcap) if softcap else None)
    straight, plain = read(net, transform), read(net, None)
    for x, y in zip(straight[:2], plain[:2], strict=True): assert_close(x, y, atol=1e-10, rtol=1e-10)
    assert straight[2].keys() == plain[2].keys() and straight[2]
    for name, g in plain[2].items():
        assert_close(straight[2][name], g, atol=1e-10*max(1., float(g.abs().max())), rtol=0)
    assert plain[3] == 0 and straight[3] == (adapters is not None)
    return straight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.])
def test_lora_on_the_head(tied, softcap):
    net = model(tied, softcap)
    lp, _, grads, _ = agree(net, 1, softcap)
    assert any("lm_head" in n and "lora_A" in n and g.abs().max() > 0 for n, g in grads.items())
    with torch.no_grad(): output_layer(net).lora_B["default"].weight.zero_()
    assert (agree(net, 1, softcap)[0] - lp).abs().max() > .01 # the adapter was heard


def test_adapters_are_read_as_they_stand_at_the_moment():
    net = model()
    net.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head"]))
    filled(net)
    one = agree(net, 1)[0]
    net.base_model.set_adapter(["default", "other"])
    two = agree(net, 2)[0]
    net.base_model.set_adapter("other")
    last = agree(net, 1)[0]
    assert min(float((x - y).abs().max()) for x, y in ((one, two), (two, last), (last, one))) > .01
    net.base_model.set_adapter("default")
    with net.disable_adapter():
        for p in net.parameters(): p.requires_grad_(True)
        assert (agree(net, 0)[0] - one).abs().max() > .01
    net.merge_adapter()
    for p in net.parameters(): p.requires_grad_(True)
    assert_close(agree(net, 0)[0], one, atol=1e-5, rtol=1e-5)
    net.unmerge_adapter()
    assert_close(agree(net, 1)[0], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", [dict(use_dora=True), dict(lora_bias=True),
                                 dict(target_modules=["q_proj"], modules_to_save=["lm_head"])])
def test_what_is_not_plain_lora_is_read_from_logits(how):
    "… of some places at a time."
    with mock.patch.object(forward_module, "head_logprobs", partial(head_logprobs, chunk=7)): agree(model(**how), None)


def test_logits_of_all_places_are_never_there_at_once():
    """DoRA: no result of any operation, forward or backward, has more than chunk × V entries, and none so large is
    kept for the backward pass."""
    class Largest(TorchDispatchMode):
        entries = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if isinstance(out, torch.Tensor): self.entries = max(self.entries, out.numel())
            return out
    layer = output_layer(model(use_dora=True))
    hidden, ids = torch.randn(90, 32).double().requires_grad_(), torch.arange(90)
    found = {}
    for chunk in (40, 90):
        kept = []
        def keep(x, kept=kept): kept.append(x.numel()); return x
        with Largest() as seen:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = head_logprobs(layer, hidden, ids, transform=(.5, 3.), entropy=True, chunk=chunk,
                                    temperature=torch.linspace(.5, 2, 90),
                                    support=torch.where(ids[:, None] % 2 == 0, -1, ids[:, None] + torch.arange(4)))
            grads = torch.autograd.grad(out.cos().sum(), [hidden, layer.lora_A["default"].weight])
        assert seen.entries == chunk*WIDE and (max(kept) < 20*WIDE) == (chunk < 90)
        found[chunk] = out, *grads
    for one, other in zip(found[40], found[90], strict=True): assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1., 1/1.005, 1/.99, 1/3, 1/6, 1/13, 1.0001])
def test_a_factor_is_known_to_float32_whatever_the_weights(dtype, k):
    "It divides all logits: an error of it is one of the temperature."
    import transformers as tf
    granite = tf.GraniteForCausalLM(tf.GraniteConfig(**tiny.SIZES | dict(logits_scaling=1/k))).to(dtype)
    found = logit_transform(granite, "cpu")
    assert found == (pytest.approx(k, rel=2e-7), None) and (k != 1 or found[0] == 1)


@pytest.mark.parametrize("c, k", [(.5, 1.), (.5, .3), (30., 1.), (30., 5.)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softcap_and_a_factor_are_told_apart(c, k, dtype):
    class Bent(nn.Module):
        def __init__(self): super().__init__(); self.embed, self.lm_head = nn.Embedding(4, 8), nn.Linear(8, 4)
        def get_output_embeddings(self): return self.lm_head
        def forward(self, ids): return c*torch.tanh(k*self.lm_head(self.embed(ids))/c)
    assert logit_transform(Bent().to(dtype), "cpu") == (pytest.approx(k, rel=1e-6), pytest.approx(c, rel=1e-6))


def test_what_cannot_be_measured_is_not_guessed():
    "Logits that come out in half precision, or bent in another way."
    class Other(nn.Module):
        def __init__(self, after):
            super().__init__(); self.embed, self.lm_head, self.after = nn.Embedding(4, 8), nn.Linear(8, 4), after
        def get_output_embeddings(self): return self.lm_head
        def forward(self, ids): return self.after(self.lm_head(self.embed(ids)))
    assert logit_transform(Other(lambda z: z), "cpu") == (1., None)
    for after in (lambda z: z.bfloat16(), lambda z: z + 1, lambda z: z.clamp(-5, 5), lambda z: -z.abs(),
                  lambda z: z.log_softmax(-1)):
        assert logit_transform(Other(after), "cpu") is None


def test_a_layer_that_changes_gives_its_logits():
    "`logit_transform` saw plain LoRA; then dropout is switched on."
    net = model()
    layer, transform = output_layer(net), logit_transform(net, "cpu")
    hidden, ids = torch.randn(5, 32).double(), torch.arange(5)
    layer.train()
    assert matrix_of(layer) is None and transform == (1., None)
    torch.manual_seed(0)
    found = head_logprobs(layer, hidden, ids, transform=transform, entropy=True, temperature=.7)
    torch.manual_seed(0)
    z = layer(hidden)/.7
    assert_close(found, torch.stack([z.log_softmax(-1)[range(5), ids],
                                     torch.distributions.Categorical(logits=z).entropy()], -1), atol=1e-5, rtol=1e-5)


def test_measure_hears_the_adapter():
    net = model()
    layer, hidden = output_layer(net), torch.randn(5, 32).double()
    assert_close(head_measured(layer, hidden, lambda z: z.logsumexp(-1), transform=(.5, None), chunk=2),
                 (layer(hidden)/2).logsumexp(-1))


def test_a_scaled_layer_with_a_bias(): # the model scales what the layer gives, its bias included
    layer, hidden, ids = nn.Linear(4, 9), torch.randn(3, 4), torch.arange(3)
    assert_close(head_logprobs(layer, hidden, ids, transform=(.25, 2.))[:, 0],
                 (2*torch.tanh(layer(hidden)/4/2)).log_softmax(-1)[range(3), ids])


def test_a_frozen_head_is_multiplied_once_each_way():
    """LoRA elsewhere, nothing on the head: its logits are not computed again; those of a head that learns, but for
    the last chunk (two chunks here)."""
    class Products(TorchDispatchMode):
        count = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_) and any(
                    isinstance(x, torch.Tensor) and WIDE in x.shape for x in args):
                self.count += 1
            return func(*args, **kwargs or {})
    rows = CHUNKS["cpu"] + 1
    for learns, wanted in ((False, 4), (True, 7)):
        layer, hidden = nn.Linear(4, WIDE, bias=False).requires_grad_(learns), torch.randn(rows, 4, requires_grad=True)
        with Products() as seen:
            head_logprobs(layer, hidden, torch.zeros(rows, dtype=torch.long), transform=(1., None)).sum().backward()
        assert seen.count == wanted


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_head_is_read_from_logits(bits):
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(8, 16) if bits == 4 else bnb.nn.Linear8bitLt(8, 16, has_fp16_weights=False)
    assert isinstance(layer, nn.Linear) and matrix_of(layer) is None


def test_a_policy_says_when_it_holds_logits_in_full():
    "LAWS 8: which way was chosen can be seen."
    from rlblocks import Policy
    class Opaque(nn.Module):
        def __init__(self): super().__init__(); self.embed, self.last = nn.Embedding(8, 4), nn.Linear(4, 8)
        def forward(self, ids): return self.last(self.embed(ids))
    assert repr(Policy(Opaque(), device="cpu")).endswith(", version 0, log-probs from logits in full)")
    assert repr(Policy(tiny.model(), device="cpu")).endswith(" rows, version 0)")
