"""Host memory of loading: what a rank holds at its highest until an engine has its shards.

Each rank is a process of its own. The peak is VmHWM, reset before the model is loaded, beyond what the process held
then; a tiny model is loaded first, so that libraries, groups and threads are there already. What the rank keeps is
measured in the same way afterwards: its shard of the weights, with ZeRO-3 also of fp32 masters and of gradients, and
adapters. The law: the peak is at most what is kept and one weight, as it is stored; tensor parallel holds slabs of a
few MiB beside it.
"shards": the engine reads its part of the files;
"complete": every rank reads the model as transformers does, and the engine cuts it.

python benchmarks/loading.py [--millions 400] [--ranks 2 4] [--cases fsdp2 zero3 …] [--how shards complete]
writes benchmarks/results/loading.json; with --add cases that are there already stay."""
import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from rlblocks import fsdp2, plain, zero

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"tests"))
OUT = ROOT/"benchmarks"/"results"/"loading.json"
LORA = dict(r=8, lora_alpha=16)
CASES = {"fsdp2": (fsdp2(), None), "fsdp2, lora": (fsdp2(), LORA), "zero3": (zero(3), None),
         "zero3, lora": (zero(3), LORA), "tensor_parallel=2": (plain(tensor_parallel=2), None),
         "tensor_parallel=2, lora": (plain(tensor_parallel=2), LORA),
         "fsdp2, tensor_parallel=2": (fsdp2(tensor_parallel=2), None)}


def made(path, millions, dtype):
    "A random llama of so many million parameters in a folder; its largest weight is the embedding, a tenth of it."
    width = 1024
    config = dict(hidden_size=width, intermediate_size=4*width, num_attention_heads=8, num_key_value_heads=8,
                  vocab_size=int(millions*1e5)//width//4*4, max_position_embeddings=256)
    layers = max(1, round(millions*.8e6/(16*width*width)))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**config, num_hidden_layers=layers, tie_word_embeddings=False, dtype=dtype))
    model.save_pretrained(path, max_shard_size="500MB")
    return dict(parameters=model.num_parameters(), largest=max(p.numel() for p in model.parameters()))


def load(folder, case, how):
    "What a wrapper makes of a folder before it probes the model."
    from rlblocks.engines.sharded_model import ShardedModel
    from rlblocks.models.forward import Forward
    from rlblocks.models.loading import load_module
    from rlblocks.models.lora import Base
    (engine, lora), module = CASES[case], load_module(folder, lazy=how == "shards")
    if lora: return Base(module, lora, engine=engine, device="cpu")
    return ShardedModel(Forward(module), engine=engine, device="cpu")


def rank_main(folder, tiny, case, how):
    "One rank: prints what it held at its highest, and what it holds afterwards, in MiB."
    import torch.distributed as dist
    from resident import give_back, memory, settled
    give_back()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    small = load(tiny, case, how)
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    model = load(folder, case, how)
    seconds = time.perf_counter()-start
    peak, after = memory("VmHWM")-before, settled()-before
    told = [None]*dist.get_world_size()
    dist.all_gather_object(told, dict(peak=round(peak), after=round(after), seconds=round(seconds, 1)))
    if dist.get_rank() == 0: print("RESULT", json.dumps(dict(ranks=told)))
    del small, model
    dist.destroy_process_group()


def measured(folder, tiny, case, how, ranks):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                          __file__, "--rank", str(folder), str(tiny), case, how], capture_output=True, text=True)
    line = next((x for x in run.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None: raise RuntimeError(run.stderr[-3000:])
    got = json.loads(line.removeprefix("RESULT "))["ranks"]
    return dict(peak_mib=max(r["peak"] for r in got), kept_mib=max(r["after"] for r in got),
                seconds=max(r["seconds"] for r in got))


def asked():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--millions", type=int, default=400)
    words.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    words.add_argument("--cases", nargs="+", default=list(CASES))
    words.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    words.add_argument("--how", nargs="+", default=["shards"])
    words.add_argument("--add", action="store_true")
    words.add_argument("--rank", nargs=4)
    words.add_argument("--out", type=Path, default=OUT)
    return words.parse_args()


def write(out, rows):
    out.write_text(json.dumps(dict(
        date=str(date.today()), torch=torch.__version__, transformers=transformers.__version__,
        python=platform.python_version(), machine=platform.machine(),
        about="MiB of a rank beyond what it held before the model was loaded: at the highest, and what it keeps. "
        "Weights that train are fp32, those under an adapter stay as the file has them; zero3 keeps three shards "
        "(weights, masters, gradients). The largest weight is in the precision that the rank keeps",
        results=rows), indent=1) + "\n")


def main():
    given = asked()
    if given.rank: return rank_main(*given.rank)
    rows = json.loads(given.out.read_text())["results"] if given.add and given.out.exists() else []
    for dtype in given.dtypes:
        with TemporaryDirectory() as folder:
            sizes, _ = made(Path(folder)/"model", given.millions,
                            getattr(torch, dtype)), made(Path(folder)/"tiny", 2, getattr(torch, dtype))
            for case in given.cases:
                size = getattr(torch, dtype).itemsize if "lora" in case else 4
                for ranks in given.ranks:
                    if case == "fsdp2, tensor_parallel=2" and ranks < 4: continue
                    row = dict(case=case, ranks=ranks, dtype=dtype, parameters=sizes["parameters"],
                               largest_weight_mib=round(sizes["largest"]*size/2**20))
                    for how in given.how:
                        row[how] = measured(Path(folder)/"model", Path(folder)/"tiny", case, how, ranks)
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    write(given.out, rows)


if __name__ == "__main__": main()
