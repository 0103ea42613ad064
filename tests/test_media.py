"Rows with images and audio through the same loops: models that see or hear, read alike by sampler and trainer."
import pickle

import pytest
import tiny_media as tiny
import torch
from conftest import rarely
from forked import on_ranks
from rlblocks import (
    Batch, Critic, Demonstrations, Grader, Policy, Preferences, Prompts, Rollout, Scorer, adamw, group_advantages, here,
    loop_from, masked_mean, merge, plan, ppo_loss,
)
from rlblocks.data.media import TYPE_IDS, FeatureCache, bytes_of, features_of, is_processor, spare_rows
from rlblocks.models.forward import Forward
from rlblocks.models.multimodal import line_arguments, parts_of, placeholder_ids
from rlblocks.models.probes import separates_rows
from rlblocks.models.step import layout_of
from rlblocks.placement.memory import Live
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification


every_kind = pytest.mark.parametrize("kind", tiny.KINDS)


def prompts(kind, n=8):
    return Prompts([tiny.row(kind, i, answer=i % 4) for i in range(n)], tiny.processor(kind), seed=1)


def grpo(out, b):
    advantages = torch.where(b.mask, b.advantages[:, None], 0.)
    return ppo_loss(out.logprobs, b.rollout_logprobs, advantages, b.mask, denom=b)


def sampled(kind, net, rows, **how):
    r = Rollout(net, tokenizer=tiny.processor(kind), max_tokens=6, device="cpu")
    b = r.generate(rows, group_size=2, seed=3, **how)
    b["scores"] = torch.tensor([float(len(set(c))) for c in b.completion])
    b["advantages"] = group_advantages(b.scores, b.group)
    return r, b


def gradient(net, b, **how):
    policy = Policy(net, device="cpu", lr=0., **how)
    policy._run.model.apply = lambda **_: torch.zeros(())      # the sum stays
    policy.step(b, grpo)
    return {n: p.grad.clone() for n, p in policy._run.module.named_parameters() if p.grad is not None}


def near(found, want, by=1e-5):
    largest = max(float(x.abs().max()) for x in want.values())
    for name, x in want.items():
        assert (found[name] - x).abs().max() <= by*max(float(x.abs().max()), 1e-3*largest), name


@every_kind
def test_the_loop_of_the_tutorial_runs_unchanged(kind, root):
    loop = loop_from(f"{root}/tutorials/grpo.ipynb:grpo")
    def reward(completions, answer, **_): return [len(set(c)) + a/4 for c, a in zip(completions, answer, strict=True)]
    rows = list(loop(here, prompts(kind), reward, model=tiny.model(kind), tokenizer=tiny.processor(kind), lr=1e-3,
                     steps=2, prompts=4, group_size=4, minibatches=2, max_tokens=6))
    assert len(rows) == 2 and all(0 < float(r["grad_norm"]) < 100 for r in rows)


