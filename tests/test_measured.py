"""What a loss makes of whole distributions comes straight from the head, with the value and gradient of logits in
full (LAWS 8, 12)."""
from functools import partial

import pytest
import tiny
import torch
from rlblocks import (Batch, Policy, entropy, full_kl, gather_logprobs, jsd, linear_logprobs, linear_measured,
                      masked_mean, reverse_kl_loss)
from rlblocks.arithmetic.head import CHUNKS
from rlblocks.models.head import Head, as_head
from rlblocks.engines.engine import EngineSpec
from rlblocks.engines.optimizers import adamw
from test_reader import KINDS, Widest
from test_reader import model as reader_model
from torch.testing import assert_close


def teacher(dtype=torch.float64):
    "Wider than the student, and of firm opinions."
    net = tiny.model(hidden_size=64, dtype=dtype, seed=9)
    with torch.no_grad(): net.get_output_embeddings().weight.mul_(20)
    return Policy(net, frozen=True, device="cpu")


def batch(T=None, B=6):
    b = tiny.rows(B=B, T=14)
    b["temperature"] = torch.linspace(.5, 1.5, B).double()
    if T: b["teacher_hidden"], b["teacher_logits"] = T.hidden(b), T.measure(b, lambda z: z)
    return b


def divergence(head, beta):
    return lambda logits, teacher_hidden, temperature: jsd(logits, head(teacher_hidden, temperature=temperature),
                                                           beta=beta)
def straight(out, b): return masked_mean(out.measured, b.mask, denom=b.n_tokens), {}
def in_full(out, b, beta):
    return masked_mean(jsd(out.logits, b.teacher_logits, mask=b.mask, beta=beta), b.mask, denom=b.n_tokens), {}


def gradient(net, b, loss, **asked):
    how = {k: asked.pop(k) for k in ("pack", "micro_rows", "lora") if k in asked}
    policy = Policy(net, device="cpu", optimizer=adamw(max_norm=None), **how)
    found = tiny.gradients(policy)
    return policy.step(b, loss, **asked), found


@pytest.mark.parametrize("beta, kind", enumerate(KINDS))
def test_the_gradient_is_that_of_logits_in_full(kind, beta):
    """Softcap, scale, tied and untied heads, mixtures of experts; a temperature a row; float64 through the models'
    float32 norms."""
    T, net, beta = teacher(), reader_model(kind), beta % 3/2
    if kind == "qwen3_moe": net.set_experts_implementation("eager")     # the grouped product knows no float64
    b = batch(T, B=6)
    one, g = gradient(net.double(), b, straight, measure=divergence(T.head(), beta))
    other, h = gradient(net, b, partial(in_full, beta=beta), logits=True)
    assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-7)
    assert tiny.apart(g, h) < 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_however_the_step_is_cut(tied):
    T = teacher()
    b, net = batch(T, B=8), tiny.model(dtype=torch.float64, tie_word_embeddings=tied)
    _, want = gradient(net, b, partial(in_full, beta=1.), logits=True, pack=False)
    assert ("trunk.lm_head.weight" in want) != tied
    for packed, micro in ((False, 1), (False, 16), (True, 2), (True, 16)):
        _, found = gradient(net, b, straight, measure=divergence(T.head(), 1.), pack=packed, micro_rows=micro)
        assert tiny.apart(found, want) < 1e-6


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["q_proj"]])
def test_adapters(targets):
    "On the head, and beside a frozen head: there the gradient is made in the forward pass."
    pytest.importorskip("peft")
    T = teacher(torch.float32)
    b, net = batch(T), tiny.model()
    def run(loss, **asked):
        policy = Policy(net, lora=dict(r=3, lora_alpha=12, target_modules=targets), device="cpu",
                        optimizer=adamw(lr=1e-2, max_norm=None))
        for name, p in policy._run.module.named_parameters():
            if "lora_B" in name: torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(len(name)))
        found = tiny.gradients(policy)
        policy.step(b, loss, **asked)
        return found
    want, found = run(partial(in_full, beta=1.), logits=True), run(straight, measure=divergence(T.head(), 1.))
    assert any("lm_head" in n for n in want) == (len(targets) == 2)
    assert tiny.apart(found, want) < 2e-5


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_are_the_whole(dtype, learns):
    g = torch.Generator().manual_seed(0)
    h, W, b, ht, Wt = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype)
                       for s in ((37, 8), (50, 8), (50,), (37, 24), (50, 24)))
    leaves = [x.requires_grad_() for x in ((h, W, b) if learns else (h,))]
    def measure(z, ht): return jsd(z, ht@Wt.T, beta=.3)
    far = 2*tiny.bound(8 + 24 + 50, (ht@Wt.T).abs().max(), dtype)       # scores of 8 and of 24 terms, sums over 50 ids
    whole = measure(4*torch.tanh((h@W.T + b)/4)/.7, ht)
    want = torch.autograd.grad(whole.cos().sum(), leaves)
    for chunk in (1, 5, 36, 37, 100):
        found = linear_measured(h, W, measure, ht, bias=b, softcap=4., temperature=.7, chunk=chunk)
        assert_close(found, whole, atol=far, rtol=far)
        for x, y in zip(torch.autograd.grad(found.cos().sum(), leaves), want, strict=True):
            assert (x-y).abs().max() <= far*max(1., float(y.abs().max()))


