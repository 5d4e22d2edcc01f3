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
from tersegrad.core.stateless import Stateless
from tersegrad.core.targets import Coded, meet_error_aimed, meet_size, one_target
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
) -> Coded:
    """Code x (plus ``carry``) at one step, or with ``step=None`` at one step per block; ``ctx`` asks for stochastic rounding.

    A step may lie on the device of x. ``left`` becomes what the message leaves out.
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
    return int(nbytes) if nbytes.is_cpu else nbytes


def global_step(x: Tensor, nu: float, scale: Scale) -> Tensor | None:
    """The published step for the whole vector, on its device, or None where each block takes its own."""
    if scale == "chunk" or x.numel() == 0:
        return None
    return kernels.get(x.device).norm_step(x, nu / x.numel(), 1.0, 2.0, TINY)[0]


def encode_to_error(
    x: Tensor,
    alpha: float,
    coder: Coder,
    chunk: rans.Chunk,
    out: Tensor | None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
) -> Coded:
    """Code x (plus ``carry``) at nearly the largest step whose error is at most alpha; every message is verified.

    ``left``, a buffer of its own, becomes what the message leaves out. A device is read from once, with the first message: it finds that
    message's step itself.
    """
    if not x.is_cpu and x.numel() <= SHORT:
        return _short_to_error(x if carry is None else x + carry, alpha, coder, chunk, out, left, layout)
    run, d = kernels.get(x.device), x.numel()

    def encode(step: float | Tensor | None) -> Coded:
        return encode_at(x, step, alpha, coder, chunk, out, left=left, carry=carry, layout=layout)

    def aim(norm: float) -> Tensor:
        return run.dither_aim(x, alpha, carry, norm)

    def squares() -> Tensor:
        return run.sum_squares(x if carry is None else x + carry)

    return meet_error_aimed(aim, alpha, d, encode, squares) or encode(None)


def _short_to_error(
    total: Tensor, alpha: float, coder: Coder, chunk: rans.Chunk, out: Tensor | None, left: Tensor | None, layout: Tensor | None
) -> Coded:
    """The same for a short vector on a device: its codes are the host's, which reads it once."""
    d, device = total.numel(), total.device
    buffer = buffers.byte_buffer(out, kernels.reference.dither_max_bytes(d), device)
    room = host.empty(buffer.numel(), torch.uint8, device)
    rest = None if left is None else host.empty(d, torch.float32, device)
    coded = encode_to_error(host.read(total), alpha, coder, chunk, room, rest, None, layout)
    buffer[: coded.nbytes].copy_(coded.data, non_blocking=True)
    if left is not None and rest is not None:
        left.copy_(rest, non_blocking=True)
    return dataclasses.replace(coded, buffer=buffer)


def encode_to_size(
    x: Tensor, budget: int, coder: Coder, chunk: rans.Chunk, out: Tensor | None, layout: Tensor | None = None
) -> Coded:
    """Code x at nearly the smallest step whose message fits the budget."""
    d, norm = x.numel(), float(kernels.get(x.device).sum_squares(x))
    zeros = Coded(torch.frombuffer(bytearray(ZERO), dtype=torch.uint8).to(x.device), len(ZERO), norm, norm)
    if not 0 < norm < math.inf:
        best = encode_at(x, HUGE, 0.0, "auto", chunk, None)
    elif budget <= len(ZERO):
        best = zeros
    else:
        best = meet_size(norm, budget, d, lambda step: encode_at(x, step, 0.0, coder, chunk, None, layout=layout)) or zeros
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
    examples: ClassVar[tuple[str, ...]] = ("sparse_dithering(alpha=0.1)", "sparse_dithering(nu=0.1)")
    corners: ClassVar[tuple[str, ...]] = (
        "sparse_dithering(nu=0.3, coder=rans, scale=global)",
        "sparse_dithering(nu=0.5, coder=paper)",
        "sparse_dithering(alpha=0.2)",
        "sparse_dithering(bits=1.5)",
    )
    nu: float | None = None
    alpha: float | None = None
    bits: float | None = None
    coder: Coder = "auto"
    scale: Scale = "chunk"
    chunk: rans.Chunk = "auto"

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
        if self.nu is not None:
            return write_at(x, self.nu, self.coder, self.scale, self.chunk, data, None, spec.layout)
        if self.alpha is not None:
            coded = encode_to_error(x, self.alpha, self.coder, self.chunk, data, layout=spec.layout)
        else:
            coded = encode_to_size(x, data.numel(), self.coder, self.chunk, data, spec.layout)
        return coded.nbytes

    def splits(self, device: torch.device, weight: float) -> bool:
        return weight == 1.0 and (device.type == "cpu" or not self.codes_on_host(device))

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool]:
        x, residual, left = fed.x, fed.residual, fed.left
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if self.nu is not None and self.scale == "chunk":
            coded = encode_at(x, None, self.nu, self.coder, self.chunk, data, left=left, carry=residual, layout=spec.layout)
        elif self.alpha is not None:
            coded = encode_to_error(x, self.alpha, self.coder, self.chunk, data, left, residual, spec.layout)
        else:
            y = torch.add(x, residual, out=left)
            if self.nu is not None:
                step = global_step(y, self.nu, self.scale)
                coded = encode_at(y, step, self.nu, self.coder, self.chunk, data, layout=spec.layout)
            else:
                coded = encode_to_size(y, data.numel(), self.coder, self.chunk, data, spec.layout)
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
