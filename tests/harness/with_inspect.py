"""inspect-ai against the endpoint, in the environment of `make harness`: chat completions under a session's key."""
import json

import pytest
import tiny
from rlblocks import Endpoint, Rollout


@pytest.mark.parametrize("n", [1, 3])
def test_a_task_of_inspect_is_answered_by_the_policy(tmp_path, monkeypatch, n):
    from inspect_ai import Epochs, Task, eval as evaluated
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    rollout = Rollout(tiny.model(), tokenizer=tiny.tokenizer(), temperature=0., max_tokens=4)
    with Endpoint(rollout) as at:
        session = at.session()
        monkeypatch.setenv("POLICY_BASE_URL", at.url)
        monkeypatch.setenv("POLICY_API_KEY", session.key)
        rows = [Sample(input=f"w{i}", target="w5") for i in (3, 4, 6, 7)]
        log, = evaluated(Task(dataset=rows, solver=None, scorer=match()), model="openai-api/policy/policy", epochs=Epochs(n),
                         display="none", log_format="json")
        assert log.status == "success", log.error
        assert at.report()["calls"] == 4*n
        said = {s.input: s.output.completion for s in log.samples}
        kept = at.collect([session])
    assert {*said} == {"w3", "w4", "w6", "w7"} and {*kept.completion} >= {*said.values()}
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["results"]["total_samples"] == 4*n
