"""The page about runs: made from real logs, whole in itself, and used in a browser where there is one."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tersegrad import cli
from tersegrad.cli import app
from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import processes
from tersegrad.planner import Link
from tersegrad.report import page, runs
from tersegrad.train import Job, Result, load, run
from tests.report.browser import needs_browser, use

SETTINGS: tuple[dict[str, Any], ...] = (
    {"compressor": "bf16"},
    {"compressor": "error_feedback(sparse_dithering(alpha=0.1))"},
    {"compressor": None, "exchange": "power_sgd(rank=2)"},
    {"compressor": "error_feedback(top_k(fraction=0.05))", "local": "local_sgd(every=4)"},
)
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of four short runs of virtual workers."""
    path = tmp_path_factory.mktemp("runs") / "all.jsonl"
    jobs = [Job(model="mlp(width=64)", steps=48, evaluate_every=12, log=path, **options) for options in SETTINGS]

    def work(worker: processes.Worker) -> None:
        found = load("digits", worker)
        for job in jobs:
            run(job, worker, given=found)

    processes.virtual(2, work)
    return path


@pytest.fixture(scope="module")
def made(log: Path) -> Path:
    return page.write([log], log.with_name("report.html"))


def test_a_log_tells_the_whole_run(log: Path) -> None:
    found = runs.read([log])
    assert [one.first.get("compressor") for one in found] == [s["compressor"] for s in SETTINGS]
    for one in found:
        assert one.result is not None
        assert len(one.steps) == 48
        assert sum(row.get("accuracy") is not None for row in one.steps) == 4
        assert 10 <= len(one.exchanges) <= 60
        assert one.first["layers"]["1.weight"] == 64 * 64
    numbers = found[1].exchanges[-1]["numbers"]
    assert 0 < numbers["layer/3.weight/message_error"] < 1
    assert found[1].sent_dense["5.bias"] == "10 elements, fewer than dense_below=1024"
    assert "message_error" not in found[2].exchanges[-1]["numbers"]  # PowerSGD writes no messages


def test_the_page_is_whole_in_itself(made: Path) -> None:
    text = made.read_text()
    assert len(text) < 6e6
    assert re.findall(r"(?:src|href|url|@import)\s*[=(]\s*[\"']?(?!#)\w+:", text) == []
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert len(data["runs"]) == len(SETTINGS)
    assert data["links"]["predicted"] is not None  # no run of torch's own all-reduce to compare with
    assert all(verdict.startswith("At ") for verdict in data["links"]["verdicts"])


def test_numbers_of_the_page_are_those_of_the_log(log: Path) -> None:
    found = runs.read([log])
    data = page.document(found)
    for one, shown in zip(found, data["runs"]):
        assert shown["bits"] == one.number("bits_per_coordinate")
        assert shown["evaluations"]["accuracy"][-1] == pytest.approx(one.number("accuracy"), abs=1e-5)
        cpu, sent = one.number("cpu_seconds"), one.number("bytes_per_step")
        assert shown["seconds"][24] == pytest.approx(cpu + 8 * sent / 1e8, rel=1e-4)  # type: ignore[operator]


def test_the_link_that_a_run_measured_is_marked_and_its_latency_counts(log: Path, tmp_path: Path) -> None:
    found = runs.read([log])
    assert "measured" not in page.document(found)["links"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = next(line["result"]["report"] for line in lines if "result" in line)
    told |= {"link/bits_per_second": 9.4e7, "link/latency": 0.08}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = runs.read([tmp_path])
    data = page.document(again)
    assert (data["links"]["measured"], data["links"]["latency"]) == (9.4e7, "80 ms")
    # bf16 has a fixed size: two collectives of two_shot, an all-to-all and one hop around a ring of two.
    waits = [shown["seconds"][24] - before.step_seconds(Link(1e8)) for shown, before in zip(data["runs"], found)]
    assert waits[0] == pytest.approx(2 * 0.08, rel=1e-3)
    assert waits[1] == pytest.approx(4 * 0.08, rel=1e-3)  # lengths travel first, twice
    assert waits[2] == pytest.approx(0, abs=1e-4)  # PowerSGD: not known
    assert waits[3] == pytest.approx(4 * 0.08 / 4, rel=1e-3)  # in every fourth step


def test_a_demonstration_without_matplotlib_keeps_its_page_and_its_numbers(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cli, "display", lambda made: None)
    results = [
        Result(Job(**options), 2, 1000, 48, 0.9, 0.1, 1e6, 4.0, 0.1, 0.01, 1.0, {"steps": 48}) for options in SETTINGS[:2]
    ]
    cli._show_comparison(results, tmp_path, log)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("figure:")]
    assert said == ["figure: none, figures need matplotlib: pip install 'tersegrad[report]'"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "demo.json").read_text())["results"]) == 2


