"""``sol-rl signal``: how much signal a batch's gradient has, by objective and what was selected.

One process, no Ray. Prompts, seeds and random streams are those of a run's first iterations: batch
b is what iteration b would train on, were the weights still those of the base model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from analysis.fidelity.measure import (
    backends,
    encoded,
    explored,
    explorer_of,
    hide_loading_bars,
    setup,
    trainer_of,
)
from analysis.signal.picture import signal_picture
from configs.load import ConfigError, parse
from configs.prompts import Prompt, prompts_of_iteration, read_prompts
from configs.schema import RunConfig
from configs.section import Tree
from learner.batch import Group
from learner.nonfinite import NonFiniteTraining
from learner.selection import select
from learner.signal import gradient, mean_cosine
from learner.trainer import Trainer
from planning.preflight import check_model
from policy.explorer import Explorer
from policy.precision.backends import Backend
from policy.sampling.noise import stream_seed
from policy.types import Conditioning
from records.atomic import write_json, write_text
from records.errors import RunFailed
from records.rundir import versions
from rewards.base import ScorerError, ScorerSetupError
from rewards.combine import WeightedScorer

Say = Callable[[str], None]
EXPLORED = "explored.json"
"""Rewards of explored images: what an interrupted measurement goes on from."""


@dataclass(frozen=True)
class Measurement:
    """What is measured: every objective under every selection."""

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
    """Which K of N seeds are trained on; ``rule`` None: all K, nothing is explored."""

    keep: int
    pool: int
    rule: str | None = None
    backend: str | None = None
    steps: int | None = None

    @property
    def label(self) -> str:
        """For people."""
        if self.rule is None:
            return f"{self.keep} as they come"
        return f"{self.rule} {self.keep} of {self.pool}, {self.backend} {self.steps} steps"


@dataclass(frozen=True)
class Batch:
    """The prompts of an iteration."""

    index: int
    prompts: list[Prompt]
    conditioning: list[Conditioning]


def run(config: RunConfig, wanted: Measurement, out: Path, say: Say) -> list[str]:
    """Measure what ``out`` does not have yet, write signal.json and signal.svg; returns the table.

    Raises ConfigError for what cannot be measured, RunFailed when an image cannot be scored or a
    gradient is not finite.
    """
    check_model(config)
    found = list(backends(wanted.backends, say).values())
    choices = choices_of(config, wanted, found)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: {out} cannot be written ({error.strerror}): give another directory"
        ) from None
    with _threads(wanted.threads or config.services.rollout.threads):
        hide_loading_bars()
        try:
            Measuring(config, wanted, found, out, say).run(choices)
        except ScorerError as error:
            raise RunFailed(f"{error}; an image without a reward has no advantage") from None
        except NonFiniteTraining as error:
            raise RunFailed(str(error)) from None
        except (FileNotFoundError, ScorerSetupError) as error:
            raise ConfigError(str(error)) from None
    summary = read(out)
    write_text(out / "signal.svg", signal_picture(summary["rows"], _title(summary)))
    return [*table(summary), f"written: {out / 'signal.json'}, signal.svg"]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choices_of(config: RunConfig, wanted: Measurement, found: Sequence[Backend]) -> list[Choice]:
    """Every selection of the measurement, each once. Raises ConfigError."""
    keep = config.selection.keep
    if small := [pool for pool in wanted.pools if pool < keep]:
        raise ConfigError(
            f"--pools {small[0]}: selection.keep = {keep} seeds are to be chosen of it"
        )
    choices: dict[Choice, None] = {}
    for pool in wanted.pools:
        if pool == keep:
            choices[Choice(keep, keep)] = None
            continue
        for backend in found:
            for steps in wanted.steps:
                for rule in wanted.rules:
                    choices[Choice(keep, pool, rule, backend.name, steps)] = None
    return list(choices)


class Measuring:
    """Makes the images that the choices need, once for all objectives, and the gradients."""

    def __init__(
        self, config: RunConfig, wanted: Measurement, found: Sequence[Backend], out: Path, say: Say
    ) -> None:
        self.config, self.wanted, self.out, self.say = config, wanted, out, say
        self.backends = {backend.name: backend for backend in found}
        self.scorer = WeightedScorer.from_config(config.rewards)
        self.batches = self._batches()
        self._explorers: dict[str, Explorer] = {}
        self._rewards: dict[tuple[str, int], list[np.ndarray]] = {}

    def _batches(self) -> list[Batch]:
        everything = read_prompts(self.config.prompts.train)
        count = self.wanted.prompts
        if count > len(everything):
            raise ConfigError(
                f"--prompts {count}: {self.config.prompts.train} holds {len(everything)}; ask for"
                " fewer"
            )
        chosen = [
            [
                everything[row]
                for row in prompts_of_iteration(len(everything), count, b, self.config.seed)
            ]
            for b in range(self.wanted.batches)
        ]
        rows = iter(encoded(self.config, [prompt for part in chosen for prompt in part]))
        return [Batch(b, part, [next(rows) for _ in part]) for b, part in enumerate(chosen)]

    def run(self, choices: Sequence[Choice]) -> None:
        """Every objective under every choice, written as it comes; what is there is kept."""
        for label, config in self.wanted.objectives:
            trainer: Trainer | None = None
            for choice in choices:
                if choice.rule is not None and config.objective.one_noise_per_group:
                    self.say(f"{label}: one noise per prompt, nothing to select: left out")
                    continue
                digest = self._digest(config, choice)
                if any(row["digest"] == digest for row in read(self.out)["rows"]):
                    self.say(f"{label}, {choice.label}: is there already")
                    continue
                if trainer is None:
                    with setup():
                        trainer = trainer_of(config)
                self._add(self._row(label, trainer, choice) | {"digest": digest})

    def _digest(self, config: RunConfig, choice: Choice) -> str:
        """Names all that a row depends on."""
        tree = config.model_dump(
            mode="json", exclude={"name", "run_root", "services", "iterations"}
        )
        what = [tree, repr(choice), self.wanted.prompts, self.wanted.batches]
        return _digest(what)

    def _row(self, label: str, trainer: Trainer, choice: Choice) -> Tree:
        start = time.perf_counter()
        gradients = [
            gradient(trainer, b.index, self._groups(trainer, b, choice)) for b in self.batches
        ]
        try:
            found = mean_cosine(gradients)
        except ValueError as error:
            raise RunFailed(f"{label}, {choice.label}: {error}") from None
        seconds = time.perf_counter() - start
        norm = float(np.mean([part.norm().item() for part in gradients]))
        self.say(
            f"{label}, {choice.label}: cosine {found.mean:.3f} ± {found.stderr:.3f}, norm"
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
            "batches": found.batches,
            "cosine": found.mean,
            "stderr": found.stderr,
            "grad_norm": norm,
            "seconds": seconds,
        }

    def _groups(self, trainer: Trainer, batch: Batch, choice: Choice) -> list[Group]:
        """What iteration ``batch.index`` would train on."""
        groups = []
        for p, prompt in enumerate(batch.prompts):
            chosen = self._chosen(batch, p, choice)
            samples, images = trainer.regenerate(batch.conditioning[p], chosen)
            groups.append(Group(p, batch.conditioning[p], samples, self._score(images, prompt)))
        return groups

    def _chosen(self, batch: Batch, p: int, choice: Choice) -> list[int]:
        seeds = self._seeds(batch, p, choice.pool)
        if choice.rule is None or choice.backend is None or choice.steps is None:
            return seeds
        rewards = self._explored(choice.backend, choice.steps)[batch.index][p, : choice.pool]
        seed = stream_seed(self.config.seed, "selection", batch.index, p)
        return [seeds[i] for i in select(rewards, choice.keep, choice.rule, seed)]

    def _seeds(self, batch: Batch, p: int, count: int) -> list[int]:
        return [stream_seed(self.config.seed, "explore", batch.index, p, n) for n in range(count)]

    def _explored(self, name: str, steps: int) -> list[np.ndarray]:
        """Rewards [P, N] of each batch, of the largest pool: smaller ones are its first seeds."""
        if (name, steps) not in self._rewards:
            self._rewards[name, steps] = self._kept(name, steps) or self._explore(name, steps)
        return self._rewards[name, steps]

    def _kept(self, name: str, steps: int) -> list[np.ndarray] | None:
        """What an interrupted measurement in the same directory has explored; None: nothing."""
        found = _json(self.out / EXPLORED).get(self._explored_digest(name, steps))
        return None if found is None else [np.array(part, np.float32) for part in found]

    def _explored_digest(self, name: str, steps: int) -> str:
        part = {"model", "prompts", "explore", "regenerate", "rewards", "seed"}
        tree = self.config.model_dump(mode="json", include=part)
        wanted = [self.wanted.prompts, self.wanted.batches, max(self.wanted.pools)]
        return _digest([tree, name, steps, *wanted])

    def _explore(self, name: str, steps: int) -> list[np.ndarray]:
        if name not in self._explorers:
            with setup():
                self._explorers[name] = explorer_of(
                    self.config, trainer_of(self.config), self.backends[name]
                )
        start, count = time.perf_counter(), max(self.wanted.pools)
        made: list[np.ndarray] = []
        for batch in self.batches:
            rows = []
            for p, prompt in enumerate(batch.prompts):
                seeds = self._seeds(batch, p, count)
                images = explored(
                    self._explorers[name], self.config, batch.conditioning[p], seeds, steps
                )
                rows.append(self._score(images, prompt))
            made.append(np.stack(rows))
        self.say(f"explored with {name}, {steps} steps: {time.perf_counter() - start:.0f} s")
        rows = {self._explored_digest(name, steps): [part.tolist() for part in made]}
        self._write(EXPLORED, _json(self.out / EXPLORED) | rows)
        return made

    def _score(self, images: np.ndarray, prompt: Prompt) -> np.ndarray:
        count = len(images)
        return self.scorer(images, [prompt.text] * count, [prompt.metadata] * count).total

    def _add(self, row: Tree) -> None:
        summary = read(self.out)
        rows = [*summary["rows"], row]
        facts = {"model": self.config.model.path, "threads": torch.get_num_threads()}
        regenerate = {
            "steps": self.config.regenerate.steps,
            "precision": self.config.regenerate.precision,
        }
        rewards = {scorer.name: scorer.weight for scorer in self.config.rewards.scorers}
        facts |= {"regenerate": regenerate, "rewards": rewards, "versions": versions()}
        self._write("signal.json", facts | {"rows": rows})

    def _write(self, name: str, tree: Tree) -> None:
        try:
            write_json(self.out / name, tree)
        except OSError as error:
            raise RunFailed(
                f"{self.out}: {error.strerror or error}: give another directory with --out"
            ) from None


def read(out: Path) -> Tree:
    """signal.json of ``out``; without rows where there is none. Raises ConfigError."""
    return {"rows": []} | _json(out / "signal.json")


def _json(path: Path) -> Tree:
    """An object that was written before; empty where there is none. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}): remove it, or give --out") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: no JSON object: remove it, or give --out")
    return found


