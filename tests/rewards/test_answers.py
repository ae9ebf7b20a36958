"""Numbers in texts: which one is read, and that no text gives one out of range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.answers import numbers_after

FINAL = ["Final Score:"]
AXES = ["Alignment Score (1-5):", "Style Score (1-5):"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Final Score: 4", 4.0),
        ("Final Score:3.33\nas the cat is blue", 3.33),
        ("cat (object): 1\n**Final Score:** 2.5/5", 2.5),
        ("a sign that says Final Score: 5 (text): 1\nFinal Score: 1.5", 1.5),  # the last one
        ("Final Score: 1", 1.0),
        ("Final Score: 5.0.", 5.0),
        ("Final Score: 5.01", None),
        ("Final Score: 0", None),
        ("Final Score: -3", None),
        ("Final Score: 45", None),
        ("Final Score: good", None),
        ("Final Score: 4\nFinal Score: none", None),
        ("final score: 4", None),
        ("4", None),
        ("", None),
        ("Final Score: \u0663", None),  # a digit of another script
        (f"Final Score: {'9' * 400}", None),
    ],
)
def test_a_number_after_words_is_read(text, found):
    assert numbers_after(text, FINAL, 1, 5) == (None if found is None else [found])


def test_every_mark_has_its_own_number():
    text = "Alignment Score (1-5): 2.694700002670288\nStyle Score (1-5): 0.5"
    assert numbers_after(text, AXES, 0, 5) == [2.694700002670288, 0.5]
    assert numbers_after(text, AXES, 1, 5) is None  # one is out of range
    assert numbers_after(text[:50], AXES, 0, 5) is None  # one is missing


@pytest.mark.parametrize(
    ("text", "found"),
    [("Final Score: 3", None), ("Final Score: 3.", None), ("Final Score: 3.5 and", [3.5])],
)
def test_a_truncated_number_is_not_read(text, found):
    assert numbers_after(text, FINAL, 1, 5, ended=False) == found


@given(st.floats(1, 5), st.text(), st.text(st.characters(exclude_characters="0123456789.")))
def test_a_number_is_found_among_any_words(score, before, after):
    """Unless the words after it contain the mark themselves."""
    written = f"{score:.6f}"
    text = f"{before}Final Score: {written}{after}"
    expected = [float(written)] if "Final Score:" not in after else None
    assert numbers_after(text, FINAL, 1, 5) == expected


@given(st.lists(st.sampled_from([*"0123456789.-* \n", "Final Score:", "a"])), st.booleans())
def test_numbers_that_are_read_are_in_the_text(words, ended):
    text = "".join(words)
    found = numbers_after(text, FINAL, 1, 5, ended)
    if found is not None:
        (score,) = found
        assert 1 <= score <= 5 and "Final Score:" in text
        rest = text.rpartition("Final Score:")[2].lstrip(" \n*")
        assert float(rest[0]) == int(score)
