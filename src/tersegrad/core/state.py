"""States as values: what checkpoints, bucket rebuilds and another world size do with them, written once.

A state is None or a frozen dataclass. What its fields mean for a buffer of ``numel`` coordinates:

- a one-dimensional tensor is aligned with the buffer: element i belongs to coordinate i;
- a :class:`~tersegrad.core.protocol.Spec` describes the same buffer;
- another dataclass is a state of the same buffer (a wrapper's inner state);
- :class:`Parts` holds the states of sub-buffers, and knows which pieces each of them has;
- anything else (numbers, strings, tensors of another rank) describes the buffer as a whole: slices keep it, :func:`concat`
  takes the first state's.

Because tensors are aligned, cutting a state by parameter is :func:`slice`, joining is :func:`concat`, and the mean over ranks that
another world size starts from is ``map_tensors(lambda *t: torch.stack(t).mean(0), *states)``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Piece, Spec


@dataclasses.dataclass(frozen=True)
class Parts:
    """States of sub-buffers: piece j of ``spec`` lies in part ``groups[j]``; each part concatenates its pieces in order.

    ``states`` holds (group, state) in ascending order, for the groups that have at least one coordinate.
    """

    spec: Spec
    groups: tuple[int, ...]
    states: tuple[tuple[int, Any], ...]

    def subspec(self, group: int) -> Spec:
        """The spec of one part's sub-buffer."""
        return Spec(tuple(p for p, g in zip(self.spec.pieces, self.groups) if g == group and p.numel), self.spec.dtype)

    def runs(self, group: int) -> tuple[tuple[int, int], ...]:
        """Where one part's pieces lie in the flat buffer; neighbours are joined."""
        runs: list[tuple[int, int]] = []
        at = 0
        for piece, g in zip(self.spec.pieces, self.groups):
            if g == group and piece.numel:
                if runs and runs[-1][1] == at:
                    runs[-1] = (runs[-1][0], at + piece.numel)
                else:
                    runs.append((at, at + piece.numel))
            at += piece.numel
        return tuple(runs)

    def local(self, group: int, start: int, stop: int) -> tuple[int, int]:
        """The range of one part's sub-buffer that coordinates start .. stop of the flat buffer hold."""
        before = [max(0, min(b, start) - a) for a, b in self.runs(group)]
        until = [max(0, min(b, stop) - a) for a, b in self.runs(group)]
        return sum(before), sum(until)


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(state):
        yield field.name, getattr(state, field.name)


def _is_state(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Spec))


def _aligned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def state_dict(state: Any, prefix: str = "") -> dict[str, Any]:
    """Every tensor and number of a nested state by its path, for a checkpoint; specs are left out: they are known."""
    entries: dict[str, Any] = {}
    if state is None:
        return entries
    if isinstance(state, Parts):
        for group, part in state.states:
            entries |= state_dict(part, f"{prefix}{group}.")
        return entries
    for name, value in _fields(state):
        if _is_state(value):
            entries |= state_dict(value, f"{prefix}{name}.")
        elif value is not None and not isinstance(value, Spec):
            entries[prefix + name] = value
    return entries


def load(template: Any, entries: Mapping[str, Any]) -> Any:
    """A state like ``template`` (a freshly initialised one) with the entries of :func:`state_dict`."""
    wanted = state_dict(template)
    if missing := sorted(wanted.keys() - entries.keys()):
        raise BadConfiguration(f"the saved state lacks {missing}: was it written by another compressor?")
    if extra := sorted(entries.keys() - wanted.keys()):
        raise BadConfiguration(f"the saved state has {extra}, which this compressor does not keep")
    for name, value in wanted.items():
        saved = entries[name]
        if isinstance(value, Tensor) and (not isinstance(saved, Tensor) or saved.shape != value.shape):
            raise BadConfiguration(f"{name} has shape {tuple(value.shape)}, the saved one {getattr(saved, 'shape', saved)}")

    def fill(state: Any, prefix: str) -> Any:
        if state is None:
            return None
        if isinstance(state, Parts):
            return dataclasses.replace(state, states=tuple((g, fill(part, f"{prefix}{g}.")) for g, part in state.states))
        changes: dict[str, Any] = {}
        for name, value in _fields(state):
            if _is_state(value):
                changes[name] = fill(value, f"{prefix}{name}.")
            elif value is not None and not isinstance(value, Spec):
                saved = entries[prefix + name]
                changes[name] = saved.to(value.device, value.dtype).clone() if isinstance(value, Tensor) else saved
        return dataclasses.replace(state, **changes)

    return fill(template, "")


def tensors(state: Any) -> list[Tensor]:
    """The aligned tensors of a nested state, in a fixed order.

    >>> tensors(None)
    []
    """
    return [value for value in state_dict(state).values() if _aligned(value)]


def nbytes(state: Any) -> int:
    """Memory that a state holds."""
    return sum(t.numel() * t.element_size() for t in state_dict(state).values() if isinstance(t, Tensor))


