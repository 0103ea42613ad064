"""Policy, Critic, Scorer: one gradient however the step is cut, rows that never see each other, steps that must not
happen."""
import copy
from functools import partial

import pytest
import torch
from rlblocks import (Batch, Critic, Policy, Scorer, assert_on_policy, grpo_loss, kl_k3, masked_mean, mean_of, merge,
                      ppo_loss, token_logprobs, value_loss)
from rlblocks.models.forward import Forward
from rlblocks.models.probes import separates_rows
from rlblocks.models.step import micro_batches
from rlblocks.engines.engine import EngineSpec
from rlblocks.engines.optimizers import OptimizerSpec, adamw
from tiny import APART, apart, gradients, model, rows
from torch import nn
from torch.testing import assert_close

CUTS = [dict(micro_rows=1), dict(micro_rows=2), dict(micro_rows=3), dict(micro_rows=16), dict(micro_tokens=40),
        dict(micro_tokens=37, micro_rows=3)]


def joint(out, b):
    "Clipped surrogate, KL, entropy and value loss: every aggregation in one closure."
    old = out.logprobs.detach() - .1*b.advantages
    pg, metrics = ppo_loss(out.logprobs, old, b.advantages, b.mask, clip_high=.3, denom=b.n_tokens)
    rowwise, _ = grpo_loss(out.logprobs, old, b.ref_logprobs, b.advantages, b.mask, denom=b)
    v, more = value_loss(out.values, b.returns, b.returns*.5, b.mask, denom=b.n_tokens)
    kl = kl_k3(out.logprobs, b.ref_logprobs, b.mask)
    return pg + .3*rowwise + .1*v + .01*masked_mean(kl, b.mask, denom=b.n_tokens) - .02*masked_mean(
        out.entropy, b.mask, denom=b.n_tokens), metrics | more | dict(entropy=mean_of(out.entropy, b.mask))


