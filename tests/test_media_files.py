"Media as users have them: files, archives, addresses, bytes; what is broken; and where their rows go."
import base64
import copy
import io
import zipfile

import numpy as np
import pytest
import tiny_media as tiny
import torch
from PIL import Image
from rlblocks import (
    Batch, Buffer, Checkpoint, Demonstrations, Feedback, Grader, Policy, Preferences, Prompts, RemoteReward, Rollout,
    Scorer, Step, TextRenderer, here, judge_reward, judge_rollout, load_rollouts, loop_from, pairwise_reward, rollouts,
    save_rollouts, scorer_reward, serve_reward,
)
from rlblocks.data.media import (
    FeatureMaker, Media, bytes_of, frame_numbers, media_from_json, media_to_json, source_of,
)
from rlblocks.models.multimodal import placeholder_ids
from torch.testing import assert_close


def png(i):
    out = io.BytesIO()
    tiny.medium("llava", i).save(out, "PNG")
    return out.getvalue()


def clip(path, n=40, rate=10, size=(64, 48)):
    "A video whose n-th frame is as bright as its number says."
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(n):
            frame = np.full((size[1], size[0], 3), 5*i, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")): file.mux(packet)
        for packet in stream.encode(): file.mux(packet)
    return str(path)


def test_however_an_image_is_written_it_is_the_same(tmp_path):
    one, row = png(0), tiny.row("llava", 0)
    (tmp_path/"a b.png").write_bytes(one)
    with zipfile.ZipFile(tmp_path/"all.zip", "w") as z: z.writestr("in/a.png", one)
    path, text = str(tmp_path/"a b.png"), base64.b64encode(one).decode()
    parts = [dict(image=path), dict(image=one), dict(path=path), dict(url=(tmp_path/"a b.png").as_uri()),
             dict(base64=text), dict(image=f"data:image/png;base64,{text}"), dict(image=dict(bytes=one, path=None)),
             dict(image=f"zip://in/a.png::{tmp_path/'all.zip'}"), dict(image=(str(tmp_path/"all.zip"), "in/a.png")),
             dict(image=np.asarray(Image.open(io.BytesIO(one))))]
    kinds = [dict(type="image", **p) for p in parts] + [dict(type="image_url", image_url=dict(url=path)),
                                                        dict(type="input_image", image_url=path)]
    rows = [dict(prompt=[dict(role="user", content=[p, dict(type="text", text="?")])]) for p in kinds]
    rows += [dict(prompt=[dict(role="user", content=[dict(type="image"), dict(type="text", text="?")])], images=[x])
             for x in (path, one)]
    want = Prompts([row], tiny.processor("llava")).take(1)
    for r in rows:
        b = Prompts([r], tiny.processor("llava")).take(1)
        assert b.tokens.equal(want.tokens)
        for k, x in want.media[0].features().items(): assert x.equal(b.media[0].features()[k])


def test_frames_of_a_video(tmp_path):
    assert frame_numbers(300, 30.) == np.linspace(0, 299, 20).round().astype(int).tolist()
    assert len(frame_numbers(30*3600, 30.)) == 32 and len(frame_numbers(30*3600, 30., max_frames=64)) == 64
    assert frame_numbers(10, 30.) == [0, 3, 6, 9] and frame_numbers(1, 30.) == [0, 0]
    assert frame_numbers(100, 10., nframes=2, video_start=2., video_end=4.) == [20, 40]
    with pytest.raises(ValueError, match=r"no frame between 20 s and None s of 10\.0 s"):
        frame_numbers(100, 10., video_start=20)
    path = clip(tmp_path/"a.mp4")
    frames, about = source_of("video", path).open()
    assert frames.shape == (8, 48, 64, 3) and about["frames_indices"] == frame_numbers(40, 10.)
    assert np.abs(frames.mean((1, 2, 3)) - 5*np.array(about["frames_indices"])).max() < 6
    assert (about["fps"], about["total_num_frames"], about["duration"]) == (10., 40, 4.)
    frames, about = source_of("video", dict(video=path, nframes=2, video_start=1.)).open()
    assert about["frames_indices"] == [10, 39] and len(frames) == 2
    one, other = (source_of("video", dict(video=path, fps=x)) for x in (1., 2.))
    assert one.digest != other.digest and one.checksum == other.checksum
    wide = source_of("video", clip(tmp_path/"b.mp4", n=4, size=(1920, 1080))).open()[0]
    assert wide.shape[1]*wide.shape[2] <= 1.01*768*28*28
    frames, about = source_of("video", dict(video=np.zeros((6, 8, 8, 3), np.uint8), fps=3.)).open()
    assert (about["fps"], about["duration"], len(frames)) == (3., 2., 6)


def asked(*parts): return dict(prompt=[dict(role="user", content=[*parts, dict(type="text", text="?")])])


@pytest.mark.parametrize("kind", tiny.AXES)
def test_rows_with_video_image_and_text_are_one_batch(kind, tmp_path):
    one, two = clip(tmp_path/"a.mp4"), clip(tmp_path/"b.mp4", n=25, size=(96, 64))
    image = dict(type="image", image=tiny.medium(kind, 1))
    rows = [asked(dict(type="video", video=one)), asked(image), asked(),
            asked(image, dict(type="video", video=two, fps=1.)),
            asked(dict(type="video", video=np.full((5, 48, 48, 3), 90, np.uint8)))]
    b = Rollout(net := tiny.model(kind), tokenizer=tiny.processor(kind), max_tokens=5, device="cpu").generate(
        Prompts(rows, tiny.processor(kind), shuffle=False).take(5), group_size=2, seed=1)
    policy, order = Policy(net, device="cpu"), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    found = policy.logprobs(b)
    assert (found - b.rollout_logprobs)[b.mask].abs().max() < 1e-5
    assert_close(Policy(net, device="cpu", micro_rows=1).logprobs(b[order]), found[order], atol=1e-5, rtol=0)
    if kind == "qwen3_vl": assert "<0.3 seconds>" in tiny.tokenizer(kind).decode(b.tokens[0])


@pytest.mark.parametrize("kind", tiny.AXES)
def test_sizes_of_qwen_vl_utils_are_its_own(kind, tmp_path):
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    how, picture = dict(resized_height=64, resized_width=96), tiny.medium(kind, 1)
    patch = tiny.processor(kind).image_processor.patch_size
    b = Prompts([asked(dict(type="image", image=picture, **how))], tiny.processor(kind)).take(1)
    want = utils.fetch_image(dict(image=picture, **how), image_patch_size=patch)
    assert b.media[0].images[0].tobytes() == want.tobytes() and want.size != picture.size


def test_audio_files_are_mixed_and_resampled(tmp_path):
    soundfile, _ = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    time = np.arange(8000)/8000
    tone = np.sin(2*np.pi*440*time).astype(np.float32)
    soundfile.write(tmp_path/"a.flac", np.stack([tone, tone], 1), 8000)
    found = source_of("audio", str(tmp_path/"a.flac")).open(16000)
    want = np.sin(2*np.pi*440*np.arange(16000)/16000)
    assert len(found) == 16000 and np.abs(found - want)[200:-200].max() < 1e-2
    assert_close(torch.from_numpy(source_of("audio", dict(array=tone, sampling_rate=8000), 16000).open(16000)),
                 torch.from_numpy(found), atol=1e-3, rtol=0)
    b = Prompts([dict(prompt=[dict(role="user", content=[dict(type="audio", audio=str(tmp_path/"a.flac"))])])],
                tiny.processor("qwen2_audio")).take(1)
    assert b.media[0].nbytes < 200 and b.media[0].audio[0].shape == (16000,)


@pytest.mark.parametrize("make", [
    lambda rows, **how: Prompts(rows, tiny.processor("llava"), shuffle=False, **how),
    lambda rows, **how: Demonstrations([r | dict(completion="red") for r in rows], tiny.processor("llava"),
                                       shuffle=False, **how),
    lambda rows, **how: Preferences([r | dict(chosen="red", rejected="blue") for r in rows], tiny.processor("llava"),
                                    shuffle=False, **how),
    lambda rows, **how: Feedback([r | dict(completion="red", label=True) for r in rows], tiny.processor("llava"),
                                 shuffle=False, **how)])
def test_media_that_are_missing_or_broken_name_their_row_or_are_left_out_and_counted(make, tmp_path):
    (tmp_path/"broken.png").write_bytes(png(0)[:100])
    (tmp_path/"text.png").write_text("no picture")
    given = [tiny.medium("llava", 0), str(tmp_path/"broken.png"), tiny.medium("llava", 1), str(tmp_path/"none.png"),
             str(tmp_path/"text.png"), "data:image/png;base64,****"]
    rows = [dict(prompt=[dict(role="user", content=[dict(type="image", image=x)])], number=i)
            for i, x in enumerate(given)]
    for i, words in ((1, r"broken\.png' cannot be read"), (3, r"none\.png"), (4, r"text\.png' cannot be read"),
                     (5, "is no base64")):
        with pytest.raises(ValueError, match=f"(?s)row 1 .*{words}"): make([rows[0], rows[i]])
    with pytest.warns(UserWarning, match=r"(?s)4 of 6 rows have media that cannot be read, .*row 1 .*broken\.png"):
        data = make(rows, on_error="skip")
    assert len(data) == 2 and data.skipped == 4
    assert sorted({*data.take(2).number}) == [0, 2]
    with pytest.raises(ValueError, match="no row can be read. .*row 0 .*broken"): make(rows[1:2], on_error="skip")
    with pytest.raises(ValueError, match="on_error=.ignore.; .raise. or .skip. is"): make(rows, on_error="ignore")


def test_pictures_are_in_the_column_of_media_and_nowhere_else():
    rows = [dict(messages=[*tiny.row("llava", i)["prompt"], dict(role="assistant", content="red")]) for i in range(2)]
    b = Demonstrations(rows, tiny.processor("llava"), shuffle=False).take(2)
    assert b.messages[0][0]["content"] == [dict(type="image"), dict(type="text", text="?")]
    both = [dict(chosen=rows[0]["messages"], rejected=[*rows[0]["messages"][:1], dict(role="assistant", content="no")])]
    b = Preferences(both, tiny.processor("llava")).take(1)
    assert [x[0]["content"][0] for x in b.completion] == [dict(type="image")]*2
    assert len(b.media[0].sources) == 1 and b.media[0] is b.media[1]
    arrays = [dict(chosen=[dict(role="user", content=[dict(type="image", image=np.asarray(tiny.medium("llava", 0)))]),
                           dict(role="assistant", content=x)]) for x in ("red", "blue")]
    b = Preferences([dict(chosen=arrays[0]["chosen"], rejected=arrays[1]["chosen"])], tiny.processor("llava")).take(1)
    assert len(b.media[0].sources) == 1


def test_a_file_that_changed_is_refused(tmp_path):
    path = tmp_path/"a.png"
    path.write_bytes(png(0))
    b = Prompts([dict(prompt=[dict(role="user", content=[dict(type="image", image=str(path))])])],
                tiny.processor("llava")).take(1)
    path.write_bytes(png(1))
    with pytest.raises(OSError, match=r"a\.png'?: the file has changed since the rows were made; make them again"):
        b.media[0].images[0].load()


def saved_and_loaded(how, b, folder):
    if how == "rollouts":
        save_rollouts(folder, 0, b)
        return load_rollouts(folder, 0)
    buffer, again = Buffer(), Buffer()
    for part in b.parts(2): buffer.add(part)
    torch.save(buffer.state_dict(), folder/"buffer.pt")
    again.load_state_dict(torch.load(folder/"buffer.pt", weights_only=True))
    return again.take(len(b))


@pytest.mark.parametrize("how", ["buffer", "rollouts"])
@pytest.mark.parametrize("kind", ["llava", "qwen2_audio"])
def test_saved_rows_have_the_same_media_each_once(kind, how, tmp_path):
    "Bytes, files and arrays, shared by the rows of a group."
    (tmp_path/"a.png").write_bytes(png(3))
    given = [tiny.medium(kind, 0), tiny.medium(kind, 1)] + [str(tmp_path/"a.png")]*(kind == "llava")
    name = tiny.part(kind)
    rows = [dict(prompt=[dict(role="user", content=[{"type": name, name: x}, dict(type="text", text="?")])], big=i)
            for i, x in enumerate(given)] + [tiny.row(kind, text="blind", big=9)]
    b = Prompts(rows, tiny.processor(kind), shuffle=False).take(len(rows))[torch.arange(len(rows)).repeat_interleave(4)]
    b["rollout_logprobs"] = torch.zeros(b.tokens.shape)
    found = saved_and_loaded(how, b, tmp_path)
    found = found[torch.tensor(found.big).argsort(stable=True)]
    assert [m and m.digest for m in found.media] == [m and m.digest for m in b.media]
    assert len({id(m) for m in found.media}) == len(rows) and found.media[-1] is None
    for one, two in zip(found.media[:-4], b.media[:-4], strict=True):
        for k, x in two.features().items(): assert x.equal(one.maker.make(one.sources[0])[k])
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.suffix in (".pt", ".arrow")) < (
        1.5*bytes_of(b.media) + 30_000)


