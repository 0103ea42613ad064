"""Ragged rows: what went in comes back from memory and from mapped files, in any selection, and files are what
others read."""
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from rlblocks.data.batch import Batch
from rlblocks.data.ragged import Ragged, from_arrow, ragged, to_arrow

DTYPES = ["int64", "int32", "int16", "int8", "uint8", "float64", "float32", "float16", "bfloat16", "bool"]


def rows(sizes, seed=0, T=None):
    g = torch.Generator().manual_seed(seed)
    B, T = len(sizes), T or max(sizes) + 2
    lengths = torch.tensor(sizes)
    real = torch.arange(T) < lengths[:, None]
    columns = {f"x_{t}": torch.randint(0, 2 if t == "bool" else 99, (B, T), generator=g).to(getattr(torch, t))*real
               for t in DTYPES}
    return Batch(per_row=["image"], tokens=torch.randint(1, 99, (B, T), generator=g)*real, lengths=lengths,
                 support=torch.randint(0, 9, (B, T, 3, 2), generator=g)*real[..., None, None],
                 image=torch.rand(B, 2, 3, generator=g), scores=torch.rand(B, generator=g),
                 text=[f"row {i} ü" for i in range(B)], **columns)


def assert_equal(a, b):
    assert set(a.columns) == set(b.columns) and a.per_row == b.per_row and len(a) == len(b)
    for name, x in a.columns.items():
        if isinstance(x, list): assert x == b[name]
        else: assert x.dtype == b[name].dtype and x.equal(b[name]), name


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0], [4], [7]*5])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_any_selection_comes_back(sizes, where, tmp_path):
    batch = rows(sizes)
    flat = ragged(batch)
    if where == "file": flat = from_arrow(to_arrow(flat, tmp_path/"rows.arrow"))
    assert len(flat) == len(sizes) and flat.offsets.diff().tolist() == sizes
    assert_equal(flat.batch(), batch.trim())
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        pick = torch.randint(0, len(sizes), (6,), generator=g)
        for got in (flat.batch(pick), flat.take(pick).batch(), ragged(batch, pick).batch(),
                    Ragged.cat([flat.take(pick[:2]), flat.take(pick[2:])]).batch()):
            assert_equal(got, batch[pick].trim())


def test_only_real_tokens_are_held_and_none_is_shared():
    batch = rows([3, 0, 5])
    batch["logprobs"] = torch.rand(3, 7, requires_grad=True)
    flat = ragged(batch)
    assert all(len(x) == 8 for k, x in flat.columns.items() if flat.kinds[k] == "token")
    assert not flat.columns["logprobs"].requires_grad
    assert flat.nbytes == 8*(8 + 8 + 4 + 2 + 1 + 1 + 8 + 4 + 2 + 2 + 1 + 6*8 + 4) + 3*(8 + 6*4 + 4) + 4*8
    before = batch.tokens.clone()
    batch.tokens.zero_()
    out = flat.batch()
    assert out.tokens.equal(before[:, :5])
    out.tokens.zero_()
    some = flat.take(torch.arange(2))
    for x in some.columns.values():
        if isinstance(x, torch.Tensor): x.zero_()
    assert flat.batch().tokens.equal(before[:, :5]) and some.columns["tokens"].untyped_storage().nbytes() == 3*8


def test_a_mapped_file_costs_no_memory_and_outlives_its_name(tmp_path):
    import pyarrow as pa
    path, flat = tmp_path/"rows.arrow", ragged(rows([500]*50))
    to_arrow(flat, path)
    before = pa.total_allocated_bytes()
    mapped = from_arrow(path)
    assert pa.total_allocated_bytes() == before
    path.unlink()
    assert mapped.columns["tokens"].equal(flat.columns["tokens"])


def test_datasets_reads_the_file(tmp_path):
    from datasets import Dataset
    batch = rows([3, 0, 5])
    to_arrow(ragged(batch), tmp_path/"rows.arrow")
    data = Dataset.from_file(str(tmp_path/"rows.arrow"))
    assert data.num_rows == 3 and data[2]["tokens"] == batch.tokens[2, :5].tolist() and data[1]["tokens"] == []
    assert data[0]["text"] == "row 0 ü"


def test_rows_without_tokens_and_strings_that_are_none(tmp_path):
    flat = ragged(Batch(scores=torch.tensor([1., 2.]), text=["a", None]))
    mapped = from_arrow(to_arrow(flat, tmp_path/"rows.arrow"))
    assert mapped.batch().text == ["a", None] == list(mapped.columns["text"])
    assert mapped.batch(torch.tensor([1])).scores.tolist() == [2.]


def test_only_strings_go_to_a_file(tmp_path):
    with pytest.raises(TypeError, match="to_arrow: column 'answer' holds other things than strings"):
        to_arrow(ragged(Batch(answer=["a", 3])), tmp_path/"rows.arrow")
    with pytest.raises(ValueError, match="per-token columns without 'lengths'"):
        ragged(Batch(tokens=torch.ones(1, 2, dtype=torch.long)))


def test_arrow_is_imported_for_files_and_missed_by_name():
    code = ("import sys, rlblocks.data.buffer, rlblocks.data.ragged; assert not {'pyarrow', 'datasets'} & "
            "set(sys.modules); sys.modules['pyarrow'] = None; rlblocks.data.ragged.from_arrow('x')")
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: ragged: files need pyarrow, which comes with datasets: pip install pyarrow" in run.stderr
