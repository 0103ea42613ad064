"""A step is right or it raises: losses that do not add up, threads, Ctrl-C, numbers that are none
(nbs/models/74_outputs, nbs/engines/00_engine, nbs/engines/02_sharded_model)."""
import copy
import inspect
import warnings
import pickle
import signal
import threading
from contextlib import contextmanager

import pytest
import torch
from tiny import model, rows
from torch.testing import assert_close

import rlblocks as rl
from rlblocks import Batch, Critic, Policy, Scorer, kl_k3, masked_mean, masked_sum, pairs, ppo_loss, value_loss
from rlblocks.models.outputs import Out, RowOut, check_splits


def net(**more): return model(**more)
def batch(seed=0, **columns):
    b = rows(seed=seed, dtype=torch.float32)
    for k, x in columns.items(): b[k] = x
    return b


def ppo(out, b): return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
def started(policy, b=None):
    "Rows as a loop has them at its first step: the policy is its own reference."
    b = batch() if b is None else b
    b["old_logprobs"] = b["ref_logprobs"] = policy.logprobs(b)
    return b


# -- losses that do not add up
@pytest.mark.parametrize("micro", [1, 2, 16])
def test_a_term_that_is_zero_at_the_first_step_is_checked_all_the_same(micro):
    """Each term has the count of the micro-batch under it, and is 0 with its gradient while policy, old policy and
    reference are one."""
    def forgot(out, b): return ppo(out, b)[0] + .05*masked_mean(kl_k3(out.logprobs, b.ref_logprobs, b.mask), b.mask), {}
    def beyond(out, b):
        return ppo(out, b)[0] + masked_mean((out.logprobs - b.old_logprobs).abs().sub(.1).relu(), b.mask), {}
    def weighed(out, b): return ppo(out, b)[0] + masked_mean((b.old_logprobs - b.ref_logprobs)*out.logprobs, b.mask), {}
    for loss in (forgot, beyond, weighed):
        policy = Policy(net(), device="cpu", micro_rows=micro)
        with pytest.raises(
                ValueError,
                match="not a sum over rows.*once the outputs differ from the batch's columns.*pass denom=b "):
            policy.step(started(policy), loss)
        assert policy.version == 0


@pytest.mark.parametrize("micro", [1, 2, 16])
def test_a_count_of_padded_columns_is_refused(micro):
    def constant(out, b):
        return -torch.where(b.mask, out.logprobs*b.advantages, 0.).sum()/(b.n_rows*b.mask.shape[1]), {}
    def averaged(out, b): return -torch.where(b.mask, out.logprobs*b.advantages, 0.).mean(1).sum()/b.n_rows, {}
    for loss in (constant, averaged):
        with pytest.raises(ValueError, match="not a sum over rows.*padded to other widths.*b.mask.shape"):
            Policy(net(), device="cpu", micro_rows=micro).step(batch(), loss)


def test_a_term_that_is_switched_on_later_is_checked_by_then():
    """A closure that reads a coefficient from outside: 0 for ten steps. It is found before it has seen twice as many
    micro-batches."""
    now = dict(coef=0.)
    def loss(out, b): return ppo(out, b)[0] - now["coef"]*masked_mean(out.entropy, b.mask), {}
    policy = Policy(net(), device="cpu", micro_rows=8)
    b = started(policy)
    for _ in range(10): policy.step(b, loss, entropy=True)
    now["coef"] = .01
    with pytest.raises(ValueError, match="not a sum over rows"):
        for _ in range(8): policy.step(b, loss, entropy=True)


def test_a_closure_made_anew_is_the_same_closure():
    """It is called once a micro-batch, but for the checks on the 1st, 2nd, 4th, 8th and 16th, whatever coefficient it
    captured; around another function it is another closure."""
    policy, calls = Policy(net(), device="cpu"), []
    b = started(policy)
    def made(coef):
        def loss(out, b):
            calls.append(coef)
            return ppo(out, b)[0] + coef*masked_sum(out.logprobs, b.mask)/b.n_tokens, {}
        return loss
    def around(loss): return lambda out, b: loss(out, b)
    def other(out, b):
        calls.append(None)
        return ppo(out, b)
    def checked(loss):
        before = len(calls)
        policy.step(b, loss)
        return len(calls) - before > 1
    assert [i+1 for i in range(16) if checked(around(made(.01*i)))] == [1, 2, 4, 8, 16]
    assert checked(around(other)) and checked(other) and not checked(around(made(.02)))


