"""Sparse Dithering in plain torch: the definition of its messages (``spec/wire.md``, "Sparse Dithering").

The first word of a message is a scale, followed by the levels of a short vector as one bit stream, or says what else follows.
Long vectors are cut into segments of 2^18 coordinates, the last from half to one and a half of that. A segment is a kind (0 zero,
1 raw float32, 2 coded), then for coded ones the window K, the length of the escapes (varint), one scale for every block of 2^16
coordinates, the rANS message of the symbols clamp(k, -K, K) + K, and the escapes: planar Elias gamma of |k| - K + 1 wherever a
symbol lies at either end of the window, if any level lies beyond it. Segments of kind 3 tell the scale classes of their rows and
columns before the rANS message, which then has a table for each class.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.classes import Region, choose, cut, read_classes
from tersegrad.kernels.reference.levels import levels_decode, levels_encode
from tersegrad.kernels.reference.lowering import Block, fitted, lowered, lowered_alone, recount
from tersegrad.kernels.reference.planar import planar_gamma_decode, planar_gamma_encode
from tersegrad.kernels.reference.rans import SEGMENT, decode_block, encode_counted, pieces
from tersegrad.kernels.reference.rans_tables import dense_histogram
from tersegrad.kernels.reference.rounding import CHUNK, ordered_sum, random_u16, sum_squares

__all__ = ["dither_decode", "dither_encode", "dither_max_bytes", "dither_sample"]

AUTO, RANS, PAPER = 0, 1, 2  # coders
NON_FINITE, ALL_ZERO, SEGMENTS = 0x7FC00000, 0, 0x80000000  # first words; others are scales
ZERO, RAW, CODED, CLASSED = 0, 1, 2, 3  # kinds of segments
SCALE_BLOCK = 1 << 16
# log2 of the length of rANS chunks, unless it is given; long ones where classes leave less than half a bit per coordinate.
USUAL_CHUNK, LONG_CHUNK = 16, 18
SHORT, TINY_MESSAGE = 1 << 10, 300  # up to SHORT coordinates sequential codes are tried, and below that many bytes nothing else
UNARY_LIMIT = 16  # mean level from which a unary code cannot be the shortest
TOO_LARGE = 1 << 26  # levels from here on are not coded
QUICK_LIMIT = 127  # blocks with such a level take their sums in float64
QUICK_LANES = 64
TINY, HUGE = 2.0**-126, float(torch.finfo(torch.float32).max)
LEVEL_LIMIT = 0x7FFFFFFF

# Bytes, the squared norm and the squared error.
Outcome = tuple[bytes, float, float]


def dither_max_bytes(numel: int) -> int:
    """No message for ``numel`` coordinates is longer."""
    segments = len(pieces(numel, SEGMENT))
    return 4 + (4 * segments if segments > 1 else 0) + segments + 4 * numel


def usable_step(step: float) -> float:
    """``step`` as a normal float32, rounded toward zero."""
    step = min(max(step, TINY), HUGE)
    rounded = torch.tensor(step, dtype=torch.float64).to(torch.float32)
    return float(torch.nextafter(rounded, torch.zeros(())) if float(rounded) > step else rounded)


def _step_for(nu: float, n: int, norm: float) -> float:
    return usable_step(2 * math.sqrt(nu / n * norm))


def _inverse(x: Tensor, step: float) -> Tensor:
    return 1.0 / torch.tensor(step, dtype=torch.float32, device=x.device)


def _levels(x: Tensor, step: float, ctx: Context | None, start: int) -> Tensor:
    """Integer levels as int64; those that are too large come out as ``TOO_LARGE``."""
    y = x * _inverse(x, step)
    size = y.abs()
    if ctx is None:
        k = torch.round(y)
    else:
        whole = torch.floor(size)
        part = torch.round((size - whole) * 65536.0).to(torch.int64)
        up = part + random_u16(ctx, Purpose.ROUNDING, start, x.numel(), x.device) >> 16
        k = (whole.double() + up) * torch.where(torch.signbit(x), -1, 1)
    held = size < TOO_LARGE
    return k.where(held, 0).to(torch.int64).where(held, TOO_LARGE)


def _exact_sums(x: Tensor, k: Tensor) -> tuple[float, float]:
    """<x, k> and ||k||^2 in float64."""
    return float(ordered_sum(x.double() * k, lambda v: v)), float(ordered_sum(k, lambda v: v * v))


def _quick_dot(x: Tensor, k: Tensor, step: float) -> float:
    """<x, k> from float32 products of x / step and k, added up in 64 float32 lanes for every 4096 coordinates."""
    products = (x * _inverse(x, step)) * k.to(torch.float32)
    chunks = -(-x.numel() // CHUNK)
    rows = torch.nn.functional.pad(products, (0, chunks * CHUNK - x.numel())).view(chunks, -1, QUICK_LANES)
    lanes = torch.zeros(chunks, QUICK_LANES, dtype=torch.float32, device=x.device)
    for i in range(rows.shape[1]):
        lanes += rows[:, i]
    sums = lanes.double()
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return step * _fold(sums[:, 0].tolist())


def _fold(values: Sequence[float]) -> float:
    """Add the second half to the first until one is left, as if padded with zeros to a power of two."""
    values = list(values)
    while len(values) > 1:
        half = 1 << (len(values) - 1).bit_length() - 1
        values = [a + b for a, b in zip(values[:half], values[half:] + [0.0] * half)]
    return values[0] if values else 0.0


def _window(size: Tensor) -> int:
    n, top = size.numel(), int(size.max())
    if top <= 15:
        return top
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


def _block(x: Tensor, start: int, nu: float, step: float, ctx: Context | None) -> Block:
    """Levels of one block and what they tell of it."""
    norm = float(sum_squares(x))
    if not math.isfinite(norm):
        return Block(x, step, 0.0, norm)
    if norm == 0 and (nu > 0 or ctx is not None):
        return Block(torch.zeros_like(x, dtype=torch.int64), step, 0.0, 0.0)
    if nu > 0:
        step = _step_for(nu, x.numel(), norm)
    k = _levels(x, step, ctx, start)
    top = int(k.abs().max())
    if ctx is not None:
        return Block(k, step, step if top else 0.0, norm)
    if nu > 0 and top < QUICK_LIMIT:
        dot, energy = _quick_dot(x, k, step), float(k.square().sum())
    else:
        dot, energy = _exact_sums(x, k)
    return fitted(k, step, norm, dot, energy if top < TOO_LARGE else 0.0)


def _escapes(values: Tensor) -> bytes:
    # No code of a level below 2^26 takes more than 53 bits.
    room = torch.empty(2 + 7 * values.numel(), dtype=torch.uint8, device=values.device)
    return bytes(room[: int(planar_gamma_encode(values, room))].cpu().numpy().tobytes())


def _segment(
    x: Tensor, start: int, nu: float, step: float, ctx: Context | None, chunk: int, regions: list[Region], rdo: bool
) -> Outcome:
    """The bytes of one segment, its squared norm and its squared error; no bytes where it is not finite."""
    blocks = []
    for at in range(0, x.numel(), SCALE_BLOCK):
        blocks.append(_block(x[at : at + SCALE_BLOCK], start + at, nu, step, ctx))
        if not math.isfinite(blocks[-1].norm):
            return b"", blocks[-1].norm, 0.0
    k, norm, error = torch.cat([b.k for b in blocks]), _fold([b.norm for b in blocks]), _fold([b.error for b in blocks])
    size = k.abs()
    top = int(size.max())
    if top == 0:
        return bytes([ZERO]), norm, error
    raw = bytes([RAW]) + x.cpu().numpy().tobytes()
    if top >= TOO_LARGE:
        return raw, norm, 0.0
    window = _window(size)
    symbols = (k.clamp(-window, window) + window).to(torch.uint8)
    tail = _escapes((size - window + 1)[size >= window]) if top > window else b""
    body = torch.empty(x.numel() + 16, dtype=torch.uint8, device=x.device)
    kind, classes, contexts = CODED, b"", None
    if (chosen := choose(symbols, window, regions)) is None:
        counts = dense_histogram(symbols, 2 * window + 1)
    else:
        kind = CLASSED
        classes, contexts, counts, bits = chosen
        chunk = chunk or (LONG_CHUNK if 2 * bits < x.numel() else USUAL_CHUNK)
    if rdo:
        blocks = lowered(x, blocks, contexts, counts)
        if not any(b.energy for b in blocks):
            return bytes([ZERO]), norm, norm
        error, before = _fold([b.error for b in blocks]), symbols
        symbols = (torch.cat([b.k for b in blocks]).clamp(-window, window) + window).to(torch.uint8)
        counts = dense_histogram(symbols, 2 * window + 1) if contexts is None else recount(counts, contexts, before, symbols)
    length = encode_counted(symbols, 2 * window + 1, contexts, counts.shape[0], counts, chunk or USUAL_CHUNK, body)
    head = bytes([kind, window]) + _varint(len(tail)) + struct.pack(f"<{len(blocks)}f", *(b.scale for b in blocks)) + classes
    data = head + body[:length].cpu().numpy().tobytes() + tail
    return (data, norm, error) if len(data) <= len(raw) else (raw, norm, 0.0)


def _segments(
    x: Tensor, nu: float, step: float, ctx: Context | None, chunk: int, layout: list[list[int]], rdo: bool
) -> Outcome:
    parts, norms, errors, at = [], [], [], 0
    for length in pieces(x.numel(), SEGMENT):
        data, norm, error = _segment(x[at : at + length], at, nu, step, ctx, chunk, cut(layout, at, at + length), rdo)
        if not data:
            return struct.pack("<I", NON_FINITE), math.inf, 0.0
        parts.append(data)
        norms.append(norm)
        errors.append(error)
        at += length
    table = b"".join(struct.pack("<I", len(p)) for p in parts) if len(parts) > 1 else b""
    return struct.pack("<I", SEGMENTS) + table + b"".join(parts), _fold(norms), _fold(errors)


def _paper_bits(n: int, zeros: int, total: int) -> float:
    """Bits of the published code, but for the rounding of its enumeration."""
    places = (math.lgamma(n + 1.0) - math.lgamma(zeros + 1.0) - math.lgamma(n - zeros + 1.0)) / math.log(2)
    return 1 + n.bit_length() + total + (n - zeros) + places


def _short(x: Tensor, norm: float, nu: float, step: float, coder: int, ctx: Context | None, rdo: bool) -> Outcome:
    """One scale and the shortest of the allowed sequential codes; no bytes where they are not worth it."""
    n = x.numel()
    if nu > 0:
        step = _step_for(nu, n, norm)
    k = _levels(x, step, ctx, 0)
    if rdo:
        k = lowered_alone(x, k, step)
    top, total, zeros = int(k.abs().max()), int(k.abs().sum()), int((k == 0).sum())
    if top == 0:
        return struct.pack("<I", ALL_ZERO), norm, norm
    if top >= TOO_LARGE or (coder == PAPER and total > 64 * UNARY_LIMIT * n):
        return b"", norm, 0.0
    dot, energy = _exact_sums(x, k)
    scale = step if ctx is not None else usable_step(dot / energy)
    codes = [] if coder == PAPER else [levels_encode(k.to(torch.int32), True)]
    if coder == PAPER or (total <= UNARY_LIMIT * n and (n < 256 or _paper_bits(n, zeros, total) < 8.0 * codes[0].numel() + 16)):
        codes.append(levels_encode(k.to(torch.int32), False))
    code = min(codes, key=Tensor.numel)
    if code.numel() > 4 * n:
        return b"", norm, 0.0
    data = struct.pack("<f", scale) + bytes(code.cpu().numpy().tobytes())
    return data, norm, norm - 2 * scale * dot + scale * scale * energy


def _message(
    x: Tensor, nu: float, step: float, coder: int, chunk: int, ctx: Context | None, layout: list[list[int]], rdo: bool
) -> Outcome:
    best = b"", 0.0, 0.0
    if coder == PAPER or (coder == AUTO and x.numel() <= SHORT):
        norm = float(sum_squares(x))
        if not math.isfinite(norm):
            return struct.pack("<I", NON_FINITE), norm, 0.0
        if norm == 0:
            return struct.pack("<I", ALL_ZERO), 0.0, 0.0
        best = _short(x, norm, nu, step, coder, ctx, rdo)
        if best[0] and (coder == PAPER or len(best[0]) < TINY_MESSAGE):
            return best
    other = _segments(x, nu, step, ctx, chunk, layout, rdo)
    return best if best[0] and len(best[0]) <= len(other[0]) else other


def dither_encode(
    x: Tensor,
    nu: float,
    step: float | Tensor,
    coder: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> tuple[int | Tensor, float | Tensor, float | Tensor]:
    """Write a message into ``out``: length, ||x||^2 and the squared error; and what it leaves out into ``left``."""
    x = x if carry is None else x + carry
    data, norm, error = _message(x, nu, float(step), coder, chunk, ctx, _pieces_of(layout, x.numel(), []), rdo)
    out[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(out.device)
    if left is not None:
        dither_decode(out[: len(data)], left.copy_(x), -1.0, layout)
    power, wrong = torch.tensor([norm, error], dtype=torch.float64, device=out.device)
    return torch.tensor(len(data), device=out.device), power, wrong


def _pieces_of(layout: Tensor | None, numel: int, default: list[list[int]]) -> list[list[int]]:
    """The layout as lists of four; it must cover ``numel`` coordinates."""
    if layout is None:
        return default
    pieces: list[list[int]] = layout.view(-1, 4).tolist()
    good = all(n >= 0 and g >= 1 and c >= 1 and c % g == 0 and 0 <= p < c for n, c, g, p in pieces)
    if not good or sum(n for n, *_ in pieces) != numel:
        raise ValueError("the layout does not belong to this vector")
    return pieces


def dither_decode(data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None = None) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``."""
    raw = bytes(data.cpu().numpy().tobytes())
    if len(raw) < 4:
        raise CorruptMessage(f"a dithered message has at least 4 bytes, got {len(raw)}")
    head = struct.unpack_from("<I", raw)[0]
    if head == SEGMENTS:
        return _decode_segments(
            raw[4:], out, weight, _pieces_of(layout, out.numel(), [[out.numel(), max(out.numel(), 1), 1, 0]])
        )
    if head in (NON_FINITE, ALL_ZERO):
        if len(raw) != 4:
            raise CorruptMessage("bytes after the end of the message")
        return out.fill_(math.nan) if head == NON_FINITE else out.zero_() if weight is None else out
    scale = struct.unpack_from("<f", raw)[0]
    if not 0 < scale <= HUGE:
        raise CorruptMessage(f"a scale of {scale}")
    k = levels_decode(data[4:], out.numel())
    return _put(out, (k.to(torch.float32) * scale).clamp_(-HUGE, HUGE).to(out.device), weight)


