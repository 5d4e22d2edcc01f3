"""Sparse messages: which coordinates are sent, and their values; all others are zero.

::

    byte 0   mode: 0 normal, 1 nothing is sent, 2 non-finite, 3 raw (the float32 vector), 4 packed (a second form of the values)
    then     count (varint), index set (``codecs/index.py``), values (``codecs/values.py``)

Mode 3 is for compressors that ask for it, mode 4 for value forms that have it.

Where a device has kernels for index sets, long sets are written and read on it. Everything else is coded in the host's memory, and only
what was chosen travels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import index, varint
from tersegrad.codecs.values import Form, Place
from tersegrad.core import host, trust
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import NON_FINITE, NORMAL, PACKED, RAW, ZERO
from tersegrad.core.protocol import Context, Spec
from tersegrad.kernels.reference.index import random_divisor

# Fewer coordinates than this are coded in the host's memory: a dozen launches would take longer.
MANY = 1 << 14


def codes_there(device: torch.device, form: Form | None = None) -> bool:
    """Whether long index sets, and values of this form behind them, are written and read on the device itself."""
    by = () if form is None else form.coded_by
    sets = ("sparse_encode", "golomb_encode", "golomb_decode", "rans_encode", "rans_decode")
    return by is not None and kernels.faster(device, *sets, *by)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Decoded coordinates: float32 ``values`` at ``indices``, or all of them if these are None."""

    indices: Tensor | None
    values: Tensor


class Chosen(NamedTuple):
    """Coordinates to be sent, in index order, in the host's memory or where they are coded."""

    indices: Tensor
    values: Tensor
    # How many there are: more than these where a selection had no room.
    total: int
    # What a kernel that wrote the message has found out, all in one read: its bytes if its form is the one to send.
    nbytes: int | None = None
    finite: bool | None = None
    counted: index.Counted | None = None
    # What values become, where a kernel has written that.
    decoded: Tensor | None = None


def chosen(
    selected: Sequence[Tensor], spec: Spec, form: Form | None = None, out: Tensor | None = None, finite: Tensor | None = None
) -> Chosen:
    """What a selection found, in one read; ``finite``, a flag, comes along.

    It stays on its device where many were found and are coded there. With ``form`` and ``out`` their message is written at once, in the
    form that is the likeliest.
    """
    indices, values, count = selected
    if count.is_cpu:
        return _first(indices, values, int(count), None if finite is None else bool(finite))
    room = indices.numel()
    here = out is not None and not out.is_cpu and MANY <= room <= spec.numel // 2
    if here and form is not None and out is not None and codes_there(count.device, form):
        most = max_nbytes(room, spec.numel) + form.max_nbytes(room, len(spec.pieces))
        found = _written(selected, spec, form, out[:most], finite)
        if found.total >= MANY or (finite is not None and not found.finite):
            return found
        indices, values = host.read_all(found.indices, found.values)
        return found._replace(indices=indices, values=values)
    if finite is not None:
        indices, values, count, finite = host.read_all(indices, values, count, finite)
        return _first(indices, values, int(count), bool(finite))
    if not (codes_there(count.device) and int(count) >= MANY):
        indices, values, count = host.read_all(indices, values, count)
    return _first(indices, values, int(count))


# By the numbers of coordinates and of room for indices: bits for what classes of gaps leave open, where the last set had such classes.
_GAPS: dict[tuple[int, int], int] = {}


def _written(selected: Sequence[Tensor], spec: Spec, form: Form, out: Tensor, finite: Tensor | None) -> Chosen:
    """What a selection found, and its message if a kernel has written the right one: in one read where sets take the same form again."""
    (indices, values, count), numel = selected, spec.numel
    ops, narrow, kind = kernels.get(count.device), bool(form.narrow), (numel, indices.numel())
    given = form.give(indices, values, count, spec)
    # Where bytes follow the set, not all that was selected is sent, perhaps.
    coded, tried = given.values.dtype == torch.uint8, _GAPS.get(kind, 0)
    facts = ops.sparse_encode(given.indices, given.values, given.told, numel, narrow, out, tried)
    more = [*((given.told[1:3], count.reshape(1)) if coded else ()), *(() if finite is None else (finite.long().reshape(1),))]
    unwritten, nbytes, planes, sent, infinite, *rest = host.read(torch.cat((facts, *more)) if more else facts).tolist()
    classes, rest = rest[: index.KINDS], rest[index.KINDS :]
    behind, mode, total = rest[:3] if coded else (form.max_nbytes(sent, 1), NORMAL, sent)
    good = not infinite and mode != NON_FINITE and (finite is None or rest[-1] == 1)
    found = _first(indices, values, total, good)
    if not (sent >= MANY and total <= indices.numel()) or not good or (unwritten and not tried):
        return found
    if given.decoded is not None:
        found = found._replace(decoded=given.decoded[:total])
    counted = index.Counted(classes, planes)
    found = found if coded else found._replace(counted=counted)
    takes = index.expected(sent, numel, counted)
    if not isinstance(takes, index.Gaps):
        _GAPS.pop(kind, None)
        if tried and takes == "golomb":
            again = (given.indices, given.values, given.told, numel, narrow, out)
            unwritten, nbytes = host.read(ops.sparse_encode(*again)[:2]).tolist()
        return found._replace(nbytes=nbytes) if takes == "golomb" and not unwritten else found
    _GAPS[kind] = takes.room
    before = 1 + varint.nbytes(sent)
    if unwritten or not tried:
        front = bytes((mode, *varint.write(sent), index.ENTROPY_GAPS, takes.alphabet))
        firsts = given.indices[:sent], given.values[: behind if coded else sent]
        unwritten, nbytes = host.read(ops.sparse_encode_gaps(*firsts, front, takes.alphabet, takes.room, narrow, out)).tolist()
    return found if unwritten or nbytes - before - behind >= takes.others else found._replace(nbytes=nbytes)


