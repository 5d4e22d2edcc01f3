"""Messages of subtractive dithering: the reference's program with the operations in C++."""

from __future__ import annotations

from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels import native
from tersegrad.kernels.reference.subtractive import decode, encode

__all__ = ["subtractive_decode", "subtractive_encode"]


def subtractive_encode(
    x: Tensor,
    omega: float,
    whole: bool,
    chunk: int,
    ctx: Context,
    out: Tensor,
    layout: Tensor,
    minus: float | None = None,
) -> int | Tensor:
    return encode(native, x, omega, whole, chunk, ctx, out, layout, minus)


def subtractive_decode(data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor) -> Tensor:
    return decode(native, data, whole, ctx, out, weight, layout)
