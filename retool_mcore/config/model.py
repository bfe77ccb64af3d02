"""[model]: the initial weights, their precision and the chat template."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import Section

BUILT_IN = ("chatml", "plain")  # templates in data/built_in_templates
RENDERER_ARGS = ("messages", "tools", "add_generation_prompt")  # arguments that the renderer itself passes


class Model(Section):
    """The initial model, its precision and its chat template."""

    path: str
    """A local Hugging Face directory or a Hub name."""

    dtype: Literal["bfloat16", "float32"]
    """Data type of the weights in training and in the engines. float32: platform cpu only."""

    chat_template: str = ""
    """A template file, or "chatml" or "plain"; "": the tokenizer's template.

    "chatml" and "plain" are built in, for base models. The export contains the template, too.
    """

    template_args: dict[str, bool | int | float | str | list[Any]] = Field(default={})
    """Arguments that a run passes to the template, such as { enable_thinking = false }."""

    fp8: Literal["off", "tensorwise", "blockwise"] = "off"
    """Transformer Engine's FP8 recipe for the GEMMs of training. "off": they use dtype."""

    @model_validator(mode="after")
    def _check_args(self) -> Model:
        if wrong := [name for name in self.template_args if not name.isidentifier() or name in RENDERER_ARGS]:
            raise ValueError(
                f"model.template_args has {wrong[0]!r}, which cannot be an argument of a template. Use letters, "
                f"digits and _, and none of {', '.join(RENDERER_ARGS)}"
            )
        return self
