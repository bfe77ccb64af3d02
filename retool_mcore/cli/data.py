"""`retool data`: make, convert and check data sets."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from retool_mcore.cli.common import (
    AnswerColumn,
    BoxColumn,
    ChatTemplate,
    Commands,
    ProblemColumns,
    TemplateArgs,
    check_output,
    echo,
    guarded,
    template_args_of,
    with_bar,
)
from retool_mcore.data.convert import ProtocolName
from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import DataError

if TYPE_CHECKING:
    from retool_mcore.data.prompt_format import PromptFormat
    from retool_mcore.data.verify import ConversionReport
    from retool_mcore.sandbox.base import Sandbox

app = typer.Typer(cls=Commands, no_args_is_help=True)

PARQUET, JSON_LINES = ".parquet", ".jsonl"
Out = Annotated[Path, typer.Option(help="Parquet file to write.")]
Rejects = Annotated[
    Path | None,
    typer.Option(help="JSON lines of rejected rows, with the reason; X.rejects.jsonl for X.parquet by default."),
]
RejectBad = Annotated[
    bool, typer.Option("--reject-bad", help="Reject JSON lines that cannot be read; without it, the first is an error.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only the first rows.")]
Part = Literal["sft", "rl", "validation"]
PartOption = Annotated[
    Part | None,
    typer.Option(help="Read only one of three disjoint parts, split by problem.", show_default=False),
]
SftShare = Annotated[float, typer.Option(min=0.0, max=1.0, help="Fraction of problems in part sft.")]
Split = Annotated[str | None, typer.Option(help="Of several files, read only those whose name contains this.")]


@app.callback()
def data() -> None:
    """Make, convert and check data sets."""


@app.command()
@guarded
def task(
    directory: Annotated[Path, typer.Argument(help="Folder to write; created if missing.")],
    seed: Annotated[int, typer.Option(help="Seed of the numbers and the initial weights.")] = 0,
) -> None:
    """Write the quickstart's task: a tiny model and its SFT, RL and evaluation data."""
    from retool_mcore.data.tasks import make_task

    made = make_task(directory, seed)
    typer.echo(f"{directory}: {'written' if made else 'already complete'}, seed {seed}")


@app.command()
@guarded
def model(
    source: Annotated[
        Path, typer.Argument(help="A GGUF file of an instruct model, or a vision model's folder.", show_default=False)
    ],
    directory: Annotated[Path, typer.Argument(help="Folder to write; created if missing.", show_default=False)],
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Data type of a GGUF file's weights; bfloat16 by default.", show_default=False),
    ] = None,
) -> None:
    """Write a model folder for training from a GGUF file, or from the text part of a vision model.

    From a GGUF file: weights, tokenizer, chat template and EOS ids. From a folder of Qwen3.5: its
    weights without those for images, and its tokenizer.
    """
    os.environ["TQDM_DISABLE"] = "1"  # before importing tqdm: hides transformers' progress bars
    if source.is_dir():
        from retool_mcore.data.text_model import write_text_model

        if dtype:
            raise DataError(f"--dtype {dtype} is for GGUF files. The weights of a folder keep their data types.")
        made = write_text_model(source, directory)
        typer.echo(f"{directory}: {'written' if made else 'already complete'}")
        return
    from retool_mcore.data.gguf_model import write_gguf_model

    made = write_gguf_model(source, directory, dtype or "bfloat16")
    typer.echo(f"{directory}: {'written' if made else 'already complete'}, {dtype or 'bfloat16'}")


