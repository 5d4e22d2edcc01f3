"""All parameters of a network in one flat vector, every tensor starting at a multiple of a block.

Eight workers' gradients are then one (8, padded) tensor, and what a method needs per tensor (the largest exponent) is a maximum over
whole blocks. The padding stays zero, is never sent and is never counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tersegrad import Spec
from tersegrad.core.protocol import Piece

BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters, in the order in which they lie."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return Layout(tuple(shapes.items()))

    def spans(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Name, shape, first and last coordinate of every tensor."""
        found, at = [], 0
        for name, shape in self.shapes:
            found.append((name, shape, at, at + math.prod(shape)))
            at += -(-math.prod(shape) // BLOCK) * BLOCK
        return found

    @property
    def padded(self) -> int:
        """Coordinates of the flat vector."""
        return sum(-(-math.prod(shape) // BLOCK) * BLOCK for _, shape in self.shapes)

    @property
    def numel(self) -> int:
        """Coordinates that are parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def spec(self) -> Spec:
        """What the package calls the same buffer, without padding."""
        return Spec(tuple(Piece(shape, 0, math.prod(shape), name) for name, shape in self.shapes))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every tensor of a (..., padded) buffer, as views of shape (..., *shape)."""
        return {name: flat[..., a:b].view(*flat.shape[:-1], *shape) for name, shape, a, b in self.spans()}

    def packed(self, flat: Tensor) -> Tensor:
        """A (..., padded) buffer without its padding, a copy."""
        return torch.cat([flat[..., a:b] for _, _, a, b in self.spans()], dim=-1)

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Write what :meth:`packed` gave back into a (..., padded) buffer."""
        at = 0
        for _, _, a, b in self.spans():
            flat[..., a:b] = packed[..., at : at + b - a]
            at += b - a

    def tensor_of_block(self, device: torch.device | str) -> Tensor:
        """For each block the number of its tensor, int64."""
        counts = [-(-math.prod(shape) // BLOCK) for _, shape in self.shapes]
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
