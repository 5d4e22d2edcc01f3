"""Ternary (TernGrad): each coordinate becomes -M, 0 or M, without bias.

Maps     x to M times random trits, M = max|x| over the buffer or over each bucket.
Formula  C(x)_i = M sign(x_i) b_i, b_i = 1 with probability |x_i| / M, else 0.
Promise  unbiased with omega = (sqrt(d) - 1) / 2, d the coordinates under one scale: E ||C(x) - x||^2 = M ||x||_1 - ||x||^2, and
         ||x||_inf ||x||_1 / ||x||^2 <= (1 + sqrt(d)) / 2: with one coordinate 1 and the others t <= 1 it is
         (1 + (d-1) t) / (1 + (d-1) t^2), largest at t = 1 / (1 + sqrt(d)) (for a fixed l1 norm equal others make the l2 norm
         least). |x_i| / M carries float32's rounding and is cut to 30 bits: a bias of at
         most 2^-21 |x_i| + 2^-30 M, and M ||x||_1 above grows by at most a factor 1 + 2^-21, which the value includes.
Wire     M as float32 for each bucket (NaN: the buffer held NaN or Inf), then trits + 1, five a byte in base 3, the first the
         least significant, the last byte padded with zeros. 1.6 bits a coordinate.
Source   Wen et al., "TernGrad", NeurIPS 2017, without their clipping. The draw of coordinate i has 32 bits: its own 16 on top,
         those of i ^ 1 below, so that small |x_i| / M keep their probability without a second generator call; each draw is
         uniform, which is all that bias and variance ask for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, check_size, flat_float32
from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class Ternary(Configuration):
    """Random trits: 1.6 bits a coordinate. ``bucket``: coordinates that share a scale (a multiple of 64; none: all).

    >>> x = torch.tensor([4.0, -4.0, 0.0, 1.0])
    >>> message, _ = Ternary().encode(x, Spec.of(x), None, Context(seed=1))
    >>> message.nbytes, Ternary().decode(message, Spec.of(x), Context(seed=1))
    (5, tensor([ 4., -4.,  0.,  0.]))
    """

    name: ClassVar[str] = "ternary"
    fixed_size: ClassVar[bool] = True
    bucket: int | None = None

    def __post_init__(self) -> None:
        good = self.bucket is None or (self.bucket > 0 and self.bucket % 64 == 0)
        require(good, f"ternary buckets are multiples of 64, got bucket={self.bucket}: leave it out for one scale")

    @property
    def wire_id(self) -> int:
        return 8

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        nbytes = self._nbytes(flat.numel())
        data = byte_buffer(out, nbytes, flat.device)
        kernels.get(flat.device).ternary_encode(flat, data, self._bucket(flat.numel()), ctx)
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return self._decode(message, spec, out, None)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._decode(message, spec, out, weight)

    def _decode(self, message: Message, spec: Spec, out: Tensor | None, weight: float | None) -> Tensor:
        check_size(message, self.max_nbytes(spec))
        data = message.payload.contiguous()
        out = float_buffer(out, spec.numel, data.device)
        kernels.get(data.device).ternary_decode(data, out, self._bucket(spec.numel), weight)
        return out

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(64, -(-numel // 64) * 64)

    def _nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self._bucket(numel)) + -(-numel // 5)

    def max_nbytes(self, spec: Spec) -> int:
        return self._nbytes(spec.numel)

    def guarantee(self, spec: Spec) -> Guarantee:
        d = min(self._bucket(spec.numel), spec.numel)
        return Guarantee("unbiased", (1 + 2.0**-21) * (math.sqrt(max(d, 1)) + 1) / 2 - 1)
