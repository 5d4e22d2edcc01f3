"""Rotation: quantise in a random basis, where no coordinate stands out.

Maps: y = R x, sends C(y), decodes R^T C(y). R multiplies by random signs and applies the normalised Walsh-Hadamard transform to
blocks of ``block`` coordinates; the rest is padded with zeros to the next power of two. A coordinate of y is at most
sqrt(2 ln(2n/p)/n) ||x|| with probability 1 - p, so scales that follow the largest coordinate (int8, int4, fp8, sign) waste nothing
on outliers.

Guarantee: the inner one's for the padded size, also when it holds surely. With P the padding, R = H D P has R^T R = I, so
||R^T C(Rx) - x|| = ||R^T (C(Rx) - Rx)|| <= ||C(Rx) - Rx||, and ||Rx|| = ||x||: alpha carries over for every outcome and every
rotation; E R^T C(Rx) = R^T R x = x: unbiasedness and omega carry over. Floats round: each direction errs by at most
(log2 n + 2) 2^-24 ||x||, about 1e-6, which the value includes unless alpha is so close to 1 that it would drown there.

Wire: the inner message, then one byte: 0, or 1 when the vector was multiplied by 2^-32 before rotating (max |x| >= 2^96, whose
rotation could overflow). Signs are drawn from the context (purpose ROTATION, shared sender) and never sent.

Citation: Ailon and Chazelle, "Approximate nearest neighbors and the fast Johnson-Lindenstrauss transform", STOC 2006; Suresh et al.,
"Distributed mean estimation with limited communication", ICML 2017. Ours rotates blocks that fit the first-level cache, and draws
fresh signs for every step and buffer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
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
    codes_on_host,
    flat_float32,
    has_fixed_size,
    mode_of,
    wire_omega,
)
from tersegrad.core.stateless import spoilt_unless
from tersegrad.core.text import Configuration, require

LARGEST_BLOCK = 1 << 16
_BIG, _SHRINK = 2.0**96, 2.0**-32


def rotated_numel(numel: int, block: int) -> int:
    """Coordinates after padding.

    >>> [rotated_numel(n, 4096) for n in (0, 1, 4096, 4096 + 33)]
    [0, 1, 4096, 4160]
    """
    rest = numel % block
    return numel - rest + (1 << (rest - 1).bit_length() if rest else 0)


@dataclasses.dataclass(frozen=True)
class Rotated(Configuration):
    """Randomised Hadamard rotation around any compressor that keeps nothing per coordinate.

    >>> from tersegrad.compressors import Int4
    >>> print(Rotated(Int4(), block=1024))
    rotated(int4, block=1024)
    """

    name: ClassVar[str] = "rotated"
    wire_id: ClassVar[int] = 65
    examples: ClassVar[tuple[str, ...]] = ("rotated(qsgd(bits=4))",)
    corners: ClassVar[tuple[str, ...]] = ("rotated(int4)", "rotated(qsgd(bits=3, norm=max))")

    inner: Compressor[Any]
    block: int = 4096

    def __post_init__(self) -> None:
        require(isinstance(self.inner, Compressor), f"rotated wraps a compressor, got {self.inner!r}")
        power_of_two = 0 < self.block <= LARGEST_BLOCK and self.block & (self.block - 1) == 0
        require(power_of_two, f"block must be a power of two up to {LARGEST_BLOCK}, got {self.block}")
        self._check(self.inner.init(Spec.flat(1), "cpu"))

    def _check(self, inner: Any) -> None:
        if states.tensors(inner):
            raise BadConfiguration(
                f"{self.inner} keeps a value per coordinate, and each step rotates into another basis where it means nothing: "
                "put rotated inside, as in error_feedback(rotated(...))"
            )

    def inner_spec(self, spec: Spec) -> Spec:
        """What the inner compressor sees: a flat vector of the padded size."""
        return Spec.flat(rotated_numel(spec.numel, self.block))

    def init(self, spec: Spec, device: torch.device | str) -> Any:
        state = self.inner.init(self.inner_spec(spec), device)
        self._check(state)
        return state

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        x = flat_float32(x, spec)
        inner = self.inner_spec(spec)
        rotation = kernels.get(x.device)
        y = torch.empty(inner.numel, dtype=torch.float32, device=x.device)
        big: Tensor | int
        if x.is_cpu:
            top = float(rotation.rotate(x, y, self.block, ctx.shared()))
            big = int(top >= _BIG)
            if math.isnan(top):
                y.fill_(math.nan)
            elif big:
                rotation.rotate(x * _SHRINK, y, self.block, ctx.shared())
        else:
            # Nothing waits for the device: the factor, mostly 1, is applied there.
            big = rotation.abs_max(x) >= _BIG
            finite = ~rotation.rotate(torch.where(big, x * _SHRINK, x), y, self.block, ctx.shared()).isnan()
            big = big & finite
            y.masked_fill_(~finite, math.nan)
        room = self.inner.max_nbytes(inner)
        data = buffers.byte_buffer(out, room + 1, x.device)
        # The second moment is one of coordinates that are gone: an inner compressor that needs it says so.
        message, state = self.inner.encode(y, inner, state, ctx, out=data[:room])
        if message.data.data_ptr() != data.data_ptr():
            # An inner compressor may have ignored out=.
            data[: int(message.nbytes)] = message.payload
        if isinstance(message.nbytes, int):
            data[message.nbytes] = big
        else:
            data.scatter_(0, message.nbytes.reshape(1), torch.as_tensor(big, dtype=torch.uint8, device=x.device).reshape(1))
        return Message(data if out is None else out, message.nbytes + 1), state

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        length = int(message.nbytes) - 1
        if length < 0 or message.data.numel() <= length:
            raise CorruptMessage("a rotated message has at least one byte")
        inner = self.inner_spec(spec)
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        big = int(message.data[length]) if out.is_cpu else message.data[length]
        if isinstance(big, int) and big > 1:
            raise CorruptMessage(f"the last byte of a rotated message is 0 or 1, got {big}")
        y = self.inner.decode(
            Message(message.data[:length], length, None if message.host is None else message.host[:length]),
            inner,
            ctx,
            out if inner.numel == spec.numel else None,
        )
        kernels.get(y.device).unrotate(y, out, self.block, ctx.shared())
        if isinstance(big, int):
            return out.mul_(1.0 / _SHRINK).clamp_(-HUGE, HUGE) if big else out
        # Elsewhere nothing waits for the device, and a byte that is neither 0 nor 1 makes the vector NaN.
        out.copy_(torch.where(big == 1, (out * (1.0 / _SHRINK)).clamp_(-HUGE, HUGE), out))
        return spoilt_unless(big <= 1, out)

    def codes_on_host(self, device: torch.device) -> bool:
        return codes_on_host(self.inner, device)

    @property
    def fixed_size(self) -> bool:
        return has_fixed_size(self.inner)

    def max_nbytes(self, spec: Spec) -> int:
        return self.inner.max_nbytes(self.inner_spec(spec)) + 1

    def guarantee(self, spec: Spec) -> Guarantee:
        promise = self.inner.guarantee(self.inner_spec(spec))
        if promise.kind == "none" or not math.isfinite(promise.value):
            return promise
        value = self._with_rounding(promise.value)
        drowned = promise.kind == "contractive" and value >= 1 > promise.value
        return promise if drowned else dataclasses.replace(promise, value=value)

    def wire_omega(self, spec: Spec) -> Omega:
        omega = wire_omega(self.inner, self.inner_spec(spec))
        return self._with_rounding(omega) if isinstance(omega, float) else None

    def mode(self, data: bytes) -> str | None:
        return mode_of(self.inner, data[:-1])

    def _with_rounding(self, value: float) -> float:
        """The error of an inner ``value`` together with that of both rotations."""
        rounding = (math.log2(self.block) + 2) * 2.0**-24
        return (math.sqrt(value) * (1 + rounding) ** 2 + 2 * rounding + rounding**2) ** 2
