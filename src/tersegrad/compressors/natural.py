"""Natural compression: each coordinate becomes one of the two powers of two around it, without bias.

Maps     x_i to sign(x_i) 2^a or sign(x_i) 2^(a+1), where 2^a <= |x_i| < 2^(a+1).
Formula  the upper one with probability |x_i| / 2^a - 1, which is the fraction field of the float32: sixteen random bits are
         added below the exponent and may carry into it. Subnormal numbers become 0 or 2^-126 the same way.
Promise  unbiased with omega = 1/8: with f the fraction, the relative variance f (1 - f) / (1 + f)^2 is largest at f = 1/3.
         Probabilities have 16 bits, nearest: a bias of at most 2^-17 2^a, and omega grows by less than 2^-19, included in the
         value. Magnitudes above 2^127 = 1.7e38 have no finite upper neighbour and become 2^127: for them neither holds.
Wire     packed: sign bits (LSB-first, padded with zeros to a byte), then one exponent byte per coordinate: 0 is zero, e is
         2^(e - 127), 255 is NaN (all of them, if the buffer held NaN or Inf). 9 bits.
         rans: a mode byte. 0: the least and the largest exponent other than 0 (one byte each, l and h), the sign bits, then the
         rANS code of 0 for exponent 0 and e - l + 1 for others, alphabet h - l + 2. 1: all zero. 2: not finite. 4: the packed
         message, where coding would not be shorter. 5, where scale classes are shorter (``codecs/classed.py``): h, the sign
         bits, then the levels 0 for exponent 0 and h + 1 - e for others.
Source   Horvath et al., "Natural compression for distributed deep learning", 2019 (arXiv 1905.10988). The entropy-coded
         exponents are ours.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import classed, rans
from tersegrad.codecs.casts import Summed
from tersegrad.core import host, modes, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import CLASSED, NON_FINITE, NORMAL, PACKED, ZERO
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import exactly
from tersegrad.core.text import require
from tersegrad.kernels.schema import Cast


@dataclasses.dataclass(frozen=True)
class Natural(Summed):
    """Random powers of two: 9 bits per coordinate packed, about 3.6 with ``coder="rans"`` on Gaussian data.

    >>> x = torch.tensor([4.0, -0.5, 0.0, 3.0])
    >>> message, _ = Natural().encode(x, Spec.of(x), None, Context(seed=1))
    >>> message.nbytes, Natural().decode(message, Spec.of(x), Context(seed=1))
    (5, tensor([ 4.0000, -0.5000,  0.0000,  4.0000]))
    """

    name: ClassVar[str] = "natural"
    cast: ClassVar[Cast] = "natural"
    wire_id: ClassVar[int] = 9
    examples: ClassVar[tuple[str, ...]] = ("natural",)
    corners: ClassVar[tuple[str, ...]] = ("natural(coder=rans)",)
    coder: Literal["packed", "rans"] = "packed"
    chunk: rans.Chunk = "auto"

    def __post_init__(self) -> None:
        require(self.coder in ("packed", "rans"), f'natural has coder="packed" and coder="rans", got {self.coder!r}')
        require(self.chunk in rans.CHUNKS, f"{rans.CHUNK_RULE}, got {self.chunk!r}")

    @property
    def fixed_size(self) -> bool:
        return self.coder == "packed"

    def max_nbytes(self, spec: Spec) -> int:
        return (self.coder == "rans") + -(-spec.numel // 8) + spec.numel

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", 1 / 8 + 2.0**-19)

    def wire_omega(self, spec: Spec) -> float:
        return 1 / 8 + 2.0**-19

    def mode(self, data: bytes) -> str | None:
        return None if self.fixed_size else modes.name(data)

    def codes_on_host(self, device: torch.device) -> bool:
        return not self.fixed_size and not rans.codes_there(device)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        here = x.is_cpu and not classed.asks(x.device, spec.numel)
        packed = data if self.fixed_size else data[1:] if here else _room(spec.numel, x.device)
        kernels.get(x.device).natural_encode(x, packed, ctx)
        return data.numel() if self.fixed_size else self._compact(packed, data, spec)

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        if self.fixed_size:
            exactly(data, self.max_nbytes(spec))
        else:
            read = self._read_there(data, out, weight)
            if read is out:
                return
            data = self._expand(data, spec) if read is None else read
        kernels.get(data.device).natural_decode(data, out, weight)

    def _read_there(self, data: Tensor, out: Tensor, weight: float | None) -> Tensor | None:
        """Read a message of mode 0 on a device that has a kernel for that: into ``out``, or with a weight the packed message.

        Nothing, if it is none as far as is known.
        """
        numel = out.numel()
        signs = -(-numel // 8)
        if data.numel() <= 3 + signs or numel == 0 or not kernels.faster(out.device, "coded_exponents_decode"):
            return None
        packed = out if weight is None else _room(numel, out.device)
        into = out if weight is None else packed[signs:]
        if any(trust.numbers(kernels.get(out.device).coded_exponents_decode(data, into))):
            return None
        if packed is not out:
            packed[:signs] = data[3 : 3 + signs]
        return packed

    def _compact(self, packed: Tensor, data: Tensor, spec: Spec) -> int:
        """A packed message, which may lie behind the first byte of ``data``, into ``data`` in the shortest form; returns its length."""
        numel = spec.numel
        signs, exponents = packed.split_with_sizes((-(-numel // 8), numel))
        if classed.asks(data.device, numel):
            return self._compact_there(packed, data, spec)
        symbols = torch.empty_like(exponents)
        below, largest, alphabet = host.read(kernels.get(data.device).exponent_symbols(exponents, symbols)).tolist()
        if largest in (0, 255):
            data[0] = NON_FINITE if largest else ZERO
            return 1
        levels = _below(symbols, torch.tensor(alphabet, dtype=torch.int16, device=data.device))
        by_class, coded = classed.shorter(levels, lambda: symbols, alphabet, spec.layout, numel, self.chunk)
        if 2 + coded.numel() >= numel:
            data[0] = PACKED
            if not data.is_cpu:
                data[1:] = packed
            return data.numel()
        head = bytes((CLASSED, largest) if by_class else (NORMAL, below + 1, largest))
        return host.lay(data, head, signs.clone() if data.is_cpu else signs, coded)

    def _compact_there(self, packed: Tensor, data: Tensor, spec: Spec) -> int:
        """The same by kernels that write a message of mode 0 where it belongs; the host waits once."""
        numel = spec.numel
        signs, exponents = packed.split_with_sizes((-(-numel // 8), numel))
        head, place, out = data.split_with_sizes((3, signs.numel(), numel - 2))
        place.copy_(signs)
        # The host knows the largest by the time that levels are asked for.
        told: list[int] = []

        def levels(begin: int, end: int) -> Tensor:
            here = exponents[begin:end].to(torch.int16)
            return torch.where(here == 0, 0, told[-1] + 1 - here)

        begun = classed.begin(levels, exponents, "exponents", 256, spec.layout, self.chunk, head, out)
        told += host.read(begun.told).tolist()
        largest = told[-1]
        if largest in (0, 255):
            data[0] = NON_FINITE if largest else ZERO
            return 1
        found = begun.finish(told)
        if found is None:
            data[0] = PACKED
            data[1:] = packed
            return data.numel()
        by_class, coded = found
        if by_class:
            return host.lay(data, bytes((CLASSED, largest)), signs, coded)
        return 3 + signs.numel() + coded.numel()

    def _expand(self, data: Tensor, spec: Spec) -> Tensor:
        """The packed message inside one of mode 0, 1, 2, 4 or 5."""
        numel = spec.numel
        signs = -(-numel // 8)
        mode, least, largest = (*data[:3].tolist(), -1, -1, -1)[:3]
        if mode == PACKED and data.numel() == 1 + signs + numel:
            return data[1:]
        packed = _room(numel, data.device)
        if mode in (ZERO, NON_FINITE) and data.numel() == 1:
            packed[:signs], packed[signs:] = 0, 0 if mode == ZERO else 255
            return packed
        if mode == CLASSED and data.numel() > 2 + signs:
            largest = least
            if not 1 <= largest <= 254:
                raise CorruptMessage(f"the largest exponent is one of 1..254, got {largest}")
            below = classed.decode(data[2 + signs :], numel, 0, largest, spec.layout)
            packed[:signs] = data[2 : 2 + signs]
            packed[signs:] = torch.where(below == 0, 0, largest + 1 - below)
            return packed
        if mode != NORMAL or data.numel() < 3 + signs:
            raise CorruptMessage(f"a natural message of mode {mode} and {data.numel()} bytes does not fit {numel} coordinates")
        if not 1 <= least <= largest <= 254:
            raise CorruptMessage(f"exponents {least}..{largest} are not in 1..254")
        symbols, used = rans.decode(data[3 + signs :], numel, largest - least + 2)
        if used != data.numel() - 3 - signs:
            raise CorruptMessage("bytes are left after the exponents")
        packed[:signs] = data[3 : 3 + signs]
        kernels.get(data.device).exponent_bytes(symbols, least - 1, packed[signs:])
        return packed


def _room(numel: int, device: torch.device) -> Tensor:
    """For a packed message whose exponents begin at a multiple of sixteen."""
    signs = -(-numel // 8)
    return torch.empty(signs + numel + 15, dtype=torch.uint8, device=device)[-signs % 16 :][: signs + numel]


def _below(symbols: Tensor, alphabet: Tensor) -> classed.Levels:
    """How far symbols lie below the end of their alphabet, in its type; zero stays zero."""

    def levels(begin: int, end: int) -> Tensor:
        here = symbols[begin:end]
        return torch.where(here == 0, 0, alphabet - here.to(alphabet.dtype))

    return levels
