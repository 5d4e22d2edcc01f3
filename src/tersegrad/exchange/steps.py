"""Exchanges as steps: an exchange is a generator that yields the collectives it needs and receives their results.

Written once, run by two drivers: :class:`ProcessGroup` hands the collectives to torch.distributed (gloo or NCCL), and
``exchange/virtual.py`` runs n generators in lockstep inside one process. Both move the same bytes. Compressed exchanges use two
collectives, both on uint8 buffers; the third is torch's own all-reduce, for what is not compressed. All are available everywhere.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.core import buffers, host
from tersegrad.core.protocol import Context, Message, Spec, Stats, lengths

R = TypeVar("R")
TAG = 0x7465  # of our transfers between two ranks, so that they never meet a program's own
SHORT = 1 << 15  # bytes of a message that fits into a connection's buffers, so that nothing waits behind it


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Every rank contributes ``data`` (uint8, the same length everywhere) and receives all of them, in rank order."""

    data: Tensor


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Bytes for every rank, laid one after another (``send`` says how many for each), against ``receive`` bytes from each."""

    data: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    intra_node: bool = False  # these bytes stay within a node, and are counted apart


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """The library's own sum over ranks of ``data``, in its dtype; ``data`` becomes the sum."""

    data: Tensor

    def sent(self, size: int) -> int:
        """Bytes that leave a rank in a ring."""
        return 2 * (size - 1) * self.data.numel() * self.data.element_size() // size


Collective = AllGather | AllToAll | AllReduce
Steps = Generator[Collective, Tensor, tuple[Tensor, R]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an exchange's state: what one round's compressor keeps for coordinates start .. stop of the buffer.

    ``holders``: how many ranks keep such a part for these coordinates. The mean gets 1/holders of what each of them carries.
    """

    round: str
    start: int
    stop: int
    holders: int
    state: Any


class Exchange(Protocol[R]):
    """Turns every rank's vector into the mean over ranks; all that an integration sees.

    ``steps`` is what an exchange writes; :func:`start` runs it on a process group and ``virtual.run`` in one process.
    """

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> R:
        """The state of one rank in a group of ``size``."""
        ...

    def steps(
        self,
        x: Tensor,
        state: R,
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[R]:
        """The mean over ranks (float32, the same bits on every rank) and the next state. ``ctx.sender`` is set to the rank.

        ``into``: flat float32 memory that the mean may lie in, ``x`` itself if nobody needs it any more; an exchange may take other memory.
        """
        ...

    def parts(self, state: R, spec: Spec, rank: int, size: int) -> list[Part]:
        """The state by coordinates, so that a checkpoint can cut it by parameter and another world size can average it."""
        ...

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> R:
        """The inverse of :meth:`parts`: a state from compressor states in the same order."""
        ...


class Pending(Generic[R]):
    """An exchange under way. Collectives of several exchanges must be advanced in the same order on every rank."""

    def __init__(self, steps: Steps[R], group: ProcessGroup) -> None:
        self._steps, self._group = steps, group
        self._result: tuple[Tensor, R] | None = None
        self.sent = 0  # bytes that left this rank
        self.intra_node = 0  # of them, bytes that stayed within the node
        self.received = 0
        self._continue(None)

    def _continue(self, value: Tensor | None) -> None:
        try:
            request = next(self._steps) if value is None else self._steps.send(value)
        except StopIteration as stop:
            self._result = stop.value
            return
        self._work, self._out = self._group.launch(request)
        sent = self._group.sent(request)
        self.sent += sent
        self.intra_node += sent if isinstance(request, AllToAll) and request.intra_node else 0
        self.received += self._group.received(request)

    @property
    def done(self) -> bool:
        return self._result is not None

    def advance(self) -> bool:
        """Wait for the collective under way and start the next one; True once the result is there."""
        if self._result is None:
            self._work.wait()
            self._continue(self._out)
        return self._result is not None

    def wait(self) -> tuple[Tensor, R]:
        """The mean over ranks and the next state."""
        while self._result is None:
            self.advance()
        return self._result


class Pipeline(Generic[R]):
    """Exchanges that follow one another: while the bytes of one travel, others are coded.

    Each exchange that is added, and then each round of :meth:`finish`, moves all of them on by one collective, the youngest
    first: its collective is under way before an older one is waited for, so that the wire does not idle while that one's bytes
    are decoded. The order follows from the order of adding alone, so it is the same on every rank.
    """

    def __init__(self) -> None:
        self.pendings: list[Pending[R]] = []

    def add(self, pending: Pending[R]) -> None:
        """Take in an exchange that was just started."""
        self.advance()
        self.pendings.append(pending)

    def advance(self) -> None:
        """Move every exchange on by one collective."""
        for pending in reversed(self.pendings):
            pending.advance()

    def finish(self) -> list[tuple[Tensor, R]]:
        """All means and next states, in the order of adding."""
        while not all(pending.done for pending in self.pendings):
            self.advance()
        return [pending.wait() for pending in self.pendings]


@dataclasses.dataclass(frozen=True)
class _Works:
    """Several transfers as one."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclasses.dataclass(frozen=True)
class _Brought:
    """A transfer between hosts' memory, whose bytes then go to a device: ``out``."""

    work: Any
    arrived: Tensor
    out: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.arrived, non_blocking=True)


