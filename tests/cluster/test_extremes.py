"""Images of training: which are fetched and shown, and that results do not depend on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.driver.extremes import MOST_OPEN, Extremes, StageExtremes, best_and_worst, extremes
from configs.load import load
from configs.prompts import Prompt
from records.extremes import find_extremes
from records.images import read_image
from records.rundir import RunDirectory
from tests.cluster.runs import adapters, run_here, selections, tiny_config


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def batch(*values: int) -> np.ndarray:
    return np.stack([np.full((3, 4, 4), value, np.uint8) for value in values])


def iteration(index: int, prompts: int = 2) -> Any:
    return SimpleNamespace(index=index, prompts=[Prompt(f"text {p}") for p in range(prompts)])


class Fetched:
    """Stand-in for a reference that counts requests."""

    def __init__(self, value: Any):
        self.value, self.requested = value, 0

    def __await__(self) -> Any:
        self.requested += 1
        if isinstance(self.value, Exception):
            raise self.value
        yield from asyncio.sleep(0).__await__()
        return self.value


class Collected:
    """An ``Extremes`` in a run directory, with its notes and events."""

    def __init__(self, root: Path, **logging: int):
        options = [f"logging.{key}={value}" for key, value in logging.items()]
        config = load("quickstart", [f"run_root={root}", *options])
        self.rundir = RunDirectory.of(config)
        self.rundir.create(config)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.shown: list[int] = []
        self.extremes = Extremes(
            config, self.rundir, lambda name, **fields: self.events.append((name, fields)),
            self.notes.append, lambda index, _: self.shown.append(index),
        )  # fmt: skip

    def see(self, it: Any, prompt: int, stage: Any, seeds: Any, found: Any, *batches: Any) -> None:
        size = len(getattr(batches[0], "value", batches[0]))
        self.extremes.add(it, prompt, stage, seeds, found, batches, size)


def test_best_and_worst_skip_images_without_a_score():
    assert best_and_worst(rewards(0.5, np.nan, 0.9, 0.1, 0.9)) == (2, 3)
    assert best_and_worst(rewards(np.nan, np.nan)) == ()
    assert best_and_worst(rewards(0.3)) == (0, 0)


def test_extremes_record_the_seed_and_its_reward_in_the_other_stage():
    images = {0: batch(1)[0], 1: batch(2)[0], 2: batch(3)[0]}
    explored = StageExtremes((11, 12, 13), rewards(0.1, 0.9, 0.5), images)
    regenerated = StageExtremes((13, 12), rewards(0.8, np.nan), images)
    shown = extremes(["a"], {(0, "explored"): explored, (0, "regenerated"): regenerated})
    found = [(one.stage, one.end, one.seed, one.reward, one.other) for one in shown]
    assert found == [
        ("explored", "best", 1, pytest.approx(0.9), None),  # regenerated without a score
        ("explored", "worst", 0, pytest.approx(0.1), None),  # not regenerated
        ("regenerated", "best", 2, pytest.approx(0.8), pytest.approx(0.5)),
        ("regenerated", "worst", 2, pytest.approx(0.8), pytest.approx(0.5)),
    ]


def test_only_the_batches_of_the_two_images_are_fetched(tmp_path: Path):
    async def go() -> Collected:
        it, one = iteration(0), Collected(tmp_path, image_prompts=1)
        chunks = [Fetched(batch(10, 11)), Fetched(batch(20, 21)), Fetched(batch(30))]
        scores = rewards(0.4, 0.1, 0.5, 0.3, 0.9)
        one.see(it, 0, "explored", (7, 8, 9, 10, 11), scores, *chunks)
        one.see(it, 1, "explored", (1,), rewards(0.4), untouched := Fetched(batch(99)))
        one.extremes.finished(it)
        await one.extremes.close()
        assert [chunk.requested for chunk in (*chunks, untouched)] == [1, 0, 1, 0]
        return one

    one = asyncio.run(go())
    (kept,) = find_extremes(one.rundir.images)
    assert [(row["end"], row["seed"], row["text"]) for row in kept.rows] == [
        ("best", 4, "text 0"),
        ("worst", 1, "text 0"),
    ]
    values = [int(read_image(kept.directory / str(row["file"]))[0, 0, 0]) for row in kept.rows]
    assert values == [30, 11]
    assert one.shown == [0] and one.events == [] and one.notes == []


def test_with_zero_prompts_no_image_is_fetched_or_kept(tmp_path: Path):
    async def go() -> Collected:
        it, one = iteration(0), Collected(tmp_path, image_prompts=0)
        one.see(it, 0, "explored", (7, 8), rewards(0.4, 0.1), chunk := Fetched(batch(1, 2)))
        one.extremes.finished(it)
        await one.extremes.close()
        assert chunk.requested == 0
        return one

    one = asyncio.run(go())
    assert find_extremes(one.rundir.images) == [] and one.events == []


def test_lost_images_are_reported_and_later_ones_are_kept(tmp_path: Path):
    async def go() -> Collected:
        one = Collected(tmp_path)
        for index, value in enumerate((OSError("gone\nfar"), OSError("gone\nfar"), batch(5))):
            it = iteration(index)
            one.extremes.add(it, 0, "explored", (3,), rewards(1), [Fetched(value)], 1)
            one.extremes.finished(it)
            await asyncio.sleep(0.0)
        await one.extremes.close()
        return one

    one = asyncio.run(go())
    assert one.events == [
        ("images_missed", {"iteration": index, "why": "OSError: gone"}) for index in (0, 1)
    ]
    assert one.notes == ["iteration 0: its best and worst images were not saved (OSError: gone)"]
    assert [kept.iteration for kept in find_extremes(one.rundir.images)] == [2]


def test_iterations_are_skipped_if_fetching_is_slower_than_training(tmp_path: Path):
    async def go() -> Collected:
        one, never = Collected(tmp_path), asyncio.get_running_loop().create_future()
        for index in range(MOST_OPEN + 3):
            it = iteration(index)
            one.extremes.add(it, 0, "explored", (3,), rewards(1), [never], 1)
            one.extremes.finished(it)
        never.set_result(batch(5))
        await one.extremes.close()
        return one

    found = find_extremes(asyncio.run(go()).rundir.images)
    assert [kept.iteration for kept in found] == list(range(MOST_OPEN))


def test_keeping_images_does_not_change_the_weights_of_a_run(
    ray_here, tiny_sd3_dir, tmp_path, undisturbed
):
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "seen", logging__image_prompts=1))
    kept = find_extremes(run.images)
    assert [one.iteration for one in kept] == [0, 1, 2]
    assert not [event for event in run.events() if event["event"] == "images_missed"]
    for one, line in zip(kept, selections(run), strict=True):
        (group, _) = line["groups"]
        by_end = {(row["stage"], row["end"]): row for row in one.rows}
        assert {row["text"] for row in one.rows} == {group["prompt"]}
        for end in ("best", "worst"):
            explored, regenerated = by_end["explored", end], by_end["regenerated", end]
            assert explored["seed"] in group["train"] and regenerated["seed"] in group["train"]
            assert explored["other"] is not None and regenerated["other"] is not None
        assert by_end["explored", "best"]["reward"] > by_end["explored", "worst"]["reward"]
    assert adapters(run, 3) == adapters(undisturbed, 3)
