"""Command ``sol-rl signal``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.common import DONE, add_config, add_measuring, require_positive, say
from configs.load import ConfigError, load
from learner.selection import RULES

HELP = "measure how much signal a gradient has, by objective, selection rule, precision and steps"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub)
    sub.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="NAME[,KEY=VALUE...]",
        help=(
            "an objective with settings of [objective], such as flow_grpo,window.size=3; may be"
            " repeated (default: that of the configuration)"
        ),
    )
    text = "number of explored seeds per prompt; with selection.keep seeds, nothing is selected"
    sub.add_argument("--pools", type=int, nargs="+", metavar="N", help=text)
    text = "selection rules"
    sub.add_argument("--rules", nargs="+", default=["best_worst"], choices=RULES, help=text)
    text = "backends (precisions) of exploring (default: that of the configuration)"
    sub.add_argument("--backends", nargs="+", help=text)
    sub.add_argument("--steps", type=int, nargs="+", help="number of explore steps")
    sub.add_argument(
        "--prompts", type=int, default=4, metavar="P", help=("number of prompts per batch")
    )
    text = "number of independent batches, at least 3"
    sub.add_argument("--batches", type=int, default=8, metavar="B", help=text)
    add_measuring(sub, "directory to write, or to continue")


def run(options: argparse.Namespace) -> int:
    """Measure, write the files and print the table."""
    config = load(options.config, options.overrides)
    require_positive(options, "prompts", "steps", "threads")
    if options.batches < 3:
        raise ConfigError(
            f"--batches {options.batches}: at least 3 are needed for a standard error"
        )
    out = Path(options.out or f"{Path(config.run_root or 'runs') / config.name}-signal")
    from analysis.signal.measure import Measurement, objectives_of, run

    requested = Measurement(
        objectives=objectives_of(config, options.objective),
        pools=tuple(options.pools or [config.selection.keep, config.explore.pool_size]),
        rules=tuple(options.rules),
        backends=tuple(options.backends or [config.explore.backend]),
        steps=tuple(options.steps or [config.explore.steps]),
        prompts=options.prompts,
        batches=options.batches,
        threads=options.threads,
    )
    for line in run(config, requested, out, say):
        print(line)
    return DONE
