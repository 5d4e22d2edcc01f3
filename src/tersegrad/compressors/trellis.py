"""Trellis-coded quantisation: of all admissible sequences of multiples of a step send the one nearest to the vector.

Maps x to scale * n with integers n. In each of S states only the even or only the odd integers are admissible, and the chosen
one decides the next state, so that each coordinate costs as much as on a grid of *twice* the step while the best sequence
(Viterbi's algorithm) errs by kappa = 0.26 squared steps per coordinate with 8 states, instead of 1/3.

- ``trellis``, deterministic: step = sqrt(nu/d) ||x||, and the scale that is sent is the least-squares one. Already the greedy
  sequence errs by at most a step per coordinate, so the error is at most d step^2 = nu ||x||^2 for every x: contractive,
  alpha = nu, the bound of Sparse Dithering at half its step. Metrics are rounded to 1/32 of a step, and still classes (below) round
  toward zero; the encoder knows the exact error, and takes a smaller step should it ever exceed the bound. ``alpha=`` searches the
  largest step whose *actual* error is at most alpha, ``bits=`` the smallest step whose message fits the budget; both verify it.
  ``rdo=true`` takes the sequence with the least sum of the squared error and half a squared step per bit, where bits follow from the
  counts of the integers, in each class and parity by its own. It may err by more than a step per coordinate, so the guarantee is then the
  verified one alone. Whoever decodes sees no difference.
- ``dithered_trellis``, unbiased: x + U is quantised and U is taken off again, U uniform over one period of the code (4 steps) and known
  to both ends. The error is then the gradient of a periodic function of U, so its mean is 0, and its law is the same for every x: omega =
  kappa d step^2 / ||x||^2. A sign for every run of 2^15 coordinates, known to both ends too, cancels what rounded metrics leave.

Segments code their indices by scale classes of rows, columns or blocks where that is shorter (``docs/classes.md``), so that whoever decodes
needs the spec's shapes. Without dither, coordinates of classes that are close to zero are *still*: rounded one by one, with a dead zone, to
even integers, and left out of the trellises, which would lose there.

Wire: ``spec/wire.md``, "trellis". Indices are entropy-coded given the state (rANS); large ones are escaped. On Gaussian vectors of 2^20
coordinates messages take 0.083 bit per coordinate (8 states) and 0.065 (32 states) more than the rate-distortion function asks for, where
scalar quantisers take 0.26. On heavy-tailed vectors without shape at less than a bit, and below some 1000 coordinates, Sparse Dithering
is shorter.

Marcellin, Fischer: Trellis coded quantization of memoryless and Gauss-Markov sources (IEEE Trans. Commun. 38, 1990); Fischer, Wang:
Entropy-constrained trellis-coded quantization (IEEE Trans. Inf. Theory 38, 1992); codes of Ungerboeck (1982). We add the worst-case bound,
the dithered form and the parallel lanes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import buffers, host, modes
from tersegrad.core.protocol import Context, Fed, Guarantee, Message, Spec
from tersegrad.core.search import Bracket
from tersegrad.core.stateless import Stateless
from tersegrad.core.targets import (
    COARSE,
    Coded,
    aimed_bracket,
    meet_error,
    meet_error_aimed,
    meet_size,
    one_target,
    refines,
    toward_zero,
)
from tersegrad.core.text import require

# Mean squared error in squared steps by the number of states: of endless trellises, and what a start in state 0 adds in all.
KAPPA = {4: (0.26502, 0.306), 8: (0.25962, 0.444), 16: (0.25600, 0.548), 32: (0.25218, 0.697)}
# Of the dithered step, for the last digits of kappa and what rounded metrics add.
SLACK = 1 - 2.0**-10
# Vectors of fewer coordinates do not fill the lanes: they are the host's, wherever they are.
SHORT = 1 << 14
_HOST = torch.device("cpu")
# log2 of how much smaller steps usually are with ``rdo``.
EXPECTED = 0.125
# How much the step shrinks where an error exceeds the bound.
SMALLER = 0.95


def mean_kappa(states: int, numel: int, run: int) -> float:
    """Mean squared error of dithered coordinates in squared steps; trellises start anew every 2^``run`` coordinates.

    Never more than that of the greedy sequence, 1/3.

    >>> round(mean_kappa(8, 1 << 20, 15), 5), round(mean_kappa(8, 3, 15), 5)
    (0.26049, 0.33333)
    """
    kappa, start = KAPPA[states]
    # As rANS lays them out: 64 lanes from 2^14 coordinates on.
    lanes = 64 if numel >= 1 << 14 else 1 << max(0, numel.bit_length() - 10)
    whole, rest = divmod(numel, 1 << run)
    parts = [(whole << run, (1 << run) / lanes), (rest, rest / lanes)]
    return sum(n * min(1 / 3, kappa + start / steps) for n, steps in parts if n) / max(numel, 1)


@dataclasses.dataclass(frozen=True)
class _TrellisCoded(Stateless):
    """What both variants share."""

    def _check(self, states: int, chunk: rans.Chunk) -> None:
        require(states in KAPPA, f"states is one of {', '.join(map(str, KAPPA))}, got {states}")
        require(chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {chunk!r}")

    def max_nbytes(self, spec: Spec) -> int:
        return kernels.reference.trellis_max_bytes(spec.numel)

    def codes_on_host(self, device: torch.device) -> bool:
        return not kernels.faster(device, "trellis_encode", "trellis_decode", "trellis_aim")

    def mode(self, data: bytes) -> str:
        return modes.name(data)


@dataclasses.dataclass(frozen=True)
class Trellis(_TrellisCoded):
    """Trellis-coded quantisation: contractive, with a sure bound."""

    name: ClassVar[str] = "trellis"
    wire_id: ClassVar[int] = 20
    examples: ClassVar[tuple[str, ...]] = ("trellis(alpha=0.1)", "trellis(nu=0.1)", "trellis(alpha=0.1, rdo=true)")
    corners: ClassVar[tuple[str, ...]] = (
        "trellis(nu=0.5, states=4)",
        "trellis(alpha=0.02, states=16)",
        "trellis(bits=2.5, states=32)",
        "trellis(nu=0.5, states=4, rdo=true)",
        "trellis(alpha=0.3, states=32, rdo=true)",
        "trellis(bits=1.5, rdo=true)",
    )
    nu: float | None = None
    alpha: float | None = None
    bits: float | None = None
    states: int = 8
    chunk: rans.Chunk = "auto"
    rdo: bool = False

    def __post_init__(self) -> None:
        one_target(self.name, self.nu, self.alpha, self.bits)
        self._check(self.states, self.chunk)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", one_target(self.name, self.nu, self.alpha, self.bits), sure=True)

    def max_nbytes(self, spec: Spec) -> int:
        return super().max_nbytes(spec) if self.bits is None else max(1, math.floor(self.bits * spec.numel / 8))

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        return self._encode(x, data, spec.layout).nbytes

    def splits(self, device: torch.device, weight: float) -> bool:
        return weight == 1.0 and (device.type == "cpu" or not self.codes_on_host(device))

    def encode_split(self, fed: Fed, spec: Spec, ctx: Context, out: Tensor | None = None) -> tuple[Message, bool]:
        x, left, run = fed.x, fed.left, kernels.get(fed.x.device)
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if x.is_cpu:
            coded = self._encode(torch.add(x, fed.residual, out=left), data, spec.layout)
            run.trellis_decode(coded.data, self.states, None, left, -1.0, spec.layout)
        else:
            coded = self._encode(x + fed.residual, data, spec.layout, left)
        return Message(data if out is None else out, coded.nbytes), math.isfinite(coded.norm)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        kernels.get(out.device).trellis_decode(data, self.states, None, out, weight, spec.layout)

    def _encode(self, x: Tensor, out: Tensor, layout: Tensor, left: Tensor | None = None) -> Coded:
        """A message in the first bytes of ``out``; ``left`` becomes what it leaves out."""
        # Without a sample smaller than the vector, a device would be read from for every look of the search.
        searches = self.alpha is not None and not refines(x.numel()) and kernels.faster(_HOST, "trellis_encode")
        alone = self.rdo or searches
        return _placed(x, out, left, lambda y, room, rest: self._encode_there(y, room, layout, rest), host_alone=alone)

    def _encode_there(self, x: Tensor, out: Tensor, layout: Tensor, left: Tensor | None) -> Coded:
        run, d, chunk = kernels.get(x.device), x.numel(), _chunk(self.chunk)
        # A search for a length does not end with the message that it returns.
        rest = left if self.bits is None else None
        room = out if self.bits is None else buffers.empty(run.trellis_max_bytes(d), torch.uint8, x.device)

        def encode(step: float | Tensor) -> Coded:
            nbytes, norm, error = run.trellis_encode(x, step, self.states, chunk, None, room, layout, rest, self.rdo)
            return Coded(room, int(nbytes), float(norm), float(error))

        def squares() -> Tensor:
            return run.sum_squares(x)

        def aim(alpha: float, norm: float) -> Tensor:
            return run.trellis_aim(x, alpha, KAPPA[self.states][0], self.states, layout, norm)

        def certified(nu: float) -> Coded:
            return _certified(x, nu, encode) if d else encode(1.0)

        if self.nu is not None:
            coded = certified(self.nu)
        elif (alpha := self.alpha) is not None:
            search = functools.partial(aim, alpha)
            if self.rdo:
                found = _chosen_by_bits(aimed_bracket(search, squares), alpha, d, encode)
                coded = self._shorter(found or certified(alpha), x, out, layout, left)
            else:
                coded = meet_error_aimed(search, alpha, d, encode, squares) or certified(alpha)
        else:
            norm = float(squares()) if d else 0.0
            zeros = torch.full((1,), modes.ZERO, dtype=torch.uint8, device=x.device)
            if not 0 < norm < math.inf:
                coded = encode(1.0)
            else:
                found = meet_size(norm, out.numel(), d, lambda step: _kept(encode(step), out.numel()))
                coded = found or Coded(zeros, 1, norm, norm)
        if left is not None and rest is None:
            run.trellis_decode(coded.data, self.states, None, left.copy_(x), -1.0, layout)
        return coded if room is out else dataclasses.replace(coded, buffer=out[: coded.nbytes].copy_(coded.data))

    def _shorter(self, coded: Coded, x: Tensor, out: Tensor, layout: Tensor, left: Tensor | None) -> Coded:
        """The nearest sequence's message where that is shorter: few counts tell little of what integers cost."""
        plain = dataclasses.replace(self, rdo=False)
        other = plain._encode_there(x, torch.empty_like(out), layout, None)
        return plain._encode_there(x, out, layout, left) if other.nbytes < coded.nbytes else coded


