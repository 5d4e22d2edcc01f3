"""Threshold: the coordinates above tau in magnitude, with their values or as +-tau; everything else becomes zero.

Formula. C(x)_i = x_i (``values="exact"``) or tau sign(x_i) (``values="sign"``) where |x_i| > tau, else 0. tau is a float32.

Guarantee. None relative to ||x||: a vector whose coordinates all lie below tau is sent as zero. Absolutely, with exact values,
||C(x) - x||^2 <= d tau^2. Under error feedback nothing is lost for good: what stays below tau accumulates until it passes.

Wire (``spec/wire.md``, "threshold")::

    byte 0   mode: 0 normal, 1 nothing above tau, 2 non-finite, 3 raw (exact values only: the float32 vector with zeros for what
             is not sent, when coding would take more bytes)
    mode 0   count (varint), index set (``codecs/index.py``), then count float32 values, or count sign bits (1: negative)

Citation. N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, is
``error_feedback(threshold(tau=..., values="sign"))``. There an element takes 32 bits (index and sign) and the residual may send
several messages of tau at once; here it takes about log2(d/count) + 2.4 bits, and one step sends one tau.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import sparse
from tersegrad.codecs.values import Float32, Form, Signs
from tersegrad.core import modes
from tersegrad.core.numbers import HUGE, float32, float32_bits
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class Threshold(Stateless):
    """Send coordinates with |x| > tau, exactly or as +-tau.

    >>> import torch
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), Threshold(tau=1.0, values="sign")
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 0., -1.,  0.,  1.])
    """

    name: ClassVar[str] = "threshold"
    wire_id: ClassVar[int] = 14
    examples: ClassVar[tuple[str, ...]] = ("threshold(tau=2.5)", "threshold(tau=2.5, values=sign)")
    selects: ClassVar[bool] = True
    corners: ClassVar[tuple[str, ...]] = ("threshold(tau=0.5)", "threshold(tau=0.5, values=sign)")

    tau: float
    values: Literal["exact", "sign"] = "exact"

    def __post_init__(self) -> None:
        require(0 <= self.tau <= HUGE, f"threshold: tau lies in [0, {HUGE:.4g}], got {self.tau}")
        require(self.values in ("exact", "sign"), f'threshold: values is "exact" or "sign", got {self.values!r}')
        require(self.values == "exact" or float32(self.tau) > 0, "threshold: +-tau needs a tau that float32 can tell from 0")

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        d, ops, key = x.numel(), kernels.get(x.device), float32_bits(abs(self.tau)) + 1
        # How many there are is not known before: room for a few per cent first, then for as many as were counted. NaN and Inf lie
        # above any tau, so they are among the values.
        found = sparse.chosen(ops.select_compact(x, key, d // 16 + 1024), spec, self._form, data)
        if found.total > found.indices.numel():
            found = sparse.chosen(ops.select_compact(x, key, found.total), spec, self._form, data)

        def whole() -> Tensor:
            vector = torch.empty(d, dtype=torch.float32, device=found.indices.device)
            kernels.get(vector.device).sparse_scatter(found.indices, found.values, vector)
            return vector

        return sparse.send(found, spec, ctx, self._form, data, raw=whole if self.values == "exact" else None)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        sparse.decode(data, spec, ctx, self._form, spec.numel, out, weight, raw=self.values == "exact", full=False)

    def codes_on_host(self, device: torch.device) -> bool:
        return not sparse.codes_there(device)

    def max_nbytes(self, spec: Spec) -> int:
        d = spec.numel
        return 1 + 4 * d if self.values == "exact" else sparse.max_nbytes(d, d) + self._form.max_nbytes(d, 1)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")

    def mode(self, data: bytes) -> str:
        return modes.name(data)

    @functools.cached_property
    def _form(self) -> Form:
        return Float32() if self.values == "exact" else Signs(float32(self.tau))
