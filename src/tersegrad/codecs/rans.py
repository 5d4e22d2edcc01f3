"""Entropy coding with static tables: interleaved rANS, up to 64 lanes, 12-bit probabilities.

A message codes ``count`` symbols below ``alphabet`` within about 0.02 bit per symbol of their empirical entropy, once they are
some 50 000. Several tables may serve one message: ``contexts`` names the table of every symbol, or of every step of 64
symbols, and the decoder is given the same. Small or incompressible input is stored raw at ``ceil(log2(alphabet))`` bits per
symbol, so that a message never exceeds :func:`max_nbytes`.

Symbols are coded in chunks that are independent of one another. Each costs about 130 bytes, and a processor with many cores
decodes as many at once as there are, each in as many steps as it has symbols per lane. ``chunk`` is the log2 of their length, 14
to 18: ``"auto"`` is 16 (:func:`chunk_bits`), 18 makes the shortest messages, for slow links, 14 and 15 the fastest on a GPU.

Wire format: ``spec/wire.md``, "rANS". Asymmetric numeral systems: Duda 2013 (arXiv:1311.2540); interleaving: Giesen 2014
(arXiv:1402.3392). Ours differs in the state's range, [2^16, 2^32), which lets 16-bit SIMD planes hold it.

>>> import torch
>>> symbols = torch.tensor([0, 1, 2, 1] * 2000, dtype=torch.uint8)
>>> data = encode(symbols, alphabet=3)
>>> decoded, used = decode(data, symbols.numel(), alphabet=3)
>>> bool((decoded == symbols).all()), used == data.numel()
(True, True)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.kernels.reference.rans import USUAL

Chunk = Literal["auto"] | int
CHUNKS: tuple[Chunk, ...] = ("auto", 14, 15, 16, 17, 18)
CHUNK_RULE = "chunk is auto or the log2 of the chunk length, 14 to 18"


def chunk_bits(chunk: Chunk) -> int:
    """The log2 of the chunk length; ``"auto"`` is 16 for every length, so that all devices agree.

    >>> chunk_bits("auto"), chunk_bits(18)
    (16, 18)
    """
    if chunk not in CHUNKS:
        raise ValueError(f"{CHUNK_RULE}, got {chunk!r}")
    return USUAL if chunk == "auto" else int(chunk)


def max_nbytes(count: int, alphabet: int, num_contexts: int = 1) -> int:
    """The size of the largest message: a mode byte and the raw symbols."""
    _check_sizes(alphabet, num_contexts)
    return 0 if count == 0 or alphabet == 1 else 1 + -(-count * (alphabet - 1).bit_length() // 8)


def codes_there(device: torch.device) -> bool:
    """Whether symbols are coded on the device itself."""
    return kernels.faster(device, "rans_encode", "rans_decode")


def encode(
    symbols: Tensor,
    alphabet: int,
    contexts: Tensor | None = None,
    num_contexts: int = 1,
    sample: bool = True,
    chunk: Chunk = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """The message as uint8; a view of ``out`` (at least :func:`max_nbytes`) if given.

    ``sample`` lets long input be counted on one eighth of its blocks, which costs about 0.001 bit per symbol at most on
    stationary data; the bytes depend on it, the decoder does not.
    """
    room = max_nbytes(symbols.numel(), alphabet, num_contexts)
    _check_bytes(symbols, "symbols")
    if contexts is not None:
        _check_bytes(contexts, "contexts")
    if out is None:
        out = torch.empty(room, dtype=torch.uint8, device=symbols.device)
    _check_bytes(out, "out")
    if out.numel() < room:
        raise ValueError(f"out holds {out.numel()} bytes, this message may need {room}")
    run = kernels.get(symbols.device)
    return out[: int(run.rans_encode(symbols, alphabet, contexts, num_contexts, sample, chunk_bits(chunk), out))]


def decode(
    data: Tensor,
    count: int,
    alphabet: int,
    contexts: Tensor | None = None,
    num_contexts: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """``count`` symbols (written into ``out`` if given) and the number of bytes read from the start of ``data``.

    Raises :class:`~tersegrad.core.errors.CorruptMessage` for bytes that no encoder wrote for these arguments.
    """
    _check_sizes(alphabet, num_contexts)
    _check_bytes(data, "data")
    if contexts is not None:
        _check_bytes(contexts, "contexts")
    if out is None:
        out = torch.empty(count, dtype=torch.uint8, device=data.device)
    _check_bytes(out, "out")
    if out.numel() < count:
        raise ValueError(f"out holds {out.numel()} symbols, {count} are to be decoded")
    out = out if out.numel() == count else out[:count]
    return out, int(kernels.get(data.device).rans_decode(data, alphabet, contexts, num_contexts, out))


def _check_sizes(alphabet: int, num_contexts: int) -> None:
    if not 1 <= alphabet <= 256:
        raise ValueError(f"alphabets have 1 to 256 symbols, got {alphabet}")
    if not 1 <= num_contexts <= 256:
        raise ValueError(f"there are 1 to 256 contexts, got {num_contexts}")


def _check_bytes(values: Tensor, name: str) -> None:
    if values.dtype != torch.uint8 or values.ndim != 1 or not values.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector of uint8, got {values.dtype} of shape {tuple(values.shape)}")
