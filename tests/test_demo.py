"""``demo --compressors`` in its small form: same code, small tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tersegrad
from tersegrad import demo
from tersegrad.cli import app
from tersegrad.core.errors import MissingExtra
from tersegrad.report import figures

SMALL = ("identity", "bf16", "qsgd(bits=4)", "sign", "top_k(fraction=0.01)", "threshold(tau=2.5)")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> demo.Demo:
    return demo.run(
        tmp_path_factory.mktemp("demo"), configurations=SMALL, steps=(1, 10), hidden=32, speed_numel=1 << 14, budget=0.01
    )


def test_table_has_a_row_for_each(found: demo.Demo) -> None:
    table = found.table()
    assert len(table.rows) == len(SMALL)
    assert [row[0] for row in table.rows] == list(SMALL)
    assert all(cell for row in table.rows for cell in row)
    assert "| compressor" in table.markdown()


def test_nothing_gets_below_the_limit_on_gaussian_data(found: demo.Demo) -> None:
    for rate in found.gaussian:
        # The limit holds on average over the source; one sample of a thousand coordinates strays by a per cent or so.
        assert not rate.gap < -0.02, rate


def test_figure_is_written_twice(found: demo.Demo) -> None:
    assert found.figure.read_bytes().startswith(b"\x89PNG")
    svg = found.figure.with_suffix(".svg").read_text()
    for text in SMALL:
        assert text in svg


def test_every_compressor_has_a_configuration() -> None:
    used = set(re.findall(r"[a-z_0-9]+(?=\()|^[a-z_0-9]+$", "\n".join(demo.CONFIGURATIONS), re.MULTILINE))
    # Two only route and count, two decide by the variance over samples, which single gradients do not show.
    assert set(tersegrad.names()) <= used | {"by_tensor", "metered", "vgc", "hybrid"}


def test_training_is_deterministic_and_learns() -> None:
    state = torch.get_rng_state()
    first, accuracy = demo.digits_gradients(steps=(1, 60), hidden=32)
    second, _ = demo.digits_gradients(steps=(1, 60), hidden=32)
    assert accuracy > 0.8
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"tersegrad\[report\]"):
        figures.require_matplotlib()


def test_missing_sklearn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"tersegrad\[experiments\]"):
        demo.digits_gradients(steps=(1,), hidden=4)


def test_command_prints_the_table_the_explanation_and_the_path(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--compressors", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for text in demo.CONFIGURATIONS:
        assert text in result.output
    assert "How to read this" in result.output
    assert str(tmp_path / "compressors.png") in result.output.replace("\n", "")
