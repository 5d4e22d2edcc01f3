"""rANS blocks by CUDA kernels: tables, chunks and assembly on the device, one look at the result by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, launch
from tersegrad.kernels.reference.rans import LONGEST, SHORTEST, lanes_of, pieces
from tersegrad.kernels.reference.rans_tables import STEP, TOTAL

__all__ = ["rans_decode", "rans_encode"]  # and for other modules of kernels: read_block, write_block

SOURCE = "rans.cu"
# Places in the description of a block, as in rans_tables.cuh.
FORM, CHUNK, TABLES, LENGTH, STATUS, INFORMATIVE, ALPHABET, LEAST, LARGEST, PLACES = range(10)
# What bytes mean, as in meaning.cuh; bytes for a table; parts of chunks that are copied.
SYMBOLS, LEVELS, EXPONENTS, FOLDED = range(4)
TABLE, PARTS = 448, 4
CORRUPT, BAD_SYMBOL = 1, 2


def _each(contexts: Tensor | None, count: int) -> int:
    """How contexts are given: 0 not at all, 1 one per symbol, 2 one per step of 64."""
    if contexts is None:
        return 0
    if contexts.numel() == count:
        return 1
    if contexts.numel() != -(-count // STEP):
        raise ValueError("give one context per symbol or one per step of 64 symbols")
    return 2


@replay.operation
def write_block(
    symbols: Tensor,
    alphabet: int | Tensor,
    contexts: Tensor | None,
    num_contexts: int,
    sample: bool,
    chunk: int,
    out: Tensor,
    number: Argument = 0,
    means: int = SYMBOLS,
) -> Tensor:
    """Write the whole message into ``out``, for which the host does not wait; its description, int64.

    An alphabet that the device knows (int64) has at least 2 symbols. ``number``: where the device knows that it is the first so many
    symbols, at least one. With one table, bytes may mean symbols in another way. A message that is longer than ``out`` is not written.
    """
    if not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    count, device = symbols.numel(), symbols.device
    each = _each(contexts, count)
    # The most that it can be, and where it lies.
    size: tuple[int, Tensor | int] = (256, alphabet) if isinstance(alphabet, Tensor) else (alphabet, 0)
    most = size[0]
    symbols = symbols.contiguous()
    known = symbols if contexts is None else contexts.contiguous()
    alone = num_contexts == 1 and most > 1
    cells = 256 if alone else num_contexts * most
    head, (_, counts, present) = scratch.kept(device, 8 * PLACES, 16 * cells, 4 * cells)
    blocks, meaning = min(-(-count // 4096), 1024), (means, alphabet // 2 if means == LEVELS else 0)
    if alone:
        launch(SOURCE, "rans_count_bytes", blocks, 256, symbols, count, number, int(sample), most, counts, present)
    else:
        launch(
            SOURCE, "rans_count", blocks, 256,
            symbols, known, each, count, number, *size, num_contexts, int(sample), counts, present, head,
        )  # fmt: skip
    memory = head
    if most > 1:
        chunks, lanes = len(pieces(count, 1 << chunk)), lanes_of(count)
        memory, (bits, tables, lengths, codes, numbers, offsets, words, states) = scratch.empty(
            device,
            TABLE * num_contexts,
            TABLE * num_contexts,
            8 * num_contexts,
            8 * num_contexts * most,
            8 * chunks,
            8 * chunks,
            2 * count,
            4 * chunks * lanes,
        )
        launch(
            SOURCE, "rans_table", num_contexts, 32,
            counts, present, int(sample), count, number, *size, *meaning, bits, lengths, codes, head,
        )  # fmt: skip
        launch(
            SOURCE, "rans_encode_chunks", chunks, 32,
            symbols, known, each, count, number, *meaning, num_contexts, chunk, codes, words, numbers, states, head,
        )  # fmt: skip
        launch(SOURCE, "rans_close", 1, 256, count, number, num_contexts, chunk, bits, lengths, numbers, tables, offsets, head)
        blocks = min(max(PARTS * chunks, -(-count // 2048)), 1056)
        launch(
            SOURCE, "rans_write", blocks, 256,
            symbols, count, number, *meaning, chunk, tables, words, numbers, states, offsets, out.numel(), head, out,
        )  # fmt: skip
    # What the kernels use is kept until here: what is made later on the same stream may lie in its place.
    del memory
    return head[:PLACES]


def rans_encode(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, chunk: int, out: Tensor
) -> int | Tensor:
    """Write the whole message into ``out``; its length, int64, 0-d."""
    if symbols.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    found = host.read(write_block(symbols, alphabet, contexts, num_contexts, sample, chunk, out)).tolist()
    if found[STATUS] == BAD_SYMBOL:
        raise ValueError("a symbol lies outside the alphabet, or a context is not below the number of contexts")
    # Known here by now: nobody has to wait for it again.
    return torch.tensor(found[LENGTH])


def read_block(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> Tensor:
    """Fill ``out`` with symbols, at least one, for which the host does not wait; the block's description, int64."""
    data = data.contiguous()
    # What a thread reads must be there, even where there are no bytes.
    held = data if data.numel() else torch.empty(16, dtype=torch.uint8, device=out.device)
    return read_known(Bytes(held), Varying(data.numel()), alphabet, contexts, num_contexts, out)


@replay.operation
def read_known(data: Bytes, size: Varying, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> Tensor:
    """The same for bytes of which there is at least one; ``size`` of them are the block's."""
    count, device = out.numel(), out.device
    each = _each(contexts, count)
    head, _ = scratch.kept(device, 8 * PLACES)
    if alphabet == 1:
        scratch.zero(out, count)
        return head
    known = data if contexts is None else contexts.contiguous()
    cells, slots_number = num_contexts * alphabet, num_contexts * TOTAL
    most = len(pieces(count, 1 << SHORTEST))
    memory, (q, frequencies, slots, symbols, offsets, words) = scratch.empty(
        device, 2 * cells, 4 * cells, 4 * slots_number, slots_number, 8 * most, 8 * most
    )
    sizes = (count, alphabet, num_contexts)
    launch(SOURCE, "rans_parse", 1, 32, data, size, *sizes, q, head)
    launch(SOURCE, "rans_frequencies", num_contexts, 32, q, alphabet, 0, frequencies, head)
    launch(SOURCE, "rans_cells", num_contexts, 256, frequencies, alphabet, slots, symbols, head)
    launch(SOURCE, "rans_offsets", 1, 256, data, size, count, alphabet, offsets, words, head)
    launch(
        SOURCE, "rans_decode_chunks", most, 32,
        data, size, known, each, *sizes, slots, symbols, offsets, words, head, out,
    )  # fmt: skip
    blocks = min(-(-count // 256), 1024)
    launch(SOURCE, "rans_decode_plain", blocks, 256, data, known, each, *sizes, frequencies, head, out)
    # What the kernels use is kept until here.
    del memory
    return head


def rans_decode(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with symbols; the number of bytes read, int64, 0-d."""
    if contexts is not None and out.numel() and int(contexts.max()) >= num_contexts:
        raise ValueError("a context is not below the number of contexts")
    if out.numel() == 0 or alphabet == 1:
        out.zero_()
        return torch.zeros((), dtype=torch.int64)
    found = host.read(read_block(data, alphabet, contexts, num_contexts, out)).tolist()
    if found[STATUS] == CORRUPT:
        raise CorruptMessage("not a block of rANS symbols: tables, words or raw symbols are malformed or cut short")
    return torch.tensor(found[LENGTH])