@every_kind
def test_sampler_and_trainer_agree_and_the_medium_matters(kind):
    net = tiny.model(kind)
    rollout, b = sampled(kind, net, prompts(kind).take(6))
    policy = Policy(net, device="cpu")
    found = policy.logprobs(b)
    assert rollout.sampler.cached and (found - b.rollout_logprobs)[b.mask].abs().max() < 1e-5
    other = b.with_columns(b.columns | dict(media=b.media[2:] + b.media[:2]))
    assert (policy.logprobs(other) - found)[b.mask].abs().max() > 1e-2
    rerun = Rollout(net, tokenizer=tiny.processor(kind), max_tokens=6, device="cpu")
    rerun.sampler.cached = False
    assert_close(rerun.generate(prompts(kind).take(6), group_size=2, seed=3).rollout_logprobs, b.rollout_logprobs,
                 atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", tiny.AXES)
def test_sampler_and_trainer_agree_behind_a_video(kind):
    "Its last frame can have a later position than the text behind it, from which an answer goes on."
    net = tiny.model(kind)
    rows = Prompts([tiny.video_row(kind, *numbers) for numbers in ((), (0,), (1, 2))], tiny.processor(kind)).take(3)
    rollout, b = sampled(kind, net, rows)
    assert rollout.sampler.cached
    assert (Policy(net, device="cpu").logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-5


@every_kind
def test_rows_with_none_one_and_three_are_one_batch(kind):
    "Log-probs and gradients are the same however the rows are ordered and cut."
    net = tiny.model(kind)
    rows = [tiny.row(kind, text="blind"), tiny.row(kind, 0), tiny.row(kind, 1, 2, 3), tiny.row(kind, 2, text="longer")]
    b = sampled(kind, net, Prompts(rows, tiny.processor(kind), shuffle=False).take(4))[1]
    assert [0 if m is None else len(m.sources) for m in b.media[::2]] == [0, 1, 3, 1]
    policy, order = Policy(net, device="cpu"), torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    found, want = policy.logprobs(b), gradient(net, b)
    assert_close(Policy(net, device="cpu", micro_rows=1).logprobs(b), found, atol=1e-5, rtol=0)
    assert_close(policy.logprobs(b[order]), found[order], atol=1e-5, rtol=0)
    near(gradient(net, b[order]), want)
    near(gradient(net, b, micro_rows=3), want)
    towers = parts_of(policy._run.module.trunk)["tower"]
    assert any(x.any() for n, x in want.items() if n.removeprefix("trunk.").startswith(tuple(towers)))


@every_kind
def test_packed_rows_are_those_alone(kind):
    "On one line, a group's prompt and its images once; Gemma 3's images attend both ways, so its rows are padded."
    net = tiny.model(kind)
    rows = [tiny.row(kind, text="blind"), *(tiny.row(kind, *some) for some in ((1, 2, 3), (0,), (2,), (3,)))]
    b = sampled(kind, net, Prompts(rows, tiny.processor(kind), shuffle=False).take(5))[1]
    b["group"] = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2, 2])        # other images in a group: they are not shared
    alone, policy = Policy(net, device="cpu", micro_rows=1, pack=False), Policy(net, device="cpu")
    assert_close(policy.logprobs(b), alone.logprobs(b), atol=1e-5, rtol=0)
    near(gradient(net, b), gradient(net, b, pack=False))
    layout, why = layout_of(policy._run, b), policy._run.media[(tiny.part(kind),)]
    assert policy._run.layout.packed and layout.packed == (kind != "gemma3") == (not why)
    if why:
        with pytest.raises(ValueError, match="pack=True, but packed rows of Gemma3.* with image come to other numbers"):
            Policy(net, device="cpu", pack=True).logprobs(b)
    n = []
    policy._run.module.trunk.register_forward_pre_hook(lambda _, ids: n.append(ids[0].numel()))
    policy.logprobs(b[:4] if kind == "gemma3" else b[2:4])
    own = b.lengths[2:4].sum() - b.prompt_lengths[2]
    assert n == [own] or why, "the images of a group are there once"


@pytest.mark.parametrize("kind", tiny.AXES)
def test_positions_of_packed_rows_have_four_axes(kind, monkeypatch):
    "transformers tells rows on a line apart by the first; of three axes it makes no mask, and the proof says so."
    net, b = tiny.model(kind), prompts(kind).take(2)
    def proved(): return separates_rows(Forward(net), "cpu", spare=spare_rows(b.columns))
    assert proved()
    def three(*args): return (found := line_arguments(*args)) | dict(position_ids=found["position_ids"][1:])
    monkeypatch.setattr("rlblocks.models.forward.line_arguments", three)
    assert not proved()


