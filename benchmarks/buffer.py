"""Rows that wait and rows that travel: add, draw and take, the bytes they take, and the cut of a large batch.

    .venv/bin/python benchmarks/buffer.py [--data ../shared/data] [--rounds 5] [--out benchmarks/results]

The rows have the lengths of GSM8K's (question and answer, Qwen2.5's tokenizer; with --data) or log-normal ones of the
same shape, and, as "long", answers of log-normal length up to 8,192. They come as batches of 64 groups of 8 with the
columns of a GRPO step (tokens, mask, two log-probs, advantages: 21 bytes a token), and each batch is padded to its
longest row, as an engine returns it. What is compared:

  ours      Buffer
  padded    a batch per step, padded to the longest sequence allowed and joined by cat, as verl's DataProto is held
            between steps
  groups    a list of padded groups with scores, drawn by torch.multinomial: the replay buffer of TRL's experimental
            GRPO trainer, which 1.16's wheel no longer has
  lists     a list of rows, each a dict of Python lists, as rollout records travel in several systems
  datasets  datasets.Dataset in memory, a block a batch, concatenated, read back as tensors and padded

`add` is all batches going in; `draw` hands out 32 groups as one padded batch; `take` empties the store 512 rows at a
time. The stores take turns in every round; medians of CPU time, one thread. Bytes are those of all tensors, Arrow
buffers, or Python objects held; beside them, for ours, what the process really grew by (anonymous resident memory after
malloc_trim, one fresh process each), which counts everything: index, ids, Python objects.

The cut: 4,096 rows of 8k tokens in 512 groups with a prompt of 200 (tokens, mask, log-probs: 13 bytes a token) are cut
in 8 parts, groups kept, and joined again in order, by what a pool uses (`Call`). Promised are less than 5 s, at most 16
bytes a token on the way, and a peak under twice the batch where the parts go out one at a time and one column comes
back. Nothing here waits for a disk or another process: seconds are of processor time, since the clock's are what other
work on the machine leaves; both are printed, with the load.

A promise that is not kept is printed as MISSED, and the exit code is 1.
"""
import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rlblocks.data.batch import Batch
from rlblocks.data.columns import widen
from rlblocks.data.buffer import Buffer
from rlblocks.placement.place import Call
from rlblocks.data.ragged import ragged

GROUPS, SIZE, BATCHES, DRAW = 64, 8, 8, 32
ALLOWED = dict(gsm8k=1024, long=8192)  # longest sequence: what a padded store must have room for


