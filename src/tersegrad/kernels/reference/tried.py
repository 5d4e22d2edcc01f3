"""Symbols with one table, beside the question whether scale classes would be shorter, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.reference.dither import USUAL_CHUNK, dither_encode, dither_max_bytes
from tersegrad.kernels.reference.rans import SEGMENT, pieces, rans_encode

__all__ = ["classed_segments", "may_have_classes", "rans_encode_trying"]

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


def rans_encode_trying(
    symbols: Tensor, alphabet: int | Tensor, chunk: int, out: Tensor, levels: Tensor, layout: Tensor
) -> Tensor:
    """Length, and how many segments of ``levels`` have classes; see the schema."""
    room = torch.empty(dither_max_bytes(levels.numel()), dtype=torch.uint8, device=levels.device)
    length = int(dither_encode(levels, 0.0, 1.0, RANS, chunk, None, room, layout=layout)[0])
    alphabet = int(alphabet)
    good = symbols.numel() == 0 or int(symbols.max()) < alphabet
    number = int(rans_encode(symbols, alphabet, None, 1, True, chunk or USUAL_CHUNK, out)) if good else -1
    return torch.tensor([number, classed_segments(room[:length], levels.numel())], device=symbols.device)


def may_have_classes(levels: Tensor, layout: Tensor, begin: int, numel: int) -> bool:
    """True: nobody looks here, so coding them tells."""
    return True
