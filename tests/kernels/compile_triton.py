"""Compile the Triton kernels for an H200 (sm_90) without one: every kind of launch that the calls of ``agree`` make.

``python -m tests.kernels.compile_triton`` compiles them all and prints their registers' spills; arguments choose kernels by name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tersegrad.kernels.triton import backend, launch
from tests.kernels import agree

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
}


def launches() -> dict[Any, tuple[Any, dict[str, str], dict[str, Any], list[int], int]]:
    """Kernel, types, constants, places of 16-byte aligned tensors, and warps of every kind of launch; nothing runs."""
    seen: dict[Any, tuple[Any, dict[str, str], dict[str, Any], list[int], int]] = {}

    def record(kernel: Any, programs: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...], **options: Any) -> None:
        warps = options.pop("num_warps", 4)
        types = [TYPES[t.dtype] for t in tensors]
        types += ["fp32" if isinstance(n, float) else "i32" if -(2**31) <= n < 2**31 else "i64" for n in numbers]
        whole = [i for i, t in enumerate(tensors) if t.data_ptr() % 16 == 0]
        signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(options)], strict=True))
        key = kernel.fn.__name__, tuple(types), tuple(options.items())
        seen.setdefault(key, (kernel, signature, options, whole, warps))

    modules = [m for name, m in sys.modules.items() if name.startswith("tersegrad.kernels.triton.") and hasattr(m, "launch")]
    for module in modules:
        if module is not launch:
            module.launch = record  # type: ignore[attr-defined]
    launch.launch = record
    cases = [
        *agree.casts((333,)),
        *agree.refused((7,)),
        *agree.blocks((333,)),
        *agree.splits((333,)),
        *agree.added_up((333,)),
        *agree.sums((333,)),
        *agree.rotations(((300, 256), (8200, 8192))),
        *agree.tiles(),
    ]
    for _, case in [*cases, *agree.long_ones()]:
        case(backend, lambda t: t.clone())
    case = next(c for name, c in cases if name.startswith("blocks ('l2', 512"))
    case(backend, lambda t: t.bfloat16() if t.is_floating_point() else t.clone())
    return seen


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], whole: list[int], warps: int) -> Any:
    """The compiled kernel."""
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in whole})
    return triton.compile(source, target=TARGET, options={"num_warps": warps, "enable_fp_fusion": False})


def main(names: list[str]) -> None:
    """Compile those whose names are given, or all."""
    for key, parts in launches().items():
        if not names or key[0] in names:
            made = compiled(*parts)
            ptx = made.asm["ptx"]
            bad = [line.strip() for line in ptx.splitlines() if ".ftz" in line or ".approx" in line or "fma.rn.f32" in line]
            print(key[0], dict(parts[2]), "shared", made.metadata.shared, "warps", parts[4], *bad[:3], flush=True)
            if bad:
                sys.exit("the rounding of these operations is not the reference's")


if __name__ == "__main__":
    main(sys.argv[1:])
