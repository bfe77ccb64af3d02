"""verl's key of the chat template, with which it makes its tokenizers and writes checkpoints."""

from __future__ import annotations

from typing import Any

from retool_mcore.config import RunConfig
from retool_mcore.data.templates import template_of


def template_keys(config: RunConfig, section: str = "") -> dict[str, Any]:
    """{} where the template is the model's own; its text may not be here then."""
    text = template_of(config.model)
    return {} if text is None else {f"{section}custom_chat_template": text}
