"Settings are values: an engine's and an optimizer's say what the words say, and travel to where they act."
import inspect
import re

import pytest
import torch
from rlblocks import Critic, Policy, Scorer
from rlblocks.engines.engine import Engine, fsdp2, plain, zero
from rlblocks.engines.optimizers import OptimizerSpec, adamw, adamw_8bit, cosine, muon
from rlblocks.engines.fsdp2 import Fsdp
from rlblocks.engines.plain import Plain
from rlblocks.engines.sharded_model import ShardedModel
from rlblocks.engines.process_group import leave_world
from tiny import model, rows

LORA = dict(r=2, target_modules=["q_proj"])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("Wrapper", [Policy, Critic, Scorer])
def test_an_engines_value_reaches_the_engine(Wrapper, lora):
    made = Wrapper(model(), engine=plain(dtype=torch.bfloat16, checkpointing=True), lora=lora, device="cpu")._run.model
    base = made if lora is None else made.engine.base.model
    assert base.dtype == torch.bfloat16
    assert any(getattr(m, "gradient_checkpointing", False) for m in base.module.modules())
    assert isinstance(made.engine, Engine)


def test_a_value_is_its_word():
    try:
        for value, word in ((fsdp2(), "fsdp2"), (plain(), None)):
            engines = [Policy(model(), engine=x, device="cpu")._run.model.engine for x in (value, word)]
            assert type(engines[0]) is type(engines[1])
    finally: leave_world()


@pytest.mark.parametrize("factory", [plain, fsdp2, zero])
def test_a_factory_that_is_not_called_says_so(factory):
    line = "zero(3)" if factory is zero else f"{factory.__name__}()"
    with pytest.raises(TypeError, match=re.escape(f"engine is the function {factory.__name__}; write {line}")):
        Policy(model(), engine=factory, device="cpu")


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1., None])
def test_a_schedule_that_gives_no_rate_changes_nothing(odd):
    def loss(out, b): return out.logprobs.sum()/b.n_tokens, {}
    b, made = rows(dtype=torch.float32), adamw(lr=1e-2, schedule=lambda v: 1. if v == 0 else odd)
    policy, calm = (Policy(model(), optimizer=made, device="cpu") for _ in range(2))
    for p in (policy, calm): p.step(b, loss)
    before = policy.state_dict()
    with pytest.raises(ValueError, match=f"the schedule gives {odd!r} at version 1; a finite number of 0 or more"):
        policy.step(b, loss)
    after = policy.state_dict()
    assert policy.version == 1 and all(x.equal(after["module"][n]) for n, x in before["module"].items())
    for p in (policy, calm):      # the gradient is forgotten too
        p._run.model.schedule = None
        p.step(b, loss)
    for n, x in calm.state_dict()["module"].items(): assert x.equal(policy.state_dict()["module"][n])


def test_an_optimizers_value_has_clipping_and_schedule():
    def loss(out, b): return out.logprobs.sum()/b.n_tokens, {}
    b, made = rows(dtype=torch.float32), adamw(lr=1e-2, max_norm=1e-12, schedule=cosine(4, end=.5))
    policy = Policy(model(), optimizer=made, device="cpu")
    assert policy._run.model.engine.max_norm == 1e-12
    rates = [float(policy.step(b, loss)["lr"]) for _ in range(2)]
    assert rates[0] == 1e-2 and 5e-3 < rates[1] < 1e-2
    assert Policy(model(), optimizer=OptimizerSpec(torch.optim.SGD, max_norm=None),
                  device="cpu")._run.model.engine.max_norm == float("inf")


def test_settings_that_cannot_be_are_refused_where_they_are_written():
    for make, words in ((lambda: zero(3, offload="nvme"), "nvme=None"),
                        (lambda: adamw(lr=-1.), "adamw: lr=-1.0; a number of 0 or more"),
                        (lambda: muon(betas=(1., 2.)), "muon: betas="),
                        (lambda: adamw_8bit(max_norm=0.), "max_norm=0.0; a number above 0")):
        with pytest.raises(ValueError, match=words): make()
    assert adamw().adamw and adamw_8bit().adamw is None and muon().adamw is None
    with pytest.raises(TypeError, match=r"lr= belongs to the optimizer: ShardedModel\(module, optimizer=…\(…, lr=0.1"):
        ShardedModel(torch.nn.Linear(1, 1), optimizer=adamw(), lr=.1, device="cpu")
    with pytest.raises(ValueError, match="Fsdp: offload='nvme'; \"cpu\" is wanted"):
        Fsdp(torch.nn.Linear(1, 1), torch.device("cpu"), offload="nvme")


@pytest.mark.parametrize("Wrapper", [Policy, Critic, Scorer])
def test_a_learning_rate_beside_an_optimizer_is_refused(Wrapper):
    "The optimizer has its own: one of the two would be ignored."
    with pytest.raises(TypeError, match=f"{Wrapper.__name__}: lr=0.1 beside an optimizer, which has its own"):
        Wrapper(model(), optimizer=adamw(max_norm=2.), lr=.1, device="cpu")



@pytest.mark.parametrize("Wrapper", [Policy, Critic, Scorer])
def test_the_signature_is_the_truth(Wrapper):
    "No **kwargs: what an editor shows is what there is."
    params = inspect.signature(Wrapper).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in params.values())
    for name in ("engine", "optimizer", "lr", "frozen", "micro_tokens", "micro_rows", "pack", "device"):
        assert name in params
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"): Wrapper()


def test_who_stands_on_a_model_takes_it_as_it_is():
    "Settings of the base beside a view are refused, unless they are the same."
    base = Policy(model(), engine=plain(dtype=torch.bfloat16), frozen=True, device="cpu")
    Critic(base, lora=LORA, engine=plain(dtype=torch.bfloat16), device="cpu")
    for how, words in ((dict(engine=plain(dtype=torch.float64)), "dtype=torch.float64"),
                       (dict(engine="fsdp2"), "engine='fsdp2'"),
                       (dict(engine=plain(checkpointing=True)), "checkpointing=True")):
        with pytest.raises(ValueError, match=f"Critic: {words} cannot be chosen here"):
            Critic(base, lora=LORA | dict(name="other"), **how)


def test_an_engine_of_ones_own():
    "What makes an engine stands in a value's place."
    made = []
    class Loud(Plain):
        def step(self, shared):
            made.append(shared)
            return super().step(shared)
    policy = Policy(model(), engine=Loud, lr=1e-3, device="cpu")
    policy.step(rows(dtype=torch.float32), lambda out, b: (out.logprobs.sum()/b.n_tokens, {}))
    assert made == [False] and policy.version == 1
