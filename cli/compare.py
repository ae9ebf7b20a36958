"""Command ``sol-rl compare``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.common import DONE, add_config
from configs.load import ConfigError

HELP = "train arms and objectives on equal prompts and seeds: tables with error bars, curves"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = "a preset, a TOML file, or a comparison: a TOML file that lists its cells"
    add_config(sub, required=False, what=what)
    for name, metavar, text in (
        ("arms", "A,B", "arms (default: that of the configuration)"),
        ("objectives", "X,Y", "objectives (default: that of the configuration)"),
        ("baseline", "CELL", "cell with which the others are compared (default: the first)"),
        (
            "out",
            "DIR",
            "directory of the runs and the report (default: NAME-compare under run_root)",
        ),
    ):
        sub.add_argument(f"--{name}", metavar=metavar, help=text)
    text = "number of run seeds per cell (default: that of the comparison file, or 1)"
    sub.add_argument("--seeds", type=int, metavar="N", help=text)
    text = "one cell for each value, or for each combination of values if repeated"
    sub.add_argument("--vary", action="append", default=[], metavar="a.b=v,w", help=text)
    text = (
        "also compare by operations, with R quantized operations counted as one unquantized, such"
        " as 4,2,1 (default: the ratios of the comparison file)"
    )
    sub.add_argument("--operations", metavar="R,S", help=text)
    text = "compare these run directories instead of training"
    sub.add_argument("--runs", nargs="+", metavar="DIR", help=text)


def run(options: argparse.Namespace) -> int:
    """Run the cells, or read the runs of ``--runs``, and print the tables."""
    only_new = [options.config, options.arms, options.objectives, options.seeds]
    run_options = [*only_new, *options.overrides, *options.vary]
    if bool(options.runs) == (options.config is not None) or (
        options.runs and any(each is not None for each in run_options)
    ):
        raise ConfigError(
            "compare: give a preset, a TOML file or a comparison; or --runs DIR ... alone, with"
            " --baseline, --operations and --out"
        )
    from analysis.compare.command import compare, compare_existing
    from analysis.compare.request import Request

    out = Path(options.out) if options.out else None
    ratios = _numbers(options.operations)
    if options.runs:
        paths = [Path(run) for run in options.runs]
        text = compare_existing(paths, options.baseline, out, ratios)
    else:
        request = Request(
            source=options.config,
            arms=_words(options.arms),
            objectives=_words(options.objectives),
            seeds=options.seeds,
            overrides=tuple(options.overrides),
            vary=tuple(options.vary),
            baseline=options.baseline,
            operations=ratios,
        )
        text = compare(request, out, lambda line: print(line, flush=True))
    print("\n".join(text))
    return DONE


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _words(text))
    except ValueError:
        raise ConfigError(f"--operations {text}: expected numbers, such as 4,2,1") from None


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()
