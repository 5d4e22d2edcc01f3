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
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import gaussian, levels, rans
from tersegrad.core import buffers, host, modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require
from tersegrad.kernels.reference import subtractive
from tersegrad.kernels.reference.subtractive import NON_FINITE, RAW, SEGMENTS, ZERO

Coder = Literal["auto", "rans"]
Scale = Literal["chunk", "global"]
NAMES = {
    NON_FINITE: modes.NAMES[modes.NON_FINITE],
    ZERO: modes.NAMES[modes.ZERO],
    RAW: modes.NAMES[modes.RAW],
    SEGMENTS: "rANS segments",
}
# The longest vectors that also try the sequential codes; the first word of such a message is its step.
SHORT = 1 << 10
# Messages of fewer bytes have none shorter with rANS tables and lanes.
WORTH_TABLES = 300


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
        return 5 + 4 * len(subtractive.segments_of(spec.numel, self.scale == "global")) + 4 * spec.numel

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def wire_omega(self, spec: Spec) -> float:
        return float(self.omega)

    def mode(self, data: bytes) -> str:
        return NAMES.get(int.from_bytes(data[:4], "little"), "short") if len(data) >= 4 else "missing"

    def codes_on_host(self, device: torch.device) -> bool:
        return not kernels.faster(device, "subtractive_encode", "subtractive_decode")

    def written_on_host(self, spec: Spec, device: torch.device) -> bool:
        return spec.numel <= SHORT or self.codes_on_host(device)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        best = self._short(x, ctx) if self.coder == "auto" and x.numel() <= SHORT else None
        if best is not None and best.numel() < WORTH_TABLES:
            return host.lay(data, best)
        run = kernels.get(x.device)
        nbytes = run.subtractive_encode(x, self.omega, self.scale == "global", self._chunk, ctx, data, spec.layout)
        return nbytes if best is None or int(nbytes) < best.numel() else host.lay(data, best)

    def splits(self, device: torch.device, weight: float) -> bool:
        return device.type != "cpu" and not self.codes_on_host(device)

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool | Tensor]:
        y = torch.add(fed.x, fed.residual, out=fed.left)
        if self.written_on_host(spec, y.device):
            message, _ = self.encode(y, spec, None, ctx, out=out)
            return message, kernels.get(y.device).all_finite(self.decode_add(message, spec, ctx, y, -fed.weight))
        data, run = buffers.byte_buffer(out, self.max_nbytes(spec), y.device), kernels.get(y.device)
        nbytes = run.subtractive_encode(y, self.omega, self.scale == "global", self._chunk, ctx, data, spec.layout, fed.weight)
        # A message without levels may be of numbers that are not finite.
        return Message(data if out is None else out, nbytes), int(nbytes) > 4 or run.all_finite(y)

    @property
    def _chunk(self) -> int:
        return 0 if self.chunk == "auto" else self.chunk

    def _short(self, x: Tensor, ctx: Context) -> Tensor | None:
        """The shortest of the messages without tables; none where the vector is zero, not finite or too large for its step."""
        run, d = kernels.get(x.device), x.numel()
        square = float(run.sum_squares(x))
        if square == 0 or not math.isfinite(square):
            return None
        step = subtractive.step_of(self.omega, d, square)
        q = buffers.empty(d, torch.int32, x.device)
        if int(run.subtractive_quantise(x, step, ctx, 0, q)) < 0:
            return None
        head = torch.frombuffer(bytearray(struct.pack("<f", step)), dtype=torch.uint8)
        codes = (gaussian.encode(q, _sizes(ctx, d, x.device), self.sigma), levels.encode(q, "adaptive"))
        best = min((torch.cat([head, code]) for code in codes), key=Tensor.numel)
        most = self.max_nbytes(Spec.flat(d))
        if most < best.numel() < WORTH_TABLES:
            subtractive.plain_levels(q, [step], best := torch.empty(most, dtype=torch.uint8))
        return best

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        d, run = out.numel(), kernels.get(out.device)
        if not 4 <= data.numel() <= self.max_nbytes(Spec.flat(d)):
            raise CorruptMessage(f"{data.numel()} bytes are no dithered message of {d} coordinates")
        head = struct.unpack("<I", bytes(data[:4].tolist()))[0] if d <= SHORT else SEGMENTS
        if head in NAMES:
            run.subtractive_decode(data, self.scale == "global", ctx, out, weight, spec.layout)
            return
        step = struct.unpack("<f", struct.pack("<I", head))[0]
        if not TINY <= step <= HUGE or d == 0 or data.numel() < 5:
            raise CorruptMessage(f"not a short message of {d} coordinates with the step {step}")
        body = data[4:].contiguous()
        if int(body[0]) & 1:
            q = levels.decode(body, d)
        else:
            q = gaussian.decode(body, _sizes(ctx, d, out.device), self.sigma)
        run.subtractive_restore(q, step, ctx, 0, out, weight)


def _sizes(ctx: Context, d: int, device: torch.device) -> Tensor:
    """|U| of a short vector, in 15 bits."""
    u = kernels.get(device).random_u16(ctx, Purpose.DITHER, 0, d, device)
    return torch.where(u >= 32768, u - 32768, 32767 - u)
