"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone; those of lossless codes are in ``schema_codes.py``,
those of block quantisers in ``schema_blocks.py``.

No operation makes the host wait for a device: lengths, norms, errors and flags are tensors without dimensions on the device of the
input, and results whose size depends on the data lie in tensors of the largest size, beside their length. The exceptions are
sequential codes (levels, modelled levels, digits, Elias codes, tables), which take CPU tensors and return numbers, and
:meth:`DitherKernels.may_have_classes`, whose answer the host needs to choose a code. On the CPU lengths and errors may be numbers too,
where their types say so, and the reference may raise where it finds bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.schema_blocks import BlockKernels
from tersegrad.kernels.schema_codes import (
    AlignKernels,
    BitKernels,
    ChunkKernels,
    ClassKernels,
    CodedKernels,
    CosineKernels,
    ExponentKernels,
    PlanarKernels,
    RansKernels,
)
from tersegrad.kernels.schema_select import SelectKernels, ValueKernels
from tersegrad.kernels.schema_shares import ShareKernels
from tersegrad.kernels.schema_trellis import TrellisKernels

Cast = Literal["bf16", "fp16", "sign", "natural"]


class CastKernels(Protocol):
    """Whole messages of the fixed-rate baselines (``spec/wire.md``).

    ``x`` and ``out`` of a decoder are flat float32, ``data`` and ``out`` of an encoder uint8 of exactly the message's length.
    Decoders store, or with a ``weight`` add ``weight`` times the value (product and sum each rounded to float32).
    """

    def bf16_encode(self, x: Tensor, out: Tensor) -> None: ...
    def bf16_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def fp16_encode(self, x: Tensor, out: Tensor) -> None: ...
    def fp16_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def fp8_encode(self, x: Tensor, out: Tensor, block: int) -> None:
        """``block``: a power of two from 16 to 65536."""
        ...

    def fp8_decode(self, data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None: ...
    def sign_encode(self, x: Tensor, out: Tensor, block: int) -> None:
        """``block``: a multiple of 64."""
        ...

    def sign_decode(self, data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None: ...
    def sign_split(self, x: Tensor, carry: Tensor, out: Tensor, left: Tensor, block: int) -> Tensor:
        """:meth:`sign_encode` of y = x + carry, and into ``left`` y minus what that decodes to, in blocks of at most 4096.

        Whether y is finite (bool, 0-d); where not, ``left`` is undefined. It overlaps neither ``x`` nor ``carry``.
        """
        ...

    def natural_encode(self, x: Tensor, out: Tensor, ctx: Context) -> None: ...
    def natural_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def ternary_encode(self, x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
        """``bucket``: a multiple of 64."""
        ...

    def ternary_decode(self, data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> Tensor:
        """Whether the trits are canonical (bool, 0-d). Where not, nothing is added, and what is stored is undefined."""
        ...

    def natural_levels_encode(self, x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
        """``width``: bits per coordinate, enough for ``2 * levels + 2`` codes and at most 8."""
        ...

    def natural_levels_decode(
        self, data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None
    ) -> None: ...


class SumKernels(Protocol):
    """Sums of several messages of a baseline in one pass."""

    def sum_casts(self, cast: Cast, messages: Sequence[Tensor], out: Tensor, weight: float = 1.0, block: int = 0) -> None:
        """``out`` = the sum of ``weight`` times each of these messages, in their order: as by the decoder, one after another.

        ``block``: that of ``sign``.
        """
        ...


class DitherKernels(Protocol):
    """Sparse Dithering and the codes of its levels (``spec/wire.md``, dithered levels)."""

    def levels_encode(self, levels: Tensor, adaptive: bool) -> Tensor:
        """Signed int32 levels as one bit stream, in the published or the adaptive form."""
        ...

    def levels_decode(self, data: Tensor, count: int) -> Tensor:
        """The int32 levels of a stream; :class:`CorruptMessage` where it cannot be one."""
        ...

    def dither_max_bytes(self, numel: int) -> int:
        """No message for ``numel`` coordinates is longer."""
        ...

    def dither_encode(
        self,
        x: Tensor,
        nu: float,
        step: float | Tensor,
        coder: int,
        chunk: int,
        ctx: Context | None,
        out: Tensor,
        left: Tensor | None = None,
        carry: Tensor | None = None,
        layout: Tensor | None = None,
        rdo: bool = False,
    ) -> tuple[int | Tensor, float | Tensor, float | Tensor]:
        """Write a message for x into ``out``: length in bytes (int64), ||x||^2 (not finite where x is not), squared error (float64).

        With ``nu`` > 0 every block takes the step 2 sqrt(nu/n) ||x||, else all take ``step``, a float32 number or a float64 tensor of one
        on the device of x, which nobody waits for. Levels are rounded to nearest and
        least-squares scales are sent; with ``ctx`` they are rounded stochastically and steps are sent. ``coder``: 0 the shortest,
        1 rANS, 2 the published code. ``chunk``: the log2 of the length of rANS chunks, 14 to 18, or 0: as suits the levels.
        The error is exact only with ``step`` and without ``ctx``.
        ``carry`` is added to x before anything else, and ``left`` (a place of its own, needed with ``carry``) becomes the sum minus
        what the message decodes to; it is undefined where the sum is not finite.
        ``layout`` (``Spec.layout``) tells where rows and columns are and allows scale classes; without it there are none.
        ``rdo``, without ``ctx``: some levels are one nearer to zero, where that saves more bits than the error is worth.
        """
        ...

    def dither_decode(self, data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None = None) -> Tensor:
        """``out = decoded``, or ``out += weight * decoded``; :class:`CorruptMessage` where ``data`` is no message.

        Without a ``layout`` the vector is one row.
        """
        ...

    def dither_sample(self, x: Tensor, step: float, stride: int, out: Tensor, carry: Tensor | None = None) -> None:
        """Squared error and squared norm of a sample of x (plus ``carry``), into ``out`` (two float64).

        The sample is one block of 4096 coordinates in ``stride``. Levels are rounded to nearest, and every
        block of 2^16 has its least-squares scale.
        """
        ...

    def dither_aim(self, x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
        """The step at which samples of x (plus ``carry``) err by nearly alpha, for ``dither_encode``; float64, (4,), on the device of x.

        That step, a float32; where a search for a better one starts (its log2 before it was rounded) and how fast errors rise there;
        and the squared norm of the first sample. Where the latter is 0, ``norm`` serves in its place, and where it is
        then not positive or not finite the step is the smallest. ``core.targets.sampled_step`` is what all follow, bit for bit.
        """
        ...

    def may_have_classes(self, levels: Tensor, layout: Tensor, begin: int, numel: int) -> bool:
        """A cheap look at integer levels before they are coded: those from ``begin`` on of a vector of ``numel``.

        ``levels`` are int8, where -127 and 127 also stand for what lies beyond. False: cut into segments from ``begin`` on and coded
        with the step 1 they would have no classes. True: they may, and coding them tells.
        """
        ...


class HadamardKernels(Protocol):
    """The randomised Walsh-Hadamard rotation by blocks (signs from the context, sender left to the caller)."""

    def rotate(self, x: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
        """Rotate float32 ``x`` into ``out`` of the padded size; max |x| (float32, 0-d), not finite where x is not."""
        ...

    def rotate_where(self, x: Tensor, out: Tensor, block: int, ctx: Context, wanted: Tensor, factor: float) -> None:
        """Rotate ``factor`` times ``x`` into ``out`` if the flag is set, without waiting for it."""
        ...

    def unrotate(self, y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
        """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
        ...


class RoundingKernels(Protocol):
    """Philox draws and norms (``spec/wire.md``, Philox).

    Sums are float64 in one order everywhere: chunks of 4096 coordinates; in a chunk 32 lanes, coordinate i adding to lane
    i % 32 in order; lanes, then chunk sums (padded with zeros to a power of two), are folded by adding the second half to the
    first until one is left.
    """

    def random_u16(self, ctx: Context, purpose: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """The 16-bit draws of coordinates start .. start + count, as int32 in 0..65535."""
        ...

    def abs_max(self, x: Tensor) -> Tensor:
        """Largest magnitude (float32, 0-d): Inf or NaN exactly if ``x`` holds one, so that it is the finite check too."""
        ...

    def sum_squares(self, x: Tensor) -> Tensor:
        """Sum of squares (float64, 0-d)."""
        ...

    def norm_step(self, x: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
        """A step, factor * sqrt(by * ||x||^2 / over), as a normal float32 that was rounded toward zero, and ||x||^2; float64, (2,).

        Where the norm is not positive or not finite the step is ``otherwise``. Both lie on the device of x.
        """
        ...

    def sum_abs(self, x: Tensor) -> Tensor:
        """Sum of magnitudes (float64, 0-d)."""
        ...

    def block_abs_max(self, x: Tensor, block: int) -> Tensor:
        """:meth:`abs_max` of every run of ``block`` coordinates; the last may be shorter."""
        ...

    def block_sum_squares(self, x: Tensor, block: int) -> Tensor:
        """:meth:`sum_squares` of every run of ``block`` coordinates."""
        ...

    def block_sum_abs(self, x: Tensor, block: int) -> Tensor:
        """:meth:`sum_abs` of every run of ``block`` coordinates."""
        ...


class DrawnKernels(Protocol):
    """Draws that both ends share (``spec/wire.md``, "Subtractive dithering" and "Spherical compression")."""

    def subtractive_encode(
        self,
        x: Tensor,
        omega: float,
        whole: bool,
        chunk: int,
        ctx: Context,
        out: Tensor,
        layout: Tensor,
        minus: float | None = None,
    ) -> int | Tensor:
        """Write a message of subtractive dithering for x, but no short one, into ``out``; its length in bytes (int64).

        ``whole``: one step for all, else one for each segment. ``chunk`` as for ``dither_encode``, ``layout``: :attr:`Spec.layout`. No
        message is longer than 5 bytes, and 4 for each step and each coordinate. With ``minus`` x, which is contiguous, becomes x minus so
        many times what the message decodes to; it is undefined where x is not finite.
        """
        ...

    def subtractive_decode(
        self, data: Tensor, whole: bool, ctx: Context, out: Tensor, weight: float | None, layout: Tensor
    ) -> Tensor:
        """``out = decoded``, or ``out += weight * decoded``; :class:`CorruptMessage` where ``data`` is no such message."""
        ...

    def subtractive_quantise(self, x: Tensor, step: float, ctx: Context, start: int, levels: Tensor) -> int | Tensor:
        """Folded levels (int32) of coordinates start, ...; the largest magnitude (int64, 0-d), or -1: not finite or beyond 2^30."""
        ...

    def subtractive_bins(self, ctx: Context, start: int, out: Tensor) -> None:
        """The bin 0..15 of the dither's magnitude, uint8."""
        ...

    def subtractive_octaves(self, ctx: Context, start: int, out: Tensor) -> None:
        """How close the dither's magnitude is to its largest, uint8: 0 in the lower half, 1 in the next quarter, ..., 7."""
        ...

    def subtractive_restore(
        self, levels: Tensor, step: float, ctx: Context, start: int, out: Tensor, weight: float | None
    ) -> None:
        """``out = value``, or ``out += weight * value``."""
        ...

    def random_rows(self, ctx: Context, purpose: int, rows: Tensor, width: int) -> Tensor:
        """Draws r * stride .. r * stride + width for each of the int64 ``rows``, stride = width rounded up to 8; int32."""
        ...

    def sphere_first(self, book: Tensor, units: Tensor, least: Tensor, start: Tensor) -> Tensor:
        """For each row of ``units`` (n, d) the first column of ``book`` (d, words), from ``start`` on, with at least this product.

        int64, -1 for none. Products may be rounded in any order: callers leave a margin.
        """
        ...

    def sphere_norms(self, square: Tensor, notches: int, ctx: Context | None) -> tuple[Tensor, Tensor]:
        """Norms as k with 2^(k / notches), int32, and what they stand for, float64; their squares are given, float64.

        To the nearest, or stochastically with ``ctx``. Norms below 2^-126, and those that are not finite, are -2^31, which stands for 0.
        """
        ...

    def sphere_search(
        self,
        ctx: Context,
        x: Tensor,
        scale: Tensor,
        square: Tensor,
        alpha: float,
        probability: float,
        width: int,
        start: int | None,
        table: Tensor,
    ) -> Tensor:
        """For each row of ``x`` (n, d) the first word at distance ``scale`` that errs by at most ``alpha`` times ``square``, int64.

        -1 for none among :data:`CERTAIN` / ``probability``, and where the square is not positive or not finite. With ``start``, the number
        of the first coordinate, x has shared signs. ``table``: the integer of each draw. See ``codecs/sphere.py``.
        """
        ...

    def sphere_points(
        self,
        ctx: Context,
        index: Tensor,
        scale: Tensor,
        width: int,
        start: int | None,
        table: Tensor,
        out: Tensor,
        weight: float | None = None,
    ) -> None:
        """The points of words into the rows of ``out`` (n, d), zeros for negative numbers; or ``weight`` times them are added."""
        ...

    def modelled_encode(self, levels: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
        """int32 levels as one stream, with chances of a one in 2^16 by class (uint8) and decision, (classes, 1 + 2 reach) int32."""
        ...

    def modelled_decode(self, data: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
        """The reverse; ``CorruptMessage`` where the stream ends early or a level exceeds 2^30."""
        ...


class VarianceKernels(Protocol):
    """Variance-based compression on flat float32 tensors; none of the arguments is written into."""

    def variance_select(
        self, r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The next r and v, room for ``limit`` indices and values of what is sent, how many there are, whether all is finite.

        With R = r + x, V = v + s: sent where R^2 > alpha V, then both are 0; elsewhere R and zeta V. The scalars are rounded to float32,
        each operation rounds once.
        """
        ...

    def hybrid_select(
        self, r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same, +-tau being sent where |R| > tau and R^2 > alpha V; there R -+ tau and max((V - |R| 2 tau) + tau^2, 0)."""
        ...

    def exp4_top(self, sent: Tensor) -> Tensor:
        """2^floor(log2 max |sent|) over the last axis, kept with length 1; 0 where that is below 2^-126."""
        ...

    def exp4_round(self, sent: Tensor, top: Tensor) -> Tensor:
        """Sign and nearer power of two, from top / 128 to ``top``, or 0."""
        ...


class Kernels(
    AlignKernels,
    BitKernels,
    BlockKernels,
    CastKernels,
    ChunkKernels,
    ClassKernels,
    CodedKernels,
    CosineKernels,
    DitherKernels,
    DrawnKernels,
    ExponentKernels,
    HadamardKernels,
    PlanarKernels,
    RansKernels,
    RoundingKernels,
    SelectKernels,
    ShareKernels,
    SumKernels,
    TrellisKernels,
    ValueKernels,
    VarianceKernels,
    Protocol,
):
    """Everything a backend provides."""
