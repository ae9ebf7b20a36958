"""Command ``sol-rl submit``."""

from __future__ import annotations

import argparse

from cli.common import DONE, STOPPED, add_config, add_resume, say, show

HELP = "train as a job on a Ray cluster"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(sub)
    sub.add_argument(
        "--address",
        metavar="URL",
        help=(
            "URL of the cluster's dashboard, http://HOST:8265 (default: RAY_API_SERVER_ADDRESS or"
            " RAY_ADDRESS)"
        ),
    )
    sub.add_argument(
        "--follow",
        action="store_true",
        help=(
            "show the job's log until it ends; the exit code is that of the run, or 4 if the"
            " dashboard no longer answers"
        ),
    )
    add_resume(sub)


def run(options: argparse.Namespace) -> int:
    """Submit the job, and follow it with ``--follow``."""
    from cluster.jobs.job_log import follow
    from cluster.jobs.submit import submit

    client, job = submit(options.config, options.overrides, options.address, options.resume)
    address_option = f" --address {options.address}" if options.address else ""
    stop = f"after a checkpoint: ray job stop{address_option} {job}"
    print(f"submitted: {job}", flush=True)
    if not options.follow:
        print(f"follow: ray job logs{address_option} --follow {job}\nto stop it {stop}")
        return DONE
    try:
        return follow(client, job, show, say)
    except KeyboardInterrupt:
        say(f"the job continues; to stop it {stop}")
        return STOPPED
