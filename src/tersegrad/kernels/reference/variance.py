"""Variance-based compression, element by element: which components are sent, what is kept, and the four-bit values.

Every function is plain torch on float32 tensors of any shape (..., n), without branches on data: the same code runs on a GPU, under
``torch.compile`` and with a leading axis of workers. Scalars are rounded to float32 before they meet a tensor, as torch does.
Every product and sum rounds once (no fused multiply-add), which is what the native kernel reproduces bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.reference.select import select_compact

__all__ = ["exp4_round", "exp4_top", "hybrid_select", "hybrid_update", "variance_select", "variance_update"]

EXPONENT = 0x7F800000  # the bits of a float32's exponent
HALF_MANTISSA = 0x00400000
SMALLEST = 2.0**-126  # denormals count as zero
SPAN = 7  # binary orders below the largest that are still sent


def variance_update(r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float) -> tuple[Tensor, Tensor, Tensor]:
    """One step of variance-based compression: the next r, the next v, and the accumulated gradient where it is sent, else 0.

    ``x`` is the local mean gradient, ``s`` the sum over samples of the squares of their shares of it. With R = r + x and V = v + s, a
    component is sent where R^2 > alpha V; there both restart from 0, elsewhere R is kept and V is multiplied by zeta.
    """
    total, spread = r + x, v + s
    sent = total * total > spread * alpha
    zero = torch.zeros((), dtype=total.dtype, device=total.device)
    return torch.where(sent, zero, total), torch.where(sent, zero, spread * zeta), torch.where(sent, total, zero)


def hybrid_update(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the hybrid with a threshold: the next r, the next v, and +-tau where that is sent, else 0.

    With R = r + x and V = v + s, a component is sent where |R| > tau and R^2 > alpha V; there R loses tau of its magnitude and V becomes
    max(V - 2 |R| tau + tau^2, 0); elsewhere R is kept and V is multiplied by zeta.
    """
    total, spread = r + x, v + s
    size = total.abs()
    sent = (size > tau) & (total * total > spread * alpha)
    zero = torch.zeros((), dtype=total.dtype, device=total.device)
    step = torch.where(sent, torch.copysign(torch.full_like(total, tau), total), zero)
    corrected = (spread - size * (2 * tau)) + tau * tau
    return total - step, torch.where(sent, corrected.clamp_min(0.0), spread * zeta), step


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`variance_update` of flat tensors: the next r and v, what is sent and how much of it, whether all is finite."""
    return _compact(*variance_update(r, v, x, s, alpha, zeta), limit)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`hybrid_update` of flat tensors, likewise."""
    return _compact(*hybrid_update(r, v, x, s, alpha, tau, zeta), limit)


def _compact(r: Tensor, v: Tensor, sent: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    indices, values, count = select_compact(sent, 1, limit)
    finite = torch.isfinite(r).all() & torch.isfinite(v).all() & torch.isfinite(sent).all()
    return r, v, indices, values, count, finite


def exp4_top(sent: Tensor) -> Tensor:
    """2^E, E = floor(log2 max |sent|), over the last axis, which stays with length 1; 0 where that is below 2^-126."""
    if sent.shape[-1] == 0:
        return sent.new_zeros((*sent.shape[:-1], 1))
    largest = sent.abs().amax(dim=-1, keepdim=True)
    return (largest.view(torch.int32) & EXPONENT).view(torch.float32)


def exp4_round(sent: Tensor, top: Tensor) -> Tensor:
    """What the four-bit code makes of each component, given ``top`` = 2^E: sign and a power of two from 2^(E-7) to 2^E, or 0.

    The nearer power of two (1.5 rounds up), at most ``top``; what lies below top / 128 after rounding becomes 0, and is not sent.
    """
    magnitude = sent.abs()
    rounded = ((magnitude.view(torch.int32) + HALF_MANTISSA) & EXPONENT).view(torch.float32)
    kept = (rounded >= top * 2.0**-SPAN) & (magnitude >= SMALLEST)
    zero = torch.zeros((), dtype=sent.dtype, device=sent.device)
    return torch.where(kept, torch.copysign(torch.minimum(rounded, top), sent), zero)
