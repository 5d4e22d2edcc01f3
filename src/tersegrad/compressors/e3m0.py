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
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.core.text import require


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
        scales, codes = self._parts(data, x.numel())
        kernels.get(x.device).powers_encode(x, self.block, scales, codes)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        scales, codes = self._parts(data, out.numel())
        kernels.get(out.device).powers_decode(scales, codes, self.block, out, weight)

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head = 4 * -(-numel // self.block)
        return data[:head], data[head:]

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", (1 / 9 + min(self.block, max(spec.numel, 1)) * 2.0**-14) * (1 + 2.0**-20), sure=True)
