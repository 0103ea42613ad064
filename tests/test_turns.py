"""Rows of several turns: what was sampled is what is trained on, whatever a tool said between (LAWS 4, 6, 23, 29)."""
import pytest
import torch
from conftest import vllm_python
from rlblocks import Grader, Policy, Rollout, gae
from rlblocks.samplers.decoding import penalties
from rlblocks.samplers.sampler import Sampling, vllm
from rlblocks.samplers.structure import Structures
from rlblocks.rollout.turns import by_token
from test_samplers import sharp
from tiny import prompts, speller, tokenizer

TOOL = [20, 21, 22]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def rollout(request):
    "One engine for the tests of this file."
    if request.param == "vllm" and vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    engine = vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python()) if request.param == "vllm" else "hf"
    made = Rollout(sharp(), engine=engine, max_tokens=6, stop=[3, 7], device="cpu", tokenizer=tokenizer())
    yield made
    made.close()


def five_turns(rollout, seed=0, **how):
    rows = rollout.generate(prompts(), group_size=4, seed=seed)
    for turn in range(1, 5):
        rows = rollout.extend(rows, [TOOL[:1 + (turn + i) % 3] for i in range(len(rows))], seed=seed, **how)
    return rows


def test_log_probs_of_five_turns_are_the_trainers(rollout):
    "LAWS 29 across turns: every chosen token, with tool text in the middle."
    b, policy = five_turns(rollout), Policy(sharp(), device="cpu", frozen=True)
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-3
    assert b.turn.amax(1).tolist() == [4]*12 and b.mask.equal(b.turn >= 0)
    assert (b.rollout_logprobs[~b.mask] == 0).all() and (b.policy_version[~b.mask] == 0).all()
    exist = torch.arange(b.width) < b.lengths[:, None]
    behind = exist & ~b.mask & (torch.arange(b.width) >= b.prompt_lengths[:, None])
    assert set(b.tokens[behind].tolist()) <= set(TOOL) and behind.sum(1).min() > 4


def test_what_stands_in_a_row_is_never_touched(rollout):
    "LAWS 4. The columns of earlier turns too; the rows that were passed stay as they are."
    rows = by_token(rollout.generate(prompts(), group_size=2, seed=1))
    before = {k: v.clone() for k, v in rows.columns.items() if rows.is_per_token(k)}
    longer = rollout.extend(rows, [TOOL]*len(rows), seed=1)
    for name, x in before.items():
        assert rows[name].equal(x), name
        for i, n in enumerate(rows.lengths.tolist()): assert longer[name][i, :n].equal(x[i, :n]), name
    for i, n in enumerate(rows.lengths.tolist()): assert longer.tokens[i, n:n+3].tolist() == TOOL


def test_rows_are_their_seeds(rollout):
    "LAWS 28: twice the same, in any company; siblings that have said the same go on differently."
    a, b = five_turns(rollout), five_turns(rollout)
    assert a.tokens.equal(b.tokens) and not five_turns(rollout, seed=2).tokens.equal(a.tokens)
    rows = rollout.generate(prompts(), group_size=2, seed=3)
    together, alone = rollout.extend(rows, [TOOL]*6, seed=3), rollout.extend(rows[[4, 1]], [TOOL]*2, seed=3)
    for i, k in enumerate((4, 1)):
        n = int(alone.lengths[i])
        assert n == int(together.lengths[k]) and alone.tokens[i, :n].equal(together.tokens[k, :n])
    twins = rows[[0, 0, 0, 0]]
    twins["sample"] = torch.arange(4)
    assert len({tuple(x) for x in rollout.extend(twins, [TOOL]*4, seed=3).tokens.tolist()}) == 4


