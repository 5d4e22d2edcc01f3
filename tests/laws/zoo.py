"""Inputs that break compressors: not only Gaussian vectors."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (0, 1, 2, 63, 64, 65, 1000)


def gaussian(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def adversarial(d: int) -> dict[str, Tensor]:
    """Finite vectors of dimension d on which a guarantee must hold."""
    g = gaussian(d, 1)
    index = torch.arange(d, dtype=torch.float32)
    one_hot = torch.zeros(d)
    one_hot[d // 3 : d // 3 + 1] = -3.0
    one_big = torch.full((d,), 0.01)
    one_big[:1] = 100.0
    half_steps = torch.full((d,), 0.5 / 7)
    half_steps[::32] = 1.0
    return {
        "gaussian": g,
        "constant": torch.full((d,), 0.3),
        "alternating": 0.7 * (1 - 2 * (index % 2)),
        "one_hot": one_hot,
        "one_big": one_big,
        "half_steps": half_steps,
        "geometric": torch.pow(0.9, index % 400) * (1 - 2 * (index % 3 % 2)),
        "student_t": g / gaussian(d, 2).abs().add(0.05),
        "mostly_zero": torch.where(index % 200 == 7, g, torch.zeros(d)),
        "large": g.clamp(-3, 3) * 1e38,
        "small": g * 1e-30,
        "denormal": torch.full((d,), 1e-41) * torch.sign(g),
        "zero": torch.zeros(d),
    }
