"""Policy, reference, critic and reward model on one placed model: run by tests/test_spmd_adapters.py in one process,
and in several."""
import os

os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from rlblocks import Checkpoint, Critic, Policy, Rollout, Scorer
from rlblocks.placement.place import local
from rlblocks.placement.spmd import SpmdPool
from tiny import model, rows, steady

LORA = dict(r=4, lora_alpha=8)


def pg(out, b): return -torch.where(b.mask, out.logprobs*b.advantages, 0.).sum()/b.n_tokens, {}
def fit(out, b): return torch.where(b.mask, (out.values-b.returns)**2, 0.).sum()/b.n_tokens, {}
def judge(out, b): return ((out.scores-b.lengths/9)**2).sum()/b.n_rows, {}


def placed(pool, engine, folder):
    "Four wrappers, one model: the policy's."
    policy = pool.place(Policy, folder/"base", lora=LORA, optimizer=steady(1e-3), engine=engine, micro_rows=3,
                        device="cpu")
    ref, critic = pool.place(Policy, policy, lora=None), pool.place(Critic, policy, lora="value",
                                                                    optimizer=steady(1e-3), micro_rows=3)
    scorer = pool.place(Scorer, policy, lora=dict(LORA, name="reward"), optimizer=steady(1e-3), micro_rows=3)
    views = [local(w)._run.model.engine.base for w in (policy, ref, critic, scorer)]
    assert all(base is views[0] for base in views) and set(views[0].own) == {"default", "value", "reward"}
    return policy, ref, critic, scorer


def trained(parts, b, steps, path=None):
    "Metrics of each step that this run took."
    policy, _, critic, scorer = parts
    shown = []
    for _ in Checkpoint(path, every=2)(steps, policy=policy, critic=critic, scorer=scorer):
        shown += [{k: float(v) for k, v in m.items()}
                  for m in (policy.step(b, pg), critic.step(b, fit), scorer.step(b, judge))]
    return shown


def together(pool, engine, folder, out):
    "What they compute, what they send, what they keep."
    b, (policy, ref, critic, scorer) = rows(B=7, dtype=torch.float32), (parts := placed(pool, engine, folder))
    first = ref.logprobs(b)
    found = dict(shown=trained(parts, b, 4, out/"run"), first=first)
    scorer.normalise(b)                                    # seven rows on two ranks
    found |= dict(policy=policy.logprobs(b), ref=ref.logprobs(b), values=critic.values(b), moments=scorer.moments,
                  scores=scorer.scores(b))
    rollout = pool.place(Rollout, model(), max_tokens=4, device="cpu")
    rollout.load(policy.weights())
    found["sampler"] = pool.place(Policy, rollout.module, frozen=True, device="cpu").logprobs(b)
    policy.save_pretrained(out/"merged"), policy.save_pretrained(out/"adapter",
                                                                 adapter=True), scorer.save_pretrained(out/"reward")
    try: pool.place(Critic, policy, lora="value")
    except Exception as e: found["refused"] = str(e)
    again = placed(pool, engine, folder)
    trained(again, b, 2, out/"half")
    again = placed(pool, engine, folder)
    found["resumed"] = trained(again, b, 4, out/"half")
    found["again"] = again[0].logprobs(b), again[2].values(b)
    return found


def on_rank(rank, ranks, folder, engines):
    "With one engine after another, on a rank of a pool."
    with SpmdPool(timeout=300.) as pool:
        torch.save({engine: together(pool, None if engine == "None" else engine, folder, folder/engine)
                    for engine in engines}, folder/f"{pool.rank}.pt")
