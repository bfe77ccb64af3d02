"""The responses of a step that an RL run recorded, to send them to a bare server again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from waves import Ends, Response, Turn

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.templates import tokenizer_of
from retool_mcore.errors import DataError
from retool_mcore.platforms.call_end import TABLE
from retool_mcore.rollout.protocol import protocol_of
from retool_mcore.run.metrics import read_metrics


@dataclass(frozen=True)
class Recorded:
    """A run's folder. A run writes ``rollout.record_groups`` groups of each step."""

    run: Path

    @cached_property
    def config(self) -> RlConfig:
        return load_config(RlConfig, self.run / "config.toml")

    @property
    def engines(self) -> int:
        """Engines that share a step's prompts."""
        devices = self.config.rollout.gpus or self.config.cluster.num_gpus
        return devices // self.config.rollout.engine_tp

    @cached_property
    def groups(self) -> dict[int, list[list[Response]]]:
        """Of each step of training the groups that are on record."""
        found: dict[int, dict[str, list[Response]]] = {}
        for row in self._rows():
            if row["partition"] == "train" and row["drop_error"] is None and (response := response_of(row)).turns:
                uid = row["key"].rsplit("_", 2)[0]  # the prompt's id, session, part
                found.setdefault(row["step"], {}).setdefault(uid, []).append(response)
        return {step: list(groups.values()) for step, groups in found.items()}

    def _rows(self) -> Iterator[dict[str, Any]]:
        for path in sorted((self.run / "trajectories").glob("trajectories*.jsonl")):
            with path.open(encoding="ascii") as lines:
                yield from (json.loads(line) for line in lines if line.endswith("\n"))

    def last_step(self) -> int:
        if not self.groups:
            raise DataError(f"{self.run}: no trajectories of training. Set rollout.record_groups and run it again.")
        return max(self.groups)

    def of_step(self, step: int, groups: int) -> tuple[list[Response], int]:
        """So many groups, and how many are of other steps.

        The step's own groups come first, then those of the steps nearest to it.
        """
        near = sorted(self.groups, key=lambda other: (abs(other - step), other))
        found = [(other, group) for other in near for group in self.groups[other]]
        if len(found) < groups:
            raise DataError(
                f"{self.run} has recorded {len(found)} groups of training, and {groups} are asked for. Ask for fewer "
                "(--groups), or run it with a larger rollout.record_groups."
            )
        taken = found[:groups]
        return [each for _, group in taken for each in group], sum(other != step for other, _ in taken)

    def speed(self, step: int, *, pauses: bool) -> dict[str, Any]:
        """What the run itself needed for all responses of the step, each engine's share.

        time_generation_s is without the slowest trajectory's calls, which the pauses stand for.
        """
        for row in read_metrics(self.run / "metrics.jsonl"):
            if row["step"] == step and "time_generation_s" in row:
                count = self.config.train.prompts_per_step * self.config.rollout.group_size / self.engines
                seconds = row["time_generation_s"] + (row["time_tool_wait_s"] if pauses else 0.0)
                tokens = row["behavior/model_tokens"] * count
                return {
                    "seconds": round(seconds, 3),
                    "time_generation_s": round(row["time_generation_s"], 3),
                    "time_tool_wait_s": round(row["time_tool_wait_s"], 3),
                    "tokens": round(tokens),
                    "tokens_per_s": round(tokens / seconds, 1),
                    "requests_per_s": round(row["behavior/turns"] * count / seconds, 1),
                    "engine_s": round(row["behavior/engine_s"], 3),
                    "cached_fraction": row.get("engine/cache_hit_rate"),
                }
        raise DataError(f"{self.run}/metrics.jsonl has no step {step} of training. Name another by --step.")


def response_of(row: dict[str, Any]) -> Response:
    """A row of trajectories/*.jsonl (rollout/records.py)."""
    turns: Sequence[dict[str, Any]] = [turn for turn in row["turns"] if turn["tokens"]]
    made: list[Turn] = []
    for turn, after in pairwise(turns):
        told = row["response_ids"][turn["start"] + turn["tokens"] : after["start"]]
        made.append(Turn(turn["tokens"], turn["tool_s"], tuple(told)))
    made += [Turn(turn["tokens"]) for turn in turns[-1:]]
    return Response(tuple(row["prompt_ids"]), tuple(made))


def ends_of(config: RlConfig, model: Path) -> Ends:
    """Where the run's loop ends turns of this model, and after which of them it goes on."""
    protocol = protocol_of(config.rollout, tokenizer_of(config.model, str(model)))
    return Ends(
        stop_token_ids=protocol.stop_token_ids,
        custom_params={} if protocol.call_end is None else {TABLE: protocol.call_end.text},
        max_response_tokens=config.rollout.max_response_tokens,
        calls=lambda turn_ids: protocol.read(turn_ids, protocol.text(turn_ids)).kind in ("tool_call", "malformed"),
    )
