"""Values of sparse messages as the bytes behind an index set, by CUDA kernels. The host never waits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad.kernels.cuda import index, rans, replay, scratch
from tersegrad.kernels.cuda.index import Begun
from tersegrad.kernels.cuda.loader import Argument, Bytes, VaryingFloat, launch, placed
from tersegrad.kernels.reference.index import random_divisor
from tersegrad.kernels.reference.values import CODES

__all__ = ["exp4_decode", "exp4_encode", "mean_signs_decode", "mean_signs_encode", "signs_decode", "signs_encode"]

SOURCE = "values.cu"
THREADS = index.THREADS
# As in values.cu.
CHUNK = 4096
# How many numbers tell what is known of values.
TOLD = 4


@functools.lru_cache(maxsize=256)
def _ends(layout: bytes, device: torch.device) -> Tensor:
    """Where the tensors of a layout end."""
    sizes = torch.frombuffer(bytearray(layout or bytes(32)), dtype=torch.int64).view(-1, 4)[:, 0]
    ends = sizes.cumsum(0).to(device)
    if device.type == "cuda":
        # Any stream may use it from now on.
        torch.cuda.current_stream(device).synchronize()
    return ends


def _ends_of(layout: Tensor, device: torch.device) -> Tensor:
    return _ends(layout.contiguous().numpy().tobytes(), device)


def exp4_encode(indices: Tensor, values: Tensor, count: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _exp4_encode(indices.contiguous(), values.contiguous(), count, _ends_of(layout, indices.device))


@replay.operation
def _exp4_encode(indices: Tensor, values: Tensor, count: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    room, device, number = indices.numel(), indices.device, ends.numel()
    spans = -(-room // index.SPAN)
    kept, decoded = torch.empty_like(indices), torch.empty_like(values)
    data = torch.empty(number + -(-room // 2), dtype=torch.uint8, device=device)
    told, _ = scratch.kept(device, 8 * TOLD)
    memory, (sums,) = scratch.empty(device, 8 * (spans + 1))
    cleared, (tops,) = scratch.zeros(device, 4 * number)
    codes, coded = index.between(room, torch.uint8, device), index.between(1 + -(-room // 2), torch.uint8, device)
    given = (indices, int(indices.dtype == torch.int64), values, room, count, ends, number, tops)
    launch(SOURCE, "exp4_largest", spans, THREADS, *given)
    launch(SOURCE, "exp4_survey", spans, THREADS, *given, sums)
    scanned = placed(SOURCE, sums, 1, spans)
    launch(SOURCE, "exp4_exponents", 1, THREADS, tops, number, data, told)
    launch(SOURCE, "exp4_place", spans, THREADS, *given, sums, scanned, kept, codes, decoded, told)
    block = rans.write_block(codes, 16, None, 1, True, CODES, coded, told)
    launch(SOURCE, "exp4_close", min(-(-room // 512), 1024), THREADS, codes, block, coded, data, told)
    # What the kernels use is kept until here.
    del memory, cleared
    return kept, decoded, data, told


def signs_encode(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return _signs_encode(values.contiguous(), count)


@replay.operation
def _signs_encode(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    room = values.numel()
    data, (told, _) = torch.empty(-(-room // 8), dtype=torch.uint8, device=values.device), scratch.kept(values.device, 8 * TOLD)
    launch(SOURCE, "signs_write", -(-room // (8 * THREADS)), THREADS, values, room, count, data, told)
    return data, told


def mean_signs_encode(indices: Tensor, values: Tensor, count: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _mean_signs_encode(indices.contiguous(), values.contiguous(), count, _ends_of(layout, indices.device))


@replay.operation
def _mean_signs_encode(indices: Tensor, values: Tensor, count: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    room, device, number, wide = indices.numel(), indices.device, ends.numel(), int(indices.dtype == torch.int64)
    decoded = torch.empty_like(values)
    data = torch.empty(2 * number + -(-room // 8), dtype=torch.uint8, device=device)
    told, _ = scratch.kept(device, 8 * TOLD)
    most = -(-room // CHUNK) + number
    places = (8 * (number + 1), 8 * (number + 1), 4 * number, 8 * most)
    memory, (firsts, chunks, ranks, sums) = scratch.empty(device, *places)
    launch(SOURCE, "means_begin", 1, THREADS, indices, wide, room, count, ends, number, firsts, chunks, ranks, told)
    launch(SOURCE, "means_sum", -(-32 * most // THREADS), THREADS, values, firsts, chunks, number, sums)
    launch(SOURCE, "means_scale", number, 32, firsts, chunks, ranks, sums, data)
    launch(SOURCE, "signs_write", -(-room // (8 * THREADS)), THREADS, values, room, count, data, told)
    given = (indices, wide, values, room, count, ends, number, ranks, data)
    launch(SOURCE, "means_decoded", -(-room // index.SPAN), THREADS, *given, decoded)
    # What the kernels use is kept until here.
    del memory
    return data, told, decoded


def _ranks(begun: Begun, indices: Tensor, found: Tensor, ends: Tensor) -> tuple[Tensor, int]:
    """What is known of a message, in memory to be kept; in it, at this address, how many pieces with values precede each."""
    wide, number = int(indices.dtype == torch.int64), ends.numel()
    head, (_, ranks) = scratch.kept(indices.device, 8 * index.CLASSES, 4 * number)
    launch(SOURCE, "values_pieces", begun.spans, THREADS, indices, wide, begun.number, found, ends, number, ranks)
    launch(SOURCE, "values_ranks", 1, THREADS, ranks, number, head)
    return head, ranks


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
    if not index.holds_set(data, front, count, numel, alphabet):
        return index.refused(out)
    begun = _begun(data, front, count, numel, alphabet)
    return _exp4_decode(begun, _ends_of(layout, out.device), packed, out, index.weight_of(weight))[1]


def _begun(data: Tensor, front: bytes, count: int, numel: int, alphabet: int) -> Begun:
    return index.begun(data, front, count, numel, 1 if alphabet else random_divisor(count, numel), alphabet)


@replay.operation
def _exp4_decode(begun: Begun, ends: Tensor, packed: bool, out: Tensor, weight: VaryingFloat | None) -> tuple[Tensor, Tensor]:
    device, count, room, number = out.device, begun.number, begun.room, ends.numel()
    indices = index.set_of(begun, out)
    wide, found = int(indices.dtype == torch.int64), index.read_set(begun, -1, indices)
    head, ranks = _ranks(begun, indices, found, ends)
    # Codes take four bits at most: an entropy code is sent where it is shorter.
    most = room // 2 + 1
    behind = codes = index.between(most, torch.uint8, device)
    values = index.between(room, torch.float32, device)
    message = (begun.data, begun.size, found, count, int(packed))
    launch(SOURCE, "exp4_fetch", min(-(-most // 1024), 1024), THREADS, *message, behind, most, head)
    block: Tensor | None = None
    if not packed:
        codes = index.between(room, torch.uint8, device)
        block = rans.read_known(Bytes(behind), most, 16, None, 1, codes, count)
    given = (begun.data, found, 0 if block is None else block, codes, indices, wide, count, ends, number, ranks)
    launch(SOURCE, "exp4_values", begun.spans, THREADS, *given, values, head)
    return index.put(values, -1, False, begun, indices, out, weight, head)


def signs_decode(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, tau: float, out: Tensor, weight: float | None
) -> Tensor:
    if not index.holds_set(data, front, count, numel, alphabet):
        return index.refused(out)
    begun = _begun(data, front, count, numel, alphabet)
    return _signs_decode(begun, None, float(tau), out, index.weight_of(weight))[1]


def mean_signs_decode(
    data: Tensor, front: bytes, count: int, numel: int, alphabet: int, layout: Tensor, out: Tensor, weight: float | None
) -> Tensor:
    if not index.holds_set(data, front, count, numel, alphabet):
        return index.refused(out)
    begun = _begun(data, front, count, numel, alphabet)
    return _signs_decode(begun, _ends_of(layout, out.device), 0.0, out, index.weight_of(weight))[1]


@replay.operation
def _signs_decode(
    begun: Begun, ends: Tensor | None, tau: float, out: Tensor, weight: VaryingFloat | None
) -> tuple[Tensor, Tensor]:
    """Plus or minus ``tau``, or the mean magnitudes of pieces that end there."""
    indices = index.set_of(begun, out)
    wide, found = int(indices.dtype == torch.int64), index.read_set(begun, -1, indices)
    scales: tuple[Argument, ...] = (0, 0, 0)
    if ends is None:
        head, _ = scratch.kept(out.device, 8 * index.CLASSES)
    else:
        head, ranks = _ranks(begun, indices, found, ends)
        scales = (ends, ends.numel(), ranks)
    values = index.between(begun.room, torch.float32, out.device)
    given = (begun.data, begun.size, found, indices, wide, begun.number, *scales, tau)
    launch(SOURCE, "signs_values", -(-begun.room // (8 * THREADS)), THREADS, *given, values, head)
    return index.put(values, -1, False, begun, indices, out, weight, head)
