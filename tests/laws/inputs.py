"""What the laws pass to compressors, and what they look at."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.protocol import Compressor, Context, Message, Piece, Spec, Stats, needs_second_moment


def uneven(shapes: tuple[tuple[int, ...], ...], seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Spec]:
    """Tensors whose rows and columns have scales of their own; every seventh row is zero."""
    g, parts = torch.Generator().manual_seed(seed), []
    for shape in shapes:
        x = torch.randn(shape, generator=g)
        for axis, size in enumerate(shape[:2]):
            scale = torch.exp2(spread * torch.randn(size, generator=g))
            if axis == 0 and size > 7:
                scale[::7] = 0
            x = x * scale.view([-1 if a == axis else 1 for a in range(len(shape))])
        parts.append(x.flatten())
    return torch.cat(parts), Spec(tuple(Piece(s, 0, math.prod(s)) for s in shapes))


def given(c: Compressor[Any], x: Tensor) -> dict[str, Any]:
    """The statistics that a compressor asks for: half of the coordinates beyond doubt, the others ambiguous."""
    if not needs_second_moment(c):
        return {}
    doubt = torch.where(torch.arange(x.numel()) % 2 == 0, 0.1, 3.0)
    return {"stats": Stats((x.detach().float().square() * doubt).clamp(max=torch.finfo(torch.float32).max))}


def once(c: Compressor[Any], x: Tensor, ctx: Context | None = None, spec: Spec | None = None) -> tuple[Message, Tensor]:
    """One message from the initial state, and what it decodes to."""
    ctx = ctx or Context(seed=1234, step=5, buffer=2, sender=3)
    spec = spec or Spec.flat(x.numel(), x.dtype)
    message, _ = c.encode(x, spec, c.init(spec, x.device), ctx, **given(c, x))
    return message, c.decode(message, spec, ctx)


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if dataclasses.is_dataclass(state):
        return [t for f in dataclasses.fields(state) for t in tensors_of(getattr(state, f.name))]
    if isinstance(state, (tuple, list)):
        return [t for part in state for t in tensors_of(part)]
    return []


def pieces(d: int) -> Spec:
    """A spec of three named tensors, the first one small."""
    small = min(d, 7)
    middle = (d - small) // 3
    rest = d - small - middle
    parts = (("bias", small), ("hidden.weight", middle), ("head.weight", rest))
    return Spec(tuple(Piece((n,), 0, n, name) for name, n in parts))
