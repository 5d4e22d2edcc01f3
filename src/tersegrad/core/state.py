"""States as values: what checkpoints, bucket rebuilds and another world size do with them, written once.

A state is None or a frozen dataclass. It holds no public facts: whoever cuts or joins states passes the specs of their buffers. What
the fields of a state mean for a buffer of ``numel`` coordinates:

- a one-dimensional tensor is aligned with the buffer: element i belongs to coordinate i; so is a :class:`~tersegrad.core.packed.Packed`
  vector, whose blocks are kept;
- another dataclass is a state of the same buffer (a wrapper's inner state);
- :class:`Parts` holds the states of sub-buffers, and says which of them each piece of the buffer lies in;
- a class variable ``carries`` names the aligned tensor that is added to the next gradient (a residual), see :func:`carried`;
- anything else (numbers, strings, tensors of another rank) describes the buffer as a whole: slices keep it, :func:`concat`
  takes the first state's.

Because tensors are aligned, cutting a state by parameter is :func:`slice` (or :func:`split`, for all parameters at once), joining is
:func:`concat`, and the mean over ranks that another world size starts from is
``map_tensors(lambda *t: torch.stack(t).mean(0), *states)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.packed import Packed, pack
from tersegrad.core.protocol import Piece, Spec


@dataclasses.dataclass(frozen=True)
class Parts:
    """States of sub-buffers: piece j of the buffer lies in part ``groups[j]``; each part concatenates its pieces in order.

    ``states`` holds (group, state) in ascending order, for the groups that have at least one coordinate.
    """

    groups: tuple[int, ...]
    states: tuple[tuple[int, Any], ...]


def subspecs(spec: Spec, groups: Sequence[int]) -> dict[int, Spec]:
    """The spec of each group's sub-buffer, by ascending group; groups without coordinates are left out."""
    pieces: dict[int, list[Piece]] = {}
    for piece, group in zip(spec.pieces, groups, strict=True):
        if piece.numel:
            pieces.setdefault(group, []).append(piece)
    return {group: Spec(tuple(pieces[group]), spec.dtype) for group in sorted(pieces)}


