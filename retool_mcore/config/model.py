"""[model]: the weights that training starts from, and how conversations are written for them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import Section

BUILT_IN = ("chatml", "plain")  # templates of ours, in data/built_in_templates
GIVEN = ("messages", "tools", "add_generation_prompt")  # of a template, by whoever renders


class Model(Section):
    """The model that training starts from, and the numbers that it is computed in."""

    path: str
    """A local Hugging Face directory, or a hub name."""

    dtype: Literal["bfloat16", "float32"]
    """Number type of the weights, in training and in the engines; float32 on platform cpu only."""

    chat_template: str = ""
    """A template's file, or "chatml" or "plain", ours for base models; "": the tokenizer's own.

    The exported model has it, too.
    """

    template_args: dict[str, bool | int | float | str | list[Any]] = Field(default={})
    """Arguments of the template, as { enable_thinking = false }, wherever a run renders."""

    fp8: Literal["off", "tensorwise", "blockwise"] = "off"
    """Transformer Engine's FP8 recipe for training's matrix products; "off": they are in dtype."""

    @model_validator(mode="after")
    def _check_args(self) -> Model:
        if wrong := [name for name in self.template_args if not name.isidentifier() or name in GIVEN]:
            raise ValueError(
                f"model.template_args has {wrong[0]!r}, which is no argument of a template. Take a name of "
                f"letters, digits and _ other than {', '.join(GIVEN)}"
            )
        return self
