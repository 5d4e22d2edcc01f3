"""Messages of subtractive dithering by the CUDA kernels, in the emulation: the bytes, values and refusals of the reference."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spec import make_vectors
from tersegrad import Context, Message, Spec, kernels
from tersegrad.compressors.subtractive_dithering import SubtractiveDithering
from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Piece
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import subtractive
from tersegrad.recipes import parse
from tests.device import Device
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying
from tests.laws.inputs import uneven
from tests.laws.test_waiting import counted

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

VECTORS = pathlib.Path(__file__).parents[2] / "spec" / "vectors"
CTX = Context(seed=(1 << 63) + 77, step=5, buffer=2, sender=3)
SHAPES = ((48, 16, 3, 3), (24,), (3,), (60, 65), (), (70, 33), (1, 200), (300, 100))


def gaussian(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


class There:
    """The CUDA kernels for the simulated device."""

    __name__ = "there"
    OPERATIONS = subtractive.__all__

    def __init__(self, device: Device) -> None:
        for name in self.OPERATIONS:
            setattr(self, name, self._operation(device, name))

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = getattr(subtractive, name)

        def there(*arguments: Any) -> Any:
            # The layout is the host's.
            given = [device.memory(a) if isinstance(a, Tensor) and not a.is_cpu else a for a in arguments]
            found = real(*given)
            return found if name == "subtractive_encode" else arguments[3]

        return there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which the CUDA kernels run in the emulation, where they find CPU memory: what is read of that is counted too."""
    read = host.read
    with emulated(), Device() as made:

        def counting(x: Tensor) -> Tensor:
            if x.is_cpu:
                made.wait("a read")
            return read(x)

        monkeypatch.setattr(host, "read", counting)
        monkeypatch.setitem(kernels._chosen, made.device.type, kernels.overlay(There(made)))
        yield made


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is coded by the CPU's kernels."""
    for name in ("_encode_on_host", "_decode_on_host"):
        monkeypatch.setattr(subtractive, name, None)


def agree(text: str, x: Tensor, spec: Spec, ctx: Context = CTX) -> bytes:
    """The message, the same from both, and what it decodes to."""
    c: Any = parse(text)
    message = c.encode(x, spec, None, ctx)[0]
    data: Tensor = message.payload.clone()
    before = torch.where(torch.arange(x.numel()) % 3 == 0, -0.0, gaussian(x.numel(), 9))
    expected = c.decode(message, spec, ctx), c.decode_add(message, spec, ctx, before.clone(), 0.3)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
        assert torch.equal(c.encode(x, spec, None, ctx)[0].payload, data)
        assert same(c.decode(Message(data, data.numel()), spec, ctx), expected[0])
        assert same(c.decode_add(Message(data, data.numel()), spec, ctx, before.clone(), 0.3), expected[1])
    return bytes(data.numpy().tobytes())


def classed(data: bytes, steps: int = 1) -> bool:
    return data[:4] == b"\0\0\0\x80" and data[4 + 4 * steps] >= 128


@pytest.mark.parametrize("omega", [64, 1, 0.05, 0.001])
@pytest.mark.usefixtures("by_kernels")
def test_vectors_without_rows(omega: float) -> None:
    for numel in (1025, 5000, 33_333, 70_001):
        assert not classed(agree(f"subtractive_dithering(omega={omega})", gaussian(numel), Spec.flat(numel)))


@pytest.mark.parametrize("scale", ["chunk", "global"])
@pytest.mark.usefixtures("by_kernels")
def test_samples_and_several_segments(scale: str) -> None:
    for numel in (400_003,):
        agree(f"subtractive_dithering(omega=2, scale={scale})", gaussian(numel), Spec.flat(numel))


@pytest.mark.parametrize("omega", [2, 0.01])
@pytest.mark.usefixtures("by_kernels")
def test_rows_and_columns_have_classes(omega: float) -> None:
    x, spec = uneven(SHAPES)
    assert classed(agree(f"subtractive_dithering(omega={omega})", x, spec))
    assert classed(agree(f"subtractive_dithering(omega={omega}, chunk=14, scale=global)", x, spec))
    # Parts of tensors, from any place on.
    cut = Spec((Piece((300, 100), 12_345, 28_001), Piece((70, 33), 0, 2310)))
    part = torch.cat([x[-30_000:][12_345:28_001], gaussian(2310)])
    assert classed(agree(f"subtractive_dithering(omega={omega})", part, cut))
    agree(f"subtractive_dithering(omega={omega})", torch.cat([part, x])[7 : 7 + x.numel()], spec)


@pytest.mark.usefixtures("by_kernels")
def test_parts_of_zeros_are_left_out() -> None:
    rows = torch.randn(1700, 256, generator=torch.Generator().manual_seed(2))
    rows *= torch.exp2(2 * gaussian(1700, 1))[:, None]
    for first, last in ((0, 1024), (1024, 1700)):
        x = rows.clone()
        x[first:last] = 0
        assert classed(agree("subtractive_dithering(omega=1)", x.flatten(), Spec.of(rows)), 2)


