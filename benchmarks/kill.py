"""SIGKILL at random moments, resume, and compare with the run that was not killed: prompts, rewards, losses and a hash
of the weights, step by step.

python benchmarks/kill.py                    20 moments of each kind of run; results/kill_cpu.json and .png
python benchmarks/kill.py --moments 5 --out FOLDER

A run is a GRPO loop on a tiny network: prompts whose epoch ends inside it, minibatches, a buffer that is never empty, a
coefficient that lives across steps, and twelve megabytes of ballast, so that a good part of the time goes to saving. It
saves after every step. Processes are forked from this one, which has the libraries loaded but has computed nothing, so
that a run takes a second and not ten. Each moment is a run of its own: killed (all of its ranks, or one, and then the
others must leave by themselves), then resumed in the same folder to the end. The moment is after a random number of
rows and up to a row's time later, or, in every third run, in the middle of the next save; one of the runs is killed
before its first row and one after its last. A run that was over before it could be killed does not count and is made
again."""
import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path

os.environ |= dict(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
# what a sharded run imports late: once, for all that are forked, and not two seconds in each of them
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn

from rlblocks import (Buffer, Checkpoint, Critic, Policy, Prompts, Rollout, SpmdPool, adaptive_kl_coef, at_tokens,
                      group_advantages, masked_mean, merge, ppo_loss)
from rlblocks.engines.ema import Ema
from rlblocks.engines.optimizers import adamw
from rlblocks.engines.weights import checksum

LORA = dict(r=4, target_modules=["layers.0", "layers.1"])
ROWS = [dict(prompt=f"{i}{i}", answer=str(i % 7)) for i in range(10)]
KINDS = dict(one=dict(ranks=1), background=dict(ranks=1, background=True), two=dict(ranks=2),
             fsdp2=dict(ranks=2, engine="fsdp2"), fsdp2_on_four=dict(ranks=4, engine="fsdp2"),
             fsdp2_background=dict(ranks=2, engine="fsdp2", background=True),
             fsdp2_to_one=dict(ranks=2, engine="fsdp2", resume=1), fsdp2_to_two=dict(ranks=1, engine="fsdp2", resume=2),
             zero1=dict(ranks=2, engine="zero1"), zero2=dict(ranks=2, engine="zero2"),
             zero3=dict(ranks=2, engine="zero3"), zero3_background=dict(ranks=2, engine="zero3", background=True),
             zero1_to_one=dict(ranks=2, engine="zero1", resume=1), zero2_to_two=dict(ranks=1, engine="zero2", resume=2),
             zero3_to_one=dict(ranks=2, engine="zero3", resume=1),
             adapters=dict(ranks=2, engine="fsdp2", adapters=True),
             adapters_zero2_background=dict(ranks=2, engine="zero2", adapters=True, background=True))


class Digits:
    "A tokenizer of digits."
    bos_token_id, eos_token_id = None, 1
    def __call__(self, text): return [int(c)+2 for c in text]
    def decode(self, ids, **_): return "".join(str(i-2) for i in ids if 2 <= i < 12)


class Net(nn.Module):
    "A causal network without attention: the mean of what came before, through two layers."
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, 32), nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.out = nn.Linear(32, 16)
        for p in self.parameters(): nn.init.normal_(p, std=.3, generator=g)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = x + x.cumsum(1)/torch.arange(1, x.shape[1]+1, device=x.device)[:, None]
        for layer in self.layers: h = h + torch.tanh(layer(h))
        return self.out(h)


