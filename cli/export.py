"""Command ``sol-rl export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.common import DONE, add_checkpoint, open_run
from configs.load import ConfigError

HELP = "write a LoRA that stock diffusers loads, and its model card"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    sub.add_argument("run", help="a run directory")
    sub.add_argument("out", help="directory to write")
    sub.add_argument("--weights", choices=("ema", "current", "old"), default="ema")
    add_checkpoint(sub)
    declared = "license that the model card declares (default: that of the base model's card)"
    sub.add_argument("--licence", "--license", metavar="NAME", help=declared)
    hub = "push the directory to this repository on the hub"
    sub.add_argument("--push", metavar="OWNER/NAME", help=hub)
    sub.add_argument("--private", action="store_true", help="make the repository private")


def run(options: argparse.Namespace) -> int:
    """Write the LoRA and its model card, and push them with ``--push``."""
    rundir, config = open_run(options.run)
    from analysis.card import Export, write_card
    from analysis.hub import check_hub, push
    from cluster.driver.offline import export_run
    from learner.checkpoint import find, step_of

    if options.private and not options.push:
        raise ConfigError("--private needs --push OWNER/NAME")
    if options.push:
        check_hub(options.push)
    out, step = Path(options.out), step_of(find(rundir, options.checkpoint))
    files = export_run(rundir, config, out, options.weights, step)
    export = Export(options.weights, step, options.push or ".", files)
    try:
        write_card(out, rundir.path, config, export, options.licence)
    except OSError as error:
        raise ConfigError(
            f"{out}: the card cannot be written ({error.strerror or error}): give another directory"
        ) from None
    print(f"wrote {out}")
    if options.push:
        print(f"pushed {push(out, options.push, options.private)}")
    return DONE
