"""Steps by CUDA kernels: from a norm, and for a target error by a search that stays on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host, targets
from tersegrad.core.numbers import TINY
from tersegrad.kernels.cuda import classes, replay, scratch
from tersegrad.kernels.cuda.dither import draws_of, groups_of
from tersegrad.kernels.cuda.loader import Double, launch
from tersegrad.kernels.cuda.trellis import trellis_error
from tersegrad.kernels.cuda.trellis_choice import ENCODE, KNOWN, NEAR_STATES, Chosen
from tersegrad.kernels.reference.aims import searched
from tersegrad.kernels.reference.rans import SEGMENT, pieces
from tersegrad.kernels.reference.rounding import CHUNK
from tersegrad.kernels.reference.trellis import RUN

__all__ = ["dither_aim", "norm_step", "trellis_aim"]

AIM = "dither_aim.cu"
# Bytes for what a search knows, as in search.cuh and some more.
SEARCH = 256
# Warps that look at the small sample: two for each of its runs.
WARPS = 8


def norm_step(x: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
    """A step from the squared norm, and that norm, in one launch."""
    return _norm_step(x.contiguous(), float(by), float(over), float(factor), float(otherwise))


@replay.operation
def _norm_step(x: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
    n, device = x.numel(), x.device
    found = torch.empty(2, dtype=torch.float64, device=device)
    chunks = max(1, -(-n // CHUNK))
    memory, (arrived, sums) = scratch.zeros(device, 8, 8 * chunks)
    numbers = map(Double, (by, over, factor, otherwise))
    launch(AIM, "norm_step", -(-chunks // 16), 512, x, n, *numbers, arrived, sums, found)
    # What the kernel uses is kept until here.
    del memory
    return found


def _target(n: int, alpha: float, margin: float, factor: float, divisor: float, norm: float) -> tuple[Double, ...]:
    """As in search.cuh."""
    return tuple(map(Double, (*targets.sample_target(n, alpha, margin), factor, divisor, norm)))


def dither_aim(x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
    """The step for a target error, found without a wait: all looks at the small sample in one launch, those at the larger one in one each.

    There are never more of the latter; a launch after the last look that was needed returns at once.
    """
    n, device = x.numel(), x.device
    if n == 0:
        return host.send(torch.tensor([TINY, 0.0, 0.0, norm], dtype=torch.float64), device)
    return _dither_aim(x.contiguous(), alpha, None if carry is None else carry.contiguous(), norm)


@replay.operation
def _dither_aim(x: Tensor, alpha: float, carry: Tensor | None, norm: float) -> Tensor:
    n, device = x.numel(), x.device
    told = torch.empty(4, dtype=torch.float64, device=device)
    coarse, fine = max(1, n // targets.COARSE), max(1, n // targets.FINE)
    groups, refined = groups_of(n, fine), targets.refines(n)
    memory, (search, errors, norms) = scratch.empty(device, SEARCH, 8 * groups, 8 * groups)
    given = (x, x if carry is None else carry, int(carry is not None), n)
    target = _target(n, alpha, targets.MARGIN, 12.0, n // coarse + 1, norm)
    launch(AIM, "dither_aim_coarse", 1, 1024, *given, coarse, int(refined), *target, search, told)
    for _ in range(targets.FINE_LOOKS if refined else 0):
        launch(AIM, "dither_aim_fine", groups, 512, *given, fine, *target, search, told, errors, norms)
    # What the kernels use is kept until here.
    del memory
    return told


def trellis_aim(x: Tensor, alpha: float, kappa: float, states: int, layout: Tensor | None = None, norm: float = 0.0) -> Tensor:
    """The same for trellis codes; the host searches where already the small sample is all of x, which has rows and may have classes."""
    n, device = x.numel(), x.device
    if not targets.refines(n):
        return searched(trellis_error, x, alpha, kappa, states, layout, norm)
    small, large = targets.strided(x, targets.COARSE), targets.strided(x, targets.FINE).contiguous()
    return _trellis_aim(small, large, n, alpha, kappa, states, norm, classes.regions_of(layout, n, device), layout is not None)


@replay.operation
def _trellis_aim(
    small: Tensor,
    large: Tensor,
    n: int,
    alpha: float,
    kappa: float,
    states: int,
    norm: float,
    regions: classes.Regions,
    classed: bool,
) -> Tensor:
    device = small.device
    told = torch.empty(4, dtype=torch.float64, device=device)
    source, target = f"trellis_viterbi_{states}.cu", _target(n, alpha, targets.TRELLIS_MARGIN, 1.0, kappa * small.numel(), norm)
    # The step of the next look lies at the beginning of what the search knows.
    held, (search, near, bytes_) = scratch.empty(device, SEARCH, WARPS * _decisions(states), small.numel() + 15)
    launch(source, f"trellis_aim_{states}", 1, 32 * WARPS, small, small.numel(), RUN, *target, near, bytes_, search, told)
    if large.numel() < n:
        _look_at_sample(large, states, target, search, told)
    else:
        for _ in range(targets.FINE_LOOKS):
            chosen = Chosen(large, (0.0, held[:1]), states, 0, draws_of(None), regions, classed)
            chosen.find_errors()
            launch(ENCODE, "trellis_aim_whole", 1, 256, n, *target, chosen.sums, search, told)
    # What the kernels use is kept until here.
    del held
    return told


def _decisions(states: int) -> int:
    """Bytes for those of a warp."""
    return (1 << RUN) * states // 16


def _look_at_sample(large: Tensor, states: int, target: tuple[Double, ...], search: int, told: Tensor) -> None:
    """Look at the larger sample, which has no rows."""
    device, count = large.device, large.numel()
    segments, parts, warps = len(pieces(count, SEGMENT)), -(-count // CHUNK), 2 * -(-count // (1 << RUN))
    zeros, (known,) = scratch.zeros(device, 4 * KNOWN * segments)
    memory, (kept, bytes_, *sums) = scratch.empty(
        device, warps * _decisions(states) if states > NEAR_STATES else 0, count + 15, *[8 * parts] * 3, 16 * segments
    )
    for _ in range(targets.FINE_LOOKS):
        launch(
            f"trellis_viterbi_{states}.cu", f"trellis_viterbi_{states}", warps, 32,
            large, count, RUN, 0.0, search, 0, 0, 0, 0, 0, kept, bytes_, 0, 0, 0, 0, 0, known,
        )  # fmt: skip
        launch(
            ENCODE, "trellis_aim_fine", -(-parts // 16), 512,
            large, count, RUN, *target, bytes_, *sums, known, search, told,
        )  # fmt: skip
    # What the kernels use is kept until here.
    del memory, zeros
