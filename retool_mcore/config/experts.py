"""How training treats the experts of a mixture-of-experts model."""

from typing import Literal

from pydantic import Field

from retool_mcore.config.base import PositiveFloat, Section


class Experts(Section):
    """How a model with experts sends its tokens to them in training; a dense model has none.

    parallel.ep spreads the experts over ranks. Transformer Engine multiplies those of a rank in one
    grouped product; a CPU goes through them one by one.
    """

    load_balancing: dict[Literal["aux_loss", "global_aux_loss"], PositiveFloat] = Field(default={}, max_length=1)
    """A loss that rewards even use of a layer's experts, and its weight: { aux_loss = 0.001 }.

    Added to SFT's loss, the actor's, the critic's; it is 1 a layer where the use is even, and has a
    weight of 0.001 in Qwen3's files. "aux_loss": of Switch Transformer, over each micro-batch;
    "global_aux_loss": the experts' use is counted over all data-parallel ranks and the update's
    micro-batches so far. {}, none, by default: a published model is balanced already, and in RL the
    loss moves the router by what no reward asked for, away from the routes that the responses were
    sampled on.
    """
