"""RL prompts in verl's schema, checked before a process group is started for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retool_mcore.config import RlConfig
from retool_mcore.data.files import read_rows
from retool_mcore.data.lint import require_disjoint
from retool_mcore.errors import DataError

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")

Renderer = Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]  # messages -> token ids [T] of the prompt


def check_prompts(config: RlConfig, render: Renderer) -> None:
    """Every prompt of the training and validation file renders, fits the budget and has a truth to be judged by.

    ``render`` is the rollout's own (``Protocol.prompt_ids``). Raises DataError with file, row and column; also when
    validation problems are trained on without leave.
    """
    rows = {path: _check_file(path, config, render) for path in (config.data.train_file, config.data.val_file)}
    given, prompts = rows[config.data.train_file], config.train.prompts_per_step
    if given < prompts:
        raise DataError(f"{config.data.train_file} has {given} rows, fewer than train.prompts_per_step = {prompts}")
    if not config.data.allow_overlap:
        require_disjoint(config.data.train_file, config.data.val_file)


def _check_file(path: str, config: RlConfig, render: Renderer) -> int:
    """The number of rows of one file, all of them fit to be trained on."""
    longest = config.data.max_prompt_tokens
    count = 0
    for index, row in read_rows(path, COLUMNS):
        where = f"{path}, row {index}"
        truth = (row["reward_model"] or {}).get("ground_truth")
        if not isinstance(truth, str) or not truth.strip():
            raise DataError(f"{where}, column reward_model: ground_truth = {truth!r} is not a text to compare with")
        try:
            tokens = len(render(row["prompt"]))
        except (DataError, TypeError, KeyError) as error:
            raise DataError(f"{where}, column prompt: {error}") from error
        if tokens > longest:
            raise DataError(
                f"{where}, column prompt: {tokens} tokens with the protocol's instructions, over "
                f"data.max_prompt_tokens = {longest} of {config.source}. Raise it, or leave the row out"
            )
        count += 1
    if not count:
        raise DataError(f"{path} has no rows")
    return count
