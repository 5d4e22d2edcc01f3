"""Sparse Dithering: round every coordinate to a multiple of a step, and code the mostly small integers near their entropy.

Maps x to scale * k with integers k.

- ``sparse_dithering``, deterministic: step = 2 sqrt(nu/d) ||x||, k = round(x / step) to nearest, and the scale that is sent is the
  least-squares one, <x, k> / ||k||^2. Each coordinate errs by at most half a step, so the squared error is at most
  d (step/2)^2 = nu ||x||^2 for every x: strictly contractive, alpha = nu. ``alpha=`` instead searches the largest step whose
  *actual* error is at most alpha (the encoder verifies it, so the guarantee is sure), ``bits=`` the smallest step whose message
  fits the budget.
- ``random_sparse_dithering``, unbiased: |k| = floor(|x| / step + U) with U uniform, step = 2 sqrt(omega/d) ||x||, scale = step. A
  coordinate has variance at most step^2/4, so omega bounds the total.

A vector is cut into segments of 2^18 coordinates. With ``scale="chunk"`` every segment has a step of its own (errors add, so the
guarantee stands) and one pass over memory suffices; ``scale="global"`` uses one step for all, as published.

Wire: ``spec/wire.md``, "Dithered levels". Coders: ``paper`` is the published code (31-bit scale, count of zeros, their enumerated
positions, signs, unary levels), ``rans`` entropy-codes each segment, ``auto`` takes the shortest of these and an adaptive
arithmetic code for short vectors.

Albasyoni, Safaryan, Condat, Richtarik: Optimal Gradient Compression (arXiv 2010.03246). We differ in the least-squares scale, the
segments, the target searches and the entropy coders, and round ties to even.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import levels
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

Coder = Literal["auto", "rans", "paper"]
Scale = Literal["chunk", "global"]
CODERS, SCALES = ("auto", "rans", "paper"), ("chunk", "global")
NON_FINITE, ZERO, SEGMENTS = 0x7FC00000, 0, 0x80000000  # first word of a message; anything else is the scale of a short one
UNARY_LIMIT = 16  # mean level from which a unary code cannot be the shortest
SHORT = 1 << 14  # vectors up to this length also try the sequential codes
PAPER_LIMIT = 1 << 30  # the arithmetic coder counts below this
SAMPLE = 1 << 20  # coordinates that a search for the step looks at
SLACK = 0.0035  # a search may end this much (relative) below the target error: a quarter of a hundredth of a bit
TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class Coded:
    """A message, and what its encoder knows of the error."""

    data: Tensor  # uint8
    norm: float = 0.0  # ||x||^2
    error: float = 0.0  # ||x - decoded||^2


def max_nbytes(numel: int) -> int:
    """No message for ``numel`` coordinates is longer."""
    return 4 + max(kernels.reference.dither_max_bytes(numel), 4 * numel)


def word(value: int, out: Tensor | None) -> Tensor:
    """A message of four bytes."""
    data = torch.tensor(list(struct.pack("<I", value)), dtype=torch.uint8)
    return data if out is None else out[:4].copy_(data)


def toward_zero(value: float) -> float:
    """The nearest normal float32 that is not larger."""
    rounded = float(torch.tensor(min(max(value, TINY), HUGE), dtype=torch.float32))
    if rounded > value > TINY:
        rounded = float(torch.nextafter(torch.tensor(rounded), torch.tensor(0.0)))
    return rounded


def encode_at(x: Tensor, step: float | None, nu: float, coder: Coder, out: Tensor | None, ctx: Context | None = None) -> Coded:
    """Code x at one step, or with ``step=None`` at one step a segment; ``ctx`` asks for stochastic rounding."""
    run = kernels.get(x.device)
    d = x.numel()
    best: Coded | None = None
    if coder == "paper" or (coder == "auto" and d <= SHORT):
        norm = float(run.sum_squares(x))
        single = toward_zero(2 * math.sqrt(nu / max(d, 1) * norm)) if step is None and math.isfinite(norm) else step or TINY
        if not math.isfinite(norm):
            return Coded(word(NON_FINITE, out))
        best = _short(x, norm, single, coder, ctx) if norm > 0 else Coded(word(ZERO, None))
        if coder == "paper" or best.data.numel() < 300:  # rANS tables and lanes cannot win there
            return best if out is None else dataclasses.replace(best, data=_into(out, best.data))
    buffer = torch.empty(max_nbytes(d), dtype=torch.uint8, device=x.device) if out is None or best is not None else out
    nbytes, norm, error = run.dither_encode(x, nu if step is None else 0.0, step or 0.0, ctx is None, ctx, buffer[4:])
    if d and nbytes == 0:
        return Coded(word(NON_FINITE, out))
    if best is not None and best.data.numel() <= nbytes + 4:
        return best if out is None else dataclasses.replace(best, data=_into(out, best.data))
    word(SEGMENTS, buffer)
    data = buffer[: 4 + nbytes]
    return Coded(data if out is None or out is buffer else _into(out, data), norm, error)


def global_step(x: Tensor, nu: float, scale: Scale) -> float | None:
    """The published step for the whole vector, or None where each segment takes its own."""
    if scale == "chunk" or x.numel() == 0:
        return None
    norm = float(kernels.get(x.device).sum_squares(x))
    return toward_zero(2 * math.sqrt(nu / x.numel() * norm)) if 0 < norm < math.inf else TINY


def _into(out: Tensor, data: Tensor) -> Tensor:
    return out[: data.numel()].copy_(data)


def _short(x: Tensor, norm: float, step: float, coder: Coder, ctx: Context | None) -> Coded:
    """One scale and a sequential code, whichever of the allowed ones is shorter."""
    k = kernels.get(x.device).dither_levels(x, step, ctx)
    if not bool(k.any()):
        return Coded(word(ZERO, None), norm, norm)
    scale, exact = step, k.double()
    dot, energy = float(x.double() @ exact), float(exact @ exact)
    if ctx is None:
        scale = toward_zero(dot / energy)
    unary = int(k.abs().sum(dtype=torch.int64)) <= UNARY_LIMIT * k.numel()
    forms: tuple[levels.Form, ...] = ("paper",) if coder == "paper" else ("paper", "adaptive") if unary else ("adaptive",)
    code = min((levels.encode(k, form) for form in forms), key=Tensor.numel)
    head = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8, device=x.device)
    return Coded(torch.cat([head, code]), norm, norm - 2 * scale * dot + scale * scale * energy)


def encode_to_error(x: Tensor, alpha: float, coder: Coder, out: Tensor | None) -> Coded:
    """Code x at nearly the largest step whose error is at most alpha; every message is verified."""
    run = kernels.get(x.device)
    d = x.numel()
    stride = max(1, d // SAMPLE)

    def error(step: float) -> float:
        dot, energy, norm = run.dither_sample(x, step, stride)
        return 1.0 if energy == 0 else 1 - dot / energy * dot / norm

    norm = float(run.sum_squares(x))
    if not math.isfinite(norm) or norm == 0:
        return encode_at(x, TINY, 0.0, coder, out)
    aim = alpha * (1 - SLACK / 2)
    low = high = math.log2(toward_zero(math.sqrt(12 * aim / d * norm)))
    while error(2.0**low) > aim and low > -126:
        low -= 1
    while error(2.0**high) <= aim and high < 127:
        high += 1
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if error(2.0**middle) <= aim else (low, middle)
    # The sample may mislead: verify on everything, and correct by the local slope of error against step.
    for _ in range(40):
        coded = encode_at(x, toward_zero(2.0**low), 0.0, coder, out)
        if coded.error <= alpha * coded.norm:
            return coded
        low += math.log2(aim * coded.norm / coded.error) / 2 - 1e-3
    return encode_at(x, None, alpha, coder, out)


def encode_to_size(x: Tensor, budget: int, coder: Coder, out: Tensor | None) -> Coded:
    """Code x at nearly the smallest step whose message fits the budget."""
    norm = float(kernels.get(x.device).sum_squares(x))
    if not math.isfinite(norm) or norm == 0 or budget <= 4:
        return encode_at(x, HUGE, 0.0, coder, None)
    # Bracket the step by whole octaves, then close in; lengths need not be monotone, so the best that fits is kept.
    step = math.log2(norm / x.numel()) / 2 + 2 - min(8 * budget / x.numel(), 24.0)
    best, low, high = None, None, None
    for _ in range(60):
        coded = encode_at(x, toward_zero(2.0**step), 0.0, coder, None)
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
    if best is None:
        return Coded(word(ZERO, out), norm, norm)
    return best if out is None else dataclasses.replace(best, data=_into(out, best.data))


def decode(payload: Tensor, out: Tensor, weight: float | None = None) -> Tensor:
    """``out = decoded``, or with a weight ``out += weight * decoded``."""
    if payload.numel() < 4:
        raise CorruptMessage(f"a dithered message has at least 4 bytes, got {payload.numel()}")
    head = struct.unpack("<I", bytes(payload[:4].tolist()))[0]
    run = kernels.get(payload.device)
    if head == SEGMENTS:
        return run.dither_decode(payload[4:], out, weight)
    if head in (NON_FINITE, ZERO):
        if payload.numel() != 4:
            raise CorruptMessage("bytes after the end of the message")
        fill = math.nan if head == NON_FINITE else 0.0
        return out.fill_(fill) if weight is None or head == NON_FINITE else out
    scale = struct.unpack("<f", struct.pack("<I", head))[0]
    if not 0 < scale <= HUGE:
        raise CorruptMessage(f"a scale of {scale}")
    decoded = (levels.decode(payload[4:], out.numel()).to(torch.float32) * scale).clamp_(-HUGE, HUGE)
    return out.copy_(decoded) if weight is None else out.add_(decoded * weight)


@dataclasses.dataclass(frozen=True)
class _Dithering(Configuration):
    """What both variants share: the wire format and its decoder."""

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def max_nbytes(self, spec: Spec) -> int:
        return max_nbytes(spec.numel)

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(spec.numel, dtype=torch.float32, device=message.data.device)
        return decode(message.payload, out)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return decode(message.payload, out, weight)


@dataclasses.dataclass(frozen=True)
class SparseDithering(_Dithering):
    """Deterministic Sparse Dithering: contractive, with a sure bound."""

    name: ClassVar[str] = "sparse_dithering"
    nu: float | None = None
    alpha: float | None = None
    bits: float | None = None
    coder: Coder = "auto"
    scale: Scale = "chunk"

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

    @property
    def wire_id(self) -> int:
        return 16

    def guarantee(self, spec: Spec) -> Guarantee:
        bound = self.nu if self.nu is not None else self.alpha if self.alpha is not None else 1.0
        return Guarantee("contractive", bound, sure=True)

    def max_nbytes(self, spec: Spec) -> int:
        return max_nbytes(spec.numel) if self.bits is None else max(4, math.floor(self.bits * spec.numel / 8))

    def encode(
        self, x: Tensor, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x)
        if self.nu is not None:
            data = encode_at(flat, global_step(flat, self.nu, self.scale), self.nu, self.coder, out).data
        elif self.alpha is not None:
            data = encode_to_error(flat, self.alpha, self.coder, out).data
        else:
            data = encode_to_size(flat, self.max_nbytes(Spec.flat(flat.numel())), self.coder, out).data
        return Message(data if out is None else out, data.numel()), None


@dataclasses.dataclass(frozen=True)
class RandomSparseDithering(_Dithering):
    """Randomised Sparse Dithering: unbiased, variance at most omega."""

    name: ClassVar[str] = "random_sparse_dithering"
    omega: float
    coder: Coder = "auto"
    scale: Scale = "chunk"

    def __post_init__(self) -> None:
        require(self.omega > 0 and math.isfinite(self.omega), f"omega must be positive, got {self.omega}")
        require(self.coder in CODERS, f"coder is one of {', '.join(CODERS)}, got {self.coder!r}")
        require(self.scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")

    @property
    def wire_id(self) -> int:
        return 17

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def encode(
        self, x: Tensor, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x)
        data = encode_at(flat, global_step(flat, self.omega, self.scale), self.omega, self.coder, out, ctx).data
        return Message(data if out is None else out, data.numel()), None
