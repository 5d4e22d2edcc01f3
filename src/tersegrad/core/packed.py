"""A vector in a quarter of its memory: eight bits per coordinate, and a power of two per block of up to 256.

Blocks are scaled by the smallest power of two with which the largest magnitude becomes at most 127, and rounded to nearest. Because
scales are powers of two, packing into the same blocks what was unpacked changes nothing, and blocks survive cutting and joining: states
go through checkpoints bit for bit. Magnitudes below 2^-126 are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tersegrad.core import host

BLOCK = 256


class Packed:
    """An aligned vector of a state, packed; made by :func:`pack`.

    >>> x = torch.tensor([1.0, -0.5, 0.003, 127.0])
    >>> pack(x).unpacked()
    tensor([  1.,   0.,   0., 127.])
    """

    def __init__(self, codes: Tensor, exponents: Tensor, lengths: Tensor) -> None:
        self._codes = codes  # (numel,) int8
        self._exponents = exponents  # (blocks,) int8
        self.lengths = lengths  # (blocks,) int16

    def numel(self) -> int:
        return self._codes.numel()

    @property
    def device(self) -> torch.device:
        return self._codes.device

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(t.nbytes for t in (self._codes, self._exponents, self.lengths))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(function(self._codes), function(self._exponents), function(self.lengths))

    def sent(self, device: torch.device) -> Packed:
        """On ``device``, without waiting."""
        return self._mapped(lambda t: host.send(t, device))

    def fetched(self) -> Packed:
        """In the host's memory, whole after the next read of its device."""
        return self._mapped(host.fetch)

    def unpacked(self) -> Tensor:
        """The vector as float32."""
        scales = torch.ldexp(torch.ones(self._exponents.shape, device=self.device), self._exponents)
        return self._codes.float() * scales.repeat_interleave(self.lengths.long(), output_size=self.numel())

    def cut(self, start: int, stop: int) -> Packed:
        """Coordinates start .. stop, as tensors of their own."""
        ends = self.lengths.long().cumsum(0)
        inside = (ends.clamp(max=stop) - (ends - self.lengths).clamp(min=start)).clamp(min=0)
        kept = inside > 0
        return Packed(self._codes[start:stop].clone(), self._exponents[kept], inside[kept].to(torch.int16))

    @staticmethod
    def joined(parts: Sequence[Packed]) -> Packed:
        """Packed vectors one after another."""
        columns = zip(*((p._codes, p._exponents, p.lengths) for p in parts))
        return Packed(*(torch.cat(column) for column in columns))


def pack(values: Tensor, lengths: Tensor | None = None) -> Packed:
    """A finite vector, packed into blocks of 256 or of these lengths."""
    if lengths is None:
        full, rest = divmod(values.numel(), BLOCK)
        lengths = torch.full((full + (rest > 0),), BLOCK, dtype=torch.int16, device=values.device)
        lengths[full:] = rest
    own = torch.repeat_interleave(lengths.long(), output_size=values.numel())
    tops = torch.zeros(lengths.numel(), device=values.device).scatter_reduce_(0, own, values.float().abs(), "amax")
    mantissa, exponent = torch.frexp(tops)
    exponent = (exponent - torch.where(mantissa * 128 > 127, 6, 7)).clamp_(-126, 121)
    # In float64, where no product leaves the range.
    codes = torch.ldexp(values.double(), -exponent[own]).round_().clamp_(-127, 127).to(torch.int8)
    return Packed(codes, exponent.to(torch.int8), lengths)
