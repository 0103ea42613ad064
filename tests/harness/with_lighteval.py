"""lighteval against the endpoint, in the environment of `make harness`: chat completions under a session's key."""
import tiny
from rlblocks import Endpoint, Rollout


def test_lighteval_s_model_asks_the_policy(tmp_path, monkeypatch):
    """The answers are those of the rows that one would train on.

    No task of its own runs here: lighteval imports all of them at once, and some ask the network meanwhile."""
    monkeypatch.setenv("HF_HOME", str(tmp_path/"cache"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.chdir(tmp_path)              # litellm keeps a cache where it runs
    from lighteval.models.endpoints.litellm_model import LiteLLMClient, LiteLLMModelConfig
    from lighteval.models.model_input import GenerationParameters
    from lighteval.tasks.requests import Doc
    tokenizer = tiny.speller("abcdefghijklmnopqrstu12:")
    tokenizer.chat_template = ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
                               "{% if add_generation_prompt %}a:{% endif %}")
    rollout = Rollout(tiny.model(), tokenizer=tokenizer, temperature=1., max_tokens=4)
    docs = [Doc(query=q, choices=["a"], gold_index=0, task_name="ours", generation_size=4, num_samples=1, id=str(i))
            for i, q in enumerate(("ab", "cd", "ef", "gh"))]
    with Endpoint(rollout) as at:
        session = at.session()
        client = LiteLLMClient(LiteLLMModelConfig(
            model_name="openai/policy", base_url=at.url, api_key=session.key, max_model_length=64, api_max_retry=1,
            concurrent_requests=2, generation_parameters=GenerationParameters(temperature=1.),
            cache_dir=str(tmp_path/"predictions")))
        said = [x.text for x in client.greedy_until(docs)]
        kept = at.collect([session])
    assert [len(x) for x in said] == [1]*4
    written = {x.replace("<pad>", "") for one in said for x in one}
    assert written <= {*kept.completion} and len(kept) >= 4        # what is empty is asked for again
