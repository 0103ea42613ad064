"""Trajectories: goldens, oracles in loops, exact permutation, what cannot be scored stays alone, gradients,
compilation and errors (LAWS 5, 21, 25)."""
import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from rlblocks.signals.advantages import gae
from rlblocks.signals.groups import (bnpo_advantages, gpg_advantages, group_advantages, leave_one_out,
                                     lite_ppo_advantages, maxrl_advantages)
from rlblocks.testing.laws import check_estimator
from rlblocks.testing.oracles import sample_columns
from rlblocks.signals.trajectories import (by_unit, gigpo_advantages, hierarchical_advantages, joint_groups,
                                           role_advantages, trajectory_returns, vine_advantages)

nan, inf = math.nan, math.inf


def episodes(seed=0, dtype=torch.float64):
    "Rewards of rows and their ids: 3 tasks, 9 trajectories of 1 to 6 steps, 4 states; rows in any order."
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (9,), generator=rng)
    trajectory = torch.arange(9).repeat_interleave(lengths)
    step = torch.cat([torch.arange(n)*3 + 5 for n in lengths.tolist()])
    order = torch.randperm(len(step), generator=rng)
    state = torch.randint(4, (len(step),), generator=rng)
    r = torch.randn(len(step), generator=rng, dtype=torch.float64).to(dtype)
    return r, trajectory[order] % 3 * 10, dict(trajectory=trajectory[order]*7 - 20, step=step[order], state=state)


def naive_returns(r, trajectory, step, gamma):
    out = []
    for i in range(len(r)):
        later = sorted((int(step[j]), float(r[j]))
                       for j in range(len(r)) if trajectory[j] == trajectory[i] and step[j] >= step[i])
        out.append(sum(gamma**k*x for k, (_, x) in enumerate(later)))
    return out


def naive_gigpo(r, group, trajectory, step, state, *, gamma, omega, scale):
    def compared(x, xs):
        x, xs = x - math.fsum(xs)/len(xs), [y - math.fsum(xs)/len(xs) for y in xs]
        std = math.sqrt(math.fsum(y*y for y in xs)/max(len(xs) - 1, 1))
        return x/(std + 1e-6) if scale else x
    R = naive_returns(r, trajectory, step, gamma)
    total = {t: float(r[trajectory == t].sum()) for t in trajectory.tolist()}
    task = {t: g for t, g in zip(trajectory.tolist(), group.tolist(), strict=True)}
    return torch.tensor([compared(total[t], [total[u] for u in total if task[u] == g]) + omega*compared(
        R[i], [R[j] for j in range(len(r)) if (group[j], state[j]) == (g, s)]) for i, (t, g, s) in enumerate(
        zip(trajectory.tolist(), group.tolist(), state.tolist(), strict=True))], dtype=torch.float64)


def naive_vine(r, rollouts, mask, step, gamma):
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for b in range(len(mask)):
        of = [int(s) if m and 0 <= s < rollouts.shape[1] else None for s, m in zip(step[b], mask[b], strict=True)]
        steps = max((s for s in of if s is not None), default=-1) + 1
        V, A = [0.]*(steps + 1), [0.]*steps
        for s in reversed(range(steps)):
            earned = sum(float(r[b, t]) for t in range(len(of)) if of[t] == s)
            known = [x for x in rollouts[b, s].tolist() if not math.isnan(x)]
            V[s] = sum(known)/len(known) if known else earned + gamma*V[s+1]
            A[s] = earned + gamma*V[s+1] - V[s]
        for t, s in enumerate(of): out[b, t] = 0. if s is None else A[s]
    return out


# -- goldens

def test_joint_groups_by_hand():
    a, b, c = torch.tensor([5, 5, 9, 9, 5]), torch.tensor([1, -2, 1, 1, 1]), torch.tensor([0, 0, 0, 7, 0])
    assert joint_groups(a).tolist() == [0, 0, 1, 1, 0]
    assert joint_groups(a, b).tolist() == [1, 0, 2, 2, 1]
    assert joint_groups(a, b, c).tolist() == [1, 0, 2, 3, 1]
    assert joint_groups(a[:0], b[:0]).shape == (0,)
    many = torch.arange(2000)
    assert torch.equal(joint_groups(many, many.flip(0)), many)


