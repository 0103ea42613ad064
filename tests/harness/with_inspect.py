"""inspect-ai against the endpoint, in the environment of `make harness`: chat completions under a session's key."""
import json

import tiny
from rlblocks import Endpoint, Rollout


def test_a_task_of_inspect_is_answered_by_the_policy(tmp_path, monkeypatch):
    "Twice a sample; its log has all, and so have the rows that one would train on."
    from inspect_ai import Epochs, Task, eval as evaluated
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    tokenizer = tiny.speller("abcdefghijklmnopqrstu12:")
    tokenizer.chat_template = ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
                               "{% if add_generation_prompt %}a:{% endif %}")
    rollout = Rollout(tiny.model(), tokenizer=tokenizer, temperature=0., max_tokens=4)
    with Endpoint(rollout) as at:
        session = at.session()
        monkeypatch.setenv("POLICY_BASE_URL", at.url)
        monkeypatch.setenv("POLICY_API_KEY", session.key)
        rows = [Sample(input=x, target="a") for x in ("ab", "cd", "ef", "gh")]
        log, = evaluated(Task(dataset=rows, scorer=match()), model="openai-api/policy/policy", epochs=Epochs(2),
                         display="none", log_format="json")
        assert log.status == "success", log.error
        assert at.report()["calls"] == 4*2
        said = {s.input: s.output.completion for s in log.samples}
        kept = at.collect([session])
    written = {x.replace("<pad>", "") for x in said.values()}      # a column has no special tokens
    assert {*said} == {"ab", "cd", "ef", "gh"} and {*kept.completion} >= written
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["results"]["total_samples"] == 4*2
