"""Threshold: the coordinates above tau in magnitude, with their values or as +-tau; everything else becomes zero.

Formula. C(x)_i = x_i (``values="exact"``) or tau sign(x_i) (``values="sign"``) where |x_i| > tau, else 0. tau is a float32.

Guarantee. None relative to ||x||: a vector whose coordinates all lie below tau is sent as zero. Absolutely, with exact values,
||C(x) - x||^2 <= d tau^2. Under error feedback nothing is lost for good: what stays below tau accumulates until it passes.

Wire (``spec/wire.md``, "threshold")::

    byte 0   mode: 0 normal, 1 nothing above tau, 2 non-finite, 3 raw (exact values only: the float32 vector with zeros for what
             is not sent, when coding would take more bytes)
    mode 0   count (varint), index set (``codecs/index.py``), then count float32 values, or count sign bits (1: negative)

Citation. N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, is
``error_feedback(threshold(tau=..., values="sign"))``. There an element takes 32 bits (index and sign) and the residual may send
several messages of tau at once; here it takes about log2(d/count) + 2.4 bits, and one step sends one tau.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack, index, varint
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

NORMAL, ZERO, NON_FINITE, RAW = range(4)


@dataclasses.dataclass(frozen=True)
class Threshold(Configuration):
    """Send coordinates with |x| > tau, exactly or as +-tau.

    >>> from tersegrad.core.protocol import Context, Spec
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), Threshold(tau=1.0, values="sign")
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 0., -1.,  0.,  1.])
    """

    name: ClassVar[str] = "threshold"

    tau: float
    values: Literal["exact", "sign"] = "exact"

    def __post_init__(self) -> None:
        largest = torch.finfo(torch.float32).max
        require(0 <= self.tau <= largest, f"threshold: tau lies in [0, {largest:.4g}], got {self.tau}")
        require(self.values in ("exact", "sign"), f'threshold: values is "exact" or "sign", got {self.values!r}')
        require(self.values == "exact" or self._tau > 0, "threshold: +-tau needs a tau that float32 can tell from 0")

    @property
    def wire_id(self) -> int:
        return 14

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        x = flat_float32(x, spec)
        d, ops = x.numel(), kernels.get(x.device)
        if out is None:
            out = torch.empty(self.max_nbytes(Spec.flat(d)), dtype=torch.uint8, device=x.device)
        # The number to come is unknown: room for a few percent first, and for all that was counted if that was too little.
        indices, values, count = ops.select_compact(x, self._key + 1, d // 16 + 1024)
        if count > indices.numel():
            indices, values, count = ops.select_compact(x, self._key + 1, count)
        return Message(out, self._write(indices, values, d, out)), None

    def _write(self, indices: Tensor, values: Tensor, d: int, out: Tensor) -> int:
        """The message into ``out``; returns its length. NaN and Inf lie above any tau, so they are among ``values``."""
        count = values.numel()
        ops = kernels.get(out.device)
        if count == 0:
            out[0] = ZERO
            return 1
        if not ops.all_finite(values):
            out[0] = NON_FINITE
            return 1
        head = varint.write(count)
        at = 1 + len(head)
        if self.values == "exact" and at + index.max_nbytes(count, d) + 4 * count > 1 + 4 * d:
            vector = torch.empty(d, dtype=torch.float32, device=out.device)
            ops.sparse_scatter(indices, values, vector)
            out[0] = RAW
            out[1 : 1 + 4 * d] = vector.view(torch.uint8)
            return 1 + 4 * d
        out[:at] = torch.tensor([NORMAL, *head], dtype=torch.uint8)
        at += index.encode(indices, d, out[at:]).numel()
        end = at + self._values_nbytes(count)
        if self.values == "exact":
            out[at:end] = values.view(torch.uint8)
        else:
            bitpack.pack(torch.signbit(values).to(torch.uint8), 1, out[at:end])
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
        if mode == RAW and self.values == "exact" and data.numel() == 1 + 4 * d:
            return mode, nothing, data[1:].clone().view(torch.float32)
        if mode != NORMAL:
            raise CorruptMessage(f"not a threshold message for {d} coordinates: {data.numel()} bytes, mode {mode}")
        count, at = varint.read(data, 1)
        if not 1 <= count <= d:
            raise CorruptMessage(f"the message announces {count} of {d} coordinates")
        indices, used = index.decode(data[at:], count, d)
        rest = data[at + used :]
        if rest.numel() != self._values_nbytes(count):
            raise CorruptMessage(f"{count} values take {self._values_nbytes(count)} bytes, the message has {rest.numel()}")
        if self.values == "exact":
            return mode, indices, rest.clone().view(torch.float32)
        signs = bitpack.unpack(rest, 1, count).to(torch.float32).mul_(-2.0).add_(1.0)
        return mode, indices, signs.mul_(self._tau)

    def max_nbytes(self, spec: Spec) -> int:
        d = spec.numel
        if self.values == "exact":
            return 1 + 4 * d
        return 1 + len(varint.write(d)) + index.max_nbytes(d // 2, d) + self._values_nbytes(d)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")

    def _values_nbytes(self, count: int) -> int:
        return 4 * count if self.values == "exact" else -(-count // 8)

    @property
    def _tau(self) -> float:
        """Tau as a float32."""
        return float(struct.unpack("<f", struct.pack("<f", self.tau))[0])

    @property
    def _key(self) -> int:
        """The bit pattern of tau; magnitudes compare as such integers."""
        return int(struct.unpack("<I", struct.pack("<f", abs(self.tau)))[0])
