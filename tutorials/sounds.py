"""Tones of four pitches, made from a seed, and a small model that hears. The data of the tutorial with sound."""
import random

from pictures import tokenizer

PITCHES = dict(deep=200, low=600, high=1800, shrill=5000)
QUESTION = "How high is the tone?"
RATE = 16000


def sound(pitch, *, seed=0):
    "A third of a second of a tone that fades, up to a tenth off its pitch, with some noise. `[n]` samples."
    import numpy as np
    rng = np.random.default_rng(seed)
    time = np.arange(RATE//3)/RATE
    hertz, fade = PITCHES[pitch]*rng.uniform(.9, 1.1), np.exp(-rng.uniform(1, 6)*time)
    return (.5*fade*np.sin(2*np.pi*hertz*time) + rng.normal(0, .02, len(time))).astype(np.float32)


def sounds(n, *, seed=0, held_out=False):
    """`n` rows {prompt, completion, answer}. `prompt` is a message with a tone and a question; `answer` is right;
    `completion` is a deaf teacher's, who says any of the four words."""
    rng, rows = random.Random(f"{seed} {held_out}"), []
    for _ in range(n):
        pitch, said = rng.choice([*PITCHES]), rng.choice([*PITCHES])
        content = [dict(type="audio", audio=sound(pitch, seed=rng.getrandbits(32))), dict(type="text", text=QUESTION)]
        rows.append(dict(prompt=[dict(role="user", content=content)], completion=said, answer=pitch))
    return rows


def silent(rows):
    "The same rows with silence in the place of each tone."
    def quiet(part): return dict(part, audio=0*part["audio"]) if part["type"] == "audio" else part
    return [dict(r, prompt=[dict(m, content=[quiet(x) for x in m["content"]]) for m in r["prompt"]]) for r in rows]


def draw_sounds(*batches, names=("",), n=6):
    "Waveforms and spectrograms of the first `n` rows, and below each what it was answered in some batches of them."
    import matplotlib.pyplot as plt
    _, axes = plt.subplots(2, n, figsize=(n*.9, 1.8 + .2*len(batches)), dpi=50)
    for i, (wave, spectrum) in enumerate(axes.T):
        samples = batches[0].media[i].audio[0]
        wave.plot(samples[:400], lw=.5)
        spectrum.specgram(samples, NFFT=256, noverlap=0, Fs=RATE, interpolation="nearest")
        for ax in (wave, spectrum): ax.set(xticks=[], yticks=[])
        spectrum.set_xlabel("\n".join(b.completion[i] for b in batches), fontsize=8)
    axes[1][0].set_ylabel("\n".join(names), rotation=0, ha="right", va="top", y=0, fontsize=8)


def processor():
    "A Qwen2-Audio's processor: the tokenizer, and a placeholder for each 40 milliseconds of sound."
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor
    marks = ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]
    tok = tokenizer([QUESTION, *PITCHES], special=marks, medium="".join(marks))
    ear = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, hop_length=160, chunk_length=1, n_fft=400)
    return Qwen2AudioProcessor(ear, tok, chat_template=tok.chat_template)


def qwen2_audio(reader, *, width=64, seed=0):
    "A small Qwen2-Audio with random weights, for a processor: a Whisper encoder, a projector and a Qwen2."
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
    tok = reader.tokenizer
    ends = dict(pad_token_id=tok.pad_token_id, bos_token_id=None, eos_token_id=tok.eos_token_id)
    text = dict(model_type="qwen2", hidden_size=width, intermediate_size=2*width, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4, vocab_size=len(tok), max_position_embeddings=128,
                initializer_range=.05, **ends)
    ear = dict(model_type="qwen2_audio_encoder", d_model=width, encoder_attention_heads=4, encoder_ffn_dim=2*width,
               encoder_layers=2, num_mel_bins=16, max_source_positions=50, initializer_range=.05)
    config = Qwen2AudioConfig(audio_config=ear, text_config=text,
                              audio_token_index=tok.convert_tokens_to_ids("<|AUDIO|>"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Qwen2AudioForConditionalGeneration(config)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = tok.eos_token_id, tok.pad_token_id
    return made
