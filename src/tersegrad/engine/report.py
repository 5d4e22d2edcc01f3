"""Counters of an engine, and the flat dict that users log."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING

from tersegrad.core import buffers
from tersegrad.engine.lane import Lane, Meters

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine

Report = dict[str, float | str]


@dataclasses.dataclass
class Totals:
    """What an engine counts."""

    steps: int = 0
    dropped: int = 0
    warmup: int = 0
    changes: int = 0
    left_behind: float = 0.0  # squared norm of residuals that changes could not carry over
    sent: int = 0
    intra_node: int = 0
    received: int = 0
    coordinates: int = 0
    seconds: float = 0.0  # in the integration, all in all
    error: float = 0.0
    power: float = 0.0
    meters: Meters = dataclasses.field(default_factory=Meters)


def sent_dense(engine: Engine) -> dict[str, str]:
    """The parameters that the next step sends dense, each with the reason."""
    found: dict[str, str] = {}
    below = engine.settings.dense_below
    for lane in engine.lanes:
        found |= lane.sent_exactly()
        for piece in lane.group.spec.pieces:
            if engine.warming_up:
                found[piece.name] = f"warm-up until step {engine.settings.warmup_steps}"
            elif not lane.scheme.compresses and (numel := math.prod(piece.shape)) < below:
                found[piece.name] = f"{numel} elements, fewer than dense_below={below}"
    return found


def report(engine: Engine) -> Report:
    """Counters since the start (or the last reset) as a flat dict; sizes are those of bytes that travelled."""
    t, first, second = engine.totals, engine.totals.meters.first, engine.totals.meters.second
    waited = sum(link.waited for link in engine.links)
    dense = sent_dense(engine)
    numels = {p.name: math.prod(p.shape) for lane in engine.lanes for p in lane.group.spec.pieces}
    own = [bits for lane in engine.lanes if (bits := _own_bits(lane)) is not None]
    coordinates = sum(lane.group.spec.numel for lane in engine.lanes)
    out: Report = {
        "compressor": _names({"none" if lane.scheme.compresses else str(lane.compressor) for lane in engine.lanes}),
        "exchange": engine.exchange,
        "steps": t.steps,
        "steps/dropped": t.dropped,
        "steps/warmup": t.warmup,
        "changes": t.changes,
        "changes/left_behind": t.left_behind,
        "bytes/sent": t.sent,
        "bytes/sent/intra_node": t.intra_node,
        "bytes/received": t.received,
        "bits_per_coordinate": 8 * first.nbytes / first.coordinates if first.coordinates else 0.0,
        "bits_per_coordinate/sent": 8 * t.sent / t.coordinates if t.coordinates else 0.0,
        "seconds/encode": first.encode + second.encode,
        "seconds/decode": first.decode + second.decode,
        "seconds/wire": waited,
        "seconds/other": max(0.0, t.seconds - first.seconds - second.seconds - waited),
        "dense/parameters": len(dense),
        "dense/coordinates": sum(numels.get(name, 0) for name in dense),
        "dense/why": "; ".join(sorted({reason.split(", ")[-1] for reason in dense.values()})),
        "state/bytes": sum(lane.memory for lane in engine.lanes),
        "buffers/bytes": buffers.waiting(),
        "groups": len(engine.lanes),
    }
    left_out = Counter(rank for lane in engine.lanes for _, rank in getattr(lane.exchange, "left_out", ()))
    if left_out:
        out["workers/left_out"] = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(left_out.items()))
    if own and coordinates:
        out["bits_per_coordinate"] = sum(own) / coordinates
    if t.power:
        out["relative_error"] = t.error / t.power
    if first.power:
        out["message_error"] = first.error / first.power
    if engine.exchange in ("two_shot", "all_gather"):
        out |= _cheaper(engine)
    return out | (_verdict(engine, waited) if t.steps else {})


def _names(texts: set[str]) -> str:
    return "; ".join(sorted(texts))


def _own_bits(lane: Lane) -> float | None:
    """Bits of one rank's message for an exchange that compresses by itself."""
    tell = getattr(lane.exchange, "message_nbytes", None)
    return None if tell is None else 8.0 * tell(lane.group.spec)


def _cheaper(engine: Engine) -> Report:
    """Which of the two exchanges would send fewer bytes, by the messages so far."""
    size, t = engine.links[-1].size, engine.totals
    message = t.meters.first.nbytes / t.steps if t.steps else 0.0
    estimates = {"all_gather": (size - 1) * message, "two_shot": 2 * (size - 1) / size * message}
    # At two ranks both send the same; all_gather then compresses once instead of twice.
    best = "all_gather" if estimates["all_gather"] <= estimates["two_shot"] else "two_shot"
    return {"cheaper_exchange": best} | {f"bytes/step/{name}": value for name, value in estimates.items()}


def _verdict(engine: Engine, waited: float) -> Report:
    """Whether compression pays, against a bf16 all-reduce: on this link if it was compared, else on which links."""
    t, size = engine.totals, engine.links[-1].size
    taken = t.seconds / t.steps
    saved = 2 * (size - 1) / size * 2 * t.coordinates - t.sent  # bytes, in all steps
    rate = 8 * saved / max(t.seconds - waited, 1e-9)
    out: Report = {"seconds/step": taken, "pays_below": max(0.0, rate)}
    if engine.dense_seconds is not None:
        out |= {f"seconds/step/{kind}": seconds for kind, seconds in engine.dense_seconds.items()}
        kind, dense = min(engine.dense_seconds.items(), key=lambda item: item[1])
        word = "pays" if taken < dense else "does not pay"
        out["verdict"] = (
            f"compression {word} here: {taken:.4f} s per step in the exchange, {kind} all-reduce takes {dense:.4f} s"
        )
    elif rate <= 0:
        out["verdict"] = "compression does not pay: a bf16 all-reduce would not send more bytes"
    else:
        out["verdict"] = (
            f"compression pays where a rank's link is slower than {rate / 1e6:.3g} Mbit/s; compare() tells for this one"
        )
    return out
