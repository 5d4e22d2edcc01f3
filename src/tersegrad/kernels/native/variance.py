"""Checked wrappers of the compiled kernels of variance-based compression (``native/src/variance*.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.kernels.native.module import flag, module, number

__all__ = ["hybrid_select", "variance_select"]


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _select(r, v, x, s, alpha, 0.0, zeta)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _select(r, v, x, s, alpha, tau, zeta)


def _select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    next_r, next_v = (buffers.empty(x.numel(), torch.float32, x.device) for _ in range(2))
    indices, values, finite = module.variance_select(r, v, x, s, alpha, zeta, tau, next_r, next_v)
    return next_r, next_v, torch.from_numpy(indices), torch.from_numpy(values), number(len(indices)), flag(finite)