def runs(spec: Spec, groups: Sequence[int]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Where each group's pieces lie in the flat buffer, by ascending group; neighbours are joined.

    >>> runs(Spec(tuple(Piece((n,), 0, n) for n in (2, 3, 4))), (1, 1, 0))
    {0: ((5, 9),), 1: ((0, 5),)}
    """
    found: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for piece, group in zip(spec.pieces, groups, strict=True):
        if piece.numel:
            mine = found.setdefault(group, [])
            if mine and mine[-1][1] == at:
                mine[-1] = (mine[-1][0], at + piece.numel)
            else:
                mine.append((at, at + piece.numel))
        at += piece.numel
    return {group: tuple(found[group]) for group in sorted(found)}


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(state):
        yield field.name, getattr(state, field.name)


def _is_state(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _aligned(value: Any) -> bool:
    return isinstance(value, Packed) or (isinstance(value, Tensor) and value.dim() == 1)


def _open(value: Any) -> Any:
    """A field's value as it is worked with: what is packed, unpacked."""
    return value.unpacked() if isinstance(value, Packed) else value


def _close(value: Tensor, like: Any) -> Any:
    """A tensor in the form of the field that it is for."""
    return pack(value, like.lengths) if isinstance(like, Packed) else value


def state_dict(state: Any, prefix: str = "") -> dict[str, Any]:
    """Every tensor and number of a nested state by its path, for a checkpoint."""
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
        elif value is not None:
            entries[prefix + name] = _open(value)
    return entries


def load(template: Any, entries: Mapping[str, Any]) -> Any:
    """A state like ``template`` (a freshly initialised one) with the entries of :func:`state_dict`."""
    wanted = state_dict(template)
    if missing := sorted(wanted.keys() - entries.keys()):
        raise BadConfiguration(f"the saved state lacks {missing}: was it written by another compressor?")
    if extra := sorted(entries.keys() - wanted.keys()):
        raise BadConfiguration(f"the saved state has {extra}, which this compressor does not keep")
    for name, value in wanted.items():
        _check_entry(name, value, entries[name])

    def fill(state: Any, prefix: str) -> Any:
        if state is None:
            return None
        if isinstance(state, Parts):
            return dataclasses.replace(state, states=tuple((g, fill(part, f"{prefix}{g}.")) for g, part in state.states))
        changes: dict[str, Any] = {}
        for name, value in _fields(state):
            if _is_state(value):
                changes[name] = fill(value, f"{prefix}{name}.")
            elif value is not None:
                saved = entries[prefix + name]
                if isinstance(value, Packed):
                    changes[name] = pack(saved.to(value.device), value.lengths)
                else:
                    changes[name] = saved.to(value.device, value.dtype).clone() if isinstance(value, Tensor) else saved
        return dataclasses.replace(state, **changes)

    return fill(template, "")


def _check_entry(name: str, template: Any, saved: Any) -> None:
    """Raise unless a saved entry can stand in the place of ``template``: the same kind, shape and family of dtype, and finite."""
    if not isinstance(template, Tensor):
        if type(saved) is not type(template):
            raise BadConfiguration(f"{name} is a {type(template).__name__}, the saved one a {type(saved).__name__}")
        return
    if not isinstance(saved, Tensor) or saved.shape != template.shape:
        raise BadConfiguration(f"{name} has shape {tuple(template.shape)}, the saved one {getattr(saved, 'shape', saved)}")
    if template.is_floating_point() != saved.is_floating_point() or saved.is_complex():
        raise BadConfiguration(f"{name} is {template.dtype}, the saved one {saved.dtype}")
    if saved.is_floating_point() and not bool(torch.isfinite(saved).all()):
        raise BadConfiguration(f"{name} holds values that are not finite: the checkpoint is damaged, take an earlier one")


def tensors(state: Any) -> list[Tensor]:
    """The aligned tensors of a nested state, in a fixed order.

    >>> tensors(None)
    []
    """
    return [value for value in state_dict(state).values() if _aligned(value)]


def nbytes(state: Any) -> int:
    """Memory that a state holds."""
    if isinstance(state, Parts):
        return sum(nbytes(part) for _, part in state.states)
    if isinstance(state, (Packed, Tensor)):
        return state.nbytes
    return sum(nbytes(value) for _, value in _fields(state)) if _is_state(state) else 0


def _same_kind(states: Sequence[Any]) -> None:
    if len({type(s) for s in states}) > 1:
        raise BadConfiguration(f"states of different kinds: {sorted({type(s).__name__ for s in states})}")


def map_tensors(fn: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """The same state with ``fn`` applied to each aligned tensor (and to the same tensor of the other states)."""
    both = (state, *others)
    _same_kind(both)
    if state is None:
        return None
    if isinstance(state, Parts):
        if any([g for g, _ in other.states] != [g for g, _ in state.states] for other in others):
            raise BadConfiguration("states of different groups")
        rows = zip(*(one.states for one in both))
        return dataclasses.replace(state, states=tuple((row[0][0], map_tensors(fn, *(s for _, s in row))) for row in rows))
    changes: dict[str, Any] = {}
    for name, value in _fields(state):
        if _is_state(value):
            changes[name] = map_tensors(fn, *(getattr(one, name) for one in both))
        elif _aligned(value):
            changes[name] = _close(fn(*(_open(getattr(one, name)) for one in both)), value)
    return dataclasses.replace(state, **changes)


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
    """Pieces with their groups; neighbours that continue the same tensor become one piece again."""
    joined: list[tuple[Piece, int]] = []
    for piece, group in pieces:
        if joined and piece.start > 0:
            last, last_group = joined[-1]
            continues = (last.name, last.shape, last.stop, last_group) == (piece.name, piece.shape, piece.start, group)
            if continues:
                joined[-1] = (dataclasses.replace(last, stop=piece.stop), group)
                continue
        joined.append((piece, group))
    return joined


def concat_specs(specs: Sequence[Spec]) -> Spec:
    """The spec of buffers laid one after another; cut tensors grow together again."""
    if len({s.dtype for s in specs}) > 1:
        raise BadConfiguration(f"one buffer holds one dtype, got {sorted({str(s.dtype) for s in specs})}")
    return Spec(tuple(p for p, _ in _joined([(p, 0) for s in specs for p in s.pieces])), specs[0].dtype)


def slice(state: Any, spec: Spec, start: int, stop: int) -> Any:
    """The state of coordinates start .. stop of a buffer with ``spec``, as tensors of its own."""
    if state is None:
        return None
    if isinstance(state, Parts):
        groups = tuple(state.groups[j] for _, j in _cut(spec, start, stop))
        places, parts = runs(spec, state.groups), []
        subs = subspecs(spec, state.groups)
        for group, part in state.states:
            low = sum(max(0, min(b, start) - a) for a, b in places[group])
            high = sum(max(0, min(b, stop) - a) for a, b in places[group])
            if low < high:
                parts.append((group, slice(part, subs[group], low, high)))
        return Parts(groups, tuple(parts))
    changes: dict[str, Any] = {}
    for name, value in _fields(state):
        if _is_state(value):
            changes[name] = slice(value, spec, start, stop)
        elif _aligned(value):
            changes[name] = value.cut(start, stop) if isinstance(value, Packed) else value[start:stop].clone()
    return dataclasses.replace(state, **changes)


def split(state: Any, spec: Spec) -> list[Any]:
    """One state per piece of ``spec``, as tensors of their own: what a checkpoint stores under each parameter's name."""
    if state is None:
        return [None] * len(spec.pieces)
    if isinstance(state, Parts):
        held = dict(state.states)
        queues = {g: iter(split(held[g], sub)) for g, sub in subspecs(spec, state.groups).items() if g in held}
        return [
            Parts((g,), ((g, next(queues[g])),)) if piece.numel and g in queues else Parts((g,), ())
            for piece, g in zip(spec.pieces, state.groups, strict=True)
        ]
    columns: dict[str, Sequence[Any]] = {}
    for name, value in _fields(state):
        if _is_state(value):
            columns[name] = split(value, spec)
        elif _aligned(value):
            columns[name] = _cuts(value, [p.numel for p in spec.pieces])
    return [
        dataclasses.replace(state, **{name: column[j] for name, column in columns.items()}) for j in range(len(spec.pieces))
    ]


def _cuts(value: Any, sizes: list[int]) -> list[Any]:
    """An aligned vector in pieces, as tensors of their own."""
    if not isinstance(value, Packed):
        return [part.clone() for part in value.split(sizes)]
    ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
    return [value.cut(end - size, end) for size, end in zip(sizes, ends)]


def concat(states: Sequence[Any], specs: Sequence[Spec]) -> Any:
    """The state of buffers laid one after another: the inverse of cutting with :func:`slice`; its spec is :func:`concat_specs`."""
    if not states:
        raise BadConfiguration("concat needs at least one state")
    _same_kind(states)
    first = states[0]
    if first is None:
        return None
    if isinstance(first, Parts):
        pieces = _joined([(p, g) for one, spec in zip(states, specs, strict=True) for p, g in zip(spec.pieces, one.groups)])
        found: dict[int, list[tuple[Any, Spec]]] = {}
        for one, spec in zip(states, specs, strict=True):
            subs = subspecs(spec, one.groups)
            for group, part in one.states:
                found.setdefault(group, []).append((part, subs[group]))
        parts = tuple((g, concat([s for s, _ in found[g]], [sub for _, sub in found[g]])) for g in sorted(found))
        return Parts(tuple(g for _, g in pieces), parts)
    changes: dict[str, Any] = {}
    for name, value in _fields(first):
        if _is_state(value):
            changes[name] = concat([getattr(s, name) for s in states], specs)
        elif _aligned(value):
            vectors = [getattr(s, name) for s in states]
            changes[name] = Packed.joined(vectors) if isinstance(value, Packed) else torch.cat(vectors)
    return dataclasses.replace(first, **changes)


def carried(state: Any, spec: Spec) -> Tensor | None:
    """What a state adds to the next gradient, by coordinate: the residual of error feedback, r of variance-based compression.

    None where nothing is carried.
    """
    if state is None:
        return None
    if isinstance(state, Parts):
        subs, places = subspecs(spec, state.groups), runs(spec, state.groups)
        found = {g: amount for g, part in state.states if (amount := carried(part, subs[g])) is not None}
        if not found:
            return None
        whole = next(iter(found.values())).new_zeros(spec.numel, dtype=torch.float32)
        for group, amount in found.items():
            for (a, b), share in zip(places[group], amount.split([b - a for a, b in places[group]])):
                whole[a:b] = share
        return whole
    name = getattr(state, "carries", None)
    if name is not None:
        residual: Tensor = _open(getattr(state, name))
        return residual
    nested = (carried(value, spec) for _, value in _fields(state) if _is_state(value))
    return next((amount for amount in nested if amount is not None), None)


def carry(state: Any, spec: Spec, amount: Tensor) -> tuple[Any, Tensor]:
    """The state with ``amount`` added to what it carries, and the part of ``amount`` that found no place (zero elsewhere)."""
    if state is None:
        return None, amount.clone()
    if isinstance(state, Parts):
        subs, places = subspecs(spec, state.groups), runs(spec, state.groups)
        left, parts = amount.clone(), []
        for group, part in state.states:
            share = torch.cat([amount[a:b] for a, b in places[group]])
            after, rest = carry(part, subs[group], share)
            parts.append((group, after))
            for (a, b), value in zip(places[group], rest.split([b - a for a, b in places[group]])):
                left[a:b] = value
        return dataclasses.replace(state, states=tuple(parts)), left
    name = getattr(state, "carries", None)
    if name is not None:
        held = getattr(state, name)
        before: Tensor = _open(held)
        wanted = before.float() + amount.to(before.device, torch.float32)
        after = _close(wanted.to(before.dtype), held)
        # What a residual of fewer bits rounds away.
        left = (wanted - _open(after).float()).to(amount.device, amount.dtype)
        return dataclasses.replace(state, **{name: after}), left
    for field, value in _fields(state):
        if _is_state(value) and carried(value, spec) is not None:
            after, left = carry(value, spec, amount)
            return dataclasses.replace(state, **{field: after}), left
    return state, amount.clone()
