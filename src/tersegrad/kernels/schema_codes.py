"""The operations of lossless codes, as :mod:`~tersegrad.kernels.schema` has those of everything else."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

# How the values of chunks are written.
Form = Literal["float32", "bf16", "sign", "bins"]


class BitKernels(Protocol):
    """Bit packing, trits and serial Elias codes (on the CPU). Sizes are exact and checked by the caller."""

    def pack_bits(self, codes: Tensor, width: int, out: Tensor) -> None:
        """The low ``width`` bits of each code (uint8 up to 8 bits, int32 from 9 to 16), into all of ``out``."""
        ...

    def unpack_bits(self, data: Tensor, width: int, out: Tensor) -> None:
        """``out.numel()`` codes from ``data``; the padding after the last is not looked at."""
        ...

    def pack_trits(self, trits: Tensor, out: Tensor) -> None:
        """Five values of 0..2 per byte; ``ValueError`` for any other value."""
        ...

    def unpack_trits(self, data: Tensor, out: Tensor, check: bool) -> None:
        """The reverse. ``check``: raise ``CorruptMessage`` unless canonical; otherwise bytes above 242 read as 242."""
        ...

    def elias_bits(self, values: Tensor, code: int) -> int:
        """Bits that all values take together in code 0 gamma, 1 delta or 2 omega; ``ValueError`` for values below 1."""
        ...

    def elias_encode(self, values: Tensor, code: int) -> Tensor:
        """The codes of int64 ``values`` >= 1 one after another, as bytes."""
        ...

    def elias_decode(self, data: Tensor, code: int, out: Tensor) -> int:
        """``out.numel()`` values from the start of ``data``; returns the bytes used."""
        ...


class PlanarKernels(Protocol):
    """Codes whose unary parts come first and whose low bits follow. Lengths are int64, 0-d, on the device of ``out``."""

    def planar_gamma_encode(self, values: Tensor, out: Tensor) -> int | Tensor:
        """Elias gamma codes of int64 ``values`` >= 1 into ``out`` (uint8); their length. ``ValueError`` where ``out`` is too small."""
        ...

    def planar_gamma_decode(self, data: Tensor, out: Tensor) -> int | Tensor:
        """``out.numel()`` values from the start of ``data``; the bytes used."""
        ...

    def rice_bits(self, values: Tensor, k: int) -> int | Tensor:
        """Bits that all values take together with parameter ``k``, without padding; ``ValueError`` for negative values."""
        ...

    def rice_best(self, values: Tensor) -> int | Tensor:
        """The smallest ``k`` that minimises :meth:`rice_bits`."""
        ...

    def rice_encode(self, values: Tensor, k: int, out: Tensor) -> int | Tensor:
        """Rice codes of int64 ``values`` >= 0 into ``out`` (uint8); their length. ``ValueError`` where ``out`` is too small."""
        ...

    def rice_decode(self, data: Tensor, k: int, out: Tensor) -> int | Tensor:
        """``out.numel()`` values from the start of ``data``; the bytes used."""
        ...


# Symbols minus half the alphabet, as int8; exponents of powers of two, of which the host does not know the alphabet; twice a magnitude,
# plus 1 below zero. As levels, exponents are how far they lie below the largest, plus 1, and zero stays zero.
Means = Literal["levels", "exponents", "folded"]


class RansKernels(Protocol):
    """Interleaved rANS. Symbols and contexts are uint8 vectors; contexts are given one per symbol or one per step of 64."""

    def rans_histogram(
        self, symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool
    ) -> Tensor:
        """Counts, (num_contexts, alphabet) int64.

        With ``sample``, and where the data are long enough for it, only one block of 4096 symbols in eight is counted, and one
        is added for every symbol that occurs anywhere: 0 still means absent.
        """

    def rans_write_tables(self, counts: Tensor) -> bytes:
        """The tables for these counts, (num_contexts, alphabet) int64, as bytes."""

    def rans_read_tables(self, data: Tensor, alphabet: int, num_contexts: int) -> tuple[Tensor, int]:
        """Frequencies, (num_contexts, alphabet) int16 with rows that sum to 4096, and the number of bytes read."""

    def rans_encode(
        self, symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, chunk: int, out: Tensor
    ) -> int | Tensor:
        """Write the whole message into ``out`` (at least ``1 + ceil(count * bits / 8)`` bytes); its length, int64, 0-d.

        ``chunk``: the log2 of the chunk length, 14 to 18.
        """

    def rans_encode_trying(
        self,
        codes: Tensor,
        means: Means,
        alphabet: int,
        chunk: int,
        head: Tensor,
        out: Tensor,
        layout: Tensor,
        part: tuple[int, int],
        steps: Tensor | None = None,
    ) -> Tensor:
        """Write a message with one table, from a sample, and find out whether scale classes would be shorter; int64, (4,).

        ``codes`` are bytes, and symbols what they mean. First the length, -1 where a byte means none: ``out`` has the message if that fits.
        Then how many segments have classes in what ``dither_encode`` writes of the levels begin .. end, the ``part``, at a step of 1 with
        the layout of that part; negative where only that would tell. ``chunk`` as for ``dither_encode``. Last two facts: of exponents the
        least that is not 0 (1 without them) and the largest; else whether any of the ``steps`` (bytes of float32) is not 0, and whether one
        is not finite. Into ``head`` go 0, and after it, if there is room, the facts as bytes.
        """

    def rans_decode(self, data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int | Tensor:
        """Fill ``out`` with the symbols of the message at the start of ``data``; the message's length, int64, 0-d."""


