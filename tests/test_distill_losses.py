"""Learning from a teacher, by losses on distributions and by advantages: hand numbers, oracles, limits, enumeration,
laws, compilation and errors."""
import math
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, one_hot, pad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from rlblocks.losses.distill import (
    dft_loss, forward_kl_loss, jsd, jsd_loss, predicting, reverse_kl_loss, sft_loss, support_logprobs, uld_loss,
    with_tail,
)
from rlblocks.arithmetic.kl import full_kl
from rlblocks.arithmetic.head import linear_logprobs
from rlblocks.arithmetic.logprobs import gather_logprobs, token_logprobs
from rlblocks.arithmetic.masked import aggregate
from rlblocks.losses.policy import ppo_loss
from rlblocks.signals.teachers import (distill_advantages, iw_opd_weights, minillm_advantages, realigned,
                                       teacher_mix_weights)
from rlblocks.testing.oracles import naive_aggregate
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns


def columns(seed=0):
    g, cols = torch.Generator().manual_seed(seed), sample_columns(seed=seed)
    z, t = torch.randn(2, 16, 16, 7, generator=g, dtype=torch.float64)
    return cols | dict(logits=z, teacher_logits=t, ids=t.topk(3).indices, teacher_logprobs=cols["ref_logprobs"])


COLS = columns()
TWO = ("logits", "teacher_logits", "mask")


def on_top(logits, ids, teacher_logits, mask, *, of, **kw):
    return of(*(support_logprobs(x, ids, mask) for x in (logits, teacher_logits)), mask, **kw)


LOSSES = {
    "dft": (dft_loss, ("logprobs", "mask")),
    "dft rows": (partial(dft_loss, over="rows"), ("logprobs", "mask")),
    "forward": (forward_kl_loss, TWO),
    "forward rows hot": (partial(forward_kl_loss, over="rows", temperature=3.), TWO),
    "reverse": (reverse_kl_loss, TWO),
    "jsd": (jsd_loss, TWO),
    "jsd .1": (partial(jsd_loss, beta=.1, temperature=.7), TWO),
    "jsd 0": (partial(jsd_loss, beta=0.), TWO),
    "jsd 1": (partial(jsd_loss, beta=1.), TWO),
    "uld": (uld_loss, TWO),
    "forward top": (partial(on_top, of=forward_kl_loss), ("logits", "ids", "teacher_logits", "mask")),
    "reverse top": (partial(on_top, of=reverse_kl_loss), ("logits", "ids", "teacher_logits", "mask")),
    "jsd top": (partial(on_top, of=jsd_loss), ("logits", "ids", "teacher_logits", "mask")),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
OWN = {k: COLS[k] for k in ("logits", "ids", "teacher_logits")}


def arguments(name, dtype=torch.float64, cols=COLS):
    return [cols[k].to(dtype) if cols[k].is_floating_point() else cols[k] for k in LOSSES[name][1]]


# -- laws of all

@pytest.mark.parametrize("name", [name for name in LOSSES if "top" in name])
def test_on_a_support_they_obey_every_law(name): # the laws of the others are in test_laws
    f, (first, *rest) = LOSSES[name][0], arguments(name)
    def stored(logits, ids, teacher_logits, mask, denom=None): # a teacher's logits get no gradient
        return f(logits, ids, teacher_logits.detach(), mask, denom=denom)
    assert {"split", "mask", "empty", "padding", "empty_rows", "gradient", "precision", "metrics"} <= set(
        check_loss(stored, OWN, denom="n_tokens"))
    assert torch.autograd.gradcheck(lambda x: f(x, *(x[8:10] for x in rest))[0], first[8:10].clone().requires_grad_(),
                                    fast_mode=True)
    torch.compiler.reset()
    assert_close(torch.compile(f, fullgraph=True, backend="eager")(first, *rest)[0], f(first, *rest)[0])
    assert f(*(x.to("meta") for x in (first, *rest)))[0].is_meta


@every_loss
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_on_the_way_back(name):
    """Ids that neither can say, and NaN under the mask: autograd's own detector sees no NaN, not even one that a
    later where throws away."""
    f, (first, *rest) = LOSSES[name][0], arguments(name)
    if first.ndim == 3:
        first, rest = pad(first, (0, 1), value=-math.inf), [pad(x, (0, 1), value=-math.inf) if x.shape[2:] == (7,)
                                                            else x for x in rest]
    first = first.masked_fill(~rest[-1].view(16, 16, *[1]*(first.ndim-2)), math.nan).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True): f(first, *rest)[0].backward()
    assert first.grad.isfinite().all() and not first.grad[~rest[-1]].any()


