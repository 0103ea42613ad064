"""Pictures of a square in one of four colours, made from a seed, and a small model that sees. The data of the tutorials
with images."""
import random

COLOURS = dict(red=(225, 40, 40), green=(40, 180, 60), blue=(50, 80, 230), yellow=(240, 210, 40))
OTHER = dict(red="yellow", yellow="red", green="blue", blue="green")     # what a sloppy teacher takes it for
QUESTION = "What colour is the square?"


def picture(colour, *, seed=0):
    "A square of 20 × 20 pixels anywhere on a light ground of 32 × 32, with some noise. A PIL image."
    import numpy as np
    from PIL import Image
    rng = np.random.default_rng(seed)
    pixels, (x, y) = np.full((32, 32, 3), 235.), rng.integers(0, 13, 2)
    pixels[y:y+20, x:x+20] = COLOURS[colour]
    return Image.fromarray((pixels + rng.normal(0, 5, pixels.shape)).clip(0, 255).astype(np.uint8))


def pictures(n, *, seed=0, held_out=False, sloppy=None):
    """`n` rows {prompt, completion, answer}. `prompt` is a message with a picture and a question; `answer` is right;
    `completion` is a teacher's: a blind one names any of the four colours, a sloppy one takes red for yellow, green for
    blue, or the other way round, in a share `sloppy` of the rows."""
    rng, rows = random.Random(f"{seed} {held_out}"), []
    for _ in range(n):
        colour, said, errs = rng.choice([*COLOURS]), rng.choice([*COLOURS]), rng.random()
        if sloppy is not None: said = OTHER[colour] if errs < sloppy else colour
        seen = picture(colour, seed=rng.getrandbits(32))
        content = [dict(type="image", image=seen), dict(type="text", text=QUESTION)]
        rows.append(dict(prompt=[dict(role="user", content=content)], completion=said, answer=colour))
    return rows


def comparisons(n, *, seed=0, held_out=False, near=0.5):
    """`n` rows {prompt, chosen, rejected, answer}. `chosen` is right; `rejected` is the sloppy teacher's mistake in a
    share `near` of the rows, any other colour in the rest."""
    rng, rows = random.Random(f"comparisons {seed} {held_out}"), []
    for r in pictures(n, seed=seed, held_out=held_out):
        wrong = rng.choice([c for c in COLOURS if c != r["answer"]])
        if rng.random() < near: wrong = OTHER[r["answer"]]
        rows.append(dict(prompt=r["prompt"], chosen=r["answer"], rejected=wrong, answer=r["answer"]))
    return rows


def questions(rows):
    "What reinforcement learning sees of the rows: prompts and right answers, no demonstrations."
    return [dict(prompt=r["prompt"], answer=r["answer"]) for r in rows]


def blank(rows):
    "The same rows with an empty picture in the place of each."
    from PIL import Image
    white = Image.new("RGB", (32, 32), "white")
    def empty(part): return dict(part, image=white) if part["type"] == "image" else part
    return [dict(r, prompt=[dict(m, content=[empty(x) for x in m["content"]]) for m in r["prompt"]]) for r in rows]


def right(completions, answer, **_):
    "Reward: 1 where the completion is the answer and nothing else, else 0."
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}\
{% for x in m.content %}{% if x.type == 'text' %}{{ x.text }}{% else %}MEDIUM{% endif %}{% endfor %}{% endif %}\
{{ '<eos>' if m.role == 'assistant' }} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def tokenizer(texts, *, special=(), medium="<image>"):
    "One token a word of some texts, as a transformers tokenizer with <eos>, <pad> and a chat template."
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.train_from_iterator(["user : assistant :", *texts], trainers.WordLevelTrainer(
        special_tokens=["<pad>", "<eos>", "<unk>"], show_progress=False))
    t.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   chat_template=TEMPLATE.replace("MEDIUM", medium))


def processor(texts=(QUESTION, *COLOURS)):
    "A LLaVA's processor: the tokenizer, and four placeholders an image, one for each patch of 16 × 16 pixels."
    from transformers import CLIPImageProcessorPil, LlavaProcessor
    tok = tokenizer(texts, special=["<image>"])
    eye = CLIPImageProcessorPil(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))
    return LlavaProcessor(eye, tok, patch_size=16, vision_feature_select_strategy="default",
                          num_additional_image_tokens=1, image_token="<image>", chat_template=tok.chat_template)


def llava(reader, *, width=64, seed=0):
    "A small LLaVA with random weights, for a processor: a CLIP tower, a projector and a Llama, two layers each."
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    tok = reader.tokenizer
    size = dict(hidden_size=width, intermediate_size=2*width, num_hidden_layers=2, num_attention_heads=4)
    ends = dict(pad_token_id=tok.pad_token_id, bos_token_id=None, eos_token_id=tok.eos_token_id)
    text = dict(size, model_type="llama", vocab_size=len(tok), max_position_embeddings=128, initializer_range=.05,
                **ends)
    tower = dict(size, model_type="clip_vision_model", image_size=32, patch_size=16, projection_dim=width)
    config = LlavaConfig(text_config=text, vision_config=tower, vision_feature_layer=-1,
                         image_token_index=tok.convert_tokens_to_ids("<image>"), **ends)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)
