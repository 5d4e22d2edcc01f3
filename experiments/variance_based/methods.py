"""The rows of the table: their names, the methods, the published numbers; variants where the paper leaves room; plans of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.variance_based import batched, remedies
from experiments.variance_based.batched import Method
from experiments.variance_based.factors import CodedPowerSGD
from experiments.variance_based.local import Local
from experiments.variance_based.network import Init
from experiments.variance_based.train import Config, Optimiser

# What the mean is sent with, where it gets more bits than what the workers send: its errors are not averaged over them.
SECOND = "two_shot(second=dithered_trellis(omega=0.25))"
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
    "top_k_0.01": batched.TopK(fraction=0.01),
    "power_sgd_4": batched.PowerSGD(rank=4),
    "power_sgd_4_coded": CodedPowerSGD(4, "dithered_trellis(omega=0.1)"),
    "power_sgd_8_coded": CodedPowerSGD(8, "dithered_trellis(omega=0.065)"),
    "power_sgd_16_coded": CodedPowerSGD(16, "dithered_trellis(omega=0.2)"),
    "dithering_0.95": batched.SparseDithering(alpha=0.95, scale="global"),
    "dithering_0.8": batched.SparseDithering(alpha=0.8, scale="global"),
    "dithering_chunk_0.8": batched.SparseDithering(alpha=0.8),
    "local_7": Local("local_sgd(every=7)"),
    "local_14": Local("local_sgd(every=14)"),
    "local_49": Local("local_sgd(every=49)"),
    "local_14_outer": Local("diloco(every=14)"),
    "local_7_growing": Local("local_sgd(every=7)", growing=1),
    "local_14_exact": Local("local_sgd(every=14)", "identity"),
    "local_14_second": Local("local_sgd(every=14)", "dithered_trellis(omega=2)", SECOND),
    "local_14_outer_exact": Local("diloco(every=14)", "identity"),
    "local_4_quadratic": Local("local_sgd(every=4)", growing=2, written=25),
    "local_4_quadratic_outer": Local("diloco(every=4)", growing=2, written=25),
    "local_5_linear_outer": Local("diloco(every=5)", growing=1, written=25),
    "local_2_power_sgd_16": Local("local_sgd(every=2)", low_rank=CodedPowerSGD(16, "dithered_trellis(omega=0.055)")),
    "local_7_outer_coarse": Local("diloco(every=7)", "dithered_trellis(omega=4)"),
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
    "top_k_0.01": "error feedback, top 1 %",
    "power_sgd_4": "PowerSGD, rank 4",
    "power_sgd_4_coded": "PowerSGD, rank 4, `dithered_trellis(omega=0.1)`",
    "power_sgd_8_coded": "PowerSGD, rank 8, `dithered_trellis(omega=0.065)`",
    "power_sgd_16_coded": "PowerSGD, rank 16, `dithered_trellis(omega=0.2)`",
    "dithering_0.95": "error feedback, Sparse Dithering, error 0.95",
    "dithering_0.8": "error feedback, Sparse Dithering, error 0.8",
    "dithering_chunk_0.8": "error feedback, Sparse Dithering by chunks, error 0.8",
    "local_7": "7 local steps, `dithered_trellis(omega=1)`",
    "local_14": "14 local steps, `dithered_trellis(omega=1)`",
    "local_49": "49 local steps, `dithered_trellis(omega=1)`",
    "local_14_outer": "14 local steps, Nesterov steps along their mean, `dithered_trellis(omega=1)`",
    "local_7_growing": "7 local steps and more as the rate falls, `dithered_trellis(omega=1)`",
    "local_4_quadratic": "4 local steps and more with the rate's inverse square, `dithered_trellis(omega=1)`",
    "local_4_quadratic_outer": "4 local steps and more with the rate's inverse square, Nesterov steps, `dithered_trellis(omega=1)`",
    "local_5_linear_outer": "5 local steps and more as the rate falls, Nesterov steps, `dithered_trellis(omega=1)`",
    "local_2_power_sgd_16": "2 local steps, PowerSGD, rank 16, `dithered_trellis(omega=0.055)`",
    "local_14_exact": "14 local steps, float32",
    "local_14_second": "14 local steps, `dithered_trellis(omega=2)`, their mean with `omega=0.25`",
    "local_7_outer_coarse": "7 local steps, Nesterov steps along their mean, `dithered_trellis(omega=4)`",
    "local_14_outer_exact": "14 local steps, Nesterov steps along their mean, float32",
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
class Variant:
    """A row's method read in another way, where the published text leaves room."""

    row: str
    label: str
    method: Method
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the run's configuration