def stepped(net, b, **how):
    policy = Policy(net, value_head=True, optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu", **how)
    with torch.no_grad(): policy._run.module.head.weight += .1
    found = gradients(policy)
    return found, policy.step(b, joint, entropy=True), policy


@pytest.mark.parametrize("dtype, far", [(torch.float64, 1e-10), (torch.float32, APART)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_gradient_for_every_cut(kind, dtype, far):
    "Promise 1 and LAWS 1 through the real Policy: micro-batch sizes × padded or packed × token budget."
    net, b = model(kind, dtype), rows(dtype=dtype)
    whole, metrics, _ = stepped(net, b, pack=False)
    for pack in (False, True):
        for how in CUTS:
            found, others, policy = stepped(net, b, pack=pack, **how)
            assert policy._run.layout.packed is pack
            assert (len(micro_batches(policy._run, b)) > 1 or how == dict(micro_rows=16))
            assert apart(found, whole) < far, (pack, how)
            if dtype == torch.float64:      # in float32 a token on the edge of a clip range may fall on either side
                for k in metrics:
                    assert float(others[k]) == pytest.approx(float(metrics[k]), rel=1e-9, abs=1e-9), (k, pack, how)


def test_the_gradient_is_that_of_the_textbook():
    """Not only the same however cut: the same as autograd through a plain forward pass, row by row and without any
    of our layout."""
    net, b = model(dtype=torch.float64), rows()
    policy = Policy(net, optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu")
    found = gradients(policy)
    policy.step(b, lambda out, b: ppo_loss(out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b.n_tokens))
    plain = copy.deepcopy(net)
    for i, n in enumerate(b.lengths.tolist()):
        ids = b.tokens[i:i+1, :n]
        lp = token_logprobs(plain(ids).logits, ids, temperature=b.temperature[i:i+1].double())
        (-(lp*b.advantages[i:i+1, :n])[b.mask[i:i+1, :n]].sum()/int(b.mask.sum())).backward()
    # temperature .7 is a float32 column
    assert apart(found, {f"trunk.{n}": p.grad for n, p in plain.named_parameters()}) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "mistral", "gemma"])
def test_perturbing_row_a_never_changes_row_b(kind):
    "LAWS 26, under sdpa: packed log-probs equal unpacked ones, and a change of one row reaches no other."
    net, b = model(kind), rows(dtype=torch.float32)
    assert net.config._attn_implementation == "sdpa"
    packed, padded = Policy(net, pack=True, device="cpu"), Policy(net, pack=False, device="cpu")
    before = packed.logprobs(b)
    assert_close(before, padded.logprobs(b), rtol=0, atol=1e-5)
    for row in (0, 7, 15):
        tokens = b.tokens.clone()
        tokens[row] = (tokens[row] + 3) % 30 + 2
        changed = b[list(range(16))]
        changed["tokens"] = tokens
        after = packed.logprobs(changed)
        others = torch.arange(16) != row
        assert torch.equal(after[others], before[others]), f"row {row} leaked"
        if row: assert (after[row]-before[row]).abs().max() > 1e-3


def test_a_model_that_mixes_packed_rows_is_found_out():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = nn.Embedding(32, 8), nn.Linear(8, 32)
        def forward(self, tokens, position_ids=None): return self.out(self.emb(tokens).cumsum(1))
    with pytest.raises(ValueError, match="packed rows of Leaky see each other"): Policy(Leaky, pack=True, device="cpu")
    assert not Policy(Leaky, device="cpu")._run.layout.packed
    eager = model(attn_implementation="eager")
    assert separates_rows(Forward(eager.eval()), "cpu")


def test_a_plain_module_is_a_policy():
    class GRU(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.rnn, self.out = nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 32)
        def forward(self, tokens): return self.out(self.rnn(self.emb(tokens))[0])
    torch.manual_seed(0)
    net, b = GRU().double(), rows()
    policy = Policy(net, lr=1e-2, device="cpu", micro_rows=3)
    lp = policy.logprobs(b)
    want = token_logprobs(net(b.tokens), b.tokens, temperature=b.temperature.double())
    assert_close(lp[b.mask], want[b.mask].detach(), rtol=1e-6, atol=1e-6)
    assert (lp[~b.mask] == 0).all() and next(net.parameters()) is not next(policy._run.module.parameters())
    losses = [float(policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))["loss"])
              for _ in range(20)]
    # 0.67, 0.66, 0.64, 0.65, 0.62 for seeds 0 to 4, in float64; seed 0 on two threads the same
    assert losses[-1] < .8*losses[0]
    with pytest.raises(TypeError, match="no get_output_embeddings"): Policy(net, value_head=True)
    with pytest.raises(TypeError, match="no save_pretrained"): policy.save_pretrained("x")
    with pytest.raises(TypeError, match="a int"): Policy(3)
    with pytest.raises(TypeError, match="made a int"): Policy(lambda: 3)


def test_only_chosen_positions_reach_the_head():
    "The prompt's logits are never computed."
    net, b = model(), rows(dtype=torch.float32)
    seen = []
    policy = Policy(net, device="cpu", micro_rows=4)
    policy._run.module.trunk.lm_head.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    late = b[list(range(16))]
    late["mask"] = b.mask & (torch.arange(18) >= b.lengths[:, None] - 2)
    policy.logprobs(late)
    cells = sum(s[0]*s[1] for s in seen)
    assert int(late.mask.sum()) <= cells < .6*16*18


@pytest.mark.parametrize("pack", [False, True])
def test_gradient_checkpointing_changes_memory_and_nothing_else(pack):
    "Dropout in the config stays off, also where a layer passes its own number to a functional dropout."
    net, b = model(dtype=torch.float64, attention_dropout=.5), rows()
    plain, _, _ = stepped(net, b, pack=pack, micro_rows=5)
    recomputed, _, policy = stepped(net, b, pack=pack, micro_rows=5, engine=EngineSpec(checkpointing=True))
    layers = [m for m in policy._run.module.modules() if getattr(m, "gradient_checkpointing", False)]
    assert layers and apart(recomputed, plain) < 1e-12


