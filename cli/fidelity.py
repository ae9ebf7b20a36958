"""Command ``sol-rl fidelity``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.common import (
    DONE,
    add_checkpoint,
    add_config,
    add_measuring,
    open_run,
    require_positive,
    say,
)
from configs.load import ConfigError, load
from configs.resume import config_for_measurement

HELP = "measure how well proxy images rank seeds, by backend and explore steps"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub, required=False)
    sub.add_argument(
        "--run",
        metavar="DIR",
        help=(
            "measure the trained policy of this run, with its configuration; --set may change how"
            " it is measured"
        ),
    )
    add_checkpoint(sub, "with --run: a checkpoint")
    text = "number of training prompts, chosen by the run seed"
    sub.add_argument("--prompts", type=int, default=32, metavar="P", help=text)
    sub.add_argument("--seeds", type=int, default=96, metavar="N", help="seeds per prompt")
    text = "numbers of explore steps to measure"
    sub.add_argument("--steps", type=int, nargs="+", default=[2, 4, 6, 8], help=text)
    text = "backends (precisions) to measure"
    sub.add_argument("--backends", nargs="+", default=["emulated_nvfp4", "fp32"], help=text)
    text = (
        "merged: packed weights with the adapter merged; beside: the adapter on packed base"
        " weights; base: packed base weights only"
    )
    forms = ("merged", "beside", "base")
    sub.add_argument("--weights", nargs="+", choices=forms, default=["merged"], help=text)
    add_measuring(sub)


def run(options: argparse.Namespace) -> int:
    """Measure, write the files and print the tables."""
    if (options.config is None) == (options.run is None):
        raise ConfigError(
            "fidelity: give a preset name or a TOML file, or --run DIR, which uses the"
            " configuration of that run"
        )
    if options.checkpoint is not None and options.run is None:
        raise ConfigError(
            f"fidelity: --checkpoint {options.checkpoint} needs --run DIR, not a configuration"
        )
    require_positive(options, "prompts", "steps", "threads")
    rundir = None
    if options.run is not None:
        rundir, config = open_run(options.run)
        config = config_for_measurement(config, options.overrides)
    else:
        config = load(options.config, options.overrides)
    beside = rundir.path if rundir else Path(config.run_root or "runs") / config.name
    out = Path(options.out or f"{beside}-fidelity")
    from analysis.fidelity.measure import run
    from analysis.fidelity.results import Measurement
    from learner.checkpoint import find

    requested = Measurement(
        prompts=options.prompts,
        seeds=options.seeds,
        steps=tuple(options.steps),
        backends=tuple(options.backends),
        threads=options.threads,
        checkpoint=find(rundir, options.checkpoint) if rundir else None,
        weights=tuple(dict.fromkeys(options.weights)),
    )
    for line in run(config, requested, out, say):
        print(line)
    return DONE