def test_the_buffer_counts_each_source_once():
    b = Prompts([tiny.row("qwen2_audio", 0), tiny.row("qwen2_audio", 0, 1)], tiny.processor("qwen2_audio"),
                shuffle=False).take(2)[torch.arange(2).repeat(8)]
    b["rollout_logprobs"] = torch.zeros(b.tokens.shape)
    buffer, blind = Buffer(), Buffer()
    buffer.add(b)
    blind.add(b.drop("media"))
    assert buffer.nbytes - blind.nbytes == 2*4*8000


def test_a_process_without_the_processor_says_so(tmp_path, monkeypatch):
    b = Prompts([tiny.row("llava", 0)], tiny.processor("llava")).take(1)
    save_rollouts(tmp_path, 0, b)
    monkeypatch.setattr(FeatureMaker, "known", {})
    media = load_rollouts(tmp_path, 0).media[0]
    assert media.images[0].size == (56, 56)
    with pytest.raises(ValueError, match=r"were read by a LlavaProcessor \(.*\), .* make Prompts\(rows, processor\)"):
        media.maker.make(media.sources[0])
    Prompts([tiny.row("llava", 1)], tiny.processor("llava"))
    assert media.maker.make(media.sources[0])["pixel_values"].equal(b.media[0].features()["pixel_values"])


