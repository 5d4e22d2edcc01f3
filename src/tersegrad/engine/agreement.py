"""Ranks agree before they exchange: a hash of every setting is compared, and a difference is named.

Ranks that were set up differently would otherwise end in a crash of the transport, in a wait until its timeout, or in replicas that
drift apart without a word (another seed). One all-gather of a few hundred bytes at every attach and change tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tersegrad.core.errors import RanksDisagree
from tersegrad.exchange import ProcessGroup

FIELDS = 24  # facts that fit; every version sends the same number of bytes, so that versions can be told apart
DIGEST = 8  # bytes of hash per fact
SHOWN = 40  # bytes of a fact's text that travel, for the error message


def compare(facts: Mapping[str, str], link: ProcessGroup) -> None:
    """Raise :class:`RanksDisagree` unless all ranks of a process group have the same facts (a collective call)."""
    if link.size == 1:
        return
    assert len(facts) <= FIELDS
    mine = b"".join(_packed(name, value) for name, value in facts.items()).ljust(FIELDS * (DIGEST + SHOWN), b"\0")
    rows = link.gather(mine)
    width = DIGEST + SHOWN
    for number, (name, value) in enumerate(facts.items()):
        cells = [row[number * width : (number + 1) * width] for row in rows]
        for rank in range(1, link.size):
            if cells[rank][:DIGEST] != cells[0][:DIGEST]:
                said = [_shown(cells[r][DIGEST:]) for r in (0, rank)]
                raise RanksDisagree(
                    f"rank {rank} has another {name} than rank 0: {said[1]} against {said[0]} (here {_cut(value)}). "
                    "All ranks must make the same calls with the same arguments"
                )


def _packed(name: str, value: str) -> bytes:
    digest = hashlib.blake2b(f"{name}={value}".encode(), digest_size=DIGEST).digest()
    return digest + value.encode("ascii", "replace")[:SHOWN].ljust(SHOWN, b"\0")


def _shown(data: bytes) -> str:
    text = data.rstrip(b"\0").decode("ascii", "replace")
    return text + "..." if len(data.rstrip(b"\0")) == SHOWN else text


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
