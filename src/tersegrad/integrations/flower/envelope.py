"""What travels in a Flower message: one ``Array`` of our own kind instead of the model's arrays.

Down (stype ``tersegrad.model``): a JSON header (:class:`Order`) and a frame of the model or of its difference to the version that
the client holds. Up (``tersegrad.update``): five bytes (:class:`Answer`) and a frame of the update. Frames are those of
:mod:`tersegrad.core.frame`. Arrays that are not compressed (integers, running statistics) lie beside it, as Flower writes them.

Nothing here trusts its input: lengths are checked before anything is allocated, and bad bytes raise ``CorruptMessage``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from tersegrad.advice import FEDERATED
from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Piece, Spec, needs_second_moment
from tersegrad.core.protocol import Message as Coded
from tersegrad.recipes import parse

KEY = "tersegrad"  # the name of our Array in an ArrayRecord
MODEL, UPDATE = "tersegrad.model", "tersegrad.update"  # its stype, down and up
NUMPY, RAW = "numpy.ndarray", "tersegrad.tensor"  # stypes of whole tensors: Flower's, and ours for what numpy cannot hold
RUNNING = ("*running_mean", "*running_var", "*num_batches_tracked")  # rounding a variance may make it negative
NONNEGATIVE = ("*running_var", "*num_batches_tracked")
UP, DIFFERENCE, SNAPSHOT = 0, 1, 2  # the frame's buffer number: what the frame is about
MAX_HEADER = 1 << 20
EXACT = 2**53  # integers up to here have a float64, which means of integers are made of


# ---- whole tensors -------------------------------------------------------------------------------------------------------------


def pack_tensor(tensor: Tensor) -> Array:
    """One tensor as Flower's Array; bfloat16, which numpy cannot hold, as raw bytes under a stype of our own."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return Array(tensor.numpy())
    return Array("bfloat16", tuple(tensor.shape), RAW, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def read_tensor(array: Array) -> Tensor:
    """The tensor in an Array of Flower's or of ours. Allocates no more than the Array's own bytes, whatever they claim."""
    if array.stype == RAW and array.dtype == "bfloat16":
        if len(array.data) != 2 * math.prod(array.shape) or any(size < 0 for size in array.shape):
            raise CorruptMessage(f"a bfloat16 tensor of shape {array.shape} does not take {len(array.data)} bytes")
        if not array.data:
            return torch.empty(array.shape, dtype=torch.bfloat16)
        return torch.frombuffer(bytearray(array.data), dtype=torch.bfloat16).reshape(array.shape)
    if array.stype != NUMPY:
        raise CorruptMessage(f"an array of kind {array.stype!r} is not understood")
    try:
        return torch.from_numpy(_read_npy(array.data))
    except TypeError as error:
        raise CorruptMessage(f"an array of {array.dtype[:20]!r} is not understood") from error


def _read_npy(data: bytes) -> np.ndarray[Any, Any]:
    """What ``numpy.load`` would read; it allocates the size that the header claims before it looks for the bytes."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        size = struct.Struct("<H" if version == (1, 0) else "<I")
        (length,) = size.unpack(stream.read(size.size))
        if length > 1 << 16:
            raise CorruptMessage("the array's header is too long")
        facts = ast.literal_eval(stream.read(length).decode("latin1"))
        shape, dtype, fortran = tuple(facts["shape"]), np.dtype(facts["descr"]), bool(facts["fortran_order"])
        if dtype.kind not in "biuf" or not all(isinstance(s, int) and s >= 0 for s in shape):
            raise CorruptMessage(f"an array of {dtype} and shape {shape} is not understood")
        rest = data[stream.tell() :]
        if len(rest) != math.prod(shape) * dtype.itemsize:
            raise CorruptMessage(f"an array of {dtype} and shape {shape} does not take {len(rest)} bytes")
        found = np.frombuffer(rest, dtype=dtype).reshape(shape, order="F" if fortran else "C")
        # A copy: torch wants memory that may be written.
        return np.array(found, dtype=dtype.newbyteorder("="), order="C")
    except CorruptMessage:
        raise
    except (ValueError, SyntaxError, TypeError, KeyError, struct.error, MemoryError, RecursionError, OverflowError) as error:
        raise CorruptMessage(f"not a numpy array: {error}") from error


def to_arrays(state_dict: Mapping[str, Tensor]) -> ArrayRecord:
    """A model's ``state_dict`` as Flower's ArrayRecord, bfloat16 included (which Flower's own conversion refuses)."""
    return ArrayRecord({name: pack_tensor(tensor) for name, tensor in state_dict.items()})


def to_state_dict(record: ArrayRecord) -> OrderedDict[str, Tensor]:
    """The inverse of :func:`to_arrays`; also reads what Flower's own conversion wrote."""
    return OrderedDict((name, read_tensor(array)) for name, array in record.items())


# ---- the model as one buffer ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model's arrays in order: which lie in the compressed buffer, and which travel beside it as they are."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: tuple[bool, ...]

    @staticmethod
    def of(record: ArrayRecord, beside: Sequence[str] = RUNNING) -> Layout:
        """The layout of a model: floating-point arrays are compressed, unless their name matches a pattern of ``beside``."""

        def compressed(name: str, array: Array) -> bool:
            return "float" in array.dtype and not any(fnmatchcase(name, pattern) for pattern in beside)

        packed = tuple(compressed(name, array) for name, array in record.items())
        if not any(packed):
            raise BadConfiguration(f"nothing to compress: {len(record)} arrays, none of them of floating-point numbers")
        if KEY in record:
            raise BadConfiguration(f"an array of the model is called {KEY!r}: rename it")
        return Layout(tuple(record), tuple(tuple(array.shape) for array in record.values()), packed)

    def same_model(self, other: Layout) -> bool:
        """Whether names and shapes agree: averaging makes integers floating-point, which does not make another model."""
        return (self.names, self.shapes) == (other.names, other.shapes)

    @functools.cached_property
    def spec(self) -> Spec:
        """The spec of the compressed buffer."""
        kept = [(n, s) for n, s, p in zip(self.names, self.shapes, self.packed) if p]
        return Spec(tuple(Piece(shape, 0, math.prod(shape), name) for name, shape in kept))

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the arrays that are not compressed."""
        return tuple(name for name, packed in zip(self.names, self.packed) if not packed)

    def flatten(self, model: Mapping[str, Tensor]) -> Tensor:
        """The compressed arrays of a model as one float32 buffer."""
        return torch.cat([t.reshape(-1).to(torch.float32) for t in self._tensors(model)])

    def update(self, record: ArrayRecord, base: Tensor) -> Tensor:
        """What training changed, float32. A 16-bit model began at the rounded base, so the difference is to that."""
        trained = self._tensors(record)
        begun = base.split([t.numel() for t in trained])
        return torch.cat([(t.reshape(-1).double() - b.to(t.dtype).double()).float() for t, b in zip(trained, begun)])

    def _tensors(self, record: Mapping[str, Array | Tensor]) -> list[Tensor]:
        if tuple(record) != self.names:
            raise BadConfiguration(
                f"the model's arrays are {list(self.names)[:8]}, not {list(record)[:8]}: keep names and order"
            )
        found = []
        for name, shape, packed in zip(self.names, self.shapes, self.packed):
            if packed:
                value = record[name]
                tensor = read_tensor(value) if isinstance(value, Array) else value
                if tuple(tensor.shape) != shape:
                    raise BadConfiguration(f"{name} has shape {tuple(tensor.shape)}, the model {shape}")
                found.append(tensor)
        return found

    def record(self, flat: Tensor, beside: Mapping[str, Array]) -> ArrayRecord:
        """A model of float32 arrays from the buffer, in the model's order; the other arrays as they came."""
        arrays, at = {}, 0
        for name, shape, packed in zip(self.names, self.shapes, self.packed):
            if packed:
                size = math.prod(shape)
                arrays[name] = Array(flat[at : at + size].reshape(shape).numpy())
                at += size
            else:
                arrays[name] = beside[name]
        return ArrayRecord(arrays)

    def read_beside(self, record: ArrayRecord) -> dict[str, Tensor]:
        """The uncompressed arrays of a message; raises unless they are there, alone with ours, finite and of the right shape."""
        expected = {*self.beside, KEY}
        if set(record) != expected:
            raise CorruptMessage(f"expected the arrays {sorted(expected)[:8]}, got {sorted(record)[:8]}")
        found = {}
        for name, shape in zip(self.names, self.shapes):
            if name in expected:
                tensor = found[name] = read_tensor(record[name])
                if tuple(tensor.shape) != shape:
                    raise CorruptMessage(f"{name} has shape {tuple(tensor.shape)}, the model {shape}")
                if not bool(torch.isfinite(tensor).all()):
                    raise CorruptMessage(f"{name} is not finite")
        return found

    def facts(self) -> list[list[Any]]:
        """As JSON."""
        return [[n, list(s), int(p)] for n, s, p in zip(self.names, self.shapes, self.packed)]

    @staticmethod
    def from_facts(facts: Any, max_numel: int) -> Layout:
        """From JSON that a stranger wrote."""
        try:
            names, shapes, packed = zip(*((str(n), tuple(int(x) for x in s), bool(p)) for n, s, p in facts))
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptMessage(f"the layout of the model is not understood: {error}") from error
        if len(set(names)) != len(names) or any(x < 0 for s in shapes for x in s):
            raise CorruptMessage("the layout of the model has a name twice or a negative size")
        layout = Layout(tuple(names), tuple(shapes), tuple(packed))
        if not any(packed) or layout.spec.numel > max_numel:
            raise CorruptMessage(f"a model of {layout.spec.numel} parameters, at most {max_numel} are accepted (max_numel=)")
        return layout


# ---- compressors and frames ----------------------------------------------------------------------------------------------------


def usable(compressor: Compressor[Any] | str) -> Compressor[Any]:
    """A compressor that needs nothing but the update."""
    found = parse(compressor) if isinstance(compressor, str) else compressor
    if needs_second_moment(found):
        raise BadConfiguration(
            f"{found} decides by the second moment of single samples' gradients, which a model update does not have: "
            f"use another compressor, for instance {FEDERATED}"
        )
    return found


def pack_frame(message: Coded, compressor: Compressor[Any], spec: Spec, context: Context) -> bytes:
    """The frame of one message."""
    return frame.pack(message, wire_id=compressor.wire_id, text=str(compressor), spec=spec, context=context)


def max_frame(compressor: Compressor[Any], spec: Spec) -> int:
    """No frame of this compressor is longer."""
    return compressor.max_nbytes(spec) + len(str(compressor)) + 64


def check_frame(opened: frame.Frame, spec: Spec, compressor: Compressor[Any]) -> None:
    """Raise unless the frame holds this buffer, written by this compressor."""
    if (opened.numel, opened.dtype) != (spec.numel, spec.dtype):
        raise CorruptMessage(
            f"wrong shape: the frame holds {opened.numel} coordinates of {opened.dtype}, the model {spec.numel} of {spec.dtype}"
        )
    if compressor.wire_id != opened.wire_id:
        raise CorruptMessage(f"the frame says wire id {opened.wire_id}, {opened.text} has {compressor.wire_id}")


# ---- headers -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Order:
    """What the server tells one client beside the model."""

    step: int  # number of the broadcast
    seed: int  # of the randomness of the answer; the server's choice, different for every client and broadcast
    sender: int  # the number under which the client answers
    version: int  # of the model that this message leads to
    base: int | None  # the version that the frame is a difference to; None: a snapshot
    uplink: str  # the compressor of the answer
    fixed: bool = False  # the server insists on it
    budgets: dict[str, str] = dataclasses.field(default_factory=dict)  # else the client may take one of these, by name
    heard: int | None = None  # the last step whose answer this run of the server has used; None: it has used none
    layout: list[list[Any]] | None = None  # with snapshots

    @property
    def epoch(self) -> int:
        """Tells one run of a server from another; a run that goes on from a checkpoint is the same."""
        return self.version >> 32

    def pack(self, framed: bytes) -> bytes:
        """Header and frame as bytes."""
        header = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
        return struct.pack("<I", len(header)) + header + framed

    @staticmethod
    def unpack(data: bytes) -> tuple[Order, bytes]:
        """Header and frame; neither is believed further than its types."""
        if len(data) < 4:
            raise CorruptMessage("the model's header is truncated")
        (length,) = struct.unpack_from("<I", data)
        if length > min(MAX_HEADER, len(data) - 4):
            raise CorruptMessage(f"the model's header claims {length} bytes of {len(data)}")
        try:
            facts = json.loads(data[4 : 4 + length])
            order = Order(**facts)
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptMessage(f"the model's header is not understood: {error}") from error
        numbers = [order.step, order.seed, order.sender, order.version]
        maybe = [order.base, order.heard]
        right = all(isinstance(n, int) and n >= 0 for n in numbers) and all(n is None or isinstance(n, int) for n in maybe)
        texts = [order.uplink, *order.budgets, *order.budgets.values()] if isinstance(order.budgets, dict) else [None]
        if not right or not all(isinstance(t, str) for t in texts):
            raise CorruptMessage("the model's header has fields of the wrong kind")
        return order, data[4 + length :]


def version_number(epoch: int, step: int, number: int) -> int:
    """The number of a version: which run of a server made it, at which step, and which of that step's versions it is."""
    return (epoch << 32) + (step % 0x10000 << 16) + number % 0x10000


_ANSWER = struct.Struct("<fB")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client tells the server beside its update."""

    seconds: float  # that the client spent on training and coding
    fresh: bool  # its residual began at zero with this message

    def pack(self, framed: bytes) -> bytes:
        """Header and frame as bytes."""
        return _ANSWER.pack(self.seconds, self.fresh) + framed

    @staticmethod
    def unpack(data: bytes) -> tuple[Answer, bytes]:
        """Header and frame."""
        if len(data) < _ANSWER.size:
            raise CorruptMessage("the update's header is truncated")
        seconds, fresh = _ANSWER.unpack_from(data)
        return Answer(seconds if math.isfinite(seconds) and seconds >= 0 else 0.0, bool(fresh)), data[_ANSWER.size :]
