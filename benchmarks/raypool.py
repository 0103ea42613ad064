"""What a call on a Ray cluster costs, against Ray itself in the same run.

    .venv/bin/python benchmarks/raypool.py [--rounds 20] [--workers 8] [--rows 4096] [--tokens 8192] [--actors 64]
                                           [--only …]

Rounds take turns, and a ratio is of the minima of one run. Promised:

* a call without rows costs at most 2.2 times a no-op of the same actors;
* with a batch of 1 and of 50 MB at most 2.2 times Ray's own put and no-op of the same parts, and what `Call` takes to
  cut them (`ray_copied`: with the copies that a rank makes of what it is given);
* 4,096 rows of 8,192 tokens reach 8 workers in 5 s at most, and the private memory of this process (RssAnon; RSS would
  count the store) grows by at most 16 bytes a token: with the columns it is at most twice the columns;
* 200 calls of 20 MB: private memory of this process and of the workers grows by less than 0.2 MB a call;
* weights for another pool cost at most 1.6 times a load on the same one, also where its ranks may be made anew; both
  with their checksums;
* a rank that samples is back 10 s after its death and its load.

Besides:

* actors of Ray alone that do nothing, as many as memory allows: milliseconds of a call to all, with a line through
  them, and the caller's own CPU time;
* weights from one host to another (network namespaces, as root), through their stores.

A promise that is not kept is printed as MISSED, and the exit code is 1; results/raypool_cpu.json says it as well.
"""
import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

os.environ |= dict(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", RAY_AUTH_MODE="token",
                   RAY_AUTH_TOKEN=os.environ.get("RAY_AUTH_TOKEN", "0123456789abcdef"*2))

import numpy as np
import ray
import torch
from machine import machine
from rlblocks import Batch, Cluster, Policy, RayPool, Rollout
from rlblocks.placement.place import Call

PROMISED = dict(empty=2.2, small=2.2, large=2.2, seconds=5., bytes_a_token=16., private=2., growth=.2, load=1.6,
                again=1.6, back=10.)


class Takes:
    "A wrapper that does nothing with what it is given."
    def nothing(self): return None
    def rows(self, b): return None
    def anon(self): return anon()


class Bare:
    "An actor of Ray alone."
    def nothing(self): return None
    def takes(self, parts): return None
    def copies(self, parts): return [x.copy() for x in parts] and None


def anon():
    "Private memory of this process, MB."
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))/1e3


def batch(megabytes=None, rows=64, tokens=None):
    "Columns as of a GRPO step: 21 bytes a token."
    tokens = tokens or int(megabytes*1e6/rows/21)
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[:, 0] = False
    return Batch(tokens=torch.zeros(rows, tokens, dtype=torch.long), mask=mask,
                 lengths=torch.full((rows,), tokens), **{name: torch.zeros(rows, tokens) for name in (
                     "old_logprobs", "ref_logprobs", "advantages")})


def size(b): return sum(x.nbytes for x in b.columns.values() if isinstance(x, torch.Tensor))


def timed(rounds, given=None, **ways):
    "Name → seconds of interleaved rounds. What `given` makes for each is made before the clock starts."
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            args = () if given is None else (given(),)
            start = time.perf_counter()
            way(*args)
            found[name].append(time.perf_counter() - start)
    return found


def best(rounds, given=None, **ways):
    "Name → the fewest of these seconds."
    return {name: min(x) for name, x in timed(rounds, given, **ways).items()}


def calls(cluster, rounds):
    "Calls without rows, and with rows: against Ray's own."
    with RayPool(2, cluster=cluster, world=False, name="calls") as pool:
        takes, members = pool.place(Takes), [rank.actor for rank in pool.processes.ranks]
        bare = [ray.remote(Bare).options(num_cpus=0).remote() for _ in range(2)]
        noop = lambda: ray.get([m.process.remote() for m in members])
        out = dict(empty=best(10*rounds, ours=takes.nothing, ray=noop))
        for name, megabytes in (("small", 1), ("large", 50)):
            b = batch(megabytes)
            def fresh(b=b): return Batch(**{k: x.clone() for k, x in b.columns.items()})
            def rays(b, method="takes"):
                call = Call((b,), {}, 2)
                parts = [[x.numpy() for x in call.of(k)[0][0].columns.values()] for k in range(2)]
                refs = [ray.put(part) for part in parts]
                ray.get([getattr(actor, method).remote(ref) for actor, ref in zip(bare, refs, strict=True)])
            out[name] = best(rounds, fresh, ours=takes.rows, ray=rays, ray_copied=partial(rays, method="copies"),
                             again=lambda _, b=b: takes.rows(b))
        for actor in bare: ray.kill(actor)
    return {name: x | dict(ratio=x["ours"]/x["ray"]) for name, x in out.items()}


