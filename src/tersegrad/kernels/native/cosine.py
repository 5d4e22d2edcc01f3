"""The discrete cosine transform of tiles on the compiled kernels; see ``kernels/reference/cosine.py`` for the definition."""

from __future__ import annotations

import functools

from torch import Tensor

from tersegrad.kernels.native.module import module
from tersegrad.kernels.reference.chunks import areas
from tersegrad.kernels.reference.cosine import cosines

__all__ = ["cosine_forward", "cosine_inverse"]


@functools.lru_cache(maxsize=512)
def _basis(n: int, transposed: bool) -> Tensor:
    wide = cosines(n).double()
    return (wide.T if transposed else wide).contiguous().reshape(-1)


def _both(x: Tensor, regions: Tensor, out: Tensor, forward: bool) -> Tensor:
    for area in areas(regions):
        end = area.start + area.rows * area.cols
        module.cosine_transform(
            x[area.start : end], out[area.start : end], area.rows, area.cols, area.height, area.width,
            _basis(area.height, False), _basis(area.width, forward), forward,
        )  # fmt: skip
    return out


def cosine_forward(x: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    return _both(x, regions, out, True)


def cosine_inverse(y: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    return _both(y, regions, out, False)
