"""[lora]: small matrices beside the model's weights, which are trained in their place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from retool_mcore.config.base import PositiveInt, Section

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
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
    """Probability with which a value that enters an adapter is left out, in training only."""

    targets: list[
        Literal["attention", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ] = Field(default=["attention", "mlp"], min_length=1)
    """The matrices of each layer that get an adapter, by name or as a group."""

    @property
    def matrices(self) -> list[str]:
        """The targets by name, each once, in the order of a layer."""
        named = {name for target in self.targets for name in GROUPS.get(target, (target,))}
        return [name for name in (*ATTENTION, *MLP) if name in named]
