"""All-gather: every rank sends its message to all others, and every rank decodes all of them.

One compression, so its error is the compressor's own: the mean errs by at most (1/p) sum ||C(x_i) - x_i||^2. Every rank sends p - 1
copies of its message: cheapest for small groups and for very short (sparse) messages. Sizes travel first (8 bytes), then the
messages; compressors of a fixed rate need one round only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, Stats
from tersegrad.exchange.steps import AllGather, AllToAll, Steps, integers, read_integers


def average(compressor: Compressor[Any], messages: Sequence[Message], spec: Spec, ctx: Context, device: torch.device) -> Tensor:
    """(1/p) times the sum in rank order of what p messages decode to; each has its rank as the sender."""
    total = torch.empty(spec.numel, dtype=torch.float32, device=device)
    for sender, message in enumerate(messages):
        mine = dataclasses.replace(ctx, sender=sender)
        if sender == 0:
            compressor.decode(message, spec, mine, total)
        elif isinstance(compressor, Accumulator):
            compressor.decode_add(message, spec, mine, total)
        else:
            total.add_(compressor.decode(message, spec, mine))
    return total.mul_(1.0 / len(messages))


def gather_messages(message: Message, limit: int, rank: int, size: int) -> Steps[Any]:
    """Every rank's message, as a list in rank order (returned in place of a mean)."""
    sizes = read_integers((yield AllGather(integers([int(message.nbytes)], message.data.device))))
    if max(sizes) > limit:
        raise CorruptMessage(f"a rank announces {max(sizes)} bytes, the limit for this buffer is {limit}")
    payload = message.payload
    send = tuple(0 if r == rank else payload.numel() for r in range(size))
    receive = tuple(0 if r == rank else n for r, n in enumerate(sizes))
    arrived = yield AllToAll(payload.repeat(size - 1), send, receive)
    parts = iter(torch.split(arrived, [n for r, n in enumerate(sizes) if r != rank]))
    return payload, [message if r == rank else Message(next(parts), n) for r, n in enumerate(sizes)]


@dataclasses.dataclass(frozen=True)
class AllGatherExchange:
    """Mean over ranks by gathering one compressed message from each."""

    compressor: Compressor[Any]

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> Any:
        return self.compressor.init(spec, device)

    def steps(
        self, x: Tensor, state: Any, spec: Spec, ctx: Context, rank: int, size: int, stats: Stats | None = None
    ) -> Steps[Any]:
        mine = dataclasses.replace(ctx, sender=rank)
        message, state = self.compressor.encode(x, state, mine, stats=stats)
        _, messages = yield from gather_messages(message, self.compressor.max_nbytes(spec), rank, size)
        return average(self.compressor, messages, spec, ctx, x.device), state
