"""Every command: what it prints, its JSON, its exit codes, and that mistakes end in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Protocol

import pytest
import torch
from typer.testing import CliRunner

import tersegrad
from tersegrad.cli import app
from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.kernels import native
from tersegrad.report import parse_size
from tersegrad.report.doctor import EXTRAS

NAMES = ["bf16", "qsgd(bits=4)", "top_k(fraction=0.01)"]


class Result(Protocol):
    """What a CliRunner returns, click's or that of a typer with its own."""

    exit_code: int

    @property
    def output(self) -> str: ...
    @property
    def stderr(self) -> str: ...


def run(*words: str, code: int = 0) -> Result:
    result: Result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result


def one_line_error(result: Result) -> str:
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.output
    return str(lines[0])


@pytest.fixture
def framed(tmp_path: Path) -> Path:
    compressor = tersegrad.parse("top_k(fraction=0.1)")
    spec, ctx = Spec.flat(1000), Context(seed=7, step=3, buffer=2, sender=1)
    x = torch.arange(1000.0)
    message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), ctx)
    path = tmp_path / "message.tgrd"
    path.write_bytes(frame.pack(message, wire_id=compressor.wire_id, text=str(compressor), spec=spec, context=ctx))
    return path


def test_help_names_every_command() -> None:
    shown = run("--help").output
    for command in ("demo", "train", "plan", "bench", "bounds", "inspect", "list", "doctor", "report"):
        assert command in shown


def test_version() -> None:
    assert run("--version").output == f"tersegrad {tersegrad.__version__}\n"


def test_the_package_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "tersegrad", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tersegrad {tersegrad.__version__}\n"


def test_click_is_not_imported_by_us() -> None:
    """typer 0.29 no longer brings click."""
    source = Path(tersegrad.__file__).parent
    for path in source.rglob("*.py"):
        imports = [line for line in path.read_text(encoding="utf-8").splitlines() if line.split()[:1] in (["import"], ["from"])]
        assert not [line for line in imports if line.split()[1].partition(".")[0] == "click"], path


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_narrow_terminals_cut_no_word_and_no_number(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {"list": ["list"], "rate": ["bench", "rate", "--size", "1Ki"], "bounds": ["bounds", "--alpha", "0.1"]}
    for words in commands.values():
        monkeypatch.delenv("COLUMNS", raising=False)
        whole = set(run(*words).output.split())
        monkeypatch.setenv("COLUMNS", columns)
        narrow = run(*words).output
        assert max(map(len, narrow.splitlines())) <= int(columns)
        left_out = {word for word in whole if set(word) == {"─"}} | {"name(parameters=defaults)"}
        assert whole - left_out <= {part for word in narrow.split() for part in (word, word.removesuffix(":"))}


def test_list_shows_every_name_with_its_parameters_and_description() -> None:
    shown = " ".join(run("list").output.split())
    for name in tersegrad.names():
        assert name in shown
    assert "fraction=" in shown
    assert "U(omega=" in shown


def test_list_as_json() -> None:
    entries = json.loads(run("list", "--json").output)
    assert {e["name"] for e in entries} >= set(tersegrad.names())
    for entry in entries:
        assert len(entry["description"]) > 10
        assert entry["guarantee"]


def test_bench_rate_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rate.json"
    shown = run("bench", "rate", *NAMES, "--size", "16Ki", "--json", str(path)).output
    assert "above limit" in shown
    found = json.loads(path.read_text())
    assert [r["compressor"] for r in found["results"]] == NAMES
    assert found["results"][0]["bits_per_coordinate"] == 16
    assert "torch" in found["machine"]


def test_bench_rate_on_other_data(tmp_path: Path) -> None:
    path = tmp_path / "gradients.pt"
    torch.save({"weight": torch.randn(30, 10), "bias": torch.ones(10), "steps": torch.tensor(3)}, path)
    words = ["bench", "rate", "bf16", "--size", "4Ki", "--data", "laplace", "--data", str(path), "--json", "-"]
    results = json.loads(run(*words).output)["results"]
    assert [r["numel"] for r in results] == [4096, 310]


def test_bench_rate_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "gradients.txt"
    path.write_text("not tensors")
    assert "does not hold tensors" in one_line_error(run("bench", "rate", "bf16", "--data", str(path), code=2))


def test_bench_speed_as_json_only() -> None:
    found = json.loads(run("bench", "speed", "bf16", "--size", "16Ki", "--rounds", "3", "--json", "-").output)
    (result,) = found["results"]
    assert result["numel"] == 16384
    assert result["encode"]["ratio"] > 0
    assert result["decode"]["gigabytes"] > 0


def test_bench_speed_with_two_threads() -> None:
    shown = run("bench", "speed", *NAMES, "--size", "16Ki", "--rounds", "3", "--threads", "2").output
    assert "memmove" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "speed", "qsdg"], "qsgd"),
        (["bench", "rate", "qsgd(bit=4)"], "bits"),
        (["bench", "rate", "bf16", "--size", "many"], "64Ki"),
        (["bench", "rate", "bf16", "--data", "cauchy"], "gaussian"),
        (["bench", "rate", "bf16", "--size", "1Ki", "--json", "/proc/none/x.json"], "cannot write"),
        (["train", "--compressor", "qsdg"], "qsgd"),
        (["train", "--exchange", "power_sgd"], "by itself"),
        (["train", "--data", "/proc/none/folder"], "no folder"),
        (["train", "--resume"], "checkpoint"),
        (["bounds"], "alpha"),
        (["bounds", "--alpha", "0.1", "--omega", "1"], "one of"),
        (["bounds", "--alpha", "2"], "between 0 and 1"),
        (["bounds", "--omega", "0"], "positive"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], expected: str) -> None:
    assert expected in one_line_error(run(*words, code=2))


