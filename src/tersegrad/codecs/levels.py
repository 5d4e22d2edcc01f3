"""Short runs of signed integers as one bit stream: the published Sparse Dithering code, and an adaptive arithmetic code.

``paper``: count of zeros, unary magnitudes, signs, then the positions of the zeros, enumerated by an arithmetic coder that
knows at each coordinate how many zeros are left. ``adaptive``: zero flag, sign and unary magnitude bits with adaptive
probabilities; no tables, so it suits vectors of a few thousand coordinates. The first bit of the stream tells which.

>>> import torch
>>> k = torch.tensor([0, 0, 2, -1, 0, 0, 1, 0], dtype=torch.int32)
>>> data = encode(k, "paper")
>>> data.numel(), torch.equal(decode(data, 8), k)
(2, True)
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from tersegrad import kernels

Form = Literal["paper", "adaptive"]


def encode(levels: Tensor, form: Form) -> Tensor:
    """int32 levels as bytes."""
    return kernels.get(levels.device).levels_encode(levels, form == "adaptive")


def decode(data: Tensor, count: int) -> Tensor:
    """``count`` int32 levels."""
    return kernels.get(data.device).levels_decode(data, count)
