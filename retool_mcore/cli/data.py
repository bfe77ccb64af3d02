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
    guarded,
    output_named,
    tell,
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
    typer.Option(help="JSON lines of what did not survive, with the reason; OUT.rejects.jsonl by default."),
]
RejectBad = Annotated[
    bool, typer.Option("--reject-bad", help="Rows that cannot be read become rejects; otherwise the first is an error.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first rows.")]
Part = Literal["sft", "rl", "validation"]
PartOption = Annotated[
    Part | None,
    typer.Option(help="Only one part of a training set, by the question; the parts are disjoint.", show_default=False),
]
SftShare = Annotated[float, typer.Option(min=0.0, max=1.0, help="The share of problems that are in part sft.")]
Split = Annotated[str | None, typer.Option(help="Of a folder or hub data set: only files whose name holds this.")]


@app.callback()
def data() -> None:
    """Make, convert and check data sets."""


@app.command()
@guarded
def task(
    directory: Annotated[Path, typer.Argument(help="Where to write it; made if missing.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other numbers and other initial weights.")] = 0,
) -> None:
    """Write the quickstart's task: a tiny model and its SFT, RL and evaluation data."""
    from retool_mcore.data.tasks import make_task

    made = make_task(directory, seed)
    typer.echo(f"{directory}: {'written' if made else 'already there and whole'}, seed {seed}")


@app.command()
@guarded
def model(
    file: Annotated[Path, typer.Argument(help="A GGUF file of an instruct model.", show_default=False)],
    directory: Annotated[Path, typer.Argument(help="Where to write it; made if missing.", show_default=False)],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of the weights written.")] = "bfloat16",
) -> None:
    """Write a GGUF file as a Hugging Face folder: weights, tokenizer, chat template, eos ids."""
    os.environ["TQDM_DISABLE"] = "1"  # before importing tqdm: hides transformers' progress bars
    from retool_mcore.data.gguf_model import write_gguf_model

    made = write_gguf_model(file, directory, dtype)
    typer.echo(f"{directory}: {'written' if made else 'already there and whole'}, {dtype}")


@app.command()
@guarded
def protocol(
    model: Annotated[str, typer.Argument(help="A model's folder or hub name.", show_default=False)],
    chat_template: ChatTemplate = "",
    template_args: TemplateArgs = "",
) -> None:
    """Print the tool protocol that a model serves: hermes, qwen3_coder or retool.

    Hermes where tokenizer and chat template serve it and the model has met its tags in training.
    The word fits `data sft --protocol` and rollout.protocol.
    """
    from retool_mcore.data.chat import encode
    from retool_mcore.data.tokenizer import load_tokenizer
    from retool_mcore.data.tool import CALL_END, CALL_START
    from retool_mcore.model.tensors import never_trained
    from retool_mcore.rollout.protocol import Retool, serving_protocol

    tokenizer = load_tokenizer(model, chat_template, template_args_of(template_args))
    found = serving_protocol(tokenizer)
    tags = [token_id for tag in (CALL_START, CALL_END) for token_id in encode(tokenizer, tag)]
    untrained = never_trained(model, tags) if found == "hermes" else []
    if untrained is None:
        tell(f"note: {model} has no weights here, so whether it ever met {CALL_START} is not known", err=True)
    elif untrained:
        Retool(tokenizer)  # raises if the model cannot serve this protocol either
        found = "retool"
        tell(
            f"note: {model} never met {CALL_START} or {CALL_END} in training: their rows of the output matrix are like "
            "those of unused tokens, so a short SFT does not teach hermes",
            err=True,
        )
    typer.echo(found)


@app.command()
@guarded
def fetch(
    directory: Annotated[Path, typer.Argument(help="where the configurations look for it")] = Path("data"),
    local: Annotated[
        Path | None, typer.Option(help="a folder with copies of the hub's data sets, as owner/name", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="one data set by its name on the hub; openai/gsm8k, too")] = "",
) -> None:
    """Make the published data that the shipped configurations name, from the hub or from copies.

    ReTool-SFT with a validation split, DAPO-Math-17k, and AIME of 2024 and 2025. What is there
    already stays.
    """
    from retool_mcore.data.fetch import fetch

    fetch(directory, local, tell, only)


@app.command()
@guarded
def sft(
    source: Annotated[
        str, typer.Argument(help="ReTool-SFT, raw or converted, or other traces: a file, folder or hub name.")
    ],
    out: Out,
    rejects: Rejects = None,
    *,
    protocol: Annotated[ProtocolName, typer.Option(help="The form training reads.")] = "hermes",
    truth: Annotated[str, typer.Option(help="Column of the ground truth; without it answers are not verified.")] = "",
    execute: Annotated[bool, typer.Option("--execute", help="Run every snippet again and compare its output.")] = False,
    messages: Annotated[
        str, typer.Option(help="Column of the conversation; messages or conversations by default.", show_default=False)
    ] = "",
    split: Split = None,
    limit: Limit = None,
    reject_bad: RejectBad = False,
    interpreter: Annotated[
        str, typer.Option(help="The name that calls of the code interpreter have in the data.")
    ] = TOOL_NAME,
    box: Annotated[bool, typer.Option("--box/--no-box", help="A row must end with one boxed answer.")] = True,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Leave user turns and the interpreter's schema as they are.")
    ] = False,
) -> None:
    """Read conversations with calls, verify format and answer, and write them in either protocol.

    ReTool's raw form, messages in OpenAI's form, and ShareGPT's conversations. Calls are of the
    code interpreter, or of tools whose schemas stand in the row's column `tools`.
    """
    from retool_mcore.data.convert import Conversion, conversations, convert_sft
    from retool_mcore.data.files import one_split, read_source, rows_of_split
    from retool_mcore.data.verify import ConversionReport
    from retool_mcore.sandbox import open_sandbox

    output_named(out, PARQUET, [source])
    one_split(source, split)
    report = ConversionReport()
    on_bad = report.reject_unreadable if reject_bad else None
    found = conversations(read_source(source, split=split, limit=limit, on_bad=on_bad), messages, on_bad)
    rows = list(rows_of_split(found, split))

    async def run(on_row: Callable[[], None]) -> ConversionReport:
        async with contextlib.AsyncExitStack() as stack:
            sandbox: Sandbox | None = await stack.enter_async_context(open_sandbox("local")) if execute else None
            conversion = Conversion(protocol, truth, sandbox, interpreter, box, as_is)
            return await convert_sft(rows, conversion, on_row, report=report)

    write_report(with_bar(run, len(rows)), out, rejects)
    if not truth:
        tell("answers were not verified: no --truth column was named")


