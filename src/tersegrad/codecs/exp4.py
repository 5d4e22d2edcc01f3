"""Four-bit values: a sign and one of eight powers of two below the largest of their tensor, entropy-coded.

A code is sign << 3 | d, 0 <= d <= 7, and stands for (-1)^sign 2^(E - d); E, from -126 to 127, is one for each tensor that sends anything.
Three forms, the shortest that fits:

- up to :data:`SHORT` codes, one adaptive arithmetic code of the exponents (as differences) and of the codes: no tables, about two
  bytes above the entropy, so that messages of a few hundred values stay small;
- above, the exponents as bytes and the codes by rANS, in chunks of 2^14;
- ``packed`` where neither is shorter: the exponents as bytes and the codes at four bits each.

``spec/wire.md``, "Signs and exponents", has every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.codecs import bitpack, levels, rans
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.values import CODES

SHORT = 1 << 10
FIRST = -10  # what the first exponent is compared with: that of a usual gradient
LOWEST, HIGHEST = -126, 127


def max_nbytes(count: int, tensors: int) -> int:
    """No ``count`` codes with the exponents of ``tensors`` tensors take more bytes."""
    return tensors + bitpack.nbytes(count, 4)


def encode(exponents: Tensor, codes: Tensor) -> tuple[Tensor, bool]:
    """The bytes of int32 ``exponents`` and uint8 ``codes``, and whether they are packed.

    >>> data, packed = encode(torch.tensor([-9], dtype=torch.int32), torch.tensor([0, 9, 1, 8] * 100, dtype=torch.uint8))
    >>> data.numel(), packed
    (103, False)
    """
    count = codes.numel()
    if count <= SHORT:
        coded = levels.encode(torch.cat((_differences(exponents), _signed(codes))), "adaptive")
    else:
        coded = torch.cat((_bytes(exponents), rans.encode(codes, 16, chunk=CODES)))
    if coded.numel() < max_nbytes(count, exponents.numel()):
        return coded, False
    return torch.cat((_bytes(exponents), bitpack.pack(codes, 4))), True


def decode(data: Tensor, count: int, tensors: int, packed: bool) -> tuple[Tensor, Tensor]:
    """The int32 exponents and uint8 codes that are all of ``data``; raises :class:`CorruptMessage`."""
    if count <= SHORT and not packed:
        values = levels.decode(data, tensors + count)
        exponents, signed = _sums(values[:tensors]), values[tensors:]
        magnitude = signed.abs()
        if bool(((magnitude < 1) | (magnitude > 8)).any()):
            raise CorruptMessage("a value is none of the eight powers of two")
        codes = (magnitude - 1 + 8 * (signed < 0)).to(torch.uint8)
    else:
        if data.numel() < tensors:
            raise CorruptMessage("the message ends inside the exponents")
        exponents, rest = data[:tensors].view(torch.int8).to(torch.int32), data[tensors:]
        if packed:
            codes, used = bitpack.unpack(rest, 4, count), bitpack.nbytes(count, 4)
        else:
            codes, used = rans.decode(rest.contiguous(), count, 16)
        if used != rest.numel():
            raise CorruptMessage(f"{rest.numel() - used} bytes follow the last value")
    if bool(((exponents < LOWEST) | (exponents > HIGHEST)).any()):
        raise CorruptMessage("an exponent is not that of a normal float32")
    return exponents, codes


def _bytes(exponents: Tensor) -> Tensor:
    return exponents.to(torch.int8).view(torch.uint8)


def _differences(exponents: Tensor) -> Tensor:
    """The difference of each exponent to the one before, as a non-zero level: n >= 0 becomes n + 1, n < 0 stays."""
    steps = exponents.diff(prepend=exponents.new_full((1,), FIRST))
    return (steps + (steps >= 0)).to(torch.int32)


def _sums(steps: Tensor) -> Tensor:
    if bool((steps == 0).any()) or bool((steps.abs() > 1000).any()):
        raise CorruptMessage("not a step between exponents")
    return (FIRST + torch.cumsum(steps - (steps > 0).to(torch.int32), 0)).to(torch.int32)


def _signed(codes: Tensor) -> Tensor:
    """Non-zero levels: d + 1, negative where the sign is."""
    magnitude = (codes & 7).to(torch.int32) + 1
    return torch.where(codes > 7, -magnitude, magnitude)
