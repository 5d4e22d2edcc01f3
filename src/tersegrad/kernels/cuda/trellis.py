"""Trellis codes by CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context
from tersegrad.kernels import reference
from tersegrad.kernels.cuda import classes, replay, scratch
from tersegrad.kernels.cuda.dither import (
    CHUNKS,
    ERROR,
    ESCAPES,
    LENGTH,
    NORM,
    PLANE_WORDS,
    RESULTS,
    SHARE,
    WRONG,
    Draws,
    Step,
    draws_of,
    on_cpu,
    step_of,
)
from tersegrad.kernels.cuda.loader import Bytes, Varying, aside, join, launch
from tersegrad.kernels.cuda.trellis_choice import CLASSED, ENCODE, PLACES, TABLES, THREADS, Chosen
from tersegrad.kernels.reference.classes import CLASSES
from tersegrad.kernels.reference.dither import USUAL_CHUNK
from tersegrad.kernels.reference.dither import _put as put
from tersegrad.kernels.reference.rans import LONGEST, SEGMENT, SHORTEST, pieces
from tersegrad.kernels.reference.rans_tables import TOTAL
from tersegrad.kernels.reference.trellis_code import GENERATORS

__all__ = ["trellis_decode", "trellis_encode", "trellis_error"]

OPEN, DECODE, DITHERED = "trellis_open.cu", "trellis_decode.cu", "trellis_dithered.cu"
# As in trellis.cuh and trellis_encode.cu.
MANY_ESCAPES, TABLES_ROOM = 4, 1 << 15
FINE, CORRUPT = 0, 1
# The most runs of a segment: those of 2^14 coordinates, of one and a half usual ones.
RUNS = 24
# From here on all 64 lanes are in use. Shorter vectors are the CPU's.
SHORTEST_VECTOR = 1 << 14
# From so many segments on, warps that decode chunks of one share its tables.
MANY = 128
# As in trellis_classes.cu and rans_tables.cuh.
CLASS_TABLES, TABLE_BYTES = 2 * CLASSES, 448


def _encode_on_host(
    x: Tensor,
    step: float | Tensor,
    states: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    layout: Tensor | None,
    left: Tensor | None,
    rdo: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rest = None if left is None else host.empty(x.numel(), torch.float32, out.device)
    room = host.empty(reference.trellis_max_bytes(x.numel()), torch.uint8, out.device)
    length, norm, error = on_cpu().trellis_encode(host.read(x), float(step), states, chunk, ctx, room, layout, rest, rdo)
    out[: int(length)] = room[: int(length)].to(out.device)
    if left is not None and rest is not None:
        left.copy_(rest)
    return length, norm, error


def _chunk_blocks(n: int, exponent: int, together: int) -> int:
    """Blocks for the chunks of all segments, as ``chunks_of`` of trellis.cuh has them."""
    lengths = pieces(n, SEGMENT)
    each, last = (-(-len(pieces(length, 1 << exponent)) // together) for length in (SEGMENT, lengths[-1]))
    return each * (len(lengths) - 1) + last


def trellis_error(x: Tensor, step: float, states: int, layout: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared error without dither and squared norm. Those of short vectors are found on the host."""
    if x.numel() < SHORTEST_VECTOR:
        found: tuple[Tensor, Tensor] = on_cpu().trellis_error(host.read(x), step, states, layout)
        return found
    regions = classes.regions_of(layout, x.numel(), x.device)
    sums = _errors(x.contiguous(), step_of(step), states, regions, layout is not None)[:RESULTS].view(torch.float64)
    return sums[ERROR], sums[NORM]


@replay.operation
def _errors(x: Tensor, step: Step, states: int, regions: classes.Regions, classed: bool) -> Tensor:
    chosen = Chosen(x, step, states, 0, draws_of(None), regions, classed)
    chosen.find_errors()
    launch(ENCODE, "trellis_totals", 1, THREADS, chosen.n, chosen.sums, chosen.result)
    return chosen.result


