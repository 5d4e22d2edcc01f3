"""Staging: gradients of parameters, in whatever order they come, as the vectors of their groups.

Where a step can work on stretches of a vector, a group's gradients stay where they are; else they are copied into a flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import BadConfiguration
from tersegrad.engine.groups import Group
from tersegrad.engine.step import Step
from tersegrad.exchange.stretches import Stretches


class Staging:
    """The gradients of a step by group, and a flat float32 buffer for each group that needs one."""

    def __init__(self, groups: Sequence[Group], parameters: Mapping[str, Tensor]) -> None:
        self._groups = groups
        # By group: its buffer, and the places of its parameters in it.
        self._flats: dict[int, tuple[Tensor, list[Tensor]]] = {}
        # id of a parameter -> its group, and its number among the pieces there
        self._where = {
            id(parameters[piece.name]): (group.number, at) for group in groups for at, piece in enumerate(group.spec.pieces)
        }
        self.clear()

    @staticmethod
    def _places(group: Group, flat: Tensor) -> list[Tensor]:
        """A group's vector by parameter."""
        pieces = group.spec.pieces
        return [part.view(p.shape) for p, part in zip(pieces, flat.split([p.numel for p in pieces]))]

    def clear(self) -> None:
        """Wait for the gradients of the next step."""
        self._missing = [len(g.spec.pieces) for g in self._groups]
        self._given: list[list[Tensor]] = [[torch.empty(0)] * len(g.spec.pieces) for g in self._groups]

    @property
    def nbytes(self) -> int:
        """Memory of the flat buffers."""
        return sum(flat.nbytes for flat, _ in self._flats.values())

    @property
    def lacking(self) -> list[str]:
        """Parameters of the groups that are not complete."""
        return [name for group, missing in zip(self._groups, self._missing) if missing for name in group.names]

    def put(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[int]:
        """Take in gradients, which stay as they are until :meth:`get`; the groups that are complete by them, in ascending order."""
        complete = []
        for parameter, gradient in zip(parameters, gradients):
            found = self._where.get(id(parameter))
            if found is None:
                raise BadConfiguration(
                    f"there is a gradient of shape {tuple(parameter.shape)} for a parameter that was frozen or absent when the "
                    "handle was attached: attach right after building the model"
                )
            number, at = found
            self._given[number][at] = gradient
            self._missing[number] -= 1
            if not self._missing[number]:
                complete.append(number)
        return sorted(complete)

    def vector(self, number: int, step: Step) -> Tensor | Stretches:
        """A complete group's gradients as one vector, in stretches if ``step`` can do with them."""
        given = self._given[number]
        if step.in_stretches(number) and all(g.dtype == torch.float32 and g.is_contiguous() for g in given):
            return Stretches(given, step.checker())
        return self.flat(number)

    def flat(self, number: int) -> Tensor:
        """A complete group's gradients in a flat buffer."""
        if number not in self._flats:
            group = self._groups[number]
            flat = torch.zeros(group.spec.numel, dtype=torch.float32, device=group.device)
            self._flats[number] = flat, self._places(group, flat)
        flat, places = self._flats[number]
        buffers.copy_all(self._given[number], places)
        return flat

    def get(self, results: Mapping[int, Tensor]) -> None:
        """Write the results of groups into the gradients that were taken in; those of stretches are there."""
        for number, result in results.items():
            if isinstance(result, Tensor):
                flat, places = self._flats[number]
                found = places if result is flat else self._places(self._groups[number], result)
                buffers.copy_all(found, self._given[number])
