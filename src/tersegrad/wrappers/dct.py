"""Cosine transform: compress the coefficients of an orthonormal block DCT.

Maps: y = D x, sends C(y), decodes D^T C(y). D transforms every tile of a matrix in both dimensions, and every run of a vector, by the
orthonormal DCT-II; a dimension is cut into pieces of its largest divisor up to ``block`` (``codecs/tiles.py``). The coefficients of a
tile lie where the tile was, so that a compressor by tiles (``chunk_top_k``) sees those of one transform together. Momenta of trained
networks concentrate in few of them.

Guarantee: the inner one's. D is orthogonal, so errors and norms carry over, for every outcome. Floats round: a pass errs by 2^-24 of
the norm from its float32 results and sqrt(n) 2^-24 from the rounded basis, twice in each direction.

Wire: ``wrappers/transformed.py``. Sums are float64 in a fixed order, so that all ranks decode the same bits.

Citation: Ahmed, Natarajan, Rao, "Discrete cosine transform", IEEE Trans. Computers 1974; Peng, Quesnelle, Kingma, "DeMo: decoupled
momentum optimization", 2024.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import tiles
from tersegrad.codecs.tiles import Region
from tersegrad.core import buffers
from tersegrad.core.numbers import HUGE
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.core.text import require
from tersegrad.wrappers.transformed import SHRINK, Transformed, enlarged, ranges

LARGEST_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class DCT(Transformed):
    """A block cosine transform around any compressor that keeps nothing per coordinate.

    >>> from tersegrad.compressors import ChunkTopK
    >>> print(DCT(ChunkTopK(k=4, values="sign")))
    dct(chunk_top_k(k=4, values=sign))
    """

    name: ClassVar[str] = "dct"
    wire_id: ClassVar[int] = 68
    examples: ClassVar[tuple[str, ...]] = ("dct(chunk_top_k(k=32, vector=64))",)
    corners: ClassVar[tuple[str, ...]] = ("dct(int8)", "dct(chunk_top_k(k=4, values=sign), block=16)")
    against_values: ClassVar[str] = "which a change of compressor would take for a gradient"

    block: int = 64

    def __post_init__(self) -> None:
        require(1 <= self.block <= LARGEST_BLOCK, f"block lies between 1 and {LARGEST_BLOCK}, got {self.block}")
        super().__post_init__()

    def regions(self, spec: Spec) -> tuple[Region, ...]:
        """The tiles that are transformed."""
        return tiles.regions(spec, self.block, vector=self.block, run=self.block)

    def inner_spec(self, spec: Spec) -> Spec:
        return spec.in_float32

    def forward(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> Tensor:
        ops = kernels.get(x.device)
        ops.cosine_forward(x, tiles.table(self.regions(spec)), y)
        return ops.abs_max(x)

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        return self._back(self.decode_sent(message, spec, ctx), spec, out)

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor:
        """The coefficients."""
        return enlarged(*self.opened(message, spec, ctx))

    def restore(self, sent: Tensor, spec: Spec) -> Tensor:
        return self._back(sent, spec, buffers.empty(spec.numel, torch.float32, sent.device))

    def _back(self, sent: Tensor, spec: Spec, out: Tensor) -> Tensor:
        ops, table = kernels.get(sent.device), tiles.table(self.regions(spec))
        # Finite coefficients near the largest float may leave its range, between the two passes too.
        _, big = ranges(ops.abs_max(sent))
        if sent.is_cpu and not bool(big):
            return ops.cosine_inverse(sent, table, out).clamp_(-HUGE, HUGE)
        factor = torch.where(big, SHRINK, 1.0)
        return ops.cosine_inverse(sent * factor, table, out).div_(factor).clamp_(-HUGE, HUGE)

    def rounding(self) -> float:
        return 2 * (math.sqrt(self.block) + 2) * 2.0**-24
