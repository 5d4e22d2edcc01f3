"""One call each: a round trip through real bytes, and frames that carry their own description."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec, Stats, flat_float32
from tersegrad.recipes import parse


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """What came back, what it cost, and how wrong it is: ``error`` = ||C(x) - x||^2 / ||x||^2."""

    decoded: Tensor  # float32, shaped like the input
    nbytes: int
    bits_per_coordinate: float
    error: float


def _compressor(compressor: Compressor[Any] | str) -> Compressor[Any]:
    return parse(compressor) if isinstance(compressor, str) else compressor


def roundtrip(compressor: Compressor[Any] | str, x: Tensor, seed: int = 0, stats: Stats | None = None) -> RoundTrip:
    """Encode ``x`` to bytes and decode those bytes.

    >>> import torch
    >>> result = roundtrip("bf16", torch.tensor([1.0, -2.5, 3.14159]))
    >>> result.decoded, result.nbytes, result.bits_per_coordinate
    (tensor([ 1.0000, -2.5000,  3.1406]), 6, 16.0)
    """
    compressor = _compressor(compressor)
    spec, ctx = Spec.of(x), Context(seed=seed)
    message, _ = compressor.encode(x, spec, compressor.init(spec, x.device), ctx, stats=stats)
    data = message.tobytes()
    decoded = compressor.decode(Message.frombytes(data, x.device), spec, ctx)
    flat = flat_float32(x).double()
    norm = float(flat.square().sum())
    wrong = float((decoded.double() - flat).square().sum())
    error = wrong / norm if norm else (math.inf if wrong else 0.0)
    bits = 8 * len(data) / x.numel() if x.numel() else 0.0
    return RoundTrip(decoded.reshape(x.shape), len(data), bits, error)


def to_frame(compressor: Compressor[Any] | str, x: Tensor, context: Context | None = None, stats: Stats | None = None) -> bytes:
    """``x`` as one self-describing frame (first message of a fresh state), for a file or another program.

    >>> import torch
    >>> from_frame(to_frame("bf16", torch.tensor([1.0, -2.5])))
    tensor([ 1.0000, -2.5000])
    """
    compressor, ctx = _compressor(compressor), context or Context()
    spec = Spec.flat(x.numel(), x.dtype)
    message, _ = compressor.encode(x, spec, compressor.init(spec, x.device), ctx, stats=stats)
    return frame.pack(message, wire_id=compressor.wire_id, text=str(compressor), spec=spec, context=ctx)


def from_frame(data: bytes | bytearray | memoryview, *, spec: Spec | None = None, max_numel: int = 1 << 26) -> Tensor:
    """The flat float32 tensor in a frame. Frames come from strangers: ``max_numel`` bounds what is allocated.

    ``spec``: the buffer's own spec, where the sender used one with several tensors.
    """
    opened = frame.unpack(data, max_numel=max_numel if spec is None else spec.numel)
    try:
        compressor = parse(opened.text)
    except BadConfiguration as error:
        raise CorruptMessage(f"the frame's text form is not understood: {error}") from error
    if compressor.wire_id != opened.wire_id:
        raise CorruptMessage(f"the frame says wire id {opened.wire_id}, {opened.text} has {compressor.wire_id}")
    if spec is not None and spec.numel != opened.numel:
        raise CorruptMessage(f"the frame holds {opened.numel} coordinates, the spec {spec.numel}")
    return compressor.decode(opened.message, spec or opened.spec, opened.context)
