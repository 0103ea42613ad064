"""Sampler against trainer on rows with images, video and audio: the table of nbs/media.ipynb.

    .venv/bin/python benchmarks/media.py [--engine hf|vllm] [--only llava,gemma3] [--out benchmarks/results]

Tiny models with random weights in fp32 (tests/tiny_media.py), rows with no, one and three media in one batch. What is
written is the largest difference, in nats, between the log-probs that the sampler reports of its tokens and those that
the trainer finds: at the start, and after every weight of the tower was moved and loaded into the sampler. Beside it
stands how far the trainer's log-probs go when each row has another row's media: a gap means nothing where that is 0.
Qwen's models that see need torchvision (PYTHONPATH=.venv/torchvision after `make torchvision`); without it, and for
models that --only leaves out, rows stay as they were measured. `--engine vllm` wants the environment of `make vllm`."""
import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT/"benchmarks/results/media_cpu.json"
NAMES = dict(gemma3="Gemma3 (SigLIP)", llava="LLaVA (CLIP)", qwen2_audio="Qwen2-Audio", qwen2_5_vl="Qwen2.5-VL",
             qwen3_vl="Qwen3-VL")


def rows_of(kind, modality):
    "Rows with no, one and three media, and one with one of these."
    import tiny_media as tiny
    row = tiny.video_row if modality == "video" else tiny.row
    return [row(kind, *numbers) for numbers in ((), (0,), (1, 2, 3), (2,))]


def moved(policy, far=.2):
    "Every weight of the tower, another one."
    import torch
    from rlblocks.models.multimodal import parts_of
    trunk, g = policy._run.module.trunk, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in parts_of(trunk)["tower"]:
            for w in trunk.get_submodule(name).parameters():
                w.add_(far*w.std().nan_to_num(1.)*torch.randn(w.shape, generator=g))


def measure(kind, modality, engine):
    "One line of the table."
    import tiny_media as tiny
    from rlblocks import Policy, Prompts, Rollout
    with tempfile.TemporaryDirectory() as folder:
        if engine == "vllm":
            import test_media_vllm as on_vllm
            net = on_vllm.model(kind, folder)
            rollout = on_vllm.rollout(net, kind)
        else:
            net = tiny.model(kind)
            rollout = Rollout(net, tokenizer=tiny.processor(kind), max_tokens=6, device="cpu")
        policy = Policy(net, tokenizer=tiny.processor(kind), device="cpu")
        asked = Prompts(rows_of(kind, modality), tiny.processor(kind), shuffle=False).take(4)
        def gap():
            b = rollout.generate(asked, group_size=4, seed=1)
            return b, float((policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max())
        b, start = gap()
        n = len(b) - 4      # rows with media, behind those of text
        other = b.with_columns(b.columns | dict(media=[None]*4 + [swap(b.media[4:], i) for i in range(n)]))
        same = [i for i in range(4, len(b)) if len(b.media[i].sources) == len(other.media[i].sources)]
        effect = (policy.logprobs(other) - policy.logprobs(b))[same][b.mask[same]].abs().max()
        moved(policy)
        rollout.load(policy.weights())
        after = gap()[1]
        rollout.close()
    return dict(model=kind, modality=modality, engine=engine, start=start, tower_moved=after, other=float(effect),
                packed=policy._run.layout.packed and not any(policy._run.media.values()))


def swap(media, i):
    "Another row's media, as many as row `i` has; its own where no other row has as many."
    return next((m for m in media if m is not media[i] and len(m.sources) == len(media[i].sources)), media[i])


def table(found):
    "The lines as Markdown."
    def power(x): return f"{x:.0e}".replace("e-0", "e-")
    def other(r): return f"{r['other']:.2f}" if "other" in r else ""
    def line(r):
        rows = "packed" if r.get("packed") else "padded"
        said = (["refused", "", "", ""] if "refused" in r else
                [power(r["start"]), power(r["tower_moved"]), other(r), rows])
        return f"| {' | '.join([NAMES[r['model']], r['modality'], r['engine'], *said])} |"
    names = ("model", "media", "engine", "at the start", "after the tower moved", "other media", "trainer's rows")
    return "\n".join([f"| {' | '.join(names)} |", "|---"*len(names) + "|", *map(line, found["rows"])])


def results():
    "What was measured so far."
    return json.loads(FILE.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--only", default="", help="models, by comma")
    parser.add_argument("--out", type=Path, default=FILE.parent)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT/"tests"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tiny_media import AXES, KINDS
    media = {k: ["audio"] if k == "qwen2_audio" else ["images", "video"] if k in AXES else ["images"] for k in KINDS}
    cases = [(k, m) for k in KINDS for m in media[k] if not args.only or k in args.only.split(",")]
    file = args.out/FILE.name
    before = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    kept = {(r["model"], r["modality"], r["engine"]): r for r in before}
    for kind, modality in cases:
        try: row = measure(kind, modality, args.engine)
        except (ValueError, RuntimeError) as e:
            row = dict(model=kind, modality=modality, engine=args.engine, refused=str(e).splitlines()[0][:160])
        print(row, flush=True)
        kept[kind, modality, args.engine] = row
    order = [*NAMES]
    rows = sorted(kept.values(), key=lambda r: (order.index(r["model"]), r["modality"], r["engine"]))
    about = dict(date=date.today().isoformat(), machine=platform.machine(), torch=version("torch"),
                 transformers=version("transformers"), dtype="float32")
    file.write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n", encoding="utf-8")
    print(table(dict(rows=rows)))


if __name__ == "__main__": main()
