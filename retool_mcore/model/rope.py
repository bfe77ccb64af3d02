"""Parses the RoPE settings of a config.json and checks that training supports them.

transformers' modeling_rope_utils.py computes the frequencies. A patch passes them to Megatron
(platforms/patches_bridge.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from retool_mcore.errors import ConfigError
from retool_mcore.model.shape import HYBRID

NEEDED = {  # rope type -> required settings
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
YARN = {
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip
UNREAD = {  # rope type -> settings that occur in files but that transformers ignores
    "linear": ("original_max_position_embeddings",),
    "yarn": ("finetuned",),
}
NEUTRAL = {"partial_rotary_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0}
# Settings of hybrid models: the rotated share of a head, and how images have several positions per
# token, which are equal in text.
HYBRID_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
MARKS = ("rope_type", "type", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE settings. Fields that the rope type does not use keep their defaults."""

    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # yarn: the context length before scaling

    @property
    def reach(self) -> int:
        """The maximum position after YaRN scaling; 0 for other rope types."""
        return round(self.factor * self.original_positions) if self.kind == "yarn" else 0


def rope_of_config(values: Mapping[str, Any]) -> Rope:
    """The RoPE settings of a config.json, with the keys of transformers 4 or 5.

    Raises ConfigError with the key for settings that training would compute differently from
    transformers.
    """
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings: dict[str, Any] = values.get(key) or {}
    if any(isinstance(setting, dict) for setting in settings.values()):
        raise ConfigError(f"{key} has settings for each type of layer, but training uses the same for all layers")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in NEEDED:
        raise ConfigError(f'{key} has type "{kind}", but training supports only {", ".join(NEEDED)}')
    if values.get("model_type") in HYBRID:
        if kind != "default":
            raise ConfigError(f'{key} has type "{kind}", but training supports only default in Qwen3.5')
        settings = {name: value for name, value in settings.items() if name not in HYBRID_KEYS}
    if values.get("model_type") == "mistral" and kind == "yarn":
        raise ConfigError(f'{key} has type "yarn", which Megatron-Bridge cannot build for Mistral')
    _check_keys(key, kind, settings)
    if kind != "yarn":
        return Rope(kind=kind)
    original = settings.get("original_max_position_embeddings") or values.get("max_position_embeddings")
    if not original:
        raise ConfigError(f"{key} of type yarn lacks original_max_position_embeddings")
    return Rope(kind=kind, factor=settings["factor"], original_positions=original)


def _check_keys(key: str, kind: str, settings: Mapping[str, Any]) -> None:
    missing = [name for name in NEEDED[kind] if settings.get(name) is None]
    if missing:
        raise ConfigError(f"{key} of type {kind} lacks {', '.join(missing)}")
    numbers = (*NEEDED[kind], *(YARN if kind == "yarn" else ()))
    for name, value in settings.items():
        if name in MARKS or value is None or name in UNREAD.get(kind, ()) or NEUTRAL.get(name) == value:
            continue
        if name not in numbers:
            raise ConfigError(f"{key} of type {kind} has {name} = {value!r}, which training does not support")
        if not isinstance(value, int | float):
            raise ConfigError(f"{key} has {name} = {value!r}, but it must be a number")
    if kind == "llama3" and not settings["high_freq_factor"] > settings["low_freq_factor"]:
        raise ConfigError(
            f"{key} has high_freq_factor = {settings['high_freq_factor']}, but it must be above low_freq_factor = "
            f"{settings['low_freq_factor']}"
        )
    if settings.get("factor") is not None and settings["factor"] < 1:
        raise ConfigError(f"{key} has factor = {settings['factor']}, but it must be at least 1")


def check_engine_rope(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that training supports but SGLang computes differently."""
    rope = rope_of_config(values)
    settings: dict[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    usual = 0.1 * log(rope.factor) + 1  # scales cosines and sines, so attention scores scale by its square
    factor, mscale, mscale_of_all = (settings.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is None and mscale and mscale_of_all:
        factor = (0.1 * mscale * log(rope.factor) + 1) / (0.1 * mscale_of_all * log(rope.factor) + 1)
    if rope.kind == "yarn" and factor is not None and abs(factor - usual) > 1e-6:
        raise ConfigError(
            f"yarn has attention factor {factor:.6g} (attention_factor, or mscale and mscale_all_dim), but SGLang "
            f"ignores these fields and uses 0.1 ln(factor) + 1 = {usual:.6g}"
        )
