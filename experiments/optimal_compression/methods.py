"""The algorithms, with the step sizes that their theory asks for and the plateaus that it predicts.

L is the smoothness of f, M the largest and Q the root mean square of the workers' constants, mu the strong convexity, n the
number of workers, zeta^2 the mean of ||grad f_i(x*)||^2.

``cgd``   x' = x - gamma mean_i C(g_i), g_i = grad f_i(x): compressed gradient descent. One worker: gamma = 1/L for a contractive
          C, 1/((1+omega) L) for an unbiased one; it converges to the optimum, because g vanishes there. Several workers, unbiased:
          gamma = 1/(L + 2 omega M/n); from E||g||^2 <= 2 (L + 2 omega M/n)(f - f*) + 2 omega zeta^2/n it contracts by 1 - gamma mu
          down to a plateau E||x-x*||^2 <= 2 gamma omega zeta^2/(n mu): single gradients do not vanish, nor does their noise.
``diana`` compresses g_i - h_i and learns h_i' = h_i + C(g_i - h_i)/(1+omega). gamma = 1/(L + 6 omega M/n), and V = ||x-x*||^2 +
          (4 omega (1+omega)/n) gamma^2 mean ||h_i - grad f_i(x*)||^2 contracts by 1 - min(gamma mu, 1/(2+2 omega)): no plateau.
``ef``    error feedback: sends C(e_i + gamma g_i) and keeps the rest e_i. With theta = 1 - sqrt(alpha), beta = alpha/theta and gamma =
          min(1/(4L), 1/sqrt(48 L M beta/theta)), the virtual iterate x - mean e_i obeys V = ||x - e - x*||^2 + (6 gamma L/theta)
          mean||e_i||^2 -> (1 - gamma mu/2) V + 12 (beta/theta) gamma^3 L zeta^2: a plateau of order gamma^2 zeta^2. (The published
          analyses, e.g. Beznosikov et al. 2002.12410, have the same form with larger constants.)
``ef21``  compresses g_i - h_i with a contractive C and h_i' = h_i + C(g_i - h_i). gamma = min(1/(L + Q sqrt(2 beta/theta)), theta/(2 mu))
          (Richtarik, Sokolov, Fatkhullin 2106.05203, Theorem 2): linear convergence, no plateau.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from experiments.optimal_compression.compress import Channel
from experiments.optimal_compression.problems import Array, Split

Algorithm = Literal["cgd", "diana", "ef", "ef21"]


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood: after ``iteration`` steps and ``nbytes`` sent by each worker (mean)."""

    iteration: int
    nbytes: float
    distance: float  # ||x - x*||^2 / ||x^0 - x*||^2