def _qsgd_variants(bits: int, bucket: int) -> dict[str, Variant]:
    row, less = f"qsgd_{bits}bit", 2 ** (bits - 1) - 1
    return {
        f"{row}_less": Variant(
            row, f"{less} level{'s' * (less > 1)} instead of {less + 1}", batched.QSGD(bits=bits, bucket=bucket, levels=less)
        ),
        f"{row}_max": Variant(
            row, "largest magnitude instead of the L2 norm", batched.QSGD(bits=bits, bucket=bucket, norm="max")
        ),
    }


def _hybrid_variants(tau: float) -> dict[str, Variant]:
    row = f"hybrid_{tau:g}"
    return {
        f"{row}_after": Variant(row, "v corrected with r after the subtraction", batched.Hybrid(tau=tau, correction="after")),
        f"{row}_alone": Variant(row, "v not corrected", batched.Hybrid(tau=tau, correction="none")),
        f"{row}_decay": Variant(row, "v fades in steps that send, too", batched.Hybrid(tau=tau, decay=True)),
    }


VARIANTS: dict[str, Variant] = {
    "vgc_1.5_decay": Variant("vgc_1.5", "weight decay before compression", METHODS["vgc_1.5"], {"decay": "before"}),
    "vgc_1.5_all": Variant("vgc_1.5", "exponents over all components", batched.VGC(alpha=1.5, exponents="all")),
    "vgc_1.5_keep": Variant("vgc_1.5", "rounding errors kept", batched.VGC(alpha=1.5, residual="keep")),
    "vgc_1.5_small": Variant("vgc_1.5", "too small values kept", batched.VGC(alpha=1.5, residual="small")),
    "vgc_1.5_all_small": Variant(
        "vgc_1.5", "exponents over all, too small values kept", batched.VGC(alpha=1.5, exponents="all", residual="small")
    ),
    **_hybrid_variants(0.1),
    **_hybrid_variants(0.01),
    **_qsgd_variants(2, 128),
    **_qsgd_variants(3, 512),
    **_qsgd_variants(4, 512),
}
_PLAIN = {"momentum": 0.0}  # of the receiver, where workers have taken it already
# What might help VGC with momentum, and where runs are short; and what tells why the hybrid fails.
REMEDIES: dict[str, Variant] = {
    "vgc_2_lr0.1": Variant("vgc_2", "learning rate 0.1", METHODS["vgc_2"], {"lr": 0.1}),
    "vgc_2_lr0.05": Variant("vgc_2", "learning rate 0.05", METHODS["vgc_2"], {"lr": 0.05}),
    "vgc_2_corrected": Variant("vgc_2", "momentum before compression, masked", remedies.CorrectedVGC(alpha=2.0), _PLAIN),
    "vgc_2_zeta_0.99": Variant("vgc_2", "zeta = 0.99", batched.VGC(alpha=2.0, zeta=0.99)),
    "vgc_2_zeta_0.997": Variant("vgc_2", "zeta = 0.997", batched.VGC(alpha=2.0, zeta=0.997)),
    "power_sgd_8_coded_lr0.4": Variant("power_sgd_16_coded", "learning rate 0.4", METHODS["power_sgd_16_coded"], {"lr": 0.4}),
    "local_2_power_sgd_16_lr0.4": Variant(
        "local_2_power_sgd_16", "learning rate 0.4", METHODS["local_2_power_sgd_16"], {"lr": 0.4}
    ),
    "local_14_outer_lr0.002": Variant("local_14_outer", "learning rate 0.002", METHODS["local_14_outer"], {"lr": 0.002}),
    "hybrid_0.01_whole": Variant("hybrid_0.01", "all that waits at once, in multiples of tau", remedies.WholeHybrid(tau=0.01)),
}
VARIANTS |= REMEDIES
METHODS |= {name: variant.method for name, variant in VARIANTS.items()}


