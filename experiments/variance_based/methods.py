"""The rows of the table: their names, the methods, and the published numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.variance_based import batched
from experiments.variance_based.batched import Method
from experiments.variance_based.network import Init
from experiments.variance_based.train import Config, Optimiser

METHODS: dict[str, Method] = {
    "none": batched.Dense(),
    "strom_0.001": batched.Strom(tau=0.001),
    "strom_0.01": batched.Strom(tau=0.01),
    "strom_0.1": batched.Strom(tau=0.1),
    "vgc_1": batched.VGC(alpha=1.0),
    "vgc_1.5": batched.VGC(alpha=1.5),
    "vgc_2": batched.VGC(alpha=2.0),
    "hybrid_0.01": batched.Hybrid(tau=0.01, alpha=2.0),
    "hybrid_0.1": batched.Hybrid(tau=0.1, alpha=2.0),
    "qsgd_2bit": batched.QSGD(bits=2, bucket=128),
    "qsgd_3bit": batched.QSGD(bits=3, bucket=512),
    "qsgd_4bit": batched.QSGD(bits=4, bucket=512),
    "top_k_0.001": batched.TopK(fraction=0.001),
    "power_sgd_4": batched.PowerSGD(rank=4),
    "dithering_0.95": batched.SparseDithering(alpha=0.95),
}
LABELS = {
    "none": "none",
    "strom_0.001": "Strom, tau = 0.001",
    "strom_0.01": "Strom, tau = 0.01",
    "strom_0.1": "Strom, tau = 0.1",
    "vgc_1": "VGC, alpha = 1",
    "vgc_1.5": "VGC, alpha = 1.5",
    "vgc_2": "VGC, alpha = 2",
    "hybrid_0.01": "hybrid, tau = 0.01, alpha = 2",
    "hybrid_0.1": "hybrid, tau = 0.1, alpha = 2",
    "qsgd_2bit": "QSGD, 2 bit, bucket 128",
    "qsgd_3bit": "QSGD, 3 bit, bucket 512",
    "qsgd_4bit": "QSGD, 4 bit, bucket 512",
    "top_k_0.001": "error feedback, top 0.1 %",
    "power_sgd_4": "PowerSGD, rank 4",
    "dithering_0.95": "error feedback, Sparse Dithering, error 0.95",
}
# Test accuracy in per cent and compression ratio in words after 300 epochs (arXiv 1802.06058, table for CIFAR-10); None: not published.
PUBLISHED: dict[Optimiser, dict[str, tuple[float | None, float | None]]] = {
    "adam": {
        "none": (88.1, 1.0),
        "strom_0.001": (62.8, 88.5),
        "strom_0.01": (85.0, 230.1),
        "strom_0.1": (88.0, 6942.8),
        "vgc_1": (88.9, 120.7),
        "vgc_1.5": (88.9, 453.3),
        "vgc_2": (88.9, 913.4),
        "hybrid_0.01": (85.0, 1942.2),
        "hybrid_0.1": (88.2, 12822.4),
        "qsgd_2bit": (88.8, 12.3),
        "qsgd_3bit": (87.4, 14.4),
        "qsgd_4bit": (88.2, 11.0),
    },
    "momentum": {
        "none": (91.7, 1.0),
        "strom_0.001": (84.8, 6.6),
        "strom_0.01": (10.6, 990.7),
        "strom_0.1": (71.6, 8485.0),
        "vgc_2": (None, 383.6),
        "hybrid_0.01": (87.6, 983.9),
        "hybrid_0.1": (87.1, 12396.8),
        "qsgd_2bit": (90.8, 6.6),
        "qsgd_3bit": (91.4, 7.0),
        "qsgd_4bit": (91.7, 4.0),
    },
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a plan; its name holds what is not usual.

    ``lr`` 0 stands for the optimiser's own, which for momentum is that of the best uncompressed run; ``epochs`` 0 for those of the data.
    """

    method: str
    optimiser: Optimiser = "adam"
    seed: int = 0
    lr: float = 0.0
    init: Init = "lecun"
    epochs: int = 0

    @property
    def name(self) -> str:
        parts = [self.optimiser, self.method]
        parts += [f"lr{self.lr:g}"] if self.lr else []
        parts += [self.init] if self.init != "lecun" else []
        parts += [f"e{self.epochs}"] if self.epochs else []
        return "_".join([*parts, f"s{self.seed}"])

    def config(self, epochs: int, lr: float, **changes: Any) -> Config:
        """The run's configuration at a learning rate. Momentum halves its rate twelve times in a run, as published."""
        momentum = self.optimiser == "momentum"
        base = Config(
            METHODS[self.method],
            optimiser=self.optimiser,
            lr=lr,
            epochs=epochs,
            seed=self.seed,
            init=self.init,
            halve_every=epochs / 12 if momentum else 0.0,
            lr_warmup=min(2.0, epochs / 10) if momentum else 0.0,
        )
        if base.workers != 8:
            raise ValueError("the methods are written for 8 workers")
        return dataclasses.replace(base, **changes)


SWEEP = (0.1, 0.05, 0.2)  # learning rates for momentum without compression
ADAM_LR = 1e-3

PLANS: dict[str, list[Job]] = {
    # In order of importance: what must be shown first, then the table, then what stands beside it.
    "gpu": [
        Job("none"),
        Job("vgc_1.5"),
        Job("vgc_1"),
        Job("vgc_2"),
        Job("hybrid_0.1"),
        *(Job("none", "momentum", lr=lr) for lr in SWEEP),
        Job("none", seed=1),
        Job("vgc_1.5", seed=1),
        Job("none", seed=2),
        Job("vgc_1.5", seed=2),
        Job("strom_0.1"),
        Job("vgc_2", "momentum"),
        Job("hybrid_0.1", "momentum"),
        Job("strom_0.1", "momentum"),
        Job("qsgd_4bit", "momentum"),
        Job("hybrid_0.01"),
        Job("strom_0.01"),
        Job("strom_0.001"),
        Job("qsgd_2bit"),
        Job("qsgd_4bit"),
        Job("qsgd_3bit"),
        Job("top_k_0.001"),
        Job("power_sgd_4"),
        Job("dithering_0.95"),
    ],
    "quick": [Job("none"), Job("vgc_1.5"), Job("strom_0.1"), Job("hybrid_0.1"), Job("qsgd_4bit")],
}
