"""Folders: whole or not at all, on disk before they are renamed, in the form that transformers writes, whatever it
keeps otherwise in memory."""
import json
import os
import resource
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from rlblocks import Batch, Checkpoint, Critic, Policy, Scorer, save_rollouts
from rlblocks.data import saved
from rlblocks.models.folders import as_filed, drafted, plain_twin, save_folder, together
from rlblocks.data.ragged import persist
from safetensors.torch import load_file
from tiny import model, rows, tokenizer

pytest.importorskip("transformers")


def files(folder): return sorted(f.name for f in folder.iterdir())
def read(folder): return {k: x for f in folder.glob("*.safetensors") for k, x in load_file(f).items()}


def fused():
    "In its files queries, keys, values and their gate are one matrix."
    from transformers import HrmTextConfig, HrmTextForCausalLM
    torch.manual_seed(0)
    return HrmTextForCausalLM(HrmTextConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                            num_attention_heads=4, max_position_embeddings=64))


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.warns(
            UserWarning,
            match="save_pretrained: no tokenizer is known, so .*bare has none .* give the wrapper tokenizer=") as seen:
        Policy(model(), device="cpu").save_pretrained(tmp_path/"bare")
    assert sum("no tokenizer" in str(w.message) for w in seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Policy(model(), tokenizer=tokenizer(), device="cpu").save_pretrained(tmp_path/"with")


@pytest.mark.parametrize("make, held",
                         [(model, "none"), (lambda: model("gemma"), "none"), (lambda: model("gpt2"), "none"),
                          (lambda: model("qwen3_moe"), "none"), (lambda: model("mixtral"), "none"), (fused, "layers")],
                         ids=["llama", "tied", "gpt2", "qwen3_moe", "mixtral", "fused"])
def test_files_are_those_that_transformers_writes(make, held, tmp_path):
    from transformers import AutoModelForCausalLM
    net = make()
    net.save_pretrained(tmp_path/"theirs")
    Policy(net, device="cpu").save_pretrained(tmp_path/"ours", max_shard_bytes=40_000)
    theirs, ours = read(tmp_path/"theirs"), read(tmp_path/"ours")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert len(files(tmp_path/"ours")) > 4
    index = json.loads((tmp_path/"ours/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in theirs.values())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path/"ours")
    assert type(plain) is type(net) and all(torch.equal(x, net.state_dict()[k]) for k, x in plain.state_dict().items())
    units = together(plain_twin(net))
    assert bool(units) == (held == "layers") and all(".0" in u or ".1" in u for u in units.values())


def test_what_shares_a_place_in_a_file_must_come():
    net = fused()
    some = [(k, x) for k, x in net.state_dict().items() if "q_proj" not in k]
    with pytest.raises(ValueError, match="arrived without the weights that share its place"):
        list(as_filed(plain_twin(net), some))


def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path):
    policy = Policy(model(), tokenizer=tokenizer(), device="cpu")
    (tmp_path/"mine.txt").write_text("mine")
    (tmp_path/"runs").mkdir()
    policy.save_pretrained(tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    policy.save_pretrained(tmp_path)
    assert files(tmp_path) == ["chat_template.jinja", "config.json", "generation_config.json", "mine.txt",
                               "model.safetensors", "runs", "tokenizer.json", "tokenizer_config.json"]
    class Breaks:
        def save_pretrained(self, folder): raise RuntimeError("mine")
    before = {f: (tmp_path/f).read_bytes() for f in files(tmp_path) if f != "runs"}
    with pytest.raises(RuntimeError, match="mine"):
        Policy(model(seed=1), tokenizer=Breaks(), device="cpu").save_pretrained(tmp_path)
    assert before == {f: (tmp_path/f).read_bytes() for f in files(tmp_path) if f != "runs"}


KILLED = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from rlblocks import Policy
from tiny import model
n, count = int(sys.argv[2]), 0
own = os.replace
def replace(*args):
    global count
    count += 1
    if count == n: os.kill(os.getpid(), signal.SIGKILL)
    own(*args)
policy = Policy(model(seed=1), device="cpu")
os.replace = replace
policy.save_pretrained(sys.argv[1])
"""


@pytest.mark.parametrize("n", [2, 3])
def test_a_process_that_is_killed_leaves_no_mixture(n, tmp_path, root):
    "The first rename is a file's name in the draft; then the draft's files come to their places, config.json last."
    from transformers import AutoModelForCausalLM
    Policy(model(), device="cpu").save_pretrained(tmp_path)
    run = subprocess.run([sys.executable, "-c", KILLED.format(tests=str(root/"tests")), str(tmp_path), str(n)],
                         cwd=root, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not (tmp_path/"config.json").exists() and (tmp_path/"model.safetensors").exists() == (n == 3)
    with pytest.raises(FileNotFoundError, match="holds no model: there is no config.json"):
        Policy(tmp_path, device="cpu")
    Policy(model(seed=1), device="cpu").save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model(seed=1).lm_head.weight)


@pytest.fixture
def told(monkeypatch):
    "Names of what was waited for and what was renamed, in order; both are done all the same."
    seen, fsync, replace = [], os.fsync, os.replace
    def waits(fd):
        seen.append(("on disk", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)
    def renames(a, b):
        seen.append(("renamed", str(a), str(b)))
        replace(a, b)
    monkeypatch.setattr(os, "fsync", waits)
    monkeypatch.setattr(os, "replace", renames)
    return seen


def settled(told, path, held):
    "All that a rename into `path` names was on disk before it, and the name is afterwards."
    at = next(i for i, x in enumerate(told) if x[0] == "renamed" and x[2] == str(path))
    source = told[at][1]
    before, after = {x[1] for x in told[:at] if x[0] == "on disk"}, {x[1] for x in told[at:] if x[0] == "on disk"}
    return {f"{source}/{f}" if f else source for f in held} <= before and str(path.parent) in after


def test_a_model_is_on_disk_before_it_has_its_name(told, tmp_path):
    policy = Policy(model(), tokenizer=tokenizer(), device="cpu")
    policy.save_pretrained(tmp_path/"model")
    for name in files(tmp_path/"model"): assert settled(told, tmp_path/"model"/name, [""]), name
    assert told[-1] == ("on disk", str(tmp_path/"model"))
    assert [x for x in told if x[0] == "renamed"][-1][2].endswith("config.json")


def test_a_checkpoint_is_on_disk_before_it_has_its_name(told, tmp_path):
    checkpoint = Checkpoint(tmp_path, every=1)
    for _ in checkpoint(1, policy=Policy(model(), device="cpu"), state=dict(n=1)): pass
    folder, = checkpoint.saves()
    assert settled(told, folder, ["", *files(folder)]) and {"meta.json", "policy.pt", "state.pt"} <= set(files(folder))


def test_persist_and_drafts_refuse_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError): persist(tmp_path/"nothing")
    with pytest.raises(ZeroDivisionError):
        with drafted(tmp_path, "last") as draft:
            (draft/"last").write_text("x")
            raise ZeroDivisionError
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [Policy, Critic, Scorer])
def test_a_half_precision_model_is_saved_in_the_precision_it_was_loaded_in(kind, tmp_path):
    "fp32 where fp32 came; a head is kept in its own precision, so that what is read back scores the same."
    net = model(dtype=torch.bfloat16)
    net.model.norm.float()
    wrapper = kind(net, device="cpu", lr=1e-2)
    def loss(out, b):
        return ((out.scores if kind is Scorer else out.logprobs.sum(1) if kind is Policy
                 else out.values.sum(1))-1).square().sum()/b.n_rows, {}
    b = rows(dtype=torch.float32)
    wrapper.step(b, loss)
    wrapper.save_pretrained(tmp_path)
    found = read(tmp_path)
    assert {k for k, x in found.items()
            if x.dtype == torch.float32} == {"model.norm.weight"} | ({"score.weight"} if kind is not Policy else set())
    assert json.loads((tmp_path/"config.json").read_text())["dtype"] == "bfloat16"
    if kind is not Policy: assert torch.equal(found["score.weight"], wrapper._run.module.head.weight.detach())
    wrapper.save_pretrained(tmp_path, dtype=torch.float32)
    exact = {k.partition(".")[2]: x for bucket in wrapper._run.model.iter_full_params() for k, x in bucket.items()}
    found = read(tmp_path)
    assert all(x.dtype == torch.float32 for x in found.values())
    assert json.loads((tmp_path/"config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(found[k if kind is Policy else f"model.{k}"], x) for k, x in exact.items() if k != "weight")


def test_sizes_and_modules_that_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="Policy: max_shard_bytes=0; the most bytes of a file"):
        Policy(model(), device="cpu").save_pretrained(tmp_path, max_shard_bytes=0)
    with pytest.raises(TypeError, match="a Linear has no save_pretrained"):
        save_folder(torch.nn.Linear(2, 2), iter(()), tmp_path, who="Policy")
    assert files(tmp_path) == []


@pytest.mark.parametrize("lora", [None, dict(r=4)])
def test_a_model_that_does_not_fit_on_the_disk(lora, tmp_path):
    """Whichever file it is that does not fit, and whichever library writes it: OSError with folder and disk, nothing
    left of it, and what was there stays."""
    policy, how = Policy(model(), tokenizer=tokenizer(), device="cpu", lora=lora), dict(adapter=True) if lora else {}
    policy.save_pretrained(tmp_path, **how)
    before, limits = {f: (tmp_path/f).read_bytes() for f in files(tmp_path)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = sorted(map(len, before.values()))
    for most in (100, sizes[-2] - 1, sizes[-1] - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(
                    OSError,
                    match=f"Policy: cannot save to {tmp_path}: .*File too large; .* bytes are free on its disk"):
                policy.save_pretrained(tmp_path, **how)
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {f: (tmp_path/f).read_bytes() for f in files(tmp_path)} == before


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    def killed(write):
        if not (child := os.fork()):
            write()
            os._exit(0)
        os.waitpid(child, 0)
    def die(*_): os.kill(os.getpid(), signal.SIGKILL)
    def half_a_model():
        with drafted(tmp_path, "config.json") as draft:
            (draft/"weights").write_text("x")
            die()
    def half_of_rollouts():
        saved.persist = die
        save_rollouts(tmp_path, 3, batch)
    batch = Batch(tokens=torch.ones(1, 2, dtype=torch.long), lengths=torch.tensor([2]))
    for write in (half_a_model, half_of_rollouts): killed(write)
    assert len(files(tmp_path)) == 2
    save_rollouts(tmp_path, 3, batch)
    with drafted(tmp_path, "config.json") as draft: (draft/"config.json").write_text("x")
    assert files(tmp_path) == ["config.json", "step-000000003.arrow"]
