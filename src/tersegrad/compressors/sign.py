"""Scaled sign: one bit a coordinate and the mean magnitude.

Maps     x to its signs times ||x||_1 / d; the sign of 0 is +.
Formula  C(x) = (||x||_1 / d) sign(x).
Promise  contractive, surely, with alpha = 1 - 1/d: ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / d because the scale is the best one
         for these signs, and ||x||_1 >= ||x||_2. The scale's rounding to float32 adds at most 2^-48. One-hot vectors attain it; for
         Gaussian data the error is 1 - 2/pi = 0.363.
Wire     the scale as float32 (NaN: the buffer held NaN or Inf), then one bit a coordinate, set where x_i < 0; bit i is bit
         i % 8 of byte i / 8, padding is zero. No coordinates: no bytes.
Source   Seide et al., "1-bit SGD", Interspeech 2014; the scaled form is that of Karimireddy et al., "Error feedback fixes
         SignSGD", ICML 2019. The l1 norm is summed in float64 in a fixed order.
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
class Sign(Configuration):
    """Signs and one scale: 1 bit a coordinate; meant for error feedback.

    >>> x = torch.tensor([1.0, -2.0, 3.0, 0.0])
    >>> message, _ = Sign().encode(x, Spec.of(x), None, Context())
    >>> message.nbytes, Sign().decode(message, Spec.of(x), Context())
    (5, tensor([ 1.5000, -1.5000,  1.5000,  1.5000]))
    """

    name: ClassVar[str] = "sign"
    fixed_size: ClassVar[bool] = True

    @property
    def wire_id(self) -> int:
        return 7

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        nbytes = self._nbytes(flat.numel())
        data = byte_buffer(out, nbytes, flat.device)
        kernels.get(flat.device).sign_encode(flat, data)
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return self._decode(message, spec, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._decode(message, spec, out, weight)

    def _decode(self, message: Message, spec: Spec, out: Tensor | None, weight: float | None) -> Tensor:
        check_size(message, self.max_nbytes(spec))
        data = message.payload.contiguous()
        out = float_buffer(out, spec.numel, data.device)
        kernels.get(data.device).sign_decode(data, out, weight)
        return out

    def _nbytes(self, numel: int) -> int:
        return 4 + -(-numel // 8) if numel else 0

    def max_nbytes(self, spec: Spec) -> int:
        return self._nbytes(spec.numel)

    def guarantee(self, spec: Spec) -> Guarantee:
        d = spec.numel
        return Guarantee("contractive", 1 - 1 / d + 2.0**-48 if d > 1 else 0.0, sure=True)
