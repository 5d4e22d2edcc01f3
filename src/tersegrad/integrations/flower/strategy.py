"""The server's side: a strategy around any of Flower's that broadcasts compressed models and decodes compressed updates.

The exact model x stays with the server and the strategy inside. Clients hold *versions* w of it. A client that holds version w gets
C(x - w), once encoded for all that hold w, and then holds w + C(x - w): what a message leaves out is in the next difference, which is
error feedback without a residual of its own. Who holds no known version (newcomers, restarts, a lost reply) gets a snapshot of x.
Updates are added to x, not to w, so rounding of the broadcast never enters the model.

A reply is used only if it comes from a client that was asked, once, with the seed, step and sender of the question, from an offered
compressor, and decodes to finite numbers of the model's shape; else it is refused, with a reason, and the round goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage, TersegradError
from tersegrad.core.protocol import Compressor, Context, Spec
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import KEY, Answer, Layout, Order
from tersegrad.integrations.flower.ledger import ClientRecord, Parcel, Refused, Rejection, RoundReport, summary
from tersegrad.integrations.flower.local import TimedGrid
from tersegrad.recipes import parse
from tersegrad.wrappers import ErrorFeedback

SENDERS = 0xFFFF  # 0xffff itself is the number of randomness that all share
_log = logging.getLogger("flwr")


@dataclasses.dataclass(frozen=True)
class Version:
    """A model as some clients hold it, and which of the server's models it stands for."""

    flat: Tensor
    target: int


@dataclasses.dataclass(frozen=True)
class Shipment:
    """One encoded broadcast: for every client that holds ``base``."""

    kind: str
    base: int | None
    version: int
    framed: bytes


@dataclasses.dataclass(frozen=True)
class Question:
    """What one client was sent, and so what its reply must match."""

    order: Order
    allowed: frozenset[str]  # text forms of compressors


