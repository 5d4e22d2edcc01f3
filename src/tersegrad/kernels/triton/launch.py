# mypy: ignore-errors
"""How the kernels of this package are launched, and what they share.

Triton's own way to a compiled kernel binds, inspects and hashes every argument of every call, which takes the CPU longer than many
kernels take the GPU. :func:`launch` therefore finds a compiled kernel once for a kind of arguments and launches it directly after that.
Numbers are never specialised on their value, so that a new step or length compiles nothing.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core import private
from tersegrad.core.philox import MASK
from tersegrad.core.protocol import Context
from tersegrad.kernels.cuda import loader

# Compiled kernels take all arguments since then; Triton's interpreter compiles nothing.
DIRECT = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 3)
_ready: dict[Any, Direct] = {}
_zeros: dict[Any, list[Tensor]] = {}
Direct = Callable[..., None]

NAN = 0x7FC00000
INFINITY = 0x7F800000
# How many messages a kernel adds up.
MOST = 8


def launch(
    kernel: Any, programs: int | tuple[int, int], tensors: tuple[Any, ...], numbers: tuple[Any, ...], **options: Any
) -> None:
    """Run ``kernel(*tensors, *numbers, **constants)`` on ``programs``; ``options`` are its constants, ``num_warps`` among them."""
    x, y = (programs, 1) if isinstance(programs, int) else programs
    pointers, device = [t.data_ptr() for t in tensors], tensors[0].get_device()
    key = (
        kernel.fn,
        device,
        *[t.dtype for t in tensors],
        *[p % 16 == 0 for p in pointers],
        *[isinstance(n, int) and not -(2**31) <= n < 2**31 for n in numbers],
        *options,
        *options.values(),
    )
    found = _ready.get(key)
    if found is not None:
        found((x, y, 1), private.current_stream(device), *pointers, *numbers)
        return
    # No product is fused with a sum: every operation rounds, as in plain torch.
    compiled = kernel[x, y, 1](*tensors, *numbers, **{"num_warps": 4, **options}, enable_fp_fusion=False)
    if compiled is not None and DIRECT:
        # The constants in the order of the kernel's parameters, which follow the numbers.
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _ready[key] = direct(compiled, [options[name] for name in names])


def direct(compiled: Any, constants: Sequence[Any]) -> Direct:
    """The quickest way to launch what Triton has compiled and launched once: ``way(grid, stream, *addresses, *numbers)``."""
    kinds = kinds_of(compiled, len(constants))
    places = _parameters(compiled.function) if kinds is not None else None
    packer = packer_of(kinds, places) if places is not None else None
    if packer is not None:
        return _through_the_driver(compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared, packer)

    def tritons(grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        compiled[grid](*arguments, *constants, stream=stream)

    return tritons


class _Thread(threading.local):
    """A thread's memory for a launch, which the driver copies: blocks, threads and stream (``CUlaunchConfig``), and the parameters."""

    def __init__(self) -> None:
        self.config = ctypes.create_string_buffer(CONFIG.size)
        self.parameters = ctypes.create_string_buffer(4096)
        self.size = ctypes.c_size_t()
        # The driver's words for parameters in one piece of memory: address, size, no more.
        words = (1, ctypes.addressof(self.parameters), 2, ctypes.addressof(self.size), None)
        self.held = (ctypes.c_void_p * len(words))(*words)
        self.at = ctypes.addressof(self.config), ctypes.addressof(self.held)


# Blocks, threads, shared memory, stream; no attributes.
CONFIG = struct.Struct("7IPPI0P")
_thread = _Thread()


