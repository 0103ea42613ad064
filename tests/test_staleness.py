"How old rows may be in an asynchronous loop, and that a run that is killed loses and repeats no prompt."
import json
import random
import time

import pytest
import torch
from conftest import rarely
from forked import context
from rlblocks import Buffer, Checkpoint, Flight, Policy, Prompts, Rollout, masked_mean, merge, reinforce_loss
from test_buffer import rows
from tiny import model, tokenizer


class Late:
    "A real engine of which some samples come late, as long answers do among short ones."
    def __init__(self, sampler, seed):
        self.sampler, self.random, self.held, self.now = sampler, random.Random(seed), [], 0

    def __getattr__(self, name): return getattr(self.sampler, name)

    def poll(self, seconds):
        self.now += 1
        self.held += [(self.now + self.random.choice((0, 0, 0, 1, 9, 99)), c) for c in self.sampler.poll(seconds)]
        come, self.held = ([x for x in self.held if (x[0] <= self.now) == now] for now in (True, False))
        return [c for _, c in come]

    def abort(self, keys):
        gone = set(keys)
        self.held = [(at, c) for at, c in self.held if c.key not in gone]
        return self.sampler.abort(gone)


def loop(ahead, steps, *, seed=0, n=4, size=2, minibatches=2, on_old="wait", age="oldest", checkpoint=Checkpoint()):
    "Trains on rows as they come, with `ahead` steps under way; yields which groups a step had and how old they were."
    policy, rollout = Policy(model(), lr=1e-3, device="cpu"), Rollout(model(), max_tokens=3, stop=[], max_rows=2,
                                                                     tokenizer=tokenizer(), device="cpu")
    rollout.shared.sampler = Late(rollout.sampler, seed)
    data = Prompts([dict(prompt=f"w{i%20+4}") for i in range(1000)], tokenizer(), shuffle=False)
    bound = dict(max_age=ahead, age=age, on_old=on_old) if on_old else {}
    flight, buffer = Flight(rollout), Buffer(per_step=minibatches, **bound)
    def ask(wanted):
        if (k := wanted - len(flight) - len(buffer)//size) > 0: flight.ask(data.take(k), group_size=size, seed=seed)
    def loss(out, b): return reinforce_loss(out.logprobs, b.advantages, b.mask, denom=b)
    for step in checkpoint(steps, policy=policy, data=data, flight=flight, buffer=buffer):
        if flight.oldest is None: rollout.load(policy.weights())
        ask(n)
        while not buffer.ready(n*size, version=policy.version, under_way=flight.versions):
            for group in flight.collect(1): buffer.add(group)
        batch = buffer.take(n*size, version=policy.version)
        rollout.load(policy.weights())
        ask(n*ahead)
        batch["advantages"] = torch.ones_like(batch.rollout_logprobs)*batch.mask
        now, drawn, metrics = policy.version, batch.policy_version[batch.mask], {}
        for mini in batch.minibatches(minibatches, seed=(seed, step)): metrics = merge(metrics, policy.step(mini, loss))
        yield dict(step=step, groups=batch.group[::size].tolist(), age=(now - int(drawn.min()))/minibatches,
                   left=sorted([*flight.pending, *(buffer.rows().group[::size].tolist() if len(buffer) else [])]),
                   taken=data.state_dict(), dropped=sum(buffer.dropped.values()))


@pytest.mark.parametrize("ahead", [1, *rarely(2, 3)])
def test_over_a_whole_run_no_row_is_older_than_the_bound(ahead):
    "And no prompt is lost or comes twice; without the bound, rows are older where two steps or more are under way."
    found = list(loop(ahead, 30, seed=ahead))
    assert max(r["age"] for r in found) <= ahead and not found[-1]["dropped"]
    groups = [g for r in found for g in r["groups"]] + found[-1]["left"]
    assert sorted(groups) == list(range(len(groups)))
    assert [g for r in found for g in r["groups"]] != sorted(g for r in found for g in r["groups"]), "some were late"
    free = max(r["age"] for r in loop(ahead, 30 if ahead > 1 else 10, seed=ahead, on_old=None))
    assert (free > ahead) == (ahead > 1)


def test_what_is_too_old_is_dropped_and_counted():
    found = list(loop(2, 30, seed=2, on_old="drop"))
    assert max(r["age"] for r in found) <= 2 and found[-1]["dropped"] > 0


def run(folder, out):
    "A process: each step that the loop shows is a line."
    torch.set_num_threads(1)
    with open(out, "a") as f:
        for row in loop(2, 14, seed=5, checkpoint=Checkpoint(folder, every=1)):
            f.write(json.dumps(row | dict(taken=None)) + "\n")
            f.flush()


def lines(out): return [json.loads(x) for x in out.read_text().splitlines() if x.endswith("}")] if out.exists() else []


def test_a_run_that_is_killed_loses_and_repeats_no_prompt(tmp_path):
    "SIGKILL after some rows and a moment, three times; what steps were shown last is what the run has trained on."
    folder, out, moments = tmp_path/"saves", tmp_path/"rows", random.Random(3)
    for kill_after in (3, 6, 10, None):
        process = context().Process(target=run, args=(str(folder), str(out)))
        process.start()
        while process.is_alive() and (kill_after is None or len(lines(out)) < kill_after): process.join(.01)
        if kill_after is not None:
            time.sleep(moments.random()*.2)
            process.kill()
        process.join()
    assert process.exitcode == 0
    shown = {r["step"]: r for r in lines(out)}
    assert sorted(shown) == list(range(14)) and max(r["age"] for r in shown.values()) <= 2
    groups = [g for r in shown.values() for g in r["groups"]] + shown[13]["left"]
    assert sorted(groups) == list(range(len(groups)))

class Paced:
    """A real engine beside the trainer, on a clock that is counted: as many rows as a batch has go on side by side, the
    others queue. With the one in sixty that takes fifty steps of training, and is stopped before, a batch takes one."""
    def __init__(self, sampler, rows, seed):
        self.sampler, self.rows, self.random = sampler, rows, random.Random(seed)
        self.left, self.done, self.waited, self.elsewhere = {}, [], 0., True

    def __getattr__(self, name): return getattr(self.sampler, name)

    def submit(self, requests):
        self.sampler.submit(requests)
        while said := self.sampler.poll(0.):
            for c in said:
                length = 50. if self.random.random() < 1/60 else self.random.choice((.5, .7, .9, 1.1, 1.4))
                self.left[c.key, c.sample] = [length, c]

    def next(self):
        "Those that go on, and when the first of them ends."
        running = [*self.left.values()][:self.rows]
        return running, min(x for x, _ in running)

    def train(self, time=1.):
        "Let time pass."
        while self.left and time > 0:
            running, first = self.next()
            for x in running: x[0] -= min(time, first)
            time -= first
            self.done += [c for x, c in self.left.values() if x < 1e-9]
            self.left = {k: x for k, x in self.left.items() if x[0] >= 1e-9}

    def poll(self, seconds):
        "The trainer waits for the next row."
        if self.left and not self.done:
            self.waited += self.next()[1]
            self.train(self.next()[1])
        done, self.done = self.done, []
        return done

    def abort(self, keys):
        gone = set(keys)
        self.left = {k: x for k, x in self.left.items() if k[0] not in gone}
        return []


def waiting(ahead, *, max_age=0, stops=False, steps=40, n=8, size=2):
    "The share of its time that a trainer waits for rows, and how old the oldest was."
    policy, rollout = Policy(model(), lr=1e-3, device="cpu"), Rollout(model(), max_tokens=2, stop=[], device="cpu")
    engine = rollout.shared.sampler = Paced(rollout.sampler, n*size, seed=0)
    data = Prompts([dict(prompt=f"w{i%20+4}") for i in range(4000)], tokenizer(), shuffle=False)
    flight, buffer, oldest = Flight(rollout), Buffer(max_age=max_age, on_old="wait"), 0
    def ask(wanted):
        if (k := wanted - len(flight) - len(buffer)//size) > 0: flight.ask(data.take(k), group_size=size)
    for step in range(steps):
        if step == 5: engine.waited = 0.          # it has begun
        due = [g for g, a in flight.pending.items() if a.version <= policy.version - max_age]
        if stops: flight.abort(due)
        ask(n*max(ahead, 1))
        while not buffer.ready(n*size, version=policy.version, under_way=flight.versions):
            for group in flight.collect(1): buffer.add(group)
        batch = buffer.take(n*size, version=policy.version)
        oldest = max(oldest, policy.version - int(batch.policy_version[batch.mask].min()))
        if ahead: rollout.load(policy.weights())
        ask(n*ahead)
        policy.step(batch, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b), {}))
        engine.train()
        if not ahead: rollout.load(policy.weights())
    return engine.waited/(engine.waited + steps - 5), oldest


