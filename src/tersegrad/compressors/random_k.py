"""Random-k: k coordinates that both ends draw from the shared seed; indices are never sent.

Formula. S = {p(0), ..., p(k-1)} for a permutation p of [0, d). C(x)_i = (d/k) x_i for i in S, else 0; without the factor where
``unbiased=False``. p is a Feistel network on ceil(log2 d) bits, walked until it lands below d, then turned by a rotation:
integers only, the same on every device, keyed by Philox words of (seed, step, buffer), purpose MASK and the shared sender.

Guarantee. The rotation is uniform on [0, d), so each coordinate is in S with probability k/d whatever the network does. Hence
E C(x) = x, and E ||C(x) - x||^2 = sum_i x_i^2 (d/k - 1): unbiased, omega = d/k - 1. Unscaled, the mean of ||C(x) - x||^2 is
(1 - k/d) ||x||^2: contractive on average, not surely. (The factor is rounded to float32; products beyond float32 saturate.)

Wire (``spec/wire.md``, "random_k"): k values x_p(0), ..., x_p(k-1), unscaled, float32 or bfloat16, little-endian; nothing else.
A vector with any NaN or Inf is sent as k NaNs, and any NaN or Inf among the values decodes to all NaN.

Citation. J. Konecny et al., "Federated learning: strategies for improving communication efficiency", 2016 (random masks);
S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018. There every worker draws its own mask; here
all ranks share one, so that masked values can be summed as they are.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import philox
from tersegrad.core.numbers import HUGE, share
from tersegrad.core.protocol import Context, Guarantee, Omega, Spec
from tersegrad.core.stateless import Stateless, exactly
from tersegrad.core.text import require

ROUNDS = 6


def permutation_key(ctx: Context, numel: int) -> tuple[list[int], int]:
    """The network's round keys (32-bit words) and the rotation, from three Philox blocks."""
    shared = ctx.shared()
    words: list[int] = []
    for j in range(3):
        words += philox.block(ctx.seed, (j, philox.Purpose.MASK << 24, ctx.step, ctx.buffer << 16 | shared.sender))
    return words[:ROUNDS], (words[9] << 32 | words[8]) * numel >> 64


@dataclasses.dataclass(frozen=True)
class RandomK(Stateless):
    """Send ``k`` coordinates, or ``ceil(fraction * d)`` of them, chosen by the shared seed.

    >>> x, c = torch.ones(1000), RandomK(fraction=0.1)
    >>> message, _ = c.encode(x, Spec.of(x), None, Context(seed=7))
    >>> decoded = c.decode(message, Spec.of(x), Context(seed=7))
    >>> int(message.nbytes), decoded.unique(return_counts=True)
    (400, (tensor([ 0., 10.]), tensor([900, 100])))
    """

    name: ClassVar[str] = "random_k"
    wire_id: ClassVar[int] = 13
    examples: ClassVar[tuple[str, ...]] = ("random_k(fraction=0.01)",)
    corners: ClassVar[tuple[str, ...]] = ("random_k(fraction=0.1)", "random_k(fraction=0.1, unbiased=false)")
    fixed_size: ClassVar[bool] = True

    fraction: float | None = None
    k: int | None = None
    unbiased: bool = True
    values: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        require((self.fraction is None) != (self.k is None), "random_k takes either fraction= or k=")
        require(self.fraction is None or 0 < self.fraction <= 1, f"random_k: fraction lies in (0, 1], got {self.fraction}")
        require(self.k is None or self.k >= 1, f"random_k: k is at least 1, got {self.k}")
        require(self.values in ("float32", "bf16"), f'random_k: values is "float32" or "bf16", got {self.values!r}')
        biased = "random_k: bfloat16 rounds to nearest, which is biased: use values=float32 or unbiased=false"
        require(self.values == "float32" or not self.unbiased, biased)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        ops = kernels.get(x.device)
        values = ops.permuted_gather(x, *permutation_key(ctx, x.numel()), self._count(x.numel()))
        ops.settle(values, ops.all_finite(x))
        if self.values == "bf16":
            # Not beyond the largest finite bfloat16, which would turn a number into Inf. NaN stays NaN.
            largest = torch.finfo(torch.bfloat16).max
            values = values.clamp(-largest, largest).to(torch.bfloat16)
        data.copy_(values.view(torch.uint8))
        return data.numel()

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        exactly(data, self.max_nbytes(spec))
        ops, key = kernels.get(out.device), permutation_key(ctx, spec.numel)
        values = data.clone().view(torch.float32 if self.values == "float32" else torch.bfloat16).float()
        finite = ops.all_finite(values)
        if self.unbiased and spec.numel:
            values = (values * (spec.numel / self._count(spec.numel))).clamp_(-HUGE, HUGE)
        if weight is None:
            ops.permuted_scatter(values, *key, out)
        else:
            ops.permuted_scatter_add(values, *key, weight, out)
        ops.settle(out, finite)

    def max_nbytes(self, spec: Spec) -> int:
        return self._count(spec.numel) * (4 if self.values == "float32" else 2)

    def guarantee(self, spec: Spec) -> Guarantee:
        kept = self._count(spec.numel) / max(spec.numel, 1)
        if self.unbiased:
            return Guarantee("unbiased", 1 / kept - 1 if kept else 0.0)
        return Guarantee("contractive", 1 - kept * (1.0 if self.values == "float32" else 1 - 2.0**-16))

    def wire_omega(self, spec: Spec) -> Omega:
        kept = self._count(spec.numel)
        if self.unbiased:
            return 1 / (kept / spec.numel) - 1
        return "exact" if kept == spec.numel and self.values == "float32" else None

    def _count(self, d: int) -> int:
        return share(d, self.fraction, self.k)