@app.command()
@guarded
def protocol(
    model: Annotated[str, typer.Argument(help="A model's folder or hub name.", show_default=False)],
    chat_template: ChatTemplate = "",
    template_args: TemplateArgs = "",
) -> None:
    """Print the first of hermes, qwen3_coder, retool, llama3 and mistral that a model supports.

    hermes requires that tokenizer and chat template support it, and that the model was trained on
    its tags. The name is valid for `data sft --protocol` and rollout.protocol.
    """
    from retool_mcore.data.chat import encode
    from retool_mcore.data.tokenizer import load_tokenizer
    from retool_mcore.data.tool import CALL_END, CALL_START
    from retool_mcore.model.tensors import never_trained
    from retool_mcore.rollout.protocol import Retool, default_protocol

    tokenizer = load_tokenizer(model, chat_template, template_args_of(template_args))
    name = default_protocol(tokenizer)
    tags = [token_id for tag in (CALL_START, CALL_END) for token_id in encode(tokenizer, tag)]
    untrained = never_trained(model, tags) if name == "hermes" else []
    if untrained is None:
        echo(
            f"note: {model} has no weights here, so it is unknown whether it was trained on {CALL_START}",
            err=True,
        )
    elif untrained:
        Retool(tokenizer)  # raises if the model cannot serve this protocol either
        name = "retool"
        echo(
            f"note: {model} was never trained on {CALL_START} or {CALL_END}: their rows of the output matrix equal "
            "those of unused tokens. A short SFT does not teach hermes",
            err=True,
        )
    typer.echo(name)


@app.command()
@guarded
def fetch(
    directory: Annotated[Path, typer.Argument(help="Folder to write.")] = Path("data"),
    local: Annotated[
        Path | None,
        typer.Option(help="Folder with copies of the hub's data sets, as owner/name.", show_default=False),
    ] = None,
    only: Annotated[str, typer.Option(help="Only this data set of the hub, such as openai/gsm8k.")] = "",
) -> None:
    """Make the data of the shipped run files, from the hub or from copies.

    These are ReTool-SFT with a validation split, DAPO-Math-17k, and AIME 2024 and 2025. Complete
    data sets are kept.
    """
    from retool_mcore.data.fetch import fetch

    fetch(directory, local, echo, only)


@app.command()
@guarded
def sft(
    source: Annotated[
        str, typer.Argument(help="ReTool-SFT, raw or converted, or other conversations: a file, folder or hub name.")
    ],
    out: Out,
    rejects: Rejects = None,
    *,
    protocol: Annotated[ProtocolName, typer.Option(help="Protocol to write.")] = "hermes",
    truth: Annotated[str, typer.Option(help="Column of the ground truth; without it, answers are not verified.")] = "",
    execute: Annotated[bool, typer.Option("--execute", help="Execute every snippet and compare its output.")] = False,
    messages: Annotated[
        str, typer.Option(help="Column of the conversation; messages or conversations by default.", show_default=False)
    ] = "",
    split: Split = None,
    limit: Limit = None,
    reject_bad: RejectBad = False,
    interpreter: Annotated[str, typer.Option(help="Name of the code interpreter in the data.")] = TOOL_NAME,
    box: Annotated[bool, typer.Option("--box/--no-box", help="Require that a row ends with one boxed answer.")] = True,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Keep user turns and the interpreter's schema unchanged.")
    ] = False,
) -> None:
    """Convert conversations with tool calls for SFT; verify formats and answers.

    Reads ReTool's raw format, OpenAI's messages and ShareGPT's conversations. Calls may be to the
    code interpreter or to tools whose schemas are in the row's column `tools`.
    """
    from retool_mcore.data.convert import Conversion, conversations, convert_sft
    from retool_mcore.data.files import read_source, require_one_split, rows_of_split
    from retool_mcore.data.verify import ConversionReport
    from retool_mcore.sandbox import open_sandbox

    check_output(out, PARQUET, [source])
    require_one_split(source, split)
    report = ConversionReport()
    on_bad = report.reject_unreadable if reject_bad else None
    rows_with_messages = conversations(read_source(source, split=split, limit=limit, on_bad=on_bad), messages, on_bad)
    rows = list(rows_of_split(rows_with_messages, split))

    async def run(on_row: Callable[[], None]) -> ConversionReport:
        async with contextlib.AsyncExitStack() as stack:
            sandbox: Sandbox | None = await stack.enter_async_context(open_sandbox("local")) if execute else None
            conversion = Conversion(protocol, truth, sandbox, interpreter, box, as_is)
            return await convert_sft(rows, conversion, on_row, report=report)

    write_report(with_bar(run, len(rows)), out, rejects)
    if not truth:
        echo("answers were not verified, because --truth is not set")


