"""Staging memory: gradients of parameters, in whatever order they come, laid into the flat buffers of their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import BadConfiguration
from tersegrad.engine.groups import Group


class Staging:
    """One flat float32 buffer per group, and where in it each parameter's gradient lies."""

    def __init__(self, groups: Sequence[Group], parameters: Mapping[str, Tensor]) -> None:
        self._groups = groups
        self.flats = [torch.zeros(g.spec.numel, dtype=torch.float32, device=g.device) for g in groups]
        # id of a parameter -> its group, its number among the pieces there, and its place in the group's buffer
        self._where: dict[int, tuple[int, int, Tensor]] = {}
        for group, flat in zip(groups, self.flats):
            for at, (piece, place) in enumerate(zip(group.spec.pieces, self._places(group, flat))):
                self._where[id(parameters[piece.name])] = group.number, at, place
        self.clear()

    @staticmethod
    def _places(group: Group, flat: Tensor) -> list[Tensor]:
        """A group's vector by parameter."""
        pieces = group.spec.pieces
        return [part.view(p.shape) for p, part in zip(pieces, flat.split([p.numel for p in pieces]))]

    def clear(self) -> None:
        """Wait for the gradients of the next step."""
        self._missing = [len(g.spec.pieces) for g in self._groups]

    @property
    def lacking(self) -> list[str]:
        """Parameters of the groups that are not complete."""
        return [name for group, missing in zip(self._groups, self._missing) if missing for name in group.names]

    def put(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[int]:
        """Copy gradients in; the groups that are complete by them, in ascending order."""
        complete, places = [], []
        for parameter in parameters:
            found = self._where.get(id(parameter))
            if found is None:
                raise BadConfiguration(
                    f"there is a gradient of shape {tuple(parameter.shape)} for a parameter that was frozen or absent when the "
                    "handle was attached: attach right after building the model"
                )
            number, _, place = found
            places.append(place)
            self._missing[number] -= 1
            if not self._missing[number]:
                complete.append(number)
        buffers.copy_all(gradients, places)
        return sorted(complete)

    def get(self, results: Mapping[int, Tensor], parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Write the results of groups into the gradients of parameters."""
        found = [self._where[id(parameter)] for parameter in parameters]
        parts = {number: self._places(self._groups[number], results[number]) for number in {number for number, _, _ in found}}
        buffers.copy_all([parts[number][at] for number, at, _ in found], gradients)
