"""Command ``sol-rl scale``."""

from __future__ import annotations

import argparse

from cli.common import DONE, add_cluster, through_job
from configs.load import ConfigError
from configs.services import SCALABLE

HELP = "grow or shrink the pools of a running job; the learner is not disturbed"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    for kind in SCALABLE:
        sub.add_argument(f"--{kind}", type=int, metavar="N", help=f"{kind} actors")
    sub.add_argument("--run", metavar="NAME", help="name of the run, if several are active")
    add_cluster(sub)


def run(options: argparse.Namespace) -> int:
    """Request new pool sizes from a run."""
    sizes = {kind: size for kind in SCALABLE if (size := getattr(options, kind)) is not None}
    if not sizes or min(sizes.values()) < 1:
        raise ConfigError("scale: give --rollout N or --reward N, at least 1")
    arguments = [part for kind, size in sizes.items() for part in (f"--{kind}", str(size))]
    arguments += ["--run", options.run] if options.run else []
    if (code := through_job(options.address, ["scale", *arguments])) is not None:
        return code
    from cluster.jobs.live_runs import address_of, connected, scale

    with connected(address_of(options.address)):
        print(scale(options.run, sizes))
    return DONE
