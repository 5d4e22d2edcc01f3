"""Operations that choose coordinates, and those on index sets and sparse messages."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SelectKernels(Protocol):
    """Sparse vectors: choosing coordinates, index sets as bytes, putting values back, keyed permutations.

    Magnitudes are compared by key, the bit pattern of ``|x|`` as an integer: zeros have key 0 and are never chosen, NaN and Inf
    have keys from 0x7f800000 and come first, ties go to the lowest index. Index tensors are int32 where numel <= 2^31, else
    int64, and increase strictly. Decoders raise :class:`~tersegrad.core.errors.CorruptMessage`.
    """

    def all_finite(self, x: Tensor) -> Tensor:
        """Whether ``x`` (flat float32) holds neither NaN nor Inf (bool, 0-d)."""
        ...

    def settle(self, values: Tensor, good: Tensor, factor: Tensor | None = None) -> Tensor:
        """``values`` in place: NaN unless the flag is set, else times ``factor`` (float32, 0-d) and kept finite where that is not 1.

        Flag and factor are read on the device; where there is nothing to do, ``values`` is not touched.
        """
        ...

    def revert(self, values: Tensor, good: Tensor, before: Tensor) -> Tensor:
        """``values`` in place: as ``before``, of the same dtype and shape, unless the flag is set. The flag is read on the device."""
        ...

    def select_top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for ``k`` indices and values, in index order, of the largest non-zero coordinates by key; how many there are."""
        ...

    def select_sample_key(self, x: Tensor, k: int) -> Tensor:
        """An estimate of the ``k``-th largest key from a fixed sample of the coordinates, within [1, 0x7f800000] (int32, 0-d)."""
        ...

    def select_top_k_of_sum(self, x: Tensor, y: Tensor, rest: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`select_top_k` of x + y, and that sum, with zeros in place of what was chosen, into ``rest``."""
        ...

    def select_compact(self, x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for ``limit`` indices and values, of the first coordinates with a key of at least ``max(key, 1)``; how many there are.

        More may be there than there is room for.
        """
        ...

    def sparse_scatter(self, indices: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` becomes zero except ``out[indices] = values``."""
        ...

    def sparse_scatter_add(self, indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
        """``out[indices] += weight * values``, in float32, rounded after the product and after the sum."""
        ...

    def sparse_encode(
        self, indices: Tensor, values: Tensor, count: Tensor, numel: int, narrow: bool, out: Tensor, open_bits: int = 0
    ) -> Tensor:
        """The message of the first ``count`` of them with a Golomb-coded set; values as float32 or, ``narrow``, as bfloat16.

        What became of it, int64: 0 where it was written; its bytes; those of the set's planes; ``count``; 1 where a value is not finite;
        the 128 counts of :meth:`gap_histogram`.
        Values may be bytes as well (uint8), with what :meth:`ValueKernels.exp4_encode` tells of them as their ``count``.
        With ``open_bits`` the message of all of them with entropy-coded gaps is written instead, as by :meth:`sparse_encode_gaps`; the
        alphabet follows from the counts. Not where all gaps are 0.
        """
        ...

    def sparse_decode(
        self, data: Tensor, front: bytes, count: int, numel: int, divisor: int, narrow: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        """Decode a message of :meth:`sparse_encode` into ``out``, or with a ``weight`` add ``weight`` times its values there.

        ``front``: the bytes that it must begin with. Returns whether ``data`` is such a message (bool, 0-d). Where it is not, ``out`` is
        undefined without a ``weight`` and unchanged with one.
        """
        ...

    def sparse_encode_gaps(
        self, indices: Tensor, values: Tensor, front: bytes, alphabet: int, open_bits: int, narrow: bool, out: Tensor
    ) -> Tensor:
        """The message of all of them with entropy-coded gaps, whose classes are below ``alphabet`` and leave at most so many bits open.

        ``front`` begins it, up to its rANS block. What became of it, int64: 0 where it was written; its bytes.
        """
        ...

    def sparse_decode_gaps(
        self, data: Tensor, front: bytes, count: int, numel: int, alphabet: int, narrow: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        """Such a message, as :meth:`sparse_decode`."""
        ...

    def index_complement(self, indices: Tensor, numel: int) -> Tensor:
        """The numbers of [0, numel) that are not among ``indices``."""
        ...

    def golomb_size(self, indices: Tensor, divisor: int) -> int | Tensor:
        """Bytes that :meth:`golomb_encode` writes, int64, 0-d."""
        ...

    def golomb_encode(self, indices: Tensor, divisor: int, out: Tensor) -> int | Tensor:
        """Planar Golomb code of the gaps into ``out`` (uint8); the number of bytes, int64, 0-d."""
        ...

    def golomb_decode(self, data: Tensor, numel: int, divisor: int, out: Tensor) -> int | Tensor:
        """Fill ``out`` with indices from the start of ``data``; the bytes that they took, int64, 0-d."""
        ...

    def digits_encode(self, indices: Tensor, numel: int, out: Tensor) -> int:
        """Arithmetic code of the gaps' binary digits, for short sets; the first byte is below 250."""
        ...

    def digits_decode(self, data: Tensor, count: int, numel: int) -> tuple[Tensor, int]: ...

    def bitmap_encode(self, indices: Tensor, numel: int) -> Tensor:
        """One bit per number, least significant first."""
        ...

    def bitmap_decode(self, data: Tensor, count: int, numel: int) -> Tensor:
        """The indices of exactly ``count`` ones in the first ``ceil(numel / 8)`` bytes."""
        ...

    def gap_histogram(self, indices: Tensor, numel: int) -> Tensor:
        """The counts of the 128 gap classes, int64; ``ValueError`` unless ``indices`` increase strictly within [0, numel)."""
        ...

    def gap_classes(self, indices: Tensor) -> Tensor:
        """A class (uint8) for each gap g: 0 for g = 0; 2e - 1 and 2e for the lower and upper half of g + 1 in [2^e, 2^(e+1))."""
        ...

    def gap_rests_encode(self, indices: Tensor, out: Tensor) -> int | Tensor:
        """The bits that the classes leave open; the number of bytes, int64, 0-d."""
        ...

    def gap_rests_decode(self, data: Tensor, classes: Tensor, numel: int) -> tuple[Tensor, int | Tensor]: ...

    def permuted_indices(self, keys: list[int], rotation: int, numel: int, k: int) -> Tensor:
        """Images of 0..k-1 under the keyed permutation of [0, numel), in that order (not increasing)."""
        ...

    def permuted_gather(self, x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
        """``x[permuted_indices(...)]``."""
        ...

    def permuted_scatter(self, values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
        """``out`` becomes zero except ``out[permuted_indices(...)] = values``."""
        ...

    def permuted_scatter_add(self, values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
        """``out[permuted_indices(...)] += weight * values``."""
        ...


class ValueKernels(Protocol):
    """Values of sparse messages as the bytes that follow an index set (``spec/wire.md``). ``layout`` is that of the spec.

    Encoders take room for indices and values, and on the device how many there are. What they tell of their bytes, int64: how many values
    are sent, in how many bytes, and the message's mode, 2 where a value is not finite. Decoders take
    a whole message that must begin with ``front``, and return what :meth:`SelectKernels.sparse_decode` does. ``alphabet`` is that of a set
    with entropy-coded gaps; 0 for a Golomb-coded one.
    """

    def exp4_encode(
        self, indices: Tensor, values: Tensor, count: Tensor, layout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Signs and powers of two: the indices of those that are sent, what each value becomes, the bytes, what is told of them.

        The bytes are those of a message only where more than 1,024 are sent.
        """
        ...

    def exp4_decode(
        self,
        data: Tensor,
        front: bytes,
        count: int,
        numel: int,
        alphabet: int,
        layout: Tensor,
        packed: bool,
        out: Tensor,
        weight: float | None,
    ) -> Tensor:
        """More than 1,024 such values, or ``packed`` ones."""
        ...

    def signs_encode(self, values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """One bit per value: the bytes, and what is told of them."""
        ...

    def signs_decode(
        self, data: Tensor, front: bytes, count: int, numel: int, alphabet: int, tau: float, out: Tensor, weight: float | None
    ) -> Tensor:
        """Plus or minus ``tau``."""
        ...

    def mean_signs_encode(
        self, indices: Tensor, values: Tensor, count: Tensor, layout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mean magnitude of what each tensor sends (bfloat16), then signs: the bytes, what is told of them, what values become."""
        ...

    def mean_signs_decode(
        self,
        data: Tensor,
        front: bytes,
        count: int,
        numel: int,
        alphabet: int,
        layout: Tensor,
        out: Tensor,
        weight: float | None,
    ) -> Tensor: ...