def _chosen_by_bits(
    bracket: Bracket | None, alpha: float, numel: int, encode: Callable[[float | Tensor], Coded]
) -> Coded | None:
    """A message with ``rdo`` where the nearest sequence meets the target at the start of a bracket; None where no step met it."""
    if bracket is None:
        return encode(1.0)
    start = Bracket(start=bracket.start - EXPECTED, slope=bracket.slope, tight=bracket.tight)
    # Where the nearest sequence meets the target is only near: a first message may be far from it, however short the vector.
    return meet_error(start, alpha, max(numel, COARSE + 1), encode)


def _placed(
    x: Tensor,
    out: Tensor,
    left: Tensor | None,
    encode: Callable[[Tensor, Tensor, Tensor | None], Coded],
    host_alone: bool = False,
) -> Coded:
    """A message in the first bytes of ``out``, written where x is or, if it is short or the host's alone, on the host, after one read."""
    if x.is_cpu or (x.numel() >= SHORT and not host_alone):
        return encode(x, out, left)
    here = host.empty(out.numel(), torch.uint8, x.device)
    rest = None if left is None else host.empty(x.numel(), torch.float32, x.device)
    coded = encode(host.read(x), here, rest)
    out[: coded.nbytes].copy_(here[: coded.nbytes], non_blocking=True)
    if left is not None and rest is not None:
        left.copy_(rest, non_blocking=True)
    return dataclasses.replace(coded, buffer=out)