@every_kind
def test_a_sampled_placeholder_ends_the_row_and_is_scored(kind):
    net = tiny.model(kind)
    odd = placeholder_ids(net)[0]
    head = net.get_output_embeddings()
    with torch.no_grad(): head.weight[odd] = 3*head.weight.abs().max()*torch.sign(head.weight.mean(0))
    b = sampled(kind, net, prompts(kind).take(6))[1]
    ends = [t[n-1] == odd for t, n in zip(b.tokens.tolist(), b.lengths.tolist(), strict=True)]
    if not any(ends): pytest.skip("no row drew it")
    assert (Policy(net, device="cpu").logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-5


@every_kind
def test_a_turn_more_goes_on_with_the_same_medium(kind):
    net, words = tiny.model(kind), tiny.tokenizer(kind)
    rollout, b = sampled(kind, net, prompts(kind).take(4))
    over = [t[n-1] in placeholder_ids(net) for t, n in zip(b.tokens.tolist(), b.lengths.tolist(), strict=True)]
    more = rollout.extend(b.drop("scores", "advantages"), [None if x else words.encode("\nwhy?") for x in over])
    assert (more.lengths > b.lengths).any() and more.media == b.media
    assert (Policy(net, device="cpu").logprobs(more) - more.rollout_logprobs)[more.mask].abs().max() < 1e-5


def test_sources_are_held_once_and_travel_once():
    kind = "llava"
    rows = [tiny.row(kind, *([i % 8] if i < 56 else [0, i % 8]), text=str(i)) for i in range(64)]
    data = Prompts(rows, tiny.processor(kind), shuffle=False)
    b = data.take(64)
    assert len({id(s) for m in b.media for s in m.sources}) == 8 and len({id(m) for m in b.media}) == 16
    assert len(pickle.dumps(b.media)) < bytes_of(b.media) + 5000
    assert b.media[0].images[0].size == (56, 56)


def test_the_cache_of_features_is_bounded():
    cache, made = FeatureCache(n_bytes=100), []
    def make(i):
        made.append(i)
        return dict(x=torch.zeros(10))      # 40 bytes
    for i in (0, 1, 2, 1, 0): cache.get((i,), lambda i=i: make(i))
    assert made == [0, 1, 2, 0] and cache.held <= 100


def test_data_resumes_and_other_media_are_other_data():
    kind = "llava"
    data, again = prompts(kind), prompts(kind)
    data.take(3)
    again.load_state_dict(data.state_dict())
    assert again.take(2).tokens.equal(data.take(2).tokens)
    other = Prompts([tiny.row(kind, i + 1, answer=i % 4) for i in range(8)], tiny.processor(kind), seed=1)
    with pytest.raises(ValueError, match="resume with the same rows"): other.load_state_dict(data.state_dict())


def test_blind_readers_are_refused():
    "A tokenizer in the processor's place, and a model that cannot see."
    rows = [tiny.row("llava", 0)]
    with pytest.raises(ValueError, match="row 0 .*a part of type 'image', and .* reads text alone; give the processor"):
        Prompts(rows, tiny.tokenizer("llava"))
    with pytest.raises(ValueError, match="the column 'images', and"):
        Prompts([dict(prompt="<image>", images=[tiny.medium("llava", 0)])], tiny.tokenizer("llava"))
    with pytest.raises(ValueError, match="row 0 .*a message has one image more than the row's column 'images'"):
        Prompts([dict(prompt=[dict(role="user", content=[dict(type="image")])])], tiny.processor("llava"))
    with pytest.raises((ValueError, OSError), match="nowhere.png"):
        Prompts([dict(prompt="<image>", images=["nowhere.png"])], tiny.processor("llava"))
    import tiny as plain
    b = prompts("llava").take(2)
    b["mask"] = (torch.arange(b.tokens.shape[1]) > 3) & (torch.arange(b.tokens.shape[1]) < b.lengths[:, None])
    with pytest.raises(ValueError, match="LlamaForCausalLM takes no pixel_values: the rows hold media that it cannot"):
        Policy(plain.model(vocab_size=300), device="cpu").logprobs(b)


@every_kind
def test_a_folder_brings_its_processor(kind, tmp_path):
    net = tiny.model(kind)
    net.save_pretrained(tmp_path)
    tiny.processor(kind).save_pretrained(tmp_path)
    policy, b = Policy(str(tmp_path), device="cpu"), sampled(kind, net, prompts(kind).take(4))[1]
    assert type(policy._run.module.trunk) is type(net) and policy.tokenizer.tokenizer is not None
    assert_close(policy.logprobs(b), Policy(net, device="cpu").logprobs(b))
    policy.save_pretrained(tmp_path/"out")
    assert_close(Policy(str(tmp_path/"out"), device="cpu").logprobs(b), policy.logprobs(b))
    assert (tmp_path/"out"/"processor_config.json").exists()


@pytest.mark.long
@every_kind
def test_it_learns_what_cannot_be_had_blind(kind, root):
    "Four colours or tones, one token to name them: by guessing a quarter is right."
    loop = loop_from(f"{root}/tutorials/grpo.ipynb:grpo")
    data = Prompts([tiny.row(kind, i, answer=i % 4) for i in range(64)], tiny.processor(kind), seed=1)
    def reward(completions, answer, **_):
        return [float(bool(c) and sum(c.encode("utf8", "replace")) % 4 == a)
                for c, a in zip(completions, answer, strict=True)]
    how = dict(steps=70, prompts=16, group_size=8, minibatches=2, max_tokens=1, kl_coef=0., lr=3e-3)
    rows = list(loop(here, data, reward, model=tiny.model(kind), tokenizer=tiny.processor(kind), **how))
    assert sum(r["reward"] for r in rows[-10:])/10 >= .6


# -- ranks: one of them has rows of text alone
def on_rank(rank, world, kind, engine, folder):
    torch.set_num_threads(1)
    b = torch.load(folder/"rows.pt", weights_only=False)
    policy = Policy(tiny.model(kind), device="cpu", engine=engine, micro_rows=4, optimizer=adamw(lr=1e-3))
    part = b.parts(2)[rank] if world > 1 else b
    torch.save([policy.step(part, grpo) for _ in range(2)], folder/f"{engine}-{world}-{rank}.pt")


@pytest.mark.ranks
@pytest.mark.parametrize("kind, engine", [("llava", "fsdp2"), ("gemma3", None), *rarely(
    *((kind, engine) for kind in tiny.KINDS for engine in (None, "fsdp2", "zero2", "zero3")))])
def test_a_rank_of_text_beside_one_of_images_is_one_process(kind, engine, tmp_path):
    rows = [tiny.row(kind, text="a row without any media"), tiny.row(kind, text="another row of text alone"),
            tiny.row(kind, 0), tiny.row(kind, 1, 2)]
    b = sampled(kind, tiny.model(kind), Prompts(rows, tiny.processor(kind), shuffle=False).take(4))[1]
    b["unit"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])      # so that the first part has none
    torch.save(b, tmp_path/"rows.pt")
    assert {any(p.media) for p in b.parts(2)} == {False, True}
    on_ranks(on_rank, (kind, None, tmp_path), 1)
    on_ranks(on_rank, (kind, engine, tmp_path), 2)
    want, one, two = (torch.load(tmp_path/f"{name}.pt", weights_only=False)
                      for name in ("None-1-0", f"{engine}-2-0", f"{engine}-2-1"))
    for alone, together in zip(want, map(merge, one, two), strict=True):
        for name in ("loss", "grad_norm"):
            assert float(together[name]) == pytest.approx(float(alone[name]), rel=1e-5, abs=1e-6)


