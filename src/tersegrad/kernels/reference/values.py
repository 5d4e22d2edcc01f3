"""Values of sparse messages as the bytes behind an index set, in plain torch: the definition of what kernels do in one go.

The general path is :mod:`tersegrad.codecs.values`; short messages, which have another code, take no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.rans import SHORTEST, rans_decode, rans_encode
from tersegrad.kernels.reference.rounding import sum_abs
from tersegrad.kernels.reference.select import sparse_scatter, sparse_scatter_add
from tersegrad.kernels.reference.sparse import set_decode
from tersegrad.kernels.reference.variance import exp4_round, exp4_top

# And for codecs and kernels: CODES, from_powers, mean_scales, mean_scales_of, round_to_powers.
__all__ = ["exp4_decode", "exp4_encode", "mean_signs_decode", "mean_signs_encode", "signs_decode", "signs_encode"]

NORMAL, NON_FINITE, PACKED = 0, 2, 4
LOWEST = -126
# The log2 of how many codes a chunk has: there are so few of them that longer chunks would leave most of a GPU without work.
CODES = SHORTEST
_NOTHING = torch.empty(0, dtype=torch.uint8)


def round_to_powers(
    values: Tensor,
    pieces: Tensor,
    number: int,
    top: Callable[[Tensor], Tensor] = exp4_top,
    rounded: Callable[[Tensor, Tensor], Tensor] = exp4_round,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What values in these of ``number`` pieces become; E of each piece; of those that are not zero then, their pieces and codes."""
    largest = torch.zeros(number).scatter_reduce_(0, pieces, values.abs(), "amax")
    tops = top(largest.unsqueeze(-1)).squeeze(-1)
    decoded = rounded(values, tops[pieces])
    kept = decoded != 0
    owners, sent = pieces[kept], decoded[kept]
    exponents = torch.frexp(tops).exponent - 1
    codes = (exponents[owners] - (torch.frexp(sent).exponent - 1) + 8 * (sent < 0)).to(torch.uint8)
    return decoded, exponents, owners, codes


def from_powers(exponents: Tensor, codes: Tensor) -> Tensor:
    """(-1)^sign 2^(E - d) as float32; raises where that is denormal, which no encoder writes."""
    biased = exponents - (codes & 7).to(torch.int32) + 127
    if bool((biased < 1).any()):
        raise CorruptMessage("a value is below the smallest normal float32")
    magnitude = (biased << 23).to(torch.int32).view(torch.float32)
    return torch.where(codes > 7, -magnitude, magnitude)


def mean_scales(values: Tensor, owners: Tensor, tensors: int, total: Callable[[Tensor], Tensor] = sum_abs) -> Tensor:
    """The mean magnitude of the values of each owner as bfloat16; owners increase from 0 on."""
    return mean_scales_of(values, torch.bincount(owners, minlength=tensors).tolist(), total)


def mean_scales_of(values: Tensor, counts: Sequence[int], total: Callable[[Tensor], Tensor] = sum_abs) -> Tensor:
    """The same by how many values each owner has."""
    means = [float(total(part)) / part.numel() for part in values.split_with_sizes(list(counts))]
    return torch.tensor(means, dtype=torch.float64).clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)


def _pieces(indices: Tensor, layout: Tensor) -> Tensor:
    return torch.searchsorted(layout.view(-1, 4)[:, 0].cumsum(0), indices.long().cpu(), right=True)


