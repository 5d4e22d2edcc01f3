"""fp8: e4m3 numbers with one power-of-two scale a block, as in the OCP microscaling (MX) formats.

Maps     every coordinate to the nearest e4m3 number (finite-only variant, largest 448) times its block's scale, ties to even.
Formula  C(x)_i = c_b * e4m3(x_i / c_b) for i in block b, where c_b is the power of two that puts the block's largest magnitude
         into (232, 464] (and c_b >= 2^-126). 464 is the largest number that rounds to 448: nothing is clipped.
         Products with c_b that would round up to 2^128 become float32's largest number, which lies nearer to x_i.
Promise  contractive, surely, with alpha = 1/289 + (block - 1) 2^-20 / 232^2. Coordinates with |x_i / c_b| >= 2^-6 have 4
         significant bits: an error of at most |x_i| / 17. Smaller ones are subnormal: at most 2^-10 c_b, while the block's
         largest exceeds 232 c_b. Errors of blocks add, so the bound holds for the whole buffer.
Wire     ceil(d / block) scale bytes in E8M0 (2^(byte - 127); 255 is NaN), then one e4m3 byte a coordinate. 8.25 bits at
         block = 32. If the buffer holds NaN or Inf, all scales are 255 and the codes 0.
Source   OCP Microscaling Formats (MX) v1.0, 2023; Micikevicius et al., "FP8 formats for deep learning", 2022. MX takes the
         exponent of the largest magnitude and clips between 448 and 512 (up to 12.5 %); here such a block takes twice the scale.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, check_size, flat_float32
from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class FP8(Configuration):
    """Round to e4m3 in blocks with a shared exponent: 8.25 bits a coordinate.

    >>> x = torch.tensor([1.0, 3.14159265, -1e-2])
    >>> message, _ = FP8().encode(x, Spec.of(x), None, Context())
    >>> message.nbytes, FP8().decode(message, Spec.of(x), Context())
    (4, tensor([ 1.0000,  3.2500, -0.0098]))
    """

    name: ClassVar[str] = "fp8"
    fixed_size: ClassVar[bool] = True
    block: int = 32

    def __post_init__(self) -> None:
        good = 16 <= self.block <= 65536 and self.block & (self.block - 1) == 0
        require(good, f"fp8 blocks are powers of two from 16 to 65536, got block={self.block}: 32 is the MX format's")

    @property
    def wire_id(self) -> int:
        return 4

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        nbytes = self._nbytes(flat.numel())
        data = byte_buffer(out, nbytes, flat.device)
        kernels.get(flat.device).fp8_encode(flat, data, self.block)
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return self._decode(message, spec, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._decode(message, spec, out, weight)

    def _decode(self, message: Message, spec: Spec, out: Tensor | None, weight: float | None) -> Tensor:
        check_size(message, self.max_nbytes(spec))
        data = message.payload.contiguous()
        out = float_buffer(out, spec.numel, data.device)
        kernels.get(data.device).fp8_decode(data, out, self.block, weight)
        return out

    def _nbytes(self, numel: int) -> int:
        return -(-numel // self.block) + numel

    def max_nbytes(self, spec: Spec) -> int:
        return self._nbytes(spec.numel)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 1 / 289 + (self.block - 1) * 2.0**-20 / 232**2, sure=True)
