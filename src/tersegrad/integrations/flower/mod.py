"""The client's side: a Flower mod that turns messages into models before the app sees them, and models into updates after.

Put it first in the list of mods: it is then the first to touch what comes in and the last to touch what goes out, and clipping or
noise of other mods happens before compression.

What a client remembers between messages (the model version it holds, the residual of error feedback, its last update until the
server confirms it) lies in Flower's ``context.state``, which a SuperNode keeps in memory; ``store=`` keeps it in a file as well.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from torch import Tensor

from tersegrad.core import frame, state
from tersegrad.core.errors import BadConfiguration, CorruptMessage, TersegradError
from tersegrad.core.protocol import Compressor, Spec
from tersegrad.core.protocol import Context as Draw
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import KEY, Answer, Layout, Order, usable
from tersegrad.integrations.flower.memory import Memory
from tersegrad.recipes import parse

FAILED_PRECONDITION = 6  # Flower's ErrorCode.MOD_FAILED_PRECONDITION
CHOICE = "tersegrad"  # the key of node_config that names a budget or a compressor
STORE = "tersegrad-store"  # the key of node_config that names the folder for the client's file
_ARRAYS, _FACTS = "tersegrad.arrays", "tersegrad.facts"
_log = logging.getLogger("flwr")

Next = Callable[[Message, Context], Message]


@dataclasses.dataclass(frozen=True)
class CompressMod:
    """The mod; see :func:`compress_mod`."""

    compressor: str | None
    store: Path | None
    max_numel: int

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Unpack the model, let the app work on it, pack its update."""
        place = _find(message)
        if place is None:
            _log.warning("compress_mod: a %s message without a compressed model, left alone", message.metadata.message_type)
            return call_next(message, context)
        began = time.perf_counter()
        try:
            memory = self._recall(context)
            order, beside = self._receive(message.content[place], memory)
        except TersegradError as error:
            return _error(message, f"the model cannot be read: {error}")
        assert memory.layout is not None  # set together by _receive
        assert memory.base is not None
        records = {k: v for k, v in message.content.items() if k != place}
        message.content = RecordDict({place: memory.layout.record(memory.base, beside), **records})

        reply = call_next(message, context)

        if not reply.has_error() and message.metadata.message_type.split(".")[0] == "train":
            try:
                self._answer(reply, memory, order, context, began)
            except TersegradError as error:
                reply = _error(message, f"the update cannot be sent: {error}")
        self._remember(context, memory)
        return reply

    # ---- downlink

    def _receive(self, record: Any, memory: Memory) -> tuple[Order, dict[str, Array]]:
        """Bring ``memory`` to the version that the message leads to."""
        order, framed = Order.unpack(record[KEY].data)
        if order.layout is not None:
            layout = Layout.from_facts(order.layout, self.max_numel)
            # Another model: what was left out of the old one is meaningless.
            if layout != memory.layout:
                memory.entries, memory.compressor, memory.frame = {}, "", b""
            memory.layout = layout
        # Who holds the new version already got the same message before.
        held = memory.base is not None and memory.version in (order.base, order.version)
        if memory.layout is None or (order.base is not None and not held):
            raise CorruptMessage(f"it is a difference to version {order.base}, held is {memory.version}: send a snapshot")
        memory.layout.read_beside(record)
        if order.base is None or memory.version != order.version:
            opened = frame.unpack(framed, max_numel=memory.layout.spec.numel)
            if (opened.context.step, opened.context.buffer) != (
                order.step,
                envelope.SNAPSHOT if order.base is None else envelope.DIFFERENCE,
            ):
                raise CorruptMessage("header and frame belong to different messages")
            compressor = _parse(opened.text)
            envelope.check_frame(opened, memory.layout.spec, compressor)
            decoded = compressor.decode(opened.message, memory.layout.spec, opened.context)
            memory.base = decoded if order.base is None or memory.base is None else memory.base + decoded
        memory.version = order.version
        return order, {name: record[name] for name in memory.layout.beside}

    # ---- uplink

    def _answer(self, reply: Message, memory: Memory, order: Order, context: Context, began: float) -> None:
        """Replace the model in a reply by the framed update."""
        if len(reply.content.array_records) != 1 or memory.layout is None or memory.base is None:
            raise BadConfiguration(f"a train reply has one ArrayRecord, got {len(reply.content.array_records)}")
        (place,) = reply.content.array_records
        trained = reply.content.array_records[place]
        spec = memory.layout.spec
        draw, fresh = Draw(order.seed, order.step, envelope.UP, order.sender), False
        # A question that comes twice has one answer, whichever copy of it the server takes.
        if not memory.frame or frame.unpack(memory.frame).context != draw:
            compressor = self._choose(order, context)
            before, rest, fresh = self._state(memory, compressor, order)
            update = memory.layout.update(trained, memory.base) + rest
            message, after = compressor.encode(update, spec, before, draw)
            memory.compressor, memory.entries = str(compressor), state.state_dict(after)
            memory.epoch, memory.step = order.epoch, order.step
            memory.frame = envelope.pack_frame(message, compressor, spec, draw)
        data = Answer(time.perf_counter() - began, fresh).pack(memory.frame)
        beside = {name: trained[name] for name in memory.layout.beside}
        sent = Array("uint8", (len(data),), envelope.UPDATE, data)
        reply.content[place] = ArrayRecord({KEY: sent, **beside})

    def _choose(self, order: Order, context: Context) -> Compressor[Any]:
        """The server's word if it insists, else the node's own configuration, else the mod's argument, else the server's offer."""
        wish = context.node_config.get(CHOICE)
        text = order.uplink if order.fixed else str(wish or self.compressor or order.uplink)
        return _parse(order.budgets.get(text, text))

    def _state(self, memory: Memory, compressor: Compressor[Any], order: Order) -> tuple[Any, Tensor | float, bool]:
        """The state to encode with; what of the old residual goes with this update; whether the residual begins at zero.

        The old residual passes on to another compressor's; where that keeps none it goes with this update.
        """
        assert memory.layout is not None
        spec = memory.layout.spec
        found = compressor.init(spec, "cpu")
        rest: Tensor | float = 0.0
        kept = self._kept(memory, spec)
        if kept is not None:
            old, carried = kept[0], state.carried(kept[0], spec)
            if memory.compressor == str(compressor):
                found = old
            elif carried is not None:
                found, rest = state.carry(found, spec, carried.float())
        # Another run of the server does not know what became of the last update, so it counts as used.
        if memory.frame and memory.epoch == order.epoch and memory.step != order.heard:
            opened = frame.unpack(memory.frame, max_numel=spec.numel)
            lost = _parse(opened.text).decode(opened.message, spec, opened.context)
            if bool(lost.isfinite().all()):
                found, _ = state.carry(found, spec, lost)
        return found, rest, kept is None

    @staticmethod
    def _kept(memory: Memory, spec: Spec) -> tuple[Any] | None:
        """The state after the last update, in a tuple because it may be None; without one the residual begins at zero."""
        if not memory.compressor:
            _log.info("compress_mod: no residual kept, it begins at zero")
            return None
        try:
            return (state.load(_parse(memory.compressor).init(spec, "cpu"), memory.entries),)
        except TersegradError as error:
            _log.warning("compress_mod: the kept residual does not fit (%s), it begins at zero", error)
            return None

    # ---- memory

    def _file(self, context: Context) -> Path | None:
        name = context.node_config.get("partition-id", context.node_id)
        safe = "".join(c if c.isalnum() else "_" for c in str(name))
        folder = context.node_config.get(STORE, self.store)
        return Path(str(folder)) / f"client-{safe}.state" if folder else None

    def _recall(self, context: Context) -> Memory:
        if _ARRAYS in context.state:
            return Memory.from_records(context.state.array_records[_ARRAYS], context.state.config_records[_FACTS])
        path = self._file(context)
        if path is not None and path.exists():
            try:
                return Memory.frombytes(path.read_bytes())
            except CorruptMessage as error:
                _log.warning("compress_mod: %s is damaged (%s), its residual is lost", path.name, error)
        return Memory()

    def _remember(self, context: Context, memory: Memory) -> None:
        context.state[_ARRAYS], context.state[_FACTS] = memory.records()
        path = self._file(context)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(f".{os.getpid()}.new")
            beside.write_bytes(memory.tobytes())
            beside.replace(path)  # a reader sees the old file or the new one


