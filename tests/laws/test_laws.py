"""The laws themselves."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

import tersegrad
from tersegrad import kernels, recipes
from tersegrad.core import frame
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, has_fixed_size, wire_omega
from tersegrad.kernels import native
from tests.laws.cases import every_case
from tests.laws.inputs import given, once, pieces, tensors_of
from tests.laws.zoo import SIZES, adversarial, gaussian

EXACT_NAN = ("identity", "bf16")


@pytest.mark.parametrize("name", tersegrad.names())
def test_every_registered_name_has_examples_of_its_own(name: str) -> None:
    stated = (*recipes.examples(name), *recipes.corners(name))
    assert stated
    for text in stated:
        assert text.partition("(")[0] == name
        tersegrad.parse(text)


@every_case
def test_what_the_format_calls_unbiased_is(text: str) -> None:
    c = tersegrad.parse(text)
    for d in (1, 64, 1000, 300_000):
        spec = Spec.flat(d)
        promise, omega = c.guarantee(spec), wire_omega(c, spec)
        if isinstance(omega, float):
            assert promise.kind == "unbiased"
            assert promise.value <= omega
        else:
            assert promise.kind != "unbiased"
            assert (omega == "exact") == (promise.value == 0)


@every_case
def test_text_form_and_repr_round_trip(text: str) -> None:
    c = tersegrad.parse(text)
    assert tersegrad.parse(str(c)) == c
    assert eval(repr(c), {name: getattr(tersegrad, name) for name in dir(tersegrad)}) == c
    assert hash(c) == hash(tersegrad.parse(str(c)))


@every_case
def test_fixed_size_is_declared_exactly_where_it_holds(text: str) -> None:
    c = tersegrad.parse(text)
    constant = True
    for d in (0, 1, 65, 1000):
        for x in (*adversarial(d).values(), torch.full((d,), math.nan)):
            spec = pieces(d)
            message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(seed=3), **given(c, x))
            constant = constant and int(message.nbytes) == c.max_nbytes(spec)
    assert has_fixed_size(c) == constant


@every_case
def test_bytes_are_deterministic_and_the_state_is_not_written_into(text: str) -> None:
    c = tersegrad.parse(text)
    x = gaussian(3000)
    spec, ctx = pieces(3000), Context(seed=7, step=1)
    state = c.init(spec, "cpu")
    first, state = c.encode(x, spec, state, ctx, **given(c, x))
    before = [t.clone() for t in tensors_of(state)]
    x_before = x.clone()
    second, _ = c.encode(x, spec, state, dataclasses.replace(ctx, step=2), **given(c, x))
    again, _ = c.encode(x, spec, state, dataclasses.replace(ctx, step=2), **given(c, x))
    assert second.tobytes() == again.tobytes()
    assert torch.equal(x, x_before)
    for old, now in zip(before, tensors_of(state), strict=True):
        assert torch.equal(old, now)
    decoded = c.decode(first, spec, ctx)
    assert torch.equal(decoded, c.decode(Message.frombytes(first.tobytes()), spec, ctx))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_awkward_sizes_dtypes_and_views(text: str, dtype: torch.dtype) -> None:
    c = tersegrad.parse(text)
    for d in SIZES:
        x = gaussian(2 * d).to(dtype)[::2]
        assert d < 2 or not x.is_contiguous()
        spec = Spec.flat(d, dtype)
        message, decoded = once(c, x, spec=spec)
        assert decoded.shape == (d,)
        assert decoded.dtype == torch.float32
        assert bool(torch.isfinite(decoded).all())
        assert message.data.dtype == torch.uint8
        assert int(message.nbytes) <= c.max_nbytes(spec)
        contiguous, _ = once(c, x.clone(), spec=spec)
        assert contiguous.tobytes() == message.tobytes()


@every_case
def test_finite_in_finite_out_and_within_max_nbytes(text: str) -> None:
    c = tersegrad.parse(text)
    for name, x in adversarial(1000).items():
        message, decoded = once(c, x)
        assert int(message.nbytes) <= c.max_nbytes(Spec.flat(1000)), name
        assert bool(torch.isfinite(decoded).all()), name
        if name == "zero":
            assert bool((decoded == 0).all())


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_not_compressed_away(text: str, bad: float) -> None:
    c = tersegrad.parse(text)
    for d, where in ((1, 0), (700, 0), (700, 699), (700, 333)):
        x = gaussian(d)
        x[where] = bad
        spec, ctx = pieces(d), Context(seed=3)
        state = c.init(spec, "cpu")
        message, after = c.encode(x, spec, state, ctx, **given(c, x))
        decoded = c.decode(message, spec, ctx)
        if text in EXACT_NAN:
            assert not math.isfinite(float(decoded[where]))
        elif not text.startswith("by_tensor"):
            assert bool(torch.isnan(decoded).all())
        else:
            assert bool(torch.isnan(decoded).any() or torch.isinf(decoded).any())
        assert all(bool(torch.isfinite(t).all()) for t in tensors_of(after) if t.is_floating_point())


@every_case
def test_out_buffers_are_used(text: str) -> None:
    c = tersegrad.parse(text)
    x, ctx, spec = gaussian(1000), Context(seed=9), Spec.flat(1000)
    state = c.init(spec, "cpu")
    plain, _ = c.encode(x, spec, state, ctx, **given(c, x))
    buffer = torch.full((c.max_nbytes(spec) + 5,), 170, dtype=torch.uint8)
    message, _ = c.encode(x, spec, state, ctx, out=buffer, **given(c, x))
    assert message.data.data_ptr() == buffer.data_ptr()
    assert message.tobytes() == plain.tobytes()
    assert buffer[c.max_nbytes(spec) :].tolist() == [170] * 5
    target = torch.full((1000,), math.nan)
    decoded = c.decode(message, spec, ctx, out=target)
    assert decoded.data_ptr() == target.data_ptr()
    assert torch.equal(decoded, c.decode(plain, spec, ctx))


@every_case
def test_decode_add_is_decode_then_add(text: str) -> None:
    c = tersegrad.parse(text)
    if not isinstance(c, Accumulator):
        return
    for d in (1, 65, 1000):
        x, ctx, spec = gaussian(d), Context(seed=11), Spec.flat(d)
        message, decoded = once(c, x, ctx)
        base = gaussian(d, 5)
        added = c.decode_add(message, spec, ctx, base.clone(), 0.25)
        torch.testing.assert_close(added, base + 0.25 * decoded, rtol=1e-6, atol=1e-6)


@every_case
def test_backends_instruction_sets_and_threads_write_the_same_bytes(text: str) -> None:
    c = tersegrad.parse(text)
    if not native.available():
        pytest.fail("the native kernels are not built")
    for d in (65, 17_000):
        x = gaussian(d)
        with kernels.force("reference"):
            wanted, decoded = once(c, x)
        got, again = once(c, x)
        assert got.tobytes() == wanted.tobytes()
        assert torch.equal(again, decoded)
    for d in (65, 5000, 300_000):
        x = gaussian(d)
        best, best_decoded = once(c, x)
        for isa in native.supported_isas():
            for threads in (1, 3):
                with native.using(isa=isa, threads=threads):
                    message, decoded = once(c, x)
                assert message.tobytes() == best.tobytes(), (isa, threads)
                assert torch.equal(decoded, best_decoded), (isa, threads)


def decodes_safely(c: Compressor[Any], data: bytes, spec: Spec, ctx: Context) -> None:
    try:
        decoded = c.decode(Message.frombytes(data), spec, ctx)
    except CorruptMessage:
        return
    assert decoded.shape == (spec.numel,)
    assert decoded.dtype == torch.float32


@every_case
def test_every_truncation_and_random_mutations(text: str) -> None:
    c = tersegrad.parse(text)
    rng = random.Random(5)
    for d in (3, 300):
        x, ctx = gaussian(d), Context(seed=13)
        spec = pieces(d)
        message, _ = c.encode(x, spec, c.init(spec, "cpu"), ctx, **given(c, x))
        data = message.tobytes()
        for length in range(min(len(data), 600)):
            decodes_safely(c, data[:length], spec, ctx)
        decodes_safely(c, data + b"\0", spec, ctx)
        for _ in range(150):
            mutated = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            decodes_safely(c, bytes(mutated), spec, ctx)
        for _ in range(50):
            decodes_safely(c, rng.randbytes(rng.randrange(2 * len(data) + 2)), spec, ctx)


@every_case
def test_frames_carry_everything_a_stranger_needs(text: str) -> None:
    c = tersegrad.parse(text)
    x, ctx, spec = gaussian(200), Context(seed=2**63 + 5, step=9, buffer=1, sender=4), Spec.flat(200)
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), ctx, **given(c, x))
    data = frame.pack(message, wire_id=c.wire_id, text=str(c), spec=spec, context=ctx)
    opened = frame.unpack(data)
    stranger = tersegrad.parse(opened.text)
    assert stranger.wire_id == opened.wire_id
    decoded = stranger.decode(opened.message, opened.spec, opened.context)
    assert torch.equal(decoded, c.decode(message, spec, ctx))