@pytest.mark.parametrize("f", [forward_kl_loss, reverse_kl_loss, jsd_loss], ids=lambda f: f.__name__)
def test_errors_name_the_odd_one(f):
    z, t, mask = arguments("forward")
    with pytest.raises(ValueError, match=rf"{f.__name__}: teacher_logits is \[16, 16, 6\], logits is \[16, 16, 7\]"):
        f(z, t[..., 1:], mask)
    with pytest.raises(ValueError, match=rf"{f.__name__}: logits\[..., 0\] is \[16, 16\], mask is \[16, 15\]"):
        f(z, t, mask[:, 1:])
    with pytest.raises(TypeError, match=rf"{f.__name__}: mask is int64"): f(z, t, mask.long())
    with pytest.raises(ValueError, match=rf"{f.__name__}: temperature is 0.0"): f(z, t, mask, temperature=0.)


def test_beta_is_a_share():
    for beta in (-.1, 1.1):
        with pytest.raises(ValueError, match=f"jsd_loss: beta is {beta}"): jsd_loss(*arguments("jsd"), beta=beta)


# -- SFT and its relatives

def test_chunked_sft_is_sft_in_less_memory():
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.randint(0, 500, (3, 20), generator=g), COLS["mask"][13:, :].repeat(1, 2)[:, :20].clone()
    mask[:, 0] = False
    h, W = (torch.randn(3, 20, 4, generator=g, dtype=torch.float64).requires_grad_(),
            torch.randn(500, 4, generator=g, dtype=torch.float64).requires_grad_())
    def chunked():
        return pad(linear_logprobs(h[:, :-1].flatten(0, 1), W, tokens[:, 1:].flatten(), chunk=7).view(3, 19), (1, 0))
    seen = []
    for make in (lambda: token_logprobs(h@W.T, tokens), chunked):
        for over in ("tokens", "rows"):
            kept = []
            with saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
                loss, metrics = sft_loss(make(), mask, over=over)
            seen.append((loss.detach(), *torch.autograd.grad(loss, [h, W]), float(metrics["nll"]), sum(kept)))
    for a, b in zip(seen[:2], seen[2:], strict=True):
        assert_close(list(a[:3]), list(b[:3]))
        assert a[3] == pytest.approx(b[3]) and a[4] > 60*500 > 10*b[4] - 10*500*4


def test_dft_by_hand():
    lp, on = torch.tensor([[.5, .125, 1.]]).log().requires_grad_(), torch.tensor([[True, True, False]])
    loss, metrics = dft_loss(lp, on)
    loss.backward()
    assert_close(loss.item(), 7/16*math.log(2))
    assert_close(lp.grad, torch.tensor([[-.25, -.0625, 0.]]))
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(dict(nll=2*math.log(2), prob=5/16))


@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_dft_descends_minus_the_probability(over):
    lp, mask = COLS["logprobs"].clone().requires_grad_(), COLS["mask"]
    got, want = (torch.autograd.grad(x, lp)[0]
                 for x in (dft_loss(lp, mask, over=over)[0], -aggregate(lp.exp(), mask, over=over)))
    assert_close(got, want)
    slow = [[-math.exp(x)*x for x in row] for row in lp.tolist()]
    assert_close(dft_loss(lp, mask, over=over)[0].detach(),
                 naive_aggregate(torch.tensor(slow).double(), mask, over=over), rtol=1e-6, atol=0)


def test_what_is_impossible_dft_does_not_learn():
    lp = torch.tensor([[-math.inf, -1.]]).requires_grad_()
    loss, _ = dft_loss(lp, torch.tensor([[True, True]]))
    loss.backward()
    assert_close(loss.item(), math.exp(-1)/2)
    assert lp.grad.isfinite().all() and lp.grad[0, 0] == 0


# -- divergences

