"""States that no process holds whole: saved in shards by one number of ranks, read by another, by another stage of
ZeRO, and by one process that has no ranks at all."""
import io
import json
import os
import pickle
import resource
import shutil
from functools import partial

import pytest
import torch
from conftest import skip_without
import torch.distributed as dist
from forked import on_ranks
from rlblocks import Checkpoint, Policy, Scorer, masked_mean
from rlblocks.checkpoint.saves import Lock
from rlblocks.checkpoint.convert import convert, main, stored
from rlblocks.checkpoint.shards import MetadataUnpickler
from tiny import NEAR, model, reach, rows, steady, tokenizer

skip_without("deepspeed")
pytestmark = pytest.mark.ranks
LR = 1e-2
HOW = dict(optimizer=steady(LR, weight_decay=.1, max_norm=.5), device="cpu", micro_rows=4)
STEPS = 4
LORA = dict(fsdp2=dict(r=4, lora_alpha=12, use_rslora=True, modules_to_save=["norm"]),
            zero3=dict(r=4, use_dora=True, target_modules=["q_proj", "down_proj"]))
# engine that saved → engines that go on
SAVED = dict(fsdp2=["fsdp2"], zero1=["zero1", "zero3"], zero2=["zero2"], zero3=["zero3", "zero1"])


def net():
    "Tied weights, and frozen ones: a norm and a projection."
    m = model("gemma")
    for name, p in m.named_parameters():
        p.requires_grad_("layers.0.mlp.up_proj" not in name and "layers.1.input_layernorm" not in name)
    return m


def moved():
    "The same with other weights, frozen ones too."
    m = net()
    with torch.no_grad():
        for p in m.parameters(): p.add_(.1)
    return m


