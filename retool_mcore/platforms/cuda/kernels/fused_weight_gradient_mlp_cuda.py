"""Replacement of apex's extension of the same name, for environments without apex.

Megatron-core's own linear layers (the output layer) accumulate a weight gradient into the float32
gradient buffer in one GEMM, and support only apex's kernel for it. torch can call the same GEMM of
cuBLAS. Transformer Engine's layers do not use this module.
"""

import torch


def wgrad_gemm_accum_fp32(input_TH: torch.Tensor, grad_output_TO: torch.Tensor, main_grad_OH: torch.Tensor) -> None:
    """main_grad_OH [O, H] (float32) += grad_output_TO^T @ input_TH, both 16-bit."""
    torch.addmm(main_grad_OH, grad_output_TO.t(), input_TH, out_dtype=torch.float32, out=main_grad_OH)


def wgrad_gemm_accum_fp16(input_TH: torch.Tensor, grad_output_TO: torch.Tensor, main_grad_OH: torch.Tensor) -> None:
    """The same, for a gradient buffer of the inputs' 16-bit dtype."""
    main_grad_OH.addmm_(grad_output_TO.t(), input_TH)
