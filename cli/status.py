"""Command ``sol-rl status``."""

from __future__ import annotations

import argparse

from cli.common import DONE, add_cluster, through_job

HELP = "show the state of a running job: actors, versions, progress, rates"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    sub.add_argument(
        "--run", metavar="NAME", help=("name of a run (default: all runs of the cluster)")
    )
    sub.add_argument(
        "--actors", action="store_true", help="a line per actor, also of services with many"
    )
    add_cluster(sub)


def run(options: argparse.Namespace) -> int:
    """Print the state of the runs of a cluster."""
    arguments = [
        *(["--run", options.run] if options.run else []),
        *(["--actors"] if options.actors else []),
    ]
    if (code := through_job(options.address, ["status", *arguments])) is not None:
        return code
    from cluster.jobs.live_runs import address_of, connected, run_states
    from cluster.jobs.status_text import status_lines
    from records.errors import RunFailed

    with connected(address_of(options.address)):
        for state in run_states(options.run).values():
            try:
                lines = status_lines(state, options.actors)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RunFailed(
                    f"run {state['run']!r} describes its state otherwise than this version of"
                    f" Sol-RL expects ({type(error).__name__}: {error}): ask with the version that"
                    " the run uses"
                ) from None
            print("\n".join(lines))
    return DONE
