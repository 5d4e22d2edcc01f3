"""Nothing waits for a device: how often the host does, for every compressor, counted on a simulated one.

Fixed-rate messages are written and read without waiting, all others take at most one read each. The bytes and what they decode to
are those of the CPU. ``python -m tests.laws.test_waiting`` prints the counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import sparse
from tersegrad.compressors import Threshold, TopK
from tersegrad.core.protocol import Accumulator, Context, Guarantee, Message, Spec, Stats, codes_on_host, has_fixed_size
from tersegrad.core.stateless import FixedRate
from tersegrad.kernels import native
from tersegrad.recipes import parse
from tersegrad.wrappers import ErrorFeedback
from tests.device import Device
from tests.laws.cases import CASES, every_case
from tests.laws.inputs import given, pieces, uneven

CTX = Context(seed=1234, step=5, buffer=2, sender=3)
NUMEL = 1000
# A meter reads the error that it keeps.
READS = {"metered(sign)": 1}
# What still waits more often: a residual at the host moves there and back, and error feedback reads a transformed message again that
# its inner compressor had at the host. docs/assumptions.md says so.
NOT_YET = {
    "error_feedback(top_k(fraction=0.1), residual=int8, decay=0.95, place=cpu)": 2,
    "demo": 2,
    "distro": 2,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device without kernels of its own, so that the reference runs there."""
    monkeypatch.setattr(kernels, "FASTER", {"cpu": ("native",)})
    with Device() as made:
        yield made


def vector(numel: int = NUMEL, seed: int = 7) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True)
class Counts:
    """Waits of one message, and what came out."""

    encode: int
    decode: int
    decode_add: int | None
    data: bytes
    decoded: Tensor
    added: Tensor | None
    state: Any


def counted(c: Any, x: Tensor, spec: Spec, device: Device | None) -> Counts:
    """One message, on a device or on the CPU. The decoders get its bytes alone, as a receiver does."""
    there: Callable[[Tensor], Tensor] = device.to if device else torch.clone
    back: Callable[[Tensor], Tensor] = device.back if device else torch.clone

    def waits() -> int:
        count = device.count if device else 0
        if device:
            device.waits.clear()
        return count

    stats = given(c, x)
    if stats:
        stats = {"stats": Stats(there(stats["stats"].second_moment))}
    state = c.init(spec, device.device if device else "cpu")
    waits()
    message, after = c.encode(there(x), spec, state, CTX, **stats)
    encode = waits()
    nbytes = int(back(message.nbytes) if isinstance(message.nbytes, Tensor) else message.nbytes)
    data = back(message.data)[:nbytes]
    arrived = Message(there(data), nbytes)
    decoded = back(c.decode(arrived, spec, CTX))
    decode, decode_add, added = waits(), None, None
    if isinstance(c, Accumulator):
        added = back(c.decode_add(arrived, spec, CTX, there(torch.ones(spec.numel)), 0.5))
        decode_add = waits()
    return Counts(encode, decode, decode_add, data.numpy().tobytes(), decoded, added, after)


@every_case
def test_how_often_the_host_waits(text: str, device: Device) -> None:
    c, x, spec = parse(text), vector(), pieces(NUMEL)
    here, there = counted(c, x, spec, None), counted(c, x, spec, device)
    most = NOT_YET.get(text, 0 if has_fixed_size(c) else 1)
    assert there.encode <= READS.get(text, most)
    assert there.decode <= most
    assert (there.decode_add or 0) <= most
    assert there.data == here.data
    assert torch.equal(there.decoded, here.decoded)
    assert there.added is here.added is None or torch.equal(there.added, here.added)  # type: ignore[arg-type]


