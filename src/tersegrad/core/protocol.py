"""The protocol: what a compressor is, and the handful of values that it is called with.

A compressor turns one flat buffer of gradients into bytes and back. Everything both ends must agree on beforehand is in
:class:`Spec` and :class:`Context`; everything else travels in the :class:`Message`. Read this file first, then
``compressors/top_k.py`` and ``wrappers/error_feedback.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from tersegrad.core import host, philox
from tersegrad.core.errors import BadConfiguration, CorruptMessage

# The sender number of randomness that all ranks share.
SHARED = 0xFFFF

S = TypeVar("S")
Omega = float | Literal["exact"] | None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements ``start..stop`` of a flattened tensor of ``shape``; pieces lie one after another in the flat buffer."""

    shape: tuple[int, ...]
    start: int
    stop: int
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= math.prod(self.shape):
            raise BadConfiguration(f"piece {self.start}..{self.stop} does not lie inside a tensor of shape {self.shape}")

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Spec:
    """What every rank knows about a buffer before any byte is sent: its pieces and its dtype."""

    pieces: tuple[Piece, ...]
    dtype: torch.dtype = torch.float32

    @staticmethod
    def flat(numel: int, dtype: torch.dtype = torch.float32) -> Spec:
        """One vector of ``numel`` coordinates, without any structure."""
        return Spec((Piece((numel,), 0, numel),), dtype)

    @staticmethod
    def of(*tensors: Tensor) -> Spec:
        """The spec of whole tensors laid one after another (all of one dtype)."""
        if not tensors:
            raise BadConfiguration("Spec.of needs at least one tensor")
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) != 1:
            raise BadConfiguration(f"one buffer holds one dtype, got {sorted(map(str, dtypes))}")
        return Spec(tuple(Piece(tuple(t.shape), 0, t.numel()) for t in tensors), tensors[0].dtype)

    @functools.cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.pieces)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.pieces, self.dtype))

    def __hash__(self) -> int:
        # Looked up in every message; there may be hundreds of pieces.
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Hashes of texts differ between processes.
        return {"pieces": self.pieces, "dtype": self.dtype}

    @functools.cached_property
    def in_float32(self) -> Spec:
        """The same buffer in float32."""
        return self if self.dtype == torch.float32 else dataclasses.replace(self, dtype=torch.float32)

    @functools.cached_property
    def layout(self) -> Tensor:
        """Where rows and columns are: four int64 numbers for every piece with coordinates, one after another.

        How many coordinates it has; how long a row is; how many neighbours in a row belong to one column (the positions of a
        convolution's kernel); and where in a row the piece starts. Rows are the first dimension of a tensor; without a second
        one the tensor is one row.

        >>> Spec((Piece((4, 3, 5), 20, 60), Piece((7,), 0, 7))).layout.view(-1, 4).tolist()
        [[40, 15, 5, 5], [7, 7, 1, 0]]
        """
        rows: list[int] = []
        for p in self.pieces:
            if p.numel:
                columns = math.prod(p.shape[1:]) if len(p.shape) > 1 else math.prod(p.shape)
                rows += [p.numel, columns, math.prod(p.shape[2:]), p.start % columns]
        return torch.tensor(rows, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Context:
    """Public facts of one message, and the only source of randomness: seed, step, buffer and sender."""

    seed: int = 0
    step: int = 0
    buffer: int = 0
    sender: int = 0

    def __post_init__(self) -> None:
        # A step makes dozens of contexts, nearly all of them good.
        if 0 <= self.seed < 1 << 64 and 0 <= self.step < 1 << 32 and 0 <= self.buffer < 1 << 16 and 0 <= self.sender < 1 << 16:
            return
        for name, bits in (("seed", 64), ("step", 32), ("buffer", 16), ("sender", 16)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise BadConfiguration(f"Context.{name} must lie in [0, 2^{bits}), got {value}")

    def child(self, k: int) -> Context:
        """An independent context for part ``k`` of a composition (a wrapper's second part, a second round)."""
        return Context(philox.derive(self.seed, k), self.step, self.buffer, self.sender)

    def sent_by(self, rank: int) -> Context:
        """The same context for what ``rank`` sends."""
        return Context(self.seed, self.step, self.buffer, rank)

    def shared(self) -> Context:
        """The same context for randomness that every rank draws alike (masks, rotations, codebooks)."""
        return self.sent_by(SHARED)


@dataclasses.dataclass(frozen=True)
class Message:
    """Bytes on the wire: the first ``nbytes`` of ``data``. The rate *is* ``nbytes``; nothing is estimated."""

    data: Tensor  # uint8, 1-D, at least nbytes long
    nbytes: int | Tensor
    # The bytes that are sent once more, in the host's memory, where they were written or read there.
    host: Tensor | None = None

    @property
    def length(self) -> int:
        """How many bytes are sent. Where that is a tensor of a device, the host waits for it, once."""
        if isinstance(self.nbytes, Tensor):
            object.__setattr__(self, "nbytes", int(self.nbytes))
        return self.nbytes  # type: ignore[return-value]

    @property
    def payload(self) -> Tensor:
        """Exactly the bytes that are sent; the host may wait for their :attr:`length`."""
        nbytes = self.length
        # A slice costs more than small messages take to decode.
        return self.data if nbytes == self.data.numel() else self.data[:nbytes]

    def on_host(self) -> Tensor:
        """Exactly the bytes that are sent, in the host's memory: at most one read."""
        return host.read(self.payload) if self.host is None else self.host

    def tobytes(self) -> bytes:
        return bytes(self.on_host().numpy().tobytes())

    @staticmethod
    def frombytes(data: bytes | bytearray | memoryview, device: torch.device | str = "cpu") -> Message:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        return Message(tensor.to(device), len(data))


def lengths(messages: Sequence[Message]) -> list[int]:
    """The lengths of messages; those that only a device knows in one read."""
    there = [m.nbytes.reshape(1) for m in messages if isinstance(m.nbytes, Tensor)]
    known = iter(host.read(torch.cat(there)).tolist() if there else [])
    return [next(known) if isinstance(m.nbytes, Tensor) else m.nbytes for m in messages]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sender-side statistics: ``second_moment`` = sum over samples z of c_z^2, where c_z is z's share of the gradient."""

    second_moment: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """What theory promises of ||C(x) - x||^2 for every x.

    ``contractive``: at most ``value`` * ||x||^2 (alpha). ``unbiased``: E C(x) = x and variance at most ``value`` * ||x||^2
    (omega). ``sure``: holds for every outcome, not only on average. Guarantees hold up to an absolute error of 2^-126 per
    coordinate, float32's smallest normal number, and for magnitudes up to 2^127: in float32's top binade, above that, a decoded
    value may have no finite neighbour to be rounded to and is clamped, which biases it.
    """

    kind: Literal["contractive", "unbiased", "none"]
    value: float = math.inf
    sure: bool = False

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        letter, prefix = ("alpha", "C" if self.sure else "B") if self.kind == "contractive" else ("omega", "U")
        return f"{prefix}({letter}={self.value:.4g})"


@runtime_checkable
class Compressor(Protocol[S]):
    """The one interface. Configurations are frozen; state is a value passed in and returned, never written into."""

    @property
    def wire_id(self) -> int:
        """Number of the wire format (``spec/wire.md``)."""
        ...

    def init(self, spec: Spec, device: torch.device | str) -> S:
        """State before the first message of this buffer."""
        ...

    def encode(
        self, x: Tensor, spec: Spec, state: S, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, S]:
        """``x``, laid out as ``spec`` says, as bytes, and the next state.

        ``out``: a uint8 buffer of at least ``max_nbytes`` to write the message into.
        """
        ...

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        """A flat float32 tensor of ``spec.numel`` coordinates, from bytes and public facts alone."""
        ...

    def max_nbytes(self, spec: Spec) -> int:
        """No message for this spec is longer."""
        ...

    def guarantee(self, spec: Spec) -> Guarantee: ...


@runtime_checkable
class Accumulator(Protocol):
    """Optional second protocol: decode and add in one pass, ``out += weight * decode(message)``.

    A message that is refused leaves ``out`` as it was.
    """

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor: ...


@runtime_checkable
class Summer(Protocol):
    """Optional protocol: decode several messages and add them up, writing ``out`` once for many of them."""

    def sums_at_once(self, device: torch.device) -> bool:
        """Whether that is so for tensors on ``device``; elsewhere they are added one after another."""
        ...

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        """``out = sum of weight * decode(message)``, in order: the bits of ``core/sums.py``'s ``add_each``."""
        ...


@runtime_checkable
class Transformed(Protocol):
    """Optional protocol of compressors that send coefficients: decoding in two steps, so that messages can be combined between them.

    ``restore(decode_sent(message, spec, ctx), spec)`` is ``decode(message, spec, ctx)``, and ``restore`` is linear.
    """

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor: ...
    def restore(self, sent: Tensor, spec: Spec) -> Tensor: ...


def decode_sent(compressor: object, message: Message, spec: Spec, ctx: Context) -> Tensor:
    """What a message holds before it is transformed back: coefficients, or the decoded vector where nothing is transformed."""
    if isinstance(compressor, Transformed):
        return compressor.decode_sent(message, spec, ctx)
    decoded: Tensor = compressor.decode(message, spec, ctx)  # type: ignore[attr-defined]
    return decoded


def restore(compressor: object, sent: Tensor, spec: Spec) -> Tensor:
    """The vector that coefficients stand for."""
    return compressor.restore(sent, spec) if isinstance(compressor, Transformed) else sent


def needs_second_moment(configuration: object) -> bool:
    """Whether a compressor, or any part that it is made of, decides by :class:`Stats` (says ``needs_second_moment = True``)."""
    if getattr(configuration, "needs_second_moment", False):
        return True
    if isinstance(configuration, (tuple, list)):
        return any(needs_second_moment(part) for part in configuration)
    if dataclasses.is_dataclass(configuration) and not isinstance(configuration, type):
        return any(needs_second_moment(getattr(configuration, f.name)) for f in dataclasses.fields(configuration))
    return False


@dataclasses.dataclass(frozen=True)
class Fed:
    """What error feedback hands over: y = x + decay * residual is to be encoded, rounded after each operation.

    ``left`` becomes y minus ``weight`` times what the message decodes to. All three are flat, contiguous float32 and do not overlap.
    """

    x: Tensor
    residual: Tensor
    left: Tensor
    weight: float = 1.0
    decay: float = 1.0


@runtime_checkable
class Splitter(Protocol):
    """Optional third protocol, for error feedback: add a residual, encode, and tell what the message leaves out, in one pass.

    Such compressors have no state. Those that say ``fades`` take a ``decay`` other than 1.
    """

    def splits(self, device: torch.device, weight: float) -> bool:
        """Whether it can, for tensors on ``device`` and this ``weight``."""
        ...

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool | Tensor]:
        """Encode y and fill ``left``. False, or a flag on the device that the host does not wait for, says that y is not finite; then
        ``left`` is undefined.
        """
        ...


def splits(compressor: object, device: torch.device, weight: float, decay: float = 1.0) -> bool:
    """Whether a compressor is a :class:`Splitter` for tensors on ``device``, this ``weight`` and residuals that fade by ``decay``."""
    said = getattr(compressor, "splits", None)
    fits = decay == 1.0 or getattr(compressor, "fades", False)
    return fits and said is not None and bool(said(device, weight))


def wire_omega(compressor: object, spec: Spec) -> Omega:
    """What the wire format calls a compressor (``spec/wire.md``, section 6): the omega of an unbiased one, "exact", or neither.

    Error feedback scales what it decodes by 1/(1 + omega), so this number is part of the format: it never changes, whatever a
    sharper proof lets ``guarantee`` promise. A compressor states it by a method ``wire_omega(spec)``; without one the factor is 1.
    """
    stated = getattr(compressor, "wire_omega", None)
    return None if stated is None or spec.numel == 0 else stated(spec)


def mode_of(compressor: object, data: bytes) -> str | None:
    """What kind of message ``data`` is, in words, for compressors that name their modes by a method ``mode(data)``."""
    named = getattr(compressor, "mode", None)
    return None if named is None else named(data)


def has_fixed_size(compressor: object) -> bool:
    """Whether every message for a spec has exactly ``max_nbytes`` bytes, so that lengths need not be sent.

    A compressor declares it by an attribute ``fixed_size``; without one its lengths vary.
    """
    return bool(getattr(compressor, "fixed_size", False))


def codes_on_host(compressor: object, device: torch.device) -> bool:
    """Whether messages for tensors on ``device`` are written and read in the host's memory, which takes one read each.

    So it is where a code is sequential, or has no kernel for the device. A compressor says it by a method of this name; one
    without it stays on the device. On the CPU there is no difference.
    """
    said = getattr(compressor, "codes_on_host", None)
    return False if said is None or device.type == "cpu" else bool(said(device))


def flat(x: Tensor) -> Tensor:
    """``x`` as a contiguous, flat tensor of its own dtype without history; itself or a view where possible."""
    if x.dim() == 1 and x.stride(0) == 1 and not x.requires_grad:
        return x
    y = x.detach().reshape(-1).contiguous()
    # torch calls one element contiguous whatever its stride is; a view as bytes asks for a stride of one.
    return y.as_strided(y.shape, (1,))


def flat_float32(x: Tensor, spec: Spec | None = None) -> Tensor:
    """``x`` as a contiguous, flat float32 tensor without history; a view where possible. It must have ``spec.numel`` elements."""
    if spec is not None and x.numel() != spec.numel:
        raise BadConfiguration(f"the spec has {spec.numel} coordinates, the tensor {x.numel()}: pass the spec of this buffer")
    if x.dtype == torch.float32:
        return flat(x)
    if not x.is_floating_point():
        raise BadConfiguration(f"gradients are floating-point tensors, got {x.dtype}: convert with x.float()")
    return flat(x.to(torch.float32))


def check_size(message: Message, expected: int) -> None:
    """Raise :class:`CorruptMessage` unless a fixed-rate message has exactly ``expected`` bytes."""
    if message.length != expected or message.data.numel() < expected:
        raise CorruptMessage(f"expected a message of {expected} bytes, got {message.length}")
