"""Reduce-scatter: part j of every rank's vector goes to rank j in compressed messages, and rank j adds up what it decodes.

The first half of a two-shot exchange, and all that sharded training needs: every rank ends with the sum of its own part. One
compression; a rank sends (p-1)/p messages' worth of bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers, trust
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec, Stats, codes_on_host, has_fixed_size, lengths
from tersegrad.core.state import slice_spec
from tersegrad.exchange.all_gather import add_up
from tersegrad.exchange.steps import AllGather, AllToAll, Part, Steps, announced, in_parts, read_integers


class Unreadable(CorruptMessage):
    """A message came through and could not be read: only this rank knows."""


def reduce_scatter(
    compressor: Compressor[Any],
    xs: Iterable[Tensor],
    states: Sequence[Any],
    parts: Sequence[Spec],
    ctx: Context,
    rank: int,
    size: int,
    stats: Sequence[Stats] | None = None,
) -> Steps[tuple[Any, ...]]:
    """The first half: part j of every rank's vector goes to rank j. Returns the sum over ranks of this rank's part (in place of
    a mean), in rank order, and the next states of all parts.
    """
    messages, after = [], []
    limits = [compressor.max_nbytes(part) for part in parts]
    for j, x in enumerate(xs):
        mine = ctx.child(j).sent_by(rank)
        place = buffers.empty(limits[j], torch.uint8, x.device)
        share = None if stats is None else stats[j]
        message, next_state = compressor.encode(x, parts[j], states[j], mine, stats=share, out=place)
        messages.append(message)
        after.append(next_state)
    device = messages[rank].data.device

    def total(everyone: Sequence[Message]) -> Tensor:
        # What it is used for next does not wait.
        with trust.postponing(None):
            return add_up(compressor, everyone, parts[rank], ctx.child(rank), device)

    if size == 1:
        return total(messages), tuple(after)
    if has_fixed_size(compressor):
        incoming, outgoing = [limits[rank]] * size, list(limits)
        if lengths(messages) != outgoing:
            raise BadConfiguration(f"{compressor} declares fixed_size, but its messages are not all of max_nbytes")
    else:
        sizes = read_integers((yield AllGather(announced(messages, device))))
        incoming, outgoing = sizes[rank::size], sizes[rank * size : (rank + 1) * size]
        if any(not 0 <= n <= m.data.numel() for n, m in zip(outgoing, messages)):
            raise CorruptMessage(f"lengths of {outgoing} bytes came back for the messages of this rank, which are shorter")
        # All ranks see all lengths, so that they end here together.
        for number, n in enumerate(sizes):
            sender, part = divmod(number, size)
            if not 0 <= n <= limits[part]:
                raise CorruptMessage(f"rank {sender} announces {n} bytes, the limit for part {part} is {limits[part]}")
    # Its length is known now, also where only the device knew it.
    own = Message(messages[rank].data, outgoing[rank], messages[rank].host)
    outgoing[rank] = 0
    arrived = yield AllToAll(
        buffers.cat([m.data[:n] for m, n in zip(messages, outgoing)]),
        tuple(outgoing),
        tuple(0 if r == rank else n for r, n in enumerate(incoming)),
    )
    received = in_parts(arrived, [n for r, n in enumerate(incoming) if r != rank], codes_on_host(compressor, device))
    everyone = [own if r == rank else next(received) for r in range(size)]
    try:
        return total(everyone), tuple(after)
    except CorruptMessage as failure:
        raise Unreadable(str(failure)) from failure


@dataclasses.dataclass(frozen=True)
class ReduceScatterExchange:
    """The sum over ranks of this rank's part of the buffer; ``ends`` says where the parts of the ranks end."""

    compressor: Compressor[Any]
    ends: tuple[int, ...]

    def _ranges(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise((0, *self.ends)))

    def _specs(self, spec: Spec, size: int) -> list[Spec]:
        if len(self.ends) != size or self.ends[-1] != spec.numel:
            raise BadConfiguration(
                f"{len(self.ends)} parts that end at {self.ends[-1]} do not fit {size} ranks, {spec.numel} elements"
            )
        return [slice_spec(spec, a, b) for a, b in self._ranges()]

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> tuple[Any, ...]:
        return tuple(self.compressor.init(part, device) for part in self._specs(spec, size))

    def steps(
        self,
        x: Tensor,
        state: tuple[Any, ...],
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[tuple[Any, ...]]:
        xs = [x[a:b] for a, b in self._ranges()]
        return (yield from reduce_scatter(self.compressor, xs, state, self._specs(spec, size), ctx, rank, size))

    def parts(self, state: tuple[Any, ...], spec: Spec, rank: int, size: int) -> list[Part]:
        return [Part("reduce", a, b, size, part) for (a, b), part in zip(self._ranges(), state, strict=True)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> tuple[Any, ...]:
        return tuple(parts)
