"""Two-shot all-reduce: compressed reduce-scatter, then compressed all-gather; traffic does not grow with the number of ranks.

The buffer is cut into p parts. Every rank sends part j to rank j, which decodes and averages the p messages it gets, compresses
the mean with a second state (its own error feedback, if the compressor has one), and sends it to all. A rank sends 2 (p-1)/p
messages' worth of bytes.

Error, against (1/p) sum ||x_i||^2: if every message errs by at most alpha (relative, squared), the mean of part j errs by at most
alpha before and alpha more, of a vector of squared norm at most (1 + sqrt(alpha))^2, after the second compression; in the norm
sqrt(alpha) + sqrt(alpha) (1 + sqrt(alpha)). Unbiased compressors stay unbiased: variances alpha/p and alpha (1 + alpha/p) add.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec, Stats
from tersegrad.core.state import slice_spec
from tersegrad.exchange.all_gather import average, gather_messages
from tersegrad.exchange.steps import AllGather, AllToAll, Steps, integers, read_integers

UNIT = 64  # parts begin at multiples of this many coordinates


def borders(numel: int, size: int) -> list[int]:
    """Where the p parts of a buffer begin and end: as equal as multiples of 64 allow."""
    units = -(-numel // UNIT)
    return [min(numel, units * r // size * UNIT) for r in range(size)] + [numel]


@functools.lru_cache(maxsize=256)
def plan(spec: Spec, size: int) -> tuple[list[int], list[Spec]]:
    """The borders and the specs of the p parts."""
    at = borders(spec.numel, size)
    return at, [slice_spec(spec, a, b) for a, b in itertools.pairwise(at)]


@dataclasses.dataclass(frozen=True)
class TwoShotState:
    """First-round states of all parts, and the second-round state of this rank's own part."""

    first: tuple[Any, ...]
    second: Any


@dataclasses.dataclass(frozen=True)
class TwoShotExchange:
    """Mean over ranks in two compressed rounds."""

    compressor: Compressor[Any]
    second: Compressor[Any] | None = None  # by default the same as the first

    @property
    def _second(self) -> Compressor[Any]:
        return self.second or self.compressor

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> TwoShotState:
        _, parts = plan(spec, size)
        return TwoShotState(tuple(self.compressor.init(p, device) for p in parts), self._second.init(parts[rank], device))

    def steps(
        self, x: Tensor, state: TwoShotState, spec: Spec, ctx: Context, rank: int, size: int, stats: Stats | None = None
    ) -> Steps[TwoShotState]:
        at, parts = plan(spec, size)
        flat = x.detach().reshape(-1)
        messages, first = [], []
        for j in range(size):
            where = slice(at[j], at[j + 1])
            share = None if stats is None or stats.second_moment is None else Stats(stats.second_moment.reshape(-1)[where])
            message, next_state = self.compressor.encode(
                flat[where], state.first[j], dataclasses.replace(ctx.child(j), sender=rank), stats=share
            )
            messages.append(message)
            first.append(next_state)
        sizes = read_integers((yield AllGather(integers([int(m.nbytes) for m in messages], x.device))))
        incoming = [sizes[r * size + rank] for r in range(size)]
        limit = self.compressor.max_nbytes(parts[rank])
        if max(incoming) > limit:
            raise CorruptMessage(f"a rank announces {max(incoming)} bytes, the limit for this part is {limit}")
        outgoing = torch.cat([m.payload if j != rank else m.payload[:0] for j, m in enumerate(messages)])
        arrived = yield AllToAll(
            outgoing,
            tuple(0 if j == rank else int(m.nbytes) for j, m in enumerate(messages)),
            tuple(0 if r == rank else n for r, n in enumerate(incoming)),
        )
        received = iter(torch.split(arrived, [n for r, n in enumerate(incoming) if r != rank]))
        mine = [messages[rank] if r == rank else Message(next(received), incoming[r]) for r in range(size)]
        mean = average(self.compressor, mine, parts[rank], ctx.child(rank), x.device)
        again = ctx.child(size)
        own, second = self._second.encode(mean, state.second, dataclasses.replace(again, sender=rank))
        most = max(self._second.max_nbytes(p) for p in parts)
        _, all_parts = yield from gather_messages(own, most, rank, size)
        out = torch.empty(spec.numel, dtype=torch.float32, device=x.device)
        for r, message in enumerate(all_parts):
            self._second.decode(message, parts[r], dataclasses.replace(again, sender=r), out[at[r] : at[r + 1]])
        return out, TwoShotState(tuple(first), second)