@every_case
def test_what_is_not_finite_needs_no_other_answer(text: str, device: Device) -> None:
    c, x, spec = parse(text), vector(), pieces(NUMEL)
    x[17] = float("nan")
    here, there = counted(c, x, spec, None), counted(c, x, spec, device)
    assert there.encode <= READS.get(text, NOT_YET.get(text, 0 if has_fixed_size(c) else 1))
    assert there.data == here.data
    assert torch.equal(there.decoded.isnan(), here.decoded.isnan())


def test_states_are_chosen_on_the_device(device: Device) -> None:
    """Error feedback keeps its residual where the buffer is not finite, and finds that out without waiting."""
    c, spec = parse("error_feedback(qsgd(norm=max))"), Spec.flat(NUMEL)
    x, bad = device.to(vector()), device.to(torch.full((NUMEL,), float("inf")))
    _, first = c.encode(x, spec, c.init(spec, device.device), CTX)
    _, second = c.encode(bad, spec, first, CTX)
    assert device.count == 0
    assert torch.equal(device.back(second.residual), device.back(first.residual))
    assert device.back(first.residual).any()


def test_a_message_that_was_written_on_the_host_is_not_read_again(device: Device) -> None:
    c, spec = ErrorFeedback(TopK(fraction=0.01)), Spec.flat(NUMEL)
    message, state = c.encode(device.to(vector()), spec, c.init(spec, device.device), CTX)
    assert device.count == 1
    c.decode(message, spec, CTX)
    assert device.count == 1
    kept = device.back(state.residual) != 0
    assert int(kept.sum()) == NUMEL - 10


def test_more_than_there_was_room_for_takes_a_second_read(device: Device) -> None:
    numel = 20_000
    c, x, spec = Threshold(tau=0.5), vector(numel), Spec.flat(numel)
    there = counted(c, x, spec, device)
    assert there.encode == 2
    assert there.data == counted(c, x, spec, None).data


@pytest.mark.parametrize("text", ["ternary", "rotated(ternary)", "rotated(int4)"])
def test_corrupt_fixed_rate_messages_decode_to_nan_on_a_device(text: str, device: Device) -> None:
    c, spec = parse(text), Spec.flat(64)
    message, _ = c.encode(vector(64), spec, c.init(spec, "cpu"), CTX)
    data = message.payload.clone()
    data[-1] = 255
    decoded = c.decode(Message(device.to(data), data.numel()), spec, CTX)
    assert device.count == 0
    assert device.back(decoded).isnan().all()


@dataclasses.dataclass(frozen=True)
class Looks(FixedRate):
    """A compressor that waits where it should not, in one of several ways."""

    way: str

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        ways: dict[str, Callable[[], object]] = {
            "a number": lambda: float(x.max()),
            "a truth": lambda: bool((x > 0).all()),
            "a list": lambda: x[:3].tolist(),
            "a copy": lambda: x.cpu(),
            "nonzero": lambda: x.nonzero(),
            "a mask": lambda: x[x > 0],
            "a literal": lambda: torch.tensor([1.0], device=x.device),
            "an upload": lambda: torch.ones(3).to(x.device),
            "nothing": lambda: None,
        }
        ways[self.way]()
        data.copy_(x.view(torch.uint8))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 0.0, sure=True)


@pytest.mark.parametrize(
    "way", ["a number", "a truth", "a list", "a copy", "nonzero", "a mask", "a literal", "an upload", "nothing"]
)
def test_the_count_sees_every_way_to_wait(way: str, device: Device) -> None:
    message, _ = Looks(way).encode(device.to(vector()), Spec.flat(NUMEL), None, CTX)
    assert device.count == (way != "nothing")
    assert torch.equal(device.back(message.data), vector().view(torch.uint8))


