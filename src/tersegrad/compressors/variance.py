"""Variance-based compression: a component is sent once its sign is beyond doubt, and waits while it is ambiguous.

Maps. With x the mean gradient of a local batch and s the sum over samples z of the squares of z's share of it, each worker keeps two
float32 numbers per parameter, r and v. Every step

    r += x,  v += s;   where r^2 > alpha v: send r, then r = v = 0;   elsewhere v *= zeta                                    (VGC)
    r += x,  v += s;   where |r| > tau and r^2 > alpha v: send tau sign(r), then v = max(v - 2 |r| tau + tau^2, 0),
                       r -= tau sign(r);   elsewhere v *= zeta                                                               (hybrid)

r^2 > alpha v is a test of the mean of all samples since the component was last sent against its standard error: |t| > sqrt(alpha).
zeta forgets old variance, so nothing waits for ever. The optimiser (momentum, Adam, weight decay) runs after decoding.

Values that VGC sends (``values``): ``exp4``, four bits: sign and the nearer power of two, at most 2^E and at least 2^(E-7), E being the
exponent of the largest that the tensor sends; what is smaller is not sent. ``sign``: +- the mean magnitude of what the tensor sends.
``bf16``. Or any compressor without state, over all values sent: ``values=qsgd(bits=4)``. ``residual="drop"`` forgets what rounding
lost and what was too small, as published; ``"keep"`` leaves it in r.

Guarantee. None for one message: what is ambiguous is not sent at all. Over time nothing but rounding is lost (``drop``), or nothing
(``keep``, and the hybrid).

Wire (``spec/wire.md``, "vgc" and "hybrid"). ``compact``: mode byte, count, index set, entropy-coded values. ``paper``: one 32-bit
word for each value, 4 bits of code and 28 of index (hybrid: 1 and 31). Both decode to the same tensor.

Citation: Tsuzuku, Imachi, Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018 workshop
(arXiv:1802.06058). The compact form, the other values and ``keep`` are ours; exponents are those of sent components, not of all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import sparse
from tersegrad.codecs.sparse import Sparse
from tersegrad.codecs.values import BFloat16, Compressed, Exp4, Form, MeanSigns, Place, Signs
from tersegrad.codecs.words import PowerWords, SignWords, Words
from tersegrad.core import buffers, host, modes
from tersegrad.core.errors import MissingStatistics
from tersegrad.core.modes import NON_FINITE
from tersegrad.core.numbers import float32
from tersegrad.core.protocol import Compressor, Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

Wire = Literal["compact", "paper"]
Selected = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
FORMS: dict[str, Form] = {"exp4": Exp4(), "sign": MeanSigns(), "bf16": BFloat16()}


@dataclasses.dataclass(frozen=True)
class VarianceState:
    """What was not sent yet of every coordinate, and its accumulated second moment."""

    carries: ClassVar[str] = "r"

    r: Tensor  # (numel,) float32
    v: Tensor  # (numel,) float32


@dataclasses.dataclass(frozen=True)
class _VarianceBased(Configuration):
    """What both have in common: state, checked buffers, the choice of the wire form and sparse decoding.

    The paper's words and a compressor's values are written and read on the CPU. A concrete class says which coordinates are sent and in
    which forms.
    """

    needs_second_moment: ClassVar[bool] = True

    @property
    def _form(self) -> Form:
        """How the compact form writes values."""
        raise NotImplementedError

    @property
    def _words(self) -> Words | None:
        """The paper's form, if that is what the messages have."""
        raise NotImplementedError

    @property
    def _keeps(self) -> bool:
        """Whether r keeps what rounding takes away."""
        return False

    def _select(self, x: Tensor, s: Tensor, state: VarianceState, limit: int) -> Selected:
        """The next r and v, room for ``limit`` indices and values of what is sent, how many there are, whether all is finite."""
        raise NotImplementedError

    def _check(self, alpha: float, zeta: float, wire: str) -> None:
        require(0 < alpha < math.inf, f"{self.name}: alpha is positive (1 to 2 is usual), got {alpha}")
        require(0 <= zeta <= 1, f"{self.name}: zeta lies in [0, 1], got {zeta}")
        require(wire in ("compact", "paper"), f'{self.name}: wire is "compact" or "paper", got {wire!r}')

    def init(self, spec: Spec, device: torch.device | str) -> VarianceState:
        width = 63 if self._words is None else self._words.width
        require(
            spec.numel <= 1 << width,
            f"the paper's words name 2^{width} coordinates, this buffer has {spec.numel}: use wire=compact",
        )
        zeros = torch.zeros(spec.numel, dtype=torch.float32, device=device)
        return VarianceState(zeros, zeros.clone())

    def encode(
        self,
        x: Tensor,
        spec: Spec,
        state: VarianceState,
        ctx: Context,
        *,
        stats: Stats | None = None,
        out: Tensor | None = None,
    ) -> tuple[Message, VarianceState]:
        if stats is None or stats.second_moment is None:
            raise MissingStatistics(
                f"{self.name} decides by the second moment of the per-sample gradients: pass stats=Stats(second_moment=...) "
                "(moments.Collector(model) collects it; integrations.ddp.attach does so by itself)"
            )
        x, s = flat_float32(x, spec), flat_float32(stats.second_moment)
        require(x.numel() == state.r.numel(), f"the state is for {state.r.numel()} coordinates, got {x.numel()}")
        require(s.numel() == x.numel(), f"the second moment has {s.numel()} coordinates, the gradient {x.numel()}")
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        form = None if self._words is not None else self._form
        r, v, *selected, finite = self._select(x, s, state, x.numel() if x.is_cpu else x.numel() // 16 + 1024)
        found = sparse.chosen(selected, spec, form, data, finite)
        if found.total > found.indices.numel():
            # More than there was room for: a second read.
            r, v, *selected, finite = self._select(x, s, state, found.total)
            found = sparse.chosen(selected, spec, form, data, finite)
        if not found.finite:
            data[0] = NON_FINITE
            return Message(data if out is None else out, 1), state
        indices, values, decoded, copy = found.indices, found.values, found.decoded, None
        if found.nbytes is not None:
            nbytes = found.nbytes
            if self._keeps and decoded is None:
                decoded = self._form.write(values, Place(indices, spec, ctx)).decoded
        else:
            indices, values = host.read_all(indices, values)
            here = data if data.is_cpu else host.empty(data.numel(), torch.uint8, data.device)
            nbytes, decoded = self._write(values, Place(indices, spec, ctx), here)
            if here is not data:
                copy = here[:nbytes]
                data[:nbytes].copy_(copy, non_blocking=True)
        if self._keeps and decoded is not None:
            r[host.send(indices, r.device).long()] = host.send(values - decoded, r.device)
        return Message(data if out is None else out, nbytes, copy), VarianceState(r, v)

    def codes_on_host(self, device: torch.device) -> bool:
        return self._words is not None or not sparse.codes_there(device, self._form)

    def _write(self, values: Tensor, place: Place, data: Tensor) -> tuple[int, Tensor]:
        """The message's length, and what each of the values becomes."""
        if self._words is None:
            return sparse.write(values, place, self._form, data)
        message, decoded = self._words.write(values, place)
        data[: message.numel()] = message
        return message.numel(), decoded

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        self._read(message, spec, ctx, out, None)
        return out

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        self._read(message, spec, ctx, out, weight)
        return out

    def _read(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        if self._words is None:
            # What is too short for a device's kernels is read in one go.
            there = message.host is None and spec.numel >= 2 * sparse.MANY and not self.codes_on_host(message.data.device)
            data = message.payload.contiguous() if there else message.on_host()
            sparse.decode(data, spec, ctx, self._form, spec.numel, out, weight, raw=False, full=False)
            return
        data = message.on_host()
        infinite = data.numel() == 1 and int(data[0]) == NON_FINITE
        sparse.scatter(None if infinite else Sparse(*self._words.read(data, spec)), out, weight)

    def max_nbytes(self, spec: Spec) -> int:
        if self._words is not None:
            return self._words.max_nbytes(spec)
        d = spec.numel
        return sparse.max_nbytes(d, d) + self._form.max_nbytes(d, len(spec.pieces))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")

    def mode(self, data: bytes) -> str:
        return "the paper's words" if self._words is not None and data[:4] == self._words.magic else modes.name(data)


@dataclasses.dataclass(frozen=True)
class VGC(_VarianceBased):
    """Send what is unambiguous: r^2 > alpha v.

    >>> from tersegrad.core.protocol import Context, Spec, Stats
    >>> x, s = torch.tensor([0.04, 0.31, -6.25, 22.25, -35.75]), torch.zeros(5)  # no variance: everything is beyond doubt
    >>> c, spec = VGC(alpha=1.5), Spec.of(x)
    >>> message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(), stats=Stats(s))
    >>> c.decode(message, spec, Context()).tolist()
    [0.0, 0.25, -8.0, 16.0, -32.0]
    """

    name: ClassVar[str] = "vgc"
    wire_id: ClassVar[int] = 24
    examples: ClassVar[tuple[str, ...]] = ("vgc(alpha=1.5)",)
    corners: ClassVar[tuple[str, ...]] = (
        "vgc(alpha=1, zeta=0.9, wire=paper)",
        "vgc(alpha=2, values=sign, residual=keep)",
        "vgc(alpha=1.5, values=bf16)",
        "vgc(alpha=1.5, values=qsgd(bits=4, bucket=64))",
    )

    alpha: float
    zeta: float = 0.999
    wire: Wire = "compact"
    values: Literal["exp4", "sign", "bf16"] | Compressor[Any] = "exp4"
    residual: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        self._check(self.alpha, self.zeta, self.wire)
        require(self.residual in ("drop", "keep"), f'vgc: residual is "drop" or "keep", got {self.residual!r}')
        if isinstance(self.values, str):
            require(
                self.values in FORMS,
                f'vgc: values is "exp4", "sign", "bf16" or a compressor such as qsgd(bits=4), got {self.values!r}',
            )
        else:
            require(isinstance(self.values, Compressor), f"vgc: values is a name or a compressor, got {self.values!r}")
            require(
                self.values.init(Spec.flat(0), "cpu") is None,
                f"vgc: the values' compressor must not keep state, {self.values} does: r is the residual",
            )
        require(self.wire == "compact" or self.values == "exp4", "vgc: the paper's words hold exp4 values only")

    @property
    def _form(self) -> Form:
        return FORMS[self.values] if isinstance(self.values, str) else Compressed(self.values)

    @property
    def _words(self) -> Words | None:
        return PowerWords() if self.wire == "paper" else None

    def _select(self, x: Tensor, s: Tensor, state: VarianceState, limit: int) -> Selected:
        return kernels.get(x.device).variance_select(state.r, state.v, x, s, self.alpha, self.zeta, limit)

    @property
    def _keeps(self) -> bool:
        return self.residual == "keep"


@dataclasses.dataclass(frozen=True)
class Hybrid(_VarianceBased):
    """Send +-tau where |r| > tau and r is unambiguous.

    >>> from tersegrad.core.protocol import Context, Spec, Stats
    >>> x, c = torch.tensor([0.1, -3.0, 0.2, 2.0]), Hybrid(alpha=2, tau=0.5)
    >>> message, state = c.encode(x, Spec.of(x), c.init(Spec.of(x), "cpu"), Context(), stats=Stats(torch.tensor([0.0, 0.0, 0.0, 9.0])))
    >>> c.decode(message, Spec.of(x), Context()), state.r
    (tensor([ 0.0000, -0.5000,  0.0000,  0.0000]), tensor([ 0.1000, -2.5000,  0.2000,  2.0000]))
    """

    name: ClassVar[str] = "hybrid"
    wire_id: ClassVar[int] = 25
    examples: ClassVar[tuple[str, ...]] = ("hybrid(alpha=2, tau=0.1)",)
    corners: ClassVar[tuple[str, ...]] = ("hybrid(alpha=2, tau=0.1, wire=paper)",)

    alpha: float
    tau: float
    zeta: float = 0.999
    wire: Wire = "compact"

    def __post_init__(self) -> None:
        self._check(self.alpha, self.zeta, self.wire)
        require(2.0**-60 <= self.tau <= 2.0**60, f"hybrid: tau lies in [2^-60, 2^60], got {self.tau}")

    @property
    def _form(self) -> Form:
        return Signs(float32(self.tau))

    @property
    def _words(self) -> Words | None:
        return SignWords(float32(self.tau)) if self.wire == "paper" else None

    def _select(self, x: Tensor, s: Tensor, state: VarianceState, limit: int) -> Selected:
        return kernels.get(x.device).hybrid_select(state.r, state.v, x, s, self.alpha, float32(self.tau), self.zeta, limit)
