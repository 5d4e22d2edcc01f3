"""The common parameters of workers that train alone (*anchors*), and the outer optimiser that moves them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.engine import Group, checkpoint, make_groups
from tersegrad.integrations.methods import Method


class Outer:
    """Anchors of groups of parameters, as flat float32 vectors that have the same bits on every rank."""

    def __init__(self, parameters: Mapping[str, Tensor], groups: Sequence[Group], how: Method) -> None:
        self._parameters, self._groups = dict(parameters), list(groups)
        self._anchors = [self._own(number) for number in range(len(groups))]
        self._has_momentum = how.momentum > 0
        self._optimizer = torch.optim.SGD(self._anchors, lr=how.lr, momentum=how.momentum, nesterov=how.momentum > 0)

    def _own(self, number: int) -> Tensor:
        """The worker's own parameters of a group, as one float32 vector."""
        return torch.cat([self._parameters[n].detach().reshape(-1).to(torch.float32) for n in self._groups[number].names])

    def _named(self, flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Views of flat vectors by parameter."""
        named = {}
        for number, flat in flats.items():
            pieces = self._groups[number].spec.pieces
            for piece, part in zip(pieces, flat.detach().split([p.numel for p in pieces])):
                named[piece.name] = part.view(piece.shape)
        return named

    def _write(self, named: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in named.items():
                self._parameters[name].copy_(value)

    def common(self) -> dict[str, Tensor]:
        """The anchors by parameter."""
        return self._named(dict(enumerate(self._anchors)))

    def progress(self, number: int) -> Tensor:
        """A group's pseudo-gradient: how far the worker went from the anchor, backwards. One pass, in one new vector."""
        anchor = self._anchors[number].detach()
        difference = buffers.empty(anchor.numel(), torch.float32, anchor.device)
        pieces = self._groups[number].spec.pieces
        sizes = [piece.numel for piece in pieces]
        for piece, here, out in zip(pieces, anchor.split(sizes), difference.split(sizes)):
            own = self._parameters[piece.name].detach().reshape(-1)
            # Narrower numbers become float32 on the way.
            torch.sub(here, own.to(torch.float32) if own.dtype == torch.float64 else own, out=out)
        return difference

    def move(self, means: Mapping[int, Tensor], rate: float) -> None:
        """Step the anchors of some groups along the means."""
        self._optimizer.param_groups[0]["lr"] = rate
        for number, mean in means.items():
            self._anchors[number].grad = mean
        if means:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def pull(self, number: int, kept: float) -> None:
        """Move the worker's own parameters to the anchor, keeping a share of them."""
        if kept == 1:
            return
        for name, there in self._named({number: self._anchors[number]}).items():
            own = self._parameters[name].detach()
            if kept == 0:
                own.copy_(there)
            elif own.dtype == torch.float32:
                torch.lerp(there, own, kept, out=own)
            else:
                own.copy_(torch.lerp(there, own.to(torch.float32), kept))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The anchors in place of the worker's own parameters."""
        originals = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._write(self.common())
        try:
            yield
        finally:
            self._write(originals)

    # ---------------------------------------------------------------------------------------------------------------- state

    def copies(self, flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Copies of flat vectors by parameter, for a checkpoint."""
        return {name: value.clone() for name, value in self._named(flats).items()}

    def flat(self, number: int, named: Mapping[str, Any]) -> Tensor:
        """The vector of a group from a checkpoint, checked."""
        parts = []
        for piece in self._groups[number].spec.pieces:
            saved = named[piece.name]
            fits = isinstance(saved, Tensor) and saved.shape == piece.shape and saved.is_floating_point()
            part = saved.reshape(-1).to(self._groups[number].device, torch.float32) if fits else torch.full((1,), torch.nan)
            finite = bool(torch.isfinite(part).all())
            checkpoint.require(finite, f"{piece.name} was not saved as finite float32 numbers of shape {piece.shape}")
            parts.append(part)
        return torch.cat(parts)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Anchors and momenta by parameter; before its first step a group's momentum is zero."""
        momenta = {}
        if self._has_momentum:
            for number, anchor in enumerate(self._anchors):
                buffer = self._optimizer.state.get(anchor, {}).get("momentum_buffer")
                momenta[number] = torch.zeros_like(anchor) if buffer is None else buffer
        return {"anchors": self.copies(dict(enumerate(self._anchors))), "momenta": self.copies(momenta)}

    def read(self, anchors: Mapping[str, Any], momenta: Mapping[str, Any]) -> Callable[[], None]:
        """Check what :meth:`state` saved; the function that is returned assigns it."""
        numbers = range(len(self._groups))
        checkpoint.require(anchors.keys() == self._parameters.keys(), "the anchors are not those of this model")
        moved = [self.flat(number, anchors) for number in numbers]
        known = self._parameters.keys() if self._has_momentum else set()
        checkpoint.require(momenta.keys() == known, "the momenta are not those of this model and method")
        speeds = {number: self.flat(number, momenta) for number in numbers if known}

        def assign() -> None:
            for number, anchor in enumerate(self._anchors):
                anchor.copy_(moved[number])
                self._optimizer.state.pop(anchor, None)
                if number in speeds:
                    self._optimizer.state[anchor] = {"momentum_buffer": speeds[number]}

        return assign


def divide(parameters: Mapping[str, Tensor], fragments: int, group_bytes: int | None) -> tuple[list[Group], list[list[int]]]:
    """Groups, and which of them each fragment has: neighbouring parameters, of about the same size in all."""
    total = sum(p.numel() for p in parameters.values())
    shares: list[dict[str, Tensor]] = [{} for _ in range(fragments)]
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        shares[min(fragments - 1, int(middle * fragments / max(1, total)))][name] = parameter
        before += parameter.numel()
    groups: list[Group] = []
    numbers: list[list[int]] = []
    for share in shares:
        made = make_groups(share, group_bytes)
        numbers.append(list(range(len(groups), len(groups) + len(made))))
        groups += [dataclasses.replace(g, number=len(groups) + k) for k, g in enumerate(made)]
    return groups, numbers
