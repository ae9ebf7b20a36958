"""The page of a running run reloads itself and states when it was written; that of an ended run
does not.

Both show which images the reward prefers.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from analysis.report.extremes import OPEN
from analysis.report.live import Live
from analysis.report.page import build_report
from cli.main import main
from records import lock
from records.extremes import Extreme, save_extremes
from tests.analysis.page import Page
from tests.analysis.synthetic import write_run


def image(value: int, size: int = 32) -> np.ndarray:
    return np.full((3, size, size), value, np.uint8)


def keep(run: Path, *iterations: int) -> None:
    shown = [
        Extreme(0, "two <b>dots</b>", "explored", "best", 5, 0.75, image(10), 0.5),
        Extreme(0, "two <b>dots</b>", "explored", "worst", 1, 0.25, image(20), 0.1875),
        Extreme(0, "two <b>dots</b>", "regenerated", "best", 2, 0.875, image(30), 0.625),
        Extreme(0, "two <b>dots</b>", "regenerated", "worst", 1, 0.1875, image(40, 120), 0.25),
    ]
    for iteration in iterations:
        save_extremes(run / "images", iteration, shown, 50)


def live_page(run: Path, live_s: float = 100) -> tuple[str, Page]:
    text = build_report(run, live_s).read_text(encoding="utf-8")
    return text, Page(text)


def test_a_page_of_an_active_run_reloads(tmp_path: Path):
    text, page = live_page(write_run(tmp_path / "r", iterations=3, ending=None))
    (body,) = page.all("body")
    assert body["data-reload"] == "25" and body["data-late"] == "360"
    assert '<noscript><meta http-equiv="refresh" content="25"></noscript>' in text
    assert "going on" in page.text and "No end was recorded" not in page.text
    assert re.search(r"Written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC during the run", page.text)
    (late,) = (found for found in page.all("div") if found.get("id") == "late")
    assert "hidden" in late and "the driver was killed" in page.text


def test_the_browser_runs_only_the_hashed_program(tmp_path: Path):
    text, page = live_page(write_run(tmp_path / "r", iterations=1, ending=None))
    (program,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    policy = page.all("meta")[1]["content"]
    before = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert policy == f"{before}; script-src 'sha256-{digest}'"
    assert "fetch" not in program and "http" not in program and "innerHTML" not in program


@pytest.mark.parametrize("ending", ["run_finished", "run_failed", "run_stopped"])
def test_a_page_of_an_ended_run_does_not_reload(tmp_path: Path, ending: str):
    text, page = live_page(write_run(tmp_path / "r", iterations=3, ending=ending))
    assert "<script" not in text and "refresh" not in text and "Written" not in page.text


def test_reload_times_are_bounded():
    assert [Live(0, every).reload_s for every in (1, 20, 120, 3600)] == [5, 5, 30, 60]
    assert [Live(0, every).late_s for every in (20, 120, 3600)] == [120, 420, 10860]
    assert Live(1.5, 5).moment == "1970-01-01 00:00:01 UTC"


def test_the_report_command_keeps_open_pages_reloading(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1, ending=None)
    (run / "lock").write_text("")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "No end was recorded" in page and "<script" not in page
    with lock.exclusive_lock(run / "lock", "a run", ""):
        assert lock.is_locked(run / "lock")
        assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert 'data-reload="30"' in page and "No end was recorded" not in page
    assert not lock.is_locked(run / "lock") and not lock.is_locked(run / "nowhere")


def test_best_and_worst_with_their_rewards(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=9)
    keep(run, 0, 3, 8)
    page = Page(build_report(run).read_text(encoding="utf-8"))
    at = page.text.index("Iteration 9 ")
    assert at < page.text.index("Iteration 4 ") < page.text.index("Iteration 1 ")
    first = page.text[at : page.text.index("Iteration 4 ")]
    message = (
        "two <b>dots</b> best explored 0.750 seed 5 (regenerated: 0.500)"
        " regenerated 0.875 seed 2 (explored: 0.625)"
        " worst explored 0.250 seed 1 regenerated 0.188 seed 1"
    )
    assert " ".join(first.split()).removeprefix("Iteration 9 ") == message
    assert "3 of 9 iterations" in page.text
    shown = [found for found in page.all("img") if "dots" in str(found["alt"])]
    assert [str(found["src"])[:15] for found in shown[:4]] == 3 * ["data:image/png;"] + [
        "data:image/jpeg"
    ]
    assert [found.get("class") for found in shown[:4]] == ["tiny", "tiny", "tiny", None]
    assert shown[0]["alt"] == (
        "best explored: two <b>dots</b>, seed 5 (regenerated: 0.500), reward 0.750"
    )


def test_older_iterations_are_folded_and_missing_images_are_gaps(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=OPEN + 2)
    keep(run, *range(OPEN + 2))
    (run / "images" / "iteration_000002" / "0_explored_best.png").unlink()
    text = build_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert (
        text.index("Iteration 3<") < text.index("Earlier iterations") < text.index("Iteration 2<")
    )
    assert "evenly spread" not in page.text
    holes = [found for found in page.all("span") if found.get("class") == "hole"]
    assert [hole["title"] for hole in holes if "dots" in str(hole["title"])] == [
        "best explored: two <b>dots</b>, seed 5 (regenerated: 0.500), reward 0.750: not there"
    ]
