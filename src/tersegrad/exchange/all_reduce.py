"""Torch's own all-reduce at full or half precision, as an exchange: what not to compress means.

The vector is cast, divided by the number of ranks and summed by the library, in an order of its own: all ranks get the same bits, but not
those of virtual ranks. A rank sends 2 (p-1)/p times the buffer in a ring; no all-reduce sends less. There is no state.

Error: that of the cast, and of the additions in that precision, as in torch's communication hooks of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tersegrad.core.protocol import Context, Spec, Stats
from tersegrad.exchange.steps import AllReduce, Part, Steps

Precision = Literal["float32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class AllReduceExchange:
    """Mean over ranks by the library's all-reduce."""

    dtype: Precision = "bf16"

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> None:
        return None

    def steps(
        self,
        x: Tensor,
        state: Any,
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[None]:
        mean = yield AllReduce(x.detach().reshape(-1).to(DTYPES[self.dtype]) * (1.0 / size))
        return mean.to(torch.float32), None

    def message_nbytes(self, spec: Spec) -> int:
        """Bytes of one rank's vector."""
        return spec.numel * DTYPES[self.dtype].itemsize

    def parts(self, state: Any, spec: Spec, rank: int, size: int) -> list[Part]:
        return []

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> None:
        return None
