"""Index sets by CUDA kernels, and sparse messages that have them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda import rans, replay, scratch
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, VaryingFloat, launch, placed
from tersegrad.kernels.reference.index import golomb_nbytes, random_divisor
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
THREADS, CODED = 256, 2
# How many classes of gaps a byte can tell.
MOST_CLASSES = 256
# Indices that a block has.
SPAN = 4 * THREADS
# Coordinates that a block clears and fills at once, and blocks that do this, at most.
LAID, LAYING = 8192, 2112


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
    device, most, spans = indices.device, indices.numel(), -(-indices.numel() // SPAN)
    head, _ = scratch.kept(device, 8 * (CLASSES + 128))
    if not divisor and 2 * most <= numel:
        room = min(room, golomb_nbytes(most, numel))
    number = room // 4 + 2
    memory, (words, sums) = scratch.empty(device, 4 * number, 16 * (spans + 1))
    given = (indices, _wide(indices), indices.numel(), count, numel, divisor)
    looked = (indices, 0) if values is None else (values, 2 if _kind(values, False) == CODED else 1)
    launch(SOURCE, "golomb_survey", spans, THREADS, *given, *looked, sums, words, number, head)
    scanned = placed(SOURCE, sums, 2, spans)
    launch(SOURCE, "golomb_write", spans, THREADS, *given, sums, scanned, room, words, head)
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
    scanned = placed(GAPS, sums, 1, spans)
    launch(GAPS, "gap_rests_write", spans, THREADS, *given, sums, scanned, room, words, head)
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


class Begun(NamedTuple):
    """A message, and what it begins with: a set of a ``number`` of coordinates. Launches depend on the ``room`` for them alone."""

    data: Bytes
    size: Varying
    front: Varying
    # How many bytes those are, and how many follow them.
    at: int
    rest: Varying
    number: Varying
    room: int
    numel: int
    divisor: Varying
    # Bytes that the unary parts have at most, with so many coordinates and with all that there is room for.
    unary: Varying
    most: int
    # That of entropy-coded gaps, else 0.
    alphabet: int

    @property
    def spans(self) -> int:
        return -(-self.room // SPAN)


def begun(data: Tensor, front: bytes, count: int, numel: int, divisor: int, alphabet: int = 0) -> Begun:
    """What kernels are told of a message with a set of at least one coordinate."""
    # In steps of a sixteenth to an eighth: messages of about as many coordinates are read by the same launches.
    step = 1 << max(count.bit_length() - 4, 11)
    room, at, size = -(-count // step) * step, len(front), data.numel()
    # What a thread reads must be there, even where there are no bytes.
    held = data.contiguous() if size else torch.zeros(16, dtype=torch.uint8, device=data.device)
    numbers = (Varying(size), Varying(int.from_bytes(front, "little")), at, Varying(size - at), Varying(count), room, numel)
    most = _unary(room, numel, min(divisor, random_divisor(room, numel)))
    return Begun(Bytes(held), *numbers, Varying(divisor), Varying(_unary(count, numel, divisor)), most, alphabet)


def _unary(count: int, numel: int, divisor: int) -> int:
    """Bytes that the unary parts have at most: the quotients of indices within the vector add up to at most numel / divisor."""
    return (numel // divisor + count) // 8 + 1


def _too_short(nbytes: int, count: int, numel: int, divisor: int) -> bool:
    """Whether so many bytes cannot hold the set."""
    return count > 8 * min(nbytes, _unary(count, numel, divisor)) or count > numel


def holds_set(data: Tensor, front: bytes, count: int, numel: int, alphabet: int) -> bool:
    """Whether the message is long enough for its set."""
    rest = data.numel() - len(front)
    return rest > 0 and (alphabet > 0 or not _too_short(rest, count, numel, random_divisor(count, numel)))


def read_set(begun: Begun, each: int, indices: Tensor) -> Tensor:
    """The set into ``indices``; what is known of it, places as in index.cuh. For each, so many bytes must follow it; -1 for any number."""
    if not begun.alphabet:
        return _read_planes(begun, each, indices)
    classes = between(begun.room, torch.uint8, indices.device)
    behind = Bytes(begun.data.data[begun.at :])
    block = rans.read_known(behind, begun.rest, begun.alphabet, None, 1, classes, begun.number)
    return _read_gaps(begun, block, classes, each, indices)


def _read_gaps(begun: Begun, block: Tensor | None, classes: Tensor, each: int, out: Tensor) -> Tensor:
    """The set whose gaps have these classes. Open bits follow what begins the message and the rANS ``block``, if there is one."""
    spans, head = begun.spans, scratch.kept(out.device, 8 * CLASSES)[0]
    memory, (widths, steps, sums) = scratch.empty(out.device, 8 * (spans + 1), 8 * begun.room, 8 * (spans + 1))
    launch(GAPS, "gap_spans", spans, THREADS, begun.data, begun.at, begun.front, classes, begun.number, widths, head)
    scanned = placed(GAPS, widths, 1, spans)
    given = (begun.data, begun.at, begun.size, 0 if block is None else block, classes, begun.number, begun.numel)
    launch(GAPS, "gap_steps", spans, THREADS, *given, widths, scanned, steps, sums, head)
    scanned = placed(GAPS, sums, 1, spans)
    shape = (begun.size, begun.number, begun.numel)
    launch(GAPS, "gap_indices", spans, THREADS, *shape, steps, sums, scanned, each, _wide(out), out, head)
    # What the kernels use is kept until here: what is made later on the same stream may lie in its place.
    del memory
    return head


def gap_rests_decode(data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int | Tensor]:
    count, classes = classes.numel(), classes.contiguous()
    out = torch.empty(count, dtype=index_dtype(numel), device=data.device)
    if not count:
        return out, torch.zeros((), dtype=torch.int64)
    status, _, length = host.read(_read_gaps(begun(data, b"", count, numel, 1), None, classes, -1, out)[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage(
            "not an index set: its gaps end early, its padding is not zero, or an index lies outside the vector"
        )
    return out, torch.tensor(length)


def _read_planes(begun: Begun, each: int, out: Tensor) -> Tensor:
    """The set from its planes."""
    spans, room, parts = begun.spans, begun.room, _blocks(begun.most)
    head = torch.empty(CLASSES, dtype=torch.int64, device=out.device)
    memory, (counts, ones, rests, longs, sums) = scratch.empty(
        out.device, 8 * (parts + 1), 8 * room, 8 * room, 8 * (spans + 1), 8 * (spans + 1)
    )
    given, count, divisor = (begun.data, begun.size, begun.at), begun.number, begun.divisor
    launch(SOURCE, "ones_count", parts, THREADS, *given, begun.front, begun.unary, counts, head)
    scanned = placed(SOURCE, counts, 1, parts)
    launch(SOURCE, "ones_place", parts, THREADS, *given, begun.unary, counts, scanned, count, ones, head)
    launch(SOURCE, "golomb_longs", spans, THREADS, *given, count, begun.numel, divisor, ones, longs, head)
    scanned = placed(SOURCE, longs, 1, spans)
    launch(SOURCE, "golomb_rests", spans, THREADS, *given, count, divisor, longs, scanned, rests, sums, head)
    scanned = placed(SOURCE, sums, 1, spans)
    shape = (begun.size, count, begun.numel, divisor)
    launch(SOURCE, "golomb_indices", spans, THREADS, *shape, ones, rests, sums, scanned, each, _wide(out), out, head)
    del memory
    return head


def golomb_decode(data: Tensor, numel: int, divisor: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with indices from the start of ``data``; the bytes used, int64, 0-d."""
    count = out.numel()
    if count == 0:
        return torch.zeros((), dtype=torch.int64)
    status = length = CORRUPT
    if not _too_short(data.numel(), count, numel, divisor):
        status, _, length = host.read(_read_planes(begun(data, b"", count, numel, divisor), -1, out)[:3]).tolist()
    if status == CORRUPT:
        raise CorruptMessage("not an index set: it ends early, its padding is not zero, or an index lies outside the vector")
    return torch.tensor(length)


