"""The checks of a starting run, shared by `retool sft`, `retool rl` and the ranks of torchrun."""

from __future__ import annotations

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.data.chat import load_tokenizer
from retool_mcore.data.lint import require_disjoint
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.model.check import check_model
from retool_mcore.platforms.base import Platform
from retool_mcore.rollout.protocol import protocol_of


def check_run(config: RunConfig, platform: Platform) -> None:
    """Check the settings against model, machine and platform. Imports nothing for it.

    Raises ConfigError or PlatformError.
    """
    check_model(config)
    platform.check_room(config)
    platform.check_settings(config)


def check_data(config: RunConfig) -> list[str]:
    """Check the data and return notes for the user.

    Raises DataError, and ConfigError for a protocol without its tags. For RL every prompt is
    rendered with the model's tokenizer: call it after ``Platform.activate()``, because transformers
    looks only once for what is installed. SFT renders its rows when it loads them.
    """
    if isinstance(config, SftConfig):
        if not config.data.allow_overlap:
            require_disjoint(config.data.train_file, config.data.val_file)
        return []
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    return check_prompts(config, protocol_of(config.rollout, load_tokenizer(config.model.path)).prompt_ids)
