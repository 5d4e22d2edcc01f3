"""Checked wrappers of the compiled kernels for chunks (``native/src/chunk*.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = ["chunk_bins", "chunk_carry", "chunk_choose", "chunk_decode", "chunk_encode", "chunk_scatter"]


def chunk_choose(x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Whether all of ``x`` is finite, 0-d; only then the outputs are defined."""
    return torch.tensor(module.chunk_choose(x, regions, places, values))


def chunk_carry(x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """The sum into ``out``, and whether all of it is finite."""
    return torch.tensor(module.chunk_carry(x, carry, decay, out, regions, places, values))


def chunk_bins(values: Tensor, counts: Tensor, bins: int, chosen: Tensor, stands: Tensor, filled: Tensor) -> None:
    module.chunk_bins(values, counts, bins, chosen, stands, filled)


def chunk_encode(places: Tensor, regions: Tensor, numel: int, out: Tensor) -> Tensor:
    """Chunk sets into ``out``; the number of bytes, int64, 0-d."""
    return torch.tensor(module.chunk_encode(places, regions, numel, out))


def chunk_decode(data: Tensor, regions: Tensor, numel: int, places: Tensor) -> None:
    try:
        module.chunk_decode(data, regions, numel, places)
    except ValueError as error:
        raise CorruptMessage(str(error)) from None


def chunk_scatter(places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
    if weight is None:
        module.chunk_scatter(places, values, regions, out)
    else:
        module.chunk_scatter_add(places, values, regions, weight, out)
