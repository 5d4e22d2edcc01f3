"""The server's side: a strategy around any of Flower's that broadcasts compressed models and decodes compressed updates.

:class:`~tersegrad.integrations.flower.broadcast.Broadcast` makes the models that go out, :class:`~.gate.Gate` lets replies in,
:class:`~.conversation.Conversation` keeps the two in step, and the strategy inside samples clients and aggregates. Updates are added
to the exact model, not to a client's version of it, so rounding of the broadcast never enters the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from tersegrad.advice import FEDERATED
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.integrations.flower import envelope, strategies
from tersegrad.integrations.flower.broadcast import Broadcast, ordinary
from tersegrad.integrations.flower.checkpoint import Checkpoint
from tersegrad.integrations.flower.conversation import Conversation
from tersegrad.integrations.flower.envelope import usable
from tersegrad.integrations.flower.gate import Gate
from tersegrad.integrations.flower.ledger import ClientRecord, Ledger, Rejection, RoundReport
from tersegrad.integrations.flower.local import TimedGrid

_log = logging.getLogger("flwr")


class CompressedStrategy(Strategy):
    """Any Flower strategy with compressed messages; the clients run ``compress_mod``.

    - ``inner``: the strategy that samples clients and aggregates; it sees ordinary models.
    - ``uplink``: the compressor of updates, or a dict of *budgets* by name, of which clients take one (the first by default).
    - ``downlink``: the compressor of differences between models; needs a guarantee.
    - ``snapshot``: the compressor of whole models.
    - ``choose``: a function of a :class:`ClientRecord` that names the client's budget, e.g. :func:`by_bandwidth`.
    - ``accept``: also take updates of compressors that this function approves; by default only those in ``uplink``.
    - ``clip``: scale decoded updates down to this Euclidean norm: what differential privacy and a bound on any one client need.
    - ``clip_beside``: the same for the arrays beside the update, as differences to the server's; by default as ``clip``.
    - ``max_weight``: refuse replies that claim a larger weight (``num-examples``).
    - ``max_extra``: bytes of metrics and other records that a reply may carry beside the model's arrays.
    - ``beside``: name patterns of arrays that travel uncompressed beside the update (running statistics, by default); integers always do.
    - ``patience``, ``quorum``: once this share of a round's replies is there, wait only so many seconds for the others.
    - ``memory``: bytes for the versions that clients hold; the least recently used are forgotten beyond it.
    - ``history``: how many rounds are kept in full in ``rounds``; totals are those of all rounds.
    - ``seed``: makes the randomness of messages reproducible; by default it is secret and fresh. For experiments: clients cannot tell
      two runs with the same seed apart, so they must not share a ``store=``.
    - ``checkpoint``: a file that is rewritten after every round; :meth:`resume` reads it.
    - ``keep``: attributes of a strategy that is not Flower's own which a checkpoint must hold.
    """

    def __init__(
        self,
        inner: Strategy,
        uplink: Compressor[Any] | str | Mapping[str, Compressor[Any] | str] = FEDERATED,
        downlink: Compressor[Any] | str = "sparse_dithering(alpha=0.1)",
        *,
        snapshot: Compressor[Any] | str = "sparse_dithering(bits=3.9)",
        choose: Callable[[ClientRecord], str] | None = None,
        accept: Callable[[Compressor[Any]], bool] | None = None,
        clip: float | None = None,
        clip_beside: float | None = None,
        max_weight: float = 2.0**31,
        max_extra: int = 1 << 18,
        beside: Sequence[str] = envelope.RUNNING,
        patience: float | None = None,
        quorum: float = 0.5,
        memory: int = 2 << 30,
        history: int = 100,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        keep: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise BadConfiguration(f"CompressedStrategy wraps a flwr.serverapp.strategy.Strategy, got {type(inner).__name__}")
        budgets = uplink if isinstance(uplink, Mapping) else {"default": uplink}
        if not budgets:
            raise BadConfiguration("uplink needs at least one budget")
        if not 0 < quorum <= 1:
            raise BadConfiguration(f"quorum is a share of the replies, above 0 and at most 1, got {quorum}")
        compressors = {name: usable(c) for name, c in budgets.items()}
        offered = {str(c): c for c in compressors.values()}
        self.inner, self.patience, self.quorum, self.keep = inner, patience, quorum, keep
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.broadcast = Broadcast(usable(downlink), usable(snapshot), beside, memory, seed)
        self.gate = Gate(offered, accept, clip, clip_beside, max_weight, max_extra, strategies.weight_key(inner))
        self.ledger, needed = Ledger(history), strategies.metrics_read(inner)
        self.conversation = Conversation(self.broadcast, self.gate, self.ledger, compressors, choose, needed)
        self.completed = 0  # rounds of training, those before a resumption included
        self._grid: TimedGrid | None = None

    def __repr__(self) -> str:
        texts = list(self.gate.offered)
        return f"CompressedStrategy({type(self.inner).__name__}, uplink={texts}, downlink={str(self.broadcast.downlink)!r})"

    # ---- Flower's interface

    def summary(self) -> None:
        """Log the configuration."""
        _log.info("\t├──> Compression:")
        _log.info("\t│\t├── Uplink: %s", ", ".join(self.gate.offered))
        _log.info("\t│\t└── Downlink: %s, snapshots: %s", self.broadcast.downlink, self.broadcast.snapshot)
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
        self._grid = TimedGrid(grid, self.quorum, self.patience)
        arrays = ordinary(initial_arrays)
        return super().start(self._grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """The inner strategy's messages, with the model compressed for each client."""
        arrays = ordinary(arrays)
        messages = self.inner.configure_train(server_round, arrays, config, grid)
        return self.conversation.ask(messages, server_round, arrays, train=True)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """The inner strategy's messages, with the model compressed for each client."""
        arrays = ordinary(arrays)
        messages = self.inner.configure_evaluate(server_round, arrays, config, grid)
        return self.conversation.ask(messages, server_round, arrays, train=False)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the good replies, turn away the others, and let the inner strategy aggregate."""
        report, good = self._hear(server_round, replies, train=True)
        arrays, metrics = self.inner.aggregate_train(server_round, good)
        if arrays is not None and self.broadcast.model is not None:
            arrays = self.broadcast.model.like(arrays)
            if arrays is None:
                _log.warning("tersegrad: the aggregate of round %s is not finite; the model stays as it was", server_round)
        self.completed += 1
        if self.checkpoint is not None and arrays is not None:
            self.save(self.checkpoint, arrays)
        metrics = MetricRecord() if metrics is None else metrics
        metrics["uplink-bytes"], metrics["downlink-bytes"] = report.uplink, report.downlink
        metrics["updates-used"], metrics["updates-rejected"] = report.accepted, len(report.rejections)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The same for evaluation."""
        return self.inner.aggregate_evaluate(server_round, self._hear(server_round, replies, train=False)[1])

    def _hear(self, server_round: int, replies: Iterable[Message], train: bool) -> tuple[RoundReport, list[Message]]:
        timed = {} if self._grid is None else {"seconds": self._grid.seconds}
        return self.conversation.hear(replies, server_round, train, **timed)

    # ---- reports and restarts

    @property
    def clients(self) -> dict[int, ClientRecord]:
        """What is known of each client, by node."""
        return self.conversation.clients

    @property
    def rounds(self) -> list[RoundReport]:
        """The last rounds in full: every client, its bytes and what became of its reply."""
        return self.ledger.rounds

    @property
    def rejections(self) -> list[Rejection]:
        """Every reply that was turned away in these rounds, with its reason."""
        return [rejection for report in self.rounds for rejection in report.rejections]

    def report(self) -> dict[str, Any]:
        """Totals of all rounds; ``rounds`` has the last ones in full, ``clients`` what is known of each client."""
        return self.ledger.summary(self.clients, self.broadcast.model.layout.spec.numel if self.broadcast.model else 0)

    def uncompressed(self) -> dict[str, str]:
        """The arrays that are sent as they are, and why."""
        return self.broadcast.uncompressed()

    def save(self, path: str | Path, arrays: ArrayRecord) -> None:
        """Write the model, the number of completed rounds, what the inner strategy keeps (momenta) and what clients were heard."""
        model = {name: envelope.read_tensor(a).numpy() for name, a in arrays.items()}
        clients = {c.node: (c.sender, c.heard) for c in self.clients.values()}
        kept = strategies.kept(self.inner, self.keep)
        Checkpoint(model, self.completed, self.broadcast.step, self.broadcast.epoch, clients, kept).write(Path(path))

    def resume(self, path: str | Path) -> ArrayRecord:
        """Read what :meth:`save` wrote; returns the model to ``start`` with. Clients get a snapshot, as newcomers do."""
        saved = Checkpoint.read(Path(path))
        strategies.check(self.inner, saved.inner, self.keep)
        strategies.restore(self.inner, saved.inner)
        self.completed, self.broadcast.step, self.broadcast.epoch = saved.completed, saved.step, saved.epoch
        for node, (sender, heard) in saved.clients.items():
            self.clients[node] = ClientRecord(node, sender, heard=heard)
        return ArrayRecord({name: Array(value) for name, value in saved.model.items()})
