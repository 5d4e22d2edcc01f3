"""Exchange states by parameter name: what a checkpoint holds, and how it is read back on the same or another world size.

Saved for one rank: ``first`` maps a parameter to the entries of its own compressor state; ``second`` maps a parameter to the range
of it that this rank re-encodes in a two-shot exchange, with the entries for that range. All tensors are copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Spec
from tersegrad.core.state import slice_spec
from tersegrad.exchange.two_shot import TwoShotState, borders

Saved = dict[str, Any]


def save(state: Any, spec: Spec, rank: int, size: int) -> tuple[Saved, Saved]:
    """The entries of the first and of the second round, by parameter; stateless parts are left out."""
    if not isinstance(state, TwoShotState):
        return _by_name(state, spec), {}
    at = borders(spec.numel, size)
    own = slice_spec(spec, at[rank], at[rank + 1])
    second = {}
    for piece, part in zip(own.pieces, states.split(state.second, own)):
        if entries := states.state_dict(part):
            second[piece.name] = {"start": piece.start, "stop": piece.stop, "state": entries}
    return _by_name(states.concat(state.first), spec), second


def restore(fresh: Any, spec: Spec, rank: int, size: int, first: Mapping[str, Any], second: Mapping[str, Sequence[Any]]) -> Any:
    """A state like ``fresh`` with saved entries; ``second`` lists, by parameter, the ranges that were saved by any rank."""
    if not isinstance(fresh, TwoShotState):
        return _load(fresh, spec, [first.get(p.name, {}) for p in spec.pieces])
    at = borders(spec.numel, size)
    whole = _load(states.concat(fresh.first), spec, [first.get(p.name, {}) for p in spec.pieces])
    parts = []
    for part, a, b in zip(fresh.first, at, at[1:]):
        parts.append(states.load(part, states.state_dict(states.slice(whole, a, b))))
    own = slice_spec(spec, at[rank], at[rank + 1])
    wanted = [_range(p.name, second.get(p.name, ()), p.start, p.stop) for p in own.pieces]
    return TwoShotState(tuple(parts), _load(fresh.second, own, wanted))


def mean(entries: Sequence[Mapping[str, Any]]) -> Saved:
    """The mean over ranks of one parameter's entries; what is not a tensor is the first rank's."""
    merged = dict(entries[0])
    for name, value in merged.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            total = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
            for other in entries:
                total += other[name]
            merged[name] = (total / len(entries)).to(value.dtype)
    return merged


def _by_name(state: Any, spec: Spec) -> Saved:
    named = zip(spec.pieces, states.split(state, spec))
    return {piece.name: entries for piece, part in named if (entries := states.state_dict(part))}


def _load(fresh: Any, spec: Spec, entries: Sequence[Mapping[str, Any]]) -> Any:
    if not spec.pieces:
        return fresh
    parts = []
    for piece, template, saved in zip(spec.pieces, states.split(fresh, spec), entries, strict=True):
        try:
            parts.append(states.load(template, saved))
        except BadConfiguration as error:
            raise BadConfiguration(f"the state of {piece.name}: {error}") from None
    return states.load(fresh, states.state_dict(states.concat(parts)))


def _range(name: str, segments: Sequence[Any], start: int, stop: int) -> Saved:
    """Entries for elements start .. stop of a parameter, put together from the ranges that ranks saved."""
    if not segments:
        return {}
    overlapping = [s for s in sorted(segments, key=lambda s: int(s["start"])) if s["start"] < stop and start < s["stop"]]
    covered = sum(min(stop, s["stop"]) - max(start, s["start"]) for s in overlapping)
    if covered != stop - start:
        raise BadConfiguration(
            f"{name}: the saved second-round state lacks some of elements {start}..{stop}: pass all ranks' states"
        )
    joined: Saved = dict(overlapping[0]["state"])
    for key, value in joined.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            cut = [
                s["state"][key][max(start, s["start"]) - s["start"] : min(stop, s["stop"]) - s["start"]] for s in overlapping
            ]
            joined[key] = torch.cat(cut)
    return joined
