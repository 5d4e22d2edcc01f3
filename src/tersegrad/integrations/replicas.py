"""Replica safety: tensors that must be the same on every rank, compared by their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from tersegrad.core.errors import TersegradError
from tersegrad.exchange import AllGather, ProcessGroup


class ReplicasDiffer(TersegradError):
    """Parameters that must be the same on every rank are not."""


def compare(tensors: Mapping[str, Tensor], group: ProcessGroup, step: int) -> None:
    """Raise :class:`ReplicasDiffer`, naming the first tensor that differs, unless all have the same bits (a collective call)."""
    if not tensors:
        return
    device = next(iter(tensors.values())).device
    mine = torch.frombuffer(bytearray(b"".join(map(digest, tensors.values()))), dtype=torch.uint8).to(device)
    work, everyone = group.launch(AllGather(mine))
    work.wait()
    rows = everyone.cpu().view(group.size, len(tensors), -1)
    for number, name in enumerate(tensors):
        differ = [rank for rank in range(1, group.size) if not torch.equal(rows[rank, number], rows[0, number])]
        if differ:
            raise ReplicasDiffer(f"{name} on rank {differ[0]} differs from rank 0 before step {step}")


def digest(x: Tensor) -> bytes:
    """Sixteen bytes that tell tensors apart."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).digest()
