"""Scaled sign: one bit per coordinate and the mean magnitude.

Maps     x to its signs times ||x||_1 / d; the sign of 0 is +.
Formula  C(x) = (||x||_1 / d) sign(x).
Promise  contractive, surely, with alpha = 1 - 1/d: ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / d because the scale is the best one
         for these signs, and ||x||_1 >= ||x||_2. The scale's rounding to float32 adds at most 2^-48. One-hot vectors attain it; for
         Gaussian data the error is 1 - 2/pi = 0.363.
Wire     the scale as float32 (NaN: the buffer held NaN or Inf), then one bit per coordinate, set where x_i < 0; bit i is bit
         i % 8 of byte i / 8, padding is zero. No coordinates: no bytes.
Source   Seide et al., "1-bit SGD", Interspeech 2014; the scaled form is that of Karimireddy et al., "Error feedback fixes
         SignSGD", ICML 2019. The l1 norm is summed in float64 in a fixed order.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.casts import Summed
from tersegrad.core.protocol import Context, Guarantee, Omega, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.kernels.schema import Cast


@dataclasses.dataclass(frozen=True)
class Sign(Summed, FixedRate):
    """Signs and one scale: 1 bit per coordinate; meant for error feedback.

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

    def nbytes(self, numel: int) -> int:
        return 4 + -(-numel // 8) if numel else 0

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).sign_encode(x, data)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        kernels.get(data.device).sign_decode(data, out, weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        d = spec.numel
        return Guarantee("contractive", 1 - 1 / d + 2.0**-48 if d > 1 else 0.0, sure=True)

    def wire_omega(self, spec: Spec) -> Omega:
        return "exact" if spec.numel == 1 else None
