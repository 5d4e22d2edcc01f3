"""The advice: delay is what it says it is, ages add up, the quick form runs and resumes, and what is committed supports the table."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

import typer
from experiments.advice import run, tables
from experiments.advice.late import EVERY, Ages, Late, Leaky
from experiments.advice.loop import Run, quick
from experiments.advice.record import RESULTS, read
from experiments.advice.settings import BASE, BY_LABEL, DELAYS, RUNGS, SETTINGS
from experiments.advice.tasks import CHOOSE, FIRST_REPORT, REPORT, SEEN, UNSEEN
from typer.testing import CliRunner

import tersegrad
from tersegrad import Context, Spec, advice
from tersegrad.exchange import TwoShotExchange, scheme, virtual
from tersegrad.integrations import local_sgd

SPEC = Spec.flat(1024)


def exchanged(text: str, exchange: str, steps: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], Ages]:
    """Gaussian vectors of two ranks through an exchange."""
    made = scheme(exchange).make(tersegrad.parse(text, extra=(Late, Leaky)))
    states, ages = virtual.init(made, SPEC, 2), Ages(made, SPEC, 2)
    generator, given, means = torch.Generator().manual_seed(0), [], []
    for step in range(steps):
        given.append([torch.randn(1024, generator=generator) for _ in range(2)])
        found = virtual.run(made, given[-1], states, SPEC, Context(step=step))
        ages.step(given[-1], list(states), list(found.states))
        states = list(found.states)
        means.append(found.mean)
    return given, means, ages


def test_late_sends_every_gradient_exactly_and_late() -> None:
    given, means, _ = exchanged("late(steps=3)", "two_shot(second=identity)", 6)
    assert all(not bool(mean.any()) for mean in means[:3])
    for sent, mean in zip(given, means[3:]):
        assert torch.allclose(mean, (sent[0] + sent[1]) / 2)


@pytest.mark.parametrize("age", [1, 3])
def test_leaky_has_the_age_that_it_names(age: int) -> None:
    given, means, ages = exchanged(f"leaky(share={1 / (1 + age)!r})", "two_shot(second=identity)", 120)
    assert ages.first_mean == pytest.approx(age, rel=0.05)
    assert ages.mean == ages.first_mean  # the second round keeps nothing
    # Nothing is lost: what has been sent is all that was given but for what waits.
    waits = torch.stack(means).sum(0) - torch.stack([(a + b) / 2 for a, b in given]).sum(0)
    assert float(waits.norm()) < 2 * age * 1024**0.5


def test_error_feedback_delays_and_stateless_messages_do_not() -> None:
    top = "error_feedback(top_k(fraction=0.02))"
    coarse, fine = (exchanged(text, "two_shot", 40)[2] for text in (top, "error_feedback(sparse_dithering(alpha=0.1))"))
    assert coarse.first_mean > 5 * fine.first_mean > 0
    # The second round has no residual unless it is told to.
    assert coarse.mean == coarse.first_mean
    twice = exchanged(top, f"two_shot(second={top})", 40)[2]
    assert twice.mean > twice.first_mean + 1
    for text in ("dithered_trellis(omega=4)", "qsgd(bits=4)"):
        stateless = exchanged(text, "two_shot", 3)[2]
        assert (stateless.mean, stateless.estimate) == (0, 0)


def test_top_k_of_everything_has_no_age() -> None:
    ages = exchanged("error_feedback(top_k(fraction=1.0))", "two_shot", 5)[2]
    assert ages.mean == pytest.approx(0, abs=1e-6)
    assert len(ages.first[0].waits) == 1024 // EVERY


def test_settings_are_what_the_library_parses() -> None:
    for setting in (*SETTINGS, *DELAYS):
        assert setting.made()
        assert scheme(setting.exchange)
        assert setting.local is None or local_sgd.method(setting.local)
    assert isinstance(scheme("two_shot").make(BASE.made()), TwoShotExchange)


def test_runs_count_the_bytes_of_the_exchange() -> None:
    base, coarse, alone = (quick("digits", BY_LABEL[label]) for label in ("bf16", "trellis 4", "H 4, trellis 4"))
    # Six steps of two rounds of three quarters of the vector, in two bytes each; a message in a hundred bytes of tables per part.
    assert base.sent == pytest.approx(6 * 2 * 0.75 * 2 * base.parameters, rel=1e-3)
    assert 20 < base.sent / coarse.sent < 60
    assert (coarse.exchanges, alone.exchanges) == (6, 2)  # the last round is shorter
    assert quick("digits", BASE).loss == base.loss


def test_quick_form_writes_tables_and_goes_on_where_it_was(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(run.main)
    words = ["--quick", "--seeds", "1", "--out", str(tmp_path), "--only"]
    first = CliRunner().invoke(app, [*words, "trellis 4"])
    assert first.exit_code == 0, first.output
    assert "4/4" in first.output
    again = CliRunner().invoke(app, [*words, "trellis 4;H 8, trellis 1"])
    assert again.exit_code == 0, again.output
    assert "2/2" in again.output
    document = json.loads((tmp_path / "choose.json").read_text())
    assert len(document["results"]) == 6
    assert len(read(tmp_path / "choose.json")) == 6
    assert "By budget" in (tmp_path / "choose.md").read_text()
    assert CliRunner().invoke(app, ["--only", "nothing of this name"]).exit_code != 0


def made(label: str, sent: float, accuracy: float, task: str = "mnist", loss: float = 1.0, seed: int = 0) -> Run:
    return Run(task, "adam", BY_LABEL[label], seed, 1e-3, 480, 1000, loss, accuracy, sent, 480, 0.0, 0.0, 0.0, 1.0)


def test_the_rule_takes_the_best_of_what_fits() -> None:
    runs = [made("bf16", 1000, 98), made("trellis 4", 50, 97.8), made("feedback 0.5", 50, 97.0), made("trellis 1", 100, 98.0)]
    ((cost, best), (_, second)) = tables.ranked(runs, "adam", 20)
    assert (best.label, second.label) == ("trellis 4", "feedback 0.5")
    assert cost == pytest.approx(1.0)
    text = [dataclasses.replace(r, task="shakespeare", loss=1.0 + 0.01 * k) for k, r in enumerate(runs)]
    assert [s.label for _, s in tables.ranked([*runs, *text], "adam", 20)] == ["trellis 4", "feedback 0.5"]
    assert tables.ranked(runs, "adam", 100) == []


AGAIN = ("adam", 20)  # chosen a second time, on four tasks
LATE = ("momentum", 100)  # chosen a second time, on all six, and held against nothing in these parts


@pytest.mark.parametrize("who", ["adam", "momentum"])
def test_the_rows_before_are_what_the_rule_chose(who: advice.Who) -> None:
    runs = [r for part in ("choose", "report") for r in read(RESULTS / f"{part}.json")]
    for budget in tables.BUDGETS:
        # All but two were chosen before the tasks of FIRST_REPORT were looked at.
        names = {LATE: CHOOSE + REPORT, AGAIN: CHOOSE}.get((who, budget), CHOOSE[:2])
        best = tables.ranked([r for r in runs if r.task in names], who, budget)[0][1]
        assert best == tables.before(who, budget)


def test_where_the_rows_before_stand() -> None:
    chosen, reported = (tables.held(read(RESULTS / f"{part}.json")) for part in ("choose", "report"))
    found = [h for h in chosen if h.task in FIRST_REPORT and (h.optimizer, h.budget) != AGAIN] + reported
    found = [h for h in found if (h.optimizer, h.budget) != LATE]
    assert len(found) >= 12
    assert all(min(len(h.row.runs), len(h.best.runs)) == 3 for h in found)
    # Two did not, as README says.
    assert [(h.optimizer, h.budget, h.task) for h in found if not h.near] == [("adam", 100, "help")]
    assert [(h.optimizer, h.budget, h.task) for h in found if not h.fits] == [("adam", 20, "cifar10")]


@pytest.mark.parametrize("who", ["adam", "momentum"])
def test_every_row_ran_with_three_seeds_on_two_tasks_that_it_was_not_chosen_on(who: advice.Who) -> None:
    chosen, staged = (read(RESULTS / f"{part}.json") for part in ("choose", "stages"))
    for row in (r for r in advice.TABLE if r.who == who):
        runs, names = (staged, UNSEEN) if row.fewer in tables.BUDGETS else (chosen, FIRST_REPORT)
        for task in names:
            found = [
                cell for setting, cell in tables.cells(runs, task, who).items() if tables.sends(setting) == tables.sends(row)
            ]
            assert [len(cell.runs) for cell in found] == [3]
            assert found[0].fewer >= tables.ABOUT * row.fewer
    # What is the default costs next to nothing.
    for task in FIRST_REPORT:
        assert tables.cells(chosen, task, who)[BY_LABEL["qsgd 4 bit"]].cost < 1.5


@pytest.mark.parametrize("who", ["adam", "momentum"])
def test_no_rung_of_the_ladder_lost_more_than_seeds_differ(who: advice.Who) -> None:
    """What ``tersegrad plan`` says of the settings that it advises."""
    runs = read(RESULTS / "ladder.json")
    assert [s.compressor for s in RUNGS] == list(advice.LADDER)
    for task in SEEN:
        own = tables.cells(runs, task, who)
        text = task in tables.TEXTS
        low, high = own[BASE].span("loss" if text else "accuracy")
        for rung in RUNGS:
            costs = own[rung].by_seed
            assert len(costs) == 3
            assert statistics.fmean(costs) < (0.3 if text else 0.15)
            assert statistics.fmean(costs) < (100 * (high / low - 1) if text else high - low)
    both = [cost for s in RUNGS for task in SEEN for cost in tables.cells(runs, task, who)[s].by_seed]
    assert sum(cost > 0 for cost in both) < 0.6 * len(both)  # as often better as worse, about


def test_a_row_is_held_against_what_sends_as_few_bytes() -> None:
    label, local, coarse = tables.before("adam", 20).label, "H 2, trellis 0.25", "trellis 0.5"
    runs = [made("bf16", 1000, 98), made(label, 50, 97.5), made(local, 60, 97.6), made("qsgd 4 bit", 250, 98)]
    (found,) = tables.held(runs)
    assert (found.budget, found.best.runs[0].setting.label, found.near) == (20, local, True)
    assert found.behind == pytest.approx(0.5)
    (found,) = tables.held([*runs, made(coarse, 50, 97.8)])
    assert (found.best.runs[0].setting.label, found.near) == (coarse, False)
    assert "| no " in tables.page("report", [dataclasses.replace(r, task="cifar10") for r in [*runs, made(coarse, 50, 97.8)]])
    (found,) = tables.held([made("bf16", 1000, 98), made(label, 80, 97.5), made(local, 60, 97.0)])
    assert (found.near, found.fits) == (True, False)