def _combine(states: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """One state from states of the same structure: ``join`` combines aligned tensors, specs and Parts field by field."""
    first = states[0]
    if any(type(s) is not type(first) for s in states):
        raise BadConfiguration(f"states of different kinds: {sorted({type(s).__name__ for s in states})}")
    if first is None:
        return None
    if isinstance(first, Parts):
        return join(states)
    changes: dict[str, Any] = {}
    for name, value in _fields(first):
        if _is_state(value) or value is None:
            changes[name] = _combine([getattr(s, name) for s in states], join)
        elif _aligned(value) or isinstance(value, Spec):
            changes[name] = join([getattr(s, name) for s in states])
    return dataclasses.replace(first, **changes)


def map_tensors(fn: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """The same state with ``fn`` applied to each aligned tensor (and to the same tensor of the other states)."""

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Parts):
            if any([g for g, _ in v.states] != [g for g, _ in first.states] for v in values):
                raise BadConfiguration("states of different groups")
            rows = zip(*(v.states for v in values))
            states = tuple((row[0][0], _combine([s for _, s in row], join)) for row in rows)
            return dataclasses.replace(first, states=states)
        return first if isinstance(first, Spec) else fn(*values)

    return _combine([state, *others], join)


def slice_spec(spec: Spec, start: int, stop: int) -> Spec:
    """The spec of coordinates start .. stop.

    >>> from tersegrad.core.protocol import Piece
    >>> slice_spec(Spec((Piece((4,), 0, 4, "a"), Piece((6,), 0, 6, "b"))), 3, 6).pieces
    (Piece(shape=(4,), start=3, stop=4, name='a'), Piece(shape=(6,), start=0, stop=2, name='b'))
    """
    return Spec(tuple(piece for piece, _ in _cut(spec, start, stop)), spec.dtype)


def _cut(spec: Spec, start: int, stop: int) -> list[tuple[Piece, int]]:
    """The pieces of coordinates start .. stop, each with the number of the piece it was cut from."""
    cut, at = [], 0
    for j, piece in enumerate(spec.pieces):
        low, high = max(start, at), min(stop, at + piece.numel)
        if low < high:
            cut.append((dataclasses.replace(piece, start=piece.start + low - at, stop=piece.start + high - at), j))
        at += piece.numel
    return cut


def _joined(pieces: Sequence[tuple[Piece, int]]) -> list[tuple[Piece, int]]:
    """Neighbours that continue the same tensor become one piece again."""
    joined: list[tuple[Piece, int]] = []
    for piece, group in pieces:
        last, last_group = joined[-1] if joined else (None, -1)
        same = last is not None and (last.name, last.shape, last.stop, last_group) == (
            piece.name,
            piece.shape,
            piece.start,
            group,
        )
        if last is not None and same and piece.start > 0:
            joined[-1] = (dataclasses.replace(last, stop=piece.stop), group)
        else:
            joined.append((piece, group))
    return joined


def concat_specs(specs: Sequence[Spec]) -> Spec:
    """The spec of buffers laid one after another; cut tensors grow together again."""
    if len({s.dtype for s in specs}) > 1:
        raise BadConfiguration(f"one buffer holds one dtype, got {sorted({str(s.dtype) for s in specs})}")
    return Spec(tuple(p for p, _ in _joined([(p, 0) for s in specs for p in s.pieces])), specs[0].dtype)


def slice(state: Any, start: int, stop: int) -> Any:
    """The state of coordinates start .. stop, as tensors of its own."""

    def join(values: Sequence[Any]) -> Any:
        (value,) = values
        if isinstance(value, Spec):
            return slice_spec(value, start, stop)
        if isinstance(value, Parts):
            cut = _cut(value.spec, start, stop)
            parts = []
            for group, part in value.states:
                low, high = value.local(group, start, stop)
                if low < high:
                    parts.append((group, slice(part, low, high)))
            pieces, groups = tuple(p for p, _ in cut), tuple(value.groups[j] for _, j in cut)
            return Parts(Spec(pieces, value.spec.dtype), groups, tuple(parts))
        return value[start:stop].clone()

    return _combine([state], join)


def concat(states: Sequence[Any]) -> Any:
    """The state of buffers laid one after another: the inverse of cutting with :func:`slice`."""
    if not states:
        raise BadConfiguration("concat needs at least one state")

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Spec):
            return concat_specs(values)
        if isinstance(values[0], Parts):
            pieces = _joined([(p, g) for v in values for p, g in zip(v.spec.pieces, v.groups)])
            groups = sorted({g for v in values for g, _ in v.states})
            parts = tuple((group, concat([s for v in values for g, s in v.states if g == group])) for group in groups)
            return Parts(Spec(tuple(p for p, _ in pieces), values[0].spec.dtype), tuple(g for _, g in pieces), parts)
        return torch.cat(list(values))

    return _combine(list(states), join)


def split(state: Any, spec: Spec) -> list[Any]:
    """One state per piece of ``spec``: what a checkpoint stores under each parameter's name."""
    ends = [0]
    for piece in spec.pieces:
        ends.append(ends[-1] + piece.numel)
    return [slice(state, a, b) for a, b in itertools.pairwise(ends)]
