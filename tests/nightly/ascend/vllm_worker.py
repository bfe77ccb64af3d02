"""verl's extension of vLLM's workers, for vLLM's build for CPUs.

That build packs the weights of linear layers once and drops them, so that no later weights can be
loaded in place, as verl does. Here layers keep them; on devices nothing is packed.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils


def keep_weights(layer: Any, remove_weight: bool) -> None:
    """In place of ``dispatch_cpu_unquantized_gemm``."""
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


class KeepsWeights(vLLMColocateWorkerExtension):
    def __new__(cls, **kwargs: Any) -> KeepsWeights:
        utils.dispatch_cpu_unquantized_gemm = keep_weights
        return super().__new__(cls, **kwargs)
