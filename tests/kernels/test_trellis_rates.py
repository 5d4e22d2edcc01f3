"""Rate-distortion-optimised trellis codes: all instruction sets and the reference choose the same, and the choice is what it says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import trellis, trellis_code, trellis_rates
from tests.kernels.test_classes import SHAPES
from tests.kernels.test_trellis import admissible, agree, gaussian, heavy
from tests.laws.inputs import uneven

STATES = (4, 8, 16, 32)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 4097, 20_000])
@pytest.mark.parametrize("states", STATES)
def test_small_sizes(n: int, states: int) -> None:
    agree(gaussian(n, n), 0.9, states, rdo=True)
    agree(heavy(n), 0.2, states, rdo=True)


@pytest.mark.parametrize("states", STATES)
def test_several_segments_runs_and_escapes(states: int) -> None:
    agree(heavy((1 << 18) + (1 << 17) + 77), 1.1, states, rdo=True)
    agree(gaussian((1 << 15) + 4321), 0.01, states, chunk=14, rdo=True)
    # Prices of all kinds side by side, so that the costs of states lie as far apart as they can.
    x = torch.where(torch.arange(70_000) % 700 < 3, 60.0, 0.6) * gaussian(70_000)
    agree(x, 0.5, states, rdo=True)


@pytest.mark.parametrize("step", [0.05, 0.6, 2.5, 20.0])
@pytest.mark.parametrize("states", [8, 32])
def test_classes_have_prices_of_their_own(step: float, states: int) -> None:
    x, spec = uneven(SHAPES)
    data = agree(x, step, states, layout=spec.layout, rdo=True)
    out = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8)
    plain = native.trellis_encode(x, float(torch.tensor(step)), states, 16, None, out, spec.layout)[0]
    assert len(data) <= int(plain)


@pytest.mark.parametrize("states", STATES)
def test_no_admissible_sequence_is_cheaper(states: int) -> None:
    """All sequences of a short vector, by squared error and the bits of the counts that the search before has left."""
    x = gaussian(9, states) * 1.5
    y = torch.round(32 * x).long()
    grid = trellis.grid_of(9, 15)
    label = trellis_code.nearest_labels(y, grid, states).long()
    prices = trellis_rates.prices(y, label, None)
    found = trellis_code.nearest_labels(y, grid, states, prices=prices).long()

    def cost(labels: list[int]) -> int:
        n = trellis_code.integers(y, torch.tensor(labels))
        return int((y - 32 * n).square().sum() + prices.gather(1, torch.tensor(labels)[:, None]).sum())

    best = math.inf
    for choice in itertools.product((0, 1), repeat=9):
        s, labels = 0, []
        for z1 in choice:
            labels.append(2 * z1 + s % 2)
            s = trellis_code.next_state(states, s, z1)
        best = min(best, cost(labels))
    assert cost(found.tolist()) == best
    assert admissible(trellis_code.integers(y, found).tolist(), states)


def test_prices_are_half_a_squared_step_per_bit() -> None:
    y = torch.round(32 * heavy(30_000)).long()
    label = trellis_code.nearest_labels(y, trellis.grid_of(30_000, 15), 8).long()
    n = trellis_code.integers(y, label)
    prices = trellis_rates.prices(y, label, None)
    lengths = {}
    for parity in (0, 1):
        mine = n[n % 2 == parity]
        for value in range(-6, 7):
            if value % 2 == parity:
                lengths[value] = -math.log2(float((mine == value).float().mean()))
    least = min(lengths.values())
    told = {int(k): int(p) for k, p in zip(n, prices.gather(1, label[:, None])[:, 0])}
    for value, length in lengths.items():
        # 512 squares of 1/32 of a step: half a squared step.
        assert told[value] / 512 == pytest.approx(min(length - least, 6.0), abs=0.15)


def test_bits_shift_the_sequence_and_dither_does_not_know_them() -> None:
    x = heavy(50_000)
    out = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8)
    bytes_of, errors = [], []
    for rdo in (False, True):
        nbytes, _, error = native.trellis_encode(x, 2.0, 8, 16, None, out, None, None, rdo)
        bytes_of.append(int(nbytes))
        errors.append(float(error))
    assert bytes_of[1] < 0.95 * bytes_of[0]
    assert errors[1] > errors[0]
    with pytest.raises(ValueError, match="nearest"):
        native.trellis_encode(x, 2.0, 8, 16, Context(seed=1), out, None, None, True)


def left_out(x: Tensor, backend: object) -> Tensor:
    out, left = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    nbytes = backend.trellis_encode(x, 0.7, 8, 0, None, out, None, left, True)[0]  # type: ignore[attr-defined]
    decoded = reference.trellis_decode(out[: int(nbytes)], 8, None, torch.empty_like(x), None)
    assert torch.equal(left, x - decoded)
    return left


def test_what_is_left_out() -> None:
    x = gaussian(3000)
    assert torch.equal(left_out(x, reference), left_out(x, native))
