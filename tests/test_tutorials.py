"""Loops of tutorials as they stand, on tiny models and in a few steps; at full length they are `make test-long`.

Those of DPO, KTO, reward models, RLHF, async and best-of-n are in tests/test_preferences.py, GRPO and PPO in
tests/test_spmd.py."""
import ast
import contextlib
import json
import math
import sys

import pytest
import torch
from rlblocks import (Calculator, Checkpoint, Demonstrations, Grader, Preferences, Prompts, Rollout, Scorer,
                      StepFeedback, here, loop_from, save_rollouts, tool_environment)


@pytest.fixture(scope="module")
def tutorials(root):
    "The folder, whose data are modules."
    sys.path.insert(0, str(root/"tutorials"))
    yield root/"tutorials"
    sys.path.remove(str(root/"tutorials"))


def long_or_short(completions, **_): return [float(len(c) % 2) for c in completions]


def checked(rows, steps):
    "Steps that learn: versions, gradients, numbers."
    rows = [{k: float(v) for k, v in r.items()} for r in rows]
    assert [r["step"] for r in rows] == list(range(steps)) and [r["version"] for r in rows] == [2, 4][:steps]
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 and r["skipped"] == 0 for r in rows)
    return rows


def moved(folder, net):
    "A saved folder holds other weights than the model began with."
    from transformers import AutoModelForCausalLM
    now = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return any(not torch.equal(x, now[k]) for k, x in net.state_dict().items())


def test_grpo_with_tools(tutorials, tmp_path):
    "A model that has seen some calls makes them, and each is answered."
    import calculator
    from word_problems import transformer
    train, tok = calculator.problems(60), calculator.tokenizer()
    sft, grpo = (loop_from(f"{tutorials}/{name}") for name in ("sft.ipynb:sft", "tools.ipynb:tool_grpo"))
    data = Demonstrations(calculator.demonstrations(train, sloppy=0.), tok)
    warm_up = list(sft(here, data, model=transformer(tok, width=32, heads=2), tokenizer=tok, steps=40, warmup=4,
                       rows=16, save=tmp_path/"warm"))
    assert float(warm_up[-1]["loss"]) < float(warm_up[0]["loss"])
    rows = grpo(here, Prompts(train, tok), long_or_short, tool_environment(Calculator), model=tmp_path/"warm", lr=1e-3,
                steps=2, prompts=3, group_size=4, minibatches=2, max_tokens=12, save=tmp_path/"trained")
    assert any(r["calls"] > 0 for r in checked(rows, 2))
    from transformers import AutoModelForCausalLM
    assert moved(tmp_path/"trained", AutoModelForCausalLM.from_pretrained(tmp_path/"warm"))


def test_the_demo_looks_for_matplotlib_before_it_trains(tutorials, tmp_path, monkeypatch):
    import demo
    def trains(*_): raise AssertionError("it trains")
    monkeypatch.setattr(demo, "run", trains)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"): demo.main()