def test_a_loss_without_a_gradient_is_not_checked_for_ever():
    "All advantages are 0 in a hundred steps; afterwards a wrong denominator is found before as many have passed again."
    policy, calls = Policy(net(), device="cpu", optimizer=rl.adamw(max_norm=None)), [0]
    b = started(policy)
    b["advantages"] = torch.zeros_like(b.advantages)
    def loss(out, b):
        calls[0] += 1
        return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=int(b.mask.sum()))
    steps = []
    for _ in range(100):
        before = calls[0]
        policy.step(b, loss)
        steps.append(calls[0]-before > 1)
    assert sum(steps) < 25 and not any(steps[-30:])
    b["advantages"] = torch.randn(b.mask.shape)*b.mask
    with pytest.raises(ValueError, match="not a sum over rows"):
        for _ in range(100): policy.step(b, loss)


# -- losses that do
def made_rows(kind):
    "Rows of many a kind, with what any loss of the library reads."
    g, B, T, V = torch.Generator().manual_seed(3), 8, 9, 7
    lengths = torch.tensor(dict(one_width=[9]*8).get(kind, [3, 9, 2, 5, 7, 4, 9, 6]))
    at = torch.arange(T)
    mask = (at >= 1) & (at < lengths[:, None])
    if kind == "one_token": mask &= at == 1
    if kind == "few_rows": mask &= (torch.arange(B) < 2)[:, None]
    draw = lambda *shape: torch.randn(*shape, generator=g)
    lp = torch.where(mask, -draw(B, T).abs(), 0.)
    label = torch.rand(B, T, generator=g) < .5
    b = Batch(tokens=torch.randint(0, V, (B, T), generator=g), lengths=lengths, mask=mask, group=torch.arange(B)//4,
              unit=torch.arange(B)//2, chosen=torch.arange(B) % 2 == 0, text=["…"]*B, advantages=draw(B, T),
              returns=draw(B, T), old_logprobs=lp.clone(), ref_logprobs=lp.clone(), old_values=draw(B, T),
              desirable=torch.arange(B) % 3 == 0, demonstrated=torch.arange(B) % 4 == 1,
              win_prob=torch.rand(B, generator=g), selected=label,
              row_advantages=draw(B), labels=label.long(), support=torch.randint(-1, V, (B, T, 2), generator=g),
              teacher_logits=draw(B, T, V), targets=draw(B, T, V).softmax(-1), load=torch.rand(B, 2, 3, generator=g),
              ratings=draw(B, 4), answer=[dict(n=i) for i in range(B)], per_row=["load", "ratings"])
    out = Out(logprobs=lp, entropy=torch.where(mask, draw(B, T).abs(), 0.), values=torch.where(mask, draw(B, T), 0.),
              logits=draw(B, T, V), router_logits=draw(B, T, 2, 3), value_logits=draw(B, T, V),
              measured=-draw(B, T).abs())
    if kind == "confined": out.logits[..., 2:4] = -torch.inf
    if kind == "one_row":
        return b._like({k: x[:1] for k, x in b.drop("unit", "chosen").columns.items()},
                       None), Out(**{k: x[:1] for k, x in out.items()})
    if kind == "one_unit": return b[[0, 1]], Out(**{k: x[:2] for k, x in out.items()})
    return b, out


HYPER = dict(max_tokens=16, beta=.1, delta=0., kl=.1, nu=1., theta=2., max_reward=.5)


