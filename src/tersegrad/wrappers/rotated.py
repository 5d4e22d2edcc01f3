"""Rotation: quantise in a random basis, where no coordinate stands out.

Maps: y = R x, sends C(y), decodes R^T C(y). R multiplies by random signs and applies the normalised Walsh-Hadamard transform to
blocks of ``block`` coordinates; the rest is padded with zeros to the next power of two. A coordinate of y is at most
sqrt(2 ln(2n/p)/n) ||x|| with probability 1 - p, so scales that follow the largest coordinate (int8, int4, fp8, sign) waste nothing
on outliers.

Guarantee: the inner one's for the padded size, also when it holds surely. With P the padding, R = H D P has R^T R = I, so
||R^T C(Rx) - x|| = ||R^T (C(Rx) - Rx)|| <= ||C(Rx) - Rx||, and ||Rx|| = ||x||: alpha carries over for every outcome and every
rotation; E R^T C(Rx) = R^T R x = x: unbiasedness and omega carry over. Floats round: each direction errs by at most
(log2 n + 2) 2^-24 ||x||, about 1e-6.

Wire: ``wrappers/transformed.py``. Signs are drawn from the context (purpose ROTATION, shared sender) and never sent.

Citation: Ailon and Chazelle, "Approximate nearest neighbors and the fast Johnson-Lindenstrauss transform", STOC 2006; Suresh et al.,
"Distributed mean estimation with limited communication", ICML 2017. Ours rotates blocks that fit the first-level cache, and draws
fresh signs for every step and buffer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.core import buffers
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.core.text import require
from tersegrad.kernels.reference.hadamard import rotated_numel
from tersegrad.wrappers.transformed import SHRINK, Transformed, enlarged, ranges

LARGEST_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rotated(Transformed):
    """Randomised Hadamard rotation around any compressor that keeps nothing per coordinate.

    >>> from tersegrad.compressors import Int4
    >>> print(Rotated(Int4(), block=1024))
    rotated(int4, block=1024)
    """

    name: ClassVar[str] = "rotated"
    wire_id: ClassVar[int] = 65
    examples: ClassVar[tuple[str, ...]] = ("rotated(qsgd(bits=4))",)
    corners: ClassVar[tuple[str, ...]] = ("rotated(int4)", "rotated(qsgd(bits=3, norm=max))")
    against_values: ClassVar[str] = "and each step rotates into another basis where it means nothing"

    block: int = 4096

    def __post_init__(self) -> None:
        power_of_two = 0 < self.block <= LARGEST_BLOCK and self.block & (self.block - 1) == 0
        require(power_of_two, f"block must be a power of two up to {LARGEST_BLOCK}, got {self.block}")
        super().__post_init__()

    def inner_spec(self, spec: Spec) -> Spec:
        """What the inner compressor sees: a flat vector of the padded size."""
        return Spec.flat(rotated_numel(spec.numel, self.block))

    def forward(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> Tensor:
        return kernels.get(x.device).rotate(x, y, self.block, ctx.shared())

    def forward_there(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> tuple[Tensor, Tensor]:
        # One pass over x, and a second one that ends at once unless x is large.
        ops, shared = kernels.get(x.device), ctx.shared()
        finite, big = ranges(ops.rotate(x, y, self.block, shared))
        ops.rotate_where(x, y, self.block, shared, big, SHRINK)
        return finite, big

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        y, big = self.opened(message, spec, ctx, out if rotated_numel(spec.numel, self.block) == spec.numel else None)
        kernels.get(y.device).unrotate(y, out, self.block, ctx.shared())
        return enlarged(out, big)

    def rounding(self) -> float:
        return (math.log2(self.block) + 2) * 2.0**-24
