"""Index sets by CUDA kernels, and sparse messages that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda import rans, replay, scratch
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, VaryingFloat, launch, scan
from tersegrad.kernels.reference.index import random_divisor
from tersegrad.kernels.reference.rans import USUAL, raw_bits
from tersegrad.kernels.reference.select import index_dtype

__all__ = [
    "gap_classes",
    "gap_histogram",
    "gap_rests_decode",
    "gap_rests_encode",
    "golomb_decode",
    "golomb_encode",
    "set_decode",
    "sparse_decode",
    "sparse_decode_gaps",
    "sparse_encode",
    "sparse_encode_gaps",
]
SOURCE, GAPS = "index.cu", "gaps.cu"
# As in index.cuh.
STATUS, WHOLE, LENGTH, COUNT, INFINITE, CLASSES = range(6)
FINE, CORRUPT, TOO_SMALL, UNSORTED = range(4)
THREADS, CODED = 256, 2
# How many classes of gaps a byte can tell.
MOST_CLASSES = 256
# Indices that a block has.
SPAN = 8 * THREADS


def _blocks(count: int) -> int:
    return -(-count // THREADS)


def _wide(indices: Tensor) -> int:
    return int(indices.dtype == torch.int64)


def _planes(
    indices: Tensor, count: Tensor, numel: int, divisor: int, values: Tensor | None, room: int
) -> tuple[Tensor, Tensor]:
    """The planes of a Golomb code that has at most ``room`` bytes (-1: only their length), and what is known of it, as in index.cuh.

    ``divisor`` 0: the one for random sets of ``count``. With ``values``, the gaps' classes are counted and numbers looked at.
    """
    device, spans = indices.device, -(-indices.numel() // SPAN)
    head, _ = scratch.kept(device, 8 * (CLASSES + 128))
    number = room // 4 + 2
    memory, (words, sums) = scratch.empty(device, 4 * number, 16 * (spans + 1))
    given = (indices, _wide(indices), indices.numel(), count, numel, divisor)
    looked = (indices, 0) if values is None else (values, 2 if _kind(values, False) == CODED else 1)
    launch(SOURCE, "golomb_survey", spans, THREADS, *given, *looked, sums, words, number, head)
    scan(SOURCE, sums, 2, spans + 1)
    launch(SOURCE, "golomb_write", spans, THREADS, *given, sums, room, words, head)
    # The words lie at its beginning.
    return memory, head


def _kind(values: Tensor, narrow: bool) -> int:
    """How values are written, as in index.cuh."""
    return CODED if values.dtype == torch.uint8 else int(narrow)


def golomb_encode(indices: Tensor, divisor: int, out: Tensor) -> int | Tensor:
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


def sparse_encode(
    indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor, open_bits: int = 0
) -> Tensor:
    """The whole message, for which the host does not wait."""
    indices, values = indices.contiguous(), values.contiguous()
    if open_bits:
        return _sparse_encode_counted(indices, values, count, numel, narrow, open_bits, out)
    return _sparse_encode(indices, values, count, numel, narrow, out)


@replay.operation
def _sparse_encode(indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor) -> Tensor:
    words, head = _planes(indices, count, numel, 0, values, out.numel())
    blocks = min(-(-out.numel() // 1024), 1024)
    kind = _kind(values, narrow)
    launch(SOURCE, "sparse_write", blocks, THREADS, words, values, kind, count if kind == CODED else 0, out.numel(), out, head)
    return head


@replay.operation
def _sparse_encode_counted(
    indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, open_bits: int, out: Tensor
) -> Tensor:
    """The message with entropy-coded gaps, and what a Golomb code would take."""
    head, alphabet = _planes(indices, count, numel, 0, values, -1)[1], scratch.empty(out.device, 8)[0]
    launch(GAPS, "gaps_alphabet", 1, 128, head, alphabet)
    _write_gaps(indices, values, b"", alphabet, open_bits, narrow, out, head, count)
    return head


def sparse_encode_gaps(
    indices: Tensor, values: Tensor, front: bytes, alphabet: int, open_bits: int, narrow: bool, out: Tensor
) -> Tensor:
    """The whole message, for which the host does not wait."""
    return _sparse_encode_gaps(indices.contiguous(), values.contiguous(), front, alphabet, open_bits, narrow, out)


@replay.operation
def _sparse_encode_gaps(
    indices: Tensor, values: Tensor, front: bytes, alphabet: int, open_bits: int, narrow: bool, out: Tensor
) -> Tensor:
    head, _ = scratch.kept(out.device, 16)
    _write_gaps(indices, values, front, alphabet, open_bits, narrow, out, head)
    return head


def _write_gaps(
    indices: Tensor,
    values: Tensor,
    front: bytes,
    alphabet: int | Tensor,
    open_bits: int,
    narrow: bool,
    out: Tensor,
    head: Tensor,
    counted: Argument = 0,
) -> None:
    """The message, if nothing is wrong by ``head``, which is told whether it was written and its length.

    Where the device knows the alphabet and the ``counted`` it knows what begins the message too.
    """
    count, device, room = indices.numel(), out.device, out.numel()
    known, most = (alphabet, MOST_CLASSES) if isinstance(alphabet, Tensor) else (0, alphabet)
    classes, (own, (own_head,)) = between(count, torch.uint8, device), scratch.zeros(device, 8 * CLASSES)
    coded = between(1 + -(-count * raw_bits(most) // 8), torch.uint8, device)
    memory, words = _rests(indices, classes, -(-open_bits // 8), own_head, counted)
    block = rans.write_block(classes, alphabet, None, 1, True, USUAL, coded, counted)
    begun = (int.from_bytes(front, "little"), len(front), counted, known)
    given = (block, coded, words, values, _kind(values, narrow), values.numel(), room)
    launch(GAPS, "gaps_close", min(-(-room // 1024), 1024), THREADS, *begun, *given, out, own_head, head)
    # What the kernels use is kept until here.
    del memory, own


def _rests(indices: Tensor, classes: Tensor | None, room: int, head: Argument, counted: Argument = 0) -> tuple[Tensor, int]:
    """The bits that classes of gaps leave open, in memory to be kept and at this address; writes the ``classes``."""
    count, spans, number = indices.numel(), -(-indices.numel() // SPAN), room // 4 + 2
    memory, (words, sums) = scratch.empty(indices.device, 4 * number, 8 * (spans + 1))
    given = (indices, _wide(indices), count, counted)
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


def gap_rests_encode(indices: Tensor, out: Tensor) -> int | Tensor:
    """The bits that classes leave open, in the first bytes of ``out``; their length. Whether there is room the host would wait for."""
    room = out.numel()
    head = torch.zeros(CLASSES, dtype=torch.int64, device=out.device)
    if indices.numel():
        memory, words = _rests(indices.contiguous(), None, room, head)
        launch(SOURCE, "planes_copy", min(-(-room // 1024), 1024), THREADS, words, room, out, head)
        del memory
    return head[LENGTH]


def _read_gaps(
    data: Bytes, size: Varying, front: bytes, block: Tensor | None, classes: Tensor, numel: int, behind: int, out: Tensor
) -> Tensor:
    """Fill ``out`` with the indices whose gaps have these classes; what is known of them, places as in index.cuh.

    Open bits follow ``front`` and the rANS ``block``, if there is one; ``behind`` bytes must follow them, -1 for any number.
    """
    device, count, at = out.device, classes.numel(), len(front)
    spans = -(-count // SPAN)
    head, _ = scratch.kept(device, 8 * CLASSES)
    memory, (widths, steps, sums) = scratch.empty(device, 8 * (spans + 1), 8 * count, 8 * (spans + 1))
    launch(GAPS, "gap_spans", spans, THREADS, data, at, int.from_bytes(front, "little"), classes, count, widths, head)
    scan(GAPS, widths, 1, spans + 1)
    given = (data, at, size, 0 if block is None else block, classes, count, numel)
    launch(GAPS, "gap_steps", spans, THREADS, *given, widths, steps, sums, head)
    scan(GAPS, sums, 1, spans + 1)
    launch(GAPS, "gap_indices", spans, THREADS, size, count, numel, steps, sums, behind, _wide(out), out, head)
    del memory
    return head


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int | Tensor]:
    out = torch.empty(classes.numel(), dtype=index_dtype(numel), device=data.device)
    if not classes.numel():
        return out, torch.zeros((), dtype=torch.int64)
    data, classes = data.contiguous(), classes.contiguous()
    # What a thread reads must be there, even where there are no bytes.
    given = Bytes(data if data.numel() else classes), Varying(data.numel())
    status, _, length = host.read(_read_gaps(*given, b"", None, classes, numel, -1, out)[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage(
            "not an index set: its gaps end early, its padding is not zero, or an index lies outside the vector"
        )
    return out, torch.tensor(length)


def _read_planes(
    data: Bytes, size: Varying, front: bytes, count: int, numel: int, divisor: int, behind: int, out: Tensor
) -> Tensor:
    """Fill ``out`` with ``count`` indices from the bytes that follow ``front``; what is known of them, places as in index.cuh.

    ``behind``: how many bytes follow them, -1 for any number.
    """
    device, at, spans = out.device, len(front), -(-count // SPAN)
    most = _scanned(count, numel, divisor)
    head, _ = scratch.kept(device, 8 * CLASSES)
    parts, first = -(-most // (4 * THREADS)), int.from_bytes(front, "little")
    memory, (counts, ones, rests, longs, sums) = scratch.empty(
        device, 8 * (parts + 1), 8 * count, 8 * count, 8 * (spans + 1), 8 * (spans + 1)
    )
    launch(SOURCE, "ones_count", parts, THREADS, data, size, at, first, most, counts, head)
    scan(SOURCE, counts, 1, parts + 1)
    launch(SOURCE, "ones_place", parts, THREADS, data, size, at, most, counts, count, ones, head)
    given = (data, size, at, count)
    launch(SOURCE, "golomb_longs", spans, THREADS, *given, numel, divisor, ones, longs, head)
    scan(SOURCE, longs, 1, spans + 1)
    launch(SOURCE, "golomb_rests", spans, THREADS, *given, divisor, longs, rests, sums, head)
    scan(SOURCE, sums, 1, spans + 1)
    shape = (size, count, numel, divisor)
    launch(SOURCE, "golomb_indices", spans, THREADS, *shape, ones, rests, sums, behind, _wide(out), out, head)
    # What the kernels use is kept until here: what is made later on the same stream may lie in its place.
    del memory
    return head


def _scanned(count: int, numel: int, divisor: int) -> int:
    """Bytes that the unary parts have at most: the quotients of indices within the vector add up to at most numel / divisor."""
    return (numel // divisor + count) // 8 + 1


def _too_short(nbytes: int, count: int, numel: int, divisor: int) -> bool:
    """Whether so many bytes cannot hold the set."""
    return count > 8 * min(nbytes, _scanned(count, numel, divisor)) or count > numel


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with indices from the start of ``data``; the bytes used, int64, 0-d."""
    count = out.numel()
    if count == 0:
        return torch.zeros((), dtype=torch.int64)
    status = length = CORRUPT
    if not _too_short(data.numel(), count, numel, divisor):
        head = _read_planes(Bytes(data.contiguous()), Varying(data.numel()), b"", count, numel, divisor, -1, out)
        status, _, length = host.read(head[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage("not an index set: it ends early, its padding is not zero, or an index lies outside the vector")
    return torch.tensor(length)


def set_decode(data: Tensor, front: bytes, count: int, numel: int, alphabet: int) -> tuple[Tensor, Tensor]:
    """The set of a message, for which the host does not wait."""
    indices = torch.empty(count, dtype=index_dtype(numel), device=data.device)
    data, at, divisor = data.contiguous(), len(front), random_divisor(count, numel)
    given = Bytes(data), Varying(data.numel())
    if data.numel() <= at or (not alphabet and _too_short(data.numel() - at, count, numel, divisor)):
        return indices, torch.full((3,), CORRUPT, dtype=torch.int64, device=data.device)
    if not alphabet:
        return indices, _read_planes(*given, front, count, numel, divisor, -1, indices)[:3]
    classes = torch.empty(count, dtype=torch.uint8, device=data.device)
    block = rans.read_known(Bytes(data[at:]), Varying(data.numel() - at), alphabet, None, 1, classes)
    return indices, _read_gaps(*given, front, block, classes, numel, -1, indices)[:3]


def sparse_decode(
    data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The whole message, for which the host does not wait; whether it was one, int64, 0-d."""
    behind, nbytes = (2 if narrow else 4) * count, data.numel() - len(front)
    if nbytes < behind or _too_short(nbytes, count, numel, divisor):
        return torch.zeros((), dtype=torch.int64, device=out.device)
    given = Bytes(data.contiguous()), Varying(data.numel())
    return _sparse_decode(*given, front, count, numel, divisor, narrow, out, _weight(weight))[1]


def _weight(weight: float | None) -> VaryingFloat | None:
    return None if weight is None else VaryingFloat(float(weight))


@replay.operation
def _sparse_decode(
    data: Bytes,
    size: Varying,
    front: bytes,
    count: int,
    numel: int,
    divisor: int,
    narrow: bool,
    out: Tensor,
    weight: VaryingFloat | None,
) -> tuple[Tensor, Tensor]:
    indices = between(count, index_dtype(numel), out.device)
    head = _read_planes(data, size, front, count, numel, divisor, (2 if narrow else 4) * count, indices)
    return _put(data, size, indices, narrow, out, weight, head)


def put(values: Tensor, indices: Tensor, out: Tensor, weight: float | None, head: Tensor) -> Tensor:
    """Decoded values to ``out``, or ``weight`` times as much added there, if all is right by ``head``; whether it is."""
    return _put(Bytes(values), Varying(4 * values.numel()), indices, False, out, _weight(weight), head)[1]


def between(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So many numbers that kernels hand on."""
    return scratch.empty(device, dtype.itemsize * count)[0].view(dtype)[:count]


def sparse_decode_gaps(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The same for a message with entropy-coded gaps."""
    if data.numel() < len(front) + (2 if narrow else 4) * count:
        return torch.zeros((), dtype=torch.int64, device=out.device)
    data = data.contiguous()
    given = Bytes(data), Varying(data.numel()), Varying(data.numel() - len(front))
    return _sparse_decode_gaps(*given, front, count, numel, alphabet, narrow, out, _weight(weight))[1]


@replay.operation
def _sparse_decode_gaps(
    data: Bytes,
    size: Varying,
    behind_front: Varying,
    front: bytes,
    count: int,
    numel: int,
    alphabet: int,
    narrow: bool,
    out: Tensor,
    weight: VaryingFloat | None,
) -> tuple[Tensor, Tensor]:
    indices = between(count, index_dtype(numel), out.device)
    classes = between(count, torch.uint8, out.device)
    block = rans.read_known(Bytes(data.data[len(front) :]), behind_front, alphabet, None, 1, classes)
    head = _read_gaps(data, size, front, block, classes, numel, (2 if narrow else 4) * count, indices)
    return _put(data, size, indices, narrow, out, weight, head)


def _put(
    data: Bytes, size: Varying, indices: Tensor, narrow: bool, out: Tensor, weight: VaryingFloat | None, head: Tensor
) -> tuple[Tensor, Tensor]:
    """The values at the end of a message to ``out``, if it is right: what is known of it, and whether it is."""
    count = indices.numel()
    if weight is None:
        scratch.zero(out, 4 * out.numel())
    adds = (0.0, 0) if weight is None else (weight, 1)
    given = (data, size, int(narrow), count, indices, _wide(indices))
    launch(SOURCE, "sparse_read", _blocks(count), THREADS, *given, *adds, out, head)
    return head, head[WHOLE]