def loop(pool, *, steps=12, engine=None, adapters=False, checkpoint=Checkpoint()):
    """GRPO with a buffer: each step trains on what an earlier one drew. With adapters, the policy and a critic are
    two of them on one model, and the policy has a moving average."""
    # another number of ranks adds in another order; ZeRO keeps fp32
    net = Net if engine and engine.startswith("zero") else lambda: Net().double()
    # a step that rounding cannot decide (tests/tiny.py, steady)
    optimizer = adamw(lr=1e-2, eps=1e-3)
    policy, rollout = pool.place(Policy, net, optimizer=optimizer, engine=engine, device="cpu", lora=LORA if adapters
                                 else None), pool.place(Rollout, net, max_tokens=4, device="cpu", tokenizer=Digits())
    more = dict(critic=pool.place(Critic, policy, lora="value", optimizer=optimizer),
                ema=Ema(policy, decay=.9)) if adapters else {}
    data, buffer, state = Prompts(ROWS, Digits(), seed=3), Buffer(), dict(coef=.5, ballast=torch.arange(3_000_000.))
    def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    def fit(out, b): return masked_mean((out.values-b.advantages)**2, b.mask, denom=b.n_tokens), {}
    for step in checkpoint(steps, policy=policy, data=data, buffer=buffer, state=state, **more):
        rollout.load(policy.weights())
        fresh = rollout.generate(data.take(4), group_size=4, seed=(0, step))
        fresh["old_logprobs"] = policy.logprobs(fresh)
        fresh["scores"] = torch.tensor([float(a in c) + state["coef"]*len(c)
                                        for a, c in zip(fresh.answer, fresh.completion, strict=True)])
        fresh["advantages"] = at_tokens(group_advantages(fresh.scores, fresh.group), fresh.mask)
        buffer.add(fresh)
        batch = fresh if step == 0 else buffer.take(16)        # of the step before: 16 rows stay behind
        metrics = {}
        for mini in batch.minibatches(2, seed=(0, step)): metrics = merge(metrics, policy.step(mini, loss))
        state["coef"] = adaptive_kl_coef(state["coef"], .2, target=.1, horizon=100, n_rows=16)
        state["ballast"] += 1
        weights = hashes(policy)
        if adapters:
            metrics = merge(metrics, dict(value_loss=more["critic"].step(batch, fit)["loss"]))
            more["ema"].update()
            with more["ema"].swapped(): weights += hashes(policy)
        yield dict(step=step, prompts=fresh.prompt[::4], reward=fresh.scores.mean().item(),
                   loss=float(metrics["loss"]) + float(metrics.get("value_loss", 0.)), norm=float(metrics["grad_norm"]),
                   held=len(buffer), ballast=state["ballast"][-1].item(), weights=f"{sum(weights) % 2**64:x}")


def hashes(policy): return [checksum(x) for bucket in policy.weights().buckets(1 << 28) for x in bucket.values()]


def one_rank(rank, ranks, port, folder, shown, engine, background, adapters):
    "A process: rank 0 writes each row that the loop shows as a line."
    if ranks > 1:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with SpmdPool(timeout=60., grace=1.) as pool, open(shown, "a") as f:
        for row in pool.watch(loop(pool, engine=engine, adapters=adapters,
                                   checkpoint=Checkpoint(folder, every=1, background=background))):
            f.write(json.dumps(row | dict(at=time.monotonic())) + "\n")
            f.flush()


