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

from tersegrad.core import buffers, host, trust
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec, Stats, codes_on_host, has_fixed_size, lengths
from tersegrad.core.sums import decode_sum
from tersegrad.exchange.combine import PLAIN, LeftOut, Rule, combine
from tersegrad.exchange.steps import AllGather, AllToAll, Part, Steps, announced, in_parts, read_integers


def add_up(
    compressor: Compressor[Any],
    messages: Sequence[Message],
    spec: Spec,
    ctx: Context,
    device: torch.device,
    into: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """``weight`` times the sum, in rank order, of what every rank's message decodes to."""
    contexts = [ctx.sent_by(sender) for sender in range(len(messages))]
    out = buffers.float_buffer(into, spec.numel, device)

    def body() -> Tensor:
        total = decode_sum(compressor, messages, spec, contexts, out)
        return total if weight == 1.0 else total.mul_(weight)

    return trust.decoded(body)


# What a rank announces in place of a length when it has none to send: it could not read what it was sent.
UNREADABLE = -1


def refuse(device: torch.device) -> Steps[Any]:
    """What a rank does in place of :func:`gather_messages` after a message that it could not read: all ranks end the step there."""
    yield AllGather(host.numbers([UNREADABLE], device).view(torch.uint8))
    return torch.empty(0), None


def gather_messages(
    message: Message, limits: Sequence[int], fixed: bool, rank: int, size: int, on_host: bool = False
) -> Steps[Any]:
    """Every rank's message, as a list in rank order (returned in place of a mean).

    ``limits``: the most bytes of each rank's message; all of them have exactly that many where ``fixed``. ``on_host``: whether they
    will be decoded in the host's memory.
    """
    if size == 1:
        return message.data, [message]
    if fixed:
        sizes = list(limits)
        (nbytes,) = lengths([message])
        if nbytes != sizes[rank]:
            raise BadConfiguration(f"a compressor that declares fixed_size wrote {nbytes} bytes, not {sizes[rank]}")
        if len(set(sizes)) == 1:
            arrived = yield AllGather(message.payload)
            return message.payload, list(in_parts(arrived, sizes, on_host))
    else:
        sizes = read_integers((yield AllGather(announced([message], message.data.device))))
        for r, (n, limit) in enumerate(zip(sizes, limits)):
            if n == UNREADABLE:
                raise CorruptMessage(f"rank {r} could not read a message that it was sent in this step, and has said why")
            if not 0 <= n <= limit:
                raise CorruptMessage(f"rank {r} announces {n} bytes, the limit for its message is {limit}")
    payload = message.data[: sizes[rank]]
    send = tuple(0 if r == rank else payload.numel() for r in range(size))
    receive = tuple(0 if r == rank else n for r, n in enumerate(sizes))
    # To a single other rank the message goes from where it was written.
    copies = payload if size == 2 else buffers.cat([payload] * (size - 1)) if size > 2 else payload[:0]
    arrived = yield AllToAll(copies, send, receive)
    parts = in_parts(arrived, [n for r, n in enumerate(sizes) if r != rank], on_host)
    # Its length is known now, also where only the device knew it.
    own = Message(payload, payload.numel(), message.host)
    return payload, [own if r == rank else next(parts) for r in range(size)]


@dataclasses.dataclass(frozen=True)
class AllGatherExchange:
    """Mean over ranks by gathering one compressed message from each."""

    compressor: Compressor[Any]
    rule: Rule = PLAIN
    left_out: LeftOut = dataclasses.field(default_factory=LeftOut, compare=False, repr=False)  # by the gate

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> Any:
        return self.compressor.init(spec, device)

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
    ) -> Steps[Any]:
        mine = ctx.sent_by(rank)
        place = buffers.empty(self.compressor.max_nbytes(spec), torch.uint8, x.device)
        message, state = self.compressor.encode(x, spec, state, mine, stats=stats, out=place)
        limits, fixed = [self.compressor.max_nbytes(spec)] * size, has_fixed_size(self.compressor)
        on_host = codes_on_host(self.compressor, x.device)
        _, messages = yield from gather_messages(message, limits, fixed, rank, size, on_host)
        if not self.rule.plain:
            return combine(self.rule, self.compressor, messages, spec, ctx, x.device, self.left_out), state
        return add_up(self.compressor, messages, spec, ctx, x.device, into, 1.0 / size), state

    def parts(self, state: Any, spec: Spec, rank: int, size: int) -> list[Part]:
        return [Part("first", 0, spec.numel, size, state)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> Any:
        return parts[0]