@dataclasses.dataclass(frozen=True)
class Run:
    """One curve."""

    problem: str
    workers: int
    algorithm: Algorithm
    compressor: str
    guarantee: str
    factor: float  # iterations relative to GD that theory allows: 1/(1-alpha) or 1+omega; for one worker
    gamma: float
    smoothness: float  # L of f
    condition: float
    reached: dict[str, Point | None]  # by target, the first point at or below it
    plateau: float  # mean distance over the last quarter of the run
    ceiling: float | None  # the plateau's proven upper bound
    predicted: float | None  # the plateau to first order in gamma, from the noise measured at the optimum
    points: tuple[Point, ...]

    @property
    def settled(self) -> bool:
        """Whether the distance no longer falls: its geometric mean is not sqrt(2) times less in the last quarter than before."""
        logs = [math.log2(max(p.distance, 1e-300)) for p in self.points]
        quarter = max(1, len(logs) // 4)
        third, last = logs[-2 * quarter : -quarter], logs[-quarter:]
        return len(third) == len(last) and sum(last) / quarter > sum(third) / quarter - 0.5


def step_size(algorithm: Algorithm, split: Split, channel: Channel) -> float:
    """The theoretical step size."""
    p, n = split.problem, split.workers
    smooth, largest = p.smoothness, float(split.smoothness.max())
    if algorithm == "cgd":
        if n == 1:
            return 1 / smooth if channel.guarantee.kind == "contractive" else 1 / ((1 + channel.omega) * smooth)
        return 1 / (smooth + 2 * channel.omega * largest / n)
    if algorithm == "diana":
        return 1 / (smooth + 6 * channel.omega * largest / n)
    theta = 1 - math.sqrt(channel.alpha)
    beta = channel.alpha / theta
    if algorithm == "ef":
        return min(1 / (4 * smooth), 1 / math.sqrt(48 * smooth * largest * beta / theta)) if beta else 1 / (4 * smooth)
    mean = math.sqrt(float(np.square(split.smoothness).mean()))
    return min(1 / (smooth + mean * math.sqrt(2 * beta / theta)), theta / (2 * p.strong_convexity))


def ceiling(algorithm: Algorithm, split: Split, channel: Channel, gamma: float) -> float | None:
    """Upper bound on the plateau of ||x-x*||^2/||x^0-x*||^2, for the methods that have one."""
    p, n = split.problem, split.workers
    start = float(np.square(p.optimum).sum())
    if n == 1 or algorithm not in ("cgd", "ef"):
        return None
    if algorithm == "cgd":
        return 2 * gamma * channel.omega * split.heterogeneity / (n * p.strong_convexity) / start
    theta = 1 - math.sqrt(channel.alpha)
    ratio = channel.alpha / theta**2
    lyapunov = 24 * ratio * gamma**2 * p.condition * split.heterogeneity
    return 2 * lyapunov * (1 + theta / (6 * gamma * p.smoothness)) / start


def predicted_plateau(split: Split, channel: Channel, gamma: float, draws: int = 40) -> float:
    """First-order plateau of distributed compressed gradient descent: x - x* is an autoregression driven by the noise at x*.

    Along an eigenvector of the Hessian with eigenvalue s its variance is gamma v/(s (2 - gamma s)), v the variance of the mean
    message there.
    """
    p = split.problem
    before = channel.sent
    rows = split.gradients(p.optimum)
    noise = np.stack([channel.send_all(rows, 1 << 24 | k).mean(axis=0) - rows.mean(axis=0) for k in range(draws)])
    channel.sent = before
    values, vectors = np.linalg.eigh(p.hessian(p.optimum))
    variance = np.square(noise @ vectors).mean(axis=0)
    return float((gamma * variance / (values * (2 - gamma * values))).sum() / np.square(p.optimum).sum())


def _cgd(split: Split, channel: Channel, gamma: float) -> Iterator[Array]:
    x = np.zeros(split.problem.dimension)
    for t in range(1 << 30):
        x = x - gamma * channel.send_all(split.gradients(x), t).mean(axis=0)
        yield x


def _diana(split: Split, channel: Channel, gamma: float) -> Iterator[Array]:
    x = np.zeros(split.problem.dimension)
    learned = np.zeros((split.workers, x.size))
    rate = 1 / (1 + channel.omega)
    for t in range(1 << 30):
        arrived = channel.send_all(split.gradients(x) - learned, t)
        x = x - gamma * (learned + arrived).mean(axis=0)
        learned = learned + rate * arrived
        yield x


def _ef(split: Split, channel: Channel, gamma: float) -> Iterator[Array]:
    x = np.zeros(split.problem.dimension)
    rest = np.zeros((split.workers, x.size))
    for t in range(1 << 30):
        wanted = rest + gamma * split.gradients(x)
        arrived = channel.send_all(wanted, t)
        rest = wanted - arrived
        x = x - arrived.mean(axis=0)
        yield x


def _ef21(split: Split, channel: Channel, gamma: float) -> Iterator[Array]:
    x = np.zeros(split.problem.dimension)
    learned = np.zeros((split.workers, x.size))
    for t in range(1 << 30):
        learned = learned + channel.send_all(split.gradients(x) - learned, t)
        x = x - gamma * learned.mean(axis=0)
        yield x


_ITERATES: dict[Algorithm, Callable[[Split, Channel, float], Iterator[Array]]] = {
    "cgd": _cgd,
    "diana": _diana,
    "ef": _ef,
    "ef21": _ef21,
}


def run(
    split: Split,
    algorithm: Algorithm,
    text: str,
    *,
    targets: tuple[float, ...] = (1e-4, 1e-10),
    iterations: int = 20000,
    slower: float = 1.0,
    predict: bool = False,
    most_bytes: float = math.inf,
) -> Run:
    """Run until the last target is reached, for ``iterations`` or ``most_bytes`` a worker at most.

    ``slower`` divides the theoretical step size; ``predict`` adds the first-order plateau.
    """
    problem = split.problem
    channel = Channel(text, problem.dimension, shrink=algorithm in ("ef", "ef21"))
    gamma = step_size(algorithm, split, channel) / slower
    start = float(np.square(problem.optimum).sum())
    points = [Point(0, 0.0, 1.0)]
    reached: dict[str, Point | None] = {f"{t:g}": None for t in targets}
    for iteration, x in enumerate(_ITERATES[algorithm](split, channel, gamma), 1):
        distance = float(np.square(x - problem.optimum).sum()) / start
        points.append(Point(iteration, channel.sent / split.workers, distance))
        for target in targets:
            if distance <= target and reached[f"{target:g}"] is None:
                reached[f"{target:g}"] = points[-1]
        if distance <= targets[-1] or iteration >= iterations or points[-1].nbytes >= most_bytes or not distance < 1e6:
            break
    tail = [p.distance for p in points[-max(1, len(points) // 4) :]]
    unbiased = channel.guarantee.kind == "unbiased"
    return Run(
        problem=problem.name,
        workers=split.workers,
        algorithm=algorithm,
        compressor=text,
        guarantee=str(channel.guarantee),
        factor=1 + channel.guarantee.value if unbiased else 1 / (1 - channel.alpha),
        gamma=gamma,
        smoothness=problem.smoothness,
        condition=problem.condition,
        reached=reached,
        plateau=sum(tail) / len(tail),
        ceiling=ceiling(algorithm, split, channel, gamma),
        predicted=predicted_plateau(split, channel, gamma) if predict else None,
        points=_thin(points),
    )


def _thin(points: list[Point], most: int = 100) -> tuple[Point, ...]:
    """At most about ``most`` points, evenly spaced, the last one kept: enough for a figure."""
    stride = max(1, -(-len(points) // most))
    kept = points[::stride]
    return tuple(kept if kept[-1] is points[-1] else [*kept, points[-1]])
