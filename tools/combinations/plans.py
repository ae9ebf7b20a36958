"""Plans of published models with random settings."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from cli.common import DONE, USER_ERROR
from cli.main import main
from configs.load import ConfigError, load_tree, preset_names
from configs.section import Tree
from planning.plan import open_architecture
from tools.combinations.draw import configured, drawn

GPUS = ("B200", "H200", "H100", "GB300")
COUNTS = (1, 2, 4, 8, 16)
BELOW_BOUND = 0.99
"""Smallest ratio of a predicted iteration to its bound.

The bound counts a seed twice that is both selected and audited; the simulated run does not.
"""
SLOWER = 1.02
"""Largest ratio of an iteration with twice the GPUs: tasks and shares come in whole numbers."""


def try_plan(seed: int, index: int) -> tuple[bool, str | None]:
    """Predict plan ``index`` of the seed, and the same with twice the GPUs.

    Returns True if it was refused, and what is wrong with which settings, or None.
    """
    rng = random.Random(f"plan {seed} {index}")
    preset = rng.choice([name for name in preset_names() if name.count("-") > 1])
    kind, count = rng.choice(GPUS), rng.choice(COUNTS)
    settings = drawn(rng, {**load_tree(preset), "objective": {}}, _is_valid)
    command = ["plan", preset, "--json", "--accelerator", kind]
    command += [part for setting in settings for part in ("--set", setting)]
    try:
        once = _planned([*command, "--gpus", str(count)])
        if once is None:
            return True, None
        check_plans(once, _planned([*command, "--gpus", str(2 * count)]))
    except Exception as error:
        shown = " ".join([*command, "--gpus", str(count)])
        return False, f"{type(error).__name__}: {error}; {shown}"
    return False, None


def _is_valid(base: Tree, overrides: Sequence[str]) -> bool:
    try:
        with open_architecture(configured(base, overrides)):
            return True
    except (ConfigError, ValueError, FileNotFoundError):
        return False


def _planned(command: list[str]) -> dict[str, Any] | None:
    """Return the printed prediction, or None if it was refused with an explanation."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        code = main(command)
    if code == USER_ERROR and errors.getvalue().strip():
        return None
    if code != DONE:
        raise ValueError(f"exit code {code}: {errors.getvalue()}")
    return json.loads(out.getvalue())


def check_plans(once: dict[str, Any], twice: dict[str, Any] | None) -> None:
    """Raise ValueError for predictions that cannot be right."""
    if twice is None:
        raise ValueError("fits, but not on twice the GPUs")
    for plan in (once, twice):
        seconds, bound = plan["iteration_s"], plan["bound_s"]
        if not (math.isfinite(seconds) and seconds >= BELOW_BOUND * bound > 0):
            raise ValueError(f"iteration of {seconds} s, bound {bound} s")
    if twice["iteration_s"] > SLOWER * once["iteration_s"]:
        raise ValueError(f"{once['iteration_s']} s, {twice['iteration_s']} s on twice the GPUs")


def try_plans(indices: range, seed: int) -> int:
    """Try plans and print a line for each; return 1 if any was wrong."""
    refused = wrong = 0
    for index in indices:
        none, why = try_plan(seed, index)
        refused, wrong = refused + none, wrong + (why is not None)
        print(f"{index:4}  {'refused' if none else why or 'right'}", flush=True)
    print(f"{wrong} of {len(indices)} plans went wrong, {refused} were refused")
    return 1 if wrong else 0
