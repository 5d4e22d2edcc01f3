"""Sparse Dithering by CUDA kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import host, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.cuda import classes, replay, scratch
from tersegrad.kernels.cuda.loader import Bytes, Double, Varying, VaryingFloat, aside, join, launch, room
from tersegrad.kernels.reference.classes import cut
from tersegrad.kernels.reference.dither import AUTO, PAPER, SCALE_BLOCK, SHORT, USUAL_CHUNK
from tersegrad.kernels.reference.dither import _decode_segment as decode_segment
from tersegrad.kernels.reference.dither import _pieces_of as pieces_of
from tersegrad.kernels.reference.dither import _put as put
from tersegrad.kernels.reference.rans import LONGEST, SEGMENT, SHORTEST, pieces
from tersegrad.kernels.reference.rans_tables import TOTAL
from tersegrad.kernels.reference.rounding import CHUNK

__all__ = ["dither_decode", "dither_encode", "dither_sample"]

SAMPLE = "dither_sample.cu"
DECODE, ENCODE, DESCRIBE = "dither_decode.cu", "dither_encode.cu", "dither_segments.cu"
# As in dither.cuh.
PLACES, CHUNKS, ESCAPES = 12, 32, 8192
LENGTH, WRONG, NORM, ERROR, RESULTS = range(5)
PLANE_WORDS = ESCAPES * 53 // 32 + 8
ONLY = 9
FINE, CORRUPT, MANY_ESCAPES = 0, 1, 4
THREADS = 256
SHARE, WRITERS = 16, 8
# Of a segment, as most messages have them.
USUAL_CHUNKS = 4
# Of the block that dither_levels works on, parts that lie in shared memory if that has room; and what it needs there besides.
KEPT, LEVELS_SHARED = 4, 10 << 10


def on_cpu() -> Any:
    """The fastest operations for CPU tensors."""
    return native if native.available() else reference


def _decode_on_host(data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None) -> Tensor:
    here = host.empty(out.numel(), torch.float32, out.device) if weight is None else host.read(out)
    on_cpu().dither_decode(host.read(data), here, weight, layout)
    return out if here is out else out.copy_(here)


def _encode_on_host(
    total: Tensor,
    nu: float,
    step: float | Tensor,
    coder: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    left: Tensor | None,
    layout: Tensor | None,
    rdo: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    n, device = total.numel(), out.device
    room = host.empty(reference.dither_max_bytes(n), torch.uint8, device)
    rest = None if left is None else host.empty(n, torch.float32, device)
    length, norm, error = on_cpu().dither_encode(
        host.read(total), nu, float(step), coder, chunk, ctx, room, rest, None, layout, rdo
    )
    out[: int(length)] = room[: int(length)].to(device)
    if left is not None and rest is not None:
        left.copy_(rest)
    return length, norm, error


def dither_sample(x: Tensor, step: float, stride: int, out: Tensor, carry: Tensor | None = None) -> None:
    """Squared error and squared norm of a sample."""
    n, device = x.numel(), x.device
    if n == 0:
        out.zero_()
        return
    groups = groups_of(n, stride)
    errors, norms = torch.empty(2, groups, dtype=torch.float64, device=device)
    given = (x.contiguous(), x if carry is None else carry.contiguous(), int(carry is not None))
    launch(SAMPLE, "dither_sample", groups, 512, *given, n, float(step), stride, errors, norms)
    launch(SAMPLE, "dither_sample_sums", 1, 1024, errors, norms, groups, out)


def groups_of(n: int, stride: int) -> int:
    """Of the chunks of a sample, as in dither_sample.cuh."""
    return -(-n // SCALE_BLOCK) if stride <= SCALE_BLOCK // CHUNK else -(-n // (CHUNK * stride))


def dither_decode(data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None = None) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``; a message that is refused adds nothing.

    Short messages, which are read in order, are decoded by the CPU's kernels over a copy; segments with very many escapes by the reference.
    """
    count, device, data = out.numel(), out.device, data.contiguous()
    if count <= SHORT or data.numel() < 4:
        return _decode_on_host(data, out, weight, layout)
    segments = len(pieces(count, SEGMENT))
    regions = classes.regions_of(layout, count, device)
    place = out if weight is None and out.is_contiguous() else torch.empty(count, dtype=torch.float32, device=device)
    given = (regions, Bytes(data), Varying(data.numel()), place)
    wrong, left_over = trust.numbers(_decode(*given))
    if wrong == CORRUPT:
        raise CorruptMessage("not a message of dithered levels: a segment, a table or an escape is malformed")
    if wrong != FINE:
        # Another form: nothing was written.
        return _decode_on_host(data, out, weight, layout)
    if left_over:
        # Rare enough to do it once more, keeping what is known of segments.
        known, begins, _ = _decoded(*given)
        limits, marks = begins.tolist(), known.view(segments, PLACES)[:, ONLY].tolist()
        lengths, listed = pieces(count, SEGMENT), pieces_of(layout, count, [[count, count, 1, 0]])
        for s in (s for s in range(segments) if marks[s] == -1):
            part = bytes(data[limits[s] : limits[s + 1]].cpu().numpy().tobytes())
            begin, end = s * SEGMENT, s * SEGMENT + lengths[s]
            place[begin:end] = decode_segment(part, lengths[s], device, cut(listed, begin, end))
    return out if place is out else put(out, place, weight)


