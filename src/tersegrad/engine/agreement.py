"""Ranks agree before they exchange: a hash of every setting is compared, and a difference is named.

Ranks that were set up differently would otherwise end in a crash of the transport, in a wait until its timeout, or in replicas that
drift apart without a word (another seed). One all-gather of a few hundred bytes at every attach and change tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from tersegrad.core.errors import RanksDisagree
from tersegrad.exchange import ProcessGroup

FIELDS = 24  # facts that fit; every version sends the same number of bytes, so that versions can be told apart
DIGEST = 8  # bytes of hash per fact
SHOWN = 40  # bytes of a fact's text that travel, for the error message
TOLD = 256  # bytes of a difference that is told to other process groups


def compare(facts: Sequence[tuple[ProcessGroup, Mapping[str, str]]]) -> None:
    """Raise :class:`RanksDisagree` on every rank unless all ranks of each process group have the same facts (a collective call).

    Process groups are compared one after another.
    """
    problems = [words for link, said in facts if (words := _difference(said, link))]
    problem = told(problems[0] if problems else "", [link for link, _ in facts])
    if problem:
        raise RanksDisagree(f"{problem}. All ranks must make the same calls with the same arguments")


def told(problem: str, links: Sequence[ProcessGroup]) -> str:
    """The problem that any rank has seen, if one has (a collective call where there are several process groups).

    Inside and between nodes, a rank whose own groups are well must hear of a difference elsewhere, or it would wait for those who left.
    """
    for link in links if len(links) > 1 else ():
        if link.size > 1:
            rows = link.gather(problem.encode("ascii", "replace")[:TOLD].ljust(TOLD, b"\0"))
            problem = next((row.rstrip(b"\0").decode("ascii") for row in rows if row[0]), "")
    return problem


def _difference(facts: Mapping[str, str], link: ProcessGroup) -> str:
    """Which rank of a process group has which other fact; nothing where all agree."""
    if link.size == 1:
        return ""
    assert len(facts) <= FIELDS
    mine = b"".join(_packed(name, value) for name, value in facts.items()).ljust(FIELDS * (DIGEST + SHOWN), b"\0")
    rows = link.gather(mine)
    width = DIGEST + SHOWN
    for number, name in enumerate(facts):
        cells = [row[number * width : (number + 1) * width] for row in rows]
        for rank in range(1, link.size):
            if cells[rank][:DIGEST] != cells[0][:DIGEST]:
                said = [_shown(cells[r][DIGEST:]) for r in (0, rank)]
                one, other = link.global_rank(rank), link.global_rank(0)
                return f"rank {one} has another {name} than rank {other}: {said[1]} against {said[0]}"
    return ""


def _packed(name: str, value: str) -> bytes:
    digest = hashlib.blake2b(f"{name}={value}".encode(), digest_size=DIGEST).digest()
    return digest + value.encode("ascii", "replace")[:SHOWN].ljust(SHOWN, b"\0")


def _shown(data: bytes) -> str:
    text = data.rstrip(b"\0").decode("ascii", "replace")
    return text + "..." if len(data.rstrip(b"\0")) == SHOWN else text