def test_with_two_batches_under_way_and_stragglers_stopped_the_trainer_hardly_waits():
    "Sampling and training cost the same. What is due and has not come is stopped; otherwise one row holds up all."
    together, (held, _), (share, oldest) = waiting(0), waiting(2, max_age=3), waiting(2, max_age=3, stops=True)
    assert together[0] > .5 and held > .5 and share < .1 and oldest <= 3, (together, held, share, oldest)


# -- the buffer by itself

def by_token(groups, versions):
    "Rows with a version for each chosen token."
    b = rows(groups, T=4)
    b["lengths"], b["mask"] = torch.full((len(groups),), 4), torch.tensor([[False, True, True, True]]*len(groups))
    b["policy_version"] = torch.tensor(versions)
    return b


def test_age_is_that_of_the_oldest_token_or_of_the_newest():
    for age, left in (("oldest", [1]), ("newest", [0, 1])):
        buffer = Buffer(max_age=1, age=age)
        buffer.add(by_token([0, 1, 2], [[0, 3, 4, 6], [0, 5, 5, 5], [0, 3, 3, 4]]))
        buffer.evict(6)
        assert buffer.rows().group.tolist() == left, age


def test_a_group_is_as_old_as_its_oldest_row():
    buffer = Buffer(max_age=1, age="newest")
    buffer.add(by_token([0, 0, 1], [[0, 3, 4, 6], [0, 3, 3, 4], [0, 1, 2, 5]]))
    assert buffer.evict(6) == 2 and buffer.rows().group.tolist() == [1]


