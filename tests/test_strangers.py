"""Folders that a stranger made: reading one runs no code, changes no class, and reads no file that lies elsewhere. A
file that runs something when it is read makes the folder `harm`."""
import os
import pickle
import re
import struct
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import skip_without
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from rlblocks.checkpoint.convert import stored
from rlblocks.checkpoint.shards import checked_reader, read_part_shards
from rlblocks.engines.slices import Slice


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
    "A folder of torch's distributed checkpoint."
    dcp.save({"policy/w": torch.arange(4.)}, checkpoint_id=tmp_path/"shards", no_dist=True)
    return tmp_path/"shards"


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