# -- judges and reward models that see
def questions(kind="llava"):
    data = Prompts([tiny.row(kind, i) for i in range(3)] + [tiny.row(kind, text="blind")], tiny.processor(kind),
                   shuffle=False)
    b = Rollout(tiny.model(kind), tokenizer=tiny.processor(kind), max_tokens=4, device="cpu").generate(
        data.take(4), group_size=2, seed=0)
    assert len(b.media) == len(b.prompt) == 8
    return b


def test_a_judge_sees_what_the_answer_is_about():
    b, asked = questions(), []
    def ask(what):
        asked.extend(what)
        return ["Score: 3" if isinstance(q, str) else f"Score: {1 + 9*(q[0]['image'].checksum == first)}" for q in what]
    first = b.media[0].sources[0].checksum
    assert_close(Grader(judge_reward(ask)).score(b), torch.tensor([1., 1., 0., 0., 0., 0., 2/9, 2/9]))
    parts = asked[0]
    assert [p["type"] for p in parts] == ["image", "text"] and "<image>" not in parts[1]["text"]
    asked.clear()
    Grader(judge_reward(ask, media=False)).score(b)
    assert all(isinstance(q, str) and "<image>" not in q for q in asked)
    seen = []
    def which(what):
        seen.extend(what)
        return ["Verdict: A"]*len(what)
    Grader(pairwise_reward(which)).score(b)
    assert [isinstance(q, str) for q in seen] == [False]*6 + [True]*2 and seen[0][0]["image"].checksum == first


