"""The fixed-rate baselines in plain torch: what each message byte is, as elementwise integer and float32 operations.

Every function works on whole messages, laid out as in ``spec/wire.md``; ``out`` has exactly the right size. Nothing here depends
on the order in which a device adds numbers: sums are built from elementwise additions in a stated order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.philox import M0, M1, MASK, W0, W1, Purpose
from tersegrad.core.protocol import Context

__all__ = [
    "bf16_decode",
    "bf16_encode",
    "dithering_decode",
    "dithering_encode",
    "fp8_decode",
    "fp8_encode",
    "fp16_decode",
    "fp16_encode",
    "natural_decode",
    "natural_encode",
    "sign_decode",
    "sign_encode",
    "ternary_decode",
    "ternary_encode",
]

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the range of scales: float32's normal numbers
INFINITY = 0x7F800000
CHUNK, LANES = 4096, 32


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _emit(values: Tensor, out: Tensor, weight: float | None) -> None:
    if weight is None:
        out.copy_(values)
    else:
        out += values * torch.tensor(weight, dtype=torch.float32, device=out.device)


def _scale(data: Tensor, count: int = 1) -> Tensor:
    return data[: 4 * count].clone().view(torch.float32)


def _put(out: Tensor, *parts: Tensor) -> None:
    torch.cat([_bytes(p) for p in parts], out=out)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _constant(value: float, x: Tensor, count: int = 1) -> Tensor:
    return torch.full((count,), value, dtype=torch.float32, device=x.device)


def _zeros(count: int, x: Tensor) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=x.device)


def draws(count: int, ctx: Context, device: torch.device, purpose: Purpose = Purpose.ROUNDING) -> Tensor:
    """Sixteen random bits for each of ``count`` coordinates, as int32 in [0, 65536)."""
    block = torch.arange(-(-count // 8), dtype=torch.int64, device=device)
    c0, c1 = block & MASK, (block >> 32) | purpose << 24
    c2, c3 = torch.full_like(block, ctx.step), torch.full_like(block, ctx.buffer << 16 | ctx.sender)
    k0, k1 = ctx.seed & MASK, ctx.seed >> 32
    for _ in range(10):
        p0, p1 = c0 * M0, c2 * M1  # int64 wraps; both halves of the product survive
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + W0 & MASK, k1 + W1 & MASK
    words = torch.stack((c0, c1, c2, c3), dim=1)  # (blocks, 4)
    return torch.stack((words & 0xFFFF, words >> 16), dim=2).reshape(-1)[:count].to(torch.int32)


def _padded(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros behind it up to a multiple of ``width``, in rows of ``width``."""
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)


