"""FP8 weight storage: float8_e4m3fn values with a power-of-two scale per row.

The scale maps a row's largest value to the top of float8's range, 448. Multiplying by a power of
two is exact, so dequantization adds no error in any dtype that can represent the result.
float8_e4m3fn has four significant bits, so the relative rounding error is at most 1/16, except for
values below 2^-14 of their row's largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST = 448.0  # largest finite value of float8_e4m3fn


def row_scales(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Power-of-two scales [rows, 1] in ``dtype``, from each row's largest absolute value [rows]."""
    import torch

    mantissa, exponent = torch.frexp(largest.float() / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-100)  # an exact power of two needs no larger scale
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent).to(dtype)[:, None]


def to_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantize weight [rows, columns] to float8_e4m3fn with ``scales`` [rows, 1]."""
    import torch

    return (weight / scales).to(torch.float8_e4m3fn)


def from_fp8(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize ``to_fp8``'s result to the dtype of ``scales``. Allocates only the result."""
    return stored.to(scales.dtype).mul_(scales)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """weight [rows, columns] after quantization and dequantization, in its dtype."""
    scales = row_scales(weight.abs().amax(1), weight.dtype)
    return from_fp8(to_fp8(weight, scales), scales)
