"""The judge of answers, which needs neither torch nor a model. README.md has an example.

- ``extract_answer`` finds the answer in a whole response: the last box in the model's own words.
- ``judge`` says whether an answer equals a truth, within a limit of CPU time and memory.
- ``judge_many`` does so for many pairs, in several processes.
- ``judgeable`` says why no answer can be judged against a truth; None where one can.

What an answer says is never an error; what is wrong with the machine is a ``RewardError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retool_mcore.errors import RewardError
    from retool_mcore.reward.answer import Verdict, judge, judge_many, judgeable
    from retool_mcore.reward.extract import extract_answer

__all__ = ["RewardError", "Verdict", "extract_answer", "judge", "judge_many", "judgeable"]
_MODULES = {
    "RewardError": "retool_mcore.errors",
    "Verdict": "retool_mcore.reward.answer",
    "extract_answer": "retool_mcore.reward.extract",
    "judge": "retool_mcore.reward.answer",
    "judge_many": "retool_mcore.reward.answer",
    "judgeable": "retool_mcore.reward.answer",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a rollout that reads boxes does not pay for the judge."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
