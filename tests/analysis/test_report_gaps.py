"""Reports of young, damaged, unusual or very long runs: gaps are reported, and not filled."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from analysis.report.data import read_run
from analysis.report.page import build_report
from tests.analysis.page import Page, page_of, rewrite
from tests.analysis.synthetic import PROMPTS, evaluation, write_run


def test_a_run_that_failed_says_why(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=3, ending="run_failed"))
    assert "The run failed. prompt 'a red <circle>' is left with 3 scored images of 96" in page.text
    assert "failed" in page.text and "no end recorded" not in page.text


def test_a_run_without_iterations_says_so(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=0, ending=None))
    for message in (
        "No iteration has ended, so there are no curves yet.",
        "no end recorded",
        "0 of 20",
        "The evaluation after training is still to come.",
        "The images after training are still to come.",
    ):
        assert message in page.text, message
    assert len(page.all("img")) == len(PROMPTS) * 4


def test_a_run_of_one_iteration(tmp_path: Path):
    page = page_of(write_run(tmp_path / "r", iterations=1))
    assert "1 of 20" in page.text and "after 1 iterations" in page.text


def test_a_report_of_an_active_run(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=4, ending=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "iteration", "iteration": 4, "rew')  # a line that is being written
    page = page_of(run)
    assert "4 of 20" in page.text and "could not be read" not in page.text


def test_a_report_with_only_a_configuration(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"config": {"name": "early"}}')
    page = page_of(tmp_path)
    for message in (
        "early",
        "Held-out prompts have not been scored yet.",
        "No rewards have been recorded yet.",
        "No events were recorded.",
        "No images have been made yet.",
    ):
        assert message in page.text, message


def test_a_report_without_configuration_and_with_damaged_lines(tmp_path: Path):
    rows = [
        json.dumps(evaluation(0, 0.5, 0.1)),
        "{broken",
        "[1, 2]",
        json.dumps({"kind": "iteration", "iteration": 0, "reward/train_mean": 0.4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    page = page_of(tmp_path)
    assert "config.json is missing." in page.text
    assert "metrics.jsonl: 2 lines could not be read and are ignored." in page.text
    assert tmp_path.name in page.text and "0.500" in page.text


def test_a_directory_that_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError,
        match=(r"nothing-here is not a run directory: it has none of config\.json"),
    ):
        build_report(tmp_path / "nothing-here")
    assert not (tmp_path / "nothing-here").exists()


def test_missing_and_nan_numbers_are_shown_as_gaps(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=5)

    def damage(rows: list[dict]) -> list[dict]:
        for row in rows:
            if row["kind"] == "iteration":
                row["loss/policy"] = None
                row["grad_norm"] = math.nan if row["iteration"] == 2 else 1.0
                row["audit/kendall_tau"] = math.nan
                row["time/explore_s"] = math.inf
        rows[-1] |= {"eval/gain": None, "eval/gain_stderr": None, "eval/stderr": None}
        return rows

    rewrite(run / "metrics.jsonl", damage)
    text = build_report(run).read_text()
    page = Page(text)
    coordinates = re.findall(
        r'(?:points|x1?|x2|y1?|y2|cx|cy|width|height|left)[=:]"?([^";]*)', text
    )
    assert not any("nan" in value or "inf" in value for value in coordinates)
    assert "Policy loss" not in page.text
    assert "+0.118 difference of the two means, not paired." in page.text
    assert "no standard error" in page.text
    assert text.count("<polyline") >= 1
    grad = text[
        (
            text.index("grad_norm by iteration")
            if "grad_norm by iteration" in text
            else text.index("Gradient norm by iteration")
        ) :
    ]
    # the curve is interrupted where the value was not finite
    assert grad[: grad.index("</svg>")].count("<polyline") == 2


@pytest.mark.parametrize("size", [1e-15, 1e-300, 5e-324, 1e308])
def test_numbers_of_any_size_are_drawn(tmp_path: Path, size: float):
    """The KL of a first iteration is often mere rounding."""
    run = write_run(tmp_path / "r", iterations=3)
    counted = itertools.count()

    def change(rows: list[dict[str, object]]) -> list[dict[str, object]]:
        found = {name: size * (next(counted) % 3 - 1) for name in ("loss/kl", "reward/train_mean")}
        return [row | (found if row["kind"] == "iteration" else {}) for row in rows]

    rewrite(run / "metrics.jsonl", change)
    assert page_of(run).all("svg")


def test_incomplete_records_are_drawn_without_the_missing_part(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 1763700099.0, "event": "pool_scaled", "kind": "rollout"}\n')
    names = run / "images" / "prompts.json"
    rows = json.loads(names.read_text())
    names.write_text(json.dumps([rows[0] | {"index": -(10**9)}, *rows[1:]]))
    assert "pool scaled" in page_of(run).text


def test_a_lost_evaluation_reward_is_not_a_gain_of_zero(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1)
    rewrite(run / "metrics.jsonl", lambda rows: rows[:-1] + [evaluation(1, math.nan, math.nan)])
    assert "The gain is unknown" in page_of(run).text


def test_a_report_of_an_arm_without_exploration(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    config = json.loads((run / "config.json").read_text())
    config["config"]["arm"] = "diffusionnft"
    (run / "config.json").write_text(json.dumps(config))
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [
            {k: v for k, v in row.items() if not k.startswith(("explore", "audit"))} for row in rows
        ],
    )
    page = page_of(run)
    assert "24 seeds per prompt at 10 steps, all trained on" in page.text
    assert "This run does not explore: all seeds were trained on." in page.text
    assert "Nothing to compare" in page.text


def test_random_audits_have_their_own_chart_and_conclusion(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [
            row | ({"audit/random_kendall_tau": 0.5} if row["kind"] == "iteration" else {})
            for row in rows
        ],
    )
    page = page_of(run)
    assert "Random seeds" in page.text
    assert (
        "Of any two random seeds of a prompt, the cheap images put 75 % in the right order."
        in page.text
    )  # (1 + tau) / 2


def test_several_scorers_each_have_a_curve_and_a_row(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [
            row
            | ({"reward/eval/jpeg": -3.5 + row["iteration"]} if row["kind"] == "evaluation" else {})
            for row in rows
        ],
    )
    page = page_of(run)
    assert "Scorer shapes" in page.text and "Scorer jpeg" in page.text
    assert "jpeg −3.500 −1.500 +2" in page.text


def test_evaluations_of_other_weights_are_not_mixed_in(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=2)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: rows[:1] + [evaluation(1, 0.111, 0.1) | {"weights": "old"}] + rows[1:],
    )
    assert [row["reward/eval_mean"] for row in read_run(run).evaluations] == [0.6667, 0.7849]


def test_rows_written_again_after_a_resume_count_once(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    rewrite(
        run / "metrics.jsonl",
        lambda rows: (
            rows
            + [
                next(r for r in rows if r["kind"] == "iteration" and r["iteration"] == 1)
                | {"loss/kl": 7.0}
            ]
        ),
    )
    kept = read_run(run).iterations
    assert [row["iteration"] for row in kept] == [0, 1, 2] and kept[1]["loss/kl"] == 7.0


def test_a_long_run_stays_small(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1500)
    page = build_report(run)
    assert page.stat().st_size < 3_000_000
    assert "Numbers of every 5th iteration" in Page(page.read_text()).text


def test_overlapping_seconds_are_listed_but_not_stacked(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3)
    plain = page_of(run).text
    more = {"time/explore_ahead_s": 20.0, "time/allreduce_s": 1.5, "time/replica_wait_s": 0.5}
    rewrite(
        run / "metrics.jsonl",
        lambda rows: [row | (more if row["kind"] == "iteration" else {}) for row in rows],
    )
    page = page_of(run)
    totals = plain[plain.index("In total") : plain.index("images explored per second")]
    assert totals in page.text  # equal shares of equal times
    assert "Included in other bars, so not stacked: 1 min 00 s exploring before" in page.text
    assert (
        "4.5 s summing the replicas' gradients, part of update; 1.5 s waiting for the slowest"
        " replica" in page.text
    )
    assert "not stacked" not in plain