class ExponentKernels(Protocol):
    """Exponents of powers of two as symbols of one table."""

    def exponent_symbols(self, exponents: Tensor, symbols: Tensor) -> Tensor:
        """Exponents (uint8) as symbols: 0 stays 0, and the least of the others becomes 1.

        That least minus 1 (255 without others), the largest, and the number of symbols, at least 2 and at most 256; int64, (3,).
        """
        ...

    def exponent_bytes(self, symbols: Tensor, below: int, out: Tensor) -> None:
        """The exponents again: ``below``, the least minus 1, is added to all but 0."""
        ...


class CodedKernels(Protocol):
    """Whole messages of mode 0 of ``qsgd`` and ``natural`` with ``coder=rans`` (``spec/wire.md``, 5.11 and 5.9)."""

    def coded_levels_decode(self, data: Tensor, window: int, block: int, out: Tensor) -> Tensor:
        """Levels of -window..window times the steps of their blocks into ``out`` (float32), all NaN if a step is not finite.

        As int8 levels without steps where ``out`` is uint8; else blocks are multiples of 512. What is returned (int64, one number) is 0 if
        ``data``, which is longer than its steps and one byte, is such a message; if not, ``out`` is undefined.
        """
        ...

    def coded_exponents_decode(self, data: Tensor, out: Tensor) -> Tensor:
        """Powers of two with signs into ``out`` (float32), or exponents without signs where it is uint8; the same is returned.

        ``data`` is longer than its sign bits and three bytes.
        """
        ...


