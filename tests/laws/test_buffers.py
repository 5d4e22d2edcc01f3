"""Laws of the caller's buffers: a wrong one is refused before anything is written, and a refused message changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import kernels
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tests.laws.cases import every_case
from tests.laws.inputs import given, pieces
from tests.laws.zoo import gaussian

D = 300


def wrong_bytes(nbytes: int) -> Iterator[tuple[str, Tensor]]:
    """Buffers that cannot take a message of up to ``nbytes`` bytes."""
    yield "dtype", torch.zeros(nbytes, dtype=torch.int8)
    yield "float", torch.zeros(nbytes)
    yield "stride", torch.zeros(2 * nbytes, dtype=torch.uint8)[::2]
    yield "short", torch.zeros(nbytes - 1, dtype=torch.uint8)
    yield "matrix", torch.zeros(2, nbytes, dtype=torch.uint8)
    yield "device", torch.zeros(nbytes, dtype=torch.uint8, device="meta")


def wrong_floats(numel: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors that cannot take ``numel`` decoded coordinates."""
    yield "float64", torch.zeros(numel, dtype=torch.float64)
    yield "bfloat16", torch.zeros(numel, dtype=torch.bfloat16)
    yield "stride", torch.zeros(2 * numel)[::2]
    yield "short", torch.zeros(numel // 2)
    yield "long", torch.zeros(numel + 1)
    yield "matrix", torch.zeros(1, numel)
    yield "device", torch.zeros(numel, device="meta")


def first(c: Compressor[Any], x: Tensor, spec: Spec, ctx: Context, out: Tensor | None = None) -> Message:
    return c.encode(x, spec, c.init(spec, "cpu"), ctx, out=out, **given(c, x))[0]


@every_case
def test_a_buffer_of_a_wrong_kind_is_refused(text: str) -> None:
    c, x, spec, ctx = tersegrad.parse(text), gaussian(D), pieces(D), Context(seed=9)
    for name, data in wrong_bytes(c.max_nbytes(spec)):
        with pytest.raises(BadConfiguration, match="out must be"):
            pytest.fail(f"encoded into {name}: {first(c, x, spec, ctx, data)}")
    for message in (first(c, x, spec, ctx), first(c, torch.zeros(D), spec, ctx), first(c, x.fill_(math.nan), spec, ctx)):
        for name, out in wrong_floats(D):
            with pytest.raises(BadConfiguration, match="out must be"):
                pytest.fail(f"decoded into {name}: {c.decode(message, spec, ctx, out)}")
            if isinstance(c, Accumulator):
                with pytest.raises(BadConfiguration, match="out must be"):
                    pytest.fail(f"added to {name}: {c.decode_add(message, spec, ctx, out, 0.5)}")


@every_case
def test_decode_add_of_a_refused_message_changes_nothing(text: str) -> None:
    c = tersegrad.parse(text)
    if not isinstance(c, Accumulator):
        return
    rng = random.Random(7)
    for d in (9, D, 2000):
        x, spec, ctx = gaussian(d), pieces(d), Context(seed=13)
        data = first(c, x, spec, ctx).tobytes()
        before = gaussian(d, 3)
        for trial in range(100):
            damaged = bytearray(data)
            if trial % 4 == 0:
                del damaged[rng.randrange(len(damaged)) :]
            elif trial % 4 == 1:
                damaged += rng.randbytes(1 + trial % 3)
            else:
                for _ in range(rng.randrange(1, 4)):
                    damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 127, 243, 255, rng.randrange(256)))
            out = before.clone()
            try:
                c.decode_add(Message.frombytes(bytes(damaged)), spec, ctx, out, 0.5)
            except CorruptMessage:
                assert torch.equal(out, before)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "text", ["sparse_dithering(nu=0.1)", "random_sparse_dithering(omega=1)", "subtractive_dithering(omega=1)"]
)
def test_decode_add_changes_nothing_where_only_the_last_segment_is_bad(text: str, backend: kernels.Backend) -> None:
    c, d, ctx, rng = tersegrad.parse(text), 400_000, Context(seed=3), random.Random(5)
    assert isinstance(c, Accumulator)
    # Heavy tails, so that there are escapes behind the last segment's symbols.
    x = gaussian(d) / gaussian(d, 1).abs().clamp(min=1e-3)
    spec, before = Spec.flat(d), gaussian(d, 2)
    data = first(c, x, spec, ctx).tobytes()
    refused = 0
    with kernels.force(backend):
        for trial in range(12 if backend == "native" else 2):
            damaged = bytearray(data)
            if trial % 3 == 0:
                del damaged[-1 - trial :]
            else:
                # Escapes are the last bytes; symbols of the last segment lie some way before the end.
                at = len(data) - 1 - rng.randrange(40 if trial % 3 == 1 else len(data) // 5)
                damaged[at] ^= 1 << rng.randrange(8)
            out = before.clone()
            try:
                c.decode_add(Message.frombytes(bytes(damaged)), spec, ctx, out, 0.5)
            except CorruptMessage:
                refused += 1
                assert torch.equal(out, before)
    assert refused


@every_case
def test_a_tensor_of_another_size_than_the_spec_is_refused(text: str) -> None:
    c, spec = tersegrad.parse(text), pieces(D)
    with pytest.raises(BadConfiguration):
        c.encode(gaussian(D - 1), spec, c.init(spec, "cpu"), Context(), **given(c, gaussian(D - 1)))
