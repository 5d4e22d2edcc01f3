"""Reading trellis-coded messages in plain torch: the other half of their definition (``spec/wire.md``, "trellis")."""

from __future__ import annotations

import dataclasses
import math
import struct

import torch
from torch import Tensor

from tersegrad.core import modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.classes import Region, cut
from tersegrad.kernels.reference.dither import _pieces_of as pieces_of
from tersegrad.kernels.reference.planar import planar_gamma_decode
from tersegrad.kernels.reference.rans import SEGMENT, pieces
from tersegrad.kernels.reference.trellis import (
    CLASSED,
    CODED,
    FAR,
    FAR_DITHERED,
    MOST_BITS,
    RAW,
    UNIT,
    WIDEST,
    ZERO,
    Dither,
    grid_of,
)
from tersegrad.kernels.reference.trellis_classes import read
from tersegrad.kernels.reference.trellis_code import parities
from tersegrad.kernels.reference.trellis_rans import Known, decode_block

__all__ = ["trellis_decode"]


def trellis_decode(
    data: Tensor, states: int, ctx: Context | None, out: Tensor, weight: float | None, layout: Tensor | None = None
) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``."""
    known = pieces_of(layout, out.numel(), [[out.numel(), max(out.numel(), 1), 1, 0]])
    raw = bytes(data.cpu().numpy().tobytes())
    if not raw or raw[0] not in (modes.NORMAL, modes.ZERO, modes.NON_FINITE):
        raise CorruptMessage("not a mode of trellis-coded messages")
    if raw[0] != modes.NORMAL:
        if len(raw) != 1:
            raise CorruptMessage("bytes after the end of the message")
        return out.fill_(math.nan) if raw[0] == modes.NON_FINITE else out.zero_() if weight is None else out
    lengths = pieces(out.numel(), SEGMENT)
    at = 1 + (4 * len(lengths) if len(lengths) > 1 else 0)
    if len(raw) < at:
        raise CorruptMessage("the segment table is cut short")
    sizes = struct.unpack(f"<{len(lengths)}I", raw[1:at]) if at > 1 else [len(raw) - 1] * len(lengths)
    if at + sum(sizes) != len(raw):
        raise CorruptMessage(f"the segments take {at + sum(sizes)} bytes, the message has {len(raw)}")
    values, begin = [], 0
    for length, size in zip(lengths, sizes, strict=True):
        regions = cut(known, begin, begin + length)
        values.append(_decode_segment(raw[at : at + size], begin, length, states, ctx, out.device, regions))
        at, begin = at + size, begin + length
    whole = torch.cat(values) if values else out.new_empty(0)
    return out.copy_(whole) if weight is None else out.add_(torch.tensor(weight, dtype=torch.float32) * whole)


def _decode_segment(
    raw: bytes, start: int, count: int, states: int, ctx: Context | None, device: torch.device, regions: list[Region]
) -> Tensor:
    if raw == bytes([ZERO]):
        return torch.zeros(count, device=device)
    if raw[:1] == bytes([RAW]) and len(raw) == 1 + 4 * count:
        return torch.frombuffer(bytearray(raw[1:]), dtype=torch.float32).to(device)
    if raw[:1] not in (bytes([CODED]), bytes([CLASSED])):
        raise CorruptMessage("not a segment of a trellis-coded message")
    return _decode_coded(raw, start, count, states, ctx, device, regions if raw[0] == CLASSED else [])


@dataclasses.dataclass(frozen=True)
class _Header:
    window: int
    run: int  # log2
    bits: int  # log2 of the classes of |t|
    scales: tuple[float, ...]
    begin: int  # of classes and symbols
    end: int


def _header(raw: bytes, dithered: bool) -> _Header:
    at = 4 if dithered else 3
    tail, used, byte = 0, 0, 128
    while byte >= 128:
        if used == 5 or at + used >= len(raw):
            raise CorruptMessage("a malformed length")
        byte = raw[at + used]
        tail |= (byte & 127) << 7 * used
        used += 1
    window, run, bits = raw[1], raw[2], raw[3] if dithered else 1
    number = 2 if raw[0] == CLASSED and not dithered else 1
    at += used
    if (used > 1 and byte == 0) or window % 2 or not 2 <= window <= WIDEST or run not in (14, 15) or bits > MOST_BITS:
        raise CorruptMessage("a malformed segment header")
    if at + 4 * number + tail > len(raw):
        raise CorruptMessage("a segment is cut short")
    scales = struct.unpack_from(f"<{number}f", raw, at)
    if not all(TINY <= scale <= HUGE or (number > 1 and scale == 0) for scale in scales):
        raise CorruptMessage(f"scales of {scales}")
    return _Header(window, run, bits, scales, at + 4 * number, len(raw) - tail)


def _decode_coded(
    raw: bytes, start: int, count: int, states: int, ctx: Context | None, device: torch.device, regions: list[Region]
) -> Tensor:
    head = _header(raw, ctx is not None)
    grid, window = grid_of(count, head.run), head.window
    data = torch.tensor(list(raw[head.begin : head.end]), dtype=torch.uint8, device=device)
    found, used = read(data, regions, ctx is not None) if regions else (None, 0)
    still, dither = None, None if ctx is None else Dither(ctx, start, grid, device)
    if dither is not None:
        first, tables = (0, 1) if found is None else ((found.number << head.bits)[:, None], len(found.still))
        known = Known((dither.classes(head.bits) + first).to(torch.uint8), dither.flips, None)
        tables <<= head.bits
    elif found is not None:
        still, tables = found.still_each, found.first[-1]
        even = found.of_each(found.first[:-1])
        known = Known(torch.stack((even, even + (~still).long()), 1).to(torch.uint8), None, still)
    else:
        known, tables = Known(torch.arange(2, dtype=torch.uint8, device=device).expand(count, 2), None, None), 2
    symbols = torch.empty(count, dtype=torch.uint8, device=device)
    if used + decode_block(data[used:], 2 * window, tables, known, head.run, states, symbols) != data.numel():
        raise CorruptMessage("bytes after the symbols")
    a = symbols.long() - window
    odd = parities(symbols & 1, known.flips, grid, states, still).long()
    if head.end < len(raw):
        a = _unescape(a, raw[head.end :], window, FAR if dither is None else FAR_DITHERED)
    scale = torch.tensor(head.scales, dtype=torch.float32, device=device)
    if dither is None:
        each = scale[0] if still is None else scale[still.long()]
        return ((2 * a + odd).to(torch.float32) * each).clamp_(-HUGE, HUGE)
    t = dither.t.gather(1, odd[:, None])[:, 0]
    v = dither.sign * ((torch.where(t >= 0, a, -a) << UNIT + 1) + t)
    return (v.to(torch.float32) * 2.0**-UNIT * scale[0]).clamp_(-HUGE, HUGE)


def _unescape(a: Tensor, tail: bytes, window: int, most: int) -> Tensor:
    ends = ((a < 2 - window) | (a >= window - 2)).nonzero()[:, 0]
    more = torch.empty(ends.numel(), dtype=torch.int64, device=a.device)
    data = torch.tensor(list(tail), dtype=torch.uint8, device=a.device)
    if int(planar_gamma_decode(data, more)) != data.numel() or bool((more > most).any()):
        raise CorruptMessage("malformed escapes")
    a = a.clone()
    a[ends] += torch.where(a[ends] < 0, -2, 2) * (more - 1)
    return a
