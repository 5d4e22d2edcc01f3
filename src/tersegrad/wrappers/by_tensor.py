"""By-tensor rules: named or small tensors are sent another way.

Maps: each piece of the buffer belongs to one group; a group's pieces are laid one after another and sent by the group's
compressor. A piece goes to the first rule whose pattern matches its name (shell patterns: ``*`` ``?`` ``[...]``), else to ``small``
when its whole tensor has fewer than ``below`` elements, else to ``default``. The size of the tensor decides, not that of the piece,
so that a shard is treated like the whole and state follows its parameter.

Guarantee: squared errors and squared norms add over groups, so the worst part's value holds for the whole: contractive when all
are, unbiased when all are (an exact part counts as both), sure when all are. An unbiased part with omega < 1 is also within
omega ||x||^2 of its input, so a mixture is contractive with the largest of alphas and omegas if that is below 1; else there is no
promise, and error feedback belongs around the parts instead.

Wire: for each group that has coordinates, in the order default, small, rules: the length of its message as a varint, then the
message. Group k (default 0, small 1, rule j is 2 + j) draws from ``ctx.child(k)``.

State: one per group (:class:`tersegrad.core.state.Parts`).

Citation: the usual practice of sending biases and norms uncompressed (Lin et al., "Deep gradient compression", ICLR 2018).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import varint
from tersegrad.core import buffers, host, trust
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.promises import worst
from tersegrad.core.protocol import (
    Compressor,
    Context,
    Guarantee,
    Message,
    Omega,
    Piece,
    Spec,
    Stats,
    codes_on_host,
    decode_sent,
    flat,
    flat_float32,
    has_fixed_size,
    lengths,
    restore,
    wire_omega,
)
from tersegrad.core.state import Parts
from tersegrad.core.sums import add_each, decode_sum, sums_at_once
from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class ByTensor(Configuration):
    """Rules that choose a compressor by a tensor's name or size.

    >>> from tersegrad.compressors import BF16, TopK
    >>> print(ByTensor(TopK(fraction=0.01), small=BF16(), below=4096, rules=(("*.bias", BF16()),)))
    by_tensor(top_k(fraction=0.01), small=bf16, below=4096, rules={"*.bias": bf16})
    """

    name: ClassVar[str] = "by_tensor"
    wire_id: ClassVar[int] = 66
    corners: ClassVar[tuple[str, ...]] = (
        "by_tensor(top_k(fraction=0.1), small=bf16, below=20)",
        'by_tensor(error_feedback(qsgd), rules={"*.weight": rotated(sign, block=64), "bias": identity})',
        "by_tensor(vgc(alpha=1.5), small=bf16, below=20)",
    )

    default: Compressor[Any]
    small: Compressor[Any] | None = None
    below: int = 1024
    rules: tuple[tuple[str, Compressor[Any]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple((pattern, part) for pattern, part in self.rules))
        for part in self.compressors:
            require(part is None or isinstance(part, Compressor), f"by_tensor chooses between compressors, got {part!r}")
        require(self.default is not None, "by_tensor needs a default compressor")
        for pattern, _ in self.rules:
            require(
                isinstance(pattern, str) and pattern.isascii() and pattern.isprintable(), f"not a name pattern: {pattern!r}"
            )
        require(self.below >= 0, f"below is a number of elements, got {self.below}")
        require(all(part is not None for _, part in self.rules), "a rule names a pattern and a compressor")

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.default, self.small, self.below, self.rules))

    def __hash__(self) -> int:
        # Layouts are looked up several times in every message.
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Hashes of texts differ between processes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def compressors(self) -> tuple[Compressor[Any] | None, ...]:
        """The compressor of each group."""
        return (self.default, self.small, *(part for _, part in self.rules))

    def group(self, piece: Piece) -> int:
        """The group that a piece belongs to: 0 default, 1 small, 2 + j for rule j."""
        for j, (pattern, _) in enumerate(self.rules):
            if fnmatchcase(piece.name, pattern):
                return 2 + j
        return 1 if self.small is not None and math.prod(piece.shape) < self.below else 0

    def init(self, spec: Spec, device: torch.device | str) -> Parts:
        groups = tuple(self.group(p) for p in spec.pieces)
        return Parts(groups, tuple((s.group, s.compressor.init(s.spec, device)) for s in _layout(self, spec)))

    def encode(
        self, x: Tensor, spec: Spec, state: Parts, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Parts]:
        # In its own dtype, which the parts' specs announce.
        x = flat(x)
        require(x.numel() == spec.numel, f"the spec has {spec.numel} coordinates, got {x.numel()}")
        layout = _layout(self, spec)
        data = buffers.byte_buffer(out, self.max_nbytes(spec), x.device)
        if [s.group for s in layout] != [g for g, _ in state.states]:
            raise BadConfiguration("the state was made by other rules, or for another buffer")
        moment = None if stats is None or stats.second_moment is None else flat_float32(stats.second_moment)
        messages: list[Message] = []
        after: list[tuple[int, Any]] = []
        for share, (g, before) in zip(layout, state.states, strict=True):
            given = stats if moment is None else Stats(_gather(moment, share.runs))
            place = buffers.empty(share.limit, torch.uint8, x.device)
            y = _gather(x, share.runs)
            message, next_state = share.compressor.encode(y, share.spec, before, ctx.child(g), stats=given, out=place)
            messages.append(message)
            after.append((g, next_state))
        known = lengths(messages)
        if self.fixed_size:
            at = host.stream(x.device)
            heads = [_head(length, x.device, at) for length in known]
        else:
            heads = _new_heads(known, x.device)
        sent = [part for head, message, n in zip(heads, messages, known, strict=True) for part in (head, message.data[:n])]
        nbytes = sum(part.numel() for part in sent)
        if sent:
            torch.cat(sent, out=data[:nbytes])
        return Message(data if out is None else out, nbytes), Parts(state.groups, tuple(after))

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        for part, sub, payload, child, runs in self._read(message, spec, ctx):
            whole = out[runs[0][0] : runs[0][1]] if len(runs) == 1 else None
            decoded = part.decode(payload, sub, child, whole)
            if whole is None:
                _spread(decoded, out, runs)
        return self._settled(out, message, spec)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        """``out += weight * decode(message)``; the largest group in one pass where its compressor can and it lies in one run.

        Everything else is decoded before anything is added, so that a refused message leaves ``out`` as it was.
        """
        out = buffers.float_buffer(out, spec.numel, message.data.device)
        groups = list(self._read(message, spec, ctx))
        largest = max(groups, key=lambda group: group[1].numel, default=None)
        decoded: list[tuple[Tensor, tuple[tuple[int, int], ...]]] = []
        fused: Any = None
        for group in groups:
            part, sub, payload, child, runs = group
            if group is largest and len(runs) == 1 and hasattr(part, "decode_add"):
                fused = part
            else:
                values = part.decode(payload, sub, child)
                decoded.append((values if weight == 1.0 else values.mul_(weight), runs))
        if fused is not None and largest is not None:
            _, sub, payload, child, ((a, b),) = largest
            fused.decode_add(payload, sub, child, out[a:b], weight)
        for values, runs in decoded:
            for part_of, (a, b) in zip(values.split([b - a for a, b in runs]), runs):
                out[a:b] += part_of
        return self._settled(out, message, spec)

    def sums_at_once(self, device: torch.device) -> bool:
        return any(part is not None and sums_at_once(part, device) for part in self.compressors)

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        """``out = sum of weight * decode(message)``, group by group; each rounds as in :meth:`decode_add`."""
        out = buffers.float_buffer(out, spec.numel, messages[0].data.device)
        largest = max(_layout(self, spec), key=lambda share: share.spec.numel, default=None)
        each = [self._read(message, spec, ctx) for message, ctx in zip(messages, contexts, strict=True)]
        for share, *found in zip(_layout(self, spec), *each, strict=True):
            part, runs = share.compressor, share.runs
            whole = len(runs) == 1
            total = out[runs[0][0] : runs[0][1]] if whole else buffers.empty(share.spec.numel, torch.float32, out.device)
            payloads, children = [f[2] for f in found], [f[3] for f in found]
            if sums_at_once(part, out.device):
                decode_sum(part, payloads, share.spec, children, total, weight)
            else:
                add_each(part, payloads, share.spec, children, total, weight, fused=whole and share is largest)
            if not whole:
                _spread(total, out, runs)
        for message in messages:
            self._settled(out, message, spec)
        return out

    def _settled(self, out: Tensor, message: Message, spec: Spec) -> Tensor:
        """``out``, NaN where a device's message of known length announces other lengths: raising would wait for the device."""
        if out.is_cpu or not self.fixed_size:
            return out
        heads = _heads(self, spec, out.device, host.stream(out.device))
        return out if heads is None else kernels.get(out.device).settle(out, (message.data[heads[0]] == heads[1]).all())

    def decode_sent(self, message: Message, spec: Spec, ctx: Context) -> Tensor:
        """What the groups sent, before it is transformed back (see :class:`~tersegrad.core.protocol.Transformed`)."""
        sent = buffers.empty(spec.numel, torch.float32, message.data.device)
        for part, sub, payload, child, runs in self._read(message, spec, ctx):
            _spread(decode_sent(part, payload, sub, child), sent, runs)
        return sent

    def restore(self, sent: Tensor, spec: Spec) -> Tensor:
        out = buffers.empty(spec.numel, torch.float32, sent.device)
        for share in _layout(self, spec):
            _spread(restore(share.compressor, _gather(sent, share.runs), share.spec), out, share.runs)
        return out

    def _read(
        self, message: Message, spec: Spec, ctx: Context
    ) -> Iterator[tuple[Compressor[Any], Spec, Message, Context, tuple[tuple[int, int], ...]]]:
        """Every group's compressor, spec, message, context and runs; raises after the last where bytes are left."""
        data = message.payload
        # What is decoded in the host's memory is copied there once, as a whole.
        here = message.on_host() if codes_on_host(self, data.device) else None
        end = 0
        for share, (at, length) in zip(_layout(self, spec), self._places(data if here is None else here, spec)):
            end = at + length
            # A copy starts at an address that any decoder may view as words.
            copy = None if here is None else buffers.cat([here[at:end]])
            found = Message(buffers.cat([data[at:end]]), length, copy)
            yield share.compressor, share.spec, found, ctx.child(share.group), share.runs
        if end != data.numel():
            raise CorruptMessage(f"{data.numel() - end} bytes follow the last group")

    def _places(self, data: Tensor, spec: Spec) -> Iterator[tuple[int, int]]:
        """Where every group's message begins, and its length.

        A device is not waited for where all lengths are known beforehand, and once where all but one are: that one is what is left.
        """
        shares, end = _layout(self, spec), 0
        varying = sum(not has_fixed_size(share.compressor) for share in shares) if not data.is_cpu else 0
        foreseen = [] if data.is_cpu or varying > 1 else _foreseen(shares, data.numel())
        if varying and foreseen:
            heads = [varint.write(length) for _, length in foreseen]
            if not trust.reads(*((data[at - len(head) : at], head) for (at, _), head in zip(foreseen, heads))):
                foreseen = []
        for number, share in enumerate(shares):
            if foreseen:
                at, length = foreseen[number]
            else:
                length, at = varint.read(host.read(data[end : end + varint.MAX_NBYTES]))
                at += end
            if length > min(data.numel() - at, share.limit):
                raise CorruptMessage(f"group {share.group} announces {length} bytes, {data.numel() - at} are left")
            end = at + length
            yield at, length

    def payloads(self, message: Message, spec: Spec, ctx: Context) -> Iterator[tuple[int, Compressor[Any], Message]]:
        """Every group that has coordinates: its number, its compressor and its message."""
        for share, (part, _, payload, _, _) in zip(_layout(self, spec), self._read(message, spec, ctx)):
            yield share.group, part, payload

    def codes_on_host(self, device: torch.device) -> bool:
        return any(part is not None and codes_on_host(part, device) for part in self.compressors)

    @functools.cached_property
    def fixed_size(self) -> bool:
        return all(part is None or has_fixed_size(part) for part in self.compressors)

    def max_nbytes(self, spec: Spec) -> int:
        return _limit(self, spec)

    def wire_omega(self, spec: Spec) -> Omega:
        found = [wire_omega(share.compressor, share.spec) for share in _layout(self, spec)]
        omegas = [omega for omega in found if isinstance(omega, float)]
        return None if None in found else max(omegas) if omegas else "exact"

    def guarantee(self, spec: Spec) -> Guarantee:
        return worst([share.compressor.guarantee(share.spec) for share in _layout(self, spec)])


