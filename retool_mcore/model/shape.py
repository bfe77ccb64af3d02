"""A model's dimensions, with its parameter counts and the memory and FLOPs per token.

Also chooses how many layers to recompute for long sequences (``memory.recompute = "auto"``). A
micro-batch of train.micro_batch_tokens fits without recomputation. A longer sequence needs a larger
micro-batch, which recomputes just enough layers to stay within the same memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from retool_mcore.config.lora import Lora
from retool_mcore.errors import ConfigError

OPTIONAL = ("num_key_value_heads", "head_dim")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LOGIT_BYTES = 4  # per logit, over forward and backward pass, with memory.fused_cross_entropy (measured)
PLAIN_LOGIT_BYTES = 14  # the same without memory.fused_cross_entropy


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder with gated MLPs, dense or MoE, such as Qwen2, Qwen3 and Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # intermediate size of the MLP, or of one expert
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_params(self) -> int:
        """Attention weights of one layer, without biases and norms (under 1 %)."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def layer_params(self) -> int:
        ffn = 3 * self.hidden * self.ffn
        return self.attention_params + (ffn * self.experts + self.hidden * self.experts if self.experts else ffn)

    def adapter_params(self, rank: int, matrices: Sequence[str], tp: int = 1) -> float:
        """Parameters of one layer's adapters on one of ``tp`` ranks.

        Tensor parallelism splits only one of an adapter's two matrices: B of a column-parallel
        weight, A of a row-parallel one.
        """
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        whole_and_cut = {  # (unsplit, split) dimension: (in, out) if column-parallel, (out, in) if row-parallel
            "q_proj": (self.hidden, attended), "k_proj": (self.hidden, kv), "v_proj": (self.hidden, kv),
            "o_proj": (self.hidden, attended), "gate_proj": (self.hidden, self.ffn), "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.hidden, self.ffn),
        }  # fmt: skip
        return sum(rank * (whole + cut / tp) for whole, cut in map(whole_and_cut.__getitem__, matrices))

    @property
    def largest_matrix(self) -> int:
        """Weights of a dense layer's largest linear. Megatron fuses gate and up, and q, k and v."""
        return self.hidden * max(2 * self.ffn, self.head_dim * (self.heads + 2 * self.kv_heads))

    @property
    def head_params(self) -> int:
        """Weights of the embedding table, and equally of the output matrix."""
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.head_params * (1 if self.tied else 2)

    def engine_bytes(self, *, fp8: bool) -> int:
        """Bytes of an engine's weights. With ``fp8``, layers use one byte per weight.

        The embedding and the head always use two.
        """
        return 2 * self.params - (self.layers * self.layer_params if fp8 else 0)

    @property
    def compute_params(self) -> int:
        """Weights in matrix products per token.

        Excludes the embedding, which is a lookup. Includes only the experts that a token is routed
        to.
        """
        ffn = 3 * self.hidden * self.ffn
        mlp = ffn * self.experts_per_token + self.hidden * self.experts if self.experts else ffn
        return self.layers * (self.attention_params + mlp) + self.head_params

    def product_flops(self, passes: float, lora: Lora) -> float:
        """FLOPs per token in matrix products. ``passes``: in units of forward passes.

        Forward plus backward is 3 passes, and 4 with full recomputation. A pass costs 2 FLOPs per
        weight. With LoRA, the base weights are frozen and skip the pass for weight gradients.
        """
        frozen = 1 if lora.rank and passes >= 3 else 0
        adapters = self.layers * self.adapter_params(lora.rank, lora.matrices)
        return 2.0 * (self.compute_params * (passes - frozen) + adapters * passes)

    def train_flops(self, lengths: Sequence[int], lora: Lora) -> float:
        """Model FLOPs, as defined for MFU, to train on sequences of ``lengths`` tokens.

        A forward and backward pass takes ``6 N T``, with N = ``compute_params``, plus ``6 L heads
        head_dim T^2`` per sequence for causal attention. With LoRA, it takes ``4 N T``, plus
        ``6 T`` per adapter weight. Excludes recomputation. Source: PaLM (arXiv 2204.02311),
        appendix B, with half of its attention term, because causal attention computes half.
        """
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return self.product_flops(3, lora) * tokens + 6.0 * self.layers * self.heads * self.head_dim * squares

    @property
    def kept_bytes(self) -> int:
        """Activation bytes per token of a layer with fused kernels (bfloat16).

        These are the inputs of both norms, q, k, v, the attention output, and three tensors of the
        MLP's width: the outputs of the gate and up projections, and their product.
        """
        ffn = self.ffn * (self.experts_per_token or 1)
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (2 * self.hidden + 2 * attended + 2 * kv + 3 * ffn)

    @property
    def fp8_values(self) -> int:
        """Activation values per token and layer that model.fp8 stores in one byte instead of two.

        These are the inputs of two matrix products that no other operation reads: the attention
        output, and the product in the MLP.
        """
        return self.heads * self.head_dim + self.ffn * (self.experts_per_token or 1)

    def kv_bytes(self, *, fp8: bool) -> int:
        """KV cache bytes per token, over all layers: one or two bytes per value."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (1 if fp8 else 2)


def shape_of_hf_config(config: Any) -> ModelShape:
    """The shape of the text decoder of a transformers PretrainedConfig, as ``shape_of_config``."""
    return shape_of_config(config.get_text_config().to_dict())


def shape_of_config(values: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face ``config.json``. Raises ConfigError if it is not a decoder."""
    # Published files have num_experts; transformers 5 writes num_local_experts instead.
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    width = "moe_intermediate_size" if experts else "intermediate_size"
    missing = [key for key in (*NEEDED, width) if key not in values]
    if missing:
        raise ConfigError(
            f"the model's config.json (model_type {values.get('model_type')}) lacks {', '.join(missing)}. Only "
            "text decoders are supported. Use a Qwen2, Qwen2.5, Qwen3 or Llama model."
        )
    numbers = (*NEEDED, width, *(key for key in OPTIONAL if values.get(key) is not None))
    wrong = [key for key in numbers if type(values[key]) is not int or values[key] < 1]
    if wrong:
        raise ConfigError(
            f"the model's config.json has {wrong[0]} = {values[wrong[0]]!r:.80}, but it must be a positive integer. "
            "Correct it, or fetch it again."
        )
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return ModelShape(
        layers=values["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        ffn=values[width],
        vocab=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=values.get("num_experts_per_tok") or 0,
    )


def layers_to_recompute(
    tokens: int, budget_tokens: int, layers: int, *, other_memory: float, input_share: float
) -> int:
    """How many of ``layers`` to recompute so that ``tokens`` fit the memory of ``budget_tokens``.

    ``budget_tokens``: the tokens that fit without recomputation. ``other_memory``: a token's memory
    other than its layers' activations, as a multiple of one layer's. ``input_share``: the fraction
    of a layer's activations that is its input, which a recomputed layer keeps. A result above
    ``layers`` means that the tokens do not fit.
    """
    if tokens <= budget_tokens:
        return 0
    return ceil((layers + other_memory) * (1 - budget_tokens / tokens) / (1 - input_share))


def token_memory(shape: ModelShape, *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``other_memory`` and ``input_share`` of a model.

    ``other_memory`` includes the layer being recomputed.
    """
    logit_bytes = LOGIT_BYTES if fused_cross_entropy else PLAIN_LOGIT_BYTES
    return 1 + logit_bytes * shape.vocab / shape.kept_bytes, 2 * shape.hidden / shape.kept_bytes


def micro_batch_tokens(usual_tokens: int, longest_tokens: int, cp: int) -> int:
    """A rank's micro-batch budget in tokens: ``usual_tokens``, or more for a longer sequence."""
    return max(usual_tokens, ceil(longest_tokens / cp))


# Shapes from published config.json files, for planning without a local copy of the model.
_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "experts", "experts_per_token")
_ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 128, 29568, 152064, False),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": (36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": (40, 5120, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 25600, 151936, False),
    "Qwen3-30B-A3B": (48, 2048, 32, 4, 128, 768, 151936, False, 128, 8),
}
PUBLISHED = {name: ModelShape(**dict(zip(_COLUMNS, row, strict=False))) for name, row in _ROWS.items()}
