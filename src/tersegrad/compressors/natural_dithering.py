"""Natural dithering: random rounding to a few powers of two of the norm.

Maps     x_i to sign(x_i) ||x|| times one of 0, 2^(1-s), ..., 1/4, 1/2, 1, without bias; the norm is the L2 norm of the buffer
         or of each bucket, s = ``levels``.
Formula  with y = |x_i| / ||x|| between neighbouring levels a <= y <= b: b with probability (y - a) / (b - a), else a.
Promise  unbiased with omega = 1/8 + 2^(1-s) sqrt(d) min(1, 2^(1-s) sqrt(d)), d the coordinates under one norm: between powers
         of two the variance is at most y^2 / 8, as in natural compression, which adds up to at most 1/8; below t = 2^(1-s) it is
         y (t - y), whose sum is at most t ||y||_1 <= t sqrt(d) and at most d t^2 / 4. Probabilities have 16 bits, nearest:
         a bias of at most 2^-16 of the gap between levels, and omega grows by at most 2^-19 + d t^2 2^-16, included.
Wire     packed: each norm as float32 (NaN: the buffer held NaN or Inf), then ceil(log2(2 s + 1)) bits per coordinate, LSB-first:
         level << 1 | sign, level 0 is zero and k is 2^(k - s).
         rans: a mode byte. 0: the norms, then the rANS code of these codes, alphabet 2 s + 2. 1: all zero. 2: not finite. 4:
         the packed message, where coding would not be shorter. 5, where scale classes are shorter (``codecs/classed.py``): the
         norms, then the levels with their signs.
Source   Horvath et al., "Natural compression for distributed deep learning", 2019 (arXiv 1905.10988), Theorem 7 with p = 2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import classed, rans
from tersegrad.core import host, modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import CLASSED, NON_FINITE, NORMAL, PACKED, ZERO
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import Stateless, exactly
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class NaturalDithering(Stateless):
    """Random powers of two of the norm: 5 bits per coordinate for ``levels=8`` packed, fewer with ``coder="rans"``.

    One norm for a long buffer wastes the levels: on 2^20 Gaussian coordinates ``levels=8`` has error 5.4, but 0.083 with
    ``bucket=512`` (3.4 bits with rans).

    >>> x = torch.tensor([3.0, -4.0, 0.0, 0.0])
    >>> message, _ = NaturalDithering().encode(x, Spec.of(x), None, Context(seed=1))
    >>> message.nbytes, NaturalDithering().decode(message, Spec.of(x), Context(seed=1))
    (7, tensor([ 2.5000, -5.0000,  0.0000,  0.0000]))
    """

    name: ClassVar[str] = "natural_dithering"
    wire_id: ClassVar[int] = 10
    examples: ClassVar[tuple[str, ...]] = ("natural_dithering",)
    corners: ClassVar[tuple[str, ...]] = ("natural_dithering(levels=4, coder=rans)",)
    levels: int = 8
    bucket: int | None = None
    coder: Literal["packed", "rans"] = "packed"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(1 <= self.levels <= 64, f"natural_dithering has 1 to 64 levels, got levels={self.levels}")
        good = self.bucket is None or (self.bucket > 0 and self.bucket % 64 == 0)
        require(good, f"natural_dithering buckets are multiples of 64, got bucket={self.bucket}: leave it out for one norm")
        require(self.coder in ("packed", "rans"), f'natural_dithering has coder="packed" and coder="rans", got {self.coder!r}')
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    @property
    def width(self) -> int:
        """Bits of a packed code."""
        return (2 * self.levels + 1).bit_length()

    @property
    def fixed_size(self) -> bool:
        return self.coder == "packed"

    def max_nbytes(self, spec: Spec) -> int:
        return (self.coder == "rans") + self._norms(spec.numel) + -(-spec.numel * self.width // 8)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.wire_omega(spec))

    def wire_omega(self, spec: Spec) -> float:
        d = min(self._bucket(spec.numel), spec.numel)
        reach = 2.0 ** (1 - self.levels) * math.sqrt(d)
        return 1 / 8 + reach * min(1.0, reach) + 2.0**-19 + reach**2 * 2.0**-16

    def mode(self, data: bytes) -> str | None:
        return None if self.fixed_size else modes.name(data)

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(64, -(-numel // 64) * 64)

    def _norms(self, numel: int) -> int:
        """Bytes of the norms."""
        return 4 * -(-numel // self._bucket(numel))

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        numel, encode = x.numel(), kernels.get(x.device).natural_levels_encode
        bucket, most = self._bucket(numel), data.numel()
        if self.fixed_size:
            encode(x, data, bucket, self.levels, self.width, ctx)
            return most
        head = self._norms(numel)
        wide = torch.empty(head + numel, dtype=torch.uint8, device=x.device)
        encode(x, wide, bucket, self.levels, 8, ctx)
        codes = wide[head:]
        if bool(wide[:head].clone().view(torch.float32).isnan().any()):
            data[0] = NON_FINITE
            return 1
        if not bool(codes.any()):
            data[0] = ZERO
            return 1

        def levels(begin: int, end: int) -> Tensor:
            part = codes[begin:end]
            return (part >> 1).view(torch.int8) * (1 - 2 * (part & 1).view(torch.int8))

        alphabet, out = 2 * self.levels + 2, data[1 + head :]
        found: tuple[bool, Tensor] | None
        if classed.asks(x.device, numel):
            begun = classed.begin(levels, codes, "folded", alphabet, spec.layout, self.chunk, data[:1], out)
            found = begun.finish(host.read(begun.told).tolist())
        else:
            found = classed.shorter(levels, lambda: codes, alphabet, spec.layout, numel, self.chunk)
        if found is None or found[1].numel() >= out.numel():
            data[0] = PACKED
            encode(x, data[1:], bucket, self.levels, self.width, ctx)
            return most
        known, coded = found
        data[0] = CLASSED if known else NORMAL
        data[1 : 1 + head] = wide[:head]
        # With one table it may lie there already.
        if coded.data_ptr() != out.data_ptr():
            out[: coded.numel()] = coded
        return 1 + head + coded.numel()

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        width = self.width
        if self.fixed_size:
            exactly(data, self.max_nbytes(spec))
        else:
            data, width = self._expand(data, spec)
        kernels.get(data.device).natural_levels_decode(data, out, self._bucket(spec.numel), self.levels, width, weight)

    def _expand(self, data: Tensor, spec: Spec) -> tuple[Tensor, int]:
        """The packed message inside one of mode 0, 1, 2, 4 or 5, and the width of its codes."""
        numel = spec.numel
        head = self._norms(numel)
        mode = int(data[0]) if data.numel() else -1
        if mode == PACKED and data.numel() == 1 + head + -(-numel * self.width // 8):
            return data[1:], self.width
        wide = torch.zeros(head + numel, dtype=torch.uint8, device=data.device)
        if mode == ZERO and data.numel() == 1:
            return wide, 8
        if mode == NON_FINITE and data.numel() == 1:
            wide[:head] = torch.full((head // 4,), math.nan, device=data.device).view(torch.uint8)
            return wide, 8
        if mode not in (NORMAL, CLASSED) or data.numel() < 1 + head:
            raise CorruptMessage(f"a message of mode {mode} and {data.numel()} bytes does not fit {numel} coordinates")
        wide[:head] = data[1 : 1 + head]
        if mode == CLASSED:
            integers = classed.decode(data[1 + head :], numel, -self.levels, self.levels, spec.layout).to(torch.int8)
            # Twice the magnitude at most 128, plus the sign bit.
            wide[head:] = (integers.abs().view(torch.uint8) << 1) + (integers.view(torch.uint8) >> 7)
            return wide, 8
        codes, used = rans.decode(data[1 + head :], numel, 2 * self.levels + 2)
        if used != data.numel() - 1 - head:
            raise CorruptMessage("bytes are left after the codes")
        wide[head:] = codes
        return wide, 8
