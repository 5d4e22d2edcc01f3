"""Sparse messages with a Golomb-coded index set or entropy-coded gaps, in plain torch: the definition of what kernels do in one go.

The general path is :mod:`tersegrad.codecs.sparse`, which decides by what :func:`sparse_encode` counted which form to send.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.index import (
    gap_classes,
    gap_histogram,
    gap_rests_decode,
    gap_rests_encode,
    golomb_decode,
    golomb_encode,
    random_divisor,
)
from tersegrad.kernels.reference.rans import USUAL, rans_decode, rans_encode, raw_bits
from tersegrad.kernels.reference.select import index_dtype, sparse_scatter, sparse_scatter_add

# And for other modules of kernels: set_decode.
__all__ = ["sparse_decode", "sparse_decode_gaps", "sparse_encode", "sparse_encode_gaps"]

GOLOMB, ENTROPY_GAPS = 250, 253
WRITTEN, NO_ROOM, NORMAL = 0, 2, 0


def sparse_encode(
    indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor, open_bits: int = 0
) -> Tensor:
    coded, (total, nbytes, mode, *_) = values.dtype == torch.uint8, (*count.reshape(-1).tolist(), 0, NORMAL)
    room, facts = indices.numel(), torch.zeros(5 + 128, dtype=torch.int64)
    facts[3] = total
    if total == 0 or total > room:
        facts[0] = NO_ROOM
        return facts.to(out.device)
    indices, values = indices[:total], values[: nbytes if coded else total]
    facts[4] = not coded and not bool(values.isfinite().all())
    facts[5:] = gap_histogram(indices, numel)
    front, left = [mode], total
    while left >= 128:
        front.append(left & 127 | 128)
        left >>= 7
    divisor = random_divisor(total, numel)
    planes = torch.empty(3 + (total * (1 + divisor.bit_length()) + numel // divisor + 7) // 8, dtype=torch.uint8)
    planes = planes[: int(golomb_encode(indices.cpu(), divisor, planes))]
    message = torch.cat((torch.tensor([*front, left, GOLOMB], dtype=torch.uint8), planes, _bytes(values, narrow)))
    facts[1], facts[2] = message.numel(), planes.numel()
    if open_bits:
        alphabet = 1 + int(facts[5:].nonzero()[-1])
        gaps = torch.tensor([NO_ROOM, 0])
        if alphabet > 1:
            beginning = bytes((*front, left, ENTROPY_GAPS, alphabet))
            gaps = sparse_encode_gaps(indices, values, beginning, alphabet, open_bits, narrow, out)
        facts[:2] = gaps
        return facts.to(out.device)
    if message.numel() > out.numel():
        facts[0] = NO_ROOM
    else:
        out[: message.numel()] = message.to(out.device)
    return facts.to(out.device)


def _bytes(values: Tensor, narrow: bool) -> Tensor:
    if values.dtype == torch.uint8:
        return values.cpu()
    largest = torch.finfo(torch.bfloat16).max
    kept = values.clamp(-largest, largest).to(torch.bfloat16) if narrow else values
    return kept.cpu().contiguous().view(torch.uint8)


def sparse_encode_gaps(
    indices: Tensor, values: Tensor, front: bytes, alphabet: int, open_bits: int, narrow: bool, out: Tensor
) -> Tensor:
    classes, rests = gap_classes(indices.cpu()), torch.empty(8 * indices.numel(), dtype=torch.uint8)
    block = torch.empty(1 + -(-classes.numel() * raw_bits(alphabet) // 8), dtype=torch.uint8)
    block = block[: int(rans_encode(classes, alphabet, None, 1, True, USUAL, block))]
    rests = rests[: int(gap_rests_encode(indices.cpu(), rests))]
    message = torch.cat((torch.tensor(list(front), dtype=torch.uint8), block, rests, _bytes(values, narrow)))
    if message.numel() > out.numel() or rests.numel() > -(-open_bits // 8):
        return torch.tensor([NO_ROOM, 0], device=out.device)
    out[: message.numel()] = message.to(out.device)
    return torch.tensor([WRITTEN, message.numel()], device=out.device)


def set_decode(data: Tensor, front: bytes, count: int, numel: int, alphabet: int) -> tuple[Tensor, int]:
    """The index set of a message that begins with ``front``, and where it ends; raises :class:`CorruptMessage`."""
    indices, code = torch.zeros(count, dtype=index_dtype(numel), device=data.device), data[len(front) :]
    if bytes(data[: len(front)].tolist()) != front:
        raise CorruptMessage("the message begins otherwise")
    if not alphabet:
        return indices, len(front) + int(golomb_decode(code, numel, random_divisor(count, numel), indices))
    classes = torch.empty(count, dtype=torch.uint8, device=data.device)
    used = int(rans_decode(code, alphabet, None, 1, classes))
    indices, rest = gap_rests_decode(code[used:], classes, numel)
    return indices, len(front) + used + int(rest)


def sparse_decode(
    data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    def decode(planes: Tensor) -> tuple[Tensor, int]:
        indices = torch.empty(count, dtype=index_dtype(numel), device=data.device)
        return indices, int(golomb_decode(planes, numel, divisor, indices))

    return _decode(data, front, count, narrow, out, weight, decode)


def sparse_decode_gaps(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    def decode(code: Tensor) -> tuple[Tensor, int]:
        classes = torch.empty(count, dtype=torch.uint8, device=data.device)
        used = int(rans_decode(code, alphabet, None, 1, classes))
        indices, rest = gap_rests_decode(code[used:], classes, numel)
        return indices, used + int(rest)

    return _decode(data, front, count, narrow, out, weight, decode)


def _decode(
    data: Tensor,
    front: bytes,
    count: int,
    narrow: bool,
    out: Tensor,
    weight: float | None,
    decode: Callable[[Tensor], tuple[Tensor, int]],
) -> Tensor:
    """A message to ``out``, its set read by ``decode`` with the bytes that it takes; whether it was one."""
    behind = (2 if narrow else 4) * count
    code = data[len(front) : max(data.numel() - behind, len(front))]
    indices, fine = data.new_empty(0), bytes(data[: len(front)].tolist()) == front
    try:
        if fine:
            indices, used = decode(code)
            fine = used + len(front) + behind == data.numel()
    except CorruptMessage:
        fine = False
    if fine:
        values = data[data.numel() - behind :].clone().view(torch.bfloat16 if narrow else torch.float32).float()
        if weight is None:
            sparse_scatter(indices, values, out)
        else:
            sparse_scatter_add(indices, values, weight, out)
    return torch.tensor(fine, device=out.device)
