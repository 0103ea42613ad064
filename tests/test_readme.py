"""The README as a stranger follows it: every block of code runs, with a small model in the place of a hub's."""
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

TEXT = (ROOT/"README.md").read_text(encoding="utf-8")
BLOCKS = [*re.findall(r"^```(python|sh)\n(.+?)\n```$", TEXT, re.M | re.S)]
# what a test does not do again
INSTALLS = ("git clone", "make demo", "pip install")


@pytest.fixture
def model(tmp_path):
    sys.path.insert(0, str(ROOT/"tutorials"))
    try: from word_problems import problems, tokenizer, transformer
    finally: sys.path.remove(str(ROOT/"tutorials"))
    tok = tokenizer([r["prompt"] + r["completion"] for r in problems(100)] + ["What is 6 × 7? 42 9 − 4? 5"])
    transformer(tok, width=16, heads=2, layers=1).save_pretrained(tmp_path/"model")
    tok.save_pretrained(tmp_path/"model")
    return tmp_path/"model"


def small(code, model):
    "The same on a small model, in one step."
    code = code.replace("Qwen/Qwen3-0.6B", str(model)).replace("runs/a", str(model.parent/"run"))
    short = dict(prompts=2, group_size=2, steps=1, minibatches=1, max_tokens=4)
    code = code.replace("prompts=2)", ", ".join(f"{k}={v}" for k, v in short.items()) + ")")
    words = " ".join(f"--{k} {v}" for k, v in short.items())
    code = re.sub(r"(rlblocks grpo .*?)(?=\n\S|\Z)", rf"\1 {words}", code, flags=re.S)
    code = code.replace("--tasks gsm8k", "--tasks gsm8k=questions.jsonl --max_tokens 4")
    return code.replace("--out answers.jsonl", "--out answers.jsonl --max_tokens 4")


def run(command, folder):
    env = os.environ | dict(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, input="")
    assert done.returncode == 0, f"{command[-1][-2000:]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_python_of_the_readme_runs_from_top_to_bottom(model, tmp_path):
    code = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# mine.py")]
    assert len(code) == 2
    assert re.search(r"^0 0\.0", run([sys.executable, "-c", small("\n".join(code), model)], tmp_path), re.M)


def test_commands_of_the_readme_run_one_after_the_other(model, tmp_path):
    mine, = (text for kind, text in BLOCKS if kind == "python" and text.startswith("# mine.py"))
    (tmp_path/"mine.py").write_text(mine, encoding="utf-8")
    row, = re.findall(r'^`(\{"question".+\})` each', TEXT, re.M)
    (tmp_path/"questions.jsonl").write_text(f"{row}\n"*4, encoding="utf-8")
    commands, = (text for kind, text in BLOCKS if kind == "sh" and not any(w in text for w in INSTALLS))
    script = small(commands, model).replace("rlblocks ", f"{sys.executable} -m rlblocks ")
    assert "too few prompts to compare" in run(["bash", "-euc", script], tmp_path)
    answers = [json.loads(line) for line in (tmp_path/"answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 4 and (tmp_path/"run/model").is_dir() and (tmp_path/"run/log.jsonl").exists()


def test_what_installs_is_what_make_and_settings_know():
    lines = [line for kind, text in BLOCKS for line in text.splitlines() if kind == "sh" and line.startswith(INSTALLS)]
    assert [line.split()[0] for line in lines] == ["git", "make", "pip"]
    extras = re.search(r"\.\[(.+?)\]", lines[-1])[1].split(",")
    settings = (ROOT/"settings.ini").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = ", settings, re.M) for extra in extras)
