"""A head whose vocabulary is split over ranks gives what the whole head gives: values and gradients, over every
option, in one launch for each number of ranks."""
import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import pairwise, rarely
from forked import on_ranks
from rlblocks import linear_logprobs
from tiny import bound
from torch.testing import assert_close

N, H, V, R = 7, 4, 13, 2
UNEVEN = {1: [13], 2: [9, 4], 4: [2, 1, 7, 3]}
# dtype, entropy, softcap, temperature, support, low_rank, learns
CHOICES = ([torch.float32, torch.float64], [False, True], [None, 2.], [1., .6, "rows"], [False, True], [False, True],
           [True, False])
CASES = dict(pairs=pairwise(*CHOICES), all=list(itertools.product(*CHOICES)))


def one(case, sizes, rank, group):
    "Values and gradients of one case, from this rank's rows; the same numbers on each."
    dtype, entropy, softcap, tau, confined, low, learns = case
    g = torch.Generator().manual_seed(1)
    h, W, b, x, B = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype)
                     for s in ((N, H), (V, H), (V,), (N, R), (V, R)))
    ids = torch.tensor([0, 12, 8, 9, 3, 10, 2])
    # within one rank, over ranks, none; one target outside
    support = torch.tensor([[0, 3, -1], [12, 2, 5], [8, -1, -1], [-1, -1, -1], [3, 9, 12], [0, 1, 2],
                            [1, 2, -1]]) if confined else None
    if tau == "rows": tau = torch.linspace(.5, 2, N, dtype=dtype)
    cut = slice(sum(sizes[:rank]), sum(sizes[:rank+1]))
    h, x = (t.requires_grad_() for t in (h, x))
    W, b, B = (t[cut].clone().requires_grad_(learns) for t in (W, b, B))
    found = linear_logprobs(h, W, ids, bias=b, low_rank=(x, B) if low else None, softcap=softcap, temperature=tau,
                            support=support, entropy=entropy, chunk=3, group=group)
    lp, ent = found if entropy else (found, torch.zeros(N, dtype=dtype))
    finite = lp.isfinite()
    assert finite.tolist() == [True]*5 + [not confined, True]
    loss = torch.where(finite, lp, 0.).square().sum() + ent.square().sum()
    assert loss > .1
    grads = torch.autograd.grad(loss,
                                [t for t in (h, x, W, b, B) if t.requires_grad and (low or t is not x and t is not B)])
    assert all(t.abs().max() > 0 for t in grads[:1])
    return lp.detach(), ent.detach(), *grads


def one_rank(rank, world, folder, which):
    # an id that no rank has
    assert linear_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([99]),
                           group=dist.group.WORLD) == -torch.inf
    torch.save([one(case, UNEVEN[world], rank, dist.group.WORLD) for case in CASES[which]], folder/f"{rank}.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("world, which", [(2, "pairs"), (4, "pairs"), *rarely((2, "all"), (4, "all"))])
def test_a_split_head_is_the_whole_head(tmp_path, world, which):
    on_ranks(one_rank, (tmp_path, which), world)
    ranks = [torch.load(tmp_path/f"{r}.pt") for r in range(world)]
    for i,case in enumerate(CASES[which]):
        whole = one(case, [V], 0, None)
        same = 3 + case[-2] # log-probs, entropy, gradients of hidden and x: equal on every rank
        for k,want in enumerate(whole):
            # both are off: a score has H + R terms, a row V, a gradient sums N; forward and back
            tol = dict(rtol=0, atol=2*bound(2*(H + R + V + N), max(1., want[want.isfinite()].abs().max()), case[0]))
            for got in [r[i][k] for r in ranks] if k < same else [torch.cat([r[i][k] for r in ranks])]:
                assert_close(got, want, **tol)
