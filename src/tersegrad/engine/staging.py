"""Staging memory: gradients of parameters, in whatever order they come, laid into the flat buffers of their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.engine.groups import Group


class Staging:
    """One flat float32 buffer per group, and where in it each parameter's gradient lies."""

    def __init__(self, groups: Sequence[Group], parameters: Mapping[str, Tensor]) -> None:
        self._groups = groups
        self._where: dict[int, tuple[int, int]] = {}  # id of a parameter -> its group and where it begins there
        for group in groups:
            at = 0
            for piece in group.spec.pieces:
                self._where[id(parameters[piece.name])] = group.number, at
                at += piece.numel
        self.flats = [torch.zeros(g.spec.numel, dtype=torch.float32, device=g.device) for g in groups]
        self.clear()

    def clear(self) -> None:
        """Wait for the gradients of the next step."""
        self._missing = [len(g.spec.pieces) for g in self._groups]

    @property
    def lacking(self) -> list[str]:
        """Parameters of the groups that are not complete."""
        return [name for group, missing in zip(self._groups, self._missing) if missing for name in group.names]

    def put(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[int]:
        """Copy gradients in; the groups that are complete by them, in ascending order."""
        complete = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            place = self._where.get(id(parameter))
            if place is None:
                raise BadConfiguration(
                    f"there is a gradient of shape {tuple(parameter.shape)} for a parameter that was frozen or absent when the "
                    "handle was attached: attach right after building the model"
                )
            number, at = place
            self.flats[number][at : at + gradient.numel()].view(gradient.shape).copy_(gradient)
            self._missing[number] -= 1
            if not self._missing[number]:
                complete.append(number)
        return sorted(complete)

    def get(self, results: Mapping[int, Tensor], parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Write the results of groups into the gradients of parameters."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            number, at = self._where[id(parameter)]
            gradient.copy_(results[number][at : at + gradient.numel()].view(gradient.shape))
