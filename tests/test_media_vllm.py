"""Rows with images on vLLM: what it computes of them is what the trainer computes, at each load and for each image.

One engine for all tests but the long ones. It runs a copy of the library from which a file takes one line."""
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import rlblocks
import tiny_media as tiny
import torch
from conftest import vllm_python
from rlblocks import Policy, Prompts, Rollout, here, loop_from, vllm
from rlblocks.models.multimodal import placeholder_ids
from rlblocks.samplers import processes

RESET = "self.engine.reset_encoder_cache()"


@cache
def has(python, module):
    "Whether an interpreter's environment has a module."
    code = f"from importlib.util import find_spec; print(find_spec({module!r}) is not None)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


@pytest.fixture(autouse=True, scope="module")
def there():
    if vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    if not has(vllm_python(), "torchvision"): pytest.skip("vLLM's models of images import torchvision: make vllm")


def named_as_on_the_hub(net, folder):
    "The same model, read from files that name the tower's weights as vLLM 0.32 knows them."
    from safetensors.torch import load_file, save_file
    net.save_pretrained(folder)
    file = folder/"model.safetensors"
    weights = load_file(file)
    save_file({re.sub(r"^vision_tower\.", "vision_tower.vision_model.", n): x for n, x in weights.items()}, file,
              metadata=dict(format="pt"))
    return type(net).from_pretrained(folder).eval()


def model(kind, folder):
    net = tiny.model(kind, hidden=128)      # heads of 32: vLLM's attention on a CPU wants as much
    return named_as_on_the_hub(net, folder) if kind in ("llava", "gemma3") else net


def rollout(net, kind, **how):
    spec = vllm(python=vllm_python(), cache_bytes=1 << 26, context=512, timeout=120., **how)
    return Rollout(net, tokenizer=tiny.processor(kind), max_tokens=6, engine=spec)


def policy_of(net, kind="llava"): return Policy(net, tokenizer=tiny.processor(kind), device="cpu", lr=1e-2)


def prompts(kind="llava"):
    "Rows with no, one and three media, and one medium twice."
    rows = [tiny.row(kind, text="blind"), tiny.row(kind, 0), tiny.row(kind, 1, 2, 3), tiny.row(kind, 0, text="again")]
    return Prompts([dict(r, answer=i) for i, r in enumerate(rows)], tiny.processor(kind), shuffle=False).take(4)


def moved(policy, word, far=.2):
    "The policy, with every weight of a part another one."
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, w in policy._run.module.trunk.named_parameters():
            if word in name: w.add_(far*w.std().nan_to_num(1.)*torch.randn(w.shape, generator=g))
    return policy