def test_rows_end_with_a_reason(rollout):
    rows = rollout.generate(prompts((5, 5)), group_size=1, seed=0)
    assert rollout.extend(rows, [TOOL, None], max_turns=1).finish_reason == ["max_turns", rows.finish_reason[1]]
    spent = int((rows.lengths - rows.prompt_lengths)[0])
    b = rollout.extend(rows, [TOOL, None], budget=spent)
    assert b.finish_reason[0] == "max_tokens" and b.lengths.equal(rows.lengths)
    b = rollout.extend(rows, [TOOL, None], budget=spent + 2, max_tokens=9)
    assert int(b.mask[0].sum()) <= spent + 2
    full = rollout.extend(rows, [[20]*(128 - int(rows.lengths[0]) - 2), None], seed=0)
    assert int(full.lengths[0]) <= 128 and full.finish_reason[0] in ("context_overflow", "completed")
    over = rollout.extend(rows, [[20]*200, None])
    assert over.finish_reason[0] == "context_overflow" and over.lengths.equal(rows.lengths)


def test_a_support_goes_with_every_turn(rollout):
    "The trainer replays the nucleus of the second turn as of the first; where a tool spoke there is none."
    old = rollout.how
    rollout.how = type(old)(.7, top_p=.8)
    try: rows = rollout.generate(prompts(), group_size=2, seed=0)
    finally: rollout.how = old
    b, policy = rollout.extend(rows, [TOOL]*6, seed=0), Policy(sharp(), device="cpu", frozen=True)
    assert (b.turn == 1).any() and (b.temperature == rows.temperature).all()
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-3
    assert (b.support[~b.mask] == -1).all()


def test_penalties_and_structure_are_of_the_turn_that_names_them(rollout):
    "A penalised turn is not trained on, and those before and after it are; a structured one carries its support."
    banned, policy = list(range(8, 20)), Policy(sharp(), device="cpu", frozen=True)
    rows = rollout.generate(prompts(), group_size=2, seed=0)
    b = rollout.extend(rows, [TOOL]*6, seed=0, penalties=penalties(bad_words=[[i] for i in banned]))
    b = rollout.extend(b, [TOOL]*6, seed=0)
    assert b.mask.equal((b.turn == 0) | (b.turn == 2)) and not set(b.tokens[b.turn == 1].tolist()) & set(banned)
    assert set(b.tokens[b.turn == 2].tolist()) & set(banned)
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-3
    old, rollout.structures = (rollout.how, rollout.structures), Structures(speller(), rollout.stop, 32)
    with pytest.raises(ValueError, match="drawn from all ids: they have no 'support'"):
        rollout.extend(rows, [TOOL]*6, structure="(yes|no)")
    try:
        rollout.how = Sampling(1.3, top_k=20)
        b = rollout.extend(rollout.generate(prompts(), group_size=2), [TOOL]*6, structure="(yes|no)")
    finally: rollout.how, rollout.structures = old
    for tokens, turn in zip(b.tokens, b.turn, strict=True):
        assert speller().decode(tokens[turn == 1][:-1]) in ("yes", "no") and tokens[turn == 1][-1] == 3
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-3 and b.mask.equal(b.turn >= 0)


def test_greedy_rows_go_on_greedily(rollout):
    rows = rollout.generate(prompts(), temperature=0.)
    a, b = (rollout.extend(rows, [TOOL]*3, seed=s) for s in (0, 1))
    assert a.tokens.equal(b.tokens) and not a.mask.any() and (a.turn == 1).any()


def test_versions_are_of_each_turn(rollout):
    policy = Policy(sharp(), lr=1e-3, device="cpu")
    try:
        rows = rollout.generate(prompts(), seed=0)
        policy.step(rows, lambda out, b: (-torch.where(b.mask, out.logprobs, 0.).sum()/b.n_tokens, {}))
        rollout.load(policy.weights())
        b = rollout.extend(rows, [TOOL]*3, seed=0)
    finally: rollout.load(Policy(sharp(), device="cpu").weights())
    assert set(b.policy_version[b.turn == 0].tolist()) == {0} and set(b.policy_version[b.turn == 1].tolist()) == {1}
    second = (b.turn == 1) & b.mask
    assert (policy.logprobs(b) - b.rollout_logprobs)[second].abs().max() < 1e-3


