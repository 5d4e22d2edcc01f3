"""Levels and exponents with one rANS table by CUDA kernels: one look at the result by the host, and numbers from messages at once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad.kernels.cuda import classes, rans, replay, scratch
from tersegrad.kernels.cuda.loader import Bytes, Varying, aside, join, launch
from tersegrad.kernels.reference.dither import USUAL_CHUNK
from tersegrad.kernels.reference.rans import SEGMENT, SHORTEST, pieces
from tersegrad.kernels.reference.rans_tables import TOTAL
from tersegrad.kernels.reference.tried import within
from tersegrad.kernels.schema_codes import Means

__all__ = ["coded_exponents_decode", "coded_levels_decode", "rans_encode_trying"]

DECODE, ENCODE = "coded_decode.cu", "coded_encode.cu"
THREADS = 256
# As in coded_decode.cu.
FACTS = 5
# As in coded_encode.cu.
SEGMENT_FOUND, STEPS_FOUND, TOLD = 7, 2, 4
MEANS = {"levels": rans.LEVELS, "exponents": rans.EXPONENTS, "folded": rans.FOLDED}
# Of dither.cuh: what comes of encoding, and what is known of a segment.
RESULTS, PLACES = 4, 12
SHARE = 16


def rans_encode_trying(
    codes: Tensor,
    means: Means,
    alphabet: int,
    chunk: int,
    head: Tensor,
    out: Tensor,
    layout: Tensor,
    part: tuple[int, int],
    steps: Tensor | None = None,
) -> Tensor:
    """The length of the message, how many segments of a part have classes, and two facts, on the device."""
    regions = _regions(layout.contiguous().numpy().tobytes(), *part, codes.device)
    return _encode(codes.contiguous(), MEANS[means], alphabet, chunk, head, out, regions, *part, steps)


@functools.lru_cache(maxsize=64)
def _regions(layout: bytes, begin: int, end: int, device: torch.device) -> classes.Regions:
    return classes.regions_of(within(torch.frombuffer(bytearray(layout), dtype=torch.int64), begin, end), end - begin, device)


@replay.operation
def _encode(
    codes: Tensor,
    means: int,
    alphabet: int,
    chunk: int,
    head: Tensor,
    out: Tensor,
    regions: classes.Regions,
    begin: int,
    end: int,
    steps: Tensor | None,
) -> Tensor:
    device, n, segments = codes.device, end - begin, len(pieces(end - begin, SEGMENT))
    told = torch.empty(TOLD, dtype=torch.int64, device=device)
    exponent = chunk or USUAL_CHUNK
    with aside():
        result, (_, found, steps_found, *summed) = scratch.kept(
            device, 8 * RESULTS, 4 * SEGMENT_FOUND * segments, 4 * STEPS_FOUND, *classes.summed(regions, segments)
        )
    block = rans.begin_block(codes, alphabet, None, 1, True, exponent, 0, means)
    # Levels are read sixteen at a time.
    memory, (levels, known) = scratch.empty(device, n + 15, 8 * segments * PLACES)
    scaled = (steps, steps.numel() // 4) if steps is not None else (0, 0)
    # The range of exponents is known with the table.
    join()
    with aside():
        launch(
            ENCODE, "coded_look", segments * SHARE + min(-(-scaled[1] // THREADS), 64), THREADS,
            codes[begin:end], n, SHARE, means, exponent, block.head, levels, found, known, result, *scaled, steps_found,
        )  # fmt: skip
        chosen = classes.search(regions, n, chunk, summed, levels, known, result)
    rans.code_block(block, out)
    join()
    launch(
        ENCODE, "coded_told", 1, 32, segments, known, result, block.head, means, steps_found, told, head, head.numel()
    )  # fmt: skip
    # What the kernels use is kept until here.
    del memory, chosen, block
    return told


def coded_levels_decode(data: Tensor, window: int, block: int, out: Tensor) -> Tensor:
    """Levels times their steps, or as bytes; whether something is wrong."""
    if out.element_size() > 1 and block % 512:
        raise ValueError(f"numbers are made of blocks of multiples of 512 coordinates, got {block}")
    blocks = -(-out.numel() // block)
    return _decoded(data, 1 + 4 * blocks, 2 * window + 1, (block, blocks, window), out)


def coded_exponents_decode(data: Tensor, out: Tensor) -> Tensor:
    """Powers of two with their signs, or exponents as bytes; whether something is wrong."""
    return _decoded(data, 3 + -(-out.numel() // 8), 0, (), out)


def _decoded(data: Tensor, front: int, alphabet: int, how: tuple[int, ...], out: Tensor) -> Tensor:
    # What a thread reads must be there.
    if data.numel() <= front or not out.is_contiguous():
        raise ValueError("the message is shorter than what stands before its symbols, or the output is not contiguous")
    return _decode(Bytes(data.contiguous()), Varying(data.numel()), front, alphabet, how, out)


@replay.operation
def _decode(data: Bytes, size: Varying, front: int, alphabet: int, how: tuple[int, ...], out: Tensor) -> Tensor:
    """``alphabet`` and ``how`` are those of levels; exponents have none."""
    count, device = out.numel(), out.device
    most, blocks = len(pieces(count, 1 << SHORTEST)), how[1] if how else 0
    # As in coded_decode.cu: what is wrong, and further on whether a step is not finite.
    state, _ = scratch.kept(device, 8, 8)
    memory, (steps, cells, offsets, words, facts) = scratch.empty(device, 4 * blocks, 4 * TOTAL, 8 * most, 8 * most, 8 * FACTS)
    into = (0, out) if out.element_size() == 1 else (out, 0)
    open_with = 1 + min(-(-blocks // (4 * THREADS)), 64)
    launch(
        DECODE, "values_open", open_with, THREADS,
        data, size, front, count, alphabet, blocks, steps, cells, offsets, words, facts, state,
    )  # fmt: skip
    plain = min(-(-count // (4 * THREADS)), 1056)
    if how:
        launch(DECODE, "level_chunks", most, 32, data, count, *how, steps, cells, offsets, words, facts, *into, state)
        launch(DECODE, "level_plain", plain, THREADS, data, front, count, *how, steps, facts, *into, state)
    else:
        launch(DECODE, "power_chunks", most, 32, data, count, cells, offsets, words, facts, *into, state)
        launch(DECODE, "power_plain", plain, THREADS, data, front, count, facts, *into, state)
    # What the kernels use is kept until here.
    del memory
    return state[:1]