def _put(out: Tensor, values: Tensor, weight: float | None) -> Tensor:
    return out.copy_(values) if weight is None else out.add_(torch.tensor(weight, dtype=torch.float32) * values)


def _decode_segments(raw: bytes, out: Tensor, weight: float | None, layout: list[list[int]]) -> Tensor:
    lengths = pieces(out.numel(), SEGMENT)
    at = 4 * len(lengths) if len(lengths) > 1 else 0
    if len(raw) < at:
        raise CorruptMessage("the segment table is cut short")
    sizes = struct.unpack(f"<{len(lengths)}I", raw[:at]) if at else [len(raw)] * len(lengths)
    if at + sum(sizes) != len(raw):
        raise CorruptMessage(f"the segments take {at + sum(sizes)} bytes, the message has {len(raw)}")
    # All of them before anything is written: a message that is refused adds nothing.
    values, begin = [], 0
    for length, size in zip(lengths, sizes, strict=True):
        values.append(_decode_segment(raw[at : at + size], length, out.device, cut(layout, begin, begin + length)))
        at, begin = at + size, begin + length
    return _put(out, torch.cat(values), weight) if values else out


def _decode_segment(raw: bytes, n: int, device: torch.device, regions: list[Region]) -> Tensor:
    if raw == bytes([ZERO]):
        return torch.zeros(n, device=device)
    if raw[:1] == bytes([RAW]) and len(raw) == 1 + 4 * n:
        return torch.frombuffer(bytearray(raw[1:]), dtype=torch.float32).to(device)
    if raw[:1] in (bytes([CODED]), bytes([CLASSED])):
        return _decode_levels(raw, n, device, regions if raw[0] == CLASSED else [])
    raise CorruptMessage("not a segment of dithered levels")


