"""The rate-error plane: bits per coordinate and error of every registered compressor, on four kinds of data."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tersegrad import bench, parse, recipes, theory
from tersegrad.bench import Rate
from tersegrad.demo import digits_gradients, unit_variance
from tersegrad.report.tables import Column, Table, number, signed

SOURCES = ("gaussian", "laplace", "student_t")
TITLES = {
    "gaussian": "Gaussian",
    "laplace": "Laplace",
    "student_t": "Student-t, 3 degrees of freedom",
    "gradients": "gradients of a network on digits",
}
SEED = 0

# Parameters for each compressor; a registered name without a line here is measured with its defaults.
SWEEPS: dict[str, tuple[str, ...]] = {
    "int8": ("int8",),
    "int4": ("int4", "int4(block=128)"),
    "natural": ("natural", "natural(coder=rans)"),
    "natural_dithering": tuple(f"natural_dithering(levels={s}, coder=rans)" for s in (2, 4, 8)),
    "qsgd": (
        *(f"qsgd(bits={b}, norm=max)" for b in (2, 3, 4, 6)),
        *(f"qsgd(levels={s}, norm=max, bucket=512, coder=rans)" for s in (1, 4, 16)),
        "qsgd(bits=4)",
    ),
    "ternary": ("ternary", "ternary(bucket=512)"),
    "sparse_dithering": (
        *(f"sparse_dithering(alpha={a})" for a in (0.9, 0.7, 0.5, 0.25, 0.1, 0.03, 0.01)),
        *(f"sparse_dithering(nu={v}, coder=paper)" for v in (1.0, 0.25, 0.1, 0.03, 0.01)),
    ),
    "random_sparse_dithering": (
        *(f"random_sparse_dithering(omega={w})" for w in (4.0, 1.0, 0.25, 0.1, 0.03, 0.01)),
        *(f"random_sparse_dithering(omega={w}, coder=paper)" for w in (1.0, 0.25, 0.1)),
    ),
    "subtractive_dithering": tuple(f"subtractive_dithering(omega={w})" for w in (1.0, 0.25, 0.1, 0.03, 0.01)),
    "trellis": (
        *(f"trellis(alpha={a})" for a in (0.5, 0.25, 0.1, 0.03, 0.01)),
        *(f"trellis(alpha={a}, states=32)" for a in (0.25, 0.1, 0.03)),
    ),
    "dithered_trellis": tuple(f"dithered_trellis(omega={w})" for w in (1.0, 0.25, 0.1, 0.03, 0.01)),
    "spherical": ("spherical(alpha=0.5, block=8)", "spherical(alpha=0.3, block=8)"),
    "top_k": (*(f"top_k(fraction={f})" for f in (0.001, 0.01, 0.1, 0.3)), "top_k(fraction=0.1, values=bf16)"),
    "random_k": tuple(f"random_k(fraction={f}, unbiased=false)" for f in (0.01, 0.1, 0.5)),
    "threshold": ("threshold(tau=2.0)", "threshold(tau=1.0)", "threshold(tau=1.0, values=sign)"),
}
# Compressors that need more than a vector (statistics of the samples behind it) have their own experiment.
NEED_STATISTICS = ("vgc", "hybrid")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One compressor on one source, beside the limits at the error that it reached."""

    rate: Rate
    family: str
    worst_case: float | None  # -log2 P(alpha, d) / d: error sure, longest message
    average_case: float | None  # ((d-1)/2) log2(1/alpha) / d: error on average, mean message
    gaussian: float | None  # rate-distortion function of a Gaussian, unbiased form where the compressor is


def configurations(*, quick: bool = False) -> list[tuple[str, str]]:
    """(family, text form) of all that is measured."""
    out = []
    for family in recipes.COMPRESSORS:
        if family in NEED_STATISTICS:
            continue
        texts = SWEEPS.get(family, (family,))
        out += [(family, t) for t in (texts[:1] if quick else texts)]
    return out


def data(source: str, numel: int) -> list[Tensor]:
    """The vectors of one source, scaled to unit variance."""
    if source == "gradients":
        kept, _ = digits_gradients(steps=(1, 25, 100), hidden=512 if numel > 1 << 14 else 32)
        return [unit_variance(g) for g in kept]
    return [unit_variance(bench.draw(source, numel, seed=SEED))]


def measure(family: str, text: str, source: str, vectors: list[Tensor]) -> Measured:
    """Real bytes and errors of one compressor."""
    compressor = parse(text)
    rate = dataclasses.replace(bench.measure_rate(compressor, vectors, source=source), compressor=text)
    unbiased = rate.guarantee.kind == "unbiased"
    alpha = rate.error / (1 + rate.error) if unbiased else rate.error
    if not 0 < alpha < 1:
        return Measured(rate, family, None, None, None)
    d = rate.numel
    return Measured(
        rate,
        family,
        # The bound on sure errors does not carry over to unbiased compressors.
        None if unbiased else theory.neg_log2_cap(alpha, d) / d,
        theory.sphere_rate_bits(alpha, d) / d,
        theory.gaussian_rate(alpha),
    )


def execute(job: tuple[str, int, bool]) -> list[Measured]:
    """Everything on one source."""
    source, numel, quick = job
    torch.set_num_threads(1)
    vectors = data(source, numel)
    return [measure(family, text, source, vectors) for family, text in configurations(quick=quick)]


def table(measured: list[Measured]) -> Table:
    """One source's compressors, most bits first."""
    rows = []
    for m in sorted(measured, key=lambda m: -m.rate.bits_per_coordinate):
        r = m.rate
        rows.append(
            (
                r.compressor,
                str(r.guarantee),
                f"{r.bits_per_coordinate:.4f}",
                number(r.error, 4),
                number(m.worst_case, 5),
                number(m.average_case, 5),
                number(m.gaussian, 5),
                signed(r.bits_per_coordinate - m.gaussian) if m.gaussian is not None else "-",
            )
        )
    columns = (
        Column("compressor", number=False), Column("guarantee", number=False), Column("bits/coord"), Column("error"),
        Column("worst-case limit"), Column("average-case limit"), Column("Gaussian limit"), Column("above it"),
    )  # fmt: skip
    first = measured[0].rate
    return Table(columns, tuple(rows), f"{TITLES[first.source]}, {first.numel:,} coordinates")
