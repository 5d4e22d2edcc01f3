"""The gate for replies: a question and a reply become an update, or :class:`Refused` says in a few words why not.

A reply is used only if it is no larger than it need be, comes with sane metrics, answers the question with its seed, step and
sender, was made by an offered compressor, and decodes to finite numbers of the model's shape. Cheap checks come before dear ones,
and nothing is allocated because a reply claims a size.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch import Tensor

from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context
from tersegrad.integrations.flower import envelope, sizes
from tersegrad.integrations.flower.broadcast import Model
from tersegrad.integrations.flower.envelope import KEY, Answer, Order
from tersegrad.recipes import parse

MAX_REASON = 300
LARGEST = 2.0**62  # squares of such numbers are finite in float32; FedAdam and its kin would keep an overflow for ever
_BAD = (BadConfiguration, ArithmeticError, RuntimeError, ValueError, IndexError, TypeError, MemoryError)


class Refused(Exception):
    """A reply that takes no part in the round; ``kind`` is a short word to count by, the text is cut."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in reason[:MAX_REASON]))
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Question:
    """What one client was sent, and so what its reply must match."""

    order: Order
    allowed: frozenset[str]  # text forms of compressors


@dataclasses.dataclass(frozen=True)
class Update:
    """A reply that was let in: the model plus its update, as numbers of the model's dtypes."""

    model: dict[str, np.ndarray[Any, Any]]
    answer: Answer
    compressor: str
    nbytes: int  # of its frame


