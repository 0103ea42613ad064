"""Every loss's text, as it would be copied into a cell: with the imports of a notebook and the public names alone, the
copy gives the same numbers. So whoever wants another term copies the body and edits one line."""
import inspect

import pytest
import torch
from test_laws import CASES, LOSSES, arguments, block, numbers
from torch.testing import assert_close

CELL = """
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlblocks import *
"""


@pytest.fixture(scope="module")
def cell():
    names = {"__name__": "__main__"}
    exec(CELL, names)
    return names


@pytest.mark.parametrize("name", LOSSES)
def test_a_copied_body_gives_the_same_numbers(cell, name):
    original, copy = block(name), dict(cell)
    del copy[name]
    exec(inspect.getsource(original), copy)
    assert copy[name] is not original
    for case in (case for case, (of, _) in CASES.items() if of == name):
        columns, hyper = arguments(case)
        assert_close(numbers(copy[name](**columns, **hyper)), numbers(original(**columns, **hyper)), rtol=0, atol=0,
                     equal_nan=True)


def test_a_piece_that_is_not_public_is_seen(cell):
    copy = {k: x for k, x in cell.items() if k != "masked_data"}
    exec(inspect.getsource(block("sapo_loss")), copy)
    columns, hyper = arguments("sapo_loss")
    with pytest.raises(NameError, match="masked_data"): copy["sapo_loss"](**columns, **hyper)


def test_components_loss_can_be_copied_too(cell):
    "It reads a batch, and has tests of its own."
    from rlblocks import Batch, components_loss
    mask = torch.tensor([[False, True, True]])
    b, x = Batch(mask=mask, acted=mask & torch.tensor([[False, True, False]])), torch.ones(1, 3)
    copy = dict(cell)
    exec(inspect.getsource(components_loss), copy)
    terms = dict(rl=(x, "acted", 1.), all=(x, "mask", .5))
    assert_close(copy["components_loss"](b, **terms)[0], components_loss(b, **terms)[0])
