"""Bit packing, trits and serial Elias codes in plain torch: the definition, on any device.

Encoders compute the length of every code, a running sum for its position, and scatter the bits. Decoders look at every bit
position of a window at once, as if a code began there, and then follow the chain of codes by pointer doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.planar import log2

__all__ = [
    "elias_bits",
    "elias_decode",
    "elias_encode",
    "pack_bits",
    "pack_trits",
    "unpack_bits",
    "unpack_trits",
]

GAMMA, DELTA, OMEGA = 0, 1, 2
_BAD = 1 << 48  # the end of what is no code; beyond any stream
_WINDOW = 1 << 15  # bytes that a decoder looks at together
_LOOKAHEAD = 16  # bytes; no code is longer than 125 bits

# ---- fixed width ----


def pack_bits(codes: Tensor, width: int, out: Tensor) -> None:
    """The low ``width`` bits of each code, one after another."""
    count = codes.numel()
    groups = codes.new_zeros((count + 7) // 8 * 8)  # eight codes are `width` whole bytes
    groups[:count] = codes & (1 << width) - 1
    groups = groups.view(-1, 8)
    packed = torch.zeros(groups.shape[0], width, dtype=codes.dtype, device=codes.device)
    for j in range(8):
        for byte in range(j * width // 8, (j * width + width - 1) // 8 + 1):
            packed[:, byte] |= _shifted(groups[:, j], j * width - 8 * byte)
    out.copy_(packed.reshape(-1)[: out.numel()] & 255)


def unpack_bits(data: Tensor, width: int, out: Tensor) -> None:
    """The codes again; the padding is not looked at."""
    count = out.numel()
    packed = torch.zeros((count + 7) // 8 * width, dtype=out.dtype, device=out.device)
    packed[: data.numel()] = data
    packed = packed.view(-1, width)
    groups = torch.zeros(packed.shape[0], 8, dtype=out.dtype, device=out.device)
    for j in range(8):
        for byte in range(j * width // 8, (j * width + width - 1) // 8 + 1):
            groups[:, j] |= _shifted(packed[:, byte], 8 * byte - j * width)
    out.copy_(groups.reshape(-1)[:count] & (1 << width) - 1)


def _shifted(x: Tensor, left: int) -> Tensor:
    return x << left if left >= 0 else x >> -left


# ---- trits ----


def pack_trits(trits: Tensor, out: Tensor) -> None:
    """Five values of 0..2 per byte."""
    if bool((trits > 2).any()):
        raise ValueError("trits are 0, 1 or 2")
    groups = trits.new_zeros((trits.numel() + 4) // 5 * 5)
    groups[: trits.numel()] = trits
    groups = groups.view(-1, 5)
    out.copy_(groups[:, 0] + 3 * groups[:, 1] + 9 * groups[:, 2] + 27 * groups[:, 3] + 81 * groups[:, 4])


def unpack_trits(data: Tensor, out: Tensor, check: bool) -> None:
    """The trits again; ``check`` raises unless the bytes are canonical."""
    count = out.numel()
    groups = torch.empty(data.numel(), 5, dtype=torch.uint8, device=data.device)
    rest = data.clamp(max=242)
    for j in range(5):
        next_rest = torch.div(rest, 3, rounding_mode="floor")
        groups[:, j] = rest - 3 * next_rest
        rest = next_rest
    out.copy_(groups.view(-1)[:count])
    if check and (bool((data > 242).any()) or (count % 5 != 0 and int(data[-1]) >= 3 ** (count % 5))):
        raise CorruptMessage("a byte holds five trits, 0..242, and what follows the last trit is zero")


# ---- lengths ----


def _low(v: Tensor, n: Tensor) -> Tensor:
    return v - (torch.ones_like(v) << n)


def _elias_lengths(v: Tensor, code: int) -> Tensor:
    n = log2(v)
    if code == GAMMA:
        return 2 * n + 1
    if code == DELTA:
        return 2 * log2(n + 1) + 1 + n
    total = torch.ones_like(v)
    while bool((v > 1).any()):
        n = log2(v.clamp(min=1))
        total += torch.where(v > 1, n + 1, 0)
        v = torch.where(v > 1, n, 1)
    return total


def elias_bits(values: Tensor, code: int) -> int:
    """Bits of all codes together."""
    if bool((values < 1).any()):
        raise ValueError("Elias codes are for values of at least 1")
    return int(_elias_lengths(values, code).sum())


# ---- encoding: pieces of at most 63 bits at known positions ----

Piece = tuple[Tensor, Tensor]  # bit positions, and the values that begin there


def _scatter(pieces: Iterable[Piece], total: int, device: torch.device) -> Tensor:
    sums = torch.zeros((total + 7) // 8 + 9, dtype=torch.int32, device=device)
    for positions, values in pieces:
        byte, shift = positions >> 3, positions & 7
        sums.index_add_(0, byte, (values << shift & 255).int())
        for j in range(1, 9):
            sums.index_add_(0, byte + j, (values >> (8 * j - shift).clamp(max=63) & 255).int())
    return sums[: (total + 7) // 8].to(torch.uint8)


def _marked(v: Tensor, n: Tensor) -> Tensor:
    """A one followed by the n low bits of v."""
    return 1 | _low(v, n) << 1


def _elias_pieces(v: Tensor, code: int, start: Tensor) -> Iterable[Piece]:
    n = log2(v)
    if code == GAMMA:
        yield start + n, _marked(v, n)
    elif code == DELTA:
        m = log2(n + 1)
        yield start + m, _marked(n + 1, m)
        yield start + 2 * m + 1, _low(v, n)
    else:
        end = start + _elias_lengths(v, OMEGA) - 1  # where the closing zero lies
        while bool((v > 1).any()):
            n = log2(v)
            more = v > 1
            end = end - torch.where(more, n + 1, 0)
            yield end, torch.where(more, _marked(v, n), 0)
            v = torch.where(more, n, 1)


def _starts(lengths: Tensor) -> tuple[Tensor, int]:
    ends = lengths.cumsum(0)
    return ends - lengths, int(ends[-1]) if ends.numel() else 0


def elias_encode(values: Tensor, code: int) -> Tensor:
    """The codes as bytes."""
    elias_bits(values, code)
    start, total = _starts(_elias_lengths(values, code))
    return _scatter(_elias_pieces(values, code, start), total, values.device)


# ---- decoding ----


class _Window:
    """Some bytes of a stream, followed by zeros, to be read at many bit positions together."""

    def __init__(self, data: Tensor) -> None:
        padded = torch.cat([data, data.new_zeros(3 * _LOOKAHEAD)]).long()
        bytes_from = [padded[j : padded.numel() - 4 + j] << 8 * j for j in range(5)]
        self.words = torch.stack(bytes_from).sum(0)  # the 40 bits from every byte on
        self.last = 8 * (self.words.numel() - 1)
        bits = (padded[:, None] >> torch.arange(8, device=data.device) & 1).view(-1)
        where = torch.arange(bits.numel(), device=data.device)
        self.next_one = torch.where(bits == 1, where, _BAD).flip(0).cummin(0).values.flip(0)

    def zeros(self, at: Tensor) -> Tensor:
        """How many zeros come before the next one."""
        at = at.clamp(max=self.last)
        return self.next_one[at] - at

    def _peek(self, at: Tensor) -> Tensor:
        at = at.clamp(max=self.last)
        return self.words[at >> 3] >> (at & 7) & 0xFFFFFFFF

    def read(self, at: Tensor, n: Tensor) -> Tensor:
        """The n <= 62 bits from ``at`` on."""
        one = torch.ones_like(n)
        low, high = n.clamp(max=31), (n - 31).clamp(min=0)
        return self._peek(at) & (one << low) - 1 | (self._peek(at + 31) & (one << high) - 1) << 31


Reader = Callable[[_Window, Tensor], tuple[Tensor, Tensor]]  # positions -> values, and where their codes end (or _BAD)


def _read_gamma(window: _Window, at: Tensor) -> tuple[Tensor, Tensor]:
    n = window.zeros(at)
    good = n <= 62
    n = torch.where(good, n, 0)
    value = torch.ones_like(n) << n | window.read(at + n + 1, n)
    return value, torch.where(good, at + 2 * n + 1, _BAD)


def _read_delta(window: _Window, at: Tensor) -> tuple[Tensor, Tensor]:
    m = window.zeros(at)
    good = m <= 5
    m = torch.where(good, m, 0)
    n = (torch.ones_like(m) << m | window.read(at + m + 1, m)) - 1
    at = at + 2 * m + 1
    return torch.ones_like(n) << n | window.read(at, n), torch.where(good, at + n, _BAD)


def _read_omega(window: _Window, at: Tensor) -> tuple[Tensor, Tensor]:
    n, one = torch.ones_like(at), torch.ones_like(at)
    more = torch.ones_like(at, dtype=torch.bool)
    good = more
    for _ in range(5):  # four groups reach 2^63
        flag = more & (window.read(at, one) == 1)
        at = at + more
        more = flag & (n <= 62)
        good = good & (more | ~flag)
        size = torch.where(more, n, 0)
        n = torch.where(more, one << size | window.read(at, size), n)
        at = at + size
    return n, torch.where(good & ~more, at, _BAD)


def _decode(data: Tensor, out: Tensor, read: Reader) -> int:
    total, position, done = 8 * data.numel(), 0, 0
    while done < out.numel():
        first = position >> 3
        window = _Window(data[first : first + _WINDOW + _LOOKAHEAD])
        limit = min(8 * _WINDOW, total - 8 * first)  # codes that begin before it are decoded now
        values, ends = read(window, torch.arange(limit, device=data.device))
        jump = torch.cat([ends.clamp(max=limit), ends.new_tensor([limit])])
        chain = ends.new_tensor([position - 8 * first])
        while chain.numel() < out.numel() - done and int(chain[-1]) < limit:
            chain = torch.cat([chain, jump[chain]])  # twice as many codes, each step
            jump = jump[jump]
        chain = chain[chain < limit][: out.numel() - done]
        end = int(ends[chain[-1]]) if chain.numel() else _BAD
        position = 8 * first + end
        if end == _BAD or position > total:
            raise CorruptMessage("the bit stream is truncated or holds a value above 2^63 - 1")
        out[done : done + chain.numel()] = values[chain]
        done += chain.numel()
    if position & 7 and int(data[position >> 3]) >> (position & 7):
        raise CorruptMessage("the bits after the last code are not zero")
    return (position + 7) // 8


def elias_decode(data: Tensor, code: int, out: Tensor) -> int:
    """Fill ``out`` from the start of ``data``; returns the bytes used."""
    return _decode(data, out, (_read_gamma, _read_delta, _read_omega)[code])
