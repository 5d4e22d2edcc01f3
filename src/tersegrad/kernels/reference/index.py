"""Index sets in plain torch: the definition of their forms (``spec/wire.md``, "Index sets").

Gaps are coded in planes (:mod:`~tersegrad.kernels.reference.planar`). The arithmetic code, which serves sets of a few hundred
indices, runs on Python integers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.planar import (
    field_plane,
    log2,
    put,
    read_bits,
    read_fields,
    read_unary,
    unary_plane,
    write_bits,
)
from tersegrad.kernels.reference.select import check_indices, index_dtype

__all__ = [
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
    "random_divisor",
]


def index_complement(indices: Tensor, numel: int) -> Tensor:
    check_indices(indices, numel)
    missing = torch.ones(numel, dtype=torch.bool, device=indices.device)
    missing[indices.long()] = False
    return torch.nonzero(missing).reshape(-1).to(indices.dtype)


def _gaps(indices: Tensor) -> Tensor:
    return indices.long().diff(prepend=torch.full((1,), -1, dtype=torch.int64, device=indices.device)) - 1


def _outside() -> CorruptMessage:
    return CorruptMessage("an index lies outside the vector")


# Golomb codes


def random_divisor(count: int, numel: int) -> int:
    """The Golomb divisor for random sets: about ln 2 times the mean gap.

    >>> random_divisor(10, 1000), random_divisor(300, 1000)
    (69, 2)
    """
    return max(1, (numel * 45426 // count + 11141) >> 16)


def golomb_nbytes(count: int, numel: int) -> int:
    """No set of up to ``count`` <= numel / 2 numbers, one at least, has longer planes with that divisor."""
    # The quotients add up to at most 1.45 for each, and a remainder has at most log2(m) + 1 bits. Three planes.
    return 2 + -(-math.ceil(count * (3.45 + math.log2(0.6932 * numel / count + 1.17))) // 8)


def _split(divisor: int) -> tuple[int, int]:
    """Bits of a short remainder, and how many remainders are short."""
    width = divisor.bit_length() - 1
    return width, (2 << width) - divisor


def _golomb_parts(indices: Tensor, divisor: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quotients; the first bits of all remainders; the last bit of the long ones."""
    _, short = _split(divisor)
    gaps = _gaps(indices)
    quotients = gaps // divisor
    rests = gaps - quotients * divisor
    moved = rests + short
    return quotients, torch.where(rests >= short, moved >> 1, rests), (moved & 1)[rests >= short]


