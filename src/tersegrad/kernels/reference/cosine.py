"""The orthonormal discrete cosine transform of tiles, in plain torch: the definition (``spec/wire.md``, "dct").

Products of float32 numbers are exact in float64, and sums run in ascending order, so that every machine gets the same bits, with fused
multiply-adds or without. Each of the two passes rounds its sums to float32.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.kernels.reference.chunks import areas

__all__ = ["cosine_forward", "cosine_inverse"]


@functools.lru_cache(maxsize=256)
def cosines(n: int) -> Tensor:
    """Row j: the j-th basis vector of length ``n``, float32."""
    rows = [
        [math.sqrt((2 if j else 1) / n) * math.cos(math.pi * ((2 * i + 1) * j % (4 * n)) / (2 * n)) for i in range(n)]
        for j in range(n)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


def _pass(x: Tensor, basis: Tensor) -> Tensor:
    """Vectors x (..., n) times a basis (n, m), sums in ascending order."""
    wide = host.send(basis.double(), x.device)
    total = torch.zeros(*x.shape[:-1], basis.shape[1], dtype=torch.float64, device=x.device)
    for j in range(basis.shape[0]):
        total += x[..., j : j + 1].double() * wide[j]
    return total.to(torch.float32)


def _both(x: Tensor, regions: Tensor, out: Tensor, forward: bool) -> Tensor:
    for area in areas(regions):
        tiles = area.tiles(x)
        down, along = cosines(area.height), cosines(area.width)
        half = _pass(tiles.transpose(2, 3), down.T if forward else down).transpose(2, 3)
        area.tiles(out).copy_(_pass(half, along.T if forward else along))
    return out


def cosine_forward(x: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    return _both(x, regions, out, True)


def cosine_inverse(y: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    return _both(y, regions, out, False)
