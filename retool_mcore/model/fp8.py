"""Weights in one byte a value: float8_e4m3fn, and a power of two for each row.

A row's power brings its largest value to the top of float8's range, 448. That a power of two
multiplies exactly makes a weight from its byte without an error in any number type that has it.
float8_e4m3fn keeps four binary digits, so a value moves by at most a sixteenth of itself, unless it
is below 2^-14 of its row's largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST = 448.0  # that float8_e4m3fn has


def row_scales(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows' powers of two [rows, 1], for the largest absolute value [rows] of each."""
    import torch

    mantissa, exponent = torch.frexp(largest.float() / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-100)  # a power of two is itself enough
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent).to(dtype)[:, None]


def to_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight [rows, columns] in one byte a value."""
    import torch

    return (weight / scales).to(torch.float8_e4m3fn)


def from_fp8(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight of ``to_fp8``, in the number type of ``scales``; no copy beyond the result."""
    return stored.to(scales.dtype).mul_(scales)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """weight [rows, columns] as it is after it was stored."""
    scales = row_scales(weight.abs().amax(1), weight.dtype)
    return from_fp8(to_fp8(weight, scales), scales)
