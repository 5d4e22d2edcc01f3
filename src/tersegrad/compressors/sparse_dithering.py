"""Sparse Dithering: round every coordinate to a multiple of a step, and code the mostly small integers near their entropy.

Maps x to scale * k with integers k.

- ``sparse_dithering``, deterministic: step = 2 sqrt(nu/d) ||x||, k = round(x / step) to nearest, and the scale that is sent is the
  least-squares one, <x, k> / ||k||^2. Each coordinate errs by at most half a step, so the squared error is at most
  d (step/2)^2 = nu ||x||^2 for every x: strictly contractive, alpha = nu. ``alpha=`` instead searches the largest step whose
  *actual* error is at most alpha (the encoder verifies it, so the guarantee is sure), ``bits=`` the smallest step whose message
  fits the budget. ``rdo=true`` takes the next lower level where that saves more bits than the error is worth: b bits are worth b/16
  of a step beyond the middle between two levels. Bits follow from the counts of the nearest levels, in each scale class by its own.
  A coordinate may then err by 7/8 of a step instead of 1/2, which alone would prove (7/4)^2 nu, 3.06 nu; so the encoder verifies nu
  too, and sends the nearest levels should the error exceed it. Whoever decodes sees no difference.
- ``random_sparse_dithering``, unbiased: |k| = floor(|x| / step + U) with U uniform, step = 2 sqrt(omega/d) ||x||, scale = step. A
  coordinate has variance at most step^2/4, so omega bounds the total.

With ``scale="chunk"`` every block of 2^16 coordinates has a step of its own (errors add, so the guarantee stands) and one pass
over memory suffices; ``scale="global"`` uses one step for all, as published.

Wire: ``spec/wire.md``, "Sparse Dithering". Coders: ``paper`` is the published code (31-bit scale, count of zeros, their enumerated
positions, signs, unary levels), ``rans`` entropy-codes segments of 2^18 coordinates, ``auto`` takes the shortest of these and an
adaptive arithmetic code for short vectors. Segments code their levels by scale classes of rows, columns or blocks where that is
shorter (``docs/classes.md``), so that whoever decodes needs the spec's shapes.

Albasyoni, Safaryan, Condat, Richtarik: Optimal Gradient Compression (arXiv 2010.03246). We differ in the least-squares scale, the
segments, the target searches and the entropy coders, and round ties to even.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import buffers, host, modes
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Spec
from tersegrad.core.search import Bracket
from tersegrad.core.stateless import Stateless
from tersegrad.core.targets import (
    COARSE,
    Coded,
    aimed_bracket,
    meet_error,
    meet_error_aimed,
    meet_size,
    one_target,
    step_at,
    strided,
)
from tersegrad.core.text import require

Coder = Literal["auto", "rans", "paper"]
Scale = Literal["chunk", "global"]
CODERS, SCALES = ("auto", "rans", "paper"), ("chunk", "global")
# First words of a message; anything else is the scale of a short one.
WORDS = {0: modes.NAMES[modes.ZERO], 0x7FC00000: modes.NAMES[modes.NON_FINITE], 0x80000000: "rANS segments"}
# Vectors of up to so many coordinates have sequential codes.
SHORT = 1 << 10
# The message of a vector of zeros.
ZERO = bytes(4)
# Of the squared norm: what is not known of the error where blocks have steps of their own.
UNKNOWN = 1e-6
# How much faster at most the error of chosen levels rises with the step than that of the nearest ones.
STEEPER = 3.0
# log2 of how much smaller their step is at most expected to be.
FARTHEST = 0.5
# Of a target error: where the search leaves more than that, something else may be better.
MISSED = 0.02
# Bytes of messages that hold few levels other than zero.
FEW = 1 << 12


def encode_at(
    x: Tensor,
    step: float | Tensor | None,
    nu: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    ctx: Context | None = None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> Coded:
    """Code x (plus ``carry``) at one step, or with ``step=None`` at one step per block; ``ctx`` asks for stochastic rounding.

    A step may lie on the device of x. ``left`` becomes what the message leaves out. ``rdo``: levels with the least sum of error and bits,
    not the nearest ones.
    """
    run = kernels.get(x.device)
    buffer = buffers.empty(run.dither_max_bytes(x.numel()), torch.uint8, x.device) if out is None else out
    nbytes, norm, error = run.dither_encode(
        x,
        nu if step is None else 0.0,
        0.0 if step is None else step,
        CODERS.index(coder),
        0 if chunk == "auto" else rans.chunk_bits(chunk),
        ctx,
        buffer,
        left,
        carry,
        layout,
        rdo,
    )
    return Coded(buffer, int(nbytes), float(norm), float(error))


def write_at(
    x: Tensor,
    nu: float,
    coder: Coder,
    scale: Scale,
    chunk: rans.Chunk,
    out: Tensor,
    ctx: Context | None,
    layout: Tensor | None = None,
) -> int | Tensor:
    """Code x at the steps that ``nu`` gives; the length of the message. A device with kernels is not waited for."""
    if x.is_cpu or scale == "global":
        return encode_at(x, global_step(x, nu, scale), nu, coder, chunk, out, ctx, layout=layout).nbytes
    number, bits = CODERS.index(coder), 0 if chunk == "auto" else rans.chunk_bits(chunk)
    nbytes = kernels.get(x.device).dither_encode(x, nu, 0.0, number, bits, ctx, out, layout=layout)[0]
    # Some kernels have to look at it.
    return int(nbytes) if isinstance(nbytes, int) or nbytes.is_cpu else nbytes


def global_step(x: Tensor, nu: float, scale: Scale) -> Tensor | None:
    """The published step for the whole vector, on its device, or None where each block takes its own."""
    if scale == "chunk" or x.numel() == 0:
        return None
    return kernels.get(x.device).norm_step(x, nu / x.numel(), 1.0, 2.0, TINY)[0]


def encode_certified(
    x: Tensor,
    nu: float,
    coder: Coder,
    scale: Scale,
    chunk: rans.Chunk,
    out: Tensor | None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
) -> Coded:
    """Code x (plus ``carry``) by levels that take few bits at the steps of ``nu``; by the nearest ones should they err by more."""
    step = global_step(x, nu, scale)
    coded = encode_at(x, step, nu, coder, chunk, out, None, left, carry, layout, rdo=True)
    if coded.error <= (nu - UNKNOWN) * coded.norm:
        return coded
    return encode_at(x, step, nu, coder, chunk, out, None, left, carry, layout)


def encode_to_error(
    x: Tensor,
    alpha: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> Coded:
    """Code x (plus ``carry``) at nearly the largest step whose error is at most alpha; every message is verified.

    ``left``, a buffer of its own, becomes what the message leaves out. A device is read from once, with the first message: it finds that
    message's step itself.
    """
    if not x.is_cpu and (rdo or x.numel() <= SHORT):
        return _to_error_on_host(x if carry is None else x + carry, alpha, coder, chunk, out, left, layout, rdo)
    run, d = kernels.get(x.device), x.numel()

    def squares() -> Tensor:
        return run.sum_squares(x if carry is None else x + carry)

    def aim(norm: float) -> Tensor:
        return run.dither_aim(x, alpha, carry, norm)

    def encode(step: float | Tensor | None, chosen: bool = False) -> Coded:
        return encode_at(x, step, alpha, coder, chunk, out, left=left, carry=carry, layout=layout, rdo=chosen)

    if not rdo:
        return meet_error_aimed(aim, alpha, d, encode, squares) or encode(None)
    bracket = aimed_bracket(aim, squares)
    if bracket is None:
        return encode(TINY)
    if d // COARSE > 1:
        bracket = _for_chosen_levels(bracket, x if carry is None else strided(x, COARSE) + strided(carry, COARSE), chunk)
    # The steps of the worst-case bound, one for each block, are for the nearest levels.
    found = meet_error(bracket, alpha, d, lambda step: encode(step, chosen=True)) or encode(None)
    if d // COARSE <= 1 or found.nbytes < FEW or found.error < (1 - MISSED) * alpha * found.norm:
        # Few counts tell little of what levels cost, and where they jump with the step no step may be close to the target.
        nearest = encode_to_error(x if carry is None else x + carry, alpha, coder, chunk, None, layout=layout)
        if nearest.nbytes <= found.nbytes:
            return encode_to_error(x, alpha, coder, chunk, out, left, carry, layout)
    return found


def _to_error_on_host(
    total: Tensor,
    alpha: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    left: Tensor | None,
    layout: Tensor | None,
    rdo: bool,
) -> Coded:
    """The same for a vector on a device whose codes are the host's, which reads it once: a short one, or ``rdo``."""
    d, device = total.numel(), total.device
    buffer = buffers.byte_buffer(out, kernels.reference.dither_max_bytes(d), device)
    room = host.empty(buffer.numel(), torch.uint8, device)
    rest = None if left is None else host.empty(d, torch.float32, device)
    coded = encode_to_error(host.read(total), alpha, coder, chunk, room, rest, None, layout, rdo)
    buffer[: coded.nbytes].copy_(coded.data, non_blocking=True)
    if left is not None and rest is not None:
        left.copy_(rest, non_blocking=True)
    return dataclasses.replace(coded, buffer=buffer)