def naive(kind, z, t, beta=.5):
    def softmax(row): return [math.exp(x)/math.fsum(map(math.exp, row)) for x in row]
    def kl(a, b): return math.fsum(x*math.log(x/y) for x, y in zip(a, b, strict=True))
    out = torch.zeros(16, 16, dtype=torch.float64)
    for b in range(16):
        for i in range(16):
            s, q = softmax(z[b, i].tolist()), softmax(t[b, i].tolist())
            m = [beta*y+(1-beta)*x for x, y in zip(s, q, strict=True)]
            out[b, i] = dict(forward=kl(q, s), reverse=kl(s, q), jsd=beta*kl(q, m)+(1-beta)*kl(s, m),
                             uld=math.fsum(abs(x-y) for x, y in zip(sorted(s), sorted(q), strict=True)))[kind]
    return out


@pytest.mark.parametrize("kind, f, kw",
                         [("forward", forward_kl_loss, {}), ("reverse", reverse_kl_loss, {}), ("jsd", jsd_loss, {}),
                          ("jsd", jsd_loss, dict(beta=.2)), ("uld", uld_loss, {})])
def test_divergences_equal_oracles(kind, f, kw):
    z, t, mask = arguments("forward")
    slow = naive(kind, z, t, **kw)
    for more in (dict(), dict(over="rows"), dict(denom=37.)):
        assert_close(f(z, t, mask, **kw, **more)[0], naive_aggregate(slow, mask, **more))
    assert_close(float(next(iter(f(z, t, mask, **kw)[1].values()))), float(slow[mask].mean()))
    assert_close(f(z, t, mask, temperature=2., **kw)[0], f(z/2, t/2, mask, **kw)[0])


def test_gradients_by_hand():
    z, t, on = torch.zeros(1, 1, 2, requires_grad=True), torch.tensor([[[3., 1.]]]).log(), torch.tensor([[True]])
    kl = .5*math.log(2/3)+.5*math.log(2)
    for f, want in ((forward_kl_loss, -.25), (reverse_kl_loss, .5*(math.log(2/3)-kl))):
        assert_close(torch.autograd.grad(f(z, t, on)[0], z)[0], torch.tensor([[[want, -want]]]))


def test_reverse_is_the_exact_kl():
    assert_close(reverse_kl_loss(*arguments("reverse"))[0], full_kl(*arguments("reverse")[:2])[COLS["mask"]].mean())


def test_a_one_hot_teacher_is_sft():
    z, mask, tokens = COLS["logits"].clone().requires_grad_(), COLS["mask"], COLS["tokens"] % 7
    sure = torch.where(one_hot(tokens.roll(-1, 1), 7) == 1, 0., -math.inf).double()
    ours, sft = forward_kl_loss(z, sure, predicting(mask)), sft_loss(token_logprobs(z, tokens), mask)
    assert_close([ours[0], torch.autograd.grad(ours[0], z)[0]], [sft[0], torch.autograd.grad(sft[0], z)[0]])
    wrong = forward_kl_loss(z, sure, mask)[0] # the mask as it stands: other positions
    assert abs(wrong - sft[0]) > .01


def test_predicting_shifts_by_one():
    mask = COLS["mask"]
    at = predicting(mask)
    assert at.dtype == torch.bool and torch.equal(at.sum(1), mask.sum(1)) and torch.equal(at[:, :-1], mask[:, 1:])
    assert not at[:, -1].any()
    with pytest.raises(TypeError, match="predicting: mask is int64"): predicting(mask.long())


def test_limits_of_jsd():
    z, t, mask = arguments("jsd")
    forward, reverse = forward_kl_loss(z, t, mask)[0], reverse_kl_loss(z, t, mask)[0]
    assert jsd_loss(z, t, mask, beta=0.)[0] == forward and jsd_loss(z, t, mask, beta=1.)[0] == reverse
    assert_close(jsd_loss(z, t, mask, beta=1e-7)[0]/1e-7, forward, rtol=1e-5, atol=0)
    assert_close(jsd_loss(z, t, mask, beta=1-1e-7)[0]/1e-7, reverse, rtol=1e-5, atol=0)
    assert_close(jsd_loss(z, t, mask)[0], jsd_loss(t, z, mask)[0])


