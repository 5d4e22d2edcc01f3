"""Messages of subtractive dithering by CUDA kernels: everything is decided on the device, and the host reads the length."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context
from tersegrad.kernels.cuda import classes, replay, scratch
from tersegrad.kernels.cuda.dither import Draws, draws_of, on_cpu
from tersegrad.kernels.cuda.loader import Bytes, Double, Varying, VaryingFloat, launch, scan
from tersegrad.kernels.reference.classes import CLASSES, OCTAVES
from tersegrad.kernels.reference.rans import LONGEST, SEGMENT, SHORTEST, USUAL, pieces
from tersegrad.kernels.reference.rounding import CHUNK
from tersegrad.kernels.reference.subtractive import NON_FINITE, RAW, SLACK, ZERO, put_word

__all__ = ["subtractive_decode", "subtractive_encode"]

LEVELS, CHOOSE, ENCODE = "subtractive.cu", "subtractive_classes.cu", "subtractive_encode.cu"
OPEN, DECODE = "subtractive_open.cu", "subtractive_decode.cu"
# As in subtractive.cuh, subtractive_counts.cuh and dither.cuh.
STATE, BINS, DEEPEST, TABLES, ROWS, TABLE_BYTES = 23, 16, 8, 128, 31 + 16 * CLASSES, 448
LENGTH, WRONG = 0, 1
FINE, CORRUPT, MANY_ESCAPES, NOT_FINITE, ALL_ZERO, TOO_LARGE = 0, 1, 4, 5, 6, 7
# Shorter vectors are the CPU's.
SHORT = 1 << 10
THREADS, BLOCKS = 256, 2112
# Coordinates of a block whose threads take eight each.
EIGHTS = 8 * THREADS
# As in subtractive.cu: coordinates whose escapes a block writes.
ESCAPES_SPAN = 16384
# As in subtractive_decode.cu: bytes of escapes for a block, and bytes that tables may take near.
SPAN_BYTES, NEAR_BYTES = 4096, 38912


def _encode_on_host(x: Tensor, omega: float, whole: bool, chunk: int, ctx: Context, out: Tensor, layout: Tensor) -> int:
    here = host.empty(out.numel(), torch.uint8, out.device)
    length = int(on_cpu().subtractive_encode(host.read(x), omega, whole, chunk, ctx, here, layout))
    out[:length].copy_(here[:length], non_blocking=True)
    return length


def subtractive_encode(
    x: Tensor,
    omega: float,
    whole: bool,
    chunk: int,
    ctx: Context,
    out: Tensor,
    layout: Tensor,
    minus: float | None = None,
) -> int | Tensor:
    """Write a message into ``out``; its length, in the host's memory.

    Short vectors and those with very many escapes are left to the CPU's kernels over a copy.
    """
    if chunk and not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    x, wrong = x.contiguous(), MANY_ESCAPES
    if x.numel() > SHORT:
        regions, times = classes.regions_of(layout, x.numel(), x.device), VaryingFloat(-(minus or 0.0))
        found = host.read(_encode(x, float(omega), whole, chunk, draws_of(ctx), regions, out, times, minus is not None)[1])
        wrong = int(found[WRONG])
        if wrong == FINE:
            return found[LENGTH]
        if wrong in (NOT_FINITE, ALL_ZERO):
            return put_word(out, NON_FINITE if wrong == NOT_FINITE else ZERO)
    if wrong == TOO_LARGE:
        length = put_word(out, RAW, x.view(torch.uint8))
    else:
        length = _encode_on_host(x, omega, whole, chunk, ctx, out, layout)
    if minus is not None:
        subtractive_decode(out[:length], whole, ctx, x, -minus, layout)
    return length


def _escapes_room(n: int) -> int:
    """Bytes of escapes that are handled on the device."""
    return n // 8 + 16


@replay.operation
def _encode(
    x: Tensor,
    omega: float,
    whole: bool,
    chunk: int,
    draws: Draws,
    regions: classes.Regions,
    out: Tensor,
    times: VaryingFloat,
    subtracts: bool,
) -> tuple[Tensor, Tensor]:
    """Write a message, and add ``times`` its values to x if that is asked for: what is known of it, as in subtractive.cuh."""
    n, device, drawn = x.numel(), x.device, draws[1:]
    parts, units, chunks = len(pieces(n, SEGMENT)), -(-n // CHUNK), len(pieces(n, 1 << (chunk or USUAL)))
    number, room, where, spans = regions.number, regions.room, regions.where, -(-n // ESCAPES_SPAN)
    planes_room = _escapes_room(n)
    state, (_, counts, occur, present, fine, *summed, planes) = scratch.kept(
        device, 8 * STATE, 16 * BINS * 256, 4 * BINS * 256, 4 * BINS * 256, 8 * CLASSES * DEEPEST * 256,
        *classes.summed(regions, parts), planes_room,
    )  # fmt: skip
    # Levels, draws and classes are read sixteen at a time.
    memory, (
        sums, steps, shifts, known, levels, kinds, escapes, entropies, rows, bits, lengths, codes, tables, words, numbers, offsets, states,
    ) = scratch.empty(
        device, 8 * units, 4 * parts, 8 * parts, 8 * classes.PLACES_OF_SEGMENT * parts, n + 15, n + 15, 16 * (spans + 1),
        8 * ROWS, 24 * ROWS, TABLES * TABLE_BYTES, 8 * TABLES, 4 * TABLES * 256, TABLES * TABLE_BYTES, 2 * n, 8 * chunks, 8 * chunks,
        4 * chunks * 64,
    )  # fmt: skip
    held, (
        octaves, listed, gathered, named, told, costs, side_counts, class_sums, tops, side, *side_words,
    ) = scratch.empty(
        device, room, room, room, n + 15, 8 * number * classes.TOLD, 8 * (number + parts), 8 * parts * OCTAVES, 8 * CLASSES * 256,
        8 * CLASSES, number + room // 2 + 64, 2 * room, 8 * (room // 8192 + 2), 4 * (room // 64 + 64 * 2),
    )  # fmt: skip
    launch(LEVELS, "subtractive_squares", -(-units // 16), 512, x, n, sums)
    launch(
        LEVELS, "subtractive_steps", 1 if whole else parts, 1024 if whole else 128,
        n, whole, Double(12 * omega), Double(SLACK), sums, steps, shifts, known, state,
    )  # fmt: skip
    launch(
        LEVELS, "subtractive_levels", min(-(-n // EIGHTS), BLOCKS), THREADS,
        x, n, steps, *drawn, levels, kinds, occur, state,
    )  # fmt: skip
    launch(
        LEVELS, "subtractive_count", 8 * min(-(-units // 8), BLOCKS), THREADS,
        n, levels, kinds, occur, known, counts, present, state,
    )  # fmt: skip
    # The same, and there is nothing to be done, unless levels lie beyond the window.
    given = (x, n, levels, steps, *drawn, escapes)
    launch(LEVELS, "subtractive_escapes_count", spans, THREADS, *given, state)
    scan(LEVELS, escapes, 2, spans + 1)
    launch(LEVELS, "subtractive_escapes_write", spans, THREADS, *given, planes, planes_room, state)
    _choose_classes(
        n, parts, levels, kinds, known, where, summed, octaves, listed, gathered, named, told, costs, side_counts, class_sums, tops, side,
        side_words, fine, state,
    )  # fmt: skip
    launch(CHOOSE, "subtractive_rows", ROWS, 32, counts, present, fine, entropies, rows, state)
    launch(CHOOSE, "subtractive_plan", 1, 32, chunk, USUAL, entropies, rows, tops, state)
    launch(ENCODE, "subtractive_tables", TABLES, 32, counts, present, fine, tops, bits, lengths, codes, state)
    launch(
        ENCODE, "subtractive_chunks", -(-chunks // 4), 128,
        levels, kinds, named, shifts, codes, words, numbers, states, state,
    )  # fmt: skip
    steps_number = 1 if whole else parts
    launch(ENCODE, "subtractive_close", 1, THREADS, steps_number, bits, lengths, tables, numbers, offsets, state)
    launch(
        ENCODE, "subtractive_write", min(max(4 * chunks, -(-n // EIGHTS)), 1056), THREADS,
        steps_number, steps, levels, shifts, side, tables, words, numbers, states, offsets, planes, state, out,
    )  # fmt: skip
    if subtracts:
        launch(LEVELS, "subtractive_left", -(-n // EIGHTS), THREADS, x, n, levels, steps, *drawn, times, state)
    # What the kernels use is kept until here.
    del memory, held
    return state, state[: WRONG + 1]


def _choose_classes(
    n: int, parts: int, levels: int, kinds: int, known: int, where: tuple[int, int], summed: list[int], octaves: int, listed: int,
    gathered: int, named: int, told: int, costs: int, side_counts: int, class_sums: int, tops: int, side: int, side_words: list[int],
    fine: int, state: Tensor,
) -> None:  # fmt: skip
    """Whether all parts together have classes, and if so what says which."""
    counts, largest, sums = summed
    shared = parts * classes.SHARE
    launch(classes.ENCODE, "classes_sums", shared, THREADS, n, classes.SHARE, levels, known, *where, sums, state)
    launch(
        classes.ENCODE, "classes_describe", parts, THREADS,
        n, known, *where, sums, octaves, listed, told, costs, side_counts, state,
    )  # fmt: skip
    launch(
        CHOOSE, "subtractive_octaves", 1, 512,
        n, known, *where, told, costs, listed, side_counts, gathered, *side_words, side, state,
    )  # fmt: skip
    launch(
        classes.ENCODE, "classes_count", shared, THREADS,
        n, classes.SHARE, levels, known, *where, told, octaves, named, counts, largest, state,
    )  # fmt: skip
    launch(CHOOSE, "subtractive_class_counts", CLASSES, THREADS, n, known, counts, largest, class_sums, tops, state)
    launch(CHOOSE, "subtractive_classes", 1, 512, class_sums, tops, side, state)
    launch(CHOOSE, "subtractive_fine", min(-(-n // 4096), BLOCKS), THREADS, n, levels, kinds, named, known, fine, state)


def _decode_on_host(data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor) -> Tensor:
    here = host.empty(out.numel(), torch.float32, out.device) if weight is None else host.read(out)
    on_cpu().subtractive_decode(host.read(data), whole, ctx, here, weight, layout)
    return out if here is out else out.copy_(here)


def subtractive_decode(data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``; a message that is refused adds nothing.

    Messages without segments, with plain levels, with very many escapes or tables are decoded by the CPU's kernels over a copy.
    """
    count, device, data = out.numel(), out.device, data.contiguous()
    if count <= SHORT or data.numel() < 4:
        return _decode_on_host(data, whole, ctx, out, weight, layout)
    place = out if weight is None and out.is_contiguous() else torch.empty(count, dtype=torch.float32, device=device)
    regions = classes.regions_of(layout, count, device)
    size, times = Varying(data.numel()), VaryingFloat(1.0 if weight is None else weight)
    (wrong,) = trust.numbers(_decode(Bytes(data), size, whole, draws_of(ctx), regions, times, weight is not None, place)[1])
    if wrong == CORRUPT:
        raise CorruptMessage(
            "not a message of subtractive dithering: a step, a class, a table, a chunk or an escape is malformed"
        )
    if wrong != FINE:
        return _decode_on_host(data, whole, ctx, out, weight, layout)
    if place is out:
        return out
    return out.copy_(place) if weight is None else out.add_(place)


