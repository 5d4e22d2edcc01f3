"""Messages of subtractive dithering with rANS, in plain torch: the definition (``spec/wire.md``, "Subtractive dithering").

Here is what an encoder decides; what takes time are operations of a backend, so that the native one runs the same program. Short messages
are the compressor's.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers, host
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import HUGE, TINY, float32
from tersegrad.core.protocol import Context
from tersegrad.kernels import reference
from tersegrad.kernels.reference.dither import _varint as varint
from tersegrad.kernels.reference.rans import SEGMENT, USUAL, pieces

__all__ = ["subtractive_decode", "subtractive_encode"]

# The first word of a message.
NON_FINITE, ZERO, SEGMENTS, RAW = 0x7FC00000, 0, 0x80000000, 0xFF800000
# Of the step, for what fixed-point arithmetic adds to the error.
SLACK = 1 - 2.0**-20
# Bits of |U| that the finest classes look at.
BINS = 4
# Octaves of 1/2 - |U|, at most, beside scale classes; and the bit of the window that says there are such.
OCTAVES, CLASSED = 8, 128
# Windows that are tried.
LIMITS = (7, 15, 31, 63)
# About the bits of a table's entry and of its frame.
ENTRY, TABLE = 5.0, 30.0
# The share of the bits without scale classes that those with them may take. Below so many bits per level, chunks are as long as possible.
WORTH_SENDING, SPARSE = 0.99, 0.5
LONGEST = 18
# Levels are not larger.
LEVEL_LIMIT = 1 << 30

Live = list[tuple[int, int, float]]  # start, length and step of the segments whose levels are coded


@dataclasses.dataclass(frozen=True)
class Tables:
    """Which table codes which symbol."""

    head: tuple[int, int]  # the two bytes that say so: the window, and how finely |U| is looked at
    side: Tensor  # scale classes, as bytes
    contexts: Tensor | None
    number: int
    sample: bool
    chunk: int


def segments_of(d: int, whole: bool) -> list[tuple[int, int]]:
    """(start, length) of the coordinates that share a step."""
    return [(0, d)] * (d > 0) if whole else _cut(d)


def step_of(omega: float, n: int, square: float) -> float:
    """The step of n coordinates with that squared norm: the nearest float32 in the normal range; SLACK is wider than the rounding."""
    return float32(min(max(SLACK * math.sqrt(12 * omega / n * square), TINY), HUGE)) if square else 0.0


def plain_levels(q: Tensor, steps: list[float], out: Tensor) -> int:
    """The message of levels as they are, which no other may exceed; its length."""
    return host.lay(out, struct.pack(f"<I{len(steps)}fB", SEGMENTS, *steps, 0), q.view(torch.uint8))


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
    return encode(reference, x, omega, whole, chunk, ctx, out, layout, minus)


def subtractive_decode(data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor) -> Tensor:
    return decode(reference, data, whole, ctx, out, weight, layout)


def encode(
    run: Any,
    x: Tensor,
    omega: float,
    whole: bool,
    chunk: int,
    ctx: Context,
    out: Tensor,
    layout: Tensor,
    minus: float | None,
) -> int:
    """:func:`subtractive_encode` by the operations of ``run``."""
    length = _message(run, x, omega, whole, chunk, ctx, out, layout)
    if minus is not None:
        decode(run, out[:length], whole, ctx, x, -minus, layout)
    return length


def _message(run: Any, x: Tensor, omega: float, whole: bool, chunk: int, ctx: Context, out: Tensor, layout: Tensor) -> int:
    segments = segments_of(x.numel(), whole)
    squares = [float(run.sum_squares(x[s : s + n])) for s, n in segments]
    if not math.isfinite(sum(squares)):
        return put_word(out, NON_FINITE)
    if not any(squares):
        return put_word(out, ZERO)
    steps = [step_of(omega, n, e) for (_, n), e in zip(segments, squares, strict=True)]
    live = [(s, n, step) for (s, n), step in zip(segments, steps, strict=True) if step]
    q = buffers.empty(sum(n for _, n, _ in live), torch.int32, x.device)
    at = top = 0
    for s, n, step in live:
        here = int(run.subtractive_quantise(x[s : s + n], step, ctx, s, q[at : at + n]))
        if here < 0:
            return put_word(out, RAW, x.view(torch.uint8))
        at, top = at + n, max(top, here)
    window = _window(q, top)
    symbols = buffers.empty(q.numel(), torch.uint8, q.device).copy_(q.clamp(-window, window).add_(window))
    tables = _tables(run, symbols, window, chunk, ctx, layout, live)
    tail = _escapes(run, q, window) if top > window else q.new_empty(0, dtype=torch.uint8)
    head = struct.pack(f"<I{len(steps)}fBB", SEGMENTS, *steps, *tables.head) + varint(tail.numel())
    at = host.lay(out, head, tables.side)
    alphabet = 2 * window + 1
    at += int(run.rans_encode(symbols, alphabet, tables.contexts, tables.number, tables.sample, tables.chunk, out[at:]))
    if at + tail.numel() > 5 + 4 * len(steps) + 4 * q.numel():
        return plain_levels(q, steps, out)
    return at + host.lay(out[at:], tail)


def put_word(out: Tensor, word: int, *more: Tensor) -> int:
    """A message that has no levels; its length."""
    return host.lay(out, struct.pack("<I", word), *more)


def _escapes(run: Any, q: Tensor, window: int) -> Tensor:
    """Levels at the ends of the window and beyond."""
    size = q.abs()
    values = (size - window + 1)[size >= window].long()
    out = torch.empty(2 + 16 * values.numel(), dtype=torch.uint8, device=q.device)
    return out[: int(run.planar_gamma_encode(values, out))]


def _tables(run: Any, symbols: Tensor, window: int, chunk: int, ctx: Context, layout: Tensor, live: Live) -> Tables:
    """The tables that take the fewest bits: of classes of |U| alone, or of scale classes too."""
    n, alphabet, device, usual = symbols.numel(), 2 * window + 1, symbols.device, chunk or USUAL
    bins = _each(run.subtractive_bins, ctx, live, device)
    counts = run.rans_histogram(symbols, alphabet, bins, 1 << BINS, True).cpu()
    bits = _classes(counts)
    classes = buffers.empty(n, torch.uint8, device)
    side = run.classes_choose(symbols, window, layout.to(device), _parts(live, device), classes)
    if side is not None:
        merged = counts.view(1 << bits, -1, alphabet).sum(1)
        alone = _entropy(merged) * n / int(counts.sum()) + 8 * len(run.rans_write_tables(merged))
        octaves = _each(run.subtractive_octaves, ctx, live, device)
        number = int(classes.max()) + 1
        fine = run.rans_histogram(symbols, alphabet, classes * OCTAVES + octaves, number * OCTAVES, False).cpu()
        told, kept = min(
            (_entropy(rows) + 8 * len(run.rans_write_tables(rows)), k)
            for k in range(1, OCTAVES + 1)
            for rows in [_merged(fine.view(number, OCTAVES, alphabet), k)]
        )
        if told + 8 * side.numel() < WORTH_SENDING * alone:
            size = LONGEST if not chunk and told < SPARSE * n else usual
            contexts = classes.mul_(kept).add_(octaves.clamp_(max=kept - 1))
            return Tables((CLASSED | window, kept), side, contexts, kept * number, False, size)
    plain = bins.bitwise_right_shift_(BINS - bits) if bits else None
    return Tables((window, bits), symbols.new_empty(0), plain, 1 << bits, True, usual)


def decode(run: Any, data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor) -> Tensor:
    """:func:`subtractive_decode` by the operations of ``run``."""
    d = out.numel()
    head = struct.unpack("<I", bytes(data[:4].tolist()))[0] if data.numel() >= 4 else -1
    if head == SEGMENTS:
        return _read_segments(run, data, whole, ctx, out, weight, layout)
    if head not in (NON_FINITE, ZERO, RAW):
        raise CorruptMessage(f"{data.numel()} bytes are no dithered message of {d} coordinates")
    if data.numel() != (4 + 4 * d if head == RAW else 4):
        raise CorruptMessage("the message has another length")
    fill = data[4:].clone().view(torch.float32) if head == RAW else out.new_full((), math.nan if head else 0.0)
    return out.copy_(fill) if weight is None else out.add_(fill, alpha=weight)


def _read_segments(
    run: Any, data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor
) -> Tensor:
    segments = segments_of(out.numel(), whole)
    at = 4 + 4 * len(segments)
    if data.numel() < at + 1:
        raise CorruptMessage("the steps are cut short")
    steps = struct.unpack(f"<{len(segments)}f", bytes(data[4:at].tolist()))
    if not all(step == 0 or TINY <= step <= HUGE for step in steps):
        raise CorruptMessage("a step is not a positive number")
    live = [(s, n, step) for (s, n), step in zip(segments, steps, strict=True) if step]
    q = _levels(run, data, at, ctx, layout, live)
    at = 0
    for (s, n), step in zip(segments, steps, strict=True):
        part = out[s : s + n]
        if step:
            run.subtractive_restore(q[at : at + n], step, ctx, s, part, weight)
            at += n
        elif weight is None:
            part.zero_()
    return out


def _levels(run: Any, data: Tensor, at: int, ctx: Context, layout: Tensor, live: Live) -> Tensor:
    count, window, device = sum(n for _, n, _ in live), int(data[at]), data.device
    if window == 0:
        if data.numel() != at + 1 + 4 * count:
            raise CorruptMessage("the levels have another length")
        return data[at + 1 :].clone().view(torch.int32).clamp_(-LEVEL_LIMIT, LEVEL_LIMIT)
    classed, window = window >= CLASSED, window % CLASSED
    if window == 0 or data.numel() < at + 3:
        raise CorruptMessage("a malformed header")
    fine = int(data[at + 1])
    if not (1 <= fine <= OCTAVES and count) if classed else fine > BINS:
        raise CorruptMessage("a malformed header")
    tail, at = _read_length(data, at + 2)
    if tail > data.numel() - at:
        raise CorruptMessage("the escapes are cut short")
    body = data[at : data.numel() - tail].contiguous()
    contexts: Tensor | None
    if classed:
        contexts = buffers.empty(count, torch.uint8, device)
        number, used = run.classes_read(body, layout.to(device), _parts(live, device), contexts)
        octaves = _each(run.subtractive_octaves, ctx, live, device)
        contexts.mul_(fine).add_(octaves.clamp_(max=fine - 1))
        number, body = number * fine, body[used:]
    else:
        bins = _each(run.subtractive_bins, ctx, live, device) if fine else None
        contexts, number = None if bins is None else bins.bitwise_right_shift_(BINS - fine), 1 << fine
    symbols = buffers.empty(count, torch.uint8, device)
    if int(run.rans_decode(body, 2 * window + 1, contexts, number, symbols)) != body.numel():
        raise CorruptMessage("bytes after the symbols")
    q = buffers.empty(count, torch.int32, device).copy_(symbols).sub_(window)
    if tail:
        ends = (q.abs() == window).nonzero()[:, 0]
        if ends.numel() > 8 * tail:
            raise CorruptMessage(f"{tail} bytes cannot hold {ends.numel()} escapes")
        more = torch.empty(ends.numel(), dtype=torch.int64, device=device)
        used = int(run.planar_gamma_decode(data[data.numel() - tail :].contiguous(), more))
        if used != tail or bool((more > LEVEL_LIMIT).any()):
            raise CorruptMessage("malformed escapes")
        q[ends] += torch.sign(q[ends]) * (more - 1).to(torch.int32)
    return q


def _read_length(data: Tensor, at: int) -> tuple[int, int]:
    """The varint that begins there, and where it ends."""
    value, begin, byte = 0, at, 128
    while byte >= 128:
        if at == data.numel() or at == begin + 10:
            raise CorruptMessage("a malformed length")
        byte = int(data[at])
        value |= (byte & 127) << 7 * (at - begin)
        at += 1
    if byte == 0 and at > begin + 1:
        raise CorruptMessage("a length is written with more bytes than it needs")
    return value, at


def _cut(d: int) -> list[tuple[int, int]]:
    """(start, length) of segments; the last one has half to one and a half of a segment."""
    return [(k * SEGMENT, n) for k, n in enumerate(pieces(d, SEGMENT))]


def _parts(live: Live, device: torch.device) -> Tensor:
    """Start and stop of what has regions of its own: segments, whether or not they share a step."""
    parts = [(s + a, s + a + m) for s, n, _ in live for a, m in _cut(n)]
    return torch.tensor(parts, dtype=torch.int64, device=device).view(-1)


def _each(draw: Callable[[Context, int, Tensor], None], ctx: Context, live: Live, device: torch.device) -> Tensor:
    """What is drawn for all coordinates that are coded."""
    found = buffers.empty(sum(n for _, n, _ in live), torch.uint8, device)
    at = 0
    for s, n, _ in live:
        draw(ctx, s, found[at : at + n])
        at += n
    return found


def _window(q: Tensor, top: int) -> int:
    """The largest level with a symbol of its own: all levels if few are large, else the tail is escaped."""
    if top <= LIMITS[0]:
        return max(top, 1)
    size = q.abs()
    for limit in LIMITS:
        if top <= limit:
            return top
        if int((size > limit).sum()) <= size.numel() // 2048:
            return limit
    return min(top, 127)


def _entropy(counts: Tensor) -> float:
    """Bits of symbols with these counts, one row for each table."""
    rows = counts.double()
    return float((torch.xlogy(rows, rows.sum(1, keepdim=True)) - torch.xlogy(rows, rows)).sum()) / math.log(2)


def _merged(counts: Tensor, kept: int) -> Tensor:
    """Counts by (class, octave, symbol) as rows of tables, where the last of ``kept`` octaves holds those beyond."""
    return torch.cat([counts[:, : kept - 1], counts[:, kept - 1 :].sum(1, keepdim=True)], 1).flatten(0, 1)


def _classes(counts: Tensor) -> int:
    """How many bits of |U| to condition on: the least entropy and tables together."""
    best = []
    for bits in range(BINS + 1):
        merged = counts.view(1 << bits, -1, counts.shape[1]).sum(1)
        best.append(_entropy(merged) + ENTRY * int((merged > 0).sum()) + TABLE * (1 << bits))
    return best.index(min(best))
