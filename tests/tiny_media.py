"""Tiny models that see or hear, with random weights, and the processors of transformers that belong to them.

Gemma3, LLaVA and Qwen2-Audio need no torchvision; Qwen's VLs do, and run where it is (tests/test_qwen_vl.py)."""
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


KINDS = ("gemma3", "llava", "qwen2_audio")
TORCHVISION = Path(__file__).resolve().parents[1]/".venv"/"torchvision"      # of `make torchvision`
AXES = ()      # of those whose positions are not one number
if found := find_spec("torchvision"):
    AXES = ("qwen2_5_vl", "qwen3_vl")
    KINDS += AXES
    if Path(found.origin).resolve().parents[1] == TORCHVISION.resolve(): import torchvision_operators        # noqa: F401
COLOURS = dict(red=(230, 30, 30), green=(30, 200, 30), blue=(40, 60, 230), yellow=(240, 220, 30))
WORDS = dict(gemma3="<start_of_image>", llava="<image>", qwen2_audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
             qwen2_5_vl="<|vision_start|><|image_pad|><|vision_end|>",
             qwen3_vl="<|vision_start|><|image_pad|><|vision_end|>")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
           "<image>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|vision_start|>", "<|image_pad|>",
           "<|video_pad|>", "<|vision_end|>"]
NAMED = dict(gemma3=dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
             llava=dict(image_token="<image>"), qwen2_audio={})
VISION = dict(image_token="<|image_pad|>", video_token="<|video_pad|>", vision_bos_token="<|vision_start|>",
              vision_eos_token="<|vision_end|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'text' %}\
{{ c['text'] }}{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}MEDIUM{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def tokenizer(kind):
    from transformers import PreTrainedTokenizerFast
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   extra_special_tokens=NAMED.get(kind, VISION))
    made.add_tokens(SPECIAL, special_tokens=True)
    made.chat_template = TEMPLATE.replace("MEDIUM", WORDS[kind])
    return made


@cache
def processor(kind):
    import transformers as t
    words = tokenizer(kind)
    how = dict(tokenizer=words, chat_template=words.chat_template)
    if kind == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        return t.Gemma3Processor(image_processor=Gemma3ImageProcessorPil(size=dict(height=32, width=32)),
                                 image_seq_length=4, **how)
    if kind == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        sizes = dict(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))
        return t.LlavaProcessor(image_processor=CLIPImageProcessorPil(**sizes), patch_size=8, image_token="<image>",
                                vision_feature_select_strategy="default", num_additional_image_tokens=1, **how)
    if kind == "qwen2_audio":
        ear = t.WhisperFeatureExtractor(feature_size=32, sampling_rate=16000, hop_length=160, chunk_length=4,
                                        n_fft=400)
        return t.Qwen2AudioProcessor(feature_extractor=ear, **how)
    patch = 14 if kind == "qwen2_5_vl" else 16
    sizes = dict(patch_size=patch, merge_size=2, temporal_patch_size=2)
    pixels = dict(min_pixels=(2*patch)**2, max_pixels=(8*patch)**2)
    image = t.Qwen2VLImageProcessor(**sizes, **pixels)
    if kind == "qwen2_5_vl":
        video = t.Qwen2VLVideoProcessor(**sizes, **pixels)
        return t.Qwen2_5_VLProcessor(image_processor=image, video_processor=video, **how)
    edges = dict(shortest_edge=4*(2*patch)**2, longest_edge=64*(2*patch)**2)
    video = t.Qwen3VLVideoProcessor(**sizes, size=edges)
    return t.Qwen3VLProcessor(image_processor=image, video_processor=video, **how)


