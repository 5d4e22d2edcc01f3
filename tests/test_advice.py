"""One table says what to send: the docs show it, defaults and ladder come from it, and its settings exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import tersegrad
from tersegrad import advice, cli
from tersegrad.engine import auto
from tersegrad.exchange import scheme
from tersegrad.integrations import local_sgd
from tersegrad.planner import plan
from tersegrad.train import Job, demonstration

PAGE = (Path(__file__).parents[1] / "docs" / "choose.md").read_text(encoding="utf-8")


def shown(head: str) -> dict[int, list[str]]:
    """The table below a head's first cell: by its number, the other cells."""
    lines = PAGE.split(f"| {head} |", 1)[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {int(re.sub(r"[^0-9]", "", cells[0])): cells[1:] for cells in rows}


def test_settings_parse_and_save_more_row_by_row() -> None:
    for row in advice.TABLE:
        assert tersegrad.parse(row.compressor)
        assert not row.exchange or scheme(row.exchange)
        assert row.local is None or local_sgd.method(row.local)
    for who in ("adam", "momentum", "federated"):
        savings = [row.fewer for row in advice.TABLE if row.who == who]
        assert savings == sorted(set(savings))
    assert advice.row("adam", 15).fewer == 20
    assert advice.row("adam", 1e9).fewer == 1000


def test_the_page_shows_the_table() -> None:
    page = shown("times fewer bytes than bf16")
    for column, who in enumerate(("adam", "momentum")):
        own = [row for row in advice.TABLE if row.who == who]
        assert list(page) == [row.fewer for row in own]
        for row in own:
            texts = re.findall(r"`([^`]+)`", page[row.fewer][column])
            assert texts == [part for part in (row.compressor, row.local) if part]
    clients = shown("times smaller updates, about")
    federated = [row for row in advice.TABLE if row.who == "federated"]
    assert [(fewer, re.findall(r"`([^`]+)`", cells[0])) for fewer, cells in clients.items()] == [
        (row.fewer, [row.compressor]) for row in federated
    ]


def test_defaults_and_ladder_are_the_table() -> None:
    assert Job().compressor == advice.DEFAULT
    assert inspect.signature(cli.train).parameters["compressor"].default == advice.DEFAULT
    assert plan.LADDER is advice.LADDER
    assert vars(auto)["LADDER"] is advice.LADDER
    assert advice.DEFAULT in {job.compressor for job in demonstration()}
    assert advice.DEFAULT in PAGE


def test_the_ladder_is_finer_than_the_table_and_documented() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    errors = [tersegrad.roundtrip(text, x).error for text in advice.LADDER]
    coarser = [tersegrad.roundtrip(row.compressor, x).error for row in advice.TABLE if row.who != "federated"]
    assert max(errors) < 0.002 < min(coarser)
    # A handle names its compressor so, and auto compares.
    assert [str(tersegrad.parse(text)) for text in advice.LADDER] == list(advice.LADDER)
    docs = Path(__file__).parents[1] / "docs"
    for page in (PAGE, (docs / "plan.md").read_text(encoding="utf-8")):
        assert all(f"`{text}`" in page for text in advice.LADDER)


def test_flower_takes_the_table() -> None:
    pytest.importorskip("flwr")
    from tersegrad.integrations import flower

    assert inspect.signature(flower.CompressedStrategy).parameters["uplink"].default == advice.FEDERATED
    example = (Path(__file__).parents[1] / "examples" / "flower" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nuplink = "{advice.FEDERATED}"' in example
