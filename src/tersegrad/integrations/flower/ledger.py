"""What is counted: bytes by client and round, refused replies with their reasons, and how fast a client's link seems to be."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tersegrad.core.errors import BadConfiguration


@dataclasses.dataclass(frozen=True)
class Rejection:
    """One reply that was turned away, and why."""

    round: int
    node: int
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What one client received and sent in one round.

    Bytes are those of whole Flower messages, headers included; of a reply that was turned away as too large, those of its contents.
    """

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

    def note(self, node: int, **changes: Any) -> Parcel:
        """Change what is known of one client's parcel."""
        self.parcels[node] = dataclasses.replace(self.parcels[node], **changes)
        return self.parcels[node]

    def counts(self) -> Counter[str]:
        """Everything that is added up over rounds."""
        parcels = self.parcels.values()
        trained = [p for p in parcels if self.train]
        accepted = [p for p in trained if p.outcome == "accepted"]
        found = Counter(
            rounds=int(self.train),
            uplink_bytes=self.uplink,
            downlink_bytes=self.downlink,
            updates=len(accepted),
            frames=sum(p.frame for p in accepted),
            residuals_from_zero=sum(p.fresh for p in trained),
            silent=sum(p.outcome == "silent" for p in parcels),
            rejected=len(self.rejections),
        )
        found.update(f"models/{p.kind}" for p in parcels)
        found.update(f"rejected_{rejection.kind}" for rejection in self.rejections)
        return found


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


class Ledger:
    """The last ``history`` rounds in full, and totals of all rounds."""

    def __init__(self, history: int) -> None:
        if history < 1:
            raise BadConfiguration(f"history is a number of rounds, at least 1, got {history}")
        self.history = history
        self.rounds: list[RoundReport] = []
        self._past: Counter[str] = Counter()

    def add(self, report: RoundReport) -> None:
        """Begin a round; the oldest becomes part of the totals once there are too many."""
        self.rounds.append(report)
        while len(self.rounds) > self.history:
            self._past.update(self.rounds.pop(0).counts())

    def summary(self, clients: Mapping[int, ClientRecord], numel: int) -> dict[str, Any]:
        """Totals as a flat dict, for a logger."""
        total = Counter(self._past)
        for report in self.rounds:
            total.update(report.counts())
        updates = total["updates"]
        return {
            "rounds": total["rounds"],
            "clients": len(clients),
            "uplink_bytes": total["uplink_bytes"],
            "downlink_bytes": total["downlink_bytes"],
            "updates": updates,
            "uplink_bits_per_coordinate": 8 * total["frames"] / (updates * numel) if updates else 0.0,
            "models_as_snapshot": total["models/snapshot"],
            "models_as_difference": total["models/difference"],
            "models_held_already": total["models/same"],
            "residuals_from_zero": total["residuals_from_zero"],
            "residual_restarts": sum(c.restarts for c in clients.values()),
            "silent": total["silent"],
            "rejected": total["rejected"],
            **{name: count for name, count in sorted(total.items()) if name.startswith("rejected_")},
        }


def by_bandwidth(thresholds: Mapping[str, float], first: str | None = None) -> Callable[[ClientRecord], str]:
    """A rule for ``choose=``: the last budget whose threshold, in bytes per second, the client's measured link reaches.

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