class Imagined:
    """A backend for the simulated device that codes dithered messages there, as a GPU's would."""

    __name__ = "imagined"
    OPERATIONS = ("dither_encode", "dither_decode", "dither_aim")

    def __init__(self, device: Device) -> None:
        self._device = device

    def dither_encode(self, x: Tensor, *rest: Any, layout: Tensor | None) -> tuple[Tensor, ...]:
        *numbers, out = rest
        arguments: list[Any] = [self._device.memory(x), *numbers, self._device.memory(out), None, None, layout]
        found = native.dither_encode(*arguments)
        # Numbers, on a CPU.
        return tuple(
            self._device.to(torch.as_tensor(t, dtype=torch.int64 if isinstance(t, int) else torch.float64)) for t in found
        )

    def dither_decode(self, data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None) -> Tensor:
        native.dither_decode(self._device.memory(data).contiguous(), self._device.memory(out), weight, layout)
        return out

    def dither_aim(self, x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("text", ["sparse_dithering(nu=0.1)", "random_sparse_dithering(omega=1)"])
def test_with_a_kernel_for_the_device_messages_stay_there(text: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam for a GPU: encoding waits for nothing, and a decoder only needs the length, which an exchange reads with all others."""
    c, x, spec = parse(text), vector(), Spec.flat(NUMEL)
    here = counted(c, x, spec, None)
    assert codes_on_host(c, device.device)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Imagined(device)))
    assert not codes_on_host(c, device.device)
    there = counted(c, x, spec, device)
    assert (there.encode, there.decode, there.decode_add) == (0, 0, 0)
    assert there.data == here.data
    assert torch.equal(there.decoded, here.decoded)
    # Whoever has no such kernels still codes on the host.
    assert codes_on_host(parse("spherical(alpha=0.5, block=4)"), device.device)


class Sparse:
    """A backend for the simulated device that chooses coordinates and codes index sets there; some of its operations tell a length."""

    __name__ = "sparse"
    QUIET = ("sparse_encode", "sparse_encode_gaps", "sparse_decode", "sparse_decode_gaps", "gap_classes", "gap_rests_encode")
    TELLING: tuple[str, ...] = ("golomb_encode", "golomb_decode", "rans_encode", "rans_decode", "gap_rests_decode")
    SELECTING = ("select_top_k", "select_top_k_of_sum", "sparse_scatter", "sparse_scatter_add", "all_finite")
    OPERATIONS: tuple[str, ...] = QUIET + TELLING + SELECTING
    # What they return is the host's.
    KNOWN: tuple[str, ...] = ("golomb_encode", "golomb_decode", "rans_encode", "rans_decode")

    def __init__(self, device: Device) -> None:
        for name in self.OPERATIONS:
            setattr(self, name, self._operation(device, name))

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = getattr(kernels.get(torch.device("cpu")), name)

        def there(*arguments: Any, **named: Any) -> Any:
            if name in self.TELLING:
                device.wait(name)
            found = real(*(device.memory(a) if isinstance(a, Tensor) and not a.is_cpu else a for a in arguments), **named)
            if name in self.KNOWN or found is None:
                return found
            return tuple(device.to(t) for t in found) if isinstance(found, tuple) else device.to(found)

        return there


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("text", ["top_k(fraction=0.01)", "top_k(fraction=0.01, values=bf16)"])
def test_long_index_sets_are_coded_where_they_were_chosen(
    text: str, clustered: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set takes one read on either side; entropy-coded gaps one more at first, which the next messages of their kind are spared."""
    numel = 1 << 21
    c, spec, x = parse(text), Spec.flat(numel), vector(numel)
    if clustered:
        x *= torch.linspace(-3, 3, numel).exp()
    monkeypatch.setattr(sparse, "_BEGUN", {})
    monkeypatch.setattr(sparse, "_GAPS", {})
    here = counted(c, x, spec, None)
    assert (253 in here.data[:6]) == clustered
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Sparse(device)))
    there = [counted(c, x, spec, device) for _ in range(2)]
    waits = [(t.encode, t.decode, t.decode_add) for t in there]
    assert waits == ([(2, 3, 1), (1, 1, 1)] if clustered else [(1, 1, 1), (1, 1, 1)])
    for found in there:
        assert found.data == here.data
        assert torch.equal(found.decoded, here.decoded)
        assert found.added is not None
        assert here.added is not None
        assert torch.equal(found.added, here.added)


