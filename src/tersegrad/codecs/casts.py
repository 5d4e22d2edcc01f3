"""Casts: what compressors of one code per coordinate share where a backend adds up several messages at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Spec, has_fixed_size
from tersegrad.core.stateless import Stateless, exactly
from tersegrad.kernels.schema import Cast


@dataclasses.dataclass(frozen=True)
class Summed(Stateless):
    """Base of compressors whose messages, where they are of fixed size, the operation ``sum_casts`` reads."""

    cast: ClassVar[Cast]

    def block_of(self, numel: int) -> int:
        """How many coordinates share a scale, where that is not all or none of them."""
        return 0

    def sums_at_once(self, device: torch.device) -> bool:
        return kernels.faster(device, "sum_casts") and has_fixed_size(self)

    def read_sum(self, data: Sequence[Tensor], spec: Spec, out: Tensor, weight: float) -> None:
        for each in data:
            exactly(each, self.max_nbytes(spec))
        kernels.get(out.device).sum_casts(self.cast, data, out, weight, self.block_of(spec.numel))
