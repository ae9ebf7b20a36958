"""Results of a comparison: numbers computed by hand, tables, remarks, and existing runs."""

import json
import math
from pathlib import Path

import pytest

from analysis.compare.command import compare_existing
from analysis.compare.data import REWARD, measure, remarks, summarise
from analysis.compare.groups import group
from analysis.compare.statistics import Mean
from analysis.compare.table import tables
from configs.load import ConfigError, load
from tests.analysis.fake_train import write
from tests.analysis.page import Page
from tests.analysis.synthetic import write_run

SECONDS = {"explore": 2.0, "regenerate": 1.0, "update": 4.0, "publish": 0.5, "iteration": 8.0}


def configuration(root: Path, name: str, seed: int = 0, *overrides: str):
    return load("compare_small", [f"run_root={root}", f"name={name}", f"seed={seed}", *overrides])


@pytest.fixture
def results(tmp_path):
    """Write two cells of three seeds that gain 0.04 + 0.01 seed and twice that in four updates."""
    cells = []
    for name, factor, explore in (("slow", 1.0, 6.0), ("quick", 2.0, 1.0)):
        runs = []
        for seed in range(3):
            gains = [factor * (0.01 * i + 0.0025 * seed * i) for i in range(1, 5)]
            seconds = SECONDS | {"explore": explore, "iteration": 6.0 + explore}
            runs.append(
                measure(
                    write(
                        configuration(tmp_path, f"{name}{seed}", seed, "iterations=4"),
                        gains,
                        seconds,
                    ),
                    seed,
                )
            )
        cells.append((name, name, None, runs))
    return summarise([*cells, ("odd", "odd", "it cannot be", [])], "slow")


def test_numbers_of_a_known_cell(results):
    slow, quick, odd = results
    # final gains 0.04, 0.05, 0.06 and twice that; bases 0.50, 0.51, 0.52; s = 0.01 and 0.02
    # (rewards are float64: 1e-12)
    assert slow.gain[REWARD].mean == pytest.approx(0.05, abs=1e-12)
    assert slow.gain[REWARD].error == pytest.approx(0.01 / math.sqrt(3), abs=1e-12)
    assert slow.base[REWARD].mean == pytest.approx(0.51, abs=1e-12)
    assert quick.score[REWARD].mean == pytest.approx(0.61, abs=1e-12)
    # scores 0.58, 0.61, 0.64: s = 0.03; the difference of gains, paired, is 0.04, 0.05, 0.06
    assert quick.score[REWARD].error == pytest.approx(0.03 / math.sqrt(3), abs=1e-12)
    assert quick.against[REWARD] == Mean(
        pytest.approx(0.05, abs=1e-12), pytest.approx(0.01 / math.sqrt(3), abs=1e-12), 3
    )
    assert slow.against[REWARD].mean == 0 and slow.within == pytest.approx(0.02)
    assert quick.speed_ups == {"rollout": pytest.approx(7 / 2), "iteration": pytest.approx(12 / 7)}
    assert quick.stages["other"].mean == pytest.approx(7 - 1 - 1 - 4 - 0.5)
    # the target gain is 0.05; the slow cell gains 0.0125 in an iteration of 12 s, the quick one
    # 0.025 in 7 s
    assert slow.reach == {share: pytest.approx(share * 48) for share in (0.25, 0.5, 0.75, 1.0)}
    assert quick.reach == {share: pytest.approx(share * 14) for share in (0.25, 0.5, 0.75, 1.0)}
    assert odd.refused and odd.counted == () and odd.reach[1.0] is None


def test_the_tables_have_the_form_of_the_paper(results):
    scores, seconds, times = tables(results, "slow")
    assert scores.heads[2] == "reward (base 0.5100)"
    assert scores.rows[0] == ("slow", "3", "0.5600 ± 0.0115 (+0.0500 ± 0.0058)", "0.0200", "-")
    assert scores.rows[1] == (
        "quick",
        "3",
        "0.6100 ± 0.0173 (+0.1000 ± 0.0115)",
        "0.0200",
        "+0.0500 ± 0.0058",
    )
    assert scores.rows[2] == ("odd", "refused", "-", "-", "-")
    assert seconds.rows[1] == (
        "quick",
        "1.00",
        "1.00",
        "4.00",
        "0.50",
        "0.50",
        "2.00",
        "3.50x",
        "7.00 ± 0.00",
        "1.71x",
    )
    assert times.heads[4] == "100 % (0.0500)"
    assert times.rows[0][4] == "48.0"
    assert times.rows[1][4] == "14.0 (3.43x)"


def test_time_explored_ahead_counts_as_rollout(tmp_path):
    """Exploring for 2 s in its turn, or for 1.5 s of them ahead, is the same rollout of 2 + 1 s.

    The iteration of 8 s remains the same total.
    """
    ahead = SECONDS | {"explore": 0.5, "explore_ahead": 1.5}
    runs = [
        measure(write(configuration(tmp_path, name), [0.1, 0.2, 0.3], each), 0)
        for name, each in (("a", SECONDS), ("b", ahead))
    ]
    plain, other = summarise([("a", "a", None, runs[:1]), ("b", "b", None, runs[1:])], "a")
    assert other.stages["rollout"].mean == pytest.approx(3.0)
    assert other.stages["explore"].mean == pytest.approx(0.5)
    assert (
        other.speed_ups
        == plain.speed_ups
        == {"rollout": pytest.approx(1.0), "iteration": pytest.approx(1.0)}
    )


