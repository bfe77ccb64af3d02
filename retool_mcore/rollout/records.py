"""Trajectory records as JSON lines: turns, calls and results, with tokens, masks and log-probs.

Training and validation write <run>/trajectories/*.jsonl: all trajectories of
``rollout.record_groups`` groups per step.

key                 the prompt's id in this run, sample (verl's session), part; a group is the rows
                    of one prompt id
step, partition     "train": the step that trained on the row; "val": the step before the validation
prompt, truth       the prompt as the model saw it, and the ground truth
reward, reward_info the reward of the whole trajectory, and its parts
behavior            rollout.metrics.Behavior
stop_reason, extracted, started_unix_s, wall_s, turns
                    see ``record``; wall_s, engine_s, tool_s ... in seconds
                    extracted: the boxed answer in the last turn, or null
prompt_ids          [P] prompt tokens
response_ids        [T] response tokens
loss_mask           [T]; 1: the token contributes to the loss
versions            [T] weight version that sampled each token; -1: not sampled
logprobs            [T] log-probs from the engine, in nats; 0 for tokens that were not sampled
actor_logprobs      [T] log-probs of the actor before the step's updates, in nats; null in
                    validation
advantage           one number if all trained tokens share it (GRPO), else [T]; null in validation
"""

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig
from retool_mcore.rollout.loop import Trajectory, Turn
from retool_mcore.run.folder import replacing
from retool_mcore.run.trackers import Trace

MAX_CHARS = 20_000  # per prompt or response in a tracker's table; trackers handle long cells badly
ROTATE_BYTES = 64 << 20
KEEP_FILES = 8


def group_rank(uid: str, seed: int) -> float:
    """A pseudo-random rank in [0, 1). Each step records the groups with the lowest ranks."""
    return zlib.crc32(f"{seed}/{uid}".encode()) / 2**32


def is_candidate(uid: str, config: RlConfig) -> bool:
    """Whether this prompt's group may be among the ``rollout.record_groups`` lowest of its step.

    Records of all candidates pass through the pipeline, so there are only a few more candidates
    than needed. The probability that a step has fewer than ``rollout.record_groups`` candidates is
    below one in a million.
    """
    return group_rank(uid, config.run.seed) < _candidates(config) / config.train.prompts_per_step


def is_held_out_candidate(row: int, config: RlConfig) -> bool:
    """``is_candidate`` for validation row ``row``. Every validation records the same rows."""
    return row < _candidates(config)


def _candidates(config: RlConfig) -> float:
    """The expected number of candidate groups per step."""
    wanted = config.rollout.record_groups
    return wanted + 6 * math.sqrt(wanted) + 8 if wanted else 0.0


def record(trajectory: Trajectory) -> dict[str, Any]:
    """Everything but the tokens: turns with text, calls, results and timings; the stop reason."""
    return {
        "stop_reason": str(trajectory.stop_reason),
        "drop_error": trajectory.drop_error,
        "extracted": trajectory.answer,
        "started_unix_s": trajectory.started_unix_s,
        "wall_s": trajectory.wall_s,
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def tokens(trajectory: Trajectory) -> dict[str, Any]:
    """The token columns of a trajectory, each [T] or [P]; log-probs rounded to 6 decimals."""
    ledger = trajectory.ledger
    return {
        "prompt_ids": ledger.prompt_ids,
        "response_ids": ledger.response_ids,
        "loss_mask": ledger.loss_mask,
        "logprobs": [round(logprob, 6) for logprob in ledger.logprobs],
        "versions": ledger.versions,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    parsed = turn.parsed
    return {
        "start": turn.start,
        "tokens": turn.tokens,
        "text": turn.text,
        "kind": parsed.kind if parsed else "cut",
        "error": parsed.error if parsed else None,
        "repairs": list(parsed.repairs) if parsed else [],
        "results": [asdict(result) for result in turn.results],
        "engine_s": turn.engine_s,
        "tool_s": turn.tool_s,
    }


class RecordWriter:
    """Appends records to ``folder/NAME.jsonl`` with rotation. Only one process may write a file.

    A full file (``rotate_bytes``) becomes NAME.1.jsonl, the previous one NAME.2.jsonl, and so on,
    up to ``keep`` old files.
    """

    def __init__(
        self, folder: Path, name: str = "trajectories", *, rotate_bytes: int = ROTATE_BYTES, keep: int = KEEP_FILES
    ) -> None:
        self.folder, self.name, self.rotate_bytes, self.keep = folder, name, rotate_bytes, keep
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one record with a single write call, so that only the last line can be partial."""
        line = json.dumps(row, ensure_ascii=True, separators=(",", ":")) + "\n"
        if self.path.exists() and self.path.stat().st_size + len(line) > self.rotate_bytes:
            self._rotate()
        with open(self.path, "a", encoding="ascii") as file:
            file.write(line)

    def drop_rows_after(self, step: int) -> None:
        """Drop rows after ``step``, which a resumed run repeats, and a partial last line."""
        for index in range(self.keep + 1):  # newest first
            path = self.folder / f"{self.name}.{index}.jsonl" if index else self.path
            if not path.exists():
                continue
            rows = kept = 0
            with replacing(path) as fresh, path.open(encoding="ascii") as old, fresh.open("w", encoding="ascii") as new:
                for line in old:
                    rows += 1
                    if line.endswith("\n") and json.loads(line)["step"] <= step:
                        new.write(line)
                        kept += 1
            if rows == kept > 0:
                return  # older files contain only earlier rows

    def _rotate(self) -> None:
        for index in range(self.keep, 0, -1):
            older = self.folder / f"{self.name}.{index}.jsonl"
            newer = self.folder / f"{self.name}.{index - 1}.jsonl" if index > 1 else self.path
            if newer.exists():
                os.replace(newer, older)


# ---- a few records as rows of a tracker's table ----


def traces(records: Sequence[Mapping[str, Any]], most: int) -> list[Trace]:
    """At most ``most`` records as table rows, alternating wrong and correct ones if possible."""
    right = [row for row in records if _right(row)]
    wrong = [row for row in records if not _right(row)]
    in_turns = [row for pair in zip_longest(wrong, right) for row in pair if row is not None]
    return [trace(row) for row in in_turns[:most]]


def trace(record: Mapping[str, Any]) -> Trace:
    turns: Sequence[Mapping[str, Any]] = record["turns"]
    return {
        "partition": record["partition"],
        "trajectory": record["key"],
        "prompt": _cut(str(record.get("prompt"))),
        "response": _cut("\n".join(part for turn in turns for part in _texts(turn))),
        "extracted": None if record.get("extracted") is None else str(record["extracted"]),
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


def _texts(turn: Mapping[str, Any]) -> list[str]:
    """The model's text, then each call's result as the model saw it."""
    return [turn["text"], *(f"[result: {result['status']}]\n{result['shown']}" for result in turn["results"])]


def _cut(text: str) -> str:
    left = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]}\n[and {left} characters more]" if left > 0 else text
