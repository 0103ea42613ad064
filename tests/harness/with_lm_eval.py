"""lm-eval against the endpoint, in the environment of `make harness`: its log-probs, answers and perplexities are those
of the library."""
import json
import math
import os

import pytest
import tiny
import torch
from rlblocks import Batch, Endpoint, Policy, Rollout
from rlblocks.evaluation.measures import bits_per_byte

os.environ["HF_HUB_OFFLINE"] = "1"
LETTERS = "abcdefghijklmnopqrstu12"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "A model that is not quite random: its greedy answers differ from prompt to prompt."
    folder = tmp_path_factory.mktemp("model")
    net = tiny.model()
    with torch.no_grad(): net.lm_head.weight *= 20
    net.save_pretrained(folder)
    tiny.speller(LETTERS).save_pretrained(folder)
    return folder


def evaluated(model, task, rows, tmp_path):
    "lm-eval's results and samples of a task on rows of our own, asked over HTTP."
    from lm_eval import simple_evaluate
    file = tmp_path/"rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    task = dict(task="ours", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(file))),
                test_split="test", target_delimiter="", **task)
    with Endpoint(Rollout(str(model), temperature=1., max_tokens=4)) as at:
        os.environ["OPENAI_API_KEY"] = at.token
        args = dict(model="policy", base_url=f"{at.url}/completions", tokenizer=str(model), num_concurrent=1,
                    max_length=64, tokenizer_backend="huggingface", max_gen_toks=6)
        return simple_evaluate("local-completions", model_args=args, tasks=[task], batch_size=3, log_samples=True,
                               bootstrap_iters=0)


def loglikelihood(model, context, text):
    "(log-prob of a text behind another, whether it is the greedy one)."
    tokenizer, policy = tiny.speller(LETTERS), Policy(str(model), frozen=True)
    a, b = (tokenizer(x)["input_ids"] for x in (context, text))
    ids = torch.tensor([[*a, *b]])
    mask = (torch.arange(ids.shape[1]) >= len(a))[None]
    batch = Batch(tokens=ids, lengths=torch.tensor([ids.shape[1]]), mask=mask)
    best = policy.measure(batch, lambda logits: logits.argmax(-1).float())
    return policy.logprobs(batch).sum().item(), bool((best[mask] == ids[mask]).all())


def test_choices_are_graded_by_the_library_s_log_probs(model, tmp_path):
    rows = [dict(q=q, choices=["ab", "cde", "f", "u"], gold=i % 4) for i, q in enumerate("abc bca cab fab tub".split())]
    found = evaluated(model, dict(output_type="multiple_choice", doc_to_text="{{q}}", doc_to_choice="{{choices}}",
                                  doc_to_target="gold"), rows, tmp_path)
    samples = sorted(found["samples"]["ours"], key=lambda s: s["doc_id"])
    right = 0
    for row, sample in zip(rows, samples, strict=True):
        ours = [loglikelihood(model, row["q"], c) for c in row["choices"]]
        theirs = [(float(x), str(g) == "True") for (x, g), in sample["resps"]]
        assert [g for _, g in theirs] == [g for _, g in ours]
        assert [x for x, _ in theirs] == pytest.approx([x for x, _ in ours], abs=1e-4)
        right += max(range(4), key=lambda k: ours[k][0]) == row["gold"]
    assert found["results"]["ours"]["acc,none"] == right/len(rows)


def test_some_of_them_are_greedy(model):
    "The test above sees both."
    rollout = Rollout(str(model), max_tokens=1)
    first = rollout.generate(Batch(tokens=torch.tensor([[2, 3, 4]]), lengths=torch.tensor([3]), group=torch.tensor([0]),
                                   mask=torch.zeros(1, 3, dtype=torch.bool)), temperature=0)
    assert loglikelihood(model, "abc", tiny.speller(LETTERS).decode(first.tokens[0, 3:4]))[1]


def test_answers_are_greedy_and_end_at_stop_texts(model, tmp_path):
    rows = [dict(q=q, a="x") for q in "abc bca cab fab tub".split()]
    rollout = Rollout(str(model), max_tokens=6)
    prompts = [tiny.speller(LETTERS)(r["q"])["input_ids"] for r in rows]
    batch = Batch(tokens=torch.tensor(prompts), lengths=torch.full((5,), 3), group=torch.arange(5),
                  mask=torch.zeros(5, 3, dtype=torch.bool))
    ours = rollout.generate(batch, temperature=0).completion
    stop = next(c[2] for c in ours if len(c) > 2 and c[2] not in c[:2])
    found = evaluated(model, dict(output_type="generate_until", doc_to_text="{{q}}", doc_to_target="{{a}}",
                                  generation_kwargs=dict(until=[stop], max_gen_toks=6, do_sample=False),
                                  metric_list=[dict(metric="exact_match")]), rows, tmp_path)
    samples = sorted(found["samples"]["ours"], key=lambda s: s["doc_id"])
    assert [s["resps"][0][0] for s in samples] == [c.split(stop)[0] for c in ours]
    assert any(stop in c for c in ours)


def test_bits_per_byte_are_the_library_s(model, tmp_path):
    rows = [dict(text=t) for t in ("abcab", "fab", "tubatubatub")]
    found = evaluated(model, dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                                  metric_list=[dict(metric="bits_per_byte")]), rows, tmp_path)
    ours = bits_per_byte(Policy(str(model), frozen=True), rows, tiny.speller(LETTERS), window=64)
    whole = sum(x["score"]*x["weight"] for x in ours)/sum(x["weight"] for x in ours)
    assert found["results"]["ours"]["bits_per_byte,none"] == pytest.approx(whole, rel=1e-5) and whole > math.log2(3)
