"""Index sets by CUDA kernels, and sparse messages that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda import rans, scratch
from tersegrad.kernels.cuda.loader import launch, scan
from tersegrad.kernels.reference.rans import USUAL, raw_bits
from tersegrad.kernels.reference.select import index_dtype

__all__ = [
    "gap_classes",
    "gap_histogram",
    "gap_rests_decode",
    "gap_rests_encode",
    "golomb_decode",
    "golomb_encode",
    "sparse_decode",
    "sparse_decode_gaps",
    "sparse_encode",
    "sparse_encode_gaps",
]

SOURCE, GAPS = "index.cu", "gaps.cu"
# As in index.cuh.
STATUS, WHOLE, LENGTH, COUNT, INFINITE, CLASSES = range(6)
FINE, CORRUPT, TOO_SMALL, UNSORTED = range(4)
THREADS = 256
# Indices that a block has.
SPAN = 8 * THREADS


def _blocks(count: int) -> int:
    return -(-count // THREADS)


def _wide(indices: Tensor) -> int:
    return int(indices.dtype == torch.int64)


def _planes(
    indices: Tensor, count: Tensor, numel: int, divisor: int, values: Tensor | None, room: int
) -> tuple[Tensor, Tensor]:
    """The planes of a Golomb code that has at most ``room`` bytes, and what is known of it (places as in index.cuh).

    ``divisor`` 0: the one for random sets of ``count``. With ``values``, the gaps' classes are counted and the values looked at.
    """
    device, spans = indices.device, -(-indices.numel() // SPAN)
    head = torch.zeros(CLASSES + 128, dtype=torch.int64, device=device)
    number = room // 4 + 2
    memory, (words, sums) = scratch.empty(device, 4 * number, 16 * (spans + 1))
    given = (indices, _wide(indices), indices.numel(), count, numel, divisor)
    looked = (indices, 0) if values is None else (values, 1)
    launch(SOURCE, "golomb_survey", spans, THREADS, *given, *looked, sums, words, number, head)
    scan(SOURCE, sums, 2, spans + 1)
    launch(SOURCE, "golomb_write", spans, THREADS, *given, sums, room, words, head)
    # The words lie at its beginning.
    return memory, head


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> Tensor:
    """The planes in the first bytes of ``out``; their length, int64, 0-d."""
    room = out.numel()
    if indices.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    count = host.numbers([indices.numel()], indices.device)
    words, head = _planes(indices.contiguous(), count, 1 << 62, divisor, None, room)
    launch(SOURCE, "planes_copy", min(-(-room // 1024), 1024), THREADS, words, room, out, head)
    status, _, length = host.read(head[:3]).tolist()
    if status == UNSORTED:
        raise ValueError("indices must increase strictly and lie within the vector")
    if status == TOO_SMALL:
        raise ValueError(f"the codes take {length} bytes, out has {room}")
    # Known here by now: nobody has to wait for it again.
    return torch.tensor(length)


def sparse_encode(indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor) -> Tensor:
    """The whole message, for which the host does not wait."""
    indices, values = indices.contiguous(), values.contiguous()
    words, head = _planes(indices, count, numel, 0, values, out.numel())
    blocks = min(-(-out.numel() // 1024), 1024)
    launch(SOURCE, "sparse_write", blocks, THREADS, words, values, int(narrow), out.numel(), out, head)
    return head


def sparse_encode_gaps(
    indices: Tensor, values: Tensor, front: bytes, alphabet: int, open_bits: int, narrow: bool, out: Tensor
) -> Tensor:
    """The whole message, for which the host does not wait."""
    indices, values, count, device = indices.contiguous(), values.contiguous(), indices.numel(), out.device
    at, room = len(front), out.numel()
    head = torch.zeros(CLASSES, dtype=torch.int64, device=device)
    if room < at + 1 + -(-count * raw_bits(alphabet) // 8):
        return head[:2].fill_(TOO_SMALL)
    classes = torch.empty(count, dtype=torch.uint8, device=device)
    memory, words = _rests(indices, classes, -(-open_bits // 8), head)
    block = rans.write_block(classes, alphabet, None, 1, True, USUAL, out[at:])
    blocks = min(-(-room // 1024), 1024)
    given = (int.from_bytes(front, "little"), at, block, words, values, int(narrow), count)
    launch(GAPS, "gaps_close", blocks, THREADS, *given, room, out, head)
    del memory
    return head[:2]


def _rests(indices: Tensor, classes: Tensor | None, room: int, head: Tensor) -> tuple[Tensor, int]:
    """The bits that classes of gaps leave open, in memory to be kept and at this address; writes the ``classes``."""
    count, spans, number = indices.numel(), -(-indices.numel() // SPAN), room // 4 + 2
    memory, (words, sums) = scratch.empty(indices.device, 4 * number, 8 * (spans + 1))
    given = (indices, _wide(indices), count)
    launch(GAPS, "gap_survey", spans, THREADS, *given, 0 if classes is None else classes, sums, words, number)
    scan(GAPS, sums, 1, spans + 1)
    launch(GAPS, "gap_rests_write", spans, THREADS, *given, sums, room, words, head)
    return memory, words


def gap_classes(indices: Tensor) -> Tensor:
    classes = torch.empty(indices.numel(), dtype=torch.uint8, device=indices.device)
    if indices.numel():
        _rests(indices.contiguous(), classes, 0, torch.zeros(CLASSES, dtype=torch.int64, device=indices.device))
    return classes


def gap_histogram(indices: Tensor, numel: int) -> Tensor:
    """The counts of the 128 classes. That the indices increase is not looked at, for which the host would wait."""
    counts, number = torch.zeros(128, dtype=torch.int64, device=indices.device), indices.numel()
    launch(GAPS, "gap_histogram", min(_blocks(number), 528), THREADS, indices.contiguous(), _wide(indices), number, counts)
    return counts


def gap_rests_encode(indices: Tensor, out: Tensor) -> Tensor:
    """The bits that classes leave open, in the first bytes of ``out``; their length. Whether there is room the host would wait for."""
    room = out.numel()
    head = torch.zeros(CLASSES, dtype=torch.int64, device=out.device)
    if indices.numel():
        memory, words = _rests(indices.contiguous(), None, room, head)
        launch(SOURCE, "planes_copy", min(-(-room // 1024), 1024), THREADS, words, room, out, head)
        del memory
    return head[LENGTH]


def _read_gaps(
    data: Tensor, front: bytes, block: Tensor | None, classes: Tensor, numel: int, behind: int, out: Tensor
) -> Tensor:
    """Fill ``out`` with the indices whose gaps have these classes; what is known of them, places as in index.cuh.

    Open bits follow ``front`` and the rANS ``block``, if there is one; ``behind`` bytes must follow them, -1 for any number.
    """
    device, count, at = data.device, classes.numel(), len(front)
    spans = -(-count // SPAN)
    head = torch.zeros(CLASSES, dtype=torch.int64, device=device)
    memory, (widths, steps, sums) = scratch.empty(device, 8 * (spans + 1), 8 * count, 8 * (spans + 1))
    # What a thread reads must be there, even where there are no bytes.
    held = data if data.numel() else classes
    launch(GAPS, "gap_spans", spans, THREADS, held, at, int.from_bytes(front, "little"), classes, count, widths, head)
    scan(GAPS, widths, 1, spans + 1)
    given = (held, at, data.numel(), 0 if block is None else block, classes, count, numel)
    launch(GAPS, "gap_steps", spans, THREADS, *given, widths, steps, sums, head)
    scan(GAPS, sums, 1, spans + 1)
    launch(GAPS, "gap_indices", spans, THREADS, data.numel(), count, numel, steps, sums, behind, _wide(out), out, head)
    del memory
    return head


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(classes.numel(), dtype=index_dtype(numel), device=data.device)
    if not classes.numel():
        return out, torch.zeros((), dtype=torch.int64)
    status, _, length = host.read(_read_gaps(data.contiguous(), b"", None, classes.contiguous(), numel, -1, out)[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage(
            "not an index set: its gaps end early, its padding is not zero, or an index lies outside the vector"
        )
    return out, torch.tensor(length)


def _read_planes(data: Tensor, front: bytes, numel: int, divisor: int, behind: int, out: Tensor) -> Tensor:
    """Fill ``out`` with indices from the bytes that follow ``front``; what is known of them, places as in index.cuh.

    ``behind``: how many bytes follow them, -1 for any number.
    """
    device, at, count = data.device, len(front), out.numel()
    nbytes, spans = data.numel() - at, -(-count // SPAN)
    # The quotients of indices within the vector add up to at most numel / divisor.
    scanned = min(nbytes, (numel // divisor + count) // 8 + 1)
    head = torch.zeros(CLASSES, dtype=torch.int64, device=device)
    if count > 8 * scanned or count > numel:
        return head.fill_(CORRUPT)
    parts, first = -(-scanned // (4 * THREADS)), int.from_bytes(front, "little")
    memory, (counts, ones, rests, longs, sums) = scratch.empty(
        device, 8 * (parts + 1), 8 * count, 8 * count, 8 * (spans + 1), 8 * (spans + 1)
    )
    launch(SOURCE, "ones_count", parts, THREADS, data, at, first, scanned, counts, head)
    scan(SOURCE, counts, 1, parts + 1)
    launch(SOURCE, "ones_place", parts, THREADS, data, at, scanned, counts, count, ones, head)
    given = (data, at, nbytes, count)
    launch(SOURCE, "golomb_longs", spans, THREADS, *given, numel, divisor, ones, longs, head)
    scan(SOURCE, longs, 1, spans + 1)
    launch(SOURCE, "golomb_rests", spans, THREADS, *given, divisor, longs, rests, sums, head)
    scan(SOURCE, sums, 1, spans + 1)
    shape = (nbytes, count, numel, divisor)
    launch(SOURCE, "golomb_indices", spans, THREADS, *shape, ones, rests, sums, behind, _wide(out), out, head)
    # What the kernels use is kept until here: what is made later on the same stream may lie in its place.
    del memory
    return head


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> Tensor:
    """Fill ``out`` with indices from the start of ``data``; the bytes used, int64, 0-d."""
    if out.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    status, _, length = host.read(_read_planes(data.contiguous(), b"", numel, divisor, -1, out)[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage("not an index set: it ends early, its padding is not zero, or an index lies outside the vector")
    return torch.tensor(length)


def sparse_decode(
    data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The whole message, for which the host does not wait; whether it was one, int64, 0-d."""
    data, behind = data.contiguous(), (2 if narrow else 4) * count
    indices = torch.empty(count, dtype=index_dtype(numel), device=out.device)
    if data.numel() < len(front) + behind:
        return torch.zeros((), dtype=torch.int64, device=out.device)
    head = _read_planes(data, front, numel, divisor, behind, indices)
    return _put(data, indices, narrow, out, weight, head)


def sparse_decode_gaps(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The same for a message with entropy-coded gaps."""
    data, behind = data.contiguous(), (2 if narrow else 4) * count
    if data.numel() < len(front) + behind:
        return torch.zeros((), dtype=torch.int64, device=out.device)
    indices = torch.empty(count, dtype=index_dtype(numel), device=out.device)
    classes = torch.empty(count, dtype=torch.uint8, device=out.device)
    block = rans.read_block(data[len(front) :], alphabet, None, 1, classes)
    head = _read_gaps(data, front, block, classes, numel, behind, indices)
    return _put(data, indices, narrow, out, weight, head)


def _put(data: Tensor, indices: Tensor, narrow: bool, out: Tensor, weight: float | None, head: Tensor) -> Tensor:
    """The values at the end of a message to ``out``, if it is right: whether it is."""
    count = indices.numel()
    if weight is None:
        out.zero_()
    values = data[data.numel() - (2 if narrow else 4) * count :]
    adds = (0.0, 0) if weight is None else (float(weight), 1)
    launch(
        SOURCE, "sparse_read", _blocks(count), THREADS, values, int(narrow), count, indices, _wide(indices), *adds, out, head
    )
    return head[STATUS] == FINE