def ordered_sums(terms: Tensor, bucket: int) -> Tensor:
    """Sums of each ``bucket`` of float64 terms, in an order that depends on ``bucket`` alone.

    A bucket is cut into chunks of 4096. In a chunk, term j joins running sum j % 32 in turn; then the upper half of the running
    sums is added onto the lower half until one is left, and the chunks (padded with zeros to a power of two) likewise.
    """
    chunks = -(-bucket // CHUNK)
    inside = min(CHUNK, -(-bucket // LANES) * LANES)
    rows = _padded(_padded(terms, bucket), bucket) if terms.numel() else terms.new_zeros(0, bucket)
    rows = torch.nn.functional.pad(rows, (0, chunks * inside - bucket)).view(-1, chunks, inside // LANES, LANES)
    lanes = rows[:, :, 0].clone()
    for k in range(1, inside // LANES):
        lanes += rows[:, :, k]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    sums = lanes[..., 0]
    width = 1 << (chunks - 1).bit_length()
    sums = torch.nn.functional.pad(sums, (0, width - chunks))
    while width > 1:
        width //= 2
        sums = sums[:, :width] + sums[:, width:]
    return sums[:, 0]


def _sign_bits(negative: Tensor) -> Tensor:
    rows = _padded(negative.to(torch.int32), 8) if negative.numel() else negative.new_zeros((0, 8), dtype=torch.int32)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=negative.device)
    return (rows * weights).sum(1).to(torch.uint8)


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
    h = data.clone().view(torch.int16).to(torch.int32)
    _emit((h << 16).view(torch.float32), out, weight)


def fp16_encode(x: Tensor, out: Tensor) -> None:
    """A power of two that moves the largest magnitude into [2^14, 2^15), then nearest even."""
    if x.numel() == 0:
        return
    if not _finite(x):
        _put(out, _constant(math.nan, x), _zeros(2 * x.numel(), x))
        return
    most = _bits(x.abs().max().reshape(1))
    e = ((most >> 23) - 127 - 14).clamp(min=-126)
    factor, scale = (127 - e << 23).view(torch.float32), (127 + e << 23).view(torch.float32)
    _put(out, scale, (x * factor).to(torch.float16))


def fp16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    if out.numel():
        _emit(data[4:].clone().view(torch.float16).to(torch.float32) * _scale(data), out, weight)


def fp8_encode(x: Tensor, out: Tensor, block: int) -> None:
    """Blocks of e4m3 (finite-only) with one power of two that moves the largest magnitude into (232, 464]."""
    blocks = -(-x.numel() // block)
    if not _finite(x):
        _put(out, _zeros(blocks, x) + 255, _zeros(x.numel(), x))
        return
    if blocks == 0:
        return
    most = _bits(_padded(x, block).abs().amax(1))
    e = ((most + 0x17FFFF >> 23) - 8).clamp(min=1)
    factor = (254 - e << 23).view(torch.float32)
    y = (_padded(x, block) * factor[:, None]).reshape(-1)[: x.numel()]
    b = _bits(y.abs())
    normal = (b + 0x7FFFF + (b >> 20 & 1) >> 20) - (120 << 3)
    subnormal = _bits(y.abs() + 2.0**14) - 0x46800000
    code = torch.where(y.abs() >= 2.0**-6, normal, subnormal) | (_bits(x) >> 24 & 0x80)
    _put(out, e.to(torch.uint8), code.to(torch.uint8))


def fp8_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    blocks = -(-out.numel() // block)
    e = data[:blocks].to(torch.int32)
    scales = torch.where(e == 0, 0x00400000, torch.where(e == 255, 0x7FC00000, e << 23)).to(torch.int32).view(torch.float32)
    b = data[blocks:].to(torch.int32)
    m = b & 0x7F
    size = torch.where(m < 8, m.to(torch.float32) * 2.0**-9, ((m << 20) + (120 << 23)).view(torch.float32))
    size = torch.where(m == 0x7F, torch.nan, size)
    signed = torch.where(b >= 0x80, -size, size)
    _emit(signed * scales.repeat_interleave(block)[: out.numel()], out, weight)


def sign_encode(x: Tensor, out: Tensor) -> None:
    """The mean magnitude and one bit a coordinate, set where x < 0."""
    if x.numel() == 0:
        return
    total = ordered_sums(x.abs().to(torch.float64), x.numel())
    if not _finite(total):
        _put(out, _constant(math.nan, x), _zeros(-(-x.numel() // 8), x))
        return
    _put(out, (total / x.numel()).to(torch.float32), _sign_bits(x < 0))


def sign_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    if out.numel():
        scale = _scale(data)
        _emit(torch.where(_unpack_bits(data[4:], out.numel()) == 1, -scale, scale), out, weight)


def natural_encode(x: Tensor, out: Tensor, ctx: Context) -> None:
    """Sign bits and exponents of x rounded to a neighbouring power of two: a draw added below the exponent may carry into it."""
    if not _finite(x):
        _put(out, _zeros(-(-x.numel() // 8), x), _zeros(x.numel(), x) + 255)
        return
    b = _bits(x)
    up = ((b & 0x7FFFFFFF) + 64 + (draws(x.numel(), ctx, x.device) << 7)) >> 23
    _put(out, _sign_bits(b < 0), up.clamp(max=254).to(torch.uint8))


def natural_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    signs = -(-out.numel() // 8)
    e = data[signs:].to(torch.int32)
    size = (e << 23 | (e + 1) >> 8 << 22).view(torch.float32)
    _emit(torch.where(_unpack_bits(data[:signs], out.numel()) == 1, -size, size), out, weight)


def _inverses(scales: Tensor, count: int, bucket: int) -> Tensor:
    return (1.0 / scales).repeat_interleave(bucket)[:count]


def ternary_encode(x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
    """The largest magnitude of each bucket, then trits (1 + sign where a draw falls below |x| / largest, else 1), five a byte."""
    buckets, count = -(-x.numel() // bucket), x.numel()
    if not _finite(x):
        _put(out, _constant(math.nan, x, buckets), _zeros(-(-count // 5), x))
        return
    if count == 0:
        return
    scales = _padded(x, bucket).abs().amax(1).clamp(min=SMALLEST)
    own = _padded(draws(-(-count // 8) * 8, ctx, x.device), 2).to(torch.int64)
    u = (own << 16 | own.flip(1)).reshape(-1)[:count]  # 32 bits: a coordinate's own, then its neighbour's
    share = (x.abs() * _inverses(scales, count, bucket)).clamp(max=1.0)
    hit = (u >> 2) < (share * 2.0**30).to(torch.int64)
    trits = 1 + torch.where(hit, torch.where(_bits(x) < 0, -1, 1), 0)
    weights = torch.tensor([1, 3, 9, 27, 81], device=x.device)
    _put(out, scales, (_padded(trits, 5) * weights).sum(1).to(torch.uint8))


def ternary_decode(data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> None:
    count = out.numel()
    buckets = -(-count // bucket)
    packed = data[4 * buckets :].to(torch.int32)
    weights = torch.tensor([1, 3, 9, 27, 81], device=out.device)
    trits = (packed[:, None] // weights % 3).reshape(-1)
    if bool((packed > 242).any()) or bool(trits[count:].any()):
        raise CorruptMessage("a byte of trits is at most 242 and ends in zeros")
    scales = _scale(data, buckets).repeat_interleave(bucket)[:count]
    _emit((trits[:count] - 1).to(torch.float32) * scales, out, weight)


def dithering_encode(x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
    """The L2 norm of each bucket, then ``level << 1 | sign`` in ``width`` bits; level k > 0 is 2^(k - levels) of the norm."""
    buckets, count = -(-x.numel() // bucket), x.numel()
    if not _finite(x):
        _put(out, _constant(math.nan, x, buckets), _zeros(-(-count * width // 8), x))
        return
    if count == 0:
        return
    norms = ordered_sums(x.to(torch.float64).square(), bucket).sqrt()
    scales = norms.clamp(SMALLEST, LARGEST).to(torch.float32)
    u = draws(count, ctx, x.device)
    y = (x.abs() * _inverses(scales, count, bucket)).clamp(max=1.0)
    lowest = 128 - levels
    above = (_bits(y) + 64 + (u << 7) >> 23) - (lowest - 1)
    below = ((y * 2.0 ** (levels - 1)).clamp(max=1.0) * 65536 + 0.5).to(torch.int32) + u >> 16
    level = torch.where(_bits(y) >= lowest << 23, above, below)
    codes = level << 1 | ((_bits(x) < 0) & (level > 0))
    shifts = torch.arange(width, dtype=torch.int32, device=x.device)
    _put(out, scales, _sign_bits((codes[:, None] >> shifts & 1).reshape(-1)))


def dithering_decode(data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None) -> None:
    count = out.numel()
    buckets = -(-count // bucket)
    spread = _unpack_bits(data[4 * buckets :], count * width).view(count, width)
    codes = (spread << torch.arange(width, dtype=torch.int32, device=data.device)).sum(1).to(torch.int32)
    level = codes >> 1
    size = torch.where(level > 0, level + (127 - levels) << 23, 0).to(torch.int32).view(torch.float32)
    scales = _scale(data, buckets).repeat_interleave(bucket)[:count]
    _emit(torch.where(codes & 1 == 1, -size, size) * scales, out, weight)
