"""What one message says of each layer: its part of the bytes, and its error.

The error is that of the message that travels, layer by layer. Bytes are those of the message, shared out: where the format keeps tensors
apart (``by_tensor``, hence what is sent dense) as they are, in messages of a fixed rate by the number of coordinates, and in
entropy-coded messages, which have one table and one coder state for all layers, by the entropy of the values that were sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.protocol import Compressor, Context, Message, Spec, has_fixed_size
from tersegrad.wrappers import ByTensor

SAMPLE = 1 << 14  # values of a layer whose entropy is taken
ROW = 4096


@dataclasses.dataclass
class Layer:
    """Totals of one layer over the messages of a step."""

    coordinates: int = 0
    bits: float = 0.0
    error: float = 0.0  # sum of (C(y) - y)^2
    power: float = 0.0  # sum of y^2

    def add(self, other: Layer) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def power_of(x: Tensor) -> Tensor:
    """The squared norm of a flat tensor as a float64 scalar of its device: of short rows in float32, which is fast, added up in float64."""
    cut = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:cut].reshape(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(x[cut:]).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total


def by_layer(
    compressor: Compressor[Any], message: Message, spec: Spec, ctx: Context, decoded: Tensor, missed: Tensor, wanted: Tensor
) -> Iterator[tuple[str, Layer]]:
    """The layers of one message, each with its name; ``missed`` is ``decoded - wanted``."""
    sizes = [piece.numel for piece in spec.pieces]
    parts = zip(missed.split(sizes), wanted.split(sizes))
    squares = [torch.stack([power_of(error), power_of(whole)]) for error, whole in parts]
    numbers = host.read(torch.stack(squares)).tolist() if squares else []
    bits = _shared_out(compressor, message, spec, ctx, list(decoded.split(sizes)))
    for piece, share, (error, power) in zip(spec.pieces, bits, numbers):
        finite = math.isfinite(error) and math.isfinite(power)
        yield piece.name, Layer(piece.numel, share, error if finite else 0.0, power if finite else 0.0)


def _shared_out(
    compressor: Compressor[Any], message: Message, spec: Spec, ctx: Context, values: list[Tensor]
) -> Iterator[float]:
    """Bits of each piece; they add up to those of the message but for the lengths of its parts."""
    if not isinstance(compressor, ByTensor):
        yield from _weighed(compressor, 8 * message.length, values)
        return
    groups = [compressor.group(piece) for piece in spec.pieces]
    found: dict[int, Iterator[float]] = {}
    for group, part, payload in compressor.payloads(message, spec, ctx):
        mine = [value for value, other in zip(values, groups) if other == group and value.numel()]
        found[group] = iter(list(_weighed(part, 8 * payload.length, mine)))
    for value, group in zip(values, groups):
        yield next(found[group]) if value.numel() else 0.0


def _weighed(compressor: Compressor[Any], bits: int, values: list[Tensor]) -> Iterator[float]:
    weights = [float(v.numel()) if has_fixed_size(compressor) else v.numel() * _entropy(v) for v in values]
    total = sum(weights)
    for value, weight in zip(values, weights):
        # Nothing but zeros was sent: what there is are headers.
        yield bits * (weight / total if total else value.numel() / max(1, sum(v.numel() for v in values)))


def _entropy(values: Tensor) -> float:
    """Bits per value of the empirical distribution, of at most ``SAMPLE`` values."""
    some = values[:: -(-values.numel() // SAMPLE)] if values.numel() > SAMPLE else values
    _, counts = torch.unique(some, return_counts=True)
    shares = counts.double() / max(1, some.numel())
    return float(-(shares * shares.log2()).sum()) if len(counts) > 1 else 0.0
