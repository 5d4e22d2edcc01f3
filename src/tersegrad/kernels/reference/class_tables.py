"""Scale classes for symbols that are coded elsewhere, in plain torch: the definition (``spec/wire.md``, "Scale classes")."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.reference.classes import Region, choose, cut, read_classes

__all__ = ["classes_choose", "classes_read"]


def _regions(layout: Tensor, parts: Tensor) -> list[Region]:
    pieces: list[list[int]] = layout.view(-1, 4).tolist()
    return [region for start, stop in parts.view(-1, 2).tolist() for region in cut(pieces, start, stop)]


def classes_choose(symbols: Tensor, window: int, layout: Tensor, parts: Tensor, contexts: Tensor) -> Tensor | None:
    chosen = choose(symbols, window, _regions(layout, parts))
    if chosen is None:
        return None
    contexts.copy_(chosen[1])
    return torch.tensor(list(chosen[0]), dtype=torch.uint8, device=symbols.device)


def classes_read(data: Tensor, layout: Tensor, parts: Tensor, contexts: Tensor) -> tuple[int, int]:
    found, tables, used = read_classes(data, _regions(layout, parts))
    contexts.copy_(found)
    return tables, used
