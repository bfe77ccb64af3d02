"""A model's shape as numbers: what it weighs and what one token costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retool_mcore.activations import layer_bytes, num_experts
from retool_mcore.errors import ConfigError
from retool_mcore.models import read_shape


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder with gated feed-forward layers (Qwen2, Qwen2.5, Qwen3, Llama), dense or with experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert where there are experts
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_params(self) -> int:
        """Of one layer; biases and norms, some thousandths, are left out."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def layer_params(self) -> int:
        ffn = 3 * self.hidden * self.ffn
        return self.attention_params + (ffn * self.experts + self.hidden * self.experts if self.experts else ffn)

    @property
    def head_params(self) -> int:
        """The embedding table or the output matrix."""
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.head_params * (1 if self.tied else 2)

    @property
    def kept_bytes(self) -> int:
        """Of one token, what one layer with fused kernels keeps for its backward pass."""
        ffn = self.ffn * (self.experts_per_token or 1)
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return layer_bytes(hidden=self.hidden, attended=attended, kv=kv, ffn=ffn)

    @property
    def kv_bytes(self) -> int:
        """Of one token in the rollout engine's cache, all layers, bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


# As published in each model's config.json, for plans on a machine that has no copy of the model.
PUBLISHED = {
    "Qwen2.5-0.5B": ModelShape(
        layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=151936, tied=True
    ),
    "Qwen2.5-1.5B": ModelShape(
        layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, ffn=8960, vocab=151936, tied=True
    ),
    "Qwen2.5-3B": ModelShape(
        layers=36, hidden=2048, heads=16, kv_heads=2, head_dim=128, ffn=11008, vocab=151936, tied=True
    ),
    "Qwen2.5-7B": ModelShape(
        layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocab=152064, tied=False
    ),
    "Qwen2.5-14B": ModelShape(
        layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=13824, vocab=152064, tied=False
    ),
    "Qwen2.5-32B": ModelShape(
        layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab=152064, tied=False
    ),
    "Qwen2.5-72B": ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=29568, vocab=152064, tied=False
    ),
    "Qwen3-0.6B": ModelShape(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936, tied=True
    ),
    "Qwen3-1.7B": ModelShape(
        layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=6144, vocab=151936, tied=True
    ),
    "Qwen3-4B": ModelShape(
        layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocab=151936, tied=True
    ),
    "Qwen3-8B": ModelShape(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936, tied=False
    ),
    "Qwen3-14B": ModelShape(
        layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=17408, vocab=151936, tied=False
    ),
    "Qwen3-32B": ModelShape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936, tied=False
    ),
    "Qwen3-30B-A3B": ModelShape(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=768,
        vocab=151936,
        tied=False,
        experts=128,
        experts_per_token=8,
    ),
}


def of_config(values: Mapping[str, Any]) -> ModelShape:
    """From the content of a Hugging Face ``config.json``."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    experts = num_experts(values)
    return ModelShape(
        layers=values["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        ffn=values["moe_intermediate_size"] if experts else values["intermediate_size"],
        vocab=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=values.get("num_experts_per_tok") or 0,
    )


def of_model(path: str) -> ModelShape:
    """From a local model directory, else by the name's likeness to a published one ("runs/sft_qwen2.5_7b/export").

    Raises ConfigError when neither tells the shape.
    """
    values = read_shape(path) if Path(path).exists() else {}
    if values:
        return of_config(values)
    plain = path.lower().replace("_", "-")
    for name, shape in PUBLISHED.items():
        if f"{name.lower()}-" in f"{plain}-".replace("/", "-"):
            return shape
    raise ConfigError(
        f"model.path = {path!r} is not a folder here, and its name is not like one of {', '.join(PUBLISHED)}, so its "
        "shape is not known. Fetch its config.json into a folder, or name it after the model it is made from."
    )