def test_the_ratio_of_the_first_update_is_one():
    """LAWS 29: scored, then trained on through another layout and with dropout in the config; a policy in train mode
    trips the guard."""
    b = rows(dtype=torch.float32)
    policy = Policy(model(attention_dropout=.1), lr=1e-6, device="cpu", pack=True)
    b["old_logprobs"] = Policy(model(attention_dropout=.1), device="cpu", pack=False, micro_rows=3).logprobs(b)
    seen = []
    def loss(out, b):
        seen.append(assert_on_policy(out.logprobs, b.old_logprobs, b.mask, tol=1e-4))
        return ppo_loss(out.logprobs, b.old_logprobs, b.advantages, b.mask, denom=b.n_tokens)
    metrics = policy.step(b, loss)
    assert max(seen) < 1e-4 and float(metrics["clip_frac"]) == 0
    policy._run.module.trunk.train()
    with pytest.raises(AssertionError, match="dropout"): policy.step(b, loss)


def test_bf16_ratio_is_near_one():
    "LAWS 29 in bf16: the 95th percentile of |ratio − 1| stays under 0.02."
    b = rows(dtype=torch.float32)
    policy = Policy(model(), lr=1e-6, device="cpu", engine=EngineSpec(dtype=torch.bfloat16), pack=True)
    lp = Policy(model(), device="cpu", engine=EngineSpec(dtype=torch.bfloat16), pack=False, micro_rows=3).logprobs(b)
    assert lp.dtype == torch.float32
    assert_on_policy(policy.logprobs(b), lp, b.mask, tol=.02, share=.95)


def test_fp32_master_weights():
    "LAWS 30: a model that comes in bf16 trains in fp32, and a hundred Adam steps at 1e-6 move what fp32 moves."
    b = rows(dtype=torch.float32)
    policy = Policy(model(dtype=torch.bfloat16), lr=1e-6, device="cpu", engine=EngineSpec(dtype=torch.bfloat16))
    before = {n: p.detach().clone() for n, p in policy._run.module.named_parameters()}
    assert all(p.dtype == torch.float32 for p in before.values())
    for _ in range(100): policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))
    moved = torch.cat([(p - before[n]).abs().flatten()
                       for n, p in policy._run.module.named_parameters() if "embed" not in n])
    assert (moved > 1e-6).float().mean() > .99
    assert all(s["exp_avg"].dtype == torch.float32 for s in policy._run.model.optimizer.state.values())


def test_all_masked_steps_are_skipped_and_counted():
    "LAWS 13: nothing moves, no moment, no version; a row without chosen tokens among others is no error."
    policy, b = Policy(model(dtype=torch.float64), lr=1e-2, device="cpu"), rows()
    def loss(out, b): return ppo_loss(out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b.n_tokens)
    nothing = b[list(range(16))]
    nothing["mask"] = torch.zeros_like(b.mask)
    before = copy.deepcopy(policy.state_dict())
    metrics = merge(policy.step(nothing, loss), policy.step(b[[]], loss))
    assert float(metrics["skipped"]) == 1 and float(metrics["loss"]) == 0
    assert policy.version == 0 and not policy.state_dict()["optimizer"]["state"]
    for k, v in before["module"].items(): assert torch.equal(v, policy.state_dict()["module"][k])
    half = b[list(range(16))]
    half["mask"] = b.mask & (torch.arange(16) < 8)[:, None]
    found = gradients(policy)
    one = merge(metrics, policy.step(half, loss))
    assert float(one["skipped"]) == pytest.approx(2/3) and policy.version == 1
    alone = Policy(model(dtype=torch.float64), lr=1e-2, device="cpu")
    want = gradients(alone)
    alone.step(b[:8], loss)
    assert apart(found, want) < 1e-12       # the masked rows are in no denominator


