"""Counters of an engine, and the flat dict that users log."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING

from tersegrad.core import buffers, host
from tersegrad.engine.lane import Lane, Meters
from tersegrad.exchange.schemes import AllReduceScheme
from tersegrad.planner import Coding, Link, Measured, break_even, predict
from tersegrad.planner.trips import ExchangeName

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine

Report = dict[str, float | str]


@dataclasses.dataclass
class Totals:
    """What an engine counts."""

    steps: int = 0
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
    lost: host.Tally = dataclasses.field(default_factory=host.Tally)  # steps whose means were not finite

    @property
    def dropped(self) -> int:
        return self.lost.total


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
    state = sum(lane.memory for lane in engine.lanes)
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
        "state/bytes": state,
        # A step that is under way makes its states anew beside the committed ones.
        "state/bytes/peak": 2 * state,
        "buffers/bytes": buffers.waiting(),
        "groups": len(engine.lanes),
    }
    left_out = sum(
        (lane.exchange.left_out.steps for lane in engine.lanes if hasattr(lane.exchange, "left_out")), Counter[int]()
    )
    if left_out:
        out["workers/left_out"] = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(left_out.items()))
    if own and coordinates:
        out["bits_per_coordinate"] = sum(own) / coordinates
    elif t.sent and all(lane.scheme.compresses for lane in engine.lanes):
        size = engine.links[-1].size
        out["bits_per_coordinate"] = 8 * t.sent / t.coordinates * size / (2 * (size - 1))
    if t.power:
        out["relative_error"] = t.error / t.power
    if first.power:
        out["message_error"] = first.error / first.power
    if first.age is not None:
        out["message_age"] = first.age
    if engine.exchange in ("two_shot", "all_gather"):
        out |= _cheaper(engine)
    if engine.auto is not None:
        found = engine.auto
        out |= {
            "auto/choice": found.choice,
            "auto/why": found.why,
            "auto/decided": int(found.decided),
            "auto/decisions": found.decisions,
            "auto/seconds": found.seconds,
        }
    return out | (_verdict(engine, waited) if t.steps else {})


def _names(texts: set[str]) -> str:
    return "; ".join(sorted(texts))


def _own_bits(lane: Lane) -> float | None:
    """Bits of one rank's message for an exchange that compresses by itself."""
    tell = getattr(lane.exchange, "message_nbytes", None)
    told = None if tell is None else tell(lane.group.spec)
    return None if told is None else 8.0 * told


def _cheaper(engine: Engine) -> Report:
    """Which of the two exchanges would send fewer bytes, by the messages so far."""
    size, t = engine.links[-1].size, engine.totals
    first, second = t.meters.first, t.meters.second
    message, means = first.nbytes / t.steps if t.steps else 0.0, None
    # Where means are compressed otherwise, by the bits of those that this rank compressed.
    if second.coordinates and any(lane.scheme.again(lane.compressor) not in (None, lane.compressor) for lane in engine.lanes):
        means = Measured(Coding(), 8 * second.nbytes / second.coordinates * first.coordinates / t.steps, 0.0, True)
    gathered, shot = (
        predict(name, 1, size, Link(1.0), 8 * message, fixed_size=True, means=means).sent for name in ("all_gather", "two_shot")
    )
    # At two ranks both send the same; all_gather then compresses once instead of twice.
    best = "all_gather" if gathered <= shot else "two_shot"
    return {"cheaper_exchange": best, "bytes/step/all_gather": gathered, "bytes/step/two_shot": shot}


def _verdict(engine: Engine, waited: float) -> Report:
    """Whether compression pays, against a bf16 all-reduce: on this link if it was compared or measured, else on which links."""
    t, size = engine.totals, engine.links[-1].size
    taken, numel = t.seconds / t.steps, t.coordinates / t.steps
    name: ExchangeName = "reduce_scatter" if all(lane.scheme.shards for lane in engine.lanes) else "all_reduce"
    least_sent = predict(name, 1, size, Link(1.0), 16, fixed_size=True).sent * t.coordinates
    rate = break_even(least_sent, t.sent, t.seconds - waited)
    out: Report = {"seconds/step": taken, "pays_below": rate}
    link, exact = engine.link, engine.dense_seconds
    if link is not None:
        told = predict(name, round(numel), size, link, 16, fixed_size=True).seconds
        out |= {"link/bits_per_second": link.bits_per_second, "link/latency": link.latency, "seconds/step/bf16/predicted": told}
    if all(isinstance(lane.scheme, AllReduceScheme) for lane in engine.lanes):
        return out | {"verdict": "nothing is compressed: gradients go through torch's own all-reduce"}
    if exact is not None:
        out |= {f"seconds/step/{kind}": seconds for kind, seconds in exact.items()}
        kind, least = min(exact.items(), key=lambda item: item[1])
        word = "pays" if taken < least else "does not pay"
        out["verdict"] = (
            f"compression {word} here: {taken:.4f} s per step in the exchange, {kind} all-reduce takes {least:.4f} s"
        )
    elif link is not None:
        word = "pays" if taken < told else "does not pay"
        out["verdict"] = (
            f"compression {word} here, by the cost model: {taken:.4f} s per step in the exchange, a bf16 {name} over the measured link "
            f"would take {told:.4f} s"
        )
    elif rate <= 0:
        out["verdict"] = f"compression does not pay: a bf16 {name.replace('_', '-')} would not send more bytes"
    else:
        out["verdict"] = (
            f"compression pays where a rank's link is slower than {rate / 1e6:.3g} Mbit/s; compare() tells for this one"
        )
    return out