def test_half_precision_is_measured_and_summed_in_float32():
    g = torch.Generator().manual_seed(0)
    h, W = (torch.randn(*s, generator=g).bfloat16().requires_grad_() for s in ((64, 16), (40, 16)))
    seen = []
    def measure(z): return (seen.append(z.dtype), entropy(z))[1]
    found = linear_measured(h, W, measure, chunk=8)
    assert found.dtype == torch.float32 and set(seen) == {torch.float32}
    many, one = (torch.autograd.grad(linear_measured(h, W, entropy, chunk=n).sum(), W)[0].float() for n in (1, 64))
    assert (many-one).abs().max() <= .02*one.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        # an inner product that autocast would turn to half precision, in the forward pass only
        def product(z, t): return jsd(z, t@torch.ones(16, 40), beta=1.)
        found = linear_measured(h.float().detach().requires_grad_(), W.float(), product, h.detach().float())
    # scores rounded to bfloat16
    assert_close(found, full_kl((h.float()@W.float().T), h.float()@torch.ones(16, 40)), rtol=0,
                 atol=torch.finfo(torch.bfloat16).eps*float((h@W.T).abs().max()))


@pytest.mark.parametrize("learns", [True, False])
def test_no_logits_are_held(learns):
    """Nothing that any operation makes, forward or backward, is larger than a chunk of logits; nothing of their size
    waits for the backward pass."""
    V, n = 20_000, 2*CHUNKS["cpu"]
    h, W, ht, Wt = (torch.randn(n, 8, requires_grad=True), torch.randn(V, 8, requires_grad=learns), torch.randn(n, 16),
                    torch.randn(V, 16))
    with Widest() as seen:
        found = linear_measured(h, W, lambda z, ht: jsd(z, ht@Wt.T), ht)
        waiting = max(x.numel() for x in found.grad_fn.saved_tensors if x is not None)
        found.sum().backward()
    assert seen.numel <= CHUNKS["cpu"]*V and waiting == (V*8 if learns else n*8)


def test_a_measure_may_give_several_numbers_and_read_any_column():
    T = teacher()
    b, policy = batch(T), Policy(tiny.model(dtype=torch.float64), device="cpu")
    head = T.head()
    def both(logits, tokens, teacher_hidden, temperature):
        return torch.stack([gather_logprobs(logits, tokens),
                            jsd(logits, head(teacher_hidden, temperature=temperature), beta=1.)], -1)
    found = policy.measure(b, both)
    assert_close(found[..., 0], policy.logprobs(b))
    assert_close(found[..., 1][b.mask], policy.measure(b, divergence(head, 1.))[b.mask])
    def loss(out, b):
        lp, kl = out.measured.unbind(-1)
        return masked_mean(kl - lp, b.mask, denom=b.n_tokens), {}
    assert float(policy.step(b, loss, measure=both)["loss"]) == pytest.approx(
        float((found[..., 1] - found[..., 0])[b.mask].mean()), rel=1e-6)
    assert_close(policy.measure(b, lambda logits, row: row + 0*logits[:, 0]).long()[b.mask],
                 b.row[:, None].expand(b.mask.shape)[b.mask])


