"""Planar codes in plain torch: the definition. All unary parts of a sequence first, then all its low bits, each padded to a byte.

So the position of the j-th one of the unary plane tells the sum of all parts up to j, and a running sum of widths tells where the
low bits of a value begin: nothing has to be read in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage

__all__ = [
    "planar_gamma_decode",
    "planar_gamma_encode",
    "rice_best",
    "rice_bits",
    "rice_decode",
    "rice_encode",
]

RICE_LIMIT = 32  # quotients from here on are escaped
RICE_MAX = 56  # the largest parameter
_LARGEST = (1 << 63) - 1


def log2(v: Tensor) -> Tensor:
    """The floor of log2 of int64 values >= 1, exactly."""
    n = torch.frexp(v.double())[1].long() - 1
    # Conversion to float64 may round up to the next power of two.
    return n - (v >> n == 0).long()


# Planes


def write_bits(bits: Tensor) -> Tensor:
    """Zeros and ones as bytes, least significant bit first."""
    padded = torch.cat([bits.to(torch.uint8), bits.new_zeros(-bits.numel() % 8, dtype=torch.uint8)]).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def read_bits(data: Tensor) -> Tensor:
    """The bits of some bytes, uint8."""
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten()


def unary_plane(parts: Tensor) -> Tensor:
    """Each part as so many zeros and a one."""
    ends = (parts + 1).cumsum(0)
    bits = torch.zeros(int(ends[-1]) if ends.numel() else 0, dtype=torch.uint8, device=parts.device)
    bits[ends - 1] = 1
    return write_bits(bits)


def read_unary(data: Tensor, count: int) -> tuple[Tensor, int]:
    """``count`` parts from the start of ``data``, and the bytes of the plane."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=data.device), 0
    if count > 8 * data.numel():
        raise CorruptMessage("a unary plane ends early")
    ones = read_bits(data).nonzero()[:, 0]
    if ones.numel() < count:
        raise CorruptMessage("a unary plane ends early")
    nbytes = int(ones[count - 1]) // 8 + 1
    if ones.numel() > count and int(ones[count]) < 8 * nbytes:
        raise CorruptMessage("the padding of a unary plane is not zero")
    ones = ones[:count]
    return ones.diff(prepend=ones.new_full((1,), -1)) - 1, nbytes


def field_plane(values: Tensor, widths: Tensor) -> Tensor:
    """The ``widths`` low bits of each value, one after another."""
    ends = widths.cumsum(0)
    starts = ends - widths
    bits = torch.zeros(int(ends[-1]) if ends.numel() else 0, dtype=torch.uint8, device=values.device)
    for b in range(int(widths.max()) if widths.numel() else 0):
        live = widths > b
        bits[starts[live] + b] = (values[live] >> b & 1).to(torch.uint8)
    return write_bits(bits)


def read_fields(data: Tensor, widths: Tensor) -> tuple[Tensor, int]:
    """The values again, and the bytes of the plane."""
    ends = widths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    nbytes = -(-total // 8)
    if nbytes > data.numel():
        raise CorruptMessage("a plane of low bits ends early")
    bits = read_bits(data[:nbytes])
    if bool(bits[total:].any()):
        raise CorruptMessage("the padding of a plane of low bits is not zero")
    values, starts = torch.zeros_like(widths), ends - widths
    for b in range(int(widths.max()) if widths.numel() else 0):
        live = widths > b
        values[live] |= bits[starts[live] + b].long() << b
    return values, nbytes


def put(planes: list[Tensor], out: Tensor) -> Tensor:
    """Planes one after another at the start of ``out``; their length, int64, 0-d."""
    joined = torch.cat(planes)
    if joined.numel() > out.numel():
        raise ValueError(f"the codes take {joined.numel()} bytes, out has {out.numel()}")
    out[: joined.numel()] = joined
    return torch.tensor(joined.numel(), device=out.device)


# Elias gamma


def _gamma_planes(values: Tensor) -> list[Tensor]:
    if bool((values < 1).any()):
        raise ValueError("Elias codes are for values of at least 1")
    n = log2(values)
    return [unary_plane(n), field_plane(values, n)]


def _read_gamma(data: Tensor, count: int) -> tuple[Tensor, int]:
    n, used = read_unary(data, count)
    if bool((n > 62).any()):
        raise CorruptMessage("a code of a value above 2^63 - 1")
    low, more = read_fields(data[used:], n)
    return torch.ones_like(n) << n | low, used + more


def planar_gamma_encode(values: Tensor, out: Tensor) -> int | Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length, int64, 0-d."""
    return put(_gamma_planes(values), out)


def planar_gamma_decode(data: Tensor, out: Tensor) -> int | Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used, int64, 0-d."""
    values, used = _read_gamma(data, out.numel())
    out.copy_(values)
    return torch.tensor(used, device=out.device)


# Rice


def _check_rice(values: Tensor) -> None:
    if bool((values < 0).any()):
        raise ValueError("Rice codes are for values of at least 0")


def rice_bits(values: Tensor, k: int) -> int | Tensor:
    """Bits of all planes together, without padding."""
    _check_rice(values)
    q = values >> k
    escapes = q[q >= RICE_LIMIT] - (RICE_LIMIT - 1)
    return (q.clamp(max=RICE_LIMIT) + 1 + k).sum() + (2 * log2(escapes) + 1).sum()


def rice_best(values: Tensor) -> int | Tensor:
    """The smallest parameter with the fewest bits."""
    best, least = 0, int(rice_bits(values, 0))
    for k in range(1, RICE_MAX + 1):
        if values.numel() * (k + 1) >= least:  # no code is shorter than k + 1 bits
            break
        bits = int(rice_bits(values, k))
        if bits < least:
            best, least = k, bits
    return torch.tensor(best, device=values.device)


def rice_encode(values: Tensor, k: int, out: Tensor) -> int | Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length, int64, 0-d."""
    _check_rice(values)
    q = values >> k
    planes = [unary_plane(q.clamp(max=RICE_LIMIT)), field_plane(values, torch.full_like(values, k))]
    return put(planes + _gamma_planes(q[q >= RICE_LIMIT] - (RICE_LIMIT - 1)), out)


def rice_decode(data: Tensor, k: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used, int64, 0-d."""
    q, used = read_unary(data, out.numel())
    if bool((q > RICE_LIMIT).any()):
        raise CorruptMessage("a quotient above the limit")
    low, more = read_fields(data[used:], torch.full_like(q, k))
    used += more
    escaped = q == RICE_LIMIT
    beyond, more = _read_gamma(data[used:], int(escaped.sum()))
    if bool((beyond > (_LARGEST >> k) - (RICE_LIMIT - 1)).any()):
        raise CorruptMessage("a value above 2^63 - 1")
    q[escaped] = beyond + (RICE_LIMIT - 1)
    out.copy_(q << k | low)
    return torch.tensor(used + more, device=out.device)
