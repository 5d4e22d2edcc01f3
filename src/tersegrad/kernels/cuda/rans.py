"""rANS blocks by CUDA kernels: tables, chunks and assembly on the device, one look at the result by the host."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, launch
from tersegrad.kernels.reference.rans import LONGEST, SHORTEST, lanes_of, pieces
from tersegrad.kernels.reference.rans_tables import STEP, TOTAL

__all__ = ["rans_decode", "rans_encode"]  # and for other modules of kernels: read_block, write_block, begin_block, code_block

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


@dataclasses.dataclass(frozen=True)
class Block:
    """A block whose table is made; addresses in ``memory``."""

    head: Tensor
    memory: Tensor
    symbols: Tensor
    contexts: Tensor | None
    num_contexts: int
    chunk: int
    sizes: tuple[int, Argument]  # how many symbols there are at most, and where their number lies
    meaning: tuple[int, int]
    places: list[int]


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
) -> Tensor:
    """Write the whole message into ``out``, for which the host does not wait; its description, int64.

    An alphabet that the device knows (int64) has at least 2 symbols. ``number``: where the device knows that it is the first so many
    symbols, at least one. A message that is longer than ``out`` is not written.
    """
    return code_block(begin_block(symbols, alphabet, contexts, num_contexts, sample, chunk, number), out)


def begin_block(
    symbols: Tensor,
    alphabet: int | Tensor,
    contexts: Tensor | None,
    num_contexts: int,
    sample: bool,
    chunk: int,
    number: Argument = 0,
    means: int = SYMBOLS,
) -> Block:
    """Count symbols and make tables. With one table, bytes may mean symbols in another way."""
    if not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    count, device = symbols.numel(), symbols.device
    # The most that it can be, and where it lies.
    size: tuple[int, Tensor | int] = (256, alphabet) if isinstance(alphabet, Tensor) else (alphabet, 0)
    most = size[0]
    symbols, contexts = symbols.contiguous(), None if contexts is None else contexts.contiguous()
    alone = num_contexts == 1 and most > 1
    cells = 256 if alone else num_contexts * most
    head, (_, counts, present) = scratch.kept(device, 8 * PLACES, 16 * cells, 4 * cells)
    blocks, meaning = min(-(-count // 4096), 1024), (means, most // 2 if means == LEVELS else 0)
    sizes = (count, number)
    if alone:
        launch(SOURCE, "rans_count_bytes", blocks, 256, symbols, *sizes, int(sample), most, counts, present)
    else:
        launch(
            SOURCE, "rans_count", blocks, 256,
            symbols, symbols if contexts is None else contexts, _each(contexts, count), *sizes, *size, num_contexts, int(sample),
            counts, present, head,
        )  # fmt: skip
    chunks, lanes = len(pieces(count, 1 << chunk)), lanes_of(count)
    memory, places = scratch.empty(
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
    bits, _, lengths, codes, *_ = places
    # Nothing is written for an alphabet of one.
    launch(
        SOURCE, "rans_table", num_contexts if most > 1 else 0, 32,
        counts, present, int(sample), *sizes, *size, *meaning, bits, lengths, codes, head,
    )  # fmt: skip
    return Block(head, memory, symbols, contexts, num_contexts if most > 1 else 0, chunk, sizes, meaning, places)


def code_block(block: Block, out: Tensor) -> Tensor:
    """Write it into ``out``; the description."""
    head, symbols, contexts, tables, chunk, sizes = (
        block.head, block.symbols, block.contexts, block.num_contexts, block.chunk, block.sizes
    )  # fmt: skip
    count, known = symbols.numel(), symbols if contexts is None else contexts
    bits, joined, lengths, codes, numbers, offsets, words, states = block.places
    if tables:
        chunks = len(pieces(count, 1 << chunk))
        launch(
            SOURCE, "rans_encode_chunks", chunks, 32,
            symbols, known, _each(contexts, count), *sizes, *block.meaning, tables, chunk, codes, words, numbers, states, head, spread=True,
        )  # fmt: skip
        launch(SOURCE, "rans_close", 1, 256, *sizes, tables, chunk, bits, lengths, numbers, joined, offsets, head)
        blocks = min(max(PARTS * chunks, -(-count // 2048)), 1056)
        launch(
            SOURCE, "rans_write", blocks, 256,
            symbols, *sizes, *block.meaning, chunk, joined, words, numbers, states, offsets, out.numel(), head, out,
        )  # fmt: skip
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
def read_known(
    data: Bytes,
    size: Argument,
    alphabet: int,
    contexts: Tensor | None,
    num_contexts: int,
    out: Tensor,
    number: Varying | None = None,
) -> Tensor:
    """The same for bytes of which there is at least one; ``size`` of them are the block's. ``number``: only the first so many symbols."""
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
    sizes = (count if number is None else number, alphabet, num_contexts)
    launch(SOURCE, "rans_parse", 1, 32, data, size, *sizes, q, head)
    launch(SOURCE, "rans_frequencies", num_contexts, 32, q, alphabet, 0, frequencies, head)
    launch(SOURCE, "rans_cells", num_contexts, 256, frequencies, alphabet, slots, symbols, head)
    launch(SOURCE, "rans_offsets", 1, 256, data, size, *sizes[:2], offsets, words, head)
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