def test_misleading_comparisons_get_remarks(tmp_path):
    def run(name: str, seed: int, gains: list[float], **how):
        return measure(write(configuration(tmp_path, name, seed), gains, SECONDS, **how), seed)

    good = [run("a0", 0, [0.1, 0.2]), run("a1", 1, [0.1, 0.2])]
    other = [run("b0", 0, [0.1]), run("b1", 1, [0.3, 0.3], ending="run_failed")]
    # base 0.53 under seed 0
    shifted = [measure(write(configuration(tmp_path, "c0", 3), [0.1, 0.2], SECONDS), 0)]
    cells = [
        ("a", "a", None, good),
        ("b", "b", None, other),
        ("c", "c", None, shifted),
        ("d", "d", "no such pair", []),
    ]
    results = summarise(cells, "a")
    message = "\n".join(remarks(results, "a"))
    assert "d: refused: no such pair" in message
    assert "b, seed 1: excluded: failed: said so" in message
    assert "numbers of updates differ: a 2; b 1; c 2" in message
    assert "c: its evaluation before training differs from the baseline's" in message
    assert "b: its evaluation" not in message
    assert results[1].against[REWARD].count == 1 and tables(results, "a")[0].rows[1][1] == "1 of 2"
    none = summarise([("a", "a", None, [run("z", 0, [-0.1, -0.2])])], "a")
    assert remarks(none, "a") == [
        "the baseline has no gain, so there are no times to reach parts of it"
    ]


def test_run_directories_are_grouped_by_what_can_change_results(tmp_path):
    for name, seed, more in (
        ("a", 0, []),
        ("b", 1, ["services.rollout.actors=5"]),
        ("c", 0, ["explore.steps=3"]),
        ("d", 0, ["arm=diffusionnft"]),
    ):
        write(configuration(tmp_path, name, seed, *more), [0.1, 0.2], SECONDS)
    found = group([tmp_path])
    assert {title: [path.name for _, path in runs] for title, (_, runs) in found.items()} == {
        "sol_rl · explore.steps = 6": ["a", "b"],
        "sol_rl · explore.steps = 3": ["c"],
        "diffusionnft · explore.steps = 6": ["d"],
    }
    write(configuration(tmp_path, "again", 0, "logging.grid_prompts=2"), [0.1], SECONDS)
    with pytest.raises(ConfigError, match="the same configuration and run seed"):
        group([tmp_path])


def test_runs_that_were_evaluated_differently_are_not_compared(tmp_path):
    one = write(configuration(tmp_path, "a"), [0.1], SECONDS)
    other = write(configuration(tmp_path, "b", 0, "evaluate.noises=4"), [0.1], SECONDS)
    with pytest.raises(ConfigError, match="evaluate.noises: 2 in .*, 4 in "):
        group([one, other])
    with pytest.raises(ConfigError, match="no run found"):
        group([tmp_path / "nothing"])


def test_existing_runs_give_a_page_and_numbers(tmp_path):
    write_run(tmp_path / "quickstart")  # evaluations at both ends only
    text = compare_existing([tmp_path / "quickstart"], None, tmp_path / "out")
    assert any(line.startswith("| sol_rl ") and "0.7849 (+0.1182)" in line for line in text)
    assert any("no evaluations during training" in line for line in text)
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    (cell,) = numbers["cells"]
    assert cell["gain"][REWARD] == {
        "mean": pytest.approx(0.1182, abs=1e-9),
        "error": None,
        "count": 1,
    }
    assert cell["reach"] == {"0.25": None, "0.5": None, "0.75": None, "1": None}
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert "0.7849 (+0.1182)" in page.text and len(page.all("svg")) == 2
    assert not [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href")
    ]
    with pytest.raises(ConfigError, match="unknown cell; available: sol_rl"):
        compare_existing([tmp_path / "quickstart"], "awm", tmp_path / "out")


def test_a_page_of_several_cells_has_a_band_for_each_and_escapes_names(tmp_path):
    for seed in range(2):
        write(configuration(tmp_path, f"a{seed}", seed), [0.1, 0.2 + 0.1 * seed], SECONDS)
        write(
            configuration(tmp_path, f"b{seed}", seed, "explore.modules_to_not_convert=['<b>']"),
            [0.1, 0.3],
            SECONDS,
        )
    compare_existing([tmp_path], None, tmp_path / "out")
    page = Page((tmp_path / "out" / "compare.html").read_text())
    bands = [polygon for polygon in page.all("polygon") if "band" in (polygon["class"] or "")]
    assert len(bands) == 4 and not page.all("b>") and "'<b>'" in page.text
