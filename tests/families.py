"""The shapes of the model families that the recipes name, as their config.json have them."""

import json
from pathlib import Path
from typing import Any

ROPE_OF_LLAMA = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def _shape(
    kind: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], *, vocab: int, longest: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "vocab_size": vocab, "max_position_embeddings": longest,
        "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


QWEN25_HALF = _shape("qwen2", 896, 4864, 24, (14, 2), vocab=151_936, longest=32_768, rope_theta=1e6)
QWEN25_ONE = _shape("qwen2", 1536, 8960, 28, (12, 2), vocab=151_936, longest=32_768, rope_theta=1e6)
# name: (config.json, parameters in millions as published)
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN25_HALF, 494),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN25_ONE, 1544),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (QWEN25_HALF, 494),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (QWEN25_ONE, 1544),
    "Qwen/Qwen3-0.6B": (
        _shape(
            "qwen3", 1024, 3072, 28, (16, 8),
            vocab=151_936, longest=40_960, head_dim=128, rope_theta=1e6, rope_scaling=None,
        ),
        596,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        _shape("llama", 576, 1536, 30, (9, 3), vocab=49_152, longest=8192, rope_theta=1e5),
        135,
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        _shape("llama", 960, 2560, 32, (15, 5), vocab=49_152, longest=8192, rope_theta=1e5, rope_scaling=None),
        362,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        _shape(
            "llama", 2048, 8192, 16, (32, 8),
            vocab=128_256, longest=131_072, head_dim=64, rope_theta=5e5, rope_scaling=ROPE_OF_LLAMA,
        ),
        1236,
    ),
}  # fmt: skip


def write_hub_cache(folder: Path, name: str) -> Path:
    """The model's config.json as the hub's client keeps it. Returns the snapshot's folder."""
    commit = "0" * 40
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(FAMILIES[name][0]))
    return snapshot
