"""All commands on a terminal of 80 columns, with NO_COLOR, in a pipe and without a terminal: no line too wide, no stray codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cli.terminals import COLUMNS, COMMANDS, MODES, on_terminal

from tersegrad.cli.show import WIDE

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
COLOUR = re.compile(r"\x1b\[(?:[0-9]*;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]*)*m")


class Shown(NamedTuple):
    """What one command wrote."""

    mode: str
    words: str
    code: int
    text: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    folder = tmp_path_factory.mktemp("terminals")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cli.terminals"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Shown(*found) for found in json.loads(done.stdout)]


def test_every_command_ran_in_every_mode(shown: list[Shown]) -> None:
    assert len(shown) == len(MODES) * len(COMMANDS)
    mistakes = ("bench rate qsdg", "train --data /nowhere", "plan --model resnet50")
    for one in shown:
        assert one.code == (2 if one.words in mistakes else 0), one
        assert "Traceback" not in one.text, one.text


def test_no_line_is_too_wide(shown: list[Shown]) -> None:
    for one in shown:
        width = WIDE if one.mode == "pipe" else COLUMNS
        lines = re.split(r"[\r\n]+", CODE.sub("", one.text))
        # A mistake is told in one line whatever its length, so that it can be searched for and copied.
        assert [line for line in lines if len(line.rstrip()) > width and not line.startswith("error: ")] == [], one[:3]


def test_escape_codes_only_on_terminals_and_colours_only_where_they_are_wanted(shown: list[Shown]) -> None:
    for one in shown:
        if not on_terminal(one.mode):
            assert "\x1b" not in one.text, one
        if one.mode == "no colour":
            assert COLOUR.search(one.text) is None, one
    assert any(COLOUR.search(one.text) for one in shown if one.mode == "terminal")


def test_the_same_words_everywhere(shown: list[Shown]) -> None:
    """A narrow terminal breaks lines, and leaves nothing out."""
    for words in ("list", "bounds --alpha 0.1", "inspect gradient.tgrd"):
        found = {one.mode: CODE.sub("", one.text) for one in shown if one.words == words}
        whole = {word for word in found["pipe"].split() if set(word) != {"─"}} - {"name(parameters=defaults)"}
        for mode in MODES:
            assert whole <= {part for word in found[mode].split() for part in (word, word.removesuffix(":"))}, (mode, words)
