"""Aligned signs: rows and columns are negated so that most coordinates become positive, before any compressor.

Maps: y = s x t (entry by entry: y_ij = s_i x_ij t_j, with signs s_i of a matrix's rows and t_j of its columns), sends the signs and
C(y), decodes s C(y) t.

Why: the gradient of a layer is a sum of outer products of what flows back and what flowed in. Inputs behind a ReLU are not negative,
so the signs of a row mostly agree; where few directions dominate, as in the last layer of a language model, signs are nearly an
outer product themselves. Levels that are mostly positive take up to one bit less each, from any coder that counts symbols
(``sparse_dithering``, ``trellis``, quantisers with ``coder=rans``), for one bit per row and column.

Which signs: of a matrix, coordinates above the root mean square of the buffer count. Columns begin with the signs of the row that
has most of them; twice, each row and then each column takes the sign that most of its coordinates agree with. Rows alone, both,
or none are told, whichever saves most by the entropy of agreeing. Where signs take more than a sixteenth of what the inner message
takes, it is written without them too, and the shorter one is sent.

Guarantee: the inner one's, exactly: negation rounds nothing and changes no norm. The signs may depend on x, as the inner promise holds for
every vector, unbiasedness included.

Wire (``spec/wire.md``, aligned): a byte, 0 or 1; if it is 1 the description of the signs; the inner message.

Citation: none known to us; video coders hide or predict signs to the same end.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import buffers, host
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import float32
from tersegrad.core.protocol import (
    Context,
    Guarantee,
    Message,
    Omega,
    Spec,
    Stats,
    flat_float32,
    mode_of,
    wire_omega,
)
from tersegrad.kernels.reference.align import most_bytes, nbytes
from tersegrad.wrappers.transformed import Around

# Signs that take a larger share of the message than 1 / DOUBT are compared with none.
DOUBT = 16


@dataclasses.dataclass(frozen=True)
class Aligned(Around):
    """Signs of rows and columns around any compressor that keeps nothing per coordinate.

    >>> from tersegrad.compressors import SparseDithering
    >>> print(Aligned(SparseDithering(alpha=0.1)))
    aligned(sparse_dithering(alpha=0.1))
    """

    name: ClassVar[str] = "aligned"
    wire_id: ClassVar[int] = 69
    examples: ClassVar[tuple[str, ...]] = ("aligned(sparse_dithering(alpha=0.1))",)
    corners: ClassVar[tuple[str, ...]] = ("aligned(qsgd(levels=4, coder=rans))",)

    against_values: ClassVar[str] = "and each step negates others"

    def inner_spec(self, spec: Spec) -> Spec:
        return spec.in_float32

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        x = flat_float32(x, spec)
        run, layout, inner = kernels.get(x.device), spec.layout, self.inner_spec(spec)
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        told = torch.empty(0, dtype=torch.uint8)
        if most_bytes(layout):
            mean = float(run.sum_squares(x)) / spec.numel
            told = run.align_find(x, float32(math.sqrt(mean)), layout) if 0 < mean < math.inf else told
        start = torch.cat((torch.tensor([told.numel() > 0], dtype=torch.uint8), told))
        head = start.numel()
        data[:head] = host.send(start, x.device)
        y = x
        if told.numel():
            y = buffers.empty(spec.numel, torch.float32, x.device)
            run.align_flip(x, told, layout, y)
        room = data[head : head + self.inner.max_nbytes(inner)]
        before = state
        message, state = self.inner.encode(y, inner, before, ctx, stats=stats, out=room)
        if message.data.data_ptr() != room.data_ptr():
            # An inner compressor may have ignored out=.
            room[: message.length] = message.payload
        if told.numel() and DOUBT * told.numel() > message.length:
            # So few coordinates are coded that signs of all rows may not pay.
            plain, other = self.inner.encode(x, inner, before, ctx, stats=stats)
            if plain.length < told.numel() + message.length:
                message, state, start, head = plain, other, start[:1].zero_(), 1
                data[:1] = 0
                data[1 : 1 + plain.length] = plain.payload
        here = None if message.host is None else torch.cat((start, message.host))
        return Message(data if out is None else out, message.nbytes + head, here), state

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        layout, length = spec.layout, message.length
        # Where the inner message is read at the host, it goes there together with the signs.
        here = message.on_host() if message.host is not None or self.codes_on_host(out.device) else None
        start = host.read((message.data if here is None else here)[: min(length, 1 + most_bytes(layout))])
        if start.numel() == 0 or int(start[0]) > 1:
            raise CorruptMessage("a message of aligned begins with 0 or 1")
        head = 1 + (nbytes(start[1:], layout) if start[0] else 0)
        if head > length:
            raise CorruptMessage("the signs of rows and columns are cut short")
        rest = None if here is None else here[head:length]
        decoded = self.inner.decode(Message(message.data[head:length], length - head, rest), self.inner_spec(spec), ctx, out)
        if start[0]:
            kernels.get(out.device).align_flip(decoded, start[1:head], layout, out)
        elif decoded is not out:
            out.copy_(decoded)
        return out

    def max_nbytes(self, spec: Spec) -> int:
        return 1 + most_bytes(spec.layout) + self.inner.max_nbytes(self.inner_spec(spec))

    def guarantee(self, spec: Spec) -> Guarantee:
        return self.inner.guarantee(self.inner_spec(spec))

    def wire_omega(self, spec: Spec) -> Omega:
        return wire_omega(self.inner, self.inner_spec(spec))

    def mode(self, data: bytes) -> str | None:
        return mode_of(self.inner, data[1:]) if data[:1] == b"\0" else "signs of rows and columns"
