"""Random points on the sphere that both ends can name by a number: a codebook that is never stored.

Word t is a vector of normal numbers, looked up by the 16-bit draws t * stride .. t * stride + d (purpose ``CODEBOOK``, stride = the
width rounded up to 8) in a table of integers, and pointing in a direction that is uniform on the sphere. The integers and the
scaling by one float64 square root, division and product are the same on every device; the search is the encoder's own business.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import normal
from tersegrad.core import host
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.sphere import errors as errors
from tersegrad.kernels.reference.sphere import points as points
from tersegrad.kernels.reference.sphere import words as _words


@functools.cache
def _table(device: torch.device, stream: int) -> Tensor:
    return host.send(normal.quantiles(), device)


def table(device: torch.device) -> Tensor:
    """The integers of all draws, for the stream of now."""
    return _table(device, host.stream(device))


def words(ctx: Context, index: Tensor, width: int, d: int) -> Tensor:
    """The first ``d`` integers of the words with these numbers, (n, d) int32; ``width`` >= d fixes where words lie."""
    return _words(kernels.get(index.device).random_rows, table(index.device), ctx, index, width, d)


def search(
    ctx: Context,
    x: Tensor,
    scale: Tensor,
    square: Tensor,
    alpha: float,
    probability: float,
    width: int,
    start: int | None = None,
) -> Tensor:
    """For each row of ``x`` (n, d) the first word whose point errs by at most ``alpha`` times ``square``; -1 if none was found.

    ``scale`` is the distance of each row's points, ``square`` its squared norm (both float64), ``probability`` the least chance of a word
    to be accepted. Rows whose square is not positive or not finite have no word. With ``start``, the number of the first coordinate,
    shared signs are laid on x.
    """
    return kernels.get(x.device).sphere_search(ctx, x, scale, square, alpha, probability, width, start, table(x.device))


def restore(
    ctx: Context, index: Tensor, scale: Tensor, width: int, out: Tensor, weight: float | None, start: int | None = None
) -> None:
    """The points of words at these distances into the rows of ``out``, or ``weight`` times as much added; zeros for negative numbers.

    With ``start`` the shared signs are laid on them.
    """
    kernels.get(out.device).sphere_points(ctx, index, scale, width, start, table(out.device), out, weight)