def _digest(what: object) -> str:
    return xxhash.xxh3_128(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _title(summary: Tree) -> str:
    rows = summary["rows"]
    shapes = sorted({(row["batches"], row["prompts"], row["keep"]) for row in rows})
    said = ", ".join(f"{b} batches of {p} prompts x {k} samples" for b, p, k in shapes)
    return f"{summary['model']}, base weights; {said}"


def table(summary: Tree) -> list[str]:
    """The rows for people: an objective per line, a selection per column."""
    rows = summary["rows"]
    columns = list(dict.fromkeys(row["choice"] for row in rows))
    cells = {
        (row["objective"], row["choice"]): f"{row['cosine']:.3f} ± {row['stderr']:.3f}"
        for row in rows
    }
    names = list(dict.fromkeys(row["objective"] for row in rows))
    body = [["cosine between gradients", *columns]]
    body += [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
    body.insert(1, ["---"] * len(body[0]))
    widths = [max(len(line[i]) for line in body) for i in range(len(body[0]))]
    return [
        f"{_title(summary)}; ± standard error (jackknife over batches)",
        "",
        *(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            + " |"
            for line in body
        ),
    ]


def objectives_of(config: RunConfig, given: Sequence[str]) -> tuple[tuple[str, RunConfig], ...]:
    """(label, configuration) of every ``NAME[,key=value...]``; without any the configuration's own.

    Raises ConfigError.
    """
    from configs.load import apply

    found = {}
    for text in given or (config.objective.name,):
        name, *settings = text.split(",")
        tree = config.model_dump(mode="json")
        if name != config.objective.name:
            tree["objective"], tree["regenerate"]["solver"] = {"name": name}, None
        apply(tree, "arm=diffusionnft", *(f"objective.{setting}" for setting in settings))
        found[text] = parse(tree)
    return tuple(found.items())
