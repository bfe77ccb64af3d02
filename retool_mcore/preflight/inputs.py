"""Checks the run's model, tokenizer, data and sandbox, reading them as the run will."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from retool_mcore.config import RlConfig, RunConfig, SandboxSettings, SftConfig, ToolLoop
from retool_mcore.data.chat import chat_format, tokenizer_of
from retool_mcore.data.lint import require_disjoint
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import is_hub_name, of_model, read_config
from retool_mcore.model.shape import shape_of_config
from retool_mcore.planner.hardware import of_run
from retool_mcore.planner.plan import make_plan
from retool_mcore.preflight.findings import Finding, error, ok, warning
from retool_mcore.preflight.protocols import check_protocols
from retool_mcore.rollout.protocol import protocol_of, tools_of
from retool_mcore.sandbox import open_sandbox


def model(config: RunConfig) -> Iterator[Finding]:
    check_model(config)
    if is_hub_name(config.model.path):
        yield warning("model", f"{config.model.path} is not a folder here: the run fits its config.json, and its "
                      "weights come from the hub or its cache. Tokenizer and data are checked when it is here: fetch "
                      f"it (hf download {config.model.path}), and set model.path to its folder")  # fmt: skip
        return
    shape = read_config(config.model.path)
    kind, billions = shape.get("model_type", "unknown"), shape_of_config(shape).params / 1e9
    yield ok("model", f"{config.model.path}: {kind}, {billions:.3g} G parameters, every shard readable")


def stall(config: RunConfig) -> Iterator[Finding]:
    """train.stall_s against the run's plan, where model and devices are known to the planner."""
    assert isinstance(config, SftConfig | RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    try:
        plan = make_plan(config, of_model(config.model.path), of_run(config))
    except (ConfigError, CheckpointError):
        return
    part, seconds = plan.longest_part
    if not (problem := plan.stall_problem):
        yield ok("stall", f"train.stall_s = {config.train.stall_s:g}; {part} is planned to take {seconds:,.0f} s")
    elif config.train.stall_s < seconds:
        yield error("stall", f"{problem}.")
    else:
        yield warning("stall", f"{problem}.")


def tools(config: RunConfig) -> Iterator[Finding]:
    """What the model may call. A server of rollout.mcp is asked, or started, as the run will."""
    if isinstance(config, RlConfig) and config.rollout.tool:
        interpreter = [TOOL_NAME] if TOOL_NAME in config.rollout.tools else []
        offered = ", ".join([*interpreter, *(tool.name for tool in tools_of(config.rollout))])
        yield ok("tools", f"the model may call {offered}")


def tokenizer(config: RunConfig) -> Iterator[Finding]:
    if not Path(config.model.path).exists():
        return  # as ``model`` has said
    loaded = tokenizer_of(config.model)
    if isinstance(config, RlConfig):
        # With the interpreter alone: a tool of the user's own has a check of its own.
        protocol_of(config.rollout.calling(False).calling(config.rollout.tool), loaded)
        served = f"rollout.protocol = {config.rollout.protocol}" if config.rollout.tool else "text alone"
        yield ok("tokenizer", f"{len(loaded)} tokens; it and its chat template serve {served}")
    else:
        ending = chat_format(loaded).end_of_turn
        yield ok("tokenizer", f"{len(loaded)} tokens; the chat template closes a turn by {ending}")


def data(config: RunConfig) -> Iterator[Finding]:
    assert isinstance(config, SftConfig | RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    missing = [f"{name} = {path}" for name, path in config.data_files if not Path(path).exists()]
    if missing:
        yield error("data", f"{' and '.join(missing)} not found. Make it (`retool data fetch`, or `retool data "
                    "task` for the tiny task), or correct the path.")  # fmt: skip
        return
    if not Path(config.model.path).exists():
        return  # rows are counted in the model's tokens
    loaded = tokenizer_of(config.model)
    held_out = config.validation.files
    if isinstance(config, SftConfig):
        forms = " and ".join(check_protocols(config, loaded))
        yield ok("data", f"rows of protocol {forms}, which the model serves" if forms else "rows in words alone")
        files = [("data.train_file", config.data.train_file), *(("validation.files", path) for path in held_out)]
        for name, path in files:
            rows = load_sft(path, loaded, config.data.max_length_tokens)
            yield ok("data", f"{name}: {len(rows.examples)} rows render within {config.data.max_length_tokens} tokens")
            if note := rows.left_out(config.data.max_length_tokens):
                yield warning("data", note)
    elif not _can_offer(config.rollout):
        yield warning("data", "not read: prompts hold the schemas of the tools, see there")
        return
    else:
        notes = check_prompts(config, protocol_of(config.rollout, loaded).prompt_ids)
        yield ok("data", f"every prompt fits data.max_prompt_tokens = {config.data.max_prompt_tokens}")
        yield from (warning("data", note) for note in notes)
    if isinstance(config, SftConfig) and not config.data.allow_overlap:
        for path in held_out:
            require_disjoint(config.data.train_file, path)
    yield ok("data", "validation problems may overlap: data.allow_overlap" if config.data.allow_overlap else
             "training and validation share no more problems than may happen by chance")  # fmt: skip


def _can_offer(rollout: ToolLoop) -> bool:
    try:
        tools_of(rollout)
    except ConfigError:
        return False
    return True


def sandbox(config: RunConfig) -> Iterator[Finding]:
    """One real execution in each sandbox, at the level that the run asks for."""
    if not isinstance(config, RlConfig) or not config.rollout.tool:
        return
    settings = config.sandbox
    open_sandbox(settings.where, python=settings.python, preload=settings.preload)  # starts nothing yet, but may raise
    for where in settings.where:
        level, output = asyncio.run(call_of_sandbox(settings, where))
        if output.strip() == "42":
            wanted = f"{settings.min_level} or better wanted"
            yield ok("sandbox", f"{where} ran print(6 * 7) at level {level}, {wanted}")
        else:
            yield error("sandbox", f"{where} answered {output[:80]!r} to print(6 * 7). Look at its log.")


async def call_of_sandbox(settings: SandboxSettings, where: str) -> tuple[str, str]:
    """The level in force, and what print(6 * 7) printed."""
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
