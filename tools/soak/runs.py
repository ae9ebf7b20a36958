"""Execution of the runs of a soak: baselines, faults, comparison and results."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs.load import apply, parse
from configs.schema import RunConfig
from records.errors import RunFailed, Stopped
from records.rundir import RunDirectory, read_jsonl
from tests.cluster.faults import SERVICES, FaultInjector
from tests.cluster.hosts import end_idle
from tests.cluster.machine import Machine
from tests.cluster.nodes import Machines
from tests.cluster.outcomes import outcome, recoveries
from tests.cluster.runs import run_here, tiny_config
from tests.tiny_sd3 import make_tiny_sd3
from tools.soak.draw import VARIANTS, Trial, draw
from tools.soak.lines import Row, identical

DEADLINE_S = 6.0
"""An actor that is silent for longer counts as hung; twice as long for the learner."""


class Soak:
    """Runs of one soak, on the Ray cluster that this process is connected to."""

    def __init__(
        self,
        out: Path,
        seed: int,
        kinds: Sequence[str],
        ways: Sequence[str],
        variants: Sequence[str],
        overrides: Sequence[str],
    ):
        self.out, self.seed, self.overrides = out, seed, list(overrides)
        self.kinds, self.ways, self.variants = list(kinds), list(ways), list(variants)
        drawn_from = ("seed", "kinds", "ways", "variants", "overrides")
        self._drawn_from = {name: getattr(self, name) for name in drawn_from}
        self.machines: Machines | None = None
        self.machine = Machine(out)
        self.model = out / "model"
        self.file = out / "faults.jsonl"

    def make_model(self) -> None:
        """Create the model that all runs train, unless it exists."""
        if not (self.model / "model_index.json").exists():
            make_tiny_sd3(self.model)

    def load_rows(self) -> dict[int, Row]:
        """Return the rows of an earlier soak with the same arguments, by index.

        A run whose row was cut short when the soak was killed is repeated. Raises SystemExit if the
        file belongs to a soak with other arguments.
        """
        rows: dict[int, Row] = {}
        text = self.file.read_text() if self.file.exists() else ""
        if text and not text.endswith("\n"):
            self.file.write_text(f"{text}\n")
        for row in read_jsonl(self.file):
            if row["drawn_from"] != self._drawn_from:
                raise SystemExit(
                    f"{self.file} holds {row['drawn_from']}, not {self._drawn_from}: give another"
                    " --out"
                )
            rows[row["index"]] = row
        return rows

    def prepare(self) -> None:
        """Train the undisturbed run of every variant, and record its results and moments."""
        self.undisturbed: dict[str, dict[str, str]] = {}
        self.moments: dict[str, dict[tuple[int, str], int]] = {}
        for variant in self.variants:
            injector = FaultInjector()
            self.undisturbed[variant] = self._train(f"undisturbed {variant}", variant, injector)
            self.moments[variant] = {key: n for key, n in injector.seen.items() if key[0] >= 0}

    def run_trial(self, index: int) -> Row:
        """Train run ``index`` with its faults, compare it with the undisturbed run, save a row."""
        trial = draw(self.seed, index, self.moments, self.kinds, self.ways)
        injector = FaultInjector(*trial.faults, machines=self.machines, machine=self.machine)
        name, began = f"run-{index:04d}", time.monotonic()
        row: Row = {
            "index": index,
            "drawn_from": self._drawn_from,
            "variant": trial.variant,
            "faults": [str(fault) for fault in trial.faults],
            "ended_s": None,
            "differs": [],
        }
        try:
            results = self._to_the_end(name, trial, injector, row)
            expected = self.undisturbed[trial.variant]
            row["differs"] = [part for part, digest in results.items() if digest != expected[part]]
        except Stopped:
            raise  # the soak itself was asked to stop
        except Exception as error:
            row |= {"differs": ["end"], "why": f"{type(error).__name__}: {error}"}
        recovered = [] if self.machine.offset_s else recoveries(self._rundir(name).events())
        self.machine.repair()
        if self.machines is not None:
            self.machines.repair()
        row |= {
            "done": [fault.way for fault in injector.done],
            "left_over": len(injector.left_over),
            "seconds": round(time.monotonic() - began, 1),
            "recovery": [asdict(recovery) for recovery in recovered],
        }
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        # the small disk is lost when this process ends
        if not identical(row) and self._root != self.out:
            shutil.copytree(self._rundir(name).path, self.out / "runs" / name, dirs_exist_ok=True)
        if identical(row) or self._root != self.out:
            shutil.rmtree(self._rundir(name).path, ignore_errors=True)
        return row

    def _to_the_end(
        self, name: str, trial: Trial, injector: FaultInjector, row: Row
    ) -> dict[str, str]:
        """Train a run; if a full disk ends it, free the disk and resume, as a user would."""
        began = time.monotonic()
        try:
            return self._train(name, trial.variant, injector)
        except (OSError, RunFailed) as error:
            if not any(fault.way == "disk" for fault in injector.done):
                raise
            row |= {"ended_s": round(time.monotonic() - began, 1), "said": str(error)}
        self.machine.empty()
        end_idle()  # with a node lost, idle processes would leave no room for the resumed run
        return self._train(name, trial.variant, injector, resume=True)

    def _train(
        self, name: str, variant: str, injector: FaultInjector, resume: bool = False
    ) -> dict[str, str]:
        config = self._config(name, variant)
        if not resume:
            shutil.rmtree(self._rundir(name).path, ignore_errors=True)
        return outcome(run_here(config, resume, injector), config.iterations)

    def _config(self, name: str, variant: str) -> RunConfig:
        # a run must need more than one node, or losing another node would have no effect
        services = {} if self.machines is None else {"services__learner__cpus": 1}
        settings = [*VARIANTS[variant], *self.overrides]
        return tiny(self.model, self._root, name.replace(" ", "-"), settings, **services)

    @property
    def _root(self) -> Path:
        return self.machine.disk if "disk" in self.ways else self.out

    def _rundir(self, name: str) -> RunDirectory:
        return RunDirectory(self._root / "runs" / name.replace(" ", "-"))


def tiny(
    model: Path, out: Path, name: str, overrides: Sequence[str] = (), **more: object
) -> RunConfig:
    """Return the smallest configuration with every service.

    Two iterations of 2 prompts, with 2 of 4 seeds selected.
    """
    services: dict[str, object] = {f"services__{kind}__deadline_s": DEADLINE_S for kind in SERVICES}
    services |= {
        "services__learner__deadline_s": 2 * DEADLINE_S,
        "services__learner__silence_s": DEADLINE_S,
        **more,
    }
    config = tiny_config(
        model, out, name, iterations=2, explore__pool_size=4, explore__chunk_size=1,
        selection__keep=2, evaluate__prompts=1, evaluate__noises=1, optimizer__batch_size=4,
        logging__grid_prompts=1, **services,
    )  # fmt: skip
    tree = config.model_dump(mode="json")
    for override in overrides:
        apply(tree, override)
    return parse(tree) if overrides else config
