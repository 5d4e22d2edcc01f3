"""Variance-based compression: the criterion line by line, the four-bit values, both wire forms, rates and state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import VGC, Context, Hybrid, Piece, Spec, Stats
from tersegrad.codecs import exp4
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration, CorruptMessage, MissingStatistics
from tersegrad.core.protocol import needs_second_moment
from tersegrad.kernels import reference

EXAMPLE = torch.tensor([0.04, 0.31, -6.25, 22.25, -35.75])


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec_of(*sizes: int) -> Spec:
    return Spec(tuple(Piece((n,), 0, n, f"t{j}") for j, n in enumerate(sizes)))


# ---- the criterion ----------------------------------------------------------------------------------------------------------


def line_by_line(r: list[float], v: list[float], shares: Tensor, alpha: float, zeta: float, tau: float | None) -> list[float]:
    """The published algorithm for one worker and batch, one component after another; writes into r and v."""
    sent = [0.0] * len(r)
    for i in range(len(r)):
        r[i] += float(shares[:, i].sum())
        v[i] += float(shares[:, i].square().sum())
        if r[i] ** 2 > alpha * v[i] and (tau is None or abs(r[i]) > tau):
            if tau is None:
                sent[i], r[i], v[i] = r[i], 0.0, 0.0
            else:
                sent[i] = math.copysign(tau, r[i])
                v[i] = max(v[i] - 2 * abs(r[i]) * tau + tau**2, 0.0)
                r[i] -= sent[i]
        else:
            v[i] *= zeta
    return sent


@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("alpha", [0.7, 1.5])
def test_the_update_is_the_published_one_line_by_line(alpha: float, tau: float | None) -> None:
    n, batch, zeta = 40, 8, 0.9
    r, v = [0.0] * n, [0.0] * n
    rt, vt = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    count = 0
    for step in range(60):
        shares = (noise(step, batch, n).double() + torch.linspace(-0.5, 0.5, n)) / batch
        expected = line_by_line(r, v, shares, alpha, zeta, tau)
        x, s = shares.sum(0), shares.square().sum(0)
        if tau is None:
            rt, vt, sent = reference.variance_update(rt, vt, x, s, alpha, zeta)
        else:
            rt, vt, sent = reference.hybrid_update(rt, vt, x, s, alpha, tau, zeta)
        torch.testing.assert_close(sent, torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(rt, torch.tensor(r, dtype=torch.float64))
        torch.testing.assert_close(vt, torch.tensor(v, dtype=torch.float64))
        count += int((sent != 0).sum())
    assert 100 < count < 0.9 * 60 * n


@pytest.mark.parametrize("text", ["vgc(alpha=1.5, values=identity)", "vgc(alpha=1.5)", "hybrid(alpha=1.5, tau=0.25)"])
def test_the_compressor_keeps_and_sends_what_the_update_says(text: str) -> None:
    c = tersegrad.parse(text)
    spec = spec_of(300, 7, 193)
    state = c.init(spec, "cpu")
    r, v = torch.zeros(500), torch.zeros(500)
    for step in range(20):
        x, s, ctx = noise(step, 500) / 8 + 0.02, noise(step + 99, 500).square() / 64, Context(step=step)
        message, state = c.encode(x, spec, state, ctx, stats=Stats(s))
        if isinstance(c, Hybrid):
            r, v, sent = reference.hybrid_update(r, v, x, s, 1.5, 0.25, 0.999)
        else:
            r, v, sent = reference.variance_update(r, v, x, s, 1.5, 0.999)
        assert torch.equal(state.r, r)
        assert torch.equal(state.v, v)
        decoded = c.decode(message, spec, ctx)
        if text == "vgc(alpha=1.5)":
            sent = torch.cat([reference.exp4_round(t, reference.exp4_top(t)) for t in sent.split([300, 7, 193])])
        assert torch.equal(decoded, sent)


def test_a_strict_test_never_sends_zeros_and_the_current_batch_enters_undecayed() -> None:
    zero = torch.zeros(3)
    assert not reference.variance_update(zero, zero, zero, zero, 1.0, 0.5)[2].any()
    one = torch.ones(1)
    r, v, sent = reference.variance_update(torch.zeros(1), torch.zeros(1), one, one, 1.0, 0.5)  # 1 > 1 is false
    assert (float(r), float(v), float(sent)) == (1.0, 0.5, 0.0)


@pytest.mark.parametrize(("alpha", "interval"), [(1.0, 19.3), (1.5, 78.0), (2.0, 213.0)])
def test_waiting_times_on_noise(alpha: float, interval: float) -> None:
    """One component of many steps has the mean waiting time that was simulated, within ten per cent."""
    n, steps = 1500, 6000
    g = torch.Generator().manual_seed(3)
    r, v, s, count = torch.zeros(n), torch.zeros(n), torch.full((n,), 1 / 64), 0
    for _ in range(steps):
        r, v, sent = reference.variance_update(r, v, torch.randn(n, generator=g) / 8, s, alpha, 0.999)
        count += int(torch.count_nonzero(sent))
    assert n * steps / count == pytest.approx(interval, rel=0.1)


def test_the_kernels_take_a_leading_axis_of_workers() -> None:
    shape = (4, 3, 50)
    r, v, x, s = noise(1, *shape), noise(2, *shape).square(), noise(3, *shape), noise(4, *shape).square()
    whole = reference.variance_update(r, v, x, s, 1.5, 0.9)
    hybrid = reference.hybrid_update(r, v, x, s, 1.5, 0.5, 0.9)
    tops = reference.exp4_top(whole[2])
    rounded = reference.exp4_round(whole[2], tops)
    assert tops.shape == (4, 3, 1)
    for a in range(4):
        for b in range(3):
            one = reference.variance_update(r[a, b], v[a, b], x[a, b], s[a, b], 1.5, 0.9)
            assert all(torch.equal(w[a, b], o) for w, o in zip(whole, one))
            other = reference.hybrid_update(r[a, b], v[a, b], x[a, b], s[a, b], 1.5, 0.5, 0.9)
            assert all(torch.equal(w[a, b], o) for w, o in zip(hybrid, other))
            assert torch.equal(rounded[a, b], reference.exp4_round(one[2], reference.exp4_top(one[2])))


# ---- four-bit values --------------------------------------------------------------------------------------------------------


def test_the_published_example() -> None:
    decoded = reference.exp4_round(EXAMPLE, reference.exp4_top(EXAMPLE))
    assert decoded.tolist() == [0.0, 0.25, -8.0, 16.0, -32.0]
    c, spec = VGC(alpha=1, wire="paper"), Spec.of(EXAMPLE)
    message, _ = c.encode(EXAMPLE, spec, c.init(spec, "cpu"), Context(), stats=Stats(torch.zeros(5)))
    words = message.payload[12:].view(torch.int32).tolist()
    assert [(w >> 28 & 15, w & 0xFFFFFFF) for w in words] == [(0b0111, 1), (0b1010, 2), (0b0001, 3), (0b1000, 4)]
    assert message.tobytes()[:12] == b"VGC1\4\0\0\0\5\0\0\0"


def brute(x: float, e: int) -> float:
    """The rule in words."""
    size = abs(x)
    if size < 2.0**-126:
        return 0.0
    if size > 2.0**e:
        rounded = 2.0**e
    else:
        low = 2.0 ** math.floor(math.log2(size))
        rounded = low if size - low < 2 * low - size else 2 * low
    return 0.0 if rounded < 2.0 ** (e - 7) else math.copysign(rounded, x)


def test_rounding_against_brute_force() -> None:
    x = torch.cat([noise(5, 4000), noise(6, 4000) * torch.exp2(6 * noise(7, 4000)), torch.tensor([1.5, 3.0, -0.75, 1.4999999])])
    x = torch.cat([x, torch.tensor([2.0**-126, 2.0**-127, -(2.0**-140), 0.0])])
    for block in x.split(500):
        e = math.floor(math.log2(float(block.abs().max())))
        expected = torch.tensor([brute(float(value), e) for value in block])
        assert torch.equal(reference.exp4_round(block, reference.exp4_top(block)), expected)


def test_error_on_gaussian_values() -> None:
    """Few are too small, and what is sent is four per cent short on average."""
    x = noise(8, 1_000_000)
    decoded = reference.exp4_round(x, reference.exp4_top(x))
    assert float((decoded == 0).float().mean()) == pytest.approx(0.019, abs=0.004)
    sent = decoded != 0
    assert float((decoded.abs()[sent] / x.abs()[sent]).mean()) == pytest.approx(0.963, abs=0.02)


def test_denormal_and_empty_tensors_send_nothing() -> None:
    c, spec = VGC(alpha=1), spec_of(3, 0, 2)
    x = torch.tensor([1e-40, -1e-41, 0.0, 2.0, -1.0])
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(), stats=Stats(torch.zeros(5)))
    assert c.decode(message, spec, Context()).tolist() == [0.0, 0.0, 0.0, 2.0, -1.0]


# ---- wire forms -------------------------------------------------------------------------------------------------------------


def selected(numel: int, ratio: float, seed: int, tensors: int) -> tuple[Tensor, Stats, Spec]:
    """Gradients of tensors of different scales, of which one in ``ratio`` is unambiguous."""
    g = torch.Generator().manual_seed(seed)
    size = numel // tensors
    x = torch.randn(numel, generator=g) * torch.exp2(torch.arange(tensors) % 5 - 12.0).repeat_interleave(size)
    chosen = torch.rand(numel, generator=g) < 1 / ratio
    return x, Stats(torch.where(chosen, 0.0, 10 * x * x)), spec_of(*[size] * tensors)


def entropy(decoded: Tensor, spec: Spec) -> float:
    """Bits of what is sent: which coordinates, log2 C(N, k), and their codes by their frequencies."""
    n, k = decoded.numel(), int((decoded != 0).sum())
    where = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    codes = []
    for part in decoded.split([p.numel for p in spec.pieces]):
        values = part[part != 0]
        if values.numel():
            exponents = torch.frexp(values).exponent
            codes.append((exponents.max() - exponents) + 8 * (values < 0))
    counts = torch.bincount(torch.cat(codes)).double()
    p = counts[counts > 0] / counts.sum()
    return where - k * float((p * p.log2()).sum())


@pytest.mark.parametrize(("numel", "ratio"), [(4_000_000, 500), (4_000_000, 2000), (12_000_000, 500), (400_000, 500)])
def test_compact_messages_are_within_five_per_cent_of_the_entropy(numel: int, ratio: int) -> None:
    x, stats, spec = selected(numel, ratio, 1, 40)
    sizes, decoded = {}, {}
    for wire in ("compact", "paper"):
        c = VGC(alpha=1.5, wire=wire)
        message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(), stats=stats)
        sizes[wire], decoded[wire] = int(message.nbytes), c.decode(message, spec, Context())
    assert torch.equal(decoded["compact"], decoded["paper"])
    count = int((decoded["compact"] != 0).sum())
    assert sizes["paper"] == 8 + 40 + 4 * count
    assert 8 * sizes["compact"] < 1.05 * entropy(decoded["compact"], spec)
    assert sizes["compact"] < (0.45 if ratio == 500 else 0.51) * sizes["paper"]


def test_many_tensors_cost_little() -> None:
    x, stats, _ = selected(400_000, 500, 2, 1)
    sizes = []
    for tensors in (1, 200):
        spec, c = spec_of(*[400_000 // tensors] * tensors), VGC(alpha=1.5)
        message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(), stats=stats)
        sizes.append(int(message.nbytes))
    assert sizes[1] - sizes[0] < 110  # half a byte per tensor; some of it is what the values themselves lose


@pytest.mark.parametrize("count", [1, 2, 50, exp4.SHORT, exp4.SHORT + 1, 40_000])
@pytest.mark.parametrize("spread", [0, 1, 8])
def test_signs_and_exponents_round_trip(count: int, spread: int) -> None:
    g = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 2, (count,), generator=g) * 8 + torch.randint(0, max(spread, 1), (count,), generator=g)
    exponents = torch.tensor([-126, 127, -10, -11], dtype=torch.int32)[: min(count, 4)]
    data, packed = exp4.encode(exponents, codes.to(torch.uint8))
    assert data.numel() <= exp4.max_nbytes(count, exponents.numel())
    again, decoded = exp4.decode(data, count, exponents.numel(), packed)
    assert torch.equal(again, exponents)
    assert torch.equal(decoded.long(), codes)
    assert packed or data.numel() < exp4.max_nbytes(count, exponents.numel())
    if packed:
        with pytest.raises(CorruptMessage):
            exp4.decode(data[:-1], count, exponents.numel(), packed)


@pytest.mark.parametrize("values", ["sign", "bf16", tersegrad.QSGD(bits=4, bucket=64, norm="max")])
def test_other_values_have_the_right_signs_and_sizes(values: Any) -> None:
    x, stats, spec = selected(100_000, 100, 3, 4)
    c = VGC(alpha=1.5, values=values)
    assert tersegrad.parse(str(c)) == c
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(seed=1), stats=stats)
    decoded = c.decode(message, spec, Context(seed=1))
    sent = torch.as_tensor(stats.second_moment == 0)
    assert not decoded[~sent].any()
    if values == "sign":
        for part, mask, original in zip(decoded.split(25_000), sent.split(25_000), x.split(25_000)):
            scale = float(original[mask].abs().mean())
            torch.testing.assert_close(part[mask], scale * original[mask].sign(), rtol=2**-8, atol=0)
    else:
        error = float((decoded[sent] - x[sent]).norm() / x[sent].norm())
        assert error < (0.004 if values == "bf16" else 0.2)


@pytest.mark.parametrize(
    "text", ["vgc(alpha=1, residual=keep)", "vgc(alpha=1, values=qsgd, residual=keep)", "hybrid(alpha=1, tau=0.01)"]
)
def test_what_is_kept_is_not_lost(text: str) -> None:
    """What was decoded so far, and r, are the sum of all gradients."""
    c, spec = tersegrad.parse(text), spec_of(500, 500)
    state, total, decoded = c.init(spec, "cpu"), torch.zeros(1000), torch.zeros(1000)
    for step in range(30):
        x, ctx = noise(step, 1000) / 8, Context(step=step)
        message, state = c.encode(x, spec, state, ctx, stats=Stats(torch.full((1000,), 1 / 64)))
        total += x
        c.decode_add(message, spec, ctx, decoded)  # type: ignore[attr-defined]
    assert decoded.any()
    torch.testing.assert_close(decoded + state.r, total, rtol=1e-4, atol=1e-5)


def test_dropping_forgets_what_rounding_lost_and_what_was_too_small() -> None:
    for residual, left in (("drop", [0.0] * 5), ("keep", [0.04, 0.06, 1.75, 6.25, -3.75])):
        c, spec = VGC(alpha=1, residual=residual), Spec.of(EXAMPLE)  # type: ignore[arg-type]
        _, state = c.encode(EXAMPLE, spec, c.init(spec, "cpu"), Context(), stats=Stats(torch.zeros(5)))
        torch.testing.assert_close(state.r, torch.tensor(left))
        assert not state.v.any()


# ---- state and errors -------------------------------------------------------------------------------------------------------


def test_states_split_and_join_by_parameter() -> None:
    c, spec = VGC(alpha=1.5), spec_of(30, 50, 20)
    _, state = c.encode(noise(1, 100), spec, c.init(spec, "cpu"), Context(), stats=Stats(noise(2, 100).square()))
    parts = states.split(state, spec)
    assert [p.r.numel() for p in parts] == [30, 50, 20]
    again = states.concat(parts, [Spec((piece,)) for piece in spec.pieces])
    assert torch.equal(again.r, state.r)
    assert torch.equal(again.v, state.v)
    assert set(states.state_dict(state)) == {"r", "v"}
    assert states.nbytes(state) == 800


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("text", ["vgc(alpha=1)", "vgc(alpha=1, wire=paper)", "hybrid(alpha=1, tau=0.1)"])
@pytest.mark.parametrize("where", ["gradient", "moment"])
def test_what_is_not_finite_is_said_and_leaves_the_state(text: str, bad: float, where: str) -> None:
    c, spec = tersegrad.parse(text), Spec.flat(100)
    x, s = noise(1, 100), noise(2, 100).square()
    _, state = c.encode(x, spec, c.init(spec, "cpu"), Context(), stats=Stats(s))
    x[7], s[9] = (bad, s[9]) if where == "gradient" else (x[7], bad)
    message, after = c.encode(x, spec, state, Context(step=1), stats=Stats(s))
    assert after is state
    assert message.tobytes() == b"\2"
    assert bool(c.decode(message, spec, Context()).isnan().all())


def test_missing_and_misshapen_statistics() -> None:
    for c in (VGC(alpha=1), Hybrid(alpha=1, tau=0.1)):
        spec = Spec.flat(10)
        state = c.init(spec, "cpu")
        for stats in (None, Stats()):
            with pytest.raises(MissingStatistics, match="Collector"):
                c.encode(torch.ones(10), spec, state, Context(), stats=stats)
        with pytest.raises(BadConfiguration, match="9 coordinates"):
            c.encode(torch.ones(10), spec, state, Context(), stats=Stats(torch.ones(9)))
        with pytest.raises(BadConfiguration, match="state is for 10"):
            c.encode(torch.ones(11), Spec.flat(11), state, Context(), stats=Stats(torch.ones(11)))


def test_who_needs_second_moments() -> None:
    for text in (
        "vgc(alpha=1)",
        "hybrid(alpha=1, tau=1)",
        'by_tensor(bf16, rules={"*": vgc(alpha=1)})',
        "metered(vgc(alpha=1))",
    ):
        assert needs_second_moment(tersegrad.parse(text)), text
    for text in ("bf16", "strom(tau=0.1)", "by_tensor(bf16, small=identity)"):
        assert not needs_second_moment(tersegrad.parse(text)), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vgc", "needs alpha"),
        ("vgc(alpha=0)", "alpha is positive"),
        ("vgc(alpha=1, zeta=1.5)", "zeta"),
        ("vgc(alpha=1, wire=paper, values=bf16)", "exp4 values only"),
        ("vgc(alpha=1, values=strom(tau=1))", "must not keep state"),
        ("vgc(alpha=1, values=exp5)", "no compressor called 'exp5'"),
        ("vgc(alpha=1, residual=lose)", "'drop', 'keep'"),
        ("hybrid(alpha=1)", "needs tau"),
        ("hybrid(alpha=1, tau=0)", "tau lies in"),
        ("error_feedback(vgc(alpha=1))", "counts? the same error twice"),
    ],
)
def test_bad_configurations_say_what_to_do(text: str, words: str) -> None:
    with pytest.raises(BadConfiguration, match=words):
        tersegrad.parse(text)


def test_words_name_a_limited_number_of_coordinates() -> None:
    spec = Spec((Piece((1 << 29,), 0, 1 << 29),))
    with pytest.raises(BadConfiguration, match="wire=compact"):
        VGC(alpha=1, wire="paper").init(spec, "meta")
    Hybrid(alpha=1, tau=1, wire="paper").init(spec, "meta")
