"""One list of calls for every backend on any device: what it returns and writes is compared, bit for bit, with the reference on the CPU.

Run as a program it compares the Triton kernels in Triton's interpreter, which is chosen when Triton is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels import reference

Put = Callable[[Tensor], Tensor]
Case = Callable[[Any, Put], list[Tensor]]

CTX = Context(seed=0xFEDCBA9876543210, step=0xFFFFFFF0, buffer=3, sender=5)


def same(a: Tensor | float, b: Tensor | float) -> bool:
    """Equal bit for bit, any NaN being as good as another. Numbers are what tensors without dimensions would be."""
    a, b = (
        t.detach().cpu()
        if isinstance(t, Tensor)
        else torch.tensor(t, dtype=torch.int64 if isinstance(t, int) else torch.float64)
        for t in (a, b)
    )
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    words = torch.int64 if a.dtype == torch.float64 else torch.int32
    return bool(((a.view(words) == b.view(words)) | (a.isnan() & b.isnan())).all())


def inputs(n: int) -> Iterator[tuple[str, Tensor]]:
    """Ordinary numbers of all sizes, zeros of both signs, the largest and the smallest; and one that is not finite."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * torch.exp(4 * torch.randn(n, generator=generator))
    x[n // 3 : n // 3 + 3] = torch.tensor([0.0, -0.0, 1e-40])[: x[n // 3 : n // 3 + 3].numel()]
    yield "ordinary", x
    if n > 8:
        y = x.clone()
        y[1], y[5] = torch.finfo(torch.float32).max, -3e38
        yield "huge", y
        z = x.clone()
        z[n // 2] = torch.inf
        yield "infinite", z
        yield "zero", torch.zeros(n)


def _message(n: int, nbytes: int, put: Put, shift: int) -> Tensor:
    """A place for a message that begins ``shift`` bytes behind an aligned address, filled with what must be overwritten."""
    return put(torch.full((nbytes + shift,), 0xA5, dtype=torch.uint8))[shift:]


def _there_and_back(
    encode: str, decode: str, x: Tensor, nbytes: int, shift: int, before: tuple[Any, ...], after: tuple[Any, ...]
) -> Case:
    def case(ops: Any, put: Put) -> list[Tensor]:
        out = _message(x.numel(), nbytes, put, shift)
        getattr(ops, encode)(put(x), out, *before)
        decoded = put(torch.empty(x.numel()))
        getattr(ops, decode)(out, decoded, *after)
        added = put(torch.linspace(-1, 1, x.numel()))
        getattr(ops, decode)(out, added, *after, 0.3)
        return [out, decoded, added]

    return case


def casts(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """The fixed-rate messages."""
    for n in sizes:
        for kind, x in inputs(n):
            # Some messages lie at an odd address.
            shift = 1 if kind == "huge" else 0

            def pair(
                name: str,
                nbytes: int,
                *extra: Any,
                drawn: bool = False,
                x: Tensor = x,
                shift: int = shift,
                label: str = f"{n} {kind}",
            ) -> tuple[str, Case]:
                before = (*extra, CTX) if drawn else extra
                return f"{name} {extra} {label}", _there_and_back(
                    f"{name}_encode", f"{name}_decode", x, nbytes, shift, before, extra
                )

            yield pair("bf16", 2 * n)
            yield pair("fp16", 2 * n + 4)
            for block in (16, 4096):
                yield pair("fp8", n + -(-n // block), block)
            for block in (64, 192, 8256) if kind == "ordinary" else (4096,):
                yield pair("sign", 4 * -(-n // block) + -(-n // 8), block)
            yield pair("natural", n + -(-n // 8), drawn=True)
            for bucket in (128, 1 << 20):
                used = min(bucket, n)
                yield pair("ternary", 4 * -(-n // used) + -(-n // 5), bucket, drawn=True)
                for levels, width in ((3, 3), (7, 4)) if bucket == 128 else ((8, 5),):
                    yield pair("natural_levels", 4 * -(-n // used) + -(-n * width // 8), bucket, levels, width, drawn=True)


def refused(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Trits that are not canonical: a flag is returned, and nothing is added."""
    for n in sizes:
        for last in (242, 243):

            def case(ops: Any, put: Put, n: int = n, last: int = last) -> list[Tensor]:
                data = torch.zeros(4 + -(-n // 5), dtype=torch.uint8)
                # The scale is one half.
                data[3], data[-1] = 0x3F, last
                added = put(torch.linspace(-1, 1, n))
                fine = ops.ternary_decode(put(data), added, 1 << 20, 0.3)
                return [added, fine]

            yield f"refused {n} {last}", case


def _blocks(x: Tensor, shift: int, rule: str, block: int, levels: int, width: int, bfloat16: bool) -> Case:
    def case(ops: Any, put: Put) -> list[Tensor]:
        n = x.numel()
        blocks = -(-n // block)
        steps = _message(n, (2 if bfloat16 else 4) * blocks, put, shift)
        codes = _message(n, -(-n * width // 8), put, shift)
        options: Any = {"rule": rule, "block": block, "levels": levels, "width": width, "bfloat16": bfloat16}
        ops.quantise_blocks(put(x), CTX, steps, codes, **options)
        decoded, added = put(torch.empty(n)), put(torch.linspace(-1, 1, n))
        ops.dequantise_blocks(steps, codes, decoded, block=block, width=width, bfloat16=bfloat16)
        ops.dequantise_blocks(steps, codes, added, block=block, width=width, bfloat16=bfloat16, weight=-0.7)
        return [steps, codes, decoded, added]

    return case


def blocks(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """int8, int4 and packed QSGD."""
    forms: tuple[tuple[str, int, int, int, bool], ...] = (
        ("nearest", 256, 127, 8, False),
        ("nearest", 32, 7, 4, True),
        ("max", 512, 7, 4, False),
        ("l2", 24, 3, 3, False),
        ("l2", 512, 127, 8, False),
        ("l2", 4104, 1, 2, False),
        ("nearest", 8192, 7, 4, True),
    )
    for n in sizes:
        for kind, x in inputs(n):
            for form in forms:
                if form[1] <= 512 or kind == "ordinary":
                    yield f"blocks {form} {n} {kind}", _blocks(x, 1 if kind == "huge" else 0, *form)


def splits(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """The same of a sum, and what the message leaves out of it: error feedback in one pass."""
    forms: tuple[tuple[str, int, int, int, bool], ...] = (
        ("nearest", 256, 127, 8, False),
        ("nearest", 32, 7, 4, True),
        ("max", 512, 7, 4, False),
        ("l2", 24, 3, 3, False),
        ("l2", 512, 7, 4, False),
        ("max", 2048, 1, 2, False),
        ("l2", 4104, 1, 2, False),
    )

    def of(x: Tensor, shift: int, rule: str, block: int, levels: int, width: int, bfloat16: bool) -> Case:
        def case(ops: Any, put: Put) -> list[Tensor]:
            n = x.numel()
            steps = _message(n, (2 if bfloat16 else 4) * -(-n // block), put, shift)
            codes = _message(n, -(-n * width // 8), put, shift)
            carry, left = torch.linspace(-1, 1, n) * x.flip(0).clamp(-1e30, 1e30), put(torch.full((n,), 7.0))
            options: Any = {"rule": rule, "block": block, "levels": levels, "width": width, "bfloat16": bfloat16}
            good = ops.split_blocks(put(x), put(carry), CTX, steps, codes, left, **options, weight=0.7 if shift else 1.0)
            # What is left of a sum that is not finite is undefined.
            return [steps, codes, torch.as_tensor(good), torch.where(good, left, 0.0)]

        return case

    def of_signs(x: Tensor, shift: int, block: int) -> Case:
        def case(ops: Any, put: Put) -> list[Tensor]:
            n = x.numel()
            out = _message(n, 4 * -(-n // block) + -(-n // 8), put, shift)
            carry, left = torch.linspace(-1, 1, n) * x.flip(0).clamp(-1e30, 1e30), put(torch.full((n,), 7.0))
            good = ops.sign_split(put(x), put(carry), out, left, block)
            return [out, torch.as_tensor(good), torch.where(good, left, 0.0)]

        return case

    for n in sizes:
        for kind, x in inputs(n):
            yield f"split signs {n} {kind}", of_signs(x, 1 if kind == "huge" else 0, 64 if kind == "ordinary" else 4096)
            for form in forms:
                yield f"split {form} {n} {kind}", of(x, 1 if kind == "huge" else 0, *form)


def casts_added_up(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Sums of ten messages, of which the Triton kernel adds eight at a time."""
    for n in sizes:
        found = [x for _, x in inputs(n)]
        extra = {"bf16": n, "fp16": n + 4, "sign": 4 * -(-n // 192) + -(-n // 8) - n, "natural": -(-n // 8)}
        for cast, more in extra.items():

            def case(
                ops: Any, put: Put, n: int = n, xs: list[Tensor] = found, cast: str = cast, more: int = more
            ) -> list[Tensor]:
                messages = [_message(n, n + more, put, 2 * k) for k in range(len(xs))]
                block = [192] if cast == "sign" else []
                for x, m in zip(xs, messages, strict=True):
                    getattr(ops, f"{cast}_encode")(put(x), m, *([CTX] if cast == "natural" else []), *block)
                totals = [put(torch.empty(n)) for _ in range(3)]
                # The third vector is not finite.
                ops.sum_casts(cast, (messages[:2] * 5)[:10], totals[0], 1.0, *block)
                ops.sum_casts(cast, messages[:2], totals[1], -0.7, *block)
                ops.sum_casts(cast, messages, totals[2], 1.0, *block)
                return totals

            yield f"{cast} added up {n}", case


def added_up(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """The same of packed blocks."""
    yield from casts_added_up(sizes)
    options: Any = {"block": 32, "width": 4, "bfloat16": True}
    for n in sizes:
        for bad in (False, True):

            def case(ops: Any, put: Put, n: int = n, bad: bool = bad) -> list[Tensor]:
                head = 2 * -(-n // 32)
                messages = []
                for k, (_, x) in enumerate(inputs(n)):
                    if bad or bool(x.isfinite().all()):
                        m = _message(n, head + -(-n // 2), put, 2 * k)
                        ops.quantise_blocks(put(x), CTX, m[:head], m[head:], rule="nearest", levels=7, **options)
                        messages.append(m)
                messages = (messages * 10)[:10]
                total = ops.dequantise_messages(messages, put(torch.empty(n)), **options)
                return [total, ops.dequantise_messages(messages[:3], put(torch.empty(n)), **options, weight=-0.7)]

            yield f"added up {n} {bad}", case


def sums(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Norms, and draws."""

    def by_block(x: Tensor, block: int) -> Case:
        names = ("block_sum_squares", "block_sum_abs", "block_abs_max")
        return lambda ops, put: [getattr(ops, name)(put(x), block) for name in names]

    def whole(x: Tensor) -> Case:
        return lambda ops, put: [getattr(ops, name)(put(x)) for name in ("sum_squares", "sum_abs", "abs_max")]

    def draws(start: int, count: int) -> Case:
        return lambda ops, put: [ops.random_u16(CTX, 1, start, count, put(torch.empty(0)).device)]

    for n in sizes:
        for kind, x in inputs(n):
            for block in (24, 4104):
                yield f"block sums {block} {n} {kind}", by_block(x, block)
            yield f"sums {n} {kind}", whole(x)
    for start, count in ((0, 1), (7, 300), ((1 << 35) - 9, 40), (3, 0)):
        yield f"draws {start} {count}", draws(start, count)


def rotations(sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Case]]:
    """The Hadamard transform of ``n`` coordinates in blocks."""
    for n, block in sizes:
        for kind, x in inputs(n):
            if kind in ("ordinary", "infinite"):

                def case(ops: Any, put: Put, x: Tensor = x, n: int = n, block: int = block) -> list[Tensor]:
                    rest = n % block
                    padded = n - rest + (1 << (rest - 1).bit_length() if rest else 0)
                    y, back = put(torch.empty(padded)), put(torch.empty(n))
                    top = ops.rotate(put(x), y, block, CTX)
                    ops.unrotate(y, back, block, CTX)
                    shrunk, kept = y.clone(), y.clone()
                    ops.rotate_where(put(x), shrunk, block, CTX, put(torch.tensor(True)), 2.0**-32)
                    ops.rotate_where(put(x), kept, block, CTX, put(torch.tensor(False)), 2.0**-32)
                    # That it is not finite is all that is told then.
                    return [
                        y,
                        back,
                        shrunk,
                        kept,
                        torch.as_tensor(top).float().cpu().nan_to_num(nan=torch.inf, posinf=torch.inf),
                    ]

                yield f"rotation {block} {n} {kind}", case


# Rows, columns, height, width and number kept: tiles of several shapes one after another, and one that is sent whole.
LAYOUTS = (
    ((128, 64, 64, 64, 64), (1, 100, 1, 100, 7), (6, 10, 3, 5, 15)),
    ((64, 128, 64, 64, 4), (8, 58, 4, 29, 9), (3, 1, 1, 1, 1)),
    ((2, 16384, 1, 16384, 5),),
)


def _regions(layout: tuple[tuple[int, int, int, int, int], ...]) -> tuple[Tensor, int, int]:
    """The table of a layout, its coordinates and its places."""
    start, places, rows = 0, 0, []
    for height, width, *tile, keep in layout:
        rows.append((start, height, width, *tile, keep))
        start += height * width
        places += height * width // (tile[0] * tile[1]) * keep
    return torch.tensor(rows).reshape(-1), start, places


def tiles() -> Iterator[tuple[str, Case]]:
    """The largest coordinates of tiles, and cosine transforms."""
    for number, layout in enumerate(LAYOUTS):
        table, n, count = _regions(layout)
        for kind, x in inputs(n):

            def chosen(
                ops: Any, put: Put, x: Tensor = x, n: int = n, count: int = count, table: Tensor = table
            ) -> list[Tensor]:
                places, values = put(torch.zeros(count, dtype=torch.int32)), put(torch.zeros(count))
                finite = ops.chunk_choose(put(x), table, places, values)
                sums = put(torch.empty(n))
                again, carried = places.clone(), values.clone()
                ops.chunk_carry(put(x), put(x.flip(0)), 0.95, sums, table, again, carried)
                if not bool(finite):
                    return [finite, sums]
                dense, added = put(torch.full((n,), 7.0)), put(x)
                ops.chunk_scatter(places, values, table, dense)
                ops.chunk_scatter(again, carried, table, added, -0.3)
                return [finite, places, values, sums, again, carried, dense, added]

            yield f"tiles {number} {kind}", chosen
            if n < 30_000 and kind in ("ordinary", "huge"):

                def there_and_back(ops: Any, put: Put, x: Tensor = x, n: int = n, table: Tensor = table) -> list[Tensor]:
                    y, back = put(torch.empty(n)), put(torch.empty(n))
                    ops.cosine_forward(put(x), table, y)
                    ops.cosine_inverse(y, table, back)
                    return [y, back]

                yield f"cosines {number} {kind}", there_and_back
        # Ties in every tile.
        rounded = next(x for _, x in inputs(n)).clamp(-2, 2).round()
        yield f"tiles {number} ties", functools.partial(chosen, x=rounded)


def differences(ops: Any, put: Put, cases: Iterator[tuple[str, Case]]) -> list[str]:
    """The cases in which ``ops``, on tensors that went through ``put``, differ from the reference on the CPU."""
    wrong = []
    for name, case in cases:
        expected, found = case(reference, lambda t: t.clone()), case(ops, put)
        bad = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same(a, b)]
        if bad:
            wrong.append(f"{name}: results {bad}")
    return wrong


def interpreted(topic: str) -> list[str]:
    """Differences of the Triton kernels in the interpreter, on few and small inputs: it takes its time."""
    import triton.runtime.interpreter as interpreter

    plain = interpreter._patch_lang_tensor

    # Its scalars are arrays of one element, which NumPy 2.4 no longer turns into a loop's bound.
    def with_bounds(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    if plain.__name__ != "with_bounds":
        interpreter._patch_lang_tensor = with_bounds
    from tersegrad.kernels.triton import backend

    cases: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
        "casts": lambda: casts((1, 203)),
        "refused": lambda: refused((7, 10)),
        "blocks": lambda: blocks((5, 600)),
        "whole": whole_tiles,
        "splits": lambda: splits((5, 600, 2100)),
        "added": lambda: added_up((1, 77, 2100)),
        "sums": lambda: sums((1, 333)),
        "tiles": tiles,
        "long": long_ones,
        "rotations": lambda: rotations(((1, 4096), (77, 16), (300, 256), (8200, 8192))),
    }
    return differences(backend, lambda t: t.clone(), cases[topic]())


def whole_tiles() -> Iterator[tuple[str, Case]]:
    """Vectors of a whole tile and of part of another."""
    yield from (case for case in casts((2600,)) if "ordinary" in case[0] and "fp8 (4096" not in case[0])
    yield from (case for case in blocks((2100,)) if "ordinary" in case[0] and "4104" not in case[0] and "8192" not in case[0])


def long_ones() -> Iterator[tuple[str, Case]]:
    """A few vectors of more than one chunk and tile."""
    yield from (case for case in sums((9000,)) if "ordinary" in case[0])
    wanted = ("sign", "fp8 (4096,)", "ternary (1048576,)", "natural_levels (1048576,", "fp16")
    yield from (case for case in casts((4500,)) if "ordinary" in case[0] and case[0].startswith(wanted))
    yield from (case for case in blocks((8300,)) if "ordinary" in case[0] and ("4104" in case[0] or "8192" in case[0]))


if __name__ == "__main__":
    found = [line for topic in sys.argv[1:] for line in interpreted(topic)]
    print("\n".join(found))
    sys.exit(bool(found))
