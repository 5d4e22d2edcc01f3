"""Error feedback: what a message leaves out is added to the next one.

Maps: y = x + beta r, sends C(y) c, keeps r' = y - C(y) c; c = 1, or 1/(1+omega) when C is unbiased, which makes it contractive.
``decay`` is beta: below 1, old residuals fade, as in SparseLoCo (0.95) and DeMo (0.999, there called momentum).

Guarantee: that of c C as a contractive operator, alpha (or omega/(1+omega), on average): what the theory of error feedback asks
for. It bounds the message against y, the *corrected* gradient: ||C(y) c - y||^2 <= alpha ||y||^2. Nothing is lost for good: the
decoded messages of t steps plus the residual are the sum of the t gradients (without decay), and the residual stays bounded,
||r|| <= sqrt(alpha)/(1 - beta sqrt(alpha)) max ||x||, where alpha holds surely. A compressor without a guarantee may let it grow
without bound, so it is refused unless ``force=true``. SGD with a contractive compressor and error feedback converges at the rate
of SGD up to higher-order terms (Stich et al. 2018; Karimireddy et al. 2019).

Wire: exactly the inner compressor's message; the receiver multiplies by fl32(c). The omega in c is the one that the wire format
states for the inner compressor (``spec/wire.md``, section 6), not the one that ``guarantee`` proves: a sharper proof leaves old
messages as they are.

State: the residual, aligned with the buffer, and the inner state. A buffer that is not finite leaves both as they were. ``residual``
says how it is kept: float32, bfloat16 (half the memory) or int8 (a quarter; eight bits and a power of two per 256 coordinates, see
``core/packed.py``). ``place=cpu`` keeps it in host memory, pinned where the gradients are on a GPU, and moves it for each message.

Citation: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Stich, Cordonnier, Jaggi, "Sparsified SGD with
Memory", NeurIPS 2018. Ours keeps the residual outside the learning rate, so a schedule does not change what was left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import buffers, host
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.numbers import float32
from tersegrad.core.packed import Packed, pack
from tersegrad.core.protocol import (
    Compressor,
    Context,
    Fed,
    Guarantee,
    Message,
    Omega,
    Spec,
    Stats,
    codes_on_host,
    decode_sent,
    flat_float32,
    has_fixed_size,
    mode_of,
    restore,
    splits,
    wire_omega,
)
from tersegrad.core.sums import decode_sum, sums_at_once
from tersegrad.core.text import Configuration, require

# An ordinary buffer: what a compressor promises for it is known at construction. An empty one has nothing to promise about.
_PROBE = Spec.flat(4096)


@dataclasses.dataclass(frozen=True)
class ErrorFeedbackState:
    """The residual of every coordinate, and the inner compressor's state."""

    carries: ClassVar[str] = "residual"

    residual: Any  # (numel,): a float32 or bfloat16 tensor, or a packed vector
    inner: Any


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Configuration):
    """Error feedback around any compressor with a guarantee.

    >>> from tersegrad.compressors import TopK
    >>> print(ErrorFeedback(TopK(fraction=0.01)))
    error_feedback(top_k(fraction=0.01))
    """

    name: ClassVar[str] = "error_feedback"
    wire_id: ClassVar[int] = 64
    examples: ClassVar[tuple[str, ...]] = ("error_feedback(top_k(fraction=0.01))",)
    corners: ClassVar[tuple[str, ...]] = (
        "error_feedback(top_k(fraction=0.1))",
        "error_feedback(qsgd, residual=bfloat16)",
        "error_feedback(top_k(fraction=0.1), residual=int8, decay=0.95, place=cpu)",
    )

    inner: Compressor[Any]
    residual: Literal["float32", "bfloat16", "int8"] = "float32"
    force: bool = False
    decay: float = 1.0
    place: Literal["device", "cpu"] = "device"

    def __post_init__(self) -> None:
        require(isinstance(self.inner, Compressor), f"error_feedback wraps a compressor, got {self.inner!r}")
        kinds = ("float32", "bfloat16", "int8")
        require(self.residual in kinds, f"residual must be float32, bfloat16 or int8, got {self.residual!r}")
        require(0 <= self.decay <= 1, f"decay lies between 0 and 1, got {self.decay}")
        require(self.place in ("device", "cpu"), f"place must be device or cpu, got {self.place!r}")
        self._check(_PROBE)

    def _check(self, spec: Spec) -> None:
        if self.force:
            return
        if states.tensors(self.inner.init(dataclasses.replace(spec, pieces=spec.pieces[:0]), "cpu")) or _feeds_back(self.inner):
            raise BadConfiguration(
                f"{self.inner} keeps a residual of its own, and error feedback around it would count the same error twice: "
                "use one of them, or force=true"
            )
        promise = self.inner.guarantee(spec if spec.numel else _PROBE)
        if promise.kind == "none" or not math.isfinite(promise.value) or (promise.kind == "contractive" and promise.value >= 1):
            raise BadConfiguration(
                f"{self.inner} has no guarantee for this buffer, so its residual may grow without bound: choose a contractive or "
                "unbiased compressor (in by_tensor, put error_feedback around the parts), or say force=true"
            )
        if promise.kind == "unbiased" and wire_omega(self.inner, spec if spec.numel else _PROBE) is None:
            raise BadConfiguration(
                f"{self.inner} is unbiased, but its class has no wire_omega(spec): state the omega that both ends divide by, "
                "which later releases must keep, or say force=true"
            )

    def _weight(self, spec: Spec) -> float:
        """1/(1+omega) as a float32 where the format calls the inner compressor unbiased, else 1."""
        omega = wire_omega(self.inner, spec)
        return float32(1.0 / (1.0 + omega)) if isinstance(omega, float) and math.isfinite(omega) else 1.0

    def init(self, spec: Spec, device: torch.device | str) -> ErrorFeedbackState:
        spec = _corrected(spec)
        self._check(spec)
        zeros = torch.zeros(spec.numel, dtype=torch.float32, device="cpu" if self.place == "cpu" else device)
        return ErrorFeedbackState(self._kept(zeros), self.inner.init(spec, device))

    def _kept(self, left: Tensor) -> Tensor | Packed:
        """A residual in the form and at the place where it is kept; at the host it is whole after the next read of its device."""
        if self.residual == "int8":
            packed = pack(left)
            return packed.fetched() if self.place == "cpu" else packed
        kept = left.to(getattr(torch, self.residual))
        return host.fetch(kept) if self.place == "cpu" else kept

    def _sum(self, x: Tensor, residual: Tensor | Packed) -> Tensor:
        """The sum x + decay * residual, in a buffer of our own: it becomes the next residual. Each operation rounds."""
        y = buffers.empty(x.numel(), torch.float32, x.device)
        old = residual.sent(x.device).unpacked() if isinstance(residual, Packed) else host.send(residual, x.device)
        if self.decay == 1.0:
            return torch.add(x, old, out=y)
        return torch.mul(old.to(torch.float32), float32(self.decay), out=y).add_(x)

    def encode(
        self,
        x: Tensor,
        spec: Spec,
        state: ErrorFeedbackState,
        ctx: Context,
        *,
        stats: Stats | None = None,
        out: Tensor | None = None,
    ) -> tuple[Message, ErrorFeedbackState]:
        require(x.numel() == state.residual.numel(), f"the state is for {state.residual.numel()} coordinates, got {x.numel()}")
        spec = _corrected(spec)
        weight, flat = self._weight(spec), flat_float32(x, spec)
        residual = state.residual
        plain = isinstance(residual, Tensor) and residual.dtype == torch.float32 and residual.device == flat.device
        together = plain and self.place == "device"
        if together and splits(self.inner, flat.device, weight, self.decay):
            splitter: Any = self.inner
            left = buffers.empty(flat.numel(), torch.float32, flat.device)
            fed = Fed(flat, residual, left, weight, float32(self.decay))
            message, finite = splitter.encode_split(fed, spec, ctx, out)
            after = ErrorFeedbackState(left, state.inner)
            if isinstance(finite, Tensor):
                return message, _chosen(after, finite, state)
            return message, after if finite else state
        y = self._sum(flat, state.residual)
        message, inner = self.inner.encode(y, spec, state.inner, ctx, stats=stats, out=out)
        left = _subtract(self.inner, message, spec, ctx, y, weight)
        left = left.to(torch.bfloat16) if self.residual == "bfloat16" else left
        good = kernels.get(left.device).all_finite(left) if left.dtype == torch.float32 else torch.isfinite(left).all()
        after = ErrorFeedbackState(self._kept(left), inner)
        if left.is_cpu or self.residual == "int8" or self.place == "cpu":
            return message, after if good else state
        return message, _chosen(after, good, state)

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        spec = _corrected(spec)
        decoded = self.inner.decode(message, spec, ctx, out)
        weight = self._weight(spec)
        return decoded if weight == 1.0 else decoded.mul_(weight)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        """``out += weight * decode(message)``, in one pass where the inner compressor can."""
        inner_spec = _corrected(spec)
        add = _adder(self.inner)
        if add is not None:
            return add(message, inner_spec, ctx, out, weight * self._weight(inner_spec))
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        return out.add_(self.decode(message, spec, ctx) * weight)

    def sums_at_once(self, device: torch.device) -> bool:
        return sums_at_once(self.inner, device)

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        spec = _corrected(spec)
        return decode_sum(self.inner, messages, spec, contexts, out, weight * self._weight(spec))

    def codes_on_host(self, device: torch.device) -> bool:
        return codes_on_host(self.inner, device)

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor:
        """What was sent, before the inner compressor transforms it back (see :class:`~tersegrad.core.protocol.Transformed`)."""
        spec = _corrected(spec)
        sent = decode_sent(self.inner, message, spec, ctx)
        weight = self._weight(spec)
        return sent if weight == 1.0 else sent.mul_(weight)

    def restore(self, sent: Tensor, spec: Spec) -> Tensor:
        return restore(self.inner, sent, _corrected(spec))

    def mode(self, data: bytes) -> str | None:
        return mode_of(self.inner, data)

    def wire_omega(self, spec: Spec) -> Omega:
        return "exact" if wire_omega(self.inner, _corrected(spec)) in ("exact", 0.0) else None

    @property
    def fixed_size(self) -> bool:
        return has_fixed_size(self.inner)

    def max_nbytes(self, spec: Spec) -> int:
        return self.inner.max_nbytes(_corrected(spec))

    def guarantee(self, spec: Spec) -> Guarantee:
        """What one message promises about the corrected gradient y; see the top of the file."""
        promise = self.inner.guarantee(_corrected(spec))
        if promise.kind != "unbiased":
            return promise
        omega, stated = promise.value, wire_omega(self.inner, _corrected(spec))
        if not math.isfinite(omega):
            return Guarantee("none")
        if omega == stated or not isinstance(stated, float):
            return Guarantee("contractive", omega / (1.0 + omega), promise.sure and omega == 0)
        # The factor is c = 1/(1 + stated): E ||c C(y) - y||^2 <= ((1 - c)^2 + c^2 omega) ||y||^2.
        return Guarantee("contractive", (stated**2 + omega) / (1.0 + stated) ** 2)


