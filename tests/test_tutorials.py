"""Loops of tutorials as they stand, on tiny models and in a few steps; at full length they are `make test-long`.

Those of DPO, KTO, reward models, RLHF, async and best-of-n are in tests/test_preferences.py, GRPO and PPO in
tests/test_spmd.py."""
import json
import math
import sys

import pytest
import torch
from rlblocks import (Calculator, Demonstrations, Grader, Prompts, Rollout, here, loop_from, save_rollouts,
                      tool_environment)


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
