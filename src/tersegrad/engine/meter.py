"""Counting what an integration sends and how long coding takes, without changing a byte.

:func:`watch` puts a clock around a compressor; unlike ``metered`` it keeps nothing in the state, so checkpoints do not see it.
Seconds are those of the calling thread: on a GPU the time to launch the kernels, not to run them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.protocol import (
    Accumulator,
    Compressor,
    Context,
    Guarantee,
    Message,
    Spec,
    Stats,
    codes_on_host,
    decode_sent,
    flat_float32,
    has_fixed_size,
    restore,
)
from tersegrad.core.state import carried
from tersegrad.core.sums import decode_sum, sums_at_once
from tersegrad.engine.layers import Layer, by_layer, power_of
from tersegrad.exchange import ProcessGroup
from tersegrad.exchange.steps import Collective


@dataclasses.dataclass
class Meter:
    """Running totals of one round of an exchange."""

    messages: int = 0
    coordinates: int = 0
    encode: float = 0.0
    decode: float = 0.0
    probing: bool = False  # whether the error of messages is measured now, by decoding them once more
    error: float = 0.0  # sum of ||C(y) - y||^2
    power: float = 0.0  # sum of ||y||^2
    waits: float = 0.0  # sum of |r| that was carried into messages
    out: float = 0.0  # sum of |C(y)| of the messages that had something carried into them
    sent: host.Tally = dataclasses.field(default_factory=host.Tally)  # bytes of messages
    layers: dict[str, Layer] | None = None  # while probing: what the messages say of each layer, where it is asked for
    probe: float = 0.0  # seconds of measuring errors, which are no part of an exchange

    @property
    def age(self) -> float | None:
        """Steps that what the messages carry has waited, about; None where nothing is carried.

        In a steady state the mean time in a queue is what waits over what leaves per step (Little's law).
        """
        return self.waits / self.out if self.out else None

    @property
    def nbytes(self) -> int:
        return self.sent.total

    @property
    def seconds(self) -> float:
        return self.encode + self.decode


class Watched:
    """A compressor with a clock: the same bytes and the same state."""

    def __init__(self, inner: Compressor[Any], meter: Meter) -> None:
        self.inner, self.meter = inner, meter

    @property
    def wire_id(self) -> int:
        return self.inner.wire_id

    def init(self, spec: Spec, device: torch.device | str) -> Any:
        return self.inner.init(spec, device)

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        begin = time.perf_counter()
        message, after = self.inner.encode(x, spec, state, ctx, stats=stats, out=out)
        self.meter.messages += 1
        self.meter.sent.add(message.nbytes)
        self.meter.coordinates += x.numel()
        self.meter.encode += time.perf_counter() - begin
        if self.meter.probing:
            self._probe(x, spec, state, message, ctx)
        return message, after

    def _probe(self, x: Tensor, spec: Spec, state: Any, message: Message, ctx: Context) -> None:
        begin, meter = time.perf_counter(), self.meter
        wanted, residual = flat_float32(x), carried(state, spec)
        if residual is not None:
            residual = residual.to(wanted.device)
            wanted = wanted + residual
        decoded = self.inner.decode(message, spec, ctx)
        # Values that are close have an exact difference.
        missed = decoded - wanted
        sizes = [] if residual is None else [_size_of(residual), _size_of(decoded)]
        error, power, *ages = host.floats(power_of(missed), power_of(wanted), *sizes)
        if math.isfinite(error) and math.isfinite(power):
            meter.error += error
            meter.power += power
            if ages:
                meter.waits += ages[0]
                meter.out += ages[1]
        if meter.layers is not None:
            for name, layer in by_layer(self.inner, message, spec, ctx, decoded, missed, wanted):
                meter.layers.setdefault(name, Layer()).add(layer)
        meter.probe += time.perf_counter() - begin

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        begin = time.perf_counter()
        decoded = self.inner.decode(message, spec, ctx, out)
        self.meter.decode += time.perf_counter() - begin
        return decoded

    def sums_at_once(self, device: torch.device) -> bool:
        return sums_at_once(self.inner, device)

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        begin = time.perf_counter()
        total = decode_sum(self.inner, messages, spec, contexts, out, weight)
        self.meter.decode += time.perf_counter() - begin
        return total

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor:
        begin = time.perf_counter()
        sent = decode_sent(self.inner, message, spec, ctx)
        self.meter.decode += time.perf_counter() - begin
        return sent

    def restore(self, sent: Tensor, spec: Spec) -> Tensor:
        begin = time.perf_counter()
        restored = restore(self.inner, sent, spec)
        self.meter.decode += time.perf_counter() - begin
        return restored

    @property
    def fixed_size(self) -> bool:
        return has_fixed_size(self.inner)

    def codes_on_host(self, device: torch.device) -> bool:
        return codes_on_host(self.inner, device)

    def max_nbytes(self, spec: Spec) -> int:
        return self.inner.max_nbytes(spec)

    def guarantee(self, spec: Spec) -> Guarantee:
        return self.inner.guarantee(spec)


class WatchedAccumulator(Watched):
    """The same around a compressor that decodes and adds in one pass."""

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        begin, inner = time.perf_counter(), cast(Accumulator, self.inner)
        added = inner.decode_add(message, spec, ctx, out, weight)
        self.meter.decode += time.perf_counter() - begin
        return added


def _size_of(x: Tensor) -> Tensor:
    """The sum of magnitudes as a float64 scalar of its device."""
    total: Tensor = torch.linalg.vector_norm(x, 1, dtype=torch.float64)
    return total


def watch(compressor: Compressor[Any], meter: Meter) -> Watched:
    """``compressor`` with its coding counted in ``meter``."""
    return (WatchedAccumulator if isinstance(compressor, Accumulator) else Watched)(compressor, meter)


class TimedGroup(ProcessGroup):
    """A process group that adds up the seconds it is waited for: those that did not overlap with anything."""

    waited = 0.0
    beside = True  # whether exchanges may run in a thread, and on a stream, of their own

    @staticmethod
    def of(group: Any) -> TimedGroup:
        """The driver of a torch process group (None: the default one); a driver is taken as it is."""
        return group if isinstance(group, TimedGroup) else TimedGroup(group)

    def launch(self, request: Collective) -> tuple[Any, Tensor]:
        work, out = super().launch(request)
        return _TimedWork(work, self), out

    def dense_seconds(self, numel: int, device: torch.device, rounds: int) -> dict[str, float]:
        """Seconds of dense all-reduces of so many coordinates, by their dtype (blocking)."""
        found: dict[str, float] = {}
        for kind, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
            buffer, taken = torch.zeros(numel, dtype=dtype, device=device), []
            for _ in range(rounds + 1):
                self.barrier()
                begin = time.perf_counter()
                self.all_reduce(buffer)
                taken.append(time.perf_counter() - begin)
            found[kind] = statistics.median(taken[1:])
        # The mean over ranks, so that all say the same.
        both = torch.tensor(list(found.values()), dtype=torch.float32, device=device)
        self.all_reduce(both)
        return dict(zip(found, (both / self.size).tolist()))


@dataclasses.dataclass(frozen=True)
class _TimedWork:
    work: Any
    group: TimedGroup

    def wait(self) -> None:
        begin = time.perf_counter()
        self.work.wait()
        self.group.waited += time.perf_counter() - begin
