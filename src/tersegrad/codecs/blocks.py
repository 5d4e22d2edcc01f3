"""Packed blocks: what block quantisers of fixed length share where a backend does more in one pass than one message.

A message is the steps of all blocks, then the codes. On devices whose backend has the operations, several messages are added up at
once, and error feedback adds its residual and takes out what was sent while it quantises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.buffers import byte_buffer
from tersegrad.core.protocol import Context, Fed, Message, Spec
from tersegrad.core.stateless import Stateless, exactly
from tersegrad.kernels.schema_blocks import RoundingRule


class Layout(NamedTuple):
    """How blocks are quantised and laid out; the names are those of the operations."""

    rule: RoundingRule
    block: int
    levels: int
    width: int
    bfloat16: bool = False


@dataclasses.dataclass(frozen=True)
class PackedBlocks(Stateless):
    """Base of compressors whose messages are packed blocks."""

    def layout(self) -> Layout | None:
        """None where the messages of a configuration are not packed."""
        raise NotImplementedError

    def steps_nbytes(self, numel: int) -> int:
        """Bytes of the steps."""
        raise NotImplementedError

    def sums_at_once(self, device: torch.device) -> bool:
        return kernels.faster(device, "dequantise_messages") and self.layout() is not None

    def read_sum(self, data: Sequence[Tensor], spec: Spec, out: Tensor, weight: float) -> None:
        how = self.layout()
        assert how is not None
        for each in data:
            exactly(each, self.max_nbytes(spec))
        kernels.get(out.device).dequantise_messages(
            data, out, block=how.block, width=how.width, bfloat16=how.bfloat16, weight=weight
        )

    def splits(self, device: torch.device, weight: float) -> bool:
        return kernels.faster(device, "split_blocks") and self.layout() is not None

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool | Tensor]:
        how, x = self.layout(), fed.x
        assert how is not None
        data = byte_buffer(out, self.max_nbytes(spec), x.device)
        head = self.steps_nbytes(x.numel())
        steps, codes = data.split_with_sizes((head, data.numel() - head))
        operation = kernels.get(x.device).split_blocks
        good = operation(x, fed.residual, ctx, steps, codes, fed.left, **how._asdict(), weight=fed.weight)
        return Message(data if out is None else out, data.numel()), good
