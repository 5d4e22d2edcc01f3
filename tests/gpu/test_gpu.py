"""On a GPU: every operation, every compressor and every vector of the format give the bytes and values of the CPU."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from benchmarks import gpu
from torch import Tensor

import tersegrad
from tersegrad import Context, Message, Spec, Stats, kernels
from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, needs_second_moment
from tersegrad.core.sums import decode_sum, sums_at_once
from tersegrad.kernels import native, reference
from tersegrad.kernels.cuda import aims, dither, rans, replay, select, trellis
from tests.kernels import agree
from tests.kernels.test_cuda_aims import VECTORS as AIMED
from tests.kernels.test_trellis import heavy
from tests.laws.cases import every_case
from tests.laws.inputs import uneven
from tests.laws.zoo import adversarial
from tests.spec.test_vectors import VECTORS, index, pieces

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REPLAYED = (
    "top_k(fraction=0.01)",
    "error_feedback(top_k(fraction=0.01))",
    "threshold(tau=2.5)",
    "sparse_dithering(nu=0.1)",
    "error_feedback(sparse_dithering(alpha=0.1))",
    "random_sparse_dithering(omega=1)",
    "subtractive_dithering(omega=1)",
    "error_feedback(subtractive_dithering(omega=1))",
    "trellis(alpha=0.1)",
    "dithered_trellis(omega=0.1)",
    "qsgd(bits=4, coder=rans)",
    "chunk_top_k(values=bins)",
    "chunk_top_k(k=20, values=sign)",
    "error_feedback(chunk_top_k(values=bf16), decay=0.95)",
)
FIXED = ("bf16", "fp16", "fp8", "int8", "int4", "sign", "natural", "natural_dithering(levels=8)", "qsgd(bits=4)")


@pytest.fixture(scope="module")
def operations() -> Any:
    assert kernels.backends(torch.device("cuda")) == ["cuda", "triton"]
    return kernels.get(torch.device("cuda"))


@pytest.mark.parametrize("topic", ["casts", "refused", "blocks", "splits", "added", "sums", "rotations", "tiles", "long"])
def test_operations_agree(topic: str, operations: Any) -> None:
    cases = {
        "casts": lambda: agree.casts((1, 333, 70001)),
        "refused": lambda: agree.refused((1, 7, 10, 70001)),
        "blocks": lambda: agree.blocks((5, 1100, 70001)),
        "splits": lambda: agree.splits((5, 1100, 70001)),
        "added": lambda: agree.added_up((1, 77, 70001)),
        "sums": lambda: agree.sums((1, 333, 70001)),
        "rotations": lambda: agree.rotations(((1, 4096), (77, 16), (300, 256), (8200, 8192), (140000, 65536))),
        "tiles": agree.tiles,
        "long": agree.long_ones,
    }
    assert agree.differences(operations, lambda t: t.cuda(), cases[topic]()) == []


def test_rans_agrees() -> None:
    generator = torch.Generator().manual_seed(1)
    for n, alphabet, chunk in ((700, 7, 14), (300_001, 31, 16), (100_000, 256, 14), (70_000, 3, 14), (300_000, 9, 18)):
        symbols = (torch.randn(n, generator=generator) * alphabet / 8 + alphabet / 2).clamp(0, alphabet - 1).to(torch.uint8)
        expected, found = torch.zeros(n + 1, dtype=torch.uint8), torch.zeros(n + 1, dtype=torch.uint8).cuda()
        length = int(reference.rans_encode(symbols, alphabet, None, 1, True, chunk, expected))
        assert int(rans.rans_encode(symbols.cuda(), alphabet, None, 1, True, chunk, found)) == length
        assert torch.equal(found.cpu(), expected)
        decoded = torch.empty_like(symbols).cuda()
        rans.rans_decode(found[:length], alphabet, None, 1, decoded)
        assert torch.equal(decoded.cpu(), symbols)


def test_selection_agrees() -> None:
    generator = torch.Generator().manual_seed(1)
    for x in (torch.randn(1_000_003, generator=generator), torch.randint(-2, 3, (500_000,), generator=generator).float()):
        for k in (1, 5000, 400_000):
            for a, b in zip(reference.select_top_k(x, k), select.select_top_k(x.cuda(), k), strict=True):
                assert agree.same(a, b)


@pytest.mark.parametrize(
    "shapes",
    [
        ((768, 768), (768,), (9, 4096), (33,)),
        ((64, 64, 3, 3), (64,), (128, 60, 3, 3), (700, 1), (2, 70_000)),
        (*((64,), (65,), (3,)) * 700, (20_000, 17)),
        ((1 << 19,),),
    ],
)
@pytest.mark.parametrize(("nu", "ctx"), [(0.3, None), (0.01, None), (1e-4, Context(seed=3, step=9))])
def test_scale_classes_agree(shapes: tuple[tuple[int, ...], ...], nu: float, ctx: Context | None) -> None:
    x, spec = uneven(shapes)
    if len(shapes) == 1:
        x *= torch.exp2(2 * torch.randn(x.numel() // 256, generator=torch.Generator().manual_seed(1))).repeat_interleave(256)
    layout, results = spec.layout, []
    for backend, y in ((native if native.available() else reference, x), (dither, x.cuda())):
        data, left = y.new_zeros(reference.dither_max_bytes(y.numel()), dtype=torch.uint8), torch.zeros_like(y)
        length, norm, error = backend.dither_encode(y, nu, 0.0, 1, 0, ctx, data, left, torch.zeros_like(y), layout)
        results.append((length, data[: int(length)], norm, error, left))
    for expected, found in zip(*results, strict=True):
        assert agree.same(expected, found)
    # Some segment has them: kind 3, after the lengths of all segments.
    segments = max(1, (x.numel() + (1 << 17)) >> 18)
    at, kinds = 4 + (4 * segments if segments > 1 else 0), set()
    for s in range(segments):
        kinds.add(int(results[0][1][at]))
        at += int(results[0][1][4 + 4 * s : 8 + 4 * s].view(torch.int32)) if segments > 1 else 0
    assert 3 in kinds
    y, data = x.cuda(), results[1][1].clone()
    room, out = torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8, device="cuda"), torch.empty_like(y)
    assert gpu.synchronisations(lambda: dither.dither_encode(y, nu, 0.0, 1, 0, ctx, room, None, None, layout)) == 1
    assert gpu.synchronisations(lambda: dither.dither_decode(data, out, None, layout)) == 1


@pytest.mark.parametrize("ctx", [None, Context(seed=2**63 + 3, step=9)])
@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_trellis_codes_agree(states: int, ctx: Context | None) -> None:
    """Whole and partial runs and segments, escapes, ties, rows; bytes, norm, error and values, also added to others."""
    generator = torch.Generator().manual_seed(1)
    rows, spec = uneven(((700, 300), (512, 40, 3, 3), (40,)), spread=1.5)
    cases: list[tuple[Tensor, float, int, Tensor | None]] = [
        (torch.randn(n, generator=generator), 0.5, chunk, None)
        for n, chunk in ((1 << 14, 0), (33_001, 14), (100_003, 15), (700_001, 0), (1 << 20, 18))
    ]
    cases += [(heavy(400_000), 0.5, 0, None), (torch.randint(-8, 9, (300_000,), generator=generator) / 4, 1.0, 0, None)]
    cases += [
        (rows, 2.0, 0, spec.layout),
        (torch.randn(300_000, generator=generator), 0.5, 0, torch.tensor([300_000, 1000, 1, 0])),
    ]
    cpu = native if native.available() else reference
    for x, step, chunk, layout in cases:
        results = []
        for backend, y in ((cpu, x), (trellis, x.cuda())):
            data = y.new_zeros(reference.trellis_max_bytes(y.numel()), dtype=torch.uint8)
            length, norm, error = backend.trellis_encode(y, step, states, chunk, ctx, data, layout)
            data = data[: int(length)]
            read = [torch.linspace(-1, 1, y.numel()).to(y.device) for _ in range(2)]
            for out, weight in zip(read, (None, 0.3), strict=True):
                backend.trellis_decode(data, states, ctx, out, weight, layout)
            results.append((length, data, norm, error, *read))
        for expected, found in zip(*results, strict=True):
            assert agree.same(expected, found), (x.numel(), chunk)


@pytest.mark.parametrize("kind", AIMED)
def test_steps_agree(kind: str) -> None:
    """Found on the device, bit for bit those of the CPU; long vectors have samples of two sizes."""
    cpu = native if native.available() else reference
    for n in (70_001, 300_001, 4_300_001, 40_000_003):
        x = AIMED[kind](n)
        y = x.cuda()
        assert agree.same(cpu.norm_step(x, 0.1 / n, 1.0, 1.0, 1.0), aims.norm_step(y, 0.1 / n, 1.0, 1.0, 1.0)), n
        for alpha in (0.5, 0.03):
            assert agree.same(cpu.dither_aim(x, alpha), aims.dither_aim(y, alpha)), (n, alpha)
            assert agree.same(cpu.trellis_aim(x, alpha, 0.26, 8), aims.trellis_aim(y, alpha, 0.26, 8)), (n, alpha)
    assert gpu.synchronisations(lambda: aims.dither_aim(y, 0.1)) == 0
    for states in (4, 8, 16, 32):
        assert agree.same(cpu.trellis_aim(x, 0.2, 0.26, states), aims.trellis_aim(y, 0.2, 0.26, states)), states
        assert gpu.synchronisations(lambda: aims.trellis_aim(y, 0.2, 0.26, states)) == 0  # noqa: B023


@pytest.mark.parametrize(
    "text",
    [
        "sparse_dithering(alpha=0.1)",
        "sparse_dithering(nu=0.1, scale=global)",
        "trellis(nu=0.1)",
        "trellis(alpha=0.1)",
        "dithered_trellis(omega=0.1)",
        "natural(coder=rans)",
        "error_feedback(sparse_dithering(alpha=0.1))",
        "error_feedback(trellis(nu=0.1))",
    ],
)
def test_messages_are_read_once(text: str) -> None:
    n = 6_815_744
    x = torch.randn(n, generator=torch.Generator().manual_seed(3))
    c, spec, ctx = tersegrad.parse(text), Spec.flat(n), Context(seed=3)
    y, state = x.cuda(), c.init(spec, "cuda")
    assert gpu.synchronisations(lambda: c.encode(y, spec, state, ctx)) == 1
    expected, found = (c.encode(v, spec, c.init(spec, v.device), ctx) for v in (x, y))
    assert torch.equal(expected[0].payload, found[0].payload.cpu())
    if state is not None:
        assert agree.same(expected[1].residual, found[1].residual)


def _message(text: str, x: Tensor, device: str) -> tuple[Tensor, Tensor]:
    compressor, spec, ctx = tersegrad.parse(text), Spec.flat(x.numel(), x.dtype), Context(seed=3, step=9, buffer=1, sender=2)
    y = x.to(device)
    stats = Stats(y.float().square() * 0.3 + 1e-12) if needs_second_moment(compressor) else None
    message = compressor.encode(y, spec, compressor.init(spec, device), ctx, stats=stats)[0]
    data = message.data[: int(message.nbytes)]
    return data.cpu(), compressor.decode(Message(data, data.numel()), spec, ctx).cpu()


@every_case
def test_messages_are_those_of_the_cpu(text: str) -> None:
    for d in (0, 1, 65, 3000):
        for name, x in adversarial(d).items():
            for dtype in (torch.float32, torch.bfloat16):
                expected, found = _message(text, x.to(dtype), "cpu"), _message(text, x.to(dtype), "cuda")
                assert torch.equal(expected[0], found[0]), (d, name, dtype)
                assert agree.same(expected[1], found[1]), (d, name, dtype)


@every_case
def test_what_is_not_finite_is_not_finite_on_a_gpu(text: str) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    for bad in (torch.nan, torch.inf):
        x[77] = bad
        expected, found = _message(text, x, "cpu"), _message(text, x, "cuda")
        assert torch.equal(expected[0], found[0])
        assert agree.same(expected[1], found[1])


PACKED = ("int8", "int4", "qsgd(bits=4)", "qsgd(bits=3, norm=max, bucket=24)", "qsgd(bits=2, bucket=8192)")


@pytest.mark.parametrize("text", PACKED)
def test_residuals_are_those_of_the_cpu(text: str) -> None:
    """Error feedback in one pass: messages, residuals, what is not finite, and no wait."""
    c, ctx = tersegrad.parse(f"error_feedback({text})"), Context(seed=3, step=9)
    for d in (1, 3000, 300_001):
        spec = Spec.flat(d)
        states = [c.init(spec, device) for device in ("cpu", "cuda")]
        for step in range(4):
            x = torch.randn(d, generator=torch.Generator().manual_seed(step))
            if step == 2:
                x[d // 2] = torch.inf
            found = []
            for k, device in enumerate(("cpu", "cuda")):
                message, states[k] = c.encode(x.to(device), spec, states[k], ctx)
                found.append(message.payload.cpu())
            assert torch.equal(found[0], found[1]), (d, step)
            assert agree.same(states[0].residual, states[1].residual), (d, step)
        encode = functools.partial(c.encode, torch.randn(d, device="cuda"), spec, states[1], ctx)
        assert gpu.synchronisations(encode) == 0


@pytest.mark.parametrize(
    "text",
    ["bf16", "fp16", "sign", "natural", *PACKED, "error_feedback(qsgd(bits=4))", "by_tensor(int4, small=bf16, below=2000)"],
)
def test_sums_are_those_of_the_cpu(text: str) -> None:
    c: Any = tersegrad.parse(text)
    assert sums_at_once(c, torch.device("cuda"))
    spec = Spec.of(torch.zeros(1001), torch.zeros(300, 1000))
    contexts, messages = [Context(seed=3, sender=sender) for sender in range(11)], []
    for ctx in contexts:
        x = torch.randn(spec.numel, generator=torch.Generator().manual_seed(ctx.sender))
        messages.append(c.encode(x, spec, c.init(spec, "cpu"), ctx)[0])
    for weight in (1.0, 0.125):
        out = torch.full((spec.numel,), 7.0)
        expected = decode_sum(c, messages, spec, contexts, out, weight)
        there = [Message(m.payload.cuda(), m.nbytes) for m in messages]
        assert agree.same(expected, decode_sum(c, there, spec, contexts, out.cuda(), weight))


def _decode(data: bytes, entry: dict[str, Any]) -> Tensor:
    opened = frame.unpack(data, max_numel=1 << 26)
    known = pieces(entry)
    try:
        compressor = tersegrad.parse(opened.text)
    except BadConfiguration as error:
        raise CorruptMessage(str(error)) from error
    if compressor.wire_id != opened.wire_id:
        raise CorruptMessage("another wire id")
    spec = opened.spec if known is None else Spec(known, opened.dtype)
    message = opened.message.data.cuda()
    values = compressor.decode(Message(message, message.numel()), spec, opened.context).cpu()
    return torch.where(values.isnan(), torch.nan, values)


def test_every_accepted_vector_decodes_to_its_values() -> None:
    from spec import make_vectors

    for entry in index("accept"):
        data = (VECTORS / entry["file"]).read_bytes()
        expected = make_vectors.from_package(data, pieces(entry))
        assert _decode(data, entry).numpy().tobytes() == expected, entry


def test_every_rejected_vector_is_rejected() -> None:
    """By an error, or, where the length is right and nothing waits for the device, by values that are all NaN."""
    accepted = []
    for entry in index("reject"):
        with contextlib.suppress(CorruptMessage):
            values = _decode((VECTORS / entry["file"]).read_bytes(), entry)
            if not values.isnan().all():
                accepted.append(entry)
    assert accepted == []


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("text", REPLAYED)
def test_replays_have_the_bytes_of_launches(text: str, clustered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with other vectors, contexts, lengths and weights at the same places, on a stream and beside it."""
    numel, stream = 1_700_000, torch.cuda.Stream()
    slope = torch.linspace(-3, 3, numel).exp() if clustered else torch.ones(numel)
    vectors = [(torch.randn(numel, generator=torch.Generator().manual_seed(k)) * slope).cuda() for k in range(3)]

    def messages() -> list[list[Tensor]]:
        spec, c = Spec.flat(numel), tersegrad.parse(text)
        assert isinstance(c, Accumulator)
        state, x, out = c.init(spec, "cuda"), torch.empty(numel, device="cuda"), torch.empty(numel, device="cuda")
        room, rows = torch.empty(c.max_nbytes(spec), dtype=torch.uint8, device="cuda"), []
        for step in range(7):
            ctx = Context(seed=step % 2, step=step, sender=step % 3)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream if step % 4 == 3 else torch.cuda.current_stream()):
                x.copy_(vectors[step % 3])
                message, state = c.encode(x, spec, state, ctx, out=room)
                sent = Message(message.payload.clone(), int(message.nbytes))
                decoded = c.decode(sent, spec, ctx, out).clone()
                added = c.decode_add(sent, spec, ctx, torch.ones(numel, device="cuda"), 0.5 + step)
            torch.cuda.current_stream().wait_stream(stream)
            rows.append([sent.payload.cpu(), decoded.cpu(), added.cpu()])
        return rows

    replay.clear()
    replayed = messages()
    known = list(replay._known.values())
    assert any(known)
    assert None not in known
    monkeypatch.setattr(replay, "kinds", frozenset())
    for found, expected in zip(replayed, messages()):
        assert all(map(torch.equal, found, expected))
    replay.clear()


