"""Tiny compressors with known promises, so that the wrappers' laws are tested on their own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration


@dataclasses.dataclass(frozen=True)
class Toy(Configuration):
    """Sends float32 bytes of ``lossy(x)``; NaN everywhere when x is not finite."""

    @property
    def wire_id(self) -> int:
        return 1000

    def lossy(self, x: Tensor, ctx: Context) -> Tensor:
        return x

    def init(self, spec: Spec, device: torch.device | str) -> Any:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Any]:
        flat = flat_float32(x)
        finite = bool(torch.isfinite(flat).all())
        data = (self.lossy(flat, ctx) if finite else torch.full_like(flat, math.nan)).contiguous().view(torch.uint8)
        if out is None:
            return Message(data.clone(), data.numel()), state
        out[: data.numel()] = data
        return Message(out, data.numel()), state

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if int(message.nbytes) != 4 * spec.numel:
            raise CorruptMessage("wrong length")
        values = message.payload.view(torch.float32)
        return values.clone() if out is None else out.copy_(values)

    def max_nbytes(self, spec: Spec) -> int:
        return 4 * spec.numel

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 0.0, True)


@dataclasses.dataclass(frozen=True)
class Largest(Toy):
    """The k largest magnitudes: contractive with 1 - k/d, surely."""

    name: ClassVar[str] = "toy_largest"
    k: int = 1

    def lossy(self, x: Tensor, ctx: Context) -> Tensor:
        kept = torch.zeros_like(x)
        top = x.abs().topk(min(self.k, x.numel())).indices
        kept[top] = x[top]
        return kept

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", max(0.0, 1 - self.k / spec.numel) if spec.numel else 0.0, True)


@dataclasses.dataclass(frozen=True)
class Lottery(Toy):
    """Every coordinate survives with probability p, divided by p: unbiased with omega = 1/p - 1."""

    name: ClassVar[str] = "toy_lottery"
    p: float = 0.25

    def lossy(self, x: Tensor, ctx: Context) -> Tensor:
        generator = torch.Generator().manual_seed((ctx.seed * 1000003 + ctx.step) % 2**63)
        return torch.where(torch.rand(x.numel(), generator=generator) < self.p, x / self.p, torch.zeros(()))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", 1 / self.p - 1)

    def wire_omega(self, spec: Spec) -> float:
        return 1 / self.p - 1


@dataclasses.dataclass(frozen=True)
class Coarse(Toy):
    """Rounds down the fraction of |x| / max |x| to a grid of ``levels``; the worst case is where a rotation helps."""

    name: ClassVar[str] = "toy_coarse"
    levels: int = 7

    def lossy(self, x: Tensor, ctx: Context) -> Tensor:
        top = x.abs().max() if x.numel() else torch.zeros(())
        return torch.round(x / top * self.levels) / self.levels * top if float(top) else x

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", min(1.0, spec.numel / (2 * self.levels) ** 2), True)


@dataclasses.dataclass(frozen=True)
class Promiseless(Toy):
    """Sends +-tau above tau, without any promise."""

    name: ClassVar[str] = "toy_promiseless"
    tau: float = 0.5

    def lossy(self, x: Tensor, ctx: Context) -> Tensor:
        return torch.where(x.abs() >= self.tau, torch.sign(x) * self.tau, torch.zeros(()))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")


@dataclasses.dataclass(frozen=True)
class Adding(Largest):
    """Largest, and able to decode and add in one call, which it counts."""

    name: ClassVar[str] = "toy_adding"
    calls: ClassVar[list[float]] = []

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        self.calls.append(weight)
        return out.add_(self.decode(message, spec, ctx) * weight)


TOYS = (Largest, Lottery, Coarse, Promiseless, Adding)
