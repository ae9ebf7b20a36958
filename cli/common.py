"""Exit codes, options and helpers that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.load import ConfigError
from configs.schema import RunConfig

if TYPE_CHECKING:
    from records.rundir import RunDirectory

DONE, USER_ERROR, STOPPED = 0, 2, 130
RESUME, AUTO_RESUME = "--resume", "--auto-resume"


def add_config(
    sub: argparse.ArgumentParser, required: bool = True, what: str = "a preset name or a TOML file"
) -> None:
    """Add the configuration and ``--set``."""
    sub.add_argument("config", nargs=None if required else "?", help=what)
    add_overrides(sub)


def add_overrides(sub: argparse.ArgumentParser, what: str = "override one value") -> None:
    """Add ``--set``."""
    sub.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="a.b=c", help=what
    )


def add_measuring(sub: argparse.ArgumentParser, out: str = "directory to write") -> None:
    """Add ``--threads`` and ``--out``, for commands that measure in their own process."""
    text = "CPU threads (default: those of the configuration's rollout actors)"
    sub.add_argument("--threads", type=int, help=text)
    sub.add_argument("--out", metavar="DIR", help=f"{out} (default: next to the run directories)")


def add_resume(sub: argparse.ArgumentParser) -> None:
    """Add ``--resume`` and ``--auto-resume``; both set ``resume``, which else is None."""
    choice = sub.add_mutually_exclusive_group()
    text = "continue the run of this name from its last checkpoint"
    choice.add_argument("--resume", action="store_const", const=RESUME, help=text)
    text = "the same if there is such a run, else start it: for what starts a failed job again"
    choice.add_argument(
        "--auto-resume", dest="resume", action="store_const", const=AUTO_RESUME, help=text
    )


def add_cluster(sub: argparse.ArgumentParser) -> None:
    """Add ``--address``, for commands that connect to a running cluster."""
    where = (
        "host:port of the cluster's head, or its dashboard's URL (default: RAY_ADDRESS, or the"
        " cluster on this machine)"
    )
    sub.add_argument("--address", metavar="URL", help=where)


def add_checkpoint(sub: argparse.ArgumentParser, of: str = "a checkpoint of the run") -> None:
    """Add ``--checkpoint``."""
    text = f"{of} (default: the last one)"
    sub.add_argument("--checkpoint", type=int, metavar="STEP", help=text)


def open_run(path: str) -> tuple[RunDirectory, RunConfig]:
    """Return a run directory and its configuration. Raises ConfigError if there is none."""
    from records.rundir import RunDirectory

    rundir = RunDirectory(Path(path).absolute())
    return rundir, rundir.configuration()


def address_given(option: str | None) -> str:
    """Return the cluster's address from the option or RAY_ADDRESS; empty if neither is set."""
    return option or os.environ.get("RAY_ADDRESS", "")


def is_dashboard(address: str) -> bool:
    """Return True if an address is the URL of a dashboard, not the address of a cluster's head."""
    return address.startswith(("http://", "https://"))


def through_job(given: str | None, command: Sequence[str]) -> int | None:
    """Run ``command`` as a job if the address is that of a dashboard; return its exit code.

    Returns None if the caller can connect to the cluster itself.
    """
    address = address_given(given)
    if not is_dashboard(address):
        return None
    from cluster.jobs.dashboard import ask_through_job

    return ask_through_job(address, command, show, say)


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError for the first value of these options that is set and not above 0."""
    for name in names:
        option = getattr(options, name)
        for value in option if isinstance(option, list) else [option]:
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0")


def show(text: str) -> None:
    """Print output of a job as it arrives."""
    print(text, end="", flush=True)


def say(line: str) -> None:
    """Print a line for the user on stderr, as it is not part of the output."""
    print(line, file=sys.stderr, flush=True)
