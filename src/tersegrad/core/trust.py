"""What a device has yet to say of a message, believed for the moment.

A decoder on a GPU finds out there whether a message is well-formed, and whether it has the form that its kernels read. To wait for that
after every message would let the GPU run out of work. Inside :func:`trusting` decoders go on as if all were well and leave a note of what
is yet to be looked at; whoever decodes calls :func:`decoded`, which looks at all notes in one read, at once or, inside
:func:`postponing`, when it is asked to. Where a note was bad the decoding is done again, waiting at every step: it then takes the
form that the message has, or raises what is wrong with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad.core import host


class Note(NamedTuple):
    """Memory of a device, and the bytes that are there if what was decoded is right; None: any that are not all zero."""

    there: Tensor
    wanted: bytes | None


@dataclasses.dataclass(frozen=True)
class Doubt:
    """What is yet to be looked at of a message, and how to decode it again, waiting."""

    notes: list[Note]
    again: Callable[[], Tensor]


class _Here(threading.local):
    notes: list[Note] | None = None
    doubts: list[Doubt] | None = None


_here = _Here()


@contextlib.contextmanager
def trusting() -> Iterator[list[Note]]:
    """Believe what devices have yet to say; the list gets it."""
    before, _here.notes = _here.notes, []
    try:
        yield _here.notes
    finally:
        _here.notes = before


@contextlib.contextmanager
def postponing(doubts: list[Doubt] | None) -> Iterator[None]:
    """Look at what was believed later, by :func:`settle`; at once where there is no list."""
    before, _here.doubts = _here.doubts, doubts
    try:
        yield
    finally:
        _here.doubts = before


def numbers(x: Tensor) -> list[int]:
    """The integers of ``x``; zeros if a device has yet to say them and is trusted."""
    if _here.notes is None or x.is_cpu:
        return [int(v) for v in host.read(x).tolist()]
    _here.notes.append(Note(x, bytes(x.nbytes)))
    return [0] * x.numel()


def holds(flag: Tensor) -> bool:
    """Whether a flag is set, a scalar; yes if a device has yet to say it and is trusted."""
    if _here.notes is None or flag.is_cpu:
        return bool(flag)
    _here.notes.append(Note(flag, None))
    return True


def reads(*expected: tuple[Tensor, bytes]) -> bool:
    """Whether bytes of one device are what is expected of each; yes if it has yet to say it and is trusted."""
    if not expected:
        return True
    if _here.notes is None or expected[0][0].is_cpu:
        return host.read(torch.cat([there for there, _ in expected])).numpy().tobytes() == b"".join(w for _, w in expected)
    _here.notes += [Note(there, wanted) for there, wanted in expected]
    return True


def decoded(body: Callable[[], Tensor]) -> Tensor:
    """What ``body`` decodes into memory of its own; it may run twice.

    >>> decoded(lambda: torch.zeros(2) if numbers(torch.tensor([0])) == [0] else torch.ones(2))
    tensor([0., 0.])
    """
    with trusting() as notes:
        found = body()
    if notes:
        doubt = Doubt(notes, body)
        if _here.doubts is not None:
            _here.doubts.append(doubt)
        else:
            settle([doubt])
    return found


def settle(doubts: list[Doubt], flags: Sequence[Tensor] = ()) -> tuple[list[Tensor], bool]:
    """Read all notes and ``flags`` (scalars of the same device) at once, and decode again, waiting, each message whose notes are bad.

    Returns the tensors that were decoded again, with their new contents, and whether all flags were set when they were read, which
    was before that. ``doubts`` is empty afterwards.
    """
    return asked(doubts, flags)()


def asked(doubts: list[Doubt], flags: Sequence[Tensor] = ()) -> Callable[[], tuple[list[Tensor], bool]]:
    """The same in two halves: the read is under way when this returns, behind what the device was given so far alone; the rest waits."""
    if not doubts:
        return lambda: ([], all(map(bool, flags)))
    looked_at = doubts.copy()
    doubts.clear()
    notes = [note for doubt in looked_at for note in doubt.notes]
    # As bytes, so that numbers and flags travel together.
    there = [x.reshape(-1).view(torch.uint8) for x in (*(note.there for note in notes), *flags)]
    arriving, ends = host.fetched(torch.cat(there)), [0, *itertools.accumulate(x.numel() for x in there)]

    def settled() -> tuple[list[Tensor], bool]:
        data = arriving().numpy().tobytes()
        said = iter(data[a:b] for a, b in itertools.pairwise(ends))
        good = [[_as_wanted(next(said), note.wanted) for note in doubt.notes] for doubt in looked_at]
        changed = [doubt.again() for doubt, each in zip(looked_at, good) if not all(each)]
        return changed, all(map(any, said))

    return settled


def _as_wanted(said: bytes, wanted: bytes | None) -> bool:
    return any(said) if wanted is None else said == wanted
