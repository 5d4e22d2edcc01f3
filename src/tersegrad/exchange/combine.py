"""How workers' messages become one update, where that is not the plain mean: a gate, clipping, and means over senders.

Every rank has all messages and decides from them alone, so that all decide the same:

1. *gate*: a worker whose update is not finite, or whose norm exceeds ``gate`` times the median of all norms, is left out;
2. *clip*: per tensor, a worker's values are scaled down to the median over workers of their norms where they exceed it;
3. *mean*: over the workers that are left, or over those of them that sent a coordinate. With p workers that send different coordinates
   the second is p times the first. Sent is what does not decode to zero.

Medians are the lower of two middle ones. With compressors that send coefficients (``dct``) all of this happens to the coefficients.
Where nobody is left the update is NaN, and the step is dropped everywhere.

Citation: the outer step of SparseLoCo as run in the open in 2025 (clipping to the median norm, mean over senders); DeMo (mean over
senders of a coefficient).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import host
from tersegrad.core.protocol import Compressor, Context, Message, Spec, decode_sent, restore


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is done with the messages of all workers."""

    mean: Literal["workers", "senders"] = "workers"
    clip: Literal["median"] | None = None
    gate: float | None = None

    @property
    def plain(self) -> bool:
        """Whether it is the mean over workers, and nothing else."""
        return self == PLAIN


PLAIN = Rule()


@dataclasses.dataclass
class LeftOut:
    """How many steps each rank was left out of.

    >>> left_out = LeftOut()
    >>> for step in (7, 7, 8):
    ...     left_out.add(step, {1})
    >>> left_out.steps
    Counter({1: 2})
    """

    steps: Counter[int] = dataclasses.field(default_factory=Counter)  # by rank
    _latest: dict[int, int] = dataclasses.field(default_factory=dict)  # by rank

    def add(self, step: int, ranks: Set[int]) -> None:
        """Count the ranks that were left out of a step, once for a step that is repeated."""
        self.steps.update(rank for rank in ranks if self._latest.get(rank) != step)
        self._latest.update(dict.fromkeys(ranks, step))


def combine(
    rule: Rule,
    compressor: Compressor[Any],
    messages: Sequence[Message],
    spec: Spec,
    ctx: Context,
    device: torch.device,
    left_out: LeftOut | None = None,
) -> Tensor:
    """The update; ``left_out`` counts those that the gate kept out."""

    def sent(rank: int) -> Tensor:
        return decode_sent(compressor, messages[rank], spec, ctx.sent_by(rank))

    ranks = list(range(len(messages)))
    norms = _norms(sent, len(messages), spec) if rule.gate is not None or rule.clip == "median" else {}
    if rule.gate is not None:
        passed = _passing({rank: math.sqrt(sum(squares)) for rank, squares in norms.items()}, rule.gate)
        if left_out is not None:
            left_out.add(ctx.step, set(ranks) - passed)
        ranks = [rank for rank in ranks if rank in passed]
    total = torch.zeros(spec.numel, dtype=torch.float32, device=device)
    if not ranks:
        return total.fill_(math.nan)
    limits = _limits([norms[rank] for rank in ranks]) if rule.clip == "median" else []
    senders = torch.zeros(spec.numel, dtype=torch.float32, device=device) if rule.mean == "senders" else None
    for rank in ranks:
        values = sent(rank)
        for part, square, limit in zip(values.split([p.numel for p in spec.pieces]), norms.get(rank, ()), limits):
            if square > limit:
                part.mul_(math.sqrt(limit / square))
        total += values
        if senders is not None:
            senders += values != 0
    total = total.div_(senders.clamp_(min=1)) if senders is not None else total.mul_(1.0 / len(ranks))
    return restore(compressor, total, spec)


def _norms(sent: Callable[[int], Tensor], size: int, spec: Spec) -> dict[int, list[float]]:
    """By rank the squared norm of its values of each tensor, all in one read of their device."""
    sizes = [p.numel for p in spec.pieces]
    scalars: list[Tensor] = []
    for rank in range(size):
        values = sent(rank)
        squares = kernels.get(values.device).sum_squares
        scalars += [squares(part) for part in values.split(sizes) if part.numel()]
    known = iter(host.floats(*scalars) if scalars else ())
    return {rank: [next(known) if numel else 0.0 for numel in sizes] for rank in range(size)}


def _median(values: Sequence[float]) -> float:
    """The middle one, or the lower of two.

    >>> _median([3.0, 1.0, 2.0]), _median([4.0, 1.0, 3.0, 2.0])
    (2.0, 2.0)
    """
    return sorted(values)[(len(values) - 1) // 2]


def _passing(norms: dict[int, float], gate: float) -> set[int]:
    """The ranks whose norm is finite and not absurd."""
    finite = {rank: norm for rank, norm in norms.items() if math.isfinite(norm)}
    most = gate * _median(list(finite.values())) if finite else 0.0
    return {rank for rank, norm in finite.items() if norm <= most}


def _limits(squares: Sequence[Sequence[float]]) -> list[float]:
    """Per tensor the median over workers of the squared norms."""
    return [_median(column) for column in zip(*squares)]
