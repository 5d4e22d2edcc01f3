"""How many bytes a Flower message takes, without serialising it.

Flower sends a message as a tree of objects, each with a header that names its children by 64 hexadecimal digits, and sends equal
objects once. The large ones are chunks of arrays, whose length is known; only what is small is serialised to be counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

# Flower's own limit, from the module that uses it: that has another name in other releases.
CHUNK = int(sys.modules[Array.__module__].FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
_ID = "0" * 64


def wire_nbytes(message: Message) -> int:
    """Bytes of a Flower message as it travels: every object of it, serialised, headers and names included."""
    if message.has_error():
        return len(message.deflate())
    content = message.content
    # The message's own object holds nothing of its content but a name of fixed length.
    message.content = RecordDict()
    total = len(message.deflate())
    message.content = content
    # Equal objects are sent once, so they are counted by what tells one from another.
    sent: dict[Any, int] = {}
    records = set()
    for record in content.values():
        if isinstance(record, ArrayRecord):
            arrays = tuple((name, _array(array, sent)) for name, array in record.items())
            nbytes = _object("ArrayRecord", len({key for _, key in arrays}), dict.fromkeys(record, _ID))
            key: Any = ("ArrayRecord", arrays)
        else:
            data = record.deflate()
            nbytes, key = len(data), ("record", data)
        sent[key] = nbytes
        records.add(key)
    return total + sum(sent.values()) + _object("RecordDict", len(records), dict.fromkeys(content, _ID))


def _array(array: Array, sent: dict[Any, int]) -> Any:
    """Count an array and its chunks in ``sent``; returns what tells it from another array."""
    view = memoryview(array.data)
    chunks = [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
    distinct = list(dict.fromkeys(chunks))
    for chunk in distinct:
        sent[("ArrayChunk", chunk)] = len(f"ArrayChunk  {len(chunk)}") + 1 + len(chunk)
    facts = {
        "dtype": array.dtype,
        "shape": array.shape,
        "stype": array.stype,
        "arraychunk_ids": [distinct.index(chunk) for chunk in chunks],
    }
    key = ("Array", json.dumps(facts), tuple(distinct))
    sent[key] = _object("Array", len(distinct), facts)
    return key


def _object(kind: str, children: int, body: dict[str, Any]) -> int:
    """Bytes of an object whose body is JSON."""
    nbytes = len(json.dumps(body).encode())
    return len(f"{kind} {','.join([_ID] * children)} {nbytes}") + 1 + nbytes


def extent(content: RecordDict, without: str) -> int:
    """Bytes of what records hold, names included, except the data of arrays called ``without``; serialises nothing."""
    total = 0
    for place, record in content.items():
        total += len(place)
        for name, value in record.items():
            total += len(name) + (_array_extent(value, name != without) if isinstance(value, Array) else _value_extent(value))
    return total


def _array_extent(array: Array, data: bool) -> int:
    return len(array.dtype) + 8 * len(array.shape) + len(array.stype) + (len(array.data) if data else 0)


def _value_extent(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Iterable):
        return sum(8 + (len(v) if isinstance(v, (str, bytes)) else 0) for v in value)
    return 8