def lengths_of(kind, data, count):
    g = torch.Generator().manual_seed(0)
    if kind == "long": return (torch.randn(count, generator=g)*.9 + 7).exp().long().clamp(64, 8192)
    if not data: return (torch.randn(count, generator=g)*.36 + 5.14).exp().long().clamp(64, 536)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(data/"tokenizers/qwen2.5")
    with gzip.open(data/"gsm8k/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pool = torch.tensor([len(i) for i in tokenizer([r["question"] + "\n" + r["answer"] for r in rows])["input_ids"]])
    return pool[torch.randint(len(pool), (count,), generator=g)]


def batches(lengths):
    "A batch a step, padded to its longest row."
    for step, n in enumerate(lengths.split(GROUPS*SIZE)):
        T = int(n.max())
        real = torch.arange(T) < n[:, None]
        x = torch.rand(len(n), T)*real
        yield Batch(tokens=torch.randint(1, 150_000, (len(n), T))*real, lengths=n, mask=real & (torch.arange(T) > 0),
                    old_logprobs=x, rollout_logprobs=x.clone(), advantages=x.clone(),
                    group=torch.arange(len(n))//SIZE + step*GROUPS, scores=torch.rand(len(n)))


class Ours:
    def __init__(self): self.buffer = Buffer()
    def add(self, batch): self.buffer.add(batch)
    def draw(self, seed): return self.buffer.sample(DRAW*SIZE, seed=seed, alpha=1.)
    def take(self, n): return self.buffer.take(n)
    def nbytes(self): return self.buffer.nbytes


class Padded:
    "All rows in one rectangle of the longest sequence allowed."
    def __init__(self, T): self.T, self.columns = T, {}
    def add(self, batch):
        for name, x in batch.columns.items():
            if x.dim() > 1: x = torch.nn.functional.pad(x, (0, self.T - x.shape[1]))
            self.columns[name] = torch.cat([self.columns[name], x]) if name in self.columns else x
    def _some(self, rows): return {k: x[rows] for k, x in self.columns.items()}
    def draw(self, seed):
        groups = torch.randperm(len(self.columns["group"])//SIZE, generator=torch.Generator().manual_seed(seed))[:DRAW]
        return self._some((groups[:, None]*SIZE + torch.arange(SIZE)).flatten())
    def take(self, n):
        out = self._some(slice(0, n))
        self.columns = {k: x[n:].clone() for k, x in self.columns.items()}
        return out
    def nbytes(self): return sum(x.nbytes for x in self.columns.values())


class Groups:
    "A list of groups, padded as their batch was."
    def __init__(self): self.held = []
    def add(self, batch):
        for i in range(0, len(batch), SIZE):
            self.held.append((float(batch.scores[i:i+SIZE].std()),
                              {k: x[i:i+SIZE].clone() for k, x in batch.columns.items()}))
    def _join(self, some):
        T = max(c["tokens"].shape[1] for c in some)
        widen = lambda x: torch.nn.functional.pad(x, (0, T - x.shape[1])) if x.dim() > 1 else x
        return {k: torch.cat([widen(c[k]) for c in some]) for k in some[0]}
    def draw(self, seed):
        scores = torch.tensor([s for s, _ in self.held])
        return self._join([self.held[i][1] for i in torch.multinomial(
            scores/scores.sum(), DRAW, generator=torch.Generator().manual_seed(seed)).tolist()])
    def take(self, n):
        some, self.held = self.held[:n//SIZE], self.held[n//SIZE:]
        return self._join([c for _, c in some])
    def nbytes(self): return sum(x.nbytes for _, c in self.held for x in c.values())


class Lists:
    "Rows as dicts of Python lists."
    def __init__(self): self.held = []
    def add(self, batch):
        columns = {k: x.tolist() for k, x in batch.columns.items()}
        for i, n in enumerate(batch.lengths.tolist()):
            self.held.append({k: x[i][:n] if isinstance(x[i], list) else x[i] for k, x in columns.items()})
    def _pad(self, rows):
        T = max(len(r["tokens"]) for r in rows)
        dtype = dict(tokens=torch.long, mask=torch.bool, lengths=torch.long, group=torch.long)
        return {k: torch.tensor([r[k] + [0]*(T - len(r[k])) if isinstance(r[k], list) else r[k] for r in rows],
                                dtype=dtype.get(k, torch.float)) for k in rows[0]}
    def draw(self, seed):
        groups = torch.randperm(len(self.held)//SIZE, generator=torch.Generator().manual_seed(seed))[:DRAW].tolist()
        return self._pad([self.held[g*SIZE + k] for g in groups for k in range(SIZE)])
    def take(self, n):
        some, self.held = self.held[:n], self.held[n:]
        return self._pad(some)
    def nbytes(self): # objects that are shared (True, False, small ints) cost their pointer only
        own = lambda x: sys.getsizeof(x) if isinstance(x, float) or isinstance(x, int) and not isinstance(
            x, bool) and x > 256 else 0
        return sum(sys.getsizeof(r) + sum(sys.getsizeof(x) + sum(map(own, x)) if isinstance(x, list) else own(x)
                                          for x in r.values()) for r in self.held)


class Datasets:
    "datasets.Dataset in memory."
    def __init__(self): self.held = None
    def add(self, batch):
        from datasets import Dataset, concatenate_datasets
        rows = Dataset.from_dict({k: [x.numpy()[i, :n] for i, n in enumerate(batch.lengths.tolist())] if x.dim() > 1
                                  else x.numpy() for k, x in batch.columns.items()})
        self.held = rows if self.held is None else concatenate_datasets([self.held, rows])
    def _pad(self, rows):
        return {k: torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True) if x[0].dim() else torch.stack(list(x))
                for k, x in rows.with_format("torch")[:].items()}
    def draw(self, seed):
        groups = torch.randperm(len(self.held)//SIZE, generator=torch.Generator().manual_seed(seed))[:DRAW]
        return self._pad(self.held.select((groups[:, None]*SIZE + torch.arange(SIZE)).flatten().tolist()))
    def take(self, n):
        out = self._pad(self.held.select(range(n)))
        self.held = self.held.select(range(n, len(self.held))) if n < len(self.held) else None
        return out
    def nbytes(self): return self.held.data.nbytes


def held():
    "Anonymous resident memory of this process, in bytes."
    import ctypes
    ctypes.CDLL(None).malloc_trim(0)
    return 1024*int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1])


def grown(kind, data):
    "What a process grows by when all batches are added, in bytes beyond the columns a token. In a fresh process."
    lengths = lengths_of(kind, data, GROUPS*SIZE*BATCHES)
    buffer = Buffer()
    for b in batches(lengths[:GROUPS*SIZE]): buffer.add(b)
    buffer.take(GROUPS*SIZE)
    del b # what is measured is what comes from here on
    before = held()
    for b in batches(lengths):
        buffer.add(b)
        del b
    columns = int(lengths.sum())*21 + len(lengths)*20
    return dict(a_token=(held() - before)/int(lengths.sum()),
                overhead_a_token=(held() - before - columns)/int(lengths.sum()))


def cut_and_join(rows=4096, T=8192, n=8):
    "A batch goes out in parts and comes back in order; in a fresh process."
    # ru_maxrss would begin with the parent's
    peak = lambda: 1024*int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
    lengths = torch.randint(7*T//8, T + 1, (rows,), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(rows, T, dtype=torch.bool)
    for i, k in enumerate(lengths.tolist()): mask[i, 1:k] = True
    batch = Batch(tokens=torch.arange(rows*T).view(rows, T) % 150_000, lengths=lengths, mask=mask,
                  old_logprobs=torch.rand(rows, T), group=torch.arange(rows)//SIZE)
    batch.tokens.view(-1, SIZE, T)[:, :, :200] = batch.tokens[::SIZE, None, :200]
    size = sum(x.nbytes for x in batch.columns.values())
    batch.part([0])
    base, start, wall, sent, back = peak(), time.process_time(), time.perf_counter(), 0, []
    call = Call((batch,), {}, n)
    for k in range(n): # one at a time, as a pool sends them; the answer is a column
        flat = ragged(call.of(k)[0][0])
        sent += flat.nbytes
        back.append(flat.batch().old_logprobs)
        del flat
    batch["ref_logprobs"] = widen(call.joined(back), T)
    one = dict(seconds=time.process_time() - start, wall_seconds=time.perf_counter() - wall,
               bytes_a_token=sent/int(lengths.sum()), peak=(peak() - base + size)/size, equal=bool(
        (batch.ref_logprobs == batch.old_logprobs*batch.mask.clone().index_fill_(1, torch.tensor([0]), True)).all()))
    del back
    batch = batch.drop("ref_logprobs")
    start = time.process_time()
    parts = batch.parts(n)
    made = time.process_time() - start
    joined = Batch.cat(parts)
    order = torch.tensor(sum(batch.cut(n), [])).argsort()
    joined = joined._rows(order, None)
    whole = time.process_time() - start
    return dict(rows=rows, tokens=int(lengths.sum()), parts=n, one_at_a_time=one,
                all_at_once=dict(cut_seconds=made, cut_and_join_seconds=whole, equal=joined.tokens.equal(batch.tokens)),
                spread=max(int(p.lengths.sum()) for p in parts)/min(int(p.lengths.sum()) for p in parts) - 1)


def elsewhere(*args):
    "A measurement in a fresh process."
    run = subprocess.run([sys.executable, "-W", "ignore", __file__, "--measure", *map(str, args)], capture_output=True,
                         text=True)
    if run.returncode: raise RuntimeError(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def timed(f, *args):
    start = time.process_time()
    f(*args)
    return 1e3*(time.process_time() - start)


def median(x): return sorted(x)[len(x)//2]


def compare(kind, data, rounds):
    lengths = lengths_of(kind, data, GROUPS*SIZE*BATCHES)
    made, tokens = list(batches(lengths)), int(lengths.sum())
    stores = {"ours": Ours, "padded": lambda: Padded(ALLOWED[kind]), "groups": Groups,
              "lists": Lists, "datasets": Datasets}
    columns = tokens*(8 + 1 + 3*4) + len(lengths)*(8 + 8 + 4)
    out = {name: dict(add_ms=[], draw_ms=[], take_ms=[]) for name in stores}
    for step in range(rounds):
        for name, make in stores.items():
            store = make()
            out[name]["add_ms"].append(sum(timed(store.add, b) for b in made))
            if not step:
                out[name]["bytes_a_token"], out[name]["overhead_a_token"] = store.nbytes()/tokens, (
                    store.nbytes() - columns)/tokens
            out[name]["draw_ms"].append(median([timed(store.draw, 5*step + k) for k in range(5)]))
            out[name]["take_ms"].append(sum(timed(store.take, GROUPS*SIZE) for _ in made))
    return dict(rows=len(lengths), tokens=tokens, longest=int(lengths.max()), allowed=ALLOWED[kind],
                columns_a_token=columns/tokens,
                stores={name: {k: median(v) if isinstance(v, list) else v for k, v in x.items()}
                        for name, x in out.items()})


def machine():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
               platform.processor()) if os.path.exists("/proc/cpuinfo") else platform.processor()
    return dict(date=datetime.now().isoformat(timespec="seconds"), torch=torch.__version__,
                python=platform.python_version(), cpu=cpu, cores=os.cpu_count(),
                threads=torch.get_num_threads(), load=os.getloadavg())


def verdicts(result):
    "What was promised and what came."
    one = result["cut"]["one_at_a_time"]
    overhead = {f"bytes a token beyond the columns, {kind}": dict(
        wanted=16, got=x["grown"]["overhead_a_token"]) for kind, x in result["kinds"].items()}
    return overhead | {"seconds to cut and join 4,096 rows": dict(wanted=5, got=one["seconds"]),
                       "bytes a token on the way": dict(wanted=16, got=one["bytes_a_token"]),
                       "peak, in batches": dict(wanted=2, got=one["peak"])}


def draw(result, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5))
    for shift, (kind, x) in zip((-.2, .2), result["kinds"].items(), strict=True):
        names = list(x["stores"])
        axes[0].bar([k + shift for k in range(len(names))], [x["stores"][n]["bytes_a_token"] for n in names], .4,
                    label=f"{kind}, longest {x['longest']:,}")
        for name, mark in zip(names, "od^vx", strict=True):
            axes[1].plot([0, 1, 2], [x["stores"][name][f"{job}_ms"] for job in ("add", "draw", "take")],
                         mark + ("-" if kind == "long" else ":"), label=f"{name}, {kind}")
    axes[0].set_xticks(range(len(names)), names)
    axes[0].set(ylabel="bytes in memory a token", yscale="symlog")
    axes[0].axhline(21, color="k", ls=":", lw=1)
    axes[0].legend(fontsize=8)
    axes[1].set_xticks([0, 1, 2], ["add all", "draw 32 groups", "take all"])
    axes[1].set(ylabel="milliseconds", yscale="log")
    axes[1].legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, help="folder with gsm8k and tokenizers/qwen2.5")
    p.add_argument("--rounds", type=int, default=5, help="times that each store is filled and emptied")
    p.add_argument("--out", type=Path, default=Path(__file__).parent/"results",
                   help="folder for buffer_cpu.json and buffer_cpu.png")
    p.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.measure:
        what, *rest = a.measure
        data = Path(rest[1]) if rest[1:] != ["-"] and rest else None
        print(json.dumps(cut_and_join() if what == "cut" else grown(rest[0], data)))
        return
    result = dict(machine=machine(), lengths="GSM8K, Qwen2.5's tokenizer" if a.data else "made up", kinds={})
    print("{cpu}, {threads} threads, torch {torch}, load {load[0]:.1f}".format(**result["machine"]))
    for kind in ALLOWED:
        x = result["kinds"][kind] = compare(kind, a.data, a.rounds)
        print("\n{kind}: {rows:,} rows, {tokens:,} tokens, longest {longest:,}, room for {allowed:,}; columns "
              "are {columns_a_token:.1f} bytes a token".format(kind=kind, **x))
        print(f"{'':>8} | {'bytes a token':>13} {'overhead':>8} {'ours is':>8} | {'add ms':>8} {'':>6} "
              f"{'draw ms':>8} {'':>6} {'take ms':>8}   (times as long as ours)")
        for name, s in x["stores"].items():
            ratio = s["bytes_a_token"]/x["stores"]["ours"]["bytes_a_token"]
            times = " ".join(f"{s[job]:>8.1f} ({s[job]/x['stores']['ours'][job]:>4.1f})"
                             for job in ("add_ms", "draw_ms", "take_ms"))
            print(f"{name:>8} | {s['bytes_a_token']:>13.2f} {s['overhead_a_token']:>8.2f} {f'1/{ratio:.1f}':>8} "
                  f"| {times}", flush=True)
        grew = x["grown"] = elsewhere("grown", kind, a.data or "-")
        print(f"a process grows by {grew['a_token']:.2f} bytes a token, {grew['overhead_a_token']:.2f} beyond the "
              "columns (promised 16)", flush=True)
    cut = result["cut"] = elsewhere("cut")
    print("\n{rows:,} rows, {tokens:,} tokens, cut in {parts} (fullest {spread:.2%} above emptiest) and joined in "
          "order: {one_at_a_time[seconds]:.1f} s ({one_at_a_time[wall_seconds]:.1f} s on the clock, {load[0]:.1f} "
          "processes running) "
          "one part at a time and ragged; {all_at_once[cut_and_join_seconds]:.1f} s with all parts at once, padded, "
          "{all_at_once[cut_seconds]:.1f} of them the cut".format(**cut, load=os.getloadavg()))
    kept = result["promised"] = verdicts(result)
    print()
    for name, v in kept.items():
        print(f"{name}: {v['got']:.2f}, {v['wanted']:g} at most: {'met' if v['got'] <= v['wanted'] else 'MISSED'}")
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out/"buffer_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, a.out/"buffer_cpu.png")
    return any(v["got"] > v["wanted"] for v in kept.values())


if __name__ == "__main__": sys.exit(main())
