"""Chunked top-k: exactly k coordinates of largest magnitude of every chunk; everything else becomes zero.

Formula. The buffer is cut into chunks, a matrix into tiles of 64 x 64 (``codecs/tiles.py``). C(x)_i is x_i, or what stands for it, where
i is among the k largest of its chunk, else 0; a chunk of at most k coordinates is sent whole. Ties go to the lowest place, and zeros are
sent where a chunk has fewer than k other coordinates, so that every chunk sends exactly k. What stands for x_i: itself; its bfloat16;
its sign times the mean magnitude of what the tensor sends; or the mean of the values of the tensor that fell into the same of a few
``bins``, 6/bins standard deviations wide.

Guarantee. Contractive, for every x, with alpha = 1 - kappa, kappa = min over chunks of k/n: the k largest of n squares hold k/n of their
sum. bfloat16 leaves kappa (1 - 2^-16). Signs of N values with their mean magnitude m keep N m^2 = ||v||_1^2 / N >= ||v||^2 / N, so
kappa (1 - 2^-16) / N for the tensor that sends most. Bins promise nothing: far outliers in the outermost one may drown in its mean.

Wire (``spec/wire.md``, "chunk_top_k")::

    byte 0   mode: 0 normal, 1 all zero, 2 non-finite
    mode 0   the values (``codecs/chunk_values.py``), then which coordinates they are (``codecs/chunk_sets.py``)

Citation. Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024 (tiles, after a DCT); Sarfi et al., "Communication
efficient LLM pre-training with SparseLoCo", 2025 (tiles and bins). They send an index in 12, 16 or 64 bits and a bin in 8; here an index
takes log2 C(n, k) / k + 0.02 bits, 7.38 for 64 of 4,096, and bins their entropy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import chunk_sets, tiles
from tersegrad.codecs.chunk_values import Bins, Floats, Form, Signs, numbers
from tersegrad.codecs.tiles import Region
from tersegrad.core import buffers, host, modes, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Omega, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class ChunkTopK(Stateless):
    """Send the ``k`` largest coordinates of every chunk of ``chunk``; ``vector`` cuts vectors into runs of their own length.

    >>> import torch
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), ChunkTopK(k=2)
    >>> message, _ = c.encode(x, Spec.of(x), None, Context())
    >>> c.decode(message, Spec.of(x), Context())
    tensor([ 0., -3.,  0.,  2.])
    """

    name: ClassVar[str] = "chunk_top_k"
    wire_id: ClassVar[int] = 22
    examples: ClassVar[tuple[str, ...]] = ("chunk_top_k", "chunk_top_k(values=bins)")
    selects: ClassVar[bool] = True
    fades: ClassVar[bool] = True
    corners: ClassVar[tuple[str, ...]] = (
        "chunk_top_k(chunk=64, k=3)",
        "chunk_top_k(chunk=256, k=8, values=bf16, vector=16)",
        "chunk_top_k(chunk=1024, k=4, values=sign)",
        "chunk_top_k(chunk=64, k=8, values=bins, bins=8)",
    )

    chunk: int = 4096
    k: int = 64
    values: Literal["float32", "bf16", "sign", "bins"] = "float32"
    bins: int = 4
    vector: int | None = None

    def __post_init__(self) -> None:
        squares = tuple(4**e for e in range(1, 9))
        require(self.chunk in squares, f"chunk_top_k: chunk is a power of four from 4 to 65536, got {self.chunk}")
        require(1 <= self.k <= chunk_sets.MOST, f"chunk_top_k: k lies between 1 and {chunk_sets.MOST}, got {self.k}")
        forms = ("float32", "bf16", "sign", "bins")
        require(self.values in forms, f"chunk_top_k: values is one of {', '.join(forms)}, got {self.values!r}")
        require(self.bins in (2, 4, 8, 16), f"chunk_top_k: bins is 2, 4, 8 or 16, got {self.bins}")
        fits = self.vector is None or 1 <= self.vector <= chunk_sets.LARGEST
        require(fits, f"chunk_top_k: vector is none or lies between 1 and {chunk_sets.LARGEST}, got {self.vector}")

    def regions(self, spec: Spec) -> tuple[Region, ...]:
        """Where the chunks lie."""
        return tiles.regions(spec, math.isqrt(self.chunk), self.k, self.vector)

    def _counts(self, spec: Spec) -> tuple[int, ...]:
        """How many values each tensor sends; those without coordinates are left out."""
        counts, regions = [], iter(self.regions(spec))
        for piece in spec.pieces:
            left, sent = piece.numel, 0
            while left:
                region = next(regions)
                left -= region.numel
                sent += region.places
            if sent:
                counts.append(sent)
        return tuple(counts)

    def codes_on_host(self, device: torch.device) -> bool:
        return not kernels.faster(device, "chunk_message_encode", "chunk_message_decode")

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        places, values = self._room(spec, x.device)
        finite = kernels.get(x.device).chunk_choose(x, tiles.table(self.regions(spec)), places, values)
        if places.numel() and not data.is_cpu:
            return self._lay(finite, places, values, data, spec)
        return self._write(finite, places, values, data, spec)

    def _lay(
        self, finite: Tensor, places: Tensor, values: Tensor, data: Tensor, spec: Spec, kept: Tensor | None = None
    ) -> Tensor:
        """:meth:`_write` on the device of what was chosen, for which nobody waits."""
        given = (tiles.table(self.regions(spec)), numbers(self._counts(spec)), self.values, self.bins)
        return kernels.get(data.device).chunk_message_encode(places, values, finite, *given, data, kept)

    def _room(self, spec: Spec, device: torch.device) -> tuple[Tensor, Tensor]:
        count = sum(self._counts(spec))
        return buffers.empty(count, torch.int32, device), buffers.empty(count, torch.float32, device)

    def _write(
        self, finite: Tensor, places: Tensor, values: Tensor, data: Tensor, spec: Spec, kept: Tensor | None = None
    ) -> int:
        """The message for what was chosen; its length. ``kept``: gets the values as a receiver will have them."""
        # Coded where the message is written: at the host, for a device without kernels for the codes.
        if data.device != places.device:
            finite, places, values = host.read_all(finite, places, values)
        counts = self._counts(spec)
        if not bool(finite):
            data[0] = modes.NON_FINITE
            return 1
        if not counts or float(kernels.get(values.device).abs_max(values)) == 0:
            data[0] = modes.ZERO
            return 1
        data[0] = modes.NORMAL
        at = 1 + self._form.write(values, counts, data[1:], kept)
        return at + chunk_sets.encode(places, self.regions(spec), spec.numel, data[at:])

    def splits(self, device: torch.device, weight: float) -> bool:
        return True

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool | Tensor]:
        x = fed.x
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if spec.numel and not x.is_cpu and not self.codes_on_host(x.device):
            return self._split_there(fed, spec, data, data if out is None else out)
        here = data if x.is_cpu else host.empty(data.numel(), torch.uint8, x.device)
        ops, table = kernels.get(x.device), tiles.table(self.regions(spec))
        places, values = self._room(spec, x.device)
        finite, kept = (
            ops.chunk_carry(x, fed.residual, fed.decay, fed.left, table, places, values),
            self._room(spec, here.device)[1],
        )
        nbytes = self._write(finite, places, values, here, spec, kept)
        mode = int(here[0])
        if mode == modes.NORMAL:
            ops.chunk_scatter(places, host.send(kept, x.device), table, fed.left, -fed.weight)
        if not x.is_cpu:
            data[:nbytes].copy_(here[:nbytes], non_blocking=True)
        message = Message(data if out is None else out, nbytes, None if x.is_cpu else here[:nbytes])
        return message, mode != modes.NON_FINITE

    def _split_there(self, fed: Fed, spec: Spec, data: Tensor, whole: Tensor) -> tuple[Message, Tensor]:
        """:meth:`encode_split` on the device."""
        ops, table = kernels.get(data.device), tiles.table(self.regions(spec))
        (places, values), (_, kept) = self._room(spec, data.device), self._room(spec, data.device)
        finite = ops.chunk_carry(fed.x, fed.residual, fed.decay, fed.left, table, places, values)
        nbytes = self._lay(finite, places, values, data, spec, kept)
        # Zeros, where nothing is sent.
        ops.chunk_scatter(places, kept, table, fed.left, -fed.weight)
        return Message(whole, nbytes), finite

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        if spec.numel and not data.is_cpu:
            given = (tiles.table(self.regions(spec)), numbers(self._counts(spec)), self.values, self.bins)
            if not trust.holds(kernels.get(data.device).chunk_message_decode(data, *given, out, weight)):
                raise CorruptMessage(f"not a message of {self.name} for {spec.numel} coordinates")
            return
        mode = int(data[0]) if data.numel() else -1
        if mode in (modes.ZERO, modes.NON_FINITE) and data.numel() == 1:
            if mode == modes.NON_FINITE:
                out.fill_(math.nan)
            elif weight is None:
                out.zero_()
            return
        regions, counts = self.regions(spec), self._counts(spec)
        if mode != modes.NORMAL or not counts:
            raise CorruptMessage(
                f"not a message of {self.name} for {spec.numel} coordinates: {data.numel()} bytes, mode {mode}"
            )
        values, used = self._form.read(data[1:], counts)
        places = chunk_sets.decode(data[1 + used :], regions, spec.numel)
        if places.device != out.device:
            places, values = host.send(places, out.device), host.send(values, out.device)
        kernels.get(out.device).chunk_scatter(places, values, tiles.table(regions), out, weight)

    def max_nbytes(self, spec: Spec) -> int:
        return 1 + self._form.max_nbytes(self._counts(spec)) + chunk_sets.max_nbytes(self.regions(spec))

    def guarantee(self, spec: Spec) -> Guarantee:
        if self.values == "bins":
            return Guarantee("none")
        kept = min((r.keep / r.size for r in self.regions(spec)), default=1.0)
        if self.values == "sign":
            kept *= (1 - 2.0**-16) / max(self._counts(spec), default=1)
        if self.values == "bf16":
            kept *= 1 - 2.0**-16
        return Guarantee("contractive", 1 - kept, sure=True)

    def wire_omega(self, spec: Spec) -> Omega:
        whole = all(r.keep == r.size for r in self.regions(spec))
        return "exact" if whole and self.values == "float32" else None

    def mode(self, data: bytes) -> str:
        return modes.name(data)

    @property
    def _form(self) -> Form:
        if self.values == "sign":
            return Signs()
        if self.values == "bins":
            return Bins(self.bins)
        return Floats(torch.float32 if self.values == "float32" else torch.bfloat16)