def start(ranks, *how):
    "Process ids of a run's ranks."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port, pids = s.getsockname()[1], []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            log = os.open(f"{how[1]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            try: one_rank(rank, ranks, port, *how)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return pids


def finished(pids, limit):
    "Exit codes (negative: a signal), or None for those that had to be killed after `limit` seconds."
    end, left, status = time.monotonic() + limit, dict.fromkeys(pids), {}
    while left and time.monotonic() < end:
        for pid in list(left):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status[pid] = os.waitstatus_to_exitcode(code)
                left.pop(pid)
        time.sleep(.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [status.get(pid) for pid in pids]


def alive(pids): return all(os.waitid(os.P_PID, p, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for p in pids)


def killed(pids, victims, run, shown, after, inside, late):
    """Wait for so many rows, and for the middle of the next save if that is wanted, or a while longer, and kill.
    False for a run that had ended by then."""
    while alive(pids) and len(read(shown)) < after: time.sleep(.002)
    while alive(pids) and inside and not any(run.glob(".draft-*")): time.sleep(.0005)
    if not inside: time.sleep(late)
    running = alive(pids)
    for r in victims:
        try: os.kill(pids[r], signal.SIGKILL)
        except ProcessLookupError: pass
    return running


def whole_run(ranks, folder, shown, *how):
    "Run to the end: rows as shown, seconds."
    begin = time.monotonic()
    codes = finished(start(ranks, folder, shown, *how), 240)
    if any(code != 0 for code in codes):
        raise RuntimeError(f"a run of {ranks} ended with {codes}: {Path(f'{shown}.log').read_text()[-3000:]}")
    return read(shown), time.monotonic() - begin


def read(shown):
    return [json.loads(line)
            for line in Path(shown).read_text().splitlines() if line.endswith("}")] if Path(shown).exists() else []


def far(row, want):
    """Largest difference of two rows' numbers; infinite when anything else differs (prompts, and with them the order
    of the data)."""
    if any(row[k] != want[k] for k in ("step", "prompts", "held", "ballast")): return float("inf")
    return max(abs(row[k]-want[k])/max(abs(want[k]), 1) for k in ("reward", "loss", "norm"))


def kind(name, moments, folder, seed=0, *, ranks, engine=None, background=False, adapters=False, resume=None):
    "Kill and resume at so many moments of one kind of run."
    if str(engine).startswith("zero"):
        import deepspeed  # noqa: F401                          (once, for all that are forked)
    rng, out, how = random.Random(f"{name} {seed}"), [], (engine, background, adapters)
    begin = time.monotonic()
    plain, seconds = whole_run(ranks, folder/"plain", folder/"plain.txt", *how)
    assert len(plain) == 12 and len({r["weights"] for r in plain}) == 12
    first, pace = plain[0]["at"] - begin, statistics.median(b["at"]-a["at"] for a, b in itertools.pairwise(plain))
    for i in range(moments):
        run, shown, victims = (folder/f"run{i}", folder/f"shown{i}.txt",
                               rng.choice([range(ranks), *([[r] for r in range(ranks)] if ranks > 1 else [])]))
        for _ in range(5):
            after, inside, late = {1: (0, False, rng.uniform(0, first)),
                                   2: (12, False, 0.)}.get(i, (rng.randrange(2, 11), i % 3 == 0, rng.uniform(0, pace)))
            pids, begin = start(ranks, run, shown, *how), time.monotonic()
            hit, at = killed(pids, victims, run, shown, after, inside, late), time.monotonic() - begin
            # longer than a rank waits for a peer that died before they met: torch takes more than twice its timeout of
            # 60 s to give up connecting
            ended = finished(pids, 240)
            if hit or after == 12: break
            shutil.rmtree(run, ignore_errors=True)
            Path(shown).unlink(missing_ok=True)
        else: raise RuntimeError(f"{name}: five runs were over before they could be killed after {after} rows")
        before, drafts = read(shown), len(list(run.glob(".draft-*")))
        again, _ = whole_run(resume or ranks, run, f"{shown}.again", *how)
        rows = before + again
        distance = max(far(row, plain[row["step"]]) for row in rows) if rows else 0.
        out.append(dict(at=round(at, 3), killed=list(victims), others_left=None not in ended, shown=len(before),
                        resumed_at=min((r["step"] for r in again), default=12), in_a_save=drafts > 0,
                        complete={r["step"] for r in rows} == set(range(12)), distance=distance,
                        same_hash=all(r["weights"] == plain[r["step"]]["weights"] for r in rows)))
        shutil.rmtree(run, ignore_errors=True)
    return dict(seconds=round(seconds, 2), moments=out)


def wrong(name, r):
    "What is not as it should be, in words."
    m, moved = r["moments"], "_to_" in name          # another number of ranks adds in another order
    said = dict(steps=all(x["complete"] for x in m), survivors=all(x["others_left"] for x in m),
                numbers=max(x["distance"] for x in m) <= (1e-5 if moved else 0), weights=moved
                or all(x["same_hash"] for x in m), moments=sum(0 < x["resumed_at"] < 12 for x in m) >= len(m)/2)
    return [f"{name}: {what}" for what, fine in said.items() if not fine]


def table(results):
    lines = [f"{'run':18} {'kills':>5} {'in a save':>9} {'one rank':>8} {'resumed at step':>16} {'inside':>6} "
             f"{'others left':>11} {'all steps':>9} {'largest difference':>18} {'weights':>10}"]
    for name, r in results.items():
        m = r["moments"]
        lines.append(
            f"{name:18} {len(m):5} {sum(x['in_a_save'] for x in m):9} "
            f"{sum(len(x['killed']) < KINDS[name]['ranks'] for x in m):8} {min(x['resumed_at'] for x in m):7} … "
            f"{max(x['resumed_at'] for x in m):<6} {sum(0 < x['resumed_at'] < 12 for x in m):6} "
            f"{'all' if all(x['others_left'] for x in m) else 'NOT ALL':>11} "
            f"{'yes' if all(x['complete'] for x in m) else 'NO':>9} {max(x['distance'] for x in m):18.2g} "
            f"{'to the bit' if all(x['same_hash'] for x in m) else 'near':>10}")
    return "\n".join(lines)


def draw(results, file):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    for y, r in enumerate(results.values()):
        for saving, mark in ((False, "o"), (True, "x")):
            ax.plot([x["shown"] for x in r["moments"] if x["in_a_save"] is saving],
                    [y]*sum(x["in_a_save"] is saving for x in r["moments"]), f"C{int(saving)}{mark}")
    ax.set(yticks=range(len(results)), yticklabels=results,
           xlabel="rows shown before the kill, of 12 (× in the middle of a save)")
    fig.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent/"results")
    args = parser.parse_args()
    file = args.out/"kill_cpu.json"
    args.out.mkdir(parents=True, exist_ok=True)
    # kinds that are not run now keep their rows
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    for name in args.kinds:
        with tempfile.TemporaryDirectory() as d: done = kind(name, args.moments, Path(d), args.seed, **KINDS[name])
        results[name] = dict(date=str(date.today()), torch=torch.__version__, python=platform.python_version(),
                             cores=os.cpu_count()) | done
        print(table({name: results[name]}), flush=True)
        file.write_text(json.dumps(dict(results=results), indent=1) + "\n")
        draw(results, args.out/"kill_cpu.png")
    print(table(results))
    if bad := [x for name in args.kinds for x in wrong(name, results[name])]:
        raise SystemExit("not as it should be: " + "; ".join(bad))


if __name__ == "__main__": main()