def loss(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
def weights(policy): return {k: x for bucket in policy._run.model.iter_full_params() for k, x in bucket.items()}


def trained(policy, steps, world=1, rank=0, checkpoint=Checkpoint()):
    for step in checkpoint(steps, policy=policy):
        b = rows(B=9, seed=step, dtype=torch.float32)
        policy.step(b.parts(world)[rank] if world > 1 else b, loss)
    return weights(policy)


def save(world, rank, folder):
    "Two steps with each engine, a save after each, in the background or not."
    found = {}
    for engine in SAVED:
        found[engine] = saved_twice(Policy(net(), engine=engine, **HOW), engine, world, rank, folder)
    return found


def saved_twice(policy, engine, world, rank, folder):
    return trained(policy, 2, world, rank,
                   Checkpoint(folder/f"{world}-{engine}", every=1, background=engine == "zero2"))


def save_all(world, rank, folder):
    "The same, each then as torch and DeepSpeed would save by themselves; a scorer, and adapters."
    import torch.distributed.checkpoint as dcp
    found = {}
    for engine in SAVED:
        policy = Policy(net(), engine=engine, **HOW)
        found[engine] = saved_twice(policy, engine, world, rank, folder)
        if engine == "fsdp2":
            dcp.save(dict(model=policy.state_dict(full=False)["module"], steps=2), checkpoint_id=folder/f"{world}-dcp")
        else: policy._run.model.engine.engine.save_checkpoint(str(folder/f"{world}-deepspeed-{engine}"))
    scorer = Scorer(model(), engine="zero2", **HOW)
    for _ in Checkpoint(folder/f"{world}-scorer", every=1)(1, judge=scorer, policy=policy, state=dict(x=1)):
        scorer.step(rows(B=8, dtype=torch.float32), lambda out, b: (((out.scores-b.lengths/10)**2).sum()/b.n_rows, {}))
        scorer.normalise(rows(B=8, dtype=torch.float32))
    for engine, lora in LORA.items():
        policy = Policy(net(), engine=engine, lora=lora, value_head=True,
                        **HOW | dict(optimizer=steady(.1, max_norm=None)))
        learnt = trained(policy, 3, world, rank, Checkpoint(folder/f"{world}-lora-{engine}", every=3))
        found["lora", engine] = learnt, policy.logprobs(rows(B=8, dtype=torch.float32))
    return found | dict(scorer=(scorer.moments, scorer.scores(rows(B=8, dtype=torch.float32))))


def go_on(world, rank, folder, *, saved_by):
    "To the end, from what another number of ranks saved, into a model with other weights."
    found = {}
    for engine, others in SAVED.items():
        for other in others:
            mine = folder/f"{saved_by}-{engine}-on-{world}-{other}"
            if rank == 0: shutil.copytree(folder/f"{saved_by}-{engine}", mine)
            dist.barrier()
            policy = Policy(moved(), engine=other, **HOW)
            found[engine, other] = trained(policy, STEPS, world, rank, Checkpoint(mine)), policy.version
    return found


def before_the_first_step(world, rank, folder):
    "A state that is looked at changes nothing; loaded, it is that of an optimizer that has not stepped."
    found = {}
    for engine in SAVED:
        looked, again = Policy(net(), engine=engine, **HOW), Policy(moved(), engine=engine, **HOW)
        again.load_state_dict(looked.state_dict(full=False))
        found[engine] = trained(looked, 2, world, rank), trained(again, 2, world, rank)
    return found


def one_rank(rank, world, jobs, folder):
    found = [job(world, rank, folder) for job in jobs]
    if rank == 0: torch.save(found, folder/"found.pt")


def launch(world, jobs, folder):
    on_ranks(one_rank, (jobs, folder), world)
    return torch.load(folder/"found.pt", weights_only=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A folder in which two ranks have saved; what they found."
    folder = tmp_path_factory.mktemp("shards")
    return folder, launch(2, [before_the_first_step, save_all], folder)


@pytest.fixture(scope="module")
def plain(): return trained(Policy(net(), **HOW), STEPS)


def far(a, b):
    assert a.keys() == b.keys()
    return max((a[k]-x).abs().max().item() for k, x in b.items())


def test_another_number_of_ranks_goes_on(saved, plain):
    "ZeRO-1 on two ranks goes on as ZeRO-3 on one, and so on: weights after four steps are those of one plain process."
    folder, (fresh, _) = saved
    _, on_one = launch(1, [save, partial(go_on, saved_by=2)], folder)
    on_two, = launch(2, [partial(go_on, saved_by=1)], folder)
    half = trained(Policy(net(), **HOW), 2)
    for engine, found in fresh.items():
        for x in found: assert far(x, half) < NEAR*LR, engine
    for found in (on_one, on_two):
        assert len(found) == 6
        for case, (x, version) in found.items(): assert version == STEPS and far(x, plain) < NEAR*LR, case
    save_of = lambda engine: next((folder/f"2-{engine}").glob("step-00000002"))
    for engine in SAVED:
        parts = sorted(f.stat().st_size for f in (save_of(engine)/"shards").glob("__*"))
        # each rank wrote about half
        assert len(parts) == 2 and parts[0] > .4*parts[1], engine
        assert (save_of(engine)/"policy.pt").stat().st_size < 60_000, engine


def cannot_save(world, rank, folder):
    """What each rank raises when the folder is another run's, and when the disk of rank 1 is full: in the loop, in
    the background, and once more when it is not."""
    said, policy = [], Policy(net(), engine="fsdp2", **HOW)
    def loop(steps, **how):
        error = None
        try: trained(policy, steps, world, rank, Checkpoint(folder/"run", every=1, **how))
        except Exception as e: error = e
        dist.barrier()         # rank 0 has cleaned up before it raised
        told = [None]*world
        dist.all_gather_object(told, (type(error).__name__, str(error),
                                      sorted(f.name for f in (folder/"run").glob("*step-*"))))
        said.append(told)
    (folder/"run").mkdir(exist_ok=True)
    lock = Lock(folder/"run")
    if rank == 0: lock.take()
    loop(2)
    lock.free()
    loop(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for background in (False, True):
        if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        loop(2, background=background)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loop(2)
    return said


def test_ranks_that_cannot_save_say_so_together(tmp_path):
    locked, fine, full, behind, again = launch(2, [cannot_save], tmp_path)[0]
    assert [(kind, "is in use by a run" in text, there)
            for kind, text, there in locked] == [("RuntimeError", True, [])]*2
    assert [(kind, there) for kind, _, there in fine] == [("NoneType", ["step-00000001"])]*2
    for told in (full, behind):
        for kind, text, there in told:
            assert kind == "OSError" and there == ["step-00000001"], (kind, text, there)         # no draft
            assert f"the save of step 2 cannot be written to {tmp_path/'run'}" in text
            assert "rank 1 cannot write its shards" in text and "bytes are free on its disk" in text
    assert [(kind, there) for kind, _, there in again] == [("NoneType", ["step-00000001", "step-00000002"])]*2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "The model that was trained, with all that belongs to it."
    from transformers import GenerationConfig
    folder = tmp_path_factory.mktemp("base")
    m = net()
    m.generation_config = GenerationConfig(temperature=.3, do_sample=True, eos_token_id=1)
    m.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*(f"2-{e}" for e in SAVED), "2-dcp",
                                  *(f"2-deepspeed-{e}" for e in SAVED if e != "fsdp2")])
def test_one_process_makes_a_model_of_what_two_ranks_wrote(saved, base, tmp_path, name):
    """LAWS 40 without the ranks: plain transformers loads the folder; weights are those that the ranks export, to
    the bit, and all that belongs to the model is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder, (_, found) = saved
    out = convert(folder/name, tmp_path/"out", base=base, file_bytes=20_000)
    got = AutoModelForCausalLM.from_pretrained(out)
    want = found["fsdp2" if name == "2-dcp" else name.rpartition("-")[2]]
    assert type(got).__name__ == "GemmaForCausalLM" and len(list(out.glob("model-*.safetensors"))) > 2
    assert not list(out.glob(".draft*"))
    for k, x in want.items(): assert torch.equal(got.state_dict()[k.removeprefix("trunk.")], x), k
    assert got.generation_config.temperature == .3
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages[0].content }}"


def test_the_command_writes_half_precision_and_reward_models(saved, base, tmp_path):
    from transformers import AutoModelForSequenceClassification
    folder, (_, found) = saved
    main([str(folder/"2-zero3"), str(tmp_path/"half"), "--base", str(base), "--dtype", "bfloat16"])
    assert json.loads((tmp_path/"half"/"config.json").read_text())["dtype"] == "bfloat16"
    model().save_pretrained(tmp_path/"llama")
    run = next((folder/"2-scorer").glob("step-*"))
    main([str(run), str(tmp_path/"judge"), "--base", str(tmp_path/"llama"), "--part", "judge"])
    (mean, std), scores = found["scorer"]
    b = rows(B=8, dtype=torch.float32)
    judge = Scorer(tmp_path/"judge", device="cpu")
    assert (judge.scores(b)-scores).abs().max() < reach(scores)/std[0] and judge.moments == (mean, std)
    raw = AutoModelForSequenceClassification.from_pretrained(tmp_path/"judge")
    raw = raw(b.tokens[-1:, :int(b.lengths[-1])]).logits[0, 0].detach()
    assert abs(float((raw-mean[0])/std[0] - scores[-1])) < reach(scores)/std[0]


def test_a_converter_that_cannot_says_why(saved, base, tmp_path):
    folder, _ = saved
    save = next((folder/"2-scorer").glob("step-*"))
    with pytest.raises(ValueError, match=r"holds weights of \['judge', 'policy'\] .*say which"):
        convert(save, tmp_path/"x", base=base)
    with pytest.raises(ValueError, match="part='state' is none of them"):
        convert(save, tmp_path/"x", base=base, part="state")
    with pytest.raises(ValueError, match="is no save of a Checkpoint"):
        convert(folder/"2-dcp", tmp_path/"x", base=base, part="policy")
    with pytest.raises(FileNotFoundError, match="neither saves of a Checkpoint"): convert(base, tmp_path/"x", base=base)
    with pytest.raises(FileNotFoundError, match="convert: there is no folder '.*nowhere'"):
        convert(folder/"2-zero1", tmp_path/"x", base=tmp_path/"nowhere")
    model("qwen3").save_pretrained(tmp_path/"other")
    with pytest.raises(ValueError,
                       match="the checkpoint has no 'trunk.model.layers.0.self_attn.q_norm.weight'.*of another base"):
        convert(folder/"2-zero1", tmp_path/"x", base=tmp_path/"other")
    (tmp_path/"file").write_text("in the way")
    with pytest.raises(OSError, match="convert: cannot write to"): convert(folder/"2-zero1", tmp_path/"file", base=base)
    hurt = shutil.copytree(folder/"2-zero1", tmp_path/"hurt")
    shard = next((hurt/"step-00000002"/"shards").glob("__1*"))
    data = bytearray(shard.read_bytes())
    data[len(data)//2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="__1.*is not what was written"): convert(hurt, tmp_path/"x", base=base)


def test_a_converter_without_room_changes_nothing(base, tmp_path):
    """OSError with folder and disk, in place of a process that dies of a page that cannot be written; the folder is
    as it was, and reading needs no right to write."""
    for _ in (run := Checkpoint(tmp_path/"run", every=1))(1, policy=Policy(net(), **HOW)): pass
    shutil.copytree(run.saves()[0], tmp_path/"run"/"step-00000001-good")
    out = convert(tmp_path/"run", tmp_path/"out", base=base)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (2_000, 20_000):        # bytes: the maps of the weights, then the files
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(OSError, match=f"bytes are free on its disk.*{out}"):
                convert(tmp_path/"run", out, base=base, dtype=torch.float64)
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {f.name: f.read_bytes() for f in out.iterdir()} == before


# -- adapters
@pytest.mark.parametrize("engine", LORA)
def test_one_process_makes_an_adapter_of_what_two_ranks_wrote(saved, base, tmp_path, engine):
    """peft loads it on the plain base and comes to the ranks' log-probs; merged, its weights are those that the
    ranks export, to the bit."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder, (_, found) = saved
    (want, logprobs), b = found["lora", engine], rows(B=8, dtype=torch.float32)
    start = Policy(base, frozen=True, device="cpu").logprobs(b)
    assert (logprobs-start).abs().max() > .01
    with pytest.warns(UserWarning,
                      match="head.(bias|weight) beside the adapter is not written"):
        out = convert(folder/f"2-lora-{engine}", tmp_path/"adapter", base=base)
    plain = Policy(net(), lora=LORA[engine], device="cpu")
    plain.save_pretrained(tmp_path/"plain", adapter=True)
    ours, theirs = (json.loads((x/"adapter_config.json").read_text()) for x in (out, tmp_path/"plain"))
    assert ours == theirs | dict(base_model_name_or_path=str(base)) and ours["task_type"] == "CAUSAL_LM"
    assert ours["lora_alpha"] == LORA[engine].get("lora_alpha", 32)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert (Policy(adapted, frozen=True, device="cpu").logprobs(b) - logprobs).abs().max() < reach(logprobs)
    assert (Policy(base, lora=out, device="cpu").logprobs(b) - logprobs).abs().max() < reach(logprobs)
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages[0].content }}"
    with pytest.warns(UserWarning):
        main([str(folder/f"2-lora-{engine}"), str(tmp_path/"merged"), "--base", str(base), "--merge"])
    got = AutoModelForCausalLM.from_pretrained(tmp_path/"merged")
    for k, x in want.items():
        assert k.startswith("head.") or torch.equal(got.state_dict()[k.removeprefix("trunk.")], x), k
    assert got.generation_config.temperature == .3 and not list((tmp_path/"merged").glob(".draft*"))