def _decode_levels(raw: bytes, n: int, device: torch.device, regions: list[Region]) -> Tensor:
    tail, used, byte = 0, 0, 128
    while byte >= 128:
        if used == 5 or 2 + used >= len(raw):
            raise CorruptMessage("a malformed length")
        byte = raw[2 + used]
        tail |= (byte & 127) << 7 * used
        used += 1
    window, count = raw[1], -(-n // SCALE_BLOCK)
    body = 2 + used + 4 * count
    if (used > 1 and byte == 0) or not 1 <= window <= 127 or body + tail > len(raw):
        raise CorruptMessage("a malformed segment header")
    scales = torch.tensor(struct.unpack_from(f"<{count}f", raw, 2 + used), dtype=torch.float32, device=device)
    if not bool(scales.isfinite().all()):
        raise CorruptMessage("a malformed scale")
    data = torch.tensor(list(raw[body : len(raw) - tail]), dtype=torch.uint8, device=device)
    symbols = torch.empty(n, dtype=torch.uint8, device=device)
    contexts, tables, used = read_classes(data, regions) if regions else (None, 1, 0)
    if used + decode_block(data[used:], 2 * window + 1, contexts, tables, symbols) != data.numel():
        raise CorruptMessage("bytes after the symbols")
    k = symbols.to(torch.int64) - window
    if tail:
        ends = k.abs() == window
        more = torch.empty(int(ends.sum()), dtype=torch.int64, device=device)
        if int(planar_gamma_decode(torch.tensor(list(raw[-tail:]), dtype=torch.uint8, device=device), more)) != tail:
            raise CorruptMessage("bytes after the escapes")
        if bool((more > LEVEL_LIMIT + 1).any()):
            raise CorruptMessage("a level is too large")
        k[ends] += torch.sign(k[ends]) * (more - 1)
    values: Tensor = k.to(torch.float32) * scales.repeat_interleave(SCALE_BLOCK)[:n]
    return values.clamp_(-HUGE, HUGE)


def dither_sample(x: Tensor, step: float, stride: int, out: Tensor, carry: Tensor | None = None) -> None:
    """Squared error, with the best scale for every scale block, and squared norm of one block of 4096 in ``stride``."""
    x = x if carry is None else x + carry
    starts = range(0, x.numel(), CHUNK * stride)
    errors, norms = [], []
    for _, group in itertools.groupby(starts, lambda i: i // SCALE_BLOCK):
        part = torch.cat([x[i : i + CHUNK] for i in group])
        dot, energy = _exact_sums(part, _levels(part, step, None, 0))
        norms.append(float(sum_squares(part)))
        errors.append(norms[-1] - dot / energy * dot if energy > 0 else norms[-1])
    out.copy_(torch.tensor([_fold(errors), _fold(norms)], dtype=torch.float64))