def test_disjoint_models_are_log_2_apart():
    far, on = torch.tensor([[[0., -1e4]]]), torch.tensor([[True]])
    z = far.flip(-1).requires_grad_()
    loss = jsd_loss(z, far, on)[0]
    loss.backward()
    assert_close(loss.item(), math.log(2))
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("f", [forward_kl_loss, reverse_kl_loss, jsd_loss, uld_loss], ids=lambda f: f.__name__)
def test_what_neither_can_say_is_silent(f):
    z, t, mask = arguments("forward")
    z = z.clone().requires_grad_()
    def hollow(x): return pad(x, (0, 2), value=-math.inf)
    for a, b in ((hollow(z), hollow(t)), (z, t)): last = f(a, b, mask)[0], torch.autograd.grad(f(a, b, mask)[0], z)[0]
    assert_close(f(hollow(z), hollow(t), mask)[0], last[0])
    assert_close(torch.autograd.grad(f(hollow(z), hollow(t), mask)[0], z)[0], last[1])


def test_what_only_the_teacher_excludes():
    z, t, on = torch.zeros(1, 1, 2), torch.tensor([[[0., -math.inf]]]), torch.tensor([[True]])
    assert_close(forward_kl_loss(z, t, on)[0].item(), math.log(2))
    assert_close(reverse_kl_loss(z, t, on)[0].item(), 5e14) # infinite: log 0 counts as −10¹⁵
    assert_close(jsd_loss(z, t, on)[0].item(), .5*math.log(4/3) + .5*(.5*math.log(2/3)+.5*math.log(2)))


@pytest.mark.parametrize("beta", [0., .3, 1.])
def test_second_derivatives_of_a_divergence(beta):
    """Through a head; also by torch.func; and for the forward KL by hand: the Hessian of KL(p_T‖softmax z) is
    diag(p) − ppᵀ."""
    g = torch.Generator().manual_seed(0)
    h, W = torch.randn(3, 2, 3, generator=g,
                       dtype=torch.float64), torch.randn(7, 3, generator=g, dtype=torch.float64).requires_grad_()
    t, on = COLS["teacher_logits"][8:11, 4:6], torch.ones(3, 2, dtype=torch.bool)
    def value(W): return jsd_loss(h @ W.T, t, on, beta=beta)[0]
    assert torch.autograd.gradgradcheck(value, W)
    assert_close(torch.func.grad(value)(W.detach()), torch.autograd.grad(value(W), W)[0])
    z = COLS["logits"][0, 0]
    H, p = torch.func.hessian(lambda z: jsd(z, COLS["teacher_logits"][0, 0], beta=beta))(z), z.softmax(0)
    assert_close(H, H.T)
    if beta == 0: assert_close(H, p.diag() - p.outer(p))
    many = torch.func.vmap(lambda z, t: jsd(z, t, beta=beta))(COLS["logits"], COLS["teacher_logits"])
    assert_close(many, jsd(COLS["logits"], COLS["teacher_logits"], beta=beta))


def test_label_smoothing_is_a_teacher():
    z, y = COLS["logits"][8:12].clone().requires_grad_(), COLS["tokens"][8:12] % 7
    smooth = (torch.where(one_hot(y, 7) == 1, .9, 0.) + .1/7).double()
    ours = forward_kl_loss(z, smooth.log(),
                           torch.ones(4, 16, dtype=torch.bool))[0] + torch.special.entr(smooth[0, 0]).sum()
    theirs = cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=.1)
    assert_close([ours, torch.autograd.grad(ours, z)[0]], [theirs, torch.autograd.grad(theirs, z)[0]])


def test_parts_from_the_heads_are_the_whole():
    g = torch.Generator().manual_seed(0)
    hs, ht = torch.randn(2, 16, 16, 3, generator=g, dtype=torch.float64)
    Ws, Wt = torch.randn(2, 40, 3, generator=g, dtype=torch.float64)
    hs, Ws, mask = hs.requires_grad_(), Ws.requires_grad_(), COLS["mask"]
    for f, over in ((forward_kl_loss, "tokens"), (jsd_loss, "rows")):
        def part(a, b, m, f=f, over=over):
            return f(a@Ws.T, b@Wt.T, m, over=over, denom=mask.sum() if over == "tokens" else mask.any(1).sum())[0]
        whole, parts = part(hs, ht, mask), sum(checkpoint(part, *x, use_reentrant=False)
                                               for x in zip(hs.split(3), ht.split(3), mask.split(3), strict=True))
        assert_close([parts, *torch.autograd.grad(parts, [hs, Ws])], [whole, *torch.autograd.grad(whole, [hs, Ws])])