@dataclasses.dataclass(frozen=True)
class _Share:
    """What one group of a buffer's pieces is sent with, and where its pieces lie."""

    group: int
    compressor: Compressor[Any]
    spec: Spec
    runs: tuple[tuple[int, int], ...]
    # The most bytes of its message.
    limit: int


@functools.lru_cache(maxsize=1024)
def _layout(rules: ByTensor, spec: Spec) -> tuple[_Share, ...]:
    """The groups of a buffer that have coordinates, in ascending order."""
    groups = tuple(rules.group(p) for p in spec.pieces)
    runs, shares = states.runs(spec, groups), []
    for group, sub in states.subspecs(spec, groups).items():
        compressor = rules.compressors[group]
        if compressor is not None:
            shares.append(_Share(group, compressor, sub, runs[group], compressor.max_nbytes(sub)))
    return tuple(shares)


@functools.lru_cache(maxsize=1024)
def _limit(rules: ByTensor, spec: Spec) -> int:
    """The most bytes of a message."""
    return sum(share.limit + varint.nbytes(share.limit) for share in _layout(rules, spec))


def _foreseen(shares: Sequence[_Share], total: int) -> list[tuple[int, int]]:
    """Where the groups' messages lie in one of ``total`` bytes, at most one of which varies in length; nothing if they cannot."""
    fixed = sum(share.limit + varint.nbytes(share.limit) for share in shares if has_fixed_size(share.compressor))
    rest = total - fixed
    # A length and its own bytes: the bytes grow by one at some lengths, so that some sums do not occur.
    length = next((rest - n for n in range(1, varint.MAX_NBYTES + 1) if rest > n - 1 and varint.nbytes(rest - n) == n), None)
    found: list[tuple[int, int]] = []
    end = 0
    for share in shares:
        size = share.limit if has_fixed_size(share.compressor) else length
        if size is None:
            return []
        found.append((end + varint.nbytes(size), size))
        end = sum(found[-1])
    return found


