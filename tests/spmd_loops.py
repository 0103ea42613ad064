"""The tutorials' loops and every kind of call on tiny models: tests/test_spmd.py runs them in one process and more.

torchrun --nproc-per-node 2 tests/spmd_loops.py FOLDER"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from conftest import ROOT
from rlblocks import (
    Batch, Checkpoint, Critic, Demonstrations, Feedback, Grader, Mean, Policy, Preferences, Prompts, Rollout, here,
    later, loop_from, ppo_loss
)
from rlblocks.engines.engine import EngineSpec
from rlblocks.engines.fsdp2 import Fsdp
from rlblocks.engines.plain import Plain
from rlblocks.engines.tensor_parallel import TensorParallel
from rlblocks.engines.zero import Zero
from rlblocks.placement.spmd import SpmdPool
from tiny import exact, model, prompts, rows, steady

ASKED = [dict(prompt=f"{i}"*(1+i % 3), answer=str(i % 7)) for i in range(10)]
PAIRS = [dict(prompt=f"{i}", chosen=f"{i}{i}", rejected=f"{i+1}") for i in range(9)]


class Digits:
    "A tokenizer of digits, so that no training is needed: '37' → [5, 9]."
    bos_token_id, eos_token_id = None, 1
    def __call__(self, text): return [int(c)+2 for c in text]
    def decode(self, ids, **_): return "".join(str(i-2) for i in ids if 2 <= i < 12)


class Kept:
    "A `Checkpoint` that keeps nothing but the parts, and what the data gave."
    def __call__(self, steps, **parts):
        self.parts, self.taken = parts, []
        for step in range(steps):
            yield step
            self.taken.append(parts["data"].taken)


def net(seed=0):
    "In float64: nine steps make much of what fp32 rounds, and another processor rounds it otherwise."
    return exact(model(seed=seed))


def steadily(module, device, *, optimizer=None, **how):
    """The plain engine, with steps that rounding cannot decide: where all rewards of a group are equal, the gradient
    is nothing but rounding."""
    return Plain(module, device, optimizer=optimizer and steady(2e-3), **how)


def sharded(module, device, *, optimizer=None, **how):
    "The same, cut over ranks."
    return Fsdp(module, device, optimizer=optimizer and steady(2e-3), **how)


def layers_cut(module, device, *, optimizer=None, **how):
    "The same, every layer cut over two ranks."
    return TensorParallel(module, device, size=2, optimizer=optimizer and steady(2e-3), **how)


def in_zero1(module, device, *, optimizer=None, **how):
    "The same, its optimizer's states cut by DeepSpeed, which knows no float64; a frozen model has none."
    if optimizer is None: return Plain(module, device, **how)
    return Zero(module, device, stage=1, optimizer=steady(2e-3), **how)


def prefers(completion_ids, **_): return [float(2 in x) + .1*len(x) if x[0] != 3 else None for x in completion_ids]


TIMES = ("start", "asked", "idle", "seconds")


def single(seed=0):
    "In float32."
    return model(seed=seed)


def tutorials(pool, net=net):
    "What each loop shows, step by step, and the weights it ends with."
    grpo, ppo, dpo = (loop_from(f"{ROOT}/tutorials/{name}.ipynb:{name}") for name in ("grpo", "ppo", "dpo"))
    one_off = loop_from(f"{ROOT}/tutorials/async.ipynb:async_grpo")
    how = dict(model=net, engine=steadily, steps=3, micro_tokens=64)
    loops = dict(grpo=lambda c: grpo(pool, Prompts(ASKED, Digits()), prefers, prompts=4, group_size=4, minibatches=2,
                                     max_tokens=4, checkpoint=c, **how),
                 # the next rows are asked for before these are trained on
                 one_step_off=lambda c: one_off(pool, Prompts(ASKED, Digits()), prefers, prompts=3, group_size=3,
                                                minibatches=2, max_tokens=4, checkpoint=c, **how),
                 # fewer units than ranks
                 one_prompt=lambda c: grpo(pool, Prompts(ASKED, Digits()), prefers, prompts=1, group_size=3,
                                           minibatches=3, max_tokens=3, checkpoint=c, **how),
                 ppo=lambda c: ppo(pool, Prompts(ASKED, Digits()), prefers, critic_model=lambda: net(seed=1).model,
                                   prompts=6, minibatches=2, max_tokens=4, checkpoint=c, **how),
                 dpo=lambda c: dpo(pool, Preferences(PAIRS, Digits()), Preferences(PAIRS[:3], Digits(), shuffle=False),
                                   n_pairs=5, every=2, warmup=1, checkpoint=c, **how))
    out = {}
    for name, loop in loops.items():
        kept = Kept()
        shown = [{k: float(v) for k, v in row.items() if k not in TIMES} for row in loop(kept)]
        out[name] = dict(shown=shown, taken=kept.taken, weights=kept.parts["policy"].state_dict()["module"])
    return out


ANSWERS = [dict(prompt=f"{i}"*(1+i % 3), completion=f"{i % 7}{(i+1) % 7}") for i in range(10)]
LABELS = [dict(prompt=f"{i}", completion=f"{i}{i % 5}", label=bool(i % 2)) for i in range(10)]


def more_tutorials(pool):
    "What the loops show that learn from answers, labels and pairs, and those that a reward model judges."
    def loop(name, *data, **how):
        rows = loop_from(f"{ROOT}/tutorials/{name}.ipynb:{name}")(pool, *data, steps=2, **how)
        return [{k: float(v) for k, v in row.items() if k not in TIMES} for row in rows]
    def asked(): return Prompts(ASKED, Digits())
    how, trunk = dict(engine=steadily, micro_tokens=64), lambda: net(seed=1).model
    return dict(
        sft=loop("sft", Demonstrations(ANSWERS, Digits()), rows=5, warmup=1, model=net, **how),
        kto=loop("kto", Feedback(LABELS, Digits()), Feedback(LABELS[:4], Digits()), rows=6, warmup=1, every=1,
                 model=net, **how),
        reward_model=loop("reward_model", Preferences(PAIRS, Digits()), Preferences(PAIRS[:3], Digits(), shuffle=False),
                          n_pairs=5, warmup=1, every=1, model=trunk, **how),
        best_of_n=loop("best_of_n", asked(), prefers, prompts=4, n=3, least=-9, max_tokens=4, model=net,
                       engine=steadily),
        rlhf=loop("rlhf", asked(), reward_model=trunk, prompts=5, minibatches=2, max_tokens=4, model=net, **how))


ENGINES = dict(fsdp2=sharded, tensor=EngineSpec(tensor_parallel=2, make=layers_cut))


def engines(pool, names=tuple(ENGINES), checkpoint=None, steps=3, net=net):
    "GRPO with rows that ranks cannot share evenly, on each engine that cuts weights."
    grpo, out = loop_from(f"{ROOT}/tutorials/grpo.ipynb:grpo"), {}
    if pool is here and len(names) > 1: return dict.fromkeys(names, engines(pool, names[:1])[names[0]])
    made = ENGINES | dict(zero1=in_zero1)
    for name in names:
        kept = checkpoint or Kept()
        loop = grpo(pool, Prompts(ASKED, Digits()), prefers, prompts=5, group_size=3, minibatches=2, max_tokens=4,
                    model=net, engine=steadily if pool is here else made[name], steps=steps,
                    micro_tokens=64, checkpoint=kept)
        shown = [{k: float(v) for k, v in row.items()} for row in loop]
        out[name] = dict(shown=shown) | ({} if checkpoint else dict(
            weights=kept.parts["policy"].state_dict()["module"]))
    return out


@cache
def alone(loops):
    "What `tutorials`, `engines` or `dispatch` give in one process: computed once, and only read."
    return loops(here)


def loss(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)


class Echo:
    "A wrapper of a user's: nothing of ours in it."
    shape = "round"
    def __init__(self, base=0): self.base, self.n = base, 0
    @property
    def twice(self): return 2*self.base
    def add(self, b, *, more=0):
        self.n += 1
        return b.tokens + self.base + more
    def names(self, b): return [f"{x}!" for x in b.answer]
    def mixed(self, b):
        return dict(a=b.tokens[:, 0], b=b.answer, n=Mean(b.mask.sum(), 1)), Batch(tokens=b.tokens, answer=b.answer)
    def none(self, b): return None
    def number(self, b): return len(b)
    def plain(self, x): return dict(x=x, rank=os.environ.get("RANK", "0"))
    def through(self, other, b): return other.logprobs(b)
    def fails(self, b): raise KeyError(f"no such thing as {b.answer[0]}")
    def __call__(self, b): return b.lengths*2


def dispatch(pool):
    "Every kind of call, answered."
    policy, critic, rollout, grader, echo = (pool.place(Policy, net(), lr=2e-3),
                                             pool.place(Critic, lambda: net(seed=1).model, lr=2e-3),
        pool.place(Rollout, net(), max_tokens=5, tokenizer=Digits()),
        pool.place(Grader, dict(long=lambda completion_ids, **_: [float(len(x)) for x in completion_ids], two=prefers)),
        pool.place(Echo, base=3))
    out = {}
    rollout.load(policy.weights())
    b = rollout.generate(prompts((5, 2, 7, 3, 3)), group_size=3, seed=(1, 2))
    out["generated"] = dict(b.columns)
    out["few"] = dict(rollout.generate(prompts((5,)), group_size=2, seed=3).columns)
    out["two grades"] = grader.scores(b)
    b["old_logprobs"] = policy.logprobs(b)
    call = later(critic.values, b)
    out["lengths"], out["logprobs"], out["values"] = echo(b), b.old_logprobs, call.result()
    out["through"] = echo.through(policy, b)
    out["measured"] = policy.measure(b, lambda z: z.topk(3).values)
    b["advantages"] = torch.linspace(-1, 1, len(b))[:, None].expand_as(b.mask).clone()
    extra = rows(B=5)
    extra["old_logprobs"] = policy.logprobs(extra)
    steps = [policy.step(b, loss), policy.step(b, loss, (extra, loss)), policy.step(b, loss, (extra[:0], loss)),
             policy.step(b[:0], loss), policy.step(b[:1], loss)]
    out["steps"] = [{k: float(v) for k, v in m.items()} for m in steps]
    out["version"], out["attribute"], out["property"] = policy.version, echo.shape, echo.twice
    echo.base = 4
    out["set"] = echo.twice
    out["columns"] = echo.add(Batch(tokens=torch.arange(12).view(6, 2)), more=1)      # no mask, no lengths
    out["names"], out["none"], out["plain"] = echo.names(prompts()), echo.none(prompts()), echo.plain((1, "x"))
    out["mixed"] = dict(echo.mixed(prompts())[1].columns)
    state = policy.state_dict()
    policy.load_state_dict(state)
    out["state"] = state["module"]
    return out


def caught(f, *args, **kwargs):
    "What it raised."
    try: f(*args, **kwargs)
    except Exception as e: return f"{type(e).__name__}: {e}"
    return "nothing"


def failures(pool):
    "What goes wrong on one rank is heard on all, and the pool goes on."
    echo, again = pool.place(Echo), pool.place(Echo)
    b, r = prompts((5, 2, 7, 3)), pool.rank
    odd = Batch(**b.columns | dict(tokens=b.tokens + r))
    class Broken:
        def __init__(self):
            if r == 1: raise OSError("disk on fire")
    out = dict(raised=caught(echo.fails, b), private=caught(lambda: echo._n), unlike_batch=caught(echo.add, odd),
               unlike_list=caught(echo.names, Batch(**b.columns | dict(answer=[f"{x}{r}" for x in b.answer]))),
               unlike_number=caught(echo.add, b, more=r), unlike_method=caught(echo.add if r == 0 else echo.names, b),
               unlike_object=caught((echo if r == 0 else again).add, b),
               a_number=caught(echo.number, b), a_list=caught(echo.add, [b]), place=caught(pool.place, Broken),
               part=caught(echo.add, b.parts(3)[0]),
               one=caught(echo.fails, b[:1]), step=caught(pool.place(Policy, model()).step, b, loss))
    return out | dict(after=echo.add(b))


class Twins:
    "Ranks 0 and 1 are one replica, 2 and 3 another: they work on the same rows, as under tensor parallelism."
    def __init__(self): self.rank, self.replica = torch.distributed.get_rank(), 5 - torch.distributed.get_rank()//2
    def who(self, b): return torch.full((len(b),), self.rank), [f"{x}{self.rank}" for x in b.answer]
    def mine(self, b):
        self.saw = b.answer
        return Mean(b.lengths.sum(), 1)


class Sees:
    "A wrapper that says whether it computes what rows begin with alike once; None: says nothing."
    def __init__(self, says):
        if says is not None: self.shares_prompts = says
    def given(self, b): return b.lengths.sum().expand(len(b))


def grouped():
    "Two groups of two, one of longer rows: one by one a part has a row of either, together a group a part."
    tokens, at, lengths = torch.arange(84).view(4, 21) + 100, torch.arange(21), torch.tensor([21, 21, 20, 20])
    tokens[1, :15], tokens[3, :15] = tokens[0, :15], tokens[2, :15]
    return Batch(tokens=tokens, lengths=lengths, mask=(at >= 15) & (at < lengths[:, None]),
                 group=torch.tensor([0, 0, 1, 1]))


def replicas(pool):
    "Who answered, for which rows; what this rank was given."
    twins, b = pool.place(Twins), prompts((5, 2, 7, 3))
    who, answers = twins.who(b)
    return dict(who=who, answers=answers, total=float(twins.mine(b))*(pool.ranks//2), saw=twins.saw,
                tokens=[pool.place(Sees, says).given(grouped()).tolist() for says in (True, False, None)])


class Draws(Rollout):
    "A rollout that shows what it has begun itself."
    def start_generate(self, prompts, **how):
        self.begun = super().start_generate(prompts, **how)
        return self.begun


class Threaded:
    "A wrapper whose method runs elsewhere once it is begun: an error is in the answer."
    def __init__(self): self.thread = ThreadPoolExecutor(1)
    def start_names(self, b): return self.thread.submit(self.names, b)
    def names(self, b):
        if "?" in b.answer: raise OSError(f"cannot read {''.join(b.answer)}")
        return [f"{x}!" for x in b.answer]


def begun(pool):
    "Rows of calls that are begun and of those that are not, and whose rows this process drew."
    rollout = pool.place(Draws, net(), max_tokens=5, tokenizer=Digits())
    p, ask = prompts((5, 2, 7, 3)), dict(seed=(1, 2))
    call = later(rollout.generate, p, group_size=3, **ask)
    own = rollout.begun
    other, between = later(rollout.generate, p[:2], **ask), rollout.generate(p, temperature=0.)
    second, rows = other.result(), call.result()
    assert call.result() is rows, "asked again, it is the same"
    return dict(rows=dict(rows.columns), called=dict(rollout.generate(p, group_size=3, **ask).columns),
                second=dict(second.columns), few=dict(rollout.generate(p[:2], **ask).columns),
                between=dict(between.columns), own=own.rows.answer)


def begun_errors(pool):
    "When an error of one rank is heard, on this one, and what comes after it."
    threaded, b = pool.place(Threaded), prompts((5, 2, 7, 3))
    bad = Batch(**b.columns | dict(answer=["5", "2", "7", "?"]))
    good, call = later(threaded.names, b), later(threaded.names, bad)
    one, two = later(threaded.names, b), later(threaded.names, b)
    return dict(result=caught(call.result), again=caught(call.result),
                beginning=caught(later, pool.place(Echo).fails, b), good=good.result(),
                order=caught((one if pool.rank == 0 else two).result), after=[one.result(), two.result()])


def begun_on_rank(rank, ranks, folder):
    "Calls that are begun, on a rank of a pool."
    with SpmdPool(timeout=300.) as pool:
        torch.save(dict(begun=begun(pool), errors=begun_errors(pool)), folder/f"{pool.rank}.pt")


def stopped(pool, folder):
    """A consumer, which only rank 0 has, asks for a save of the step just shown and stops a step later; a second run
    goes on after the save."""
    grpo, shown = loop_from(f"{ROOT}/tutorials/grpo.ipynb:grpo"), []
    run = lambda checkpoint: pool.watch(grpo(pool, Prompts(ASKED, Digits()), prefers, model=model, lr=2e-3, steps=4,
                                             prompts=2, group_size=2, minibatches=1, max_tokens=3,
                                             checkpoint=checkpoint))
    checkpoint = Checkpoint(folder, every=10)
    for row in run(checkpoint):
        shown.append(row["step"])
        if row["step"] == 1: checkpoint.save()
        if row["step"] == 2: break
    pool.watched.close() if pool.watched is not None and hasattr(pool.watched, "close") else None
    return shown, sorted(f.name for f in Path(folder).glob("*step-*")), [row["step"]
                                                                         for row in run(Checkpoint(folder, every=10))]



def loops_on_rank(rank, ranks, folder, names=tuple(ENGINES), every=True):
    "The loops alone; `every`: those of the tutorials too."
    with SpmdPool(timeout=300.) as pool:
        torch.save((tutorials(pool) if every else {}, engines(pool, names)), folder/f"{pool.rank}.pt")


def on_rank(rank, ranks, folder):
    "All of it, on a rank of a pool."
    with SpmdPool(timeout=300.) as pool:
        got = dict(tutorials=tutorials(pool), dispatch=dispatch(pool))
        if pool.ranks > 1:
            got |= dict(failures=failures(pool), replicas=replicas(pool), stopped=stopped(pool, folder/"run"))
        torch.save(got, folder/f"{pool.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_rank(None, None, Path(sys.argv[1]))
