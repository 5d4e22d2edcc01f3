"""What a frame says about itself, and whether it decodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tersegrad import recipes
from tersegrad.core import frame
from tersegrad.core.errors import CorruptMessage, TersegradError
from tersegrad.core.protocol import mode_of
from tersegrad.report.tables import Column, Table

# A header may claim any size: larger claims are reported, not decoded.
MAX_NUMEL = 1 << 28


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A frame's header, sizes and verdict."""

    rows: tuple[tuple[str, Any, str], ...]  # (field, value, meaning)
    decodes: bool
    verdict: str

    def fields(self) -> dict[str, Any]:
        """The values by name."""
        return {name: value for name, value, _ in self.rows}

    def table(self, title: str = "") -> Table:
        rows = tuple(
            (name, f"{value:,}" if isinstance(value, int) else str(value), meaning) for name, value, meaning in self.rows
        )
        return Table(
            (Column("field", number=False), Column("value", number=False), Column("meaning", number=False)), rows, title
        )


def explain(data: bytes) -> Explanation:
    """Open a frame and try to decode it. Bytes that are no frame raise :class:`CorruptMessage`.

    >>> from tersegrad.core import frame
    >>> from tersegrad.core.protocol import Context, Message, Spec
    >>> message = Message.frombytes(bytes(8))
    >>> found = explain(frame.pack(message, wire_id=1, text="identity", spec=Spec.flat(2), context=Context(seed=7)))
    >>> found.fields()["seed"], found.decodes
    (7, True)
    """
    opened = frame.unpack(data)
    length, numel = len(opened.payload), opened.numel
    rows: list[tuple[str, Any, str]] = [
        ("magic", frame.MAGIC.decode(), "marks a tersegrad frame"),
        ("version", frame.VERSION, "of the frame format"),
        ("dtype", str(opened.dtype).removeprefix("torch."), "of the gradient that was sent"),
        ("wire id", opened.wire_id, "number of the message format"),
        ("text form", opened.text, "the compressor, as tersegrad.parse reads it"),
        ("seed", opened.context.seed, "key of the shared randomness"),
        ("step", opened.context.step, "of training"),
        ("buffer", opened.context.buffer, "which group of tensors"),
        ("sender", opened.context.sender, "rank that wrote it"),
        ("coordinates", numel, "of the gradient"),
        ("payload bytes", length, "the message itself"),
        ("overhead bytes", opened.overhead, "header, text form and checksum"),
        ("frame bytes", len(data), "in all; checksum correct"),
    ]
    if numel:
        rows.append(("bits per coordinate", round(8 * length / numel, 4), "payload only; float32 has 32"))
    try:
        return _decoded(opened, rows)
    except TersegradError as error:
        return Explanation(tuple(rows), False, f"does not decode: {error}")


def _decoded(opened: frame.Frame, rows: list[tuple[str, Any, str]]) -> Explanation:
    if opened.numel > MAX_NUMEL:
        raise CorruptMessage(f"it claims {opened.numel:,} coordinates; inspect decodes up to {MAX_NUMEL:,}")
    compressor = recipes.parse(opened.text)
    if compressor.wire_id != opened.wire_id:
        raise CorruptMessage(f"{opened.text} has wire id {compressor.wire_id}, the header says {opened.wire_id}")
    if (mode := mode_of(compressor, opened.payload)) is not None:
        rows.append(("mode", mode, "the kind of message, from its first bytes"))
    rows.append(("guarantee", str(compressor.guarantee(opened.spec)), "of this compressor at this size"))
    x = compressor.decode(opened.message, opened.spec, opened.context)
    if not bool(torch.isfinite(x).all()):
        return Explanation(tuple(rows), True, "decodes to non-finite values: the sender's gradient held NaN or infinity")
    if opened.numel:
        rows.append(("decoded norm", f"{float(x.double().norm()):.6g}", "Euclidean length of what it decodes to"))
        rows.append(("decoded zeros", f"{float((x == 0).double().mean()):.2%}", "share of coordinates that decode to 0"))
    return Explanation(tuple(rows), True, f"decodes to {opened.numel:,} finite coordinates")