@app.command()
@guarded
def rl(
    source: Annotated[str, typer.Argument(help="DAPO-Math, GSM8K, AIME or JSON lines: file, folder or hub name.")],
    out: Out,
    rejects: Rejects = None,
    *,
    name: Annotated[str, typer.Option(help="Written as data_source; the source's own name by default.")] = "",
    split: Split = None,
    limit: Limit = None,
    reject_bad: RejectBad = False,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
    part: PartOption = None,
    sft_share: SftShare = 0.5,
    model: Annotated[
        str, typer.Option(help="An export of a run: problems are put as that run has put them.", show_default=False)
    ] = "",
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer prompts, as --model counts them.", show_default=False)
    ] = None,
) -> None:
    """Read RL problems in any known schema and write each once, in verl's schema."""
    from retool_mcore.data.files import one_split, read_source
    from retool_mcore.data.layouts import Columns
    from retool_mcore.data.rl import convert_rl, name_and_split
    from retool_mcore.data.split import rows_of_part
    from retool_mcore.data.verify import ConversionReport

    output_named(out, PARQUET, [source])
    columns = Columns.named(problem, answer, solution_box)
    files_split = one_split(source, split)
    report, known = ConversionReport(), _format_of(model)
    rows = read_source(source, split=split, limit=limit, on_bad=report.reject_unreadable if reject_bad else None)
    rows = rows_of_part(rows, part, sft_share)
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

    found = recorded_format(model) if model else None
    if model and found is None:
        tell(f"note: {model} has no {FORMAT_FILE}, so problems ask for a box as docs/data.md says", err=True)
    return found


def _longer_than(most: int | None, model: str, known: PromptFormat | None) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function that says why a prompt has more than ``most`` tokens, or ""."""
    if most is None:
        return lambda _: ""
    if not model:
        raise DataError("--max-prompt-tokens counts the tokens of a model: name it with --model.")
    from retool_mcore.data.tokenizer import load_tokenizer
    from retool_mcore.rollout.protocol import open_protocol, serving_protocol

    tokenizer = load_tokenizer(model)
    protocol = open_protocol((known and known.protocol) or serving_protocol(tokenizer), tokenizer)

    def why(messages: list[dict[str, Any]]) -> str:
        count = len(protocol.prompt_ids(messages))
        return f"its prompt has {count} tokens" if count > most else ""

    return why


@app.command()
@guarded
def split(
    file: Annotated[Path, typer.Argument(help="Parquet or JSON lines for SFT or RL, or of problems.")],
    hold_out: Annotated[int, typer.Option(min=1, help="Rows to hold out, at least.")],
    *,
    train: Annotated[
        Path | None, typer.Option(help="Where the other rows go; FILE.train by default.", show_default=False)
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Where held-out rows go; FILE.held_out by default.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed holds out other problems.")] = 0,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
) -> None:
    """Hold rows out for validation, by problem: no problem is on both sides.

    Rows stay as they are and in their order.
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
        output_named(path, ending, [str(file)])
    parts = split_file(str(file), hold_out, seed, Columns.named(problem, answer, solution_box))
    for path, rows in zip(paths, parts, strict=True):
        (write_parquet if ending == PARQUET else write_jsonl)(path, rows)
    tell(f"{len(parts[0])} rows in {paths[0]}, {len(parts[1])} in {paths[1]}; they share no problem")


@app.command()
@guarded
def lint(
    files: Annotated[
        list[str],
        typer.Argument(help="Files for SFT or RL, or of problems; later ones are compared with earlier ones."),
    ],
    *,
    model: Annotated[str, typer.Option(help="Its tokenizer measures lengths and loss masks.")] = "",
    chat_template: ChatTemplate = "",
    template_args: TemplateArgs = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tells how many rows are longer.")] = None,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
) -> None:
    """Check data files: repeats, overlap, answers that cannot be compared, lengths, loss masks.

    Named columns are read in every file that has them; files for SFT and RL keep their own. Exits
    with 1 on errors.
    """
    from retool_mcore.data.layouts import Columns
    from retool_mcore.data.lint import lint_file, overlap_lines
    from retool_mcore.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, chat_template, template_args_of(template_args)) if model else None
    columns = Columns.named(problem, answer, solution_box)
    lints = [lint_file(file, tokenizer, max_tokens, columns) for file in files]
    bad = False
    for found in lints:
        tell(f"{found.source}: {len(found.problems)} rows")
        for note in found.notes:
            tell(f"  {note}")
        for error in found.errors:
            tell(f"  error: {error}")
        bad |= bool(found.errors)
    lines, leaks = overlap_lines(lints)
    if lines:
        tell("\n".join(lines))
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
    tell("\n".join([*report.lines(), f"{len(report.rows)} rows in {out}, {len(report.rejects)} in {rejects}"]))
