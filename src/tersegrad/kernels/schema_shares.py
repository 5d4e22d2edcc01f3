"""The operations of per-sample gradients, as :mod:`~tersegrad.kernels.schema` has those of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ShareKernels(Protocol):
    """Sums and sums of squares of per-sample gradients (``moments``); float32, not bit for bit the same on every backend."""

    def share_convolution(
        self,
        x: Tensor,
        delta: Tensor,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        padding: tuple[int, ...],
        workers: int,
        bias: bool,
    ) -> Tensor:
        """(workers, 2, o * k [+ o]): a worker's sums, then squares; either is the weight as (o, y, x, i), then the bias.

        ``x`` (samples, i, height, width) and ``delta`` (samples, o, ...); Triton takes channels-last bfloat16 or float16.
        """
        ...

    def share_norm_sums(self, x: Tensor, delta: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
        """(4, samples, channels): sums over positions of delta * (x - mean) * inverse, and of delta; then their squares.

        The statistics are (workers, channels), one row per worker.
        """
        ...

    def share_affine(
        self, x: Tensor, scale: Tensor, shift: Tensor, delta: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """``x * scale + shift``, and ``delta * factor`` added where it is given, in the dtype and layout of ``x``.

        Scale, shift and factor are (workers, channels) float32, one row per worker.
        """
        ...

    def share_norm_squares(self, parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """For every (x, delta, mean, inverse) of as many samples: the sums over samples of the squared sums of a channel.

        That is, the last two rows of ``share_norm_sums`` with one worker, summed: (channels,) each.
        """
        ...

    def share_linear_squares(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """For every (x, delta), (samples, i) and (samples, o) of as many samples: sums over samples z of (delta_z x_z^T)^2, of delta_z^2.

        (o, i) and (o,): the squares of a linear layer's weight and bias.
        """
        ...
