"""Heads: several scores, steps, critics that classify; reward models that transformers, TRL and OpenRLHF wrote, and
what they read of ours."""
import json

import pytest
import torch
from rlblocks import (Batch, Checkpoint, Critic, Policy, Scorer, bradley_terry_loss, classification_value_loss,
                      expected_value, hl_gauss, multi_head_loss, pairs,
                      process_reward_loss, safety_loss, two_hot, value_loss,)
from rlblocks.models.value_heads import head_of, moments_of, stored_moments
from rlblocks.models.scorer import raw_scores, scores_after
from rlblocks.engines.optimizers import adamw
from safetensors.torch import load_file, save_file
from tiny import apart, gradients, model, reach, rows
from torch import nn
from torch.testing import assert_close

pytest.importorskip("transformers")


def batch():
    b = rows(dtype=torch.float32)
    g = torch.Generator().manual_seed(7)
    b["steps"] = (torch.rand(b.tokens.shape, generator=g) < .3) & (torch.arange(18) < b.lengths[:, None])
    b["good"] = (b.tokens % 2).long()
    return b


def length_loss(out, b): return ((out.scores-b.lengths/9)**2).sum()/b.n_rows, {}
def trained(scorer, b, loss=length_loss, n=6):
    for _ in range(n): scorer.step(b, loss)
    return scorer
def states(net, b):
    return net.model(input_ids=b.tokens, attention_mask=(torch.arange(18) < b.lengths[:, None]).long(),
                     use_cache=False).last_hidden_state
def last(x, b): return x[torch.arange(len(b)), b.lengths-1]


# -- critics that classify

@pytest.mark.parametrize("targets", [hl_gauss, two_hot])
@pytest.mark.parametrize("how", [dict(), dict(micro_rows=3, pack=True)])
def test_a_classifying_critic_learns_returns(targets, how):
    b, bins = batch(), torch.linspace(-3, 3, 25)
    critic = Critic(model(), bins=bins, lr=3e-2, device="cpu", **how)
    assert_close(critic.values(b), torch.zeros(16, 18), rtol=0, atol=1e-6)
    def loss(out, b):
        assert out.value_logits.shape == (*b.tokens.shape, 25)
        assert_close(out.values[b.mask], expected_value(out.value_logits, bins)[b.mask])
        return classification_value_loss(out.value_logits, targets(b.returns, bins), b.mask, denom=b.n_tokens)
    first, final = [float(critic.step(b, loss)["value_kl"]) for _ in range(30)][::29]
    # seeds 0 to 4 of model and rows: 0.33, 0.25, 0.51, 0.17, 0.12 at most; seed 0 on two threads the same
    assert final < .8*first
    far = lambda v: (v-b.returns)[b.mask].abs().mean()
    assert far(critic.values(b)) < far(torch.zeros(16, 18))  # 0.59, 0.38, 0.84, 0.29, 0.15 of it


def test_a_classifying_critic_is_cut_anyhow():
    b, bins = batch(), torch.linspace(-3, 3, 5)
    def grads(**how):
        critic = Critic(model(), bins=bins, optimizer=adamw(lr=1e-2, max_norm=1e9), device="cpu", **how)
        with torch.no_grad():
            critic._run.module.head.linear.weight += torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
        found = gradients(critic)
        critic.step(b, lambda out, b: classification_value_loss(out.value_logits, hl_gauss(b.returns, bins), b.mask,
                                                                denom=b.n_tokens))
        return found
    assert apart(grads(micro_rows=3, pack=True), grads(pack=False)) < 1e-5
    with pytest.raises(ValueError, match="ascending"): Critic(model(), bins=[1., 0.], device="cpu")


# -- rewards

