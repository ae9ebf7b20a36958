"""Settings and results of ``sol-rl fidelity``: numbers, tables and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from analysis.fidelity.density import density_chart
from configs.load import ConfigError
from configs.prompts import Prompt
from configs.schema import RunConfig
from configs.section import Tree
from learner.fidelity import (
    HALVES,
    Estimate,
    conditional_density,
    estimates,
    no_information,
    per_prompt,
)
from records.atomic import write_json, write_text
from records.tables import markdown

EXPLORING = (
    "height",
    "width",
    "solver",
    "scale_search",
    "frozen_amax",
    "activation_amax",
    "modules_to_not_convert",
)
"""Fields of ``[explore]`` that proxies depend on, in addition to steps and backend."""

Weights = Literal["merged", "beside", "base"]


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement: P prompts x N seeds, every backend at every number of steps."""

    prompts: int = 32
    seeds: int = 96
    steps: tuple[int, ...] = (2, 4, 6, 8)
    backends: tuple[str, ...] = ("emulated_nvfp4", "fp32")
    threads: int | None = None  # None: as configured for rollout actors
    checkpoint: Path | None = None  # a checkpoint directory; None: the base model
    weights: tuple[Weights, ...] = ("merged",)  # forms in which the policy is loaded


@dataclass(frozen=True)
class Rewards:
    """Rewards, float32 [P, N], and seconds per image of the truth and of each (backend, steps)."""

    truth: np.ndarray
    proxies: dict[tuple[str, int], np.ndarray]
    seconds: dict[str, float]


def halves_of(config: RunConfig, seeds: int) -> tuple[int, ...]:
    """Return the numbers of best, and of worst, seeds to measure.

    They are those of the paper's tables that fit, and the run's own. Raises ConfigError if the run
    keeps more seeds than there are.
    """
    keep = config.selection.keep
    if keep > seeds:
        raise ConfigError(
            f"--seeds {seeds}: selection.keep = {keep} needs at least {keep}: give more seeds, or"
            " --set selection.keep"
        )
    return tuple(sorted({k for k in HALVES if 2 * k <= seeds} | {keep // 2}))


def summarise(config: RunConfig, requested: Measurement, rewards: Rewards) -> Tree:
    """Return settings and measures as plain data.

    Every measure is a mean with a 95 % confidence interval (bootstrap over prompts).
    """
    truth, halves = rewards.truth, halves_of(config, requested.seeds)

    def row(backend: str, steps: int, proxy: np.ndarray) -> Tree:
        by_measure = estimates(per_prompt(proxy, truth, halves), seed=config.seed)
        return {
            "backend": backend,
            "steps": steps,
            "measures": {name: _plain(estimate) for name, estimate in by_measure.items()},
        }

    constant = int((np.ptp(truth, axis=1) == 0).sum())
    return {
        "model": config.model.path,
        "prompts": len(truth),
        "seeds": truth.shape[1],
        "halves": halves,
        "truth": {
            "precision": config.regenerate.precision,
            "steps": config.regenerate.steps,
            "solver": config.plan.solver,
        },
        "explore": {key: getattr(config.explore, key) for key in EXPLORING},
        "rewards": {scorer.name: scorer.weight for scorer in config.rewards.scorers},
        "checkpoint": None if requested.checkpoint is None else requested.checkpoint.name,
        "constant_prompts": constant,
        "distinct_rewards": float(np.mean([len(np.unique(values)) for values in truth])),
        "seconds_per_image": rewards.seconds,
        "perfect": row("perfect", config.regenerate.steps, truth)["measures"],
        "no_information": no_information(truth.shape[1], halves),
        "rows": [row(backend, steps, proxy) for (backend, steps), proxy in rewards.proxies.items()],
    }


def _plain(estimate: Estimate) -> Tree:
    """Convert ``estimate`` for JSON: non-finite numbers become null."""
    fields = dataclasses.asdict(estimate)
    return {name: value if np.isfinite(value) else None for name, value in fields.items()}


def tables(summary: Tree) -> list[str]:
    """Format the summary as text, in the form of the paper's tables."""
    truth = summary["truth"]
    lines = [
        (
            f"{summary['prompts']} prompts x {summary['seeds']} seeds; truth: {truth['steps']}"
            f" steps, {truth['precision']}, {truth['solver']}; rewards:"
            f" {', '.join(summary['rewards'])}; [95 % confidence, bootstrap over prompts]"
        ),
        (
            f"distinct true rewards per prompt: {summary['distinct_rewards']:.1f}; prompts with one"
            f" reward for all seeds: {summary['constant_prompts']}"
        ),
    ]
    agreement = [("Kendall tau", ("kendall_tau",)), ("Spearman rho", ("spearman_rho",))]
    lines += ["", *_table(summary, "agreement", agreement, 3)]
    for measure in ("percentile", "rank"):
        columns = [
            (f"top/bottom-{k}", (f"top{k}_{measure}", f"bottom{k}_{measure}"))
            for k in summary["halves"]
        ]
        lines += ["", *_table(summary, f"mean true {measure}", columns, 1)]
    columns = [(f"best-{k} less worst-{k}", (f"contrast{k}",)) for k in summary["halves"]]
    return [*lines, "", *_table(summary, "share of the true contrast found", columns, 3)]


def _table(
    summary: Tree, title: str, columns: Sequence[tuple[str, tuple[str, ...]]], digits: int
) -> list[str]:
    rows = [(f"{row['backend']}, {row['steps']} steps", row["measures"]) for row in summary["rows"]]
    rows.append(("the truth itself", summary["perfect"]))
    cells = [
        (name, {key: _cell(Estimate(**value), digits) for key, value in measures.items()})
        for name, measures in rows
    ]
    chance = summary["no_information"]
    cells.append(("random", {key: f"{value:.{digits}f}" for key, value in chance.items()}))
    body = [
        [name, *(" / ".join(texts[key] for key in keys) for _, keys in columns)]
        for name, texts in cells
    ]
    return markdown([title, *(head for head, _ in columns)], body)


def _cell(value: Estimate, digits: int) -> str:
    if not value.prompts:
        return "n/a"
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def write(out: Path, summary: Tree, prompts: list[Prompt], rewards: Rewards) -> None:
    """Write fidelity.json, rewards.json and density.svg."""
    write_json(out / "fidelity.json", summary)
    proxies = {
        f"{backend}/{steps}": proxy.tolist() for (backend, steps), proxy in rewards.proxies.items()
    }
    contents = {
        "prompts": [prompt.text for prompt in prompts],
        "truth": rewards.truth.tolist(),
        "proxies": proxies,
    }
    write_json(out / "rewards.json", contents)
    panels = {
        f"{backend}, {steps} steps": conditional_density(proxy, rewards.truth)
        for (backend, steps), proxy in rewards.proxies.items()
    }
    truth = summary["truth"]
    title = (
        f"{summary['prompts']} prompts x {summary['seeds']} seeds; truth: {truth['steps']} steps,"
        f" {truth['precision']}"
    )
    write_text(out / "density.svg", density_chart(panels, title, summary["seeds"]))