def closures():
    "Every loss of the library as a closure; of those of pairs and rows on sums of log-probs."
    for name in sorted(n for n in dir(rl) if n.endswith("_loss") and n != "check_loss"):
        f = getattr(rl, name)
        params = inspect.signature(f).parameters
        data = [k for k, p in params.items() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if "divergence" in params: continue         # a divergence of one's own
        wanted = [k for k, p in params.items() if p.kind is p.KEYWORD_ONLY and k != "denom" and p.default is p.empty]
        hyper, columns = {k: HYPER[k] for k in wanted if k in HYPER}, [k for k in wanted if k not in HYPER]
        if "chosen" in data or name == "rebel_loss":
            def loss(out, b, f=f, data=data, hyper=hyper):
                mine, ref = (masked_sum(x, b.mask, dim=-1) for x in (out.logprobs, b.ref_logprobs))
                side = dict(zip(("chosen", "rejected"), pairs(mine, b),
                                strict=True)) | dict(zip(("ref_chosen", "ref_rejected"), pairs(ref, b), strict=True))
                side |= dict(first=side["chosen"], second=side["rejected"], ref_first=side["ref_chosen"],
                             ref_second=side["ref_rejected"])
                side |= dict(ref_margin=side["ref_chosen"] - side["ref_rejected"], tied=pairs(b.desirable, b)[0],
                             gold=pairs(b.win_prob, b)[0], ref_wins=pairs(b.desirable, b)[0],
                             score_gap=pairs(b.win_prob, b)[0])
                # whose ties are no column here
                return f(*(side[k] for k in data), **hyper, denom=float(b.n_units) if f.__name__ == "tie_loss" else b)
        elif data[0] == "logprobs" and "mask" not in data:
            def loss(out, b, f=f, data=data, hyper=hyper):
                here = dict(logprobs=masked_sum(out.logprobs, b.mask, dim=-1),
                            ref_logprobs=masked_sum(b.ref_logprobs, b.mask, dim=-1), advantages=b.row_advantages,
                            desirable=b.desirable, win_prob=b.win_prob, quantiles=b.win_prob)
                return f(*(here[k] for k in data), **hyper, denom=b)
        elif "mask" in data and data[0] in ("logprobs", "values", "entropy", "logits") and name not in ("hps_loss",):
            def loss(out, b, f=f, data=data, hyper=hyper, columns=columns):
                find = lambda word: getattr(out, word) if word in (
                    "logprobs", "values", "entropy", "logits") else b["win_prob" if word == "scores" else word]
                # whose steps are the tokens here
                return f(*map(find, data), **hyper, **{k: b[k] for k in columns},
                         denom=float(b.n_tokens) if f.__name__ == "process_reward_loss" else b)
        elif data[0] == "router_logits":
            def loss(out, b, f=f, data=data):
                find = (lambda word: out.router_logits[:, :, 0] if word == "router_logits" else b.load[:, 0]
                        if word == "load" else b[word])
                return f(*map(find, data), denom=b.n_tokens)
        else: continue
        yield name, loss
    yield "measured", lambda out, b: (-masked_mean((-out.measured).log(), b.mask, denom=b.n_tokens), {})
    yield "odds", lambda out, b: (masked_mean((-out.logprobs.expm1()).clamp(min=1e-6).log(), b.mask, denom=b.n_tokens),
                                  {})
    yield "lists", lambda out, b: (sum(
        x["n"]*row.sum() for x, row in zip(b.answer, torch.where(b.mask, out.logprobs, 0.), strict=True))/b.n_rows, {})
    yield "this width alone", lambda out, b: (-(out.logprobs*torch.linspace(1, 0, 9)*b.mask).sum()/b.n_rows, {})
    yield "no mask", lambda out, b: (-(out.logprobs*b.advantages).sum()/b.n_tokens, {})


@pytest.mark.parametrize("kind", ["rows", "one_width", "one_token", "few_rows", "confined", "one_row", "one_unit"])
def test_no_loss_of_the_library_is_refused(kind):
    b, out = made_rows(kind)
    taught = {}
    for name, loss in closures():
        if kind == "one_row" and "pairs" in inspect.unwrap(loss).__code__.co_names: continue
        # KL to a teacher that is not confined alike is infinite, and says so
        if kind == "confined" and name in ("jsd_loss", "uld_loss", "reverse_kl_loss"): continue
        taught[name] = check_splits(loss, out, b, name)
    assert len(taught) > 40 and sum(taught.values()) > .8*len(taught), [n for n, x in taught.items() if not x]
    # as many scores as there are tokens: no axis of tokens
    scores = RowOut(scores=torch.randn(len(b), b.width, generator=torch.Generator().manual_seed(1)))
    assert check_splits(lambda out, b: (((out.scores - torch.arange(9.))**2).sum()/b.n_rows, {}), scores, b, "Scorer")


def test_what_is_not_checked_is_told():
    "A closure that refuses disturbed numbers is not wrong, and nobody knows whether it is right."
    b, out = made_rows("rows")
    def ragged(out, b):
        if b.width != width: raise ValueError(f"{b.width} columns")
        return -(out.logprobs*b.advantages*b.mask).sum()/b.n_tokens, {}
    width = b.width
    with pytest.warns(UserWarning, match="Policy: the loss is not checked when they are padded .* raises ValueError"):
        assert check_splits(ragged, out, b, "Policy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_splits(lambda out, b: (-(out.logprobs*b.advantages*b.mask).sum()/b.n_tokens, {}), out, b, "Policy")


def test_wrappers_step_with_what_they_give():
    """The same through whole steps: entropy, logits, a measure, values, scores at the end and at steps; rows that
    share a unit; several micro-batches."""
    b = batch(unit=torch.arange(16)//2, chosen=torch.arange(16) % 2 == 0, steps=batch().mask)
    for micro in (2, 16):
        how = dict(device="cpu", micro_rows=micro)
        policy = Policy(net(), value_head=True, **how)
        started(policy, b)["old_values"] = policy.values(b)
        both = lambda out, b: (ppo(out, b)[0] - .01*masked_mean(out.entropy, b.mask, denom=b.n_tokens)
                               + value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens)[0], {})
        policy.step(b, both, entropy=True)
        policy.step(b, lambda out, b: (masked_mean(out.logits.log_softmax(-1)[..., 3], b.mask, denom=b.n_tokens), {}),
                    logits=True)
        policy.step(b, lambda out, b: (masked_mean(out.measured, b.mask, denom=b.n_tokens), {}),
                    measure=lambda z: (2*z.log_softmax(-1)).logsumexp(-1))
        critic = Critic(net(), **how)
        critic.step(started(policy, b),
                    lambda out, b: value_loss(out.values, b.old_values, b.returns, b.mask, denom=b.n_tokens))
        Scorer(net(), **how).step(b, lambda out, b: rl.bradley_terry_loss(*pairs(out.scores, b), denom=b))
        Scorer(net(), outputs=rl.scores_after("steps"),
               **how).step(b, lambda out, b: (torch.where(b.steps, (out.scores-1)**2, 0.).sum()/b.n_tokens, {}))


# -- threads
LORA = dict(r=4, target_modules=["q_proj", "v_proj"])


def shared_weights(kind):
    "Two calls that use the same weights, each of them as a function, and the module that both run through."
    b, other = batch(seed=1), batch(seed=2)
    if kind == "one policy":
        policy = Policy(net(), device="cpu")
        return lambda: policy.logprobs(b), lambda: policy.logprobs(other), policy
    pytest.importorskip("peft")
    policy = Policy(net(), device="cpu", lora=LORA, lr=.1)
    # an adapter that makes a difference
    for _ in range(2): policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))
    if kind == "policy and reference":
        ref = Policy(policy, lora=None)
        return lambda: policy.logprobs(b), lambda: ref.logprobs(other), policy
    critic = Critic(policy, lora=LORA | dict(name="value"), lr=.1)
    critic.step(b, lambda out, b: value_loss(out.values, b.returns, b.returns, b.mask, denom=b.n_tokens))
    return lambda: policy.logprobs(b), lambda: critic.values(other), policy