def test_texts_of_a_log_stay_texts(log: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()[:3]]
    lines[0]["run"] = lines[0]["compressor"] = HOSTILE
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page.write([tmp_path], tmp_path / "report.html", title=HOSTILE).read_text()
    assert HOSTILE not in text
    assert "<img" not in text
    assert "not ended" in text


def verdict_of(accuracies: list[float], cpu: list[float], rate: float) -> str:
    found = []
    for k, (accuracy, seconds) in enumerate(zip(accuracies, cpu)):
        result = {"accuracy": accuracy, "cpu_seconds": seconds, "bytes_per_step": 1e6 / (1 + 9 * k), "parameters": 1000}
        exchange = "all_reduce" if k == 0 else "two_shot"
        found.append(runs.Run({"run": f"run{k}", "exchange": exchange, "workers": 4}, result=result))
    return runs.verdict(found, rate)


def test_verdicts() -> None:
    # 1 MB or 0.1 MB per step: 80 and 8 ms at 100 Mbit/s, 0.08 and 0.008 ms at 100 Gbit/s.
    assert verdict_of([0.9, 0.9], [0.01, 0.02], 1e8) == (
        "At 100 Mbit/s, compress with run1: 3.2 times as fast as run0 (28 ms per step instead of 90 ms)"
    )
    assert verdict_of([0.9, 0.9], [0.01, 0.02], 1e11).startswith("At 100 Gbit/s, do not compress: run0 takes 10 ms")
    assert "no compressed run came within 1 point" in verdict_of([0.9, 0.8], [0.01, 0.02], 1e8)
    # Less than five per cent is not worth it.
    assert "do not compress" in verdict_of([0.9, 0.9], [0.01, 0.0699 + 0.01], 1e8)