class ChunkKernels(Protocol):
    """Exactly k of every chunk of a vector (``spec/wire.md``, "Chunk sets").

    ``regions``: int64, six numbers for each: start, rows, columns, height and width of a chunk, how many of it are kept. Places (int32)
    are positions within a chunk, increasing, one chunk after another.
    """

    def chunk_choose(self, x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """Places and values of the largest coordinates of every chunk: ties to the lowest place, zeros too.

        Whether ``x`` is finite (bool, 0-d); the outputs are defined only then.
        """
        ...

    def chunk_carry(
        self, x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor
    ) -> Tensor:
        """``out = x + decay * carry``, rounded after each operation, and ``chunk_choose`` of it; a decay is a float32."""
        ...

    def chunk_bins(self, values: Tensor, counts: Tensor, bins: int, chosen: Tensor, stands: Tensor, filled: Tensor) -> None:
        """The bin of each value (uint8), what stands for each bin of each tensor (float32), how many it has (int64).

        ``counts`` (int64): the values of each tensor. Bins are 6/``bins`` standard deviations wide around the tensor's mean, the outermost
        ones without end; the mean of what fell into a bin stands for it. Sums are float64 in the order of
        all sums, everything else float32.
        """
        ...

    def chunk_encode(self, places: Tensor, regions: Tensor, numel: int, out: Tensor) -> Tensor:
        """Chunk sets into ``out``; the number of bytes, int64, 0-d."""
        ...

    def chunk_decode(self, data: Tensor, regions: Tensor, numel: int, places: Tensor) -> None:
        """The places that all of ``data`` holds; :class:`CorruptMessage` where it is no code."""
        ...

    def chunk_scatter(self, places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
        """``out`` becomes zero except for ``values`` at their places; or ``weight`` times them are added to it."""
        ...

    def chunk_message_encode(
        self,
        places: Tensor,
        values: Tensor,
        finite: Tensor,
        regions: Tensor,
        counts: Tensor,
        form: Form,
        bins: int,
        out: Tensor,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The message of what :meth:`chunk_choose` found (``spec/wire.md``, "chunk_top_k") into ``out``: its length, int64, 0-d.

        ``counts`` as for :meth:`chunk_bins`; there is one value at least. ``kept`` gets the values as a receiver will have them, and is
        undefined where the vector is not finite.
        """
        ...

    def chunk_message_decode(
        self, data: Tensor, regions: Tensor, counts: Tensor, form: Form, bins: int, out: Tensor, weight: float | None = None
    ) -> Tensor:
        """Decode such a message into ``out``, or with a ``weight`` add ``weight`` times its values there.

        Whether ``data`` is one (bool, 0-d). Where it is not, ``out`` is undefined without a ``weight`` and unchanged with one.
        """
        ...


class CosineKernels(Protocol):
    """The orthonormal cosine transform of tiles (``spec/wire.md``, "dct"); ``regions`` as for chunks, what they keep does not matter."""

    def cosine_forward(self, x: Tensor, regions: Tensor, out: Tensor) -> Tensor:
        """Coefficients of float32 ``x`` into ``out`` (another vector), which is returned."""
        ...

    def cosine_inverse(self, y: Tensor, regions: Tensor, out: Tensor) -> Tensor:
        """The inverse."""
        ...


class AlignKernels(Protocol):
    """Signs of rows and columns (``spec/wire.md``, "Aligned"); ``layout`` is that of the spec."""

    def align_find(self, x: Tensor, least: float, layout: Tensor) -> Tensor:
        """The description (uint8) of signs that most coordinates of more than ``least`` agree with; no bytes: not worth it.

        ``least`` is a float32 number. The description lies in the host's memory, which waits for it.
        """
        ...

    def align_flip(self, x: Tensor, data: Tensor, layout: Tensor, out: Tensor) -> None:
        """``out`` (which may be x) = x with the signs that ``data``, in the host's memory, describes.

        :class:`CorruptMessage`, before ``out`` is written to, where ``data`` is no description.
        """
        ...


class ClassKernels(Protocol):
    """Scale classes of symbols that are coded elsewhere (``spec/wire.md``, "Scale classes").

    ``layout`` is that of a whole vector (``Spec.layout``). ``parts`` (int64: start and stop of each, in ascending order, none longer than
    one and a half segments) are the coordinates that have symbols; every part has regions of its own.
    """

    def classes_choose(self, symbols: Tensor, window: int, layout: Tensor, parts: Tensor, contexts: Tensor) -> Tensor | None:
        """What tells the classes of levels, which are ``symbols`` (uint8) minus ``window``, as bytes; None where they do not pay.

        The number of each symbol's table goes into ``contexts``, which is undefined where there are no classes.
        """
        ...

    def classes_read(self, data: Tensor, layout: Tensor, parts: Tensor, contexts: Tensor) -> tuple[int, int]:
        """The reverse: the number of tables, and of the bytes read. :class:`CorruptMessage` where ``data`` does not start with classes."""
        ...
