"""The downlink: versions of the model that clients hold, and the messages that bring them up to date.

The exact model x stays with the server. A client that holds version w gets C(x - w), encoded once for all that hold w, and then
holds w + C(x - w): what a message leaves out is in the next difference, which is error feedback without a residual of its own. Who
holds no known version (newcomers, restarts, a lost reply) gets a snapshot of x.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from tersegrad.core.errors import BadConfiguration, TersegradError
from tersegrad.core.protocol import Compressor, Context, Spec
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import Layout
from tersegrad.wrappers import ErrorFeedback

SENDERS = 0xFFFF  # 0xffff itself is the number of randomness that all share
_HALF = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Model:
    """The exact model of one broadcast; its arrays are read once."""

    layout: Layout
    arrays: ArrayRecord
    values: dict[str, np.ndarray[Any, Any]]
    flat: Tensor  # the compressed arrays, float32; values of float32 are views of it

    @staticmethod
    def of(arrays: ArrayRecord, layout: Layout) -> Model:
        """Read the arrays of a model."""
        tensors = envelope.to_state_dict(arrays)
        flat = layout.flatten(tensors)
        if not bool(torch.isfinite(flat).all()):
            raise TersegradError("the global model is not finite: training has diverged, or the aggregation is wrong")
        values = {name: tensor.numpy() for name, tensor in tensors.items()}
        for piece, part in zip(layout.spec.pieces, flat.split([piece.numel for piece in layout.spec.pieces])):
            if tensors[piece.name].dtype == flat.dtype:
                values[piece.name] = part.view(piece.shape).numpy()
        return Model(layout, arrays, values, flat)

    @property
    def beside(self) -> dict[str, Array]:
        """The arrays that travel beside the frame."""
        return {name: self.arrays[name] for name in self.layout.beside}

    def plus(self, update: Tensor, beside: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """The exact model plus an update, in the model's dtypes; the arrays beside the frame are those given."""
        found, at = dict.fromkeys(self.layout.names, np.empty(0)) | beside, 0
        with np.errstate(over="ignore"):
            for piece in self.layout.spec.pieces:
                exact = self.values[piece.name]
                part = update[at : at + piece.numel].reshape(piece.shape).numpy()
                found[piece.name] = np.asarray((exact + part).astype(exact.dtype, copy=False))
                at += piece.numel
        return found

    def like(self, arrays: ArrayRecord) -> ArrayRecord | None:
        """An aggregate in this model's dtypes, None if it is not finite: means of integers are rounded to integers again."""
        found = {}
        for name, array in arrays.items():
            value = envelope.read_tensor(array).numpy()
            old = self.values.get(name)
            if not np.isfinite(value).all():
                return None
            if old is None or old.dtype == value.dtype:
                found[name] = array
                continue
            if old.dtype.kind in "iu":
                bounds = np.iinfo(old.dtype)
                value = np.clip(value, max(bounds.min, -envelope.EXACT), min(bounds.max, envelope.EXACT))
            if old.dtype.kind in "biu":
                value = np.rint(value)
            with np.errstate(over="ignore"):
                value = np.asarray(value.astype(old.dtype))
            if not np.isfinite(value).all():
                return None
            found[name] = Array(value)
        return ArrayRecord(found)


@dataclasses.dataclass(frozen=True)
class Version:
    """A model as some clients hold it, and the number of the exact model that it stands for."""

    flat: Tensor
    target: int


@dataclasses.dataclass(frozen=True)
class Shipment:
    """One encoded broadcast: for every client that holds ``base``."""

    kind: str
    base: int | None
    version: int
    framed: bytes


