"""Checked wrappers of the compiled kernels for chunks (``native/src/chunk*.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import array, module

__all__ = ["chunk_bins", "chunk_carry", "chunk_choose", "chunk_decode", "chunk_encode", "chunk_scatter"]


def chunk_choose(x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Whether all of ``x`` is finite, 0-d; only then the outputs are defined."""
    return torch.tensor(module.chunk_choose(array(x), array(regions), array(places), array(values)))


def chunk_carry(x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """The sum into ``out``, and whether all of it is finite."""
    return torch.tensor(
        module.chunk_carry(array(x), array(carry), decay, array(out), array(regions), array(places), array(values))
    )


def chunk_bins(values: Tensor, counts: Tensor, bins: int, chosen: Tensor, stands: Tensor, filled: Tensor) -> None:
    module.chunk_bins(array(values), array(counts), bins, array(chosen), array(stands), array(filled))


def chunk_encode(places: Tensor, regions: Tensor, numel: int, out: Tensor) -> Tensor:
    """Chunk sets into ``out``; the number of bytes, int64, 0-d."""
    return torch.tensor(module.chunk_encode(array(places), array(regions), numel, array(out)))


def chunk_decode(data: Tensor, regions: Tensor, numel: int, places: Tensor) -> None:
    try:
        module.chunk_decode(array(data), array(regions), numel, array(places))
    except ValueError as error:
        raise CorruptMessage(str(error)) from None


def chunk_scatter(places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
    if weight is None:
        module.chunk_scatter(array(places), array(values), array(regions), array(out))
    else:
        module.chunk_scatter_add(array(places), array(values), array(regions), weight, array(out))
