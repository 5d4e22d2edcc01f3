"""Text forms: every configuration reads back, and every mistake gets a helpful answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tersegrad
from tersegrad import recipes
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import Configuration
from tests.wrappers.toys import TOYS, Largest, Lottery, Promiseless

LETTERS = st.characters(min_codepoint=32, max_codepoint=126)
fractions = st.floats(1e-6, 1.0, allow_nan=False)

leaves: st.SearchStrategy[Configuration] = st.one_of(
    st.sampled_from([tersegrad.Identity(), tersegrad.BF16(), tersegrad.Sign()]),
    st.builds(lambda k: Largest(k=k), st.integers(1, 10**6)),
    st.builds(lambda p: Lottery(p=p), fractions),
)


def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(st.text(LETTERS, min_size=1, max_size=8), inner), max_size=2).map(tuple)
    return st.one_of(
        st.builds(tersegrad.Metered, inner, st.booleans()),
        st.builds(tersegrad.Rotated, inner, st.sampled_from([1, 64, 4096])),
        st.builds(tersegrad.ByTensor, inner, st.none() | inner, st.integers(0, 10**9), pairs),
    )


stateless = st.recursive(leaves, wrap, max_leaves=4)
configurations = stateless | st.builds(
    tersegrad.ErrorFeedback, stateless, residual=st.sampled_from(["float32", "bfloat16"]), force=st.just(True)
)


@settings(max_examples=200, deadline=None)
@given(configurations)
def test_text_and_repr_read_back(c: Any) -> None:
    again = tersegrad.parse(str(c), extra=TOYS)
    assert again == c
    assert hash(again) == hash(c)
    names = {**vars(tersegrad), **{t.__name__: t for t in TOYS}}
    assert eval(repr(c), names) == c


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("identity", tersegrad.Identity()),
        (" identity( ) ", tersegrad.Identity()),
        ("toy_largest(3)", Largest(k=3)),
        ("toy_largest(k=3,)", Largest(k=3)),
        ("toy_lottery(p=1)", Lottery(p=1)),
        ("toy_lottery(p=5e-1)", Lottery(p=0.5)),
        ("toy_lottery(p=+.5)", Lottery(p=0.5)),
        ("rotated(sign)", tersegrad.Rotated(tersegrad.Sign())),
        ("rotated(inner=sign(), block=64)", tersegrad.Rotated(tersegrad.Sign(), block=64)),
        ("error_feedback(sign, residual=bfloat16)", tersegrad.ErrorFeedback(tersegrad.Sign(), residual="bfloat16")),
        ("error_feedback(sign, residual='bfloat16')", tersegrad.ErrorFeedback(tersegrad.Sign(), residual="bfloat16")),
        ("by_tensor(sign, small=none)", tersegrad.ByTensor(tersegrad.Sign())),
        ('by_tensor(sign, rules=[["a", bf16]])', tersegrad.ByTensor(tersegrad.Sign(), rules=(("a", tersegrad.BF16()),))),
        (r'by_tensor(sign, rules={"\"\\": bf16})', tersegrad.ByTensor(tersegrad.Sign(), rules=(('"\\', tersegrad.BF16()),))),
        ("toy_promiseless(tau=inf)", Promiseless(tau=math.inf)),
    ],
)
def test_forms(text: str, want: Any) -> None:
    assert tersegrad.parse(text, extra=TOYS) == want


@pytest.mark.parametrize(
    ("text", "words", "place"),
    [
        ("idenity", "no compressor called 'idenity', did you mean 'identity'?", 0),
        ("error_feedback(singn)", "no compressor called 'singn', did you mean 'sign'?", 15),
        ("rotated(sign, blok=64)", "rotated has no parameter 'blok', did you mean 'block'?", 14),
        ("sign(zeta=1)", "sign has no parameter 'zeta': it has block", 5),
        ("rotated(sign, zeta=1)", "rotated has no parameter 'zeta': it has inner, block", 14),
        ("rotated", "rotated needs inner, as in rotated(inner=...)", 0),
        ("rotated()", "rotated needs inner", 0),
        ("rotated(3)", "rotated's inner must be a compressor, got 3", 8),
        ("rotated(sign, block=48)", "block must be a power of two", 0),
        ("rotated(sign, block=sign)", "rotated's block must be a whole number, got 'sign'", 14),
        ("rotated(sign, block=64.0)", "rotated's block must be a whole number, got 64.0", 14),
        ("rotated(sign, block=true)", "rotated's block must be a whole number, got True", 14),
        ("rotated(sign, 64, 3)", "rotated takes 2 parameters at most: inner, block", 18),
        ("rotated(sign, inner=sign)", "inner is given twice", 14),
        ("rotated(sign, block=4, block=4)", "block is given twice", 23),
        ("rotated(inner=sign, 4)", "positional arguments come before named ones", 20),
        ("error_feedback(sign, residual=bfloat)", "'float32', 'bfloat16', 'int8', got 'bfloat', did you mean 'bfloat16'?", 21),
        ("error_feedback(sign, force=1)", "force must be true or false, got 1", 21),
        ("error_feedback(sign", "a ')' is missing, the text ends here", 19),
        ('by_tensor(sign, rules={"a": bf16', "a '}' is missing, the text ends here", 32),
        ("power_sgd(rank=2)", "power_sgd is an exchange, not a compressor", 0),
        ("error_feedback(two_shot())", "two_shot is an exchange, not a compressor", 15),
        ("error_feedback(sign))", "the text form should end here", 20),
        ("error_feedback(sign sign)", "expected ',', found 'sign'", 20),
        ("error_feedback(,)", "expected a value, found ','", 15),
        ("error_feedback(sign, residual=", "a value is missing", 30),
        ("by_tensor(sign, rules={a: bf16})", "a key of a map is a string", 23),
        ('by_tensor(sign, rules={"a" bf16})', "expected ':', found 'bf16'", 27),
        ('by_tensor(sign, rules={"a": 3})', "rules must be a list", 16),
        ('by_tensor(sign, rules={"a', "a string is not closed", 23),
        ("sign;", "unexpected character ';'", 4),
        ("sign\u00e9", "unexpected character", 4),
        ("", "starts with the name of a compressor", 0),
        ("3", "starts with the name of a compressor", 0),
        ("true", "starts with the name", 0),
        ("true(sign)", "should end here", 4),
        ("rotated(sign, block=99999999999999999999)", "whole numbers lie between", 20),
        ("toy_lottery(p=1e999)", "too large", 14),
        ("__import__('os')", "no compressor called '__import__'", 0),
    ],
)
def test_mistakes_are_explained_and_located(text: str, words: str, place: int) -> None:
    with pytest.raises(BadConfiguration) as caught:
        tersegrad.parse(text, extra=TOYS)
    message, shown, caret = str(caught.value).rsplit("\n", 2)
    assert words in message
    assert caret.index("^") == 2 + place
    assert shown.strip() == text.strip() or not text.isascii()


def test_inner_refusals_point_at_the_outer_name() -> None:
    with pytest.raises(BadConfiguration, match=r"put rotated inside(.|\n)*\n  metered\(rotated\(ef_sign\)\)\n          \^"):
        tersegrad.parse("metered(rotated(ef_sign))")


def test_hostile_text_is_bounded() -> None:
    with pytest.raises(BadConfiguration, match="at most 4096 characters"):
        tersegrad.parse("metered(" * 1000)
    with pytest.raises(BadConfiguration, match="nested deeper"):
        tersegrad.parse("metered(" * 400 + "sign" + ")" * 400)
    with pytest.raises(BadConfiguration, match="nested deeper"):
        tersegrad.parse("by_tensor(sign, rules=" + "[" * 3000)
    with pytest.raises(BadConfiguration, match="a string, got int"):
        tersegrad.parse(3)  # type: ignore[arg-type]


SCRAPS = [*"()[]{},=:\"'\\ .0123e-", "sign", "rotated", "by_tensor", "rules", "error_feedback", "block"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(SCRAPS), max_size=30).map("".join))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        tersegrad.parse(text)
    except BadConfiguration:
        return


def test_names_are_unique_and_all_listed() -> None:
    names = tersegrad.names()
    assert len(set(names)) == len(names)
    assert set(names) == {*recipes.COMPRESSORS, *recipes.WRAPPERS, *recipes.RECIPES}
    assert {"identity", "sign", "error_feedback", "rotated", "by_tensor", "metered", "strom"} <= set(names)
    assert {c.__name__ for c in recipes.COMPRESSORS.values()} == set(tersegrad.compressors.__all__)


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=recipes.RECIPES)
def test_recipes_are_compositions(recipe: Callable[..., Any]) -> None:
    arguments = {k: 0.25 for k, kind in recipe.__annotations__.items() if kind == "float"}
    text = f"{recipe.__name__}({', '.join(f'{k}={v}' for k, v in arguments.items())})"
    c = tersegrad.parse(text)
    assert c == recipe(**arguments)
    assert tersegrad.parse(str(c)) == c
    assert recipe.__doc__


def test_strom_is_error_feedback_around_a_threshold() -> None:
    assert str(tersegrad.parse("strom(tau=0.01)")) == "error_feedback(threshold(tau=0.01, values=sign), force=true)"


def test_exchanges_are_known_as_such() -> None:
    from tersegrad.exchange.schemes import SCHEMES
    from tersegrad.recipes import EXCHANGES

    assert set(EXCHANGES) == set(SCHEMES)


def test_wire_ids_are_unique() -> None:
    ids: dict[int, str] = {}
    for text in ("metered(sign)", "rotated(sign)", "by_tensor(sign)", "error_feedback(sign)", "sign", "bf16", "identity"):
        c = tersegrad.parse(text)
        assert ids.setdefault(c.wire_id, text) == text
