"""Host memory of loading: what a rank holds at its highest until an engine has its shards.

Each rank is a process of its own. The peak is VmHWM, reset before the model is loaded, beyond what the process held
then; a tiny model is loaded first, so that libraries, groups and threads are there already. "whole" lets every rank
load the model as transformers does and then cut it; "shards" lets the engine read its own rows.

python benchmarks/loading.py [--millions 400] [--ranks 2 4] [--engines fsdp2 zero3]
writes benchmarks/results/loading.json."""
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"tests"))
OUT = ROOT/"benchmarks"/"results"/"loading.json"


def made(path, millions, dtype):
    "A random llama of so many million parameters in a folder; its largest weight is the embedding, a tenth of it."
    width = 1024
    config = dict(hidden_size=width, intermediate_size=4*width, num_attention_heads=8, num_key_value_heads=8,
                  vocab_size=int(millions*1e5)//width, max_position_embeddings=256)
    layers = max(1, round(millions*.8e6/(16*width*width)))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**config, num_hidden_layers=layers, tie_word_embeddings=False, dtype=dtype))
    model.save_pretrained(path, max_shard_size="500MB")
    return dict(parameters=model.num_parameters(), largest=max(p.numel() for p in model.parameters()))


def rank_main(folder, tiny, engine, how):
    "One rank: prints what it held at its highest, and what it holds afterwards, in MiB."
    import torch.distributed as dist
    from resident import give_back, memory, settled
    from rlblocks.engines.sharded import ShardedModel
    from rlblocks.models.forward import Forward
    from rlblocks.models.loading import load_module
    give_back()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    def loaded(path): return ShardedModel(Forward(load_module(path, lazy=how == "shards")), engine=engine, device="cpu")
    small = loaded(tiny)
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    model = loaded(folder)
    seconds = time.perf_counter()-start
    peak, after = memory("VmHWM")-before, settled()-before
    told = [None]*dist.get_world_size()
    dist.all_gather_object(told, dict(peak=round(peak), after=round(after), seconds=round(seconds, 1)))
    if dist.get_rank() == 0: print("RESULT", json.dumps(dict(ranks=told)))
    del small, model
    dist.destroy_process_group()


def measured(folder, tiny, engine, how, ranks):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                          __file__, "--rank", str(folder), str(tiny), engine, how], capture_output=True, text=True)
    line = next((x for x in run.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None: raise RuntimeError(run.stderr[-3000:])
    return json.loads(line.removeprefix("RESULT "))["ranks"]


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--millions", type=int, default=400)
    words.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    words.add_argument("--engines", nargs="+", default=["fsdp2", "zero3"])
    words.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    words.add_argument("--rank", nargs=4)
    given = words.parse_args()
    if given.rank: return rank_main(*given.rank)
    rows = []
    for dtype in given.dtypes:
        with TemporaryDirectory() as folder:
            sizes, _ = made(Path(folder)/"model", given.millions,
                            getattr(torch, dtype)), made(Path(folder)/"tiny", 2, getattr(torch, dtype))
            for engine in given.engines:
                for ranks in given.ranks:
                    shard, largest = sizes["parameters"]*4/ranks/2**20, sizes["largest"]*4/2**20
                    row = dict(engine=engine, ranks=ranks, dtype=dtype, parameters=sizes["parameters"],
                               shard_mib=round(shard), largest_weight_mib=round(largest))
                    for how in ("whole", "shards"):
                        got = measured(Path(folder)/"model", Path(folder)/"tiny", engine, how, ranks)
                        row[how] = dict(peak_mib=max(r["peak"] for r in got), after_mib=max(r["after"] for r in got),
                                        seconds=max(r["seconds"] for r in got))
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    OUT.write_text(json.dumps(dict(
        date=str(date.today()), torch=torch.__version__, transformers=transformers.__version__,
        python=platform.python_version(), machine=platform.machine(),
        about="MiB of a rank beyond what it held before the model was loaded: at the highest, and afterwards; masters "
        "are fp32", results=rows), indent=1) + "\n")


if __name__ == "__main__": main()
