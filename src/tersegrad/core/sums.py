"""Sums of what several messages decode to, in their order: at once where the compressor can, else one after another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.protocol import Context, Message, Spec


def sums_at_once(compressor: object, device: torch.device) -> bool:
    """Whether a compressor adds up messages for tensors on ``device`` faster than one after another."""
    # Asking whether it is a Summer takes longer than decoding a short message.
    said = getattr(compressor, "sums_at_once", None)
    return said is not None and bool(said(device))


def decode_sum(
    compressor: Any, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
) -> Tensor:
    """``out = sum of weight * decode(message)``, in the order of the messages, as fast as the compressor can."""
    add = compressor.decode_sum if sums_at_once(compressor, out.device) else functools.partial(add_each, compressor)
    total: Tensor = add(messages, spec, contexts, out, weight)
    return total


def add_each(
    compressor: Any,
    messages: Sequence[Message],
    spec: Spec,
    contexts: Sequence[Context],
    out: Tensor,
    weight: float = 1.0,
    fused: bool = True,
) -> Tensor:
    """The same, one message after another; ``fused``: decoded and added in one pass where the compressor can."""
    # Asking whether it is an Accumulator takes longer than adding a short message.
    fused = fused and len(messages) > 1 and hasattr(compressor, "decode_add")
    for k, (message, ctx) in enumerate(zip(messages, contexts, strict=True)):
        if k and fused:
            compressor.decode_add(message, spec, ctx, out, weight)
            continue
        decoded = compressor.decode(message, spec, ctx, None if k else out)
        if weight != 1.0:
            decoded.mul_(weight)
        if k:
            out.add_(decoded)
    return out
