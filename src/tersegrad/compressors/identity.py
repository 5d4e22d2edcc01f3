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

from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, check_size, flat_float32
from tersegrad.core.text import Configuration, require

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STRETCH = 1 << 18  # coordinates added at a time, so that the product stays in cache


@dataclasses.dataclass(frozen=True)
class Identity(Configuration):
    """Send the numbers as they are.

    >>> x = torch.tensor([1.0, -2.5])
    >>> message, _ = Identity().encode(x, Spec.of(x), None, Context())
    >>> Identity().decode(message, Spec.of(x), Context())
    tensor([ 1.0000, -2.5000])
    """

    name: ClassVar[str] = "identity"
    fixed_size: ClassVar[bool] = True

    @property
    def wire_id(self) -> int:
        return 1

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        require(x.numel() == spec.numel, f"the spec has {spec.numel} coordinates, the tensor {x.numel()}")
        flat = x.detach().reshape(-1).contiguous() if x.dtype in DTYPES else flat_float32(x)
        nbytes = flat.numel() * flat.element_size()
        data = byte_buffer(out, nbytes, flat.device)
        unit = flat.as_strided(flat.shape, (1,))  # a vector of one element may carry any stride, and a view as bytes minds
        data.copy_(unit.view(torch.uint8))
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        values = self._values(message, spec)
        out = float_buffer(out, spec.numel, message.data.device)
        return out.copy_(values)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        values = self._values(message, spec)
        out = float_buffer(out, spec.numel, message.data.device)
        for part, into in zip(torch.split(values, STRETCH), torch.split(out, STRETCH)):
            into += part.to(torch.float32) * weight  # product and sum rounded one after the other, as in every other compressor
        return out

    def _values(self, message: Message, spec: Spec) -> Tensor:
        check_size(message, self.max_nbytes(spec))
        data = message.payload
        if data.data_ptr() % spec.dtype.itemsize or data.storage_offset() % spec.dtype.itemsize:
            data = data.clone()
        return data.contiguous().view(spec.dtype)

    def max_nbytes(self, spec: Spec) -> int:
        require(spec.dtype in DTYPES, f"identity sends float32, float16 and bfloat16 buffers, got {spec.dtype}")
        return spec.numel * spec.dtype.itemsize

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 0.0, sure=True)