@every_kind
def test_demonstrations_and_pairs_have_media(kind):
    "What is trained is the text of the answer; both rows of a pair share one object."
    words, reader = tiny.tokenizer(kind), tiny.processor(kind)
    rows = [dict(tiny.row(kind, i), completion="red") for i in range(2)] + [dict(tiny.row(kind), completion="blind")]
    b = Demonstrations(rows, reader, shuffle=False).take(3)
    assert [m is None for m in b.media] == [False, False, True]
    assert [words.decode(t[k]) for t, k in zip(b.tokens, b.mask, strict=True)] == [
        "red<|im_end|>", "red<|im_end|>", "blind<|im_end|>"]
    start = prompts(kind, 2)
    want = start.take(2).tokens
    assert all(b.tokens[i, :len(w)].tolist() in want.tolist() for i, w in enumerate(want))
    rated = [dict(tiny.row(kind, *some), chosen="red", rejected="a longer answer") for some in ((0, 1), (2,))]
    pairs_ = Preferences(rated, reader, shuffle=False).take(2)
    assert len(pairs_) == 4 and pairs_.media[0] is pairs_.media[1] and len(pairs_.media[0].sources) == 2
    policy = Policy(tiny.model(kind), device="cpu", lr=1e-3)
    lps = policy.logprobs(pairs_)
    assert_close(Policy(tiny.model(kind), device="cpu", micro_rows=2).logprobs(pairs_), lps, atol=1e-5, rtol=0)
    def sft(out, part): return -masked_mean(out.logprobs, part.mask, denom=part), {}
    losses = [float(policy.step(b, sft)["loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="a row with media is not truncated"):
        Demonstrations(rows, reader, max_tokens=12, truncate="end")
    turns = [*tiny.row(kind, 0)["prompt"], dict(role="assistant", content="one"), *tiny.row(kind, 1)["prompt"],
             dict(role="assistant", content="two")]
    b = Demonstrations([dict(messages=turns)], reader).take(1)
    assert words.decode(b.tokens[0][b.mask[0]]) == "one<|im_end|>two<|im_end|>" and len(b.media[0].sources) == 2
    policy.logprobs(b)


@every_kind
def test_parts_that_do_not_learn_do_not_move(kind):
    net = tiny.model(kind)
    b = sampled(kind, net, prompts(kind).take(4))[1]
    def moved(**how):
        policy = Policy(net, device="cpu", lr=1e-2, **how)
        before = {n: x.clone() for n, x in policy._run.module.named_parameters()}
        policy.step(b, grpo)
        found = {n for n, x in policy._run.module.named_parameters() if not x.equal(before[n])}
        return {next((k for k, x in parts.items() for part in x if f".{part}." in n), "language") for n in found}
    parts = parts_of(net)
    assert moved() == {"tower", "projector", "language"}
    assert moved(freeze="tower") == {"projector", "language"}
    assert moved(freeze=("tower", "projector")) == {"language"} and moved(freeze="language") == {"tower", "projector"}
    assert moved(lora=dict(r=4, init_lora_weights=False)) == {"language"}
    with pytest.raises(ValueError, match="freeze='eyes', and .* has no such part; it has tower, projector, language"):
        Policy(net, device="cpu", freeze="eyes")


@every_kind
@pytest.mark.parametrize("wrapper, ask", [(Critic, "values"), (Scorer, "scores")])
def test_heads_read_the_medium(kind, wrapper, ask):
    net = tiny.model(kind)
    b = sampled(kind, net, prompts(kind).take(6))[1]
    w = wrapper(net, device="cpu", lr=1e-5)
    with torch.no_grad(): w._run.module.head.weight.normal_(std=.5)
    found, other = getattr(w, ask)(b), b.with_columns(b.columns | dict(media=b.media[2:] + b.media[:2]))
    assert (getattr(w, ask)(other) - found).abs().max() > 1e-2
    def error(out, part):
        x = out.scores if ask == "scores" else torch.where(part.mask, out.values, 1.)
        return (x - 1).square().sum()/part.n_rows, {}
    losses = [float(w.step(b, error)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]


@every_kind
def test_a_reward_model_is_a_folder(kind, tmp_path):
    "Values and scores are the same from the folder, by transformers too where it has a classifier; so are a policy's."
    net = tiny.model(kind)
    b = sampled(kind, net, prompts(kind).take(3))[1]
    how = dict(device="cpu", tokenizer=tiny.processor(kind))
    for made, ask in ((Critic(net, bins=[0., .5, 1.], **how), "values"), (Scorer(net, **how), "scores")):
        for p in made._run.module.head.parameters(): p.data.normal_(std=.5)
        made.save_pretrained(tmp_path/ask)
        read = type(made)(str(tmp_path/ask), device="cpu")
        assert_close(getattr(read, ask)(b), getattr(made, ask)(b), atol=1e-6, rtol=0)
        assert is_processor(read.tokenizer)
    if kind == "gemma3":
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path/"scores").eval()
        exist = torch.arange(b.tokens.shape[1]) < b.lengths[:, None]
        ids = torch.where(exist, b.tokens, tiny.tokenizer(kind).pad_token_id)
        said = theirs(ids, token_type_ids=b.token_type_ids, **features_of(b.media)).logits
        assert_close(said[:, 0], made.scores(b), atol=1e-5, rtol=0)
    policy = Policy(net, lora=dict(r=4, init_lora_weights=False), **how)
    policy.save_pretrained(tmp_path/"merged")
    policy.save_pretrained(tmp_path/"adapter", adapter=True)
    for model, lora in ((str(tmp_path/"merged"), None), (net, str(tmp_path/"adapter"))):
        again = Policy(model, lora=lora, device="cpu")
        assert_close(again.logprobs(b), policy.logprobs(b), atol=1e-4, rtol=0)
    trunk = Scorer(str(tmp_path/"merged"), device="cpu")._run.module.trunk
    want = Policy(str(tmp_path/"merged"), device="cpu")._run.module.trunk.base_model.state_dict()
    assert all(x.equal(want[k]) for k, x in trunk.state_dict().items())


@pytest.mark.parametrize("kind, freeze", [("llava", "tower"), *((kind, "tower") for kind in tiny.AXES), *rarely(
    *((kind, ()) for kind in tiny.KINDS), ("gemma3", "tower"), ("qwen2_audio", "tower"))])
def test_a_plan_counts_towers(kind, freeze):
    "Within 5 % of what a step of two micro-batches holds."
    net, start = tiny.model(kind, hidden=128), prompts(kind).take(4)
    row = start.tokens.shape[1] + 40
    columns = {k: torch.cat([x, torch.full((4, 40), int(k == "tokens"))], 1) for k, x in start.columns.items()
               if k in ("tokens", *TYPE_IDS)}
    columns |= dict(lengths=torch.full((4,), row), media=start.media, prompt_lengths=start.lengths,
                    mask=torch.arange(row).expand(4, -1) >= row-40)
    b = Batch.cat([Batch(**columns)]*2)
    def sft(out, part): return -masked_mean(out.logprobs, part.mask, denom=part), {}
    policy = Policy(net, device="cpu", micro_tokens=4*row, lr=1e-3, freeze=freeze)
    for _ in range(2): policy.step(b, sft)       # proofs and checks are over, the optimizer has its states
    states = [x for kept in policy._run.model.optimizer.state.values() for x in kept.values() if x.dim()]
    there = {*policy._run.module.parameters(), *policy._run.module.buffers()}
    with Live(*there, *states) as live: policy.step(b, sft)
    found = live.peak + sum(x.nbytes for x in (*there, *states))
    assert found == pytest.approx(plan(net, device="cpu", micro_tokens=4*row, row=row, media=start,
                                       freeze=freeze).total, rel=.05)


def test_a_reward_sees_the_media():
    b = sampled("llava", tiny.model("llava"), prompts("llava").take(4))[1]
    def redness(completions, media, **_): return [m.images[0].resize((1, 1)).getpixel((0, 0))[0]/255 for m in media]
    assert_close(Grader(redness).score(b), torch.tensor(redness(b.completion, b.media)))
