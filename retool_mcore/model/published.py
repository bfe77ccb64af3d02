"""Shapes from published config.json files, for planning without a local copy of the model."""

from typing import Any

from retool_mcore.model.shape import ModelShape

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