def _for_chosen_levels(bracket: Bracket, x: Tensor, chunk: rans.Chunk) -> Bracket:
    """Where to look with ``rdo`` if the nearest levels meet a target at the start of a bracket; few coordinates tell."""
    part = strided(x, COARSE)

    def error(at: float, chosen: bool) -> float:
        return max(encode_at(part, step_at(at), 0.0, "rans", chunk, None, rdo=chosen).error, 1e-300)

    aim, first = error(bracket.start, False), error(bracket.start, True)
    at = bracket.start - min(max(math.log2(first / aim) / bracket.slope, 0.0), FARTHEST)
    second = error(at, True)
    # Of smaller steps fewer levels are lowered, so that errors fall faster than those of the nearest levels.
    fall = math.log2(first / second) / (bracket.start - at) if at < bracket.start else 0.0
    slope = min(max(fall, bracket.slope), STEEPER * bracket.slope)
    at = min(max(at - math.log2(second / aim) / slope, bracket.start - FARTHEST), bracket.start)
    return Bracket(start=at, slope=slope, tight=bracket.tight)


def encode_to_size(
    x: Tensor, budget: int, coder: Coder, chunk: rans.Chunk, out: Tensor | None, layout: Tensor | None = None, rdo: bool = False
) -> Coded:
    """Code x at nearly the smallest step whose message fits the budget."""
    d, norm = x.numel(), float(kernels.get(x.device).sum_squares(x))
    zeros = Coded(torch.frombuffer(bytearray(ZERO), dtype=torch.uint8).to(x.device), len(ZERO), norm, norm)

    def encode(step: float) -> Coded:
        return encode_at(x, step, 0.0, coder, chunk, None, layout=layout, rdo=rdo)

    if not 0 < norm < math.inf:
        best = encode_at(x, HUGE, 0.0, "auto", chunk, None)
    elif budget <= len(ZERO):
        best = zeros
    else:
        best = meet_size(norm, budget, d, encode) or zeros
    if rdo and d // COARSE <= 1:
        nearest = encode_to_size(x, budget, coder, chunk, None, layout)
        best = nearest if nearest.error <= best.error else best
    return best if out is None else dataclasses.replace(best, buffer=out[: best.nbytes].copy_(best.data))


