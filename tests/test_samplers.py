"What every engine behind `Rollout` keeps: one suite, run on each engine that is there."
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_media
import torch
from conftest import ROOT, rarely, vllm_python
from rlblocks import Policy, Prompts, Rollout
from rlblocks.samplers.decoding import penalties
from rlblocks.samplers.hf import Hf
from rlblocks.samplers.processes import Child, child_environment
from rlblocks.samplers.sampler import Request, Sampler, Sampling, complete, sample_seeds, sglang, vllm
from rlblocks.samplers.sglang import Sglang
from rlblocks.samplers.structure import Structures
from rlblocks.samplers.vllm import Vllm, to_samples
from sglang_server import served
from tiny import model, prompts, speller, tokenizer

WIDE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128) # heads of 32
PROMPTS = ((5, 9, 3, 7), (4, 8), (11, 6, 5, 4, 3, 2, 9))


def sharp(kind="llama", **more):
    "A model with opinions: distributions that differ show."
    net = model(kind, **WIDE | more)
    with torch.no_grad():
        for w in net.parameters(): w *= 3 if w.dim() > 1 else 1
    return net


def hf(net, **how): return Hf(net, device=torch.device("cpu"), **how)


def in_vllm(net, **how): return Vllm(net, spec=vllm(cache_bytes=1 << 26, timeout=120., python=vllm_python()), **how)


def in_sglang(net, **how):
    server, url, _ = served(model("llama", **WIDE), **how)      # with other weights, until it has been given these
    made = Sglang(net, spec=sglang(url, timeout=60.), **how)
    made.server = server
    return made


ENGINES = dict(hf=hf, vllm=in_vllm, sglang=in_sglang)


def refuses(sampler, what, **asks):
    "SGLang does some things otherwise: it says so, and nothing is under way."
    if not isinstance(sampler, Sglang): return False
    with pytest.raises(ValueError, match=f"{what} came, and engine='sglang' has none that is the same"):
        complete(sampler, asked(**asks))
    assert not sampler.under_way
    return True


@pytest.fixture(scope="module", params=ENGINES)
def make(request):
    "A maker of samplers of one engine."
    if request.param == "vllm" and vllm_python() is None: pytest.skip("vLLM is not installed: make vllm")
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def sampler(make):
    made = make(sharp(), tokenizer=tokenizer())
    yield made
    made.close()


def asked(prompts=PROMPTS, n=4, *, seed=0, S=8, how=Sampling(), stop=(), **more):
    seeds = [sample_seeds(seed, 100 + i, n) for i in range(len(prompts))]
    return [Request(i, torch.tensor(p), seeds[i], S, how, stop, **more) for i, p in enumerate(prompts)]


def said(completions): return [c.tokens.tolist() for c in completions]


def test_it_is_a_sampler(sampler):
    assert isinstance(sampler, Sampler) and sampler.version == 0 and sampler.vocabulary == 32 and sampler.window == 128


def test_answers_come_in_the_order_of_the_requests(sampler):
    answers = complete(sampler, asked())
    assert [(c.key, c.sample) for c in answers] == [(i, k) for i in range(3) for k in range(4)]
    assert all(len(c.tokens) == len(c.logprobs) == 8 and c.reason == "length" and c.version == 0 for c in answers)
    assert sampler.poll(0.) == []


def test_seeds_belong_to_samples(sampler):
    "LAWS 28: alone and in company, in any order; other seeds and siblings differ."
    together = said(complete(sampler, asked()))
    assert len({tuple(x) for x in together}) == 12
    for i, r in enumerate(asked()): assert said(complete(sampler, [r])) == together[i*4:i*4+4]
    assert said(complete(sampler, asked()[::-1])) == together[8:] + together[4:8] + together[:4]
    assert said(complete(sampler, asked(n=2))) == [x for i, x in enumerate(together) if i % 4 < 2]
    assert said(complete(sampler, asked(seed=1))) != together


def test_samples_end_with_a_stop_id_exactly_once(sampler):
    stop = (3, 7, 11, 20, 30)
    answers = complete(sampler, asked(n=16, S=12, stop=stop))
    for c in answers:
        ids = c.tokens.tolist()
        assert (c.reason == "stop") == (ids[-1] in stop) and not set(ids[:-1]) & set(stop)
        assert c.reason == "stop" or len(ids) == 12
    assert {c.reason for c in answers} == {"stop", "length"}


