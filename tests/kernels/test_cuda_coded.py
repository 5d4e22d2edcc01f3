"""Whole messages of levels and exponents with one table: the CUDA kernels in the emulation against the reference and the compressors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import Context, Message, Piece, Spec, kernels, parse
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import coded
from tersegrad.kernels.schema_codes import Means
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

CTX = Context(seed=3, step=5, sender=1)
MEANS: tuple[Means, ...] = ("levels", "exponents", "folded")
TEXTS = (
    "qsgd(levels=1, bucket=64, coder=rans, chunk=14)",
    "qsgd(levels=100, bucket=512, coder=rans, chunk=14)",
    "qsgd(levels=4, bucket=1536, coder=rans, chunk=15)",
    "natural(coder=rans, chunk=14)",
)


def _vectors() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for n in (1, 40, 900, 20_003, 40_000):
        yield torch.randn(n, generator=generator) * 0.1
    yield torch.full((700,), -0.5)
    # All symbols are equally frequent: raw.
    yield torch.exp2(torch.randint(-8, 8, (3000,), generator=generator).float())


def _message(c: Any, x: Tensor) -> Tensor:
    message: Message = c.encode(x, Spec.of(x), None, CTX)[0]
    return message.data[: int(message.nbytes)].clone()


def _decoded(ops: Any, c: Any, data: Tensor, out: Tensor) -> int:
    given = (c.s, c.bucket) if c.name == "qsgd" else ()
    return int(getattr(ops, "coded_levels_decode" if given else "coded_exponents_decode")(data, *given, out))


def _front(c: Any, numel: int) -> int:
    return 1 + c.steps_nbytes(numel) if c.name == "qsgd" else 3 + -(-numel // 8)


@pytest.mark.parametrize("text", TEXTS)
def test_messages_are_decoded_as_by_the_reference(text: str) -> None:
    c, normal = parse(text), 0
    for x in _vectors():
        data = _message(c, x)
        if data[0] != 0:
            continue
        normal += 1
        # One byte behind an aligned address.
        apart = torch.cat((data[:1], data))[1:]
        for dtype in (torch.uint8,) if c.name == "qsgd" and c.bucket % 512 else (torch.float32, torch.uint8):
            expected, found = (torch.full((x.numel(),), 7, dtype=dtype) for _ in range(2))
            assert _decoded(reference, c, data, expected) == 0
            with emulated():
                assert _decoded(coded, c, apart, found) == 0
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (x.numel(), dtype)
            if dtype == torch.float32:
                assert same(expected, c.decode(Message(data, data.numel()), Spec.of(x), CTX))
    assert normal >= 3


def test_a_step_that_is_not_finite_makes_all_of_it_nan() -> None:
    c, x = parse("qsgd(levels=4, bucket=512, coder=rans, chunk=14)"), torch.randn(20_000)
    data = _message(c, x)
    data[1 + 4 * 20 : 5 + 4 * 20] = torch.tensor([0, 0, 0x80, 0x7F])
    found = torch.ones(20_000)
    with emulated():
        assert _decoded(coded, c, data, found) == 0
    assert bool(found.isnan().all())


@pytest.mark.parametrize("text", TEXTS[1:])
def test_damaged_messages_are_refused_as_by_the_reference(text: str) -> None:
    c, generator = parse(text), torch.Generator().manual_seed(1)
    x = torch.randn(17_000, generator=generator)
    data, front, refused = _message(c, x), _front(parse(text), 17_000), 0
    with emulated():
        for trial in range(40):
            bad = data.clone()
            if trial < 8:
                bad = bad[: front + 1 + int(torch.randint(0, bad.numel() - front - 1, (), generator=generator))]
            elif trial < 12:
                bad = torch.cat((bad, bad[: trial - 7]))
            else:
                low = (0, front, front)[trial % 3]
                at = low + int(torch.randint(0, (3, 20, data.numel() - front)[trial % 3], (), generator=generator))
                bad[at] ^= 1 << trial % 8
            outs = [torch.ones(x.numel()), torch.ones(x.numel())]
            wrong = [_decoded(ops, c, bad, out) != 0 for ops, out in zip((reference, coded), outs)]
            assert wrong[0] == wrong[1], trial
            assert wrong[0] or same(*outs), trial
            refused += wrong[0]
    assert refused > 20


@pytest.mark.parametrize("text", TEXTS)
def test_compressors_read_the_same_where_there_are_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c: Any = parse(text)
    overlaid = kernels.overlay(native, cuda) if native.available() else kernels.overlay(cuda)
    for x in (*_vectors(), torch.zeros(900), torch.tensor([1.0, torch.nan])):
        data, spec = _message(c, x), Spec.of(x)
        message, start = Message(data, data.numel()), torch.linspace(-1, 1, x.numel())
        expected = c.decode(message, spec, CTX), c.decode_add(message, spec, CTX, start.clone(), 0.3)
        with monkeypatch.context() as patch, replaying():
            patch.setitem(vars(kernels)["_chosen"], "cpu", overlaid)
            for _ in range(3):
                assert same(c.decode(message, spec, CTX), expected[0])
                assert same(c.decode_add(message, spec, CTX, start.clone(), 0.3), expected[1])
            kept = start.clone()
            with pytest.raises(CorruptMessage):
                c.decode_add(Message(torch.cat((data, data[:1])), data.numel() + 1), spec, CTX, kept, 0.3)
            assert same(kept, start)


def _tried(ops: Any, codes: Tensor, means: Means, layout: Tensor, part: tuple[int, int], room: int, alphabet: int = 41) -> Any:
    """What the operation tells, and what it writes in front and behind; steps of which one is missing."""
    head, out = torch.full((3,), 9, dtype=torch.uint8), torch.full((room + 1,), 9, dtype=torch.uint8)[1:]
    steps = torch.tensor([0.0, 1e-40, torch.inf]).view(torch.uint8) if means == "levels" else None
    told = ops.rans_encode_trying(codes, means, alphabet, 14, head, out, layout, part, steps).tolist()
    return told, head.tolist(), out[: told[0]].tolist() if 0 <= told[0] <= room else out.tolist()


def _coded(levels: Tensor, means: Means) -> Tensor:
    """Bytes that mean these levels."""
    if means == "levels":
        return levels.to(torch.int8).view(torch.uint8)
    if means == "folded":
        return (2 * levels.abs() + (levels < 0)).to(torch.uint8)
    return torch.where(levels == 0, 0, 141 - levels.abs()).to(torch.uint8)


@pytest.mark.parametrize("means", MEANS)
def test_bytes_are_coded_while_classes_are_tried(means: Means) -> None:
    """Where there are too many escapes nobody knows about classes; where the message does not fit it is not written."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(700, 40, generator=generator) * torch.exp2(torch.arange(700) % 5.0)[:, None] * 0.3
    flat = torch.randn(20_000, generator=generator)
    wide = torch.randint(-15, 16, (150_000,), generator=generator).float()
    wide[::1000] = 17
    for x, width, room, classed in (
        (rows.flatten(), 40, 28_000, 1),
        (flat, 100, 20_000, 0),
        (wide, 1000, 150_000, -1),
        (flat, 100, 600, 0),
        (torch.zeros(9000), 90, 9000, 0),
    ):
        codes, layout = _coded(x.round().clamp(-20, 20), means), torch.tensor([x.numel(), width, 1, 0])
        given = (codes, means, layout, (0, x.numel()), room)
        expected = _tried(reference, *given)
        with emulated():
            found = _tried(coded, *given)
        assert found[0][1] == classed
        assert found[0][1] < 0 or found[0] == expected[0]
        assert found[0][2:] == expected[0][2:]
        assert found[1:] == expected[1:]
        assert (found[0][0] > room) == (room == 600)


