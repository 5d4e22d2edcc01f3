"""QSGD: stochastic rounding to a few levels between minus and plus the norm of a bucket.

Maps each bucket of B coordinates to one float32 step and integers k in -s..s.

Formula: step = norm / s, k_i = floor(x_i / step + u_i) with u_i uniform on [0, 1), decoded as k_i * step. The norm is the L2
norm or the largest magnitude of the bucket; s = 2^(bits-1) - 1, so that k packs into ``bits`` bits, unless ``levels`` says
otherwise.

Guarantee: unbiased, as E floor(y + u) = y. A coordinate with fractional part f of |x_i| / step errs by step^2 f(1-f) on
average.

- L2: let y_i = |x_i| / step, so sum y_i^2 = s^2. With t = y^2, f(1-f) <= H(t) where H(t) = sqrt(t) - t up to t = 1/4 and 1/4
  beyond, which is concave; by Jensen the sum is at most B H(s^2 / B). Hence omega = sqrt(B)/s - 1 if B >= 4 s^2, else
  B / (4 s^2): sharper than the paper's min(B/s^2, sqrt(B)/s), and attained by a constant bucket when B >= 4 s^2.
- max: one coordinate has y = s and no error. For the others omega = sup sum f(1-f) / (s^2 + sum y^2); the terms separate, each
  is largest at y = 1 / (2 (1 + omega)), and n = B-1 of them give n / (4 (1 + omega)) = omega s^2, that is
  omega = (sqrt(1 + (B-1)/s^2) - 1) / 2.

Arithmetic adds little: the fraction is rounded to 16 bits, which moves a mean by 2^-17 of a step at most, and the step is
raised by 2^-22 so that no coordinate leaves -s..s; :meth:`QSGD.guarantee` includes both.

**Choose the norm with care.** With the defaults, 4 bits and L2 over 512, the relative error on Gaussian data is about 1.6,
more than sending nothing; ``norm="max"`` brings it to about 0.04, and smaller buckets help too. The defaults are those of the
paper's experiments, for comparison.

Wire (``spec/wire.md``, QSGD): ``packed`` is of fixed length: the float32 steps of all buckets, then k in two's complement,
``bits`` bits each, lowest bit first; NaN or Inf in a bucket makes its step NaN, and the whole buffer decodes to NaN.
``elias`` and ``rans`` are of variable length: a mode byte, the steps, and k by the paper's zero-run code or by a
histogram, or by histograms of scale classes where they are shorter (mode 5, ``codecs/classed.py``); where that would be longer than
packing, packed (mode 4).

Citation: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017. We differ in s (the paper uses 2^(bits-1), which does not pack), in rounding towards minus infinity after adding
u (the paper rounds magnitudes; the distribution is the same), and in keeping the signs of the Elias code in a bit field of
their own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack, classed, elias, rans, varint
from tersegrad.codecs.blocks import Layout, PackedBlocks
from tersegrad.core import host, modes, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import CLASSED, NON_FINITE, NORMAL, PACKED, ZERO
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import exactly
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class QSGD(PackedBlocks):
    """Stochastic rounding with one step per bucket.

    >>> import torch
    >>> c = QSGD(bits=4, norm="max")
    >>> message, _ = c.encode(torch.linspace(-1, 1, 1024), Spec.of(torch.linspace(-1, 1, 1024)), None, Context(seed=1))
    >>> message.nbytes  # two steps of 4 bytes and 4 bits per coordinate
    520
    """

    bits: int = 4
    bucket: int = 512
    levels: int | None = None
    norm: Literal["l2", "max"] = "l2"
    coder: Literal["packed", "elias", "rans"] = "packed"
    chunk: rans.Chunk = "auto"

    name: ClassVar[str] = "qsgd"
    wire_id: ClassVar[int] = 11
    examples: ClassVar[tuple[str, ...]] = ("qsgd(bits=4)", "qsgd(bits=4, norm=max)", "qsgd(levels=1, coder=rans)")
    corners: ClassVar[tuple[str, ...]] = (
        "qsgd(bits=2, bucket=128)",
        "qsgd(bits=8, norm=max)",
        "qsgd(bits=3, coder=elias)",
        "qsgd(levels=4, coder=rans)",
    )

    def __post_init__(self) -> None:
        require(2 <= self.bits <= 8, f"qsgd: bits must lie in 2..8, got {self.bits}")
        require(self.bucket >= 8 and self.bucket % 8 == 0, f"qsgd: bucket must be a positive multiple of 8, got {self.bucket}")
        require(self.norm in ("l2", "max"), f'qsgd: norm must be "l2" or "max", got {self.norm!r}')
        require(
            self.coder in ("packed", "elias", "rans"), f'qsgd: coder must be "packed", "elias" or "rans", got {self.coder!r}'
        )
        require(self.chunk in rans.CHUNKS, f"qsgd: {rans.CHUNK_RULE}, got {self.chunk!r}")
        most = 2 ** (self.bits - 1) - 1 if self.coder == "packed" else 127
        hint = f": raise bits or use coder=rans for {self.levels}" if self.coder == "packed" else ""
        require(self.levels is None or 1 <= self.levels <= most, f"qsgd: levels must lie in 1..{most}{hint}, got {self.levels}")

    @property
    def s(self) -> int:
        """Levels on each side of zero."""
        return 2 ** (self.bits - 1) - 1 if self.levels is None else self.levels

    @property
    def _width(self) -> int:
        """Bits of a packed code."""
        return self.bits if self.coder == "packed" else max(2, self.s.bit_length() + 1)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.wire_omega(spec))

    def wire_omega(self, spec: Spec) -> float:
        b, s = max(1, min(self.bucket, spec.numel)), self.s
        if self.norm == "max":
            omega = (math.sqrt(1 + (b - 1) / s**2) - 1) / 2
        else:
            omega = math.sqrt(b) / s - 1 if b >= 4 * s * s else b / (4 * s * s)
        return omega * (1 + 2**-20) + b / s**2 * 2**-16

    def mode(self, data: bytes) -> str | None:
        return None if self.fixed_size else modes.name(data)

    def steps_nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.bucket)

    def _sizes(self, numel: int) -> tuple[int, int]:
        """Bytes of the steps and of the packed codes."""
        return self.steps_nbytes(numel), (numel * self._width + 7) // 8

    def layout(self) -> Layout | None:
        return Layout(self.norm, self.bucket, self.s, self._width) if self.fixed_size else None

    @property
    def fixed_size(self) -> bool:
        return self.coder == "packed"

    def max_nbytes(self, spec: Spec) -> int:
        return sum(self._sizes(spec.numel)) + (self.coder != "packed")

    def codes_on_host(self, device: torch.device) -> bool:
        return not self.fixed_size and not (self.coder == "rans" and rans.codes_there(device))

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        steps, codes = self._sizes(x.numel())
        if not self.fixed_size:
            return self._write_coded(x, spec, ctx, data, steps, codes)
        self._quantise(x, ctx, data[:steps], data[steps:], self._width)
        return data.numel()

    def _quantise(self, x: Tensor, ctx: Context, steps: Tensor, codes: Tensor, width: int) -> None:
        backend = kernels.get(x.device)
        backend.quantise_blocks(x, ctx, steps, codes, rule=self.norm, block=self.bucket, levels=self.s, width=width)

    def _write_coded(self, x: Tensor, spec: Spec, ctx: Context, data: Tensor, steps: int, packed: int) -> int:
        if self.coder == "rans" and classed.asks(x.device, x.numel()):
            return self._write_there(x, spec, ctx, data, steps)
        scale = torch.empty(steps, dtype=torch.uint8, device=x.device)
        levels = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        self._quantise(x, ctx, scale, levels, 8)
        levels = levels.view(torch.int8)
        # Steps are not negative, and no sum of them reaches the end of float64: one number tells both.
        size = float(host.read(scale.view(torch.float32).sum(dtype=torch.float64)))
        if not math.isfinite(size):
            data[:1] = NON_FINITE
            return 1
        if size == 0:
            data[:1] = ZERO
            return 1
        if self.coder == "elias":
            known, coded = False, self._elias(levels)
        else:
            known, coded = classed.shorter(
                lambda begin, end: levels if end - begin == x.numel() else levels[begin:end], lambda: levels.add_(self.s).view(torch.uint8),
                2 * self.s + 1, spec.layout, x.numel(), self.chunk,
            )  # fmt: skip
        if coded.numel() < packed:
            return host.lay(data, bytes((CLASSED if known else NORMAL,)), scale, coded)
        host.lay(data, bytes((PACKED,)), scale)
        self._quantise(x, ctx, scale, data[1 + steps : 1 + steps + packed], self._width)
        return 1 + steps + packed

    def _write_there(self, x: Tensor, spec: Spec, ctx: Context, data: Tensor, steps: int) -> int:
        """The same by kernels that write a message of mode 0 where it belongs; the host waits once."""
        head, scale, out = data.split_with_sizes((1, steps, data.numel() - 1 - steps))
        levels = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        self._quantise(x, ctx, scale, levels, 8)
        begun = classed.begin(
            lambda begin, end: levels[begin:end].view(torch.int8),
            levels, "levels", 2 * self.s + 1, spec.layout, self.chunk, head, out, scale,
        )  # fmt: skip
        told = host.read(begun.told).tolist()
        _, _, some, wrong = told
        if wrong or not some:
            head[:] = NON_FINITE if wrong else ZERO
            return 1
        found = begun.finish(told)
        if found is None:
            head[:] = PACKED
            self._quantise(x, ctx, scale, out, self._width)
            return data.numel()
        with_classes, coded = found
        if with_classes:
            head[:] = CLASSED
            host.lay(out, coded)
        return 1 + steps + coded.numel()

    def _elias(self, levels: Tensor) -> Tensor:
        """The paper's code: the number of non-zeros, the gap to and magnitude of each (Elias gamma), and their signs."""
        where = levels.nonzero().view(-1)
        found = levels[where].to(torch.int64)
        gaps = where.diff(prepend=where.new_full((1,), -1))
        head = torch.frombuffer(bytearray(varint.write(where.numel())), dtype=torch.uint8).to(levels.device)
        pairs = elias.encode(torch.stack((gaps, found.abs()), dim=1).view(-1))
        return torch.cat((head, pairs, bitpack.pack((found < 0).to(torch.uint8), 1)))

    def _from_elias(self, data: Tensor, numel: int) -> Tensor:
        count, at = varint.read(data)
        if count > numel:
            raise CorruptMessage(f"{count} non-zeros among {numel} coordinates")
        pairs, used = elias.decode(data[at:], 2 * count)
        gaps, sizes = pairs.view(-1, 2).unbind(dim=1)
        at += used
        if data.numel() != at + bitpack.nbytes(count, 1):
            raise CorruptMessage(f"expected {bitpack.nbytes(count, 1)} bytes of signs, got {data.numel() - at}")
        if bool((gaps > numel).any()) or bool((sizes > self.s).any()):
            raise CorruptMessage("a gap or level is out of range")
        where = gaps.cumsum(0) - 1
        if count and int(where[-1]) >= numel:
            raise CorruptMessage("a gap leads beyond the last coordinate")
        signs = 1 - 2 * bitpack.unpack(data[at:], 1, count).to(torch.int64)
        levels = torch.zeros(numel, dtype=torch.int8, device=data.device)
        levels[where] = (sizes * signs).to(torch.int8)
        return levels.view(torch.uint8)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        steps, codes = self._sizes(spec.numel)
        if self.fixed_size:
            exactly(data, steps + codes)
            scales, packed = data.split_with_sizes((steps, codes))
            self._dequantise(scales, packed, out, self._width, weight)
            return
        if self.coder == "rans" and self._read_there(data, steps, out, weight):
            return
        mode = int(data[0]) if data.numel() else -1
        if mode in (ZERO, NON_FINITE) and data.numel() == 1:
            fill = 0.0 if mode == ZERO else math.nan
            _ = out.fill_(fill) if weight is None else out.add_(weight * fill)
            return
        with_classes = mode == CLASSED and self.coder == "rans"
        if not (mode in (NORMAL, PACKED) or with_classes) or data.numel() < 1 + steps:
            raise CorruptMessage(f"mode {mode} with {data.numel()} bytes is no QSGD message")
        scale, rest = data[1 : 1 + steps], data[1 + steps :]
        if mode == PACKED:
            if rest.numel() != codes:
                raise CorruptMessage(f"expected {codes} bytes of codes, got {rest.numel()}")
            self._dequantise(scale, rest, out, self._width, weight)
            return
        if with_classes:
            levels = classed.decode(rest, spec.numel, -self.s, self.s, spec.layout).to(torch.int8).view(torch.uint8)
        elif self.coder == "elias":
            levels = self._from_elias(rest, spec.numel)
        else:
            levels, used = rans.decode(rest, spec.numel, 2 * self.s + 1)
            if used != rest.numel():
                raise CorruptMessage(f"{rest.numel() - used} bytes after the last symbol")
            # Wraps around: the bytes below zero then read as negative int8.
            levels.sub_(self.s)
        self._dequantise(scale, levels, out, 8, weight)

    def _read_there(self, data: Tensor, steps: int, out: Tensor, weight: float | None) -> bool:
        """Read a message of mode 0 on a device that has a kernel for that; whether it is one, as far as is known."""
        if data.numel() <= 1 + steps or out.numel() == 0 or not kernels.faster(out.device, "coded_levels_decode"):
            return False
        at_once = weight is None and self.bucket % 512 == 0
        into = out if at_once else torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
        if any(trust.numbers(kernels.get(out.device).coded_levels_decode(data, self.s, self.bucket, into))):
            return False
        if into is not out:
            self._dequantise(data[1 : 1 + steps], into, out, 8, weight)
        return True

    def _dequantise(self, steps: Tensor, codes: Tensor, out: Tensor, width: int, weight: float | None) -> None:
        kernels.get(out.device).dequantise_blocks(steps, codes, out, block=self.bucket, width=width, weight=weight)
