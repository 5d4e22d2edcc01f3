"""By-tensor rules: exactly the separate compressors' bytes, and honest promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.promises import worst
from tersegrad.core.protocol import Context, Guarantee, Message, Piece, Spec, Stats
from tersegrad.wrappers import ByTensor, ErrorFeedback
from tests.wrappers.toys import Largest, Lottery, Promiseless, Toy


def piece(name: str, numel: int) -> Piece:
    return Piece((numel,), 0, numel, name)


SPEC = Spec((piece("a.weight", 300), piece("a.bias", 7), piece("b.weight", 500), piece("norm", 20), piece("b.bias", 9)))
RULES = ByTensor(Largest(k=10), small=Toy(), below=50, rules=(("*.bias", Lottery(p=0.5)), ("missing", Promiseless())))
X = torch.randn(SPEC.numel, generator=torch.Generator().manual_seed(3))


def cut(x: Tensor) -> list[Tensor]:
    return list(torch.split(x, [p.numel for p in SPEC.pieces]))


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def test_equal_to_separate_compressors_byte_for_byte() -> None:
    ctx = Context(seed=9, step=4)
    message, _ = RULES.encode(X, SPEC, RULES.init(SPEC, "cpu"), ctx)
    a, a_bias, b, norm, b_bias = cut(X)
    parts = [
        Largest(k=10).encode(torch.cat([a, b]), Spec.of(torch.cat([a, b])), None, ctx.child(0))[0].tobytes(),
        Toy().encode(norm, Spec.of(norm), None, ctx.child(1))[0].tobytes(),
        Lottery(p=0.5)
        .encode(torch.cat([a_bias, b_bias]), Spec.of(torch.cat([a_bias, b_bias])), None, ctx.child(2))[0]
        .tobytes(),
    ]
    assert message.tobytes() == b"".join(varint(len(p)) + p for p in parts)
    decoded = cut(RULES.decode(Message.frombytes(message.tobytes()), SPEC, ctx))
    assert torch.equal(decoded[3], norm)
    assert torch.equal(torch.cat([decoded[0], decoded[2]]), Largest(k=10).lossy(torch.cat([a, b]), ctx))
    assert torch.equal(torch.cat([decoded[1], decoded[4]]), Lottery(p=0.5).lossy(torch.cat([a_bias, b_bias]), ctx.child(2)))


def test_one_group_is_the_compressor_itself_plus_a_length() -> None:
    c, spec = ByTensor(Toy()), Spec.flat(100)
    message, _ = c.encode(X[:100], spec, c.init(spec, "cpu"), Context())
    assert message.tobytes() == varint(400) + Toy().encode(X[:100], Spec.of(X[:100]), None, Context())[0].tobytes()
    assert int(message.nbytes) == c.max_nbytes(spec)


def test_the_tensor_s_size_decides_not_the_piece_s() -> None:
    shard = Spec((Piece((1000,), 990, 1000, "w"), Piece((30,), 0, 30, "v")))
    assert [RULES.group(p) for p in shard.pieces] == [0, 1]


def test_first_rule_wins_and_rules_win_over_size() -> None:
    c = ByTensor(Toy(), small=Toy(), rules=(("x*", Largest()), ("*", Lottery())))
    assert [c.group(piece(n, 1)) for n in ("xy", "y")] == [2, 3]


def test_state_per_group_and_out_buffers() -> None:
    c = ByTensor(ErrorFeedback(Largest(k=10)), small=Toy(), below=50)
    state = c.init(SPEC, "cpu")
    assert [g for g, _ in state.states] == [0, 1]
    buffer = torch.full((c.max_nbytes(SPEC) + 3,), 170, dtype=torch.uint8)
    message, after = c.encode(X, SPEC, state, Context(), out=buffer)
    assert message.data is buffer
    assert buffer[-3:].tolist() == [170] * 3
    assert after.states[0][1].residual.numel() == 800
    assert not bool(state.states[0][1].residual.any())
    target = torch.empty(SPEC.numel)
    assert c.decode(message, SPEC, Context(), out=target) is target
    sent = cut(target)
    residual = after.states[0][1].residual
    torch.testing.assert_close(torch.cat([sent[0], sent[2]]) + residual, torch.cat([cut(X)[0], cut(X)[2]]))


def test_statistics_are_cut_alike() -> None:
    seen: list[Tensor] = []

    class Spy(Toy):
        name = "toy_spy"

        def encode(
            self, x: Tensor, spec: Spec, state: Any, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
        ) -> tuple[Message, Any]:
            assert stats is not None
            assert stats.second_moment is not None
            seen.append(stats.second_moment)
            return super().encode(x, spec, state, ctx, stats=stats, out=out)

    c = ByTensor(Spy(), small=Toy(), below=50)
    c.encode(X, SPEC, c.init(SPEC, "cpu"), Context(), stats=Stats(X.square()))
    assert torch.equal(seen[0], torch.cat([cut(X)[0], cut(X)[2]]).square())


def test_empty_buffers_and_empty_tensors_send_nothing() -> None:
    for spec in (Spec.flat(0), Spec(()), Spec((piece("e", 0), piece("f", 0)))):
        message, _ = RULES.encode(torch.zeros(0), spec, RULES.init(spec, "cpu"), Context())
        assert int(message.nbytes) == 0
        assert RULES.decode(message, spec, Context()).shape == (0,)


@pytest.mark.parametrize(
    ("promises", "want"),
    [
        ([], Guarantee("contractive", 0.0, True)),
        ([Guarantee("contractive", 0.3, True), Guarantee("contractive", 0.5, False)], Guarantee("contractive", 0.5, False)),
        ([Guarantee("unbiased", 0.3), Guarantee("unbiased", 7.0)], Guarantee("unbiased", 7.0)),
        ([Guarantee("unbiased", 0.3), Guarantee("contractive", 0.0, True)], Guarantee("unbiased", 0.3)),
        ([Guarantee("unbiased", 0.3), Guarantee("contractive", 0.5, True)], Guarantee("contractive", 0.5)),
        ([Guarantee("unbiased", 0.7), Guarantee("contractive", 0.5, True)], Guarantee("contractive", 0.7)),
        ([Guarantee("unbiased", 1.0), Guarantee("contractive", 0.5, True)], Guarantee("none")),
        ([Guarantee("none"), Guarantee("contractive", 0.0, True)], Guarantee("none")),
    ],
)
def test_worst_promise(promises: list[Guarantee], want: Guarantee) -> None:
    assert worst(promises) == want


def test_promise_holds_when_all_the_energy_is_in_the_worst_part() -> None:
    c = ByTensor(Largest(k=400), small=Largest(k=1), below=50)
    promise = c.guarantee(SPEC)
    assert promise.value == pytest.approx(1 - 1 / 36)
    x = torch.zeros(SPEC.numel)
    for start, numel in ((300, 7), (807, 20), (827, 9)):
        x[start : start + numel] = 1.0
    decoded = c.decode(c.encode(x, SPEC, c.init(SPEC, "cpu"), Context())[0], SPEC, Context())
    assert float((decoded - x).square().sum()) == pytest.approx(promise.value * float(x.square().sum()))


def test_non_finite_values_stay_in_their_group() -> None:
    x = X.clone()
    x[0] = math.nan
    decoded = cut(RULES.decode(RULES.encode(x, SPEC, RULES.init(SPEC, "cpu"), Context())[0], SPEC, Context()))
    assert bool(torch.isnan(decoded[0]).all())
    assert bool(torch.isnan(decoded[2]).all())
    assert bool(torch.isfinite(decoded[3]).all())


def test_bad_bytes_and_bad_rules() -> None:
    data = RULES.encode(X, SPEC, RULES.init(SPEC, "cpu"), Context())[0].tobytes()
    for broken in (*(data[:n] for n in range(0, len(data), 97)), data + b"\0", b"\xff" * 40, b"\x80\0" + data):
        with pytest.raises(CorruptMessage):
            RULES.decode(Message.frombytes(broken), SPEC, Context())
    bad: list[dict[str, Any]] = [
        {"default": "top_k"},
        {"default": None},
        {"default": Toy(), "below": -1},
        {"default": Toy(), "rules": (("é", Toy()),)},
        {"default": Toy(), "rules": (("a", None),)},
    ]
    for arguments in bad:
        with pytest.raises(BadConfiguration):
            ByTensor(**arguments)
    with pytest.raises(BadConfiguration, match="836 coordinates"):
        RULES.encode(X[:5], SPEC, RULES.init(SPEC, "cpu"), Context())
