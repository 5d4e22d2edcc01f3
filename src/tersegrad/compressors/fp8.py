"""fp8: e4m3 numbers with one power-of-two scale per block, as in the OCP microscaling (MX) formats.

Maps     every coordinate to the nearest e4m3 number (finite-only variant, largest 448) times its block's scale, ties to even.
Formula  C(x)_i = c_b * e4m3(x_i / c_b) for i in block b, where c_b is the power of two that puts the block's largest magnitude
         into (232, 464] (and c_b >= 2^-126). 464 is the largest number that rounds to 448: nothing is clipped.
         Products with c_b that would round up to 2^128 become float32's largest number, which lies nearer to x_i.
Promise  contractive, surely, with alpha = 1/289 + (block - 1) 2^-20 / 232^2. Coordinates with |x_i / c_b| >= 2^-6 have 4
         significant bits: an error of at most |x_i| / 17. Smaller ones are subnormal: at most 2^-10 c_b, while the block's
         largest exceeds 232 c_b. Errors of blocks add, so the bound holds for the whole buffer.
Wire     ceil(d / block) scale bytes in E8M0 (2^(byte - 127); 255 is NaN), then one e4m3 byte per coordinate. 8.25 bits at
         block = 32. If the buffer holds NaN or Inf, all scales are 255 and the codes 0.
Source   OCP Microscaling Formats (MX) v1.0, 2023; Micikevicius et al., "FP8 formats for deep learning", 2022. MX takes the
         exponent of the largest magnitude and clips between 448 and 512 (up to 12.5 %); here such a block takes twice the scale.
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
class FP8(FixedRate):
    """Round to e4m3 in blocks with a shared exponent: 8.25 bits per coordinate.

    >>> import torch
    >>> x = torch.tensor([1.0, 3.14159265, -1e-2])
    >>> message, _ = FP8().encode(x, Spec.of(x), None, Context())
    >>> message.nbytes, FP8().decode(message, Spec.of(x), Context())
    (4, tensor([ 1.0000,  3.2500, -0.0098]))
    """

    name: ClassVar[str] = "fp8"
    wire_id: ClassVar[int] = 4
    examples: ClassVar[tuple[str, ...]] = ("fp8",)
    block: int = 32

    def __post_init__(self) -> None:
        good = 16 <= self.block <= 65536 and self.block & (self.block - 1) == 0
        require(good, f"fp8 blocks are powers of two from 16 to 65536, got block={self.block}: 32 is the MX format's")

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) + numel

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).fp8_encode(x, data, self.block)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        kernels.get(data.device).fp8_decode(data, out, self.block, weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 1 / 289 + (self.block - 1) * 2.0**-20 / 232**2, sure=True)
