"""Names: every compressor and wrapper by its text name, famous methods as compositions, and :func:`parse`.

The grammar of text forms (white space between tokens is ignored)::

    form   = name [ "(" [ argument { "," argument } ] ")" ]
    argument = [ name "=" ] value              positional arguments come first
    value  = number | string | "true" | "false" | "none" | "inf" | form | list | map
    list   = "[" [ value { "," value } ] "]"
    map    = "{" [ string ":" value { "," string ":" value } ] "}"

A bare name is a compressor where the parameter takes one, and a string elsewhere (``norm=max``). Strings stand between double or
single quotes; a backslash escapes a quote or a backslash. Nothing is evaluated, and length, depth and numbers are bounded: text
forms arrive in frames from strangers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tersegrad import compressors, wrappers
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.core.text import Configuration, require
from tersegrad.wrappers.named import demo, distro, ef_sign, fewest_bits, mem_sgd, sparse_loco, streaming_diloco, strom

MAX_LENGTH = 4096
MAX_DEPTH = 16
EXCHANGES = ("all_gather", "two_shot", "hierarchical", "power_sgd", "all_reduce")  # names that are no compressor's


def _configurations(module: types.ModuleType) -> dict[str, type[Configuration]]:
    """The configurations that a package exports, by text name: its ``__init__`` is the register."""
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Configuration) and v.name]
    return {c.name: c for c in sorted(found, key=lambda c: c.name)}


COMPRESSORS: Mapping[str, type[Configuration]] = types.MappingProxyType(_configurations(compressors))
WRAPPERS: Mapping[str, type[Configuration]] = types.MappingProxyType(_configurations(wrappers))


RECIPES: Mapping[str, Callable[..., Compressor[Any]]] = types.MappingProxyType(
    {f.__name__: f for f in (ef_sign, mem_sgd, strom, sparse_loco, demo, distro, streaming_diloco, fewest_bits)}
)
_RECIPE_EXAMPLES = {
    "ef_sign": "ef_sign",
    "mem_sgd": "mem_sgd(fraction=0.01)",
    "strom": "strom(tau=2.5)",
    # Examples are measured on vectors, which the published form sends whole.
    "sparse_loco": "sparse_loco(vector=4096)",
    "demo": "demo",
    "distro": "distro",
    "streaming_diloco": "streaming_diloco",
    "fewest_bits": "fewest_bits(alpha=0.1)",
}


def examples(name: str) -> tuple[str, ...]:
    """Text forms of a registered name that a user would choose, the most usual one first.

    >>> examples("top_k")
    ('top_k(fraction=0.01)', 'top_k(fraction=0.01, exact=false)')
    """
    return (_RECIPE_EXAMPLES[name],) if name in RECIPES else _classes()[name].examples


def corners(name: str) -> tuple[str, ...]:
    """Further text forms that tests and format vectors cover."""
    return () if name in RECIPES else _classes()[name].corners


def ordered() -> tuple[str, ...]:
    """Every name in the order of the wire format: compressors, wrappers, then recipes."""
    number = {name: getattr(made, "wire_id", 0) for name, made in _classes().items()}
    return (*sorted(number, key=number.__getitem__), *RECIPES)


def cases() -> tuple[str, ...]:
    """Every example and corner of every registered name."""
    return tuple(dict.fromkeys(text for name in ordered() for text in (*examples(name), *corners(name))))


def _classes() -> dict[str, type[Configuration]]:
    return {**COMPRESSORS, **WRAPPERS}


def names() -> tuple[str, ...]:
    """Every name that :func:`parse` knows: compressors, wrappers, then recipes.

    >>> "top_k" in names() and "error_feedback" in names() and "strom" in names()
    True
    """
    return (*COMPRESSORS, *WRAPPERS, *RECIPES)


def known() -> dict[str, Callable[..., Any]]:
    """What makes a compressor of each name."""
    return {**COMPRESSORS, **WRAPPERS, **RECIPES}


def parse(text: str, *, extra: Iterable[type[Configuration]] = ()) -> Compressor[Any]:
    """The compressor that a text form describes; ``extra`` adds classes of your own.

    >>> parse("error_feedback(top_k(fraction=0.01))")
    ErrorFeedback(inner=TopK(fraction=0.01...
    >>> parse("error_feedback(topk(fraction=0.01))")
    Traceback (most recent call last):
    tersegrad.core.errors.BadConfiguration: there is no compressor called 'topk', did you mean 'top_k'?
      error_feedback(topk(fraction=0.01))
                     ^
    """
    made: Compressor[Any] = parse_form(text, {**known(), **{c.name: c for c in extra}}, "compressor")
    return made


def parse_form(text: str, known: Mapping[str, Callable[..., Any]], kind: str) -> Any:
    """What a text form over the given names makes; ``kind`` is what complaints call them."""
    require(isinstance(text, str), f"a text form is a string, got {type(text).__name__}")
    require(len(text) <= MAX_LENGTH, f"a text form has at most {MAX_LENGTH} characters, got {len(text)}")
    return _Parser(text, known, kind).whole()


_CONSTANTS: Mapping[str, Any] = types.MappingProxyType({"true": True, "false": False, "none": None, "inf": math.inf})

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|-inf\b)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<string>"(?:[^"\\]|\\["'\\])*"|'(?:[^'\\]|\\["'\\])*')
    | (?P<mark>[()\[\]{},=:])""",
    re.VERBOSE | re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


@dataclasses.dataclass(frozen=True)
class _Bare:
    """A name without arguments: a compressor or a string, depending on the parameter."""

    name: str
    at: int


class _Parser:
    """Recursive descent over the tokens; every complaint points at its place."""

    def __init__(self, text: str, known: Mapping[str, Callable[..., Any]], kind: str) -> None:
        self.text, self.known, self.kind = text, known, kind
        self.tokens = self._tokenise()
        self.next = 0

    @property
    def article(self) -> str:
        return f"an {self.kind}" if self.kind[0] in "aeiou" else f"a {self.kind}"

    def fail(self, message: str, at: int) -> BadConfiguration:
        start = max(0, at - 60)
        line = "".join(c if c.isprintable() else "?" for c in self.text[start : at + 60])
        return BadConfiguration(f"{message}\n  {line}\n  {' ' * (at - start)}^")

    def _tokenise(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                quote = self.text[at] in "\"'"
                raise self.fail("a string is not closed" if quote else f"unexpected character {self.text[at]!r}", at)
            if match.lastgroup != "space":
                tokens.append(_Token(match.lastgroup or "", match.group(), at))
            at = match.end()
        return [*tokens, _Token("end", "", len(self.text))]

    def peek(self) -> _Token:
        return self.tokens[self.next]

    def take(self, text: str | None = None) -> _Token:
        token = self.peek()
        if text is not None and token.text != text:
            found = "the text ends here" if token.kind == "end" else f"found {token.text!r}"
            raise self.fail(f"expected {text!r}, {found}", token.at)
        self.next += 1
        return token

    def whole(self) -> Compressor[Any]:
        token = self.peek()
        if token.kind != "name":
            raise self.fail(f"a text form starts with the name of {self.article}", token.at)
        made = self.compressor(self.value(0))
        if self.peek().kind != "end":
            raise self.fail("the text form should end here", self.peek().at)
        if token.text in _CONSTANTS:
            raise self.fail(f"a text form starts with the name of {self.article}", token.at)
        return made

    def compressor(self, value: Any) -> Compressor[Any]:
        return typing.cast("Compressor[Any]", self.build(value.name, value.at, [], {}) if isinstance(value, _Bare) else value)

    def items(self, close: str, one: Callable[[], None]) -> None:
        """``one`` for each of the comma-separated items before ``close``."""
        while self.peek().text != close:
            one()
            if self.peek().kind == "end":
                raise self.fail(f"a {close!r} is missing, the text ends here", self.peek().at)
            if self.peek().text != close:
                self.take(",")
        self.take(close)

    def value(self, depth: int) -> Any:
        token = self.take()
        if depth > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH}", token.at)
        if token.kind == "number":
            return self.number(token)
        if token.kind == "string":
            return re.sub(r"\\(.)", r"\1", token.text[1:-1])
        if token.kind == "name":
            if token.text in _CONSTANTS:
                return _CONSTANTS[token.text]
            return self.call(token, depth) if self.peek().text == "(" else _Bare(token.text, token.at)
        if token.text == "[":
            found: list[Any] = []
            self.items("]", lambda: found.append(self.value(depth + 1)))
            return tuple(found)
        if token.text == "{":
            pairs: list[Any] = []
            self.items("}", lambda: pairs.append(self.pair(depth)))
            return tuple(pairs)
        ends = token.kind == "end"
        raise self.fail("a value is missing" if ends else f"expected a value, found {token.text!r}", token.at)

    def pair(self, depth: int) -> tuple[str, Any]:
        token = self.take()
        if token.kind != "string":
            raise self.fail('a key of a map is a string between quotes, as in {"*.bias": bf16}', token.at)
        self.take(":")
        return re.sub(r"\\(.)", r"\1", token.text[1:-1]), self.value(depth + 1)

    def number(self, token: _Token) -> int | float:
        if re.fullmatch(r"[-+]?\d+", token.text):
            if len(token.text) > 20 or abs(int(token.text)) >= 1 << 63:
                raise self.fail("whole numbers lie between -2^63 and 2^63", token.at)
            return int(token.text)
        value = float(token.text)
        if math.isinf(value) and token.text != "-inf":
            raise self.fail("this number is too large", token.at)
        return value

    def call(self, name: _Token, depth: int) -> Any:
        self.take("(")
        positional: list[tuple[Any, int]] = []
        keywords: dict[str, tuple[Any, int]] = {}

        def argument() -> None:
            token = self.peek()
            if token.kind == "name" and self.tokens[self.next + 1].text == "=":
                self.take()
                self.take("=")
                if token.text in keywords:
                    raise self.fail(f"{token.text} is given twice", token.at)
                keywords[token.text] = (self.value(depth + 1), token.at)
            elif keywords:
                raise self.fail("positional arguments come before named ones", token.at)
            else:
                positional.append((self.value(depth + 1), token.at))

        self.items(")", argument)
        return self.build(name.text, name.at, positional, keywords)

    def build(self, name: str, at: int, positional: list[tuple[Any, int]], keywords: dict[str, tuple[Any, int]]) -> Any:
        if name not in self.known:
            if name in EXCHANGES and self.kind == "compressor":
                raise self.fail(f"{name} is an exchange, not a compressor: it is given as exchange", at)
            raise self.fail(f"there is no {self.kind} called {name!r}{_nearest(name, self.known)}", at)
        maker = self.known[name]
        parameters = inspect.signature(maker).parameters
        hints = _hints(maker)
        if len(positional) > len(parameters):
            raise self.fail(f"{name} takes {len(parameters)} parameters at most: {_listed(parameters)}", positional[-1][1])
        given = dict(zip(parameters, positional))
        for key, (value, place) in keywords.items():
            if key not in parameters:
                known = f"it has {_listed(parameters)}" if parameters else "it has none"
                raise self.fail(f"{name} has no parameter {key!r}{_nearest(key, parameters) or f': {known}'}", place)
            if key in given:
                raise self.fail(f"{key} is given twice", place)
            given[key] = (value, place)
        for key, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and key not in given:
                raise self.fail(f"{name} needs {key}, as in {name}({key}=...)", at)
        arguments = {k: self.fit(v, hints.get(k, Any), f"{name}'s {k}", place) for k, (v, place) in given.items()}
        try:
            return maker(**arguments)
        except BadConfiguration as error:
            raise self.fail(str(error), at) from error
        except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
            raise self.fail(f"{name} cannot be made from these parameters: {error}", at) from error

    def fit(self, value: Any, hint: Any, what: str, at: int) -> Any:
        """``value`` as the type ``hint``, or a complaint."""
        for option in _options(hint):
            fitted = self._fit(value, option)
            if fitted is not _MISFIT:
                return fitted
        if isinstance(value, (_Bare, str)) and any(_takes_compressor(o) for o in _options(hint)):
            name = value.name if isinstance(value, _Bare) else value
            raise self.fail(f"there is no compressor called {name!r}{_nearest(name, self.known)}", at)
        choices = [c for o in _options(hint) if typing.get_origin(o) is typing.Literal for c in typing.get_args(o)]
        shown = value.name if isinstance(value, _Bare) else value
        near = _nearest(str(shown), [str(c) for c in choices]) if choices else ""
        wanted = _listed([repr(c) if isinstance(c, str) else str(c) for c in choices]) if choices else _described(hint)
        raise self.fail(f"{what} must be {wanted}, got {shown!r}{near}", at)

    def _fit(self, value: Any, option: Any) -> Any:
        text = value.name if isinstance(value, _Bare) else value
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any:
            return self.compressor(value) if isinstance(value, _Bare) and value.name in self.known else text
        if origin is typing.Literal:
            return next((a for a in args if a == text and isinstance(a, bool) == isinstance(text, bool)), _MISFIT)
        if _takes_compressor(option):
            if isinstance(value, _Bare) and value.name in self.known:
                return self.compressor(value)
            return value if isinstance(value, Configuration) else _MISFIT
        if origin is tuple and isinstance(value, tuple):
            inner = [args[0]] * len(value) if args[1:] == (...,) else list(args)
            if len(inner) != len(value):
                return _MISFIT
            fitted = [
                next((f for o in _options(h) if (f := self._fit(v, o)) is not _MISFIT), _MISFIT) for v, h in zip(value, inner)
            ]
            return _MISFIT if any(f is _MISFIT for f in fitted) else tuple(fitted)
        if option is float:
            return value if isinstance(value, (int, float)) and not isinstance(value, bool) else _MISFIT
        if option is str:
            return text if isinstance(text, str) else _MISFIT
        if option is None or option is type(None):
            return None if value is None else _MISFIT
        return value if type(value) is option else _MISFIT


_MISFIT = object()


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, else the hint itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _takes_compressor(option: Any) -> bool:
    origin = typing.get_origin(option) or option
    return origin is Compressor or (isinstance(origin, type) and issubclass(origin, Configuration))


# Every frame is parsed, and resolving annotations would take most of that time.
@functools.lru_cache(maxsize=256)
def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(maker)
    except NameError:
        # A class of a user's, with annotations that only a type checker can resolve: its constructor checks the values.
        return {}


def _nearest(name: str, known: Iterable[str]) -> str:
    """The hint that names the closest known word, or nothing when none is close."""
    close = difflib.get_close_matches(name[:64].lower(), list(known), n=1, cutoff=0.55)
    return f", did you mean {close[0]!r}?" if close else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _described(hint: Any) -> str:
    described = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "none"}
    return " or ".join("a compressor" if _takes_compressor(o) else described.get(o, "a list") for o in _options(hint))
