"""The CUDA sources without a GPU: NVRTC compiles them, and an emulation on the CPU compares their bytes with the reference."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import native, reference
from tersegrad.kernels.cuda import loader, nvrtc, rans
from tests.kernels.emulator import compiler, emulated

needs_nvrtc = pytest.mark.skipif(nvrtc.why_missing() is not None, reason=str(nvrtc.why_missing()))
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@needs_nvrtc
@pytest.mark.parametrize("name", loader.names())
def test_sources_compile_for_a_gpu(name: str) -> None:
    assert nvrtc.compile_source(loader.source(name), name, "sm_90")[:4] == b"\x7fELF"


@needs_nvrtc
def test_compiler_errors_are_told() -> None:
    with pytest.raises(
        nvrtc.CompileError, match=r"broken.cu does not compile for sm_90(.|\n)*identifier \"nothing\" is undefined"
    ):
        nvrtc.compile_source("__global__ void f(int* x) { *x = nothing; }", "broken.cu", "sm_90")


def test_compiled_kernels_are_kept_and_checked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_source(source: str, name: str, architecture: str) -> bytes:
        made.append(architecture)
        return b"cubin for " + architecture.encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    for _ in range(2):
        assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"
    assert loader.cubin("rans.cu", "sm_80") == b"cubin for sm_80"
    assert made == ["sm_90", "sm_80"]
    (kept,) = tmp_path.glob("tersegrad/cuda/*sm_90*")
    for damaged in (kept.read_bytes()[:-1], b"", kept.read_bytes()[:40] + b"?" + kept.read_bytes()[41:]):
        kept.write_bytes(damaged)
        assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"
    assert made.count("sm_90") == 4
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    loader.cubin("rans.cu", "sm_90")
    assert made.count("sm_90") == 5
    # A folder that cannot be written to costs the cache, not the kernels.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loader, "_driver", lambda: "CUDA's driver is not there (no file)")
    assert "driver" in str(loader.why_missing())
    monkeypatch.setattr(loader, "_driver", lambda: object())
    monkeypatch.setattr(nvrtc, "_library", lambda: "NVRTC is not installed (no file)")
    assert "NVRTC" in str(loader.why_missing())


# rANS


def _symbols(n: int, alphabet: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    if kind == "normal":
        drawn = torch.randn(n, generator=generator) * alphabet / 8 + alphabet / 2
        return drawn.clamp(0, alphabet - 1).to(torch.uint8)
    if kind == "uniform":
        return torch.randint(0, alphabet, (n,), generator=generator).to(torch.uint8)
    return torch.full((n,), alphabet - 1, dtype=torch.uint8)


def _rans_cases() -> Iterator[tuple[Tensor, int, Tensor | None, int, bool]]:
    sizes = ((0, 5, 1), (1, 2, 1), (700, 7, 1), (3000, 31, 1), (40000, 31, 1), (20000, 16, 3), (700, 30, 200), (5000, 256, 1))
    for n, alphabet, tables in (*sizes, (70000, 3, 1), (90, 1, 1)):
        for kind in ("normal", "uniform", "constant"):
            contexts = None
            if tables > 1:
                drawn = torch.randint(0, min(tables, 256), (n if tables > 3 else -(-n // 64),))
                contexts = drawn.to(torch.uint8)
            yield _symbols(n, alphabet, kind), alphabet, contexts, tables, n == 70000


@needs_compiler
def test_rans_writes_the_same_bytes() -> None:
    ops = native if native.available() else reference
    with emulated():
        for symbols, alphabet, contexts, tables, sample in _rans_cases():
            room = 1 + symbols.numel()
            # One byte behind an aligned address.
            expected, found = torch.zeros(room, dtype=torch.uint8), torch.zeros(room + 1, dtype=torch.uint8)[1:]
            arguments = (symbols, alphabet, contexts, tables, sample, 14)
            length = int(ops.rans_encode(*arguments, expected))
            assert int(rans.rans_encode(*arguments, found)) == length
            assert torch.equal(found, expected)
            decoded = torch.full_like(symbols, 77)
            assert int(rans.rans_decode(found, alphabet, contexts, tables, decoded)) == length
            assert torch.equal(decoded, symbols)


@needs_compiler
def test_rans_rejects_what_the_reference_rejects() -> None:
    symbols = _symbols(600, 9, "normal")
    message = torch.zeros(600, dtype=torch.uint8)
    message = message[: int(reference.rans_encode(symbols, 9, None, 1, False, 14, message))]
    generator = torch.Generator().manual_seed(1)
    refused = 0
    with emulated():
        for trial in range(40):
            bad = message.clone()
            if trial < 12:
                bad = bad[: int(torch.randint(0, bad.numel(), (), generator=generator))]
            else:
                at = int(torch.randint(0, 20 if trial < 30 else bad.numel(), (), generator=generator))
                bad[at] ^= 1 << trial % 8
            results: list[object] = []
            for ops in (native if native.available() else reference, rans):
                out = torch.zeros(600, dtype=torch.uint8)
                try:
                    results.append((int(ops.rans_decode(bad, 9, None, 1, out)), out.tolist()))
                except CorruptMessage:
                    results.append("corrupt")
            assert results[0] == results[1], trial
            refused += results[0] == "corrupt"
        with pytest.raises(ValueError, match="outside the alphabet"):
            rans.rans_encode(symbols, 4, None, 1, False, 14, torch.zeros(2000, dtype=torch.uint8))
    assert refused > 20
