"""The experiments run, and what their tables rest on is right."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import typer
from experiments.optimal_compression import convergence, methods, problems, rate_error, run, worst_case
from experiments.optimal_compression.compress import Channel

from tersegrad import recipes


@pytest.fixture(scope="module")
def diabetes() -> problems.Problem:
    return problems.load("diabetes")


def test_quick_run_writes_everything(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(run.main)
    result = CliRunner().invoke(app, ["--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for part in ("rate_error", "worst_case", "convergence", "iterations"):
        document = json.loads((tmp_path / f"{part}.json").read_text())
        assert document["quick"]
        assert document["results"]
        assert (tmp_path / f"{part}.md").stat().st_size > 200
    for figure in ("rate_error", "worst_case", "convergence_single", "convergence_distributed"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000
        assert (tmp_path / f"{figure}.svg").stat().st_size > 10_000


@pytest.mark.parametrize("name", list(problems.EMBEDDED))
def test_optimum_gradients_and_splits(name: str) -> None:
    problem = problems.load(name)
    rng = np.random.default_rng(0)
    whole = problems.Split(problem, 1)
    assert np.linalg.norm(whole.gradients(problem.optimum)) < 1e-13 * problem.smoothness * len(problem.labels)
    assert problem.condition <= 101 + 1e-9
    x, y = rng.normal(size=(2, problem.dimension))
    one, other = whole.gradients(x)[0], whole.gradients(y)[0]
    assert np.linalg.norm(one - other) <= problem.smoothness * np.linalg.norm(x - y) * (1 + 1e-12)
    assert (one - other) @ (x - y) >= problem.strong_convexity * np.square(x - y).sum() * (1 - 1e-12)
    for workers in (4, 20, 100):
        split = problems.Split(problem, workers)
        gradients = split.gradients(x)
        assert np.allclose(gradients.mean(axis=0), one, rtol=1e-12, atol=1e-14)
        steps = np.linalg.norm(gradients - split.gradients(y), axis=1)
        assert (steps <= split.smoothness * np.linalg.norm(x - y) * (1 + 1e-12)).all()
        assert split.heterogeneity > 1e-4
    assert whole.heterogeneity < 1e-24


def test_libsvm_reader(tmp_path: Path) -> None:
    text = "+1 1:0.5 3:-2\n-1 2:1 # a comment\n\n"
    (tmp_path / "plain").write_text(text)
    with lzma.open(tmp_path / "packed.xz", "wt") as file:
        file.write(text)
    for path in (tmp_path / "plain", tmp_path / "packed.xz"):
        features, labels = problems.read_libsvm(path, 3)
        assert features.tolist() == [[0.5, 0, -2], [0, 1, 0]]
        assert labels.tolist() == [1, -1]
    with pytest.raises(ValueError, match=r"outside 1\.\.2"):
        problems.read_libsvm(tmp_path / "plain", 2)
    (tmp_path / "housing_scale").write_text("1 1:1\n2 2:1\n")
    assert "housing_scale" in set(problems.available(tmp_path))


def test_channel_counts_real_bytes() -> None:
    channel = Channel("identity", 10)
    x = np.arange(10.0) / 3
    assert np.array_equal(channel.send(x, 0, 0), x.astype(np.float32))
    assert channel.sent == 40
    shrunk = Channel("natural", 10, shrink=True)
    assert shrunk.factor == pytest.approx(1 / (1 + shrunk.omega))
    with pytest.raises(ValueError, match="biased"):
        _ = Channel("top_k(k=3)", 10).omega


@pytest.mark.parametrize(("algorithm", "text"), [("diana", "natural"), ("ef21", "natural")])
def test_methods_without_a_plateau_converge(diabetes: problems.Problem, algorithm: methods.Algorithm, text: str) -> None:
    found = methods.run(problems.Split(diabetes, 4), algorithm, text, targets=(1e-10,), iterations=4000)
    assert found.reached["1e-10"] is not None
    assert found.reached["1e-10"].nbytes == 12 * found.reached["1e-10"].iteration


def test_distributed_compressed_descent_stalls_where_predicted(diabetes: problems.Problem) -> None:
    found = methods.run(problems.Split(diabetes, 4), "cgd", "natural", targets=(1e-10,), iterations=1500, predict=True)
    assert found.reached["1e-10"] is None
    assert found.predicted is not None
    assert found.ceiling is not None
    assert found.predicted / 4 < found.plateau < 4 * found.predicted
    assert found.plateau < found.ceiling


def test_sparse_dithering_needs_few_bytes(diabetes: problems.Problem) -> None:
    split = problems.Split(diabetes, 1)
    sent = {}
    for text in ("identity", "sparse_dithering(alpha=0.25)", "top_k(k=4)"):
        point = methods.run(split, "cgd", text, targets=(1e-4,)).reached["0.0001"]
        assert point is not None
        sent[text] = point.nbytes
    assert sent["identity"] >= 4.5 * sent["sparse_dithering(alpha=0.25)"]
    assert sent["top_k(k=4)"] >= 1.7 * sent["sparse_dithering(alpha=0.25)"]


def test_every_compressor_is_on_the_plane() -> None:
    families = {family for family, _ in rate_error.configurations()} | set(rate_error.NEED_STATISTICS)
    assert set(recipes.COMPRESSORS) <= families
    assert {family for family, _ in rate_error.configurations()} >= set(rate_error.SWEEPS)


@pytest.mark.parametrize("nu", [1.0, 0.25, 0.1])
def test_worst_vectors_reach_their_worst_case(nu: float) -> None:
    d = 1 << 16
    paper = worst_case.lengths(
        f"sparse_dithering(nu={nu}, coder=paper, scale=global)", worst_case.longest_for_paper(d, nu), vector="", nu=nu
    )
    assert paper.exact is not None
    assert abs(paper.per_coordinate - paper.exact) < 0.004
    assert paper.bits <= paper.bound
    assert paper.error <= nu


def test_halfway_vectors_have_the_largest_variance() -> None:
    text = "random_sparse_dithering(omega=0.25, scale=global)"
    found = worst_case.lengths(text, worst_case.halfway(1 << 14, 0.25), vector="", nu=0.25, messages=3)
    assert found.error == pytest.approx(0.25, rel=1e-3)


def test_committed_results_say_what_the_documentation_says() -> None:
    document = json.loads((run.RESULTS / "convergence.json").read_text())
    assert not document["quick"]
    reached = {(c["run"]["problem"], c["run"]["workers"], c["label"]): c["run"]["reached"] for c in document["results"]}
    for problem, (none, sparse) in {"diabetes": (4.5, 1.7), "breast_cancer": (5, 4)}.items():
        at = {label: r["0.0001"]["nbytes"] for (p, n, label), r in reached.items() if p == problem and n == 1}
        least = min(value for label, value in at.items() if label.startswith(convergence.OURS))
        assert at["none"] >= none * least
        assert at[convergence.BEST_TOP_K] >= sparse * least
    for (_, workers, label), values in reached.items():
        if workers == 1 or label.startswith(("DIANA", "EF21")):
            assert values["1e-10"] is not None, label
        elif label.startswith(("DCGD", "EF, ")):
            assert values["1e-10"] is None, label
