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
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tersegrad.core import host


@dataclasses.dataclass(frozen=True)
class Doubt:
    """Numbers of a device that are all zero if what was decoded is right, and how to decode it again, waiting."""

    notes: list[Tensor]
    again: Callable[[], Tensor]


class _Here(threading.local):
    notes: list[Tensor] | None = None
    doubts: list[Doubt] | None = None


_here = _Here()


@contextlib.contextmanager
def trusting() -> Iterator[list[Tensor]]:
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
    _here.notes.append(x)
    return [0] * x.numel()


def holds(flag: Tensor) -> bool:
    """Whether a flag is set, a scalar; yes if a device has yet to say it and is trusted."""
    if _here.notes is None or flag.is_cpu:
        return bool(flag)
    _here.notes.append((flag == 0).long().reshape(1))
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
    if not doubts:
        return [], all(map(bool, flags))
    # As bytes, so that numbers and flags travel together.
    notes = [note.reshape(-1).view(torch.uint8) for doubt in doubts for note in doubt.notes]
    sizes = [sum(note.nbytes for note in doubt.notes) for doubt in doubts]
    said = host.read(torch.cat([*notes, *(flag.reshape(1).view(torch.uint8) for flag in flags)]))
    *parts, rest = said.split([*sizes, len(flags)])
    wrong = [doubt for doubt, part in zip(doubts, parts) if bool(part.any())]
    doubts.clear()
    return [doubt.again() for doubt in wrong], bool(rest.all())