def test_returns_by_hand():
    r, trajectory, step = torch.tensor([1., 2., 0., 0.,
                                        0.]), torch.tensor([3, 8, 3, 3, 8]), torch.tensor([2, 0, 0, 1, 1])
    assert_close(trajectory_returns(r, trajectory, step=step, gamma=.5), torch.tensor([1., 2., .25, .5, 0.]))
    assert_close(trajectory_returns(r, trajectory, step=step), torch.tensor([1., 2., 1., 1., 0.]))


def test_gigpo_by_hand():
    trajectory, step, state = torch.tensor([0, 0, 1, 1,
                                            1]), torch.tensor([0, 1, 0, 1, 2]), torch.tensor([7, 8, 7, 9, 7])
    r, task = torch.tensor([0., 1., 0., 0., 0.]), torch.zeros(5, dtype=torch.long)
    of = partial(gigpo_advantages, r, task, trajectory=trajectory, step=step, state=state, gamma=.5)
    assert_close(of(), torch.tensor([5/6, 1/2, -2/3, -1/2, -2/3]))
    assert_close(of(omega=0.), torch.tensor([1/2, 1/2, -1/2, -1/2, -1/2]))
    assert_close(of(omega=3.), torch.tensor([3/2, 1/2, -1, -1/2, -1]))
    assert_close(of(scale=True, omega=0., eps=0.), torch.tensor([1., 1, -1, -1, -1])*.5**.5)


def test_vine_by_hand():
    r, on = torch.tensor([[9., 0, 0, 0, 0, 0, 1]]), torch.tensor([[False] + [True]*6])
    step, rollouts = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]), torch.tensor([[[0., 1.], [1., 0.], [1., 1.]]])
    assert_close(vine_advantages(r, rollouts, on, step=step), torch.tensor([[0., 0, 0, .5, .5, 0, 0]]))
    assert_close(vine_advantages(r, rollouts, on, step=step, gamma=.5), torch.tensor([[0., -.25, -.25, 0, 0, 0, 0]]))
    # one answer suffices; the second state takes the third's value
    missing = torch.tensor([[[0., nan], [nan, nan], [1., nan], [8., 8.]]])
    assert_close(vine_advantages(r, missing, on, step=step), torch.tensor([[0., 1, 1, 0, 0, 0, 0]]))
    # a step −1 is of no answer
    assert_close(vine_advantages(r, missing, on, step=step - 1), torch.tensor([[0., 0, 0, 1, 1, 0, 0]]))
    assert not vine_advantages(r, missing[:, :, :0], on, step=step).any()


def test_hierarchical_by_hand():
    s, task, role = torch.tensor([1., 1, 0, 0, 0, 0, 5]), torch.tensor([0]*6 + [3]), torch.tensor([0, 1, 1, 0, 1, 1, 0])
    episode, of = torch.tensor([0, 0, 0, 1, 1, 1, 0]), partial(hierarchical_advantages, role=role)
    assert_close(of(s, task, episode=episode, nested=role == 1), torch.tensor([.5, .5, -.5, -.5, 0, 0, 0]))
    assert_close(of(s, task, episode=episode, nested=role < 0), torch.tensor([.5, .75, -.25, -.5, -.25, -.25, 0]))
    assert not of(s, task, episode=episode, nested=role == 0)[[0, 3]].any()
    partly = torch.arange(7) < 3  # of one role: two rows inside their episode, two beside it
    assert_close(of(s, task, episode=episode, nested=partly), torch.tensor([0., .5, -.5, 0, 0, 0, 0]))


def test_roles_by_hand():
    adv, b = role_advantages(torch.tensor([1., -1., 1., nan]), torch.tensor([0, 1, 0, 1]), torch.tensor([0., 0., 3.]),
                             decay=.5)
    assert_close(adv, torch.tensor([1., -1., .5, 0.])), assert_close(b, torch.tensor([.75, -.5, 3.]))


