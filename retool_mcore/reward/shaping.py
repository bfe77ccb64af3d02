"""What may be added to the paper's reward, each off by default and logged as a part of its own.

- ``call_bonus``: the public recipe's 0.1 for every call of a wrong response, up to ``call_bonus_cap`` (-0.6).
- ``overlong_buffer_tokens``: DAPO's overlong shaping; the last that many tokens before ``overlong_limit_tokens`` cost
  linearly up to 1. The limit is rollout.max_response_tokens, interpreter output included.
- ``require_format``: a right answer counts only when no call of the response was malformed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retool_mcore.errors import RewardError


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The options; the defaults change nothing."""

    call_bonus: float = 0.0
    call_bonus_cap: float = -0.6
    overlong_buffer_tokens: int = 0
    overlong_limit_tokens: int = 0
    require_format: bool = False

    def __post_init__(self) -> None:
        if self.overlong_buffer_tokens and not 0 < self.overlong_buffer_tokens <= self.overlong_limit_tokens:
            raise RewardError(
                f"overlong_buffer_tokens = {self.overlong_buffer_tokens} is not within overlong_limit_tokens = "
                f"{self.overlong_limit_tokens}, the longest response"
            )

    @property
    def on(self) -> bool:
        return bool(self.call_bonus or self.overlong_buffer_tokens or self.require_format)

    def counts(self, right: bool, behavior: Mapping[str, Any]) -> bool:
        """Does a response with a right (or wrong) answer count as right?"""
        return right and not (self.require_format and behavior["malformed"])

    def parts(self, right: bool, base: float, behavior: Mapping[str, Any]) -> dict[str, float]:
        """The parts to add to ``base``, by name; those of the options that are on, so the same for
        every response.
        """
        parts: dict[str, float] = {}
        if self.call_bonus:
            bonus = min(self.call_bonus * behavior["calls"], max(self.call_bonus_cap - base, 0.0))
            parts["reward_calls"] = 0.0 if right else bonus
        if self.overlong_buffer_tokens:
            over = behavior["response_tokens"] - (self.overlong_limit_tokens - self.overlong_buffer_tokens)
            parts["reward_overlong"] = -min(max(over / self.overlong_buffer_tokens, 0.0), 1.0)
        if self.require_format:
            parts["format_ok"] = float(not behavior["malformed"])
        return parts


def behavior_of(extra_info: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the agent loop counted. Raises RewardError where it is missing: shaping would silently
    do nothing.
    """
    behavior = (extra_info or {}).get("behavior")
    if not isinstance(behavior, Mapping):
        raise RewardError("reward shaping needs the counts of our agent loop (extra_info behavior), and has none")
    return behavior