def compress_mod(
    compressor: Compressor[Any] | str | None = None, *, store: str | Path | None = None, max_numel: int = 1 << 28
) -> CompressMod:
    """A Flower mod that receives compressed models and sends compressed updates; goes with ``CompressedStrategy``.

    - ``compressor``: for this client's updates; by default the server's choice. ``node_config["tersegrad"]`` (a text form, or the
      name of one of the server's budgets) comes before it, and a server that assigns budgets itself comes before both. The
      server turns away what it does not offer.
    - ``store``: a folder that keeps residual and model across restarts of the SuperNode (one file per client, by ``partition-id``
      or else node id); ``node_config["tersegrad-store"]`` does the same for one node. Without
      it a restarted SuperNode begins with a residual of zero.
    - ``max_numel``: no model with more parameters is accepted.

    >>> compress_mod("error_feedback(top_k(fraction=0.01))").compressor
    'error_feedback(top_k(fraction=0.01))'
    """
    text = None if compressor is None else str(usable(compressor))
    return CompressMod(text, None if store is None else Path(store), max_numel)


@functools.lru_cache(maxsize=32)  # the same few texts come with every message
def _parse(text: str) -> Compressor[Any]:
    try:
        return parse(text)
    except BadConfiguration as error:
        raise CorruptMessage(f"the compressor {text[:80]!r} is not understood: {error}") from error


def _find(message: Message) -> str | None:
    """The name of the record that holds a model of ours."""
    if not message.has_content():
        return None
    for name, record in message.content.array_records.items():
        if KEY in record and record[KEY].stype == envelope.MODEL:
            return name
    return None


def _error(message: Message, reason: str) -> Message:
    _log.error("compress_mod: %s", reason)
    return Message(Error(code=FAILED_PRECONDITION, reason=f"tersegrad: {reason}"), reply_to=message)
