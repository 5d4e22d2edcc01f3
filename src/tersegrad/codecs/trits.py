"""Trits: values 0, 1 and 2, five in a byte (1.6 bits each; the entropy of equally likely trits is 1.585 bits).

byte = t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4. The last byte is filled up with zeros. Bytes above 242 and other padding are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs.bitpack import buffer
from tersegrad.core.errors import CorruptMessage


def nbytes(count: int) -> int:
    """Bytes of ``count`` packed trits."""
    return (count + 4) // 5


def pack(trits: Tensor, out: Tensor | None = None) -> Tensor:
    """uint8 values 0..2 as bytes, in the first bytes of ``out`` if it is given.

    >>> pack(torch.tensor([2, 0, 1, 0, 0, 1], dtype=torch.uint8)).tolist()
    [11, 1]
    """
    if trits.dtype != torch.uint8:
        raise ValueError(f"trits are uint8 tensors, got {trits.dtype}")
    trits = trits.reshape(-1).contiguous()
    packed = buffer(out, nbytes(trits.numel()), torch.uint8, trits.device)
    kernels.get(trits.device).pack_trits(trits, packed)
    return packed


def unpack(data: Tensor, count: int, out: Tensor | None = None, *, check: bool = True) -> Tensor:
    """The ``count`` trits that ``data`` holds; ``data`` may be longer.

    ``check``: raise :class:`CorruptMessage` unless the bytes are canonical; without it values are still 0..2. On a GPU it waits
    for the device.
    """
    size = nbytes(count)
    if data.numel() < size:
        raise CorruptMessage(f"{count} trits take {size} bytes, got {data.numel()}")
    trits = buffer(out, count, torch.uint8, data.device)
    kernels.get(data.device).unpack_trits(data[:size].contiguous(), trits, check)
    return trits
