"""e3m0: a sign and a power of two in four bits, with a scale per block.

Formula. With s the largest magnitude of a block, x_i becomes the nearest of 0 and +-s 2^-j, j = 0 .. 6; ties go to the larger one.

Guarantee. Contractive, for every x. From 3/4 s 2^-6 on a coordinate errs by at most a third of itself. Below, it errs by at most
s 2^-7, so that n of them add n s^2 2^-14 <= n 2^-14 ||x||^2: alpha = 1/9 + n 2^-14 for blocks of n, 0.127 for 256. (On Gaussian vectors
the error is 0.041.)

Wire (``spec/wire.md``, "e3m0")::

    float32 scales, one per block; then a code of four bits per coordinate: sign bit (8), and 7 - j, or 0 for zero

Citation. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, which exchanges outer gradients so. Four bits are
few, but a coder that knows gradients needs 2.6 for the same error: ``sparse_dithering(alpha=0.041)``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack
from tersegrad.core.numbers import HUGE
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.core.text import require

# The smallest scale whose reciprocal is a float32, and its smallest level still a normal number.
_LEAST = 2.0**-120


@dataclasses.dataclass(frozen=True)
class E3M0(FixedRate):
    """Sign and three bits of exponent per coordinate, a float32 scale per ``block``.

    >>> import torch
    >>> x, c = torch.tensor([4.0, -1.1, 0.01, 0.7]), E3M0()
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 4.0000, -1.0000,  0.0000,  0.5000])
    """

    name: ClassVar[str] = "e3m0"
    wire_id: ClassVar[int] = 23
    examples: ClassVar[tuple[str, ...]] = ("e3m0",)
    corners: ClassVar[tuple[str, ...]] = ("e3m0(block=64)",)

    block: int = 256

    def __post_init__(self) -> None:
        require(
            8 <= self.block <= 4096 and self.block % 8 == 0, f"e3m0: block is a multiple of 8 from 8 to 4096, got {self.block}"
        )

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + -(-numel // 2)

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        scales = kernels.get(x.device).block_abs_max(x, self.block)
        finite = torch.isfinite(scales)
        scales = torch.where(scales < _LEAST, 0.0, scales)
        each = self._each(scales.clamp(min=_LEAST), x.numel())
        size = x.abs() * (1.0 / each)
        exponent = ((size.view(torch.int32) + 0x00400000) >> 23) - 120
        codes = torch.where(size < 2.0**-7, 0, exponent.clamp_(1, 7)) + 8 * torch.signbit(x).int()
        # A block that is not finite, or too small, has a scale that says so, whatever the codes are.
        codes = torch.where(self._each(finite & (scales > 0), x.numel()), codes, 0)
        head = 4 * scales.numel()
        data[:head] = torch.where(finite, scales, math.nan).view(torch.uint8)
        data[head:] = bitpack.pack(codes.to(torch.uint8), 4)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        numel = out.numel()
        head = 4 * -(-numel // self.block)
        scales = data[:head].clone().view(torch.float32)
        codes = bitpack.unpack(data[head:], 4, numel, check=False).int()
        power = torch.where(codes % 8 == 0, 0, (codes % 8 + 120) << 23).view(torch.float32)
        values = (power * self._each(scales, numel)).clamp_(-HUGE, HUGE)
        values = torch.where(codes > 7, -values, values)
        values = torch.where(torch.isfinite(scales).all(), values, math.nan)
        _ = out.copy_(values) if weight is None else out.add_(values * weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", (1 / 9 + min(self.block, max(spec.numel, 1)) * 2.0**-14) * (1 + 2.0**-20), sure=True)

    def _each(self, values: Tensor, numel: int) -> Tensor:
        """A block's value for each of its coordinates."""
        return values.repeat_interleave(self.block)[:numel]
