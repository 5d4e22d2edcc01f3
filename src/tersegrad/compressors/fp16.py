"""fp16: IEEE half precision under one power-of-two scale, so that 1e38 and 1e-30 survive.

Maps     every coordinate to the nearest half-precision number times c, ties to even.
Formula  C(x)_i = c * fp16(x_i / c), c = 2^(e - 14) with 2^e <= max|x| < 2^(e+1) (and c >= 2^-126): the largest coordinate
         lands in [2^14, 2^15), one step below the top of the range, so that nothing overflows; divisions by c are exact. Products with c
         that would round up to 2^128 become float32's largest number, which lies nearer to x_i.
Promise  contractive, surely, with alpha = 2^-22 + (d - 1) 2^-78. Coordinates with |x_i / c| >= 2^-14 have 11 significant bits:
         an error of at most 2^-11 |x_i|. Smaller ones are subnormal: at most 2^-25 c, while max|x| >= 2^14 c, so each adds at
         most 2^-78 ||x||^2, and at most d - 1 of them exist. Rounding never exceeds |x_i| itself: alpha <= 1.
Wire     c as float32 (NaN: the buffer held NaN or Inf and decodes to NaN), then 2 bytes per coordinate, little-endian.
         No coordinates: no bytes.
Source   mixed-precision all-reduce; the shared scale is loss scaling per message (Micikevicius et al., ICLR 2018).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.casts import Summed
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.kernels.schema import Cast


@dataclasses.dataclass(frozen=True)
class FP16(Summed, FixedRate):
    """Round to half precision under a shared power of two: 16 bits per coordinate.

    >>> import torch
    >>> x = torch.tensor([1e38, 3.14159265e37, -1e30])
    >>> message, _ = FP16().encode(x, Spec.of(x), None, Context())
    >>> FP16().decode(message, Spec.of(x), Context())
    tensor([ 1.0002e+38,  3.1424e+37, -1.0003e+30])
    """

    name: ClassVar[str] = "fp16"
    cast: ClassVar[Cast] = "fp16"
    wire_id: ClassVar[int] = 3
    examples: ClassVar[tuple[str, ...]] = ("fp16",)

    def nbytes(self, numel: int) -> int:
        return 4 + 2 * numel if numel else 0

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).fp16_encode(x, data)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        kernels.get(data.device).fp16_decode(data, out, weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", min(1.0, 2.0**-22 + max(0, spec.numel - 1) * 2.0**-78), sure=True)
