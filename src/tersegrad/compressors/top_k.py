"""Top-k: the k coordinates of largest magnitude, exactly; everything else becomes zero.

Formula. C(x)_i = x_i for i in T, else 0, where T holds the k largest |x_i|; ties go to the lowest index, so T is unique. Zeros
are never sent: where x has fewer than k other coordinates, the message is shorter.

Guarantee. Contractive, for every x: ||C(x) - x||^2 <= (1 - k/d) ||x||^2, because the k largest of d squares hold at least k/d
of their sum. With ``values="bf16"`` a sent coordinate errs by at most 2^-8 of itself, which leaves 1 - (k/d)(1 - 2^-16). With
``exact=False`` the threshold comes from a sample of about 65,000 coordinates and the number sent varies; it never leaves
[ceil(k/2), k + ceil(k/4)] (otherwise the exact set is sent), and so only ceil(k/2) is promised.

Wire (``spec/wire.md``, "top_k")::

    byte 0   mode: 0 normal, 1 all zero, 2 non-finite, 3 raw (the float32 vector, when coding would take more bytes)
    mode 0   count (varint), index set (``codecs/index.py``), count values (float32 or bfloat16, little-endian)

Citation. A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; S. U. Stich,
J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018. They count indices as 32 bits each; here all of them
together take about log2 C(d, k) bits.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import index, varint
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

NORMAL, ZERO, NON_FINITE, RAW = range(4)


@dataclasses.dataclass(frozen=True)
class TopK(Configuration):
    """Send the ``k`` largest coordinates, or ``ceil(fraction * d)`` of them.

    >>> from tersegrad.core.protocol import Context, Spec
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), TopK(k=2)
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 0., -3.,  0.,  2.])
    """

    name: ClassVar[str] = "top_k"

    fraction: float | None = None
    k: int | None = None
    exact: bool = True
    values: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        require((self.fraction is None) != (self.k is None), "top_k takes either fraction= or k=")
        require(self.fraction is None or 0 < self.fraction <= 1, f"top_k: fraction lies in (0, 1], got {self.fraction}")
        require(self.k is None or self.k >= 1, f"top_k: k is at least 1, got {self.k}")
        require(self.values in ("float32", "bf16"), f'top_k: values is "float32" or "bf16", got {self.values!r}')

    @property
    def wire_id(self) -> int:
        return 12

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        x = flat_float32(x, spec)
        if out is None:
            out = torch.empty(self.max_nbytes(Spec.flat(x.numel())), dtype=torch.uint8, device=x.device)
        indices, values = self._select(x)
        return Message(out, self._write(x, indices, values, out)), None

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and values of what is sent, in index order. NaN and Inf are larger than any number, so they are among it."""
        ops, k = kernels.get(x.device), self._count(x.numel())
        if not self.exact:
            most = self._most(x.numel())
            indices, values, found = ops.select_compact(x, ops.select_sample_key(x, k), most)
            if -(-k // 2) <= found <= most:
                return indices, values
        return ops.select_top_k(x, k)

    def _write(self, x: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> int:
        """The message into ``out``; returns its length."""
        count = indices.numel()
        if count == 0:
            out[0] = ZERO
            return 1
        if not kernels.get(x.device).all_finite(values):
            out[0] = NON_FINITE
            return 1
        head = varint.write(count)
        at = 1 + len(head)
        size = at + index.max_nbytes(count, x.numel()) + self._width * count
        if size > 1 + 4 * x.numel():
            out[0] = RAW
            out[1 : 1 + 4 * x.numel()] = x.view(torch.uint8)
            return 1 + 4 * x.numel()
        out[:at] = torch.tensor([NORMAL, *head], dtype=torch.uint8)
        at += index.encode(indices, x.numel(), out[at:]).numel()
        end = at + self._width * count
        out[at:end] = (values if self.values == "float32" else _to_bf16(values)).view(torch.uint8)
        return end

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(spec.numel, dtype=torch.float32, device=message.data.device)
        mode, indices, values = self._read(message, spec)
        if mode == NORMAL:
            kernels.get(out.device).sparse_scatter(indices, values, out)
        elif mode == RAW:
            out.copy_(values)
        else:
            out.fill_(0.0 if mode == ZERO else math.nan)
        return out

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        mode, indices, values = self._read(message, spec)
        if mode == NORMAL:
            kernels.get(out.device).sparse_scatter_add(indices, values, weight, out)
        elif mode == RAW:
            out.add_(values * weight)
        elif mode == NON_FINITE:
            out.fill_(math.nan)
        return out

    def _read(self, message: Message, spec: Spec) -> tuple[int, Tensor, Tensor]:
        """Mode, indices and values; the whole vector as values in raw mode."""
        data, d = message.payload, spec.numel
        mode = int(data[0]) if data.numel() else -1
        nothing = data[:0]
        if mode in (ZERO, NON_FINITE) and data.numel() == 1:
            return mode, nothing, nothing
        if mode == RAW and data.numel() == 1 + 4 * d:
            return mode, nothing, data[1:].clone().view(torch.float32)
        if mode != NORMAL:
            raise CorruptMessage(f"not a top_k message for {d} coordinates: {data.numel()} bytes, mode {mode}")
        count, at = varint.read(data, 1)
        if not 1 <= count <= self._most(d):
            raise CorruptMessage(f"the message announces {count} coordinates, at most {self._most(d)} are sent")
        indices, used = index.decode(data[at:], count, d)
        rest = data[at + used :]
        if rest.numel() != self._width * count:
            raise CorruptMessage(f"{count} values take {self._width * count} bytes, the message has {rest.numel()}")
        values = rest.clone().view(torch.float32 if self.values == "float32" else torch.bfloat16)
        return mode, indices, values.float()

    def max_nbytes(self, spec: Spec) -> int:
        d, most = spec.numel, self._most(spec.numel)
        normal = 1 + len(varint.write(most)) + index.max_nbytes(min(most, d // 2), d) + self._width * most
        return max(1, min(normal, 1 + 4 * d))

    def guarantee(self, spec: Spec) -> Guarantee:
        d, k = max(spec.numel, 1), self._count(spec.numel)
        sure = k if self.exact else -(-k // 2)
        kept = sure / d * (1.0 if self.values == "float32" else 1 - 2.0**-16)
        return Guarantee("contractive", 1 - kept, sure=True)

    def _count(self, d: int) -> int:
        # The fraction as it was written: 0.07 of 100 are 7, not the 8 that binary floating point makes of it.
        k = self.k if self.k is not None else math.ceil(Fraction(repr(self.fraction)) * d)
        return min(max(k, 1), d)

    def _most(self, d: int) -> int:
        """The largest number of coordinates that a message carries."""
        k = self._count(d)
        return k if self.exact else min(d, k + -(-k // 4))

    @property
    def _width(self) -> int:
        """Bytes of a value."""
        return 4 if self.values == "float32" else 2


def _to_bf16(values: Tensor) -> Tensor:
    """Nearest bfloat16; what would round up to Inf becomes the largest finite number."""
    largest = torch.finfo(torch.bfloat16).max
    return values.clamp(-largest, largest).to(torch.bfloat16)