def _through_the_driver(function: int, threads: int, shared: int, packer: struct.Struct) -> Direct:
    """Triton's launcher calls hooks and parses every argument again, which takes twice as long."""
    launches, pack, size, configure = loader.entry("cuLaunchKernelEx"), packer.pack_into, packer.size, CONFIG.pack_into
    launches.argtypes = [ctypes.c_void_p] * 4

    def way(grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        mine = _thread
        mine.size.value = size
        configure(mine.config, 0, *grid, threads, 1, 1, shared, stream, 0, 0)
        pack(mine.parameters, 0, *arguments)
        config, extra = mine.at
        code = launches(config, function, None, extra)
        if code == _NO_CONTEXT:
            _use_device()
            code = launches(config, function, None, extra)
        if code:
            raise loader.DriverError(loader.told(code))

    return way


# The driver's word for a thread that has used no device yet, as that of a backward pass at its first layer.
_NO_CONTEXT = 201


def _use_device() -> None:
    """Tell the driver which device this thread uses."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    loader.call("cuDeviceGet", ctypes.byref(device), private.current_device())
    loader.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    loader.call("cuCtxSetCurrent", context)


_KINDS = {"i32": "i", "i64": "q", "fp32": "f"}


def kinds_of(compiled: Any, constants: int) -> str | None:
    """The parameters of a kernel as ``struct`` has them; nothing where a launch is more than blocks of threads with parameters."""
    about, types = compiled.metadata, list(compiled.src.signature.values())
    extras = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(about, "num_ctas", 1) != 1 or any(getattr(about, name, False) for name in extras):
        return None
    split = len(types) - constants
    kinds = ["P" if kind.startswith("*") else _KINDS.get(kind) for kind in types[:split]]
    return None if None in kinds or set(types[split:]) - {"constexpr"} else "".join(kinds)


def _parameters(function: int) -> list[tuple[int, int]] | None:
    """Where each parameter of a kernel lies and its bytes, as CUDA's driver tells since 12.4."""
    try:
        tell = loader.entry("cuFuncGetParamInfo")
    except loader.DriverError:
        return None
    place, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    while not tell(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(place), ctypes.byref(size)):
        found.append((place.value, size.value))
    return found


def packer_of(kinds: str, places: Sequence[tuple[int, int]]) -> struct.Struct | None:
    """What lays parameters of these kinds in memory, where they lie at ``places`` as (offset, bytes); nothing where they cannot.

    Triton adds up to two addresses after a kernel's own parameters: scratch memory, which ours do not use.

    >>> packer_of("PiP", [(0, 8), (8, 4), (16, 8), (24, 8)]).pack(1, 2, 3)[16:]
    b'\\x03\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'
    >>> packer_of("PP", [(0, 8), (8, 4)])
    """
    rest = len(places) - len(kinds)
    if not 0 <= rest <= 2:
        return None
    whole = kinds + "P" * rest
    mine = [(struct.calcsize(f"{whole[:i]}0{kind}"), struct.calcsize(kind)) for i, kind in enumerate(whole)]
    if mine != [*places]:
        return None
    return struct.Struct(f"{kinds}0P{8 * rest}x" if rest else kinds)


def signed(word: int) -> int:
    """A 32-bit word as the signed number with the same bits: always an int32 argument."""
    word &= MASK
    return word - (word >> 31 << 32)


def draws_of(ctx: Context) -> tuple[int, int, int, int]:
    """What Philox needs of a context: the last two counter words and the key."""
    return signed(ctx.step), signed(ctx.buffer << 16 | ctx.sender), signed(ctx.seed), signed(ctx.seed >> 32)


def alignment(t: Tensor, *offsets: int) -> int:
    """The largest power of two up to 16 that divides the address of ``t`` and the ``offsets`` from it, in bytes."""
    bits = t.data_ptr() | 16
    for offset in offsets:
        bits |= offset
    return bits & -bits


def flag(t: Tensor) -> Tensor:
    """A zero on the device of ``t``, which kernels raise."""
    if not t.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=t.device)
    # Many are made at a time, 16 bytes apart; each is handed out once, on the stream that made them zero.
    key = t.device, triton.runtime.driver.active.get_current_stream(t.device.index)
    while True:
        try:
            return _zeros[key].pop()
        except (KeyError, IndexError):
            _zeros[key] = [row[:1] for row in torch.zeros(256, 4, dtype=torch.int32, device=t.device).unbind()]


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def flat(x: Tensor) -> Tensor:
    """``x`` with its coordinates one after another."""
    return x if x.is_contiguous() else x.contiguous()


@triton.jit
def left_of(n, base, TILE: tl.constexpr):
    """How many of the ``TILE`` coordinates from ``base`` (int64) on lie in a vector of ``n``: int32."""
    return tl.minimum(n - base, TILE).to(tl.int32)


@triton.jit
def inside(i, left, RAGGED: tl.constexpr):
    """Whether places ``i`` of a tile lie before ``left``. Where the tile is not ``RAGGED`` that is known when compiling.

    Only then can a thread read and write its adjacent coordinates as one word of up to 16 bytes. Kernels therefore hold their code
    twice, for whole tiles and for the last one of a vector.
    """
    return (i < left) | (RAGGED == 0)