def test_waiting_drops_nothing_takes_the_oldest_first_and_says_when_it_is_too_late():
    buffer = Buffer(max_age=2, per_step=4, on_old="wait")
    for group, version in enumerate((8, 0, 4)): buffer.add(rows([group, group], seed=group, version=version))
    assert not buffer.ready(7, version=8) and buffer.ready(6, version=8)
    assert not buffer.ready(2, version=8, under_way=[0]), "the one under way is due in this step too"
    assert buffer.ready(3, version=8, under_way=[8, 8]) and not buffer.ready(3, version=8, under_way=[4, 4, 4])
    assert [buffer.take(2, version=8).group.tolist() for _ in range(3)] == [[1, 1], [2, 2], [0, 0]]
    buffer.add(rows([7], version=0))
    for ask in (buffer.ready, buffer.take):
        with pytest.raises(RuntimeError, match="a row that waits is 3 steps old, max_age is 2"): ask(1, version=9)
    assert len(buffer) == 1 and not buffer.dropped


def test_a_saved_buffer_waits_on():
    buffer, other = (Buffer(max_age=2, on_old="wait") for _ in range(2))
    for group, version in enumerate((1, 0)): buffer.add(rows([group], seed=group, version=version))
    other.load_state_dict(buffer.state_dict())
    assert other.take(1, version=2).group.tolist() == buffer.take(1, version=2).group.tolist() == [1]


def test_words_are_refused_by_name():
    for how, says in ((dict(on_old="keep"), "on_old='keep'; 'drop' or 'wait'"), (dict(age="mean"), "age='mean'"),
                      (dict(on_old="wait"), "on_old='wait' without max_age"), (dict(max_age=-1), "max_age=-1"),
                      (dict(per_step=0), "per_step=0")):
        with pytest.raises(ValueError, match=says): Buffer(**how)
    waiting = Buffer(max_age=1, on_old="wait")
    waiting.add(rows([0]))
    with pytest.raises(ValueError, match="what is drawn stays and grows old"): waiting.sample(1, seed=0, version=0)
    with pytest.raises(ValueError, match="pass version=…"): waiting.ready(1)
