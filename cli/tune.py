"""Command ``sol-rl tune``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from cli.common import DONE, add_config, add_measuring, require_positive, say
from configs.load import ConfigError, load_tree, parse
from configs.schema import RunConfig

HELP = "find the exploring settings with the most contrast for their cost, and write them as TOML"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub)
    text = "maximum cost of a setting, relative to the cost of the configuration"
    sub.add_argument("--budget", type=float, default=1.0, metavar="B", help=text)
    text = "unit of costs: seconds on this machine, or operations"
    sub.add_argument("--by", choices=["seconds", "operations"], default="seconds", help=text)
    text = "with --by operations: number of quantized operations that count as one unquantized"
    sub.add_argument("--ratio", type=float, default=4.0, metavar="R", help=text)
    text = "number of training prompts, chosen by the run seed"
    sub.add_argument("--prompts", type=int, default=16, metavar="P", help=text)
    text = "number of measured seeds per prompt, the maximum size of a pool"
    sub.add_argument("--seeds", type=int, default=96, metavar="N", help=text)
    for name, text in (
        ("steps", "numbers of explore steps (default: 4 6 8)"),
        ("pools", "numbers of explored seeds per prompt (default: N/2, 3N/4 and N)"),
        ("keep", "numbers of kept seeds per prompt (default: that of the configuration)"),
        ("prune", "steps after which half of the pool could be dropped"),
    ):
        sub.add_argument(f"--{name}", type=int, nargs="+", metavar="K", help=text)
    text = "backends (precisions) of exploring (default: that of the configuration)"
    sub.add_argument("--backends", nargs="+", help=text)
    text = "further sizes of proxy images, such as 256x256"
    sub.add_argument("--sizes", nargs="+", metavar="HxW", help=text)
    add_measuring(sub)


def run(options: argparse.Namespace) -> int:
    """Measure, write the files and print the table."""
    tree = load_tree(options.config, options.overrides)
    config = parse(tree)
    counts = ("prompts", "seeds", "steps", "pools", "keep", "threads")
    require_positive(options, "budget", *counts)
    if not 1 <= options.ratio < math.inf:
        raise ConfigError(f"--ratio {options.ratio:g}: expected at least 1")
    sizes = [_size(text) for text in options.sizes or ()]
    out = Path(options.out or f"{Path(config.run_root or 'runs') / config.name}-tune")
    from analysis.tune.command import run
    from analysis.tune.rows import TuneOptions

    requested = TuneOptions(
        budget=options.budget,
        by=options.by,
        ratio=options.ratio,
        prompts=options.prompts,
        seeds=options.seeds,
        steps=tuple(options.steps or (4, 6, 8)),
        pools=tuple(options.pools or ()),
        keeps=tuple(options.keep or ()),
        backends=tuple(options.backends or ()),
        sizes=(_own_size(config), *sizes),
        prune=tuple(options.prune or ()),
        threads=options.threads,
    )
    for line in run(config, tree, requested, out, say):
        print(line)
    return DONE


def _own_size(config: RunConfig) -> tuple[int, int] | None:
    height, width = config.explore.height, config.explore.width
    return None if height is None or width is None else (height, width)


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ConfigError(f"--sizes {text}: expected HEIGHTxWIDTH, such as 256x256")
    return int(height), int(width)
