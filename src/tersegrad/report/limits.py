"""Every bound of :mod:`tersegrad.theory` at one point, as a table."""

from __future__ import annotations

import math

from tersegrad.core.errors import BadConfiguration
from tersegrad.report.tables import Column, Table, number
from tersegrad.theory import bounds, classes, lengths

COLUMNS = (
    Column("bound", number=False),
    Column("bits"),
    Column("bits/coord"),
    Column("32/bits"),
    Column("meaning", number=False),
)


def _sent(per_coordinate: float, dim: int) -> float:
    """The published length of a dithering code: 30 bits for the scale, log2 d for the number of zeros, and the coordinates."""
    return 30 + math.log2(dim) + per_coordinate * dim


def bounds_at(*, dim: int, alpha: float | None = None, omega: float | None = None) -> Table:
    """The fewest bits for ``dim`` coordinates at error ``alpha`` or variance ``omega`` (exactly one of them)."""
    if (alpha is None) == (omega is None):
        raise BadConfiguration("give one of alpha (a contractive compressor's error) and omega (an unbiased one's variance)")
    if dim < 2:
        raise BadConfiguration(f"dim must be at least 2, got {dim}")
    if omega is not None:
        if not 0 < omega < float("inf"):
            raise BadConfiguration(f"omega must be positive and finite, got {omega:g}")
        shrunk = float(classes.alpha_from_omega(omega))
        slower = float(classes.iteration_factor_unbiased(omega))
        lines = [
            ("uncertainty principle", float(bounds.uncertainty_bits_unbiased(omega, dim)), "no unbiased compressor sends less"),
            (
                "random sparse dithering",
                _sent(lengths.randomised_dithering_bits(omega), dim),
                "reached on average, norm included",
            ),
        ]
        title = f"Bits for {dim:,} coordinates, unbiased with variance omega = {omega:g} (alpha = {shrunk:.4g} when shrunk)"
    else:
        assert alpha is not None
        if not 0 < alpha < 1:
            raise BadConfiguration(f"alpha must lie strictly between 0 and 1, got {alpha:g}")
        slower = float(classes.iteration_factor_contractive(alpha))
        lines = [
            ("uncertainty principle", float(bounds.uncertainty_bits(alpha, dim)), "lower: error on average, norm included"),
            ("sphere rate-distortion", float(bounds.sphere_rate_bits(alpha, dim)), "lower: error on average, norm extra"),
            ("cap bound, worst case", float(bounds.worst_case_lower_bits(alpha, dim)), "lower: error always, longest message"),
            ("cap bound, average case", float(bounds.average_case_lower_bits(alpha, dim)), "lower: error always, mean message"),
            ("refined, worst case", float(bounds.worst_case_refined_bits(alpha, dim)), "lower: error always, up to a constant"),
            (
                "covering codebook",
                float(bounds.worst_case_upper_bits(alpha, dim)),
                "reachable at exponential cost, up to a constant",
            ),
            ("spherical compression", float(bounds.average_case_upper_bits(alpha, dim)), "reached on average, norm extra"),
            ("sparse dithering", _sent(lengths.beta_det(alpha), dim), "reached always in linear time, norm included"),
        ]
        title = f"Bits for {dim:,} coordinates at error alpha = {alpha:g}"
    factor = f"Gradient descent takes at most {slower:.4g} times the iterations that it takes without compression."
    rows = tuple(
        (
            name,
            f"{bits:,.1f}" if bits < 1e9 else f"{bits:.6g}",
            f"{bits / dim:.4f}" if bits < 1e9 * dim else f"{bits / dim:.4g}",
            number(32 * dim / bits if bits > 0 else None, 4),
            scope,
        )
        for name, bits, scope in lines
    )
    return Table(COLUMNS, rows, title, factor)
