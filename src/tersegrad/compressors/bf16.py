"""bfloat16: the upper half of each float32.

Maps     every coordinate to the nearest bfloat16 (8 exponent bits, 7 fraction bits), ties to even.
Formula  C(x)_i = bf16(x_i). Finite values beyond bfloat16's largest number become that number; NaN and Inf pass through.
Promise  contractive with alpha = 2^-16, surely. Half a unit in the last place is at most 2^-9 |x_i|, which gives 2^-18; only
         magnitudes above 3.396e38, within 0.4 % of float32's largest, are clipped, with an error of at most 2^-8 |x_i|.
Wire     2 bytes a coordinate, little-endian.
Source   the usual 16-bit all-reduce; Wang and Kanwar, "BFloat16: the secret to high performance on Cloud TPUs", 2019.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, check_size, flat_float32
from tersegrad.core.text import Configuration


@dataclasses.dataclass(frozen=True)
class BF16(Configuration):
    """Round to bfloat16: 16 bits a coordinate.

    >>> x = torch.tensor([1.0, 3.14159265, -1e-30])
    >>> message, _ = BF16().encode(x, Spec.of(x), None, Context())
    >>> BF16().decode(message, Spec.of(x), Context())
    tensor([ 1.0000e+00,  3.1406e+00, -9.9840e-31])
    """

    name: ClassVar[str] = "bf16"
    fixed_size: ClassVar[bool] = True

    @property
    def wire_id(self) -> int:
        return 2

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        nbytes = self._nbytes(flat.numel())
        data = byte_buffer(out, nbytes, flat.device)
        kernels.get(flat.device).bf16_encode(flat, data)
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return self._decode(message, spec, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._decode(message, spec, out, weight)

    def _decode(self, message: Message, spec: Spec, out: Tensor | None, weight: float | None) -> Tensor:
        check_size(message, self.max_nbytes(spec))
        data = message.payload.contiguous()
        out = float_buffer(out, spec.numel, data.device)
        kernels.get(data.device).bf16_decode(data, out, weight)
        return out

    def _nbytes(self, numel: int) -> int:
        return 2 * numel

    def max_nbytes(self, spec: Spec) -> int:
        return self._nbytes(spec.numel)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 2.0**-16, sure=True)
