"""The fixed-rate baselines in plain torch: what each message byte is, as elementwise integer and float32 operations.

Every function works on whole messages, laid out as in ``spec/wire.md``; ``out`` has exactly the right size. Nothing here depends
on the order in which a device adds numbers: sums are those of ``rounding``, in a stated order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.rounding import block_sum_abs, block_sum_squares, random_u16
from tersegrad.kernels.schema import Cast

__all__ = [
    "bf16_decode",
    "bf16_encode",
    "exponent_bytes",
    "exponent_symbols",
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
    "sum_casts",
    "ternary_decode",
    "ternary_encode",
]

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the range of scales: float32's normal numbers
INFINITY = 0x7F800000


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _emit(values: Tensor, out: Tensor, weight: float | None) -> None:
    if weight is None:
        out.copy_(values)
    else:
        # Torch rounds the weight to float32.
        out += values * weight


def _scale(data: Tensor, count: int = 1) -> Tensor:
    return data[: 4 * count].clone().view(torch.float32)


def _put(out: Tensor, *parts: Tensor) -> None:
    torch.cat([_bytes(p) for p in parts], out=out)


def _finite(x: Tensor) -> Tensor:
    return x.isfinite().all()


def _powers(base: int, count: int, device: torch.device) -> Tensor:
    """1, base, base^2, ..., int64: made on the device, as numbers of the program would have to be waited for."""
    return base ** torch.arange(count, device=device)


def _draws(x: Tensor, ctx: Context) -> Tensor:
    return random_u16(ctx, Purpose.ROUNDING, 0, x.numel(), x.device)


def _padded(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros behind it up to a multiple of ``width``, in rows of ``width``."""
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)


def _sign_bits(negative: Tensor) -> Tensor:
    rows = _padded(negative.to(torch.int32), 8) if negative.numel() else negative.new_zeros((0, 8), dtype=torch.int32)
    return (rows << torch.arange(8, dtype=torch.int32, device=negative.device)).sum(1).to(torch.uint8)


def _unpack_bits(data: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.int32, device=data.device)
    return (data.to(torch.int32)[:, None] >> shifts & 1).reshape(-1)[:count]


def bf16_encode(x: Tensor, out: Tensor) -> None:
    """Nearest, ties to even; finite values stay finite; NaN and infinities pass."""
    b = _bits(x)
    a = b & 0x7FFFFFFF
    nearest = (a + 0x7FFF + (a >> 16 & 1) >> 16).clamp(max=0x7F7F)
    special = a >> 16 | torch.where(a > INFINITY, 0x40, 0)
    h = torch.where(a < INFINITY, nearest, special) | (b >> 16 & 0x8000)
    _put(out, torch.where(h >= 0x8000, h - 0x10000, h).to(torch.int16))


def bf16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """The float32 values of bfloat16 numbers."""
    h = data.clone().view(torch.int16).to(torch.int32)
    _emit((h << 16).view(torch.float32), out, weight)


def fp16_encode(x: Tensor, out: Tensor) -> None:
    """A power of two that moves the largest magnitude into [2^14, 2^15), then nearest even."""
    if x.numel() == 0:
        return
    finite = _finite(x)
    most = _bits(x.abs().max().reshape(1))
    e = ((most >> 23) - 127 - 14).clamp(min=-126)
    factor, scale = (127 - e << 23).view(torch.float32), (127 + e << 23).view(torch.float32)
    _put(out, torch.where(finite, scale, math.nan), torch.where(finite, (x * factor).to(torch.float16), 0))


