"""A plain ChatML template, as SmolLM2's: no tools, no results."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def with_template(
    tokenizer: PreTrainedTokenizerBase, template: str | dict[str, str] = PLAIN_CHATML
) -> PreTrainedTokenizerBase:
    made = deepcopy(tokenizer)
    made.chat_template = template
    return made
