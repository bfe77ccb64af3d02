"""[lora]: low-rank adapters, trained instead of the model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveInt, Section

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
FP8 = "fp8"
GROUPS: dict[str, tuple[str, ...]] = {"attention": ATTENTION, "mlp": MLP}


class Lora(Section):
    """Low-rank adapters: the model's weights stay frozen, and two small matrices are trained.

    A matrix W becomes W + alpha / rank * B A. See train/README.md, "LoRA".
    """

    rank: Annotated[int, Field(ge=0)] = 0
    """Number of rows of A and of columns of B. 0: no adapters, train all weights."""

    alpha: PositiveInt = 32
    """alpha / rank scales the product of an adapter's two matrices."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's input, only in SFT training."""

    targets: list[
        Literal["attention", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ] = Field(default=["attention", "mlp"], min_length=1)
    """Matrices of each layer that get an adapter, by name or by group."""

    base_precision: Literal["model", "fp8"] = "model"
    """Precision of the frozen matrices of the layers. "model": that of model.dtype.

    "fp8" stores each number in one byte. Engines and the export use the rounded values.
    """

    @model_validator(mode="after")
    def _check_base_precision(self) -> Lora:
        if self.base_precision != "model" and not self.rank:
            raise ValueError(
                f'base_precision = "{self.base_precision}" needs adapters, but rank = 0 trains all weights. Set a '
                'rank above 0, or base_precision = "model"'
            )
        return self

    @property
    def in_fp8(self) -> bool:
        return self.base_precision == FP8

    @property
    def matrices(self) -> list[str]:
        """The names of the targets, each once, in the order of a layer."""
        named = {name for target in self.targets for name in GROUPS.get(target, (target,))}
        return [name for name in (*ATTENTION, *MLP) if name in named]
