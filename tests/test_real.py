"Real weights and real text, in short: what benchmarks/real_run.py does at length."
import importlib.util
import os
import subprocess
import sys

import pytest

KL_LIMIT = .3   # nats a token; without KL the same ten steps of GRPO go to .4, and thirty to 2


@pytest.fixture(scope="module")
def real_run(root):
    "The benchmark as a module; nothing of it runs on import."
    spec = importlib.util.spec_from_file_location("real_run", root/"benchmarks/real_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    "Tiny models are slower on more; and the numbers below do not move."
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.shared
def test_rewards_rise_on_real_stories(real_run, shared, tmp_path, one_thread):
    found = dict(real_run.stories(shared, tmp_path, sft_steps=12, steps=10, rows=48, without_kl=False, held_out=64,
                                  group_size=1))
    start, before = found["pretrained"]["held_out"], found["sft"]["held_out"]
    # it has learned to stop
    assert before["real text"] < start["real text"] - .05 and before["ended"] > start["ended"] + .2
    # Seeds 0 to 3 of the whole, on one thread. Real text: 0.13, 0.12, 0.13, 0.13; endings: 0.63, 0.55, 0.61, 0.67.
    # GRPO: rewards rise by 0.34, 0.20, 0.36, 0.35, held out by 0.46, 0.39, 0.45, 0.32; largest KL 0.14, 0.12, 0.12,
    # 0.11.
    # PPO: rewards rise by 0.41, 0.27, 0.28, 0.33, held out by 0.34, 0.46, 0.39, 0.35; largest KL 0.22, 0.21, 0.20,
    # 0.22.
    # Distinct words 0.80 and more, distinct triples 0.80 and more.
    for stage in ("grpo", "ppo"):
        x = found[stage]
        first, last = real_run.ends(x["curves"]["reward"], 3)
        assert last > first + .1, (stage, x["curves"])
        assert x["held_out"]["reward"] > before["reward"] + .1, (stage, before, x["held_out"])
        assert 0 < x["held_out"]["KL"] < KL_LIMIT and max(x["curves"]["kl"]) < KL_LIMIT
        # no "loved loved loved"
        assert x["held_out"]["distinct words"] > .75 and x["held_out"]["distinct triples"] > .6


@pytest.mark.shared
def test_gsm8k_goes_through_the_whole_pipeline(real_run, shared, one_thread):
    x = real_run.gsm8k(shared, questions=2)
    assert x["questions"] == 7473 and x["groups"] == 2 and x["rows"] == 2*(4+1)
    assert x["graded"] == 1 and x["right_sampled"] == 0 and x["right_gold"] == 1
    assert x["sampler_apart"] < 1e-10 and x["gradient_apart"] < 1e-10 < x["largest_gradient"]
    assert x["fill_padded"] < x["fill"] <= 1 and x["bins"] == x["micro_batches_packed"]


@pytest.mark.shared
def test_gold_solutions_verify(real_run, shared):
    x = real_run.gold(shared, "test")
    assert x["rows"] == x["in_box"] == 1319
    # stated behind "####", whatever dollars and percents come before it
    assert x["as_written"] == x["rows"], x["missed"]


@pytest.mark.shared
def test_the_reward_says_what_it_says(real_run, shared):
    "On real stories: they are happy now and then, they end, and a cut one does not."
    tales = real_run.tales(shared/"stories/tinystories_test")
    told = [row["completion"] for row in tales]
    assert all(len(t) <= 140 or sum(t.count(c) for c in ".!?") <= 4 for t in told)
    whole, cut = (real_run.tale_reward(told, [why]*len(told)) for why in ("completed", "max_tokens"))
    assert [a - b for a, b in zip(whole, cut,
                                  strict=True)] == pytest.approx([.5*(len(real_run.words(t)) >= 15) for t in told])
    said = ["She was happy.", "loved "*20,
            "They loved it. They laughed and were happy, and then all of them went home to bed."]
    assert real_run.tale_reward(said, ["completed"]*3) == pytest.approx([1/3, 1., 1.5])


def test_an_incomplete_folder_is_named(real_run, root, tmp_path):
    with pytest.raises(SystemExit,
                       match=r"--data .*nowhere: there is no such folder; a folder with stories/.*models/stories260K"):
        real_run.complete(tmp_path/"nowhere")
    for name in real_run.NEEDED:
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).touch()
    assert real_run.complete(tmp_path) == tmp_path
    (tmp_path/"gsm8k/test.jsonl.gz").unlink()
    done = subprocess.run([sys.executable, root/"benchmarks/real_run.py", "--data", tmp_path], capture_output=True,
                          text=True, env=os.environ)
    assert done.returncode == 1 and "the folder lacks gsm8k/test.jsonl.gz" in done.stderr
    assert "Traceback" not in done.stderr
