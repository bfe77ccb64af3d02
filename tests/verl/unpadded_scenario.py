"""verl's queue as a table of rows, and workers that read and write it, for tests of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

GROUPS, SIZE, PROMPT = 6, 4, 5


class Rows:
    """verl's queue with responses of 1 to 60 tokens, interpreter's tokens in them, and padding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, padding: bool = True) -> None:
        from verl.trainer.ppo.v1 import trainer_base

        from retool_mcore.verl import blocks

        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: list[dict[str, Any]] = []
        drawn = torch.Generator().manual_seed(7)
        for number in range(GROUPS * SIZE + padding):
            padding = number == GROUPS * SIZE
            length = 1 if padding else int(torch.randint(1, 61, (1,), generator=drawn))
            mask_T = (torch.rand(length, generator=drawn) < 0.7).long() * (not padding)
            if not padding:
                mask_T[0] = 1
            engine_T = -3 * torch.rand(length, generator=drawn)
            actor_T = engine_T + 0.3 * torch.randn(length, generator=drawn)
            whole = torch.full((PROMPT,), -77.0)  # what the model said of the prompt, and of the last token
            score_T = torch.zeros(length)
            score_T[-1] = 0.0 if padding else float(torch.randint(-3, 4, (1,), generator=drawn))
            key = f"pad_{number}_0" if padding else f"g{number // SIZE}_{number % SIZE}_0"
            self.rows[key] = {
                "prompts": torch.ones(PROMPT, dtype=torch.long),
                "responses": torch.ones(length, dtype=torch.long),
                "response_mask": mask_T,
                "rm_scores": score_T,
                "rollout_log_probs": engine_T,
                "ref_log_prob": engine_T + 0.4 * torch.randn(length, generator=drawn),
                "values": torch.randn(length, generator=drawn),
                "log_probs": torch.cat([whole[:-1], actor_T, whole[-1:]]),
                "entropy": torch.cat([whole[:-1], 2 * torch.rand(length, generator=drawn), whole[-1:]]),
                "uid": key.rsplit("_", 2)[0],
                "extra_fields": {"row": number},
                "num_turns": torch.tensor(0 if padding else 2 + number % 3),
            }
            steps = {"min_global_steps": 3 + number % 2, "max_global_steps": 4}
            lengths = {"prompt_len": PROMPT, "response_len": length, "seq_len": PROMPT + length}
            self.tags.append({**lengths, **steps, **({"is_padding": True} if padding else {})})
        for module in (blocks, trainer_base):
            monkeypatch.setattr(module, "tq", self)

    def batch(self) -> Any:
        from transfer_queue import KVBatchMeta

        return KVBatchMeta(partition_id="train", keys=list(self.rows), tags=self.tags, extra_info={})

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils import tensordict_utils as tu

        columns, told = {}, {}
        for name in select_fields:
            if name not in self.rows[keys[0]]:
                continue
            values = [self.rows[key][name] for key in keys]
            if isinstance(values[0], (str, dict)):
                told[name] = values
            elif values[0].ndim:
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = torch.stack(values)
        data = tu.get_tensordict(columns, {})
        for name, values in told.items():
            tu.assign_non_tensor_stack(data, name, values)
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for name in fields.keys():  # noqa: SIM118
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return self.batch()


class Workers:
    """Two ranks with our worker's methods, and one without an output of its pass."""

    def __init__(self, rows: Rows, *more: str) -> None:
        from retool_mcore.verl.workers import SavingActorWorker

        self.more, self.rows, self.asked = more, rows, list[tuple[list[str], dict[str, Any]]]()
        self.ranks: list[Any] = [object.__new__(SavingActorWorker) for _ in range(3)]
        for rank in self.ranks:
            rank.compute_log_prob = lambda data: data.select("log_probs", "entropy", *self.more)
        self.ranks[2].compute_log_prob = lambda data: None

    def compute_log_prob(self, batch: Any) -> Any:
        return batch

    def old_log_probs(self, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        self.asked.append((batch.fields, batch.extra_info))
        half = len(batch.keys) // 2
        for rank, keys in zip(self.ranks, (batch.keys[:half], batch.keys[half:], batch.keys[:1]), strict=True):
            data = self.rows.kv_batch_get(
                keys=keys, partition_id="train", select_fields=[*batch.fields, "log_probs", "entropy"]
            )
            tu.assign_non_tensor(data, **batch.extra_info)
            if (columns := rank.old_log_probs(data)) is not None:
                self.rows.kv_batch_put(keys, "train", columns)
        return batch

    def gap_histogram(self) -> list[Any]:
        return [rank.gap_histogram() for rank in self.ranks]

    def gaps_of_bin(self, number: int) -> list[Any]:
        return [rank.gaps_of_bin(number) for rank in self.ranks]
