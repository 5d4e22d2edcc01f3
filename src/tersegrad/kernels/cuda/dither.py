"""Sparse Dithering by CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import reference
from tersegrad.kernels.cuda.loader import launch
from tersegrad.kernels.reference.dither import SHORT
from tersegrad.kernels.reference.rans import SEGMENT, pieces
from tersegrad.kernels.reference.rans_tables import TOTAL

__all__ = ["dither_decode"]

DECODE = "dither_decode.cu"
# As in dither.cuh.
PLACES, CHUNKS, ESCAPES = 11, 32, 8192
FIRST, WRONG = range(2)
FINE, CORRUPT = 0, 1
THREADS = 256
SHARE = 16


def dither_decode(data: Tensor, out: Tensor, weight: float | None) -> Tensor:
    """``out = decoded``, or ``out += weight * decoded``.

    Short messages, which are read in order, and segments with very many escapes are decoded by the reference. A segment with an
    escape too many is found before anything is written where ``weight`` is given, and after it otherwise.
    """
    count, device, data = out.numel(), out.device, data.contiguous()
    if count <= SHORT or data.numel() < 4:
        return reference.dither_decode(data, out, weight)
    segments = len(pieces(count, SEGMENT))
    state, begins = (torch.zeros(size, dtype=torch.int64, device=device) for size in (2, segments + 1))
    known = torch.empty(segments * PLACES, dtype=torch.int64, device=device)
    q = torch.empty(segments * 256, dtype=torch.int16, device=device)
    cells = torch.empty(segments * TOTAL, dtype=torch.int32, device=device)
    symbols = torch.empty(segments * TOTAL, dtype=torch.uint8, device=device)
    offsets, words = (torch.empty(segments * CHUNKS, dtype=torch.int64, device=device) for _ in range(2))
    kept = torch.empty(count, dtype=torch.uint8, device=device)
    places, extras = (torch.empty(segments * ESCAPES, dtype=torch.int32, device=device) for _ in range(2))
    place = out if out.is_contiguous() else out.contiguous()
    # What is added to must not change where the reference has to start again.
    before = place.clone() if weight is not None else None
    how = (0.0 if weight is None else float(weight), int(weight is not None))
    launch(DECODE, "dither_layout", 1, THREADS, data, data.numel(), count, begins, state)
    launch(DECODE, "dither_parse", segments, 32, data, count, begins, known, q, state)
    launch(DECODE, "dither_tables", segments, THREADS, data, count, q, known, cells, symbols, offsets, words, state)
    launch(
        DECODE, "dither_chunks", segments * CHUNKS, 32,
        data, count, known, cells, symbols, offsets, words, *how, kept, place, state,
    )  # fmt: skip
    launch(DECODE, "dither_plain", segments * SHARE, THREADS, data, count, known, SHARE, *how, kept, place, state)
    launch(DECODE, "dither_escapes", segments, THREADS, data, count, known, kept, places, extras, *how, place, state)
    wrong = int(state[WRONG])
    if wrong == CORRUPT:
        raise CorruptMessage("not a message of dithered levels: a segment, a table or an escape is malformed")
    if wrong != FINE:
        if before is not None:
            place.copy_(before)
        reference.dither_decode(data, place, weight)
    if place is not out:
        out.copy_(place)
    return out
