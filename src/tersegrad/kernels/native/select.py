"""Checked wrappers of the compiled sparse kernels (``native/src/select*.cpp``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import flag, module, number

__all__ = [
    "all_finite",
    "bitmap_decode",
    "bitmap_encode",
    "digits_decode",
    "digits_encode",
    "gap_classes",
    "gap_histogram",
    "gap_rests_decode",
    "gap_rests_encode",
    "golomb_decode",
    "golomb_encode",
    "golomb_size",
    "index_complement",
    "permuted_gather",
    "permuted_indices",
    "permuted_scatter",
    "permuted_scatter_add",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "sparse_scatter",
    "sparse_scatter_add",
]


def _dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 1 << 31 else torch.int64


def _decoded(function: Callable[..., Any], *arguments: object) -> int:
    """Call a decoder; what it refuses is a corrupt message."""
    try:
        return int(function(*arguments) or 0)
    except ValueError as error:
        raise CorruptMessage(str(error)) from None


def all_finite(x: Tensor) -> Tensor:
    return flag(module.all_finite(x))


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    room = min(k, x.numel())
    indices, values = torch.empty(room, dtype=_dtype(x.numel())), torch.empty(room)
    return indices, values, number(module.select_top_k(x, k, indices, values))


def select_sample_key(x: Tensor, k: int) -> Tensor:
    return number(module.select_sample_key(x, k), torch.int32)


def select_compact(x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    room = min(limit, x.numel())
    indices, values = torch.empty(room, dtype=_dtype(x.numel())), torch.empty(room)
    return indices, values, number(module.select_compact(x, int(key), limit, indices, values))


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    module.sparse_scatter(indices, values, out)


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    module.sparse_scatter_add(indices, values, weight, out)


def index_complement(indices: Tensor, numel: int) -> Tensor:
    out = torch.empty(max(0, numel - indices.numel()), dtype=indices.dtype)
    module.index_complement(indices, numel, out)
    return out


def golomb_size(indices: Tensor, divisor: int) -> int | Tensor:
    return int(module.golomb_size(indices, divisor))


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> int | Tensor:
    return int(module.golomb_encode(indices, divisor, out))


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> int | Tensor:
    return _decoded(module.golomb_decode, data, numel, divisor, out)


def digits_encode(indices: Tensor, numel: int, out: Tensor) -> int:
    return int(module.digits_encode(indices, numel, out))


def digits_decode(data: Tensor, count: int, numel: int) -> tuple[Tensor, int]:
    indices = torch.empty(count, dtype=_dtype(numel))
    return indices, _decoded(module.digits_decode, data, numel, indices)


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    out = torch.empty(-(-numel // 8), dtype=torch.uint8)
    module.bitmap_encode(indices, numel, out)
    return out


def bitmap_decode(data: Tensor, count: int, numel: int) -> Tensor:
    indices = torch.empty(count, dtype=_dtype(numel))
    _decoded(module.bitmap_decode, data, numel, indices)
    return indices


def gap_histogram(indices: Tensor, numel: int) -> Tensor:
    counts = torch.empty(128, dtype=torch.int64)
    module.gap_histogram(indices, numel, counts)
    return counts


def gap_classes(indices: Tensor) -> Tensor:
    classes = torch.empty(indices.numel(), dtype=torch.uint8)
    module.gap_classes(indices, classes)
    return classes


def gap_rests_encode(indices: Tensor, out: Tensor) -> int | Tensor:
    return int(module.gap_rests_encode(indices, out))


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int | Tensor]:
    indices = torch.empty(classes.numel(), dtype=_dtype(numel))
    return indices, _decoded(module.gap_rests_decode, data, classes, numel, indices)


def permuted_indices(keys: list[int], rotation: int, numel: int, k: int) -> Tensor:
    indices = torch.empty(k, dtype=_dtype(numel))
    module.permuted_indices(keys, rotation, numel, indices)
    return indices


def permuted_gather(x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
    values = torch.empty(k)
    module.permuted_gather(x, keys, rotation, values)
    return values


def permuted_scatter(values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
    module.permuted_scatter(values, keys, rotation, out)


def permuted_scatter_add(values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
    module.permuted_scatter_add(values, keys, rotation, weight, out)