def test_several_objectives_and_their_names(tmp_path):
    from transformers import AutoModelForSequenceClassification
    b = batch()
    b["unit"], b["chosen"] = torch.arange(16)//2, torch.arange(16) % 2 == 0
    scorer = Scorer(model(), outputs=["helpful", "harmless", "brief"], lr=1e-2, device="cpu")
    assert scorer.scores(b).shape == (16, 3)
    def loss(out, b):
        chosen, rejected = zip(*(pairs(out.scores[:, k], b) for k in range(3)), strict=True)
        chosen, rejected = torch.stack(chosen, 1), torch.stack(rejected, 1)
        return multi_head_loss(chosen, rejected, torch.tensor([[1., 0., 1.]]).expand(len(chosen), 3),
                               torch.ones(len(chosen), 3, dtype=torch.bool), denom=b)
    assert float(trained(scorer, b, loss, 10).step(b, loss)["loss"]) < 3*.6
    scorer.save_pretrained(tmp_path)
    plain, again = AutoModelForSequenceClassification.from_pretrained(tmp_path), Scorer(tmp_path, device="cpu")
    assert plain.config.id2label == {0: "helpful", 1: "harmless", 2: "brief"}
    assert again.names == ["helpful", "harmless", "brief"]
    assert_close(again.scores(b), scorer.scores(b), rtol=0, atol=1e-5)
    assert_close(plain(b.tokens[4:5, :6]).logits, scorer.scores(b)[4:5], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="head of 3 numbers; 1 is wanted"): Critic(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="head of 3 numbers; 2 are wanted"): Scorer(tmp_path, outputs=2, device="cpu")