def _first(indices: Tensor, values: Tensor, total: int, finite: bool | None = None) -> Chosen:
    if total < indices.numel():
        indices, values = indices[:total], values[:total]
    return Chosen(indices, values, total, finite=finite)


def max_nbytes(most: int, numel: int) -> int:
    """Bytes before the values, for at most ``most`` of ``numel`` coordinates."""
    return 1 + varint.nbytes(most) + index.max_nbytes(min(most, numel // 2), numel)


def goes_raw(count: int, numel: int, form: Form) -> bool:
    """Whether a message of ``count`` values might be longer than the whole vector."""
    return 1 + varint.nbytes(count) + index.max_nbytes(count, numel) + form.max_nbytes(count, 1) > 1 + 4 * numel


def send(found: Chosen, spec: Spec, ctx: Context, form: Form, out: Tensor, raw: Callable[[], Tensor] | None = None) -> int:
    """The message of what was chosen into ``out``: its length. It may be there already. ``raw`` as in :func:`write`."""
    if found.nbytes is not None:
        return found.nbytes
    return write(found.values, Place(found.indices, spec, ctx), form, out, raw, found.finite, found.counted)[0]


def write(
    values: Tensor,
    place: Place,
    form: Form,
    out: Tensor,
    raw: Callable[[], Tensor] | None = None,
    finite: bool | None = None,
    counted: index.Counted | None = None,
) -> tuple[int, Tensor]:
    """The message of float32 ``values`` into ``out``: its length, and what each value becomes.

    ``raw`` makes the whole vector, which is sent instead where the message might be longer than it. Values that are not finite
    make the message say so. ``finite`` and ``counted`` spare a look at them where that is known.
    """
    if out.device != values.device:
        here = host.empty(out.numel(), torch.uint8, out.device)
        nbytes, decoded = write(values, place, form, here, raw, finite, counted)
        out[:nbytes].copy_(here[:nbytes], non_blocking=True)
        return nbytes, decoded
    indices, numel = place.indices, place.spec.numel
    if not indices.numel():
        out[0] = ZERO
        return 1, values
    if not (kernels.get(values.device).all_finite(values) if finite is None else finite):
        out[0] = NON_FINITE
        return 1, values
    if raw is not None and goes_raw(place.count, numel, form):
        out[0] = RAW
        vector = raw()
        out[1 : 1 + 4 * numel] = (vector if vector.device == out.device else host.read(vector)).view(torch.uint8)
        return 1 + 4 * numel, values
    written = form.write(values, place)
    if written.kept is not None:
        indices, counted = indices[written.kept], None
        if not indices.numel():
            out[0] = ZERO
            return 1, written.decoded
    at = host.lay(out, bytes((PACKED if written.packed else NORMAL, *varint.write(indices.numel()))))
    at += index.write(indices, numel, out[at:], counted)
    return at + host.lay(out[at:], written.data), written.decoded


def decode(
    data: Tensor, spec: Spec, ctx: Context, form: Form, most: int, out: Tensor, weight: float | None, *, raw: bool, full: bool
) -> None:
    """A message into ``out``, or ``weight`` times it added there; raises :class:`CorruptMessage`.

    ``most`` and ``raw`` as in :func:`read`. ``full``: as a rule a message carries ``most`` coordinates.
    """
    numel, front = spec.numel, None
    if not data.is_cpu and codes_there(data.device, form):
        # A message that begins like the last one of its kind is read by one kernel after the other without a look at what it says.
        usual = _BEGUN.get((numel, most), bytes((NORMAL, *varint.write(most), index.GOLOMB))) if full else b""
        if _decode_at_once(data, usual, spec, most, form, out, weight):
            return
        front = _front(data)
        begun = _beginning(front, form.packs)
        if begun != usual and _decode_at_once(data, begun, spec, most, form, out, weight):
            if full:
                _BEGUN[numel, most] = begun
            return
    scatter(read(data, spec, ctx, form, most, raw=raw, front=front), out, weight)


# What full messages for so many coordinates, with so many of them, began with when they were last looked at.
_BEGUN: dict[tuple[int, int], bytes] = {}


def _beginning(front: bytes, packs: bool) -> bytes:
    """A message's first bytes, up to the form of its set and what belongs to it; none where kernels do not read it in one go."""
    if len(front) < 3 or not (front[0] == NORMAL or (packs and front[0] == PACKED)):
        return b""
    try:
        at = varint.read(front, 1)[1]
    except CorruptMessage:
        return b""
    end = {bytes((index.GOLOMB,)): at + 1, bytes((index.ENTROPY_GAPS,)): at + 2}.get(front[at : at + 1], 0)
    return front[:end]


def _decode_at_once(data: Tensor, begun: bytes, spec: Spec, most: int, form: Form, out: Tensor, weight: float | None) -> bool:
    """Whether the message begins like this, is right, and was decoded."""
    if not begun:
        return False
    (count, at), numel, narrow = varint.read(begun, 1), spec.numel, form.narrow
    if not MANY <= count <= min(most, numel // 2):
        return False
    ops, alphabet = kernels.get(data.device), begun[at + 1] if len(begun) > at + 1 else 0
    if begun[at] != index.GOLOMB and not 1 <= alphabet <= index.CLASSES:
        return False
    if narrow is None:
        return trust.holds(form.put(data, begun, count, alphabet, spec, begun[0] == PACKED, out, weight))
    if begun[at] == index.GOLOMB:
        return trust.holds(ops.sparse_decode(data, begun, count, numel, random_divisor(count, numel), narrow, out, weight))
    return trust.holds(ops.sparse_decode_gaps(data, begun, count, numel, alphabet, narrow, out, weight))


def _front(data: Tensor) -> bytes:
    """The mode, the number of coordinates and the form of the index set, in the host's memory."""
    most = 3 + varint.MAX_NBYTES
    return (data.numpy()[:most] if data.is_cpu else host.read(data[:most]).numpy()).tobytes()


def read(
    data: Tensor, spec: Spec, ctx: Context, form: Form, most: int, *, raw: bool = False, front: bytes | None = None
) -> Sparse | None:
    """What a message holds, None if it says non-finite; raises :class:`CorruptMessage`.

    ``most``: no message carries more coordinates. ``raw``: whether there is mode 3. ``front``: its first bytes, where they are known.
    """
    numel = spec.numel
    if front is None:
        front = _front(data)
    mode = front[0] if front else -1
    if mode == NON_FINITE and data.numel() == 1:
        return None
    if mode == ZERO and data.numel() == 1:
        return Sparse(data.new_empty(0, dtype=index.dtype(numel)), data.new_empty(0, dtype=torch.float32))
    if mode == RAW and raw and data.numel() == 1 + 4 * numel:
        return Sparse(None, data[1:].clone().view(torch.float32))
    if mode != NORMAL and not (mode == PACKED and form.packs):
        raise CorruptMessage(f"not a sparse message for {numel} coordinates: {data.numel()} bytes, mode {mode}")
    count, at = varint.read(front, 1)
    if not 1 <= count <= most:
        raise CorruptMessage(f"the message announces {count} coordinates, at most {most} are sent")
    if not data.is_cpu and (count < MANY or form.local):
        data = host.read(data)
    indices, used = index.decode(data[at:], count, numel, front[at : at + 2])
    values = form.read(data[at + used :], Place(indices, spec, ctx), mode == PACKED)
    return Sparse(indices, values)


def scatter(found: Sparse | None, out: Tensor, weight: float | None) -> None:
    """The decoded vector into ``out``, or ``weight`` times it added there; None is one that is not finite."""
    if found is None:
        out.fill_(math.nan)
        return
    values = _there(found.values, out.device)
    if found.indices is None:
        _ = out.copy_(values) if weight is None else out.add_(values * weight)
        return
    indices, ops = _there(found.indices, out.device), kernels.get(out.device)
    if weight is None:
        ops.sparse_scatter(indices, values, out)
    else:
        ops.sparse_scatter_add(indices, values, weight, out)


def _there(x: Tensor, device: torch.device) -> Tensor:
    return x if x.device == device else host.send(x, device)
