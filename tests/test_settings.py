"Settings are values: an engine's and an optimizer's say what the words say, and travel to where they act."
import pytest
import torch
from rlblocks import Critic, Policy, Scorer
from rlblocks.engines.base import Engine, as_words, fsdp2, plain, zero
from rlblocks.engines.optim import OptimizerSpec, adamw, adamw_8bit, cosine, muon
from rlblocks.engines.world import leave_world
from tiny import model, rows

LORA = dict(r=2, target_modules=["q_proj"])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("Wrapper", [Policy, Critic, Scorer])
def test_an_engines_value_reaches_the_engine(Wrapper, lora):
    made = Wrapper(model(), engine=plain(dtype=torch.bfloat16, checkpointing=True), lora=lora, device="cpu")._run.model
    base = made if lora is None else made.engine.base.model
    assert base.dtype == torch.bfloat16 and any(getattr(m, "gradient_checkpointing", False) for m in base.module.modules())
    assert isinstance(made.engine, Engine)


def test_a_value_is_its_word():
    try:
        for value, word in ((fsdp2(), "fsdp2"), (plain(), None)):
            engines = [Policy(model(), engine=x, device="cpu")._run.model.engine for x in (value, word)]
            assert type(engines[0]) is type(engines[1])
    finally: leave_world()


def test_an_optimizers_value_has_clipping_and_schedule():
    def loss(out, b): return out.logprobs.sum()/b.n_tokens, {}
    b, made = rows(dtype=torch.float32), adamw(lr=1e-2, max_norm=1e-12, schedule=cosine(4, end=.5))
    policy = Policy(model(), optimizer=made, device="cpu")
    assert policy._run.model.engine.max_norm == 1e-12
    rates = [float(policy.step(b, loss)["lr"]) for _ in range(2)]
    assert rates[0] == 1e-2 and 5e-3 < rates[1] < 1e-2
    assert Policy(model(), optimizer=OptimizerSpec(torch.optim.SGD, max_norm=None), device="cpu")._run.model.engine.max_norm == float("inf")


def test_settings_that_cannot_be_are_refused_where_they_are_written():
    for make, words in ((lambda: zero(3, offload="nvme"), "nvme=None"), (lambda: adamw(lr=-1.), "adamw: lr=-1.0; a number of 0 or more"), (lambda: muon(betas=(1., 2.)), "muon: betas="),
                        (lambda: adamw_8bit(max_norm=0.), "max_norm=0.0; a number above 0"), (lambda: as_words(fsdp2(), dtype=torch.bfloat16), "dtype= stands beside")):
        with pytest.raises(ValueError, match=words): make()
    with pytest.raises(ValueError, match="offload= stands beside"): Policy(model(), engine=fsdp2(), offload="cpu", device="cpu")
    assert adamw().adamw and adamw_8bit().adamw is None and muon().adamw is None
