"""What is compared: a setting is a line of text forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tersegrad
from experiments.advice.late import Late, Leaky
from tersegrad.advice import LADDER, Who
from tersegrad.core.protocol import Compressor


@dataclasses.dataclass(frozen=True)
class Setting:
    """How gradients (or, with ``local``, what workers learned alone) are exchanged."""

    label: str
    compressor: str
    exchange: str = "two_shot"
    local: str | None = None
    per_tensor: bool = False  # a message, hence a scale, per tensor

    def made(self) -> Compressor[Any]:
        """The compressor."""
        return tersegrad.parse(self.compressor, extra=(Late, Leaky))


def sub(omega: float) -> str:
    """Unbiased, without a state."""
    return f"subtractive_dithering(omega={omega:g})"


def trellis(omega: float) -> str:
    """The same with a trellis."""
    return f"dithered_trellis(omega={omega:g})"


def rounded(omega: float) -> str:
    """Unbiased by stochastic rounding, coded by scale classes; it has kernels for GPUs."""
    return f"random_sparse_dithering(omega={omega:g})"


def fed(alpha: float) -> str:
    """Sparse Dithering with error feedback."""
    return f"error_feedback(sparse_dithering(alpha={alpha:g}))"


def fed_trellis(alpha: float) -> str:
    """A trellis with error feedback: fewer bits for the same error."""
    return f"error_feedback(trellis(alpha={alpha:g}))"


QSGD = "qsgd(bits=4, bucket=128, norm=max)"
TOP = "error_feedback(top_k(fraction=0.01))"


def twice(label: str, compressor: str) -> Setting:
    """With a residual of its own in the second round, as ``two_shot`` had it."""
    return Setting(f"{label} twice", compressor, f"two_shot(second={compressor})")


def local(every: int, label: str, compressor: str, exchange: str = "two_shot") -> Setting:
    """Local steps; the mean of what was learned."""
    return Setting(f"H {every}, {label}", compressor, exchange, f"local_sgd(every={every})")


def further(every: int, omega: float, rate: float) -> Setting:
    """Local steps; a step along the mean of what was learned, ``rate`` times as long."""
    return Setting(
        f"H {every}, trellis {omega:g}, rate {rate:g}", trellis(omega), local=f"local_sgd(every={every}, lr={rate:g})"
    )


def fed_then(label: str, inner: str, omega: float) -> Setting:
    """Error feedback in the first round, and a second round of its own fineness."""
    return Setting(
        f"feedback {label}, then trellis {omega:g}", f"error_feedback({inner})", f"two_shot(second={trellis(omega)})"
    )


BASE = Setting("bf16", "bf16")
SETTINGS = (
    BASE,
    Setting("qsgd 4 bit", QSGD),
    *(Setting(f"trellis {w:g}", trellis(w)) for w in (0.25, 1, 2, 4, 16, 64)),
    *(Setting(f"feedback {a:g}", fed(a)) for a in (0.1, 0.25, 0.5)),
    *(twice(f"feedback {a:g}", fed(a)) for a in (0.1, 0.25, 0.5, 0.75)),
    Setting("top 1 %", TOP),
    twice("top 1 %", TOP),
    Setting("vgc 1.5", "vgc(alpha=1.5)", "all_gather"),
    Setting("subtractive 1", sub(1)),
    Setting("stochastic 4", rounded(4)),
    Setting("trellis 16, scale per tensor", trellis(16), per_tensor=True),
    Setting("trellis 4, then 1", trellis(4), f"two_shot(second={trellis(1)})"),
    *(
        Setting(f"feedback 0.5, then {words}", fed(0.5), f"two_shot(second={second})")
        for words, second in (("trellis 0.25", trellis(0.25)), ("trellis 2", trellis(2)), ("stochastic 4", rounded(4)))
    ),
    Setting("feedback 0.1, then stochastic 0.25", fed(0.1), f"two_shot(second={rounded(0.25)})"),
    local(2, "trellis 0.25", trellis(0.25)),
    *(local(4, words, text) for words, text in (("qsgd 4 bit", QSGD), ("trellis 0.25", trellis(0.25)), ("trellis 4", trellis(4)))),
    *(local(8, words, text) for words, text in (
        ("bf16", "bf16"), ("qsgd 4 bit", QSGD), ("trellis 0.25", trellis(0.25)), ("trellis 1", trellis(1)),
    )),
    local(8, "feedback 0.5 twice", fed(0.5), f"two_shot(second={fed(0.5)})"),
    *(local(30, words, text) for words, text in (
        ("bf16", "bf16"), ("qsgd 4 bit", QSGD), ("trellis 4", trellis(4)),
    )),
    local(30, "feedback 0.5 twice", fed(0.5), f"two_shot(second={fed(0.5)})"),
    *(local(60, f"trellis {w:g}", trellis(w)) for w in (0.25, 1)),
    local(120, "trellis 0.25", trellis(0.25)),
    # Further contenders at about 20 times fewer bytes.
    *(Setting(f"feedback {a:g}", fed(a)) for a in (0.15, 0.2, 0.3)),
    *(Setting(f"feedback trellis {a:g}", fed_trellis(a)) for a in (0.15, 0.25)),
    Setting("feedback trellis 0.15, then trellis 0.5", fed_trellis(0.15), f"two_shot(second={trellis(0.5)})"),
    Setting("feedback 0.8 bit", "error_feedback(sparse_dithering(bits=0.8), force=true)"),
    *(Setting(f"subtractive {w:g}", sub(w)) for w in (0.25, 4)),
    Setting("trellis 0.5", trellis(0.5)),
    Setting("stochastic 1", rounded(1)),
    local(2, "feedback 0.05", fed(0.05)),
    local(2, "feedback 0.1", fed(0.1)),
    local(2, "trellis 0.1", trellis(0.1)),
    local(3, "trellis 0.05", trellis(0.05)),
    local(4, "feedback 0.02", fed(0.02)),
    local(4, "trellis 0.05", trellis(0.05)),
)  # fmt: skip
# What the part *stages* chooses from, by optimiser, beside the rows of the advice: about 20 times fewer bytes, 100, and 1,000.
CANDIDATES: Mapping[Who, tuple[Setting, ...]] = {
    "adam": (
        Setting("feedback 0.35", fed(0.35)),
        Setting("feedback 0.3 rdo", "error_feedback(sparse_dithering(alpha=0.3, rdo=true))"),
        Setting("feedback aligned 0.3", "error_feedback(aligned(sparse_dithering(alpha=0.3)))"),
        fed_then("trellis 0.25", "trellis(alpha=0.25)", 0.25),
        fed_then("aligned trellis 0.25", "aligned(trellis(alpha=0.25))", 0.25),
        Setting("trellis 0.5", trellis(0.5)),
        *(further(2, w, r) for w, r in ((0.1, 1.25), (0.1, 1.5), (0.25, 1.25))),
        local(4, "trellis 0.05", trellis(0.05)),
        further(4, 0.05, 1.25),
        local(4, "trellis 1", trellis(1)),
        *(further(4, 1, r) for r in (1.25, 1.5)),
        local(2, "trellis 4", trellis(4)),
        further(2, 4, 1.25),
        Setting("H 4, subtractive 2, rate 1.25", sub(2), local="local_sgd(every=4, lr=1.25)"),
        further(6, 0.5, 1.25),
        local(8, "trellis 0.25", trellis(0.25)),
        *(further(8, w, 1.25) for w in (0.25, 1)),
        *(local(h, f"trellis {w:g}", trellis(w)) for h, w in ((24, 4), (30, 2), (40, 1), (60, 0.25))),
        *(further(h, w, 1.25) for h, w in ((24, 4), (30, 2), (40, 1), (60, 1))),
    ),
    "momentum": (
        *(Setting(f"trellis {w:g}", trellis(w)) for w in (0.5, 1)),
        local(2, "trellis 0.1", trellis(0.1)),
        local(2, "subtractive 0.25", sub(0.25)),
        local(3, "trellis 0.1", trellis(0.1)),
        local(4, "trellis 0.05", trellis(0.05)),
        local(4, "trellis 1", trellis(1)),
        further(4, 1, 1.25),
        local(2, "trellis 4", trellis(4)),
        local(3, "trellis 2", trellis(2)),
        local(4, "subtractive 2", sub(2)),
        local(6, "trellis 0.5", trellis(0.5)),
        local(8, "trellis 0.25", trellis(0.25)),
        *(local(h, f"trellis {w:g}", trellis(w)) for h, w in ((24, 4), (30, 2), (40, 1), (60, 0.25))),
        *(further(h, w, 1.25) for h, w in ((40, 1), (60, 1))),
    ),
}  # fmt: skip
# What the planner and "auto" choose from.
RUNGS = tuple(Setting(text, text) for text in LADDER)
# Delay alone: exact messages, in the first round only.
DELAYS = (
    *(Setting(f"late by {k}", f"late(steps={k})", "two_shot(second=identity)") for k in (1, 2, 4, 8)),
    *(Setting(f"leaky, mean age {k}", f"leaky(share={1 / (1 + k)!r})", "two_shot(second=identity)") for k in (1, 2, 4, 8)),
)
BY_LABEL = {setting.label: setting for setting in (*SETTINGS, *DELAYS)}
assert len(BY_LABEL) == len(SETTINGS) + len(DELAYS)
# The rows of the advice for 20, 100 and 1,000 times fewer bytes before the part *stages*, which come to every stage.
BEFORE: Mapping[Who, tuple[Setting, ...]] = {
    "adam": tuple(BY_LABEL[label] for label in ("feedback 0.25", "H 8, trellis 1", "H 60, trellis 1")),
    "momentum": tuple(BY_LABEL[label] for label in ("H 2, trellis 0.25", "H 8, trellis 1", "H 60, trellis 1")),
}
