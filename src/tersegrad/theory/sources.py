"""Uniform quantisation of Gaussian, Laplace and Student-t coordinates: entropy, error and code lengths, by quadrature.

A long vector of iid coordinates with unit variance has norm sqrt(d), so sparse dithering with parameter nu quantises them
with step 2 sqrt(nu), and everything per coordinate is an integral over the density f. With level k at k * step:

- nearest:     k = rint(x/step). Error E(x - step k)^2. With the least-squares gain g = E[xk]/(step E[k^2]) in place of 1 the
               error becomes 1 - E[xk]^2 / E[k^2], never larger.
- randomised:  k = floor(x/step + U), U uniform: unbiased, variance step^2 E[t(1-t)], t the fractional part of x/step.
- dithered:    k = rint(x/step + U) with a shared U that the decoder subtracts: unbiased, variance step^2/12 whatever x is. The
               levels have the law of the randomised ones; a coder that knows U needs the average entropy of the shifted
               quantiser only.

Integrals are Gauss-Legendre sums inside each cell, on the offset from the cell's level, so that nothing cancels; the power
tail of Student's t beyond the last cell is added from the smooth approximation p_k = step f(step k). Accurate to about 1e-9.

``paper_bits`` is the published sparse-dithering code per coordinate: H2(zeros) + nonzeros + E|k|; ``entropy`` is what an
ideal adaptive coder of the signed levels needs. Citation for the codes: Albasyoni et al., Optimal Gradient Compression (arXiv
2010.03246).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require
from tersegrad.theory.arguments import Array
from tersegrad.theory.codes import binary_entropy

Rounding = Literal["nearest", "randomised", "dithered"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_TAIL_CELLS = 4096  # cells of a power-tailed source that are summed one by one


@dataclasses.dataclass(frozen=True)
class Source:
    """A symmetric density with unit variance; ``scale`` is the width on which it varies, ``reach`` where it ends in effect."""

    name: str
    density: Callable[[Array], Array] = dataclasses.field(repr=False, compare=False)
    scale: float = 1.0
    reach: float = math.inf
    tail: float = math.inf  # the density falls like x^-(tail+1)


def gaussian() -> Source:
    """The standard normal density."""
    return Source("gaussian", lambda x: np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi), reach=12.0)


def laplace() -> Source:
    """The two-sided exponential density with unit variance."""
    return Source("laplace", lambda x: np.exp(-math.sqrt(2) * np.abs(x)) / math.sqrt(2), scale=1 / math.sqrt(2), reach=36.0)


def student_t(dof: float) -> Source:
    """Student's t with ``dof`` > 2 degrees of freedom, scaled to unit variance."""
    require(2 < dof <= 100, f"dof must exceed 2 (or the variance is infinite) and be at most 100, got {dof:g}")
    width = math.sqrt((dof - 2) / dof)
    constant = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / (math.sqrt(dof * math.pi) * width)
    return Source(
        f"student_t({dof:g})",
        lambda x: constant * np.power(1 + (x / width) ** 2 / dof, -(dof + 1) / 2),
        scale=width,
        tail=dof,
    )


@dataclasses.dataclass(frozen=True)
class Quantised:
    """What happens to one coordinate of an iid unit-variance source under a uniform quantiser."""

    step: float
    entropy: float  # bits of the signed level, ideal coder (given the dither, if there is one)
    distortion: float  # E(x - decoded)^2, without gain
    gain: float  # least-squares factor on the decoded values (1 for the unbiased roundings)
    distortion_with_gain: float
    zeros: float  # share of zero levels
    mean_level: float  # E|k|

    @property
    def paper_bits(self) -> float:
        """Bits per coordinate of the published sparse-dithering code."""
        return binary_entropy(self.zeros) + (1 - self.zeros) + self.mean_level