@pytest.mark.parametrize("omega", [1, 0.05])
@pytest.mark.usefixtures("by_kernels")
def test_large_levels_are_escaped(omega: float) -> None:
    x = gaussian(40_000) * torch.exp(2 * gaussian(40_000, 1))
    for most in (1, 300):
        y = x.clone()
        y[77] = y[39_999] = most * x.abs().max()
        assert agree(f"subtractive_dithering(omega={omega})", y, Spec.flat(40_000))


def test_what_few_messages_are() -> None:
    """Zeros, what is not finite, raw floats, plain levels, very many escapes, tables that leave no choice, raw symbols."""
    x, spec = gaussian(2000), Spec.flat(2000)
    assert len(agree("subtractive_dithering(omega=1)", 0 * x, spec)) == 4
    for bad in (math.inf, math.nan):
        y = x.clone()
        y[1999] = bad
        assert len(agree("subtractive_dithering(omega=1)", y, spec)) == 4
    y = 1e-20 * x
    y[3] = 1e30
    forms = {agree(f"subtractive_dithering(omega={omega})", y, spec)[:4] for omega in ("1e-12", "1e6")}
    assert b"\0\0\0\x80" in forms
    assert agree("subtractive_dithering(omega=1e-12)", x.sign(), spec)[:4] == b"\0\0\0\x80"
    for omega in ("1e-9", "1e-6", "1e-5", "1e6"):
        agree(f"subtractive_dithering(omega={omega})", x, spec)
        agree(f"subtractive_dithering(omega={omega})", x.sign(), spec)


def test_one_read_of_a_message_on_either_side(device: Device) -> None:
    x, spec = uneven(SHAPES)
    for text in ("subtractive_dithering(omega=1)", "subtractive_dithering(omega=0.05, coder=rans, scale=global)"):
        here, there = counted(parse(text), x, spec, None), counted(parse(text), x, spec, device)
        assert (there.encode, there.decode, there.decode_add) == (1, 1, 1)
        assert there.data == here.data
        assert same(there.decoded, here.decoded)
        assert same(there.added, here.added)  # type: ignore[arg-type]


def test_short_vectors_take_one_read_too(device: Device) -> None:
    for coder in ("auto", "rans"):
        c, x = parse(f"subtractive_dithering(omega=1, coder={coder})"), gaussian(1000)
        here, there = counted(c, x, Spec.flat(1000), None), counted(c, x, Spec.flat(1000), device)
        assert (there.encode, there.decode, there.decode_add) == (1, 1, 1)
        assert there.data == here.data
        assert same(there.decoded, here.decoded)


@pytest.mark.parametrize("kind", ["classes", "escapes", "short", "zero", "not finite", "very many escapes", "plain levels"])
def test_residuals_are_those_of_the_cpu(kind: str, device: Device) -> None:
    x, spec = uneven(SHAPES)
    if kind == "escapes":
        x[7] = 1000 * x.abs().max()
    elif kind == "short":
        x, spec = x[:900], Spec.flat(900)
    elif kind == "zero":
        x = 0 * x
    elif kind == "not finite":
        x[8] = math.inf
    omega = {"very many escapes": 1e-6, "plain levels": 1e-10, "escapes": 0.05}.get(kind, 1)
    c = parse(f"error_feedback(subtractive_dithering(omega={omega}), decay=1)")
    here, there = counted(c, x, spec, None), counted(c, x, spec, device)
    assert there.data == here.data
    assert there.encode == 1 or omega < 0.01
    assert same(device.back(there.state.residual), here.state.residual)


def test_sums_of_messages_are_those_of_the_cpu() -> None:
    c, (x, spec) = SubtractiveDithering(omega=1), uneven(SHAPES)
    contexts = [Context(seed=3, sender=k) for k in range(8)]
    messages = [c.encode(x * (k - 3), spec, None, ctx)[0] for k, ctx in enumerate(contexts)]
    expected = c.decode_sum(messages, spec, contexts, torch.empty_like(x), 0.125)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
        assert same(c.decode_sum(messages, spec, contexts, torch.empty_like(x), 0.125), expected)


def test_replays_write_what_launches_write() -> None:
    x, spec = uneven(SHAPES)
    c, out, most = SubtractiveDithering(omega=0.5), torch.empty_like(x), SubtractiveDithering(omega=0.5).max_nbytes(spec)
    with replaying():
        for turn in range(4):
            ctx, given = Context(seed=turn, step=9 * turn, sender=turn), x.roll(turn % 2)
            data = [torch.zeros(most, dtype=torch.uint8) for _ in range(2)]
            arguments = (given, 0.5, False, 0, ctx)
            lengths = [int(ops.subtractive_encode(*arguments, to, spec.layout)) for ops, to in zip((native, subtractive), data)]
            assert lengths[0] == lengths[1]
            assert torch.equal(*data)
            found = subtractive.subtractive_decode(data[0][: lengths[0]], False, ctx, out, None, spec.layout)
            assert same(found, c.decode(Message(data[0], lengths[0]), spec, ctx))