# -- supports

def test_support_by_hand():
    z, on = torch.tensor([[[4., 3., 2., 1.], [1., 1., 1., 1.]]]).log(), torch.tensor([[True, False]])
    got = support_logprobs(z, torch.tensor([[[2, 0], [0, 1]]]), on)
    assert_close(got.exp(), torch.tensor([[[.2, .4, .4], [1., 1., 1.]]]))
    assert_close(support_logprobs(z, torch.tensor([[[2, -1], [0, 1]]]), on).exp()[0, 0], torch.tensor([.2, 0., .8]))
    assert_close(support_logprobs(z, torch.tensor([[[2, 0], [0, 1]]]), on, temperature=.5).exp()[0, 0],
                 torch.tensor([4., 16., 10.])/30)


@pytest.mark.parametrize("f", [forward_kl_loss, reverse_kl_loss, jsd_loss], ids=lambda f: f.__name__)
def test_the_whole_vocabulary_as_support(f):
    z, t, mask = COLS["logits"].clone().requires_grad_(), COLS["teacher_logits"], COLS["mask"]
    ids = torch.rand(16, 16, 7, generator=torch.Generator().manual_seed(0)).argsort(-1)
    full = f(z, t, mask)[0]
    want = full, torch.autograd.grad(full, z)[0]
    tail, renormalised = on_top(z, ids, t, mask, of=f)[0], f(z.gather(-1, ids), t.gather(-1, ids), mask)[0]
    for got in (tail, renormalised): assert_close([got, torch.autograd.grad(got, z)[0]], list(want))


@pytest.mark.parametrize("f", [forward_kl_loss, reverse_kl_loss], ids=lambda f: f.__name__)
def test_a_tail_loses_divergence(f):
    "Merging outcomes cannot make distributions differ more; each id more can only add."
    z, t, mask = arguments("forward")
    ids = t.argsort(-1, descending=True)
    steps = torch.stack([on_top(z, ids[..., :k], t, mask, of=f)[0] for k in range(1, 8)])
    assert (steps.diff() >= 0).all() and steps[0] > 0
    assert_close(steps[-1], f(z, t, mask)[0])


def test_three_conventions_of_the_tail():
    T, S, ids, on = (torch.tensor([[[.6, .3]]]).log(), torch.tensor([[[.6, .35, .02, .03]]]).log(),
                     torch.tensor([[[0, 1]]]), torch.tensor([[True]]))
    tail = forward_kl_loss(support_logprobs(S, ids, on), with_tail(T), on)[0]
    assert_close(tail.item(), .3*math.log(.3/.35) + .1*math.log(2))
    assert_close(forward_kl_loss(S.gather(-1, ids), T, on)[0].item(),
                 2/3*math.log(2/3*.95/.6) + 1/3*math.log(1/3*.95/.35))


def test_with_tail():
    given = torch.tensor([[.6, .3], [.5, 0.], [1., 0.]]).log().requires_grad_()
    got = with_tail(given)
    assert not got.requires_grad
    assert_close(got.exp(), torch.tensor([[.6, .3, .1], [.5, 0., .5], [1., 0., 1e-7]]))
    over = torch.tensor([[.7, .3000001]]).log() # rounding in the server
    assert with_tail(over).isfinite().all() and with_tail(over, floor=0.)[0, 2] == -math.inf
    check_estimator(with_tail, dict(logprobs=COLS["teacher_logits"][:, 0].log_softmax(-1)[:, :3]))
    assert torch.compile(with_tail, fullgraph=True, backend="eager")(given).shape == (3, 3)
    assert with_tail(given.to("meta")).is_meta
    assert with_tail(given.bfloat16()).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_support_survives_an_empty_tail():
    own = dict(logits=COLS["logits"], ids=COLS["ids"])
    z = COLS["logits"][:2, :, :3].clone().requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        support_logprobs(z, torch.arange(3).expand(2, 16, 3),
                         torch.ones(2, 16, dtype=torch.bool))[..., :3].sum().backward()
    assert z.grad.isfinite().all()
    with pytest.raises(ValueError, match="support_logprobs: temperature is -1"):
        support_logprobs(**own, mask=COLS["mask"], temperature=-1)


