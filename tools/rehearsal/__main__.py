"""Command line of ``make rehearsal``: write the pipelines, run them and print the tables."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import ray

from analysis.compare.table import lines
from analysis.report.parts import Table
from cluster.runtime.local_ray import start_ray
from planning.object_store import store_size
from planning.plan import Plan, make_plan
from records.errors import RunFailed
from tools.rehearsal import __doc__ as about
from tools.rehearsal.measuring import MemoryMeasurements, MemoryMonitor
from tools.rehearsal.pipeline import config_of, write_pipeline

MODELS = ("sana-1.6b", "sd3.5-medium")
TOLERANCE = 0.05
GB = 1e9


def rehearse(name: str, root: Path, pixels: int) -> list[str]:
    """Run one model, print its table and return one line per deviation from the plan.

    Raises RunFailed if the run fails.
    """
    from cluster.driver.train import train

    start = time.monotonic()
    model = root / name
    if not (model / "model_index.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        write_pipeline(name, model)
        print(f"written: {model}, {time.monotonic() - start:.0f} s", flush=True)
    config = config_of(name, model, root, pixels)
    plan = make_plan(config)
    shutil.rmtree(root / "runs" / config.name, ignore_errors=True)
    start_ray(num_cpus=8, object_store_memory=max(10**9, store_size(sum(plan.store.values()))))
    watch = MemoryMonitor(config)
    watch.start()
    # make the run use this Ray instance, whose object store has the planned size
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    try:
        with mock.patch.dict(os.environ, environment), mock.patch.object(ray, "init"):
            train(config, resume=False)
    finally:
        watch.ended.set()
    watch.found.seconds = time.monotonic() - start
    if watch.trouble:
        print(f"trouble: {watch.trouble}", file=sys.stderr)
    comparison, deviations = table(plan, watch.found)
    print("\n".join(lines([comparison], deviations)), flush=True)
    numbers = {"measured": asdict(watch.found), "memory": plan.memory, "store": plan.store}
    (root / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    return deviations


def table(plan: Plan, found: MemoryMeasurements) -> tuple[Table, list[str]]:
    """Return (table of measured and planned sizes, one line per size outside the tolerance)."""
    rows, deviations = [], []

    def row(part: str, measured: int, planned: int, process: str = "") -> None:
        share = measured / planned if planned else float("nan")
        if not abs(share - 1) <= TOLERANCE:
            deviations.append(f"{part}: {share:.3f} of the plan")
        numbers = (f"{measured / GB:.3f}", f"{planned / GB:.3f}", f"{share:.3f}", process)
        rows.append((part, *numbers))

    for kind, parts in plan.memory.items():
        if kind in found.tensors:
            process_gb = max(0, found.process.get(kind, 0) - found.libraries) / GB
            kept = {part: size or 0 for part, size in parts.items() if "passes" not in part}
            passes = sum(size or 0 for part, size in parts.items() if "passes" in part) / GB
            process_text = (
                f"{process_gb:.3f}, planned with passes {sum(kept.values()) / GB + passes:.3f}"
            )
            row(kind, found.tensors[kind], sum(kept.values()), process_text)
    row("broadcast", found.broadcast, plan.broadcast)
    row("object store, at most", found.store, sum(plan.store.values()))
    heads = ("", "measured, GB", "planned, GB", "measured / planned", "process, GB")
    totals = f"in {found.seconds / 60:.1f} minutes, at most {found.at_once / GB:.1f} GB at once"
    title = f"Measured and planned, {totals}"
    return Table(heads, rows, words=(0, 4), title=title), deviations


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse the models; return 0 if all sizes are within tolerance, 1 if not, 3 on failure."""
    parser = argparse.ArgumentParser(prog="python -m tools.rehearsal", description=about)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument(
        "--dir", default="runs/rehearsal", help=("directory for models and runs, which are kept")
    )
    parser.add_argument("--pixels", type=int, default=256)
    options = parser.parse_args(arguments)
    deviations: list[str] = []
    root = Path(options.dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    for name in options.models or MODELS:
        try:
            deviations += rehearse(name, root, options.pixels)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 3
    return 1 if deviations else 0


if __name__ == "__main__":
    raise SystemExit(main())
