"""Rate of any compressor: real bits per coordinate, the error that they buy, and how far that is from the limit.

The limit at error e is the number of bits that no compressor can beat on all inputs: (1/2) log2(1/e) a coordinate, and
(1/2) log2(1 + 1/e) for an unbiased one. On Gaussian data it is also the rate-distortion function, so that no compressor gets
below it. Data with structure (exact zeros, a few large coordinates) can be sent with fewer bits: there the distance may be
negative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tersegrad.bench.check import check
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context, Guarantee, Spec, Stats, flat_float32
from tersegrad.theory import rate_distortion

Source = Literal["gaussian", "laplace", "student_t"]
SOURCES: tuple[Source, ...] = ("gaussian", "laplace", "student_t")


@dataclasses.dataclass(frozen=True)
class Rate:
    """What one compressor costs and loses on one kind of data."""

    compressor: str
    source: str
    numel: int
    messages: int  # how many were averaged
    bits_per_coordinate: float
    error: float  # mean of ||C(x) - x||^2 / ||x||^2
    guarantee: Guarantee
    limit: float  # bits per coordinate at this error; infinite for an error of zero
    source_limit: float | None  # the same for this source, where its rate-distortion function is known

    @property
    def ratio(self) -> float:
        """32 bits over bits per coordinate."""
        return 32 / self.bits_per_coordinate if self.bits_per_coordinate else math.inf

    @property
    def gap(self) -> float:
        """Bits per coordinate above the limit; NaN for exact codecs, whose error is zero."""
        return self.bits_per_coordinate - self.limit if math.isfinite(self.limit) else math.nan


def draw(source: str, numel: int, seed: int = 0) -> Tensor:
    """``numel`` independent samples of ``source`` as float32, the same for the same seed.

    >>> draw("gaussian", 5).shape
    torch.Size([5])
    """
    if source not in SOURCES:
        raise BadConfiguration(f"unknown source {source!r}: choose one of {', '.join(SOURCES)}")
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator)
    if source == "gaussian":
        return normal
    if source == "laplace":
        uniform = torch.rand(numel, generator=generator).sub_(0.5)
        return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_(max=0.5 - 2**-25))
    chi = sum(torch.randn(numel, generator=generator).square_() for _ in range(3))
    assert isinstance(chi, Tensor)
    return normal * torch.rsqrt(chi / 3)


def load(source: str, numel: int, seed: int = 0) -> Tensor:
    """Samples of a named source, or the tensors of a file written by ``torch.save``, flattened into one."""
    if source in SOURCES:
        return draw(source, numel, seed)
    path = Path(source)
    if not path.is_file():
        raise BadConfiguration(f"{source!r} is neither a file nor one of {', '.join(SOURCES)}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)  # tensors only: a file must not run code
    except Exception as error:
        raise BadConfiguration(f"{source} does not hold tensors written by torch.save ({type(error).__name__})") from None
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else [found]
    tensors = [flat_float32(v) for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    if not tensors:
        raise BadConfiguration(f"{source} holds no floating-point tensors")
    return torch.cat(tensors)


def limit_at(error: float, guarantee: Guarantee, source: str = "") -> tuple[float, float | None]:
    """Bits per coordinate at ``error``: the limit over all inputs, and that of ``source`` where it is known."""
    if error <= 0:
        return math.inf, None
    # An unbiased message, shrunk by 1 / (1 + e), has error e / (1 + e) and the same bits: limits are those of the shrunk one.
    distortion = error / (1 + error) if guarantee.kind == "unbiased" else error
    general = rate_distortion.gaussian_rate(distortion)
    if source == "laplace":
        return general, rate_distortion.laplace_rate(distortion)
    return general, general if source == "gaussian" else None


def measure(
    compressor: Compressor[Any],
    tensors: Tensor | Iterable[Tensor],
    *,
    source: str = "given",
    stats: Iterable[Stats | None] | None = None,
    seed: int = 0,
) -> Rate:
    """Average bits and error of ``compressor`` over ``tensors``, each message checked and decoded.

    Raises :class:`~tersegrad.bench.check.Refused` when the output is wrong.
    """
    given = [flat_float32(t) for t in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    if not given:
        raise BadConfiguration("nothing to measure: pass at least one tensor")
    second = list(stats) if stats is not None else [None] * len(given)
    found = [
        check(compressor, x, context=Context(seed=seed, step=100 * k), stats=s) for k, (x, s) in enumerate(zip(given, second))
    ]
    bits = 8 * sum(c.nbytes for c in found) / sum(x.numel() for x in given)
    error = sum(c.error for c in found) / len(found)
    guarantee = compressor.guarantee(Spec.flat(given[0].numel()))
    limit, source_limit = limit_at(error, guarantee, source)
    return Rate(
        compressor=str(compressor),
        source=source,
        numel=given[0].numel(),
        messages=len(given),
        bits_per_coordinate=bits,
        error=error,
        guarantee=guarantee,
        limit=limit,
        source_limit=source_limit,
    )