def test_what_stands_under_no_mask_has_no_gradient():
    "A filler's column may hold anything; the head's too."
    T = teacher()
    b = batch(T)
    b["teacher_hidden"] = torch.where(b.mask[..., None], b.teacher_hidden, torch.nan)
    net = tiny.model(dtype=torch.float64)
    metrics, found = gradient(net, b, straight, measure=divergence(T.head(), 1.))
    assert all(g.isfinite().all() for g in found.values()) and float(metrics["skipped"]) == 0


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_a_head_makes_the_logits_of_its_model(kind):
    policy, b = Policy(reader_model(kind), frozen=True), batch()
    head, z = policy.head(), policy.measure(b, lambda z: z)
    assert_close(head(policy.hidden(b), temperature=b.temperature[:, None].expand(b.mask.shape))[b.mask], z[b.mask],
                 atol=1e-5, rtol=1e-5, check_dtype=False)
    # frozen: no copy
    assert head.weight.data_ptr() == policy._run.module.trunk.get_output_embeddings().weight.data_ptr()
    learning = Policy(reader_model(kind), lr=1e-2)
    head = learning.head()
    before = head.weight.clone()
    learning.step(b, lambda out, b: (out.logprobs.sum()/b.n_tokens, {}))
    assert head.weight.equal(before) and not learning.head().weight.equal(before)


def test_a_student_learns_from_a_wider_teacher():
    T = teacher(torch.float32)
    b, student = batch(T), Policy(tiny.model(seed=1), lr=1e-2)
    kl = [float(student.step(b, straight, measure=divergence(T.head(), 0.))["loss"]) for _ in range(25)]
    # 0.03, 0.06, 0.05, 0.04, 0.03 of it for seeds 0 to 4; seed 0 on two threads the same
    assert kl[-1] < .5*kl[0]


def test_what_is_refused():
    b, policy = batch(), Policy(tiny.model())
    with pytest.raises(ValueError, match="Policy: measure takes 'teacher_hidden', and the batch has no such column"):
        policy.step(b, straight, measure=divergence(None, 1.))
    with pytest.raises(ValueError, match="measure= and entropy=True"):
        policy.step(b, straight, measure=entropy, entropy=True)
    with pytest.raises(ValueError, match=r"measure gave \[\] for logits"):
        policy.step(b, straight, measure=lambda z: z.sum())
    with pytest.raises(ValueError, match="does not depend on the logits"):
        policy.step(b, straight, measure=lambda z: z.detach()[:, 0])
    with pytest.raises(AttributeError, match="step\\(batch, loss, measure=f\\)"): policy.step(b, straight)
    with pytest.raises(ValueError, match="this layer takes 32 numbers"): policy.head()(torch.zeros(3, 8))
    with pytest.raises(TypeError, match="no output layer"): as_head(torch.nn.Linear(2, 2), "cpu", None)
    for f in (lambda h, W: linear_measured(h, W, entropy),
              lambda h, W: linear_logprobs(h, W, torch.zeros(h.shape[:-1]).long())):
        with pytest.raises(ValueError, match=r"hidden is \[2, 3, 4\], wanted \[N, H\]"):
            f(torch.zeros(2, 3, 4), torch.zeros(5, 4))
        with pytest.raises(ValueError, match=r"weight is \[4, 5\], hidden is \[3, 4\]; weight is \[V, H\]"):
            f(torch.zeros(3, 4), torch.zeros(4, 5))
    assert policy.version == 0 and repr(Head(torch.zeros(5, 3))) == "Head(3 → 5)"
    # keyword-only parameters are no columns
    assert_close(Policy(tiny.model()).measure(b, entropy), policy.measure(b, entropy))


class Odd(torch.nn.Linear): "A layer that is no plain matrix to anyone."


class Bare(torch.nn.Module):
    "Logits, and no output layer by name."
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.enter, self.leave = torch.nn.Embedding(32, 16, dtype=dtype), torch.nn.Linear(16, 32, dtype=dtype)
    def forward(self, ids): return self.leave(self.enter(ids).cumsum(1))


def odd():
    net, layer = tiny.model(), Odd(32, 32, bias=False)
    layer.weight = net.get_output_embeddings().weight
    net.set_output_embeddings(layer)
    return net


