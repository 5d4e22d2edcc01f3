"""Sparse Dithering in plain torch: the definition of its segments.

A segment is one rANS chunk: 2^18 coordinates, the last from half to one and a half of that. Layout (``spec/wire.md``, "Dithered
levels"): kind (0 zero, 1 raw float32, 2 coded), then for coded ones the scale, the window K, the length of the escapes (varint),
the rANS message of the symbols clamp(k, -K, K) + K, and the escapes: Elias gamma of |k| - K + 1 wherever a symbol lies at either
end of the window, if any level lies beyond it.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.bits import elias_decode, elias_encode
from tersegrad.kernels.reference.rans import chunk_lengths, rans_decode, rans_encode
from tersegrad.kernels.reference.rounding import CHUNK, ordered_sum, random_u16

__all__ = ["dither_decode", "dither_encode", "dither_levels", "dither_max_bytes", "dither_sample"]

ZERO, RAW, CODED = 0, 1, 2
TINY, HUGE = 2.0**-126, float(torch.finfo(torch.float32).max)
LEVEL_LIMIT = 0x7FFFFFFF  # levels from here on are not coded
GAMMA = 0


def dither_max_bytes(numel: int) -> int:
    """No vector of ``numel`` coordinates takes more."""
    segments = len(chunk_lengths(numel))
    return (4 * segments if segments > 1 else 0) + segments + 4 * numel


def usable_step(step: float) -> float:
    """``step`` as a normal float32, rounded toward zero."""
    step = min(max(step, TINY), HUGE)
    rounded = torch.tensor(step, dtype=torch.float64).to(torch.float32)
    return float(torch.nextafter(rounded, torch.zeros(())) if float(rounded) > step else rounded)


def _levels(x: Tensor, step: float, ctx: Context | None, start: int) -> Tensor:
    """Integer levels as int64; those beyond int32 come out as 2^31 - 1."""
    inverse = 1.0 / torch.tensor(step, dtype=torch.float32, device=x.device)
    size = x.abs() * inverse
    if ctx is None:
        k = torch.round(x * inverse)
    else:
        whole = torch.floor(size)
        part = torch.round((size - whole) * 65536.0).to(torch.int64)
        up = part + random_u16(ctx, Purpose.ROUNDING, start, x.numel(), x.device) >> 16
        k = (whole + up).where(whole < 2**23, whole.double() + up) * torch.where(torch.signbit(x), -1, 1)
    held = size < 2147483520.0
    return k.where(held, 0).to(torch.int64).where(held, LEVEL_LIMIT)


def dither_levels(x: Tensor, step: float, ctx: Context | None) -> Tensor:
    """Levels of a short vector as int32; ``ctx`` asks for stochastic rounding."""
    return _levels(x, step, ctx, 0).to(torch.int32)


def _window(size: Tensor) -> int:
    n, top = size.numel(), int(size.max())
    if top <= 15:
        return max(top, 1)
    if int((size > 15).sum()) <= n // 512:
        return 15
    if top <= 31:
        return top
    if int((size > 31).sum()) <= n // 512:
        return 31
    return min(top, 127)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _segment(x: Tensor, start: int, nu: float, step: float, gain: bool, ctx: Context | None) -> tuple[bytes, float, float]:
    """The bytes of one segment, its squared norm and its squared error; no bytes where it is not finite."""
    norm = float(ordered_sum(x, lambda v: v * v))
    if not math.isfinite(norm):
        return b"", norm, 0.0
    if nu > 0:
        if norm == 0:
            return bytes([ZERO]), 0.0, 0.0
        step = usable_step(2 * math.sqrt(nu / x.numel() * norm))
    k = _levels(x, step, ctx, start)
    size = k.abs()
    top = int(size.max())
    if top == 0:
        return bytes([ZERO]), norm, norm
    raw = bytes([RAW]) + x.cpu().numpy().tobytes()
    if top >= LEVEL_LIMIT:
        return raw, norm, 0.0
    dot = float(ordered_sum(x.double() * k, lambda v: v))
    energy = float((k.double() * k).sum())
    if gain:
        step = usable_step(dot / energy)
    window = _window(size)
    symbols = (k.clamp(-window, window) + window).to(torch.uint8)
    tail = b""
    if top > window:
        tail = bytes(elias_encode((size - window + 1)[size >= window].contiguous(), GAMMA).cpu().numpy().tobytes())
    body = torch.empty(x.numel() + 16, dtype=torch.uint8, device=x.device)
    length = rans_encode(symbols, 2 * window + 1, None, 1, True, body)
    data = struct.pack("<BfB", CODED, step, window) + _varint(len(tail)) + body[:length].cpu().numpy().tobytes() + tail
    if len(data) > len(raw):
        return raw, norm, 0.0
    return data, norm, norm - 2 * step * dot + step * step * energy


def _fold(values: list[float]) -> float:
    """Add the second half to the first until one is left, as if padded with zeros to a power of two."""
    while len(values) > 1:
        half = 1 << (len(values) - 1).bit_length() - 1
        values = [a + b for a, b in zip(values[:half], values[half:] + [0.0] * half)]
    return values[0] if values else 0.0


def dither_encode(x: Tensor, nu: float, step: float, gain: bool, ctx: Context | None, out: Tensor) -> tuple[int, float, float]:
    """Write the segments into ``out``: length (0: not finite), ||x||^2 and the squared error."""
    lengths = chunk_lengths(x.numel())
    parts, norms, errors, at = [], [], [], 0
    for length in lengths:
        data, norm, error = _segment(x[at : at + length], at, nu, step, gain, ctx)
        if not data:
            return 0, norm, 0.0
        parts.append(data)
        norms.append(norm)
        errors.append(error)
        at += length
    table = b"".join(struct.pack("<I", len(p)) for p in parts) if len(parts) > 1 else b""
    message = table + b"".join(parts)
    out[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else out[:0]
    return len(message), _fold(norms), _fold(errors)


def dither_decode(data: Tensor, out: Tensor, weight: float | None) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``."""
    lengths = chunk_lengths(out.numel())
    raw = bytes(data.cpu().numpy().tobytes())
    at = 4 * len(lengths) if len(lengths) > 1 else 0
    if len(raw) < at:
        raise CorruptMessage("the segment table is cut short")
    sizes = struct.unpack(f"<{len(lengths)}I", raw[:at]) if at else [len(raw)] * len(lengths)
    if at + sum(sizes) != len(raw):
        raise CorruptMessage(f"the segments take {at + sum(sizes)} bytes, the message has {len(raw)}")
    begin = 0
    for length, size in zip(lengths, sizes, strict=True):
        _decode_segment(raw[at : at + size], out[begin : begin + length], weight)
        at, begin = at + size, begin + length
    return out