def method_for(name: str, workers: int) -> Method:
    """A method for so many workers: those that see only the mean must be told."""
    method = METHODS[name]
    if isinstance(method, (batched.Dense, batched.PowerSGD)):
        return dataclasses.replace(method, workers=workers)
    return method


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
            method_for(self.method, changes.get("workers", 8)),
            optimiser=self.optimiser,
            lr=lr,
            epochs=epochs,
            seed=self.seed,
            init=self.init,
            halve_every=epochs / 12 if momentum else 0.0,
            lr_warmup=min(2.0, epochs / 10) if momentum else 0.0,
        )
        given = VARIANTS[self.method].changes if self.method in VARIANTS else {}
        config = dataclasses.replace(base, **{**given, **changes})
        if isinstance(config.method, remedies.CorrectedVGC):
            # Weight decay keeps its weight: momentum would have repeated it 1 / (1 - momentum) times.
            return dataclasses.replace(config, weight_decay=config.weight_decay / (1 - config.method.momentum))
        return config


# The second experiment: sixteen workers, and images that move, of which there are few for so large a network.
RESNET: dict[str, Any] = {"workers": 16, "batch": 32, "weight_decay": 1e-4, "shifts": 8, "cosine": True, "halve_every": 0.0}
SWEEP = (0.1, 0.05, 0.2)  # learning rates for momentum without compression
ADAM_LR = 1e-3
DIGITS: dict[Optimiser, float] = {"adam": 0.0, "momentum": 0.05}  # learning rates of the small form

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
        Job("dithering_0.8"),
        Job("dithering_chunk_0.8"),
        *(Job(name, "momentum") for name in ("dithering_chunk_0.8", "dithering_0.8", "top_k_0.001", "power_sgd_4")),
    ],
    # The published length, --epochs 300: three seeds of the two runs that the claim is about, then what shorter runs hurt most.
    "long": [
        *(Job(name, seed=seed) for seed in range(3) for name in ("none", "vgc_1.5")),
        Job("hybrid_0.1"),
        Job("none", "momentum", lr=0.2),
    ],
    # Two more seeds of every row that a claim is about, in the order of the claims.
    "seeds": [
        *(Job("none", "momentum", seed, lr=0.2) for seed in (1, 2)),
        *(Job("vgc_2", "momentum", seed) for seed in (1, 2)),
        *(Job(name, seed=seed) for name in ("vgc_2", "vgc_1", "strom_0.1", "hybrid_0.1") for seed in (1, 2)),
        *(Job("qsgd_4bit", "momentum", seed) for seed in (1, 2)),
        *(Job(name, seed=seed) for name in ("hybrid_0.01", "qsgd_4bit", "top_k_0.001", "power_sgd_4") for seed in (1, 2)),
        *(Job(name, "momentum", seed) for name in ("hybrid_0.1", "strom_0.1") for seed in (1, 2)),
        *(Job(name, seed=seed) for name in ("strom_0.01", "qsgd_3bit", "qsgd_2bit", "strom_0.001") for seed in (1, 2)),
    ],
    # CIFAR-10: what helps VGC with momentum, why the hybrid fails with a small tau, and the rows with momentum that are published.
    "remedies": [
        *(Job(name, "momentum") for name in ("local_14", "vgc_2_lr0.05", "vgc_2_corrected", "vgc_2_zeta_0.99", "local_49")),
        Job("hybrid_0.01_whole"),
        Job("local_14"),
        *(Job(name, "momentum") for name in ("vgc_1", "hybrid_0.01", "vgc_2_lr0.1", "vgc_1.5")),
        *(Job("local_14", "momentum", seed) for seed in (1, 2)),
        *(Job("vgc_2_lr0.05", "momentum", seed) for seed in (1, 2)),
        *(Job("local_14", seed=seed) for seed in (1, 2)),
        *(Job("vgc_2_corrected", "momentum", seed) for seed in (1, 2)),
        *(Job("vgc_2_zeta_0.99", "momentum", seed) for seed in (1, 2)),
        *(Job("hybrid_0.01_whole", seed=seed) for seed in (1, 2)),
        *(Job("local_49", "momentum", seed) for seed in (1, 2)),
        *(Job(name, "momentum") for name in ("qsgd_2bit", "qsgd_3bit", "strom_0.01", "strom_0.001", "power_sgd_4")),
    ],
    # On CIFAR-10, one seed; the rows they are variants of are those of the plan "gpu".
    "variants": [
        *(Job(name) for name in VARIANTS if name.startswith("vgc_1.5")),
        *(Job(name) for name in VARIANTS if name.startswith("hybrid_0.1")),
        *(Job(name, "momentum") for name in VARIANTS if name.startswith("hybrid_0.1")),
        *(Job(name, "momentum") for name in ("vgc_1.5", "vgc_1.5_decay", "vgc_1.5_keep")),
        *(Job(name) for name in VARIANTS if name.endswith("_less")),
        *(Job(name, "momentum") for name in ("qsgd_2bit", "qsgd_3bit", *(n for n in VARIANTS if n.endswith("_less")))),
        *(Job(name) for name in VARIANTS if name.endswith("_max")),
        *(Job(name) for name in VARIANTS if name.startswith("hybrid_0.01") and name not in REMEDIES),
    ],
    # ResNet-50 on Tiny-ImageNet, 30 epochs: what the claim is about first, then the rows of the table, then further remedies.
    # Momentum's rate is that of the best run without compression.
    "resnet": [
        Job("none"),
        Job("vgc_2"),
        *(Job("none", "momentum", lr=lr) for lr in (0.8, 0.4, 0.1)),
        Job("local_14_outer"),
        Job("vgc_1.5"),
        Job("local_14_outer", "momentum", lr=0.1),
        Job("vgc_2", "momentum"),
        # A worker's own gradient is noisier than the mean of all, and Adam's steps along it are shorter for that.
        Job("local_14_outer_lr0.002"),
        Job("local_7_outer_coarse"),
        *(Job(name) for name in ("qsgd_4bit", "power_sgd_4", "hybrid_0.1", "vgc_1")),
        *(Job(name, "momentum") for name in ("qsgd_4bit", "power_sgd_4", "hybrid_0.1", "vgc_1.5", "vgc_1")),
        Job("vgc_2_zeta_0.99"),
        Job("vgc_2_corrected", "momentum"),
        Job("local_14"),
        *(Job(name, "momentum", lr=0.1) for name in ("local_7", "local_14", "local_7_growing", "local_49")),
        Job("vgc_2_zeta_0.99", "momentum"),
    ],
    # What might end within half a point of training without compression at 500 times fewer bytes, in order of importance.
    "resnet-best": [
        Job("local_2_power_sgd_16_lr0.4", "momentum"),
        Job("power_sgd_8_coded_lr0.4", "momentum"),
        *(Job(name, "momentum") for name in ("power_sgd_4", "local_2_power_sgd_16", "power_sgd_8_coded", "power_sgd_4_coded")),
        Job("power_sgd_8_coded"),
        *(Job(name) for name in ("local_4_quadratic_outer", "local_5_linear_outer", "local_4_quadratic")),
        Job("none", "momentum", seed=1),
    ],
    # The same for a few epochs (--epochs 6): what local steps lose by themselves and by their messages, and at which rates.
    "resnet-search": [
        *(
            Job(name)
            for name in ("none", "local_14_exact", "local_14", "local_14_outer_exact", "local_14_outer", "local_14_second")
        ),
        *(Job("none", "momentum", lr=lr) for lr in (0.1, 0.2, 0.4)),
        *(Job("local_14_exact", "momentum", lr=lr) for lr in (0.1, 0.2)),
        *(Job("local_14_outer", "momentum", lr=lr) for lr in (0.1, 0.05)),
        *(Job(name) for name in ("local_7_outer_coarse", "local_14_outer_lr0.002")),
    ],
    # The small form: every row of the paper, what stands beside them, and every variant, five seeds.
    "digits": [
        Job(name, optimiser, seed, lr)
        for seed in range(5)
        for optimiser, lr in DIGITS.items()
        for name in (
            *PUBLISHED["adam"],
            "top_k_0.01",
            "power_sgd_4",
            "dithering_0.95",
            "dithering_0.8",
            *(v for v in VARIANTS if v not in REMEDIES),
        )
    ],
    "quick": [Job("none"), Job("vgc_1.5"), Job("strom_0.1"), Job("hybrid_0.1"), Job("qsgd_4bit")],
}
