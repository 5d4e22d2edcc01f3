"""Exchange states by parameter name: what a checkpoint holds, and how it is read back on the same or another world size.

One rank saves, for each round of its exchange (``first``, ``second``), for each parameter and each range ``"start:stop"`` of its elements
that the rank keeps a state for, the entries of that state. All-gather and the first round of two-shot keep whole parameters on every
rank, the second round of two-shot a range on one rank, and hierarchical exchanges ranges on one rank of each node.

Reading gives every element the mean over the ranks that saved it: of a rank's own state, exactly what it saved; of all ranks' states, the
mean of their residuals, or the one that there is. All tensors are copies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Piece, Spec
from tersegrad.core.state import slice_spec
from tersegrad.core.text import require
from tersegrad.exchange import Exchange, Part

Entries = Mapping[str, Any]
Saved = dict[str, dict[str, dict[str, Entries]]]  # round -> parameter -> "start:stop" -> entries


def public(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank's part of a state says of the run that saved it."""
    facts: dict[str, Any] = json.loads(part["public"])
    return facts


def own_part(state_dict: Mapping[str, Any], rank: int, size: int) -> list[Mapping[str, Any]]:
    """The part of one rank, of a state that as many ranks saved."""
    key = f"rank{rank}"
    sizes = sorted({int(public(part)["size"]) for part in state_dict.values()})
    if key not in state_dict or sizes != [size]:
        raise BadConfiguration(
            f"the state has {sorted(state_dict)} of {sizes} ranks, this is {key} of {size}: for another world size "
            "pass all ranks' states to load_state_dicts"
        )
    return [state_dict[key]]


def needed_parts(state_dicts: Sequence[Mapping[str, Any]], rank: int, size: int) -> list[Mapping[str, Any]]:
    """What this rank reads of the states of all ranks: its own part, or on another world size everyone's."""
    ranks = {key: value for state_dict in state_dicts for key, value in state_dict.items()}
    parts = sorted(ranks.values(), key=lambda part: int(public(part)["rank"]))
    require(bool(parts), "there is no state to load")
    before = int(public(parts[0])["size"])
    if len(parts) == 1 or before == size:
        return own_part(ranks, rank, size)
    present = [int(public(part)["rank"]) for part in parts]
    require(present == list(range(before)), f"the state of {before} ranks is needed in full, got ranks {present}")
    return parts


def save(exchange: Exchange[Any], state: Any, spec: Spec, rank: int, size: int) -> Saved:
    """The entries of one rank's state; what keeps nothing is left out."""
    return save_parts([(part, slice_spec(spec, part.start, part.stop)) for part in exchange.parts(state, spec, rank, size)])


def save_parts(parts: Sequence[tuple[Part, Spec]]) -> Saved:
    """The entries of states whose specs are given."""
    pieces: dict[tuple[str, str], list[tuple[Piece, Any]]] = {}
    for part, spec in parts:
        for piece, state in zip(spec.pieces, states.split(part.state, spec)):
            pieces.setdefault((part.round, piece.name), []).append((piece, state))
    saved: Saved = {}
    for (round_, name), found in pieces.items():
        for start, stop, state in _runs(found):
            if entries := states.state_dict(state):
                saved.setdefault(round_, {}).setdefault(name, {})[f"{start}:{stop}"] = entries
    return saved


def restore(exchange: Exchange[Any], fresh: Any, spec: Spec, rank: int, size: int, saved: Sequence[Saved]) -> Any:
    """A state like ``fresh`` with what the given ranks saved; ``fresh`` itself where nobody kept anything (one node has no peers)."""
    if not any(parameters for one in saved for parameters in one.values()):
        return fresh
    parts = exchange.parts(fresh, spec, rank, size)
    loaded = [restore_part(part, slice_spec(spec, part.start, part.stop), saved) for part in parts]
    return exchange.join(loaded, spec, rank, size)


def restore_part(part: Part, spec: Spec, saved: Sequence[Saved]) -> Any:
    """The state of one part, whose spec is given, with what the given ranks saved of its round."""
    if not spec.pieces:
        return part.state
    loaded = []
    for piece, template in zip(spec.pieces, states.split(part.state, spec), strict=True):
        ranges = [ranges for one in saved if (ranges := one.get(part.round, {}).get(piece.name))]
        try:
            loaded.append(states.load(template, _mean(ranges, piece.start, piece.stop)))
        except BadConfiguration as error:
            raise BadConfiguration(f"the state of {piece.name}: {error}") from None
    return states.load(part.state, states.state_dict(states.concat(loaded, [Spec((piece,)) for piece in spec.pieces])))


def _runs(found: Sequence[tuple[Piece, Any]]) -> list[tuple[int, int, Any]]:
    """(start, stop, state) of one parameter, neighbours joined: what is saved does not depend on how an exchange cuts."""
    runs: list[tuple[int, int, list[tuple[Piece, Any]]]] = []
    for piece, state in sorted(found, key=lambda f: f[0].start):
        if runs and runs[-1][1] == piece.start:
            start, _, joined = runs[-1]
            joined.append((piece, state))
            runs[-1] = (start, piece.stop, joined)
        else:
            runs.append((piece.start, piece.stop, [(piece, state)]))
    return [
        (start, stop, states.concat([s for _, s in joined], [Spec((p,)) for p, _ in joined])) for start, stop, joined in runs
    ]


def _mean(saved: Sequence[Mapping[str, Entries]], start: int, stop: int) -> dict[str, Any]:
    """Entries for elements start .. stop: of each element the mean over the ranks that have it; else the first rank's value."""
    overlapping = []
    for ranges in saved:
        for key, entries in ranges.items():
            a, b = (int(end) for end in key.split(":"))
            if a < stop and start < b:
                overlapping.append((a, b, entries))
    if not overlapping:
        return {}
    joined: dict[str, Any] = dict(overlapping[0][2])
    for name, value in joined.items():
        if not isinstance(value, Tensor) or value.dim() != 1:
            continue
        total = torch.zeros(stop - start, dtype=torch.float64, device=value.device)
        count = torch.zeros(stop - start, dtype=torch.int64, device=value.device)
        for a, b, entries in overlapping:
            low, high = max(a, start), min(b, stop)
            total[low - start : high - start] += entries[name][low - a : high - a]
            count[low - start : high - start] += 1
        if not bool((count > 0).all()):
            raise BadConfiguration(f"some of elements {start}..{stop} were not saved: pass the states of all ranks")
        joined[name] = (total / count).to(value.dtype)
    return joined