def test_a_model_of_ours_judges_pictures():
    b, judge = questions(), Rollout(tiny.model("llava", seed=1), tokenizer=tiny.processor("llava"), max_tokens=8,
                                    device="cpu")
    ask = judge_rollout(judge)
    def say(*pictures): return ask([[*m.parts, dict(type="text", text="which colour?")] for m in pictures])
    one, two = say(b.media[0], b.media[2]), say(b.media[0], b.media[0])
    assert one[0] == two[0] == two[1] and isinstance(one[1], str)
    Grader(judge_reward(ask)).score(b)


def test_a_judge_behind_an_address_is_sent_the_picture():
    from rlblocks.graders.judge import sent
    b = questions()
    made = sent([*b.media[0].parts, dict(type="text", text="?")])
    url = made[0]["image_url"]["url"]
    assert made[0]["type"] == "image_url" and url.startswith("data:image/png;base64,") and made[1]["text"] == "?"
    assert base64.b64decode(url.partition(",")[2]) == b.media[0].sources[0].data
    assert source_of("image", url).checksum == b.media[0].sources[0].checksum and sent("a text") == "a text"


def test_a_served_reward_model_sees(tmp_path):
    b, scorer = questions(), Scorer(tiny.model("llava"), device="cpu")
    with torch.no_grad(): scorer._run.module.head.weight.normal_(std=.5)
    alone = scorer_reward(scorer, tiny.processor("llava"))
    want = Grader(alone).score(b)
    assert (want[:2] - want[2:4]).abs().max() > 1e-3
    with serve_reward(alone) as server:
        assert_close(Grader(RemoteReward(server.url, server.token, rows=3)).score(b), want)
    with pytest.raises(ValueError, match="a row with media is not cut"):
        scorer_reward(scorer, tiny.processor("llava"), max_length=20)(b.prompt, b.completion, b.media)
    with pytest.raises(ValueError, match="scorer_reward: .*reads text alone, and the rows have media"):
        scorer_reward(scorer, tiny.tokenizer("llava"))(b.prompt, b.completion, b.media)
    with pytest.raises(ValueError, match="a medium is a path; its content is wanted"):
        media_from_json([dict(maker={}, sources=[dict(kind="image", data="/etc/passwd")])], files=False)


