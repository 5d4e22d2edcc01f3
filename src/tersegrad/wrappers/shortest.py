"""The shortest of several messages: each compressor codes the vector, and the message with the fewest bytes is sent.

Maps: x to C_k(x), with the k whose message is shortest; the first of several.

Why: which quantiser and which code take the fewest bits for an error depends on the gradient, and an encoder can simply find out. It
pays where links are slow: encoding takes as long as all of them together, decoding as long as the one that was sent.

Guarantee: contractive with the largest of their alphas, for every vector. Only sure promises compose: of random messages the shortest
one is not a random one, which would bias what was unbiased. So each has to be contractive for every outcome, and to keep no state.

Wire (``spec/wire.md``, shortest): a byte, k; the message of C_k.

Citation: none needed; video coders choose their modes so.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad.core import buffers, host
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Guarantee, Message, Spec, Stats, codes_on_host, flat_float32
from tersegrad.core.text import Configuration, require

MOST = 16


@dataclasses.dataclass(frozen=True)
class Shortest(Configuration):
    """Whichever of some compressors makes the shortest message of a vector.

    >>> from tersegrad.compressors import SparseDithering, Trellis
    >>> print(Shortest((SparseDithering(alpha=0.1), Trellis(alpha=0.1))))
    shortest(of=[sparse_dithering(alpha=0.1), trellis(alpha=0.1)])
    """

    name: ClassVar[str] = "shortest"
    wire_id: ClassVar[int] = 70
    examples: ClassVar[tuple[str, ...]] = ("shortest(of=[sparse_dithering(alpha=0.1), trellis(alpha=0.1)])",)
    corners: ClassVar[tuple[str, ...]] = ("shortest(of=[top_k(k=3), int8])",)

    of: tuple[Compressor[Any], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(self.of))
        require(1 <= len(self.of) <= MOST, f"shortest chooses among 1 to {MOST} compressors, got {len(self.of)}")
        for c in self.of:
            require(isinstance(c, Compressor), f"shortest chooses among compressors, got {c!r}")
            promise = c.guarantee(Spec.flat(2))
            if promise.kind != "contractive" or not promise.sure:
                raise BadConfiguration(
                    f"{c} promises {promise}: choosing the shortest message keeps only what holds for every outcome, C(alpha)"
                )
            if c.init(Spec.flat(1), "cpu") is not None:
                raise BadConfiguration(f"{c} keeps a state: put shortest inside, as in error_feedback(shortest(...))")

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def codes_on_host(self, device: torch.device) -> bool:
        return any(codes_on_host(c, device) for c in self.of)

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        x, inner = flat_float32(x, spec), spec.in_float32
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if not x.is_cpu and self.codes_on_host(x.device):
            # One read for all of them.
            x, stats = host.read(x), _on_host(stats)
        best, chosen = self.of[0].encode(x, inner, None, ctx, stats=stats)[0], 0
        for number, c in enumerate(self.of[1:], 1):
            message, _ = c.encode(x, inner, None, ctx, stats=stats)
            if message.length < best.length:
                best, chosen = message, number
        nbytes, here = best.length, None
        if not data.is_cpu and (x.is_cpu or best.host is not None):
            here = torch.cat((torch.tensor([chosen], dtype=torch.uint8), best.on_host()))
            data[: 1 + nbytes].copy_(here, non_blocking=True)
        else:
            data[0] = chosen
            data[1 : 1 + nbytes] = best.payload
        return Message(data if out is None else out, 1 + nbytes, here), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out, length = buffers.float_buffer(out, spec.numel, message.data.device), message.length
        # Where the message is read at the host, it goes there together with its number.
        here = message.on_host() if message.host is not None or self.codes_on_host(out.device) else None
        first = host.read(message.data[: min(length, 1)]) if here is None else here[:1]
        if first.numel() == 0 or int(first[0]) >= len(self.of):
            raise CorruptMessage(f"a message of shortest begins with the number of one of {len(self.of)} compressors")
        rest = Message(message.data[1:length], length - 1, None if here is None else here[1:])
        decoded = self.of[int(first[0])].decode(rest, spec.in_float32, ctx, out)
        return decoded if decoded is out else out.copy_(decoded)

    def max_nbytes(self, spec: Spec) -> int:
        return 1 + max(c.max_nbytes(spec.in_float32) for c in self.of)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", max(c.guarantee(spec.in_float32).value for c in self.of), sure=True)

    def wire_omega(self, spec: Spec) -> None:
        return None

    def mode(self, data: bytes) -> str:
        return str(self.of[data[0]]) if data and data[0] < len(self.of) else "missing"


def _on_host(stats: Stats | None) -> Stats | None:
    return None if stats is None or stats.second_moment is None else Stats(host.read(stats.second_moment))