class ProcessGroup:
    """A torch process group (the default one if None) as the driver of steps."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # torch 2.13 renames the collective; older releases know the old name only.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    @property
    def device(self) -> torch.device:
        """Where small tensors of the group's collectives live: the current accelerator for NCCL, else the CPU."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else torch.device("cpu")
        )

    def global_rank(self, rank: int) -> int:
        """The number in the whole run of a rank of this group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def gather(self, mine: bytes) -> list[bytes]:
        """The same number of bytes from every rank, in rank order (blocking)."""
        gathered = host.read(self.gather_tensor(host.send(torch.frombuffer(bytearray(mine), dtype=torch.uint8), self.device)))
        data = gathered.numpy().tobytes()
        return [data[r * len(mine) : (r + 1) * len(mine)] for r in range(self.size)]

    def gather_tensor(self, mine: Tensor) -> Tensor:
        """Bytes of the group's device from every rank, one after another (blocking the stream, not the host)."""
        work, everyone = self.launch(AllGather(mine))
        work.wait()
        return everyone

    def agreed(self, flag: Tensor) -> Tensor:
        """Whether a flag is set on every rank, as a flag of the group's device: nothing waits where that is the flag's own."""
        mine = host.send(flag, self.device) if flag.is_cpu else flag.to(self.device)
        everyone = self.gather_tensor(mine.to(torch.uint8).reshape(1).repeat(8))
        return everyone.all()

    def all_reduce(self, x: Tensor) -> None:
        """Torch's own sum over ranks, in place (blocking): what compressed exchanges are compared with."""
        dist.all_reduce(x, group=self.group)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(group=self.group)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's values, on every rank (blocking)."""
        dist.broadcast(x, self.global_rank(0), group=self.group)

    def share(self, value: Any) -> Any:
        """The object that rank 0 passed, on every rank (blocking)."""
        box = [value]
        dist.broadcast_object_list(box, src=self.global_rank(0), group=self.group, device=self.device)
        return box[0]

    def by_host(self, device: torch.device) -> bool:
        """Whether bytes of a device are sent from the host's memory and received there.

        gloo takes a GPU's tensors too, but of its ways on the CPU the slow ones (:meth:`_launch_pairs`).
        """
        return device.type == "cuda" and dist.get_backend(self.group) == "gloo"

    def launch(self, request: Collective) -> tuple[Any, Tensor]:
        """Start a collective; the tensor is filled once the work is done."""
        device = request.data.device
        if isinstance(request, AllReduce):
            return dist.all_reduce(request.data, group=self.group, async_op=True), request.data
        if not self.by_host(device):
            return self._launch(request, device)
        work, arrived = self._launch(dataclasses.replace(request, data=host.read(request.data)), device)
        out = buffers.empty(arrived.numel(), torch.uint8, device)
        return _Brought(work, arrived, out), out

    def _launch(self, request: AllGather | AllToAll, device: torch.device) -> tuple[Any, Tensor]:
        """Start it from where its bytes are; what arrives will be used on ``device``."""
        mine = request.data
        empty = host.empty if mine.is_cpu else buffers.empty
        if isinstance(request, AllGather):
            out = empty(self.size * mine.numel(), torch.uint8, device)
            if out.is_cpu and self.size == 2 and mine.numel() > SHORT:
                return self._launch_pairs((mine, mine), out.chunk(2)), out
            return self._all_gather(out, mine, group=self.group, async_op=True), out
        out = empty(sum(request.receive), torch.uint8, device)
        if out.is_cpu:
            parts, places = torch.split(mine, list(request.send)), torch.split(out, list(request.receive))
            return self._launch_pairs(parts, places), out
        work = dist.all_to_all_single(out, mine, list(request.receive), list(request.send), group=self.group, async_op=True)
        return work, out

    def _launch_pairs(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> _Works:
        """A part to every rank and one from each, as messages between pairs; all receptions are posted before anything is sent.

        gloo sends when the receiver has said that it is ready, on the connection that its own bytes take. Its all-to-all begins by
        sending, so that this word waits behind a whole message, and a link carries one direction after the other; so does half of its
        all-gather where the ranks before and after a rank in the ring are the same one.
        """
        others = [(self.rank + d) % self.size for d in range(1, self.size)]
        given: dict[str, Any] = {"group": self.group, "tag": TAG}
        works = [dist.irecv(places[r], group_src=r, **given) for r in reversed(others) if places[r].numel()]
        works += [dist.isend(parts[r], group_dst=r, **given) for r in others if parts[r].numel()]
        places[self.rank].copy_(parts[self.rank])
        return _Works(works)

    def sent(self, request: Collective) -> int:
        """Bytes of a request that leave this rank."""
        if isinstance(request, AllReduce):
            return request.sent(self.size)
        if isinstance(request, AllGather):
            return request.data.numel() * (self.size - 1)
        return sum(request.send) - request.send[self.rank]

    def received(self, request: Collective) -> int:
        """Bytes of a request that arrive from other ranks."""
        if isinstance(request, AllReduce):
            return request.sent(self.size)
        if isinstance(request, AllGather):
            return request.data.numel() * (self.size - 1)
        return sum(request.receive) - request.receive[self.rank]


def broke_off(error: BaseException) -> bool:
    """Whether torch raised ``error`` in a collective: another rank has left or fallen silent."""
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    # gloo has no type of its own for that, and many texts: it matters where the error came from.
    *_, (inner, _) = traceback.walk_tb(error.__traceback__)
    module = str(inner.f_globals.get("__name__"))
    ours = module.startswith("tersegrad.") and inner.f_code.co_name in ("advance", "wait", "launch", "_launch", "_launch_pairs")
    return ours or module.startswith("torch.distributed.")


def start(
    exchange: Exchange[R],
    x: Any,
    state: R,
    spec: Spec,
    ctx: Context,
    group: ProcessGroup,
    stats: Stats | None = None,
    into: Tensor | None = None,
) -> Pending[R]:
    """Run an exchange on a process group, without blocking. ``x``: a tensor, or what else the exchange takes."""
    return Pending(exchange.steps(x, state, spec, ctx, group.rank, group.size, stats, into), group)


def announced(messages: Sequence[Message], device: torch.device) -> Tensor:
    """The lengths of messages as bytes, eight each, on ``device``; nothing waits for those that only the device knows."""
    if all(isinstance(m.nbytes, int) for m in messages):
        return host.numbers(lengths(messages), device).view(torch.uint8)
    parts = [m.nbytes if isinstance(m.nbytes, Tensor) else torch.full((), m.nbytes, device=device) for m in messages]
    return torch.stack(parts).view(torch.uint8)


def read_integers(data: Tensor) -> list[int]:
    """The integers of eight bytes each, in one read."""
    return [int(v) for v in host.read(data).view(torch.int64).tolist()]


def in_parts(arrived: Tensor, sizes: Sequence[int], on_host: bool) -> Iterator[Message]:
    """The messages that arrived one after another; with ``on_host``, those that will be decoded there are read together."""
    here = torch.split(host.read(arrived), list(sizes)) if on_host else [None] * len(sizes)
    for part, n, copy in zip(torch.split(arrived, list(sizes)), sizes, here):
        yield Message(part, n, copy)
