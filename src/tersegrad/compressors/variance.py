"""Variance-based compression: a component is sent once its sign is beyond doubt, and waits while it is ambiguous.

Maps. With x the mean gradient of a local batch and s the sum over samples z of the squares of z's share of it, each worker keeps two
float32 numbers a parameter, r and v. Every step

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
import itertools
import math
import struct
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack, exp4, index, varint
from tersegrad.core.errors import BadConfiguration, CorruptMessage, MissingStatistics
from tersegrad.core.protocol import Compressor, Context, Guarantee, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration, require

NORMAL, ZERO, NON_FINITE, PACKED = 0, 1, 2, 4
PAPER = ord("V")  # the first byte of the paper's form
CPU = torch.device("cpu")
Sparse = tuple[Tensor, Tensor]  # indices and float32 values


@dataclasses.dataclass(frozen=True)
class VarianceState:
    """What was not sent yet of every coordinate, and its accumulated second moment."""

    carries: ClassVar[str] = "r"

    r: Tensor  # (numel,) float32
    v: Tensor  # (numel,) float32


@dataclasses.dataclass(frozen=True)
class _VarianceBased(Configuration):
    """What both have in common: state, messages of mode, indices and values, and sparse decoding."""

    needs_second_moment: ClassVar[bool] = True

    def init(self, spec: Spec, device: torch.device | str) -> VarianceState:
        self._check_size(spec.numel)
        zeros = torch.zeros(spec.numel, dtype=torch.float32, device=device)
        return VarianceState(zeros, zeros.clone())

    def _given(self, x: Tensor, spec: Spec, state: VarianceState, stats: Stats | None) -> tuple[Tensor, Tensor]:
        """The gradient and its second moment, flat."""
        if stats is None or stats.second_moment is None:
            raise MissingStatistics(
                f"{self.name} decides by the second moment of the per-sample gradients: pass stats=Stats(second_moment=...) "
                "(moments.Collector(model) collects it; integrations.ddp.attach does so by itself)"
            )
        x, s = flat_float32(x, spec), flat_float32(stats.second_moment)
        require(x.numel() == state.r.numel(), f"the state is for {state.r.numel()} coordinates, got {x.numel()}")
        require(s.numel() == x.numel(), f"the second moment has {s.numel()} coordinates, the gradient {x.numel()}")
        return x, s

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(spec.numel, dtype=torch.float32, device=message.data.device)
        found = self._read(message.payload.cpu(), spec, ctx)
        if found is None:
            return out.fill_(math.nan)
        kernels.get(out.device).sparse_scatter(found[0].to(out.device), found[1].to(out.device), out)
        return out

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        found = self._read(message.payload.cpu(), spec, ctx)
        if found is None:
            return out.fill_(math.nan)
        kernels.get(out.device).sparse_scatter_add(found[0].to(out.device), found[1].to(out.device), weight, out)
        return out

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")

    # What a concrete class says: what its messages hold, and how many coordinates a word can name.

    def _read(self, data: Tensor, spec: Spec, ctx: Context) -> Sparse | None:
        """Indices and values of a message on the CPU; None if it says non-finite."""
        raise NotImplementedError

    def _check_size(self, numel: int) -> None:
        raise NotImplementedError


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

    alpha: float
    zeta: float = 0.999
    wire: Literal["compact", "paper"] = "compact"
    values: Literal["exp4", "sign", "bf16"] | Compressor[Any] = "exp4"
    residual: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        _check(self.name, self.alpha, self.zeta, self.wire)
        require(self.residual in ("drop", "keep"), f'vgc: residual is "drop" or "keep", got {self.residual!r}')
        if isinstance(self.values, str):
            require(
                self.values in ("exp4", "sign", "bf16"),
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
    def wire_id(self) -> int:
        return 24

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
        x, s = self._given(x, spec, state, stats)
        ops = kernels.get(x.device)
        r, v, indices, values, finite = ops.variance_select(state.r, state.v, x, s, self.alpha, self.zeta)
        if not finite:
            return _message(_head(NON_FINITE), out, x.device), state
        data, decoded = self._write(indices.cpu(), values.cpu(), spec, ctx)
        if self.residual == "keep":
            r[indices.long()] = values - decoded.to(values.device)
        return _message(data, out, x.device), VarianceState(r, v)

    def _write(self, indices: Tensor, values: Tensor, spec: Spec, ctx: Context) -> tuple[Tensor, Tensor]:
        """The message, and what each of the values becomes."""
        if self.values == "exp4":
            return self._write_exp4(indices, values, spec)
        if not values.numel():
            return _head(ZERO), values
        head = _head(NORMAL, indices, spec.numel)
        if self.values == "bf16":
            largest = torch.finfo(torch.bfloat16).max
            rounded = values.clamp(-largest, largest).to(torch.bfloat16)
            return torch.cat((head, rounded.view(torch.uint8))), rounded.float()
        if self.values == "sign":
            owners, tensors = _owners(indices, spec)
            ends = torch.bincount(owners, minlength=tensors).cumsum(0).tolist()
            sum_abs = kernels.get(CPU).sum_abs
            means = [float(sum_abs(values[a:b])) / (b - a) for a, b in itertools.pairwise([0, *ends])]
            scales = torch.tensor(means, dtype=torch.float64).clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
            signs = bitpack.pack(torch.signbit(values).to(torch.uint8), 1)
            decoded = torch.copysign(scales.float()[owners], values)
            return torch.cat((head, scales.view(torch.uint8), signs)), decoded
        inner, part = self._inner, Spec.flat(values.numel())
        message, _ = inner.encode(values, part, None, ctx.child(0))
        return torch.cat((head, message.payload)), inner.decode(message, part, ctx.child(0))

    def _write_exp4(self, indices: Tensor, values: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        ops = kernels.get(CPU)
        owners = torch.searchsorted(_ends(spec), indices.long(), right=True)
        largest = torch.zeros(len(spec.pieces)).scatter_reduce_(0, owners, values.abs(), "amax")
        tops = ops.exp4_top(largest.unsqueeze(-1)).squeeze(-1)
        decoded = ops.exp4_round(values, tops[owners])
        kept = decoded != 0
        indices, owners, sent = indices[kept], owners[kept], decoded[kept]
        exponents = torch.frexp(tops).exponent - 1
        codes = (exponents[owners] - (torch.frexp(sent).exponent - 1) + 8 * (sent < 0)).to(torch.uint8)
        used = torch.zeros(len(spec.pieces), dtype=torch.bool)
        used[owners] = True
        if self.wire == "paper":
            table = torch.where(used, exponents, -128).to(torch.int8).view(torch.uint8)
            table = torch.nn.functional.pad(table, (0, -table.numel() % 4))
            return torch.cat((_paper_head(b"VGC1", sent.numel()), table, _words(codes, 28, indices))), decoded
        if not sent.numel():
            return _head(ZERO), decoded
        coded, packed = exp4.encode(exponents[used], codes)
        return torch.cat((_head(PACKED if packed else NORMAL, indices, spec.numel), coded)), decoded

    def _read(self, data: Tensor, spec: Spec, ctx: Context) -> Sparse | None:
        if self.wire == "paper":
            return self._read_paper(data, spec)
        mode, indices, rest = _read_head(data, spec.numel, self.name, (NORMAL, PACKED) if self.values == "exp4" else (NORMAL,))
        count = indices.numel()
        if mode in (ZERO, NON_FINITE):
            return None if mode == NON_FINITE else (indices, torch.zeros(0))
        if self.values == "exp4":
            owners, tensors = _owners(indices, spec)
            exponents, codes = exp4.decode(rest, count, tensors, mode == PACKED)
            return indices, _powers(exponents[owners], codes)
        if self.values == "bf16":
            _check_rest(rest, 2 * count)
            return indices, rest.clone().view(torch.bfloat16).float()
        if self.values == "sign":
            owners, tensors = _owners(indices, spec)
            _check_rest(rest, 2 * tensors + bitpack.nbytes(count, 1))
            scales = rest[: 2 * tensors].clone().view(torch.bfloat16).float()
            signs = bitpack.unpack(rest[2 * tensors :], 1, count).to(torch.float32)
            return indices, scales[owners] * (1.0 - 2.0 * signs)
        return indices, self._inner.decode(Message(rest.clone(), rest.numel()), Spec.flat(count), ctx.child(0))

    def _read_paper(self, data: Tensor, spec: Spec) -> Sparse | None:
        tensors = len(spec.pieces)
        table = 8 + tensors + -tensors % 4
        words = _read_words(data, b"VGC1", table, spec.numel, 28)
        if words is None:
            return None
        codes, indices = words
        padding = data[8 + tensors : table]
        exponents = data[8 : 8 + tensors].clone().view(torch.int8).to(torch.int32)
        owners = torch.searchsorted(_ends(spec), indices, right=True)
        used = torch.zeros(tensors, dtype=torch.bool)
        used[owners] = True
        if bool(padding.any()) or not torch.equal(used, exponents != -128) or bool((exponents[used] < exp4.LOWEST).any()):
            raise CorruptMessage("the exponents do not fit the words")
        return indices.to(index.dtype(spec.numel)), _powers(exponents[owners], codes)

    def max_nbytes(self, spec: Spec) -> int:
        d, tensors = spec.numel, len(spec.pieces)
        if self.wire == "paper":
            return 8 + tensors + -tensors % 4 + 4 * d
        if self.values == "exp4":
            values = exp4.max_nbytes(d, tensors)
        elif self.values == "bf16":
            values = 2 * d
        elif self.values == "sign":
            values = 2 * tensors + bitpack.nbytes(d, 1)
        else:
            values = self._inner.max_nbytes(Spec.flat(d))
        return _max_head(d) + values

    @property
    def _inner(self) -> Compressor[Any]:
        assert not isinstance(self.values, str)
        return self.values

    def _check_size(self, numel: int) -> None:
        _check_words(self.wire, numel, 28)


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

    alpha: float
    tau: float
    zeta: float = 0.999
    wire: Literal["compact", "paper"] = "compact"

    def __post_init__(self) -> None:
        _check(self.name, self.alpha, self.zeta, self.wire)
        require(2.0**-60 <= self.tau <= 2.0**60, f"hybrid: tau lies in [2^-60, 2^60], got {self.tau}")

    @property
    def wire_id(self) -> int:
        return 25

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
        x, s = self._given(x, spec, state, stats)
        ops = kernels.get(x.device)
        r, v, indices, values, finite = ops.hybrid_select(state.r, state.v, x, s, self.alpha, self._tau, self.zeta)
        if not finite:
            return _message(_head(NON_FINITE), out, x.device), state
        indices, negative = indices.cpu(), torch.signbit(values.cpu()).to(torch.uint8)
        if self.wire == "paper":
            data = torch.cat((_paper_head(b"VGH1", indices.numel()), _words(negative, 31, indices)))
        elif not indices.numel():
            data = _head(ZERO)
        else:
            data = torch.cat((_head(NORMAL, indices, x.numel()), bitpack.pack(negative, 1)))
        return _message(data, out, x.device), VarianceState(r, v)

    def _read(self, data: Tensor, spec: Spec, ctx: Context) -> Sparse | None:
        if self.wire == "paper":
            words = _read_words(data, b"VGH1", 8, spec.numel, 31)
            if words is None:
                return None
            negative, indices = words[0], words[1].to(index.dtype(spec.numel))
        else:
            mode, indices, rest = _read_head(data, spec.numel, self.name, (NORMAL,))
            if mode == NON_FINITE:
                return None
            _check_rest(rest, bitpack.nbytes(indices.numel(), 1))
            negative = bitpack.unpack(rest, 1, indices.numel())
        return indices, (1.0 - 2.0 * negative.to(torch.float32)) * self._tau

    def max_nbytes(self, spec: Spec) -> int:
        d = spec.numel
        return 8 + 4 * d if self.wire == "paper" else _max_head(d) + bitpack.nbytes(d, 1)

    @property
    def _tau(self) -> float:
        """Tau as a float32."""
        return float(struct.unpack("<f", struct.pack("<f", self.tau))[0])

    def _check_size(self, numel: int) -> None:
        _check_words(self.wire, numel, 31)


def _check(name: str, alpha: float, zeta: float, wire: str) -> None:
    require(0 < alpha < math.inf, f"{name}: alpha is positive (1 to 2 is usual), got {alpha}")
    require(0 <= zeta <= 1, f"{name}: zeta lies in [0, 1], got {zeta}")
    require(wire in ("compact", "paper"), f'{name}: wire is "compact" or "paper", got {wire!r}')


def _check_words(wire: str, numel: int, width: int) -> None:
    if wire == "paper" and numel > 1 << width:
        raise BadConfiguration(f"the paper's words name 2^{width} coordinates, this buffer has {numel}: use wire=compact")


def _message(data: Tensor, out: Tensor | None, device: torch.device) -> Message:
    nbytes = data.numel()
    if out is None:
        return Message(data.to(device), nbytes)
    out[:nbytes] = data
    return Message(out, nbytes)


def _head(mode: int, indices: Tensor | None = None, numel: int = 0) -> Tensor:
    """Mode byte; count and index set."""
    if indices is None:
        return torch.tensor([mode], dtype=torch.uint8)
    start = torch.tensor([mode, *varint.write(indices.numel())], dtype=torch.uint8)
    return torch.cat((start, index.encode(indices, numel)))


def _max_head(d: int) -> int:
    return 1 + varint.nbytes(d) + index.max_nbytes(d // 2, d)


def _read_head(data: Tensor, d: int, name: str, modes: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    """Mode, indices and the bytes after them."""
    mode = int(data[0]) if data.numel() else -1
    if mode in (ZERO, NON_FINITE) and data.numel() == 1:
        return mode, torch.zeros(0, dtype=index.dtype(d)), data[:0]
    if mode not in modes:
        raise CorruptMessage(f"not a {name} message for {d} coordinates: {data.numel()} bytes, mode {mode}")
    count, at = varint.read(data, 1)
    if not 1 <= count <= d:
        raise CorruptMessage(f"the message announces {count} of {d} coordinates")
    indices, used = index.decode(data[at:], count, d)
    return mode, indices, data[at + used :]


def _check_rest(rest: Tensor, expected: int) -> None:
    if rest.numel() != expected:
        raise CorruptMessage(f"the values take {expected} bytes, the message has {rest.numel()}")


def _ends(spec: Spec) -> Tensor:
    """Where each piece ends in the buffer."""
    return torch.tensor(list(itertools.accumulate(p.numel for p in spec.pieces)), dtype=torch.int64)


def _owners(indices: Tensor, spec: Spec) -> tuple[Tensor, int]:
    """For each index the number of its piece among those that have any, and how many those are."""
    pieces = torch.searchsorted(_ends(spec), indices.long(), right=True)
    used, owners = torch.unique_consecutive(pieces, return_inverse=True)
    return owners, used.numel()


def _powers(exponents: Tensor, codes: Tensor) -> Tensor:
    """(-1)^sign 2^(E - d) as float32; what would be denormal is no message's."""
    biased = exponents - (codes & 7).to(torch.int32) + 127
    if bool((biased < 1).any()):
        raise CorruptMessage("a value is below the smallest normal float32")
    magnitude = (biased << 23).to(torch.int32).view(torch.float32)
    return torch.where(codes > 7, -magnitude, magnitude)


