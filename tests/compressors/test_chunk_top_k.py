"""Chunked top-k: what is sent, in how many bits, and that it is what published code sends."""

from __future__ import annotations

import math

import pytest
import torch

import tersegrad
from tersegrad.compressors.chunk_top_k import ChunkTopK
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Message, Piece, Spec


def matrices(*shapes: tuple[int, ...]) -> Spec:
    return Spec(tuple(Piece(s, 0, math.prod(s), f"w{j}") for j, s in enumerate(shapes)))


def coded(c: ChunkTopK, x: torch.Tensor, spec: Spec) -> tuple[Message, torch.Tensor]:
    message, _ = c.encode(x, spec, None, Context())
    return message, c.decode(message, spec, Context())


def tiled(x: torch.Tensor) -> torch.Tensor:
    """The 64 x 64 tiles of a matrix, one row each."""
    rows, cols = x.shape
    return x.view(rows // 64, 64, cols // 64, 64).permute(0, 2, 1, 3).reshape(-1, 4096)


def untiled(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return tiles.view(rows // 64, cols // 64, 64, 64).permute(0, 2, 1, 3).reshape(rows, cols)


def published(x: torch.Tensor, wide: bool) -> torch.Tensor:
    """What the public code of SparseLoCo decodes a matrix to; ``wide``: its sums in float64, else as torch takes them."""
    tiles = tiled(x)
    where = tiles.abs().topk(64, dim=1).indices
    v = tiles.gather(1, where)
    number = v.double() if wide else v
    s = number.mean().float()
    c = v - s
    spread = c.double().norm() / math.sqrt(v.numel() - 1) if wide else c.norm() / math.sqrt(v.numel() - 1)
    scale = (6 * spread / 4).float()
    q = (c / scale + 2).round().clamp(0, 3).long()
    means = torch.stack([(c[q == j].double() if wide else c[q == j]).mean().float() for j in range(4)]).nan_to_num(0.0)
    return untiled(torch.zeros_like(tiles).scatter_(1, where, means[q] + s), *x.shape)


def heavy(shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=draw)
    uniform = torch.rand(shape, generator=draw) - 0.5
    return {"normal": normal, "laplace": -uniform.sign() * torch.log1p(-2 * uniform.abs()), "cubed": normal**3}


@pytest.mark.parametrize("kind", ["normal", "laplace", "cubed"])
def test_bins_decode_to_what_published_code_sends(kind: str) -> None:
    x = heavy((256, 320), 3)[kind]
    _, decoded = coded(ChunkTopK(values="bins"), x, Spec.of(x))
    decoded = decoded.view_as(x)
    # Bit for bit where sums are float64; published code takes float32 sums in torch's order, which move the last digits.
    assert torch.equal(decoded, published(x, wide=True))
    theirs = published(x, wide=False)
    assert torch.equal(decoded != 0, theirs != 0)
    torch.testing.assert_close(decoded, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kind", "most"), [("normal", 8.47), ("laplace", 8.52)])
def test_published_bins_take_their_entropy(kind: str, most: float) -> None:
    """20 bits per value are sent in the open; 7.364 for the place and about 1 for the value suffice."""
    x = heavy((1024, 1024), 5)[kind]
    message, _ = coded(ChunkTopK(values="bins"), x, Spec.of(x))
    assert 8 * int(message.nbytes) / (256 * 64) <= most


def test_tensors_that_differ_have_tables_of_their_own() -> None:
    """Every table is made from all values of its tensor, not from a sample that may miss it."""
    spec = matrices(*[(1024, 512)] * 12)
    x = torch.cat([(heavy((1024, 512), j)["laplace"]).reshape(-1) * 10.0**j for j in range(12)])
    message, _ = coded(ChunkTopK(values="bins"), x, spec)
    assert 8 * int(message.nbytes) / (12 * 128 * 64) <= 8.47


def test_signs_of_cosine_coefficients_take_less_than_twelve_bits() -> None:
    spec = matrices((2048, 1024))
    c = tersegrad.parse("dct(chunk_top_k(k=4, values=sign))")
    message, _ = c.encode(torch.randn(spec.numel), spec, None, Context())
    # log2 C(4096, 4) / 4 + 1 = 11.853; published code sends 17.
    assert 8 * int(message.nbytes) / (512 * 4) <= 11.95


def test_real_pseudo_gradients_take_less_than_nine_bits() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.GELU(), torch.nn.Linear(512, 256, bias=False))
    teacher = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    c = tersegrad.parse("sparse_loco")
    spec = Spec.of(*model.parameters())
    state = c.init(spec, "cpu")
    for round_ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(10):
            x = torch.randn(32, 256)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), torch.tanh(teacher(x))).backward()
            optimizer.step()
        moved = torch.cat([(b - p.detach()).reshape(-1) for b, p in zip(before, model.parameters())])
        message, state = c.encode(moved, spec, state, Context(step=round_))
        assert 8 * int(message.nbytes) / (64 * 64) <= 9.0


@pytest.mark.parametrize("values", ["float32", "bf16", "sign", "bins"])
def test_every_chunk_sends_exactly_k(values: str) -> None:
    spec = matrices((64, 128), (3, 5), (100,))
    x = torch.randn(spec.numel) + 3
    _, decoded = coded(tersegrad.parse(f"chunk_top_k(chunk=1024, k=10, values={values}, vector=20)"), x, spec)  # type: ignore[arg-type]
    first = decoded[:8192].view(2, 32, 4, 32).permute(0, 2, 1, 3).reshape(8, 1024)
    assert ((first != 0).sum(1) == 10).all()
    assert int((decoded[8192:8207] != 0).sum()) == 10
    assert ((decoded[8207:].view(5, 20) != 0).sum(1) == 10).all()


def test_values_are_exact_rounded_or_signed() -> None:
    x = torch.randn(4096)
    for text, tolerance in (("chunk_top_k", 0.0), ("chunk_top_k(values=bf16)", 2.0**-8)):
        _, decoded = coded(tersegrad.parse(text), x, Spec.flat(4096))  # type: ignore[arg-type]
        sent = decoded != 0
        torch.testing.assert_close(decoded[sent], x[sent], rtol=tolerance, atol=0)
    _, decoded = coded(ChunkTopK(values="sign"), x, Spec.flat(4096))
    sent = decoded != 0
    assert torch.equal(decoded[sent].sign(), x[sent].sign())
    torch.testing.assert_close(decoded[sent].abs().mean(), x[sent].abs().mean(), rtol=2.0**-8, atol=0)


def test_a_chunk_with_fewer_numbers_than_k_sends_zeros() -> None:
    x = torch.zeros(64, 128)
    x[3, 5] = 2.0
    message, decoded = coded(ChunkTopK(), x, Spec.of(x))
    assert torch.equal(decoded.view_as(x), x)
    assert message.tobytes()[0] == 0


@pytest.mark.parametrize(
    "text",
    ["chunk_top_k(chunk=1000)", "chunk_top_k(k=0)", "chunk_top_k(k=257)", "chunk_top_k(bins=5)", "chunk_top_k(vector=0)"],
)
def test_bad_configurations_say_what_to_do(text: str) -> None:
    with pytest.raises(BadConfiguration, match="chunk_top_k: "):
        tersegrad.parse(text)
