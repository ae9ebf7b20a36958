"""Formatting of plain values as TOML."""

import tomllib

from configs.toml_text import to_toml


def test_a_configuration_written_as_toml_reads_back_the_same():
    tree = {
        "a": 'quote " back \\ and \x7f ü \U0001f600',
        "b": {"c": [1, 2.5, 1e-20, True], "d.e": {"f": []}},
        "g": -3,
        "h": 1e300,
    }
    assert tomllib.loads(to_toml(tree | {"none": None})) == tree
