"""A decoder of tersegrad frames, written from ``spec/wire.md`` alone: slow, plain, and independent of the package.

It imports nothing but the standard library, and follows the sections of ``wire.md`` in their order, so that the two can be read
side by side. Numbers are Python floats that hold float32 values; :func:`f32` rounds where the format says that something is rounded.

    python -m spec.decoder FILE          what the frame holds, and its first values
    python -m spec.decoder --all FILE    every value, one a line

:func:`decode_frame` raises ValueError for bytes that a decoder must refuse.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

# ---- 1 conventions ----------------------------------------------------------------------------------------------------------

F = (2 - 2.0**-23) * 2.0**127  # the largest finite float32
NAN = math.nan


def reject(why: str) -> ValueError:
    return ValueError(why)


def require(condition: bool, why: str) -> None:
    if not condition:
        raise reject(why)


def f32(x: float) -> float:
    """The nearest float32. A product of two float32 numbers is exact in float64, so rounding it here rounds once; a sum rounds to
    float64 first, which is precise enough never to change the second rounding.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def limited(x: float) -> float:
    """Kept within the finite float32 numbers; NaN stays NaN."""
    return x if math.isnan(x) else min(max(x, -F), F)


def floats(data: bytes, kind: str = "float32") -> list[float]:
    """All numbers of a byte string: float32, float16 or bfloat16."""
    if kind == "bfloat16":
        return [float_of(h << 16) for (h,) in struct.iter_unpack("<H", data)]
    return [float(v) for (v,) in struct.iter_unpack("<f" if kind == "float32" else "<e", data)]