@pytest.mark.parametrize("kind", ["one policy", "policy and reference", "policy and critic"])
def test_threads_that_share_weights_get_their_own_numbers(kind):
    """The second call starts while the first one runs, and stays in the middle of its own pass until the first has
    ended, if it is let in."""
    first, second, policy = shared_weights(kind)
    want, found, entered, ended = (first(), second()), {}, threading.Event(), threading.Event()
    def work(): found["second"] = second()
    thread = threading.Thread(target=work)
    def meet(module, args, kwargs):
        if threading.current_thread() is thread:
            entered.set()
            ended.wait(20)
        elif not thread.ident:
            thread.start()
            entered.wait(1)
    hook = policy._run.module.trunk.get_decoder().register_forward_pre_hook(meet, with_kwargs=True)
    try: found["first"] = first()
    finally: ended.set()
    thread.join(60)
    hook.remove()
    assert not entered.is_set() or found.keys() == {"first", "second"}
    for name, x in zip(("first", "second"), want, strict=True):
        assert_close(found[name], x, msg=lambda text, name=name: f"{name}: {text}")


def test_a_copied_wrapper_has_a_lock_of_its_own():
    policy = Policy(net(), device="cpu")
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy._run.model.lock))):
        turn = getattr(copied, "_run", None).model.lock if isinstance(copied, Policy) else copied
        assert turn is not policy._run.model.lock
        free = []
        with policy._run.model.lock:
            thread = threading.Thread(target=lambda turn=turn, free=free: free.append(turn.acquire(timeout=20)))
            thread.start(), thread.join()
        assert free == [True]