class Broadcast:
    """Versions and shipments. ``begin`` starts a broadcast of a model, ``shipment`` is what a client gets."""

    def __init__(
        self,
        downlink: Compressor[Any],
        snapshot: Compressor[Any],
        beside: Sequence[str] = envelope.RUNNING,
        memory: int = 2 << 30,
        seed: int | None = None,
    ) -> None:
        self.downlink, self.snapshot, self.beside, self.memory = contraction(downlink), snapshot, tuple(beside), memory
        self.step = 0
        self.epoch = secrets.randbits(30) if seed is None else 1
        self.model: Model | None = None
        self.versions: dict[int, Version] = {}  # least recently used first
        self._target = 0  # number of the exact model
        self._shipped: dict[int | None, Shipment] = {}
        self._key = (
            secrets.token_bytes(32) if seed is None else hashlib.blake2b(b"tersegrad" + str(seed).encode()).digest()[:32]
        )

    def begin(self, arrays: ArrayRecord) -> Model:
        """The next broadcast, of this model."""
        layout, before = Layout.of(arrays, self.beside), self.model
        if before is None or not layout.same_model(before.layout):
            self.versions, before = {}, None
        model = Model.of(arrays, layout if before is None else before.layout)
        if before is None or not torch.equal(model.flat, before.flat):
            self._target += 1
        self.model, self._shipped = model, {}
        self.step += 1
        return model

    def shipment(self, held: int | None) -> Shipment:
        """What clients that hold this version get; a snapshot for versions that are not known."""
        held = held if held in self.versions else None
        if held not in self._shipped:
            self._shipped[held] = self._encode(held, len(self._shipped))
        return self._shipped[held]

    def _encode(self, held: int | None, number: int) -> Shipment:
        assert self.model is not None
        snapshot = functools.partial(self._framed, self.snapshot, self.model.flat, envelope.SNAPSHOT, number)
        if held is None:
            whole, model = snapshot()
            return Shipment("snapshot", None, self._new(model), whole)
        # Taken out and put back: now it is the one used last.
        base = self.versions[held] = self.versions.pop(held)
        if base.target == self._target:
            return Shipment("same", held, held, b"")
        framed, decoded = self._framed(self.downlink, self.model.flat - base.flat, envelope.DIFFERENCE, number)
        # A long difference may be longer than a snapshot.
        if len(framed) > self.model.layout.spec.numel // 2:
            whole, model = snapshot()
            if len(whole) < len(framed):
                return Shipment("snapshot", None, self._new(model), whole)
        return Shipment("difference", held, self._new(base.flat + decoded), framed)

    def _framed(self, compressor: Compressor[Any], x: Tensor, buffer: int, number: int) -> tuple[bytes, Tensor]:
        assert self.model is not None
        spec = self.model.layout.spec
        context = Context(self.draw(b"broadcast", 0), self.step, buffer, number % SENDERS)
        message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), context)
        decoded = compressor.decode(message, spec, context)
        if not bool(torch.isfinite(decoded).all()):
            raise TersegradError(f"{compressor} turned a finite model into one that is not")
        return envelope.pack_frame(message, compressor, spec, context), decoded

    def _new(self, flat: Tensor) -> int:
        """A number for a version that clients are about to hold."""
        number = envelope.version_number(self.epoch, self.step, len(self.versions))
        while number in self.versions:
            number += 1
        self.versions[number] = Version(flat, self._target)
        return number

    def forget(self, held: set[int | None], asked: set[int]) -> None:
        """Drop versions that nobody holds, then the least recently used beyond the memory; never those just sent."""
        assert self.model is not None
        self.versions = {number: version for number, version in self.versions.items() if number in held | asked}
        room = max(1, self.memory // (4 * max(1, self.model.layout.spec.numel)))
        for number in [n for n in self.versions if n not in asked][: max(0, len(self.versions) - room)]:
            del self.versions[number]

    def draw(self, purpose: bytes, node: int) -> int:
        """64 bits for this step that nobody can guess who was not told."""
        text = purpose + self.step.to_bytes(8, "little") + node.to_bytes(16, "little", signed=True)
        return int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=8).digest(), "little")

    def uncompressed(self) -> dict[str, str]:
        """The arrays that are sent as they are, and why."""
        if self.model is None:
            return {}
        kinds = {name: self.model.values[name].dtype.kind for name in self.model.layout.beside}
        return {name: "name matches beside=" if kind == "f" else "not floating-point" for name, kind in kinds.items()}


def contraction(compressor: Compressor[Any]) -> Compressor[Any]:
    """The compressor for differences: contractive as it is, or made so; differences are error feedback already."""
    if isinstance(compressor, ErrorFeedback):
        raise BadConfiguration(
            f"downlink={compressor}: differences to what clients hold feed errors back already, use {compressor.inner}"
        )
    promise = compressor.guarantee(Spec.flat(4096))
    if promise.kind == "unbiased" and promise.value > 0:
        # With a fresh state it scales by 1/(1+omega), which is a contraction.
        return ErrorFeedback(compressor)
    if promise.kind == "none":
        raise BadConfiguration(f"downlink={compressor} promises nothing, so clients might drift away from the model")
    return compressor


def ordinary(arrays: ArrayRecord) -> ArrayRecord:
    """16-bit floating-point arrays as float32: sums of small updates must not be rounded away."""
    if not any(a.dtype in _HALF for a in arrays.values()):
        return arrays
    return ArrayRecord(
        {n: Array(envelope.read_tensor(a).float().numpy()) if a.dtype in _HALF else a for n, a in arrays.items()}
    )
