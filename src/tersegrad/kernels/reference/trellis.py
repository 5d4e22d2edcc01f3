"""Trellis-coded messages in plain torch: their definition (``spec/wire.md``, "trellis" and "dithered_trellis").

Both quantisers choose an admissible sequence of integers n by Viterbi's algorithm and send an index a per coordinate, from which the
receiver, who follows the states, finds n. Without dither n = 2a + z0 is near x / step, and the least-squares scale is sent. With
dither n is near (sign x + U) / step, U uniform over the period of the code, [0, 4 steps), known to both ends like the sign; the value
is n steps - U, and a is the integer m in n - U / step = 2m + t, |t| <= 1, with the sign of t. Tables belong to z0, or to classes of
|t|: both depend on the state, so symbols and states are decoded together. Segments with scale classes have such tables for each class
(``trellis_classes.py``).
"""

from __future__ import annotations

import dataclasses
import math
import struct

import torch
from torch import Tensor

from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.classes import Region, cut, entropy
from tersegrad.kernels.reference.dither import LONG_CHUNK, USUAL_CHUNK, usable_step
from tersegrad.kernels.reference.dither import _fold as fold
from tersegrad.kernels.reference.dither import _pieces_of as pieces_of
from tersegrad.kernels.reference.planar import planar_gamma_encode
from tersegrad.kernels.reference.rans import SEGMENT, encode_counted, lanes_of, pieces
from tersegrad.kernels.reference.rans_tables import rans_histogram, rans_write_tables
from tersegrad.kernels.reference.rounding import ordered_sum, random_u16, sum_squares
from tersegrad.kernels.reference.trellis_classes import Found, find
from tersegrad.kernels.reference.trellis_code import GRID, Grid, integers, nearest_labels
from tersegrad.kernels.reference.trellis_rates import PASSES, prices

__all__ = ["trellis_error", "trellis_max_bytes"]

ZERO, RAW, CODED, CLASSED = 0, 1, 2, 3  # kinds of segments
RUN = 15  # log2 of the coordinates after which all trellises start anew; fewer where rANS chunks are shorter
SIGNS = 14  # a sign for every 2^14 coordinates that start a run
UNIT = 13  # dithered numbers count in 2^-13 of a step
# |x / step| from here on is not coded, without and with dither; receivers refuse escapes from twice that on.
FAR, FAR_DITHERED = 1 << 25, 1 << 15
WIDEST = 64  # windows are even and at most this
MOST_BITS = 3  # log2 of the most classes of |t|
WORTH_SENDING = 0.99  # of the bits without scale classes, with dither


def trellis_max_bytes(numel: int) -> int:
    """No message for ``numel`` coordinates is longer."""
    segments = len(pieces(numel, SEGMENT))
    return 1 + (4 * segments if segments > 1 else 0) + segments + 4 * numel


def class_bits(count: int) -> int:
    """log2 of the classes of |t|: as many as their tables are worth."""
    return 3 if count >= 1 << 16 else 2 if count >= 1 << 13 else 1 if count >= 1 << 10 else 0


class Dither:
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


