"""Steps for a target error, found by CUDA kernels in the emulation: bit for bit those of the host's search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import Message, Spec, kernels
from tersegrad.core.protocol import Context
from tersegrad.core.targets import FINE
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import dither, loader
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
ops = native if native.available() else reference


def normal(n: int, seed: int = 3) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def uneven(n: int) -> Tensor:
    """Blocks of very unlike sizes: samples mislead, and the larger one is looked at several times."""
    sizes = torch.linspace(-4, 4, -(-n // 4096)).exp()[
        torch.randperm(-(-n // 4096), generator=torch.Generator().manual_seed(1))
    ]
    return normal(n) * sizes.repeat_interleave(4096)[:n]


def cliffs(n: int) -> Tensor:
    """Two sizes of numbers: errors rise in steps."""
    return torch.where(normal(n) > 1.5, 1.0, 0.001) * normal(n, 4).sign()


VECTORS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "heavy": lambda n: normal(n) ** 5,
    "uneven": uneven,
    "cliffs": cliffs,
    "equal": lambda n: torch.full((n,), 0.7),
    "one": lambda n: torch.eye(1, n)[0] * 5,
    "subnormal": lambda n: normal(n) * 1e-41,
    "tiny": lambda n: normal(n) * 1e-37,
    "huge": lambda n: normal(n).clamp(-3, 3) * 1.1e38,
    "zero": torch.zeros,
    "infinite": lambda n: normal(n).index_fill_(0, torch.tensor([7]), torch.inf),
    "not a number behind the small sample": lambda n: normal(n).index_fill_(0, torch.tensor([n - 1]), torch.nan),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_aims_are_those_of_the_host(kind: str) -> None:
    with emulated():
        for n, alpha in ((1025, 0.2), (131_071, 1e-6), (150_000, 0.5), (300_001, 0.03)):
            x = VECTORS[kind](n)
            assert same(dither.dither_aim(x, alpha), ops.dither_aim(x, alpha)), (n, alpha)


def test_aims_of_long_vectors_and_sums() -> None:
    """More than 17 groups of chunks, so that each chunk of the small sample is one; and a larger sample that is not the whole."""
    n = 2 * FINE + 4099
    x, carry = uneven(n), normal(n, 5) * 0.3
    with emulated():
        assert same(dither.dither_aim(x, 0.1, carry), ops.dither_aim(x, 0.1, carry))


def test_a_norm_serves_where_the_sample_is_zero() -> None:
    x = normal(1 << 18)
    x.view(-1, 4096)[::4] = 0
    with emulated():
        for norm in (0.0, float(x.square().sum())):
            assert same(dither.dither_aim(x, 0.1, None, norm), ops.dither_aim(x, 0.1, None, norm))
        assert same(dither.dither_aim(x[:0], 0.1), ops.dither_aim(x[:0], 0.1))


def test_the_reference_and_the_native_kernels_agree() -> None:
    for kind in ("heavy", "zero", "infinite"):
        x = VECTORS[kind](5000)
        assert same(reference.dither_aim(x, 0.1), ops.dither_aim(x, 0.1))


@pytest.mark.parametrize("kind", ["normal", "uneven", "zero", "infinite"])
@pytest.mark.parametrize("text", ["sparse_dithering(alpha=0.1)", "error_feedback(sparse_dithering(alpha=0.3, coder=rans))"])
def test_messages_at_a_step_of_the_device(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c, n, ctx = tersegrad.parse(text), 140_000, Context(seed=4)
    x, spec = VECTORS[kind](n), Spec.flat(n)

    def message() -> tuple[Tensor, Tensor]:
        made, state = c.encode(x, spec, c.init(spec, "cpu"), ctx)
        data = made.data[: int(made.nbytes)].clone()
        decoded = c.decode(Message(data, data.numel()), spec, ctx)
        return data, torch.cat([decoded, *([] if state is None else [state.residual])])

    expected = message()
    monkeypatch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
    names: list[str] = []
    with emulated():
        run = loader.launcher

        def launcher(name: str, kernel: str, *rest: Any) -> None:
            names.append(kernel)
            run(name, kernel, *rest)

        monkeypatch.setattr(loader, "launcher", launcher)
        found = message()
    assert torch.equal(expected[0], found[0])
    assert same(expected[1], found[1])
    assert names.count("dither_aim_coarse") == 1
    assert names.count("dither_aim_fine") == 4
