"""What to send, by optimiser and by how much less: the table that docs/choose.md shows and that every default comes from.

The rows were chosen on two or four tasks and held against the strongest others on two that played no part, with three seeds
(``experiments/advice``; those of federated clients in ``experiments/federated``); docs/choose.md says where they did not stand.
:data:`DEFAULT` is what examples and the trainer take unless told otherwise, :data:`LADDER` what the planner and ``attach(model, "auto")``
climb, :data:`FEDERATED` what Flower's clients send. Nothing is imported here, so that the command line may ask for it.

>>> print(row("adam", 100))
dithered_trellis(omega=1), two_shot, local_sgd(every=8)
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Who = Literal["adam", "momentum", "federated"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting and what it is for."""

    who: Who
    fewer: int  # about so many times fewer bytes than bf16 in every step; of federated clients' updates, than float32
    compressor: str
    exchange: str = "two_shot"  # empty for clients of a server
    local: str | None = None  # steps that workers take alone

    def __str__(self) -> str:
        return ", ".join(part for part in (self.compressor, self.exchange, self.local) if part)


TABLE: tuple[Row, ...] = (
    Row("adam", 4, "qsgd(bits=4, bucket=128, norm=max)"),
    Row("adam", 10, "error_feedback(sparse_dithering(alpha=0.1))"),
    Row("adam", 20, "error_feedback(sparse_dithering(alpha=0.25))"),
    Row("adam", 100, "dithered_trellis(omega=1)", local="local_sgd(every=8)"),
    Row("adam", 1000, "dithered_trellis(omega=1)", local="local_sgd(every=60)"),
    Row("momentum", 4, "qsgd(bits=4, bucket=128, norm=max)"),
    Row("momentum", 10, "dithered_trellis(omega=0.25)"),
    Row("momentum", 20, "dithered_trellis(omega=0.25)", local="local_sgd(every=2)"),
    Row("momentum", 100, "dithered_trellis(omega=1)", local="local_sgd(every=8)"),
    Row("momentum", 1000, "dithered_trellis(omega=1)", local="local_sgd(every=60)"),
    Row("federated", 40, "subtractive_dithering(omega=1)", ""),
    Row("federated", 100, "subtractive_dithering(omega=8)", ""),
)


def row(who: Who, fewer: float) -> Row:
    """The first row that saves as much, or the one that saves most."""
    own = [r for r in TABLE if r.who == who]
    return next((r for r in own if r.fewer >= fewer), own[-1])


DEFAULT = row("adam", 4).compressor
FEDERATED = row("federated", 40).compressor
# From exact to coarse, exchanges in every step. What an optimiser makes of them the planner does not know.
LADDER: tuple[str, ...] = (DEFAULT, row("adam", 10).compressor)
