"""Rotary positions as a config.json has them: their frequencies, and what scales attention.

The reference is transformers' modeling_rope_utils.py. The frequencies are computed in its order, in
float32, so that they are the same bits: at position 100,000 one bit of a frequency turns a head by
thousandths of a radian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Any

from retool_mcore.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_THETA = 10_000.0  # transformers', where the file names none
NEEDED = {  # rope type -> what its settings must have
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
YARN = {
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip
UNREAD = {  # rope type -> settings that transformers does not read for it, and that are found in files
    "linear": ("original_max_position_embeddings",),
    "yarn": ("finetuned",),
}
NEUTRAL = {"partial_rotary_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0}
MARKS = ("rope_type", "type", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions. A field that its kind does not use keeps its default."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the context before the scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: of cosines and sines, so of the scores its square

    @property
    def reach(self) -> int:
        """Positions that yarn's scaling is made for, 0 for other kinds."""
        return round(self.factor * self.original_positions) if self.kind == "yarn" else 0

    def frequencies(self, width: int) -> Tensor:
        """Radians [width / 2] that each pair of a head's ``width`` values turns by a position."""
        import torch

        periods: Tensor = self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        plain = 1.0 / periods
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original_positions / (2 * pi / plain)  # within the original context
            kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
            return (1 - kept) * plain / self.factor + kept * plain
        if self.kind == "yarn":
            low, high = self._ramp(width)
            kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
            return 1.0 / (self.factor * periods) * (1 - kept) + plain * kept
        return plain

    def _ramp(self, width: int) -> tuple[float, float]:
        """Yarn keeps the pairs below the first as they are, and scales those above the second."""

        def pair(turns: float) -> float:
            """The pair that turns so often within the original context."""
            return width * log(self.original_positions / (turns * 2 * pi)) / (2 * log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        return low, high + (0.001 if low == high else 0)


def rope_of_config(values: Mapping[str, Any]) -> Rope:
    """The positions of a config.json, in the keys of transformers 4 or 5.

    Raises ConfigError, which names the key, for those that training would not compute as
    transformers does.
    """
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    found: dict[str, Any] = values.get(key) or {}
    if any(isinstance(each, dict) for each in found.values()):
        raise ConfigError(f"{key} has settings for each type of layer, and training takes one for all")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in NEEDED:
        raise ConfigError(f'{key} has type "{kind}", and training takes {", ".join(NEEDED)}')
    _check_keys(key, kind, found)
    theta = found.get("rope_theta") or values.get("rope_theta") or DEFAULT_THETA
    original = found.get("original_max_position_embeddings") or values.get("max_position_embeddings")
    if kind == "yarn" and not original:
        raise ConfigError(f"{key} of type yarn lacks original_max_position_embeddings")
    given: dict[str, Any] = {"kind": kind, "theta": float(theta)}
    if kind != "default":
        given["factor"] = found["factor"]
    if kind in {"llama3", "yarn"}:
        given["original_positions"] = original
    if kind == "llama3":
        given |= {name: found[name] for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        given |= {name: found[name] for name in ("beta_fast", "beta_slow") if found.get(name)}
        given |= {"truncate": bool(found.get("truncate", True)), "attention_factor": _attention_factor(found)}
    return Rope(**given)


def _check_keys(key: str, kind: str, found: Mapping[str, Any]) -> None:
    missing = [name for name in NEEDED[kind] if found.get(name) is None]
    if missing:
        raise ConfigError(f"{key} of type {kind} lacks {', '.join(missing)}")
    numbers = (*NEEDED[kind], *(YARN if kind == "yarn" else ()))
    for name, value in found.items():
        if name in MARKS or value is None or name in UNREAD.get(kind, ()) or NEUTRAL.get(name) == value:
            continue
        if name not in numbers:
            raise ConfigError(f"{key} of type {kind} has {name} = {value!r}, which training does not know there")
        if not isinstance(value, int | float):
            raise ConfigError(f"{key} has {name} = {value!r}, which is no number")
    if kind == "llama3" and not found["high_freq_factor"] > found["low_freq_factor"]:
        raise ConfigError(
            f"{key} has high_freq_factor = {found['high_freq_factor']}, which is not above low_freq_factor = "
            f"{found['low_freq_factor']}"
        )
    if found.get("factor") is not None and found["factor"] < 1:
        raise ConfigError(f"{key} has factor = {found['factor']}, and scaling has at least 1")


def _attention_factor(found: Mapping[str, Any]) -> float:
    given, mscale, of_all = (found.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if mscale and of_all:
        return _concentration(found["factor"], mscale) / _concentration(found["factor"], of_all)
    return _concentration(found["factor"])


def _concentration(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def check_engine_rope(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for positions that training takes and SGLang computes otherwise."""
    rope = rope_of_config(values)
    if abs(rope.attention_factor - _concentration(rope.factor if rope.kind == "yarn" else 1.0)) > 1e-6:
        raise ConfigError(
            f"yarn with attention factor {rope.attention_factor:.6g} (attention_factor, or mscale and mscale_all_dim), "
            f"and SGLang samples with 0.1 ln(factor) + 1 = {_concentration(rope.factor):.6g} whatever they say"
        )
