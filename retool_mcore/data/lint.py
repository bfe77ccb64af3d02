"""Checks data files before training: repeats, leaks, answers, lengths and loss masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.config.files import parquet_files
from retool_mcore.data.chat import parse_tools, render, render_prompt, renders_tool_turns
from retool_mcore.data.files import read_source
from retool_mcore.data.layouts import OPTIONS, VERL, Columns, NoTruth, read_problem, turns_in_text
from retool_mcore.data.leaks import Index, Pair, normalised, shared_problems
from retool_mcore.data.prompt_format import hermes_prompt, problem_of, retool_messages
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.errors import CheckpointError, DataError
from retool_mcore.reward.answer import truth_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HISTOGRAM_QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)
INDEX_ROWS = 50_000
SHOWN_PAIRS = 3  # of each kind
MAX_OVERLAP = 0.1  # share of validation problems that may be in the training data


@dataclass(frozen=True)
class LintedRow:
    """One SFT row (messages, tools) or RL row (prompt, truth).

    ``problem``: the user turn without instructions.
    """

    where: str
    problem: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    truth: str | None
    is_sft: bool


@dataclass
class FileLint:
    """Findings in one file. Do not train on a file with ``errors``."""

    source: str
    problems: list[str] = field(default_factory=list[str])
    lengths_tokens: list[int] = field(default_factory=list[int])
    loss_tokens: list[int] = field(default_factory=list[int])
    errors: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def read_problem_rows(
    source: str, without_truth: list[str] | None = None, columns: Columns | None = None
) -> Iterator[LintedRow]:
    """Yield the rows of an SFT file, an RL file or a file of plain problems, by their columns.

    ``columns``: the layout to use for rows that have these columns. Raises DataError with file, row
    and column for an unsupported row, and for a row without an answer if ``without_truth`` is None.
    Otherwise appends the message about a row without an answer to ``without_truth``.
    """
    for where, row in read_source(source):
        named = columns is not None and columns.fits(row)
        if "messages" in row and not named:
            yield _sft_row(where, row)
            continue
        try:
            problem, truth = read_problem(row, where, None if VERL.fits(row) and not named else columns)
        except NoTruth as error:
            if without_truth is None:
                raise
            without_truth.append(str(error))
            continue
        turns = turns_in_text(row.get("prompt"))
        messages = turns if is_tables(turns) else [{"role": "user", "content": hermes_prompt(problem)}]
        yield LintedRow(where, problem, messages, [CODE_INTERPRETER], truth, is_sft=False)


def _sft_row(where: str, row: Mapping[str, Any]) -> LintedRow:
    """A row of an SFT file. Its problem is the first user turn."""
    turns = row["messages"]
    if not is_tables(turns):
        raise DataError(f"{where}, column messages: {type(turns).__name__}, not a list of messages. {OPTIONS}")
    user = next((turn.get("content") for turn in turns if turn.get("role") == "user"), None)
    if not isinstance(user, str):
        raise DataError(f"{where}: no user turn with text")
    reward = row.get("reward_model")
    truth = reward.get("ground_truth") if is_table(reward) else row.get("ground_truth")
    return LintedRow(where, problem_of(user), turns, parse_tools(row.get("tools"), where), truth, is_sft=True)


def lint_file(
    source: str, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int | None, columns: Columns | None = None
) -> FileLint:
    """Run all checks on one file. Without a tokenizer, skip lengths and loss masks."""
    lint = FileLint(source)
    for row in read_problem_rows(source, lint.errors, columns):
        lint.problems.append(row.problem)
        if not row.is_sft or row.truth is not None:
            _lint_truth(row, lint)
        if tokenizer is not None:
            _lint_tokens(row, tokenizer, lint)
    keys = Counter(map(normalised, lint.problems))
    repeats = len(lint.problems) - len(keys)
    if repeats:
        worst = max(keys.values())
        lint.notes.append(f"{repeats} of {len(lint.problems)} rows repeat a problem (one occurs {worst} times)")
    if lint.lengths_tokens:
        _lint_lengths(lint, max_tokens)
    return lint


def _lint_truth(row: LintedRow, lint: FileLint) -> None:
    if not isinstance(row.truth, str):
        lint.errors.append(f"{row.where}: the ground truth is {row.truth!r:.80}, not text")
    elif reason := truth_problem(row.truth):
        lint.errors.append(f"{row.where}: no answer can be compared with the ground truth {row.truth!r:.80}: {reason}")


def _lint_tokens(row: LintedRow, tokenizer: PreTrainedTokenizerBase, lint: FileLint) -> None:
    try:
        if row.is_sft:
            rendered = render(row.messages, row.tools, tokenizer)
            lint.lengths_tokens.append(len(rendered))
            lint.loss_tokens.append(sum(rendered.loss_mask))
            if lint.loss_tokens[-1] == 0:
                lint.errors.append(f"{row.where}: no token carries loss")
        else:
            lint.lengths_tokens.append(_prompt_tokens(row, tokenizer))
    except DataError as error:
        lint.errors.append(f"{row.where}: {error}")
    except CheckpointError as error:  # the model's fault and the same for every such row: report it once
        message = f"rows like this one cannot be rendered: {error}"
        if not any(text.endswith(message) for text in lint.errors):
            lint.errors.append(f"{row.where}: {message}")


def _prompt_tokens(row: LintedRow, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of an RL prompt. A model without tool turns gets the inline format."""
    if renders_tool_turns(tokenizer):
        return len(render_prompt(row.messages, row.tools, tokenizer))
    return len(render_prompt(retool_messages(row.messages), None, tokenizer))


