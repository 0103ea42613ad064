"""Every block of floors 0 and 1, found by itself: the laws of `check_loss` and `check_estimator`, one graph under
torch.compile, no wait for the device, derivatives against finite differences. A new block is under test the moment it
is exported; what it cannot be given by name is said in GIVEN, other hyper-parameters in VARIANTS."""
import importlib
import inspect
import itertools
from functools import partial

import pytest
import torch
from test_floors import FLOORS
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.testing import assert_close

from rlblocks.signals.advantages import at_tokens
from rlblocks.losses.margins import alpha_reward, chi_reward, js_reward
from rlblocks.arithmetic.masked import Metric
from rlblocks.testing.laws import check_estimator, check_loss
from rlblocks.testing.oracles import sample_columns

# what is trained with; statistics are read by people, and tests/test_statistics.py has their laws
BLOCK = [m for m in FLOORS if FLOORS[m] <= 1 and not m.startswith("statistics.")
         and m not in ("testing.contracts", "testing.laws", "testing.oracles")]


def noise(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flags(*shape, seed=0): return noise(*shape, seed=seed) > 0
def ids(high, *shape, seed=0): return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


COLS = sample_columns()
MASK, ROWS, LOGITS = COLS["mask"], noise(16), noise(16, 16, 7)
HEADS = noise(16, 3)
TWO = dict(first=COLS["chosen"], second=COLS["rejected"], ref_first=COLS["ref_chosen"], ref_second=COLS["ref_rejected"])
PAIRS = dict(chosen=COLS["chosen"], rejected=COLS["rejected"])
ANSWERS = dict(logprobs=ROWS, ref_logprobs=noise(16, seed=1))        # log-probs of whole answers
TEACHER = dict(logits=LOGITS, teacher_logits=noise(16, 16, 7, seed=1))
TOP = dict(logits=LOGITS, ids=torch.rand(16, 16, 7, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :3])
BINS = torch.linspace(-3, 3, 5, dtype=torch.float64)
# advantages of whole rows, for ratios of whole rows
LEVEL = at_tokens(COLS["scores"], MASK)
# what a block cannot find in the vocabulary under its parameter's name: columns of 16 rows, and numbers without a
# default
GIVEN = dict(
    aggregate=dict(x=COLS["advantages"]), alpha_reward=dict(log_ratio=ROWS), aot_loss=dict(ref_margin=ROWS),
    aot_units=ANSWERS, distill_advantages=dict(teacher_logprobs=COLS["ref_logprobs"]),
    minillm_advantages=dict(teacher_logprobs=COLS["ref_logprobs"]),
    teacher_mix_weights=dict(teacher_logprobs=COLS["ref_logprobs"]), realigned=dict(x=COLS["advantages"], x_mask=MASK),
    a2po_loss=ANSWERS | dict(advantages=noise(16, seed=2)), at_last_token=dict(scores=COLS["scores"]),
    at_tokens=dict(x=COLS["scores"]),
    bnpo_advantages=dict(scores=ROWS.sigmoid()), bco_delta=ANSWERS | dict(delta=None),
    bco_loss=ANSWERS | dict(delta=.3),
    classification_value_loss=dict(logits=noise(16, 16, 5), targets=noise(16, 16, 5, seed=1).softmax(-1)),
    clip_metrics=dict(x=noise(16, 16).exp(), low=.8, high=1.2), ratio_metrics=dict(ratio=noise(16, 16).exp()),
    clip_cov_loss=dict(selected=flags(16, 16)), clip_cov_mask=dict(uniform=noise(16, 16).sigmoid()),
    clip_rewards=dict(x=COLS["rewards"], limit=.7), clip=dict(x=ROWS, low=-.5, high=.5), half_square=dict(error=ROWS),
    masked_data=dict(x=COLS["advantages"]), promoted=dict(x=ROWS),
    score_metrics={}, sequence_metrics=dict(low=.8, high=1.2), softened_logprobs=dict(logits=LOGITS),
    verdict_metrics=dict(reward=ROWS, point=.1), zero_unweighted=dict(x=ROWS, weights=ROWS.relu()),
    log_odds=dict(logprobs=-ROWS.abs() - .01),
    clipped_surrogate=dict(ratio=noise(16, 16).exp()), cosine_length_reward=dict(correct=flags(16), max_length=12),
    dr_grpo_loss=dict(max_tokens=16), dro_loss=dict(beta=.3), entropy=dict(logits=LOGITS),
    expected_value=dict(logits=noise(16, 16, 5), bins=BINS),
    expert_load=dict(router_logits=noise(16, 16, 4), top_k=2), f_dpo_loss=dict(divergence=partial(alpha_reward,
    alpha=1.)),
    forward_kl_loss=TEACHER,
    fresh_mask=dict(policy_version=ids(5, 16), now=5), full_kl=dict(logits=LOGITS, ref_logits=noise(16, 16, 7, seed=1)),
    gather_logprobs=dict(logits=LOGITS, targets=COLS["tokens"] % 7),
    gdpo_advantages=dict(scores=HEADS), generative_scores=dict(logits=LOGITS, yes=1, no=(2, 3)),
    geometric_mixture=dict(logits=LOGITS, ref_logits=noise(16, 16, 7, seed=1)),
    gigpo_advantages=dict(rewards=ROWS, trajectory=torch.arange(16)//2, step=ids(9, 16), state=ids(3, 16)),
    trajectory_returns=dict(rewards=ROWS, trajectory=torch.arange(16)//3, step=torch.arange(16)),
    hierarchical_advantages=dict(role=ids(2, 16), episode=ids(4, 16, seed=1), nested=flags(16)),
    joint_groups=dict(ids=ids(3, 16)), role_advantages=dict(role=ids(3, 16), baselines=noise(3)),
    vine_advantages=dict(rollouts=noise(16, 4, 3), step=ids(5, 16, 16)),
    gmpo_loss=dict(advantages=LEVEL), group_pass_at_k_advantages=dict(k=2), gspo_loss=dict(advantages=LEVEL),
    gspo_token_loss=dict(advantages=LEVEL), hl_gauss=dict(bins=BINS),
    hps_loss=dict(scores=HEADS, preference=noise(16, 3, seed=1).softmax(-1), mask=flags(16, 3)),
    js_reward=dict(log_ratio=ROWS), jsd=TEACHER, jsd_loss=TEACHER, kl_cov_loss=dict(selected=flags(16, 16)),
    implicit_reward_loss=dict(scores=flags(16).double()), kl_shaped=dict(kl_coef=.1), kto_kl=ANSWERS,
    kto_loss=ANSWERS | dict(kl=.3), ld_logprobs=dict(shared=COLS["lengths"]//2),
    linear_logprobs=dict(hidden=noise(16, 3), weight=noise(16, 3, seed=1), tokens=torch.arange(16)),
    linear_measured=dict(hidden=noise(16, 3), weight=noise(16, 3, seed=1), measure=lambda z: z.logsumexp(-1)),
    luffy_loss=dict(demonstrated=flags(16) & (torch.arange(16) != MASK.sum(1).argmax())),
    luspo_loss=dict(advantages=LEVEL),
    masked_mean=dict(x=COLS["advantages"]), masked_std=dict(x=COLS["advantages"]),
    masked_sum=dict(x=COLS["advantages"]), mean_of=dict(x=COLS["advantages"]),
    moe_balance_loss=dict(router_logits=noise(16, 16, 4), load=noise(4).softmax(0).expand(16, 4).contiguous()),
    multi_head_loss=dict(first=HEADS, second=noise(16, 3, seed=1), prefer=noise(16, 3, seed=2).sigmoid(),
                         mask=flags(16, 3)), n_step_returns=dict(n=3),
    nash_md_loss=ANSWERS | dict(win_prob=noise(16, seed=2).sigmoid()), off_policy_sequence_mask=dict(threshold=.1),
    optimal_token_baseline=dict(sum_pi_squared=noise(16, 16).sigmoid()),
    overlong_penalty=dict(max_length=12, buffer=4), pass_at_k_advantages=dict(scores=flags(16).double(), k=2),
    policy_gradient=dict(weights=COLS["advantages"]),
    plackett_luce_loss=dict(scores=HEADS, ranks=noise(16, 3, seed=1).argsort(-1), mask=flags(16, 3)),
    process_reward_loss=dict(logits=noise(16, 16, 2), labels=ids(2, 16, 16)),
    rao_kupper_loss=dict(tied=flags(16), theta=1.5), davidson_loss=dict(tied=flags(16), nu=.5),
    tie_loss=dict(tied=flags(16)), rating_loss=dict(scores=HEADS, ratings=noise(16, 3, seed=1), mask=flags(16, 3)),
    proximal_logprobs=dict(policy_version=ids(5, 16), now=5), ratio_corrected=dict(kl=noise(16, 16)),
    remax_advantages=dict(greedy_scores=ROWS), resampled_rows=dict(weights=ROWS.exp(), uniform=noise(9).sigmoid()),
    reverse_kl_loss=TEACHER, router_z_loss=dict(router_logits=noise(16, 16, 4)),
    row_max=dict(x=COLS["advantages"]), row_mean=dict(x=COLS["advantages"]), row_sum=dict(x=COLS["advantages"]),
    within=dict(x=COLS["advantages"], low=-.5, high=.5),
    safety_loss=dict(riskier=ROWS, safer=noise(16, seed=1), riskier_unsafe=flags(16), safer_unsafe=flags(16, seed=1)),
    soft_values=dict(beta=.5),
    staleness_weights=dict(policy_version=ids(5, 16), now=5),
    standardized=dict(x=COLS["scores"], moments=torch.tensor([16., .3, 9.], dtype=torch.float64)),
    step_rewards=dict(scores=HEADS, step=ids(3, 16, 1).expand(16, 16).contiguous()),
    straight_through=dict(value=noise(16, 16), gradient=noise(16, 16, seed=1)),
    support_logprobs=TOP, swap_completions=dict(other=torch.arange(16).roll(1)),
    token_logprobs=dict(logits=LOGITS, tokens=COLS["tokens"] % 7),
    answer_log_ratios=ANSWERS, pair_metrics=dict(chosen_log_ratio=ROWS, rejected_log_ratio=noise(16, seed=1)),
    over_pairs=dict(loss=ROWS), over_rows=dict(loss=ROWS),
    chi_reward=dict(log_ratio=ROWS), chipo_loss=dict(max_reward=.3), rebel_loss=dict(score_gap=ROWS, **TWO),
    qrpo_loss=ANSWERS | dict(quantiles=noise(16, seed=2).sigmoid()),
    quantile_rewards=dict(scores=COLS["scores"], ref_scores=noise(16, 5)),
    tpo_loss=dict(gold=ROWS), truncation_penalty=dict(truncated=flags(16)), truncation_score=dict(truncated=flags(16)),
    two_hot=dict(bins=BINS), udm_weights=dict(prob_desirable=ROWS.sigmoid()),
    uld_loss=dict(logits=LOGITS, teacher_logits=noise(16, 16, 9)),
    update_moments=dict(moments=torch.tensor([16., .3, 9.], dtype=torch.float64), x=COLS["scores"]),
    vtrace=dict(log_ratios=COLS["logprobs"] - COLS["rollout_logprobs"]), weighted_scores=dict(scores=HEADS),
    whiten=dict(x=COLS["advantages"]),
    without_truncated=dict(truncated=flags(16)), wpo_weights=dict(sum_pi_squared=noise(16, 16).sigmoid()),
    xpo_loss=dict(ref_wins=flags(16)),
)
PLAIN = {  # no block on tensors: why no law is asked of it
    "components_loss": "reads a batch: its closure is under the laws in test_components",
    "means_of": "makes metrics of what it is given by name", "same_shape": "a guard", "check_clip": "a guard",
    "mean_logprobs_only": "a guard", "routed_tokens": "a guard",
    "divisor": "reads a count", "merge": "joins dictionaries",
    "assert_on_policy": "a guard that waits for the device", "explained_variance": "reads a number from metrics",
    "effective_share": "reads a number from metrics", "probability_correlation": "reads a number from metrics",
    "adaptive_clip": "numbers on the host", "adaptive_kl_coef": "numbers on the host",
    "by_unit": "one entry a trajectory, in the order of ids",
    "adaptive_entropy_coef": "numbers on the host",
    "chord_mu": "numbers on the host",
}
LAWLESS = {  # a block, but not one of rows: which law is meaningless
    "clip": "a piece of formulas, whose callers promote", "half_square": "a piece of formulas, whose callers promote",
    "log_odds": "a piece of formulas, whose callers promote",
    "softened_logprobs": "a distribution at every place, whose callers mask",
    "over_pairs": "a reduction, no loss", "over_rows": "a reduction, no loss", "pair_metrics": "makes metrics",
    "pair_log_ratios": "two differentiable arguments",
    "preference_margin": "two differentiable arguments",
    "aggregate": "a reduction, no loss", "masked_mean": "a reduction", "masked_std": "a reduction",
    "masked_sum": "a reduction", "mean_of": "makes a metric", "score_metrics": "makes metrics",
    "sequence_metrics": "makes metrics", "verdict_metrics": "makes metrics",
    "ratio_metrics": "makes metrics", "clip_metrics": "makes metrics", "mismatch_metrics": "makes metrics",
    "value_metrics": "makes metrics",
    "mismatched": "partners of rows, by their order", "swap_completions": "rows are exchanged",
    "resampled_rows": "rows are drawn, not kept",
    "straight_through": "two differentiable arguments", "ratio_corrected": "two differentiable arguments",
    "pass_at_k_advantages": "verdicts are 0 or 1: no derivative is asked",
    "role_advantages": "rows are games, one after the other",
    "length_adaptive_lam": "reads the mask alone",
    "linear_logprobs": "two differentiable arguments, one with no rows",
    "linear_measured": "two differentiable arguments, one with no rows", "standardized": "float64 moments",
    "update_moments": "float64 moments",
}
SURROGATE = dict(  # whose value is not what is descended: a stopped gradient is the point
    dft_loss="weighed by sg(π)", chord_phi_loss="weighed by sg(π(1 − π))", gppo_loss="sg(ratio) beyond the bound",
    cispo_loss="sg(ratio)·lp",
    dppo_tv_loss="sg(ratio)·lp", dppo_kl_loss="sg(ratio)·lp", vespo_loss="sg(weight)·lp", topr_loss="sg(weight)·lp",
    nash_md_loss="sg(log-ratio)·lp", **{"gspo_token_loss advantages clip_low=0.1": "sg(ratio of the row)·lp/sg(lp)"},
)


# a loss of pairs or rows: one weight each, and two of 0
WEIGHTS = sample_columns(seed=3)["scores"].index_fill(0, torch.tensor([3, 8]), 0.)
BELOW = {k: -COLS[k].abs() - .01 for k in ("chosen", "rejected")}       # log-probs of answers
SMOOTH = dict(beta=.3, label_smoothing=.2)
# other hyper-parameters than the defaults and GIVEN, a dict for each case. Cases with the other `over`, and with
# weights where a loss takes them, come by themselves
VARIANTS = dict(
    ppo_loss=[dict(clip_low=.1, clip_high=.28, dual_clip=1.5)], clipped_surrogate=[dict(dual_clip=1.5)],
    grpo_loss=[dict(over="tokens", kl_coef=.5)], value_loss=[dict(clip=None), dict(huber=.5),
                                                             dict(clip=None, huber=.5)],
    cispo_loss=[dict(clip_low=.2, clip_high=.28, over="rows")], gppo_loss=[dict(beta_low=.5, beta_high=.75,
    clip_low=.1)],
    luffy_loss=[dict(gamma=.5, over="rows", clip_low=.1)], dppo_tv_loss=[dict(shift_high=.05)],
    dppo_kl_loss=[dict(nats_low=.02, nats_high=.01, cap=1.1, over="rows")], dro_loss=[dict(beta=.5)],
    sapo_loss=[dict(over="tokens", tau_pos=.5, tau_neg=3.)], cpgd_loss=[dict(over="rows", clip_low=.1, clip_high=.3)],
    gspo_loss=[dict(clip_low=.1, clip_high=.1)],
    gspo_token_loss=[dict(clip_low=.1), dict(advantages=COLS["advantages"], clip_low=.1)],
    luspo_loss=[dict(clip_high=.1)], gmpo_loss=[dict(nats_low=.1, nats_high=.2)],
    vespo_loss=[dict(over="rows", k_pos=1., lam_neg=.5)], kl_cov_loss=[dict(over="rows", kl_coef=.1)],
    clip_cov_mask=[dict(share=.1, least=0.)], kl_cov_mask=[dict(share=.1)],
    dpo_loss=[dict(beta=.3), SMOOTH], robust_dpo_loss=[SMOOTH], exo_loss=[dict(beta=.3, label_smoothing=.1)],
    discopop_loss=[dict(beta=.3, tau=.4)], dpop_loss=[dict(beta=.3, penalty=1.5)],
    **{f"{name}_loss": [dict(beta=.3)] for name in ("ipo", "hinge", "nca", "bco_pair", "sppo", "apo_zero", "apo_down",
                                                    "rebel", "qrpo", "a2po")},
    f_dpo_loss=[dict(divergence=partial(alpha_reward, alpha=1.), beta=.3), dict(divergence=js_reward, beta=.3),
                dict(divergence=partial(alpha_reward, alpha=.3), beta=.3), dict(divergence=chi_reward, beta=.01)],
    chipo_loss=[dict(max_reward=.4, beta=.1)], aot_loss=[dict(beta=.3, label_smoothing=.1)],
    simpo_loss=[BELOW], alphapo_loss=[dict(alpha=.5, gamma=.3, **BELOW)], orpo_loss=[BELOW], cpo_loss=[BELOW],
    tpo_loss=[dict(gamma=.5, gold=-COLS["ref_chosen"].abs() - .01, **BELOW)],
    kto_loss=[dict(kl=.7, beta=.3), dict(kl=torch.tensor(.7), desirable_weight=1.2, undesirable_weight=.9),
              dict(kl=0.)],
    bco_loss=[dict(delta=.2, beta=.3)], xpo_loss=[dict(alpha=.2)], davidson_loss=[dict(nu=.7)],
    bradley_terry_loss=[dict(margin=ROWS.abs())],
    process_reward_loss=[dict(labels=noise(16, 16, 2, seed=1).softmax(-1)),
                         dict(labels=noise(16, 16, 2, seed=1).softmax(-1), over="rows")],
    generative_scores=[dict(yes=(0, 2), no=1)], support_logprobs=[dict(temperature=2.)],
    forward_kl_loss=[dict(over="rows", temperature=3.)],
    jsd_loss=[dict(beta=.1, temperature=.7), dict(beta=0.), dict(beta=1.)],
    uld_loss=[dict(teacher_logits=noise(16, 16, 4, seed=1))],
    minillm_advantages=[dict(gamma=.9, own=False), dict(normalize=False), dict(gamma=0., own=False)],
)


def blocks():
    for module in BLOCK:
        lib = importlib.import_module(f"rlblocks.{module}")
        yield from ((name, getattr(lib, name)) for name in lib.__all__ if inspect.isfunction(getattr(lib, name)))


BLOCKS = {name: f for name, f in blocks() if name not in PLAIN}
LOSSES = [name for name in BLOCKS if name.endswith("_loss")]


def options(name):
    "Of each case of a block, what it is given beside the defaults and GIVEN."
    params, own = inspect.signature(BLOCKS[name]).parameters, VARIANTS.get(name, [])
    if "over" in params and not any("over" in x for x in own):
        own = [*own, dict(over="tokens" if params["over"].default == "rows" else "rows")]
    weighs = name.endswith("_loss") and "weights" in params and name != "multi_head_loss"       # its are of heads
    return [{}, *(x | dict(weights=WEIGHTS) for x in own or [{}])] if weighs else [{}, *own]


def label(name, given):
    return " ".join([name, *(f"{k}={getattr(x, '__name__', x)}" if isinstance(x, str | float | int) or callable(x)
                             and hasattr(x, "__name__") else k for k, x in given.items())])


CASES = {label(name, x): (name, x) for name in BLOCKS for x in options(name)}
every_case = pytest.mark.parametrize("name", CASES)
every_loss = pytest.mark.parametrize("name", [case for case, (name, _) in CASES.items() if name in LOSSES])


def block(case): return BLOCKS[CASES[case][0]]


def arguments(case):
    "(columns, numbers) for one call, by parameter name."
    name, own = CASES[case]
    given, params = GIVEN.get(name, {}) | own, {k: p for k, p in inspect.signature(BLOCKS[name]).parameters.items()
                                                if p.kind is not p.VAR_POSITIONAL}
    missing = [k for k, p in params.items() if p.default is p.empty and k not in COLS and k not in given]
    assert not missing, f"{name} wants {', '.join(missing)}: say in GIVEN of {__file__} what to give"
    wanted = {k: given.get(k, COLS.get(k)) for k, p in params.items() if k in given or p.default is p.empty}
    columns = {k: x for k, x in wanted.items() if isinstance(x, torch.Tensor) and x.shape[:1] == (16,)}
    return columns, {k: x for k, x in wanted.items() if k not in columns}


def numbers(x):
    "All tensors of a result, in order."
    if isinstance(x, Metric): return numbers(list(x.numbers().values()))
    if isinstance(x, dict): return numbers(list(x.values()))
    if isinstance(x, list | tuple): return [y for item in x for y in numbers(item)]
    return [x] if isinstance(x, torch.Tensor) else []


def test_the_tables_name_blocks_that_exist():
    known = dict(blocks())
    assert not [name for name in itertools.chain(GIVEN, VARIANTS, PLAIN, LAWLESS, LAW_OPTIONS, OF_BATCH,
                                                 SURROGATE, RETURNS_LOGPROBS) if name.split()[0] not in known]
    assert len(LOSSES) >= 4


# what the laws cannot see in a signature: what may have a gradient, whether the loss is linear in the advantage
LAW_OPTIONS = dict(
    dr_grpo_loss=dict(policy=False), asymre_loss=dict(policy=False), luffy_loss=dict(policy=False),
    luspo_loss=dict(policy=False),
    dro_loss=dict(policy=False), clip_cov_loss=dict(policy=False), kl_cov_loss=dict(policy=False),
    # a router sees prompts too: they take a number
    moe_balance_loss=dict(denom="n_tokens"), router_z_loss=dict(denom="n_tokens"),
    multi_head_loss=dict(wrt=("first", "second")), rebel_loss=dict(wrt=("first", "second")),
    safety_loss=dict(wrt=("riskier", "safer")),
    tpo_loss=dict(wrt=("chosen", "rejected", "gold")),
)
# columns that a loss only counts: b.n_marked, b.n_steps
OF_BATCH = dict(rating_loss=dict(marked=GIVEN["rating_loss"]["mask"]), process_reward_loss=dict(steps=MASK))


# refuse a batch: their mask is of tokens that exist, which no batch counts; nor the solutions with a judged step
NUMBERED = {"moe_balance_loss", "router_z_loss", "process_reward_loss labels over=rows"}

@every_case
def test_obeys_the_laws(name):
    columns, hyper = arguments(name)
    case, name, f = name, CASES[name][0], block(name)
    if name in LAWLESS: pytest.skip(LAWLESS[name])
    if not name.endswith("_loss"):
        check_estimator(f, columns, **hyper)
        return
    numbered = not NUMBERED.isdisjoint((name, case))
    weights = dict(weights=columns.pop("weights").exp()) if "weights" in columns else {}
    for extra in [{}, weights] if weights else [{}]:
        laws = check_loss(f, columns | extra | OF_BATCH.get(name, {}), **LAW_OPTIONS.get(name, {}), **hyper)
        wanted = {"purity", "gradient", "permutation", "split", "metrics", "precision", "differentiable"}
        if "mask" in columns: wanted |= {"mask", "empty", "padding", "empty_rows"}
        if not numbered: wanted |= {"denom"}
        if {"logprobs", "advantages", "mask"} <= columns.keys() and LAW_OPTIONS.get(name, {}).get("policy") is None:
            wanted |= {"scale", "reinforce"}
        assert set(laws) - ({"denom"} if numbered else set()) == wanted
        # not even as an error of its own, which the checker takes for that
        assert bool(laws.note) == numbered, f"{name} cannot do with a batch: {laws}"


def first_of_modules(names, skipped=()):
    """All but the first of each module only in `make test-long`: what a module's blocks share is proved once.
    `test_never_waits_for_the_device` finds most of what breaks a graph, for all of them."""
    seen = set()
    for name in names:
        module = BLOCKS[CASES[name][0] if name in CASES else name].__module__
        yield pytest.param(name, marks=[pytest.mark.long] if module in seen else [])
        if name not in skipped: seen.add(module)


@pytest.mark.parametrize("name", first_of_modules(CASES))
def test_compiles_to_one_graph(name):
    columns, hyper = arguments(name)
    torch.compiler.reset()
    want = numbers(block(name)(**columns, **hyper))
    assert want
    assert assert_close(numbers(torch.compile(block(name), fullgraph=True, backend="eager")(**columns, **hyper)),
                        want) is None


@every_case
def test_never_waits_for_the_device(name):
    "A fake tensor has a shape and no values: item, nonzero, unique and `if x > 0` raise."
    columns, hyper = arguments(name)
    want = numbers(block(name)(**columns, **hyper))
    with FakeTensorMode() as fake:
        got = numbers(block(name)(**{k: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x
                                     for k, x in (columns | hyper).items()}))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]


def differentiable(case, columns):
    "Names of the arguments that a gradient may reach."
    wrt = LAW_OPTIONS.get(CASES[case][0], {}).get("wrt", ())
    return [k for k in columns if k in wrt or k in ("chosen", "rejected")] or list(columns)[:1]


@every_loss
def test_derivative_is_that_of_the_value(name):
    if (why := SURROGATE.get(name, SURROGATE.get(CASES[name][0]))): pytest.skip(why)
    columns, hyper = arguments(name)
    firsts = differentiable(name, columns)
    few = {k: x[:4] for k, x in columns.items()}
    rest = {k: x for k, x in few.items() if k not in firsts}
    def value(*xs): return block(name)(**dict(zip(firsts, xs, strict=True)), **rest, **hyper)[0]
    assert torch.autograd.gradcheck(value, [few[k].clone().requires_grad_() for k in firsts], fast_mode=True)


@pytest.mark.parametrize("name", first_of_modules(LOSSES, {*SURROGATE, "gspo_token_loss"}))
def test_second_derivative_is_that_of_the_gradient(name):
    "Through a network, where autograd would differentiate its part and take a slope written by hand for a constant."
    if name in SURROGATE or name == "gspo_token_loss":
        pytest.skip(SURROGATE.get(name, "sg(ratio of the row)·lp/sg(lp)"))
    columns, hyper = arguments(name)
    first = "chosen" if "chosen" in columns else next(iter(columns))
    w, v = noise(*columns[first].shape[1:], seed=5), noise(*columns[first].shape[1:], seed=6)
    def gradient(w, **how):
        w = w.clone().requires_grad_()
        return w, torch.autograd.grad(BLOCKS[name](**columns | {first: columns[first]*w}, **hyper)[0], w, **how)[0]
    w_, g = gradient(w, create_graph=True)
    second = torch.autograd.grad((g*v).sum(), w_, materialize_grads=True)[0] if g.requires_grad else torch.zeros_like(w)
    assert_close(second, (gradient(w + 1e-5*v)[1] - gradient(w - 1e-5*v)[1])/2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", first_of_modules(LOSSES, {*SURROGATE, "gspo_token_loss"}))
def test_hessian(name):
    "torch.func.hessian (vmap over forward over reverse mode) and row by row with two backward passes."
    columns, hyper = arguments(name)
    few = {k: x[:4] for k, x in columns.items()}
    first = "chosen" if "chosen" in few else next(iter(few))
    def value(x): return BLOCKS[name](**few | {first: x}, **hyper)[0]
    assert_close(torch.func.hessian(value)(few[first]), torch.autograd.functional.hessian(value, few[first]), rtol=1e-9,
                 atol=1e-12)


@pytest.mark.parametrize("name", [case for case, (_, own) in CASES.items() if "weights" in own])
def test_a_weightless_row_is_not_there(name):
    "Whatever stands in it; and weights in half precision leave a loss in float64."
    columns, hyper = arguments(name)
    w, firsts = columns.pop("weights"), differentiable(name, columns)
    kept = w != 0
    alone, expected = block(name)(**{k: x[kept] for k, x in columns.items()}, weights=w[kept], **hyper)
    for fill in (0., torch.nan, torch.inf, -torch.inf):
        filled = {k: torch.where(kept.view(-1, *[1]*(x.ndim-1)), x, fill).requires_grad_(k in firsts)
                  if x.is_floating_point() else x for k, x in columns.items()}
        loss, metrics = block(name)(**filled, weights=w, **hyper)
        assert_close((loss.detach(), numbers(metrics)), (alone, numbers(expected)))
        for g in torch.autograd.grad(loss, [filled[k] for k in firsts]):
            assert g.isfinite().all() and not g[~kept].any() and g[kept].any()
    assert block(name)(**columns, weights=torch.ones(16, dtype=torch.bfloat16), **hyper)[0].dtype == torch.float64


@pytest.mark.parametrize("waits", [lambda x, mask: x*bool(mask.any()), lambda x, mask: x[mask].sum(),
                                   lambda x, mask: x/mask.sum().item()])
def test_a_block_that_waits_is_seen(monkeypatch, waits):
    monkeypatch.setitem(BLOCKS, "whiten", waits)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        test_never_waits_for_the_device("whiten")


# -- a token that cannot be sampled: −inf in the log-probs. The rule stands in nbs/arithmetic/00_masked,
# `finite_logprobs`

# log-probs of whole answers, but scores of a judge in reward_losses
ANSWER = ("chosen", "rejected", "ref_chosen", "ref_rejected", "gold", "first", "second", "ref_first", "ref_second")
RETURNS_LOGPROBS = {  # −inf stays −inf in what is itself a log-prob: who consumes it makes it finite
    "log_odds": "−∞ where the probability is 0", "softened_logprobs": "log-probs of the vocabulary",
    "sequence_logprobs": "log π of an answer", "support_logprobs": "log-probs of a few ids, −inf where the id is −1",
    "token_logprobs": "log π of a token",
    "gather_logprobs": "log π of a target", "geometric_mixture": "log-probs of the vocabulary",
}


def impossible(name, columns):
    """(names of the log-prob arguments, where they are made impossible): a chosen token of the longest row, or two
    answers with unlike verdicts."""
    names = [k for k in columns if k.endswith("logprobs") or k in ANSWER
             and BLOCKS[name].__module__ != "rlblocks.losses.reward"]
    mask = columns.get("mask")
    token = [(r, mask[r].nonzero()[2, 0]) for r in [mask.sum(1).argmax()]] if mask is not None else [(2, 3)]
    good = columns["desirable"].int().argmax() if "desirable" in columns else 0
    bad = columns["desirable"].int().argmin() if "desirable" in columns else 1
    return names, token if names and columns[names[0]].ndim == 2 else [(good,), (bad,)]


def differentiated(name, columns, hyper):
    "Outputs, and the gradient of the first argument (and its mate), if there is one."
    firsts = [k for k in columns if k in ("chosen", "rejected", "gold")] or list(columns)[:1]
    columns = {k: x.clone().requires_grad_() if k in firsts and x.is_floating_point() else x
               for k, x in columns.items()}
    out = BLOCKS[name](**columns, **hyper)
    graph = [x[x.isfinite()].sum() for x in numbers(out) if x.requires_grad]
    if graph: sum(graph).backward()
    return out, {k: columns[k].grad for k in firsts if columns[k].grad is not None}


def poisoned(columns, which, at, x):
    changed = {k: columns[k].clone() for k in which}
    for k in which: changed[k][at] = x
    return columns | changed


def ways(name):
    """(columns as they are, numbers, which log-probs are made impossible, where) for each of them alone and for all
    at once; with an advantage of 0 too."""
    columns, hyper = arguments(name)
    names, places = impossible(name, columns)
    for at, which in itertools.product(places, [[k] for k in names] + ([names] if len(names) > 1 else [])):
        yield columns, hyper, which, at
        if "advantages" in columns: yield poisoned(columns, ["advantages"], at, 0.), hyper, which, at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in BLOCKS if impossible(name, arguments(name)[0])[0]
                                  and name not in RETURNS_LOGPROBS])
def test_what_cannot_be_sampled_is_finite(name, dtype):
    "Value, metrics and gradient; nothing is learnt through it; and the value is that of the limit where it has one."
    for columns, hyper, which, at in ways(name):
        def outcome(x, dtype, columns=columns, hyper=hyper, which=which, at=at):
            cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in columns.items()}
            return differentiated(name, poisoned(cast, which, at, x), hyper)
        out, grads = outcome(-torch.inf, dtype)
        assert all(x.isfinite().all() for x in numbers(out)), f"{name}: {which} at {at}"
        for k, g in grads.items():
            assert g.isfinite().all() and (k not in which or g[at] == 0), f"{name}: gradient of {k}, {which} at {at}"
        if dtype is torch.float32: continue # the rest is exact enough in float64 only
        for limit, far, further in zip(*(numbers(outcome(x, dtype)[0]) for x in (-torch.inf, -1e5, -1e12)),
                                       strict=True):
            limit, far, further = (x.double() for x in (limit, far, further)) # masks too
            grows = (further - far).abs() > 1e-3*(1 + far.abs()) # the limit is infinite
            assert_close(*(torch.where(grows, 0., x) for x in (limit, further)), rtol=1e-3, atol=1e-3)
            assert (limit.abs() > further.abs())[grows].all(), f"{name}: {which} at {at}"


@pytest.mark.parametrize("name", [name for name in LOSSES if impossible(name, arguments(name)[0])[0]])
def test_a_nan_is_not_made_finite(name):
    columns, hyper = arguments(name)
    names, places = impossible(name, columns)
    for k, at in itertools.product(names, places):
        assert BLOCKS[name](**poisoned(columns, [k], at, torch.nan), **hyper)[0].isnan(), k


def logits_of(columns): return [k for k, x in columns.items() if k.endswith("logits") and x.is_floating_point()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in BLOCKS if logits_of(arguments(name)[0])])
def test_an_id_that_cannot_be_sampled_is_finite(name, dtype):
    columns, hyper = arguments(name)
    columns, names = {k: x.to(dtype) if x.is_floating_point() else x for k, x in columns.items()}, logits_of(columns)
    for which in [[k] for k in names] + [names]:
        out, grads = differentiated(name, poisoned(columns, which, (slice(None), slice(1, None, 3), 1), -torch.inf),
                                    hyper)
        assert all(x.isfinite().all() or name in RETURNS_LOGPROBS and not x.isnan().any()
                   for x in numbers(out)), f"{name}: {which}"
        assert all(g.isfinite().all() for g in grads.values()), f"{name}: gradient, {which}"