def test_an_adapter_that_fits_nowhere_says_so(saved, base, tmp_path):
    folder, _ = saved
    model("gemma", intermediate_size=48).save_pretrained(tmp_path/"other")
    with pytest.raises(ValueError,
                       match=r"'model.layers.0.mlp.*' \[4, 64\] has nothing to stand on in the GemmaForCausalLM of "
                             ".*other; is it of another base"):
        convert(folder/"2-lora-zero3", tmp_path/"x", base=tmp_path/"other")
    with pytest.raises(ValueError, match="merge=True, but .* holds whole weights"):
        convert(folder/"2-zero3", tmp_path/"x", base=base, merge=True)
    def saved_by(name, wrapper):
        for _ in Checkpoint(tmp_path/name, every=1)(1, part=wrapper): pass
        return tmp_path/name
    policy = Policy(base, lora=LORA["zero3"], device="cpu")
    with pytest.raises(ValueError, match="serves the head of a Scorer or Critic"):
        convert(saved_by("scorer", Scorer(base, lora=dict(r=2), device="cpu")), tmp_path/"x", base=base)
    with pytest.raises(ValueError, match="there are no settings of an adapter"):
        convert(saved_by("reference", Policy(policy, lora=None)), tmp_path/"x", base=base)
    with pytest.raises(ValueError, match="state of a frozen view"):
        convert(saved_by("view", Policy(policy, lora="default", frozen=True)), tmp_path/"x", base=base)
    assert not (tmp_path/"x").exists() or not list((tmp_path/"x").iterdir())


