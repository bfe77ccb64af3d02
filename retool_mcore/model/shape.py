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
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text")  # model types with Gated DeltaNet layers
DELTA = {  # field of a hybrid model's config.json -> field of DeltaShape
    "linear_num_key_heads": "key_heads", "linear_num_value_heads": "value_heads", "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim", "linear_conv_kernel_dim": "kernel",
}  # fmt: skip
FULL, LINEAR = "full_attention", "linear_attention"  # layer types of a hybrid model
DELTA_CHUNK = 64  # tokens; flash-linear-attention computes a sequence in chunks of this length
LOGIT_BYTES = 4  # per logit, over forward and backward pass, with memory.fused_cross_entropy (measured)
PLAIN_LOGIT_BYTES = 14  # the same without memory.fused_cross_entropy


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Dimensions of the Gated DeltaNet layers, which replace attention in most layers of Qwen3.5.

    Such a layer has no keys and values of earlier tokens. Each value head has one state of
    key_dim x value_dim, which every token decays, reads and updates (arXiv 2412.06464).
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the causal convolution over queries, keys and values

    @property
    def keys(self) -> int:
        """Values of all heads' keys per token, and equally of their queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Values of all heads' values per token, and equally of the output gate."""
        return self.value_heads * self.value_dim

    def params(self, hidden: int) -> int:
        """Weights of a layer's projections and convolution, without norms, decay and biases."""
        projected = 2 * self.keys + 2 * self.values + 2 * self.value_heads  # q, k, v, gate, beta, alpha
        return hidden * (projected + self.values) + self.kernel * (2 * self.keys + self.values)

    @property
    def recurrence_flops(self) -> int:
        """FLOPs per token and layer in a forward pass, beyond those of the weights.

        Four multiply-adds per element of the state: decay, read with the key, update, and read with
        the query. Source: ``gdn_layer_flops`` in Megatron-LM's megatron/training/training.py.
        """
        return 2 * 4 * self.value_heads * self.key_dim * self.value_dim

    @property
    def kept_values(self) -> int:
        """Activation values per token that a layer stores for backward, without its input.

        Counted in Megatron-core's gated_delta_net.py with flash-linear-attention, not measured: the
        inputs of the convolution and of the norm of queries and keys; queries and keys repeated
        for each value head; values, gate, the rule's output and the gated output; and a row of a
        chunk's triangular matrix per value head.
        """
        repeated = 2 * self.value_heads * self.key_dim
        return 4 * self.keys + repeated + 5 * self.values + DELTA_CHUNK * self.value_heads

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states in an engine, over all layers.

        They are in float32, and the convolution's inputs in bfloat16.
        """
        convolution = (self.kernel - 1) * (2 * self.keys + self.values)
        return self.layers * (4 * self.value_heads * self.key_dim * self.value_dim + 2 * convolution)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder with gated MLPs, dense or MoE, such as Qwen2, Qwen3 and Llama.

    In a hybrid model, figures of "a layer" are means over its layers of both types.
    """

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
    shared_ffn: int = 0  # intermediate size of the expert that every token uses; its output has a gate
    output_gate: bool = False  # whether q_proj also computes a gate of the attention output
    delta: DeltaShape | None = None

    def _mean(self, attention: float, delta: float) -> float:
        """The mean over layers of a quantity of attention layers and one of DeltaNet layers."""
        if self.delta is None:
            return attention
        return (self.attention_layers * attention + self.delta.layers * delta) / self.layers

    @property
    def attention_layers(self) -> int:
        return self.layers - (self.delta.layers if self.delta else 0)

    @property
    def attention_params(self) -> float:
        """Attention or DeltaNet weights of a layer, without biases and norms (under 1 %)."""
        gate = self.heads if self.output_gate else 0
        attention = self.hidden * self.head_dim * (2 * (self.heads + self.kv_heads) + gate)
        return self._mean(attention, self.delta.params(self.hidden) if self.delta else 0)

    @property
    def routed_params(self) -> int:
        """Weights of a layer's routed experts and router; 0 without experts."""
        return self.experts * self.hidden * (3 * self.ffn + 1)

    @property
    def shared_params(self) -> int:
        """MLP weights of a layer that every token uses: the dense MLP, or the shared expert."""
        if not self.experts:
            return 3 * self.hidden * self.ffn
        return self.hidden * (3 * self.shared_ffn + 1) if self.shared_ffn else 0

    @property
    def layer_params(self) -> float:
        return self.attention_params + self.routed_params + self.shared_params

    @property
    def used_ffn(self) -> int:
        """Hidden units of the MLP, or of a token's experts."""
        return self.ffn * (self.experts_per_token or 1) + self.shared_ffn

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
        return round(self.layers * self.layer_params) + self.head_params * (1 if self.tied else 2)

    def engine_bytes(self, *, fp8: bool) -> int:
        """Bytes of an engine's weights. With ``fp8``, layers use one byte per weight.

        The embedding and the head always use two.
        """
        return 2 * self.params - (round(self.layers * self.layer_params) if fp8 else 0)

    @property
    def compute_params(self) -> float:
        """Weights in matrix products per token.

        Excludes the embedding, which is a lookup. Includes only the experts that a token is routed
        to.
        """
        routed = self.hidden * (3 * self.ffn * self.experts_per_token + self.experts) if self.experts else 0
        return self.layers * (self.attention_params + routed + self.shared_params) + self.head_params

    @property
    def recurrence_flops(self) -> int:
        """FLOPs per token of all DeltaNet states in a forward pass; 0 without such layers."""
        return self.delta.layers * self.delta.recurrence_flops if self.delta else 0

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
        head_dim T^2`` per sequence for causal attention in L layers, plus ``3 T
        recurrence_flops``. With LoRA, it takes ``4 N T``, plus ``6 T`` per adapter weight. Excludes
        recomputation. Source: PaLM (arXiv 2204.02311), appendix B, with half of its attention term,
        because causal attention computes half.
        """
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        attention = 6.0 * self.attention_layers * self.heads * self.head_dim * squares
        return (self.product_flops(3, lora) + 3 * self.recurrence_flops) * tokens + attention

    @property
    def kept_bytes(self) -> float:
        """Activation bytes per token of a layer with fused kernels (bfloat16).

        These are the inputs of both norms, q, k, v, the attention output, and three tensors of the
        MLP's width: the outputs of the gate and up projections, and their product. With an output
        gate, also the gate and the gated output. For DeltaNet layers see ``DeltaShape``.
        """
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (4 if self.output_gate else 2) * attended + 2 * kv
        mixer = self._mean(attention, self.delta.kept_values if self.delta else 0)
        return 2 * (2 * self.hidden + mixer + 3 * self.used_ffn)

    @property
    def fp8_values(self) -> float:
        """Activation values per token and layer that model.fp8 stores in one byte instead of two.

        These are the inputs of two matrix products that no other operation reads: the attention
        output, and the product in the MLP.
        """
        return self._mean(self.heads * self.head_dim, self.delta.values if self.delta else 0) + self.used_ffn

    def kv_bytes(self, *, fp8: bool, tp: int = 1) -> int:
        """KV cache bytes per token, over all attention layers and an engine's ``tp`` ranks.

        A value takes one or two bytes. Each rank has at least one head, so ranks beyond the number
        of heads have copies.
        """
        return 2 * self.attention_layers * max(self.kv_heads, tp) * self.head_dim * (1 if fp8 else 2)


def shape_of_hf_config(config: Any) -> ModelShape:
    """The shape of the text decoder of a transformers PretrainedConfig, as ``shape_of_config``."""
    return shape_of_config(config.get_text_config().to_dict())


def shape_of_config(values: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face ``config.json``, or of the text part of a vision model.

    Raises ConfigError if it is not a decoder.
    """
    if isinstance(values.get("text_config"), Mapping):
        tied = {"tie_word_embeddings": values["tie_word_embeddings"]} if "tie_word_embeddings" in values else {}
        values = {**values["text_config"], **tied}
    # Published files have num_experts; transformers 5 writes num_local_experts instead.
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    width = "moe_intermediate_size" if experts else "intermediate_size"
    hybrid = values.get("model_type") in HYBRID
    shared = ("shared_expert_intermediate_size",) if hybrid and experts else ()
    needed = (*NEEDED, width, *shared, *(DELTA if hybrid else ()))
    missing = [key for key in (*needed, *(("layer_types",) if hybrid else ())) if key not in values]
    if missing:
        raise ConfigError(
            f"the model's config.json (model_type {values.get('model_type')}) lacks {', '.join(missing)}. Only "
            "text decoders are supported. Use a Qwen2, Qwen2.5, Qwen3, Qwen3.5 or Llama model."
        )
    numbers = (*needed, *(key for key in OPTIONAL if values.get(key) is not None))
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
        shared_ffn=values[shared[0]] if shared else 0,
        output_gate=hybrid,
        delta=_delta_of_config(values) if hybrid else None,
    )


def _delta_of_config(values: Mapping[str, Any]) -> DeltaShape:
    sizes = {name: values[key] for key, name in DELTA.items()}
    types: list[str] = values["layer_types"] or []
    return DeltaShape(layers=types.count(LINEAR), **sizes)


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
_DELTA = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}
_HYBRIDS = {  # the defaults of transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig
    "Qwen3.5-9B": ModelShape(
        layers=32, hidden=4096, heads=16, kv_heads=4, head_dim=256, ffn=12288, vocab=248320, tied=False,
        output_gate=True, delta=DeltaShape(layers=24, **_DELTA),
    ),
    "Qwen3.5-35B-A3B": ModelShape(
        layers=40, hidden=2048, heads=16, kv_heads=2, head_dim=256, ffn=512, vocab=248320, tied=False, experts=256,
        experts_per_token=8, shared_ffn=512, output_gate=True, delta=DeltaShape(layers=30, **_DELTA),
    ),
}  # fmt: skip
PUBLISHED = {name: ModelShape(**dict(zip(_COLUMNS, row, strict=False))) for name, row in _ROWS.items()} | _HYBRIDS
