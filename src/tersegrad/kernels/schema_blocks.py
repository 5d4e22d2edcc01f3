"""The operations of block quantisers (``spec/wire.md``, block quantisers); see ``schema.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from tersegrad.core.protocol import Context

RoundingRule = Literal["l2", "max", "nearest"]


class BlockKernels(Protocol):
    """Blocks of coordinates that share a step. Sums of squares are those of ``block_sum_squares``."""

    def quantise_blocks(
        self,
        x: Tensor,
        ctx: Context,
        steps: Tensor,
        codes: Tensor,
        *,
        rule: RoundingRule,
        block: int,
        levels: int,
        width: int,
        bfloat16: bool = False,
    ) -> None:
        """Write one step per block (4 bytes, or 2 as bfloat16) and one signed code of ``width`` bits per coordinate.

        ``rule``: ``l2`` and ``max`` round stochastically to multiples of norm / levels, ``nearest`` rounds to multiples of
        max / levels. ``steps`` and ``codes`` are uint8 of exactly the right length; with ``width=8`` the codes are int8 levels.
        Blocks are multiples of 8. A block with NaN or Inf gets the step NaN.
        """
        ...

    def dequantise_blocks(
        self,
        steps: Tensor,
        codes: Tensor,
        out: Tensor,
        *,
        block: int,
        width: int,
        bfloat16: bool = False,
        weight: float | None = None,
    ) -> Tensor:
        """``out = code * step``, or ``out += weight * (code * step)``; all NaN if any step is not finite."""
        ...

    def dequantise_messages(
        self,
        messages: Sequence[Tensor],
        out: Tensor,
        *,
        block: int,
        width: int,
        bfloat16: bool = False,
        weight: float = 1.0,
    ) -> Tensor:
        """``out`` = the sum of ``weight * (code * step)`` over messages (uint8: steps, then codes), in their order.

        The same bits as :meth:`dequantise_blocks` of the first, times the weight, and then of one after another, with the weight.
        """
        ...

    def split_blocks(
        self,
        x: Tensor,
        carry: Tensor,
        ctx: Context,
        steps: Tensor,
        codes: Tensor,
        left: Tensor,
        *,
        rule: RoundingRule,
        block: int,
        levels: int,
        width: int,
        bfloat16: bool = False,
        weight: float = 1.0,
    ) -> Tensor:
        """:meth:`quantise_blocks` of y = x + carry, and into ``left`` y minus ``weight * (code * step)``: each operation rounds.

        Whether all of ``left`` is finite (bool, 0-d); where not, it is undefined. ``left`` overlaps neither ``x`` nor ``carry``.
        """
        ...

    def powers_encode(self, x: Tensor, block: int, scales: Tensor, codes: Tensor) -> None:
        """A float32 scale per block and four bits per coordinate, as the wire has them (``spec/wire.md``, "e3m0"); both uint8."""
        ...

    def powers_decode(self, scales: Tensor, codes: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
        """What they stand for, or ``weight`` times that added to ``out``; all NaN if any scale is not finite."""
        ...
