"""The Triton kernels give what the torch passes give, over every option, in Triton's interpreter: nothing here needs
a GPU."""
import itertools
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from rlblocks.arithmetic import kernels
from torch.testing import assert_close

# Triton reads its switch when it is imported: the tests run themselves again in a fresh process
IN_INTERPRETER = "RLBLOCKS_TEST_KERNELS" in os.environ
absent = pytest.mark.skipif(not kernels.find_triton(), reason="Triton is not installed (the extra dev has it)")
inside = pytest.mark.skipif(not IN_INTERPRETER, reason="runs in the interpreter, from test_in_the_interpreter")


@absent
@pytest.mark.skipif(IN_INTERPRETER, reason="is what runs this")
def test_in_the_interpreter():
    env = os.environ | dict(TRITON_INTERPRET="1", RLBLOCKS_TEST_KERNELS="1")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__], cwd=ROOT,
                         env=env, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


def both(monkeypatch, f):
    "What `f` gives by the torch passes and by the kernels."
    from rlblocks.arithmetic import passes
    found, calls = [], []
    def swept(*args): calls.append(1); return kernels.swept(*args, block=8)
    monkeypatch.setattr(passes, "swept", swept)
    for use in (False, True):
        monkeypatch.setattr(passes, "fits", lambda _, use=use: use)
        found.append(f())
        assert bool(calls) == use
    return found


OPTIONS = [(torch.float32, *each)
           for each in itertools.product([False, True], [None, 3.], [1., .7, "rows"], [False, True])]
OPTIONS += [(torch.bfloat16, *each) for each in ((True, 3., "rows", True), (False, None, 1., False))]


@inside
@pytest.mark.parametrize("dtype, entropy, softcap, tau, confined", OPTIONS)
def test_linear_logprobs_by_kernels(monkeypatch, dtype, entropy, softcap, tau, confined):
    from rlblocks import linear_logprobs
    g = torch.Generator().manual_seed(0)
    h, W, b, x, B = (torch.randn(*s, generator=g).to(dtype) for s in ((5, 4), (19, 4), (19,), (5, 2), (19, 2)))
    ids = torch.tensor([0, 7, 8, 18, 3])
    support = torch.tensor([[0, 3, -1], [7, 2, 5], [2, -1, -1], [-1, -1, -1], [-1, 3, 16]]) if confined else None
    if tau == "rows": tau = torch.linspace(.5, 2, 5)
    def run(learns):
        leaves = [t.clone().requires_grad_(i in (0, 3) or learns) for i,t in enumerate((h, W, b, x, B))]
        found = linear_logprobs(leaves[0], leaves[1], ids, bias=leaves[2], low_rank=tuple(leaves[3:]), softcap=softcap,
                                temperature=tau, support=support, entropy=entropy, chunk=3)
        lp, H = found if entropy else (found, torch.zeros(5))
        loss = torch.where(lp.isfinite(), lp, 0.).square().sum() + H.square().sum()
        assert loss.abs() > .1
        return [lp, H, *torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])]
    for learns in (True, False):
        torch_passes, by_kernels = both(monkeypatch, lambda learns=learns: run(learns))
        for one, other in zip(torch_passes, by_kernels, strict=True):
            scale = max(1., float(one[one.isfinite()].abs().max()))
            # half logits: their gradient is rounded to half, the interpreter's way
            assert_close(other, one, rtol=0, atol=scale*(3e-6 if dtype == torch.float32 else 2e-2))


@inside
@pytest.mark.parametrize("tau", [1., .7, "rows"])
def test_entropy_by_kernels(monkeypatch, tau):
    from rlblocks import entropy
    z = 3*torch.randn(2, 3, 19, generator=torch.Generator().manual_seed(0))
    z[0, 0, :9] = -torch.inf # a whole block is excluded
    tau = torch.linspace(.5, 2, 6).view(2, 3) if tau == "rows" else tau
    def run():
        leaf = z.clone().requires_grad_()
        H = entropy(leaf, temperature=tau)
        return [H, *torch.autograd.grad(H.cos().sum(), leaf), leaf.detach()]
    one, other = both(monkeypatch, run)
    assert_close(other, one, atol=3e-6, rtol=1e-5)
    assert torch.equal(other[2], z) # logits of the caller's are read only


@inside
@pytest.mark.parametrize("confined", [False, True])
def test_an_id_outside_the_vocabulary_reads_nan_and_nobodys_memory(confined):
    "Without a word with the host, which would wait for the GPU; the torch passes raise IndexError."
    V, ids = 19, torch.tensor([-1, -100, 3, 19, 10**12])
    logits, lse, chosen = torch.randn(5, V, generator=torch.Generator().manual_seed(0)), torch.empty(5), torch.empty(5)
    excluded = torch.zeros(5, V, dtype=torch.bool) if confined else None
    before, into, one = logits.clone(), torch.empty_like(logits), torch.ones(5)
    kernels.swept(logits, into, None, 1., excluded, ids, lse, chosen, None, False, one, None, one, block=8)
    assert chosen.isnan().tolist() == [True, True, False, True, True] and chosen[2] == before[2, 3]
    onehot = torch.zeros_like(before).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(1.))
    assert_close(lse, before.logsumexp(-1))
    assert_close(into, onehot - before.softmax(-1))


def test_only_what_fits():
    z = torch.zeros(2, 3)
    assert not kernels.fits(z) # no CUDA tensor
    class Cuda:
        is_cuda, dtype = True, torch.float32
    assert kernels.fits(Cuda) == kernels.find_triton()
    Cuda.dtype = torch.float64
    assert not kernels.fits(Cuda)
