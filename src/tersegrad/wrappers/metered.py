"""Metering: count what is sent and what it costs in accuracy and time, without changing a byte.

Maps: the inner compressor, plus counters in the state: messages, bytes, coordinates, ||C(x) - x||^2, ||x||^2 (float64) and
seconds. To know the error each message is decoded once more by the sender; ``error=false`` leaves that out.

Guarantee: the inner one's. Wire: the inner message. Around error feedback the error is against the gradient x, not the corrected
one.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.buffers import float_buffer
from tersegrad.core.protocol import (
    Accumulator,
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
from tersegrad.core.sums import decode_sum, sums_at_once
from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class MeterState:
    """The counters so far, and the inner state. Non-finite messages count as sent, but not towards error and norm."""

    inner: Any
    messages: int = 0
    nonfinite: int = 0
    nbytes: int = 0
    coordinates: int = 0
    error: float = 0.0
    norm: float = 0.0
    seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def bits_per_coordinate(self) -> float:
        return 8 * self.nbytes / self.coordinates if self.coordinates else 0.0

    @property
    def relative_error(self) -> float:
        """Sum of ||C(x) - x||^2 over the sum of ||x||^2."""
        return self.error / self.norm if self.norm else math.inf if self.error else 0.0

    def summary(self) -> dict[str, float]:
        """The figures that a table or a log wants."""
        return {
            "messages": self.messages,
            "nonfinite": self.nonfinite,
            "bytes": self.nbytes,
            "bits_per_coordinate": self.bits_per_coordinate,
            "relative_error": self.relative_error,
            "encode_seconds": self.seconds,
        }


@dataclasses.dataclass(frozen=True)
class Metered(Configuration):
    """Counters around any compressor.

    >>> from tersegrad.compressors import BF16
    >>> meter = Metered(BF16())
    >>> _, state = meter.encode(torch.ones(100), Spec.flat(100), meter.init(Spec.flat(100), "cpu"), Context())
    >>> state.messages, state.bits_per_coordinate, state.relative_error
    (1, 16.0, 0.0)
    """

    name: ClassVar[str] = "metered"
    wire_id: ClassVar[int] = 67
    corners: ClassVar[tuple[str, ...]] = ("metered(sign)",)

    inner: Compressor[Any]
    error: bool = True

    def __post_init__(self) -> None:
        require(isinstance(self.inner, Compressor), f"metered wraps a compressor, got {self.inner!r}")

    def init(self, spec: Spec, device: torch.device | str) -> MeterState:
        return MeterState(self.inner.init(spec, device))

    def encode(
        self, x: Tensor, spec: Spec, state: MeterState, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, MeterState]:
        start = time.perf_counter()
        message, inner = self.inner.encode(x, spec, state.inner, ctx, stats=stats, out=out)
        seconds = time.perf_counter() - start
        error = norm = 0.0
        if self.error:
            flat = flat_float32(x, spec)
            squares = flat.double().square().sum(), (self.inner.decode(message, spec, ctx) - flat).double().square().sum()
            # The one read of a meter.
            norm, error = host.floats(*squares)
        finite = math.isfinite(error) and math.isfinite(norm)
        return message, dataclasses.replace(
            state,
            inner=inner,
            messages=state.messages + 1,
            nonfinite=state.nonfinite + (not finite),
            nbytes=state.nbytes + message.length,
            coordinates=state.coordinates + x.numel(),
            error=state.error + (error if finite else 0.0),
            norm=state.norm + (norm if finite else 0.0),
            seconds=state.seconds + seconds,
        )

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return self.inner.decode(message, spec, ctx, out)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        """``out += weight * decode(message)``, in one pass where the inner compressor can."""
        if isinstance(self.inner, Accumulator):
            return self.inner.decode_add(message, spec, ctx, out, weight)
        out = float_buffer(out, spec.numel, message.data.device)
        return out.add_(self.inner.decode(message, spec, ctx) * weight)

    def sums_at_once(self, device: torch.device) -> bool:
        return sums_at_once(self.inner, device)

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        return decode_sum(self.inner, messages, spec, contexts, out, weight)

    def codes_on_host(self, device: torch.device) -> bool:
        return codes_on_host(self.inner, device)

    def mode(self, data: bytes) -> str | None:
        return mode_of(self.inner, data)

    def wire_omega(self, spec: Spec) -> Omega:
        return wire_omega(self.inner, spec)

    @property
    def fixed_size(self) -> bool:
        return has_fixed_size(self.inner)

    def max_nbytes(self, spec: Spec) -> int:
        return self.inner.max_nbytes(spec)

    def guarantee(self, spec: Spec) -> Guarantee:
        return self.inner.guarantee(spec)
