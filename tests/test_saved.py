"Rollouts on disk are the rollouts: every bit that a loss compares, complete or not there."
import json
import os
import signal

import pytest
import torch
from forked import context
from rlblocks import Batch, Flight, Policy, Rollout, load_rollouts, save_rollouts, saved_steps
from tiny import model, prompts, tokenizer


def sampled(**how):
    made = dict(max_tokens=6, device="cpu", tokenizer=tokenizer()) | how
    return Rollout(model(), **made)


def bits(x): return x.contiguous().view(torch.uint8) if x.numel() else x


def assert_same(a, b):
    "To the bit where there are tokens; 0 behind them."
    b = b.trim()
    real = torch.arange(b.width) < b.lengths[:, None]
    assert list(a.columns) == list(b.columns) and a.kinds == b.kinds and len(a) == len(b)
    for name, x in b.columns.items():
        if isinstance(x, list): assert a[name] == x, name
        elif b.is_per_token(name): assert a[name].dtype == x.dtype and bits(a[name][real]).equal(bits(x[real])), name
        else: assert a[name].dtype == x.dtype and bits(a[name]).equal(bits(x)), name
        if b.is_per_token(name): assert not a[name][~real].any(), name


@pytest.mark.parametrize("how", [{}, dict(top_p=.8), dict(temperature=.7, top_k=5)], ids=["plain", "top_p", "top_k"])
def test_rows_come_back_as_they_were_generated(tmp_path, how):
    "Ids, masks, log-probs, versions, reasons, supports; and the policy computes the same log-probs for them."
    batch = sampled(**how).generate(prompts(), group_size=4, seed=0)
    batch["scores"] = torch.tensor([float("nan"), -0., 1.] + [.1]*9)
    save_rollouts(tmp_path, 3, batch)
    again = load_rollouts(tmp_path, 3)
    assert_same(again, batch)
    assert ("support" in again) == bool(how) and set(again.finish_reason) <= {"completed", "max_tokens"}
    policy = Policy(model(), device="cpu")
    assert policy.logprobs(again).equal(policy.logprobs(batch.trim()))


def test_rows_of_several_versions_keep_each_tokens(tmp_path):
    flight = Flight(sampled())
    flight.ask(prompts(), group_size=2, seed=0)
    batch = Batch.cat(flight.collect(3))
    batch["policy_version"] = torch.arange(batch.width).expand(len(batch), -1)*batch.mask
    save_rollouts(tmp_path, 0, batch)
    assert_same(load_rollouts(tmp_path, 0), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int32, torch.bool])
def test_every_dtype_and_every_kind_of_column(tmp_path, dtype):
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 0, 2])
    real = torch.arange(4) < lengths[:, None]
    def of(*shape): return torch.randn(shape, generator=g).mul(9).to(dtype)
    batch = Batch(per_row=["feature"], tokens=torch.ones(3, 4).long()*real, lengths=lengths, token=of(3, 4)*real,
                  wide=of(3, 4, 2, 3)*real[..., None, None], row=of(3), feature=of(3, 5), text=["a", None, "ü\n"],
                  info=[dict(a=[1, None, "x"]), 2.5, "s"], none=[None]*3)
    save_rollouts(tmp_path, 0, batch)
    assert_same(load_rollouts(tmp_path, 0), batch)


def test_what_json_would_change_is_refused_by_name_and_nothing_is_written(tmp_path):
    for odd in ((1, 2), {1: 2}, float("nan"), object()):
        with pytest.raises(TypeError, match="column 'info'.*drop\\('info'\\)"):
            save_rollouts(tmp_path, 0, Batch(scores=torch.ones(2), info=[dict(a=1), odd]))
    assert not list(tmp_path.iterdir()) and saved_steps(tmp_path) == []
    with pytest.raises(ValueError, match="step=-1"): save_rollouts(tmp_path, -1, Batch(scores=torch.ones(2)))
    with pytest.raises(FileNotFoundError, match="step 2 is not in .*; there are no steps"): load_rollouts(tmp_path, 2)


def write_for_ever(folder, started):
    "A process: writes the same step again and again."
    torch.set_num_threads(1)
    n = 200_000
    for k in range(10**9):
        save_rollouts(folder, 0, Batch(scores=torch.full((n,), float(k)), text=[json.dumps(k)]*n))
        started.set()


def test_a_writer_that_is_killed_leaves_a_complete_step(tmp_path):
    "At ten moments; and a step that is written again replaces the one that was there."
    for k in range(10):
        started = context().Event()
        process = context().Process(target=write_for_ever, args=(str(tmp_path), started))
        process.start()
        assert started.wait(300)
        process.join(.013*k)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        batch = load_rollouts(tmp_path, 0)
        assert len(batch) == 200_000 and len(set(batch.text)) == 1 and float(batch.text[0]) == float(batch.scores[7])
    (tmp_path/"step-x.arrow").touch()        # of somebody else
    assert saved_steps(tmp_path) == [0]


def test_the_library_datasets_reads_the_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    batch = sampled().generate(prompts(), group_size=2, seed=0)
    rows = datasets.Dataset.from_file(str(save_rollouts(tmp_path, 0, batch)))
    assert rows["tokens"][1] == batch.tokens[1, :batch.lengths[1]].tolist()
    assert rows["completion"][:] == batch.completion