def test_truncated_rows_leave_the_denominator():
    "LAWS 13: two kept rows of 4 tokens and a truncated one of 8, loss 1 a token → 1.0, not 0.5."
    T = 10
    b = Batch(tokens=torch.ones(3, T, dtype=torch.long), lengths=torch.tensor([5, 5, 9]),
              mask=(torch.arange(T) >= 1) & (torch.arange(T) < torch.tensor([5, 5, 9])[:, None]))
    def one_each(out, b): return masked_mean(out.logprobs*0 + 1, b.mask, denom=b.n_tokens), {}
    assert float(Policy(model(),
                        device="cpu").step(b[torch.tensor([True, True, False])], one_each)["loss"]) == pytest.approx(1.)


def test_a_local_mean_is_caught_and_changes_nothing():
    policy, b = Policy(model(), lr=1e-2, device="cpu"), rows(dtype=torch.float32)
    before = copy.deepcopy(policy.state_dict()["module"])
    def local(out, b): return ppo_loss(out.logprobs, out.logprobs.detach() - .1, b.advantages, b.mask)
    with pytest.raises(ValueError, match="not a sum over rows.*pass denom=b "): policy.step(b, local)
    def centred(out, b):
        return -masked_mean(out.logprobs*(b.advantages - b.advantages.mean()), b.mask, denom=b.n_tokens), {}
    with pytest.raises(ValueError, match="batch statistics before the step"): policy.step(b, centred)
    assert policy.version == 0 and all(torch.equal(v, before[k]) for k, v in policy.state_dict()["module"].items())
    assert all(p.grad is None for p in policy._run.module.parameters())
    policy.step(b, lambda out, b: ppo_loss(out.logprobs, out.logprobs.detach() - .1, b.advantages, b.mask,
                                           denom=b.n_tokens))
    assert policy.version == 1


def test_a_local_mean_is_caught_wherever_it_can_show():
    """One unit a micro-batch, a first micro-batch that teaches nothing, a good loss of the same class or code
    before: none of them vouches for it."""
    b = rows(dtype=torch.float32)
    flat = b[list(range(16))]
    # the longest rows come first
    flat["advantages"] = torch.where(torch.arange(16)[:, None] >= 12, 0., b.advantages)
    def make(local):
        def loss(out, b):
            return ppo_loss(out.logprobs, out.logprobs.detach() - .1, b.advantages, b.mask,
                            denom=None if local else b.n_tokens)
        return loss
    def block(local, out, b): return make(local)(out, b)
    for how, data in ((dict(micro_rows=1), b), (dict(micro_rows=4), flat), (dict(micro_rows=3), b)):
        policy = Policy(model(), lr=1e-3, device="cpu", **how)
        for good, bad in ((make(False), make(True)), (partial(block, False), partial(block, True))):
            policy.step(data, good)
            with pytest.raises(ValueError, match="not a sum over rows"): policy.step(data, bad)
        pairs_ = data[list(range(16))]
        pairs_["unit"] = torch.arange(16)//2
        if how != dict(micro_rows=1): policy.step(pairs_, make(False))


def test_learning_rates_and_frozen_parts_are_the_users():
    net, b = model(), rows(dtype=torch.float32)
    for name, p in net.named_parameters(): p.requires_grad_("lm_head" in name)
    def loss(out, b): return -masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
    policy = Policy(net, device="cpu", optimizer=OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=.1),
                                                               schedule=lambda v: .5, max_norm=None))
    before = {n: p.detach().clone() for n, p in policy._run.module.trunk.named_parameters()}
    found = gradients(policy)
    assert float(policy.step(b, loss)["lr"]) == pytest.approx(.05)
    after = dict(policy._run.module.trunk.named_parameters())
    assert [n for n in before if not torch.equal(before[n], after[n])] == ["lm_head.weight"]
    assert_close(after["lm_head.weight"], before["lm_head.weight"] - .05*found["trunk.lm_head.weight"])