def test_samples_end_with_the_token_that_completes_a_string(sampler):
    "Its ids stay; a string may lie over two tokens, or inside one; rows are those without it, cut."
    free, words = complete(sampler, asked(n=16, S=12)), ("w3 w2", "7", "0 w2")
    cut = complete(sampler, asked(n=16, S=12, stop=(9,), strings=words))
    for a, b in zip(free, cut, strict=True):
        texts = [" ".join(f"w{i}" for i in a.tokens[:n].tolist() if i > 1) for n in range(1, 13)]   # 0, 1 are special
        ends = [i+1 for i, text in enumerate(texts) if a.tokens[i] == 9 or any(w in text for w in words)]
        assert b.tokens.tolist() == a.tokens[:min([12, *ends])].tolist() and b.reason == ("stop" if ends else "length")
        assert (a.logprobs[:len(b.tokens)] - b.logprobs).abs().max() < 1e-5
    assert {c.reason for c in cut} == {"stop", "length"}
    assert any(w in " ".join(f"w{i}" for i in c.tokens.tolist()[-2:]) for w in words[::2] for c in cut)


def penalised(z, prompt, said, by, stop):
    "By the definition, one id at a time."
    z = z.clone()
    for i in range(len(z)):
        n = said.count(i)
        z[i] += dict(by.logit_bias).get(i, 0.)
        if n or i in prompt: z[i] = z[i]/by.repetition if z[i] > 0 else z[i]*by.repetition
        z[i] -= by.frequency*n + by.presence*(n > 0)
        if len(said) < by.min_tokens and i in stop: z[i] = -torch.inf
        if any([*said, i][-len(w):] == list(w) for w in by.bad_words): z[i] = -torch.inf
    return z


@torch.no_grad()
@pytest.mark.parametrize("how", [
    dict(presence=1.5), dict(frequency=1.), dict(repetition=2.), dict(logit_bias={3: 4., 5: -9.}), dict(min_tokens=4),
    dict(bad_words=[[9], [11, 4], [3, 2, 7]]),
    dict(presence=.5, frequency=-.5, repetition=.7, logit_bias={8: 2.}, bad_words=[[4]])], ids=str)
def test_penalties_are_those_of_their_definition(sampler, how):
    "The same on every engine: log-probs are those of the changed logits."
    net, by, stop = sharp().eval(), penalties(**how), (3, 20, 30)
    if refuses(sampler, "penalties", penalties=by): return
    answers = complete(sampler, asked(S=10, how=Sampling(temperature=1.3), stop=stop, penalties=by))
    for r, c in zip([r for r in asked() for _ in range(4)], answers, strict=True):
        logits, ids = net(torch.cat([r.ids, c.tokens])[None]).logits[0, len(r.ids)-1:-1], c.tokens.tolist()
        for n, z in enumerate(logits):
            wanted = penalised(z, r.ids.tolist(), ids[:n], by, stop).div(1.3).log_softmax(-1)[ids[n]]
            assert (wanted - c.logprobs[n]).abs() < 1e-4
        assert len(ids) > by.min_tokens or c.reason != "stop"


def test_strings_wait_for_the_least_number_of_tokens(sampler):
    "A string ends no row before it, and none that was complete before does afterwards."
    least = penalties(min_tokens=5)
    if refuses(sampler, "penalties", penalties=least): return
    free = complete(sampler, asked(n=16, S=9, penalties=least))
    for a, b in zip(free, complete(sampler, asked(n=16, S=9, strings=("w3", "w2"), penalties=least)), strict=True):
        ends = [n for n in range(6, 10) if str(a.tokens[n-1].item())[0] in "32"]
        assert b.tokens.tolist() == a.tokens[:min([9, *ends])].tolist()


@torch.no_grad()
def test_greedy_is_the_likeliest(sampler):
    net = sharp().eval()
    for r, c in zip(asked(n=1), complete(sampler, asked(n=1, how=Sampling(temperature=0.))), strict=True):
        ids = torch.cat([r.ids, c.tokens])[None]
        assert net(ids).logits[0, len(r.ids)-1:-1].argmax(-1).tolist() == c.tokens.tolist()
        assert not c.logprobs.any() and c.support is None


# each temperature and each way to confine once; every pair of them is long
DRAWN = [(.6, {}), (1., dict(top_p=.8)), (1.3, dict(top_k=5)), (1., dict(min_p=.1))]
PAIRS = [(T, how) for T in (.6, 1., 1.3) for _, how in DRAWN]


