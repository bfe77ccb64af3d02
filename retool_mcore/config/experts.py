"""[experts]: how training routes tokens to the experts of an MoE model."""

from typing import Literal

from pydantic import Field

from retool_mcore.config.base import PositiveFloat, Section


class Experts(Section):
    """How training routes tokens to the experts of an MoE model. An error for dense models.

    parallel.ep distributes the experts over ranks. Transformer Engine computes the experts of a
    rank in one grouped GEMM. A CPU computes them one by one.
    """

    load_balancing: dict[Literal["aux_loss", "global_aux_loss"], PositiveFloat] = Field(default={}, max_length=1)
    """Auxiliary load-balancing loss and its weight, such as { aux_loss = 0.001 }.

    It is added to the losses of SFT, the actor and the critic. Its value is 1 per layer if the
    experts are used evenly. Qwen3's files give it a weight of 0.001. "aux_loss" is the loss of
    Switch Transformer, over each micro-batch. "global_aux_loss" counts the use of experts over all
    data-parallel ranks and the update's micro-batches so far. The default {} adds none: a published
    model is already balanced, and in RL this loss moves the router without a reward for it, away
    from the routes that the engine sampled with.
    """