# -- tools that answer with pictures
class Camera:
    "The first look is in the prompt; each answer is another picture, and a word of the colour asked for."
    def __init__(self): self.turn = 0
    async def reset(self, **row): self.row = row
    async def step(self, message):
        self.turn += 1
        if self.turn > 2: return Step(reward=float(len(message["content"])), done=True)
        name = tiny.part(self.row["about"])
        content = [{"type": name, name: tiny.medium(self.row["about"], self.turn)}, dict(type="text", text="and this?")]
        return Step([dict(role="user", content=content)])


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("blind", [False, True])
def test_tools_answer_with_media(kind, blind):
    "Each answer's media join those of the row; sampler and trainer read the same."
    net, reader = tiny.model(kind), tiny.processor(kind)
    first = [() if blind else (0,), () if blind else (1, 3)]
    data = Prompts([tiny.row(kind, *some, about=kind) for some in first], reader, shuffle=False)
    rollout = Rollout(net, tokenizer=reader, max_tokens=4, device="cpu")
    b = rollouts(rollout, Camera, data.take(2), group_size=2, seed=1)
    ended = [r == "parse_error" for r in b.finish_reason]       # it drew an id that stands for a medium
    assert not all(ended)
    for i, m in enumerate(b.media):
        assert ended[i] or len(m.sources) == len(first[i//2]) + 2
    policy = Policy(net, device="cpu")
    assert (policy.logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-5
    last = [m and Media((*m.sources[:-1], m.sources[0]), m.maker) for m in b.media]
    other = policy.logprobs(b.with_columns(b.columns | dict(media=last)))
    assert (other - b.rollout_logprobs)[b.mask].abs().max() > 1e-3


def test_nothing_comes_behind_a_sampled_placeholder():
    kind = "llava"
    net, reader = tiny.model(kind), tiny.processor(kind)
    odd, head = placeholder_ids(net)[0], net.get_output_embeddings()
    with torch.no_grad(): head.weight[odd] = 9*head.weight.abs().max()*torch.sign(head.weight.mean(0))
    data = Prompts([tiny.row(kind, i, about=kind) for i in range(4)], reader, shuffle=False)
    rollout = Rollout(net, tokenizer=reader, max_tokens=8, device="cpu")
    b = rollouts(rollout, Camera, data.take(4), seed=1)
    drew = [bool({*t[p:n].tolist()} & {odd}) for t, p, n in zip(b.tokens, b.prompt_lengths, b.lengths, strict=True)]
    one = rollout.generate(data.take(4), seed=1)
    ended = (one.tokens == odd).logical_and(torch.arange(one.tokens.shape[1]) >= one.prompt_lengths[:, None]).any(1)
    assert ended.any()
    with pytest.raises(ValueError, match="extend: the policy ended row . with an id that stands for an image"):
        rollout.extend(one, [[1, 2]]*4)
    rollout.extend(one, [None if e else [1, 2] for e in ended.tolist()])
    assert any(drew)


def test_a_renderer_of_text_refuses_pictures():
    data = Prompts([tiny.row("llava", 0, about="llava")], tiny.processor("llava"))
    rollout = Rollout(tiny.model("llava"), tokenizer=tiny.processor("llava"), max_tokens=4, device="cpu")
    with pytest.raises(RuntimeError, match=r"TextRenderer reads no media; ChatRenderer\(processor\) does"):
        rollouts(rollout, Camera, data.take(1), renderer=TextRenderer(tiny.tokenizer("llava")))


def test_a_run_with_pictures_resumes_to_the_bit(root, tmp_path):
    loop = loop_from(f"{root}/tutorials/grpo.ipynb:grpo")
    def run(steps, **how):
        net, rows = tiny.model("llava"), [tiny.row("llava", i, answer=i % 4) for i in range(6)]
        data = Prompts(rows, tiny.processor("llava"), seed=1)
        def reward(completions, **_): return [float(len(set(c))) for c in completions]
        found = loop(here, data, reward, model=net, tokenizer=tiny.processor("llava"), lr=1e-3, steps=steps, prompts=2,
                     group_size=4, minibatches=2, max_tokens=5, **how)
        return {r["step"]: (r["reward"], float(r["grad_norm"])) for r in found}
    whole = run(4)
    first = run(2, checkpoint=Checkpoint(tmp_path, every=1))
    rest = run(4, checkpoint=Checkpoint(tmp_path, every=1))
    assert set(rest) <= {2, 3} and first | rest == whole


def test_media_without_their_type_ids_are_refused():
    kind = "gemma3"
    b = Rollout(tiny.model(kind), tokenizer=tiny.processor(kind), max_tokens=3, device="cpu").generate(
        Prompts([tiny.row(kind, 0)], tiny.processor(kind)).take(1))
    with pytest.raises(ValueError, match="finds the places of media by a column 'token_type_ids', and the rows with"):
        Policy(tiny.model(kind), device="cpu").logprobs(b.drop("token_type_ids"))


# -- what would be learned wrong in silence
def test_media_and_placeholders_are_as_many():
    reader, image = tiny.processor("llava"), tiny.medium("llava", 0)
    says = r"row 0 .*its text has {} '<image>', which stand for image, and it has {} of these"
    for row, there, wanted in ((dict(prompt="<image>?", img=image), 1, 0), (dict(prompt="?", images=[image]), 0, 1),
                               (dict(prompt="<image>?", images=[image]*2), 1, 2),
                               (dict(prompt="<image><image>?", images=(image,)), 2, 1)):
        with pytest.raises(ValueError, match=says.format(there, wanted)): Prompts([row], reader)
    with pytest.raises(ValueError, match=says.format(2, 1)):
        Demonstrations([tiny.row("llava", 0, completion="an <image> tag")], reader)
    def talk(i, answer): return [*tiny.row("llava", i)["prompt"], dict(role="assistant", content=answer)]
    with pytest.raises(ValueError, match="row 0 .*chosen and rejected have other media"):
        Preferences([dict(chosen=talk(0, "yes"), rejected=talk(1, "no"))], reader)
    bare = dict(prompt=[dict(role="user", content=[dict(image=image), dict(text="?")])])
    assert Prompts([bare], reader).take(1).tokens.equal(Prompts([tiny.row("llava", 0)], reader).take(1).tokens)


def test_numbers_of_arrays_and_turned_photographs():
    picture = tiny.medium("llava", 0)
    x = np.asarray(picture)
    want = source_of("image", picture).digest
    for given in (x/255, x.astype(np.float32), x.astype(np.uint16)*257, x.transpose(2, 0, 1), x.astype(int)):
        assert source_of("image", given).digest == want
    assert source_of("image", x[..., :1]).open().size == (56, 56)
    with pytest.raises(TypeError, match="numbers from -0.88[0-9]* to 0; 0 to 255, or 0 to 1 in floats, are wanted"):
        source_of("image", x/255. - 1)
    frames = np.stack([x]*4)
    assert source_of("video", frames/255).digest == source_of("video", list(frames)).digest
    tone = np.linspace(-1, 1, 500, dtype=np.float32)
    for given in ((tone*32767).astype(np.int16), np.stack([tone, tone], 1), np.stack([tone, tone])):
        assert np.abs(source_of("audio", given).open() - tone).max() < 1e-4
    with pytest.raises(TypeError, match="the audio has numbers that are not finite"): source_of("audio", tone/0)
    held = source_of("audio", own := tone.copy())
    own[:] = 0
    assert np.abs(held.open()).max() == 1
    out = io.BytesIO()
    turned = Image.new("RGB", (20, 40), "red")
    exif = turned.getexif()
    exif[0x0112] = 6        # lies on its side
    turned.save(out, "JPEG", exif=exif)
    assert source_of("image", out.getvalue()).open().size == (40, 20)
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 4), 32768, np.uint16)).save(deep, "PNG")
    assert source_of("image", deep.getvalue()).open().getpixel((0, 0)) == (128, 128, 128)


