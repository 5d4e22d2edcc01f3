"""Levels and exponents with one rANS table by CUDA kernels: messages to numbers at once, one look at the result by the host."""

from __future__ import annotations

from torch import Tensor

from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import Bytes, Varying, launch
from tersegrad.kernels.reference.rans import SHORTEST, pieces
from tersegrad.kernels.reference.rans_tables import TOTAL

__all__ = ["coded_exponents_decode", "coded_levels_decode"]

DECODE = "coded_decode.cu"
THREADS = 256
# As in coded_decode.cu.
FACTS = 5


def coded_levels_decode(data: Tensor, window: int, block: int, out: Tensor) -> Tensor:
    """Levels times their steps, or as bytes; whether something is wrong."""
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
    memory, (steps, cells, offsets, words, facts) = scratch.empty(
        device, 4 * blocks, 4 * TOTAL, 8 * most, 8 * most, 8 * FACTS
    )
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
