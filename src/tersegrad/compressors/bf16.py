"""bfloat16: the upper half of each float32.

Maps     every coordinate to the nearest bfloat16 (8 exponent bits, 7 fraction bits), ties to even.
Formula  C(x)_i = bf16(x_i). Finite values beyond bfloat16's largest number become that number; NaN and Inf pass through.
Promise  contractive with alpha = 2^-16, surely. Half a unit in the last place is at most 2^-9 |x_i|, which gives 2^-18; only
         magnitudes above 3.396e38, within 0.4 % of float32's largest, are clipped, with an error of at most 2^-8 |x_i|.
Wire     2 bytes per coordinate, little-endian.
Source   the usual 16-bit all-reduce; Wang and Kanwar, "BFloat16: the secret to high performance on Cloud TPUs", 2019.
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
class BF16(Summed, FixedRate):
    """Round to bfloat16: 16 bits per coordinate.

    >>> import torch
    >>> x = torch.tensor([1.0, 3.14159265, -1e-30])
    >>> message, _ = BF16().encode(x, Spec.of(x), None, Context())
    >>> BF16().decode(message, Spec.of(x), Context())
    tensor([ 1.0000e+00,  3.1406e+00, -9.9840e-31])
    """

    name: ClassVar[str] = "bf16"
    cast: ClassVar[Cast] = "bf16"
    wire_id: ClassVar[int] = 2
    examples: ClassVar[tuple[str, ...]] = ("bf16",)

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).bf16_encode(x, data)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        kernels.get(data.device).bf16_decode(data, out, weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 2.0**-16, sure=True)