def _chunk(chunk: rans.Chunk) -> int:
    """As the kernels want it."""
    return 0 if chunk == "auto" else rans.chunk_bits(chunk)


def _certified(x: Tensor, nu: float, encode: Callable[[float | Tensor], Coded]) -> Coded:
    """A message at the step of the worst-case bound, or at the first smaller one whose error keeps to it; a device is read from once."""
    share = nu / x.numel()
    found = kernels.get(x.device).norm_step(x, share, 1.0, 1.0, 1.0)
    told = host.fetch(found)
    coded = encode(found[0])
    norm = told.tolist()[1]
    if not 0 < norm < math.inf:
        return coded
    step = math.sqrt(share * norm)
    while coded.error > nu * coded.norm:
        step *= SMALLER
        coded = encode(toward_zero(step))
    return coded


def _kept(coded: Coded, budget: int) -> Coded:
    """A copy of a message that fits: the next one is written to the same place."""
    return dataclasses.replace(coded, buffer=coded.data.clone()) if coded.nbytes <= budget else coded


@dataclasses.dataclass(frozen=True)
class DitheredTrellis(_TrellisCoded):
    """Trellis-coded quantisation with shared dither: unbiased, variance omega for every vector."""

    name: ClassVar[str] = "dithered_trellis"
    wire_id: ClassVar[int] = 21
    examples: ClassVar[tuple[str, ...]] = ("dithered_trellis(omega=0.1)",)
    corners: ClassVar[tuple[str, ...]] = ("dithered_trellis(omega=1, states=4)", "dithered_trellis(omega=0.01, states=32)")
    omega: float
    states: int = 8
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(1e-12 <= self.omega <= 1e6, f"omega must lie in [1e-12, 1e6], got {self.omega}")
        self._check(self.states, self.chunk)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)

    def wire_omega(self, spec: Spec) -> float:
        return float(self.omega)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        return _placed(x, data, None, lambda y, room, _: self._encode(y, room, spec, ctx)).nbytes

    def _encode(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> Coded:
        run, d, chunk = kernels.get(x.device), x.numel(), rans.chunk_bits(self.chunk)
        step: float | Tensor = 1.0
        if d:
            share = mean_kappa(self.states, d, min(chunk, 15)) * d
            step = run.norm_step(x, self.omega, share, SLACK, 1.0)[0]
        nbytes = run.trellis_encode(x, step, self.states, _chunk(self.chunk), ctx, data, spec.layout)[0]
        return Coded(data, int(nbytes))

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        kernels.get(out.device).trellis_decode(data, self.states, ctx, out, weight, spec.layout)