def test_graders_see_what_the_policy_said_and_nothing_a_tool_said(rollout):
    "LAWS 6: ids and text of all turns, none of the tool's."
    b = rollout.extend(rollout.generate(prompts(), seed=0), [[29]]*3, seed=0)
    def leak(completions, completion_ids):
        assert not any("w29" in text.split() for text in completions)
        return [float(29 in ids) for ids in completion_ids]
    if not (b.tokens[b.mask] == 29).any(): assert Grader(leak).score(b).tolist() == [0., 0., 0.]
    assert [x.count("\n") for x in b.completion] == [1, 1, 1]


def test_what_is_late_comes_back_as_far_as_it_is():
    "LAWS 23. In this process a part is decoded to its end: of two parts one is late."
    r = Rollout(sharp(), max_tokens=6, max_rows=1, stop=[], device="cpu")
    rows = r.generate(prompts((5, 5)), seed=0)
    b = r.extend(rows, [TOOL, TOOL], timeout=1e-9)
    assert b.finish_reason == ["timeout", "timeout"] and (b.lengths - rows.lengths).tolist() == [3, 3]
    assert not r.shared.under_way and r.extend(rows, [TOOL, TOOL], timeout=60.).finish_reason == ["max_tokens"]*2


def test_an_engine_elsewhere_gives_the_beginning_of_what_is_late(rollout):
    if not rollout.sampler.elsewhere: pytest.skip("this engine finishes what it has begun")
    rows = rollout.generate(prompts((5, 5)), seed=0)
    b = rollout.extend(rows, [[20], [20]], max_tokens=100, timeout=.02)
    policy = Policy(sharp(), device="cpu", frozen=True)
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-3 and not rollout.shared.under_way


def test_credit_crosses_what_a_tool_said(rollout):
    "LAWS 6: k tokens of a tool between two turns change no advantage."
    rewards, values = torch.zeros(1, 4), torch.tensor([[.1, .2, .3, .4]])
    rewards[0, -1] = 1.
    mask = torch.tensor([[False, True, True, True]])
    plain, _ = gae(rewards, values, mask, gamma=.9, lam=.5)
    for k in (1, 7, 50):
        wide = lambda x, k=k: torch.cat([x[:, :2], torch.zeros(1, k, dtype=x.dtype), x[:, 2:]], 1)
        crossed, _ = gae(wide(rewards), wide(values), wide(mask), gamma=.9, lam=.5)
        assert torch.equal(torch.cat([crossed[:, :2], crossed[:, 2+k:]], 1), plain)


def test_under_a_pool_replies_are_a_column(rollout):
    rows = rollout.generate(prompts(), seed=0)
    rows["reply"] = [TOOL, None, TOOL]
    a, b = rollout.extend(rows, "reply", seed=0), rollout.extend(rows, [TOOL, None, TOOL], seed=0)
    assert a.tokens.equal(b.tokens)
    parts = [rollout.extend(part, "reply", seed=0) for part in rows.parts(2)]
    assert sorted(x for p in parts for x in p.lengths.tolist()) == sorted(a.lengths.tolist())
    with pytest.raises(ValueError, match="rows\\['reply'\\] = ids"): rollout.extend(rows, [TOOL])


def test_a_filler_stays_without_weight(rollout):
    filler = rollout.generate(prompts(), seed=0).part([])
    longer = rollout.extend(filler, [TOOL]*len(filler), seed=0)
    assert longer.filler and not longer.mask.any()


def test_errors_say_what_is_wanted(rollout):
    p, rows = prompts(), rollout.generate(prompts(), seed=0)
    with pytest.raises(ValueError, match="no column 'mask'|no column 'sample'"): rollout.extend(p, [TOOL]*3)
    with pytest.raises(ValueError, match="rollout.extend"): rollout.generate(rows)
    with pytest.raises(ValueError, match="the ids for row 2 lie between 40 and 40"):
        rollout.extend(rows, [None, None, [40]])
    with pytest.raises(ValueError, match="max_tokens=0"): rollout.extend(rows, [None]*3, max_tokens=0)
    with pytest.raises(TypeError, match="rows is a list"): rollout.extend([1], [TOOL])
