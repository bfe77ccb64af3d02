"""A few recorded trajectories as rows for a tracker's table: asked, said, printed and judged.

``records`` are those of records.py. A row has the columns that ``trace`` returns.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from retool_mcore.run.trackers import Trace

MOST_CHARS = 20_000  # of a prompt or response; trackers keep long cells badly


def traces(records: Sequence[Mapping[str, Any]], most: int) -> list[Trace]:
    """Rows of at most ``most`` records: a wrong and a right one in turns while there are both."""
    right = [each for each in records if _right(each)]
    wrong = [each for each in records if not _right(each)]
    in_turns = [each for pair in zip_longest(wrong, right) for each in pair if each is not None]
    return [trace(each) for each in in_turns[:most]]


def trace(record: Mapping[str, Any]) -> Trace:
    turns: Sequence[Mapping[str, Any]] = record["turns"]
    return {
        "partition": record["partition"],
        "trajectory": record["key"],
        "prompt": _cut(str(record.get("prompt"))),
        "response": _cut("\n".join(part for turn in turns for part in _said(turn))),
        "answer": None if record.get("answer") is None else str(record["answer"]),
        "truth": str(record.get("truth")),
        "right": _right(record),
        "reward": float(record["reward"]),
        "calls": sum(len(turn["results"]) for turn in turns),
        "tokens": len(record["response_ids"]),
        "ended by": str(record.get("stop_reason")),
    }


def _right(record: Mapping[str, Any]) -> bool:
    parts: Mapping[str, Any] = record.get("reward_info") or {}
    return float(parts.get("acc", 0.0)) > 0


def _said(turn: Mapping[str, Any]) -> list[str]:
    """What the model wrote, then what it was shown of each call's result."""
    return [turn["text"], *(f"[result: {each['status']}]\n{each['shown']}" for each in turn["results"])]


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARS
    return f"{text[:MOST_CHARS]}\n[and {left} characters more]" if left > 0 else text