@replay.operation
def _encode(
    x: Tensor,
    step: Step,
    states: int,
    chunk: int,
    draws: Draws,
    regions: classes.Regions,
    classed: bool,
    out: Tensor,
    rest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write a message, and what it leaves out into ``rest``: what is known of it, as in dither.cuh."""
    n, device, drawn, exponent = x.numel(), x.device, draws[0], chunk or USUAL_CHUNK
    chosen = Chosen(x, step, states, chunk, draws, regions, classed)
    segments, result, known = chosen.segments, chosen.result, chosen.described
    memory, (words, tables, codes, escapes, planes, numbers, offsets, coded) = scratch.empty(
        device, 2 * n, segments * TABLES_ROOM, 4 * segments * TABLES * 128, 4 * segments * ESCAPES, 4 * segments * PLANE_WORDS,
        8 * segments * CHUNKS, 8 * segments * CHUNKS, 4 * segments * CHUNKS * 64,
    )  # fmt: skip
    told, held = tables, memory

    def describe(again: bool) -> None:
        launch(
            ENCODE, "trellis_segments", segments if again else 2 * segments, 512,
            *chosen.given, int(again), chosen.bytes, chosen.contexts, chosen.known, chosen.classes, chosen.info, chosen.scalars, known,
            tables, codes, escapes, planes,
        )  # fmt: skip

    with aside():
        chosen.measure()
    with aside():
        with aside():
            describe(False)
        if classed:
            chosen.search()
            told = chosen.found.described
            most = CLASSES * TABLES if drawn else CLASS_TABLES
            held, (bits, class_codes) = scratch.empty(device, segments * most * TABLE_BYTES, 4 * segments * most * 128)
        join()
        if classed and drawn:
            pairs = (chosen.bytes, chosen.contexts, chosen.found.classes, chosen.info)
            counts, tops = chosen.summed[-1], chosen.summed[1]
            launch(DITHERED, "trellis_dithered_names", segments, 32, tops, chosen.info)
            launch(
                DITHERED, "trellis_dithered_count", segments * SHARE, THREADS,
                n, SHARE, *pairs, chosen.scalars, known, counts,
            )  # fmt: skip
            launch(
                DITHERED, "trellis_dithered_decide", segments, 512,
                n, chunk, counts, tops, chosen.scalars, known, bits, tables, class_codes,
            )  # fmt: skip
            with aside():
                launch(
                    DITHERED, "trellis_dithered_class_chunks", _chunk_blocks(n, exponent, 4), 128,
                    n, exponent, *pairs, known, class_codes, words, numbers, coded,
                )  # fmt: skip
        elif classed:
            chosen.keep_still()
            with aside():
                chosen.choose_anew()
                describe(True)
                by = (chosen.bytes, chosen.classes, chosen.info)
                launch(CLASSED, "trellis_class_tables", segments, 512, n, *by, known, bits, tables, class_codes)
                launch(
                    CLASSED, "trellis_class_chunks", _chunk_blocks(n, exponent, 4), 128,
                    n, exponent, *by, known, class_codes, words, numbers, coded,
                )  # fmt: skip
        launch(
            ENCODE, "trellis_encode_chunks", _chunk_blocks(n, exponent, 1), 32,
            n, exponent, drawn, chosen.bytes, chosen.contexts, known, codes, words, numbers, coded, spread=True,
        )  # fmt: skip
    join()
    if classed and not drawn:
        chosen.fit_classes()
    launch(ENCODE, "trellis_close", 1, THREADS, n, drawn, known, numbers, offsets, chosen.sums, result)
    launch(
        ENCODE, "trellis_write", segments * SHARE, THREADS,
        x, n, drawn, SHARE, chosen.bytes, known, *chosen.regions.where, told, tables, words, numbers, coded, offsets, planes, result, out,
    )  # fmt: skip
    if rest is not None:
        launch(
            CLASSED, "trellis_left", -(-n // 1024), 256,
            x, n, *chosen.step, chosen.bytes, chosen.classes, chosen.info, chosen.scalars, known, result, rest,
        )  # fmt: skip
    # What the kernels use is kept until here.
    del memory, held
    return result, result[:RESULTS]


def trellis_encode(
    x: Tensor,
    step: float | Tensor,
    states: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    layout: Tensor | None = None,
    left: Tensor | None = None,
    rdo: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a message into ``out``: length, ||x||^2 and the squared error, in the host's memory.

    Short vectors, ``rdo`` and those with very many escapes are left to the CPU's kernels over a copy.
    """
    n, device, drawn = x.numel(), x.device, int(ctx is not None)
    if chunk and not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    if n < SHORTEST_VECTOR or rdo:
        return _encode_on_host(x, step, states, chunk, ctx, out, layout, left, rdo)
    x, regions = x.contiguous(), classes.regions_of(layout, n, device)
    rest = None if drawn else left
    if rest is not None and not rest.is_contiguous():
        rest = torch.empty(n, dtype=torch.float32, device=device)
    found = host.read(_encode(x, step_of(step), states, chunk, draws_of(ctx), regions, layout is not None, out, rest)[1])
    if int(found[WRONG]) == MANY_ESCAPES:
        return _encode_on_host(x, step, states, chunk, ctx, out, layout, left, False)
    if left is not None and drawn:
        trellis_decode(out[: int(found[LENGTH])], states, ctx, left.copy_(x), -1.0, layout)
    elif left is not None and rest is not None and rest is not left:
        left.copy_(rest)
    sums = found.view(torch.float64)
    return found[LENGTH], sums[NORM], sums[ERROR]


def _decode_on_host(
    data: Tensor, states: int, ctx: Context | None, out: Tensor, weight: float | None, layout: Tensor | None
) -> Tensor:
    here = host.empty(out.numel(), torch.float32, out.device) if weight is None else host.read(out)
    on_cpu().trellis_decode(host.read(data), states, ctx, here, weight, layout)
    return out if here is out else out.copy_(here)


def trellis_decode(
    data: Tensor, states: int, ctx: Context | None, out: Tensor, weight: float | None, layout: Tensor | None = None
) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``; a message that is refused adds nothing.

    Messages of short vectors, with very many escapes or very many tables are decoded by the CPU's kernels over a copy.
    """
    count, device, data = out.numel(), out.device, data.contiguous()
    if count < SHORTEST_VECTOR or data.numel() == 0:
        return _decode_on_host(data, states, ctx, out, weight, layout)
    if data.numel() == 1:
        # The mode of a message without segments.
        return reference.trellis_decode(host.read(data), states, ctx, out, weight, layout)
    place = out if weight is None and out.is_contiguous() else torch.empty(count, dtype=torch.float32, device=device)
    regions = classes.regions_of(layout, count, device)
    state = _decode(Bytes(data), Varying(data.numel()), states, draws_of(ctx), place, regions)[1]
    wrong, _, others = trust.numbers(state)
    if wrong == CORRUPT:
        raise CorruptMessage("not a trellis-coded message: a segment, a table or an escape is malformed")
    if wrong != FINE or others:
        return _decode_on_host(data, states, ctx, out, weight, layout)
    return out if place is out else put(out, place, weight)


@replay.operation
def _decode(
    data: Bytes, size: Varying, states: int, draws: Draws, place: Tensor, regions: classes.Regions
) -> tuple[Tensor, Tensor]:
    """Decode into ``place``: what is wrong, and whether there are segments for others."""
    count, device, drawn = place.numel(), place.device, draws[0]
    segments, code = len(pieces(count, SEGMENT)), GENERATORS[states]
    chunks, tables = 8 * segments * CHUNKS, segments * TABLES
    state, _ = scratch.kept(device, 24)
    memory, (known, begins, q, cells, entries, only, offsets, words, marks, places) = scratch.empty(
        device, 8 * segments * PLACES, 8 * (segments + 1), 2 * tables * 128, 0 if drawn else 8 * segments * TOTAL, 4 * tables * 129,
        tables, chunks, chunks, count // 8 + 4, 4 * segments * ESCAPES,
    )  # fmt: skip
    launch(
        OPEN, "trellis_open", segments, THREADS,
        data, size, count, drawn, begins, known, q, cells, entries, only, offsets, words, state,
    )  # fmt: skip
    # Whose classes these are, as in classes_decode.cu, and how many tables a segment has at most.
    whose, most = (2, CLASSES * TABLES) if drawn else (1, CLASS_TABLES)
    found = classes.read(regions, data, count, known, offsets, words, state, whose, most)
    blocks = segments * max(1, min(CHUNKS // 4, MANY // segments))
    if drawn:
        launch(
            DECODE, "trellis_dithered_chunks", blocks, 128,
            data, count, *code, *draws[1:], known, entries, offsets, words, marks, place, state,
        )  # fmt: skip
    else:
        # Chunks share the tables of their segment where there are many of them.
        alone = segments < MANY
        launch(
            DECODE, "trellis_chunks", segments * min(CHUNKS, 4 * MANY // segments) if alone else segments, 32 if alone else 128,
            data, count, *code, known, cells, offsets, words, marks, place, state,
        )  # fmt: skip
    launch(
        DECODE, "trellis_class_decode", blocks, 128,
        data, count, *code, *draws, most, known, found.masks, found.contexts, found.entries, offsets, words, marks, place, state,
    )  # fmt: skip
    launch(
        DECODE, "trellis_plain", segments * RUNS, 64,
        data, count, *code, *draws, RUNS, most, known, only, found.masks, found.contexts, found.only, marks, place, state,
    )  # fmt: skip
    launch(DECODE, "trellis_escapes", segments, 1024, data, count, *draws, known, marks, places, place, state)
    del memory, found
    return state, state[:3]
