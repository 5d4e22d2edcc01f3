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
    optimizer: str | None = None  # in place of the plan's

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
SENDERS = "all_gather(mean=senders)"
SIGNS = "sign_sgd(lr=0.0005, weight_decay=0.1, warmup=0.1, floor=0.1)"


def dithering(alpha: float, decay: float = 1.0) -> str:
    """Sparse Dithering with error feedback."""
    return f"error_feedback(sparse_dithering(alpha={alpha}){'' if decay == 1.0 else f', decay={decay}'})"


def tiles(k: int, decay: float = 1.0) -> str:
    """Signs of the k largest of every 4,096, with error feedback."""
    return f"error_feedback(chunk_top_k(k={k}, values=sign){'' if decay == 1.0 else f', decay={decay}'})"


def subtractive(omega: float) -> str:
    """Unbiased, without a state."""
    return f"subtractive_dithering(omega={omega})"


def noisy(omega: float) -> str:
    """The same with a trellis."""
    return f"dithered_trellis(omega={omega})"


METHODS = (
    # The first is what bytes are compared with.
    Method("bf16, every step", "every step", "bf16", local=None),
    Method("Sparse Dithering 0.75, every step", "every step", dithering(0.75), local=None),
    Method("VGC 1, every step", "every step", "vgc(alpha=1.0)", "all_gather", None),
    Method("DisTrO, every step", "every step", "distro", SENDERS, None, SIGNS),
    # The second family's first is what losses of local steps are compared with.
    Method("float32, local", "local, uncompressed", "identity"),
    Method("float32, DiLoCo", "local, uncompressed", "identity", local=DILOCO),
    Method("int8, local", "local, quantised", "int8"),
    Method("e3m0, local", "local, quantised", "e3m0"),
    Method("e3m0, DiLoCo", "local, quantised", "e3m0", local=DILOCO),
    Method("SparseLoCo", "SparseLoCo", "sparse_loco", "all_gather(mean=senders, clip=median)", "sparse_loco(every=H)"),
    Method("Sparse Dithering 0.5, local", "Sparse Dithering, local", dithering(0.5)),
    Method("Sparse Dithering 0.75, local", "Sparse Dithering, local", dithering(0.75)),
    Method("Sparse Dithering 0.85, local", "Sparse Dithering, local", dithering(0.85)),
)  # fmt: skip
# What else was tried where strengths were chosen (the plan "search").
CANDIDATES = (
    Method("dithering 0.6", "dithering", dithering(0.6)),
    Method("dithering 0.9", "dithering", dithering(0.9)),
    Method("dithering 0.75, decay 0.9", "dithering", dithering(0.75, 0.9)),
    Method("dithering 0.85, decay 0.9", "dithering", dithering(0.85, 0.9)),
    Method("dithering 0.9, then 0.6", "dithering", dithering(0.9), f"two_shot(second={dithering(0.6)})"),
    Method("dithering 0.85, then 0.7", "dithering", dithering(0.85), f"two_shot(second={dithering(0.7)})"),
    Method("dithering 0.95, then 0.7", "dithering", dithering(0.95), f"two_shot(second={dithering(0.7)})"),
    Method("dithering 0.75, momentum 0.5", "dithering", dithering(0.75), local="diloco(every=H, lr=0.7, momentum=0.5)"),
    Method("float32, momentum 0.5", "uncompressed", "identity", local="diloco(every=H, lr=0.7, momentum=0.5)"),
    Method("dithering 0.75, DiLoCo", "dithering", dithering(0.75), local=DILOCO),
    Method("dithering 0.95, all to all", "dithering", dithering(0.95), "all_gather"),
    Method("tiles 64", "tiles", tiles(64)),
    Method("tiles 128", "tiles", tiles(128)),
    Method("tiles 192", "tiles", tiles(192)),
    Method("tiles 128, decay 0.95", "tiles", tiles(128, 0.95)),
    Method("tiles 64, then 192", "tiles", tiles(64), f"two_shot(second={tiles(192)})"),
    Method("tiles 32, then 128", "tiles", tiles(32), f"two_shot(second={tiles(128)})"),
    Method("tiles 32, all to all", "tiles", tiles(32), "all_gather"),
    Method("tiles 32, all to all, senders, decay 0.95", "tiles", tiles(32, 0.95), SENDERS),
    Method("tiles 64, all to all, senders, decay 0.95", "tiles", tiles(64, 0.95), SENDERS),
    Method("SparseLoCo, k = 32", "tiles", "sparse_loco(k=32)", "all_gather(mean=senders, clip=median)", "sparse_loco(every=H)"),
    Method("trellis 0.75", "trellis", "error_feedback(trellis(alpha=0.75))"),
    Method("top-k 1/64, local", "top-k", "error_feedback(top_k(fraction=0.015625))", "all_gather"),
    Method("subtractive 1", "unbiased", subtractive(1)),
    Method("subtractive 3", "unbiased", subtractive(3)),
    Method("trellis, unbiased 2", "unbiased", noisy(2)),
    Method("trellis, unbiased 4", "unbiased", noisy(4)),
    Method("trellis, unbiased 4, momentum 0.5", "unbiased", noisy(4), local="diloco(every=H, lr=0.7, momentum=0.5)"),
    Method("trellis, unbiased 8, then 2", "unbiased", noisy(8), f"two_shot(second={noisy(2)})"),
    Method("subtractive 8, then dithering 0.6", "unbiased", subtractive(8), f"two_shot(second={dithering(0.6)})"),
    Method("subtractive 8, then dithering 0.75", "unbiased", subtractive(8), f"two_shot(second={dithering(0.75)})"),
    Method("subtractive 4, then dithering 0.75", "unbiased", subtractive(4), f"two_shot(second={dithering(0.75)})"),
    Method("dithering 0.75, then trellis 2", "unbiased", dithering(0.75), f"two_shot(second={noisy(2)})"),
    Method("dithering 0.75, H = 60", "dithering", dithering(0.75), local="local_sgd(every=60)"),
    Method("dithering 0.75, decay 0.8, rate 1.3", "dithering", dithering(0.75, 0.8), local="local_sgd(every=H, lr=1.3)"),
    Method("dithering 0.75, rate 1.5", "dithering", dithering(0.75), local="local_sgd(every=H, lr=1.5)"),
    Method("tiles 128, decay 0.8, rate 1.5", "tiles", tiles(128, 0.8), local="local_sgd(every=H, lr=1.5)"),
    Method("SparseLoCo, rate 0.7", "tiles", "sparse_loco", "all_gather(mean=senders, clip=median)", "sparse_loco(every=H, lr=0.7)"),
    Method("DisTrO, rate 0.001", "every step", "distro", SENDERS, None, SIGNS.replace("0.0005", "0.001")),
    Method("DisTrO, rate 0.0002", "every step", "distro", SENDERS, None, SIGNS.replace("0.0005", "0.0002")),
)  # fmt: skip
