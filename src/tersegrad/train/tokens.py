"""Byte-pair encoding (Sennrich et al. 2016) learned from the data: the bytes, and pairs that were merged one after another.

Text is first cut into words (letters, digits, marks or white space, with one space before them); pairs are merged inside a word only,
so that each distinct word is encoded once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import re

import numpy as np

from tersegrad.core.text import require

SAMPLE = 4 << 20  # bytes that the merges are learned from
MOST = 1 << 16
_WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s+")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Token i < 256 is byte i; token 256 + k is the pair ``merges[k]`` of earlier tokens."""

    merges: tuple[tuple[int, int], ...] = ()

    @property
    def vocabulary(self) -> int:
        return 256 + len(self.merges)

    @functools.cached_property
    def _order(self) -> dict[tuple[int, int], int]:
        return {pair: number for number, pair in enumerate(self.merges)}

    @functools.cached_property
    def words(self) -> list[bytes]:
        """The bytes of each token."""
        words = [bytes([b]) for b in range(256)]
        for a, b in self.merges:
            words.append(words[a] + words[b])
        return words

    def encode(self, text: bytes) -> np.ndarray:
        """Tokens: uint8 for bytes alone, else int32.

        >>> learned = learn(b"low lower lowest low low", 259)
        >>> [learned.words[t] for t in learned.encode(b"low slow")]
        [b'low', b' ', b's', b'low']
        """
        if not self.merges:
            return np.frombuffer(text, dtype=np.uint8)
        known: dict[bytes, list[int]] = {}
        out: list[int] = []
        for word in _WORD.findall(text):
            tokens = known.get(word)
            if tokens is None:
                tokens = known[word] = self._encode(word)
            out += tokens
        return np.array(out, dtype=np.int32)

    def _encode(self, word: bytes) -> list[int]:
        tokens = list(word)
        while len(tokens) > 1:
            first = min(itertools.pairwise(tokens), key=lambda pair: self._order.get(pair, MOST))
            if first not in self._order:
                break
            tokens = _merge(tokens, first, 256 + self._order[first])
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of tokens."""
        return b"".join(self.words[int(t)] for t in tokens)


def learn(text: bytes, vocabulary: int) -> Tokenizer:
    """Merge the most frequent pair (the smallest of equals) until there are ``vocabulary`` tokens, or no pair occurs twice."""
    require(256 <= vocabulary <= MOST, f"a vocabulary has 256 (bytes) to {MOST} tokens, got {vocabulary}")
    counted = collections.Counter(_WORD.findall(text)) if vocabulary > 256 else collections.Counter()
    words = [(list(word), count) for word, count in counted.items()]
    pairs: collections.Counter[tuple[int, int]] = collections.Counter()
    places: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
    for number, (tokens, count) in enumerate(words):
        for pair in itertools.pairwise(tokens):
            pairs[pair] += count
            places[pair].add(number)
    # Entries whose count has changed since are passed over; each change has added one of its own.
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges: list[tuple[int, int]] = []
    while 256 + len(merges) < vocabulary and heap:
        count, best = heapq.heappop(heap)
        if pairs.get(best) != -count or count > -2:
            continue
        merges.append(best)
        touched: set[tuple[int, int]] = set()
        for number in places.pop(best):
            tokens, count = words[number]
            merged = _merge(tokens, best, 255 + len(merges))
            for pair in itertools.pairwise(tokens):
                pairs[pair] -= count
                touched.add(pair)
            for pair in itertools.pairwise(merged):
                pairs[pair] += count
                places[pair].add(number)
                touched.add(pair)
            words[number] = merged, count
        for pair in touched:
            heapq.heappush(heap, (-pairs[pair], pair))
    return Tokenizer(tuple(merges))


def _merge(tokens: list[int], pair: tuple[int, int], made: int) -> list[int]:
    """Every occurrence of a pair, from the left, replaced by one token."""
    out: list[int] = []
    at = 0
    while at < len(tokens):
        if at + 1 < len(tokens) and (tokens[at], tokens[at + 1]) == pair:
            out.append(made)
            at += 2
        else:
            out.append(tokens[at])
            at += 1
    return out