def large(cluster, workers, rows, tokens):
    "A large batch to many workers of this machine."
    b = batch(rows=rows, tokens=tokens)
    with RayPool(workers, cpus=.5, cluster=cluster, world=False, name="large") as pool:
        takes = pool.place(Takes)
        takes.rows(batch(1))
        gc.collect()
        before, peak, start = anon(), Peak(), time.perf_counter()
        takes.rows(b)
        seconds = time.perf_counter() - start
        most = peak.stop() - before
    return dict(seconds=seconds, bytes=size(b), bytes_a_token=most*1e6/(rows*tokens), private_mb=most,
                private=(most*1e6 + size(b))/size(b))


class Peak:
    "The most private memory while it runs."
    def __init__(self):
        import threading
        self.most, self.done = anon(), threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.done.wait(.01): self.most = max(self.most, anon())

    def stop(self):
        self.done.set()
        self.thread.join()
        return self.most


def growth(cluster, n):
    "Private memory over many calls of 20 MB, MB a call."
    with RayPool(2, cluster=cluster, world=False, name="growth") as pool:
        takes = pool.place(Takes)
        for _ in range(20): takes.rows(batch(20))
        before, there = anon(), takes.anon()
        for _ in range(n): takes.rows(batch(20))
        gc.collect()
        return dict(calls=n, driver=(anon() - before)/n, worker=(takes.anon() - there)/n)


def llama(width=512):
    "101 MB; 335 MB where it is twice as wide."
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, hidden_size=width, intermediate_size=4*width,
                                        num_hidden_layers=4, num_attention_heads=8))


def spread(found):
    "Of each way the fewest, the middle and the most seconds."
    return {name: dict(min=min(x), median=median(x), max=max(x)) for name, x in found.items()}


def loads(cluster, rounds, megabytes=(16, 32, 64, 128)):
    "Weights onto the same pool, onto another, onto one whose ranks may be made anew; in buckets of several sizes."
    from rlblocks.placement import ray_calls
    def sized(n):
        def load():
            ray_calls.BUCKET_BYTES = n << 20
            other.load(policy.weights())
        return load
    with (RayPool(1, cluster=cluster, name="a") as a, RayPool(1, cluster=cluster, name="b") as b,
          RayPool(1, cluster=cluster, world=False, restarts=1, name="c") as c):
        policy, mine, other, anew = a.place(Policy, llama), *(pool.place(Rollout, llama) for pool in (a, b, c))
        own = ray_calls.BUCKET_BYTES
        found = timed(rounds, colocated=lambda: mine.load(policy.weights()),
                      other=lambda: other.load(policy.weights()), restarts=lambda: anew.load(policy.weights()))
        found |= timed(rounds//2, **{f"buckets_of_{n}_mb": sized(n) for n in megabytes})
        ray_calls.BUCKET_BYTES = own
    said = spread(found)
    return said | {name: {k: said[way][k]/said["colocated"][k] for k in ("min", "median")}
                   for name, way in (("ratio", "other"), ("ratio_restarts", "restarts"))}


def between(address, rounds):
    "Weights from one host of a cluster to the other. The driver's part."
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    def tiny():
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaForCausalLM(LlamaConfig(**small))
    cluster = Cluster(address=address, ready=60., options=dict(_node_ip_address=address.split(":")[0],
                                                               logging_level="ERROR", log_to_driver=False))
    with RayPool(1, cpus=2, cluster=cluster, name="a") as a, RayPool(1, cpus=2, cluster=cluster, name="b") as b:
        host, far = a.processes.ranks[0].address, b.processes.ranks[0].address
        ways = {}
        for name, make in (("tiny", tiny), ("large", llama), ("larger", partial(llama, 1024))):
            policy, rollout = a.place(Policy, make), b.place(Rollout, make)
            ways[name] = lambda p=policy, r=rollout: r.load(replace(p.weights(), probe=()))
        found = timed(rounds, **ways)
    return spread(found) | dict(hosts=[host, far])


def hosts(rounds):
    "The same, in two network namespaces."
    sys.path.append(str(Path(__file__).resolve().parents[1]/"tests"))
    from ray_hosts import Hosts, why_not
    if why_not(): return dict(left_out=why_not())
    with Hosts(2) as two, tempfile.TemporaryDirectory() as out:
        said = Path(out, "said.txt")
        command = [sys.executable, __file__, "--only", "between", "--address", f"{two.address(0)}:{two.port}",
                   "--rounds", str(rounds), "--out", out]
        two.run(0, command, out=said).wait()
        try: return json.loads(Path(out, "raypool_cpu.json").read_text())["between"]
        except FileNotFoundError: raise RuntimeError(said.read_text()) from None


def back(cluster):
    "Seconds from the death of a rank that samples to its next answer."
    from transformers import LlamaConfig, LlamaForCausalLM
    def net(): return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
                                                   num_hidden_layers=1, num_attention_heads=2))
    b = Batch(tokens=torch.ones(2, 3, dtype=torch.long), mask=torch.zeros(2, 3, dtype=torch.bool),
              lengths=torch.full((2,), 3), group=torch.arange(2))
    with RayPool(1, cluster=cluster, world=False, restarts=1, name="back") as pool:
        rollout = pool.place(Rollout, net, max_tokens=2)
        alive = best(3, ask=lambda: rollout.generate(b, seed=0))["ask"]
        os.kill(pool.processes.ranks[0].pid, signal.SIGKILL)
        return dict(alive=alive, seconds=best(1, ask=lambda: rollout.generate(b, seed=0))["ask"])


