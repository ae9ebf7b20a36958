"""``sol-rl export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.common import DONE, add_checkpoint, run_at

HELP = "write a LoRA that stock diffusers loads"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add its options."""
    sub.add_argument("run", help="a run directory")
    sub.add_argument("out", help="directory to write")
    sub.add_argument("--weights", choices=("ema", "current", "old"), default="ema")
    add_checkpoint(sub)


def run(options: argparse.Namespace) -> int:
    """Write the directory."""
    rundir, config = run_at(options.run)
    from cluster.driver.offline import export_run

    file = export_run(rundir, config, Path(options.out), options.weights, options.checkpoint)
    print(f"wrote {file}")
    return DONE
