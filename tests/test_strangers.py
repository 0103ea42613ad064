"""Folders that a stranger made: reading one runs no code, changes no class, and reads no file that lies elsewhere. A
file that runs something when it is read makes the folder `harm`."""
import json
import os
import pickle
import re
import struct
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import skip_without
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from rlblocks import Batch, Checkpoint, Critic, Policy, load_rollouts, published_weights, save_rollouts
from rlblocks.checkpoint.convert import main, stored
from rlblocks.checkpoint.saves import digest
from rlblocks.checkpoint.shards import checked_reader, read_part_shards
from rlblocks.data.ragged import ragged, to_arrow
from rlblocks.engines.zero_shards import Slice
from rlblocks.models.loading import load_tokenizer, weight_files
from rlblocks.placement.memory import fake_model
from tiny import model


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Harm:
    "What makes a folder when it is unpickled."
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)


class Part:
    "A part of a loop, of which this process holds a slice."
    def __init__(self): self.w = Slice(torch.zeros(4), 0, [4])
    def state_dict(self, *, full=True): return dict(w=self.w)


REST = {"w": {"shard of": "policy/w", "shape": [4]}}       # of its state in a save


@pytest.fixture
def shards(tmp_path):
    "A folder of DCP, read in a world of one: without a world no state is searched for shards."
    dcp.save({"policy/w": torch.arange(4.)}, checkpoint_id=tmp_path/"shards", no_dist=True)
    alone = not dist.is_initialized()
    if alone: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path/"shards"
    if alone: dist.destroy_process_group()


def described(shards, change):
    "The folder, with another description."
    metadata = pickle.loads((shards/".metadata").read_bytes())
    change(metadata)
    (shards/".metadata").write_bytes(pickle.dumps(metadata))


def text(x): return b"X" + struct.pack("<I", len(x)) + x.encode()


def changing(cls, name, value): # a pickle that sets an attribute of a class, or of a function
    module, word = cls.__module__, cls.__name__
    return f"\x80\x02c{module}\n{word}\nN}}".encode("latin") + text(name) + value + b"s\x86b."


def test_shards_are_read_as_they_were_written(shards):
    assert read_part_shards(REST, Part(), "policy", shards)["w"].local.tolist() == [0., 1., 2., 3.]
    into = {"policy/w": torch.zeros(4)}
    stored(shards).fill(into)
    assert into["policy/w"].tolist() == [0., 1., 2., 3.]


def test_a_description_changes_no_class(shards, tmp_path):
    "It made every path say that it is another file, which torch then loaded: `PosixPath._str`."
    (shards/"weights.bin").write_bytes(pickle.dumps(Harm(tmp_path/"harm")))
    before = {cls: dict(vars(cls)) for cls in (PosixPath, torch.serialization._get_layout, MetadataIndex)}
    try:
        for cls, name, value in ((PosixPath, "_str", text(f"{shards}/weights.bin")),
                                 (PosixPath, "is_file", b"ctorch\nSize\n"), (MetadataIndex, "fqn", text("x")),
                                 (torch.serialization._get_layout, "cache", b"}")):
            (shards/".metadata").write_bytes(changing(cls, name, value))
            with pytest.raises(ValueError, match=r"\.metadata: reading it would change <"): checked_reader(shards)
            with pytest.raises(ValueError, match="would change"): stored(shards)
            with pytest.raises(ValueError, match="would change"): read_part_shards(REST, Part(), "policy", shards)
            assert vars(cls) == before[cls]
    finally:
        for cls, own in before.items():
            for name in vars(cls).keys() - own.keys(): delattr(cls, name)
    assert not (tmp_path/"harm").exists()


@pytest.mark.parametrize("as_state", [False, True])
def test_nothing_endless_is_put_in_words(shards, as_state):
    "The repr of 29 lists in each other took all memory."
    lists = []
    for _ in range(28): lists = [lists, lists]
    def as_name(metadata):
        for x in metadata.storage_data.values(): x.relative_path = lists
    if as_state: (shards/".metadata").write_bytes(pickle.dumps(lists, 2)[:-1] + b"}" + text("x") + b"Nsb.")
    else: described(shards, as_name)
    assert (shards/".metadata").stat().st_size < 1500
    with pytest.raises(ValueError, match="would change <class 'list'>" if as_state else "the name of a file is a list"):
        checked_reader(shards)