def _lint_lengths(lint: FileLint, max_tokens: int | None) -> None:
    lengths = np.array(lint.lengths_tokens)
    values = np.quantile(lengths, HISTOGRAM_QUANTILES, method="nearest")
    names = ("min", "10 %", "median", "90 %", "99 %", "max")
    table = ", ".join(f"{name} {int(value)}" for name, value in zip(names, values, strict=True))
    lint.notes.append(f"tokens per row: {table}; {int(lengths.sum())} in total")
    if max_tokens is not None:
        over = int((lengths > max_tokens).sum())
        lint.notes.append(f"{over} rows ({over / len(lengths):.1%}) are over {max_tokens} tokens")
    if lint.loss_tokens:
        share = sum(lint.loss_tokens) / lengths.sum()
        lint.notes.append(f"{share:.1%} of the tokens carry loss ({min(lint.loss_tokens)} in the row with the fewest)")


def overlap_lines(lints: Sequence[FileLint]) -> tuple[list[str], bool]:
    """The problems that each pair of files shares, and whether any pair exceeds MAX_OVERLAP."""
    lines, leaks = list[str](), False
    for first, second in combinations(lints, 2):
        if not (pairs := shared_problems(first.problems, second.problems)):
            continue
        total = len(second.problems)
        too_many = len(pairs) > MAX_OVERLAP * total
        leaks |= too_many
        same = [pair for pair in pairs if pair.score == 1]
        near = [pair for pair in pairs if pair.score < 1]
        kinds = ((len(same), "with the same text"), (len(near), "nearly the same"))
        counts = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
        prefix = "error: " if too_many else ""
        lines.append(f"{prefix}{second.source}: {len(pairs)} of {total} problems are in {first.source}: {counts}")
        lines += [f"  {pair.describe()}" for pair in (*same[:SHOWN_PAIRS], *near[:SHOWN_PAIRS])]
    if len(lints) > 1 and not lines:
        lines = ["no files share a problem"]
    return lines, leaks


def require_disjoint(train_file: str, val_file: str) -> None:
    """Raise DataError if over a tenth of the validation problems are in the training data.

    ``train_file`` may name several files, like data.train_file. Compares texts without known
    instructions and finds near duplicates, too. This is cheap: it reads each file once, tokenizes
    nothing, and indexes INDEX_ROWS training problems at a time.
    """
    files = parquet_files(train_file)
    for path in (*files, val_file):
        if not Path(path).is_file():  # training only reads local files
            raise DataError(f"{path}: cannot be read: no such file")
    held_out = [row.problem for row in read_problem_rows(val_file)]
    trained = (row.problem for path in files for row in read_problem_rows(path))
    shared: dict[int, Pair] = {}
    while part := list(islice(trained, INDEX_ROWS)):
        index = Index(part)
        for number, problem in enumerate(held_out):
            if number not in shared and (pair := index.find(problem)):
                shared[number] = pair
    if len(shared) > MAX_OVERLAP * len(held_out):
        first = shared[min(shared)]
        raise DataError(
            f"{len(shared)} of the {len(held_out)} problems of {val_file} are also in {train_file}: a loss or accuracy "
            f"measured on them is meaningless, and at most {MAX_OVERLAP:.0%} may be shared. Hold out other rows for "
            f"validation, or set data.allow_overlap = true if this is intended. The first: {first.describe()}"
        )
