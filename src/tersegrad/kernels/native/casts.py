"""The fixed-rate baselines in C++: same messages as ``reference.casts``, one or two passes over memory."""

from __future__ import annotations

from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import flag, module

__all__ = [
    "bf16_decode",
    "bf16_encode",
    "fp8_decode",
    "fp8_encode",
    "fp16_decode",
    "fp16_encode",
    "natural_decode",
    "natural_encode",
    "natural_levels_decode",
    "natural_levels_encode",
    "sign_decode",
    "sign_encode",
    "sign_split",
    "ternary_decode",
    "ternary_encode",
]


def _sink(weight: float | None) -> tuple[bool, float]:
    return weight is not None, 1.0 if weight is None else weight


def _source(ctx: Context) -> tuple[int, int, int]:
    return ctx.seed, ctx.step, ctx.buffer << 16 | ctx.sender


def bf16_encode(x: Tensor, out: Tensor) -> None:
    """Nearest bfloat16, ties to even; finite values stay finite."""
    module.bf16_encode(x, out)


def bf16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """The float32 values of bfloat16 numbers."""
    module.bf16_decode(data, out, *_sink(weight))


def fp16_encode(x: Tensor, out: Tensor) -> None:
    """A shared power of two, then half precision."""
    module.fp16_encode(x, out)


def fp16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Half-precision numbers times their scale."""
    module.fp16_decode(data, out, *_sink(weight))


def fp8_encode(x: Tensor, out: Tensor, block: int) -> None:
    """One power of two per block, then e4m3."""
    module.fp8_encode(x, out, block)


def fp8_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """e4m3 numbers times their block's scale."""
    module.fp8_decode(data, out, block, *_sink(weight))


def sign_encode(x: Tensor, out: Tensor, block: int) -> None:
    """The mean magnitude of each block, then one bit per coordinate."""
    module.sign_encode(x, out, block)


def sign_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """Plus or minus the scale of the block."""
    module.sign_decode(data, out, block, *_sink(weight))


def sign_split(x: Tensor, carry: Tensor, out: Tensor, left: Tensor, block: int) -> Tensor:
    """The message of ``x + carry``, and what it leaves out."""
    return flag(module.sign_split(x, carry, out, left, block))


def natural_encode(x: Tensor, out: Tensor, ctx: Context) -> None:
    """Sign bits and randomly rounded exponents."""
    module.natural_encode(x, out, *_source(ctx))


def natural_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Powers of two."""
    module.natural_decode(data, out, *_sink(weight))


def ternary_encode(x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
    """Scales and random trits, five per byte."""
    module.ternary_encode(x, out, bucket, *_source(ctx))


def ternary_decode(data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> Tensor:
    """Trits less one, times the scale of their bucket; whether they are canonical."""
    return flag(module.ternary_decode(data, out, bucket, *_sink(weight)))


def natural_levels_encode(x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
    """Norms and random levels."""
    module.natural_levels_encode(x, out, bucket, levels, width, *_source(ctx))


def natural_levels_decode(data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None) -> None:
    """Powers of two of the norm of their bucket."""
    module.natural_levels_decode(data, out, bucket, levels, width, *_sink(weight))
