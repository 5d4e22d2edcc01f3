"""Subtractive dithering: add noise that both ends know, round, and take the noise off again.

Maps x to step (q - U) with q = round(x / step + U) and U uniform on (-1/2, 1/2), drawn from the context by encoder and decoder alike.

The error, step (q - U) - x, is uniform on (-step/2, step/2) whatever x is (Schuchman 1964): unbiased, with variance exactly step^2/12
a coordinate, so omega = d step^2 / (12 ||x||^2), and step = ||x|| sqrt(12 omega/d) meets any omega. Stochastic rounding to the same
grid has up to three times that variance. The levels q are entropy-coded given U: knowing the noise, the receiver expects less.
Fixed-point arithmetic (draws of 16 bits, x / step in 2^-16) shifts the mean by at most 2^-17 of a step, which the step allows for.

With ``scale="chunk"`` each segment of 2^18 coordinates has a step of its own; errors add, so omega stands. ``scale="global"``: one for all.

Wire: ``spec/wire.md``, "Subtractive dithering". Short vectors are coded by a static Gaussian model (``codecs/gaussian.py``) or an
adaptive code, whichever is shorter, long ones by rANS with one table for each class of |U|, or, where rows and columns differ in scale
(``docs/classes.md``), for each scale class and octave of 1/2 - |U|: a level of a small row is other than 0 only where |U| is nearly 1/2.

Zamir and Feder: On universal quantization by randomized uniform/lattice quantizers (IEEE Trans. Inf. Theory 38, 1992): the rate is at
most 0.2546 bit per coordinate above the rate-distortion function. We differ in the fixed-point form and in the classes of |U|.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import elias, gaussian, levels, rans, varint
from tersegrad.core import buffers, modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import HUGE, TINY, float32
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require

Coder = Literal["auto", "rans"]
Scale = Literal["chunk", "global"]
# The first word; anything else is the step of a short message.
NON_FINITE, ZERO, SEGMENTS, RAW = 0x7FC00000, 0, 0x80000000, 0xFF800000
NAMES = {
    NON_FINITE: modes.NAMES[modes.NON_FINITE],
    ZERO: modes.NAMES[modes.ZERO],
    RAW: modes.NAMES[modes.RAW],
    SEGMENTS: "rANS segments",
}
SEGMENT = 1 << 18
# The longest vectors that also try the sequential codes.
SHORT = 1 << 10
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


Live = list[tuple[int, int, float]]  # start, length and step of the segments whose levels are coded


@dataclasses.dataclass(frozen=True)
class Tables:
    """Which table codes which symbol."""

    head: tuple[int, int]  # the two bytes that say so: the window, and how finely |U| is looked at
    side: Tensor  # scale classes, as bytes
    contexts: Tensor | None
    number: int
    sample: bool
    chunk: rans.Chunk


@dataclasses.dataclass(frozen=True)
class SubtractiveDithering(Stateless):
    """Unbiased dithering with shared noise: variance omega for every vector."""

    name: ClassVar[str] = "subtractive_dithering"
    wire_id: ClassVar[int] = 18
    examples: ClassVar[tuple[str, ...]] = ("subtractive_dithering(omega=1)",)
    corners: ClassVar[tuple[str, ...]] = (
        "subtractive_dithering(omega=0.25)",
        "subtractive_dithering(omega=0.05, coder=rans, scale=global)",
    )
    omega: float
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(1e-12 <= self.omega <= 1e6, f"omega must lie in [1e-12, 1e6], got {self.omega}")
        require(self.coder in ("auto", "rans"), f"coder is one of auto, rans, got {self.coder!r}")
        require(self.scale in ("chunk", "global"), f"scale is one of chunk, global, got {self.scale!r}")
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    @property
    def sigma(self) -> float:
        """Root mean square of the coordinates, in steps."""
        return 1 / math.sqrt(12 * self.omega)

    def max_nbytes(self, spec: Spec) -> int:
        return 5 + 4 * len(self._segments(spec.numel)) + 4 * spec.numel

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def wire_omega(self, spec: Spec) -> float:
        return float(self.omega)

    def mode(self, data: bytes) -> str:
        return NAMES.get(int.from_bytes(data[:4], "little"), "short") if len(data) >= 4 else "missing"

    def _segments(self, d: int) -> list[tuple[int, int]]:
        """(start, length) of the coordinates that share a step."""
        return [(0, d)] * (d > 0) if self.scale == "global" else _cut(d)

    def _parts(self, live: Live, device: torch.device) -> Tensor:
        """Start and stop of what has regions of its own: segments, whether or not they share a step."""
        parts = [(s + a, s + a + m) for s, n, _ in live for a, m in _cut(n)]
        return torch.tensor(parts, dtype=torch.int64, device=device).view(-1)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        message = self._encode(x, spec, ctx)
        data[: message.numel()] = message
        return message.numel()

    def _encode(self, x: Tensor, spec: Spec, ctx: Context) -> Tensor:
        run, d, device = kernels.get(x.device), x.numel(), x.device
        segments = self._segments(d)
        squares = [float(run.sum_squares(x[s : s + n])) for s, n in segments]
        if not math.isfinite(sum(squares)):
            return _word(NON_FINITE, device)
        if not any(squares):
            return _word(ZERO, device)
        steps = [
            _normal(SLACK * math.sqrt(12 * self.omega / n * e)) if e else 0.0
            for (_, n), e in zip(segments, squares, strict=True)
        ]
        live = [(s, n, step) for (s, n), step in zip(segments, steps, strict=True) if step]
        q = buffers.empty(sum(n for _, n, _ in live), torch.int32, device)
        at = top = 0
        for s, n, step in live:
            here = int(run.subtractive_quantise(x[s : s + n], step, ctx, s, q[at : at + n]))
            if here < 0:
                return torch.cat([_word(RAW, device), x.view(torch.uint8)])
            at, top = at + n, max(top, here)
        forms = []
        if self.coder == "auto" and d <= SHORT:
            head = _pack("<f", steps[0], device=device)
            forms.append(torch.cat([head, gaussian.encode(q, _sizes(ctx, d, device), self.sigma)]))
            forms.append(torch.cat([head, levels.encode(q, "adaptive")]))
        # rANS tables and lanes cannot win below.
        if not forms or min(map(Tensor.numel, forms)) >= 300:
            forms.append(self._segmented(q, top, spec, ctx, live, steps))
        best = min(forms, key=Tensor.numel)
        if best.numel() > 5 + 4 * len(steps) + 4 * q.numel():
            best = torch.cat(
                [_word(SEGMENTS, device), _pack(f"<{len(steps)}fB", *steps, 0, device=device), q.view(torch.uint8)]
            )
        return best

    def _segmented(self, q: Tensor, top: int, spec: Spec, ctx: Context, live: Live, steps: list[float]) -> Tensor:
        device, window = q.device, _window(q, top)
        symbols = buffers.empty(q.numel(), torch.uint8, device).copy_(q.clamp(-window, window).add_(window))
        tables = self._tables(symbols, window, spec, ctx, live)
        body = rans.encode(symbols, 2 * window + 1, tables.contexts, tables.number, tables.sample, tables.chunk)
        tail = q.new_empty(0, dtype=torch.uint8)
        if top > window:
            size = q.abs()
            tail = elias.encode_planar((size - window + 1)[size >= window].long())
        head = struct.pack(f"<I{len(steps)}fBB", SEGMENTS, *steps, *tables.head) + varint.write(tail.numel())
        return torch.cat([torch.tensor(list(head), dtype=torch.uint8, device=device), tables.side, body, tail])

    def _tables(self, symbols: Tensor, window: int, spec: Spec, ctx: Context, live: Live) -> Tables:
        """The tables that take the fewest bits: of classes of |U| alone, or of scale classes too."""
        run, n, alphabet, device = kernels.get(symbols.device), symbols.numel(), 2 * window + 1, symbols.device
        bins = _bins(ctx, live, device)
        counts = run.rans_histogram(symbols, alphabet, bins, 1 << BINS, True).cpu()
        bits = _classes(counts)
        classes = buffers.empty(n, torch.uint8, device)
        side = run.classes_choose(symbols, window, spec.layout.to(device), self._parts(live, device), classes)
        if side is not None:
            merged = counts.view(1 << bits, -1, alphabet).sum(1)
            alone = _entropy(merged) * n / int(counts.sum()) + 8 * len(run.rans_write_tables(merged))
            octaves = _octaves(ctx, live, device)
            number = int(classes.max()) + 1
            fine = run.rans_histogram(symbols, alphabet, classes * OCTAVES + octaves, number * OCTAVES, False).cpu()
            told, kept = min(
                (_entropy(rows) + 8 * len(run.rans_write_tables(rows)), k)
                for k in range(1, OCTAVES + 1)
                for rows in [_merged(fine.view(number, OCTAVES, alphabet), k)]
            )
            if told + 8 * side.numel() < WORTH_SENDING * alone:
                chunk = 18 if self.chunk == "auto" and told < SPARSE * n else self.chunk
                contexts = classes.mul_(kept).add_(octaves.clamp_(max=kept - 1))
                return Tables((CLASSED | window, kept), side, contexts, kept * number, False, chunk)
        plain = bins.bitwise_right_shift_(BINS - bits) if bits else None
        return Tables((window, bits), symbols.new_empty(0), plain, 1 << bits, True, self.chunk)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        d = out.numel()
        if not 4 <= data.numel() <= self.max_nbytes(Spec.flat(d)):
            raise CorruptMessage(f"{data.numel()} bytes are no dithered message of {d} coordinates")
        head = struct.unpack("<I", bytes(data[:4].tolist()))[0]
        if head == SEGMENTS:
            self._read_segments(data, spec, ctx, out, weight)
            return
        if head in (NON_FINITE, ZERO, RAW):
            if data.numel() != (4 + 4 * d if head == RAW else 4):
                raise CorruptMessage("the message has another length")
            fill = data[4:].clone().view(torch.float32) if head == RAW else out.new_full((), math.nan if head else 0.0)
            _ = out.copy_(fill) if weight is None else out.add_(fill, alpha=weight)
            return
        step = struct.unpack("<f", struct.pack("<I", head))[0]
        if not TINY <= step <= HUGE or not 0 < d <= SHORT or data.numel() < 5:
            raise CorruptMessage(f"not a short message of {d} coordinates with the step {step}")
        body = data[4:].contiguous()
        if int(body[0]) & 1:
            q = levels.decode(body, d)
        else:
            q = gaussian.decode(body, _sizes(ctx, d, out.device), self.sigma)
        kernels.get(out.device).subtractive_restore(q, step, ctx, 0, out, weight)

    def _read_segments(self, payload: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        segments = self._segments(out.numel())
        at = 4 + 4 * len(segments)
        if payload.numel() < at + 1:
            raise CorruptMessage("the steps are cut short")
        steps = struct.unpack(f"<{len(segments)}f", bytes(payload[4:at].tolist()))
        if not all(step == 0 or TINY <= step <= HUGE for step in steps):
            raise CorruptMessage("a step is not a positive number")
        live = [(s, n, step) for (s, n), step in zip(segments, steps, strict=True) if step]
        q = self._levels(payload, at, spec, ctx, live)
        at = 0
        for (s, n), step in zip(segments, steps, strict=True):
            part = out[s : s + n]
            if step:
                kernels.get(out.device).subtractive_restore(q[at : at + n], step, ctx, s, part, weight)
                at += n
            elif weight is None:
                part.zero_()

    def _levels(self, payload: Tensor, at: int, spec: Spec, ctx: Context, live: Live) -> Tensor:
        count, window = sum(n for _, n, _ in live), int(payload[at])
        if window == 0:
            if payload.numel() != at + 1 + 4 * count:
                raise CorruptMessage("the levels have another length")
            return payload[at + 1 :].clone().view(torch.int32).clamp_(-(1 << 30), 1 << 30)
        classed, window = window >= CLASSED, window % CLASSED
        if window == 0 or payload.numel() < at + 3:
            raise CorruptMessage("a malformed header")
        fine = int(payload[at + 1])
        if not (1 <= fine <= OCTAVES and count) if classed else fine > BINS:
            raise CorruptMessage("a malformed header")
        tail, at = varint.read(payload, at + 2)
        if tail > payload.numel() - at:
            raise CorruptMessage("the escapes are cut short")
        body = payload[at : payload.numel() - tail].contiguous()
        contexts: Tensor | None
        if classed:
            contexts, number, used = self._read_classes(body, fine, spec, ctx, live)
            body = body[used:]
        else:
            contexts = _bins(ctx, live, payload.device).bitwise_right_shift_(BINS - fine) if fine else None
            number = 1 << fine
        room = buffers.empty(count, torch.uint8, payload.device)
        symbols, used = rans.decode(body, count, 2 * window + 1, contexts, number, out=room)
        if used != body.numel():
            raise CorruptMessage("bytes after the symbols")
        q = buffers.empty(count, torch.int32, payload.device).copy_(symbols).sub_(window)
        if tail:
            ends = (q.abs() == window).nonzero()[:, 0]
            more, used = elias.decode_planar(payload[payload.numel() - tail :], ends.numel())
            if used != tail or bool((more > 1 << 30).any()):
                raise CorruptMessage("malformed escapes")
            q[ends] += torch.sign(q[ends]) * (more - 1).to(torch.int32)
        return q

    def _read_classes(self, data: Tensor, kept: int, spec: Spec, ctx: Context, live: Live) -> tuple[Tensor, int, int]:
        """The table of each symbol, the number of tables, and of bytes read."""
        classes = buffers.empty(sum(n for _, n, _ in live), torch.uint8, data.device)
        layout, parts = spec.layout.to(data.device), self._parts(live, data.device)
        number, used = kernels.get(data.device).classes_read(data, layout, parts, classes)
        return classes.mul_(kept).add_(_octaves(ctx, live, data.device).clamp_(max=kept - 1)), kept * number, used


def _cut(d: int) -> list[tuple[int, int]]:
    """(start, length) of segments; the last one has half to one and a half of a segment."""
    if d < SEGMENT:
        return [(0, d)] * (d > 0)
    starts = range(0, (d + SEGMENT // 2) // SEGMENT * SEGMENT, SEGMENT)
    return [(s, (d if s == starts[-1] else s + SEGMENT) - s) for s in starts]


def _pack(form: str, *values: float, device: torch.device) -> Tensor:
    return torch.tensor(list(struct.pack(form, *values)), dtype=torch.uint8, device=device)


def _word(value: int, device: torch.device) -> Tensor:
    return _pack("<I", value, device=device)


def _normal(step: float) -> float:
    """The nearest float32 in the normal range; SLACK is wider than the rounding."""
    return float32(min(max(step, TINY), HUGE))


def _sizes(ctx: Context, d: int, device: torch.device) -> Tensor:
    """|U| of a short vector, in 15 bits."""
    u = kernels.get(device).random_u16(ctx, Purpose.DITHER, 0, d, device)
    return torch.where(u >= 32768, u - 32768, 32767 - u)


def _bins(ctx: Context, live: Live, device: torch.device) -> Tensor:
    """The finest classes of |U|, of all coordinates that are coded."""
    return _each(kernels.get(device).subtractive_bins, ctx, live, device)


def _octaves(ctx: Context, live: Live, device: torch.device) -> Tensor:
    """The octaves of 1/2 - |U|, likewise."""
    return _each(kernels.get(device).subtractive_octaves, ctx, live, device)


def _each(draw: Callable[[Context, int, Tensor], None], ctx: Context, live: Live, device: torch.device) -> Tensor:
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