# -- folders of strangers
class Harm:
    "What a stranger may put in a pickle."
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return os.mkdir, (self.path,)


class Word:
    "A word of an enumeration, as some Pythons pickle it."
    def __init__(self, kind, name): self.how = kind, name
    def __reduce__(self): return getattr, self.how


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "*_optim_states.pt"])
def test_a_folder_of_deepspeed_runs_nothing(saved, base, tmp_path, file):
    from deepspeed.runtime.zero.config import ZeroStageEnum
    folder, _ = saved
    hurt = shutil.copytree(folder/"2-deepspeed-zero1", tmp_path/"hurt")
    at = next(hurt.glob(f"*/{file}"))
    state = torch.load(at, weights_only=False)
    torch.save(state | dict(word=Word(ZeroStageEnum, "weights")), at)
    convert(hurt, tmp_path/"fine", base=base)
    torch.save(state | dict(harm=Harm(tmp_path/"harm")), at)
    with pytest.raises(ValueError,
                       match=r"holds what a safe load refuses \(Trying to load unsupported GLOBAL posix.mkdir"):
        convert(hurt, tmp_path/"x", base=base)
    torch.save(state | dict(harm=Word(torch.Size, "__init__")), at)
    with pytest.raises(ValueError, match="holds what a safe load refuses"): convert(hurt, tmp_path/"x", base=base)
    assert not (tmp_path/"harm").exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_folder_of_deepspeed_that_is_half_copied_is_named(tmp_path):
    skip_without("deepspeed")
    (tmp_path/"latest").write_text("global_step7")
    with pytest.raises(FileNotFoundError, match=r"global_step7 has no …_model_states\.pt"): stored(tmp_path)
    (tmp_path/"global_step7").mkdir()
    with pytest.raises(FileNotFoundError, match=r"global_step7 has no …_model_states\.pt"): stored(tmp_path)


