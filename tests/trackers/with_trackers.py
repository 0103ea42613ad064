"""`log_to` with wandb, trackio, TensorBoard and MLflow themselves, whose own files are read back. Nothing asks the
network. Run by tests/test_tracking.py with the interpreter of `make trackers`."""
import json
import os
import struct
import time
from pathlib import Path

os.environ |= dict(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false", HF_HUB_OFFLINE="1",
                   MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true", TRACKIO_DISABLE_TELEMETRY="1",
                   DO_NOT_TRACK="true")

import pytest
import torch
from rlblocks import Batch, Checkpoint, MLflow, TensorBoard, Trackio, Wandb, log_to

LENGTHS = torch.tensor([6, 5, 6, 4])
SAMPLED = Batch(tokens=torch.zeros(4, 6, dtype=torch.long), lengths=LENGTHS, group=torch.arange(4)//2,
                mask=(torch.arange(6) >= 3) & (torch.arange(6) < LENGTHS[:, None]),
                scores=torch.tensor([1., 0., torch.nan, 1.]), prompt=["1+1=", "1+1=", "|-3|\n=", "3+4="],
                completion=["2", "3", "", "7"])


def learns(*, first=0, steps=4, lr=.5, kind="grpo", checkpoint=Checkpoint()):
    "A loop with a batch that was sampled."
    batch = SAMPLED
    for step in range(first, steps):
        reward = batch.scores.nanmean().item() + lr*step
        yield dict(step=step, reward=reward, clip_frac=.1, kl=float("nan"), note="text")


REWARDS = {step: pytest.approx(2/3 + .5*step) for step in range(6)}


def run(*sinks, folder, **loop):
    list(log_to(learns(**loop), *sinks, folder=folder, names="trl", console=False, every=2, samples=3))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wandb_records(file):
    "The records of a .wandb file: blocks of 32 KiB of (checksum, length, kind) and bytes, as LevelDB's log has them."
    from wandb.proto.wandb_internal_pb2 import Record
    data, at, part, found = file.read_bytes(), 7, b"", []           # 7: the header, ":W&B" and a version
    while at < len(data):
        if (left := 32768 - at % 32768) < 7: at += left             # no head fits: padding
        else:
            size, kind = struct.unpack("<HB", data[at + 4:at + 7])
            part += data[at + 7:at + 7 + size]
            at += 7 + size
            if kind in (1, 4):                                      # whole, or the last of several
                found.append(Record.FromString(part))
                part = b""
    return found


def test_wandb(tmp_path):
    run(Wandb(project="maths", tags=["small"]), folder=tmp_path/"a")
    time.sleep(1.1)                                                 # wandb names a folder by the second
    run("wandb", folder=tmp_path/"a", first=3, steps=6)             # killed after step 3, saved after step 2
    files = sorted(Path("a/wandb").glob("offline-run-*/*.wandb"))
    records = [wandb_records(file) for file in files]
    history = [{x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in r.history.item}
               for of_file in records for r in of_file if r.WhichOneof("record_type") == "history"]
    assert {row["_step"]: row["reward"] for row in history if "reward" in row} == REWARDS
    assert len([row for row in history if "reward" in row]) == 6    # step 3 once
    assert history[0]["clip_ratio/region_mean"] == .1 and "note" not in history[0] and "step" not in history[0]
    runs = [r.run for of_file in records for r in of_file if r.WhichOneof("record_type") == "run"]
    assert len({x.run_id for x in runs}) == 1 and runs[0].project == "maths" and runs[0].tags == ["small"]
    assert runs[0].display_name == "a"
    config = {x.key: json.loads(x.value_json) for x in runs[0].config.update}
    assert config["lr"] == .5 and config["kind"] == "grpo" and config["steps"] == 4
    tables = sorted(Path("a/wandb").glob("offline-run-*/files/media/table/samples_*.json"))
    table = json.loads(tables[0].read_text())
    assert len(tables) == 3                                         # of steps 0, 2, 4
    assert table["columns"] == ["step", "prompt", "completion", "score", "length"]
    assert table["data"] == [[0, "1+1=", "2", 1., 3], [0, "1+1=", "3", 0., 2], [0, "|-3|\n=", "", None, 3]]