@triton.jit
def fours(TILE: tl.constexpr):
    """The places of a tile in rows of four. A thread owns a row: 16 bytes of float32."""
    return tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def load_eights(x, row, left, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Rows of eight coordinates, (ROWS, 8) float32, 0 beyond ``left``. A thread owns a row, read in two words of 16 bytes."""
    i = row[:, None] * 8 + tl.arange(0, 4)[None, :]
    a = tl.load(x + i, mask=inside(i, left, RAGGED), other=0.0)
    b = tl.load(x + i + 4, mask=inside(i + 4, left, RAGGED), other=0.0)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, 8)).to(tl.float32)


@triton.jit
def store_eights(place, value, row, left, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """The reverse: rows of eight coordinates, in two words of 16 bytes each."""
    i = row[:, None] * 8 + tl.arange(0, 4)[None, :]
    a, b = tl.split(tl.permute(tl.reshape(value, (ROWS, 2, 4)), (0, 2, 1)))
    tl.store(place + i, a, mask=inside(i, left, RAGGED))
    tl.store(place + i + 4, b, mask=inside(i + 4, left, RAGGED))


@triton.jit
def emit(pointer, value, mask, weight, WEIGHTED: tl.constexpr):
    """Store ``value``, or add ``weight`` times it."""
    if WEIGHTED:
        value = tl.load(pointer, mask=mask, other=0.0) + value * weight
    tl.store(pointer, value, mask=mask)


@triton.jit
def _word(pointer, index, BYTES: tl.constexpr):
    """Pointers to words of 1, 2, 4 or 8 bytes; one per thread, where ``index`` has one dimension: rows stay with their threads."""
    if BYTES == 1:
        place = pointer + index
    elif BYTES == 2:
        place = pointer.to(tl.pointer_type(tl.uint16)) + index
    elif BYTES == 4:
        place = pointer.to(tl.pointer_type(tl.uint32)) + index
    else:
        place = pointer.to(tl.pointer_type(tl.uint64)) + index
    if len(index.shape) == 1:
        place = tl.max_contiguous(place, 1)
    return place


@triton.jit
def put_word(pointer, index, value, mask, BYTES: tl.constexpr, ALIGN: tl.constexpr):
    """Store the low ``BYTES`` (1, 2, 4 or 8) bytes of ``value`` as word ``index`` from the uint8 ``pointer`` on."""
    if ALIGN >= BYTES:
        place = _word(pointer, index, BYTES)
        tl.store(place, value.to(place.dtype.scalar.element_ty), mask=mask)
    else:
        for j in tl.static_range(BYTES):
            tl.store(pointer + index * BYTES + j, (value >> (8 * j)).to(tl.uint8), mask=mask)


@triton.jit
def get_word(pointer, index, mask, BYTES: tl.constexpr, ALIGN: tl.constexpr):
    """Word ``index`` of ``BYTES`` (1, 2 or 4) bytes from the uint8 ``pointer`` on, as uint32; 0 where masked out."""
    if ALIGN >= BYTES:
        return tl.load(_word(pointer, index, BYTES), mask=mask, other=0).to(tl.uint32)
    else:
        word = tl.load(pointer + index * BYTES, mask=mask, other=0).to(tl.uint32)
        for j in tl.static_range(1, BYTES):
            word |= tl.load(pointer + index * BYTES + j, mask=mask, other=0).to(tl.uint32) << (8 * j)
        return word


@triton.jit
def as_float(bits):
    """The float32 with these bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    """The bits of a float32, int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def raise_flag(flag, raised):
    """Set ``flag`` where ``raised`` is true anywhere."""
    tl.store(flag + raised.to(tl.int32) * 0, 1, mask=raised)


@triton.jit
def last_first():
    """The number of this program (int64), counted from the last: what the kernel before read last is still in the cache."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)


@triton.jit(do_not_specialize=["head", "total", "first", "rest"])
def _poison(flag, out, head, total, first, rest, TILE: tl.constexpr):
    if tl.load(flag) != 0:
        for base in range(tl.program_id(0).to(tl.int64) * TILE, total, tl.num_programs(0) * TILE):
            i = base + tl.arange(0, TILE)
            byte = tl.where(i < head, first >> ((i % 4) * 8).to(tl.int32), rest)
            tl.store(out + i, byte.to(tl.uint8), mask=i < total)


def poison(raised: Tensor, out: Tensor, head: int, first: int, rest: int) -> None:
    """Where the flag is raised: ``head`` bytes of the 32-bit word ``first``, again and again, and bytes ``rest`` up to the end."""
    total = out.numel()
    launch(_poison, min(cdiv(total, 4096), 256), (raised, out), (head, total, signed(first), rest), TILE=4096)
