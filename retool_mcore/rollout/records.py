"""Trajectories as JSON lines: what was said, called and returned, with tokens, mask and logprobs."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig
from retool_mcore.rollout.loop import Trajectory, Turn

RECORDED_PER_STEP = 16  # trajectories written of a training step, about: a few hundred kB at 16k tokens each
ROTATE_BYTES = 64 << 20
KEEP_FILES = 8


def is_sampled(uid: str, session: int, config: RlConfig) -> bool:
    """Is this trajectory one of the about RECORDED_PER_STEP that are written down? Decided by its prompt's id."""
    share = RECORDED_PER_STEP / config.train.prompts_per_step
    return session == 0 and zlib.crc32(uid.encode()) < share * 2**32


def record(trajectory: Trajectory) -> dict[str, Any]:
    """Everything but tokens: turns with text, calls, results and timings, and how it ended."""
    return {
        "stop_reason": str(trajectory.stop_reason),
        "drop_error": trajectory.drop_error,
        "answer": trajectory.answer,
        "started_unix_s": trajectory.started_unix_s,
        "wall_s": trajectory.wall_s,
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def tokens(trajectory: Trajectory) -> dict[str, Any]:
    """The token columns of a trajectory."""
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
    """Appends records to ``folder/NAME.jsonl``; a full file is renamed to NAME.1.jsonl, and so on. One process each."""

    def __init__(
        self, folder: Path, name: str = "trajectories", *, rotate_bytes: int = ROTATE_BYTES, keep: int = KEEP_FILES
    ) -> None:
        self.folder, self.name, self.rotate_bytes, self.keep = folder, name, rotate_bytes, keep
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def write(self, row: Mapping[str, Any]) -> None:
        """One record is one write, so that a reader never sees half of a line but the last."""
        line = json.dumps(row, ensure_ascii=True, separators=(",", ":")) + "\n"
        if self.path.exists() and self.path.stat().st_size + len(line) > self.rotate_bytes:
            self._rotate()
        with open(self.path, "a", encoding="ascii") as file:
            file.write(line)

    def _rotate(self) -> None:
        for index in range(self.keep, 0, -1):
            older = self.folder / f"{self.name}.{index}.jsonl"
            newer = self.folder / f"{self.name}.{index - 1}.jsonl" if index > 1 else self.path
            if newer.exists():
                os.replace(newer, older)