def test_bounds_of_a_contractive_point() -> None:
    shown = run("bounds", "--alpha", "0.25", "--dim", "1000").output
    assert "1,000.0" in shown  # (d/2) log2(1/alpha)
    assert "1.0051" in shown  # -log2 P / d
    assert "1.333" in shown  # iterations


def test_bounds_at_the_edge_stay_readable() -> None:
    for kind in ("--alpha", "--omega"):
        words = run("bounds", kind, "1e-300").output.split()
        assert max(len(word) for word in words if set(word) != {"─"}) < 20


def test_bounds_of_an_unbiased_point() -> None:
    shown = run("bounds", "--omega", "1", "--dim", "1000").output
    assert "500.0" in shown


def test_inspect_explains_every_field(framed: Path) -> None:
    shown = run("inspect", str(framed)).output
    for word in ("top_k(fraction=0.1)", "seed", "7", "step", "3", "buffer", "sender", "1,000", "bits per coordinate", "normal"):
        assert word in shown
    assert "decodes to 1,000 finite coordinates" in shown


def test_inspect_as_json(framed: Path) -> None:
    found = json.loads(run("inspect", str(framed), "--json").output)
    assert found["decodes"] is True
    assert found["coordinates"] == 1000
    assert found["frame bytes"] == framed.stat().st_size


def test_inspect_of_damaged_and_foreign_files(framed: Path, tmp_path: Path) -> None:
    data = bytearray(framed.read_bytes())
    data[-10] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    assert "checksum" in one_line_error(run("inspect", str(tmp_path / "damaged"), code=2))
    (tmp_path / "foreign").write_bytes(b"\x89PNG" + bytes(100))
    assert "not a tersegrad frame" in one_line_error(run("inspect", str(tmp_path / "foreign"), code=2))
    run("inspect", str(tmp_path / "missing"), code=2)


@pytest.mark.parametrize(
    ("text", "wire_id", "numel", "expected"),
    [
        ("no_such_compressor", 1, 10, "does not decode"),
        ("bf16", 1, 10, "wire id"),
        ("bf16", 2, 11, "does not decode"),
        ("bf16", 2, 1 << 40, "coordinates"),
    ],
)
def test_inspect_of_a_frame_that_does_not_decode(text: str, wire_id: int, numel: int, expected: str, tmp_path: Path) -> None:
    data = frame.pack(Message.frombytes(bytes(20)), wire_id=wire_id, text=text, spec=Spec.flat(numel), context=Context())
    (tmp_path / "frame").write_bytes(data)
    assert expected in run("inspect", str(tmp_path / "frame"), code=1).output


def test_doctor_names_versions_backend_and_extras() -> None:
    shown = run("doctor").output
    assert max(map(len, shown.splitlines())) <= 80
    found = json.loads(run("doctor", "--json").output)
    assert found["torch"] == torch.__version__
    assert native.isa() in found["kernels for CPU"]
    for fact in found:
        assert fact in shown


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tersegrad.report.doctor.EXTRAS", {"report": ("no-such-package>=1", "numpy")})
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "missing", "it was installed without a C++ compiler")
    found = json.loads(run("doctor", "--json").output)
    assert "pip install 'no-such-package>=1'" in found["extra report"]
    assert "numpy" in found["extra report"]
    assert "C++20 compiler" in found["kernels for CPU"]


def test_doctor_knows_the_extras_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra: tuple(needs) for extra, needs in project["optional-dependencies"].items() if extra != "dev"} == dict(EXTRAS)
    assert project["version"] == tersegrad.__version__


def test_sizes() -> None:
    assert parse_size("64Mi") == 64 << 20
    for bad in ("", "0", "-3", "4MB", "1e6"):
        with pytest.raises(BadConfiguration):
            parse_size(bad)


def test_real_process_ends_in_one_line_and_code_2() -> None:
    words = [sys.executable, "-c", "from tersegrad.cli import main; main()", "bench", "rate", "no_such_compressor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no_such_compressor" in done.stderr


def test_a_terminal_without_unicode_gets_plain_lines() -> None:
    words = [sys.executable, "-m", "tersegrad.cli", "bounds", "--alpha", "0.1"]
    source = str(Path(tersegrad.__file__).parents[1])
    variables = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": source}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    assert "-----" in done.stdout
    assert "?" not in done.stdout


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys; from tersegrad.cli import app; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "sys.exit(', '.join(m for m in ('torch', 'numpy', 'matplotlib', 'sklearn') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