@torch.no_grad()
@pytest.mark.parametrize("T, how", [*DRAWN, *rarely(*(x for x in PAIRS if x not in DRAWN))], ids=str)
def test_logprobs_are_those_of_the_distribution(sampler, T, how):
    "LAWS 2: the model's own, over the support where there is one."
    net, how = sharp().eval(), Sampling(temperature=T, **how)
    if how.top_p < 1 and refuses(sampler, "top_p", how=how): return
    for r, c in zip([r for r in asked() for _ in range(4)], complete(sampler, asked(how=how)), strict=True):
        z = net(torch.cat([r.ids, c.tokens])[None]).logits[0, len(r.ids)-1:-1]/T
        if how.confined:
            assert c.support.shape[1] == how.kept(32) and (c.support == c.tokens[:, None]).any(1).all()
            inside = torch.zeros_like(z, dtype=torch.bool)
            for row, ids in zip(inside, c.support, strict=True): row[ids[ids >= 0].long()] = True
            z = z.masked_fill(~inside, -torch.inf)
        assert (z.log_softmax(-1).gather(1, c.tokens[:, None])[:, 0] - c.logprobs).abs().max() < 1e-4


FORMS = ["-?[1-9][0-9]{0,2}", "(yes|no|12+)", dict(type="object", required=["a", "b"], properties=dict(
    a=dict(type="boolean"), b=dict(enum=[1, 12, "no"])))]


STRUCTURED = [(FORMS[0], .6, {}), (FORMS[1], 1., dict(top_k=3)), (FORMS[2], 1.3, {}), (FORMS[2], 1., dict(top_p=.8))]
TRIPLES = [(form, T, how) for form in FORMS for _, T, how in STRUCTURED]


@torch.no_grad()
@pytest.mark.parametrize("form, T, how", [*STRUCTURED, *rarely(*(x for x in TRIPLES if x not in STRUCTURED))], ids=str)
def test_structured_text_is_drawn_from_what_the_structure_allows(sampler, form, T, how):
    "The same on every engine: the ids that some text goes on with are the support, and log-probs are over it."
    words, net, how = speller(), sharp().eval(), Sampling(temperature=T, **how)
    made = Structures(words, torch.tensor([1]), 32).of(form)
    whole = how if how.confined else replace(how, top_k=64)
    if refuses(sampler, "top_p" if how.top_p < 1 else "structure", how=whole, structure=made): return
    answers = complete(sampler, asked(n=8, S=24, how=whole, stop=(1,), structure=made))
    for r, c in zip([r for r in asked() for _ in range(8)], answers, strict=True):
        ids, text = c.tokens.tolist(), words.decode(c.tokens, skip_special_tokens=True)
        assert (c.reason == "stop") == (ids[-1] == 1) and (c.reason == "length" or re.fullmatch(made.pattern, text))
        z, state = net(torch.cat([r.ids, c.tokens])[None]).logits[0, len(r.ids)-1:-1]/T, made.index.get_initial_state()
        for n, i in enumerate(ids):
            kept = {int(x) for x in c.support[n] if x >= 0}
            allowed = set(made.index.get_allowed_tokens(state))
            assert i in kept <= allowed and (how.confined or kept == allowed)
            inside = torch.full_like(z[n], -torch.inf).index_fill(0, torch.tensor(sorted(kept)), 0.)
            assert ((z[n] + inside).log_softmax(-1)[i] - c.logprobs[n]).abs() < 1e-4
            state = made.index.get_next_state(state, i)
    assert len({tuple(c.tokens.tolist()) for c in answers}) > 3


def test_a_structure_that_allows_more_ids_than_travel_is_refused():
    "91 ids at a step: refused by name, unless something else confines sampling, or no log-prob is replayed."
    words = speller([chr(i) for i in range(33, 127)])
    net, wide = sharp(vocab_size=128), dict(structure='[0-9]"[!-z]{2}')
    free, narrow = (Rollout(net, tokenizer=words, max_tokens=8, device="cpu", **how) for how in ({}, dict(top_k=64)))
    with pytest.raises(ValueError, match="allows 91 ids after '[0-9]\"', and 64 can travel .* top_k=64"):
        free.generate(prompts(), **wide)
    assert len(free.generate(prompts(), temperature=0., **wide)) == len(free.generate(
        prompts(), penalties=penalties(presence=.1), **wide)) == 3
    b, policy = narrow.generate(prompts(), group_size=4, **wide), Policy(net, device="cpu")
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-4
    assert all(re.fullmatch(wide["structure"], text) for text in b.completion)
    b = free.generate(prompts(), group_size=4, structure="[0-9]{2}")       # at most 64: the support needs no top_k
    assert b.support.shape[2] == 64 and (b.top_k == 64).all() and b.mask.any(1).all()
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-4
    with pytest.raises(ValueError, match="no column 'support'"): policy.logprobs(b.drop("support"))
    with pytest.raises(ValueError, match="structure and min_tokens"):
        free.generate(prompts(), structure="a", penalties=penalties(min_tokens=2))


