"""Steps for a target error, from samples: the definition, by the search of :mod:`~tersegrad.core.targets`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.numbers import HUGE, TINY
from tersegrad.core.targets import COARSE, MARGIN, Looks, rounding_energy, sampled_step, step_at
from tersegrad.kernels.reference.dither import dither_sample

__all__ = ["dither_aim"]

Sample = Callable[[Tensor, float, int, Tensor, Tensor | None], None]


def dither_aim(x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
    return aimed(dither_sample, x, alpha, carry, norm)


def aimed(sample: Sample, x: Tensor, alpha: float, carry: Tensor | None, norm: float) -> Tensor:
    """``dither_aim`` by means of one's own ``dither_sample``."""
    d = x.numel()

    def ask(most: int, step: float) -> Tensor:
        found = torch.empty(2, dtype=torch.float64, device=x.device)
        sample(x, step, max(1, d // most), found, carry)
        return found

    look = Looks(ask)
    seen = look(COARSE, HUGE)[1] or norm
    if not 0 < seen < math.inf:
        return _told(TINY, 0.0, 0.0, seen, x.device)
    bracket = sampled_step(look, d, alpha, rounding_energy(seen, d), MARGIN)
    return _told(step_at(bracket.start), bracket.start, bracket.slope, seen, x.device)


def _told(step: float, at: float, slope: float, norm: float, device: torch.device) -> Tensor:
    return host.send(torch.tensor([step, at, slope, norm], dtype=torch.float64), device)
