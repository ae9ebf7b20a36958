"""The report's rewards: training scorers beside held-out ones, with scores, changes and errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.compare.statistics import Mean
from analysis.report.data import read_run
from analysis.report.events import lanes_of
from analysis.report.parts import TEMPLATES, Cell, Table
from analysis.report.rewards import direction, paired, scores_of, verdicts
from tests.analysis.page import Page, page_of, rewrite
from tests.analysis.synthetic import write_run

BASE = [[0.2, 0.4], [0.3, 0.5]]
UP = [[0.3, 0.5], [0.42, 0.62]]  # +0.10 and +0.12 by prompt: 0.11 +- 0.01
DOWN = [[0.1, 0.3], [0.16, 0.36]]  # -0.10 and -0.14: -0.12 +- 0.02
MIXED = [[0.3, 0.5], [0.2, 0.4]]  # +0.1 and -0.1: 0 +- 0.1


def learned(
    path: Path,
    changed: dict[str, Any],
    held_out: Sequence[str] = (),
    gain: float = 0.1,
    **more: Any,
) -> Path:
    """Write a run of two iterations whose scorers change from BASE to ``changed``.

    ``more`` is added to rows, by the scorer's label.
    """
    run = write_run(path, iterations=2)
    root = json.loads((run / "config.json").read_text())
    own = [{"name": label} for label in changed if label not in held_out]
    root["config"]["rewards"] = {
        "scorers": own,
        "evaluation_scorers": [{"name": label} for label in held_out],
    }
    (run / "config.json").write_text(json.dumps(root))

    def means(grids):
        return {f"reward/eval/{label}": sum(map(sum, g)) / 4 for label, g in grids.items()}

    after = {label: grid for label, grid in changed.items() if grid}

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in rows:
            row.pop("reward/eval/shapes", None)
            if row["kind"] == "iteration":
                row |= {
                    f"rewards/images_per_s/{label}": 200.0 + 100 * row["iteration"]
                    for label in changed
                    if label not in held_out
                }
            else:
                row |= means(after if row["iteration"] else dict.fromkeys(changed, BASE))
        rows[-1] |= {"eval/gain": gain, "eval/gain_stderr": 0.01} | more
        return rows

    rewrite(run / "metrics.jsonl", change)
    for step, grids in ((0, dict.fromkeys(changed, BASE)), (2, after)):
        file = run / "evaluations" / f"step_{step:06d}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"scores": grids}))
    return run


def test_changes_are_paired_by_image_and_their_errors_clustered_by_prompt():
    change = paired(BASE, UP)
    assert (change.mean, change.error, change.count) == (
        pytest.approx(0.11),
        pytest.approx(0.01),
        2,
    )
    lost = [[math.nan, 0.5], [0.42, 0.62]]  # an image without a score is omitted on both sides
    assert paired(BASE, lost).mean == pytest.approx(0.11)
    assert paired(BASE, [[math.nan] * 2, [0.4, 0.6]]) == Mean(
        pytest.approx(0.1), pytest.approx(math.nan, nan_ok=True), 1
    )
    assert paired([], UP).count == 0


def test_a_change_within_two_standard_errors_is_not_significant():
    assert direction(Mean(0.11, 0.05, 9)) == "rose" and direction(Mean(-0.11, 0.05, 9)) == "fell"
    assert {
        direction(Mean(0.1, 0.05, 9)),
        direction(Mean(0.5, math.nan, 1)),
        direction(Mean(math.nan, 0.1, 0)),
    } == {"did not clearly move"}


@pytest.mark.parametrize(
    ("evaluated", "gain", "message"),
    [
        (
            UP,
            0.1,
            "The reward rose; jpeg_compressibility, which is never trained on, rose: it agrees.",
        ),
        (DOWN, 0.1, "never trained on, fell: this is typical of reward hacking."),
        (MIXED, 0.1, "never trained on, did not clearly move: it does not confirm the rise."),
        (
            UP,
            0.01,
            (
                "The reward did not clearly move; jpeg_compressibility, which is never trained on,"
                " rose."
            ),
        ),
    ],
)
def test_the_held_out_scorer_has_a_conclusion(
    tmp_path: Path, evaluated: Any, gain: float, message: str
):
    run = read_run(
        learned(
            tmp_path / "r",
            {"clipscore": UP, "jpeg_compressibility": evaluated},
            ["jpeg_compressibility"],
            gain,
        )
    )
    (found,) = verdicts(run, scores_of(run))
    assert found.endswith(message)


def test_a_rise_at_the_expense_of_another_scorer_is_reported(tmp_path: Path):
    run = read_run(learned(tmp_path / "r", {"clipscore": UP, "hpsv2": DOWN, "pickscore": MIXED}))
    assert verdicts(run, scores_of(run)) == [
        "clipscore rose while hpsv2 fell: the rise came at the expense of the other scores."
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    changed = {"jpeg_compressibility": DOWN, "clipscore": UP}
    return page_of(
        learned(
            tmp_path_factory.mktemp("r"),
            changed,
            ["jpeg_compressibility"],
            **{"eval/unscored/clipscore": 3},
        )  # type: ignore[arg-type]
    )


def test_training_and_held_out_scorers_are_in_one_table(page: Page):
    """Before, after, paired change and error, images without a score, and the median of 200 and 300
    images per second.
    """
    assert "score before after change not scored images per s" in page.text
    assert "weighted sum what is optimized 0.6667 0.7849 +0.100 ± 0.010 clipscore" in page.text
    assert (
        "clipscore trained on, weight 1 0.3500 0.4600 +0.110 ± 0.010 3 250 jpeg_compressibility"
        in page.text
    )
    assert (
        "jpeg_compressibility held out, never trained on 0.3500 0.2300 −0.120 ± 0.020" in page.text
    )


def test_all_scores_are_drawn_on_one_scale(page: Page):
    """The unit is the deviation of BASE, sqrt(0.0125) = 0.1118: 0.11 is 0.984 units, -0.12 is
    -1.07.
    """
    assert (
        "Changes of all scorers clipscore 0.984 jpeg_compressibility, held out −1.07" in page.text
    )
    assert "Scorer clipscore" in page.text and "Scorer jpeg_compressibility" in page.text


def test_unreadable_scores_leave_the_means(tmp_path: Path):
    run = learned(tmp_path / "r", {"clipscore": UP, "hpsv2": DOWN})
    for file in (run / "evaluations").glob("*.json"):
        file.write_text(
            json.dumps(
                json.loads(file.read_text()) | {"scores": {"clipscore": [1, 2], "hpsv2": "none"}}
            )
        )
    page = page_of(run)
    assert "clipscore trained on, weight 1 0.3500 0.4600 +0.110 " in page.text
    assert "±" not in page.text.split("weight 1")[1][:30]
    assert "What rose" not in page.text


def test_actors_of_one_scorer_have_lanes_beside_the_reward_actors():
    kinds = ("learner", "scorers.clipscore", "reward", "rollout", "scorers.b")
    events = [{"event": "actor_started", "kind": kind, "actor": 0} for kind in kinds]
    assert list(lanes_of(events, [0.0] * 5)) == [
        "rollout-0",
        "reward-0",
        "scorers.b-0",
        "scorers.clipscore-0",
        "learner-0",
    ]


def test_a_table_escapes_cells_and_aligns_numbers():
    found = Table(
        ("<a>", "b"),
        [("x & y", Cell("1", "wide", title='"q"', bar=(3, 7.6))), ("z", "2")],
        kind="events",
    )
    text = str(TEMPLATES.get_template("parts.html").module.table(found))  # type: ignore[attr-defined]
    assert re.sub(r"\n", "", text) == (
        '<div class="scroll"><table class="events"><thead><tr><th>&lt;a&gt;</th><th'
        ' class="n">b</th></tr></thead><tbody><tr><td>x &amp; y</td><td class="n wide"'
        ' title="&#34;q&#34;"><span class="bar bg-3" style="width:8px"></span>1</td></tr>'
        '<tr><td>z</td><td class="n">2</td></tr></tbody></table></div>'
    )
    with pytest.raises(ValueError, match="another length"):
        Table(("a",), [("1", "2")])