@torch.no_grad()
def test_a_structure_confines_greedy_rows_and_goes_beside_others(sampler):
    "In one batch: rows that it confines, rows without it, rows under penalties."
    made, free = Structures(speller(), torch.tensor([1]), 32).of("(yes|no)"), asked(n=2)
    if refuses(sampler, "structure", structure=made): return
    greedy = complete(sampler, asked(n=1, how=Sampling(0.), stop=(1,), structure=made))
    assert {speller().decode(c.tokens, skip_special_tokens=True) for c in greedy} <= {"yes", "no"}
    by = penalties(presence=2.)
    mixed = [replace(r, key=r.key + 10, structure=made, penalties=p, stop=(1,))
             for r, p in zip(free, (None, by, None), strict=True)]
    alone, both = said(complete(sampler, free)), complete(sampler, free + mixed)
    assert said(both[:6]) == alone
    assert {speller().decode(c.tokens, skip_special_tokens=True) for c in both[6:]} <= {"yes", "no"}


def test_experts_that_an_engine_cannot_say_are_refused(sampler):
    "This model has none to say; under vLLM a mixture's are not said either. What was refused is not under way."
    with pytest.raises(ValueError, match="experts|mixture"): complete(sampler, asked(n=1, experts=True))
    assert len(complete(sampler, asked(n=1))) == 3


def test_vllm_says_who_gives_experts():
    with pytest.raises(ValueError, match="engine='vllm' does not say where a mixture sends tokens; .* engine='hf'"):
        to_samples(asked(n=1, experts=True)[0], 32)
    assert len(to_samples(asked(n=2, experts=True)[0], 32, dict(enable_return_routed_experts=True))) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("name", ["enable_return_routed_experts", "return_sampling_mask"])
def test_what_needs_cuda_is_refused_before_vllm_starts(name):
    with pytest.raises(ValueError, match=rf"vllm\({name}=True\) needs CUDA .*Model Runner V2"):
        Rollout(sharp(), engine=vllm(**{name: True}))


def test_work_can_be_added_and_ended(sampler):
    long = Request(7, torch.tensor([4, 5]), (1, 2), 100, Sampling(), ())
    sampler.submit([long])
    sampler.submit([Request(8, torch.tensor([4, 5]), (3,), 2, Sampling(), ())])
    ended = sampler.abort([7])
    assert [(c.key, c.sample) for c in ended] == [(7, 0), (7, 1)]
    assert all(c.reason == "abort" or len(c.tokens) == 100 for c in ended)     # a server may have been quicker
    found = []
    while not found: found = sampler.poll(30.)
    assert [(c.key, len(c.tokens)) for c in found] == [(8, 2)] and sampler.poll(0.) == []


def test_a_sleeping_engine_refuses(sampler):
    policy = Policy(sharp(), device="cpu")
    before = said(complete(sampler, asked()))
    sampler.sleep()
    with pytest.raises(RuntimeError, match="the engine is asleep"): sampler.submit(asked())
    sampler.wake()
    assert said(complete(sampler, asked())) == before
    sampler.sleep(2)
    sampler.wake()
    with pytest.raises(RuntimeError, match="of no known version"): sampler.submit(asked())
    assert sampler.load(policy.weights()).version == 0 and said(complete(sampler, asked())) == before


def test_a_failed_load_refuses_until_one_succeeds(sampler):
    policy = Policy(sharp(), lr=1e-2, device="cpu")
    other = Policy(sharp(num_hidden_layers=1), device="cpu")
    with pytest.raises(ValueError, match="the ticket lacks 'model.layers.1"): sampler.load(other.weights())
    with pytest.raises(RuntimeError, match="of no known version"): sampler.submit(asked())
    assert sampler.load(policy.weights()).checksums and sampler.version == 0
    assert len(complete(sampler, asked())) == 12


@pytest.fixture
def server():
    server, url, engine = served(model("llama", **WIDE))
    yield server, url, engine
    server.shutdown()


def rollout_at(url, net, **how):
    return Rollout(net, engine=sglang(url, timeout=5.), max_tokens=12, stop=[], **how)