# -- Ctrl-C
@contextmanager
def pressed_in_the_middle(policy, times=1):
    "Ctrl-C when half of the weights have moved."
    optimizer = policy._run.model.optimizer
    params = optimizer.param_groups[0]["params"]
    def half(*_):
        for p in params[:len(params)//2]: p.data.add_(1.)
        for _ in range(times): signal.raise_signal(signal.SIGINT)
    hook = optimizer.register_step_pre_hook(half)
    try: yield
    finally: hook.remove()


@contextmanager
def handler(f):
    own = signal.signal(signal.SIGINT, f)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is f          # as it was found
    finally: signal.signal(signal.SIGINT, own)


def weights(policy): return {k: x.clone() for k, x in policy.state_dict()["module"].items()}
def sft(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}


def test_ctrl_c_waits_for_the_whole_step():
    policy, calm, b = Policy(net(), device="cpu", lr=1e-2), Policy(net(), device="cpu", lr=1e-2), batch()
    with handler(signal.default_int_handler), pressed_in_the_middle(policy), pytest.raises(KeyboardInterrupt):
        policy.step(b, sft)
    with handler(lambda *_: None), pressed_in_the_middle(calm): calm.step(b, sft)
    want = weights(calm)
    assert policy.version == policy.weights().version == 1
    assert all(torch.equal(x, want[k]) for k, x in weights(policy).items())
    assert all(p.grad is None for p in policy._run.module.parameters())


def test_a_second_ctrl_c_ends_the_step_and_the_wrapper_says_how_to_go_on(tmp_path):
    policy, calm, b = Policy(net(), device="cpu", lr=1e-2), Policy(net(), device="cpu", lr=1e-2), batch()
    state = copy.deepcopy(policy.state_dict())
    with handler(signal.default_int_handler), pressed_in_the_middle(policy, 2), pytest.raises(KeyboardInterrupt):
        policy.step(b, sft)
    assert policy.version == 0
    for use in (lambda: policy.logprobs(b), lambda: policy.step(b, sft), policy.weights, policy.state_dict,
                lambda: policy.save_pretrained(tmp_path/"half")):
        with pytest.raises(RuntimeError, match="ended in its middle.*load_state_dict"): use()
    with pytest.raises(ValueError): policy.load_state_dict(dict(state, module={}))
    with pytest.raises(RuntimeError, match="ended in its middle"): policy.logprobs(b)
    policy.load_state_dict(state)
    for p in (policy, calm): p.step(b, sft)
    want = weights(calm)
    assert policy.version == 1 and all(torch.equal(x, want[k]) for k, x in weights(policy).items())


def test_ctrl_c_in_the_backward_pass_leaves_no_gradient():
    policy, b = Policy(net(), device="cpu", micro_rows=2), batch()
    before, params = weights(policy), list(policy._run.module.parameters())
    seen = []
    def hook(p):
        seen.append(p)
        if len(seen) == 2*len(params): signal.raise_signal(signal.SIGINT)
    for p in params: p.register_post_accumulate_grad_hook(hook)
    with handler(signal.default_int_handler), pytest.raises(KeyboardInterrupt): policy.step(b, sft)
    assert policy.version == 0 and all(p.grad is None for p in params)
    assert all(torch.equal(x, before[k]) for k, x in weights(policy).items())


def test_ctrl_c_is_the_users_own_and_the_main_threads():
    "A handler of one's own is called, once for each time, after the step; a step in another thread leaves it alone."
    policy, b, heard = Policy(net(), device="cpu"), batch(), []
    with handler(lambda *_: heard.append(policy.version)):
        with pressed_in_the_middle(policy): policy.step(b, sft)
        assert heard == [1]
        inside = []
        hook = policy._run.model.optimizer.register_step_pre_hook(
            lambda *_: inside.append(signal.getsignal(signal.SIGINT)))
        mine = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=lambda: policy.step(b, sft))
        thread.start(), thread.join(60)
        hook.remove()
        assert policy.version == 2 and inside == [mine]
    with handler(signal.SIG_IGN), pressed_in_the_middle(policy): policy.step(b, sft)
    assert policy.version == 3