def fp16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Half-precision numbers times their scale."""
    if out.numel():
        h = data[4:].clone().view(torch.float16).to(torch.float32)
        _emit(torch.copysign((h.abs() * _scale(data).abs()).clamp(max=LARGEST), h), out, weight)


def fp8_encode(x: Tensor, out: Tensor, block: int) -> None:
    """Blocks of e4m3 (finite-only) with one power of two that moves the largest magnitude into (232, 464]."""
    blocks = -(-x.numel() // block)
    if blocks == 0:
        return
    finite = _finite(x)
    most = _bits(_padded(x, block).abs().amax(1))
    e = ((most + 0x17FFFF >> 23) - 8).clamp(min=1)
    factor = (254 - e << 23).view(torch.float32)
    y = (_padded(x, block) * factor[:, None]).reshape(-1)[: x.numel()]
    b = _bits(y.abs())
    normal = (b + 0x7FFFF + (b >> 20 & 1) >> 20) - (120 << 3)
    subnormal = _bits(y.abs() + 2.0**14) - 0x46800000
    code = torch.where(y.abs() >= 2.0**-6, normal, subnormal) | (_bits(x) >> 24 & 0x80)
    _put(out, torch.where(finite, e, 255).to(torch.uint8), torch.where(finite, code, 0).to(torch.uint8))


def fp8_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """e4m3 numbers times their block's scale."""
    blocks = -(-out.numel() // block)
    e = data[:blocks].to(torch.int32)
    scales = torch.where(e == 0, 0x00400000, torch.where(e == 255, 0x7FC00000, e << 23)).to(torch.int32).view(torch.float32)
    b = data[blocks:].to(torch.int32)
    m = b & 0x7F
    size = torch.where(m < 8, m.to(torch.float32) * 2.0**-9, ((m << 20) + (120 << 23)).view(torch.float32))
    size = torch.where(m == 0x7F, torch.nan, size)
    size = (size * scales.repeat_interleave(block)[: out.numel()]).clamp(max=LARGEST)
    _emit(torch.where(b >= 0x80, -size, size), out, weight)


def sign_encode(x: Tensor, out: Tensor, block: int) -> None:
    """The mean magnitude of each block, then one bit per coordinate, set where x < 0."""
    count = x.numel()
    if count == 0:
        return
    totals = block_sum_abs(x, block)
    finite = _finite(totals)
    sizes = torch.full_like(totals, min(block, count))
    sizes[-1] = count - (totals.numel() - 1) * block
    scales = torch.where(finite, totals / sizes, math.nan).to(torch.float32)
    _put(out, scales, torch.where(finite, _sign_bits(x < 0), 0))


def sign_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """Plus or minus the scale of the block."""
    count = out.numel()
    blocks = -(-count // block)
    if count:
        scale = _scale(data, blocks).repeat_interleave(min(block, count))[:count]
        _emit(torch.where(_unpack_bits(data[4 * blocks :], count) == 1, -scale, scale), out, weight)


def sign_split(x: Tensor, carry: Tensor, out: Tensor, left: Tensor, block: int) -> Tensor:
    """The message of ``x + carry``, and what it leaves out."""
    torch.add(x, carry, out=left)
    finite = _finite(left)
    sign_encode(left, out, block)
    sign_decode(out, left, block, -1.0)
    return finite


def natural_encode(x: Tensor, out: Tensor, ctx: Context) -> None:
    """Sign bits and exponents of x rounded to a neighbouring power of two: a draw added below the exponent may carry into it."""
    finite = _finite(x)
    b = _bits(x)
    up = ((b & 0x7FFFFFFF) + 64 + (_draws(x, ctx) << 7)) >> 23
    exponents = torch.where(finite, up.clamp(max=254), 255).to(torch.uint8)
    _put(out, torch.where(finite, _sign_bits(b < 0), 0), exponents)


def natural_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Powers of two."""
    signs = -(-out.numel() // 8)
    e = data[signs:].to(torch.int32)
    size = (e << 23 | (e + 1) >> 8 << 22).view(torch.float32)
    _emit(torch.where(_unpack_bits(data[:signs], out.numel()) == 1, -size, size), out, weight)


def exponent_symbols(exponents: Tensor, symbols: Tensor) -> Tensor:
    """In uint8, 0 - 1 is 255: zeros do not count as the least."""
    if exponents.numel() == 0:
        return torch.tensor([255, 0, 2], device=exponents.device)
    below, largest = (exponents - 1).min(), exponents.max()
    # A number where that needs no wait: many times faster than a tensor.
    low = int(below) if exponents.is_cpu else below
    torch.sub(exponents.clamp(min=low), low, out=symbols)
    below, largest = below.to(torch.int64), largest.to(torch.int64)
    return torch.stack((below, largest, (largest - below + 1).clamp(2, 256)))


def exponent_bytes(symbols: Tensor, below: int, out: Tensor) -> None:
    """Sums in uint8."""
    torch.add(symbols, symbols.clamp(max=1).mul_(below), out=out)


def sum_casts(cast: Cast, messages: Sequence[Tensor], out: Tensor, weight: float = 1.0, block: int = 0) -> None:
    decoders: dict[Cast, Callable[..., None]] = {
        "bf16": bf16_decode,
        "fp16": fp16_decode,
        "sign": functools.partial(sign_decode, block=block),
        "natural": natural_decode,
    }
    for k, message in enumerate(messages):
        decoders[cast](message, out, weight=weight if k else None)
        if k == 0 and weight != 1.0:
            out.mul_(weight)


def _inverses(scales: Tensor, count: int, bucket: int) -> Tensor:
    return (1.0 / scales).repeat_interleave(bucket)[:count]


def ternary_encode(x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
    """The largest magnitude of each bucket, then trits (1 + sign where a draw falls below |x| / largest, else 1), five per byte."""
    # A configuration from outside must not size the padding.
    bucket = min(bucket, max(x.numel(), 1))
    count = x.numel()
    if count == 0:
        return
    finite = _finite(x)
    scales = _padded(x, bucket).abs().amax(1).clamp(min=SMALLEST)
    own = _padded(random_u16(ctx, Purpose.ROUNDING, 0, -(-count // 2) * 2, x.device), 2).to(torch.int64)
    # 32 bits: a coordinate's own, then its neighbour's.
    u = (own << 16 | own.flip(1)).reshape(-1)[:count]
    share = (x.abs() * _inverses(scales, count, bucket)).clamp(max=1.0)
    hit = (u >> 2) < (share * 2.0**30).to(torch.int64)
    trits = 1 + torch.where(hit, torch.where(_bits(x) < 0, -1, 1), 0)
    packed = (_padded(trits, 5) * _powers(3, 5, x.device)).sum(1)
    _put(out, torch.where(finite, scales, math.nan), torch.where(finite, packed, 0).to(torch.uint8))


def ternary_decode(data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> Tensor:
    """Trits less one, times the scale of their bucket; whether they are canonical."""
    count = out.numel()
    bucket = min(bucket, max(count, 1))
    buckets = -(-count // bucket)
    packed = data[4 * buckets :].to(torch.int32)
    trits = (packed[:, None] // _powers(3, 5, out.device) % 3).reshape(-1)
    scales = _scale(data, buckets).repeat_interleave(bucket)[:count]
    values = (trits[:count] - 1).to(torch.float32) * scales
    fine = (packed <= 242).all() & (trits[count:] == 0).all()
    if weight is None:
        out.copy_(values)
    else:
        # Adding minus zero changes nothing, not even the sign of a zero.
        out += torch.where(fine, values * weight, -0.0)
    return fine


def natural_levels_encode(x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
    """The L2 norm of each bucket, then ``level << 1 | sign`` in ``width`` bits; level k > 0 is 2^(k - levels) of the norm."""
    # A configuration from outside must not size the padding.
    bucket = min(bucket, max(x.numel(), 1))
    count = x.numel()
    if count == 0:
        return
    finite = _finite(x)
    norms = block_sum_squares(x, bucket).sqrt()
    scales = norms.clamp(SMALLEST, LARGEST).to(torch.float32)
    y = (x.abs() * _inverses(scales, count, bucket)).clamp(max=1.0)
    # Its fraction is the chance to go up, and its exponent the level.
    z = y + y.clamp(min=2.0 ** (1 - levels))
    level = (_bits(z) + 64 + (_draws(x, ctx) << 7) >> 23) - (128 - levels)
    codes = level << 1 | ((_bits(x) < 0) & (level > 0))
    shifts = torch.arange(width, dtype=torch.int32, device=x.device)
    packed = _sign_bits((codes[:, None] >> shifts & 1).reshape(-1))
    _put(out, torch.where(finite, scales, math.nan), torch.where(finite, packed, 0))


def natural_levels_decode(data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None) -> None:
    """Powers of two of the norm of their bucket."""
    count = out.numel()
    bucket = min(bucket, max(count, 1))
    buckets = -(-count // bucket)
    spread = _unpack_bits(data[4 * buckets :], count * width).view(count, width)
    codes = (spread << torch.arange(width, dtype=torch.int32, device=data.device)).sum(1).to(torch.int32)
    level = codes >> 1
    size = torch.where(level > 0, level + (127 - levels) << 23, 0).to(torch.int32).view(torch.float32)
    scales = _scale(data, buckets).repeat_interleave(bucket)[:count]
    _emit(torch.where(codes & 1 == 1, -size, size) * scales, out, weight)
