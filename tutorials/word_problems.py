"""Arithmetic in words: problems, a tokenizer trained on them, and a small transformer. The data of the demo and the
tutorials, made from a seed."""
import random

NAMES = "Ann Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Ned Ola Pia".split()
THINGS = "apples books cards coins eggs nuts pens shells stamps stones".split()
STORIES = [("{n} has {a} {t} and finds {b} more. How many {t} does {n} have now?", 1),
           ("{n} had {a} {t} and gave away {b}. How many {t} are left?", -1),
           ("There are {a} {t} in a box. {n} adds {b}. How many {t} are in the box?", 1),
           ("{n} needs {a} {t} and has {b}. How many {t} are missing?", -1)]


def problems(n, *, seed=0, held_out=False, most=5, sloppy=0.5):
    """`n` rows {prompt, completion, answer}. `answer` is right; `completion` is a sloppy teacher's, who adds where a
    story subtracts (or the other way round) in a share `sloppy` of the rows. No text is both among the held-out
    problems and the others."""
    rng, rows = random.Random(f"{seed} {held_out}"), []
    while len(rows) < n:
        b, a = sorted((rng.randint(0, most), rng.randint(0, most)))
        story, sign = rng.choice(STORIES)
        prompt = story.format(n=rng.choice(NAMES), t=rng.choice(THINGS), a=a, b=b) + " Answer:"
        if (random.Random(prompt).random() < .2) != held_out: continue
        said = -sign if rng.random() < sloppy else sign
        rows.append(dict(prompt=prompt, completion=f" {a + said*b}", answer=str(a + sign*b)))
    return rows


def comparisons(n, *, seed=0, held_out=False, near=0.5, most=5):
    """`n` rows {prompt, chosen, rejected, answer}. `chosen` is right; `rejected` is the sloppy teacher's mistake in a
    share `near` of the rows, another number from 0 to 10 in the others. The same texts are held out as by
    `problems`."""
    rng, rows = random.Random(f"comparisons {seed} {held_out}"), []
    for r in problems(2*n, seed=seed, held_out=held_out, most=most, sloppy=1.):
        wrong = r["completion"] if rng.random() < near else f" {rng.randint(0, 10)}"
        if wrong.strip() != r["answer"]:
            rows.append(dict(prompt=r["prompt"], chosen=f" {r['answer']}", rejected=wrong, answer=r["answer"]))
    return rows[:n]


def questions(rows):
    "What reinforcement learning sees of the rows: prompts and right answers, no demonstrations."
    return [dict(prompt=r["prompt"], answer=r["answer"]) for r in rows]


def tokenizer(texts, *, vocab_size=300):
    """A byte-pair tokenizer trained on `texts`, digits one by one, as a transformers tokenizer with <bos>, <eos> and
    <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<pad>", "<bos>", "<eos>"],
                                                     show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def transformer(tok, *, width=64, layers=2, heads=4, std=0.02, seed=0):
    "A small Llama with random weights of a standard deviation `std`, for a tokenizer."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=len(tok), hidden_size=width, intermediate_size=4*width, num_hidden_layers=layers,
                         num_attention_heads=heads, max_position_embeddings=128, tie_word_embeddings=True,
                         initializer_range=std,
                         pad_token_id=tok.pad_token_id, bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def right(completions, answer, **_):
    "Reward: 1 where the completion is the answer and nothing else, else 0."
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
