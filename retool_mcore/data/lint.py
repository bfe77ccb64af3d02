"""Check data files before training: repeats, leaks, answers, lengths and loss masks."""

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
from retool_mcore.data.chat import render, render_prompt, renders_tool_turns
from retool_mcore.data.layouts import LAYOUTS, OPTIONS, Columns, NoTruth, read_problem
from retool_mcore.data.leaks import Index, Overlap, Pair, normalised, overlap
from retool_mcore.data.messages import parse_tools
from retool_mcore.data.prompt_format import hermes_prompt, problem_of, retool_messages
from retool_mcore.data.sources import read_source
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.errors import CheckpointError, DataError
from retool_mcore.reward.answer import truth_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HISTOGRAM_QUANTILES = (0, 0.1, 0.5, 0.9, 0.99, 1)
INDEX_ROWS = 50_000
MAX_OVERLAP = 0.1  # of the validation problems; above it training refuses to start


@dataclass(frozen=True)
class LintedRow:
    """One SFT row (messages, tools) or RL row (prompt, truth).

    ``problem`` is what the user says, without instructions.
    """

    where: str
    problem: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    truth: str | None
    is_sft: bool


@dataclass
class FileLint:
    """Findings on one file; files with ``errors`` must not be trained on."""

    source: str
    problems: list[str] = field(default_factory=list[str])
    lengths_tokens: list[int] = field(default_factory=list[int])
    loss_tokens: list[int] = field(default_factory=list[int])
    errors: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def read_problem_rows(
    source: str, without_truth: list[str] | None = None, columns: Columns | None = None
) -> Iterator[LintedRow]:
    """Rows of an SFT file, an RL file or a plain file of problems, recognised by their columns.

    A row that has ``columns`` is read by them, and others must be what training reads. Raises
    DataError naming file, row and column; for a row without an answer only where there is no list
    ``without_truth`` to put it on.
    """
    for where, row in read_source(source):
        is_sft = "messages" in row
        named = columns is not None and columns.fit(row)
        if named or not (is_sft or _is_rl(row)):
            try:
                problem, truth = read_problem(row, where, columns)
            except NoTruth as error:
                if without_truth is None:
                    raise
                without_truth.append(str(error))
                continue
            messages = [{"role": "user", "content": hermes_prompt(problem)}]
            yield LintedRow(where, problem, messages, [CODE_INTERPRETER], truth, is_sft=False)
            continue
        turns = row.get("messages") if is_sft else row.get("prompt")
        if not is_tables(turns):
            name = "messages" if is_sft else "prompt"
            raise DataError(f"{where}, column {name}: {type(turns).__name__}, not a list of messages. {OPTIONS}")
        # An SFT row opens with its problem. An RL prompt ends with it and may show solved examples
        # first.
        users = [turn.get("content") for turn in turns if turn.get("role") == "user"]
        user = users[0 if is_sft else -1] if users else None
        if not isinstance(user, str):
            raise DataError(f"{where}: no user turn with text")
        reward = row.get("reward_model")
        truth = reward.get("ground_truth") if is_table(reward) else row.get("ground_truth")
        tools = parse_tools(row.get("tools"), where) if is_sft else [CODE_INTERPRETER]
        yield LintedRow(where, problem_of(user), turns, tools, truth, is_sft)


def _is_rl(row: Mapping[str, Any]) -> bool:
    """Whether a row's prompt is in turns and its truth is where RL reads it, if anywhere."""
    others = "reward_model" not in row and any(each.fit(row) for each in LAYOUTS)
    return "prompt" in row and not isinstance(row["prompt"], str) and not others


def lint_file(
    source: str, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int | None, columns: Columns | None = None
) -> FileLint:
    """Run all checks on one file; the check of lengths needs a tokenizer."""
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
        lint.notes.append(f"{repeats} of {len(lint.problems)} rows repeat a problem (one of them {worst} times)")
    if lint.lengths_tokens:
        _lint_lengths(lint, max_tokens)
    return lint