def test_an_sglang_server_that_is_gone_is_an_error(server):
    with pytest.raises(RuntimeError, match="no SGLang server answers at http://127.0.0.1:9"):
        rollout_at("http://127.0.0.1:9", sharp())
    r = rollout_at(server[1], sharp())
    server[0].shutdown()
    server[0].server_close()
    with pytest.raises(RuntimeError, match="no SGLang server answers|gave no answer"): r.generate(prompts())
    assert r.sampler.under_way == {}
    r.close()


def test_weights_reach_an_sglang_server_by_disk(server):
    "Every tensor moved: the probe, and the trainer's log-probs, with a support and without."
    policy, r = Policy(sharp(), lr=1e-2, device="cpu"), rollout_at(server[1], sharp(), top_k=5)
    with torch.no_grad():
        for w in policy._run.module.parameters(): w.add_(.05*w.std().nan_to_num(1.))
    manifest = r.load(policy.weights())
    b = r.generate(prompts(), group_size=4)
    assert manifest.gap < 1e-4 and manifest.n_messages == 1
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-4
    with pytest.raises(ValueError, match="takes all weights"): r.load(replace(policy.weights(), since=policy.version))
    assert server[2].counts["update_weights_from_disk"] == 2
    r.close()


def test_an_sglang_server_that_computes_something_else_is_found_out(server):
    r, engine = rollout_at(server[1], sharp()), server[2]
    engine.update_weights_from_disk = lambda body: dict(success=True)     # it says so, and does nothing
    with pytest.raises(RuntimeError, match="the engine does not compute what the trainer computes"):
        r.load(Policy(model("llama", seed=3, **WIDE), device="cpu").weights())
    with pytest.raises(RuntimeError, match="the last load failed"): r.generate(prompts())
    engine.update_weights_from_disk = lambda body: dict(success=False, message="no room")
    with pytest.raises(RuntimeError, match="did not take the weights: no room"):
        r.load(Policy(sharp(), device="cpu").weights())
    r.close()


def test_rows_with_images_reach_an_sglang_server():
    "By one placeholder and a file each; the server expands them, and an image is part of each load's proof."
    net, reader = tiny_media.model("llava"), tiny_media.processor("llava")
    server, url, engine = served(tiny_media.model("llava", seed=1), processor=reader)
    r = Rollout(net, tokenizer=reader, engine=sglang(url, timeout=60.), max_tokens=6)
    row = tiny_media.row("llava", 1)["prompt"][0]["content"][0]
    between = dict(prompt=[dict(role="user", content=[row, dict(type="text", text="and"), row])])
    data = Prompts([tiny_media.row("llava", text="blind"), tiny_media.row("llava", 0), between], reader)
    policy = Policy(net, tokenizer=reader, device="cpu")
    with torch.no_grad():
        for name, w in policy._run.module.trunk.named_parameters():
            if "tower" in name: w.add_(.2*w.std().nan_to_num(1.))
    assert r.load(policy.weights()).gap < 1e-4
    b = r.generate(data.take(3), group_size=2, seed=1)
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-5
    update = engine.update_weights_from_disk
    def language_alone(body):      # as a cache does that keeps what the tower made
        tower = {n: x.clone() for n, x in engine.sampler.module.state_dict().items() if "tower" in n}
        return update(body) | dict(_=engine.sampler.module.load_state_dict(tower, strict=False) and None)
    engine.update_weights_from_disk = language_alone
    with torch.no_grad():
        for name, w in policy._run.module.trunk.named_parameters():
            if "tower" in name: w.add_(.2*w.std().nan_to_num(1.))
    with pytest.raises(RuntimeError, match="fixed ids, with image, are up to"): r.load(policy.weights())
    engine.update_weights_from_disk = update
    r.load(policy.weights())
    beside = Prompts([tiny_media.row("llava", 0, 1)], reader).take(1)
    with pytest.raises(ValueError, match="engine='sglang' is sent rows of images alone, with text between"):
        r.generate(beside)
    said = engine._said
    engine._said = lambda *answer: said(*answer[:-1], answer[-1][:-1])      # of a server that reads one id less
    with pytest.raises(ValueError, match="the image in memory has .* ids, and the server has read others"):
        r.generate(Prompts([tiny_media.row("llava", 0)], reader).take(1))
    server.shutdown()


def test_log_probs_of_another_distribution_are_found_out():
    "A server started so that log-probs are of the logits before the temperature."
    server, url, _ = served(sharp(), original=True)
    with pytest.raises(RuntimeError, match="not of the distribution that it samples from"): rollout_at(url, sharp())
    server.shutdown()


