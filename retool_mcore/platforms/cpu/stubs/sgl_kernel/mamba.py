"""SGLang imports its kernels of linear attention from here. Ours are in plain PyTorch."""

import torch

from retool_mcore.platforms.cpu.linear_attention import (
    causal_conv1d_fn_cpu,  # noqa: F401
    causal_conv1d_update_cpu,  # noqa: F401
    chunk_gated_delta_rule_cpu,  # noqa: F401
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)

torch.ops.sgl_kernel.fused_gdn_gating_cpu = fused_gdn_gating_cpu
torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu = fused_sigmoid_gating_delta_rule_update_cpu
