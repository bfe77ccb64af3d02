"""Defaults of `retool eval` without a configuration file: the paper's rollout settings.

The lengths are reduced to fit the model's context.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from retool_mcore.config import EvaluationConfig, build_config
from retool_mcore.errors import ConfigError
from retool_mcore.model.files import read_config
from retool_mcore.platforms.base import detect_platform
from retool_mcore.rollout.sglang_http import SglangEngine

SOURCE = "the defaults of `retool eval`"
MAX_PROMPT_TOKENS = 2048
MAX_RESPONSE_TOKENS = 16_384
SERVER_WAIT_S = 10.0


def default_config(model: str, overrides: Sequence[str], *, here: bool = True) -> EvaluationConfig:
    """The paper's rollout settings for this machine, without trackers.

    These are 8 turns, 2048 prompt and 16384 response tokens, temperature 1.0, and top_p 0.6 in
    validation. The response limit is reduced for a model with a shorter context. ``here``: whether
    the model's files are readable; if not, its context is assumed to be long enough. Raises
    ConfigError for a bad override.
    """
    platform = detect_platform()
    devices = platform.device_count() if platform.host.has_devices else 1
    known = read_config(model) if here else {}
    longest = known.get("max_position_embeddings") or MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    prompt = min(MAX_PROMPT_TOKENS, longest // 2)
    response = min(MAX_RESPONSE_TOKENS, longest - prompt)
    tree: dict[str, Any] = {
        "run": {"name": "eval", "platform": platform.name, "trackers": []},
        "cluster": {"gpus_per_node": devices},
        "model": {"path": model, "dtype": platform.training.dtypes[0]},
        "data": {"max_prompt_tokens": prompt},
        "rollout": {"max_turns": 8, "max_response_tokens": response},
        "validation": {"n": 8, "top_p": 0.6},
    }
    return build_config(EvaluationConfig, tree, SOURCE, overrides)


def model_of_server(url: str) -> str:
    """The model path that a running SGLang server reports. Raises ConfigError if there is none."""

    async def ask() -> dict[str, Any]:
        async with SglangEngine(url, timeout_s=SERVER_WAIT_S, retry_s=SERVER_WAIT_S) as engine:
            return await engine.model_info()

    info = asyncio.run(ask())
    path = info.get("tokenizer_path") or info.get("model_path")
    if not isinstance(path, str):
        raise ConfigError(f"{url} does not say which model it holds. Give --model DIRECTORY --url {url}")
    return path
