"""The top level: what users import, how light it is, and the one-call functions."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import tersegrad
from tersegrad import Context, CorruptMessage, Piece, Spec

X = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def test_everything_public_is_there() -> None:
    for name in tersegrad.__all__:
        assert hasattr(tersegrad, name), name
    for name in ("Spec", "Context", "Message", "Stats", "Guarantee", "TopK", "QSGD", "ErrorFeedback", "theory", "Compressor"):
        assert name in tersegrad.__all__
    assert tersegrad.__version__


def test_import_is_light_and_does_nothing() -> None:
    program = (
        "import sys, random, torch; before = torch.random.get_rng_state(); python = random.getstate();"
        "import tersegrad; heavy = {'typer', 'rich', 'matplotlib', 'sklearn', 'scipy', 'triton', 'flwr'} & set(sys.modules);"
        "assert not heavy, heavy; assert torch.equal(before, torch.random.get_rng_state()); assert python == random.getstate()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_roundtrip_measures_real_bytes() -> None:
    result = tersegrad.roundtrip("bf16", X.view(10, 100))
    assert result.decoded.shape == (10, 100)
    assert result.decoded.dtype == torch.float32
    assert (result.nbytes, result.bits_per_coordinate) == (2000, 16.0)
    assert result.error == pytest.approx(float((X - X.bfloat16().float()).double().square().sum() / X.double().square().sum()))
    assert torch.equal(tersegrad.roundtrip(tersegrad.BF16(), X).decoded, result.decoded.view(-1))


def test_roundtrip_of_awkward_input() -> None:
    assert tersegrad.roundtrip("sign", torch.zeros(0)).bits_per_coordinate == 0.0
    assert tersegrad.roundtrip("sign", torch.zeros(8)).error == 0.0
    assert math.isnan(tersegrad.roundtrip("sign", torch.tensor([math.nan, 1.0])).error)
    assert tersegrad.roundtrip("bf16", X.half()[::3]).decoded.shape == (334,)
    seeds = [tersegrad.roundtrip("ternary", X, seed=s).decoded for s in (1, 1, 2)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


@pytest.mark.parametrize("text", ["bf16", "rotated(sign)", "error_feedback(ternary)", 'by_tensor(sign, rules={"": bf16})'])
def test_frames(text: str) -> None:
    data = tersegrad.to_frame(text, X, Context(seed=3, step=2))
    decoded = tersegrad.from_frame(data)
    c = tersegrad.parse(text)
    spec = Spec.flat(1000)
    message, _ = c.encode(X, spec, c.init(spec, "cpu"), Context(seed=3, step=2))
    assert torch.equal(decoded, c.decode(message, spec, Context(seed=3, step=2)))
    assert torch.equal(decoded, tersegrad.from_frame(data, spec=spec))


def test_frames_from_strangers() -> None:
    data = tersegrad.to_frame("bf16", X)
    with pytest.raises(CorruptMessage, match="at most 10"):
        tersegrad.from_frame(data, max_numel=10)
    with pytest.raises(CorruptMessage, match="spec"):
        tersegrad.from_frame(data, spec=Spec.flat(1001))
    message = tersegrad.Message.frombytes(b"\0" * 2000)
    for wire_id, text, words in ((2, "bf17", "not understood"), (3, "bf16", "wire id"), (2, "metered(" * 30, "not understood")):
        packed = tersegrad.frame.pack(message, wire_id=wire_id, text=text, spec=Spec.flat(1000), context=Context())
        with pytest.raises(CorruptMessage, match=words):
            tersegrad.from_frame(packed)


def test_names_of_pieces_reach_by_tensor() -> None:
    spec = Spec((Piece((600,), 0, 600, "w.weight"), Piece((400,), 0, 400, "w.bias")))
    c = tersegrad.parse('by_tensor(sign, rules={"*.bias": identity})')
    decoded = c.decode(c.encode(X, spec, c.init(spec, "cpu"), Context())[0], spec, Context())
    assert torch.equal(decoded[600:], X[600:])
    assert not torch.equal(decoded[:600], X[:600])