@dataclasses.dataclass(frozen=True)
class Gate:
    """The rules; see the options of ``CompressedStrategy``."""

    offered: Mapping[str, Compressor[Any]]  # by text form
    accept: Callable[[Compressor[Any]], bool] | None = None
    clip: float | None = None
    clip_beside: float | None = None  # None: as clip
    max_weight: float = 2.0**31
    max_extra: int = 1 << 18
    weight_key: str | None = "num-examples"

    def __post_init__(self) -> None:
        for name in ("clip", "clip_beside"):
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < math.inf:
                raise BadConfiguration(f"{name} is a norm, above zero, got {bound}")
        # Below 2^63 no number of clients makes the sum of weights overflow.
        if not isinstance(self.max_weight, (int, float)) or not 0 < self.max_weight <= 2.0**63:
            raise BadConfiguration(
                f"max_weight bounds what a client may claim, above 0 and at most 2^63, got {self.max_weight}"
            )
        if self.max_extra < 0:
            raise BadConfiguration(f"max_extra is a number of bytes, got {self.max_extra}")

    def measure(self, reply: Message, model: Model) -> tuple[int, Refused | None]:
        """Bytes of a reply as it came, and a refusal if too much lies beside its frame (its bytes are then counted from below)."""
        if reply.has_error():
            return sizes.wire_nbytes(reply), None
        extra = sizes.extent(reply.content, KEY)
        room = self.max_extra + sum(len(array.data) for array in model.beside.values())
        if extra <= room:
            return sizes.wire_nbytes(reply), None
        ours = sum(len(record[KEY].data) for record in reply.content.array_records.values() if KEY in record)
        text = f"{extra} bytes beside the frame, at most {room} are taken (max_extra={self.max_extra})"
        return extra + ours, Refused("oversized", text)

    def check_metrics(self, content: RecordDict, needed: Mapping[str, float] = types.MappingProxyType({})) -> None:
        """Flower's strategies give up the whole round for one reply with odd metrics; so such a reply is turned away here."""
        if len(content.metric_records) != 1:
            raise Refused("metrics", f"a reply has one MetricRecord, this one {len(content.metric_records)}")
        (metrics,) = content.metric_records.values()
        for name, value in metrics.items():
            if not all(_finite(v) for v in (value if isinstance(value, list) else [value])):
                raise Refused("metrics", f"{name[:80]} is not finite")
        for name, most in needed.items():
            found = metrics.get(name)
            if not isinstance(found, (int, float)) or not 0 <= found <= most:
                raise Refused("metrics", f"{name} must be a number from 0 to {most:g}, got {str(found)[:80]}")
        if self.weight_key is None:
            return
        weight = metrics.get(self.weight_key)
        if not isinstance(weight, (int, float)) or not weight > 0:
            raise Refused("metrics", f"{self.weight_key} must be a number above zero, got {str(weight)[:80]}")
        if weight > self.max_weight:
            raise Refused("metrics", f"{self.weight_key} is {weight}, at most {self.max_weight:g} is believed (max_weight=)")

    def take(self, content: RecordDict, question: Question, model: Model) -> Update:
        """The update in a reply to this question, clipped and added to the model that was sent."""
        if len(content.array_records) != 1:
            raise Refused("no-update", f"a reply has one ArrayRecord, this one {len(content.array_records)}")
        (record,) = content.array_records.values()
        array = record.get(KEY)
        if array is None or array.stype != envelope.UPDATE:
            raise Refused("no-update", "no update of ours in the reply: does the client's app use compress_mod?")
        try:
            beside = self._beside(model.layout.read_beside(record), model)
            answer, framed = Answer.unpack(array.data)
            compressor, opened = self._open(framed, question, model)
            decoded = compressor.decode(opened.message, model.layout.spec, opened.context)
        except CorruptMessage as error:
            raise Refused("corrupt", str(error)) from error
        except _BAD as error:
            raise Refused("corrupt", f"the update cannot be decoded: {error}") from error
        if not bool(torch.isfinite(decoded).all()):
            raise Refused("non-finite", "the update is not finite")
        if self.clip is not None:
            decoded = decoded * _scale(float(decoded.double().norm()), self.clip)
        found = model.plus(decoded, beside)
        if not all(np.abs(value).max(initial=0) <= LARGEST for value in found.values() if value.dtype.kind == "f"):
            raise Refused("non-finite", f"model plus update have numbers beyond {LARGEST:.2g}")
        return Update(found, answer, opened.text, len(framed))

    def _beside(self, sent: Mapping[str, Tensor], model: Model) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays beside the frame, in the model's dtypes, clipped like the update: differences to the model's values.

        Floating-point arrays together are one vector, integer arrays together another.
        """
        found = {name: _fitting(name, tensor, model.values[name]) for name, tensor in sent.items()}
        bound = self.clip if self.clip_beside is None else self.clip_beside
        if bound is None:
            return found
        for kinds in ("f", "iu"):
            old = {name: model.values[name].astype(np.float64) for name, value in found.items() if value.dtype.kind in kinds}
            with np.errstate(over="ignore", invalid="ignore"):
                moved = {name: found[name].astype(np.float64) - value for name, value in old.items()}
                scale = _scale(math.sqrt(sum(float(np.square(value).sum()) for value in moved.values())), bound)
                if scale == 1.0:
                    continue
                for name, value in moved.items():
                    # Integers are rounded towards what the model has, which keeps them within the bound.
                    step = np.trunc(value * scale) if kinds == "iu" else value * scale
                    found[name] = np.asarray((old[name] + step).astype(found[name].dtype))
        return found

    def _open(self, framed: bytes, question: Question, model: Model) -> tuple[Compressor[Any], frame.Frame]:
        """The frame, if it is the answer to the question; nothing is decoded yet, nothing allocated beyond the reply itself."""
        spec, order = model.layout.spec, question.order
        longest = max(envelope.max_frame(c, spec) for c in self.offered.values())
        if len(framed) > (longest if self.accept is None else max(longest, 8 * spec.numel + 4096)):
            raise Refused("oversized", f"{len(framed)} bytes for a model of {spec.numel} parameters")
        if framed[:4] == frame.MAGIC and framed[4:5] not in (b"", bytes([frame.VERSION])):
            raise Refused("wrong-version", f"frame version {framed[4]}, this release reads version {frame.VERSION}")
        opened = frame.unpack(framed)
        if (opened.numel, opened.dtype) != (spec.numel, spec.dtype):
            text = f"{opened.numel} coordinates of {opened.dtype}, the model has {spec.numel} of {spec.dtype}"
            raise Refused("wrong-shape", text)
        if opened.context != Context(order.seed, order.step, envelope.UP, order.sender):
            raise Refused(
                "replayed",
                f"it answers step {opened.context.step} as sender {opened.context.sender}, or with another seed; "
                f"asked was step {order.step} of sender {order.sender}",
            )
        compressor = self.offered.get(opened.text) if opened.text in question.allowed else None
        if compressor is None and self.accept is not None and not order.fixed:
            try:
                wished = parse(opened.text)
                compressor = wished if self.accept(wished) else None
            except BadConfiguration as error:
                raise Refused("not-offered", f"the compressor {opened.text[:80]!r} is not understood: {error}") from error
        if compressor is None:
            raise Refused("not-offered", f"the compressor {opened.text[:80]!r} is not offered to this client")
        envelope.check_frame(opened, spec, compressor)
        if len(opened.payload) > compressor.max_nbytes(spec):
            text = f"{len(opened.payload)} bytes, {compressor} never sends more than {compressor.max_nbytes(spec)}"
            raise Refused("oversized", text)
        return compressor, opened


def _scale(norm: float, bound: float) -> float:
    """The factor that brings a vector of this norm below the bound, float32's rounding included."""
    return 1.0 if norm <= bound else bound / norm * (1 - 2**-22)


