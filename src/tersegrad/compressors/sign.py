"""Scaled sign: one bit per coordinate and the mean magnitude of every block.

Maps     each block of B coordinates to its signs times ||x||_1 / B, the mean magnitude; the sign of 0 is +.
Formula  C(x) = (||x||_1 / B) sign(x), block by block.
Promise  contractive, surely, with alpha = 1 - 1/B: ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / B because the scale is the best one
         for these signs, and ||x||_1 >= ||x||_2; blocks add up. The scale's rounding to float32 adds at most 2^-48. One-hot blocks
         attain it; for Gaussian data the error is 1 - 2/pi = 0.363. Tensors of a gradient differ in scale by orders of magnitude, and
         a scale per 4096 coordinates, at 1/128 bit, keeps them apart.
Wire     the scales as float32 (all NaN: the buffer held NaN or Inf), then one bit per coordinate, set where x_i < 0; bit i is bit
         i % 8 of byte i / 8, padding is zero. No coordinates: no bytes.
Source   Seide et al., "1-bit SGD", Interspeech 2014; the scaled form is that of Karimireddy et al., "Error feedback fixes
         SignSGD", ICML 2019, which has one scale (``block=none``). The l1 norms are summed in float64 in a fixed order.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.casts import Summed
from tersegrad.core.buffers import byte_buffer
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Omega, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.core.text import require
from tersegrad.kernels.schema import Cast

# The operation that splits in one pass takes blocks up to this length.
LONGEST_SPLIT = 4096


@dataclasses.dataclass(frozen=True)
class Sign(Summed, FixedRate):
    """Signs and a scale per ``block`` (a multiple of 64; none: all): 1 bit per coordinate; meant for error feedback.

    >>> import torch
    >>> x = torch.tensor([1.0, -2.0, 3.0, 0.0])
    >>> message, _ = Sign().encode(x, Spec.of(x), None, Context())
    >>> message.nbytes, Sign().decode(message, Spec.of(x), Context())
    (5, tensor([ 1.5000, -1.5000,  1.5000,  1.5000]))
    """

    name: ClassVar[str] = "sign"
    cast: ClassVar[Cast] = "sign"
    wire_id: ClassVar[int] = 7
    examples: ClassVar[tuple[str, ...]] = ("sign",)
    corners: ClassVar[tuple[str, ...]] = ("sign(block=64)", "sign(block=none)")

    block: int | None = 4096

    def __post_init__(self) -> None:
        good = self.block is None or (self.block > 0 and self.block % 64 == 0)
        require(good, f"sign: block must be a positive multiple of 64, or none for one scale, got {self.block}")

    def block_of(self, numel: int) -> int:
        """Coordinates that share a scale, as the operations ask for it."""
        return self.block or max(64, -(-numel // 64) * 64)

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_of(numel)) + -(-numel // 8)

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).sign_encode(x, data, self.block_of(x.numel()))

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        kernels.get(data.device).sign_decode(data, out, self.block_of(out.numel()), weight)

    def splits(self, device: torch.device, weight: float) -> bool:
        short = self.block is not None and self.block <= LONGEST_SPLIT
        return short and weight == 1.0 and kernels.faster(device, "sign_split")

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool | Tensor]:
        x = fed.x
        data = byte_buffer(out, self.max_nbytes(spec), x.device)
        good = kernels.get(x.device).sign_split(x, fed.residual, data, fed.left, self.block_of(x.numel()))
        return Message(data if out is None else out, data.numel()), bool(good) if x.is_cpu else good

    def guarantee(self, spec: Spec) -> Guarantee:
        d = min(spec.numel, self.block_of(spec.numel))
        return Guarantee("contractive", 1 - 1 / d + 2.0**-48 if d > 1 else 0.0, sure=True)

    def wire_omega(self, spec: Spec) -> Omega:
        return "exact" if spec.numel == 1 else None
