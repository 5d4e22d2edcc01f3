"""Launches that run again as one: what a training step does over and over costs the host one call instead of a dozen.

An operation (:func:`operation`) is known by what decides its launches: its scalars, and the shapes of its tensors. The first call
with such a key runs as it is written. The second one does too, while every launch is written down; the third and all later ones run a
CUDA graph of these launches. What differs from call to call is put into the graph's parameters before: the addresses of the arguments,
the numbers that are :class:`~tersegrad.kernels.cuda.loader.Varying`, and the lengths of messages. So an operation

- does everything by :func:`~tersegrad.kernels.cuda.loader.launch`: whatever torch does in between would not run again;
- computes nothing on the host from a varying number or from the content of memory;
- takes memory for its kernels from ``scratch.empty``, which all operations of a stream share, and returns new tensors of torch's;
- may say that launches need nothing of one another (:func:`~tersegrad.kernels.cuda.loader.aside`): then the graph has branches.

What it returned is written to again by the next replay. As long as somebody holds it, or a part of it, a call runs another copy of the
graph, or launches as usual and makes one. Calls always launch as usual where their stream is being captured, torch.compile traces, or the
driver refused the graph.

The graphs are the driver's own. Those of torch would, while they are captured, take its random generator away from other threads.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from tersegrad.core import private
from tersegrad.kernels.cuda import loader
from tersegrad.kernels.cuda.graphs import DriverGraph, Launched
from tersegrad.kernels.cuda.loader import Argument, Bytes, Varying, VaryingFloat

P = ParamSpec("P")
R = TypeVar("R")

# Sequences that are kept, and keys that are remembered: those that were not used for the longest time go first. Sequences of one key.
KEPT, SEEN, COPIES = 256, 1024, 16
# Memory between kernels is taken in pieces of at least so many int64. Operations that need more than the most of it are not replayed: their
# kernels run for so long that launches do not matter.
LEAST, MOST = 1 << 17, 1 << 26


class Graph(Protocol):
    """Launches that the driver knows."""

    def update(self, number: int) -> None:
        """Take over the parameters of a launch, which have changed."""
        ...

    def run(self, stream: int) -> None: ...


# Kinds of devices whose launches are replayed, and what makes graphs of them; tests put others in their place.
kinds: frozenset[str] = frozenset({"cuda"})
maker: Callable[[int, list[Launched]], Graph] = DriverGraph
# How many tensors share memory; where torch does not tell, nothing is replayed.
_sharing: Callable[[int], int] | None = private.fast("_storage_Use_Count", None)


class Arena:
    """Memory between the kernels of the operations of one stream, which run one after another.

    Several threads may use the stream: whoever launches kernels that use this memory has the ``lock`` until all are launched.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0

    def begin(self) -> None:
        """From here on all of it may be used."""
        self._piece = self._used = 0

    def take(self, words: int, device: torch.device) -> Tensor:
        words += words % 2
        while self._piece < len(self._pieces) and self._used + words > self._pieces[self._piece].numel():
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            self._pieces.append(torch.empty(max(words, LEAST), dtype=torch.int64, device=device))
        begin, self._used = self._used, self._used + words
        return self._pieces[self._piece][begin : self._used]

    @property
    def nbytes(self) -> int:
        return sum(8 * piece.numel() for piece in self._pieces)


HELD = object()


class Unreplayable(Exception):
    """Why launches cannot be replayed."""


