"""Fixed-width bit packing: code i takes bits [i * width, (i + 1) * width) of an LSB-first stream (``spec/wire.md``).

Codes of 1 to 8 bits are uint8 tensors, codes of 9 to 16 bits are int32 tensors. Packing takes the low ``width`` bits of each
code, so two's-complement codes pack as they are. The last byte is padded with zeros, and a decoder refuses other padding, so
that each sequence of codes has one encoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.errors import CorruptMessage


def nbytes(count: int, width: int) -> int:
    """Bytes of ``count`` packed codes.

    >>> nbytes(5, 3)
    2
    """
    return (count * width + 7) // 8


def dtype(width: int) -> torch.dtype:
    """The dtype of codes of ``width`` bits."""
    if not 1 <= width <= 16:
        raise ValueError(f"codes have 1 to 16 bits, got {width}")
    return torch.uint8 if width <= 8 else torch.int32


def pack(codes: Tensor, width: int, out: Tensor | None = None) -> Tensor:
    """The packed codes, in the first bytes of ``out`` if it is given.

    >>> pack(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), 3).tolist()  # 0b1_100_011_010_001 with the first code last
    [209, 88]
    """
    if codes.dtype != dtype(width):
        raise ValueError(f"codes of {width} bits are {dtype(width)} tensors, got {codes.dtype}")
    codes = codes.reshape(-1).contiguous()
    packed = buffer(out, nbytes(codes.numel(), width), torch.uint8, codes.device)
    kernels.get(codes.device).pack_bits(codes, width, packed)
    return packed


def unpack(data: Tensor, width: int, count: int, out: Tensor | None = None, *, check: bool = True) -> Tensor:
    """The ``count`` codes that ``data`` holds; ``data`` may be longer.

    ``check``: raise :class:`CorruptMessage` if the padding is not zero. On a GPU this waits for the device.
    """
    size = nbytes(count, width)
    if data.numel() < size:
        raise CorruptMessage(f"{count} codes of {width} bits take {size} bytes, got {data.numel()}")
    used = count * width % 8
    if check and used and int(data[size - 1]) >> used:
        raise CorruptMessage("the bits after the last code are not zero")
    codes = buffer(out, count, dtype(width), data.device)
    kernels.get(data.device).unpack_bits(data[:size].contiguous(), width, codes)
    return codes


def buffer(out: Tensor | None, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``count`` elements to write to: the first of ``out``, which is checked, or fresh ones."""
    if out is None:
        return torch.empty(count, dtype=dtype, device=device)
    if out.dtype != dtype or out.dim() != 1 or not out.is_contiguous() or out.numel() < count or out.device != device:
        raise ValueError(f"out must be a contiguous 1-D {dtype} tensor of at least {count} elements on {device}")
    return out[:count]