# Reading what no encoder writes


def decoded(backend: Any, data: Tensor, numel: int, layout: Tensor) -> Tensor | None:
    try:
        found: Tensor = backend.subtractive_decode(data, False, CTX, torch.zeros(numel), None, layout)
    except CorruptMessage:
        return None
    return found


@pytest.mark.parametrize("kind", ["plain", "classes", "escapes", "raw"])
def test_damaged_messages_are_refused_or_decode_alike(kind: str) -> None:
    rng = random.Random(1)
    x, spec = uneven(((250, 60),)) if kind == "classes" else (gaussian(3000), Spec.flat(3000))
    if kind == "escapes":
        x = x * torch.exp(1.5 * gaussian(3000, 1))
    c = SubtractiveDithering(omega={"plain": 1.0, "escapes": 0.02, "raw": 3e-5, "classes": 0.2}[kind], coder="rans")
    data = c.encode(x, spec, None, CTX)[0].payload.clone()
    assert classed(data.numpy().tobytes()) == (kind == "classes")
    refused = 0
    with emulated():
        for trial in range(40):
            bad = data.clone()
            if trial < 12:
                bad = bad[: rng.randrange(4, bad.numel())]
            else:
                for _ in range(rng.randrange(1, 3)):
                    bad[rng.randrange(bad.numel()) if trial % 3 else rng.randrange(30)] ^= 1 << rng.randrange(8)
            expected, found = (decoded(b, bad, x.numel(), spec.layout) for b in (native, subtractive))
            assert (expected is None) == (found is None), trial
            assert expected is None or found is None or same(expected, found), trial
            refused += found is None
    assert refused > 12


def test_lengths_have_one_form() -> None:
    """Varints of more bytes than they need, of more than ten, and beyond 64 bits."""
    x, spec = gaussian(3000), Spec.flat(3000)
    data = SubtractiveDithering(omega=1.0).encode(x, spec, None, CTX)[0].payload.numpy().tobytes()
    assert data[10] == 0
    for length in (b"\x80\0", b"\x80" * 9 + b"\2", b"\x80" * 10 + b"\0", b"\xff" * 9 + b"\1"):
        bad = torch.tensor(list(data[:10] + length + data[11:]), dtype=torch.uint8)
        with emulated():
            assert decoded(native, bad, 3000, spec.layout) is decoded(subtractive, bad, 3000, spec.layout) is None


def test_steps_are_normal_numbers() -> None:
    x, spec = gaussian(3000), Spec.flat(3000)
    data = SubtractiveDithering(omega=1.0).encode(x, spec, None, CTX)[0].payload.numpy().tobytes()
    with emulated():
        for step in (math.inf, math.nan, -1.0, 1e-40, -0.0, 0.0):
            bad = torch.tensor(list(data[:4] + struct.pack("<f", step) + data[8:]), dtype=torch.uint8)
            assert decoded(native, bad, 3000, spec.layout) is decoded(subtractive, bad, 3000, spec.layout) is None


@pytest.mark.parametrize("kind", ["accept", "reject"])
def test_committed_vectors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages, the short ones with tables by the kernels too."""
    monkeypatch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
    monkeypatch.setattr(subtractive, "SHORT", 0)
    found = 0
    with emulated():
        for entry in json.loads((VECTORS / f"{kind}.json").read_text()):
            if "subtractive_dithering" not in entry["file"]:
                continue
            found += 1
            listed = entry.get("pieces")
            parts = listed and tuple(Piece(tuple(p["shape"]), p["start"], p["stop"], p["name"]) for p in listed)
            data = (VECTORS / entry["file"]).read_bytes()
            with contextlib.nullcontext() if kind == "accept" else pytest.raises(CorruptMessage):
                assert f"{zlib.crc32(make_vectors.from_package(data, parts)):08x}" == entry["decoded_crc32"], entry
    assert found > 5


def test_reference_is_what_native_is() -> None:
    x, spec = uneven(SHAPES)
    most = SubtractiveDithering(omega=1.0).max_nbytes(spec)
    data = [torch.zeros(most, dtype=torch.uint8) for _ in range(2)]
    lengths = [
        int(ops.subtractive_encode(x, 1.0, False, 0, CTX, to, spec.layout)) for ops, to in zip((native, reference), data)
    ]
    assert lengths[0] == lengths[1]
    assert torch.equal(*data)
