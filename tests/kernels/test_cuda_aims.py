"""Steps for a target error, found by CUDA kernels in the emulation: bit for bit those of the host's search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import Message, Spec, kernels
from tersegrad.compressors.trellis import KAPPA
from tersegrad.core import targets
from tersegrad.core.protocol import Context
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import aims, loader
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


# Searches that take some 60 looks.
LONG = ("one", "equal")
NOT_FINITE = ("infinite", "not a number behind the small sample")


@pytest.mark.parametrize("kind", VECTORS)
def test_aims_are_those_of_the_host(kind: str) -> None:
    with emulated():
        for n, alpha in ((1025, 0.2), (131_071, 1e-6), (300_001, 0.03))[: 2 if kind in LONG else 3]:
            x = VECTORS[kind](n)
            assert same(aims.dither_aim(x, alpha), ops.dither_aim(x, alpha)), (n, alpha)


def test_aims_of_long_vectors_and_sums() -> None:
    """More than 17 groups of chunks, so that each chunk of the small sample is one; and a larger sample that is not the whole."""
    n = 2 * targets.FINE + 4099
    x, carry = uneven(n), normal(n, 5) * 0.3
    with emulated():
        assert same(aims.dither_aim(x, 0.1, carry), ops.dither_aim(x, 0.1, carry))


def rows() -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of unlike scales, which have classes, several segments of them; and a vector without any."""
    scales = torch.linspace(-3, 3, 1400).exp()[torch.randperm(1400, generator=torch.Generator().manual_seed(2))]
    unlike = (normal(1400 * 300).view(1400, 300) * scales[:, None]).flatten()
    return {
        "rows": (unlike, torch.tensor([420_000, 300, 1, 0])),
        "none": (normal(140_000), torch.tensor([140_000, 140_000, 1, 0])),
        "zero": (torch.zeros(140_000), torch.tensor([140_000, 100, 1, 0])),
        **{kind: (VECTORS[kind](140_000), torch.tensor([140_000, 100, 1, 0])) for kind in NOT_FINITE},
    }


@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_aims_of_trellis_codes_are_those_of_the_host(states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Less emulation.
    monkeypatch.setattr(targets, "FINE", 1 << 17)
    with emulated():
        for k, kind in enumerate(VECTORS):
            for n, alpha in ((1 << 18, 0.5), (300_001, 0.03)):
                if (k + states // 4 + n) % 3 and kind not in ("normal", "uneven"):
                    continue
                x = VECTORS[kind](n)
                given = (x, alpha, KAPPA[states][0], states)
                found = aims.trellis_aim(*given)
                assert same(found, ops.trellis_aim(*given)), (kind, n)
        # Where the larger sample is the whole, it has rows.
        monkeypatch.undo()
        for kind, (x, layout) in rows().items() if states in (8, 32) else ():
            with_rows = (x, 0.1, KAPPA[states][0], states, layout)
            assert same(aims.trellis_aim(*with_rows), ops.trellis_aim(*with_rows)), kind
        # Where there is no sample, the host searches.
        x = normal(20_000)
        assert same(aims.trellis_aim(x, 0.1, 0.26, states), ops.trellis_aim(x, 0.1, 0.26, states))


@pytest.mark.parametrize("text", ["trellis(alpha=0.1)", "trellis(nu=0.1)", "dithered_trellis(omega=0.3)"])
def test_trellis_messages_at_a_step_of_the_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "FINE", 1 << 17)
    n = 280_000
    for kind in ("uneven", "infinite", "zero"):
        same_messages(text, VECTORS[kind](n), monkeypatch)


def test_steps_from_norms_are_those_of_the_host() -> None:
    with emulated():
        for kind, n in [(kind, 5000) for kind in VECTORS] + [("normal", k) for k in (0, 1, 4096, 4097, 300_001)]:
            x = VECTORS[kind](n) if n else torch.zeros(0)
            for given in ((0.1 / 7, 1.0, 1.0, 1.0), (0.3, 0.26 * 999, 1 - 2.0**-10, 1.0), (0.1 / 3, 1.0, 2.0, 2.0**-126)):
                wanted = reference.norm_step(x, *given)
                assert same(aims.norm_step(x, *given), wanted), (kind, n)
                assert same(ops.norm_step(x, *given), wanted), (kind, n)


def test_a_norm_serves_where_the_sample_is_zero() -> None:
    x = normal(1 << 18)
    x.view(-1, 4096)[::4] = 0
    with emulated():
        for norm in (0.0, float(x.square().sum())):
            assert same(aims.dither_aim(x, 0.1, None, norm), ops.dither_aim(x, 0.1, None, norm))
        assert same(aims.dither_aim(x[:0], 0.1), ops.dither_aim(x[:0], 0.1))


def test_the_reference_and_the_native_kernels_agree() -> None:
    for kind in ("heavy", "zero", "infinite"):
        x = VECTORS[kind](5000)
        assert same(reference.dither_aim(x, 0.1), ops.dither_aim(x, 0.1))


def same_messages(text: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare messages, what they decode to and residuals with the host's; the kernels that ran."""
    c, ctx, spec = tersegrad.parse(text), Context(seed=4), Spec.flat(x.numel())

    def message() -> tuple[Tensor, Tensor]:
        made, state = c.encode(x, spec, c.init(spec, "cpu"), ctx)
        data = made.data[: int(made.nbytes)].clone()
        decoded = c.decode(Message(data, data.numel()), spec, ctx)
        return data, torch.cat([decoded, *([] if state is None else [state.residual])])

    expected = message()
    names: list[str] = []
    with emulated(), monkeypatch.context() as patch:
        run = loader.launcher

        def launcher(name: str, kernel: str, *rest: Any) -> None:
            names.append(kernel)
            run(name, kernel, *rest)

        patch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
        patch.setattr(loader, "launcher", launcher)
        found = message()
    assert torch.equal(expected[0], found[0])
    assert same(expected[1], found[1])
    return names


@pytest.mark.parametrize("kind", ["normal", "uneven", "zero", "infinite"])
@pytest.mark.parametrize("text", ["sparse_dithering(alpha=0.1)", "error_feedback(sparse_dithering(alpha=0.3, coder=rans))"])
def test_messages_at_a_step_of_the_device(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = same_messages(text, VECTORS[kind](140_000), monkeypatch)
    assert names.count("dither_aim_coarse") == 1
    assert names.count("dither_aim_fine") == 4


def test_a_step_for_the_whole_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "norm_step" in same_messages("sparse_dithering(nu=0.3, scale=global)", normal(5000), monkeypatch)
