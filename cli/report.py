"""Command ``sol-rl report``."""

from __future__ import annotations

import argparse

from cli.common import DONE, open_run
from configs.load import ConfigError
from records import lock
from records.errors import error_summary

HELP = "write report.html of a run again, from the files in its directory"


def declare(sub: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    sub.add_argument("run", help="a run directory")


def run(options: argparse.Namespace) -> int:
    """Write the report and print its path."""
    rundir, config = open_run(options.run)
    from analysis.report.page import build_report

    try:
        # a live run's page keeps refreshing, so that one that is open in a browser follows the run
        live = lock.is_locked(rundir.lock_file) and config.logging.report_every_s
        file = build_report(rundir.path, live_s=live or None)
    except OSError as error:
        page = rundir.path / "report.html"
        raise ConfigError(f"{page}: cannot be written ({error.strerror or error})") from None
    except Exception as error:  # a record that no run writes; the run itself is not affected
        raise ConfigError(
            f"{rundir.path}: the report cannot be drawn from its files"
            f" ({error_summary(error, 200)})"
        ) from None
    print(f"report: {file}")
    return DONE