def test_tickets_are_written_while_another_thread_steps():
    "A step that is under way is no step that ended in its middle."
    policy, b, errors, done = Policy(net(), device="cpu"), batch(), [], threading.Event()
    def ask():
        while not done.is_set():
            try: policy.weights()
            except Exception as e: errors.append(e)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(8): policy.step(b, sft)
    finally:
        done.set()
        thread.join(60)
    assert policy.version == 8 and not errors, errors[:1]


def test_an_optimizer_state_that_is_refused_changes_nothing():
    policy = Policy(net(), device="cpu")
    before = copy.deepcopy(policy.state_dict())
    policy.step(batch(), sft)
    moved = copy.deepcopy(policy.state_dict())
    wrong = copy.deepcopy(before)
    wrong["optimizer"]["param_groups"] = 2*wrong["optimizer"]["param_groups"]
    with pytest.raises(ValueError, match="parameter groups"): policy.load_state_dict(wrong)
    # whoever goes on after an error is told
    with pytest.raises(RuntimeError, match="ended in its middle"): policy.logprobs(batch())
    policy.load_state_dict(moved)
    assert_close(policy.state_dict()["module"], moved["module"], rtol=0, atol=0)


# -- numbers that are none
def test_a_loss_that_is_no_number_names_what_is_not():
    policy = Policy(net(), device="cpu", micro_rows=4)
    b = batch()
    b["temperature"], b["top_p"] = torch.ones(16), torch.full((16,), .9)
    support = torch.arange(32).expand(16, 18, 32).clone()
    row = 9
    token = int(b.mask[row].nonzero()[2])
    support[row, token] = torch.where(support[row, token] == b.tokens[row, token], -1, support[row, token])
    b["support"] = support
    where = rf"row {row}, token {token}"
    with pytest.raises(
            FloatingPointError,
            match=f"the loss is (inf|[0-9.e+]+) at version 0; nothing was changed.*out.logprobs is -inf at {where} "
            rf"\(id {int(b.tokens[row, token])}\).*not among the ids that sampling was confined to"):
        policy.step(b, sft)
    b = batch()
    b["old_logprobs"] = policy.logprobs(b).index_put((torch.tensor(row), torch.tensor(token)),
                                                     torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError,
                       match=f"the loss is nan.*the column 'old_logprobs' is nan at {where}, where the mask is True"):
        policy.step(b, ppo)
    with pytest.raises(FloatingPointError, match="finite: look for a logarithm"):
        policy.step(batch(), lambda out, b: (masked_mean((out.logprobs*0).log(), b.mask, denom=b.n_tokens), {}))
    with torch.no_grad(): policy._run.module.trunk.model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="out.logprobs is nan at row .*the model gives that"):
        policy.step(batch(), sft)
    assert policy.version == 0


def test_a_column_that_is_impossible_stops_the_step():
    """A reference that gives a chosen token probability 0: losses count it as a large number, and no weight follows
    that."""
    policy, b = Policy(net(), device="cpu", micro_rows=4), batch()
    b["ref_logprobs"] = policy.logprobs(b)
    row = 9
    token = int(b.mask[row].nonzero()[2])
    b["ref_logprobs"][row, token] = -torch.inf
    loss = lambda out, b: (masked_mean(kl_k3(out.logprobs, b.ref_logprobs, b.mask), b.mask, denom=b.n_tokens), {})
    with pytest.raises(FloatingPointError,
                       match=f"nothing was changed. the column 'ref_logprobs' is -inf at row {row}, token {token}"):
        policy.step(b, loss)
    assert policy.version == 0


@pytest.mark.parametrize("gap", [1., 3.])
def test_a_local_mean_behind_a_threshold_is_found(gap):
    "A term that is 0 until the policy has moved far has no slope near the batch's columns."
    policy, b = Policy(net(), device="cpu"), batch()
    b["old_logprobs"] = policy.logprobs(b)
    def loss(out, b):
        beyond = (torch.where(b.mask, out.logprobs - b.old_logprobs, 0.).abs() - gap).relu()
        return masked_mean(-out.logprobs, b.mask, denom=b.n_tokens) + masked_mean(beyond, b.mask), {}
    with pytest.raises(ValueError, match="not a sum over rows.*once the outputs are far from the batch's columns"):
        policy.step(b, loss)
