"""Grids: many clients in one process, and a clock around any grid.

:class:`LocalGrid` runs a real ``ClientApp`` for every node, one after another, through the real serialisation: each message becomes
bytes, is counted, and is read back, as between SuperLink and SuperNode. No Ray, no sockets, nothing leaves the process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from tersegrad.core.errors import BadConfiguration

RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
RUN = 1  # the run's number, where no SuperLink gives one

Deliver = Callable[[Message], Iterable[Message]]


class LocalGrid(Grid):
    """Clients in this process. ``nodes``: how many, or their ``node_config`` by node id.

    ``deliver`` stands for the network on the way back: it gets each reply and returns those that arrive (tests put in what an
    attacker would). ``bytes_down`` and ``bytes_up`` count whole serialised messages. ``restart`` forgets a client's state.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Mapping[int, Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        configs = {n: {"partition-id": n, "num-partitions": nodes} for n in range(nodes)} if isinstance(nodes, int) else nodes
        if not configs:
            raise BadConfiguration("a federation has at least one node")
        self.app, self.deliver = app, deliver
        run = dict(run_config or {})
        self.contexts = {node: Context(RUN, node, dict(config), RecordDict(), run) for node, config in configs.items()}
        self.bytes_up = self.bytes_down = 0
        self._replies: dict[str, list[Message]] = {}
        # Flower's own processes set this; here there is only ours.
        if TaskIdentity._run_id is None:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1 << 62, 0

    def restart(self, node: int) -> None:
        """What a restart of a SuperNode does: its memory is empty."""
        self.contexts[node].state = RecordDict()

    def set_run(self, run: Any) -> None:
        """There is only one run."""

    @property
    def run(self) -> Any:
        """There is only one run."""
        return RUN

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's deprecated way to make a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes; they are always connected."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients at once; the replies wait for :meth:`pull_messages`."""
        ids = []
        for message in messages:
            arrived, nbytes = _carried(message)
            self.bytes_down += nbytes
            context = self.contexts[message.metadata.dst_node_id]
            try:
                reply = self.app(arrived, context)
            except Exception as error:  # Flower answers any exception of an app like this
                reply = Message(Error(RAISED, f"{type(error)}:<{str(error)!r}>"), reply_to=arrived)
            waiting = []
            for delivered in [reply] if self.deliver is None else self.deliver(reply):
                back, nbytes = _carried(delivered)
                self.bytes_up += nbytes
                waiting.append(back)
            ids.append(arrived.metadata.message_id)
            self._replies[ids[-1]] = waiting
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages."""
        return [reply for name in message_ids for reply in self._replies.pop(name, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run the clients and return their replies."""
        return self.pull_messages(list(self.push_messages(messages)))


def _carried(message: Message) -> tuple[Message, int]:
    """A message after a trip through bytes, and how many there were."""
    name = message.object_id
    contents = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    nbytes = sum(map(len, contents.values()))
    arrived = cast(Message, inflate_object_from_contents(name, contents))
    # As Flower's own grid does: the id is not part of what it names.
    arrived.metadata.__dict__["_message_id"] = name
    return arrived, nbytes


class TimedGrid(Grid):
    """Another grid, with a note of when each reply came in; asks often at first, then every three seconds as Flower does.

    Once the share ``quorum`` of the replies is there, it waits ``patience`` seconds for the others.
    """

    def __init__(self, grid: Grid, quorum: float = 1.0, patience: float | None = None) -> None:
        self.grid, self.quorum, self.patience = grid, quorum, patience
        self._took: dict[str, float] = {}  # by the message that was answered

    def seconds(self, reply: Message) -> float | None:
        """From sending the question to having the reply."""
        return self._took.pop(reply.metadata.reply_to_message_id, None)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, then ask for replies until all are there or the time is over."""
        self._took.clear()
        began = time.monotonic()
        waiting = {name for name in self.grid.push_messages(messages) if name}
        found: list[Message] = []
        asked, pause, end = len(waiting), 0.1, math.inf if timeout is None else began + timeout
        while waiting:
            arrived = list(self.grid.pull_messages(waiting))
            now = time.monotonic()
            for reply in arrived:
                self._took[reply.metadata.reply_to_message_id] = now - began
                waiting.discard(reply.metadata.reply_to_message_id)
            found += arrived
            if arrived and self.patience is not None and len(found) >= self.quorum * asked:
                end, pause = min(end, now + self.patience), 0.1
            if isinstance(self.grid, LocalGrid) or now >= end:
                break
            if waiting:
                time.sleep(min(pause, max(0.0, end - now)))
                pause = min(1.5 * pause, 3.0)
        return found

    def set_run(self, run: Any) -> None:
        """As the grid inside."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid inside."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As the grid inside."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """As the grid inside."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """As the grid inside."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid inside."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid inside."""
        return self.grid.pull_messages(message_ids)
