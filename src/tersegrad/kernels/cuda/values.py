"""Values of sparse messages as the bytes behind an index set, by CUDA kernels. The host never waits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad.kernels.cuda import index, rans, replay, scratch
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, launch, scan
from tersegrad.kernels.reference.rans import USUAL

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
    scan(SOURCE, sums, 1, spans + 1)
    launch(SOURCE, "exp4_exponents", 1, THREADS, tops, number, data, told)
    launch(SOURCE, "exp4_place", spans, THREADS, *given, sums, kept, codes, decoded, told)
    block = rans.write_block(codes, 16, None, 1, True, USUAL, coded, told)
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


def _ranks(indices: Tensor, found: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """What is known of a message; where pieces end; memory to be kept, and the address of how many pieces with values precede each."""
    device, count, ends = indices.device, indices.numel(), _ends_of(layout, indices.device)
    head, _ = scratch.kept(device, 8 * index.CLASSES)
    cleared, (ranks,) = scratch.zeros(device, 4 * ends.numel())
    given = (indices, int(indices.dtype == torch.int64), count, found, ends, ends.numel(), ranks)
    launch(SOURCE, "values_pieces", -(-count // index.SPAN), THREADS, *given)
    launch(SOURCE, "values_ranks", 1, THREADS, ranks, ends.numel(), head)
    return head, ends, cleared, ranks


def exp4_decode(
    data: Tensor, found: Tensor, indices: Tensor, layout: Tensor, packed: bool, out: Tensor, weight: float | None
) -> Tensor:
    data, count, device = data.contiguous(), indices.numel(), out.device
    size, spans, wide = data.numel(), -(-count // index.SPAN), int(indices.dtype == torch.int64)
    head, ends, cleared, ranks = _ranks(indices, found, layout)
    number = ends.numel()
    behind = codes = torch.empty(size, dtype=torch.uint8, device=device)
    values = torch.empty(count, dtype=torch.float32, device=device)
    launch(SOURCE, "exp4_fetch", min(-(-size // 1024), 1024), THREADS, data, size, found, count, int(packed), behind, head)
    block: Tensor | None = None
    if not packed:
        codes = torch.empty(count, dtype=torch.uint8, device=device)
        block = rans.read_known(Bytes(behind), Varying(size), 16, None, 1, codes)
    given = (data, found, 0 if block is None else block, codes, indices, wide, count, ends, number, ranks)
    launch(SOURCE, "exp4_values", spans, THREADS, *given, values, head)
    del cleared
    return index.put(values, indices, out, weight, head)


def signs_decode(data: Tensor, found: Tensor, indices: Tensor, tau: float, out: Tensor, weight: float | None) -> Tensor:
    head, _ = scratch.kept(out.device, 8 * index.CLASSES)
    return _signs_decode(data, found, indices, (0, 0, 0, float(tau)), head, out, weight)


def mean_signs_decode(
    data: Tensor, found: Tensor, indices: Tensor, layout: Tensor, out: Tensor, weight: float | None
) -> Tensor:
    head, ends, cleared, ranks = _ranks(indices, found, layout)
    flag = _signs_decode(data, found, indices, (ends, ends.numel(), ranks, 0.0), head, out, weight)
    del cleared
    return flag


def _signs_decode(
    data: Tensor, found: Tensor, indices: Tensor, scales: tuple[Argument, ...], head: Tensor, out: Tensor, weight: float | None
) -> Tensor:
    data, count = data.contiguous(), indices.numel()
    values = torch.empty(count, dtype=torch.float32, device=out.device)
    given = (data, data.numel(), found, indices, int(indices.dtype == torch.int64), count, *scales)
    launch(SOURCE, "signs_values", -(-count // (8 * THREADS)), THREADS, *given, values, head)
    return index.put(values, indices, out, weight, head)
