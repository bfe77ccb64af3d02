"""Checks RL prompts in verl's schema before the workers start."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from retool_mcore.config import RlConfig
from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.files import column_names, read_rows
from retool_mcore.data.layouts import MEDIA, require_text_only, truth_text, turns_in_text
from retool_mcore.data.prompt_format import OURS, hermes_prompt, unwrap
from retool_mcore.errors import DataError

COLUMNS = ("data_source", "prompt", "reward_model")  # extra_info may be missing
AGENT_COLUMN = "agent_name"  # verl's column for the agent loop of a row

Renderer = Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]  # messages -> token ids [T] of the prompt


def check_first_prompts(config: RlConfig) -> None:
    """Check the first row of each data file, before the imports that a full check needs.

    Raises DataError like ``check_prompts``.
    """
    for path in (*config.train_files, *config.validation.files):
        for index, row in islice(read_rows(path, COLUMNS), 1):
            _messages_of_row(f"{path}, row {index}", row)


def check_prompts(config: RlConfig, render: Renderer) -> list[str]:
    """Check that every prompt of all data files renders, fits the budget and has a ground truth.

    ``render``: the rollout's ``ToolProtocol.prompt_ids``. Returns one-sentence notes about the
    files for the user. Raises DataError with file, row and column.
    """
    train, held_out = config.train_files, config.validation.files
    notes: list[str] = []
    counts = {path: _check_file(path, config, render, notes) for path in (*train, *held_out)}
    rows, prompts = sum(counts[path] for path in train), config.train.prompts_per_step
    if rows < prompts:
        raise DataError(f"{config.data.train_file} has {rows} rows, fewer than train.prompts_per_step = {prompts}")
    _check_best_source(config, held_out)
    return notes


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a row's prompt, normalised by ``normalised_prompt``."""
    return normalised_prompt(prompt)[0]


def normalised_prompt(prompt: Any) -> tuple[list[dict[str, Any]], set[str]]:
    """Normalise the messages of a row's prompt; also return the names of stripped wrappers.

    Drops nulls, because in parquet every turn has the keys of all turns. Replaces other data sets'
    known instructions (``prompt_format.WRAPPERS``) with ours, because SFT did not train on them.
    Raises DataError if the prompt is not a list of messages.
    """
    prompt = turns_in_text(prompt)
    if not is_tables(prompt) or not prompt:
        raise DataError(f"{prompt!r:.80} is not a list of messages")
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in prompt]
    replaced = [_with_our_instruction(turn) for turn in turns]
    return [turn for turn, _ in replaced], {name for _, names in replaced for name in names}


def _with_our_instruction(turn: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A turn with our instruction instead of other data sets', and the stripped wrappers' names."""
    if turn.get("role") != "user" or not isinstance(turn.get("content"), str):
        return turn, []
    problem, names = unwrap(turn["content"])
    theirs = [name for name in names if name not in OURS]
    return (turn | {"content": hermes_prompt(problem)}, theirs) if problem and theirs else (turn, [])


def truth_of(reward_model: Any) -> str:
    """The ground truth of a row as text. Raises DataError if it is missing or unusable."""
    if not is_table(reward_model):
        raise DataError(f"{reward_model!r:.80} has no ground_truth")
    return truth_text(reward_model.get("ground_truth"), "ground_truth")


def _check_file(path: str, config: RlConfig, render: Renderer, notes: list[str]) -> int:
    """Check every row of one file, append notes for the user, and return the number of rows."""
    longest = config.data.max_prompt_tokens
    count, wrapped = 0, Counter[str]()
    names = column_names(path)
    media = [name for name in names if name in MEDIA]
    for index, row in read_rows(path, [*COLUMNS, *media]):
        where = f"{path}, row {index}"
        require_text_only(row, where)
        messages, stripped = _messages_of_row(where, row)
        try:
            tokens = len(render(messages))
        except (DataError, TypeError, KeyError) as error:
            raise DataError(f"{where}, column prompt: {error}") from error
        if tokens > longest:
            raise DataError(
                f"{where}, column prompt: {tokens} tokens with the protocol's instructions, over "
                f"data.max_prompt_tokens = {longest} of {config.source}. Raise it, or leave the row out"
            )
        count += 1
        wrapped.update(stripped)
    if wrapped:
        counts = ", ".join(f"{name} in {number} rows" for name, number in wrapped.most_common())
        notes.append(f"{path}: other data sets' instructions around its problems are replaced by ours ({counts})")
    if AGENT_COLUMN in names:
        notes.append(
            f"{path}: its column {AGENT_COLUMN} is ignored. It names an agent loop of verl; our loop samples "
            "responses, with the tools of [rollout]"
        )
    return count


def _messages_of_row(where: str, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], set[str]]:
    """``normalised_prompt`` of a row, after a check of its ground truth.

    Raises DataError with ``where``.
    """
    try:
        truth_of(row["reward_model"])
    except DataError as error:
        raise DataError(f"{where}, column reward_model: {error}") from error
    try:
        return normalised_prompt(row["prompt"])
    except (DataError, TypeError, KeyError) as error:
        raise DataError(f"{where}, column prompt: {error}") from error


def _check_best_source(config: RlConfig, held_out: Sequence[str]) -> None:
    """Raise DataError if best.metric refers to a data_source that no validation problem has."""
    if not (wanted := config.best_source):
        return
    sources = {str(row["data_source"]) for path in held_out for _, row in read_rows(path, ("data_source",))}
    if wanted not in sources:
        names = ", ".join(f"val-core/{source}/acc/mean@{config.validation.n}" for source in sorted(sources))
        raise DataError(
            f'best.metric = "{config.best.metric}" of {config.source}: no problem of validation.files has the '
            f'data_source "{wanted}". Choose one of: {names}'
        )
