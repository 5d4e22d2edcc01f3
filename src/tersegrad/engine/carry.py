"""What a change of compressor or exchange does with states: keep what means the same, return what has no place.

The residual of error feedback, r of variance-based compression and the residual of PowerSGD are the same thing: what earlier messages
left out, in the units of gradients. They are carried over as such. Where the new exchange keeps residuals for other coordinates or
rounds than the old one, every rank starts from the mean of what all ranks carried, as on another world size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Spec
from tersegrad.engine.lane import Lane
from tersegrad.exchange import Part, Pending
from tersegrad.exchange.exact import exact_mean


@dataclasses.dataclass(frozen=True)
class Left:
    """What a change could not carry over.

    ``residuals``: by parameter, what the mean over ranks will never get of this rank's residuals. ``renewed``: names of other state
    that starts anew (``v`` of variance-based compression, ``q`` of PowerSGD).
    """

    residuals: dict[str, Tensor]
    renewed: tuple[str, ...]

    @property
    def power(self) -> float:
        """The squared norm of the residuals that were left behind."""
        return sum(float(r.double().square().sum()) for r in self.residuals.values())


def carry(old: Lane, new: Lane) -> tuple[Any, Left]:
    """The state of ``new`` with what ``old`` carried, and the rest (a collective call)."""
    if not old.stateful:
        return new.state, Left({}, ())
    before, after, spec = old.parts(), new.parts(), new.group.spec
    left = torch.zeros(spec.numel, dtype=torch.float32, device=new.group.device)
    # By chance the parts of one rank may be alike where those of others are not, and all must go the same way.
    alike = [(p.round, p.start, p.stop) for p in before] == [(p.round, p.start, p.stop) for p in after]
    if old.scheme == new.scheme or all(row[0] for row in new.link.gather(bytes([alike, *bytes(7)]))):
        moved = [_moved(a, b, states.slice_spec(spec, b.start, b.stop), left.device) for a, b in zip(before, after)]
        renewed = {name for _, _, names in moved for name in names}
    else:
        mean = _mean(old, before)
        moved = [_laid(mean, part, states.slice_spec(spec, part.start, part.stop)) for part in after]
        renewed = {name for part in before for name in _other_entries(part.state)}
        left += torch.where(_covered(new, after), 0.0, mean / new.link.size)
    for part, (_, rest, _) in zip(after, moved):
        if rest is not None:
            left[part.start : part.stop] += rest / part.holders
    return new.join([state for state, _, _ in moved]), Left(_by_name(left, spec), tuple(sorted(renewed)))


def _covered(lane: Lane, parts: Sequence[Part]) -> Tensor:
    """Which coordinates some rank has a part for, in a round that takes gradients (a collective call)."""
    mine = torch.zeros(lane.group.spec.numel, dtype=torch.float32, device=lane.group.device)
    for part in parts:
        if part.round != "second":
            mine[part.start : part.stop] = 1.0
    return Pending(exact_mean(mine, lane.link.size), lane.link).wait()[0] > 0


Moved = tuple[Any, Tensor | None, Sequence[str]]  # a part's state, the residual that found no place, names of what starts anew


def _moved(old: Part, new: Part, spec: Spec, device: torch.device) -> Moved:
    """The state of one part after a change of its compressor."""
    residual = states.carried(old.state, spec)
    try:
        loaded = states.load(new.state, states.state_dict(old.state))
    except BadConfiguration:
        # Another kind of state: only what both carry is kept.
        pass
    else:
        kept = states.carried(loaded, spec)
        # A residual of fewer bits rounds.
        rest = None if residual is None or kept is None else residual.to(device).float() - kept.to(device).float()
        return loaded, rest, ()
    if residual is None:
        return new.state, None, _other_entries(old.state)
    return (*states.carry(new.state, spec, residual.to(device, torch.float32)), _other_entries(old.state))


def _laid(mean: Tensor, new: Part, spec: Spec) -> Moved:
    """The state of one part with the mean residual; second rounds, which compress means again, start empty."""
    if new.round == "second":
        return new.state, None, ()
    return (*states.carry(new.state, spec, mean[new.start : new.stop]), ())


def _mean(lane: Lane, parts: Sequence[Part]) -> Tensor:
    """What all ranks' residuals would add to the mean over ranks (a collective call, unless no rank carries anything)."""
    spec, size = lane.group.spec, lane.link.size
    mine = torch.zeros(spec.numel, dtype=torch.float32, device=lane.group.device)
    if not lane.stateful:
        return mine
    for part in parts:
        residual = states.carried(part.state, states.slice_spec(spec, part.start, part.stop))
        if residual is not None:
            mine[part.start : part.stop] += residual.to(mine.device) * (size / part.holders)
    return Pending(exact_mean(mine, size), lane.link).wait()[0]


def _other_entries(state: Any) -> list[str]:
    """The names of what a state holds beside what it carries."""
    return sorted({name.rsplit(".", 1)[-1] for name in states.state_dict(state)} - {"residual", "r"})


def _by_name(left: Tensor, spec: Spec) -> dict[str, Tensor]:
    """The non-zero pieces of a flat vector by parameter."""
    pieces = left.split([p.numel for p in spec.pieces])
    found: dict[str, list[Tensor]] = {}
    for piece, value in zip(spec.pieces, pieces):
        if bool(value.any()):
            found.setdefault(piece.name, []).append(value)
    return {name: torch.cat(values) for name, values in found.items()}