@replay.operation
def _decode(regions: classes.Regions, data: Bytes, size: Varying, place: Tensor) -> Tensor:
    """Decode into ``place``: what is wrong, and whether something is left over."""
    return _decoded(regions, data, size, place)[2]


def _decoded(regions: classes.Regions, data: Bytes, size: Varying, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and before it what is known of segments, and where they begin."""
    count, device = place.numel(), place.device
    segments = len(pieces(count, SEGMENT))
    state, _ = scratch.kept(device, 16)
    listed = (8 * segments * PLACES, 8 * (segments + 1))
    chunks = 8 * segments * CHUNKS
    memory, (known, begins, cells, offsets, words, marks, places) = scratch.empty(
        device, *listed, 4 * segments * TOTAL, chunks, chunks, count // 8 + 4, 4 * segments * ESCAPES
    )
    launch(
        DECODE, "dither_open", segments, THREADS,
        data, size, count, begins, known, cells, offsets, words, state,
    )  # fmt: skip
    with aside():
        share = max(USUAL_CHUNKS, min(CHUNKS, 1 << max(scratch.BLOCKS // segments, 1).bit_length() - 1))
        launch(
            DECODE, "dither_chunks", segments * share + CHUNKS - share, 32,
            data, count, share, known, cells, offsets, words, marks, place, state,
        )  # fmt: skip
    found = classes.read(regions, data, count, known, offsets, words, state)
    with aside():
        launch(
            DECODE, "dither_plain", segments * SHARE, THREADS,
            data, count, known, SHARE, found.contexts, found.only, marks, place, state,
        )  # fmt: skip
    classes.decode_chunks(found, data, count, known, offsets, words, marks, place, state)
    join()
    launch(DECODE, "dither_escapes", segments, 1024, data, count, known, marks, places, place, state)
    return memory[: segments * PLACES], memory[segments * PLACES + segments * PLACES % 2 :][: segments + 1], state


# Whether levels are drawn, and from what, as kernels take it.
Draws = tuple[int, int | Varying, int | Varying, int | Varying, int | Varying]
# A step, or where one lies, as kernels take it.
Step = tuple[float | VaryingFloat, Tensor | int]


def draws_of(ctx: Context | None) -> Draws:
    """The numbers of a context: those of another step are others."""
    if ctx is None:
        return 0, 0, 0, 0, 0
    sender, seed = ctx.buffer << 16 | ctx.sender, ctx.seed
    return 1, Varying(ctx.step), Varying(sender), Varying(seed & 0xFFFFFFFF), Varying(seed >> 32)


def step_of(step: float | Tensor) -> Step:
    """A number, or where one lies."""
    return (0.0, step) if isinstance(step, Tensor) else (VaryingFloat(float(step)), 0)


@dataclasses.dataclass(frozen=True)
class _Described:
    """The levels of a vector and what its segments say of them, on the device; addresses in ``memory``.

    Tables, codes and escapes are written aside.
    """

    memory: Tensor
    result: Tensor
    segments: int
    regions: classes.Regions
    draws: Draws
    summed: list[int]
    places: list[int]


def _describe(
    total: Tensor,
    nu: float,
    step: Step,
    chunk: int,
    draws: Draws,
    regions: classes.Regions,
    classed: bool,
) -> _Described:
    n, device = total.numel(), total.device
    segments, blocks = len(pieces(n, SEGMENT)), -(-n // SCALE_BLOCK)
    with aside():
        result, (_, *summed) = scratch.kept(device, 8 * RESULTS, *(classes.summed(regions, segments) if classed else ()))
    # Levels are read sixteen at a time.
    memory, places = scratch.empty(
        device, n + 15, 2 * n, 4 * blocks, 4 * blocks, 8 * blocks, 8 * blocks, 24 * blocks, 16 * segments,
        8 * segments * PLACES, 2 * segments * 256, segments * 8192, 4 * segments * 256, 4 * segments * ESCAPES, 4 * segments * PLANE_WORDS,
        8 * segments * CHUNKS, 8 * segments * CHUNKS, 4 * segments * CHUNKS * 64,
    )  # fmt: skip
    levels, _, steps, scales, norms, errors, counts, _, known, q, tables, codes, escapes, planes, *_ = places
    processors, shared = room(device)
    held = min(KEPT, (shared - LEVELS_SHARED) // (4 * SCALE_BLOCK // KEPT))
    launch(
        ENCODE, "dither_levels", min(blocks, processors), 512,
        total, n, held * CHUNK // KEPT, Double(nu), *step, *draws, levels, steps, scales, norms, errors, counts,
        shared=held * 4 * SCALE_BLOCK // KEPT,
    )  # fmt: skip
    join()
    launch(DESCRIBE, "dither_windows", -(-segments // THREADS), THREADS, n, chunk or USUAL_CHUNK, norms, counts, known, result)
    with aside():
        launch(
            DESCRIBE, "dither_segments", 2 * segments, 512,
            total, n, levels, steps, counts, *draws, known, q, tables, codes, escapes, planes, result,
        )  # fmt: skip
    return _Described(memory, result, segments, regions, draws, summed, places)


def _chunks(n: int, exponent: int) -> int:
    """How many of 2^exponent symbols all segments of a vector have."""
    return sum(max(1, (size + (1 << exponent - 1)) >> exponent) for size in pieces(n, SEGMENT))


@replay.operation
def _encode(
    total: Tensor,
    nu: float,
    step: Step,
    chunk: int,
    draws: Draws,
    regions: classes.Regions,
    classed: bool,
    out: Tensor,
    rest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write a message, and what it leaves out into ``rest``: what is known of it, as in dither.cuh."""
    n, said = total.numel(), _describe(total, nu, step, chunk, draws, regions, classed)
    segments, result, places = said.segments, said.result, said.places
    levels, words, steps, scales, norms, errors, _, sums = places[:8]
    known, _, tables, codes, _, planes, numbers, offsets, states = places[8:]
    described, held = tables, said.memory
    if classed:
        described, held = classes.choose(regions, n, chunk, said.summed, levels, known, tables, words, numbers, states, result)
    else:
        join()
    exponent = chunk or USUAL_CHUNK
    launch(
        ENCODE, "dither_encode_chunks", _chunks(n, exponent), 32,
        n, exponent, levels, known, codes, words, numbers, states, result, spread=True,
    )  # fmt: skip
    join()
    launch(ENCODE, "dither_close", 1, THREADS, n, known, numbers, offsets, norms, errors, sums, result)
    launch(
        ENCODE, "dither_write", segments * WRITERS, THREADS,
        total, n, WRITERS, levels, scales, known, *regions.where, described, tables, words, numbers, states, offsets, planes, result, out,
    )  # fmt: skip
    if rest is not None:
        launch(ENCODE, "dither_left", -(-n // 4096), 256, total, n, *draws, levels, steps, scales, known, result, rest)
    # What the kernels use is kept until here.
    del said, held
    return result, result[:RESULTS]


def dither_encode(
    x: Tensor,
    nu: float,
    step: float | Tensor,
    coder: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> tuple[int | Tensor, float | Tensor, float | Tensor]:
    """Write a message into ``out``: length, ||x||^2 and the squared error, in the host's memory; and what it leaves out into ``left``.

    Short messages, the published code, ``rdo`` and segments with very many escapes are left to the CPU's kernels over a copy.
    """
    n, device = x.numel(), x.device
    total = x.contiguous() if carry is None else x + carry
    if n == 0 or coder == PAPER or rdo or (n <= SHORT and (coder == AUTO or layout is not None)):
        return _encode_on_host(total, nu, step, coder, chunk, ctx, out, left, layout, rdo)
    if chunk and not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    regions = classes.regions_of(layout, n, device)
    rest = left if left is None or left.is_contiguous() else torch.empty(n, dtype=torch.float32, device=device)
    found = host.read(_encode(total, nu, step_of(step), chunk, draws_of(ctx), regions, layout is not None, out, rest)[1])
    wrong = int(found[WRONG])
    if wrong == MANY_ESCAPES:
        return _encode_on_host(total, nu, step, coder, chunk, ctx, out, left, layout)
    if left is not None and rest is not None and rest is not left and wrong == FINE:
        left.copy_(rest)
    sums_found = found.view(torch.float64)
    return found[LENGTH], sums_found[NORM], sums_found[ERROR]
