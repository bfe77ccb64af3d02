"""Checks a run's inputs: model, tools, reward, tokenizer, data and sandbox."""

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig, RunConfig, SandboxSettings, SftConfig
from retool_mcore.config.base import is_table
from retool_mcore.data.chat import chat_format, decode
from retool_mcore.data.files import column_names, read_rows
from retool_mcore.data.lint import require_disjoint
from retool_mcore.data.prompt_format import difference, format_of_file, shown_prompt
from retool_mcore.data.rl_prompts import check_first_prompts, check_prompts, messages_of, truth_of
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import CheckpointError, ConfigError, DataError, ReToolError, RewardError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import is_hub_name, read_config, shape_of_model
from retool_mcore.model.shape import shape_of_config
from retool_mcore.planner.hardware import hardware_of_run
from retool_mcore.planner.plan import make_plan
from retool_mcore.preflight.findings import Finding, error, missing, note, ok, warning
from retool_mcore.preflight.protocols import check_protocols
from retool_mcore.reward.response import Response
from retool_mcore.reward.user_function import load_user_reward
from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import ToolProtocol, protocol_of, tools_of
from retool_mcore.rollout.tools import open_tools
from retool_mcore.sandbox import open_sandbox

SAMPLE: dict[str, Any] = {"data_source": "sample", "reward_model": {"ground_truth": "0"}}


def model(config: RunConfig, *, fetch: bool) -> Iterator[Finding]:
    """``fetch``: download the config.json of a Hub name that is not in the local cache."""
    path = config.model.path
    hub = is_hub_name(path)
    if not Path(path).exists() and not (hub and (fetch or read_config(path))):
        yield missing("model", f"model.path = {path} does not exist, so checks of the model's shape are skipped. Make "
                      "the model first, correct the path, or name a Hub model as owner/name.")  # fmt: skip
        return
    check_model(config)
    if hub:
        yield warning("model", f"{path} is a Hub name: its config.json fits the run, but tokenizer and data were not "
                      f"checked. To check them, download the model (hf download {path}) and set model.path to "
                      "its folder")  # fmt: skip
        return
    shape = read_config(path)
    kind, billions = shape.get("model_type", "unknown"), shape_of_config(shape).params / 1e9
    yield ok("model", f"{path}: {kind}, {billions:.3g} G parameters, every shard readable")


