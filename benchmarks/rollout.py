"""What sampling costs: the model's own forward pass, vLLM, and transformers' generate as TRL's GRPO trainer calls it.

    .venv/bin/python benchmarks/rollout.py [--rounds 3] [--engines hf,vllm,trl] [--sizes 26M,100M] [--threads 1]
    .venv/bin/python benchmarks/rollout.py --device cuda

64 rows, 8 prompts of 32 tokens with 8 samples each, 256 new tokens a row, random weights, no row ends early, fp32 on a
CPU. Engines take turns in every round, and a figure is that of the best round;
all rounds are written, with the load of the machine before and after each. hf and vLLM also give the log-prob of every
token, for which TRL runs the model once more; that run is not counted.

`cpu` is the processor time of the trainer's own process over the time that passed. An engine in another process leaves
the trainer's process free: at most 2 % with vLLM is promised. At 64 × 256, 1.5 times hf is promised for vLLM too. A
promise that is not kept is printed as MISSED, and the exit code is 1.

With `--device cuda` all engines are on a GPU, and nothing is promised. It has not been run there.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from machine import machine
from rlblocks import Batch, Rollout, vllm

SIZES = {"26M": dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
                     vocab_size=8192),
         "100M": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                      vocab_size=8192)}
PROMPTS, SAMPLES, WIDTH, NEW = 8, 8, 32, 256


def model(size):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], max_position_embeddings=512, eos_token_id=None,
                                        bos_token_id=None, pad_token_id=0)).eval()


def prompts():
    tokens = torch.randint(2, 8192, (PROMPTS, WIDTH), generator=torch.Generator().manual_seed(0))
    return Batch(tokens=tokens, lengths=torch.full((PROMPTS,), WIDTH), group=torch.arange(PROMPTS))


def through_rollout(net, engine):
    "What generates, and what ends it."
    rollout = Rollout(net, engine=engine, max_tokens=NEW, stop=[], device=next(net.parameters()).device)
    return lambda n, seed: rollout.generate(prompts(), group_size=SAMPLES, max_tokens=n, seed=seed), rollout.close


def through_trl(net):
    "As GRPOTrainer does without vLLM: prompts repeated and left-padded, one call of generate."
    from transformers import GenerationConfig
    ids = prompts().tokens.repeat_interleave(SAMPLES, 0).to(net.device)
    def run(n, seed):
        how = GenerationConfig(max_new_tokens=n, do_sample=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
                               temperature=1., top_p=1., top_k=0, min_p=None, repetition_penalty=1.,
                               cache_implementation=None, disable_compile=True)
        torch.manual_seed(seed)
        with torch.no_grad():
            return net.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return run, lambda: None


def started(net, engine):
    if engine == "trl": return through_trl(net)
    return through_rollout(net, vllm(cache_bytes=1 << 29) if engine == "vllm" else "hf")


def timed(run, seed):
    "One round: seconds, the share of them that this process computed, the machine's load before and after."
    before, wall, cpu = os.getloadavg()[0], time.perf_counter(), time.process_time()
    run(NEW, seed)
    if torch.cuda.is_available(): torch.cuda.synchronize()
    seconds = time.perf_counter() - wall
    return dict(seconds=seconds, cpu=(time.process_time() - cpu)/seconds, load=[before, os.getloadavg()[0]])


def measure(size, engines, rounds, device):
    "Every engine, in turns."
    net = model(size).to(device)
    made = {e: started(net, e) for e in engines}
    found = {e: [] for e in engines}
    for r in range(-1, rounds):
        for e, (run, _) in made.items():
            if r < 0: run(8, 0)
            else: found[e].append(timed(run, r))
    for _, close in made.values(): close()
    best = {e: min(x["seconds"] for x in runs) for e, runs in found.items()}
    n = PROMPTS*SAMPLES*NEW
    return dict(parameters=sum(x.numel() for x in net.parameters()), tokens=n, engines={
        e: dict(tokens_per_second=n/best[e], cpu=min(x["cpu"] for x in runs), rounds=runs)
        for e, runs in found.items()})


def missed(size, engines):
    "Promises that were not kept."
    if "vllm" not in engines: return
    if engines["vllm"]["cpu"] > .02: yield f"{size}: with vLLM the parent computes {engines['vllm']['cpu']:.1%}"
    if "hf" not in engines: return
    ratio = engines["vllm"]["tokens_per_second"]/engines["hf"]["tokens_per_second"]
    if ratio < 1.5: yield f"{size}: vLLM is {ratio:.2f} times hf"


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--engines", default="hf,vllm,trl")
    words.add_argument("--sizes", default="26M,100M")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    words.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    results = dict(machine=machine(), prompts=PROMPTS, samples=SAMPLES, prompt_tokens=WIDTH, new_tokens=NEW, sizes={})
    for size in given.sizes.split(","):
        results["sizes"][size] = found = measure(size, given.engines.split(","), given.rounds, given.device)
        print(f"{size}: {found['parameters']/1e6:.1f}M parameters")
        for e, x in found["engines"].items():
            print(f"  {e:6} {x['tokens_per_second']:7.0f} tokens/s, parent's cpu {x['cpu']:6.1%}", flush=True)
        (given.out/f"rollout_{given.device}.json").write_text(json.dumps(results, indent=1) + "\n")
    found = results["sizes"].items() if given.device == "cpu" else ()
    lost = [line for size, x in found for line in missed(size, x["engines"])]
    for line in lost: print("MISSED:", line)
    return len(lost) > 0


if __name__ == "__main__": sys.exit(main())
