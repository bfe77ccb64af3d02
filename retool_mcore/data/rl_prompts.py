"""RL prompts in verl's schema, checked before a process group is started for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retool_mcore.config import RlConfig
from retool_mcore.data.chat import CODE_INTERPRETER, render_prompt
from retool_mcore.data.files import read_rows
from retool_mcore.data.lint import require_disjoint
from retool_mcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


def check_prompts(config: RlConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every prompt of the training and validation file renders, fits the budget and has a truth to be judged by.

    Raises DataError with file, row and column; also when validation problems are trained on without leave.
    """
    rows = {path: _check_file(path, config, tokenizer) for path in (config.data.train_file, config.data.val_file)}
    given, prompts = rows[config.data.train_file], config.train.prompts_per_step
    if given < prompts:
        raise DataError(f"{config.data.train_file} has {given} rows, fewer than train.prompts_per_step = {prompts}")
    if not config.data.allow_overlap:
        require_disjoint(config.data.train_file, config.data.val_file)


def _check_file(path: str, config: RlConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of rows of one file, all of them fit to be trained on."""
    tools = [CODE_INTERPRETER] if config.rollout.tool else None
    longest = config.data.max_prompt_tokens
    count = 0
    for index, row in read_rows(path, COLUMNS):
        where = f"{path}, row {index}"
        truth = (row["reward_model"] or {}).get("ground_truth")
        if not isinstance(truth, str) or not truth.strip():
            raise DataError(f"{where}, column reward_model: ground_truth = {truth!r} is not a text to compare with")
        try:
            tokens = len(render_prompt(row["prompt"], tools, tokenizer))
        except (DataError, TypeError, KeyError) as error:
            raise DataError(f"{where}, column prompt: {error}") from error
        if tokens > longest:
            raise DataError(
                f"{where}, column prompt: {tokens} tokens with the tool's description, over "
                f"data.max_prompt_tokens = {longest} of {config.source}. Raise it, or leave the row out"
            )
        count += 1
    if not count:
        raise DataError(f"{path} has no rows")
    return count
