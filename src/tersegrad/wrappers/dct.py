"""Cosine transform: compress the coefficients of an orthonormal block DCT.

Maps: y = D x, sends C(y), decodes D^T C(y). D transforms every tile of a matrix in both dimensions, and every run of a vector, by the
orthonormal DCT-II; a dimension is cut into pieces of its largest divisor up to ``block`` (``codecs/tiles.py``). The coefficients of a
tile lie where the tile was, so that a compressor by tiles (``chunk_top_k``) sees those of one transform together. Momenta of trained
networks concentrate in few of them.

Guarantee: the inner one's. D is orthogonal, so errors and norms carry over, for every outcome. Floats round: a pass errs by 2^-24 of
the norm from its float32 results and sqrt(n) 2^-24 from the rounded basis, twice in each direction; the value includes it unless alpha
is so close to 1 that it would drown there.

Wire: the inner message, then one byte: 0, or 1 when the vector was multiplied by 2^-32 before the transform (max |x| >= 2^96). Sums are
float64 in a fixed order, so that all ranks decode the same bits.

Citation: Ahmed, Natarajan, Rao, "Discrete cosine transform", IEEE Trans. Computers 1974; Peng, Quesnelle, Kingma, "DeMo: decoupled
momentum optimization", 2024.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import tiles
from tersegrad.codecs.tiles import Region
from tersegrad.core import buffers
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.numbers import HUGE
from tersegrad.core.protocol import (
    Compressor,
    Context,
    Guarantee,
    Message,
    Omega,
    Spec,
    Stats,
    flat_float32,
    has_fixed_size,
    mode_of,
    wire_omega,
)
from tersegrad.core.text import Configuration, require

LARGEST_BLOCK = 256
_BIG, _SHRINK = 2.0**96, 2.0**-32


@dataclasses.dataclass(frozen=True)
class DCT(Configuration):
    """A block cosine transform around any compressor that keeps nothing per coordinate.

    >>> from tersegrad.compressors import ChunkTopK
    >>> print(DCT(ChunkTopK(k=4, values="sign")))
    dct(chunk_top_k(k=4, values=sign))
    """

    name: ClassVar[str] = "dct"
    wire_id: ClassVar[int] = 68
    examples: ClassVar[tuple[str, ...]] = ("dct(chunk_top_k(k=32, vector=64))",)
    corners: ClassVar[tuple[str, ...]] = ("dct(int8)", "dct(chunk_top_k(k=4, values=sign), block=16)")

    inner: Compressor[Any]
    block: int = 64

    def __post_init__(self) -> None:
        require(isinstance(self.inner, Compressor), f"dct wraps a compressor, got {self.inner!r}")
        require(1 <= self.block <= LARGEST_BLOCK, f"block lies between 1 and {LARGEST_BLOCK}, got {self.block}")
        self._check(self.inner.init(Spec.flat(1), "cpu"))

    def _check(self, inner: Any) -> None:
        if states.tensors(inner):
            raise BadConfiguration(
                f"{self.inner} keeps a value per coordinate, which a change of compressor would take for a gradient: "
                "put dct inside, as in error_feedback(dct(...))"
            )

    def regions(self, spec: Spec) -> tuple[Region, ...]:
        """The tiles that are transformed."""
        return tiles.regions(spec, self.block, vector=self.block, run=self.block)

    def inner_spec(self, spec: Spec) -> Spec:
        return dataclasses.replace(spec, dtype=torch.float32)

    def init(self, spec: Spec, device: torch.device | str) -> Any:
        state = self.inner.init(self.inner_spec(spec), device)
        self._check(state)
        return state

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        x = flat_float32(x, spec)
        ops, inner = kernels.get(x.device), self.inner_spec(spec)
        top = float(ops.abs_max(x)) if x.numel() else 0.0
        y = buffers.empty(x.numel(), torch.float32, x.device)
        big = math.isfinite(top) and top >= _BIG
        if math.isfinite(top):
            ops.cosine_forward(x * _SHRINK if big else x, tiles.table(self.regions(spec)), y)
        else:
            y.fill_(math.nan)
        room = self.inner.max_nbytes(inner)
        data = buffers.byte_buffer(out, room + 1, x.device)
        # The second moment is one of coordinates that are gone: an inner compressor that needs it says so.
        message, state = self.inner.encode(y, inner, state, ctx, out=data[:room])
        if message.data.data_ptr() != data.data_ptr():
            data[: int(message.nbytes)] = message.payload
        data[int(message.nbytes)] = int(big)
        return Message(data if out is None else out, message.nbytes + 1), state

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        return self._back(self.decode_sent(message, spec, ctx), spec, out)

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor:
        """The coefficients."""
        length = int(message.nbytes) - 1
        if length < 0 or message.data.numel() <= length:
            raise CorruptMessage("a message of dct has at least one byte")
        big = int(message.data[length])
        if big > 1:
            raise CorruptMessage(f"the last byte of a message of dct is 0 or 1, got {big}")
        y = self.inner.decode(Message(message.data[:length], length), self.inner_spec(spec), ctx)
        return y.mul_(1.0 / _SHRINK).clamp_(-HUGE, HUGE) if big else y

    def restore(self, sent: Tensor, spec: Spec) -> Tensor:
        return self._back(sent, spec, buffers.empty(spec.numel, torch.float32, sent.device))

    def _back(self, sent: Tensor, spec: Spec, out: Tensor) -> Tensor:
        kernels.get(sent.device).cosine_inverse(sent, tiles.table(self.regions(spec)), out)
        # Finite coefficients near the largest float may leave its range.
        return out.clamp_(-HUGE, HUGE)

    @property
    def fixed_size(self) -> bool:
        return has_fixed_size(self.inner)

    def max_nbytes(self, spec: Spec) -> int:
        return self.inner.max_nbytes(self.inner_spec(spec)) + 1

    def guarantee(self, spec: Spec) -> Guarantee:
        promise = self.inner.guarantee(self.inner_spec(spec))
        if promise.kind == "none" or not math.isfinite(promise.value):
            return promise
        value = self._with_rounding(promise.value, spec)
        drowned = promise.kind == "contractive" and value >= 1 > promise.value
        return promise if drowned else dataclasses.replace(promise, value=value)

    def wire_omega(self, spec: Spec) -> Omega:
        omega = wire_omega(self.inner, self.inner_spec(spec))
        return self._with_rounding(omega, spec) if isinstance(omega, float) else None

    def mode(self, data: bytes) -> str | None:
        return mode_of(self.inner, data[:-1])

    def _with_rounding(self, value: float, spec: Spec) -> float:
        """The error of an inner ``value`` together with that of both transforms."""
        rounding = 2 * (math.sqrt(self.block) + 2) * 2.0**-24
        return (math.sqrt(value) * (1 + rounding) ** 2 + 2 * rounding + rounding**2) ** 2
