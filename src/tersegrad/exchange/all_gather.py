"""All-gather: every rank sends its message to all others, and every rank decodes all of them.

One compression, so its error is the compressor's own: the mean errs by at most (1/p) sum ||C(x_i) - x_i||^2. Every rank sends p - 1
copies of its message: cheapest for small groups and for very short (sparse) messages. Sizes travel first (8 bytes), then the
messages; compressors that declare ``fixed_size`` need one round only. Because every rank has every message, it can also combine them in
other ways than by the mean (``exchange/combine.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, Stats, has_fixed_size
from tersegrad.exchange.combine import PLAIN, Rule, combine
from tersegrad.exchange.steps import AllGather, AllToAll, Part, Steps, integers, read_integers


def add_up(compressor: Compressor[Any], messages: Sequence[Message], spec: Spec, ctx: Context, device: torch.device) -> Tensor:
    """The sum, in rank order, of what every rank's message decodes to."""
    total = buffers.empty(spec.numel, torch.float32, device)
    for sender, message in enumerate(messages):
        mine = dataclasses.replace(ctx, sender=sender)
        if sender == 0:
            compressor.decode(message, spec, mine, total)
        elif isinstance(compressor, Accumulator):
            compressor.decode_add(message, spec, mine, total)
        else:
            total.add_(compressor.decode(message, spec, mine))
    return total


def gather_messages(message: Message, limits: Sequence[int], fixed: bool, rank: int, size: int) -> Steps[Any]:
    """Every rank's message, as a list in rank order (returned in place of a mean).

    ``limits``: the most bytes of each rank's message; all of them have exactly that many where ``fixed``.
    """
    payload = message.payload
    if fixed:
        sizes = list(limits)
        if payload.numel() != sizes[rank]:
            raise BadConfiguration(f"a compressor that declares fixed_size wrote {payload.numel()} bytes, not {sizes[rank]}")
        if len(set(sizes)) == 1:
            arrived = yield AllGather(payload)
            return payload, [Message(part, n) for part, n in zip(torch.split(arrived, sizes), sizes)]
    else:
        sizes = read_integers((yield AllGather(integers([payload.numel()], message.data.device))))
        for r, (n, limit) in enumerate(zip(sizes, limits)):
            if not 0 <= n <= limit:
                raise CorruptMessage(f"rank {r} announces {n} bytes, the limit for its message is {limit}")
    send = tuple(0 if r == rank else payload.numel() for r in range(size))
    receive = tuple(0 if r == rank else n for r, n in enumerate(sizes))
    copies = buffers.cat([payload] * (size - 1)) if size > 2 else payload.repeat(size - 1)
    arrived = yield AllToAll(copies, send, receive)
    parts = iter(torch.split(arrived, [n for r, n in enumerate(sizes) if r != rank]))
    return payload, [message if r == rank else Message(next(parts), n) for r, n in enumerate(sizes)]


@dataclasses.dataclass(frozen=True)
class AllGatherExchange:
    """Mean over ranks by gathering one compressed message from each."""

    compressor: Compressor[Any]
    rule: Rule = PLAIN
    # Step and rank of those that the gate left out.
    left_out: set[tuple[int, int]] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> Any:
        return self.compressor.init(spec, device)

    def steps(
        self, x: Tensor, state: Any, spec: Spec, ctx: Context, rank: int, size: int, stats: Stats | None = None
    ) -> Steps[Any]:
        mine = dataclasses.replace(ctx, sender=rank)
        place = buffers.empty(self.compressor.max_nbytes(spec), torch.uint8, x.device)
        message, state = self.compressor.encode(x, spec, state, mine, stats=stats, out=place)
        _, messages = yield from gather_messages(
            message, [self.compressor.max_nbytes(spec)] * size, has_fixed_size(self.compressor), rank, size
        )
        if not self.rule.plain:
            return combine(self.rule, self.compressor, messages, spec, ctx, x.device, self.left_out), state
        return add_up(self.compressor, messages, spec, ctx, x.device).mul_(1.0 / size), state

    def parts(self, state: Any, spec: Spec, rank: int, size: int) -> list[Part]:
        return [Part("first", 0, spec.numel, size, state)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> Any:
        return parts[0]
