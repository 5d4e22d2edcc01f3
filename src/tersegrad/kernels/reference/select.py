"""Sparse vectors in plain torch: the definition of what ``native/src/select*.cpp`` computes.

Bit streams are built from whole tensors of bits, least significant bit of each byte first. The arithmetic code, which serves
sets of a few hundred indices, runs on Python integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage

__all__ = [
    "all_finite",
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
    "permuted_gather",
    "permuted_indices",
    "permuted_scatter",
    "permuted_scatter_add",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "sparse_scatter",
    "sparse_scatter_add",
]

INFINITE_KEY = 0x7F800000


def _dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 1 << 31 else torch.int64


def _keys(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    keys = _keys(x)
    k = min(k, int((keys > 0).sum()))
    if k == 0:
        return torch.empty(0, dtype=_dtype(x.numel()), device=x.device), x[:0]
    threshold = torch.topk(keys, k, sorted=True).values[-1]
    larger, equal = keys > threshold, keys == threshold
    first_ties = equal & (torch.cumsum(equal, 0) <= k - larger.sum())
    indices = torch.nonzero(larger | first_ties).reshape(-1)
    return indices.to(_dtype(x.numel())), x[indices]


def sample_positions(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Coordinates of the sample: runs of 16, one in each of equal strata, placed there by a multiplicative hash."""
    everything = numel // 16
    runs = min(everything, max(64, min(everything // 16, 4096)))
    if runs == 0:
        return torch.arange(numel, device=device)
    j = torch.arange(runs, dtype=torch.int64, device=device)
    first = j * everything // runs
    width = (j + 1) * everything // runs - first
    run = first + ((j * 0x9E3779B1 & 0xFFFFFFFF) * width >> 32)
    return (run[:, None] * 16 + torch.arange(16, device=device)).reshape(-1)


def select_sample_key(x: Tensor, k: int) -> int:
    keys = _keys(x[sample_positions(x.numel(), x.device)])
    if keys.numel() == 0 or k == 0:
        return INFINITE_KEY
    rank = -(-k * keys.numel() // x.numel())
    key = int(torch.topk(keys, rank).values[-1]) if rank <= keys.numel() else 0
    return min(max(key, 1), INFINITE_KEY)


def select_compact(x: Tensor, key: int, limit: int) -> tuple[Tensor, Tensor, int]:
    indices = torch.nonzero(_keys(x) >= max(key, 1)).reshape(-1)
    kept = indices[:limit]
    return kept.to(_dtype(x.numel())), x[kept], indices.numel()


def _check(indices: Tensor, numel: int) -> None:
    if not _increasing(indices, numel):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    _check(indices, out.numel())
    out.zero_()
    out[indices.long()] = values


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    _check(indices, out.numel())
    at = indices.long()
    out[at] = out[at] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)


def _increasing(indices: Tensor, numel: int) -> bool:
    if indices.numel() == 0:
        return True
    steps = bool((indices[1:] > indices[:-1]).all())
    return steps and int(indices[0]) >= 0 and int(indices[-1]) < numel


def index_complement(indices: Tensor, numel: int) -> Tensor:
    _check(indices, numel)
    missing = torch.ones(numel, dtype=torch.bool, device=indices.device)
    missing[indices.long()] = False
    return torch.nonzero(missing).reshape(-1).to(indices.dtype)


# ---- bit streams ------------------------------------------------------------------------------------------------------------


def _gaps(indices: Tensor) -> Tensor:
    before = torch.cat([torch.full((1,), -1, dtype=torch.int64, device=indices.device), indices[:-1].long()])
    return indices.long() - before[: indices.numel()] - 1


def _write(bits: Tensor, out: Tensor) -> int:
    """Pack bits (uint8 zeros and ones) into ``out``; returns the number of bytes."""
    nbytes = -(-bits.numel() // 8)
    if nbytes > out.numel():
        raise ValueError("the output buffer is too small for the index set")
    padded = torch.zeros(nbytes * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    out[:nbytes] = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return nbytes


def _bits(data: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & 1).reshape(-1)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cumsum(lengths, 0) - lengths


def _place(bits: Tensor, starts: Tensor, values: Tensor, lengths: Tensor) -> None:
    """Write each value's ``lengths`` low bits from its start on."""
    for b in range(int(lengths.max()) if lengths.numel() else 0):
        live = lengths > b
        bits[starts[live] + b] = (values[live] >> b & 1).to(torch.uint8)


def _read(bits: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    values = torch.zeros_like(starts)
    for b in range(int(lengths.max()) if lengths.numel() else 0):
        live = lengths > b
        values[live] |= bits[starts[live] + b].long() << b
    return values


def _split(divisor: int) -> tuple[int, int]:
    """Bits of a short remainder, and how many remainders are short."""
    width = divisor.bit_length() - 1
    return width, (2 << width) - divisor


def _golomb_parts(indices: Tensor, divisor: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quotients, remainder codes and their lengths."""
    width, short = _split(divisor)
    gaps = _gaps(indices)
    quotients = gaps // divisor
    rests = gaps - quotients * divisor
    is_long, moved = rests >= short, rests + short
    codes = torch.where(is_long, moved >> 1 | (moved & 1) << width, rests)
    return quotients, codes, width + is_long.long()


def golomb_size(indices: Tensor, divisor: int) -> int:
    quotients, _, lengths = _golomb_parts(indices, divisor)
    return -(-int((quotients + 1 + lengths).sum()) // 8)


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> int:
    quotients, codes, lengths = _golomb_parts(indices, divisor)
    starts = _starts(quotients + 1 + lengths)
    bits = torch.zeros(int((quotients + 1 + lengths).sum()), dtype=torch.uint8, device=indices.device)
    bits[starts + quotients] = 1
    _place(bits, starts + quotients + 1, codes, lengths)
    return _write(bits, out)


def golomb_decode(data: Tensor, count: int, numel: int, divisor: int) -> tuple[Tensor, int]:
    # Each code word tells where the next begins, which leaves a loop over the set; positions of the ones come from torch.
    width, short = _split(divisor)
    bits = _bits(data).tolist()
    following = _next_ones(bits)
    at, previous, indices = 0, -1, []
    for _ in range(count):
        if at >= len(bits) or following[at] == len(bits):
            raise CorruptMessage("the index set ends early")
        quotient = following[at] - at
        at = following[at] + 1
        if quotient > numel // divisor + 1:
            raise CorruptMessage("an index lies outside the vector")
        rest = sum(bit << b for b, bit in enumerate(bits[at : at + width]))
        at += width
        if rest >= short:
            rest = 2 * rest + (bits[at] if at < len(bits) else 0) - short
            at += 1
        previous += 1 + quotient * divisor + rest
        if previous >= numel:
            raise CorruptMessage("an index lies outside the vector")
        indices.append(previous)
    _check_end(bits, at)
    return torch.tensor(indices, dtype=_dtype(numel), device=data.device), -(-at // 8)


def _next_ones(bits: list[int]) -> list[int]:
    """For each position, that of the next one at or after it."""
    following, at = [0] * len(bits), len(bits)
    for i in range(len(bits) - 1, -1, -1):
        at = i if bits[i] else at
        following[i] = at
    return following


def _check_end(bits: list[int], at: int) -> None:
    if at > len(bits):
        raise CorruptMessage("the index set ends early")
    if any(bits[at : -(-at // 8) * 8]):
        raise CorruptMessage("the padding of the index set is not zero")


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    _check(indices, numel)
    bits = torch.zeros(numel, dtype=torch.uint8, device=indices.device)
    bits[indices.long()] = 1
    out = torch.empty(-(-numel // 8), dtype=torch.uint8, device=indices.device)
    _write(bits, out)
    return out


def bitmap_decode(data: Tensor, count: int, numel: int) -> Tensor:
    nbytes = -(-numel // 8)
    if data.numel() < nbytes:
        raise CorruptMessage("the index set ends early")
    bits = _bits(data[:nbytes])
    if bool(bits[numel:].any()):
        raise CorruptMessage("the padding of the index set is not zero")
    indices = torch.nonzero(bits).reshape(-1)
    if indices.numel() != count:
        raise CorruptMessage(f"the bitmap has {indices.numel()} ones instead of {count}")
    return indices.to(_dtype(numel))


def _rest_bits(classes: Tensor) -> Tensor:
    return torch.clamp((classes.long() + 1) // 2 - 1, min=0)


def gap_histogram(indices: Tensor, numel: int) -> list[int]:
    _check(indices, numel)
    return list(torch.bincount(gap_classes(indices).long(), minlength=128).tolist())


def gap_classes(indices: Tensor) -> Tensor:
    g = _gaps(indices) + 1
    e = torch.zeros_like(g)
    for shift in (32, 16, 8, 4, 2, 1):
        e += torch.where(g >> (e + shift) > 0, shift, 0)
    half = g >> torch.clamp(e - 1, min=0) & 1
    return torch.where(e > 0, 2 * e + half - 1, 0).to(torch.uint8)


def gap_rests_encode(indices: Tensor, out: Tensor) -> int:
    lengths = _rest_bits(gap_classes(indices))
    rests = (_gaps(indices) + 1) & ((torch.ones_like(lengths) << lengths) - 1)
    bits = torch.zeros(int(lengths.sum()), dtype=torch.uint8, device=indices.device)
    _place(bits, _starts(lengths), rests, lengths)
    return _write(bits, out)


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int]:
    lengths = _rest_bits(classes)
    if bool((lengths > 55).any()):
        raise CorruptMessage("an index lies outside the vector")
    total = int(lengths.sum())
    nbytes = -(-total // 8)
    if nbytes > data.numel():
        raise CorruptMessage("the index set ends early")
    bits = _bits(data[:nbytes])
    if bool(bits[total:].any()):
        raise CorruptMessage("the padding of the index set is not zero")
    c = classes.long()
    head = torch.where(c > 0, 2 + (c + 1 & 1), 1)
    steps = head << lengths | _read(bits, _starts(lengths), lengths)  # g + 1
    if bool((steps > numel).any()):
        raise CorruptMessage("an index lies outside the vector")
    indices = torch.cumsum(steps, 0) - 1
    if indices.numel() and not 0 <= int(indices.max()) < numel:
        raise CorruptMessage("an index lies outside the vector")
    return indices.to(_dtype(numel)), nbytes


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
    _check(indices, numel)
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
    return torch.tensor(indices, dtype=_dtype(numel), device=data.device), coder.finish()


# ---- permutations -----------------------------------------------------------------------------------------------------------


def _mix(h: Tensor) -> Tensor:
    """A 32-bit hash on int64 tensors; products wrap modulo 2^64, whose low half is what counts."""
    h = h ^ h >> 16
    h = h * 0x7FEB352D & 0xFFFFFFFF
    h = h ^ h >> 15
    h = h * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> 16


def _network(keys: list[int], bits: int) -> Callable[[Tensor], Tensor]:
    left_bits = bits // 2
    right_bits = bits - left_bits
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1

    def apply(v: Tensor) -> Tensor:
        a, b = v >> right_bits, v & right_mask
        for r in range(0, len(keys), 2):
            a = a ^ _mix(b + keys[r] & 0xFFFFFFFF) & left_mask
            b = b ^ _mix(a + keys[r + 1] & 0xFFFFFFFF) & right_mask
        return a << right_bits | b

    return apply


def permuted_indices(keys: list[int], rotation: int, numel: int, k: int) -> Tensor:
    return _images(keys, rotation, numel, k, torch.device("cpu")).to(_dtype(numel))


def _images(keys: list[int], rotation: int, numel: int, k: int, device: torch.device) -> Tensor:
    apply = _network(keys, max(numel - 1, 0).bit_length())
    v = apply(torch.arange(k, dtype=torch.int64, device=device))
    while True:
        outside = v >= numel
        if not bool(outside.any()):
            break
        v[outside] = apply(v[outside])
    return torch.where(v + rotation >= numel, v + rotation - numel, v + rotation)


def permuted_gather(x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
    return x[_images(keys, rotation, x.numel(), k, x.device)]


def permuted_scatter(values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
    out.zero_()
    out[_images(keys, rotation, out.numel(), values.numel(), out.device)] = values


def permuted_scatter_add(values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
    at = _images(keys, rotation, out.numel(), values.numel(), out.device)
    out[at] = out[at] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)