def cpu(rounds, ask):
    "Seconds of this process's own."
    start = time.process_time()
    for _ in range(rounds): ask()
    return (time.process_time() - start)/rounds


def sleeping(cluster, most, rounds):
    "A no-op of 1, 2, 4 … actors of Ray alone: seconds, and a line through them."
    actors, took, own = [], {}, {}
    def ask(): ray.get([actor.nothing.remote() for actor in actors])
    for n in (1 << k for k in range(most.bit_length())):
        actors.extend(ray.remote(Bare).options(num_cpus=0).remote() for _ in range(n - len(actors)))
        took[n], own[n] = best(rounds, ask=ask)["ask"], cpu(rounds, ask)
    for actor in actors: ray.kill(actor)
    each, once = np.polyfit(list(took), list(took.values()), 1, w=[1/t for t in took.values()])
    return dict(seconds=took, cpu=own, once_ms=1e3*once, each_ms=1e3*each, ten_thousand_seconds=once + 1e4*each)


def missed(found):
    "Promises that were not kept."
    got = {name: found[name]["ratio"] for name in ("empty", "small", "large") if name in found}
    if "huge" in found: got |= {k: found["huge"][k] for k in ("seconds", "private", "bytes_a_token")}
    if "growth" in found: got["growth"] = max(found["growth"]["driver"], found["growth"]["worker"])
    if "loads" in found: got |= dict(load=found["loads"]["ratio"]["min"], again=found["loads"]["ratio_restarts"]["min"])
    if "back" in found: got["back"] = found["back"]["seconds"]
    return [f"{name}: {x:.2f}, promised {PROMISED[name]:g}" for name, x in got.items() if x > PROMISED[name]]


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--workers", type=int, default=8)
    words.add_argument("--rows", type=int, default=4096)
    words.add_argument("--tokens", type=int, default=8192)
    words.add_argument("--calls", type=int, default=200)
    words.add_argument("--store", type=int, default=2_000_000_000, help="bytes of Ray's store")
    words.add_argument("--actors", type=int, default=64, help="of Ray alone; 60 to 130 MiB each")
    words.add_argument("--only", default="calls,huge,growth,loads,back,sleeping,hosts")
    words.add_argument("--address", help="of a running cluster, for --only between")
    words.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    given = words.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="ray")
    cluster = Cluster(options=dict(num_cpus=8, include_dashboard=False, object_store_memory=given.store,
                                   _temp_dir=folder, logging_level="ERROR", log_to_driver=False), ready=60.)
    parts = dict(calls=lambda: calls(cluster, given.rounds),
                 huge=lambda: dict(huge=large(cluster, given.workers, given.rows, given.tokens)),
                 growth=lambda: dict(growth=growth(cluster, given.calls)),
                 loads=lambda: dict(loads=loads(cluster, given.rounds)),
                 back=lambda: dict(back=back(cluster)),
                 sleeping=lambda: dict(sleeping=sleeping(cluster, given.actors, 5*given.rounds)),
                 hosts=lambda: dict(hosts=hosts(given.rounds)),
                 between=lambda: dict(between=between(given.address, given.rounds)))
    file = given.out/"raypool_cpu.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in given.only.split(","):
        for what, x in parts[name]().items():
            found[what] = x | dict(machine=machine() | dict(ray=ray.__version__))     # its date and load
            print(what, json.dumps(x), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    lost = missed(found)
    file.write_text(json.dumps(found | dict(missed=lost), indent=1) + "\n")
    for line in lost: print("MISSED:", line)
    return len(lost) > 0


if __name__ == "__main__": sys.exit(main())