def test_half_precision_models_compute_alike():
    """A policy (fp32 master weights) and a frozen reference of one bf16 checkpoint give the same log-probs; heads
    work on both."""
    net, b = model(dtype=torch.bfloat16), rows(dtype=torch.float32)
    policy, ref = Policy(net, device="cpu", lr=1e-3), Policy(net, frozen=True, device="cpu")
    assert_on_policy(policy.logprobs(b), ref.logprobs(b), b.mask, tol=5e-3)
    for wrapper in (Critic(net, frozen=True, device="cpu"),
                    Critic(net, engine=EngineSpec(low_precision=True), device="cpu"),
                    Policy(net, value_head=True, engine=EngineSpec(low_precision=True), device="cpu")):
        assert wrapper.values(b).dtype == torch.float32


def test_a_reward_model_keeps_its_head(tmp_path):
    from transformers import LlamaForSequenceClassification
    config = model().config
    config.num_labels = 1
    torch.manual_seed(0)
    net, b = LlamaForSequenceClassification(config).eval(), rows(dtype=torch.float32)
    want = torch.stack([net.score(net.model(b.tokens[i:i+1, :n]).last_hidden_state[0, -1])[0]
                        for i, n in enumerate(b.lengths.tolist())]).detach()
    net.save_pretrained(tmp_path)
    for source in (net, str(tmp_path)):
        assert_close(Scorer(source, device="cpu").scores(b.drop("mask")), want, rtol=0, atol=1e-5)
    config.num_labels = 3
    # a Scorer has as many outputs
    with pytest.raises(ValueError, match="a head of 3 numbers; 1 is wanted"):
        Critic(LlamaForSequenceClassification(config), device="cpu")


def test_two_losses_in_one_step():
    "PTX: a second (batch, loss) pair adds its gradient to the same optimizer step."
    net, b, other = model(dtype=torch.float64), rows(), rows(B=6, seed=5)
    def pg(out, b): return ppo_loss(out.logprobs, out.logprobs.detach(), b.advantages, b.mask, denom=b.n_tokens)
    def ptx(out, b): return -.5*masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
    def run(*jobs):
        policy = Policy(net, optimizer=adamw(lr=1e-3, max_norm=1e9), device="cpu")
        found = gradients(policy)
        policy.step(*jobs[0], *jobs[1:])
        assert policy.version == 1
        return found
    both, first, second = run((b, pg), (other, ptx)), run((b, pg)), run((other, ptx))
    assert apart(both, {n: first[n] + second[n] for n in first}) < 1e-12


def test_units_stay_in_one_micro_batch():
    b = rows(dtype=torch.float32)
    b["unit"] = torch.arange(16)//2
    seen = []
    def loss(out, b):
        seen.append(b.unit.tolist())
        return masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}
    policy = Policy(model(), device="cpu", micro_rows=2)
    policy.step(b, loss)
    # in every micro-batch, and in every piece that the split check makes of one
    assert all(u.count(x) == 2 for u in seen for x in u)

@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma"])
def test_a_saved_reward_model_is_a_classifier_of_transformers(tmp_path, kind):
    from transformers import AutoModelForSequenceClassification
    b = rows(dtype=torch.float32)
    scorer = Scorer(model(kind), lr=1e-2, device="cpu")
    scorer.step(b, lambda out, b: (((out.scores - b.lengths/10.)**2).sum()/b.n_rows, {}))
    scorer.save_pretrained(tmp_path)
    want, plain = scorer.scores(b), AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert want.abs().min() > 1e-3
    assert_close(Scorer(str(tmp_path), device="cpu").scores(b), want, rtol=0, atol=1e-6)
    # pad_token_id is 0, and no row holds it
    padded = torch.where(torch.arange(b.width) < b.lengths[:, None], b.tokens, 0)
    with torch.no_grad():
        assert_close(plain(padded, attention_mask=(padded != 0).long()).logits[:, 0], want, rtol=0, atol=1e-5)
    # PPO's critic may start from it
    torch.testing.assert_close(Critic(str(tmp_path), device="cpu").values(b).abs().sum() > 0, torch.tensor(True))