def _lint_truth(row: LintedRow, lint: FileLint) -> None:
    if not isinstance(row.truth, str):
        lint.errors.append(f"{row.where}: the ground truth is {row.truth!r:.80}, not a text")
    elif reason := truth_problem(row.truth):
        lint.errors.append(f"{row.where}: nothing can be compared with the ground truth {row.truth!r:.80}: {reason}")


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
    except CheckpointError as error:  # of the model: the same for every such row, so it is told once
        told = f"rows like this one cannot be rendered: {error}"
        if not any(each.endswith(told) for each in lint.errors):
            lint.errors.append(f"{row.where}: {told}")


def _prompt_tokens(row: LintedRow, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length of an RL prompt, inline for a model without tool turns."""
    if renders_tool_turns(tokenizer):
        return len(render_prompt(row.messages, row.tools, tokenizer))
    return len(render_prompt(retool_messages(row.messages), None, tokenizer))


def _lint_lengths(lint: FileLint, max_tokens: int | None) -> None:
    lengths = np.array(lint.lengths_tokens)
    values = np.quantile(lengths, HISTOGRAM_QUANTILES, method="nearest")
    names = ("min", "10 %", "median", "90 %", "99 %", "max")
    table = ", ".join(f"{name} {int(value)}" for name, value in zip(names, values, strict=True))
    lint.notes.append(f"tokens a row: {table}; {int(lengths.sum())} in all")
    if max_tokens is not None:
        over = int((lengths > max_tokens).sum())
        lint.notes.append(f"{over} rows ({over / len(lengths):.1%}) are over {max_tokens} tokens")
    if lint.loss_tokens:
        share = sum(lint.loss_tokens) / lengths.sum()
        lint.notes.append(f"{share:.1%} of the tokens carry loss ({min(lint.loss_tokens)} in the row with the fewest)")


def overlaps(lints: Sequence[FileLint]) -> list[Overlap]:
    """The overlap of every pair of files, the later file against the earlier one."""
    return [overlap(a.problems, b.problems, (a.source, b.source)) for a, b in combinations(lints, 2)]


def overlap_lines(lints: Sequence[FileLint]) -> tuple[list[str], bool]:
    """What people read of ``overlaps``, and whether more is shared somewhere than may be."""
    pairs = overlaps(lints)
    shared = [pair for pair in pairs if pair.found]
    lines, leaks = list[str](), False
    if apart := len(pairs) - len(shared):
        lines.append(
            f"{apart} of {len(pairs)} pairs of files share no problem" if shared else "no files share a problem"
        )
    for pair in shared:
        wrong = pair.leaked > MAX_OVERLAP * pair.total
        leaks |= wrong
        lines += [f"{'error: ' if wrong else ''}{pair.describe()}", *(f"  {line}" for line in pair.shown())]
    return lines, leaks


def require_disjoint(train_file: str, val_file: str) -> None:
    """Raise DataError when over a tenth of the validation problems are training problems.

    ``train_file`` may be several, as data.train_file. By text or nearly so, without known
    instructions. This is cheap: the files are read once, nothing is tokenized, and memory holds
    INDEX_ROWS of the training problems at a time.
    """
    files = parquet_files(train_file)
    for path in (*files, val_file):
        if not Path(path).is_file():  # training reads local files and fetches none from a hub
            raise DataError(f"{path}: cannot be read: there is no such file")
    held_out = [row.problem for row in read_problem_rows(val_file)]
    trained = (row.problem for path in files for row in read_problem_rows(path))
    shared: dict[int, Pair] = {}
    while part := list(islice(trained, INDEX_ROWS)):
        index = Index(part)
        for number, problem in enumerate(held_out):
            if number not in shared and (found := index.find(problem)):
                shared[number] = found[0]
    if len(shared) > MAX_OVERLAP * len(held_out):
        first = shared[min(shared)]
        raise DataError(
            f"{len(shared)} of the {len(held_out)} problems of {val_file} are also in {train_file}: a loss or accuracy "
            f"measured on them says nothing, and at most {MAX_OVERLAP:.0%} may be shared. Hold other rows out for "
            f"validation, or set data.allow_overlap = true if that is meant. The first: {first.describe()}"
        )
