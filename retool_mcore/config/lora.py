"""[lora]: small matrices beside the model's weights, which are trained in their place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveInt, Section

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
FP8 = "fp8"
GROUPS: dict[str, tuple[str, ...]] = {"attention": ATTENTION, "mlp": MLP}


class Lora(Section):
    """Low-rank adapters: the model's weights stay as they are, and two small matrices are trained.

    A matrix W counts as W + alpha / rank * B A. See train/README.md, "LoRA".
    """

    rank: Annotated[int, Field(ge=0)] = 0
    """Rows of A and columns of B; 0: no adapters, all weights are trained."""

    alpha: PositiveInt = 32
    """The product of an adapter's two matrices is scaled by alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which a value that enters an adapter is left out, in SFT's training only."""

    targets: list[
        Literal["attention", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ] = Field(default=["attention", "mlp"], min_length=1)
    """The matrices of each layer that get an adapter, by name or as a group."""

    base_precision: Literal["model", "fp8"] = "model"
    """Numbers that the frozen matrices of the layers are kept in; "model": those of model.dtype.

    "fp8" rounds them to a byte each, for training, engines and export alike.
    """

    @model_validator(mode="after")
    def _rounded_beside_adapters(self) -> Lora:
        if self.base_precision != "model" and not self.rank:
            raise ValueError(
                f'base_precision = "{self.base_precision}" with rank = 0: without adapters all weights are trained, '
                'and none is frozen. Set a rank, or "model"'
            )
        return self

    @property
    def in_fp8(self) -> bool:
        return self.base_precision == FP8

    @property
    def matrices(self) -> list[str]:
        """The targets by name, each once, in the order of a layer."""
        named = {name for target in self.targets for name in GROUPS.get(target, (target,))}
        return [name for name in (*ATTENTION, *MLP) if name in named]
