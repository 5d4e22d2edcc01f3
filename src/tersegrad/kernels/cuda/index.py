"""Index sets by CUDA kernels: planar Golomb codes."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda.loader import launch
from tersegrad.kernels.reference.index import _split
from tersegrad.kernels.reference.select import index_dtype

__all__ = [
    "gap_classes",
    "gap_histogram",
    "gap_rests_decode",
    "gap_rests_encode",
    "golomb_decode",
    "golomb_encode",
    "golomb_size",
]

SOURCE = "index.cu"
# As in index.cu.
LENGTH, STATUS, USED = range(3)
CORRUPT, TOO_SMALL, UNSORTED = 1, 2, 3
THREADS = 256


def _blocks(count: int) -> int:
    return -(-count // THREADS)


def _wide(indices: Tensor) -> int:
    return int(indices.dtype == torch.int64)


def _parts(indices: Tensor, divisor: int, head: Tensor) -> Tensor:
    """(2, count): bits of unary parts, and which remainders are long."""
    count = indices.numel()
    parts = torch.empty(2, count, dtype=torch.int64, device=indices.device)
    arguments = (indices, _wide(indices), count, divisor, _split(divisor)[1], parts, head)
    launch(SOURCE, "golomb_parts", _blocks(count), THREADS, *arguments)
    return parts


def running(rows: Tensor) -> Tensor:
    """The running sums of each row; torch's own along the last dimension of several rows are a hundred times slower."""
    sums = torch.empty_like(rows)
    for row, into in zip(rows, sums, strict=True):
        torch.cumsum(row, 0, out=into)
    return sums


