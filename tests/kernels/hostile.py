"""Calls every function of the compiled module with hostile arguments: ``python -m tests.kernels.hostile [MODULE] [--isa NAME]``.

Starts from arguments that are accepted and spoils one of them, then two: wrong types, strides and lengths, absurd numbers, NaN,
None, unsorted indices, outputs on top of inputs. Whatever comes, the module may only return or raise a ``TypeError`` or
``ValueError`` (``OverflowError`` and ``MemoryError`` are Python's own), within seconds, and without a write outside an array. Needs
numpy only, so that it also runs with a module built with sanitizers (``make native-hostile``).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ALLOWED = (TypeError, ValueError, OverflowError, MemoryError)
SECONDS = 5.0
EDGE = 64

INTEGERS: list[object] = [
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 56) - 1,
    1 << 56,
    1 << 59,
    1 << 62,
]
INTEGERS += [(1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1, 1 << 64, 3.5, float("nan"), None, "x", []]
FLOATS: list[object] = [
    0.0,
    -1.0,
    5e-324,
    1e-45,
    1e-38,
    3.4e38,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    None,
    "x",
    1 << 62,
]


@dataclass(frozen=True)
class Array:
    """An array that is accepted, and what makes it up."""

    values: np.ndarray
    guarded: bool = True

    def build(self) -> tuple[np.ndarray, np.ndarray | None]:
        """A fresh copy, with a margin on both sides that nobody may touch, or exactly as long as it is."""
        if not self.guarded:
            return self.values.copy(), None
        base = np.full(self.values.size * self.values.itemsize + 2 * EDGE, 0xA5, dtype=np.uint8)
        view = base[EDGE : base.size - EDGE].view(self.values.dtype)
        view[:] = self.values
        return view, base


def floats(n: int, seed: int = 0) -> Array:
    return Array(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


def zeros(n: int, dtype: type = np.float32) -> Array:
    return Array(np.zeros(n, dtype=dtype))


def octets(n: int, top: int = 256, seed: int = 0) -> Array:
    return Array(np.random.default_rng(seed).integers(0, top, n).astype(np.uint8))


def layout(n: int) -> Array:
    return Array(np.array([n - 60, 10, 5, 7, 60, 60, 1, 0], dtype=np.int64))


def rising(n: int, k: int, dtype: type) -> Array:
    return Array(np.sort(np.random.default_rng(1).choice(n, k, replace=False)).astype(dtype))


KEYS = [11, 22, 33, 44, 55, 66]
DRAWS = (1 << 60, 3, 7, 1 << 16 | 2)


def packed(n: int, width: int) -> int:
    return (n * width + 7) // 8


def accepted(module: ModuleType) -> dict[str, list[list[Any]]]:
    """Arguments that each function takes."""
    n, k = 300, 40
    found: dict[str, list[list[Any]]] = {
        "isa": [[]],
        "supported_isas": [[]],
        "set_isa": [[module.isa()]],
        "threads": [[]],
        "kept_threads": [[]],
        "set_threads": [[0]],
        "follow_threads": [[lambda: 2]],
        "take_tensors": [[type("NoTensor", (), {})], [type("NoTensor", (), {}), True]],
        "pack_bits": [[octets(n, 8), 3, zeros(packed(n, 3), np.uint8)], [zeros(n, np.int32), 9, zeros(packed(n, 9), np.uint8)]],
        "unpack_bits": [[octets(packed(n, 3)), 3, zeros(n, np.uint8)], [octets(packed(n, 9)), 9, zeros(n, np.int32)]],
        "pack_trits": [[octets(n, 3), zeros(n // 5, np.uint8)]],
        "unpack_trits": [[octets(n // 5, 243), zeros(n, np.uint8)]],
        "align_find": [[floats(n), 0.5, layout(n)]],
        "align_flip": [[floats(n), zeros(0, np.uint8), layout(n), zeros(n)]],
        "bf16_encode": [[floats(n), zeros(2 * n, np.uint8)]],
        "bf16_decode": [[octets(2 * n), zeros(n), True, 0.5]],
        "fp16_encode": [[floats(n), zeros(4 + 2 * n, np.uint8)]],
        "fp16_decode": [[octets(4 + 2 * n), zeros(n), False, 1.0]],
        "fp8_encode": [[floats(n), zeros(n + 10, np.uint8), 32]],
        "fp8_decode": [[octets(n + 10), zeros(n), 32, True, 0.5]],
        "sign_encode": [[floats(n), zeros(4 * 5 + 38, np.uint8), 64]],
        "sign_decode": [[octets(4 * 5 + 38), zeros(n), 64, True, 0.5]],
        "sign_split": [[floats(n), floats(n), zeros(4 * 5 + 38, np.uint8), zeros(n), 64]],
        "natural_encode": [[floats(n), zeros(38 + n, np.uint8), 5, 6, 7]],
        "natural_decode": [[octets(38 + n), zeros(n), False, 1.0]],
        "ternary_encode": [[floats(n), zeros(4 * 5 + 60, np.uint8), 64, 5, 6, 7]],
        "ternary_decode": [[octets(4 * 5 + 60, 200), zeros(n), 64, True, 0.5]],
        "natural_levels_encode": [[floats(n), zeros(4 * 5 + packed(n, 5), np.uint8), 64, 7, 5, 5, 6, 7]],
        "natural_levels_decode": [[octets(4 * 5 + packed(n, 5)), zeros(n), 64, 7, 5, True, 0.5]],
        "dither_max_bytes": [[n]],
        "dither_encode": [
            [
                floats(n),
                0.25,
                0.0,
                coder,
                14,
                (True, *DRAWS),
                zeros(4 + 1 + 4 * n, np.uint8),
                zeros(0),
                zeros(0),
                layout(n),
                False,
            ]
            for coder in range(3)
        ]
        + [
            [
                floats(n),
                0.0,
                0.5,
                0,
                16,
                (False, 0, 0, 0, 0),
                zeros(4 + 1 + 4 * n, np.uint8),
                zeros(n),
                floats(n, 1),
                zeros(0, np.int64),
                rdo,
            ]
            for rdo in (False, True)
        ],
        "dither_decode": [
            [octets(50), zeros(n), layout(n)],
            [Array(np.array([0, 0, 0, 128, 3, 1, 0, 0, 0, 0, 0, 9, 9], np.uint8)), zeros(n), layout(n)],
            [Array(np.array([0, 0, 0, 128, 0], np.uint8)), zeros(n), zeros(0, np.int64)],
        ],
        "dither_decode_add": [[octets(50), zeros(n), 0.5, zeros(n, np.uint8), layout(n)]],
        "dither_sample": [[floats(n), 0.5, 2, zeros(0)], [floats(n), 0.5, 1, floats(n, 1)]],
        "may_have_classes": [
            [Array(np.arange(-8, n - 8, dtype=np.int8)), layout(n), 0, n],
            [zeros(n, np.int8), layout(2 * n), n, 2 * n],
        ],
        "trellis_max_bytes": [[n]],
        "trellis_encode": [
            [floats(n), 0.5, states, 14, (drawn, 1 << 60, 6, 7, 3, 9), zeros(2 + 4 * n, np.uint8), layout(n), rdo]
            for states, drawn, rdo in (
                (4, False, False),
                (8, False, True),
                (16, True, False),
                (32, True, False),
                (32, False, True),
            )
        ],
        "trellis_decode": [
            [octets(50), 8, (False, 0, 0, 0, 0, 0), zeros(n), False, 1.0, layout(n), zeros(0)],
            [
                Array(np.array([0, 2, 2, 15, 0, 0, 0, 128, 63, 1] + 75 * [27], np.uint8)),
                8,
                (False, 0, 0, 0, 0, 0),
                zeros(n),
                True,
                0.5,
                zeros(0, np.int64),
                zeros(n),
            ],
            [
                Array(np.array([0, 3, 2, 15, 0, 0, 0, 128, 63, 0, 0, 128, 63, 0, 1, 0, 1, 16, 16, 1] + 75 * [27], np.uint8)),
                8,
                (False, 0, 0, 0, 0, 0),
                zeros(n),
                False,
                1.0,
                layout(n),
                zeros(0),
            ],
            [
                Array(np.array([0, 2, 2, 15, 3, 0, 0, 0, 128, 63, 1] + 75 * [27], np.uint8)),
                32,
                (True, 1, 6, 7, 3, 9),
                zeros(n),
                False,
                1.0,
                layout(n),
                zeros(0),
            ],
        ],
        "trellis_error": [[floats(n), 0.5, 8, layout(n)]],
        "rotate": [[floats(n), zeros(256 + 64), 256, 1, 2, 3, 4]],
        "unrotate": [[floats(256 + 64), zeros(n), 256, 1, 2, 3, 4]],
        "levels_encode": [[Array(np.arange(-20, 20, dtype=np.int32)), form] for form in (False, True)],
        "levels_decode": [[octets(40), zeros(40, np.int32)]],
        "modelled_encode": [[zeros(k, np.int32), octets(k, 2), Array(np.full(10, 30000, np.int32)), 2, 3]],
        "modelled_decode": [[octets(30), octets(k, 2), Array(np.full(10, 30000, np.int32)), 2, 3, zeros(k, np.int32)]],
        "rans_histogram": [
            [octets(n, 9), 9, None, 1, True, zeros(9, np.int64)],
            [octets(n, 9), 9, octets(n, 3), 3, False, zeros(27, np.int64)],
        ],
        "rans_write_tables": [[Array(np.arange(1, 10, dtype=np.int64)), 9, 1]],
        "rans_read_tables": [[octets(60), 9, 2, zeros(18, np.int16)]],
        "rans_encode": [
            [octets(n, 9), 9, None, 1, True, 16, zeros(1 + packed(n, 4), np.uint8)],
            [octets(n, 9), 9, octets(5, 3), 3, False, 18, zeros(1 + packed(n, 4), np.uint8)],
        ],
        "rans_decode": [
            [octets(80, 2), 9, None, 1, zeros(n, np.uint8)],
            [octets(80, 2), 9, octets(n, 3), 3, zeros(n, np.uint8)],
        ],
        "random_u16": [[1, 2, 3, 4, 5, 6, zeros(n, np.int32)]],
        "abs_max": [[floats(n)]],
        "sum_squares": [[floats(n)]],
        "sum_abs": [[floats(n)]],
        "block_abs_max": [[floats(n), 100, zeros(3)]],
        "block_sum_squares": [[floats(n), 100, zeros(3, np.float64)]],
        "block_sum_abs": [[floats(n), 100, zeros(3, np.float64)]],
        "quantise": [
            [floats(n), 64, 7, 4, rule, False, 1, 2, 3, 4, 5, zeros(20, np.uint8), zeros(150, np.uint8)] for rule in range(3)
        ],
        "dequantise": [[octets(20, 100), octets(150), 64, 4, False, zeros(n)]],
        "dequantise_add": [[octets(10, 100), octets(150), 64, 4, True, 0.5, zeros(n)]],
        "subtractive_quantise": [[floats(n), 0.5, DRAWS, 5, zeros(n, np.int32)]],
        "subtractive_bins": [[DRAWS, 5, zeros(n, np.uint8)]],
        "subtractive_octaves": [[DRAWS, 5, zeros(n, np.uint8)]],
        "classes_choose": [
            [octets(n, 9), 4, layout(n), Array(np.array([0, 100, 100, n])), zeros(n, np.uint8)],
            [octets(n, 9), 4, layout(2 * n), Array(np.array([n, 2 * n])), zeros(n, np.uint8)],
        ],
        "classes_read": [
            [octets(60), layout(n), Array(np.array([0, 100, 100, n])), zeros(n, np.uint8)],
            [
                Array(np.array([255, 255, 16, 16, 16, 16, 16, 16], np.uint8)),
                layout(n),
                Array(np.array([0, n])),
                zeros(n, np.uint8),
            ],
        ],
        "subtractive_restore": [[Array(np.arange(n, dtype=np.int32)), 0.5, DRAWS, 5, zeros(n)]],
        "subtractive_restore_add": [[Array(np.arange(n, dtype=np.int32)), 0.5, DRAWS, 5, 0.5, zeros(n)]],
        "random_rows": [[DRAWS, Array(np.arange(10, dtype=np.int64)), 30, zeros(300, np.int32)]],
        "sphere_first": [
            [
                floats(12 * 70),
                70,
                floats(12 * 5),
                12,
                Array(np.full(5, 1.0, np.float32)),
                zeros(5, np.int64),
                zeros(5, np.int64),
            ]
        ],
        "variance_select": [[floats(n), floats(n, 1), floats(n, 2), floats(n, 3), 1.0, 0.9, 0.1, zeros(n), zeros(n)]],
        "all_finite": [[floats(n)]],
        "select_sample_key": [[floats(n), k]],
        "permuted_gather": [[floats(n), KEYS, 5, zeros(k)]],
        "permuted_scatter": [[floats(k), KEYS, 5, zeros(n)]],
        "permuted_scatter_add": [[floats(k), KEYS, 5, 0.5, zeros(n)]],
    }
    regions = Array(np.array([0, 10, 30, 5, 10, 4], np.int64))
    places = Array(np.tile(np.array([1, 7, 20, 44], np.int32), 6))
    sets = zeros(32, np.uint8)
    coded = module.chunk_encode(places.values, regions.values, n, sets.values)
    basis = [Array(np.eye(size).reshape(-1)) for size in (5, 10)]
    found |= {
        "chunk_choose": [[floats(n), regions, zeros(24, np.int32), zeros(24)]],
        "chunk_carry": [[floats(n), floats(n), 0.5, zeros(n), regions, zeros(24, np.int32), zeros(24)]],
        "powers_encode": [[floats(n), 8, zeros(4 * -(-n // 8), np.uint8), zeros(-(-n // 2), np.uint8)]],
        "powers_decode": [[octets(4 * -(-n // 8)), octets(-(-n // 2)), 8, zeros(n)]],
        "powers_decode_add": [[octets(4 * -(-n // 8)), octets(-(-n // 2)), 8, 0.5, zeros(n)]],
        "chunk_bins": [[floats(24), Array(np.array([4, 20], np.int64)), 4, zeros(24, np.uint8), zeros(8), zeros(8, np.int64)]],
        "chunk_encode": [[places, regions, n, zeros(32, np.uint8)]],
        "chunk_decode": [[Array(sets.values[:coded].copy()), regions, n, zeros(24, np.int32)]],
        "chunk_scatter": [[places, floats(24), regions, zeros(n)]],
        "chunk_scatter_add": [[places, floats(24), regions, 0.5, zeros(n)]],
        "cosine_transform": [[floats(n), zeros(n), 10, 30, 5, 10, *basis, True]],
    }
    codes = Array(np.arange(1, k, dtype=np.int64))
    bits = module.elias_bits(codes.values, 0)
    found["elias_bits"] = [[codes, 0]]
    found["elias_encode"] = [[codes, 0, zeros((bits + 7) // 8, np.uint8)]]
    found["elias_decode"] = [[octets(100), code, zeros(k, np.int64)] for code in range(3)]
    found["rice_bits"] = [[codes, 2]]
    found["rice_best"] = [[codes]]
    found["rice_encode"] = [[codes, 2, zeros(10 * k, np.uint8)]]
    found["rice_decode"] = [[octets(100), 2, zeros(k, np.int64)]]
    found["planar_gamma_encode"] = [[codes, zeros(10 * k, np.uint8)]]
    found["planar_gamma_decode"] = [[octets(100), zeros(k, np.int64)]]
    for dtype in (np.int32, np.int64):
        indices, places = rising(n, k, dtype), zeros(k, dtype)
        more: dict[str, list[Any]] = {
            "select_top_k": [floats(n), k, places, zeros(k)],
            "select_compact": [floats(n), 0x3F800000, k, places, zeros(k)],
            "sparse_scatter": [indices, floats(k), zeros(n)],
            "sparse_scatter_add": [indices, floats(k), 0.5, zeros(n)],
            "index_complement": [indices, n, zeros(n - k, dtype)],
            "golomb_encode": [indices, 5, zeros(200, np.uint8)],
            "golomb_size": [indices, 5],
            "golomb_decode": [octets(100), n, 5, places],
            "digits_encode": [indices, n, zeros(200, np.uint8)],
            "digits_decode": [octets(100), n, places],
            "bitmap_encode": [indices, n, zeros(38, np.uint8)],
            "bitmap_decode": [octets(38), n, places],
            "gap_classes": [indices, zeros(k, np.uint8)],
            "gap_histogram": [indices, n, zeros(128, np.int64)],
            "gap_rests_encode": [indices, zeros(200, np.uint8)],
            "gap_rests_decode": [octets(100), octets(k, 8), n, places],
            "permuted_indices": [KEYS, 5, n, places],
        }
        for name, arguments in more.items():
            found.setdefault(name, []).append(arguments)
    return found


def spoilt_arrays(array: np.ndarray) -> list[object]:
    """What is wrong with an array in many ways."""
    wide = np.repeat(array, 2)
    frozen = array.copy()
    frozen.flags.writeable = False
    found: list[object] = [
        None,
        [1, 2, 3],
        5,
        wide[::2],
        wide,
        array[: array.size // 2],
        array[:0],
        array.reshape(1, -1),
        array[::-1],
    ]
    found += [array[1:], frozen, np.array(3, dtype=array.dtype), np.empty((0, 3), dtype=array.dtype)]
    found += [
        array.astype(t)
        for t in (np.float64, np.float16, np.int8, np.uint16, np.int32, np.int64, np.uint8, np.float32, bool)
        if t != array.dtype
    ]
    if array.size:
        if array.dtype.kind == "f":
            fills: tuple[float, ...] = (float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45, -0.0)
            found += [np.full_like(array, fill) for fill in fills]
        else:
            info = np.iinfo(array.dtype)
            found += [np.full_like(array, fill) for fill in (info.min, info.max, 0, 1, info.max // 2)]
            mixed = array.copy()
            mixed[::2], mixed[1::2] = info.max, info.min
            found += [mixed, np.sort(array)[::-1].copy(), np.roll(array, 1), np.array([info.max - 1, info.max], array.dtype)]
    return found


def spoilt(value: object) -> list[object]:
    """Hostile stand-ins for an argument."""
    if isinstance(value, np.ndarray):
        return spoilt_arrays(value)
    if isinstance(value, bool):
        return [None, 2, "x", 1.5]
    if isinstance(value, int):
        return INTEGERS
    if isinstance(value, float):
        return FLOATS
    if isinstance(value, str):
        return [None, "", "avx1024", 3, b"avx2"]
    if isinstance(value, (tuple, list)):
        found: list[object] = [None, 5, value[:-1], [*value, 1], "xxxxxx"]
        for i, part in enumerate(value):
            found += [type(value)((*value[:i], bad, *value[i + 1 :])) for bad in spoilt(part)]
        return found
    return [3, "x", []]


class Attack:
    """Calls that may only return or raise."""

    def __init__(self, module: ModuleType, only: str = "") -> None:
        self.module, self.only, self.calls, self.refused = module, only, 0, 0

    def call(self, name: str, arguments: list[object], edges: list[np.ndarray | None]) -> None:
        start = time.perf_counter()
        try:
            getattr(self.module, name)(*arguments)
        except ALLOWED:
            self.refused += 1
        seconds = time.perf_counter() - start
        self.calls += 1
        shown = ", ".join(f"{a.dtype}[{a.size}]" if isinstance(a, np.ndarray) else repr(a) for a in arguments)
        if seconds > SECONDS:
            raise SystemExit(f"{name}({shown}) took {seconds:.1f} s")
        for edge in edges:
            if edge is not None and not ((edge[:EDGE] == 0xA5).all() and (edge[-EDGE:] == 0xA5).all()):
                raise SystemExit(f"{name}({shown}) wrote outside an array")

    def build(self, template: list[Any], guarded: bool) -> tuple[list[object], list[np.ndarray | None]]:
        arguments: list[object] = []
        edges: list[np.ndarray | None] = []
        for part in template:
            if isinstance(part, Array):
                array, edge = Array(part.values, guarded).build()
                arguments.append(array)
                edges.append(edge)
            else:
                arguments.append(part)
        return arguments, edges

    def function(self, name: str, template: list[Any], pairs: int, draw: random.Random) -> None:
        """One argument after another, every two equal arrays at once, then two arguments at a time."""
        arguments, edges = self.build(template, True)
        try:
            getattr(self.module, name)(*arguments)
        except ALLOWED as error:
            if not name.endswith(("decode", "decode_add", "read_tables")):  # random bytes may be refused
                raise SystemExit(f"{name} refuses what it should take: {error}") from None
        for i in range(len(template)):
            for which in range(len(spoilt(arguments[i]))):
                arguments, edges = self.build(template, which % 2 == 0)
                arguments[i] = spoilt(arguments[i])[which]
                self.call(name, arguments, edges)
        self.call(name, [], [])
        for i in range(len(template)):
            for j in range(i):
                arguments, edges = self.build(template, True)
                one, other = arguments[i], arguments[j]
                if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.nbytes >= other.nbytes:
                    arguments[j] = one.view(np.uint8)[: other.nbytes].view(other.dtype)
                    self.call(name, arguments, edges)
        for _ in range(pairs if len(template) > 1 else 0):
            arguments, edges = self.build(template, draw.random() < 0.5)
            for i in draw.sample(range(len(template)), 2):
                arguments[i] = draw.choice(spoilt(arguments[i]))
            self.call(name, arguments, edges)

    def run(self, pairs: int) -> None:
        known = accepted(self.module)
        present = [name for name in dir(self.module) if not name.startswith("_")]
        missing = sorted(set(present) ^ set(known))
        if missing:
            raise SystemExit(f"no arguments are known for {', '.join(missing)}, or they are gone")
        draw = random.Random(0)
        for name in sorted(present, key=lambda name: name == "follow_threads"):
            if self.only in name:
                for template in known[name]:
                    self.function(name, template, pairs, draw)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="the compiled module")
    parser.add_argument("--isa", default="", help="portable, avx2 or avx512")
    parser.add_argument("--only", default="", help="functions whose name contains this")
    parser.add_argument("--pairs", type=int, default=100, help="calls with two hostile arguments, for each function")
    options = parser.parse_args()
    faulthandler.enable()
    np.seterr(all="ignore")
    module = load(options.module)
    if options.isa:
        module.set_isa(options.isa)
    set_isa = module.isa()
    attack = Attack(module, options.only)
    start = time.perf_counter()
    attack.run(options.pairs)
    print(f"{attack.calls} hostile calls on {set_isa}, {attack.refused} refused, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
