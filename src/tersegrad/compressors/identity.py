"""Identity: the buffer itself, in its own dtype.

Maps     x to x.
Formula  C(x) = x.
Promise  contractive with alpha = 0, surely: nothing is lost (float64 input is first rounded to float32).
Wire     the numbers of the buffer, little-endian, in ``spec.dtype`` (float32, float16 or bfloat16). NaN and Inf pass through.
Source   the uncompressed baseline of every comparison.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core.buffers import byte_buffer
from tersegrad.core.protocol import Context, Guarantee, Message, Omega, Spec, Stats, flat, flat_float32
from tersegrad.core.stateless import Stateless, exactly
from tersegrad.core.text import require

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Coordinates added at a time, so that the product stays in cache.
STRETCH = 1 << 18


@dataclasses.dataclass(frozen=True)
class Identity(Stateless):
    """Send the numbers as they are.

    >>> x = torch.tensor([1.0, -2.5])
    >>> message, _ = Identity().encode(x, Spec.of(x), None, Context())
    >>> Identity().decode(message, Spec.of(x), Context())
    tensor([ 1.0000, -2.5000])
    """

    name: ClassVar[str] = "identity"
    wire_id: ClassVar[int] = 1
    examples: ClassVar[tuple[str, ...]] = ("identity",)
    fixed_size: ClassVar[bool] = True

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        require(x.numel() == spec.numel, f"the spec has {spec.numel} coordinates, the tensor {x.numel()}")
        values = flat(x) if x.dtype in DTYPES else flat_float32(x)
        nbytes = values.numel() * values.element_size()
        data = byte_buffer(out, nbytes, values.device)
        data.copy_(values.view(torch.uint8))
        return Message(data if out is None else out, nbytes), None

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        exactly(data, self.max_nbytes(spec))
        if data.data_ptr() % spec.dtype.itemsize or data.storage_offset() % spec.dtype.itemsize:
            data = data.clone()
        values = data.view(spec.dtype)
        if weight is None:
            out.copy_(values)
            return
        # Product and sum are rounded one after the other, as in every other compressor.
        for part, into in zip(torch.split(values, STRETCH), torch.split(out, STRETCH)):
            into += part.to(torch.float32) * weight

    def max_nbytes(self, spec: Spec) -> int:
        require(spec.dtype in DTYPES, f"identity sends float32, float16 and bfloat16 buffers, got {spec.dtype}")
        return spec.numel * spec.dtype.itemsize

    def wire_omega(self, spec: Spec) -> Omega:
        return "exact"

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 0.0, sure=True)
