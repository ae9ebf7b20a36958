"""``make rehearsal``: writes the pipelines, runs them, prints the tables."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from analysis.compare.table import lines
from configs.schema import RunConfig
from planning.make import make_plan
from planning.object_store import store_size
from records.errors import RunFailed
from tools.rehearsal import __doc__ as about
from tools.rehearsal.measuring import Watch
from tools.rehearsal.pipeline import config_of, write_pipeline
from tools.rehearsal.table import table

MODELS = ("sana-1.6b", "sd3.5-medium")


def rehearse(name: str, root: Path, pixels: int) -> list[str]:
    """Run it, print the table; lines about what the plan has wrong. Raises RunFailed."""
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
    ray.init(
        "local",
        num_cpus=8,
        object_store_memory=max(10**9, store_size(sum(plan.store.values()))),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    watch = Watch(config)
    watch.start()
    try:
        run_here(config, train)
    finally:
        watch.ended.set()
    watch.found.seconds = time.monotonic() - start
    if watch.trouble:
        print(f"trouble: {watch.trouble}", file=sys.stderr)
    found, off = table(plan, watch.found)
    print("\n".join(lines([found], off)), flush=True)
    numbers = {"measured": asdict(watch.found), "memory": plan.memory, "store": plan.store}
    (root / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    return off


def run_here(config: RunConfig, train: Callable[..., object]) -> None:
    """``train`` on the Ray that is there, whose object store has the size that the plan says."""
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    real, ray.init = ray.init, lambda *given, **named: None  # it is there
    try:
        train(config, resume=False)
    finally:
        ray.init = real
        del os.environ["RAY_ADDRESS"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything is within the tolerance, 1 when not, 3 when the run failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.rehearsal", description=about)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--dir", default="runs/rehearsal", help="models and runs, kept")
    parser.add_argument("--pixels", type=int, default=256)
    options = parser.parse_args(arguments)
    off: list[str] = []
    root = Path(options.dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    for name in options.models or MODELS:
        try:
            off += rehearse(name, root, options.pixels)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 3
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
