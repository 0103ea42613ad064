"Tiny models, batches and error bounds that several test files share."
import math
from dataclasses import replace

import torch
from rlblocks import Batch
from rlblocks.engines.optimizers import adamw

SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)


KINDS = dict(
    llama=("Llama", {}), qwen2=("Qwen2", {}), qwen3=("Qwen3", dict(head_dim=8)), gemma=("Gemma", dict(head_dim=8)),
    mistral=("Mistral", {}), mistral_window=("Mistral", dict(sliding_window=5)),
    qwen2_window=("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    gemma2=("Gemma2", dict(head_dim=8, sliding_window=5, attn_logit_softcapping=.5, final_logit_softcapping=3.)),
    gemma3=("Gemma3", dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    # a shared expert too
    qwen2_moe=("Qwen2Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                shared_expert_intermediate_size=32, decoder_sparse_step=1)),
    mixtral=("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5)),
    qwen3_moe=("Qwen3Moe",
               dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)),
    gpt2=("GPT2", {}))


def model(kind="llama", dtype=torch.float32, seed=0, **more):
    "A random model of an architecture that transformers has."
    import transformers as tf
    name, extra = KINDS[kind]
    sizes, ends = (SIZES, "ForCausalLM") if kind != "gpt2" else (dict(vocab_size=32, n_embd=32, n_layer=2, n_head=4,
                                                                      n_positions=64, bos_token_id=1), "LMHeadModel")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(tf, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
            **sizes | dict(eos_token_id=1, pad_token_id=0) | extra | more)
        return getattr(tf, f"{name}{ends}")(config).to(dtype)


def exact(net):
    "A model in float64 all through: transformers' RMS norms go by way of fp32."
    for m in net.double().modules():
        if "RMSNorm" not in type(m).__name__: continue
        eps, one = (m.eps, 1.) if hasattr(m, "eps") else (m.variance_epsilon, 0.)
        m.forward = lambda x, m=m, eps=eps, one=one: x*(x.square().mean(-1, keepdim=True)
                                                        + eps).rsqrt()*(m.weight + one)
    return net


def tokenizer():
    "32 words and a chat template."
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")), eos_token="w1", pad_token="w0")
    made.chat_template = "{{ messages[0].content }}"
    return made


def speller(characters='0123456789abeflnorstuy{}":,-Ġ'):
    "Characters as byte-level ids, one of two of them, and an end."
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    ids = {c: i for i, c in enumerate(["<pad>", "</s>", *characters, "12"])}
    backend = Tokenizer(models.BPE(ids, merges=[("1", "2")]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def rows(B=16, T=18, seed=0, dtype=torch.float64, holes=True):
    "Rows of 2 … T−1 tokens with random interior masks and the columns a loss wants."
    g = torch.Generator().manual_seed(seed)
    lengths, at = torch.arange(2, 2+B).clamp(max=T), torch.arange(T)
    mask = (at >= 1) & (at < lengths[:, None])
    if holes: mask &= torch.rand(B, T, generator=g) < .8
    draw = lambda: torch.randn(B, T, generator=g, dtype=dtype)
    return Batch(tokens=torch.randint(2, 32, (B, T), generator=g), lengths=lengths, mask=mask, row=torch.arange(B),
                 group=torch.arange(B)//4,
                 advantages=draw(), returns=draw(), ref_logprobs=-draw().abs(), temperature=torch.full((B,), .7))


def prompts(lengths=(5, 2, 7), seed=0):
    "Prompts with group ids that are not 0, 1, 2 …"
    g = torch.Generator().manual_seed(seed)
    T = max(lengths)
    return Batch(tokens=torch.randint(2, 32, (len(lengths), T),
                                      generator=g)*(torch.arange(T) < torch.tensor(lengths)[:, None]),
                 lengths=torch.tensor(lengths), mask=torch.zeros(len(lengths), T, dtype=torch.bool),
                 group=torch.arange(100, 100+len(lengths)), answer=[str(n) for n in lengths])


def gradients(wrapper):
    "A dict that receives the gradient of each parameter just before the wrapper's next optimizer step."
    found, names = {}, {id(p): n for n, p in wrapper._run.module.named_parameters()}
    def keep(optimizer, *_):
        found.update({names[id(p)]: p.grad.clone() for group in optimizer.param_groups
                      for p in group["params"] if p.grad is not None})
    wrapper._run.model.optimizer.register_step_pre_hook(keep)
    return found


def laid_out(wrapper, **how):
    "The wrapper, as if probes had found another layout."
    wrapper._run = replace(wrapper._run, layout=replace(wrapper._run.layout, **how))
    return wrapper


def read(wrapper, b, **how):
    "What a loss sees of a batch as one micro-batch."
    from rlblocks.models.forward import OutputRequest
    from rlblocks.models.outputs import outputs
    run = wrapper._run
    return outputs(run.model, run.layout, b.part(range(len(b))), OutputRequest(**how))


def apart(a, b):
    "Largest difference of two gradients, relative to the largest entry of the second."
    assert a.keys() == b.keys() and a
    biggest = max(g.abs().max() for g in b.values())
    assert biggest > 1e-6
    return max((a[n]-b[n]).abs().max() for n in b).item()/biggest.item()


def bound(n, scale, dtype=torch.float32):
    """How far a sum of `n` terms may be off, on any machine, whose absolute values sum to `scale`: eps·scale·min(n,
    4√n).

    Each of n roundings is off by at most eps/2, relative: the whole by less than n·eps (Higham 2002, §4.2). They do not
    conspire: it is off by more than 4√n·eps with probability below 2·exp(−32) (Higham & Mary 2019). Count along the
    longest chain; a product of [n, k] and [k, m] has k terms."""
    return min(n, 4*math.sqrt(n))*torch.finfo(dtype).eps*float(scale)


# Terms one after another in `model()`: two layers of projections, attention, MLP and norms; head and log-sum-exp.
CHAIN = 2*(3*32 + 8 + 18 + 32 + 64 + 2*32) + 32 + 32

# Two fp32 gradients of `rows()`, relative to the largest entry: forward, back, and a sum over tokens.
APART = 2*bound(2*CHAIN + 16*18, 1.)


def reach(want, dtype=torch.float32):
    "How far two passes through a model of `SIZES` may be apart: both are off by the bound of their longest chain."
    return 2*bound(CHAIN, max(1., float(want.detach().abs().max())), dtype)


NEAR = .01                 # of lr: see `steady`


def steady(lr, eps=1e-3, **how):
    """An AdamW whose steps rounding cannot decide, for comparing weights after fp32 steps.

    Adam moves a weight by lr·g/(|g| + eps). With eps = 1e-8 a gradient of 1e-8, which is all rounding where terms of
    0.1 cancel, moves its weight by lr/2 to either side, as the machine has it. Here an error δ of the gradient moves a
    weight by at most 2·lr·δ/eps a step. For gradients of 0.1, the size that a tiny model has, δ < bound(CHAIN, .1) =
    1.2e-6: a step is off by 0.2 % of lr, and weights after five of them may be compared to `NEAR`·lr."""
    return adamw(lr=lr, eps=eps, **how)
