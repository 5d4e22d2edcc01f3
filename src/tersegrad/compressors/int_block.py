"""Blockwise int8 and int4: the nearest of 2 Q + 1 levels, with one step per block of B coordinates.

Maps each block to its step and integers k in -Q..Q; Q = 127 (int8) or 7 (int4).

Formula: M = the block's largest magnitude, step = M / Q, k_i = round(x_i / step) half to even, decoded as k_i * step. Int8
sends the step as float32; int4, whose blocks are short, as bfloat16 rounded to nearest.

Guarantee: a sure contraction. Let step = (1 + e) M / Q, |e| <= eps, with eps = 2^-8 for bfloat16 and 2^-22 for float32 (which
also covers the roundings of 1/step and of the products). Then |x_i| / step <= Q / (1 - eps) < Q + 1/2, so no level leaves
-Q..Q. The largest coordinate decodes to Q step and errs by at most eps M. Every other errs by at most step/2, and by at most
|x_i| (zero is a level), so with n = B - 1, r = ((1 + eps) / Q)^2 and b_i = x_i^2 / M^2,

    ||C(x) - x||^2 / ||x||^2 <= (eps^2 + sum min(b_i, r/4)) / (1 + sum b_i) <= (eps^2 + n r / 4) / (1 + n r / 4) = alpha,

because the middle grows in each b_i up to r/4 and falls beyond. Without rounding of the step, alpha = (B-1) / (4 Q^2 + B-1),
attained by one large coordinate and all others at half a step. Blocks add up: the worst block bounds the buffer.

Wire (``spec/wire.md``, int8 and int4): of fixed length: the steps of all blocks (4 or 2 bytes each), then k in two's
complement, 8 or 4 bits each, lowest bits first. NaN or Inf in a block makes its step NaN, and the whole buffer decodes to
NaN.

Citation: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for the blocks; the levels here are linear
and symmetric.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.blocks import Layout, PackedBlocks
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class _IntBlock(PackedBlocks, FixedRate):
    """What the two widths share; ``block`` is the number of coordinates of one step."""

    block: int = 256

    width: ClassVar[int] = 8
    # Steps of 2 bytes instead of 4.
    bfloat16: ClassVar[bool] = False

    def __post_init__(self) -> None:
        good = self.block >= 8 and self.block % 8 == 0
        require(good, f"{self.name}: block must be a positive multiple of 8, got {self.block}")

    @property
    def levels(self) -> int:
        """Q: levels on each side of zero."""
        return (1 << self.width - 1) - 1

    def guarantee(self, spec: Spec) -> Guarantee:
        eps = 2**-8 if self.bfloat16 else 2**-22
        others = (min(self.block, max(spec.numel, 1)) - 1) * ((1 + eps) / self.levels) ** 2 / 4
        return Guarantee("contractive", (eps**2 + others) / (1 + others), sure=True)

    def layout(self) -> Layout:
        return Layout("nearest", self.block, self.levels, self.width, self.bfloat16)

    def steps_nbytes(self, numel: int) -> int:
        return (2 if self.bfloat16 else 4) * -(-numel // self.block)

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, ...]:
        """The steps and the codes of a message; one call for both takes two thirds of the time of two slices."""
        steps = self.steps_nbytes(numel)
        return data.split_with_sizes((steps, data.numel() - steps))

    def nbytes(self, numel: int) -> int:
        return self.steps_nbytes(numel) + (numel * self.width + 7) // 8

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        steps, codes = self._parts(data, x.numel())
        kernels.get(x.device).quantise_blocks(
            x,
            ctx,
            steps,
            codes,
            rule="nearest",
            block=self.block,
            levels=self.levels,
            width=self.width,
            bfloat16=self.bfloat16,
        )

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        steps, codes = self._parts(data, out.numel())
        kernels.get(out.device).dequantise_blocks(
            steps, codes, out, block=self.block, width=self.width, bfloat16=self.bfloat16, weight=weight
        )


@dataclasses.dataclass(frozen=True)
class Int8(_IntBlock):
    """Eight bits per coordinate and a float32 step per block.

    >>> Int8().guarantee(Spec.flat(1000))
    Guarantee(kind='contractive', value=0.00393..., sure=True)
    """

    block: int = 256

    name: ClassVar[str] = "int8"
    wire_id: ClassVar[int] = 5
    examples: ClassVar[tuple[str, ...]] = ("int8",)


@dataclasses.dataclass(frozen=True)
class Int4(_IntBlock):
    """Four bits per coordinate and a bfloat16 step per block: 4.5 bits with the default.

    >>> str(Int4(block=64).guarantee(Spec.flat(1000)))
    'C(alpha=0.2447)'
    """

    block: int = 32

    name: ClassVar[str] = "int4"
    wire_id: ClassVar[int] = 6
    examples: ClassVar[tuple[str, ...]] = ("int4",)
    corners: ClassVar[tuple[str, ...]] = ("int4(block=128)",)
    width: ClassVar[int] = 4
    bfloat16: ClassVar[bool] = True