def sparse_decode(
    data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The whole message, for which the host does not wait; whether it was one, int64, 0-d."""
    behind, nbytes = (2 if narrow else 4) * count, data.numel() - len(front)
    if nbytes < behind or _too_short(nbytes, count, numel, divisor):
        return refused(out)
    return _sparse_decode(begun(data, front, count, numel, divisor), narrow, out, weight_of(weight))[1]


def sparse_decode_gaps(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, narrow: bool, out: Tensor, weight: float | None
) -> Tensor:
    """The same for a message with entropy-coded gaps."""
    if data.numel() < len(front) + (2 if narrow else 4) * count:
        return refused(out)
    return _sparse_decode(begun(data, front, count, numel, 1, alphabet), narrow, out, weight_of(weight))[1]


@replay.operation
def _sparse_decode(begun: Begun, narrow: bool, out: Tensor, weight: VaryingFloat | None) -> tuple[Tensor, Tensor]:
    indices = set_of(begun, out)
    head = read_set(begun, 2 if narrow else 4, indices)
    return put(begun.data, begun.size, narrow, begun, indices, out, weight, head)


def refused(out: Tensor) -> Tensor:
    """That it is no such message."""
    return torch.zeros((), dtype=torch.int64, device=out.device)


def weight_of(weight: float | None) -> VaryingFloat | None:
    return None if weight is None else VaryingFloat(float(weight))


def between(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So many numbers that kernels hand on."""
    return scratch.empty(device, dtype.itemsize * count)[0].view(dtype)[:count]


def set_of(begun: Begun, out: Tensor) -> Tensor:
    """Room for the set of a message that is decoded into ``out``."""
    return between(begun.room, index_dtype(begun.numel), out.device)


def put(
    values: Argument,
    end: Argument,
    narrow: bool,
    begun: Begun,
    indices: Tensor,
    out: Tensor,
    weight: VaryingFloat | None,
    head: Tensor,
) -> tuple[Tensor, Tensor]:
    """Values up to byte ``end`` (-1: from the first byte on) to ``out``, if all is right: what is known of it, and whether it is."""
    given = (values, end, int(narrow), begun.number, indices, _wide(indices))
    if weight is None:
        launch(SOURCE, "sparse_lay", min(-(-begun.numel // LAID), LAYING), THREADS, *given, begun.numel, out, head)
    else:
        launch(SOURCE, "sparse_add", _blocks(begun.room), THREADS, *given, weight, out, head)
    return head, head[WHOLE]