@app.command()
@guarded
def rl(
    source: Annotated[str, typer.Argument(help="DAPO-Math, GSM8K, AIME or JSON lines: file, folder or hub name.")],
    out: Out,
    rejects: Rejects = None,
    *,
    name: Annotated[str, typer.Option(help="Value of data_source; the source's name by default.")] = "",
    split: Split = None,
    limit: Limit = None,
    reject_bad: RejectBad = False,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
    part: PartOption = None,
    sft_share: SftShare = 0.5,
    model: Annotated[
        str, typer.Option(help="An export of a run: format problems as that run did.", show_default=False)
    ] = "",
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Reject longer prompts, in tokens of --model.", show_default=False)
    ] = None,
) -> None:
    """Convert problems of any known schema to verl's schema for RL, without duplicates."""
    from retool_mcore.data.files import read_source, require_one_split
    from retool_mcore.data.layouts import Columns
    from retool_mcore.data.rl import convert_rl, name_and_split
    from retool_mcore.data.split import rows_of_part
    from retool_mcore.data.verify import ConversionReport

    check_output(out, PARQUET, [source])
    columns = Columns.named(problem, answer, solution_box)
    files_split = require_one_split(source, split)
    report, known = ConversionReport(), _format_of(model)
    rows = read_source(source, split=split, limit=limit, on_bad=report.reject_unreadable if reject_bad else None)
    rows = rows_of_part(rows, part, sft_share, columns.problem if columns else ())
    first = list(itertools.islice(rows, 1))
    _require_part(first, source, part, sft_share)
    own_name, own_split = name_and_split(source)
    mark = split or files_split or own_split
    write_report(
        convert_rl(
            itertools.chain(first, rows),
            name or own_name,
            mark,
            report=report,
            reject_bad=reject_bad,
            columns=columns,
            wanted=split,
            prompt_format=known,
            too_long=_longer_than(max_prompt_tokens, model, known),
        ),
        out,
        rejects,
    )


def _format_of(model: str) -> PromptFormat | None:
    from retool_mcore.config.shared import FORMAT_FILE
    from retool_mcore.data.prompt_format import recorded_format
    from retool_mcore.model.files import read_config

    if not model:
        return None
    read_config(model)  # a CheckpointError if the model does not exist
    recorded = recorded_format(model)
    if recorded is None:
        echo(f"note: {model} has no {FORMAT_FILE}, so problems get the default instruction of docs/data.md", err=True)
    return recorded


