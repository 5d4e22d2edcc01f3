"""Sequential level codes: both forms, both backends, same bits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native import levels as native
from tersegrad.kernels.reference import levels as reference


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-40, 40) | st.just(0), max_size=130), st.booleans())
def test_backends_agree_and_round_trip(values: list[int], adaptive: bool) -> None:
    levels = torch.tensor(values, dtype=torch.int32)
    data = reference.levels_encode(levels, adaptive)
    assert torch.equal(native.levels_encode(levels, adaptive), data)
    assert torch.equal(reference.levels_decode(data, len(values)), levels)
    assert torch.equal(native.levels_decode(data, len(values)), levels)


def test_huge_levels_use_the_escape() -> None:
    levels = torch.tensor([0, 2**31 - 1, -(2**30), 15, -14, 0], dtype=torch.int32)
    data = native.levels_encode(levels, True)
    assert torch.equal(data, reference.levels_encode(levels, True))
    assert torch.equal(native.levels_decode(data, 6), levels)
    assert torch.equal(reference.levels_decode(data, 6), levels)


@pytest.mark.parametrize("zeros", [1, 500, 5000, 9999])
def test_zero_positions_cost_within_two_bits_of_the_enumeration(zeros: int) -> None:
    d = 10_000
    levels = torch.ones(d, dtype=torch.int32)
    levels[torch.randperm(d, generator=torch.Generator().manual_seed(zeros))[:zeros]] = 0
    bits = 8 * native.levels_encode(levels, False).numel()
    ideal = (math.lgamma(d + 1) - math.lgamma(zeros + 1) - math.lgamma(d - zeros + 1)) / math.log(2)
    exact = 1 + d.bit_length() + 2 * (d - zeros) + ideal  # form, count, unary and sign of every one, positions
    assert exact - 8 <= bits <= exact + 2 + 7  # whole bytes; zero bytes at the end are not written


def test_truncations_and_mutations_are_safe_and_backends_agree() -> None:
    rng = random.Random(0)
    levels = torch.tensor([rng.choice((0, 0, 1, -1, 2, -7, 40)) for _ in range(60)], dtype=torch.int32)
    for adaptive in (False, True):
        data = bytes(native.levels_encode(levels, adaptive).numpy())
        tries = [data[:n] for n in range(len(data))]
        for _ in range(200):
            mutated = bytearray(data)
            mutated[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            tries.append(bytes(mutated))
        for item in tries:
            tensor = torch.tensor(list(item), dtype=torch.uint8)
            results = []
            for backend in (native, reference):
                try:
                    results.append(backend.levels_decode(tensor, 60).tolist())
                except CorruptMessage:
                    results.append(None)
            assert results[0] == results[1]