def _corrected(spec: Spec) -> Spec:
    """The spec of x + r, which is float32 whatever x is."""
    return spec.in_float32


def _chosen(after: ErrorFeedbackState, good: Tensor, before: ErrorFeedbackState) -> ErrorFeedbackState:
    """The state ``after`` where the flag is set, else that ``before``. Nothing waits for the device: it is chosen there."""
    revert = kernels.get(good.device).revert
    found: ErrorFeedbackState = states.map_tensors(lambda new, old: revert(new, good, old), after, before)
    return found


def _adder(inner: object) -> Callable[..., Tensor] | None:
    """Its ``decode_add``, if it has one. Asking for the protocol itself takes longer than adding a short message."""
    return getattr(inner, "decode_add", None)


def _subtract(inner: Compressor[Any], message: Message, spec: Spec, ctx: Context, y: Tensor, weight: float) -> Tensor:
    """``y -= weight * decode(message)``. Product and difference round one after the other, as a receiver's do."""
    add = _adder(inner)
    if add is not None:
        return add(message, spec, ctx, y, -weight)
    decoded = inner.decode(message, spec, ctx)
    return y.sub_(decoded if weight == 1.0 else decoded.mul_(weight))


def _feeds_back(configuration: Any) -> bool:
    """Whether error feedback is part of a configuration."""
    if isinstance(configuration, ErrorFeedback):
        return True
    if isinstance(configuration, (tuple, list)):
        return any(_feeds_back(v) for v in configuration)
    if isinstance(configuration, Configuration):
        return any(_feeds_back(getattr(configuration, f.name)) for f in dataclasses.fields(configuration))
    return False