def test_sets_of_changing_forms_have_the_bytes_of_the_cpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form the last set took decides what is tried first, and nothing else. A wrong guess costs one read."""
    numel = 1 << 21
    c, spec = TopK(fraction=0.01), Spec.flat(numel)
    plain, slope = vector(numel), torch.linspace(-3, 3, numel).exp()
    zeros, infinite = plain * slope, plain * slope
    zeros[17_000:] = 0
    infinite[5] = torch.inf
    monkeypatch.setattr(sparse, "_BEGUN", {})
    monkeypatch.setattr(sparse, "_GAPS", {})
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Sparse(device)))
    kinds = {"clustered": plain * slope, "steeper": plain * slope**3, "plain": plain, "zeros": zeros, "infinite": infinite}
    order = ["clustered", "clustered", "steeper", "plain", "plain", "clustered", "zeros", "clustered", "infinite", "clustered"]
    reads = []
    for kind in order:
        here, there = counted(c, kinds[kind], spec, None), counted(c, kinds[kind], spec, device)
        assert there.data == here.data
        assert torch.equal(there.decoded.nan_to_num(7.0), here.decoded.nan_to_num(7.0))
        reads.append(there.encode)
    assert reads == [2, 1, 1, 2, 1, 2, 2, 2, 1, 1]


class Levels(Sparse):
    """One that codes levels there, as CUDA's kernels do: the lengths of whole messages are told, what helps to choose is not."""

    __name__ = "levels"
    TELLING: tuple[str, ...] = ("rans_encode", "rans_decode", "dither_encode", "trellis_encode")
    KNOWN = TELLING
    OPERATIONS = (*TELLING, "rans_encode_trying", "dither_decode", "dither_aim", "trellis_decode", "trellis_aim", "norm_step")


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("text", "reads"), [("qsgd(bits=4, coder=rans)", 1), ("natural(coder=rans)", 1)])
def test_classes_are_tried_without_a_wait(
    text: str, reads: int, rows: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of lengths, with which everything else comes that is asked. One more where classes pay."""
    c, (x, spec) = parse(text), uneven(((600, 40), (130,)), spread=2.0)
    if not rows:
        x = vector(spec.numel)
    # Four segments and more are judged by one.
    for numel, known in ((spec.numel, spec), (5 << 18, Spec.flat(5 << 18))):
        y = x.repeat(-(-numel // spec.numel))[:numel]
        here = counted(c, y, known, None)
        assert (here.data[0] == 5) == rows or numel > spec.numel
        monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Levels(device)))
        there = counted(c, y, known, device)
        assert there.encode == reads + (here.data[0] == 5)
        assert there.decode <= 2
        assert there.data == here.data
        assert torch.equal(there.decoded, here.decoded)


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("sparse_dithering(alpha=0.1)", 1),
        ("error_feedback(sparse_dithering(alpha=0.1))", 1),
        ("sparse_dithering(nu=0.1, scale=global)", 1),
        ("trellis(alpha=0.1)", 1),
        ("trellis(nu=0.1)", 1),
        ("dithered_trellis(omega=0.1)", 1),
    ],
)
def test_steps_are_found_on_the_device(text: str, reads: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 1 << 18
    c, spec, x = parse(text), Spec.flat(numel), vector(numel)
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Levels(device)))
    there = counted(c, x, spec, device)
    assert there.encode <= reads
    assert there.data == here.data


@pytest.mark.parametrize(("kind", "reads"), [("zero", 1), ("not a number", 1), ("nothing in the sample", 8), ("short", 1)])
def test_a_step_for_what_a_sample_does_not_show(kind: str, reads: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not zero although its sample is takes its norm and other messages."""
    numel = 1000 if kind == "short" else 1 << 18
    c, spec, x = parse("sparse_dithering(alpha=0.1)"), Spec.flat(numel), vector(numel)
    if kind == "zero":
        x.zero_()
    elif kind == "not a number":
        x[0] = float("nan")
    elif kind == "nothing in the sample":
        x.view(-1, 4096)[::4] = 0
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Levels(device)))
    there = counted(c, x, spec, device)
    assert there.encode == reads
    assert there.data == here.data


