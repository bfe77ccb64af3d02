"""The checks of a starting run, shared by `retool sft`, `retool rl` and the ranks of torchrun.

They take seconds, and what they find would otherwise end the run after minutes, on all its devices.
"""

from functools import partial

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.data.chat import tokenizer_of
from retool_mcore.data.lint import require_disjoint
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight import inputs, machine
from retool_mcore.preflight.findings import run_checks
from retool_mcore.preflight.sockets import require_short_sockets
from retool_mcore.reward.own import open_own_reward
from retool_mcore.rollout.protocol import protocol_of
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


def check_data(config: RunConfig) -> list[str]:
    """Check the data and return notes for the user.

    Raises DataError, and ConfigError for a protocol without its tags, or for an own reward that is
    not found. For RL every prompt is
    rendered with the model's tokenizer: call it after ``Platform.activate()``, because transformers
    looks only once for what is installed. SFT renders its rows when it loads them.
    """
    if isinstance(config, SftConfig):
        if not config.data.allow_overlap:
            for file in config.validation.files:
                require_disjoint(config.data.train_file, file)
        return []
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    if config.reward.function:
        open_own_reward(config.reward.function)
    return check_prompts(config, protocol_of(config.rollout, tokenizer_of(config.model)).prompt_ids)


def check_surroundings(config: RlConfig) -> list[str]:
    """Check what an RL run uses beside its devices: the disk, and a call in each sandbox.

    Returns notes for the user. Raises ConfigError with everything that is wrong.
    """
    checks = [("disk", partial(machine.disk, config)), ("sandbox", partial(inputs.sandbox, config))]
    found = run_checks(checks, lambda finding: None)
    if wrong := [f"{finding.name}: {finding.text}" for finding in found if finding.severity == "error"]:
        raise ConfigError(f"{config.source}: {' '.join(wrong)}")
    return [finding.text for finding in found if finding.severity == "warning"]