def _cells(source: Source, step: float, first_edge: float) -> int:
    """Number of cells of width ``step`` that are summed one by one, beginning at ``first_edge``."""
    if math.isinf(source.reach):
        return max(_TAIL_CELLS, math.ceil(60 / step))
    return max(1, math.ceil((source.reach - first_edge) / step))


def _panel_sums(source: Source, left: Array, width: float, origin: Array, powers: int) -> list[Array]:
    """Integrals of (x - origin)^j f(x), j < ``powers``, over cells [left, left + width], right of zero."""
    panels = max(1, math.ceil(width / source.scale))
    # A very wide cell holds nearly all its mass near its left end: panels beyond the reach would be wasted.
    panels = min(panels, max(1, math.ceil(min(source.reach, 400 * source.scale) / source.scale)))
    edges = np.linspace(0, width, panels + 1) if width <= panels * source.scale else np.geomspace(source.scale, width, panels)
    edges = np.concatenate([[0.0], edges]) if edges[0] > 0 else edges
    sums = [np.zeros_like(left) for _ in range(powers)]
    for low, high in itertools.pairwise(edges):
        half = (high - low) / 2
        x = left[:, None] + low + half * (1 + _NODES)  # (cells, nodes)
        mass = source.density(x) * (_WEIGHTS * half)
        offset = x - origin[:, None]
        for j in range(powers):
            sums[j] += mass.sum(axis=1)
            mass = mass * offset
    return sums


def _plogp(p: Array) -> Array:
    return -p * np.log2(np.maximum(p, 1e-300))


def _tail(source: Source, start: float, step: float) -> tuple[float, float, float]:
    """One-sided mass, entropy and E|k| of the cells beyond ``start``; zero unless the source has a power tail."""
    if math.isinf(source.tail):
        return 0.0, 0.0, 0.0
    # In ln(x/start): the slowest integrand, x f(x), has fallen to e^-60 there.
    end = 60 / (source.tail - 1)
    s = end * (1 + np.polynomial.legendre.leggauss(200)[0]) / 2
    x = start * np.exp(s)
    weight = np.polynomial.legendre.leggauss(200)[1] * (end / 2) * x
    f = source.density(x)
    return float((f * weight).sum()), float((-f * np.log2(step * f) * weight).sum()), float((f * x / step * weight).sum())


def _nearest(source: Source, step: float) -> Quantised:
    middle, _, middle_square = _panel_sums(source, np.zeros(1), step / 2, np.zeros(1), 3)
    count = _cells(source, step, step / 2)
    k = np.arange(1.0, count + 1)
    mass, first, square = _panel_sums(source, (k - 0.5) * step, step, k * step, 3)
    start = (count + 0.5) * step
    tail_mass, tail_entropy, tail_level = _tail(source, start, step)
    p0 = min(1.0, 2 * float(middle[0]))
    entropy = float(_plogp(np.array(p0))) + 2 * (float(_plogp(mass).sum()) + tail_entropy)
    error = 2 * (float(middle_square[0]) + float(square.sum()) + tail_mass * step**2 / 12)
    # E[(x - q) q]; in the tail the error has mean (step^2/12) f'/f, whose product with x integrates by parts
    edge = float(source.density(np.array([start]))[0]) if tail_mass else 0.0
    cross = 2 * (float((first * k * step).sum()) - step**2 / 12 * (start * edge + tail_mass))
    xq = 1 - error - cross  # E[x q] = E x^2 - E[x (x-q)]
    qq = xq - cross  # E q^2 = E[x q] - E[(x-q) q]
    gain = xq / qq if qq > 0 else 1.0
    gained = 1 - xq**2 / qq if qq > 0 else 1.0
    return Quantised(step, entropy, error, gain, gained, p0, 2 * (float((mass * k).sum()) + tail_level))


