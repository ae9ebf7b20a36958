"""``sol-rl signal``: measure the signal in a batch's gradient by objective and selection.

It runs in one process without Ray. Prompts, seeds and random streams are those of the first
iterations of a run: batch b is what iteration b would train on if the weights were still those of
the base model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.measuring import Say, backends, load_trainer, measurement_context
from analysis.signal.drawing import drawing
from analysis.signal.explore_rewards import Batch, ExploreRewards, batches_of, seeds_of
from analysis.signal.files import ROWS, digest, read, read_rows, table, title
from configs.arms import TWO_STAGES, set_arm
from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig
from configs.section import Tree
from learner.batch import Group
from learner.gradient_signal import gradient, mean_cosine
from learner.selection import select
from learner.trainer import Trainer
from planning.preflight import check_model
from policy.precision.backends import Backend
from policy.sampling.noise import stream_seed
from policy.sampling.paths import shared_start
from records.errors import RunFailed
from records.rundir import output_errors, versions, write_json, write_text


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement: every objective with every selection is measured."""

    objectives: tuple[tuple[str, RunConfig], ...]  # label, and the configuration with it
    pools: tuple[int, ...] = (24, 96)
    rules: tuple[str, ...] = ("best_worst",)
    backends: tuple[str, ...] = ("emulated_nvfp4",)
    steps: tuple[int, ...] = (6,)
    prompts: int = 4
    batches: int = 8
    threads: int | None = None


@dataclass(frozen=True)
class Choice:
    """Selection of the ``keep`` seeds out of ``pool`` that are trained on.

    If ``rule`` is None, nothing is explored and all seeds are used.
    """

    keep: int
    pool: int
    rule: str | None = None
    backend: str | None = None
    steps: int | None = None

    @property
    def label(self) -> str:
        """Text that describes the selection in tables."""
        if self.rule is None:
            return f"{self.keep} unselected"
        return f"{self.rule} {self.keep} of {self.pool}, {self.backend} {self.steps} steps"


def run(config: RunConfig, requested: Measurement, out: Path, say: Say) -> list[str]:
    """Measure what is missing in ``out``, write signal.json and signal.svg, and return the table.

    Raises ConfigError if the settings cannot be measured, and RunFailed if an image cannot be
    scored or a gradient is not finite.
    """
    check_model(config, requested.steps)
    resolved = list(backends(requested.backends, say).values())
    choices = choices_of(config, requested, resolved)
    if not any(can_select(own, choice) for _, own in requested.objectives for choice in choices):
        raise ConfigError(
            "no objective has anything to select from, as each has one noise per prompt: give"
            f" --pools {config.selection.keep}, to use all seeds"
        )
    with measurement_context(
        config, requested.threads, out, "an image without a reward has no advantage"
    ):
        GradientMeasurement(config, requested, resolved, out, say).run(choices)
    summary = read(out / ROWS)
    with output_errors(out):
        write_text(out / "signal.svg", drawing(summary["rows"], title(summary)))
    return [*table(summary), f"written: {out / 'signal.json'}, signal.svg"]


def choices_of(
    config: RunConfig, requested: Measurement, resolved_backends: Sequence[Backend]
) -> list[Choice]:
    """Return every selection of the measurement once; raise ConfigError if a pool is too small."""
    keep = config.selection.keep
    if small := [pool for pool in requested.pools if pool < keep]:
        raise ConfigError(
            f"--pools {small[0]}: selection.keep = {keep} seeds are to be selected from it"
        )
    choices: dict[Choice, None] = {}
    for pool in requested.pools:
        if pool == keep:
            choices[Choice(keep, keep)] = None
            continue
        for backend in resolved_backends:
            for steps in requested.steps:
                for rule in requested.rules:
                    choices[Choice(keep, pool, rule, backend.name, steps)] = None
    return list(choices)


def can_select(config: RunConfig, choice: Choice) -> bool:
    """Return False if a choice selects among seeds whose images would all be the same."""
    shared = config.objective.one_noise_per_group and not config.explore.paths
    return choice.rule is None or not shared


