"""Interleaved rANS in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = [
    "rans_decode",
    "rans_encode",
    "rans_histogram",
    "rans_read_tables",
    "rans_write_tables",
]


def rans_histogram(symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool) -> Tensor:
    """Counts, (num_contexts, alphabet) int64; see the schema."""
    counts = torch.empty(num_contexts * alphabet, dtype=torch.int64)
    module.rans_histogram(symbols, alphabet, contexts, num_contexts, sample, counts)
    return counts.view(num_contexts, alphabet)


def rans_write_tables(counts: Tensor) -> bytes:
    """The tables for these counts as bytes."""
    num_contexts, alphabet = counts.shape
    written: bytes = module.rans_write_tables(counts.contiguous().view(-1), alphabet, num_contexts)
    return written


def rans_read_tables(data: Tensor, alphabet: int, num_contexts: int) -> tuple[Tensor, int]:
    """Frequencies and the number of bytes read."""
    frequencies = torch.empty(num_contexts * alphabet, dtype=torch.int16)
    used = module.rans_read_tables(data, alphabet, num_contexts, frequencies)
    if used < 0:
        raise CorruptMessage("the probability tables are malformed or cut short")
    return frequencies.view(num_contexts, alphabet), used


def rans_encode(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, chunk: int, out: Tensor
) -> int | Tensor:
    """Write the whole message into ``out``; its length."""
    return int(module.rans_encode(symbols, alphabet, contexts, num_contexts, sample, chunk, out))


def rans_decode(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with symbols; the number of bytes read."""
    used = module.rans_decode(data, alphabet, contexts, num_contexts, out)
    if used < 0:
        raise CorruptMessage("not a rANS message of these sizes: it is truncated, mutated, or of another alphabet or context")
    return int(used)
