"""Subtractive dithering: add noise that both ends know, round, and take the noise off again.

Maps x to step (q - U) with q = round(x / step + U) and U uniform on (-1/2, 1/2), drawn from the context by encoder and decoder alike.

The error, step (q - U) - x, is uniform on (-step/2, step/2) whatever x is (Schuchman 1964): unbiased, with variance exactly step^2/12
a coordinate, so omega = d step^2 / (12 ||x||^2), and step = ||x|| sqrt(12 omega/d) meets any omega. Stochastic rounding to the same
grid has up to three times that variance. The levels q are entropy-coded given U: knowing the noise, the receiver expects less.
Fixed-point arithmetic (draws of 16 bits, x / step in 2^-16) shifts the mean by at most 2^-17 of a step, which the step allows for.

With ``scale="chunk"`` each segment of 2^18 coordinates has a step of its own; errors add, so omega stands. ``scale="global"``: one for all.

Wire: ``spec/wire.md``, "Subtractive dithering". Short vectors are coded by a static Gaussian model (``codecs/gaussian.py``) or an
adaptive code, whichever is shorter, long ones by rANS with one table for each class of |U|.

Zamir and Feder: On universal quantization by randomized uniform/lattice quantizers (IEEE Trans. Inf. Theory 38, 1992): the rate is at
most 0.2546 bit per coordinate above the rate-distortion function. We differ in the fixed-point form and in the classes of |U|.
"""

from __future__ import annotations

import dataclasses
import math
import struct
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
# About the bits of a table's entry and of its frame.
ENTRY, TABLE = 5.0, 30.0


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
        """(start, length) of the coordinates that share a step; the last segment has half to one and a half of a segment."""
        if self.scale == "global" or d < SEGMENT:
            return [(0, d)] * (d > 0)
        starts = range(0, (d + SEGMENT // 2) // SEGMENT * SEGMENT, SEGMENT)
        return [(s, (d if s == starts[-1] else s + SEGMENT) - s) for s in starts]

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        message = self._encode(x, ctx)
        data[: message.numel()] = message
        return message.numel()

    def _encode(self, x: Tensor, ctx: Context) -> Tensor:
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
            forms.append(self._segmented(q, top, ctx, live, steps))
        best = min(forms, key=Tensor.numel)
        if best.numel() > 5 + 4 * len(steps) + 4 * q.numel():
            best = torch.cat(
                [_word(SEGMENTS, device), _pack(f"<{len(steps)}fB", *steps, 0, device=device), q.view(torch.uint8)]
            )
        return best

    def _segmented(self, q: Tensor, top: int, ctx: Context, live: list[tuple[int, int, float]], steps: list[float]) -> Tensor:
        device, size = q.device, q.abs()
        window = _window(size, top)
        symbols = buffers.empty(q.numel(), torch.uint8, device).copy_(q.clamp(-window, window).add_(window))
        bins = _bins(ctx, live, device)
        counts = kernels.get(device).rans_histogram(symbols, 2 * window + 1, bins, 1 << BINS, True)
        bits = _classes(counts.cpu())
        classes = bins.bitwise_right_shift_(BINS - bits) if bits else None
        body = rans.encode(symbols, 2 * window + 1, classes, 1 << bits, chunk=self.chunk)
        tail = (
            elias.encode_planar((size - window + 1)[size >= window].long())
            if top > window
            else q.new_empty(0, dtype=torch.uint8)
        )
        head = struct.pack(f"<I{len(steps)}fBB", SEGMENTS, *steps, window, bits) + varint.write(tail.numel())
        return torch.cat([torch.tensor(list(head), dtype=torch.uint8, device=device), body, tail])

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        d = out.numel()
        if not 4 <= data.numel() <= self.max_nbytes(Spec.flat(d)):
            raise CorruptMessage(f"{data.numel()} bytes are no dithered message of {d} coordinates")
        head = struct.unpack("<I", bytes(data[:4].tolist()))[0]
        if head == SEGMENTS:
            self._read_segments(data, ctx, out, weight)
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

    def _read_segments(self, payload: Tensor, ctx: Context, out: Tensor, weight: float | None) -> None:
        segments = self._segments(out.numel())
        at = 4 + 4 * len(segments)
        if payload.numel() < at + 1:
            raise CorruptMessage("the steps are cut short")
        steps = struct.unpack(f"<{len(segments)}f", bytes(payload[4:at].tolist()))
        if not all(step == 0 or TINY <= step <= HUGE for step in steps):
            raise CorruptMessage("a step is not a positive number")
        live = [(s, n, step) for (s, n), step in zip(segments, steps, strict=True) if step]
        q = self._levels(payload, at, ctx, live)
        at = 0
        for (s, n), step in zip(segments, steps, strict=True):
            part = out[s : s + n]
            if step:
                kernels.get(out.device).subtractive_restore(q[at : at + n], step, ctx, s, part, weight)
                at += n
            elif weight is None:
                part.zero_()

    def _levels(self, payload: Tensor, at: int, ctx: Context, live: list[tuple[int, int, float]]) -> Tensor:
        count, window = sum(n for _, n, _ in live), int(payload[at])
        if window == 0:
            if payload.numel() != at + 1 + 4 * count:
                raise CorruptMessage("the levels have another length")
            return payload[at + 1 :].clone().view(torch.int32).clamp_(-(1 << 30), 1 << 30)
        if window > 127 or payload.numel() < at + 3 or int(payload[at + 1]) > BINS:
            raise CorruptMessage("a malformed header")
        bits = int(payload[at + 1])
        tail, at = varint.read(payload, at + 2)
        if tail > payload.numel() - at:
            raise CorruptMessage("the escapes are cut short")
        body = payload[at : payload.numel() - tail].contiguous()
        classes = _bins(ctx, live, payload.device).bitwise_right_shift_(BINS - bits) if bits else None
        room = buffers.empty(count, torch.uint8, payload.device)
        symbols, used = rans.decode(body, count, 2 * window + 1, classes, 1 << bits, out=room)
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


def _bins(ctx: Context, live: list[tuple[int, int, float]], device: torch.device) -> Tensor:
    """The finest classes of |U|, of all coordinates that are coded."""
    bins = buffers.empty(sum(n for _, n, _ in live), torch.uint8, device)
    at = 0
    for s, n, _ in live:
        kernels.get(device).subtractive_bins(ctx, s, bins[at : at + n])
        at += n
    return bins


def _window(size: Tensor, top: int) -> int:
    """The largest level with a symbol of its own: all levels if few are large, else the tail is escaped."""
    for limit in (7, 15, 31, 63):
        if top <= limit:
            return max(top, 1)
        if int((size > limit).sum()) <= size.numel() // 2048:
            return limit
    return min(top, 127)


def _classes(counts: Tensor) -> int:
    """How many bits of |U| to condition on: the least entropy and tables together."""
    best = []
    for bits in range(BINS + 1):
        merged = counts.view(1 << bits, -1, counts.shape[1]).sum(1).double()
        total = merged.sum(1, keepdim=True)
        entropy = -(torch.xlogy(merged, merged) - torch.xlogy(merged, total)).sum() / math.log(2)
        best.append(float(entropy) + ENTRY * int((merged > 0).sum()) + TABLE * (1 << bits))
    return best.index(min(best))