def test_a_classifier_learns_the_padding_from_the_tokenizer(tmp_path):
    "Without a pad id transformers reads a padded row at its very end, or refuses the batch."
    import json
    class Pads:
        pad_token_id = 5
        def save_pretrained(self, path): pass
    for pad in (None, 0):
        Scorer(model(pad_token_id=pad), tokenizer=Pads(), device="cpu").save_pretrained(tmp_path)
        assert json.loads((tmp_path/"config.json").read_text())["pad_token_id"] == (5 if pad is None else 0)


def test_a_scorer_without_a_classifier_says_how_to_keep_it(tmp_path):
    net = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 1), torch.nn.Flatten(1))
    for mine in (torch.nn.Embedding(32, 8), net):
        with pytest.raises(TypeError, match="transformers has no classifier for .*torch.save"):
            Scorer(mine, device="cpu").save_pretrained(tmp_path)


def test_pairs_do_not_move_a_new_reward_head_sideways():
    """The two scores of a pair shift alike: a bias has no gradient but rounding, which Adam would blow up to full
    steps. A critic's has no place in the files that others read."""
    assert Scorer(model(), device="cpu")._run.module.head.bias is None
    assert Critic(model(), device="cpu")._run.module.head.bias is None
    assert Critic(model(), bins=[0., 1.], device="cpu")._run.module.head.linear.bias is not None
    assert Policy(model(), value_head=True, device="cpu")._run.module.head.bias is not None


def test_critic_and_scorer_learn_and_read_where_they_say():
    net, b = model(dtype=torch.float64), rows()
    critic = Critic(net, lr=1e-2, device="cpu", micro_rows=3)
    assert (critic.values(b) == 0).all()
    for _ in range(30):
        done = critic.step(b, lambda out, b: value_loss(out.values, b.returns*0, b.returns, b.mask, clip=100.,
                                                        denom=b.n_tokens))
    # 0.11, 0.05, 0.09, 0.06, 0.04 of it for seeds 0 to 4; seed 0 on two threads the same
    assert float(done["value_error"]) < .5*float((b.returns[b.mask]**2).mean())
    values = critic.values(b)
    assert (values[~b.mask] == 0).all() and (values[b.mask] != 0).all()
    later = b[list(range(16))]
    later["tokens"] = torch.where(torch.arange(18) >= 9, (b.tokens + 1) % 30 + 2, b.tokens)
    # V before token t knows only what came before t
    assert_close(critic.values(later)[:, :10], values[:, :10], rtol=0, atol=1e-12)
    scorer = Scorer(net, lr=1e-2, device="cpu", micro_rows=3)
    for _ in range(40): done = scorer.step(b, lambda out, b: (((out.scores - b.lengths/10.)**2).sum()/b.n_rows, {}))
    scores = scorer.scores(b)
    assert float(done["loss"]) < .02                        # 0.0008, 0.0037, 0.0020, 0.0008, 0.0004
    padded = Batch.cat([b, rows(B=1, T=30)])[:16]
    # the last real token, however wide the batch
    assert_close(scorer.scores(padded), scores, rtol=0, atol=1e-12)
    last = b[list(range(16))]
    tokens = b.tokens.clone()
    # an end-of-sequence id inside or at the end changes the score, not where it is read
    tokens[torch.arange(16), b.lengths-1] = 1
    last["tokens"] = tokens
    assert (scorer.scores(last) != scores).all()