class Bits:
    """A bit stream: the lowest bit of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bit(self) -> int:
        require(self.at < 8 * len(self.data), "a bit stream ends early")
        return self.bit_or_zero()

    def bit_or_zero(self) -> int:
        """The next bit; zero beyond the end."""
        byte, shift = divmod(self.at, 8)
        self.at += 1
        return self.data[byte] >> shift & 1 if byte < len(self.data) else 0

    def integer(self, width: int) -> int:
        return sum(self.bit() << j for j in range(width))

    def finish(self) -> int:
        """Reject padding that is not zero; the number of bytes that were used."""
        while self.at % 8:
            require(self.bit() == 0, "padding is not zero")
        return self.at // 8


class Bytes:
    """The bytes of a message, read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    @property
    def rest(self) -> bytes:
        return self.data[self.at :]

    def take(self, count: int) -> bytes:
        require(count <= self.left, f"{count} bytes are needed, {self.left} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, most_bytes: int = 10) -> int:
        value = 0
        for j in range(most_bytes):
            byte = self.byte()
            value |= (byte & 127) << 7 * j
            if byte < 128:
                require(byte > 0 or j == 0, "a varint is longer than necessary")
                require(value < 1 << 64, "a varint does not fit into 64 bits")
                return value
        raise reject("a varint has too many bytes")

    def finish(self) -> None:
        require(self.left == 0, f"{self.left} bytes follow the end of the message")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def exactly(data: bytes, length: int) -> Bytes:
    """A message of fixed length."""
    require(len(data) == length, f"the message has {len(data)} bytes instead of {length}")
    return Bytes(data)


ZERO, NON_FINITE, RAW, PACKED, CLASSED = 1, 2, 3, 4, 5  # modes; 0 is normal


def fill(mode: int, d: int) -> list[float]:
    return [0.0 if mode == ZERO else NAN] * d


# ---- 2 frames ---------------------------------------------------------------------------------------------------------------


class Context(NamedTuple):
    """Public facts of a message, from which randomness is drawn."""

    seed: int
    step: int
    buffer: int
    sender: int

    def child(self, k: int) -> Context:
        w0, w1, _, _ = philox(self.seed, (k % 2**32, 255 << 24, k >> 32, 0))
        return self._replace(seed=w1 << 32 | w0)


class Piece(NamedTuple):
    """A range of a flattened tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Spec(NamedTuple):
    """What both ends know of a buffer."""

    pieces: tuple[Piece, ...]
    dtype: str = "float32"

    @property
    def d(self) -> int:
        return sum(p.stop - p.start for p in self.pieces)


def flat(d: int, dtype: str = "float32") -> Spec:
    return Spec((Piece("", (d,), 0, d),), dtype)


@dataclasses.dataclass(frozen=True)
class Form:
    """A configuration: a name and a value for each of its parameters."""

    name: str
    parameters: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.parameters[key]


class Frame(NamedTuple):
    """An opened frame."""

    wire_id: int
    form: Form
    text: str
    context: Context
    d: int
    dtype: str
    message: bytes


HEADER = struct.Struct("<4sBBHQIHHQQB")


def open_frame(data: bytes, max_d: int = 1 << 22) -> Frame:
    require(len(data) >= HEADER.size + 4, "a frame has at least 45 bytes")
    magic, version, dtype, wire_id, seed, step, buffer, sender, d, n, t = HEADER.unpack_from(data)
    require(magic == b"TGRD", "not a frame")
    require(version == 1, f"version {version} is unknown")
    require(len(data) == HEADER.size + t + n + 4, "the frame's length is not what its header says")
    require(zlib.crc32(data[:-4]) == struct.unpack("<I", data[-4:])[0], "the checksum is wrong")
    require(dtype < 3, f"dtype {dtype} is unknown")
    require(d <= max_d, f"{d} coordinates are more than this reader holds")
    text = data[HEADER.size : HEADER.size + t]
    require(text.isascii(), "the text form is not ASCII")
    form = parse(text.decode("ascii"))
    require(COMPRESSORS[form.name].wire_id == wire_id, f"wire id {wire_id} is not that of {form.name}")
    message = data[HEADER.size + t : -4]
    kind = ("float32", "float16", "bfloat16")[dtype]
    return Frame(wire_id, form, text.decode("ascii"), Context(seed, step, buffer, sender), d, kind, message)


def decode_frame(data: bytes, pieces: list[Piece] | None = None, max_d: int = 1 << 22) -> list[float]:
    """The float32 values of a frame. ``pieces``: what the buffer consists of, where that matters (by_tensor)."""
    frame = open_frame(data, max_d)
    spec = flat(frame.d, frame.dtype) if pieces is None else Spec(tuple(pieces), frame.dtype)
    require(spec.d == frame.d, "the pieces have another number of coordinates than the frame")
    return decode(frame.form, frame.message, spec, frame.context)


def decode(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    values = COMPRESSORS[form.name].decode(form, message, spec, context)
    assert len(values) == spec.d
    return values


# 2.1 text forms

TOKEN = re.compile(
    r"""\s+
    | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|-inf\b)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<string>"(?:[^"\\]|\\["'\\])*"|'(?:[^'\\]|\\["'\\])*')
    | (?P<mark>[()\[\]{},=:])""",
    re.VERBOSE | re.ASCII,
)


class Bare(str):
    """A name without arguments: a configuration or a string, as the parameter wants it."""


class Parser:
    """Recursive descent over the tokens of a text form."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                raise reject(f"unexpected character in the text form: {text[at]!r}")
            if match.lastgroup:
                self.tokens.append((match.lastgroup, match.group()))
            at = match.end()
        self.tokens.append(("end", ""))

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[min(ahead, len(self.tokens) - 1)]

    def take(self, mark: str | None = None) -> tuple[str, str]:
        require(mark is None or self.peek() == ("mark", mark), f"expected {mark} in the text form")
        require(self.peek()[0] != "end", "the text form ends early")
        return self.tokens.pop(0)

    def items(self, close: str) -> Iterator[None]:
        """Once for each of the comma-separated items before ``close``."""
        while self.peek() != ("mark", close):
            yield
            if self.peek() != ("mark", close):
                self.take(",")
        self.take(close)

    def value(self, depth: int) -> Any:
        require(depth <= 16, "the text form nests too deep")
        kind, text = self.take()
        if kind == "number":
            return number(text)
        if kind == "string":
            return unquoted(text)
        if kind == "name":
            if text in CONSTANTS:
                return CONSTANTS[text]
            return self.call(text, depth) if self.peek() == ("mark", "(") else Bare(text)
        if text == "[":
            return [self.value(depth + 1) for _ in self.items("]")]
        if text == "{":
            return [[self.key(), self.value(depth + 1)] for _ in self.items("}")]
        raise reject(f"expected a value in the text form, found {text}")

    def key(self) -> str:
        kind, text = self.take()
        require(kind == "string", "keys of a map are strings")
        self.take(":")
        return unquoted(text)

    def call(self, name: str, depth: int) -> Form:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        self.take("(")
        for _ in self.items(")"):
            if self.peek()[0] == "name" and self.peek(1) == ("mark", "="):
                key = self.take()[1]
                self.take("=")
                require(key not in named, f"{key} is given twice")
                named[key] = self.value(depth + 1)
            else:
                require(not named, "positional arguments come first")
                positional.append(self.value(depth + 1))
        return configuration(name, positional, named)


CONSTANTS = {"true": True, "false": False, "none": None, "inf": math.inf}


def number(text: str) -> int | float:
    if re.fullmatch(r"[-+]?\d+", text):
        require(len(text) <= 20 and abs(int(text)) < 1 << 63, "a whole number is too large")
        return int(text)
    value = float(text)
    require(not math.isinf(value) or text == "-inf", "a number is too large")
    return value


def unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def parse(text: str) -> Form:
    parser = Parser(text)
    form = parser.value(0)
    require(parser.peek()[0] == "end", "the text form should end")
    return as_form(form)


# 2.2 configurations: what each kind of parameter accepts


def as_form(value: Any) -> Form:
    if isinstance(value, Bare):
        return configuration(value, [], {})
    require(isinstance(value, Form), "a configuration is missing")
    return value  # type: ignore[no-any-return]


def maybe_form(value: Any) -> Form | None:
    return None if value is None else as_form(value)


def whole(value: Any) -> int:
    require(type(value) is int, f"expected a whole number, got {value!r}")
    return int(value)


def maybe_whole(value: Any) -> int | None:
    return None if value is None else whole(value)


def real(value: Any) -> int | float:
    require(type(value) in (int, float), f"expected a number, got {value!r}")
    return value  # type: ignore[no-any-return]


def maybe_real(value: Any) -> int | float | None:
    return None if value is None else real(value)


def flag(value: Any) -> bool:
    require(type(value) is bool, f"expected true or false, got {value!r}")
    return bool(value)


def choice(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        require(isinstance(value, str) and value in words, f"expected one of {words}, got {value!r}")
        return str(value)

    return check


def chunk(value: Any) -> int | str:
    """The log2 of a chunk length, which matters to encoders alone."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    require(14 <= whole(value) <= 18, "a chunk has 2^14 to 2^18 symbols")
    return whole(value)


def rules(value: Any) -> list[tuple[str, Form]]:
    require(isinstance(value, list), "rules are a map or a list")
    for pair in value:
        require(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str), "a rule is a pattern and a configuration"
        )
        require(pair[0].isascii() and pair[0].isprintable(), "a pattern is printable ASCII")
    return [(str(pattern), as_form(inner)) for pattern, inner in value]


def forms(value: Any) -> list[Form]:
    require(isinstance(value, list) and 1 <= len(value) <= 16, "expected a list of 1 to 16 configurations")
    return [as_form(inner) for inner in value]


MISSING = object()


def configuration(name: str, positional: list[Any], named: dict[str, Any]) -> Form:
    if name in ABBREVIATIONS:
        return abbreviation(name, positional, named)
    require(name in COMPRESSORS, f"no compressor is called {name!r}")
    kinds = COMPRESSORS[name].parameters
    given = bound(name, list(kinds), positional, named)
    values = {}
    for key, (kind, default) in kinds.items():
        value = given.get(key, default)
        require(value is not MISSING, f"{name} needs {key}")
        values[key] = kind(value) if key in given else value
    form = Form(name, values)
    require(COMPRESSORS[name].valid(form), f"invalid parameters of {name}")
    return form


def bound(name: str, order: list[str], positional: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    require(len(positional) <= len(order), f"too many parameters of {name}")
    given = dict(zip(order, positional))
    for key, value in named.items():
        require(key in order and key not in given, f"{name} has no parameter {key}, or has it twice")
        given[key] = value
    return given


ABBREVIATIONS: dict[str, dict[str, Any]] = {
    "strom": {"tau": MISSING},
    "ef_sign": {},
    "mem_sgd": {"fraction": MISSING},
    "sparse_loco": {"chunk": 4096, "k": 64, "bins": 4, "decay": 0.95, "vector": 64},
    "demo": {"k": 32, "block": 64, "decay": 0.999},
    "distro": {"k": 4, "block": 64, "decay": 0.995},
    "streaming_diloco": {"block": 256},
    "fewest_bits": {"alpha": MISSING},
}


def abbreviation(name: str, positional: list[Any], named: dict[str, Any]) -> Form:
    defaults = ABBREVIATIONS[name]
    given = {**defaults, **bound(name, list(defaults), positional, named)}
    require(MISSING not in given.values(), f"{name} needs {', '.join(defaults)}")
    if name == "streaming_diloco":
        return configuration("e3m0", [given["block"]], {})
    if name == "sparse_loco":
        sizes = {key: given[key] for key in ("chunk", "k", "bins", "vector")}
        inner = configuration("chunk_top_k", [], {**sizes, "values": "bins"})
        return configuration("error_feedback", [inner], {"force": True, "decay": given["decay"]})
    if name in ("demo", "distro"):
        kind, block = "sign" if name == "distro" else "float32", whole(given["block"])
        inner = configuration("chunk_top_k", [], {"chunk": block**2, "k": given["k"], "values": kind, "vector": block})
        return configuration("error_feedback", [configuration("dct", [inner, block], {})], {"decay": given["decay"]})
    if name == "fewest_bits":
        alpha = {"alpha": real(given["alpha"]), "rdo": True}
        of = [
            configuration("sparse_dithering", [], {**alpha, "chunk": 18}),
            configuration("trellis", [], alpha),
            configuration("trellis", [], {**alpha, "states": 32, "chunk": 18}),
        ]
        return configuration("aligned", [configuration("shortest", [of], {})], {})
    if name == "ef_sign":
        return configuration("error_feedback", [configuration("sign", [], {})], {})
    if name == "mem_sgd":
        return configuration("error_feedback", [configuration("top_k", [], {"fraction": real(given["fraction"])})], {})
    inner = configuration("threshold", [], {"tau": given["tau"], "values": "sign"})
    return configuration("error_feedback", [inner], {"force": True})


# ---- 3 randomness -----------------------------------------------------------------------------------------------------------


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    k0, k1 = key % 2**32, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = q >> 32 ^ c1 ^ k0, q % 2**32, p >> 32 ^ c3 ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


SHARED = 0xFFFF  # the sender of what all ranks draw alike
DITHER, MASK, ROTATION, CODEBOOK, SIGN = 1, 2, 3, 4, 5  # purposes


@functools.lru_cache(maxsize=16)
def eight_draws(context: Context, purpose: int, block: int) -> list[int]:
    """3.1: the draws of coordinates 8 block .. 8 block + 7."""
    c1 = purpose << 24 | block >> 32
    words = philox(context.seed, (block % 2**32, c1, context.step, context.buffer << 16 | context.sender))
    return [half for word in words for half in (word % 2**16, word >> 16)]


def draw(context: Context, purpose: int, i: int) -> int:
    """The draw of coordinate i."""
    return eight_draws(context, purpose, i >> 3)[i % 8]


# ---- 4 codecs ---------------------------------------------------------------------------------------------------------------


def packed_codes(data: bytes, width: int, count: int, check: bool = True) -> list[int]:
    """4.1: ``count`` codes, which fill the bytes. ``check``: reject padding that is not zero."""
    require(len(data) == ceil_div(count * width, 8), "the codes have another number of bytes")
    stream = int.from_bytes(data, "little")
    require(not check or stream >> count * width == 0, "padding is not zero")
    bits = Bits(data)
    return [bits.integer(width) for _ in range(count)]


def signed(code: int, width: int) -> int:
    return code - (1 << width) if code >> (width - 1) else code


def trits(data: bytes, count: int) -> list[int]:
    """4.2"""
    require(len(data) == ceil_div(count, 5), "the trits have another number of bytes")
    require(all(byte <= 242 for byte in data), "a byte of trits is above 242")
    values = [byte // 3**j % 3 for byte in data for j in range(5)]
    require(not any(values[count:]), "the last byte of trits is not padded with zeros")
    return values[:count]


def gamma(bits: Bits) -> int:
    """4.3"""
    zeros = 0
    while not bits.bit():
        zeros += 1
        require(zeros <= 62, "a gamma code is too long")
    return 1 << zeros | bits.integer(zeros)


def unary_plane(source: Bytes, count: int) -> list[int]:
    """4.4: the zeros before each of ``count`` ones."""
    bits, parts = Bits(source.rest), []
    for _ in range(count):
        zeros = 0
        while not bits.bit():
            zeros += 1
        parts.append(zeros)
    source.take(bits.finish())
    return parts


def field_plane(source: Bytes, widths: list[int]) -> list[int]:
    """4.4: one integer of each width."""
    bits = Bits(source.rest)
    fields = [bits.integer(width) for width in widths]
    source.take(bits.finish())
    return fields


def planar_gamma(source: Bytes, count: int) -> list[int]:
    """4.4"""
    zeros = unary_plane(source, count)
    require(all(n <= 62 for n in zeros), "a gamma code is too long")
    return [1 << n | low for n, low in zip(zeros, field_plane(source, zeros))]


def planar_rice(source: Bytes, count: int, k: int) -> list[int]:
    """4.4"""
    quotients = unary_plane(source, count)
    require(all(q <= 32 for q in quotients), "a quotient is above 32")
    low = field_plane(source, [k] * count)
    escapes = iter(planar_gamma(source, quotients.count(32)))
    quotients = [31 + next(escapes) if q == 32 else q for q in quotients]
    require(all((q << k) + (1 << k) - 1 < 2**63 for q in quotients), "a Rice code is too large")
    return [q << k | r for q, r in zip(quotients, low)]


# 4.5 rANS

WEIGHTS = (16777216, 15384775, 14107901, 12937002, 11863283, 10878679, 9975792, 9147842)


def present_symbols(bits: Bits, alphabet: int) -> list[int]:
    if bits.bit():
        return list(range(alphabet))
    symbols: list[int] = []
    position, first, present = 0, 1, False
    while position < alphabet:
        run = gamma(bits) - first
        require(position + run <= alphabet, "a run leaves the alphabet")
        if present:
            symbols += range(position, position + run)
        position, first, present = position + run, 0, not present
    return symbols


def rans_table(bits: Bits, alphabet: int) -> dict[int, int]:
    """Frequencies of the symbols that are present, in ascending order of symbols; they add up to 4096."""
    symbols = present_symbols(bits, alphabet)
    if len(symbols) < 2:
        return {symbols[0] if symbols else 0: 4096}
    linear, k = bits.bit(), bits.integer(3)
    require(k <= 5, "a table has too large a Rice parameter")
    q = [bits.integer(7)]
    require(q[0] <= 96, "a probability is out of range")
    while len(q) < len(symbols):
        quotient = 0
        while bits.bit():
            quotient += 1
            require(quotient <= 193, "a probability is out of range")
        z = quotient << k | bits.integer(k)
        predicted = min(max(2 * q[-1] - q[-2], 0), 96) if linear and len(q) >= 2 else q[-1]
        q.append(predicted + (z // 2 if z % 2 == 0 else -(z + 1) // 2))
        require(0 <= q[-1] <= 96, "a probability is out of range")
    w = [WEIGHTS[v % 8] >> v // 8 for v in q]
    total = sum(w)
    f = [max(1, (8192 * v + total) // (2 * total)) for v in w]
    while sum(f) > 4096:
        i = min((i for i in range(len(f)) if f[i] > 1), key=lambda i: Fraction(w[i], 2 * f[i] - 1))
        f[i] -= 1
    while sum(f) < 4096:
        i = max(range(len(f)), key=lambda i: (Fraction(w[i], 2 * f[i] + 1), -i))
        f[i] += 1
    return dict(zip(symbols, f))


def cut(n: int, size: int) -> list[int]:
    """Pieces of ``size``, the last from half to one and a half of that; one if n is smaller."""
    if n < size:
        return [n] if n else []
    chunks = (n + size // 2) // size
    return [size] * (chunks - 1) + [n - size * (chunks - 1)]


def rans(data: bytes, n: int, alphabet: int, contexts: list[int] | None = None, C: int = 1) -> tuple[list[int], int]:
    """The symbols of a rANS block at the start of ``data``, and its length. ``contexts``: the table of every symbol."""
    if n == 0 or alphabet == 1:
        return [0] * n, 0
    source = Bytes(data)
    form, width = source.byte(), (alphabet - 1).bit_length()
    require(form == 1 or 14 <= form <= 18, "a rANS block is coded or raw")
    if form == 1:
        symbols = packed_codes(source.take(ceil_div(n * width, 8)), width, n)
        require(max(symbols) < alphabet, "a raw symbol lies outside the alphabet")
        return symbols, source.at
    bits = Bits(source.rest)
    tables = [rans_table(bits, alphabet) for _ in range(C)]
    source.take(bits.finish())
    contexts = contexts or [0] * n
    if all(len(table) == 1 for table in tables):
        return [next(iter(tables[c])) for c in contexts], source.at
    # For each table and slot: symbol, frequency, slot - start.
    slots = [[(s, f, slot) for s, f in table.items() for slot in range(f)] for table in tables]
    lanes = 64 if n >= 1 << 14 else 1 << max(0, n.bit_length() - 10)
    lengths = cut(n, 1 << form)
    word_counts = struct.unpack(f"<{len(lengths)}I", source.take(4 * len(lengths)))
    symbols = []
    for m, count in zip(lengths, word_counts):
        rows = 16 // width if m >= lanes * (16 // width + 1) else 0
        coded = m - lanes * rows
        require(count <= coded, "a chunk has more words than symbols")
        states = list(struct.unpack(f"<{lanes}I", source.take(4 * lanes)))
        require(min(states) >= 65536, "a state is too small")
        words = iter(struct.unpack(f"<{count}H", source.take(2 * count)))
        for i in range(coded):
            x = states[i % lanes]
            s, f, offset = slots[contexts[len(symbols)]][x % 4096]
            symbols.append(s)
            x = f * (x >> 12) + offset
            if x < 65536:
                word = next(words, None)
                if word is None:
                    raise reject("a chunk has too few words")
                x = x << 16 | word
            states[i % lanes] = x
        require(next(words, None) is None, "a chunk has too many words")
        require(all((x - 65536) >> rows * width == 0 for x in states), "a lane does not return to a first state")
        for i in range(lanes * rows):
            symbols.append(states[(coded + i) % lanes] - 65536 >> i // lanes * width & (1 << width) - 1)
    require(max(symbols) < alphabet, "a symbol lies outside the alphabet")
    return symbols, source.at


# 4.6 index sets


def index_set(data: bytes, count: int, d: int) -> tuple[list[int], int]:
    """The set at the start of ``data``, ascending, and its length."""
    complement = 2 * count > d
    k = d - count if complement else count
    require(len(data) > 0, "the index set is missing")
    form = data[0]
    if form < 250:
        require(k <= 256, "too many integers for the short form")
        found, used = short_set(data, k, d)
    else:
        require(k > 0, "an empty set has the short form")
        require(form < 255, "form 255 of an index set is unknown")
        read = {250: golomb_set, 251: rice_set, 252: bitmap_set, 253: gap_set, 254: coded_bitmap_set}[form]
        found, used = read(data[1:], k, d)
        used += 1
    if complement:
        absent = set(found)
        found = [i for i in range(d) if i not in absent]
    return found, used


def from_gaps(gaps: list[int], d: int) -> list[int]:
    found = [i - 1 for i in itertools.accumulate(g + 1 for g in gaps)]
    require(not found or found[-1] < d, "an index lies outside the vector")
    return found


def golomb(data: bytes, k: int, d: int, m: int) -> tuple[list[int], int]:
    source = Bytes(data)
    w = m.bit_length() - 1
    u = (2 << w) - m
    quotients = unary_plane(source, k)
    remainders = field_plane(source, [w] * k)
    last = iter(field_plane(source, [1 for r in remainders if r >= u]))
    remainders = [2 * r + next(last) - u if r >= u else r for r in remainders]
    return from_gaps([q * m + r for q, r in zip(quotients, remainders)], d), source.at


def golomb_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    return golomb(data, k, d, max(1, (d * 45426 // k + 11141) >> 16))


def rice_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    s = Bytes(data).byte()
    require(s <= 39, "the Rice parameter is too large")
    found, used = golomb(data[1:], k, d, 1 << s)
    return found, used + 1


def bitmap_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    size = ceil_div(d, 8)
    found = [i for i, one in enumerate(packed_codes(Bytes(data).take(size), 1, d)) if one]
    require(len(found) == k, "the bitmap has another number of ones")
    return found, size


def coded_bitmap_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    symbols, used = rans(data, ceil_div(d, 8), 256)
    return bitmap_set(bytes(symbols), k, d)[0], used


def gap_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    source = Bytes(data)
    alphabet = source.byte()
    require(1 <= alphabet <= 112, "the alphabet of gap classes is out of range")
    classes, used = rans(source.rest, k, alphabet)
    source.take(used)
    bits, gaps = Bits(source.rest), []
    for c in classes:
        width = max(0, (c + 1) // 2 - 1)
        head = 1 if c == 0 else 2 if c % 2 else 3
        gaps.append((head << width | bits.integer(width)) - 1)
    return from_gaps(gaps, d), source.at + bits.finish()


class ShortCode:
    """The arithmetic code of short sets."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.range = data, 6, 250 << 40
        self.code = int.from_bytes(data[:6].ljust(6, b"\0"), "big")
        require(self.code < self.range, "not an arithmetic code")

    def normalise(self) -> None:
        while self.range < 1 << 40:
            byte = self.data[self.at] if self.at < len(self.data) else 0
            self.range, self.code, self.at = self.range * 256, self.code * 256 + byte, self.at + 1

    def bit(self, p: int) -> int:
        bound = (self.range >> 16) * p
        one = self.code < bound
        if one:
            self.range = bound
        else:
            self.code, self.range = self.code - bound, self.range - bound
        self.normalise()
        return int(one)

    def choice(self, c: int) -> int:
        self.range //= c
        v = self.code // self.range
        require(v < c, "no encoder writes this choice")
        self.code -= v * self.range
        self.normalise()
        return v

    def raw(self, n: int) -> int:
        return sum(self.choice(1 << min(16, n - j)) << j for j in range(0, n, 16))

    def gap(self, N: int, K: int) -> int:
        if K == 1:
            low = max(0, (N - 1).bit_length() - 16)
            top = self.choice((N - 1 >> low) + 1)
            return top << low | self.raw(low)
        digits, t, fair = (N - K).bit_length(), ((N - K) << 60) // (N + 1), 0
        while fair < digits and t > 2**60 - 2**55:
            t, fair = t * t >> 60, fair + 1
        g = 0
        for i in range(fair, digits):
            z = t >> 28
            g |= self.bit(min(65535, max(1, (z << 16) // (2**32 + z)))) << i
            t = t * t >> 60
        return g | self.raw(fair)

    def finish(self) -> int:
        used = self.at - 6 + (1 if self.range >= 1 << 41 else 2)
        require(used <= len(self.data), "the index set ends early")
        return used


def short_set(data: bytes, k: int, d: int) -> tuple[list[int], int]:
    coder = ShortCode(data)
    found: list[int] = []
    following = 0
    for j in range(k):
        N, K = d - following, k - j
        g = coder.gap(N, K)
        require(g <= N - K, "an index lies outside the vector")
        found.append(following + g)
        following += g + 1
    return found, coder.finish()


# 4.7 level streams


class Arithmetic:
    """The binary arithmetic decoder of level streams."""

    def __init__(self, bits: Bits) -> None:
        self.bits, self.low, self.high, self.value = bits, 0, 2**32 - 1, 0
        for _ in range(32):
            self.value = 2 * self.value + bits.bit_or_zero()

    def symbol(self, a: int, b: int) -> int:
        """A symbol that is 0 with probability a / b."""
        if a in (0, b):
            return int(a == 0)
        mid = self.low + (self.high - self.low + 1) * a // b - 1
        one = self.value > mid
        if one:
            self.low = mid + 1
        else:
            self.high = mid
        while True:
            if self.high < 2**31:
                offset = 0
            elif self.low >= 2**31:
                offset = 2**31
            elif self.low >= 2**30 and self.high < 3 * 2**30:
                offset = 2**30
            else:
                return int(one)
            self.low, self.high = 2 * (self.low - offset), 2 * (self.high - offset) + 1
            self.value = 2 * (self.value - offset) + self.bits.bit_or_zero()


class Adaptive:
    """A context of the adaptive form."""

    def __init__(self, prior: int) -> None:
        self.n0 = self.n = 0
        self.prior = prior

    def symbol(self, coder: Arithmetic) -> int:
        one = coder.symbol(self.n0 + 1, self.n + self.prior)
        self.n, self.n0 = self.n + 1, self.n0 + 1 - one
        if self.n == 1 << 20:
            self.n, self.n0 = (self.n + 1) // 2, (self.n0 + 1) // 2
        return one


def level_stream(data: bytes, count: int) -> list[int]:
    bits = Bits(data)
    return adaptive_levels(bits, count) if bits.bit_or_zero() else enumerated_levels(bits, count)


def enumerated_levels(bits: Bits, count: int) -> list[int]:
    zeros = sum(bits.bit_or_zero() << j for j in range(count.bit_length()))
    require(zeros <= count, "more zeros than levels")
    sizes = []
    for _ in range(count - zeros):
        size = 1
        while bits.bit_or_zero():
            size += 1
        require(size < 2**31, "a level is too large")
        sizes.append(size)
    filled = iter([-size if bits.bit_or_zero() else size for size in sizes])
    coder, levels = Arithmetic(bits), []
    for i in range(count):
        if coder.symbol(zeros, count - i):
            levels.append(next(filled))
        else:
            levels.append(0)
            zeros -= 1
    return levels


def adaptive_levels(bits: Bits, count: int) -> list[int]:
    coder, zero, more, levels = Arithmetic(bits), Adaptive(3), [Adaptive(2) for _ in range(14)], []
    for _ in range(count):
        if not zero.symbol(coder):
            levels.append(0)
            continue
        negative = coder.symbol(1, 2)
        size = 1
        while size <= 14 and more[size - 1].symbol(coder):
            size += 1
        if size > 14:
            n = 0
            while coder.symbol(1, 2):
                n += 1
                require(n <= 30, "a level is too large")
            rest = 1
            for _ in range(n):
                rest = 2 * rest + coder.symbol(1, 2)
            size = 14 + rest
            require(size < 2**31, "a level is too large")
        levels.append(-size if negative else size)
    return levels


# 4.8 the normal tail


@functools.cache
def tails() -> list[int]:
    one = 2**160
    E = (one // 8192) ** 2 >> 161
    term = f = one
    for n in range(1, 11):
        term = -(term * E >> 160) // n
        f += term
    ratio, shrink, value, sums = f, f * f >> 160, one, [0]
    for _ in range(32768):
        middle = value * ratio >> 160
        ratio = ratio * shrink >> 160
        end = middle * ratio >> 160
        ratio = ratio * shrink >> 160
        sums.append(sums[-1] + value + 4 * middle + end)
        value = end
    return [((sums[-1] - s << 48) + sums[-1]) // (2 * sums[-1]) for s in sums]


def normal_tail(z: float) -> int:
    """T of 5.18."""
    j = round(4096 * min(max(z, -8.0), 8.0))
    return tails()[j] if j >= 0 else 2**48 - tails()[-j]


# 4.10 tiles and chunk sets


class Tiles(NamedTuple):
    """A part of the buffer: rows x columns from `start` on, cut into tiles of height x width; `piece` counts those with coordinates."""

    start: int
    rows: int
    columns: int
    height: int
    width: int
    piece: int

    @property
    def chunks(self) -> list[list[int]]:
        """The coordinates of every chunk, by place."""
        return [
            [self.start + (top + i) * self.columns + left + j for i in range(self.height) for j in range(self.width)]
            for top in range(0, self.rows, self.height)
            for left in range(0, self.columns, self.width)
        ]


def largest_divisor(n: int, most: int) -> int:
    return max(k for k in range(1, min(n, most) + 1) if n % k == 0)


def tiles(spec: Spec, side: int, run: int, vector: int | None) -> list[Tiles]:
    found: list[Tiles] = []
    start = number = 0
    for piece in spec.pieces:
        n = piece.stop - piece.start
        whole = n == math.prod(piece.shape)
        if n and whole and len(piece.shape) > 1:
            shape = list(piece.shape)
            columns = shape.pop()
            while len(shape) > 1 and columns < side:
                columns *= shape.pop()
            rows = math.prod(shape)
            found.append(Tiles(start, rows, columns, largest_divisor(rows, side), largest_divisor(columns, side), number))
        elif n and whole and vector is not None:
            width = largest_divisor(n, vector)
            found.append(Tiles(start, n // width, width, 1, width, number))
        elif n:
            full = n - n % run
            if full:
                found.append(Tiles(start, n // run, run, 1, run, number))
            if n > full:
                found.append(Tiles(start + full, 1, n - full, 1, n - full, number))
        start += n
        number += n > 0
    return found


@functools.cache
def halving(s: int, c: int) -> tuple[int, list[int]]:
    """The least number in the left half, and where the slots of each number start; the last entry is 65536."""
    left, right = (s + 1) // 2, s // 2
    u, v = max(0, c - right), min(c, left)
    m = min(max((c + 1) * (left + 1) // (s + 2), u), v)
    w = {m: 1.0}
    for a in range(m + 1, v + 1):
        w[a] = w[a - 1] * ((left - a + 1) * (c - a + 1)) / (a * (right - c + a))
    for a in range(m - 1, u - 1, -1):
        w[a] = w[a + 1] * ((a + 1) * (right - c + a + 1)) / ((left - a) * (c - a))
    total = 0.0
    for a in range(u, v + 1):
        total += w[a]
    q = (65536 - (v - u + 1)) / total
    f = [1 + math.floor(w[a] * q) for a in range(u, v + 1)]
    f[m - u] += 65536 - sum(f)
    return u, [sum(f[:j]) for j in range(len(f) + 1)]


def chunk_stream(words: list[int], chunks: list[tuple[int, int]]) -> list[list[int]]:
    """The sets of the chunks (n, k) of one stream."""
    require(len(words) > 0, "a stream has no words")
    waiting = list(reversed(words))
    X = waiting.pop()

    def refill(X: int, B: int) -> int:
        return X << 32 | waiting.pop() if X < B and waiting else X

    sets: list[list[int]] = []
    last: list[list[tuple[list[int], int, int, int]]] = [
        [],
        [],
    ]  # for nodes with one and with two: set, where in it, base, size
    for n, k in chunks:
        found = [-1] * k
        sets.append(found)
        halves = [(0, n, k, 0)]
        open_nodes: list[tuple[int, int, int, int]] = []
        while True:
            to_split = []
            for base, s, c, at in halves:
                if c == 1 or (c == 2 and s <= 4096):
                    last[c - 1].append((found, at, base, s))
                elif c == s:
                    found[at : at + c] = range(base, base + s)
                elif c > 0:
                    to_split.append((base, s, c, at))
            open_nodes += reversed(to_split)
            if not open_nodes:
                break
            base, s, c, at = open_nodes.pop()
            least, starts = halving(s, c)
            X = refill(X, 2**31)
            slot = X % 65536
            j = max(j for j in range(len(starts) - 1) if starts[j] <= slot)
            X = (starts[j + 1] - starts[j]) * (X >> 16) + slot - starts[j]
            a, left = least + j, (s + 1) // 2
            halves = [(base, left, a, at), (base + left, s // 2, c - a, at + a)]
    for found, at, base, s in last[0]:
        X, t = divmod(refill(X, s * -(-(2**31) // s)), s)
        found[at] = base + t
    for found, at, base, s in last[1]:
        M = s * (s - 1) // 2
        X, rank = divmod(refill(X, M * -(-(2**31) // M)), M)
        high = max(j for j in range(1, s) if j * (j - 1) // 2 <= rank)
        found[at : at + 2] = [base + rank - high * (high - 1) // 2, base + high]
    require(X == 1 and not waiting, "a stream does not end where it should")
    return sets


def cut_into_streams(chunks: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    streams: list[list[tuple[int, int]]] = []
    held = 2048
    for n, k in chunks:
        if k < n:
            if held >= 2048:
                streams.append([])
                held = 0
            streams[-1].append((n, k))
            held += k
    return streams


def chunk_sets(data: bytes, chunks: list[tuple[int, int]]) -> list[list[int]]:
    """The places of every chunk (n, k); takes all of the data."""
    source, streams = Bytes(data), cut_into_streams(chunks)
    lengths = [int.from_bytes(source.take(2), "little") for _ in streams[1:]]
    if streams:
        rest = source.left - 4 * sum(lengths)
        require(rest >= 0 and rest % 4 == 0, "the streams do not fill the message")
        lengths.append(rest // 4)
    sets: list[list[int]] = []
    for stream, length in zip(streams, lengths):
        data = source.take(4 * length)
        sets += chunk_stream([int.from_bytes(data[j : j + 4], "little") for j in range(0, len(data), 4)], stream)
    source.finish()
    coded = iter(sets)
    return [list(range(n)) if k == n else next(coded) for n, k in chunks]


# 4.11 scale classes


class Region(NamedTuple):
    """Coordinates of one tensor that follow one another."""

    size: int
    columns: int
    group: int
    phase: int

    def octaves(self, mode: int) -> tuple[int, int]:
        """How many rows or blocks, and how many columns, have one."""
        rows = ceil_div(self.size, 64) if mode == 3 else ceil_div(self.phase + self.size, self.columns) if mode else 0
        return rows, self.columns // self.group if mode == 2 else 0


def regions(spec: Spec, start: int, stop: int) -> list[Region]:
    """4.11, of coordinates start .. stop of a buffer"""
    found, at = [], 0
    for piece in spec.pieces:
        length = piece.stop - piece.start
        begin, end = max(start, at), min(stop, at + length)
        if begin < end:
            columns = math.prod(piece.shape[1:]) if len(piece.shape) > 1 else math.prod(piece.shape)
            found.append(Region(end - begin, columns, math.prod(piece.shape[2:]), (piece.start + begin - at) % columns))
        at += length
    return found


def scale_classes(data: bytes, where: list[Region]) -> tuple[list[int], int, int]:
    """4.11: the context of every coordinate, the number of tables, and the bytes read"""
    source = Bytes(data)
    (mask,) = struct.unpack("<H", source.take(2))
    fields = [(byte >> 5, byte % 32) for byte in source.take(len(where))]
    for (mode, base), region in zip(fields, where):
        require(mode <= 3 and (base > 0 or mode == 0), "there is no such mode or base")
        require(mode != 2 or region.size >= region.columns, "columns of less than a row")
    numbers = [region.octaves(mode) for (mode, _), region in zip(fields, where)]
    kinds = [kind for rows, columns in numbers for kind in [0] * rows + [1] * columns]
    octaves, used = rans(source.rest, len(kinds), 16, kinds, 2)
    classes, at = [], 0
    for (mode, base), region, (rows, columns) in zip(fields, where, numbers):
        for i in range(region.size):
            place = region.phase + i
            r = octaves[at + (i // 64 if mode == 3 else place // region.columns)] if rows else 8
            s = octaves[at + rows + place % region.columns // region.group] if columns else 8
            classes.append(min(max(base + r + s - 24, 1), 15) if base and r and s else 0)
        at += rows + columns
    require(all(mask >> c & 1 for c in classes), "a class has no table")
    return [(mask & (1 << c) - 1).bit_count() for c in classes], mask.bit_count(), 2 + len(where) + used


# ---- 5 compressors ----------------------------------------------------------------------------------------------------------

Decoder = Callable[[Form, bytes, Spec, Context], list[float]]


def decode_identity(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.1"""
    exactly(message, spec.d * (4 if spec.dtype == "float32" else 2))
    return floats(message, spec.dtype)


def decode_bf16(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.2"""
    exactly(message, 2 * spec.d)
    return floats(message, "bfloat16")


def decode_fp16(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.3"""
    source = exactly(message, longest(form, spec))
    if spec.d == 0:
        return []
    (c,) = floats(source.take(4))
    return [math.copysign(limited(f32(abs(h) * abs(c))), h) for h in floats(source.rest, "float16")]


def e4m3(m: int) -> float:
    """A number of fp8 without its sign."""
    if m == 127:
        return NAN
    return m * 2.0**-9 if m < 8 else (1 + m % 8 / 8) * 2.0 ** ((m >> 3) - 7)


def decode_fp8(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.4"""
    source = exactly(message, longest(form, spec))
    scales = [NAN if s == 255 else 2.0 ** (s - 127) for s in source.take(ceil_div(spec.d, form["block"]))]
    values = []
    for i, q in enumerate(source.rest):
        size = limited(f32(e4m3(q % 128) * scales[i // form["block"]]))
        values.append(-size if q >= 128 else size)
    return values


def from_levels(levels: list[int], steps: list[float], bucket: int) -> list[float]:
    if not all(math.isfinite(step) for step in steps):
        return [NAN] * len(levels)
    return [f32(level * steps[i // bucket]) for i, level in enumerate(levels)]


def packed_levels(source: Bytes, width: int, d: int) -> list[int]:
    return [signed(code, width) for code in packed_codes(source.rest, width, d, check=False)]


def decode_int(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.5, 5.6"""
    source = exactly(message, longest(form, spec))
    kind, size, width = ("float32", 4, 8) if form.name == "int8" else ("bfloat16", 2, 4)
    steps = floats(source.take(size * ceil_div(spec.d, form["block"])), kind)
    return from_levels(packed_levels(source, width, spec.d), steps, form["block"])


def decode_sign(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.7"""
    source = exactly(message, longest(form, spec))
    block = form["block"] or max(spec.d, 1)
    scales = floats(source.take(4 * ceil_div(spec.d, block)))
    negative = packed_codes(source.rest, 1, spec.d, check=False)
    return [-scales[i // block] if bit else scales[i // block] for i, bit in enumerate(negative)]


def bucket_of(form: Form, d: int) -> int:
    """Coordinates that share a scale."""
    return int(form["bucket"] or max(d, 1))


def decode_ternary(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.8"""
    source = exactly(message, longest(form, spec))
    bucket = bucket_of(form, spec.d)
    scales = floats(source.take(4 * ceil_div(spec.d, bucket)))
    return [f32((t - 1) * scales[i // bucket]) for i, t in enumerate(trits(source.rest, spec.d))]


def power_of_two(e: int) -> float:
    return 0.0 if e == 0 else NAN if e == 255 else 2.0 ** (e - 127)


def decode_natural(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.9"""
    d, source = spec.d, Bytes(message)
    mode = PACKED if form["coder"] == "packed" else source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    require(mode in (0, PACKED, CLASSED), f"natural has no mode {mode}")
    if mode == PACKED:
        negative = packed_codes(source.take(ceil_div(d, 8)), 1, d, check=False)
        exponents = list(source.take(d))
    elif mode == CLASSED:
        largest = source.byte()
        require(1 <= largest <= 254, "the largest exponent is out of range")
        negative = packed_codes(source.take(ceil_div(d, 8)), 1, d, check=False)
        below = integers(source.take(source.left), spec, context, 0, largest)
        exponents = [largest + 1 - v if v else 0 for v in below]
    else:
        least, largest = source.byte(), source.byte()
        require(1 <= least <= largest <= 254, "the range of exponents is empty")
        negative = packed_codes(source.take(ceil_div(d, 8)), 1, d, check=False)
        symbols, used = rans(source.rest, d, largest - least + 2)
        source.take(used)
        exponents = [least + s - 1 if s else 0 for s in symbols]
    source.finish()
    return [-power_of_two(e) if minus else power_of_two(e) for e, minus in zip(exponents, negative)]


def decode_natural_dithering(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.10"""
    d, s, source = spec.d, form["levels"], Bytes(message)
    mode = PACKED if form["coder"] == "packed" else source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    require(mode in (0, PACKED, CLASSED), f"natural_dithering has no mode {mode}")
    bucket = bucket_of(form, d)
    scales = floats(source.take(4 * ceil_div(d, bucket)))
    if mode == PACKED:
        codes = packed_codes(source.rest, (2 * s + 1).bit_length(), d, check=False)
    elif mode == CLASSED:
        codes = [2 * abs(v) + (v < 0) for v in integers(source.take(source.left), spec, context, -s, s)]
    else:
        codes, used = rans(source.rest, d, 2 * s + 2)
        source.take(used)
        source.finish()
    values = []
    for i, code in enumerate(codes):
        size = 2.0 ** ((code >> 1) - s) if code >> 1 else 0.0
        values.append(f32((-size if code % 2 else size) * scales[i // bucket]))
    return values


def levels_of_qsgd(form: Form) -> int:
    return int(2 ** (form["bits"] - 1) - 1 if form["levels"] is None else form["levels"])


def width_of_qsgd(form: Form) -> int:
    return form["bits"] if form["coder"] == "packed" else max(2, 1 + levels_of_qsgd(form).bit_length())


def decode_qsgd(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.11"""
    d, s, source = spec.d, levels_of_qsgd(form), Bytes(message)
    mode = PACKED if form["coder"] == "packed" else source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    require(mode in (0, PACKED) or (mode == CLASSED and form["coder"] == "rans"), f"qsgd has no mode {mode}")
    steps = floats(source.take(4 * ceil_div(d, form["bucket"])))
    if mode == PACKED:
        levels = packed_levels(source, width_of_qsgd(form), d)
    elif mode == CLASSED:
        levels = integers(source.take(source.left), spec, context, -s, s)
    elif form["coder"] == "rans":
        symbols, used = rans(source.rest, d, 2 * s + 1)
        source.take(used)
        source.finish()
        levels = [symbol - s for symbol in symbols]
    else:
        levels = elias_levels(source, d, s)
    return from_levels(levels, steps, form["bucket"])


def integers(message: bytes, spec: Spec, context: Context, least: int, most: int) -> list[int]:
    """The values of a message of dithered levels that are all integers within bounds."""
    values = decode_dithered(Form("sparse_dithering", {}), message, spec, context)
    require(all(v == v and abs(v) <= 255 and v == int(v) and least <= v <= most for v in values), "a level is out of range")
    return [int(v) for v in values]


def elias_levels(source: Bytes, d: int, s: int) -> list[int]:
    m = source.varint()
    require(m <= d, "more non-zero levels than coordinates")
    bits = Bits(source.rest)
    where, sizes, at = [], [], -1
    for _ in range(m):
        at += gamma(bits)
        where.append(at)
        sizes.append(gamma(bits))
        require(at < d and sizes[-1] <= s, "a coordinate or level is out of range")
    source.take(bits.finish())
    levels = [0] * d
    for i, size, minus in zip(where, sizes, packed_codes(source.rest, 1, m)):
        levels[i] = -size if minus else size
    return levels


def kept(form: Form, d: int) -> int:
    """The number k' of 5.12; repr is the shortest decimal that reads back."""
    k = form["k"] if form["k"] is not None else math.ceil(Fraction(repr(form["fraction"])) * d)
    return min(d, max(1, k))


def most_of_top_k(form: Form, d: int) -> int:
    k = kept(form, d)
    return k if form["exact"] else min(d, k + ceil_div(k, 4))


def scattered(d: int, where: list[int], values: list[float]) -> list[float]:
    vector = [0.0] * d
    for i, value in zip(where, values):
        vector[i] = value
    return vector


def value_kind(form: Form) -> tuple[str, int]:
    return ("bfloat16", 2) if form["values"] == "bf16" else ("float32", 4)


def decode_sparse(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.12, 5.14"""
    d, source = spec.d, Bytes(message)
    signs = form.name == "threshold" and form["values"] == "sign"
    mode = source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    if mode == RAW and not signs:
        return floats(exactly(source.rest, 4 * d).data)
    require(mode == 0, f"{form.name} has no mode {mode}")
    count = source.varint()
    require(1 <= count <= (d if form.name == "threshold" else most_of_top_k(form, d)), "the count is out of range")
    where, used = index_set(source.rest, count, d)
    source.take(used)
    if signs:
        tau = f32(form["tau"])
        values = [-tau if minus else tau for minus in packed_codes(source.rest, 1, count)]
    else:
        kind, size = value_kind(form)
        values = floats(exactly(source.rest, size * count).data, kind)
    return scattered(d, where, values)


def mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D % 2**32
    h ^= h >> 15
    h = h * 0x846CA68B % 2**32
    return h ^ h >> 16


def permutation(d: int, context: Context) -> Callable[[int], int]:
    words: list[int] = []
    for j in range(3):
        words += philox(context.seed, (j, MASK << 24, context.step, context.buffer << 16 | SHARED))
    rotation = (words[9] << 32 | words[8]) * d >> 64
    right_bits = ceil_div((d - 1).bit_length(), 2)
    left_mask, right_mask = (1 << (d - 1).bit_length() // 2) - 1, (1 << right_bits) - 1

    def image(j: int) -> int:
        v = j
        while True:
            left, right = v >> right_bits, v & right_mask
            for r in (0, 2, 4):
                left ^= mix((right + words[r]) % 2**32) & left_mask
                right ^= mix((left + words[r + 1]) % 2**32) & right_mask
            v = left << right_bits | right
            if v < d:
                return (v + rotation) % d

    return image


def decode_random_k(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.13"""
    d, k = spec.d, kept(form, spec.d)
    kind, size = value_kind(form)
    values = floats(exactly(message, size * k).data, kind)
    if d == 0:
        return []
    if not all(math.isfinite(v) for v in values):
        return [NAN] * d
    if form["unbiased"]:
        factor = f32(d / k)
        values = [limited(f32(v * factor)) for v in values]
    image = permutation(d, context)
    return scattered(d, [image(j) for j in range(k)], values)


def decode_dithered(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.16, 5.17"""
    d, source = spec.d, Bytes(message)
    (word,) = struct.unpack("<I", source.take(4))
    if word in (0, 0x7FC00000):
        source.finish()
        return fill(NON_FINITE if word else ZERO, d)
    if word != 0x80000000:
        scale = float_of(word)
        require(0 < scale < math.inf, "the scale is not a positive number")
        return scaled(level_stream(source.rest, d), scale)
    lengths = cut(d, 1 << 18)
    sizes = [source.left] * len(lengths)
    if len(lengths) > 1:
        sizes = list(struct.unpack(f"<{len(lengths)}I", source.take(4 * len(lengths))))
    values: list[float] = []
    for n, size in zip(lengths, sizes):
        values += segment(source.take(size), n, regions(spec, len(values), len(values) + n))
    source.finish()
    return values


def scaled(levels: list[int], scale: float) -> list[float]:
    return [limited(f32(f32(k) * scale)) for k in levels]


def segment(data: bytes, n: int, where: list[Region]) -> list[float]:
    source = Bytes(data)
    kind = source.byte()
    if kind == 0:
        source.finish()
        return [0.0] * n
    if kind == 1:
        return floats(exactly(source.rest, 4 * n).data)
    require(kind in (2, 3), f"there is no segment of kind {kind}")
    window, tail = source.byte(), source.varint(most_bytes=5)
    scales = floats(source.take(4 * ceil_div(n, 65536)))
    require(all(map(math.isfinite, scales)) and 1 <= window <= 127 and tail <= source.left, "a malformed segment")
    body = source.take(source.left - tail)
    contexts, tables, start = scale_classes(body, where) if kind == 3 else (None, 1, 0)
    symbols, used = rans(body[start:], n, 2 * window + 1, contexts, tables)
    require(start + used == len(body), "bytes follow the symbols")
    levels = [symbol - window for symbol in symbols]
    with_escapes(levels, window, source.rest, 2**31)
    return [limited(f32(f32(k) * scales[i // 65536])) for i, k in enumerate(levels)]


def dither_size(u: int) -> int:
    return u - 32768 if u >= 32768 else 32767 - u


def undithered(a: int, u: int, step: float) -> float:
    """5.18: the value of a folded level."""
    q = a if u >= 32768 else -a
    return limited(f32(f32((q << 17) - 2 * u + 65535) * 2.0**-17 * step))


def decode_subtractive(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.18"""
    d, source = spec.d, Bytes(message)
    require(len(message) <= longest(form, spec), "the message is longer than any")
    (word,) = struct.unpack("<I", source.take(4))
    if word in (0, 0x7FC00000):
        source.finish()
        return fill(NON_FINITE if word else ZERO, d)
    if word == 0xFF800000:
        return floats(exactly(source.rest, 4 * d).data)
    draws = [draw(context, DITHER, i) for i in range(d)]
    if word == 0x80000000:
        return subtractive_segments(form, source, draws, spec)
    step = float_of(word)
    require(2.0**-126 <= step <= F and 1 <= d <= 1 << 10 and source.left > 0, "not a short message")
    levels = level_stream(source.rest, d) if source.rest[0] % 2 else modelled_levels(source.rest, draws, form["omega"])
    return [undithered(a, u, step) for a, u in zip(levels, draws)]


def subtractive_lengths(form: Form, d: int) -> list[int]:
    return cut(d, 1 << 18) if form["scale"] == "chunk" else [d] if d else []


def subtractive_segments(form: Form, source: Bytes, draws: list[int], spec: Spec) -> list[float]:
    lengths = subtractive_lengths(form, len(draws))
    steps = floats(source.take(4 * len(lengths)))
    require(all(step == 0 or 2.0**-126 <= step <= F for step in steps), "a step is not a normal positive number")
    of_coordinate = [step for step, n in zip(steps, lengths) for _ in range(n)]
    where, at = [], 0
    for n in cut(len(draws), 1 << 18):
        if of_coordinate[at]:
            where += regions(spec, at, at + n)
        at += n
    levels = iter(windowed_levels(source, [u for u, step in zip(draws, of_coordinate) if step], where))
    return [undithered(next(levels), u, step) if step else 0.0 for u, step in zip(draws, of_coordinate)]


def dither_octave(u: int, kept: int) -> int:
    """The ones that lead the 15 bits of the size, fewer than kept."""
    return min(15 - (32767 - dither_size(u)).bit_length(), kept - 1)


def windowed_levels(source: Bytes, draws: list[int], where: list[Region]) -> list[int]:
    n, first = len(draws), source.byte()
    window, classed = first % 128, first >= 128
    require(window > 0 or not classed, "classes without a window")
    if window == 0:
        stored = struct.unpack(f"<{n}i", exactly(source.rest, 4 * n).data)
        return [min(max(a, -(2**30)), 2**30) for a in stored]
    b, tail = source.byte(), source.varint()
    require(tail <= source.left, "the escapes are longer than the message")
    body = source.take(source.left - tail)
    if classed:
        require(1 <= b <= 8 and n > 0, "so many octaves of the dither there are not")
        classes, tables, start = scale_classes(body, where)
        contexts, tables = [b * c + dither_octave(u, b) for c, u in zip(classes, draws)], b * tables
    else:
        require(b <= 4, "so many bits of the dither are not looked at")
        contexts, tables, start = [dither_size(u) >> (15 - b) for u in draws], 1 << b, 0
    symbols, used = rans(body[start:], n, 2 * window + 1, contexts, tables)
    require(start + used == len(body), "bytes follow the symbols")
    levels = [symbol - window for symbol in symbols]
    with_escapes(levels, window, source.rest, 2**30)
    return levels


def with_escapes(levels: list[int], window: int, escapes: bytes, most: int) -> None:
    """Add the escapes, if there are any, to the levels at both ends of the window."""
    if not escapes:
        return
    source, ends = Bytes(escapes), [i for i, level in enumerate(levels) if abs(level) == window]
    for i, v in zip(ends, planar_gamma(source, len(ends))):
        require(v <= most, "a level is too large")
        levels[i] += v - 1 if levels[i] > 0 else 1 - v
    source.finish()


def chance(x: int, y: int) -> int:
    return min(max((x << 16) // y, 16), 65520) if y else 32768


def modelled_levels(data: bytes, draws: list[int], omega: float) -> list[int]:
    sigma = 1 / math.sqrt(12 * omega)
    r = math.frexp(sigma)[1] - 2 if sigma >= 4 else 0
    reach = math.floor(4 * sigma / 2**r) + 2
    bits = Bits(data)
    bits.bit()
    coder = Arithmetic(bits)

    def yes(p: int) -> int:
        return coder.symbol(65536 - p, 65536)

    @functools.cache
    def above(c: int, k: int) -> int:
        """A_c(k)"""
        return normal_tail(((k << r) - 0.5 - (2 * (512 * c + 256) + 1) / 2**17) / sigma)

    def number() -> int:
        width = 0
        while yes(32768):
            width += 1
            require(width <= 30, "a level is too large")
        g = 1
        for _ in range(width):
            g = 2 * g + yes(32768)
        return g

    levels = []
    for u in draws:
        c = dither_size(u) >> 9
        if yes(chance(above(c, 1), 2**48)):
            h = 1
            while h <= reach and yes(chance(above(c, h + 1), above(c, h))):
                h += 1
            if h > reach:
                h = reach + number()
        else:
            k = 0
            while k < reach and yes(chance(2**48 - above(c, -k), 2**48 - above(c, 1 - k))):
                k += 1
            h = -k if k < reach else 1 - reach - number()
        levels.append((h << r) + sum(yes(32768) << j for j in range(r)))
        require(abs(levels[-1]) <= 2**30 and bits.at <= 8 * len(data) + 64, "a level is too large, or the levels end early")
    return levels


class Trellis(NamedTuple):
    """5.20, 5.21: what a segment's symbols are decoded with. For each coordinate and z0: the context and what z1 is beside the symbol."""

    g0: int
    g1: int
    facts: Callable[[int, int], tuple[int, int]]
    still: list[bool] | None

    def walk(self, symbols: Callable[[int, int], int], n: int, lanes: int, run: int) -> tuple[list[int], list[int]]:
        """All symbols and their z0; ``symbols(i, context)`` gives one of them."""
        found, odd = [], []
        states = [0] * lanes
        for i in range(n):
            if i % (1 << run) == 0:
                states = [0] * lanes
            s = states[i % lanes]
            still = self.still is not None and self.still[i]
            z0 = 0 if still else s % 2
            context, flip = self.facts(i, z0)
            symbol = symbols(i, context)
            found.append(symbol)
            odd.append(z0)
            if still:
                continue
            states[i % lanes] = s >> 1 ^ (self.g1 if (symbol ^ flip) % 2 else 0) ^ (self.g0 if z0 else 0)
        return found, odd


GENERATORS = {4: (2, 1), 8: (5, 2), 16: (9, 2), 32: (18, 4)}


def trellis_block(data: bytes, n: int, alphabet: int, C: int, run: int, trellis: Trellis) -> tuple[list[int], list[int]]:
    """The symbols of a whole rANS block whose contexts depend on states, and z0 of each."""
    lanes = 64 if n >= 1 << 14 else 1 << max(0, n.bit_length() - 10)
    source, width = Bytes(data), (alphabet - 1).bit_length()
    form = source.byte()
    if form == 1:
        plain, used = rans(data, n, alphabet)
        require(used == len(data), "bytes follow the symbols")
        return trellis.walk(lambda i, context: plain[i], n, lanes, run)
    require(14 <= form <= 18 and form >= run, "a block is coded or raw, and runs are no longer than chunks")
    bits = Bits(source.rest)
    tables = [rans_table(bits, alphabet) for _ in range(C)]
    source.take(bits.finish())
    if all(len(table) == 1 for table in tables):
        source.finish()
        return trellis.walk(lambda i, context: next(iter(tables[context])), n, lanes, run)
    slots = [[(s, f, slot) for s, f in table.items() for slot in range(f)] for table in tables]
    lengths = cut(n, 1 << form)
    counts = struct.unpack(f"<{len(lengths)}I", source.take(4 * len(lengths)))
    chunks: list[tuple[int, int, list[int], Iterator[int]]] = []
    for m, count in zip(lengths, counts):
        rows = 16 // width if m >= lanes * (16 // width + 1) else 0
        require(count <= m - lanes * rows, "a chunk has more words than symbols")
        states = list(struct.unpack(f"<{lanes}I", source.take(4 * lanes)))
        require(min(states) >= 65536, "a state is too small")
        chunks.append((m - lanes * rows, rows, states, iter(struct.unpack(f"<{count}H", source.take(2 * count)))))
    source.finish()

    def symbol(i: int, context: int) -> int:
        c = min(i >> form, len(chunks) - 1)
        coded, rows, states, words = chunks[c]
        at = i - (c << form)
        x = states[i % lanes]
        if at >= coded:
            if at == coded:
                require(next(words, None) is None, "a chunk has too many words")
                require(all((x - 65536) >> rows * width == 0 for x in states), "a lane does not return to a first state")
            return x - 65536 >> (at - coded) // lanes * width & (1 << width) - 1
        s, f, offset = slots[context][x % 4096]
        x = f * (x >> 12) + offset
        if x < 65536:
            word = next(words, None)
            if word is None:
                raise reject("a chunk has too few words")
            x = x << 16 | word
        states[i % lanes] = x
        return s

    found, odd = trellis.walk(symbol, n, lanes, run)
    for _, rows, states, words in chunks:
        require(next(words, None) is None, "a chunk has too many words")
        require(rows > 0 or all(x == 65536 for x in states), "a lane does not return to a first state")
    require(max(found) < alphabet, "a symbol lies outside the alphabet")
    return found, odd


def decode_trellis(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.20, 5.21"""
    d, source = spec.d, Bytes(message)
    mode = source.byte()
    require(mode <= NON_FINITE, f"there is no mode {mode}")
    if mode:
        source.finish()
        return fill(mode, d)
    lengths = cut(d, 1 << 18)
    sizes = [source.left] * len(lengths)
    if len(lengths) > 1:
        sizes = list(struct.unpack(f"<{len(lengths)}I", source.take(4 * len(lengths))))
    values: list[float] = []
    for n, size in zip(lengths, sizes):
        where = regions(spec, len(values), len(values) + n)
        values += trellis_segment(form, source.take(size), n, len(values), context, where)
    source.finish()
    return values


def trellis_segment(form: Form, data: bytes, n: int, start: int, context: Context, where: list[Region]) -> list[float]:
    source, dithered = Bytes(data), form.name == "dithered_trellis"
    kind = source.byte()
    if kind == 0:
        source.finish()
        return [0.0] * n
    if kind == 1:
        return floats(exactly(source.rest, 4 * n).data)
    require(kind in (2, 3), f"there is no segment of kind {kind}")
    window, run = source.byte(), source.byte()
    b = source.byte() if dithered else 1
    tail = source.varint(most_bytes=5)
    two = kind == 3 and not dithered
    scales = floats(source.take(8 if two else 4))
    require(window % 2 == 0 and 2 <= window <= 64 and run in (14, 15) and b <= 3, "a malformed segment")
    require(all(2.0**-126 <= scale <= F or (two and scale == 0) for scale in scales), "a malformed scale")
    require(tail <= source.left, "a malformed segment")
    body = source.take(source.left - tail)
    # Of every coordinate, the first table of its class.
    first, still, tables = [0] * n, [False] * n, 1 << b
    if kind == 3:
        classes, first, still, tables = trellis_classes(body, b, dithered, where)
        body = body[classes:]
    draws = [draw(context, 6, start + i) % 2**15 for i in range(n)] if dithered else []

    def rest(i: int, z0: int) -> int:
        return (8192 * z0 - draws[i] + 8192) % 16384 - 8192

    def facts(i: int, z0: int) -> tuple[int, int]:
        if not dithered:
            return first[i] + z0, 0
        t = rest(i, z0)
        return first[i] + min(abs(t) << b >> 13, (1 << b) - 1), t + draws[i] >> 14 & 1

    trellis = Trellis(*GENERATORS[form["states"]], facts, still)
    symbols, odd = trellis_block(body, n, 2 * window, tables, run, trellis)
    levels = [symbol - window for symbol in symbols]
    if tail:
        escapes, ends = Bytes(source.rest), [i for i, s in enumerate(symbols) if s < 2 or s >= 2 * window - 2]
        for i, v in zip(ends, planar_gamma(escapes, len(ends))):
            require(v <= (2**15 if dithered else 2**25), "an index is too large")
            levels[i] += 2 * (v - 1) if levels[i] >= 0 else -2 * (v - 1)
        escapes.finish()
    if not dithered:
        each = [scales[1] if s else scales[0] for s in still]
        return [limited(f32(f32(2 * a + z0) * scale)) for a, z0, scale in zip(levels, odd, each)]
    values, scale = [], scales[0]
    for i, (a, z0) in enumerate(zip(levels, odd)):
        t = rest(i, z0)
        sign = -1 if draw(context, 7, start + (i >> run << run) >> 14) % 2 else 1
        values.append(limited(f32(f32(sign * ((a if t >= 0 else -a) * 16384 + t)) * 2.0**-13 * scale)))
    return values


def trellis_classes(data: bytes, b: int, dithered: bool, where: list[Region]) -> tuple[int, list[int], list[bool], int]:
    """The bytes read; of each coordinate the first table of its class, and whether it is still; the number of tables"""
    at = 0 if dithered else 2
    numbers, count, used = scale_classes(data[at:], where)
    if dithered:
        return used, [number << b for number in numbers], [False] * len(numbers), count << b
    moving, mask = struct.unpack("<2H", data[:4])
    require(moving & ~mask == 0, "a class without a table moves")
    moves = [moving >> c & 1 for c in range(16) if mask >> c & 1]
    first = [sum(1 + m for m in moves[:k]) for k in range(count)]
    return at + used, [first[k] for k in numbers], [not moves[k] for k in numbers], sum(1 + m for m in moves)


@functools.cache
def normal_quantiles() -> list[int]:
    """5.19: z(v)"""
    upper, i = [], 0
    for k in range(32768):
        while tails()[i + 1] >= 2**47 - (2 * k + 1) * 2**31:
            i += 1
        upper.append(2 * i + 1)
    return [-z for z in reversed(upper)] + upper


def point(context: Context, t: int, width: int, n: int, scale: float) -> list[float]:
    first = t * 8 * ceil_div(width, 8)
    z = [normal_quantiles()[draw(context, CODEBOOK, first + j)] for j in range(n)]
    factor = scale / math.sqrt(sum(v * v for v in z))
    return [limited(f32(factor * v)) for v in z]


def cap_series(alpha: float, n: int) -> float:
    """S(alpha, n)"""
    a, term, total, i = (n - 1) / 2, 1.0, 0.0, 0
    while term > total * 2.0**-60:
        total += term
        term *= alpha * (a + 0.5 + i) / (a + 1 + i)
        i += 1
    return total


def log2_cap(alpha: float, n: int) -> float:
    """log2 P(alpha, n)"""
    a = (n - 1) / 2
    gammas = math.lgamma(a + 0.5) - math.lgamma(a + 1) - 0.5 * math.log(math.pi)
    return (a * math.log(alpha) + 0.5 * math.log1p(-alpha) + gammas + math.log(cap_series(alpha, n))) / math.log(2) - 1


def radius(form: Form, n: int) -> float:
    r = math.sqrt(1 - form["alpha"])
    return f32(r * cap_series(form["alpha"], n)) if form["unbiased"] else r


def notches(form: Form) -> int:
    """The number g of steps that norms have for a factor of two."""
    alpha, block = form["alpha"], form["block"]
    eta = math.sqrt(min(3 / max(block - 1, 1), 0.25) * alpha / (1 - alpha))
    g = 1
    while g < 64 and math.log(2) / (2 * g) > eta:
        g *= 2
    return min(2 * g, 64) if form["unbiased"] else g


def valid_spherical(form: Form) -> bool:
    alpha, block = form["alpha"], form["block"]
    if not 0 < alpha < 1 or block is None:
        return bool(0 < alpha < 1)
    if not 1 <= block <= 1024 or log2_cap(alpha, block) < -20:
        return False
    return bool(form["unbiased"] or (1 - alpha) * math.cosh(math.log(2) / (2 * notches(form))) ** 2 < 1)


def decode_spherical(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.19"""
    return (
        spherical_vector(form, message, spec.d, context)
        if form["block"] is None
        else spherical_blocks(form, message, spec.d, context)
    )


def spherical_vector(form: Form, message: bytes, d: int, context: Context) -> list[float]:
    source = Bytes(message)
    require(len(message) <= longest(form, flat(d)), "the message is longer than any")
    word = struct.unpack("<I", source.take(4))[0] % 2**31
    if word in (0, 0x7FC00000):
        source.finish()
        return fill(NON_FINITE if word else ZERO, d)
    if word == 0x7F800000:
        return floats(exactly(source.rest, 4 * d).data)
    norm = float_of(word)
    require(2.0**-126 <= norm <= F and d > 0, "not a normal norm")
    bits, quotient = Bits(message), 0
    bits.at = 31
    m = bits.integer(6)
    require(m <= 56, "a Rice parameter is at most 56")
    while not bits.bit():
        quotient += 1
        require(quotient <= 127, "the number of the word is too large")
    t = quotient << m | bits.integer(m)
    require(bits.finish() == len(message), "bytes follow the code")
    require(t < 2**40, "the number of the word is too large")
    return point(context, t, d, d, norm * radius(form, d))


def block_norms(source: Bytes, count: int) -> list[int]:
    kind, number = source.byte(), source.byte()
    if kind == 1:
        numbers = [level + number for level in level_stream(source.take(source.varint()), count)]
    else:
        require(kind == 0, f"there is no form {kind} of the norms")
        numbers, used = rans(source.rest, count, number + 1)
        source.take(used)
        if number == 255:
            escapes = iter(planar_gamma(source, numbers.count(255)))
            numbers = [254 + next(escapes) if b == 255 else b for b in numbers]
    require(min(numbers) >= 0, "a norm exceeds the largest")
    return numbers


def spherical_blocks(form: Form, message: bytes, d: int, context: Context) -> list[float]:
    source, block, g = Bytes(message), form["block"], notches(form)
    mode = source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    if mode == RAW:
        return floats(exactly(source.rest, 4 * d).data)
    require(mode == 0 and d > 0, f"spherical has no mode {mode}")
    (largest,) = struct.unpack("<h", source.take(2))
    below = block_norms(source, ceil_div(d, block))
    exponents = [largest + 1 - b for b in below]
    require(all(-127 * g <= k <= 140 * g for k in exponents), "a norm is out of range")
    roots = [math.sqrt(2)]
    while len(roots) < 6:
        roots.append(math.sqrt(roots[-1]))
    sizes = [min(block, d - start) for start in range(0, d, block)]
    words: dict[int, int] = {}
    for alike in ([i for i, n in enumerate(sizes) if n == block], [i for i, n in enumerate(sizes) if n < block]):
        alive = [i for i in alike if below[i]]
        if alive:
            m = source.byte()
            require(m <= 56, "a Rice parameter is at most 56")
            words.update(zip(alive, planar_rice(source, len(alive), m)))
    require(all(t < 2**40 for t in words.values()), "the number of a word is too large")
    source.finish()
    values: list[float] = []
    for i, n in enumerate(sizes):
        if not below[i]:
            values += [0.0] * n
            continue
        whole, j = divmod(exponents[i], g)
        norm = 1.0
        for digit, root in zip(range(g.bit_length() - 2, -1, -1), roots):
            norm *= root if j >> digit & 1 else 1.0
        values += point(context, words[i], block, n, math.ldexp(norm, whole) * radius(form, n))
    return [-v if draw(context, SIGN, i) % 2 else v for i, v in enumerate(values)]


# 5.24, 5.25: variance-based compression


def chunks_of(form: Form, spec: Spec) -> tuple[list[tuple[list[int], int]], list[int]]:
    """5.22: the coordinates of every chunk and how many of them are sent; how many values each piece sends."""
    found, counts = [], dict[int, int]()
    for part in tiles(spec, math.isqrt(form["chunk"]), form["chunk"], form["vector"]):
        for chunk in part.chunks:
            k = min(form["k"], len(chunk))
            found.append((chunk, k))
            counts[part.piece] = counts.get(part.piece, 0) + k
    return found, list(counts.values())


def tables_of_bins(counts: list[int]) -> int:
    return len(counts) if len(counts) <= 256 and sum(counts) >= 512 * len(counts) else 1


def chunk_values(form: Form, source: Bytes, counts: list[int]) -> list[float]:
    K = sum(counts)
    own = [piece for piece, count in enumerate(counts) for _ in range(count)]
    if form["values"] in ("float32", "bf16"):
        kind, size = value_kind(form)
        high, used = rans(source.rest, K, 256)
        source.take(used)
        low = source.take((size - 1) * K)
        data = b"".join(low[(size - 1) * j : (size - 1) * (j + 1)] + bytes([high[j]]) for j in range(K))
        return floats(data, kind)
    if form["values"] == "sign":
        scales = floats(source.take(2 * len(counts)), "bfloat16")
        minus = packed_codes(source.take(ceil_div(K, 8)), 1, K)
        return [-scales[piece] if bit else scales[piece] for piece, bit in zip(own, minus)]
    bins = form["bins"]
    present = packed_codes(source.take(ceil_div(len(counts) * bins, 8)), 1, len(counts) * bins)
    numbers = iter(floats(source.take(4 * sum(present))))
    stands = [next(numbers) if bit else 0.0 for bit in present]
    tables = tables_of_bins(counts)
    chosen, used = rans(source.rest, K, bins, own if tables > 1 else None, tables)
    source.take(used)
    return [stands[piece * bins + j] for piece, j in zip(own, chosen)]


def decode_chunk_top_k(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.22"""
    d, source = spec.d, Bytes(message)
    mode = source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    require(mode == 0 and d > 0, f"chunk_top_k has no mode {mode} for {d} coordinates")
    chunks, counts = chunks_of(form, spec)
    values = chunk_values(form, source, counts)
    sets = chunk_sets(source.rest, [(len(chunk), k) for chunk, k in chunks])
    where = [chunk[place] for (chunk, _), places in zip(chunks, sets) for place in places]
    return scattered(d, where, values)


def decode_e3m0(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.23"""
    d, source = spec.d, exactly(message, longest(form, spec))
    scales = floats(source.take(4 * ceil_div(d, form["block"])))
    if not all(math.isfinite(scale) for scale in scales):
        return [NAN] * d
    values = []
    for i, code in enumerate(packed_codes(source.rest, 4, d, check=False)):
        value = limited(f32((2.0 ** (code % 8 - 7) if code % 8 else 0.0) * scales[i // form["block"]]))
        values.append(-value if code > 7 else value)
    return values


def owners(where: list[int], spec: Spec) -> list[int]:
    """The number of the piece that each coordinate lies in."""
    ends = list(itertools.accumulate(p.stop - p.start for p in spec.pieces))
    return [bisect.bisect_right(ends, i) for i in where]


def signed_power(e: int, code: int) -> float:
    """4.9"""
    require(-126 <= e <= 127 and e - code % 8 >= -126, "an exponent is out of range")
    return math.ldexp(-1.0 if code >= 8 else 1.0, e - code % 8)


def signs_and_exponents(data: bytes, tensors: list[int], packed: bool) -> list[float]:
    """4.9: a value for each code; ``tensors`` tells which tensor each belongs to."""
    count, distinct = len(tensors), sorted(set(tensors))
    total = len(distinct)
    if count <= 1024 and not packed:
        levels = level_stream(data, total + count)
        require(0 not in levels, "a level is zero")
        exponents, e = [], -10
        for level in levels[:total]:
            e += level - 1 if level > 0 else level
            exponents.append(e)
        require(all(abs(level) <= 8 for level in levels[total:]), "there are eight powers of two")
        codes = [abs(level) - 1 + 8 * (level < 0) for level in levels[total:]]
    else:
        source = Bytes(data)
        exponents = list(struct.unpack(f"<{total}b", source.take(total)))
        if packed:
            codes = packed_codes(source.rest, 4, count)
        else:
            codes, used = rans(source.rest, count, 16)
            source.take(used)
            source.finish()
    by_tensor = dict(zip(distinct, exponents))
    require(all(-126 <= e <= 127 for e in exponents), "an exponent is out of range")
    return [signed_power(by_tensor[tensor], code) for tensor, code in zip(tensors, codes)]


def paper_words(message: bytes, magic: bytes, start: int, d: int, width: int) -> tuple[list[int], list[int]]:
    """Codes and coordinates of 32-bit words."""
    require(len(message) >= start and message[:4] == magic, "not a message of words")
    n = struct.unpack("<I", message[4:8])[0]
    words = struct.unpack(f"<{n}I", exactly(message[start:], 4 * n).data)
    where = [word % (1 << width) for word in words]
    require(all(a < b for a, b in itertools.pairwise([-1, *where, d])), "the coordinates do not increase")
    return [word >> width for word in words], where


def decode_vgc(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.24"""
    d, source = spec.d, Bytes(message)
    if form["wire"] == "paper":
        if message == b"\2":
            return fill(NON_FINITE, d)
        pieces = len(spec.pieces)
        start = 8 + 4 * ceil_div(pieces, 4)
        codes, where = paper_words(message, b"VGC1", start, d, 28)
        require(not any(message[8 + pieces : start]), "padding is not zero")
        exponents = struct.unpack(f"<{pieces}b", message[8 : 8 + pieces])
        tensors = owners(where, spec)
        require({j for j, e in enumerate(exponents) if e != -128} == set(tensors), "the exponents are not those of the words")
        return scattered(d, where, [signed_power(exponents[j], code) for j, code in zip(tensors, codes)])
    mode = source.byte()
    if mode in (ZERO, NON_FINITE):
        source.finish()
        return fill(mode, d)
    require(mode == 0 or (mode == PACKED and form["values"] == "exp4"), f"vgc has no mode {mode}")
    count = source.varint()
    require(1 <= count <= d, "the count is out of range")
    where, used = index_set(source.rest, count, d)
    source.take(used)
    tensors = owners(where, spec)
    if form["values"] == "exp4":
        values = signs_and_exponents(source.rest, tensors, mode == PACKED)
    elif form["values"] == "bf16":
        values = floats(exactly(source.rest, 2 * count).data, "bfloat16")
    elif form["values"] == "sign":
        distinct = sorted(set(tensors))
        scales = dict(zip(distinct, floats(source.take(2 * len(distinct)), "bfloat16")))
        signs = packed_codes(source.rest, 1, count)
        values = [-scales[tensor] if minus else scales[tensor] for tensor, minus in zip(tensors, signs)]
    else:
        values = decode(form["values"], source.rest, flat(count), context.child(0))
    return scattered(d, where, values)


def decode_hybrid(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.25"""
    d, tau, source = spec.d, f32(form["tau"]), Bytes(message)
    if form["wire"] == "paper":
        if message == b"\2":
            return fill(NON_FINITE, d)
        signs, where = paper_words(message, b"VGH1", 8, d, 31)
    else:
        mode = source.byte()
        if mode in (ZERO, NON_FINITE):
            source.finish()
            return fill(mode, d)
        require(mode == 0, f"hybrid has no mode {mode}")
        count = source.varint()
        require(1 <= count <= d, "the count is out of range")
        where, used = index_set(source.rest, count, d)
        source.take(used)
        signs = packed_codes(source.rest, 1, count)
    return scattered(d, where, [-tau if minus else tau for minus in signs])


def decode_error_feedback(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.64"""
    inner = spec._replace(dtype="float32")
    values = decode(form["inner"], message, inner, context)
    omega = nature(form["inner"], inner) if spec.d else EXACT
    if isinstance(omega, str) or not 0 < omega < math.inf:
        return values
    factor = f32(1 / (1 + omega))
    return [f32(v * factor) for v in values]


def padded(d: int, block: int) -> int:
    r = d % block
    return d - r + (1 << (r - 1).bit_length() if r else 0)


def hadamard(v: list[float]) -> list[float]:
    k = len(v).bit_length() - 1
    scale = 2.0 ** -(k // 2) * (float_of(0x3F3504F3) if k % 2 else 1.0)
    v = [f32(x * scale) for x in v]
    for stage in range(k):
        h = 1 << stage
        for j in range(len(v)):
            if not j & h:
                v[j], v[j + h] = f32(v[j] + v[j + h]), f32(v[j] - v[j + h])
    return v


def decode_rotated(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.65"""
    require(len(message) > 0 and message[-1] <= 1, "the last byte of a rotated message is 0 or 1")
    d, block = spec.d, form["block"]
    m = padded(d, block)
    y = decode(form["inner"], message[:-1], flat(m), context)
    values: list[float] = []
    for start in range(0, m, block):
        values += hadamard(y[start : start + block])
    for i in range(m):
        if i % 128 == 0:
            counter = ((i >> 7) % 2**32, ROTATION << 24 | i >> 39, context.step, context.buffer << 16 | SHARED)
            words = philox(context.seed, counter)
        if words[i % 128 // 32] >> i % 32 & 1:
            values[i] = -values[i]
    return [limited(f32(v * 2.0**32)) if message[-1] else v for v in values[:d]]


@functools.cache
def cosines(n: int) -> list[list[float]]:
    def entry(j: int, i: int) -> float:
        return f32(math.sqrt((2 if j else 1) / n) * math.cos(math.pi * ((2 * i + 1) * j % (4 * n)) / (2 * n)))

    return [[entry(j, i) for i in range(n)] for j in range(n)]


def dot(a: list[float], b: list[float]) -> float:
    total = 0.0
    for x, y in zip(a, b):
        total += x * y
    return f32(total)


def decode_dct(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.68"""
    require(len(message) > 0 and message[-1] <= 1, "the last byte of a message of dct is 0 or 1")
    y = decode(form["inner"], message[:-1], spec._replace(dtype="float32"), context)
    if message[-1]:
        y = [limited(f32(v * 2.0**32)) for v in y]
    top = max(map(abs, y), default=0.0)
    scale = 2.0**32 if 2.0**96 <= top < math.inf and not any(map(math.isnan, y)) else 1.0
    y = [f32(v / scale) for v in y]
    values = [0.0] * spec.d
    for part in tiles(spec, form["block"], form["block"], form["block"]):
        h, w = part.height, part.width
        down, along = cosines(h), cosines(w)
        for chunk in part.chunks:
            Y = [[y[chunk[j * w + c]] for c in range(w)] for j in range(h)]
            T = [[dot([down[j][i] for j in range(h)], [Y[j][c] for j in range(h)]) for c in range(w)] for i in range(h)]
            for i in range(h):
                for c in range(w):
                    values[chunk[i * w + c]] = limited(f32(dot(T[i], [along[j][c] for j in range(w)]) * scale))
    return values


def matrices(spec: Spec) -> list[tuple[int, Region, int]]:
    """5.69: where each matrix begins, its region, and its number of rows"""
    found, at = [], 0
    for region in regions(spec, 0, spec.d):
        rows = ceil_div(region.phase + region.size, region.columns)
        if rows >= 4 and region.columns >= 4 and max(rows, region.columns) <= 1 << 24:
            found.append((at, region, rows))
        at += region.size
    return found


def decode_aligned(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.69"""
    source = Bytes(message)
    told = source.byte()
    require(told <= 1, "a message of aligned begins with 0 or 1")
    negative = [0] * spec.d
    if told:
        stream, at = source.rest, 0

        def take(count: int) -> list[int]:
            nonlocal at
            require(at + count <= 8 * len(stream), "the signs are cut short")
            at += count
            return [stream[i // 8] >> i % 8 & 1 for i in range(at - count, at)]

        for begin, region, rows in matrices(spec):
            low, high = take(2)
            require(not (low and high), "there is no kind 3")
            if low or high:
                down = take(rows)
                across = take(region.columns) if high else [0] * region.columns
                for i in range(region.size):
                    row, column = divmod(region.phase + i, region.columns)
                    negative[begin + i] = down[row] ^ across[column]
        require(not any(take(-at % 8)), "the signs do not end in zeros")
        source.take(at // 8)
    values = decode(form["inner"], source.take(source.left), spec._replace(dtype="float32"), context)
    return [-v if minus else v for v, minus in zip(values, negative)]


def groups(form: Form, spec: Spec) -> list[tuple[int, Form, Spec, list[int]]]:
    """5.66: number, configuration, spec and coordinates of each group that has coordinates."""
    parts: dict[int, tuple[list[Piece], list[int]]] = {}
    at = 0
    for piece in spec.pieces:
        matches = [j for j, (pattern, _) in enumerate(form["rules"]) if fnmatch.fnmatchcase(piece.name, pattern)]
        small = form["small"] is not None and math.prod(piece.shape) < form["below"]
        pieces, where = parts.setdefault(2 + matches[0] if matches else int(small), ([], []))
        if piece.stop > piece.start:
            pieces.append(piece)
            where += range(at, at + piece.stop - piece.start)
        at += piece.stop - piece.start
    chosen = [form["default"], form["small"], *(inner for _, inner in form["rules"])]
    return [(k, chosen[k], Spec(tuple(parts[k][0]), spec.dtype), parts[k][1]) for k in sorted(parts) if parts[k][1]]


def decode_by_tensor(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.66"""
    source, values = Bytes(message), [0.0] * spec.d
    for k, inner, part, where in groups(form, spec):
        n = source.varint()
        require(n <= source.left and n <= longest(inner, part), "a group's message is too long")
        for i, value in zip(where, decode(inner, source.take(n), part, context.child(k))):
            values[i] = value
    source.finish()
    return values


def decode_shortest(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.70"""
    source = Bytes(message)
    number = source.byte()
    require(number < len(form["of"]), "there is no such configuration")
    return decode(form["of"][number], source.take(source.left), spec._replace(dtype="float32"), context)


def decode_metered(form: Form, message: bytes, spec: Spec, context: Context) -> list[float]:
    """5.67"""
    return decode(form["inner"], message, spec, context)


# ---- 6 the factor of error feedback -----------------------------------------------------------------------------------------

EXACT, OTHER = "exact", "other"


def nature(form: Form, spec: Spec) -> float | str:
    """EXACT, OTHER, or the omega of an unbiased configuration."""
    d, name = spec.d, form.name
    if name == "identity" or (name == "sign" and d == 1):
        return EXACT
    if name == "ternary":
        return (1 + 2.0**-21) * (math.sqrt(min(bucket_of(form, d), d)) + 1) / 2 - 1
    if name == "natural":
        return 1 / 8 + 2.0**-19
    if name == "natural_dithering":
        r = 2.0 ** (1 - form["levels"]) * math.sqrt(min(bucket_of(form, d), d))
        return float(1 / 8 + r * min(1.0, r) + 2.0**-19 + r**2 * 2.0**-16)
    if name == "qsgd":
        n, s = min(form["bucket"], d), levels_of_qsgd(form)
        if form["norm"] == "max":
            o = (math.sqrt(1 + (n - 1) / s**2) - 1) / 2
        else:
            o = math.sqrt(n) / s - 1 if n >= 4 * s**2 else n / (4 * s**2)
        return float(o * (1 + 2.0**-20) + n / s**2 * 2.0**-16)
    if name == "top_k":
        sure = kept(form, d) if form["exact"] else ceil_div(kept(form, d), 2)
        return EXACT if sure == d and form["values"] == "float32" else OTHER
    if name == "chunk_top_k":
        whole_chunks = all(k == len(chunk) for chunk, k in chunks_of(form, spec)[0])
        return EXACT if whole_chunks and form["values"] == "float32" else OTHER
    if name == "random_k":
        if form["unbiased"]:
            return 1 / (kept(form, d) / d) - 1
        return EXACT if kept(form, d) == d and form["values"] == "float32" else OTHER
    if name in ("random_sparse_dithering", "subtractive_dithering", "dithered_trellis"):
        return float(form["omega"])
    if name == "spherical" and form["unbiased"]:
        spread = math.sinh(math.log(2) / (2 * notches(form))) ** 2 if form["block"] else 0.0
        n = min(d, form["block"] or d)
        return float(max(1.0, (1 - form["alpha"]) * cap_series(form["alpha"], n) ** 2) * (1 + spread) - 1)
    if name == "error_feedback":
        return EXACT if nature(form["inner"], spec._replace(dtype="float32")) in (EXACT, 0.0) else OTHER
    if name == "rotated":
        omega = nature(form["inner"], flat(padded(d, form["block"])))
        if isinstance(omega, str):
            return OTHER
        u = (math.log2(form["block"]) + 2) * 2.0**-24
        return (math.sqrt(omega) * (1 + u) ** 2 + 2 * u + u**2) ** 2
    if name == "dct":
        omega = nature(form["inner"], spec._replace(dtype="float32"))
        if isinstance(omega, str):
            return OTHER
        u = 2 * (math.sqrt(form["block"]) + 2) * 2.0**-24
        return float((math.sqrt(omega) * (1 + u) ** 2 + 2 * u + u**2) ** 2)
    if name == "aligned":
        return nature(form["inner"], spec._replace(dtype="float32"))
    if name == "by_tensor":
        natures = [nature(inner, part) for _, inner, part, _ in groups(form, spec)]
        omegas = [n for n in natures if not isinstance(n, str)]
        return OTHER if OTHER in natures else max(omegas) if omegas else EXACT
    return nature(form["inner"], spec) if name == "metered" else OTHER


# ---- 7 limits ---------------------------------------------------------------------------------------------------------------


def varint_length(value: int) -> int:
    return max(1, ceil_div(value.bit_length(), 7))


def longest_index_set(k: int, d: int) -> int:
    if k == 0:
        return 1
    return 1 + min(2 + ceil_div(math.ceil(k * (3.45 + math.log2(0.6932 * d / k + 1.17))), 8), ceil_div(d, 8))


def longest(form: Form, spec: Spec) -> int:
    """No message of this configuration is longer; fixed-rate messages have exactly this length."""
    d, name = spec.d, form.name
    coded = int(form.parameters.get("coder", "packed") != "packed")
    if name == "identity":
        return d * (4 if spec.dtype == "float32" else 2)
    if name == "bf16":
        return 2 * d
    if name == "fp16":
        return 4 + 2 * d if d else 0
    if name == "fp8":
        return ceil_div(d, form["block"]) + d
    if name == "int8":
        return 4 * ceil_div(d, form["block"]) + d
    if name == "int4":
        return 2 * ceil_div(d, form["block"]) + ceil_div(d, 2)
    if name == "sign":
        return 4 * ceil_div(d, form["block"] or max(d, 1)) + ceil_div(d, 8)
    if name == "ternary":
        return 4 * ceil_div(d, bucket_of(form, d)) + ceil_div(d, 5)
    if name == "natural":
        return coded + ceil_div(d, 8) + d
    if name == "natural_dithering":
        return coded + 4 * ceil_div(d, bucket_of(form, d)) + ceil_div(d * (2 * form["levels"] + 1).bit_length(), 8)
    if name == "qsgd":
        return coded + 4 * ceil_div(d, form["bucket"]) + ceil_div(d * width_of_qsgd(form), 8)
    if name == "top_k":
        most = most_of_top_k(form, d)
        normal = 1 + varint_length(most) + longest_index_set(min(most, d // 2), d) + value_kind(form)[1] * most
        return max(1, min(normal, 1 + 4 * d))
    if name == "random_k":
        return kept(form, d) * value_kind(form)[1]
    if name == "threshold":
        if form["values"] == "exact":
            return 1 + 4 * d
        return 1 + varint_length(d) + longest_index_set(d // 2, d) + ceil_div(d, 8)
    if name in ("sparse_dithering", "random_sparse_dithering"):
        if form.parameters.get("bits") is not None:
            return int(max(4, math.floor(form["bits"] * d / 8)))
        segments = len(cut(d, 1 << 18))
        return 4 + 4 * d + segments + (4 * segments if segments > 1 else 0)
    if name in ("trellis", "dithered_trellis"):
        if form.parameters.get("bits") is not None:
            return int(max(1, math.floor(form["bits"] * d / 8)))
        segments = len(cut(d, 1 << 18))
        return 1 + 4 * d + segments + (4 * segments if segments > 1 else 0)
    if name == "subtractive_dithering":
        return 5 + 4 * len(subtractive_lengths(form, d)) + 4 * d
    if name == "spherical":
        return max(32, 4 + 4 * d) if form["block"] is None else max(1 + 4 * d, 32 + 18 * ceil_div(d, form["block"]))
    if name == "chunk_top_k":
        chunks, counts = chunks_of(form, spec)
        K, T, bins = sum(counts), len(counts), form["bins"]
        values = {
            "float32": 1 + 4 * K,
            "bf16": 1 + 2 * K,
            "sign": 2 * T + ceil_div(K, 8),
            "bins": ceil_div(T * bins, 8) + 4 * T * bins + 1 + ceil_div(K * (bins - 1).bit_length(), 8),
        }[form["values"]]
        streams = cut_into_streams([(len(chunk), k) for chunk, k in chunks])
        words = [ceil_div(sum(k * (n - 1).bit_length() for n, k in stream), 32) + 3 for stream in streams]
        return 1 + values + 4 * sum(words) + 2 * max(0, len(streams) - 1) if d else 1
    if name == "e3m0":
        return 4 * ceil_div(d, form["block"]) + ceil_div(d, 2)
    if name == "dct":
        return longest(form["inner"], spec._replace(dtype="float32")) + 1
    if name == "aligned":
        signs = sum(2 + rows + region.columns for _, region, rows in matrices(spec))
        return 1 + ceil_div(signs, 8) + longest(form["inner"], spec._replace(dtype="float32"))
    if name == "shortest":
        return 1 + max(longest(inner, spec._replace(dtype="float32")) for inner in form["of"])
    if name in ("vgc", "hybrid"):
        pieces = len(spec.pieces)
        if form["wire"] == "paper":
            return 8 + 4 * d + (4 * ceil_div(pieces, 4) if name == "vgc" else 0)
        head = 1 + varint_length(d) + longest_index_set(d // 2, d)
        if name == "hybrid":
            return head + ceil_div(d, 8)
        if isinstance(form["values"], Form):
            return head + longest(form["values"], flat(d))
        return head + {"exp4": pieces + ceil_div(d, 2), "sign": 2 * pieces + ceil_div(d, 8), "bf16": 2 * d}[form["values"]]
    if name == "error_feedback":
        return longest(form["inner"], spec._replace(dtype="float32"))
    if name == "rotated":
        return longest(form["inner"], flat(padded(d, form["block"]))) + 1
    if name == "by_tensor":
        sizes = [longest(inner, part) for _, inner, part, _ in groups(form, spec)]
        return sum(size + varint_length(size) for size in sizes)
    assert name == "metered"
    return longest(form["inner"], spec)


# ---- the table of wire ids --------------------------------------------------------------------------------------------------


class Compressor(NamedTuple):
    """A row of the table: wire id, decoder, parameters (kind and default) and what else must hold of them."""

    wire_id: int
    decode: Decoder
    parameters: dict[str, tuple[Callable[[Any], Any], Any]]
    valid: Callable[[Form], bool] = lambda form: True


def block_of(form: Form, least: int, most: int) -> bool:
    block: int = form["block"]
    return least <= block <= most and block & (block - 1) == 0


def multiple(value: int | None, of: int) -> bool:
    return value is None or (value > 0 and value % of == 0)


def valid_qsgd(form: Form) -> bool:
    most = 2 ** (form["bits"] - 1) - 1 if form["coder"] == "packed" else 127
    good_levels = form["levels"] is None or 1 <= form["levels"] <= most
    return 2 <= form["bits"] <= 8 and multiple(form["bucket"], 8) and good_levels


def valid_count(form: Form) -> bool:
    fraction, k = form["fraction"], form["k"]
    return (fraction is None) != (k is None) and (fraction is None or 0 < fraction <= 1) and (k is None or k >= 1)


def valid_dithering(form: Form) -> bool:
    nu, alpha, bits = form["nu"], form["alpha"], form["bits"]
    one = [nu, alpha, bits].count(None) == 2
    return one and (nu is None or 0 < nu <= 1) and (alpha is None or 0 < alpha < 1) and (bits is None or 0 < bits < math.inf)


def valid_chunks(form: Form) -> bool:
    sizes = form["chunk"] in [4**e for e in range(1, 9)] and 1 <= form["k"] <= 256 and form["bins"] in (2, 4, 8, 16)
    return sizes and (form["vector"] is None or 1 <= form["vector"] <= 65536)


def vgc_values(value: Any) -> str | Form:
    """A kind of values, or a configuration without state."""
    if isinstance(value, str) and value in ("exp4", "sign", "bf16"):
        return str(value)
    form = as_form(value)
    part = form
    while part.name == "rotated":
        part = part["inner"]
    require(part.name not in ("vgc", "hybrid", "error_feedback", "by_tensor", "metered"), "the values are sent without state")
    return form


def valid_variance(form: Form) -> bool:
    if form.name == "hybrid" and not 2.0**-60 <= form["tau"] <= 2.0**60:
        return False
    words = form["wire"] == "compact" or form.name == "hybrid" or form["values"] == "exp4"
    return 0 < form["alpha"] < math.inf and 0 <= form["zeta"] <= 1 and words


WIRE = (choice("compact", "paper"), "compact")
NUMBERS = {"fraction": (maybe_real, None), "k": (maybe_whole, None)}
VALUES = (choice("float32", "bf16"), "float32")
BUCKET = (maybe_whole, None)
PACKING = (choice("packed", "rans"), "packed")
CHUNK = (chunk, "auto")
DITHERING = {
    "coder": (choice("auto", "rans", "paper"), "auto"),
    "scale": (choice("chunk", "global"), "chunk"),
    "chunk": CHUNK,
}
INNER = (as_form, MISSING)

COMPRESSORS: dict[str, Compressor] = {
    "identity": Compressor(1, decode_identity, {}),
    "bf16": Compressor(2, decode_bf16, {}),
    "fp16": Compressor(3, decode_fp16, {}),
    "fp8": Compressor(4, decode_fp8, {"block": (whole, 32)}, lambda form: block_of(form, 16, 65536)),
    "int8": Compressor(5, decode_int, {"block": (whole, 256)}, lambda form: multiple(form["block"], 8)),
    "int4": Compressor(6, decode_int, {"block": (whole, 32)}, lambda form: multiple(form["block"], 8)),
    "sign": Compressor(7, decode_sign, {"block": (maybe_whole, 4096)}, lambda form: multiple(form["block"], 64)),
    "ternary": Compressor(8, decode_ternary, {"bucket": BUCKET}, lambda form: multiple(form["bucket"], 64)),
    "natural": Compressor(9, decode_natural, {"coder": PACKING, "chunk": CHUNK}),
    "natural_dithering": Compressor(
        10,
        decode_natural_dithering,
        {"levels": (whole, 8), "bucket": BUCKET, "coder": PACKING, "chunk": CHUNK},
        lambda form: 1 <= form["levels"] <= 64 and multiple(form["bucket"], 64),
    ),
    "qsgd": Compressor(
        11,
        decode_qsgd,
        {
            "bits": (whole, 4),
            "bucket": (whole, 512),
            "levels": (maybe_whole, None),
            "norm": (choice("l2", "max"), "l2"),
            "coder": (choice("packed", "elias", "rans"), "packed"),
            "chunk": CHUNK,
        },
        valid_qsgd,
    ),
    "top_k": Compressor(12, decode_sparse, {**NUMBERS, "exact": (flag, True), "values": VALUES}, valid_count),
    "random_k": Compressor(
        13,
        decode_random_k,
        {**NUMBERS, "unbiased": (flag, True), "values": VALUES},
        lambda form: valid_count(form) and not (form["unbiased"] and form["values"] == "bf16"),
    ),
    "threshold": Compressor(
        14,
        decode_sparse,
        {"tau": (real, MISSING), "values": (choice("exact", "sign"), "exact")},
        lambda form: 0 <= form["tau"] <= F and (form["values"] == "exact" or f32(form["tau"]) > 0),
    ),
    "sparse_dithering": Compressor(
        16,
        decode_dithered,
        {
            "nu": (maybe_real, None),
            "alpha": (maybe_real, None),
            "bits": (maybe_real, None),
            **DITHERING,
            "rdo": (flag, False),
        },
        valid_dithering,
    ),
    "random_sparse_dithering": Compressor(
        17, decode_dithered, {"omega": (real, MISSING), **DITHERING}, lambda form: 0 < form["omega"] < math.inf
    ),
    "subtractive_dithering": Compressor(
        18,
        decode_subtractive,
        {
            "omega": (real, MISSING),
            "coder": (choice("auto", "rans"), "auto"),
            "scale": (choice("chunk", "global"), "chunk"),
            "chunk": CHUNK,
        },
        lambda form: 1e-12 <= form["omega"] <= 1e6,
    ),
    "spherical": Compressor(
        19,
        decode_spherical,
        {"alpha": (real, MISSING), "block": (maybe_whole, None), "unbiased": (flag, False)},
        valid_spherical,
    ),
    "trellis": Compressor(
        20,
        decode_trellis,
        {
            "nu": (maybe_real, None),
            "alpha": (maybe_real, None),
            "bits": (maybe_real, None),
            "states": (whole, 8),
            "chunk": CHUNK,
            "rdo": (flag, False),
        },
        lambda form: valid_dithering(form) and form["states"] in GENERATORS,
    ),
    "dithered_trellis": Compressor(
        21,
        decode_trellis,
        {"omega": (real, MISSING), "states": (whole, 8), "chunk": CHUNK},
        lambda form: 1e-12 <= form["omega"] <= 1e6 and form["states"] in GENERATORS,
    ),
    "chunk_top_k": Compressor(
        22,
        decode_chunk_top_k,
        {
            "chunk": (whole, 4096),
            "k": (whole, 64),
            "values": (choice("float32", "bf16", "sign", "bins"), "float32"),
            "bins": (whole, 4),
            "vector": (maybe_whole, None),
        },
        valid_chunks,
    ),
    "e3m0": Compressor(
        23, decode_e3m0, {"block": (whole, 256)}, lambda form: 8 <= form["block"] <= 4096 and form["block"] % 8 == 0
    ),
    "vgc": Compressor(
        24,
        decode_vgc,
        {
            "alpha": (real, MISSING),
            "zeta": (real, 0.999),
            "wire": WIRE,
            "values": (vgc_values, "exp4"),
            "residual": (choice("drop", "keep"), "drop"),
        },
        valid_variance,
    ),
    "hybrid": Compressor(
        25,
        decode_hybrid,
        {"alpha": (real, MISSING), "tau": (real, MISSING), "zeta": (real, 0.999), "wire": WIRE},
        valid_variance,
    ),
    "error_feedback": Compressor(
        64,
        decode_error_feedback,
        {
            "inner": INNER,
            "residual": (choice("float32", "bfloat16", "int8"), "float32"),
            "force": (flag, False),
            "decay": (real, 1.0),
            "place": (choice("device", "cpu"), "device"),
        },
        lambda form: 0 <= form["decay"] <= 1,
    ),
    "rotated": Compressor(65, decode_rotated, {"inner": INNER, "block": (whole, 4096)}, lambda form: block_of(form, 1, 65536)),
    "by_tensor": Compressor(
        66,
        decode_by_tensor,
        {"default": INNER, "small": (maybe_form, None), "below": (whole, 1024), "rules": (rules, [])},
        lambda form: form["below"] >= 0,
    ),
    "dct": Compressor(68, decode_dct, {"inner": INNER, "block": (whole, 64)}, lambda form: 1 <= form["block"] <= 256),
    "aligned": Compressor(69, decode_aligned, {"inner": INNER}),
    "shortest": Compressor(70, decode_shortest, {"of": (forms, MISSING)}),
    "metered": Compressor(67, decode_metered, {"inner": INNER, "error": (flag, True)}),
}


def float32_bytes(values: list[float]) -> bytes:
    """The values as little-endian float32, every NaN as 0x7fc00000: what the vectors' checksums are taken of."""
    return b"".join(struct.pack("<I", 0x7FC00000) if math.isnan(v) else struct.pack("<f", v) for v in values)


def main(arguments: list[str]) -> int:
    everything = "--all" in arguments
    files = [a for a in arguments if a != "--all"]
    if len(files) != 1:
        print("usage: python -m spec.decoder [--all] FILE", file=sys.stderr)
        return 2
    with open(files[0], "rb") as file:
        data = file.read()
    try:
        frame = open_frame(data)
        values = decode_frame(data)
    except ValueError as error:
        print(f"rejected: {error}", file=sys.stderr)
        return 1
    if everything:
        print("\n".join(map(repr, values)))
        return 0
    print(f"{frame.text} (wire id {frame.wire_id}), {frame.d} coordinates, {len(frame.message)} bytes")
    print(f"context: {frame.context}; the gradient was {frame.dtype}")
    print(f"CRC-32 of the decoded float32 bytes: {zlib.crc32(float32_bytes(values)):08x}")
    print("first values:", ", ".join(f"{v:.6g}" for v in values[:8]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