@dataclasses.dataclass(frozen=True)
class _Dithering(Stateless):
    """What both variants share: the wire format and its decoder."""

    def max_nbytes(self, spec: Spec) -> int:
        return kernels.reference.dither_max_bytes(spec.numel)

    def codes_on_host(self, device: torch.device) -> bool:
        return not kernels.faster(device, "dither_encode", "dither_decode", "dither_aim")

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        kernels.get(out.device).dither_decode(data, out, weight, spec.layout)

    def mode(self, data: bytes) -> str:
        return WORDS.get(int.from_bytes(data[:4], "little"), "short") if len(data) >= 4 else "missing"


@dataclasses.dataclass(frozen=True)
class SparseDithering(_Dithering):
    """Deterministic Sparse Dithering: contractive, with a sure bound."""

    name: ClassVar[str] = "sparse_dithering"
    wire_id: ClassVar[int] = 16
    examples: ClassVar[tuple[str, ...]] = (
        "sparse_dithering(alpha=0.1)",
        "sparse_dithering(nu=0.1)",
        "sparse_dithering(alpha=0.1, rdo=true)",
    )
    corners: ClassVar[tuple[str, ...]] = (
        "sparse_dithering(nu=0.3, coder=rans, scale=global)",
        "sparse_dithering(nu=0.5, coder=paper)",
        "sparse_dithering(alpha=0.2)",
        "sparse_dithering(bits=1.5)",
        "sparse_dithering(nu=1, rdo=true)",
        "sparse_dithering(nu=0.3, scale=global, rdo=true)",
        "sparse_dithering(bits=1, rdo=true)",
    )
    nu: float | None = None
    alpha: float | None = None
    bits: float | None = None
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"
    rdo: bool = False

    def __post_init__(self) -> None:
        one_target(self.name, self.nu, self.alpha, self.bits)
        require(self.coder in CODERS, f"coder is one of {', '.join(CODERS)}, got {self.coder!r}")
        require(self.scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", one_target(self.name, self.nu, self.alpha, self.bits), sure=True)

    def max_nbytes(self, spec: Spec) -> int:
        return super().max_nbytes(spec) if self.bits is None else max(4, math.floor(self.bits * spec.numel / 8))

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        if self.rdo and not x.is_cpu:
            # No kernel of a device chooses levels; one read, and the message back.
            here = host.empty(data.numel(), torch.uint8, x.device)
            nbytes = int(self.write(host.read(x), here, spec, ctx))
            data[:nbytes].copy_(here[:nbytes], non_blocking=True)
            return nbytes
        if self.nu is not None and not self.rdo:
            return write_at(x, self.nu, self.coder, self.scale, self.chunk, data, None, spec.layout)
        if self.nu is not None:
            coded = encode_certified(x, self.nu, self.coder, self.scale, self.chunk, data, layout=spec.layout)
        elif self.alpha is not None:
            coded = encode_to_error(x, self.alpha, self.coder, self.chunk, data, layout=spec.layout, rdo=self.rdo)
        else:
            coded = encode_to_size(x, data.numel(), self.coder, self.chunk, data, spec.layout, self.rdo)
        return coded.nbytes

    def splits(self, device: torch.device, weight: float) -> bool:
        return weight == 1.0 and (device.type == "cpu" or not (self.rdo or self.codes_on_host(device)))

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool]:
        x, residual, left = fed.x, fed.residual, fed.left
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if self.nu is not None and self.scale == "chunk" and self.rdo:
            coded = encode_certified(x, self.nu, self.coder, self.scale, self.chunk, data, left, residual, spec.layout)
        elif self.nu is not None and self.scale == "chunk":
            coded = encode_at(x, None, self.nu, self.coder, self.chunk, data, left=left, carry=residual, layout=spec.layout)
        elif self.alpha is not None:
            coded = encode_to_error(x, self.alpha, self.coder, self.chunk, data, left, residual, spec.layout, self.rdo)
        else:
            y = torch.add(x, residual, out=left)
            if self.nu is not None and self.rdo:
                coded = encode_certified(y, self.nu, self.coder, self.scale, self.chunk, data, layout=spec.layout)
            elif self.nu is not None:
                step = global_step(y, self.nu, self.scale)
                coded = encode_at(y, step, self.nu, self.coder, self.chunk, data, layout=spec.layout)
            else:
                coded = encode_to_size(y, data.numel(), self.coder, self.chunk, data, spec.layout, self.rdo)
            kernels.get(y.device).dither_decode(coded.data, left, -1.0, spec.layout)
        message = Message(data if out is None else out, coded.nbytes)
        return message, math.isfinite(coded.norm)


@dataclasses.dataclass(frozen=True)
class RandomSparseDithering(_Dithering):
    """Randomised Sparse Dithering: unbiased, variance at most omega."""

    name: ClassVar[str] = "random_sparse_dithering"
    wire_id: ClassVar[int] = 17
    examples: ClassVar[tuple[str, ...]] = ("random_sparse_dithering(omega=1)",)
    corners: ClassVar[tuple[str, ...]] = ("random_sparse_dithering(omega=0.25)",)
    omega: float
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(self.omega > 0 and math.isfinite(self.omega), f"omega must be positive, got {self.omega}")
        require(self.coder in CODERS, f"coder is one of {', '.join(CODERS)}, got {self.coder!r}")
        require(self.scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def wire_omega(self, spec: Spec) -> float:
        return float(self.omega)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        return write_at(x, self.omega, self.coder, self.scale, self.chunk, data, ctx, spec.layout)