def model(kind, *, seed=0, hidden=64):
    import transformers as t
    words = tokenizer(kind)
    at = words.convert_tokens_to_ids
    text = dict(vocab_size=len(words), hidden_size=hidden, intermediate_size=2*hidden, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None,
                eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, initializer_range=.08)
    tower = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32,
                 patch_size=8)
    size = hidden//4
    axes = [size//2 - 2*(3*size//16), 3*size//16, 3*size//16]
    sections = dict(rope_type="default", rope_theta=1e4, mrope_section=axes)
    torch.manual_seed(seed)
    if kind == "gemma3":
        text |= dict(head_dim=size, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
        config = t.Gemma3Config(text_config=text, vision_config=dict(tower, vision_use_head=False),
                                mm_tokens_per_image=4, image_token_index=at("<image_soft_token>"),
                                boi_token_index=at("<start_of_image>"), eoi_token_index=at("<end_of_image>"))
        made = t.Gemma3ForConditionalGeneration(config)
        # transformers makes it of zeros: no image would matter
        with torch.no_grad(): made.model.multi_modal_projector.mm_input_projection_weight.normal_(std=.3)
    elif kind == "llava":
        config = t.LlavaConfig(text_config=dict(text, model_type="llama"), image_token_index=at("<image>"),
                               vision_config=dict(tower, model_type="clip_vision_model", projection_dim=32),
                               vision_feature_layer=-1)
        made = t.LlavaForConditionalGeneration(config)
    elif kind == "qwen2_audio":
        ear = dict(model_type="qwen2_audio_encoder", d_model=32, encoder_attention_heads=2, encoder_ffn_dim=64,
                   encoder_layers=2, num_mel_bins=32, max_source_positions=200, initializer_range=.08)
        config = t.Qwen2AudioConfig(audio_config=ear, text_config=dict(text, model_type="qwen2"),
                                    audio_token_index=at("<|AUDIO|>"))
        made = t.Qwen2AudioForConditionalGeneration(config)
    else:
        ids = dict(image_token_id=at("<|image_pad|>"), video_token_id=at("<|video_pad|>"),
                   vision_start_token_id=at("<|vision_start|>"), vision_end_token_id=at("<|vision_end|>"))
        eye = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=hidden,
                   initializer_range=.08)
        if kind == "qwen2_5_vl":
            eye |= dict(patch_size=14, fullatt_block_indexes=[1], window_size=56)
            config = t.Qwen2_5_VLConfig(text_config=dict(text, rope_parameters=sections), vision_config=eye, **ids,
                                        tie_word_embeddings=True)
            made = t.Qwen2_5_VLForConditionalGeneration(config)
        else:
            eye |= dict(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0])
            text = {k: x for k, x in text.items() if k not in ("bos_token_id", "eos_token_id")}
            text |= dict(head_dim=size, rope_parameters=dict(sections, mrope_interleaved=True))
            config = t.Qwen3VLConfig(text_config=text, vision_config=eye, **ids, tie_word_embeddings=True)
            made = t.Qwen3VLForConditionalGeneration(config)
    made.generation_config.eos_token_id = words.eos_token_id
    made.generation_config.pad_token_id = words.pad_token_id
    return made.eval()


def hears(kind): return kind == "qwen2_audio"
def part(kind): return "audio" if hears(kind) else "image"


def medium(kind, i):
    "A square of one of four colours, somewhere, or one of four tones."
    if hears(kind):
        time = np.arange(8000)/16000
        return np.sin(2*np.pi*(200, 600, 1800, 5000)[i % 4]*(1 + .01*(i//4))*time).astype(np.float32)
    picture, draw = Image.new("RGB", (56, 56), "white"), np.random.default_rng(i)
    x, y = draw.integers(0, 28, 2).tolist()
    picture.paste(list(COLOURS.values())[i % 4], (x, y, x+28, y+28))
    return picture


def row(kind, *numbers, text="?", **more):
    "A row whose message has so many media."
    name = part(kind)
    content = [{"type": name, name: medium(kind, i)} for i in numbers]
    return dict(prompt=[dict(role="user", content=[*content, dict(type="text", text=text)])], **more)


def video_row(kind, *numbers):
    "A row with so many videos of four frames, for a Qwen."
    frames = [np.stack([np.asarray(medium(kind, 4*k + i)) for k in range(4)]) for i in numbers]
    return dict(prompt="<|vision_start|><|video_pad|><|vision_end|>"*len(numbers) + "?", videos=frames)
