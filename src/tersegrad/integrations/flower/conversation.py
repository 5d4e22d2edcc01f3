"""Questions to clients and what becomes of the replies: who was asked, who answered, what it cost.

One round is :meth:`Conversation.ask`, then :meth:`Conversation.hear`. What goes out is the
:class:`~tersegrad.integrations.flower.broadcast.Broadcast`'s work, what may come in the :class:`~.gate.Gate`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.integrations.flower import envelope, sizes
from tersegrad.integrations.flower.broadcast import SENDERS, Broadcast, Model, Shipment
from tersegrad.integrations.flower.envelope import KEY, Order
from tersegrad.integrations.flower.gate import Gate, Question, Refused, agree
from tersegrad.integrations.flower.ledger import ClientRecord, Ledger, Parcel, Rejection, RoundReport

_log = logging.getLogger("flwr")

Seconds = Callable[[Message], float | None]


class Conversation:
    """What the server says to its clients and hears from them.

    ``budgets`` are the compressors of updates by name; ``choose`` names a client's. ``needed`` are metrics that training replies
    must have beside the weight, with the largest value of each.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        gate: Gate,
        ledger: Ledger,
        budgets: Mapping[str, Compressor[Any]],
        choose: Callable[[ClientRecord], str] | None = None,
        needed: Mapping[str, float] | None = None,
    ) -> None:
        self.broadcast, self.gate, self.ledger = broadcast, gate, ledger
        self.budgets, self.choose, self.needed = budgets, choose, dict(needed or {})
        self.clients: dict[int, ClientRecord] = {}
        self._asked: dict[int, Question] = {}
        # The round that waits for replies; None where nobody was asked.
        self._round: RoundReport | None = None

    def ask(self, messages: Iterable[Message], server_round: int, arrays: ArrayRecord, train: bool) -> list[Message]:
        """The inner strategy's messages, with the model compressed for each client."""
        messages = list(messages)
        self._expire()
        if not messages:
            return messages
        model = self.broadcast.begin(arrays)
        report = self._round = RoundReport(server_round, self.broadcast.step, train, {})
        for message in messages:
            node = message.metadata.dst_node_id
            client = self.clients.setdefault(node, ClientRecord(node, len(self.clients) % SENDERS))
            shipment = self.broadcast.shipment(client.version)
            question = self._asked[node] = self._question(client, shipment, model)
            message.content = self._content(message.content, question.order.pack(shipment.framed), model)
            nbytes = sizes.wire_nbytes(message)
            client.downlink += nbytes
            report.parcels[node] = Parcel(node, shipment.kind, nbytes)
        self.broadcast.forget({c.version for c in self.clients.values()}, {q.order.version for q in self._asked.values()})
        self.ledger.add(report)
        return messages

    @staticmethod
    def _content(content: RecordDict, data: bytes, model: Model) -> RecordDict:
        """The inner strategy's records, with ours in place of the model."""
        if len(content.array_records) != 1:
            raise BadConfiguration(f"the strategy inside sends {len(content.array_records)} ArrayRecords in a message, not one")
        (place,) = content.array_records
        ours = ArrayRecord({KEY: Array("uint8", (len(data),), envelope.MODEL, data), **model.beside})
        return RecordDict({name: ours if name == place else record for name, record in content.items()})

    def _question(self, client: ClientRecord, shipment: Shipment, model: Model) -> Question:
        names = list(self.budgets)
        chosen = self.choose(client) if self.choose else names[0]
        if chosen not in self.budgets:
            raise BadConfiguration(f"choose returned {chosen!r}, the budgets are {names}")
        text = str(self.budgets[chosen])
        order = Order(
            step=self.broadcast.step,
            seed=self.broadcast.draw(b"client", client.node),
            sender=client.sender,
            version=shipment.version,
            base=shipment.base,
            uplink=text,
            fixed=self.choose is not None,
            budgets={} if self.choose or len(names) == 1 else {name: str(c) for name, c in self.budgets.items()},
            heard=client.heard,
            layout=model.layout.facts() if shipment.base is None else None,
        )
        return Question(order, frozenset({text} if self.choose else self.gate.offered))

    def _expire(self) -> None:
        """Who was asked and did not answer may or may not have the new version: it will get a snapshot."""
        for node in self._asked:
            self.clients[node].version = None
        self._asked, self._round = {}, None

    def hear(
        self, replies: Iterable[Message], server_round: int, train: bool, seconds: Seconds = lambda reply: None
    ) -> tuple[RoundReport, list[Message]]:
        """The round's report and the replies to use, with ordinary models in them; ``seconds`` tells how long one took."""
        report = self._round or RoundReport(server_round, self.broadcast.step, train, {})
        taken: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node in taken:
                    raise Refused("duplicate", "this node has answered already")
                self._take(reply, report, train, seconds)
                taken[node] = reply
            except Refused as refusal:
                self._refuse(report, node, refusal)
        good, odd = agree({node: reply.content for node, reply in taken.items()}, train)
        for node, difference in odd.items():
            self._refuse(report, node, difference)
        for node, content in good.items():
            taken[node].content = content
            self._used(self.clients[node], report, train)
        if self._round is None and report.rejections:
            self.ledger.add(report)  # strangers, though nobody was asked
        self._expire()
        _log.info(
            "tersegrad: %d replies used, %d turned away, %d silent; %d bytes up, %d bytes down; %d residuals began at zero",
            len(good), len(report.rejections), sum(p.outcome == "silent" for p in report.parcels.values()),
            report.uplink, report.downlink, sum(p.fresh for p in report.parcels.values()),
        )  # fmt: skip
        return report, [taken[node] for node in good]

    def _take(self, reply: Message, report: RoundReport, train: bool, seconds: Seconds) -> None:
        """Check one reply and, in training, put the decoded model into it; raises :class:`Refused`."""
        node, model = reply.metadata.src_node_id, self.broadcast.model
        question = self._asked.get(node)
        # An error about a node that was not asked is Flower's own, for instance that it is gone.
        if (question is None or model is None) and not reply.has_error():
            raise Refused("unasked", "this node was not asked in this round")
        if question is None or model is None:
            raise Refused("error", reply.error.reason or f"error {reply.error.code}")
        nbytes, oversized = self.gate.measure(reply, model)
        client = self.clients[node]
        client.uplink += nbytes
        report.note(node, uplink=nbytes)
        if reply.has_error():
            raise Refused("error", reply.error.reason or f"the client reports error {reply.error.code}")
        if oversized is not None:
            raise oversized
        self.gate.check_metrics(reply.content, self.needed if train else {})
        if train:
            update = self.gate.take(reply.content, question, model)
            (place,) = reply.content.array_records
            reply.content[place] = ArrayRecord({name: Array(value) for name, value in update.model.items()})
            answer = update.answer
            report.note(node, frame=update.nbytes, compressor=update.compressor, seconds=answer.seconds, fresh=answer.fresh)
        if (took := seconds(reply)) is not None:
            parcel = report.parcels[node]
            client.timed(parcel.uplink + parcel.downlink, took - parcel.seconds)

    def _used(self, client: ClientRecord, report: RoundReport, train: bool) -> None:
        order = self._asked.pop(client.node).order
        parcel = report.note(client.node, outcome="accepted")
        client.version, client.seen = order.version, client.seen + 1
        if train:
            client.restarts += parcel.fresh and client.heard is not None
            client.heard, client.compressor = order.step, parcel.compressor

    def _refuse(self, report: RoundReport, node: int, refusal: Refused) -> None:
        report.rejections.append(Rejection(report.round, node, refusal.kind, str(refusal)))
        if node in self.clients:
            self.clients[node].rejected += 1
        if node in report.parcels and refusal.kind not in ("unasked", "duplicate"):
            report.note(node, outcome=refusal.kind)
        _log.warning("tersegrad: reply of node %s turned away (%s): %s", node, refusal.kind, refusal)
