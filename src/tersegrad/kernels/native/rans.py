"""Interleaved rANS in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import array, module, number

__all__ = [
    "rans_decode",
    "rans_encode",
    "rans_histogram",
    "rans_read_tables",
    "rans_write_tables",
]


def _optional(values: Tensor | None) -> Any:
    return None if values is None else array(values)


def rans_histogram(symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool) -> Tensor:
    """Counts, (num_contexts, alphabet) int64; see the schema."""
    counts = torch.empty(num_contexts * alphabet, dtype=torch.int64)
    module.rans_histogram(array(symbols), alphabet, _optional(contexts), num_contexts, sample, array(counts))
    return counts.view(num_contexts, alphabet)


def rans_write_tables(counts: Tensor) -> bytes:
    """The tables for these counts as bytes."""
    num_contexts, alphabet = counts.shape
    written: bytes = module.rans_write_tables(array(counts.contiguous().view(-1)), alphabet, num_contexts)
    return written


def rans_read_tables(data: Tensor, alphabet: int, num_contexts: int) -> tuple[Tensor, int]:
    """Frequencies and the number of bytes read."""
    frequencies = torch.empty(num_contexts * alphabet, dtype=torch.int16)
    used = module.rans_read_tables(array(data), alphabet, num_contexts, array(frequencies))
    if used < 0:
        raise CorruptMessage("the probability tables are malformed or cut short")
    return frequencies.view(num_contexts, alphabet), used


def rans_encode(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, chunk: int, out: Tensor
) -> Tensor:
    """Write the whole message into ``out``; its length, int64, 0-d."""
    length = module.rans_encode(array(symbols), alphabet, _optional(contexts), num_contexts, sample, chunk, array(out))
    return number(length)


def rans_decode(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> Tensor:
    """Fill ``out`` with symbols; the number of bytes read, int64, 0-d."""
    used = module.rans_decode(array(data), alphabet, _optional(contexts), num_contexts, array(out))
    if used < 0:
        raise CorruptMessage("not a rANS message of these sizes: it is truncated, mutated, or of another alphabet or context")
    return number(used)
