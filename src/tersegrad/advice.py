"""What to send, by optimiser and by how much less: the table that docs/choose.md shows and that every default comes from.

The rows for 20 times fewer bytes and more were chosen on six tasks by a rule that was written down before, and held against the strongest
others on two that played no part, with three seeds (``experiments/advice``; those of federated clients in ``experiments/federated``);
docs/choose.md says where they did not stand.
:data:`DEFAULT` is what examples and the trainer take unless told otherwise, :data:`LADDER` what the planner and ``attach(model, "auto")``
climb, :data:`FEDERATED` what Flower's clients send. Nothing is imported here, so that the command line may ask for it.

>>> print(row("adam", 100))
dithered_trellis(omega=1), two_shot, local_sgd(every=4, lr=1.25)
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
    Row("adam", 20, "dithered_trellis(omega=0.1)", local="local_sgd(every=2, lr=1.5)"),
    Row("adam", 100, "dithered_trellis(omega=1)", local="local_sgd(every=4, lr=1.25)"),
    Row("adam", 1000, "dithered_trellis(omega=1)", local="local_sgd(every=40)"),
    Row("momentum", 4, "qsgd(bits=4, bucket=128, norm=max)"),
    Row("momentum", 10, "dithered_trellis(omega=0.25)"),
    Row("momentum", 20, "dithered_trellis(omega=0.25)", local="local_sgd(every=2)"),
    Row("momentum", 100, "dithered_trellis(omega=2)", local="local_sgd(every=3)"),
    Row("momentum", 1000, "dithered_trellis(omega=1)", local="local_sgd(every=40)"),
    Row("federated", 40, "subtractive_dithering(omega=1)", ""),
    Row("federated", 100, "subtractive_dithering(omega=8)", ""),
)


def row(who: Who, fewer: float) -> Row:
    """The first row that saves as much, or the one that saves most."""
    own = [r for r in TABLE if r.who == who]
    return next((r for r in own if r.fewer >= fewer), own[-1])


DEFAULT = row("adam", 4).compressor
FEDERATED = row("federated", 40).compressor
# From more bits to fewer, exchanges in every step. The planner does not know the optimiser, so these are finer than the table's rows: with
# Adam and with momentum neither lost accuracy that could be told from the seeds (``experiments/advice/results/ladder.md``).
LADDER: tuple[str, ...] = ("qsgd(bits=6, bucket=128, norm=max)", "error_feedback(sparse_dithering(alpha=0.001))")
