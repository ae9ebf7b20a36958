"""Command ``sol-rl evaluate``."""

from __future__ import annotations

import argparse

from cli.common import DONE, add_checkpoint, open_run

HELP = "score held-out prompts with base, trained, sampling-policy and EMA weights"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    sub.add_argument("run", help="a run directory")
    add_checkpoint(sub)
    text = "score all prompts of this file (default: the held-out prompts of the run)"
    sub.add_argument("--prompts", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Print the scores of every set of weights."""
    from cluster.runtime import reexec

    if options.own_process:
        reexec.reexec()
    rundir, config = open_run(options.run)
    reexec.fork_template(config)
    from cluster.driver.offline import evaluate_run

    for line in evaluate_run(rundir, config, options.checkpoint, options.prompts):
        print(line)
    return DONE
