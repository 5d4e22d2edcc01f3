"""Rows on terminals of any width: nothing is cut, and everything stands within the width where that is possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersegrad.report.layout import lines
from tersegrad.report.tables import Column

COLUMNS = (Column("name", number=False), Column("how it went", number=False), Column("bits per"), Column("error"))
ROWS = (("error_feedback(top_k(fraction=0.01))", "a b c", "16.00", "2.7e-06"), ("none", "-", "1 234.5 MB", "-"))


def printed(width: int) -> list[str]:
    return [line for line, _ in lines(COLUMNS, ROWS, width)]


def test_a_wide_terminal_gets_a_table() -> None:
    head, _, first, _ = printed(120)
    assert head.split() == ["name", "how", "it", "went", "bits", "per", "error"]
    assert first.split() == ["error_feedback(top_k(fraction=0.01))", "a", "b", "c", "16.00", "2.7e-06"]


def test_a_narrower_one_has_names_on_their_own_lines() -> None:
    shown = printed(50)
    assert " error_feedback(top_k(fraction=0.01))" in shown
    assert max(map(len, shown)) <= 50


def test_the_narrowest_has_a_block_for_each_row() -> None:
    shown = printed(28)
    assert "   how it went: a b c" in shown
    assert "   bits per      16.00" in shown
    assert max(len(line) for line in shown if "error_feedback" not in line) <= 28


words = st.lists(st.text("abc(=.)", min_size=1, max_size=12), max_size=6).map(" ".join)


@given(st.lists(st.tuples(words, words, words, words), max_size=4), st.integers(30, 140))
def test_no_word_is_cut_and_no_number_broken(rows: list[tuple[str, str, str, str]], width: int) -> None:
    shown = [line for line, _ in lines(COLUMNS, rows, width)]
    present = " ".join(" ".join(shown).split())
    for row in rows:
        for word in " ".join(row).split():
            assert word in present
    longest = max((len(cell) for row in rows for cell in row[2:]), default=0)
    assert max(map(len, shown), default=0) <= max(width, longest + len("   bits per "))
