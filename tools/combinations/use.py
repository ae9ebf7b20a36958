"""Use of a finished run by the commands that read it."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

from cli.common import DONE, USER_ERROR
from records.rundir import RunDirectory

SPEEDS = "rewards/images_per_s"
TINY = {
    "plan": ("--json",),
    "fidelity": ("--prompts", "1", "--seeds", "6"),
    "signal": ("--prompts", "1", "--pools", "6", "--batches", "3"),
    "tune": ("--prompts", "1", "--seeds", "6"),
}
"""Commands that measure or predict, with options for a tiny model. They may refuse settings."""
FOUND_NOTHING = ("own setting has a contrast of", "a gradient is zero: all rewards")
"""Reasons for which a measurement of so few random images may fail."""


def use(path: Path, rng: random.Random) -> None:
    """Evaluate, export and report a finished run in ``path``, and measure or plan with it.

    Raises ValueError if a command fails, or if ``sol-rl evaluate`` does not give the rewards and
    images of the run's own last evaluation.
    """
    run = RunDirectory(path)
    _command("evaluate", path)
    _command("report", path)
    exported = path / "exported"
    _command("export", path, exported, "--weights", "current")
    if not list(exported.glob("*.safetensors")):
        raise ValueError("export wrote no LoRA")
    shutil.rmtree(exported)
    _compare(run)
    _measure(run, rng)


def _measure(run: RunDirectory, rng: random.Random) -> None:
    """Use one of the commands ``TINY``, on the run or on its configuration."""
    from tests.cluster.runs import write_toml

    name = rng.choice(sorted(TINY))
    config, options = run.configuration(), [*TINY[name]]
    source = [write_toml(config, run.path)]
    if name == "fidelity":
        source = ["--run", run.path]
    elif name == "plan" and rng.randrange(2):
        options += ["--from", run.path]
    if name != "plan":
        steps = str(config.explore.steps)
        options += ["--steps", steps, "--threads", "1", "--out", run.path / name]
    _command(name, *source, *options, may_refuse=True)


def _command(*arguments: object, may_refuse: bool = False) -> None:
    from tests.cluster.runs import main_here

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        code = main_here(*arguments)
    found_nothing = any(reason in said.getvalue() for reason in FOUND_NOTHING)
    if code != DONE and not (may_refuse and (code == USER_ERROR or found_nothing)):
        raise ValueError(f"sol-rl {arguments[0]} ended with exit code {code}: {said.getvalue()}")


def _compare(run: RunDirectory) -> None:
    """Compare the last evaluation of a run with that of ``sol-rl evaluate``."""
    from records.images import load_step

    config = run.configuration()
    evaluations = [row for row in run.metrics() if row["kind"] == "evaluation"]
    (file,) = run.path.glob("evaluations/compare_step_*.json")
    weights = config.evaluate.weights
    again = json.loads(file.read_text())["weights"][weights]
    for key, value in again.items():
        if key.startswith(SPEEDS):
            continue
        pair = np.array([value, evaluations[-1][key]], float)  # null in a file is not a number
        if not np.isclose(*pair, rtol=0, atol=1e-9, equal_nan=True):
            raise ValueError(f"evaluate: {key} is {value}, in the run {evaluations[-1][key]}")
    stored = load_step(file.with_suffix("") / weights, config.iterations)
    if not np.array_equal(stored, load_step(run.images, config.iterations)):
        raise ValueError("evaluate: images differ from those of the run")
