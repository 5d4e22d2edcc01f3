"""Spherical Compression: send the number of the first random point on a sphere that lies close enough.

Maps x to ||x|| sqrt(1 - alpha) w_T, where w_0, w_1, ... are random directions that both ends can generate and T is the first t with
||x|| sqrt(1 - alpha) w_t within squared distance alpha ||x||^2 of x.

- ``unbiased=False``: strictly contractive, alpha. The encoder checks the error of the float32 values that will be decoded, so the
  bound is sure. A direction is accepted with probability P(alpha, d), so T is geometric whatever x is, and the expected length is
  below -log2 P + 1.57 bits, within 1.57 bits of the least possible.
- ``unbiased=True``: the same points divided by c = E<w_T, x/||x||> sqrt(1 - alpha), unbiased because the accepted cap is symmetric
  about x; omega = (1 - alpha)/c^2 - 1 <= alpha/(1 - alpha).
- ``block=m`` cuts the vector into blocks of m coordinates, each with its own norm and T: errors add, so the guarantee stands. A norm n
  is sent as 2^(k/g); with the deviation e = |ln(sent/n)| a direction passes from the cosine sqrt(1 - alpha) cosh(e) on instead of
  sqrt(1 - alpha), which keeps the bound. Unbiased norms are rounded stochastically; their variance is part of omega.

The search takes 1/P(alpha, d), about alpha^(-d/2), draws: whole vectors of some 16 coordinates, blocks of 4 to 16. Words are drawn
anew for every message and sender, so that errors of different workers are independent and average out.

Wire: ``spec/wire.md``, "Spherical compression".

Albasyoni, Safaryan, Condat, Richtarik: Optimal Gradient Compression (arXiv 2010.03246). We differ in the blocks with coded norms,
the unbiased version, and normal numbers from a table of integers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels, theory
from tersegrad.codecs import elias, levels, rans, rice, sphere, varint
from tersegrad.core import host, modes
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import NON_FINITE, NORMAL, RAW, ZERO
from tersegrad.core.numbers import TINY, float32
from tersegrad.core.protocol import Context, Guarantee, Omega, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.core.text import require
from tersegrad.kernels.reference.sphere import NO_NORM, power

# Norms of whole vectors that say: not finite, stored as they are.
NAN_BITS, INF_BITS = 0x7FC00000, 0x7F800000
# The most draws that may be expected.
VECTOR_DRAWS, BLOCK_DRAWS = 2.0**24, 2.0**20
LONGEST_UNARY = 127
# Bits of the norm and of the Rice parameter of a whole vector.
NORM, PARAMETER = 31, 6
# No encoder draws so many words.
FAR = 1 << 40
# Up to so many norms the sequential code is tried.
SHORT = 1 << 10

# The same few arguments come again with every message.
_chance = functools.lru_cache(maxsize=256)(theory.cap_probability)
_cap_bits = functools.lru_cache(maxsize=256)(theory.neg_log2_cap)
_rice_parameter = functools.lru_cache(maxsize=256)(theory.spherical_rice_parameter)
_constant = functools.lru_cache(maxsize=256)(theory.spherical_constant)


@dataclasses.dataclass(frozen=True)
class Spherical(Stateless):
    """Spherical Compression of whole short vectors or by blocks."""

    name: ClassVar[str] = "spherical"
    wire_id: ClassVar[int] = 19
    slow: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("spherical(alpha=0.5, block=4)",)
    corners: ClassVar[tuple[str, ...]] = ("spherical(alpha=0.5, block=8)", "spherical(alpha=0.6, block=5, unbiased=true)")
    alpha: float
    block: int | None = None
    unbiased: bool = False

    def __post_init__(self) -> None:
        require(0 < self.alpha < 1, f"alpha must lie in (0, 1), got {self.alpha}")
        require(self.block is None or 1 <= self.block <= 1024, f"block must lie in 1..1024, got {self.block}")
        if self.block is not None:
            self._affordable(self.block)
            coarse = not self.unbiased and self._worst() <= 0
            require(not coarse, f"alpha={self.alpha} is finer than the norms of blocks: use 4e-5 or more, or block=none")

    def _affordable(self, d: int) -> None:
        most = VECTOR_DRAWS if self.block is None else BLOCK_DRAWS
        bits = _cap_bits(self.alpha, max(d, 1))
        if bits <= math.log2(most):
            return
        block = max((m for m in range(1, 65) if _cap_bits(self.alpha, m) <= math.log2(BLOCK_DRAWS)), default=1)
        low, high = self.alpha, 1.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (low, middle) if _cap_bits(middle, d) <= math.log2(most) else (middle, high)
        require(
            False,
            f"alpha={self.alpha} in {d} dimensions takes 2^{bits:.1f} draws, more than the 2^{math.log2(most):.0f} allowed: "
            f"use block={block} or less, or alpha={math.ceil(high * 1000) / 1000} or more",
        )

    def init(self, spec: Spec, device: torch.device | str) -> None:
        if self.block is None:
            self._affordable(spec.numel)

    def max_nbytes(self, spec: Spec) -> int:
        d = spec.numel
        return max(32, 4 + 4 * d) if self.block is None else max(1 + 4 * d, 32 + 18 * -(-d // self.block))

    def guarantee(self, spec: Spec) -> Guarantee:
        omega = self.wire_omega(spec)
        return Guarantee("unbiased", omega) if isinstance(omega, float) else Guarantee("contractive", self.alpha, sure=True)

    def wire_omega(self, spec: Spec) -> Omega:
        if not self.unbiased:
            return None
        # The last block may be shorter; fewer dimensions have the smaller variance.
        d = max(min(spec.numel, self.block or spec.numel), 1)
        omega = 1 + theory.spherical_omega(self.alpha, d)
        spread = 0.0 if self.block is None else math.sinh(math.log(2) / (2 * self.notches)) ** 2
        return omega * (1 + spread) - 1

    def mode(self, data: bytes) -> str:
        if self.block is not None:
            return modes.name(data)
        word = int.from_bytes(data[:4], "little") & 0x7FFFFFFF
        kinds = {0: ZERO, NAN_BITS: NON_FINITE, INF_BITS: RAW}
        return modes.NAMES[kinds.get(word, NORMAL)] if len(data) >= 4 else "missing"

    @property
    def notches(self) -> int:
        """Norms a factor of two apart have this many steps between them: a power of two that balances norms and directions."""
        eta = math.sqrt(min(3 / max(self.block - 1, 1) if self.block else 0.25, 0.25) * self.alpha / (1 - self.alpha))
        g = 1
        while g < 64 and math.log(2) / (2 * g) > eta:
            g *= 2
        return min(2 * g, 64) if self.unbiased else g

    def _radius(self, d: int) -> float:
        """Distance of decoded points for unit vectors of d coordinates."""
        radius = math.sqrt(1 - self.alpha)
        # Rounded to float32, which hides how the machine computed it.
        return float32(radius / _constant(self.alpha, d)) if self.unbiased else radius

    def _rice(self, d: int) -> int:
        """The encoder's choice of a Rice parameter for words of d coordinates; it is sent.

        Where norms are rounded, words are accepted at varying cosines: the parameter is the best one for the mean of these.
        """
        if self.block is None or self.unbiased:
            return int(_rice_parameter(self.alpha, d))
        eta = math.log(2) / (2 * self.notches)
        return int(_rice_parameter(1 - (1 - self.alpha) * (1 + eta * eta / 3), d))

    def _worst(self) -> float:
        """What is left of alpha for the direction where a block's norm is rounded by half a notch."""
        return 1 - (1 - self.alpha) * math.cosh(math.log(2) / (2 * self.notches)) ** 2

    def _search(self, ctx: Context, x: Tensor, norm: Tensor, square: Tensor, width: int, start: int | None = None) -> Tensor:
        """Words for the rows of x; ``norm`` is what the decoder will know of their norms."""
        d = x.shape[1]
        chance = _chance(self.alpha if self.block is None or self.unbiased else self._worst(), d)
        size = square.sqrt() if self.unbiased else norm
        return sphere.search(ctx, x, size * math.sqrt(1 - self.alpha), square, self.alpha, chance, width, start)

    def stays(self, device: torch.device) -> bool:
        return kernels.faster(device, "sphere_norms", "sphere_search", "sphere_points")

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        if self.block is None:
            self._affordable(x.numel())
        message = self._encode_vector(x, ctx) if self.block is None else self._encode_blocks(x, self.block, ctx)
        data[: message.numel()] = message
        return message.numel()

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        d = spec.numel
        if self.block is None:
            self._decode_vector(data, d, ctx, out, weight)
        else:
            self._decode_blocks(data, d, self.block, ctx, out, weight)

    # Whole vectors: 31 bits of norm, 6 of the Rice parameter, then the Rice code of T, in one stream.

    def _encode_vector(self, x: Tensor, ctx: Context) -> Tensor:
        d, square = x.numel(), kernels.get(x.device).sum_squares(x).view(1)
        norm = square.sqrt().to(torch.float32)
        known = torch.isfinite(norm) & (norm >= TINY)
        found = self._search(ctx, x.view(1, d), norm.double(), square.where(known, 0.0), d) if d else square
        square, norm, found = host.read_all(square, norm, found)
        if not math.isfinite(float(square)):
            return _bytes(NAN_BITS, NORM)
        if float(norm) < TINY:
            return _bytes(0, NORM)
        t, m = int(found), self._rice(d)
        if 0 <= t >> m <= LONGEST_UNARY:
            start, quotient = NORM + PARAMETER, t >> m
            code = 1 << quotient | (t & (1 << m) - 1) << quotient + 1
            stream = int(norm.view(torch.int32)) | m << NORM | code << start
            return _bytes(stream, start + quotient + 1 + m)
        return torch.cat([_bytes(INF_BITS, NORM), host.read(x).view(torch.uint8)])

    def _decode_vector(self, payload: Tensor, d: int, ctx: Context, out: Tensor, weight: float | None) -> None:
        if not 4 <= payload.numel() <= max(32, 4 + 4 * d):
            raise CorruptMessage(f"{payload.numel()} bytes are no spherical message of {d} coordinates")
        head = int.from_bytes(bytes(payload[:4].tolist()), "little") & 0x7FFFFFFF
        if head == INF_BITS:
            _put(_stored(payload[4:], d), out, weight)
            return
        if head in (0, NAN_BITS):
            if payload.numel() != 4:
                raise CorruptMessage("bytes after the end of the message")
            _put(math.nan if head else 0.0, out, weight)
            return
        norm = struct.unpack("<f", struct.pack("<I", head))[0]
        if not TINY <= norm < math.inf or d == 0:
            raise CorruptMessage(f"a norm of {norm}")
        stream = int.from_bytes(bytes(payload.tolist()), "little")
        m, code = stream >> NORM & (1 << PARAMETER) - 1, stream >> NORM + PARAMETER
        quotient = (code & -code).bit_length() - 1
        size = NORM + PARAMETER + quotient + 1 + m
        if (
            m > rice.MAX_K
            or not 0 <= quotient <= LONGEST_UNARY
            or (size + 7) // 8 != payload.numel()
            or code >> quotient + 1 + m
        ):
            raise CorruptMessage("not a Rice code of this length")
        number = quotient << m | code >> quotient + 1
        if number >= FAR:
            raise CorruptMessage("a codeword is out of reach")
        scale = torch.tensor([norm * self._radius(d)], dtype=torch.float64)
        index, scale = (host.send(known, out.device) for known in (torch.tensor([number]), scale))
        sphere.restore(ctx, index, scale, d, out.view(1, d), weight)

    # Blocks: mode, largest norm, the other norms relative to it, and the Rice codes, with their parameter before them.

    def _groups(self, d: int, block: int) -> list[tuple[int, int, int]]:
        """(first block, blocks, coordinates per block) of the full blocks and of the shorter last one."""
        full, rest = divmod(d, block)
        return [(0, full, block)] * (full > 0) + [(full, 1, rest)] * (rest > 0)

    def _encode_blocks(self, x: Tensor, block: int, ctx: Context) -> Tensor:
        d, ops = x.numel(), kernels.get(x.device)
        square = ops.block_sum_squares(x, block)
        finite = torch.isfinite(square).all()
        k, sent = ops.sphere_norms(square, self.notches, ctx if self.unbiased else None)
        # Blocks without a norm have no words, and none has where one is not finite.
        searched = square.where((k != NO_NORM) & finite, 0.0)
        words = []
        for first, count, size in self._groups(d, block):
            at, part = first * block, slice(first, first + count)
            rows = x[at : at + count * size].view(count, size)
            words.append(self._search(ctx, rows, sent[part], searched[part], block, at))
        finite, k, *words = host.read_all(finite, k, *words)
        if not bool(finite):
            return _mode(NON_FINITE)
        alive = k != NO_NORM
        if not bool(alive.any()):
            return _mode(ZERO)
        top = int(k[alive].max())
        parts = [_mode(NORMAL), _raw(struct.pack("<h", top)), _write_norms((top + 1 - k.long()).where(alive, 0))]
        for t, (first, count, size) in zip(words, self._groups(d, block)):
            t = t[alive[first : first + count]]
            if bool((t < 0).any()):
                return self._as_it_is(x)
            if t.numel():
                m = self._rice(size)
                parts += [_raw(bytes([m])), rice.encode(t, m)]
        # Unbiased messages must not be chosen by their length, which depends on the draws.
        longer = 1 + 4 * d < sum(p.numel() for p in parts) and not self.unbiased
        return self._as_it_is(x) if longer else torch.cat(parts)

    def _as_it_is(self, x: Tensor) -> Tensor:
        return torch.cat([_mode(RAW), host.read(x).view(torch.uint8)])

    def _decode_blocks(self, payload: Tensor, d: int, block: int, ctx: Context, out: Tensor, weight: float | None) -> None:
        mode = int(payload[0]) if payload.numel() else -1
        if mode == RAW:
            _put(_stored(payload[1:], d), out, weight)
            return
        if mode in (ZERO, NON_FINITE) and payload.numel() == 1:
            _put(math.nan if mode == NON_FINITE else 0.0, out, weight)
            return
        if mode != NORMAL or payload.numel() < 5 or d == 0:
            raise CorruptMessage("not a spherical message in blocks")
        top = struct.unpack("<h", bytes(payload[1:3].tolist()))[0]
        below, at = _read_norms(payload, 3, -(-d // block))
        k = top + 1 - below
        if not -127 * self.notches <= int(k.min()) or int(k.max()) > 140 * self.notches:
            raise CorruptMessage("a norm lies outside the range of float32")
        norm, alive = power(k, self.notches), below > 0
        index = torch.full_like(below, -1)
        for first, count, _size in self._groups(d, block):
            here = alive[first : first + count]
            number = int(here.sum())
            if not number:
                continue
            m = int(payload[at]) if at < payload.numel() else -1
            if not 0 <= m <= rice.MAX_K:
                raise CorruptMessage(f"a Rice parameter of {m}")
            t, used = rice.decode(payload[at + 1 :], number, m)
            at += 1 + used
            if int(t.max()) >= FAR:
                raise CorruptMessage("a codeword is out of reach")
            index[first : first + count][here] = t
        if at != payload.numel():
            raise CorruptMessage("bytes after the end of the message")
        for first, count, size in self._groups(d, block):
            begin, part = first * block, slice(first, first + count)
            sent, scale = (host.send(known, out.device) for known in (index[part], norm[part] * self._radius(size)))
            sphere.restore(ctx, sent, scale, block, out[begin : begin + count * size].view(count, size), weight, begin)


def _put(values: Tensor | float, out: Tensor, weight: float | None) -> None:
    """What needs no words into ``out``, or ``weight`` times as much added."""
    there = host.send(values, out.device) if isinstance(values, Tensor) else torch.full_like(out, values)
    _ = out.copy_(there) if weight is None else out.add_(there * weight)


def _bytes(stream: int, bits: int) -> Tensor:
    return _raw(stream.to_bytes((bits + 7) // 8, "little"))


def _raw(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _mode(mode: int) -> Tensor:
    return torch.full((1,), mode, dtype=torch.uint8)


def _stored(data: Tensor, d: int) -> Tensor:
    if data.numel() != 4 * d:
        raise CorruptMessage(f"{d} coordinates take {4 * d} bytes, got {data.numel()}")
    return data.clone().view(torch.float32)


def _write_norms(below: Tensor) -> Tensor:
    """Distances below the largest norm plus one, 0 for zero blocks: form byte, then rANS with escapes or an adaptive code."""
    high = min(int(below.max()), 255)
    symbols = below.clamp(max=255).to(torch.uint8)
    parts = [_raw(bytes([0, high])), rans.encode(symbols, high + 1)]
    if high == 255:
        parts.append(elias.encode_planar(below[below >= 255] - 254))
    best = torch.cat(parts)
    if below.numel() <= SHORT:
        centre = min(int(below.median()), 255)
        code = levels.encode((below - centre).to(torch.int32), "adaptive")
        other = torch.cat([_raw(bytes([1, centre]) + varint.write(code.numel())), code])
        best = other if other.numel() < best.numel() else best
    return best


def _read_norms(data: Tensor, at: int, count: int) -> tuple[Tensor, int]:
    form, number = int(data[at]), int(data[at + 1])
    if form == 1:
        length, at = varint.read(data, at + 2)
        if length > data.numel() - at:
            raise CorruptMessage("the norms are cut short")
        below = levels.decode(data[at : at + length].contiguous(), count).long() + number
        at += length
    elif form == 0:
        symbols, used = rans.decode(data[at + 2 :].contiguous(), count, number + 1)
        at, below = at + 2 + used, symbols.long()
        if number == 255:
            far = (below == 255).nonzero()[:, 0]
            more, used = elias.decode_planar(data[at:], far.numel())
            at += used
            below[far] += more.clamp(max=FAR) - 1
    else:
        raise CorruptMessage(f"unknown form {form} of the norms")
    if bool((below < 0).any()):
        raise CorruptMessage("a norm exceeds the largest one")
    return below, at
