"""Bytes with one table, beside the question whether scale classes would be shorter, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.reference.casts import exponent_symbols
from tersegrad.kernels.reference.dither import USUAL_CHUNK, dither_encode, dither_max_bytes
from tersegrad.kernels.reference.rans import SEGMENT, pieces, rans_encode
from tersegrad.kernels.schema_codes import Means

__all__ = ["classed_segments", "may_have_classes", "rans_encode_trying"]  # and for others: levels_of, within

# Of dither_encode: segments of rANS only. Of its messages: the kind of segments with classes.
RANS, CLASSED = 1, 3


def classed_segments(data: Tensor, numel: int) -> int:
    """How many segments of a message of dithered levels have scale classes."""
    segments = len(pieces(numel, SEGMENT))
    table = 4 * segments if segments > 1 else 0
    # Shorter ones, of zeros alone, have no segments.
    if data.numel() <= 4 + table:
        return 0
    if not table:
        return int(int(data[4]) == CLASSED)
    sizes = data[4 : 4 + table].clone().view(torch.int32).long()
    return int((data[sizes.cumsum(0) - sizes + 4 + table] == CLASSED).sum())


def within(layout: Tensor, begin: int, end: int) -> Tensor:
    """The layout of coordinates begin .. end."""
    size, columns, group, phase = layout.view(-1, 4).unbind(1)
    first = size.cumsum(0) - size
    start, stop = first.clamp(min=begin), (first + size).clamp(max=end)
    here = torch.stack((stop - start, columns, group, (phase + start - first) % columns), 1)
    return here[start < stop].flatten()


def levels_of(codes: Tensor, means: Means, largest: int) -> Tensor:
    """The levels that bytes stand for, int16."""
    if means == "levels":
        return codes.view(torch.int8).to(torch.int16)
    wide = codes.to(torch.int16)
    if means == "folded":
        return torch.where(wide % 2 == 1, -(wide >> 1), wide >> 1)
    return torch.where(wide == 0, 0, largest + 1 - wide)


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
    """Length, how many segments of a part have classes, and two facts; see the schema."""
    facts, symbols = (0, 0), codes
    if means == "exponents":
        symbols = torch.empty_like(codes)
        below, largest, alphabet = (int(v) for v in exponent_symbols(codes, symbols))
        facts = (below + 1 if largest else 1, largest)
    elif means == "levels":
        symbols = codes + alphabet // 2
    if steps is not None:
        sizes = steps.clone().view(torch.float32)
        facts = (int((sizes != 0).any()), int(not torch.isfinite(sizes).all()))
    levels, known = levels_of(codes[slice(*part)], means, facts[1]).float(), within(layout, *part)
    room = torch.empty(dither_max_bytes(levels.numel()), dtype=torch.uint8, device=levels.device)
    length = int(dither_encode(levels, 0.0, 1.0, RANS, chunk, None, room, layout=known)[0])
    number, plain = -1, torch.empty(1 + codes.numel(), dtype=torch.uint8, device=codes.device)
    if int(symbols.max()) < alphabet:
        number = int(rans_encode(symbols, alphabet, None, 1, True, chunk or USUAL_CHUNK, plain))
        out[: number if number <= out.numel() else 0] = plain[: number if number <= out.numel() else 0]
    head.copy_(torch.tensor([0, *facts][: head.numel()], dtype=torch.uint8))
    return torch.tensor([number, classed_segments(room[:length], levels.numel()), *facts], device=codes.device)


def may_have_classes(levels: Tensor, layout: Tensor, begin: int, numel: int) -> bool:
    """True: nobody looks here, so coding them tells."""
    return True