def golomb_size(indices: Tensor, divisor: int) -> Tensor:
    """Bytes that :func:`golomb_encode` writes, int64, 0-d."""
    head = torch.zeros(3, dtype=torch.int64, device=indices.device)
    unary, longs = (_parts(indices.contiguous(), divisor, head).sum(1) + 7) // 8
    size: Tensor = unary + longs + (indices.numel() * _split(divisor)[0] + 7) // 8
    return size


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> Tensor:
    """The planes in the first bytes of ``out``; their length, int64, 0-d."""
    count, room = indices.numel(), out.numel()
    head = torch.zeros(3, dtype=torch.int64, device=indices.device)
    if count == 0:
        return head[LENGTH]
    indices = indices.contiguous()
    width, short = _split(divisor)
    sums = running(_parts(indices, divisor, head))
    words = torch.zeros(room // 4 + 2, dtype=torch.int32, device=out.device)
    arguments = (indices, _wide(indices), count, divisor, width, short, sums, room, words, head)
    launch(SOURCE, "golomb_write", _blocks(count), THREADS, *arguments)
    launch(SOURCE, "planes_copy", min(-(-room // 1024), 1024), THREADS, words, room, out, head)
    length, status, _ = head.tolist()
    if status == UNSORTED:
        raise ValueError("indices must increase strictly and lie within the vector")
    if status == TOO_SMALL:
        raise ValueError(f"the codes take {length} bytes, out has {room}")
    # Known here by now: nobody has to wait for it again.
    return torch.tensor(length)


def gap_classes(indices: Tensor) -> Tensor:
    classes = torch.empty(indices.numel(), dtype=torch.uint8, device=indices.device)
    launch(
        SOURCE, "gap_classes", _blocks(indices.numel()), THREADS, indices.contiguous(), _wide(indices), indices.numel(), classes
    )
    return classes


def gap_histogram(indices: Tensor, numel: int) -> Tensor:
    """The counts of the 128 classes. That the indices increase is not looked at, for which the host would wait."""
    counts, number = torch.zeros(128, dtype=torch.int64, device=indices.device), indices.numel()
    launch(SOURCE, "gap_histogram", min(_blocks(number), 528), THREADS, indices.contiguous(), _wide(indices), number, counts)
    return counts


def gap_rests_encode(indices: Tensor, out: Tensor) -> Tensor:
    """The bits that classes leave open, in the first bytes of ``out``; their length. Whether there is room the host would wait for."""
    count, room, device = indices.numel(), out.numel(), out.device
    head = torch.zeros(3, dtype=torch.int64, device=device)
    if count == 0:
        return head[LENGTH]
    given = (indices.contiguous(), _wide(indices), count)
    widths = torch.empty(count, dtype=torch.int64, device=device)
    launch(SOURCE, "gap_widths", _blocks(count), THREADS, *given, widths)
    words = torch.zeros(room // 4 + 2, dtype=torch.int32, device=device)
    launch(SOURCE, "gap_rests_write", _blocks(count), THREADS, *given, widths.cumsum(0), room, words, head)
    launch(SOURCE, "planes_copy", min(-(-room // 1024), 1024), THREADS, words, room, out, head)
    return head[LENGTH]


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    count, device, data, classes = classes.numel(), data.device, data.contiguous(), classes.contiguous()
    out = torch.empty(count, dtype=index_dtype(numel), device=device)
    head = torch.zeros(3, dtype=torch.int64, device=device)
    if count == 0:
        return out, head[LENGTH]
    widths, steps = torch.empty(2, count, dtype=torch.int64, device=device)
    launch(SOURCE, "gap_class_widths", _blocks(count), THREADS, classes, count, widths, head)
    # What a thread reads must be there, even where there are no bytes.
    held = data if data.numel() else classes
    sums = widths.cumsum(0)
    launch(SOURCE, "gap_rests_read", _blocks(count), THREADS, held, data.numel(), classes, count, numel, sums, steps, head)
    launch(SOURCE, "gap_indices", _blocks(count), THREADS, count, numel, steps.cumsum(0), _wide(out), out, head)
    length, status, _ = head.tolist()
    if status == CORRUPT:
        raise CorruptMessage(
            "not an index set: its gaps end early, its padding is not zero, or an index lies outside the vector"
        )
    return out, torch.tensor(length)


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> Tensor:
    """Fill ``out`` with indices from the start of ``data``; the bytes used, int64, 0-d."""
    count, device = out.numel(), out.device
    head = torch.zeros(3, dtype=torch.int64, device=device)
    if count == 0:
        return head[LENGTH]
    data = data.contiguous()
    width, short = _split(divisor)
    # The quotients of indices within the vector add up to at most numel / divisor.
    nbytes = data.numel()
    scanned = min(nbytes, (numel // divisor + count) // 8 + 1)
    if count > 8 * scanned or count > numel:
        raise CorruptMessage("an index set ends early, or has more indices than there are")
    counts = torch.empty(-(-scanned // (4 * THREADS)), dtype=torch.int64, device=device)
    places = torch.zeros(count, dtype=torch.int64, device=device)
    parts = torch.empty(2, count, dtype=torch.int64, device=device)
    launch(SOURCE, "ones_count", counts.numel(), THREADS, data, scanned, counts)
    launch(SOURCE, "ones_place", counts.numel(), THREADS, data, scanned, counts, counts.cumsum(0), count, places, head)
    shape = (count, numel, divisor, width, short)
    launch(SOURCE, "golomb_rests", _blocks(count), THREADS, data, nbytes, *shape, places, parts, head)
    longs = parts[1].cumsum(0)
    launch(SOURCE, "golomb_resolve", _blocks(count), THREADS, data, nbytes, count, width, short, longs, parts, head)
    rests = parts[0].cumsum(0)
    launch(SOURCE, "golomb_indices", _blocks(count), THREADS, count, numel, divisor, places, rests, _wide(out), out, head)
    length, status, _ = head.tolist()
    if status == CORRUPT:
        raise CorruptMessage("not an index set: it ends early, its padding is not zero, or an index lies outside the vector")
    return torch.tensor(length)
