"""Steps from norms, and for a target error from samples: the definition, by the search of :mod:`~tersegrad.core.targets`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.targets import (
    COARSE,
    MARGIN,
    TRELLIS_MARGIN,
    Looks,
    rounding_energy,
    sampled_step,
    step_at,
    strided,
    toward_zero,
)
from tersegrad.kernels.reference.dither import dither_sample
from tersegrad.kernels.reference.rounding import sum_squares
from tersegrad.kernels.reference.trellis import trellis_error

__all__ = ["dither_aim", "norm_step", "trellis_aim"]

Sample = Callable[[Tensor, float, int, Tensor, Tensor | None], None]
Error = Callable[[Tensor, float, int, Tensor | None], tuple[Tensor, Tensor]]


def norm_step(x: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
    return stepped(sum_squares(x), by, over, factor, otherwise)


def stepped(norm: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
    """``norm_step`` by means of one's own squared norm."""
    value = float(norm)
    step = toward_zero(factor * math.sqrt(by * value / over)) if 0 < value < math.inf else otherwise
    return host.send(torch.tensor([step, value], dtype=torch.float64), norm.device)


def dither_aim(x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
    return aimed(dither_sample, x, alpha, carry, norm)


def trellis_aim(x: Tensor, alpha: float, kappa: float, states: int, layout: Tensor | None = None, norm: float = 0.0) -> Tensor:
    return searched(trellis_error, x, alpha, kappa, states, layout, norm)


def aimed(sample: Sample, x: Tensor, alpha: float, carry: Tensor | None, norm: float) -> Tensor:
    """``dither_aim`` by means of one's own ``dither_sample``."""

    def ask(most: int, step: float) -> Tensor:
        found = torch.empty(2, dtype=torch.float64, device=x.device)
        sample(x, step, max(1, x.numel() // most), found, carry)
        return found

    return _searched(x, ask, alpha, lambda seen: rounding_energy(seen, x.numel()), MARGIN, norm)


def searched(error: Error, x: Tensor, alpha: float, kappa: float, states: int, layout: Tensor | None, norm: float) -> Tensor:
    """``trellis_aim`` by means of one's own ``trellis_error``."""

    @functools.cache
    def sample(most: int) -> Tensor:
        return strided(x, most)

    def ask(most: int, step: float) -> Tensor:
        part = sample(most)
        # A sample has no rows.
        return torch.stack(error(part, step, states, layout if part is x else None))

    return _searched(x, ask, alpha, lambda seen: seen / (kappa * sample(COARSE).numel()), TRELLIS_MARGIN, norm)


def _searched(
    x: Tensor,
    ask: Callable[[int, float], Tensor],
    alpha: float,
    energy: Callable[[float], float],
    margin: float,
    norm: float,
) -> Tensor:
    look = Looks(ask)
    seen = look(COARSE, HUGE)[1] or norm
    step, at, slope = TINY, 0.0, 0.0
    if 0 < seen < math.inf:
        bracket = sampled_step(look, x.numel(), alpha, energy(seen), margin)
        step, at, slope = step_at(bracket.start), bracket.start, bracket.slope
    return host.send(torch.tensor([step, at, slope, seen], dtype=torch.float64), x.device)