def _fitting(name: str, sent: Tensor, model: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array beside the frame in the model's dtype; refused where that could change or overflow its numbers."""
    # The server keeps 16-bit models in float32, and bfloat16 is not known to numpy.
    value = (sent.float() if sent.dtype == torch.bfloat16 else sent).numpy()
    if not np.can_cast(value.dtype, model.dtype, "safe"):
        raise Refused("beside", f"{name} came as {value.dtype}, the model's is {model.dtype}: send it as that")
    if value.dtype.kind in "iu" and value.size and max(abs(int(value.min())), abs(int(value.max()))) > envelope.EXACT:
        raise Refused("beside", f"{name} has integers beyond 2^53")
    if any(fnmatchcase(name, pattern) for pattern in envelope.NONNEGATIVE) and bool((value < 0).any()):
        raise Refused("beside", f"{name} has negative numbers, which variances and counters never are")
    return np.asarray(value.astype(model.dtype, copy=False))


def agree(contents: Mapping[int, RecordDict], train: bool) -> tuple[dict[int, RecordDict], dict[int, Refused]]:
    """Replies by client as Flower's strategies take them, with records and metrics of one structure, and those that differ.

    The round itself decides, one client one vote: the structure that most of them sent, and where several are as frequent what
    these have in common. Metrics beyond it are left out; replies that lack one of it are refused. Nothing of earlier rounds counts,
    so nobody who was once alone can lock the others out.
    """
    structures = {node: _structure(content) for node, content in contents.items()}
    votes = Counter(structures.values())
    most = max(votes.values(), default=0)
    leading = [structure for structure, count in votes.items() if count == most]
    common = frozenset.intersection(*leading) if leading else frozenset()
    names = {name for name, _ in common}
    model_name = _commonest(name for content in contents.values() for name in content.array_records)
    metrics_name = _commonest(name for content in contents.values() for name in content.metric_records)
    good, refused = {}, {}
    for node, content in contents.items():
        if lacking := sorted(name for name, _ in common - structures[node]):
            refused[node] = Refused("metrics", f"its metrics differ from the others' in {', '.join(lacking)}")
            continue
        (metrics,) = content.metric_records.values()
        kept = MetricRecord({name: value for name, value in metrics.items() if name in names})
        arrays = dict(zip([model_name], content.array_records.values())) if train else {}
        good[node] = RecordDict({**content.config_records, **arrays, metrics_name: kept})
    return good, refused


def _structure(content: RecordDict) -> frozenset[tuple[str, int]]:
    """Names of metrics, with the lengths of lists."""
    (metrics,) = content.metric_records.values()
    return frozenset((name, len(value) if isinstance(value, list) else -1) for name, value in metrics.items())


def _commonest(names: Iterable[str]) -> str:
    votes = Counter(names)
    return min(votes, key=lambda name: (-votes[name], name), default="")


def _finite(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False
