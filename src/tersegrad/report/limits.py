"""Every bound of :mod:`tersegrad.theory` at one point, as a table."""

from __future__ import annotations

from tersegrad.core.errors import BadConfiguration
from tersegrad.report.tables import Column, Table, number
from tersegrad.theory import bounds, classes

COLUMNS = (Column("bound", number=False), Column("bits"), Column("bits/coord"), Column("32/bits"), Column("holds for", number=False))


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
        lines = [
            ("uncertainty principle", float(bounds.uncertainty_bits_unbiased(omega, dim)), "any unbiased compressor"),
        ]
        title = f"Fewest bits for {dim:,} coordinates, unbiased with variance omega = {omega:g} (alpha = {shrunk:.4g} after shrinking)"
        factor = f"Iterations of gradient descent: {float(classes.iteration_factor_unbiased(omega)):.4g} times those without compression."
    else:
        assert alpha is not None
        if not 0 < alpha < 1:
            raise BadConfiguration(f"alpha must lie strictly between 0 and 1, got {alpha:g}")
        lines = [
            ("uncertainty principle", float(bounds.uncertainty_bits(alpha, dim)), "error on average, norm included"),
            ("sphere rate-distortion", float(bounds.sphere_rate_bits(alpha, dim)), "error on average, norm extra"),
            ("cap bound, worst case", float(bounds.worst_case_lower_bits(alpha, dim)), "error always; longest message"),
            ("cap bound, average case", float(bounds.average_case_lower_bits(alpha, dim)), "error always; mean message"),
            ("refined, worst case", float(bounds.worst_case_refined_bits(alpha, dim)), "error always; up to a constant"),
            ("covering codebook", float(bounds.worst_case_upper_bits(alpha, dim)), "reachable at exponential cost, up to a constant"),
            ("spherical compression", float(bounds.average_case_upper_bits(alpha, dim)), "reachable on average, norm extra"),
        ]
        title = f"Fewest bits for {dim:,} coordinates at error alpha = {alpha:g}"
        factor = f"Iterations of gradient descent: {float(classes.iteration_factor_contractive(alpha)):.4g} times those without compression."
    rows = tuple(
        (
            name,
            f"{bits:,.1f}" if bits < 1e9 else f"{bits:.6g}",
            f"{bits / dim:.4f}",
            number(32 * dim / bits if bits > 0 else None, 4),
            scope,
        )
        for name, bits, scope in lines
    )
    return Table(COLUMNS, rows, title, factor)
