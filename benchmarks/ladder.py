"""What the rungs of the planner's ladder, and coarser settings, do to accuracy: ``torchrun --nproc-per-node 4 -m benchmarks.ladder``.

A network of two hidden layers learns scikit-learn's handwritten digits by SGD with momentum and by AdamW, with several seeds. The
table goes to ``benchmarks/results``. Some eight minutes on two idle cores.
"""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path

from tersegrad import bench
from tersegrad.advice import DEFAULT, row
from tersegrad.integrations import processes
from tersegrad.planner.plan import LADDER
from tersegrad.report.tables import Column, Table
from tersegrad.train import Job, load, run

RESULTS = Path(__file__).parent / "results"
COARSER = (
    DEFAULT,
    row("adam", 10).compressor,
    "error_feedback(sparse_dithering(alpha=0.25))",
    "error_feedback(sparse_dithering(alpha=0.5))",
    "error_feedback(top_k(fraction=0.01))",
)
OPTIMISERS = {"sgd": "SGD, momentum 0.9", "adamw": "AdamW"}
SEEDS, EPOCHS, MODEL = range(3), 20, "mlp(width=256)"

Row = dict[str, float | str]


def table(rows: list[Row], workers: int) -> Table:
    """Mean accuracies with the lowest and the highest seed, and bits."""
    columns = [Column("setting", number=False), *(Column(f"{words}: accuracy %") for words in OPTIMISERS.values())]
    columns += [Column("loss"), Column("bits/coord")]
    lines = []
    for setting in dict.fromkeys(str(r["setting"]) for r in rows):
        cells = [setting]
        for optimiser in OPTIMISERS:
            found = [100 * float(r["accuracy"]) for r in rows if (r["setting"], r["optimiser"]) == (setting, optimiser)]
            cells.append(f"{statistics.mean(found):.1f} [{min(found):.1f} {max(found):.1f}]" if found else "-")
        own = [r for r in rows if r["setting"] == setting]
        losses = [statistics.mean(float(r["loss"]) for r in own if r["optimiser"] == o) for o in OPTIMISERS]
        cells += [", ".join(f"{loss:.3f}" for loss in losses), f"{statistics.mean(float(r['bits']) for r in own):.2f}"]
        lines.append(tuple(cells))
    note = (
        f"Digits, {MODEL}, {workers} workers of 32 images, {EPOCHS} epochs, {len(SEEDS)} seeds (mean, lowest and highest); loss of the "
        f"last steps for both optimisers. Everything but bf16 goes through two_shot. One test image is 0.34 %. {bench.describe()}."
    )
    return Table(tuple(columns), tuple(lines), "Accuracy along the planner's ladder", note)


def main() -> None:
    settings = [("bf16", "all_reduce"), *((text, "two_shot") for text in (*LADDER, *COARSER))]
    rows: list[Row] = []
    with processes.join() as worker:
        images = load("digits", worker)
        for seed in SEEDS:
            for optimiser in OPTIMISERS:
                for compressor, exchange in settings:
                    job = Job(
                        compressor=compressor, exchange=exchange, optimizer=optimiser, seed=seed, epochs=EPOCHS, model=MODEL
                    )
                    result = run(job, worker, None, images)
                    row: Row = {"setting": compressor, "optimiser": optimiser, "seed": seed, "accuracy": result.accuracy}
                    rows.append({**row, "loss": result.loss, "bits": result.bits_per_coordinate})
                    if worker.leads:
                        print(rows[-1], flush=True)
        if worker.leads:
            stem = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-ladder"
            stem.with_suffix(".json").write_text(json.dumps({"machine": bench.describe(), "rows": rows}, indent=1) + "\n")
            stem.with_suffix(".md").write_text(table(rows, worker.size).markdown() + "\n")
            print(f"written: {stem}.json, .md", flush=True)


if __name__ == "__main__":
    main()
