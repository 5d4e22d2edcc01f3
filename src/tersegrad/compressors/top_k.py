"""Top-k: the k coordinates of largest magnitude, exactly; everything else becomes zero.

Formula. C(x)_i = x_i for i in T, else 0, where T holds the k largest |x_i|; ties go to the lowest index, so T is unique. Zeros
are never sent: where x has fewer than k other coordinates, the message is shorter.

Guarantee. Contractive, for every x: ||C(x) - x||^2 <= (1 - k/d) ||x||^2, because the k largest of d squares hold at least k/d
of their sum. With ``values="bf16"`` a sent coordinate errs by at most 2^-8 of itself, which leaves 1 - (k/d)(1 - 2^-16). With
``exact=False`` the threshold comes from a sample of about 65,000 coordinates and the number sent varies; it never leaves
[ceil(k/2), k + ceil(k/4)] (otherwise the exact set is sent), and so only ceil(k/2) is promised.

Wire (``spec/wire.md``, "top_k")::

    byte 0   mode: 0 normal, 1 all zero, 2 non-finite, 3 raw (the float32 vector, when coding would take more bytes)
    mode 0   count (varint), index set (``codecs/index.py``), count values (float32 or bfloat16, little-endian)

Citation. A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; S. U. Stich,
J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018. They count indices as 32 bits each; here all of them
together take about log2 C(d, k) bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import sparse
from tersegrad.codecs.values import BFloat16, Float32, Form, Place
from tersegrad.core import modes
from tersegrad.core.buffers import byte_buffer
from tersegrad.core.numbers import share
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Omega, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class TopK(Stateless):
    """Send the ``k`` largest coordinates, or ``ceil(fraction * d)`` of them.

    >>> import torch
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), TopK(k=2)
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 0., -3.,  0.,  2.])
    """

    name: ClassVar[str] = "top_k"
    wire_id: ClassVar[int] = 12
    examples: ClassVar[tuple[str, ...]] = ("top_k(fraction=0.01)", "top_k(fraction=0.01, exact=false)")
    selects: ClassVar[bool] = True
    corners: ClassVar[tuple[str, ...]] = ("top_k(fraction=0.1, values=bf16)", "top_k(fraction=0.05, exact=false)")

    fraction: float | None = None
    k: int | None = None
    exact: bool = True
    values: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        require((self.fraction is None) != (self.k is None), "top_k takes either fraction= or k=")
        require(self.fraction is None or 0 < self.fraction <= 1, f"top_k: fraction lies in (0, 1], got {self.fraction}")
        require(self.k is None or self.k >= 1, f"top_k: k is at least 1, got {self.k}")
        require(self.values in ("float32", "bf16"), f'top_k: values is "float32" or "bf16", got {self.values!r}')

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        return sparse.send(self._choose(x, data, spec), spec, ctx, self._form, data, raw=lambda: x)

    def splits(self, device: torch.device, weight: float) -> bool:
        return device.type != "cpu" and weight == 1.0 and sparse.codes_there(device)

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool]:
        x, left = fed.x, fed.left
        data, form, k = byte_buffer(out, self.max_nbytes(spec), x.device), self._form, self._count(x.numel())
        # What is sent exactly leaves nothing behind. A message of all coordinates needs them first.
        taken = self.exact and self.values == "float32" and not sparse.goes_raw(k, x.numel(), form)
        if taken:
            chosen = kernels.get(x.device).select_top_k_of_sum(x, fed.residual, left, k)
            found = sparse.chosen(chosen, spec, form, data)
        else:
            found = self._choose(torch.add(x, fed.residual, out=left), data, spec)
        # What is not finite is among it, since nothing is larger.
        finite = bool(found.values.isfinite().all()) if found.finite is None else found.finite
        nbytes = sparse.send(found, spec, ctx, form, data, raw=lambda: left)
        if sparse.goes_raw(found.indices.numel(), spec.numel, form):
            left.zero_()
        elif finite and found.total and not taken:
            decoded = form.write(found.values, Place(found.indices, spec, ctx)).decoded
            sparse.scatter(sparse.Sparse(found.indices, decoded), left, -1.0)
        return Message(data if out is None else out, nbytes), finite

    def _choose(self, x: Tensor, data: Tensor, spec: Spec) -> sparse.Chosen:
        """What is sent. NaN and Inf are larger than any number, so they are among it."""
        ops, d, k, form = kernels.get(x.device), x.numel(), self._count(x.numel()), self._form
        if not self.exact:
            most = self._most(d)
            found = sparse.chosen(ops.select_compact(x, ops.select_sample_key(x, k), most), spec, form, data)
            if -(-k // 2) <= found.total <= most:
                return found
        return sparse.chosen(ops.select_top_k(x, k), spec, form, data)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        sparse.decode(data, spec, ctx, self._form, self._most(spec.numel), out, weight, raw=True, full=self.exact)

    def codes_on_host(self, device: torch.device) -> bool:
        return not sparse.codes_there(device)

    def max_nbytes(self, spec: Spec) -> int:
        d, most = spec.numel, self._most(spec.numel)
        return max(1, min(sparse.max_nbytes(most, d) + self._form.max_nbytes(most, 1), 1 + 4 * d))

    def guarantee(self, spec: Spec) -> Guarantee:
        kept = self._sure(spec.numel) / max(spec.numel, 1) * (1.0 if self.values == "float32" else 1 - 2.0**-16)
        return Guarantee("contractive", 1 - kept, sure=True)

    def wire_omega(self, spec: Spec) -> Omega:
        return "exact" if self._sure(spec.numel) == spec.numel and self.values == "float32" else None

    def mode(self, data: bytes) -> str:
        return modes.name(data)

    @functools.cached_property
    def _form(self) -> Form:
        return Float32() if self.values == "float32" else BFloat16()

    def _count(self, d: int) -> int:
        return share(d, self.fraction, self.k)

    def _sure(self, d: int) -> int:
        """The least number of coordinates that a message carries."""
        k = self._count(d)
        return k if self.exact else -(-k // 2)

    def _most(self, d: int) -> int:
        """The largest number of coordinates that a message carries."""
        k = self._count(d)
        return k if self.exact else min(d, k + -(-k // 4))