def _longer_than(most: int | None, model: str, known: PromptFormat | None) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function for the reason to reject a prompt over ``most`` tokens, "" for others."""
    if most is None:
        return lambda _: ""
    if not model:
        raise DataError("--max-prompt-tokens needs --model, whose tokenizer counts the tokens.")
    from retool_mcore.data.tokenizer import load_tokenizer
    from retool_mcore.rollout.protocol import default_protocol, open_protocol

    tokenizer = load_tokenizer(model)
    protocol = open_protocol((known and known.protocol) or default_protocol(tokenizer), tokenizer)

    def why(messages: list[dict[str, Any]]) -> str:
        count = len(protocol.prompt_ids(messages))
        return f"its prompt has {count} tokens" if count > most else ""

    return why


@app.command()
@guarded
def split(
    file: Annotated[Path, typer.Argument(help="Parquet or JSON lines for SFT or RL, or with problems.")],
    hold_out: Annotated[int, typer.Option(min=1, help="Minimum number of rows to hold out.")],
    *,
    train: Annotated[
        Path | None,
        typer.Option(help="File for the other rows; X.train.parquet for X.parquet by default.", show_default=False),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="File for held-out rows; X.held_out.parquet for X.parquet by default.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of problems.")] = 0,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
) -> None:
    """Hold out rows for validation. All rows of a problem go to the same file.

    Rows and their order do not change.
    """
    from retool_mcore.data.files import write_jsonl, write_parquet
    from retool_mcore.data.layouts import Columns
    from retool_mcore.data.split import split_file

    ending = PARQUET if file.suffix == PARQUET else JSON_LINES
    paths = [
        path or file.with_name(f"{file.stem}.{name}{ending}")
        for path, name in ((train, "train"), (held_out, "held_out"))
    ]
    for path in paths:
        check_output(path, ending, [str(file)])
    parts = split_file(str(file), hold_out, seed, Columns.named(problem, answer, solution_box))
    for path, rows in zip(paths, parts, strict=True):
        (write_parquet if ending == PARQUET else write_jsonl)(path, rows)
    echo(f"{len(parts[0])} rows in {paths[0]}, {len(parts[1])} in {paths[1]}; no problem is in both")


@app.command()
@guarded
def lint(
    files: Annotated[
        list[str],
        typer.Argument(help="Files for SFT or RL, or with problems; each is compared with those before it."),
    ],
    *,
    model: Annotated[str, typer.Option(help="Model whose tokenizer measures lengths and loss masks.")] = "",
    chat_template: ChatTemplate = "",
    template_args: TemplateArgs = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Report how many rows are longer.")] = None,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
) -> None:
    """Check data files: duplicates, overlap, answers that cannot be compared, lengths, loss masks.

    Column options apply to every file that has the columns. Exits with 1 if there are errors.
    """
    from retool_mcore.data.layouts import Columns
    from retool_mcore.data.lint import lint_file, overlap_lines
    from retool_mcore.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, chat_template, template_args_of(template_args)) if model else None
    columns = Columns.named(problem, answer, solution_box)
    lints = [lint_file(file, tokenizer, max_tokens, columns) for file in files]
    bad = False
    for file_lint in lints:
        echo(f"{file_lint.source}: {len(file_lint.problems)} rows")
        for note in file_lint.notes:
            echo(f"  {note}")
        for error in file_lint.errors:
            echo(f"  error: {error}")
        bad |= bool(file_lint.errors)
    lines, leaks = overlap_lines(lints)
    if lines:
        echo("\n".join(lines))
    if bad or leaks:
        raise typer.Exit(1)


def _require_part(rows: Sequence[object], source: object, part: str | None, sft_share: float) -> None:
    if part and not rows:
        raise DataError(f"{source}: no problem is in part {part} with --sft-share {sft_share}. Set another share.")


def rows_of(
    source: str, limit: int | None, part: Part | None = None, sft_share: float = 0.5
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows (location, row) of a source or one part of it. Raises DataError if empty."""
    from retool_mcore.data.files import read_source
    from retool_mcore.data.split import rows_of_part

    rows = list(rows_of_part(read_source(source, limit=limit), part, sft_share))
    _require_part(rows, source, part, sft_share)
    return rows


def write_report(report: ConversionReport, out: Path, rejects: Path | None) -> None:
    """Write the rows and rejects of a conversion, and print the counts."""
    from retool_mcore.data.files import write_jsonl, write_parquet

    rejects = rejects or out.with_name(f"{out.name.removesuffix(out.suffix)}.rejects.jsonl")
    write_jsonl(rejects, report.rejects)
    (write_parquet if out.suffix == PARQUET else write_jsonl)(out, report.rows)
    echo("\n".join([*report.lines(), f"{len(report.rows)} rows in {out}, {len(report.rejects)} in {rejects}"]))
