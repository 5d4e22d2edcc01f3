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

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, check_size, flat_float32
from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class _IntBlock(Configuration):
    """What the two widths share; ``block`` is the number of coordinates of one step."""

    block: int = 256

    fixed_size: ClassVar[bool] = True
    width: ClassVar[int] = 8
    bfloat16: ClassVar[bool] = False  # steps of 2 bytes instead of 4

    def __post_init__(self) -> None:
        require(
            self.block >= 8 and self.block % 8 == 0, f"{self.name}: block must be a positive multiple of 8, got {self.block}"
        )

    @property
    def levels(self) -> int:
        """Q: levels on each side of zero."""
        return (1 << self.width - 1) - 1

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def guarantee(self, spec: Spec) -> Guarantee:
        eps = 2**-8 if self.bfloat16 else 2**-22
        others = (min(self.block, max(spec.numel, 1)) - 1) * ((1 + eps) / self.levels) ** 2 / 4
        return Guarantee("contractive", (eps**2 + others) / (1 + others), sure=True)

    def _sizes(self, numel: int) -> tuple[int, int]:
        """Bytes of the steps and of the codes."""
        return (2 if self.bfloat16 else 4) * -(-numel // self.block), (numel * self.width + 7) // 8

    def max_nbytes(self, spec: Spec) -> int:
        return sum(self._sizes(spec.numel))

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        x = flat_float32(x, spec)
        steps, codes = self._sizes(x.numel())
        data = out if out is not None else torch.empty(steps + codes, dtype=torch.uint8, device=x.device)
        kernels.get(x.device).quantise_blocks(
            x,
            ctx,
            data[:steps],
            data[steps : steps + codes],
            rule="nearest",
            block=self.block,
            levels=self.levels,
            width=self.width,
            bfloat16=self.bfloat16,
        )
        return Message(data, steps + codes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(spec.numel, dtype=torch.float32, device=message.data.device)
        return self._decode(message, spec, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._decode(message, spec, out, weight)

    def _decode(self, message: Message, spec: Spec, out: Tensor, weight: float | None) -> Tensor:
        steps, codes = self._sizes(spec.numel)
        check_size(message, steps + codes)
        data = message.payload
        return kernels.get(out.device).dequantise_blocks(
            data[:steps], data[steps:], out, block=self.block, width=self.width, bfloat16=self.bfloat16, weight=weight
        )


@dataclasses.dataclass(frozen=True)
class Int8(_IntBlock):
    """Eight bits a coordinate and a float32 step a block.

    >>> Int8().guarantee(Spec.flat(1000))
    Guarantee(kind='contractive', value=0.00393..., sure=True)
    """

    block: int = 256

    name: ClassVar[str] = "int8"

    @property
    def wire_id(self) -> int:
        return 5


@dataclasses.dataclass(frozen=True)
class Int4(_IntBlock):
    """Four bits a coordinate and a bfloat16 step a block: 4.5 bits with the default.

    >>> str(Int4(block=64).guarantee(Spec.flat(1000)))
    'C(alpha=0.2447)'
    """

    block: int = 32

    name: ClassVar[str] = "int4"
    width: ClassVar[int] = 4
    bfloat16: ClassVar[bool] = True

    @property
    def wire_id(self) -> int:
        return 6
