"""Messages of chunks by CUDA kernels: a few of the values of every chunk, and which they are. The host never waits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.kernels.cuda import rans, replay, scratch, tiles
from tersegrad.kernels.cuda.index import between
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, VaryingFloat, launch, scan
from tersegrad.kernels.reference.chunk_messages import FORMS, own_tables
from tersegrad.kernels.reference.chunks import PAIR, areas, streams
from tersegrad.kernels.reference.rans import USUAL, raw_bits
from tersegrad.kernels.schema_codes import Form

__all__ = ["chunk_message_decode", "chunk_message_encode"]

SETS, VALUES = "chunk_sets.cu", "chunk_values.cu"
THREADS = 256
# As in chunk_values.cu: what is known of a message that was written, and of one that was read.
LENGTH, TOLD = 0, 3
STATE, SETS_BEGIN, GOOD, KNOWN = 0, 3, 4, 5
CENTRE, WIDTH, SCALE = range(3)
CHUNK = 4096
# Bytes that are known of a coded chunk (chunk_sets.cu).
STEPS = 48


class Plan(NamedTuple):
    """Where everything lies that kernels are told of a layout; a tuple for ``replay``."""

    # As in chunks.cuh, with a row for the end.
    regions: Tensor
    # The first coded chunk of each stream, with the end, and where the rooms of its words begin, with the end.
    streams: Tensor
    # The first value of each tensor, and its first chunk of sums, with the ends.
    tensors: Tensor
    splits: Tensor
    # The tensor of each value, where each has a table of its own.
    owners: Tensor | None
    areas: int
    # Chunks that are coded, places of these, and steps that they may have.
    coded: int
    spots: int
    steps: int
    # Words of all streams at most.
    words: int
    # Chunks of sums.
    sums: int

    @property
    def number(self) -> int:
        """How many tensors there are."""
        return self.tensors.numel() // 2 - 1

    @property
    def where(self) -> tuple[Tensor, Tensor, int]:
        """The tensors as kernels take them."""
        return self.tensors[: self.number + 1], self.tensors[self.number + 1 :], self.number

    @property
    def coding(self) -> tuple[Tensor, Tensor, int]:
        """The streams: their chunks, their rooms, how many there are."""
        number = self.streams.numel() // 2 - 1
        return self.streams[: number + 1], self.streams[number + 1 :], number


def _depths(size: int) -> int:
    """At how many depths nodes of a chunk may be split: those where one has three places."""
    return sum(-(-size >> depth) >= 3 for depth in range(17))


def _most_steps(size: int, keep: int) -> int:
    """No chunk has more splits: those of a depth have no chosen ones in common, at least two each, and three where two are a digit."""
    return sum(min(1 << d, keep // (2 if -(-size >> d) > PAIR else 3)) for d in range(_depths(size)))


def _splits(kinds: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """The splits of chunks of these sizes, of which so many are kept, and where those of each begin."""
    starts = [0]
    for size, keep in kinds:
        starts.append(starts[-1] + 2 * _depths(size) * (keep + 1) ** 2)
    made = torch.empty(max(1, starts[-1]), dtype=torch.int16, device=device)
    for (size, keep), begin, end in zip(kinds, starts, starts[1:]):
        weights = torch.empty(end - begin, dtype=torch.float64, device=device)
        rows = 2 * _depths(size) * (keep + 1)
        launch(SETS, "chunk_splits", -(-rows // 64), 64, size, keep, _depths(size), weights, made[begin:])
    return made, starts


def _plan(regions: Tensor, counts: Tensor, form: Form, device: torch.device) -> Plan:
    return _planned(regions.numpy().tobytes(), counts.numpy().tobytes(), form == "bins", device)


@functools.lru_cache(maxsize=64)
def _planned(regions: bytes, counts: bytes, bins: bool, device: torch.device) -> Plan:
    table = torch.frombuffer(bytearray(regions), dtype=torch.int64)
    number = torch.frombuffer(bytearray(counts), dtype=torch.int64)
    found = areas(table)
    kinds = sorted({(a.size, a.keep) for a in found if a.keep < a.size})
    splits, starts = _splits(kinds, device)
    rows = tiles.rows(found, {kind: (start, _most_steps(*kind)) for kind, start in zip(kinds, starts)})
    # What is before the end.
    coded, spot, _, steps, _ = rows[-5:].tolist()
    firsts, rooms = [0], [0]
    for runs in streams(table):
        firsts.append(firsts[-1] + sum(chunks for _, chunks, _ in runs))
        bits = sum(chunks * a.keep * (a.size - 1).bit_length() for a, chunks, _ in runs)
        rooms.append(rooms[-1] + -(-bits // 32) + 3)
    zero = torch.zeros(1, dtype=torch.int64)
    sums = torch.cat((zero, (-(-number // CHUNK)).cumsum(0)))
    tables = own_tables(number) if bins else 1
    owners = torch.repeat_interleave(torch.arange(number.numel()), number).to(torch.uint8) if tables > 1 else None
    plan = Plan(
        host.send(rows, device),
        host.send(torch.tensor(firsts + rooms), device),
        host.send(torch.cat((zero, number.cumsum(0), sums)), device),
        splits,
        None if owners is None else host.send(owners, device),
        len(found), coded, spot, steps, rooms[-1], int(sums[-1]),
    )  # fmt: skip
    if device.type == "cuda":
        # Any stream may use it from now on.
        torch.cuda.current_stream(device).synchronize()
    return plan


def _sums(
    plan: Plan, values: Tensor, what: int, bins: int, centres: Argument, made: Argument, data: Argument, told: Tensor
) -> None:
    """The sums of values of every tensor, and what is made of them."""
    firsts, chunks, number = plan.where
    memory, (sums,) = scratch.empty(values.device, 8 * plan.sums)
    launch(VALUES, "value_sums", -(-plan.sums // 8), THREADS, values, *plan.where, what, centres, sums, told)
    launch(VALUES, "value_means", number, 32, firsts, chunks, what, bins, sums, made, data)
    del memory


def _bins(plan: Plan, values: Tensor, bins: int, chosen: Tensor, stands: Argument, front: Argument, told: Tensor) -> None:
    """The bins of values, what stands for each, and the bytes that tell it."""
    _, chunks, number = plan.where
    cells = number * bins
    memory, (centres, widths, sums) = scratch.empty(values.device, 4 * number, 4 * number, 8 * bins * plan.sums)
    cleared, (filled,) = scratch.zeros(values.device, 8 * cells)
    _sums(plan, values, CENTRE, bins, 0, centres, 0, told)
    _sums(plan, values, WIDTH, bins, centres, widths, 0, told)
    launch(
        VALUES, "bins_pick", -(-plan.sums // 8), THREADS, values, *plan.where, bins, centres, widths, chosen, sums, filled
    )  # fmt: skip
    launch(VALUES, "bins_stand", cells, 32, chunks, bins, centres, filled, sums, stands)
    launch(VALUES, "bins_front", 1, THREADS, cells, filled, stands, front, told)
    # What the kernels use is kept until here.
    del memory, cleared


def chunk_message_encode(
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
    """The whole message, for which the host does not wait."""
    kind = FORMS.index(form)
    plan = _plan(regions, counts, form, values.device)
    return _encode(places, values, finite, tuple(plan), kind, bins, out, kept)


@replay.operation
def _encode(
    places: Tensor,
    values: Tensor,
    finite: Tensor,
    planned: tuple[Any, ...],
    kind: int,
    bins: int,
    out: Tensor,
    kept: Tensor | None,
) -> Tensor:
    plan, count, device = Plan(*planned), values.numel(), values.device
    number, blocks = plan.number, -(-count // THREADS)
    told, _ = scratch.kept(device, 8 * TOLD)
    alphabet = (256, 256, 0, bins)[kind]
    # The words of streams, the numbers and positions of these.
    _, rooms, streams = plan.coding
    memory, (front, stands, words, sizes) = scratch.empty(
        device, 2 * number + -(-count // 8) + 5 * number * bins, 4 * number * bins, 4 * plan.words, 8 * (streams + 1)
    )
    chosen = between(count, torch.uint8, device)
    if FORMS[kind] == "bins":
        _bins(plan, values, bins, chosen, stands, front, told)
    elif FORMS[kind] == "sign":
        _sums(plan, values, SCALE, bins, 0, 0, front, told)
        launch(VALUES, "signs_pack", -(-count // (8 * THREADS)), THREADS, values, count, number, front, told)
    else:
        launch(VALUES, "floats_split", blocks, THREADS, values, count, kind, chosen, told)
    if kept is not None:
        given = (plan.where[0], number, bins, chosen, stands, front)
        launch(VALUES, "values_kept", blocks, THREADS, values, count, kind, *given, kept)
    coded = block = None
    if alphabet:
        coded = between(1 + -(-count * raw_bits(alphabet) // 8), torch.uint8, device)
        tables = 1 if plan.owners is None else number
        block = rans.write_block(chosen, alphabet, plan.owners, tables, kind != FORMS.index("bins"), USUAL, coded)
    _write_sets(plan, places, words, sizes)
    blocks = min(max(streams, -(-out.numel() // 1024), 1), 1024)
    launch(
        VALUES, "chunk_write", blocks, THREADS,
        values, count, kind, finite, front, 0 if coded is None else coded, 0 if block is None else block, streams, rooms, words, sizes, out,
        told,
    )  # fmt: skip
    # What the kernels use is kept until here.
    del memory, coded
    return told[LENGTH]


def _write_sets(plan: Plan, places: Tensor, words: int, sizes: int) -> None:
    """The words of all streams at the ends of their rooms, and how many are before those of each."""
    chunks, rooms, streams = plan.coding
    memory, (steps, digits, known) = scratch.empty(places.device, 4 * plan.steps, 8 * plan.spots, STEPS * plan.coded)
    given = (places, plan.regions, plan.areas, plan.coded, plan.splits)
    launch(SETS, "chunk_steps", -(-plan.coded // 64), 64, *given, steps, digits, known)
    launch(SETS, "chunk_code", streams, 32, chunks, rooms, steps, digits, known, words, sizes)
    scan(SETS, sizes, 1, streams + 1)
    del memory


def chunk_message_decode(
    data: Tensor,
    regions: Tensor,
    counts: Tensor,
    form: Form,
    bins: int,
    out: Tensor,
    weight: float | None = None,
) -> Tensor:
    """The whole message, for which the host does not wait; whether it was one, int64, 0-d."""
    if not data.numel():
        return torch.zeros((), dtype=torch.int64, device=out.device)
    plan = _plan(regions, counts, form, out.device)
    # Room for the usual ones, which does not differ from call to call.
    count = int(counts.sum())
    room = 1 + 5 * bins * plan.number + 4 * count + 2 * plan.streams.numel() + 4 * plan.words
    while room < data.numel():
        room *= 2
    given = (Bytes(data.contiguous()), Varying(data.numel()), room)
    by = None if weight is None else VaryingFloat(float(weight))
    return _decode(*given, tuple(plan), FORMS.index(form), bins, count, out, by)


@replay.operation
def _decode(
    data: Bytes,
    size: Varying,
    room: int,
    planned: tuple[Any, ...],
    kind: int,
    bins: int,
    count: int,
    out: Tensor,
    weight: VaryingFloat | None,
) -> Tensor:
    plan, device = Plan(*planned), out.device
    number, alphabet = plan.number, (256, 256, 0, bins)[kind]
    chunks, _, streams = plan.coding
    told, _ = scratch.kept(device, 8 * KNOWN)
    memory, (stands, offsets, words, places) = scratch.empty(
        device, 4 * number * bins, 8 * streams, 8 * streams, 2 * plan.spots
    )
    state, sets = told[STATE], told[SETS_BEGIN]
    launch(VALUES, "chunk_open", 1, THREADS, data, size, kind, count, number, bins, stands, told)
    symbols: Argument = 0
    if alphabet:
        rest, symbols = between(room, torch.uint8, device), between(count, torch.uint8, device)
        launch(VALUES, "chunk_rest", min(-(-room // 1024), 1024), THREADS, data, size, told, rest)
        tables = 1 if plan.owners is None else number
        block = rans.read_known(Bytes(rest), size, alphabet, plan.owners, tables, symbols)
        launch(VALUES, "chunk_behind", 1, 1, block, kind, count, told)
    launch(SETS, "chunk_streams", 1, THREADS, data, size, sets, streams, offsets, words, state)
    given = (chunks, plan.regions, plan.areas, plan.splits)
    launch(SETS, "chunk_read", streams, 32, data, offsets, words, *given, places, state)
    adds = (0.0, 0) if weight is None else (weight, 1)
    launch(VALUES, "chunk_clear", min(-(-out.numel() // (16 * THREADS)), 1056), THREADS, out.numel(), adds[1], told, out)
    known = (plan.where[0], number, bins, stands, plan.regions, plan.areas, places)
    launch(VALUES, "chunk_put", -(-count // THREADS), THREADS, data, count, kind, symbols, *known, *adds, out, told)
    # What the kernels use is kept until here.
    del memory
    return told[GOOD]