class GradientMeasurement:
    """Measurement of gradients: regenerates the seeds of each choice and adds a row to the file."""

    def __init__(
        self,
        config: RunConfig,
        requested: Measurement,
        found: Sequence[Backend],
        out: Path,
        say: Say,
    ) -> None:
        self.config, self.wanted, self.out, self.say = config, requested, out, say
        self.batches = batches_of(config, requested.prompts, requested.batches)
        self.explored = ExploreRewards(config, found, self.batches, max(requested.pools), out, say)

    def run(self, choices: Sequence[Choice]) -> None:
        """Measure every objective with every choice, skipping rows that exist already.

        Each row is written as soon as it is measured, so an interrupted measurement can continue.
        """
        for label, config in self.wanted.objectives:
            trainer: Trainer | None = None
            for choice in choices:
                if not can_select(config, choice):
                    self.say(f"{label}: one noise per prompt, so nothing can be selected: skipped")
                    continue
                name = self._name(config, choice)
                if any(row["digest"] == name for row in read_rows(self.out)):
                    self.say(f"{label}, {choice.label}: already measured")
                    continue
                if trainer is None:
                    trainer = load_trainer(config)
                self._add(self._row(label, trainer, choice) | {"digest": name})

    def _name(self, config: RunConfig, choice: Choice) -> str:
        """Return a digest of everything that a row depends on."""
        tree = config.model_dump(
            mode="json", exclude={"name", "run_root", "services", "iterations"}
        )
        parts = [tree, repr(choice), self.wanted.prompts, self.wanted.batches]
        return digest(parts)

    def _row(self, label: str, trainer: Trainer, choice: Choice) -> Tree:
        start = time.perf_counter()
        gradients = [
            gradient(trainer, b.index, self._groups(trainer, b, choice)) for b in self.batches
        ]
        try:
            cosine = mean_cosine(gradients)
        except ValueError as error:
            raise RunFailed(f"{label}, {choice.label}: {error}") from None
        seconds = time.perf_counter() - start
        norm = float(np.mean([part.norm().item() for part in gradients]))
        self.say(
            f"{label}, {choice.label}: cosine {cosine.mean:.3f} ± {cosine.stderr:.3f}, norm"
            f" {norm:.3g}, {seconds:.0f} s"
        )
        return {
            "objective": label,
            "choice": choice.label,
            "keep": choice.keep,
            "pool": choice.pool,
            "rule": choice.rule,
            "backend": choice.backend,
            "explore_steps": choice.steps,
            "prompts": self.wanted.prompts,
            "batches": cosine.batches,
            "cosine": cosine.mean,
            "stderr": cosine.stderr,
            "grad_norm": norm,
            "seconds": seconds,
        }

    def _groups(self, trainer: Trainer, batch: Batch, choice: Choice) -> list[Group]:
        """Return the groups that iteration ``batch.index`` would train on."""
        groups = []
        for p, prompt in enumerate(batch.prompts):
            start, chosen = self._seeds(batch, p, choice, trainer.config)
            samples, images = trainer.generator.generate(batch.conditioning[p], chosen, start=start)
            groups.append(
                Group(p, batch.conditioning[p], samples, self.explored.score(images, prompt))
            )
        return groups

    def _seeds(
        self, batch: Batch, p: int, choice: Choice, config: RunConfig
    ) -> tuple[int | None, list[int]]:
        """Return the seed of the shared initial noise (or None) and the seeds to train on."""
        seeds = seeds_of(self.config, batch, p, choice.pool)
        start = shared_start(config, seeds)
        if choice.rule is None or choice.backend is None or choice.steps is None:
            return start, seeds
        rewards = self.explored.rewards(config, choice.backend, choice.steps)[batch.index][p]
        seed = stream_seed(self.config.seed, "selection", batch.index, p)
        chosen = select(rewards[: choice.pool], choice.keep, choice.rule, seed)
        return start, [seeds[i] for i in chosen]

    def _add(self, row: Tree) -> None:
        full = self.config.regenerate
        facts: Tree = {
            "model": self.config.model.path,
            "regenerate": {"steps": full.steps, "precision": full.precision},
            "rewards": {scorer.name: scorer.weight for scorer in self.config.rewards.scorers},
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        with output_errors(self.out):
            write_json(self.out / ROWS, facts | {"rows": [*read_rows(self.out), row]})


def objectives_of(config: RunConfig, given: Sequence[str]) -> tuple[tuple[str, RunConfig], ...]:
    """Return (label, configuration) for every ``NAME[,key=value...]`` in ``given``.

    By default, that is the objective of the configuration. Keys are those of the objective, and
    ``explore.paths``. Raises ConfigError if one is invalid.
    """
    configs = {}
    for text in given or (config.objective.name,):
        name, *settings = text.split(",")
        tree = config.model_dump(mode="json")
        if name != config.objective.name:
            tree["objective"], tree["regenerate"]["solver"] = {"name": name}, None
        keys = [s if s.startswith("explore.paths=") else f"objective.{s}" for s in settings]
        apply(tree, *keys)
        configs[text] = _measured(tree)
    return tuple(configs.items())


def _measured(tree: Tree) -> RunConfig:
    """Return a configuration as the arm that explores as it is configured, if it can select."""
    unselected = copy.deepcopy(tree)
    set_arm(unselected, "diffusionnft")
    config = parse(unselected)
    if config.objective.one_noise_per_group and not config.explore.paths:
        return config
    if config.explore.paths:  # the numbers of explore steps that are measured are given
        tree["explore"]["steps"] = config.regenerate.steps
    set_arm(tree, TWO_STAGES)
    return parse(tree)
