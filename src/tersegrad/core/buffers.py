"""Where messages and decoded values are written: the caller's buffer after a check, or a fresh one."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration


def byte_buffer(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """The first ``nbytes`` of ``out``, or new memory."""
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < nbytes or out.device != device:
        raise BadConfiguration(
            f"out must be a flat, contiguous uint8 tensor of at least {nbytes} bytes on {device}, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    return out[:nbytes]


def float_buffer(out: Tensor | None, numel: int, device: torch.device) -> Tensor:
    """``out`` if it can hold ``numel`` decoded coordinates, or new memory."""
    if out is None:
        return torch.empty(numel, dtype=torch.float32, device=device)
    if out.dtype != torch.float32 or out.shape != (numel,) or not out.is_contiguous() or out.device != device:
        raise BadConfiguration(
            f"out must be a flat, contiguous float32 tensor of {numel} elements on {device}, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    return out
