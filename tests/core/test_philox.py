"""Philox-4x32-10 against the published known-answer vectors, and the rules for counters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.core import philox
from tersegrad.core.protocol import SHARED, Context

ONES = 0xFFFFFFFF

# kat_vectors of the Random123 distribution: key (low word first), counter, output.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, int, int, int]) -> None:
    assert philox.block(key[1] << 32 | key[0], counter) == words


@given(st.integers(0, 2**64 - 1), st.tuples(*[st.integers(0, ONES)] * 4))
def test_words_have_32_bits_and_depend_on_every_input(key: int, counter: tuple[int, int, int, int]) -> None:
    words = philox.block(key, counter)
    assert all(0 <= w <= ONES for w in words)
    assert philox.block(key ^ 1, counter) != words
    assert philox.block(key ^ 1 << 63, counter) != words
    for j in range(4):
        other = tuple(c ^ 1 if i == j else c for i, c in enumerate(counter))
        assert philox.block(key, other) != words  # type: ignore[arg-type]


def test_bits_are_balanced() -> None:
    """4096 blocks: each of the 128 bit positions is one half of the time, within six standard deviations."""
    blocks = [philox.block(1, (i, 0, 0, 0)) for i in range(4096)]
    for word, bit in itertools.product(range(4), range(32)):
        assert abs(sum(b[word] >> bit & 1 for b in blocks) - 2048) < 6 * 32


def test_purposes_fit_and_differ() -> None:
    numbers = [int(p) for p in philox.Purpose]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= n < 256 for n in numbers)


def test_children_are_distinct_and_stable() -> None:
    seeds = {philox.derive(seed, k) for seed in (0, 1, 2**64 - 1) for k in range(200)}
    assert len(seeds) == 600
    assert all(0 <= s < 2**64 for s in seeds)
    words = philox.block(5, (3, 255 << 24, 0, 0))
    assert philox.derive(5, 3) == words[1] << 32 | words[0]
    context = Context(seed=5, step=6, buffer=7, sender=8)
    assert context.child(3) == Context(seed=philox.derive(5, 3), step=6, buffer=7, sender=8)
    assert context.shared() == Context(seed=5, step=6, buffer=7, sender=SHARED)
