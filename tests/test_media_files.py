"Media as users have them: files, archives, addresses, bytes; what is broken; and where their rows go."
import base64
import io
import zipfile

import numpy as np
import pytest
import tiny_media as tiny
import torch
from PIL import Image
from rlblocks import Buffer, Demonstrations, Feedback, Preferences, Prompts, load_rollouts, save_rollouts
from rlblocks.data.media import FeatureMaker, bytes_of, frame_numbers, source_of
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
    assert frame_numbers(10, 30.) == [0, 3, 6, 9] and frame_numbers(1, 30.) == [0]
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