def test_a_template_that_takes_parts_alone_keeps_texts():
    "LLaVA-1.5's: of a content that is a text it writes nothing."
    reader = copy.copy(tiny.processor("llava"))
    reader.tokenizer = copy.copy(reader.tokenizer)
    reader.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role.upper() }}: {% for c in m.content if c.type == 'image' %}<image>{% endfor %}"
        "{% for c in m.content if c.type == 'text' %}{{ c.text }} {% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
    rows = [dict(prompt=[dict(role="system", content="be brief"), dict(role="user", content="what is 2+2?")]),
            tiny.row("llava", 0)]
    b = Prompts(rows, reader, shuffle=False).take(2)
    assert reader.tokenizer.decode(b.tokens[0, :b.lengths[0]]) == "SYSTEM: be brief USER: what is 2+2? ASSISTANT:"
    assert b.media[0] is None and len(b.media[1].sources) == 1


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_episodes_and_batches_of_text_and_media_are_joined(kind):
    class Answers:
        async def reset(self, **row): pass
        async def step(self, message): return Step(reward=1., done=True)
    net, reader = tiny.model(kind), tiny.processor(kind)
    data = Prompts([tiny.row(kind), tiny.row(kind, 0)], reader, shuffle=False)
    rollout = Rollout(net, tokenizer=reader, max_tokens=4, device="cpu")
    b = rollouts(rollout, Answers, data.take(2), group_size=2, seed=1)
    assert [m is None for m in b.media] == [True, True, False, False]
    assert (Policy(net, device="cpu").logprobs(b) - b.rollout_logprobs)[b.mask].abs().max() < 1e-5
    text, seen = (Prompts(rows, reader).take(1) for rows in ([dict(prompt="hi")], [dict(tiny.row(kind, 0))]))
    both = Batch.cat([text, seen])
    assert both.media[0] is None and both.media[1] is seen.media[0]
    assert rollout.sampler.window == 2048


def test_what_is_sent_is_not_believed():
    "A client's checksum of another's picture would put its features in the place of that one's."
    one, two = (Prompts([tiny.row("llava", i)], tiny.processor("llava")).take(1).media for i in (0, 1))
    forged = media_to_json(one, files=False)
    forged[0]["sources"][0]["checksum"] = two[0].sources[0].checksum
    assert media_from_json(forged, files=False)[0].digest == one[0].digest


def test_audio_longer_than_the_model_hears_is_refused():
    with pytest.raises(ValueError, match=r"has 10\.0 s, and Qwen2AudioProcessor reads 4; cut it into such pieces"):
        Prompts([dict(prompt=[dict(role="user", content=[dict(type="audio", audio=np.zeros(160_000, np.float32))])])],
                tiny.processor("qwen2_audio"))
