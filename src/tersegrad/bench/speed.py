"""Speed of any compressor: encode, decode and decode-accumulate, as a ratio to memmove of the float32 tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tersegrad.bench.check import Refused, check
from tersegrad.bench.clock import MEMMOVE, Timing, race, thread_count, touched
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, Stats, flat_float32


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast one compressor is on one tensor. Bytes counted are those of the float32 tensor, 4 per coordinate."""

    compressor: str
    numel: int
    threads: int
    bits_per_coordinate: float
    error: float
    memmove: Timing
    encode: Timing
    decode: Timing
    decode_add: Timing | None  # None where the compressor has no fused form


def measure(
    compressor: Compressor[Any],
    x: Tensor,
    *,
    threads: int = 1,
    rounds: int = 9,
    budget: float = math.inf,
    stats: Stats | None = None,
    context: Context | None = None,
) -> Speed:
    """Check ``compressor`` on ``x``, then time it into buffers that were touched before.

    Raises :class:`~tersegrad.bench.check.Refused` when the output is wrong. ``budget`` bounds the seconds spent on timing.
    """
    ctx, x = context or Context(), flat_float32(x)
    spec = Spec.flat(x.numel())
    with thread_count(threads):
        checked = check(compressor, x, context=ctx, stats=stats)
        state = compressor.init(spec, x.device)
        buffer, target = touched(compressor.max_nbytes(spec)), torch.ones_like(x)
        message, _ = compressor.encode(x, spec, state, ctx, stats=stats)
        message = Message(message.payload.clone(), message.length)
        expected = compressor.decode(message, spec, ctx)
        bodies = {
            "encode": lambda: compressor.encode(x, spec, state, ctx, stats=stats, out=buffer),
            "decode": lambda: compressor.decode(message, spec, ctx, out=target),
        }
        timings = race(bodies, 4 * x.numel(), rounds=rounds, budget=budget)
        # What was timed is looked at once more: a kernel that only fails when it is run again would be caught here.
        if not torch.equal(buffer[: message.length], message.payload) or not torch.equal(target, expected):
            raise Refused(f"refusing the speed of {compressor}: its output changed while it was timed")
        fused: Timing | None = None
        if isinstance(compressor, Accumulator):
            accumulator = compressor
            target.zero_()
            again = race(
                {"decode_add": lambda: accumulator.decode_add(message, spec, ctx, target, 1e-3)},
                4 * x.numel(),
                rounds=rounds,
                budget=budget / 2,
            )
            fused = again["decode_add"]
    return Speed(
        compressor=str(compressor),
        numel=x.numel(),
        threads=threads,
        bits_per_coordinate=checked.bits_per_coordinate,
        error=checked.error,
        memmove=timings[MEMMOVE],
        encode=timings["encode"],
        decode=timings["decode"],
        decode_add=fused,
    )
