"""Replica safety: tensors that must be the same on every rank, compared by their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from tersegrad.core.errors import TersegradError
from tersegrad.exchange import ProcessGroup

DIGEST = 16  # bytes


class ReplicasDiffer(TersegradError):
    """Parameters that must be the same on every rank are not."""


def difference(tensors: Mapping[str, Tensor], group: ProcessGroup) -> str:
    """Which tensor has other bits on which rank; nothing where all are the same (a collective call)."""
    if group.size == 1 or not tensors:
        return ""
    rows = group.gather(b"".join(map(digest, tensors.values())))
    for number, name in enumerate(tensors):
        each = [row[DIGEST * number : DIGEST * (number + 1)] for row in rows]
        differ = [rank for rank in range(1, group.size) if each[rank] != each[0]]
        if differ:
            return f"{name} on rank {group.global_rank(differ[0])} differs from rank {group.global_rank(0)}"
    return ""


def digest(x: Tensor) -> bytes:
    """Sixteen bytes that tell tensors apart."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=DIGEST).digest()