def _new_heads(lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """What stands before messages of these lengths."""
    heads = [varint.write(length) for length in lengths]
    if not heads:
        return []
    sent = host.send(torch.frombuffer(bytearray(b"".join(heads)), dtype=torch.uint8), device)
    return list(sent.split_with_sizes([len(head) for head in heads]))


@functools.lru_cache(maxsize=1024)
def _head(length: int, device: torch.device, stream: int) -> Tensor:
    """The same for one message, kept."""
    return _new_heads([length], device)[0]


@functools.lru_cache(maxsize=1024)
def _heads(compressor: ByTensor, spec: Spec, device: torch.device, stream: int) -> tuple[Tensor, Tensor] | None:
    """Where the lengths of the groups stand in messages of known length, and their bytes."""
    places: list[int] = []
    expected = b""
    at = 0
    for share in _layout(compressor, spec):
        head = varint.write(share.limit)
        places += range(at, at + len(head))
        expected += head
        at += len(head) + share.limit
    if not places:
        return None
    return host.numbers(places, device), host.send(torch.frombuffer(bytearray(expected), dtype=torch.uint8), device)


def _gather(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """The sub-buffer of these runs: a view where it is one run."""
    return x[runs[0][0] : runs[0][1]] if len(runs) == 1 else buffers.cat([x[a:b] for a, b in runs])


def _spread(part: Tensor, out: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """The reverse: a sub-buffer into its runs."""
    buffers.copy_all(part.split([b - a for a, b in runs]), [out[a:b] for a, b in runs])