def exp4_encode(indices: Tensor, values: Tensor, count: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = min(int(count), indices.numel())
    if not bool(values[:total].isfinite().all()):
        return (
            indices[:0],
            values[:total],
            _NOTHING.to(indices.device),
            torch.tensor([0, 0, NON_FINITE, 0], device=indices.device),
        )
    pieces = _pieces(indices[:total], layout)
    decoded, exponents, owners, codes = round_to_powers(values[:total].cpu(), pieces, layout.numel() // 4)
    begun = exponents[owners.unique_consecutive()].to(torch.int8).view(torch.uint8)
    plain = torch.empty((codes.numel() + 1) // 2, dtype=torch.uint8)
    block = torch.empty(1 + plain.numel(), dtype=torch.uint8)
    block = block[: int(rans_encode(codes, 16, None, 1, True, CODES, block))]
    packs = block.numel() >= plain.numel()
    if packs:
        pack_bits(codes, 4, plain)
    data = torch.cat((begun, plain if packs else block))
    told = torch.tensor([codes.numel(), data.numel(), PACKED if packs else NORMAL, begun.numel()])
    kept = indices[:total][(decoded != 0).to(indices.device)]
    return kept, decoded.to(indices.device), data.to(indices.device), told.to(indices.device)


def exp4_decode(
    data: Tensor,
    front: bytes,
    count: int,
    numel: int,
    alphabet: int,
    layout: Tensor,
    packed: bool,
    out: Tensor,
    weight: float | None,
) -> Tensor:
    codes = torch.empty(count, dtype=torch.uint8)
    try:
        indices, at = set_decode(data, front, count, numel, alphabet)
        tensors, owners = torch.unique_consecutive(_pieces(indices, layout), return_inverse=True)
        exponents, rest = (
            data[at : at + tensors.numel()].cpu().view(torch.int8).to(torch.int32),
            data[at + tensors.numel() :].cpu(),
        )
        if packed:
            used = (count + 1) // 2
            fine = used == rest.numel() and not (count % 2 and int(rest[-1]) >> 4)
            if fine:
                unpack_bits(rest, 4, codes)
        else:
            fine = int(rans_decode(rest, 16, None, 1, codes)) == rest.numel()
        fine = fine and exponents.numel() == tensors.numel() and bool((exponents >= LOWEST).all())
        values = from_powers(exponents[owners], codes) if fine else codes
    except CorruptMessage:
        fine = False
    return _put(indices, values, out, weight) if fine else torch.tensor(False, device=out.device)


def signs_encode(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    total = min(int(count), values.numel())
    data = torch.empty((total + 7) // 8, dtype=torch.uint8, device=values.device)
    pack_bits(torch.signbit(values[:total]).to(torch.uint8), 1, data)
    mode = NORMAL if bool(values[:total].isfinite().all()) else NON_FINITE
    return data, torch.tensor([int(count), data.numel(), mode, 0], device=values.device)


def signs_decode(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, tau: float, out: Tensor, weight: float | None
) -> Tensor:
    try:
        indices, at = set_decode(data, front, count, numel, alphabet)
    except CorruptMessage:
        return torch.tensor(False, device=out.device)
    bits = data[at:]
    if bits.numel() != (count + 7) // 8 or (count % 8 and int(bits[-1]) >> count % 8):
        return torch.tensor(False, device=out.device)
    signs = torch.empty(count, dtype=torch.uint8, device=data.device)
    unpack_bits(bits, 1, signs)
    return _put(indices, signs.to(torch.float32).mul_(-2.0).add_(1.0).mul_(tau), out, weight)


def mean_signs_encode(indices: Tensor, values: Tensor, count: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    signs, told = signs_encode(values, count)
    given = values[: min(int(count), values.numel())].cpu()
    tensors, owners = torch.unique_consecutive(_pieces(indices[: given.numel()], layout), return_inverse=True)
    scales = mean_scales(given, owners, tensors.numel())
    told[1], told[3] = 2 * scales.numel() + signs.numel(), scales.numel()
    decoded = torch.copysign(scales.float()[owners], given).to(values.device)
    return torch.cat((scales.view(torch.uint8).to(values.device), signs)), told, decoded


def mean_signs_decode(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, layout: Tensor, out: Tensor, weight: float | None
) -> Tensor:
    try:
        indices, at = set_decode(data, front, count, numel, alphabet)
    except CorruptMessage:
        return torch.tensor(False, device=out.device)
    tensors, owners = torch.unique_consecutive(_pieces(indices, layout), return_inverse=True)
    behind, bits = data[at:].cpu(), torch.empty(count, dtype=torch.uint8)
    signs = behind[2 * tensors.numel() :]
    if signs.numel() != (count + 7) // 8 or (count % 8 and int(signs[-1]) >> count % 8):
        return torch.tensor(False, device=out.device)
    unpack_bits(signs, 1, bits)
    scales = behind[: 2 * tensors.numel()].clone().view(torch.bfloat16).float()
    return _put(indices, scales[owners] * bits.to(torch.float32).mul_(-2.0).add_(1.0), out, weight)


def _put(indices: Tensor, values: Tensor, out: Tensor, weight: float | None) -> Tensor:
    """Values to their places; that all was right."""
    values = values.to(out.device)
    if weight is None:
        sparse_scatter(indices, values, out)
    else:
        sparse_scatter_add(indices, values, weight, out)
    return torch.tensor(True, device=out.device)