def test_grpo_of_an_agent_behind_an_endpoint(tutorials, tmp_path):
    "The tutorial's agent, with the client that it has, on a model that knows nothing."
    pytest.importorskip("openai")
    from word_problems import tokenizer, transformer
    notebook, agent = tutorials/"agent_endpoint.ipynb", {}
    cells = ("".join(c["source"]) for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"])
    exec(next(c for c in cells if "async def clerk" in c), agent)
    grpo = loop_from(f"{notebook}:agent_grpo")
    asked = [dict(prompt=[dict(role="user", content=q)], question=q, ledger=dict(eggs=i), answer=str(i))
             for i, q in enumerate(["How many eggs are left?", "Count the eggs, please."])]
    tok = tokenizer(["user\nHow many eggs are left?", "assistant\nCount the eggs, please."])
    tok.chat_template = ("{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
                         "{% if add_generation_prompt %}assistant\n{% endif %}")
    net = transformer(tok, width=32, heads=2)
    checked(grpo(here, Prompts(asked, tok), agent["clerk"], lambda completions, result, **_: long_or_short(completions),
                 model=net, tokenizer=tok, lr=1e-3, steps=2, prompts=2, group_size=4, minibatches=2, max_tokens=6,
                 deadline=300., save=tmp_path/"trained"), 2)
    assert moved(tmp_path/"trained", net)


def test_offline_from_saved_rollouts(tutorials, tmp_path):
    "Rows that were sampled, graded and kept train a policy that never samples."
    from word_problems import problems, questions, tokenizer, transformer
    train = problems(40)
    tok = tokenizer(r["prompt"] + r["completion"] for r in train)
    net, data, grader = transformer(tok, width=32, heads=2), Prompts(questions(train), tok), Grader(long_or_short)
    rollout = Rollout(net, tokenizer=tok, max_tokens=4)
    for step in range(2):
        batch = rollout.generate(data.take(4), group_size=4, seed=(0, step))
        batch["scores"] = grader.score(batch)
        save_rollouts(tmp_path/"rows", step, batch)
    offline = loop_from(f"{tutorials}/offline.ipynb:offline")
    checked(offline(here, tmp_path/"rows", model=net, tokenizer=tok, lr=1e-3, minibatches=2,
                    save=tmp_path/"trained"), 2)
    assert moved(tmp_path/"trained", net)


# -- reward models of other kinds, and SFT on labels

@pytest.fixture(scope="module")
def words(tutorials):
    "Problems in words, their tokenizer, and a small network."
    from word_problems import problems, tokenizer, transformer
    train = problems(40)
    tok = tokenizer([*(r["prompt"] + r["completion"] for r in train), "3+4=7\n 0 1 Right? Score:"])
    return train, tok, transformer(tok, width=32, heads=2)


def floats(rows): return [{k: float(v) for k, v in r.items()} for r in rows]


def test_a_process_reward_model_is_read_at_steps(tutorials, words, tmp_path):
    "Also an outcome reward model: solutions with a label on the last step only."
    from step_problems import judged, problems
    rows = [dict(prompt=r["prompt"], steps=(steps := r["completion"].splitlines(keepends=True)),
                 labels=judged(steps, r["start"], r["moves"])) for r in problems(30)]
    _, tok, net = words
    loop = loop_from(f"{tutorials}/process_reward.ipynb:process_reward")
    first, _, last = floats(loop(here, StepFeedback(rows, tok), StepFeedback(rows[:20], tok), model=net, tokenizer=tok,
                                 lr=1e-3, steps=3, rows=8, every=2, save=tmp_path/"judge"))
    assert first["auc"] == .5 and first["loss"] == pytest.approx(math.log(2)) and last["loss"] < first["loss"]
    judge, b = Scorer(tmp_path/"judge"), StepFeedback(rows, tok, shuffle=False).take(20)
    assert judge.names == ["wrong", "right"] and ((judge.scores(b) != 0).any(-1) == b.steps).all()
    z = judge.scores(b).diff(dim=-1)[..., 0]
    right = b.steps & (b.step_labels == 1)
    good, bad = z[right][:, None], z[b.steps & ~right]
    exam = StepFeedback(rows[:20], tok, shuffle=False)
    seen, = floats(loop(here, StepFeedback(rows, tok), exam, model=tmp_path/"judge", steps=1, rows=1, lr=0., warmup=1))
    assert seen["auc"] == pytest.approx(((good > bad).float() + (good == bad).float()/2).mean().item(), abs=1e-5)


@pytest.mark.parametrize("safety", [None, "safe"])
def test_a_reward_model_with_two_heads_learns_each_from_its_verdicts(tutorials, words, safety):
    "`safe` likes the answers that `helpful` does not; a verdict that nobody gave moves nothing."
    train, tok, net = words
    rows = [dict(prompt=r["prompt"], chosen=f" {r['answer']}", rejected=" 0 1", helpful=1., safe=None if i % 2 else 0.,
                 chosen_unsafe=True, rejected_unsafe=False) for i, r in enumerate(train)]
    loop = loop_from(f"{tutorials}/multi_reward.ipynb:multi_reward")
    data = (Preferences(rows, tok, seed=s) for s in range(2))
    first, *_, last = floats(loop(here, *data, model=net, tokenizer=tok, safety=safety, lr=5e-3, warmup=1, steps=12,
                                  n_pairs=16, every=11))
    assert first["held_out_helpful"] == first["held_out_safe"] == .5
    assert last["held_out_helpful"] > .9 and last["held_out_safe"] > .9 and ("safe_sign" in last) == bool(safety)


def test_a_judge_learns_verdicts_as_text(tutorials, words, tmp_path):
    train, tok, net = words
    rows = [dict(prompt=f"{r['prompt']} {i % 2} Right?", completion=f" Score: {i % 2}") for i, r in enumerate(train)]
    loop = loop_from(f"{tutorials}/generative_reward.ipynb:generative_reward")
    *_, last = floats(loop(here, Demonstrations(rows, tok), Demonstrations(rows[:16], tok), model=net, tokenizer=tok,
                           lr=5e-3, warmup=1, steps=3, rows=16, save=tmp_path/"judge"))
    from transformers import AutoModelForCausalLM
    judge, ids = AutoModelForCausalLM.from_pretrained(tmp_path/"judge"), [tok(f" {i}").input_ids[-1] for i in (0, 1)]
    asked = [torch.tensor([tok(r["prompt"] + " Score:").input_ids]) for r in rows[:16]]
    sure = torch.stack([judge(x).logits[0, -1, ids].diff()[0] for x in asked])
    assert last["auc"] == pytest.approx((sure[1::2, None] > sure[::2]).float().mean().item(), abs=.02)


def test_conditional_sft_asks_for_the_best_and_learns_all(tutorials, words, tmp_path):
    "The reward sees prompts without labels; the pool of answers is in the checkpoint."
    train, tok, net = words
    asked, labels = [], (" 0", " 1")
    def reward(prompts, completions, **_):
        asked.extend(prompts)
        return long_or_short(completions)
    loop = loop_from(f"{tutorials}/conditional_sft.ipynb:conditional_sft")
    def run(folder, steps=4):
        data = Prompts([dict(prompt=r["prompt"], answer=r["answer"]) for r in train], tok)
        return loop(here, data, reward, model=net, tokenizer=tok, labels=labels, lr=1e-3, steps=steps, rows=4,
                    explore=2, prompts=3, n=2, max_tokens=4, checkpoint=Checkpoint(folder, every=1))
    straight = floats(run(None))
    assert ["reward" in r for r in straight] == [True, False]*2 and set(asked) <= {r["prompt"] for r in train}
    with contextlib.closing(run(tmp_path)) as started: next(started), next(started)
    rest = floats(run(tmp_path))
    assert rest == [pytest.approx(r, abs=1e-6) for r in straight[-len(rest):]] and len(rest) == 3


@pytest.fixture(scope="module")
def small(tutorials):
    "(tokenizer, model, rows) of word problems; the model knows nothing."
    from word_problems import problems, questions, tokenizer, transformer
    train = problems(60)
    tok = tokenizer([f"Carefully. {r['prompt']} {r['completion']}" for r in train])
    return tok, transformer(tok, width=32, heads=2, std=.2), questions(train)


def test_distillation_compares_the_same_tokens(small):
    """A student that is its own teacher has nothing to learn, also where the teacher reads its prompts a second time;
    one with other prompts has, and the teacher that is renewed at each step is another. An adapter does as weights."""
    from rlblocks.loops import distill
    tok, net, asked = small
    def run(teacher_prompts=None, **how):
        data, steps = Prompts(asked, tok), dict(lr=1e-2, steps=3, prompts=6, max_tokens=4, top_k=8)
        return [float(r["divergence"]) for r in distill(here, data, teacher_prompts and Prompts(teacher_prompts, tok),
                                                        model=net, tokenizer=tok, **steps | how)]
    hinted = [r | dict(prompt=f"Carefully. {r['prompt']}") for r in asked]
    for how in (dict(), dict(lora=4)):
        assert run(**how)[0] == pytest.approx(0, abs=1e-6) and run(asked, **how)[0] == pytest.approx(0, abs=1e-6)
        kept, renewed = (run(hinted, renew=n, **how) for n in (None, 1))
        assert kept[:1] == renewed[:1] and kept[0] > 1e-3 and kept[1] != renewed[1]


def test_a_students_divergence_falls_on_the_teachers_answers(small):
    from rlblocks.loops import distill
    from word_problems import transformer
    tok, net, asked = small
    teacher = transformer(tok, width=32, heads=2, std=.2, seed=1)
    rows = list(distill(here, Prompts(asked[:4], tok), model=net, teacher=teacher, tokenizer=tok, on_policy=0., beta=0.,
                        lr=1e-2, steps=8, prompts=4, max_tokens=4, top_k=len(tok), temperature=.01))
    assert float(rows[-1]["divergence"]) < float(rows[0]["divergence"])/2


@pytest.mark.parametrize("lora", [None, 4])
def test_online_dpo_renews_its_reference(lora, small, tmp_path):
    "Right after it the loss is that of a coin, log 2; with the reference of the start it is not."
    from rlblocks.loops import online_dpo
    tok, net, asked = small
    def run(renew, folder=None):
        return online_dpo(here, Prompts(asked, tok), long_or_short, model=net, tokenizer=tok, lora=lora, lr=1e-2,
                          steps=4, prompts=6, group_size=4, max_tokens=4, renew=renew,
                          checkpoint=Checkpoint(folder, every=1))
    kept, renewed = ([float(r["loss"]) for r in run(n)] for n in (None, 2))
    assert kept[0] == pytest.approx(math.log(2), abs=1e-5) and abs(kept[2] - math.log(2)) > 1e-3
    assert renewed[2] == pytest.approx(math.log(2), abs=1e-5) and renewed[:2] == kept[:2]
    started = run(2, tmp_path)
    for _ in range(4): next(started)
    started.close()
    assert [float(r["loss"]) for r in run(2, tmp_path)] == pytest.approx(renewed[3:], abs=1e-6)


def test_text_beside_a_reward_is_learned(small):
    from rlblocks.loops import grpo_ptx
    tok, net, asked = small
    def nll(ptx_coef):
        texts = Demonstrations([dict(text=r["prompt"]) for r in asked[:8]], tok)
        rows = grpo_ptx(here, Prompts(asked, tok), texts, long_or_short, model=net, tokenizer=tok, lr=3e-3, steps=3,
                        prompts=4, group_size=4, minibatches=2, rows=8, ptx_coef=ptx_coef, max_tokens=4)
        return [float(r["text_nll"]) for r in rows]
    alone, mixed = nll(0.), nll(1.)
    assert mixed[-1] < mixed[0] - .2 and alone[-1] > mixed[-1] + .2


def test_every_relative_is_still_a_diff_from_grpo(tutorials, small):
    "Each takes a step on a model that knows nothing; lines that are not in GRPO are an error."
    from diffs import changed
    from rlblocks.loops import grpo
    tok, net, asked = small
    notebook = json.loads((tutorials/"relatives.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    imports = [n for c in cells for n in ast.parse(c).body if isinstance(n, ast.ImportFrom) and n.module == "rlblocks"]
    exec(compile(ast.Module(imports, []), "relatives", "exec"), scope := {})
    names = []
    def relative(name, *changes, **how):
        loop, diff = changed(grpo, *changes, name=name, **{k: x for k, x in scope.items() if not k.startswith("__")})
        how = dict(prompts=2, group_size=4, minibatches=2) | how | dict(steps=1, max_tokens=4)
        if how["group_size"] == 1: how["prompts"] = 8
        row, = loop(here, Prompts(asked, tok), long_or_short, model=net, tokenizer=tok, lr=1e-3, **how)
        assert math.isfinite(float(row["loss"])) and float(row["version"]) == how["minibatches"] and diff
        names.append(name)
    scope["relative"] = relative
    for code in cells:
        if "ADVANTAGES" in code or "relative(" in code and "def relative" not in code: exec(code, scope)
    assert len(names) == len({*names}) == 20
    with pytest.raises(ValueError, match="Odd: grpo has these lines 0 times"): changed(grpo, ("x = 1", ""), name="Odd")