def _randomised(source: Source, step: float) -> Quantised:
    count = _cells(source, step, 0.0)
    j = np.arange(float(count))
    mass, first, square = _panel_sums(source, j * step, step, j * step, 3)
    # Share of each cell [j, j+1] that is rounded up.
    up = first / step
    start = count * step
    tail_mass, tail_entropy, tail_level = _tail(source, start + step / 2, step)
    levels = np.zeros(count + 1)
    levels[:-1] += mass - up
    levels[1:] += up
    p0 = min(1.0, 2 * float(levels[0]))
    entropy = float(_plogp(np.array(p0))) + 2 * (float(_plogp(levels[1:]).sum()) + tail_entropy)
    variance = 2 * (float((first * step - square).sum()) + tail_mass * step**2 / 6)
    mean_level = 2 * (float((levels[1:] * np.arange(1, count + 1)).sum()) + tail_level)
    return Quantised(step, entropy, variance, 1.0, variance, p0, mean_level)


def _dithered(source: Source, step: float) -> Quantised:
    require(step <= 100, f"with dither the step must be at most 100 standard deviations, got {step:g}")
    law = _randomised(source, step)
    shifts = max(64, math.ceil(16 * step / source.scale))
    count = _cells(source, step, 0.0)
    fine = step / shifts
    left = np.arange(float((count + 1) * shifts)) * fine
    half = _panel_sums(source, left, fine, left, 1)[0]
    mass = np.concatenate([half[::-1], half])
    tail_entropy = _tail(source, left[-1] + fine, step)[1]
    # Cells shifted by a whole number of fine intervals: sums of `shifts` neighbours. The mean over shifts is a trapezoid rule.
    running = np.concatenate([[0.0], np.cumsum(mass)])
    entropy = 0.0
    for s in range(shifts):
        edges = np.concatenate([[0.0], running[s::shifts], [running[-1]]])
        entropy += float(_plogp(np.maximum(np.diff(edges), 0.0)).sum()) / shifts
    variance = step**2 / 12
    return Quantised(step, entropy + 2 * tail_entropy, variance, 1.0, variance, law.zeros, law.mean_level)


_ROUNDINGS: dict[str, Callable[[Source, float], Quantised]] = {
    "nearest": _nearest,
    "randomised": _randomised,
    "dithered": _dithered,
}


def quantise(source: Source, step: float, rounding: Rounding = "nearest") -> Quantised:
    """Entropy, error and lengths of a unit-variance source quantised with ``step`` (in standard deviations).

    >>> result = quantise(gaussian(), 2 * math.sqrt(0.1))
    >>> round(result.entropy, 3), round(result.distortion, 4), round(result.paper_bits, 3)
    (2.732, 0.0333, 2.8)
    """
    if rounding not in _ROUNDINGS:
        raise BadConfiguration(f"rounding must be nearest, randomised or dithered, got {rounding!r}")
    require(1e-3 <= step <= 1e4, f"step must lie between 0.001 and 10000 standard deviations, got {step:g}")
    return _ROUNDINGS[rounding](source, step)


def quantise_to_error(source: Source, error: float, rounding: Rounding = "nearest") -> Quantised:
    """The quantiser whose error (after the gain, or the variance for the unbiased roundings) equals ``error``.

    >>> round(quantise_to_error(gaussian(), 0.25).entropy, 3)
    1.252
    """
    require(error > 0, f"error must be positive, got {error:g}")
    require(rounding != "nearest" or error < 1, f"nearest rounding errs by less than 1, got {error:g}")
    if rounding == "dithered":
        return quantise(source, math.sqrt(12 * error), rounding)
    low, high = 1e-3, 1e-2
    while quantise(source, high, rounding).distortion_with_gain < error:
        low, high = high, 2 * high
        require(high <= 1e4, f"no step reaches the error {error:g}")
    require(quantise(source, low, rounding).distortion_with_gain < error, f"the error {error:g} needs a step below 0.001")
    for _ in range(60):
        middle = math.sqrt(low * high)
        if quantise(source, middle, rounding).distortion_with_gain < error:
            low = middle
        else:
            high = middle
        if high / low - 1 < 1e-12:
            break
    return quantise(source, math.sqrt(low * high), rounding)