def test_saved_models_load_with_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM
    policy = Policy(model(), value_head=True, lr=1e-2, device="cpu")
    b = rows(dtype=torch.float32)
    policy.step(b, lambda out, b: (-masked_mean(out.logprobs, b.mask, denom=b.n_tokens), {}))
    policy.save_pretrained(tmp_path/"a"/"b")
    again = Policy(str(tmp_path/"a"/"b"), device="cpu")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path/"a"/"b")).__name__ == "LlamaForCausalLM"
    assert_close(again.logprobs(b), policy.logprobs(b), rtol=0, atol=1e-6)
    (tmp_path/"file").write_text("in the way")
    with pytest.raises(OSError, match="Policy: cannot save to .*file"): policy.save_pretrained(tmp_path/"file")


def test_what_was_not_asked_for_says_how_to():
    policy, b = Policy(model(), device="cpu"), rows(dtype=torch.float32)
    for name, says in (("entropy", "entropy=True"), ("values", "value_head=True"),
                       ("advantages", "there are logprobs")):
        with pytest.raises(AttributeError, match=says):
            policy.step(b, lambda out, b, name=name: (getattr(out, name).sum(), {}))


def uneven_rows(*lengths, mask=True, seed=0):
    L, T, g = torch.tensor(lengths), max(2, *lengths), torch.Generator().manual_seed(seed)
    chosen = (torch.arange(T) >= 1) & (torch.arange(T) < L[:, None])
    return Batch(tokens=torch.randint(2, 32, (len(L), T), generator=g), lengths=L,
                 **(dict(mask=chosen) if mask else {}))


@pytest.mark.parametrize("how", [dict(), dict(micro_rows=1), dict(micro_tokens=7), dict(pack=False),
                                 dict(pack=False, micro_rows=1)])
def test_empty_rows_take_part_in_everything_but_scores(how):
    b, loss = uneven_rows(5, 0, 1, 7, 0), lambda out, b: (masked_mean(-out.logprobs, b.mask, denom=b.n_tokens), {})
    policy, full = Policy(model(dtype=torch.float64), lr=0., device="cpu", **how), [0, 3]
    want = torch.zeros(5, 7, dtype=torch.float64)
    want[full] = Policy(model(dtype=torch.float64), pack=False, device="cpu").logprobs(b[full])
    assert_close(policy.logprobs(b), want, rtol=0, atol=1e-12)
    found = gradients(policy)
    value = float(policy.step(b, loss)["loss"])
    other = Policy(model(dtype=torch.float64), lr=0., device="cpu", pack=False)
    wanted = gradients(other)
    assert value == pytest.approx(float(other.step(b[full], loss)["loss"]), rel=1e-12) and apart(found, wanted) < 1e-10
    for n in (2, 6):
        for part in b.parts(n): policy.logprobs(part)
    # nothing but empty rows
    with pytest.raises(ValueError, match="Policy: there is nothing to read"): policy.logprobs(b[[1, 4]])


@pytest.mark.parametrize("pack", [None, False])
def test_the_score_of_an_empty_row_is_refused_by_number_before_anything_runs(pack):
    scorer, calls = Scorer(model(), device="cpu", pack=pack, micro_rows=1), []
    scorer._run.module.register_forward_pre_hook(lambda *_: calls.append(1))
    for lengths in ((5, 3, 0), (5, 0, 3), (0,)):
        b, at = uneven_rows(*lengths), lengths.index(0)
        with pytest.raises(ValueError, match=f"Scorer: row {at} has no token"): scorer.scores(b)
        with pytest.raises(ValueError, match=f"Scorer: row {at} has no token"):
            scorer.step(b, lambda out, b: (out.scores.sum()/b.n_rows, {}))
    parts = uneven_rows(5, 3, 0).parts(2)          # on ranks all of them raise: tests/test_ranks.py
    with pytest.raises(ValueError, match="Scorer: its row 1 has no token"):
        scorer.scores(next(p for p in parts if not p.lengths.all()))
    assert not calls
    assert scorer.scores(uneven_rows(5, 1, 3)).shape == (3,)


