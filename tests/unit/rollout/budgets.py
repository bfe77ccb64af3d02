"""The budgets of one trajectory for tests: the configuration's defaults, and what a test sets."""

from dataclasses import replace
from typing import Any

from retool_mcore.config import SandboxSettings, ToolLoop
from retool_mcore.rollout.limits import Limits


def limits(*, max_response_tokens: int, **budgets: Any) -> Limits:
    """A run's limits, with these ``budgets`` in place of the configuration's defaults."""
    defaults = Limits.of(ToolLoop(max_response_tokens=max_response_tokens), SandboxSettings())
    return replace(defaults, **budgets)
