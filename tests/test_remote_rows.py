"""Columns by reference, with a list for the store: what reads them gets a tensor, whoever it is; test_ray.py has what
needs Ray."""
import io
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from rlblocks import Batch
from rlblocks.data.buffer import Queue
from rlblocks.data.saved import load_rollouts, save_rollouts
from rlblocks.placement import remote_rows
from rlblocks.placement.place import join_answers
from rlblocks.placement.remote_rows import RemoteRows, leave_rows
from torch.nn.functional import pad


@pytest.fixture
def fetched(monkeypatch):
    "How many rows each fetch had. Rows stay from a kilobyte on."
    store, found = [], []
    def put(raw):
        raw = raw.copy()
        raw.flags.writeable = False         # as the store's
        store.append(raw)
        return len(store) - 1
    def get(refs):
        found.append(len(refs))
        return [store[i] for i in refs]
    for name, x in dict(put_row=put, get_rows=get, ROW_BYTES=1 << 10).items(): monkeypatch.setattr(remote_rows, name, x)
    return found


def batch(B=3, T=8):
    lengths = torch.arange(B) + T - B + 1
    tokens = torch.arange(B*T).view(B, T)
    return Batch(per_row=["images"], tokens=tokens, lengths=lengths, images=torch.randn(B, 20, 64),
                 mask=(torch.arange(T) > 0) & (torch.arange(T) < lengths[:, None]), hidden=torch.randn(B, T, 64))


def test_what_a_loop_does_to_rows_fetches_none(fetched):
    whole = batch()
    left = leave_rows(whole)
    def through(b):
        b = Batch.cat([b[[2, 0]], b.with_columns(b.columns)])
        return b[~(b.lengths == 8)][1:].trim().counted()
    got, want = through(left), through(whole)
    assert not fetched and got.width == want.width == 7 and type(got.hidden) is type(got.images) is RemoteRows
    answers = [leave_rows(x) for x in (torch.ones(2, 5, 64), torch.ones(1, 7, 64))]
    joined = join_answers(answers, [[0, 2], [1]])
    assert not fetched and type(joined) is RemoteRows
    for k in want.columns: assert torch.equal(got[k], want[k]), k
    assert torch.equal(joined, join_answers([x.clone() for x in answers], [[0, 2], [1]]))


def test_a_bool_column_comes_by_value(fetched):
    "A batch counts it, so it would be fetched at once."
    x = torch.ones(2, 40, 64, dtype=torch.bool)
    assert leave_rows(x) is x and type(leave_rows(x.int())) is RemoteRows


def test_parameters_of_one_axis_are_joined():
    answers = [torch.nn.Parameter(torch.tensor([1., 3.])), torch.nn.Parameter(torch.tensor([2.]))]
    assert join_answers(answers, [[0, 2], [1]]).tolist() == [1, 2, 3]


def test_threads_that_read_at_once_get_one_tensor(fetched):
    def twice(x):
        both = Barrier(2)
        def add(_):
            both.wait()
            x.add_(1)
            return x.read().data_ptr()
        with ThreadPoolExecutor(2) as pool: return len(set(pool.map(add, range(2))))
    for _ in range(20):
        x = leave_rows(torch.zeros(3, 8, 64))
        assert twice(x) == 1 and bool((x == 2).all())
    assert fetched == [3]*20


def test_rows_that_were_read_in_inference_mode_can_be_learned_from(fetched):
    x, w = leave_rows(torch.ones(3, 8, 64)), torch.ones(64, requires_grad=True)
    with torch.inference_mode(): assert x.sum() == 3*8*64
    (x[0]*w).sum().backward()
    assert torch.equal(w.grad, torch.full((64,), 8.))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16])
def test_every_dtype_and_what_stands_behind_rows(fetched, dtype):
    x = torch.arange(3*8*128).view(3, 8, 128).to(dtype)
    def through(x): return torch.cat([pad(x.narrow_copy(1, 0, 1), (0, 0, 0, 7)), x])[[3, 0, 5]]
    got, want = through(leave_rows(x)), through(x)
    assert type(got) is RemoteRows and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    one = leave_rows(torch.arange(600.).view(2, 300)).narrow_copy(1, 0, 1)        # a row of one number
    assert one.tolist() == [[0.], [300.]] and torch.cat([one.narrow_copy(1, 0, 0)]*2).shape == (4, 0)


def test_what_stores_rows_stores_numbers(fetched, tmp_path):
    "Files, buffers in memory and on disk, torch.save."
    whole = batch().drop("mask")
    left = lambda: leave_rows(whole)
    save_rollouts(tmp_path, 0, left())
    queues = [Queue(), Queue(spill=tmp_path/"spill", max_bytes=1000)]
    for queue in queues: queue.add(left())
    assert not any(isinstance(x, RemoteRows) for s in queues[0].waiting.slabs.rows.values() for x in s.columns.values())
    torch.save(left(), file := io.BytesIO())
    file.seek(0)
    for b in (load_rollouts(tmp_path, 0), *(queue.take(3) for queue in queues), torch.load(file, weights_only=False)):
        assert type(b.images) is torch.Tensor and torch.equal(b.images, whole.images)
        at = torch.arange(8) < whole.lengths[:, None]
        assert torch.equal(b.hidden[at], whole.hidden[at])