def test_clear_errors():
    policy, b = Policy(model(), lr=1e-3, device="cpu", micro_tokens=12), rows(dtype=torch.float32)
    # rows longer than the budget
    with pytest.raises(ValueError, match="^Policy: row .* the limits are micro_tokens="): policy.logprobs(b)
    policy = Policy(model(), lr=1e-3, device="cpu")
    with pytest.raises(ValueError, match="no column 'lengths'"): policy.logprobs(b.drop("lengths"))
    with pytest.raises(ValueError, match="values need"): policy.values(b)
    with pytest.raises(RuntimeError, match="frozen"): Policy(model(), frozen=True, device="cpu").step(b, joint)
    with pytest.raises(TypeError, match="must return"): policy.step(b, lambda out, b: out.logprobs.sum())
    with pytest.raises(ValueError, match="does not depend"): policy.step(b, lambda out, b: (torch.zeros(()), {}))
    with pytest.raises(ValueError, match="'loss' is the step's own"):
        policy.step(b, lambda out, b: (masked_mean(out.logprobs, b.mask, denom=b.n_tokens),
                                       dict(loss=mean_of(out.logprobs, b.mask))))
    with pytest.raises(ValueError, match="that of a frozen model"):
        policy.load_state_dict(Policy(model(), frozen=True, device="cpu").state_dict())
    with pytest.raises(ValueError, match="cut in 3, but 1 rank"): policy.step(b.parts(3)[0], joint)
    with pytest.raises(FloatingPointError, match="nan at version 0"):
        policy.step(b, lambda out, b: (masked_mean(out.logprobs, b.mask, denom=b.n_tokens)*float("nan"), {}))
    b["top_p"] = torch.full((16,), .9)
    with pytest.raises(ValueError, match="no column 'support'"): policy.logprobs(b)
    with pytest.raises(ValueError, match="engine 'zero9'"): Policy(model(), engine="zero9")


def test_a_dtype_that_is_text_is_refused_by_name():
    with pytest.raises(TypeError, match="dtype=torch.bfloat16"):
        Policy(model(), engine=EngineSpec(dtype="bfloat16"), device="cpu")


@pytest.mark.parametrize("Wrapper, call", [(Policy, "logprobs"), (Policy, "step"), (Critic, "values"),
                                           (Scorer, "scores"), (Scorer, "step")])
def test_a_row_beyond_the_learned_positions_is_named(Wrapper, call):
    "GPT-2 has a vector for each place: a longer row is an index error on a CPU and the end of the process on a GPU."
    b, wrapper = rows(B=6, T=20), Wrapper(model("gpt2", n_positions=6), device="cpu")
    wanted = f"{Wrapper.__name__}: row 5 has 7 tokens, beyond the 6 positions that GPT2.* has learned"
    with pytest.raises(ValueError, match=wanted):
        wrapper.step(b, lambda out, b: (0., {})) if call == "step" else getattr(wrapper, call)(b)
    if call != "step": getattr(wrapper, call)(b[b.lengths <= 6])


def test_rotary_positions_have_no_end():
    assert Policy(model(max_position_embeddings=6), device="cpu").logprobs(rows()).isfinite().all()


def test_another_default_dtype_changes_no_number():
    "A notebook that computes in float64 everywhere."
    b, net = rows(dtype=torch.float32), model()
    def read():
        policy, critic = Policy(net, device="cpu", value_head=True), Critic(net, device="cpu")
        return (policy._run.layout.packed, policy._run.layout.transform, policy.logprobs(b), policy.hidden(b),
                critic.values(b), Scorer(net, device="cpu").scores(b))
    wanted = read()
    torch.set_default_dtype(torch.float64)
    try: found = read()
    finally: torch.set_default_dtype(torch.float32)
    for x, y in zip(found, wanted, strict=True):
        assert_close(x, y, rtol=0, atol=0) if isinstance(x, torch.Tensor) else x == y
    assert found[:2] == wanted[:2]