@pytest.mark.parametrize("text", FIXED)
def test_fixed_rates_never_wait_for_the_device(text: str) -> None:
    x = torch.randn(100_000, device="cuda")
    compressor, spec, ctx = tersegrad.parse(text), Spec.flat(x.numel()), Context()
    encode = gpu.encoder(compressor, x, spec, ctx)
    message = encode()
    assert gpu.synchronisations(encode) == 0
    assert gpu.synchronisations(lambda: compressor.decode(message, spec, ctx)) == 0


@pytest.mark.parametrize("text", FIXED)
def test_fixed_rates_run_in_a_graph(text: str) -> None:
    """What was captured once encodes and decodes whatever lies in its memory."""
    x, out = torch.randn(100_000, device="cuda"), torch.empty(100_000, device="cuda")
    compressor, spec, ctx = tersegrad.parse(text), Spec.flat(x.numel()), Context(seed=3)
    room = torch.empty(compressor.max_nbytes(spec), dtype=torch.uint8, device="cuda")

    def step() -> None:
        message, _ = compressor.encode(x, spec, None, ctx, out=room)
        compressor.decode(message, spec, ctx, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        x.copy_(torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        message, _ = compressor.encode(x.cpu(), spec, None, ctx)
        assert torch.equal(room.cpu()[: int(message.nbytes)], message.payload)
        assert torch.equal(out.cpu(), compressor.decode(message, spec, ctx))


VARIABLE = (
    "top_k(fraction=0.01)", "top_k(fraction=0.01, values=bf16)", "sparse_dithering(nu=0.1)", "random_sparse_dithering(omega=1)",
    "error_feedback(top_k(fraction=0.01))", "error_feedback(sparse_dithering(nu=0.1))", "threshold(tau=2.5)",
    "top_k(fraction=0.01, exact=false)", "qsgd(levels=4, coder=rans)", "trellis(nu=0.1)", "dithered_trellis(omega=0.1)",
    "trellis(nu=0.1, states=32)", "natural(coder=rans)",
    "chunk_top_k", "chunk_top_k(values=sign)", "sparse_loco",
)  # fmt: skip


@pytest.mark.parametrize("text", VARIABLE)
def test_other_rates_wait_seldom_and_allocate_nothing_new(text: str) -> None:
    x = torch.randn(1 << 22, device="cuda")
    compressor, spec, ctx = tersegrad.parse(text), Spec.flat(x.numel()), Context()
    encode, out = gpu.encoder(compressor, x, spec, ctx), torch.empty_like(x)
    message = encode()
    data = message.data[: int(message.nbytes)].clone()

    def decode() -> None:
        compressor.decode(Message(data, data.numel()), spec, ctx, out=out)

    assert gpu.synchronisations(encode) <= 1
    assert gpu.synchronisations(decode) <= 2
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(10):
        encode()
        decode()
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "vgc(alpha=8)",
        "vgc(alpha=8, residual=keep)",
        "vgc(alpha=8, values=sign, residual=keep)",
        "vgc(alpha=8, values=bf16, residual=keep)",
        "hybrid(alpha=8, tau=0.5)",
        "threshold(tau=2.45, values=sign)",
    ],
)
def test_variance_based_messages_stay_on_the_device(text: str, clustered: bool) -> None:
    """Bytes, values and states of several steps, which are replayed, with one tensor and with many; who waits how often."""
    numel = 6_815_744
    slope = torch.linspace(0, 1.2, numel) ** 4 if clustered else torch.ones(numel)
    vectors = [(torch.randn(numel, generator=torch.Generator().manual_seed(k)) * slope) for k in range(3)]
    small = [torch.empty(n) for n in (3, 1, 70, 4099) * 200]
    specs = (Spec.flat(numel), Spec.of(torch.empty(numel - sum(t.numel() for t in small)), *small))
    c, ctx = tersegrad.parse(text), Context()
    assert isinstance(c, Accumulator)
    for spec in specs:
        states: list[Any] = [c.init(spec, device) for device in ("cpu", "cuda")]
        for step in range(4):
            x = vectors[step % 3] if step < 3 else vectors[0] * torch.exp2(20 * vectors[1])
            found: list[list[Tensor]] = []
            for k, device in enumerate(("cpu", "cuda")):
                stats = Stats(torch.full((numel,), 0.75, device=device))
                message, states[k] = c.encode(x.to(device), spec, states[k], ctx, stats=stats)
                sent = Message(message.payload.clone(), int(message.nbytes))
                added = c.decode_add(sent, spec, ctx, torch.ones(numel, device=device), 0.3)
                kept = [] if states[k] is None else [states[k].r, states[k].v]
                found.append([sent.data, c.decode(sent, spec, ctx), added, *kept])
            for expected, there in zip(*found, strict=True):
                assert agree.same(expected, there), (step, len(spec.pieces))
        y, state, stats = vectors[0].cuda(), c.init(spec, "cuda"), Stats(torch.full((numel,), 0.75, device="cuda"))
        message, _ = c.encode(y, spec, state, ctx, stats=stats)
        # Not written on the host.
        assert message.host is None
        sent = Message(message.payload.clone(), int(message.nbytes))
        assert gpu.synchronisations(lambda: c.encode(y, spec, state, ctx, stats=stats)) <= 1  # noqa: B023
        assert gpu.synchronisations(lambda: c.decode(sent, spec, ctx)) <= 2  # noqa: B023


def test_more_than_two_to_the_31_coordinates(operations: Any) -> None:
    n = (1 << 31) + 5
    if torch.cuda.mem_get_info()[0] < 20 * n:
        pytest.skip("needs 43 GB of device memory")
    x = torch.randn(1 << 20, device="cuda").repeat(n // (1 << 20) + 1)[:n]
    data, out = torch.empty(2 * n, dtype=torch.uint8, device="cuda"), torch.empty(n, device="cuda")
    operations.bf16_encode(x, data)
    operations.bf16_decode(data, out)
    for part in (slice(0, 100), slice(n - 100, n), slice((1 << 31) - 50, (1 << 31) + 5)):
        assert torch.equal(out[part].cpu(), x[part].cpu().bfloat16().float())
