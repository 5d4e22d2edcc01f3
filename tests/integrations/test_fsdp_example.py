"""The example of FSDP2 as it is started by hand: it learns, and goes on from its checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines(*arguments: str) -> list[str]:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "examples/fsdp/train.py",
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith("step ")]


def test_the_example_learns_and_goes_on(tmp_path: Path) -> None:
    given = (
        str(ROOT / "spec" / "wire.md"),
        "--compressor",
        "error_feedback(sparse_dithering(alpha=0.1))",
        "--folder",
        str(tmp_path),
    )
    found = [lines(*given, "--steps", steps) for steps in ("10", "20")]
    assert [[line.partition(":")[0] for line in one] for one in found] == [["step 10"], ["step 20"]]
    first, second = (float(one[0].split()[3].rstrip(",")) for one in found)
    # A byte that was drawn from all 256 alike takes log(256) = 5.5.
    assert second < first < 5
