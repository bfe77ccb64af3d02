"""The checks of a starting run, shared by `retool sft`, `retool rl` and the ranks of torchrun.

They take seconds, and what they find would otherwise end the run after minutes, on all its devices.
"""

from dataclasses import replace
from functools import partial

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.config.files import parquet_files
from retool_mcore.data.chat import tokenizer_of
from retool_mcore.data.files import read_rows
from retool_mcore.data.lint import require_disjoint
from retool_mcore.data.prompt_format import PromptFormat, difference, format_of_file, shown_prompt
from retool_mcore.data.rl_prompts import check_prompts, messages_of
from retool_mcore.data.tokenizer import decode, end_of_turn
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight import inputs, machine
from retool_mcore.preflight.findings import run_checks
from retool_mcore.preflight.sockets import require_short_sockets
from retool_mcore.reward.own import open_own_reward
from retool_mcore.rollout.protocol import ToolProtocol, protocol_of
from retool_mcore.run.trackers import check_trackers


def check_run(config: RunConfig, platform: Platform) -> None:
    """Check the settings against model, machine and platform. Imports nothing for it.

    Raises ConfigError or PlatformError.
    """
    require_short_sockets(config)
    check_trackers(config)
    check_model(config)
    platform.check_room(config)
    platform.check_settings(config)


def check_data(config: RunConfig, *, record: bool = False) -> list[str]:
    """Check the data and return notes for the user.

    With ``record`` the way in which RL asks is written into the run's folder. Raises DataError, and
    ConfigError for a protocol without its tags, or for an own reward that is not found. For RL
    every prompt is rendered with the model's tokenizer: call it after ``Platform.activate()``,
    because transformers looks only once for what is installed. SFT renders its rows when it loads
    them.
    """
    if isinstance(config, SftConfig):
        if not config.data.allow_overlap:
            for file in config.validation.files:
                require_disjoint(config.data.train_file, file)
        return []
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    if config.reward.function:
        open_own_reward(config.reward.function)
    protocol = protocol_of(config.rollout, tokenizer_of(config.model))
    notes = check_prompts(config, protocol.prompt_ids)
    file = parquet_files(config.data.train_file)[0]
    asked = format_of_file(file, protocol.name if config.rollout.tool else "")
    if record:
        recorded = replace(asked, protocol=config.rollout.protocol)
        recorded.write(config.run.dir, end_of_turn(protocol.tokenizer))
    return [*_prompt_notes(config, protocol, file, asked), *notes]


def _prompt_notes(config: RlConfig, protocol: ToolProtocol, file: str, asked: PromptFormat) -> list[str]:
    """The first prompt as the model sees it, after a warning if its own run asked otherwise."""
    remedy = f"`retool data rl FILE --model {config.model.path}` writes prompts in the model's format."
    first = next(messages_of(row["prompt"]) for _, row in read_rows(file, ("prompt",)))
    seen = decode(protocol.tokenizer, protocol.prompt_ids(first))
    return [
        *difference(config.model.path, asked, file, remedy),
        f"the first prompt, as the model sees it:\n{shown_prompt(seen)}",
    ]


def check_surroundings(config: RlConfig) -> list[str]:
    """Check what an RL run uses beside its devices: the disk, and a call in each sandbox.

    Returns notes for the user. Raises ConfigError with everything that is wrong.
    """
    checks = [("disk", partial(machine.disk, config)), ("sandbox", partial(inputs.sandbox, config))]
    found = run_checks(checks, lambda finding: None)
    if wrong := [f"{finding.name}: {finding.text}" for finding in found if finding.severity == "error"]:
        raise ConfigError(f"{config.source}: {' '.join(wrong)}")
    return [finding.text for finding in found if finding.severity == "warning"]