def test_a_part_is_looked_at() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30_000, generator=generator)
    x[10_240:20_480] *= torch.exp2(torch.arange(10_240) // 64 % 5.0) * 0.3
    codes, layout = _coded(x.round().clamp(-20, 20), "levels"), torch.tensor([6000, 50, 1, 0, 24_000, 64, 1, 16])
    told = []
    for part in ((0, 10_240), (10_240, 20_480)):
        expected = _tried(reference, codes, "levels", layout, part, 30_000)
        with emulated():
            assert _tried(coded, codes, "levels", layout, part, 30_000) == expected
        told.append(expected[0][1])
    assert told == [0, 1]


def test_bytes_that_mean_no_symbol_are_told() -> None:
    codes, layout = _coded(torch.arange(-20, 21).repeat(50), "levels"), torch.tensor([2050, 50, 1, 0])
    with emulated():
        assert _tried(coded, codes, "levels", layout, (0, 2050), 3000, alphabet=39)[0][0] == -1


@pytest.mark.parametrize("text", [*TEXTS, "natural_dithering(levels=8, coder=rans)"])
def test_compressors_write_the_same_where_there_are_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c: Any = parse(text)
    overlaid = kernels.overlay(native, cuda) if native.available() else kernels.overlay(cuda)
    rows = torch.randn(500, 40, generator=torch.Generator().manual_seed(1)) * torch.exp2(-(torch.arange(500) % 7.0))[:, None]
    shaped = Spec((Piece((500, 40), 0, 20_000, "weight"),))
    cases = [(x, Spec.of(x)) for x in (*_vectors(), torch.zeros(2000), torch.full((2000,), torch.inf))]
    modes = set()
    for x, spec in (*cases, (rows.flatten(), shaped)):
        expected, _ = c.encode(x, spec, None, CTX)
        data = expected.data[: expected.nbytes]
        modes.add(int(data[0]))
        with monkeypatch.context() as patch, replaying():
            patch.setitem(vars(kernels)["_chosen"], "cpu", overlaid)
            for _ in range(3):
                found, _ = c.encode(x, spec, None, CTX)
                assert found.nbytes == expected.nbytes
                assert torch.equal(found.data[: found.nbytes], data), (text, x.numel())
    assert {0, 1, 2, 4} <= modes