class _Sequence:
    """The launches of one call, and where what differs from call to call stands in their parameters."""

    def __init__(self, arguments: tuple[Any, ...], arena: Arena) -> None:
        self.launches: list[Launched] = []
        self._arena = arena
        arena.begin()
        # By the number of an argument: what it was at last, and the places that follow it, with what is added to it there.
        self._last: dict[int, int | float] = {}
        self._places: dict[int, list[tuple[int, int, int, struct.Struct]]] = {}
        self._numbers: dict[int, int] = {}
        self._spans: list[tuple[int, int, int]] = []
        for i, value in enumerate(arguments):
            if isinstance(value, Varying):
                self._numbers[id(value)] = i
                self._last[i], self._places[i] = value.value, []
            elif isinstance(value, Tensor | Bytes):
                self._last[i], self._places[i] = begin, _ = value.data_ptr(), []
                data = value.data if isinstance(value, Bytes) else value
                self._spans.append((begin, begin + data.numel() * data.element_size(), i))
        self._spans.sort()
        if any(end > begin for (_, end, _), (begin, _, _) in zip(self._spans, self._spans[1:])):
            raise Unreplayable("arguments share memory")
        # Memory of this sequence that parameters point to.
        self._memory: list[Tensor] = []
        self._graph: Graph | None = None
        self._taken, self._problem = 0, ""
        # The launches that the next one follows, and the last ones of those that run aside.
        self._before: tuple[int, ...] = ()
        self._aside: tuple[int, ...] = ()

    # While it is recorded

    def take(self, words: int, device: torch.device) -> Tensor:
        self._taken += words
        if self._taken > MOST:
            self._problem = "its kernels need much memory"
            return torch.empty(words, dtype=torch.int64, device=device)
        return self._arena.take(words, device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        before, others = self._before, self._aside
        self._aside = ()
        yield
        if self._before != before:
            self._aside += self._before
        self._before, self._aside = before, others + self._aside

    def join(self) -> None:
        self._before, self._aside = (*self._before, *self._aside), ()

    def add(self, name: str, kernel: str, blocks: int, threads: int, arguments: tuple[Argument, ...], shared: int) -> None:
        launched = Launched(name, kernel, blocks, threads, arguments, shared, self._before)
        number, layout = len(self.launches), launched.layout
        self._before = (number,)
        for i in layout.pointers:
            value: Any = arguments[i]
            address = value.data_ptr()
            span = next(((which, begin) for begin, end, which in self._spans if begin <= address < end), None)
            if span is not None:
                self._places[span[0]].append((number, layout.offsets[i], address - span[1], _POINTER))
            elif isinstance(value, Tensor):
                self._memory.append(value)
        for i in layout.varying:
            which = self._numbers.get(id(arguments[i]))
            if which is None:
                self._problem = "a varying number is no argument of the operation"
            else:
                self._places[which].append((number, layout.offsets[i], 0, _NUMBERS[layout.kinds[i]]))
        self.launches.append(launched)

    def close(self, device: int, result: Any) -> None:
        """Make a graph of it. ``result``: what the call returns, held by nobody else."""
        if self._problem:
            raise Unreplayable(self._problem)
        self._result = result
        self._returned = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
        self._storages = [t.untyped_storage() for t in self._returned]
        self._memory = [m for m in self._memory if all(m.data_ptr() != t.data_ptr() for t in self._returned)]
        self._graph = maker(device, self.launches)

    # Afterwards

    def rest(self) -> None:
        """Nobody but this sequence holds what it returned."""
        self._alone = self._held()

    def _held(self) -> list[tuple[int, int]]:
        assert _sharing is not None
        # By how many names a tensor is known, and how many tensors are parts of its memory.
        return [(sys.getrefcount(t), _sharing(s._cdata)) for t, s in zip(self._returned, self._storages)]

    def run(self, arguments: tuple[Any, ...], stream: int) -> Any:
        """Run it with these arguments and return what it returns; ``HELD`` where somebody has that from an earlier call."""
        with self._arena.lock:
            if self._graph is None or self._held() != self._alone:
                return HELD
            # If something fails below, nobody knows what is in the graph.
            graph, self._graph = self._graph, None
            changed: set[int] = set()
            for i, last in self._last.items():
                value = arguments[i]
                now = value.value if isinstance(value, Varying) else value.data_ptr()
                if now != last:
                    self._last[i] = now
                    for number, offset, more, packer in self._places[i]:
                        packer.pack_into(self.launches[number].parameters, offset, now + more)
                        changed.add(number)
            for number in changed:
                graph.update(number)
            graph.run(stream)
            self._graph = graph
            return self.given()

    def given(self) -> Any:
        """What the call returns, held from now on: in a new tuple, if it is one."""
        return (*self._result,) if isinstance(self._result, tuple) else self._result


_POINTER = struct.Struct("Q")
_NUMBERS = {kind: struct.Struct(kind) for kind in "qfd"}

# What may differ from call to call.
_DIFFERING = frozenset({Bytes, Varying, VaryingFloat})

_lock = threading.Lock()
# By key: its sequences, none after its first call; nothing where it is not replayed.
_known: OrderedDict[Any, list[_Sequence] | None] = OrderedDict()
_arenas: dict[tuple[int, int], Arena] = {}


def _key(body: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides about the launches of a call, its device and its stream; None where it is not replayed."""
    parts: list[Any] = [body]
    device: torch.device | None = None
    for value in arguments:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if not value.is_contiguous():
                return None
            parts.append(value.numel())
            parts.append(value.dtype)
            device = value.device
        elif kind in _DIFFERING:
            parts.append(kind)
        elif isinstance(value, Tensor):
            return None
        else:
            parts.append(value)
    if device is None or device.type not in kinds or torch.compiler.is_compiling():
        return None
    if device.type != "cuda":
        return (-1, 0, *parts)
    index = loader.current_device()
    if device.index not in (None, index) or private.capturing():
        return None
    return (index, loader.stream_of(index), *parts)


def operation(body: Callable[P, R]) -> Callable[P, R]:
    """Replay the launches of a function of positional arguments, or tuples of them, none of which it returns."""

    @functools.wraps(body)
    def run(*arguments: Any) -> Any:
        # An operation inside another is a part of that one.
        if loader.thread.recorder is not None or _sharing is None:
            return body(*arguments)  # type: ignore[call-arg]
        flat = _flat(arguments)
        key = _key(body, flat)
        if key is None:
            return body(*arguments)  # type: ignore[call-arg]
        with _lock:
            first = key not in _known
            found = _known.setdefault(key, [])
            _known.move_to_end(key)
            if first:
                _forget()
        if found is None or first:
            return body(*arguments)  # type: ignore[call-arg]
        for sequence in found:
            if (result := sequence.run(flat, key[1])) is not HELD:
                return result
        return _recorded(body, arguments, flat, key) if len(found) < COPIES else body(*arguments)  # type: ignore[call-arg]

    return run  # type: ignore[return-value]


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, and those in tuples."""
    flat: list[Any] = []
    for value in arguments:
        if isinstance(value, tuple):
            flat.extend(value)
        else:
            flat.append(value)
    return tuple(flat)


def _recorded(body: Callable[..., Any], arguments: tuple[Any, ...], flat: tuple[Any, ...], key: tuple[Any, ...]) -> Any:
    """Run it while its launches are written down."""
    with _lock:
        arena = _arenas.setdefault(key[:2], Arena())
        # Whatever happens below, the first is not tried again.
        made = _known.get(key) or []
        _known[key] = made or None
    with arena.lock:
        try:
            sequence = _Sequence(flat, arena)
        except Unreplayable:
            return body(*arguments)
        loader.thread.recorder = sequence
        try:
            result = body(*arguments)
        finally:
            loader.thread.recorder = None
    try:
        sequence.close(key[0], result)
    except (loader.DriverError, Unreplayable):
        return result
    del result
    sequence.rest()
    result = sequence.given()
    with _lock:
        _known[key] = [*made, sequence]
        _known.move_to_end(key)
        _forget()
    return result


def _forget() -> None:
    """Keep to the limits."""
    while len(_known) > SEEN:
        _known.popitem(last=False)
    more = sum(len(found) for found in _known.values() if found) - KEPT
    for key in [key for key, found in _known.items() if found] if more > 0 else ():
        if more > 0:
            more -= len(_known.pop(key) or ())


def clear() -> None:
    """Forget all sequences, and give their memory back."""
    with _lock:
        _known.clear()
        _arenas.clear()


def nbytes() -> int:
    """Memory between kernels that is kept for replays."""
    with _lock:
        return sum(arena.nbytes for arena in _arenas.values())