def test_the_tail_keeps_its_digits():
    "A tail of e⁻³⁰ in float32: from the vocabulary it has all its digits, as 1 − Σp none."
    z, on = torch.tensor([[[0., -30., -31.]]], requires_grad=True), torch.tensor([[True]])
    tail = support_logprobs(z, torch.tensor([[[0]]]), on)[0, 0, 1]
    assert_close(tail.item(), math.log(math.exp(-30)+math.exp(-31)), rtol=1e-6, atol=0)
    assert_close(torch.autograd.grad(tail, z)[0][0, 0], torch.tensor([-1., math.e/(1+math.e), 1/(1+math.e)]), rtol=1e-5,
                 atol=1e-6)


def test_uld_sorts_and_fills():
    on = torch.tensor([[True]])
    assert_close(uld_loss(torch.tensor([[[1., 3.]]]).log(), torch.tensor([[[1., 2., 1.]]]).log(), on)[0].item(), .5)
    assert_close(uld_loss(torch.tensor([[[1., 2., 1.]]]).log(), torch.tensor([[[1., 3.]]]).log(), on)[0].item(), .5)


# -- teachers as judges

@pytest.mark.parametrize("f", [distill_advantages, minillm_advantages, teacher_mix_weights, iw_opd_weights])
def test_judgements_are_data_and_broadcast_nothing(f): # C-T9
    names = ("advantages",) if f is iw_opd_weights else ("logprobs", "teacher_logprobs")
    args = {k: COLS[k] for k in (*names, "mask")}
    assert not f(**{k: x.clone().requires_grad_(x.is_floating_point()) for k, x in args.items()}).requires_grad
    with pytest.raises(ValueError, match="nothing is broadcast|at_tokens"): f(**args | dict(mask=COLS["mask"][:, 1:]))


def test_on_policy_distillation_descends_the_reverse_kl():
    z, t = COLS["logits"][0, 0].clone().requires_grad_(), COLS["teacher_logits"][0, 0]
    ids, every = torch.arange(7)[:, None], torch.ones(7, 1, dtype=torch.bool)
    lp, teacher = (gather_logprobs(x.expand(7, 1, 7), ids) for x in (z, t))
    A = distill_advantages(lp, teacher, every)
    assert_close(A, (teacher-lp).detach())
    got = ppo_loss(lp, lp.detach(), lp.detach().exp()*A, every, denom=1)[0]
    assert_close(torch.autograd.grad(got, z)[0],
                 torch.autograd.grad(reverse_kl_loss(z.view(1, 1, 7), t.view(1, 1, 7), every[:1])[0], z)[0])


def test_minillm_descends_the_kl_of_sequences():
    g = torch.Generator().manual_seed(0)
    z1, z2, t1, t2 = (torch.randn(n, generator=g, dtype=torch.float64).requires_grad_()
                      for n in ((3,), (3, 3), (3,), (3, 3)))
    a, b = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T
    lp, teacher = (torch.stack([x.log_softmax(-1)[a], y.log_softmax(-1)[a, b]], 1) for x, y in ((z1, z2), (t1, t2)))
    every, chance = torch.ones(9, 2, dtype=torch.bool), lp.detach().sum(1).exp()[:, None].expand(9, 2)
    exact = torch.autograd.grad((lp.sum(1).exp()*(lp-teacher).sum(1)).sum(), [z1, z2], retain_graph=True)
    A = minillm_advantages(lp, teacher, every, normalize=False)
    assert_close(torch.autograd.grad(ppo_loss(lp, lp.detach(), chance*A, every, denom=1)[0], [z1, z2]), exact)


def naive_minillm(r, mask, gamma, normalize, own):
    out = torch.zeros(r.shape, dtype=torch.float64)
    for b in range(len(r)):
        at = [t for t in range(r.shape[1]) if mask[b, t]]
        for i, t in enumerate(at):
            later = [(gamma**(k-i), float(r[b, at[k]])) for k in range(i if own else i+1, len(at))]
            total, count = sum(w*x for w, x in later), sum(w for w, _ in later)
            out[b, t] = total/count if normalize and count else total
    return out