class CompressedStrategy(Strategy):
    """Any Flower strategy with compressed messages; the clients run ``compress_mod``.

    - ``inner``: the strategy that samples clients and aggregates; it sees ordinary models.
    - ``uplink``: the compressor of updates, or a dict of *budgets* by name, of which clients take one (the first by default).
    - ``downlink``: the compressor of differences between models; needs a guarantee.
    - ``snapshot``: the compressor of whole models.
    - ``choose``: a function of a :class:`ClientRecord` that names the client's budget, e.g. :func:`by_bandwidth`.
    - ``accept``: also take updates of compressors that this function approves; by default only those in ``uplink``.
    - ``clip``: scale decoded updates down to this Euclidean norm: what differential privacy and a bound on any one client need.
    - ``max_weight``: refuse replies that claim a larger weight (``num-examples``).
    - ``dense``: name patterns of arrays that are sent uncompressed (running statistics, by default); integers always are.
    - ``patience``, ``quorum``: once this share of a round's replies is there, wait only so many seconds for the others.
    - ``memory``: bytes for the versions that clients hold; the least recently used are forgotten beyond it.
    - ``seed``: makes the randomness of messages reproducible; by default it is secret and fresh.
    - ``checkpoint``: a file that is rewritten after every round; :meth:`resume` reads it.
    """

    def __init__(
        self,
        inner: Strategy,
        uplink: Compressor[Any] | str | Mapping[str, Compressor[Any] | str] = "error_feedback(sparse_dithering(alpha=0.25))",
        downlink: Compressor[Any] | str = "sparse_dithering(alpha=0.1)",
        *,
        snapshot: Compressor[Any] | str = "sparse_dithering(bits=3.9)",
        choose: Callable[[ClientRecord], str] | None = None,
        accept: Callable[[Compressor[Any]], bool] | None = None,
        clip: float | None = None,
        max_weight: float | None = None,
        dense: Sequence[str] = envelope.RUNNING,
        patience: float | None = None,
        quorum: float = 0.5,
        memory: int = 2 << 30,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise BadConfiguration(f"CompressedStrategy wraps a flwr.serverapp.strategy.Strategy, got {type(inner).__name__}")
        budgets = uplink if isinstance(uplink, Mapping) else {"default": uplink}
        if not budgets:
            raise BadConfiguration("uplink needs at least one budget")
        if not 0 < quorum <= 1:
            raise BadConfiguration(f"quorum is a share of the replies, above 0 and at most 1, got {quorum}")
        if clip is not None and not clip > 0:
            raise BadConfiguration(f"clip is a norm, above zero, got {clip}")
        self.inner = inner
        self.budgets = {name: _compressor(c) for name, c in budgets.items()}
        self.downlink = _contraction(_compressor(downlink))
        self.snapshot = _compressor(snapshot)
        self.choose, self.accept, self.clip, self.max_weight = choose, accept, clip, max_weight
        self.dense, self.memory = tuple(dense), memory
        self.patience, self.quorum = patience, quorum
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.rounds: list[RoundReport] = []
        self.clients: dict[int, ClientRecord] = {}
        self.completed = 0  # rounds of training, those before a resumption included
        self._offered = {str(c): c for c in self.budgets.values()}
        self._key = (
            secrets.token_bytes(32) if seed is None else hashlib.blake2b(b"tersegrad" + str(seed).encode()).digest()[:32]
        )
        self._epoch = secrets.randbits(30) if seed is None else 1
        self._step = 0
        self._layout: Layout | None = None
        self._why: dict[str, str] = {}
        self._arrays = ArrayRecord()  # the exact model that was sent last
        self._flat: Tensor | None = None  # the same as a buffer
        self._target = 0  # its number
        self._versions: dict[int, Version] = {}  # least recently used first
        self._asked: dict[int, Question] = {}
        self._usual: dict[bool, Any] = {}  # the structure of replies, for training and evaluation
        self._grid: TimedGrid | None = None

    def __repr__(self) -> str:
        return f"CompressedStrategy({type(self.inner).__name__}, uplink={list(self._offered)}, downlink={str(self.downlink)!r})"

    # ---- Flower's interface

    def summary(self) -> None:
        """Log the configuration."""
        _log.info("\t├──> Compression:")
        _log.info("\t│\t├── Uplink: %s", ", ".join(self._offered))
        _log.info("\t│\t└── Downlink: %s, snapshots: %s", self.downlink, self.snapshot)
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation, as Flower's ``start`` does; also times the replies, which ``choose`` may use."""
        arrays = _ordinary(initial_arrays)
        self._grid = TimedGrid(grid, self.quorum, self.patience)
        return super().start(self._grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """The inner strategy's messages, with the model compressed for each client."""
        arrays = _ordinary(arrays)
        return self._send(
            list(self.inner.configure_train(server_round, arrays, config, grid)), server_round, arrays, train=True
        )

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """The inner strategy's messages, with the model compressed for each client."""
        arrays = _ordinary(arrays)
        return self._send(
            list(self.inner.configure_evaluate(server_round, arrays, config, grid)), server_round, arrays, train=False
        )

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the good replies, turn away the others, and let the inner strategy aggregate."""
        good = self._sift(server_round, replies, train=True)
        arrays, metrics = self.inner.aggregate_train(server_round, good)
        if arrays is not None and not all(bool(torch.isfinite(envelope.read_tensor(a)).all()) for a in arrays.values()):
            _log.warning("tersegrad: the aggregate of round %s is not finite; the model stays as it was", server_round)
            arrays = None
        self.completed += 1
        if self.checkpoint is not None and arrays is not None:
            self.save(self.checkpoint, arrays)
        return arrays, self._with_counts(metrics)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The same for evaluation."""
        return self.inner.aggregate_evaluate(server_round, self._sift(server_round, replies, train=False))

    # ---- broadcast

    def _send(self, messages: list[Message], server_round: int, arrays: ArrayRecord, train: bool) -> list[Message]:
        self._expire()
        if not messages:
            return messages
        layout = Layout.of(arrays, self.dense)
        if self._layout is not None and layout.same_model(self._layout):
            layout = self._layout
        else:
            self._layout, self._flat, self._versions = layout, None, {}
            self._why = {
                n: "name matches dense=" if "float" in arrays[n].dtype else "not floating-point" for n in layout.beside
            }
        flat = layout.flatten(arrays)
        if not bool(torch.isfinite(flat).all()):
            raise TersegradError("the global model is not finite: training has diverged, or the aggregation is wrong")
        if self._flat is None or not torch.equal(flat, self._flat):
            self._flat, self._target = flat, self._target + 1
        self._arrays = arrays
        self._step += 1
        shipped: dict[int | None, Shipment] = {}
        sent, parcels = [], {}
        beside = {name: arrays[name] for name in layout.beside}
        for message in messages:
            client = self._client(message.metadata.dst_node_id)
            held = client.version if client.version in self._versions else None
            if held not in shipped:
                shipped[held] = self._encode(held, len(shipped))
            parcel = shipped[held]
            order, allowed = self._order(client, parcel)
            data = order.pack(parcel.framed)
            if len(message.content.array_records) != 1:
                raise BadConfiguration(
                    f"{type(self.inner).__name__} sends {len(message.content.array_records)} ArrayRecords, not one"
                )
            (place,) = message.content.array_records
            ours = ArrayRecord({KEY: Array("uint8", (len(data),), envelope.MODEL, data), **beside})
            content = RecordDict({name: ours if name == place else record for name, record in message.content.items()})
            message.content = content
            nbytes = envelope.wire_nbytes(message)
            client.downlink += nbytes
            self._asked[client.node] = Question(order, allowed)
            parcels[client.node] = Parcel(client.node, parcel.kind, nbytes)
            sent.append(message)
        self._forget()
        self.rounds.append(RoundReport(server_round, self._step, train, parcels))
        return sent

    def _encode(self, held: int | None, number: int) -> Shipment:
        """The current model for clients that hold one version; a snapshot where a difference would be longer."""
        assert self._layout is not None
        assert self._flat is not None
        spec = self._layout.spec
        if held is not None:
            base = self._versions.pop(held)
            self._versions[held] = base  # used last
            if base.target == self._target:
                return Shipment("same", held, held, b"")
            framed, decoded = self._framed(self.downlink, self._flat - base.flat, envelope.DIFFERENCE, number)
            if len(framed) <= spec.numel // 2:
                return Shipment("difference", held, self._new(base.flat + decoded), framed)
            whole, model = self._framed(self.snapshot, self._flat, envelope.SNAPSHOT, number)
            if len(framed) <= len(whole):
                return Shipment("difference", held, self._new(base.flat + decoded), framed)
        else:
            whole, model = self._framed(self.snapshot, self._flat, envelope.SNAPSHOT, number)
        return Shipment("snapshot", None, self._new(model), whole)

    def _framed(self, compressor: Compressor[Any], x: Tensor, buffer: int, number: int) -> tuple[bytes, Tensor]:
        assert self._layout is not None
        spec = self._layout.spec
        context = Context(self._draw(b"broadcast", 0), self._step, buffer, number % SENDERS)
        message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), context)
        decoded = compressor.decode(message, spec, context)
        if not bool(torch.isfinite(decoded).all()):
            raise TersegradError(f"{compressor} turned a finite model into one that is not")
        return envelope.pack_frame(message, compressor, spec, context), decoded

    def _new(self, flat: Tensor) -> int:
        """A number for a version that clients are about to hold; never one that an earlier server gave."""
        number = (self._epoch << 32) + self._step * 0x10000 + len(self._versions) % 0x10000
        while number in self._versions:
            number += 1
        self._versions[number] = Version(flat, self._target)
        return number

    def _forget(self) -> None:
        """Drop versions that nobody holds, then the least recently used beyond the memory."""
        assert self._layout is not None
        held = {c.version for c in self.clients.values()} | {q.order.version for q in self._asked.values()}
        self._versions = {number: version for number, version in self._versions.items() if number in held}
        room = max(1, self.memory // (4 * max(1, self._layout.spec.numel)))
        asked = {q.order.version for q in self._asked.values()}
        for number in [n for n in self._versions if n not in asked][: max(0, len(self._versions) - room)]:
            del self._versions[number]

    def _order(self, client: ClientRecord, parcel: Shipment) -> tuple[Order, frozenset[str]]:
        assert self._layout is not None
        names = list(self.budgets)
        chosen = self.choose(client) if self.choose else names[0]
        if chosen not in self.budgets:
            raise BadConfiguration(f"choose returned {chosen!r}, the budgets are {names}")
        text = str(self.budgets[chosen])
        order = Order(
            step=self._step,
            seed=self._draw(b"client", client.node),
            sender=client.sender,
            version=parcel.version,
            base=parcel.base,
            uplink=text,
            fixed=self.choose is not None,
            budgets={} if self.choose or len(names) == 1 else {name: str(c) for name, c in self.budgets.items()},
            heard=client.heard,
            layout=self._layout.facts() if parcel.base is None else None,
        )
        return order, frozenset({text} if self.choose else self._offered)

    def _draw(self, purpose: bytes, node: int) -> int:
        """64 bits that nobody can guess who was not told."""
        text = purpose + self._step.to_bytes(8, "little") + node.to_bytes(16, "little", signed=True)
        return int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=8).digest(), "little")

    def _client(self, node: int) -> ClientRecord:
        if node not in self.clients:
            self.clients[node] = ClientRecord(node, len(self.clients) % SENDERS)
        return self.clients[node]

    def _expire(self) -> None:
        """Who was asked and did not answer may or may not have the new version: it will get a snapshot."""
        for node in self._asked:
            self.clients[node].version = None
        self._asked = {}

    # ---- replies

    def _sift(self, server_round: int, replies: Iterable[Message], train: bool) -> list[Message]:
        replies = list(replies)
        if not replies and not self._asked:  # the inner strategy asked nobody
            return []
        report = self.rounds[-1] if self.rounds else RoundReport(server_round, self._step, train, {})
        good: list[Message] = []
        answered: set[int] = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                self._take(reply, report, train, answered)
                good.append(reply)
            except Refused as refusal:
                self._refuse(report, node, refusal)
        good = self._alike(good, report, train)
        for reply in good:
            node = reply.metadata.src_node_id
            client, question = self.clients[node], self._asked.pop(node)
            client.version, client.seen = question.order.version, client.seen + 1
            parcel = report.parcels[node]
            if train:
                client.restarts += parcel.fresh and client.heard is not None
                client.heard, client.compressor = question.order.step, parcel.compressor
            report.parcels[node] = dataclasses.replace(parcel, outcome="accepted")
        self._expire()
        fresh = sum(p.fresh for p in report.parcels.values())
        _log.info(
            "tersegrad: %d replies used, %d turned away, %d silent; %d bytes up, %d bytes down; %d residuals began at zero",
            len(good), len(report.rejections), sum(p.outcome == "silent" for p in report.parcels.values()),
            report.uplink, report.downlink, fresh,
        )  # fmt: skip
        return good

    def _take(self, reply: Message, report: RoundReport, train: bool, answered: set[int]) -> None:
        """Check one reply and, in training, put the decoded model into it; raises :class:`Refused`."""
        node = reply.metadata.src_node_id
        question = self._asked.get(node)
        if question is None and reply.has_error():  # Flower's own, for instance about a node that is gone
            raise Refused("error", reply.error.reason or f"error {reply.error.code}")
        if question is None:
            raise Refused("unasked", "this node was not asked in this round")
        if node in answered:
            raise Refused("duplicate", "this node has answered already")
        nbytes = envelope.wire_nbytes(reply)
        client = self.clients[node]
        client.uplink += nbytes
        report.parcels[node] = dataclasses.replace(report.parcels[node], uplink=nbytes)
        if reply.has_error():
            raise Refused("error", reply.error.reason or f"the client reports error {reply.error.code}")
        self._check_metrics(reply.content)
        if train:
            self._decode(reply, question, report)
        answered.add(node)
        seconds = self._grid.seconds(reply) if self._grid else None
        if seconds is not None:
            parcel = report.parcels[node]
            client.timed(parcel.uplink + parcel.downlink, seconds - parcel.seconds)

    def _decode(self, reply: Message, question: Question, report: RoundReport) -> None:
        assert self._layout is not None
        spec, node = self._layout.spec, reply.metadata.src_node_id
        if len(reply.content.array_records) != 1:
            raise Refused("no-update", f"a reply has one ArrayRecord, this one {len(reply.content.array_records)}")
        (place,) = reply.content.array_records
        record = reply.content.array_records[place]
        array = record.get(KEY)
        if array is None or array.stype != envelope.UPDATE:
            raise Refused("no-update", "no update of ours in the reply: does the client's app use compress_mod?")
        try:
            beside = self._layout.check_beside(record, (KEY,))
            answer, framed = Answer.unpack(array.data)
            compressor, opened = self._open(framed, question)
            decoded = compressor.decode(opened.message, spec, opened.context)
        except CorruptMessage as error:
            raise Refused("corrupt", str(error)) from error
        except (BadConfiguration, ArithmeticError, RuntimeError, ValueError, IndexError, TypeError, MemoryError) as error:
            raise Refused("corrupt", f"the update cannot be decoded: {error}") from error
        if not bool(torch.isfinite(decoded).all()):
            raise Refused("non-finite", "the update is not finite")
        if self.clip is not None:
            norm = float(decoded.double().norm())
            if norm > self.clip:
                decoded = decoded * (self.clip / norm * (1 - 2**-22))  # float32 rounding must not lift it above the bound
        model = self._added(decoded, beside)
        if not all(np.isfinite(a).all() for a in model.values()):
            raise Refused("non-finite", "model plus update overflow")
        reply.content[place] = ArrayRecord({name: Array(a) for name, a in model.items()})
        report.parcels[node] = dataclasses.replace(
            report.parcels[node], frame=len(framed), compressor=opened.text, seconds=answer.seconds, fresh=answer.fresh
        )

    def _open(self, framed: bytes, question: Question) -> tuple[Compressor[Any], frame.Frame]:
        """The frame, if it is the answer to the question; nothing is decoded yet, nothing allocated beyond the reply itself."""
        assert self._layout is not None
        spec, order = self._layout.spec, question.order
        longest = max(envelope.max_frame(c, spec) for c in self._offered.values())
        if len(framed) > (longest if self.accept is None else max(longest, 8 * spec.numel + 4096)):
            raise Refused("oversized", f"{len(framed)} bytes for a model of {spec.numel} parameters")
        if framed[:4] == frame.MAGIC and framed[4:5] not in (b"", bytes([frame.VERSION])):
            raise Refused("wrong-version", f"frame version {framed[4]}, this release reads version {frame.VERSION}")
        opened = frame.unpack(framed)
        if (opened.numel, opened.dtype) != (spec.numel, spec.dtype):
            raise Refused(
                "wrong-shape", f"{opened.numel} coordinates of {opened.dtype}, the model has {spec.numel} of {spec.dtype}"
            )
        if opened.context != Context(order.seed, order.step, envelope.UP, order.sender):
            raise Refused(
                "replayed",
                f"it answers step {opened.context.step} as sender {opened.context.sender}, or with another seed; "
                f"asked was step {order.step} of sender {order.sender}",
            )
        compressor = self._offered.get(opened.text) if opened.text in question.allowed else None
        if compressor is None and self.accept is not None and self.choose is None:
            try:
                wished = parse(opened.text)
                compressor = wished if self.accept(wished) else None
            except BadConfiguration as error:
                raise Refused("not-offered", f"the compressor {opened.text[:80]!r} is not understood: {error}") from error
        if compressor is None:
            raise Refused("not-offered", f"the compressor {opened.text[:80]!r} is not offered to this client")
        envelope.check_frame(opened, spec, compressor)
        if len(opened.payload) > compressor.max_nbytes(spec):
            raise Refused(
                "oversized", f"{len(opened.payload)} bytes, {compressor} never sends more than {compressor.max_nbytes(spec)}"
            )
        return compressor, opened

    def _added(self, update: Tensor, beside: Mapping[str, Array]) -> dict[str, np.ndarray[Any, Any]]:
        """The exact model plus an update, as arrays of the model's dtypes."""
        assert self._layout is not None
        model, at = {}, 0
        with np.errstate(over="ignore"):
            for name, shape, packed in zip(self._layout.names, self._layout.shapes, self._layout.packed):
                if packed:
                    size = math.prod(shape)
                    exact = self._arrays[name].numpy()
                    model[name] = (exact + update[at : at + size].reshape(shape).numpy()).astype(exact.dtype, copy=False)
                    at += size
                else:
                    model[name] = envelope.read_tensor(beside[name]).numpy()
        return {name: np.asarray(a) for name, a in model.items()}

    def _check_metrics(self, content: RecordDict) -> None:
        """Flower's strategies give up the whole round for one reply with odd metrics; so such a reply is turned away here."""
        if len(content.metric_records) != 1:
            raise Refused("metrics", f"a reply has one MetricRecord, this one {len(content.metric_records)}")
        (metrics,) = content.metric_records.values()
        for name, value in metrics.items():
            if not all(_finite(v) for v in (value if isinstance(value, list) else [value])):
                raise Refused("metrics", f"{name} is not finite")
        key = _weight_key(self.inner)
        weight = 1.0 if key is None else metrics.get(key)
        if not isinstance(weight, (int, float)) or not weight > 0:
            raise Refused("metrics", f"{key} must be a number above zero, got {weight!r}")
        if self.max_weight is not None and weight > self.max_weight:
            raise Refused("metrics", f"{key} is {weight}, at most {self.max_weight} is believed")

    def _alike(self, replies: list[Message], report: RoundReport, train: bool) -> list[Message]:
        """The replies whose records and metrics have the commonest structure: Flower's strategies take nothing else."""

        def structure(reply: Message) -> Any:
            metrics = {
                record: sorted((k, len(v) if isinstance(v, list) else -1) for k, v in values.items())
                for record, values in reply.content.metric_records.items()
            }
            return (tuple(reply.content.array_records) if train else (), str(metrics))

        counted = Counter(structure(reply) for reply in replies)
        if not counted:
            return replies
        usual = self._usual.get(train)  # what was used before outvotes any number of newcomers
        common = usual if usual in counted else counted.most_common(1)[0][0]
        self._usual[train] = common
        for reply in replies:
            if structure(reply) != common:
                self._refuse(
                    report, reply.metadata.src_node_id, Refused("metrics", "its records or metrics differ from the others'")
                )
        return [reply for reply in replies if structure(reply) == common]

    def _refuse(self, report: RoundReport, node: int, refusal: Refused) -> None:
        report.rejections.append(Rejection(report.round, node, refusal.kind, str(refusal)))
        if node in self.clients:
            self.clients[node].rejected += 1
        if node in report.parcels and refusal.kind not in ("unasked", "duplicate"):
            report.parcels[node] = dataclasses.replace(report.parcels[node], outcome=refusal.kind)
        _log.warning("tersegrad: reply of node %s turned away (%s): %s", node, refusal.kind, str(refusal)[:300])

    # ---- reports and restarts

    def _with_counts(self, metrics: MetricRecord | None) -> MetricRecord:
        """The round's bytes among the aggregated metrics, so that they stand in Flower's result."""
        found = MetricRecord() if metrics is None else metrics
        if self.rounds:
            report = self.rounds[-1]
            found["uplink-bytes"], found["downlink-bytes"] = report.uplink, report.downlink
            found["updates-used"], found["updates-rejected"] = report.accepted, len(report.rejections)
        return found

    def report(self) -> dict[str, Any]:
        """Totals so far; ``rounds`` has every client and round, ``clients`` what is known of each client."""
        return summary(self.rounds, self.clients, self._layout.spec.numel if self._layout else 0)

    @property
    def rejections(self) -> list[Rejection]:
        """Every reply that was turned away, with its reason."""
        return [rejection for report in self.rounds for rejection in report.rejections]

    def uncompressed(self) -> dict[str, str]:
        """The arrays that are sent as they are, and why."""
        return dict(self._why)

    def save(self, path: str | Path, arrays: ArrayRecord) -> None:
        """Write the model, the number of completed rounds and the arrays that the inner strategy keeps (momenta)."""
        blobs = {f"model/{name}": envelope.read_tensor(a).numpy() for name, a in arrays.items()}
        for level, strategy in enumerate(_nested(self.inner)):
            for attribute, value in vars(strategy).items():
                kept = value if isinstance(value, dict) and attribute != "current_arrays" else {}
                if all(isinstance(v, np.ndarray) for v in kept.values()):
                    blobs |= {f"inner/{level}/{attribute}/{name}": v for name, v in kept.items()}
        facts = json.dumps({"completed": self.completed, "step": self._step}).encode()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.new.npz")
        np.savez(beside, facts=np.frombuffer(facts, dtype=np.uint8), **blobs)  # type: ignore[arg-type]  # names are arguments
        beside.replace(path)

    def resume(self, path: str | Path) -> ArrayRecord:
        """Read what :meth:`save` wrote; returns the model to ``start`` with. Clients get a snapshot, as newcomers do."""
        with np.load(path, allow_pickle=False) as saved:
            facts = json.loads(saved["facts"].tobytes())
            model = {name[6:]: saved[name] for name in saved.files if name.startswith("model/")}
            for level, strategy in enumerate(_nested(self.inner)):
                kept: dict[str, dict[str, Any]] = {}
                for name in saved.files:
                    if name.startswith(f"inner/{level}/"):
                        _, _, attribute, key = name.split("/", 3)
                        kept.setdefault(attribute, {})[key] = saved[name]
                for attribute, value in kept.items():
                    setattr(strategy, attribute, value)
        self.completed, self._step = facts["completed"], facts["step"]
        return ArrayRecord({name: Array(a) for name, a in model.items()})