def test_bytes_in_shards_are_not_loaded(shards, tmp_path):
    "torch loads what a description calls bytes with `weights_only=False`."
    torch.save(Harm(tmp_path/"harm"), shards/"harm.pt")
    def as_bytes(metadata):
        metadata.state_dict_metadata["policy/w"] = BytesStorageMetadata()
        whole = _StorageInfo("harm.pt", 0, os.path.getsize(shards/"harm.pt"))
        metadata.storage_data = {MetadataIndex("policy/w"): whole}
    described(shards, as_bytes)
    with pytest.raises(RuntimeError, match="policy/w"): read_part_shards(REST, Part(), "policy", shards)
    assert not (tmp_path/"harm").exists() and not stored(shards).weights


@pytest.mark.parametrize("kind", ["above", "absolute", "link", "pipe", "folder"])
def test_shards_lie_in_their_folder(shards, tmp_path, kind):
    file, = shards.glob("*.distcp")
    elsewhere = file.rename(tmp_path/"elsewhere")
    name = dict(above="../elsewhere", absolute=str(elsewhere)).get(kind, file.name)
    if kind == "link": file.symlink_to(elsewhere)
    if kind == "pipe": os.mkfifo(file)
    if kind == "folder": file.mkdir()
    def moved(metadata):
        for x in metadata.storage_data.values(): x.relative_path = name
    described(shards, moved)
    why = "is no regular file" if kind in ("pipe", "folder") else "leads out of the folder"
    with pytest.raises(ValueError, match=why): stored(shards)
    with pytest.raises(ValueError, match=why): read_part_shards(REST, Part(), "policy", shards)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\x80\x04}.", b"\x80\x04(((.",
                                  b"\x80\x04\x8e" + b"\xff"*7 + b"\x7f"])
def test_a_description_that_is_none_is_named(shards, data):
    (shards/".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"{shards}/.metadata is no description of tensors")): stored(shards)


HARMLESS = dict(module={}, buffer_names=[], param_shapes=[], shared_params={}, ds_version="0.19.8")


def deepspeed_save(folder, **more):
    folder.mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(HARMLESS | more, folder/name)


def test_a_pattern_for_a_tag_of_deepspeed_reads_no_other_folder(tmp_path):
    "`step[1]` was checked, and the script's glob read `step1`, with `weights_only=False`."
    skip_without("deepspeed")
    deepspeed_save(tmp_path/"run/step[1]")
    deepspeed_save(tmp_path/"run/step1", optimizer_state_dict=Harm(tmp_path/"harm"))
    (tmp_path/"run/latest").write_text("step[1]")
    with pytest.raises(ValueError, match=r"run/step\[1\]: DeepSpeed takes \* \? \[ in a path for a pattern"):
        stored(tmp_path/"run")
    for tag in ("../run/step1", str(tmp_path/"run/step1"), "..", ""):
        (tmp_path/"run/latest").write_text(tag)
        with pytest.raises(ValueError, match="latest says .* and the name of a folder beside it is wanted"):
            stored(tmp_path/"run")
    assert not (tmp_path/"harm").exists()


def test_deepspeeds_script_loads_safely_whatever_it_finds(tmp_path, monkeypatch):
    "Also files that come after a check would have been made."
    skip_without("deepspeed")
    from deepspeed.utils import zero_to_fp32
    deepspeed_save(tmp_path/"step1")
    late = zero_to_fp32.get_model_state_files
    def changed(folder):
        torch.save(HARMLESS | dict(harm=Harm(tmp_path/"harm")), tmp_path/"step1/mp_rank_00_model_states.pt")
        return late(folder)
    monkeypatch.setattr(zero_to_fp32, "get_model_state_files", changed)
    with pytest.raises(ValueError, match="holds what a safe load refuses"): stored(tmp_path/"step1")
    assert not (tmp_path/"harm").exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_of_deepspeed_lie_in_their_folder(tmp_path, kind):
    skip_without("deepspeed")
    deepspeed_save(tmp_path/"run/step1")
    file = tmp_path/"run/step1/mp_rank_00_model_states.pt"
    file.rename(tmp_path/"elsewhere")
    file.symlink_to(tmp_path/"elsewhere") if kind == "link" else os.mkfifo(file)
    (tmp_path/"run/latest").write_text("step1")
    with pytest.raises(ValueError, match="leads out of" if kind == "link" else "is no regular file"):
        stored(tmp_path/"run")
    Path(tmp_path/"run/latest").unlink()
    file.unlink()
    file.write_text("")
    (tmp_path/"run/latest").symlink_to(tmp_path/"elsewhere")
    with pytest.raises(ValueError, match="'latest' leads out of"): stored(tmp_path/"run")


# -- published weights

TICKET = dict(version=1, files=["00000.safetensors"], shapes=dict(w=[2]), dtypes=dict(w="float32"), checksums=dict(w=1),
              merged=False, probe=[], scores=None)


@pytest.fixture
def version(tmp_path):
    "A published version, beside which lies a file of somebody's."
    save_file(dict(w=torch.ones(2)), tmp_path/"secret.safetensors")
    version = tmp_path/"published"/"version-000000001"
    version.mkdir(parents=True)
    save_file(dict(w=torch.ones(2)), version/"00000.safetensors")
    (version/"ticket.json").write_text(json.dumps(TICKET))
    return version


def first_bucket(version): return next(published_weights(version.parent).buckets(1 << 20))


@pytest.mark.parametrize("name", ["../../secret.safetensors", "{0}/secret.safetensors", "link", "pipe", "."])
def test_published_weights_lie_in_their_folder(version, tmp_path, name):
    assert first_bucket(version)["w"].tolist() == [1., 1.]
    (version/"link").symlink_to(tmp_path/"secret.safetensors")
    os.mkfifo(version/"pipe")
    (version/"ticket.json").write_text(json.dumps(TICKET | dict(files=[name.format(tmp_path)])))
    with pytest.raises(ValueError, match="leads out of the folder|is no regular file"): first_bucket(version)


@pytest.mark.parametrize("text", ['{"version": 1, "fi', "[]", "{}", "3", "[" * 100_000, b"\xff\xfe".decode("latin"),
                                  *(json.dumps(TICKET | change) for change in (
                                      dict(dtypes=dict(w="load")), dict(dtypes=dict(w="nope")), dict(dtypes=["w"]),
                                      dict(shapes=dict(w="x")), dict(version="x"), dict(probe=None), dict(scores=3)))])
def test_a_ticket_that_is_none_is_named(version, text):
    (version/"ticket.json").write_text(text, encoding="latin")
    with pytest.raises(ValueError, match=r"version-000000001/ticket\.json is not what publish_weights writes"):
        published_weights(version.parent)


def test_a_ticket_that_is_a_pipe_keeps_nobody_waiting(version):
    (version/"ticket.json").unlink()
    os.mkfifo(version/"ticket.json")
    with pytest.raises(ValueError, match="is no regular file"): published_weights(version.parent)


# -- saved rollouts

@pytest.fixture
def rollouts(tmp_path):
    lengths = torch.tensor([77, 5, 11])
    batch = Batch(tokens=torch.arange(300).view(3, 100), lengths=lengths, text=["a"*78, "b"*4, "c"], info=[[], [1], []])
    return save_rollouts(tmp_path/"rollouts", 1, batch)


def loaded(file): return load_rollouts(file.parent, 1)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_saved_rollouts_lie_in_their_folder(rollouts, tmp_path, kind):
    assert loaded(rollouts).text[2] == "c"
    rollouts.rename(tmp_path/"elsewhere")
    rollouts.symlink_to(tmp_path/"elsewhere") if kind == "link" else os.mkfifo(rollouts)
    with pytest.raises(ValueError, match="leads out of" if kind == "link" else "is no regular file"): loaded(rollouts)


@pytest.mark.parametrize("data", [b"", b"x"*1000, struct.pack("<ii", -1, 1 << 30)])
def test_rollouts_that_are_none_are_named(rollouts, data):
    rollouts.write_bytes(data)
    with pytest.raises(ValueError, match=r"step-000000001\.arrow is not what to_arrow writes"): loaded(rollouts)


@pytest.mark.parametrize("old", [(77, 82), (78, 82)], ids=["tokens", "text"])
@pytest.mark.parametrize("new", [1 << 40, -(1 << 40)])
def test_offsets_of_rollouts_lie_in_the_file(rollouts, old, new):
    "Those of a text that did not ended the process, in C++."
    data, (one, two) = rollouts.read_bytes(), old
    assert data.count(struct.pack("<qq", one, two)) == 1
    rollouts.write_bytes(data.replace(struct.pack("<qq", one, two), struct.pack("<qq", new, new + two - one)))
    with pytest.raises(ValueError, match="is not what to_arrow writes"): loaded(rollouts)


def test_deep_json_in_rollouts_is_named(rollouts):
    deep = "["*100_000
    batch = Batch(**{"json:info": [deep, deep]}, scores=torch.zeros(2))
    to_arrow(ragged(batch), rollouts)
    with pytest.raises(ValueError, match=r"step-000000001\.arrow has odd JSON: RecursionError"): loaded(rollouts)


# -- a run of Checkpoint

@pytest.fixture
def save(tmp_path):
    "One save of a run."
    for _ in (checkpoint := Checkpoint(tmp_path/"run"))(1, state=dict(x=1)): pass
    return checkpoint.saves()[0]


def meta(save, **change):
    file = save/"meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def resumed(save): return Checkpoint(save.parent).restore(dict(state=(state := {}))), state


@pytest.mark.parametrize("name", ["../../secret.pt", "{0}/secret.pt", "link.pt", "pipe.pt", "."])
def test_files_of_a_save_lie_in_it(save, tmp_path, name):
    assert resumed(save) == (1, dict(x=1))
    (save/"link.pt").symlink_to((save/"state.pt").rename(tmp_path/"secret.pt"))
    os.mkfifo(save/"pipe.pt")
    meta(save, files={name.format(tmp_path): digest(tmp_path/"secret.pt")})
    with pytest.raises(ValueError, match="leads out of the folder|is no regular file"): resumed(save)
    with pytest.raises(ValueError, match="leads out of the folder|is no regular file"): stored(save)


@pytest.mark.parametrize("change", [dict(files=3), dict(step="x"), dict(step=None), dict(folders=[1]),
                                    dict(folders=dict(state="../../elsewhere"))])
def test_a_list_of_a_save_that_is_none_is_named(save, change):
    meta(save, **change)
    with pytest.raises(ValueError, match=r"step-00000001/meta\.json cannot be read"): resumed(save)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"step": 1', "["*100_000])
def test_a_list_that_is_no_list_is_named(save, text):
    (save/"meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"step-00000001/meta\.json cannot be read"): resumed(save)
    assert Checkpoint(save.parent).best() is None


def test_a_save_is_no_link_out_of_its_run(save, tmp_path):
    "`convert` and a resume took the last save of another run."
    for _ in Checkpoint(tmp_path/"another")(9, state=dict(x=2)): pass
    (save.parent/"step-00000009").symlink_to(tmp_path/"another/step-00000009")
    for read in (resumed, lambda save: stored(save.parent), lambda save: Checkpoint(save.parent).best()):
        with pytest.raises(ValueError, match="'step-00000009' leads out of the folder"): read(save)


def test_a_list_of_a_save_that_is_a_link_is_not_cured_by_deleting_the_save(save, tmp_path):
    (save/"meta.json").rename(tmp_path/"meta.json")
    (save/"meta.json").symlink_to(tmp_path/"meta.json")
    with pytest.raises(ValueError, match="to the place of the link$"): resumed(save)


def test_a_save_may_be_a_link_in_its_run_and_its_list_not_a_pipe(save):
    save.rename(save.parent/"elsewhere")
    save.symlink_to("elsewhere")
    assert resumed(save) == (1, dict(x=1))
    (save/"meta.json").unlink()
    os.mkfifo(save/"meta.json")
    with pytest.raises(ValueError, match="is no regular file"): resumed(save)
    assert Checkpoint(save.parent).best() is None


def test_the_lock_of_a_run_writes_into_no_file_elsewhere(save, tmp_path):
    "Its signature took the place of the first 200 bytes of any file of the user's."
    (tmp_path/"mine").write_text("x"*300)
    (save.parent/".lock").unlink()
    (save.parent/".lock").symlink_to(tmp_path/"mine")
    with pytest.raises(OSError, match=r"\.lock is a link"):
        for _ in Checkpoint(save.parent)(2, state={}): pass
    assert (tmp_path/"mine").read_text() == "x"*300


# -- adapters and models

@pytest.fixture
def adapter(tmp_path):
    Policy(model(), lora=dict(r=2), device="cpu").save_pretrained(tmp_path/"adapter", adapter=True)
    return tmp_path/"adapter"


def adapted(folder): return Policy(model(), lora=folder, device="cpu")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_of_an_adapter_lie_in_its_folder(adapter, tmp_path, name, kind):
    (adapter/name).rename(tmp_path/"elsewhere")
    (adapter/name).symlink_to(tmp_path/"elsewhere") if kind == "link" else os.mkfifo(adapter/name)
    with pytest.raises(ValueError, match="leads out of" if kind == "link" else "is no regular file"): adapted(adapter)


def test_an_adapter_in_hugging_faces_cache_is_made_of_links(adapter, tmp_path):
    "Into the blobs of its repository; a link of the user's to the snapshot is followed as well."
    snapshot, blobs = tmp_path/"models--x--y"/"snapshots"/"1a2b", tmp_path/"models--x--y"/"blobs"
    for folder in (snapshot, blobs): folder.mkdir(parents=True)
    for i, file in enumerate(sorted(adapter.iterdir())):
        file.rename(blobs/str(i))
        (snapshot/file.name).symlink_to(f"../../blobs/{i}")
    (tmp_path/"mine").symlink_to(snapshot)
    for folder in (snapshot, tmp_path/"mine"): assert "lora" in adapted(folder).state_dict()
    (snapshot/"adapter_model.safetensors").unlink()
    (snapshot/"adapter_model.safetensors").symlink_to("../../refs")
    with pytest.raises(ValueError, match="leads out of the folder"): adapted(snapshot)


@pytest.mark.parametrize("text", ["[]", '{"r": 2', "{}]", '{"peft_type": "nope"}', '{"peft_type": "IA3"}'])
def test_settings_of_an_adapter_that_are_none_are_named(adapter, text):
    (adapter/"adapter_config.json").write_text(text)
    why = "adapter_config.json is not what peft writes|adapter of another kind, IA3Config"
    with pytest.raises(ValueError, match=why): adapted(adapter)


def test_an_adapter_names_no_module_to_import(adapter):
    "peft imports what `megatron_core` names, be it a file beside the notebook."
    config = json.loads((adapter/"adapter_config.json").read_text())
    config |= dict(megatron_config={}, megatron_core="harm")
    (adapter/"adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lora: megatron_con?.*is not supported here"): adapted(adapter)


def test_weights_of_an_adapter_that_are_none_are_named(adapter):
    (adapter/"adapter_model.safetensors").write_bytes(b"x"*100)
    with pytest.raises(ValueError, match="lora: cannot read .*adapter_model.safetensors"): adapted(adapter)


def test_an_index_of_weights_names_no_file_elsewhere(tmp_path):
    model().save_pretrained(tmp_path/"model", max_shard_size="20kB")
    index = tmp_path/"model"/"model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name, file = next(iter(listed["weight_map"].items()))
    assert weight_files(tmp_path/"model")[name] == str(tmp_path/"model"/file)
    (tmp_path/"model"/file).rename(tmp_path/"secret.safetensors")
    for odd in ("../secret.safetensors", str(tmp_path/"secret.safetensors")):
        index.write_text(json.dumps(dict(weight_map={name: odd})))
        with pytest.raises(ValueError, match="names .*secret.safetensors', and the name of a file beside it is wanted"):
            weight_files(tmp_path/"model")


def test_a_model_runs_no_code_of_its_own_and_asks_nobody(tmp_path, monkeypatch):
    "transformers asks on standard input, and a yes ran it."
    model().save_pretrained(tmp_path/"model")
    config = json.loads((tmp_path/"model/config.json").read_text())
    (tmp_path/"model/harm.py").write_text(f"import os\nos.mkdir({str(tmp_path/'harm')!r})\n")
    names = dict(AutoConfig="harm.C", AutoModelForCausalLM="harm.M", AutoModel="harm.M", AutoTokenizer=["harm.T", None])
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path/"model/tokenizer_config.json").write_text(json.dumps(dict(auto_map=names)))
    assert load_tokenizer(tmp_path/"model") is None
    loads = (Policy, lambda folder, **_: fake_model(folder), Critic)
    for kind, wrappers in dict(stranger=loads, vit=loads[:2]).items():         # a critic of vit needs none of its code
        (tmp_path/"model/config.json").write_text(json.dumps(config | dict(auto_map=names, model_type=kind)))
        for load in wrappers:
            with pytest.raises((ValueError, TypeError), match="brings code of its own|custom code"):
                load(str(tmp_path/"model"), device="cpu")
    assert not (tmp_path/"harm").exists()


def test_what_cannot_be_converted_is_said_in_a_line(save, tmp_path, capsys):
    model().save_pretrained(tmp_path/"model")
    capsys.readouterr()           # of transformers' progress
    with pytest.raises(SystemExit) as end: main([str(save), str(tmp_path/"out"), "--base", str(tmp_path/"model")])
    err = capsys.readouterr().err
    assert end.value.code == 2 and re.match("convert: .* holds weights of nobody", err) and err.count("\n") == 1