def test_a_description_of_shards_runs_nothing(saved, base, tmp_path):
    from torch.distributed.checkpoint.metadata import StorageMeta, _MEM_FORMAT_ENCODING
    folder, _ = saved
    hurt = shutil.copytree(folder/"2-dcp", tmp_path/"hurt")
    (hurt/".metadata").write_bytes(pickle.dumps(Harm(tmp_path/"harm")))
    with pytest.raises(ValueError, match=r"reading it would call posix.mkdir"): convert(hurt, tmp_path/"x", base=base)
    assert not (tmp_path/"harm").exists()
    def read(x): return MetadataUnpickler(io.BytesIO(pickle.dumps(x))).load()
    assert read(Word(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")) is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert read([StorageMeta(checkpoint_id=tmp_path), torch.Size([2]),
                 torch.bfloat16]) == [StorageMeta(checkpoint_id=tmp_path), torch.Size([2]), torch.bfloat16]
    for bad in (Word(StorageMeta, "__init__"), Harm(tmp_path/"harm")):
        with pytest.raises(pickle.UnpicklingError): read(bad)
    assert not (tmp_path/"harm").exists()


BIG = """
import sys, threading, time, torch, warnings
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, logging
from rlblocks.checkpoint.convert import convert
import safetensors.torch, transformers.modeling_utils
logging.disable_progress_bar()
folder = Path(sys.argv[1])
def anon(): return int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1])/1024
net = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=512, intermediate_size=4096, num_hidden_layers=6,
                                   num_attention_heads=4, num_key_value_heads=4))
net.config.save_pretrained(folder/"base")
size = sum(p.nbytes for p in net.parameters())/2**20
dcp.save(net.state_dict(), checkpoint_id=folder/"dcp", no_dist=True)
del net
start, top, going = anon(), [0.], [True]
def look():
    while going[0]:
        top[0] = max(top[0], anon())
        time.sleep(.001)
watch = threading.Thread(target=look); watch.start()
convert(folder/"dcp", folder/"out", base=folder/"base", file_bytes=32 << 20)
going[0] = False; watch.join()
print(size, top[0]-start)
"""


def test_the_model_is_never_in_memory(tmp_path):
    """Mapped files are the kernel's to drop; what the process itself holds is a stored tensor at a time, and what
    the libraries need."""
    import subprocess
    import sys
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", BIG, tmp_path], capture_output=True, text=True,
                         env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert run.returncode == 0, run.stderr[-2000:]
    size, extra = map(float, run.stdout.splitlines()[-1].split())
    assert size > 160 and extra < size/6, (size, extra)            # 13 of 170 MiB were seen
