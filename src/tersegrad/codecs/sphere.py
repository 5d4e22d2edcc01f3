"""Random points on the sphere that both ends can name by a number: a codebook that is never stored.

Word t is a vector of normal numbers, looked up by the 16-bit draws t * stride .. t * stride + d (purpose ``CODEBOOK``, stride = the
width rounded up to 8) in a table of integers, and pointing in a direction that is uniform on the sphere. The integers and the
scaling by one float64 square root, division and product are the same on every device; the search is the encoder's own business.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import normal
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context

HUGE = float(torch.finfo(torch.float32).max)
CERTAIN = 40.0  # a search gives up after this many times the expected draws: with probability e^-40


@functools.cache
def _table(device: torch.device) -> Tensor:
    return normal.quantiles().to(device)


def words(ctx: Context, index: Tensor, width: int, d: int) -> Tensor:
    """The first ``d`` integers of the words with these numbers, (n, d) int32; ``width`` >= d fixes where words lie."""
    draws = kernels.get(index.device).random_rows(ctx, Purpose.CODEBOOK, index, width)[:, :d]
    return _table(index.device)[draws.long()]


def points(z: Tensor, scale: Tensor) -> Tensor:
    """The words as points at distance ``scale`` (float64) from the origin, (n, d) float32."""
    square = z.long().square().sum(1).double()  # an exact integer
    return ((scale / square.sqrt())[:, None] * z).to(torch.float32).clamp_(-HUGE, HUGE)


def errors(y: Tensor, x: Tensor) -> Tensor:
    """Squared distances of rows, float64, summed in the order of the columns."""
    total = torch.zeros(y.shape[0], dtype=torch.float64, device=y.device)
    for j in range(y.shape[1]):
        total += (y[:, j].double() - x[:, j].double()).square()
    return total


def search(ctx: Context, x: Tensor, scale: Tensor, square: Tensor, alpha: float, probability: float, width: int) -> Tensor:
    """For each row of ``x`` (n, d) the first word whose point errs by at most ``alpha`` times ``square``; -1 if none was found.

    ``scale`` is the distance of each row's points, ``square`` its squared norm (both float64, positive), ``probability`` the
    least chance of a word to be accepted. Scalar products of many words with many rows preselect; what counts is the error of
    the float32 values that will be decoded.
    """
    n, d = x.shape
    # Where float32 products cannot tell words apart.
    fine = alpha < 1e-3
    dtype, margin = (torch.float64, 1e-12) if fine else (torch.float32, 1e-5)
    size = square.sqrt()
    reach = scale / size
    least = ((reach.square() + 1 - alpha) / (2 * reach) - margin).to(dtype)  # accepted words have at least this cosine
    units = (x.double() / size[:, None]).to(dtype)
    found = torch.full((n,), -1, dtype=torch.int64, device=x.device)
    stride = -(-width // 8) * 8
    run, table = kernels.get(x.device), _table(x.device)
    left = torch.arange(n, device=x.device)
    at, limit = 0, math.ceil(CERTAIN / probability)
    while left.numel() and at < limit:
        rows = int(min(max(64.0, 0.5 / probability), 65536.0))
        draws = run.random_u16(ctx, Purpose.CODEBOOK, at * stride, rows * stride, x.device).view(rows, stride)[:, :d]
        z = table[draws.long()]
        book = torch.nn.functional.normalize(z.to(dtype), dim=1).t().contiguous()
        trying, start = left, torch.zeros_like(left)
        # Once, and again for the few words that the preselection took and the error refuses.
        while trying.numel():
            word = run.sphere_first(book, units[trying], least[trying], start)
            trying, word = trying[word >= 0], word[word >= 0]
            good = errors(points(z[word], scale[trying]), x[trying]) <= alpha * square[trying]
            found[trying[good]] = at + word[good]
            trying, start = trying[~good], word[~good] + 1
        left = left[found[left] < 0]
        at += rows
    return found
