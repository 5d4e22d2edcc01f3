"""Trellis-coded messages in plain torch: their definition (``spec/wire.md``, "trellis" and "dithered_trellis").

Both quantisers choose an admissible sequence of integers n by Viterbi's algorithm and send an index a per coordinate, from which the
receiver, who follows the states, finds n. Without dither n = 2a + z0 is near x / step, and the least-squares scale is sent. With
dither n is near (sign x + U) / step, U uniform over the period of the code, [0, 4 steps), known to both ends like the sign; the value
is n steps - U, and a is the integer m in n - U / step = 2m + t, |t| <= 1, with the sign of t. Tables belong to z0, or to classes of
|t|: both depend on the state, so symbols and states are decoded together.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from tersegrad.core import modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.dither import _fold as fold
from tersegrad.kernels.reference.dither import usable_step
from tersegrad.kernels.reference.planar import planar_gamma_decode, planar_gamma_encode
from tersegrad.kernels.reference.rans import SEGMENT, encode_counted, lanes_of, pieces
from tersegrad.kernels.reference.rans_tables import rans_histogram
from tersegrad.kernels.reference.rounding import ordered_sum, random_u16, sum_squares
from tersegrad.kernels.reference.trellis_code import GRID, Grid, nearest_labels, parities
from tersegrad.kernels.reference.trellis_rans import decode_block

__all__ = ["trellis_decode", "trellis_encode", "trellis_error", "trellis_max_bytes"]

ZERO, RAW, CODED = 0, 1, 2  # kinds of segments
RUN = 15  # log2 of the coordinates after which all trellises start anew; fewer where rANS chunks are shorter
SIGNS = 14  # a sign for every 2^14 coordinates that start a run
UNIT = 13  # dithered numbers count in 2^-13 of a step
# |x / step| from here on is not coded, without and with dither; receivers refuse escapes from twice that on.
FAR, FAR_DITHERED = 1 << 25, 1 << 15
WIDEST = 64  # windows are even and at most this


def trellis_max_bytes(numel: int) -> int:
    """No message for ``numel`` coordinates is longer."""
    segments = len(pieces(numel, SEGMENT))
    return 1 + (4 * segments if segments > 1 else 0) + segments + 4 * numel


def class_bits(count: int) -> int:
    """log2 of the classes of |t|: as many as their tables are worth."""
    return 3 if count >= 1 << 16 else 2 if count >= 1 << 13 else 1 if count >= 1 << 10 else 0


class _Dither:
    """What both ends know of a dithered segment."""

    def __init__(self, ctx: Context, start: int, grid: Grid, device: torch.device) -> None:
        self.u = random_u16(ctx, Purpose.TRELLIS, start, grid.count, device).long() & 0x7FFF
        first = start >> SIGNS
        draws = random_u16(ctx, Purpose.TRELLIS_SIGN, first, (grid.count >> SIGNS) + 1, device)
        run = torch.arange(grid.count, device=device) // grid.run * grid.run >> SIGNS
        self.sign = 1 - 2 * (draws[run].long() & 1)
        # For each z0, (count, 2): t, and (t + U) / 2^13.
        offset = torch.arange(2, device=device) << UNIT
        self.t = (offset - self.u[:, None] + (1 << UNIT) & (1 << UNIT + 1) - 1) - (1 << UNIT)
        self.q = self.t + self.u[:, None] >> UNIT

    def classes(self, bits: int) -> Tensor:
        """The class of |t| for each z0."""
        return (self.t.abs() << bits >> UNIT).clamp(max=(1 << bits) - 1).to(torch.uint8)

    @property
    def flips(self) -> Tensor:
        return (self.q >> 1 & 1).to(torch.uint8)


def _grid(count: int, run: int) -> Grid:
    return Grid(count, lanes_of(count), 1 << run)


def _quantise(x: Tensor, start: int, step: float, states: int, run: int, ctx: Context | None) -> tuple[Tensor, Tensor] | None:
    """The integers n and the indices a of a segment, int64; None where a coordinate is too large."""
    grid = _grid(x.numel(), run)
    inverse = 1.0 / torch.tensor(step, dtype=torch.float32, device=x.device)
    scaled = x * (inverse * float(GRID if ctx is None else 1 << UNIT))
    limit = float(FAR * GRID if ctx is None else FAR_DITHERED << UNIT)
    if not bool((scaled.abs() < limit).all()):
        return None
    y = torch.round(scaled).to(torch.int64)
    dither = None
    if ctx is not None:
        dither = _Dither(ctx, start, grid, x.device)
        y = dither.sign * y + dither.u + 128 >> UNIT - 5
    label = nearest_labels(y, grid, states).long()
    n = 4 * (y - GRID * label + 2 * GRID >> 7) + label
    if dither is None:
        return n, n >> 1
    t = dither.t.gather(1, (n & 1)[:, None])[:, 0]
    m = (n << UNIT) - dither.u - t >> UNIT + 1
    return n, torch.where(t >= 0, m, -m)


def _window(a: Tensor) -> int:
    """Half the number of symbols: all indices if few are large, else the tails are escaped."""
    size = torch.where(a >= 0, a + 1, -a)
    top, few = int(size.max()), a.numel() // 512
    even = max(top + 1 & ~1, 2)
    for limit in (16, 32):
        if even <= limit:
            return even
        if int((size > limit - 2).sum()) <= few:
            return limit
    return min(even, WIDEST)


def _clip(a: Tensor, window: int) -> Tensor:
    """Into [-window, window - 1] by an even amount."""
    odd = a & 1
    return torch.minimum(torch.maximum(a, odd - window), odd + window - 2)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _coded(n: Tensor, a: Tensor, scale: float, run: int, dither: _Dither | None, chunk: int) -> bytes:
    """A coded segment."""
    window, count = _window(a), a.numel()
    clipped = _clip(a, window)
    tail = b""
    if not torch.equal(clipped, a):
        ends = (clipped < 2 - window) | (clipped >= window - 2)
        values = 1 + (a - clipped)[ends].abs() // 2
        room = torch.empty(2 + 8 * values.numel(), dtype=torch.uint8, device=a.device)
        tail = bytes(room[: int(planar_gamma_encode(values, room))].cpu().numpy().tobytes())
    bits = 1 if dither is None else class_bits(count)
    odd = (n & 1).to(torch.uint8)
    contexts = odd if dither is None else dither.classes(bits).gather(1, odd[:, None].long())[:, 0].contiguous()
    symbols = (clipped + window).to(torch.uint8)
    counts = rans_histogram(symbols, 2 * window, contexts, 1 << bits, True)
    body = torch.empty(count + 16, dtype=torch.uint8, device=a.device)
    length = encode_counted(symbols, 2 * window, contexts, 1 << bits, counts, chunk, body)
    head = bytes([CODED, window, run] if dither is None else [CODED, window, run, bits]) + _varint(len(tail))
    return head + struct.pack("<f", scale) + bytes(body[:length].cpu().numpy().tobytes()) + tail


def _fit(x: Tensor, n: Tensor, norm: float) -> tuple[float, float]:
    """The least-squares scale and the squared error that it leaves."""
    dot, energy = float(ordered_sum(x.double() * n, lambda v: v)), float(ordered_sum(n, lambda v: v * v))
    if energy == 0:
        return 0.0, norm
    scale = usable_step(dot / energy)
    return scale, norm - 2 * scale * dot + scale * scale * energy


def _segment(x: Tensor, start: int, step: float, states: int, chunk: int, ctx: Context | None) -> tuple[bytes, float, float]:
    """The bytes of one segment, its squared norm and its squared error; no bytes where it is not finite."""
    norm = float(sum_squares(x))
    if not math.isfinite(norm):
        return b"", norm, 0.0
    if norm == 0:
        return bytes([ZERO]), 0.0, 0.0
    run = min(RUN, chunk)
    raw = bytes([RAW]) + bytes(x.cpu().numpy().tobytes())
    chosen = _quantise(x, start, step, states, run, ctx)
    if chosen is None:
        return raw, norm, 0.0
    n, a = chosen
    scale, error, dither = step, 0.0, None
    if ctx is None:
        scale, error = _fit(x, n, norm)
        if not scale:
            return bytes([ZERO]), norm, norm
    else:
        dither = _Dither(ctx, start, _grid(x.numel(), run), x.device)
    data = _coded(n, a, scale, run, dither, chunk)
    return (data, norm, error) if len(data) <= len(raw) else (raw, norm, 0.0)


def trellis_encode(
    x: Tensor, step: float, states: int, chunk: int, ctx: Context | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a message into ``out``: length, ||x||^2 and the squared error."""
    parts, norms, errors, at = [], [], [], 0
    for length in pieces(x.numel(), SEGMENT):
        data, norm, error = _segment(x[at : at + length], at, step, states, chunk, ctx)
        parts.append(data)
        norms.append(norm)
        errors.append(error)
        at += length
    norm, error = fold(norms), fold(errors)
    if not all(parts):
        message, norm, error = bytes([modes.NON_FINITE]), math.inf, 0.0
    elif all(part == bytes([ZERO]) for part in parts):
        message = bytes([modes.ZERO])
    else:
        table = b"".join(struct.pack("<I", len(p)) for p in parts) if len(parts) > 1 else b""
        message = bytes([modes.NORMAL]) + table + b"".join(parts)
    out[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(out.device)
    power, wrong = torch.tensor([norm, error], dtype=torch.float64, device=out.device)
    return torch.tensor(len(message), device=out.device), power, wrong


def trellis_error(x: Tensor, step: float, states: int) -> tuple[Tensor, Tensor]:
    """Squared error without dither and squared norm, as :func:`trellis_encode` with long chunks would find them."""
    norms, errors, at = [], [], 0
    for length in pieces(x.numel(), SEGMENT):
        part = x[at : at + length]
        norm = float(sum_squares(part))
        chosen = _quantise(part, at, step, states, RUN, None) if 0 < norm < math.inf else None
        norms.append(norm)
        errors.append(0.0 if chosen is None else _fit(part, chosen[0], norm)[1])
        at += length
    error, norm = torch.tensor([fold(errors), fold(norms)], dtype=torch.float64, device=x.device)
    return error, norm


def trellis_decode(data: Tensor, states: int, ctx: Context | None, out: Tensor, weight: float | None) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``."""
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
        values.append(_decode_segment(raw[at : at + size], begin, length, states, ctx, out.device))
        at, begin = at + size, begin + length
    whole = torch.cat(values) if values else out.new_empty(0)
    return out.copy_(whole) if weight is None else out.add_(torch.tensor(weight, dtype=torch.float32) * whole)


def _decode_segment(raw: bytes, start: int, count: int, states: int, ctx: Context | None, device: torch.device) -> Tensor:
    if raw == bytes([ZERO]):
        return torch.zeros(count, device=device)
    if raw[:1] == bytes([RAW]) and len(raw) == 1 + 4 * count:
        return torch.frombuffer(bytearray(raw[1:]), dtype=torch.float32).to(device)
    if raw[:1] != bytes([CODED]):
        raise CorruptMessage("not a segment of a trellis-coded message")
    return _decode_coded(raw, start, count, states, ctx, device)


def _header(raw: bytes, dithered: bool) -> tuple[int, int, int, int, int, float]:
    """Window, log2 of the run, log2 of the tables, where the symbols begin, where they end, scale."""
    at = 4 if dithered else 3
    tail, used, byte = 0, 0, 128
    while byte >= 128:
        if used == 5 or at + used >= len(raw):
            raise CorruptMessage("a malformed length")
        byte = raw[at + used]
        tail |= (byte & 127) << 7 * used
        used += 1
    window, run, bits = raw[1], raw[2], raw[3] if dithered else 1
    at += used
    if (used > 1 and byte == 0) or window % 2 or not 2 <= window <= WIDEST or run not in (14, 15) or bits > 3:
        raise CorruptMessage("a malformed segment header")
    if at + 4 + tail > len(raw):
        raise CorruptMessage("a segment is cut short")
    scale = struct.unpack_from("<f", raw, at)[0]
    if not TINY <= scale <= HUGE:
        raise CorruptMessage(f"a scale of {scale}")
    return window, run, bits, at + 4, len(raw) - tail, scale


def _decode_coded(raw: bytes, start: int, count: int, states: int, ctx: Context | None, device: torch.device) -> Tensor:
    window, run, bits, begin, end, scale = _header(raw, ctx is not None)
    grid = _grid(count, run)
    dither = None if ctx is None else _Dither(ctx, start, grid, device)
    if dither is None:
        contexts, flips = torch.arange(2, dtype=torch.uint8, device=device).expand(count, 2), None
    else:
        contexts, flips = dither.classes(bits), dither.flips
    data = torch.tensor(list(raw[begin:end]), dtype=torch.uint8, device=device)
    symbols = torch.empty(count, dtype=torch.uint8, device=device)
    if decode_block(data, 2 * window, contexts, 1 << bits, flips, run, states, symbols) != data.numel():
        raise CorruptMessage("bytes after the symbols")
    a = symbols.long() - window
    odd = parities(symbols & 1, flips, grid, states).long()
    if end < len(raw):
        a = _unescape(a, raw[end:], window, FAR if dither is None else FAR_DITHERED)
    if dither is None:
        return ((2 * a + odd).to(torch.float32) * scale).clamp_(-HUGE, HUGE)
    t = dither.t.gather(1, odd[:, None])[:, 0]
    v = dither.sign * ((torch.where(t >= 0, a, -a) << UNIT + 1) + t)
    return (v.to(torch.float32) * 2.0**-UNIT * torch.tensor(scale, dtype=torch.float32)).clamp_(-HUGE, HUGE)


def _unescape(a: Tensor, tail: bytes, window: int, most: int) -> Tensor:
    ends = ((a < 2 - window) | (a >= window - 2)).nonzero()[:, 0]
    more = torch.empty(ends.numel(), dtype=torch.int64, device=a.device)
    data = torch.tensor(list(tail), dtype=torch.uint8, device=a.device)
    if int(planar_gamma_decode(data, more)) != data.numel() or bool((more > most).any()):
        raise CorruptMessage("malformed escapes")
    a = a.clone()
    a[ends] += torch.where(a[ends] < 0, -2, 2) * (more - 1)
    return a
