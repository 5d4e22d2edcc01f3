"""What is counted: bytes by client and round, refused replies with their reasons, and how fast a client's link seems to be."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tersegrad.core.errors import BadConfiguration


class Refused(Exception):
    """A reply that takes no part in the round; ``kind`` is a short word to count by."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Rejection:
    """One reply that was turned away, and why."""

    round: int
    node: int
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What one client received and sent in one round. Bytes are those of whole Flower messages, headers included."""

    node: int
    kind: str  # how the model came: "snapshot", "difference", or "same" where the client held it already
    downlink: int
    uplink: int = 0
    frame: int = 0  # bytes of the update's frame, a part of uplink
    compressor: str = ""  # of the update
    seconds: float = 0.0  # that the client says it spent computing
    outcome: str = "silent"  # "accepted", "silent", or the kind of the rejection
    fresh: bool = False  # its residual began at zero


@dataclasses.dataclass
class RoundReport:
    """One broadcast and its replies; ``train`` tells training from evaluation."""

    round: int
    step: int
    train: bool
    parcels: dict[int, Parcel]
    rejections: list[Rejection] = dataclasses.field(default_factory=list)

    @property
    def uplink(self) -> int:
        return sum(p.uplink for p in self.parcels.values())

    @property
    def downlink(self) -> int:
        return sum(p.downlink for p in self.parcels.values())

    @property
    def accepted(self) -> int:
        return sum(p.outcome == "accepted" for p in self.parcels.values())


@dataclasses.dataclass
class ClientRecord:
    """What the server remembers of a client."""

    node: int
    sender: int  # the 16-bit number in its frames
    version: int | None = None  # of the model it holds, as far as the server knows
    heard: int | None = None  # the last step whose update was accepted
    seen: int = 0  # accepted replies
    rejected: int = 0
    restarts: int = 0  # times its residual began at zero again
    uplink: int = 0
    downlink: int = 0
    compressor: str = ""  # of its last accepted update
    bytes_per_second: float | None = None  # of its link, from below: waiting and polling count as transfer

    def timed(self, nbytes: int, seconds: float) -> None:
        """Note one exchange. Delays only make a link look slower, so the best of the past, slowly forgotten, is the estimate."""
        rate = nbytes / max(seconds, 1e-3)
        self.bytes_per_second = max(rate, 0.8 * (self.bytes_per_second or 0.0))


def by_bandwidth(thresholds: Mapping[str, float], first: str | None = None) -> Callable[[ClientRecord], str]:
    """A rule for ``choose=``: the last budget whose threshold, in bytes a second, the client's measured link reaches.

    ``first`` is for clients that were not measured yet (default: the budget with the smallest threshold).

    >>> rule = by_bandwidth({"thin": 0, "wide": 1e6})
    >>> rule(ClientRecord(1, 0)), rule(ClientRecord(1, 0, bytes_per_second=5e6))
    ('thin', 'wide')
    """
    ladder = sorted(thresholds.items(), key=lambda item: item[1])
    if not ladder:
        raise BadConfiguration("by_bandwidth needs at least one budget")

    def choose(client: ClientRecord) -> str:
        if client.bytes_per_second is None:
            return first or ladder[0][0]
        reached = [name for name, least in ladder if client.bytes_per_second >= least]
        return reached[-1] if reached else ladder[0][0]

    return choose


def summary(rounds: list[RoundReport], clients: Mapping[int, ClientRecord], numel: int) -> dict[str, Any]:
    """Totals as a flat dict, for a logger."""
    trained = [p for r in rounds if r.train for p in r.parcels.values()]
    accepted = [p for p in trained if p.outcome == "accepted"]
    refused = Counter(rejection.kind for r in rounds for rejection in r.rejections)
    models = Counter(p.kind for r in rounds for p in r.parcels.values())
    return {
        "rounds": sum(r.train for r in rounds),
        "clients": len(clients),
        "uplink_bytes": sum(r.uplink for r in rounds),
        "downlink_bytes": sum(r.downlink for r in rounds),
        "updates": len(accepted),
        "uplink_bits_per_coordinate": 8 * sum(p.frame for p in accepted) / (len(accepted) * numel) if accepted else 0.0,
        "models_as_snapshot": models["snapshot"],
        "models_as_difference": models["difference"],
        "models_held_already": models["same"],
        "residuals_from_zero": sum(p.fresh for p in trained),
        "residual_restarts": sum(c.restarts for c in clients.values()),
        "silent": sum(p.outcome == "silent" for r in rounds for p in r.parcels.values()),
        "rejected": sum(refused.values()),
        **{f"rejected_{kind}": count for kind, count in sorted(refused.items())},
    }
