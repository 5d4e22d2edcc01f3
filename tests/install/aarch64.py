"""The package on another processor: cross-built for 64-bit Arm, and run under emulation with the lowest torch that is allowed.

    python -m tests.install.aarch64 build/aarch64      (make aarch64: it cross-builds first; needs root)

The folder holds the compiled module and the C++ tests. Those run under qemu-user. Then an arm64 Debian with Python 3.11 is put into
build/aarch64-root, with torch's CPU build for it and the lowest versions that pyproject.toml allows, and there

- every format vector is made anew, and must be byte for byte the one of spec/vectors, which was made on another processor;
- the walk of walk.py is made: every command, and a step of DDP, FSDP2 and local SGD.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.install import matrix, wheels

ROOT = wheels.ROOT
SYSTEM = ROOT / "build" / "aarch64-root"
SITE = SYSTEM / "opt" / "site"
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user", "debootstrap": "debootstrap"}
TOOLS |= {"qemu-aarch64-static": "qemu-user-static", "update-binfmts": "binfmt-support"}
LOWEST = next(text for text in matrix.PROJECT["dependencies"] if text.startswith("torch"))
PLATFORMS = ("2_28", "2_27", "2_26", "2_24", "2_17")
# What torch's CPU build needs: pip would read its markers for the machine that it runs on.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")


def programs(folder: Path) -> None:
    """Run the C++ tests, and the fuzzers for a little. qemu-user does not fork programs that have threads: without test_forks."""
    for path in sorted([*folder.glob("test_*"), *folder.glob("fuzz_*")]):
        if path.is_file() and os.access(path, os.X_OK) and path.name != "test_forks":
            rounds = ["200"] if path.name.startswith("fuzz") else []
            print(f"  {wheels.run('qemu-aarch64', '-L', '/usr/aarch64-linux-gnu', path, *rounds).strip()}", flush=True)


def system() -> None:
    """An arm64 Debian with Python, unpacked."""
    if not (SYSTEM / "usr" / "bin" / "python3.11").exists():
        shutil.rmtree(SYSTEM, ignore_errors=True)
        include = "python3.11,libpython3.11-stdlib,libgomp1,libstdc++6"
        wheels.run("debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", f"--include={include}", "bookworm", SYSTEM)
        for package in sorted((SYSTEM / "var/cache/apt/archives").glob("*.deb")):
            unpack = f"dpkg-deb --fsys-tarfile {package} | tar -x --keep-directory-symlink -C {SYSTEM}"
            wheels.run("bash", "-c", f"set -o pipefail; {unpack}")
        if (SYSTEM / "proc").is_symlink():
            (SYSTEM / "proc").unlink()
        for name in ("proc", "sys", "dev"):
            (SYSTEM / name).mkdir(exist_ok=True)
    wheels.run("update-binfmts", "--enable", "qemu-aarch64")


def packages(torch: str) -> None:
    """torch and the lowest of everything else, for that system."""
    shutil.rmtree(SITE, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--target", str(SITE)]
    pip += ["--only-binary=:all:", "--python-version", "311", "--implementation", "cp", "--upgrade"]
    pip += [word for abi in ("cp311", "abi3", "none") for word in ("--abi", abi)]
    pip += [word for glibc in PLATFORMS for word in ("--platform", f"manylinux_{glibc}_aarch64")]
    pip += ["--platform", "manylinux2014_aarch64"]
    wheels.run(*pip, "--no-deps", f"torch=={torch}")
    wheels.run(*pip, *TORCH_NEEDS, *matrix.pins(next(row for row in matrix.ROWS if row.name == "lowest")))


def inside(*words: str) -> None:
    """Run a command in that system."""
    variables = {
        "PYTHONPATH": "/opt/site:/opt/repository",
        "OMP_NUM_THREADS": "1",
        "HOME": "/root",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    mounts = (f"mount -t proc proc {SYSTEM}/proc", f"mount -t sysfs sysfs {SYSTEM}/sys", f"mount --rbind /dev {SYSTEM}/dev")
    script = " && ".join([*mounts, f'exec chroot {SYSTEM} "$@"'])
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script, "bash", *words], env=variables, check=False)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(words)}")


def package(folder: Path) -> None:
    """Our package with the module for that processor, and what the vectors are made with."""
    shutil.copytree(ROOT / "src" / "tersegrad", SITE / "tersegrad", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    module = wheels.only(folder, "_native*.so")
    shutil.copy(module, SITE / "tersegrad" / "kernels" / "_native.cpython-311-aarch64-linux-gnu.so")
    repository = SYSTEM / "opt" / "repository"
    shutil.rmtree(repository, ignore_errors=True)
    for name in ("spec", "tests/install"):
        shutil.copytree(ROOT / name, repository / name)


VECTORS = """
from spec import make_vectors
from tersegrad.kernels import native
assert native.available(), native.why_missing()
made = make_vectors.files()
other = [path for path, data in made.items() if (make_vectors.FOLDER / path).read_bytes() != data]
print(f"  {len(made)} files of format vectors made on {native.isa()}: {len(other)} differ {other[:5]}", flush=True)
raise SystemExit(bool(other))
"""


def main(folder: Path, torch: str) -> None:
    """All of it."""
    missing = [name for tool, name in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"needs: apt-get install {' '.join(missing)}")
    start = time.perf_counter()
    programs(folder)
    system()
    packages(torch)
    package(folder)
    inside("/usr/bin/python3.11", "-c", VECTORS)
    inside("/usr/bin/python3.11", "/opt/repository/tests/install/walk.py", "native")
    matrix.write({matrix.EMULATED: matrix.versions("3.11", sys.executable, "--path", str(SITE))})
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else matrix.lowest(LOWEST).partition("==")[2])
