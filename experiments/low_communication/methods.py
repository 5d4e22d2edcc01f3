"""What is compared. A method is a line: compressor, exchange and local steps in their text forms, H standing for the steps of a round.

A line whose compressor this version does not have is left out, and the table says so.
"""

from __future__ import annotations

import dataclasses
import re

from tersegrad import recipes
from tersegrad.core.errors import BadConfiguration
from tersegrad.exchange import scheme
from tersegrad.integrations import local_sgd


@dataclasses.dataclass(frozen=True)
class Method:
    """One line of the comparison; ``local`` None: an exchange in every step."""

    label: str
    family: str
    compressor: str
    exchange: str = "two_shot"
    local: str | None = "local_sgd(every=H)"

    @property
    def gathers(self) -> bool:
        """Whether every worker's message goes to all others, instead of two rounds."""
        return self.exchange.startswith("all_gather")

    def local_steps(self, every: int) -> str | None:
        """The text form for rounds of so many steps."""
        return None if self.local is None else re.sub(r"\bH\b", str(every), self.local)

    def lacking(self) -> str:
        """Why this version cannot run it; nothing if it can."""
        try:
            recipes.parse(self.compressor)
            scheme(self.exchange)
            if self.local is not None:
                local_sgd.method(self.local_steps(30) or "")
        except BadConfiguration as error:
            return str(error).partition("\n")[0]
        return ""


DILOCO = "diloco(every=H, lr=0.7, momentum=0.9)"
METHODS = (
    # The first is what bytes are compared with.
    Method("bf16, every step", "every step", "bf16", local=None),
    Method("Sparse Dithering 0.1, every step", "every step", "error_feedback(sparse_dithering(alpha=0.1))", local=None),
    Method("Sparse Dithering 0.75, every step", "every step", "error_feedback(sparse_dithering(alpha=0.75))", local=None),
    Method("VGC 1, every step", "every step", "vgc(alpha=1.0)", "all_gather", None),
    # The second family's first is what losses of local steps are compared with.
    Method("float32, local", "local, uncompressed", "identity"),
    Method("float32, DiLoCo", "local, uncompressed", "identity", local=DILOCO),
    Method("int8, local", "local, quantised", "int8"),
    Method("int4, local", "local, quantised", "error_feedback(int4)"),
    Method("e3m0, DiLoCo", "local, quantised", "e3m0", local=DILOCO),
    Method("SparseLoCo", "SparseLoCo", "sparse_loco", "all_gather(mean=senders, clip=median)", "sparse_loco(every=H)"),
    Method("top-k 1/64, local", "top-k", "error_feedback(top_k(fraction=0.015625))", "all_gather"),
    Method("Sparse Dithering 0.1, local", "Sparse Dithering, local", "error_feedback(sparse_dithering(alpha=0.1))"),
    Method("Sparse Dithering 0.5, local", "Sparse Dithering, local", "error_feedback(sparse_dithering(alpha=0.5))"),
    Method("Sparse Dithering 0.75, local", "Sparse Dithering, local", "error_feedback(sparse_dithering(alpha=0.75))"),
    Method("Sparse Dithering 0.9, local", "Sparse Dithering, local", "error_feedback(sparse_dithering(alpha=0.9))"),
    Method("trellis 0.5, local", "trellis, local", "error_feedback(trellis(alpha=0.5))"),
    Method("trellis 0.75, local", "trellis, local", "error_feedback(trellis(alpha=0.75))"),
)  # fmt: skip