def test_trackio(tmp_path, monkeypatch):
    run("trackio", folder=tmp_path/"a")
    run(Trackio(), folder=tmp_path/"a", first=3, steps=6)
    run(Trackio(), folder=tmp_path/"b", steps=1)
    from trackio.sqlite_storage import SQLiteStorage
    runs = [x for x in SQLiteStorage.get_runs("rlblocks")]
    assert len(runs) == 2
    name = json.loads((tmp_path/"a/trackio.json").read_text())["id"]
    logs = SQLiteStorage.get_logs("rlblocks", name)
    assert {x["step"]: x["reward"] for x in logs if "reward" in x} == REWARDS
    assert len([x for x in logs if "reward" in x]) == 6 and logs[0]["clip_ratio/region_mean"] == .1
    tables = [x["samples"] for x in logs if "samples" in x]
    assert len(tables) == 3 and tables[0]["_value"][2]["prompt"] == "|-3|\n=" and tables[0]["_value"][1]["score"] == 0
    config = SQLiteStorage.get_run_config("rlblocks", name)
    assert config["lr"] == .5 and config["kind"] == "grpo"


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run("tensorboard", folder=tmp_path/"a", lr=7.)
    run(TensorBoard(), folder=tmp_path/"a", first=3, steps=6)
    kept = EventAccumulator(str(tmp_path/"a/tensorboard")).Reload()
    rewards = [(x.step, x.value) for x in kept.Scalars("reward")]
    assert [step for step, _ in rewards] == [*range(6)]
    assert rewards[2][1] == pytest.approx(2/3 + 14) and rewards[3][1] == REWARDS[3]      # the new step 3
    assert kept.Scalars("clip_ratio/region_mean")[0].value == pytest.approx(.1)
    texts = {tag: [x.tensor_proto.string_val[0].decode() for x in kept.Tensors(tag)] for tag in kept.Tags()["tensors"]}
    assert len(texts["samples/text_summary"]) == 3
    assert "| 0 | \\|-3\\|<br>= |  | None | 3 |" in texts["samples/text_summary"][0]
    assert "| lr | 7.0 |" in texts["config/text_summary"][0]


def test_mlflow(tmp_path):
    import mlflow
    store = f"file:{tmp_path}/runs"
    run(MLflow("maths", uri=store), folder=tmp_path/"a")
    run(MLflow("maths", uri=store), folder=tmp_path/"a", first=3, steps=6)
    client = mlflow.MlflowClient(store)
    found, = client.search_runs([client.get_experiment_by_name("maths").experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward")
    assert [x.step for x in history] == [*range(6)] and {x.step: x.value for x in history} == REWARDS
    assert client.get_metric_history(found.info.run_id, "clip_ratio/region_mean")[0].value == .1
    assert found.data.params["lr"] == "0.5" and found.data.params["kind"] == "grpo"
    assert found.info.run_name == "a" and found.info.status == "FINISHED"
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "samples.json")).read_text())
    assert table["columns"] == ["step", "prompt", "completion", "score", "length"]
    assert [row[0] for row in table["data"]] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    assert table["data"][1:3] == [[0, "1+1=", "3", 0., 2], [0, "|-3|\n=", "", None, 3]]


def test_a_tracker_that_cannot_begin_is_left_out(tmp_path, monkeypatch):
    import wandb
    nobody = wandb.Settings(base_url="http://127.0.0.1:9", api_key="0"*40, init_timeout=2.)
    with pytest.warns(UserWarning, match="(?s)Wandb.log failed, and the run goes on without.*; it is left out") as said:
        run(Wandb(mode="online", settings=nobody), folder=tmp_path/"a")
    assert len([x for x in said if "log_to" in str(x.message)]) == 1
    assert len((tmp_path/"a/log.jsonl").read_text().splitlines()) == 4


def test_numbers_are_the_same_with_every_tracker(tmp_path):
    bare = [str(row) for row in learns()]
    sinks = ["wandb", Trackio(), "tensorboard", MLflow(uri=f"file:{tmp_path}/runs")]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert [str(row) for row in log_to(learns(), *sinks, folder=tmp_path/"a", console=False)] == bare
    assert torch.get_rng_state().equal(before)
