"""Adversarial vectors for Sparse Dithering: what the code costs on them, against its bounds.

With h = sqrt(nu/d) and u = x/||x||, a coordinate just above an odd multiple (2k-1) h is rounded up to level k: it pays for k
with the least of the norm, and errs by the most. The longest message of the published code has two neighbouring such levels and
a share of zeros; the longest message of an ideal adaptive code has level k with probability proportional to
exp(-lambda (2|k|-1)^2). Both are built here and coded to real bytes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from tersegrad import Context, Message, Spec, parse, theory
from tersegrad.report.tables import Column, Table

NUS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
ABOVE = 1e-4  # coordinates lie this much (relative) above the odd multiples
SEED = 0


@dataclasses.dataclass(frozen=True)
class Length:
    """One message, or the mean of a few."""

    vector: str
    compressor: str
    nu: float  # or omega
    numel: int
    bits: float  # of the whole message
    error: float
    bound: float  # published bound on the whole message: 30 + log2 d + beta d
    exact: float | None  # proven worst case of this coder, bits per coordinate
    lower: float  # bits per coordinate that nobody can beat at this nu or omega

    @property
    def per_coordinate(self) -> float:
        """Bits per coordinate beyond the header of 31 + log2 d bits."""
        return (self.bits - 31 - math.log2(self.numel)) / self.numel


def _from_levels(counts: dict[int, int], numel: int, nu: float) -> Tensor:
    """A vector with ``counts[k]`` coordinates just above (2k-1) h, in a fixed random order and with random signs, else zeros."""
    magnitude = np.zeros(numel)
    at = 0
    for k, count in counts.items():
        magnitude[at : at + count] = (2 * k - 1) * math.sqrt(nu / numel) * (1 + ABOVE)
        at += count
    generator = np.random.default_rng(SEED)
    signs = generator.integers(0, 2, numel) * 2 - 1
    return torch.from_numpy(generator.permutation(magnitude) * signs).float()


def _counts(shares: dict[int, float], numel: int, nu: float) -> dict[int, int]:
    """Whole numbers near the shares whose coordinates have norm one, or just less: then every level is what it should be."""
    energy = numel / (nu * (1 + ABOVE) ** 2)
    scale = energy / sum(share * (2 * k - 1) ** 2 for k, share in shares.items())
    counts = {k: int(share * scale) for k, share in shares.items()}
    lack = energy - sum(count * (2 * k - 1) ** 2 for k, count in counts.items())
    for k in sorted(counts, reverse=True):  # the largest levels first, which leaves little for many small ones
        more = int(lack / (2 * k - 1) ** 2)
        counts[k] += more
        lack -= more * (2 * k - 1) ** 2
    return counts


def longest_for_paper(numel: int, nu: float) -> Tensor:
    """The vector on which the published code is longest."""
    best: tuple[float, dict[int, float]] = (-1.0, {})
    for k in range(1, 60):
        low, high = (2 * k - 1) ** 2, (2 * k + 1) ** 2
        price = 1 / (high - low)  # of a unit of energy, where both levels are worth the same
        share = 1 / (1 + 2.0 ** -(1 + k - price * low))
        mixed = (1 / (nu * share) - low) / (high - low)  # of the non-zeros, at the upper level
        options = [{k: share * (1 - mixed), k + 1: share * mixed}] if 0 <= mixed <= 1 else []
        if 1 / (nu * low) <= 1:
            options.append({k: 1 / (nu * low)})
        for shares in options:
            total = sum(shares.values())
            bits = theory.binary_entropy(min(total, 1.0)) + sum(p * (1 + j) for j, p in shares.items())
            best = max(best, (bits, shares), key=lambda b: b[0])
    return _from_levels(_counts(best[1], numel, nu), numel, nu)


def longest_for_ideal(numel: int, nu: float) -> Tensor:
    """The vector on which an ideal adaptive code is longest: levels of largest entropy for their energy."""
    k = np.arange(1, 400)
    squares = (2.0 * k - 1) ** 2

    def law(price: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        weights = np.exp(-price * squares)
        return np.asarray(2 * weights / (1 + 2 * weights.sum()))

    low, high = 1e-6, 10.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if float(law(middle) @ squares) > 1 / nu else (low, middle)
    shares = {int(j): float(p) for j, p in zip(k, law(high)) if p * numel >= 1}
    return _from_levels(_counts(shares, numel, nu), numel, nu)


def one_hot(numel: int) -> Tensor:
    """One coordinate."""
    x = torch.zeros(numel)
    x[numel // 3] = -1.0
    return x


def halfway(numel: int, omega: float) -> Tensor:
    """All coordinates at half-integer multiples of the step, where stochastic rounding has its largest variance."""
    level = next(k for k in range(1, 1000) if (2 * k + 1) ** 2 > 1 / omega)
    low, high = (2 * level - 1) ** 2, (2 * level + 1) ** 2
    upper = round(numel * (1 / omega - low) / (high - low))
    return _from_levels({level: numel - upper, level + 1: upper}, numel, omega)


def lengths(text: str, x: Tensor, *, vector: str, nu: float, messages: int = 1) -> Length:
    """Encode, decode and compare with the bounds."""
    compressor = parse(text)
    d, spec = x.numel(), Spec.flat(x.numel())
    norm = float(x.double().square().sum())
    bits, error = 0.0, 0.0
    for step in range(messages):
        ctx = Context(seed=SEED, step=step)
        data = compressor.encode(x, spec, compressor.init(spec, "cpu"), ctx)[0].tobytes()
        decoded = compressor.decode(Message.frombytes(data), spec, ctx)
        bits += 8 * len(data) / messages
        error += float((decoded.double() - x.double()).square().sum()) / norm / messages
    randomised = text.startswith("random")
    beta = theory.randomised_dithering_bits(nu) if randomised else theory.beta_det(nu)
    exact = None if randomised else theory.beta_star(nu) if "paper" in text else theory.beta_ideal(nu)
    lower = theory.gaussian_rate(nu / (1 + nu)) if randomised else 0.0 if nu >= 1 else theory.gaussian_rate(nu)
    return Length(vector, text, nu, d, bits, error, 30 + math.log2(d) + beta * d, exact, lower)


def execute(job: tuple[float | None, int]) -> list[Length]:
    """One nu of deterministic Sparse Dithering, or (None) the randomised one."""
    nu, numel = job
    torch.set_num_threads(1)
    out = []
    if nu is not None:
        gaussian = torch.randn(numel, generator=torch.Generator().manual_seed(SEED))
        vectors = (
            ("longest for the paper's code", longest_for_paper(numel, nu)),
            ("longest for an ideal code", longest_for_ideal(numel, nu)),
            ("one-hot", one_hot(numel)),
            ("Gaussian", gaussian),
        )
        for name, x in vectors:
            for coder in ("paper", "auto"):
                text = f"sparse_dithering(nu={nu:g}, coder={coder}, scale=global)"
                out.append(lengths(text, x, vector=name, nu=nu))
        return out
    for omega, name, x in (
        (9 / 16, "constant", torch.ones(numel)),
        (9 / 16, "halfway", halfway(numel, 9 / 16)),
        (0.25, "constant", torch.ones(numel)),
        (0.25, "halfway", halfway(numel, 0.25)),
        (0.25, "one-hot", one_hot(numel)),
    ):
        for coder in ("paper", "auto"):
            text = f"random_sparse_dithering(omega={omega:g}, coder={coder}, scale=global)"
            out.append(lengths(text, x, vector=name, nu=omega, messages=5))
    return out


def table(found: list[Length], title: str) -> Table:
    """Measured lengths against the bounds, bits per coordinate beyond the header."""
    rows = []
    for m in found:
        beta = (m.bound - 30 - math.log2(m.numel)) / m.numel
        rows.append(
            (
                f"{m.nu:g}",
                m.vector,
                "paper" if "paper" in m.compressor else "auto",
                f"{m.per_coordinate:.4f}",
                f"{m.bits:,.0f}",
                f"{m.bound:,.0f}",
                f"{beta:.4f}",
                "-" if m.exact is None else f"{m.exact:.4f}",
                f"{m.lower:.4f}",
                f"{m.error:.6f}",
            )
        )
    columns = (
        Column("nu or omega"), Column("vector", number=False), Column("coder", number=False), Column("bits/coord"),
        Column("message, bits"), Column("bound, bits"), Column("bound/coord"), Column("exact worst case"),
        Column("lower bound"), Column("error"),
    )  # fmt: skip
    note = (
        "bits/coord: without the header of 31 + log2 d bits. bound: 30 + log2 d + beta d, on every message (deterministic), on the\n"
        "mean (randomised: mean of 5). exact worst case: of this coder over all long vectors, the ideal code's for auto."
    )
    return Table(columns, tuple(rows), title, note)
