"""Exchange states by parameter name: what a checkpoint holds, and how it is read back on the same or another world size.

One rank saves, for each round of its exchanges (``first``, ``second``, ``reduce``), for each parameter and each range ``"start:stop"``
of its elements that the rank keeps a state for, the entries of that state. All-gather and the first round of two-shot keep whole
parameters on every rank, the second round of two-shot a range on one rank, and hierarchical exchanges ranges on one rank of each node.

A rank that reads its own part gets exactly what it saved. Read from the parts of all ranks, every element gets the mean over the ranks
that saved it. Everything is checked and built before anything is assigned, and all tensors are copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.core.errors import BadCheckpoint, BadConfiguration
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.core.state import slice_spec
from tersegrad.engine.lane import Lane
from tersegrad.exchange import Part

FORMAT = 3
ROUNDS = ("first", "second", "reduce")
Entries = Mapping[str, Any]
Saved = dict[str, dict[str, dict[str, Entries]]]  # round -> parameter -> "start:stop" -> entries


@dataclasses.dataclass(frozen=True)
class Public:
    """What a rank's part says of the run that saved it."""

    kind: str
    rank: int
    size: int
    step: int
    seed: int
    settings: dict[str, Any]
    # names, compressor, exchange, place (rank and size in the process group), kept (ranges that were saved, by round)
    groups: list[dict[str, Any]]
    shapes: dict[str, list[int]]
    extra: dict[str, Any]

    def dumps(self) -> str:
        """One text, so that torch.distributed.checkpoint keeps it whole."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Around everything that looks into a checkpoint: whatever is wrong with it is one kind of error."""
    try:
        yield
    except BadCheckpoint:
        raise
    except BadConfiguration as error:
        raise BadCheckpoint(str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise BadCheckpoint(
            f"the saved state is damaged ({type(error).__name__}: {error}): take an earlier checkpoint"
        ) from error


def require(condition: bool, message: str) -> None:
    """Raise :class:`BadCheckpoint` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise BadCheckpoint(message)


def public(part: Any) -> Public:
    """The facts of a rank's part, checked."""
    require(
        isinstance(part, Mapping) and isinstance(part.get("public"), str), "a part of the saved state has no facts: is it ours?"
    )
    facts = json.loads(part["public"])
    require(isinstance(facts, dict), "the facts of the saved state are not a table")
    require(facts.pop("format", None) == FORMAT, "the state was saved in another format, by another version of tersegrad")
    found = Public(**facts)
    for name, most in (("rank", 1 << 16), ("size", 1 << 16), ("step", 1 << 32)):
        value = getattr(found, name)
        require(type(value) is int and 0 <= value < most, f"the saved {name} is {value!r}, it lies in 0..{most - 1}")
    require(found.rank < found.size, f"there is no rank {found.rank} of {found.size}")
    require(type(found.seed) is int, f"the saved seed is {found.seed!r}")
    Context(seed=found.seed)
    require(isinstance(found.extra, dict), "the further facts are not a table")
    for group in found.groups:
        place, kept = group["place"], group["kept"]
        at = isinstance(place, list) and len(place) == 2 and all(type(n) is int for n in place)
        require(
            at and 0 <= place[0] < place[1] <= found.size,
            f"a group of the saved state lies at {place!r}, not at a rank of a number of ranks",
        )
        require(
            all(isinstance(group[name], str) for name in ("compressor", "exchange")),
            "a group of the saved state has no compressor or no exchange",
        )
        counted = isinstance(kept, dict) and all(type(n) is int and n >= 0 for n in kept.values())
        require(counted, f"a group of the saved state kept {kept!r}, not numbers of ranges by round")
    return found


def check_whole(part: Mapping[str, Any], found: Public, further: Sequence[str]) -> None:
    """Raise unless a part holds exactly the ranges that its facts count; ``further``: entries that are not rounds."""
    unknown = sorted(part.keys() - {"public", *ROUNDS, *further})
    require(not unknown, f"the saved state has entries that nobody knows: {unknown}")
    for round_ in ROUNDS:
        saved = part.get(round_, {})
        require(isinstance(saved, Mapping), f"the entries of {round_} are not a table")
        counts = {name: len(ranges) for name, ranges in saved.items()}
        total = 0
        for number, group in enumerate(found.groups):
            kept = group["kept"].get(round_, 0)
            here = sum(counts.get(name, 0) for name in set(group["names"]))
            require(
                not kept or here == kept, f"{round_} of group {number} has {here} saved ranges, it had {kept}: some are lost"
            )
            total += kept
        require(sum(counts.values()) == total, f"{round_} has {sum(counts.values())} saved ranges, it had {total}")


def select(
    state_dicts: Sequence[Mapping[str, Any]], kind: str, rank: int, size: int, places: set[tuple[int, int]]
) -> list[Any]:
    """What a rank reads: its own part where rank, size and places in process groups agree, else the parts of all that saved."""
    require(all(isinstance(one, Mapping) for one in state_dicts), "a saved state is a dict by rank")
    keys = [key for one in state_dicts for key in one]
    require(bool(keys), "there is no state to load")
    require(len(keys) == len(set(keys)), f"a rank's state was given twice: {sorted(map(str, keys))}")
    parts = {key: value for one in state_dicts for key, value in one.items()}
    facts = {key: public(part) for key, part in parts.items()}
    for key, fact in facts.items():
        require(fact.kind == kind, f"the state was saved by {fact.kind}, this is {kind}: resume with what saved it")
        require(key == f"rank{fact.rank}", f"the state of rank {fact.rank} is stored under {key!r}")
    first = next(iter(facts.values()))
    for key, fact in facts.items():
        for name in ("size", "step", "seed", "settings", "shapes"):
            require(getattr(fact, name) == getattr(first, name), f"{key} was saved at another {name} than {next(iter(facts))}")
    own = facts.get(f"rank{rank}")
    if own is not None and own.size == size and {tuple(g["place"]) for g in own.groups} == places:
        return [parts[f"rank{rank}"]]
    before = first.size
    missing = sorted(set(range(before)) - {fact.rank for fact in facts.values()})
    require(
        not missing and len(parts) == before,
        f"the state has {sorted(parts)} of {before} ranks, this is rank {rank} of {size}: on another number or arrangement of ranks "
        f"pass all ranks' states to load_state_dicts ({missing} are missing)",
    )
    return [parts[f"rank{r}"] for r in range(before)]


# ------------------------------------------------------------------------------------------------------------- one lane's state


def save(lane: Lane) -> Saved:
    """The entries of one rank's state; what keeps nothing is left out."""
    pieces: dict[tuple[str, str], list[tuple[Piece, Any]]] = {}
    for part in lane.parts():
        spec = slice_spec(lane.group.spec, part.start, part.stop)
        for piece, state in zip(spec.pieces, states.split(part.state, spec)):
            pieces.setdefault((part.round, piece.name), []).append((piece, state))
    saved: Saved = {}
    for (round_, name), found in pieces.items():
        for start, stop, state in _runs(found):
            if entries := states.state_dict(state):
                saved.setdefault(round_, {}).setdefault(name, {})[f"{start}:{stop}"] = entries
    return saved


def restore(lane: Lane, saved: Sequence[Saved]) -> Any:
    """A state for a lane from what the given ranks saved; the lane's own where nobody kept anything (one node has no peers)."""
    parts = lane.parts()
    if not any(one.get(part.round) for one in saved for part in parts):
        return lane.state
    return lane.join([_restored(part, slice_spec(lane.group.spec, part.start, part.stop), saved) for part in parts])


def merge(lane: Lane, saved: Saved) -> Any:
    """The state of a lane with what was saved of parameters that it still has; the others keep their own."""
    merged = save(lane)
    for round_, parameters in merged.items():
        parameters.update({name: ranges for name, ranges in saved.get(round_, {}).items() if name in parameters})
    return restore(lane, [merged])


def _restored(part: Part, spec: Spec, saved: Sequence[Saved]) -> Any:
    if not spec.pieces:
        return part.state
    loaded = []
    for piece, template in zip(spec.pieces, states.split(part.state, spec), strict=True):
        ranges = [ranges for one in saved if (ranges := one.get(part.round, {}).get(piece.name))]
        try:
            loaded.append(states.load(template, _mean(ranges, piece)))
        except BadConfiguration as error:
            raise BadCheckpoint(f"the state of {piece.name}: {error}") from None
    whole = states.concat(loaded, [Spec((piece,)) for piece in spec.pieces])
    return states.load(part.state, states.state_dict(whole))


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


def _range(key: Any, entries: Any, piece: Piece) -> tuple[int, int]:
    """The ends of a saved range, checked against the parameter and against the tensors that it holds."""
    require(
        isinstance(key, str) and re.fullmatch(r"[0-9]{1,15}:[0-9]{1,15}", key) is not None,
        f"{key!r} is not a range of elements",
    )
    a, b = (int(end) for end in key.split(":"))
    numel = 1
    for n in piece.shape:
        numel *= n
    require(0 <= a < b <= numel, f"elements {key} do not lie in a parameter of {numel}")
    require(isinstance(entries, Mapping), "a saved range holds named entries")
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            require(value.numel() == b - a, f"{name} has {value.numel()} elements for the range {key}")
            require(
                value.is_floating_point() and bool(torch.isfinite(value).all()), f"{name} is not a finite floating-point tensor"
            )
    return a, b


def _mean(saved: Sequence[Mapping[str, Entries]], piece: Piece) -> dict[str, Any]:
    """Entries for a piece: of each element the mean over the ranks that have it; else the first rank's value."""
    start, stop = piece.start, piece.stop
    overlapping = []
    for ranges in saved:
        for key, entries in ranges.items():
            a, b = _range(key, entries, piece)
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
        require(bool((count > 0).all()), f"some of elements {start}..{stop} were not saved: pass the states of all ranks")
        joined[name] = (total / count).to(value.dtype)
    return joined