def _paper_head(magic: bytes, count: int) -> Tensor:
    return torch.frombuffer(bytearray(magic + struct.pack("<I", count)), dtype=torch.uint8)


def _words(codes: Tensor, width: int, indices: Tensor) -> Tensor:
    """Little-endian 32-bit words, code << width | index."""
    words = codes.to(torch.int64) << width | indices.to(torch.int64)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.uint8)


def _read_words(data: Tensor, magic: bytes, start: int, d: int, width: int) -> tuple[Tensor, Tensor] | None:
    """Codes (uint8) and strictly increasing indices (int64) of a message in the paper's form; None if it says non-finite."""
    if data.numel() == 1 and int(data[0]) == NON_FINITE:
        return None
    if data.numel() < start or bytes(data[:4].tolist()) != magic:
        raise CorruptMessage("not a message in the paper's form")
    count = struct.unpack("<I", bytes(data[4:8].tolist()))[0]
    if data.numel() != start + 4 * count:
        raise CorruptMessage(f"{count} words take {start + 4 * count} bytes, the message has {data.numel()}")
    words = data[start:].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    indices = words & (1 << width) - 1
    if count and (int(indices[-1]) >= d or not bool((indices.diff() > 0).all())):
        raise CorruptMessage("the indices of the words do not increase within the buffer")
    return (words >> width).to(torch.uint8), indices