@pytest.mark.parametrize("gamma", [1., .8, 0.])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_minillm_equals_oracle(gamma, normalize, own):
    lp, teacher, mask = COLS["logprobs"], COLS["teacher_logprobs"], COLS["mask"]
    assert_close(minillm_advantages(lp, teacher, mask, gamma=gamma, normalize=normalize, own=own),
                 naive_minillm(teacher-lp, mask, gamma, normalize, own))


def test_minillm_knows_padding_and_discounts_from_the_token(): # C-T9
    r, mask = torch.tensor([[1., 2., 50.]]), torch.tensor([[True, True, False]])
    assert_close(minillm_advantages(0*r, r, mask, gamma=.5, normalize=False), torch.tensor([[2., 2., 0.]]))
    assert_close(minillm_advantages(0*r, r, mask), torch.tensor([[1.5, 2., 0.]]))


def test_mix_weights():
    lp, teacher, on = (torch.tensor([[.5, .25, .25]]).log(), torch.tensor([[.25, .5, .25]]).log(),
                       torch.ones(1, 3, dtype=torch.bool))
    assert_close(teacher_mix_weights(lp, teacher, on), torch.tensor([[10/9, 5/6, 1.]]))
    assert_close(teacher_mix_weights(lp, teacher, on, alpha=0.), torch.ones(1, 3))
    w = teacher_mix_weights(COLS["logprobs"], COLS["teacher_logprobs"], COLS["mask"], alpha=.5)
    assert (w <= 2).all() and (w[COLS["mask"]] > 0).all()
    for alpha in (1., -.1):
        with pytest.raises(ValueError, match=f"teacher_mix_weights: alpha is {alpha}"):
            teacher_mix_weights(lp, teacher, on, alpha=alpha)


def test_iw_opd_weights():
    A, on = torch.tensor([[9., 1., 0., -3., 9.]]), torch.tensor([[False, True, True, True, False]])
    assert_close(iw_opd_weights(A, on), torch.tensor([[0., 1.5, 1.375, 1.375, 0.]]))
    # nothing disagrees: nothing has passed
    assert_close(iw_opd_weights(0*A, on, gamma=2.), torch.tensor([[0., 3., 3., 3., 0.]]))


def test_realigned():
    x = torch.arange(12.).view(2, 6)
    x_mask = torch.tensor([[False, True, False, True, True, False], [True, False, False, False, False, False]])
    mask = torch.tensor([[False, True, True, True], [False, False, True, True]])
    want = torch.tensor([[0., 1., 3., 4.], [0., 0., math.nan, math.nan]])
    assert_close(realigned(x, x_mask, mask), want, equal_nan=True)
    deep = realigned(torch.stack([x, 2*x], -1), x_mask, mask)
    assert_close(deep, torch.stack([want, 2*want], -1), equal_nan=True)
    assert_close(torch.compile(realigned, fullgraph=True, backend="eager")(x, x_mask, mask), want, equal_nan=True)
    assert realigned(x.to("meta"), x_mask.to("meta"), mask.to("meta")).is_meta
    with pytest.raises(TypeError, match="realigned: mask is int64"): realigned(x, x_mask.long(), mask)
    with pytest.raises(ValueError, match=r"realigned: x_mask is \[2, 5\], x\[..., 0\] is \[2, 6\]"):
        realigned(x, x_mask[:, 1:], mask)
    with pytest.raises(ValueError, match=r"realigned: .*nothing is broadcast"): realigned(x, x_mask, mask[:1])


def test_there_and_back_obeys_the_laws():
    g, mask, lp = torch.Generator().manual_seed(0), COLS["mask"], COLS["logprobs"].clone().requires_grad_()
    longer = torch.cat([torch.zeros(16, 4, dtype=torch.bool), mask[:, torch.randperm(16, generator=g)]], 1)
    back = realigned(realigned(lp, mask, longer), longer, mask)
    assert_close(back, torch.where(mask, lp, 0.))
    assert torch.equal(torch.autograd.grad(back.sum(), lp)[0], mask.double())
    check_estimator(realigned, dict(x=torch.randn(16, 20, generator=g), x_mask=longer, mask=mask))
