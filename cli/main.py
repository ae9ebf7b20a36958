"""The command line: parse arguments, run the command, and map errors to exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol

from cli.common import DONE, STOPPED, USER_ERROR
from configs.load import ConfigError
from records.errors import RUN_FAILED, RunFailed, Stopped
from records.output import open_closed_streams, redirect_broken_streams, replace_unencodable

COMMANDS = (
    "train",
    "submit",
    "status",
    "scale",
    "config",
    "plan",
    "doctor",
    "evaluate",
    "export",
    "fidelity",
    "signal",
    "tune",
    "compare",
    "report",
)
"""Commands, each a module of this package.

So that help and errors appear at once, a module checks its options and the configuration before it
imports anything that needs torch or ray.
"""


class Command(Protocol):
    """Interface of a command's module, which imports neither torch nor ray at import time."""

    HELP: str

    def declare(self, sub: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command; return the exit code."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0: done; 2: the configuration or the command is wrong; 3: the run failed; 4: the dashboard of a
    job that is followed no longer answers; 130: stopped.
    """
    open_closed_streams()
    replace_unencodable()
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(options, unknown)}")
    options.own_process = arguments is None  # else the process is a test's or another program's
    code = _exit_code(options.command, options)
    # otherwise Python would fail to flush the closed streams at exit, and change the exit code
    redirect_broken_streams()
    return code


def _hint(options: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Return advice for a setting that was given as in other programs, without ``--set``."""
    settings = [each.lstrip("-") for each in unknown if "=" in each]
    if not settings or "overrides" not in options:
        return ""
    return f": settings are given as --set {settings[0]}"


def _exit_code(command: Command, options: argparse.Namespace) -> int:
    try:
        return command.run(options)
    except ConfigError as error:
        return _report(USER_ERROR, str(error))
    except RunFailed as error:
        return _report(RUN_FAILED, f"run failed: {error}")
    except (Stopped, KeyboardInterrupt) as error:
        return _report(STOPPED, str(error) or "stopped")
    except OSError as error:
        # only output was left to do, and its reader has closed the stream
        if error.errno in (errno.EPIPE, errno.EIO) and redirect_broken_streams():
            return DONE
        raise


def _report(code: int, why: str) -> int:
    """Print ``why`` unless the terminal was closed; return ``code``."""
    with contextlib.suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sol-rl",
        description="RL for text-to-image and text-to-video diffusion models on Ray: explore in 4"
        " bits, train in full precision",
    )
    subs = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        command: Command = importlib.import_module(f"cli.{name}")  # type: ignore[assignment]
        sub = subs.add_parser(name, help=command.HELP, description=command.HELP)
        sub.set_defaults(command=command)
        command.declare(sub)
    return parser