@replay.operation
def _decode(
    data: Bytes,
    size: Varying,
    whole: bool,
    draws: Draws,
    regions: classes.Regions,
    weight: VaryingFloat,
    added: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decode ``weight`` times the values into ``out``: what is known of the message, and what is wrong with it."""
    n, device, drawn = out.numel(), out.device, draws[1:]
    parts, chunks, tail_room, most = len(pieces(n, SEGMENT)), len(pieces(n, 1 << SHORTEST)), _escapes_room(n), n // 32 + 16
    spans, room, where = -(-tail_room // SPAN_BYTES), regions.room, regions.where
    state, (base,) = scratch.kept(device, 8 * STATE)
    memory, (
        steps, shifts, known, told, octaves, masks, side_offsets, side_words, q, entries, only, offsets, words, contexts, marks, rows,
        places,
    ) = scratch.empty(
        device, 4 * parts, 8 * parts, 8 * classes.PLACES_OF_SEGMENT * parts, 8 * regions.number * classes.TOLD, room, 8 * parts,
        8 * (room // 8192 + 2), 8 * (room // 8192 + 2), 2 * TABLES * 256, 4 * TABLES * 256, TABLES, 8 * chunks, 8 * chunks, n + 15,
        n // 8 + 4, 16 * (spans + 1), 8 * most,
    )  # fmt: skip
    launch(OPEN, "subtractive_open", 1, THREADS, data, size, n, whole, tail_room, steps, shifts, known, state)
    launch(
        OPEN, "subtractive_read", 1, THREADS,
        data, size, n, known, *where, told, octaves, masks, side_offsets, side_words, q, state,
    )  # fmt: skip
    launch(OPEN, "subtractive_entries", TABLES, 32, q, entries, only, state)
    launch(OPEN, "subtractive_places", 1, THREADS, data, size, NEAR_BYTES, offsets, words, state)
    launch(
        classes.DECODE, "classes_fill", parts * classes.SHARE, THREADS,
        n, 0, classes.SHARE, known, *where, told, octaves, masks, contexts, base + 8 * WRONG,
    )  # fmt: skip
    launch(
        DECODE, "subtractive_decode_chunks", -(-chunks // 4), 128,
        data, n, *drawn, steps, shifts, contexts, entries, offsets, words, weight, marks, out, state,
    )  # fmt: skip
    launch(
        DECODE, "subtractive_plain", min(-(-n // THREADS), BLOCKS), THREADS,
        data, n, *drawn, steps, known, contexts, only, weight, added, marks, out, state,
    )  # fmt: skip
    # The same, and there is nothing to be done, where the message has no escapes.
    launch(DECODE, "subtractive_marks", spans, THREADS, data, size, n, known, marks, rows, state)
    scan(DECODE, rows, 2, spans + 1)
    launch(DECODE, "subtractive_ones", spans, THREADS, data, size, rows, most, places, state)
    launch(
        DECODE, "subtractive_settle", spans, THREADS,
        data, size, n, *drawn, steps, known, marks, rows, places, weight, out, state,
    )  # fmt: skip
    # What the kernels use is kept until here.
    del memory
    return state, state[WRONG : WRONG + 1]