def test_a_run_that_was_continued_is_one_run(log: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    end = next(k for k, line in enumerate(lines) if "result" in line)
    whole = lines[: end + 1]
    cut = next(k for k, line in enumerate(whole) if line.get("step") == 30)
    again = next(k for k, line in enumerate(whole) if line.get("step") == 25)
    kept = [*whole[:cut], {**whole[0], "epochs": 99}, *whole[again:]]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 49, "lo')
    (one,) = runs.read([tmp_path])
    assert [row["step"] for row in one.steps] == list(range(1, 49))
    assert one.result is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no run"),
        ("1\n2\n", "no JSON object"),
        ('{"step": 1}\n', "belongs to no run"),
        ("loss 3\nloss 2\n", "no JSON"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(BadConfiguration, match=words):
        runs.read([tmp_path / "log.jsonl"])


def test_the_command(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(log), "--out", str(tmp_path / "new" / "page.html")])
    assert done.exit_code == 0, done.output
    assert f"report: {tmp_path / 'new' / 'page.html'}" in done.output.replace("\n", "")
    assert (tmp_path / "new" / "page.html").stat().st_size > 50_000
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none.jsonl")])
    assert missing.exit_code == 2
    assert "there is no" in missing.output


def test_a_page_is_opened_from_a_terminal_with_a_display_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[str] = []

    def keep(place: str) -> bool:
        opened.append(place)
        return True

    monkeypatch.setattr("webbrowser.open", keep)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("CI", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    shown = importlib.import_module("tersegrad.cli.report").display
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not shown(tmp_path / "report.html")
    monkeypatch.setenv("DISPLAY", ":0")
    assert shown(tmp_path / "report.html")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not shown(tmp_path / "report.html")
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_many_runs_and_layers_stay_small(log: Path) -> None:
    (first, *_) = runs.read([log])
    names = {f"layer{k}": 1000 - k for k in range(1000)}
    numbers = {f"layer/{name}/{what}": 0.123456 for name in names for what in page.MEANINGS.values()}
    first.first["layers"] = names
    first.exchanges = [{"exchanged": k, "numbers": numbers} for k in range(40)]
    first.steps = [{"step": k, "loss": 1.0, "sent": k, "accuracy": 0.5} for k in range(20_000)]
    assert len(page.page([first] * 8)) < 6e6


# ---------------------------------------------------------------------------------------------------------------- in a browser

LOOK = """
const q = (s) => document.querySelectorAll(s);
const set = (id, value) => {
  const e = document.getElementById(id);
  e.value = value;
  e.dispatchEvent(new Event("input", {bubbles: true}));
};
const text = (id) => document.getElementById(id).textContent;
const drawing = (id) => document.querySelector("#" + id + " svg").innerHTML;
const changed = (id, act) => { const before = drawing(id); act(); return drawing(id) !== before; };
const out = { ready: document.body.dataset.ready, charts: {}, wide: document.documentElement.scrollWidth, inner: innerWidth };
for (const c of q(".chart")) out.charts[c.id] = c.querySelectorAll("svg .series").length;
out.ground = getComputedStyle(document.body).backgroundColor;
out.points = q("#plane .point").length;
out.steps = changed("plane", () => set("plane-what", "steps"));
out.more_points = q("#plane .point").length;
out.layer_points = changed("plane", () => set("plane-what", "layers"));
out.loss = changed("bytes", () => set("bytes-what", "test_loss"));
out.linear = changed("bytes", () => set("bytes-scale", "linear"));
out.verdict = [text("verdict"), text("link-name")];
out.slid = changed("link", () => set("link-rate", 60));
out.verdict_after = [text("verdict"), text("link-name")];
out.over_time = [...q("#time-what option")].filter((o) => !changed("time", () => set("time-what", o.value))).map((o) => o.value);
out.layers_what = changed("layers", () => set("layers-what", "error"));
out.rows = q("#layers-table tbody tr").length;
const first = () => document.querySelector("#layers-table tbody td.name").textContent;
out.sorted = [first()];
document.querySelector('#layers-table th[data-key="numel"] button').click();
out.sorted.push(first());
const box = document.querySelector("#layers-table tbody input:checked");
out.unchosen = changed("layers", () => box.click());
out.hidden = changed("link", () => q("#legend input")[1].click());
out.series_left = q("#link .series").length;
out.dense = text("dense-note");
const host = document.getElementById("plane"), at = host.getBoundingClientRect(), ratio = at.width / host.scale;
const p = host.points.find((x) => !x[2].startsWith("limit"));
host.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + p[0] * ratio, clientY: at.top + p[1] * ratio, bubbles: true }));
out.tip = [document.getElementById("tip").hidden, text("tip")];
return out;
"""


@needs_browser
def test_the_measured_link_is_drawn(log: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    next(line["result"]["report"] for line in lines if "result" in line)["link/bits_per_second"] = 9.4e7
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = page.write([tmp_path], tmp_path / "report.html")
    words = use(made, 'return [...document.querySelectorAll("#link .measured")].map((e) => e.textContent);')
    assert words == ["", "measured: 94 Mbit/s, 0.0 ms"]


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_figures_are_drawn_and_controls_work(made: Path, width: int, dark: bool) -> None:
    found = use(made, LOOK, width, dark)
    assert found["ready"] == "yes"
    # Runs, and the two limits or the predicted line; the layers that are not dense.
    assert found["charts"] == {"plane": 3 + 2, "bytes": 4, "link": 4 + 1, "time": 4, "layers": 2}
    assert found["wide"] <= found["inner"] == width  # nothing but tables scrolls sideways
    assert (found["ground"] == "rgb(255, 255, 255)") is not dark
    for part in ("steps", "layer_points", "loss", "linear", "slid", "layers_what", "unchosen", "hidden"):
        assert found[part], part
    assert found["more_points"] > found["points"] == 3
    assert found["over_time"] == ["loss"]  # what it shows at first
    assert found["verdict"][1] == "100 Mbit/s"
    assert found["verdict_after"][1] == "100 Gbit/s"
    assert found["verdict"][0] != found["verdict_after"][0]
    assert found["rows"] == 6
    assert found["sorted"] == ["1.weight", "5.bias"]
    assert found["series_left"] == 3 + 1
    assert found["dense"].startswith("4 of 6 layers were sent dense")
    assert found["tip"][0] is False
    assert "bits per coordinate, error" in found["tip"][1]
