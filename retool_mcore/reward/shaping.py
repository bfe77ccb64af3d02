"""Optional parts of the reward beyond the paper's, each off by default and logged separately.

- ``call_bonus``: a bonus for every call of a wrong response, and the highest reward with it; 0.1
  and -0.6 in the public recipe.
- ``overlong_buffer_tokens``: DAPO's overlong shaping. A response that runs into the last so many
  tokens before ``overlong_limit_tokens`` loses up to 1, linearly. The limit is
  rollout.max_response_tokens, interpreter output included.
- ``require``, "format": a right answer counts only when no call of the response was malformed;
  "simplified": only when it is worked out (see ``simplified``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.response import Response
from retool_mcore.reward.simplified import simplified


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The shaping options of section [reward]; its defaults change nothing."""

    call_bonus: float
    highest_with_bonus: float
    overlong_buffer_tokens: int
    overlong_limit_tokens: int
    require_format: bool
    require_simplified: bool

    @classmethod
    def of(cls, reward: Reward, max_response_tokens: int) -> Shaping:
        return cls(
            call_bonus=reward.call_bonus[0],
            highest_with_bonus=reward.call_bonus[1],
            overlong_buffer_tokens=reward.overlong_buffer_tokens,
            overlong_limit_tokens=max_response_tokens,
            require_format="format" in reward.require,
            require_simplified="simplified" in reward.require,
        )

    def __post_init__(self) -> None:
        if self.overlong_buffer_tokens and not 0 < self.overlong_buffer_tokens <= self.overlong_limit_tokens:
            raise RewardError(
                f"overlong_buffer_tokens = {self.overlong_buffer_tokens} is not within overlong_limit_tokens = "
                f"{self.overlong_limit_tokens}, the longest response"
            )

    @property
    def on(self) -> bool:
        return self.needs_behavior or self.require_simplified

    @property
    def needs_behavior(self) -> bool:
        return bool(self.call_bonus or self.overlong_buffer_tokens or self.require_format)

    def counts(self, response: Response, behavior: Mapping[str, Any]) -> bool:
        """Whether a response counts as right, given what its answer is."""
        return self.worked_out(response) and response.right and not (self.require_format and behavior["malformed"])

    def worked_out(self, response: Response) -> bool:
        """False for a right answer that ``require_simplified`` refuses."""
        return not (self.require_simplified and response.right) or simplified(response.answer or "", response.truth)

    def parts(self, right: bool, base: float, behavior: Mapping[str, Any]) -> dict[str, float]:
        """The parts to add to ``base``, by name; ``right``: what ``counts`` said.

        Only options that are on have parts, so every response has the same ones.
        """
        parts: dict[str, float] = {}
        if self.call_bonus:
            bonus = min(self.call_bonus * behavior["calls"], max(self.highest_with_bonus - base, 0.0))
            parts["reward_calls"] = 0.0 if right else bonus
        if self.overlong_buffer_tokens:
            over = behavior["response_tokens"] - (self.overlong_limit_tokens - self.overlong_buffer_tokens)
            parts["reward_overlong"] = -min(max(over / self.overlong_buffer_tokens, 0.0), 1.0)
        if self.require_format:
            parts["format_ok"] = float(not behavior["malformed"])
        return parts


def behavior_of(extra_info: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the agent loop counted.

    Raises RewardError when it is missing, because shaping would silently do nothing.
    """
    behavior = (extra_info or {}).get("behavior")
    if not isinstance(behavior, Mapping):
        raise RewardError("reward shaping needs the counts of our agent loop (extra_info behavior), and has none")
    return cast("Mapping[str, Any]", behavior)