def grid_of(count: int, run: int) -> Grid:
    return Grid(count, lanes_of(count), 1 << run)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The integers n and the indices a of a segment, int64, and what they are coded by."""

    n: Tensor
    a: Tensor
    dither: Dither | None
    found: Found | None

    @property
    def groups(self) -> list[Tensor]:
        """The integers that have a scale of their own, zero elsewhere: those of the trellises, and those of still classes."""
        if self.found is None:
            return [self.n]
        still = self.found.still_each
        return [self.n.masked_fill(still, 0), self.n.masked_fill(~still, 0)]


def _quantise(
    x: Tensor, start: int, step: float, states: int, run: int, ctx: Context | None, regions: list[Region], rdo: bool
) -> _Chosen | None:
    """The integers of a segment; None where a coordinate is too large."""
    grid = grid_of(x.numel(), run)
    inverse = 1.0 / torch.tensor(step, dtype=torch.float32, device=x.device)
    scaled = x * (inverse * float(GRID if ctx is None else 1 << UNIT))
    limit = float(FAR * GRID if ctx is None else FAR_DITHERED << UNIT)
    if not bool((scaled.abs() < limit).all()):
        return None
    y = torch.round(scaled).to(torch.int64)
    # Levels are multiples of two steps, or, because dither hides small numbers from the indices, of a quarter.
    found = find(y, 2 * GRID if ctx is None else 1 << UNIT - 2, regions, ctx is not None, rdo)
    if ctx is not None:
        return _dithered(y, Dither(ctx, start, grid, x.device), grid, states, found)
    still = None if found is None else found.still_each
    label = nearest_labels(y, grid, states, still).long()
    for _ in range(PASSES if rdo else 0):
        label = nearest_labels(y, grid, states, still, prices(y, label, found)).long()
    n = integers(y, label)
    if found is not None and still is not None:
        n = torch.where(still, 2 * torch.sign(y) * (y.abs() + found.of_each(list(found.adds)) >> 6), n)
    return _Chosen(n, n >> 1, None, found)


def _dithered(y: Tensor, dither: Dither, grid: Grid, states: int, found: Found | None) -> _Chosen:
    y = dither.sign * y + dither.u + 128 >> UNIT - 5
    label = nearest_labels(y, grid, states).long()
    n = integers(y, label)
    t = dither.t.gather(1, (n & 1)[:, None])[:, 0]
    m = (n << UNIT) - dither.u - t >> UNIT + 1
    return _Chosen(n, torch.where(t >= 0, m, -m), dither, found)


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


def _escapes(a: Tensor, clipped: Tensor, window: int) -> bytes:
    if torch.equal(clipped, a):
        return b""
    ends = (clipped < 2 - window) | (clipped >= window - 2)
    values = 1 + (a - clipped)[ends].abs() // 2
    room = torch.empty(2 + 8 * values.numel(), dtype=torch.uint8, device=a.device)
    return bytes(room[: int(planar_gamma_encode(values, room))].cpu().numpy().tobytes())


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Which table codes which symbol, and the counts that they are made from."""

    contexts: Tensor
    counts: Tensor
    bits: int  # log2 of the classes of |t|
    found: Found | None
    cost: float  # about the bits to come, where there are scale classes


def _plain_tables(symbols: Tensor, alphabet: int, chosen: _Chosen) -> _Tables:
    odd, found = chosen.n & 1, chosen.found
    if found is None:
        contexts = odd.to(torch.uint8)
        return _Tables(contexts, rans_histogram(symbols, alphabet, contexts, 2, True), 1, None, 0.0)
    contexts = (found.of_each(found.first[:-1]) + odd).to(torch.uint8)
    return _Tables(contexts, rans_histogram(symbols, alphabet, contexts, found.first[-1], False), 1, found, found.bits)


def _dithered_tables(symbols: Tensor, alphabet: int, chosen: _Chosen, dither: Dither) -> _Tables:
    found, odd = chosen.found, (chosen.n & 1)[:, None]
    usual = class_bits(symbols.numel())
    if found is not None:
        fine = dither.classes(MOST_BITS).gather(1, odd)[:, 0].long()
        number, tables = found.number, len(found.still)
        counts = rans_histogram(symbols, alphabet, (number << MOST_BITS | fine).to(torch.uint8), tables << MOST_BITS, False)
        merged = [counts.view(tables << b, -1, alphabet).sum(1) for b in range(MOST_BITS + 1)]
        costs = [_cost(m) for m in merged]
        bits = costs.index(min(costs))
        alone = merged[usual].view(tables, -1, alphabet).sum(0)
        if costs[bits] + 8 * len(found.side) < WORTH_SENDING * _cost(alone):
            contexts = (number << bits | fine >> MOST_BITS - bits).to(torch.uint8)
            return _Tables(contexts, merged[bits], bits, found, costs[bits])
    contexts = dither.classes(usual).gather(1, odd)[:, 0].contiguous()
    return _Tables(contexts, rans_histogram(symbols, alphabet, contexts, 1 << usual, True), usual, None, 0.0)


