"""Rows of the table of agreement: our call, as text that is run, beside a peer's own function, on the same columns.

    @row("verl", "core_algos.agg_loss token-mean", "aggregate(x, mask)", wrt="x")
    def _(c): return verl().core_algos.agg_loss(c.x, c.mask, "token-mean")

Values and gradients agree to 1e-6 of the largest entry (of 1, if that is smaller), or `because` says why they do not;
by how much is then kept in benchmarks/results/agreement.json, and a number that moves is a peer that changed, or we
did."""
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch

TOLERANCE = 1e-6
ROWS = []


@dataclass(frozen=True)
class Row:
    peer: str              # trl, verl or openrlhf
    theirs: str            # its function, and the option that selects the branch
    ours: str              # our call on the columns
    call: Callable         # columns -> what theirs returns
    wrt: tuple[str, ...]   # columns that the gradient is taken for
    because: str | None    # why they disagree; None = they agree

    @property
    def name(self): return f"{self.peer}: {self.theirs} ~ {self.ours}"
    @property
    def functions(self): return [word for word in re.findall(r"\w+", self.ours) if word in names()]


def row(peer, theirs, ours, *, wrt="", because=None):
    def add(call):
        ROWS.append(Row(peer, theirs, ours, call, tuple(wrt.split()), because))
        return call
    return add


# -- columns

def columns(seed=0, dtype=torch.float32):
    "Columns of 8 rows and 12 tokens, with holes in the mask; two groups of four; 8 pairs; 11 words."
    g = torch.Generator().manual_seed(seed)
    normal, uniform = (lambda *s: torch.randn(*s, generator=g).to(dtype)), (
        lambda *s: torch.rand(*s, generator=g).to(dtype))
    B, T, V = 8, 12, 11
    lengths = torch.tensor([12, 7, 9, 5, 12, 3, 8, 10])
    exists = torch.arange(T) < lengths[:, None]
    mask = exists & (uniform(B, T) < .8)
    mask[:, 1] = True
    c = SimpleNamespace(x=normal(B, T), mask=mask, exists=exists, lengths=lengths)
    c.logprobs = -3*uniform(B, T)
    c.old_logprobs = (c.logprobs + .4*normal(B, T)).clamp(max=-.01)
    c.ref_logprobs = (c.logprobs + .4*normal(B, T)).clamp(max=-.01)
    c.rollout_logprobs = (c.old_logprobs + .2*normal(B, T)).clamp(max=-.01)
    c.advantages, c.row_advantages = normal(B, T), normal(B)
    c.values, c.returns = normal(B, T), normal(B, T)
    c.old_values = c.values + .5*normal(B, T)
    c.rewards = normal(B, T)
    c.scores, c.baselines = normal(B), normal(B)
    c.scores3 = normal(B, 3)
    c.group, c.ragged = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([5, 2, 5, 2, 5, 9, 9, 2])
    c.entropies = 2*uniform(B, T)
    # Σπ² where the token's own π is one of the terms
    c.sum_sq = c.old_logprobs.exp()**2 + uniform(B, T)*(1 - c.old_logprobs.exp())**2
    c.chosen, c.rejected = -20*uniform(B), -20*uniform(B)
    c.ref_chosen, c.ref_rejected = c.chosen + 2*normal(B), c.rejected + 2*normal(B)
    c.n_chosen, c.n_rejected = torch.tensor([4, 9, 7, 12, 3, 5, 8, 6]), torch.tensor([6, 5, 11, 4, 8, 3, 9, 12])
    c.desirable = torch.tensor([True, False, True, True, False, True, False, False])
    c.logprobs_kl, c.ref_logprobs_kl = -20*uniform(B), -20*uniform(B)
    c.logits, c.teacher_logits = 2*normal(B, T, V), 2*normal(B, T, V)
    c.tokens = torch.randint(V, (B, T), generator=g)
    c.hidden, c.weight, c.teacher_hidden, c.teacher_weight = .5*normal(B, T, 5), normal(V, 5), .5*normal(
        B, T, 6), normal(V, 6)
    c.kl_coef = .1
    return c


@cache
def names():
    "What our calls can use: every function of floors 0 and 1, by their modules."
    found = {"torch": torch}
    for file in sorted((Path(__file__).resolve().parents[2]/"rlblocks").glob("*/[a-z]*.py")):
        if file.parent.name not in ("arithmetic", "signals", "losses", "testing"): continue
        module = importlib.import_module(f"rlblocks.{file.parent.name}.{file.stem}")
        found |= {k: getattr(module, k) for k in module.__all__}
    return found


def tensors(result):
    return [x for x in result if isinstance(x, torch.Tensor)] if isinstance(result, (tuple, list)) else [result]


def run(call, wrt, dtype=torch.float32):
    "(values, gradients) of `call` on fresh columns; the gradient is that of Σ wᵢ·valueᵢ with fixed weights."
    c = columns(dtype=dtype)
    for name in wrt: setattr(c, name, getattr(c, name).clone().requires_grad_())
    values = tensors(call(c))
    if not wrt: return [x.detach().double() for x in values], []
    g = torch.Generator().manual_seed(1)
    total = sum((x * (1 + torch.rand(x.shape, generator=g))).sum() for x in values)
    gradients = torch.autograd.grad(total, [getattr(c, name) for name in wrt], allow_unused=True)
    return [x.detach().double() for x in values], [torch.zeros_like(getattr(c, n)).double() if d is None else d.double()
                                                   for n, d in zip(wrt, gradients, strict=True)]


def apart(a, b):
    "Largest difference, as a share of the largest entry (or of 1)."
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        raise ValueError(f"ours gives {[list(x.shape) for x in a]}, theirs {[list(x.shape) for x in b]}")
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1))
                for x, y in zip(a, b, strict=True) if x.numel()), default=0.)


def ours(r):
    code = compile(r.ours, r.name, "eval")
    return lambda c: eval(code, names() | vars(c))


def measure(r, dtype=torch.float32):
    "How far ours and theirs are apart: (values, gradients)."
    (a, da), (b, db) = run(ours(r), r.wrt, dtype), run(r.call, r.wrt, dtype)
    return apart(a, b), apart(da, db)


def at(mask, x): return torch.where(mask, x, 0.)
