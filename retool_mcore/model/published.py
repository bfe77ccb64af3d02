"""Shapes from each model's published config.json, for planning without a copy of the model."""

from retool_mcore.model.shape import ModelShape

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
