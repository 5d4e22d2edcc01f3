"""The values of chunks as bytes: exact, rounded, signs with a scale, or a few bins with their means.

Each form is self-delimiting, and is given how many values every tensor sends: scales and means are kept per tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack, rans
from tersegrad.core import buffers
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.chunk_messages import own_tables, to_bfloat16
from tersegrad.kernels.reference.values import mean_scales_of


class Form(Protocol):
    """How values are written and read; ``counts`` are the numbers of values of the tensors."""

    def write(self, values: Tensor, counts: tuple[int, ...], out: Tensor, kept: Tensor | None = None) -> int:
        """Into ``out``; the number of bytes. ``kept``: gets the values as a reader will have them."""
        ...

    def read(self, data: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, int]:
        """float32 values and the bytes used, or :class:`CorruptMessage`."""
        ...

    def max_nbytes(self, counts: tuple[int, ...]) -> int: ...


def _take(data: Tensor, at: int, count: int) -> Tensor:
    if data.numel() < at + count:
        raise CorruptMessage("the message ends inside of its values")
    return data[at : at + count].clone()


@functools.lru_cache(maxsize=64)
def owners(counts: tuple[int, ...]) -> Tensor:
    """The number of the tensor of each value."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))


@functools.lru_cache(maxsize=64)
def _bytes(counts: tuple[int, ...]) -> Tensor:
    """The same as uint8."""
    return owners(counts).to(torch.uint8)


@functools.lru_cache(maxsize=64)
def _firsts(counts: tuple[int, ...], bins: int) -> Tensor:
    """The number of the first bin of the tensor of each value, int32."""
    return (owners(counts) * bins).to(torch.int32)


@functools.lru_cache(maxsize=64)
def numbers(counts: tuple[int, ...]) -> Tensor:
    """The counts as the kernels want them."""
    return torch.tensor(counts, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Floats:
    """float32 or bfloat16: the highest byte (sign and exponent) of all values is entropy-coded, the others follow as they are."""

    dtype: torch.dtype

    def write(self, values: Tensor, counts: tuple[int, ...], out: Tensor, kept: Tensor | None = None) -> int:
        rounded = values if self.dtype == torch.float32 else to_bfloat16(values)
        if kept is not None:
            kept.copy_(rounded)
        planes = rounded.view(torch.uint8).reshape(-1, self.dtype.itemsize)
        at = rans.encode(planes[:, -1].contiguous(), 256, out=out).numel()
        low = planes[:, :-1].reshape(-1)
        out[at : at + low.numel()] = low
        return at + low.numel()

    def read(self, data: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, int]:
        count, width = sum(counts), self.dtype.itemsize
        high, at = rans.decode(data, count, 256)
        end = at + (width - 1) * count
        low = _take(data, at, end - at).reshape(count, width - 1)
        return torch.cat((low, high.unsqueeze(1)), dim=1).view(self.dtype).reshape(-1).float(), end

    def max_nbytes(self, counts: tuple[int, ...]) -> int:
        return rans.max_nbytes(sum(counts), 256) + (self.dtype.itemsize - 1) * sum(counts)


@dataclasses.dataclass(frozen=True)
class Signs:
    """One bit per value: +- the mean magnitude of what its tensor sends, a bfloat16 per tensor."""

    def write(self, values: Tensor, counts: tuple[int, ...], out: Tensor, kept: Tensor | None = None) -> int:
        own = owners(counts)
        means = mean_scales_of(values, counts, kernels.get(values.device).sum_abs)
        if kept is not None:
            torch.copysign(means.float()[own], values, out=kept)
        scales = means.view(torch.uint8)
        bits = bitpack.pack(torch.signbit(values).to(torch.uint8), 1)
        out[: scales.numel()] = scales
        end = scales.numel() + bits.numel()
        out[scales.numel() : end] = bits
        return end

    def read(self, data: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, int]:
        scales = _take(data, 0, 2 * len(counts)).view(torch.bfloat16).float()
        end = self.max_nbytes(counts)
        bits = bitpack.unpack(_take(data, 2 * len(counts), end - 2 * len(counts)), 1, sum(counts))
        signs = bits.to(torch.float32).mul_(-2.0).add_(1.0)
        return scales[owners(counts).to(data.device)] * signs, end

    def max_nbytes(self, counts: tuple[int, ...]) -> int:
        return 2 * len(counts) + bitpack.nbytes(sum(counts), 1)


@dataclasses.dataclass(frozen=True)
class Bins:
    """Which of a few bins a value falls into, entropy-coded, and per tensor the means of the bins that occur, as float32."""

    bins: int

    def _tables(self, counts: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The number of probability tables, and the table of each value."""
        tables = own_tables(numbers(counts))
        return tables, _bytes(counts) if tables > 1 else None

    def write(self, values: Tensor, counts: tuple[int, ...], out: Tensor, kept: Tensor | None = None) -> int:
        chosen = buffers.empty(values.numel(), torch.uint8, values.device)
        stands = torch.empty(len(counts) * self.bins, device=values.device)
        filled = torch.empty(len(counts) * self.bins, dtype=torch.int64, device=values.device)
        kernels.get(values.device).chunk_bins(values, numbers(counts), self.bins, chosen, stands, filled)
        if kept is not None:
            self._stand(stands, chosen, counts, kept)
        present = filled > 0
        which = bitpack.pack(present.to(torch.uint8), 1)
        means = stands[present].view(torch.uint8)
        at = which.numel()
        out[:at] = which
        out[at : at + means.numel()] = means
        at += means.numel()
        number, contexts = self._tables(counts)
        contexts = None if contexts is None else contexts.to(values.device)
        return at + rans.encode(chosen, self.bins, contexts, number, sample=False, out=out[at:]).numel()

    def read(self, data: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, int]:
        size = len(counts) * self.bins
        at = bitpack.nbytes(size, 1)
        present = bitpack.unpack(_take(data, 0, at), 1, size).bool()
        stands = torch.zeros(size, device=data.device)
        end = at + 4 * int(present.sum())
        stands[present] = _take(data, at, end - at).view(torch.float32)
        number, contexts = self._tables(counts)
        contexts = None if contexts is None else contexts.to(data.device)
        chosen, used = rans.decode(data[end:], sum(counts), self.bins, contexts, number)
        values = buffers.empty(chosen.numel(), torch.float32, data.device)
        self._stand(stands, chosen, counts, values)
        return values, end + used

    def _stand(self, stands: Tensor, chosen: Tensor, counts: tuple[int, ...], values: Tensor) -> None:
        """What stands for the bin of each value."""
        torch.index_select(stands, 0, _firsts(counts, self.bins).to(chosen.device) + chosen, out=values)

    def max_nbytes(self, counts: tuple[int, ...]) -> int:
        size = len(counts) * self.bins
        return bitpack.nbytes(size, 1) + 4 * size + rans.max_nbytes(sum(counts), self.bins)