def test_only_the_engines_program_imports_vllm():
    "And what vLLM's own processes load of ours through its entry point."
    def imports_vllm(path): return re.search(r"(?m)^\s*(from|import) vllm\b", path.read_text(encoding="utf-8"))
    found = {p.name for p in ROOT.glob("rlblocks/**/*.py") if imports_vllm(p)}
    assert found == {"vllm_process.py", "weight_transfer.py"}


def test_a_program_that_does_not_answer_is_an_error_with_its_log():
    named = r"is gone, exit code 1. Its log ends:[\s\S]*No module named 'rlblocks.nothing'"
    with pytest.raises(RuntimeError, match=named): Child("rlblocks.nothing", "run").read(60.)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a folder's file, as Linux alone has files without a name")
def test_memory_for_weights_has_no_name_that_could_stay_behind(tmp_path):
    "Whenever trainer or engine is killed. Another process maps it as long as the trainer lets it."
    from rlblocks.samplers.weight_transfer import SharedMemory
    def files(): return [f for f in os.listdir("/dev/shm") if f.startswith("rlblocks-")] + os.listdir(tmp_path)
    before, channel = set(files()), SharedMemory()
    for end in (channel.opened, channel.close):
        told = channel.open(1 << 16, str(tmp_path))
        left = set(files()) - before
        for name in left: Path("/dev/shm", name).unlink()
        assert not left
        channel.memory[5] = 7
        code = "import sys; print(*open(sys.argv[1], 'rb').read(6))"
        seen = subprocess.run([sys.executable, "-c", code, told["path"]], capture_output=True, text=True, check=True)
        assert seen.stdout.split() == ["0"]*5 + ["7"] and os.path.getsize(told["path"]) == told["size"] == 1 << 16
        end()
        assert not os.path.exists(told["path"])
    assert channel.memory.nbytes() == 0


def to_start(**options):
    "What an engine of a tiny model is started with."
    from rlblocks.samplers.vllm import engine_arguments, meta_model, new_transfer
    own, spec = model(), vllm(python=sys.executable, **options)
    transfer = new_transfer(spec, meta_model(None, own), torch.float32)
    return spec, transfer, engine_arguments(spec, transfer, None, 4)


def test_a_start_that_fails_gives_its_memory_back():
    "Here an option does not pickle."
    from rlblocks.samplers.vllm import start_engine
    spec, transfer, arguments = to_start(some_option=lambda: 1)
    with pytest.raises(Exception, match="pickle"): start_engine(spec, transfer, arguments)
    assert transfer.channel.unlink is None


SIGNS = """
import time
def run(trainer, folder):
    for what in ("begins", "connect", *["alive"]*600):
        trainer.send((what,))
        time.sleep(.1)
"""


def test_a_start_has_its_seconds_once(tmp_path):
    "A sign of life on the way does not begin them anew."
    from rlblocks.samplers.vllm import connect_engine
    (tmp_path/"signs.py").write_text(SIGNS)
    child = Child("signs", "run", timeout=300., environment=dict(PYTHONPATH=str(tmp_path)))
    child.answer("begins")
    with pytest.raises(TimeoutError, match="did not answer 'ready'"):
        connect_engine(to_start()[1].channel, child, time.monotonic() + 2.)
    child.close()


def test_a_program_that_says_nothing_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = Child("rlblocks.samplers.vllm_process", "serve_trainer", timeout=.05)      # it takes longer to import torch
    with pytest.raises(TimeoutError, match="no sign of life for 0.05 s and was stopped. Its log ends:"): child.read(60.)
    child.close()
    assert not list(tmp_path.iterdir())


TRAINER = """
import os
from rlblocks.samplers.processes import Child
print(Child("rlblocks.samplers.vllm_process", "serve_trainer").process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_program_ends_with_its_trainer():
    "Also where that is killed."
    run = subprocess.run([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, timeout=300,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)))
    stat, end = Path(f"/proc/{int(run.stdout)}/stat"), time.monotonic() + 60
    assert run.returncode == -9
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < end, "the engine's program goes on without its trainer"
            time.sleep(.05)


def test_the_programs_environment_has_none_of_torchruns_variables():
    ranks = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x", ROLE_RANK="0")
    assert child_environment(ranks | dict(HOME="/", OMP_NUM_THREADS="1")) == dict(HOME="/", OMP_NUM_THREADS="1")
