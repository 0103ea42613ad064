"Ten blocks through inductor: one graph, the values and the gradients of eager mode."
import shutil

import pytest
import torch
from conftest import rarely
from test_laws import BLOCKS, arguments, numbers
from torch.testing import assert_close

TEN = ["ppo_loss", "gspo_loss", "cispo_loss", "value_loss", "dpo_loss", "kto_loss", "jsd_loss", "group_advantages",
       "whiten", "kl_k3"]
QUICK = ["gspo_loss"]    # of rows; below, of tokens
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None,
                       reason="inductor needs a C++ compiler (apt install g++)"),
    pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT",
                       reason="torch 2.13's inductor writes at::vec for a CPU without vectors, which does not compile"),
]


@pytest.mark.parametrize("name", QUICK + rarely(*(name for name in TEN if name not in QUICK)))
def test_inductor_gives_what_eager_gives(name):
    columns, hyper = arguments(name)
    first = next(iter(columns))
    runs = []
    for f in (BLOCKS[name], torch.compile(BLOCKS[name], fullgraph=True)):
        leaf = columns[first].float().requires_grad_()
        found = numbers(f(**{k: x.float() if x.is_floating_point() else x for k, x in columns.items()} | {first: leaf},
                          **hyper))
        grads = torch.autograd.grad(found[0].sin().sum(), leaf) if found[0].requires_grad else ()
        runs.append([x.detach() for x in (*found, *grads)])
    assert runs[0] and assert_close(*runs, atol=1e-5, rtol=1e-5) is None


@pytest.mark.parametrize("name", ["ppo_loss"] + rarely(*(name for name in TEN[1:] if name.endswith("_loss"))))
def test_a_loss_and_its_gradient_are_one_graph(name):
    columns, hyper = arguments(name)
    columns = {k: x.float() if x.is_floating_point() else x for k, x in columns.items()}
    first, *_ = columns
    def loss(x): return numbers(BLOCKS[name](**columns | {first: x}, **hyper))[0]
    both = torch.func.grad_and_value(loss)
    found = torch.compile(both, fullgraph=True)(columns[first])
    assert found[0].abs().sum() > 0
    assert_close(found, both(columns[first]), atol=1e-5, rtol=1e-5)