# who makes the logits: linear_measured, a layer of its own kind, the model as a whole
PATHS = dict(matrix=tiny.model, layer=odd, model=Bare)
LEARNED = torch.tensor(2., requires_grad=True)
REFUSED = dict(one_for_all=(lambda z: z.mean(), r"measure gave \[\] for logits \[\d+, 32\]"),
               number=(lambda z: 1., "measure gave a float for"), few=(lambda z: z[:2, 0], r"measure gave \[2\] for"),
               whole_numbers=(lambda z: z.argmax(-1),
                              "measure gave torch.int64, which has no gradient; find it before the step"),
               constant=(lambda z: torch.ones(len(z)), "does not depend on the logits"),
               in_place=(lambda z: z.mul_(2).logsumexp(-1), r"use z\*2, not z.mul_\(2\)"),
               column_in_place=(lambda z, weight: z.logsumexp(-1)*weight.mul_(2), r"use z\*2, not z.mul_\(2\)"),
               learned=(lambda z: (z*LEARNED).logsumexp(-1), "something else that wants a gradient"))


@pytest.mark.parametrize("path", PATHS)
def test_a_measure_is_held_to_the_same_on_every_path(path):
    policy, b = Policy(PATHS[path](), device="cpu"), tiny.rows(B=4, T=12)
    b["weight"] = torch.rand(4, 12)
    assert (policy._run.layout.transform is None) == (path == "model")
    for measure, said in REFUSED.values():
        with pytest.raises(ValueError, match=said): policy.step(b, straight, measure=measure)
    for name in ("one_for_all", "number", "few", "in_place", "column_in_place"):
        with pytest.raises(ValueError, match=REFUSED[name][1]): policy.measure(b, REFUSED[name][0])
    # without gradient it may be anything
    assert policy.version == 0 and policy.measure(b, lambda z: z.argmax(-1)).dtype == torch.int64
    b["weight"].requires_grad_()
    with pytest.raises(ValueError, match="column 0, .* wants a gradient"):
        policy.step(b, straight, measure=lambda z, weight: z.logsumexp(-1)*weight)
    assert policy.measure(b, lambda z, weight: z.logsumexp(-1)*weight).shape == (4, 12)
    assert b.weight.detach().le(1).all() and LEARNED.grad is None


@pytest.mark.parametrize("path", PATHS)
def test_a_measure_sees_full_precision_on_every_path(path):
    "Its own products too, forward and backward: autocast is off while it is asked."
    policy, b, seen = Policy(PATHS[path](), device="cpu",
                             engine=EngineSpec(dtype=torch.bfloat16)), tiny.rows(B=4, T=12), []
    def product(z):
        p = z@torch.ones(32, 2)
        seen.extend([z.dtype, p.dtype, torch.is_autocast_enabled("cpu")])
        return p[:, 0]
    policy.measure(b, product)
    policy.step(b, straight, measure=product)
    assert len(seen) >= 6 and set(seen) == {torch.float32, False}


@pytest.mark.parametrize("learns", [True, False])
def test_a_frozen_head_is_no_way_around(learns):
    "There the gradient is made in the forward pass."
    h, W = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=learns)
    for measure, said in (v for k, v in REFUSED.items() if k not in ("whole_numbers", "column_in_place", "few")):
        with pytest.raises(ValueError, match=said.replace("32", "7")): linear_measured(h, W, measure).sum().backward()
    with pytest.raises(ValueError, match="column 0, .* wants a gradient"):
        linear_measured(h, W, lambda z, x: z[:, 0]*x, h[:, 0])
    # tensors that count no writes
    with torch.inference_mode(): assert linear_measured(h, W, lambda z, x: z[:, 0]*x, torch.ones(5)).shape == (5,)
    assert h.grad is None and W.grad is None


def test_the_loss_on_logits_is_the_same_number():
    T = teacher()
    b, policy = batch(T), Policy(tiny.model(dtype=torch.float64))
    found = policy.measure(b, divergence(T.head(), 1.))
    out = tiny.read(policy, b, logits=True)
    assert_close(masked_mean(found, b.mask), reverse_kl_loss(out.logits, b.teacher_logits, b.mask)[0].detach(),
                 rtol=1e-7, atol=0)
    assert isinstance(b, Batch)


def test_a_measure_stands_for_all_that_is_read_of_the_logits():
    seen = []
    def loss(out, b):
        seen.append(sorted(dict(out.items())))
        return out.measured.sum()/b.n_tokens, {}
    for head in (True, False):          # straight from the head; from whole logits
        policy = Policy(tiny.model("llama"), lr=0., device="cpu")
        if not head: tiny.laid_out(policy, transform=None)
        policy.step(batch(), loss, measure=lambda z: z.logsumexp(-1))
    assert seen and all(x == ["measured"] for x in seen), seen
