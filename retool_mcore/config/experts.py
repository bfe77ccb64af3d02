"""How training treats the experts of a mixture-of-experts model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import Section


class Experts(Section):
    """How a model with experts sends its tokens to them in training; a dense model has none.

    parallel.ep spreads the experts over ranks. Transformer Engine multiplies those of a rank in one
    grouped product; a CPU goes through them one by one.
    """

    router_dtype: Literal["float32", "model"] = "float32"
    """Number type of the router's product and scores; "model": model.dtype.

    In bfloat16 the scores of two experts are often equal, and which of them a token gets is chance.
    """

    load_balancing: Literal["none", "aux_loss", "global_aux_loss"] = "none"
    """A loss that rewards even use of a layer's experts, added to SFT's, the actor's, the critic's.

    "aux_loss": of Switch Transformer, over each micro-batch; "global_aux_loss": the experts' use is
    counted over all data-parallel ranks and the update's micro-batches so far. "none" by default: a
    published model is balanced already, and in RL the loss moves the router by what no reward asked
    for, away from the routes that the responses were sampled on.
    """

    aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of that loss, which is 1 a layer where the use is even; 0.001 in Qwen3's files."""

    permute_fusion: bool = False
    """Sort tokens by expert, and back, in Transformer Engine's fused kernels; CUDA only."""

    @model_validator(mode="after")
    def _check_loss_weight(self) -> Experts:
        if (self.load_balancing == "none") != (self.aux_loss_coef == 0):
            raise ValueError(
                f'experts.load_balancing = "{self.load_balancing}" with experts.aux_loss_coef = {self.aux_loss_coef}: '
                'a loss needs a weight above 0, and "none" has no weight. Change one of the two'
            )
        return self