class Verdicts(Levels):
    """One whose decoders tell whether a message was right."""

    __name__ = "verdicts"
    TELLING = (*Levels.TELLING, "dither_decode", "trellis_decode")


@pytest.mark.parametrize("numel", [3000, 1 << 15])
@pytest.mark.parametrize(
    "text", ["sparse_dithering(nu=0.1)", "sparse_dithering(alpha=0.1)", "trellis(nu=0.1)", "trellis(alpha=0.1)"]
)
def test_error_feedback_does_not_decode_what_it_sends(
    text: str, numel: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, x, spec = parse(f"error_feedback({text})"), vector(numel), Spec.flat(numel)
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Verdicts(device)))
    there = counted(c, x, spec, device)
    assert there.encode == 1
    assert there.data == here.data
    assert torch.equal(device.back(there.state.residual), here.state.residual)


@pytest.mark.parametrize("text", ["trellis(alpha=0.1)", "trellis(nu=0.1)", "trellis(bits=2)", "dithered_trellis(omega=0.1)"])
def test_short_trellis_codes_are_written_on_the_host(text: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one read, whatever is searched for."""
    c, x, spec = parse(text), vector(3000), Spec.flat(3000)
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Levels(device)))
    there = counted(c, x, spec, device)
    assert there.encode == 1
    assert there.data == here.data
    assert torch.equal(there.decoded, here.decoded)


class Looking(Levels):
    """One that reads as often as a search looks at the whole vector, as CUDA's does."""

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = super()._operation(device, name)

        def looks(*given: Any) -> Any:
            device.wait("a look")
            device.wait("another")
            return real(*given)

        return looks if name == "trellis_aim" else real


@pytest.mark.parametrize("text", ["trellis(alpha=0.1)", "error_feedback(trellis(alpha=0.1))"])
def test_a_search_that_no_sample_shortens_runs_on_the_host(text: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 1 << 16
    c, x, spec = parse(text), vector(numel), Spec.flat(numel)
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Looking(device)))
    there = counted(c, x, spec, device)
    assert there.encode == 1
    assert there.data == here.data
    assert torch.equal(there.decoded, here.decoded)


@pytest.mark.parametrize("numel", [900, 150_000])
@pytest.mark.parametrize("target", ["alpha=0.1", "nu=0.3", "bits=1"])
@pytest.mark.parametrize("name", ["sparse_dithering", "trellis"])
def test_chosen_levels_are_written_on_the_host(
    name: str, target: str, numel: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one read, whatever is searched for; messages are decoded where they are."""
    c, x, spec = parse(f"{name}({target}, rdo=true)"), vector(numel), Spec.flat(numel)
    here = counted(c, x, spec, None)
    monkeypatch.setitem(kernels._chosen, device.device.type, kernels.overlay(Levels(device)))
    there = counted(c, x, spec, device)
    assert not codes_on_host(c, device.device)
    assert there.encode == 1
    assert there.data == here.data
    assert torch.equal(there.decoded, here.decoded)


def main() -> None:
    print(f"{'waits of encode, decode, decode_add':40}")
    for text in CASES:
        with Device() as device:
            c = parse(text)
            found = counted(c, vector(), pieces(NUMEL), device)
        kind = "fixed" if has_fixed_size(c) else ""
        print(f"{found.encode} {found.decode} {'-' if found.decode_add is None else found.decode_add} {kind:6} {text}")


if __name__ == "__main__":
    main()
