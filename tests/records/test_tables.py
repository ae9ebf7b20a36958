"""Aligned columns of tables."""

import pytest

from records.tables import aligned, markdown


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [["actor", "n"], ["a", "10"]]
    assert aligned(rows) == ["actor  n", "a      10"]
    assert aligned(rows, right=True) == ["actor   n", "    a  10"]


def test_markdown_rules_have_at_least_three_dashes():
    assert markdown(["what", "s"], [["a", "1.25"]]) == [
        "| what | s    |",
        "| ---- | ---- |",
        "| a    | 1.25 |",
    ]
    assert markdown(["", "s"], []) == ["|     | s   |", "| --- | --- |"]


def test_a_row_with_another_number_of_cells_is_refused():
    with pytest.raises(ValueError, match="argument 2 is"):
        aligned([["a", "b"], ["c"]])