def golomb_size(indices: Tensor, divisor: int) -> int | Tensor:
    """Bytes that :func:`golomb_encode` writes, int64, 0-d."""
    quotients, rests, last = _golomb_parts(indices, divisor)
    sizes = (quotients + 1).sum(), rests.numel() * _split(divisor)[0], last.numel()
    return torch.as_tensor(sum((bits + 7) // 8 for bits in sizes), device=indices.device)


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> int | Tensor:
    """The planes in the first bytes of ``out``; their length, int64, 0-d."""
    quotients, rests, last = _golomb_parts(indices, divisor)
    widths = torch.full_like(rests, _split(divisor)[0])
    return put([unary_plane(quotients), field_plane(rests, widths), write_bits(last)], out)


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with indices from the start of ``data``; the bytes used, int64, 0-d."""
    width, short = _split(divisor)
    quotients, used = read_unary(data, out.numel())
    if int(quotients.sum()) > numel // divisor:
        raise _outside()
    rests, more = read_fields(data[used:], torch.full_like(quotients, width))
    used += more
    is_long = rests >= short
    last, more = read_fields(data[used:], torch.ones(int(is_long.sum()), dtype=torch.int64, device=data.device))
    rests[is_long] = 2 * rests[is_long] + last - short
    out.copy_(_from_gaps(quotients * divisor + rests, numel))
    return torch.tensor(used + more, device=out.device)


def _from_gaps(gaps: Tensor, numel: int) -> Tensor:
    if bool((gaps >= numel).any()):
        raise _outside()
    indices = (gaps + 1).cumsum(0) - 1
    # A sum that wraps around passes through negative numbers, because no step is longer than the vector.
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < numel):
        raise _outside()
    return indices.to(index_dtype(numel))


# Bitmaps


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    check_indices(indices, numel)
    bits = torch.zeros(numel, dtype=torch.uint8, device=indices.device)
    bits[indices.long()] = 1
    return write_bits(bits)


def bitmap_decode(data: Tensor, count: int, numel: int) -> Tensor:
    nbytes = -(-numel // 8)
    if data.numel() < nbytes:
        raise CorruptMessage("the index set ends early")
    bits = read_bits(data[:nbytes])
    if bool(bits[numel:].any()):
        raise CorruptMessage("the padding of the index set is not zero")
    indices = torch.nonzero(bits).reshape(-1)
    if indices.numel() != count:
        raise CorruptMessage(f"the bitmap has {indices.numel()} ones instead of {count}")
    return indices.to(index_dtype(numel))


# Classes of gaps


def _rest_bits(classes: Tensor) -> Tensor:
    return torch.clamp((classes.long() + 1) // 2 - 1, min=0)


def gap_histogram(indices: Tensor, numel: int) -> Tensor:
    """The counts of the 128 classes, int64."""
    check_indices(indices, numel)
    return torch.bincount(gap_classes(indices).long(), minlength=128)


def gap_classes(indices: Tensor) -> Tensor:
    g = _gaps(indices) + 1
    e = log2(g)
    half = g >> torch.clamp(e - 1, min=0) & 1
    return torch.where(e > 0, 2 * e + half - 1, 0).to(torch.uint8)


def gap_rests_encode(indices: Tensor, out: Tensor) -> int | Tensor:
    return put([field_plane(_gaps(indices) + 1, _rest_bits(gap_classes(indices)))], out)


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int | Tensor]:
    widths = _rest_bits(classes)
    if bool((widths > 55).any()):
        raise _outside()
    rests, used = read_fields(data, widths)
    c = classes.long()
    head = torch.where(c > 0, 2 + (c + 1 & 1), 1)
    return _from_gaps((head << widths | rests) - 1, numel), torch.tensor(used, device=data.device)


# ---- the arithmetic code of short sets ---------------------------------------------------------------------------------------

_FLOOR, _FIRST, _WORD = 1 << 40, 250 << 40, (1 << 48) - 1


class _Encoder:
    """Range coder on 48 bits; the code so far is one big integer, so that carries need no care."""

    def __init__(self) -> None:
        self.low, self.range, self.shifts = 0, _FIRST, 0

    def _normalise(self) -> None:
        while self.range < _FLOOR:
            self.low, self.range, self.shifts = self.low << 8, self.range << 8, self.shifts + 1

    def bit(self, one: int, p: int) -> int:
        bound = (self.range >> 16) * p
        if one:
            self.range = bound
        else:
            self.low, self.range = self.low + bound, self.range - bound
        self._normalise()
        return one

    def uniform(self, value: int, choices: int) -> int:
        self.range //= choices
        self.low += value * self.range
        self._normalise()
        return value

    def finish(self) -> bytes:
        nbytes = 1 if self.range >= 2 * _FLOOR else 2
        unit = 1 << (48 - 8 * nbytes)
        code = (self.low + unit - 1) // unit
        return code.to_bytes(self.shifts + nbytes, "big")


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.range = data, 6, _FIRST
        self.code = int.from_bytes(data[:6].ljust(6, b"\0"), "big")
        if self.code >= self.range:
            raise CorruptMessage("not an arithmetic-coded index set")

    def _normalise(self) -> None:
        while self.range < _FLOOR:
            byte = self.data[self.at] if self.at < len(self.data) else 0
            self.range, self.code, self.at = self.range << 8, self.code << 8 | byte, self.at + 1

    def bit(self, _: int, p: int) -> int:
        bound = (self.range >> 16) * p
        one = int(self.code < bound)
        if one:
            self.range = bound
        else:
            self.code, self.range = self.code - bound, self.range - bound
        self._normalise()
        return one

    def uniform(self, _: int, choices: int) -> int:
        self.range //= choices
        value = self.code // self.range
        if value >= choices:
            raise CorruptMessage("no encoder writes this index set")
        self.code -= value * self.range
        self._normalise()
        return value

    def finish(self) -> int:
        used = self.at - 6 + (1 if self.range >= 2 * _FLOOR else 2)
        if used > len(self.data):
            raise CorruptMessage("the index set ends early")
        return used


def _code_gap(coder: _Encoder | _Decoder, n: int, k: int, gap: int) -> int:
    """Code one gap among ``n`` places with ``k`` indices to come (a decoder ignores ``gap``); returns the gap.

    The gap is about geometric, and the binary digits of a geometric number are independent: digit j is one with probability
    t / (1 + t), t = ((n - k) / (n + 1))^(2^j). Digits that are nearly fair go in raw; the last index is uniform.
    """

    def raw(stop: int) -> int:
        value = 0
        for j in range(0, stop, 16):
            width = min(16, stop - j)
            value |= coder.uniform(gap >> j & (1 << width) - 1, 1 << width) << j
        return value

    if k == 1:
        low = max(0, (n - 1).bit_length() - 16)
        top = coder.uniform(gap >> low, (n - 1 >> low) + 1)
        return top << low | raw(low)
    one, digits = 1 << 60, (n - k).bit_length()
    t, fair = ((n - k) << 60) // (n + 1), 0
    while fair < digits and t > one - (one >> 5):
        t, fair = t * t >> 60, fair + 1
    value = 0
    for j in range(fair, digits):
        short = t >> 28
        p = min(max((short << 16) // ((1 << 32) + short), 1), 65535)
        value |= coder.bit(gap >> j & 1, p) << j
        t = t * t >> 60
    return value | raw(fair)


def digits_encode(indices: Tensor, numel: int, out: Tensor) -> int:
    check_indices(indices, numel)
    coder, following, places = _Encoder(), 0, indices.tolist()
    for j, index in enumerate(places):
        _code_gap(coder, numel - following, len(places) - j, index - following)
        following = index + 1
    code = coder.finish()
    if len(code) > out.numel():
        raise ValueError("the output buffer is too small for the index set")
    out[: len(code)] = torch.tensor(list(code), dtype=torch.uint8, device=out.device)
    return len(code)


def digits_decode(data: Tensor, count: int, numel: int) -> tuple[Tensor, int]:
    coder, following, indices = _Decoder(bytes(data.tolist())), 0, []
    for j in range(count):
        n, k = numel - following, count - j
        gap = _code_gap(coder, n, k, 0) if n >= k else n
        if gap > n - k:
            raise CorruptMessage("an index lies outside the vector")
        indices.append(following + gap)
        following += gap + 1
    return torch.tensor(indices, dtype=index_dtype(numel), device=data.device), coder.finish()