def gap(policy, b): return float((policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max())


@pytest.fixture(scope="module")
def net(tmp_path_factory): return model("llava", tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def unreset(tmp_path_factory):
    "A file: while it is there, loads leave the cache of what the tower made."
    return tmp_path_factory.mktemp("flag")/"unreset"


@pytest.fixture(scope="module")
def started(net, unreset, tmp_path_factory):
    copy = tmp_path_factory.mktemp("library")/"rlblocks"
    shutil.copytree(Path(rlblocks.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    server = copy/"samplers"/"vllm_process.py"
    text = server.read_text()
    assert text.count(RESET) == 1
    server.write_text(text.replace(RESET, f"os.path.exists({str(unreset)!r}) or {RESET}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "find_spec", lambda _: SimpleNamespace(origin=str(copy/"__init__.py")))
        made = rollout(net, "llava")
        yield made
        made.close()


@pytest.fixture
def shared(started, net):
    started.load(policy_of(net).weights())
    return started


def test_log_probs_are_the_trainers_before_and_after_the_tower_has_moved(shared, net):
    policy = policy_of(net)
    first = shared.generate(prompts(), group_size=2, seed=1)
    assert gap(policy, first) < 1e-5, "and the same images again"
    assert gap(policy, shared.generate(prompts(), group_size=2, seed=2)) < 1e-5
    manifest = shared.load(moved(policy, "tower").weights())
    assert manifest.gap < 1e-5 and gap(policy, shared.generate(prompts(), group_size=2, seed=1)) < 1e-5
    assert gap(policy, first) > 1e-2, "the tower's weights matter"
    manifest = shared.load(moved(policy, "").weights())
    assert manifest.gap < 1e-5 and gap(policy, shared.generate(prompts(), group_size=2, seed=1)) < 1e-5


def test_the_loop_of_the_tutorial_runs_unchanged(shared, net, root, monkeypatch):
    monkeypatch.setattr("rlblocks.rollout.rollout.new_sampler", lambda *_: shared.sampler)
    loop = loop_from(f"{root}/tutorials/grpo.ipynb:grpo")
    def reward(completions, answer, **_): return [len(set(c)) + a/4 for c, a in zip(completions, answer, strict=True)]
    data = Prompts([tiny.row("llava", i, answer=i % 4) for i in range(8)], tiny.processor("llava"), seed=1)
    rows = list(loop(here, data, reward, model=net, tokenizer=tiny.processor("llava"), lr=1e-3, steps=2, prompts=4,
                     group_size=4, minibatches=2, max_tokens=6, rollout_engine="vllm"))
    assert len(rows) == 2 and all(0 < float(r["grad_norm"]) < 100 for r in rows)


def test_a_load_while_rows_with_images_are_under_way(shared, net):
    "Their images are encoded again: the weights are the same here, so log-probs are those of one version."
    policy = policy_of(net)
    pending = shared.start_generate(prompts(), group_size=4, seed=5, max_tokens=40)
    shared.load(policy.weights())
    assert gap(policy, pending.result()) < 1e-5


def test_a_sampled_placeholder_ends_the_row_and_is_scored(shared, net):
    policy, odd = policy_of(net), placeholder_ids(net)[0]
    head = policy._run.module.trunk.get_output_embeddings()
    with torch.no_grad(): head.weight[odd] = 3*head.weight.abs().max()*torch.sign(head.weight.mean(0))
    shared.load(policy.weights())
    b = shared.generate(prompts(), group_size=8, seed=3)
    ends = [t[n-1] == odd for t, n in zip(b.tokens.tolist(), b.lengths.tolist(), strict=True)]
    drawn = (b.tokens == odd) & b.mask
    assert any(ends) and drawn.sum() == sum(ends) and gap(policy, b) < 1e-5
    again = b[torch.tensor(ends)]
    ids = [tiny.tokenizer("llava").encode("?")]*len(again)
    with pytest.raises(ValueError, match="the policy ended row 0 with an id that stands for an image"):
        shared.extend(again.drop("completion"), ids)


def test_a_turn_more_goes_on_with_the_same_image(shared, net):
    b = shared.generate(prompts(), group_size=2, seed=4)
    more = shared.extend(b, [tiny.tokenizer("llava").encode("\nwhy?")]*len(b))
    assert (more.lengths > b.lengths).any() and gap(policy_of(net), more) < 1e-5


@pytest.mark.parametrize("at, odd, found", [("image", 5, "0 found"), ("end", None, "1 found, 1 ids left over")])
def test_a_row_with_other_placeholders_is_refused_by_its_image(shared, at, odd, found):
    "One too few and one too many. The engine lives on."
    rows, wrong, image = prompts(), prompts(), placeholder_ids(shared.module)[0]
    place = (wrong.tokens[1] == image).nonzero()[0] if at == "image" else wrong.lengths[1] - 1
    wrong.tokens[1, place] = image if odd is None else odd
    with pytest.raises(ValueError, match="does not take a row of .* ids with the image in memory: vLLM gives its 1 "
                                         f"image 16 placeholders, and the row's ids hold others: {found}"):
        shared.generate(wrong)
    assert len(shared.generate(rows)) == 4


def test_a_module_that_sees_needs_its_processor(net):
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration reads media, and vLLM reads them with"):
        Rollout(net, tokenizer=tiny.tokenizer("llava"), engine="vllm")


# the last one: it ends the engine
def test_without_the_encoders_reset_a_load_is_not_proved(shared, net, unreset):
    unreset.touch()
    policy = moved(policy_of(net), "tower")
    try:
        with pytest.raises(RuntimeError, match="Encoder cache miss|does not compute what the trainer computes"):
            shared.load(policy.weights())
    finally: unreset.unlink()
    assert shared.sampler.version is None


@pytest.mark.parametrize("kind", tiny.AXES)
def test_models_of_qwen(kind, tmp_path):
    "At the start, after the tower has moved, and all; of a video the sampler says that it does not take it."
    net = model(kind, tmp_path)
    policy, r = policy_of(net, kind), rollout(net, kind)
    assert gap(policy, r.generate(prompts(kind), group_size=2)) < 1e-5
    for word in ("visual", ""):
        assert r.load(moved(policy, word).weights()).gap < 1e-5
        assert gap(policy, r.generate(prompts(kind), group_size=2)) < 1e-5
    frames = torch.zeros(4, 64, 64, 3).byte().numpy()
    video = dict(prompt="<|vision_start|><|video_pad|><|vision_end|>?", videos=[frames])
    with pytest.raises(ValueError, match="a row has the video in memory, and engine='vllm' makes other log-probs of"):
        r.generate(Prompts([video], tiny.processor(kind)).take(1))
    r.close()