def stall(config: RunConfig) -> Iterator[Finding]:
    """Compare train.stall_s with the planned times, if the planner knows the model and devices."""
    assert isinstance(config, SftConfig | RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    try:
        plan = make_plan(config, shape_of_model(config.model.path), hardware_of_run(config))
    except (ConfigError, CheckpointError):
        return
    part, seconds = plan.longest_part
    if problem := plan.stall_problem:
        yield warning("stall", f"{problem}.")
    else:
        yield ok("stall", f"train.stall_s = {config.train.stall_s:g}; {part} is planned to take {seconds:,.0f} s")


def tools(config: RunConfig) -> Iterator[Finding]:
    """List the tools that the model may call. Connects to or starts the servers of rollout.mcp."""
    if not isinstance(config, RlConfig) or not config.rollout.tool:
        return
    try:
        own = tools_of(config.rollout)
    except ConfigError as problem:
        yield from _invalid_tools(config, str(problem))
        return
    interpreter = [TOOL_NAME] if TOOL_NAME in config.rollout.tools else []
    yield ok("tools", f"the model may call {', '.join([*interpreter, *(tool.name for tool in own)])}")


def _invalid_tools(config: RlConfig, first: str) -> Iterator[Finding]:
    """An error for each invalid tool of rollout.tools; ``first`` if each tool alone is valid."""
    problems: list[str] = []
    for name in config.rollout.tools:
        try:
            open_tools((name,))
        except ConfigError as problem:
            problems.append(str(problem))
    yield from (error("tools", problem) for problem in problems or [first])


def reward(config: RunConfig) -> Iterator[Finding]:
    """Call the user's reward function once, with the first problem of data.train_file."""
    if not isinstance(config, RlConfig) or not config.reward.function:
        return
    score, row = load_user_reward(config.reward.function), _first_row(config)
    extra: Any = row.get("extra_info")
    response = Response(
        data_source=str(row["data_source"]),
        truth=truth_of(row["reward_model"]),
        answer="0",
        text="The answer is \\boxed{0}.",
        extra_info=extra if is_table(extra) else {},
        behavior=_behavior_without_calls(),
    )
    try:
        yield ok("reward", f"{config.reward.function} scores a response: {score(response)['score']:g}")
    except RewardError as problem:
        if row is SAMPLE and not isinstance(problem.__cause__, TypeError | None):
            yield note("reward", f"{problem}. The row was made up, because data.train_file does not exist")
        else:
            yield error("reward", str(problem))


def _behavior_without_calls() -> dict[str, Any]:
    """``Response.behavior`` of a trajectory that answers without calling a tool."""
    ledger = Ledger(prompt_ids=[0], max_response_tokens=1)
    ledger.close(StopReason.FINISHED)
    return Behavior.of(Trajectory(ledger=ledger)).to_json()


def _first_row(config: RlConfig) -> dict[str, Any]:
    """The first row of data.train_file, or SAMPLE if there is none, which ``data`` reports."""
    try:
        file = config.train_files[0]
        columns = ("data_source", "reward_model", *({"extra_info"} & set(column_names(file))))
        return next(read_rows(file, columns))[1]
    except DataError:
        return SAMPLE


def tokenizer(config: RunConfig) -> Iterator[Finding]:
    if not _can_tokenize(config):
        if Path(config.model.path).exists():  # otherwise ``model`` has reported it
            yield missing("tokenizer", "transformers is not installed, so tokenizer and prompts are not checked. "
                          "Install the extra of the platform.")  # fmt: skip
        return
    loaded = tokenizer_of(config.model)
    if isinstance(config, RlConfig):
        # With only the interpreter, because ``tools`` checks the user's own tools.
        protocol_of(config.rollout.with_tools(False).with_tools(config.rollout.tool), loaded)
        served = f"rollout.protocol = {config.rollout.protocol}" if config.rollout.tool else "runs without tools"
        yield ok("tokenizer", f"{len(loaded)} tokens; tokenizer and chat template support {served}")
    else:
        ending = chat_format(loaded).end_of_turn
        yield ok("tokenizer", f"{len(loaded)} tokens; the chat template ends a turn with {ending}")


def _can_tokenize(config: RunConfig) -> bool:
    return Path(config.model.path).exists() and importlib.util.find_spec("transformers") is not None


def data(config: RunConfig, *, all_rows: bool, render: bool) -> Iterator[Finding]:
    """``all_rows``: tokenize all prompts of RL. ``render``: also tokenize all rows of SFT."""
    assert isinstance(config, SftConfig | RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    if absent := _absent_files(config):
        yield missing("data", f"{' and '.join(absent)} not found. Correct the path, or make the data with `retool data "
                      "fetch`, or with `retool data task` for the tiny task.")  # fmt: skip
        return
    if isinstance(config, RlConfig):
        check_first_prompts(config)
    else:
        for _, path in config.data_files:
            next(islice(read_rows(path, ("messages", "tools")), 1))
    known = _can_tokenize(config)
    if isinstance(config, SftConfig):
        yield from _sft_data(config, tokenized=known, render=render)
    elif known and all_rows:
        yield from _rl_data(config)
    if not config.data.allow_overlap:
        for path in config.validation.files:
            require_disjoint(config.data.train_file, path)
    yield ok("data", "data.allow_overlap permits training on validation problems" if config.data.allow_overlap else
             "training data has at most a tenth of the problems of each validation file")  # fmt: skip


def _absent_files(config: SftConfig | RlConfig) -> list[str]:
    try:
        named = config.data_files
    except DataError as problem:  # a folder or a pattern without files
        return [str(problem).partition(": ")[0]]
    return [f"{name} = {path}" for name, path in named if not Path(path).exists()]


def _sft_data(config: SftConfig, *, tokenized: bool, render: bool) -> Iterator[Finding]:
    if not tokenized:
        return
    loaded = tokenizer_of(config.model)
    forms = " and ".join(check_protocols(config, loaded))
    yield ok("data", f"rows of protocol {forms}, which the model supports" if forms else "rows without tool calls")
    if not render:
        return  # the run's ranks render all rows
    files = [
        ("data.train_file", config.train_files),
        *(("validation.files", [file]) for file in config.validation.files),
    ]
    for name, paths in files:
        rows = load_sft(paths, loaded, config.data.max_length_tokens)
        yield ok("data", f"{name}: {len(rows.examples)} rows render within {config.data.max_length_tokens} tokens")
        if left_out := rows.dropped_note():
            yield warning("data", left_out)


def _rl_data(config: RlConfig) -> Iterator[Finding]:
    try:
        tools_of(config.rollout)
    except ConfigError:
        yield warning("data", "prompts are not checked: they contain the tools' schemas, and a tool is invalid")
        return
    protocol = protocol_of(config.rollout, tokenizer_of(config.model))
    notes = check_prompts(config, protocol.prompt_ids)
    yield ok("data", f"every prompt fits data.max_prompt_tokens = {config.data.max_prompt_tokens}")
    yield from (warning("data", text) for text in notes)
    yield from _first_prompt(config, protocol)


def _first_prompt(config: RlConfig, protocol: ToolProtocol) -> Iterator[Finding]:
    """Show the first prompt as the model sees it. Warn if the model learned another format."""
    file = config.train_files[0]
    used = format_of_file(file, protocol.name if config.rollout.tool else "")
    remedy = f"`retool data rl FILE --model {config.model.path}` writes prompts in the model's format."
    yield from (warning("prompt", text) for text in difference(config.model.path, used, file, remedy))
    first = next(messages_of(row["prompt"]) for _, row in read_rows(file, ("prompt",)))
    seen = shown_prompt(decode(protocol.tokenizer, protocol.prompt_ids(first)))
    yield note("prompt", f"the first prompt, as the model sees it:\n{seen}")


def sandbox(config: RunConfig) -> Iterator[Finding]:
    """Execute code once in each sandbox, with the settings of the run."""
    if not isinstance(config, RlConfig) or not config.rollout.tool:
        return
    settings = config.sandbox
    open_sandbox(settings.where, python=settings.python, preload=settings.preload)  # only validates the settings
    for where in settings.where:
        try:
            level, output = asyncio.run(probe_sandbox(settings, where))
        except ReToolError as problem:
            yield error("sandbox", str(problem))
            continue
        if output.strip() == "42":
            required = f"{settings.min_level} or better required"
            yield ok("sandbox", f"{where} ran print(6 * 7) at level {level}, {required}")
        else:
            yield error("sandbox", f"{where} printed {output[:80]!r} for print(6 * 7) instead of 42. Look at its log.")


async def probe_sandbox(settings: SandboxSettings, where: str) -> tuple[str, str]:
    """Execute print(6 * 7). Returns the isolation level and the output."""
    session = f"preflight-{os.getpid()}" if settings.sessions else None
    box = open_sandbox(
        where,
        min_level=settings.min_level,
        workers=1,
        sessions=int(session is not None),
        python=settings.python,
        preload=settings.preload,
    )
    async with box:
        result = await box.execute(
            "print(6 * 7)",
            run_timeout_s=settings.run_timeout_s,
            memory_limit_mb=settings.memory_limit_mb,
            session=session,
        )
        if session is not None:
            await box.end_session(session)
    return result.level, result.stdout
