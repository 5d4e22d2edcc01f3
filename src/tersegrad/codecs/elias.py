"""Elias gamma, delta and omega codes of integers 1 .. 2^63 - 1 (Elias, IEEE Transactions on Information Theory, 1975).

With N = floor(log2 v) and low(v) = the N bits of v below its leading one, sent LSB-first:

- gamma: N zeros, a one, low(v). 2 N + 1 bits.
- delta: gamma(N + 1), low(v). 2 floor(log2(N + 1)) + 1 + N bits.
- omega: groups, then a zero. The last group is a one and low(v); before it comes the group of N, before that the group of
  floor(log2 N), and so on; values of 1 have no group.

The codes are the paper's; within a code we send low bits LSB-first, so that a reader counts trailing zeros and masks. A
stream ends with zero bits up to a whole byte.

These streams are read in order. Where many values may follow one another the gamma code is *planar*: N zeros and a one of all
values first, padded to a byte, then low(v) of all values, padded to a byte. So many readers can share the work.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.errors import CorruptMessage

Code = Literal["gamma", "delta", "omega"]
CODES: tuple[Code, ...] = ("gamma", "delta", "omega")


def length_bits(values: Tensor, code: Code = "gamma") -> int:
    """Bits of all codes together.

    >>> length_bits(torch.tensor([1, 2, 17]), "omega")
    15
    """
    return kernels.get(values.device).elias_bits(integers(values), _number(code))


def encode(values: Tensor, code: Code = "gamma") -> Tensor:
    """The codes of int64 ``values`` one after another, as bytes.

    >>> encode(torch.tensor([5, 1]), "gamma").tolist()  # 5 = 0b101: bits 0 0 1 1 0, then 1
    [44]
    """
    return kernels.get(values.device).elias_encode(integers(values), _number(code))


def decode(data: Tensor, count: int, code: Code = "gamma") -> tuple[Tensor, int]:
    """``count`` values from the start of ``data``, and how many bytes they took; raises :class:`CorruptMessage`."""
    number = _number(code)
    out = room(data, count)
    return out, kernels.get(data.device).elias_decode(data.contiguous(), number, out)


def encode_planar(values: Tensor) -> Tensor:
    """The planar gamma codes of int64 ``values``, as bytes.

    >>> encode_planar(torch.tensor([5, 1])).tolist()  # bits 0 0 1, 1; then 1 0
    [12, 1]
    """
    out = torch.empty(2 + 16 * values.numel(), dtype=torch.uint8, device=values.device)
    return out[: int(kernels.get(values.device).planar_gamma_encode(integers(values), out))]


def decode_planar(data: Tensor, count: int) -> tuple[Tensor, int]:
    """``count`` values from the start of ``data``, and how many bytes they took; raises :class:`CorruptMessage`."""
    out = room(data, count)
    return out, int(kernels.get(data.device).planar_gamma_decode(data.contiguous(), out))


def integers(values: Tensor) -> Tensor:
    """``values`` as a flat int64 tensor; other dtypes are refused."""
    if values.dtype != torch.int64:
        raise ValueError(f"values are int64 tensors, got {values.dtype}")
    return values.reshape(-1).contiguous()


def room(data: Tensor, count: int) -> Tensor:
    """Memory for ``count`` values, refused if ``data`` cannot hold so many codes of at least one bit."""
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if count > 8 * data.numel():
        raise CorruptMessage(f"{data.numel()} bytes cannot hold {count} codes")
    return torch.empty(count, dtype=torch.int64, device=data.device)


def _number(code: str) -> int:
    if code not in CODES:
        raise ValueError(f"Elias codes are gamma, delta and omega, got {code!r}")
    return CODES.index(code)
