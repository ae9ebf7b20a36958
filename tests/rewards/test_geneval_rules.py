"""GenEval's rules: verdicts and shares for objects made by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.geneval_rules import Detection, Requirement, assess, parse_requirements, relations

CLASSES = ("bench", "cow", "dog", "tie")


def at(x: float, y: float, size: float = 10.0, score: float = 0.9) -> Detection:
    """Return a square object with this center."""
    half = size / 2
    return Detection((x - half, y - half, x + half, y + half), score)


def recorded(entries, objects, colors=()):
    """Return (correct, share); objects have ``colors`` in turn."""
    outcome = assess(entries, objects, lambda name, group: list(colors)[: len(group)])
    return outcome.correct, pytest.approx(outcome.share)


def test_one_object():
    entry = [Requirement("bench", 1)]
    assert recorded(entry, {"bench": [at(0, 0)]}) == (True, 1.0)
    # additional objects are no error here
    assert recorded(entry, {"bench": [at(0, 0), at(50, 0)]}) == (True, 1.0)
    assert recorded(entry, {"cow": [at(0, 0)]}) == (False, 0.0)


@pytest.mark.parametrize(
    ("count", "correct", "share"),
    [
        (0, False, 0),
        (1, False, 1 / 3),
        (2, False, 2 / 3),
        (3, True, 1),
        (4, False, 2 / 3),
        (9, False, 0),
    ],
)
def test_a_number_of_objects(count, correct, share):
    """As in the benchmark: include three, exclude four."""
    row = {"include": [{"class": "cow", "count": 3}], "exclude": [{"class": "cow", "count": 4}]}
    entries = parse_requirements("p", row, CLASSES)
    assert recorded(entries, {"cow": [at(20 * i, 0) for i in range(count)]}) == (correct, share)


def test_an_excluded_class_must_be_absent():
    row = {"include": [{"class": "dog", "count": 1}], "exclude": [{"class": "cow", "count": 1}]}
    entries = parse_requirements("p", row, CLASSES)
    assert recorded(entries, {"dog": [at(0, 0)]}) == (True, 1.0)
    assert recorded(entries, {"dog": [at(0, 0)], "cow": [at(50, 0)]}) == (False, 0.5)


def test_a_limit_holds_for_every_entry_of_its_class():
    cows = [{"class": "cow", "count": 1, "color": color} for color in ("red", "red")]
    entries = parse_requirements(
        "p", {"include": cows, "exclude": [{"class": "cow", "count": 2}]}, CLASSES
    )
    two = {"cow": [at(0, 0), at(50, 0)]}
    assert recorded(entries, two, ["red", "red"]) == (False, 0.0)


def test_a_color_counts_half_of_its_entry():
    entries = [Requirement("bench", 1, "red"), Requirement("cow", 1, "blue")]
    objects = {"bench": [at(0, 0)], "cow": [at(50, 0)]}
    seen = {"bench": ["red"], "cow": ["blue"]}
    assert assess(entries, objects, lambda name, group: seen[name]).correct
    seen["cow"] = ["green"]
    outcome = assess(entries, objects, lambda name, group: seen[name])
    assert (outcome.correct, outcome.share) == (False, (1 + 0.5) / 2)


def test_only_the_most_certain_detections_count():
    """One of two benches is requested: the color of the first one decides."""
    objects = {"bench": [at(0, 0), at(50, 0)]}
    assert recorded([Requirement("bench", 1, "red")], objects, ["red", "blue"]) == (True, 1.0)
    assert recorded([Requirement("bench", 2, "red")], objects, ["red", "blue"]) == (False, 0.5)


@pytest.mark.parametrize(
    ("x", "y", "found"),
    [
        (-50, 0, {"left of"}),
        (50, 0, {"right of"}),
        (0, -50, {"above"}),
        (0, 50, {"below"}),
        (-50, -50, {"left of", "above"}),
        (50, 20, {"right of"}),
        (0, 0, set()),
        (2, 2, set()),  # within a tenth of both sizes there is no distance
    ],
)
def test_relations_between_two_detections(x, y, found):
    assert relations(at(x, y), at(0, 0)) == found


def test_the_margin_is_a_tenth_of_both_sizes():
    """Sizes are 10 and 10: of a distance of 6, 6 - 2 is more than half; of 3.9, 3.9 - 2 is not."""
    assert relations(at(6, 0), at(0, 0)) == {"right of"}
    assert relations(at(3.9, 0), at(0, 0)) == set()


coordinate = st.floats(-500, 500).map(lambda value: round(value, 3))


@given(coordinate, coordinate, coordinate, coordinate, st.floats(1, 100), st.floats(1, 100))
def test_relations_are_antisymmetric(x, y, u, v, size, other):
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    one, two = at(x, y, size), at(u, v, other)
    assert relations(two, one) == {turned[name] for name in relations(one, two)}
    moved = relations(at(x + 1024, y - 512, size), at(u + 1024, v - 512, other))
    near = abs(math.hypot(x - u, y - v)) < 1e-6
    assert near or moved == relations(one, two) or len(moved ^ relations(one, two)) == 1


def test_a_position_requires_a_correct_target_entry():
    row = {
        "include": [
            {"class": "dog", "count": 1},
            {"class": "tie", "count": 1, "position": ["above", 0]},
        ]
    }
    entries = parse_requirements("p", row, CLASSES)
    assert recorded(entries, {"dog": [at(0, 50)], "tie": [at(0, 0)]}) == (True, 1.0)
    assert recorded(entries, {"dog": [at(0, 0)], "tie": [at(0, 50)]}) == (False, 0.75)
    assert recorded(entries, {"tie": [at(0, 0)]}) == (False, 0.25)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no GenEval metadata"),
        ({"include": [{"class": "unicorn", "count": 1}]}, "not a class with a count"),
        ({"include": [{"class": "cow"}]}, "not a class with a count"),
        ({"include": [{"class": "cow", "count": 0}]}, "not a class with a count"),
        (
            {"include": [{"class": "cow", "count": 1, "color": "mauve"}]},
            "unknown to GenEval: color 'mauve'",
        ),
        (
            {"include": [{"class": "cow", "count": 1, "position": ["inside", 0]}]},
            "unknown to GenEval: color None, relation 'inside'",
        ),
        (
            {"include": [{"class": "cow", "count": 1, "position": ["above", 0]}]},
            "not an earlier entry",
        ),
    ],
)
def test_invalid_metadata_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        parse_requirements("a cow", row, CLASSES)