def _cost(counts: Tensor) -> float:
    """Bits of symbols with these counts, and of their tables."""
    return entropy(counts) + 8 * len(rans_write_tables(counts))


def _coded(chosen: _Chosen, scales: list[float], run: int, chunk: int) -> bytes:
    """A coded segment."""
    a, dither = chosen.a, chosen.dither
    window, count = _window(a), a.numel()
    clipped = _clip(a, window)
    tail = _escapes(a, clipped, window)
    symbols, alphabet = (clipped + window).to(torch.uint8), 2 * window
    if dither is None:
        tables = _plain_tables(symbols, alphabet, chosen)
    else:
        tables = _dithered_tables(symbols, alphabet, chosen, dither)
    kind, side, found = CODED, b"", tables.found
    if found is not None:
        kind, side = CLASSED, found.side if dither is not None else found.moving() + found.side
        chunk = chunk or (LONG_CHUNK if 2 * tables.cost < count else USUAL_CHUNK)
    body = torch.empty(count + 16, dtype=torch.uint8, device=a.device)
    length = encode_counted(
        symbols, alphabet, tables.contexts, tables.counts.shape[0], tables.counts, chunk or USUAL_CHUNK, body
    )
    head = bytes([kind, window, run] if dither is None else [kind, window, run, tables.bits]) + _varint(len(tail))
    head += struct.pack(f"<{len(scales)}f", *scales)
    return head + side + bytes(body[:length].cpu().numpy().tobytes()) + tail


def _fit(x: Tensor, chosen: _Chosen, norm: float) -> tuple[list[float], float]:
    """The least-squares scales, 0 where all integers are, and the squared error that they leave."""
    scales, error = [], norm
    for n in chosen.groups:
        dot, energy = float(ordered_sum(x.double() * n, lambda v: v)), float(ordered_sum(n, lambda v: v * v))
        scales.append(usable_step(dot / energy) if energy else 0.0)
        error = error - 2 * scales[-1] * dot + scales[-1] * scales[-1] * energy
    return scales, error


def _segment(
    x: Tensor, start: int, step: float, states: int, chunk: int, ctx: Context | None, regions: list[Region], rdo: bool
) -> tuple[bytes, float, float]:
    """The bytes of one segment, its squared norm and its squared error; no bytes where it is not finite."""
    norm = float(sum_squares(x))
    if not math.isfinite(norm):
        return b"", norm, 0.0
    if norm == 0:
        return bytes([ZERO]), 0.0, 0.0
    run = min(RUN, chunk or USUAL_CHUNK)
    raw = bytes([RAW]) + bytes(x.cpu().numpy().tobytes())
    chosen = _quantise(x, start, step, states, run, ctx, regions, rdo)
    if chosen is None:
        return raw, norm, 0.0
    scales, error = [step], 0.0
    if ctx is None:
        scales, error = _fit(x, chosen, norm)
        if not any(scales):
            return bytes([ZERO]), norm, norm
    data = _coded(chosen, scales, run, chunk)
    return (data, norm, error) if len(data) <= len(raw) else (raw, norm, 0.0)


def trellis_error(x: Tensor, step: float, states: int, layout: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared error without dither and squared norm, as :func:`trellis_encode` with long chunks would find them."""
    known = pieces_of(layout, x.numel(), [])
    norms, errors, at = [], [], 0
    for length in pieces(x.numel(), SEGMENT):
        part = x[at : at + length]
        norm = float(sum_squares(part))
        regions = cut(known, at, at + length)
        chosen = _quantise(part, at, step, states, RUN, None, regions, False) if 0 < norm < math.inf else None
        norms.append(norm)
        errors.append(0.0 if chosen is None else _fit(part, chosen, norm)[1])
        at += length
    error, norm = torch.tensor([fold(errors), fold(norms)], dtype=torch.float64, device=x.device)
    return error, norm
