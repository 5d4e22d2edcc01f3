"""Golomb-Rice codes of integers 0 .. 2^63 - 1 with parameter k in 0..56 (Golomb 1966; Rice and Plaunt 1971).

Planar: first q = v >> k of all values, as q zeros and a one; then the k low bits of all values, LSB-first; each plane ends with
zero bits up to a whole byte. q + 1 + k bits per value. From q = 32 on an escape keeps one huge value from flooding the stream: the
first plane has 32 zeros and a one, and q - 31 of these values follow at the end in planar Elias gamma codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.elias import integers, room
from tersegrad.core import buffers

LIMIT = 32  # the first quotient that is escaped
MAX_K = 56


def length_bits(values: Tensor, k: int) -> int:
    """Bits of all codes together, without padding."""
    return int(kernels.get(values.device).rice_bits(integers(values), _parameter(k)))


def best_k(values: Tensor) -> int:
    """The parameter with the fewest bits for these values, the smallest if several are equal.

    >>> best_k(torch.tensor([9, 12, 3, 7, 10]))
    2
    """
    return int(kernels.get(values.device).rice_best(integers(values)))


def encode(values: Tensor, k: int) -> Tensor:
    """The codes of int64 ``values`` as bytes.

    >>> encode(torch.tensor([9, 2]), 2).tolist()  # 9 = 2 * 4 + 1 and 2 = 0 * 4 + 2: bits 0 0 1, 1; then 1 0, 0 1
    [12, 9]
    """
    most = 4 + -(-values.numel() * (LIMIT + 1 + _parameter(k) + 128) // 8)
    out = buffers.empty(most, torch.uint8, values.device)
    return out[: int(kernels.get(values.device).rice_encode(integers(values), k, out))]


def decode(data: Tensor, count: int, k: int) -> tuple[Tensor, int]:
    """``count`` values from the start of ``data``, and how many bytes they took; raises :class:`CorruptMessage`."""
    _parameter(k)
    out = room(data, count)
    return out, int(kernels.get(data.device).rice_decode(data.contiguous(), k, out))


def _parameter(k: int) -> int:
    if not 0 <= k <= MAX_K:
        raise ValueError(f"the Rice parameter lies in 0..{MAX_K}, got {k}")
    return k
