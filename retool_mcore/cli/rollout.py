"""`retool parse` and `retool rollout`: the call parser and the tool loop, without Ray or verl."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from retool_mcore.cli.common import ChatTemplate, TemplateArgs, guarded, template_args_of
from retool_mcore.config import SandboxSettings, ToolLoop
from retool_mcore.config.sampling import Rollout
from retool_mcore.errors import DataError, RolloutError

app = typer.Typer()

# The same defaults as in a run, except max_response_tokens.
DEFAULT_LOOP, DEFAULT_SANDBOX = ToolLoop(max_response_tokens=16_384), SandboxSettings()
SAMPLED: dict[str, float] = {name: Rollout.model_fields[name].default for name in ("temperature", "top_p")}
PROMPT_KEYS = ("messages", "prompt", "problem", "question")


@app.command()
@guarded
def parse(
    protocol: Annotated[str, typer.Option(help="format of calls")] = DEFAULT_LOOP.protocol,
    one_line: Annotated[bool, typer.Option("--json", help="print one line")] = False,
) -> None:
    """Parse one model turn from standard input and print the result as JSON.

    {"kind": "tool_call" | "answer" | "text" | "malformed", "code", "answer", "error", "repairs"}
    """
    from retool_mcore.rollout.tool_call import parser_of

    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  it is, where the shell closed it
        raise DataError("standard input is closed, but the turn is read from it. Run: retool parse < FILE")
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    typer.echo(json.dumps(parser_of(protocol)(text).to_json(), indent=None if one_line else 1))


@app.command()
@guarded
def rollout(
    *,
    url: Annotated[str, typer.Option(help="URL of a running SGLang server, http://HOST:PORT or http://:KEY@HOST:PORT")],
    model: Annotated[str, typer.Option(help="the server's model directory, for the tokenizer")],
    prompt_file: Annotated[Path, typer.Option(help="JSON lines with messages, prompt, problem or question")],
    out: Annotated[Path, typer.Option(help="JSON lines to write, one per finished trajectory; overwritten")],
    chat_template: ChatTemplate = "",
    template_args: TemplateArgs = "",
    protocol: Annotated[str, typer.Option(help="format of calls")] = DEFAULT_LOOP.protocol,
    tool: Annotated[bool, typer.Option(help="offer the interpreter")] = DEFAULT_LOOP.tool,
    calls: Annotated[
        Literal["first", "all"], typer.Option(help="end a turn after its first call, or allow several")
    ] = DEFAULT_LOOP.calls_per_turn,
    n: Annotated[int, typer.Option(min=1, help="trajectories per prompt")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="trajectories in flight")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = SAMPLED["temperature"],
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = SAMPLED["top_p"],
    max_turns: Annotated[int, typer.Option(min=1)] = DEFAULT_LOOP.max_turns,
    max_response_tokens: Annotated[
        int, typer.Option(min=1, help="tool results included")
    ] = DEFAULT_LOOP.max_response_tokens,
    max_tool_output_tokens: Annotated[
        int, typer.Option(min=1, help="limit of one tool result")
    ] = DEFAULT_LOOP.max_tool_output_tokens,
    sandbox: Annotated[list[str] | None, typer.Option(help="local, or SandboxFusion URLs; may be repeated")] = None,
    run_timeout_s: Annotated[float, typer.Option(min=0.1, help="seconds for one call")] = DEFAULT_SANDBOX.run_timeout_s,
) -> None:
    """Run trajectories against any SGLang server and write them to a file."""
    from retool_mcore.data.tokenizer import load_tokenizer
    from retool_mcore.rollout.batch import sample_prompts
    from retool_mcore.rollout.engine import Sampling
    from retool_mcore.rollout.limits import Limits
    from retool_mcore.rollout.protocol import open_protocol

    prompts = read_prompts(prompt_file, model)
    loop = DEFAULT_LOOP.with_tools(tool).model_copy(
        update={
            "max_turns": max_turns,
            "max_response_tokens": max_response_tokens,
            "max_tool_output_tokens": max_tool_output_tokens,
        }
    )
    tokenizer = load_tokenizer(model, chat_template, template_args_of(template_args))
    dropped = asyncio.run(
        sample_prompts(
            prompts,
            out,
            url=url,
            protocol=open_protocol(protocol, tokenizer, tool=tool, calls=calls),
            limits=Limits.of(loop, DEFAULT_SANDBOX.model_copy(update={"run_timeout_s": run_timeout_s})),
            sampling=Sampling(temperature=temperature, top_p=top_p),
            n=n,
            concurrency=concurrency,
            sandbox=(sandbox or ["local"]) if tool else (),
        )
    )
    if dropped:
        raise RolloutError(f"{dropped} trajectories were dropped. See drop_error in {out}")


def read_prompts(path: Path, model: str) -> list[Sequence[Mapping[str, Any]]]:
    """Read the prompts of a file; format bare problems as the run that exported ``model`` did.

    Raises DataError for a row without a prompt and for a file without rows.
    """
    from retool_mcore.data.files import read_jsonl
    from retool_mcore.data.prompt_format import PromptFormat, problem_of, recorded_format

    prompt_format = recorded_format(model) or PromptFormat()
    prompts: list[Sequence[Mapping[str, Any]]] = []
    for where, row in read_jsonl(path):
        value: Any = next((row[key] for key in PROMPT_KEYS if row.get(key)), None)
        if isinstance(value, str):
            value = prompt_format.messages(problem_of(value))
        messages = cast("list[Any]", value) if isinstance(value, list) else []
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise DataError(f"{where}: none of {', '.join(PROMPT_KEYS)} is a string or a list of messages")
        prompts.append(messages)
    if not prompts:
        raise DataError(f"{path}: the file has no prompts")
    return prompts
