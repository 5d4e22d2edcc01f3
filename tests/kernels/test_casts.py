"""The fixed-rate kernels: same bytes on every backend, instruction set and thread count, and conversions as torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tersegrad.compressors import Ternary
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.kernels import native, reference
from tersegrad.kernels.schema import CastKernels

CTX = Context(seed=0xFEDCBA9876543210, step=7, buffer=3, sender=11)
SIZES = (0, 1, 15, 16, 63, 64, 65, 321, 4097, 5441, 9000)


def whole(d: int) -> int:
    return max(64, -(-d // 64) * 64)


class Case:
    """One format: its length, encoder and decoder, for any backend."""

    def __init__(
        self,
        nbytes: Callable[[int], int],
        encode: Callable[[CastKernels, Tensor, Tensor], None],
        decode: Callable[[CastKernels, Tensor, Tensor, float | None], object],
    ) -> None:
        self.nbytes, self.write, self.read = nbytes, encode, decode

    def encode(self, backend: CastKernels, x: Tensor) -> Tensor:
        out = torch.full((self.nbytes(x.numel()),), 0xAA, dtype=torch.uint8)
        self.write(backend, x, out)
        return out

    def decode(self, backend: CastKernels, data: Tensor, d: int, weight: float | None = None) -> Tensor:
        out = torch.linspace(-1, 1, d)
        self.read(backend, data, out, weight)
        return out


def natural_levels(levels: int, width: int, bucket: int | None = None) -> Case:
    return Case(
        lambda d: 4 * -(-d // (bucket or whole(d))) + -(-d * width // 8),
        lambda k, x, out: k.natural_levels_encode(x, out, bucket or whole(x.numel()), levels, width, CTX),
        lambda k, data, out, w: k.natural_levels_decode(data, out, bucket or whole(out.numel()), levels, width, w),
    )


def ternary(bucket: int | None) -> Case:
    return Case(
        lambda d: 4 * -(-d // (bucket or whole(d))) + -(-d // 5),
        lambda k, x, out: k.ternary_encode(x, out, bucket or whole(x.numel()), CTX),
        lambda k, data, out, w: k.ternary_decode(data, out, bucket or whole(out.numel()), w),
    )


def fp8(block: int) -> Case:
    return Case(
        lambda d: -(-d // block) + d,
        lambda k, x, out: k.fp8_encode(x, out, block),
        lambda k, data, out, w: k.fp8_decode(data, out, block, w),
    )


def sign(block: int | None) -> Case:
    return Case(
        lambda d: 4 * -(-d // (block or whole(d))) + -(-d // 8),
        lambda k, x, out: k.sign_encode(x, out, block or whole(x.numel())),
        lambda k, data, out, w: k.sign_decode(data, out, block or whole(out.numel()), w),
    )


CASES = {
    "bf16": Case(lambda d: 2 * d, lambda k, x, out: k.bf16_encode(x, out), lambda k, m, out, w: k.bf16_decode(m, out, w)),
    "fp16": Case(
        lambda d: 4 + 2 * d if d else 0, lambda k, x, out: k.fp16_encode(x, out), lambda k, m, out, w: k.fp16_decode(m, out, w)
    ),
    "fp8": fp8(32),
    "fp8-16": fp8(16),
    "fp8-128": fp8(128),
    "sign": sign(4096),
    "sign-64": sign(64),
    "sign-192": sign(192),
    "sign-8256": sign(8256),
    "sign-whole": sign(None),
    "natural": Case(
        lambda d: -(-d // 8) + d,
        lambda k, x, out: k.natural_encode(x, out, CTX),
        lambda k, m, out, w: k.natural_decode(m, out, w),
    ),
    "ternary": ternary(None),
    "ternary-64": ternary(64),
    "ternary-8192": ternary(8192),
    "natural_levels": natural_levels(8, 5),
    "natural_levels-1": natural_levels(1, 2),
    "natural_levels-64": natural_levels(64, 8),
    "natural_levels-bucket": natural_levels(7, 4, 192),
}
every = pytest.mark.parametrize("name", CASES)


def inputs(d: int) -> dict[str, Tensor]:
    g = torch.randn(d, generator=torch.Generator().manual_seed(d))
    wild = (
        torch.randint(-(2**31), 2**31, (d,), generator=torch.Generator().manual_seed(d + 1)).to(torch.int32).view(torch.float32)
    )
    return {
        "gaussian": g,
        "wide": g * torch.exp(20 * torch.randn(d, generator=torch.Generator().manual_seed(d + 2))).clamp(1e-38, 1e38),
        "bits": torch.where(wild.isfinite(), wild, g),
        "zero": torch.zeros(d),
        "denormal": g * 1e-41,
        "huge": g.clamp(-3.4, 3.4) * 1e38,
        "negative zero": torch.full((d,), -0.0),
        "nan": torch.where(torch.arange(d) == d // 2, math.nan, g),
        "inf": torch.where(torch.arange(d) == d - 1, -math.inf, g),
    }


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    return torch.equal(a.nan_to_num(123.0).view(torch.int32), b.nan_to_num(123.0).view(torch.int32)) and torch.equal(
        a.isnan(), b.isnan()
    )


@every
def test_native_equals_reference(name: str) -> None:
    case = CASES[name]
    for d in SIZES:
        for label, x in inputs(d).items():
            wanted = case.encode(reference, x)
            values = case.decode(reference, wanted, d)
            added = case.decode(reference, wanted, d, -0.3)
            for isa in native.supported_isas():
                with native.using(isa=isa, threads=1):
                    assert torch.equal(case.encode(native, x), wanted), (d, label, isa)
                    assert same(case.decode(native, wanted, d), values), (d, label, isa)
                    assert same(case.decode(native, wanted, d, -0.3), added), (d, label, isa)


@pytest.mark.parametrize("block", [64, 192, 4096])
def test_signs_are_split_in_one_pass(block: int) -> None:
    for d in SIZES:
        carry = torch.randn(d, generator=torch.Generator().manual_seed(d + 9))
        for label, x in inputs(d).items():
            wanted, rest = torch.empty(sign(block).nbytes(d), dtype=torch.uint8), torch.empty(d)
            good = reference.sign_split(x, carry, wanted, rest, block)
            assert bool(good) == bool((x + carry).isfinite().all()), (d, label)
            for isa in native.supported_isas():
                data, left = torch.empty_like(wanted), torch.empty(d)
                with native.using(isa=isa, threads=2):
                    assert bool(native.sign_split(x, carry, data, left, block)) == bool(good), (d, label, isa)
                assert torch.equal(data, wanted), (d, label, isa)
                assert not good or torch.equal(left, rest), (d, label, isa)


@every
def test_threads_and_unaligned_memory_change_nothing(name: str) -> None:
    case = CASES[name]
    d = 300_011
    x = torch.randn(d + 1, generator=torch.Generator().manual_seed(1))[1:]
    wanted = case.encode(native, x.clone())
    values = case.decode(native, wanted, d)
    for isa in native.supported_isas():
        for threads in (1, 2):
            with native.using(isa=isa, threads=threads):
                room = torch.empty(case.nbytes(d) + 3, dtype=torch.uint8)[3:]
                case.write(native, x, room)
                out = torch.empty(d + 1)[1:]
                case.read(native, room, out, None)
            assert torch.equal(room, wanted), (isa, threads)
            assert torch.equal(out, values), (isa, threads)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "sign", "natural", "ternary", "natural_levels-bucket"])
def test_large_outputs_are_streamed_past_the_caches(name: str) -> None:
    case = CASES[name]
    d = (8 << 20) + 77  # the smallest that is streamed, and a ragged end
    x = torch.randn(d // 8, generator=torch.Generator().manual_seed(1)).repeat(9)[:d]
    data = case.encode(native, x)
    streamed = torch.zeros(d + 32)
    streamed = streamed[(-streamed.data_ptr() // 4) % 16 :][:d]  # aligned to 64 bytes
    plain = torch.zeros(d + 32)
    plain = plain[(-plain.data_ptr() // 4) % 16 + 1 :][:d]
    case.read(native, data, streamed, None)
    case.read(native, data, plain, None)
    assert torch.equal(streamed, plain)


@every
def test_wrong_lengths_are_refused(name: str) -> None:
    case = CASES[name]
    x = torch.randn(100)
    with pytest.raises(ValueError, match="length"):
        case.write(native, x, torch.empty(case.nbytes(100) + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="length"):
        case.read(native, torch.empty(case.nbytes(100) - 1, dtype=torch.uint8), torch.empty(100), None)


def test_bf16_is_torch_rounding_below_saturation() -> None:
    x = inputs(20_000)["bits"]
    wanted = x.to(torch.bfloat16)
    wanted = torch.where(wanted.isinf(), torch.finfo(torch.bfloat16).max * torch.sign(x), wanted.float())
    for backend in (reference, native):
        assert same(CASES["bf16"].decode(backend, CASES["bf16"].encode(backend, x), x.numel()), wanted)


def test_fp8_bytes_are_those_of_torch() -> None:
    every_code = torch.arange(256, dtype=torch.uint8)
    message = torch.cat((torch.full((8,), 127, dtype=torch.uint8), every_code))
    wanted = every_code.view(torch.float8_e4m3fn).to(torch.float32)
    for backend in (reference, native):
        assert same(CASES["fp8"].decode(backend, message, 256), wanted)
    # 448 in every block fixes the scale at 1; every float in range must then be encoded as torch does
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 1.6, 2048)[:, None]
    x[:, 0] = 448
    x = x.clamp(-448, 448).reshape(-1)
    ties = torch.arange(0, 449, dtype=torch.float32).repeat_interleave(31).view(-1, 31) / 16
    x = torch.cat(
        (x, torch.cat((torch.full((ties.shape[0], 1), 448.0), ties * torch.logspace(0, -30, 31, base=2)), 1).reshape(-1))
    )
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    for backend in (reference, native):
        data = CASES["fp8"].encode(backend, x)
        assert bool((data[: x.numel() // 32] == 127).all())
        assert torch.equal(data[x.numel() // 32 :], codes)


def test_fp8_scale_puts_the_largest_between_232_and_464() -> None:
    for largest in (463.9, 464.0, 464.1, 448.0, 256.0, 511.9, 1e-30, 3.4e38, 1.0):
        x = torch.zeros(32)
        x[5] = -largest
        data = CASES["fp8"].encode(native, x)
        ratio = float(x[5].abs().double()) / 2.0 ** (int(data[0]) - 127)
        assert 232 < ratio <= 464
        assert int(data[1 + 5]) & 0x7F <= 0x7E


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
def test_trits_must_be_canonical(backend: CastKernels) -> None:
    case = CASES["ternary"]
    data = case.encode(backend, torch.randn(7))
    for at, value in ((4, 243), (5, 255), (5, 9)):
        bad = data.clone()
        bad[at] = value
        assert not backend.ternary_decode(bad, torch.empty(7), 64)
        with pytest.raises(CorruptMessage):
            Ternary().decode(Message(bad, bad.numel()), Spec.flat(7), CTX)
    assert backend.ternary_decode(data, torch.empty(7), 64)
