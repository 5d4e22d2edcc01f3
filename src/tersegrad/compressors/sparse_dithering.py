"""Sparse Dithering: round every coordinate to a multiple of a step, and code the mostly small integers near their entropy.

Maps x to scale * k with integers k.

- ``sparse_dithering``, deterministic: step = 2 sqrt(nu/d) ||x||, k = round(x / step) to nearest, and the scale that is sent is the
  least-squares one, <x, k> / ||k||^2. Each coordinate errs by at most half a step, so the squared error is at most
  d (step/2)^2 = nu ||x||^2 for every x: strictly contractive, alpha = nu. ``alpha=`` instead searches the largest step whose
  *actual* error is at most alpha (the encoder verifies it, so the guarantee is sure), ``bits=`` the smallest step whose message
  fits the budget.
- ``random_sparse_dithering``, unbiased: |k| = floor(|x| / step + U) with U uniform, step = 2 sqrt(omega/d) ||x||, scale = step. A
  coordinate has variance at most step^2/4, so omega bounds the total.

With ``scale="chunk"`` every block of 2^16 coordinates has a step of its own (errors add, so the guarantee stands) and one pass
over memory suffices; ``scale="global"`` uses one step for all, as published.

Wire: ``spec/wire.md``, "Sparse Dithering". Coders: ``paper`` is the published code (31-bit scale, count of zeros, their enumerated
positions, signs, unary levels), ``rans`` entropy-codes segments of 2^18 coordinates, ``auto`` takes the shortest of these and an
adaptive arithmetic code for short vectors.

Albasyoni, Safaryan, Condat, Richtarik: Optimal Gradient Compression (arXiv 2010.03246). We differ in the least-squares scale, the
segments, the target searches and the entropy coders, and round ties to even.
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
from tersegrad.codecs import rans
from tersegrad.core import buffers
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

Coder = Literal["auto", "rans", "paper"]
Scale = Literal["chunk", "global"]
CODERS, SCALES = ("auto", "rans", "paper"), ("chunk", "global")
ZERO = bytes(4)  # the message of a vector of zeros
CLOSE = 4**-0.0045  # an error this near its target costs less than 0.005 bit
SCALE_BLOCK = 1 << 16  # coordinates that share a scale
COARSE, SAMPLE = 1 << 16, 1 << 21  # coordinates that a search for the step looks at: often, and once
SLACK = 0.006  # a search may end this much (relative) below the target error: half a hundredth of a bit
TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class Coded:
    """A message, and what its encoder knows of the error."""

    data: Tensor  # uint8
    norm: float = 0.0  # ||x||^2
    error: float = 0.0  # ||x - decoded||^2


def toward_zero(value: float) -> float:
    """The nearest normal float32 that is not larger."""
    value = min(max(value, TINY), HUGE)
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return float(torch.nextafter(torch.tensor(rounded), torch.tensor(0.0))) if rounded > value else rounded


def encode_at(
    x: Tensor,
    step: float | None,
    nu: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    ctx: Context | None = None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
) -> Coded:
    """Code x (plus ``carry``) at one step, or with ``step=None`` at one step a block; ``ctx`` asks for stochastic rounding.

    ``left`` becomes what the message leaves out.
    """
    run = kernels.get(x.device)
    buffer = buffers.empty(run.dither_max_bytes(x.numel()), torch.uint8, x.device) if out is None else out
    nbytes, norm, error = run.dither_encode(
        x, nu if step is None else 0.0, step or 0.0, CODERS.index(coder), rans.chunk_bits(chunk), ctx, buffer, left, carry
    )
    return Coded(buffer[: int(nbytes)], float(norm), float(error))


def global_step(x: Tensor, nu: float, scale: Scale) -> float | None:
    """The published step for the whole vector, or None where each block takes its own."""
    if scale == "chunk" or x.numel() == 0:
        return None
    norm = float(kernels.get(x.device).sum_squares(x))
    return toward_zero(2 * math.sqrt(nu / x.numel() * norm)) if 0 < norm < math.inf else TINY


def largest_step(error: Callable[[float], float], start: float, aim: float, slack: float) -> float:
    """log2 of nearly the largest step with error(step) <= aim, by secants of log error against log step inside a bracket."""
    low, high = (-126.0, -math.inf), (128.0, math.inf)  # (log2 step, log2 of error / aim)
    at, tight = start, math.log2(1 - slack)
    for trial in range(60):
        ratio = math.log2(max(error(2.0**at), 1e-300) / aim)
        low, high = ((at, ratio), high) if ratio <= 0 else (low, (at, ratio))
        if tight <= low[1] <= 0 or high[0] - low[0] < 1e-3:
            break
        if math.isfinite(low[1]) and math.isfinite(high[1]):
            share = (low[1] - tight / 2) / (low[1] - high[1])
            at = low[0] + (high[0] - low[0]) * (min(max(share, 0.05), 0.95) if trial % 4 < 3 else 0.5)
        else:  # small steps err like their squares; larger ones by less
            at = min(
                max(at - min(max(ratio - tight / 2, -8.0), 8.0) / 2, (low[0] + at) / 2 if ratio > 0 else at), (at + high[0]) / 2
            )
    return low[0]


def refined_step(error: Callable[[float], float], low: float, slope: float, aim: float, slack: float) -> tuple[float, float]:
    """log2 of a step whose error lies between (1 - slack) aim and aim, or nearly so, from a near one; and the slope there."""
    tight, before = math.log2(1 - slack), None
    for _ in range(4):
        ratio = math.log2(max(error(2.0**low), 1e-300) / aim)
        if not math.isfinite(ratio) or tight <= ratio <= 0:
            break
        if before is not None and low != before[0]:
            slope = min(max((ratio - before[1]) / (low - before[0]), 0.25), 4.0)
        before = low, ratio
        low = min(max(low + min(max((tight / 2 - ratio) / slope, -4.0), 4.0), -126.0), 127.0)
        if abs(ratio) < 0.05:  # so short a way that the slope leads there
            break
    return low, slope


def encode_to_error(
    x: Tensor,
    alpha: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
) -> Coded:
    """Code x (plus ``carry``) at nearly the largest step whose error is at most alpha; every message is verified.

    ``left``, a buffer of its own, becomes what the message leaves out.
    """
    run = kernels.get(x.device)
    d = x.numel()

    def sampled(stride: int) -> Callable[[float], float]:
        def error(step: float) -> float:
            wrong, power = run.dither_sample(x, toward_zero(step), stride, carry)
            return max(wrong, 0.0) / power if power > 0 else 0.0

        return error

    coarse, fine = max(1, d // COARSE), max(1, d // SAMPLE)
    norm = run.dither_sample(x, HUGE, coarse, carry)[1] or float(run.sum_squares(x if carry is None else x + carry))
    if not 0 < norm < math.inf:
        return encode_at(x, TINY, 0.0, coder, chunk, out, left=left, carry=carry)
    aim = alpha * (1 - (SLACK / 2 if fine > 1 else SLACK / 6 if coarse > 1 else 0))
    error = sampled(coarse)
    low = largest_step(error, math.log2(math.sqrt(12 * aim * norm / (d // coarse + 1))), aim, SLACK)
    slope = 2.0
    if coarse > 1:  # a few looks at many, with the slope that the few have told
        rise = math.log2(max(error(2.0 ** (low + 0.125)), 1e-300) / max(error(2.0 ** (low - 0.125)), 1e-300))
        low, slope = refined_step(sampled(fine), low, min(max(4 * rise, 0.25), 4.0), aim, SLACK * (0.8 if fine == 1 else 0.5))
    # The sample may mislead: verify on everything, and correct a few times.
    best, failed, corrections = None, None, 5 if d > SCALE_BLOCK else 0
    for _ in range(40):
        coded = encode_at(x, toward_zero(2.0**low), 0.0, coder, chunk, out, left=left, carry=carry)
        if coded.error > alpha * coded.norm:
            failed = low
            low += math.log2(aim * coded.norm / coded.error) / slope - 1e-3
            if best is not None:
                low = (best + failed) / 2 if corrections else best
        else:
            if not corrections or coded.error >= alpha * CLOSE * coded.norm or coded.error <= 0:
                return coded
            best = low
            low += math.log2(alpha * (1 + CLOSE) / 2 * coded.norm / coded.error) / slope
            low = low if failed is None else min(low, (best + failed) / 2)
        corrections = max(corrections - (best is not None), 0)
    return encode_at(x, None, alpha, coder, chunk, out, left=left, carry=carry)


def encode_to_size(x: Tensor, budget: int, coder: Coder, chunk: rans.Chunk, out: Tensor | None) -> Coded:
    """Code x at nearly the smallest step whose message fits the budget."""
    norm = float(kernels.get(x.device).sum_squares(x))
    if not math.isfinite(norm) or norm == 0 or budget <= 4:
        best = encode_at(x, HUGE, 0.0, "auto", chunk, None)
        return best if out is None else dataclasses.replace(best, data=out[: best.data.numel()].copy_(best.data))
    # Bracket the step by whole octaves, then close in; lengths need not be monotone, so the best that fits is kept.
    step = math.log2(norm / x.numel()) / 2 + 2 - min(8 * budget / x.numel(), 24.0)
    best, low, high = Coded(torch.frombuffer(bytearray(ZERO), dtype=torch.uint8).to(x.device), norm, norm), None, None
    for _ in range(60):
        coded = encode_at(x, toward_zero(2.0**step), 0.0, coder, chunk, None)
        got = coded.data.numel()
        if got <= budget:
            best, high = coded, step
        else:
            low = step
        if (high is not None and got <= budget and got >= budget * 0.9975) or step <= -126 or step >= 127:
            break
        if low is not None and high is not None:
            if high - low < 1e-3:
                break
            guess = step + 8 * (got - budget * 0.999) / x.numel()
            step = guess if low < guess < high else (low + high) / 2
        elif coded.error <= 1e-12 * norm and got <= budget:
            break  # already exact for all purposes
        else:
            step += min(max(8 * (got - budget * 0.999) / x.numel(), -2.0), 2.0) or 0.5
    return best if out is None else dataclasses.replace(best, data=out[: best.data.numel()].copy_(best.data))


@dataclasses.dataclass(frozen=True)
class _Dithering(Configuration):
    """What both variants share: the wire format and its decoder."""

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def max_nbytes(self, spec: Spec) -> int:
        return kernels.reference.dither_max_bytes(spec.numel)

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = buffers.empty(spec.numel, torch.float32, message.data.device)
        return kernels.get(out.device).dither_decode(message.payload, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return kernels.get(out.device).dither_decode(message.payload, out, weight)


@dataclasses.dataclass(frozen=True)
class SparseDithering(_Dithering):
    """Deterministic Sparse Dithering: contractive, with a sure bound."""

    name: ClassVar[str] = "sparse_dithering"
    nu: float | None = None
    alpha: float | None = None
    bits: float | None = None
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        given = [n for n in ("nu", "alpha", "bits") if getattr(self, n) is not None]
        require(len(given) == 1, f"sparse_dithering takes exactly one of nu, alpha and bits, got {given or 'none'}")
        require(self.nu is None or 0 < self.nu <= 1, f"nu must lie in (0, 1], got {self.nu}: for larger errors use alpha=")
        require(self.alpha is None or 0 < self.alpha < 1, f"alpha must lie in (0, 1), got {self.alpha}")
        require(
            self.bits is None or 0 < self.bits < math.inf,
            f"bits is a budget a coordinate and must be positive, got {self.bits}",
        )
        require(self.coder in CODERS, f"coder is one of {', '.join(CODERS)}, got {self.coder!r}")
        require(self.scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    @property
    def wire_id(self) -> int:
        return 16

    def guarantee(self, spec: Spec) -> Guarantee:
        bound = self.nu if self.nu is not None else self.alpha if self.alpha is not None else 1.0
        return Guarantee("contractive", bound, sure=True)

    def max_nbytes(self, spec: Spec) -> int:
        return super().max_nbytes(spec) if self.bits is None else max(4, math.floor(self.bits * spec.numel / 8))

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        if self.nu is not None:
            data = encode_at(flat, global_step(flat, self.nu, self.scale), self.nu, self.coder, self.chunk, out).data
        elif self.alpha is not None:
            data = encode_to_error(flat, self.alpha, self.coder, self.chunk, out).data
        else:
            data = encode_to_size(flat, self.max_nbytes(Spec.flat(flat.numel())), self.coder, self.chunk, out).data
        return Message(data if out is None else out, data.numel()), None

    def encode_split(
        self,
        x: Tensor,
        residual: Tensor,
        left: Tensor,
        spec: Spec,
        state: None,
        ctx: Context,
        *,
        stats: Stats | None = None,
        out: Tensor | None = None,
    ) -> tuple[Message, None, bool]:
        if self.nu is not None and self.scale == "chunk":
            coded = encode_at(x, None, self.nu, self.coder, self.chunk, out, left=left, carry=residual)
        elif self.alpha is not None:
            coded = encode_to_error(x, self.alpha, self.coder, self.chunk, out, left, residual)
        else:
            y = torch.add(x, residual, out=left)
            if self.nu is not None:
                coded = encode_at(y, global_step(y, self.nu, self.scale), self.nu, self.coder, self.chunk, out)
            else:
                coded = encode_to_size(y, self.max_nbytes(Spec.flat(y.numel())), self.coder, self.chunk, out)
            kernels.get(y.device).dither_decode(coded.data, left, -1.0)
        message = Message(coded.data if out is None else out, coded.data.numel())
        return message, None, math.isfinite(coded.norm)


@dataclasses.dataclass(frozen=True)
class RandomSparseDithering(_Dithering):
    """Randomised Sparse Dithering: unbiased, variance at most omega."""

    name: ClassVar[str] = "random_sparse_dithering"
    omega: float
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(self.omega > 0 and math.isfinite(self.omega), f"omega must be positive, got {self.omega}")
        require(self.coder in CODERS, f"coder is one of {', '.join(CODERS)}, got {self.coder!r}")
        require(self.scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    @property
    def wire_id(self) -> int:
        return 17

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        data = encode_at(flat, global_step(flat, self.omega, self.scale), self.omega, self.coder, self.chunk, out, ctx).data
        return Message(data if out is None else out, data.numel()), None
