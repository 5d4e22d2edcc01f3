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


def signs(rate: float) -> str:
    """DisTrO's optimiser."""
    return f"sign_sgd(lr={rate}, weight_decay=0.1, warmup=0.1, floor=0.1)"


def dithering(alpha: float, decay: float = 1.0) -> str:
    """Sparse Dithering with error feedback."""
    return f"error_feedback(sparse_dithering(alpha={alpha}){'' if decay == 1.0 else f', decay={decay}'})"


def tiles(k: int, decay: float = 1.0) -> str:
    """Signs of the k largest of every 4,096, with error feedback."""
    return f"error_feedback(chunk_top_k(k={k}, values=sign){'' if decay == 1.0 else f', decay={decay}'})"


def subtractive(omega: float, scale: str = "") -> str:
    """Unbiased, without a state."""
    return f"subtractive_dithering(omega={omega}{f', scale={scale}' if scale else ''})"


def noisy(omega: float) -> str:
    """The same with a trellis."""
    return f"dithered_trellis(omega={omega})"


METHODS = (
    # The first is what bytes are compared with.
    Method("bf16, every step", "every step", "bf16", local=None),
    Method("Sparse Dithering 0.75, every step", "every step", dithering(0.75), local=None),
    Method("trellis 1, every step", "every step", noisy(1), local=None),
    Method("subtractive 1, every step", "every step", subtractive(1), local=None),
    Method("VGC 1, every step", "every step", "vgc(alpha=1.0)", "all_gather", None),
    Method("DisTrO, every step", "every step", "distro", SENDERS, None, signs(0.0005)),
    # The second family's first is what losses of local steps are compared with.
    Method("float32, local", "local, uncompressed", "identity"),
    Method("float32, DiLoCo", "local, uncompressed", "identity", local=DILOCO),
    Method("int8, local", "local, quantised", "int8"),
    Method("e3m0, local", "local, quantised", "e3m0"),
    Method("e3m0, DiLoCo", "local, quantised", "e3m0", local=DILOCO),
    Method("SparseLoCo", "SparseLoCo", "sparse_loco", "all_gather(mean=senders, clip=median)", "sparse_loco(every=H)"),
    Method("Sparse Dithering 0.5, local", "Sparse Dithering, local", dithering(0.5)),
    Method("Sparse Dithering 0.75, local", "Sparse Dithering, local", dithering(0.75)),
    Method("signs of 32, senders", "signs of tiles", tiles(32, 0.95), SENDERS),
    Method("trellis 4, local", "trellis, unbiased", noisy(4)),
    Method("trellis 6, local", "trellis, unbiased", noisy(6)),
    Method("trellis 0.5, H = 120", "trellis, unbiased", noisy(0.5), local="local_sgd(every=120)"),
)  # fmt: skip
# What else was tried where strengths were chosen (the plans "search" and "search-start"), and what may be asked for elsewhere.
CLIPPED = "all_gather(mean=senders, clip=median)"
CANDIDATES = (
    *(Method(f"DisTrO, every step, rate {r}", "every step", "distro", SENDERS, None, signs(r)) for r in (0.001, 0.002)),
    # Unbiased messages, without a state, and what outer optimiser goes with them.
    *(Method(f"trellis {w}, local", "unbiased", noisy(w)) for w in (1, 2, 8)),
    *(Method(f"trellis {w}, H = 60", "unbiased", noisy(w), local="local_sgd(every=60)") for w in (1, 2)),
    *(Method(f"trellis {w}, H = 120", "unbiased", noisy(w), local="local_sgd(every=120)") for w in (0.25, 1)),
    *(
        Method(f"trellis {w}, rate {lr}, momentum {m}", "unbiased", noisy(w), local=f"diloco(every=H, lr={lr}, momentum={m})")
        for w, lr, m in ((4, 0.7, 0.5), (4, 1, 0.3), (4, 0.5, 0.5), (6, 0.5, 0.5), (4, 0.4, 0.8))
    ),
    Method("trellis 0.25, H = 120, rate 0.8, momentum 0.4", "unbiased", noisy(0.25), local="diloco(every=120, lr=0.8, momentum=0.4)"),
    Method("trellis 8, then 2", "unbiased", noisy(8), f"two_shot(second={noisy(2)})"),
    *(Method(f"subtractive {w}, local", "unbiased", subtractive(w)) for w in (0.25, 3)),
    *(Method(f"subtractive {w}, one step", "unbiased", subtractive(w, "global")) for w in (4, 6, 8)),
    Method("subtractive 8, then dithering 0.6", "unbiased", subtractive(8), f"two_shot(second={dithering(0.6)})"),
    # Longer steps along the exact mean.
    *(Method(f"float32, local, rate {r}", "control", "identity", local=f"local_sgd(every=H, lr={r})") for r in (0.7, 1.25, 1.5, 2)),
    *(Method(f"trellis 4, local, rate {r}", "control", noisy(4), local=f"local_sgd(every=H, lr={r})") for r in (0.25, 0.5, 1.25, 1.5)),
    # How long rounds may be.
    *(Method(f"float32, H = {h}", "uncompressed", "identity", local=f"local_sgd(every={h})") for h in (60, 120, 240)),
    *(
        Method(f"float32, H = {h}, rate {lr}, momentum {m}", "uncompressed", "identity", local=f"diloco(every={h}, lr={lr}, momentum={m})")
        for h, lr, m in ((30, 0.7, 0.5), (30, 1, 0.3), (30, 0.5, 0.5), (60, 0.8, 0.4), (120, 0.8, 0.4), (120, 0.7, 0.6))
    ),
    # Few coordinates, averaged over their senders.
    *(Method(f"signs of {k}, senders", "tiles", tiles(k, 0.95), SENDERS) for k in (16, 64)),
    Method("signs of 64, senders, H = 60", "tiles", tiles(64, 0.95), SENDERS, "local_sgd(every=60)"),
    *(Method(f"SparseLoCo, k = {k}", "tiles", f"sparse_loco(k={k})", CLIPPED, "sparse_loco(every=H)") for k in (32, 128)),
    Method("SparseLoCo, H = 60", "tiles", "sparse_loco", CLIPPED, "sparse_loco(every=60)"),
    Method("SparseLoCo, rate 0.7", "tiles", "sparse_loco", CLIPPED, "sparse_loco(every=H, lr=0.7)"),
    Method("dithering 0.9, decay 0.95, senders", "tiles", dithering(0.9, 0.95), SENDERS),
    # Error feedback.
    *(Method(f"dithering {a}, local", "dithering", dithering(a)) for a in (0.1, 0.25)),
    *(Method(f"dithering {a}, H = 120", "dithering", dithering(a), local="local_sgd(every=120)") for a in (0.1, 0.3)),
    Method("dithering 0.5, decay 0.5, rate 1.3", "dithering", dithering(0.5, 0.5), local="local_sgd(every=H, lr=1.3)"),
    Method("error feedback, trellis 0.5", "dithering", "error_feedback(trellis(alpha=0.5))"),
)  # fmt: skip
