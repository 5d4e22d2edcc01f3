"""The check before every measurement: a compressor whose output is wrong is refused, not timed.

What is checked on the very tensor that will be timed: the message is no longer than announced; the same input and context
give the same bytes; the bytes alone decode to finite float32 of the right shape; writing into given buffers changes nothing;
the error keeps the guarantee; an unbiased compressor does not lean to one side. The law tests check the same and much more;
this guard exists so that no speed of a broken build is ever printed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import TersegradError
from tersegrad.core.protocol import Accumulator, Compressor, Context, Guarantee, Message, Spec, Stats, flat_float32

TRIALS = 4  # messages with different randomness, for guarantees on average


class Refused(TersegradError):
    """The output is wrong, so that its speed and size mean nothing."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the check found out on the way."""

    nbytes: int
    bits_per_coordinate: float
    error: float  # ||C(x) - x||^2 / ||x||^2, mean over the trials
    guarantee: Guarantee
    trials: int


def _refuse_unless(condition: bool, compressor: object, why: str) -> None:
    if not condition:
        raise Refused(f"refusing to measure {compressor}: {why}")


def check(
    compressor: Compressor[Any], x: Tensor, *, context: Context | None = None, stats: Stats | None = None, trials: int = TRIALS
) -> Checked:
    """Check ``compressor`` on ``x`` (finite, not all zero) or raise :class:`Refused`."""
    ctx, x = context or Context(), flat_float32(x)
    spec = Spec.flat(x.numel())
    power = _dot(x, x)
    _refuse_unless(0 < power < math.inf, compressor, "the test tensor must be finite and not zero")
    state = compressor.init(spec, x.device)

    limit = compressor.max_nbytes(spec)
    message, _ = compressor.encode(x, spec, state, ctx, stats=stats)
    nbytes = message.length
    _refuse_unless(0 <= nbytes <= limit, compressor, f"the message has {nbytes} bytes, max_nbytes promises {limit}")
    again, _ = compressor.encode(x, spec, state, ctx, stats=stats, out=torch.empty(limit, dtype=torch.uint8, device=x.device))
    same = again.length == nbytes and torch.equal(again.payload, message.payload)
    _refuse_unless(same, compressor, "encoding the same tensor twice gives different bytes")

    # Nothing but the bytes may reach the decoder.
    copy = Message(message.payload.clone(), nbytes)
    decoded = compressor.decode(copy, spec, ctx)
    _refuse_unless(
        decoded.shape == x.shape and decoded.dtype == torch.float32,
        compressor,
        f"it decodes to {decoded.dtype} of shape {tuple(decoded.shape)}, expected float32 of shape {tuple(x.shape)}",
    )
    _refuse_unless(bool(torch.isfinite(decoded).all()), compressor, "finite input decodes to NaN or infinity")
    into = compressor.decode(copy, spec, ctx, out=torch.full_like(x, math.nan))
    _refuse_unless(torch.equal(into, decoded), compressor, "decoding into a given buffer gives another result")
    if isinstance(compressor, Accumulator):
        added = compressor.decode_add(copy, spec, ctx, torch.ones_like(x), 0.5)
        close = torch.allclose(added, 1 + 0.5 * decoded, rtol=1e-5, atol=1e-6 * float(decoded.abs().max()) + 1e-6)
        _refuse_unless(close, compressor, "decode_add differs from adding what decode returns")

    guarantee = compressor.guarantee(spec)
    if guarantee.kind == "contractive" and guarantee.sure:
        trials = 1
    found = [_deviation(decoded, x, power)]
    for k in range(1, trials):
        other = dataclasses.replace(ctx, step=(ctx.step + k) % 2**32)
        message, _ = compressor.encode(x, spec, state, other, stats=stats)
        found.append(_deviation(compressor.decode(message, spec, other), x, power))
    _check_guarantee(compressor, guarantee, found)
    return Checked(nbytes, 8 * nbytes / x.numel(), sum(f.error for f in found) / trials, guarantee, trials)


@dataclasses.dataclass(frozen=True)
class _Deviation:
    """Sums over e = C(x) - x of one trial, relative to ||x||^2; the variances take coordinates as independent."""

    error: float  # ||e||^2
    error_variance: float
    lean: float  # <e, x>
    lean_variance: float


def _check_guarantee(compressor: object, guarantee: Guarantee, found: list[_Deviation]) -> None:
    trials = len(found)
    error, lean = sum(f.error for f in found) / trials, sum(f.lean for f in found) / trials
    if guarantee.kind == "none":
        # Nothing is promised; what any useful compressor does is to point in the direction of x.
        _refuse_unless(lean > -1, compressor, "what it decodes points away from the input")
        return
    # A guarantee on average may be exceeded by chance: by six standard deviations, practically never.
    chance = 0.0 if guarantee.sure else 6 * math.sqrt(sum(f.error_variance for f in found)) / trials
    bound = guarantee.value * (1 + 1e-5) + 1e-12 + chance
    _refuse_unless(error <= bound, compressor, f"its error is {error:.4g}, but it guarantees {guarantee}")
    if guarantee.kind == "unbiased":
        allowed = 6 * math.sqrt(sum(f.lean_variance for f in found)) / trials + 1e-5
        _refuse_unless(
            abs(lean) <= allowed,
            compressor,
            f"it calls itself unbiased but is off by {lean:+.3g} along the input (chance explains {allowed:.3g})",
        )


def _parts(x: Tensor, numel: int = 1 << 22) -> Iterator[slice]:
    """Slices that cover ``x``: float64 copies of 64 Mi coordinates at once would be large."""
    return (slice(start, start + numel) for start in range(0, x.numel(), numel))


def _dot(a: Tensor, b: Tensor) -> float:
    return math.fsum(float(torch.dot(a[part].double(), b[part].double())) for part in _parts(a))


def _deviation(decoded: Tensor, x: Tensor, power: float) -> _Deviation:
    sums = torch.zeros(4, dtype=torch.float64)
    for part in _parts(x):
        wide = x[part].double()
        off = decoded[part].double() - wide
        squares, along = off.square(), off * wide
        sums += torch.stack([squares.sum(), squares.square().sum(), along.sum(), along.square().sum()])
    error, error_variance, lean, lean_variance = sums.tolist()
    return _Deviation(error / power, error_variance / power**2, lean / power, lean_variance / power**2)
