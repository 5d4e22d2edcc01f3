"""Sparse messages with a Golomb-coded index set, in plain torch: the definition of what kernels do in one go.

The general path is :mod:`tersegrad.codecs.sparse`, which decides by what :func:`sparse_encode` counted whether to send this form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.index import gap_histogram, golomb_decode, golomb_encode, random_divisor
from tersegrad.kernels.reference.select import index_dtype, sparse_scatter, sparse_scatter_add

__all__ = ["sparse_decode", "sparse_encode"]

GOLOMB = 250
WRITTEN, NO_ROOM = 0, 2


def sparse_encode(indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor) -> Tensor:
    total, facts = int(count), torch.zeros(5 + 128, dtype=torch.int64)
    facts[3] = total
    if total == 0 or total > indices.numel():
        facts[0] = NO_ROOM
        return facts.to(out.device)
    indices, values = indices[:total], values[:total]
    facts[4] = not bool(values.isfinite().all())
    facts[5:] = gap_histogram(indices, numel)
    front, left = [0], total
    while left >= 128:
        front.append(left & 127 | 128)
        left >>= 7
    divisor = random_divisor(total, numel)
    planes = torch.empty(3 + (total * (1 + divisor.bit_length()) + numel // divisor + 7) // 8, dtype=torch.uint8)
    planes = planes[: int(golomb_encode(indices.cpu(), divisor, planes))]
    largest = torch.finfo(torch.bfloat16).max
    kept = values.clamp(-largest, largest).to(torch.bfloat16) if narrow else values
    message = torch.cat(
        (torch.tensor([*front, left, GOLOMB], dtype=torch.uint8), planes, kept.cpu().contiguous().view(torch.uint8))
    )
    facts[1], facts[2] = message.numel(), planes.numel()
    if message.numel() > out.numel():
        facts[0] = NO_ROOM
    else:
        out[: message.numel()] = message.to(out.device)
    return facts.to(out.device)


def sparse_decode(
    data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    behind = (2 if narrow else 4) * count
    planes = data[len(front) : max(data.numel() - behind, len(front))]
    indices = torch.empty(count, dtype=index_dtype(numel), device=data.device)
    fine = bytes(data[: len(front)].tolist()) == front
    try:
        fine = fine and int(golomb_decode(planes, numel, divisor, indices)) + len(front) + behind == data.numel()
    except CorruptMessage:
        fine = False
    if fine:
        values = data[data.numel() - behind :].clone().view(torch.bfloat16 if narrow else torch.float32).float()
        if weight is None:
            sparse_scatter(indices, values, out)
        else:
            sparse_scatter_add(indices, values, weight, out)
    return torch.tensor(fine, device=out.device)