@pytest.mark.parametrize("how", [dict(), dict(micro_rows=3, pack=True)])
def test_a_safety_head_beside_the_reward(how, tmp_path):
    "Safe RLHF: the helpful answer of a pair may be the harmful one, and the sign of a cost says unsafe."
    b = batch()
    b["unit"], b["chosen"] = torch.arange(16)//2, torch.arange(16) % 2 == 0
    # of a pair: neither, one of the two, or both
    b["unsafe"] = torch.tensor([(i//2) % 3 != 0 and i % 2 == (i//2) % 2 or (i//2) % 5 == 4 for i in range(16)])
    scorer = Scorer(model(), outputs=["reward", "cost"], lr=1e-2, device="cpu", **how)
    def loss(out, b):
        names = dict(zip(scorer.names, out.scores.unbind(1), strict=True))
        better, worse = pairs(names["reward"], b)
        (cost, other), (unsafe, too) = pairs(names["cost"], b), pairs(b.unsafe, b)
        riskier = unsafe | ~too                    # of two equals either
        high, low = torch.where(riskier, cost, other), torch.where(riskier, other, cost)
        told, m = safety_loss(high, low, riskier_unsafe=torch.where(riskier, unsafe, too),
                              safer_unsafe=torch.where(riskier, too, unsafe), denom=b)
        learnt, more = bradley_terry_loss(better, worse, denom=b)
        return told + learnt, dict(sign=m["sign_accuracy"], order=more["accuracy"])
    for _ in range(40): metrics = scorer.step(b, loss)
    assert float(metrics["sign"]) == 1 and float(metrics["order"]) == 1, metrics
    scorer.save_pretrained(tmp_path)
    again = Scorer(tmp_path, device="cpu")
    read = dict(zip(again.names, again.scores(b).unbind(1), strict=True))
    assert ((read["cost"] > 0) == b.unsafe).all() and b.unsafe.any() and not b.unsafe.all()
    better, worse = pairs(read["reward"], b)
    assert (better > worse).all()
    assert json.loads((tmp_path/"config.json").read_text())["label2id"] == dict(reward=0, cost=1)


@pytest.mark.parametrize("how", [dict(), dict(micro_rows=3, pack=True)])
def test_steps_are_judged_where_they_end(how, tmp_path):
    from transformers import AutoModelForTokenClassification
    net, b = model(), batch()
    judge = Scorer(net, outputs=scores_after("steps", 2), lr=1e-2, device="cpu", **how)
    def loss(out, b): return process_reward_loss(out.scores, b.good, b.steps, denom=b)
    ce = [float(judge.step(b, loss)["step_ce"]) for _ in range(25)]
    # 0.00 of it for seeds 0 to 4; seed 0 on two threads the same
    assert ce[-1] < .5*ce[0]
    got = judge.scores(b)
    head = judge._run.module.head
    trunk = judge._run.module.trunk
    want = head(trunk(input_ids=b.tokens, use_cache=False).last_hidden_state)
    assert got.shape == (16, 18, 2) and (got[~b.steps] == 0).all()
    assert_close(got[b.steps], want[b.steps].detach(), rtol=0, atol=reach(got))
    judge.save_pretrained(tmp_path)
    plain, again = AutoModelForTokenClassification.from_pretrained(tmp_path), Scorer(tmp_path, device="cpu")
    assert again.at == "steps" and torch.equal(again.scores(b), raw_scores(again._run, b, again.at))
    assert_close(again.scores(b), got, rtol=0, atol=reach(got))
    assert_close(plain(b.tokens).logits[b.steps], got[b.steps], rtol=0, atol=reach(got))
    unmarked = Batch(tokens=b.tokens, lengths=b.lengths)
    with pytest.raises(ValueError, match="no column 'steps'"):
        judge.scores(Batch(tokens=b.tokens, lengths=b.lengths, mask=b.mask))
    unmarked["steps"] = b.steps
    assert_close(judge.scores(unmarked), got, rtol=0, atol=1e-5)             # without a mask column too


def test_normalisation_is_measured_stored_and_taken_out(tmp_path):
    b = batch()
    scorer = trained(Scorer(model(), lr=1e-2, device="cpu"), b)
    raw = scorer.scores(b)
    scorer.normalise(b)
    x = scorer.scores(b)
    assert_close(x, (raw-raw.mean())/raw.std(), rtol=0, atol=1e-5)
    assert abs(float(x.mean())) < 1e-5 and abs(float(x.std())-1) < 1e-5
    seen = []
    scorer.step(b, lambda out, b: (seen.append(out.scores.detach()), length_loss(out, b))[1])
    assert_close(torch.cat(seen)[:16], raw, rtol=0, atol=1e-5)                # a loss sees raw scores
    scorer.save_pretrained(tmp_path)
    config = json.loads((tmp_path/"config.json").read_text())
    assert config["mean"] == pytest.approx(float(raw.mean()), abs=1e-5)
    assert config["std"] == pytest.approx(float(raw.std()), abs=1e-5) and config["normalize_reward"] is True
    assert_close(Scorer(tmp_path, device="cpu").scores(b), scorer.scores(b), rtol=0, atol=1e-5)
    again = Scorer(tmp_path, device="cpu")
    again.moments = None
    assert_close(again.scores(b), raw_scores(scorer._run, b, scorer.at), rtol=0, atol=1e-5)
    other = Scorer(model(), device="cpu")
    other.load_state_dict(scorer.state_dict())
    assert_close(other.scores(b), scorer.scores(b), rtol=0, atol=1e-6)
    two = moments_of(raw[:, None])
    assert two[0][0] == pytest.approx(float(raw.mean()), abs=1e-6)
    assert two[1][0] == pytest.approx(float(raw.std()), abs=1e-6)
    with pytest.raises(ValueError, match="two different ones"): Scorer(model(), device="cpu").normalise(b)


# -- what others write

def test_reward_models_of_trl(tmp_path):
    "TRL's reward trainer writes transformers' sequence classifier; half precision keeps an fp32 head here."
    from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification
    config = model().config
    config.num_labels = 1
    torch.manual_seed(0)
    theirs, b = LlamaForSequenceClassification(config).eval(), batch()
    theirs.save_pretrained(tmp_path)
    scorer = Scorer(tmp_path, device="cpu")
    assert_close(scorer.scores(b), last(theirs.score(states(theirs, b)), b)[:, 0].detach(), rtol=0, atol=1e-5)
    trained(scorer, b).save_pretrained(tmp_path/"ours")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path/"ours")
    assert_close(last(back.score(states(back, b)), b)[:, 0].detach(), scorer.scores(b), rtol=0, atol=1e-5)


def test_value_heads_of_trl(tmp_path):
    """AutoModelForCausalLMWithValueHead: the language model's weights and v_head.summary beside them, as safetensors
    or as a pickled state dict."""
    net, b = model(), batch()
    torch.manual_seed(1)
    head = nn.Linear(32, 1)
    net.save_pretrained(tmp_path)
    weights = load_file(tmp_path/"model.safetensors") | {"v_head.summary.weight": head.weight.detach(),
                                                         "v_head.summary.bias": head.bias.detach()}
    save_file(weights, tmp_path/"model.safetensors", metadata=dict(format="pt"))
    want = last(head(states(net, b)), b)[:, 0].detach()
    assert_close(Scorer(tmp_path, device="cpu").scores(b), want, rtol=0, atol=1e-5)
    values = Critic(tmp_path, device="cpu").values(b)
    assert_close(values[b.mask], head(states(net, b))[..., 0].roll(1, 1)[b.mask].detach(), rtol=0, atol=1e-5)
    (tmp_path/"model.safetensors").unlink()
    torch.save(weights, tmp_path/"pytorch_model.bin")
    assert_close(Scorer(tmp_path, device="cpu").scores(b), want, rtol=0, atol=1e-5)
    assert head_of(tmp_path).bias is not None


def returns_loss(out, b): return value_loss(out.values, b.returns*0, b.returns, b.mask, clip=100., denom=b.n_tokens)


def test_a_policy_keeps_its_value_head(tmp_path):
    "From a folder as TRL wrote it, and into one."
    from transformers import AutoModelForCausalLM
    net, b = model(), batch()
    torch.manual_seed(1)
    head = nn.Linear(32, 1)
    net.save_pretrained(tmp_path)
    weights = load_file(tmp_path/"model.safetensors")
    save_file(weights | {f"v_head.summary.{k}": x.detach().clone() for k, x in head.named_parameters()},
              tmp_path/"model.safetensors", metadata=dict(format="pt"))
    policy = Policy(tmp_path, value_head=True, lr=1e-2, device="cpu")
    want = head(states(net, b))[..., 0].roll(1, 1).detach()
    assert_close(policy.values(b)[b.mask], want[b.mask], rtol=0, atol=1e-5)
    policy.step(b, returns_loss)
    policy.save_pretrained(tmp_path/"ours", max_shard_bytes=30_000)
    index = json.loads((tmp_path/"ours/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys() | {"v_head.summary.weight", "v_head.summary.bias"}
    assert len(set(index.values())) > 2
    assert torch.equal(load_file(tmp_path/"ours"/index["v_head.summary.bias"])["v_head.summary.bias"],
                       policy._run.module.head.bias.detach())
    for again in (Policy(tmp_path/"ours", value_head=True, device="cpu"), Critic(tmp_path/"ours", device="cpu")):
        assert_close(again.values(b), policy.values(b), rtol=0, atol=1e-6)
    plain, found = AutoModelForCausalLM.from_pretrained(tmp_path/"ours", output_loading_info=True)
    assert not found["missing_keys"]
    assert set(found["unexpected_keys"]) == {"v_head.summary.weight", "v_head.summary.bias"}
    assert_close(Policy(plain, device="cpu").logprobs(b), policy.logprobs(b), rtol=0, atol=1e-5)
    policy.save_pretrained(tmp_path/"bare", value_head=False)
    assert head_of(tmp_path/"bare") is None
    Scorer(model(), outputs=3, device="cpu").save_pretrained(tmp_path/"three")
    with pytest.raises(ValueError, match="makes 3 numbers of 32 features; one of 32 is wanted"):
        Policy(tmp_path/"three", value_head=True, device="cpu")


def test_a_checkpoint_keeps_its_value_head_when_it_becomes_a_folder(tmp_path):
    from rlblocks.checkpoint.convert import convert
    b, policy = batch(), Policy(model(), value_head=True, lr=1e-2, device="cpu")
    model().save_pretrained(tmp_path/"base")
    for _ in Checkpoint(tmp_path/"run", every=1)(1, policy=policy): policy.step(b, returns_loss)
    convert(tmp_path/"run", tmp_path/"out", base=tmp_path/"base")
    assert policy.values(b).abs().max() > .01
    assert_close(Policy(tmp_path/"out", value_head=True, device="cpu").values(b), policy.values(b), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lora", [None, dict(r=4)])
def test_a_critic_is_handed_on(lora, tmp_path):
    from transformers import AutoModelForSequenceClassification
    if lora: pytest.importorskip("peft")
    b, critic = batch(), Critic(model(), lr=1e-2, device="cpu", lora=lora)
    for _ in range(3): critic.step(b, returns_loss)
    critic.save_pretrained(tmp_path)
    plain, found = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and plain.config.num_labels == 1
    again = Critic(tmp_path, device="cpu")
    assert critic.values(b).abs().max() > .1
    assert_close(again.values(b), critic.values(b), rtol=0, atol=1e-5)
    assert_close(again.values(b)[b.mask], plain.score(states(plain, b))[..., 0].roll(1, 1)[b.mask].detach(), rtol=0,
                 atol=1e-5)


def test_a_critic_with_a_bias_keeps_it(tmp_path):
    "As verl's critics have one: token classifiers of one label."
    from transformers import AutoModelForTokenClassification, LlamaForTokenClassification
    config = model().config
    config.num_labels = 1
    torch.manual_seed(0)
    theirs, b = LlamaForTokenClassification(config).eval(), batch()
    with torch.no_grad(): theirs.score.bias += 3
    theirs.save_pretrained(tmp_path/"theirs")
    critic = Critic(tmp_path/"theirs", lr=1e-2, device="cpu")
    assert_close(critic.values(b)[b.mask], theirs(b.tokens).logits[..., 0].roll(1, 1)[b.mask].detach(), rtol=0,
                 atol=1e-5)
    critic.step(b, returns_loss)
    critic.save_pretrained(tmp_path/"ours")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path/"ours").eval()
    assert_close(plain(b.tokens).logits[..., 0].roll(1, 1)[b.mask].detach(), critic.values(b)[b.mask], rtol=0,
                 atol=1e-5)


def test_a_classifying_critic_comes_back(tmp_path):
    b, bins = batch(), torch.linspace(-3, 3, 25)
    critic = Critic(model(), bins=bins, lr=3e-2, device="cpu")
    def loss(out, b):
        return classification_value_loss(out.value_logits, hl_gauss(b.returns, bins), b.mask, denom=b.n_tokens)
    for _ in range(3): critic.step(b, loss)
    critic.save_pretrained(tmp_path)
    again = Critic(tmp_path, lr=3e-2, device="cpu")
    assert critic.values(b).abs().max() > .1 and torch.equal(again._run.module.head.bins, bins)
    assert_close(again.values(b), critic.values(b), rtol=0, atol=1e-5)
    again.step(b, loss)                            # and it goes on classifying
    again.save_pretrained(tmp_path/"again")
    assert_close(Critic(tmp_path/"again", device="cpu").values(b), again.values(b), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="head of 25 numbers; 5 are wanted"):
        Critic(tmp_path, bins=torch.linspace(-1, 1, 5), device="cpu")


def test_a_critic_without_a_place_in_transformers_says_how_to_keep_it(tmp_path):
    with pytest.raises(TypeError, match=r"Critic: transformers has no classifier for .*torch.save\(critic"):
        Critic(nn.Embedding(32, 8), device="cpu").save_pretrained(tmp_path)


@pytest.fixture(scope="module")
def openrlhf():
    "OpenRLHF's own loader of reward models, from its file; what needs a cluster or a kernel stays out."
    import sys
    from conftest import ROOT
    sys.path.insert(0, str(ROOT/"tests/parity"))
    peers = pytest.importorskip("peers")
    why = peers.missing("openrlhf")
    if why: pytest.skip(why)
    for need in ("deepspeed", "peft"): pytest.importorskip(need)
    return peers.openrlhf_model() if hasattr(peers, "openrlhf_model") else _openrlhf_model(peers)


def _openrlhf_model(peers):
    """models/model.py run as it is, its relative imports of attention over rings and of ZeRO's leaf modules left
    empty: rows here are padded and on one device."""
    import logging
    import types
    source = (peers.folder("openrlhf")/"models/model.py").read_text()
    drop = ("from .ring_attn_utils", "from .utils", "from openrlhf.utils.logging_utils")
    source = "\n".join(line for line in source.splitlines() if not line.startswith(drop)).replace(
        "from openrlhf.utils.utils import convert_to_torch_dtype", "")
    module = types.ModuleType("openrlhf_model")
    vars(module).update(init_logger=logging.getLogger, set_z3_leaf_modules=lambda *a, **k: None,
                        convert_to_torch_dtype=lambda x: torch.float32,
                        gather_and_pad_tensor=None, unpad_and_slice_tensor=None)
    exec(compile(source, "openrlhf/models/model.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_reward_models_of_openrlhf(openrlhf, prefix, tmp_path):
    b = batch()
    mask = (torch.arange(18) < b.lengths[:, None]).long()
    load = lambda path, **how: openrlhf.get_llm_for_sequence_regression(str(path), "reward", param_dtype="fp32",
                                                                        attn_implementation="sdpa", **how).eval()
    model().save_pretrained(tmp_path/"base")
    torch.manual_seed(0)
    theirs = load(tmp_path/"base", init_value_head=True, value_head_prefix=prefix)
    # as train_rm writes them
    theirs.config.value_head_prefix, theirs.config.mean, theirs.config.std = prefix, .25, 2.
    theirs.save_pretrained(tmp_path/"theirs")
    raw = theirs(b.tokens, mask).detach()
    scorer = Scorer(tmp_path/"theirs", device="cpu")
    assert raw.abs().max() > .01
    assert_close(scorer.scores(b), raw, rtol=0, atol=1e-5)
    theirs.config.normalize_reward = True
    scorer.moments = stored_moments(theirs.config)
    assert_close(scorer.scores(b), (raw-.25)/2, rtol=0, atol=1e-5)
    scorer.moments = None
    assert_close(Critic(tmp_path/"theirs", device="cpu").values(b).shape, torch.Size([16, 18]))
    trained(scorer, b).normalise(b)
    scorer.save_pretrained(tmp_path/"ours")
    back = load(tmp_path/"ours", normalize_reward=True)
    # as its constructor does; transformers 5 builds on the meta device and leaves such buffers unset, in folders of its
    # own too
    back.mean[0], back.std[0] = back.config.mean, back.config.std
    assert_close(back(b.tokens, mask).detach(), scorer.scores(b), rtol=0, atol=1e-5)
    assert_close(load(tmp_path/"ours")(b.tokens, mask).detach(), raw_scores(scorer._run, b, scorer.at), rtol=0,
                 atol=1e-5)


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_critics_of_openrlhf(openrlhf, prefix, tmp_path):
    "Both ways; theirs gives the value before token t+1 in column t."
    b = batch()
    mask = (torch.arange(18) < b.lengths[:, None]).long()
    load = lambda path, **how: openrlhf.get_llm_for_sequence_regression(str(path), "critic", param_dtype="fp32",
                                                                        attn_implementation="sdpa", **how).eval()
    def values(theirs):
        return nn.functional.pad(theirs(b.tokens, action_mask=b.mask[:, 1:], attention_mask=mask), (1, 0)).detach()
    model().save_pretrained(tmp_path/"base")
    torch.manual_seed(0)
    theirs = load(tmp_path/"base", init_value_head=True, value_head_prefix=prefix)
    theirs.config.value_head_prefix = prefix
    theirs.save_pretrained(tmp_path/"theirs")
    critic = Critic(tmp_path/"theirs", lr=1e-2, device="cpu")
    assert values(theirs).abs().max() > .01
    assert_close(critic.values(b), values(theirs), rtol=0, atol=1e-5)
    # theirs goes on here, and a new one of ours goes there
    for trained in (critic, Critic(model(), lr=1e-2, device="cpu")):
        for _ in range(3): trained.step(b, returns_loss)
        trained.save_pretrained(tmp_path/"ours")
        assert_close(values(load(tmp_path/"ours")), trained.values(b), rtol=0, atol=1e-5)


def test_a_judge_that_trl_wrote(tmp_path):
    "TRL's process reward trainer writes transformers' token classifier of two labels."
    from transformers import LlamaForTokenClassification
    config = model().config
    config.num_labels = 2
    torch.manual_seed(0)
    theirs, b = LlamaForTokenClassification(config).eval(), batch()
    theirs.save_pretrained(tmp_path)
    judge = Scorer(tmp_path, device="cpu")
    assert judge.at == "steps" and judge.names is None
    assert_close(judge.scores(b)[b.steps], theirs(b.tokens).logits[b.steps].detach(), rtol=0, atol=1e-5)


def test_a_folder_without_its_trunk_is_refused(tmp_path):
    net = model()
    net.save_pretrained(tmp_path)
    weights = load_file(tmp_path/"model.safetensors") | {"score.weight": torch.ones(1, 32)}
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path/"model.safetensors", metadata=dict(format="pt"))
    with pytest.raises(ValueError, match="the weights lack 'layers.1.mlp.up_proj.weight'"):
        Scorer(tmp_path, device="cpu")


def test_a_policy_is_no_reward_model(tmp_path):
    model().save_pretrained(tmp_path)
    assert head_of(tmp_path) is None and (Scorer(tmp_path, device="cpu").scores(batch()) == 0).all()
    assert (Policy(tmp_path, value_head=True, device="cpu").values(batch()) == 0).all()


def test_a_head_sits_on_hidden_states_where_a_model_is_its_own_base():
    "Llama 4 says that it is its own base_model; a head on what it gives would sit on the logits of the vocabulary."
    from transformers import Llama4ForCausalLM, Llama4TextConfig
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    net = Llama4ForCausalLM(Llama4TextConfig(**sizes, pad_token_id=0))
    assert net.base_model is net
    policy = Policy(net, frozen=True, device="cpu")
    for wrapper in (Critic(net, device="cpu"), Scorer(net, device="cpu"), Critic(policy, device="cpu")):
        assert type(wrapper._run.module.trunk).__name__ == "Llama4TextModel"
        assert wrapper._run.module.head.in_features == 32
    assert Scorer(net, device="cpu").scores(batch()).shape == (16,)


def test_a_language_model_in_one_piece_has_no_place_for_a_head():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.zeros(8, 4)), nn.Linear(4, 8)
        def get_output_embeddings(self): return self.out
        def forward(self, tokens): return self.out(self.weight[tokens])
    with pytest.raises(TypeError, match="Whole has no part that gives hidden states"): Critic(Whole(), device="cpu")