def _compressor(compressor: Compressor[Any] | str) -> Compressor[Any]:
    return parse(compressor) if isinstance(compressor, str) else compressor


def _contraction(compressor: Compressor[Any]) -> Compressor[Any]:
    """The compressor for differences: contractive as it is, or made so; differences are error feedback already."""
    if isinstance(compressor, ErrorFeedback):
        raise BadConfiguration(
            f"downlink={compressor}: differences to what clients hold feed errors back already, use {compressor.inner}"
        )
    promise = compressor.guarantee(Spec.flat(4096))
    if promise.kind == "unbiased" and promise.value > 0:
        return ErrorFeedback(compressor)  # with a fresh state it scales by 1/(1+omega), which is a contraction
    if promise.kind == "none":
        raise BadConfiguration(f"downlink={compressor} promises nothing, so clients might drift away from the model")
    return compressor


def _ordinary(arrays: ArrayRecord) -> ArrayRecord:
    """16-bit floating-point arrays as float32: sums of small updates must not be rounded away."""
    if not any(a.dtype in ("float16", "bfloat16") for a in arrays.values()):
        return arrays
    half = ("float16", "bfloat16")
    return ArrayRecord({n: Array(envelope.read_tensor(a).float().numpy()) if a.dtype in half else a for n, a in arrays.items()})


def _nested(strategy: Any) -> list[Any]:
    """A strategy and those it wraps (differential privacy)."""
    found = [strategy]
    while isinstance(inner := getattr(found[-1], "strategy", None), Strategy):
        found.append(inner)
    return found


def _weight_key(strategy: Any) -> str | None:
    return next((s.weighted_by_key for s in _nested(strategy) if hasattr(s, "weighted_by_key")), None)


def _finite(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False
