"""What rotations and cosine transforms share: an orthogonal map before any compressor, its inverse behind it.

Guarantee: the inner one's, with what the floats of both directions round (:meth:`Transformed.rounding`), unless alpha is so close to 1
that it would drown there.

Wire: the inner message, then one byte: 0, or 1 when the vector was multiplied by 2^-32 before the map (max |x| >= 2^96, whose image
could overflow). Nothing waits for a device: there the factor, mostly 1, is applied where the vector is, and a byte that is neither 0
nor 1 makes it NaN.
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
from tersegrad.core.text import Configuration, require

_BIG, SHRINK = 2.0**96, 2.0**-32


@dataclasses.dataclass(frozen=True)
class Around(Configuration):
    """Around a compressor that keeps nothing per coordinate."""

    name: ClassVar[str]
    # Why the inner compressor may not keep a value per coordinate.
    against_values: ClassVar[str]
    inner: Compressor[Any]

    def __post_init__(self) -> None:
        require(isinstance(self.inner, Compressor), f"{self.name} wraps a compressor, got {self.inner!r}")
        self._check(self.inner.init(Spec.flat(1), "cpu"))

    def _check(self, state: Any) -> None:
        if states.tensors(state):
            raise BadConfiguration(
                f"{self.inner} keeps a value per coordinate, {self.against_values}: "
                f"put {self.name} inside, as in error_feedback({self.name}(...))"
            )

    def inner_spec(self, spec: Spec) -> Spec:
        """What the inner compressor sees."""
        raise NotImplementedError

    def init(self, spec: Spec, device: torch.device | str) -> Any:
        state = self.inner.init(self.inner_spec(spec), device)
        self._check(state)
        return state

    def codes_on_host(self, device: torch.device) -> bool:
        return codes_on_host(self.inner, device)


@dataclasses.dataclass(frozen=True)
class Transformed(Around):
    """A compressor behind a map that subclasses state."""

    def forward(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> Tensor:
        """Map x to y; max |x| as a tensor without dimensions, not finite where a number of x is not."""
        raise NotImplementedError

    def forward_there(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> tuple[Tensor, Tensor]:
        """Map x, made smaller where it is large, on its device, without waiting: whether it is finite, and whether it is large."""
        finite, big = ranges(kernels.get(x.device).abs_max(x))
        self.forward(x * torch.where(big, SHRINK, 1.0), y, spec, ctx)
        return finite, big

    def rounding(self) -> float:
        """How much one direction errs, as a share of the norm."""
        raise NotImplementedError

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        x = flat_float32(x, spec)
        inner = self.inner_spec(spec)
        y = buffers.empty(inner.numel, torch.float32, x.device)
        big = self._mapped(x, y, spec, ctx)
        room = self.inner.max_nbytes(inner)
        data = buffers.byte_buffer(out, room + 1, x.device)
        # The second moment is one of coordinates that are gone: an inner compressor that needs it says so.
        message, state = self.inner.encode(y, inner, state, ctx, out=data[:room])
        if message.data.data_ptr() != data.data_ptr():
            # An inner compressor may have ignored out=.
            data[: message.length] = message.payload
        if isinstance(message.nbytes, int):
            data[message.nbytes] = big
        else:
            data.scatter_(0, message.nbytes.reshape(1), torch.as_tensor(big, dtype=torch.uint8, device=x.device).reshape(1))
        return Message(data if out is None else out, message.nbytes + 1), state

    def _mapped(self, x: Tensor, y: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        """Map x to y; whether it was made smaller before."""
        if x.is_cpu:
            top = float(self.forward(x, y, spec, ctx))
            if not math.isfinite(top):
                y.fill_(math.nan)
            elif top >= _BIG:
                self.forward(x * SHRINK, y, spec, ctx)
                return 1
            return 0
        finite, big = self.forward_there(x, y, spec, ctx)
        kernels.get(x.device).settle(y, finite)
        return big

    def opened(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Tensor, int | Tensor]:
        """What the inner message decodes to, and the byte behind it."""
        length = message.length - 1
        if length < 0 or message.data.numel() <= length:
            raise CorruptMessage(f"a message of {self.name} has at least one byte")
        big = int(message.data[length]) if message.data.is_cpu else message.data[length]
        if isinstance(big, int) and big > 1:
            raise CorruptMessage(f"the last byte of a message of {self.name} is 0 or 1, got {big}")
        host = None if message.host is None else message.host[:length]
        return self.inner.decode(Message(message.data[:length], length, host), self.inner_spec(spec), ctx, out), big

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
        """The error of an inner ``value`` together with that of both directions."""
        rounding = self.rounding()
        return (math.sqrt(value) * (1 + rounding) ** 2 + 2 * rounding + rounding**2) ** 2


def ranges(top: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a vector with this largest magnitude is finite, and whether it is also large."""
    finite = top < math.inf
    return finite, finite & (top >= _BIG)


def enlarged(x: Tensor, big: int | Tensor) -> Tensor:
    """``x`` in place, 2^32 times as large where the byte of its message says so."""
    if isinstance(big, int):
        return x.mul_(1.0 / SHRINK).clamp_(-HUGE, HUGE) if big else x
    return kernels.get(x.device).settle(x, big <= 1, torch.where(big == 1, 1.0 / SHRINK, 1.0))