def _decode_segment(raw: bytes, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    if raw == bytes([ZERO]):
        values = torch.zeros(n, device=out.device)
    elif raw[:1] == bytes([RAW]) and len(raw) == 1 + 4 * n:
        values = torch.frombuffer(bytearray(raw[1:]), dtype=torch.float32).to(out.device)
    elif raw[:1] == bytes([CODED]) and len(raw) >= 7:
        values = _decode_levels(raw, n, out.device)
    else:
        raise CorruptMessage("not a segment of dithered levels")
    if weight is None:
        out.copy_(values)
    else:
        out.add_(torch.tensor(weight, dtype=torch.float32) * values)


def _decode_levels(raw: bytes, n: int, device: torch.device) -> Tensor:
    _, step, window = struct.unpack_from("<BfB", raw)
    tail, used = 0, 0
    while True:
        if used == 5 or 6 + used >= len(raw):
            raise CorruptMessage("a malformed length")
        byte = raw[6 + used]
        tail |= (byte & 127) << 7 * used
        used += 1
        if byte < 128:
            break
    if (used > 1 and byte == 0) or not 1 <= window <= 127 or not math.isfinite(step) or tail > len(raw) - 6 - used:
        raise CorruptMessage("a malformed segment header")
    body = torch.tensor(list(raw[6 + used : len(raw) - tail]), dtype=torch.uint8, device=device)
    symbols = torch.empty(n, dtype=torch.uint8, device=device)
    if rans_decode(body, 2 * window + 1, None, 1, symbols) != body.numel():
        raise CorruptMessage("bytes after the symbols")
    k = symbols.to(torch.int64) - window
    if tail:
        ends = k.abs() == window
        more = torch.empty(int(ends.sum()), dtype=torch.int64, device=device)
        if elias_decode(torch.tensor(list(raw[-tail:]), dtype=torch.uint8, device=device), GAMMA, more) != tail:
            raise CorruptMessage("bytes after the escapes")
        if bool((more > LEVEL_LIMIT + 1).any()):
            raise CorruptMessage("a level is too large")
        k[ends] += torch.sign(k[ends]) * (more - 1)
    values: Tensor = k.to(torch.float32) * step
    return values.clamp_(-HUGE, HUGE)


def dither_sample(x: Tensor, step: float, stride: int) -> tuple[float, float, float]:
    """<x, k>, ||k||^2 and ||x||^2 over one block of 4096 coordinates in ``stride``, rounding to nearest."""
    blocks = [x[i : i + CHUNK] for i in range(0, x.numel(), CHUNK * stride)]
    part = torch.cat(blocks) if blocks else x
    k = _levels(part, step, None, 0)
    dot = float(ordered_sum(part.double() * k, lambda v: v))
    return dot, float((k.double() * k).sum()), float(ordered_sum(part, lambda v: v * v))
