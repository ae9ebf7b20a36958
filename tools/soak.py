"""``make soak``: many small runs with one random fault each, compared with an undisturbed run.

A fault is drawn from a seed: a service and one of its actors, the way (SIGKILL, SIGSTOP, or its
simulated node removed), and the moment, out of all moments of the undisturbed run. Fault i of a
seed is the same for any number of runs. A row per run is kept in OUT/faults.jsonl, so that a soak
that was stopped (exit code 130) continues where it was. All runs share one Ray and its processes:
only those with a fault are started again. Exit code 1 when a run ended otherwise than the
undisturbed one; its directory is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from records.errors import Stopped

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from tests.cluster.faults import Fault, FaultInjector
    from tests.cluster.nodes import Machines

Row = dict[str, Any]
"""A line of faults.jsonl: the fault, whether the run ended as it should, and recovery times."""

STOPPED = 130
WAYS = ("kill", "stop", "node")
LONGEST_DELAY_S = 0.3
NODES, NODE_CPUS = 4, 3
"""A run, and the processes kept for the next one, fit on all nodes but one."""
DEADLINE_S = 15.0
"""An actor that is silent for longer counts as hung; for the learner it is twice this."""


def draw(
    seed: int,
    index: int,
    moments: Mapping[tuple[int, str], int],
    kinds: Sequence[str],
    ways: Sequence[str],
) -> Fault:
    """Fault ``index`` of ``seed``.

    ``moments``: how often each (iteration, moment) occurs in the undisturbed run.
    """
    from tests.cluster.faults import Fault

    rng = np.random.default_rng([seed, index])
    kind, way = kinds[int(rng.integers(len(kinds)))], ways[int(rng.integers(len(ways)))]
    iteration, moment = sorted(moments)[int(rng.integers(len(moments)))]
    count = 1 + int(rng.integers(moments[iteration, moment]))
    actor = int(rng.integers(2)) if kind == "rollout" else 0
    delay = round(float(rng.uniform(0, LONGEST_DELAY_S)), 3)
    return Fault(kind, way, iteration, moment, count, actor, delay)  # type: ignore[arg-type]


class Soak:
    """The runs of one soak, on the Ray that this process is connected to."""

    def __init__(
        self,
        out: Path,
        seed: int,
        kinds: Sequence[str],
        ways: Sequence[str],
        overrides: Sequence[str] = (),
    ):
        self.out, self.seed, self.overrides = out, seed, list(overrides)
        self.kinds, self.ways = list(kinds), list(ways)
        self.machines: Machines | None = None
        self.file = out / "faults.jsonl"

    def known(self) -> dict[int, Row]:
        """Rows of an earlier soak with the same arguments, by index.

        A run whose line was cut short by a kill is done again.
        """
        rows: dict[int, Row] = {}
        text = self.file.read_text() if self.file.exists() else ""
        if text and not text.endswith("\n"):
            self.file.write_text(f"{text}\n")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["drawn_from"] != self._drawn_from:
                raise SystemExit(
                    f"{self.file} holds {row['drawn_from']}, not {self._drawn_from}: give another"
                    " --out"
                )
            rows[row["index"]] = row
        return rows

    @property
    def _drawn_from(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "kinds": self.kinds,
            "ways": self.ways,
            "overrides": self.overrides,
        }

    def prepare(self) -> None:
        """Create the model, and train the undisturbed run."""
        from tests.cluster.faults import FaultInjector
        from tests.tiny_sd3 import make_tiny_sd3

        self.model = self.out / "model"
        if not (self.model / "model_index.json").exists():
            make_tiny_sd3(self.model)
        quiet = FaultInjector()
        self.undisturbed = self._train("undisturbed", quiet)
        self.moments = {key: count for key, count in quiet.seen.items() if key[0] >= 0}

    def one(self, index: int) -> Row:
        """Train run ``index`` with its fault, compare it, and append its row."""
        from tests.cluster.faults import FaultInjector, recoveries

        fault = draw(self.seed, index, self.moments, self.kinds, self.ways)
        injector, name = FaultInjector(fault, machines=self.machines), f"run-{index:04d}"
        began = time.monotonic()
        row: Row = {
            "index": index,
            "drawn_from": self._drawn_from,
            "fault": str(fault),
            **asdict(fault),
        }
        try:
            found = self._train(name, injector)
            row["differs"] = [
                part for part, digest in found.items() if digest != self.undisturbed[part]
            ]
        except Stopped:
            raise  # the soak itself was asked to stop
        except Exception as error:
            row |= {"differs": ["end"], "why": f"{type(error).__name__}: {error}"}
        if self.machines is not None:
            self.machines.repair()
        recovery = recoveries(self._events(name))
        row |= {
            "injected": bool(injector.done),
            "left_over": len(injector.left_over),
            "seconds": round(time.monotonic() - began, 1),
        }
        row["recovery"] = asdict(recovery[0]) if recovery else None
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if identical(row):
            shutil.rmtree(self.out / "runs" / name)
        return row

    def _train(self, name: str, injector: FaultInjector) -> dict[str, str]:
        from tests.cluster.faults import outcome
        from tests.cluster.runs import run_here

        shutil.rmtree(self.out / "runs" / name, ignore_errors=True)
        # a run must not fit on one node, or losing another node would be no fault
        more = {} if self.machines is None else {"services__learner__cpus": 1}
        config = tiny(self.model, self.out, name, self.overrides, **more)
        return outcome(run_here(config, progress=injector), config.iterations)

    def _events(self, name: str) -> list[dict[str, object]]:
        from records.rundir import RunDirectory

        return RunDirectory(self.out / "runs" / name).events()


def tiny(
    model: Path, out: Path, name: str, overrides: Sequence[str] = (), **more: object
) -> RunConfig:
    """The smallest run with every service: two iterations, 2 prompts, 2 of 4 seeds."""
    from configs.load import apply, parse
    from tests.cluster.faults import SERVICES
    from tests.cluster.runs import tiny_config

    services: dict[str, object] = {f"services__{kind}__deadline_s": DEADLINE_S for kind in SERVICES}
    services |= {"services__learner__deadline_s": 2 * DEADLINE_S, **more}
    config = tiny_config(
        model, out, name, iterations=2, explore__pool_size=4, explore__chunk_size=1,
        selection__keep=2, evaluate__prompts=1, evaluate__noises=1, optimizer__batch_size=4,
        logging__grid_prompts=1, **services,
    )  # fmt: skip
    tree = config.model_dump(mode="json")
    for override in overrides:
        apply(tree, override)
    return parse(tree) if overrides else config


def identical(row: Row) -> bool:
    """Whether the run ended as the undisturbed one did, and no killed process is left over."""
    return not row["differs"] and not row["left_over"]


def line_of(row: Row) -> str:
    """A row as a line to read."""
    came = (
        "identical"
        if identical(row)
        else f"DIFFERS: {', '.join(row['differs'])}{' left over' * bool(row['left_over'])}"
    )
    if not row["injected"]:
        came += ", no fault: the actor was just being replaced, or the run had ended"
    times = row["recovery"] or {}
    parts = [("noticed", "noticed_s"), ("replaced", "replaced_s"), ("recovered", "answered_s")]
    said = ", ".join(
        f"{word} {times[key]:.1f} s" for word, key in parts if times.get(key) is not None
    )
    why = f"; {row['why']}" if "why" in row else ""
    return (
        f"{row['index']:4}  {came}  {row['fault']}; {said or 'not needed again'}; run"
        f" {row['seconds']:.0f} s{why}"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """The table of recovery times, and how many runs ended identical."""
    from tests.cluster.faults import Recovery, recovery_table

    hit, same = sum(row["injected"] for row in rows), sum(identical(row) for row in rows)
    found = [Recovery(**row["recovery"]) for row in rows if row["recovery"]]
    return [
        *recovery_table(found),
        f"{same} of {len(rows)} runs ended identical to the undisturbed one; {hit} had a fault",
    ]


@contextmanager
def ray_of(ways: Sequence[str]) -> Iterator[Machines | None]:
    """The existing Ray or a new one, with simulated nodes where ``ways`` may remove one."""
    import ray

    from tests.cluster.nodes import Machines

    if ray.is_initialized():
        if "node" in ways:
            raise SystemExit("--ways node: needs a Ray of its own")
        yield None
    elif "node" in ways:
        with Machines({"num_cpus": 0}, *[{"num_cpus": NODE_CPUS}] * NODES) as machines:
            yield machines
    else:
        ray.init(
            "local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield None
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; 0 when every run ended identical."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    out = Path(options.out or f"runs/soak-{options.seed}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    soak = Soak(out, options.seed, options.kinds, options.ways, options.overrides)
    rows = {index: row for index, row in soak.known().items() if index < options.runs}
    for index in sorted(rows):
        print(line_of(rows[index]), flush=True)
    if missing := [index for index in range(options.runs) if index not in rows]:
        try:
            with ray_of(options.ways) as soak.machines:
                soak.prepare()
                for index in missing:
                    rows[index] = soak.one(index)
                    print(line_of(rows[index]), flush=True)
        except (Stopped, KeyboardInterrupt):
            print(
                f"stopped after {len(rows)} of {options.runs} runs; the same command again"
                " continues"
            )
    print("\n".join(summary([rows[index] for index in sorted(rows)])))
    if len(rows) < options.runs:
        return STOPPED
    return 0 if all(identical(row) for row in rows.values()) else 1


def _parser() -> argparse.ArgumentParser:
    from tests.cluster.faults import SERVICES

    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--runs", type=int, default=20, help="how many, those of an earlier soak in OUT counted in"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=SERVICES,
        default=list(SERVICES),
        metavar="SERVICE",
        help="only these",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        metavar="WAY",
        help=f"of {', '.join(WAYS)}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="a.b=c",
        help="change the runs, as explore_ahead=1",
    )
    parser.add_argument("--out", metavar="DIR", help="runs/soak-SEED unless given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
