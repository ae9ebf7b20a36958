"""OCR scorer: the requested text, its distance from the text read, and the reader if it is
installed.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerSetupError, build
from rewards.ocr import (
    OcrScorer,
    fraction_read,
    normalize_text,
    substring_edit_distance,
    wanted_text,
)


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        ('a sign that says "Open 24 h"', ["Open 24 h"]),
        ("the dog's 'big bone' isn't here", ["big bone"]),
        ("\u201ceins\u201d and \u00abdeux\u00bb, \u300c\u4e09\u300d", ["eins", "deux", "\u4e09"]),
        ('"one" over "two"', ["one", "two"]),
    ],
)
def test_quoted_text_is_expected(prompt, pieces):
    assert wanted_text(prompt, {}) == pieces


def test_expected_text_comes_from_metadata_or_quotes():
    assert wanted_text('"no"', {"text": "yes"}) == ["yes"]
    assert wanted_text("", {"text": ["a", "b"]}) == ["a", "b"]
    for prompt in ("a red circle", "the dog's bone", '" "'):
        with pytest.raises(ValueError, match="contains no quoted text"):
            wanted_text(prompt, {})


def levenshtein(a: str, b: str) -> int:
    """Compute the distance by the textbook recursion."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        levenshtein(a[1:], b[1:]) + (a[0] != b[0]),
        levenshtein(a[1:], b) + 1,
        levenshtein(a, b[1:]) + 1,
    )


@given(st.text("abc", max_size=4), st.text("abc", max_size=5))
def test_substring_edit_distance_is_the_minimum_over_substrings(piece, text):
    stretches = {text[i:j] for i in range(len(text) + 1) for j in range(i, len(text) + 1)}
    assert substring_edit_distance(piece, text) == min(
        levenshtein(piece, stretch) for stretch in stretches
    )


@pytest.mark.parametrize(
    ("expected", "read", "share"),
    [
        (["Hello World"], "HELLO  world", 1.0),
        (["hello"], "say hello there", 1.0),
        (["hello"], "hallo", 0.8),  # one letter of five
        (["hello"], "", 0.0),
        (["hello"], "zzz", 0.0),
        (["ab", "cdefgh"], "ab", 0.25),  # two of eight letters
    ],
)
def test_the_score_is_the_fraction_that_is_read(expected, read, share):
    assert fraction_read(expected, read) == pytest.approx(share)


def test_case_and_space_do_not_count():
    assert normalize_text(" Stra\u00dfe  1\n") == "strasse1"


def test_without_the_ocr_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(ScorerSetupError, match=r"scorer 'ocr': .*pip install 'sol-rl\[ocr\]'"):
        build(ScorerConfig(name="ocr"))


def test_without_a_library_of_the_system_one_line_says_which_opencv_needs(monkeypatch, tmp_path):
    """As in ``cv2`` on a server: the package is there, and raises when it is imported."""
    missing = "libGL.so.1: cannot open shared object file"
    (tmp_path / "rapidocr_onnxruntime.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.delitem(sys.modules, "rapidocr_onnxruntime", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScorerSetupError, match=rf"scorer 'ocr': {missing} \(OpenCV needs libgl1"):
        build(ScorerConfig(name="ocr"))


def test_the_ocr_scorer_reads_text():
    pytest.importorskip("rapidocr_onnxruntime", reason="pip install 'sol-rl[ocr]'")

    def written(text: str, colour: str = "black") -> np.ndarray:
        image = Image.new("RGB", (320, 120), "white")
        ImageDraw.Draw(image).text(
            (20, 30), text, fill=colour, font=ImageFont.load_default(size=40)
        )
        return np.asarray(image).transpose(2, 0, 1)

    images = np.stack([written("Hello World"), written("Hello"), written(""), written("Zyx")])
    scorer = OcrScorer()
    scores = scorer(images, ['"hello world"'] * 4, [{}] * 4)
    assert scores.dtype == np.float32
    assert scores[0] == 1.0
    assert scores[1] == pytest.approx(0.5)
    assert scores[2] == 0.0
    assert scores[3] < 0.3
    assert scorer.read(written("Hello", "red")) == "Hello"