# -- oracles

@pytest.mark.parametrize("gamma", [1., .95, 0.])
@pytest.mark.parametrize("seed", range(5))
def test_returns_and_gigpo_equal_loops(seed, gamma):
    r, group, ids = episodes(seed)
    trajectory, step = ids["trajectory"], ids["step"]
    assert_close(trajectory_returns(r, trajectory, step=step, gamma=gamma),
                 torch.tensor(naive_returns(r, trajectory, step, gamma), dtype=torch.float64), atol=1e-12, rtol=1e-12)
    for omega, scale in ((1., False), (.3, True)):
        assert_close(gigpo_advantages(r, group, **ids, gamma=gamma, omega=omega, scale=scale),
                     naive_gigpo(r, group, *ids.values(), gamma=gamma, omega=omega, scale=scale), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("missing", [0., .4, 1.])
@pytest.mark.parametrize("gamma", [1., .9])
def test_vine_equals_a_loop(gamma, missing):
    c, rng = sample_columns(), torch.Generator().manual_seed(1)
    rollouts = torch.randn(16, 5, 3, generator=rng, dtype=torch.float64)
    rollouts[torch.rand(16, 5, 3, generator=rng) < missing] = nan
    step = torch.randint(-1, 7, (16, 16), generator=rng).sort(1).values
    assert_close(vine_advantages(c["rewards"], rollouts, c["mask"], step=step, gamma=gamma),
                 naive_vine(c["rewards"], rollouts, c["mask"], step, gamma), atol=1e-12, rtol=1e-12)


def test_roles_equal_a_loop():
    rng = torch.Generator().manual_seed(0)
    s, role, b = (torch.randn(300, generator=rng, dtype=torch.float64), torch.randint(4, (300,), generator=rng),
                  torch.randn(5, generator=rng, dtype=torch.float64))
    s[torch.rand(300, generator=rng) < .1] = nan
    now, want = b.tolist(), []
    for x, i in zip(s.tolist(), role.tolist(), strict=True):
        want.append(0. if math.isnan(x) else x - now[i])
        if not math.isnan(x): now[i] = .9*now[i] + .1*x
    adv, new = role_advantages(s, role, b, decay=.9)
    assert_close(adv, torch.tensor(want, dtype=torch.float64), atol=1e-12,
                 rtol=1e-12), assert_close(new, torch.tensor(now, dtype=torch.float64), atol=1e-12, rtol=1e-12)
    head, b1 = role_advantages(s[:77], role[:77], b, decay=.9)
    tail, b2 = role_advantages(s[77:], role[77:], b1, decay=.9)
    assert_close((torch.cat([head, tail]), b2), (adv, new), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_roles_step_once_a_game(seed):
    rng = torch.Generator().manual_seed(seed)
    # of games, for each role
    s, b = torch.randn(20, 4, generator=rng, dtype=torch.float64), torch.randn(4, generator=rng, dtype=torch.float64)
    game, role = torch.randint(20, (200,), generator=rng).sort().values, torch.randint(4, (200,), generator=rng)
    scores = torch.where(torch.rand(200, generator=rng) < .2, nan, s[game, role])
    now, seen, want = b.tolist(), {}, []
    for x, i, r in zip(scores.tolist(), game.tolist(), role.tolist(), strict=True):
        if not math.isnan(x) and (i, r) not in seen: seen[i, r], now[r] = now[r], .9*now[r] + .1*x
        want.append(0. if math.isnan(x) else x - seen[i, r])
    close = partial(assert_close, atol=1e-12, rtol=1e-12)
    close(role_advantages(scores, role, b, trajectory=7 - 3*game, decay=.9),
          (torch.tensor(want, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)))
    close(role_advantages(scores, role, b, trajectory=torch.arange(200)), role_advantages(scores, role, b))
    none = torch.zeros(0)
    assert role_advantages(none, none.long(), b.float(), trajectory=none.long())[0].shape == (0,)


# -- relatives

def test_relatives():
    c = sample_columns()
    s, g, rows = c["scores"], c["group"], torch.arange(16)
    for scale in (True, False):
        assert_close(gigpo_advantages(s, g, trajectory=rows, step=rows, state=rows, scale=scale),
                     group_advantages(s, g, scale=scale))
        assert_close(gigpo_advantages(s, g, trajectory=rows, step=rows, state=0*rows, scale=scale, omega=1.),
                     2*group_advantages(s, g, scale=scale))
        assert_close(hierarchical_advantages(s, g, role=0*rows, episode=rows, nested=rows < 0, scale=scale),
                     group_advantages(s, g, scale=scale))
        assert_close(hierarchical_advantages(s, 0*g, role=0*rows, episode=g, nested=rows >= 0, scale=scale),
                     group_advantages(s, g, scale=scale))
    assert_close(role_advantages(s, 0*rows, s.new_zeros(1), decay=1.)[0], s)
    assert_close(lite_ppo_advantages(s, 0*g), group_advantages(s, 0*g))
    r, v, on = c["rewards"], c["values"], c["mask"]
    nth = (on.cumsum(1) - 1).clamp(min=0)
    of_nth = torch.zeros_like(v).scatter_add(1, nth, torch.where(on, v, 0.))
    assert_close(vine_advantages(r, of_nth[..., None], on, step=nth, gamma=.9), gae(r, v, on, gamma=.9, lam=0.)[0])


# -- laws

CALLS = {  # of rewards or scores of rows; ids travel with the rows
    "returns": lambda x, g, ids: trajectory_returns(x, ids["trajectory"], step=ids["step"], gamma=.9),
    "gigpo": lambda x, g, ids: gigpo_advantages(x, g, **ids),
    "gigpo scaled": lambda x, g, ids: gigpo_advantages(x, g, **ids, scale=True, gamma=.5),
    "hierarchical": lambda x, g, ids: hierarchical_advantages(x, g, role=ids["state"] % 2, episode=ids["trajectory"],
                                                              nested=ids["state"] % 2 == 0),
}
calls = pytest.mark.parametrize("f", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.parametrize("seed", range(5))
def test_permutation_is_exact(f, seed):
    r, g, ids = episodes(seed, torch.float32)
    p = torch.randperm(len(r), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(f(r[p], g[p], {k: x[p] for k, x in ids.items()}), f(r, g, ids)[p])


@calls
@pytest.mark.parametrize("x", [nan, inf, -inf])
def test_what_cannot_be_scored_stays_in_its_task(f, x):
    r, g, ids = episodes()
    at = 4
    broken, other = f(torch.where(torch.arange(len(r)) == at, x, r), g, ids), g != g[at]
    if f is CALLS["returns"]: other = ids["trajectory"] != ids["trajectory"][at]
    assert torch.equal(broken[other], f(r, g, ids)[other])
    assert (f is CALLS["returns"] or (broken[at] == 0 if math.isnan(x) else not broken[at].isfinite()))


@calls
def test_equals_are_exactly_zero(f):
    _, g, ids = episodes()
    # every episode earns the same, at once: nobody is better, and later there is nothing to earn
    first = ids["step"] == 5
    out = f(torch.where(first, .95, 0.), g, ids | dict(state=ids["step"]))
    if f is CALLS["hierarchical"]: out = f(torch.full((len(g),), .95), g, ids)
    assert f is CALLS["returns"] or not out.any()


@calls
def test_gradients_are_right_and_only_of_the_first(f):
    r, g, ids = episodes()
    assert torch.autograd.gradcheck(lambda r: f(r, g, ids), r.requires_grad_())


def test_gradients_of_vine_and_roles():
    c, rng = sample_columns(), torch.Generator().manual_seed(0)
    rollouts = torch.randn(16, 3, 2, generator=rng, dtype=torch.float64)
    rollouts[:, 1, 0], rollouts[::3, 2] = nan, nan
    r, rollouts = c["rewards"].requires_grad_(), rollouts.requires_grad_()
    out = vine_advantages(r, rollouts, c["mask"], step=(torch.arange(16)//5).expand(16, 16))
    out.sin().sum().backward()
    assert rollouts.grad is None and r.grad.isfinite().all()
    assert torch.autograd.gradcheck(lambda r: vine_advantages(r, rollouts.detach(), c["mask"],
                                                              step=(torch.arange(16)//5).expand(16, 16)), r)
    s, b = c["scores"].requires_grad_(), torch.zeros(3, requires_grad=True)
    adv, new = role_advantages(s, torch.arange(16) % 3, b)
    assert not new.requires_grad and torch.equal(torch.autograd.grad(adv.sum(), s)[0], torch.ones_like(s))
    assert b.grad is None


@calls
def test_static_shapes_and_no_look_at_the_data(f):
    r, g, ids = episodes(dtype=torch.float32)
    want, meta = f(r, g, ids), f(r.to("meta"), g.to("meta"), {k: x.to("meta") for k, x in ids.items()})
    assert meta.shape == want.shape and meta.dtype == want.dtype == torch.float32
    assert torch.equal(torch.compile(f, fullgraph=True, backend="eager")(r, g, ids), want)
    assert f(r[:0], g[:0], {k: x[:0] for k, x in ids.items()}).shape == (0,)
    assert torch.equal(f(r.bfloat16(), g, ids), f(r.bfloat16().float(), g, ids))


def test_vine_obeys_every_law():
    c = sample_columns()
    rollouts = torch.randn(16, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    laws = check_estimator(vine_advantages,
                           dict(rollouts=rollouts, step=(torch.arange(16)//4).expand(16, 16).contiguous()),
                           per_row=("rollouts",), gamma=.9)
    assert {"purity", "gradient", "mask", "empty", "permutation", "padding", "empty_rows", "precision"} <= set(laws)
    assert vine_advantages(c["rewards"][:, :0], rollouts, c["mask"][:, :0], step=c["tokens"][:, :0]).shape == (16, 0)


# -- units of several rows

@pytest.mark.parametrize("estimate", [group_advantages, partial(group_advantages, scale=False), leave_one_out,
                                      lite_ppo_advantages, maxrl_advantages, bnpo_advantages, gpg_advantages])
def test_a_trajectory_of_several_rows_counts_once(estimate):
    "Forks change no advantage, neither the trajectory's own nor another's; rows may come in any order."
    rng = torch.Generator().manual_seed(0)
    scores, group = torch.rand(24, generator=rng, dtype=torch.float64), torch.arange(24) % 3
    scores[::7] = nan
    want = estimate(scores, group)
    row = torch.arange(24).repeat_interleave(torch.randint(1, 5, (24,), generator=rng))
    row = row[torch.randperm(len(row), generator=rng)]
    one, its_group, of = by_unit(scores[row], group[row], (row*977) % 1009)
    assert_close(estimate(one, its_group)[of], want[row], atol=1e-12, rtol=0)
    assert not torch.allclose(estimate(scores[row], group[row]), want[row], atol=1e-2)   # as rows they count often


@pytest.mark.parametrize("score", [.1, 1e8 + .1])
def test_equal_trajectories_are_exactly_zero_however_often_they_fork(score):
    scores, unit = torch.full((60,), score, dtype=torch.float64), torch.arange(60)//7
    one, group, of = by_unit(scores, torch.zeros_like(unit), unit)
    assert one.eq(score).all() and not group_advantages(one, group, eps=0.)[of].any()


def test_rows_of_a_trajectory_share_their_mean_and_its_gradient():
    scores = torch.tensor([nan, 3., 1., nan, 0., nan], dtype=torch.float64, requires_grad=True)
    one, group, of = by_unit(scores, torch.tensor([5, 5, 5, 6, 6, 6]), torch.tensor([9, 9, 9, 4, 7, 7]))
    assert_close(one, torch.tensor([nan, 0., 2.], dtype=torch.float64), equal_nan=True)
    assert group.tolist() == [6, 6, 5] and of.tolist() == [2, 2, 2, 0, 1, 1]
    one[2].backward()
    assert scores.grad.tolist() == [0, .5, .5, 0, 0, 0]


def test_the_verdict_of_a_trajectory_is_that_of_its_last_turn():
    "Rows of a grader: the answer stands in the row with the last turn, wherever that row is in the batch."
    scores, unit = torch.tensor([0., 1., nan, .5, 0., 2.], dtype=torch.float64), torch.tensor([3, 3, 3, 1, 1, 8])
    turn, group = torch.tensor([1, 4, 2, 0, 5, -1]), torch.tensor([6, 6, 6, 6, 6, 7])
    one, its_group, of = by_unit(scores, group, unit, turn=turn)
    assert one.tolist() == [0., 1., 2.] and its_group.tolist() == [6, 6, 7] and of.tolist() == [1, 1, 1, 0, 0, 2]
    rows = torch.tensor([5, 1, 4, 0, 3, 2])
    assert by_unit(scores[rows], group[rows], unit[rows], turn=turn[rows])[0].equal(one)
    late = torch.tensor([1, 2, 4, 0, 5, 0])
    assert by_unit(scores, group, unit, turn=late)[0].isnan().tolist() == [False, True, False]


# -- errors

def errors():
    r, m, s, i = torch.zeros(4, 7), torch.ones(4, 7).bool(), torch.zeros(4), torch.arange(4)
    yield (lambda: joint_groups(i, i[1:]), ValueError,
           "joint_groups: one column is [3], the first is [4]; one id per row is wanted in each")
    yield (lambda: by_unit(s, i, i[1:]), ValueError,
           "by_unit: unit is [3], scores is [4]; they must be equal, nothing is broadcast")
    yield lambda: by_unit(s, i, 0*i), ValueError, ("by_unit: rows of unit 0 are of two groups; a "
                                                  "trajectory answers one prompt")
    yield lambda: by_unit(s, i, s), TypeError, "by_unit: unit is float32; ids are integers"
    yield (lambda: trajectory_returns(s, i[1:], step=i), ValueError,
           "trajectory_returns: trajectory is [3], rewards is [4]; they must be equal, nothing is broadcast")
    yield lambda: trajectory_returns(s, s,
                                     step=i), TypeError, "trajectory_returns: trajectory is float32; ids are integers"
    yield (lambda: trajectory_returns(s, i, step=s), TypeError,
           "trajectory_returns: step is float32; integers are wanted (step.long())")
    yield lambda: trajectory_returns(s, i, step=i,
                                     gamma=nan), ValueError, "trajectory_returns: gamma is nan; it lies within [0, 1]"
    yield (
        lambda: vine_advantages(r, r, m, step=m.long()), ValueError,
        "vine_advantages: rollouts is [4, 7], mask is [4, 7]; [B, S, K] is wanted, K returns for each step of each row")
    yield lambda: vine_advantages(r, r[..., None], m, step=m.long(),
                                  gamma=2.), ValueError, "vine_advantages: gamma is 2.0; it lies within [0, 1]"
    yield (lambda: role_advantages(s, i[1:], s), ValueError,
           "role_advantages: role is [3], scores is [4]; they must be equal, nothing is broadcast")
    yield lambda: role_advantages(s, i, s,
                                  trajectory=s), TypeError, "role_advantages: trajectory is float32; ids are integers"
    yield lambda: role_advantages(s, s, s), TypeError, "role_advantages: role is float32; ids are integers"
    yield lambda: role_advantages(s, i, s,
                                  decay=2.), ValueError, "role_advantages: decay is 2.0; a share lies within [0, 1]"


@pytest.mark.parametrize("call,kind,text", list(errors()))
def test_errors_say_who_what_and_how(call, kind, text):
    with pytest.raises(kind) as e: call()
    assert str(e.value) == text
