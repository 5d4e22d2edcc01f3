"""The package, the independent decoder and the committed vectors agree: on values, on refusals, and on what exists."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
import struct
import subprocess
import sys
import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.cases import CASES

import tersegrad
from spec import decoder, make_vectors
from tersegrad import kernels
from tersegrad.core import frame
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Piece, needs_second_moment
from tersegrad.recipes import COMPRESSORS, RECIPES, WRAPPERS

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec" / "vectors"
REGISTERED = {**COMPRESSORS, **WRAPPERS}


def index(kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((VECTORS / f"{kind}.json").read_text(encoding="utf-8"))
    return entries


def pieces(entry: dict[str, Any]) -> tuple[Piece, ...] | None:
    if "pieces" not in entry:
        return None
    return tuple(Piece(tuple(p["shape"]), p["start"], p["stop"], p["name"]) for p in entry["pieces"])


def using(backend: str) -> AbstractContextManager[None]:
    return kernels.force("reference") if backend == "reference" else nullcontext()


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


@pytest.mark.parametrize("backend", ["best", "reference"])
def test_the_package_decodes_every_accepted_vector(backend: str) -> None:
    for entry in index("accept"):
        data = (VECTORS / entry["file"]).read_bytes()
        opened = frame.unpack(data)
        assert (opened.text, opened.wire_id, opened.numel) == (entry["text"], entry["wire_id"], entry["numel"])
        if backend == "reference" and opened.numel > 10_000:
            continue
        with using(backend):
            assert checksum(make_vectors.from_package(data, pieces(entry))) == entry["decoded_crc32"], entry


def test_the_independent_decoder_decodes_every_accepted_vector() -> None:
    for entry in index("accept"):
        data = (VECTORS / entry["file"]).read_bytes()
        assert checksum(make_vectors.from_spec(data, pieces(entry))) == entry["decoded_crc32"], entry


@pytest.mark.parametrize("backend", ["best", "reference"])
def test_the_package_refuses_every_rejected_vector(backend: str) -> None:
    for entry in index("reject"):
        data = (VECTORS / entry["file"]).read_bytes()
        with using(backend):
            try:
                make_vectors.from_package(data, pieces(entry))
            except CorruptMessage:
                continue
        pytest.fail(f"accepted: {entry}")


def test_the_independent_decoder_refuses_every_rejected_vector() -> None:
    for entry in index("reject"):
        data = (VECTORS / entry["file"]).read_bytes()
        try:
            make_vectors.from_spec(data, pieces(entry))
        except ValueError:
            continue
        pytest.fail(f"accepted: {entry}")


def test_the_committed_vectors_are_those_that_are_generated() -> None:
    made = make_vectors.files(check=False)  # the tests above do that
    committed = {str(p.relative_to(VECTORS).as_posix()): p.read_bytes() for p in VECTORS.rglob("*") if p.is_file()}
    assert sorted(made) == sorted(committed), "run: make vectors"
    assert [name for name in made if made[name] != committed[name]] == [], "run: make vectors"
    assert sum(map(len, committed.values())) < 500_000


def test_every_wire_id_mode_and_form_has_vectors() -> None:
    accepted, rejected = index("accept"), index("reject")
    opened = [frame.unpack((VECTORS / entry["file"]).read_bytes()) for entry in accepted]
    names = {re.split(r"[(\s]", f.text.strip())[0] for f in opened}
    assert names >= set(REGISTERED) | set(RECIPES)
    for name in REGISTERED:
        assert any(name in entry["file"] for entry in rejected), f"{name} has no rejected vectors"
    for case in CASES:  # every configuration that the laws run over is of a name and coder that has vectors
        assert decoder.parse(str(tersegrad.parse(case))).name in names
    modes = {(f.wire_id, f.payload[0]) for f in opened if f.payload and ("rans" in f.text or "elias" in f.text)}
    assert modes >= {(i, m) for i in (9, 10, 11) for m in (0, 1, 2, 4)}
    modes = {(f.wire_id, f.payload[0]) for f in opened if f.payload and f.wire_id in (12, 14)}
    assert modes >= {(i, m) for i in (12, 14) for m in (0, 1, 2, 3)}
    modes = {(f.wire_id, f.payload[0]) for f in opened if f.payload and f.wire_id in (24, 25)}
    assert modes >= {(24, m) for m in (0, 1, 2, 4, ord("V"))} | {(25, m) for m in (0, 1, 2, ord("V"))}
    for coder in ("packed", "elias", "rans"):
        assert any(f.wire_id == 11 and (coder in f.text or coder == "packed") for f in opened)
    assert {f.numel for f in opened} >= {0, 1, 65, 700, 400_000}
    assert {f.dtype for f in opened} == {torch.float32, torch.float16, torch.bfloat16}


def test_the_decoder_imports_nothing_of_ours() -> None:
    tree = ast.parse((ROOT / "spec" / "decoder.py").read_text(encoding="utf-8"))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported <= set(sys.stdlib_module_names)


def test_the_decoder_knows_every_registered_configuration() -> None:
    assert set(decoder.COMPRESSORS) == set(REGISTERED)
    assert set(decoder.ABBREVIATIONS) == set(RECIPES)
    for name, made in REGISTERED.items():
        fields = {f.name: f.default for f in dataclasses.fields(made)}
        known = {key: default for key, (_, default) in decoder.COMPRESSORS[name].parameters.items()}
        assert list(fields) == list(known)
        for key, default in fields.items():
            if default is dataclasses.MISSING:
                assert known[key] is decoder.MISSING
            else:
                assert known[key] == (list(default) if isinstance(default, tuple) else default)


def test_the_document_lists_every_wire_id() -> None:
    text = (ROOT / "spec" / "wire.md").read_text(encoding="utf-8")
    listed = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \| \[5\.", text, re.MULTILINE)}
    assert listed == {name: c.wire_id for name, c in decoder.COMPRESSORS.items()}
    for name, number in listed.items():
        assert re.search(rf"^### 5\.{number} {name}$", text, re.MULTILINE), f"section 5.{number} {name} is missing"
        example = next(tersegrad.parse(case) for case in CASES if str(tersegrad.parse(case)).startswith(name))
        assert example.wire_id == number


@pytest.mark.parametrize("name", sorted(decoder.COMPRESSORS))
def test_lengths_and_factors_are_the_packages(name: str) -> None:
    for case in (c for c in CASES if c.startswith(name)):
        compressor, form = tersegrad.parse(case), decoder.parse(str(tersegrad.parse(case)))
        for d in (1, 2, 63, 65, 1000, 300_000, 400_000):
            spec = tersegrad.Spec.flat(d)
            assert decoder.longest(form, decoder.flat(d)) == compressor.max_nbytes(spec)
            promise = compressor.guarantee(spec)
            nature = decoder.nature(form, decoder.flat(d))
            if promise.kind == "unbiased":
                assert nature == pytest.approx(promise.value, rel=1e-12)
            else:
                assert nature == (decoder.EXACT if promise.value == 0 else decoder.OTHER)


def outcome(decode: Any, data: bytes) -> bytes | None:
    refusal = CorruptMessage if decode is make_vectors.from_package else ValueError
    try:
        result: bytes = decode(data, None)
    except Exception as error:
        if not isinstance(error, refusal):
            raise
        return None
    return result


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Another message in the same frame, with a right checksum."""
    start = frame._HEADER.size + data[frame._HEADER.size - 1]
    head, message = data[:start], bytearray(data[start:-4])
    kind = rng.randrange(4)
    if kind == 0 and message:
        message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
    elif kind == 1 and message:
        message[rng.randrange(min(8, len(message)))] = rng.randrange(256)
    elif kind == 2 and message:
        del message[rng.randrange(len(message)) :]
    else:
        message += rng.randbytes(rng.randrange(1, 4))
    body = head[:32] + struct.pack("<Q", len(message)) + head[40:] + message
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("case", sorted(set(CASES)))
def test_random_and_damaged_frames_decode_alike(case: str) -> None:
    rng = random.Random(case)
    for d in (rng.randrange(2, 9), rng.randrange(20, 400)):
        x = torch.tensor([rng.gauss(0.0, 1.0) ** rng.choice((1, 3)) for _ in range(d)])
        ctx = Context(rng.getrandbits(64), rng.getrandbits(32), rng.getrandbits(16), rng.getrandbits(16))
        stats = make_vectors.second_moment(x) if needs_second_moment(tersegrad.parse(case)) else None
        data = tersegrad.to_frame(case, x, ctx, stats)
        expected = outcome(make_vectors.from_package, data)
        assert expected is not None
        assert outcome(make_vectors.from_spec, data) == expected
        for _ in range(6):
            damaged = mutated(data, rng)
            assert outcome(make_vectors.from_spec, damaged) == outcome(make_vectors.from_package, damaged), damaged.hex()


def test_the_decoder_explains_a_file() -> None:
    run = [sys.executable, "-m", "spec.decoder"]
    good = subprocess.run(
        [*run, VECTORS / "accept" / "sign.normal65.frame"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert good.returncode == 0
    assert "sign (wire id 7), 65 coordinates, 13 bytes" in good.stdout
    bad = subprocess.run(
        [*run, VECTORS / "reject" / "frame.magic.frame"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (bad.returncode, bad.stderr) == (1, "rejected: not a frame\n")
