"""Compile the CUDA sources by NVRTC without a GPU: ``python -m tests.kernels.compile_cuda [ARCHITECTURE ...]``, sm_90 unless told."""

from __future__ import annotations

import sys

from tersegrad.kernels.cuda import loader, nvrtc


def main(architectures: list[str]) -> None:
    """Compile every source for each of the architectures."""
    missing = nvrtc.why_missing()
    if missing is not None:
        sys.exit(missing)
    for architecture in architectures:
        for name in loader.names():
            size = len(nvrtc.compile_source(loader.source(name), name, architecture))
            print(name, architecture, f"{size} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["sm_90"])
