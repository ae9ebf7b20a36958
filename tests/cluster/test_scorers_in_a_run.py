"""Scorers in a whole run: a mix of three on the shapes model, and one that dies, hangs or returns
wrong results.

A scorer of weight 0 changes no reward, so a run that survives its failures must end with the bits
of the undisturbed one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.analysis.page import page_of
from tests.cluster.runs import adapters, main_here, run_here, selections, tiny_config
from tests.rewards.detectors import make_detector
from tests.rewards.speaking import ANY, make_judge
from tests.test_shapes_clip import needs_clip

MIX = (
    '[{name = "shapes"}, {name = "clipscore", settings = {checkpoint = "shapes/clip"}}, '
    '{name = "jpeg_incompressibility", weight = 0.5}]'
)


SMALL = {
    **{"iterations": 1, "prompts.per_iteration": 2, "selection.keep": 4},
    **{"explore.pool_size": 8, "explore.chunk_size": 8, "explore.steps": 2},
    **{"regenerate.steps": 3, "optimizer.batch_size": 8},
    **{"evaluate.steps": 3, "evaluate.prompts": 2, "evaluate.noises": 2},
}


def trained(
    root: Path, capsys: pytest.CaptureFixture[str], changes: Mapping[str, Any]
) -> RunDirectory:
    """Run a small quickstart by the command; ``changes`` includes its name."""
    given = {**SMALL, "run_root": root, **changes}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    assert main_here("train", "quickstart", *words) == 0, capsys.readouterr().err
    return RunDirectory(root / changes["name"])


@needs_clip
def test_three_scorers_train_the_shapes_model_end_to_end(ray_here, tmp_path, capsys):
    """Scores are normalized per group; every scorer is in the rows of training and evaluations, and
    in the report.
    """
    run = trained(
        tmp_path,
        capsys,
        {
            **{"name": "mix", "rewards.scorers": MIX, "rewards.normalize": "zscore"},
            **{"explore.chunk_size": 4, "evaluate.prompts": 4},
        },
    )
    rows = run.metrics()
    labels = ("shapes", "clipscore", "jpeg_incompressibility")
    for row in (row for row in rows if row["kind"] == "iteration"):
        assert row["rewards/failed"] == 0 and row["grad_norm"] > 0
        assert 0 <= row["reward/shapes"] <= 1
        assert -1 <= row["reward/clipscore"] <= 1
        assert row["reward/jpeg_incompressibility"] > 0.3
        assert all(row[f"rewards/images_per_s/{label}"] > 0 for label in labels)
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert len(evaluations) == 2
    for row in evaluations:  # not normalized: the weighted sum of the raw scores
        raw = [row[f"reward/eval/{label}"] for label in labels]
        assert row["reward/eval_mean"] == pytest.approx(raw[0] + raw[1] + 0.5 * raw[2], rel=1e-5)
    kept = json.loads((run.path / "evaluations" / "step_000001.json").read_text())["scores"]
    assert set(kept) == set(labels)
    assert all(len(grid) == 4 and len(grid[0]) == 2 for grid in kept.values())
    text = page_of(run.path).text
    assert all(f"Scorer {label}" in text for label in labels)
    assert "Changes of all scorers" in text


@pytest.mark.slow
@needs_clip
def test_geneval_prompts_train_with_a_detector_end_to_end(ray_here, tmp_path, capsys):
    """Prompts have the benchmark's metadata; the Mask2Former is random, so its detections are
    arbitrary.
    """
    make_detector(tmp_path / "detector", names=("circle", "square"))
    row = {"tag": "colors", "include": [{"class": "circle", "count": 2, "color": "red"}]}
    for part, colors in (("train", ("red", "blue", "green")), ("test", ("yellow", "purple"))):
        lines = [json.dumps({"prompt": f"a {color} circle", **row}) for color in colors]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    settings = {"detector": str(tmp_path / "detector"), "clip": "shapes/clip", "threshold": 0.0}
    recorded = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    run = trained(
        tmp_path,
        capsys,
        {
            "name": "geneval",
            "rewards.scorers": f'[{{name = "geneval", settings = {{{recorded}}}}}]',
            "prompts.train": tmp_path / "train.jsonl",
            "prompts.test": tmp_path / "test.jsonl",
        },
    )
    rows = run.metrics()
    (training,) = (row for row in rows if row["kind"] == "iteration")
    assert training["rewards/failed"] == 0 and 0 <= training["reward/geneval"] <= 1
    (first, last) = (row["reward/eval/geneval"] for row in rows if row["kind"] == "evaluation")
    assert 0 <= first <= 1 and 0 <= last <= 1


@pytest.mark.slow
def test_a_generative_scorer_trains_end_to_end(ray_here, tmp_path, capsys):
    """It is a Qwen2.5-VL with random weights that writes one of five digits for each image."""
    make_judge(tmp_path / "judge", ("Final Score: ", ANY))
    settings = {"checkpoint": str(tmp_path / "judge"), "form": "final", "dtype": "fp32"}
    recorded = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    run = trained(
        tmp_path,
        capsys,
        {
            "name": "unifiedreward",
            "rewards.scorers": f'[{{name = "unifiedreward", settings = {{{recorded}}}}}]',
        },
    )
    rows = run.metrics()
    (training,) = (row for row in rows if row["kind"] == "iteration")
    assert training["rewards/failed"] == 0 and training["grad_norm"] > 0
    assert 0.2 <= training["reward/unifiedreward"] <= 1
    (first, last) = (
        row["reward/eval/unifiedreward"] for row in rows if row["kind"] == "evaluation"
    )
    assert 0.2 <= first <= 1 and 0.2 <= last <= 1


def troubled(model: Any, root: Any, kind: str, **more: Any) -> Any:
    """Return the undisturbed run's configuration with an additional failing scorer of weight 0."""
    bad = {"name": "tests.cluster.scorers:Misbehaves", "alias": "bad", "weight": 0.0}
    bad |= {"settings": {"kind": kind, "mark": str(root / "mark")}, **more.pop("scorer", {})}
    return tiny_config(
        model,
        root,
        kind.replace(" ", "_"),
        rewards__scorers=[{"name": "jpeg_compressibility"}, bad],
        **more,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "why"), [("once dies", "died"), ("once hangs", "no answer for 10 s")]
)
def test_a_killed_or_hanging_scorer_costs_only_an_actor(
    undisturbed, tiny_sd3_dir, tmp_path, kind, why
):
    run = run_here(troubled(tiny_sd3_dir, tmp_path, kind, services__reward__deadline_s=10.0))
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)
    events = run.events()
    assert events[-1]["event"] == "run_finished"
    # more than one on a very busy machine
    died = [event for event in events if event["event"] == "actor_died"]
    assert {event["kind"] for event in died} == {"reward"}
    assert any(why in event["why"] for event in died)
    assert any(event["event"] == "chunk_reissued" and event["kind"] == "reward" for event in events)
    assert all(row["rewards/failed"] == 0 for row in run.metrics() if row["kind"] == "iteration")


@pytest.mark.timeout(600)
def test_an_invalid_scorer_is_ignored_if_optional_and_ends_the_run_if_required(
    undisturbed, tiny_sd3_dir, tmp_path
):
    run = run_here(troubled(tiny_sd3_dir, tmp_path, "nan", scorer={"required": False}))
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)
    rows = run.metrics()
    for row in (row for row in rows if row["kind"] == "iteration"):
        # explored and regenerated
        assert row["rewards/failed"] == 0 and row["rewards/stood_in"] == 2 * 8 + 2 * 4
        assert "reward/bad" not in row
    for row in (row for row in rows if row["kind"] == "evaluation"):
        assert row["reward/eval/bad"] is None or math.isnan(row["reward/eval/bad"])
        assert row["eval/unscored/bad"] == 4 * 2
    required = troubled(tiny_sd3_dir, tmp_path, "nan").model_copy(update={"name": "required"})
    with pytest.raises(
        RunFailed,
        match=(
            "scoring failed for 8 of 8 images.*max_failed_share.*'bad' returned nan for image 0"
        ),
    ):
        run_here(required)
    assert RunDirectory.of(required).events()[-1]["event"] == "run_failed"
